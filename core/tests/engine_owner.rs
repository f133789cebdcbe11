//! Hazard: the owner protocol (P20 to P30) as the engine does it, on a scripted device; the pool's side is in `pool_owner.rs`.
//! Also what the engine adds to it: idle policies, pins, the drain and the allocator's limits.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread::{JoinHandle, spawn, yield_now};
use std::time::{Duration, Instant};

use hob::chat_template::Message;
use hob::engine::{
    AllocatorLimits, DecideRequest, EmbedRequest, Engine, EngineOptions, Event, GenerateRequest, Generation, Prompt,
    RequestOptions, RerankRequest, ScoreRequest, Stream,
};
use hob::fake::{FakeDevice, FakeModel, Fault, Point};
use hob::model::ModelKind;
use hob::pool::{Evicted, IdlePolicy, NoRoom, PoolEvent, Received, UnloadReason};
use hob::{CancelToken, ErrorKind, Key, Result, block_on};

const MB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// `a`, `b`: chat models of 100 MB. `e`, `r`: an embedder and a reranker of 100 MB. `big`: 8 GiB.
fn device() -> FakeDevice {
    FakeDevice::new(vec![
        FakeModel::new("a", ModelKind::Chat, 100 * MB),
        FakeModel::new("b", ModelKind::Chat, 100 * MB),
        FakeModel::new("e", ModelKind::Embedder, 100 * MB),
        FakeModel::new("r", ModelKind::Reranker, 100 * MB),
        FakeModel::new("big", ModelKind::Chat, 8 * GIB),
    ])
}

/// Room for one of the small models.
fn engine(device: &FakeDevice) -> Engine {
    Engine::open_fake(device.clone(), EngineOptions::with_budget(120 * MB)).unwrap()
}

fn ask(model: &str) -> GenerateRequest {
    GenerateRequest::chat(model, vec![Message::user("hi")])
}

fn answer(engine: &Engine, request: GenerateRequest) -> Result<Generation> {
    block_on(engine.generate(request)?.collect())
}

fn serve(engine: &Engine, model: &str) {
    assert_eq!(answer(engine, ask(model)).unwrap().text, "Hello!");
}

/// A stream that stands before its first token.
fn streaming(engine: &Engine, device: &FakeDevice, model: &str) -> Stream {
    device.hold(Point::Step);
    let stream = engine.generate(ask(model)).unwrap();
    device.wait_until_held(Point::Step);
    stream
}

fn ends_well(stream: Stream) {
    assert_eq!(block_on(stream.collect()).unwrap().text, "Hello!");
}

fn evict(engine: &Engine, key: Key, force: bool) -> JoinHandle<Result<Evicted>> {
    let pool = engine.pool().clone();
    spawn(move || block_on(pool.evict(&key, force)))
}

/// `kind:id state` of what the pool counts, in the order of keys.
fn held(engine: &Engine) -> Vec<String> {
    let entries = engine.pool().status().entries;
    entries.iter().map(|entry| format!("{} {:?}", entry.key, entry.state)).collect()
}

fn uses(engine: &Engine) -> u64 {
    engine.pool().status().entries.iter().map(|entry| entry.uses).sum()
}

/// For what happens on another thread and signals nothing. The bound only turns a hang into a failure.
#[track_caller]
fn until(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(30), "it never happened");
        yield_now();
    }
}

// ---- P20, P21: cold and hit ----

#[test]
fn p20_p21_a_cold_request_loads_and_the_next_one_hits() {
    let device = device();
    let engine = engine(&device);
    serve(&engine, "a");
    serve(&engine, "a");
    assert_eq!(device.count(Point::Load), 1);
    assert_eq!((held(&engine), uses(&engine)), (vec!["chat:a Ready".to_owned()], 0));
}

