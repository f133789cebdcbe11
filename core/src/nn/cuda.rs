//! Hob's own CUDA kernels, for decoding. MLX compiles them at their first use in a process (its `fast::cuda_kernel`).
//!
//! A decode step in MLX 0.32.2's own operations is twenty kernels a layer, and several of them are slow for rows of different lengths: on
//! an H200, 16 layers of a Llama of 1B keep the device busy for 1.4 ms with one row and 2.6 ms with eight. These are five a layer, and
//! take 1.1 ms for one row and for eight. They add up every row in the same order, so that what a row gets does not depend on its batch.
//!
//! Runs on the MLX owner thread only.

use std::ffi::{CStr, CString};

use mlx_rs::{Array, Dtype, ops};

use super::{Linear, Matrix, RmsNorm, Rope, call};
use crate::error::{Error, ErrorKind, Result};

/// Rows of a product at most; more are better served by MLX.
const MAX_ROWS: i32 = 32;
/// Threads of a block of few_rows.cuh, the rows and columns it makes, and the numbers of a row that its warps step over.
const PRODUCT_THREADS: i32 = 512;
const ROWS: i32 = 8;
const COLUMNS: i32 = 16;
const ACROSS: i32 = 32;
/// Threads of a block of attend.cu, and the keys it looks at.
const ATTEND_THREADS: i32 = 512;
const CHUNK: i32 = 1024;
/// Widths of a head that the attention kernel's shared memory and registers hold.
const HEAD_DIMS: [i32; 5] = [32, 64, 96, 128, 256];

/// A kernel that MLX knows by name.
struct Kernel(mlx_sys::mlx_fast_cuda_kernel);

impl Kernel {
    fn new(name: &CStr, inputs: &[&CStr], outputs: &[&CStr], [header, source]: [&str; 2], contiguous: bool) -> Self {
        let mut inputs: Vec<_> = inputs.iter().map(|name| name.as_ptr()).collect();
        let mut outputs: Vec<_> = outputs.iter().map(|name| name.as_ptr()).collect();
        let (header, source) = (brief(header), brief(source));
        // SAFETY: MLX copies the strings; the vectors are freed here.
        unsafe {
            let names = mlx_sys::mlx_vector_string_new_data(inputs.as_mut_ptr(), inputs.len());
            let results = mlx_sys::mlx_vector_string_new_data(outputs.as_mut_ptr(), outputs.len());
            let kernel = mlx_sys::mlx_fast_cuda_kernel_new(
                name.as_ptr(),
                names,
                results,
                source.as_ptr(),
                header.as_ptr(),
                contiguous,
                0, // the kernels declare their shared memory themselves
            );
            mlx_sys::mlx_vector_string_free(names);
            mlx_sys::mlx_vector_string_free(results);
            Self(kernel)
        }
    }
}

/// A source without its comments: MLX copies and hashes it at every call.
fn brief(source: &str) -> CString {
    let lines = source.lines().map(str::trim_start).filter(|line| !line.starts_with("//") && !line.is_empty());
    let text: String = lines.flat_map(|line| [line, "\n"]).collect();
    // The sources are this crate's own and have no zero byte; an empty one would not compile and be reported.
    CString::new(text).unwrap_or_default()
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { mlx_sys::mlx_fast_cuda_kernel_free(self.0) }
    }
}

struct Kernels {
    product: Kernel,
    projections: Kernel,
    gated: Kernel,
    attend: Kernel,
    join_chunks: Kernel,
}

