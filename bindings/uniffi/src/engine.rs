//! The engine and its verbs.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use hob::engine::{
    Availability, DecideRequest, Decision, EmbedRequest, Engine, EngineOptions, Normalize, RerankRequest, ScoreKind, ScoreRequest,
};
use hob::options::Limits;
use hob::pool::{PoolEvent, Received, unblock};
use hob::{Clock, Key, Kind};

use crate::error::{Result, json, parse};
use crate::live::{Live, Type};
use crate::pool::{RawPause, RawPool};
use crate::stream::{RawGenerate, RawPrompt, RawStream};
use crate::testing::{RawFakeClock, RawFakeDevice};
use crate::tokenizer::RawTokenizer;
use crate::types::{RawIdle, RawLoadOptions, RawNoRoom, RawRequestOptions, RawTruncate, RawUsage, seconds_of, size};
use crate::wait::until;

/// How an engine is made.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawEngineOptions {
    /// The budget.
    pub budget_bytes: Option<u64>,
    /// How long models stay.
    pub idle: Option<RawIdle>,
    /// Without room.
    pub no_room: RawNoRoom,
    /// Generations of one model at once.
    pub capacity: u32,
    /// Requests that may wait beyond.
    pub queue: u32,
    /// Bytes of computed prompts kept.
    pub prompt_cache_bytes: u64,
    /// When the device counts as stuck.
    pub stuck_after_s: f64,
    /// How long a close waits.
    pub close_timeout_s: f64,
    /// The core's `Limits`.
    pub limits_json: Option<String>,
    /// Give memory back at once.
    pub drain_after_release: bool,
    /// A test's clock.
    pub clock: Option<Arc<RawFakeClock>>,
}

impl RawEngineOptions {
    fn core(self) -> hob::Result<EngineOptions> {
        let mut options = EngineOptions::default();
        options.budget_bytes = self.budget_bytes;
        options.idle = self.idle.map_or(options.idle, Into::into);
        options.no_room = self.no_room.into();
        options.capacity = size("capacity", self.capacity.into())?;
        options.queue = size("queue", self.queue.into())?;
        options.prompt_cache_bytes = self.prompt_cache_bytes;
        options.stuck_after = seconds_of("the time after which a device counts as stuck", self.stuck_after_s)?;
        options.close_timeout = seconds_of("the time that a close may take", self.close_timeout_s)?;
        options.limits = parse::<Limits>("the limits", self.limits_json.as_deref())?.unwrap_or_default();
        options.drain_after_release = self.drain_after_release;
        options.clock = self.clock.map(|clock| Arc::clone(&clock.clock) as Arc<dyn Clock>);
        Ok(options)
    }
}

/// Whether requests are served now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawAvailability {
    /// Nothing is under way.
    Ready,
    /// Requests are under way.
    Working,
    /// The device does not come back.
    Quarantined,
    /// Closed.
    Closed,
}

/// Is told how far a load is.
#[uniffi::export(callback_interface)]
pub trait RawProgress: Send + Sync {
    /// 0 to 1. Must not block.
    fn report(&self, fraction: f64);
}

/// A request to embed.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawEmbed {
    /// The model's reference.
    pub model: String,
    /// The texts.
    pub texts: Vec<String>,
    /// Which of the model's prompts.
    pub prompt_name: Option<String>,
    /// Leading dimensions to keep.
    pub dimensions: Option<u64>,
    /// Scale to unit length; nothing asks the model.
    pub normalize: Option<bool>,
    /// What happens to a text that is too long.
    pub truncate: RawTruncate,
    /// Cancel, timeout, loading.
    pub options: RawRequestOptions,
}

/// Numbers that Swift reads where they lie.
#[derive(uniffi::Object)]
pub struct RawVectors {
    data: Vec<f32>,
    _live: Live,
}

impl RawVectors {
    fn give(data: Vec<f32>) -> Arc<Self> {
        Arc::new(Self { data, _live: Live::new(Type::Vectors) })
    }
}

#[uniffi::export]
impl RawVectors {
    /// Where the first float32 lies; valid while this object lives, never changed.
    ///
    /// # Errors
    /// None, as things are.
    pub fn address(&self) -> Result<u64> {
        Ok(self.data.as_ptr() as u64)
    }

