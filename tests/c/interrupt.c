// chat.c on a scripted engine, and a SIGINT while its answer is under way: sent for real, when the device stands at a token.
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static hob_engine *scripted;
static pthread_t finger;

static void *press(void *engine) {
  script((hob_engine *)engine, HOB_FAKE_WAIT, "step");
  kill(getpid(), SIGINT);
  return NULL;
}

static hob_status open_scripted(const hob_engine_options *options, hob_engine **out_engine, hob_error **out_error) {
  (void)options, (void)out_error;
  *out_engine = open_fake();
  scripted = hob_engine_retain(*out_engine);
  // One token comes out; the next one is held until the stream was stopped.
  script(scripted, HOB_FAKE_HOLD, "step");
  CHECK(pthread_create(&finger, NULL, press, scripted) == 0);
  return HOB_OK;
}

static void stop_and_go_on(hob_stream *stream) {
  hob_stream_stop(stream);
  script(scripted, HOB_FAKE_RELEASE, "step");
}

#define hob_engine_open open_scripted
#define hob_stream_stop stop_and_go_on
#define main chat
#include "chat.c"
#undef main

int main(int argc, char **argv) {
  int code = chat(argc, argv);
  CHECK(pthread_join(finger, NULL) == 0);
  hob_engine_release(scripted);
  CHECK(!handles_out());
  return code;
}
