//! What calls give back, as JavaScript sees it. Times are milliseconds, sizes bytes, and numbers exact up to 2^53.

mod pool;

use std::ptr;
use std::sync::Arc;

use hob::engine::{Decided, Embeddings, Event, Finish, ModelInfo, Ranking, Score, ScoreKind, Summary, Timings};
use hob::model::{Estimate, FloatType, Provenance};
use napi::bindgen_prelude::{Float32Array, Float64ArraySlice, ToNapiValue, TypeName, Uint32Array, ValueType, check_status, sys};
use napi_derive::napi;
use parking_lot::Mutex;

pub(crate) use self::pool::{NativeAdmitted, NativeEvicted, NativePlan, NativePoolEvent, NativePoolStatus, NativeReclaimed};
use crate::engine::NativeEngine;
use crate::error::{NativeFailure, Refusal, count, enter, invalid, number, size};
use crate::pool::NativePause;

/// A letter of the mailbox.
#[napi(object, object_from_js = false)]
pub struct NativeLetter {
    /// What it is about.
    #[napi(ts_type = "'settled' | 'progress' | 'estimate' | 'load' | 'release' | 'abort' | 'forget'")]
    pub kind: &'static str,
    /// Whose: a call's or an admission's number.
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

/// Where results came from so far: one for each model that this process has used. A result names its own by number, because to make
/// the same object anew costs more than all the rest of a short call's answer.
static PROVENANCES: Mutex<Vec<Arc<Provenance>>> = Mutex::new(Vec::new());

/// As [`PROVENANCES`]: how vectors were pooled.
static POOLINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn number_of(provenance: &Arc<Provenance>) -> f64 {
    numbered(&PROVENANCES, |other| Arc::ptr_eq(other, provenance) || *other == *provenance, || Arc::clone(provenance))
}

fn number_of_pooling(pooling: &str) -> f64 {
    numbered(&POOLINGS, |other| other == pooling, || pooling.to_owned())
}

fn numbered<T>(known: &Mutex<Vec<T>>, same: impl FnMut(&T) -> bool, new: impl FnOnce() -> T) -> f64 {
    let mut known = known.lock();
    count(known.iter().position(same).unwrap_or_else(|| {
        known.push(new());
        known.len() - 1
    }))
}

/// How vectors with this number were pooled.
#[napi]
pub fn pooling(number: f64) -> Result<String, Refusal> {
    enter(|| {
        let known = POOLINGS.lock();
        known.get(size("number", number)?).cloned().ok_or_else(|| invalid("no result has this number"))
    })
}

/// Where a result with this number comes from.
#[napi]
pub fn provenance(number: f64) -> Result<NativeProvenance, Refusal> {
    enter(|| {
        let known = PROVENANCES.lock();
        let of = known.get(size("number", number)?).ok_or_else(|| invalid("no result has this number"))?;
        Ok(NativeProvenance::from(&**of))
    })
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

/// Numbers on their way into a `Float32Array`: without a copy, but for few of them.
pub struct Numbers(Vec<f32>);

/// So many are copied sooner than JavaScript takes a foreign buffer over and, later, gives it back.
const FEW: usize = 2048;

impl TypeName for Numbers {
    fn type_name() -> &'static str {
        "Float32Array"
    }

    fn value_type() -> ValueType {
        ValueType::Object
    }
}

impl ToNapiValue for Numbers {
    unsafe fn to_napi_value(env: sys::napi_env, value: Self) -> napi::Result<sys::napi_value> {
        let Self(numbers) = value;
        if numbers.len() > FEW {
            // SAFETY: as the caller promises: `env` is alive and this is its thread.
            return unsafe { ToNapiValue::to_napi_value(env, Float32Array::from(numbers)) };
        }
        let (mut data, mut buffer, mut array) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let bytes = size_of_val(&*numbers);
        // SAFETY: as above; the three are written by the calls that they are given to.
        unsafe {
            check_status!(sys::napi_create_arraybuffer(env, bytes, &raw mut data, &raw mut buffer))?;
            // An empty buffer may have no address.
            if bytes > 0 {
                // SAFETY: the new buffer has `bytes` bytes, is nobody's yet, and JavaScript aligns buffers for any number.
                ptr::copy_nonoverlapping(numbers.as_ptr(), data.cast::<f32>(), numbers.len());
            }
            let kind = sys::TypedarrayType::float32_array;
            check_status!(sys::napi_create_typedarray(env, kind, numbers.len(), buffer, 0, &raw mut array))?;
        }
        Ok(array)
    }
}

/// Vectors, in the order of the texts.
#[napi(object, object_from_js = false)]
pub struct NativeEmbeddings {
    /// All rows after one another.
    #[napi(ts_type = "Float32Array")]
    pub data: Numbers,
    /// Numbers per row.
    pub dimensions: f64,
    /// How token states were pooled: the number to ask `pooling` for.
    pub pooling: f64,
    /// Tokens computed, special ones included.
    pub prompt_tokens: f64,
    /// Tokens cut off, with truncation.
    pub dropped_tokens: f64,
    /// Time by phase.
    pub timings: NativeTimings,
    /// Which model computed it: the number to ask `provenance` for.
    pub provenance: f64,
}

impl From<Embeddings> for NativeEmbeddings {
    fn from(vectors: Embeddings) -> Self {
        Self {
            data: Numbers(vectors.data),
            dimensions: count(vectors.dimensions),
            pooling: number_of_pooling(&vectors.pooling),
            prompt_tokens: count(vectors.prompt_tokens),
            dropped_tokens: count(vectors.dropped_tokens),
            timings: NativeTimings::from(&vectors.timings),
            provenance: number_of(&vectors.provenance),
        }
    }
}

impl NativeEmbeddings {
    /// All of it as numbers, if the vectors are to be copied anyway; [`Page`] says where they go.
    pub(crate) fn write(&self, page: &mut Page<'_>, id: f64) -> bool {
        let Self { data: Numbers(data), timings, .. } = self;
        if data.len() > FEW {
            return false;
        }
        let absent = f64::NAN;
        page.write(&[
            Page::EMBEDDINGS,
            id,
            count(data.len()),
            self.dimensions,
            self.pooling,
            self.prompt_tokens,
            self.dropped_tokens,
            self.provenance,
            timings.queue_ms,
            timings.load_ms.unwrap_or(absent),
            timings.prefill_ms.unwrap_or(absent),
            timings.decode_ms.unwrap_or(absent),
            timings.total_ms,
        ]);
        page.write_floats(data);
        true
    }
}

/// Memory of JavaScript's own to write numbers into during a call.
pub(crate) fn scratch<'a>(array: &'a mut Float64ArraySlice<'_>) -> &'a mut [f64] {
    // SAFETY: the package makes the array, on memory that is not shared, gives it to nobody else, and waits for the call's end.
    unsafe { array.as_mut() }
}

/// Numbers on their way to JavaScript without a value made of each: memory of JavaScript's own, which it reads after the call. Its first
/// number is how many are used, its second whether more is to come; then there are records, each with its kind first.
pub(crate) struct Page<'a> {
    numbers: &'a mut [f64],
    used: usize,
}

