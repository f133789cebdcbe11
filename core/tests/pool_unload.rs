//! Hazard: unloading. P10, P14, P15, P26, P46, the tombstone of 1.3, pins; A1, A13, A22, A30, A37, A44, A48, B8, B16; the
//! second trap of section 9.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use std::sync::Arc;

use hob::pool::{Admission, EntryState, Evicted, Key, LoadContext, Loaded, NoRoom, Token};
use hob::{BoxFuture, ErrorKind, Result};
use pool_support::*;

fn evict(rig: &Rig, key: &Key, force: bool) -> Pending<Result<Evicted>> {
    let (pool, key) = (rig.pool.clone(), key.clone());
    rig.exec.start(async move { pool.evict(&key, force).await })
}

#[test]
fn a37_an_idle_model_is_unloaded_at_once_and_a_leased_one_is_refused() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 10);
    let error = evict(&rig, &chat("a"), false).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse);
    assert!(error.message().contains("chat:a") && error.message().contains("1 leases") && error.message().contains("force"));
    drop(lease);
    let evicted = evict(&rig, &chat("a"), false).done().unwrap();
    assert_eq!(evicted.freed_bytes, 10);
    assert!(rig.keys().is_empty());
}

#[test]
fn a48_a16_evict_completes_after_the_memory_is_back() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    let gate = rig.gate_release(&chat("a"));
    let evicting = evict(&rig, &chat("a"), false);
    assert!(!evicting.is_done());
    gate.open();
    evicting.done().unwrap();
    let memory = rig.memory.lock().unwrap();
    assert_eq!((memory.active, memory.cache), (0, 0));
}

#[test]
fn section9_a_forced_unload_under_a_stream() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 60);
    // The stream's own reference.
    let engine = rig.table.lock().unwrap()[&lease.token()].clone();
    rig.log();
    let evicted = evict(&rig, &chat("a"), true).done().unwrap();
    assert_eq!(evicted.freed_bytes, 0, "the stream still holds it");
    assert!(rig.pool.begin_use(&chat("a")).is_none(), "the entry is gone at once");
    assert!(lease.is_detached());
    assert_eq!(rig.log(), ["release chat:a", "released chat:a"], "no drain: it would return nothing (P36)");
    let status = rig.status();
    assert_eq!((status.resident_bytes, status.releasing_bytes), (0, 60), "the bytes are still held, so they still count");
    assert_eq!(status.entries[0].state, EntryState::Draining);
    // An admission knows that the bytes are not free.
    let next = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    assert!(!next.is_done());
    // The stream finishes: its reference first, then its lease; the last holder drains, once.
    drop(engine);
    drop(lease);
    next.done().unwrap();
    assert_eq!(rig.log(), ["drain", "load chat:b", "loaded chat:b"]);
    assert_eq!(rig.memory.lock().unwrap().peak, 60);
}

#[test]
fn p36_the_lease_ends_while_the_forced_release_runs_and_the_drain_still_happens_once() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 60);
    let gate = rig.gate_release(&chat("a"));
    let evicting = evict(&rig, &chat("a"), true);
    rig.run();
    drop(lease);
    rig.run();
    assert_eq!(rig.status().releasing_bytes, 60, "its release has not run yet");
    gate.open();
    assert_eq!(evicting.done().unwrap().freed_bytes, 60);
    assert_eq!(rig.log().iter().filter(|line| *line == "drain").count(), 1);
    assert_eq!(rig.status().used_bytes, 0);
}

#[test]
fn a1_unload_and_use_at_once_fifty_times() {
    let rig = Rig::new(100);
    for _ in 0..50 {
        rig.resident(&chat("a"), 60);
        let evicting = evict(&rig, &chat("a"), false);
        rig.exec.step();
        match rig.pool.begin_use(&chat("a")) {
            Some(lease) => assert!(!lease.is_detached()),
            None => drop(rig.admit(Admission::new(chat("a"), 60).in_use()).done().unwrap()),
        }
        let _ = evicting.done();
    }
    let status = rig.status();
    assert!(status.used_bytes <= 60, "one copy of it");
    assert!(rig.memory.lock().unwrap().peak <= 60);
}