    /// How many there are.
    ///
    /// # Errors
    /// None, as things are.
    pub fn count(&self) -> Result<u64> {
        Ok(self.data.len() as u64)
    }
}

/// Vectors.
#[derive(uniffi::Record)]
pub struct RawEmbeddings {
    /// Row after row.
    pub vectors: Arc<RawVectors>,
    /// Numbers per row.
    pub dimensions: u64,
    /// How token states were pooled.
    pub pooling: String,
    /// Tokens and times.
    pub usage: RawUsage,
    /// Which model, as JSON.
    pub provenance_json: String,
}

/// A request to rerank.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawRerank {
    /// The model's reference.
    pub model: String,
    /// The query.
    pub query: String,
    /// The documents.
    pub documents: Vec<String>,
    /// An instruction.
    pub instruct: Option<String>,
    /// Keep the best so many.
    pub top_n: Option<u64>,
    /// Keep the documents' order.
    pub unsorted: bool,
    /// What happens to a pair that is too long.
    pub truncate: RawTruncate,
    /// Cancel, timeout, loading.
    pub options: RawRequestOptions,
}

/// One document's place.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawRanked {
    /// Which document.
    pub index: u64,
    /// The classifier's raw output.
    pub logit: Option<f32>,
    /// Higher is better.
    pub score: f32,
}

/// Documents by score.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawRanking {
    /// The results.
    pub results: Vec<RawRanked>,
    /// Cosines, not probabilities.
    pub is_cosine: bool,
    /// Tokens and times.
    pub usage: RawUsage,
    /// Which model, as JSON.
    pub provenance_json: String,
}

/// Log-probabilities of a completion.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawScore {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// One per token.
    pub logprobs: Vec<f32>,
    /// Minus their mean.
    pub mean_nll: f64,
}

/// How answers relate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawDecision {
    /// One of several.
    Choice,
    /// Levels of one thing.
    Score,
    /// Yes or no.
    Predicate,
}

/// One answer's likelihood.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawAnswer {
    /// The mean of its tokens' log-probabilities.
    pub mean_logprob: f64,
    /// Its probability among the answers.
    pub p: f64,
}

/// What a model decided.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawDecided {
    /// In the order given.
    pub answers: Vec<RawAnswer>,
    /// The likeliest.
    pub best: u64,
    /// 0 to 1.
    pub confidence: Option<f64>,
    /// The mean level.
    pub value: Option<f64>,
    /// Tokens and times.
    pub usage: RawUsage,
    /// Which model, as JSON.
    pub provenance_json: String,
}

/// The engine.
#[derive(uniffi::Object)]
pub struct RawEngine {
    pub(crate) engine: Engine,
    _live: Live,
}

impl RawEngine {
    fn give(engine: Engine) -> Arc<Self> {
        Arc::new(Self { engine, _live: Live::new(Type::Engine) })
    }
}

#[uniffi::export]
impl RawEngine {
    /// Opens an engine on MLX's default device.
    ///
    /// # Errors
    /// `InvalidArgument`, `Backend`, `Io`.
    #[uniffi::constructor]
    pub async fn open(options: RawEngineOptions) -> Result<Arc<Self>> {
        let options = options.core()?;
        Ok(Self::give(unblock(move || Engine::open(options)).await?))
    }

    /// Opens an engine on a scripted device.
    ///
    /// # Errors
    /// As `open`.
    #[uniffi::constructor]
    pub async fn open_fake(device: Arc<RawFakeDevice>, options: RawEngineOptions) -> Result<Arc<Self>> {
        let options = options.core()?;
        let device = device.device.clone();
        Ok(Self::give(unblock(move || Engine::open_fake(device, options)).await?))
    }

    /// The engine's pool, which keeps the engine open.
    ///
    /// # Errors
    /// None, as things are.
    pub fn pool(&self) -> Result<Arc<RawPool>> {
        Ok(RawPool::give(self.engine.pool().clone(), Some(self.engine.clone())))
    }

    /// The device, as JSON.
    ///
    /// # Errors
    /// None, as things are.
    pub fn device(&self) -> Result<String> {
        let device = self.engine.device();
        json(&serde_json::json!({
            "kind": device.kind,
            "name": device.name,
            "version": device.version,
            "recommended_bytes": device.recommended_bytes,
        }))
    }

