//! The process's real memory while models load and swap. One test in its own process: nothing else may allocate beside it.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use hob::block_on;
use hob::engine::{Engine, EngineOptions, RequestOptions};
use hob::{ErrorKind, Key};

fn model(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/models").join(name);
    assert!(path.exists(), "{} is missing: run `cargo xtask models`", path.display());
    path.canonicalize().unwrap().display().to_string()
}

/// A line of /proc/self/status, in bytes.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn resident() -> u64 {
    status("VmRSS:")
}

/// The highest resident memory since the last call.
fn peak() -> u64 {
    let peak = status("VmHWM:");
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    peak
}

fn load(engine: &Engine, model: &str) {
    block_on(engine.load(model, RequestOptions::default())).unwrap();
}

#[test]
fn loads_and_swaps_hold_one_model_and_give_it_back() {
    let (chat, embedder) = (model("smollm2-135m-instruct.gguf"), model("all-minilm-l6-v2"));
    let sizes = Engine::open(EngineOptions::default()).unwrap();
    let size = |model: &str| sizes.inspect(model, &hob::model::LoadOptions::default()).unwrap().estimate_total;
    // Room for the larger one alone.
    let engine = Engine::open(EngineOptions::with_budget(size(&chat).max(size(&embedder)) + (1 << 20))).unwrap();

    // A first round settles what is made once: MLX's threads, the C library's arenas.
    load(&engine, &embedder);
    block_on(engine.pool().evict(&Key::embedder(embedder.as_str()), false)).unwrap();
    let base = resident();

    peak();
    load(&engine, &chat);
    let (highest, held) = (peak() - base, resident() - base);
    assert!(held > 500 << 20, "SmolLM2 in float32 takes {held} bytes");
    assert!(highest <= held * 115 / 100, "a load that holds {held} bytes peaked at {highest}");

    let one = held;
    let mut after_cycle = Vec::new();
    for _ in 0..30 {
        load(&engine, &embedder);
        load(&engine, &chat);
        let highest = peak() - base;
        assert!(highest <= one * 115 / 100, "a swap peaked at {highest}; the larger model holds {one}");
        after_cycle.push(resident() - base);
    }
    let (third, last) = (after_cycle[2], after_cycle[29]);
    assert!(last <= one * 105 / 100, "after the swaps {last} bytes are held; one model takes {one}");
    assert!(last.saturating_sub(third) < 27 << 20, "27 cycles grew the process from {third} to {last}: 1 MB each is the limit");

    // The pool says what came back, and the process shows it.
    let before = resident();
    let evicted = block_on(engine.pool().evict(&Key::chat(chat.as_str()), false)).unwrap();
    let returned = before.saturating_sub(resident());
    assert!(returned >= one * 9 / 10, "{returned} of {one} bytes came back");
    assert!(evicted.freed_bytes >= one * 9 / 10, "the pool reports {} bytes", evicted.freed_bytes);
    assert_eq!(block_on(engine.pool().evict(&Key::chat(chat.as_str()), false)).unwrap_err().kind(), ErrorKind::NotFound);
}
