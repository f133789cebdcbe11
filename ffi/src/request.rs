//! Options that engines, requests and the pool share, and their values.

use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

use hob::engine::{OnCancel, RequestOptions, Timings};
use hob::model::{FloatType, LoadOptions, Manifest, ModelKind, PoolingMode};
use hob::options::Truncate;
use hob::{Error, ErrorKind, IdlePolicy, NoRoom, Result};

use crate::buffer::hob_str;
use crate::cancel::hob_cancel_token;
use crate::raw::{self, Sized32};
use crate::wait;

/// For any length of a text: up to its terminating NUL. What the INIT macros set.
pub const HOB_NUL_TERMINATED: usize = usize::MAX;

/// Idle policy: that of the pool (for an engine or a pool: after 900 s).
pub const HOB_IDLE_DEFAULT: i32 = 0;
/// Idle policy: unload as soon as the last use ends.
pub const HOB_IDLE_IMMEDIATELY: i32 = 1;
/// Idle policy: unload so many seconds after the last use ended; taken as 30 to 86,400.
pub const HOB_IDLE_AFTER_SECONDS: i32 = 2;
/// Idle policy: unload only to make room, or when asked.
pub const HOB_IDLE_NEVER: i32 = 3;

/// No room: what the pool does by default (which is to wait).
pub const HOB_NO_ROOM_DEFAULT: i32 = 0;
/// No room: stand in line until uses end; when only pinned models are in the way, be served beside them.
pub const HOB_NO_ROOM_WAIT: i32 = 1;
/// No room: fail with HOB_BUDGET_EXCEEDED.
pub const HOB_NO_ROOM_REFUSE: i32 = 2;
/// No room: evict what is idle and load over the budget, never over the physical limit.
pub const HOB_NO_ROOM_LOAD_ANYWAY: i32 = 3;

/// On cancel: the request fails with HOB_CANCELLED or HOB_TIMEOUT.
pub const HOB_ON_CANCEL_ABORT: i32 = 0;
/// On cancel: a generation ends with what there is, and its finish says why. Everything else fails all the same.
pub const HOB_ON_CANCEL_STOP: i32 = 1;

/// Model kind: as the model's files say.
pub const HOB_MODEL_KIND_AUTO: i32 = 0;
/// Model kind: generates text.
pub const HOB_MODEL_KIND_CHAT: i32 = 1;
/// Model kind: turns texts into vectors.
pub const HOB_MODEL_KIND_EMBEDDER: i32 = 2;
/// Model kind: scores documents against a query.
pub const HOB_MODEL_KIND_RERANKER: i32 = 3;

/// Number type: the files' own (on a CPU: float32).
pub const HOB_FLOAT_AUTO: i32 = 0;
/// Number type: 32-bit IEEE.
pub const HOB_FLOAT_FLOAT32: i32 = 1;
/// Number type: 16-bit IEEE.
pub const HOB_FLOAT_FLOAT16: i32 = 2;
/// Number type: 16-bit brain floating point.
pub const HOB_FLOAT_BFLOAT16: i32 = 3;

/// A choice with a default of its own: Hob decides.
pub const HOB_AUTO: i32 = 0;
/// A choice: yes.
pub const HOB_YES: i32 = 1;
/// A choice: no.
pub const HOB_NO: i32 = 2;

/// Pooling: as the model's files say.
pub const HOB_POOLING_AUTO: i32 = 0;
/// Pooling: the first token's state.
pub const HOB_POOLING_CLS: i32 = 1;
/// Pooling: the largest value per dimension.
pub const HOB_POOLING_MAX: i32 = 2;
/// Pooling: the mean.
pub const HOB_POOLING_MEAN: i32 = 3;
/// Pooling: the last token's state.
pub const HOB_POOLING_LAST_TOKEN: i32 = 4;

/// A text that is too long: refuse it, with both numbers.
pub const HOB_TRUNCATE_ERROR: i32 = 0;
/// A text that is too long: cut its end, and report how many tokens went.
pub const HOB_TRUNCATE_END: i32 = 1;
/// A prompt that is too long: cut its start, and report how many tokens went. For generating only.
pub const HOB_TRUNCATE_START: i32 = 2;