    /// What a model's files say, as JSON; loads nothing.
    ///
    /// # Errors
    /// `NotFound`, `BadModel`, `Unsupported`, `Io`.
    pub async fn inspect(&self, model: String, options: RawLoadOptions) -> Result<String> {
        let (engine, options) = (self.engine.clone(), options.core()?);
        json(&unblock(move || engine.inspect(&model, &options)).await?)
    }

    /// Makes a model resident; what its files say, as JSON.
    ///
    /// # Errors
    /// Those of `inspect`, of the admission, and of the load.
    pub async fn load(&self, model: String, options: RawRequestOptions, progress: Option<Box<dyn RawProgress>>) -> Result<String> {
        let options = options.core()?;
        let Some(progress) = progress else { return json(&self.engine.load(&model, options).await?) };
        let (engine, reference, load) = (self.engine.clone(), model.clone(), options.load.clone());
        let info = unblock(move || engine.inspect(&reference, &load)).await?;
        let key = Key::new(Kind::from_name(info.kind.name()), info.id.as_str());
        let mut events = self.engine.pool().events(256);
        let report = |event: Received| match event {
            Received::Event(PoolEvent::LoadProgress { key: of, percent, .. }) if of == key => {
                progress.report(f64::from(percent) / 100.0);
            }
            _ => {}
        };
        let info = {
            let mut load = pin!(self.engine.load(&model, options));
            poll_fn(|context| {
                while let Poll::Ready(Some(event)) = pin!(events.next()).poll(context) {
                    report(event);
                }
                load.as_mut().poll(context)
            })
            .await?
        };
        // What was told between the last look and the end.
        while let Some(event) = events.try_next() {
            report(event);
        }
        json(&info)
    }

    /// Starts generating.
    ///
    /// # Errors
    /// `InvalidArgument`, `Busy`, `Closed`.
    pub fn generate(&self, request: RawGenerate) -> Result<Arc<RawStream>> {
        Ok(RawStream::new(self.engine.generate(request.core()?)?, self.engine.clone()))
    }

    /// Turns texts into vectors.
    ///
    /// # Errors
    /// `InvalidArgument`, `Unsupported`, and those of loading.
    pub async fn embed(&self, request: RawEmbed) -> Result<RawEmbeddings> {
        let mut core = EmbedRequest::new(request.model, request.texts);
        core.prompt_name = request.prompt_name;
        core.dimensions = request.dimensions.map(|count| size("dimensions", count)).transpose()?;
        core.normalize = match request.normalize {
            None => Normalize::default(),
            Some(true) => Normalize::Yes,
            Some(false) => Normalize::No,
        };
        core.truncate = request.truncate.into();
        core.options = request.options.core()?;
        let embeddings = self.engine.embed(core).await?;
        Ok(RawEmbeddings {
            dimensions: embeddings.dimensions as u64,
            usage: RawUsage::new(embeddings.prompt_tokens, embeddings.dropped_tokens, &embeddings.timings),
            provenance_json: json(&*embeddings.provenance)?,
            vectors: RawVectors::give(embeddings.data),
            pooling: embeddings.pooling,
        })
    }

    /// Orders documents by a query.
    ///
    /// # Errors
    /// As `embed`.
    pub async fn rerank(&self, request: RawRerank) -> Result<RawRanking> {
        let mut core = RerankRequest::new(request.model, request.query, request.documents);
        core.instruct = request.instruct;
        core.top_n = request.top_n.map(|count| size("top_n", count)).transpose()?;
        core.unsorted = request.unsorted;
        core.truncate = request.truncate.into();
        core.options = request.options.core()?;
        let ranking = self.engine.rerank(core).await?;
        let results = ranking.results.iter();
        Ok(RawRanking {
            results: results.map(|one| RawRanked { index: one.index as u64, logit: one.logit, score: one.score }).collect(),
            is_cosine: ranking.score_kind == ScoreKind::Cosine,
            usage: RawUsage::new(ranking.prompt_tokens, ranking.dropped_tokens, &ranking.timings),
            provenance_json: json(&*ranking.provenance)?,
        })
    }

