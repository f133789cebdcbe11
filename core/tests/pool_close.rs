//! Hazard: close and pause. P29, P48, M10-M11's lesson, B1, B4, B11, B14; section 9: stop with a parked request, stop twice,
//! stop during load, close while paused.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use std::sync::{Arc, Mutex};

use hob::pool::{Admission, NoRoom, PoolEvent, Quiesce, Received};
use hob::{BoxFuture, Error, ErrorKind, Result};
use pool_support::*;

fn close(rig: &Rig) -> Pending<Result<()>> {
    let pool = rig.pool.clone();
    rig.exec.start(async move { pool.close().await })
}

#[test]
fn parked_requests_end_first_then_everything_pinned_and_leased_too() {
    let rig = Rig::new(100);
    rig.admit(Admission::new(chat("pinned"), 30).pinned()).done().unwrap();
    let lease = rig.leased(&chat("leased"), 60);
    let parked = rig.admit(Admission::new(chat("parked"), 60));
    rig.run();
    let gate = rig.gate_release(&chat("pinned"));
    let closing = close(&rig);
    assert!(!closing.is_done());
    let error = parked.done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "before anything was released");
    gate.open();
    closing.done().unwrap();
    assert!(rig.table.lock().unwrap().is_empty());
    assert!(lease.is_detached());
    assert_eq!(rig.status().releasing_bytes, 60, "close does not wait for leases (B11), and does not lie about them");
    drop(lease);
    rig.run();
    assert_eq!(rig.status().used_bytes, 0);
    assert_eq!(rig.held(), 0);
}

#[test]
fn closing_again_waits_for_the_first_and_returns_its_result() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    let gate = rig.gate_release(&chat("a"));
    let (one, two) = (close(&rig), close(&rig));
    assert!(!one.is_done() && !two.is_done());
    gate.fail();
    let (one, two) = (one.done().unwrap_err(), two.done().unwrap_err());
    assert_eq!((one.kind(), one.message()), (two.kind(), two.message()));
    assert_eq!(close(&rig).done().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(rig.log().iter().filter(|line| *line == "release chat:a").count(), 1);
}

#[test]
fn all_failed_releases_make_one_error() {
    let rig = Rig::new(100);
    let gates: Vec<Gate> = ["a", "b", "c"]
        .map(|id| {
            rig.resident(&chat(id), 10);
            rig.gate_release(&chat(id))
        })
        .into_iter()
        .collect();
    let closing = close(&rig);
    for gate in gates {
        gate.fail();
    }
    let error = closing.done().unwrap_err();
    assert!(error.message().starts_with("3 of 3 releases failed: chat:a") && error.message().contains("chat:c"));
    assert!(!error.message().contains('\n'));
}

#[test]
fn a_load_under_way_is_stopped_and_rejected_as_closed() {
    for obedient in [true, false] {
        let rig = Rig::new(100);
        let (gate, loading) = rig.admit_gated(Admission::new(chat("a"), 10).in_use(), obedient);
        rig.run();
        let closing = close(&rig);
        rig.run();
        if !obedient {
            assert!(!closing.is_done());
            gate.open();
        }
        assert_eq!(loading.done().unwrap_err().kind(), ErrorKind::Closed);
        closing.done().unwrap();
        assert!(rig.table.lock().unwrap().is_empty(), "a load that finishes after close is let go of (P47)");
        assert_eq!(rig.held(), 0);
    }
}

#[test]
fn after_close_everything_is_typed_and_the_account_exact() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    close(&rig).done().unwrap();
    assert!(rig.pool.is_closed() && rig.status().closed);
    assert!(rig.pool.begin_use(&chat("a")).is_none());
    assert_eq!(rig.admit(Admission::new(chat("a"), 10)).done().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(rig.pool.set_budget(5).unwrap_err().kind(), ErrorKind::Closed);
    let pool = rig.pool.clone();
    let kinds = rig
        .exec
        .start(async move {
            [
                pool.evict(&chat("a"), true).await.unwrap_err().kind(),
                pool.trim().await.unwrap_err().kind(),
                pool.make_room(1, None).await.unwrap_err().kind(),
                pool.sweep().await.unwrap_err().kind(),
                pool.pause().await.unwrap_err().kind(),
            ]
        })
        .done();
    assert_eq!(kinds, [ErrorKind::Closed; 5]);
    assert_eq!(rig.pool.forget(&chat("a")), None);
    drop(rig.pool.charge_external(5));
    rig.check();
}

#[test]
fn the_last_event_is_closed() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    let mut events = rig.pool.events(16);
    close(&rig).done().unwrap();
    let all: Vec<Received> = std::iter::from_fn(|| events.try_next()).collect();
    assert_eq!(all.last(), Some(&Received::Event(PoolEvent::Closed)));
    assert_eq!(rig.exec.start(async move { events.next().await }).done(), None);
}

#[test]
fn what_ends_after_the_pool_is_no_event_any_more() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 10);
    let paused = rig.paused();
    let mut events = rig.pool.events(16);
    close(&rig).done().unwrap();
    drop((lease, paused));
    rig.run();
    let all: Vec<Received> = std::iter::from_fn(|| events.try_next()).collect();
    assert_eq!(all.last(), Some(&Received::Event(PoolEvent::Closed)));
    assert_eq!(rig.exec.start(async move { events.next().await }).done(), None);
}

#[test]
fn dropping_the_last_handle_closes_in_the_background() {
    let rig = Rig::new(100);
    let lease = rig.leased(&chat("a"), 10);
    rig.resident(&chat("b"), 10);
    let Rig { pool, exec, table, memory, .. } = rig;
    drop(pool);
    exec.run();
    assert!(table.lock().unwrap().is_empty());
    assert!(lease.is_detached());
    drop(lease);
    exec.run();
    assert_eq!(memory.lock().unwrap().cache, 0);
}

