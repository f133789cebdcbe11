// A model's text side without its weights, marks of an answer, and where results come from. On a scripted engine.
#include "check.h"

#define TOOLS "{\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"look\", \"parameters\": {\"type\": \"object\"}}}]}"
#define MODELS                                                                                                             \
  "[{\"name\": \"chat\", \"kind\": \"chat\", \"bytes\": 10, \"load_parts\": 2},"                                             \
  " {\"name\": \"caller\", \"kind\": \"chat\", \"bytes\": 10, \"reply\": \"<think>so</think>Hm. <tool_call>{\\\"name\\\": "   \
  "\\\"look\\\", \\\"arguments\\\": {\\\"at\\\": 1}}</tool_call>\"},"                                                        \
  " {\"name\": \"embed\", \"kind\": \"embedder\", \"bytes\": 10, \"dimensions\": 4},"                                        \
  " {\"name\": \"rank\", \"kind\": \"reranker\", \"bytes\": 10}]"

static hob_engine *open_models(void) {
  hob_engine *engine = NULL;
  hob_engine_options options = HOB_ENGINE_OPTIONS_INIT;
  options.budget_bytes = 4000;
  OK(hob_engine_open_fake(MODELS, HOB_NUL_TERMINATED, &options, &engine, &error));
  return engine;
}

static int has(hob_buffer *buffer, const char *text) { return strstr(hob_buffer_text(buffer), text) != NULL; }

static void texts_become_tokens_and_come_back(void) {
  hob_engine *engine = open_models();
  hob_tokenizer *tokenizer = NULL;
  EXPECT(HOB_NOT_FOUND, hob_engine_tokenizer(engine, "nobody", HOB_NUL_TERMINATED, &tokenizer, &error));
  OK(hob_engine_tokenizer(engine, "chat", HOB_NUL_TERMINATED, &tokenizer, &error));
  hob_engine_release(engine);  // it depends on nothing
  hob_buffer *ids = NULL, *text = NULL;
  OK(hob_tokenizer_encode(tokenizer, "a\0b", 3, 0, 0, &ids, &error));
  size_t count = 0;
  const uint32_t *tokens = hob_buffer_ids(ids, &count);
  CHECK(count == 3 && hob_buffer_text(ids) == NULL && hob_buffer_floats(ids, NULL, NULL) == NULL);
  hob_buffer_view view = HOB_BUFFER_VIEW_INIT;
  OK(hob_buffer_get_view(ids, &view, &error));
  CHECK(view.dtype == HOB_DTYPE_UINT32 && view.rank == 1 && view.shape[0] == 3 && view.strides[0] == 4 && view.data == tokens);
  OK(hob_tokenizer_decode(tokenizer, tokens, count, 0, &text, &error));
  OK(hob_buffer_get_view(text, &view, &error));
  CHECK(view.len == 3 && memcmp(view.data, "a\0b", 4) == 0 && hob_buffer_ids(text, &count) == NULL && count == 0);
  hob_buffer_release(text);
  const uint32_t strange[] = {UINT32_MAX, tokens[0]};
  OK(hob_tokenizer_decode(tokenizer, strange, 2, 1, &text, &error));
  CHECK(strcmp(hob_buffer_text(text), "a") == 0);
  hob_buffer_release(text);
  OK(hob_tokenizer_decode(tokenizer, NULL, 0, 1, &text, &error));
  CHECK(strcmp(hob_buffer_text(text), "") == 0);
  hob_buffer_release(text);
  EXPECT(HOB_INVALID_ARGUMENT, hob_tokenizer_decode(tokenizer, NULL, 1, 1, &text, &error));
  EXPECT(HOB_INVALID_ARGUMENT, hob_tokenizer_encode(tokenizer, "\xff", 1, 0, 0, &text, &error));
  CHECK(text == NULL);
  hob_buffer_release(ids);
  hob_tokenizer *again = hob_tokenizer_retain(tokenizer);
  hob_tokenizer_release(tokenizer);
  OK(hob_tokenizer_info(again, &text, &error));
  CHECK(has(text, "\"vocab_size\":") && has(text, "\"eos_ids\":[") && has(text, "\"chat_template\":\"{%"));
  hob_buffer_release(text);
  hob_tokenizer_release(again);
}

