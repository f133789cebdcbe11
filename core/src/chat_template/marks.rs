//! Where the characters of a rendered prompt came from.
//!
//! A special token may be recognised in a rendered prompt only where the template wrote it. To know that, the first and the
//! last characters of all protected tokens (usually just `<`, `>`, `[` and `]`) are exchanged, in every text of the messages,
//! for *marks*: private-use characters that occur nowhere in the input. The template is rendered with them, and what it does to
//! a text (trim it, change its case, cut it, join it) happens to the marks as well. Afterwards every mark is turned back, and
//! its place is known to be a user's. A protected token that would begin or end at such a place is not recognised. So a token
//! cannot be made by a user's text, not even from pieces the template joins, while ordinary text is encoded exactly as without
//! marks: the text is the same and only the recognition of special tokens differs.

use std::collections::{BTreeSet, HashSet};

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The last plane's private-use characters, from which marks are taken.
const FIRST: u32 = 0x0010_0000;
const LAST: u32 = 0x0010_fffd;

/// Whether `letter` is of the kind marks are taken from.
pub(super) fn is_mark(letter: char) -> bool {
    (FIRST..=LAST).contains(&u32::from(letter))
}

/// The exchange of characters for marks.
pub(super) struct Marks {
    /// Characters and their marks, sorted by character.
    pairs: Vec<(char, char)>,
    /// Protected tokens that only mark structure; an assistant's own text may hold them.
    structural: Vec<String>,
    /// Special tokens; no text may hold them.
    special: Vec<String>,
    /// Tags the template mentions; an assistant's own text may hold them.
    mentioned: HashSet<String>,
}

/// Longest tag of a template that is looked for in an assistant's text.
const MAX_TAG: usize = 64;

impl Marks {
    /// Marks for the edges of `protected` tokens (text, whether special) that occur in none of the values nor in `source`.
    pub(super) fn new<'a>(protected: impl Iterator<Item = (&'a str, bool)>, source: &str, values: &[&Value]) -> Result<Self> {
        let mut edges = BTreeSet::new();
        let (mut structural, mut specials) = (Vec::new(), Vec::new());
        for (text, special) in protected {
            edges.extend(text.chars().next());
            edges.extend(text.chars().next_back());
            if special { &mut specials } else { &mut structural }.push(text.to_owned());
        }
        structural.sort_by_key(|tag| std::cmp::Reverse(tag.len()));
        let mut taken: BTreeSet<char> = source.chars().filter(|letter| is_mark(*letter)).collect();
        for value in values {
            private_letters(value, &mut taken);
        }
        let mut free = (FIRST..=LAST).filter_map(char::from_u32).filter(|letter| !taken.contains(letter));
        let mut pairs = Vec::with_capacity(edges.len());
        for edge in edges {
            let mark = free.next().ok_or_else(|| Error::invalid("the messages use up a whole plane of private-use characters"))?;
            pairs.push((edge, mark));
        }
        Ok(Self { pairs, structural, special: specials, mentioned: tags_of(source) })
    }

    fn mark_of(&self, letter: char) -> Option<char> {
        self.pairs.binary_search_by_key(&letter, |pair| pair.0).ok().map(|index| self.pairs[index].1)
    }

    /// The tag at the beginning of `rest`, when an assistant's own text may hold it: a token that only marks structure, or a
    /// tag like `</think>` that the template writes or looks for. It must not be, begin or end a special token.
    fn own_tag<'a>(&self, rest: &'a str) -> Option<&'a str> {
        if let Some(tag) = self.structural.iter().find(|tag| rest.starts_with(tag.as_str())) {
            return Some(&rest[..tag.len()]);
        }
        let tag = tag_at(rest)?;
        let special = |tag: &str| self.special.iter().any(|token| token.starts_with(tag) || token.ends_with(tag));
        (self.mentioned.contains(tag) && !special(tag)).then_some(tag)
    }

    /// Puts marks into a text. With `own`, tags that only mark structure are left as they are.
    pub(super) fn text(&self, text: &str, own: bool) -> String {
        let mut out = String::with_capacity(text.len() + 16);
        let mut rest = text;
        while let Some(letter) = rest.chars().next() {
            match self.mark_of(letter) {
                None => out.push(letter),
                Some(mark) => {
                    if own && let Some(tag) = self.own_tag(rest) {
                        out.push_str(tag);
                        rest = &rest[tag.len()..];
                        continue;
                    }
                    out.push(mark);
                }
            }
            rest = &rest[letter.len_utf8()..];
        }
        out
    }

    /// Puts marks into every text and every key of `value`.
    pub(super) fn value(&self, value: &Value, own: bool) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text, own)),
            Value::Array(items) => items.iter().map(|item| self.value(item, own)).collect(),
            Value::Object(map) => Value::Object(self.map(map, own)),
            other => other.clone(),
        }
    }

    fn map(&self, map: &Map<String, Value>, own: bool) -> Map<String, Value> {
        map.iter().map(|(key, value)| (self.text(key, own), self.value(value, own))).collect()
    }

    /// Turns marks back and gives their byte offsets in the result.
    pub(super) fn undo(&self, text: &str) -> (String, Vec<usize>) {
        let mut out = String::with_capacity(text.len());
        let mut places = Vec::new();
        for letter in text.chars() {
            match self.pairs.iter().find(|pair| is_mark(letter) && pair.1 == letter) {
                Some((original, _)) => {
                    places.push(out.len());
                    out.push(*original);
                }
                None => out.push(letter),
            }
        }
        (out, places)
    }
}

/// The text in `<…>` or `[…]` at the beginning of `rest`.
fn tag_at(rest: &str) -> Option<&str> {
    let close = match rest.as_bytes().first()? {
        b'<' => b'>',
        b'[' => b']',
        _ => return None,
    };
    let end = rest.bytes().take(MAX_TAG).position(|byte| byte == close)?;
    Some(&rest[..=end])
}

fn tags_of(source: &str) -> HashSet<String> {
    let openings = source.match_indices(['<', '[']);
    openings.filter_map(|(at, _)| tag_at(&source[at..])).map(str::to_owned).collect()
}

fn private_letters(value: &Value, taken: &mut BTreeSet<char>) {
    match value {
        Value::String(text) => taken.extend(text.chars().filter(|letter| is_mark(*letter))),
        Value::Array(items) => items.iter().for_each(|item| private_letters(item, taken)),
        Value::Object(map) => {
            for (key, value) in map {
                taken.extend(key.chars().filter(|letter| is_mark(*letter)));
                private_letters(value, taken);
            }
        }
        _ => {}
    }
}
