//! Hazard: admission. Spec 1.3, P1-P13, the 14 pool cases of 1.13, and the traps of section 9 that speak of admissions.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use std::sync::{Arc, Weak};

use hob::pool::{Admission, EntryState, IdlePolicy, Key, Loaded, NoRoom, Origin, Pool, PoolOptions, Token};
use hob::{BoxFuture, Error, ErrorKind, Result};
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