impl Kernels {
    fn new() -> Self {
        let few_rows = include_str!("cuda/few_rows.cuh");
        let projected = [c"x", c"scales", c"qw", c"kw", c"vw", c"qb", c"kb", c"vb"];
        let attended = [c"q", c"k", c"v", c"keys", c"values", c"lens", c"rates", c"q_scales", c"k_scales"];
        Self {
            product: Kernel::new(
                c"hob_product",
                &[c"x", c"w", c"onto"],
                &[c"y"],
                [few_rows, include_str!("cuda/product.cu")],
                true,
            ),
            projections: Kernel::new(
                c"hob_projections",
                &projected,
                &[c"q", c"k", c"v"],
                [few_rows, include_str!("cuda/projections.cu")],
                true,
            ),
            gated: Kernel::new(
                c"hob_gated",
                &[c"x", c"scales", c"gw", c"uw"],
                &[c"y"],
                [few_rows, include_str!("cuda/gated.cu")],
                true,
            ),
            // Contiguous copies of the caches would be written instead of them; it goes by their strides.
            attend: Kernel::new(c"hob_attend", &attended, &[c"y"], ["", include_str!("cuda/attend.cu")], false),
            join_chunks: Kernel::new(c"hob_join_chunks", &[c"x"], &[c"y"], ["", include_str!("cuda/join_chunks.cu")], true),
        }
    }
}

/// One call of a kernel: what it reads, what it makes, how it is spread out and what it is compiled for.
struct Launch<'a> {
    inputs: &'a [&'a Array],
    shapes: &'a [&'a [i32]],
    dtype: Dtype,
    blocks: [i32; 2],
    threads: i32,
    types: &'a [(&'a CStr, Dtype)],
    numbers: &'a [(&'a CStr, i32)],
}

/// The outputs, one for each shape.
fn launch<const N: usize>(kernel: &Kernel, launch: &Launch<'_>) -> Result<[Array; N]> {
    call("kernel", |out: &mut [mlx_sys::mlx_array; N], stream| {
        // SAFETY: all handles live through the call; what is made here is freed here, on every path.
        unsafe {
            let config = mlx_sys::mlx_fast_cuda_kernel_config_new();
            let mut status = 0;
            for shape in launch.shapes {
                status |=
                    mlx_sys::mlx_fast_cuda_kernel_config_add_output_arg(config, shape.as_ptr(), shape.len(), launch.dtype.into());
            }
            // MLX counts the grid in threads.
            let across = launch.blocks[0] * launch.threads;
            status |= mlx_sys::mlx_fast_cuda_kernel_config_set_grid(config, across, launch.blocks[1], 1);
            status |= mlx_sys::mlx_fast_cuda_kernel_config_set_thread_group(config, launch.threads, 1, 1);
            for (name, dtype) in launch.types {
                let dtype = (*dtype).into();
                status |= mlx_sys::mlx_fast_cuda_kernel_config_add_template_arg_dtype(config, name.as_ptr(), dtype);
            }
            for (name, number) in launch.numbers {
                status |= mlx_sys::mlx_fast_cuda_kernel_config_add_template_arg_int(config, name.as_ptr(), *number);
            }
            let handles: Vec<_> = launch.inputs.iter().map(|array| array.as_ptr()).collect();
            let inputs = mlx_sys::mlx_vector_array_new_data(handles.as_ptr(), handles.len());
            let mut outputs = mlx_sys::mlx_vector_array_new();
            if status == 0 {
                status = mlx_sys::mlx_fast_cuda_kernel_apply(&raw mut outputs, kernel.0, inputs, config, stream);
            }
            for (index, out) in out.iter_mut().enumerate() {
                if status == 0 {
                    status = mlx_sys::mlx_vector_array_get(out, outputs, index);
                }
            }
            mlx_sys::mlx_vector_array_free(outputs);
            mlx_sys::mlx_vector_array_free(inputs);
            mlx_sys::mlx_fast_cuda_kernel_config_free(config);
            status
        }
    })
}

thread_local! {
    /// None where the device is no CUDA device, or the kernels do not work on it.
    static KERNELS: Option<Kernels> = kernels();
}

fn kernels() -> Option<Kernels> {
    if !is_recent_cuda() {
        return None;
    }
    let kernels = Kernels::new();
    match kernels.work() {
        Ok(true) => Some(kernels),
        Ok(false) => {
            tracing::warn!("Hob's CUDA kernels compute wrongly on this device: MLX's own are used");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "Hob's CUDA kernels do not run on this device: MLX's own are used");
            None
        }
    }
}

