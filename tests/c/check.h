// The little that the tests share: named checks, and counting.
#ifndef HOB_TESTS_CHECK_H
#define HOB_TESTS_CHECK_H

#include <hob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);     \
      exit(1);                                                                    \
    }                                                                             \
  } while (0)

// The status of a call must be this one; the error, if there is one, is shown when it is not.
#define EXPECT(wanted, call)                                                                             \
  do {                                                                                                   \
    hob_error *error = NULL;                                                                             \
    hob_status got = (call);                                                                             \
    if (got != (wanted)) {                                                                               \
      fprintf(stderr, "%s:%d: %s gave %d: %s\n", __FILE__, __LINE__, #call, got, hob_error_message(error)); \
      exit(1);                                                                                           \
    }                                                                                                    \
    CHECK((got < 0) == (error != NULL));                                                                 \
    CHECK(hob_error_status(error) == (got < 0 ? got : 0));                                               \
    hob_error_free(error);                                                                               \
  } while (0)
#define OK(call) EXPECT(HOB_OK, call)

#define TEST(function)                              \
  do {                                              \
    function();                                     \
    printf("test " #function " ... ok\n");          \
    fflush(stdout);                                 \
  } while (0)

// Handles that are out, by kind: a message names those that should not be.
static inline int handles_out(void) {
  int64_t out = 0, of_kind;
  for (int32_t kind = 1; (of_kind = hob_live_handles_of(kind)) >= 0; kind++) {
    if (of_kind > 0) fprintf(stderr, "%d handles of kind %d are out\n", (int)of_kind, (int)kind);
    out += of_kind;
  }
  CHECK(out == hob_live_handles());
  return out != 0;
}

// Every test gives back what it took.
#define TEST_CLEAN(function)                        \
  do {                                              \
    function();                                     \
    CHECK(!handles_out());                          \
    printf("test " #function " ... ok\n");          \
    fflush(stdout);                                 \
  } while (0)

#define FAKE_MODELS                                                                                   \
  "[{\"name\": \"chat\", \"kind\": \"chat\", \"bytes\": 1000, \"reply\": \"Hello there\"},"             \
  " {\"name\": \"embed\", \"kind\": \"embedder\", \"bytes\": 500, \"dimensions\": 4},"                  \
  " {\"name\": \"rank\", \"kind\": \"reranker\", \"bytes\": 500}]"

static inline hob_engine *open_fake(void) {
  hob_engine *engine = NULL;
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.budget_bytes = 4000;
  options.prompt_cache_bytes = 0;
  OK(hob_engine_open_fake(FAKE_MODELS, HOB_NUL_TERMINATED, &options, &engine, &error));
  return engine;
}

static inline hob_generate_options say(const char *model) {
  hob_generate_options options = HOB_GENERATE_OPTIONS_INIT;
  options.model = model;
  options.messages_json = "[{\"role\": \"user\", \"content\": \"Hi\"}]";
  return options;
}

static inline void script(hob_engine *engine, int action, const char *point) {
  OK(hob_engine_fake_script(engine, action, point, HOB_NUL_TERMINATED, &error));
}

#endif
