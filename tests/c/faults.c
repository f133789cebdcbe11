// Faults on either side of the border: panics inside Hob, handles of the wrong kind, callbacks that misbehave within their contract
// (hazards B8, B14, L9).
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>

static void *use_in_a_thread(void *engine) {
  hob_generate_options options = say("chat");
  hob_stream *stream = NULL;
  hob_status status = hob_engine_generate((hob_engine *)engine, &options, &stream, NULL);
  hob_stream_free(stream);
  return (void *)(intptr_t)status;
}

static void a_panic_stays_with_its_call_and_its_handle(void) {
  hob_engine *engine = open_fake(), *other = open_fake();
  hob_generate_options options = say("chat");
  hob_stream *stream = NULL, *second = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_event event = HOB_EVENT_INIT;

  // The stream's handle is refused from then on; the engine and a second stream do not notice.
  CHECK(hob_fake_panic_next(1) == 0 && hob_fake_panic_next(1) == 1);
  EXPECT(HOB_INTERNAL, hob_stream_next(stream, -1, &event, &error));
  EXPECT(HOB_INTERNAL, hob_stream_next(stream, -1, &event, &error));
  CHECK(event.kind == 0 && event.text == NULL);
  OK(hob_engine_generate(engine, &options, &second, &error));
  OK(hob_stream_next(second, -1, &event, &error));
  hob_stream_free(second);
  hob_stream_cancel(stream);
  hob_stream_free(stream);

  // A panic is asked for by a thread and meets no other.
  hob_fake_panic_next(1);
  pthread_t thread;
  void *status = NULL;
  CHECK(pthread_create(&thread, NULL, use_in_a_thread, engine) == 0 && pthread_join(thread, &status) == 0);
  CHECK((intptr_t)status == HOB_OK && hob_fake_panic_next(0) == 1);

  // The engine's handle is refused on every thread; another engine works; what is out keeps working and all can be given back.
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_pool *pool = hob_engine_pool(engine);
  hob_fake_panic_next(1);
  second = stream;
  EXPECT(HOB_INTERNAL, hob_engine_generate(engine, &options, &second, &error));
  hob_stream *none = NULL;
  EXPECT(HOB_INTERNAL, hob_engine_generate(engine, &options, &none, &error));
  CHECK(none == NULL);
  CHECK(pthread_create(&thread, NULL, use_in_a_thread, engine) == 0 && pthread_join(thread, &status) == 0);
  CHECK((intptr_t)status == HOB_INTERNAL);
  OK(hob_stream_next(stream, -1, &event, &error));
  OK(hob_engine_generate(other, &options, &none, &error));
  hob_stream_free(none);
  hob_stream_free(stream);
  hob_pool_release(pool);
  hob_engine_release(engine);
  hob_engine_release(other);
}

static void a_call_without_a_status_gives_nothing_after_a_panic(void) {
  hob_engine *engine = open_fake();
  hob_fake_panic_next(1);
  CHECK(hob_engine_pool(engine) == NULL);
  hob_fake_panic_next(1);
  CHECK(hob_engine_retain(engine) == NULL && hob_live_handles_of(HOB_HANDLE_ENGINE) == 1);
  hob_fake_panic_next(1);
  CHECK(hob_engine_availability(engine) == HOB_AVAILABILITY_CLOSED);
  // Nobody saw a fault of the engine itself.
  hob_pool *pool = hob_engine_pool(engine);
  CHECK(pool != NULL && hob_pool_budget(pool) == 4000);
  hob_pool_release(pool);
  hob_engine_release(engine);
}

static void faults_of_the_device_are_errors_of_the_request(void) {
  hob_engine *engine = open_fake();
  hob_generate_options options = say("chat");
  static const struct { int action; const char *point; hob_status status; } faults[] = {
      {HOB_FAKE_FAIL, "load", HOB_BACKEND},          {HOB_FAKE_OUT_OF_MEMORY, "load", HOB_OUT_OF_MEMORY},
      {HOB_FAKE_PANIC, "load", HOB_INTERNAL},        {HOB_FAKE_OUT_OF_MEMORY, "prefill", HOB_OUT_OF_MEMORY},
      {HOB_FAKE_OUT_OF_MEMORY, "step", HOB_OUT_OF_MEMORY}, {HOB_FAKE_PANIC, "step", HOB_INTERNAL},
  };
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
    script(engine, faults[i].action, faults[i].point);
    hob_stream *stream = NULL;
    OK(hob_engine_generate(engine, &options, &stream, &error));
    hob_event event = HOB_EVENT_INIT;
    hob_status status;
    while ((status = hob_stream_next(stream, -1, &event, NULL)) == HOB_OK) CHECK(event.kind == HOB_EVENT_CHUNK);
    CHECK(status == faults[i].status);
    EXPECT(HOB_END, hob_stream_next(stream, -1, &event, &error));
    hob_stream_free(stream);
  }
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_event event = HOB_EVENT_INIT;
  OK(hob_stream_next(stream, -1, &event, &error));
  hob_stream_free(stream);
  hob_engine_release(engine);
}

