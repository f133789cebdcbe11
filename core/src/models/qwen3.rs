//! qwen3 (`Qwen3ForCausalLM`, `Qwen3Model`): llama's graph with RMS norms on each head's query and key, and its own head width.

use crate::model::config::DecoderDefaults;

/// What transformers' `Qwen3Config` assumes when config.json is silent.
pub(crate) const DEFAULTS: DecoderDefaults = DecoderDefaults { qkv_bias: None, qk_norm: true, rms_eps: 1e-6, head_dim: Some(128) };
