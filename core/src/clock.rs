//! Time as a value that can be given: a monotone now and a sleep. [`SystemClock`] in production, [`FakeClock`] in tests
//! (public, so that a host's own tests can use it).

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::pool::Runtime;
use crate::sync::Mutex;

/// A boxed future that may cross threads. Everything the pool hands out or takes is one of these or converts into one.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A monotone clock. Implementations must be cheap to read: the pool reads it at the end of every use.
pub trait Clock: Send + Sync + 'static {
    /// The present moment. Never goes backwards.
    fn now(&self) -> Instant;

    /// A future that completes at or after `deadline`. It may be polled by any executor on any thread, and dropped at any time.
    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()>;

    /// The present moment as nanoseconds since `epoch`, and a number that orders it: of two readings one after the other the
    /// later has the greater number, as far as the clock can tell them apart. By default that is the nanoseconds again.
    #[inline]
    fn stamp(&self, epoch: Instant) -> (u64, u64) {
        let nanos = u64::try_from(self.now().saturating_duration_since(epoch).as_nanos()).unwrap_or(u64::MAX);
        (nanos, nanos)
    }
}

/// The operating system's monotone clock. Sleeps run on a Hob [`Runtime`], which is started at the first sleep, so the
/// futures work in hosts that have no runtime of their own.
#[derive(Clone, Default)]
pub struct SystemClock {
    runtime: Arc<OnceLock<Option<Arc<Runtime>>>>,
}

impl SystemClock {
    /// A clock that starts its own timer thread when somebody first sleeps.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A clock whose sleeps use `runtime`.
    #[must_use]
    pub fn on(runtime: Arc<Runtime>) -> Self {
        let clock = Self::default();
        let _ = clock.runtime.set(Some(runtime));
        clock
    }

    /// The clock that deadlines of [`CancelToken`](crate::CancelToken)s use when no other is named. At most one timer
    /// thread per process serves all of them, started at the first wait.
    #[must_use]
    pub fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<SystemClock>> = OnceLock::new();
        SHARED.get_or_init(|| Arc::new(SystemClock::new())).clone()
    }
}

impl fmt::Debug for SystemClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SystemClock")
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        // A process that cannot start one more thread has worse troubles than a timer that never fires; the wait itself
        // stays cancellable.
        match self.runtime.get_or_init(|| Runtime::start("hob-clock").ok().map(Arc::new)) {
            Some(runtime) => runtime.sleep_until(deadline),
            None => Box::pin(std::future::pending()),
        }
    }
}

/// A clock that moves only when told to. Clones share the same time.
#[derive(Clone)]
pub struct FakeClock {
    inner: Arc<Mutex<FakeInner>>,
}

struct FakeInner {
    now: Instant,
    // Readings so far: they order what happens while the time stands still.
    readings: u64,
    next_id: u64,
    sleepers: Vec<Sleeper>,
}

struct Sleeper {
    id: u64,
    deadline: Instant,
    waker: Waker,
}

impl FakeClock {
    /// A clock that stands at some moment.
    #[must_use]
    pub fn new() -> Self {
        Self { inner: Arc::new(Mutex::new(FakeInner { now: Instant::now(), readings: 0, next_id: 0, sleepers: Vec::new() })) }
    }

    /// Moves time forward and wakes every sleeper whose deadline has come.
    pub fn advance(&self, by: Duration) {
        let due: Vec<Waker> = {
            let mut inner = self.inner.lock();
            inner.now += by;
            let now = inner.now;
            let (due, rest) = std::mem::take(&mut inner.sleepers).into_iter().partition(|sleeper| sleeper.deadline <= now);
            inner.sleepers = rest;
            let mut due: Vec<Sleeper> = due;
            due.sort_by_key(|sleeper| (sleeper.deadline, sleeper.id));
            due.into_iter().map(|sleeper| sleeper.waker).collect()
        };
        for waker in due {
            waker.wake();
        }
    }

    /// How many sleeps are waiting now. A test can wait for a timer to be armed without sleeping.
    #[must_use]
    pub fn sleepers(&self) -> usize {
        self.inner.lock().sleepers.len()
    }

    /// The earliest moment somebody sleeps until.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.inner.lock().sleepers.iter().map(|sleeper| sleeper.deadline).min()
    }
}

impl Default for FakeClock {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for FakeClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FakeClock")
    }
}

impl Clock for FakeClock {
    fn now(&self) -> Instant {
        self.inner.lock().now
    }

    fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
        Box::pin(FakeSleep { clock: self.clone(), deadline, id: None })
    }

    fn stamp(&self, epoch: Instant) -> (u64, u64) {
        let mut inner = self.inner.lock();
        inner.readings += 1;
        let nanos = u64::try_from(inner.now.saturating_duration_since(epoch).as_nanos()).unwrap_or(u64::MAX);
        // Steps of more than one, as a real clock makes them.
        (nanos, inner.readings * 1_000)
    }
}

struct FakeSleep {
    clock: FakeClock,
    deadline: Instant,
    id: Option<u64>,
}

impl Future for FakeSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let clock = self.clock.clone();
        let mut inner = clock.inner.lock();
        if inner.now >= self.deadline {
            self.id = None;
            return Poll::Ready(());
        }
        let id = *self.id.get_or_insert_with(|| {
            inner.next_id += 1;
            inner.next_id
        });
        match inner.sleepers.iter_mut().find(|sleeper| sleeper.id == id) {
            Some(sleeper) => sleeper.waker.clone_from(context.waker()),
            None => inner.sleepers.push(Sleeper { id, deadline: self.deadline, waker: context.waker().clone() }),
        }
        Poll::Pending
    }
}

impl Drop for FakeSleep {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let gone = {
                let mut inner = self.clock.inner.lock();
                let at = inner.sleepers.iter().position(|sleeper| sleeper.id == id);
                at.map(|at| inner.sleepers.swap_remove(at))
            };
            drop(gone);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn poll_once(future: &mut BoxFuture<'static, ()>) -> bool {
        future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_fake_sleep_ends_exactly_at_its_deadline_and_leaves_nothing_when_dropped() {
        let clock = FakeClock::new();
        let mut sleep = clock.sleep_until(clock.now() + Duration::from_secs(5));
        assert!(!poll_once(&mut sleep));
        assert_eq!(clock.sleepers(), 1);
        clock.advance(Duration::from_secs(4));
        assert!(!poll_once(&mut sleep));
        clock.advance(Duration::from_secs(1));
        assert!(poll_once(&mut sleep));
        let mut other = clock.sleep_until(clock.now() + Duration::from_secs(5));
        assert!(!poll_once(&mut other));
        drop(other);
        assert_eq!(clock.sleepers(), 0);
    }

    #[test]
    fn a_system_sleep_needs_no_runtime_of_the_host() {
        let clock = SystemClock::new();
        let deadline = clock.now() + Duration::from_millis(2);
        let (sender, receiver) = std::sync::mpsc::channel();
        let mut sleep = clock.sleep_until(deadline);
        struct Wake(std::sync::mpsc::Sender<()>);
        impl std::task::Wake for Wake {
            fn wake(self: Arc<Self>) {
                let _ = self.0.send(());
            }
        }
        let waker = Waker::from(Arc::new(Wake(sender)));
        while sleep.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            receiver.recv().expect("the timer thread wakes us");
        }
        assert!(clock.now() >= deadline);
    }
}