    /// Log-probabilities of a given completion.
    ///
    /// # Errors
    /// `InvalidArgument`, and those of loading.
    pub async fn score(
        &self,
        model: String,
        prompt: RawPrompt,
        completion: String,
        options: RawRequestOptions,
    ) -> Result<RawScore> {
        let mut request = ScoreRequest::new(model, prompt.core()?.0, completion);
        request.options = options.core()?;
        let score = self.engine.score(request).await?;
        Ok(RawScore { tokens: score.tokens, logprobs: score.logprobs, mean_nll: score.mean_nll })
    }

    /// Which of some answers the model holds most likely.
    ///
    /// # Errors
    /// As `score`; `Unsupported` when the model does not generate.
    pub async fn decide(
        &self,
        model: String,
        prompt: RawPrompt,
        answers: Vec<String>,
        decision: RawDecision,
        options: RawRequestOptions,
    ) -> Result<RawDecided> {
        let (prompt, render) = prompt.core()?;
        let decision = match decision {
            RawDecision::Choice => Decision::Choice,
            RawDecision::Score => Decision::Score,
            RawDecision::Predicate => Decision::Predicate,
        };
        let options = options.core()?;
        let decided = self.engine.decide(DecideRequest { model, prompt, render, answers, decision, options }).await?;
        let all = decided.answers.iter();
        Ok(RawDecided {
            answers: all.map(|answer| RawAnswer { mean_logprob: answer.mean_logprob, p: answer.p }).collect(),
            best: decided.best() as u64,
            confidence: decided.confidence,
            value: decided.value,
            usage: RawUsage::new(decided.prompt_tokens, 0, &decided.timings),
            provenance_json: json(&*decided.provenance)?,
        })
    }

    /// Whether requests are served now; never waits.
    ///
    /// # Errors
    /// None, as things are.
    pub fn availability(&self) -> Result<RawAvailability> {
        Ok(match self.engine.availability() {
            Availability::Ready => RawAvailability::Ready,
            Availability::Working => RawAvailability::Working,
            Availability::Quarantined => RawAvailability::Quarantined,
            Availability::Closed => RawAvailability::Closed,
        })
    }

    /// Requests taken on and not over.
    ///
    /// # Errors
    /// None, as things are.
    pub fn requests(&self) -> Result<u64> {
        Ok(self.engine.requests() as u64)
    }

    /// A model's tokenizer and chat template; loads no weights.
    ///
    /// # Errors
    /// `NotFound`, `BadModel`, `Unsupported`, `Io`.
    pub async fn tokenizer(&self, model: String) -> Result<Arc<RawTokenizer>> {
        let engine = self.engine.clone();
        Ok(RawTokenizer::give(unblock(move || engine.text(&model)).await?))
    }

    /// Holds back new loads until the result goes.
    ///
    /// # Errors
    /// `Closed`, `Cancelled`, `Timeout`.
    pub async fn pause(&self, cancel: Option<Arc<crate::types::RawCancelToken>>) -> Result<Arc<RawPause>> {
        let paused = until(crate::wait::token(cancel.as_ref()), self.engine.pause()).await?;
        Ok(RawPause::give(paused, Some(self.engine.clone())))
    }

    /// Ends every request, unloads every model; whether everything had stopped in time.
    ///
    /// # Errors
    /// One that names every release that failed.
    pub async fn close(&self) -> Result<bool> {
        Ok(self.engine.close().await?.stopped)
    }

    /// As `close`, however long it takes. A cancel ends the waiting only.
    ///
    /// # Errors
    /// As `close`; `Cancelled`, `Timeout`.
    pub async fn close_and_wait(&self, cancel: Option<Arc<crate::types::RawCancelToken>>) -> Result<()> {
        Ok(until(crate::wait::token(cancel.as_ref()), self.engine.close_and_wait()).await?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// What the core computed is what Swift reads: nothing is copied on the way.
    #[test]
    fn vectors_are_lent_where_the_core_left_them() {
        let data = vec![1.0_f32; 1000];
        let (address, count) = (data.as_ptr() as u64, data.len() as u64);
        let vectors = RawVectors::give(data);
        assert_eq!((vectors.address().unwrap(), vectors.count().unwrap()), (address, count));
    }
}
