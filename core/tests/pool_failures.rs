//! Hazard: failures, panics and bad input. P28, P47; the traps of section 9 about failing loads and releases; A39, D9; the
//! "Bad input" list of issue 3. After each, the account is exact and the pool usable.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod pool_support;
use std::sync::Arc;

use hob::pool::{Admission, Key, Kind, LoadContext, Loaded, Origin, Pool, PoolEvent, PoolOptions, Received, Token};
use hob::{BoxFuture, Error, ErrorKind, Result};
use pool_support::*;

#[test]
fn section9_a_load_that_fails_after_its_victims_went() {
    let rig = Rig::new(100);
    rig.resident(&chat("victim"), 60);
    let (gate, failing) = rig.admit_gated(Admission::new(chat("a"), 60), true);
    let joined = rig.admit(Admission::new(chat("a"), 60).in_use());
    let waiting = rig.admit(Admission::new(chat("b"), 60));
    rig.run();
    gate.fail();
    for caller in [failing, joined] {
        let error = caller.done().unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Io, "the disk is gone"), "everybody gets the load's own error");
    }
    waiting.done().unwrap();
    assert_eq!(rig.keys(), ["chat:b"]);
    assert_eq!(rig.status().counters.failed_loads, 1);
    assert_eq!(rig.memory.lock().unwrap().cache, 0);
    assert_eq!(rig.admit(Admission::new(chat("a"), 60)).done().unwrap().origin, Origin::Loaded, "it stays retriable");
}

#[test]
fn a39_a_failed_first_load_is_drained_and_leaves_nothing() {
    let rig = Rig::new(100);
    let (gate, failing) = rig.admit_gated(Admission::new(chat("a"), 60), true);
    rig.run();
    gate.fail();
    failing.done().unwrap_err();
    assert!(rig.keys().is_empty());
    assert_eq!(rig.held(), 0, "what it had allocated at 80 % is back");
}

#[test]
fn a_panicking_load_is_a_callback_error_whether_called_or_polled() {
    quietly(|| {
        let rig = Rig::new(100);
        let (gate, polled) = rig.admit_gated(Admission::new(chat("a"), 60), true);
        rig.run();
        gate.panic();
        let error = polled.done().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Callback);
        assert!(!error.full_message().contains("scripted"), "a panic's text may hold a user's");
        let load = |_: LoadContext| -> BoxFuture<'static, Result<Loaded>> { panic!("scripted") };
        let called = rig.exec.start(rig.pool.admit(Admission::new(chat("a"), 60), load, rig.release(&chat("a"))));
        assert_eq!(called.done().unwrap_err().kind(), ErrorKind::Callback);
        rig.check();
        assert_eq!(rig.status().used_bytes, 0);
        rig.resident(&chat("a"), 60);
    });
}

#[test]
fn section9_a_release_that_fails_or_panics_loses_its_entry_all_the_same() {
    quietly(|| {
        for panics in [false, true] {
            let rig = Rig::new(100);
            rig.resident(&chat("a"), 60);
            let mut events = rig.pool.events(16);
            let gate = rig.gate_release(&chat("a"));
            let pool = rig.pool.clone();
            let evict = rig.exec.start(async move { pool.evict(&chat("a"), false).await });
            rig.run();
            if panics {
                gate.panic();
            } else {
                gate.fail();
            }
            let error = evict.done().unwrap_err();
            assert_eq!(error.kind(), if panics { ErrorKind::Callback } else { ErrorKind::Io });
            assert!(error.message().starts_with("chat:a: its entry is gone, but"));
            let told = std::iter::from_fn(|| events.try_next())
                .any(|received| matches!(received, Received::Event(PoolEvent::ReleaseFailed { .. })));
            assert!(told);
            assert_eq!((rig.status().used_bytes, rig.status().counters.failed_releases), (0, 1));
            rig.check();
            rig.resident(&chat("a"), 60);
        }
    });
}

