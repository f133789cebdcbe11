// A host's own resident on the same account as Hob's models: loaded through callbacks, used, evicted to make room.
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <stdint.h>

// What the host keeps, by token. A real one would lock it: callbacks run on threads of Hob's.
typedef struct {
  const char *name;
  uint64_t bytes;
  uint64_t loaded, released, dropped;
  uint64_t token;
  hob_status answer;
} resident;

static hob_status load(void *user_data, const hob_load_context *context) {
  resident *self = (resident *)user_data;
  if (hob_load_context_cancelled(context) != HOB_OK) return HOB_CANCELLED;
  hob_load_context_progress(context, 0.5f);
  if (self->answer != HOB_OK) return self->answer;
  self->token = hob_load_context_token(context);
  self->loaded++;
  hob_load_context_set_measured(context, self->bytes);
  return HOB_OK;
}

static hob_status unload(void *user_data, uint64_t token) {
  resident *self = (resident *)user_data;
  if (token == self->token) self->released++;
  return HOB_OK;
}

static hob_status estimate(void *user_data, uint64_t *out_bytes) {
  *out_bytes = ((resident *)user_data)->bytes;
  return HOB_OK;
}

static void drop(void *user_data) { ((resident *)user_data)->dropped++; }

static hob_admit_options admission(resident *self) {
  hob_admit_options options = HOB_ADMIT_OPTIONS_INIT;
  options.key = self->name;
  options.cost_bytes = self->bytes;
  options.load = load;
  options.release = unload;
  options.user_data = self;
  options.drop_user_data = drop;
  return options;
}

static hob_pool *new_pool(uint64_t budget) {
  hob_pool_options options = HOB_POOL_OPTIONS_INIT;
  options.budget_bytes = budget;
  hob_pool *pool = NULL;
  OK(hob_pool_new(&options, &pool, &error));
  return pool;
}

static int status_has(hob_pool *pool, const char *text) {
  hob_buffer *status = NULL;
  OK(hob_pool_status(pool, &status, &error));
  int found = strstr(hob_buffer_text(status), text) != NULL;
  hob_buffer_release(status);
  return found;
}

static void a_resident_is_loaded_used_and_evicted_for_room(void) {
  hob_pool *pool = new_pool(100);
  resident first = {"onnx:first", 60, 0, 0, 0, 0, HOB_OK}, second = {"onnx:second", 70, 0, 0, 0, 0, HOB_OK};
  hob_admit_options options = admission(&first);
  options.in_use = 1;
  hob_admitted admitted = HOB_ADMITTED_INIT;
  OK(hob_pool_admit(pool, &options, &admitted, &error));
  CHECK(admitted.origin == HOB_ORIGIN_LOADED && admitted.token == first.token && first.loaded == 1);
  CHECK(status_has(pool, "\"key\":\"onnx:first\"") && status_has(pool, "\"used_bytes\":60"));

  // In use: nothing may take its room.
  hob_admit_options other = admission(&second);
  other.no_room = HOB_NO_ROOM_REFUSE;
  EXPECT(HOB_BUDGET_EXCEEDED, hob_pool_admit(pool, &other, NULL, &error));
  CHECK(second.dropped == 1 && second.loaded == 0);
  EXPECT(HOB_IN_USE, hob_pool_evict(pool, "onnx:first", HOB_NUL_TERMINATED, 0, NULL, NULL, &error));

  // A second use, and a hit, whose callbacks are dropped unused.
  uint64_t token = 0;
  OK(hob_pool_begin_use(pool, "onnx:first", HOB_NUL_TERMINATED, &token, &error));
  CHECK(token == first.token);
  resident again = {"onnx:first", 60, 0, 0, 0, 0, HOB_OK};
  hob_admit_options hit = admission(&again);
  OK(hob_pool_admit(pool, &hit, &admitted, &error));
  CHECK(admitted.origin == HOB_ORIGIN_HIT && again.dropped == 1 && again.loaded == 0);

  OK(hob_pool_end_use(pool, token, &error));
  OK(hob_pool_end_use(pool, token, &error));
  EXPECT(HOB_ABSENT, hob_pool_end_use(pool, token, &error));

  // Idle: it makes room, and its release has run before the newcomer's load.
  OK(hob_pool_admit(pool, &other, &admitted, &error));
  CHECK(first.released == 1 && second.loaded == 1);
  EXPECT(HOB_ABSENT, hob_pool_begin_use(pool, "onnx:first", HOB_NUL_TERMINATED, &token, &error));
  OK(hob_pool_close(pool, NULL, &error));
  CHECK(first.dropped == 1 && second.released == 1 && second.dropped == 2);
  EXPECT(HOB_CLOSED, hob_pool_admit(pool, &hit, NULL, &error));
  CHECK(again.dropped == 2);
  hob_pool_release(pool);
}

