//! What calls give back, as JavaScript sees it. Times are milliseconds, sizes bytes, and numbers exact up to 2^53.

use hob::engine::{Decided, Embeddings, Event, Finish, ModelInfo, Ranking, Score, ScoreKind, Summary, Timings};
use hob::model::{Estimate, FloatType, Provenance};
use hob::pool::{
    Counters, EntryState, EntryStatus, ErrorKindName, Evicted, IdlePolicy, MemoryReading, Origin, Plan, PoolEvent, Received,
    Reclaimed, Status, UnloadReason, Verdict,
};
use napi::bindgen_prelude::{Either, Float32Array, ToNapiValue, Uint32Array, sys};
use napi_derive::napi;

use crate::engine::NativeEngine;
use crate::error::{NativeFailure, count, number};
use crate::pool::{NativeLease, NativePause};

/// A letter of the mailbox.
#[napi(object, object_from_js = false)]
pub struct NativeLetter {
    /// What it is about.
    #[napi(ts_type = "'settled' | 'progress' | 'ready' | 'estimate' | 'load' | 'release' | 'abort' | 'forget'")]
    pub kind: &'static str,
    /// Whose: a call's, a stream's, a subscription's or an admission's number.
    pub id: f64,
    /// How a call ended.
    #[napi(ts_type = "unknown")]
    pub value: Option<Value>,
    /// Why a call failed.
    pub error: Option<NativeFailure>,
    /// Which run of a host's function.
    pub call: Option<f64>,
    /// The admission's token.
    pub token: Option<f64>,
    /// How far a load is.
    pub fraction: Option<f64>,
}