/// What every request may bring. Borrowed for the call. Start from HOB_REQUEST_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_request_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// HOB_ON_CANCEL_...
    pub on_cancel: i32,
    /// Gives up when cancelled, in any phase: waiting for room, loading, computing. May be NULL; not kept beyond the request.
    pub cancel: *const hob_cancel_token,
    /// Gives up after so many milliseconds, with HOB_TIMEOUT; 0 for no bound.
    pub timeout_ms: u64,
    /// What the model is used as: HOB_MODEL_KIND_...
    pub kind: i32,
    /// The number type to compute in: HOB_FLOAT_...
    pub float_type: i32,
    /// Expand quantised weights at load: HOB_AUTO, HOB_YES, HOB_NO.
    pub dequantize: i32,
    /// How an embedder pools: HOB_POOLING_...
    pub pooling: i32,
    /// How long the model stays after this use: HOB_IDLE_...
    pub idle: i32,
    /// The seconds of HOB_IDLE_AFTER_SECONDS.
    pub idle_seconds: u32,
    /// The model's own policy from now on; the last one given wins: HOB_IDLE_...
    pub model_idle: i32,
    /// The seconds of HOB_IDLE_AFTER_SECONDS.
    pub model_idle_seconds: u32,
    /// 1: keep the model whatever happens, until it is unpinned, evicted by name, or the engine closes.
    pub pinned: u32,
    /// 0.
    pub reserved: u32,
    /// What the model's files must be, checked before they are loaded: the manifest's JSON. NULL for no check.
    pub manifest_json: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub manifest_json_len: usize,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_request_options {
    const NAME: &'static str = "hob_request_options";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            on_cancel: HOB_ON_CANCEL_ABORT,
            cancel: std::ptr::null(),
            timeout_ms: 0,
            kind: HOB_MODEL_KIND_AUTO,
            float_type: HOB_FLOAT_AUTO,
            dequantize: HOB_AUTO,
            pooling: HOB_POOLING_AUTO,
            idle: HOB_IDLE_DEFAULT,
            idle_seconds: 0,
            model_idle: HOB_IDLE_DEFAULT,
            model_idle_seconds: 0,
            pinned: 0,
            reserved: 0,
            manifest_json: std::ptr::null(),
            manifest_json_len: HOB_NUL_TERMINATED,
        }
    }
}

/// What a computation took. Filled by the call; start from HOB_USAGE_INIT. Times are seconds; below 0 means: did not happen.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_usage {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// Tokens computed, special ones included.
    pub prompt_tokens: u64,
    /// Tokens cut off, with truncation.
    pub dropped_tokens: u64,
    /// From the call until work on the device began, without the load.
    pub queue_s: f64,
    /// The model's load, when this request caused or joined one.
    pub load_s: f64,
    /// The computation.
    pub compute_s: f64,
    /// From the call to the end.
    pub total_s: f64,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_usage {
    const NAME: &'static str = "hob_usage";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            reserved: 0,
            prompt_tokens: 0,
            dropped_tokens: 0,
            queue_s: 0.0,
            load_s: 0.0,
            compute_s: 0.0,
            total_s: 0.0,
        }
    }
}

/// Fills a usage that the host asked for; NULL is fine.
pub(crate) unsafe fn write_usage(out: *mut hob_usage, prompt: usize, dropped: usize, timings: &Timings) -> Result<()> {
    if out.is_null() {
        return Ok(());
    }
    let usage = hob_usage {
        prompt_tokens: prompt as u64,
        dropped_tokens: dropped as u64,
        queue_s: timings.queue_s,
        load_s: seconds(timings.load_s),
        compute_s: seconds(timings.prefill_s),
        total_s: timings.total_s,
        ..hob_usage::init()
    };
    // SAFETY: as the header asks.
    unsafe { raw::write_sized(out, usage) }
}

pub(crate) fn seconds(value: Option<f64>) -> f64 {
    value.unwrap_or(-1.0)
}

