//! generate: a request becomes a stream of events.

use std::ffi::{c_char, c_void};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_core::Stream as _;
use hob::chat_output::RejectReason;
use hob::chat_template::{Message, RenderOptions};
use hob::engine::{Coalesce, Engine, Event, Finish, GenerateRequest, Prompt, Stream, StreamControl, Summary};
use hob::options::SamplingOptions;
use hob::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::boundary::{done, enter_shared, out, quiet};
use crate::buffer::hob_str;
use crate::engine::{EngineInner, hob_engine};
use crate::error::{HOB_END, HOB_OK, HOB_WOULD_BLOCK, hob_error, hob_status};
use crate::raw::{self, Counted, Held, Sized32, castable};
use crate::request::{HOB_NUL_TERMINATED, flag, hob_request_options, request, seconds, size, texts, truncate};
use crate::wait::{Signal, UserData, hob_drop_fn, hob_waker_fn, host_waker};

/// The events of one generation. One owner: `hob_stream_free`, which cancels what still runs. `hob_stream_next` is for one thread at a
/// time; cancel, stop and free are for any thread at any time, also while another is inside `hob_stream_next`. It keeps its
/// engine alive.
pub struct hob_stream {
    _opaque: [u8; 0],
}

pub(crate) struct StreamInner {
    reader: Mutex<Reader>,
    /// Set when the handle is given back: who is inside `next` then must not be told of memory that goes with it.
    freed: AtomicBool,
    control: StreamControl,
    signal: Arc<Signal>,
    _engine: Engine,
}

castable!(hob_stream => StreamInner, Counted, crate::handle::HOB_HANDLE_STREAM);

struct Reader {
    stream: Stream,
    ended: bool,
    lent: Lent,
}

/// For `max_tokens`: no limit but the model's context.
pub const HOB_UNLIMITED: u64 = u64::MAX;

/// What a model continues, and how. Borrowed for the call. Exactly one of `messages_json`, `prompt` and `prompt_tokens` is given.
/// Start from HOB_GENERATE_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_generate_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// Report each token's log-probability and this many likeliest alternatives (0 to 100); below 0 (the default) reports nothing.
    pub logprobs: i32,
    /// The model: a directory, a .gguf file or a hub id.
    pub model: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub model_len: usize,
    /// A conversation: a JSON list of {"role", "content", ...}, rendered by the model's chat template.
    pub messages_json: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub messages_json_len: usize,
    /// Text to continue as it is, without a template.
    pub prompt: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub prompt_len: usize,
    /// Token ids to continue.
    pub prompt_tokens: *const u32,
    /// How many.
    pub prompt_token_count: usize,
    /// How a conversation is rendered: a JSON object with `tools` (a list), `documents`, `enable_thinking`, `add_generation_prompt`,
    /// `extra` (further variables of the template). NULL for none.
    pub render_json: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub render_json_len: usize,
    /// New tokens at most, or HOB_UNLIMITED (the default).
    pub max_tokens: u64,
    /// Texts that end the answer; none of them is given out.
    pub stop: *const hob_str,
    /// How many.
    pub stop_count: usize,
    /// Seed of the random numbers, with `has_seed`.
    pub seed: u64,
    /// 1: take `seed`; 0 (the default): draw one. The summary reports it.
    pub has_seed: u32,
    /// Softmax temperature, 0 to 100; 0 (the default) is greedy.
    pub temperature: f32,
    /// Keep the most likely tokens; 0 (the default) keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens with this probability, in (0, 1]; default 1.
    pub top_p: f32,
    /// Keep tokens at least so many times as likely as the likeliest, in [0, 1]; default 0.
    pub min_p: f32,
    /// In (0, 10]; 1 (the default) is off.
    pub repetition_penalty: f32,
    /// How many of the latest tokens the penalty looks at; 0 means all. Default 64.
    pub repetition_window: u32,
    /// What happens to a prompt longer than the context: HOB_TRUNCATE_...
    pub truncate: i32,
    /// Tokens gathered into one event; 0 and 1 (the default) send each as it comes.
    pub coalesce_tokens: u32,
    /// How many milliseconds the first of them may wait; 0 does not limit it.
    pub coalesce_ms: u32,
    /// 1 (the default): keys and values kept from earlier prompts may serve this one, and its own be kept.
    pub prompt_cache: u32,
    /// 0.
    pub reserved: u32,
    /// Cancel, timeout, loading; NULL for the defaults.
    pub request: *const hob_request_options,
    /// Which marks of calls and reasoning the answer holds, when you know better than the model's template: a JSON object with `tools`
    /// (`hermes`, `llama3`, `mistral`; null looks for no calls) and `reasoning` ({"open", "close"}; null tells none). NULL goes by the
    /// template.
    pub format_json: *const c_char,
    /// Its length; 0 (the default) and HOB_NUL_TERMINATED take it up to its NUL.
    pub format_json_len: usize,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_generate_options {
    const NAME: &'static str = "hob_generate_options";
    fn init() -> Self {
        let none = std::ptr::null();
        Self {
            struct_size: size_of::<Self>() as u32,
            logprobs: -1,
            model: none,
            model_len: HOB_NUL_TERMINATED,
            messages_json: none,
            messages_json_len: HOB_NUL_TERMINATED,
            prompt: none,
            prompt_len: HOB_NUL_TERMINATED,
            prompt_tokens: std::ptr::null(),
            prompt_token_count: 0,
            render_json: none,
            render_json_len: HOB_NUL_TERMINATED,
            max_tokens: HOB_UNLIMITED,
            stop: std::ptr::null(),
            stop_count: 0,
            seed: 0,
            has_seed: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: 64,
            truncate: 0,
            coalesce_tokens: 1,
            coalesce_ms: 0,
            prompt_cache: 1,
            reserved: 0,
            request: std::ptr::null(),
            format_json: none,
            format_json_len: 0,
        }
    }
}

