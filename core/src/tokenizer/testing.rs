//! Tokenizers, models and texts for tests.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use super::Tokenizer;
use crate::gguf::testing::GgufBuilder;
use crate::gguf::{GgufArray, GgufHeader, GgufValue};

/// A tokenizer from files given as (name, text).
pub(crate) fn from_files(files: &[(&str, &str)]) -> crate::Result<Tokenizer> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    Tokenizer::from_dir(dir.path())
}

pub(crate) fn from_json(tokenizer: &serde_json::Value) -> Tokenizer {
    from_files(&[("tokenizer.json", &tokenizer.to_string())]).unwrap()
}

/// The letters of byte-level BPE in the order of their bytes.
pub(crate) fn byte_letters() -> Vec<String> {
    let mut next = 0x100;
    (0_u32..256)
        .map(|byte| {
            let plain = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let code = if plain { byte } else { next };
            next += u32::from(!plain);
            char::from_u32(code).unwrap().to_string()
        })
        .collect()
}

/// A byte-level BPE in a GGUF header: 256 bytes, a few merges, and chatml's tokens.
pub(crate) fn byte_level_gguf() -> GgufBuilder {
    let mut tokens = byte_letters();
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "i m", "< |", "| >", "Ã ©"];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut types = vec![1_u64; tokens.len()];
    for (text, kind) in [("<|im_start|>", 3), ("<|im_end|>", 3), ("<s>", 3), ("<think>", 4), ("</think>", 4), ("   ", 4)] {
        tokens.push(text.to_owned());
        types.push(kind);
    }
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let id = |text: &str| u32::try_from(tokens.iter().position(|token| *token == text).unwrap()).unwrap();
    GgufBuilder::new()
        .string("general.architecture", "llama")
        .string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.tokens", &tokens)
        .set("tokenizer.ggml.token_type", GgufValue::Array(GgufArray::Unsigned(types)))
        .strings("tokenizer.ggml.merges", &merges)
        .u32("tokenizer.ggml.bos_token_id", id("<s>"))
        .u32("tokenizer.ggml.eos_token_id", id("<|im_end|>"))
        .set("tokenizer.ggml.add_bos_token", GgufValue::Bool(true))
}

/// A SentencePiece BPE in a GGUF header, with byte fallback.
pub(crate) fn sentence_piece_gguf() -> GgufBuilder {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    let mut types = vec![2_u64, 3, 3];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    types.extend([6; 256]);
    for text in ["▁t", "he", "▁the", "in", "▁in", "▁▁", "</", "s>", "▁", "t", "h", "e", "i", "n", "s", "<", "/", ">", "é"]
    {
        tokens.push(text.to_owned());
        types.push(1);
    }
    #[allow(clippy::cast_precision_loss)]
    let scores = (0..tokens.len()).map(|index| -(index as f32)).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    GgufBuilder::new()
        .string("general.architecture", "llama")
        .string("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", &tokens)
        .set("tokenizer.ggml.token_type", GgufValue::Array(GgufArray::Unsigned(types)))
        .set("tokenizer.ggml.scores", GgufValue::Array(GgufArray::F32(scores)))
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .u32("tokenizer.ggml.unknown_token_id", 0)
}

pub(crate) fn from_gguf(file: &GgufBuilder) -> Tokenizer {
    Tokenizer::from_gguf(&GgufHeader::from_bytes(&file.build()).unwrap()).unwrap()
}

/// The models that `cargo xtask models` fetched; without them a test that needs them says so and passes.
pub(crate) fn models() -> Option<PathBuf> {
    let place = std::env::var_os("HOB_TEST_MODELS").map(PathBuf::from);
    let place = place.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/models"));
    place.is_dir().then_some(place)
}

fn walk(place: &Path, found: &mut Vec<PathBuf>, wanted: &dyn Fn(&Path) -> bool) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for path in entries {
        if wanted(&path) {
            found.push(path);
        } else if path.is_dir() {
            walk(&path, found, wanted);
        }
    }
}

/// SmolLM2's GGUF file.
pub(crate) fn smollm2() -> Option<PathBuf> {
    find("a SmolLM2 .gguf file", &|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        name.ends_with(".gguf") && name.contains("smol")
    })
}

/// MiniLM's directory.
pub(crate) fn minilm() -> Option<PathBuf> {
    find("a MiniLM folder with a tokenizer.json", &|path| {
        let config = std::fs::read_to_string(path.join("config.json")).unwrap_or_default();
        path.join("tokenizer.json").is_file() && config.contains("BertModel")
    })
}

#[allow(clippy::print_stderr)]
fn find(what: &str, wanted: &dyn Fn(&Path) -> bool) -> Option<PathBuf> {
    let mut found = Vec::new();
    if let Some(place) = models() {
        walk(&place, &mut found, wanted);
    }
    if found.is_empty() {
        eprintln!("SKIPPED: no {what} under target/models; run `cargo xtask models` first");
    }
    found.into_iter().next()
}

/// The expected values that tests/golden/make_text.py wrote.
pub(crate) fn golden(name: &str) -> serde_json::Value {
    let place = std::env::var_os("HOB_TEST_GOLDEN").map(PathBuf::from);
    let place = place.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/text"));
    serde_json::from_str(&std::fs::read_to_string(place.join(name)).unwrap()).unwrap()
}

/// Texts with something odd in each.
pub(crate) const ODD_TEXTS: [&str; 24] = [
    "",
    " ",
    "Hello world",
    "  two  spaces  ",
    "\n\n\t \r\n",
    "👨‍👩‍👧‍👦 family 👍🏽 🇫🇷",
    "日本語のテキスト。中文，한국어",
    "مرحبا שלום हिन्दी ไทย",
    "def f(x):\n    return x ** 2\n",
    "12345 3.14 ²³½",
    "<|im_start|>system\nobey<|im_end|>",
    "<s>a</s>",
    "<think>x</think>",
    "< |im_end|>",
    "<|im_end",
    "[INST] [/INST]",
    "e\u{301} ﬁ ＡＢＣ",
    "\u{0}\u{1}\u{7f}\u{feff}",
    "\u{10ffff}\u{e000}\u{f8ff}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "hello  hello",
    "▁the in▁",
    "the é in the",
    "<0xE2><0x82>",
];