/// What a call ends with; JavaScript sees what is inside.
#[allow(missing_docs)] // each names its content
pub enum Value {
    Nothing,
    Bool(bool),
    Strings(Vec<&'static str>),
    Engine(Box<NativeEngine>),
    Model(Box<NativeModelInfo>),
    Estimate(NativeEstimate),
    Embeddings(NativeEmbeddings),
    Ranking(NativeRanking),
    Decision(NativeDecision),
    Score(NativeScore),
    Admitted(NativeAdmitted),
    Evicted(NativeEvicted),
    Reclaimed(NativeReclaimed),
    Pause(NativePause),
}

impl ToNapiValue for Value {
    unsafe fn to_napi_value(env: sys::napi_env, value: Self) -> napi::Result<sys::napi_value> {
        // SAFETY: as the caller promises: `env` is alive and this is its thread.
        unsafe {
            match value {
                Self::Nothing => ToNapiValue::to_napi_value(env, ()),
                Self::Bool(value) => ToNapiValue::to_napi_value(env, value),
                Self::Strings(value) => ToNapiValue::to_napi_value(env, value),
                Self::Engine(value) => ToNapiValue::to_napi_value(env, *value),
                Self::Model(value) => ToNapiValue::to_napi_value(env, *value),
                Self::Estimate(value) => ToNapiValue::to_napi_value(env, value),
                Self::Embeddings(value) => ToNapiValue::to_napi_value(env, value),
                Self::Ranking(value) => ToNapiValue::to_napi_value(env, value),
                Self::Decision(value) => ToNapiValue::to_napi_value(env, value),
                Self::Score(value) => ToNapiValue::to_napi_value(env, value),
                Self::Admitted(value) => ToNapiValue::to_napi_value(env, value),
                Self::Evicted(value) => ToNapiValue::to_napi_value(env, value),
                Self::Reclaimed(value) => ToNapiValue::to_napi_value(env, value),
                Self::Pause(value) => ToNapiValue::to_napi_value(env, value),
            }
        }
    }
}

/// Milliseconds spent in each phase; what did not happen is left out.
#[napi(object, object_from_js = false)]
pub struct NativeTimings {
    /// From the call until work on the device began, without the load.
    pub queue_ms: f64,
    /// The model's load, when this request caused or joined one.
    pub load_ms: Option<f64>,
    /// From the first prompt token to the first new token; all computation of embed and rerank.
    pub prefill_ms: Option<f64>,
    /// From the first new token to the last.
    pub decode_ms: Option<f64>,
    /// From the call to the end.
    pub total_ms: f64,
}

impl From<&Timings> for NativeTimings {
    fn from(timings: &Timings) -> Self {
        let ms = |seconds: f64| seconds * 1000.0;
        Self {
            queue_ms: ms(timings.queue_s),
            load_ms: timings.load_s.map(ms),
            prefill_ms: timings.prefill_s.map(ms),
            decode_ms: timings.decode_s.map(ms),
            total_ms: ms(timings.total_s),
        }
    }
}

/// Where a result comes from.
#[napi(object, object_from_js = false)]
pub struct NativeProvenance {
    /// The model's canonical path.
    pub model: String,
    /// `model_type` of its configuration.
    pub family: String,
    /// The stored quantisation, if any.
    pub quantization: Option<String>,
    /// The digest of the manifest that the files were checked against, if they were.
    pub manifest: Option<String>,
    /// Hob's version, the device's kind and its runtime's version.
    pub runtime: String,
}

impl From<&Provenance> for NativeProvenance {
    fn from(provenance: &Provenance) -> Self {
        let Provenance { model, family, quantization, manifest, runtime } = provenance.clone();
        Self { model, family, quantization, manifest, runtime }
    }
}

/// What a model will take, in bytes, before it is loaded.
#[napi(object, object_from_js = false)]
pub struct NativeEstimate {
    /// The weights as they will lie in memory.
    pub weights: f64,
    /// Keys and values of one conversation of min(8192, context) tokens.
    pub kv_cache: f64,
    /// Temporaries of the largest step.
    pub working: f64,
    /// The sum: what the pool charges.
    pub total: f64,
}

impl From<&Estimate> for NativeEstimate {
    fn from(estimate: &Estimate) -> Self {
        Self {
            weights: number(estimate.weights),
            kv_cache: number(estimate.kv_cache),
            working: number(estimate.working),
            total: number(estimate.total()),
        }
    }
}

/// What a model's files say.
#[napi(object, object_from_js = false)]
pub struct NativeModelInfo {
    /// The canonical path.
    pub id: String,
    /// What it is for.
    #[napi(ts_type = "'chat' | 'embedder' | 'reranker'")]
    pub kind: &'static str,
    /// `model_type` of its configuration.
    pub family: String,
    /// The stored quantisation, if any.
    pub quantization: Option<String>,
    /// Whether quantised weights will be expanded when loaded here.
    pub dequantized: bool,
    /// The number type it will compute in here.
    #[napi(ts_type = "'float32' | 'float16' | 'bfloat16'")]
    pub float: Option<&'static str>,
    /// Tokens it can attend to.
    pub context: f64,
    /// Tokens one input of an embedder or reranker may have.
    pub max_input: f64,
    /// The verbs it serves: `generate`, `score`, `decide`, `embed`, `rerank`.
    pub capabilities: Vec<&'static str>,
    /// How an embedder pools.
    pub pooling: Option<String>,
    /// Names of an embedder's prompts.
    pub prompts: Vec<String>,
    /// Bytes by part.
    pub estimate: NativeEstimate,
}

impl From<ModelInfo> for NativeModelInfo {
    fn from(info: ModelInfo) -> Self {
        Self {
            estimate: NativeEstimate::from(&info.estimate),
            id: info.id,
            kind: info.kind.name(),
            family: info.family,
            quantization: info.quantization,
            dequantized: info.dequantized,
            float: info.float.map(|float| match float {
                FloatType::Float32 => "float32",
                FloatType::Float16 => "float16",
                FloatType::BFloat16 => "bfloat16",
            }),
            context: count(info.context),
            max_input: count(info.max_input),
            capabilities: info.capabilities,
            pooling: info.pooling,
            prompts: info.prompts,
        }
    }
}

/// The device that computes.
#[napi(object, object_from_js = false)]
pub struct NativeDevice {
    /// `cpu`, `gpu` (Metal or CUDA) or `fake`.
    pub kind: &'static str,
    /// The device's own name, where it says one.
    pub name: String,
    /// MLX's version.
    pub version: String,
    /// Bytes that the device recommends to stay within, when it says.
    pub recommended_bytes: Option<f64>,
}

/// Vectors, in the order of the texts.
#[napi(object, object_from_js = false)]
pub struct NativeEmbeddings {
    /// All rows after one another.
    pub data: Float32Array,
    /// Numbers per row.
    pub dimensions: f64,
    /// How token states were pooled.
    pub pooling: String,
    /// Tokens computed, special ones included.
    pub prompt_tokens: f64,
    /// Tokens cut off, with truncation.
    pub dropped_tokens: f64,
    /// Time by phase.
    pub timings: NativeTimings,
    /// Which model computed it.
    pub provenance: NativeProvenance,
}

impl From<Embeddings> for NativeEmbeddings {
    fn from(vectors: Embeddings) -> Self {
        Self {
            data: Float32Array::from(vectors.data),
            dimensions: count(vectors.dimensions),
            pooling: vectors.pooling,
            prompt_tokens: count(vectors.prompt_tokens),
            dropped_tokens: count(vectors.dropped_tokens),
            timings: NativeTimings::from(&vectors.timings),
            provenance: NativeProvenance::from(&*vectors.provenance),
        }
    }
}

/// One document's place.
#[napi(object, object_from_js = false)]
pub struct NativeRanked {
    /// Which document.
    pub index: f64,
    /// The classifier's raw output; absent for a cosine.
    pub logit: Option<f64>,
    /// Higher is better.
    pub score: f64,
}

/// Documents by score.
#[napi(object, object_from_js = false)]
pub struct NativeRanking {
    /// Best first, ties by index, unless the request asked for the input's order.
    pub results: Vec<NativeRanked>,
    /// What the scores mean: a probability, 0 to 1, or a cosine, -1 to 1 (an approximation by an embedder).
    #[napi(ts_type = "'normalized' | 'cosine'")]
    pub score_kind: &'static str,
    /// Tokens computed.
    pub prompt_tokens: f64,
    /// Tokens cut off, with truncation.
    pub dropped_tokens: f64,
    /// Time by phase.
    pub timings: NativeTimings,
    /// Which model computed it.
    pub provenance: NativeProvenance,
}

impl From<Ranking> for NativeRanking {
    fn from(ranking: Ranking) -> Self {
        let results = ranking.results.iter().map(|ranked| NativeRanked {
            index: count(ranked.index),
            logit: ranked.logit.map(f64::from),
            score: f64::from(ranked.score),
        });
        Self {
            results: results.collect(),
            score_kind: match ranking.score_kind {
                ScoreKind::Normalized => "normalized",
                ScoreKind::Cosine => "cosine",
            },
            prompt_tokens: count(ranking.prompt_tokens),
            dropped_tokens: count(ranking.dropped_tokens),
            timings: NativeTimings::from(&ranking.timings),
            provenance: NativeProvenance::from(&*ranking.provenance),
        }
    }
}

/// One answer's likelihood.
#[napi(object, object_from_js = false)]
pub struct NativeAnswer {
    /// Which answer.
    pub index: f64,
    /// The mean of its tokens' log-probabilities, what ends the turn included.
    pub mean_logprob: f64,
    /// Its probability among the answers given.
    pub p: f64,
}

/// Answers by likelihood.
#[napi(object, object_from_js = false)]
pub struct NativeDecision {
    /// In the order of the request.
    pub answers: Vec<NativeAnswer>,
    /// 0 to 1; absent for a predicate.
    pub confidence: Option<f64>,
    /// The expected level, for levels of one thing.
    pub value: Option<f64>,
    /// Tokens computed.
    pub prompt_tokens: f64,
    /// Time by phase.
    pub timings: NativeTimings,
    /// Which model answered.
    pub provenance: NativeProvenance,
}

impl From<Decided> for NativeDecision {
    fn from(decided: Decided) -> Self {
        let answer = |answer: &hob::engine::Answer| NativeAnswer {
            index: count(answer.index),
            mean_logprob: answer.mean_logprob,
            p: answer.p,
        };
        Self {
            answers: decided.answers.iter().map(answer).collect(),
            confidence: decided.confidence,
            value: decided.value,
            prompt_tokens: count(decided.prompt_tokens),
            timings: NativeTimings::from(&decided.timings),
            provenance: NativeProvenance::from(&*decided.provenance),
        }
    }
}

/// Log-probabilities of a completion's tokens.
#[napi(object, object_from_js = false)]
pub struct NativeScore {
    /// The completion's token ids.
    pub tokens: Uint32Array,
    /// The natural logarithm of each token's probability, given all before it.
    pub logprobs: Float32Array,
    /// Minus the mean of `logprobs`.
    pub mean_nll: f64,
}

impl From<Score> for NativeScore {
    fn from(score: Score) -> Self {
        Self { tokens: Uint32Array::from(score.tokens), logprobs: Float32Array::from(score.logprobs), mean_nll: score.mean_nll }
    }
}

/// A token's log-probability and the likeliest ones.
#[napi(object, object_from_js = false)]
pub struct NativeTokenLogprob {
    /// The natural logarithm of the chosen token's probability, by the model itself.
    pub logprob: f64,
    /// The likeliest tokens, as `[id, logprob]`, likeliest first.
    #[napi(ts_type = "Array<[number, number]>")]
    pub top: Vec<Vec<f64>>,
}

/// A call of a tool.
#[napi(object, object_from_js = false)]
pub struct NativeToolCall {
    /// Which call this is.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments: the text of a JSON object.
    pub arguments: String,
}

/// What began as a call of a tool and is none.
#[napi(object, object_from_js = false)]
pub struct NativeRejectedCall {
    /// The model's text, marks included.
    pub raw: String,
    /// What is wrong with it.
    pub reason: String,
}

/// The end of an answer.
#[napi(object, object_from_js = false)]
pub struct NativeSummary {
    /// Why it ended: the model's turn or a stop string; `maxTokens`; the context is full; stopped by the caller, who wanted what
    /// there is; the time was up.
    #[napi(ts_type = "'stop' | 'length' | 'context' | 'cancelled' | 'timeout'")]
    pub finish: &'static str,
    /// Which stop string was found.
    pub stop_index: Option<f64>,
    /// Tokens of the prompt as the model saw it.
    pub prompt_tokens: f64,
    /// Tokens of the prompt that were cut off.
    pub dropped_tokens: f64,
    /// Prompt tokens that did not have to be computed.
    pub cached_tokens: f64,
    /// New tokens, without the one that ends a turn.
    pub completion_tokens: f64,
    /// The seed in use, when tokens were drawn.
    pub seed: Option<f64>,
    /// Time by phase.
    pub timings: NativeTimings,
    /// Which model answered; absent when the request ended before it had one.
    pub provenance: Option<NativeProvenance>,
}

impl From<Summary> for NativeSummary {
    fn from(summary: Summary) -> Self {
        Self {
            finish: match summary.finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
                Finish::Context => "context",
                Finish::Cancelled => "cancelled",
                Finish::Timeout => "timeout",
            },
            stop_index: summary.stop_index.map(count),
            prompt_tokens: count(summary.prompt_tokens),
            dropped_tokens: count(summary.dropped_tokens),
            cached_tokens: count(summary.cached_tokens),
            completion_tokens: count(summary.completion_tokens),
            seed: summary.seed.map(number),
            timings: NativeTimings::from(&summary.timings),
            provenance: summary.provenance.map(|provenance| NativeProvenance::from(&*provenance)),
        }
    }
}

