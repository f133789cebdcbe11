//! The pool: one memory budget for every model in the process, exact accounts, nothing evicted in use.
//!
//! The pool keeps, for every entry, a [`Key`], its bytes, its clock and marks, a [`Token`] and a *release action*; it never
//! holds an engine. An owner keeps its engines in a table of its own, by token: `load` puts one in, `release` takes it out.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use hob::pool::{Admission, Key, Loaded, Pool, PoolOptions};
//! # async fn example() -> hob::Result<()> {
//! let pool = Pool::new(PoolOptions::new(8 << 30))?;
//! let key = Key::embedder("minilm");
//! let lease = match pool.begin_use(&key) {
//!     Some(lease) => lease,
//!     None => {
//!         let load = |context: hob::pool::LoadContext| -> hob::BoxFuture<'static, _> {
//!             Box::pin(async move {
//!                 // table.insert(context.token, load_the_model(&context.cancel)?);
//!                 Ok(Loaded::measured(90 << 20))
//!             })
//!         };
//!         let release = |token| -> hob::BoxFuture<'static, _> {
//!             Box::pin(async move {
//!                 // table.remove(token);
//!                 Ok(())
//!             })
//!         };
//!         pool.acquire(Admission::new(key, 96 << 20), load, release).await?
//!     }
//! };
//! // compute with table[lease.token()], then:
//! drop(lease);
//! # Ok(()) }
//! ```
//!
//! - **Threads.** Everything may be called from any thread. Decisions are made in one short mutex, which is never held while a
//!   load, a release, a hook or a waker runs; hits on a resident key mostly do without it. Futures work on any executor; the work behind them runs on the pool's spawner,
//!   so dropping a future only means leaving.
//! - **Order.** A newcomer's victims are detached and its bytes reserved in one step; the victims are then released one by
//!   one, each drained, before its load is called.
//! - **Files.** `policy.rs` decides, `idle.rs` times, `table.rs` counts, `loan.rs` counts uses, `state.rs` changes, `line.rs` queues, `flight.rs` brings in,
//!   `release.rs` lets go, `status.rs` tells.

mod flight;
mod idle;
mod lease;
mod line;
mod loan;
mod policy;
mod release;
mod spawn;
mod state;
mod status;
mod table;
mod types;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

pub use self::idle::{DEFAULT_IDLE_SECONDS, IdlePolicy, MAX_IDLE_SECONDS, MIN_IDLE_SECONDS};
pub use self::lease::{ExternalCharge, Lease, Paused};
pub use self::policy::{default_budget, default_physical_limit};
pub use self::spawn::{Runtime, Spawn, unblock};
pub use self::status::{Counters, EntryState, EntryStatus, ErrorKindName, EventStream, PoolEvent, Received, Status, UnloadReason};
pub use self::types::{
    Admission, Admitted, BudgetHook, Cost, DrainHook, Evicted, Key, Kind, Load, LoadContext, Loaded, MemoryProbe, MemoryReading,
    NoRoom, Origin, Plan, PoolOptions, Progress, Quiesce, Reclaimed, Release, Token, Verdict,
};

use self::flight::Stage;
use self::policy::{Decision, fewest};
use self::state::{Inner, Slot, State};
use self::status::{millis, saturated};
use self::table::Phase;
use crate::cancel::CancelToken;
use crate::clock::{BoxFuture, Clock, SystemClock};
use crate::error::{Error, ErrorKind, Result};

/// A handle to a pool; clones are the same pool. When the last handle goes, the pool closes in the background.
#[derive(Clone)]
pub struct Pool {
    handle: Arc<Handle>,
}

/// What handles count. Leases and tasks hold the inside, not this, so that they do not keep the pool open.
struct Handle {
    inner: Arc<Inner>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inner.with(|state, out| state.close(&self.inner, out));
    }
}

