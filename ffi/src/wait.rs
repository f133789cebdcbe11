//! Futures of the core on threads of C: blocking with a bound, and telling a host when to look again.

use std::ffi::c_void;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use hob::{CancelToken, Result};
use parking_lot::{Condvar, Mutex};

use crate::raw;

/// Gives back what a callback's `user_data` points to. Called exactly once, when the callback can no longer be called, on any
/// thread; also when the call that took the callback fails. May be NULL.
pub type hob_drop_fn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// Something is ready: call `next` again. Called on one of Hob's threads or inside a call of the host's own, possibly without need.
/// Must not block, and must only signal: of Hob's functions it may call those that release, free or cancel.
pub type hob_waker_fn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// A host's pointer and how it is given back.
pub(crate) struct UserData {
    pointer: *mut c_void,
    drop: hob_drop_fn,
}

// SAFETY: the header says that callbacks and their drop are called on any thread.
unsafe impl Send for UserData {}
// SAFETY: the same.
unsafe impl Sync for UserData {}

impl UserData {
    pub(crate) fn new(pointer: *mut c_void, drop: hob_drop_fn) -> Self {
        Self { pointer, drop }
    }

    pub(crate) fn pointer(&self) -> *mut c_void {
        self.pointer
    }
}

impl Drop for UserData {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: the host gave the pair; it is called here only.
            unsafe { drop(self.pointer) };
        }
    }
}

/// A host's waker.
pub(crate) struct HostWaker {
    function: unsafe extern "C" fn(user_data: *mut c_void),
    data: UserData,
}

/// Takes the triple, so that `drop` runs whatever happens next; `None` for no function.
pub(crate) fn host_waker(function: hob_waker_fn, data: UserData) -> Option<Arc<HostWaker>> {
    function.map(|function| Arc::new(HostWaker { function, data }))
}

/// Wakes a thread that waits in [`Signal::wait`], and the host.
#[derive(Default)]
pub(crate) struct Signal {
    ready: Mutex<bool>,
    changed: Condvar,
    host: Mutex<Option<Arc<HostWaker>>>,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        *self.ready.lock() = true;
        self.changed.notify_all();
        self.tell_host();
    }
}

impl Signal {
    /// Replaces the host's waker; the old one is dropped once it does not run any more.
    pub(crate) fn set_host(&self, waker: Option<Arc<HostWaker>>) {
        let old = std::mem::replace(&mut *self.host.lock(), waker);
        drop(old);
    }

    /// Calls the host's waker, with no lock held: it may release the very handle that holds this signal.
    pub(crate) fn tell_host(&self) {
        let host = self.host.lock().clone();
        if let Some(host) = host {
            // SAFETY: the host gave the pair; the clone keeps it until the call is over.
            unsafe { (host.function)(host.data.pointer()) };
        }
    }

    /// Polls until there is a value or the time is up. A `timeout_ms` below 0 waits without a bound, 0 looks once.
    pub(crate) fn wait<T>(self: &Arc<Self>, timeout_ms: i64, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Option<T> {
        let waker = Waker::from(Arc::clone(self));
        let mut context = Context::from_waker(&waker);
        let deadline = match u64::try_from(timeout_ms) {
            Ok(0) | Err(_) => None,
            // A deadline beyond what the clock can say is none, which `u64::MAX` milliseconds are for any purpose.
            Ok(ms) => Instant::now().checked_add(Duration::from_millis(ms)),
        };
        loop {
            *self.ready.lock() = false;
            if let Poll::Ready(value) = poll(&mut context) {
                return Some(value);
            }
            if timeout_ms == 0 {
                return None;
            }
            let mut ready = self.ready.lock();
            while !*ready {
                match deadline {
                    None => self.changed.wait(&mut ready),
                    Some(deadline) => {
                        if self.changed.wait_until(&mut ready, deadline).timed_out() && !*ready {
                            return None;
                        }
                    }
                }
            }
        }
    }
}

/// Runs a future of the core to its end on this thread. Ends early, with the token's error, when the token is cancelled.
pub(crate) fn block<T>(cancel: Option<&CancelToken>, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut work = pin!(work);
    let mut cancelled = cancel.map(|token| Box::pin(token.cancelled()));
    let signal = Arc::new(Signal::default());
    let outcome = signal.wait(-1, |context| {
        // The work first: what it has finished is not thrown away.
        if let Poll::Ready(result) = work.as_mut().poll(context) {
            return Poll::Ready(result);
        }
        match cancelled.as_mut().map(|cancelled| cancelled.as_mut().poll(context)) {
            Some(Poll::Ready(_)) => Poll::Ready(Err(cancel.and_then(|token| token.check().err()).unwrap_or_else(unbounded))),
            _ => Poll::Pending,
        }
    });
    outcome.unwrap_or_else(|| Err(unbounded()))
}

fn unbounded() -> hob::Error {
    hob::Error::new(hob::ErrorKind::Internal, "a wait without a bound ended without a value")
}

/// A shared token's clone out of a handle that may be NULL.
pub(crate) unsafe fn token(handle: *const crate::cancel::hob_cancel_token) -> Result<Option<CancelToken>> {
    if handle.is_null() {
        return Ok(None);
    }
    // SAFETY: as the header asks.
    unsafe { raw::borrow(handle) }.map(|held| Some((**held).clone())).ok_or_else(|| raw::no_handle(handle, "cancel"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_with_its_value_its_time_or_its_token() {
        let signal = Arc::new(Signal::default());
        assert_eq!(signal.wait(0, |_| Poll::<u8>::Pending), None);
        assert_eq!(signal.wait(1, |_| Poll::<u8>::Pending), None);
        assert_eq!(signal.wait(-1, |_| Poll::Ready(1)), Some(1));
        let mut first = true;
        let woken = signal.wait(-1, |context| {
            if std::mem::take(&mut first) {
                let waker = context.waker().clone();
                std::thread::spawn(move || waker.wake());
                return Poll::Pending;
            }
            Poll::Ready(2)
        });
        assert_eq!(woken, Some(2));
        let token = CancelToken::new();
        token.cancel();
        let error = block(Some(&token), std::future::pending::<Result<()>>()).expect_err("cancelled");
        assert_eq!(error.kind(), hob::ErrorKind::Cancelled);
    }
}
