// Handles given back in any order, anywhere, at any time (hazards B1, B2, B4, B8, B9, B11, B14, B16), and streams.
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>

static hob_status drain(hob_stream *stream, char *text, size_t room, hob_summary *summary) {
  hob_event event = HOB_EVENT_INIT;
  hob_status status;
  size_t used = 0;
  while ((status = hob_stream_next(stream, -1, &event, NULL)) == HOB_OK) {
    if (event.kind == HOB_EVENT_CHUNK && event.text && text && used + event.text_len < room) {
      CHECK(strlen(event.text) == event.text_len);
      memcpy(text + used, event.text, event.text_len + 1);
      used += event.text_len;
    }
    if (event.kind == HOB_EVENT_FINISHED && summary) *summary = *event.summary;
  }
  return status;
}

static hob_stream *start(hob_engine *engine) {
  hob_generate_options options = say("chat");
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  return stream;
}

static void a_stream_gives_text_tokens_and_one_end(void) {
  hob_engine *engine = open_fake();
  hob_generate_options options = say("chat");
  options.logprobs = 3;
  options.max_tokens = 5;
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_event event = HOB_EVENT_INIT;
  size_t tokens = 0, finished = 0;
  hob_status status;
  while ((status = hob_stream_next(stream, -1, &event, NULL)) == HOB_OK) {
    CHECK(event.struct_size == sizeof event);
    if (event.kind == HOB_EVENT_CHUNK) {
      CHECK(event.logprob_count == event.token_count);
      for (size_t i = 0; i < event.token_count; i++) {
        CHECK(event.logprobs[i].token_id == event.token_ids[i] && event.logprobs[i].top_count <= 3);
        CHECK(event.logprobs[i].top_count == 0 || event.logprobs[i].top[0].logprob <= 0);
      }
      tokens += event.token_count;
    }
    if (event.kind == HOB_EVENT_FINISHED) {
      CHECK(event.summary->finish == HOB_FINISH_LENGTH && event.summary->completion_tokens == 5);
      CHECK(event.summary->stop_index == -1 && event.summary->struct_size >= sizeof *event.summary);
      finished++;
    }
  }
  CHECK(status == HOB_END && tokens == 5 && finished == 1);
  EXPECT(HOB_END, hob_stream_next(stream, -1, &event, &error));
  CHECK(event.kind == 0 && event.text == NULL);
  hob_stream_free(stream);
  hob_engine_release(engine);
}

static void an_error_ends_a_stream_once(void) {
  hob_engine *engine = open_fake();
  script(engine, HOB_FAKE_FAIL, "prefill");
  hob_stream *stream = start(engine);
  hob_event event = HOB_EVENT_INIT;
  EXPECT(HOB_BACKEND, hob_stream_next(stream, -1, &event, &error));
  EXPECT(HOB_END, hob_stream_next(stream, -1, &event, &error));
  hob_stream_free(stream);
  script(engine, HOB_FAKE_PANIC, "prefill");
  stream = start(engine);
  EXPECT(HOB_INTERNAL, hob_stream_next(stream, -1, &event, &error));
  hob_stream_free(stream);
  // Neither hurt the engine.
  stream = start(engine);
  char text[64] = "";
  CHECK(drain(stream, text, sizeof text, NULL) == HOB_END && strcmp(text, "Hello there") == 0);
  hob_stream_free(stream);
  hob_engine_release(engine);
}

static void cancel_and_stop_end_a_running_stream(void) {
  hob_engine *engine = open_fake();
  hob_event event = HOB_EVENT_INIT;
  hob_summary summary;
  memset(&summary, 0, sizeof summary);
  script(engine, HOB_FAKE_HOLD, "step");
  hob_stream *stream = start(engine);
  script(engine, HOB_FAKE_WAIT, "step");
  hob_stream_cancel(stream);
  hob_stream_cancel(stream);
  script(engine, HOB_FAKE_RELEASE, "step");
  CHECK(drain(stream, NULL, 0, NULL) == HOB_CANCELLED);
  EXPECT(HOB_END, hob_stream_next(stream, 0, &event, &error));
  hob_stream_free(stream);

  script(engine, HOB_FAKE_HOLD, "step");
  stream = start(engine);
  script(engine, HOB_FAKE_WAIT, "step");
  OK(hob_stream_next(stream, -1, &event, &error));  // the first token is there before the held step
  EXPECT(HOB_WOULD_BLOCK, hob_stream_next(stream, 0, &event, &error));
  EXPECT(HOB_WOULD_BLOCK, hob_stream_next(stream, 1, &event, &error));
  CHECK(hob_engine_availability(engine) == HOB_AVAILABILITY_WORKING);
  hob_stream_stop(stream);
  script(engine, HOB_FAKE_RELEASE, "step");
  CHECK(drain(stream, NULL, 0, &summary) == HOB_END && summary.finish == HOB_FINISH_CANCELLED);
  hob_stream_free(stream);

  // A token of the host's own; its child goes with it.
  hob_cancel_token *parent = hob_cancel_token_new(), *child = hob_cancel_token_child(parent);
  hob_request_options request = HOB_REQUEST_OPTIONS_INIT;
  request.cancel = child;
  hob_generate_options options = say("chat");
  options.request = &request;
  CHECK(hob_cancel_token_reason(child) == HOB_OK && hob_cancel_token_cancel(parent) == 1 && hob_cancel_token_cancel(parent) == 0);
  CHECK(hob_cancel_token_reason(child) == HOB_CANCELLED);
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_cancel_token_release(child);
  hob_cancel_token_release(parent);
  EXPECT(HOB_CANCELLED, hob_stream_next(stream, -1, &event, &error));
  hob_stream_free(stream);
  hob_engine_release(engine);
}

