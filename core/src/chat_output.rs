//! A model's text to what it means: the answer, the reasoning, calls of tools.
//!
//! [`ChatParser`] takes the text of one answer in pieces and gives events. What it finds does not depend on how the text was
//! cut, and each character costs constant time. Nothing is lost and nothing comes twice: every character of the text is in
//! exactly one event, or in a mark (with the line breaks around it) that an event stands for.
//!
//! - **Reasoning** is told from the answer when the template marks it, at the beginning of an answer only: a tag that is talked
//!   about later is text. Templates that open the reasoning in the prompt are known by [`ChatFormat::opens_reasoning`].
//! - **Calls** are looked for when the request has tools, outside of reasoning. A call that is malformed, incomplete or too
//!   large, or names no tool of the request, becomes a [`ChatEvent::RejectedToolCall`] with its text; the stream goes on.
//! - Text is held back only while it may still become a mark.
//!
//! Marks that are special tokens must get into the text: [`ChatFormat::kept_tokens`] with
//! [`Tokenizer::stream_keeping`](crate::tokenizer::Tokenizer::stream_keeping).

mod call;
mod format;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::mem;

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::Serialize;
use serde_json::Value;

use crate::chat_template::{RenderOptions, ToolCall, tool_specs};
use crate::error::{Error, ErrorKind, Result};

use call::{Intent, Mistral, Pending, Progress, Tools};
use format::{CALLS, PYTHON, TAG};

pub use format::{ChatFormat, ReasoningMarks, ToolFormat};

/// A piece of what a model answers. Pieces of one kind that follow one another belong together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChatEvent {
    /// More of the answer; never empty.
    Text(String),
    /// More of the reasoning; never empty.
    Reasoning(String),
    /// A call of one of the request's tools. Its id is the model's own, or a new one of nine letters and digits; its
    /// arguments are a valid JSON object, as the model wrote it.
    ToolCall(ToolCall),
    /// What began as a call and is none that could be made.
    RejectedToolCall {
        /// The model's text, marks included; of a list, the one item.
        raw: String,
        /// What is wrong with it.
        reason: RejectReason,
    },
}

/// Why a call was rejected. Says nothing of the text itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RejectReason {
    /// The answer ended inside the call.
    Incomplete,
    /// The call is longer than [`ParserOptions::max_call_bytes`].
    TooLarge,
    /// It is not written as the format demands, or not valid JSON.
    Malformed,
    /// It names no function.
    NoName,
    /// It names a function that the request's tools do not have.
    UnknownTool,
    /// Its arguments are not a JSON object.
    BadArguments,
}

impl RejectReason {
    /// One sentence for people.
    #[must_use]
    pub fn message(self) -> &'static str {
        match self {
            Self::Incomplete => "the answer ended inside the call; raise max_tokens",
            Self::TooLarge => "the call is longer than max_call_bytes",
            Self::Malformed => "the call is not valid JSON, or not in the model's format",
            Self::NoName => "the call names no function",
            Self::UnknownTool => "the call names a function that is not among the request's tools",
            Self::BadArguments => "the call's arguments are not a JSON object",
        }
    }
}

impl std::fmt::Display for RejectReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.message())
    }
}

/// Longest call by default, in bytes: 1 MiB.
pub const MAX_CALL_BYTES: usize = 1 << 20;

/// Line breaks held back before a possible mark.
const MAX_BREAKS: usize = 64;

/// How an answer is read.
#[derive(Debug, Clone)]
pub struct ParserOptions {
    /// The request's tools, as in [`RenderOptions::tools`](crate::chat_template::RenderOptions). Without any, calls are not
    /// looked for: what looks like one is text.
    pub tools: Option<Value>,
    /// The prompt ends inside reasoning; see [`ChatFormat::opens_reasoning`].
    pub in_reasoning: bool,
    /// Longest call, in bytes. A longer one is rejected, and what follows is text.
    pub max_call_bytes: usize,
    /// Makes the ids of calls the same each time; `None` (the default) draws them. A conversation needs another seed for each
    /// turn, since ids must differ.
    pub id_seed: Option<u64>,
}

