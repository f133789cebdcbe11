// A host that was compiled once, against the first header of ABI 1, and is never compiled again: its binary lies beside this file and
// runs against every later library. It says how large it takes the structs to be, then uses each of them.
#include <hob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZE(type) printf(#type " %d\n", (int)sizeof(type))
#define CHECK(condition) \
  do { \
    if (!(condition)) fprintf(stderr, "old client, line %d: not so: %s\n", __LINE__, #condition), exit(1); \
  } while (0)

// After each struct that the library fills lie bytes that are not its own.
#define GUARDED(type, init) \
  struct { \
    type value; \
    unsigned char after[64]; \
  } guarded_##type = {init, {0}}; \
  memset(guarded_##type.after, 0x5A, sizeof guarded_##type.after)
#define INTACT(type) \
  for (size_t at = 0; at < sizeof guarded_##type.after; at++) CHECK(guarded_##type.after[at] == 0x5A)

static int loads, releases, drops;

static hob_status load(void *user_data, const hob_load_context *context) {
  ++*(int *)user_data;
  hob_load_context_progress(context, 0.5f);
  hob_load_context_set_measured(context, 70);
  return hob_load_context_token(context) != 0 ? hob_load_context_cancelled(context) : -1;
}
static hob_status release(void *user_data, uint64_t token) {
  (void)user_data;
  releases += token != 0;
  return HOB_OK;
}
static hob_status estimate(void *user_data, uint64_t *out_bytes) {
  (void)user_data;
  *out_bytes = 60;
  return HOB_OK;
}
static void drop(void *user_data) { drops += user_data == &loads; }

static const char *MODELS =
    "[{\"name\": \"chat\", \"kind\": \"chat\", \"bytes\": 1000, \"reply\": \"Hello there\"},"
    " {\"name\": \"embed\", \"kind\": \"embedder\", \"bytes\": 500, \"dimensions\": 4},"
    " {\"name\": \"rank\", \"kind\": \"reranker\", \"bytes\": 500}]";
static const hob_str TEXTS[] = {HOB_STR("a cat"), {"a kitten, cut", 8}};

static void sizes(void) {
  SIZE(hob_engine_options);
  SIZE(hob_request_options);
  SIZE(hob_generate_options);
  SIZE(hob_embed_options);
  SIZE(hob_rerank_options);
  SIZE(hob_decide_options);
  SIZE(hob_pool_options);
  SIZE(hob_admit_options);
  SIZE(hob_buffer_view);
  SIZE(hob_usage);
  SIZE(hob_estimate);
  SIZE(hob_admitted);
  SIZE(hob_event);
  SIZE(hob_summary);
  SIZE(hob_str);
  SIZE(hob_alternative);
  SIZE(hob_token_logprob);
  SIZE(hob_ranked);
}

static void chat(hob_engine *engine) {
  hob_request_options request = HOB_REQUEST_OPTIONS_INIT;
  hob_cancel_token *token = hob_cancel_token_new();
  request.cancel = token, request.timeout_ms = 60000;
  hob_generate_options generate = HOB_GENERATE_OPTIONS_INIT;
  generate.model = "chat", generate.request = &request, generate.logprobs = 2;
  generate.messages_json = "[{\"role\": \"user\", \"content\": \"Hi\"}]";
  hob_stream *stream = NULL;
  CHECK(hob_engine_generate(engine, &generate, &stream, NULL) == HOB_OK);
  GUARDED(hob_event, HOB_EVENT_INIT);
  hob_event *event = &guarded_hob_event.value;
  char text[64] = "";
  int finished = 0;
  while (hob_stream_next(stream, -1, event, NULL) == HOB_OK) {
    CHECK(event->struct_size == sizeof *event);
    if (event->kind == HOB_EVENT_CHUNK && event->text) strcat(text, event->text);
    if (event->kind == HOB_EVENT_CHUNK) CHECK(event->logprob_count == event->token_count);
    if (event->kind == HOB_EVENT_FINISHED) {
      finished++;
      CHECK(event->summary->finish == HOB_FINISH_STOP && event->summary->completion_tokens == 11);
      CHECK(event->summary->total_s >= 0 && event->summary->struct_size >= sizeof *event->summary);
    }
  }
  INTACT(hob_event);
  CHECK(finished == 1);
  printf("chat: %s\n", text);
  hob_stream_free(stream);
  hob_cancel_token_release(token);
}

static void encode(hob_engine *engine) {
  hob_embed_options embed = HOB_EMBED_OPTIONS_INIT;
  embed.model = "embed", embed.texts = TEXTS, embed.text_count = 2;
  hob_buffer *vectors = NULL;
  GUARDED(hob_usage, HOB_USAGE_INIT);
  CHECK(hob_engine_embed(engine, &embed, &vectors, &guarded_hob_usage.value, NULL) == HOB_OK);
  CHECK(guarded_hob_usage.value.prompt_tokens > 0);
  INTACT(hob_usage);
  GUARDED(hob_buffer_view, HOB_BUFFER_VIEW_INIT);
  CHECK(hob_buffer_get_view(vectors, &guarded_hob_buffer_view.value, NULL) == HOB_OK);
  INTACT(hob_buffer_view);
  printf("embed: %d x %d\n", (int)guarded_hob_buffer_view.value.shape[0], (int)guarded_hob_buffer_view.value.shape[1]);
  hob_buffer_release(vectors);

  hob_rerank_options rerank = HOB_RERANK_OPTIONS_INIT;
  rerank.model = "rank", rerank.query = "a kitten", rerank.documents = TEXTS, rerank.document_count = 2;
  hob_ranking *ranking = NULL;
  CHECK(hob_engine_rerank(engine, &rerank, &ranking, NULL, NULL) == HOB_OK);
  size_t count = 0;
  const hob_ranked *items = hob_ranking_items(ranking, &count);
  printf("rerank: %d, the best is %d\n", (int)count, (int)items[0].index);
  hob_ranking_free(ranking);

  hob_decide_options decide = HOB_DECIDE_OPTIONS_INIT;
  decide.model = "chat", decide.prompt = "Well?", decide.answers = TEXTS, decide.answer_count = 2;
  hob_buffer *decision = NULL;
  CHECK(hob_engine_decide(engine, &decide, &decision, NULL) == HOB_OK);
  printf("decide: %s\n", strstr(hob_buffer_text(decision), "\"answers\"") ? "answers" : "none");
  hob_buffer_release(decision);

  GUARDED(hob_estimate, HOB_ESTIMATE_INIT);
  CHECK(hob_engine_estimate(engine, "chat", HOB_NUL_TERMINATED, NULL, &guarded_hob_estimate.value, NULL) == HOB_OK);
  CHECK(guarded_hob_estimate.value.total >= 1000);
  INTACT(hob_estimate);
}

static void pool(void) {
  hob_pool_options options = HOB_POOL_OPTIONS_INIT;
  options.budget_bytes = 100;
  hob_pool *pool = NULL;
  CHECK(hob_pool_new(&options, &pool, NULL) == HOB_OK);
  hob_admit_options admit = HOB_ADMIT_OPTIONS_INIT;
  admit.key = "onnx:mine", admit.load = load, admit.release = release, admit.estimate = estimate, admit.in_use = 1;
  admit.user_data = &loads, admit.drop_user_data = drop;
  GUARDED(hob_admitted, HOB_ADMITTED_INIT);
  CHECK(hob_pool_admit(pool, &admit, &guarded_hob_admitted.value, NULL) == HOB_OK);
  INTACT(hob_admitted);
  CHECK(hob_pool_end_use(pool, guarded_hob_admitted.value.token, NULL) == HOB_OK);
  CHECK(hob_pool_close(pool, NULL, NULL) == HOB_OK);
  printf("pool: %d load, %d release, %d drop\n", loads, releases, drops);
  hob_pool_release(pool);
}

int main(void) {
  hob_error *error = NULL;
  CHECK(hob_abi_check(HOB_ABI_VERSION, &error) == HOB_OK && !error);
  sizes();
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.budget_bytes = 4000;
  hob_engine *engine = NULL;
  CHECK(hob_engine_open_fake(MODELS, HOB_NUL_TERMINATED, &options, &engine, &error) == HOB_OK);
  chat(engine);
  encode(engine);
  pool();
  CHECK(hob_abi_check(0, &error) == HOB_UNSUPPORTED && hob_error_status(error) == HOB_UNSUPPORTED);
  printf("error: %s\n", hob_error_name(error));
  hob_error_free(error);
  hob_engine_release(engine);
  CHECK(hob_live_handles() == 0);
  return 0;
}