static void a_live_handle_of_another_kind_is_refused(void) {
  hob_engine *engine = open_fake();
  hob_pool *pool = hob_engine_pool(engine);
  hob_cancel_token *token = hob_cancel_token_new();
  // What a cast, or a language without types, may pass.
  void *wrong_engine = pool, *wrong_pool = engine, *wrong_stream = token, *wrong_token = pool;
  hob_generate_options options = say("chat");
  hob_stream *stream = NULL;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate((hob_engine *)wrong_engine, &options, &stream, &error));
  CHECK(stream == NULL);
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_set_budget((hob_pool *)wrong_pool, 100, &error));
  hob_event event = HOB_EVENT_INIT;
  EXPECT(HOB_INVALID_ARGUMENT, hob_stream_next((hob_stream *)wrong_stream, 0, &event, &error));
  CHECK(hob_cancel_token_cancel((hob_cancel_token *)wrong_token) == 0 && hob_cancel_token_reason(token) == HOB_OK);
  // In options too: a token that is none is not taken for "no token".
  hob_request_options request = HOB_REQUEST_OPTIONS_INIT;
  request.cancel = (hob_cancel_token *)wrong_token;
  options.request = &request;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &options, &stream, &error));
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_trim(pool, (hob_cancel_token *)wrong_token, NULL, &error));
  // Giving back, retaining and looking do nothing.
  CHECK(hob_engine_retain((hob_engine *)wrong_engine) == NULL);
  hob_engine_release((hob_engine *)wrong_engine);
  hob_stream_free((hob_stream *)wrong_stream);
  hob_pool_release((hob_pool *)wrong_pool);
  hob_error_free((hob_error *)wrong_engine);
  CHECK(hob_buffer_text((hob_buffer *)wrong_engine) == NULL && hob_error_status((hob_error *)wrong_pool) == 0);
  CHECK(hob_live_handles() == 3 && hob_pool_budget(pool) == 4000 && hob_engine_availability(engine) == HOB_AVAILABILITY_READY);
  hob_cancel_token_release(token);
  hob_pool_release(pool);
  hob_engine_release(engine);
}

// ---- what a callback may do, and what it may get wrong ----

typedef struct {
  hob_pool *pool;
  int loads, releases, drops;
} host;

static hob_status load_that_calls(void *user_data, const hob_load_context *context) {
  host *self = (host *)user_data;
  self->loads++;
  // The pool may be called from inside; values out of range are taken as they can be.
  hob_load_context_progress(context, -1.0f);
  hob_load_context_progress(context, 1e30f);
  hob_load_context_progress(context, 0.0f / 0.0f + 0.5f);
  hob_load_context_set_measured(context, UINT64_MAX);
  hob_load_context_set_measured(context, 10);
  uint64_t token = 0;
  if (hob_pool_begin_use(self->pool, "host:thing", HOB_NUL_TERMINATED, &token, NULL) != HOB_ABSENT) return -1;
  hob_buffer *status = NULL;
  if (hob_pool_status(self->pool, &status, NULL) != HOB_OK) return -1;
  hob_buffer_release(status);
  return HOB_OK;
}
static hob_status release_that_calls(void *user_data, uint64_t token) {
  host *self = (host *)user_data;
  self->releases++;
  return hob_pool_end_use(self->pool, token, NULL) == HOB_ABSENT ? 12345 : HOB_OK;  // a status that is no status of Hob's
}
static void drop_that_releases(void *user_data) {
  host *self = (host *)user_data;
  self->drops++;
  hob_pool_release(self->pool);  // the last count, from a thread of Hob's
  self->pool = NULL;
}