/// Older devices lack bfloat16.
fn is_recent_cuda() -> bool {
    let gpu = mlx_rs::Device::try_default().and_then(|device| device.get_type());
    if !matches!(gpu, Ok(mlx_rs::DeviceType::Gpu)) {
        return false;
    }
    let (mut cuda, mut major) = (false, 0usize);
    // SAFETY: the objects are made and freed here.
    unsafe {
        if mlx_sys::mlx_cuda_is_available(&raw mut cuda) != 0 || !cuda {
            return false;
        }
        let device = mlx_sys::mlx_device_new_type(mlx_sys::mlx_device_type__MLX_GPU, 0);
        let mut info = mlx_sys::mlx_device_info_new();
        if mlx_sys::mlx_device_info_get(&raw mut info, device) == 0 {
            let _ = mlx_sys::mlx_device_info_get_size(&raw mut major, info, c"compute_capability_major".as_ptr());
        }
        mlx_sys::mlx_device_info_free(info);
        mlx_sys::mlx_device_free(device);
    }
    major >= 8
}

/// Whether this thread's device runs the kernels.
pub(super) fn available() -> bool {
    KERNELS.with(Option::is_some)
}

/// Calls `work` with the kernels where the device runs them; `None` elsewhere.
fn with<T>(work: impl FnOnce(&Kernels) -> Result<Option<T>>) -> Result<Option<T>> {
    KERNELS.with(|kernels| kernels.as_ref().map_or(Ok(None), work))
}

/// `x W^T` for a few rows, plus `onto` if there is one; `None` where the kernel does not serve, as in all that follow.
pub(super) fn product(x: &Array, weight: &Array, onto: Option<&Array>) -> Result<Option<Array>> {
    with(|kernels| kernels.product(x, weight, onto))
}

/// Queries, keys and values of a few rows: each product of the normalised rows, with its bias.
pub(super) fn projections(norm: &RmsNorm, x: &Array, linears: [&Linear; 3]) -> Result<Option<[Array; 3]>> {
    with(|kernels| kernels.projections(norm, x, linears))
}

/// `silu(n gate^T) * (n up^T)` of a few rows, normalised first.
pub(super) fn gated(norm: &RmsNorm, x: &Array, gate: &Linear, up: &Linear) -> Result<Option<Array>> {
    with(|kernels| kernels.gated(norm, x, gate, up))
}

/// Attention of the newest token of each row; puts its key and value into the caches, in place.
pub(super) fn attend(step: &Step<'_>) -> Result<Option<Array>> {
    with(|kernels| kernels.attend(step))
}

/// What [`attend`] works on.
pub(super) struct Step<'a> {
    /// As they are projected, `[B, 1, H * D]` and twice `[B, 1, KV * D]`.
    pub(super) projected: &'a [Array; 3],
    /// `[slots, KV, room, D]`. Nobody else may look at their places from a row's end on.
    pub(super) keys: &'a Array,
    pub(super) values: &'a Array,
    /// Tokens of each row, `[B]` in int32, and those of the longest with the new one.
    pub(super) lens: &'a Array,
    pub(super) end: i32,
    pub(super) heads: &'a super::Heads<'a>,
}

/// A dense layer of 16-bit weights as a kernel takes it: `x`'s rows are few and their width is served.
struct Few {
    /// Blocks for the same columns.
    tiles: i32,
    dtype: Dtype,
}

impl Few {
    fn of(x: &Array, weights: &[&Array]) -> Option<Self> {
        let (dtype, width) = (x.dtype(), x.shape().last().copied()?);
        let rows = x.shape().iter().rev().skip(1).product::<i32>();
        let serves = matches!(dtype, Dtype::Bfloat16 | Dtype::Float16)
            && weights.iter().all(|weight| weight.dtype() == dtype && weight.ndim() == 2 && weight.dim(1) == width)
            && width % ACROSS == 0
            && (1..=MAX_ROWS).contains(&rows);
        serves.then_some(Self { tiles: (rows + ROWS - 1) / ROWS, dtype })
    }