/// Writes what HOB_GENERATE_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_generate_options_init(options: *mut hob_generate_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_generate_options::init()) });
}

/// Why a generation ended: the model ended its turn, or a stop text appeared.
pub const HOB_FINISH_STOP: i32 = 0;
/// Why a generation ended: `max_tokens` were produced.
pub const HOB_FINISH_LENGTH: i32 = 1;
/// Why a generation ended: the model's context is full.
pub const HOB_FINISH_CONTEXT: i32 = 2;
/// Why a generation ended: `hob_stream_stop`, or a cancel with HOB_ON_CANCEL_STOP.
pub const HOB_FINISH_CANCELLED: i32 = 3;
/// Why a generation ended: the time was up, with HOB_ON_CANCEL_STOP.
pub const HOB_FINISH_TIMEOUT: i32 = 4;

/// The end of an answer. Times are seconds; below 0 means: did not happen. Lent with its event; a later version may append fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_summary {
    /// Bytes that this version of the library fills.
    pub struct_size: u32,
    /// HOB_FINISH_...
    pub finish: i32,
    /// Which stop text was found, as an index; below 0 for none.
    pub stop_index: i64,
    /// Tokens of the prompt as the model saw it.
    pub prompt_tokens: u64,
    /// Tokens of the prompt that were cut off.
    pub dropped_tokens: u64,
    /// Tokens of the prompt that did not have to be computed.
    pub cached_tokens: u64,
    /// New tokens, without the one that ends a turn.
    pub completion_tokens: u64,
    /// The seed in use, with `has_seed`.
    pub seed: u64,
    /// 1 when tokens were drawn.
    pub has_seed: u32,
    /// 0.
    pub reserved: u32,
    /// From the call until work on the device began, without the load.
    pub queue_s: f64,
    /// The model's load, when this request caused or joined one.
    pub load_s: f64,
    /// From the first prompt token to the first new token.
    pub prefill_s: f64,
    /// From the first new token to the last.
    pub decode_s: f64,
    /// From the call to the end.
    pub total_s: f64,
    /// Which model answered, as JSON: `model`, `family`, `quantization`, `manifest`, `runtime`. NULL when the request ended before it had
    /// one.
    pub provenance_json: *const c_char,
    /// Its bytes.
    pub provenance_json_len: usize,
}

