//! Hazard: real threads, the pool's own thread and the system's clock. A28, A41, invariant 11; futures polled by a plain
//! block_on, as a host without a runtime does. Nothing here sleeps; waits are on the pool itself.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use hob::pool::{Admission, IdlePolicy, Key, LoadContext, Loaded, Pool, PoolEvent, PoolOptions, Received, Token, unblock};
use hob::{BoxFuture, CancelToken, ErrorKind, Result};

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[derive(Clone, Default)]
struct Owner {
    table: Arc<Mutex<BTreeSet<Token>>>,
    held: Arc<AtomicU64>,
    peak: Arc<AtomicU64>,
    loads: Arc<AtomicUsize>,
}

impl Owner {
    async fn acquire(&self, pool: &Pool, key: &Key, bytes: u64) -> Result<hob::Lease> {
        let (one, two) = (self.clone(), self.clone());
        let load = move |context: LoadContext| -> BoxFuture<'static, Result<Loaded>> {
            unblock(move || {
                one.loads.fetch_add(1, Ordering::SeqCst);
                one.peak.fetch_max(one.held.fetch_add(bytes, Ordering::SeqCst) + bytes, Ordering::SeqCst);
                std::thread::yield_now();
                one.table.lock().unwrap().insert(context.token);
                Ok(Loaded::unmeasured())
            })
        };
        let release = move |token| -> BoxFuture<'static, Result<()>> {
            Box::pin(async move {
                assert!(two.table.lock().unwrap().remove(&token));
                two.held.fetch_sub(bytes, Ordering::SeqCst);
                Ok(())
            })
        };
        pool.acquire(Admission::new(key.clone(), bytes), load, release).await
    }
}

#[test]
fn a41_thirty_two_threads_one_load() {
    let pool = Pool::new(PoolOptions::new(100)).unwrap();
    let owner = Owner::default();
    std::thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let lease = block_on(owner.acquire(&pool, &Key::chat("a"), 60)).unwrap();
                assert!(owner.table.lock().unwrap().contains(&lease.token()));
            });
        }
    });
    assert_eq!(owner.loads.load(Ordering::SeqCst), 1);
    block_on(pool.close()).unwrap();
    assert_eq!(owner.held.load(Ordering::SeqCst), 0);
}

#[test]
fn a28_eight_threads_five_models_room_for_two() {
    let pool = Pool::new(PoolOptions::new(100)).unwrap();
    let owner = Owner::default();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (pool, owner) = (&pool, &owner);
            scope.spawn(move || {
                for round in 0..100 {
                    let key = Key::embedder((((thread * 7) ^ (round * 3)) % 5).to_string());
                    let lease = match pool.begin_use(&key) {
                        Some(lease) => lease,
                        None => block_on(owner.acquire(pool, &key, 45)).unwrap(),
                    };
                    assert!(!lease.is_detached() && owner.table.lock().unwrap().contains(&lease.token()));
                    // Now and then somebody gives up.
                    if round % 10 == 9 {
                        let key = Key::chat("left");
                        let mut future = Box::pin(owner.acquire(pool, &key, 45));
                        let _ = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    }
                }
            });
        }
    });
    pool.check_account().unwrap();
    assert!(owner.peak.load(Ordering::SeqCst) <= 100, "never more held than the budget");
    assert!(pool.status().entries.iter().all(|entry| entry.uses == 0));
    block_on(pool.close()).unwrap();
    assert_eq!((owner.held.load(Ordering::SeqCst), pool.status().used_bytes), (0, 0));
}

#[test]
fn invariant11_leases_may_end_on_any_thread_also_after_the_pool_is_gone() {
    let pool = Pool::new(PoolOptions::new(100)).unwrap();
    let owner = Owner::default();
    let lease = block_on(owner.acquire(&pool, &Key::chat("a"), 60)).unwrap();
    block_on(pool.close()).unwrap();
    drop(pool);
    std::thread::spawn(move || drop(lease)).join().unwrap();
}

#[test]
fn the_pools_own_timer_unloads_without_anybody_asking() {
    let mut options = PoolOptions::new(100);
    options.idle = IdlePolicy::Never;
    let pool = Pool::new(options).unwrap();
    let owner = Owner::default();
    drop(block_on(owner.acquire(&pool, &Key::chat("a"), 60)).unwrap());
    let mut events = pool.events(16);
    pool.set_default_idle(IdlePolicy::AfterSeconds(30));
    assert_eq!(pool.accelerate_idle(Duration::from_millis(1)), 1);
    loop {
        if let Some(Received::Event(PoolEvent::Unloaded { .. })) = block_on(events.next()) {
            break;
        }
    }
    assert_eq!(owner.held.load(Ordering::SeqCst), 0);
}

#[test]
fn deadlines_work_in_a_host_without_a_runtime() {
    let pool = Pool::new(PoolOptions::new(100)).unwrap();
    let owner = Owner::default();
    let _lease = block_on(owner.acquire(&pool, &Key::chat("a"), 60)).unwrap();
    let nothing = |_: LoadContext| -> BoxFuture<'static, Result<Loaded>> { Box::pin(async { Ok(Loaded::unmeasured()) }) };
    let release = |_| -> BoxFuture<'static, Result<()>> { Box::pin(async { Ok(()) }) };
    let admission = Admission::new(Key::chat("b"), 60).deadline(Instant::now() + Duration::from_millis(2));
    assert_eq!(block_on(pool.admit(admission, nothing, release)).unwrap_err().kind(), ErrorKind::Timeout);
    let token = CancelToken::new().with_deadline(Instant::now() + Duration::from_millis(2));
    let admission = Admission::new(Key::chat("b"), 60).cancel(token);
    assert_eq!(block_on(pool.admit(admission, nothing, release)).unwrap_err().kind(), ErrorKind::Timeout);
}

#[test]
fn the_last_handle_may_go_inside_a_task_of_the_pool() {
    // The pool's thread drops its own runtime here; that must neither block nor panic.
    let pool = Pool::new(PoolOptions::new(100)).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let inside = pool.clone();
    pool.spawn(async move {
        drop(inside);
        let _ = sender.send(());
    });
    drop(pool);
    receiver.recv().unwrap();
}
