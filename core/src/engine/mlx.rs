//! The backend on MLX. Lives on the owner thread.

use std::collections::HashMap;

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis, take_along_axis};
use mlx_rs::{Array, Dtype, Stream, memory, ops, transforms, with_stream};

use super::backend::{Advance, Backend, Chooser, DeviceInfo, Loaded, Row, Slot, TokenBatch};
use super::exit;
use super::limits::AllocatorLimits;
use crate::error::{Error, ErrorKind, Result};
use crate::kv_cache::KvCache;
use crate::model::{FilesSource, Graph, ModelSpec, PoolingMode, SpecSource};
use crate::models::bert::Bert;
use crate::models::llama::Llama;
use crate::models::{Decoder, Encoder};
use crate::nn::{Linear, scalar};
use crate::pool::MemoryReading;
use crate::weights::{Survey, Weights};

/// Prompt tokens per prefill step: what a cancel or another row may have to wait for.
pub(crate) const PREFILL_CHUNK: usize = 512;
/// Positions whose logits are held at once when scoring.
const SCORE_CHUNK: i32 = 64;
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

struct RowState {
    slot: Slot,
    prompt: Vec<u32>,
    done: usize,
    cache: KvCache,
    next: Next,
}

/// Where a row's next token comes from.
enum Next {
    /// The prompt is not through yet.
    Prompt,
    /// Logits `[1, vocabulary]` of the last position, not chosen from yet.
    Logits(Array),
    /// Feed this token.
    Token(u32),
    /// The device has chosen already (greedy): the token `[1]` and a number that is finite iff all logits are.
    Chosen(Array, Array),
}

/// MLX, its models and its rows.
pub(crate) struct Mlx {
    stream: Stream,
    device: DeviceInfo,
    models: HashMap<Slot, Resident>,
    rows: HashMap<Row, RowState>,
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
        let mut mlx =
            Self { stream: Stream::new(), device, models: HashMap::new(), rows: HashMap::new(), last_id: 0, first_uses: 0 };
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

    fn resident(&self, slot: Slot) -> Result<&Resident> {
        self.models
            .get(&slot)
            .ok_or_else(|| Error::new(ErrorKind::Closed, "the model was unloaded while the request was on its way"))
    }
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

