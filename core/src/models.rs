//! One file per architecture, named as config.json's `model_type` spells it, and the two traits the engine runs them through.
//!
//! Everything here runs on the MLX owner thread.

pub(crate) mod bert;
pub(crate) mod llama;
pub(crate) mod qwen2;
pub(crate) mod qwen3;

use mlx_rs::Array;

use crate::error::Result;
use crate::kv_cache::KvCache;

/// A decoder: next-token logits, or hidden states for decoder embedders.
pub(crate) trait Decoder {
    /// `[B, L]` ids at the end of the cache's rows -> final hidden states `[B, L, E]` after the last norm. `L` is 1 where rows
    /// are of different lengths.
    fn hidden(&self, ids: &Array, cache: &mut KvCache) -> Result<Array>;

    /// The last position's state alone, `[B, 1, E]`: what the next token needs. The last layer computes nothing else for the others
    /// than their keys and values.
    fn last_hidden(&self, ids: &Array, cache: &mut KvCache) -> Result<Array>;

    /// `[.., E]` hidden states -> `[.., vocabulary]` logits.
    fn logits(&self, hidden: &Array) -> Result<Array>;

    /// An empty cache for so many rows.
    fn new_cache(&self, rows: usize) -> KvCache;
}

/// A bidirectional encoder.
pub(crate) trait Encoder {
    /// `[B, L]` ids, segment ids and a 0/1 mask -> last hidden states `[B, L, E]`.
    fn hidden(&self, ids: &Array, types: &Array, mask: &Array) -> Result<Array>;

    /// Last hidden states -> classifier logits `[B, labels]`; an error when the model has no classifier.
    fn classify(&self, hidden: &Array) -> Result<Array>;
}
