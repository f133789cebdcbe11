//! GGUF's tensor blocks as MLX arrays: expanded to float32, or repacked into MLX's affine layout without loss.
//!
//! MLX can read GGUF files itself, but its parser trusts sizes and offsets, loads all tensors in one call that cannot be
//! stopped, and turns bfloat16 into float16. Here each tensor is read at its checked place, once.
//!
//! Block formats (ggml): 32 weights each. `Q4_0`: f16 scale, 16 bytes of nibbles, `w = (q - 8) d`. `Q4_1`: f16 scale, f16
//! minimum, nibbles, `w = q d + m`. `Q8_0`: f16 scale, 32 signed bytes, `w = q d`. Byte `i` of the nibbles holds weight `i` in
//! its low half and weight `i + 16` in its high half.

use half::{bf16, f16};
use mlx_rs::{Array, Dtype};

use super::FloatType;
use crate::error::{Error, Result};
use crate::gguf::TensorType;
use crate::nn::Matrix;

const BLOCK: usize = 32;

/// Bytes of a quantised tensor of `elements` weights in MLX's affine layout with group 32.
pub(super) fn packed_bytes(kind: TensorType, elements: u64, float: FloatType) -> u64 {
    let bits = if kind == TensorType::Q8_0 { 8 } else { 4 };
    elements * bits / 8 + elements / BLOCK as u64 * 2 * float.bytes()
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Bytes of one block; `None` for types without blocks.
fn block_bytes(kind: TensorType) -> Option<usize> {
    match kind {
        TensorType::Q4_0 => Some(2 + 16),
        TensorType::Q4_1 => Some(4 + 16),
        TensorType::Q8_0 => Some(2 + 32),
        _ => None,
    }
}

/// Scale, bias and unsigned quants of one block, so that `w = quant * scale + bias`.
fn unpack(kind: TensorType, block: &[u8], quants: &mut [u8; BLOCK]) -> (f32, f32) {
    let scale = half_at(block, 0);
    let nibbles = |quants: &mut [u8; BLOCK], bytes: &[u8]| {
        for (i, byte) in bytes.iter().enumerate() {
            quants[i] = byte & 15;
            quants[i + 16] = byte >> 4;
        }
    };
    match kind {
        TensorType::Q4_0 => {
            nibbles(quants, &block[2..]);
            (scale, -8.0 * scale)
        }
        TensorType::Q4_1 => {
            nibbles(quants, &block[4..]);
            (scale, half_at(block, 2))
        }
        _ => {
            for (quant, byte) in quants.iter_mut().zip(&block[2..]) {
                *quant = byte ^ 0x80; // signed to offset-128
            }
            (scale, -128.0 * scale)
        }
    }
}

/// The tensor as a dense array: float32 from blocks, else the stored type. The data's length was checked by the header.
pub(super) fn dense(kind: TensorType, data: &[u8], shape: &[i32]) -> Result<Array, String> {
    if let Some(size) = block_bytes(kind) {
        let mut values = vec![0f32; data.len() / size * BLOCK];
        let mut quants = [0u8; BLOCK];
        for (block, out) in data.chunks_exact(size).zip(values.chunks_exact_mut(BLOCK)) {
            let (scale, bias) = unpack(kind, block, &mut quants);
            for (value, quant) in out.iter_mut().zip(quants) {
                *value = f32::from(quant).mul_add(scale, bias);
            }
        }
        check_count(values.len(), shape)?;
        return Ok(Array::from_slice(&values, shape));
    }
    match kind {
        TensorType::F32 => {
            let values: Vec<f32> = data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            check_count(values.len(), shape)?;
            Ok(Array::from_slice(&values, shape))
        }
        TensorType::F16 => {
            let values: Vec<f16> = data.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
            check_count(values.len(), shape)?;
            Ok(Array::from_slice(&values, shape))
        }
        TensorType::BF16 => {
            let values: Vec<bf16> = data.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect();
            check_count(values.len(), shape)?;
            Ok(Array::from_slice(&values, shape))
        }
        other => Err(format!("has type {}, which Hob cannot read", other.name())),
    }
}

fn check_count(count: usize, shape: &[i32]) -> Result<(), String> {
    let wanted = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(usize::try_from(dim).ok()?));
    if wanted != Some(count) {
        return Err(format!("holds {count} numbers; its shape {shape:?} asks for others"));
    }
    // MLX counts the elements of a host array in 32 bits.
    if i32::try_from(count).is_err() {
        return Err(format!("holds {count} numbers; at most 2^31 - 1 can be loaded"));
    }
    Ok(())
}

/// A quantised matrix in MLX's affine layout (group 32): the same integers, scales and biases, so nothing is rounded
/// when `float` is float32 or float16.
pub(super) fn affine(kind: TensorType, data: &[u8], out: i32, input: i32, float: Dtype) -> Result<Matrix> {
    let size = block_bytes(kind).ok_or_else(|| Error::internal("a dense tensor taken for a quantised one"))?;
    let blocks = data.len() / size;
    let bits: usize = if kind == TensorType::Q8_0 { 8 } else { 4 };
    let per_word = 32 / bits;
    let mut packed = vec![0u32; blocks * BLOCK / per_word];
    let (mut scales, mut biases) = (vec![0f32; blocks], vec![0f32; blocks]);
    let mut quants = [0u8; BLOCK];
    for (index, block) in data.chunks_exact(size).enumerate() {
        (scales[index], biases[index]) = unpack(kind, block, &mut quants);
        let words = &mut packed[index * BLOCK / per_word..][..BLOCK / per_word];
        for (word, group) in words.iter_mut().zip(quants.chunks_exact(per_word)) {
            *word = group.iter().rev().fold(0, |word, &quant| word << bits | u32::from(quant));
        }
    }
    let group = i32::try_from(BLOCK).unwrap_or(32);
    let bits = i32::try_from(bits).unwrap_or(4);
    let columns = i32::try_from(i64::from(input) * i64::from(bits) / 32).map_err(|_| Error::internal("a row too wide"))?;
    let groups = input / group;
    let words = i64::from(out) * i64::from(columns);
    if words > i64::from(i32::MAX) {
        return Err(Error::unsupported(format!("a matrix of {out} x {input} is too large to stay quantised; load it expanded")));
    }
    if i64::try_from(packed.len()) != Ok(words) || i64::try_from(blocks) != Ok(i64::from(out) * i64::from(groups)) {
        return Err(Error::internal("a quantised tensor whose blocks do not fill its shape"));
    }
    Ok(Matrix::Affine {
        packed: Array::from_slice(&packed, &[out, columns]),
        scales: Array::from_slice(&scales, &[out, groups]).as_dtype(float)?,
        biases: Array::from_slice(&biases, &[out, groups]).as_dtype(float)?,
        group_size: group,
        bits,
    })
}