/// A token that might have come. This struct does not change.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_alternative {
    /// Which token.
    pub token_id: u32,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

/// A token's log-probability and the likeliest ones, likeliest first. This struct does not change.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_token_logprob {
    /// Which token.
    pub token_id: u32,
    /// The natural logarithm of its probability, by the model itself.
    pub logprob: f32,
    /// The alternatives.
    pub top: *const hob_alternative,
    /// How many.
    pub top_count: usize,
}

/// More of the answer: `text`, `reasoning`, `token_ids`, `logprobs`.
pub const HOB_EVENT_CHUNK: i32 = 1;
/// A call of one of the request's tools: `call_id`, `call_name`, `text` (its arguments, a JSON object).
pub const HOB_EVENT_TOOL_CALL: i32 = 2;
/// What began as a call and is none: `text` (the model's words), `reject_reason`. The stream goes on.
pub const HOB_EVENT_REJECTED_CALL: i32 = 3;
/// The end: `summary`. Nothing follows but HOB_END.
pub const HOB_EVENT_FINISHED: i32 = 4;

/// Why a call was rejected: the answer ended inside it.
pub const HOB_REJECT_INCOMPLETE: i32 = 1;
/// Why a call was rejected: it is longer than the limit `call_bytes`.
pub const HOB_REJECT_TOO_LARGE: i32 = 2;
/// Why a call was rejected: it is not written as the format demands.
pub const HOB_REJECT_MALFORMED: i32 = 3;
/// Why a call was rejected: it names no function.
pub const HOB_REJECT_NO_NAME: i32 = 4;
/// Why a call was rejected: it names a function that the request does not have.
pub const HOB_REJECT_UNKNOWN_TOOL: i32 = 5;
/// Why a call was rejected: its arguments are not a JSON object.
pub const HOB_REJECT_BAD_ARGUMENTS: i32 = 6;
/// Why a call was rejected: a reason that this version has no number for.
pub const HOB_REJECT_OTHER: i32 = 100;

/// One event of a stream. Filled by `hob_stream_next`; start from HOB_EVENT_INIT. All pointers are borrowed from the stream and valid
/// until the next `hob_stream_next` or `hob_stream_free` on it. Texts are whole characters of UTF-8, followed by a NUL; what an
/// event does not have is NULL and 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_event {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// HOB_EVENT_... A later version may add kinds: skip those you do not know.
    pub kind: i32,
    /// Text; see the kinds.
    pub text: *const c_char,
    /// Its bytes.
    pub text_len: usize,
    /// Reasoning, where the model's template marks it; it comes before the text.
    pub reasoning: *const c_char,
    /// Its bytes.
    pub reasoning_len: usize,
    /// The tokens that the piece comes from.
    pub token_ids: *const u32,
    /// How many.
    pub token_count: usize,
    /// One per token, when asked for.
    pub logprobs: *const hob_token_logprob,
    /// How many.
    pub logprob_count: usize,
    /// The call's id.
    pub call_id: *const c_char,
    /// Its bytes.
    pub call_id_len: usize,
    /// The tool's name.
    pub call_name: *const c_char,
    /// Its bytes.
    pub call_name_len: usize,
    /// HOB_REJECT_...
    pub reject_reason: i32,
    /// 0.
    pub reserved: u32,
    /// The end of the answer.
    pub summary: *const hob_summary,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_event {
    const NAME: &'static str = "hob_event";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            kind: 0,
            text: std::ptr::null(),
            text_len: 0,
            reasoning: std::ptr::null(),
            reasoning_len: 0,
            token_ids: std::ptr::null(),
            token_count: 0,
            logprobs: std::ptr::null(),
            logprob_count: 0,
            call_id: std::ptr::null(),
            call_id_len: 0,
            call_name: std::ptr::null(),
            call_name_len: 0,
            reject_reason: 0,
            reserved: 0,
            summary: std::ptr::null(),
        }
    }
}

