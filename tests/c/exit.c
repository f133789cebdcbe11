// Ends with live handles and work under way (hazards B5, B6, B9, B13). Arguments: how to end (return, exit, quick), [a chat model].
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <unistd.h>

int main(int argc, char **argv) {
  CHECK(argc > 1);
  hob_engine *engine = NULL;
  if (argc > 2)
    OK(hob_engine_open(NULL, &engine, &error));
  else
    engine = open_fake();
  hob_pool *pool = hob_engine_pool(engine);
  hob_pool_events *events = hob_pool_subscribe(pool, 8);
  hob_cancel_token *token = hob_cancel_token_with_deadline(NULL, 100000);
  hob_generate_options options = say(argc > 2 ? argv[2] : "chat");
  options.max_tokens = 64;
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_event event = HOB_EVENT_INIT;
  OK(hob_stream_next(stream, -1, &event, &error));
  CHECK(events && token);
  if (strcmp(argv[1], "exit") == 0) exit(7);
  if (strcmp(argv[1], "quick") == 0) _exit(7);
  return 7;
}
