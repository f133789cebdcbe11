//! Where the pool's own work runs: a [`Spawn`]er given by the host, or a [`Runtime`] of one thread.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::oneshot;

use crate::clock::BoxFuture;
use crate::error::{Error, ErrorKind, Result};

/// Runs tasks to completion in the background. A spawner that drops a task unfinished (because it shut down) loses the
/// load or release inside, but the pool's account stays exact.
pub trait Spawn: Send + Sync + 'static {
    /// Starts `task`. Must not block and must not poll the task on the calling thread.
    fn spawn(&self, task: BoxFuture<'static, ()>);
}

/// One thread that polls tasks and keeps timers (a current-thread tokio runtime). The thread ends, without being waited for,
/// when the value is dropped; tasks that are not finished by then are dropped.
pub struct Runtime {
    handle: tokio::runtime::Handle,
    stop: Option<oneshot::Sender<()>>,
}

impl Runtime {
    /// Starts the thread. Fails with `Io` when the operating system refuses one.
    pub fn start(name: &str) -> Result<Self> {
        let failed =
            |error: std::io::Error| Error::new(ErrorKind::Io, format!("cannot start the thread {name}")).with_source(error);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let run = move || {
            let _ = runtime.block_on(stopped);
            // A blocking shutdown would wait for host code; the tasks are simply dropped.
            runtime.shutdown_background();
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(failed)?;
        Ok(Self { handle, stop: Some(stop) })
    }

    pub(crate) fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        let _entered = self.handle.enter();
        Box::pin(tokio::time::sleep_until(deadline.into()))
    }
}

impl Spawn for Runtime {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        drop(self.handle.spawn(task));
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Runtime")
    }
}

/// Runs blocking work on a thread of its own and completes with its result. For loads and releases that block: the pool's
/// single thread must not. A panic inside becomes an `Internal` error.
pub fn unblock<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> BoxFuture<'static, Result<T>> {
    let (sender, receiver) = oneshot::channel();
    let started = std::thread::Builder::new().name("hob-blocking".to_owned()).spawn(move || {
        let _ = sender.send(work());
    });
    Box::pin(async move {
        if let Err(error) = started {
            return Err(Error::new(ErrorKind::Io, "cannot start a thread for blocking work").with_source(error));
        }
        receiver.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "blocking work panicked")))
    })
}

/// Calls host code that yields a future and drives it, catching panics of the call, of every poll and of the drop.
/// `what` names the code for the error message.
pub(crate) async fn guarded<T>(what: &'static str, start: impl FnOnce() -> BoxFuture<'static, Result<T>>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(start)) {
        Ok(future) => Guarded { what, future: Some(future) }.await,
        Err(payload) => Err(panicked(what, payload)),
    }
}

/// Calls synchronous host code, catching its panic.
pub(crate) fn guarded_call<T>(what: &'static str, call: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|payload| panicked(what, payload))
}

/// Drops values that may own host code, catching panics of their destructors.
pub(crate) fn drop_guarded<T>(value: T) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        tracing::warn!("a destructor of host code panicked");
        drop_payload(payload);
    }
}

struct Guarded<T> {
    what: &'static str,
    future: Option<BoxFuture<'static, Result<T>>>,
}

impl<T> Future for Guarded<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let Some(future) = self.future.as_mut() else {
            return Poll::Ready(Err(Error::new(ErrorKind::Internal, format!("{} was polled after its end", self.what))));
        };
        let outcome = match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(result)) => result,
            Err(payload) => Err(panicked(self.what, payload)),
        };
        // Dropped here, before the result is acted on: what the future captured must be gone by then (P35, 1.3 step 5).
        let future = self.future.take();
        drop_guarded(future);
        Poll::Ready(outcome)
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        let future = self.future.take();
        drop_guarded(future);
    }
}

fn panicked(what: &'static str, payload: Box<dyn std::any::Any + Send>) -> Error {
    // The payload's text may hold anything, a user's text included, so it is not repeated.
    drop_payload(payload);
    Error::new(ErrorKind::Callback, format!("{what} panicked"))
}

fn drop_payload(payload: Box<dyn std::any::Any + Send>) {
    // A payload whose destructor panics must not take the pool down.
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again);
    }
}
