//! Scripted engines and scripted faults, for a host's own tests.

use std::ffi::c_char;

use hob::engine::Engine;
use hob::fake::{FakeDevice, FakeModel, Fault, Point};
use hob::model::ModelKind;
use hob::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::boundary::{done, enter_shared, guard, out, panic_next};
use crate::engine::{EngineInner, engine_options, give, hob_engine, hob_engine_options};
use crate::error::{HOB_OK, hob_error, hob_status};
use crate::raw;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelJson {
    name: String,
    kind: ModelKind,
    bytes: u64,
    reply: Option<String>,
    context: Option<usize>,
    dimensions: Option<usize>,
    echo: Option<bool>,
    kv_bytes_per_token: Option<u64>,
    load_parts: Option<u16>,
    template: Option<String>,
}

impl From<ModelJson> for FakeModel {
    fn from(json: ModelJson) -> Self {
        let mut model = Self::new(&json.name, json.kind, json.bytes);
        model.reply = json.reply.unwrap_or(model.reply);
        model.context = json.context.unwrap_or(model.context);
        model.dimensions = json.dimensions.unwrap_or(model.dimensions);
        model.echo = json.echo.unwrap_or(model.echo);
        model.kv_bytes_per_token = json.kv_bytes_per_token.unwrap_or(model.kv_bytes_per_token);
        model.load_parts = json.load_parts.unwrap_or(model.load_parts);
        model.template = json.template;
        model
    }
}

/// For tests: opens an engine on a scripted device without MLX. `models_json` is a list of {"name", "kind" ("chat", "embedder",
/// "reranker"), "bytes", and if wanted "reply", "context", "dimensions", "echo", "kv_bytes_per_token", "load_parts", "template"};
/// requests name a model by its name, tokens are bytes. Everything else is as `hob_engine_open`. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_open_fake(
    models_json: *const c_char,
    models_json_len: usize,
    options: *const hob_engine_options,
    out_engine: *mut *mut hob_engine,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        guard(out_error, || {
            out(out_engine, "out_engine")?;
            let json = raw::text(models_json, models_json_len, "models_json")?;
            let models: Vec<ModelJson> = serde_json::from_str(json)
                .map_err(|error| Error::new(ErrorKind::InvalidArgument, format!("models_json: {error}")))?;
            if let Some(at) = models.iter().position(|model| model.dimensions == Some(0)) {
                return Err(Error::new(
                    ErrorKind::InvalidArgument,
                    format!("models_json: the model at {at} has 0 dimensions; give more"),
                ));
            }
            let device = FakeDevice::new(models.into_iter().map(Into::into).collect());
            let engine = Engine::open_fake(device.clone(), engine_options(options)?)?;
            done(out_engine, give(engine, Some(device)))
        })
    }
}

/// At a point of a scripted device: its thread waits from now on.
pub const HOB_FAKE_HOLD: i32 = 1;
/// At a point of a scripted device: its thread goes on.
pub const HOB_FAKE_RELEASE: i32 = 2;
/// At a point of a scripted device: blocks this thread until the device's thread waits there.
pub const HOB_FAKE_WAIT: i32 = 3;
/// At a point of a scripted device: the next arrival fails with HOB_BACKEND.
pub const HOB_FAKE_FAIL: i32 = 4;
/// At a point of a scripted device: the next arrival panics.
pub const HOB_FAKE_PANIC: i32 = 5;
/// At a point of a scripted device: the next arrival fails with HOB_OUT_OF_MEMORY.
pub const HOB_FAKE_OUT_OF_MEMORY: i32 = 6;

/// For tests: scripts what the device of `hob_engine_open_fake` does at a point: `load`, `load_end`, `load_step`, `prefill`, `step`,
/// `score`, `embed`, `rerank`, `unload`, `drain`. `action` is HOB_FAKE_... Any thread. HOB_INVALID_ARGUMENT, HOB_UNSUPPORTED for any
/// other engine. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_fake_script(
    engine: *const hob_engine,
    action: i32,
    point: *const c_char,
    point_len: usize,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            let point = point_of(raw::text(point, point_len, "point")?)?;
            let Some(device) = &inner.fake else {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "this engine's device is a real one; open it with hob_engine_open_fake",
                ));
            };
            match action {
                HOB_FAKE_HOLD => device.hold(point),
                HOB_FAKE_RELEASE => device.release(point),
                HOB_FAKE_WAIT => device.wait_until_held(point),
                HOB_FAKE_FAIL => device.fail_next(point, Fault::Error(ErrorKind::Backend)),
                HOB_FAKE_PANIC => device.fail_next(point, Fault::Panic),
                HOB_FAKE_OUT_OF_MEMORY => device.fail_next(point, Fault::Error(ErrorKind::OutOfMemory)),
                other => return Err(crate::request::unknown("action", other)),
            }
            Ok(HOB_OK)
        })
    }
}

fn point_of(name: &str) -> Result<Point> {
    Ok(match name {
        "load" => Point::Load,
        "load_end" => Point::LoadEnd,
        "load_step" => Point::LoadStep,
        "prefill" => Point::Prefill,
        "step" => Point::Step,
        "score" => Point::Score,
        "embed" => Point::Embed,
        "rerank" => Point::Rerank,
        "unload" => Point::Unload,
        "drain" => Point::Drain,
        _ => return Err(Error::new(ErrorKind::InvalidArgument, "point is none of the fake device's points")),
    })
}

/// For tests: 1 makes the next call of this thread into Hob panic inside, as a fault in Hob would; 0 takes that back. Returns 1 when
/// one was waiting already. The call gives HOB_INTERNAL (0 or NULL without a status), and its handle refuses further calls that have
/// a status, until it is given back. (Since 0.1)
#[unsafe(no_mangle)]
pub extern "C" fn hob_fake_panic_next(armed: i32) -> i32 {
    i32::from(panic_next(armed != 0))
}
