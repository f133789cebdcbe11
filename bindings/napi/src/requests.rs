//! What calls bring, read from JavaScript and made into the core's requests.
//!
//! Numbers come as JavaScript's and are checked here: Node-API itself would make 0 of NaN and wrap what is too large.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;

use hob::chat_template::{Message, RenderOptions};
use hob::engine::{
    Coalesce, DecideRequest, Decision, EmbedRequest, EngineOptions, GenerateRequest, Normalize, OnCancel, Prompt, RequestOptions,
    RerankRequest, ScoreRequest,
};
use hob::model::{FloatType, LoadOptions, Manifest, ModelKind, PoolingMode};
use hob::options::{Limits, SamplingOptions, Truncate};
use hob::{CancelToken, IdlePolicy, NoRoom, Result};
use napi::bindgen_prelude::Either;
use napi_derive::napi;

use crate::error::{duration, invalid, size, small, whole};

/// How long something stays when it is idle: seconds, `immediately` or `never`.
pub(crate) type Idle = Either<f64, String>;

/// How an engine is made.
#[napi(object, object_to_js = false)]
pub struct NativeEngineOptions {
    pub budget_bytes: Option<f64>,
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub idle: Option<Idle>,
    #[napi(ts_type = "'wait' | 'refuse' | 'loadAnyway'")]
    pub no_room: Option<String>,
    pub capacity: Option<f64>,
    pub queue: Option<f64>,
    pub prompt_cache_bytes: Option<f64>,
    pub stuck_after_ms: Option<f64>,
    pub close_timeout_ms: Option<f64>,
    pub drain_after_release: Option<bool>,
    /// The core's limits, as JSON.
    pub limits: Option<String>,
}

impl NativeEngineOptions {
    pub(crate) fn read(self) -> Result<EngineOptions> {
        let mut options = EngineOptions::default();
        options.budget_bytes = self.budget_bytes.map(|bytes| whole("budgetBytes", bytes)).transpose()?;
        if let Some(idle) = self.idle {
            options.idle = read_idle("idle", &idle)?;
        }
        if let Some(policy) = self.no_room {
            options.no_room = read_no_room(&policy)?;
        }
        if let Some(capacity) = self.capacity {
            options.capacity = size("capacity", capacity)?;
        }
        if let Some(queue) = self.queue {
            options.queue = size("queue", queue)?;
        }
        if let Some(bytes) = self.prompt_cache_bytes {
            options.prompt_cache_bytes = whole("promptCacheBytes", bytes)?;
        }
        if let Some(ms) = self.stuck_after_ms {
            options.stuck_after = duration("stuckAfterMs", ms)?;
        }
        if let Some(ms) = self.close_timeout_ms {
            options.close_timeout = duration("closeTimeoutMs", ms)?;
        }
        if let Some(drain) = self.drain_after_release {
            options.drain_after_release = drain;
        }
        if let Some(limits) = self.limits {
            options.limits = serde_json::from_str::<Limits>(&limits).map_err(|error| invalid(format!("limits: {error}")))?;
        }
        Ok(options)
    }
}

/// What every request may bring.
#[napi(object, object_to_js = false)]
#[derive(Default)]
pub struct NativeRequest {
    pub timeout_ms: Option<f64>,
    #[napi(ts_type = "'abort' | 'stop'")]
    pub on_cancel: Option<String>,
    #[napi(ts_type = "'chat' | 'embedder' | 'reranker'")]
    pub kind: Option<String>,
    #[napi(ts_type = "'float32' | 'float16' | 'bfloat16'")]
    pub float: Option<String>,
    pub dequantize: Option<bool>,
    #[napi(ts_type = "'cls' | 'max' | 'mean' | 'lastToken'")]
    pub pooling: Option<String>,
    /// The manifest, as JSON.
    pub manifest: Option<String>,
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub idle: Option<Idle>,
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub model_idle: Option<Idle>,
    pub pinned: Option<bool>,
}

