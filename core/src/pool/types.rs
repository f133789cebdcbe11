//! What callers give to the pool and get from it.

use std::borrow::Borrow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::idle::IdlePolicy;
use super::lease::Lease;
use super::spawn::Spawn;
use crate::cancel::CancelToken;
use crate::clock::{BoxFuture, Clock};
use crate::error::{Error, ErrorKind, Result};

/// What an entry is. The same checkpoint under two kinds is two entries with their own bytes, clocks and marks (P2).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A model that generates text.
    Chat,
    /// A model that turns texts into vectors.
    Embedder,
    /// A model that scores documents against a query.
    Reranker,
    /// A resident of the host's own: the name must not be empty, contain `:` or be one of the three above.
    Other(Arc<str>),
}

impl Kind {
    /// The kind's name as keys show it: `chat`, `embedder`, `reranker` or the host's word.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Chat => "chat",
            Self::Embedder => "embedder",
            Self::Reranker => "reranker",
            Self::Other(name) => name,
        }
    }

    /// The kind of that name; a word that is not one of Hob's becomes [`Kind::Other`].
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        match name {
            "chat" => Self::Chat,
            "embedder" => Self::Embedder,
            "reranker" => Self::Reranker,
            other => Self::Other(other.into()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The name of an entry, shown as `kind:id`. Cheap to clone.
#[derive(Debug, Clone, Eq, PartialOrd, Ord)]
pub struct Key {
    kind: Kind,
    id: Arc<str>,
}

impl Key {
    /// A key. Emptiness is checked where the key is used, so that this cannot fail.
    pub fn new(kind: Kind, id: impl Into<Arc<str>>) -> Self {
        Self { kind, id: id.into() }
    }

    /// `chat:id`.
    pub fn chat(id: impl Into<Arc<str>>) -> Self {
        Self::new(Kind::Chat, id)
    }

    /// `embedder:id`.
    pub fn embedder(id: impl Into<Arc<str>>) -> Self {
        Self::new(Kind::Embedder, id)
    }

    /// `reranker:id`.
    pub fn reranker(id: impl Into<Arc<str>>) -> Self {
        Self::new(Kind::Reranker, id)
    }

    /// A key of a host's own kind.
    pub fn other(kind: impl Into<Arc<str>>, id: impl Into<Arc<str>>) -> Self {
        Self::new(Kind::Other(kind.into()), id)
    }

    /// What the entry is.
    #[must_use]
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// The name within the kind.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.id.is_empty() {
            return Err(Error::invalid(format!("the id of a {} key is empty; give the model a name", self.kind)));
        }
        if let Kind::Other(name) = &self.kind
            && (name.is_empty() || name.contains(':') || Kind::from_name(name) != self.kind)
        {
            return Err(Error::invalid(format!(
                "the kind {name:?} of a key must be a word of the host's own: not empty, without ':', not chat, embedder or reranker"
            )));
        }
        Ok(())
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        (Arc::ptr_eq(&self.id, &other.id) || self.id == other.id) && self.kind == other.kind
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The id alone: two kinds of one id are rare, and this runs at every use.
        let id: &str = self.id.borrow();
        id.hash(state);
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.id)
    }
}

/// The number of one admission, never used twice by a pool (P24). An owner stores its engine under the token; the release
/// it gave to the pool names the token and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub(crate) u64);

impl Token {
    /// The number, for a C interface.
    #[must_use]
    pub fn as_u64(self) -> u64 {
        self.0
    }

    /// The token of that number. A number the pool never gave out is harmless: every call with it is refused or does nothing.
    #[must_use]
    pub fn from_u64(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// What an admission does when there is no room even after every idle entry would go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum NoRoom {
    /// Wait in line, first come, first served, until leases end; then load. When nothing unpinned is left to wait for, the
    /// model is served alone even though it is over the budget (never over the physical limit). The default.
    #[default]
    Wait,
    /// Fail with `BudgetExceeded`. Waits for nothing but releases that are already under way.
    Refuse,
    /// Evict what is idle and load over the budget at once (never over the physical limit).
    LoadAnyway,
}

/// The bytes an admission asks for.
#[non_exhaustive]
pub enum Cost {
    /// A number known beforehand, in bytes.
    Bytes(u64),
    /// Work that finds the number; it runs at most once per load, on the pool's spawner, and not at all on a hit or a join.
    Estimate(Box<dyn FnOnce() -> BoxFuture<'static, Result<u64>> + Send>),
}

impl From<u64> for Cost {
    fn from(bytes: u64) -> Self {
        Self::Bytes(bytes)
    }
}

impl fmt::Debug for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "Bytes({bytes})"),
            Self::Estimate(_) => f.write_str("Estimate"),
        }
    }
}

