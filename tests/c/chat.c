// Streams one answer to standard output. Arguments: a chat model, a question. Ctrl-C ends the answer with what there is, and the exit
// code is 130 then, as shells expect; else 0, 1 for an error, 2 for wrong usage.
#include <hob.h>
#include <signal.h>
#include <stdio.h>

static volatile sig_atomic_t interrupted;

static void interrupt(int number) {
  (void)number;
  interrupted = 1;  // a signal handler sets a flag; the loop below cancels
}

static int failed(hob_error *error) {
  fprintf(stderr, "%s: %s\n", hob_error_name(error), hob_error_message(error));
  hob_error_free(error);
  return 1;
}

// A JSON text around a question; 0 when it does not fit.
static int conversation(const char *question, char *json, size_t room) {
  int used = snprintf(json, room, "[{\"role\": \"user\", \"content\": \"");
  size_t at = (size_t)used;
  for (; *question; question++) {
    unsigned char byte = (unsigned char)*question;
    if (at + 16 > room) return 0;
    if (byte == '"' || byte == '\\' || byte < 0x20)
      at += (size_t)snprintf(json + at, room - at, "\\u%04x", byte);
    else
      json[at++] = (char)byte;
  }
  return snprintf(json + at, room - at, "\"}]") < (int)(room - at);
}

int main(int argc, char **argv) {
  char messages[8192];
  if (argc < 3 || !conversation(argv[2], messages, sizeof messages)) return fprintf(stderr, "usage: chat MODEL QUESTION\n"), 2;
  signal(SIGINT, interrupt);
  hob_error *error = NULL;
  hob_engine *engine = NULL;
  if (hob_engine_open(NULL, &engine, &error) != HOB_OK) return failed(error);

  hob_generate_options options = HOB_GENERATE_OPTIONS_INIT;
  options.model = argv[1];
  options.messages_json = messages;
  options.max_tokens = 256;
  hob_stream *stream = NULL;
  hob_status status = hob_engine_generate(engine, &options, &stream, &error);
  hob_event event = HOB_EVENT_INIT;
  while (status == HOB_OK || status == HOB_WOULD_BLOCK) {
    if (interrupted) hob_stream_stop(stream);
    status = hob_stream_next(stream, 100, &event, &error);
    if (status != HOB_OK) continue;
    if (event.kind == HOB_EVENT_CHUNK && event.text) {
      fputs(event.text, stdout);
      fflush(stdout);
    }
    if (event.kind == HOB_EVENT_FINISHED)
      fprintf(stderr, "\n%s, %d tokens, %.1f tokens/s\n", event.summary->finish == HOB_FINISH_CANCELLED ? "stopped" : "done",
              (int)event.summary->completion_tokens,
              event.summary->decode_s > 0 ? (double)event.summary->completion_tokens / event.summary->decode_s : 0.0);
  }
  int code = status != HOB_END ? failed(error) : interrupted ? 130 : 0;
  hob_stream_free(stream);
  hob_engine_release(engine);
  return code;
}
