//! Calls without an executor's thread: a future is polled where it is started, and from then on where it is woken.
//!
//! A thread of their own would be one hop on the way in and one on the way out, some 20 microseconds each. The core takes a request to
//! its end on the engine's thread; its caller's future hands it over and fetches the answer. So JavaScript's thread does the one, and
//! the engine's thread the other and sends the letter. None of it waits on the event loop: a request goes on while that is busy.
//!
//! It asks of a future that each poll is short and never blocks, wherever it runs; and of those who wake that they hold no lock
//! meanwhile, as everywhere in the core.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use hob::BoxFuture;
use parking_lot::Mutex;

/// Nobody polls; a wake does.
const REST: u8 = 0;
/// Somebody polls.
const POLLED: u8 = 1;
/// Somebody polls and will once more.
const WOKEN: u8 = 2;

struct Task {
    state: AtomicU8,
    /// Taken out at its end. Only who set `POLLED` locks it.
    work: Mutex<Option<BoxFuture<'static, ()>>>,
}

/// Starts a future here and now.
pub(crate) fn start(work: BoxFuture<'static, ()>) {
    run(Arc::new(Task { state: AtomicU8::new(POLLED), work: Mutex::new(Some(work)) }));
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let next = |state| match state {
            REST => Some(POLLED),
            POLLED => Some(WOKEN),
            _ => None,
        };
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) == Ok(REST) {
            run(self);
        }
    }
}

thread_local! {
    /// Whether this thread is at a task.
    static BUSY: Cell<bool> = const { Cell::new(false) };
    /// What that task has woken.
    static BEHIND: RefCell<VecDeque<Arc<Task>>> = const { RefCell::new(VecDeque::new()) };
}

/// Polls a task, or puts it behind the one that this thread is at: that one may hold anything, and a chain of wakes is no recursion.
fn run(task: Arc<Task>) {
    if !BUSY.replace(true) {
        let mut next = Some(task);
        while let Some(task) = next {
            task.poll();
            next = BEHIND.with_borrow_mut(VecDeque::pop_front);
        }
        BUSY.set(false);
    } else {
        BEHIND.with_borrow_mut(|behind| behind.push_back(task));
    }
}

impl Task {
    fn poll(self: &Arc<Self>) {
        let waker = Waker::from(Arc::clone(self));
        loop {
            let mut place = self.work.lock();
            let Some(work) = place.as_mut() else { return };
            let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(&mut Context::from_waker(&waker))));
            if !matches!(polled, Ok(Poll::Pending)) {
                // At its end, or it panicked: then its call is settled by what is dropped with it.
                let over = place.take();
                drop(place);
                let _ = catch_unwind(AssertUnwindSafe(|| drop(over)));
                return;
            }
            drop(place);
            if self.state.compare_exchange(POLLED, REST, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return;
            }
            // Woken meanwhile. Nobody else changes this state.
            self.state.store(POLLED, Ordering::Release);
        }
    }
}
