//! Hob's own CUDA kernels, for decoding. They are compiled ahead (`cuda/compile.py`): nothing is compiled when Hob runs but PTX by the
//! driver, which keeps the result.
//!
//! A decode step in MLX 0.32.2's own operations is twenty kernels a layer, and several of them are slow for rows of different lengths: on
//! an H200, 16 layers of a Llama of 1B keep the device busy for 1.4 ms with one row and 2.6 ms with eight. These are five a layer, and
//! take 1.1 ms for one row and for eight. They add up every row in the same order, so that what a row gets does not depend on its batch.
//!
//! Runs on the MLX owner thread only.

use std::ffi::{CStr, c_char, c_void};

use mlx_rs::{Array, Dtype, ops};

use super::{Heads, Linear, Matrix, RmsNorm, Rope, Step, call};
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

/// A kernel: its entry, and its PTX for each type of numbers that it is made for.
struct Kernel {
    entry: &'static CStr,
    bf16: &'static str,
    f16: &'static str,
    f32: Option<&'static str>,
}

macro_rules! ptx {
    ($($name:literal),+) => {
        include_str!(concat!("cuda/ptx/", $($name),+, ".ptx"))
    };
}

macro_rules! attend {
    ($width:literal) => {
        Kernel {
            entry: c"hob_attend",
            bf16: ptx!("attend_bf16_", $width),
            f16: ptx!("attend_f16_", $width),
            f32: Some(ptx!("attend_f32_", $width)),
        }
    };
}

const PRODUCT: Kernel = Kernel { entry: c"hob_product", bf16: ptx!("product_bf16"), f16: ptx!("product_f16"), f32: None };
const PROJECTIONS: Kernel =
    Kernel { entry: c"hob_projections", bf16: ptx!("projections_bf16"), f16: ptx!("projections_f16"), f32: None };
const GATED: Kernel = Kernel { entry: c"hob_gated", bf16: ptx!("gated_bf16"), f16: ptx!("gated_f16"), f32: None };
/// By the width of a head.
const ATTEND: [(i32, Kernel); 5] =
    [(32, attend!("32")), (64, attend!("64")), (96, attend!("96")), (128, attend!("128")), (256, attend!("256"))];
const JOIN_CHUNKS: Kernel = Kernel {
    entry: c"hob_join_chunks",
    bf16: ptx!("join_chunks_bf16"),
    f16: ptx!("join_chunks_f16"),
    f32: Some(ptx!("join_chunks_f32")),
};

impl Kernel {
    fn ptx(&self, dtype: Dtype) -> Option<&'static str> {
        match dtype {
            Dtype::Bfloat16 => Some(self.bf16),
            Dtype::Float16 => Some(self.f16),
            Dtype::Float32 => self.f32,
            _ => None,
        }
    }
}

/// One call of a kernel: what it reads, what it makes, and how it is spread out. It gets the inputs, the outputs, and then the numbers.
struct Launch<'a> {
    kernel: &'a Kernel,
    /// Of the numbers it is compiled for, and of the outputs.
    dtype: Dtype,
    made: Dtype,
    inputs: &'a [&'a Array],
    shapes: &'a [&'a [i32]],
    ints: &'a [i32],
    floats: &'a [f32],
    blocks: [i32; 2],
    threads: i32,
}

/// `hob_cuda_call` of bindings/xtask/native/cuda_kernel.cpp, which `cargo xtask setup` compiles.
#[repr(C)]
struct Call {
    name: *const c_char,
    code: *const c_char,
    code_size: usize,
    inputs: *const *mut c_void,
    inputs_len: usize,
    shapes: *const *const i32,
    shapes_len: *const usize,
    outputs_len: usize,
    float_bits: i32,
    ints: *const i32,
    ints_len: usize,
    floats: *const f32,
    floats_len: usize,
    blocks: [i32; 2],
    threads: i32,
    stream: *mut c_void,
}

#[link(name = "hobcuda", kind = "static")]
unsafe extern "C" {
    fn hob_cuda_kernel(call: *const Call, outputs: *mut *mut c_void, message: *mut c_char) -> i32;
}

