//! Uses counted without the mutex (`loan.rs`): what they leave behind is what the mutex would have written. Their races are in
//! `pool_shuttle.rs`. Every test uses its entries twice, for the first begin lends and only the next ones do without the mutex.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used)]

use std::future::Future;

mod pool_support;
use hob::pool::{Admission, IdlePolicy, Key};
use pool_support::*;

fn names(count: usize) -> Vec<Key> {
    (0..count).map(|index| chat(&format!("m{index:03}"))).collect()
}

fn use_each(rig: &Rig, keys: &[Key]) {
    for key in keys {
        drop(rig.pool.begin_use(key).unwrap());
    }
}

/// Keys in the order in which room would be made.
fn order(rig: &Rig, count: u64) -> Vec<Key> {
    rig.pool.plan(&reranker("newcomer"), count, None).evict
}

#[test]
fn invariant_m_the_lru_order_is_that_of_the_last_ends() {
    let rig = Rig::new(4);
    let keys = names(4);
    for key in &keys {
        rig.resident(key, 1);
    }
    use_each(&rig, &keys);
    // Overlapping uses: what counts is where a use ends, not where it begins.
    let (two, zero) = (rig.pool.begin_use(&keys[2]).unwrap(), rig.pool.begin_use(&keys[0]).unwrap());
    use_each(&rig, &[keys[3].clone(), keys[1].clone()]);
    drop(zero);
    drop(two);
    assert_eq!(order(&rig, 4), [3, 1, 0, 2].map(|at: usize| keys[at].clone()));
    rig.check();
}

#[test]
fn more_hot_entries_than_can_be_lent_are_counted_and_ordered_all_the_same() {
    let rig = Rig::new(300);
    let mut keys = names(300);
    for key in &keys {
        rig.resident(key, 1);
    }
    use_each(&rig, &keys);
    keys.reverse();
    use_each(&rig, &keys);
    use_each(&rig, &keys);
    assert_eq!(order(&rig, 300), keys);
    let status = rig.status();
    assert_eq!(status.counters.hits, 900);
    assert!(status.entries.iter().all(|entry| entry.uses == 0));
    rig.check();
}

#[test]
fn i6_the_countdown_runs_from_the_end_of_the_use_though_its_timer_was_set_before() {
    let rig = Rig::with(10, |options| options.idle = IdlePolicy::AfterSeconds(30));
    rig.resident(&chat("a"), 5);
    drop(rig.pool.begin_use(&chat("a")).unwrap());
    rig.advance(secs(20));
    drop(rig.pool.begin_use(&chat("a")).unwrap());
    rig.advance(secs(30));
    assert!(rig.pool.peek(&chat("a")).is_some(), "30 s are not over 30 s");
    rig.advance(secs(1));
    assert!(rig.pool.peek(&chat("a")).is_none());
    assert_eq!(rig.status().counters.idle_unloads, 1);
}

#[test]
fn a_long_use_outlives_the_timer_and_its_countdown_follows_it() {
    let rig = Rig::with(10, |options| options.idle = IdlePolicy::AfterSeconds(30));
    rig.resident(&chat("a"), 5);
    let lease = rig.pool.begin_use(&chat("a")).unwrap();
    rig.advance(secs(1_000));
    assert!(!lease.is_detached());
    drop(lease);
    rig.advance(secs(30));
    assert!(rig.pool.peek(&chat("a")).is_some());
    rig.advance(secs(1));
    assert!(rig.pool.peek(&chat("a")).is_none());
}

#[test]
fn the_idle_policy_of_a_use_ends_with_the_next_use() {
    let rig = Rig::with(10, |options| options.idle = IdlePolicy::AfterSeconds(600));
    rig.resident(&chat("a"), 5);
    drop(rig.pool.begin_use_with(&chat("a"), IdlePolicy::AfterSeconds(30)).unwrap());
    drop(rig.pool.begin_use(&chat("a")).unwrap());
    assert_eq!(rig.status().entry(&chat("a")).unwrap().idle, IdlePolicy::AfterSeconds(600));
    // And the one begun last wins, also over a use that is open already.
    let open = rig.pool.begin_use(&chat("a")).unwrap();
    drop(rig.pool.begin_use_with(&chat("a"), IdlePolicy::AfterSeconds(40)).unwrap());
    drop(open);
    assert_eq!(rig.status().entry(&chat("a")).unwrap().idle, IdlePolicy::AfterSeconds(40));
}

#[test]
fn i14_a_use_makes_an_accelerated_countdown_void() {
    let rig = Rig::with(10, |options| options.idle = IdlePolicy::AfterSeconds(600));
    rig.resident(&chat("a"), 5);
    use_each(&rig, &[chat("a"), chat("a")]);
    assert_eq!(rig.pool.accelerate_idle(secs(5)), 1);
    use_each(&rig, &[chat("a"), chat("a")]);
    rig.advance(secs(590));
    assert!(rig.pool.peek(&chat("a")).is_some());
}

