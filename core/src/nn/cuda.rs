//! Hob's own CUDA kernel: attention of rows of different lengths, one query each. MLX compiles it at its first use and keeps the
//! result on disk (its `fast::cuda_kernel`).
//!
//! MLX 0.32.2 computes attention with a mask operation by operation there: on an H200, 16 layers of 8 rows take 1.4 ms at 128 tokens
//! and 5.6 ms at 4,096, with this kernel 0.45 and 2.0 ms. A kernel for the products of few rows was tried as well and left out: 2.4
//! ms where cuBLAS takes 2.5.
//!
//! Runs on the MLX owner thread only.

use std::ffi::CStr;

use mlx_rs::{Array, Dtype, ops};

use super::call;
use crate::error::{Error, ErrorKind, Result};

/// Threads of a block of attend_last.cu, and the keys it looks at.
const ATTEND_THREADS: i32 = 512;
const CHUNK: i32 = 1024;
/// Widths of a head that the attention kernel's shared memory and registers hold.
const HEAD_DIMS: [i32; 5] = [32, 64, 96, 128, 256];

/// A kernel that MLX knows by name.
struct Kernel(mlx_sys::mlx_fast_cuda_kernel);

impl Kernel {
    fn new(name: &CStr, inputs: &[&CStr], source: &CStr, contiguous: bool) -> Self {
        let mut inputs: Vec<_> = inputs.iter().map(|name| name.as_ptr()).collect();
        let mut outputs = [c"y".as_ptr()];
        // SAFETY: MLX copies the strings; the vectors are freed here.
        unsafe {
            let names = mlx_sys::mlx_vector_string_new_data(inputs.as_mut_ptr(), inputs.len());
            let results = mlx_sys::mlx_vector_string_new_data(outputs.as_mut_ptr(), outputs.len());
            let kernel = mlx_sys::mlx_fast_cuda_kernel_new(
                name.as_ptr(),
                names,
                results,
                source.as_ptr(),
                c"".as_ptr(),
                contiguous,
                0, // the kernels declare their shared memory themselves
            );
            mlx_sys::mlx_vector_string_free(names);
            mlx_sys::mlx_vector_string_free(results);
            Self(kernel)
        }
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { mlx_sys::mlx_fast_cuda_kernel_free(self.0) }
    }
}

struct Kernels {
    attend_last: Kernel,
    join_chunks: Kernel,
}

/// A source file as a C string.
macro_rules! source {
    ($file:literal) => {
        const {
            match CStr::from_bytes_with_nul(concat!(include_str!($file), "\0").as_bytes()) {
                Ok(source) => source,
                Err(_) => panic!("a kernel's source has a zero byte"),
            }
        }
    };
}

impl Kernels {
    fn new() -> Self {
        let attend = source!("attend_last.cu");
        Self {
            attend_last: Kernel::new(c"hob_attend_last", &[c"q", c"k", c"v", c"lens"], attend, false),
            join_chunks: Kernel::new(c"hob_join_chunks", &[c"x"], source!("join_chunks.cu"), true),
        }
    }
}

/// One call of a kernel: what it reads, what it makes, how it is spread out and what it is compiled for.
struct Launch<'a> {
    inputs: &'a [&'a Array],
    shape: &'a [i32],
    dtype: Dtype,
    blocks: [i32; 2],
    threads: i32,
    types: &'a [(&'a CStr, Dtype)],
    numbers: &'a [(&'a CStr, i32)],
}

