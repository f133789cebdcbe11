// Vectors and rankings on a scripted engine and, when folders are given, on real models. Arguments: [EMBEDDER RERANKER]
#include "check.h"

#include <math.h>

static const hob_str TEXTS[] = {HOB_STR("a cat"), {"a kitten, cut", 8}};
static const char *embedder, *reranker;

static hob_embed_options embedding(const char *model) {
  hob_embed_options options = HOB_EMBED_OPTIONS_INIT;
  options.model = model;
  options.texts = TEXTS;
  options.text_count = 2;
  return options;
}

static void vectors_are_handed_out_as_a_view(void) {
  hob_engine *engine = open_fake();
  hob_embed_options options = embedding("embed");
  hob_buffer *vectors = NULL;
  hob_usage usage = HOB_USAGE_INIT;
  OK(hob_engine_embed(engine, &options, &vectors, &usage, &error));
  size_t rows = 0, dimensions = 0;
  const float *data = hob_buffer_floats(vectors, &rows, &dimensions);
  CHECK(rows == 2 && dimensions == 4 && usage.prompt_tokens > 0 && usage.total_s >= 0);
  hob_buffer_view view = HOB_BUFFER_VIEW_INIT;
  OK(hob_buffer_get_view(vectors, &view, &error));
  CHECK(view.data == data && view.len == 32 && view.dtype == HOB_DTYPE_FLOAT32 && view.rank == 2);
  CHECK(view.shape[0] == 2 && view.shape[1] == 4 && view.strides[0] == 16 && view.strides[1] == 4);
  CHECK(hob_buffer_text(vectors) == NULL);
  // It depends on nothing.
  hob_buffer *kept = hob_buffer_retain(vectors);
  hob_buffer_release(vectors);
  hob_engine_release(engine);
  CHECK(hob_buffer_floats(kept, NULL, NULL) == data && data[0] >= 0);
  hob_buffer_release(kept);
}

static void wrong_requests_are_refused(void) {
  hob_engine *engine = open_fake();
  hob_embed_options options = embedding("embed");
  hob_buffer *vectors = NULL;
  options.text_count = 0;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_embed(engine, &options, &vectors, NULL, &error));
  CHECK(vectors == NULL);
  options = embedding("chat");
  EXPECT(HOB_UNSUPPORTED, hob_engine_embed(engine, &options, &vectors, NULL, &error));
  options = embedding("nobody");
  EXPECT(HOB_NOT_FOUND, hob_engine_embed(engine, &options, &vectors, NULL, &error));
  options = embedding("embed");
  options.truncate = HOB_TRUNCATE_START;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_embed(engine, &options, &vectors, NULL, &error));
  options.truncate = 99;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_embed(engine, &options, &vectors, NULL, &error));
  const hob_str broken[] = {HOB_STR("\xff\xfe")};
  options = embedding("embed");
  options.texts = broken;
  options.text_count = 1;
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_embed(engine, &options, &vectors, NULL, &error));
  options = embedding("embed");
  hob_request_options request = HOB_REQUEST_OPTIONS_INIT;
  hob_cancel_token *token = hob_cancel_token_with_deadline(NULL, 0);
  CHECK(hob_cancel_token_reason(token) == HOB_TIMEOUT);
  request.cancel = token;
  options.request = &request;
  EXPECT(HOB_TIMEOUT, hob_engine_embed(engine, &options, &vectors, NULL, &error));
  hob_cancel_token_release(token);
  hob_engine_release(engine);
}