/// An event of a stream.
#[napi(object, object_from_js = false)]
pub struct NativeEvent {
    /// What it is.
    #[napi(ts_type = "'chunk' | 'toolCall' | 'rejectedCall' | 'finished'")]
    pub kind: &'static str,
    /// More of the answer.
    pub text: Option<String>,
    /// More of the reasoning.
    pub reasoning: Option<String>,
    /// The tokens that the piece comes from.
    pub token_ids: Option<Vec<u32>>,
    /// One per token, when asked for.
    pub logprobs: Option<Vec<NativeTokenLogprob>>,
    /// A call of one of the request's tools.
    pub call: Option<NativeToolCall>,
    /// A call that could not be read.
    pub rejected: Option<NativeRejectedCall>,
    /// The end.
    pub summary: Option<NativeSummary>,
}

impl From<Event> for NativeEvent {
    fn from(event: Event) -> Self {
        let empty = Self {
            kind: "",
            text: None,
            reasoning: None,
            token_ids: None,
            logprobs: None,
            call: None,
            rejected: None,
            summary: None,
        };
        match event {
            Event::Chunk(chunk) => {
                let pair = |&(id, logprob): &(u32, f32)| vec![f64::from(id), f64::from(logprob)];
                let logprobs = chunk.logprobs.iter().map(|token| NativeTokenLogprob {
                    logprob: f64::from(token.logprob),
                    top: token.top.iter().map(pair).collect(),
                });
                Self {
                    kind: "chunk",
                    logprobs: (!chunk.logprobs.is_empty()).then(|| logprobs.collect()),
                    text: Some(chunk.text),
                    reasoning: (!chunk.reasoning.is_empty()).then_some(chunk.reasoning),
                    token_ids: Some(chunk.token_ids),
                    ..empty
                }
            }
            Event::ToolCall(call) => Self {
                kind: "toolCall",
                call: Some(NativeToolCall { id: call.id, name: call.name, arguments: call.arguments }),
                ..empty
            },
            Event::RejectedCall(call) => Self {
                kind: "rejectedCall",
                rejected: Some(NativeRejectedCall { raw: call.raw, reason: call.reason.to_string() }),
                ..empty
            },
            Event::Finished(summary) => Self { kind: "finished", summary: Some(summary.into()), ..empty },
        }
    }
}

