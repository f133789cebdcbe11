//! How byte-level BPE vocabularies in GGUF files split a text into words before merging.
//!
//! A GGUF file only names its pre-tokenizer (`tokenizer.ggml.pre`). The rules behind the names are those of each model's own
//! `tokenizer.json`, built here from the `tokenizers` crate's parts.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

/// What a pre-tokenizer's name stands for.
pub(super) struct PreTokenizer {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) splitter: PreTokenizerWrapper,
    /// A word that is a token as a whole is taken as it is, without merging.
    pub(super) ignore_merges: bool,
    /// Whether a BOS is added when the file does not say.
    pub(super) add_bos: bool,
    /// Whether an EOS is added when the file does not say (RoBERTa's `</s>`).
    pub(super) add_eos: bool,
}

// The pieces the patterns of GPT-4-like splitters are made of.
const CONTRACTION: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const WORD: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+";
const PUNCTUATION: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*";
const SPACES: &str = r"\s*[\r\n]+|\s+(?!\S)|\s+";

/// GPT-2's splitter, the same as [`ByteLevel`]'s own pattern but for the last alternative, which plain splitting makes moot.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)";

/// Words in cased scripts end where a lower-case letter is followed by an upper-case one (GPT-4o, Mistral's Tekken).
const CASED_WORD_A: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+";
const CASED_WORD_B: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*";

fn llama3() -> String {
    format!(r"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{PUNCTUATION}|{SPACES}")
}

fn qwen2() -> String {
    format!(r"{CONTRACTION}|{WORD}|\p{{N}}|{PUNCTUATION}|{SPACES}")
}

fn qwen35() -> String {
    format!(r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}")
}

fn tekken() -> String {
    format!(r"{CASED_WORD_A}|{CASED_WORD_B}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}")
}

fn gpt4o() -> String {
    format!(r"{CASED_WORD_A}{CONTRACTION}?|{CASED_WORD_B}{CONTRACTION}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}")
}

/// The letters DeepSeek's first models take as words: cased alphabets, spelled out in their `tokenizer.json`.
const DEEPSEEK_LETTERS: &str = concat!(
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}",
    r"\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}",
    r"\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}",
    r"\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}",
    r"\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}",
    r"\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}",
    r"\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}",
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}",
    r"\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}",
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}",
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
);

/// How one stage of splitting treats what its pattern matches.
enum Stage {
    /// Each match becomes a word of its own.
    Isolate(String),
    /// Each digit becomes a word of its own.
    Digits,
    /// Runs of digits become words.
    DigitRuns,
}

fn build(stages: Vec<Stage>, gpt2_words: bool) -> tokenizers::Result<PreTokenizerWrapper> {
    let mut parts = Vec::with_capacity(stages.len() + 1);
    for stage in stages {
        parts.push(match stage {
            Stage::Isolate(pattern) => {
                PreTokenizerWrapper::Split(Split::new(SplitPattern::Regex(pattern), SplitDelimiterBehavior::Isolated, false)?)
            }
            Stage::Digits => PreTokenizerWrapper::Digits(Digits::new(true)),
            Stage::DigitRuns => PreTokenizerWrapper::Digits(Digits::new(false)),
        });
    }
    parts.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, gpt2_words)));
    Ok(PreTokenizerWrapper::Sequence(Sequence::new(parts)))
}

fn plain(splitter: PreTokenizerWrapper) -> PreTokenizer {
    PreTokenizer { normalizer: None, splitter, ignore_merges: false, add_bos: false, add_eos: false }
}

fn one(pattern: String) -> tokenizers::Result<PreTokenizer> {
    Ok(plain(build(vec![Stage::Isolate(pattern)], false)?))
}

/// The pre-tokenizer called `name`; `None` when Hob does not know it.
pub(super) fn by_name(name: &str) -> tokenizers::Result<Option<PreTokenizer>> {
    let isolate = |pattern: &str| Stage::Isolate(pattern.to_owned());
    Ok(Some(match name {
        // GGUF files from before the key existed. The rule is llama.cpp's, the only definition there is.
        "default" => plain(build(
            vec![isolate(r"[\p{P}\$\+<=>\^~\|]+"), isolate(GPT2), Stage::DigitRuns, isolate("[0-9][0-9][0-9]")],
            false,
        )?),
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "exaone4" | "mellum" | "trillion" | "granite-docling" | "gigachat"
        | "a.x-4.0" | "modern-bert" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" => plain(build(vec![], true)?),
        "roberta-bpe" | "jina-v1-en" | "jina-v2-code" => {
            PreTokenizer { add_bos: true, add_eos: true, ..plain(build(vec![], true)?) }
        }
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
            plain(build(vec![Stage::Digits], true)?)
        }
        "falcon" => plain(build(vec![isolate(r"[\p{P}\$\+<=>\^~\|`]+"), isolate(GPT2), isolate("[0-9][0-9][0-9]")], false)?),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" | "jina-v5-nano" => {
            PreTokenizer { ignore_merges: true, add_bos: true, ..one(llama3())? }
        }
        "glm4" | "glm5" => PreTokenizer { ignore_merges: true, ..one(llama3())? },
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => one(llama3())?,
        "qwen2" | "megrez" => PreTokenizer { normalizer: Some(NormalizerWrapper::NFC(NFC)), ..one(qwen2())? },
        "stablelm2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "hunyuan" | "solar-open" | "grok-2" => one(qwen2())?,
        "qwen35" => PreTokenizer { normalizer: Some(NormalizerWrapper::NFC(NFC)), ..one(qwen35())? },
        "tekken" => PreTokenizer { ignore_merges: true, ..one(tekken())? },
        "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" => one(gpt4o())?,
        "deepseek-llm" => plain(build(
            vec![
                isolate("[\r\n]"),
                Stage::Isolate(format!(r"\s?[{DEEPSEEK_LETTERS}]+")),
                isolate(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
                isolate(r"\s+$"),
                isolate("[一-龥ࠀ-一가-퟿]+"),
                Stage::Digits,
            ],
            false,
        )?),
        "deepseek-coder" => plain(build(
            vec![isolate("[\r\n]"), isolate(r"\s?\p{L}+"), isolate(r"\s?\p{P}+"), isolate("[一-龥ࠀ-一가-퟿]+"), Stage::Digits],
            false,
        )?),
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" => plain(build(
            vec![
                isolate(r"\p{N}{1,3}"),
                isolate("[一-龥぀-ゟ゠-ヿ]+"),
                Stage::Isolate(format!(
                    r"{}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
                    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##
                )),
            ],
            false,
        )?),
        _ => return Ok(None),
    }))
}
