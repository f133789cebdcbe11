//! Encoding with a say in where special tokens may be recognised.
//!
//! The `tokenizers` crate either recognises every added token everywhere or (with `encode_special_tokens`) no special one
//! anywhere, and the latter does not keep a model from forming a special token by itself (a Unigram vocabulary holds `</s>`
//! as an ordinary piece). So Hob finds added tokens itself and hands the text between them to the crate's normaliser,
//! pre-tokeniser, model and post-processor. Each match of a *protected* token is checked against the places the caller
//! marked as user text, and the result is checked again for protected tokens that the model formed.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::normalizer::Range as NormRange;
use tokenizers::{
    AddedToken, Encoding as RawEncoding, Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Token,
};

use crate::error::{Error, Result};

/// Which bytes of a text must not become part of a protected token.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Untrusted<'a> {
    /// None: the whole text is the host's.
    Nothing,
    /// All of them: the whole text is a user's.
    Everything,
    /// The bytes at these offsets, in ascending order.
    At(&'a [usize]),
}

impl Untrusted<'_> {
    fn touches(self, range: &Range<usize>) -> bool {
        match self {
            Self::Nothing => false,
            Self::Everything => true,
            Self::At(offsets) => {
                let first = offsets.partition_point(|offset| *offset < range.start);
                offsets.get(first).is_some_and(|offset| *offset < range.end)
            }
        }
    }
}

/// Added tokens that are looked for in one form of the text (raw or normalised).
struct Matcher {
    automaton: AhoCorasick,
    ids: Vec<u32>,
}

impl Matcher {
    fn new(patterns: Vec<(String, u32)>) -> Result<Option<Self>> {
        if patterns.is_empty() {
            return Ok(None);
        }
        let (texts, ids): (Vec<String>, Vec<u32>) = patterns.into_iter().unzip();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts)
            .map_err(|error| Error::unsupported("the added tokens are too many or too long").with_source(error))?;
        Ok(Some(Self { automaton, ids }))
    }
}

/// The added tokens of a tokenizer and which of them are protected.
pub(super) struct AddedTokens {
    raw: Option<Matcher>,
    normalized: Option<Matcher>,
    tokens: HashMap<u32, AddedToken>,
    protected: HashSet<u32>,
    unk: Option<u32>,
}

/// Tags that structure a conversation though their tokens are not marked special: user text must not make them.
const STRUCTURAL: [&str; 16] = [
    "<s>",
    "</s>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
];

/// Whether a token that is not marked special still marks structure: one of the tags above, or `<|…|>`.
fn is_structural(content: &str) -> bool {
    STRUCTURAL.contains(&content)
        || (content.starts_with("<|") && content.ends_with("|>"))
        || (content.starts_with("<｜") && content.ends_with("｜>"))
}

impl AddedTokens {
    /// `roles` are ids that are protected whatever their flags; `unk` may come out of unknown text.
    pub(super) fn new(inner: &tokenizers::Tokenizer, roles: &[u32], unk: Option<u32>) -> Result<Self> {
        let tokens: HashMap<u32, AddedToken> = inner.get_added_tokens_decoder().into_iter().collect();
        let (mut raw, mut normalized) = (Vec::new(), Vec::new());
        let mut protected = HashSet::new();
        for (id, token) in &tokens {
            if token.content.is_empty() {
                continue;
            }
            if token.special || is_structural(&token.content) || roles.contains(id) {
                protected.insert(*id);
            }
            if token.normalized {
                let mut text = NormalizedString::from(token.content.as_str());
                if let Some(normalizer) = inner.get_normalizer() {
                    normalizer.normalize(&mut text).map_err(|error| Error::unsupported("an added token").with_source(error))?;
                }
                if !text.get().is_empty() {
                    normalized.push((text.get().to_owned(), *id));
                }
            } else {
                raw.push((token.content.clone(), *id));
            }
        }
        Ok(Self { raw: Matcher::new(raw)?, normalized: Matcher::new(normalized)?, tokens, protected, unk })
    }

    /// Whether `id` is a token that user text must never become.
    pub(super) fn is_protected(&self, id: u32) -> bool {
        self.protected.contains(&id)
    }

    /// The protected tokens: their text, and whether they are special (the others only mark structure).
    pub(super) fn protected(&self) -> impl Iterator<Item = (&str, bool)> {
        self.protected
            .iter()
            .filter_map(|id| self.tokens.get(id))
            .map(|token| (token.content.as_str(), token.special || !is_structural(&token.content)))
    }

