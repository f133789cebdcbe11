//! Tokens to text, one at a time, and the search for stop strings.
//!
//! [`TextStream`] gives whole UTF-8 at every step. The pieces it gives, put together, equal [`Tokenizer::decode`] of all its
//! tokens, for every sequence of tokens, and each token costs time in proportion to its own length only: what a decoder of
//! the `tokenizers` crate does with the whole list at once is done here step by step (see `DecodePlan`).

use std::collections::{BTreeMap, VecDeque};
use std::mem;

use tokenizers::Decoder;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// One step of a decoder, as a recipe without state.
#[derive(Debug, Clone)]
enum Step {
    /// Changes each token on its own.
    Each(Box<DecoderWrapper>),
    /// Changes tokens on their own, but for the very first one: the decoder sees a stand-in before the others.
    EachAfterFirst(Box<DecoderWrapper>),
    /// Replaces a suffix by a space, in the last token by nothing.
    Suffix(String),
    /// Puts runs of byte tokens `<0xE2>` together.
    ByteFallback,
    /// Maps byte-level letters to bytes; the result is one text.
    ByteLevel,
    /// Makes all that came before one text.
    Fuse,
    /// Strips up to so many of a character off both ends of the one text.
    StripText { content: char, start: usize, stop: usize },
    /// Joins tokens by spaces, when there is no decoder.
    JoinBySpaces,
}

/// How a tokenizer's decoder works step by step.
#[derive(Debug, Clone)]
pub(crate) struct DecodePlan(Vec<Step>);

impl DecodePlan {
    /// The plan for `decoder`, or what of it cannot be done step by step.
    pub(crate) fn new(decoder: Option<&DecoderWrapper>) -> std::result::Result<Self, String> {
        let mut steps = Vec::new();
        match decoder {
            None => steps.push(Step::JoinBySpaces),
            Some(decoder) => plan(decoder, &mut steps, &mut false, 0)?,
        }
        Ok(Self(steps))
    }

    fn start(&self) -> Vec<Stage> {
        self.0.iter().cloned().map(Stage::new).collect()
    }
}

/// Adds the steps of `decoder`. `fused` says whether the tokens have become one text by then.
fn plan(decoder: &DecoderWrapper, steps: &mut Vec<Step>, fused: &mut bool, depth: usize) -> std::result::Result<(), String> {
    let unknown = |what: &str| Err(format!("{what} cannot be decoded token by token"));
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            if depth > 8 {
                return unknown("a deeply nested sequence");
            }
            for part in sequence.get_decoders() {
                plan(part, steps, fused, depth + 1)?;
            }
        }
        DecoderWrapper::Strip(strip) if *fused => {
            steps.push(Step::StripText { content: strip.content, start: strip.start, stop: strip.stop });
        }
        DecoderWrapper::Fuse(_) => {
            steps.push(Step::Fuse);
            *fused = true;
        }
        _ if *fused => return unknown("a decoder after the tokens were fused"),
        DecoderWrapper::ByteLevel(_) => {
            steps.push(Step::ByteLevel);
            *fused = true;
        }
        // The crate's Strip underflows on tokens shorter than `stop`.
        DecoderWrapper::Strip(strip) if strip.stop > 0 => return unknown("stripping the ends of tokens"),
        DecoderWrapper::Strip(_) | DecoderWrapper::Replace(_) => steps.push(Step::Each(Box::new(decoder.clone()))),
        DecoderWrapper::Metaspace(metaspace) if metaspace.prepend_scheme == PrependScheme::Never => {
            steps.push(Step::Each(Box::new(decoder.clone())));
        }
        DecoderWrapper::WordPiece(_) | DecoderWrapper::Metaspace(_) => steps.push(Step::EachAfterFirst(Box::new(decoder.clone()))),
        DecoderWrapper::ByteFallback(_) => steps.push(Step::ByteFallback),
        DecoderWrapper::BPE(bpe) => steps.push(Step::Suffix(bpe.suffix.clone())),
        DecoderWrapper::CTC(_) => return unknown("CTC"),
    }
    Ok(())
}

