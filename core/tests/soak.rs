//! 10,000 mixed requests from several threads, with cancels, deadlines and callers who leave: afterwards nothing is held, and the
//! process has not grown. One test in its own process: nothing else may allocate beside it.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hob::engine::{
    Availability, DecideRequest, EmbedRequest, Engine, EngineOptions, Event, GenerateRequest, OnCancel, RequestOptions,
    RerankRequest,
};
use hob::fake::{FakeDevice, FakeModel};
use hob::model::ModelKind;
use hob::{BoxFuture, CancelToken, ErrorKind, block_on};

const REQUESTS: usize = 10_000;
const THREADS: usize = 6;
const MB: u64 = 1 << 20;

/// A small generator of our own, so that a failing run can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

fn one(engine: &Engine, random: &mut Random) -> Result<(), hob::Error> {
    let token = CancelToken::new();
    let timeout = (random.below(8) == 0).then(|| Duration::from_micros(1 + random.below(2_000) as u64));
    let on_cancel = if random.below(2) == 0 { OnCancel::Abort } else { OnCancel::Stop };
    let options = RequestOptions { cancel: Some(token.clone()), timeout, on_cancel, ..RequestOptions::default() };
    let leaves = random.below(6) == 0;
    let model = random.below(3);
    let texts = |random: &mut Random, n: usize| (0..n).map(|_| "t".repeat(1 + random.below(90))).collect::<Vec<_>>();
    let future: BoxFuture<'_, hob::Result<()>> = match random.below(8) {
        0..4 => {
            let prompt = "p".repeat(1 + random.below(700));
            let max_tokens = Some(random.below(40));
            let request = GenerateRequest { options, max_tokens, ..GenerateRequest::raw(format!("chat{model}"), prompt) };
            let mut stream = engine.generate(request)?;
            let reads = random.below(40);
            for _ in 0..reads {
                if let Event::Finished(_) = block_on(stream.next()).unwrap()? {
                    return Ok(());
                }
            }
            match random.below(4) {
                0 => return Ok(()),
                1 => stream.stop(),
                2 => drop(token.cancel()),
                _ => {}
            }
            return block_on(stream.collect()).map(drop);
        }
        4..6 => {
            let count = 1 + random.below(30);
            let request = EmbedRequest { options, ..EmbedRequest::new("embed", texts(random, count)) };
            Box::pin(async move { engine.embed(request).await.map(drop) })
        }
        6 => {
            let count = 1 + random.below(20);
            let request = RerankRequest { options, ..RerankRequest::new("rerank", "query", texts(random, count)) };
            Box::pin(async move { engine.rerank(request).await.map(drop) })
        }
        _ => {
            let count = 1 + random.below(4);
            let request = DecideRequest { options, ..DecideRequest::choice(format!("chat{model}"), "q", texts(random, count)) };
            Box::pin(async move { engine.decide(request).await.map(drop) })
        }
    };
    if !leaves {
        return block_on(future);
    }
    let mut future = future;
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    for _ in 0..random.below(30) {
        if future.as_mut().poll(&mut context).is_ready() {
            break;
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn round(engine: &Engine, requests: usize, seed: u64, answered: &AtomicUsize) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let mut random = Random(seed * 1000 + thread as u64);
                for _ in 0..requests / THREADS + 1 {
                    match one(engine, &mut random) {
                        Ok(()) => drop(answered.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => {
                            let expected = [ErrorKind::Busy, ErrorKind::Cancelled, ErrorKind::Timeout];
                            assert!(expected.contains(&error.kind()), "{}", error.full_message());
                        }
                    }
                }
            });
        }
    });
}

/// Resident bytes once the C library has given back what it can.
fn resident() -> usize {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointers, callable at any time.
    unsafe {
        libc::malloc_trim(0);
    }
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn at_rest(engine: &Engine) {
    let began = Instant::now();
    let uses = || engine.pool().status().entries.iter().map(|entry| entry.uses).sum::<u64>();
    while engine.requests() > 0 || uses() > 0 || engine.availability() != Availability::Ready {
        assert!(began.elapsed() < Duration::from_secs(30), "{} requests and {} uses are left", engine.requests(), uses());
        std::thread::yield_now();
    }
    engine.pool().check_account().unwrap();
}

#[test]
fn ten_thousand_mixed_requests_leave_nothing_behind() {
    let chat = |n: usize| FakeModel {
        reply: "0123456789".repeat(20),
        kv_bytes_per_token: 1000,
        echo: n == 1,
        ..FakeModel::new(&format!("chat{n}"), ModelKind::Chat, 40 * MB)
    };
    let mut models: Vec<FakeModel> = (0..3).map(chat).collect();
    models.push(FakeModel::new("embed", ModelKind::Embedder, 20 * MB));
    models.push(FakeModel::new("rerank", ModelKind::Reranker, 20 * MB));
    let device = FakeDevice::new(models);
    // Not all of them fit, so some come and go.
    let mut options = EngineOptions::with_budget(150 * MB);
    options.prompt_cache_bytes = MB;
    let engine = Engine::open_fake(device.clone(), options).unwrap();
    let answered = AtomicUsize::new(0);
    // A first part fills what is made once and the kept prompts; then two halves are compared.
    round(&engine, REQUESTS / 5, 1, &answered);
    at_rest(&engine);
    round(&engine, REQUESTS * 2 / 5, 2, &answered);
    at_rest(&engine);
    let second = resident();
    round(&engine, REQUESTS * 2 / 5, 3, &answered);
    at_rest(&engine);
    let third = resident();
    let answered = answered.into_inner();
    assert!(answered > REQUESTS / 3, "only {answered} were answered");
    // 4,000 requests: one leaked request of a few hundred bytes each would show.
    assert!(third.saturating_sub(second) < 1 << 20, "the second half grew the process from {second} to {third}");
    block_on(engine.pool().trim()).unwrap();
    block_on(engine.close_and_wait()).unwrap();
    assert_eq!(engine.pool().status().used_bytes, 0);
    assert_eq!((device.memory().active, device.memory().cache), (0, 0));
}
