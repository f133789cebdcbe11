//! Hazard: admission. Spec 1.3, P1-P13, the 14 pool cases of 1.13, and the traps of section 9 that speak of admissions.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use std::sync::{Arc, Weak};

use hob::pool::{Admission, EntryState, IdlePolicy, Key, Loaded, NoRoom, Origin, Token, UnloadReason, Verdict};
use hob::{BoxFuture, ErrorKind, Result};
use pool_support::*;

#[test]
fn p1_one_account_for_all_kinds() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 30);
    rig.resident(&embedder("b"), 20);
    rig.resident(&reranker("c"), 10);
    rig.resident(&Key::other("onnx", "d"), 5);
    let status = rig.status();
    assert_eq!((status.resident_bytes, status.used_bytes, status.free_bytes), (65, 65, 35));
    assert_eq!(rig.keys(), ["chat:a", "embedder:b", "reranker:c", "onnx:d"]);
}

#[test]
fn p2_the_same_id_of_two_kinds_is_two_entries() {
    let rig = Rig::new(100);
    let (one, two) = (rig.resident(&chat("m"), 10), rig.resident(&reranker("m"), 20));
    assert_ne!(one, two);
    assert_eq!(rig.status().resident_bytes, 30);
    assert_eq!(rig.pool.forget(&chat("m")), Some(10));
    assert_eq!(rig.pool.peek(&reranker("m")), Some(two));
}

#[test]
fn case1_a10_the_victims_release_and_drain_precede_the_new_load() {
    let rig = Rig::new(100);
    rig.resident(&embedder("old"), 60);
    rig.log();
    rig.resident(&reranker("new"), 60);
    assert_eq!(rig.log(), ["release embedder:old", "released embedder:old", "drain", "load reranker:new", "loaded reranker:new"]);
    assert_eq!(rig.memory.lock().unwrap().peak, 60, "the two were never held at once (P38)");
}

#[test]
fn case2_what_a_release_captured_is_freed_before_the_next_load_is_called() {
    let rig = Rig::new(100);
    let captured = Arc::new(());
    let weak: Weak<()> = Arc::downgrade(&captured);
    let release = move |_token: Token| -> BoxFuture<'static, Result<()>> {
        let inside = captured.clone();
        Box::pin(async move {
            let _held = inside;
            Ok(())
        })
    };
    let admitted = rig.exec.start(rig.pool.admit(Admission::new(chat("old"), 60), rig.load(), release));
    admitted.done().unwrap();
    let load = move |_| -> BoxFuture<'static, Result<Loaded>> {
        assert!(weak.upgrade().is_none(), "the action of the victim still holds its capture");
        Box::pin(async { Ok(Loaded::unmeasured()) })
    };
    let admitted = rig.exec.start(rig.pool.admit(Admission::new(chat("new"), 60), load, rig.release(&chat("new"))));
    admitted.done().unwrap();
}

#[test]
fn case3_an_admission_sweeps_first_so_an_expired_model_goes_before_a_colder_one() {
    let rig = Rig::new(100);
    // Older by last use, but kept for ever.
    rig.admit(Admission::new(chat("cold"), 40).idle(IdlePolicy::Never)).done().unwrap();
    rig.clock.advance(secs(1));
    rig.admit(Admission::new(chat("expired"), 40).idle(IdlePolicy::AfterSeconds(30))).done().unwrap();
    // The timer has not been polled yet when the admission comes: the admission itself must see it.
    rig.clock.advance(secs(31));
    rig.log();
    rig.admit_first(Admission::new(chat("new"), 40)).done().unwrap();
    assert_eq!(rig.log()[..3], ["release chat:expired", "released chat:expired", "drain"]);
    assert_eq!(rig.keys(), ["chat:cold", "chat:new"]);
    assert_eq!(rig.status().counters.idle_unloads, 1);
    assert_eq!(rig.status().counters.evictions, 0);
}

#[test]
fn case3_the_sweep_of_an_admission_is_awaited_even_when_there_is_room() {
    let rig = Rig::new(100);
    rig.admit(Admission::new(chat("expired"), 10).idle(IdlePolicy::AfterSeconds(30))).done().unwrap();
    let gate = rig.gate_release(&chat("expired"));
    rig.clock.advance(secs(31));
    let pending = rig.admit_first(Admission::new(chat("new"), 10));
    assert!(!pending.is_done(), "the load allocates right after, so the swept bytes must be back");
    gate.open();
    pending.done().unwrap();
}