impl Default for ParserOptions {
    fn default() -> Self {
        Self { tools: None, in_reasoning: false, max_call_bytes: MAX_CALL_BYTES, id_seed: None }
    }
}

/// Reads one answer. Not for use by several threads at once; it holds at most one call and one mark of text.
#[derive(Debug)]
pub struct ChatParser {
    format: ChatFormat,
    /// `None` when calls are text.
    tools: Option<Tools>,
    limit: usize,
    ids: Ids,
    state: State,
    /// What may be found where the text stands now.
    marks: Vec<(String, Mark)>,
    /// Text that may become a mark, line breaks before it included; between Llama's calls, what parts them.
    held: String,
    /// The pending call.
    raw: String,
    /// Line breaks belong to the mark before them.
    after_mark: bool,
    /// The answer has begun: there was a text that is not blank, or a call.
    said: bool,
    out: Vec<ChatEvent>,
    /// Everything given out or understood, for tests.
    #[cfg(test)]
    accounted: String,
}

#[derive(Debug)]
enum State {
    Text,
    /// `fresh`: nothing has been reasoned yet.
    Reasoning {
        fresh: bool,
    },
    Call(Pending),
    /// Behind a call of Llama's; another one may follow.
    Gap,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Open,
    Close,
    Hermes,
    Python,
    Object,
    Mistral,
}

impl ChatParser {
    /// A parser for one answer.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for malformed tools or an empty reasoning mark,
    /// [`Io`](crate::ErrorKind::Io) when the system has no random numbers for ids.
    pub fn new(format: &ChatFormat, options: &ParserOptions) -> Result<Self> {
        if format.reasoning.as_ref().is_some_and(|marks| marks.open.is_empty() || marks.close.is_empty()) {
            return Err(Error::invalid("a reasoning mark is empty; set both, or reasoning to none"));
        }
        let tools = tool_specs(options.tools.as_ref())?;
        let state = match &format.reasoning {
            Some(_) if options.in_reasoning => State::Reasoning { fresh: true },
            _ => State::Text,
        };
        let mut parser = Self {
            format: format.clone(),
            tools: (format.tools.is_some() && !tools.is_empty()).then_some(Tools(tools)),
            limit: options.max_call_bytes,
            ids: Ids::new(options.id_seed)?,
            after_mark: matches!(state, State::Reasoning { .. }),
            state,
            marks: Vec::new(),
            held: String::new(),
            raw: String::new(),
            said: false,
            out: Vec::new(),
            #[cfg(test)]
            accounted: String::new(),
        };
        parser.find_marks();
        Ok(parser)
    }

