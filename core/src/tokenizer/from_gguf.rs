//! A tokenizer from the metadata of a GGUF file.

use std::collections::{HashMap, HashSet};

use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as DecoderSequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::bpe::BPE;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::bert::BertNormalizer;
use tokenizers::normalizers::prepend::Prepend;
use tokenizers::normalizers::replace::Replace;
use tokenizers::normalizers::utils::Sequence as NormalizerSequence;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

use super::from_hf::end_of_turn_ids;
use super::{Parts, Roles, bad, bos_eos_processor, pre};
use crate::error::{Error, Result};
use crate::gguf::GgufHeader;

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const PRE: &str = "tokenizer.ggml.pre";

// Values of `tokenizer.ggml.token_type`.
const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;
const BYTE: u64 = 6;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What a vocabulary of some kind adds around a text when the file does not say.
struct Built {
    inner: Tokenizer,
    add_bos: bool,
    add_eos: bool,
    unk: Option<u32>,
}

struct Vocabulary<'a> {
    header: &'a GgufHeader,
    tokens: &'a [String],
    types: Vec<u64>,
}

impl Vocabulary<'_> {
    fn failed(&self, key: &str, error: Failure) -> Error {
        bad(self.header.path(), key, error)
    }

    fn type_of(&self, id: usize) -> u64 {
        self.types.get(id).copied().unwrap_or(NORMAL)
    }

    /// The id under `key`, which must be a token.
    fn id(&self, key: &str) -> Result<Option<u32>> {
        let Some(id) = self.header.opt_u64(key)? else { return Ok(None) };
        // Some writers store -1 as an unsigned number for "none".
        if id == u64::from(u32::MAX) || id == u64::MAX {
            return Ok(None);
        }
        match u32::try_from(id) {
            Ok(id) if (id as usize) < self.tokens.len() => Ok(Some(id)),
            _ => {
                let what = format!("token {id} of a vocabulary of {}", self.tokens.len());
                Err(Error::bad_model(self.header.path(), key, what))
            }
        }
    }

    /// Token to id. Of two equal tokens the first one counts, and the other keeps its id under a name no text has.
    fn map(&self, spell: impl Fn(usize, &str) -> String) -> HashMap<String, u32> {
        let mut map = HashMap::with_capacity(self.tokens.len());
        for (id, token) in (0_u32..).zip(self.tokens) {
            let text = spell(id as usize, token);
            let text = if map.contains_key(&text) { format!("{text}\u{0}{id}") } else { text };
            map.insert(text, id);
        }
        map
    }
}

