//! The scripted device and the clock of tests.

use std::sync::Arc;

use hob::chat_template::Message;
use hob::engine::{Event, GenerateRequest};
use hob::fake::{FakeDevice, FakeModel, Fault, Point};
use hob::pool::unblock;
use hob::{ErrorKind, FakeClock};

use crate::engine::RawEngine;
use crate::error::Result;
use crate::live::{Live, Type};
use crate::types::{RawModelKind, seconds_of, size};

/// A model of a scripted device.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawFakeModel {
    /// The reference by which requests name it.
    pub name: String,
    /// What it is for.
    pub kind: RawModelKind,
    /// Bytes it takes.
    pub bytes: u64,
    /// What it answers.
    pub reply: String,
    /// Tokens it can attend to.
    pub context: u64,
    /// Width of its vectors.
    pub dimensions: u64,
    /// Answer with the prompt.
    pub echo: bool,
    /// Its chat template.
    pub template: Option<String>,
}

/// A place where a scripted device waits or fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawPoint {
    /// Before a load.
    Load,
    /// After a load's last report.
    LoadEnd,
    /// Between two parts of a load.
    LoadStep,
    /// Before a chunk of a prompt.
    Prefill,
    /// Before the next token.
    Step,
    /// Before a step of a scoring.
    Score,
    /// Before a batch of embeddings.
    Embed,
    /// Before a batch of pairs.
    Rerank,
    /// When a model is dropped.
    Unload,
    /// Before memory is returned.
    Drain,
}

impl From<RawPoint> for Point {
    fn from(point: RawPoint) -> Self {
        match point {
            RawPoint::Load => Self::Load,
            RawPoint::LoadEnd => Self::LoadEnd,
            RawPoint::LoadStep => Self::LoadStep,
            RawPoint::Prefill => Self::Prefill,
            RawPoint::Step => Self::Step,
            RawPoint::Score => Self::Score,
            RawPoint::Embed => Self::Embed,
            RawPoint::Rerank => Self::Rerank,
            RawPoint::Unload => Self::Unload,
            RawPoint::Drain => Self::Drain,
        }
    }
}

/// How a scripted device goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawFault {
    /// With `Backend`.
    Backend,
    /// With `OutOfMemory`.
    OutOfMemory,
    /// By a panic.
    Panic,
}

impl From<RawFault> for Fault {
    fn from(fault: RawFault) -> Self {
        match fault {
            RawFault::Backend => Self::Error(ErrorKind::Backend),
            RawFault::OutOfMemory => Self::Error(ErrorKind::OutOfMemory),
            RawFault::Panic => Self::Panic,
        }
    }
}

/// Reads a whole generation as a Rust program does, on a thread of its own; how many tokens came. For benchmarks that tell what crossing to
/// Swift costs.
///
/// # Errors
/// Those of the generation.
#[uniffi::export]
pub async fn raw_read_in_rust(engine: Arc<RawEngine>, model: String, prompt: String) -> Result<u64> {
    let engine = engine.engine.clone();
    let read = unblock(move || {
        hob::block_on(async {
            let mut stream = engine.generate(GenerateRequest::chat(model, vec![Message::user(prompt)]))?;
            let mut tokens = 0;
            while let Some(event) = stream.next().await {
                if let Event::Chunk(chunk) = event? {
                    tokens += chunk.token_ids.len() as u64;
                }
            }
            Ok(tokens)
        })
    });
    Ok(read.await?)
}

/// A test's hand on a scripted device.
#[derive(Debug, uniffi::Object)]
pub struct RawFakeDevice {
    pub(crate) device: FakeDevice,
    _live: Live,
}

#[uniffi::export]
impl RawFakeDevice {
    /// A device that knows these models.
    ///
    /// # Errors
    /// `InvalidArgument` for a size that is too much here.
    #[uniffi::constructor]
    pub fn create(models: Vec<RawFakeModel>) -> Result<Arc<Self>> {
        let model = |raw: RawFakeModel| {
            let mut model = FakeModel::new(&raw.name, raw.kind.into(), raw.bytes);
            model.reply = raw.reply;
            model.context = size("context", raw.context)?;
            model.dimensions = size("dimensions", raw.dimensions)?;
            model.echo = raw.echo;
            model.template = raw.template;
            Ok(model)
        };
        let models = models.into_iter().map(model).collect::<hob::Result<Vec<_>>>()?;
        Ok(Arc::new(Self { device: FakeDevice::new(models), _live: Live::new(Type::FakeDevice) }))
    }

    /// The device waits at `point` from now on.
    ///
    /// # Errors
    /// None, as things are.
    pub fn hold(&self, point: RawPoint) -> Result<()> {
        self.device.hold(point.into());
        Ok(())
    }

    /// The device goes on.
    ///
    /// # Errors
    /// None, as things are.
    pub fn release(&self, point: RawPoint) -> Result<()> {
        self.device.release(point.into());
        Ok(())
    }

    /// The device goes on once.
    ///
    /// # Errors
    /// None, as things are.
    pub fn pass(&self, point: RawPoint) -> Result<()> {
        self.device.pass(point.into());
        Ok(())
    }

    /// Completes when the device waits at a held `point`.
    ///
    /// # Errors
    /// `Io` when there is no thread to be had.
    pub async fn wait_until_held(&self, point: RawPoint) -> Result<()> {
        let (device, point) = (self.device.clone(), point.into());
        unblock(move || {
            device.wait_until_held(point);
            Ok(())
        })
        .await?;
        Ok(())
    }

    /// The next arrival at `point` goes wrong.
    ///
    /// # Errors
    /// None, as things are.
    pub fn fail_next(&self, point: RawPoint, fault: RawFault) -> Result<()> {
        self.device.fail_next(point.into(), fault.into());
        Ok(())
    }

    /// How often the device came to `point`.
    ///
    /// # Errors
    /// None, as things are.
    pub fn count(&self, point: RawPoint) -> Result<u64> {
        Ok(self.device.count(point.into()))
    }

    /// Bytes that the device holds.
    ///
    /// # Errors
    /// None, as things are.
    pub fn held_bytes(&self) -> Result<u64> {
        Ok(self.device.memory().held())
    }
}

/// A clock that a test moves.
#[derive(Debug, uniffi::Object)]
pub struct RawFakeClock {
    pub(crate) clock: Arc<FakeClock>,
    _live: Live,
}

#[uniffi::export]
impl RawFakeClock {
    /// A clock that stands still.
    ///
    /// # Errors
    /// None, as things are.
    #[uniffi::constructor]
    pub fn create() -> Result<Arc<Self>> {
        Ok(Arc::new(Self { clock: Arc::new(FakeClock::new()), _live: Live::new(Type::FakeClock) }))
    }

    /// Moves it.
    ///
    /// # Errors
    /// `InvalidArgument` for a time that is none.
    pub fn advance(&self, seconds: f64) -> Result<()> {
        self.clock.advance(seconds_of("the time", seconds)?);
        Ok(())
    }

    /// Timers that wait on it.
    ///
    /// # Errors
    /// None, as things are.
    pub fn sleepers(&self) -> Result<u64> {
        Ok(self.clock.sleepers() as u64)
    }
}