/// What the latest event's pointers lead to.
#[derive(Default)]
struct Lent {
    text: String,
    reasoning: String,
    id: String,
    name: String,
    token_ids: Vec<u32>,
    logprobs: Vec<hob_token_logprob>,
    // The alternatives of all tokens; `logprobs` points into it.
    top: Vec<hob_alternative>,
    summary: Option<Box<hob_summary>>,
    provenance: String,
}

// SAFETY: the pointers in `logprobs` and in `summary` lead into `top` and `provenance` of the same value, which move with it.
unsafe impl Send for Lent {}

impl Lent {
    /// Keeps an event and describes it for C.
    fn keep(&mut self, event: Event) -> hob_event {
        *self = Self::default();
        let mut seen = hob_event::init();
        match event {
            Event::Chunk(chunk) => {
                seen.kind = HOB_EVENT_CHUNK;
                (seen.text, seen.text_len) = lend(&mut self.text, chunk.text);
                (seen.reasoning, seen.reasoning_len) = lend(&mut self.reasoning, chunk.reasoning);
                self.top = chunk
                    .logprobs
                    .iter()
                    .flat_map(|token| &token.top)
                    .map(|&(token_id, logprob)| hob_alternative { token_id, logprob })
                    .collect();
                let mut from = 0;
                for (token, &token_id) in chunk.logprobs.iter().zip(&chunk.token_ids) {
                    let top = &self.top[from..from + token.top.len()];
                    from += top.len();
                    self.logprobs.push(hob_token_logprob {
                        token_id,
                        logprob: token.logprob,
                        top: top.as_ptr(),
                        top_count: top.len(),
                    });
                }
                self.token_ids = chunk.token_ids;
                (seen.token_ids, seen.token_count) = (first(&self.token_ids), self.token_ids.len());
                (seen.logprobs, seen.logprob_count) = (first(&self.logprobs), self.logprobs.len());
            }
            Event::ToolCall(call) => {
                seen.kind = HOB_EVENT_TOOL_CALL;
                (seen.call_id, seen.call_id_len) = lend(&mut self.id, call.id);
                (seen.call_name, seen.call_name_len) = lend(&mut self.name, call.name);
                (seen.text, seen.text_len) = lend(&mut self.text, call.arguments);
            }
            Event::RejectedCall(call) => {
                seen.kind = HOB_EVENT_REJECTED_CALL;
                seen.reject_reason = reject_reason(call.reason);
                (seen.text, seen.text_len) = lend(&mut self.text, call.raw);
            }
            Event::Finished(summary) => {
                seen.kind = HOB_EVENT_FINISHED;
                let mut told = summary_of(&summary);
                let provenance = summary.provenance.as_deref().and_then(|provenance| serde_json::to_string(provenance).ok());
                (told.provenance_json, told.provenance_json_len) = lend(&mut self.provenance, provenance.unwrap_or_default());
                seen.summary = &raw const **self.summary.insert(Box::new(told));
            }
        }
        seen
    }
}

fn reject_reason(reason: RejectReason) -> i32 {
    match reason {
        RejectReason::Incomplete => HOB_REJECT_INCOMPLETE,
        RejectReason::TooLarge => HOB_REJECT_TOO_LARGE,
        RejectReason::Malformed => HOB_REJECT_MALFORMED,
        RejectReason::NoName => HOB_REJECT_NO_NAME,
        RejectReason::UnknownTool => HOB_REJECT_UNKNOWN_TOOL,
        RejectReason::BadArguments => HOB_REJECT_BAD_ARGUMENTS,
        _ => HOB_REJECT_OTHER,
    }
}