    fn load(&mut self, spec: &ModelSpec, progress: &mut dyn FnMut(f32) -> Result<()>) -> Result<Loaded> {
        let SpecSource::Files(files) = &spec.source else { return Err(Error::internal("a scripted model on a real device")) };
        // Parsing the tokenizer left pages behind that the weights are about to need.
        trim();
        let stream = self.stream.clone();
        let before = memory::active_memory()?;
        let mut trimmed = before;
        let mut step = |fraction: f32| {
            let active = memory::active_memory()?;
            if active > trimmed + LOAD_TRIM_BYTES {
                trimmed = active;
                memory::clear_cache()?;
                trim();
            }
            progress(fraction)
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
        self.models.remove(&slot);
    }

    fn begin(&mut self, slot: Slot, prompt: Vec<u32>) -> Result<Row> {
        let resident = self.resident(slot)?;
        let Body::Decoder(decoder) = &resident.body else { return Err(Error::unsupported("this model does not generate text")) };
        check_ids(&prompt, resident.vocabulary)?;
        let state = RowState { slot, prompt, done: 0, cache: decoder.new_cache(), next: Next::Prompt };
        let row = Row(self.id());
        self.rows.insert(row, state);
        Ok(row)
    }

    fn advance(&mut self, row: Row, chooser: &mut dyn Chooser) -> Result<Advance> {
        let stream = self.stream.clone();
        let state = self.rows.get_mut(&row).ok_or_else(|| Error::internal("a step of a row that has ended"))?;
        let resident =
            self.models.get(&state.slot).ok_or_else(|| Error::new(ErrorKind::Closed, "the model was unloaded under a row"))?;
        let Body::Decoder(decoder) = &resident.body else { return Err(Error::internal("a row on an encoder")) };
        let step = with_stream(&stream, || advance(decoder.as_ref(), state, chooser));
        self.used(STEP);
        step
    }

    fn end(&mut self, row: Row) {
        self.rows.remove(&row);
    }

    #[cfg(test)]
    fn logits(&mut self, slot: Slot, ids: &[u32], from: usize) -> Result<Vec<Vec<f32>>> {
        let stream = self.stream.clone();
        let mut rows = Vec::new();
        with_stream(&stream, || {
            self.each_logits(slot, ids, from, &mut || Ok(()), |_, logits| {
                let width = usize::try_from(logits.dim(1)).unwrap_or(1);
                rows.extend(to_host(logits)?.chunks_exact(width).map(<[f32]>::to_vec));
                Ok(())
            })
        })?;
        Ok(rows)
    }

    fn score(&mut self, slot: Slot, ids: &[u32], from: usize, check: &mut dyn FnMut() -> Result<()>) -> Result<Vec<f32>> {
        if from == 0 || from > ids.len() {
            return Err(Error::internal("scoring must start after the first token"));
        }
        let stream = self.stream.clone();
        let mut scores = Vec::with_capacity(ids.len() - from);
        with_stream(&stream, || {
            // The logits after token i predict token i + 1.
            self.each_logits(slot, &ids[..ids.len() - 1], from - 1, check, |first, logits| {
                let len = usize::try_from(logits.dim(0)).unwrap_or(0);
                let targets = id_array(&ids[first + 1..first + 1 + len], &[logits.dim(0), 1])?;
                let chosen = take_along_axis(logits, targets, 1)?;
                let log_sum = logits.logsumexp_axis(1, true)?;
                scores.extend(to_host(&ops::subtract(chosen, log_sum)?)?);
                Ok(())
            })
        })?;
        self.used(SCORE);
        Ok(scores)
    }

    fn embed(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
        let resident = self.resident(slot)?;
        let vectors = with_stream(&self.stream, || {
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
        });
        self.used(BATCH);
        vectors
    }

    fn classify(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
        let resident = self.resident(slot)?;
        let Body::Encoder(encoder) = &resident.body else { return Err(Error::unsupported("this model has no classifier")) };
        let logits = with_stream(&self.stream, || {
            let (hidden, _) = encode(resident, batch)?;
            rows_of(&encoder.classify(&hidden)?)
        });
        self.used(BATCH);
        logits
    }
}

impl Mlx {
    /// Feeds `ids` and calls `visit(first position, logits [positions, vocabulary] in float32)` for the positions `from..`.
    fn each_logits(
        &self,
        slot: Slot,
        ids: &[u32],
        from: usize,
        check: &mut dyn FnMut() -> Result<()>,
        mut visit: impl FnMut(usize, &Array) -> Result<()>,
    ) -> Result<()> {
        let resident = self.resident(slot)?;
        let Body::Decoder(decoder) = &resident.body else { return Err(Error::unsupported("this model does not generate text")) };
        check_ids(ids, resident.vocabulary)?;
        let mut cache = decoder.new_cache();
        for (index, chunk) in ids.chunks(PREFILL_CHUNK).enumerate() {
            check()?;
            let start = index * PREFILL_CHUNK;
            let len = i32::try_from(chunk.len()).unwrap_or(0);
            let hidden = decoder.hidden(&id_array(chunk, &[1, len])?, &mut cache)?;
            transforms::eval(cache.arrays())?;
            let mut at = i32::try_from(from.saturating_sub(start).min(chunk.len())).unwrap_or(0);
            while at < len {
                let end = (at + SCORE_CHUNK).min(len);
                let logits = decoder.logits(&hidden.try_index((0, at..end, ..))?)?.as_dtype(Dtype::Float32)?;
                visit(start + usize::try_from(at).unwrap_or(0), &logits)?;
                at = end;
            }
        }
        Ok(())
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
            let vocabulary = config.vocabulary.unsigned_abs();
            (Body::Decoder(Box::new(Llama::load(weights, config, *interleaved, *with_head)?)), vocabulary, 1)
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

fn advance(decoder: &dyn Decoder, state: &mut RowState, chooser: &mut dyn Chooser) -> Result<Advance> {
    let feed = |state: &mut RowState, ids: &Array| -> Result<Array> {
        let last = decoder.last_hidden(ids, &mut state.cache)?;
        decoder.logits(&ops::squeeze_axes(last, &[1])?)
    };
    let choose = |logits: &Array| -> Result<Next> {
        let check = logits.as_dtype(Dtype::Float32)?.sum(None)?;
        let token = argmax_axis(logits, 1, false)?;
        transforms::async_eval([&token, &check])?;
        Ok(Next::Chosen(token, check))
    };
    let mut next = std::mem::replace(&mut state.next, Next::Prompt);
    if matches!(next, Next::Prompt) {
        let rest = &state.prompt[state.done..];
        let chunk = rest.len().min(PREFILL_CHUNK);
        let ids = id_array(&rest[..chunk], &[1, i32::try_from(chunk).unwrap_or(0)])?;
        if chunk < rest.len() {
            decoder.hidden(&ids, &mut state.cache)?;
            transforms::eval(state.cache.arrays())?;
            state.done += chunk;
            return Ok(Advance::Prefilled(state.done));
        }
        next = Next::Logits(feed(state, &ids)?);
        state.done += chunk;
    }
    if let Next::Token(token) = next {
        next = Next::Logits(feed(state, &id_array(&[token], &[1, 1])?)?);
    }
    if let Next::Logits(logits) = &next {
        if !chooser.is_greedy() {
            let token = chooser.choose(&to_host(logits)?)?;
            state.next = Next::Token(token);
            return Ok(Advance::Token(token));
        }
        next = choose(logits)?;
    }
    let Next::Chosen(token, check) = next else { return Err(Error::internal("a row without a next token")) };
    // The next step is under way on the device before this token is read.
    if !chooser.is_last() {
        let logits = feed(state, &ops::reshape(&token, &[1, 1])?)?;
        state.next = choose(&logits)?;
    }
    let chosen: u32 = item(&token)?;
    if !item::<f32>(&check)?.is_finite() {
        return Err(Error::new(ErrorKind::Backend, "the model produced logits that are not finite"));
    }
    if chooser.is_last() {
        state.next = Next::Token(chosen);
    }
    Ok(Advance::Token(chosen))
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
            let mut cache = decoder.new_cache();
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

fn item<T: mlx_rs::ArrayElement>(array: &Array) -> Result<T> {
    array.try_item_exact::<T>().map_err(|error| Error::new(ErrorKind::Backend, format!("MLX: {error}")))
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
