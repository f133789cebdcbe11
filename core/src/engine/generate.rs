//! generate: a prompt becomes a stream of text.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use super::backend::{Chooser, Slot};
use super::residency::{Purpose, Residency, Used};
use super::thread::{Ending, RowTask};
use super::{RequestOptions, Shared, Timings, closed};
use crate::cancel::CancelToken;
use crate::chat_template::{Message, RenderOptions};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Text;
use crate::options::{SamplingOptions, Truncate};
use crate::sampler::{Sampler, TokenLogprobs, logprobs};
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
            sampling: SamplingOptions::default(),
            max_tokens: None,
            stop: Vec::new(),
            logprobs: None,
            truncate: Truncate::default(),
            options: RequestOptions::default(),
        }
    }

    fn check(&self) -> Result<()> {
        self.sampling.check()?;
        if let Some(count) = self.logprobs.filter(|&count| count > MAX_LOGPROBS) {
            return Err(Error::invalid(format!("logprobs is {count}; at most {MAX_LOGPROBS} alternatives are reported")));
        }
        match &self.prompt {
            Prompt::Chat(messages) if messages.is_empty() => {
                Err(Error::invalid("the conversation has no messages; give at least one"))
            }
            Prompt::Raw(text) if text.is_empty() => Err(Error::invalid("the prompt is empty; give some text")),
            Prompt::Tokens(ids) if ids.is_empty() => Err(Error::invalid("the prompt has no tokens; give at least one")),
            _ => Ok(()),
        }
    }
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
}

/// A piece of the answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Chunk {
    /// Whole characters, possibly none (a token may not complete one yet).
    pub text: String,
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
}

/// What a stream yields: chunks, then exactly one `Finished`, unless it ends in an error.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// More of the answer.
    Chunk(Chunk),
    /// The end; the row's memory is back and the model's use has ended.
    Finished(Summary),
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The text, without the stop string that ended it.
    pub text: String,
    /// Its tokens. With a stop string, those that spelled it are included.
    pub token_ids: Vec<u32>,
    /// One per token, when asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// How it ended.
    pub summary: Summary,
}

/// The events of one generation. Dropping it cancels the generation.
pub struct Stream {
    receiver: mpsc::Receiver<Result<Event>>,
    link: Arc<Link>,
    ended: bool,
}

/// What the reader and the row share.
struct Link {
    /// The row found no room and waits for the reader.
    stalled: AtomicBool,
    token: CancelToken,
    residency: Arc<Residency>,
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
        let mut whole = Chunk::default();
        while let Some(event) = self.next().await {
            match event? {
                Event::Chunk(chunk) => {
                    whole.text.push_str(&chunk.text);
                    whole.token_ids.extend(chunk.token_ids);
                    whole.logprobs.extend(chunk.logprobs);
                }
                Event::Finished(summary) => {
                    return Ok(Generation { text: whole.text, token_ids: whole.token_ids, logprobs: whole.logprobs, summary });
                }
            }
        }
        Err(Error::internal("a stream ended without its terminal event"))
    }

    /// Ends the generation at its next step. The stream still yields its terminal event: an error of kind `Cancelled`.
    pub fn cancel(&self) {
        self.link.token.cancel();
        self.link.residency.device().wake();
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Event>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = match self.receiver.poll_recv(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(event) => event,
        };
        if self.link.stalled.swap(false, Ordering::AcqRel) {
            self.link.residency.device().wake();
        }
        // The sender vanished without a word: its task was dropped with the engine.
        let event = event.unwrap_or_else(|| Err(closed()));
        self.ended = !matches!(event, Ok(Event::Chunk(_)));
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
    request.check()?;
    let stops = StopMatcher::new(&request.stop)?;
    let began = Instant::now();
    let token = request.options.token(&shared.alive);
    let residency = Arc::clone(&shared.residency);
    // One place more than the row may fill: the terminal event always has room.
    let (sender, receiver) = mpsc::channel(QUEUE + 1);
    let link = Arc::new(Link { stalled: AtomicBool::new(false), token: token.clone(), residency: Arc::clone(&residency) });
    let task_link = Arc::clone(&link);
    residency.clone().spawn(async move {
        match prepare(&residency, request, &token, began, stops).await {
            Ok(mut row) => {
                let (ended, end) = oneshot::channel();
                row.out = Some(Out { sender, link: task_link, _ended: ended });
                residency.device().add_row(Box::new(row));
                // Cancels and deadlines must reach a device that sleeps because the row waits for its reader.
                tokio::select! {
                    _ = token.cancelled() => residency.device().wake(),
                    _ = end => {}
                }
            }
            Err(error) => {
                let _ = sender.try_send(Err(error));
            }
        }
    });
    Ok(Stream { receiver, link, ended: false })
}

