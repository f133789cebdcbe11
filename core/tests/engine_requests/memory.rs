//! Keys and values: kept prompts, growth, rows that would not fit, and the account of all three.

use hob::engine::{Event, GenerateRequest, RequestOptions};
use hob::fake::{FakeModel, Fault, Point};
use hob::model::ModelKind;
use hob::{ErrorKind, Key, block_on};

use crate::support::*;

const WEIGHTS: u64 = 100 * MB;
/// Bytes of keys and values per token.
const KV: u64 = 100_000;

fn heavy(name: &str) -> FakeModel {
    FakeModel { kv_bytes_per_token: KV, echo: true, ..FakeModel::new(name, ModelKind::Chat, WEIGHTS) }
}

fn harness(change: impl FnOnce(&mut hob::engine::EngineOptions)) -> Harness {
    Harness::with(vec![heavy("heavy"), heavy("heavy2"), FakeModel::new("chat", ModelKind::Chat, WEIGHTS)], change)
}

fn used(h: &Harness) -> u64 {
    h.engine.pool().status().used_bytes
}

fn cached(h: &Harness, request: GenerateRequest) -> usize {
    answer(&h.engine, request).unwrap().summary.cached_tokens
}

#[test]
fn a_prompt_seen_before_is_computed_from_where_it_differs() {
    // Hazards H3, H7, H9: and its answer is the same.
    let h = harness(|_| ());
    let prompt = "x".repeat(600);
    let cold = answer(&h.engine, raw("heavy", prompt.clone())).unwrap();
    let warm = answer(&h.engine, raw("heavy", prompt.clone())).unwrap();
    assert_eq!((cold.summary.cached_tokens, warm.summary.cached_tokens), (0, 599), "one token is always computed");
    assert_eq!((&warm.text, warm.summary.prompt_tokens), (&cold.text, 600));
    assert_eq!(h.device.count(Point::Prefill), 2 + 1);
    // The next turn: the prompt, its answer, and more.
    let next = format!("{prompt}{}y", cold.text);
    assert!(cached(&h, raw("heavy", next)) >= 600 + 599);
    assert_eq!(cached(&h, raw("heavy", format!("{}y", "x".repeat(300)))), 300);
    // Neither another model nor a request that wants none of it is served.
    assert_eq!(cached(&h, raw("heavy2", prompt.clone())), 0);
    assert_eq!(cached(&h, GenerateRequest { prompt_cache: false, ..raw("heavy", prompt) }), 0);
}

#[test]
fn a_request_can_keep_its_prompt_to_itself() {
    let h = harness(|_| ());
    let secret = || GenerateRequest { prompt_cache: false, ..raw("heavy", "x".repeat(300)) };
    cached(&h, secret());
    assert_eq!(used(&h), WEIGHTS, "nothing of it was kept");
    assert_eq!(cached(&h, raw("heavy", "x".repeat(300))), 0);
}

#[test]
fn kept_prompts_are_on_the_account_and_go_with_their_model() {
    let h = harness(|_| ());
    answer(&h.engine, raw("heavy", "x".repeat(300))).unwrap();
    let kept = used(&h) - WEIGHTS;
    assert!((300 * KV..=602 * KV).contains(&kept), "{kept} bytes for 300 tokens and their echo");
    // A failed request keeps nothing.
    h.device.fail_next(Point::Step, Fault::Error(ErrorKind::Backend));
    assert_eq!(kind(answer(&h.engine, raw("heavy", "z".repeat(300)))), ErrorKind::Backend);
    assert_eq!(used(&h), WEIGHTS + kept);
    let evicted = block_on(h.engine.pool().evict(&Key::chat("heavy"), false)).unwrap();
    assert_eq!((used(&h), evicted.freed_bytes > 0), (0, true));
    assert_eq!(cached(&h, raw("heavy", "x".repeat(300))), 0, "nothing outlives its model");
    h.assert_at_rest();
}

#[test]
fn switched_off_nothing_is_kept() {
    let h = harness(|options| options.prompt_cache_bytes = 0);
    for _ in 0..2 {
        assert_eq!(cached(&h, raw("heavy", "x".repeat(300))), 0);
        assert_eq!(used(&h), WEIGHTS);
    }
}

