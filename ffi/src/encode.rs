//! embed, rerank, decide, score: requests with one answer.

use std::ffi::{CString, c_char};

use hob::Result;
use hob::engine::{Answer, DecideRequest, Decision, EmbedRequest, Normalize, RerankRequest, ScoreKind, ScoreRequest, Timings};
use hob::model::Provenance;
use serde::Serialize;

use crate::boundary::{done, enter_shared, out, quiet};
use crate::buffer::{self, hob_buffer, hob_str};
use crate::engine::{EngineInner, hob_engine};
use crate::error::{hob_error, hob_status, nothing};
use crate::raw::{self, Boxed, Held, Sized32, castable};
use crate::request::{
    HOB_NUL_TERMINATED, choice, flag, hob_request_options, hob_usage, model, request, size, texts, truncate, unknown, write_usage,
};
use crate::stream::{prompt, render};
use crate::wait::block;

/// What is embedded, and how. Borrowed for the call. Start from HOB_EMBED_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_embed_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// Scale vectors to unit length: HOB_AUTO (as the model's files say), HOB_YES, HOB_NO.
    pub normalize: i32,
    /// The model: a directory or a hub id.
    pub model: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub model_len: usize,
    /// The texts; at least one.
    pub texts: *const hob_str,
    /// How many.
    pub text_count: usize,
    /// Which of the model's prompts goes before each text (`query`, `document`, ...); NULL takes the model's default.
    pub prompt_name: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub prompt_name_len: usize,
    /// Keep so many leading dimensions; 0 (the default) keeps all.
    pub dimensions: u64,
    /// What happens to a text that is too long: HOB_TRUNCATE_ERROR or HOB_TRUNCATE_END.
    pub truncate: i32,
    /// 0.
    pub reserved: u32,
    /// Cancel, timeout, loading; NULL for the defaults.
    pub request: *const hob_request_options,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_embed_options {
    const NAME: &'static str = "hob_embed_options";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            normalize: 0,
            model: std::ptr::null(),
            model_len: HOB_NUL_TERMINATED,
            texts: std::ptr::null(),
            text_count: 0,
            prompt_name: std::ptr::null(),
            prompt_name_len: HOB_NUL_TERMINATED,
            dimensions: 0,
            truncate: 0,
            reserved: 0,
            request: std::ptr::null(),
        }
    }
}

/// Writes what HOB_EMBED_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_embed_options_init(options: *mut hob_embed_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_embed_options::init()) });
}

#[derive(Serialize)]
struct EmbeddedJson<'a> {
    #[serde(flatten)]
    provenance: &'a Provenance,
    pooling: &'a str,
}

/// Turns texts into vectors, in the order given, and blocks this thread until they are there. The caller owns one count of
/// `*out_vectors`; `hob_buffer_floats` reads it without a copy. `out_usage` may be NULL. Any thread but Hob's own.
/// HOB_INVALID_ARGUMENT (a text that is too long too, with its index and both numbers), HOB_UNSUPPORTED when the model does not embed,
/// HOB_BUSY, HOB_TIMEOUT, HOB_CANCELLED, HOB_CLOSED and those of loading. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_embed(
    engine: *const hob_engine,
    options: *const hob_embed_options,
    out_vectors: *mut *mut hob_buffer,
    out_usage: *mut hob_usage,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_vectors, "out_vectors")?;
            if options.is_null() {
                return Err(raw::null("options"));
            }
            let given = raw::read_sized(options)?;
            let mut wanted =
                EmbedRequest::new(model(given.model, given.model_len)?, texts(given.texts, given.text_count, "texts")?);
            wanted.prompt_name = raw::optional_text(given.prompt_name, given.prompt_name_len, "prompt_name")?.map(str::to_owned);
            wanted.dimensions = (given.dimensions > 0).then(|| size("dimensions", given.dimensions)).transpose()?;
            wanted.normalize = match choice("normalize", given.normalize)? {
                None => Normalize::Auto,
                Some(true) => Normalize::Yes,
                Some(false) => Normalize::No,
            };
            wanted.truncate = truncate(given.truncate)?;
            wanted.options = request(given.request)?;
            let vectors = block(None, inner.engine.embed(wanted))?;
            write_usage(out_usage, vectors.prompt_tokens, vectors.dropped_tokens, &vectors.timings)?;
            let provenance = EmbeddedJson { provenance: &vectors.provenance, pooling: &vectors.pooling };
            let provenance = buffer::json_text(&provenance)?;
            done(out_vectors, buffer::rows(vectors.data, vectors.dimensions, provenance))
        })
    }
}

