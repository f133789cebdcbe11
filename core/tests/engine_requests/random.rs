//! Random requests, cancels, deadlines, failures and panics: whatever happens, each caller hears exactly one end, and everything
//! comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hob::engine::{Availability, DecideRequest, EmbedRequest, Engine, Event, GenerateRequest, OnCancel, Prompt, RequestOptions};
use hob::engine::{RerankRequest, ScoreRequest};
use hob::fake::{FakeModel, Fault, Point};
use hob::model::ModelKind;
use hob::{CancelToken, ErrorKind, Key, block_on};
use proptest::prelude::*;

use crate::support::*;

#[derive(Debug, Clone)]
enum Kind {
    Generate { prompt: usize, reads: usize, stop: bool },
    Embed(usize),
    Rerank(usize),
    Score(usize),
    Decide(usize),
    Load,
}

#[derive(Debug, Clone)]
struct Plan {
    kind: Kind,
    model: usize,
    timeout: Option<u64>,
    /// Goes away instead of waiting for the end; a generation reads so many events before.
    leaves: bool,
}

#[derive(Debug, Clone)]
enum Act {
    Start(Plan),
    Cancel(usize),
    Fault(usize, u8),
    Hold(usize),
    Release(usize),
    Advance(u64),
    Evict(usize, bool),
}

const POINTS: [Point; 9] = [
    Point::Load,
    Point::LoadStep,
    Point::LoadEnd,
    Point::Prefill,
    Point::Step,
    Point::Score,
    Point::Embed,
    Point::Rerank,
    Point::Drain,
];

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        4 => (1usize..1200, 0usize..400, any::<bool>())
            .prop_map(|(prompt, reads, stop)| Kind::Generate { prompt, reads, stop }),
        2 => (1usize..60).prop_map(Kind::Embed),
        1 => (1usize..40).prop_map(Kind::Rerank),
        1 => (1usize..600).prop_map(Kind::Score),
        1 => (1usize..6).prop_map(Kind::Decide),
        1 => Just(Kind::Load),
    ]
}

fn plans() -> impl Strategy<Value = Plan> {
    (kinds(), 0usize..3, proptest::option::of(1u64..30), prop::bool::weighted(0.25))
        .prop_map(|(kind, model, timeout, leaves)| Plan { kind, model, timeout, leaves })
}

fn acts() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => plans().prop_map(Act::Start),
        2 => (0usize..40).prop_map(Act::Cancel),
        2 => (0usize..POINTS.len(), 0u8..3).prop_map(|(point, fault)| Act::Fault(point, fault)),
        1 => (0usize..POINTS.len()).prop_map(Act::Hold),
        2 => (0usize..POINTS.len()).prop_map(Act::Release),
        2 => (1u64..8).prop_map(Act::Advance),
        1 => (0usize..9, any::<bool>()).prop_map(|(model, force)| Act::Evict(model, force)),
    ]
}

fn harness() -> Harness {
    let chat = |n: usize| FakeModel {
        reply: long_text(),
        echo: n == 1,
        kv_bytes_per_token: 1000 * n as u64,
        ..FakeModel::new(&format!("chat{n}"), ModelKind::Chat, 100 * MB)
    };
    let mut models: Vec<_> = (0..3).map(chat).collect();
    models.extend((0..3).map(|n| FakeModel::new(&format!("embed{n}"), ModelKind::Embedder, 50 * MB)));
    models.extend((0..3).map(|n| FakeModel::new(&format!("rerank{n}"), ModelKind::Reranker, 50 * MB)));
    Harness::with(models, |options| {
        // Room for some of them: others wait, and idle ones go.
        options.budget_bytes = Some(320 * MB);
        options.capacity = 3;
        options.queue = 9;
        options.prompt_cache_bytes = MB;
    })
}

