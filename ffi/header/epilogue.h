/**
 * For any length of a text: up to its terminating NUL. What the INIT macros set.
 */
#define HOB_NUL_TERMINATED SIZE_MAX

/* A hob_str of a NUL-terminated text, for arrays of texts. */
#define HOB_STR(text) { (text), HOB_NUL_TERMINATED }

/* What the _init functions write. */
#define HOB_ENGINE_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_engine_options), HOB_IDLE_DEFAULT, 0, HOB_NO_ROOM_DEFAULT, 0, UINT64_C(536870912), 8, 64, \
    120000, 30000, NULL, HOB_NUL_TERMINATED, 1, 0 }
#define HOB_REQUEST_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_request_options), HOB_ON_CANCEL_ABORT, NULL, 0, HOB_MODEL_KIND_AUTO, HOB_FLOAT_AUTO, HOB_AUTO, \
    HOB_POOLING_AUTO, HOB_IDLE_DEFAULT, 0, HOB_IDLE_DEFAULT, 0, 0, 0, NULL, HOB_NUL_TERMINATED }
#define HOB_GENERATE_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_generate_options), -1, NULL, HOB_NUL_TERMINATED, NULL, HOB_NUL_TERMINATED, NULL, \
    HOB_NUL_TERMINATED, NULL, 0, NULL, HOB_NUL_TERMINATED, HOB_UNLIMITED, NULL, 0, 0, 0, 0.0f, 0, 1.0f, 0.0f, 1.0f, 64, \
    HOB_TRUNCATE_ERROR, 1, 0, 1, 0, NULL, NULL, 0 }
#define HOB_EMBED_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_embed_options), HOB_AUTO, NULL, HOB_NUL_TERMINATED, NULL, 0, NULL, HOB_NUL_TERMINATED, 0, \
    HOB_TRUNCATE_ERROR, 0, NULL }
#define HOB_RERANK_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_rerank_options), HOB_TRUNCATE_ERROR, NULL, HOB_NUL_TERMINATED, NULL, HOB_NUL_TERMINATED, NULL, 0, \
    NULL, HOB_NUL_TERMINATED, 0, 0, 0, NULL }
#define HOB_DECIDE_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_decide_options), HOB_DECISION_CHOICE, NULL, HOB_NUL_TERMINATED, NULL, HOB_NUL_TERMINATED, NULL, \
    HOB_NUL_TERMINATED, NULL, HOB_NUL_TERMINATED, NULL, 0, NULL }
#define HOB_POOL_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_pool_options), HOB_IDLE_DEFAULT, 0, HOB_NO_ROOM_DEFAULT, 0, 0, 65536, 0, 0, 0, NULL, NULL, NULL, \
    NULL, NULL }
#define HOB_ADMIT_OPTIONS_INIT \
  { (uint32_t)sizeof(hob_admit_options), HOB_NO_ROOM_DEFAULT, NULL, HOB_NUL_TERMINATED, 0, NULL, 0, HOB_IDLE_DEFAULT, 0, \
    HOB_IDLE_DEFAULT, 0, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

/* Results that the caller provides. */
#define HOB_BUFFER_VIEW_INIT { (uint32_t)sizeof(hob_buffer_view), 0, NULL, 0, 0, NULL, NULL }
#define HOB_USAGE_INIT { (uint32_t)sizeof(hob_usage), 0, 0, 0, 0.0, 0.0, 0.0, 0.0 }
#define HOB_ESTIMATE_INIT { (uint32_t)sizeof(hob_estimate), 0, 0, 0, 0, 0 }
#define HOB_ADMITTED_INIT { (uint32_t)sizeof(hob_admitted), 0, 0, 0.0 }
#define HOB_EVENT_INIT \
  { (uint32_t)sizeof(hob_event), 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, NULL, 0, 0, 0, NULL }