#[test]
fn a_close_whose_future_is_dropped_goes_on() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    let gate = rig.gate_release(&chat("a"));
    let closing = close(&rig);
    rig.run();
    closing.leave();
    gate.open();
    rig.run();
    assert!(rig.keys().is_empty());
    close(&rig).done().unwrap();
}

// ---- pause ----

struct Hook {
    name: &'static str,
    log: Arc<Mutex<Vec<String>>>,
    fails: bool,
}

impl Quiesce for Hook {
    fn quiesce(&self) -> BoxFuture<'static, Result<()>> {
        self.log.lock().unwrap().push(format!("quiesce {}", self.name));
        let fails = self.fails;
        Box::pin(async move { if fails { Err(Error::new(ErrorKind::Backend, "it cannot stop")) } else { Ok(()) } })
    }

    fn resume(&self) {
        self.log.lock().unwrap().push(format!("resume {}", self.name));
    }
}

fn with_hook(rig: &Rig, name: &'static str, fails: bool) {
    let hook = Arc::new(Hook { name, log: rig.log.clone(), fails });
    rig.admit(Admission::new(chat(name), 10).quiesce(hook)).done().unwrap();
}

#[test]
fn p48_pause_quiesces_in_the_order_of_keys_and_resumes_when_dropped() {
    let rig = Rig::new(100);
    for name in ["c", "a", "b"] {
        with_hook(&rig, name, false);
    }
    rig.log();
    let paused = rig.paused();
    assert_eq!(rig.log(), ["quiesce chat:a", "quiesce chat:b", "quiesce chat:c"].map(|line| line.replace("chat:", "")));
    assert!(rig.status().paused);
    assert_eq!(paused.quiesced().count(), 3);
    let waiting = rig.admit(Admission::new(chat("new"), 10));
    let impatient = rig.admit(Admission::new(chat("impatient"), 10).no_room(NoRoom::LoadAnyway));
    rig.run();
    assert!(!waiting.is_done() && !impatient.is_done(), "new loads are held back");
    assert!(rig.pool.begin_use(&chat("a")).is_some(), "residents stay leasable");
    let refused = rig.admit(Admission::new(chat("refusing"), 10).no_room(NoRoom::Refuse)).done().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    drop(paused);
    waiting.done().unwrap();
    impatient.done().unwrap();
    assert_eq!(rig.log()[..3], ["resume c", "resume b", "resume a"]);
}

#[test]
fn p48_pause_waits_for_loads_and_releases_and_undoes_itself_when_interrupted() {
    let rig = Rig::new(100);
    with_hook(&rig, "a", false);
    let (gate, loading) = rig.admit_gated(Admission::new(chat("x"), 10), true);
    rig.run();
    let pool = rig.pool.clone();
    let pausing = rig.exec.start(async move { pool.pause().await });
    assert!(!pausing.is_done());
    let waiting = rig.admit(Admission::new(chat("y"), 10));
    rig.run();
    assert!(!waiting.is_done());
    pausing.leave();
    waiting.done().unwrap();
    assert!(!rig.status().paused);
    gate.open();
    loading.done().unwrap();
    // A hook that fails half-way.
    with_hook(&rig, "b", true);
    rig.log();
    let pool = rig.pool.clone();
    let error = rig.exec.start(async move { pool.pause().await }).done().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Backend);
    assert_eq!(rig.log(), ["quiesce a", "quiesce b", "resume b", "resume a"]);
    assert!(!rig.status().paused);
}

#[test]
fn after_a_pause_those_who_never_wait_do_not_stand_behind_those_who_do() {
    let rig = Rig::new(100);
    let _lease = rig.leased(&chat("busy"), 60);
    let paused = rig.paused();
    let waiting = rig.admit(Admission::new(chat("patient"), 60));
    let anyway = rig.admit(Admission::new(chat("impatient"), 60).no_room(NoRoom::LoadAnyway));
    rig.run();
    drop(paused);
    anyway.done().unwrap();
    assert!(!waiting.is_done());
}

#[test]
fn after_a_pause_one_that_is_refused_does_not_start_another_twice() {
    let rig = Rig::with(100, |options| options.physical_limit_bytes = Some(100));
    let _lease = rig.leased(&chat("busy"), 60);
    let paused = rig.paused();
    let too_large = rig.admit(Admission::new(chat("a"), 50).no_room(NoRoom::LoadAnyway));
    let fits = rig.admit(Admission::new(chat("b"), 10).no_room(NoRoom::LoadAnyway));
    rig.run();
    drop(paused);
    assert_eq!(too_large.done().unwrap_err().kind(), ErrorKind::BudgetExceeded);
    fits.done().unwrap();
    rig.run();
    assert_eq!((rig.status().pending_bytes, rig.status().used_bytes), (0, 70));
    // Nothing runs any more, so both end.
    drop(rig.paused());
    close(&rig).done().unwrap();
}

#[test]
fn pauses_nest() {
    let rig = Rig::new(100);
    let one = rig.paused();
    let two = rig.paused();
    let waiting = rig.admit(Admission::new(chat("a"), 10));
    rig.run();
    drop(one);
    rig.run();
    assert!(!waiting.is_done());
    drop(two);
    waiting.done().unwrap();
}

#[test]
fn section9_close_while_paused() {
    let rig = Rig::new(100);
    rig.resident(&chat("a"), 10);
    let paused = rig.paused();
    let parked = rig.admit(Admission::new(chat("b"), 10));
    rig.run();
    close(&rig).done().unwrap();
    assert_eq!(parked.done().unwrap_err().kind(), ErrorKind::Closed);
    drop(paused);
    rig.run();
    assert!(rig.keys().is_empty());
}