#[test]
fn a_model_on_its_way_out_is_waited_for_rather_than_a_warm_one_evicted() {
    let rig = Rig::new(100);
    rig.admit(Admission::new(chat("warm"), 40).idle(IdlePolicy::Never)).done().unwrap();
    rig.admit(Admission::new(chat("expired"), 40).idle(IdlePolicy::AfterSeconds(30))).done().unwrap();
    // The timer's release is under way when the admission comes.
    let gate = rig.gate_release(&chat("expired"));
    rig.advance(secs(31));
    let pending = rig.admit(Admission::new(chat("new"), 40));
    rig.run();
    assert!(!pending.is_done());
    gate.open();
    pending.done().unwrap();
    assert_eq!(rig.keys(), ["chat:new", "chat:warm"]);
}

#[test]
fn case4_p19_an_idle_model_past_its_time_is_swept_and_a_younger_one_is_not() {
    let rig = Rig::with(100, |options| options.idle = IdlePolicy::AfterSeconds(60));
    rig.resident(&chat("old"), 10);
    rig.clock.advance(secs(30));
    rig.resident(&chat("young"), 10);
    rig.advance(secs(31));
    assert_eq!(rig.keys(), ["chat:young"]);
}

#[test]
fn case5_a6_a_model_in_use_is_spared_until_its_uses_are_balanced() {
    let rig = Rig::new(100);
    let first = rig.leased(&chat("used"), 40);
    let second = rig.pool.begin_use(&chat("used")).unwrap();
    rig.clock.advance(secs(1));
    rig.resident(&chat("idle"), 40);
    // Least recently used is the one in use: the next idle one goes instead.
    rig.resident(&chat("new"), 40);
    assert_eq!(rig.keys(), ["chat:new", "chat:used"]);
    drop(first);
    rig.resident(&chat("newer"), 60);
    assert_eq!(rig.keys(), ["chat:newer", "chat:used"], "one of two uses has ended: still spared (P13)");
    drop(second);
    rig.resident(&chat("last"), 100);
    assert_eq!(rig.keys(), ["chat:last"]);
}

#[test]
fn case6_p11_an_admission_in_use_is_spared_from_its_first_moment() {
    let rig = Rig::new(100);
    let used = rig.admit(Admission::new(chat("used"), 60).in_use());
    // Asks for the room in the same run of the executor, before the first caller has looked at its answer.
    let other = rig.admit(Admission::new(chat("other"), 60));
    rig.run();
    assert!(!other.is_done());
    let lease = used.done().unwrap().lease.unwrap();
    assert!(!lease.is_detached());
    drop(lease);
    other.done().unwrap();
    assert_eq!(rig.keys(), ["chat:other"]);
}

#[test]
fn case7_p15_begin_use_is_refused_once_the_pool_has_let_go() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 60);
    let gate = rig.gate_release(&chat("a"));
    let other = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    // Detached, its release still running.
    assert!(rig.pool.begin_use(&chat("a")).is_none());
    assert_eq!(rig.status().entry(&chat("a")).unwrap().state, EntryState::Draining);
    gate.open();
    other.done().unwrap();
    assert!(rig.pool.begin_use(&chat("a")).is_none());
    assert!(rig.pool.begin_use(&chat("never seen")).is_none());
    assert_eq!(rig.status().counters.unbalanced_ends, 0);
}

#[test]
fn case8_evict_runs_the_release_and_forget_does_not() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    rig.resident(&chat("b"), 10);
    rig.log();
    assert_eq!(rig.pool.forget(&chat("a")), Some(10));
    rig.run();
    assert_eq!(rig.log(), Vec::<String>::new());
    let pool = rig.pool.clone();
    rig.exec.start(async move { pool.evict(&chat("b"), false).await }).done().unwrap();
    assert_eq!(rig.log(), ["release chat:b", "released chat:b", "drain"]);
    assert_eq!(rig.status().used_bytes, 0);
}

#[test]
fn case9_p14_evict_leaves_the_resident_set_before_its_release_runs() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 60);
    let gate = rig.gate_release(&chat("a"));
    let pool = rig.pool.clone();
    let evict = rig.exec.start(async move { pool.evict(&chat("a"), false).await });
    rig.run();
    assert!(rig.pool.peek(&chat("a")).is_none());
    // An admission of the same key that lands during the release is kept (P14 a).
    let again = rig.admit(Admission::new(chat("a"), 30));
    let new = again.done().unwrap().token;
    gate.open();
    evict.done().unwrap();
    assert_eq!(rig.pool.peek(&chat("a")), Some(new));
    assert_eq!(rig.status().used_bytes, 30);
}

