// What the generated programs stand on (NULL arguments, panics): one good value of each type.
#include "check.h"

static hob_engine *engine;
static hob_pool *pool;
static hob_stream *stream;
static hob_pool_events *events;
static hob_buffer *buffer;
static hob_ranking *ranking;
static hob_charge *charge;
static hob_pause *pause_of_another_pool;
static hob_tokenizer *tokenizer;
static hob_cancel_token *token;
static hob_error *failure;
static int at;

// Where functions put what they make.
static hob_engine *new_hob_engine;
static hob_pool *new_hob_pool;
static hob_stream *new_hob_stream;
static hob_pool_events *new_hob_pool_events;
static hob_buffer *new_hob_buffer, *second_hob_buffer;
static hob_ranking *new_hob_ranking;
static hob_charge *new_hob_charge;
static hob_pause *new_hob_pause;
static hob_tokenizer *new_hob_tokenizer;
static hob_cancel_token *new_hob_cancel_token;
static hob_error *new_hob_error;
static uint64_t number_uint64_t;
static size_t number_size_t;
static int32_t number_int32_t;
static uint32_t number_uint32_t;

static hob_engine *good_hob_engine(void) { return engine; }
static hob_pool *good_hob_pool(void) { return pool; }
static hob_stream *good_hob_stream(void) { return stream; }
static hob_pool_events *good_hob_pool_events(void) { return events; }
static hob_buffer *good_hob_buffer(void) { return buffer; }
static hob_ranking *good_hob_ranking(void) { return ranking; }
static hob_charge *good_hob_charge(void) { return charge; }
static hob_cancel_token *good_hob_cancel_token(void) { return token; }
static hob_error *good_hob_error(void) { return failure; }
static hob_pause *good_hob_pause(void) { return pause_of_another_pool; }
static hob_tokenizer *good_hob_tokenizer(void) { return tokenizer; }

static const hob_str TEXTS[] = {HOB_STR("a")};
static hob_status no_load(void *user_data, const hob_load_context *context) {
  (void)user_data;
  (void)context;
  return HOB_OK;
}

#define GOOD(kind, init, fill)       \
  static kind spare_##kind;          \
  static kind *good_##kind(void) {   \
    static kind value;               \
    kind fresh = init;               \
    value = fresh;                   \
    fill;                            \
    (void)spare_##kind;              \
    return &value;                   \
  }
GOOD(hob_engine_options, HOB_ENGINE_OPTIONS_INIT, (value.budget_bytes = 4000, value.prompt_cache_bytes = 0))
GOOD(hob_request_options, HOB_REQUEST_OPTIONS_INIT, (void)0)
GOOD(hob_generate_options, HOB_GENERATE_OPTIONS_INIT, (value.model = "chat", value.prompt = "a"))
GOOD(hob_embed_options, HOB_EMBED_OPTIONS_INIT, (value.model = "embed", value.texts = TEXTS, value.text_count = 1))
GOOD(hob_rerank_options, HOB_RERANK_OPTIONS_INIT,
     (value.model = "rank", value.query = "a", value.documents = TEXTS, value.document_count = 1))
GOOD(hob_decide_options, HOB_DECIDE_OPTIONS_INIT,
     (value.model = "chat", value.prompt = "a", value.answers = TEXTS, value.answer_count = 1))
GOOD(hob_pool_options, HOB_POOL_OPTIONS_INIT, value.budget_bytes = 100)
GOOD(hob_admit_options, HOB_ADMIT_OPTIONS_INIT, (value.key = "host:thing", value.cost_bytes = 1, value.load = no_load))
GOOD(hob_admitted, HOB_ADMITTED_INIT, (void)0)
GOOD(hob_usage, HOB_USAGE_INIT, (void)0)
GOOD(hob_estimate, HOB_ESTIMATE_INIT, (void)0)
GOOD(hob_event, HOB_EVENT_INIT, (void)0)
GOOD(hob_buffer_view, HOB_BUFFER_VIEW_INIT, (void)0)