#[test]
fn p46_evict_waits_for_a_load_and_for_an_unload_under_way() {
    let rig = Rig::new(100);
    let (gate, loading) = rig.admit_gated(Admission::new(chat("a"), 10), true);
    let evicting = evict(&rig, &chat("a"), false);
    assert!(!evicting.is_done());
    gate.open();
    loading.done().unwrap();
    evicting.done().unwrap();
    assert!(rig.keys().is_empty());

    rig.resident(&chat("a"), 10);
    let gate = rig.gate_release(&chat("a"));
    let first = evict(&rig, &chat("a"), false);
    let second = evict(&rig, &chat("a"), false);
    assert!(!first.is_done() && !second.is_done());
    gate.open();
    assert!(first.done().unwrap().token.is_some());
    let evicted = second.done().unwrap();
    assert_eq!((evicted.token, evicted.freed_bytes), (None, 0), "the other call unloaded it");
}

#[test]
fn tombstone_a_forced_evict_ends_a_load_and_inserts_nothing() {
    // An obedient load stops; one that ignores its token finishes, and is let go of before anybody hears of the end.
    for obedient in [true, false] {
        let rig = Rig::new(100);
        let (gate, first) = rig.admit_gated(Admission::new(chat("a"), 10).in_use(), obedient);
        let joined = rig.admit(Admission::new(chat("a"), 10).in_use());
        rig.run();
        let evicting = evict(&rig, &chat("a"), true);
        rig.run();
        let mut gate = Some(gate);
        if !obedient {
            assert!(!evicting.is_done());
            gate.take().unwrap().open();
        }
        for caller in [first, joined] {
            let error = caller.done().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled);
            assert!(error.message().contains("evicted while it was loading"));
        }
        evicting.done().unwrap();
        assert!(rig.keys().is_empty() && rig.table.lock().unwrap().is_empty());
        assert_eq!(rig.held(), 0);
        rig.resident(&chat("a"), 10);
        drop(gate);
    }
}

#[test]
fn tombstone_an_admission_that_comes_while_a_doomed_load_ends_loads_afresh() {
    let rig = Rig::new(100);
    let (gate, first) = rig.admit_gated(Admission::new(chat("a"), 10), false);
    rig.run();
    let evicting = evict(&rig, &chat("a"), true);
    rig.run();
    let later = rig.admit(Admission::new(chat("a"), 10).in_use());
    assert!(!later.is_done());
    gate.open();
    assert!(first.done().is_err());
    evicting.done().unwrap();
    let lease = later.done().unwrap().lease.unwrap();
    assert!(!lease.is_detached() && rig.table.lock().unwrap().contains_key(&lease.token()));
}

#[test]
fn a_queued_admission_is_not_resident_but_can_be_ended_by_force() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("a"), 60);
    let waiting = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    assert_eq!(evict(&rig, &chat("b"), false).done().unwrap_err().kind(), ErrorKind::NotFound);
    evict(&rig, &chat("b"), true).done().unwrap();
    assert_eq!(waiting.done().unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(rig.status().waiting, 0);
}

#[test]
fn unknown_keys_are_not_found_and_the_error_names_them() {
    let rig = Rig::new(100);
    let error = evict(&rig, &reranker("nope"), false).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("reranker:nope"));
    assert_eq!(rig.pool.forget(&reranker("nope")), None);
    assert_eq!(rig.pool.forget_token(Token::from_u64(12_345)), None);
    assert!(!rig.pool.set_measured(Token::from_u64(12_345), 1));
    assert_eq!(rig.pool.is_pinned(&reranker("nope")), None);
    assert!(!rig.pool.touch(&reranker("nope")) && !rig.pool.unpin(&reranker("nope")));
}

#[test]
fn p26_a_lease_knows_that_its_entry_went_before_it_was_used() {
    let rig = Rig::new(100);
    let admitted = rig.admit(Admission::new(chat("a"), 10).in_use());
    rig.run();
    // The answer is there, the caller has not looked at it; the release comes first.
    evict(&rig, &chat("a"), true).done().unwrap();
    let lease = admitted.done().unwrap().lease.unwrap();
    assert!(lease.is_detached());
    assert!(rig.pool.peek(&chat("a")).is_none());
    drop(lease);
    rig.run();
    assert_eq!(rig.status().used_bytes, 0);
    assert_eq!(rig.log().last().unwrap(), "drain", "the orphan's end drains");
}