#[test]
fn case10_p47_a_failed_load_leaves_no_reservation() {
    let rig = Rig::new(100);
    rig.resident(&chat("victim"), 80);
    rig.log();
    let (gate, failing) = rig.admit_gated(Admission::new(chat("bad"), 80), true);
    rig.run();
    assert_eq!(rig.status().pending_bytes, 80);
    gate.fail();
    assert_eq!(failing.done().unwrap_err().kind(), ErrorKind::Io);
    let status = rig.status();
    assert_eq!((status.used_bytes, status.entries.len()), (0, 0), "no entry, no reservation, and the victim stays gone");
    assert_eq!(rig.log().last().unwrap(), "drain", "what the load had allocated is given back");
    rig.resident(&chat("bad"), 80);
}

#[test]
fn case11_a_replacement_does_not_release_the_old_one_even_when_it_would_be_the_victim() {
    let rig = Rig::new(50);
    let old = rig.resident(&chat("a"), 50);
    rig.log();
    let admitted = rig.admit(Admission::new(chat("a"), 50).replace()).done().unwrap();
    assert_ne!(admitted.token, old);
    assert_eq!(admitted.origin, Origin::Loaded);
    assert_eq!(rig.log(), ["drain", "load chat:a", "loaded chat:a"], "drained for the bytes the owner let go, not released");
    assert_eq!(rig.status().used_bytes, 50);
    assert_eq!(rig.status().entries.len(), 1);
}

#[test]
fn case11_a_replacement_that_is_refused_anyway_costs_nothing() {
    let rig = Rig::with(50, |options| options.physical_limit_bytes = Some(60));
    let old = rig.resident(&chat("a"), 50);
    let error = rig.admit(Admission::new(chat("a"), 61).replace()).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
    let error = rig.admit(Admission::new(chat("a"), 55).replace().no_room(NoRoom::Refuse)).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
    assert_eq!(rig.pool.peek(&chat("a")), Some(old));
}

#[test]
fn case11_a_replacement_that_may_not_wait_costs_nothing() {
    let rig = Rig::with(50, |options| options.max_waiting = 1);
    let old = rig.resident(&chat("a"), 10);
    let paused = rig.paused();
    let refused = |admission: Admission| rig.admit(admission.replace()).done().unwrap_err();
    let error = refused(Admission::new(chat("a"), 10).no_room(NoRoom::Refuse));
    assert_eq!((error.kind(), rig.pool.peek(&chat("a"))), (ErrorKind::Busy, Some(old)), "{error}");
    // The line is full, for a pause and for want of room.
    let waiting = rig.admit(Admission::new(chat("b"), 50));
    rig.run();
    let error = refused(Admission::new(chat("a"), 10));
    assert_eq!((error.kind(), rig.pool.peek(&chat("a"))), (ErrorKind::Busy, Some(old)), "{error}");
    let in_use = rig.pool.begin_use(&chat("a"));
    drop(paused);
    rig.run();
    let other = rig.pool.begin_use(&chat("a"));
    drop(in_use);
    assert!(!waiting.is_done());
    let error = refused(Admission::new(chat("a"), 20));
    assert_eq!((error.kind(), rig.pool.peek(&chat("a"))), (ErrorKind::Busy, Some(old)), "{error}");
    drop(other);
    waiting.done().unwrap();
}

#[test]
fn case13_marking_in_use_moves_a_model_off_the_lru_end() {
    let rig = Rig::new(90);
    rig.resident(&chat("a"), 30);
    rig.resident(&chat("b"), 30);
    rig.resident(&chat("c"), 30);
    drop(rig.pool.begin_use(&chat("a")));
    assert_eq!(rig.pool.plan(&chat("d"), 30, None).evict, [chat("b")]);
    assert!(rig.pool.touch(&chat("b")));
    assert_eq!(rig.pool.plan(&chat("d"), 60, None).evict, [chat("c"), chat("a")]);
}

#[test]
fn case14_keys_are_scoped_by_kind() {
    let rig = Rig::new(100);
    rig.resident(&embedder("m"), 10);
    assert!(rig.pool.begin_use(&reranker("m")).is_none());
    assert!(!rig.pool.pin(&chat("m")));
    assert_eq!(rig.pool.forget(&reranker("m")), None);
    assert_eq!(embedder("m").to_string(), "embedder:m");
    assert_eq!(Key::other("onnx", "m").to_string(), "onnx:m");
}

