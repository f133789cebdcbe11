//! Engines: opening, loading, looking, closing.

use std::ffi::{c_char, c_void};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hob::engine::{Availability, Engine, EngineOptions};
use hob::fake::FakeDevice;
use hob::options::Limits;
use hob::pool::{PoolEvent, Received};
use hob::{CancelToken, Error, ErrorKind, IdlePolicy, Key, Kind, NoRoom};

use crate::boundary::{calm, done, enter_shared, guard, out, quiet};
use crate::buffer::{self, hob_buffer};
use crate::cancel::hob_cancel_token;
use crate::error::{HOB_OK, hob_error, hob_status, nothing, of_callback};
use crate::pool::{PoolInner, hob_pause, hob_pool};
use crate::raw::{self, Counted, Held, Sized32, castable};
use crate::request::{HOB_NUL_TERMINATED, flag, hob_request_options, idle, model, no_room, request, size};
use crate::wait::{self, UserData, block, hob_drop_fn};

/// A device, a pool of models on it, and the verbs. Any thread, also several at once. Shared: `hob_engine_retain` and
/// `hob_engine_release`. Its streams, pools, pauses and events keep it alive, so the order of releases is free; the last one
/// closes it in the background. `hob_engine_close` ends its work now.
pub struct hob_engine {
    _opaque: [u8; 0],
}

pub(crate) struct EngineInner {
    pub(crate) engine: Engine,
    pub(crate) fake: Option<FakeDevice>,
}

castable!(hob_engine => EngineInner, Counted, crate::handle::HOB_HANDLE_ENGINE);

/// How an engine is made. Borrowed for the call. Start from HOB_ENGINE_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_engine_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// How long models stay after their last use: HOB_IDLE_...
    pub idle: i32,
    /// The seconds of HOB_IDLE_AFTER_SECONDS.
    pub idle_seconds: u32,
    /// What a request does while there is no room for its model: HOB_NO_ROOM_...
    pub no_room: i32,
    /// The pool's budget in bytes; 0 takes 70 % of what the device recommends, else of three quarters of the memory.
    pub budget_bytes: u64,
    /// Bytes of computed prompts kept for later ones, within the budget; 0 keeps none. Default 512 MiB.
    pub prompt_cache_bytes: u64,
    /// Generations of one model that run at once; at least 1. Default 8.
    pub capacity: u32,
    /// Requests of all kinds that may wait beyond `capacity`; one more is HOB_BUSY. Default 64.
    pub queue: u32,
    /// Milliseconds that `hob_engine_close` waits for running work. Default 120,000.
    pub close_timeout_ms: u64,
    /// Milliseconds at one piece of given-up work after which the device counts as stuck. Default 30,000.
    pub stuck_after_ms: u64,
    /// How much one request may bring: a JSON object of limits (`prompt_bytes`, `messages`, `tools`, `text_bytes`, `texts`,
    /// `total_bytes`, `stops`, `stop_bytes`, `call_bytes`, `timeout`); NULL for the defaults.
    pub limits_json: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub limits_json_len: usize,
    /// 1 (the default): give freed memory back to the system each time a model goes.
    pub drain_after_release: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_engine_options {
    const NAME: &'static str = "hob_engine_options";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            idle: 0,
            idle_seconds: 0,
            no_room: 0,
            budget_bytes: 0,
            prompt_cache_bytes: 512 << 20,
            capacity: 8,
            queue: 64,
            close_timeout_ms: 120_000,
            stuck_after_ms: 30_000,
            limits_json: std::ptr::null(),
            limits_json_len: HOB_NUL_TERMINATED,
            drain_after_release: 1,
            reserved: 0,
        }
    }
}

/// Writes what HOB_ENGINE_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_options_init(options: *mut hob_engine_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_engine_options::init()) });
}

/// Writes what HOB_REQUEST_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_request_options_init(options: *mut hob_request_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_request_options::init()) });
}