/// A request for residency. Made with [`Admission::new`]; the other methods change one thing each.
#[derive(Debug)]
pub struct Admission {
    pub(crate) key: Key,
    pub(crate) cost: Cost,
    pub(crate) idle: Option<IdlePolicy>,
    pub(crate) use_idle: Option<IdlePolicy>,
    pub(crate) pinned: bool,
    pub(crate) in_use: bool,
    pub(crate) replace: bool,
    pub(crate) no_room: Option<NoRoom>,
    pub(crate) cancel: Option<CancelToken>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) quiesce: Option<Arc<dyn Quiesce>>,
}

impl Admission {
    /// An admission of `key` for `cost` bytes (or an estimator), with the pool's defaults, not in use.
    pub fn new(key: Key, cost: impl Into<Cost>) -> Self {
        Self {
            key,
            cost: cost.into(),
            idle: None,
            use_idle: None,
            pinned: false,
            in_use: false,
            replace: false,
            no_room: None,
            cancel: None,
            deadline: None,
            quiesce: None,
        }
    }

    /// Find the cost with `estimate`, only when a load is needed.
    pub fn estimated(key: Key, estimate: impl FnOnce() -> BoxFuture<'static, Result<u64>> + Send + 'static) -> Self {
        Self::new(key, Cost::Estimate(Box::new(estimate)))
    }

    /// The model's own idle policy, instead of the pool's. On a hit it replaces the entry's policy (the last one wins).
    #[must_use]
    pub fn idle(mut self, policy: IdlePolicy) -> Self {
        self.idle = Some(policy);
        self
    }

    /// The idle policy of the countdown that follows this use only. Needs [`in_use`](Self::in_use).
    #[must_use]
    pub fn use_idle(mut self, policy: IdlePolicy) -> Self {
        self.use_idle = Some(policy);
        self
    }

    /// Never evict or sweep the entry; only an explicit evict, forget or close removes it. On a hit it pins the entry.
    #[must_use]
    pub fn pinned(mut self) -> Self {
        self.pinned = true;
        self
    }

    /// Return a [`Lease`]: the entry is born (or found) in use, with no gap in which it could go (P11).
    #[must_use]
    pub fn in_use(mut self) -> Self {
        self.in_use = true;
        self
    }

    /// Replace an existing entry of the key: it is forgotten, without its release, and a new load runs under a new token.
    #[must_use]
    pub fn replace(mut self) -> Self {
        self.replace = true;
        self
    }

    /// What to do when there is no room, instead of the pool's default.
    #[must_use]
    pub fn no_room(mut self, policy: NoRoom) -> Self {
        self.no_room = Some(policy);
        self
    }

    /// Leave when the token is cancelled, in any phase: queued, waiting for another's load, loading. The load itself is
    /// cancelled only when the last one who waits for it has left.
    #[must_use]
    pub fn cancel(mut self, token: CancelToken) -> Self {
        self.cancel = Some(token);
        self
    }

    /// Leave with `Timeout` when the pool's clock reaches this moment.
    #[must_use]
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// How to quiesce the resident while the pool is paused.
    #[must_use]
    pub fn quiesce(mut self, quiesce: Arc<dyn Quiesce>) -> Self {
        self.quiesce = Some(quiesce);
        self
    }

    /// The key asked for.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }
}

impl fmt::Debug for dyn Quiesce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Quiesce")
    }
}

/// What a load reports when it has succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loaded {
    /// The bytes really held, when they could be measured; the charge is then corrected from the estimate to this.
    pub bytes: Option<u64>,
}

impl Loaded {
    /// A load whose bytes were measured.
    #[must_use]
    pub fn measured(bytes: u64) -> Self {
        Self { bytes: Some(bytes) }
    }

    /// A load whose estimate stands.
    #[must_use]
    pub fn unmeasured() -> Self {
        Self::default()
    }
}

