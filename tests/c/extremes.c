// Numbers at their ends, calls from inside callbacks, and handles that go away under a waiting thread.
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>

static hob_engine *open_models(const char *models, hob_engine_options options) {
  hob_engine *engine = NULL;
  OK(hob_engine_open_fake(models, HOB_NUL_TERMINATED, &options, &engine, &error));
  return engine;
}

static void times_and_counts_at_their_ends(void) {
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.budget_bytes = UINT64_MAX, options.prompt_cache_bytes = UINT64_MAX;
  options.close_timeout_ms = UINT64_MAX, options.stuck_after_ms = UINT64_MAX;
  options.queue = UINT32_MAX;
  hob_engine *engine = open_models(FAKE_MODELS, options);
  hob_generate_options generate = say("chat");
  hob_request_options request = HOB_REQUEST_OPTIONS_INIT;
  request.idle = HOB_IDLE_AFTER_SECONDS, request.idle_seconds = UINT32_MAX;
  generate.request = &request;
  generate.max_tokens = UINT64_MAX - 1, generate.coalesce_tokens = UINT32_MAX, generate.coalesce_ms = UINT32_MAX;
  generate.repetition_window = UINT32_MAX, generate.top_k = UINT32_MAX, generate.seed = UINT64_MAX, generate.has_seed = 1;
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &generate, &stream, &error));
  hob_event event = HOB_EVENT_INIT;
  hob_status status;
  size_t text = 0;
  while ((status = hob_stream_next(stream, INT64_MAX, &event, NULL)) == HOB_OK) text += event.kind == HOB_EVENT_CHUNK ? event.text_len : 0;
  CHECK(status == HOB_END && text == 11);
  EXPECT(HOB_END, hob_stream_next(stream, INT64_MIN, &event, &error));
  hob_stream_free(stream);
  generate.max_tokens = 0;
  hob_status none = hob_engine_generate(engine, &generate, &stream, NULL);
  while (none == HOB_OK) none = hob_stream_next(stream, -1, &event, NULL);
  CHECK(none == HOB_END || none == HOB_INVALID_ARGUMENT);
  hob_stream_free(stream);
  request.timeout_ms = UINT64_MAX;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &generate, &stream, &error));
  hob_cancel_token *token = hob_cancel_token_with_deadline(NULL, UINT64_MAX);
  CHECK(hob_cancel_token_reason(token) == HOB_OK);
  hob_cancel_token_release(token);
  OK(hob_engine_close(engine, NULL, &error));
  hob_engine_release(engine);
}

static void models_without_size(void) {
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.no_room = HOB_NO_ROOM_REFUSE;  // else a model that is too large for the budget is served alone
  hob_engine *engine = open_models(
      "[{\"name\": \"chat\", \"kind\": \"chat\", \"bytes\": 0, \"reply\": \"\", \"context\": 0, \"load_parts\": 0},"
      " {\"name\": \"zero\", \"kind\": \"embedder\", \"bytes\": 0, \"dimensions\": 1},"
      " {\"name\": \"huge\", \"kind\": \"embedder\", \"bytes\": 18446744073709551615}]", options);
  hob_generate_options generate = say("chat");
  hob_stream *stream = NULL;
  hob_status status = hob_engine_generate(engine, &generate, &stream, NULL);
  hob_event event = HOB_EVENT_INIT;
  while (status == HOB_OK) status = hob_stream_next(stream, -1, &event, NULL);
  CHECK(status == HOB_INVALID_ARGUMENT || status == HOB_END);
  hob_stream_free(stream);
  const hob_str texts[] = {HOB_STR("a")};
  hob_embed_options embed = HOB_EMBED_OPTIONS_INIT;
  embed.model = "zero", embed.texts = texts, embed.text_count = 1;
  hob_buffer *vectors = NULL;
  status = hob_engine_embed(engine, &embed, &vectors, NULL, NULL);
  CHECK(status != HOB_INTERNAL && (status == HOB_OK) == (vectors != NULL));
  hob_buffer_release(vectors);
  embed.model = "huge";
  EXPECT(HOB_BUDGET_EXCEEDED, hob_engine_embed(engine, &embed, &vectors, NULL, &error));
  hob_estimate estimate = HOB_ESTIMATE_INIT;
  OK(hob_engine_estimate(engine, "huge", 4, NULL, &estimate, &error));
  CHECK(estimate.total == UINT64_MAX);
  // More texts than memory can hold, by their number.
  embed.model = "zero", embed.text_count = SIZE_MAX;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_embed(engine, &embed, &vectors, NULL, &error));
  hob_engine_release(engine);
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_open_fake("[{\"name\": \"none\", \"kind\": \"embedder\", \"bytes\": 0, \"dimensions\": 0}]",
                                                    HOB_NUL_TERMINATED, &options, &engine, &error));
}

static hob_status load(void *user_data, const hob_load_context *context) {
  hob_load_context_set_measured(context, *(uint64_t *)user_data);
  return HOB_OK;
}