fn launch(kernel: &Kernel, launch: &Launch<'_>) -> Result<Array> {
    call("kernel", |out, stream| {
        // SAFETY: all handles live through the call; what is made here is freed here, on every path.
        unsafe {
            let config = mlx_sys::mlx_fast_cuda_kernel_config_new();
            let mut status = mlx_sys::mlx_fast_cuda_kernel_config_add_output_arg(
                config,
                launch.shape.as_ptr(),
                launch.shape.len(),
                launch.dtype.into(),
            );
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
            if status == 0 {
                status = mlx_sys::mlx_vector_array_get(out, outputs, 0);
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

/// Attention of the newest token of each row: `[B, H, 1, D]` over `[B, KV, room, D]` keys and values of which row `b` sees the
/// first `lens[b] + 1`; `None` where the kernel does not serve.
pub(super) fn attend_last(q: &Array, k: &Array, v: &Array, lens: &Array, scale: f32) -> Result<Option<Array>> {
    KERNELS.with(|kernels| kernels.as_ref().map_or(Ok(None), |kernels| kernels.attend_last(q, k, v, lens, scale)))
}

impl Kernels {
    fn attend_last(&self, q: &Array, k: &Array, v: &Array, lens: &Array, scale: f32) -> Result<Option<Array>> {
        let (dtype, head_dim) = (q.dtype(), q.dim(3));
        let serves = matches!(dtype, Dtype::Bfloat16 | Dtype::Float16 | Dtype::Float32)
            && k.dtype() == dtype
            && v.dtype() == dtype
            && v.dim(3) == head_dim
            && HEAD_DIMS.contains(&head_dim);
        if !serves {
            return Ok(None);
        }
        let (batch, heads, chunks) = (q.dim(0), q.dim(1), (k.dim(2) + CHUNK - 1) / CHUNK);
        let whole = [batch, heads, 1, head_dim];
        let part = [batch, heads, chunks, head_dim + 2];
        let made = if chunks == 1 { dtype } else { Dtype::Float32 };
        let y = launch(
            &self.attend_last,
            &Launch {
                inputs: &[q, k, v, lens],
                shape: if chunks == 1 { &whole } else { &part },
                dtype: made,
                blocks: [batch * heads, chunks],
                threads: ATTEND_THREADS,
                types: &[(c"T", dtype), (c"Y", made)],
                numbers: &[(c"D", head_dim), (c"CHUNK", CHUNK), (c"SCALE", scale.to_bits().cast_signed())],
            },
        )?;
        if chunks == 1 {
            return Ok(Some(y));
        }
        let joined = launch(
            &self.join_chunks,
            &Launch {
                inputs: &[&y],
                shape: &whole,
                dtype,
                blocks: [batch * heads, 1],
                threads: head_dim,
                types: &[(c"T", dtype)],
                numbers: &[(c"D", head_dim)],
            },
        )?;
        Ok(Some(joined))
    }

    /// Whether small cases agree with MLX's own operations. An error: the compiler or its headers are missing, for one.
    fn work(&self) -> Result<bool> {
        let waves = |shape: &[i32], dtype: Dtype| -> Result<Array> {
            let count = shape.iter().product();
            // Any numbers without a pattern do.
            let angle = ops::multiply(Array::from_iter(0..count, &[count]), Array::from_f32(12.9898))?;
            Ok(ops::reshape(ops::sin(angle)?, shape)?.as_dtype(dtype)?)
        };
        let near = |found: &Array, wanted: &Array| -> Result<bool> {
            let wanted = wanted.as_dtype(Dtype::Float32)?;
            let error = ops::square(ops::subtract(found.as_dtype(Dtype::Float32)?, &wanted)?)?.sum(None)?;
            let scale = ops::square(&wanted)?.sum(None)?;
            let number = |array: Array| array.try_item_exact::<f32>().map_err(|error| Error::internal(error.to_string()));
            // Rounding to 16 bits stays far below; a wrong kernel does not.
            Ok(number(error)?.sqrt() <= 0.02 * number(scale)?.sqrt())
        };
        let served = |y: Option<Array>| y.ok_or_else(|| Error::new(ErrorKind::Internal, "a kernel refused its own test"));
        let dtype = Dtype::Bfloat16;
        let (q, k, v) = (waves(&[2, 4, 1, 64], dtype)?, waves(&[2, 2, 40, 64], dtype)?, waves(&[2, 2, 40, 64], dtype)?);
        let lens = Array::from_slice(&[39, 11], &[2]);
        let mask = ops::le(Array::from_iter(0..40, &[1, 1, 1, 40]), ops::reshape(&lens, &[2, 1, 1, 1])?)?;
        let mask = Some(mlx_rs::fast::ScaledDotProductAttentionMask::Array(&mask));
        let wanted = mlx_rs::fast::scaled_dot_product_attention(&q, &k, &v, 0.125, mask, None)?;
        near(&served(self.attend_last(&q, &k, &v, &lens, 0.125)?)?, &wanted)
    }
}