pub(super) fn load(header: &GgufHeader) -> Result<Parts> {
    let path = header.path();
    let tokens = header.strings(TOKENS)?;
    if tokens.is_empty() {
        return Err(Error::bad_model(path, TOKENS, "an empty vocabulary"));
    }
    let types = header.opt_u64s(TYPES)?.unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        return Err(Error::bad_model(path, TYPES, format!("{} types for {} tokens", types.len(), tokens.len())));
    }
    let vocabulary = Vocabulary { header, tokens, types };
    let model = header.string(MODEL)?;
    let mut built = match model {
        "gpt2" => byte_level(&vocabulary)?,
        "llama" => sentence_piece(&vocabulary)?,
        "bert" => word_piece(&vocabulary)?,
        other => {
            return Err(Error::unsupported(format!(
                "{}: {MODEL}: {other}; Hob knows gpt2 (byte-level BPE), llama (SentencePiece BPE) and bert (WordPiece)",
                path.display()
            )));
        }
    };
    add_tokens(&vocabulary, &mut built.inner)?;

    let bos = vocabulary.id("tokenizer.ggml.bos_token_id")?;
    let eos = vocabulary.id("tokenizer.ggml.eos_token_id")?;
    let pad = vocabulary.id("tokenizer.ggml.padding_token_id")?;
    let unk = vocabulary.id("tokenizer.ggml.unknown_token_id")?.or(built.unk);
    let text_of = |id: u32| tokens[id as usize].as_str();
    let (roles, bos, eos, last) = if model == "bert" {
        let special = |key: &str, name: &str| -> Result<u32> {
            vocabulary.id(key)?.or_else(|| built.inner.token_to_id(name)).ok_or_else(|| Error::bad_model(path, key, "missing"))
        };
        let cls = special("tokenizer.ggml.cls_token_id", "[CLS]")?;
        let sep = special("tokenizer.ggml.seperator_token_id", "[SEP]")?;
        let pad = pad.or_else(|| built.inner.token_to_id("[PAD]"));
        (Roles { bos: None, eos: None, pad, unk }, Some(cls), Some(sep), Some(sep))
    } else {
        let wanted = |key: &str, default: bool| header.opt_bool(key).map(|flag| flag.unwrap_or(default));
        let first = if wanted("tokenizer.ggml.add_bos_token", built.add_bos)? { bos } else { None };
        let last = if wanted("tokenizer.ggml.add_eos_token", built.add_eos)? { eos } else { None };
        (Roles { bos, eos, pad, unk }, first, last, eos)
    };
    let processor = if model == "bert" {
        bert_processor(bos.map(|id| (text_of(id), id)), last.map(|id| (text_of(id), id)))
    } else {
        bos_eos_processor(bos.map(|id| (text_of(id), id)), eos.map(|id| (text_of(id), id)))
    };
    built.inner.with_post_processor(processor.map_err(|error| vocabulary.failed("post-processor", error))?);

    let mut eos_ids: Vec<u32> = roles.eos.into_iter().collect();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        eos_ids.extend(vocabulary.id(key)?);
    }
    if let Some(template) = header.opt_string("tokenizer.chat_template")? {
        eos_ids.extend(end_of_turn_ids(&built.inner, template));
    }
    let named = [("bos_token", roles.bos), ("eos_token", roles.eos), ("unk_token", roles.unk), ("pad_token", roles.pad)];
    let role_texts = named.into_iter().filter_map(|(name, id)| Some((name.to_owned(), text_of(id?).to_owned()))).collect();
    Ok(Parts { source: path.to_path_buf(), inner: built.inner, roles, eos_ids, max_length: None, role_texts })
}

/// Control tokens become special, user-defined ones plain added tokens. Some files forget to mark the tokens that begin and
/// end texts and turns; when they look like markup, they count as control tokens.
fn add_tokens(vocabulary: &Vocabulary<'_>, inner: &mut Tokenizer) -> Result<()> {
    let mut ends = HashSet::new();
    for key in ["bos", "eos", "eot", "eom"] {
        ends.extend(vocabulary.id(&format!("tokenizer.ggml.{key}_token_id"))?);
    }
    let mut added = Vec::new();
    for (id, text) in vocabulary.tokens.iter().enumerate() {
        let forgotten = u32::try_from(id).is_ok_and(|id| ends.contains(&id)) && text.starts_with(['<', '[']);
        let kind = if forgotten { CONTROL } else { vocabulary.type_of(id) };
        if text.is_empty() || !matches!(kind, CONTROL | USER_DEFINED | UNKNOWN) {
            continue;
        }
        if inner.token_to_id(text).map(|found| found as usize) == Some(id) {
            added.push(AddedToken::from(text.clone(), kind != USER_DEFINED).normalized(false));
        }
    }
    inner.add_tokens(added).map_err(|error| vocabulary.failed(TYPES, error))?;
    Ok(())
}

