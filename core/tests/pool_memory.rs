//! Hazard: memory that is not what the account believes. P31, P35-P38, P40, P50, P51, I19; A3, A14, A16-A18, A26, A38, A40, A44.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hob::pool::{Admission, LoadContext, Loaded, MemoryProbe, MemoryReading, NoRoom, default_budget, default_physical_limit};
use hob::{BoxFuture, ErrorKind, Result};
use pool_support::*;

/// A reading the test sets.
#[derive(Clone, Default)]
struct Dial(Arc<Mutex<MemoryReading>>);

impl MemoryProbe for Dial {
    fn read(&self) -> MemoryReading {
        *self.0.lock().unwrap()
    }
}

impl Dial {
    fn set(&self, active: u64, cache: u64, available: Option<u64>) {
        let mut reading = self.0.lock().unwrap();
        (reading.active, reading.cache, reading.available) = (active, cache, available);
    }
}

fn dialled(budget: u64) -> (Rig, Dial) {
    let dial = Dial::default();
    let probe = dial.clone();
    (Rig::with(budget, move |options| options.probe = Some(Arc::new(probe))), dial)
}

#[test]
fn p50_i19_the_defaults_from_the_machines_numbers() {
    const GIB: u64 = 1 << 30;
    assert_eq!(default_budget(Some(100 * GIB), 128 * GIB), 70 * GIB);
    assert_eq!(default_budget(None, 100 * GIB), 100 * GIB * 3 / 4 * 7 / 10);
    assert_eq!(default_budget(Some(0), 100 * GIB), default_budget(None, 100 * GIB), "a device that does not say");
    assert_eq!(default_budget(None, 0), 1, "never 0, which is not a budget");
    assert!(default_budget(Some(u64::MAX), u64::MAX) > u64::MAX / 2, "no overflow");
    assert_eq!(default_physical_limit(100 * GIB), 90 * GIB);
}

#[test]
fn p51_measured_bytes_replace_the_estimate() {
    let rig = Rig::new(100);
    let load = |_: LoadContext| -> BoxFuture<'static, Result<Loaded>> { Box::pin(async { Ok(Loaded::measured(25)) }) };
    let token = rig.exec.start(rig.pool.admit(Admission::new(chat("a"), 40), load, rig.release(&chat("a")))).done().unwrap().token;
    let entry = rig.status().entry(&chat("a")).unwrap().clone();
    assert_eq!((entry.bytes, entry.estimated_bytes, entry.measured_bytes), (25, Some(40), Some(25)));
    assert!(rig.pool.set_measured(token, 30));
    assert_eq!(rig.status().resident_bytes, 30);
    rig.check();
}

#[test]
fn an_estimate_that_was_too_low_is_made_good_by_what_is_idle() {
    let rig = Rig::new(100);
    rig.resident(&chat("old"), 30);
    rig.resident(&chat("warm"), 30);
    let load = |_: LoadContext| -> BoxFuture<'static, Result<Loaded>> { Box::pin(async { Ok(Loaded::measured(60)) }) };
    rig.exec.start(rig.pool.admit(Admission::new(chat("new"), 40), load, rig.release(&chat("new")))).done().unwrap();
    rig.run();
    assert_eq!(rig.keys(), ["chat:new", "chat:warm"], "the least recently used, as few as needed, never itself");
    assert_eq!(rig.status().used_bytes, 90);
}

#[test]
fn more_measured_bytes_evict_nothing_until_somebody_needs_room() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 30);
    let token = rig.resident(&chat("b"), 30);
    rig.pool.set_measured(token, 90);
    rig.run();
    assert_eq!(rig.status().used_bytes, 120);
    assert_eq!(rig.status().free_bytes, 0);
    rig.resident(&chat("c"), 5);
    assert_eq!(rig.keys(), ["chat:b", "chat:c"]);
}

#[test]
fn fewer_measured_bytes_let_a_waiter_go_on() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 60);
    let waiting = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    rig.pool.set_measured(lease.token(), 40);
    waiting.done().unwrap();
}

#[test]
fn p31_p40_the_account_is_floored_by_what_the_process_holds() {
    let (rig, dial) = dialled(100);
    rig.resident(&chat("a"), 30);
    assert_eq!(rig.pool.plan(&chat("b"), 60, None).evict, []);
    // Long contexts: the process holds much more than the entries were charged for.
    dial.set(60, 20, None);
    assert_eq!(rig.status().free_bytes, 20);
    assert_eq!(rig.pool.plan(&chat("b"), 60, None).verdict, hob::pool::Verdict::Alone);
    assert_eq!(rig.pool.plan(&chat("b"), 40, None).evict, [chat("a")]);
    let error = rig.admit(Admission::new(chat("b"), 60).no_room(NoRoom::Refuse)).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
    assert_eq!(rig.status().memory.unwrap().held(), 80);
}

