//! A generation on the device thread: chooses its tokens, turns them into text, and delivers them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::{Chunk, Coalesce, Event, Finish, QUEUE, RejectedCall, Shares, Summary, send};
use crate::chat_output::{ChatEvent, ChatParser};
use crate::engine::backend::{CacheBytes, Chooser, Slot};
use crate::engine::request::Place;
use crate::engine::residency::Used;
use crate::engine::work::{Ending, Generating, Request, Tell};
use crate::engine::{Timings, closed};
use crate::error::{Error, Result};
use crate::sampler::{Sampler, TokenLogprobs, logprobs};
use crate::text_stream::{StopMatcher, TextStream};

pub(super) struct Out {
    pub(super) sender: mpsc::UnboundedSender<Result<Event>>,
    pub(super) shares: Arc<Shares>,
    /// Its drop tells the watcher of cancels that the row has ended.
    pub(super) _ended: oneshot::Sender<()>,
}

/// A generation on the device thread.
pub(super) struct GenerateRow {
    pub(super) slot: Slot,
    /// Prompt and answer so far.
    pub(super) seen: Vec<u32>,
    pub(super) sampler: Sampler,
    pub(super) seed: Option<u64>,
    /// The device may choose the likeliest token itself.
    pub(super) direct: bool,
    pub(super) logprobs: Option<usize>,
    /// Log-probabilities of tokens chosen but not taken yet.
    pub(super) pending: VecDeque<TokenLogprobs>,
    pub(super) prompt_tokens: usize,
    pub(super) dropped: usize,
    pub(super) produced: usize,
    pub(super) limit: usize,
    /// What reaching `limit` means.
    pub(super) at_limit: Ending,
    pub(super) eos: Vec<u32>,
    pub(super) decoder: TextStream,
    /// Tells reasoning and calls from the answer, where there can be any.
    pub(super) parser: Option<ChatParser>,
    pub(super) stops: StopMatcher,
    pub(super) stop_index: Option<usize>,
    pub(super) chunk: Chunk,
    pub(super) coalesce: Coalesce,
    /// When the last chunk went out.
    pub(super) sent: Option<Instant>,
    pub(super) reuse: bool,
    pub(super) cached: usize,
    pub(super) out: Option<Out>,
    pub(super) began: Instant,
    pub(super) queue: Duration,
    pub(super) started: Option<Instant>,
    pub(super) first: Option<Instant>,
    pub(super) last: Option<Instant>,
    /// The use of the model and the place in the engine, until the terminal event.
    pub(super) held: Option<(Used, Place)>,
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
    fn load(&self) -> Option<Duration> {
        self.held.as_ref().and_then(|(used, _)| used.load)
    }

    fn out(&self) -> Option<&Out> {
        self.out.as_ref()
    }

    /// Passes text through the stop strings and on; true when one was found.
    fn add_text(&mut self, text: &str) -> bool {
        let step = self.stops.push(text);
        self.read(&step.text);
        self.stop_index = step.stop;
        step.stop.is_some()
    }

    /// Takes text that is the answer's for sure.
    fn read(&mut self, text: &str) {
        match &mut self.parser {
            None => self.chunk.text.push_str(text),
            Some(parser) => {
                let events = parser.push(text);
                self.take_events(events);
            }
        }
    }

    fn take_events(&mut self, events: Vec<ChatEvent>) {
        for event in events {
            match event {
                ChatEvent::Text(text) => self.chunk.text.push_str(&text),
                ChatEvent::Reasoning(text) => self.chunk.reasoning.push_str(&text),
                ChatEvent::ToolCall(call) => self.send(Event::ToolCall(call)),
                ChatEvent::RejectedToolCall { raw, reason } => self.send(Event::RejectedCall(RejectedCall { raw, reason })),
            }
        }
    }

    /// Sends an event after the text before it.
    fn send(&mut self, event: Event) {
        self.send_chunk();
        if let Some(out) = &self.out {
            send(&out.sender, &out.shares, Ok(event));
        }
    }

    /// Whether the chunk goes out now.
    fn is_due(&self, now: Instant) -> bool {
        let Coalesce { tokens, interval } = self.coalesce;
        let Some(sent) = self.sent else { return true };
        self.chunk.token_ids.len() >= tokens || (!interval.is_zero() && now.duration_since(sent) >= interval)
    }

    fn send_chunk(&mut self) {
        self.sent = Some(Instant::now());
        let chunk = std::mem::take(&mut self.chunk);
        if chunk != Chunk::default()
            && let Some(out) = &self.out
        {
            send(&out.sender, &out.shares, Ok(Event::Chunk(chunk)));
        }
    }

