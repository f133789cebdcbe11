//! Cancels and deadlines in every phase (invariants 7 and 8), abort and stop (hazard D3).

use hob::engine::{Event, Finish, GenerateRequest, OnCancel, RequestOptions, Stream};
use hob::fake::{FakeModel, Point};
use hob::model::ModelKind;
use hob::{CancelToken, ErrorKind, block_on};
use std::time::Duration;

use crate::support::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Another generation has the only row.
    Queued,
    /// No room for its model.
    Room,
    Load,
    Prefill,
    Decode,
}

const PHASES: [Phase; 5] = [Phase::Queued, Phase::Room, Phase::Load, Phase::Prefill, Phase::Decode];

impl Phase {
    /// Where the device is held.
    fn point(self) -> Point {
        match self {
            Self::Load => Point::LoadStep,
            Self::Prefill => Point::Prefill,
            Self::Queued | Self::Room | Self::Decode => Point::Step,
        }
    }
}

/// A request that is in the phase, the device held there, and what keeps it there.
fn reach(phase: Phase, options: RequestOptions) -> (Harness, Stream, Option<Stream>) {
    let h = Harness::with(models(), |options| {
        options.capacity = 1;
        if phase == Phase::Room {
            options.budget_bytes = Some(150 * MB);
        }
    });
    let request = |model: &str| GenerateRequest { options: options.clone(), ..raw(model, "x".repeat(1500)) };
    let mut before = None;
    if matches!(phase, Phase::Queued | Phase::Room) {
        h.device.hold(Point::Step);
        before = Some(h.engine.generate(ask("long")).unwrap());
        h.device.wait_until_held(Point::Step);
    } else {
        h.device.hold(phase.point());
    }
    let model = match phase {
        Phase::Queued => "long",
        Phase::Room => "echo",
        _ => "chat",
    };
    let stream = h.engine.generate(request(model)).unwrap();
    match phase {
        Phase::Queued => until("the request has its model", || h.uses() == 2),
        Phase::Room => until("the request waits", || h.engine.pool().status().waiting == 1),
        Phase::Load | Phase::Prefill | Phase::Decode => h.device.wait_until_held(phase.point()),
    }
    (h, stream, before)
}

fn expect_end(phase: Phase, stream: Stream, stop: bool, error: ErrorKind, finish: Finish) {
    let result = block_on(stream.collect());
    if !stop {
        assert_eq!(kind(result), error, "{phase:?}");
        return;
    }
    let answer = result.unwrap_or_else(|error| panic!("{phase:?}: {error}"));
    assert_eq!(answer.summary.finish, finish, "{phase:?}");
    // The partial text: one token from the prompt, and perhaps that of the step under way.
    let expected: &[&str] = if phase == Phase::Decode { &["H", "He"] } else { &[""] };
    assert!(expected.contains(&answer.text.as_str()), "{phase:?}: {:?}", answer.text);
    if phase == Phase::Decode {
        assert_eq!(answer.summary.prompt_tokens, 1500);
    }
    assert_eq!(answer.summary.completion_tokens, answer.token_ids.len(), "{phase:?}");
}

#[test]
fn a_cancel_takes_one_unit_of_work_at_most_in_every_phase() {
    for phase in PHASES {
        for stop in [false, true] {
            let token = CancelToken::new();
            let on_cancel = if stop { OnCancel::Stop } else { OnCancel::Abort };
            let (h, stream, before) = reach(phase, RequestOptions { on_cancel, ..cancelled_by(&token) });
            let (prefills, steps) = (h.device.count(Point::Prefill), h.device.count(Point::Step));
            token.cancel();
            let end = go(move || expect_end(phase, stream, stop, ErrorKind::Cancelled, Finish::Cancelled));
            // Waiting for room and for a load ends at once; what the device is at, it ends.
            until("the cancelled request ends", || {
                if matches!(phase, Phase::Queued | Phase::Prefill | Phase::Decode) && h.device.is_held(phase.point()) {
                    h.device.pass(phase.point());
                }
                end.is_finished()
            });
            end.join().unwrap();
            if phase == Phase::Prefill {
                assert_eq!(h.device.count(Point::Prefill), prefills, "no further chunk of 1,500 tokens");
            }
            if phase == Phase::Decode {
                assert_eq!(h.device.count(Point::Step), steps, "no further step");
                h.assert_at_rest();
            }
            goes_on(&h, phase, before);
        }
    }
}