#[test]
fn p21_a_hit_holds_its_model_to_the_end_as_a_load_does() {
    let device = device();
    let engine = engine(&device);
    serve(&engine, "a");
    let stream = streaming(&engine, &device, "a");
    assert_eq!(uses(&engine), 1);
    let error = evict(&engine, Key::chat("a"), false).join().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    device.release(Point::Step);
    ends_well(stream);
    assert_eq!((held(&engine), uses(&engine)), (vec!["chat:a Ready".to_owned()], 0));
    assert_eq!(engine.pool().status().counters.unbalanced_ends, 0, "each use ends once");
}

#[test]
fn p20_the_idle_policy_of_a_use_counts_for_the_load_it_causes() {
    let device = device();
    let engine = engine(&device);
    let options = RequestOptions { idle: Some(IdlePolicy::Immediately), ..RequestOptions::default() };
    answer(&engine, GenerateRequest { options, ..ask("a") }).unwrap();
    until(|| held(&engine).is_empty());
}

#[test]
fn a_load_that_was_told_to_stop_at_its_very_end_leaves_nothing() {
    // Hazard D9.
    let device = device();
    let engine = engine(&device);
    device.hold(Point::LoadEnd);
    let token = CancelToken::new();
    let options = RequestOptions { cancel: Some(token.clone()), ..RequestOptions::default() };
    let loading = engine.clone();
    let load = spawn(move || block_on(loading.load("a", options)).map(drop));
    device.wait_until_held(Point::LoadEnd);
    token.cancel();
    assert_eq!(load.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled);
    device.release(Point::LoadEnd);
    until(|| held(&engine).is_empty());
    serve(&engine, "a");
    assert_eq!(device.count(Point::Load), 2, "what was stopped is not kept");
}

#[test]
fn p21_a_refused_hit_after_the_release_reached_the_owner_loads_afresh() {
    let device = device();
    let engine = engine(&device);
    serve(&engine, "a");
    evict(&engine, Key::chat("a"), false).join().unwrap().unwrap();
    serve(&engine, "a");
    assert_eq!((device.count(Point::Load), device.memory().peak), (2, 100 * MB));
}

#[test]
fn p21_a_refused_hit_before_the_release_has_ended_waits_for_the_bytes_and_loads_afresh() {
    let device = device();
    let engine = engine(&device);
    serve(&engine, "a");
    // The pool has let go, and the release has got as far as the device.
    device.hold(Point::Unload);
    let evicting = evict(&engine, Key::chat("a"), false);
    device.wait_until_held(Point::Unload);
    assert_eq!(held(&engine), ["chat:a Draining"]);
    let again = engine.generate(ask("a")).unwrap();
    until(|| engine.pool().status().waiting == 1);
    assert_eq!(device.count(Point::Load), 1, "nothing is loaded beside the bytes that are on their way back");
    device.release(Point::Unload);
    evicting.join().unwrap().unwrap();
    ends_well(again);
    assert_eq!((device.count(Point::Load), device.memory().peak), (2, 100 * MB));
}

#[test]
fn p21_a_refused_hit_whose_fresh_admission_fails_leaves_nothing_and_has_drained() {
    let device = device();
    let engine = engine(&device);
    serve(&engine, "a");
    evict(&engine, Key::chat("a"), false).join().unwrap().unwrap();
    device.fail_next(Point::Load, Fault::Error(ErrorKind::Io));
    assert_eq!(answer(&engine, ask("a")).unwrap_err().kind(), ErrorKind::Io);
    assert!(held(&engine).is_empty());
    assert_eq!((device.memory().active, device.memory().cache), (0, 0));
}

// ---- P22, P23: swaps ----

#[test]
fn p22_a_swap_frees_and_drains_the_old_one_before_the_new_ones_first_byte() {
    let device = device();
    let engine = engine(&device);
    serve(&engine, "a");
    device.hold(Point::Load);
    let stream = engine.generate(ask("b")).unwrap();
    device.wait_until_held(Point::Load);
    assert_eq!((device.memory().active, device.memory().cache), (0, 0), "gone and drained before the load");
    device.release(Point::Load);
    ends_well(stream);
    serve(&engine, "a");
    assert_eq!((held(&engine), device.memory().peak), (vec!["chat:a Ready".to_owned()], 100 * MB));
}