    /// `x`'s shape with a last axis of `outs`.
    fn shape(x: &Array, outs: i32) -> Vec<i32> {
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = outs;
        }
        shape
    }

    /// What goes into a kernel that can normalise: float16 is too narrow for numbers that are not divided yet.
    fn normalised(&self, norm: &RmsNorm, x: &Array) -> Result<(Array, bool)> {
        let inside = self.dtype == Dtype::Bfloat16 && norm.weight.dtype() == self.dtype;
        Ok(if inside { (x.clone(), true) } else { (norm.forward(x)?, false) })
    }
}

impl Kernels {
    fn product(&self, x: &Array, weight: &Array, onto: Option<&Array>) -> Result<Option<Array>> {
        let Some(few) = Few::of(x, &[weight]) else { return Ok(None) };
        let outs = weight.dim(0);
        let shape = Few::shape(x, outs);
        if onto.is_some_and(|onto| onto.dtype() != few.dtype || onto.shape() != shape) {
            return Ok(None);
        }
        let [y] = launch(
            &self.product,
            &Launch {
                inputs: &[x, weight, onto.unwrap_or(x)],
                shapes: &[&shape],
                dtype: few.dtype,
                blocks: [(outs + COLUMNS - 1) / COLUMNS * few.tiles, 1],
                threads: PRODUCT_THREADS,
                types: &[(c"T", few.dtype)],
                numbers: &[(c"ONTO", i32::from(onto.is_some()))],
            },
        )?;
        Ok(Some(y))
    }

    fn projections(&self, norm: &RmsNorm, x: &Array, linears: [&Linear; 3]) -> Result<Option<[Array; 3]>> {
        let [Some(q), Some(k), Some(v)] = linears.map(Linear::dense) else { return Ok(None) };
        let Some(few) = Few::of(x, &[q, k, v]) else { return Ok(None) };
        let biases = linears.map(|linear| linear.bias.as_ref());
        let outs = [q.dim(0), k.dim(0), v.dim(0)];
        let biased = biases[0].is_some();
        let serves = outs.iter().all(|outs| outs % COLUMNS == 0)
            && outs[1] == outs[2]
            && biases.iter().all(|bias| bias.map_or(!biased, |bias| biased && bias.dtype() == few.dtype));
        if !serves {
            return Ok(None);
        }
        let (x, inside) = few.normalised(norm, x)?;
        let [qb, kb, vb] = biases.map(|bias| bias.unwrap_or(&x));
        let shapes = outs.map(|outs| Few::shape(&x, outs));
        let made = launch(
            &self.projections,
            &Launch {
                inputs: &[&x, &norm.weight, q, k, v, qb, kb, vb],
                shapes: &[&shapes[0], &shapes[1], &shapes[2]],
                dtype: few.dtype,
                blocks: [outs.iter().sum::<i32>() / COLUMNS * few.tiles, 1],
                threads: PRODUCT_THREADS,
                types: &[(c"T", few.dtype)],
                numbers: &[(c"NORM", i32::from(inside)), (c"BIAS", i32::from(biased)), (c"EPS", bits(norm.eps))],
            },
        )?;
        Ok(Some(made))
    }

    fn gated(&self, norm: &RmsNorm, x: &Array, gate: &Linear, up: &Linear) -> Result<Option<Array>> {
        let (Some(gate_weight), Some(up_weight)) = (gate.dense(), up.dense()) else { return Ok(None) };
        let Some(few) = Few::of(x, &[gate_weight, up_weight]) else { return Ok(None) };
        let outs = gate_weight.dim(0);
        // A block makes half as many columns of each of the two.
        if gate.bias.is_some() || up.bias.is_some() || outs % (COLUMNS / 2) != 0 || up_weight.dim(0) != outs {
            return Ok(None);
        }
        let (x, inside) = few.normalised(norm, x)?;
        let [y] = launch(
            &self.gated,
            &Launch {
                inputs: &[&x, &norm.weight, gate_weight, up_weight],
                shapes: &[&Few::shape(&x, outs)],
                dtype: few.dtype,
                blocks: [outs / (COLUMNS / 2) * few.tiles, 1],
                threads: PRODUCT_THREADS,
                types: &[(c"T", few.dtype)],
                numbers: &[(c"NORM", i32::from(inside)), (c"EPS", bits(norm.eps))],
            },
        )?;
        Ok(Some(y))
    }

