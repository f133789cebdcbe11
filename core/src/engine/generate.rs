//! generate: a prompt becomes a stream of text.

mod row;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use self::row::{GenerateRow, Out};
use super::request::{Link, Place};
use super::residency::{Purpose, Residency};
use super::work::{Ending, Task};
use super::{OnCancel, RequestOptions, Shared, Timings, closed};
use crate::cancel::{CancelReason, CancelToken};
use crate::chat_output::{ChatFormat, ChatParser, ParserOptions, RejectReason};
use crate::chat_template::{Message, RenderOptions, ToolCall};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Provenance, Text};
use crate::options::{Limits, SamplingOptions, Truncate};
use crate::sampler::{Sampler, TokenLogprobs};
use crate::text_stream::{StopMatcher, TextStream};
use crate::tokenizer::EncodeOptions;

/// What the model continues.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// A conversation, rendered by the model's chat template.
    Chat(Vec<Message>),
    /// Text as it is: no template, but the special tokens the tokenizer puts around a text. Special tokens spelled in it count.
    Raw(String),
    /// Token ids as they are.
    Tokens(Vec<u32>),
}

/// A request to generate. Made with [`chat`](Self::chat) or [`raw`](Self::raw); set the fields you need.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// The model: a directory, a `.gguf` file or a hub id.
    pub model: String,
    /// What it continues.
    pub prompt: Prompt,
    /// How a conversation is rendered.
    pub render: RenderOptions,
    /// How reasoning and calls are told from a conversation's answer; `None`: as the model's template shows.
    pub format: Option<ChatFormat>,
    /// How tokens are chosen; greedy by default.
    pub sampling: SamplingOptions,
    /// New tokens at most; `None` stops only at the context's end. 0 gives an empty result.
    pub max_tokens: Option<usize>,
    /// Strings that end the answer; none of their text is given out.
    pub stop: Vec<String>,
    /// Report each token's log-probability and this many likeliest alternatives; `None` reports nothing.
    pub logprobs: Option<usize>,
    /// What happens to a prompt longer than the context. `Start` keeps its end.
    pub truncate: Truncate,
    /// How tokens are gathered into chunks; the default sends each as it comes.
    pub coalesce: Coalesce,
    /// Whether keys and values kept from earlier prompts may serve this one, and its own be kept; the default is yes.
    pub prompt_cache: bool,
    /// Cancel, timeout, loading.
    pub options: RequestOptions,
}

impl GenerateRequest {
    /// A conversation.
    pub fn chat(model: impl Into<String>, messages: Vec<Message>) -> Self {
        Self::new(model, Prompt::Chat(messages))
    }

    /// Plain text to continue.
    pub fn raw(model: impl Into<String>, prompt: impl Into<String>) -> Self {
        Self::new(model, Prompt::Raw(prompt.into()))
    }

    /// Any prompt, with the defaults.
    pub fn new(model: impl Into<String>, prompt: Prompt) -> Self {
        Self {
            model: model.into(),
            prompt,
            render: RenderOptions::default(),
            format: None,
            sampling: SamplingOptions::default(),
            max_tokens: None,
            stop: Vec::new(),
            logprobs: None,
            truncate: Truncate::default(),
            coalesce: Coalesce::default(),
            prompt_cache: true,
            options: RequestOptions::default(),
        }
    }

    fn check(&self, limits: &Limits) -> Result<()> {
        self.sampling.check()?;
        limits.check_stops(&self.stop)?;
        if let Some(count) = self.logprobs.filter(|&count| count > MAX_LOGPROBS) {
            return Err(Error::invalid(format!("logprobs is {count}; at most {MAX_LOGPROBS} alternatives are reported")));
        }
        self.prompt.check(&self.render, limits)
    }
}

