//! The few layers every model shares. Arrays are row-major; `B` batch, `L` sequence, `H` heads, `D` head width, `E` hidden width.
//!
//! Runs on the MLX owner thread only (`engine::thread`). MLX is lazy: nothing here computes until an array is evaluated.

#[cfg(target_os = "linux")]
mod cuda;
#[cfg(not(target_os = "linux"))]
#[path = "nn/no_cuda.rs"]
mod cuda;

use mlx_rs::fast::ScaledDotProductAttentionMask;
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
            (Matrix::Dense(_), Some(w), Some(bias)) => return Ok(ops::addmm(bias, x, w, None, None)?),
            (Matrix::Dense(weight), Some(w), None) => match cuda::product(x, weight, None)? {
                Some(y) => y,
                None => ops::matmul(x, w)?,
            },
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

    /// `onto + x W^T + b`.
    pub(crate) fn forward_onto(&self, x: &Array, onto: &Array) -> Result<Array> {
        if let (Some(weight), None) = (self.dense(), &self.bias)
            && let Some(y) = cuda::product(x, weight, Some(onto))?
        {
            return Ok(y);
        }
        Ok(ops::add(onto, self.forward(x)?)?)
    }

    /// The weight, where it is dense.
    fn dense(&self) -> Option<&Array> {
        match &self.weight {
            Matrix::Dense(weight) => Some(weight),
            Matrix::Affine { .. } => None,
        }
    }
}

/// A layer's queries, keys and values `[B, L, H * D]` before they are split into heads: `x` is normalised, then projected.
pub(crate) fn projections(norm: &RmsNorm, x: &Array, linears: [&Linear; 3]) -> Result<[Array; 3]> {
    if let Some(projected) = cuda::projections(norm, x, linears)? {
        return Ok(projected);
    }
    let normed = norm.forward(x)?;
    let [q, k, v] = linears.map(|linear| linear.forward(&normed));
    Ok([q?, k?, v?])
}

/// The inner states of a gated MLP (Shazeer 2020), `[.., inner]`: `x` is normalised to `n`, then `silu(gate(n)) * up(n)`.
pub(crate) fn gated(norm: &RmsNorm, x: &Array, gate: &Linear, up: &Linear) -> Result<Array> {
    if let Some(y) = cuda::gated(norm, x, gate, up)? {
        return Ok(y);
    }
    let normed = norm.forward(x)?;
    Ok(ops::multiply(silu(&gate.forward(&normed)?)?, up.forward(&normed)?)?)
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
    /// Angles by which each pair of dimensions rotates from one position to the next, `[dims / 2]` in float32.
    pub(crate) rates: Array,
}

impl Rope {
    /// `freqs` are wavelengths, as in the field.
    #[allow(clippy::cast_possible_truncation, reason = "computed in f64, used in f32")]
    pub(crate) fn new(dims: i32, base: f32, scale: f32, freqs: Option<&[f32]>, magnitude: f32, interleaved: bool) -> Result<Self> {
        let rate = |pair: i32| match freqs.map(|freqs| freqs.get(usize::try_from(pair).unwrap_or(usize::MAX))) {
            Some(wavelength) => wavelength.map_or(0.0, |wavelength| f64::from(*wavelength).recip()),
            None => f64::from(base).powf(-2.0 * f64::from(pair) / f64::from(dims)),
        };
        let rates = Array::from_iter((0..dims / 2).map(|pair| (rate(pair) * f64::from(scale)) as f32), &[dims / 2]);
        let freqs = freqs.map(|freqs| Array::from_slice(freqs, &[dims / 2]));
        Ok(Self { dims, base, scale, freqs, magnitude, interleaved, rates })
    }

    /// `[B, H, L, D]` at the positions from `offset`.
    pub(crate) fn forward(&self, x: &Array, offset: Offset<'_>) -> Result<Array> {
        let base = if self.freqs.is_some() { None } else { Some(self.base) };
        let y = match offset {
            Offset::Same(offset) => fast::rope(x, self.dims, self.interleaved, base, self.scale, offset, self.freqs.as_ref())?,
            Offset::Each(offsets) => self.forward_each(x, base, offsets)?,
        };
        if (self.magnitude - 1.0).abs() < f32::EPSILON {
            return Ok(y);
        }
        Ok(ops::multiply(y, scalar(self.magnitude, x.dtype())?)?)
    }