#[test]
fn p23_after_a_swap_into_a_failing_model_the_old_one_stays_gone_and_loads_again_when_asked() {
    for fault in [Fault::Error(ErrorKind::OutOfMemory), Fault::Panic] {
        let device = device();
        let engine = engine(&device);
        serve(&engine, "a");
        device.fail_next(Point::LoadEnd, fault);
        answer(&engine, ask("b")).unwrap_err();
        assert!(held(&engine).is_empty(), "{fault:?}");
        assert_eq!((device.memory().active, device.memory().cache), (0, 0));
        serve(&engine, "a");
        assert_eq!(device.count(Point::Load), 3);
    }
}

// ---- P24 to P27: tokens, and the release that comes early ----

#[test]
fn p24_p25_a_release_frees_its_own_admission_and_no_later_one() {
    let device = device();
    let engine = engine(&device);
    let stream = streaming(&engine, &device, "a");
    // Detached and released under the stream; the stream holds the old model.
    let evicting = evict(&engine, Key::chat("a"), true);
    until(|| engine.pool().peek(&Key::chat("a")).is_none());
    let fresh = engine.generate(ask("a")).unwrap();
    device.release(Point::Step);
    ends_well(stream);
    evicting.join().unwrap().unwrap();
    ends_well(fresh);
    // The old release and the old holder's drop touched the old model only.
    serve(&engine, "a");
    assert_eq!((device.count(Point::Load), device.memory().active), (2, 100 * MB));
}

#[test]
fn p26_a_release_during_the_load_ends_that_load_and_nothing_stays() {
    let device = device();
    let engine = engine(&device);
    device.hold(Point::LoadEnd);
    let stream = engine.generate(ask("a")).unwrap();
    device.wait_until_held(Point::LoadEnd);
    // The first poll tells the load to stop; it stands before its last look at its token.
    let key = Key::chat("a");
    let mut evicting = pin!(engine.pool().evict(&key, true));
    assert!(evicting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    device.release(Point::LoadEnd);
    assert_eq!(block_on(stream.collect()).unwrap_err().kind(), ErrorKind::Cancelled);
    block_on(evicting).unwrap();
    until(|| device.memory().held() == 0);
    assert!(held(&engine).is_empty());
    serve(&engine, "a");
}

#[test]
fn p26_after_a_release_before_the_first_step_the_request_runs_on_its_own_model_and_drains_once() {
    let device = device();
    let engine = engine(&device);
    let stream = streaming(&engine, &device, "a");
    evict(&engine, Key::chat("a"), true).join().unwrap().unwrap();
    assert!(engine.pool().begin_use(&Key::chat("a")).is_none(), "nobody can hit it any more");
    assert_eq!(device.memory().active, 100 * MB, "the request holds it");
    let (unloads, drains) = (device.count(Point::Unload), device.count(Point::Drain));
    device.release(Point::Step);
    ends_well(stream);
    until(|| device.memory().held() == 0 && held(&engine).is_empty());
    assert_eq!(device.count(Point::Unload) - unloads, 1, "freed once, by its last holder");
    // The last holder's own drain, and the pool's before it takes the bytes off the account.
    assert!(device.count(Point::Drain) - drains <= 2);
}

#[test]
fn a_forced_evict_keeps_the_bytes_on_the_account_until_the_streams_end() {
    let device = device();
    let engine = engine(&device);
    let stream = streaming(&engine, &device, "a");
    let evicted = evict(&engine, Key::chat("a"), true).join().unwrap().unwrap();
    assert_eq!(evicted.freed_bytes, 0, "nothing came back yet, and nothing is claimed");
    assert_eq!(engine.pool().status().releasing_bytes, 100 * MB);
    let waiting = engine.generate(ask("b")).unwrap();
    until(|| engine.pool().status().waiting == 1);
    assert_eq!(device.count(Point::Load), 1);
    device.release(Point::Step);
    ends_well(stream);
    ends_well(waiting);
    assert_eq!((device.memory().active, device.memory().peak), (100 * MB, 100 * MB), "it came back before the next was loaded");
}

// ---- P28: the end of a use is unconditional ----

#[test]
fn p28_every_verb_ends_its_use_on_success_on_failure_and_on_panic() {
    let device = device();
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(GIB)).unwrap();
    let verbs: [(Point, &dyn Fn() -> Result<()>); 3] = [
        (Point::Step, &|| answer(&engine, ask("a")).map(drop)),
        (Point::Embed, &|| block_on(engine.embed(EmbedRequest::new("e", ["x"]))).map(drop)),
        (Point::Rerank, &|| block_on(engine.rerank(RerankRequest::new("r", "q", ["x"]))).map(drop)),
    ];
    for (point, verb) in verbs {
        verb().unwrap();
        assert_eq!(uses(&engine), 0, "{point:?}: success");
        for fault in [Fault::Error(ErrorKind::Backend), Fault::Panic] {
            device.fail_next(point, fault);
            verb().unwrap_err();
            assert_eq!(uses(&engine), 0, "{point:?}: {fault:?}");
        }
    }
    // Nothing is stuck in use: each of them can go without force.
    for key in [Key::chat("a"), Key::embedder("e"), Key::reranker("r")] {
        evict(&engine, key, false).join().unwrap().unwrap();
    }
    assert_eq!(device.memory().held(), 0);
}