impl Prompt {
    pub(super) fn check(&self, render: &RenderOptions, limits: &Limits) -> Result<()> {
        match self {
            Self::Chat(messages) if messages.is_empty() => {
                Err(Error::invalid("the conversation has no messages; give at least one"))
            }
            Self::Raw(text) if text.is_empty() => Err(Error::invalid("the prompt is empty; give some text")),
            Self::Tokens(ids) if ids.is_empty() => Err(Error::invalid("the prompt has no tokens; give at least one")),
            Self::Chat(messages) => limits.check_chat(messages, render),
            Self::Raw(text) => limits.check_prompt(text),
            Self::Tokens(_) => Ok(()),
        }
    }
}

/// How a stream gathers tokens: a chunk goes out once it has so many tokens or has waited so long, whichever comes first. A host
/// that draws on every chunk spares itself work. The first token and the end are never held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Coalesce {
    /// Tokens of a chunk; 0 and 1 send each token as it comes.
    pub tokens: usize,
    /// How long the first of them may wait, looked at when a token comes; zero does not limit it.
    pub interval: Duration,
}

const MAX_LOGPROBS: usize = 100;

/// Events a stream holds before its row pauses.
const QUEUE: usize = 256;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended its turn, or a stop string appeared.
    Stop,
    /// `max_tokens` were produced.
    Length,
    /// The model's context is full.
    Context,
    /// Stopped by the caller, who wanted what there is: [`Stream::stop`], or a cancel with [`OnCancel::Stop`].
    Cancelled,
    /// The time was up, with [`OnCancel::Stop`].
    Timeout,
}

/// A piece of the answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chunk {
    /// Whole characters, possibly none (a token may not complete one yet).
    pub text: String,
    /// Reasoning, where the model's template marks it; it comes before the text.
    pub reasoning: String,
    /// The tokens this piece comes from.
    pub token_ids: Vec<u32>,
    /// One per token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

/// The end of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Why it ended.
    pub finish: Finish,
    /// Which stop string was found, as an index into the request's.
    pub stop_index: Option<usize>,
    /// Tokens of the prompt as the model saw it.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were cut off, with `truncate`.
    pub dropped_tokens: usize,
    /// Prompt tokens that did not have to be computed.
    pub cached_tokens: usize,
    /// New tokens, without the one that ends a turn.
    pub completion_tokens: usize,
    /// The seed in use, when tokens were drawn.
    pub seed: Option<u64>,
    /// Time by phase.
    pub timings: Timings,
    /// Which model answered; `None` when the request ended before it had one.
    pub provenance: Option<Arc<Provenance>>,
}

/// What began as a call of a tool and is none that could be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RejectedCall {
    /// The model's text, marks included.
    pub raw: String,
    /// What is wrong with it.
    pub reason: RejectReason,
}

/// What a stream yields: chunks and calls, then exactly one `Finished`, unless it ends in an error.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// More of the answer.
    Chunk(Chunk),
    /// A call of one of the request's tools, complete.
    ToolCall(ToolCall),
    /// A call that could not be read. The stream goes on.
    RejectedCall(RejectedCall),
    /// The end; the row's memory is back and the model's use has ended.
    Finished(Summary),
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text, without the stop string that ended it.
    pub text: String,
    /// The reasoning, where the model's template marks it.
    pub reasoning: String,
    /// Calls of the request's tools, in order.
    pub tool_calls: Vec<ToolCall>,
    /// Calls that could not be read.
    pub rejected_calls: Vec<RejectedCall>,
    /// Its tokens. With a stop string, those that spelled it are included.
    pub token_ids: Vec<u32>,
    /// One per token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub summary: Summary,
}

/// The events of one generation. Dropping it cancels the generation.
pub struct Stream {
    receiver: mpsc::UnboundedReceiver<Result<Event>>,
    shares: Arc<Shares>,
    ended: bool,
}

/// Ends a [`Stream`] while another thread reads it. Cheap to clone; it does not keep the generation going.
#[derive(Clone)]
pub struct StreamControl {
    shares: Arc<Shares>,
}

impl StreamControl {
    /// As [`Stream::cancel`].
    pub fn cancel(&self) {
        self.shares.link.cancel();
    }

    /// As [`Stream::stop`].
    pub fn stop(&self) {
        self.shares.stop();
    }
}

impl std::fmt::Debug for StreamControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StreamControl")
    }
}

