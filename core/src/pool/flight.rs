//! A flight is an admission on its way in: shared by everybody who asked for its key meanwhile, run by a task of the pool's
//! spawner, so that the callers' futures only wait and can be dropped at any time.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::idle::IdlePolicy;
use super::line::cannot_load_paused;
use super::policy::{Decision, Refusal};
use super::release;
use super::spawn::{drop_guarded, guarded};
use super::state::{Inner, Outbox, Slot, State};
use super::status::{ErrorKindName, PoolEvent, UnloadReason, millis};
use super::types::{Admission, Admitted, Cost, Key, Load, LoadContext, Loaded, NoRoom, Origin, Progress, Quiesce, Release, Token};
use crate::cancel::CancelToken;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicU8, Ordering};

/// How far a flight is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Stage {
    /// Its cost is being found out.
    Estimating,
    /// It stands in line.
    Waiting { ticket: u64 },
    /// Its bytes are reserved; its victims are being released.
    Releasing,
    /// Its load runs.
    Loading { since: Instant, percent: u8 },
}

impl Stage {
    /// Whether bytes are reserved.
    pub(crate) fn is_running(self) -> bool {
        matches!(self, Self::Releasing | Self::Loading { .. })
    }
}

pub(crate) struct Flight {
    pub(crate) token: Token,
    pub(crate) key: Key,
    /// 0 while it is being estimated.
    pub(crate) cost: u64,
    pub(crate) no_room: NoRoom,
    pub(crate) stage: Stage,
    /// By `pin`; what callers ask for goes with them.
    pub(crate) pinned: bool,
    pub(crate) quiesce: Option<Arc<dyn Quiesce>>,
    pub(crate) over_budget: bool,
    /// Bytes its own victims still hold.
    pub(crate) victims_held: u128,
    pub(crate) joiners: BTreeMap<u64, Joiner>,
    /// What the load looks at.
    pub(crate) cancel: CancelToken,
    /// Why nothing must come of it.
    pub(crate) doomed: Option<Error>,
    /// An entry was replaced: its bytes have to be drained before the load. How many of them came free at once.
    pub(crate) replaced: Option<u64>,
    pub(crate) job: Option<Job>,
    /// Told when the flight has ended, however.
    pub(crate) waiters: Vec<oneshot::Sender<()>>,
}

impl Flight {
    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned || self.joiners.values().any(|joiner| joiner.pinned)
    }

    /// The idle policy asked for last.
    pub(crate) fn idle(&self) -> Option<IdlePolicy> {
        self.joiners.values().rev().find_map(|joiner| joiner.idle)
    }

    /// The part of its reservation that lives in bytes its victims still hold.
    pub(crate) fn overlap(&self) -> u128 {
        if self.stage.is_running() { self.victims_held.min(self.cost.into()) } else { 0 }
    }
}

/// Somebody who waits for a flight.
pub(crate) struct Joiner {
    pub(crate) in_use: bool,
    pub(crate) use_idle: Option<IdlePolicy>,
    pub(crate) idle: Option<IdlePolicy>,
    pub(crate) pinned: bool,
    pub(crate) origin: Origin,
    pub(crate) answer: oneshot::Sender<Result<Admitted>>,
}

/// The host's two actions.
pub(crate) struct Job {
    pub(crate) load: Box<dyn Load>,
    pub(crate) release: Box<dyn Release>,
}

enum Step {
    Done(Result<Admitted>),
    /// Another admission of the key is ending; look again when it has.
    Again(oneshot::Receiver<()>),
    Wait(oneshot::Receiver<Result<Admitted>>, Token, u64),
}

