// Options of other versions of the header, and values that are never valid.
#include "check.h"

// What a program compiled with a newer header passes.
typedef struct {
  hob_engine_options known;
  uint64_t later;
} newer_engine_options;

static void a_newer_header_is_served_while_its_fields_are_unset(void) {
  newer_engine_options options;
  memset(&options, 0, sizeof options);
  options.known = (hob_engine_options)HOB_ENGINE_OPTIONS_INIT;
  options.known.struct_size = (uint32_t)sizeof options;
  hob_engine *engine = NULL;
  OK(hob_engine_open_fake("[]", 2, &options.known, &engine, &error));
  hob_engine_release(engine);
  options.later = 1;
  EXPECT(HOB_UNSUPPORTED, hob_engine_open_fake("[]", 2, &options.known, &engine, &error));
  CHECK(engine == NULL);
}

static void an_older_header_gets_the_defaults_of_what_it_lacks(void) {
  // Everything after the first fields is garbage that must not be looked at.
  hob_engine_options options;
  memset(&options, 0xA5, sizeof options);
  options.struct_size = 16;
  options.idle = HOB_IDLE_NEVER;
  options.idle_seconds = 0;
  options.no_room = HOB_NO_ROOM_REFUSE;
  hob_engine *engine = NULL;
  OK(hob_engine_open_fake(FAKE_MODELS, HOB_NUL_TERMINATED, &options, &engine, &error));
  // The default capacity serves.
  hob_generate_options say_hi = say("chat");
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &say_hi, &stream, &error));
  // An event struct of an older header is filled as far as it goes.
  struct { hob_event event; } room;
  memset(&room, 0x5A, sizeof room);
  room.event.struct_size = (uint32_t)offsetof(hob_event, reasoning);
  hob_status status = hob_stream_next(stream, -1, &room.event, NULL);
  CHECK(status == HOB_OK && room.event.kind == HOB_EVENT_CHUNK && room.event.text_len > 0);
  CHECK(room.event.reasoning_len == (size_t)0x5A5A5A5A5A5A5A5A);
  hob_stream_free(stream);
  hob_engine_release(engine);
}

static void sizes_that_cannot_be_are_refused(void) {
  const uint32_t sizes[] = {0, 4, 9, 12, 1u << 20, UINT32_MAX};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
    options.struct_size = sizes[i];
    hob_engine *engine = NULL;
    EXPECT(HOB_INVALID_ARGUMENT, hob_engine_open_fake("[]", 2, &options, &engine, &error));
  }
}

static void values_that_are_never_valid_are_refused(void) {
  hob_engine *engine = NULL;
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.capacity = 0;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_open_fake("[]", 2, &options, &engine, &error));
  options = (hob_engine_options)HOB_ENGINE_OPTIONS_INIT;
  options.idle = 77;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_open_fake("[]", 2, &options, &engine, &error));
  options = (hob_engine_options)HOB_ENGINE_OPTIONS_INIT;
  options.limits_json = "{\"message\": 5}";
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_open_fake("[]", 2, &options, &engine, &error));
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_open_fake("[{}]", 4, NULL, &engine, &error));
  options.limits_json = "{\"messages\": 1}";
  OK(hob_engine_open_fake(FAKE_MODELS, HOB_NUL_TERMINATED, &options, &engine, &error));

  hob_stream *stream = NULL;
  hob_generate_options generate = say("chat");
  generate.messages_json = "[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"user\", \"content\": \"b\"}]";
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  generate = say("chat");
  generate.prompt = "both";
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  generate = say("chat");
  generate.messages_json = "{";
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  generate = say("chat");
  generate.render_json = "{\"tool\": 1}";
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  generate = say("chat");
  generate.top_p = 0;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  generate = say("chat");
  generate.logprobs = 101;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  generate = say("chat");
  generate.prompt_cache = 2;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  CHECK(stream == NULL);
  hob_engine_release(engine);
}

static void messages_name_the_value_and_never_the_text(void) {
  hob_engine *engine = open_fake();
  hob_generate_options generate = say("chat");
  generate.messages_json = "[{\"role\": \"user\", \"kumquat\"";
  hob_stream *stream = NULL;
  hob_error *failure = NULL;
  CHECK(hob_engine_generate(engine, &generate, &stream, &failure) == HOB_INVALID_ARGUMENT);
  CHECK(strcmp(hob_error_name(failure), "InvalidArgument") == 0 && !strstr(hob_error_message(failure), "kumquat"));
  hob_error_free(failure);
  CHECK(strcmp(hob_error_message(NULL), "") == 0 && hob_error_status(NULL) == 0);
  // No error object asked for.
  CHECK(hob_engine_generate(engine, &generate, &stream, NULL) == HOB_INVALID_ARGUMENT);
  hob_engine_release(engine);
}

static void versions_are_told(void) {
  char text[32];
  snprintf(text, sizeof text, "%d.%d.%d", HOB_VERSION_MAJOR, HOB_VERSION_MINOR, HOB_VERSION_PATCH);
  CHECK(strcmp(hob_version(), text) == 0 && hob_abi_version() == HOB_ABI_VERSION);
  OK(hob_abi_check(HOB_ABI_VERSION, &error));
  EXPECT(HOB_UNSUPPORTED, hob_abi_check(HOB_ABI_VERSION + 1, &error));
}

int main(void) {
  TEST_CLEAN(a_newer_header_is_served_while_its_fields_are_unset);
  TEST_CLEAN(an_older_header_gets_the_defaults_of_what_it_lacks);
  TEST_CLEAN(sizes_that_cannot_be_are_refused);
  TEST_CLEAN(values_that_are_never_valid_are_refused);
  TEST_CLEAN(messages_name_the_value_and_never_the_text);
  TEST_CLEAN(versions_are_told);
  return 0;
}
