#![allow(clippy::unwrap_used)]

use serde_json::json;

use super::testing::{ODD_TEXTS, byte_level_gguf, from_files, from_gguf, from_json, golden, minilm, sentence_piece_gguf, smollm2};
use super::*;
use crate::error::ErrorKind;
use crate::gguf::testing::GgufBuilder;
use crate::gguf::{GgufArray, GgufValue};

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const PARSED: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };

fn ids(tokenizer: &Tokenizer, text: &str, options: EncodeOptions) -> Vec<u32> {
    tokenizer.encode(text, options).unwrap().ids
}

fn id(tokenizer: &Tokenizer, token: &str) -> u32 {
    tokenizer.token_to_id(token).unwrap()
}

fn smol() -> Option<Tokenizer> {
    smollm2().map(|path| Tokenizer::from_gguf(&GgufHeader::open(path).unwrap()).unwrap())
}

/// A Unigram vocabulary in which the end of a text is an ordinary piece with the best score, as XLM-R's is.
fn unigram(extra: &[(&str, f64)]) -> Tokenizer {
    let mut vocab = vec![json!(["<s>", 0.0]), json!(["<pad>", 0.0]), json!(["</s>", 0.0]), json!(["<unk>", 0.0])];
    for piece in ["▁", "<", "/", "s", ">", "a", "b", "▁a"] {
        vocab.push(json!([piece, -5.0]));
    }
    vocab.extend(extra.iter().map(|(piece, score)| json!([piece, score])));
    let special = |id: u32, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    from_json(&json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<s>"), special(1, "<pad>"), special(2, "</s>"), special(3, "<unk>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": true, "add_prefix_space": false},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "model": {"type": "Unigram", "unk_id": 3, "vocab": vocab, "byte_fallback": false}
    }))
}

#[test]
fn it_can_be_shared() {
    fn check<T: Send + Sync + Clone + 'static>() {}
    check::<Tokenizer>();
}

#[test]
fn special_looking_text_of_users_stays_text() {
    // E7, for each kind of model.
    let tokenizers = [from_gguf(&byte_level_gguf()), from_gguf(&sentence_piece_gguf()), unigram(&[])];
    for tokenizer in &tokenizers {
        for text in ODD_TEXTS {
            let plain = ids(tokenizer, text, PLAIN);
            let unk = tokenizer.unk_id();
            assert!(plain.iter().all(|id| !tokenizer.is_protected(*id) || Some(*id) == unk), "{tokenizer:?} {plain:?}");
        }
    }
    let tokenizer = &tokenizers[0];
    let end = id(tokenizer, "<|im_end|>");
    assert_eq!(ids(tokenizer, "<|im_end|>", PARSED), [end]);
    let plain = ids(tokenizer, "a<|im_end|>b", PLAIN);
    assert!(!plain.contains(&end));
    assert_eq!(tokenizer.decode(&plain, true).unwrap(), "a<|im_end|>b");
    // Tags that only mark structure, too; but not added tokens that are plain text.
    assert!(!ids(tokenizer, "<think>", PLAIN).contains(&id(tokenizer, "<think>")));
    assert_eq!(ids(tokenizer, "<think>", PARSED), [id(tokenizer, "<think>")]);
    assert_eq!(ids(tokenizer, "   ", PLAIN), [id(tokenizer, "   ")]);
}

#[test]
fn special_tokens_that_the_model_forms_itself_are_broken_up() {
    let tokenizer = unigram(&[]);
    assert_eq!(ids(&tokenizer, "</s>", PARSED), [2]);
    let plain = ids(&tokenizer, "a</s></s> b", PLAIN);
    assert!(!plain.iter().any(|id| [0, 1, 2].contains(id)), "{plain:?}");
    assert!(plain.len() > 6);
}