/// The caller's side of an admission.
pub(crate) async fn admit(
    inner: Arc<Inner>,
    mut admission: Admission,
    load: Box<dyn Load>,
    release: Box<dyn Release>,
) -> Result<Admitted> {
    admission.key.check()?;
    let mut job = Some(Job { load, release });
    let mut leave = Leave::new(&inner, &admission);
    let result = loop {
        if let Some(error) = leave.now(&inner, &admission.key) {
            break Err(error);
        }
        let step = inner.with(|state, out| state.enter(&inner, &mut admission, &mut job, out));
        match step {
            Step::Done(result) => break result,
            Step::Again(ended) => {
                if let Err(error) = leave.race(&inner, &admission.key, async { ended.await.ok() }).await {
                    break Err(error);
                }
            }
            Step::Wait(answer, token, joiner) => {
                // A joiner's own actions are of no use; they go now and not at the end of somebody else's load.
                drop_guarded(job.take());
                let _place = Place { inner: inner.clone(), token, joiner };
                let answer = leave.race(&inner, &admission.key, async { answer.await.ok() }).await;
                break match answer {
                    Ok(Some(result)) => result,
                    Ok(None) => Err(Error::internal(format!("the load of {} was dropped by its executor", admission.key))),
                    Err(error) => Err(error),
                };
            }
        }
    };
    drop_guarded(job);
    result
}

/// A caller's place among those who wait for a flight; left when dropped, whatever the reason.
struct Place {
    inner: Arc<Inner>,
    token: Token,
    joiner: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.inner.with(|state, out| state.leave(&self.inner, self.token, self.joiner, out));
    }
}

/// What makes a caller leave: its cancel token and its deadline.
struct Leave {
    cancel: Option<CancelToken>,
    deadline: Option<Instant>,
    started: Instant,
}

impl Leave {
    fn new(inner: &Inner, admission: &Admission) -> Self {
        Self { cancel: admission.cancel.clone(), deadline: admission.deadline, started: inner.clock.now() }
    }

    fn error(&self, inner: &Inner, key: &Key, kind: ErrorKind) -> Error {
        let waited = inner.clock.now().saturating_duration_since(self.started).as_secs_f64();
        let text = match kind {
            ErrorKind::Timeout => {
                format!("the deadline passed after {waited:.3} s while {key} was waited for; allow a later deadline or more budget")
            }
            _ => format!("the admission of {key} was cancelled by the caller after {waited:.3} s"),
        };
        Error::new(kind, text)
    }

    fn now(&self, inner: &Inner, key: &Key) -> Option<Error> {
        if let Some(reason) = self.cancel.as_ref().and_then(CancelToken::reason) {
            return Some(self.error(inner, key, reason.kind()));
        }
        let late = self.deadline.is_some_and(|deadline| inner.clock.now() >= deadline);
        late.then(|| self.error(inner, key, ErrorKind::Timeout))
    }

    /// Waits for `work`, or for a reason to leave, which wins when both have come.
    async fn race<T>(&mut self, inner: &Inner, key: &Key, work: impl Future<Output = T>) -> Result<T> {
        let mut cancelled = self.cancel.as_ref().map(CancelToken::cancelled);
        let mut sleep = self.deadline.map(|deadline| inner.clock.sleep_until(deadline));
        let mut work = pin!(work);
        std::future::poll_fn(|context| {
            if let Some(cancelled) = &mut cancelled
                && let Poll::Ready(reason) = Pin::new(cancelled).poll(context)
            {
                return Poll::Ready(Err(self.error(inner, key, reason.kind())));
            }
            if let Some(sleep) = &mut sleep
                && sleep.as_mut().poll(context).is_ready()
            {
                return Poll::Ready(Err(self.error(inner, key, ErrorKind::Timeout)));
            }
            work.as_mut().poll(context).map(Ok)
        })
        .await
    }
}