impl Pool {
    /// Makes a pool. `InvalidArgument` for a budget of 0; `Io` when its thread cannot be started.
    pub fn new(options: PoolOptions) -> Result<Self> {
        check_budget(options.budget_bytes)?;
        let mut clock = options.clock.clone();
        let spawner = match options.spawner.clone() {
            Some(spawner) => spawner,
            None => {
                let runtime = Arc::new(Runtime::start("hob-pool")?);
                clock.get_or_insert_with(|| Arc::new(SystemClock::on(runtime.clone())));
                runtime
            }
        };
        let clock = clock.unwrap_or_else(|| SystemClock::shared());
        Ok(Self { handle: Arc::new(Handle { inner: Arc::new(Inner::new(options, clock, spawner)) }) })
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.handle.inner
    }

    // ---- admission and use ----

    /// Makes `admission.key` resident: a hit if it is, a join if somebody is loading it, else a load once there is room.
    ///
    /// The work starts at the first poll. `load` runs at most once, as a task of the pool's spawner, after its victims are
    /// gone; it stores the engine under `context.token`. `release` runs at most once, when the entry goes; it names the
    /// token and must not hold the engine. Both are dropped unused on a hit or a join.
    ///
    /// Dropping the future, its cancel token and its deadline all mean leaving: the load goes on for others, and is
    /// cancelled when the last one has left.
    ///
    /// Errors: `InvalidArgument` (empty id), `BudgetExceeded`, `Busy` (too many wait, or paused with `Refuse`), `Cancelled`,
    /// `Timeout`, `Closed`, `Callback` (the load panicked), or whatever the load or the estimator returned.
    pub fn admit<L, R>(
        &self,
        admission: Admission,
        load: L,
        release: R,
    ) -> impl Future<Output = Result<Admitted>> + Send + use<L, R>
    where
        L: Load + 'static,
        R: Release + 'static,
    {
        flight::admit(self.inner().clone(), admission, Box::new(load), Box::new(release))
    }