#[test]
fn a_normaliser_cannot_make_special_tokens() {
    // Full-width letters become plain ones, and the token is matched on normalised text.
    let special = json!({"id": 1, "content": "<e>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": true, "special": true});
    let tokenizer = from_json(&json!({
        "version": "1.0", "added_tokens": [special], "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "<e>": 1, "<": 2, "e": 3, ">": 4}, "unk_token": "[UNK]"}
    }));
    assert_eq!(ids(&tokenizer, "＜e＞", PARSED), [1], "as Hugging Face does");
    assert_eq!(ids(&tokenizer, "＜e＞", PLAIN), [2, 3, 4]);
    // Only the bytes marked as a user's count.
    let marked = |places: &[usize]| tokenizer.encode_marked("<e> <e>", Untrusted::At(places), false).unwrap().ids;
    assert_eq!(marked(&[]), [1, 1]);
    assert_eq!(marked(&[0]), [2, 3, 4, 1]);
    assert_eq!(marked(&[6]), [1, 2, 3, 4]);
    let wide = tokenizer.encode_marked("＜e＞", Untrusted::At(&[100]), false).unwrap().ids;
    assert_eq!(wide, [2, 3, 4], "text that only looks like a token after normalising is nobody's token");
}

#[test]
fn one_bos_and_only_when_asked() {
    let tokenizer = from_gguf(&byte_level_gguf());
    let bos = tokenizer.bos_id().unwrap();
    let all = EncodeOptions { add_special: true, parse_special: true };
    assert_eq!(ids(&tokenizer, "hello", EncodeOptions::default())[0], bos);
    assert_eq!(ids(&tokenizer, "hello", PLAIN), [id(&tokenizer, "hello")]);
    assert_eq!(ids(&tokenizer, "<s>hello", all), [bos, id(&tokenizer, "hello")]);
    assert_eq!(ids(&tokenizer, "", EncodeOptions::default()), [bos]);
    let user = ids(&tokenizer, "<s>hello", EncodeOptions::default());
    assert!(user[0] == bos && !user[1..].contains(&bos) && user.len() > 3);
    let off = byte_level_gguf();
    let tokenizer = from_gguf(&off);
    assert_eq!(tokenizer.eos_ids(), [id(&tokenizer, "<|im_end|>")]);
}

