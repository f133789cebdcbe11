//! Hazard: cancel and deadline. P43, D8, invariant 8; the cancellation trap of section 9: use marks balanced, line empty.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use hob::pool::Admission;
use hob::{CancelToken, ErrorKind};
use pool_support::*;

#[test]
fn cancelled_before_it_starts_nothing_happens() {
    let rig = Rig::new(100);
    let token = CancelToken::new();
    token.cancel();
    rig.resident(&chat("a"), 10);
    for id in ["a", "b"] {
        let error = rig.admit(Admission::new(chat(id), 10).in_use().cancel(token.clone())).done().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert!(error.message().contains(id));
    }
    assert_eq!(rig.status().counters.hits, 0);
    assert_eq!(rig.keys(), ["chat:a"]);
}

#[test]
fn cancelled_in_line_the_waiter_leaves_nothing() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("a"), 60);
    let token = CancelToken::new();
    let waiting = rig.admit(Admission::new(chat("b"), 60).cancel(token.clone()));
    rig.run();
    assert!(token.cancel());
    assert_eq!(waiting.done().unwrap_err().kind(), ErrorKind::Cancelled);
    let status = rig.status();
    assert_eq!((status.waiting, status.entries.len()), (0, 1));
    rig.check();
}

#[test]
fn a_deadline_is_a_timeout_and_says_how_long_and_for_what() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 60);
    let waiting = rig.admit(Admission::new(chat("b"), 60).deadline(rig.now() + secs(5)));
    rig.run();
    rig.advance(secs(4));
    assert!(!waiting.is_done());
    rig.advance(secs(1));
    let error = waiting.done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.message().contains("5.000 s") && error.message().contains("chat:b"));
    assert_eq!(rig.status().waiting, 0);
    // One that has passed already, and one of the token.
    let late = rig.admit(Admission::new(chat("b"), 60).deadline(rig.now()));
    assert_eq!(late.done().unwrap_err().kind(), ErrorKind::Timeout);
    let token = CancelToken::new().with_deadline_on(std::sync::Arc::new(rig.clock.clone()), rig.now() + secs(3));
    let waiting = rig.admit(Admission::new(chat("b"), 60).cancel(token));
    rig.run();
    rig.advance(secs(3));
    assert_eq!(waiting.done().unwrap_err().kind(), ErrorKind::Timeout);
    drop(lease);
    rig.run();
    assert_eq!(rig.clock.sleepers(), 1, "only the idle timer is left");
}

#[test]
fn a_joiner_leaves_without_ending_the_shared_load_and_the_last_one_ends_it() {
    let rig = Rig::new(100);
    let (_gate, first) = rig.admit_gated(Admission::new(chat("a"), 60).in_use(), true);
    let token = CancelToken::new();
    let joined = rig.admit(Admission::new(chat("a"), 60).in_use().cancel(token.clone()));
    rig.run();
    first.leave();
    rig.run();
    assert!(!joined.is_done());
    assert_eq!(rig.status().pending_bytes, 60);
    token.cancel();
    // Answered at once, before the load has noticed.
    assert_eq!(joined.done().unwrap_err().kind(), ErrorKind::Cancelled);
    let status = rig.status();
    assert_eq!((status.used_bytes, status.counters.failed_loads, status.counters.left), (0, 1, 2));
    assert_eq!(rig.held(), 0);
}

#[test]
fn a_load_that_ignores_its_token_keeps_its_bytes_until_it_ends_and_is_then_let_go() {
    let rig = Rig::new(100);
    let (gate, caller) = rig.admit_gated(Admission::new(chat("a"), 60).in_use(), false);
    rig.run();
    caller.leave();
    rig.run();
    let status = rig.status();
    assert_eq!((status.pending_bytes, status.entries.len()), (60, 1), "they are really held");
    let next = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    assert!(!next.is_done());
    gate.open();
    next.done().unwrap();
    assert_eq!(rig.keys(), ["chat:b"]);
    assert_eq!(rig.table.lock().unwrap().len(), 1);
    assert_eq!(rig.memory.lock().unwrap().peak, 60);
}

