//! The few layers every model shares. Arrays are row-major; `B` batch, `L` sequence, `H` heads, `D` head width, `E` hidden width.
//!
//! Runs on the MLX owner thread only (`engine::thread`). MLX is lazy: nothing here computes until an array is evaluated.

use mlx_rs::ops::indexing::{TryIndexOp, take_axis};
use mlx_rs::{Array, Dtype, error::Exception, fast, ops};

use crate::error::{Error, ErrorKind, Result};

impl From<Exception> for Error {
    fn from(exception: Exception) -> Self {
        let what = exception.what();
        let lower = what.to_ascii_lowercase();
        let no_memory = ["unable to allocate", "out of memory", "insufficient memory", "attempting to allocate"];
        let kind = if no_memory.iter().any(|phrase| lower.contains(phrase)) { ErrorKind::OutOfMemory } else { ErrorKind::Backend };
        Self::new(kind, format!("MLX: {what}"))
    }
}

/// A matrix as it lies in memory: dense, or MLX's affine quantisation (`w = q * scale + bias` per group of a row).
#[derive(Debug)]
pub(crate) enum Matrix {
    /// `[out, in]`.
    Dense(Array),
    /// `[out, in * bits / 32]` packed in u32, with `[out, in / group_size]` scales and biases.
    Affine { packed: Array, scales: Array, biases: Array, group_size: i32, bits: i32 },
}

impl Matrix {
    pub(crate) fn arrays(&self) -> Vec<&Array> {
        match self {
            Self::Dense(weight) => vec![weight],
            Self::Affine { packed, scales, biases, .. } => vec![packed, scales, biases],
        }
    }
}