static void begin(void) {
  engine = open_fake();
  pool = hob_engine_pool(engine);
  events = hob_pool_subscribe(pool, 8);
  charge = hob_pool_charge(pool, 1);
  token = hob_cancel_token_new();
  OK(hob_engine_generate(engine, good_hob_generate_options(), &stream, &error));
  OK(hob_engine_embed(engine, good_hob_embed_options(), &buffer, NULL, &error));
  OK(hob_engine_rerank(engine, good_hob_rerank_options(), &ranking, NULL, &error));
  CHECK(hob_abi_check(0, &failure) == HOB_UNSUPPORTED);
  OK(hob_engine_tokenizer(engine, "chat", 4, &tokenizer, &error));
  hob_pool *another = NULL;
  OK(hob_pool_new(good_hob_pool_options(), &another, &error));
  OK(hob_pool_pause(another, NULL, &pause_of_another_pool, &error));
  hob_pool_release(another);
  // All of them are used in some build of the header.
  (void)good_hob_request_options, (void)good_hob_pool_options, (void)good_hob_admit_options, (void)good_hob_admitted;
  (void)good_hob_usage, (void)good_hob_estimate, (void)good_hob_event, (void)good_hob_buffer_view, (void)good_hob_error;
  (void)good_hob_pause, (void)good_hob_charge, (void)good_hob_cancel_token, (void)good_hob_ranking, (void)good_hob_buffer;
  (void)good_hob_pool_events, (void)good_hob_stream, (void)good_hob_pool, (void)good_hob_engine;
  (void)good_hob_engine_options, (void)good_hob_decide_options;
  (void)number_uint64_t, (void)number_size_t, (void)number_int32_t;
  (void)number_uint32_t, (void)good_hob_tokenizer;
}

// Gives back what the last call made.
static void clean(void) {
  at++;
  hob_pool_end_use(pool, number_uint64_t, NULL), number_uint64_t = 0;  // a use, if one was begun
  hob_engine_release(new_hob_engine), new_hob_engine = NULL;
  hob_pool_release(new_hob_pool), new_hob_pool = NULL;
  hob_stream_free(new_hob_stream), new_hob_stream = NULL;
  hob_pool_events_free(new_hob_pool_events), new_hob_pool_events = NULL;
  hob_buffer_release(new_hob_buffer), new_hob_buffer = NULL;
  hob_buffer_release(second_hob_buffer), second_hob_buffer = NULL;
  hob_ranking_free(new_hob_ranking), new_hob_ranking = NULL;
  hob_charge_free(new_hob_charge), new_hob_charge = NULL;
  hob_pause_free(new_hob_pause), new_hob_pause = NULL;
  hob_tokenizer_release(new_hob_tokenizer), new_hob_tokenizer = NULL;
  hob_cancel_token_release(new_hob_cancel_token), new_hob_cancel_token = NULL;
  hob_error_free(new_hob_error), new_hob_error = NULL;
}

// A pointer that must be there was NULL.
#define refused(call)                                                                        \
  do {                                                                                       \
    hob_status got = (call);                                                                 \
    if (got != HOB_INVALID_ARGUMENT) fprintf(stderr, "%s gave %d\n", #call, got), exit(1);    \
  } while (0)
// The rest was good.
#define allowed(call)                                                                                      \
  do {                                                                                                     \
    hob_status got = (call);                                                                               \
    if (got == HOB_INVALID_ARGUMENT || got == HOB_INTERNAL) fprintf(stderr, "%s gave %d: %s\n", #call, got, \
                                                                    hob_error_message(new_hob_error)), exit(1); \
  } while (0)

// A panic inside: the call says so, and its handle says so from then on.
#define panicked(call)                                                                                      \
  do {                                                                                                      \
    hob_fake_panic_next(1);                                                                                 \
    hob_status got = (call);                                                                                \
    CHECK(hob_fake_panic_next(0) == 0);                                                                     \
    if (got != HOB_INTERNAL) fprintf(stderr, "%s gave %d after a panic\n", #call, got), exit(1);            \
    CHECK(hob_error_status(new_hob_error) == HOB_INTERNAL && strstr(hob_error_message(new_hob_error), "panicked")); \
    hob_error_free(new_hob_error), new_hob_error = NULL;                                                    \
  } while (0)
#define poisoned(call)                                                                                \
  do {                                                                                                \
    hob_status got = (call);                                                                          \
    if (got != HOB_INTERNAL) fprintf(stderr, "%s gave %d on a poisoned handle\n", #call, got), exit(1); \
  } while (0)

static void end(void) {
  hob_stream_free(stream);
  hob_pool_events_free(events);
  hob_charge_free(charge);
  hob_pause_free(pause_of_another_pool);
  hob_tokenizer_release(tokenizer);
  hob_pool_release(pool);
  hob_buffer_release(buffer);
  hob_ranking_free(ranking);
  hob_cancel_token_release(token);
  hob_error_free(failure);
  hob_engine_release(engine);
  CHECK(!handles_out());
}

static void told(const char *name) { printf("test %s ... ok\n%d calls\n", name, at); }
