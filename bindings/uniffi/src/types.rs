//! Values that requests and pools share, and the token that ends them.

use std::sync::Arc;
use std::time::Duration;

use hob::engine::{OnCancel, RequestOptions, Timings};
use hob::model::{FloatType, LoadOptions, Manifest, ModelKind, PoolingMode};
use hob::options::Truncate;
use hob::{CancelReason, CancelToken, IdlePolicy, Key, Kind, NoRoom};

use crate::error::{Result, invalid};
use crate::live::{Live, Type};

/// Asks work to stop. Any thread, any number of times.
#[derive(Debug, uniffi::Object)]
pub struct RawCancelToken {
    pub(crate) token: CancelToken,
    _live: Live,
}

impl RawCancelToken {
    fn wrap(token: CancelToken) -> Arc<Self> {
        Arc::new(Self { token, _live: Live::new(Type::CancelToken) })
    }
}

#[uniffi::export]
impl RawCancelToken {
    /// A live token.
    ///
    /// # Errors
    /// None, as things are.
    #[uniffi::constructor]
    pub fn create() -> Result<Arc<Self>> {
        Ok(Self::wrap(CancelToken::new()))
    }

    /// A token that is cancelled with this one, and can be cancelled alone.
    ///
    /// # Errors
    /// None, as things are.
    pub fn child(&self) -> Result<Arc<Self>> {
        Ok(Self::wrap(self.token.child()))
    }

    /// A child that is cancelled by itself after so many seconds.
    ///
    /// # Errors
    /// `InvalidArgument` for a number of seconds that is negative or none.
    pub fn with_timeout(&self, seconds: f64) -> Result<Arc<Self>> {
        let after = seconds_of("the timeout", seconds)?;
        let deadline = std::time::Instant::now().checked_add(after);
        Ok(Self::wrap(deadline.map_or_else(|| self.token.child(), |deadline| self.token.with_deadline(deadline))))
    }

    /// Cancels this token and its descendants; whether this call was the one that did.
    ///
    /// # Errors
    /// None, as things are.
    pub fn cancel(&self) -> Result<bool> {
        Ok(self.token.cancel())
    }

    /// The code of the error that a request would end with: `Cancelled` or `Timeout`; nothing while the token is live.
    ///
    /// # Errors
    /// None, as things are.
    pub fn reason(&self) -> Result<Option<i32>> {
        Ok(self.token.reason().map(|reason: CancelReason| reason.kind().code()))
    }
}

/// How long a model stays after its last use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawIdle {
    /// Until its last use ends.
    Immediately,
    /// So long.
    AfterSeconds {
        /// Clamped to 30..=86,400; 0 is `Immediately`.
        seconds: u32,
    },
    /// Until it is evicted.
    Never,
}

impl From<RawIdle> for IdlePolicy {
    fn from(idle: RawIdle) -> Self {
        match idle {
            RawIdle::Immediately => Self::Immediately,
            RawIdle::AfterSeconds { seconds } => Self::after_seconds(seconds),
            RawIdle::Never => Self::Never,
        }
    }
}

/// What an admission does when there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawNoRoom {
    /// Stand in line.
    Wait,
    /// Fail with `BudgetExceeded`.
    Refuse,
    /// Load over the budget.
    LoadAnyway,
}

impl From<RawNoRoom> for NoRoom {
    fn from(no_room: RawNoRoom) -> Self {
        match no_room {
            RawNoRoom::Wait => Self::Wait,
            RawNoRoom::Refuse => Self::Refuse,
            RawNoRoom::LoadAnyway => Self::LoadAnyway,
        }
    }
}

/// What a model is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawModelKind {
    /// Generates text.
    Chat,
    /// Turns texts into vectors.
    Embedder,
    /// Scores documents against a query.
    Reranker,
}

impl From<RawModelKind> for ModelKind {
    fn from(kind: RawModelKind) -> Self {
        match kind {
            RawModelKind::Chat => Self::Chat,
            RawModelKind::Embedder => Self::Embedder,
            RawModelKind::Reranker => Self::Reranker,
        }
    }
}

/// A number type to compute in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawFloat {
    /// 32-bit IEEE.
    Float32,
    /// 16-bit IEEE.
    Float16,
    /// 16-bit brain floating point.
    Bfloat16,
}

/// How token states become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawPooling {
    /// The first token's state.
    Cls,
    /// The largest value per dimension.
    Max,
    /// The mean.
    Mean,
    /// The last token's state.
    LastToken,
}

/// What to do with a text that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawTruncate {
    /// Refuse it.
    Error,
    /// Cut its end.
    End,
    /// Cut its start.
    Start,
}