/// What is ranked, and how. Borrowed for the call. Start from HOB_RERANK_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_rerank_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// What happens to a pair that is too long: HOB_TRUNCATE_ERROR or HOB_TRUNCATE_END.
    pub truncate: i32,
    /// The model: a reranker, or an embedder (whose score is a cosine).
    pub model: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub model_len: usize,
    /// What the documents should answer.
    pub query: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub query_len: usize,
    /// The documents; at least one, none blank.
    pub documents: *const hob_str,
    /// How many.
    pub document_count: usize,
    /// An instruction, for models that take one; NULL for none.
    pub instruct: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub instruct_len: usize,
    /// Keep only the best so many; 0 (the default) keeps all.
    pub top_n: u64,
    /// 1: leave the results in the order of the documents.
    pub unsorted: u32,
    /// 0.
    pub reserved: u32,
    /// Cancel, timeout, loading; NULL for the defaults.
    pub request: *const hob_request_options,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_rerank_options {
    const NAME: &'static str = "hob_rerank_options";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            truncate: 0,
            model: std::ptr::null(),
            model_len: HOB_NUL_TERMINATED,
            query: std::ptr::null(),
            query_len: HOB_NUL_TERMINATED,
            documents: std::ptr::null(),
            document_count: 0,
            instruct: std::ptr::null(),
            instruct_len: HOB_NUL_TERMINATED,
            top_n: 0,
            unsorted: 0,
            reserved: 0,
            request: std::ptr::null(),
        }
    }
}

/// Writes what HOB_RERANK_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_rerank_options_init(options: *mut hob_rerank_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_rerank_options::init()) });
}

/// Scores are probabilities, 0 to 1.
pub const HOB_SCORE_NORMALIZED: i32 = 0;
/// Scores are cosines, -1 to 1: an embedder's approximation.
pub const HOB_SCORE_COSINE: i32 = 1;

/// One document's place. This struct does not change.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_ranked {
    /// Which document.
    pub index: u64,
    /// Higher is better; see `hob_ranking_score_kind`.
    pub score: f32,
    /// The classifier's raw output; NaN for a cosine.
    pub logit: f32,
}

/// Documents by score. Immutable, so any thread may read it. One owner: `hob_ranking_free`.
pub struct hob_ranking {
    _opaque: [u8; 0],
}

pub(crate) struct RankingInner {
    items: Vec<hob_ranked>,
    score_kind: i32,
    provenance: CString,
}

castable!(hob_ranking => RankingInner, Boxed, crate::handle::HOB_HANDLE_RANKING);