impl<'a> Page<'a> {
    /// The letter is the next one of those that the call returns.
    pub(crate) const OTHER: f64 = 0.0;
    /// A stream or a subscription is ready: its number.
    pub(crate) const READY: f64 = 1.0;
    /// A call ended with few vectors.
    pub(crate) const EMBEDDINGS: f64 = 2.0;
    /// The longest record.
    const LONGEST: usize = 13 + FEW / 2;

    /// Fails when not one record may fit.
    pub(crate) fn new(numbers: &'a mut [f64]) -> hob::Result<Self> {
        if numbers.len() < 2 + Self::LONGEST {
            return Err(invalid("the page is too small"));
        }
        // Should something go wrong before the end, there is nothing to read.
        numbers[0] = 0.0;
        Ok(Self { numbers, used: 2 })
    }

    pub(crate) fn write(&mut self, record: &[f64]) {
        self.numbers[self.used..self.used + record.len()].copy_from_slice(record);
        self.used += record.len();
    }

    /// Two of them take one number's place.
    fn write_floats(&mut self, floats: &[f32]) {
        for pair in floats.chunks(2) {
            let bits = pair.iter().rev().fold(0u64, |bits, float| bits << 32 | u64::from(float.to_bits()));
            self.numbers[self.used] = f64::from_bits(bits);
            self.used += 1;
        }
    }

    /// Whether a record may no longer fit.
    pub(crate) fn is_full(&self) -> bool {
        self.numbers.len() - self.used < Self::LONGEST
    }

    pub(crate) fn end(self, more: bool) {
        self.numbers[0] = count(self.used);
        self.numbers[1] = f64::from(u8::from(more));
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
    /// Which model computed it: the number to ask `provenance` for.
    pub provenance: f64,
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
            provenance: number_of(&ranking.provenance),
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
    /// Which model answered: the number to ask `provenance` for.
    pub provenance: f64,
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
            provenance: number_of(&decided.provenance),
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