impl From<RawTruncate> for Truncate {
    fn from(truncate: RawTruncate) -> Self {
        match truncate {
            RawTruncate::Error => Self::Error,
            RawTruncate::End => Self::End,
            RawTruncate::Start => Self::Start,
        }
    }
}

/// The name of an entry.
#[derive(Debug, Clone, PartialEq, Eq, uniffi::Record)]
pub struct RawKey {
    /// `chat`, `embedder`, `reranker` or a word of the host's.
    pub kind: String,
    /// The name within the kind.
    pub id: String,
}

impl From<&Key> for RawKey {
    fn from(key: &Key) -> Self {
        Self { kind: key.kind().as_str().to_owned(), id: key.id().to_owned() }
    }
}

impl From<RawKey> for Key {
    fn from(key: RawKey) -> Self {
        Self::new(Kind::from_name(&key.kind), key.id)
    }
}

/// How a model is loaded if it is not resident.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawLoadOptions {
    /// What it is used as; nothing asks its files.
    pub kind: Option<RawModelKind>,
    /// What to compute in.
    pub float: Option<RawFloat>,
    /// Expand quantised weights.
    pub dequantize: Option<bool>,
    /// How an embedder pools.
    pub pooling: Option<RawPooling>,
    /// What the files must be, as JSON.
    pub manifest_json: Option<String>,
}

impl RawLoadOptions {
    pub(crate) fn core(self) -> hob::Result<LoadOptions> {
        Ok(LoadOptions {
            kind: self.kind.map(Into::into),
            float: self.float.map(|float| match float {
                RawFloat::Float32 => FloatType::Float32,
                RawFloat::Float16 => FloatType::Float16,
                RawFloat::Bfloat16 => FloatType::BFloat16,
            }),
            dequantize: self.dequantize,
            pooling: self.pooling.map(|pooling| match pooling {
                RawPooling::Cls => PoolingMode::Cls,
                RawPooling::Max => PoolingMode::Max,
                RawPooling::Mean => PoolingMode::Mean,
                RawPooling::LastToken => PoolingMode::LastToken,
            }),
            manifest: self.manifest_json.as_deref().map(Manifest::from_json).transpose()?.map(Arc::new),
        })
    }
}

/// What every request may bring.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawRequestOptions {
    /// Gives up when cancelled.
    pub cancel: Option<Arc<RawCancelToken>>,
    /// Gives up after so many seconds.
    pub timeout_s: Option<f64>,
    /// A cancel or a timeout of a generation ends it with what there is.
    pub stop_on_cancel: bool,
    /// How the model is loaded.
    pub load: RawLoadOptions,
    /// How long the model stays after this use.
    pub idle: Option<RawIdle>,
    /// The model's own policy from now on.
    pub model_idle: Option<RawIdle>,
    /// Keep the model whatever happens.
    pub pinned: bool,
}

impl RawRequestOptions {
    pub(crate) fn core(self) -> hob::Result<RequestOptions> {
        Ok(RequestOptions {
            cancel: self.cancel.as_ref().map(|cancel| cancel.token.clone()),
            timeout: self.timeout_s.map(|seconds| seconds_of("the timeout", seconds)).transpose()?,
            on_cancel: if self.stop_on_cancel { OnCancel::Stop } else { OnCancel::Abort },
            load: self.load.core()?,
            idle: self.idle.map(Into::into),
            model_idle: self.model_idle.map(Into::into),
            pinned: self.pinned,
        })
    }
}

/// What a computation took. Times are seconds; nothing means that it did not happen.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawUsage {
    /// Tokens of the input.
    pub prompt_tokens: u64,
    /// Tokens cut off.
    pub dropped_tokens: u64,
    /// Waiting.
    pub queue_s: f64,
    /// The model's load.
    pub load_s: Option<f64>,
    /// The input's computation.
    pub prefill_s: Option<f64>,
    /// From the first new token to the last.
    pub decode_s: Option<f64>,
    /// All of it.
    pub total_s: f64,
}

impl RawUsage {
    pub(crate) fn new(prompt: usize, dropped: usize, timings: &Timings) -> Self {
        Self {
            prompt_tokens: prompt as u64,
            dropped_tokens: dropped as u64,
            queue_s: timings.queue_s,
            load_s: timings.load_s,
            prefill_s: timings.prefill_s,
            decode_s: timings.decode_s,
            total_s: timings.total_s,
        }
    }
}

/// A time that a host gave; more than the clock can say counts as the most it can.
pub(crate) fn seconds_of(what: &str, seconds: f64) -> hob::Result<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(invalid(format!("{what} is {seconds} s; it must be 0 or more")));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

pub(crate) fn size(what: &str, value: u64) -> hob::Result<usize> {
    usize::try_from(value).map_err(|_| invalid(format!("{what} is {value}; that is too much here")))
}