/// Orders documents by how well they answer a query, and blocks this thread until that is done. The caller owns `*out_ranking`.
/// `out_usage` may be NULL. Any thread but Hob's own. Errors as `hob_engine_embed`. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_rerank(
    engine: *const hob_engine,
    options: *const hob_rerank_options,
    out_ranking: *mut *mut hob_ranking,
    out_usage: *mut hob_usage,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_ranking, "out_ranking")?;
            if options.is_null() {
                return Err(raw::null("options"));
            }
            let given = raw::read_sized(options)?;
            let documents = texts(given.documents, given.document_count, "documents")?;
            let query = raw::text(given.query, given.query_len, "query")?;
            let mut wanted = RerankRequest::new(model(given.model, given.model_len)?, query, documents);
            wanted.instruct = raw::optional_text(given.instruct, given.instruct_len, "instruct")?.map(str::to_owned);
            wanted.top_n = (given.top_n > 0).then(|| size("top_n", given.top_n)).transpose()?;
            wanted.unsorted = flag("unsorted", given.unsorted)?;
            wanted.truncate = truncate(given.truncate)?;
            wanted.options = request(given.request)?;
            let ranking = block(None, inner.engine.rerank(wanted))?;
            write_usage(out_usage, ranking.prompt_tokens, ranking.dropped_tokens, &ranking.timings)?;
            let items = ranking.results.iter().map(|ranked| hob_ranked {
                index: ranked.index as u64,
                score: ranked.score,
                logit: ranked.logit.unwrap_or(f32::NAN),
            });
            let score_kind = match ranking.score_kind {
                ScoreKind::Normalized => HOB_SCORE_NORMALIZED,
                ScoreKind::Cosine => HOB_SCORE_COSINE,
            };
            let provenance = buffer::json_text(&*ranking.provenance)?;
            done(out_ranking, raw::give_boxed(Held::new(RankingInner { items: items.collect(), score_kind, provenance })))
        })
    }
}

/// The documents' places, best first: `*out_count` of them. Borrowed from the ranking. NULL and 0 for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_ranking_items(ranking: *const hob_ranking, out_count: *mut usize) -> *const hob_ranked {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe {
        let items = raw::borrow(ranking).map_or(&[][..], |ranking| ranking.items.as_slice());
        raw::write(out_count, items.len());
        if items.is_empty() { nothing() } else { items.as_ptr().cast_mut() }
    })
}

/// What the scores mean: HOB_SCORE_... HOB_SCORE_NORMALIZED for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_ranking_score_kind(ranking: *const hob_ranking) -> i32 {
    // SAFETY: as the header asks.
    quiet(HOB_SCORE_NORMALIZED, || unsafe { raw::borrow(ranking) }.map_or(HOB_SCORE_NORMALIZED, |ranking| ranking.score_kind))
}

/// Which model ranked, as JSON: `model`, `family`, `quantization`, `manifest`, `runtime`. Borrowed from the ranking. NULL for NULL. Any
/// thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_ranking_provenance(ranking: *const hob_ranking) -> *const c_char {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe { raw::borrow(ranking) }.map_or(nothing(), |ranking| ranking.provenance.as_ptr().cast_mut()))
}

/// Gives a ranking back. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_ranking_free(ranking: *mut hob_ranking) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_boxed(ranking) }));
}

/// The answers are one of several things: the confidence says how far the best one stands out.
pub const HOB_DECISION_CHOICE: i32 = 0;
/// The answers are levels of one thing, the lowest first: there is a value too.
pub const HOB_DECISION_SCORE: i32 = 1;
/// The answers are yes and no: two, whose probabilities say all.
pub const HOB_DECISION_PREDICATE: i32 = 2;

/// A question and its possible answers. Borrowed for the call. Exactly one of `messages_json` and `prompt` is given. Start from
/// HOB_DECIDE_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_decide_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// HOB_DECISION_...
    pub decision: i32,
    /// The model: a directory, a .gguf file or a hub id.
    pub model: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub model_len: usize,
    /// A conversation; see `hob_generate_options`.
    pub messages_json: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub messages_json_len: usize,
    /// Text as it is.
    pub prompt: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub prompt_len: usize,
    /// How a conversation is rendered; see `hob_generate_options`.
    pub render_json: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub render_json_len: usize,
    /// The answers, as the model would write them: 1 to 256, none empty.
    pub answers: *const hob_str,
    /// How many.
    pub answer_count: usize,
    /// Cancel, timeout, loading; NULL for the defaults.
    pub request: *const hob_request_options,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_decide_options {
    const NAME: &'static str = "hob_decide_options";
    fn init() -> Self {
        let none = std::ptr::null();
        Self {
            struct_size: size_of::<Self>() as u32,
            decision: 0,
            model: none,
            model_len: HOB_NUL_TERMINATED,
            messages_json: none,
            messages_json_len: HOB_NUL_TERMINATED,
            prompt: none,
            prompt_len: HOB_NUL_TERMINATED,
            render_json: none,
            render_json_len: HOB_NUL_TERMINATED,
            answers: std::ptr::null(),
            answer_count: 0,
            request: std::ptr::null(),
        }
    }
}