    fn summary(&self, finish: Finish) -> Summary {
        let seconds = |from: Option<Instant>, to: Option<Instant>| Some(to?.duration_since(from?).as_secs_f64());
        Summary {
            finish,
            stop_index: self.stop_index,
            prompt_tokens: self.prompt_tokens,
            dropped_tokens: self.dropped,
            cached_tokens: self.cached,
            completion_tokens: self.produced,
            seed: self.seed,
            timings: Timings {
                queue_s: self.queue.as_secs_f64(),
                load_s: self.load().map(|load| load.as_secs_f64()),
                prefill_s: seconds(self.started, self.first),
                decode_s: seconds(self.first, self.last).filter(|_| self.produced > 1),
                total_s: self.began.elapsed().as_secs_f64(),
            },
            provenance: self.held.as_ref().map(|(used, _)| Arc::clone(&used.model.provenance)),
        }
    }
}

impl Drop for GenerateRow {
    /// A row that goes without its terminal event (its `finish` panicked) must not leave the reader waiting.
    fn drop(&mut self) {
        self.held = None;
        if let Some(out) = self.out.take() {
            send(&out.sender, &out.shares, Err(Error::internal("the generation ended without a result")));
        }
    }
}

impl Request for GenerateRow {
    fn slot(&self) -> Slot {
        self.slot
    }

    fn interrupted(&self) -> Option<Ending> {
        let out = self.out()?;
        if out.shares.link.token.is_cancelled() || out.sender.is_closed() {
            return Some(Ending::Interrupted);
        }
        // Nothing to do at all: max_tokens 0, or a prompt that fills the context.
        (self.limit == 0).then(|| self.at_limit.clone())
    }

    fn begun(&mut self) {
        // Waiting for other requests on the device is queueing too.
        self.queue = self.began.elapsed().saturating_sub(self.load().unwrap_or_default());
        self.started = Some(Instant::now());
        if let Some(out) = &self.out {
            out.shares.link.set_begun();
        }
    }

    fn account(&self) -> Option<Tell> {
        self.held.as_ref().map(|(used, _)| used.model.account())
    }

    fn finish(mut self: Box<Self>, ending: Result<Ending>) {
        let interrupted = self.out().filter(|out| out.shares.link.token.is_cancelled()).map(|out| out.shares.interrupted());
        let finish = match (ending, interrupted) {
            // A cancel that races the end wins (spec C6).
            (Err(error), _) | (Ok(_), Some(Err(error))) => Err(error),
            (Ok(Ending::Stop), _) => Ok(Finish::Stop),
            (Ok(Ending::Length), _) => Ok(Finish::Length),
            (Ok(Ending::Context), _) => Ok(Finish::Context),
            (Ok(Ending::Interrupted), Some(finish)) => finish,
            // Nobody listens.
            (Ok(Ending::Interrupted), None) => Err(closed()),
        };
        let event = finish.and_then(|finish| {
            // Text held back for an unfinished character or a possible stop string comes out now.
            if self.stop_index.is_none() {
                let rest = self.decoder.finish()?.unwrap_or_default();
                if !self.add_text(&rest) {
                    let held = self.stops.finish().unwrap_or_default();
                    self.read(&held);
                }
            }
            if let Some(mut parser) = self.parser.take() {
                let events = parser.finish();
                self.take_events(events);
            }
            self.send_chunk();
            Ok(Event::Finished(self.summary(finish)))
        });
        // The use ends before the terminal event is delivered (invariant 7).
        self.held = None;
        if let Some(out) = self.out.take() {
            send(&out.sender, &out.shares, event);
        }
    }
}

impl Generating for GenerateRow {
    fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    fn take_prompt(&mut self) -> Vec<u32> {
        self.seen.clone()
    }

    fn keeps_prompt(&self) -> bool {
        self.reuse
    }

    fn on_cached(&mut self, tokens: usize) {
        self.cached = tokens;
    }

    fn has_room(&self) -> bool {
        let Some(out) = self.out() else { return true };
        let has_room = || out.shares.queued.load(Ordering::SeqCst) < QUEUE;
        if has_room() {
            return true;
        }
        // Said before looking again, so that a reader between the two looks sees it.
        out.shares.stalled.store(true, Ordering::SeqCst);
        has_room()
    }

    fn may_hold(&self, tokens: usize, held: CacheBytes) -> bool {
        self.held.as_ref().is_none_or(|(used, _)| used.model.has_room(tokens, held))
    }

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
        if ending.is_none() && self.is_due(now) {
            self.send_chunk();
        }
        Ok(ending)
    }
}
