//! Text to tokens and back.
//!
//! A [`Tokenizer`] is built from a Hugging Face directory or from the metadata of a GGUF file, on the `tokenizers` crate. It
//! never truncates or pads by itself, can be shared between threads, and is cheap to clone.
//!
//! User text is encoded with `parse_special: false`: whatever it says, no id of a special token comes out of it (see
//! [`EncodeOptions`]). Special tokens are those marked `special` in the model's files, plus the tags that structure a
//! conversation without being marked so (`<think>`, `<tool_call>`, `[INST]`, and anything shaped `<|…|>`).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{Decoder, PostProcessorWrapper, TruncationParams, TruncationStrategy};

use crate::error::{Error, Result};
use crate::gguf::GgufHeader;
use crate::text_stream::{DecodePlan, TextStream};

use pipeline::AddedTokens;

mod from_gguf;
mod from_hf;
mod pipeline;
mod pre;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub(crate) use from_hf::{read_json, read_text};
pub(crate) use pipeline::Untrusted;

/// How a text is turned into tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Add the special tokens the tokenizer puts around a text (BOS, `[CLS]` … `[SEP]`). Default true.
    ///
    /// When the text itself begins with the BOS token (and `parse_special` lets it count), no second one is added.
    pub add_special: bool,
    /// Recognise special tokens written in the text. Default false, which is right for text of users: `<|im_end|>` then
    /// becomes ordinary tokens. Added tokens that are not special (for example runs of spaces) are recognised either way.
    pub parse_special: bool,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self { add_special: true, parse_special: false }
    }
}

/// The tokens of a text or of a pair of texts. Nothing is padding, so the attention mask is all ones.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoding {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Token type (segment) ids, as many as `ids`: 0, and 1 for the second text of a pair where the model tells them apart.
    pub type_ids: Vec<u32>,
    /// How many tokens were cut off to fit a maximum length.
    pub dropped: usize,
}

impl Encoding {
    /// The number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

/// Which text of a pair is cut when both are too long together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PairTruncation {
    /// The longer one; of two equally long ones the second, as Hugging Face's `longest_first` does (the default).
    #[default]
    LongestFirst,
    /// Only the second one; an error when the first leaves no room for it.
    OnlySecond,
}

/// The ids of the tokens with a role, as far as the model has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Roles {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) pad: Option<u32>,
    pub(crate) unk: Option<u32>,
}

/// What a loader found; [`Tokenizer::assemble`] turns it into a tokenizer.
struct Parts {
    source: PathBuf,
    inner: tokenizers::Tokenizer,
    roles: Roles,
    eos_ids: Vec<u32>,
    max_length: Option<usize>,
    /// Token strings by role as templates want them (`bos_token`, …).
    role_texts: Vec<(String, String)>,
}

struct Inner {
    source: PathBuf,
    inner: tokenizers::Tokenizer,
    added: AddedTokens,
    plan: DecodePlan,
    roles: Roles,
    eos_ids: Vec<u32>,
    max_length: Option<usize>,
    vocab_size: usize,
    role_texts: Vec<(String, String)>,
}

/// A model's tokenizer. Cloning is cheap; all clones share one vocabulary.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("source", &self.0.source).field("vocab_size", &self.0.vocab_size).finish_non_exhaustive()
    }
}

/// Names of tokens that end a turn. One that is an added token of the vocabulary counts as an end of generation when the
/// model's chat template writes it.
const END_OF_TURN: [&str; 10] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|end|>",
    "<|endofturn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
];