/// A successful admission.
#[napi(object, object_from_js = false)]
pub struct NativeAdmitted {
    /// The entry's number, never used twice by a pool.
    pub token: f64,
    /// The entry was resident, another's load was under way, or this admission loaded it.
    #[napi(ts_type = "'hit' | 'joined' | 'loaded'")]
    pub origin: &'static str,
    /// How long the load took, whoever ran it.
    pub load_ms: f64,
    /// The use, for an admission in use.
    pub lease: Option<NativeLease>,
}

impl From<hob::pool::Admitted> for NativeAdmitted {
    fn from(admitted: hob::pool::Admitted) -> Self {
        Self {
            token: number(admitted.token.as_u64()),
            origin: origin(admitted.origin),
            load_ms: admitted.load_time.as_secs_f64() * 1000.0,
            lease: admitted.lease.map(NativeLease::from),
        }
    }
}

fn origin(origin: Origin) -> &'static str {
    match origin {
        Origin::Hit => "hit",
        Origin::Joined => "joined",
        Origin::Loaded => "loaded",
    }
}

/// What an explicit evict did.
#[napi(object, object_from_js = false)]
pub struct NativeEvicted {
    /// The token of the entry that went; absent when another call was already unloading it, or a load was stopped.
    pub token: Option<f64>,
    /// Bytes given back; 0 while leases still hold the model.
    pub freed_bytes: f64,
}

