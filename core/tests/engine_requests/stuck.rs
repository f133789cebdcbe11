//! A device that does not come back: quarantine (spec C5 to C8) and the bounded close (M11).

use std::time::Duration;

use hob::engine::{Availability, Closed, GenerateRequest, RequestOptions};
use hob::fake::Point;
use hob::{ErrorKind, block_on};

use crate::support::*;

const STUCK_AFTER: Duration = Duration::from_secs(5);

#[test]
fn a_device_that_hangs_past_a_deadline_is_quarantined_until_it_returns() {
    let h = Harness::with(models(), |options| options.stuck_after = STUCK_AFTER);
    h.device.hold(Point::Step);
    until("the engine is open", || h.engine.availability() == Availability::Ready);
    let mut late = h.engine.generate(GenerateRequest { options: timeout(10), ..ask("long") }).unwrap();
    h.device.wait_until_held(Point::Step);
    assert_eq!(h.engine.availability(), Availability::Working);
    // These wait for the device, and have no deadline of their own.
    let queued = h.engine.generate(ask("long")).unwrap();
    let loading = h.engine.generate(ask("other")).unwrap();
    let engine = h.engine.clone();
    let embedding = go(move || kind(call(&engine, Verb::Embed, RequestOptions::default())));
    until("they are taken on", || h.engine.requests() == 4);

    h.run_until(Duration::from_millis(15_200), || h.engine.availability() == Availability::Quarantined);
    let mut seen = Seen::default();
    until("the late one has heard", || {
        drain(&mut late, &mut seen);
        seen.end.is_some()
    });
    assert_eq!(seen.end.as_ref().unwrap().as_ref().unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(kind(block_on(queued.collect())), ErrorKind::Busy);
    assert_eq!(kind(block_on(loading.collect())), ErrorKind::Busy);
    assert_eq!(embedding.join().unwrap(), ErrorKind::Busy);
    let error = h.engine.generate(ask("chat")).unwrap_err();
    assert!(error.kind() == ErrorKind::Busy && error.message().contains("quarantined"), "{error}");
    for verb in VERBS {
        assert_eq!(kind(call(&h.engine, verb, RequestOptions::default())), ErrorKind::Busy, "{verb:?}");
    }
    // Invariant 10: looking never waits.
    assert!(!h.engine.pool().status().entries.is_empty());
    assert_eq!(h.device.count(Point::Step), 1, "nothing else was begun on the device");

    h.device.release(Point::Step);
    h.come_to_rest();
    assert_eq!(h.device.count(Point::Step), 1, "nobody waits for more");
    let text = seen.text.clone();
    drain(&mut late, &mut seen);
    assert_eq!(seen.text, text, "late output is discarded");
    h.still_serves();
}

#[test]
fn a_device_that_hangs_while_another_suspicion_is_looked_into_is_found_too() {
    let h = Harness::with(models(), |options| options.stuck_after = STUCK_AFTER);
    h.device.hold(Point::Step);
    let first = h.engine.generate(GenerateRequest { options: timeout(10), ..ask("long") }).unwrap();
    h.device.wait_until_held(Point::Step);
    let second = h.engine.generate(GenerateRequest { options: timeout(12), ..ask("long") }).unwrap();
    until("both have the model", || h.uses() == 2);
    let first = go(move || kind(block_on(first.collect())));
    h.run_until(Duration::from_millis(10_200), || first.is_finished());
    assert_eq!(first.join().unwrap(), ErrorKind::Timeout);
    // The device comes back within the bound, and hangs with the second request.
    h.device.pass(Point::Step);
    h.device.wait_until_held(Point::Step);
    let second = go(move || kind(block_on(second.collect())));
    h.run_until(Duration::from_millis(12_200), || second.is_finished());
    assert_eq!(second.join().unwrap(), ErrorKind::Timeout);
    h.run_until(Duration::from_millis(12_200) + 2 * STUCK_AFTER, || h.engine.availability() == Availability::Quarantined);
    h.device.release(Point::Step);
    h.come_to_rest();
    h.still_serves();
}

#[test]
fn a_cancel_without_a_deadline_finds_a_hung_device_after_the_bound() {
    let h = Harness::with(models(), |options| options.stuck_after = STUCK_AFTER);
    h.device.hold(Point::Prefill);
    let stream = h.engine.generate(ask("chat")).unwrap();
    h.device.wait_until_held(Point::Prefill);
    stream.cancel();
    let end = go(move || kind(block_on(stream.collect())));
    // Nothing presses its caller, but it is not kept for ever.
    h.run_until(Duration::from_millis(5_100), || end.is_finished());
    assert_eq!(end.join().unwrap(), ErrorKind::Cancelled);
    h.run_until(Duration::from_millis(10_200), || h.engine.availability() == Availability::Quarantined);
    h.device.release(Point::Prefill);
    h.come_to_rest();
    h.still_serves();
}

#[test]
fn a_long_load_that_moves_is_not_a_hang() {
    let h = Harness::with(models(), |options| options.stuck_after = STUCK_AFTER);
    h.device.hold(Point::LoadStep);
    let patient = h.engine.generate(ask("chat")).unwrap();
    h.device.wait_until_held(Point::LoadStep);
    let hasty = h.engine.generate(GenerateRequest { options: timeout(10), ..ask("chat") }).unwrap();
    let hasty = go(move || kind(block_on(hasty.collect())));
    h.run_until(Duration::from_millis(10_200), || hasty.is_finished());
    assert_eq!(hasty.join().unwrap(), ErrorKind::Timeout);
    for _ in 0..3 {
        // A part of the load in each half of the bound.
        h.device.pass(Point::LoadStep);
        h.device.wait_until_held(Point::LoadStep);
        h.clock.advance(STUCK_AFTER / 2);
    }
    assert_eq!(h.engine.availability(), Availability::Working);
    h.device.release(Point::LoadStep);
    assert_eq!(block_on(patient.collect()).unwrap().text, "Hello!");
    h.come_to_rest();
}

#[test]
fn a_close_returns_at_its_bound_and_the_rest_follows_when_the_device_returns() {
    let h = Harness::new();
    h.device.hold(Point::Step);
    let stream = h.engine.generate(ask("long")).unwrap();
    h.device.wait_until_held(Point::Step);
    let engine = h.engine.clone();
    let closing = go(move || block_on(engine.close()).unwrap());
    until("its bound is set", || h.engine.availability() == Availability::Closed && h.clock.sleepers() > 0);
    let waiting = go(move || kind(block_on(stream.collect())));
    // Timers are set a little after each other, by several threads.
    h.run_until(Duration::from_secs(140), || closing.is_finished() && waiting.is_finished());
    assert_eq!(closing.join().unwrap(), Closed { stopped: false });
    assert_eq!(h.engine.availability(), Availability::Closed);
    assert_eq!(h.engine.generate(ask("chat")).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(waiting.join().unwrap(), ErrorKind::Closed, "its caller is not kept waiting either");
    assert!(h.device.memory().active > 0, "nothing goes under running work");
    let engine = h.engine.clone();
    let rest = go(move || block_on(engine.close_and_wait()));
    assert!(!rest.is_finished());
    h.device.release(Point::Step);
    rest.join().unwrap().unwrap();
    assert_eq!(h.engine.pool().status().used_bytes, 0);
    assert_eq!((h.device.memory().active, h.device.memory().cache), (0, 0), "released before it returned");
    assert_eq!(block_on(h.engine.close()).unwrap(), Closed { stopped: true });
    assert_eq!(h.engine.requests(), 0);
}