    /// A parser for the answer to `prompt`, a text rendered with `options`. Ids of calls are drawn.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_prompt(format: &ChatFormat, prompt: &str, options: &RenderOptions) -> Result<Self> {
        let in_reasoning = format.opens_reasoning(prompt);
        Self::new(format, &ParserOptions { tools: options.tools.clone(), in_reasoning, ..ParserOptions::default() })
    }

    /// Takes the next piece of text and gives what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<ChatEvent> {
        for letter in text.chars() {
            self.step(letter);
        }
        mem::take(&mut self.out)
    }

    /// The answer has ended: gives what was held back. A call that is not complete is rejected.
    pub fn finish(&mut self) -> Vec<ChatEvent> {
        if let State::Call(pending) = &self.state {
            let progress = pending.cut(&self.raw, RejectReason::Incomplete);
            self.progress(progress);
        }
        let held = mem::take(&mut self.held);
        match self.state {
            State::Gap => self.understood(&held),
            _ => self.say(&held),
        }
        mem::take(&mut self.out)
    }

    fn step(&mut self, letter: char) {
        match &mut self.state {
            State::Call(pending) => {
                self.raw.push(letter);
                // There is no pending call without tools.
                let Some(tools) = &self.tools else { return };
                let progress = match pending.step(&self.raw, letter, tools) {
                    Progress::More if self.raw.len() > self.limit => pending.cut(&self.raw, RejectReason::TooLarge),
                    other => other,
                };
                self.progress(progress);
            }
            State::Gap => {
                if letter.is_whitespace() || letter == ';' {
                    self.held.push(letter);
                } else if letter == '{' {
                    self.begin("{", Pending::object(Intent::Call));
                } else {
                    let held = mem::take(&mut self.held);
                    self.enter(State::Text);
                    if held.chars().all(|letter| letter == '\n') {
                        self.understood(&held);
                    } else {
                        self.say(&held);
                    }
                    self.step(letter);
                }
            }
            State::Text | State::Reasoning { .. } => {
                if self.after_mark && letter == '\n' {
                    self.understood("\n");
                    return;
                }
                self.after_mark = false;
                // Nearly every letter is this one's case: nothing is held, and no mark begins with it.
                let free = self.held.is_empty() && letter != '\n' && !self.marks.iter().any(|(text, _)| text.starts_with(letter));
                if free {
                    self.say(letter.encode_utf8(&mut [0; 4]));
                } else {
                    self.held.push(letter);
                    self.settle();
                }
            }
        }
    }

    /// Gives out what is held, as far as it cannot become a mark any more.
    fn settle(&mut self) {
        while !self.held.is_empty() {
            let breaks = self.held.bytes().take_while(|byte| *byte == b'\n').count();
            let rest = &self.held[breaks..];
            if let Some((_, mark)) = self.marks.iter().find(|(text, _)| text == rest) {
                let mark = *mark;
                self.found(mark, breaks);
                return;
            }
            let possible = self.marks.iter().any(|(text, _)| text.starts_with(rest));
            if possible && breaks <= MAX_BREAKS {
                return;
            }
            let free = if possible { 1 } else { breaks + rest.chars().next().map_or(0, char::len_utf8) };
            let kept = self.held.split_off(free);
            let text = mem::replace(&mut self.held, kept);
            self.say(&text);
        }
    }

    /// `held` is a mark behind so many line breaks.
    fn found(&mut self, mark: Mark, breaks: usize) {
        let pending = match mark {
            Mark::Open | Mark::Close => {
                let held = mem::take(&mut self.held);
                self.understood(&held);
                self.enter(if mark == Mark::Open { State::Reasoning { fresh: false } } else { State::Text });
                self.after_mark = true;
                return;
            }
            Mark::Hermes => Pending::hermes(),
            Mark::Python => Pending::python(),
            Mark::Object => Pending::object(Intent::Open),
            Mark::Mistral => Pending::Mistral(Mistral::Start),
        };
        let mark = self.held.split_off(breaks);
        self.begin(&mark, pending);
    }

    /// A call begins with `mark`; `held` is what stands before it.
    fn begin(&mut self, mark: &str, pending: Pending) {
        mark.clone_into(&mut self.raw);
        self.enter(State::Call(pending));
    }

    /// What has become of the pending call.
    fn progress(&mut self, progress: Progress) {
        let (State::Call(pending), Some(tools)) = (&self.state, &self.tools) else { return };
        let intent = match pending {
            Pending::Llama(call) => Some(call.intent),
            Pending::Hermes(_) | Pending::Mistral(_) => None,
        };
        let (parsed, end) = match progress {
            Progress::More => return,
            Progress::Done => {
                let parsed = tools.parse(&self.raw);
                // An object without marks that is no call is an answer in JSON.
                let answer = intent == Some(Intent::Perhaps) && parsed.iter().any(std::result::Result::is_err);
                (if answer { Vec::new() } else { parsed }, self.raw.len())
            }
            Progress::Reject(reason, end) => (vec![Err((self.raw[..end].to_owned(), reason))], end),
            Progress::Text(end) => (Vec::new(), end),
        };
        let rest = self.raw.split_off(end);
        let raw = mem::take(&mut self.raw);
        let before = mem::take(&mut self.held);
        if parsed.is_empty() {
            self.enter(State::Text);
            self.say(&before);
            self.say(&raw);
        } else {
            self.said = true;
            self.understood(&before);
            self.understood(&raw);
            let complete = parsed.iter().all(std::result::Result::is_ok);
            for call in parsed {
                self.out.push(match call {
                    Ok(call) => {
                        ChatEvent::ToolCall(ToolCall { id: self.ids.pick(call.id), name: call.name, arguments: call.arguments })
                    }
                    Err((raw, reason)) => ChatEvent::RejectedToolCall { raw, reason },
                });
            }
            self.enter(if intent.is_some() && complete { State::Gap } else { State::Text });
            self.after_mark = true;
        }
        for letter in rest.chars() {
            self.step(letter);
        }
    }

    fn enter(&mut self, state: State) {
        self.state = state;
        self.find_marks();
    }

    fn find_marks(&mut self) {
        let mut marks = Vec::new();
        match self.state {
            State::Text => {
                if let Some(reasoning) = self.format.reasoning.as_ref().filter(|_| !self.said) {
                    marks.push((reasoning.open.clone(), Mark::Open));
                }
                match self.format.tools.filter(|_| self.tools.is_some()) {
                    None => {}
                    Some(ToolFormat::Hermes) => marks.push((TAG.to_owned(), Mark::Hermes)),
                    Some(ToolFormat::Mistral) => marks.push((CALLS.to_owned(), Mark::Mistral)),
                    Some(ToolFormat::Llama3) => {
                        marks.push((PYTHON.to_owned(), Mark::Python));
                        if !self.said {
                            marks.push(("{".to_owned(), Mark::Object));
                        }
                    }
                }
            }
            State::Reasoning { fresh } => {
                if let Some(reasoning) = &self.format.reasoning {
                    marks.push((reasoning.close.clone(), Mark::Close));
                    // Some models open again what the prompt has opened.
                    if fresh {
                        marks.push((reasoning.open.clone(), Mark::Open));
                    }
                }
            }
            State::Call(_) | State::Gap => {}
        }
        self.marks = marks;
    }

    /// Text of the answer or of the reasoning.
    fn say(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let blank = text.chars().all(char::is_whitespace);
        let reasoning = matches!(self.state, State::Reasoning { .. });
        match &mut self.state {
            State::Reasoning { fresh: fresh @ true } if !blank => {
                *fresh = false;
                self.find_marks();
            }
            State::Text if !blank && !self.said => {
                self.said = true;
                self.find_marks();
            }
            _ => {}
        }
        match (self.out.last_mut(), reasoning) {
            (Some(ChatEvent::Reasoning(last)), true) | (Some(ChatEvent::Text(last)), false) => last.push_str(text),
            (_, true) => self.out.push(ChatEvent::Reasoning(text.to_owned())),
            (_, false) => self.out.push(ChatEvent::Text(text.to_owned())),
        }
        #[cfg(test)]
        self.accounted.push_str(text);
    }

    /// Text that an event stands for.
    fn understood(&mut self, _text: &str) {
        #[cfg(test)]
        self.accounted.push_str(_text);
    }
}

/// Ids of calls.
#[derive(Debug)]
struct Ids {
    rng: ChaCha12Rng,
    given: HashSet<String>,
}

impl Ids {
    fn new(seed: Option<u64>) -> Result<Self> {
        let seed = match seed {
            Some(seed) => seed,
            None => getrandom::u64()
                .map_err(|error| Error::new(ErrorKind::Io, format!("the system has no random numbers ({error}); set id_seed")))?,
        };
        Ok(Self { rng: ChaCha12Rng::seed_from_u64(seed), given: HashSet::new() })
    }

    /// The model's own id when it is one and new, else nine letters and digits, as Mistral's templates demand.
    fn pick(&mut self, own: Option<String>) -> String {
        const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
        let sound = |id: &String| {
            (1..=64).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        };
        let mut id = own.filter(sound).unwrap_or_default();
        while id.is_empty() || self.given.contains(&id) {
            id = (0..9).map(|_| char::from(LETTERS[self.rng.next_u32() as usize % LETTERS.len()])).collect();
        }
        self.given.insert(id.clone());
        id
    }
}
