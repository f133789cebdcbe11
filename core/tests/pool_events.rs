//! Hazard: what the pool tells. P34, M70, I13, invariants 10 and 12.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use hob::pool::{Admission, EntryState, IdlePolicy, PoolEvent, Received, UnloadReason};
use pool_support::*;

#[test]
fn p34_the_snapshot_has_every_field_in_every_state() {
    let rig = Rig::with(100, |options| options.physical_limit_bytes = Some(500));
    let _charge = rig.pool.charge_external(5);
    let lease = rig.leased(&chat("ready"), 20);
    rig.admit(Admission::new(embedder("pinned"), 10).pinned().idle(IdlePolicy::Never)).done().unwrap();
    rig.resident(&chat("going"), 10);
    let gate = rig.gate_release(&chat("going"));
    let pool = rig.pool.clone();
    let evicting = rig.exec.start(async move { pool.evict(&chat("going"), false).await });
    let (load_gate, loading) = rig.admit_gated(Admission::new(chat("loading"), 30), true);
    let waiting = rig.admit(Admission::new(chat("waiting"), 95));
    rig.run();
    rig.advance(secs(2));
    let status = rig.status();
    assert_eq!((status.budget_bytes, status.physical_limit_bytes), (100, Some(500)));
    assert_eq!((status.resident_bytes, status.pending_bytes, status.releasing_bytes, status.external_bytes), (30, 30, 10, 5));
    assert_eq!((status.used_bytes, status.free_bytes, status.waiting), (75, 25, 1));
    let states: Vec<(String, EntryState, u64)> =
        status.entries.iter().map(|entry| (entry.key.to_string(), entry.state, entry.bytes)).collect();
    let expected = [
        ("chat:going", EntryState::Draining, 10),
        ("chat:loading", EntryState::Loading, 30),
        ("chat:ready", EntryState::Ready, 20),
        ("chat:waiting", EntryState::Waiting, 0),
        ("embedder:pinned", EntryState::Ready, 10),
    ];
    assert_eq!(states, expected.map(|(key, state, bytes)| (key.to_owned(), state, bytes)), "sorted by key");
    let ready = status.entry(&chat("ready")).unwrap();
    assert_eq!(
        (ready.kind.as_str(), ready.id.as_str(), ready.uses, ready.idle_ms, ready.loads, ready.unloads),
        ("chat", "ready", 1, 0, 1, 0)
    );
    assert_eq!((ready.unload_in_ms, ready.last_load_ms), (None, Some(0)));
    assert!(status.entry(&embedder("pinned")).unwrap().pinned);
    assert_eq!(status.entry(&embedder("pinned")).unwrap().idle_ms, 2_000);
    let json = serde_json::to_value(&status).unwrap();
    assert_eq!(json["entries"][0]["state"], "draining");
    assert_eq!(json["entries"][4]["idle"]["mode"], "never");
    assert_eq!(json["entries"][4]["key"], "embedder:pinned");
    gate.open();
    load_gate.open();
    evicting.done().unwrap();
    loading.done().unwrap();
    drop((lease, waiting));
}

#[test]
fn counts_of_loads_and_unloads_outlive_the_entry() {
    let rig = Rig::new(10);
    for _ in 0..3 {
        rig.resident(&chat("a"), 10);
        rig.resident(&chat("b"), 10);
    }
    let status = rig.status();
    let b = status.entry(&chat("b")).unwrap();
    assert_eq!((b.loads, b.unloads), (3, 2));
    assert_eq!(status.counters.evictions, 5);
}

#[test]
fn the_load_time_is_measured_on_the_pools_clock() {
    let rig = Rig::new(10);
    let (gate, loading) = rig.admit_gated(Admission::new(chat("a"), 10).in_use(), true);
    rig.run();
    rig.clock.advance(secs(3));
    gate.open();
    let admitted = loading.done().unwrap();
    assert_eq!(admitted.load_time, secs(3));
    assert_eq!(admitted.lease.unwrap().load_time(), secs(3));
    assert_eq!(rig.status().entry(&chat("a")).unwrap().last_load_ms, Some(3_000));
    assert_eq!(rig.pool.begin_use(&chat("a")).unwrap().load_time(), secs(3));
}