impl State {
    /// The first step of an admission, in one critical section: hit, join, or a new flight.
    fn enter(&mut self, inner: &Arc<Inner>, admission: &mut Admission, job: &mut Option<Job>, out: &mut Outbox) -> Step {
        if let Err(error) = self.check_open() {
            return Step::Done(Err(error));
        }
        let mut replaced = None;
        match self.slots.get(&admission.key).copied() {
            Some(Slot::Ready(at)) if !admission.replace => return Step::Done(Ok(self.hit(inner, at, admission, out))),
            Some(Slot::Flight(token)) => {
                let Some(flight) = self.flights.get_mut(&token) else {
                    return Step::Done(Err(Error::internal("a key points to a load that is not there")));
                };
                if admission.replace || flight.doomed.is_some() {
                    let (sender, receiver) = oneshot::channel();
                    flight.waiters.push(sender);
                    return Step::Again(receiver);
                }
                self.counters.joins += 1;
                return self.join(token, admission, Origin::Joined);
            }
            Some(Slot::Ready(at)) => {
                if let Some(error) = self.cannot_replace(admission, at) {
                    return Step::Done(Err(error));
                }
                replaced = Some(self.table.get(at).filter(|entry| entry.uses == 0).map_or(0, |entry| entry.bytes));
                // Forgotten first (1.3 step 1), or the step that makes room could pick it and run its stale release. Those
                // in line look only afterwards: the room is the replacement's own.
                let pumping = std::mem::replace(&mut self.pumping, true);
                self.forget(inner, at, UnloadReason::Replaced, out);
                self.pumping = pumping;
            }
            None => {}
        }
        let token = Token(self.number());
        let (cost, estimate) = match std::mem::replace(&mut admission.cost, Cost::Bytes(0)) {
            Cost::Bytes(bytes) => (bytes, None),
            Cost::Estimate(estimate) => (0, Some(estimate)),
        };
        let flight = Flight {
            token,
            key: admission.key.clone(),
            cost,
            no_room: admission.no_room.unwrap_or(self.no_room),
            stage: Stage::Estimating,
            pinned: false,
            quiesce: admission.quiesce.take(),
            over_budget: false,
            victims_held: 0,
            joiners: BTreeMap::new(),
            cancel: CancelToken::new(),
            doomed: None,
            replaced,
            job: job.take(),
            waiters: Vec::new(),
        };
        let cancel = flight.cancel.clone();
        self.flights.insert(token, flight);
        self.slots.insert(admission.key.clone(), Slot::Flight(token));
        let step = self.join(token, admission, Origin::Loaded);
        match estimate {
            None => {
                self.place(inner, token, out);
                if replaced.is_some() {
                    self.pump(inner, out);
                }
            }
            Some(estimate) => {
                let guard = FlightGuard::new(inner, token);
                out.spawn(async move {
                    let inner = guard.inner.clone();
                    // Nobody asks any more once everybody has left: the host's work ends with its future.
                    let result = tokio::select! {
                        biased;
                        result = guarded("the cost estimate", estimate) => result,
                        _ = cancel.cancelled() => Err(Error::new(ErrorKind::Cancelled, "nobody waits for the estimate any more")),
                    };
                    inner.with(|state, out| match result {
                        Ok(cost) => {
                            if let Some(flight) = state.flights.get_mut(&token) {
                                flight.cost = cost;
                            }
                            state.place(&inner, token, out);
                            // A replacement gave its old bytes back before its cost was known.
                            state.pump(&inner, out);
                        }
                        Err(error) => state.fail(&inner, token, error, out),
                    });
                    guard.disarm();
                });
            }
        }
        step
    }

    fn hit(&mut self, inner: &Arc<Inner>, at: u32, admission: &Admission, out: &mut Outbox) -> Admitted {
        self.table.hits += 1;
        if admission.pinned {
            self.table.set_pinned(at, true);
        }
        if let (Some(idle), Some(entry)) = (admission.idle, self.table.get_mut(at)) {
            entry.idle = Some(idle);
        }
        let lease = if admission.in_use {
            Some(self.lease(at, Origin::Hit, admission.use_idle))
        } else {
            self.table.touch(at);
            self.recount_unless_immediate(inner, at, out);
            None
        };
        if admission.pinned {
            // Whoever waits for this entry's leases would now wait for ever: it looks again.
            self.pump(inner, out);
        }
        let entry = self.table.get(at);
        let (token, load_time) = entry.map_or((Token(0), Duration::ZERO), |entry| (entry.shared.token, entry.shared.load_time));
        Admitted { token, origin: Origin::Hit, load_time, lease }
    }

