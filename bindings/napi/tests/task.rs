//! The executor without a thread: it needs nothing of JavaScript, so it is tested alone.

#![allow(clippy::unwrap_used, clippy::panic, dead_code, unreachable_pub, reason = "a test, of a private module")]

#[path = "../src/task.rs"]
mod task;

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::task::{Poll, Waker};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

type Seen = Arc<Mutex<Vec<ThreadId>>>;
type Place = Arc<Mutex<Option<Waker>>>;

/// A future that is ready at its `last` poll; it tells each poll's thread and leaves its waker.
fn polls(last: usize) -> (impl Future<Output = ()> + Send, Seen, Place) {
    let (seen, place) = (Seen::default(), Place::default());
    let (seeing, placing) = (Arc::clone(&seen), Arc::clone(&place));
    let future = poll_fn(move |context| {
        let mut seen = seeing.lock();
        seen.push(thread::current().id());
        if seen.len() >= last {
            return Poll::Ready(());
        }
        *placing.lock() = Some(context.waker().clone());
        Poll::Pending
    });
    (future, seen, place)
}

#[test]
fn a_task_is_polled_where_it_is_started_and_then_where_it_is_woken() {
    let (future, seen, waker) = polls(2);
    task::start(Box::pin(future));
    assert_eq!(*seen.lock(), [thread::current().id()]);
    let woken = waker.lock().take().unwrap();
    let other = thread::spawn(move || {
        woken.wake_by_ref();
        // It is over: nothing happens.
        woken.wake();
        thread::current().id()
    });
    let other = other.join().unwrap();
    assert_eq!(*seen.lock(), [thread::current().id(), other]);
}

#[test]
fn a_wake_during_a_poll_is_another_poll_by_the_same_thread() {
    let count = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&count);
    task::start(Box::pin(poll_fn(move |context| {
        // From another thread, which must not poll: this one does.
        let waker = context.waker().clone();
        thread::spawn(move || waker.wake()).join().unwrap();
        if counting.fetch_add(1, Ordering::SeqCst) == 2 { Poll::Ready(()) } else { Poll::Pending }
    })));
    assert_eq!(count.load(Ordering::SeqCst), 3);
}

#[test]
fn what_a_poll_wakes_is_polled_behind_it() {
    let (inner, seen, waker) = polls(2);
    task::start(Box::pin(inner));
    let seeing = Arc::clone(&seen);
    let (sender, polled) = channel();
    task::start(Box::pin(poll_fn(move |_| {
        // Out of its place first: the poll that it causes would want that.
        let waker = waker.lock().take().unwrap();
        waker.wake();
        sender.send(seeing.lock().len()).unwrap();
        Poll::Ready(())
    })));
    assert_eq!(polled.recv().unwrap(), 1, "not while the other one is at its poll");
    assert_eq!(seen.lock().len(), 2, "but before its start returns");
}

#[test]
fn a_panic_ends_the_task_and_drops_what_it_held() {
    let held = Arc::new(());
    let inside = Arc::clone(&held);
    task::start(Box::pin(poll_fn(move |_| {
        let _ = &inside;
        panic!("in a poll")
    })));
    assert_eq!(Arc::strong_count(&held), 1);
}