pub(crate) unsafe fn engine_options(options: *const hob_engine_options) -> hob::Result<EngineOptions> {
    // SAFETY: as the header asks.
    let (given, limits) = unsafe {
        let given = raw::read_sized(options)?;
        (given, raw::optional_text(given.limits_json, given.limits_json_len, "limits_json")?)
    };
    let mut options = EngineOptions::default();
    options.budget_bytes = (given.budget_bytes > 0).then_some(given.budget_bytes);
    options.idle = idle("idle", given.idle, given.idle_seconds)?.unwrap_or_else(IdlePolicy::default);
    options.no_room = no_room(given.no_room)?.unwrap_or_else(NoRoom::default);
    options.capacity = size("capacity", given.capacity.into())?;
    options.queue = size("queue", given.queue.into())?;
    options.prompt_cache_bytes = given.prompt_cache_bytes;
    options.close_timeout = Duration::from_millis(given.close_timeout_ms);
    options.stuck_after = Duration::from_millis(given.stuck_after_ms);
    options.drain_after_release = flag("drain_after_release", given.drain_after_release)?;
    if let Some(limits) = limits {
        options.limits = serde_json::from_str::<Limits>(limits)
            .map_err(|error| Error::new(ErrorKind::InvalidArgument, format!("limits_json: {error}")))?;
    }
    Ok(options)
}

pub(crate) fn give(engine: Engine, fake: Option<FakeDevice>) -> *mut hob_engine {
    raw::give_counted(Arc::new(Held::new(EngineInner { engine, fake })))
}

/// Opens an engine on MLX's default device. `options` may be NULL. The caller owns one count of `*out_engine`. Any thread.
/// HOB_INVALID_ARGUMENT, HOB_BACKEND when MLX cannot start, HOB_IO when there is no thread to be had. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_open(
    options: *const hob_engine_options,
    out_engine: *mut *mut hob_engine,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        guard(out_error, || {
            out(out_engine, "out_engine")?;
            let engine = Engine::open(engine_options(options)?)?;
            done(out_engine, give(engine, None))
        })
    }
}

/// How far a load is: 0 to 1. Called on the thread that called `hob_engine_load`; may call Hob. A value other than 0 stops the
/// load, and the call fails with HOB_CALLBACK (a load that was near its end may have made the model resident all the same).
pub type hob_progress_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, fraction: f32) -> i32>;

/// Makes a model resident without using it, and blocks this thread until it is. A model is a directory (Hugging Face or MLX layout),
/// a .gguf file, or a hub id in the local Hugging Face cache. `options` and `progress` may be NULL. `*out_info`, which may be NULL,
/// gets what `hob_engine_inspect` tells. Any thread. HOB_NOT_FOUND, HOB_BAD_MODEL, HOB_UNSUPPORTED, HOB_IO, HOB_BUDGET_EXCEEDED,
/// HOB_OUT_OF_MEMORY, HOB_BUSY, HOB_TIMEOUT, HOB_CANCELLED, HOB_CALLBACK, HOB_CLOSED. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_load(
    engine: *const hob_engine,
    model_ref: *const c_char,
    model_len: usize,
    options: *const hob_request_options,
    progress: hob_progress_fn,
    user_data: *mut c_void,
    drop_user_data: hob_drop_fn,
    out_info: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    let data = UserData::new(user_data, drop_user_data);
    // SAFETY: as the header asks.
    unsafe {
        let status = enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            raw::write(out_info, nothing());
            let (reference, mut options) = (model(model_ref, model_len)?, request(options)?);
            let engine = &inner.engine;
            let Some(progress) = progress else {
                let info = block(None, engine.load(reference, options))?;
                return finish_load(out_info, &info);
            };
            let info = engine.inspect(reference, &options.load)?;
            let key = Key::new(Kind::from_name(info.kind.name()), info.id.as_str());
            let stop = options.cancel.as_ref().map_or_else(CancelToken::new, CancelToken::child);
            options.cancel = Some(stop.clone());
            let mut events = engine.pool().events(256);
            let mut stopped = None;
            let mut report = |event: Received| match event {
                Received::Event(PoolEvent::LoadProgress { key: of, percent, .. }) if of == key && stopped.is_none() => {
                    let answer = progress(data.pointer(), f32::from(percent) / 100.0);
                    if answer != 0 {
                        stopped = Some(answer);
                        stop.cancel();
                    }
                }
                _ => {}
            };
            let loaded = {
                let mut load = pin!(engine.load(reference, options));
                let signal = Arc::new(wait::Signal::default());
                signal.wait(-1, |context| {
                    loop {
                        let next = pin!(events.next());
                        match next.poll(context) {
                            Poll::Ready(Some(event)) => report(event),
                            Poll::Ready(None) | Poll::Pending => break,
                        }
                    }
                    load.as_mut().poll(context)
                })
            };
            // What was told between the last look and the end.
            while let Some(event) = events.try_next() {
                report(event);
            }
            match (loaded, stopped) {
                (_, Some(answer)) => Err(of_callback("the progress callback", answer)),
                (Some(info), None) => finish_load(out_info, &info?),
                (None, None) => Err(Error::new(ErrorKind::Internal, "a load ended without a result")),
            }
        });
        calm((), || drop(data));
        status
    }
}