static void documents_are_ranked(void) {
  hob_engine *engine = open_fake();
  const hob_str documents[] = {HOB_STR("xyz"), HOB_STR("abc"), HOB_STR("abx")};
  hob_rerank_options options = HOB_RERANK_OPTIONS_INIT;
  options.model = "rank";
  options.query = "abc";
  options.documents = documents;
  options.document_count = 3;
  options.top_n = 2;
  hob_ranking *ranking = NULL;
  OK(hob_engine_rerank(engine, &options, &ranking, NULL, &error));
  size_t count = 0;
  const hob_ranked *items = hob_ranking_items(ranking, &count);
  CHECK(count == 2 && items[0].index == 1 && items[1].index == 2 && items[0].score > items[1].score);
  CHECK(hob_ranking_score_kind(ranking) == HOB_SCORE_NORMALIZED && !isnan(items[0].logit));
  hob_ranking_free(ranking);
  options.model = "embed";
  OK(hob_engine_rerank(engine, &options, &ranking, NULL, &error));
  CHECK(hob_ranking_score_kind(ranking) == HOB_SCORE_COSINE && isnan(hob_ranking_items(ranking, NULL)[0].logit));
  hob_ranking_free(ranking);
  hob_engine_release(engine);
}

static void decisions_scores_and_looks(void) {
  hob_engine *engine = open_fake();
  const hob_str answers[] = {HOB_STR("yes"), HOB_STR("no")};
  hob_decide_options decide = HOB_DECIDE_OPTIONS_INIT;
  decide.model = "chat";
  decide.prompt = "Is it?";
  decide.answers = answers;
  decide.answer_count = 2;
  hob_buffer *json = NULL;
  OK(hob_engine_decide(engine, &decide, &json, &error));
  CHECK(strstr(hob_buffer_text(json), "\"confidence\""));
  hob_buffer_release(json);
  hob_generate_options prompt = HOB_GENERATE_OPTIONS_INIT;
  prompt.model = "chat";
  prompt.prompt = "ab";
  OK(hob_engine_score(engine, &prompt, "cd", 2, &json, &error));
  CHECK(strstr(hob_buffer_text(json), "\"mean_nll\""));
  hob_buffer_release(json);
  OK(hob_engine_inspect(engine, "chat", 4, NULL, &json, &error));
  CHECK(strstr(hob_buffer_text(json), "\"generate\""));
  hob_buffer_view view = HOB_BUFFER_VIEW_INIT;
  OK(hob_buffer_get_view(json, &view, &error));
  CHECK(view.dtype == HOB_DTYPE_UTF8 && view.len == strlen(hob_buffer_text(json)) && view.shape[0] == view.len);
  hob_buffer_release(json);
  hob_estimate estimate = HOB_ESTIMATE_INIT;
  OK(hob_engine_estimate(engine, "embed", HOB_NUL_TERMINATED, NULL, &estimate, &error));
  CHECK(estimate.total == 500 && estimate.weights == 500);
  hob_engine_release(engine);
}

static void real_models_embed_and_rank(void) {
  hob_engine *engine = NULL;
  OK(hob_engine_open(NULL, &engine, &error));
  hob_embed_options options = embedding(embedder);
  hob_buffer *vectors = NULL;
  OK(hob_engine_embed(engine, &options, &vectors, NULL, &error));
  size_t rows = 0, dimensions = 0;
  const float *data = hob_buffer_floats(vectors, &rows, &dimensions);
  CHECK(rows == 2 && dimensions > 0 && isfinite(data[0]) && isfinite(data[2 * dimensions - 1]));
  hob_buffer_release(vectors);
  hob_rerank_options rerank = HOB_RERANK_OPTIONS_INIT;
  rerank.model = reranker;
  rerank.query = "the";
  rerank.documents = TEXTS;
  rerank.document_count = 2;
  hob_ranking *ranking = NULL;
  OK(hob_engine_rerank(engine, &rerank, &ranking, NULL, &error));
  size_t count = 0;
  CHECK(hob_ranking_items(ranking, &count) && count == 2);
  hob_ranking_free(ranking);
  int stopped = 0;
  OK(hob_engine_close(engine, &stopped, &error));
  CHECK(stopped == 1);
  hob_engine_release(engine);
}

int main(int argc, char **argv) {
  TEST_CLEAN(vectors_are_handed_out_as_a_view);
  TEST_CLEAN(wrong_requests_are_refused);
  TEST_CLEAN(documents_are_ranked);
  TEST_CLEAN(decisions_scores_and_looks);
  if (argc > 2) {
    embedder = argv[1];
    reranker = argv[2];
    TEST_CLEAN(real_models_embed_and_rank);
  }
  return 0;
}