#[test]
fn m70_a_slow_subscriber_loses_the_oldest_and_is_told_how_many() {
    let rig = Rig::new(100);
    let mut slow = rig.pool.events(3);
    let mut fast = rig.pool.events(100);
    for bytes in 1..=10 {
        rig.pool.set_budget(bytes).unwrap();
    }
    let all: Vec<Received> = std::iter::from_fn(|| slow.try_next()).collect();
    let budget = |bytes| Received::Event(PoolEvent::BudgetChanged { bytes });
    assert_eq!(all, [Received::Missed { missed: 7 }, budget(8), budget(9), budget(10)]);
    assert_eq!(std::iter::from_fn(|| fast.try_next()).count(), 10);
    assert_eq!(serde_json::to_string(&all[0]).unwrap(), r#"{"missed":7}"#);
}

#[test]
fn a_waiting_subscriber_is_woken_and_a_dropped_one_is_forgotten() {
    let rig = Rig::new(100);
    let mut events = rig.pool.events(8);
    let next = rig.exec.start(async move { (events.next().await, events) });
    assert!(!next.is_done());
    rig.pool.set_budget(7).unwrap();
    let (received, events) = next.done();
    assert_eq!(received, Some(Received::Event(PoolEvent::BudgetChanged { bytes: 7 })));
    drop(events);
    rig.pool.set_budget(8).unwrap();
    rig.pool.set_budget(9).unwrap();
}

#[test]
fn the_life_of_a_model_in_events() {
    let rig = Rig::with(100, |options| options.idle = IdlePolicy::AfterSeconds(30));
    let mut events = rig.pool.events(100);
    let _lease = rig.leased(&chat("busy"), 50);
    let waiting = rig.admit(Admission::new(chat("a"), 60).deadline(rig.now() + secs(1)));
    rig.run();
    rig.advance(secs(1));
    assert!(waiting.done().is_err());
    rig.resident(&chat("b"), 50);
    rig.advance(secs(31));
    let told: Vec<String> =
        std::iter::from_fn(|| events.try_next()).map(|received| serde_json::to_string(&received).unwrap()).collect();
    let b = rig.status().entries.len();
    assert_eq!(b, 1);
    let expected = [
        r#"{"event":"load_started","key":"chat:busy","token":1,"bytes":50}"#,
        r#"{"event":"loaded","key":"chat:busy","token":1,"bytes":50,"ms":0}"#,
        r#"{"event":"waiting","key":"chat:a","bytes":60,"ahead":0}"#,
        r#"{"event":"refused","key":"chat:a","bytes":60,"kind":"Cancelled"}"#,
    ];
    assert_eq!(told[..4], expected);
    assert!(told[4].contains("load_started") && told[5].contains("loaded"));
    assert!(told[6].contains("unload_started") && told[6].contains(r#""reason":"idle""#));
    assert!(told[7].contains(r#""event":"unloaded""#) && told[7].contains(r#""bytes":50"#));
    assert_eq!(told.len(), 8);
    assert_eq!(serde_json::to_string(&UnloadReason::Replaced).unwrap(), r#""replaced""#);
}

#[test]
fn invariant10_a_snapshot_does_not_wait_for_loads_or_releases() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 60);
    let _release = rig.gate_release(&chat("a"));
    let (_load, _caller) = rig.admit_gated(Admission::new(chat("b"), 60), true);
    rig.run();
    assert_eq!(rig.status().entries.len(), 2);
    assert_eq!(rig.pool.plan(&chat("c"), 1, None).required_bytes, 1);
}