#[test]
fn p28_every_verb_ends_its_use_when_cancelled_or_refused_after_the_model_was_found() {
    let device = device();
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(GIB)).unwrap();
    let with = |cancel: &CancelToken| RequestOptions { cancel: Some(cancel.clone()), ..RequestOptions::default() };
    for point in [Point::Step, Point::Embed, Point::Rerank] {
        device.hold(point);
        let (cancel, engine_in) = (CancelToken::new(), engine.clone());
        let options = with(&cancel);
        let running = spawn(move || match point {
            Point::Step => answer(&engine_in, GenerateRequest { options, ..ask("a") }).map(drop),
            Point::Embed => block_on(engine_in.embed(EmbedRequest { options, ..EmbedRequest::new("e", ["x"]) })).map(drop),
            _ => block_on(engine_in.rerank(RerankRequest { options, ..RerankRequest::new("r", "q", ["x"]) })).map(drop),
        });
        device.wait_until_held(point);
        cancel.cancel();
        device.release(point);
        assert_eq!(running.join().unwrap().unwrap_err().kind(), ErrorKind::Cancelled, "{point:?}");
        assert_eq!(uses(&engine), 0, "{point:?}");
    }
    // Refused once the model is known: too long for it, or no such prompt.
    answer(&engine, GenerateRequest::raw("a", "x".repeat(5000))).unwrap_err();
    block_on(engine.embed(EmbedRequest::new("e", ["x".repeat(5000)]))).unwrap_err();
    let named = EmbedRequest { prompt_name: Some("nowhere".into()), ..EmbedRequest::new("e", ["x"]) };
    block_on(engine.embed(named)).unwrap_err();
    assert_eq!(uses(&engine), 0);
}

/// Tells how many uses there were when it was woken.
struct AtWake {
    engine: Engine,
    uses: Mutex<Option<u64>>,
}

impl Wake for AtWake {
    fn wake(self: Arc<Self>) {
        *self.uses.lock().unwrap() = Some(uses(&self.engine));
    }
}