impl From<Evicted> for NativeEvicted {
    fn from(evicted: Evicted) -> Self {
        Self { token: evicted.token.map(|token| number(token.as_u64())), freed_bytes: number(evicted.freed_bytes) }
    }
}

/// What `trim`, `makeRoom` and `sweep` did.
#[napi(object, object_from_js = false)]
pub struct NativeReclaimed {
    /// The keys that went, in order.
    pub evicted: Vec<String>,
    /// Bytes given back.
    pub freed_bytes: f64,
    /// Whether the goal was reached (for `sweep`: always).
    pub fits: bool,
    /// Releases that failed. Their entries are gone all the same.
    pub errors: Vec<NativeFailure>,
}

impl From<Reclaimed> for NativeReclaimed {
    fn from(reclaimed: Reclaimed) -> Self {
        Self {
            evicted: reclaimed.evicted.iter().map(ToString::to_string).collect(),
            freed_bytes: number(reclaimed.freed_bytes),
            fits: reclaimed.fits,
            errors: reclaimed.errors.iter().map(NativeFailure::from).collect(),
        }
    }
}

/// What an admission would do.
#[napi(object, object_from_js = false)]
pub struct NativePlan {
    /// What would happen.
    #[napi(ts_type = "'resident' | 'loading' | 'fits' | 'evicts' | 'alone' | 'waits' | 'refused'")]
    pub verdict: &'static str,
    /// Whether it could load now within the budget.
    pub fits: bool,
    /// Bytes that would be charged; 0 for a resident or loading key.
    pub required_bytes: f64,
    /// Bytes free now.
    pub free_bytes: f64,
    /// Who would go, least recently used first.
    pub evict: Vec<String>,
}

