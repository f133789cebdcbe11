// The header alone, twice, as C99 and as C++17, under the strictest flags.
#include "hob.h"
#include "hob.h"

int main(void) {
  hob_engine_options engine = HOB_ENGINE_OPTIONS_INIT;
  hob_request_options request = HOB_REQUEST_OPTIONS_INIT;
  hob_generate_options generate = HOB_GENERATE_OPTIONS_INIT;
  hob_embed_options embed = HOB_EMBED_OPTIONS_INIT;
  hob_rerank_options rerank = HOB_RERANK_OPTIONS_INIT;
  hob_decide_options decide = HOB_DECIDE_OPTIONS_INIT;
  hob_pool_options pool = HOB_POOL_OPTIONS_INIT;
  hob_admit_options admit = HOB_ADMIT_OPTIONS_INIT;
  hob_buffer_view view = HOB_BUFFER_VIEW_INIT;
  hob_usage usage = HOB_USAGE_INIT;
  hob_estimate estimate = HOB_ESTIMATE_INIT;
  hob_admitted admitted = HOB_ADMITTED_INIT;
  hob_event event = HOB_EVENT_INIT;
  hob_str text = HOB_STR("text");
  hob_memory memory = {(uint32_t)sizeof memory, 0, 0, 0, 0, 0};
  (void)engine, (void)request, (void)generate, (void)embed, (void)rerank, (void)decide, (void)pool, (void)admit;
  (void)view, (void)usage, (void)estimate, (void)admitted, (void)event, (void)text, (void)memory;
  return hob_abi_check(HOB_ABI_VERSION, NULL);
}