/// The device comes back: who was before the ended request is served whole, and nothing of the ended one is left.
#[track_caller]
fn goes_on(h: &Harness, phase: Phase, before: Option<Stream>) {
    h.device.release(phase.point());
    if let Some(before) = before {
        assert_eq!(block_on(before.collect()).unwrap().text, long_text(), "{phase:?}");
    }
    h.come_to_rest();
    h.still_serves();
}

#[test]
fn a_timeout_resolves_the_caller_in_every_phase_although_the_device_hangs() {
    // Spec C4: the caller never waits for the device.
    for phase in PHASES {
        for stop in [false, true] {
            let on_cancel = if stop { OnCancel::Stop } else { OnCancel::Abort };
            let (h, stream, before) = reach(phase, RequestOptions { on_cancel, ..timeout(10) });
            let end = go(move || expect_end(phase, stream, stop, ErrorKind::Timeout, Finish::Timeout));
            h.run_until(Duration::from_millis(10_200), || end.is_finished());
            end.join().unwrap();
            goes_on(&h, phase, before);
        }
    }
}

#[test]
fn batches_and_scorings_end_with_their_cancel_and_compute_no_more() {
    for (verb, point) in [
        (Verb::Embed, Point::Embed),
        (Verb::Rerank, Point::Rerank),
        (Verb::Score, Point::Score),
        (Verb::Decide, Point::Score),
        (Verb::Load, Point::LoadStep),
    ] {
        let h = Harness::new();
        let token = CancelToken::new();
        h.device.hold(point);
        let (engine, options) = (h.engine.clone(), cancelled_by(&token));
        let caller = go(move || kind(call(&engine, verb, options)));
        h.device.wait_until_held(point);
        token.cancel();
        if verb != Verb::Load {
            h.device.pass(point);
        }
        assert_eq!(caller.join().unwrap(), ErrorKind::Cancelled, "{verb:?}");
        assert_eq!(h.device.count(point), 1, "{verb:?}: no further unit");
        h.device.release(point);
        h.come_to_rest();
        // The same with a deadline, and a device that does not move at all.
        h.device.hold(point);
        let engine = h.engine.clone();
        let caller = go(move || kind(call(&engine, verb, timeout(10))));
        h.device.wait_until_held(point);
        h.run_until(Duration::from_millis(10_200), || caller.is_finished());
        assert_eq!(caller.join().unwrap(), ErrorKind::Timeout, "{verb:?}");
        h.device.release(point);
        h.come_to_rest();
        h.still_serves();
    }
}

#[test]
fn stop_gives_the_text_so_far_and_what_a_stop_string_had_held_back() {
    let reply = "abcENx".to_owned();
    let h = Harness::with(vec![FakeModel { reply, ..FakeModel::new("chat", ModelKind::Chat, MB) }], |_| ());
    h.device.hold(Point::Step);
    let mut stream = h.engine.generate(GenerateRequest { stop: vec!["END".into()], ..ask("chat") }).unwrap();
    let mut seen = Seen::default();
    for tokens in 1..=5 {
        h.device.wait_until_held(Point::Step);
        until("the token is there", || {
            drain(&mut stream, &mut seen);
            seen.tokens == tokens
        });
        if tokens < 5 {
            h.device.pass(Point::Step);
        }
    }
    assert_eq!(seen.text, "abc", "EN may become END");
    stream.stop();
    h.device.pass(Point::Step);
    let rest = block_on(stream.collect()).unwrap();
    // The step under way may still bring its token.
    assert_eq!(rest.summary.finish, Finish::Cancelled);
    assert!(rest.text == "EN" || rest.text == "ENx", "{:?}", rest.text);
    assert_eq!(rest.summary.completion_tokens, 5 + rest.token_ids.len());
    h.assert_at_rest();
}