impl From<Plan> for NativePlan {
    fn from(plan: Plan) -> Self {
        Self {
            verdict: match plan.verdict {
                Verdict::Resident => "resident",
                Verdict::Loading => "loading",
                Verdict::Fits => "fits",
                Verdict::Evicts => "evicts",
                Verdict::Alone => "alone",
                Verdict::Waits => "waits",
                // And what a later core may add: not to be counted on.
                _ => "refused",
            },
            fits: plan.fits,
            required_bytes: number(plan.required_bytes),
            free_bytes: number(plan.free_bytes),
            evict: plan.evict.iter().map(ToString::to_string).collect(),
        }
    }
}

/// One entry of a pool.
#[napi(object, object_from_js = false)]
pub struct NativeEntryStatus {
    /// `kind:id`.
    pub key: String,
    /// The kind's name.
    pub kind: String,
    /// The name within the kind.
    pub id: String,
    /// The admission's number.
    pub token: f64,
    /// Where it is in its life.
    #[napi(ts_type = "'waiting' | 'loading' | 'ready' | 'draining'")]
    pub state: &'static str,
    /// Bytes on the account for it now.
    pub bytes: f64,
    /// Bytes estimated before the load; absent while that is still being found out.
    pub estimated_bytes: Option<f64>,
    /// Bytes measured after it.
    pub measured_bytes: Option<f64>,
    /// Never evicted nor swept.
    pub pinned: bool,
    /// Leases now (for a load: callers waiting for it).
    pub uses: f64,
    /// Milliseconds since its last use ended (or since its load); 0 while it is in use.
    pub idle_ms: f64,
    /// The idle policy that rules now: seconds, or a word.
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub idle: Either<f64, &'static str>,
    /// Milliseconds until it is unloaded for idleness; absent while no countdown runs.
    pub unload_in_ms: Option<f64>,
    /// How far the load is, 0 to 1.
    pub progress: Option<f64>,
    /// Loads of this key so far.
    pub loads: f64,
    /// Unloads of this key so far.
    pub unloads: f64,
    /// How long the last load took.
    pub last_load_ms: Option<f64>,
}

impl From<EntryStatus> for NativeEntryStatus {
    fn from(entry: EntryStatus) -> Self {
        Self {
            key: entry.key.to_string(),
            kind: entry.kind,
            id: entry.id,
            token: number(entry.token.as_u64()),
            state: match entry.state {
                EntryState::Waiting => "waiting",
                EntryState::Loading => "loading",
                EntryState::Ready => "ready",
                _ => "draining",
            },
            bytes: number(entry.bytes),
            estimated_bytes: entry.estimated_bytes.map(number),
            measured_bytes: entry.measured_bytes.map(number),
            pinned: entry.pinned,
            uses: number(entry.uses),
            idle_ms: number(entry.idle_ms),
            idle: match entry.idle {
                IdlePolicy::Immediately => Either::B("immediately"),
                IdlePolicy::AfterSeconds(seconds) => Either::A(f64::from(seconds)),
                IdlePolicy::Never => Either::B("never"),
            },
            unload_in_ms: entry.unload_in_ms.map(number),
            progress: entry.progress.map(f64::from),
            loads: number(entry.loads),
            unloads: number(entry.unloads),
            last_load_ms: entry.last_load_ms.map(number),
        }
    }
}