#[test]
fn p28_a_use_has_ended_when_the_terminal_event_is_heard() {
    // Invariant 7, for an answer without tokens and for a failure: both are a stream's only event, so it is what wakes the reader.
    let device = device();
    let engine = engine(&device);
    for (what, fails) in [("finished", false), ("failed", true)] {
        let waker = Arc::new(AtWake { engine: engine.clone(), uses: Mutex::default() });
        let (place, request) = if fails {
            device.fail_next(Point::Prefill, Fault::Error(ErrorKind::Backend));
            (Point::Prefill, ask("a"))
        } else {
            (Point::Load, GenerateRequest { max_tokens: Some(0), ..ask("a") })
        };
        device.hold(place);
        let mut stream = engine.generate(request).unwrap();
        assert!(pin!(stream.next()).poll(&mut Context::from_waker(&waker.clone().into())).is_pending(), "{what}");
        device.wait_until_held(place);
        device.release(place);
        until(|| waker.uses.lock().unwrap().is_some());
        assert_eq!(*waker.uses.lock().unwrap(), Some(0), "{what}");
        assert_eq!(matches!(block_on(stream.next()), Some(Ok(Event::Finished(_)))), !fails, "{what}");
    }
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Each verb whose answer is a future, cold; all fit the budget one after the other.
fn futures(engine: &Engine) -> Vec<(&'static str, Answer<'_>)> {
    async fn quiet<T>(answer: impl Future<Output = Result<T>>) -> Result<()> {
        answer.await.map(drop)
    }
    let prompt = || Prompt::Raw("x".to_owned());
    vec![
        ("load", Box::pin(quiet(engine.load("a", RequestOptions::default())))),
        ("embed", Box::pin(quiet(engine.embed(EmbedRequest::new("e", ["x"]))))),
        ("rerank", Box::pin(quiet(engine.rerank(RerankRequest::new("r", "q", ["x"]))))),
        ("score", Box::pin(quiet(engine.score(ScoreRequest::new("b", prompt(), "y"))))),
        ("decide", Box::pin(quiet(engine.decide(DecideRequest::choice("a", "x", ["y", "z"]))))),
    ]
}

#[test]
fn a_future_that_nobody_polls_any_more_keeps_no_model_in_use() {
    // A host that races a request against something else in one task may never come back to it.
    let device = device();
    let engine = engine(&device);
    let mut left = Vec::new();
    for (verb, mut future) in futures(&engine) {
        if future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            left.push((verb, future));
        }
        // Each needs the room that the one before has given back.
        until(|| engine.requests() == 0 && uses(&engine) == 0);
    }
    block_on(engine.close_and_wait()).unwrap();
    assert_eq!(device.memory().held(), 0);
    for (verb, mut future) in left {
        // An answer, or that of a close which overtook it.
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready(), "{verb}");
    }
}

#[test]
fn a_future_that_is_dropped_cancels_its_request() {
    let device = device();
    let engine = engine(&device);
    for (verb, mut future) in futures(&engine) {
        device.hold(Point::Load);
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(), "{verb}");
        device.wait_until_held(Point::Load);
        drop(future);
        until(|| engine.requests() == 0);
        device.release(Point::Load);
        until(|| held(&engine).is_empty() && device.memory().held() == 0);
    }
    serve(&engine, "a");
}

// ---- P29: stop ----

#[test]
fn p29_closing_ends_a_request_that_waits_for_room_and_leaves_nothing() {
    let device = device();
    let engine = engine(&device);
    let stream = streaming(&engine, &device, "a");
    let parked = engine.generate(ask("b")).unwrap();
    until(|| engine.pool().status().waiting == 1);
    let closing = spawn({
        let engine = engine.clone();
        move || block_on(engine.close())
    });
    // The parked one ends while the other still stands before its step.
    assert_eq!(block_on(parked.collect()).unwrap_err().kind(), ErrorKind::Closed);
    device.release(Point::Step);
    assert_eq!(block_on(stream.collect()).unwrap_err().kind(), ErrorKind::Closed);
    closing.join().unwrap().unwrap();
    block_on(engine.close()).unwrap();
    until(|| device.memory().held() == 0);
    assert_eq!(device.count(Point::Load), 1, "the parked one was never loaded");
}