    /// [`admit`](Self::admit) with actions that are objects already, for bindings.
    pub fn admit_boxed(
        &self,
        admission: Admission,
        load: Box<dyn Load>,
        release: Box<dyn Release>,
    ) -> BoxFuture<'static, Result<Admitted>> {
        Box::pin(flight::admit(self.inner().clone(), admission, load, release))
    }

    /// [`admit`](Self::admit) in use: the entry is returned with a lease on it.
    pub fn acquire<L, R>(&self, admission: Admission, load: L, release: R) -> impl Future<Output = Result<Lease>> + Send + use<L, R>
    where
        L: Load + 'static,
        R: Release + 'static,
    {
        let admitted = self.admit(admission.in_use(), load, release);
        async move { admitted.await?.lease.ok_or_else(|| Error::internal("an admission in use came without its lease")) }
    }

    /// Begins a use of a resident entry: count and clock in one step. `None`, without any effect, when the pool does not
    /// hold the key (any more). Never waits, never loads.
    #[must_use]
    pub fn begin_use(&self, key: &Key) -> Option<Lease> {
        self.inner().begin_use(key, None)
    }

    /// [`begin_use`](Self::begin_use) with an idle policy for the countdown that follows this use; the use begun last wins.
    #[must_use]
    pub fn begin_use_with(&self, key: &Key, idle: IdlePolicy) -> Option<Lease> {
        self.inner().begin_use(key, Some(idle))
    }

    /// The raw pair for bindings: begins a use that [`end_use`](Self::end_use) must end, exactly once, whatever happens.
    #[must_use]
    pub fn begin_use_counted(&self, key: &Key) -> Option<Token> {
        self.begin_use(key).map(Lease::into_token)
    }

    /// Ends a use begun with [`begin_use_counted`](Self::begin_use_counted) (or kept by [`Lease::into_token`]), also of an
    /// entry that was detached meanwhile. It goes by token, not by key: the key may name a newer entry by now. Answers
    /// false, and counts it in [`Counters::unbalanced_ends`], when no such use is open.
    pub fn end_use(&self, token: Token) -> bool {
        let find = |state: &State| state.table.get(*state.tokens.get(&token)?).map(|entry| entry.shared.clone());
        match self.inner().look(find) {
            Some(shared) => shared.end_use(),
            None => {
                self.inner().with(|state, _| state.counters.unbalanced_ends += 1);
                false
            }
        }
    }

    /// The token of a resident entry, without a use and without touching its clock.
    #[must_use]
    pub fn peek(&self, key: &Key) -> Option<Token> {
        self.inner().look(|state| ready(state, key).and_then(|at| state.table.get(at)).map(|entry| entry.shared.token))
    }

    /// Refreshes a resident entry's clock without a use. False when it is not resident.
    pub fn touch(&self, key: &Key) -> bool {
        self.inner().with(|state, out| {
            let Some(at) = ready(state, key) else { return false };
            state.table.touch(at);
            state.recount(self.inner(), at, out);
            true
        })
    }

    // ---- letting go ----

    /// Drops an entry without its release: the owner has let go already (P15). Returns the bytes taken off the account, or
    /// `None` when the key is not resident; a load under way is not touched. Leases on it are detached, and its bytes then
    /// stay on the account until the last of them ends. Does not drain; see [`forget_and_drain`](Self::forget_and_drain).
    pub fn forget(&self, key: &Key) -> Option<u64> {
        self.inner().with(|state, out| {
            let at = ready(state, key)?;
            let bytes = state.table.get(at)?.bytes;
            state.forget(self.inner(), at, UnloadReason::Forgotten, out);
            Some(bytes)
        })
    }

    /// [`forget`](Self::forget) only if the entry is still the one of `token` (P27): an owner that was overtaken forgets
    /// what it admitted, never what came after.
    pub fn forget_token(&self, token: Token) -> Option<u64> {
        self.inner().with(|state, out| {
            let at = *state.tokens.get(&token)?;
            let entry = state.table.get(at).filter(|entry| entry.is_ready())?;
            let bytes = entry.bytes;
            state.forget(self.inner(), at, UnloadReason::Forgotten, out);
            Some(bytes)
        })
    }

    /// [`forget`](Self::forget), then drain; returns the bytes really given back. Call it after the owner's last reference
    /// is gone. `NotFound` when the key is not resident (nothing is drained then).
    pub async fn forget_and_drain(&self, key: &Key) -> Result<u64> {
        let inner = self.inner().clone();
        let before = inner.held();
        let bytes = self.forget(key).ok_or_else(|| not_resident(key))?;
        inner.drain().await;
        Ok(match before {
            Some(before) => inner.settled(before, bytes).await,
            None => bytes,
        })
    }

    /// Unloads an entry: detached at once, so that nobody can hit it any more, then released and drained; the future
    /// completes when that is done. The release goes on if the future is dropped.
    ///
    /// An entry in use is refused with `InUse` unless `force`: it is then released under its leases, whose holders finish on
    /// their own references; the last one frees the memory. A key being loaded is waited for, or, with `force`, its load is
    /// cancelled and everybody who waits for it gets `Cancelled`. A key being unloaded is waited for. `NotFound` when the
    /// pool does not hold it, `Closed` after close; a release's own failure is returned, with the entry gone all the same.
    pub async fn evict(&self, key: &Key, force: bool) -> Result<Evicted> {
        enum Step {
            Done(Result<Evicted>),
            Wait(oneshot::Receiver<()>, bool),
            Unload(u32, Token),
        }
        let inner = self.inner().clone();
        let mut joined = false;
        loop {
            let step = inner.with(|state, out| {
                if let Err(error) = state.check_open() {
                    return Step::Done(Err(error));
                }
                match state.slots.get(key).copied() {
                    Some(Slot::Ready(at)) => {
                        let Some(entry) = state.table.get(at) else { return Step::Done(Err(not_resident(key))) };
                        if entry.uses > 0 && !force {
                            let text = format!("{key} is in use by {} leases; end them, or evict with force", entry.uses);
                            return Step::Done(Err(Error::new(ErrorKind::InUse, text)));
                        }
                        match state.detach(at, UnloadReason::Requested, None, out) {
                            Some(token) => Step::Unload(at, token),
                            None => Step::Done(Err(not_resident(key))),
                        }
                    }
                    Some(Slot::Flight(token)) => {
                        let Some(flight) = state.flights.get_mut(&token) else { return Step::Done(Err(not_resident(key))) };
                        let running = flight.stage.is_running();
                        if !running && !force {
                            let text = format!("{key} is not resident: its admission waits for room; evict with force to end it");
                            return Step::Done(Err(Error::new(ErrorKind::NotFound, text)));
                        }
                        let (sender, receiver) = oneshot::channel();
                        flight.waiters.push(sender);
                        if force {
                            let text = format!("{key} was evicted while it was loading; admit it again");
                            state.doom(&inner, token, Error::new(ErrorKind::Cancelled, text), out);
                        }
                        Step::Wait(receiver, force)
                    }
                    None => {
                        let closing = state.table.draining.clone().into_iter().find_map(|at| {
                            let entry = state.table.get_mut(at).filter(|entry| entry.shared.key == *key)?;
                            match &mut entry.phase {
                                Phase::Draining(draining) if !draining.released || draining.finishing => {
                                    Some(&mut draining.waiters)
                                }
                                _ => None,
                            }
                            .map(|waiters| {
                                let (sender, receiver) = oneshot::channel();
                                waiters.push(sender);
                                receiver
                            })
                        });
                        match closing {
                            Some(receiver) => Step::Wait(receiver, true),
                            None if joined => Step::Done(Ok(Evicted { token: None, freed_bytes: 0 })),
                            None => Step::Done(Err(not_resident(key))),
                        }
                    }
                }
            });
            match step {
                Step::Done(result) => return result,
                Step::Wait(ended, counts) => {
                    joined |= counts;
                    let _ = ended.await;
                }
                Step::Unload(at, token) => {
                    let outcome = release::detached(&inner, release::unload(&inner, at, token, true)).await;
                    let outcome = outcome.ok_or_else(|| Error::internal("the executor dropped the task of a release"))?;
                    outcome.result?;
                    return Ok(Evicted { token: Some(token), freed_bytes: outcome.freed });
                }
            }
        }
    }

    /// Unloads idle entries, least recently used first, until the account is within the budget again.
    pub async fn trim(&self) -> Result<Reclaimed> {
        self.reclaim(None, |state| {
            let account = state.account();
            account.used().saturating_sub(account.limit())
        })
        .await
    }

    /// Unloads idle entries, least recently used first, until `bytes` are free; evicts nothing in use or pinned, reserves
    /// nothing, and ends quietly when nothing more can go ([`Reclaimed::fits`] tells). `cancel` stops it between releases.
    pub async fn make_room(&self, bytes: u64, cancel: Option<CancelToken>) -> Result<Reclaimed> {
        self.reclaim(cancel, move |state| {
            let account = state.account();
            (account.used() + u128::from(bytes)).saturating_sub(account.limit())
        })
        .await
    }

    async fn reclaim(&self, cancel: Option<CancelToken>, missing: impl Fn(&State) -> u128) -> Result<Reclaimed> {
        let inner = self.inner().clone();
        let mut reclaimed = Reclaimed::default();
        loop {
            if let Some(cancel) = &cancel {
                cancel.check()?;
            }
            let next = inner.with(|state, out| {
                state.check_open()?;
                let missing = missing(state);
                reclaimed.fits = missing == 0;
                let victim = fewest(missing.min(1), state.table.lru()).first().copied();
                Ok::<_, Error>(victim.and_then(|at| {
                    let key = state.table.get(at)?.shared.key.clone();
                    let token = state.detach(at, UnloadReason::Evicted, None, out)?;
                    Some((key, release::unload(&inner, at, token, false)))
                }))
            })?;
            let Some((key, unload)) = next else { return Ok(reclaimed) };
            reclaimed.add(key, release::detached(&inner, unload).await);
        }
    }

    /// Unloads every entry past its idle time now, one by one, and completes when they are gone. The pool does this by
    /// itself too: with a timer, and at every admission.
    pub async fn sweep(&self) -> Result<Reclaimed> {
        let inner = self.inner().clone();
        let mut reclaimed = Reclaimed { fits: true, ..Reclaimed::default() };
        let unloads = inner.with(|state, out| {
            state.check_open()?;
            let mut unloads = Vec::new();
            for (at, _) in state.expired() {
                let Some(key) = state.table.get(at).map(|entry| entry.shared.key.clone()) else { continue };
                if let Some(token) = state.detach(at, UnloadReason::Idle, None, out) {
                    unloads.push((key, release::unload(&inner, at, token, false)));
                }
            }
            Ok::<_, Error>(unloads)
        })?;
        // One task for all, so that the detached ones go even if this future is dropped.
        let done = release::detached(&inner, async move {
            for (key, unload) in unloads {
                reclaimed.add(key, Some(unload.await));
            }
            reclaimed
        });
        done.await.ok_or_else(|| Error::internal("the executor dropped the task of a sweep"))
    }

    // ---- marks and limits ----

    /// Pins an entry, resident or on its way in: never evicted, never swept; an explicit evict, forget or close still works.
    /// False when the pool does not know the key.
    pub fn pin(&self, key: &Key) -> bool {
        self.set_pinned(key, true)
    }

    /// Undoes [`pin`](Self::pin). The entry takes its place by its last use, and its idle countdown runs again.
    pub fn unpin(&self, key: &Key) -> bool {
        self.set_pinned(key, false)
    }

    fn set_pinned(&self, key: &Key, pinned: bool) -> bool {
        let inner = self.inner();
        inner.with(|state, out| match state.slots.get(key).copied() {
            None => false,
            Some(Slot::Flight(token)) => {
                if let Some(flight) = state.flights.get_mut(&token) {
                    flight.pinned = pinned;
                    for joiner in flight.joiners.values_mut() {
                        joiner.pinned &= pinned;
                    }
                }
                true
            }
            Some(Slot::Ready(at)) => {
                state.table.set_pinned(at, pinned);
                if !pinned {
                    state.recount(inner, at, out);
                }
                // Pinning can leave nothing to wait for, unpinning can make room: whoever stands in line looks again.
                state.pump(inner, out);
                true
            }
        })
    }

    /// Whether a resident entry is pinned; `None` when it is not resident.
    #[must_use]
    pub fn is_pinned(&self, key: &Key) -> Option<bool> {
        self.inner().look(|state| ready(state, key).and_then(|at| state.table.get(at)).map(|entry| entry.pinned))
    }

    /// Changes a resident entry's own idle policy (`None`: the pool's). A running countdown is reckoned anew. False when it
    /// is not resident.
    pub fn set_idle(&self, key: &Key, idle: Option<IdlePolicy>) -> bool {
        let inner = self.inner();
        inner.with(|state, out| {
            let Some(at) = ready(state, key) else { return false };
            if let Some(entry) = state.table.get_mut(at) {
                entry.idle = idle;
                entry.use_idle = None;
            }
            state.recount(inner, at, out);
            true
        })
    }

    /// Changes the pool's idle policy, which rules entries without one of their own.
    pub fn set_default_idle(&self, idle: IdlePolicy) {
        let inner = self.inner();
        inner.with(|state, out| {
            state.idle = idle;
            let all: Vec<u32> = state.table.lru().map(|(at, _)| at).collect();
            for at in all {
                state.recount(inner, at, out);
            }
        });
    }

    /// Brings running countdowns forward so that they end within `grace` from now (I14): for memory pressure. Entries in
    /// use, pinned or without a countdown are not touched, and a new use makes it void. Returns how many were brought forward.
    pub fn accelerate_idle(&self, grace: Duration) -> usize {
        let inner = self.inner();
        inner.with(|state, out| {
            let Some(sooner) = state.now().checked_add(grace) else { return 0 };
            let due: Vec<u32> = state.table.lru().map(|(at, _)| at).collect();
            let mut count = 0;
            for at in due {
                let idle = state.idle;
                let Some(entry) = state.table.get_mut(at) else { continue };
                if entry.unload_at(idle).is_some_and(|deadline| deadline > sooner) {
                    entry.accelerated = Some(sooner);
                    count += 1;
                    state.arm(inner, sooner, out);
                }
            }
            count
        })
    }

    /// Changes the budget. Nothing is evicted by that: a smaller one takes effect at the next admission or
    /// [`trim`](Self::trim), a larger one lets waiting admissions go on. `InvalidArgument` for 0.
    pub fn set_budget(&self, bytes: u64) -> Result<()> {
        check_budget(bytes)?;
        let inner = self.inner();
        inner.with(|state, out| {
            state.check_open()?;
            state.table.account.budget = bytes;
            state.emit(out, || PoolEvent::BudgetChanged { bytes });
            state.pump(inner, out);
            Ok::<(), Error>(())
        })?;
        if let Some(hook) = &inner.on_budget {
            // Read under the hook's lock: of two changes at once, the last call tells the newer budget.
            let hook = hook.lock();
            let newest = self.budget();
            if let Err(error) = spawn::guarded_call("the budget hook", || hook(newest)) {
                tracing::warn!(%error, "the budget hook failed");
            }
        }
        Ok(())
    }

    /// The budget in bytes.
    #[must_use]
    pub fn budget(&self) -> u64 {
        self.inner().look(|state| state.table.account.budget)
    }

    /// Corrects a resident entry's charge to what was measured (P51). More of it evicts nothing by itself. False when the
    /// token is not resident.
    pub fn set_measured(&self, token: Token, bytes: u64) -> bool {
        let inner = self.inner();
        inner.with(|state, out| {
            let Some(at) = state.tokens.get(&token).copied() else { return false };
            if !state.table.get(at).is_some_and(table::Entry::is_ready) {
                return false;
            }
            state.table.set_measured(at, bytes);
            state.note_peak();
            state.pump(inner, out);
            true
        })
    }

    /// Puts bytes of the host's own on the account for as long as the value lives.
    pub fn charge_external(&self, bytes: u64) -> ExternalCharge {
        let inner = self.inner().clone();
        inner.change_external(0, bytes);
        ExternalCharge { inner, bytes }
    }

    // ---- looking ----

    /// What an admission of `key` for `cost` bytes would do now, changing nothing.
    #[must_use]
    pub fn plan(&self, key: &Key, cost: u64, no_room: Option<NoRoom>) -> Plan {
        self.inner().with(|state, _| {
            let free_bytes = saturated(state.account().free());
            let known = |verdict| Plan { verdict, fits: true, required_bytes: 0, free_bytes, evict: Vec::new() };
            match state.slots.get(key) {
                Some(Slot::Ready(_)) => return known(Verdict::Resident),
                Some(Slot::Flight(_)) => return known(Verdict::Loading),
                None => {}
            }
            let no_room = no_room.unwrap_or(state.no_room);
            let behind = (!state.queue.is_empty() && no_room == NoRoom::Wait) || state.pauses > 0;
            let (verdict, victims) = match state.preview(cost, no_room, None) {
                Decision::Refuse(_) => (Verdict::Refused, Vec::new()),
                Decision::Wait => (Verdict::Waits, Vec::new()),
                Decision::Admit { .. } if behind => (Verdict::Waits, Vec::new()),
                Decision::Admit { victims, over_budget: true } => (Verdict::Alone, victims),
                Decision::Admit { victims, .. } if victims.is_empty() => (Verdict::Fits, victims),
                Decision::Admit { victims, .. } => (Verdict::Evicts, victims),
            };
            let fits = matches!(verdict, Verdict::Fits | Verdict::Evicts);
            let evict = victims.iter().filter_map(|at| state.table.get(*at)).map(|entry| entry.shared.key.clone()).collect();
            Plan { verdict, fits, required_bytes: cost, free_bytes, evict }
        })
    }

    /// Whether so many bytes more could be had now, idle models given up for them. Changes nothing.
    #[must_use]
    pub fn has_room(&self, bytes: u64) -> bool {
        self.inner().with(|state, _| state.has_room(bytes, false))
    }

    /// As [`has_room`](Self::has_room), for a resident that grows: the allocator serves it from its freed buffers too.
    pub(crate) fn could_grow(&self, bytes: u64) -> bool {
        self.inner().with(|state, _| state.has_room(bytes, true))
    }

    /// A snapshot. Never loads, never waits for a device.
    #[must_use]
    pub fn status(&self) -> Status {
        self.inner().with(|state, _| snapshot(state, state.reading()))
    }

    /// Subscribes to what happens from now on, holding at most `capacity` (at least 1) unread events.
    #[must_use]
    pub fn events(&self, capacity: usize) -> EventStream {
        self.inner().with(|state, _| state.hub.subscribe(capacity))
    }

    /// The pool's clock, for deadlines.
    #[must_use]
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.inner().clock.clone()
    }

    /// Runs a task on the pool's spawner.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.inner().spawner.spawn(Box::pin(task));
    }

    // ---- quiescing and the end ----

    /// Holds back new loads, waits for those under way and for releases to end, and quiesces the residents that have a hook,
    /// in the order of their keys. Residents stay usable. The pool resumes when the returned value is dropped; when the
    /// future is dropped or a hook fails, everything done so far is undone.
    pub async fn pause(&self) -> Result<Paused> {
        let inner = self.inner().clone();
        inner.with(|state, out| {
            state.check_open()?;
            state.pauses += 1;
            if state.pauses == 1 {
                state.emit(out, || PoolEvent::Paused);
            }
            Ok::<(), Error>(())
        })?;
        let mut paused = Paused { inner: inner.clone(), quiesced: Vec::new() };
        release::quiet(&inner).await;
        let mut residents = inner.with(|state, _| {
            let entries = state.table.iter().filter(|(_, entry)| entry.is_ready());
            entries.filter_map(|(_, entry)| Some((entry.shared.key.clone(), entry.quiesce.clone()?))).collect::<Vec<_>>()
        });
        residents.sort_by(|a, b| a.0.cmp(&b.0));
        for (key, hook) in residents {
            // Noted before it is called: a hook that is interrupted half-way is resumed too.
            paused.quiesced.push((key, hook.clone()));
            spawn::guarded("the quiesce of a resident", || hook.quiesce()).await?;
        }
        inner.with(|state, _| state.check_open())?;
        Ok(paused)
    }

    /// Closes the pool: admissions in line end with `Closed`, loads are asked to stop and then rejected, and every entry,
    /// pinned or leased too, is detached and released. Leases stay valid; their memory goes with their last holder, and is
    /// not waited for. Closing again returns the first close's result. All failed releases make one error.
    pub async fn close(&self) -> Result<()> {
        let inner = self.inner().clone();
        loop {
            let ended = inner.with(|state, out| {
                if let Some(result) = &state.closed {
                    return Err(result.clone());
                }
                let (sender, receiver) = oneshot::channel();
                state.close_waiters.push(sender);
                state.close(&inner, out);
                Ok(receiver)
            });
            match ended {
                Err(result) => return result,
                Ok(receiver) => {
                    let _ = receiver.await;
                }
            }
        }
    }

    /// Waits until no load and no release is under way.
    pub(crate) async fn quiet(&self) {
        release::quiet(self.inner()).await;
    }

    /// Whether the pool is closed or closing.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner().look(|state| state.closing)
    }

    /// Recomputes every sum of the account from what is held; an error names the first difference. For tests.
    #[doc(hidden)]
    pub fn check_account(&self) -> Result<()> {
        self.inner().with(|state, _| state.check()).map_err(Error::internal)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("budget_bytes", &self.budget()).finish_non_exhaustive()
    }
}

