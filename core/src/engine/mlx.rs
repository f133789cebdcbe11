//! The backend on MLX. Lives on the owner thread.

mod encode;
mod rows;

use std::collections::HashMap;

#[cfg(test)]
use mlx_rs::ops;
use mlx_rs::{Array, Dtype, Stream, memory, transforms, with_stream};

use self::rows::Rows;
use super::backend::{
    Backend, CacheBytes, Chooser, DeviceInfo, LoadProgress, Loaded, Prefill, Row, Slot, Stepping, Tenant, TokenBatch,
};
use super::exit;
use super::limits::AllocatorLimits;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{FilesSource, Graph, ModelSpec, PoolingMode, SpecSource};
use crate::models::bert::Bert;
use crate::models::llama::Llama;
use crate::models::{Decoder, Encoder};
use crate::nn::{self, Linear};
use crate::pool::MemoryReading;
use crate::weights::{Survey, Weights};

/// Tokens of long texts that go in at once.
const PREFILL_CHUNK: usize = 512;
/// A load returns freed buffers each time it has grown by so much, so that what conversions leave behind does not add up.
const LOAD_TRIM_BYTES: usize = 32 << 20;

/// Kinds of work, for [`Mlx::used`].
const START: u8 = 1;
const LOAD: u8 = 2;
const STEP: u8 = 4;
const BATCH: u8 = 8;
const SCORE: u8 = 16;

enum Body {
    Decoder(Box<dyn Decoder>),
    Encoder(Box<dyn Encoder>),
}

struct Resident {
    body: Body,
    pooling: Vec<PoolingMode>,
    dense: Vec<(Linear, Activation)>,
    vocabulary: u32,
    types: u32,
}

/// The activation of a sentence-transformers Dense module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    Identity,
    Tanh,
}

/// MLX, its models and its rows.
pub(crate) struct Mlx {
    stream: Stream,
    device: DeviceInfo,
    models: HashMap<Slot, Resident>,
    rows: Rows,
    last_id: u64,
    /// First uses that may have made statics of MLX's, for which the exit handler was registered anew.
    first_uses: u8,
}

impl Mlx {
    /// Call on the owner thread: MLX's streams belong to the thread that makes them.
    pub(crate) fn new() -> Result<Self> {
        // mlx-c's own error handler ends the process: replace it before the first call that could fail. mlx-rs then installs
        // its own, which keeps the message for the caller.
        // SAFETY: the handler is a plain function without data.
        unsafe { mlx_sys::mlx_set_error_handler(Some(ignore_error), std::ptr::null_mut(), None) };
        memory::active_memory()?;
        let device = device_info()?;
        let mut mlx = Self { stream: Stream::new(), device, models: HashMap::new(), rows: Rows::new(), last_id: 0, first_uses: 0 };
        mlx.used(START);
        Ok(mlx)
    }

    /// Called after work of one kind: the first of each kind may have made statics of MLX's (see `exit`).
    fn used(&mut self, kind: u8) {
        if self.first_uses & kind == 0 {
            self.first_uses |= kind;
            exit::register();
        }
    }

    fn id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The model behind a row, and the rest of what a step needs; all computation inside `work` runs on this thread's stream.
    fn with_decoder<T>(&mut self, slot: Slot, work: impl FnOnce(&mut Rows, &dyn Decoder, u32) -> Result<T>) -> Result<T> {
        let resident = self.models.get(&slot).ok_or_else(unloaded)?;
        let Body::Decoder(decoder) = &resident.body else { return Err(Error::unsupported("this model does not generate text")) };
        let (rows, stream) = (&mut self.rows, self.stream.clone());
        with_stream(&stream, || work(rows, decoder.as_ref(), resident.vocabulary))
    }

    fn resident(&self, slot: Slot) -> Result<&Resident> {
        self.models.get(&slot).ok_or_else(unloaded)
    }
}

fn unloaded() -> Error {
    Error::new(ErrorKind::Closed, "the model was unloaded while the request was on its way")
}

unsafe extern "C" fn ignore_error(_message: *const std::ffi::c_char, _data: *mut std::ffi::c_void) {}

