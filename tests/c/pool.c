// A host's own resident on the same account as Hob's models: loaded through callbacks, used, evicted to make room.
#include "check.h"

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

int main(void) {
  TEST_CLEAN(a_resident_is_loaded_used_and_evicted_for_room);
  TEST_CLEAN(failures_of_callbacks_leave_the_account_exact);
  TEST_CLEAN(marks_budget_and_plans);
  TEST_CLEAN(events_tell_a_load_and_its_end);
  return 0;
}