#[test]
fn leaving_while_the_victims_are_released_still_releases_all_of_them() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 50);
    rig.resident(&chat("b"), 50);
    let gate = rig.gate_release(&chat("a"));
    let caller = rig.admit(Admission::new(chat("c"), 100));
    rig.run();
    caller.leave();
    gate.open();
    rig.run();
    assert!(rig.keys().is_empty() && rig.table.lock().unwrap().is_empty());
    assert!(!rig.log().contains(&"load chat:c".to_owned()));
}

#[test]
fn d8_an_answer_that_nobody_takes_gives_its_lease_back() {
    let rig = Rig::new(100);
    let caller = rig.admit(Admission::new(chat("a"), 10).in_use());
    rig.run();
    // Answered with a lease inside; dropped unread.
    drop(caller);
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 0);
    let (gate, first) = rig.admit_gated(Admission::new(chat("b"), 10).in_use(), true);
    let token = CancelToken::new();
    let second = rig.admit(Admission::new(chat("b"), 10).in_use().cancel(token.clone()));
    rig.run();
    gate.open();
    // The load ends and the caller is cancelled before it looks: cancelled wins, the model stays, the use is balanced.
    while !rig.log().contains(&"loaded chat:b".to_owned()) {
        assert!(rig.exec.step());
    }
    token.cancel();
    assert!(second.done().is_err());
    drop(first.done().unwrap().lease);
    assert_eq!(rig.status().entry(&chat("b")).unwrap().uses, 0);
}

#[test]
fn dropping_an_admission_after_any_number_of_steps_leaves_no_trace() {
    // Every await of the caller's future, with a victim to release, a line to stand in and a load to wait for.
    for steps in 0..40 {
        let rig = Rig::new(100);
        rig.resident(&chat("victim"), 50);
        let lease = rig.leased(&chat("busy"), 50);
        let caller = rig.admit(Admission::new(chat("a"), 90).in_use());
        for _ in 0..steps / 2 {
            rig.exec.step();
        }
        drop(lease);
        for _ in 0..steps - steps / 2 {
            rig.exec.step();
        }
        drop(caller);
        rig.run();
        let status = rig.status();
        assert!(status.entries.iter().all(|entry| entry.uses == 0), "after {steps} steps");
        assert_eq!((status.pending_bytes, status.releasing_bytes, status.waiting), (0, 0, 0));
        assert_eq!(rig.memory.lock().unwrap().active, status.resident_bytes);
    }
}

/// An estimate that nobody waits for any more is let go of; one that somebody still waits for is not.
#[test]
fn an_estimate_ends_with_the_last_who_waits_for_it() {
    struct Held(std::sync::Arc<()>);
    let (rig, alive) = (Rig::new(100), std::sync::Arc::new(()));
    let (first, second) = (CancelToken::new(), CancelToken::new());
    let held = Held(alive.clone());
    let hangs = Admission::estimated(chat("a"), move || {
        Box::pin(async move {
            std::future::pending::<()>().await;
            drop(held.0);
            Ok(1)
        })
    });
    let one = rig.admit(hangs.cancel(first.clone()));
    rig.run();
    let two = rig.admit(Admission::new(chat("a"), 10).cancel(second.clone()));
    rig.run();
    first.cancel();
    assert_eq!(one.done().unwrap_err().kind(), ErrorKind::Cancelled);
    rig.run();
    assert_eq!(std::sync::Arc::strong_count(&alive), 2, "the second one joined it");
    second.cancel();
    assert_eq!(two.done().unwrap_err().kind(), ErrorKind::Cancelled);
    rig.run();
    assert_eq!(std::sync::Arc::strong_count(&alive), 1);
    assert!(rig.status().entries.is_empty());
    rig.check();
}
