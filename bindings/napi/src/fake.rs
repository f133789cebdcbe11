//! For tests: engines on a scripted device, without MLX.

use std::sync::Arc;

use hob::engine::Engine;
use hob::fake::{FakeDevice, FakeModel, Fault, Point};
use hob::pool::unblock;
use hob::{Error, ErrorKind};
use napi_derive::napi;

use crate::engine::NativeEngine;
use crate::error::{Refusal, enter, invalid, number, size, whole};
use crate::mailbox::NativeMailbox;
use crate::requests::{NativeEngineOptions, kind_of};
use crate::results::Value;

/// A model of a scripted device. Tokens are bytes.
#[napi(object, object_to_js = false)]
pub struct NativeFakeModel {
    /// By which requests name it.
    pub name: String,
    /// What it is for.
    #[napi(ts_type = "'chat' | 'embedder' | 'reranker'")]
    pub kind: String,
    /// Bytes it takes.
    pub bytes: f64,
    /// What a chat model answers; `Hello!` by default.
    pub reply: Option<String>,
    /// A chat model answers with its rendered prompt.
    pub echo: Option<bool>,
    /// Tokens it can attend to.
    pub context: Option<f64>,
    /// Numbers per vector of an embedder; 8 by default.
    pub dimensions: Option<f64>,
    /// Bytes of keys and values per token of a conversation.
    pub kv_bytes_per_token: Option<f64>,
    /// The chat template, by whose marks answers are read.
    pub template: Option<String>,
}

impl NativeFakeModel {
    fn read(self) -> hob::Result<FakeModel> {
        let mut model = FakeModel::new(&self.name, kind_of(&self.kind)?, whole("bytes", self.bytes)?);
        model.reply = self.reply.unwrap_or(model.reply);
        model.echo = self.echo.unwrap_or(model.echo);
        model.template = self.template;
        if let Some(context) = self.context {
            model.context = size("context", context)?;
        }
        if let Some(dimensions) = self.dimensions {
            model.dimensions = size("dimensions", dimensions)?;
        }
        if let Some(bytes) = self.kv_bytes_per_token {
            model.kv_bytes_per_token = whole("kvBytesPerToken", bytes)?;
        }
        Ok(model)
    }
}

/// Opens an engine on a scripted device that knows these models; it is what the call ends with.
#[napi]
pub fn open_fake_engine(
    mailbox: &NativeMailbox,
    id: f64,
    models: Vec<NativeFakeModel>,
    options: NativeEngineOptions,
) -> Result<(), Refusal> {
    enter(|| {
        let (mailbox, options) = (Arc::clone(&mailbox.mailbox), options.read()?);
        let models = models.into_iter().map(NativeFakeModel::read).collect::<hob::Result<Vec<_>>>()?;
        let (device, owner) = (FakeDevice::new(models), Arc::clone(&mailbox));
        mailbox.run(whole("id", id)?, async move {
            let engine = Engine::open_fake(device.clone(), options)?;
            Ok(Value::Engine(Box::new(NativeEngine::new(engine, Some(device), owner))))
        })
    })
}

fn device(engine: &NativeEngine) -> hob::Result<&FakeDevice> {
    let real = || Error::new(ErrorKind::Unsupported, "this engine's device is a real one; open it with openFakeEngine");
    engine.fake.as_ref().ok_or_else(real)
}

/// Scripts what a scripted device does at a point: `hold`, `release`, `pass` (go on once), `fail` or `panic` (the next arrival).
#[napi]
pub fn fake_script(
    engine: &NativeEngine,
    #[napi(ts_arg_type = "'hold' | 'release' | 'pass' | 'fail' | 'panic'")] action: String,
    point: String,
) -> Result<(), Refusal> {
    enter(|| {
        let (device, point) = (device(engine)?, point_of(&point)?);
        match action.as_str() {
            "hold" => device.hold(point),
            "release" => device.release(point),
            "pass" => device.pass(point),
            "fail" => device.fail_next(point, Fault::Error(ErrorKind::Backend)),
            "panic" => device.fail_next(point, Fault::Panic),
            _ => return Err(invalid("action is none of: hold, release, pass, fail, panic")),
        }
        Ok(())
    })
}

/// Ends when the scripted device waits at a held point.
#[napi]
pub fn fake_held(mailbox: &NativeMailbox, id: f64, engine: &NativeEngine, point: String) -> Result<(), Refusal> {
    enter(|| {
        let (device, point) = (device(engine)?.clone(), point_of(&point)?);
        let held = unblock(move || {
            device.wait_until_held(point);
            Ok(Value::Nothing)
        });
        mailbox.mailbox.run(whole("id", id)?, held)
    })
}

/// How often the scripted device came to a point.
#[napi]
pub fn fake_count(engine: &NativeEngine, point: String) -> Result<f64, Refusal> {
    enter(|| Ok(number(device(engine)?.count(point_of(&point)?))))
}

/// For tests: a panic in an export.
#[napi]
pub fn fake_panic() -> Result<(), Refusal> {
    enter(|| {
        #[allow(clippy::panic)] // what it is for
        {
            panic!("a test asked for it")
        }
    })
}

fn point_of(name: &str) -> hob::Result<Point> {
    Ok(match name {
        "load" => Point::Load,
        "loadEnd" => Point::LoadEnd,
        "loadStep" => Point::LoadStep,
        "prefill" => Point::Prefill,
        "step" => Point::Step,
        "score" => Point::Score,
        "embed" => Point::Embed,
        "rerank" => Point::Rerank,
        "unload" => Point::Unload,
        "drain" => Point::Drain,
        _ => return Err(invalid("point is none of the scripted device's points")),
    })
}