    /// By how much each row turns at its position `lens` (`[B]` in int32).
    pub(crate) fn turn(&self, lens: &Array) -> Result<Turn> {
        let positions = ops::reshape(lens.as_dtype(Dtype::Float32)?, &[lens.dim(0), 1])?;
        let angles = ops::multiply(positions, &self.rates)?;
        Ok(Turn { cosines: ops::cos(&angles)?, sines: ops::sin(&angles)? })
    }

    /// mlx-rs's `rope_dynamic` does not offer wavelengths of one's own, hence MLX's C interface.
    fn forward_each(&self, x: &Array, base: Option<f32>, offsets: &Array) -> Result<Array> {
        let base = mlx_sys::mlx_optional_float { value: base.unwrap_or(0.0), has_value: base.is_some() };
        let [y] = call("rotary embedding", |[out], stream| {
            // SAFETY: the handles live through the call; an empty handle stands for no wavelengths, and it is never freed by MLX.
            unsafe {
                let none = mlx_sys::mlx_array_ { ctx: std::ptr::null_mut() };
                let freqs = self.freqs.as_ref().map_or(none, Array::as_ptr);
                mlx_sys::mlx_fast_rope_dynamic(
                    out,
                    x.as_ptr(),
                    self.dims,
                    self.interleaved,
                    base,
                    self.scale,
                    offsets.as_ptr(),
                    freqs,
                    stream,
                )
            }
        })?;
        Ok(y)
    }
}

/// Attention (Vaswani et al. 2017) of queries `[B, H, L, D]` at the end of keys and values `[B, KV, T, D]` -> `[B, H, L, D]`, in
/// causal order; where rows differ in length, `mask` `[B, 1, 1, T]` is true where a key may be seen.
pub(crate) fn attend(q: &Array, k: &Array, v: &Array, scale: f32, mask: Option<&Array>) -> Result<Array> {
    let mask = match mask {
        Some(mask) => Some(ScaledDotProductAttentionMask::Array(mask)),
        // MLX aligns the causal mask to the end of the keys; one query needs none.
        None if q.dim(2) > 1 => Some(ScaledDotProductAttentionMask::Causal),
        None => None,
    };
    Ok(fast::scaled_dot_product_attention(q, k, v, scale, mask, None)?)
}

/// Whether this thread's device runs kernels of Hob's own.
pub(crate) fn has_kernels() -> bool {
    cuda::available()
}

/// Cosines and sines of the angles by which rows turn, each `[B, dims / 2]` in float32.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) cosines: Array,
    pub(crate) sines: Array,
}

/// What a layer does to its projections to attend with them.
pub(crate) struct Heads<'a> {
    pub(crate) rope: &'a Rope,
    /// Of each head's queries and keys, before they rotate.
    pub(crate) q_norm: Option<&'a RmsNorm>,
    pub(crate) k_norm: Option<&'a RmsNorm>,
    /// Query heads.
    pub(crate) count: i32,
    /// What scores are multiplied by.
    pub(crate) scale: f32,
}

/// What [`attend_in_place`] works on.
pub(crate) struct Step<'a> {
    /// As they are projected, `[B, 1, H * D]` and twice `[B, 1, KV * D]`.
    pub(crate) projected: &'a [Array; 3],
    /// `[slots, KV, room, D]`, of which row `b` has used `lens[b]` places. Nobody else may look at their places from a row's end on.
    pub(crate) keys: &'a Array,
    pub(crate) values: &'a Array,
    /// Tokens of each row, `[B]` in int32, and those of the longest with the new one.
    pub(crate) lens: &'a Array,
    pub(crate) end: i32,
    pub(crate) turn: &'a Turn,
    pub(crate) heads: &'a Heads<'a>,
}

/// Attention of each row's newest token: what `Rope`, a write into the caches and [`attend`] do one after the other, in one. Gives the
/// result `[B, 1, H * D]`, and the keys and values with the new tokens; `None` where the device has no kernel for it.
///
/// The caches are written in place, also where somebody else holds them.
pub(crate) fn attend_in_place(step: &Step<'_>) -> Result<Option<(Array, [Array; 2])>> {
    let Some(y) = cuda::attend(step)? else { return Ok(None) };
    // MLX does not know that the kernel writes: who looks at the caches from here on waits for it.
    let caches = after([step.keys, step.values], &y)?;
    Ok(Some((y, caches)))
}