// Engine, pool, stream: every order of giving back, with the stream in each state.
static void every_order_of_three_frees(void) {
  static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  for (int order = 0; order < 6; order++) {
    for (int state = 0; state < 3; state++) {
      hob_engine *engine = open_fake();
      hob_pool *pool = hob_engine_pool(engine);
      hob_stream *stream = start(engine);
      hob_event event = HOB_EVENT_INIT;
      if (state == 1) OK(hob_stream_next(stream, -1, &event, &error));
      if (state == 2) CHECK(drain(stream, NULL, 0, NULL) == HOB_END);
      for (int i = 0; i < 3; i++) {
        if (orders[order][i] == 0) hob_engine_release(engine);
        if (orders[order][i] == 1) hob_pool_release(pool);
        if (orders[order][i] == 2) hob_stream_free(stream);
      }
      CHECK(hob_live_handles() == 0);
    }
  }
}

// Far more streams than places, each given back unread: no place is lost, and nothing waits (B1, B2).
static void streams_given_back_unread_give_their_places_back(void) {
  hob_engine *engine = open_fake();
  script(engine, HOB_FAKE_HOLD, "prefill");
  hob_stream *streams[72];  // 8 run, 64 wait
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < 72; i++) streams[i] = start(engine);
    hob_generate_options options = say("chat");
    hob_stream *one_more = NULL;
    EXPECT(HOB_BUSY, hob_engine_generate(engine, &options, &one_more, &error));
    CHECK(one_more == NULL && hob_engine_requests(engine) == 72);
    for (int i = 0; i < 72; i++) hob_stream_free(streams[i]);
    script(engine, HOB_FAKE_RELEASE, "prefill");
    while (hob_engine_requests(engine) > 0) {}
    script(engine, HOB_FAKE_HOLD, "prefill");
  }
  script(engine, HOB_FAKE_RELEASE, "prefill");
  hob_stream *stream = start(engine);
  char text[64] = "";
  CHECK(drain(stream, text, sizeof text, NULL) == HOB_END && strcmp(text, "Hello there") == 0);
  hob_stream_free(stream);
  hob_engine_release(engine);
}

static void children_keep_their_parents(void) {
  hob_engine *engine = open_fake();
  hob_stream *stream = start(engine);
  hob_pool *pool = hob_engine_pool(engine);
  hob_pool_events *events = hob_pool_subscribe(pool, 8);
  hob_charge *charge = hob_pool_charge(pool, 10);
  hob_engine_release(engine);
  char text[64] = "";
  CHECK(drain(stream, text, sizeof text, NULL) == HOB_END && strcmp(text, "Hello there") == 0);
  hob_stream_free(stream);
  uint64_t token = 0;
  OK(hob_pool_begin_use(pool, "chat:chat", HOB_NUL_TERMINATED, &token, &error));
  OK(hob_pool_end_use(pool, token, &error));
  hob_pool_release(pool);
  hob_charge_free(charge);
  hob_pool_events_free(events);
}

static void null_and_counts_are_harmless(void) {
  for (int i = 0; i < 2; i++) {
    hob_engine_release(NULL);
    hob_pool_release(NULL);
    hob_stream_free(NULL);
    hob_buffer_release(NULL);
    hob_error_free(NULL);
    hob_ranking_free(NULL);
    hob_cancel_token_release(NULL);
    hob_pause_free(NULL);
    hob_charge_free(NULL);
    hob_pool_events_free(NULL);
  }
  hob_engine *engine = open_fake();
  CHECK(hob_engine_retain(engine) == engine && hob_live_handles() == 2);
  hob_engine_release(engine);
  CHECK(hob_engine_availability(engine) == HOB_AVAILABILITY_READY);
  hob_engine_release(engine);
}