impl NativeRequest {
    pub(crate) fn load_options(&self) -> Result<LoadOptions> {
        Ok(LoadOptions {
            kind: self.kind.as_deref().map(read_kind).transpose()?,
            float: match self.float.as_deref() {
                None => None,
                Some("float32") => Some(FloatType::Float32),
                Some("float16") => Some(FloatType::Float16),
                Some("bfloat16") => Some(FloatType::BFloat16),
                Some(_) => return Err(none_of("float", "float32, float16, bfloat16")),
            },
            dequantize: self.dequantize,
            pooling: match self.pooling.as_deref() {
                None => None,
                Some("cls") => Some(PoolingMode::Cls),
                Some("max") => Some(PoolingMode::Max),
                Some("mean") => Some(PoolingMode::Mean),
                Some("lastToken") => Some(PoolingMode::LastToken),
                Some(_) => return Err(none_of("pooling", "cls, max, mean, lastToken")),
            },
            manifest: self.manifest.as_deref().map(Manifest::from_json).transpose()?.map(Arc::new),
        })
    }

    /// The core's options; `cancel` is the token made for the request.
    pub(crate) fn read(self, cancel: CancelToken) -> Result<RequestOptions> {
        let load = self.load_options()?;
        Ok(RequestOptions {
            cancel: Some(cancel),
            timeout: self.timeout_ms.map(|ms| duration("timeoutMs", ms)).transpose()?,
            on_cancel: match self.on_cancel.as_deref() {
                None | Some("abort") => OnCancel::Abort,
                Some("stop") => OnCancel::Stop,
                Some(_) => return Err(none_of("onCancel", "abort, stop")),
            },
            load,
            idle: self.idle.as_ref().map(|idle| read_idle("idle", idle)).transpose()?,
            model_idle: self.model_idle.as_ref().map(|idle| read_idle("modelIdle", idle)).transpose()?,
            pinned: self.pinned.unwrap_or(false),
        })
    }
}

/// What a model continues: exactly one of the three.
#[napi(object, object_to_js = false)]
pub struct NativePrompt {
    /// A conversation, as JSON.
    pub messages: Option<String>,
    pub text: Option<String>,
    pub tokens: Option<Vec<f64>>,
    /// How a conversation is rendered, as JSON.
    pub render: Option<String>,
}

impl NativePrompt {
    fn read(self) -> Result<(Prompt, RenderOptions)> {
        let prompt = match (self.messages, self.text, self.tokens) {
            (Some(messages), None, None) => Prompt::Chat(Message::list_from_json(&messages)?),
            (None, Some(text), None) => Prompt::Raw(text),
            (None, None, Some(tokens)) => {
                Prompt::Tokens(tokens.into_iter().map(|token| small("a prompt token", token)).collect::<Result<_>>()?)
            }
            _ => return Err(invalid("give exactly one of messages, prompt and promptTokens")),
        };
        let render = match self.render {
            None => RenderOptions::default(),
            // The parser's own words would repeat names out of the text.
            Some(json) => serde_json::from_str(&json)
                .map_err(|_| invalid("tools, documents, enableThinking or templateVariables are not of the right type"))?,
        };
        Ok((prompt, render))
    }
}

/// A request to generate.
#[napi(object, object_to_js = false)]
pub struct NativeGenerate {
    pub model: String,
    pub prompt: NativePrompt,
    pub max_tokens: Option<f64>,
    pub stop: Option<Vec<String>>,
    pub temperature: Option<f64>,
    pub top_k: Option<f64>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub repetition_window: Option<f64>,
    pub seed: Option<f64>,
    pub logprobs: Option<f64>,
    #[napi(ts_type = "'error' | 'end' | 'start'")]
    pub truncate: Option<String>,
    pub coalesce_tokens: Option<f64>,
    pub coalesce_ms: Option<f64>,
    pub prompt_cache: Option<bool>,
    pub request: Option<NativeRequest>,
}