fn device_info() -> Result<DeviceInfo> {
    let device = mlx_rs::Device::try_default()?;
    let kind = if matches!(device.get_type()?, mlx_rs::DeviceType::Gpu) { "gpu" } else { "cpu" };
    // SAFETY: each object is made, read and freed here; strings are copied before their owner goes.
    let (name, recommended, version) = unsafe {
        let raw = mlx_sys::mlx_device_new_type(
            if kind == "gpu" { mlx_sys::mlx_device_type__MLX_GPU } else { mlx_sys::mlx_device_type__MLX_CPU },
            0,
        );
        let mut info = mlx_sys::mlx_device_info_new();
        let (mut name, mut recommended) = (None, None);
        if mlx_sys::mlx_device_info_get(&raw mut info, raw) == 0 {
            let mut text: *const std::ffi::c_char = std::ptr::null();
            if mlx_sys::mlx_device_info_get_string(&raw mut text, info, c"device_name".as_ptr()) == 0 && !text.is_null() {
                name = Some(std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned());
            }
            for key in [c"max_recommended_working_set_size", c"memory_size", c"total_memory"] {
                let (mut bytes, mut has) = (0usize, false);
                if mlx_sys::mlx_device_info_has_key(&raw mut has, info, key.as_ptr()) == 0
                    && has
                    && mlx_sys::mlx_device_info_get_size(&raw mut bytes, info, key.as_ptr()) == 0
                    && bytes > 0
                {
                    recommended = Some(bytes as u64);
                    break;
                }
            }
        }
        mlx_sys::mlx_device_info_free(info);
        mlx_sys::mlx_device_free(raw);
        let mut text = mlx_sys::mlx_string_new();
        let version = if mlx_sys::mlx_version(&raw mut text) == 0 {
            std::ffi::CStr::from_ptr(mlx_sys::mlx_string_data(text)).to_string_lossy().into_owned()
        } else {
            "unknown".to_owned()
        };
        mlx_sys::mlx_string_free(text);
        (name, recommended, version)
    };
    let recommended_bytes = if kind == "gpu" { recommended } else { None };
    Ok(DeviceInfo { kind, name: name.unwrap_or_else(|| kind.to_uppercase()), version, recommended_bytes })
}

impl Backend for Mlx {
    fn device(&self) -> DeviceInfo {
        self.device.clone()
    }

    fn memory(&self) -> MemoryReading {
        let read = |value: mlx_rs::error::Result<usize>| value.unwrap_or(0) as u64;
        MemoryReading {
            active: read(memory::active_memory()),
            cache: read(memory::cache_memory()),
            peak: read(memory::peak_memory()),
            available: None,
        }
    }

    fn limits(&mut self) -> Result<AllocatorLimits> {
        // The cache's limit can only be read by setting it.
        let cache = memory::set_cache_limit(0)?;
        memory::set_cache_limit(cache)?;
        Ok(AllocatorLimits { memory: memory::memory_limit()? as u64, cache: cache as u64 })
    }

    fn set_limits(&mut self, limits: AllocatorLimits) -> Result<()> {
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        memory::set_memory_limit(size(limits.memory))?;
        memory::set_cache_limit(size(limits.cache))?;
        Ok(())
    }

    fn drain(&mut self) -> Result<()> {
        synchronize(&self.stream)?;
        memory::clear_cache()?;
        trim();
        Ok(())
    }

