//! The tool `hob`, as a script sees it: JSON shapes, exit codes, and exits that are what was asked.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn golden(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/models").join(name).display().to_string()
}

fn hob(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hob"));
    let mut child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn json(arguments: &[&str], input: &str) -> Value {
    let output = hob(arguments, input);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn generate() {
    let model = golden("llama-tied");
    let found = json(
        &["generate", "--model", &model, "--prompt", "the rain", "--raw", "--max-tokens", "5", "--logprobs", "2", "--json"],
        "",
    );
    for key in ["text", "token_ids", "prompt_tokens", "cached_tokens", "finish", "logprobs", "timings"] {
        assert!(keys(&found).contains(&key), "{key} is missing");
    }
    assert_eq!((found["token_ids"].as_array().unwrap().len(), &found["finish"]), (5, &Value::from("length")));
    let first = &found["logprobs"][0];
    assert_eq!(first["id"], found["token_ids"][0]);
    assert_eq!(first["top"].as_array().unwrap().len(), 2);
    assert_eq!(first["top"][0][0], first["id"], "greedy takes the likeliest");

    let messages = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(messages.path(), r#"[{"role": "user", "content": "hi"}]"#).unwrap();
    let file = messages.path().display().to_string();
    let chat = json(&["generate", "--model", &model, "--messages", &file, "--max-tokens", "3", "--json"], "");
    let prompt = json(&["generate", "--model", &model, "--prompt", "hi", "--max-tokens", "3", "--json"], "");
    assert_eq!(chat["token_ids"], prompt["token_ids"]);

    let drawn = |seed: &str| {
        json(
            &[
                "generate",
                "--model",
                &model,
                "--prompt",
                "hi",
                "--max-tokens",
                "8",
                "--temperature",
                "1.5",
                "--seed",
                seed,
                "--json",
            ],
            "",
        )
    };
    assert_eq!(drawn("7")["token_ids"], drawn("7")["token_ids"]);
    assert_ne!(drawn("7")["token_ids"], drawn("8")["token_ids"]);

    let text = hob(&["generate", "--model", &model, "--prompt", "hi", "--max-tokens", "3"], "");
    assert_eq!(text.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&text.stderr).contains("finish length"));
}

#[test]
fn score_embed_and_rerank() {
    let llama = golden("llama-tied");
    let score = json(&["score", "--model", &llama, "--prompt", "the rain", "--completion", " stops", "--raw", "--json"], "");
    assert_eq!(keys(&score), ["tokens", "logprobs", "mean_nll"]);

    let bert = golden("bert-mean");
    let embedded = json(&["embed", "--model", &bert, "--text", "the rain", "--text", "a bridge", "--json"], "");
    assert_eq!(embedded["data"][1]["index"], 1);
    assert_eq!(embedded["data"][0]["embedding"].as_array().unwrap().len(), 32);
    assert_eq!((&embedded["dimensions"], &embedded["pooling"]), (&Value::from(32), &Value::from("mean")));
    assert!(embedded["usage"]["prompt_tokens"].as_u64().unwrap() > 0);
    let lines = json(&["embed", "--model", &bert, "--json"], "the rain\n\n  \na bridge\n");
    assert_eq!(lines["data"], embedded["data"], "one text per non-empty line");
    let short = json(&["embed", "--model", &bert, "--text", "the rain", "--dimensions", "4", "--normalize", "no", "--json"], "");
    assert_eq!(short["dimensions"], 4);

    let cross = golden("bert-rerank-1");
    let ranking = json(&["rerank", "--model", &cross, "--query", "a clock", "--json"], "the rain\nmy neighbour repairs clocks\n");
    assert_eq!(ranking["score_kind"], "normalized");
    let scores: Vec<f64> = ranking["results"].as_array().unwrap().iter().map(|r| r["score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b));
    let top = json(
        &["rerank", "--model", &cross, "--query", "a clock", "--document", "x", "--document", "y", "--top", "1", "--json"],
        "",
    );
    assert_eq!(top["results"].as_array().unwrap().len(), 1);
    let order =
        json(&["rerank", "--model", &cross, "--query", "q", "--document", "x", "--document", "y", "--unsorted", "--json"], "");
    assert_eq!(order["results"][0]["index"], 0);
}

#[test]
fn tokenize_render_inspect_and_doctor() {
    let model = golden("llama-tied");
    let tokens = json(&["tokenize", "--model", &model, "--text", "the rain <|im_end|>", "--json"], "");
    assert_eq!(tokens["ids"].as_array().unwrap().len(), tokens["tokens"].as_array().unwrap().len());
    let special = json(&["tokenize", "--model", &model, "--text", "the rain <|im_end|>", "--special", "--json"], "");
    assert!(special["tokens"].as_array().unwrap().contains(&Value::from("<|im_end|>")));
    assert!(!tokens["tokens"].as_array().unwrap().contains(&Value::from("<|im_end|>")), "a user's text never becomes special");

    let messages = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(messages.path(), r#"[{"role": "user", "content": "hi"}]"#).unwrap();
    let file = messages.path().display().to_string();
    let with = json(&["render", "--model", &model, "--messages", &file, "--json"], "");
    let without = json(&["render", "--model", &model, "--messages", &file, "--no-generation-prompt", "--json"], "");
    assert!(with["text"].as_str().unwrap().starts_with(without["text"].as_str().unwrap()));

    let info = json(&["inspect", "--model", &golden("gguf-llama-q4_1.gguf"), "--json"], "");
    assert_eq!((&info["kind"], &info["family"]), (&Value::from("chat"), &Value::from("llama")));
    assert!(info["quantization"].as_str().unwrap().contains("Q4_1"));
    let parts = &info["estimate"];
    let sum: u64 = ["weights", "kv_cache", "working"].iter().map(|part| parts[part].as_u64().unwrap()).sum();
    assert_eq!(info["estimate_total"].as_u64(), Some(sum));

    let report = json(&["doctor", "--json"], "");
    assert!(report["budget_bytes"].as_u64().unwrap() > 0);
    assert!(report["device"]["version"].as_str().unwrap().starts_with("0.32"));
}

#[test]
fn errors_are_typed_and_exit_with_1_wrong_usage_with_2() {
    let failed = hob(&["generate", "--model", "/nowhere", "--prompt", "hi", "--json"], "");
    assert_eq!(failed.status.code(), Some(1));
    let error: Value = serde_json::from_slice(&failed.stdout).unwrap();
    assert_eq!(keys(&error["error"]), ["kind", "code", "message"]);
    assert_eq!((&error["error"]["kind"], &error["error"]["code"]), (&Value::from("NotFound"), &Value::from(-2)));

    let plain = hob(&["embed", "--model", "/nowhere", "--text", "x"], "");
    assert_eq!(plain.status.code(), Some(1));
    assert!(plain.stdout.is_empty() && String::from_utf8_lossy(&plain.stderr).contains("/nowhere"));

    for wrong in [
        &["generate"][..],
        &["generate", "--model", "x"],
        &["fly"],
        &["generate", "--model", "x", "--prompt", "y", "--mirostat", "2"],
    ] {
        assert_eq!(hob(wrong, "").status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn the_process_exits_as_asked_every_time() {
    // Hazard B6: the device thread may be dropping the model while the process's destructors run.
    let bert = golden("bert-mean");
    for round in 0..40 {
        let output = hob(&["embed", "--model", &bert, "--text", "the rain", "--json"], "");
        assert_eq!(output.status.code(), Some(0), "round {round}: {:?} {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    // An error in the middle of an answer (nobody reads it) leaves steps in flight.
    let llama = golden("llama-tied");
    for round in 0..20 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hob"));
        let arguments = ["generate", "--model", &llama, "--prompt", "the rain", "--raw", "--max-tokens", "5000"];
        let mut child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let status = child.wait_with_output().unwrap().status;
        assert_eq!(status.code(), Some(1), "round {round}: {status:?}");
    }
}
