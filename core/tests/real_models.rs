//! The real small models: what a newcomer sees must be right. `cargo xtask models` brings them.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

use std::path::PathBuf;

use hob::block_on;
use hob::chat_template::Message;
use hob::engine::{EmbedRequest, Engine, EngineOptions, Finish, GenerateRequest, RerankRequest};
use hob::options::Truncate;
use serde_json::Value;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn model(name: &str) -> String {
    let path = root().join("target/models").join(name);
    assert!(path.exists(), "{} is missing: run `cargo xtask models`", path.display());
    path.display().to_string()
}

fn reference(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(root().join("tests/golden/real").join(name)).unwrap()).unwrap()
}

fn engine() -> Engine {
    Engine::open(EngineOptions::with_budget(8 << 30)).unwrap()
}

#[test]
fn smollm2_answers_paris_and_speaks_as_transformers_do() {
    let (engine, path) = (engine(), model("smollm2-135m-instruct.gguf"));
    let reference = reference("smollm2.json");
    let cases = reference["items"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let messages = Message::list_from_json(&case["messages"].to_string()).unwrap();
        let wanted: Vec<u32> =
            case["greedy"].as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
        let mut request = GenerateRequest::chat(&path, messages);
        request.max_tokens = Some(wanted.len());
        let answer = block_on(engine.generate(request).unwrap().collect()).unwrap();
        let count = case["stops_after"].as_u64().map_or(wanted.len(), |count| usize::try_from(count).unwrap());
        assert_eq!(answer.token_ids, wanted[..count], "{}", case["messages"]);
    }
    let mut request = GenerateRequest::chat(&path, vec![Message::user("What is the capital of France?")]);
    request.max_tokens = Some(32);
    let answer = block_on(engine.generate(request).unwrap().collect()).unwrap();
    assert!(answer.text.contains("Paris"), "{}", answer.text);
    assert_eq!(answer.summary.finish, Finish::Stop);
}

#[test]
fn minilm_gives_the_vectors_of_sentence_transformers() {
    let engine = engine();
    let reference = reference("minilm.json");
    let items = reference["items"].as_array().unwrap();
    let texts: Vec<String> = items.iter().map(|item| item["text"].as_str().unwrap().to_owned()).collect();
    let mut request = EmbedRequest::new(model("all-minilm-l6-v2"), texts);
    request.truncate = Truncate::End;
    let found = block_on(engine.embed(request)).unwrap();
    assert_eq!(found.dimensions, 384);
    for (row, item) in found.rows().zip(items) {
        let wanted: Vec<f64> = item["vector"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let cosine: f64 = row.iter().zip(&wanted).map(|(a, b)| f64::from(*a) * b).sum();
        assert!(cosine >= 0.99999, "cosine {cosine}");
    }
}

#[test]
fn the_cross_encoder_gives_its_readmes_logits() {
    // The checkpoint comes with the workplace, not with the repository: without it there is nothing to compare. `cargo xtask
    // test` says where it found it.
    let path =
        std::env::var_os("HOB_RERANKER").map_or_else(|| root().join("../shared/models/reranker-minilm-debian"), PathBuf::from);
    if !path.exists() {
        eprintln!("{} is not here: nothing compared", path.display());
        return;
    }
    let engine = engine();
    let reference = reference("reranker.json");
    for pair in ["readme_pairs", "more_pairs"].iter().flat_map(|list| reference[list].as_array().unwrap()) {
        let mut request =
            RerankRequest::new(path.display().to_string(), pair["query"].as_str().unwrap(), [pair["document"].as_str().unwrap()]);
        request.truncate = Truncate::End;
        let found = block_on(engine.rerank(request)).unwrap();
        let difference = f64::from(found.results[0].logit.unwrap()) - pair["logit"].as_f64().unwrap();
        assert!(difference.abs() <= 1e-3, "{}: {difference}", pair["document"]);
    }
}