fn lend(place: &mut String, mut text: String) -> (*const c_char, usize) {
    let len = text.len();
    if len == 0 {
        return (std::ptr::null(), 0);
    }
    text.push('\0');
    *place = text;
    (place.as_ptr().cast(), len)
}

fn first<T>(items: &[T]) -> *const T {
    if items.is_empty() { std::ptr::null() } else { items.as_ptr() }
}

fn summary_of(summary: &Summary) -> hob_summary {
    let timings = summary.timings;
    hob_summary {
        struct_size: size_of::<hob_summary>() as u32,
        finish: match summary.finish {
            Finish::Stop => HOB_FINISH_STOP,
            Finish::Length => HOB_FINISH_LENGTH,
            Finish::Context => HOB_FINISH_CONTEXT,
            Finish::Cancelled => HOB_FINISH_CANCELLED,
            Finish::Timeout => HOB_FINISH_TIMEOUT,
        },
        stop_index: summary.stop_index.and_then(|index| i64::try_from(index).ok()).unwrap_or(-1),
        prompt_tokens: summary.prompt_tokens as u64,
        dropped_tokens: summary.dropped_tokens as u64,
        cached_tokens: summary.cached_tokens as u64,
        completion_tokens: summary.completion_tokens as u64,
        seed: summary.seed.unwrap_or(0),
        has_seed: u32::from(summary.seed.is_some()),
        reserved: 0,
        queue_s: timings.queue_s,
        load_s: seconds(timings.load_s),
        prefill_s: seconds(timings.prefill_s),
        decode_s: seconds(timings.decode_s),
        total_s: timings.total_s,
        provenance_json: std::ptr::null(),
        provenance_json_len: 0,
    }
}

/// The prompt of a request: exactly one of the three.
pub(crate) unsafe fn prompt(
    messages: (*const c_char, usize),
    text: (*const c_char, usize),
    tokens: (*const u32, usize),
) -> Result<Prompt> {
    // SAFETY: as the header asks.
    unsafe {
        let messages = raw::optional_text(messages.0, messages.1, "messages_json")?;
        let text = raw::optional_text(text.0, text.1, "prompt")?;
        let tokens = if tokens.0.is_null() { None } else { Some(raw::slice(tokens.0, tokens.1, "prompt_tokens")?) };
        match (messages, text, tokens) {
            (Some(json), None, None) => Message::list_from_json(json).map(Prompt::Chat),
            (None, Some(text), None) => Ok(Prompt::Raw(text.to_owned())),
            (None, None, Some(ids)) => Ok(Prompt::Tokens(ids.to_vec())),
            _ => Err(Error::new(ErrorKind::InvalidArgument, "give exactly one of messages_json, prompt and prompt_tokens")),
        }
    }
}

pub(crate) unsafe fn render(json: *const c_char, len: usize) -> Result<RenderOptions> {
    // SAFETY: as the header asks.
    let Some(json) = (unsafe { raw::optional_text(json, len, "render_json")? }) else { return Ok(RenderOptions::default()) };
    parsed(json, "render_json", "render options")
}

/// Reads JSON of the host's; the parser's own words would repeat names out of the text.
fn parsed<T: serde::de::DeserializeOwned>(json: &str, name: &str, what: &str) -> Result<T> {
    serde_json::from_str(json).map_err(|error| {
        let at = format!("line {} column {}", error.line(), error.column());
        Error::new(ErrorKind::InvalidArgument, format!("{name}: not an object of {what} at {at}"))
    })
}