/// A request's options as the core has them.
pub(crate) unsafe fn request(options: *const hob_request_options) -> Result<RequestOptions> {
    // SAFETY: as the header asks.
    let (given, cancel, manifest) = unsafe {
        let given = raw::read_sized(options)?;
        let manifest = raw::optional_text(given.manifest_json, given.manifest_json_len, "manifest_json")?;
        (given, wait::token(given.cancel)?, manifest)
    };
    Ok(RequestOptions {
        cancel,
        timeout: (given.timeout_ms > 0).then(|| Duration::from_millis(given.timeout_ms)),
        on_cancel: match given.on_cancel {
            HOB_ON_CANCEL_ABORT => OnCancel::Abort,
            HOB_ON_CANCEL_STOP => OnCancel::Stop,
            other => return Err(unknown("on_cancel", other)),
        },
        load: LoadOptions {
            kind: kind(given.kind)?,
            float: match given.float_type {
                HOB_FLOAT_AUTO => None,
                HOB_FLOAT_FLOAT32 => Some(FloatType::Float32),
                HOB_FLOAT_FLOAT16 => Some(FloatType::Float16),
                HOB_FLOAT_BFLOAT16 => Some(FloatType::BFloat16),
                other => return Err(unknown("float_type", other)),
            },
            dequantize: choice("dequantize", given.dequantize)?,
            pooling: match given.pooling {
                HOB_POOLING_AUTO => None,
                HOB_POOLING_CLS => Some(PoolingMode::Cls),
                HOB_POOLING_MAX => Some(PoolingMode::Max),
                HOB_POOLING_MEAN => Some(PoolingMode::Mean),
                HOB_POOLING_LAST_TOKEN => Some(PoolingMode::LastToken),
                other => return Err(unknown("pooling", other)),
            },
            manifest: manifest.map(Manifest::from_json).transpose()?.map(Arc::new),
        },
        idle: idle("idle", given.idle, given.idle_seconds)?,
        model_idle: idle("model_idle", given.model_idle, given.model_idle_seconds)?,
        pinned: flag("pinned", given.pinned)?,
    })
}

pub(crate) fn kind(kind: i32) -> Result<Option<ModelKind>> {
    match kind {
        HOB_MODEL_KIND_AUTO => Ok(None),
        HOB_MODEL_KIND_CHAT => Ok(Some(ModelKind::Chat)),
        HOB_MODEL_KIND_EMBEDDER => Ok(Some(ModelKind::Embedder)),
        HOB_MODEL_KIND_RERANKER => Ok(Some(ModelKind::Reranker)),
        other => Err(unknown("kind", other)),
    }
}

pub(crate) fn idle(name: &str, policy: i32, seconds: u32) -> Result<Option<IdlePolicy>> {
    match policy {
        HOB_IDLE_DEFAULT => Ok(None),
        HOB_IDLE_IMMEDIATELY => Ok(Some(IdlePolicy::Immediately)),
        HOB_IDLE_AFTER_SECONDS => Ok(Some(IdlePolicy::after_seconds(seconds))),
        HOB_IDLE_NEVER => Ok(Some(IdlePolicy::Never)),
        other => Err(unknown(name, other)),
    }
}

pub(crate) fn no_room(policy: i32) -> Result<Option<NoRoom>> {
    match policy {
        HOB_NO_ROOM_DEFAULT => Ok(None),
        HOB_NO_ROOM_WAIT => Ok(Some(NoRoom::Wait)),
        HOB_NO_ROOM_REFUSE => Ok(Some(NoRoom::Refuse)),
        HOB_NO_ROOM_LOAD_ANYWAY => Ok(Some(NoRoom::LoadAnyway)),
        other => Err(unknown("no_room", other)),
    }
}

pub(crate) fn truncate(value: i32) -> Result<Truncate> {
    match value {
        HOB_TRUNCATE_ERROR => Ok(Truncate::Error),
        HOB_TRUNCATE_END => Ok(Truncate::End),
        HOB_TRUNCATE_START => Ok(Truncate::Start),
        other => Err(unknown("truncate", other)),
    }
}

pub(crate) fn choice(name: &str, value: i32) -> Result<Option<bool>> {
    match value {
        HOB_AUTO => Ok(None),
        HOB_YES => Ok(Some(true)),
        HOB_NO => Ok(Some(false)),
        other => Err(unknown(name, other)),
    }
}

pub(crate) fn flag(name: &str, value: u32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::new(ErrorKind::InvalidArgument, format!("{name} is {other}; it is 0 or 1"))),
    }
}

pub(crate) fn unknown(name: &str, value: i32) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{name} is {value}, which is none of its constants"))
}

pub(crate) fn size(name: &str, value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::new(ErrorKind::InvalidArgument, format!("{name} is {value}; that is too much here")))
}

/// The texts of an array, checked.
pub(crate) unsafe fn texts(array: *const hob_str, count: usize, what: &str) -> Result<Vec<String>> {
    // SAFETY: as the header asks.
    unsafe {
        let array = raw::slice(array, count, what)?;
        let one = |(index, text): (usize, &hob_str)| raw::text(text.data, text.len, &format!("{what}[{index}]")).map(str::to_owned);
        array.iter().enumerate().map(one).collect()
    }
}

/// A model's reference.
pub(crate) unsafe fn model<'a>(model: *const c_char, len: usize) -> Result<&'a str> {
    // SAFETY: as the header asks.
    unsafe { raw::text(model, len, "model") }
}
