//! The pool's state behind its one mutex, and every transition of it. Nothing here awaits, calls host code or wakes anybody:
//! what has to happen outside goes into an [`Outbox`], which is emptied after the unlock.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use tokio::sync::oneshot;

use super::flight::{Flight, Joiner, Stage};
use super::idle::IdlePolicy;
use super::lease::Lease;
use super::policy::{Account, fewest};
use super::release;
use super::spawn::{Spawn, drop_guarded, guarded_call};
use super::status::{Counters, ErrorKindName, Hub, PoolEvent, UnloadReason, millis};
use super::table::{Draining, EntryShared, NewEntry, Phase, Table};
use super::types::{
    Admitted, BudgetHook, DrainHook, Key, Loaded, MemoryProbe, MemoryReading, NoRoom, Origin, PoolOptions, Release, Token, closed,
};
use crate::cancel::CancelToken;
use crate::clock::{BoxFuture, Clock};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;

/// What is shared by the pool's handles, leases and tasks.
pub(crate) struct Inner {
    pub(crate) state: Mutex<State>,
    /// The residents, to be found without the mutex; changed under it. A loan tells whether what was found may be used.
    pub(crate) residents: DashMap<Key, Arc<EntryShared>, BuildHasherDefault<NameHasher>>,
    pub(crate) clock: Arc<dyn Clock>,
    /// What stamps of the clock count from.
    pub(crate) epoch: Instant,
    pub(crate) spawner: Arc<dyn Spawn>,
    pub(crate) drain: Option<DrainHook>,
    pub(crate) probe: Option<Arc<dyn MemoryProbe>>,
    pub(crate) settle: Duration,
    /// Its lock is taken before the state's, and only while the budget is changed.
    pub(crate) on_budget: Option<Mutex<BudgetHook>>,
}

/// Effects put off until the mutex is free: tasks to start, callers to answer, host values to drop.
#[derive(Default)]
pub(crate) struct Outbox {
    tasks: Vec<BoxFuture<'static, ()>>,
    answers: Vec<(oneshot::Sender<Result<Admitted>>, Result<Admitted>)>,
    signals: Vec<oneshot::Sender<()>>,
    cancels: Vec<CancelToken>,
    wakers: Vec<Waker>,
    garbage: Vec<Box<dyn Any + Send>>,
}

impl Outbox {
    pub(crate) fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.push(Box::pin(task));
    }

    pub(crate) fn signal(&mut self, signal: oneshot::Sender<()>) {
        self.signals.push(signal);
    }

    pub(crate) fn discard(&mut self, value: impl Any + Send) {
        self.garbage.push(Box::new(value));
    }

    fn deliver(self, inner: &Arc<Inner>) {
        for value in self.garbage {
            drop_guarded(value);
        }
        for token in self.cancels {
            token.cancel();
        }
        for (caller, answer) in self.answers {
            // A caller who has gone meanwhile gets nothing: the lease in the answer ends its use here.
            drop(caller.send(answer));
        }
        for signal in self.signals {
            let _ = signal.send(());
        }
        for waker in self.wakers {
            waker.wake();
        }
        for task in self.tasks {
            inner.spawner.spawn(task);
        }
    }
}

/// A fast hash for short names: the tables are small and hold the host's own names.
#[derive(Default, Clone)]
pub(crate) struct NameHasher(u64);

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0u8; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(byte.into());
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<NameHasher>>;

/// What a key stands for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Resident.
    Ready(u32),
    /// On its way in.
    Flight(Token),
}

/// What is remembered of a key across its entries.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct History {
    pub(crate) loads: u64,
    pub(crate) unloads: u64,
    pub(crate) last_load: Option<Duration>,
}

// Enough that threads with keys of their own rarely meet in one.
const INDEX_SHARDS: usize = 64;

// Histories of keys that are not in the table are dropped beyond this, so that endless new names cannot fill the memory.
const HISTORY_LIMIT: usize = 16_384;