#[test]
fn p27_forgetting_by_token_spares_what_came_after() {
    let rig = Rig::new(100);
    let old = rig.resident(&chat("a"), 10);
    rig.pool.forget(&chat("a"));
    let new = rig.resident(&chat("a"), 10);
    assert_eq!(rig.pool.forget_token(old), None);
    assert_eq!(rig.pool.peek(&chat("a")), Some(new));
    assert_eq!(rig.pool.forget_token(new), Some(10));
}

#[test]
fn a13_forgetting_under_leases_keeps_the_bytes_until_the_last_one_ends() {
    let rig = Rig::new(100);
    let one = rig.leased(&chat("a"), 60);
    let two = rig.pool.begin_use(&chat("a")).unwrap();
    assert_eq!(rig.pool.forget(&chat("a")), Some(60));
    assert!(one.is_detached() && two.is_detached());
    drop(one);
    rig.run();
    assert_eq!(rig.status().releasing_bytes, 60);
    drop(two);
    rig.run();
    assert_eq!(rig.status().used_bytes, 0);
    assert_eq!(rig.log().iter().filter(|line| line.starts_with("release ")).count(), 0);
}

#[test]
fn the_raw_pair_goes_by_token_so_a_late_end_cannot_touch_a_newer_entry() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    let old = rig.pool.begin_use_counted(&chat("a")).unwrap();
    rig.pool.forget(&chat("a"));
    rig.resident(&chat("a"), 10);
    let new = rig.pool.begin_use_counted(&chat("a")).unwrap();
    assert!(rig.pool.end_use(old), "the detached one");
    rig.run();
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 1, "the newer use is still open");
    assert!(rig.pool.end_use(new));
    assert!(!rig.pool.end_use(new), "clamped at zero (P13)");
    assert!(!rig.pool.end_use(old) && !rig.pool.end_use(Token::from_u64(999)));
    assert_eq!(rig.status().counters.unbalanced_ends, 3, "counted and told");
    rig.check();
}

#[test]
fn a_lease_turned_into_its_token_is_ended_by_the_token() {
    let rig = Rig::new(100);
    let token = rig.leased(&chat("a"), 10).into_token();
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 1);
    assert!(rig.pool.end_use(token));
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 0);
}

#[test]
fn a30_a_pinned_model_survives_every_path_but_the_explicit_ones() {
    let rig = Rig::with(100, |options| options.idle = hob::IdlePolicy::AfterSeconds(30));
    rig.resident(&reranker("p"), 40);
    assert!(rig.pool.pin(&reranker("p")));
    assert_eq!(rig.pool.is_pinned(&reranker("p")), Some(true));
    rig.advance(secs(1_000));
    rig.resident(&chat("a"), 60);
    rig.resident(&chat("b"), 60);
    rig.admit(Admission::new(chat("c"), 90).no_room(NoRoom::LoadAnyway)).done().unwrap();
    let pool = rig.pool.clone();
    rig.exec
        .start(async move {
            pool.make_room(100, None).await.unwrap();
            pool.trim().await.unwrap();
            pool.sweep().await.unwrap();
        })
        .done();
    drop(rig.pool.begin_use(&reranker("p")));
    rig.run();
    assert_eq!(rig.keys(), ["reranker:p"]);
    evict(&rig, &reranker("p"), false).done().unwrap();
    rig.admit(Admission::new(reranker("p"), 40).pinned()).done().unwrap();
    assert_eq!(rig.pool.forget(&reranker("p")), Some(40));
}

#[test]
fn a_pin_set_while_it_loads_holds() {
    let rig = Rig::new(100);
    let (gate, loading) = rig.admit_gated(Admission::new(chat("a"), 60), true);
    rig.run();
    assert!(rig.pool.pin(&chat("a")));
    gate.open();
    loading.done().unwrap();
    assert_eq!(rig.pool.is_pinned(&chat("a")), Some(true));
}