static void failures_of_callbacks_leave_the_account_exact(void) {
  hob_pool *pool = new_pool(100);
  resident broken = {"onnx:broken", 60, 0, 0, 0, 0, -77};
  hob_admit_options options = admission(&broken);
  EXPECT(HOB_CALLBACK, hob_pool_admit(pool, &options, NULL, &error));
  CHECK(broken.dropped == 1 && broken.released == 0 && status_has(pool, "\"used_bytes\":0"));
  options.load = NULL;
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_admit(pool, &options, NULL, &error));
  options = admission(&broken);
  options.key = "no-kind";
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_admit(pool, &options, NULL, &error));
  options.in_use = 1;
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_admit(pool, &options, NULL, &error));
  CHECK(broken.dropped == 4);
  hob_cancel_token *token = hob_cancel_token_new();
  hob_cancel_token_cancel(token);
  options = admission(&broken);
  options.cancel = token;
  EXPECT(HOB_CANCELLED, hob_pool_admit(pool, &options, NULL, &error));
  hob_cancel_token_release(token);
  hob_pool_release(pool);
}

static void marks_budget_and_plans(void) {
  hob_pool *pool = new_pool(100);
  resident one = {"onnx:one", 40, 0, 0, 0, 0, HOB_OK};
  hob_admit_options options = admission(&one);
  options.estimate = estimate;
  options.cost_bytes = 0;
  OK(hob_pool_admit(pool, &options, NULL, &error));
  OK(hob_pool_pin(pool, "onnx:one", HOB_NUL_TERMINATED, &error));
  CHECK(!hob_pool_has_room(pool, 70) && hob_pool_has_room(pool, 60));
  hob_buffer *result = NULL;
  OK(hob_pool_make_room(pool, 80, NULL, &result, &error));
  CHECK(strstr(hob_buffer_text(result), "\"fits\":false"));
  hob_buffer_release(result);
  OK(hob_pool_unpin(pool, "onnx:one", HOB_NUL_TERMINATED, &error));
  OK(hob_pool_plan(pool, "onnx:two", HOB_NUL_TERMINATED, 70, HOB_NO_ROOM_DEFAULT, &result, &error));
  CHECK(strstr(hob_buffer_text(result), "\"verdict\":\"evicts\"") && strstr(hob_buffer_text(result), "onnx:one"));
  hob_buffer_release(result);
  OK(hob_pool_touch(pool, "onnx:one", HOB_NUL_TERMINATED, &error));
  OK(hob_pool_set_idle(pool, "onnx:one", HOB_NUL_TERMINATED, HOB_IDLE_NEVER, 0, &error));
  OK(hob_pool_set_default_idle(pool, HOB_IDLE_AFTER_SECONDS, 60, &error));
  uint64_t token = 0, bytes = 0;
  OK(hob_pool_peek(pool, "onnx:one", HOB_NUL_TERMINATED, &token, &error));
  OK(hob_pool_set_measured(pool, token, 50, &error));
  hob_charge *charge = hob_pool_charge(pool, 20);
  CHECK(status_has(pool, "\"used_bytes\":70"));
  hob_charge_set(charge, 10);
  CHECK(status_has(pool, "\"used_bytes\":60"));
  hob_charge_free(charge);
  OK(hob_pool_set_budget(pool, 30, &error));
  CHECK(hob_pool_budget(pool) == 30);
  EXPECT(HOB_INVALID_ARGUMENT, hob_pool_set_budget(pool, 0, &error));
  OK(hob_pool_sweep(pool, NULL, NULL, &error));
  OK(hob_pool_trim(pool, NULL, &result, &error));
  CHECK(strstr(hob_buffer_text(result), "onnx:one") && one.released == 1);
  hob_buffer_release(result);
  EXPECT(HOB_ABSENT, hob_pool_forget(pool, "onnx:one", HOB_NUL_TERMINATED, &bytes, &error));
  hob_pause *pause = NULL;
  OK(hob_pool_pause(pool, NULL, &pause, &error));
  CHECK(status_has(pool, "\"paused\":true"));
  hob_pause_free(pause);
  CHECK(status_has(pool, "\"paused\":false"));
  hob_pool_release(pool);
}

