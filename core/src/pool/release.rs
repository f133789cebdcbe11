//! Letting go: the tasks that run a release, drain, and take the bytes off the account; the sweeper; the close.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::policy::freed_between;
use super::spawn::{guarded, guarded_call};
use super::state::{Inner, Outbox, State};
use super::status::{ErrorKindName, PoolEvent, UnloadReason};
use super::table::Phase;
use super::types::{Token, closed};
use crate::clock::Clock;
use crate::error::{Error, Result};

/// What a release came to.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result<()>,
    pub(crate) freed: u64,
}

impl Inner {
    /// Gives freed bytes back to the system, if the host said how. A panic of the hook is logged and otherwise ignored.
    pub(crate) async fn drain(&self) {
        let Some(hook) = self.drain.clone() else { return };
        let result = guarded("the drain hook", || {
            let drain = hook();
            Box::pin(async move {
                drain.await;
                Ok(())
            })
        })
        .await;
        if let Err(error) = result {
            tracing::warn!(%error, "drain failed");
        }
    }

    pub(crate) fn held(&self) -> Option<u64> {
        self.probe.as_ref().and_then(|probe| guarded_call("the memory probe", || probe.read().held()).ok())
    }

    /// Bytes given back since `before`, watching the probe for at most the settle time for `expected` of them.
    pub(crate) async fn settled(&self, before: u64, expected: u64) -> u64 {
        let until = self.clock.now() + self.settle;
        loop {
            let freed = freed_between(before, self.held().unwrap_or(before));
            let now = self.clock.now();
            // Nine tenths: estimates are not exact, and a wait that cannot end early always costs its whole time.
            if freed >= expected / 10 * 9 || now >= until {
                return freed;
            }
            self.clock.sleep_until(until.min(now + Duration::from_millis(5))).await;
        }
    }
}

/// Owes the account the bytes of one detached entry: pays them back should its task be dropped unfinished, or never be
/// polled, because the executor has shut down.
struct ReleaseGuard {
    inner: Arc<Inner>,
    at: u32,
    token: Token,
    armed: bool,
}

impl ReleaseGuard {
    fn new(inner: &Arc<Inner>, at: u32, token: Token) -> Self {
        Self { inner: inner.clone(), at, token, armed: true }
    }

    /// The debt is paid. Takes the guard whole: an `async move` block that only set the field would capture a copy of it.
    fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for ReleaseGuard {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        self.inner.with(|state, out| {
            let Some(entry) = state.table.get_mut(self.at).filter(|entry| entry.shared.token == self.token) else { return };
            if let Phase::Draining(draining) = &mut entry.phase {
                draining.released = true;
                draining.finishing = false;
            }
            if entry.uses == 0 {
                state.finalize(&self.inner, self.at, out);
            }
        });
    }
}

/// Runs the release of a detached entry, drains, and takes its bytes off the account; the last two are left to the last
/// lease when there are leases. With `settle` the probe is watched for bytes that come late.
pub(crate) fn unload(inner: &Arc<Inner>, at: u32, token: Token, settle: bool) -> impl Future<Output = Outcome> + Send + use<> {
    let guard = ReleaseGuard::new(inner, at, token);
    async move {
        let inner = guard.inner.clone();
        let before = inner.held();
        let taken = inner.with(|state, _| {
            let entry = state.table.get_mut(at)?;
            Some((entry.shared.clone(), entry.release.take(), entry.bytes))
        });
        let Some((shared, release, bytes)) = taken else { return Outcome { result: Ok(()), freed: 0 } };
        let result = match release {
            // Consumed here: what the action captured is gone before the next victim and before the newcomer's load.
            Some(release) => guarded("the release", || release.release(token)).await,
            None => Ok(()),
        };
        let result = result.map_err(|error| {
            Error::new(error.kind(), format!("{}: its entry is gone, but {}", shared.key, error.message())).with_source(error)
        });
        let mut freed = 0;
        if inner.with(|state, out| state.released(at, &result, out)) {
            inner.drain().await;
            freed = match before {
                Some(before) if settle => inner.settled(before, bytes).await,
                Some(before) => freed_between(before, inner.held().unwrap_or(before)),
                None => bytes,
            };
            inner.with(|state, out| state.finalize(&inner, at, out));
        }
        guard.disarm();
        Outcome { result, freed }
    }
}

/// The last lease of an entry that was released under it has ended: drain, then take the bytes off the account.
pub(crate) fn finish(inner: &Arc<Inner>, at: u32, token: Token) -> impl Future<Output = ()> + Send + use<> {
    let guard = ReleaseGuard::new(inner, at, token);
    async move {
        guard.inner.drain().await;
        guard.inner.with(|state, out| state.finalize(&guard.inner, at, out));
        guard.disarm();
    }
}

impl State {
    /// Notes that a release has run. Answers whether the caller is the one who drains: nobody uses the entry any more.
    fn released(&mut self, at: u32, result: &Result<()>, out: &mut Outbox) -> bool {
        let Some(entry) = self.table.get_mut(at) else { return false };
        let uses = entry.uses;
        let (key, token) = (entry.shared.key.clone(), entry.shared.token);
        if let Phase::Draining(draining) = &mut entry.phase {
            draining.released = true;
            draining.finishing = uses == 0;
        }
        if let Err(error) = result {
            self.counters.failed_releases += 1;
            tracing::warn!(%key, %token, kind = %error.kind(), "release failed");
            let kind = ErrorKindName(error.kind());
            self.emit(out, || PoolEvent::ReleaseFailed { key, token, kind });
        }
        if uses > 0 {
            // Only leases are left: whoever waits for this entry to close has waited enough.
            if let Some(Phase::Draining(draining)) = self.table.get_mut(at).map(|entry| &mut entry.phase) {
                for signal in std::mem::take(&mut draining.waiters) {
                    out.signal(signal);
                }
            }
            self.quieten(out);
        }
        uses == 0
    }
}

