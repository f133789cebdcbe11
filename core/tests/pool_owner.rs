//! Hazard: the owner protocol, P20-P30, with the smallest owner there can be: a table of engines by token. The engine's own
//! tests run the same cases on real models; here the pool's side of them is pinned.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

mod pool_support;
use hob::pool::{Admission, Lease};
use hob::{ErrorKind, Result};
use pool_support::*;

/// One request: a hit, or a fresh admission; computes on the table's engine; ends its use whatever happens (P28).
async fn request(
    pool: hob::Pool,
    admitting: impl Future<Output = Result<Lease>>,
    key: hob::Key,
    compute: impl FnOnce(&Lease) -> Result<()>,
) -> Result<()> {
    let lease = match pool.begin_use(&key) {
        Some(lease) => lease,
        None => admitting.await?,
    };
    compute(&lease)
}

fn serve(rig: &Rig, key: &hob::Key, bytes: u64, fails: bool) -> Pending<Result<()>> {
    let admitting = rig.pool.acquire(Admission::new(key.clone(), bytes), rig.load(), rig.release(key));
    let table = rig.table.clone();
    let compute = move |lease: &Lease| {
        assert!(table.lock().unwrap().contains_key(&lease.token()), "never compute on a model the pool does not count (P21)");
        if fails { Err(hob::Error::new(ErrorKind::Backend, "it broke")) } else { Ok(()) }
    };
    rig.exec.start(request(rig.pool.clone(), admitting, key.clone(), compute))
}

fn evict(rig: &Rig, key: &hob::Key, force: bool) {
    let (pool, key) = (rig.pool.clone(), key.clone());
    rig.exec.start(async move { pool.evict(&key, force).await }).done().unwrap();
}

#[test]
fn p20_p21_cold_then_hit() {
    let rig = Rig::new(100);
    serve(&rig, &reranker("r"), 60, false).done().unwrap();
    serve(&rig, &reranker("r"), 60, false).done().unwrap();
    let status = rig.status();
    assert_eq!((status.counters.loads, status.counters.hits), (1, 1));
    assert_eq!(status.entry(&reranker("r")).unwrap().uses, 0);
}

#[test]
fn p28_the_use_ends_on_failure_too_so_the_mutant_that_ends_it_only_on_success_dies() {
    let rig = Rig::new(100);
    serve(&rig, &reranker("r"), 60, true).done().unwrap_err();
    serve(&rig, &reranker("r"), 60, true).done().unwrap_err();
    assert_eq!(rig.status().entry(&reranker("r")).unwrap().uses, 0);
    serve(&rig, &chat("c"), 60, false).done().unwrap();
    assert_eq!(rig.keys(), ["chat:c"], "it could be evicted");
}

#[test]
fn p21_a_refused_hit_in_both_orders() {
    let rig = Rig::new(100);
    // The release has run.
    serve(&rig, &reranker("r"), 60, false).done().unwrap();
    evict(&rig, &reranker("r"), false);
    serve(&rig, &reranker("r"), 60, false).done().unwrap();
    // The release is still under way.
    let gate = rig.gate_release(&reranker("r"));
    let pool = rig.pool.clone();
    let evicting = rig.exec.start(async move { pool.evict(&reranker("r"), false).await });
    rig.run();
    let again = serve(&rig, &reranker("r"), 60, false);
    assert!(!again.is_done(), "it loads afresh, when the old bytes are back");
    gate.open();
    evicting.done().unwrap();
    again.done().unwrap();
    assert_eq!(rig.status().counters.loads, 3);
    assert_eq!((rig.table.lock().unwrap().len(), rig.memory.lock().unwrap().peak), (1, 60));
}

