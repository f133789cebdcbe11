//! What all requests share: a bounded number of places, what ends a request early, and when a caller stops waiting for the device.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use super::residency::{Model, Residency, Used};
use super::scheduler::Id;
use super::work::Ending;
use super::{RequestOptions, Shared};
use crate::cancel::{CancelReason, CancelToken};
use crate::error::{Error, ErrorKind, Result};

/// How long a request that is over waits for the device to let go of it, before its caller hears of it all the same: little when its
/// time is up, longer when it was cancelled, for then nothing presses.
const TIMEOUT_GRACE: Duration = Duration::from_millis(100);
const CANCEL_GRACE: Duration = Duration::from_secs(5);

/// A request's place among those the engine has taken on; dropping it frees the place.
pub(crate) struct Place {
    pub(crate) id: Id,
    count: Arc<Count>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.count.taken.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.count.empty.notify_waiters();
        }
    }
}

#[derive(Default)]
struct Count {
    taken: AtomicUsize,
    /// Told when the last place is free again.
    empty: Notify,
}

/// The places of an engine.
pub(crate) struct Places {
    count: Arc<Count>,
    limit: usize,
}

impl Places {
    pub(crate) fn new(limit: usize) -> Self {
        Self { count: Arc::default(), limit }
    }

    /// Requests taken on and not over.
    pub(crate) fn taken(&self) -> usize {
        self.count.taken.load(Ordering::Acquire)
    }

    /// Waits until every request is over.
    pub(crate) async fn all_free(&self) {
        loop {
            // Registered before looking, so that no end falls between the two.
            let mut empty = std::pin::pin!(self.count.empty.notified());
            empty.as_mut().enable();
            if self.taken() == 0 {
                return;
            }
            empty.await;
        }
    }

    pub(crate) fn take(&self, id: Id) -> Result<Place> {
        let free = |taken: usize| (taken < self.limit).then_some(taken + 1);
        match self.count.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) {
            Ok(_) => Ok(Place { id, count: Arc::clone(&self.count) }),
            Err(taken) => Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "{taken} requests are running or waiting and the engine takes {}; try again later or raise queue",
                    self.limit
                ),
            )),
        }
    }
}

/// What ends a request early, and when the device began it.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) residency: Arc<Residency>,
    pub(crate) token: CancelToken,
    begun: Arc<OnceLock<Instant>>,
}

impl Link {
    /// Takes a request on, or says at once why not: what will end it early, and its place.
    pub(crate) fn open(shared: &Shared, options: &RequestOptions) -> Result<(Self, Place)> {
        let residency = Arc::clone(&shared.residency);
        residency.limits().check_timeout(options.timeout)?;
        let place = residency.enter()?;
        Ok((Self { residency, token: options.token(shared), begun: Arc::default() }, place))
    }

    /// The device has begun the request.
    pub(crate) fn set_begun(&self) {
        self.begun.get_or_init(Instant::now);
    }

    pub(crate) fn begun(&self) -> Option<Instant> {
        self.begun.get().copied()
    }

    /// Ends the request before its next piece of work.
    pub(crate) fn cancel(&self) {
        self.token.cancel();
        self.residency.device().wake();
    }

    /// Takes a request's way to its end on the engine's own thread. Its caller's future only waits for the answer: one that nobody
    /// polls keeps no model in use and no place, and one that is dropped cancels the request.
    pub(crate) fn carry<T: Send + 'static>(
        &self,
        way: impl Future<Output = Result<T>> + Send + 'static,
    ) -> impl Future<Output = Result<T>> + Send {
        let (sender, answer) = oneshot::channel();
        // Not in the future that is returned: the way is large, and its caller would move it about.
        self.residency.spawn(async move {
            let _ = sender.send(way.await);
        });
        let waiting = Waiting(Some(self));
        async move {
            let answer = answer.await;
            waiting.over();
            answer.unwrap_or_else(|_| Err(super::closed()))
        }
    }

    /// Why the request ends now, as its caller is told.
    pub(crate) fn interrupted(&self) -> Error {
        self.residency.interrupted(&self.token)
    }

    /// Waits for the device's answer, for as long as that makes sense.
    pub(crate) async fn answer<T>(&self, answer: oneshot::Receiver<Result<T>>) -> Result<T> {
        tokio::select! {
            biased;
            answer = answer => match answer {
                // A cancel that races the end wins (spec C6).
                Ok(Ok(_)) if self.token.is_cancelled() => Err(self.interrupted()),
                Ok(answer) => answer,
                Err(_) => Err(super::closed()),
            },
            error = self.given_up() => Err(error),
        }
    }

    /// Completes when the caller must not wait for the device any longer, with what it is told:
    /// - the device is stuck and has not begun the request: at once;
    /// - the request is over and the device does not come back to it in the grace it has; the device is then watched, and counts as
    ///   stuck if it does not move for the engine's bound.
    ///
    /// Else the device ends the request before its next unit, and its answer comes first.
    pub(crate) async fn given_up(&self) -> Error {
        let device = self.residency.device();
        let stuck = async {
            device.stuck().await;
            if self.begun().is_some() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            _ = self.token.cancelled() => {}
            () = stuck => {
                self.token.cancel();
                return unavailable();
            }
        }
        device.wake();
        let clock = self.residency.clock();
        let grace = if self.token.reason() == Some(CancelReason::Timeout) { TIMEOUT_GRACE } else { CANCEL_GRACE };
        if let Some(until) = clock.now().checked_add(grace) {
            clock.sleep_until(until).await;
        }
        self.residency.suspect();
        self.interrupted()
    }
}

/// A caller's wait for an answer; the request is cancelled if it ends before.
struct Waiting<'a>(Option<&'a Link>);

impl Waiting<'_> {
    fn over(mut self) {
        self.0 = None;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(link) = self.0 {
            link.cancel();
        }
    }
}

/// A request that is answered once, on the device thread: what it holds until then, and where the answer goes.
pub(crate) struct Reply<T> {
    link: Link,
    /// Dropped before the answer is heard, also when nobody gives one.
    held: (Used, Place),
    sender: oneshot::Sender<Result<T>>,
}

impl<T> Reply<T> {
    /// The reply, and what [`Link::answer`] waits on.
    pub(crate) fn new(link: &Link, held: (Used, Place)) -> (Self, oneshot::Receiver<Result<T>>) {
        let (sender, answer) = oneshot::channel();
        (Self { link: link.clone(), held, sender }, answer)
    }

    pub(crate) fn id(&self) -> Id {
        self.held.1.id
    }

    pub(crate) fn model(&self) -> &Model {
        &self.held.0.model
    }

    /// Cancelled, out of time, or nobody waits any more.
    pub(crate) fn interrupted(&self) -> Option<Ending> {
        (self.sender.is_closed() || self.link.token.is_cancelled()).then_some(Ending::Interrupted)
    }

    pub(crate) fn begun(&self) {
        self.link.set_begun();
    }

    /// Gives back what the request held, then the answer: `value`, if it came to its end.
    pub(crate) fn send(self, ending: Result<Ending>, value: T) {
        let result = match ending {
            Ok(Ending::Interrupted) => Err(self.link.interrupted()),
            Ok(_) => Ok(value),
            Err(error) => Err(error),
        };
        drop(self.held);
        let _ = self.sender.send(result);
    }
}

/// The device is stuck: nothing new is begun on it.
pub(crate) fn unavailable() -> Error {
    Error::new(
        ErrorKind::Busy,
        "the device has not come back from earlier work (quarantined); it serves again by itself when it does, so try again later",
    )
}