impl Tokenizer {
    /// Reads `tokenizer.json` and the files beside it (`tokenizer_config.json`, `special_tokens_map.json`, `config.json`,
    /// `generation_config.json`, `chat_template.jinja`) from a Hugging Face or MLX directory.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) without a `tokenizer.json`, [`BadModel`](crate::ErrorKind::BadModel) naming
    /// file and field for damaged files.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        guard(&dir.join("tokenizer.json"), || from_hf::load(dir)).and_then(Self::assemble)
    }

    /// Builds the tokenizer that a GGUF file describes in its `tokenizer.ggml.*` metadata.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) naming a tokenizer model or pre-tokenizer Hob does not know,
    /// [`BadModel`](crate::ErrorKind::BadModel) naming file and key for damaged metadata.
    pub fn from_gguf(header: &GgufHeader) -> Result<Self> {
        guard(header.path(), || from_gguf::load(header)).and_then(Self::assemble)
    }

    fn assemble(mut parts: Parts) -> Result<Self> {
        let source = parts.source;
        guard(&source, || {
            parts.inner.with_padding(None);
            parts.inner.with_truncation(None).map_err(|error| bad(&source, "truncation", error))?;
            let plan = DecodePlan::new(parts.inner.get_decoder())
                .map_err(|what| Error::unsupported(format!("{}: decoder: {what}", source.display())))?;
            let roles = parts.roles;
            let named: Vec<u32> =
                [roles.bos, roles.eos, roles.pad].into_iter().flatten().chain(parts.eos_ids.iter().copied()).collect();
            let added = AddedTokens::new(&parts.inner, &named, roles.unk)?;
            let highest = parts.inner.get_vocab(true).into_values().max();
            let vocab_size = highest.map_or(0, |id| id as usize + 1);
            parts.eos_ids.sort_unstable();
            parts.eos_ids.dedup();
            parts.eos_ids.retain(|id| (*id as usize) < vocab_size);
            Ok(Self(Arc::new(Inner {
                source: source.clone(),
                inner: parts.inner,
                added,
                plan,
                roles: parts.roles,
                eos_ids: parts.eos_ids,
                max_length: parts.max_length,
                vocab_size,
                role_texts: parts.role_texts,
            })))
        })
    }

    /// Where the tokenizer came from: a directory's `tokenizer.json` or a GGUF file.
    #[must_use]
    pub fn source(&self) -> &Path {
        &self.0.source
    }

    /// Turns `text` into tokens.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Encoding> {
        let untrusted = if options.parse_special { Untrusted::Nothing } else { Untrusted::Everything };
        self.encode_marked(text, untrusted, options.add_special)
    }

    /// Turns `text` into tokens, where only some bytes are a user's.
    pub(crate) fn encode_marked(&self, text: &str, untrusted: Untrusted<'_>, add_special: bool) -> Result<Encoding> {
        let tokenizer = &*self.0;
        guard(&tokenizer.source, || {
            let raw = pipeline::encode(&tokenizer.inner, &tokenizer.added, text, 0, untrusted)?;
            let begins_with_bos =
                raw.get_ids().first().is_some_and(|first| Some(*first) == tokenizer.roles.bos && raw.get_tokens()[0].is_empty());
            let full = tokenizer.inner.post_process(raw, None, add_special).map_err(processor_failed)?;
            let (mut ids, mut type_ids) = (full.get_ids().to_vec(), full.get_type_ids().to_vec());
            if add_special && begins_with_bos && ids.len() > 1 && ids[0] == ids[1] {
                ids.remove(0);
                type_ids.remove(0);
            }
            Ok(Encoding { ids, type_ids, dropped: 0 })
        })
    }

    /// Turns a user's text into at most `max_length` tokens, special ones included and kept; the text is cut at its end.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) when `max_length` has no room beside the special tokens.
    pub fn encode_cut(&self, text: &str, max_length: usize) -> Result<Encoding> {
        let tokenizer = &*self.0;
        guard(&tokenizer.source, || {
            let mut raw = pipeline::encode(&tokenizer.inner, &tokenizer.added, text, 0, Untrusted::Everything)?;
            let special = tokenizers::PostProcessor::added_tokens;
            let special = tokenizer.inner.get_post_processor().map_or(0, |processor| special(processor, false));
            let room = max_length.saturating_sub(special);
            if room == 0 {
                return Err(Error::invalid(format!("a limit of {max_length} tokens leaves no room beside {special} special ones")));
            }
            let dropped = raw.len().saturating_sub(room);
            raw.truncate(room, 0, tokenizers::TruncationDirection::Right);
            let full = tokenizer.inner.post_process(raw, None, true).map_err(processor_failed)?;
            Ok(Encoding { ids: full.get_ids().to_vec(), type_ids: full.get_type_ids().to_vec(), dropped })
        })
    }

    /// A tokenizer whose tokens are bytes, and `end`, which ends a turn: for scripted models.
    pub(crate) fn bytes(end: u32) -> Result<Self> {
        let alphabet: serde_json::Map<String, serde_json::Value> =
            byte_alphabet().chain([("<|end|>".to_owned(), end)]).map(|(text, id)| (text, id.into())).collect();
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": [{"id": end, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            "model": {"type": "BPE", "vocab": alphabet, "merges": []}
        });
        let source = PathBuf::from("fake");
        let mut inner = json.to_string().parse().map_err(|error| bad(&source, "tokenizer", error))?;
        from_hf::limit_cache(&mut inner);
        let roles = Roles { eos: Some(end), ..Roles::default() };
        Self::assemble(Parts { source, inner, roles, eos_ids: vec![end], max_length: None, role_texts: Vec::new() })
    }

    /// Turns a pair of user texts into one sequence for a cross-encoder, with special tokens and token types exactly as
    /// Hugging Face's tokenizer makes them, cut to at most `max_length` tokens (special ones included).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) with both numbers when `truncation` cannot make it fit.
    pub fn encode_pair(&self, first: &str, second: &str, max_length: usize, truncation: PairTruncation) -> Result<Encoding> {
        let tokenizer = &*self.0;
        guard(&tokenizer.source, || {
            let first = pipeline::encode(&tokenizer.inner, &tokenizer.added, first, 0, Untrusted::Everything)?;
            let second = pipeline::encode(&tokenizer.inner, &tokenizer.added, second, 1, Untrusted::Everything)?;
            let special = tokenizers::PostProcessor::added_tokens;
            let special = tokenizer.inner.get_post_processor().map_or(0, |processor| special(processor, true));
            let room = max_length.saturating_sub(special);
            let before = first.len() + second.len();
            let (strategy, fits) = match truncation {
                PairTruncation::LongestFirst => (TruncationStrategy::LongestFirst, room > 0),
                PairTruncation::OnlySecond => (TruncationStrategy::OnlySecond, before <= room || first.len() < room),
            };
            if !fits {
                return Err(Error::invalid(format!(
                    "the first text has {} tokens and {special} special tokens are needed, the limit is {max_length}; shorten it",
                    first.len()
                )));
            }
            let limits = TruncationParams { max_length: room, strategy, ..TruncationParams::default() };
            let (first, second) = tokenizers::truncate_encodings(first, Some(second), &limits)
                .map_err(|error| Error::invalid(format!("a pair does not fit {max_length} tokens")).with_source(error))?;
            let dropped = before - first.len() - second.as_ref().map_or(0, tokenizers::Encoding::len);
            let full = tokenizer.inner.post_process(first, second, true).map_err(processor_failed)?;
            Ok(Encoding { ids: full.get_ids().to_vec(), type_ids: full.get_type_ids().to_vec(), dropped })
        })
    }

    /// Turns tokens back into text; `skip_special` leaves special tokens out. Ids outside the vocabulary are left out too.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        guard(&self.0.source, || {
            let tokens: Vec<String> = ids.iter().filter_map(|id| self.piece(*id, skip_special)).collect();
            match self.0.inner.get_decoder() {
                // BPEDecoder of the crate underflows on an empty list.
                _ if tokens.is_empty() => Ok(String::new()),
                Some(decoder) => decoder.decode(tokens).map_err(|error| Error::internal("decoding failed").with_source(error)),
                None => Ok(tokens.join(" ")),
            }
        })
    }

    /// A decoder that takes one token after another and gives whole UTF-8 at each step.
    #[must_use]
    pub fn stream(&self, skip_special: bool) -> TextStream {
        TextStream::new(self.clone(), skip_special, &[])
    }

    /// As [`stream`](Self::stream) without special tokens, except for those in `keep`: marks that a reader of the text needs
    /// ([`ChatFormat::kept_tokens`](crate::chat_output::ChatFormat::kept_tokens)).
    #[must_use]
    pub fn stream_keeping(&self, keep: &[u32]) -> TextStream {
        TextStream::new(self.clone(), true, keep)
    }

    /// The text of `id` as the decoder wants it; `None` when it is to be left out.
    pub(crate) fn piece(&self, id: u32, skip_special: bool) -> Option<String> {
        let piece = self.0.inner.id_to_token(id)?;
        let skip = skip_special && self.0.inner.get_added_vocabulary().is_special_token(&piece);
        (!skip).then_some(piece)
    }

    pub(crate) fn plan(&self) -> &DecodePlan {
        &self.0.plan
    }

    /// The id of the token spelled exactly `token`.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.inner.token_to_id(token)
    }

    /// How the token `id` is spelled in the vocabulary.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.inner.id_to_token(id)
    }

    /// The highest token id plus one. A model's own vocabulary may be larger (padded).
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// The token that begins a text.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.0.roles.bos
    }

    /// The token that ends a text; see [`eos_ids`](Self::eos_ids) for all that end a generation.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.0.roles.eos
    }

    /// The token that fills up rows of a batch.
    #[must_use]
    pub fn pad_id(&self) -> Option<u32> {
        self.0.roles.pad
    }

    /// The token for unknown text.
    #[must_use]
    pub fn unk_id(&self) -> Option<u32> {
        self.0.roles.unk
    }

    /// Every token that ends a generation, ascending: the union of `eos_token` (`tokenizer_config.json` or
    /// `special_tokens_map.json`), `eos_token_id` of `config.json` and `generation_config.json` (a number, a list, null or
    /// missing), a GGUF file's eos, eot and eom ids, and well-known end-of-turn tokens that the chat template writes.
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.0.eos_ids
    }

    /// Whether `id` ends a generation.
    #[must_use]
    pub fn is_eos(&self, id: u32) -> bool {
        self.0.eos_ids.binary_search(&id).is_ok()
    }

    /// Whether `id` is a token that user text never becomes.
    #[must_use]
    pub fn is_protected(&self, id: u32) -> bool {
        self.0.added.is_protected(id)
    }

    /// The longest input `tokenizer_config.json` declares (`model_max_length`), when it is a sensible number.
    #[must_use]
    pub fn max_length(&self) -> Option<usize> {
        self.0.max_length
    }

    /// Protected tokens: their text and whether they are marked special.
    pub(crate) fn protected_tokens(&self) -> impl Iterator<Item = (&str, bool)> {
        self.0.added.protected()
    }

    /// Variables a chat template sees, such as `bos_token`.
    pub(crate) fn role_texts(&self) -> &[(String, String)] {
        &self.0.role_texts
    }
}