/// A step with its state.
#[derive(Debug)]
struct Stage {
    step: Step,
    /// Whether a token has come through.
    started: bool,
    /// Bytes of an unfinished character or run of byte tokens.
    bytes: Vec<u8>,
    /// Tokens or characters held back.
    held: VecDeque<String>,
    /// How many more characters may be stripped off the beginning.
    strip: usize,
    /// How many characters at the end are held back.
    tail: usize,
}

impl Stage {
    fn new(step: Step) -> Self {
        let strip = if let Step::StripText { start, .. } = &step { *start } else { 0 };
        Self { step, started: false, bytes: Vec::new(), held: VecDeque::new(), strip, tail: 0 }
    }

    /// Takes one token and gives what is decided.
    fn push(&mut self, token: String, out: &mut Vec<String>) -> Result<()> {
        let first = !mem::replace(&mut self.started, true);
        match &self.step {
            Step::Each(decoder) => out.extend(chain(decoder, vec![token])?),
            Step::EachAfterFirst(decoder) if first => out.extend(chain(decoder, vec![token])?),
            Step::EachAfterFirst(decoder) => out.extend(chain(decoder, vec![String::new(), token])?.into_iter().skip(1)),
            Step::Suffix(suffix) => {
                if let Some(last) = self.held.pop_front() {
                    out.push(last.replace(suffix, " "));
                }
                self.held.push_back(token);
            }
            Step::ByteFallback => match byte_token(&token) {
                Some(byte) => self.bytes.push(byte),
                None => {
                    self.end_of_bytes(out);
                    out.push(token);
                }
            },
            Step::ByteLevel => {
                push_byte_level(&token, &mut self.bytes);
                out.extend(take_text(&mut self.bytes));
            }
            Step::Fuse => out.push(token),
            Step::StripText { content, stop, .. } => {
                let (content, stop) = (*content, *stop);
                let text = strip_start(&token, content, &mut self.strip);
                if stop == 0 {
                    out.push(text.to_owned());
                } else {
                    self.hold_end(text, content, stop, out);
                }
            }
            Step::JoinBySpaces if first => out.push(token),
            Step::JoinBySpaces => out.push(format!(" {token}")),
        }
        Ok(())
    }

    /// Gives what is left.
    fn finish(&mut self, out: &mut Vec<String>) {
        match &self.step {
            Step::Suffix(suffix) => {
                if let Some(last) = self.held.pop_front() {
                    out.push(last.replace(suffix, ""));
                }
            }
            Step::ByteFallback => self.end_of_bytes(out),
            Step::ByteLevel if !self.bytes.is_empty() => {
                out.push(String::from_utf8_lossy(&mem::take(&mut self.bytes)).into_owned());
            }
            Step::StripText { stop, .. } => {
                let stop = *stop;
                let drop = self.tail.min(stop);
                self.held.truncate(self.held.len() - drop);
                out.extend(self.held.drain(..));
            }
            _ => {}
        }
    }

    fn end_of_bytes(&mut self, out: &mut Vec<String>) {
        if self.bytes.is_empty() {
            return;
        }
        let bytes = mem::take(&mut self.bytes);
        let count = bytes.len();
        out.push(String::from_utf8(bytes).unwrap_or_else(|_| "\u{fffd}".repeat(count)));
    }

    /// Holds back as many characters as may yet be stripped off the end of the text.
    fn hold_end(&mut self, text: &str, content: char, stop: usize, out: &mut Vec<String>) {
        for letter in text.chars() {
            self.tail = if letter == content { self.tail + 1 } else { 0 };
            self.held.push_back(letter.to_string());
        }
        self.tail = self.tail.min(stop);
        let keep = self.tail;
        let ready = self.held.len() - keep;
        out.push(self.held.drain(..ready).collect());
    }
}