#[test]
fn p29_closing_during_a_load_frees_what_the_load_made() {
    let device = device();
    let engine = engine(&device);
    device.hold(Point::LoadEnd);
    let stream = engine.generate(ask("a")).unwrap();
    device.wait_until_held(Point::LoadEnd);
    let closing = spawn({
        let engine = engine.clone();
        move || block_on(engine.close())
    });
    assert_eq!(block_on(stream.collect()).unwrap_err().kind(), ErrorKind::Closed);
    device.release(Point::LoadEnd);
    closing.join().unwrap().unwrap();
    until(|| device.memory().held() == 0);
    assert!(held(&engine).is_empty());
}

// ---- P30: a release waits for nothing ----

#[test]
fn p30_a_request_may_evict_another_verbs_model_while_a_stream_of_a_third_runs() {
    let device = device();
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(220 * MB)).unwrap();
    block_on(engine.embed(EmbedRequest::new("e", ["x"]))).unwrap();
    // Every verb goes through the one device thread, which stands in the stream's step; the embedder's release is posted to
    // it from the reranker's admission, and neither waits for the other.
    let stream = streaming(&engine, &device, "a");
    let ranking = spawn({
        let engine = engine.clone();
        move || block_on(engine.rerank(RerankRequest::new("r", "q", ["x"]))).map(drop)
    });
    until(|| engine.pool().peek(&Key::embedder("e")).is_none());
    device.release(Point::Step);
    ends_well(stream);
    ranking.join().unwrap().unwrap();
    assert_eq!(device.memory().peak, 200 * MB);
}

// ---- idle policies and pins ----

#[test]
fn a_models_own_idle_policy_rules_it_and_no_other() {
    let device = device();
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(GIB)).unwrap();
    let mut events = engine.pool().events(64);
    let leave = RequestOptions { model_idle: Some(IdlePolicy::Immediately), ..RequestOptions::default() };
    serve(&engine, "b");
    answer(&engine, GenerateRequest { options: leave, ..ask("a") }).unwrap();
    let gone = loop {
        if let Some(Received::Event(PoolEvent::Unloaded { key, reason, .. })) = block_on(events.next()) {
            break (key, reason);
        }
    };
    assert_eq!(gone, (Key::chat("a"), UnloadReason::Idle));
    assert_eq!(held(&engine), ["chat:b Ready"]);
    // On a model that is there already, and for this use only.
    let keep = RequestOptions { model_idle: Some(IdlePolicy::Never), ..RequestOptions::default() };
    answer(&engine, GenerateRequest { options: keep, ..ask("b") }).unwrap();
    assert_eq!(engine.pool().status().entries[0].idle, IdlePolicy::Never);
    let once = RequestOptions { idle: Some(IdlePolicy::AfterSeconds(60)), ..RequestOptions::default() };
    answer(&engine, GenerateRequest { options: once, ..ask("b") }).unwrap();
    assert_eq!(engine.pool().status().entries[0].idle, IdlePolicy::AfterSeconds(60));
    serve(&engine, "b");
    assert_eq!(engine.pool().status().entries[0].idle, IdlePolicy::Never);
}

#[test]
fn a_model_loaded_ahead_of_its_first_use_stays_until_that_use_ends() {
    let device = device();
    let mut options = EngineOptions::with_budget(GIB);
    options.idle = IdlePolicy::Immediately;
    let engine = Engine::open_fake(device.clone(), options).unwrap();
    let info = block_on(engine.load("a", RequestOptions::default())).unwrap();
    assert_eq!((info.id.as_str(), held(&engine)), ("a", vec!["chat:a Ready".to_owned()]));
    block_on(engine.load("a", RequestOptions::default())).unwrap();
    serve(&engine, "a");
    until(|| held(&engine).is_empty());
    assert_eq!((device.count(Point::Load), device.memory().held()), (1, 0));
}