#[test]
fn immediately_unloads_at_the_last_end_and_only_there() {
    let rig = Rig::with(10, |options| options.idle = IdlePolicy::Immediately);
    rig.resident(&chat("a"), 5);
    let one = rig.pool.begin_use(&chat("a")).unwrap();
    let two = rig.pool.begin_use(&chat("a")).unwrap();
    drop(one);
    assert!(!two.is_detached());
    drop(two);
    assert!(rig.pool.begin_use(&chat("a")).is_none(), "found after its last use");
    rig.run();
    assert!(rig.status().entries.is_empty());
}

#[test]
fn a_waiter_is_served_at_the_end_of_a_use_that_was_lent_before_it_came() {
    let rig = Rig::new(10);
    rig.resident(&chat("a"), 6);
    let leases = [rig.pool.begin_use(&chat("a")).unwrap(), rig.pool.begin_use(&chat("a")).unwrap()];
    let waiting = rig.admit(Admission::new(embedder("b"), 7));
    rig.run();
    assert!(!waiting.is_done());
    for lease in leases {
        drop(lease);
    }
    rig.run();
    waiting.done().unwrap();
    assert!(rig.pool.begin_use(&chat("a")).is_none());
}

#[test]
fn a_waiter_is_served_at_the_end_of_a_use_that_began_while_it_waited() {
    let rig = Rig::new(10);
    rig.resident(&chat("a"), 6);
    let first = rig.pool.begin_use(&chat("a")).unwrap();
    let waiting = rig.admit(Admission::new(embedder("b"), 7));
    rig.run();
    let second = rig.pool.begin_use(&chat("a")).unwrap();
    let third = rig.pool.begin_use(&chat("a")).unwrap();
    for lease in [first, third, second] {
        assert!(!waiting.is_done());
        drop(lease);
        rig.exec.run();
    }
    waiting.done().unwrap();
}

#[test]
fn p13_an_end_too_many_is_told_whether_lent_or_not() {
    let rig = Rig::new(10);
    rig.resident(&chat("a"), 5);
    let token = rig.pool.begin_use_counted(&chat("a")).unwrap();
    assert!(rig.pool.end_use(token));
    assert!(!rig.pool.end_use(token), "lent, and no use is open");
    assert_eq!(rig.status().counters.unbalanced_ends, 1);
    assert!(!rig.pool.end_use(token), "not lent any more");
    let status = rig.status();
    assert_eq!(status.counters.unbalanced_ends, 2);
    assert_eq!(status.entry(&chat("a")).unwrap().uses, 0);
}

#[test]
fn a_pool_whose_executor_died_is_freed_with_its_entries() {
    // Entries know their pool; that circle must not outlive the close, whatever becomes of the close's own task.
    let rig = Rig::new(10);
    rig.resident(&chat("a"), 5);
    let lease = rig.leased(&embedder("b"), 5);
    rig.exec.die();
    let (memory, pool) = (std::sync::Arc::downgrade(&rig.memory), rig.pool.clone());
    drop(rig);
    let mut closing = Box::pin(async move { pool.close().await });
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(closing.as_mut().poll(&mut context).is_ready(), "close waits for a task that is gone");
    drop(closing);
    drop(lease);
    assert!(memory.upgrade().is_none(), "the pool and what its entries captured are still there");
}

#[test]
fn a_use_with_a_longer_policy_of_its_own_does_not_put_off_the_next_uses_countdown() {
    let rig = Rig::with(10, |options| options.idle = IdlePolicy::AfterSeconds(30));
    rig.resident(&chat("a"), 5);
    let lease = rig.pool.begin_use(&chat("a")).unwrap();
    // The timer finds nothing to count and ends.
    rig.advance(secs(31));
    drop(rig.pool.begin_use_with(&chat("a"), IdlePolicy::AfterSeconds(600)).unwrap());
    drop(rig.pool.begin_use(&chat("a")).unwrap());
    drop(lease);
    rig.advance(secs(31));
    assert!(rig.pool.peek(&chat("a")).is_none());
}

#[test]
fn a_use_with_a_policy_of_its_own_does_not_keep_the_next_one_from_unloading_immediately() {
    let rig = Rig::with(10, |options| options.idle = IdlePolicy::Immediately);
    rig.resident(&chat("a"), 5);
    let first = rig.pool.begin_use_with(&chat("a"), IdlePolicy::Never).unwrap();
    let second = rig.pool.begin_use(&chat("a")).unwrap();
    drop(first);
    drop(second);
    assert!(rig.pool.peek(&chat("a")).is_none());
}

#[test]
fn a_use_with_a_policy_of_its_own_is_counted_with_those_that_are_open() {
    let rig = Rig::new(10);
    rig.resident(&chat("a"), 5);
    let plain = rig.pool.begin_use(&chat("a")).unwrap();
    let own = rig.pool.begin_use_with(&chat("a"), IdlePolicy::AfterSeconds(40)).unwrap();
    drop(plain);
    assert_eq!(rig.status().entry(&chat("a")).unwrap().uses, 1);
    drop(own);
    let status = rig.status();
    assert_eq!((status.entry(&chat("a")).unwrap().uses, status.counters.unbalanced_ends), (0, 0));
}