impl NativeGenerate {
    pub(crate) fn read(self, cancel: CancelToken) -> Result<GenerateRequest> {
        let (prompt, render) = self.prompt.read()?;
        let mut wanted = GenerateRequest::new(self.model, prompt);
        wanted.render = render;
        let default = SamplingOptions::default();
        #[allow(clippy::cast_possible_truncation)] // the core takes float32
        let float = |value: Option<f64>, default: f32| value.map_or(default, |value| value as f32);
        wanted.sampling = SamplingOptions {
            temperature: float(self.temperature, default.temperature),
            top_k: self.top_k.map_or(Ok(default.top_k), |value| small("topK", value))?,
            top_p: float(self.top_p, default.top_p),
            min_p: float(self.min_p, default.min_p),
            repetition_penalty: float(self.repetition_penalty, default.repetition_penalty),
            repetition_window: self
                .repetition_window
                .map_or(Ok(default.repetition_window), |value| small("repetitionWindow", value))?,
            seed: self.seed.map(|seed| whole("seed", seed)).transpose()?,
        };
        if wanted.sampling.seed.is_none() && !wanted.sampling.is_greedy() {
            wanted.sampling.seed = Some(draw_seed());
        }
        wanted.max_tokens = self.max_tokens.map(|tokens| size("maxTokens", tokens)).transpose()?;
        wanted.stop = self.stop.unwrap_or_default();
        wanted.logprobs = self.logprobs.map(|count| size("logprobs", count)).transpose()?;
        wanted.truncate = read_truncate(self.truncate.as_deref())?;
        wanted.coalesce = Coalesce {
            tokens: self.coalesce_tokens.map_or(Ok(0), |tokens| size("coalesceTokens", tokens))?,
            interval: self.coalesce_ms.map_or(Ok(Duration::ZERO), |ms| duration("coalesceMs", ms))?,
        };
        wanted.prompt_cache = self.prompt_cache.unwrap_or(true);
        wanted.options = self.request.unwrap_or_default().read(cancel)?;
        Ok(wanted)
    }
}

/// A seed that JavaScript's numbers can say exactly, so that what a summary reports can be given again.
fn draw_seed() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish() >> 11
}

/// What a request to embed may bring besides its model and texts. Absent when it brings none of it: reading an object's fields is most
/// of what a short call costs.
#[napi(object, object_to_js = false)]
pub struct NativeEmbed {
    pub prompt_name: Option<String>,
    pub dimensions: Option<f64>,
    pub normalize: Option<bool>,
    #[napi(ts_type = "'error' | 'end'")]
    pub truncate: Option<String>,
    pub request: Option<NativeRequest>,
}

impl NativeEmbed {
    pub(crate) fn read(
        options: Option<Self>,
        model: String,
        texts: Either<String, Vec<String>>,
        cancel: CancelToken,
    ) -> Result<EmbedRequest> {
        let mut wanted = match texts {
            Either::A(text) => EmbedRequest::new(model, [text]),
            Either::B(texts) => EmbedRequest::new(model, texts),
        };
        let Some(options) = options else {
            wanted.options.cancel = Some(cancel);
            return Ok(wanted);
        };
        wanted.prompt_name = options.prompt_name;
        wanted.dimensions = options.dimensions.map(|dimensions| size("dimensions", dimensions)).transpose()?;
        wanted.normalize = match options.normalize {
            None => Normalize::Auto,
            Some(true) => Normalize::Yes,
            Some(false) => Normalize::No,
        };
        wanted.truncate = read_truncate(options.truncate.as_deref())?;
        wanted.options = options.request.unwrap_or_default().read(cancel)?;
        Ok(wanted)
    }
}

/// A request to rerank.
#[napi(object, object_to_js = false)]
pub struct NativeRerank {
    pub model: String,
    pub query: String,
    pub documents: Vec<String>,
    pub instruct: Option<String>,
    pub top_n: Option<f64>,
    pub unsorted: Option<bool>,
    #[napi(ts_type = "'error' | 'end'")]
    pub truncate: Option<String>,
    pub request: Option<NativeRequest>,
}

