// What the border costs, on a scripted engine: nanoseconds per call, medians over rounds.
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <time.h>

enum { ROUNDS = 31 };

static double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return (left > right) - (left < right);
}

static double median(double *values, size_t count) {
  qsort(values, count, sizeof *values, ascending);
  return values[count / 2];
}

static void calls(hob_pool *pool, hob_cancel_token *token) {
  double plain[ROUNDS], handle[ROUNDS], status[ROUNDS], use[ROUNDS];
  enum { CALLS = 20000 };
  for (int round = 0; round < ROUNDS; round++) {
    double start = now_ns();
    for (int i = 0; i < CALLS; i++) hob_abi_version();
    plain[round] = (now_ns() - start) / CALLS;
    start = now_ns();
    for (int i = 0; i < CALLS; i++) hob_cancel_token_reason(token);
    handle[round] = (now_ns() - start) / CALLS;
    start = now_ns();
    for (int i = 0; i < CALLS; i++) hob_abi_check(HOB_ABI_VERSION, NULL);
    status[round] = (now_ns() - start) / CALLS;
    start = now_ns();
    for (int i = 0; i < CALLS; i++) {
      uint64_t use_token;
      hob_pool_begin_use(pool, "embedder:embed", 14, &use_token, NULL);
      hob_pool_end_use(pool, use_token, NULL);
    }
    use[round] = (now_ns() - start) / CALLS;
  }
  printf("a call without a handle          %8.1f ns\n", median(plain, ROUNDS));
  printf("a call on a handle               %8.1f ns\n", median(handle, ROUNDS));
  printf("a call with a status             %8.1f ns\n", median(status, ROUNDS));
  printf("begin_use and end_use of a hit   %8.1f ns\n", median(use, ROUNDS));
}

static void tokens(hob_engine *engine) {
  static double each[64 * ROUNDS];
  size_t count = 0;
  for (int round = 0; round < ROUNDS; round++) {
    hob_generate_options options = say("long");
    hob_stream *stream = NULL;
    OK(hob_engine_generate(engine, &options, &stream, &error));
    hob_event event = HOB_EVENT_INIT;
    OK(hob_stream_next(stream, -1, &event, &error));
    // The model has no use left once its answer is whole: what remains is ready.
    uint64_t token = 0;
    while (hob_engine_availability(engine) != HOB_AVAILABILITY_READY) token++;
    for (;;) {
      double start = now_ns();
      hob_status status = hob_stream_next(stream, 0, &event, NULL);
      double took = now_ns() - start;
      if (status != HOB_OK || event.kind != HOB_EVENT_CHUNK) break;
      if (count < sizeof each / sizeof *each) each[count++] = took;
    }
    hob_stream_free(stream);
  }
  CHECK(count > 100);
  printf("stream_next of a ready token     %8.1f ns (two clock readings included)\n", median(each, count));
}

static void views(hob_engine *engine) {
  static hob_str texts[1000];
  hob_str text = HOB_STR("a");
  for (size_t i = 0; i < 1000; i++) texts[i] = text;
  hob_embed_options options = HOB_EMBED_OPTIONS_INIT;
  options.model = "embed";
  options.texts = texts;
  options.text_count = 1000;
  hob_buffer *vectors = NULL;
  OK(hob_engine_embed(engine, &options, &vectors, NULL, &error));
  size_t rows = 0, dimensions = 0;
  const float *data = hob_buffer_floats(vectors, &rows, &dimensions);
  double start = now_ns();
  for (int i = 0; i < 1000; i++) hob_buffer_floats(vectors, &rows, &dimensions);
  double took = (now_ns() - start) / 1000;
  CHECK(rows == 1000 && dimensions == 384 && data == hob_buffer_floats(vectors, NULL, NULL));
  printf("a view of 1,000 x 384 floats     %8.1f ns (the same memory each time)\n", took);
  hob_buffer_release(vectors);
}

int main(void) {
  hob_engine *engine = NULL;
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.budget_bytes = 4000;
  const char *models =
      "[{\"name\": \"long\", \"kind\": \"chat\", \"bytes\": 9, \"reply\": \"The quick brown fox jumps over the lazy dog, again.\"},"
      " {\"name\": \"embed\", \"kind\": \"embedder\", \"bytes\": 9, \"dimensions\": 384}]";
  OK(hob_engine_open_fake(models, HOB_NUL_TERMINATED, &options, &engine, &error));
  hob_pool *pool = hob_engine_pool(engine);
  hob_cancel_token *token = hob_cancel_token_new();
  views(engine);
  calls(pool, token);
  tokens(engine);
  hob_cancel_token_release(token);
  hob_pool_release(pool);
  hob_engine_release(engine);
  return 0;
}