/// The one timer of a pool: sleeps until the earliest countdown can end, unloads what is due, and ends when nothing counts.
/// It holds the pool weakly, so a forgotten pool is not kept alive by its timer.
pub(crate) async fn sweeper(pool: Weak<Inner>, clock: Arc<dyn Clock>, mut earlier: oneshot::Receiver<()>) {
    loop {
        let Some(wake) = pool.upgrade().and_then(|inner| inner.with(|state, _| state.sweeper_wake())) else { return };
        // Strictly after the deadline (P19), so one tick later.
        let mut sleep = clock.sleep_until(wake + Duration::from_millis(1));
        let mut signalled = pin!(&mut earlier);
        std::future::poll_fn(|context| {
            let woken = signalled.as_mut().poll(context).is_ready();
            let slept = sleep.as_mut().poll(context).is_ready();
            if woken || slept { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        drop(sleep);
        let Some(inner) = pool.upgrade() else { return };
        let next = inner.with(|state, out| {
            let expired = state.expired();
            state.sweep(&inner, &expired, out);
            state.sweeper_renew()
        });
        match next {
            Some(receiver) => earlier = receiver,
            None => return,
        }
    }
}

impl State {
    fn sweeper_wake(&mut self) -> Option<Instant> {
        if self.next_wake.is_none() {
            self.sweeper = None;
            self.sweeping = false;
        }
        self.next_wake
    }

    fn sweeper_renew(&mut self) -> Option<oneshot::Receiver<()>> {
        if self.next_wake.is_none() {
            self.sweeper = None;
            self.sweeping = false;
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        self.sweeper = Some(sender);
        Some(receiver)
    }

    /// Closes the door: parked admissions end now, loads are asked to stop, and a task lets everything else go.
    pub(crate) fn close(&mut self, inner: &Arc<Inner>, out: &mut Outbox) {
        if self.closing {
            return;
        }
        self.closing = true;
        self.next_wake = None;
        if let Some(signal) = self.sweeper.take() {
            out.signal(signal);
        }
        let mut flights: Vec<Token> = self.flights.keys().copied().collect();
        flights.sort_unstable();
        for token in flights {
            self.doom(inner, token, closed(), out);
        }
        out.spawn(run_close(inner.clone()));
    }

    fn wait_quiet(&mut self) -> Option<oneshot::Receiver<()>> {
        if self.is_quiet() {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        self.quiet_waiters.push(sender);
        Some(receiver)
    }
}

/// Waits until no load and no release is under way.
pub(crate) async fn quiet(inner: &Arc<Inner>) {
    while let Some(receiver) = inner.with(|state, _| state.wait_quiet()) {
        let _ = receiver.await;
    }
}

fn run_close(inner: Arc<Inner>) -> impl Future<Output = ()> + Send {
    // Ends the close whatever happens to this task, so that nobody waits for it for ever.
    struct Ending {
        inner: Arc<Inner>,
        errors: Vec<Error>,
        releases: usize,
    }
    impl Drop for Ending {
        fn drop(&mut self) {
            let result = aggregate(&std::mem::take(&mut self.errors), self.releases);
            self.inner.with(|state, out| {
                // Only what an executor that dropped this task has left behind.
                let left: Vec<u32> = state.table.iter().filter(|(_, entry)| entry.is_ready()).map(|(at, _)| at).collect();
                for at in left {
                    state.forget(&self.inner, at, UnloadReason::Closed, out);
                }
                state.closed = Some(result);
                for signal in std::mem::take(&mut state.close_waiters) {
                    out.signal(signal);
                }
                state.emit(out, || PoolEvent::Closed);
            });
        }
    }
    // Made before the first poll, as all such guards are.
    let mut ending = Ending { inner, errors: Vec::new(), releases: 0 };
    async move {
        let inner = ending.inner.clone();
        quiet(&inner).await;
        let all = inner.with(|state, out| {
            let mut all: Vec<(Instant, u64, u32)> = state
                .table
                .iter()
                .filter(|(_, entry)| entry.is_ready())
                .map(|(at, entry)| (entry.last_use, entry.stamp, at))
                .collect();
            all.sort_unstable();
            let mut releases = Vec::with_capacity(all.len());
            for (_, _, at) in all {
                if let Some(token) = state.detach(at, UnloadReason::Closed, None, out) {
                    releases.push(unload(&inner, at, token, false));
                }
            }
            releases
        });
        ending.releases = all.len();
        for release in all {
            ending.errors.extend(release.await.result.err());
        }
        quiet(&inner).await;
        drop(ending);
    }
}

/// One error for all that failed (P48).
pub(crate) fn aggregate(errors: &[Error], of: usize) -> Result<()> {
    match errors {
        [] => Ok(()),
        [one] => Err(one.clone()),
        [first, ..] => {
            let all: Vec<&str> = errors.iter().map(Error::message).collect();
            let text = format!("{} of {of} releases failed: {}", errors.len(), all.join("; "));
            Err(Error::new(first.kind(), text).with_source(first.clone()))
        }
    }
}

/// Runs `work` as a task of the pool, so that it goes on when the caller's future is dropped, and waits for its result.
pub(crate) fn detached<T: Send + 'static>(
    inner: &Arc<Inner>,
    work: impl Future<Output = T> + Send + 'static,
) -> Pin<Box<dyn Future<Output = Option<T>> + Send>> {
    let (sender, receiver) = oneshot::channel();
    inner.spawner.spawn(Box::pin(async move {
        let _ = sender.send(work.await);
    }));
    Box::pin(async move { receiver.await.ok() })
}