    fn load(&mut self, spec: &ModelSpec, progress: LoadProgress<'_>) -> Result<Loaded> {
        let SpecSource::Files(files) = &spec.source else { return Err(Error::internal("a scripted model on a real device")) };
        // Parsing the tokenizer left pages behind that the weights are about to need.
        trim();
        let stream = self.stream.clone();
        // What the weights take: what is allocated in all, less what others' work in between took or gave.
        let mut before = memory::active_memory()?;
        let mut trimmed = before;
        let mut step = |fraction: f32| {
            let active = memory::active_memory()?;
            if active > trimmed + LOAD_TRIM_BYTES {
                trimmed = active;
                memory::clear_cache()?;
                trim();
            }
            progress(self, fraction)?;
            before = (before + memory::active_memory()?).saturating_sub(active);
            Ok(())
        };
        let resident = with_stream(&stream, || load(files, &mut step));
        self.used(LOAD);
        let resident = match resident {
            Ok(resident) => resident,
            Err(error) => {
                // What was loaded before the failure is gone already; its buffers must not stay with the allocator.
                if let Err(drain) = self.drain() {
                    tracing::warn!(kind = %drain.kind(), "drain after a failed load failed");
                }
                return Err(error);
            }
        };
        memory::clear_cache()?;
        trim();
        let slot = Slot(self.id());
        self.models.insert(slot, resident);
        Ok(Loaded { slot, weight_bytes: memory::active_memory()?.saturating_sub(before) as u64 })
    }

    fn unload(&mut self, slot: Slot) {
        self.rows.forget(slot);
        self.models.remove(&slot);
    }

    fn begin(&mut self, slot: Slot, prompt: Vec<u32>, reuse: bool) -> Result<(Row, usize)> {
        let row = Row(self.id());
        let cached =
            self.with_decoder(slot, |rows, decoder, vocabulary| rows.begin(row, slot, decoder, vocabulary, prompt, reuse))?;
        Ok((row, cached))
    }

    fn prefill(&mut self, row: Row, chunk: usize, chooser: &mut dyn Chooser) -> Result<Prefill> {
        let step = self.with_decoder(self.rows.slot(row)?, |rows, decoder, _| rows.prefill(row, decoder, chunk, chooser));
        self.used(STEP);
        step
    }