impl Matrix {
    /// Whether this device's quantised product of a few rows, for one token and for several, is near the dense one.
    pub(crate) fn multiplies_as_expanded(&self) -> Result<bool> {
        let Self::Affine { packed, scales, biases, group_size, bits } = self else { return Ok(true) };
        let rows = packed.dim(0).min(64);
        let part = |array: &Array| array.try_index((..rows, ..));
        let (packed, scales, biases) = (part(packed)?, part(scales)?, part(biases)?);
        let dense = ops::dequantize(&packed, &scales, &biases, *group_size, *bits)?.as_dtype(Dtype::Float32)?;
        let width = dense.dim(1);
        for tokens in [1, 32] {
            // Any numbers without a pattern do: a sine is the same on every device.
            let x = ops::sin(ops::multiply(Array::from_iter(0..tokens * width, &[tokens, width]), Array::from_f32(12.9898))?)?;
            let x = x.as_dtype(scales.dtype())?;
            let found = ops::quantized_matmul(&x, &packed, &scales, &biases, true, *group_size, *bits)?.as_dtype(Dtype::Float32)?;
            let wanted = ops::matmul(x.as_dtype(Dtype::Float32)?, ops::transpose(&dense)?)?;
            let error = ops::square(ops::subtract(found, &wanted)?)?.sum(None)?;
            let scale = ops::square(&wanted)?.sum(None)?;
            let number = |array: Array| array.try_item_exact::<f32>().map_err(|error| Error::internal(error.to_string()));
            // Rounding to 16 bits stays far below a tenth of the product's size; a wrong kernel does not.
            if number(error)?.sqrt() > 0.1 * number(scale)?.sqrt() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// `y = x W^T + b`.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Matrix,
    /// The dense weight seen as `[in, out]`: a view, made once.
    transposed: Option<Array>,
    bias: Option<Array>,
}

impl Linear {
    pub(crate) fn new(weight: Matrix, bias: Option<Array>) -> Result<Self> {
        let transposed = match &weight {
            Matrix::Dense(dense) => Some(ops::transpose(dense)?),
            Matrix::Affine { .. } => None,
        };
        Ok(Self { weight, transposed, bias })
    }

    /// `[.., in]` -> `[.., out]`.
    pub(crate) fn forward(&self, x: &Array) -> Result<Array> {
        let y = match (&self.weight, &self.transposed, &self.bias) {
            (_, Some(w), Some(bias)) => return Ok(ops::addmm(bias, x, w, None, None)?),
            (_, Some(w), None) => ops::matmul(x, w)?,
            (Matrix::Affine { packed, scales, biases, group_size, bits }, ..) => {
                ops::quantized_matmul(x, packed, scales, biases, true, *group_size, *bits)?
            }
            (Matrix::Dense(_), None, _) => return Err(Error::internal("a dense layer without its transposed view")),
        };
        match &self.bias {
            Some(bias) => Ok(ops::add(y, bias)?),
            None => Ok(y),
        }
    }
}

/// A table of vectors, which can also serve as the output projection (tied embeddings).
#[derive(Debug)]
pub(crate) struct Embedding {
    table: Linear,
}

impl Embedding {
    pub(crate) fn new(weight: Matrix) -> Result<Self> {
        Ok(Self { table: Linear::new(weight, None)? })
    }

    /// `[B, L]` token ids -> `[B, L, E]`. Ids must be in range: MLX does not check.
    pub(crate) fn forward(&self, ids: &Array) -> Result<Array> {
        match &self.table.weight {
            Matrix::Dense(weight) => Ok(take_axis(weight, ids, 0)?),
            Matrix::Affine { packed, scales, biases, group_size, bits } => Ok(ops::dequantize(
                take_axis(packed, ids, 0)?,
                take_axis(scales, ids, 0)?,
                &take_axis(biases, ids, 0)?,
                *group_size,
                *bits,
            )?),
        }
    }

    /// `[.., E]` -> `[.., vocabulary]`: the tied output projection.
    pub(crate) fn as_linear(&self, x: &Array) -> Result<Array> {
        self.table.forward(x)
    }
}

/// Root-mean-square normalisation (Zhang and Sennrich 2019): `x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    pub(crate) weight: Array,
    pub(crate) eps: f32,
}

impl RmsNorm {
    pub(crate) fn forward(&self, x: &Array) -> Result<Array> {
        Ok(fast::rms_norm(x, Some(&self.weight), self.eps)?)
    }
}

/// Layer normalisation (Ba et al. 2016) over the last axis.
#[derive(Debug)]
pub(crate) struct LayerNorm {
    pub(crate) weight: Array,
    pub(crate) bias: Array,
    pub(crate) eps: f32,
}

impl LayerNorm {
    pub(crate) fn forward(&self, x: &Array) -> Result<Array> {
        Ok(fast::layer_norm(x, Some(&self.weight), Some(&self.bias), self.eps)?)
    }
}

/// Rotary position embedding (Su et al. 2021), with its scaling folded in when the model is loaded.
#[derive(Debug)]
pub(crate) struct Rope {
    /// How many of a head's dimensions rotate.
    pub(crate) dims: i32,
    /// The base of the angular frequencies, when `freqs` is absent.
    pub(crate) base: f32,
    /// Positions are multiplied by this (linear scaling: 1 / factor).
    pub(crate) scale: f32,
    /// Explicit wavelengths `[dims / 2]` (what the angle is divided by), for llama3 and yarn scaling.
    pub(crate) freqs: Option<Array>,
    /// Yarn's attention factor on the rotated query and key; 1 for the others.
    pub(crate) magnitude: f32,
    /// Neighbouring dimensions rotate together, instead of a head's two halves.
    pub(crate) interleaved: bool,
}

impl Rope {
    /// `[B, H, L, D]` at positions `offset..offset + L`.
    pub(crate) fn forward(&self, x: &Array, offset: i32) -> Result<Array> {
        let base = if self.freqs.is_some() { None } else { Some(self.base) };
        let y = fast::rope(x, self.dims, self.interleaved, base, self.scale, offset, self.freqs.as_ref())?;
        if (self.magnitude - 1.0).abs() < f32::EPSILON {
            return Ok(y);
        }
        Ok(ops::multiply(y, scalar(self.magnitude, x.dtype())?)?)
    }
}

/// `[B, L, H * D]` -> `[B, H, L, D]`.
pub(crate) fn split_heads(x: &Array, heads: i32) -> Result<Array> {
    let (batch, len, width) = (x.dim(0), x.dim(1), x.dim(2));
    Ok(ops::transpose_axes(ops::reshape(x, &[batch, len, heads, width / heads])?, &[0, 2, 1, 3])?)
}

/// `[B, H, L, D]` -> `[B, L, H * D]`.
pub(crate) fn join_heads(x: &Array) -> Result<Array> {
    let (batch, heads, len, width) = (x.dim(0), x.dim(1), x.dim(2), x.dim(3));
    Ok(ops::reshape(ops::transpose_axes(x, &[0, 2, 1, 3])?, &[batch, len, heads * width])?)
}

/// `x * sigmoid(x)`. MLX's own activation goes through `compile`, which on a CPU runs a C++ compiler at run time.
pub(crate) fn silu(x: &Array) -> Result<Array> {
    Ok(ops::multiply(x, ops::sigmoid(x)?)?)
}

/// The exact Gaussian error linear unit: `x / 2 * (1 + erf(x / sqrt 2))` (Hendrycks and Gimpel 2016).
pub(crate) fn gelu(x: &Array) -> Result<Array> {
    let half = scalar(0.5, x.dtype())?;
    let one = scalar(1.0, x.dtype())?;
    let inner = ops::erf(ops::multiply(x, scalar(std::f32::consts::FRAC_1_SQRT_2, x.dtype())?)?)?;
    Ok(ops::multiply(ops::multiply(x, half)?, ops::add(inner, one)?)?)
}

/// A scalar of the given type: mixing types would promote the result.
pub(crate) fn scalar(value: f32, dtype: Dtype) -> Result<Array> {
    Ok(Array::from_f32(value).as_dtype(dtype)?)
}

/// `target` with `[.., start..start + len, ..]` along axis 2 replaced by `update`; in place when `target` has no other holder.
///
/// mlx-rs's assignment goes through reshapes and broadcasts that cost a decode step several operations per layer.
pub(crate) fn write_at(target: &Array, update: &Array, start: i32) -> Result<Array> {
    let shape = target.shape();
    let starts = [0, 0, start, 0];
    let stops = [shape[0], shape[1], start + update.dim(2), shape[3]];
    let strides = [1, 1, 1, 1];
    let stream = mlx_rs::Stream::thread_local_or_default();
    // SAFETY: the handles live through the call, the index arrays have the length passed, and a non-zero status leaves `out` empty.
    unsafe {
        let mut out = mlx_sys::mlx_array_new();
        let status = mlx_sys::mlx_slice_update(
            &raw mut out,
            target.as_ptr(),
            update.as_ptr(),
            starts.as_ptr(),
            starts.len(),
            stops.as_ptr(),
            stops.len(),
            strides.as_ptr(),
            strides.len(),
            stream.as_ptr(),
        );
        if status != 0 {
            mlx_sys::mlx_array_free(out);
            return Err(Error::new(ErrorKind::Backend, "MLX: slice update failed"));
        }
        Ok(Array::from_ptr(out))
    }
}