pub(crate) struct State {
    pub(crate) table: Table,
    pub(crate) slots: Map<Key, Slot>,
    pub(crate) tokens: Map<Token, u32>,
    pub(crate) flights: Map<Token, Flight>,
    /// Who stands in line, by ticket.
    pub(crate) queue: BTreeMap<u64, Token>,
    pub(crate) queued_bytes: u128,
    pub(crate) pumping: bool,
    next: u64,
    pub(crate) idle: IdlePolicy,
    pub(crate) no_room: NoRoom,
    pub(crate) max_waiting: usize,
    /// Loads whose bytes are reserved.
    pub(crate) running: usize,
    pub(crate) pauses: usize,
    pub(crate) closing: bool,
    pub(crate) closed: Option<Result<()>>,
    pub(crate) close_waiters: Vec<oneshot::Sender<()>>,
    pub(crate) quiet_waiters: Vec<oneshot::Sender<()>>,
    /// Not later than any running countdown's end.
    pub(crate) next_wake: Option<Instant>,
    /// Whether the sweeper's task runs, and how to wake it before its time; taken while it has been woken and not looked yet.
    pub(crate) sweeping: bool,
    pub(crate) sweeper: Option<oneshot::Sender<()>>,
    pub(crate) hub: Hub,
    pub(crate) counters: Counters,
    pub(crate) history: HashMap<Key, History>,
    history_limit: usize,
    pub(crate) peak: u128,
    probe: Option<Arc<dyn MemoryProbe>>,
    /// Releases do not drain: what the allocator keeps then is there for the next load, and no floor of the account.
    keeps_cache: bool,
}

impl Inner {
    pub(crate) fn new(options: PoolOptions, clock: Arc<dyn Clock>, spawner: Arc<dyn Spawn>) -> Self {
        let epoch = clock.now();
        Self {
            state: Mutex::new(State::new(&options, epoch)),
            residents: DashMap::with_hasher_and_shard_amount(BuildHasherDefault::default(), INDEX_SHARDS),
            clock,
            epoch,
            spawner,
            drain: options.drain.filter(|_| options.drain_after_release),
            probe: options.probe,
            settle: options.settle,
            on_budget: options.on_budget.map(Mutex::new),
        }
    }

    /// Looks at what no use can change.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&State) -> R) -> R {
        look(&self.state.lock())
    }

    /// Runs a transition under the mutex, with every loan recalled, and delivers its effects after the unlock.
    pub(crate) fn with<R>(self: &Arc<Self>, transition: impl FnOnce(&mut State, &mut Outbox) -> R) -> R {
        let mut out = Outbox::default();
        let stamp = self.clock.stamp(self.epoch);
        let result = {
            let mut state = self.state.lock();
            state.table.pass(stamp);
            state.table.recall();
            transition(&mut state, &mut out)
        };
        out.deliver(self);
        result
    }

    /// The fast path of a hit.
    pub(crate) fn begin_use(self: &Arc<Self>, key: &Key, use_idle: Option<IdlePolicy>) -> Option<Lease> {
        if use_idle.is_none() {
            // Cloned first: nothing else may happen while the index is locked.
            let found = self.residents.get(key).map(|shared| shared.clone());
            if let Some(shared) = found.filter(|shared| shared.loan.begin()) {
                return Some(Lease { shared, origin: Origin::Hit, armed: true });
            }
        }
        let stamp = self.clock.stamp(self.epoch);
        let mut state = self.state.lock();
        let Some(Slot::Ready(at)) = state.slots.get(key).copied() else { return None };
        state.table.pass(stamp);
        state.table.recall_one(at);
        state.table.hits += 1;
        let lease = state.lease(at, Origin::Hit, use_idle);
        let mut out = None;
        state.lend(self, at, &mut out);
        drop(state);
        if let Some(out) = out {
            out.deliver(self);
        }
        Some(lease)
    }

    pub(crate) fn change_external(self: &Arc<Self>, from: u64, to: u64) {
        self.with(|state, out| {
            state.table.account.external = state.table.account.external - u128::from(from) + u128::from(to);
            state.note_peak();
            if to < from {
                state.pump(self, out);
            }
        });
    }

    pub(crate) fn resume(self: &Arc<Self>) {
        self.with(|state, out| {
            state.pauses -= 1;
            if state.pauses == 0 {
                state.emit(out, || PoolEvent::Resumed);
                state.pump_impatient(self, out);
                state.pump(self, out);
            }
        });
    }
}

