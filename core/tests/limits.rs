//! MLX's own limits while engines come and go. One test in its own process: the limits are the process's.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use hob::engine::{EmbedRequest, Engine, EngineOptions, GenerateRequest};
use hob::{Key, block_on};
use mlx_rs::memory;

const MIB: usize = 1 << 20;

fn golden(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden/models")
        .join(name)
        .canonicalize()
        .unwrap()
        .display()
        .to_string()
}

fn open(mib: u64) -> Engine {
    Engine::open(EngineOptions::with_budget(mib << 20)).unwrap()
}

/// The cache's limit can only be read by setting it; nothing else runs while this does.
fn cache_limit() -> usize {
    let limit = memory::set_cache_limit(0).unwrap();
    memory::set_cache_limit(limit).unwrap();
    limit
}

/// Limits are posted to the device thread and not waited for. The bound only turns a hang into a failure.
#[track_caller]
fn turn_to(memory: usize, cache: usize) {
    let began = Instant::now();
    loop {
        // A close is waited for, and comes after everything that was posted before it.
        block_on(open(1).close()).unwrap();
        let found = (memory::memory_limit().unwrap(), cache_limit());
        if found == (memory, cache) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{found:?} instead of {:?}", (memory, cache));
    }
}

#[test]
fn i18_m7_the_allocators_limits_are_the_budgets_while_engines_are_open_and_what_they_were_afterwards() {
    let (own_memory, own_cache) = (memory::memory_limit().unwrap(), cache_limit());
    assert!(own_cache > 0 && own_memory > 1024 * MIB, "{own_memory}, {own_cache}");
    // Models this small may keep 1 GiB of freed buffers, but never more than MLX would by itself.
    let kept = own_cache.min(1024 * MIB);

    let first = open(512);
    turn_to(512 * MIB, 0);
    let (chat, embedder) = (golden("llama-tied"), golden("bert-mean"));
    let request = GenerateRequest { max_tokens: Some(4), ..GenerateRequest::raw(chat.as_str(), "hello") };
    block_on(first.generate(request).unwrap().collect()).unwrap();
    turn_to(512 * MIB, kept);
    let second = open(300);
    turn_to(812 * MIB, kept);
    block_on(second.embed(EmbedRequest::new(embedder.as_str(), ["hello"]))).unwrap();
    first.pool().set_budget(600 << 20).unwrap();
    turn_to(900 * MIB, kept);
    block_on(first.pool().evict(&Key::chat(chat.as_str()), false)).unwrap();
    turn_to(900 * MIB, kept);
    block_on(second.pool().evict(&Key::embedder(embedder.as_str()), false)).unwrap();
    turn_to(900 * MIB, 0);
    assert_eq!(memory::cache_memory().unwrap(), 0);

    block_on(first.close()).unwrap();
    assert_eq!((memory::memory_limit().unwrap(), cache_limit()), (300 * MIB, 0), "the other engine's remain");
    // The last one goes without a close.
    block_on(second.embed(EmbedRequest::new(embedder.as_str(), ["hello"]))).unwrap();
    drop(second);
    turn_to(own_memory, own_cache);

    // Not once only.
    let third = open(256);
    turn_to(256 * MIB, 0);
    block_on(third.close()).unwrap();
    assert_eq!((memory::memory_limit().unwrap(), cache_limit()), (own_memory, own_cache));
    drop(first);
    drop(third);
}
