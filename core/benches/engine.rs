//! Decode, prefill and embedding on the real small models, through the public API. `cargo xtask models` brings the models.
//! Compare runs of one machine only; beside other stacks `cargo xtask bench` measures (tests/bench).

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark fails by panicking")]

use std::path::PathBuf;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hob::block_on;
use hob::engine::{EmbedRequest, Engine, EngineOptions, GenerateRequest};

fn model(name: &str) -> String {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/models");
    let path = std::env::var_os("HOB_MODELS").map_or(here, PathBuf::from).join(name);
    assert!(path.exists(), "{} is missing: run `cargo xtask models`", path.display());
    path.display().to_string()
}

fn generate(engine: &Engine, prompt: &str, new_tokens: usize) -> usize {
    let mut request = GenerateRequest::raw(model("smollm2-135m-instruct.gguf"), prompt);
    request.max_tokens = Some(new_tokens);
    block_on(engine.generate(request).unwrap().collect()).unwrap().summary.prompt_tokens
}

fn engine(c: &mut Criterion) {
    let engine = Engine::open(EngineOptions::default()).unwrap();
    let mut group = c.benchmark_group("smollm2");
    group.sample_size(10).measurement_time(Duration::from_secs(20));
    // A short prompt: nearly all of the time is decode.
    group.throughput(Throughput::Elements(16));
    group.bench_function("decode 16", |b| b.iter(|| generate(&engine, "Once", 16)));
    let long = "The lamp by the window went out. ".repeat(36);
    let tokens = generate(&engine, &long, 1);
    group.throughput(Throughput::Elements(tokens as u64));
    group.bench_function(format!("prefill {tokens}"), |b| b.iter(|| generate(&engine, &long, 1)));
    group.finish();

    let texts: Vec<String> = (1..=32).map(|n| "The last ferry turned to the sea. ".repeat(1 + n % 5)).collect();
    let mut group = c.benchmark_group("minilm");
    group.sample_size(10).throughput(Throughput::Elements(texts.len() as u64));
    group.bench_function("embed 32", |b| {
        b.iter(|| block_on(engine.embed(EmbedRequest::new(model("all-minilm-l6-v2"), texts.clone()))).unwrap());
    });
    group.finish();
}

criterion_group!(benches, engine);
criterion_main!(benches);