#[test]
fn a_victim_whose_release_fails_does_not_fail_the_newcomer() {
    quietly(|| {
        let rig = Rig::new(100);
        rig.resident(&chat("a"), 60);
        let gate = rig.gate_release(&chat("a"));
        let newcomer = rig.admit(Admission::new(chat("b"), 60));
        rig.run();
        gate.panic();
        newcomer.done().unwrap();
        assert_eq!(rig.keys(), ["chat:b"]);
    });
}

#[test]
fn a_panicking_drain_estimate_destructor_or_resume_changes_nothing() {
    quietly(|| {
        let rig = Rig::with(100, |options| options.drain = Some(Arc::new(|| panic!("scripted"))));
        rig.resident(&chat("a"), 60);
        rig.resident(&chat("b"), 60);
        let estimate = Admission::estimated(chat("c"), || -> BoxFuture<'static, Result<u64>> { panic!("scripted") });
        assert_eq!(rig.admit(estimate).done().unwrap_err().kind(), ErrorKind::Callback);
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("scripted");
            }
        }
        let bomb = Bomb;
        let release = move |_: Token| -> BoxFuture<'static, Result<()>> {
            let _armed = &bomb;
            Box::pin(async { Ok(()) })
        };
        // The closure's capture blows up when the action is consumed.
        let admitted = rig.exec.start(rig.pool.admit(Admission::new(chat("d"), 60), rig.load(), release));
        admitted.done().unwrap();
        rig.pool.forget(&chat("d")).unwrap();
        rig.run();
        rig.resident(&chat("a"), 100);
    });
}

#[test]
fn a_panicking_probe_is_as_good_as_none() {
    struct Broken;
    impl hob::pool::MemoryProbe for Broken {
        fn read(&self) -> hob::pool::MemoryReading {
            panic!("scripted")
        }
    }
    quietly(|| {
        let rig = Rig::with(100, |options| options.probe = Some(Arc::new(Broken)));
        let lease = rig.leased(&chat("a"), 60);
        let waiting = rig.admit(Admission::new(chat("b"), 60));
        rig.run();
        drop(lease);
        waiting.done().unwrap();
        assert_eq!(rig.status().memory, None);
    });
}

#[test]
fn an_executor_that_drops_its_tasks_leaves_the_account_exact() {
    let rig = Rig::new(100);
    rig.resident(&chat("victim"), 60);
    let _gate = rig.gate_release(&chat("victim"));
    let loading = rig.admit(Admission::new(chat("a"), 90));
    let waiting = rig.admit(Admission::new(chat("b"), 90));
    rig.run();
    rig.exec.die();
    rig.check();
    let status = rig.status();
    assert_eq!((status.pending_bytes, status.releasing_bytes), (0, 0));
    drop((loading, waiting));
    rig.check();
    // And whoever comes later is told, not left hanging.
    let mut late = Box::pin(rig.pool.admit(Admission::new(chat("c"), 10), rig.load(), rig.release(&chat("c"))));
    let poll = late.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert!(matches!(poll, std::task::Poll::Ready(Err(error)) if error.kind() == ErrorKind::Internal));
    rig.check();
    use std::future::Future as _;
}

// ---- bad input ----

#[test]
fn bad_keys_are_refused_before_anything_happens() {
    let rig = Rig::new(100);
    let bad =
        [chat(""), embedder(""), Key::other("", "x"), Key::other("a:b", "x"), Key::other("chat", "x"), Key::other("reranker", "x")];
    for key in bad {
        let error = rig.admit(Admission::new(key.clone(), 10)).done().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{key}");
        assert!(!error.message().contains('\n'));
        assert!(rig.pool.begin_use(&key).is_none());
    }
    assert!(rig.log().is_empty());
    assert_eq!(Kind::from_name("embedder"), Kind::Embedder);
    assert_eq!(Kind::from_name("onnx").as_str(), "onnx");
}