#[test]
fn a_prompt_that_makes_room_for_another_models_is_off_its_own_models_account() {
    // Room for one of the two kept prompts.
    let h = harness(|options| options.prompt_cache_bytes = 700 * KV);
    answer(&h.engine, raw("heavy", "x".repeat(300))).unwrap();
    let kept = used(&h) - WEIGHTS;
    assert!(kept > 0);
    answer(&h.engine, raw("heavy2", "y".repeat(300))).unwrap();
    assert_eq!(used(&h), 2 * WEIGHTS + kept, "one prompt is kept, and charged once");
    assert_eq!(cached(&h, raw("heavy", "x".repeat(300))), 0);
}

#[test]
fn keys_and_values_are_charged_as_they_grow_and_come_back() {
    let h = harness(|options| options.prompt_cache_bytes = 0);
    h.device.hold(Point::Step);
    let mut stream = h.engine.generate(raw("heavy", "x".repeat(50))).unwrap();
    let mut last = 0;
    for tokens in 1..10 {
        assert!(matches!(block_on(stream.next()), Some(Ok(Event::Chunk(_)))));
        h.device.wait_until_held(Point::Step);
        let grown = used(&h) - WEIGHTS;
        assert!(grown >= (50 + tokens) * KV && grown > last, "{tokens} tokens: {grown}");
        last = grown;
        h.device.pass(Point::Step);
    }
    h.device.release(Point::Step);
    block_on(stream.collect()).unwrap();
    assert_eq!(used(&h), WEIGHTS);
}

#[test]
fn scorings_charge_theirs_too() {
    let h = harness(|options| options.prompt_cache_bytes = 0);
    h.device.hold(Point::Score);
    let engine = h.engine.clone();
    let caller = go(move || {
        let request = hob::engine::ScoreRequest::new("heavy", hob::engine::Prompt::Raw("p".repeat(1000)), "c".repeat(300));
        block_on(engine.score(request))
    });
    h.device.wait_until_held(Point::Score);
    assert!(used(&h) >= WEIGHTS + 1000 * KV, "the prompt is in: {}", used(&h));
    h.device.release(Point::Score);
    caller.join().unwrap().unwrap();
    assert_eq!(used(&h), WEIGHTS);
}

#[test]
fn a_row_that_would_not_fit_waits_and_those_that_fit_run_together() {
    // Rows begin in slots of 1,024 tokens and end in slots of 1,280; there is room for two of the latter, not for three of the former.
    let model = FakeModel { echo: false, reply: "y".repeat(270), ..heavy("heavy") };
    let h = Harness::with(vec![model], |options| {
        options.budget_bytes = Some(WEIGHTS + 2800 * KV);
        options.prompt_cache_bytes = 0;
    });
    // Nobody reads: rows pause after some 256 tokens, and keep what they hold.
    let streams: Vec<_> = (0..4).map(|_| h.engine.generate(raw("heavy", "x".repeat(1000))).unwrap()).collect();
    until("two of them pause", || used(&h) >= WEIGHTS + 2 * 1250 * KV);
    let mut most = 0;
    let threads: Vec<_> = streams.into_iter().map(|stream| go(move || block_on(stream.collect()))).collect();
    until("all have ended", || {
        most = most.max(used(&h));
        threads.iter().all(std::thread::JoinHandle::is_finished)
    });
    for thread in threads {
        assert_eq!(thread.join().unwrap().unwrap().token_ids.len(), 270);
    }
    assert!(most <= WEIGHTS + 2800 * KV, "{most}");
    assert!(h.device.widest_batch() <= 2);
    h.come_to_rest();
}