/// What the reader and the row share.
struct Shares {
    /// Events sent and not read.
    queued: AtomicUsize,
    /// The row found no room and waits for the reader.
    stalled: AtomicBool,
    /// Tokens sent.
    sent: AtomicUsize,
    /// A cancel or a timeout ends the stream with what there is, instead of an error.
    stop: AtomicBool,
    link: Link,
}

impl Shares {
    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.link.cancel();
    }

    /// How the stream ends when its token has fired.
    fn interrupted(&self) -> Result<Finish> {
        match self.link.token.reason() {
            Some(reason) if self.stop.load(Ordering::Acquire) && !self.link.residency.is_closed() => Ok(match reason {
                CancelReason::Cancelled => Finish::Cancelled,
                CancelReason::Timeout => Finish::Timeout,
            }),
            _ => Err(self.link.interrupted()),
        }
    }

    /// How the stream ends when `error` came up outside its row.
    fn failed(&self, error: Error) -> Result<Finish> {
        let over = matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Timeout) && self.link.token.is_cancelled();
        if over { self.interrupted() } else { Err(error) }
    }
}

impl Stream {
    /// The next event; `None` after the terminal one. Works on any executor.
    pub async fn next(&mut self) -> Option<Result<Event>> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    /// The rest of the answer as one value.
    ///
    /// # Errors
    /// The stream's own error.
    pub async fn collect(mut self) -> Result<Generation> {
        let (mut whole, mut tool_calls, mut rejected_calls) = (Chunk::default(), Vec::new(), Vec::new());
        while let Some(event) = self.next().await {
            match event? {
                Event::Chunk(chunk) => {
                    whole.text.push_str(&chunk.text);
                    whole.reasoning.push_str(&chunk.reasoning);
                    whole.token_ids.extend(chunk.token_ids);
                    whole.logprobs.extend(chunk.logprobs);
                }
                Event::ToolCall(call) => tool_calls.push(call),
                Event::RejectedCall(call) => rejected_calls.push(call),
                Event::Finished(summary) => {
                    let Chunk { text, reasoning, token_ids, logprobs } = whole;
                    return Ok(Generation { text, reasoning, tool_calls, rejected_calls, token_ids, logprobs, summary });
                }
            }
        }
        Err(Error::internal("a stream ended without its terminal event"))
    }

    /// Ends the generation at its next step. The stream still yields its terminal event: an error of kind `Cancelled`.
    pub fn cancel(&self) {
        self.shares.link.cancel();
    }

    /// Ends the generation at its next step with what there is: the terminal event is `Finished`, with [`Finish::Cancelled`].
    pub fn stop(&self) {
        self.shares.stop();
    }

    /// What ends the generation from elsewhere, while this value is being read.
    #[must_use]
    pub fn control(&self) -> StreamControl {
        StreamControl { shares: Arc::clone(&self.shares) }
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Event>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = match self.receiver.poll_recv(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(event) => event,
        };
        self.shares.queued.fetch_sub(1, Ordering::SeqCst);
        if self.shares.stalled.swap(false, Ordering::SeqCst) {
            self.shares.link.residency.device().wake();
        }
        // The sender vanished without a word: its task was dropped with the engine.
        let event = event.unwrap_or_else(|| Err(closed()));
        self.ended = matches!(event, Ok(Event::Finished(_)) | Err(_));
        Poll::Ready(Some(event))
    }
}

impl futures_core::Stream for Stream {
    type Item = Result<Event>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_event(context)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.ended {
            self.cancel();
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("ended", &self.ended).finish_non_exhaustive()
    }
}