#[test]
fn a_budget_of_zero_is_refused() {
    let error = Pool::new(PoolOptions::new(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("budget_bytes"));
    let rig = Rig::new(100);
    assert_eq!(rig.pool.set_budget(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(rig.pool.budget(), 100);
}

#[test]
fn costs_at_the_edge_of_u64_neither_overflow_nor_confuse() {
    let rig = Rig::new(u64::MAX);
    let _one = rig
        .exec
        .start(rig.pool.admit(Admission::new(chat("a"), u64::MAX).in_use(), huge(), rig.release(&chat("a"))))
        .done()
        .unwrap();
    let anyway = Admission::new(chat("b"), u64::MAX).no_room(hob::NoRoom::LoadAnyway).in_use();
    let two = rig.exec.start(rig.pool.admit(anyway, huge(), rig.release(&chat("b")))).done().unwrap();
    let charge = rig.pool.charge_external(u64::MAX);
    assert_eq!(rig.status().used_bytes, u64::MAX, "saturated where it is shown");
    rig.check();
    assert_eq!(rig.pool.plan(&chat("c"), u64::MAX, None).free_bytes, 0);
    drop((two, charge));
    rig.check();

    fn huge() -> impl FnOnce(LoadContext) -> BoxFuture<'static, Result<Loaded>> + Send + 'static {
        |_| Box::pin(async { Ok(Loaded::unmeasured()) })
    }
}

#[test]
fn a_cost_of_zero_is_an_entry_that_is_never_a_victim() {
    let rig = Rig::new(10);
    rig.resident(&chat("free"), 0);
    rig.resident(&chat("a"), 10);
    rig.resident(&chat("b"), 10);
    assert_eq!(rig.keys(), ["chat:b", "chat:free"]);
}

#[test]
fn d9_a_load_told_to_stop_at_its_very_end_leaves_no_model() {
    let rig = Rig::new(100);
    let load = move |context: LoadContext| -> BoxFuture<'static, Result<Loaded>> {
        Box::pin(async move {
            context.progress.report(1.0);
            Err(Error::new(ErrorKind::Callback, "the host asked to stop"))
        })
    };
    let mut events = rig.pool.events(16);
    let result = rig.exec.start(rig.pool.admit(Admission::new(chat("a"), 10), load, rig.release(&chat("a")))).done();
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Callback);
    assert!(rig.keys().is_empty());
    let percents: Vec<u8> = std::iter::from_fn(|| events.try_next())
        .filter_map(
            |received| if let Received::Event(PoolEvent::LoadProgress { percent, .. }) = received { Some(percent) } else { None },
        )
        .collect();
    assert_eq!(percents, [100]);
}

#[test]
fn progress_out_of_range_is_clamped_and_late_reports_do_nothing() {
    let rig = Rig::new(100);
    let kept = Arc::new(std::sync::Mutex::new(None));
    let load = {
        let kept = kept.clone();
        move |context: LoadContext| -> BoxFuture<'static, Result<Loaded>> {
            Box::pin(async move {
                for fraction in [f32::NAN, -1.0, 0.5, 0.501, 7.0] {
                    context.progress.report(fraction);
                }
                *kept.lock().unwrap() = Some(context.progress.clone());
                Ok(Loaded::unmeasured())
            })
        }
    };
    let mut events = rig.pool.events(16);
    rig.exec.start(rig.pool.admit(Admission::new(chat("a"), 10), load, rig.release(&chat("a")))).done().unwrap();
    kept.lock().unwrap().take().unwrap().report(0.1);
    let percents: Vec<u8> = std::iter::from_fn(|| events.try_next())
        .filter_map(
            |received| if let Received::Event(PoolEvent::LoadProgress { percent, .. }) = received { Some(percent) } else { None },
        )
        .collect();
    assert_eq!(percents, [50, 100]);
}