#[test]
fn every_source_of_eos_counts() {
    // E5.
    let mut vocab = serde_json::Map::new();
    for (id, token) in ["a", "<eos>", "<eot>", "<gen>", "<|im_end|>", "x"].into_iter().enumerate() {
        vocab.insert(token.to_owned(), json!(id));
    }
    let added: Vec<_> = ["<eos>", "<eot>", "<gen>", "<|im_end|>"]
        .iter()
        .map(|token| {
            json!({"id": vocab[*token], "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    })
    .to_string();
    let eos = |files: &[(&str, &str)]| {
        let mut all = vec![("tokenizer.json", tokenizer.as_str())];
        all.extend(files);
        from_files(&all).map(|tokenizer| format!("{:?}", tokenizer.eos_ids()))
    };
    assert_eq!(eos(&[]).unwrap(), "[]");
    assert_eq!(eos(&[("config.json", r#"{"eos_token_id": 2}"#)]).unwrap(), "[2]");
    assert_eq!(eos(&[("config.json", r#"{"eos_token_id": [3, 2]}"#)]).unwrap(), "[2, 3]");
    assert_eq!(eos(&[("config.json", r#"{"eos_token_id": null}"#)]).unwrap(), "[]");
    assert_eq!(eos(&[("config.json", r#"{"eos_token_id": -1}"#)]).unwrap(), "[]");
    assert_eq!(eos(&[("config.json", r#"{"text_config": {"eos_token_id": 1}}"#)]).unwrap(), "[1]");
    assert_eq!(eos(&[("config.json", r#"{"eos_token_id": 99}"#)]).unwrap(), "[]", "an id the vocabulary lacks ends nothing");
    let all = [
        ("config.json", r#"{"eos_token_id": 2}"#),
        ("generation_config.json", r#"{"eos_token_id": [3]}"#),
        ("tokenizer_config.json", r#"{"eos_token": {"content": "<eos>"}, "chat_template": "x<|im_end|>"}"#),
    ];
    assert_eq!(eos(&all).unwrap(), "[1, 2, 3, 4]");
    assert_eq!(eos(&[("special_tokens_map.json", r#"{"eos_token": "<eos>"}"#)]).unwrap(), "[1]");
    assert_eq!(eos(&[("chat_template.jinja", "<|im_end|>")]).unwrap(), "[4]");
    for (file, text, field) in [
        ("config.json", r#"{"eos_token_id": "two"}"#, "eos_token_id"),
        ("generation_config.json", r#"{"eos_token_id": [1, {}]}"#, "eos_token_id"),
        ("tokenizer_config.json", r#"{"eos_token": 7}"#, "eos_token"),
        ("tokenizer_config.json", r#"{"added_tokens_decoder": {"x": {"content": "y"}}}"#, "added_tokens_decoder.x"),
        ("tokenizer_config.json", r#"{"chat_template": 5}"#, "chat_template"),
        ("config.json", "{", "line 1"),
        ("config.json", "[]", "object"),
    ] {
        let error = eos(&[(file, text)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel, "{file} {text}");
        assert!(error.message().contains(file) && error.message().contains(field), "{error}");
    }
}

#[test]
fn truncation_and_padding_of_the_file_are_off() {
    let tokenizer = from_json(&json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
        "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    }));
    assert_eq!(ids(&tokenizer, "b b b", EncodeOptions::default()), [1, 1, 1]);
}

#[test]
fn damaged_files_are_typed_and_panics_do_not_escape() {
    for text in [
        "",
        "{}",
        "[]",
        "nonsense",
        r#"{"model": {}}"#,
        "{\"version\": \"1.0\", \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}, \"merges\": [\"a b\"]}}",
        // The crate's builder runs over the end of a buffer on this one.
        r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":"@@@@","end_of_word_suffix":null,"fuse_unk":false,"vocab":{"a":0,"b":1},"merges":["a b"]}}"#,
        // Two thousand nested normalisers.
        &format!(
            r#"{{"version":"1.0","normalizer":{}{}}}"#,
            r#"{"type":"Sequence","normalizers":["#.repeat(2000),
            "]}".repeat(2000)
        ),
    ] {
        let error = from_files(&[("tokenizer.json", text)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel, "{error}");
        assert!(error.message().contains("tokenizer.json"), "{error}");
    }
    let empty = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_dir(empty.path()).unwrap_err();
    assert!(error.kind() == ErrorKind::NotFound && error.message().contains("tokenizer.json"), "{error}");
    assert_eq!(Tokenizer::from_dir("/no/such/dir").unwrap_err().kind(), ErrorKind::NotFound);
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
    assert!(matches!(Tokenizer::from_dir(folder.path()).unwrap_err().kind(), ErrorKind::Io | ErrorKind::BadModel));
}

#[test]
fn gguf_vocabularies_that_make_no_sense_are_typed() {
    let load = |file: &GgufBuilder| Tokenizer::from_gguf(&GgufHeader::from_bytes(&file.build()).unwrap());
    let unknown = load(&GgufBuilder::new().string("tokenizer.ggml.model", "rwkv").strings("tokenizer.ggml.tokens", &["a"]));
    let unknown = unknown.unwrap_err();
    assert!(unknown.kind() == ErrorKind::Unsupported && unknown.message().contains("rwkv"), "{unknown}");
    let base = || GgufBuilder::new().string("tokenizer.ggml.model", "gpt2").strings("tokenizer.ggml.tokens", &["a", "b", "ab"]);
    let pre = load(&base().strings("tokenizer.ggml.merges", &["a b"]).string("tokenizer.ggml.pre", "from-the-future")).unwrap_err();
    assert!(pre.kind() == ErrorKind::Unsupported && pre.message().contains("from-the-future"), "{pre}");
    load(&base().strings("tokenizer.ggml.merges", &["a b"])).unwrap();
    for (file, key) in [
        (base(), "merges"),
        (base().strings("tokenizer.ggml.merges", &["ab"]), "merges"),
        (base().strings("tokenizer.ggml.merges", &["a c"]), "merges"),
        (base().strings("tokenizer.ggml.merges", &[""]), "merges"),
        (base().strings("tokenizer.ggml.merges", &["a b"]).u32("tokenizer.ggml.bos_token_id", 3), "bos_token_id"),
        (
            base()
                .strings("tokenizer.ggml.merges", &["a b"])
                .set("tokenizer.ggml.token_type", GgufValue::Array(GgufArray::Unsigned(vec![1]))),
            "token_type",
        ),
        (GgufBuilder::new().string("tokenizer.ggml.model", "gpt2"), "tokens"),
        (GgufBuilder::new().string("tokenizer.ggml.model", "gpt2").strings("tokenizer.ggml.tokens", &[]), "tokens"),
        (GgufBuilder::new().string("tokenizer.ggml.model", "llama").strings("tokenizer.ggml.tokens", &["a"]), "scores"),
    ] {
        let error = load(&file).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel, "{error}");
        assert!(error.message().contains(key), "{error} lacks {key}");
    }
    // No id, stored as -1.
    let none = load(&base().strings("tokenizer.ggml.merges", &["a b"]).u32("tokenizer.ggml.bos_token_id", u32::MAX)).unwrap();
    assert_eq!(none.bos_id(), None);
    // Two equal tokens keep their ids.
    let twice = load(
        &GgufBuilder::new()
            .string("tokenizer.ggml.model", "gpt2")
            .strings("tokenizer.ggml.tokens", &["a", "a", "b"])
            .strings("tokenizer.ggml.merges", &[]),
    )
    .unwrap();
    assert_eq!((ids(&twice, "ab", PLAIN), twice.vocab_size()), (vec![0, 2], 3));
}

#[test]
fn an_end_of_text_that_a_file_forgot_to_mark_is_special() {
    let file = || {
        GgufBuilder::new()
            .string("tokenizer.ggml.model", "llama")
            .strings("tokenizer.ggml.tokens", &["<unk>", "▁", "<", "e", ">", "<e", "<e>"])
            .set("tokenizer.ggml.scores", GgufValue::Array(GgufArray::F32(vec![0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0])))
    };
    assert_eq!(ids(&from_gguf(&file()), "<e>", PLAIN), [1, 6], "the merges make it");
    let tokenizer = from_gguf(&file().u32("tokenizer.ggml.eos_token_id", 6));
    assert!(tokenizer.is_protected(6));
    assert_eq!(ids(&tokenizer, "<e>", PARSED), [6]);
    let plain = ids(&tokenizer, "<e><e>", PLAIN);
    assert!(!plain.contains(&6), "{plain:?}");
}

#[test]
fn every_known_pre_tokenizer_compiles_and_keeps_the_text() {
    let names = [
        "default",
        "gpt-2",
        "roberta-bpe",
        "smollm",
        "falcon",
        "llama-bpe",
        "glm4",
        "dbrx",
        "qwen2",
        "stablelm2",
        "qwen35",
        "tekken",
        "gpt-4o",
        "deepseek-llm",
        "deepseek-coder",
        "deepseek-v3",
        "deepseek-r1-qwen",
    ];
    let letters = super::testing::byte_letters();
    let tokens: Vec<&str> = letters.iter().map(String::as_str).collect();
    for name in names {
        let file = GgufBuilder::new()
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", name)
            .strings("tokenizer.ggml.tokens", &tokens)
            .strings("tokenizer.ggml.merges", &[]);
        let tokenizer = from_gguf(&file);
        for text in ODD_TEXTS {
            let decoded = tokenizer.decode(&ids(&tokenizer, text, PLAIN), false).unwrap();
            let composed = text.replace("e\u{301}", "é");
            assert!(decoded == text || (name.starts_with("qwen") && decoded == composed), "{name}: {text:?} {decoded:?}");
        }
    }
}

#[test]
fn long_runs_of_anything_are_encoded_in_reasonable_time() {
    let start = std::time::Instant::now();
    for tokenizer in [from_gguf(&byte_level_gguf()), from_gguf(&sentence_piece_gguf())] {
        for unit in [" ", "a", "\n", "<|im_end|>", "é", "😀", "<", "1"] {
            let text = unit.repeat(60_000 / unit.len());
            let encoded = tokenizer.encode(&text, PLAIN).unwrap();
            assert!(!encoded.is_empty());
            assert_eq!(tokenizer.decode(&encoded.ids, false).unwrap(), text);
        }
    }
    let unigram = unigram(&[]);
    assert!(!unigram.encode(&"</s>".repeat(5000), PLAIN).unwrap().ids.contains(&2));
    assert!(start.elapsed().as_secs() < 120, "{:?}", start.elapsed());
}

#[test]
fn pairs_are_cut_and_typed_as_asked() {
    let tokenizer = unigram(&[]);
    let pair = |first: &str, second: &str, limit, how| tokenizer.encode_pair(first, second, limit, how);
    let whole = pair("a", "b a", 100, PairTruncation::LongestFirst).unwrap();
    assert_eq!((whole.ids.first(), whole.ids.last(), whole.dropped), (Some(&0), Some(&2), 0));
    assert_eq!(whole.ids.iter().filter(|id| **id == 2).count(), 3, "<s> a </s></s> b </s>");
    for limit in 5..9 {
        let cut = pair("a a a a", "b b b b", limit, PairTruncation::LongestFirst).unwrap();
        assert_eq!(cut.len(), limit);
        assert_eq!(cut.dropped, 4 + 8 + 4 - limit);
    }
    let second = pair("a a a", "b b b", 8, PairTruncation::OnlySecond).unwrap();
    assert_eq!((second.len(), second.ids[1..4].len()), (8, 3));
    for (limit, how) in [(7, PairTruncation::OnlySecond), (4, PairTruncation::LongestFirst), (0, PairTruncation::LongestFirst)] {
        let error = pair("a a a", "b b b", limit, how).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(&limit.to_string()), "{error}");
    }
    assert!(!pair("</s>", "</s>", 100, PairTruncation::LongestFirst).unwrap().ids[1..].starts_with(&[2]));
}

/// Compares with transformers' own results, which tests/golden/make_text.py wrote.
#[test]
fn smollm2_equals_transformers() {
    let Some(tokenizer) = smol() else { return };
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.vocab_size()), (Some(1), Some(2), 49_152));
    assert_eq!(tokenizer.eos_ids(), [2]);
    let golden = golden("smollm2.json");
    let cases = golden["encode"].as_array().unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(ids(&tokenizer, text, PARSED), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected, false).unwrap(), case["decoded"].as_str().unwrap());
        let plain = ids(&tokenizer, text, PLAIN);
        assert!(plain.iter().all(|id| !tokenizer.is_protected(*id)), "{text:?}");
        assert_eq!(tokenizer.decode(&plain, true).unwrap(), text);
    }
}

#[test]
fn minilm_equals_transformers() {
    let Some(dir) = minilm() else { return };
    let tokenizer = Tokenizer::from_dir(dir).unwrap();
    let golden = golden("minilm.json");
    let list = |value: &serde_json::Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    for case in golden["encode"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let all = EncodeOptions { add_special: true, parse_special: true };
        assert_eq!(ids(&tokenizer, text, all), list(&case["ids"]), "{text:?}");
        assert_eq!(tokenizer.decode(&list(&case["ids"]), true).unwrap(), case["decoded"].as_str().unwrap());
    }
    for case in golden["pairs"].as_array().unwrap() {
        let limit = usize::try_from(case["limit"].as_u64().unwrap()).unwrap();
        let how = if case["only_second"].as_bool().unwrap() { PairTruncation::OnlySecond } else { PairTruncation::LongestFirst };
        let pair = tokenizer.encode_pair(case["first"].as_str().unwrap(), case["second"].as_str().unwrap(), limit, how).unwrap();
        assert_eq!((pair.ids, pair.type_ids), (list(&case["ids"]), list(&case["types"])));
    }
}

#[test]
fn errors_never_repeat_a_text() {
    let secret = "kumquat";
    let tokenizer = unigram(&[("k", -9.0)]);
    let error = tokenizer.encode_pair(secret, secret, 3, PairTruncation::LongestFirst).unwrap_err();
    assert!(!error.full_message().contains(secret));
}

#[test]
fn many_threads_share_one_tokenizer() {
    let tokenizer = from_gguf(&byte_level_gguf());
    let expected: Vec<Vec<u32>> = ODD_TEXTS.iter().map(|text| ids(&tokenizer, text, PLAIN)).collect();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            let (tokenizer, expected) = (tokenizer.clone(), &expected);
            scope.spawn(move || {
                for _ in 0..20 {
                    for (text, expected) in ODD_TEXTS.iter().zip(expected) {
                        assert_eq!(&ids(&tokenizer, text, PLAIN), expected);
                    }
                }
            });
        }
    });
}