#[test]
fn unpinning_puts_a_model_back_at_its_own_place_in_the_order() {
    let rig = Rig::new(90);
    rig.resident(&chat("a"), 30);
    rig.resident(&chat("b"), 30);
    rig.resident(&chat("c"), 30);
    rig.pool.pin(&chat("b"));
    assert_eq!(rig.pool.plan(&chat("n"), 60, None).evict, [chat("a"), chat("c")]);
    rig.pool.unpin(&chat("b"));
    assert_eq!(rig.pool.plan(&chat("n"), 90, None).evict, [chat("a"), chat("b"), chat("c")]);
    rig.check();
}

#[test]
fn set_budget_evicts_nothing_and_trim_does() {
    let rig = Rig::new(100);
    for id in ["a", "b", "c"] {
        rig.resident(&chat(id), 30);
    }
    let _lease = rig.pool.begin_use(&chat("a"));
    rig.pool.set_budget(40).unwrap();
    rig.run();
    assert_eq!(rig.status().entries.len(), 3);
    let pool = rig.pool.clone();
    let reclaimed = rig.exec.start(async move { pool.trim().await }).done().unwrap();
    assert_eq!(reclaimed.evicted, [chat("b"), chat("c")]);
    assert_eq!((reclaimed.freed_bytes, reclaimed.fits), (60, true));
    assert_eq!(rig.keys(), ["chat:a"]);
    rig.pool.set_budget(20).unwrap();
    let pool = rig.pool.clone();
    let reclaimed = rig.exec.start(async move { pool.trim().await }).done().unwrap();
    assert!(!reclaimed.fits && reclaimed.evicted.is_empty(), "what is in use stays");
}

#[test]
fn make_room_frees_as_little_as_needed_one_by_one_and_ends_quietly() {
    let rig = Rig::new(100);
    for id in ["a", "b", "c"] {
        rig.resident(&chat(id), 30);
    }
    let pool = rig.pool.clone();
    let reclaimed = rig.exec.start(async move { pool.make_room(25, None).await }).done().unwrap();
    assert_eq!((reclaimed.evicted, reclaimed.fits), (vec![chat("a")], true));
    let pool = rig.pool.clone();
    let reclaimed = rig.exec.start(async move { pool.make_room(1_000, None).await }).done().unwrap();
    assert_eq!((reclaimed.evicted, reclaimed.fits), (vec![chat("b"), chat("c")], false));
}

#[test]
fn make_room_stops_between_releases_when_it_is_cancelled() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 50);
    rig.resident(&chat("b"), 50);
    let gate = rig.gate_release(&chat("a"));
    let (pool, token) = (rig.pool.clone(), hob::CancelToken::new());
    let cancel = token.clone();
    let making = rig.exec.start(async move { pool.make_room(100, Some(cancel)).await });
    rig.run();
    token.cancel();
    gate.open();
    assert_eq!(making.done().unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(rig.keys(), ["chat:b"]);
}

#[test]
fn an_evict_whose_future_is_dropped_goes_on() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    let gate = rig.gate_release(&chat("a"));
    let evicting = evict(&rig, &chat("a"), false);
    rig.run();
    evicting.leave();
    gate.open();
    rig.run();
    assert!(rig.keys().is_empty());
    assert_eq!(rig.log().last().unwrap(), "drain");
}

#[test]
fn p15_forgetting_drops_the_release_action_at_once_under_a_lease_too() {
    // The owner has let go; what the action captured must not wait for somebody's stream to end.
    let rig = Rig::new(10);
    let captured = Arc::new(());
    let kept = Arc::downgrade(&captured);
    let load = |_: LoadContext| -> BoxFuture<'static, Result<Loaded>> { Box::pin(async { Ok(Loaded::unmeasured()) }) };
    let release = move |_| -> BoxFuture<'static, Result<()>> {
        drop(captured);
        Box::pin(async { Ok(()) })
    };
    let lease = rig.exec.start(rig.pool.acquire(Admission::new(chat("a"), 5), load, release)).done().unwrap();
    assert!(kept.upgrade().is_some());
    assert_eq!(rig.pool.forget(&chat("a")), Some(5));
    assert!(kept.upgrade().is_none());
    drop(lease);
}