unsafe fn generate_request(options: *const hob_generate_options) -> Result<GenerateRequest> {
    // SAFETY: as the header asks.
    unsafe {
        if options.is_null() {
            return Err(raw::null("options"));
        }
        let given = raw::read_sized(options)?;
        let model = crate::request::model(given.model, given.model_len)?;
        let prompt = prompt(
            (given.messages_json, given.messages_json_len),
            (given.prompt, given.prompt_len),
            (given.prompt_tokens, given.prompt_token_count),
        )?;
        let mut wanted = GenerateRequest::new(model, prompt);
        wanted.render = render(given.render_json, given.render_json_len)?;
        wanted.sampling = SamplingOptions {
            temperature: given.temperature,
            top_k: given.top_k,
            top_p: given.top_p,
            min_p: given.min_p,
            repetition_penalty: given.repetition_penalty,
            repetition_window: given.repetition_window,
            seed: flag("has_seed", given.has_seed)?.then_some(given.seed),
        };
        wanted.max_tokens = if given.max_tokens == HOB_UNLIMITED { None } else { Some(size("max_tokens", given.max_tokens)?) };
        wanted.stop = texts(given.stop, given.stop_count, "stop")?;
        wanted.logprobs = usize::try_from(given.logprobs).ok();
        wanted.truncate = truncate(given.truncate)?;
        let interval = Duration::from_millis(given.coalesce_ms.into());
        wanted.coalesce = Coalesce { tokens: size("coalesce_tokens", given.coalesce_tokens.into())?, interval };
        wanted.prompt_cache = flag("prompt_cache", given.prompt_cache)?;
        let format_len = if given.format_json_len == 0 { HOB_NUL_TERMINATED } else { given.format_json_len };
        let format = raw::optional_text(given.format_json, format_len, "format_json")?;
        wanted.format = format.map(|json| parsed(json, "format_json", "marks of an answer")).transpose()?;
        wanted.options = request(given.request)?;
        Ok(wanted)
    }
}

/// Starts generating and returns at once; errors after this call come from the stream. The caller owns `*out_stream`. Any thread.
/// HOB_INVALID_ARGUMENT, HOB_BUSY when the engine's queue is full, HOB_CLOSED. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_engine_generate(
    engine: *const hob_engine,
    options: *const hob_generate_options,
    out_stream: *mut *mut hob_stream,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(engine, "engine", out_error, |inner: &EngineInner| {
            out(out_stream, "out_stream")?;
            let stream = inner.engine.generate(generate_request(options)?)?;
            let control = stream.control();
            let reader = Mutex::new(Reader { stream, ended: false, lent: Lent::default() });
            let (freed, signal) = (AtomicBool::new(false), Arc::default());
            let stream = StreamInner { reader, freed, control, signal, _engine: inner.engine.clone() };
            done(out_stream, raw::give_counted(Arc::new(Held::new(stream))))
        })
    }
}

/// Gets the next event into `*out_event`. `timeout_ms`: 0 looks and returns, above 0 blocks this thread so long at most, below 0 until
/// there is one. HOB_OK: an event. HOB_WOULD_BLOCK: none within the timeout. HOB_END: the last one was delivered. An error is the
/// stream's own end: HOB_END follows, and what the request held is given back before it is told. Exactly one end is told:
/// HOB_EVENT_FINISHED or an error. One thread at a time: another gets HOB_BUSY. A reader that is far behind pauses its own
/// generation, nobody else's. Any thread but Hob's own. HOB_CANCELLED, HOB_TIMEOUT, HOB_CLOSED, HOB_BUSY,
/// HOB_INVALID_ARGUMENT and those of loading. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_stream_next(
    stream: *mut hob_stream,
    timeout_ms: i64,
    out_event: *mut hob_event,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(stream, "stream", out_error, |inner: &StreamInner| {
            // A wrong struct is refused before an event is taken for it.
            raw::write_sized(out_event, hob_event::init())?;
            let Some(mut reader) = inner.reader.try_lock() else {
                return Err(Error::new(ErrorKind::Busy, "another thread is inside hob_stream_next of this stream"));
            };
            if reader.ended {
                return Ok(HOB_END);
            }
            let event = inner.signal.wait(timeout_ms, |context| Pin::new(&mut reader.stream).poll_next(context));
            match event {
                None => Ok(HOB_WOULD_BLOCK),
                Some(None) => {
                    reader.ended = true;
                    Ok(HOB_END)
                }
                Some(Some(Err(error))) => {
                    reader.ended = true;
                    Err(error)
                }
                Some(Some(Ok(_))) if inner.freed.load(Ordering::Acquire) => {
                    reader.ended = true;
                    Err(Error::new(ErrorKind::Cancelled, "the stream was given back by another thread during the call"))
                }
                Some(Some(Ok(event))) => {
                    reader.ended = matches!(event, Event::Finished(_));
                    let seen = reader.lent.keep(event);
                    raw::write_sized(out_event, seen)?;
                    Ok(HOB_OK)
                }
            }
        })
    }
}