static void events_tell_a_load_and_its_end(void) {
  hob_pool *pool = new_pool(100);
  hob_pool_events *events = hob_pool_subscribe(pool, 64);
  hob_buffer *event = NULL;
  EXPECT(HOB_WOULD_BLOCK, hob_pool_events_next(events, 0, &event, &error));
  resident one = {"onnx:one", 40, 0, 0, 0, 0, HOB_OK};
  hob_admit_options options = admission(&one);
  OK(hob_pool_admit(pool, &options, NULL, &error));
  OK(hob_pool_close(pool, NULL, &error));
  char seen[4096] = "";
  hob_status status;
  while ((status = hob_pool_events_next(events, -1, &event, NULL)) == HOB_OK) {
    CHECK(strlen(seen) + strlen(hob_buffer_text(event)) < sizeof seen);
    strcat(seen, hob_buffer_text(event));
    hob_buffer_release(event);
  }
  CHECK(status == HOB_END);
  CHECK(strstr(seen, "load_started") && strstr(seen, "\"percent\":50") && strstr(seen, "loaded") && strstr(seen, "closed"));
  hob_pool_release(pool);  // before its subscription
  hob_pool_events_free(events);
}

// ---- a host's part in a pool ----

typedef struct {
  int drains, budgets, quiesced, resumed, dropped, entries_dropped;
  uint64_t budget, active;
  hob_status answer;
} host;

static void drain_host(void *user_data) { ((host *)user_data)->drains++; }
static void hear_budget(void *user_data, uint64_t bytes) {
  ((host *)user_data)->budgets++;
  ((host *)user_data)->budget = bytes;
}
static void measure(void *user_data, hob_memory *out_memory) {
  CHECK(out_memory->struct_size >= sizeof *out_memory && out_memory->peak == 0);
  out_memory->active = ((host *)user_data)->active;
  out_memory->available = 12345, out_memory->has_available = 1;
}
// Given back once the pool is gone, which may be after its last release: on a thread of Hob's.
static pthread_mutex_t dropping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t dropped = PTHREAD_COND_INITIALIZER;
static void drop_host(void *user_data) {
  pthread_mutex_lock(&dropping);
  ((host *)user_data)->dropped++;
  pthread_cond_broadcast(&dropped);
  pthread_mutex_unlock(&dropping);
}
static void drop_entry(void *user_data) { ((host *)user_data)->entries_dropped++; }
static hob_status nothing_to_load(void *user_data, const hob_load_context *context) {
  (void)user_data, (void)context;
  return HOB_OK;
}
static hob_status quiesce(void *user_data) {
  ((host *)user_data)->quiesced++;
  return ((host *)user_data)->answer;
}
static void resume(void *user_data) { ((host *)user_data)->resumed++; }

static void a_pool_drains_measures_and_tells_its_budget(void) {
  host self = {0, 0, 0, 0, 0, 0, 0, 7, HOB_OK};
  hob_pool_options options = HOB_POOL_OPTIONS_INIT;
  options.budget_bytes = 100;
  options.drain = drain_host, options.budget_changed = hear_budget, options.memory = measure;
  options.user_data = &self, options.drop_user_data = drop_host;
  hob_pool *pool = NULL;
  OK(hob_pool_new(&options, &pool, &error));
  CHECK(status_has(pool, "\"active\":7") && status_has(pool, "\"available\":12345"));
  OK(hob_pool_set_budget(pool, 90, &error));
  CHECK(self.budgets == 1 && self.budget == 90);
  resident one = {"onnx:one", 40, 0, 0, 0, 0, HOB_OK};
  hob_admit_options admit = admission(&one);
  OK(hob_pool_admit(pool, &admit, NULL, &error));
  OK(hob_pool_evict(pool, "onnx:one", HOB_NUL_TERMINATED, 0, NULL, NULL, &error));
  CHECK(self.drains == 1 && one.released == 1);
  // By its key, by its token, and with the memory given back.
  OK(hob_pool_admit(pool, &admit, NULL, &error));
  uint64_t bytes = 0, token = 0;
  OK(hob_pool_peek(pool, "onnx:one", HOB_NUL_TERMINATED, &token, &error));
  OK(hob_pool_forget_token(pool, token, &bytes, &error));
  CHECK(bytes == 40 && one.released == 1 && one.dropped == 2);
  EXPECT(HOB_ABSENT, hob_pool_forget_token(pool, token, &bytes, &error));
  CHECK(bytes == 0);
  OK(hob_pool_admit(pool, &admit, NULL, &error));
  int before = self.drains;
  OK(hob_pool_forget_and_drain(pool, "onnx:one", HOB_NUL_TERMINATED, NULL, &bytes, &error));
  CHECK(self.drains > before && one.released == 1 && one.dropped == 3);
  EXPECT(HOB_NOT_FOUND, hob_pool_forget_and_drain(pool, "onnx:one", HOB_NUL_TERMINATED, NULL, &bytes, &error));
  CHECK(!hob_pool_is_closed(pool) && hob_pool_is_closed(NULL));
  OK(hob_pool_close(pool, NULL, &error));
  CHECK(hob_pool_is_closed(pool) && self.dropped == 0);
  hob_pool_release(pool);
  pthread_mutex_lock(&dropping);
  while (self.dropped == 0) pthread_cond_wait(&dropped, &dropping);
  CHECK(self.dropped == 1);
  pthread_mutex_unlock(&dropping);
}