/// What a load is given.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadContext {
    /// The admission's token: store the engine under it.
    pub token: Token,
    /// The key being loaded.
    pub key: Key,
    /// Cancelled when nobody waits for the load any more, when the key is evicted by force, or when the pool closes. A load
    /// must look at it regularly and then end with an error; until it ends its bytes stay reserved.
    pub cancel: CancelToken,
    /// Where to report progress.
    pub progress: Progress,
}

/// Reports how far a load is. Cloneable; reports after the load's end do nothing.
#[derive(Clone)]
pub struct Progress {
    pub(crate) report: Arc<dyn Fn(f32) + Send + Sync>,
}

impl Progress {
    /// Reports a fraction from 0 to 1 (clamped; NaN is ignored). Cheap; whole percents become events.
    pub fn report(&self, fraction: f32) {
        if !fraction.is_nan() {
            (self.report)(fraction.clamp(0.0, 1.0));
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// A load, as an object. Any `FnOnce(LoadContext) -> BoxFuture<Result<Loaded>>` is one.
///
/// It runs once, as a task on the pool's spawner, with no lock held, after the victims are gone. When it fails it must have
/// let go of everything it took.
pub trait Load: Send {
    /// Loads and stores the engine where its owner keeps it, under `context.token`.
    fn load(self: Box<Self>, context: LoadContext) -> BoxFuture<'static, Result<Loaded>>;
}

impl<F: FnOnce(LoadContext) -> BoxFuture<'static, Result<Loaded>> + Send> Load for F {
    fn load(self: Box<Self>, context: LoadContext) -> BoxFuture<'static, Result<Loaded>> {
        self(context)
    }
}

/// A release, as an object. Any `FnOnce(Token) -> BoxFuture<Result<()>>` is one.
///
/// It carries the token only, never the engine (P24), and must not wait for work that may itself be waiting for an admission
/// (P30). It runs at most once, with no lock held, and is dropped right after.
pub trait Release: Send {
    /// Drops the owner's reference to the engine stored under `token`; a token the owner does not hold is a no-op (P25).
    fn release(self: Box<Self>, token: Token) -> BoxFuture<'static, Result<()>>;
}

impl<F: FnOnce(Token) -> BoxFuture<'static, Result<()>> + Send> Release for F {
    fn release(self: Box<Self>, token: Token) -> BoxFuture<'static, Result<()>> {
        self(token)
    }
}

/// How a resident stops and restarts its work while the pool is paused.
pub trait Quiesce: Send + Sync {
    /// Stops starting work and completes when what runs has ended.
    fn quiesce(&self) -> BoxFuture<'static, Result<()>>;

    /// Undoes it. Must not block; may come after the entry was evicted.
    fn resume(&self);
}

/// Bytes of the whole process on the device, as the engine last saw them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct MemoryReading {
    /// Bytes that live arrays hold.
    pub active: u64,
    /// Bytes freed by arrays but not yet given back to the system.
    pub cache: u64,
    /// The highest `active` so far.
    pub peak: u64,
    /// Bytes the system could still give to this process, when it says (A40).
    pub available: Option<u64>,
}

impl MemoryReading {
    /// Active and cache together: what the process takes from the machine.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.active.saturating_add(self.cache)
    }
}

/// A cached reading of memory. The drain hook should refresh it: the pool reads it right after a drain.
pub trait MemoryProbe: Send + Sync {
    /// The latest reading. Must not block and must not touch the device; called with the pool's lock held.
    fn read(&self) -> MemoryReading;
}

/// Gives freed bytes back to the system. Runs after every release and after every failed load, with no lock held. A load can
/// fail before anything touched the device; the hook must not be the first to do so (P37).
pub type DrainHook = Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// Is told the new budget after each change, one call at a time and the newest last. Must not block or call the pool; runs on
/// the thread that changed it, without the pool's lock.
pub type BudgetHook = Arc<dyn Fn(u64) + Send + Sync>;

