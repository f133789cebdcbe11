//! What a decode step costs beside the device's own work: eight rows on the scripted device, whose steps take next to nothing.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark fails by panicking")]

use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hob::block_on;
use hob::engine::{Coalesce, Engine, EngineOptions, GenerateRequest, Stream};
use hob::fake::{FakeDevice, FakeModel, Point};
use hob::model::ModelKind;

const ROWS: usize = 8;
/// Events a stream may hold without a reader; see there.
const STEPS: usize = 200;

/// Eight rows in one batch, from their first common step to their last.
fn steps(device: &FakeDevice, engine: &Engine, coalesce: Coalesce) -> Duration {
    device.hold(Point::Step);
    let ask = || GenerateRequest { coalesce, max_tokens: Some(STEPS), ..GenerateRequest::raw("chat", "hi") };
    let mut streams: Vec<Stream> = (0..ROWS).map(|_| engine.generate(ask()).unwrap()).collect();
    // Each has its first token, so all prompts are through.
    let before = device.count(Point::Step);
    for stream in &mut streams {
        loop {
            if device.is_held(Point::Step) {
                device.pass(Point::Step);
            }
            let mut first = std::pin::pin!(stream.next());
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            if std::future::Future::poll(first.as_mut(), &mut context).is_ready() {
                break;
            }
            std::thread::yield_now();
        }
    }
    device.wait_until_held(Point::Step);
    let joined = device.count(Point::Step) - before;
    let began = Instant::now();
    device.release(Point::Step);
    while engine.requests() > 0 {
        std::hint::spin_loop();
    }
    let took = began.elapsed();
    let common = device.count(Point::Step) - before - joined + 1;
    for stream in streams {
        block_on(stream.collect()).unwrap();
    }
    // Per step, as if there had been STEPS of them.
    took.mul_f64(STEPS as f64 / common as f64)
}

fn scheduler(c: &mut Criterion) {
    let model = FakeModel { reply: "x".repeat(4000), ..FakeModel::new("chat", ModelKind::Chat, 1 << 20) };
    let device = FakeDevice::new(vec![model]);
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(1 << 30)).unwrap();
    let mut group = c.benchmark_group("8 rows");
    group.sample_size(20).throughput(Throughput::Elements(STEPS as u64));
    for (name, tokens) in [("an event per token", 1), ("an event per 16 tokens", 16)] {
        let coalesce = Coalesce { tokens, interval: Duration::ZERO };
        group.bench_function(format!("{STEPS} steps, {name}"), |b| {
            b.iter_custom(|rounds| (0..rounds).map(|_| steps(&device, &engine, coalesce)).sum());
        });
    }
    group.finish();
}

criterion_group!(benches, scheduler);
criterion_main!(benches);
