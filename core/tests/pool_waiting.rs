//! Hazard: no room. P40-P43, the three policies, FIFO fairness, oversize models, the physical limit; A5, A12, A27, A28, A42;
//! the first trap of section 9.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use hob::ErrorKind;
use hob::pool::{Admission, NoRoom};
use pool_support::*;

#[test]
fn section9_b_waits_for_the_end_of_a() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 60);
    let b = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    assert!(!b.is_done());
    assert_eq!(rig.keys(), ["chat:a", "chat:b"]);
    assert!(!lease.is_detached(), "nothing is evicted while it waits (P41)");
    drop(lease);
    b.done().unwrap();
    assert_eq!(rig.keys(), ["chat:b"]);
}

#[test]
fn p41_while_another_is_busy_nothing_is_evicted_in_vain() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("busy"), 60);
    rig.resident(&chat("idle"), 30);
    let big = rig.admit(Admission::new(chat("big"), 90));
    rig.run();
    assert!(!big.is_done());
    assert!(rig.pool.peek(&chat("idle")).is_some(), "even without it there would be no room");
}

#[test]
fn refuse_names_what_is_needed_free_and_held_and_the_knob() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("a"), 70);
    rig.resident(&embedder("p"), 10);
    rig.pool.pin(&embedder("p"));
    let error = rig.admit(Admission::new(chat("b"), 60).no_room(NoRoom::Refuse)).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
    let text = error.message();
    for part in [
        "chat:b needs 60 bytes",
        "20 of the budget of 100 bytes are free",
        "chat:a (70 bytes, in use)",
        "embedder:p (10 bytes, pinned)",
        "no_room = wait",
    ] {
        assert!(text.contains(part), "{part:?} is missing in {text:?}");
    }
    assert!(!text.contains('\n'));
    assert_eq!(rig.status().counters.refusals, 1);
}

#[test]
fn refuse_evicts_what_is_idle_and_waits_for_releases_under_way_but_not_for_leases() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 60);
    rig.admit(Admission::new(chat("b"), 60).no_room(NoRoom::Refuse)).done().unwrap();
    let gate = rig.gate_release(&chat("b"));
    let pool = rig.pool.clone();
    let evict = rig.exec.start(async move { pool.evict(&chat("b"), false).await });
    let c = rig.admit(Admission::new(chat("c"), 60).no_room(NoRoom::Refuse));
    rig.run();
    assert!(!c.is_done(), "the bytes are on their way back");
    gate.open();
    evict.done().unwrap();
    let _lease = c.done().unwrap();
    let _lease = rig.pool.begin_use(&chat("c")).unwrap();
    assert!(rig.admit(Admission::new(chat("d"), 60).no_room(NoRoom::Refuse)).done().is_err());
}

#[test]
fn load_anyway_evicts_what_is_idle_and_loads_over_the_budget() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("busy"), 60);
    rig.resident(&chat("idle"), 30);
    rig.admit(Admission::new(chat("new"), 60).no_room(NoRoom::LoadAnyway)).done().unwrap();
    assert_eq!(rig.keys(), ["chat:busy", "chat:new"]);
    assert_eq!(rig.status().used_bytes, 120);
    assert_eq!(rig.status().free_bytes, 0);
}

#[test]
fn an_oversize_model_is_served_alone() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 50);
    let lease = rig.leased(&chat("b"), 50);
    let big = rig.admit(Admission::new(chat("big"), 150).in_use());
    rig.run();
    assert!(!big.is_done(), "b is busy");
    drop(lease);
    let lease = big.done().unwrap().lease.unwrap();
    assert_eq!(rig.keys(), ["chat:big"]);
    let other = rig.admit(Admission::new(chat("c"), 1));
    rig.run();
    assert!(!other.is_done(), "alone means alone");
    drop(lease);
    other.done().unwrap();
    assert_eq!(rig.keys(), ["chat:c"]);
}

#[test]
fn p41_when_only_pinned_models_are_left_it_is_served_beside_them() {
    let rig = Rig::new(100);
    rig.admit(Admission::new(chat("pinned"), 60).pinned()).done().unwrap();
    rig.resident(&chat("idle"), 40);
    rig.admit(Admission::new(chat("new"), 60)).done().unwrap();
    assert_eq!(rig.keys(), ["chat:new", "chat:pinned"]);
}

#[test]
fn a_waiter_goes_on_when_what_it_waited_for_is_pinned_under_it() {
    // Nothing unpinned is left to wait for: waiting on would be for ever.
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("a"), 60);
    let waiting = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    assert!(!waiting.is_done());
    rig.pool.pin(&chat("a"));
    waiting.done().unwrap();
}

#[test]
fn a19_above_the_physical_limit_every_policy_refuses_before_anything_happens() {
    let rig = Rig::with(100, |options| options.physical_limit_bytes = Some(120));
    rig.resident(&chat("a"), 50);
    rig.log();
    for policy in [NoRoom::Wait, NoRoom::Refuse, NoRoom::LoadAnyway] {
        let error = rig.admit(Admission::new(chat("b"), 121).no_room(policy)).done().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
        assert!(
            error.message().contains("121 bytes")
                && error.message().contains("limit of 120 bytes")
                && error.message().contains("physical_limit_bytes")
        );
    }
    assert!(rig.log().is_empty());
    assert!(rig.pool.peek(&chat("a")).is_some());
    // Over it together with what cannot leave.
    let _lease = rig.leased(&chat("c"), 50);
    let error = rig.admit(Admission::new(chat("b"), 80).no_room(NoRoom::LoadAnyway)).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
    rig.pool.pin(&chat("c"));
    assert!(rig.admit(Admission::new(chat("b"), 80)).done().is_err(), "alone beside a pinned one is over the limit too");
}