/// Checks the request and starts its way: admission on the engine's thread, then rows on the device.
pub(super) fn start(shared: &Arc<Shared>, request: GenerateRequest) -> Result<Stream> {
    request.check(shared.residency.limits())?;
    let stops = StopMatcher::new(&request.stop)?;
    let (link, place) = Link::open(shared, &request.options)?;
    let began = Instant::now();
    let (residency, token, id) = (Arc::clone(&link.residency), link.token.clone(), place.id);
    // A row pauses when its reader is QUEUE events behind; what one step yields, and the end, always has room.
    let (sender, receiver) = mpsc::unbounded_channel();
    let stop = AtomicBool::new(request.options.on_cancel == OnCancel::Stop);
    let shares =
        Arc::new(Shares { queued: AtomicUsize::new(0), stalled: AtomicBool::new(false), sent: AtomicUsize::new(0), stop, link });
    let stream = Stream { receiver, shares: Arc::clone(&shares), ended: false };
    residency.clone().spawn(async move {
        let prepared = residency.unless_stuck(prepare(&residency, request, &token, began, stops, place)).await;
        let mut row = match prepared {
            Ok(row) => row,
            Err(error) => {
                let event = shares.failed(error).map(|finish| Event::Finished(Summary::empty(finish, began)));
                return send(&sender, &shares, event);
            }
        };
        let (ended, end) = oneshot::channel();
        let last_word = sender.clone();
        row.out = Some(Out { sender, shares: Arc::clone(&shares), _ended: ended });
        let (prompt_tokens, dropped_tokens) = (row.prompt_tokens, row.dropped);
        residency.device().add(id, Task::Generate(Box::new(row)));
        tokio::select! {
            biased;
            _ = end => {}
            // Whatever the device still says comes after the terminal event, and is not looked at.
            error = shares.link.given_up() => {
                let completion_tokens = shares.sent.load(Ordering::SeqCst);
                let summary = |finish| Summary { prompt_tokens, dropped_tokens, completion_tokens, ..Summary::empty(finish, began) };
                send(&last_word, &shares, shares.failed(error).map(|finish| Event::Finished(summary(finish))));
            }
        }
    });
    Ok(stream)
}

fn send(sender: &mpsc::UnboundedSender<Result<Event>>, shares: &Shares, event: Result<Event>) {
    shares.queued.fetch_add(1, Ordering::SeqCst);
    if let Ok(Event::Chunk(chunk)) = &event {
        shares.sent.fetch_add(chunk.token_ids.len(), Ordering::SeqCst);
    }
    // A reader that has gone is seen before the next step.
    let _ = sender.send(event);
}

impl Summary {
    /// Of a request that ended before anything was computed for it.
    fn empty(finish: Finish, began: Instant) -> Self {
        Self {
            finish,
            stop_index: None,
            prompt_tokens: 0,
            dropped_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            seed: None,
            timings: Timings { total_s: began.elapsed().as_secs_f64(), ..Timings::default() },
            provenance: None,
        }
    }
}

/// Everything before the device: the model, the prompt's tokens, the sampler.
async fn prepare(
    residency: &Arc<Residency>,
    request: GenerateRequest,
    token: &CancelToken,
    began: Instant,
    stops: StopMatcher,
    place: Place,
) -> Result<GenerateRow> {
    let used = residency.acquire(&request.model, Purpose::Generate, &request.options, token).await?;
    let (spec, text) = (Arc::clone(&used.model.spec), used.model.text.clone());
    let (context, prompt, render) = (spec.context, request.prompt, request.render);
    let limits = (request.truncate, request.max_tokens);
    if let Prompt::Tokens(ids) = &prompt
        && let Some(id) = ids.iter().find(|&&id| usize::try_from(id).is_ok_and(|id| id >= spec.vocabulary))
    {
        return Err(Error::invalid(format!(
            "token id {id} of the prompt is outside the model's vocabulary of {}",
            spec.vocabulary
        )));
    }
    let read = residency.blocking(token, {
        let (text, format, call_bytes) = (text.clone(), request.format, residency.limits().call_bytes);
        move || read_prompt(&text, &prompt, &render, format, call_bytes)
    });
    let Read { ids, parser, decoder } = read.await?;
    let (ids, dropped) = fit(ids, context, limits.0)?;
    residency.check_cache(&spec, ids.len().saturating_add(limits.1.unwrap_or(0)), "lower max_tokens, shorten the prompt")?;
    let room = context - ids.len();
    let (limit, at_limit) = match limits.1 {
        Some(max) if max <= room => (max, Ending::Length),
        _ => (room, Ending::Context),
    };
    let greedy = request.sampling.is_greedy();
    let sampler = Sampler::new(&request.sampling, spec.vocabulary)?;
    let direct = greedy && request.logprobs.is_none() && (request.sampling.repetition_penalty - 1.0).abs() < f32::EPSILON;
    let queue = began.elapsed().saturating_sub(used.load.unwrap_or_default());
    Ok(GenerateRow {
        slot: used.model.slot,
        seed: (!greedy).then(|| sampler.seed()),
        sampler,
        direct,
        logprobs: request.logprobs,
        pending: VecDeque::new(),
        prompt_tokens: ids.len(),
        dropped,
        seen: ids,
        produced: 0,
        limit,
        at_limit,
        eos: text.tokenizer.eos_ids().to_vec(),
        decoder,
        parser,
        stops,
        stop_index: None,
        chunk: Chunk::default(),
        coalesce: request.coalesce,
        sent: None,
        reuse: request.prompt_cache,
        cached: 0,
        out: None,
        began,
        queue,
        started: None,
        first: None,
        last: None,
        held: Some((used, place)),
    })
}

