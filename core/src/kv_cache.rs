//! Keys and values of the tokens a row has already seen, per layer.

use mlx_rs::ops::indexing::{Ellipsis, TryIndexOp};
use mlx_rs::{Array, ops};

use crate::error::Result;
use crate::nn::write_at;

/// Room is added in steps of this many tokens, so that a decode step writes in place and does not copy what came before.
pub(crate) const STEP: i32 = 256;

/// One layer's cache: `[B, kv heads, room, D]` with `len` tokens in use.
#[derive(Debug, Default)]
pub(crate) struct LayerCache {
    keys: Option<Array>,
    values: Option<Array>,
    len: i32,
}

impl LayerCache {
    pub(crate) fn len(&self) -> i32 {
        self.len
    }

    /// Appends `[B, kv heads, L, D]` keys and values and returns all of them so far.
    pub(crate) fn append(&mut self, keys: &Array, values: &Array) -> Result<(Array, Array)> {
        let end = self.len + keys.dim(2);
        let (all_keys, all_values) = match (self.keys.take(), self.values.take()) {
            (Some(old_keys), Some(old_values)) if end <= old_keys.dim(2) => (old_keys, old_values),
            (old_keys, old_values) => (grown(old_keys, keys, self.len, end)?, grown(old_values, values, self.len, end)?),
        };
        let all_keys = write_at(&all_keys, keys, self.len)?;
        let all_values = write_at(&all_values, values, self.len)?;
        self.len = end;
        let result = (used(&all_keys, end)?, used(&all_values, end)?);
        self.keys = Some(all_keys);
        self.values = Some(all_values);
        Ok(result)
    }
}

fn used(all: &Array, len: i32) -> Result<Array> {
    if all.dim(2) == len { Ok(all.clone()) } else { Ok(all.try_index((Ellipsis, ..len, ..))?) }
}

/// The first `len` tokens of `old` with room for at least `end`.
fn grown(old: Option<Array>, like: &Array, len: i32, end: i32) -> Result<Array> {
    let room = (end + STEP - 1) / STEP * STEP;
    let Some(old) = old else {
        return Ok(ops::zeros_dtype(&[like.dim(0), like.dim(1), room, like.dim(3)], like.dtype())?);
    };
    let more = ops::zeros_dtype(&[like.dim(0), like.dim(1), room - len, like.dim(3)], like.dtype())?;
    Ok(ops::concatenate(&[used(&old, len)?, more], 2)?)
}

/// A row's cache: one [`LayerCache`] per layer.
#[derive(Debug)]
pub(crate) struct KvCache {
    layers: Vec<LayerCache>,
}

impl KvCache {
    pub(crate) fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| LayerCache::default()).collect() }
    }

    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    /// Every array held, for one evaluation that keeps graphs from growing across steps.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flat_map(|layer| layer.keys.iter().chain(&layer.values))
    }
}