#[test]
fn a_cancel_that_races_the_last_token_wins() {
    // Spec C6.
    for stop in [false, true] {
        let h = Harness::new();
        h.device.hold(Point::Step);
        let token = CancelToken::new();
        let on_cancel = if stop { OnCancel::Stop } else { OnCancel::Abort };
        let options = RequestOptions { on_cancel, ..cancelled_by(&token) };
        let mut stream = h.engine.generate(GenerateRequest { options, max_tokens: Some(2), ..ask("chat") }).unwrap();
        assert!(matches!(block_on(stream.next()), Some(Ok(Event::Chunk(_)))));
        h.device.wait_until_held(Point::Step);
        token.cancel();
        h.device.pass(Point::Step);
        let result = block_on(stream.collect());
        if stop {
            assert_eq!(result.unwrap().text, "e", "what there is");
        } else {
            assert_eq!(kind(result), ErrorKind::Cancelled);
        }
        h.assert_at_rest();
    }
}

#[test]
fn a_child_token_ends_its_own_request_and_its_parent_ends_all() {
    let h = Harness::new();
    let parent = CancelToken::new();
    let children = [parent.child(), parent.child(), parent.child()];
    let mut streams: Vec<_> = children
        .iter()
        .map(|child| h.engine.generate(GenerateRequest { options: cancelled_by(child), ..ask("long") }).unwrap())
        .collect();
    // All three run, and pause when nobody reads on.
    for stream in &mut streams {
        assert!(matches!(block_on(stream.next()), Some(Ok(Event::Chunk(_)))));
    }
    children[1].cancel();
    assert_eq!(kind(block_on(streams.remove(1).collect())), ErrorKind::Cancelled);
    assert_eq!(h.engine.requests(), 2);
    parent.cancel();
    for stream in streams {
        assert_eq!(kind(block_on(stream.collect())), ErrorKind::Cancelled);
    }
    h.assert_at_rest();
}

#[test]
fn a_cancel_is_noticed_while_another_model_loads() {
    // The device is busy with one load for a long time; between its parts it looks at the requests, the new ones too.
    let h = Harness::new();
    answer(&h.engine, ask("chat")).unwrap();
    h.device.hold(Point::LoadStep);
    let engine = h.engine.clone();
    let load = go(move || block_on(engine.load("slow", RequestOptions::default())));
    h.device.wait_until_held(Point::LoadStep);
    let token = CancelToken::new();
    let stream = h.engine.generate(GenerateRequest { options: cancelled_by(&token), ..ask("chat") }).unwrap();
    until("the request has its model", || h.uses() >= 1);
    token.cancel();
    let end = go(move || kind(block_on(stream.collect())));
    until("the cancel is noticed", || {
        if h.device.is_held(Point::LoadStep) {
            h.device.pass(Point::LoadStep);
        }
        end.is_finished()
    });
    assert_eq!(end.join().unwrap(), ErrorKind::Cancelled);
    assert!(!load.is_finished(), "long before the load is through");
    h.device.release(Point::LoadStep);
    load.join().unwrap().unwrap();
    h.come_to_rest();
}

#[test]
fn dropping_a_stream_frees_the_device_within_a_step() {
    // Hazards D1, D4.
    let h = Harness::new();
    h.device.hold(Point::Step);
    let mut stream = h.engine.generate(ask("long")).unwrap();
    assert!(matches!(block_on(stream.next()), Some(Ok(Event::Chunk(_)))));
    h.device.wait_until_held(Point::Step);
    drop(stream);
    h.device.pass(Point::Step);
    until("its place is free", || h.engine.requests() == 0);
    assert_eq!((h.device.count(Point::Step), h.uses()), (1, 0));
    h.device.release(Point::Step);
    h.still_serves();
}
