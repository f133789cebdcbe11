//! A generation's request, and the stream of its events.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_core::Stream as _;
use hob::chat_output::{ChatFormat, RejectReason};
use hob::chat_template::{Message, RenderOptions};
use hob::engine::{Chunk, Coalesce, Engine, Event, Finish, GenerateRequest, Prompt, Stream, StreamControl, Summary};
use hob::options::SamplingOptions;

use crate::error::{Result, json, parse};
use crate::live::{Live, Type};
use crate::types::{RawRequestOptions, RawTruncate, RawUsage, seconds_of, size};
use crate::wait::Single;

/// What a model continues.
#[derive(Debug, Clone, uniffi::Enum)]
pub enum RawPrompt {
    /// A conversation.
    Chat {
        /// A list in OpenAI's shapes.
        messages_json: String,
        /// Tools, documents, template variables: the fields of the core's `RenderOptions`.
        render_json: Option<String>,
    },
    /// Text as it is.
    Raw {
        /// The text.
        text: String,
    },
    /// Tokens as they are.
    Tokens {
        /// Their ids.
        ids: Vec<u32>,
    },
}

impl RawPrompt {
    pub(crate) fn core(self) -> hob::Result<(Prompt, RenderOptions)> {
        Ok(match self {
            Self::Chat { messages_json, render_json } => {
                let render = parse("the template's options", render_json.as_deref())?.unwrap_or_default();
                (Prompt::Chat(Message::list_from_json(&messages_json)?), render)
            }
            Self::Raw { text } => (Prompt::Raw(text), RenderOptions::default()),
            Self::Tokens { ids } => (Prompt::Tokens(ids), RenderOptions::default()),
        })
    }
}

/// How tokens are chosen.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawSampling {
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Keep so many tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep this much probability.
    pub top_p: f32,
    /// Keep what is this likely beside the likeliest.
    pub min_p: f32,
    /// The penalty of what was said.
    pub repetition_penalty: f32,
    /// How far it looks back; 0 is all.
    pub repetition_window: u32,
    /// The seed; nothing draws one.
    pub seed: Option<u64>,
}

impl From<RawSampling> for SamplingOptions {
    fn from(raw: RawSampling) -> Self {
        Self {
            temperature: raw.temperature,
            top_k: raw.top_k,
            top_p: raw.top_p,
            min_p: raw.min_p,
            repetition_penalty: raw.repetition_penalty,
            repetition_window: raw.repetition_window,
            seed: raw.seed,
        }
    }
}

/// A request to generate.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawGenerate {
    /// The model's reference.
    pub model: String,
    /// What it continues.
    pub prompt: RawPrompt,
    /// How reasoning and calls are told from the answer: the core's `ChatFormat`; nothing asks the template.
    pub format_json: Option<String>,
    /// How tokens are chosen.
    pub sampling: RawSampling,
    /// New tokens at most.
    pub max_tokens: Option<u64>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Report log-probabilities with so many alternatives.
    pub logprobs: Option<u32>,
    /// What happens to a prompt that is too long.
    pub truncate: RawTruncate,
    /// Tokens of a chunk.
    pub chunk_tokens: u64,
    /// Seconds that the first of them may wait.
    pub chunk_s: f64,
    /// Whether the prompt cache serves.
    pub prompt_cache: bool,
    /// Cancel, timeout, loading.
    pub options: RawRequestOptions,
}

impl RawGenerate {
    pub(crate) fn core(self) -> hob::Result<GenerateRequest> {
        let (prompt, render) = self.prompt.core()?;
        let mut request = GenerateRequest::new(self.model, prompt);
        request.render = render;
        request.format = parse::<ChatFormat>("the format", self.format_json.as_deref())?;
        request.sampling = self.sampling.into();
        request.max_tokens = self.max_tokens.map(|count| size("max_tokens", count)).transpose()?;
        request.stop = self.stop;
        request.logprobs = self.logprobs.map(|count| size("logprobs", count.into())).transpose()?;
        request.truncate = self.truncate.into();
        request.coalesce = Coalesce {
            tokens: size("the tokens of a chunk", self.chunk_tokens)?,
            interval: if self.chunk_s == 0.0 { Duration::ZERO } else { seconds_of("the time of a chunk", self.chunk_s)? },
        };
        request.prompt_cache = self.prompt_cache;
        request.options = self.options.core()?;
        Ok(request)
    }
}

/// A token's log-probability.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawLogprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// Ids of the likeliest tokens.
    pub top_ids: Vec<u32>,
    /// Their log-probabilities.
    pub top_logprobs: Vec<f32>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawFinish {
    /// The model ended its turn, or a stop string appeared.
    Stop,
    /// `max_tokens` were produced.
    Length,
    /// The context is full.
    Context,
    /// Stopped by the caller.
    Cancelled,
    /// The time was up.
    Timeout,
}

/// The end of an answer.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawSummary {
    /// Why it ended.
    pub finish: RawFinish,
    /// Which stop string was found.
    pub stop_index: Option<u64>,
    /// Tokens and times.
    pub usage: RawUsage,
    /// Prompt tokens that did not have to be computed.
    pub cached_tokens: u64,
    /// New tokens.
    pub completion_tokens: u64,
    /// The seed in use.
    pub seed: Option<u64>,
    /// Which model answered, as JSON.
    pub provenance_json: Option<String>,
}