/// Runs one request to its end and counts the ends heard.
fn run(engine: &Engine, plan: Plan, token: CancelToken, ends: &AtomicUsize) {
    let chat = format!("chat{}", plan.model);
    let timeout = plan.timeout.map(Duration::from_secs);
    let options = RequestOptions { cancel: Some(token.clone()), timeout, ..RequestOptions::default() };
    let texts = |n: usize| (0..n).map(|i| "t".repeat(1 + i * 31 % 97)).collect::<Vec<_>>();
    let ended = |error: Option<hob::Error>| {
        ends.fetch_add(1, Ordering::SeqCst);
        if let Some(error) = error {
            let known = matches!(
                error.kind(),
                ErrorKind::Busy
                    | ErrorKind::Cancelled
                    | ErrorKind::Timeout
                    | ErrorKind::OutOfMemory
                    | ErrorKind::Internal
                    | ErrorKind::Backend
            );
            assert!(known, "{}", error.full_message());
        }
    };
    let future: hob::BoxFuture<'_, Option<hob::Error>> = match plan.kind {
        Kind::Generate { prompt, reads, stop } => {
            let options = RequestOptions { on_cancel: if stop { OnCancel::Stop } else { OnCancel::Abort }, ..options };
            let mut stream = match engine.generate(GenerateRequest { options, ..raw(&chat, "p".repeat(prompt)) }) {
                Ok(stream) => stream,
                Err(error) => return ended(Some(error)),
            };
            let mut read = 0;
            loop {
                if plan.leaves && read == reads {
                    return ended(None);
                }
                match block_on(stream.next()).expect("a stream ends with a terminal event") {
                    Ok(Event::Finished(_)) => break ended(None),
                    Ok(_) => read += 1,
                    Err(error) => break ended(Some(error)),
                }
            }
            assert!(block_on(stream.next()).is_none() && block_on(stream.next()).is_none(), "nothing follows the end");
            return;
        }
        Kind::Embed(n) => {
            let request = EmbedRequest { options, ..EmbedRequest::new(format!("embed{}", plan.model), texts(n)) };
            Box::pin(async move { engine.embed(request).await.err() })
        }
        Kind::Rerank(n) => {
            let request = RerankRequest { options, ..RerankRequest::new(format!("rerank{}", plan.model), "t", texts(n)) };
            Box::pin(async move { engine.rerank(request).await.err() })
        }
        Kind::Score(n) => {
            let request = ScoreRequest { options, ..ScoreRequest::new(chat, Prompt::Raw("p".repeat(n)), "c".repeat(n)) };
            Box::pin(async move { engine.score(request).await.err() })
        }
        Kind::Decide(n) => {
            let request = DecideRequest { options, ..DecideRequest::choice(chat, "which?", texts(n)) };
            Box::pin(async move { engine.decide(request).await.err() })
        }
        Kind::Load => Box::pin(async move { engine.load(&chat, options).await.err() }),
    };
    if plan.leaves {
        let mut future = future;
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for _ in 0..20 {
            if future.as_mut().poll(&mut context).is_ready() {
                break;
            }
            std::thread::yield_now();
        }
        return ended(None);
    }
    ended(block_on(future));
}

fn check(acts: Vec<Act>) {
    let h = harness();
    let ends = Arc::new(AtomicUsize::new(0));
    let (mut threads, mut tokens) = (Vec::new(), Vec::new());
    for act in acts {
        match act {
            Act::Start(plan) => {
                let token = CancelToken::new();
                tokens.push(token.clone());
                let (engine, ends) = (h.engine.clone(), Arc::clone(&ends));
                threads.push(go(move || run(&engine, plan, token, &ends)));
            }
            Act::Cancel(index) => {
                if let Some(token) = tokens.get(index) {
                    token.cancel();
                }
            }
            Act::Fault(point, fault) => {
                let fault = match fault {
                    0 => Fault::Panic,
                    1 => Fault::Error(ErrorKind::OutOfMemory),
                    _ => Fault::NotFinite(point % 3),
                };
                // A drain has nobody to tell of a panic.
                if POINTS[point] != Point::Drain || fault != Fault::Panic {
                    h.device.fail_next(POINTS[point], fault);
                }
            }
            Act::Hold(point) => h.device.hold(POINTS[point]),
            Act::Release(point) => h.device.release(POINTS[point]),
            Act::Advance(seconds) => h.clock.advance(Duration::from_secs(seconds)),
            Act::Evict(model, force) => {
                let name = format!("{}{}", ["chat", "embed", "rerank"][model / 3], model % 3);
                let key = [Key::chat(name.as_str()), Key::embedder(name.as_str()), Key::reranker(name.as_str())][model / 3].clone();
                let pool = h.engine.pool().clone();
                // It waits for the device, which may be held.
                threads.push(go(move || drop(block_on(pool.evict(&key, force)))));
            }
        }
        // The order of things is the machine's as much as the plan's.
        std::thread::yield_now();
        // Invariant: the account is exact at any moment.
        h.engine.pool().check_account().unwrap();
    }
    for point in POINTS {
        h.device.release(point);
    }
    // Deadlines come, and what waits for timers goes on.
    let mut looks = 0;
    until("every caller has heard", || {
        looks += 1;
        if looks % 1000 == 0 {
            h.clock.advance(Duration::from_millis(500));
        }
        threads.iter().all(std::thread::JoinHandle::is_finished)
    });
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(ends.load(Ordering::SeqCst), tokens.len(), "one end for each request");
    until("everything ends", || h.engine.requests() == 0 && h.uses() == 0);
    until("the device rests", || h.engine.availability() == Availability::Ready);
    h.engine.pool().check_account().unwrap();
    // It serves on, once what was left of the script is through.
    until("it serves", || answer(&h.engine, GenerateRequest { max_tokens: Some(3), ..raw("chat0", "p") }).is_ok());
    block_on(h.engine.close_and_wait()).unwrap_or_else(|error| assert!(error.message().contains("scripted"), "{error}"));
    assert_eq!(h.engine.pool().status().used_bytes, 0);
    h.engine.pool().check_account().unwrap();
    until("the device's memory is back", || h.device.memory().active == 0);
}

/// Sequences; `HOB_PROPTEST_CASES` raises the number.
fn cases() -> u32 {
    std::env::var("HOB_PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_request_ends_once_and_everything_comes_back(acts in prop::collection::vec(acts(), 1..40)) {
        check(acts);
    }
}