fn processor_failed(error: tokenizers::Error) -> Error {
    Error::internal("the tokenizer's post-processor failed").with_source(error)
}

fn bad(file: &Path, field: &str, error: tokenizers::Error) -> Error {
    Error::bad_model(file, field, "the tokenizer refuses it").with_source(error)
}

/// A post-processor that puts `bos` before and `eos` behind each text.
fn bos_eos_processor(
    bos: Option<(&str, u32)>,
    eos: Option<(&str, u32)>,
) -> std::result::Result<Option<PostProcessorWrapper>, Box<dyn std::error::Error + Send + Sync>> {
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    // Tokens are named by fixed placeholders: a template's own syntax would trip over some real names.
    let mut single = Vec::new();
    let mut pair = Vec::new();
    let mut tokens = Vec::new();
    for (segment, kind) in [("$A", 0), ("$B", 1)] {
        let mut part = Vec::new();
        if bos.is_some() {
            part.push(format!("[BOS]:{kind}"));
        }
        part.push(format!("{segment}:{kind}"));
        if eos.is_some() {
            part.push(format!("[EOS]:{kind}"));
        }
        if kind == 0 {
            single.clone_from(&part);
        }
        pair.extend(part);
    }
    for (name, token) in [("[BOS]", bos), ("[EOS]", eos)] {
        if let Some((text, id)) = token {
            tokens.push(tokenizers::processors::template::SpecialToken::new(name.to_owned(), vec![id], vec![text.to_owned()])?);
        }
    }
    let processor = TemplateProcessing::builder().try_single(single)?.try_pair(pair)?.special_tokens(tokens).build()?;
    Ok(Some(PostProcessorWrapper::Template(processor)))
}

/// Runs `work` so that a panic in a dependency becomes an error.
pub(crate) fn guard<T>(file: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::bad_model(file, "tokenizer", "the tokenizer library panicked on it; the file is damaged or not supported"))
    })
}

/// Each byte's stand-in character in byte-level vocabularies (GPT-2's table) with the byte as its id.
fn byte_alphabet() -> impl Iterator<Item = (String, u32)> {
    let plain = |byte: u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    (0..256u32).scan(0, move |moved, byte| {
        let code = if plain(byte) {
            byte
        } else {
            *moved += 1;
            255 + *moved
        };
        Some((char::from_u32(code).unwrap_or_default().to_string(), byte))
    })
}