    fn attend(&self, step: &Step<'_>) -> Result<Option<Array>> {
        let ([q, k, v], heads) = (step.projected, step.heads);
        let (dtype, rope, head_dim) = (q.dtype(), heads.rope, step.keys.dim(3));
        let norms = heads.q_norm.zip(heads.k_norm);
        let serves = matches!(dtype, Dtype::Bfloat16 | Dtype::Float16 | Dtype::Float32)
            && [k, v, step.keys, step.values].iter().all(|array| array.dtype() == dtype)
            && HEAD_DIMS.contains(&head_dim)
            && rope.dims == head_dim
            && q.dim(2) == heads.count * head_dim
            // A lane of attend.cu holds whole pairs of neighbours, or one of two.
            && (!rope.interleaved || (head_dim / 32).count_ones() == 1)
            && heads.q_norm.is_some() == heads.k_norm.is_some()
            && norms.is_none_or(|(q, k)| q.weight.dtype() == dtype && k.weight.dtype() == dtype);
        if !serves {
            return Ok(None);
        }
        let (batch, chunks) = (q.dim(0), (step.end + CHUNK - 1) / CHUNK);
        let whole = [batch, 1, heads.count * head_dim];
        let part = [batch, heads.count, chunks, head_dim + 2];
        let made = if chunks == 1 { dtype } else { Dtype::Float32 };
        let (q_scales, k_scales) = norms.map_or((q, k), |(q, k)| (&q.weight, &k.weight));
        let [y] = launch(
            &self.attend,
            &Launch {
                inputs: &[q, k, v, step.keys, step.values, step.lens, &rope.rates, q_scales, k_scales],
                shapes: &[if chunks == 1 { &whole } else { &part }],
                dtype: made,
                blocks: [batch * heads.count, chunks],
                threads: ATTEND_THREADS,
                types: &[(c"T", dtype), (c"Y", made)],
                numbers: &[
                    (c"D", head_dim),
                    (c"CHUNK", CHUNK),
                    (c"SCALE", bits(heads.scale)),
                    (c"NORM", i32::from(norms.is_some())),
                    (c"INTERLEAVED", i32::from(rope.interleaved)),
                    (c"MAGNITUDE", bits(rope.magnitude)),
                    (c"EPS", bits(heads.q_norm.map_or(0.0, |norm| norm.eps))),
                ],
            },
        )?;
        if chunks == 1 {
            return Ok(Some(y));
        }
        let [joined] = launch(
            &self.join_chunks,
            &Launch {
                inputs: &[&y],
                shapes: &[&whole],
                dtype,
                blocks: [batch * heads.count, 1],
                threads: head_dim,
                types: &[(c"T", dtype)],
                numbers: &[(c"D", head_dim)],
            },
        )?;
        Ok(Some(joined))
    }