/// A prompt as the model gets it, and how its answer is to be read.
struct Read {
    ids: Vec<u32>,
    /// Tells reasoning and calls from the answer, where there can be any.
    parser: Option<ChatParser>,
    decoder: TextStream,
}

fn read_prompt(
    text: &Text,
    prompt: &Prompt,
    render: &RenderOptions,
    format: Option<ChatFormat>,
    call_bytes: usize,
) -> Result<Read> {
    let Prompt::Chat(messages) = prompt else {
        return Ok(Read { ids: prompt_tokens(text, prompt, render)?, parser: None, decoder: text.tokenizer.stream(true) });
    };
    let template = text.template()?;
    let rendered = template.encode(messages, render)?;
    let format = format.unwrap_or_else(|| template.format());
    let given = render.tools.as_ref().and_then(serde_json::Value::as_array).is_some_and(|tools| !tools.is_empty());
    let tools = given && format.tools.is_some();
    if !tools && format.reasoning.is_none() {
        return Ok(Read { ids: rendered.encoding.ids, parser: None, decoder: text.tokenizer.stream(true) });
    }
    let options = ParserOptions {
        tools: render.tools.clone(),
        in_reasoning: format.opens_reasoning(&rendered.text),
        max_call_bytes: call_bytes,
        ..ParserOptions::default()
    };
    let parser = Some(ChatParser::new(&format, &options)?);
    let decoder = text.tokenizer.stream_keeping(&format.kept_tokens(&text.tokenizer, tools));
    Ok(Read { ids: rendered.encoding.ids, parser, decoder })
}

pub(super) fn prompt_tokens(text: &Text, prompt: &Prompt, render: &RenderOptions) -> Result<Vec<u32>> {
    match prompt {
        Prompt::Chat(messages) => Ok(text.template()?.encode(messages, render)?.encoding.ids),
        Prompt::Raw(raw) => Ok(text.tokenizer.encode(raw, EncodeOptions { add_special: true, parse_special: true })?.ids),
        Prompt::Tokens(ids) => Ok(ids.clone()),
    }
}

/// The prompt within the context, and how many tokens were cut.
fn fit(mut ids: Vec<u32>, context: usize, truncate: Truncate) -> Result<(Vec<u32>, usize)> {
    if ids.is_empty() {
        return Err(Error::invalid("the prompt has no tokens; give some text"));
    }
    let over = ids.len().saturating_sub(context);
    match truncate {
        _ if over == 0 => Ok((ids, 0)),
        Truncate::Error => Err(Error::invalid(format!(
            "the prompt has {} tokens and the model's context is {context}; shorten it, or ask for truncation",
            ids.len()
        ))),
        Truncate::End => {
            ids.truncate(context);
            Ok((ids, over))
        }
        Truncate::Start => Ok((ids.split_off(over), over)),
    }
}