/// Everything before the device: the model, the prompt's tokens, the sampler.
async fn prepare(
    residency: &Arc<Residency>,
    request: GenerateRequest,
    token: &CancelToken,
    began: Instant,
    stops: StopMatcher,
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
    let tokens = residency.blocking(token, {
        let text = text.clone();
        move || prompt_tokens(&text, &prompt, &render)
    });
    let (ids, dropped) = fit(tokens.await?, context, limits.0)?;
    // Hazard A19: a conversation whose keys and values alone exceed the budget is refused before anything is allocated.
    let cache = spec.kv_bytes(ids.len() + limits.1.unwrap_or(0));
    if cache > residency.pool().budget() {
        return Err(Error::new(
            ErrorKind::BudgetExceeded,
            format!(
                "{} tokens need {cache} bytes of keys and values and the pool's budget is {}; lower max_tokens, shorten the prompt or raise the budget",
                ids.len() + limits.1.unwrap_or(0),
                residency.pool().budget()
            ),
        ));
    }
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
        seen: ids.clone(),
        prompt: ids,
        produced: 0,
        limit,
        at_limit,
        eos: text.tokenizer.eos_ids().to_vec(),
        decoder: text.tokenizer.stream(true),
        stops,
        stop_index: None,
        chunk: Chunk::default(),
        out: None,
        began,
        queue,
        started: None,
        first: None,
        last: None,
        used: Some(used),
    })
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

struct Out {
    sender: mpsc::Sender<Result<Event>>,
    link: Arc<Link>,
    /// Its drop tells the watcher of cancels that the row has ended.
    _ended: oneshot::Sender<()>,
}

/// A generation on the device thread.
struct GenerateRow {
    slot: Slot,
    prompt: Vec<u32>,
    /// Prompt and answer so far, for the repetition penalty.
    seen: Vec<u32>,
    sampler: Sampler,
    seed: Option<u64>,
    /// The device may choose the likeliest token itself.
    direct: bool,
    logprobs: Option<usize>,
    /// Log-probabilities of tokens chosen but not taken yet.
    pending: VecDeque<TokenLogprobs>,
    prompt_tokens: usize,
    dropped: usize,
    produced: usize,
    limit: usize,
    /// What reaching `limit` means.
    at_limit: Ending,
    eos: Vec<u32>,
    decoder: TextStream,
    stops: StopMatcher,
    stop_index: Option<usize>,
    chunk: Chunk,
    out: Option<Out>,
    began: Instant,
    queue: Duration,
    started: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    used: Option<Used>,
}

impl Chooser for GenerateRow {
    fn is_greedy(&self) -> bool {
        self.direct
    }

    fn is_last(&self) -> bool {
        self.produced + 1 >= self.limit
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let token = self.sampler.sample(logits, &self.seen)?;
        if let Some(count) = self.logprobs {
            self.pending.push_back(logprobs(logits, token, count)?);
        }
        Ok(token)
    }
}

impl GenerateRow {
    fn out(&self) -> Option<&Out> {
        self.out.as_ref()
    }

    /// Passes text through the stop strings into the chunk; true when one was found.
    fn add_text(&mut self, text: &str) -> bool {
        let step = self.stops.push(text);
        self.chunk.text.push_str(&step.text);
        self.stop_index = step.stop;
        step.stop.is_some()
    }

    fn send_chunk(&mut self) {
        let chunk = std::mem::take(&mut self.chunk);
        if chunk != Chunk::default()
            && let Some(out) = &self.out
        {
            // Room was checked before the step; a reader that has gone is seen at the next one.
            let _ = out.sender.try_send(Ok(Event::Chunk(chunk)));
        }
    }