static void bytes_at_their_ends_stay_on_the_account(void) {
  hob_pool_options options = HOB_POOL_OPTIONS_INIT;
  options.budget_bytes = UINT64_MAX;
  hob_pool *pool = NULL;
  OK(hob_pool_new(&options, &pool, &error));
  hob_charge *one = hob_pool_charge(pool, UINT64_MAX), *two = hob_pool_charge(pool, UINT64_MAX);
  CHECK(!hob_pool_has_room(pool, 1) && !hob_pool_has_room(pool, UINT64_MAX));
  hob_charge_set(one, 0);
  CHECK(!hob_pool_has_room(pool, 1));
  hob_charge_set(one, UINT64_MAX);
  hob_charge_free(one);
  hob_charge_free(two);
  CHECK(hob_pool_has_room(pool, UINT64_MAX));
  uint64_t measured = UINT64_MAX;
  hob_admit_options admit = HOB_ADMIT_OPTIONS_INIT;
  admit.key = "host:big", admit.cost_bytes = UINT64_MAX, admit.timeout_ms = UINT64_MAX;
  admit.load = load, admit.user_data = &measured;
  OK(hob_pool_admit(pool, &admit, NULL, &error));
  admit.key = "host:small", admit.cost_bytes = 1;
  measured = 1;
  OK(hob_pool_admit(pool, &admit, NULL, &error));
  uint64_t freed = 7;
  EXPECT(HOB_NOT_FOUND, hob_pool_evict(pool, "host:big", HOB_NUL_TERMINATED, 0, NULL, &freed, &error));
  CHECK(freed == 0);
  size_t count = 0;
  OK(hob_pool_accelerate_idle(pool, UINT64_MAX, &count, &error));
  hob_pool_events *none = hob_pool_subscribe(pool, 0), *all = hob_pool_subscribe(pool, SIZE_MAX);
  OK(hob_pool_close(pool, NULL, &error));
  hob_buffer *event = NULL;
  hob_status status;
  int closed = 0;
  while ((status = hob_pool_events_next(all, -1, &event, NULL)) == HOB_OK) {
    closed |= strstr(hob_buffer_text(event), "closed") != NULL;
    hob_buffer_release(event);
  }
  CHECK(status == HOB_END && closed);
  while ((status = hob_pool_events_next(none, -1, &event, NULL)) == HOB_OK) hob_buffer_release(event);
  CHECK(status == HOB_END);
  hob_pool_events_free(none);
  hob_pool_events_free(all);
  hob_pool_release(pool);
}

// ---- from inside callbacks ----

static int32_t close_from_inside(void *user_data, float fraction) {
  (void)fraction;
  hob_engine **engine = (hob_engine **)user_data;
  if (*engine) {
    hob_engine_close(*engine, NULL, NULL);
    hob_engine_release(*engine);
    *engine = NULL;
  }
  return 0;
}

// "May call Hob": also to close and to give back the very engine that loads.
static void an_engine_is_closed_by_the_progress_of_its_load(void) {
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.close_timeout_ms = 500;
  hob_engine *engine = open_models(FAKE_MODELS, options), *own = hob_engine_retain(engine);
  hob_status status = hob_engine_load(engine, "chat", 4, NULL, close_from_inside, &own, NULL, NULL, NULL);
  CHECK(status == HOB_CLOSED || status == HOB_CANCELLED || status == HOB_OK);
  CHECK(own == NULL && hob_engine_availability(engine) == HOB_AVAILABILITY_CLOSED);
  hob_engine_release(engine);
}

// ---- under a waiting thread ----

static void *read_to_the_end(void *stream) {
  hob_event event = HOB_EVENT_INIT;
  hob_status status;
  do status = hob_stream_next((hob_stream *)stream, -1, &event, NULL);
  while (status == HOB_OK || status == HOB_BUSY);
  CHECK(event.text == NULL && event.summary == NULL);
  return (void *)(intptr_t)status;
}

static void a_stream_is_freed_while_another_thread_is_inside_next(void) {
  for (int round = 0; round < 20; round++) {
    hob_engine *engine = open_fake();
    script(engine, HOB_FAKE_HOLD, "prefill");
    hob_generate_options options = say("chat");
    hob_stream *stream = NULL;
    OK(hob_engine_generate(engine, &options, &stream, &error));
    pthread_t reader;
    CHECK(pthread_create(&reader, NULL, read_to_the_end, stream) == 0);
    // Refused: so the other one is inside, and stays there, for no token can come.
    hob_event event = HOB_EVENT_INIT;
    while (hob_stream_next(stream, 0, &event, NULL) != HOB_BUSY) {}
    hob_stream_free(stream);
    script(engine, HOB_FAKE_RELEASE, "prefill");
    void *status = NULL;
    CHECK(pthread_join(reader, &status) == 0);
    CHECK((intptr_t)status == HOB_CANCELLED || (intptr_t)status == HOB_END);
    hob_engine_release(engine);
  }
}

int main(void) {
  TEST_CLEAN(times_and_counts_at_their_ends);
  TEST_CLEAN(models_without_size);
  TEST_CLEAN(bytes_at_their_ends_stay_on_the_account);
  TEST_CLEAN(an_engine_is_closed_by_the_progress_of_its_load);
  TEST_CLEAN(a_stream_is_freed_while_another_thread_is_inside_next);
  return 0;
}