#[test]
fn a_pinned_model_is_neither_evicted_nor_swept_and_unpinning_ends_it() {
    let device = device();
    let mut options = EngineOptions::with_budget(120 * MB);
    options.no_room = NoRoom::Refuse;
    let engine = Engine::open_fake(device.clone(), options).unwrap();
    let pinned = RequestOptions { pinned: true, ..RequestOptions::default() };
    block_on(engine.load("a", pinned.clone())).unwrap();
    assert_eq!(answer(&engine, ask("b")).unwrap_err().kind(), ErrorKind::BudgetExceeded);
    assert!(engine.pool().unpin(&Key::chat("a")));
    serve(&engine, "b");
    // A model that is there already is pinned by the next request that says so, unless the request is not for it.
    let wrong = EmbedRequest { options: pinned.clone(), ..EmbedRequest::new("b", ["x"]) };
    assert_eq!(block_on(engine.embed(wrong)).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(engine.pool().is_pinned(&Key::chat("b")), Some(false));
    answer(&engine, GenerateRequest { options: pinned, ..ask("b") }).unwrap();
    assert_eq!(engine.pool().is_pinned(&Key::chat("b")), Some(true));
}

#[test]
fn without_the_drain_freed_memory_stays_for_the_next_model_and_is_not_held_against_it() {
    let device = device();
    let mut options = EngineOptions::with_budget(120 * MB);
    options.drain_after_release = false;
    options.no_room = NoRoom::Refuse;
    let engine = Engine::open_fake(device.clone(), options).unwrap();
    for model in ["a", "b", "a"] {
        serve(&engine, model);
    }
    assert_eq!((device.count(Point::Drain), device.memory().cache), (0, 200 * MB));
    let evicted = evict(&engine, Key::chat("a"), false).join().unwrap().unwrap();
    assert_eq!(evicted.freed_bytes, 0, "nothing was given back, and nothing is claimed");
}

// ---- the allocator's limits ----

#[test]
fn i18_the_limits_follow_the_budget_and_the_resident_weights_and_end_with_the_engine() {
    let device = device();
    let own = device.limits();
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(20 * GIB)).unwrap();
    // Budgets and unloads are posted to the device and not waited for.
    let turn_to = |memory, cache| until(|| device.limits() == AllocatorLimits { memory, cache });
    // Nothing resident, nothing kept.
    turn_to(20 * GIB, 0);
    device.hold(Point::Load);
    let stream = engine.generate(ask("a")).unwrap();
    device.wait_until_held(Point::Load);
    assert_eq!(device.limits().cache, GIB, "a load needs the cache already");
    device.release(Point::Load);
    ends_well(stream);
    turn_to(20 * GIB, GIB);
    serve(&engine, "big");
    turn_to(20 * GIB, (8 * GIB + 100 * MB) / 4);
    engine.pool().set_budget(30 * GIB).unwrap();
    turn_to(30 * GIB, (8 * GIB + 100 * MB) / 4);
    evict(&engine, Key::chat("big"), false).join().unwrap().unwrap();
    evict(&engine, Key::chat("a"), false).join().unwrap().unwrap();
    turn_to(30 * GIB, 0);
    for fault in [Fault::Error(ErrorKind::Io), Fault::Panic] {
        device.fail_next(Point::LoadEnd, fault);
        answer(&engine, ask("a")).unwrap_err();
        turn_to(30 * GIB, 0);
    }
    serve(&engine, "a");
    block_on(engine.close()).unwrap();
    assert_eq!(device.limits(), own);
    assert_eq!(engine.pool().set_budget(GIB).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(device.limits(), own);
}

#[test]
fn a_model_served_alone_over_the_budget_raises_the_memory_limit_while_it_stays() {
    let device = device();
    let engine = Engine::open_fake(device.clone(), EngineOptions::with_budget(GIB)).unwrap();
    serve(&engine, "big");
    assert_eq!(device.limits().memory, 8 * GIB);
    serve(&engine, "a");
    assert_eq!(device.limits().memory, GIB);
}