impl RawSummary {
    fn new(summary: &Summary) -> Result<Self> {
        Ok(Self {
            finish: match summary.finish {
                Finish::Stop => RawFinish::Stop,
                Finish::Length => RawFinish::Length,
                Finish::Context => RawFinish::Context,
                Finish::Cancelled => RawFinish::Cancelled,
                Finish::Timeout => RawFinish::Timeout,
            },
            stop_index: summary.stop_index.map(|index| index as u64),
            usage: RawUsage::new(summary.prompt_tokens, summary.dropped_tokens, &summary.timings),
            cached_tokens: summary.cached_tokens as u64,
            completion_tokens: summary.completion_tokens as u64,
            seed: summary.seed,
            provenance_json: summary.provenance.as_deref().map(json).transpose()?,
        })
    }
}

/// Why a call of a tool was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawRejectReason {
    /// The answer ended inside it.
    Incomplete,
    /// Over the limit.
    TooLarge,
    /// Not in the model's format.
    Malformed,
    /// Names no function.
    NoName,
    /// Names none of the request's tools.
    UnknownTool,
    /// Its arguments are no object.
    BadArguments,
    /// Of a later version.
    Other,
}

impl From<RejectReason> for RawRejectReason {
    fn from(reason: RejectReason) -> Self {
        match reason {
            RejectReason::Incomplete => Self::Incomplete,
            RejectReason::TooLarge => Self::TooLarge,
            RejectReason::Malformed => Self::Malformed,
            RejectReason::NoName => Self::NoName,
            RejectReason::UnknownTool => Self::UnknownTool,
            RejectReason::BadArguments => Self::BadArguments,
            _ => Self::Other,
        }
    }
}

/// What a stream yields.
#[derive(Debug, Clone, uniffi::Enum)]
pub enum RawEvent {
    /// More of the answer.
    Chunk {
        /// Whole characters.
        text: String,
        /// Reasoning, before the text.
        reasoning: String,
        /// The tokens it comes from.
        token_ids: Vec<u32>,
        /// One per token, when asked for.
        logprobs: Vec<RawLogprobs>,
    },
    /// A call of a tool.
    ToolCall {
        /// Which call.
        id: String,
        /// The tool.
        name: String,
        /// The text of a JSON object.
        arguments: String,
    },
    /// A call that could not be read.
    RejectedCall {
        /// The model's text.
        raw: String,
        /// What is wrong.
        reason: RawRejectReason,
        /// The same in words.
        message: String,
    },
    /// The end.
    Finished {
        /// How it ended.
        summary: RawSummary,
    },
}

impl RawEvent {
    fn new(event: Event) -> Result<Self> {
        Ok(match event {
            Event::Chunk(Chunk { text, reasoning, token_ids, logprobs }) => {
                let logprobs = logprobs.into_iter().map(|token| {
                    let (top_ids, top_logprobs) = token.top.into_iter().unzip();
                    RawLogprobs { logprob: token.logprob, top_ids, top_logprobs }
                });
                Self::Chunk { text, reasoning, token_ids, logprobs: logprobs.collect() }
            }
            Event::ToolCall(call) => Self::ToolCall { id: call.id, name: call.name, arguments: call.arguments },
            Event::RejectedCall(call) => {
                Self::RejectedCall { raw: call.raw, reason: call.reason.into(), message: call.reason.message().to_owned() }
            }
            Event::Finished(summary) => Self::Finished { summary: RawSummary::new(&summary)? },
        })
    }
}

/// The events of one generation. The last one to hold it cancels the generation.
#[derive(uniffi::Object)]
pub struct RawStream {
    reader: Single<Reader>,
    control: StreamControl,
    // A stream keeps its engine open.
    _engine: Engine,
    _live: Live,
}

impl RawStream {
    pub(crate) fn new(stream: Stream, engine: Engine) -> Arc<Self> {
        let control = stream.control();
        let reader = Single::new(Reader { stream, failed: None });
        Arc::new(Self { reader, control, _engine: engine, _live: Live::new(Type::Stream) })
    }
}

struct Reader {
    stream: Stream,
    /// The error that came behind events which had to be delivered first.
    failed: Option<hob::Error>,
}

impl Reader {
    /// All that is there, at least one event, in one go: a slow reader crosses the border less often.
    async fn next(&mut self) -> Result<Vec<RawEvent>> {
        if let Some(error) = self.failed.take() {
            return Err(error.into());
        }
        let Some(first) = self.stream.next().await else { return Ok(Vec::new()) };
        let mut events = vec![RawEvent::new(first?)?];
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(next)) = Pin::new(&mut self.stream).poll_next(&mut context) {
            match next {
                Ok(event) => events.push(RawEvent::new(event)?),
                Err(error) => self.failed = Some(error),
            }
        }
        Ok(events)
    }
}

#[uniffi::export]
impl RawStream {
    /// The next events, one at least; none after the terminal one.
    ///
    /// # Errors
    /// The generation's own, and `Busy` while another task reads.
    pub async fn next(&self) -> Result<Vec<RawEvent>> {
        self.reader.take("the stream")?.next().await
    }

    /// Ends the generation with `Cancelled`.
    ///
    /// # Errors
    /// None, as things are.
    pub fn cancel(&self) -> Result<()> {
        self.control.cancel();
        Ok(())
    }

    /// Ends the generation with what there is.
    ///
    /// # Errors
    /// None, as things are.
    pub fn stop(&self) -> Result<()> {
        self.control.stop();
        Ok(())
    }
}