/// Counters since the pool was made.
#[napi(object, object_from_js = false)]
pub struct NativeCounters {
    /// Uses and admissions answered by a resident entry.
    pub hits: f64,
    /// Admissions that joined another's load.
    pub joins: f64,
    /// Loads that succeeded.
    pub loads: f64,
    /// Loads that failed or were cancelled.
    pub failed_loads: f64,
    /// Entries unloaded for room.
    pub evictions: f64,
    /// Entries unloaded for idleness.
    pub idle_unloads: f64,
    /// Releases that failed.
    pub failed_releases: f64,
    /// Admissions that had to stand in line.
    pub waits: f64,
    /// Admissions refused.
    pub refusals: f64,
    /// Callers who left before their answer.
    pub left: f64,
    /// Ends of a use that was not open.
    pub unbalanced_ends: f64,
}

impl From<Counters> for NativeCounters {
    fn from(counters: Counters) -> Self {
        Self {
            hits: number(counters.hits),
            joins: number(counters.joins),
            loads: number(counters.loads),
            failed_loads: number(counters.failed_loads),
            evictions: number(counters.evictions),
            idle_unloads: number(counters.idle_unloads),
            failed_releases: number(counters.failed_releases),
            waits: number(counters.waits),
            refusals: number(counters.refusals),
            left: number(counters.left),
            unbalanced_ends: number(counters.unbalanced_ends),
        }
    }
}

/// Real bytes of the process on the device.
#[napi(object, object_from_js = false)]
pub struct NativeMemory {
    /// Bytes that live arrays hold.
    pub active: f64,
    /// Bytes freed by arrays but not yet given back to the system.
    pub cache: f64,
    /// The highest `active` so far.
    pub peak: f64,
    /// Bytes that the system could still give, when it says.
    pub available: Option<f64>,
}

impl From<MemoryReading> for NativeMemory {
    fn from(memory: MemoryReading) -> Self {
        Self {
            active: number(memory.active),
            cache: number(memory.cache),
            peak: number(memory.peak),
            available: memory.available.map(number),
        }
    }
}

/// A snapshot of a pool.
#[napi(object, object_from_js = false)]
pub struct NativePoolStatus {
    /// The budget.
    pub budget_bytes: f64,
    /// Bytes that are never exceeded.
    pub physical_limit_bytes: Option<f64>,
    /// Bytes of resident entries.
    pub resident_bytes: f64,
    /// Bytes reserved by loads under way.
    pub pending_bytes: f64,
    /// Bytes of detached entries that are not back yet.
    pub releasing_bytes: f64,
    /// Bytes charged by the host.
    pub external_bytes: f64,
    /// The sum of the four.
    pub used_bytes: f64,
    /// The highest sum so far.
    pub peak_used_bytes: f64,
    /// What an admission could take without evicting anything.
    pub free_bytes: f64,
    /// Admissions standing in line.
    pub waiting: f64,
    /// Whether new loads are held back.
    pub paused: bool,
    /// Whether the pool is closed or closing.
    pub closed: bool,
    /// Every entry, sorted by key.
    pub entries: Vec<NativeEntryStatus>,
    /// Counters.
    pub counters: NativeCounters,
    /// Real memory, when the pool can measure it.
    pub memory: Option<NativeMemory>,
}

impl From<Status> for NativePoolStatus {
    fn from(status: Status) -> Self {
        Self {
            budget_bytes: number(status.budget_bytes),
            physical_limit_bytes: status.physical_limit_bytes.map(number),
            resident_bytes: number(status.resident_bytes),
            pending_bytes: number(status.pending_bytes),
            releasing_bytes: number(status.releasing_bytes),
            external_bytes: number(status.external_bytes),
            used_bytes: number(status.used_bytes),
            peak_used_bytes: number(status.peak_used_bytes),
            free_bytes: number(status.free_bytes),
            waiting: count(status.waiting),
            paused: status.paused,
            closed: status.closed,
            entries: status.entries.into_iter().map(NativeEntryStatus::from).collect(),
            counters: status.counters.into(),
            memory: status.memory.map(NativeMemory::from),
        }
    }
}

