// Option structs and message arrays of any content, within what the header lets a host pass: every call ends with a status, and reads
// nothing beyond what it was given (every array is an allocation of exactly its size, so AddressSanitizer sees it).
//
// An input is text: the first line is a string of choices, each further line is a text to pass. A choice below 128 is a small number
// ('0' is 0), one above takes four more bytes as they are. Choices that are missing are 0, texts that are missing are NULL.
#include <hob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MUST(condition) \
  do { \
    if (!(condition)) fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition), abort(); \
  } while (0)

enum { MAX_BLOCKS = 256 };
static const uint8_t *choices, *choices_end, *texts, *texts_end;
static void *blocks[MAX_BLOCKS];
static size_t block_count;
static hob_engine *engine;
static hob_pool *host_pool;

// Memory of exactly that size, given back after the input.
static void *block(size_t size) {
  MUST(block_count < MAX_BLOCKS);
  return blocks[block_count++] = malloc(size);
}

static uint32_t choose(void) {
  if (choices == choices_end) return 0;
  uint8_t byte = *choices++;
  if (byte < 128) return (uint32_t)(byte & 15u);
  uint32_t whole = 0;
  for (int i = 0; i < 4 && choices < choices_end; i++) whole = whole << 8 | *choices++;
  return whole;
}
static uint64_t choose_long(void) {
  uint64_t high = choose();
  return high << 32 | choose();
}
static float choose_float(void) {
  uint32_t bits = choose();
  if (bits < 16) return (float)bits / 8.0f;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The next line as a text: NULL, with its length, or ended by a NUL.
static const char *next_text(size_t *len) {
  *len = HOB_NUL_TERMINATED;
  uint32_t how = choose();
  if (texts >= texts_end || how == 1) return NULL;
  const uint8_t *end = memchr(texts, '\n', (size_t)(texts_end - texts));
  size_t size = (size_t)((end ? end : texts_end) - texts);
  const uint8_t *start = texts;
  texts = end ? end + 1 : texts_end;
  if (how == 2) return *len = 0, (const char *)block(1);
  if (how == 3 || memchr(start, 0, size)) {
    char *exact = block(size ? size : 1);
    memcpy(exact, start, size);
    *len = size;
    return exact;
  }
  char *ended = block(size + 1);
  memcpy(ended, start, size);
  ended[size] = 0;
  return ended;
}

static const hob_str *next_texts(size_t *count) {
  *count = choose() % 9;
  if (*count == 0) return NULL;
  hob_str *array = block(*count * sizeof *array);
  for (size_t i = 0; i < *count; i++) array[i].data = next_text(&array[i].len);
  return array;
}

// A struct as a host of this or another header passes it: as it is, shorter, longer with or without content, or with a size that
// cannot be.
static void *sized(const void *value, size_t known) {
  uint32_t how = choose(), size = (uint32_t)known;
  if (how == 7) return NULL;
  if (how == 1) size = (uint32_t)(8 + choose() % 32 * 8);
  if (how == 2 || how == 3) size = (uint32_t)known + 8 + choose() % 64 * 8;
  if (how >= 4) size = choose();
  // An impossible size is refused before anything beyond it is read.
  size_t room = size < 8 || size % 8 || size > 1 << 16 ? 4 : size;
  uint8_t *given = block(room);
  memset(given, 0, room);
  memcpy(given, value, room < known ? room : known);
  memcpy(given, &size, sizeof size);
  if (how == 3 && room > known) given[known + choose() % (room - known)] = (uint8_t)choose();
  return given;
}

static const hob_request_options *request(void) {
  hob_request_options options = HOB_REQUEST_OPTIONS_INIT;
  if (choose() == 0) return NULL;
  options.on_cancel = (int32_t)choose();
  options.timeout_ms = choose_long();
  options.kind = (int32_t)choose(), options.float_type = (int32_t)choose(), options.dequantize = (int32_t)choose();
  options.pooling = (int32_t)choose(), options.idle = (int32_t)choose(), options.idle_seconds = choose();
  options.model_idle = (int32_t)choose(), options.model_idle_seconds = choose();
  options.pinned = choose(), options.reserved = choose();
  options.manifest_json = next_text(&options.manifest_json_len);
  return sized(&options, sizeof options);
}

static const char *model(size_t *len) {
  static const char *const names[] = {"chat", "embed", "rank"};
  uint32_t which = choose();
  *len = HOB_NUL_TERMINATED;
  return which < 3 ? names[which] : which == 3 ? next_text(len) : NULL;
}

static void check(hob_status status, hob_error *error, const void *result) {
  MUST(status != HOB_INTERNAL);
  MUST((status < 0) == (error != NULL) && (status == HOB_OK) == (result != NULL));
  MUST(hob_error_status(error) == (status < 0 ? status : 0));
  hob_error_free(error);
}

static hob_generate_options *generate_options(void) {
  hob_generate_options options = HOB_GENERATE_OPTIONS_INIT;
  options.model = model(&options.model_len);
  uint32_t prompt = choose();
  if (prompt == 0 || prompt > 3) options.messages_json = next_text(&options.messages_json_len);
  if (prompt == 1 || prompt > 3) options.prompt = next_text(&options.prompt_len);
  if (prompt == 2) {
    options.prompt_token_count = choose() % 32;
    uint32_t *ids = block(options.prompt_token_count * 4 + 1);
    for (size_t i = 0; i < options.prompt_token_count; i++) ids[i] = choose();
    options.prompt_tokens = ids;
  }
  options.render_json = next_text(&options.render_json_len);
  options.format_json = next_text(&options.format_json_len);
  options.stop = next_texts(&options.stop_count);
  options.logprobs = (int32_t)choose() - 1;
  options.max_tokens = choose() == 0 ? HOB_UNLIMITED : choose_long();
  options.seed = choose_long(), options.has_seed = choose();
  options.temperature = choose_float(), options.top_k = choose();
  options.top_p = choose() == 0 ? 1.0f : choose_float();
  options.min_p = choose_float();
  options.repetition_penalty = choose() == 0 ? 1.0f : choose_float();
  options.repetition_window = choose(), options.truncate = (int32_t)choose();
  options.coalesce_tokens = choose(), options.coalesce_ms = choose(), options.prompt_cache = choose();
  options.request = request();
  return sized(&options, sizeof options);
}

static void generate(void) {
  hob_stream *stream = NULL;
  hob_error *error = NULL;
  hob_status status = hob_engine_generate(engine, generate_options(), &stream, &error);
  check(status, error, stream);
  hob_event known = HOB_EVENT_INIT;
  size_t ends = 0, events = 0;
  while (stream) {
    hob_event *event = sized(&known, sizeof known);
    status = hob_stream_next(stream, -1, event, &error);
    MUST(status != HOB_WOULD_BLOCK && (status < 0) == (error != NULL));
    if (status == HOB_OK && event->struct_size >= 8) ends += event->kind == HOB_EVENT_FINISHED;
    if (status < 0 && hob_error_status(error) != HOB_INVALID_ARGUMENT) ends++;
    hob_error_free(error);
    if (status == HOB_END || ++events > 64) break;
  }
  MUST(ends <= 1);
  hob_stream_free(stream);
}

static void embed(void) {
  hob_embed_options options = HOB_EMBED_OPTIONS_INIT;
  options.model = model(&options.model_len);
  options.normalize = (int32_t)choose(), options.truncate = (int32_t)choose();
  options.dimensions = choose_long();
  options.texts = next_texts(&options.text_count);
  options.prompt_name = next_text(&options.prompt_name_len);
  options.request = request();
  hob_usage usage = HOB_USAGE_INIT;
  hob_buffer *vectors = NULL;
  hob_error *error = NULL;
  hob_status status = hob_engine_embed(engine, sized(&options, sizeof options), &vectors, sized(&usage, sizeof usage), &error);
  check(status, error, vectors);
  if (vectors) {
    size_t rows, dimensions;
    const float *data = hob_buffer_floats(vectors, &rows, &dimensions);
    float sum = 0;
    for (size_t i = 0; i < rows * dimensions; i++) sum += data[i];
    MUST(rows > 0 && sum == sum);
  }
  hob_buffer_release(vectors);
}

static void rerank(void) {
  hob_rerank_options options = HOB_RERANK_OPTIONS_INIT;
  options.model = model(&options.model_len);
  options.truncate = (int32_t)choose(), options.unsorted = choose(), options.top_n = choose_long();
  options.query = next_text(&options.query_len);
  options.documents = next_texts(&options.document_count);
  options.instruct = next_text(&options.instruct_len);
  options.request = request();
  hob_ranking *ranking = NULL;
  hob_error *error = NULL;
  check(hob_engine_rerank(engine, sized(&options, sizeof options), &ranking, NULL, &error), error, ranking);
  size_t count = 0;
  const hob_ranked *items = hob_ranking_items(ranking, &count);
  for (size_t i = 0; i < count; i++) MUST(items[i].index < options.document_count);
  hob_ranking_free(ranking);
}

static void decide_or_score(int score) {
  hob_buffer *answer = NULL;
  hob_error *error = NULL;
  if (score) {
    size_t len;
    const char *completion = next_text(&len);
    check(hob_engine_score(engine, generate_options(), completion, len, &answer, &error), error, answer);
  } else {
    hob_decide_options options = HOB_DECIDE_OPTIONS_INIT;
    options.model = model(&options.model_len);
    options.decision = (int32_t)choose();
    options.messages_json = next_text(&options.messages_json_len);
    options.prompt = next_text(&options.prompt_len);
    options.render_json = next_text(&options.render_json_len);
    options.answers = next_texts(&options.answer_count);
    options.request = request();
    check(hob_engine_decide(engine, sized(&options, sizeof options), &answer, &error), error, answer);
  }
  hob_buffer_release(answer);
}

static hob_status load(void *user_data, const hob_load_context *context) {
  if (user_data) hob_load_context_set_measured(context, *(uint32_t *)user_data);
  return user_data ? HOB_OK : HOB_WOULD_BLOCK;
}

static void pools(void) {
  hob_pool_options options = HOB_POOL_OPTIONS_INIT;
  options.idle = (int32_t)choose(), options.idle_seconds = choose(), options.no_room = (int32_t)choose();
  options.budget_bytes = choose_long(), options.physical_limit_bytes = choose_long(), options.max_waiting = choose_long();
  options.no_drain_after_release = choose(), options.settle_ms = choose();
  hob_pool *pool = NULL;
  hob_error *error = NULL;
  // Each is a thread: only some of the inputs make one that is valid.
  if (choose() == 5) check(hob_pool_new(sized(&options, sizeof options), &pool, &error), error, pool);
  hob_pool_release(pool);

  uint32_t bytes = choose();
  hob_admit_options admit = HOB_ADMIT_OPTIONS_INIT;
  admit.no_room = HOB_NO_ROOM_REFUSE;
  admit.key = next_text(&admit.key_len), admit.cost_bytes = choose_long(), admit.timeout_ms = choose() % 4;
  admit.idle = (int32_t)choose(), admit.idle_seconds = choose(), admit.use_idle = (int32_t)choose(), admit.use_idle_seconds = choose();
  admit.replace = choose(), admit.in_use = choose(), admit.load = choose() == 9 ? NULL : load;
  admit.user_data = choose() == 9 ? NULL : &bytes;
  hob_admitted admitted = HOB_ADMITTED_INIT;
  hob_status status = hob_pool_admit(host_pool, sized(&admit, sizeof admit), &admitted, &error);
  MUST(status != HOB_INTERNAL && (status < 0) == (error != NULL));
  hob_error_free(error);
  if (status == HOB_OK && admit.in_use == 1) hob_pool_end_use(host_pool, admitted.token, NULL);
  size_t len;
  const char *key = next_text(&len);
  hob_buffer *plan = NULL;
  status = hob_pool_plan(host_pool, key, len, choose_long(), (int32_t)choose(), &plan, &error);
  check(status, error, plan);
  hob_buffer_release(plan);
  hob_pool_evict(host_pool, admit.key, admit.key_len, 1, NULL, NULL, NULL);
}

static void tokenizers(void) {
  static hob_tokenizer *tokenizer;
  if (!tokenizer) MUST(hob_engine_tokenizer(engine, "chat", 4, &tokenizer, NULL) == HOB_OK);
  size_t messages_len, render_len, text_len, count;
  const char *messages = next_text(&messages_len), *render = next_text(&render_len), *text = next_text(&text_len);
  hob_buffer *rendered = NULL, *ids = NULL, *again = NULL;
  hob_error *error = NULL;
  check(hob_tokenizer_render(tokenizer, messages, messages_len, render, render_len, &rendered, NULL, &error), error, rendered);
  check(hob_tokenizer_encode(tokenizer, text, text_len, (int32_t)choose(), (int32_t)choose(), &ids, &error), error, ids);
  const uint32_t *tokens = hob_buffer_ids(ids, &count);
  check(hob_tokenizer_decode(tokenizer, tokens, count, (int32_t)choose(), &again, &error), error, again);
  hob_buffer_release(rendered);
  hob_buffer_release(ids);
  hob_buffer_release(again);
}

static void engines(void) {
  // Refused ones only, nearly always: an engine is two threads.
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.idle = (int32_t)choose(), options.no_room = (int32_t)choose(), options.capacity = choose() % 20, options.queue = choose();
  options.budget_bytes = choose_long(), options.prompt_cache_bytes = choose_long();
  options.close_timeout_ms = choose_long(), options.stuck_after_ms = choose_long();
  options.drain_after_release = choose();
  options.limits_json = next_text(&options.limits_json_len);
  size_t len;
  const char *models = next_text(&len);
  hob_engine *another = NULL;
  hob_error *error = NULL;
  check(hob_engine_open_fake(models, len, sized(&options, sizeof options), &another, &error), error, another);
  hob_engine_release(another);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!engine) {
    static const char MODELS[] =
        "[{\"name\": \"chat\", \"kind\": \"chat\", \"bytes\": 1000, \"reply\": \"<tool_call>{\\\"name\\\": \\\"f\\\"}</tool_call> so\"},"
        " {\"name\": \"embed\", \"kind\": \"embedder\", \"bytes\": 500, \"dimensions\": 4},"
        " {\"name\": \"rank\", \"kind\": \"reranker\", \"bytes\": 500}]";
    hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
    options.budget_bytes = UINT64_C(1) << 30;
    MUST(hob_engine_open_fake(MODELS, sizeof MODELS - 1, &options, &engine, NULL) == HOB_OK);
    hob_pool_options pool = HOB_POOL_OPTIONS_INIT;
    pool.budget_bytes = 1000;
    MUST(hob_pool_new(&pool, &host_pool, NULL) == HOB_OK);
  }
  choices = data;
  choices_end = memchr(data, '\n', size);
  if (!choices_end) choices_end = data + size;
  texts = choices_end < data + size ? choices_end + 1 : data + size;
  texts_end = data + size;
  int64_t before = hob_live_handles();
  uint32_t what = choose();
  if (what < 4 || what > 9) generate();
  if (what == 4) embed();
  if (what == 5) rerank();
  if (what == 6) decide_or_score(choose() == 1);
  if (what == 7) pools();
  if (what == 8) tokenizers();
  if (what == 9) engines();
  MUST(hob_live_handles() <= before + 1);  // the tokenizer is kept
  while (block_count > 0) free(blocks[--block_count]);
  return 0;
}
