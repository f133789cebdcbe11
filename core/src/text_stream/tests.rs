#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::error::ErrorKind;
use crate::tokenizer::EncodeOptions;
use crate::tokenizer::testing::{ODD_TEXTS, byte_level_gguf, from_gguf, from_json, sentence_piece_gguf, smollm2};

/// Tokenizers with every kind of decoder that is supported.
fn tokenizers() -> Vec<(&'static str, Tokenizer)> {
    let words = |decoder: serde_json::Value| {
        let mut vocab = serde_json::Map::new();
        let tokens = [
            "[UNK]", "a", "##b", "##.", ".", ",", "é", "▁a", "▁", "▁▁b", "<0xE2>", "<0x82>", "<0xAC>", "<0x41>", "日", "x</w>",
            "</w>", " ", "  ", "##", "n't", "'", "<0xZZ>", "do", "not",
        ];
        for (id, token) in tokens.into_iter().enumerate() {
            vocab.insert(token.to_owned(), json!(id));
        }
        from_json(&json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [
                {"id": 25, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
            ],
            "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": decoder,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
        }))
    };
    let llama = |strip: serde_json::Value| {
        let replace = json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "});
        json!({"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]})
    };
    vec![
        ("byte level", from_gguf(&byte_level_gguf())),
        ("sentence piece", from_gguf(&sentence_piece_gguf())),
        ("none", words(json!(null))),
        ("word piece", words(json!({"type": "WordPiece", "prefix": "##", "cleanup": true}))),
        ("metaspace", words(json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}))),
        ("metaspace never", words(json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}))),
        ("bpe", words(json!({"type": "BPEDecoder", "suffix": "</w>"}))),
        ("byte fallback", words(json!({"type": "ByteFallback"}))),
        ("strip 2", words(llama(json!({"type": "Strip", "content": " ", "start": 2, "stop": 0})))),
        ("strip each", words(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}))),
    ]
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip: bool) -> (String, Vec<String>) {
    let mut stream = tokenizer.stream(skip);
    let mut pieces = Vec::new();
    for id in ids {
        pieces.extend(stream.push(*id).unwrap());
    }
    pieces.extend(stream.finish().unwrap());
    assert!(pieces.iter().all(|piece| !piece.is_empty()));
    (pieces.concat(), pieces)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn any_tokens_stream_to_what_they_decode_to(seeds in prop::collection::vec(any::<u32>(), 0..60), skip: bool) {
        use std::sync::LazyLock;
        static ALL: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(tokenizers);
        for (name, tokenizer) in ALL.iter() {
            let size = u32::try_from(tokenizer.vocab_size()).unwrap();
            // A few ids lie outside of the vocabulary.
            let ids: Vec<u32> = seeds.iter().map(|seed| seed % (size + 2)).collect();
            prop_assert_eq!(&streamed(tokenizer, &ids, skip).0, &tokenizer.decode(&ids, skip).unwrap(), "{}", name);
        }
    }
}

#[test]
fn characters_split_over_tokens_come_out_whole() {
    // E1. One token per byte: nothing comes out until a character is complete.
    let tokenizer = from_gguf(&byte_level_gguf());
    for text in ["👨‍👩‍👧‍👦", "日本語", "ü", "🇫🇷x", "a😀b"] {
        let ids = tokenizer.encode(text, EncodeOptions { add_special: false, parse_special: false }).unwrap().ids;
        assert!(ids.len() > 1);
        let (all, pieces) = streamed(&tokenizer, &ids, true);
        assert_eq!(all, text);
        assert_eq!(pieces.len(), text.chars().count(), "each character by itself, none late: {pieces:?}");
        assert!(!all.contains('\u{fffd}'));
    }
}

#[test]
fn invalid_bytes_become_replacement_characters_at_once() {
    let tokenizer = from_gguf(&byte_level_gguf());
    let mut stream = tokenizer.stream(true);
    assert_eq!(stream.push(0xff).unwrap().unwrap(), "\u{fffd}");
    assert_eq!(stream.push(0xe6).unwrap(), None);
    assert_eq!(stream.push(u32::from(b'a')).unwrap().unwrap(), "\u{fffd}a");
    assert_eq!(stream.push(0xe6).unwrap(), None);
    assert_eq!(stream.finish().unwrap().unwrap(), "\u{fffd}");
    assert_eq!(stream.finish().unwrap(), None);
}

#[test]
fn the_first_space_of_a_sentence_piece_text_is_dropped_once() {
    let tokenizer = from_gguf(&sentence_piece_gguf());
    let the = tokenizer.token_to_id("▁the").unwrap();
    let (all, pieces) = streamed(&tokenizer, &[1, the, the], true);
    assert_eq!((all.as_str(), pieces.len()), ("the the", 2));
    for text in ODD_TEXTS {
        let ids = tokenizer.encode(text, EncodeOptions::default()).unwrap().ids;
        // SentencePiece cannot tell its own mark from a space.
        assert_eq!(streamed(&tokenizer, &ids, true).0, text.replace('▁', " "), "byte fallback keeps every text");
    }
}