/// `arrays`, which can be looked at once `done` is computed.
fn after(arrays: [&Array; 2], done: &Array) -> Result<[Array; 2]> {
    call("dependency", |out: &mut [mlx_sys::mlx_array; 2], _| {
        // SAFETY: the handles live through the call; the vectors copy what they are given and are freed here.
        unsafe {
            let handles = arrays.map(Array::as_ptr);
            let inputs = mlx_sys::mlx_vector_array_new_data(handles.as_ptr(), handles.len());
            let dependencies = mlx_sys::mlx_vector_array_new_value(done.as_ptr());
            let mut outputs = mlx_sys::mlx_vector_array_new();
            let mut status = mlx_sys::mlx_depends(&raw mut outputs, inputs, dependencies);
            for (index, out) in out.iter_mut().enumerate() {
                if status == 0 {
                    status = mlx_sys::mlx_vector_array_get(out, outputs, index);
                }
            }
            mlx_sys::mlx_vector_array_free(outputs);
            mlx_sys::mlx_vector_array_free(dependencies);
            mlx_sys::mlx_vector_array_free(inputs);
            status
        }
    })
}

/// Where the tokens of a step begin.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Offset<'a> {
    /// Every row at the same position.
    Same(i32),
    /// Row by row, `[B]` in int32.
    Each(&'a Array),
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

/// `target` with the block of `update`'s shape that begins at `starts` replaced by it; in place when `target` has no other holder.
///
/// mlx-rs's assignment goes through reshapes and broadcasts that cost a decode step several operations per layer.
pub(crate) fn write_at(target: &Array, update: &Array, starts: [i32; 4]) -> Result<Array> {
    let shape = update.shape();
    let stops = [starts[0] + shape[0], starts[1] + shape[1], starts[2] + shape[2], starts[3] + shape[3]];
    let strides = [1; 4];
    let [written] = call("slice update", |[out], stream| {
        // SAFETY: the handles live through the call and the index arrays have the length passed.
        unsafe {
            mlx_sys::mlx_slice_update(
                out,
                target.as_ptr(),
                update.as_ptr(),
                starts.as_ptr(),
                starts.len(),
                stops.as_ptr(),
                stops.len(),
                strides.as_ptr(),
                strides.len(),
                stream,
            )
        }
    })?;
    Ok(written)
}

/// `target` `[S, H, T, D]` with row `rows[b]` at position `positions[b]` replaced by `update[b]`, `[B, H, 1, D]`; in place when
/// `target` has no other holder. Both index arrays are `[B]` in int32.
pub(crate) fn write_each(target: &Array, update: &Array, rows: &Array, positions: &Array) -> Result<Array> {
    // One slice `[1, H, 1, D]` of the target for each index.
    let update = ops::expand_dims(update, 1)?;
    let axes = [0, 2];
    let [written] = call("scatter", |[out], stream| {
        // SAFETY: the handles live through the call; the vector copies the two it is given and is freed here.
        unsafe {
            let handles = [rows.as_ptr(), positions.as_ptr()];
            let indices = mlx_sys::mlx_vector_array_new_data(handles.as_ptr(), handles.len());
            let status = mlx_sys::mlx_scatter(out, target.as_ptr(), indices, update.as_ptr(), axes.as_ptr(), axes.len(), stream);
            mlx_sys::mlx_vector_array_free(indices);
            status
        }
    })?;
    Ok(written)
}

/// Calls an operation of MLX's C interface that mlx-rs does not offer as needed. `work` gets the places of the results and the
/// stream, and returns the status.
fn call<const N: usize>(
    what: &str,
    work: impl FnOnce(&mut [mlx_sys::mlx_array; N], mlx_sys::mlx_stream) -> i32,
) -> Result<[Array; N]> {
    let stream = mlx_rs::Stream::thread_local_or_default();
    // SAFETY: a non-zero status leaves the new arrays empty or made, and they are freed; else each has its one owner.
    unsafe {
        let mut out = std::array::from_fn(|_| mlx_sys::mlx_array_new());
        if work(&mut out, stream.as_ptr()) != 0 {
            for array in out {
                mlx_sys::mlx_array_free(array);
            }
            return Err(Error::new(ErrorKind::Backend, format!("MLX: {what} failed")));
        }
        Ok(out.map(|array| Array::from_ptr(array)))
    }
}