/// How a pool is made. Start from [`PoolOptions::new`].
#[derive(Clone)]
#[non_exhaustive]
pub struct PoolOptions {
    /// The one budget, in bytes, over 0. See [`default_budget`](super::default_budget).
    pub budget_bytes: u64,
    /// Bytes that are never exceeded, whatever the policy. `None`: no such limit.
    pub physical_limit_bytes: Option<u64>,
    /// The idle policy of entries that have none of their own. Default: after 900 s.
    pub idle: IdlePolicy,
    /// What admissions do without room. Default: wait.
    pub no_room: NoRoom,
    /// How many admissions may wait for room; one more is `Busy`. Default 65,536.
    pub max_waiting: usize,
    /// How to give memory back after a release. `None`: nothing to do.
    pub drain: Option<DrainHook>,
    /// Switch the drain off without removing the hook: cached bytes are then no floor of the account either. Default true.
    pub drain_after_release: bool,
    /// Who else follows the budget: an allocator's limits, say.
    pub on_budget: Option<BudgetHook>,
    /// Real bytes of the process: a floor for the account, and what `evict` measures with.
    pub probe: Option<Arc<dyn MemoryProbe>>,
    /// The longest time `evict` watches the probe for bytes that come back late. Default 250 ms.
    pub settle: Duration,
    /// The clock. `None`: the system's.
    pub clock: Option<Arc<dyn Clock>>,
    /// Where loads and releases run. `None`: one thread of the pool's own.
    pub spawner: Option<Arc<dyn Spawn>>,
}

impl PoolOptions {
    /// The defaults with this budget.
    #[must_use]
    pub fn new(budget_bytes: u64) -> Self {
        Self {
            budget_bytes,
            physical_limit_bytes: None,
            idle: IdlePolicy::default(),
            no_room: NoRoom::Wait,
            max_waiting: 65_536,
            drain: None,
            drain_after_release: true,
            on_budget: None,
            probe: None,
            settle: Duration::from_millis(250),
            clock: None,
            spawner: None,
        }
    }
}

impl fmt::Debug for PoolOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolOptions")
            .field("budget_bytes", &self.budget_bytes)
            .field("physical_limit_bytes", &self.physical_limit_bytes)
            .field("idle", &self.idle)
            .field("no_room", &self.no_room)
            .finish_non_exhaustive()
    }
}

/// How an admission was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The entry was resident.
    Hit,
    /// Another caller's load of the same key was under way.
    Joined,
    /// This admission loaded it.
    Loaded,
}

/// A successful admission.
#[derive(Debug)]
#[non_exhaustive]
pub struct Admitted {
    /// The entry's token.
    pub token: Token,
    /// Hit, join or load.
    pub origin: Origin,
    /// How long the load took, whoever ran it.
    pub load_time: Duration,
    /// The use mark, for an admission `in_use`.
    pub lease: Option<Lease>,
}

/// What an explicit evict did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Evicted {
    /// The token of the entry that went; `None` when another call was already unloading it, or a load was stopped.
    pub token: Option<Token>,
    /// Bytes really given back, measured after the drain (with a probe), else the entry's charge. 0 while leases still hold
    /// the model: its last holder frees it.
    pub freed_bytes: u64,
}

/// What `trim`, `make_room` and `sweep` did.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Reclaimed {
    /// The keys that went, in order.
    pub evicted: Vec<Key>,
    /// Bytes given back, as [`Evicted::freed_bytes`].
    pub freed_bytes: u64,
    /// Whether the goal was reached (for `sweep`: always).
    pub fits: bool,
    /// Releases that failed or panicked. Their entries are gone all the same.
    pub errors: Vec<Error>,
}

/// What a dry run says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// Already resident.
    Resident,
    /// Already being loaded or waiting for room.
    Loading,
    /// Fits beside everything.
    Fits,
    /// Fits once the listed entries are gone.
    Evicts,
    /// Would be served alone, over the budget.
    Alone,
    /// Would wait for leases or loads to end.
    Waits,
    /// Would be refused: over the physical limit, or the policy is `Refuse`.
    Refused,
}

/// A dry run of an admission.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Plan {
    /// What would happen.
    pub verdict: Verdict,
    /// Whether it could load now within the budget.
    pub fits: bool,
    /// Bytes that would be charged; 0 for a resident or loading key.
    pub required_bytes: u64,
    /// Bytes free now.
    pub free_bytes: u64,
    /// Who would go, least recently used first.
    pub evict: Vec<Key>,
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the pool is closed; make a new one")
}