static void conversations_are_rendered_as_they_are_fed(void) {
  hob_engine *engine = open_models();
  hob_tokenizer *tokenizer = NULL;
  OK(hob_engine_tokenizer(engine, "chat", HOB_NUL_TERMINATED, &tokenizer, &error));
  const char *messages = "[{\"role\": \"user\", \"content\": \"Hi\"}]";
  hob_buffer *text = NULL, *ids = NULL;
  OK(hob_tokenizer_render(tokenizer, messages, HOB_NUL_TERMINATED, NULL, 0, &text, &ids, &error));
  CHECK(strcmp(hob_buffer_text(text), "user: Hi\nassistant: ") == 0);
  size_t count = 0;
  hob_buffer_ids(ids, &count);
  // As many tokens as the model gets.
  hob_generate_options options = HOB_GENERATE_OPTIONS_INIT;
  options.model = "chat", options.messages_json = messages;
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_event event = HOB_EVENT_INIT;
  while (hob_stream_next(stream, -1, &event, NULL) == HOB_OK) {
    if (event.kind != HOB_EVENT_FINISHED) continue;
    CHECK(event.summary->prompt_tokens == count && event.summary->struct_size == sizeof *event.summary);
    CHECK(strlen(event.summary->provenance_json) == event.summary->provenance_json_len);
    CHECK(strstr(event.summary->provenance_json, "\"model\":\"chat\"") && strstr(event.summary->provenance_json, "\"runtime\":"));
  }
  hob_stream_free(stream);
  hob_buffer_release(text);
  hob_buffer_release(ids);
  OK(hob_tokenizer_render(tokenizer, messages, HOB_NUL_TERMINATED, "{\"add_generation_prompt\": false}", HOB_NUL_TERMINATED, &text,
                          NULL, &error));
  CHECK(strcmp(hob_buffer_text(text), "user: Hi\n") == 0);
  hob_buffer_release(text);
  EXPECT(HOB_INVALID_ARGUMENT, hob_tokenizer_render(tokenizer, "[]", 2, NULL, 0, &text, &ids, &error));
  EXPECT(HOB_INVALID_ARGUMENT, hob_tokenizer_render(tokenizer, "{}", 2, NULL, 0, &text, &ids, &error));
  EXPECT(HOB_INVALID_ARGUMENT, hob_tokenizer_render(tokenizer, messages, HOB_NUL_TERMINATED, "{\"no\": 1}", 9, &text, &ids, &error));
  CHECK(text == NULL && ids == NULL);
  hob_tokenizer_release(tokenizer);
  hob_engine_release(engine);
}

// Events of one answer, as letters: c for a chunk, r for one with reasoning, t for a call, x for a rejected one.
static void events_of(hob_engine *engine, const char *format, char *seen) {
  hob_generate_options options = HOB_GENERATE_OPTIONS_INIT;
  options.model = "caller", options.messages_json = "[{\"role\": \"user\", \"content\": \"Hi\"}]";
  options.render_json = TOOLS, options.format_json = format;
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  hob_event event = HOB_EVENT_INIT;
  char last = 0;
  while (hob_stream_next(stream, -1, &event, NULL) == HOB_OK) {
    char letter = 0;
    if (event.kind == HOB_EVENT_CHUNK && event.reasoning) letter = 'r';
    if (event.kind == HOB_EVENT_CHUNK && event.text) letter = 'c';
    if (event.kind == HOB_EVENT_TOOL_CALL) {
      letter = 't';
      CHECK(strcmp(event.call_name, "look") == 0 && strcmp(event.text, "{\"at\": 1}") == 0 && event.call_id_len > 0);
    }
    if (event.kind == HOB_EVENT_REJECTED_CALL) letter = 'x';
    if (letter && letter != last) *seen++ = last = letter;
  }
  *seen = 0;
  hob_stream_free(stream);
}