#[test]
fn a_long_stream_costs_the_same_per_token() {
    let tokenizer = from_gguf(&byte_level_gguf());
    let mut stream = tokenizer.stream(true);
    let mut bytes = 0;
    let start = std::time::Instant::now();
    for index in 0..200_000_u32 {
        bytes += stream.push(97 + index % 26).unwrap().map_or(0, |text| text.len());
    }
    assert_eq!(bytes, 200_000);
    // Re-decoding everything would take hours.
    assert!(start.elapsed().as_secs() < 60);
}

#[test]
fn decoders_that_cannot_stream_are_refused() {
    let json = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    });
    let error = crate::tokenizer::testing::from_files(&[("tokenizer.json", &json.to_string())]).unwrap_err();
    assert!(error.kind() == ErrorKind::Unsupported && error.message().contains("CTC"), "{error}");
}

#[test]
fn smollm2_streams_what_it_decodes() {
    let Some(path) = smollm2() else { return };
    let tokenizer = Tokenizer::from_gguf(&crate::gguf::GgufHeader::open(path).unwrap()).unwrap();
    for text in ODD_TEXTS {
        let ids = tokenizer.encode(text, EncodeOptions { add_special: true, parse_special: true }).unwrap().ids;
        let (all, _) = streamed(&tokenizer, &ids, false);
        assert_eq!(all, text);
    }
    let mut state = 1_u32;
    for _ in 0..200 {
        let ids: Vec<u32> = (0..50)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) % 49_152
            })
            .collect();
        assert_eq!(streamed(&tokenizer, &ids, true).0, tokenizer.decode(&ids, true).unwrap());
    }
}

/// The definition, done the slow way: the first end of any stop string, of those that end there the longest.
fn naive(text: &str, stops: &[String]) -> (String, Option<usize>) {
    for end in 1..=text.len() {
        let ending = stops.iter().enumerate().filter(|(_, stop)| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        if let Some((index, stop)) = ending.max_by_key(|(index, stop)| (stop.len(), usize::MAX - index)) {
            return (text[..end - stop.len()].to_owned(), Some(index));
        }
    }
    (text.to_owned(), None)
}

fn matched(pieces: &[String], stops: &[String]) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops).unwrap();
    let mut text = String::new();
    let mut found = None;
    for piece in pieces {
        let step = matcher.push(piece);
        text.push_str(&step.text);
        if found.is_none() {
            found = step.stop;
        } else {
            assert_eq!(step, StopStep::default(), "nothing comes after a stop");
        }
    }
    if found.is_none() {
        text.extend(matcher.finish());
    } else {
        assert_eq!(matcher.finish(), None);
    }
    (text, found)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
    #[test]
    fn stops_are_found_wherever_the_text_is_cut(
        text in "[abé日]{0,30}",
        stops in prop::collection::vec("[abé日]{1,5}", 0..5),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let letters: Vec<char> = text.chars().collect();
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(letters.len() + 1)).collect();
        at.extend([0, letters.len()]);
        at.sort_unstable();
        let pieces: Vec<String> = at.windows(2).map(|pair| letters[pair[0]..pair[1]].iter().collect()).collect();
        prop_assert_eq!(matched(&pieces, &stops), naive(&text, &stops));
    }
}

#[test]
fn a_stop_across_tokens_leaks_nothing() {
    // E2.
    let mut matcher = StopMatcher::new(&["END"]).unwrap();
    assert_eq!(matcher.push("the E"), StopStep { text: "the ".to_owned(), stop: None });
    assert_eq!(matcher.push("ND more"), StopStep { text: String::new(), stop: Some(0) });
    assert_eq!(matcher.push("END"), StopStep::default());
    let mut matcher = StopMatcher::new(&["END"]).unwrap();
    assert_eq!(matcher.push("EN").text, "");
    assert_eq!(matcher.push("EX").text, "ENEX");
    let mut matcher = StopMatcher::new(&["END"]).unwrap();
    assert_eq!(matcher.push("E").text, "");
    assert_eq!(matcher.finish().as_deref(), Some("E"));
    let mut matcher = StopMatcher::new::<&str>(&[]).unwrap();
    assert_eq!(matcher.push("E"), StopStep { text: "E".to_owned(), stop: None });
}

#[test]
fn bad_stop_strings_are_refused() {
    for stops in [vec![String::new()], vec!["x".to_owned(); MAX_STOPS + 1], vec!["x".repeat(MAX_STOP_BYTES + 1)]] {
        assert_eq!(StopMatcher::new(&stops).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn streams_can_move_between_threads() {
    fn check<T: Send + 'static>() {}
    check::<TextStream>();
    check::<StopMatcher>();
    check::<crate::sampler::Sampler>();
}