fn chain(decoder: &DecoderWrapper, tokens: Vec<String>) -> Result<Vec<String>> {
    decoder.decode_chain(tokens).map_err(|error| Error::internal("decoding failed").with_source(error))
}

/// The byte that a token like `<0xE2>` stands for.
fn byte_token(token: &str) -> Option<u8> {
    if token.len() == 6 && token.starts_with("<0x") && token.ends_with('>') {
        u8::from_str_radix(token.get(3..5)?, 16).ok()
    } else {
        None
    }
}

/// The byte a letter of byte-level BPE stands for: printable Latin-1 for itself, the others by U+0100 to U+0143 in order.
fn byte_of_letter(letter: char) -> Option<u8> {
    let code = u32::from(letter);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// A token with a letter that stands for no byte is taken as it is.
fn push_byte_level(token: &str, bytes: &mut Vec<u8>) {
    let before = bytes.len();
    for letter in token.chars() {
        match byte_of_letter(letter) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(before);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// Takes all whole characters off the front of `bytes`; a sequence that can never become valid becomes U+FFFD.
fn take_text(bytes: &mut Vec<u8>) -> Option<String> {
    let mut text = String::new();
    let mut done = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        done += chunk.valid().len();
        let invalid = chunk.invalid();
        if invalid.is_empty() {
            break;
        }
        let at_end = done + invalid.len() == bytes.len();
        if at_end && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none()) {
            break;
        }
        text.push('\u{fffd}');
        done += invalid.len();
    }
    bytes.drain(..done);
    (!text.is_empty()).then_some(text)
}

fn strip_start<'a>(text: &'a str, content: char, left: &mut usize) -> &'a str {
    let mut rest = text;
    while *left > 0 && !rest.is_empty() {
        match rest.strip_prefix(content) {
            Some(after) => {
                rest = after;
                *left -= 1;
            }
            None => *left = 0,
        }
    }
    rest
}

/// Turns tokens into text one after another. Make one with [`Tokenizer::stream`].
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Special tokens that are given out all the same: a handful at most.
    keep: Vec<u32>,
    stages: Vec<Stage>,
}

impl TextStream {
    pub(crate) fn new(tokenizer: Tokenizer, skip_special: bool, keep: &[u32]) -> Self {
        let stages = tokenizer.plan().start();
        Self { tokenizer, skip_special, keep: keep.to_vec(), stages }
    }

    /// Takes a token and gives the text that is certain now: never empty, always whole characters. `None` when the token
    /// adds nothing yet. Text held back is at most an unfinished character, a run of byte tokens, or what the decoder may
    /// yet strip.
    pub fn push(&mut self, token: u32) -> Result<Option<String>> {
        let skip_special = self.skip_special && !self.keep.contains(&token);
        let Some(piece) = self.tokenizer.piece(token, skip_special) else { return Ok(None) };
        self.run(vec![piece], 0)
    }

    /// Gives the text still held back; bytes that never became a character become U+FFFD. The stream starts anew.
    pub fn finish(&mut self) -> Result<Option<String>> {
        let mut text = String::new();
        for index in 0..self.stages.len() {
            let mut left = Vec::new();
            self.stages[index].finish(&mut left);
            text.extend(self.run(left, index + 1)?);
        }
        self.stages = self.tokenizer.plan().start();
        Ok((!text.is_empty()).then_some(text))
    }

    fn run(&mut self, mut tokens: Vec<String>, from: usize) -> Result<Option<String>> {
        for stage in &mut self.stages[from..] {
            let mut next = Vec::with_capacity(tokens.len());
            for token in tokens {
                stage.push(token, &mut next)?;
            }
            tokens = next;
        }
        let text: String = tokens.concat();
        Ok((!text.is_empty()).then_some(text))
    }
}

/// Most stop strings of one request.
pub const MAX_STOPS: usize = 64;
/// Longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 4096;