    // Somebody who has just been told that the entry is there must find it: `immediately` waits for the end of the next use.
    fn recount_unless_immediate(&mut self, inner: &Arc<Inner>, at: u32, out: &mut Outbox) {
        let Some(entry) = self.table.get_mut(at) else { return };
        entry.ever_used &= entry.policy(self.idle).normalized() != IdlePolicy::Immediately;
        self.recount(inner, at, out);
    }

    fn join(&mut self, token: Token, admission: &Admission, origin: Origin) -> Step {
        let (answer, receiver) = oneshot::channel();
        let joiner = self.number();
        if let Some(flight) = self.flights.get_mut(&token) {
            let waiting = Joiner {
                in_use: admission.in_use,
                use_idle: admission.use_idle,
                idle: admission.idle,
                pinned: admission.pinned,
                origin,
                answer,
            };
            flight.joiners.insert(joiner, waiting);
        }
        Step::Wait(receiver, token, joiner)
    }

    // A replacement that is refused anyway must not cost the entry it was to replace.
    fn cannot_replace(&self, admission: &Admission, at: u32) -> Option<Error> {
        let Cost::Bytes(cost) = admission.cost else { return None };
        let no_room = admission.no_room.unwrap_or(self.no_room);
        let paused = self.pauses > 0;
        if paused && no_room == NoRoom::Refuse {
            return Some(cannot_load_paused(&admission.key));
        }
        let old = self.table.get(at).filter(|entry| entry.uses == 0).map_or(0, |entry| entry.bytes);
        let behind = self.comes_behind(no_room, cost, old);
        if behind && no_room == NoRoom::Refuse {
            return Some(self.refusal(&admission.key, cost, Refusal::NoRoom));
        }
        match self.preview(cost, no_room, Some(at)) {
            Decision::Refuse(refusal) => Some(self.refusal(&admission.key, cost, refusal)),
            decision => match self.table.account.physical {
                Some(limit) if cost > limit => Some(self.refusal(&admission.key, cost, Refusal::Physical(limit.into()))),
                _ if paused || behind || matches!(decision, Decision::Wait) => self.line_is_full(),
                _ => None,
            },
        }
    }

    /// The victims are gone: the load may start, unless nothing must come of it any more.
    fn begin_load(&mut self, inner: &Arc<Inner>, token: Token, out: &mut Outbox) -> Result<LoadContext> {
        let now = self.now();
        let Some(flight) = self.flights.get_mut(&token) else {
            return Err(Error::internal("a load without its flight"));
        };
        if let Some(error) = &flight.doomed {
            return Err(error.clone());
        }
        flight.stage = Stage::Loading { since: now, percent: 0 };
        let (key, bytes, cancel) = (flight.key.clone(), flight.cost, flight.cancel.clone());
        self.emit(out, || PoolEvent::LoadStarted { key: key.clone(), token, bytes });
        let (weak, reported) = (Arc::downgrade(inner), AtomicU8::new(0));
        let progress = Progress {
            report: Arc::new(move |fraction| {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // clamped to 0..=1 by the caller
                let percent = (fraction * 100.0) as u8;
                if reported.swap(percent, Ordering::Relaxed) != percent
                    && let Some(inner) = weak.upgrade()
                {
                    inner.with(|state, out| state.progress(token, percent, out));
                }
            }),
        };
        Ok(LoadContext { token, key, cancel, progress })
    }

    fn progress(&mut self, token: Token, now_percent: u8, out: &mut Outbox) {
        let Some(flight) = self.flights.get_mut(&token) else { return };
        if let Stage::Loading { percent, .. } = &mut flight.stage {
            *percent = now_percent;
            let key = flight.key.clone();
            self.emit(out, || PoolEvent::LoadProgress { key, token, percent: now_percent });
        }
    }