#[test]
fn fifo_small_requests_cannot_starve_a_big_waiter() {
    let rig = Rig::new(100);
    let mut leases = vec![rig.leased(&chat("x"), 50)];
    let big = rig.admit(Admission::new(chat("big"), 90).in_use());
    rig.run();
    // Room for the small ones is there, but it belongs to the one who came first.
    let small: Vec<_> = (0..5).map(|index| rig.admit(Admission::new(embedder(&index.to_string()), 5).in_use())).collect();
    rig.run();
    assert!(!big.is_done() && small.iter().all(|caller| !caller.is_done()));
    assert_eq!(rig.status().waiting, 6);
    let refused = rig.admit(Admission::new(chat("impatient"), 5).no_room(NoRoom::Refuse)).done().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::BudgetExceeded, "and does not belong to those who refuse to wait");
    leases.clear();
    leases.push(big.done().unwrap().lease.unwrap());
    let done: Vec<bool> = small.iter().map(Pending::is_done).collect();
    assert_eq!(done, [true, true, false, false, false], "in order, as far as there is room");
    leases.clear();
    for caller in small {
        caller.done().unwrap();
    }
}

#[test]
fn waiters_are_served_in_the_order_they_came() {
    let rig = Rig::new(10);
    let lease = rig.leased(&chat("first"), 10);
    let callers: Vec<_> = (0..50).map(|index| rig.admit(Admission::new(chat(&format!("{index:02}")), 10))).collect();
    rig.run();
    rig.log();
    drop(lease);
    for caller in callers {
        caller.done().unwrap();
    }
    let loads: Vec<String> = rig.log().into_iter().filter(|line| line.starts_with("load ")).collect();
    assert!(loads.is_sorted() && loads.len() == 50);
}

#[test]
fn a_waiter_that_leaves_lets_the_next_one_go_on() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("a"), 50);
    let big = rig.admit(Admission::new(chat("big"), 90));
    let small = rig.admit(Admission::new(chat("small"), 10));
    rig.run();
    assert!(!small.is_done());
    big.leave();
    small.done().unwrap();
    assert_eq!(rig.status().waiting, 0);
}

#[test]
fn a_larger_budget_an_unpin_and_a_smaller_charge_each_wake_the_line() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("a"), 60);
    let waiting = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    rig.pool.set_budget(120).unwrap();
    waiting.done().unwrap();
    let mut charge = rig.pool.charge_external(60);
    let waiting = rig.admit(Admission::new(chat("c"), 30));
    rig.run();
    assert!(!waiting.is_done());
    charge.set(30);
    waiting.done().unwrap();
    assert_eq!(rig.keys(), ["chat:a", "chat:c"]);
    rig.pool.pin(&chat("c"));
    let waiting = rig.admit(Admission::new(chat("d"), 30));
    rig.run();
    assert!(!waiting.is_done());
    rig.pool.unpin(&chat("c"));
    waiting.done().unwrap();
}

#[test]
fn the_line_is_bounded() {
    let rig = Rig::with(10, |options| options.max_waiting = 2);
    let _lease = rig.leased(&chat("a"), 10);
    let one = rig.admit(Admission::new(chat("b"), 10));
    let two = rig.admit(Admission::new(chat("c"), 10));
    rig.run();
    let error = rig.admit(Admission::new(chat("d"), 10)).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.message().contains("max_waiting"));
    drop((one, two));
}

#[test]
fn a28_room_for_one_three_models_many_rounds() {
    let rig = Rig::new(10);
    for round in 0..20 {
        let callers: Vec<_> = ["a", "b", "c"].map(|id| rig.admit(Admission::new(chat(id), 10).in_use())).into_iter().collect();
        for caller in callers {
            drop(caller.done().unwrap().lease.unwrap());
        }
        assert_eq!(rig.status().waiting, 0, "round {round}");
    }
}

#[test]
fn a27_interleaved_requests_on_two_models_do_not_thrash() {
    // Those who wait for a key join one load, so twenty requests cost few loads.
    let rig = Rig::new(10);
    let lease = rig.leased(&chat("a"), 10);
    let callers: Vec<_> =
        (0..20).map(|index| rig.admit(Admission::new(if index % 2 == 0 { chat("a") } else { chat("b") }, 10).in_use())).collect();
    rig.run();
    drop(lease);
    let mut open = callers;
    for _ in 0..20 {
        let (done, rest): (Vec<_>, Vec<_>) = open.into_iter().partition(Pending::is_done);
        open = rest;
        drop(done);
        rig.run();
    }
    assert!(open.is_empty());
    assert_eq!(rig.status().counters.loads, 2);
}

#[test]
fn a12_twenty_requests_while_it_loads_ten_leave() {
    let rig = Rig::new(10);
    let (gate, first) = rig.admit_gated(Admission::new(chat("a"), 10).in_use(), true);
    let mut callers: Vec<_> = (0..20).map(|_| rig.admit(Admission::new(chat("a"), 10).in_use())).collect();
    rig.run();
    for caller in callers.drain(..10) {
        caller.leave();
    }
    first.leave();
    rig.run();
    gate.open();
    let leases: Vec<_> = callers.into_iter().map(|caller| caller.done().unwrap().lease.unwrap()).collect();
    assert_eq!(leases.len(), 10);
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 10);
    drop(leases);
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 0);
    assert_eq!(rig.status().counters.left, 11);
}

#[test]
fn a42_every_admission_obeys_the_one_budget() {
    let rig = Rig::new(30);
    for index in 0..10 {
        rig.resident(&chat(&index.to_string()), 10);
    }
    assert_eq!(rig.status().entries.len(), 3);
    assert!(rig.status().peak_used_bytes <= 30);
}