    fn summary(&self, finish: Finish) -> Summary {
        let seconds = |from: Option<Instant>, to: Option<Instant>| Some(to?.duration_since(from?).as_secs_f64());
        Summary {
            finish,
            stop_index: self.stop_index,
            prompt_tokens: self.prompt_tokens,
            dropped_tokens: self.dropped,
            cached_tokens: 0,
            completion_tokens: self.produced,
            seed: self.seed,
            timings: Timings {
                queue_s: self.queue.as_secs_f64(),
                load_s: self.used.as_ref().and_then(|used| used.load).map(|load| load.as_secs_f64()),
                prefill_s: seconds(self.started, self.first),
                decode_s: seconds(self.first, self.last).filter(|_| self.produced > 1),
                total_s: self.began.elapsed().as_secs_f64(),
            },
        }
    }
}

impl Drop for GenerateRow {
    /// A row that goes without its terminal event (its `finish` panicked) must not leave the reader waiting.
    fn drop(&mut self) {
        self.used = None;
        if let Some(out) = self.out.take() {
            let _ = out.sender.try_send(Err(Error::internal("the generation ended without a result")));
        }
    }
}

impl RowTask for GenerateRow {
    fn slot(&self) -> Slot {
        self.slot
    }

    fn take_prompt(&mut self) -> Vec<u32> {
        // Waiting for other rows and jobs on the device is queueing too.
        self.queue = self.began.elapsed().saturating_sub(self.used.as_ref().and_then(|used| used.load).unwrap_or_default());
        self.started = Some(Instant::now());
        std::mem::take(&mut self.prompt)
    }

    fn interrupted(&self) -> Option<Ending> {
        let out = self.out()?;
        if out.link.token.is_cancelled() || out.sender.is_closed() {
            return Some(Ending::Interrupted);
        }
        // Nothing to do at all: max_tokens 0, or a prompt that fills the context.
        (self.limit == 0).then(|| self.at_limit.clone())
    }

    fn has_room(&self) -> bool {
        let Some(out) = self.out() else { return true };
        if out.sender.capacity() > 1 {
            return true;
        }
        // Said before looking again, so that a reader between the two looks sees it.
        out.link.stalled.store(true, Ordering::Release);
        out.sender.capacity() > 1
    }

    fn on_prefill(&mut self, _done: usize) {}

    fn on_token(&mut self, token: u32) -> Result<Option<Ending>> {
        let now = Instant::now();
        self.first.get_or_insert(now);
        let logprobs = self.pending.pop_front();
        if self.eos.contains(&token) {
            return Ok(Some(Ending::Stop));
        }
        self.last = Some(now);
        self.produced += 1;
        self.seen.push(token);
        self.chunk.token_ids.push(token);
        self.chunk.logprobs.extend(logprobs);
        let text = self.decoder.push(token)?;
        let stopped = text.is_some_and(|text| self.add_text(&text));
        let ending = if stopped {
            Some(Ending::Stop)
        } else if self.produced >= self.limit {
            Some(self.at_limit.clone())
        } else {
            None
        };
        if ending.is_none() {
            self.send_chunk();
        }
        Ok(ending)
    }

    fn finish(mut self: Box<Self>, ending: Result<Ending>) {
        let finish = match ending {
            Ok(Ending::Stop) => Ok(Finish::Stop),
            Ok(Ending::Length) => Ok(Finish::Length),
            Ok(Ending::Context) => Ok(Finish::Context),
            Ok(Ending::Interrupted) => Err(self.out().map_or_else(closed, |out| out.link.residency.interrupted(&out.link.token))),
            Err(error) => Err(error),
        };
        let event = finish.and_then(|finish| {
            // Text held back for an unfinished character or a possible stop string comes out now.
            if self.stop_index.is_none() {
                let rest = self.decoder.finish()?.unwrap_or_default();
                if !self.add_text(&rest) {
                    let held = self.stops.finish().unwrap_or_default();
                    self.chunk.text.push_str(&held);
                }
            }
            Ok(Event::Finished(self.summary(finish)))
        });
        // The use ends before the terminal event is delivered (invariant 7).
        self.used = None;
        let Some(out) = self.out.take() else { return };
        let chunk = std::mem::take(&mut self.chunk);
        if event.is_ok() && chunk != Chunk::default() {
            let _ = out.sender.try_send(Ok(Event::Chunk(chunk)));
        }
        let _ = out.sender.try_send(event);
    }
}