/// Registers what is called when it is worth calling `hob_stream_next` again; it replaces an earlier one, and NULL removes it. It is
/// called at once, and after each HOB_WOULD_BLOCK when something is ready; more often is possible. `drop_user_data` runs once, when
/// the waker can no longer be called, also if this call fails. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_stream_set_waker(
    stream: *const hob_stream,
    waker: hob_waker_fn,
    user_data: *mut c_void,
    drop_user_data: hob_drop_fn,
    out_error: *mut *mut hob_error,
) -> hob_status {
    let data = UserData::new(user_data, drop_user_data);
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(stream, "stream", out_error, |inner: &StreamInner| {
            inner.signal.set_host(host_waker(waker, data));
            inner.signal.tell_host();
            Ok(HOB_OK)
        })
    }
}

/// Ends the generation at its next step. The stream still tells its end: HOB_CANCELLED. After the end it does nothing. NULL is
/// allowed. Any thread, also within callbacks. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_stream_cancel(stream: *const hob_stream) {
    // SAFETY: as the header asks.
    quiet((), || {
        if let Some(inner) = unsafe { raw::share(stream) } {
            inner.control.cancel();
        }
    });
}

/// Ends the generation at its next step with what there is: the stream's end is HOB_EVENT_FINISHED with HOB_FINISH_CANCELLED. NULL is
/// allowed. Any thread, also within callbacks. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_stream_stop(stream: *const hob_stream) {
    // SAFETY: as the header asks.
    quiet((), || {
        if let Some(inner) = unsafe { raw::share(stream) } {
            inner.control.stop();
        }
    });
}

/// Gives the stream back, and cancels what still runs, without waiting for it. A thread that is inside `hob_stream_next` gets an error
/// or HOB_END, and must not call it again; to end a stream that another thread may be about to read, use `hob_stream_cancel`, and let the
/// reader free it. NULL is allowed. Any thread, also within callbacks. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_stream_free(stream: *mut hob_stream) {
    quiet((), || {
        // SAFETY: as the header asks.
        if let Some(inner) = unsafe { raw::take_counted(stream) } {
            // Another thread's call may hold it for a moment longer.
            inner.freed.store(true, Ordering::Release);
            inner.control.cancel();
            inner.signal.set_host(None);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_initial_values_are_the_cores_defaults() {
        let given = hob_generate_options { model: c"m".as_ptr(), prompt: c"p".as_ptr(), ..hob_generate_options::init() };
        // SAFETY: a struct that states its size, and literals.
        let (ours, cores) = (unsafe { generate_request(&raw const given) }.expect("valid"), GenerateRequest::raw("m", "p"));
        assert_eq!(ours.sampling, cores.sampling);
        assert_eq!((ours.max_tokens, ours.logprobs, ours.truncate), (cores.max_tokens, cores.logprobs, cores.truncate));
        assert_eq!(ours.format, cores.format);
        assert_eq!(
            (ours.prompt_cache, ours.render, ours.coalesce.interval),
            (cores.prompt_cache, cores.render, cores.coalesce.interval)
        );
    }
}