static void a_host_may_know_better_which_marks_an_answer_holds(void) {
  hob_engine *engine = open_models();
  char seen[16];
  events_of(engine, NULL, seen);  // the template knows no marks
  CHECK(strcmp(seen, "c") == 0);
  events_of(engine, "{\"tools\": \"hermes\", \"reasoning\": {\"open\": \"<think>\", \"close\": \"</think>\"}}", seen);
  CHECK(strcmp(seen, "rct") == 0);
  events_of(engine, "{\"tools\": null, \"reasoning\": null}", seen);
  CHECK(strcmp(seen, "c") == 0);
  hob_generate_options options = say("chat");
  hob_stream *stream = NULL;
  options.format_json = "{\"tools\": \"telepathy\"}";
  EXPECT(HOB_INVALID_ARGUMENT, hob_engine_generate(engine, &options, &stream, &error));
  CHECK(stream == NULL);
  hob_engine_release(engine);
}

static void results_tell_which_model_they_come_from(void) {
  hob_engine *engine = open_models();
  const hob_str texts[] = {HOB_STR("a")};
  hob_embed_options embed = HOB_EMBED_OPTIONS_INIT;
  embed.model = "embed", embed.texts = texts, embed.text_count = 1;
  hob_buffer *vectors = NULL;
  OK(hob_engine_embed(engine, &embed, &vectors, NULL, &error));
  const char *provenance = hob_buffer_provenance(vectors);
  CHECK(strstr(provenance, "\"model\":\"embed\"") && strstr(provenance, "\"pooling\":\"") && strstr(provenance, "\"manifest\":null"));
  hob_buffer_release(vectors);
  hob_rerank_options rerank = HOB_RERANK_OPTIONS_INIT;
  rerank.model = "rank", rerank.query = "a", rerank.documents = texts, rerank.document_count = 1;
  hob_ranking *ranking = NULL;
  OK(hob_engine_rerank(engine, &rerank, &ranking, NULL, &error));
  CHECK(strstr(hob_ranking_provenance(ranking), "\"model\":\"rank\""));
  hob_ranking_free(ranking);
  CHECK(hob_ranking_provenance(NULL) == NULL && hob_buffer_provenance(NULL) == NULL);

  hob_buffer *answer = NULL;
  OK(hob_engine_device(engine, &answer, &error));
  CHECK(has(answer, "\"kind\":\"fake\"") && hob_buffer_provenance(answer) == NULL);
  hob_buffer_release(answer);
  OK(hob_engine_capabilities(engine, "embed", HOB_NUL_TERMINATED, &answer, &error));
  CHECK(strcmp(hob_buffer_text(answer), "[\"embed\",\"rerank\"]") == 0);
  hob_buffer_release(answer);

  CHECK(hob_engine_requests(engine) == 0 && hob_engine_requests(NULL) == 0);
  script(engine, HOB_FAKE_HOLD, "step");
  hob_generate_options options = say("chat");
  hob_stream *stream = NULL;
  OK(hob_engine_generate(engine, &options, &stream, &error));
  CHECK(hob_engine_requests(engine) == 1);
  script(engine, HOB_FAKE_RELEASE, "step");
  hob_stream_free(stream);
  hob_engine_release(engine);
}

int main(void) {
  TEST_CLEAN(texts_become_tokens_and_come_back);
  TEST_CLEAN(conversations_are_rendered_as_they_are_fed);
  TEST_CLEAN(a_host_may_know_better_which_marks_an_answer_holds);
  TEST_CLEAN(results_tell_which_model_they_come_from);
  return 0;
}