    /// Whether small cases agree with MLX's own operations. An error: the compiler or its headers are missing, for one.
    fn work(&self) -> Result<bool> {
        let served = || Error::new(ErrorKind::Internal, "a kernel refused its own test");
        let dtype = Dtype::Bfloat16;
        let dense = |outs: i32, width: i32| Linear::new(Matrix::Dense(waves(&[outs, width], dtype)?), None);
        let norm = RmsNorm { weight: waves(&[64], dtype)?, eps: 1e-5 };
        let (q, k, v) = (dense(128, 64)?, dense(64, 64)?, dense(64, 64)?);
        let (gate, up) = (dense(64, 64)?, dense(64, 64)?);
        let x = waves(&[3, 1, 64], dtype)?;
        let normed = norm.forward(&x)?;
        let plain = |linear: &Linear, x: &Array| match &linear.transposed {
            Some(transposed) => Ok(ops::matmul(x, transposed)?),
            None => Err(served()),
        };
        let projected = self.projections(&norm, &x, [&q, &k, &v])?.ok_or_else(served)?;
        for (found, linear) in projected.iter().zip([&q, &k, &v]) {
            if !near(found, &plain(linear, &normed)?)? {
                return Ok(false);
            }
        }
        let wanted = ops::multiply(super::silu(&plain(&gate, &normed)?)?, plain(&up, &normed)?)?;
        if !near(&self.gated(&norm, &x, &gate, &up)?.ok_or_else(served)?, &wanted)? {
            return Ok(false);
        }
        let wanted = ops::add(plain(&gate, &x)?, &x)?;
        let found = self.product(&x, gate.dense().ok_or_else(served)?, Some(&x))?.ok_or_else(served)?;
        if !near(&found, &wanted)? {
            return Ok(false);
        }
        let rope = Rope::new(64, 10_000.0, 1.0, None, 1.0, false)?;
        let heads = super::Heads { rope: &rope, q_norm: None, k_norm: None, count: 2, scale: 0.125 };
        let (keys, values) = (waves(&[3, 1, 40, 64], dtype)?, waves(&[3, 1, 40, 64], dtype)?);
        let lens = Array::from_slice(&[39, 11, 0], &[3]);
        let rows = Array::from_slice(&[0, 1, 2], &[3]);
        let turned = |x: &Array, count| rope.forward(&super::split_heads(x, count)?, super::Offset::Each(&lens));
        let wanted_keys = super::write_each(&keys, &turned(&projected[1], 1)?, &rows, &lens)?;
        let wanted_values = super::write_each(&values, &super::split_heads(&projected[2], 1)?, &rows, &lens)?;
        let mask = ops::le(Array::from_iter(0..40, &[1, 1, 1, 40]), ops::reshape(&lens, &[3, 1, 1, 1])?)?;
        let wanted = super::attend(&turned(&projected[0], 2)?, &wanted_keys, &wanted_values, heads.scale, Some(&mask))?;
        let wanted = super::join_heads(&wanted)?;
        // MLX's operations come first: the kernel writes in place.
        mlx_rs::transforms::eval([&wanted, &wanted_keys, &wanted_values])?;
        let step = Step { projected: &projected, keys: &keys, values: &values, lens: &lens, end: 40, heads: &heads };
        let found = self.attend(&step)?.ok_or_else(served)?;
        Ok(near(&found, &wanted)? && near(&keys, &wanted_keys)? && near(&values, &wanted_values)?)
    }
}

fn bits(number: f32) -> i32 {
    number.to_bits().cast_signed()
}

/// Any numbers without a pattern do.
fn waves(shape: &[i32], dtype: Dtype) -> Result<Array> {
    let count = shape.iter().product();
    let angle = ops::multiply(Array::from_iter(0..count, &[count]), Array::from_f32(12.9898))?;
    Ok(ops::reshape(ops::sin(angle)?, shape)?.as_dtype(dtype)?)
}

/// Rounding to 16 bits stays far below what a wrong kernel does.
fn near(found: &Array, wanted: &Array) -> Result<bool> {
    let wanted = wanted.as_dtype(Dtype::Float32)?;
    let error = ops::square(ops::subtract(found.as_dtype(Dtype::Float32)?, &wanted)?)?.sum(None)?;
    let scale = ops::square(&wanted)?.sum(None)?;
    let number = |array: Array| array.try_item_exact::<f32>().map_err(|error| Error::internal(error.to_string()));
    Ok(number(error)?.sqrt() <= 0.02 * number(scale)?.sqrt())
}