#[test]
fn p22_swap_and_swap_back_and_p23_into_a_failing_model() {
    let rig = Rig::new(100);
    for key in [reranker("a"), reranker("b"), reranker("a")] {
        serve(&rig, &key, 60, false).done().unwrap();
        assert_eq!(rig.keys(), [key.to_string()]);
    }
    let (gate, failing) = rig.admit_gated(Admission::new(reranker("bad"), 60), true);
    rig.run();
    gate.fail();
    failing.done().unwrap_err();
    assert!(rig.keys().is_empty(), "the old one stays gone");
    serve(&rig, &reranker("a"), 60, false).done().unwrap();
    assert_eq!(rig.memory.lock().unwrap().peak, 60);
}

#[test]
fn p24_p25_a_stale_release_does_nothing() {
    let rig = Rig::new(100);
    let old = rig.resident(&reranker("r"), 60);
    let stale = rig.release(&reranker("r"));
    rig.pool.forget(&reranker("r"));
    rig.table.lock().unwrap().remove(&old);
    let new = rig.resident(&reranker("r"), 60);
    rig.exec.start(stale(old)).done().unwrap();
    assert!(rig.table.lock().unwrap().contains_key(&new));
}

#[test]
fn p26_release_before_install_the_request_runs_on_its_own_engine_and_drains_when_it_finishes() {
    let rig = Rig::new(100);
    let admitted = rig.admit(Admission::new(reranker("r"), 60).in_use()).done().unwrap();
    // The owner keeps its own reference for the request; the release comes before it installs.
    let engine = rig.table.lock().unwrap()[&admitted.token].clone();
    evict(&rig, &reranker("r"), true);
    let lease = admitted.lease.unwrap();
    assert!(lease.is_detached(), "so nothing is installed");
    assert_eq!(rig.memory.lock().unwrap().active, 60, "and the request computes");
    rig.log();
    drop(engine);
    drop(lease);
    rig.run();
    assert_eq!(rig.log(), ["drain"], "the orphan drain");
    assert_eq!(rig.held(), 0);
    assert!(rig.keys().is_empty());
}

#[test]
fn p29_a_request_parked_when_the_owner_stops_is_forgotten_after_it_installed() {
    let rig = Rig::new(100);
    let busy = rig.leased(&chat("busy"), 60);
    let parked = rig.admit(Admission::new(reranker("r"), 60));
    rig.run();
    // Stop forgets only what it holds: nothing yet.
    assert_eq!(rig.pool.forget(&reranker("r")), None);
    drop(busy);
    let token = parked.done().unwrap().token;
    assert_eq!(rig.pool.forget_token(token), Some(60));
    assert_eq!(rig.pool.forget_token(token), None);
}

#[test]
fn p30_admitting_under_the_owners_lock_may_release_the_owners_other_model() {
    // The owner's serialisation lock is held over the admission that evicts its embedder; the release must not need it.
    let rig = Rig::new(60);
    let lock = std::sync::Arc::new(tokio::sync::Mutex::new(()));
    rig.resident(&embedder("e"), 60);
    let admitting = rig.pool.acquire(Admission::new(reranker("r"), 60), rig.load(), rig.release(&reranker("r")));
    let held = lock.clone();
    let request = rig.exec.start(async move {
        let _serialised = held.lock().await;
        drop(admitting.await?);
        Ok::<(), hob::Error>(())
    });
    request.done().unwrap();
    assert_eq!(rig.keys(), ["reranker:r"]);
}

#[test]
fn p30_a_release_may_call_the_pool() {
    let rig = Rig::new(60);
    let pool = rig.pool.clone();
    let release = move |token: hob::pool::Token| -> hob::BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            // Re-entrant: no lock of the pool is held here.
            assert_eq!(pool.forget_token(token), None);
            let status = pool.status();
            assert_eq!(status.entries.len(), 2);
            assert!(pool.begin_use(&embedder("e")).is_none());
            Ok(())
        })
    };
    rig.exec.start(rig.pool.admit(Admission::new(embedder("e"), 60), rig.load(), release)).done().unwrap();
    rig.resident(&reranker("r"), 60);
    assert_eq!(rig.status().counters.failed_releases, 0);
}
