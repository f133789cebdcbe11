//! The golden models through the public API: text in, numbers out, compared with transformers and sentence-transformers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::path::PathBuf;

use hob::block_on;
use hob::chat_template::Message;
use hob::engine::{
    EmbedRequest, Engine, EngineOptions, Finish, GenerateRequest, Prompt, RequestOptions, RerankRequest, ScoreRequest,
};
use hob::model::{FloatType, LoadOptions};
use hob::options::Truncate;
use hob::tokenizer::EncodeOptions;
use safetensors::SafeTensors;
use serde_json::Value;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn read(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden().join(path)).unwrap()).unwrap()
}

fn cases(kind: &str) -> Vec<Value> {
    let manifest = read("manifest.json");
    manifest["cases"].as_array().unwrap().iter().filter(|case| case["kind"] == kind).cloned().collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

#[allow(clippy::cast_possible_truncation)]
fn float(value: &Value) -> f32 {
    value.as_f64().unwrap() as f32
}

fn tolerance(name: &str) -> f32 {
    float(&read("manifest.json")["tolerance"][name])
}

fn matrix(case: &Value, name: &str) -> (usize, Vec<f32>) {
    let bytes = std::fs::read(golden().join(text(&case["arrays"]))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    (tensor.shape()[1], tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
}

fn model(case: &Value) -> String {
    golden().join(text(&case["path"])).display().to_string()
}

fn float32() -> RequestOptions {
    RequestOptions { load: LoadOptions { float: Some(FloatType::Float32), ..LoadOptions::default() }, ..RequestOptions::default() }
}

fn engine() -> Engine {
    Engine::open(EngineOptions::with_budget(8 << 30)).unwrap()
}

fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn decoders_speak_as_transformers_do() {
    let engine = engine();
    let mut done = 0;
    for case in cases("decoder") {
        let (name, path) = (text(&case["name"]), model(&case));
        if case["unsupported"].is_string() || name == "llama-rope-dynamic" {
            continue;
        }
        let expected = read(&text(&case["expected"]));
        let assets = engine.text(&path).unwrap_or_else(|error| panic!("{name}: {}", error.full_message()));

        // The chat template and its tokens.
        let messages = Message::list_from_json(&expected["chat"]["messages"].to_string()).unwrap();
        let prompt = assets.template.unwrap().encode(&messages, &hob::chat_template::RenderOptions::default()).unwrap();
        assert_eq!(prompt.text, text(&expected["chat"]["text"]), "{name}");
        assert_eq!(prompt.encoding.ids, ids(&expected["chat"]["ids"]), "{name}");

        // Tokens of plain text.
        for prompt in expected["prompts"].as_array().unwrap() {
            if let Some(plain) = prompt["text"].as_str() {
                let encoding = assets.tokenizer.encode(plain, EncodeOptions::default()).unwrap();
                assert_eq!(encoding.ids, ids(&prompt["ids"]), "{name}: {}", prompt["name"]);
            }
        }

        // Greedy tokens, and where an end token stops them.
        let greedy = &expected["greedy"];
        let short = expected["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == greedy["prompt"]).unwrap();
        let wanted = ids(&greedy["tokens"]);
        let mut request = GenerateRequest::new(&path, Prompt::Tokens(ids(&short["ids"])));
        request.max_tokens = Some(wanted.len());
        request.options = float32();
        let answer = block_on(engine.generate(request).unwrap().collect()).unwrap();
        match expected["stops_after"].as_u64() {
            Some(count) => {
                assert_eq!(answer.token_ids, wanted[..usize::try_from(count).unwrap()], "{name}");
                assert_eq!(answer.summary.finish, Finish::Stop, "{name}");
            }
            None => {
                assert_eq!(answer.token_ids, wanted, "{name}");
                assert_eq!(answer.summary.finish, Finish::Length, "{name}");
            }
        }

        // A completion's likelihood.
        let score = &expected["score"];
        let mut request = ScoreRequest::new(&path, Prompt::Raw(text(&score["prompt"])), text(&score["completion"]));
        request.options = float32();
        let found = block_on(engine.score(request)).unwrap();
        assert_eq!(found.tokens, ids(&score["completion_ids"]), "{name}");
        assert!((found.mean_nll - score["mean_nll"].as_f64().unwrap()).abs() < f64::from(tolerance("logprobs")), "{name}");
        done += 1;
    }
    assert!(done >= 25, "only {done} decoders were compared");
}

#[test]
fn embedders_give_the_vectors_of_sentence_transformers() {
    let engine = engine();
    for case in cases("embedder") {
        let name = text(&case["name"]);
        let expected = read(&text(&case["expected"]));
        let texts: Vec<String> = expected["texts"].as_array().unwrap().iter().map(text).collect();
        for set in expected["sets"].as_array().unwrap() {
            let (width, wanted) = matrix(&case, &text(&set["vectors"]));
            let mut request = EmbedRequest::new(model(&case), texts.clone());
            request.prompt_name = set["prompt_name"].as_str().map(str::to_owned);
            request.truncate = Truncate::End;
            let found = block_on(engine.embed(request)).unwrap_or_else(|error| panic!("{name}: {}", error.full_message()));
            assert_eq!(found.dimensions, width, "{name}");
            let tokens: usize = set["input_ids"].as_array().unwrap().iter().map(|row| row.as_array().unwrap().len()).sum();
            assert_eq!(found.prompt_tokens, tokens, "{name}");
            for (row, wanted) in found.rows().zip(wanted.chunks_exact(width)) {
                assert!(difference(row, wanted) <= tolerance("vectors"), "{name}: {}", difference(row, wanted));
                let dot: f32 = row.iter().zip(wanted).map(|(a, b)| a * b).sum();
                let norms = row.iter().map(|x| x * x).sum::<f32>().sqrt() * wanted.iter().map(|x| x * x).sum::<f32>().sqrt();
                assert!(dot / norms >= tolerance("cosine"), "{name}: cosine {}", dot / norms);
            }
        }
    }
}

#[test]
fn rerankers_give_the_logits_and_scores_of_transformers() {
    let engine = engine();
    for case in cases("reranker") {
        let name = text(&case["name"]);
        for pair in read(&text(&case["expected"]))["pairs"].as_array().unwrap() {
            let mut request = RerankRequest::new(model(&case), text(&pair["query"]), [text(&pair["document"])]);
            request.truncate = Truncate::End;
            let found = block_on(engine.rerank(request)).unwrap_or_else(|error| panic!("{name}: {}", error.full_message()));
            assert_eq!(found.prompt_tokens, pair["input_ids"].as_array().unwrap().len(), "{name}");
            assert!((found.results[0].score - float(&pair["score"])).abs() <= tolerance("vectors"), "{name}: {pair}");
        }
    }
}

#[test]
fn vectors_do_not_depend_on_batch_mates() {
    // Hazards I7, I8.
    let engine = engine();
    for name in ["bert-mean", "bert-cls", "qwen3-embed"] {
        let model = golden().join("models").join(name).display().to_string();
        let texts: Vec<String> = (1..40).map(|n| "the river bends ".repeat(1 + n % 3) + &"x".repeat(n % 7)).collect();
        let together = block_on(engine.embed(EmbedRequest::new(&model, texts.clone()))).unwrap();
        for (text, row) in texts.iter().zip(together.rows()) {
            let alone = block_on(engine.embed(EmbedRequest::new(&model, [text.clone()]))).unwrap();
            assert!(difference(row, &alone.data) <= tolerance("vectors"), "{name}");
        }
    }
}