static void a_pause_quiesces_residents_and_resumes_them(void) {
  hob_pool *pool = new_pool(100);
  host self = {0, 0, 0, 0, 0, 0, 0, 0, HOB_OK};
  hob_admit_options options = HOB_ADMIT_OPTIONS_INIT;
  options.key = "onnx:one", options.cost_bytes = 40, options.load = nothing_to_load;
  options.user_data = &self, options.drop_user_data = drop_entry;
  options.quiesce = quiesce, options.resume = resume;
  OK(hob_pool_admit(pool, &options, NULL, &error));
  hob_pause *pause = NULL;
  OK(hob_pool_pause(pool, NULL, &pause, &error));
  CHECK(self.quiesced == 1 && self.resumed == 0);
  hob_buffer *keys = NULL;
  OK(hob_pause_quiesced(pause, &keys, &error));
  CHECK(strcmp(hob_buffer_text(keys), "[\"onnx:one\"]") == 0);
  hob_buffer_release(keys);
  // The entry goes while it is quiesced: what was lent stays until it is resumed.
  OK(hob_pool_evict(pool, "onnx:one", HOB_NUL_TERMINATED, 0, NULL, NULL, &error));
  CHECK(self.entries_dropped == 0);
  hob_pause_free(pause);
  CHECK(self.resumed == 1 && self.entries_dropped == 1);
  // One that cannot stop fails the pause, and is resumed.
  self.answer = -5;
  OK(hob_pool_admit(pool, &options, NULL, &error));
  EXPECT(HOB_CALLBACK, hob_pool_pause(pool, NULL, &pause, &error));
  CHECK(pause == NULL && self.quiesced == 2 && self.resumed == 2 && status_has(pool, "\"paused\":false"));
  OK(hob_pool_close(pool, NULL, &error));  // its entry lies on this stack
  hob_pool_release(pool);
}

static void a_use_may_have_its_own_countdown(void) {
  hob_pool *pool = new_pool(100);
  resident one = {"onnx:one", 40, 0, 0, 0, 0, HOB_OK};
  hob_admit_options options = admission(&one);
  options.idle = HOB_IDLE_NEVER;
  OK(hob_pool_admit(pool, &options, NULL, &error));
  hob_pool_events *events = hob_pool_subscribe(pool, 16);
  uint64_t token = 0;
  EXPECT(HOB_INVALID_ARGUMENT,
         hob_pool_begin_use_with(pool, "onnx:one", HOB_NUL_TERMINATED, 99, 0, &token, &error));
  EXPECT(HOB_ABSENT, hob_pool_begin_use_with(pool, "onnx:two", HOB_NUL_TERMINATED, HOB_IDLE_NEVER, 0, &token, &error));
  OK(hob_pool_begin_use_with(pool, "onnx:one", HOB_NUL_TERMINATED, HOB_IDLE_IMMEDIATELY, 0, &token, &error));
  OK(hob_pool_end_use(pool, token, &error));
  hob_buffer *event = NULL;
  int unloaded = 0;
  while (!unloaded) {
    OK(hob_pool_events_next(events, -1, &event, &error));
    unloaded = strstr(hob_buffer_text(event), "\"unloaded\"") != NULL;
    hob_buffer_release(event);
  }
  OK(hob_pool_close(pool, NULL, &error));  // its entry lies on this stack
  CHECK(one.released == 1 && one.dropped == 1);
  hob_pool_events_free(events);
  hob_pool_release(pool);
}

int main(void) {
  TEST_CLEAN(a_resident_is_loaded_used_and_evicted_for_room);
  TEST_CLEAN(failures_of_callbacks_leave_the_account_exact);
  TEST_CLEAN(marks_budget_and_plans);
  TEST_CLEAN(events_tell_a_load_and_its_end);
  TEST_CLEAN(a_pool_drains_measures_and_tells_its_budget);
  TEST_CLEAN(a_pause_quiesces_residents_and_resumes_them);
  TEST_CLEAN(a_use_may_have_its_own_countdown);
  return 0;
}