    /// Splits `text`, a part of `whole`, at the added tokens found in it and at `cuts` (byte offsets).
    fn split(
        &self,
        matcher: Option<&Matcher>,
        text: &NormalizedString,
        whole: &str,
        untrusted: Untrusted<'_>,
        cuts: &[usize],
    ) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
        let sentence = text.get();
        let mut pieces: Vec<(Range<usize>, Option<u32>)> = Vec::new();
        let mut done = 0;
        let mut at = 0;
        while let Some(matcher) = matcher
            && at < sentence.len()
        {
            let Some(found) = matcher.automaton.find(aho_corasick::Input::new(sentence).range(at..)) else { break };
            let id = matcher.ids[found.pattern().as_usize()];
            let token = &self.tokens[&id];
            let (mut start, mut end) = (found.start(), found.end());
            let refused = (token.single_word && !stands_alone(sentence, start, end))
                || (self.protected.contains(&id) && !self.may_match(token, text, start..end, whole, untrusted));
            if refused {
                // Another added token may begin inside the refused one.
                at = start + sentence[start..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            if token.lstrip {
                start = sentence[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                end = sentence.len() - sentence[end..].trim_start().len();
            }
            if done < start {
                pieces.push((done..start, None));
            }
            pieces.push((start..end, Some(id)));
            done = end;
            at = end;
        }
        if done < sentence.len() || pieces.is_empty() {
            pieces.push((done..sentence.len(), None));
        }
        let mut splits = Vec::with_capacity(pieces.len() + cuts.len());
        for (range, id) in pieces {
            match id {
                Some(id) => {
                    // The empty value marks a token that was accepted here, not formed by the model.
                    let token = Token::new(id, String::new(), (0, range.len()));
                    if let Some(slice) = text.slice(NormRange::Normalized(range)) {
                        splits.push((slice, Some(vec![token])));
                    }
                }
                None => {
                    let mut from = range.start;
                    let inside = cuts.iter().filter(|cut| **cut > range.start && **cut < range.end);
                    for to in inside.copied().chain([range.end]) {
                        if let Some(slice) = text.slice(NormRange::Normalized(from..to)) {
                            splits.push((slice, None));
                        }
                        from = to;
                    }
                }
            }
        }
        splits
    }

    /// Whether a protected token may be recognised at `range` of `text`.
    fn may_match(
        &self,
        token: &AddedToken,
        text: &NormalizedString,
        range: Range<usize>,
        whole: &str,
        untrusted: Untrusted<'_>,
    ) -> bool {
        if matches!(untrusted, Untrusted::Nothing) {
            return true;
        }
        let shift = text.offsets_original().0;
        let Some(local) = text.convert_offsets(NormRange::Normalized(range)) else { return false };
        let origin = local.start + shift..local.end + shift;
        // A normaliser can turn other characters into a special token's; only its exact text counts then.
        whole.get(origin.clone()) == Some(token.content.as_str()) && !untrusted.touches(&origin)
    }
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

fn stands_alone(sentence: &str, start: usize, end: usize) -> bool {
    !sentence[..start].chars().next_back().is_some_and(is_word) && !sentence[end..].chars().next().is_some_and(is_word)
}

/// How often the text is cut again where the model itself formed a protected token.
const MAX_ROUNDS: usize = 8;

/// Encodes `text` without the post-processor. No protected token comes from untrusted bytes.
pub(super) fn encode(
    inner: &tokenizers::Tokenizer,
    added: &AddedTokens,
    text: &str,
    type_id: u32,
    untrusted: Untrusted<'_>,
) -> Result<RawEncoding> {
    let mut cuts: Vec<usize> = Vec::new();
    for _ in 0..MAX_ROUNDS {
        let encoding = encode_once(inner, added, text, type_id, untrusted, &cuts)
            .map_err(|error| Error::internal("the tokenizer failed on a text").with_source(error))?;
        if matches!(untrusted, Untrusted::Nothing) {
            return Ok(encoding);
        }
        let known = cuts.len();
        for ((id, value), (start, end)) in encoding.get_ids().iter().zip(encoding.get_tokens()).zip(encoding.get_offsets()) {
            // The unknown token stands for any unknown text; it says nothing.
            if !value.is_empty() && Some(*id) != added.unk && added.is_protected(*id) {
                // Cut behind the first character; the rest can no longer be that token.
                let first = text.get(*start..*end).and_then(|span| span.chars().next()).map_or(0, char::len_utf8);
                if first == 0 || start + first >= *end {
                    return Err(Error::unsupported("the text holds a character that this tokenizer only knows as a special token"));
                }
                cuts.push(start + first);
            }
        }
        if cuts.len() == known {
            return Ok(encoding);
        }
        cuts.sort_unstable();
        cuts.dedup();
    }
    Err(Error::unsupported("this tokenizer keeps forming special tokens from ordinary text"))
}

fn encode_once(
    inner: &tokenizers::Tokenizer,
    added: &AddedTokens,
    text: &str,
    type_id: u32,
    untrusted: Untrusted<'_>,
    cuts: &[usize],
) -> tokenizers::Result<RawEncoding> {
    let mut pieces = PreTokenizedString::from(text);
    pieces.split(|_, part| Ok(added.split(added.raw.as_ref(), &part, text, untrusted, cuts)))?;
    pieces.split(|_, mut part| {
        if let Some(normalizer) = inner.get_normalizer() {
            normalizer.normalize(&mut part)?;
        }
        Ok(added.split(added.normalized.as_ref(), &part, text, untrusted, &[]))
    })?;
    if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces)?;
    }
    pieces.tokenize(|part| inner.get_model().tokenize(part.get()))?;
    pieces.into_encoding(None, type_id, OffsetType::Byte)
}