/// The outputs, one for each shape.
fn launch<const N: usize>(launch: &Launch<'_>) -> Result<[Array; N]> {
    let code = launch.kernel.ptx(launch.dtype).ok_or_else(|| Error::internal("a kernel for numbers it is not made for"))?;
    if launch.shapes.len() != N {
        return Err(Error::internal("a kernel with other outputs"));
    }
    let inputs: Vec<*mut c_void> = launch.inputs.iter().map(|array| array.as_ptr().ctx).collect();
    let shapes: Vec<*const i32> = launch.shapes.iter().map(|shape| shape.as_ptr()).collect();
    let shapes_len: Vec<usize> = launch.shapes.iter().map(|shape| shape.len()).collect();
    let float_bits = match launch.made {
        Dtype::Float32 => 32,
        Dtype::Float16 => 16,
        _ => -16,
    };
    let mut message = [0 as c_char; 256];
    let made = call("kernel", |out: &mut [mlx_sys::mlx_array; N], stream| {
        let call = Call {
            name: launch.kernel.entry.as_ptr(),
            code: code.as_ptr().cast(),
            code_size: code.len(),
            inputs: inputs.as_ptr(),
            inputs_len: inputs.len(),
            shapes: shapes.as_ptr(),
            shapes_len: shapes_len.as_ptr(),
            outputs_len: N,
            float_bits,
            ints: launch.ints.as_ptr(),
            ints_len: launch.ints.len(),
            floats: launch.floats.as_ptr(),
            floats_len: launch.floats.len(),
            blocks: launch.blocks,
            threads: launch.threads,
            stream: stream.ctx,
        };
        let mut outputs = [std::ptr::null_mut(); N];
        // SAFETY: all that `call` points to lives through it, with the lengths it says; `outputs` has a place for each shape, and the
        // message its 256 bytes.
        let status = unsafe { hob_cuda_kernel(&raw const call, outputs.as_mut_ptr(), message.as_mut_ptr()) };
        if status == 0 {
            for (out, made) in out.iter_mut().zip(outputs) {
                // The empty handle holds nothing yet.
                out.ctx = made;
            }
        }
        status
    });
    made.map_err(|error| {
        // SAFETY: it ends with a NUL: zeroes, or what the call wrote.
        let reason = unsafe { CStr::from_ptr(message.as_ptr()) }.to_string_lossy().into_owned();
        if reason.is_empty() { error } else { Error::new(ErrorKind::Backend, format!("MLX: {reason}")) }
    })
}

thread_local! {
    /// Whether the device is a CUDA device on which the kernels work.
    static WORK: bool = work();
}

