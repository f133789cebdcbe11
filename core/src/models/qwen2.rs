//! qwen2 (`Qwen2ForCausalLM`): llama's graph with biases on queries, keys and values.

use crate::model::config::DecoderDefaults;

/// What transformers' `Qwen2Config` assumes when config.json is silent.
pub(crate) const DEFAULTS: DecoderDefaults =
    DecoderDefaults { qkv_bias: Some(true), qk_norm: false, rms_eps: 1e-6, head_dim: None };
