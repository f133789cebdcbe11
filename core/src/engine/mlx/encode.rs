//! Embedders and cross-encoders on MLX: padded batches, pooling, Dense modules and classifiers.

use mlx_rs::ops::indexing::{TryIndexOp, take_along_axis};
use mlx_rs::{Array, Dtype, ops, transforms};

use super::{Activation, Body, PREFILL_CHUNK, Resident, check_ids, id_array, rows_of};
use crate::engine::backend::TokenBatch;
use crate::error::{Error, Result};
use crate::model::PoolingMode;
use crate::nn::scalar;

/// One pooled vector per row.
pub(super) fn embed(resident: &Resident, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
    let (hidden, padded) = encode(resident, batch)?;
    let mut vectors = Vec::new();
    for mode in &resident.pooling {
        vectors.push(pool(&hidden, &padded, *mode)?);
    }
    let mut pooled = ops::concatenate(&vectors, 1)?;
    for (layer, activation) in &resident.dense {
        pooled = layer.forward(&pooled)?;
        if *activation == Activation::Tanh {
            pooled = ops::tanh(&pooled)?;
        }
    }
    rows_of(&pooled)
}

/// The classifier's logits, row by row.
pub(super) fn classify(resident: &Resident, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
    let Body::Encoder(encoder) = &resident.body else { return Err(Error::unsupported("this model has no classifier")) };
    let (hidden, _) = encode(resident, batch)?;
    rows_of(&encoder.classify(&hidden)?)
}

/// Padded ids of a batch with each row's length.
struct Padded {
    mask: Array,
    lengths: Vec<i32>,
}

fn encode(resident: &Resident, batch: &TokenBatch) -> Result<(Array, Padded)> {
    let rows = i32::try_from(batch.ids.len()).unwrap_or(0);
    let longest = batch.ids.iter().map(Vec::len).max().unwrap_or(0);
    if rows == 0 || batch.ids.iter().any(Vec::is_empty) {
        return Err(Error::internal("an empty batch reached the device"));
    }
    let width = i32::try_from(longest).map_err(|_| Error::invalid(format!("a row of {longest} tokens is too long")))?;
    let pad = |row: &[u32], fill: u32| row.iter().copied().chain(std::iter::repeat(fill)).take(longest).collect::<Vec<_>>();
    let mut ids = Vec::with_capacity(batch.ids.len() * longest);
    let mut types = Vec::with_capacity(ids.capacity());
    let mut mask = Vec::with_capacity(ids.capacity());
    for (index, row) in batch.ids.iter().enumerate() {
        check_ids(row, resident.vocabulary)?;
        ids.extend(pad(row, 0));
        let segments = batch.types.get(index).map_or(&[][..], Vec::as_slice);
        if segments.iter().any(|&segment| segment >= resident.types) {
            return Err(Error::internal("a segment id beyond the model's types"));
        }
        types.extend(pad(segments, 0));
        mask.extend(pad(&vec![1; row.len()], 0));
    }
    let shape = [rows, width];
    let ids = id_array(&ids, &shape)?;
    let padded = Padded {
        mask: id_array(&mask, &shape)?.as_dtype(Dtype::Float32)?,
        lengths: batch.ids.iter().map(|row| i32::try_from(row.len()).unwrap_or(0)).collect(),
    };
    let hidden = match &resident.body {
        Body::Encoder(encoder) => encoder.hidden(&ids, &id_array(&types, &shape)?, &padded.mask)?,
        // Causal attention never looks right, so padding on the right needs no mask. Long rows go in by chunks, as prompts do.
        Body::Decoder(decoder) => {
            let mut cache = decoder.new_cache(batch.ids.len());
            let step = i32::try_from(PREFILL_CHUNK).unwrap_or(i32::MAX);
            let mut parts = Vec::new();
            for start in (0..width).step_by(PREFILL_CHUNK) {
                let part = decoder.hidden(&ids.try_index((.., start..(start + step).min(width)))?, &mut cache)?;
                transforms::eval(cache.arrays().chain([&part]))?;
                parts.push(part);
            }
            if parts.len() == 1 { parts.remove(0) } else { ops::concatenate(&parts, 1)? }
        }
    };
    Ok((hidden.as_dtype(Dtype::Float32)?, padded))
}

/// `[B, L, E]` -> `[B, E]` (sentence-transformers' Pooling module).
fn pool(hidden: &Array, padded: &Padded, mode: PoolingMode) -> Result<Array> {
    let mask = ops::expand_dims(&padded.mask, 2)?;
    match mode {
        PoolingMode::Cls => Ok(hidden.try_index((.., 0, ..))?),
        PoolingMode::Mean => {
            let count = ops::maximum(mask.sum_axis(1, false)?, scalar(1e-9, Dtype::Float32)?)?;
            Ok(ops::divide(ops::multiply(hidden, &mask)?.sum_axis(1, false)?, count)?)
        }
        PoolingMode::Max => {
            let real = ops::gt(&mask, scalar(0.0, Dtype::Float32)?)?;
            Ok(ops::select(real, hidden, scalar(f32::NEG_INFINITY, Dtype::Float32)?)?.max_axis(1, false)?)
        }
        PoolingMode::LastToken => {
            let last: Vec<i32> = padded.lengths.iter().map(|len| len - 1).collect();
            let rows = hidden.dim(0);
            let index = ops::broadcast_to(Array::from_slice(&last, &[rows, 1, 1]), &[rows, 1, hidden.dim(2)])?;
            Ok(ops::squeeze_axes(take_along_axis(hidden, index, 1)?, &[1])?)
        }
    }
}