impl EntryShared {
    /// Ends a use that a lease or a raw begin opened. Answers whether one was open.
    pub(crate) fn end_use(&self) -> bool {
        let inner = &self.inner;
        if self.loan.end(|| inner.clock.stamp(inner.epoch)) {
            return true;
        }
        let stamp = inner.clock.stamp(inner.epoch);
        let mut state = inner.state.lock();
        state.table.pass(stamp);
        let mut out = None;
        let ended = state.end_use(inner, self.at, self.token, &mut out);
        drop(state);
        if let Some(out) = out {
            out.deliver(inner);
        }
        ended
    }
}

impl State {
    pub(crate) fn new(options: &PoolOptions, now: Instant) -> Self {
        let account = Account { budget: options.budget_bytes, physical: options.physical_limit_bytes, ..Account::default() };
        Self {
            table: Table::new(account, now),
            slots: Map::default(),
            tokens: Map::default(),
            flights: Map::default(),
            queue: BTreeMap::new(),
            queued_bytes: 0,
            pumping: false,
            next: 0,
            idle: options.idle,
            no_room: options.no_room,
            max_waiting: options.max_waiting,
            running: 0,
            pauses: 0,
            closing: false,
            closed: None,
            close_waiters: Vec::new(),
            quiet_waiters: Vec::new(),
            next_wake: None,
            sweeping: false,
            sweeper: None,
            hub: Hub::default(),
            counters: Counters::default(),
            history: HashMap::new(),
            history_limit: HISTORY_LIMIT,
            peak: 0,
            probe: options.probe.clone(),
            keeps_cache: !options.drain_after_release,
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.table.now
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) fn emit(&mut self, out: &mut Outbox, event: impl FnOnce() -> PoolEvent) {
        if !self.hub.is_empty() {
            let event = event();
            self.hub.emit(&event, &mut out.wakers);
        }
    }

    pub(crate) fn note_peak(&mut self) {
        self.peak = self.peak.max(self.table.account.charged());
    }

    /// Real memory, where there is a probe. Its panic must not leave a transition half done.
    pub(crate) fn reading(&self) -> Option<MemoryReading> {
        self.probe.as_ref().and_then(|probe| guarded_call("the memory probe", || probe.read()).ok())
    }

    /// The account as a decision needs it.
    pub(crate) fn account(&self) -> Account {
        self.account_of(false)
    }

    /// The same; `cache_serves`: the allocator's freed buffers are there for what is decided about.
    pub(crate) fn account_of(&self, cache_serves: bool) -> Account {
        let reading = self.reading();
        Account {
            movable: self.table.busy + self.running + self.table.draining.len(),
            measured: reading
                .map_or(0, |reading| if cache_serves || self.keeps_cache { reading.active } else { reading.held() }.into()),
            available: reading.and_then(|reading| reading.available),
            ..self.table.account
        }
    }

    // ---- uses ----

    /// A lease on a resident entry; count and clock in this one step.
    #[inline]
    pub(crate) fn lease(&mut self, at: u32, origin: Origin, use_idle: Option<IdlePolicy>) -> Lease {
        self.table.begin(at, use_idle);
        self.lease_of(at, origin)
    }

    // The guard for a use that is already counted.
    fn lease_of(&self, at: u32, origin: Origin) -> Lease {
        // The callers hold the lock and have just found the entry.
        let entry = self.table.get(at).expect("an entry that was just found is in the table");
        Lease { shared: entry.shared.clone(), origin, armed: true }
    }

    /// Lends an entry in use, unless the end of its last use has work to do here.
    fn lend(&mut self, inner: &Arc<Inner>, at: u32, out: &mut Option<Outbox>) {
        let Some(entry) = self.table.get(at) else { return };
        // A use's own policy would be void with the next use, and nobody here would hear of it.
        let policy = entry.policy(self.idle).normalized();
        if !self.queue.is_empty() || policy == IdlePolicy::Immediately || entry.use_idle.is_some() {
            return;
        }
        // The end will not arm the sweeper, so it looks as early as that end could be: now.
        if let Some(deadline) = policy.ttl().and_then(|ttl| self.table.now.checked_add(ttl))
            && self.next_wake.is_none_or(|wake| deadline < wake)
        {
            self.arm(inner, deadline, out.get_or_insert_default());
        }
        self.table.lend(at);
    }

    // The outbox is made only when something is to be done, which at the end of most uses it is not.
    fn end_use(&mut self, inner: &Arc<Inner>, at: u32, token: Token, out: &mut Option<Outbox>) -> bool {
        let known = self.table.get(at).is_some_and(|entry| entry.shared.token == token);
        if known {
            // Somebody may have lent it again since the loan refused this end.
            self.table.recall_one(at);
        }
        if !known || !self.table.end(at) {
            self.counters.unbalanced_ends += 1;
            return false;
        }
        let Some(entry) = self.table.get_mut(at) else { return true };
        if entry.uses > 0 {
            return true;
        }
        match &mut entry.phase {
            Phase::Ready => {
                if entry.policy(self.idle).normalized() == IdlePolicy::Immediately && !entry.pinned {
                    self.unload(inner, at, UnloadReason::Idle, out.get_or_insert_default());
                } else if let Some(deadline) = entry.unload_at(self.idle)
                    && self.next_wake.is_none_or(|wake| deadline < wake)
                {
                    self.arm(inner, deadline, out.get_or_insert_default());
                }
                if !self.queue.is_empty() {
                    self.pump(inner, out.get_or_insert_default());
                }
            }
            Phase::Draining(draining) => {
                // The last holder drains (P36). Before its release has run, the release's own end will do it.
                if draining.released && !draining.finishing {
                    draining.finishing = true;
                    out.get_or_insert_default().spawn(release::finish(inner, at, token));
                }
            }
        }
        true
    }

    // ---- leaving ----

    /// Takes an entry out of reach. Its release, if it is to run, is the caller's to start.
    pub(crate) fn detach(&mut self, at: u32, reason: UnloadReason, flight: Option<Token>, out: &mut Outbox) -> Option<Token> {
        let shared = self.table.get(at)?.shared.clone();
        if self.slots.get(&shared.key) == Some(&Slot::Ready(at)) {
            self.slots.remove(&shared.key);
            shared.inner.residents.remove(&shared.key);
        }
        let since = self.now();
        let draining = Draining { reason, released: false, finishing: false, flight, since, waiters: Vec::new() };
        self.table.detach(at, draining);
        match reason {
            UnloadReason::Evicted => self.counters.evictions += 1,
            UnloadReason::Idle => self.counters.idle_unloads += 1,
            _ => {}
        }
        tracing::debug!(key = %shared.key, token = %shared.token, ?reason, "unloading");
        self.emit(out, || PoolEvent::UnloadStarted { key: shared.key.clone(), token: shared.token, reason });
        Some(shared.token)
    }

    /// Detaches and starts the release in the background.
    pub(crate) fn unload(&mut self, inner: &Arc<Inner>, at: u32, reason: UnloadReason, out: &mut Outbox) {
        if let Some(token) = self.detach(at, reason, None, out) {
            let release = release::unload(inner, at, token, false);
            out.spawn(async move {
                release.await;
            });
        }
    }

    /// Detaches without the release (P15). Leased bytes stay until the last lease ends; others leave the account at once.
    pub(crate) fn forget(&mut self, inner: &Arc<Inner>, at: u32, reason: UnloadReason, out: &mut Outbox) {
        self.detach(at, reason, None, out);
        let Some(entry) = self.table.get_mut(at) else { return };
        if let Some(release) = entry.release.take() {
            out.discard(release);
        }
        if let Phase::Draining(draining) = &mut entry.phase {
            draining.released = true;
        }
        if entry.uses == 0 {
            self.finalize(inner, at, out);
        }
    }

    /// Removes a detached entry whose memory is back.
    pub(crate) fn finalize(&mut self, inner: &Arc<Inner>, at: u32, out: &mut Outbox) {
        let Some(mut entry) = self.table.remove(at) else { return };
        self.tokens.remove(&entry.shared.token);
        self.remember(&entry.shared.key, |history| history.unloads += 1);
        if let Phase::Draining(draining) = &mut entry.phase {
            if let Some(flight) = draining.flight.and_then(|token| self.flights.get_mut(&token)) {
                let before = flight.overlap();
                flight.victims_held -= u128::from(entry.bytes);
                self.table.account.overlap -= before - flight.overlap();
            }
            out.signals.append(&mut draining.waiters);
            let (key, token, reason) = (entry.shared.key.clone(), entry.shared.token, draining.reason);
            let (bytes, ms) = (entry.bytes, millis(self.now().saturating_duration_since(draining.since)));
            self.emit(out, || PoolEvent::Unloaded { key, token, reason, bytes, ms });
        }
        out.discard(entry);
        self.quieten(out);
        self.pump(inner, out);
    }

    pub(crate) fn remember(&mut self, key: &Key, change: impl FnOnce(&mut History)) {
        if self.history.len() >= self.history_limit && !self.history.contains_key(key) {
            let slots = &self.slots;
            self.history.retain(|key, _| slots.contains_key(key));
            // Twice what is left, or a pool of many residents would look through all of them at every new one.
            self.history_limit = HISTORY_LIMIT.max(self.history.len() * 2);
        }
        change(self.history.entry(key.clone()).or_default());
    }

    /// Whether no load and no release is under way. Detached entries that only wait for their leases do not count.
    pub(crate) fn is_quiet(&self) -> bool {
        self.running == 0
            && self.table.draining.iter().all(|at| {
                self.table.get(*at).is_none_or(|entry| {
                    matches!(&entry.phase, Phase::Draining(draining) if draining.released && !draining.finishing && entry.uses > 0)
                })
            })
    }

    pub(crate) fn quieten(&mut self, out: &mut Outbox) {
        if !self.quiet_waiters.is_empty() && self.is_quiet() {
            out.signals.append(&mut self.quiet_waiters);
        }
    }

    // ---- idleness ----

    /// Makes sure that the sweeper looks no later than `deadline`.
    pub(crate) fn arm(&mut self, inner: &Arc<Inner>, deadline: Instant, out: &mut Outbox) {
        if self.closing || self.next_wake.is_some_and(|wake| wake <= deadline) {
            return;
        }
        self.next_wake = Some(deadline);
        if let Some(signal) = self.sweeper.take() {
            out.signals.push(signal);
        } else if !self.sweeping {
            let (sender, receiver) = oneshot::channel();
            self.sweeper = Some(sender);
            self.sweeping = true;
            out.spawn(release::sweeper(Arc::downgrade(inner), inner.clock.clone(), receiver));
        }
    }

    /// Arms the countdown of one entry, or unloads it when its time has come already.
    pub(crate) fn recount(&mut self, inner: &Arc<Inner>, at: u32, out: &mut Outbox) {
        let Some(entry) = self.table.get(at) else { return };
        if entry.is_due(self.idle, self.now()) {
            self.unload(inner, at, UnloadReason::Idle, out);
        } else if let Some(deadline) = entry.unload_at(self.idle) {
            self.arm(inner, deadline, out);
        }
    }

    /// Entries past their time, oldest first. The caller detaches them; the next look is set by what remains.
    pub(crate) fn expired(&mut self) -> Vec<(u32, u64)> {
        if self.next_wake.is_none_or(|wake| self.now() <= wake) {
            return Vec::new();
        }
        let mut expired = Vec::new();
        let mut next: Option<Instant> = None;
        for (at, bytes) in self.table.lru() {
            let Some(entry) = self.table.get(at) else { continue };
            if entry.is_due(self.idle, self.now()) {
                expired.push((at, bytes));
            } else if let Some(deadline) = entry.unload_at(self.idle) {
                next = Some(next.map_or(deadline, |next| next.min(deadline)));
            }
        }
        self.next_wake = next;
        expired
    }

    /// Unloads what is past its time, in the background.
    pub(crate) fn sweep(&mut self, inner: &Arc<Inner>, expired: &[(u32, u64)], out: &mut Outbox) {
        for (at, _) in expired {
            self.unload(inner, *at, UnloadReason::Idle, out);
        }
    }

    // ---- ends of flights ----

    /// Ends a flight that has not installed anything, whatever its stage, and answers everybody who waits for it.
    #[allow(clippy::needless_pass_by_value)] // every caller has done with it
    pub(crate) fn fail(&mut self, inner: &Arc<Inner>, token: Token, error: Error, out: &mut Outbox) {
        self.unqueue(token);
        let Some(mut flight) = self.flights.remove(&token) else { return };
        if flight.stage.is_running() {
            self.running -= 1;
            self.table.account.pending -= u128::from(flight.cost);
            self.table.account.overlap -= flight.overlap();
        } else {
            if error.kind() == ErrorKind::BudgetExceeded || error.kind() == ErrorKind::Busy {
                self.counters.refusals += 1;
            }
            let (key, bytes, kind) = (flight.key.clone(), flight.cost, ErrorKindName(error.kind()));
            self.emit(out, || PoolEvent::Refused { key, bytes, kind });
        }
        if self.slots.get(&flight.key) == Some(&Slot::Flight(token)) {
            self.slots.remove(&flight.key);
        }
        for (_, joiner) in std::mem::take(&mut flight.joiners) {
            out.answers.push((joiner.answer, Err(error.clone())));
        }
        out.signals.append(&mut flight.waiters);
        out.discard(flight);
        self.quieten(out);
        self.pump(inner, out);
    }

    /// Turns a flight into an entry, in one step, and hands out its leases.
    pub(crate) fn install(
        &mut self,
        inner: &Arc<Inner>,
        token: Token,
        loaded: Loaded,
        load_time: Duration,
        release: Box<dyn Release>,
        out: &mut Outbox,
    ) {
        let Some(mut flight) = self.flights.remove(&token) else {
            out.discard(release);
            return;
        };
        self.running -= 1;
        self.table.account.pending -= u128::from(flight.cost);
        self.table.account.overlap -= flight.overlap();
        let (pinned, idle) = (flight.is_pinned(), flight.idle());
        let joiners: Vec<Joiner> = std::mem::take(&mut flight.joiners).into_values().collect();
        let uses = joiners.iter().filter(|joiner| joiner.in_use).count() as u64;
        let use_idle = joiners.iter().rfind(|joiner| joiner.in_use).and_then(|joiner| joiner.use_idle);
        let new = NewEntry {
            key: flight.key.clone(),
            token,
            estimated: flight.cost,
            measured: loaded.bytes,
            pinned,
            uses,
            idle,
            use_idle,
            release,
            quiesce: flight.quiesce.take(),
            load_time,
            inner: inner.clone(),
        };
        let at = self.table.insert(new);
        self.slots.insert(flight.key.clone(), Slot::Ready(at));
        if let Some(entry) = self.table.get(at) {
            inner.residents.insert(flight.key.clone(), entry.shared.clone());
        }
        self.tokens.insert(token, at);
        self.counters.loads += 1;
        self.remember(&flight.key, |history| {
            history.loads += 1;
            history.last_load = Some(load_time);
        });
        for joiner in joiners {
            let lease = joiner.in_use.then(|| self.lease_of(at, joiner.origin));
            out.answers.push((joiner.answer, Ok(Admitted { token, origin: joiner.origin, load_time, lease })));
        }
        out.signals.append(&mut flight.waiters);
        let bytes = loaded.bytes.unwrap_or(flight.cost);
        tracing::debug!(key = %flight.key, %token, bytes, "loaded");
        self.emit(out, || PoolEvent::Loaded { key: flight.key.clone(), token, bytes, ms: millis(load_time) });
        // The estimate was too low: what is idle makes up for it at once.
        if !flight.over_budget {
            let excess = self.table.account.charged().saturating_sub(self.table.account.budget.into());
            let excess = excess.min(bytes.saturating_sub(flight.cost).into());
            for victim in fewest(excess, self.table.lru().filter(|(other, _)| *other != at)) {
                self.unload(inner, victim, UnloadReason::Evicted, out);
            }
        }
        out.discard(flight);
        self.note_peak();
        self.recount(inner, at, out);
        self.quieten(out);
        self.pump(inner, out);
    }

    /// One caller of a flight leaves. The last one takes the flight along.
    pub(crate) fn leave(&mut self, inner: &Arc<Inner>, token: Token, joiner: u64, out: &mut Outbox) {
        let Some(flight) = self.flights.get_mut(&token) else { return };
        let Some(joiner) = flight.joiners.remove(&joiner) else { return };
        out.discard(joiner);
        self.counters.left += 1;
        if flight.joiners.is_empty() {
            let text = format!("everybody who waited for {} has left", flight.key);
            self.doom(inner, token, Error::new(ErrorKind::Cancelled, text), out);
        }
    }

    /// Ends a flight from outside: at once before its bytes are reserved, else as soon as its release or load ends.
    pub(crate) fn doom(&mut self, inner: &Arc<Inner>, token: Token, error: Error, out: &mut Outbox) {
        let Some(flight) = self.flights.get_mut(&token) else { return };
        out.cancels.push(flight.cancel.clone());
        if flight.stage.is_running() {
            flight.doomed.get_or_insert(error);
        } else {
            self.fail(inner, token, error, out);
        }
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closing { Err(closed()) } else { Ok(()) }
    }

    /// Recomputes every sum from what is held; an error names the first difference.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.table.check()?;
        if !self.queue.is_empty() && self.table.lent() > 0 {
            return Err("an entry is lent while somebody waits for room".to_owned());
        }
        for (_, entry) in self.table.iter() {
            let found = self.slots.get(&entry.shared.key).copied() == Some(Slot::Ready(entry.shared.at));
            let indexed =
                entry.shared.inner.residents.get(&entry.shared.key).is_some_and(|other| other.token == entry.shared.token);
            if found != indexed || found != entry.is_ready() {
                return Err(format!("{}: found {found}, indexed {indexed}, ready {}", entry.shared.key, entry.is_ready()));
            }
        }
        let running: Vec<&Flight> = self.flights.values().filter(|flight| flight.stage.is_running()).collect();
        let pairs = [
            ("pending", self.table.account.pending, running.iter().map(|flight| u128::from(flight.cost)).sum::<u128>()),
            ("overlap", self.table.account.overlap, running.iter().map(|flight| flight.overlap()).sum()),
            ("running", self.running as u128, running.len() as u128),
            (
                "queued bytes",
                self.queued_bytes,
                self.queue.values().filter_map(|token| self.flights.get(token)).map(|flight| u128::from(flight.cost)).sum(),
            ),
            (
                "queue",
                self.queue.len() as u128,
                self.flights.values().filter(|flight| matches!(flight.stage, Stage::Waiting { .. })).count() as u128,
            ),
            ("tokens", self.tokens.len() as u128, self.table.len() as u128),
            (
                "slots",
                self.slots.len() as u128,
                (self.table.iter().filter(|(_, entry)| entry.is_ready()).count() + self.flights.len()) as u128,
            ),
        ];
        for (name, kept, found) in pairs {
            if kept != found {
                return Err(format!("{name}: the state says {kept}, there are {found}"));
            }
        }
        for flight in self.flights.values() {
            let held: u128 = self
                .table
                .iter()
                .filter(|(_, entry)| matches!(&entry.phase, Phase::Draining(draining) if draining.flight == Some(flight.token)))
                .map(|(_, entry)| u128::from(entry.bytes))
                .sum();
            if held != flight.victims_held {
                return Err(format!("victims of {}: the flight says {}, they hold {held}", flight.key, flight.victims_held));
            }
        }
        Ok(())
    }
}