/// Finds stop strings in a text that arrives in pieces.
///
/// The text stops at the first place where any stop string is complete; when several end there, the longest one counts. What
/// is found does not depend on how the text was cut into pieces. Text that may be the beginning of a stop string is held
/// back, and nothing of a stop string is ever given out.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    nodes: Vec<Node>,
    /// The node of the longest end of the text that is a beginning of a stop string.
    state: usize,
    held: String,
    stopped: bool,
}

#[derive(Debug, Clone, Default)]
struct Node {
    next: BTreeMap<u8, usize>,
    fail: usize,
    depth: usize,
    /// The longest stop string that ends here: its index and its length.
    stop: Option<(usize, usize)>,
}

/// What a piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopStep {
    /// Text that can be given out now; possibly empty.
    pub text: String,
    /// The index of the stop string that was found. `text` is then the last text, and further pieces are ignored.
    pub stop: Option<usize>,
}

impl StopMatcher {
    /// A matcher for `stops`; without any, text passes through.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for an empty stop string, too many, or too long ones.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self> {
        if stops.len() > MAX_STOPS {
            return Err(Error::invalid(format!("{} stop strings; the limit is {MAX_STOPS}", stops.len())));
        }
        let mut nodes = vec![Node::default()];
        for (index, stop) in stops.iter().enumerate() {
            let bytes = stop.as_ref().as_bytes();
            if bytes.is_empty() {
                return Err(Error::invalid(format!("stop string {index} is empty")));
            }
            if bytes.len() > MAX_STOP_BYTES {
                return Err(Error::invalid(format!(
                    "stop string {index} has {} bytes; the limit is {MAX_STOP_BYTES}",
                    bytes.len()
                )));
            }
            let mut at = 0;
            for byte in bytes {
                at = match nodes[at].next.get(byte) {
                    Some(next) => *next,
                    None => {
                        let depth = nodes[at].depth + 1;
                        nodes.push(Node { depth, ..Node::default() });
                        let next = nodes.len() - 1;
                        nodes[at].next.insert(*byte, next);
                        next
                    }
                };
            }
            // Of equal stop strings the first one is reported.
            nodes[at].stop.get_or_insert((index, bytes.len()));
        }
        let mut queue: VecDeque<usize> = nodes[0].next.values().copied().collect();
        while let Some(at) = queue.pop_front() {
            let fail = nodes[at].fail;
            if nodes[at].stop.is_none() {
                nodes[at].stop = nodes[fail].stop;
            }
            for (byte, next) in nodes[at].next.clone() {
                nodes[next].fail = follow(&nodes, fail, byte);
                queue.push_back(next);
            }
        }
        Ok(Self { nodes, state: 0, held: String::new(), stopped: false })
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.stopped {
            return StopStep::default();
        }
        let start = self.held.len();
        self.held.push_str(text);
        for (index, byte) in text.bytes().enumerate() {
            self.state = follow(&self.nodes, self.state, byte);
            if let Some((stop, length)) = self.nodes[self.state].stop {
                let end = start + index + 1;
                self.held.truncate(end - length);
                self.stopped = true;
                return StopStep { text: mem::take(&mut self.held), stop: Some(stop) };
            }
        }
        let keep = self.held.len() - self.nodes[self.state].depth;
        let rest = self.held.split_off(keep);
        StopStep { text: mem::replace(&mut self.held, rest), stop: None }
    }

    /// Gives the text held back, when no more comes. The matcher starts anew.
    pub fn finish(&mut self) -> Option<String> {
        self.state = 0;
        self.stopped = false;
        let held = mem::take(&mut self.held);
        (!held.is_empty()).then_some(held)
    }
}

/// The node reached from `state` by `byte`: the longest end of the text that begins a stop string.
fn follow(nodes: &[Node], mut state: usize, byte: u8) -> usize {
    loop {
        if let Some(next) = nodes[state].next.get(&byte) {
            return *next;
        }
        if state == 0 {
            return 0;
        }
        state = nodes[state].fail;
    }
}

#[cfg(test)]
mod tests;