/// Something that happened in a pool; which fields are there depends on `event`.
#[napi(object, object_from_js = false)]
#[derive(Default)]
pub struct NativePoolEvent {
    /// What happened.
    pub event: &'static str,
    /// Whose.
    pub key: Option<String>,
    /// Its admission.
    pub token: Option<f64>,
    /// Bytes needed, reserved, charged or given back; the new budget.
    pub bytes: Option<f64>,
    /// Admissions before it.
    pub ahead: Option<f64>,
    /// 0 to 100.
    pub percent: Option<f64>,
    /// Milliseconds.
    pub ms: Option<f64>,
    /// Why an entry goes.
    pub reason: Option<&'static str>,
    /// The kind of an error.
    pub code: Option<&'static str>,
    /// Events that were lost because nobody read them.
    pub missed: Option<f64>,
}

impl From<Received> for NativePoolEvent {
    fn from(received: Received) -> Self {
        match received {
            Received::Event(event) => event.into(),
            Received::Missed { missed } => Self { event: "missed", missed: Some(number(missed)), ..Self::default() },
            _ => Self { event: "unknown", ..Self::default() },
        }
    }
}

impl From<PoolEvent> for NativePoolEvent {
    fn from(event: PoolEvent) -> Self {
        let code = |kind: ErrorKindName| Some(kind.0.name());
        let of = |event, key: hob::Key, token: hob::pool::Token| Self {
            event,
            key: Some(key.to_string()),
            token: Some(number(token.as_u64())),
            ..Self::default()
        };
        match event {
            PoolEvent::Waiting { key, bytes, ahead } => Self {
                event: "waiting",
                key: Some(key.to_string()),
                bytes: Some(number(bytes)),
                ahead: Some(count(ahead)),
                ..Self::default()
            },
            PoolEvent::Refused { key, bytes, kind } => Self {
                event: "refused",
                key: Some(key.to_string()),
                bytes: Some(number(bytes)),
                code: code(kind),
                ..Self::default()
            },
            PoolEvent::LoadStarted { key, token, bytes } => Self { bytes: Some(number(bytes)), ..of("loadStarted", key, token) },
            PoolEvent::LoadProgress { key, token, percent } => {
                Self { percent: Some(f64::from(percent)), ..of("loadProgress", key, token) }
            }
            PoolEvent::Loaded { key, token, bytes, ms } => {
                Self { bytes: Some(number(bytes)), ms: Some(number(ms)), ..of("loaded", key, token) }
            }
            PoolEvent::LoadFailed { key, token, kind, ms } => {
                Self { code: code(kind), ms: Some(number(ms)), ..of("loadFailed", key, token) }
            }
            PoolEvent::UnloadStarted { key, token, reason } => {
                Self { reason: Some(why(reason)), ..of("unloadStarted", key, token) }
            }
            PoolEvent::Unloaded { key, token, reason, bytes, ms } => {
                Self { reason: Some(why(reason)), bytes: Some(number(bytes)), ms: Some(number(ms)), ..of("unloaded", key, token) }
            }
            PoolEvent::ReleaseFailed { key, token, kind } => Self { code: code(kind), ..of("releaseFailed", key, token) },
            PoolEvent::BudgetChanged { bytes } => Self { event: "budgetChanged", bytes: Some(number(bytes)), ..Self::default() },
            PoolEvent::Paused => Self { event: "paused", ..Self::default() },
            PoolEvent::Resumed => Self { event: "resumed", ..Self::default() },
            PoolEvent::Closed => Self { event: "closed", ..Self::default() },
            _ => Self { event: "unknown", ..Self::default() },
        }
    }
}

fn why(reason: UnloadReason) -> &'static str {
    match reason {
        UnloadReason::Evicted => "evicted",
        UnloadReason::Idle => "idle",
        UnloadReason::Forgotten => "forgotten",
        UnloadReason::Replaced => "replaced",
        UnloadReason::Closed => "closed",
        _ => "requested",
    }
}