/// Writes what HOB_DECIDE_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_decide_options_init(options: *mut hob_decide_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_decide_options::init()) });
}

#[derive(Serialize)]
struct DecidedJson<'a> {
    answers: &'a [Answer],
    confidence: Option<f64>,
    value: Option<f64>,
    prompt_tokens: usize,
    timings: Timings,
    provenance: &'a Provenance,
}

unsafe fn decide_request(options: *const hob_decide_options) -> Result<DecideRequest> {
    // SAFETY: as the header asks.
    unsafe {
        if options.is_null() {
            return Err(raw::null("options"));
        }
        let given = raw::read_sized(options)?;
        Ok(DecideRequest {
            model: model(given.model, given.model_len)?.to_owned(),
            prompt: prompt(
                (given.messages_json, given.messages_json_len),
                (given.prompt, given.prompt_len),
                (std::ptr::null(), 0),
            )?,
            render: render(given.render_json, given.render_json_len)?,
            answers: texts(given.answers, given.answer_count, "answers")?,
            decision: match given.decision {
                HOB_DECISION_CHOICE => Decision::Choice,
                HOB_DECISION_SCORE => Decision::Score,
                HOB_DECISION_PREDICATE => Decision::Predicate,
                other => return Err(unknown("decision", other)),
            },
            options: request(given.request)?,
        })
    }
}

/// Which of the answers a chat model holds most likely, without sampling: JSON with `answers` (`index`, `mean_logprob`, `p`),
/// `confidence`, `value`, `prompt_tokens`, `timings`, `provenance`. Blocks this thread. The caller owns one count of `*out_decision`. Any thread but
/// Hob's own. Errors as `hob_engine_embed`. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_decide(
    engine: *const hob_engine,
    options: *const hob_decide_options,
    out_decision: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_decision, "out_decision")?;
            let decided = block(None, inner.engine.decide(decide_request(options)?))?;
            let answer = DecidedJson {
                answers: &decided.answers,
                confidence: decided.confidence,
                value: decided.value,
                prompt_tokens: decided.prompt_tokens,
                timings: decided.timings,
                provenance: &decided.provenance,
            };
            done(out_decision, buffer::json(&answer)?)
        })
    }
}

/// How likely a completion is after a prompt: JSON with `tokens`, `logprobs`, `mean_nll`. `options` gives model, prompt and request;
/// its other fields are not looked at. Blocks this thread. The caller owns one count of `*out_score`. Any thread but Hob's own.
/// Errors as `hob_engine_embed`. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_score(
    engine: *const hob_engine,
    options: *const crate::stream::hob_generate_options,
    completion: *const c_char,
    completion_len: usize,
    out_score: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_score, "out_score")?;
            if options.is_null() {
                return Err(raw::null("options"));
            }
            let given = raw::read_sized(options)?;
            let prompt = prompt(
                (given.messages_json, given.messages_json_len),
                (given.prompt, given.prompt_len),
                (given.prompt_tokens, given.prompt_token_count),
            )?;
            let completion = raw::text(completion, completion_len, "completion")?;
            let mut wanted = ScoreRequest::new(model(given.model, given.model_len)?, prompt, completion);
            wanted.options = request(given.request)?;
            let score = block(None, inner.engine.score(wanted))?;
            done(out_score, buffer::json(&score)?)
        })
    }
}