#[test]
fn a40_memory_used_by_others_narrows_the_budget() {
    let (rig, dial) = dialled(100);
    rig.resident(&chat("a"), 30);
    dial.set(30, 0, Some(20));
    assert_eq!(rig.status().free_bytes, 20, "min(budget, free now)");
    rig.resident(&chat("b"), 20);
    // Nothing the system has left: served neither beside the others nor alone.
    dial.set(50, 0, Some(0));
    let error = rig.admit(Admission::new(chat("c"), 51)).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetExceeded);
    rig.admit(Admission::new(chat("c"), 50)).done().unwrap();
    assert_eq!(rig.keys(), ["chat:c"], "what the evicted ones held can be used again");
}

#[test]
fn external_charges_count_and_end_with_their_value() {
    let rig = Rig::new(100);
    let mut charge = rig.pool.charge_external(70);
    assert_eq!(rig.status().external_bytes, 70);
    rig.resident(&chat("a"), 30);
    charge.set(80);
    rig.run();
    assert_eq!(rig.keys(), ["chat:a"], "a charge evicts nothing by itself");
    rig.resident(&chat("b"), 20);
    assert_eq!(rig.keys(), ["chat:b"]);
    drop(charge);
    assert_eq!(rig.status().external_bytes, 0);
    assert_eq!(rig.status().peak_used_bytes, 110);
}

#[test]
fn a14_a16_a17_every_way_out_is_drained_once() {
    let rig = Rig::with(100, |options| options.idle = hob::IdlePolicy::AfterSeconds(60));
    let drains = |rig: &Rig| rig.log().iter().filter(|line| *line == "drain").count();
    rig.resident(&chat("a"), 50);
    rig.resident(&chat("b"), 60);
    assert_eq!(drains(&rig), 1, "for room");
    rig.advance(secs(61));
    assert_eq!(drains(&rig), 1, "for idleness, with no other request");
    rig.resident(&chat("c"), 50);
    let pool = rig.pool.clone();
    let freed = rig.exec.start(async move { pool.evict(&chat("c"), false).await }).done().unwrap().freed_bytes;
    assert_eq!((drains(&rig), freed), (1, 50), "by request");
    let token = rig.resident(&chat("d"), 50);
    rig.table.lock().unwrap().remove(&token);
    let pool = rig.pool.clone();
    let freed = rig.exec.start(async move { pool.forget_and_drain(&chat("d")).await }).done().unwrap();
    assert_eq!((drains(&rig), freed), (1, 50), "by the owner");
    rig.resident(&chat("e"), 50);
    let pool = rig.pool.clone();
    rig.exec.start(async move { pool.close().await }).done().unwrap();
    assert_eq!(drains(&rig), 1, "by close");
    assert_eq!(rig.held(), 0);
}

#[test]
fn the_drain_can_be_switched_off() {
    let rig = Rig::with(100, |options| options.drain_after_release = false);
    rig.resident(&chat("a"), 60);
    rig.resident(&chat("b"), 60);
    assert!(!rig.log().contains(&"drain".to_owned()));
    assert_eq!(rig.memory.lock().unwrap().cache, 60);
}

#[test]
fn evict_and_forget_tell_the_bytes_really_freed_measured_by_the_probe() {
    let rig = Rig::with_memory(100, |options, memory| options.probe = Some(Arc::new(Probe(memory.clone()))));
    rig.resident(&chat("a"), 60);
    rig.resident(&chat("b"), 40);
    // The probe's word counts, not the account's: half of `a` is shared with something that stays.
    let pool = rig.pool.clone();
    let freed = rig.exec.start(async move { pool.evict(&chat("a"), false).await }).done().unwrap().freed_bytes;
    assert_eq!(freed, 60);
    let token = rig.pool.peek(&chat("b")).unwrap();
    let kept = rig.table.lock().unwrap().remove(&token);
    let pool = rig.pool.clone();
    let forgetting = rig.exec.start(async move { pool.forget_and_drain(&chat("b")).await });
    rig.run();
    assert!(!forgetting.is_done(), "it watches the probe for a while");
    rig.advance(Duration::from_millis(250));
    assert_eq!(forgetting.done().unwrap(), 0, "somebody still holds it: nothing came back, and that is said");
    drop(kept);
}

#[test]
fn bytes_that_come_back_late_are_still_counted_within_the_settle_time() {
    let (rig, dial) = dialled(100);
    rig.resident(&chat("a"), 60);
    dial.set(60, 0, None);
    let pool = rig.pool.clone();
    let evicting = rig.exec.start(async move { pool.evict(&chat("a"), false).await });
    rig.run();
    assert!(!evicting.is_done());
    dial.set(2, 0, None);
    rig.advance(Duration::from_millis(5));
    assert_eq!(evicting.done().unwrap().freed_bytes, 58);
    // Others allocating meanwhile must not make it negative.
    rig.resident(&chat("b"), 30);
    dial.set(30, 0, None);
    let pool = rig.pool.clone();
    let evicting = rig.exec.start(async move { pool.evict(&chat("b"), false).await });
    rig.run();
    dial.set(90, 0, None);
    rig.advance(Duration::from_millis(250));
    assert_eq!(evicting.done().unwrap().freed_bytes, 0);
}

#[test]
fn a26_loaded_and_never_used_gives_everything_back() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 60);
    let pool = rig.pool.clone();
    rig.exec.start(async move { pool.evict(&chat("a"), false).await }).done().unwrap();
    assert_eq!(rig.held(), 0);
}