#[test]
fn auxiliaries_and_chat_models_compete_in_one_lru_order() {
    let rig = Rig::new(90);
    rig.resident(&embedder("e"), 30);
    rig.resident(&chat("c"), 30);
    rig.resident(&reranker("r"), 30);
    assert_eq!(rig.pool.plan(&chat("new"), 61, None).evict, [embedder("e"), chat("c"), reranker("r")]);
    assert_eq!(rig.pool.plan(&chat("new"), 31, None).evict, [embedder("e"), chat("c")], "the fewest that make it fit");
}

#[test]
fn section9_uses_of_the_same_instant_keep_their_order() {
    let rig = Rig::new(30);
    for id in ["x", "b", "a"] {
        rig.resident(&chat(id), 10);
    }
    // The clock has not moved: the order of events decides, not the name.
    assert_eq!(rig.pool.plan(&chat("n"), 25, None).evict, [chat("x"), chat("b"), chat("a")]);
}

#[test]
fn a22_a36_admitting_twice_loads_once() {
    let rig = Rig::new(100);
    let first = rig.admit(Admission::new(chat("a"), 10)).done().unwrap();
    let second = rig.admit(Admission::new(chat("a"), 10)).done().unwrap();
    assert_eq!((first.origin, second.origin), (Origin::Loaded, Origin::Hit));
    assert_eq!(first.token, second.token);
    assert_eq!(rig.status().counters.loads, 1);
    assert_eq!(rig.table.lock().unwrap().len(), 1);
}

#[test]
fn a41_concurrent_first_requests_share_one_load() {
    let rig = Rig::new(100);
    let (gate, first) = rig.admit_gated(Admission::new(chat("a"), 10).in_use(), true);
    let rest: Vec<_> = (0..31).map(|_| rig.admit(Admission::new(chat("a"), 10).in_use())).collect();
    rig.run();
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 32, "all wait for one load");
    gate.open();
    let lease = first.done().unwrap().lease.unwrap();
    assert_eq!(lease.origin(), Origin::Loaded);
    let leases: Vec<_> = rest.into_iter().map(|caller| caller.done().unwrap().lease.unwrap()).collect();
    assert!(leases.iter().all(|other| other.origin() == Origin::Joined && other.token() == lease.token()));
    let status = rig.status();
    assert_eq!((status.counters.loads, status.counters.joins), (1, 31));
    assert_eq!(status.entry(&chat("a")).unwrap().uses, 32);
    drop((lease, leases));
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 0);
}

#[test]
fn the_decision_and_the_reservation_are_one_step() {
    // Section 9: two admissions of different keys that each fit alone, started together.
    let rig = Rig::new(100);
    let (one_gate, one) = rig.admit_gated(Admission::new(chat("a"), 60), true);
    let (two_gate, two) = rig.admit_gated(Admission::new(chat("b"), 60), true);
    rig.run();
    let status = rig.status();
    assert_eq!((status.pending_bytes, status.waiting), (60, 1), "the second sees the first's pending bytes");
    one_gate.open();
    one.done().unwrap();
    two_gate.open();
    two.done().unwrap();
    assert_eq!(rig.keys(), ["chat:b"]);
    assert_eq!(rig.status().peak_used_bytes, 60);
}

#[test]
fn a_swap_needs_the_larger_of_the_two_and_not_both() {
    // A8, P38: room for one is enough, and the account never shows the sum.
    let rig = Rig::new(63);
    rig.resident(&chat("a"), 60);
    let gate = rig.gate_release(&chat("a"));
    let pending = rig.admit(Admission::new(chat("b"), 50));
    rig.run();
    let status = rig.status();
    assert_eq!((status.releasing_bytes, status.pending_bytes, status.used_bytes), (60, 0, 60));
    gate.open();
    pending.done().unwrap();
    let status = rig.status();
    assert_eq!((status.resident_bytes, status.used_bytes, status.peak_used_bytes), (50, 50, 60));
}

#[test]
fn a2_a15_alternating_two_models_thirty_times_stays_within_one() {
    let rig = Rig::new(60);
    for round in 0..30 {
        let key = if round % 2 == 0 { chat("a") } else { embedder("b") };
        drop(rig.leased(&key, 60));
    }
    let memory = rig.memory.lock().unwrap();
    assert_eq!((memory.peak, memory.active, memory.cache), (60, 60, 0));
    assert_eq!(rig.status().peak_used_bytes, 60);
}

#[test]
fn a45_nothing_loads_before_it_is_asked_for() {
    let rig = Rig::new(100);
    let futures: Vec<_> = (0..10)
        .map(|index| {
            let key = chat(&index.to_string());
            rig.pool.admit(Admission::new(key.clone(), 10), rig.load(), rig.release(&key))
        })
        .collect();
    rig.run();
    assert!(rig.status().entries.is_empty(), "an admission starts at its first poll");
    drop(futures);
    assert!(rig.status().entries.is_empty());
}