impl NativeRerank {
    pub(crate) fn read(self, cancel: CancelToken) -> Result<RerankRequest> {
        let mut wanted = RerankRequest::new(self.model, self.query, self.documents);
        wanted.instruct = self.instruct;
        wanted.top_n = self.top_n.map(|top| size("topN", top)).transpose()?;
        wanted.unsorted = self.unsorted.unwrap_or(false);
        wanted.truncate = read_truncate(self.truncate.as_deref())?;
        wanted.options = self.request.unwrap_or_default().read(cancel)?;
        Ok(wanted)
    }
}

/// A request to score a completion.
#[napi(object, object_to_js = false)]
pub struct NativeScoreRequest {
    pub model: String,
    pub prompt: NativePrompt,
    pub completion: String,
    pub request: Option<NativeRequest>,
}

impl NativeScoreRequest {
    pub(crate) fn read(self, cancel: CancelToken) -> Result<ScoreRequest> {
        let (prompt, _) = self.prompt.read()?;
        let mut wanted = ScoreRequest::new(self.model, prompt, self.completion);
        wanted.options = self.request.unwrap_or_default().read(cancel)?;
        Ok(wanted)
    }
}

/// A request to decide.
#[napi(object, object_to_js = false)]
pub struct NativeDecide {
    pub model: String,
    pub prompt: NativePrompt,
    pub answers: Vec<String>,
    #[napi(ts_type = "'choice' | 'score' | 'predicate'")]
    pub decision: Option<String>,
    pub request: Option<NativeRequest>,
}

impl NativeDecide {
    pub(crate) fn read(self, cancel: CancelToken) -> Result<DecideRequest> {
        let (prompt, render) = self.prompt.read()?;
        Ok(DecideRequest {
            model: self.model,
            prompt,
            render,
            answers: self.answers,
            decision: match self.decision.as_deref() {
                None | Some("choice") => Decision::Choice,
                Some("score") => Decision::Score,
                Some("predicate") => Decision::Predicate,
                Some(_) => return Err(none_of("decision", "choice, score, predicate")),
            },
            options: self.request.unwrap_or_default().read(cancel)?,
        })
    }
}

fn read_kind(kind: &str) -> Result<ModelKind> {
    match kind {
        "chat" => Ok(ModelKind::Chat),
        "embedder" => Ok(ModelKind::Embedder),
        "reranker" => Ok(ModelKind::Reranker),
        _ => Err(none_of("kind", "chat, embedder, reranker")),
    }
}

pub(crate) fn kind_of(kind: &str) -> Result<ModelKind> {
    read_kind(kind)
}

pub(crate) fn read_idle(name: &str, idle: &Idle) -> Result<IdlePolicy> {
    match idle {
        // The policy clamps seconds by itself; it must only be a number of them.
        Either::A(seconds) if *seconds >= 0.0 => {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // within 0 and u32::MAX by then
            let seconds = seconds.min(f64::from(u32::MAX)).ceil() as u32;
            Ok(IdlePolicy::after_seconds(seconds))
        }
        Either::B(word) if word == "immediately" => Ok(IdlePolicy::Immediately),
        Either::B(word) if word == "never" => Ok(IdlePolicy::Never),
        _ => Err(invalid(format!("{name} must be a number of seconds, 'immediately' or 'never'"))),
    }
}

pub(crate) fn read_no_room(policy: &str) -> Result<NoRoom> {
    match policy {
        "wait" => Ok(NoRoom::Wait),
        "refuse" => Ok(NoRoom::Refuse),
        "loadAnyway" => Ok(NoRoom::LoadAnyway),
        _ => Err(none_of("noRoom", "wait, refuse, loadAnyway")),
    }
}

fn read_truncate(value: Option<&str>) -> Result<Truncate> {
    match value {
        None | Some("error") => Ok(Truncate::Error),
        Some("end") => Ok(Truncate::End),
        Some("start") => Ok(Truncate::Start),
        Some(_) => Err(none_of("truncate", "error, end, start")),
    }
}

fn none_of(name: &str, values: &str) -> hob::Error {
    invalid(format!("{name} is none of: {values}"))
}