static hob_status positive(void *user_data, const hob_load_context *context) {
  (void)context;
  ((host *)user_data)->loads++;
  return HOB_WOULD_BLOCK;  // no error elsewhere, but not HOB_OK
}
static void drop_host(void *user_data) { ((host *)user_data)->drops++; }

static hob_admit_options admission(host *self, hob_load_fn load) {
  hob_admit_options options = HOB_ADMIT_OPTIONS_INIT;
  options.key = "host:thing", options.cost_bytes = 10;
  options.load = load, options.user_data = self, options.drop_user_data = drop_host;
  return options;
}

static hob_pool *new_pool(void) {
  hob_pool_options options = HOB_POOL_OPTIONS_INIT;
  options.budget_bytes = 100;
  hob_pool *pool = NULL;
  OK(hob_pool_new(&options, &pool, &error));
  return pool;
}

static void callbacks_may_call_the_pool_and_answer_oddly(void) {
  hob_pool *pool = new_pool();
  host self = {pool, 0, 0, 0};
  hob_admit_options options = admission(&self, load_that_calls);
  options.release = release_that_calls;
  OK(hob_pool_admit(pool, &options, NULL, &error));
  uint64_t freed = 0;
  EXPECT(HOB_CALLBACK, hob_pool_evict(pool, "host:thing", HOB_NUL_TERMINATED, 0, NULL, &freed, &error));
  CHECK(self.loads == 1 && self.releases == 1 && self.drops == 1);
  // Gone all the same.
  EXPECT(HOB_ABSENT, hob_pool_touch(pool, "host:thing", HOB_NUL_TERMINATED, &error));
  options = admission(&self, positive);
  EXPECT(HOB_CALLBACK, hob_pool_admit(pool, &options, NULL, &error));
  CHECK(self.drops == 2);
  // The last count of the pool goes within the callback of its own entry.
  options = admission(&self, load_that_calls);
  options.drop_user_data = drop_that_releases;
  OK(hob_pool_admit(pool, &options, NULL, &error));
  OK(hob_pool_close(pool, NULL, &error));
  CHECK(self.drops == 3 && self.pool == NULL);
}

static void what_was_lent_comes_back_from_every_refused_call(void) {
  hob_pool *pool = new_pool();
  host self = {pool, 0, 0, 0};
  hob_admit_options options = admission(&self, positive);
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_admit(NULL, &options, NULL, &error));
  CHECK(self.drops == 1);
  hob_fake_panic_next(1);
  EXPECT(HOB_INTERNAL, hob_pool_admit(pool, &options, NULL, &error));
  CHECK(self.drops == 2);
  EXPECT(HOB_INTERNAL, hob_pool_admit(pool, &options, NULL, &error));
  CHECK(self.drops == 3 && self.loads == 0);
  hob_pool_release(pool);

  struct { hob_admit_options known; uint64_t later; } newer = {admission(&self, positive), 1};
  newer.known.struct_size = (uint32_t)sizeof newer;
  pool = new_pool();
  EXPECT(HOB_UNSUPPORTED, hob_pool_admit(pool, &newer.known, NULL, &error));
  CHECK(self.drops == 4);
  hob_pool_release(pool);

  hob_pool_options pool_options = HOB_POOL_OPTIONS_INIT;
  pool_options.user_data = &self, pool_options.drop_user_data = drop_host;
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_new(&pool_options, &pool, &error));  // a budget of 0
  CHECK(self.drops == 5 && pool == NULL);
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_new(&pool_options, NULL, &error));
  CHECK(self.drops == 6);
  EXPECT(HOB_INVALID_ARGUMENT, hob_stream_set_waker(NULL, NULL, &self, drop_host, &error));
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_load(NULL, "chat", 4, NULL, NULL, &self, drop_host, NULL, &error));
  CHECK(self.drops == 8);
}

int main(void) {
  TEST_CLEAN(a_panic_stays_with_its_call_and_its_handle);
  TEST_CLEAN(a_call_without_a_status_gives_nothing_after_a_panic);
  TEST_CLEAN(faults_of_the_device_are_errors_of_the_request);
  TEST_CLEAN(a_live_handle_of_another_kind_is_refused);
  TEST_CLEAN(callbacks_may_call_the_pool_and_answer_oddly);
  TEST_CLEAN(what_was_lent_comes_back_from_every_refused_call);
  return 0;
}