    fn decode(&mut self, slot: Slot, stepping: &mut [Stepping<'_>]) -> Result<()> {
        let step = self.with_decoder(slot, |rows, decoder, _| rows.decode(slot, decoder, stepping));
        self.used(STEP);
        step
    }

    fn set_back(&mut self, row: Row) -> Result<()> {
        self.with_decoder(self.rows.slot(row)?, |rows, decoder, _| rows.set_back(row, decoder))
    }

    fn fork(&mut self, row: Row) -> Result<Row> {
        let new = Row(self.id());
        self.rows.fork(row, new)?;
        Ok(new)
    }

    fn score(&mut self, row: Row, ids: &[u32]) -> Result<Vec<f32>> {
        let scores = self.with_decoder(self.rows.slot(row)?, |rows, decoder, vocabulary| rows.score(row, decoder, vocabulary, ids));
        self.used(SCORE);
        scores
    }

    fn extend(&mut self, row: Row, ids: &[u32]) -> Result<()> {
        self.with_decoder(self.rows.slot(row)?, |rows, decoder, vocabulary| rows.extend(row, decoder, vocabulary, ids))
    }

    fn end(&mut self, row: Row, keep: bool) {
        let stream = self.stream.clone();
        if let Err(error) = with_stream(&stream, || self.rows.end(row, keep)) {
            tracing::warn!(kind = %error.kind(), "a row's end failed");
        }
    }

    fn cache_bytes(&self, slot: Slot) -> CacheBytes {
        self.rows.bytes(slot)
    }

    fn forget_prompt(&mut self, slot: Slot) -> bool {
        self.rows.forget_prompt(slot)
    }

    fn keep_prompts(&mut self, slot: Slot, tenant: &Tenant) {
        self.rows.keep_prompts(slot, tenant);
    }

    #[cfg(test)]
    fn logits(&mut self, slot: Slot, ids: &[u32], from: usize) -> Result<Vec<Vec<f32>>> {
        let mut found = Vec::new();
        self.with_decoder(slot, |_, decoder, vocabulary| {
            check_ids(ids, vocabulary)?;
            let mut cache = decoder.new_cache(1);
            for (index, chunk) in ids.chunks(PREFILL_CHUNK).enumerate() {
                let hidden = decoder.hidden(&id_array(chunk, &[1, i32::try_from(chunk.len()).unwrap_or(0)])?, &mut cache)?;
                let rows = rows_of(&ops::squeeze_axes(decoder.logits(&hidden)?, &[0])?)?;
                found.extend(rows.into_iter().skip(from.saturating_sub(index * PREFILL_CHUNK)));
            }
            Ok(())
        })?;
        Ok(found)
    }

    fn embed(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
        let resident = self.resident(slot)?;
        let vectors = with_stream(&self.stream, || encode::embed(resident, batch));
        self.used(BATCH);
        vectors
    }

    fn classify(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
        let resident = self.resident(slot)?;
        let logits = with_stream(&self.stream, || encode::classify(resident, batch));
        self.used(BATCH);
        logits
    }
}

/// Has the C library give freed pages back: MLX's CPU allocator is built on it, and it keeps them for itself until asked.
fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: no pointers, callable at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn synchronize(stream: &Stream) -> Result<()> {
    // SAFETY: the stream lives through the call.
    match unsafe { mlx_sys::mlx_synchronize(stream.as_ptr()) } {
        0 => Ok(()),
        _ => Err(Error::new(ErrorKind::Backend, "MLX: synchronize failed")),
    }
}

fn load(files: &FilesSource, progress: &mut dyn FnMut(f32) -> Result<()>) -> Result<Resident> {
    let weights = Weights::open(&files.survey, files.layout, progress)?;
    let (body, vocabulary, types) = match &files.graph {
        Graph::Decoder { config, interleaved, with_head } => {
            let model = Llama::load(weights, config, *interleaved, *with_head)?;
            if *with_head && nn::has_kernels() {
                // Kernels are compiled at their first use, which is not to be the first request.
                transforms::eval([&rows::step(&model, &id_array(&[0], &[1, 1])?, &mut model.new_cache(1))?])?;
            }
            (Body::Decoder(Box::new(model)), config.vocabulary.unsigned_abs(), 1)
        }
        Graph::Bert { config, labels } => {
            let (vocabulary, types) = (config.vocabulary.unsigned_abs(), config.types.unsigned_abs());
            (Body::Encoder(Box::new(Bert::load(weights, config, *labels)?)), vocabulary, types)
        }
    };
    let mut dense = Vec::new();
    for module in &files.pooling.dense {
        let survey = Survey::directory(&module.dir, &module.config)?;
        let mut quiet = |_: f32| Ok(());
        let mut weights = Weights::open(&survey, files.layout, &mut quiet)?;
        dense.push((weights.linear("linear", module.output, module.input, module.bias)?, module.activation));
        weights.finish_model(&[])?;
    }
    Ok(Resident { body, pooling: files.pooling.modes.clone(), dense, vocabulary, types })
}

fn check_ids(ids: &[u32], vocabulary: u32) -> Result<()> {
    match ids.iter().find(|&&id| id >= vocabulary) {
        Some(id) => Err(Error::new(
            ErrorKind::BadModel,
            format!("token id {id} is outside the model's vocabulary of {vocabulary}: its tokenizer belongs to another model"),
        )),
        None => Ok(()),
    }
}

fn id_array(ids: &[u32], shape: &[i32]) -> Result<Array> {
    let wanted: i64 = shape.iter().map(|&dim| i64::from(dim)).product();
    if i64::try_from(ids.len()) != Ok(wanted) {
        return Err(Error::internal(format!("{} ids for a shape of {shape:?}", ids.len())));
    }
    Ok(Array::from_slice(ids, shape))
}

fn values<T: mlx_rs::ArrayElement + Copy>(array: &Array) -> Result<Vec<T>> {
    array.to_vec_exact::<T>().map_err(|error| Error::new(ErrorKind::Backend, format!("MLX: {error}")))
}

fn to_host(array: &Array) -> Result<Vec<f32>> {
    // A slice of a larger array is not contiguous; copying it out needs it to be.
    let array = array.as_dtype(Dtype::Float32)?.contiguous()?;
    array.to_vec_exact::<f32>().map_err(|error| Error::new(ErrorKind::Backend, format!("MLX: {error}")))
}

fn rows_of(matrix: &Array) -> Result<Vec<Vec<f32>>> {
    let width = usize::try_from(matrix.dim(1)).unwrap_or(1);
    Ok(to_host(matrix)?.chunks_exact(width.max(1)).map(<[f32]>::to_vec).collect())
}