/// Byte-level BPE as in GPT-2, Llama 3, Qwen and most others.
fn byte_level(vocabulary: &Vocabulary<'_>) -> Result<Built> {
    let header = vocabulary.header;
    let name = header.opt_string(PRE)?.unwrap_or("default");
    let splitter = pre::by_name(name).map_err(|error| vocabulary.failed(PRE, error))?;
    let Some(splitter) = splitter else {
        return Err(Error::unsupported(format!("{}: {PRE}: {name}: a pre-tokenizer Hob does not know", header.path().display())));
    };
    let vocab = vocabulary.map(|_, token| token.to_owned());
    let mut merges = Vec::new();
    for (rank, line) in header.strings(MERGES)?.iter().enumerate() {
        // The left part is never empty, so a space in first place belongs to it.
        let first = line.chars().next().map_or(0, char::len_utf8);
        match line[first..].find(' ') {
            Some(at) => merges.push((line[..first + at].to_owned(), line[first + at + 1..].to_owned())),
            None => return Err(Error::bad_model(header.path(), MERGES, format!("merge {rank} has no second part"))),
        }
    }
    let bpe = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<Vocab>(), merges)
        .cache_capacity(0)
        .ignore_merges(splitter.ignore_merges)
        .build()
        .map_err(|error| vocabulary.failed(MERGES, error))?;
    let mut inner = Tokenizer::new(bpe);
    inner.with_normalizer(splitter.normalizer).map_err(|error| vocabulary.failed(PRE, error))?;
    inner.with_pre_tokenizer(Some(splitter.splitter));
    inner.with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::new(false, true, true))));
    Ok(Built { inner, add_bos: splitter.add_bos, add_eos: splitter.add_eos, unk: None })
}

/// SentencePiece BPE as in Llama 2, Mistral 7B, Gemma: merges follow from the scores.
fn sentence_piece(vocabulary: &Vocabulary<'_>) -> Result<Built> {
    let header = vocabulary.header;
    let scores = header.opt_f32s(SCORES)?.ok_or_else(|| Error::bad_model(header.path(), SCORES, "missing"))?;
    if scores.len() != vocabulary.tokens.len() {
        let what = format!("{} scores for {} tokens", scores.len(), vocabulary.tokens.len());
        return Err(Error::bad_model(header.path(), SCORES, what));
    }
    let vocab = vocabulary.map(|_, token| token.to_owned());
    let unk = vocabulary.id("tokenizer.ggml.unknown_token_id")?;
    let unk = unk.or_else(|| (0_u32..).zip(&vocabulary.types).find(|(_, kind)| **kind == UNKNOWN).map(|(id, _)| id)).unwrap_or(0);
    let merges = merges_from_scores(vocabulary, &vocab, scores);
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<Vocab>(), merges)
        .cache_capacity(0)
        .fuse_unk(true)
        .byte_fallback(true);
    if let Some(text) = vocabulary.tokens.get(unk as usize) {
        builder = builder.unk_token(text.clone());
    }
    let bpe = builder.build().map_err(|error| vocabulary.failed(TOKENS, error))?;
    let mut inner = Tokenizer::new(bpe);
    let prefix = header.opt_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let key = "tokenizer.ggml.add_space_prefix";
    let underline = |error| vocabulary.failed(key, error);
    let mut normalizers = Vec::new();
    if prefix {
        normalizers.push(NormalizerWrapper::Prepend(Prepend::new("▁".to_owned())));
    }
    normalizers.push(NormalizerWrapper::Replace(Replace::new(" ", "▁").map_err(underline)?));
    inner.with_normalizer(Some(NormalizerSequence::new(normalizers))).map_err(underline)?;
    let mut decoders = vec![
        DecoderWrapper::Replace(Replace::new("▁", " ").map_err(underline)?),
        DecoderWrapper::ByteFallback(ByteFallback::new()),
        DecoderWrapper::Fuse(Fuse::new()),
    ];
    if prefix {
        decoders.push(DecoderWrapper::Strip(Strip::new(' ', 1, 0)));
    }
    inner.with_decoder(Some(DecoderWrapper::Sequence(DecoderSequence::new(decoders))));
    Ok(Built { inner, add_bos: true, add_eos: false, unk: Some(unk) })
}