// ---- wakers ----

typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int calls, drops;
  hob_stream *to_free;
  hob_engine *engine;
} bell;

static void ring(void *user_data) {
  bell *self = (bell *)user_data;
  pthread_mutex_lock(&self->lock);
  self->calls++;
  hob_stream *stream = self->to_free;
  hob_engine *engine = self->engine;
  self->to_free = NULL;
  self->engine = NULL;
  pthread_cond_broadcast(&self->changed);
  pthread_mutex_unlock(&self->lock);
  hob_stream_free(stream);  // within its own callback (B14)
  hob_engine_release(engine);
}

static void drop_bell(void *user_data) {
  bell *self = (bell *)user_data;
  pthread_mutex_lock(&self->lock);
  self->drops++;
  pthread_cond_broadcast(&self->changed);
  pthread_mutex_unlock(&self->lock);
}

static void wait_for(bell *self, int *number, int at_least) {
  pthread_mutex_lock(&self->lock);
  while (*number < at_least) pthread_cond_wait(&self->changed, &self->lock);
  pthread_mutex_unlock(&self->lock);
}

#define BELL {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, NULL, NULL}

static void a_waker_lets_a_host_poll(void) {
  bell self = BELL;
  hob_engine *engine = open_fake();
  hob_stream *stream = start(engine);
  OK(hob_stream_set_waker(stream, ring, &self, drop_bell, &error));
  CHECK(self.calls >= 1);
  char text[64] = "";
  hob_event event = HOB_EVENT_INIT;
  for (;;) {
    pthread_mutex_lock(&self.lock);
    int seen = self.calls;
    pthread_mutex_unlock(&self.lock);
    hob_status status = hob_stream_next(stream, 0, &event, NULL);
    if (status == HOB_END) break;
    if (status == HOB_WOULD_BLOCK) {
      wait_for(&self, &self.calls, seen + 1);
      continue;
    }
    CHECK(status == HOB_OK);
    if (event.kind == HOB_EVENT_CHUNK && event.text) strcat(text, event.text);
  }
  CHECK(strcmp(text, "Hello there") == 0);
  OK(hob_stream_set_waker(stream, NULL, NULL, NULL, &error));
  wait_for(&self, &self.drops, 1);
  EXPECT(HOB_INVALID_ARGUMENT, hob_stream_set_waker(NULL, ring, &self, drop_bell, &error));
  wait_for(&self, &self.drops, 2);
  hob_stream_free(stream);
  hob_engine_release(engine);
  CHECK(self.drops == 2);
}

static void the_last_handles_go_within_a_waker(void) {
  for (int round = 0; round < 20; round++) {
    bell self = BELL;
    hob_engine *engine = open_fake();
    script(engine, HOB_FAKE_HOLD, "prefill");
    hob_stream *stream = start(engine);
    OK(hob_stream_set_waker(stream, ring, &self, drop_bell, &error));
    hob_event event = HOB_EVENT_INIT;
    EXPECT(HOB_WOULD_BLOCK, hob_stream_next(stream, 0, &event, &error));
    hob_engine *keeper = hob_engine_retain(engine);
    script(keeper, HOB_FAKE_WAIT, "prefill");
    pthread_mutex_lock(&self.lock);
    self.to_free = stream;
    self.engine = engine;
    pthread_mutex_unlock(&self.lock);
    script(keeper, HOB_FAKE_RELEASE, "prefill");
    hob_engine_release(keeper);
    wait_for(&self, &self.drops, 1);
  }
}

// ---- threads ----

static void *read_all(void *stream) {
  hob_event event = HOB_EVENT_INIT;
  hob_status status;
  while ((status = hob_stream_next((hob_stream *)stream, -1, &event, NULL)) == HOB_OK) {}
  return (void *)(intptr_t)status;
}

static void a_stream_is_ended_while_another_thread_reads(void) {
  for (int round = 0; round < 20; round++) {
    hob_engine *engine = open_fake();
    script(engine, HOB_FAKE_HOLD, "step");
    hob_stream *stream = start(engine);
    pthread_t reader;
    CHECK(pthread_create(&reader, NULL, read_all, stream) == 0);
    script(engine, HOB_FAKE_WAIT, "step");
    hob_stream_cancel(stream);
    script(engine, HOB_FAKE_RELEASE, "step");
    void *status = NULL;
    CHECK(pthread_join(reader, &status) == 0 && (intptr_t)status == HOB_CANCELLED);
    hob_stream_free(stream);
    hob_engine_release(engine);
  }
}