impl Reclaimed {
    fn add(&mut self, key: Key, outcome: Option<release::Outcome>) {
        self.evicted.push(key);
        if let Some(outcome) = outcome {
            self.freed_bytes = self.freed_bytes.saturating_add(outcome.freed);
            self.errors.extend(outcome.result.err());
        }
    }
}

fn ready(state: &State, key: &Key) -> Option<u32> {
    match state.slots.get(key) {
        Some(Slot::Ready(at)) => Some(*at),
        _ => None,
    }
}

fn not_resident(key: &Key) -> Error {
    Error::new(ErrorKind::NotFound, format!("{key} is not in the pool; admit it first"))
}

fn check_budget(bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Err(Error::invalid("the budget is 0 bytes; give budget_bytes at least 1 (see default_budget)"));
    }
    Ok(())
}

fn snapshot(state: &State, memory: Option<MemoryReading>) -> Status {
    let now = state.now();
    let ms_until = |deadline: Option<std::time::Instant>| deadline.map(|deadline| millis(deadline.saturating_duration_since(now)));
    let mut entries: Vec<EntryStatus> = state
        .table
        .iter()
        .map(|(_, entry)| {
            let history = state.history.get(&entry.shared.key).copied().unwrap_or_default();
            EntryStatus {
                key: entry.shared.key.clone(),
                kind: entry.shared.key.kind().to_string(),
                id: entry.shared.key.id().to_owned(),
                token: entry.shared.token,
                state: if entry.is_ready() { EntryState::Ready } else { EntryState::Draining },
                bytes: entry.bytes,
                estimated_bytes: Some(entry.estimated),
                measured_bytes: entry.measured,
                pinned: entry.pinned,
                uses: entry.uses,
                idle_ms: if entry.uses > 0 { 0 } else { millis(now.saturating_duration_since(entry.last_use)) },
                idle: entry.policy(state.idle).normalized(),
                unload_in_ms: ms_until(entry.unload_at(state.idle)),
                progress: None,
                loads: history.loads,
                unloads: history.unloads,
                last_load_ms: history.last_load.map(millis),
            }
        })
        .collect();
    entries.extend(state.flights.values().map(|flight| {
        let history = state.history.get(&flight.key).copied().unwrap_or_default();
        let running = flight.stage.is_running();
        EntryStatus {
            key: flight.key.clone(),
            kind: flight.key.kind().to_string(),
            id: flight.key.id().to_owned(),
            token: flight.token,
            state: if running { EntryState::Loading } else { EntryState::Waiting },
            bytes: if running { saturated(u128::from(flight.cost) - flight.overlap()) } else { 0 },
            estimated_bytes: (flight.stage != Stage::Estimating).then_some(flight.cost),
            measured_bytes: None,
            pinned: flight.is_pinned(),
            uses: flight.joiners.len() as u64,
            idle_ms: 0,
            idle: flight.idle().unwrap_or(state.idle).normalized(),
            unload_in_ms: None,
            progress: match flight.stage {
                Stage::Loading { percent, .. } => Some(f32::from(percent) / 100.0),
                _ => None,
            },
            loads: history.loads,
            unloads: history.unloads,
            last_load_ms: history.last_load.map(millis),
        }
    }));
    entries.sort_by(|a, b| a.key.cmp(&b.key).then(a.token.cmp(&b.token)));
    let account = state.account();
    Status {
        budget_bytes: account.budget,
        physical_limit_bytes: account.physical,
        resident_bytes: saturated(account.resident),
        pending_bytes: saturated(account.pending - account.overlap),
        releasing_bytes: saturated(account.releasing),
        external_bytes: saturated(account.external),
        used_bytes: saturated(account.charged()),
        peak_used_bytes: saturated(state.peak),
        free_bytes: saturated(account.free()),
        waiting: state.queue.len(),
        paused: state.pauses > 0,
        closed: state.closing,
        entries,
        counters: Counters { hits: state.table.hits, ..state.counters },
        memory,
    }
}