unsafe fn finish_load(out_info: *mut *mut hob_buffer, info: &hob::engine::ModelInfo) -> hob::Result<hob_status> {
    if out_info.is_null() {
        return Ok(HOB_OK);
    }
    // SAFETY: not NULL.
    unsafe { done(out_info, buffer::json(info)?) }
}

/// What a model's files say, as JSON: `id`, `kind`, `family`, `quantization`, `context`, `capabilities` (the verbs it serves),
/// `pooling`, `prompts`, `estimate` and more. Reads headers, loads nothing. `options` may be NULL. The caller owns one count of
/// `*out_info`. Any thread. HOB_NOT_FOUND, HOB_BAD_MODEL, HOB_UNSUPPORTED, HOB_IO. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_inspect(
    engine: *const hob_engine,
    model_ref: *const c_char,
    model_len: usize,
    options: *const hob_request_options,
    out_info: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_info, "out_info")?;
            let info = inner.engine.inspect(model(model_ref, model_len)?, &request(options)?.load)?;
            done(out_info, buffer::json(&info)?)
        })
    }
}

/// What a model will take, in bytes. Filled by the call; start from HOB_ESTIMATE_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_estimate {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// 0.
    pub reserved: u32,
    /// The weights as they will lie in memory.
    pub weights: u64,
    /// Keys and values of one conversation.
    pub kv_cache: u64,
    /// Temporaries of the largest step.
    pub working: u64,
    /// The sum: what the pool charges.
    pub total: u64,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_estimate {
    const NAME: &'static str = "hob_estimate";
    fn init() -> Self {
        Self { struct_size: size_of::<Self>() as u32, reserved: 0, weights: 0, kv_cache: 0, working: 0, total: 0 }
    }
}

/// What a model will take, by part, before it is loaded. `options` may be NULL. Any thread. As `hob_engine_inspect`. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_estimate(
    engine: *const hob_engine,
    model_ref: *const c_char,
    model_len: usize,
    options: *const hob_request_options,
    out_estimate: *mut hob_estimate,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            if out_estimate.is_null() {
                return Err(raw::null("out_estimate"));
            }
            let parts = inner.engine.estimate(model(model_ref, model_len)?, &request(options)?.load)?;
            let estimate = hob_estimate {
                weights: parts.weights,
                kv_cache: parts.kv_cache,
                working: parts.working,
                total: parts.total(),
                ..hob_estimate::init()
            };
            raw::write_sized(out_estimate, estimate)?;
            Ok(HOB_OK)
        })
    }
}

/// Availability: nothing is under way.
pub const HOB_AVAILABILITY_READY: i32 = 0;
/// Availability: requests are under way; more are taken.
pub const HOB_AVAILABILITY_WORKING: i32 = 1;
/// Availability: the device has not come back from work that was given up; requests get HOB_BUSY until it does.
pub const HOB_AVAILABILITY_QUARANTINED: i32 = 2;
/// Availability: the engine is closed (or the handle NULL).
pub const HOB_AVAILABILITY_CLOSED: i32 = 3;

/// The device that computes, as JSON: `kind` (`cpu`, `gpu`, `fake`), `name`, `version` (of MLX), `recommended_bytes`. The caller owns one
/// count of `*out_device`. Never waits. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_device(
    engine: *const hob_engine,
    out_device: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_device, "out_device")?;
            done(out_device, buffer::json(inner.engine.device())?)
        })
    }
}

/// The verbs that a model serves, as a JSON list (`generate`, `score`, `decide`, `embed`, `rerank`). Reads headers, loads nothing. The
/// caller owns one count of `*out_verbs`. Any thread. As `hob_engine_inspect`. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_capabilities(
    engine: *const hob_engine,
    model_ref: *const c_char,
    model_len: usize,
    out_verbs: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_verbs, "out_verbs")?;
            done(out_verbs, buffer::json(&inner.engine.capabilities(model(model_ref, model_len)?)?)?)
        })
    }
}