#[test]
fn a_dry_run_changes_nothing_and_says_what_would_happen() {
    let rig = Rig::with(100, |options| options.physical_limit_bytes = Some(150));
    let plan = rig.pool.plan(&chat("a"), 60, None);
    assert_eq!((plan.verdict, plan.fits, plan.required_bytes, plan.free_bytes), (Verdict::Fits, true, 60, 100));
    rig.resident(&chat("a"), 60);
    let plan = rig.pool.plan(&chat("a"), 60, None);
    assert_eq!((plan.verdict, plan.fits, plan.required_bytes), (Verdict::Resident, true, 0));
    let plan = rig.pool.plan(&chat("b"), 60, None);
    assert_eq!((plan.verdict, plan.evict), (Verdict::Evicts, vec![chat("a")]));
    assert_eq!(rig.pool.plan(&chat("b"), 120, None).verdict, Verdict::Alone);
    assert_eq!(rig.pool.plan(&chat("b"), 151, None).verdict, Verdict::Refused);
    assert_eq!(rig.pool.plan(&chat("b"), 120, Some(NoRoom::Refuse)).verdict, Verdict::Refused);
    let lease = rig.pool.begin_use(&chat("a"));
    assert_eq!(rig.pool.plan(&chat("b"), 60, None).verdict, Verdict::Waits);
    let waiting = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    assert_eq!(rig.pool.plan(&chat("b"), 60, None).verdict, Verdict::Loading);
    assert_eq!(rig.pool.plan(&chat("c"), 10, None).verdict, Verdict::Waits, "it would stand behind the other");
    drop(lease);
    waiting.done().unwrap();
    assert_eq!(rig.status().counters.evictions, 1);
}

#[test]
fn an_estimate_runs_once_per_load_and_not_on_a_hit() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let rig = Rig::new(100);
    let runs = Arc::new(AtomicUsize::new(0));
    let admission = |key: Key| {
        let runs = runs.clone();
        Admission::estimated(key, move || {
            runs.fetch_add(1, Ordering::SeqCst);
            Box::pin(async { Ok(30) })
        })
    };
    let one = rig.admit(admission(chat("a")));
    let two = rig.admit(admission(chat("a")));
    one.done().unwrap();
    two.done().unwrap();
    rig.admit(admission(chat("a"))).done().unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert_eq!(rig.status().resident_bytes, 30);
    let failing =
        Admission::estimated(chat("b"), || Box::pin(async { Err(hob::Error::new(ErrorKind::NotFound, "no such model")) }));
    assert_eq!(rig.admit(failing).done().unwrap_err().kind(), ErrorKind::NotFound);
    rig.check();
    assert_eq!(rig.keys(), ["chat:a"]);
}

#[test]
fn p20_the_load_runs_inside_the_admission_and_events_tell_the_order() {
    let rig = Rig::new(100);
    rig.resident(&chat("old"), 60);
    let mut events = rig.pool.events(100);
    rig.resident(&chat("new"), 60);
    let names: Vec<String> = std::iter::from_fn(|| events.try_next())
        .map(|received| serde_json::to_value(received).unwrap()["event"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["unload_started", "unloaded", "load_started", "loaded"]);
    let _ = UnloadReason::Evicted;
}

#[test]
fn a_replacement_keeps_its_own_room_and_lets_those_in_line_have_what_is_left() {
    let rig = Rig::new(100);
    let _busy = rig.leased(&chat("busy"), 40);
    rig.admit(Admission::new(chat("a"), 50).pinned()).done().unwrap();
    let waiting = rig.admit(Admission::new(chat("w"), 30));
    rig.run();
    assert!(!waiting.is_done());
    // Needs no more than it gives back: it does not stand behind the one in line.
    rig.admit(Admission::new(chat("a"), 50).replace().pinned()).done().unwrap();
    assert!(!waiting.is_done());
    // Gives some back: the one in line goes on.
    rig.admit(Admission::new(chat("a"), 20).replace().pinned()).done().unwrap();
    waiting.done().unwrap();
    // The same when the cost has to be found out first, and when it is more than was given back.
    let next = rig.admit(Admission::new(chat("next"), 70));
    rig.run();
    assert!(!next.is_done());
    let estimate = Admission::estimated(chat("w"), || Box::pin(async { Ok(90) })).replace();
    let replacing = rig.admit(estimate);
    rig.run();
    assert!(!next.is_done() && !replacing.is_done());
    rig.pool.set_budget(130).unwrap();
    next.done().unwrap();
}