/// Every way to put a token together from two others, the best-scored token first.
fn merges_from_scores(vocabulary: &Vocabulary<'_>, vocab: &HashMap<String, u32>, scores: &[f32]) -> Vec<(String, String)> {
    let skip = |id: usize| matches!(vocabulary.type_of(id), UNKNOWN | CONTROL | UNUSED | BYTE);
    let skipped: HashSet<&str> =
        vocabulary.tokens.iter().enumerate().filter(|(id, _)| skip(*id)).map(|(_, text)| text.as_str()).collect();
    let mut merges: Vec<(f32, u32, (u32, u32), usize)> = Vec::new();
    for (id, token) in (0_u32..).zip(vocabulary.tokens) {
        // A hostile vocabulary of long tokens must not cost quadratic time.
        if skip(id as usize) || token.len() > 256 {
            continue;
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if skipped.contains(left) || skipped.contains(right) {
                continue;
            }
            if let (Some(left), Some(right)) = (vocab.get(left), vocab.get(right)) {
                merges.push((scores[id as usize], id, (*left, *right), at));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    merges
        .into_iter()
        .map(|(_, id, _, at)| {
            let (left, right) = vocabulary.tokens[id as usize].split_at(at);
            (left.to_owned(), right.to_owned())
        })
        .collect()
}

/// BERT's WordPiece. GGUF files mark the beginning of words with `▁` where `vocab.txt` marks the rest with `##`.
fn word_piece(vocabulary: &Vocabulary<'_>) -> Result<Built> {
    let header = vocabulary.header;
    let vocab = vocabulary.map(|id, token| match token.strip_prefix('▁') {
        Some(word) => word.to_owned(),
        None if vocabulary.type_of(id) != NORMAL || (token.starts_with('[') && token.ends_with(']')) => token.to_owned(),
        None => format!("##{token}"),
    });
    let unk = vocabulary.id("tokenizer.ggml.unknown_token_id")?.or_else(|| vocab.get("[UNK]").copied());
    let unk_text = unk.map_or("[UNK]", |id| vocabulary.tokens[id as usize].as_str()).to_owned();
    let model = WordPiece::builder()
        .vocab(vocab.into_iter().collect::<Vocab>())
        .unk_token(unk_text)
        .build()
        .map_err(|error| vocabulary.failed(TOKENS, error))?;
    let mut inner = Tokenizer::new(model);
    let lowercase = header.opt_bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
    let normalizer = NormalizerWrapper::BertNormalizer(BertNormalizer::new(true, true, None, lowercase));
    inner.with_normalizer(Some(normalizer)).map_err(|error| vocabulary.failed(MODEL, error))?;
    inner.with_pre_tokenizer(Some(PreTokenizerWrapper::BertPreTokenizer(BertPreTokenizer)));
    inner.with_decoder(Some(DecoderWrapper::WordPiece(WordPieceDecoder::new("##".to_owned(), true))));
    // The brackets' tokens are special whatever their declared type.
    let brackets: Vec<AddedToken> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        .into_iter()
        .filter(|name| inner.token_to_id(name).is_some())
        .map(|name| AddedToken::from(name, true))
        .collect();
    inner.add_special_tokens(brackets).map_err(|error| vocabulary.failed(TOKENS, error))?;
    Ok(Built { inner, add_bos: true, add_eos: true, unk })
}

/// `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, the second text with type 1.
fn bert_processor(
    cls: Option<(&str, u32)>,
    sep: Option<(&str, u32)>,
) -> std::result::Result<Option<tokenizers::PostProcessorWrapper>, Failure> {
    let (Some((cls_text, cls)), Some((sep_text, sep))) = (cls, sep) else { return Ok(None) };
    let processor = tokenizers::processors::bert::BertProcessing::new((sep_text.to_owned(), sep), (cls_text.to_owned(), cls));
    Ok(Some(tokenizers::PostProcessorWrapper::Bert(processor)))
}

/// The crate's map type for vocabularies.
type Vocab = tokenizers::models::bpe::Vocab;