/// Requests that were taken on and are not over. 0 for NULL. Never waits. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_requests(engine: *const hob_engine) -> usize {
    // SAFETY: as the header asks.
    quiet(0, || unsafe { raw::borrow(engine) }.map_or(0, |inner| inner.engine.requests()))
}

/// Whether requests are served now, as HOB_AVAILABILITY_...: a snapshot, not a promise. Never waits. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_availability(engine: *const hob_engine) -> i32 {
    // SAFETY: as the header asks.
    quiet(HOB_AVAILABILITY_CLOSED, || match unsafe { raw::borrow(engine) }.map(|inner| inner.engine.availability()) {
        Some(Availability::Ready) => HOB_AVAILABILITY_READY,
        Some(Availability::Working) => HOB_AVAILABILITY_WORKING,
        Some(Availability::Quarantined) => HOB_AVAILABILITY_QUARANTINED,
        Some(Availability::Closed) | None => HOB_AVAILABILITY_CLOSED,
    })
}

/// The engine's pool: its status, its events, and room for a host's own residents. The pool keeps the engine alive. The caller
/// owns one count. NULL for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_pool(engine: *const hob_engine) -> *mut hob_pool {
    // SAFETY: as the header asks.
    quiet(nothing(), || {
        unsafe { raw::borrow(engine) }.map_or(nothing(), |inner| {
            let pool = PoolInner { pool: inner.engine.pool().clone(), engine: Some(inner.engine.clone()) };
            raw::give_counted(Arc::new(Held::new(pool)))
        })
    })
}

/// Holds back new loads until `*out_pause` is freed, and blocks this thread until those under way have ended; resident models stay
/// usable. `cancel` may be NULL. Any thread but Hob's own. HOB_CANCELLED, HOB_TIMEOUT, HOB_CLOSED. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_pause(
    engine: *const hob_engine,
    cancel: *const hob_cancel_token,
    out_pause: *mut *mut hob_pause,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_pause, "out_pause")?;
            let paused = block(wait::token(cancel)?.as_ref(), inner.engine.pause())?;
            done(out_pause, raw::give_boxed(Held::new(paused)))
        })
    }
}

/// Ends every request with HOB_CLOSED, unloads every model and gives the memory back. Blocks this thread until that is done or the
/// options' `close_timeout_ms` is over; `*out_stopped`, which may be NULL, tells which (1 or 0), and in the second case the rest goes
/// on in the background. Closing again is allowed. Any thread but Hob's own. An error tells of releases that failed; the engine is
/// closed all the same. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_close(
    engine: *const hob_engine,
    out_stopped: *mut i32,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            raw::write(out_stopped, 0);
            let closed = block(None, inner.engine.close())?;
            raw::write(out_stopped, i32::from(closed.stopped));
            Ok(HOB_OK)
        })
    }
}

/// As `hob_engine_close`, however long it takes, or until `cancel` (which may be NULL) is cancelled: the closing then goes on in the
/// background. Any thread but Hob's own. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_close_and_wait(
    engine: *const hob_engine,
    cancel: *const hob_cancel_token,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            block(wait::token(cancel)?.as_ref(), inner.engine.close_and_wait())?;
            Ok(HOB_OK)
        })
    }
}

/// One more count of the engine; returns it. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_retain(engine: *mut hob_engine) -> *mut hob_engine {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe { raw::share(engine) }.map_or(nothing(), raw::give_counted))
}

/// Gives one count back; never waits for work. NULL is allowed. Any thread, also within callbacks. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_release(engine: *mut hob_engine) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_counted(engine) }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_initial_values_are_the_cores_defaults() {
        // SAFETY: NULL stands for the initial values.
        let (mut ours, cores) = (unsafe { engine_options(std::ptr::null()) }.expect("valid"), EngineOptions::default());
        assert_eq!(format!("{ours:?}"), format!("{cores:?}"));
        assert_eq!((ours.prompt_cache_bytes, ours.stuck_after), (cores.prompt_cache_bytes, cores.stuck_after));
        assert_eq!((ours.close_timeout, &ours.limits), (cores.close_timeout, &cores.limits));
        assert!(ours.drain_after_release == cores.drain_after_release && ours.clock.take().is_none());
    }
}