#[test]
fn kept_prompts_give_way_to_rows_that_could_not_run_together_beside_them() {
    // Two rows come to need slots of 1,280 tokens; beside a kept prompt of 600 there is room for one of them.
    let h = Harness::with(vec![heavy("heavy")], |options| options.budget_bytes = Some(WEIGHTS + 2800 * KV));
    let kept = "z".repeat(300);
    answer(&h.engine, raw("heavy", kept.clone())).unwrap();
    assert!(used(&h) > WEIGHTS + 500 * KV);
    let row = || GenerateRequest { max_tokens: Some(270), ..raw("heavy", "x".repeat(1000)) };
    // Nobody reads: rows pause after some 256 tokens, and keep what they hold.
    let streams: Vec<_> = (0..2).map(|_| h.engine.generate(row()).unwrap()).collect();
    until("both have come so far", || used(&h) >= WEIGHTS + 2 * 1250 * KV);
    assert!(used(&h) <= WEIGHTS + 2800 * KV, "{}", used(&h));
    for stream in streams {
        assert_eq!(block_on(stream.collect()).unwrap().token_ids.len(), 270);
    }
    assert_eq!(cached(&h, raw("heavy", kept)), 0, "it went");
    h.assert_at_rest();
}

#[test]
fn kept_prompts_stay_where_their_going_would_not_help() {
    let h = Harness::with(vec![heavy("heavy")], |options| options.budget_bytes = Some(WEIGHTS + 2000 * KV));
    let kept = "z".repeat(200);
    answer(&h.engine, raw("heavy", kept.clone())).unwrap();
    let row = || GenerateRequest { max_tokens: Some(40), prompt_cache: false, ..raw("heavy", "x".repeat(1000)) };
    let streams: Vec<_> = (0..2).map(|_| h.engine.generate(row()).unwrap()).collect();
    for stream in streams {
        assert_eq!(block_on(stream.collect()).unwrap().token_ids.len(), 40);
    }
    assert_eq!((h.device.widest_batch(), cached(&h, raw("heavy", kept))), (1, 199));
    h.assert_at_rest();
}

#[test]
fn rows_that_outgrow_the_budget_together_take_turns_and_say_all_the_same() {
    // Four rows begin within the budget; there is room for two of them as long as they become.
    let prompts = ["a", "b", "c", "d"].map(|letter| letter.repeat(200));
    let h = Harness::with(vec![heavy("heavy")], |options| {
        options.budget_bytes = Some(WEIGHTS + 1100 * KV);
        options.prompt_cache_bytes = 0;
    });
    h.device.hold(Point::Step);
    let streams: Vec<_> = prompts.iter().map(|prompt| h.engine.generate(raw("heavy", prompt.clone())).unwrap()).collect();
    let threads: Vec<_> = streams.into_iter().map(|stream| go(move || block_on(stream.collect()))).collect();
    let mut most = 0;
    until("all run together", || {
        if h.device.is_held(Point::Step) {
            h.device.pass(Point::Step);
        }
        h.device.widest_batch() == 4
    });
    h.device.release(Point::Step);
    until("all have ended", || {
        most = most.max(used(&h));
        threads.iter().all(std::thread::JoinHandle::is_finished)
    });
    for (thread, prompt) in threads.into_iter().zip(prompts) {
        let answer = thread.join().unwrap().unwrap();
        assert_eq!((answer.text, answer.summary.completion_tokens), (prompt, 200), "an echo, whole and once");
    }
    assert!(most > WEIGHTS + 800 * KV && most <= WEIGHTS + 1100 * KV, "{most}");
    h.come_to_rest();
    h.assert_at_rest();
}

#[test]
fn a_conversation_larger_than_the_budget_is_refused_before_anything_is_computed() {
    // Hazard A19.
    let h = harness(|options| options.budget_bytes = Some(WEIGHTS + 600 * KV));
    let error = answer(&h.engine, raw("heavy", "x".repeat(3000))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
    assert!(error.message().contains("3000"), "{error}");
    assert_eq!(h.device.count(Point::Prefill), 0);
    h.assert_at_rest();
    // Under it, but beyond what is beside the weights: it runs alone.
    let options = RequestOptions::default();
    let request = GenerateRequest { max_tokens: Some(3), options, ..raw("heavy", "x".repeat(700)) };
    assert_eq!(answer(&h.engine, request).unwrap().token_ids.len(), 3);
    h.come_to_rest();
}