fn work() -> bool {
    if !is_recent_cuda() {
        return false;
    }
    match agree() {
        Ok(true) => true,
        Ok(false) => {
            tracing::warn!("Hob's CUDA kernels compute wrongly on this device: MLX's own are used");
            false
        }
        Err(error) => {
            tracing::warn!(%error, "Hob's CUDA kernels do not run on this device: MLX's own are used");
            false
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
    WORK.with(|work| *work)
}

/// A dense layer of 16-bit weights as a kernel takes it: `x`'s rows are few and their width is served.
struct Few {
    rows: i32,
    dtype: Dtype,
}

impl Few {
    fn of(x: &Array, weights: &[&Array], norm: Option<&RmsNorm>) -> Option<Self> {
        let (dtype, width) = (x.dtype(), x.shape().last().copied()?);
        let rows = x.shape().iter().rev().skip(1).product::<i32>();
        let serves = matches!(dtype, Dtype::Bfloat16 | Dtype::Float16)
            && weights.iter().all(|weight| weight.dtype() == dtype && weight.ndim() == 2 && weight.dim(1) == width)
            && norm.is_none_or(|norm| norm.weight.dtype() == dtype)
            && width % ACROSS == 0
            && (1..=MAX_ROWS).contains(&rows);
        serves.then_some(Self { rows, dtype })
    }

    /// Blocks for the same columns.
    fn tiles(&self) -> i32 {
        (self.rows + ROWS - 1) / ROWS
    }

    /// `x`'s shape with a last axis of `outs`.
    fn shape(x: &Array, outs: i32) -> Vec<i32> {
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = outs;
        }
        shape
    }

    /// What goes into a kernel that normalises: bfloat16 as it is, float16 normalised already, for it is too narrow for numbers that
    /// are not divided yet.
    fn normalised(&self, norm: &RmsNorm, x: &Array) -> Result<Array> {
        if self.dtype == Dtype::Bfloat16 { Ok(x.clone()) } else { norm.forward(x) }
    }
}

/// `x W^T` for a few rows, plus `onto` if there is one; `None` where the kernel does not serve, as in all that follow.
pub(super) fn product(x: &Array, weight: &Array, onto: Option<&Array>) -> Result<Option<Array>> {
    if available() { product_kernel(x, weight, onto) } else { Ok(None) }
}

fn product_kernel(x: &Array, weight: &Array, onto: Option<&Array>) -> Result<Option<Array>> {
    let Some(few) = Few::of(x, &[weight], None) else { return Ok(None) };
    let columns = weight.dim(0);
    let shape = Few::shape(x, columns);
    if onto.is_some_and(|onto| onto.dtype() != few.dtype || onto.shape() != shape) {
        return Ok(None);
    }
    let [y] = launch(&Launch {
        kernel: &PRODUCT,
        dtype: few.dtype,
        made: few.dtype,
        inputs: &[x, weight, onto.unwrap_or(x)],
        shapes: &[&shape],
        ints: &[few.rows, weight.dim(1), columns, i32::from(onto.is_some())],
        floats: &[],
        blocks: [(columns + COLUMNS - 1) / COLUMNS * few.tiles(), 1],
        threads: PRODUCT_THREADS,
    })?;
    Ok(Some(y))
}

/// Queries, keys and values of a few rows: each product of the normalised rows, with its bias.
pub(super) fn projections(norm: &RmsNorm, x: &Array, linears: [&Linear; 3]) -> Result<Option<[Array; 3]>> {
    if available() { projections_kernel(norm, x, linears) } else { Ok(None) }
}

fn projections_kernel(norm: &RmsNorm, x: &Array, linears: [&Linear; 3]) -> Result<Option<[Array; 3]>> {
    let [Some(q), Some(k), Some(v)] = linears.map(Linear::dense) else { return Ok(None) };
    let Some(few) = Few::of(x, &[q, k, v], Some(norm)) else { return Ok(None) };
    let biases = linears.map(|linear| linear.bias.as_ref());
    let columns = [q.dim(0), k.dim(0), v.dim(0)];
    let biased = biases[0].is_some();
    let serves = columns.iter().all(|columns| columns % COLUMNS == 0)
        && columns[1] == columns[2]
        && biases.iter().all(|bias| bias.map_or(!biased, |bias| biased && bias.dtype() == few.dtype));
    if !serves {
        return Ok(None);
    }
    let x = few.normalised(norm, x)?;
    let [qb, kb, vb] = biases.map(|bias| bias.unwrap_or(&x));
    let shapes = columns.map(|columns| Few::shape(&x, columns));
    let made = launch(&Launch {
        kernel: &PROJECTIONS,
        dtype: few.dtype,
        made: few.dtype,
        inputs: &[&x, &norm.weight, q, k, v, qb, kb, vb],
        shapes: &[&shapes[0], &shapes[1], &shapes[2]],
        ints: &[few.rows, q.dim(1), columns[0], columns[1], i32::from(biased)],
        floats: &[norm.eps],
        blocks: [columns.iter().sum::<i32>() / COLUMNS * few.tiles(), 1],
        threads: PRODUCT_THREADS,
    })?;
    Ok(Some(made))
}

/// `silu(n gate^T) * (n up^T)` of a few rows, normalised first.
pub(super) fn gated(norm: &RmsNorm, x: &Array, gate: &Linear, up: &Linear) -> Result<Option<Array>> {
    if available() { gated_kernel(norm, x, gate, up) } else { Ok(None) }
}

fn gated_kernel(norm: &RmsNorm, x: &Array, gate: &Linear, up: &Linear) -> Result<Option<Array>> {
    let (Some(gate_weight), Some(up_weight)) = (gate.dense(), up.dense()) else { return Ok(None) };
    let Some(few) = Few::of(x, &[gate_weight, up_weight], Some(norm)) else { return Ok(None) };
    let columns = gate_weight.dim(0);
    // A block makes half as many columns of each of the two.
    if gate.bias.is_some() || up.bias.is_some() || columns % (COLUMNS / 2) != 0 || up_weight.dim(0) != columns {
        return Ok(None);
    }
    let x = few.normalised(norm, x)?;
    let [y] = launch(&Launch {
        kernel: &GATED,
        dtype: few.dtype,
        made: few.dtype,
        inputs: &[&x, &norm.weight, gate_weight, up_weight],
        shapes: &[&Few::shape(&x, columns)],
        ints: &[few.rows, gate_weight.dim(1), columns],
        floats: &[norm.eps],
        blocks: [columns / (COLUMNS / 2) * few.tiles(), 1],
        threads: PRODUCT_THREADS,
    })?;
    Ok(Some(y))
}

/// Attention of the newest token of each row; puts its key and value into the caches, in place.
pub(super) fn attend(step: &Step<'_>) -> Result<Option<Array>> {
    if available() { attend_kernel(step) } else { Ok(None) }
}

fn attend_kernel(step: &Step<'_>) -> Result<Option<Array>> {
    let ([q, k, v], heads, turn) = (step.projected, step.heads, step.turn);
    let (dtype, rope, head_dim, kv_heads) = (q.dtype(), heads.rope, step.keys.dim(3), step.keys.dim(1));
    let norms = heads.q_norm.zip(heads.k_norm);
    let Some((_, kernel)) = ATTEND.iter().find(|(width, _)| *width == head_dim) else { return Ok(None) };
    let serves = kernel.ptx(dtype).is_some()
        && [k, v, step.keys, step.values].iter().all(|array| array.dtype() == dtype)
        && rope.dims == head_dim
        && q.dim(2) == heads.count * head_dim
        && k.dim(2) == kv_heads * head_dim
        // A lane of attend.cu holds whole pairs of neighbours, or one of two.
        && (!rope.interleaved || head_dim != 96)
        && heads.q_norm.is_some() == heads.k_norm.is_some()
        && norms.is_none_or(|(q, k)| q.weight.dtype() == dtype && k.weight.dtype() == dtype);
    if !serves {
        return Ok(None);
    }
    let (batch, chunks) = (q.dim(0), (step.end + CHUNK - 1) / CHUNK);
    let whole = [batch, 1, heads.count * head_dim];
    let part = [batch, heads.count, chunks, head_dim + 2];
    let (q_scales, k_scales) = norms.map_or((q, k), |(q, k)| (&q.weight, &k.weight));
    let normalises = i32::from(norms.is_some());
    let [y] = launch(&Launch {
        kernel,
        dtype,
        made: if chunks == 1 { dtype } else { Dtype::Float32 },
        inputs: &[q, k, v, step.keys, step.values, step.lens, &turn.cosines, &turn.sines, q_scales, k_scales],
        shapes: &[if chunks == 1 { &whole } else { &part }],
        ints: &[heads.count, kv_heads, step.keys.dim(2), CHUNK, normalises, i32::from(rope.interleaved)],
        floats: &[heads.scale, rope.magnitude, heads.q_norm.map_or(0.0, |norm| norm.eps)],
        blocks: [batch * heads.count, chunks],
        threads: ATTEND_THREADS,
    })?;
    if chunks == 1 {
        return Ok(Some(y));
    }
    let [joined] = launch(&Launch {
        kernel: &JOIN_CHUNKS,
        dtype,
        made: dtype,
        inputs: &[&y],
        shapes: &[&whole],
        ints: &[chunks],
        floats: &[],
        blocks: [batch * heads.count, 1],
        threads: head_dim,
    })?;
    Ok(Some(joined))
}

/// Whether small cases agree with MLX's own operations. An error: the driver does not take them, for one.
fn agree() -> Result<bool> {
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
    let projected = projections_kernel(&norm, &x, [&q, &k, &v])?.ok_or_else(served)?;
    for (found, linear) in projected.iter().zip([&q, &k, &v]) {
        if !near(found, &plain(linear, &normed)?)? {
            return Ok(false);
        }
    }
    let wanted = ops::multiply(super::silu(&plain(&gate, &normed)?)?, plain(&up, &normed)?)?;
    if !near(&gated_kernel(&norm, &x, &gate, &up)?.ok_or_else(served)?, &wanted)? {
        return Ok(false);
    }
    let wanted = ops::add(plain(&gate, &x)?, &x)?;
    let found = product_kernel(&x, gate.dense().ok_or_else(served)?, Some(&x))?.ok_or_else(served)?;
    if !near(&found, &wanted)? {
        return Ok(false);
    }
    let rope = Rope::new(64, 10_000.0, 1.0, None, 1.0, false)?;
    let heads = Heads { rope: &rope, q_norm: None, k_norm: None, count: 2, scale: 0.125 };
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
    let turn = rope.turn(&lens)?;
    let step = Step { turn: &turn, projected: &projected, keys: &keys, values: &values, lens: &lens, end: 40, heads: &heads };
    let found = attend_kernel(&step)?.ok_or_else(served)?;
    Ok(near(&found, &wanted)? && near(&keys, &wanted_keys)? && near(&values, &wanted_values)?)
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sha2::{Digest, Sha256};

    /// Who changes a kernel has to compile it: `cuda/compile.py` says how.
    #[test]
    fn the_ptx_is_that_of_the_sources() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/nn/cuda");
        let files = |folder: &Path, ends: &[&str]| {
            let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let mut paths: Vec<_> = paths.filter(|path| ends.iter().any(|end| path.to_str().unwrap().ends_with(end))).collect();
            paths.sort();
            paths
        };
        let mut hash = Sha256::new();
        for path in files(&folder, &[".cu", ".cuh"]) {
            hash.update(std::fs::read(path).unwrap());
        }
        let wanted: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let compiled = files(&folder.join("ptx"), &[".ptx"]);
        assert_eq!(compiled.len(), 24);
        for path in compiled {
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(text.lines().next().unwrap().trim_start_matches("//"), wanted, "{}", path.display());
        }
    }
}
