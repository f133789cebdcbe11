// Embeds, ranks and chats. Arguments: a folder of an embedder, a chat model (a folder or a .gguf file).
#include <hob.h>
#include <stdio.h>

static int failed(hob_error *error) {
  fprintf(stderr, "%s: %s\n", hob_error_name(error), hob_error_message(error));
  hob_error_free(error);
  return 1;
}

int main(int argc, char **argv) {
  if (argc < 3) return fprintf(stderr, "usage: smoke EMBEDDER CHAT-MODEL\n"), 2;
  hob_error *error = NULL;
  hob_engine *engine = NULL;
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.budget_bytes = UINT64_C(2) << 30;  // for all models together
  if (hob_engine_open(&options, &engine, &error) != HOB_OK) return failed(error);

  // Vectors: looked at where they are, without a copy.
  const hob_str texts[] = {HOB_STR("a cat"), HOB_STR("a kitten")};
  hob_embed_options embed = HOB_EMBED_OPTIONS_INIT;
  embed.model = argv[1], embed.texts = texts, embed.text_count = 2;
  hob_buffer *vectors = NULL;
  if (hob_engine_embed(engine, &embed, &vectors, NULL, &error) != HOB_OK) return failed(error);
  size_t rows, dimensions;
  const float *first = hob_buffer_floats(vectors, &rows, &dimensions);
  printf("%zu vectors of %zu numbers, the first begins with %.4f\n", rows, dimensions, (double)first[0]);

  // Ranking: by a reranker or, as here, by an embedder's cosine.
  hob_rerank_options rerank = HOB_RERANK_OPTIONS_INIT;
  rerank.model = argv[1], rerank.query = "pets", rerank.documents = texts, rerank.document_count = 2;
  hob_ranking *ranking = NULL;
  if (hob_engine_rerank(engine, &rerank, &ranking, NULL, &error) != HOB_OK) return failed(error);
  printf("the best document is %d\n", (int)hob_ranking_items(ranking, NULL)[0].index);

  // Chat: a stream of events, the last one tells how it ended.
  hob_generate_options generate = HOB_GENERATE_OPTIONS_INIT;
  generate.model = argv[2], generate.max_tokens = 16;
  generate.messages_json = "[{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]";
  hob_stream *stream = NULL;
  if (hob_engine_generate(engine, &generate, &stream, &error) != HOB_OK) return failed(error);
  hob_event event = HOB_EVENT_INIT;
  hob_status status;
  while ((status = hob_stream_next(stream, -1, &event, &error)) == HOB_OK) {
    if (event.kind == HOB_EVENT_CHUNK && event.text) fputs(event.text, stdout);
    if (event.kind == HOB_EVENT_FINISHED) printf("\n%d tokens\n", (int)event.summary->completion_tokens);
  }
  if (status != HOB_END) return failed(error);

  hob_stream_free(stream);
  hob_ranking_free(ranking);
  hob_buffer_release(vectors);
  hob_engine_release(engine);
  return 0;
}