    fn failed_load(&mut self, inner: &Arc<Inner>, token: Token, error: Error, out: &mut Outbox) {
        self.counters.failed_loads += 1;
        if let Some(flight) = self.flights.get(&token) {
            let ms = match flight.stage {
                Stage::Loading { since, .. } => millis(self.now().saturating_duration_since(since)),
                _ => 0,
            };
            let (key, kind) = (flight.key.clone(), ErrorKindName(error.kind()));
            tracing::debug!(%key, %token, kind = %error.kind(), "load failed");
            self.emit(out, || PoolEvent::LoadFailed { key, token, kind, ms });
        }
        self.fail(inner, token, error, out);
    }
}

/// Gives the reservation back when a flight's task is dropped unfinished by its executor.
struct FlightGuard {
    inner: Arc<Inner>,
    token: Token,
    armed: bool,
}

impl FlightGuard {
    fn new(inner: &Arc<Inner>, token: Token) -> Self {
        Self { inner: inner.clone(), token, armed: true }
    }

    /// The debt is paid. Takes the guard whole: an `async move` block that only set the field would capture a copy of it.
    fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for FlightGuard {
    fn drop(&mut self) {
        if self.armed {
            let error = Error::internal("the executor dropped the task of a load");
            self.inner.with(|state, out| state.fail(&self.inner, self.token, error, out));
        }
    }
}

/// The task of a flight whose bytes are reserved: releases the victims, one by one, then loads, then installs.
pub(crate) fn drive<R>(inner: &Arc<Inner>, token: Token, victims: Vec<R>, job: Job) -> impl Future<Output = ()> + Send + use<R>
where
    R: Future<Output = release::Outcome> + Send,
{
    // Made before the first poll, so that a task its executor never polls still gives the reservation back.
    let guard = FlightGuard::new(inner, token);
    async move {
        let inner = guard.inner.clone();
        // Every victim is awaited, also when nobody waits for the load any more: they are detached and must go.
        for victim in victims {
            victim.await;
        }
        if inner.with(|state, _| state.flights.get(&token).is_some_and(|flight| flight.replaced.is_some())) {
            inner.drain().await;
        }
        let Job { load, release } = job;
        let started = inner.clock.now();
        match inner.with(|state, out| state.begin_load(&inner, token, out)) {
            Err(error) => {
                drop_guarded((load, release));
                inner.with(|state, out| state.failed_load(&inner, token, error, out));
            }
            Ok(context) => {
                let result = guarded("the load", || load.load(context)).await;
                finish_load(&inner, token, started, result, release).await;
            }
        }
        guard.disarm();
    }
}

async fn finish_load(inner: &Arc<Inner>, token: Token, started: Instant, result: Result<Loaded>, release: Box<dyn Release>) {
    let error = match result {
        Ok(loaded) => {
            // Installed or found doomed in one critical section, so that no evict or close can slip in between.
            let unwanted = inner.with(|state, out| {
                let doomed = state.flights.get(&token).and_then(|flight| flight.doomed.clone());
                match doomed {
                    Some(error) => Some((error, release)),
                    None => {
                        let load_time = state.now().saturating_duration_since(started);
                        state.install(inner, token, loaded, load_time, release, out);
                        None
                    }
                }
            });
            let Some((error, release)) = unwanted else { return };
            // Loaded, but nobody wants it any more: let go of it again before anybody hears of the end.
            if let Err(failure) = guarded("the release of an unwanted load", || release.release(token)).await {
                inner.with(|state, _| state.counters.failed_releases += 1);
                tracing::warn!(%token, error = %failure, "release failed");
            }
            inner.drain().await;
            error
        }
        Err(error) => {
            drop_guarded(release);
            // What the load allocated before it failed is in the allocator's cache now (A39).
            inner.drain().await;
            // A load that ends because it was told to says why, not how.
            inner.with(|state, _| state.flights.get(&token).and_then(|flight| flight.doomed.clone())).unwrap_or(error)
        }
    };
    inner.with(|state, out| state.failed_load(inner, token, error, out));
}