static void *work(void *argument) {
  hob_engine *engine = (hob_engine *)argument;
  for (int i = 0; i < 20; i++) {
    hob_pool *pool = hob_engine_pool(engine);
    hob_stream *stream = start(engine);
    if (i % 3 == 0) hob_stream_cancel(stream);
    if (i % 3 != 1) drain(stream, NULL, 0, NULL);
    hob_buffer *status = NULL;
    OK(hob_pool_status(pool, &status, &error));
    hob_buffer_release(status);
    hob_stream_free(stream);
    hob_pool_release(pool);
  }
  hob_engine_release(engine);
  return NULL;
}

static void threads_share_an_engine(void) {
  hob_engine *engine = open_fake();
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, work, hob_engine_retain(engine)) == 0);
  hob_engine_release(engine);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
}

// ---- closing ----

static void close_ends_what_runs_and_is_final(void) {
  hob_engine *engine = open_fake();
  script(engine, HOB_FAKE_HOLD, "step");
  hob_stream *stream = start(engine);
  script(engine, HOB_FAKE_WAIT, "step");
  script(engine, HOB_FAKE_RELEASE, "step");
  int stopped = 0;
  OK(hob_engine_close(engine, &stopped, &error));
  CHECK(stopped == 1);
  OK(hob_engine_close(engine, NULL, &error));
  OK(hob_engine_close_and_wait(engine, NULL, &error));
  hob_status status = drain(stream, NULL, 0, NULL);
  CHECK(status == HOB_CLOSED || status == HOB_END);
  hob_generate_options options = say("chat");
  hob_stream *late = NULL;
  EXPECT(HOB_CLOSED, hob_engine_generate(engine, &options, &late, &error));
  CHECK(late == NULL && hob_engine_availability(engine) == HOB_AVAILABILITY_CLOSED);
  hob_stream_free(stream);
  hob_engine_release(engine);
}

static int32_t stop_at_half(void *user_data, float fraction) {
  ++*(int *)user_data;
  return fraction >= 0.5f;
}

static int32_t count(void *user_data, float fraction) {
  ++*(int *)user_data;
  return fraction < 0;
}

static void drop_count(void *user_data) { *(int *)user_data += 1000; }

static void a_load_reports_and_can_be_stopped(void) {
  hob_engine *engine = open_fake();
  int calls = 0;
  EXPECT(HOB_CALLBACK, hob_engine_load(engine, "chat", 4, NULL, stop_at_half, &calls, drop_count, NULL, &error));
  CHECK(calls >= 1001);
  // The load was near its end, so the model may be there all the same.
  hob_pool *pool = hob_engine_pool(engine);
  hob_pool_evict(pool, "chat:chat", HOB_NUL_TERMINATED, 1, NULL, NULL, NULL);
  hob_pool_release(pool);
  hob_buffer *info = NULL;
  calls = 0;
  OK(hob_engine_load(engine, "chat", 4, NULL, count, &calls, drop_count, &info, &error));
  CHECK(calls >= 1001 && strstr(hob_buffer_text(info), "\"id\":\"chat\""));
  hob_buffer_release(info);
  OK(hob_engine_load(engine, "chat", 4, NULL, NULL, NULL, NULL, NULL, &error));
  EXPECT(HOB_NOT_FOUND, hob_engine_load(engine, "nobody", 6, NULL, NULL, NULL, NULL, NULL, &error));
  hob_pause *pause = NULL;
  OK(hob_engine_pause(engine, NULL, &pause, &error));
  hob_pause_free(pause);
  hob_engine_release(engine);
}

int main(void) {
  TEST_CLEAN(a_stream_gives_text_tokens_and_one_end);
  TEST_CLEAN(an_error_ends_a_stream_once);
  TEST_CLEAN(cancel_and_stop_end_a_running_stream);
  TEST_CLEAN(every_order_of_three_frees);
  TEST_CLEAN(streams_given_back_unread_give_their_places_back);
  TEST_CLEAN(children_keep_their_parents);
  TEST_CLEAN(null_and_counts_are_harmless);
  TEST_CLEAN(a_waker_lets_a_host_poll);
  TEST_CLEAN(the_last_handles_go_within_a_waker);
  TEST_CLEAN(a_stream_is_ended_while_another_thread_reads);
  TEST_CLEAN(threads_share_an_engine);
  TEST_CLEAN(close_ends_what_runs_and_is_final);
  TEST_CLEAN(a_load_reports_and_can_be_stopped);
  return 0;
}
