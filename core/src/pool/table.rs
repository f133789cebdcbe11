//! The entries and their account: a slab, an LRU list through it, and sums kept exact by every change. No locks, no async.
//! Loans (`loan.rs`) are lent and recalled here.
//!
//! Entries that could go now (ready, not pinned, not in use) are linked in the order of their last use. Time does not go
//! backwards here, so a new stamp always belongs at the back and every list operation is constant; only unpinning looks for
//! a place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::idle::{IdlePolicy, IdleView, is_due, unload_at};
use super::loan::Loan;
use super::policy::Account;
use super::state::Inner;
use super::status::UnloadReason;
use super::types::{Key, Quiesce, Release, Token};
use crate::sync::AtomicBool;

const NONE: u32 = u32::MAX;

// A recall is bounded work in front of somebody's decision; beyond this many hot entries it is paid by those who begin.
const MAX_LOANS: usize = 256;

/// The part of an entry that leases look at without the lock. On cache lines of its own: other keys' uses must not slow this
/// one's.
#[repr(align(64))]
pub(crate) struct EntryShared {
    pub(crate) loan: Loan,
    pub(crate) detached: AtomicBool,
    pub(crate) at: u32,
    pub(crate) token: Token,
    pub(crate) key: Key,
    pub(crate) load_time: Duration,
    /// Here and not in each lease: one count that all threads change would be all they do. Entries go when the pool closes,
    /// whatever its executor does, and with them this circle.
    pub(crate) inner: Arc<Inner>,
}

/// Where an entry is in its life.
pub(crate) enum Phase {
    /// Resident: can be hit.
    Ready,
    /// Detached: cannot be hit; charged until its memory is back.
    Draining(Draining),
}

/// An entry on its way out.
pub(crate) struct Draining {
    pub(crate) reason: UnloadReason,
    /// The release has run (or there was none to run); what is left are leases and the drain.
    pub(crate) released: bool,
    /// Somebody has taken on the final drain.
    pub(crate) finishing: bool,
    /// The admission that waits for these bytes.
    pub(crate) flight: Option<Token>,
    pub(crate) since: Instant,
    pub(crate) waiters: Vec<oneshot::Sender<()>>,
}

/// One resident.
pub(crate) struct Entry {
    pub(crate) shared: Arc<EntryShared>,
    pub(crate) estimated: u64,
    pub(crate) measured: Option<u64>,
    /// What is charged: measured, else estimated.
    pub(crate) bytes: u64,
    pub(crate) pinned: bool,
    pub(crate) uses: u64,
    pub(crate) ever_used: bool,
    pub(crate) last_use: Instant,
    pub(crate) stamp: u64,
    pub(crate) idle: Option<IdlePolicy>,
    pub(crate) use_idle: Option<IdlePolicy>,
    pub(crate) accelerated: Option<Instant>,
    pub(crate) release: Option<Box<dyn Release>>,
    pub(crate) quiesce: Option<Arc<dyn Quiesce>>,
    pub(crate) phase: Phase,
    /// Whether the uses are counted in `shared.loan`; `uses` is then what it was, and not 0.
    lent: bool,
    previous: u32,
    next: u32,
}

/// What is needed to make an entry.
pub(crate) struct NewEntry {
    pub(crate) key: Key,
    pub(crate) token: Token,
    pub(crate) estimated: u64,
    pub(crate) measured: Option<u64>,
    pub(crate) pinned: bool,
    pub(crate) uses: u64,
    pub(crate) idle: Option<IdlePolicy>,
    pub(crate) use_idle: Option<IdlePolicy>,
    pub(crate) release: Box<dyn Release>,
    pub(crate) quiesce: Option<Arc<dyn Quiesce>>,
    pub(crate) load_time: Duration,
    pub(crate) inner: Arc<Inner>,
}

impl Entry {
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready)
    }

    fn is_idle(&self) -> bool {
        self.is_ready() && self.uses == 0 && !self.pinned
    }

    fn is_busy(&self) -> bool {
        self.is_ready() && self.uses > 0 && !self.pinned
    }

    fn view(&self, default: IdlePolicy) -> IdleView {
        IdleView {
            policy: self.policy(default),
            since: self.last_use,
            ever_used: self.ever_used,
            accelerated: self.accelerated,
            uses: self.uses,
            pinned: self.pinned,
        }
    }

    /// The policy that rules: of the last use, else of the model, else of the pool.
    pub(crate) fn policy(&self, default: IdlePolicy) -> IdlePolicy {
        self.use_idle.or(self.idle).unwrap_or(default)
    }

    pub(crate) fn unload_at(&self, default: IdlePolicy) -> Option<Instant> {
        if self.is_ready() { unload_at(&self.view(default)) } else { None }
    }

    pub(crate) fn is_due(&self, default: IdlePolicy, now: Instant) -> bool {
        self.is_ready() && is_due(&self.view(default), now)
    }
}

/// All entries, and the account of everything.
pub(crate) struct Table {
    slots: Vec<Option<Entry>>,
    free: Vec<u32>,
    live: usize,
    head: u32,
    tail: u32,
    stamp: u64,
    epoch: Instant,
    /// The present, as of the last look at the clock. Never goes backwards.
    pub(crate) now: Instant,
    /// Entries that are lent.
    loans: Vec<u32>,
    /// Uses and admissions answered by a resident entry.
    pub(crate) hits: u64,
    /// Sums over entries; `pending`, `overlap`, `external` and `movable` are completed by the state.
    pub(crate) account: Account,
    /// Leased entries that are not pinned.
    pub(crate) busy: usize,
    /// Detached entries.
    pub(crate) draining: Vec<u32>,
}

impl Table {
    pub(crate) fn new(account: Account, epoch: Instant) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            live: 0,
            head: NONE,
            tail: NONE,
            stamp: 0,
            epoch,
            now: epoch,
            loans: Vec::new(),
            hits: 0,
            account,
            busy: 0,
            draining: Vec::new(),
        }
    }

    /// Lets time go on. A clock read before another thread took the lock may be older.
    #[inline]
    pub(crate) fn pass(&mut self, (nanos, order): (u64, u64)) {
        let now = self.epoch.checked_add(Duration::from_nanos(nanos)).unwrap_or(self.now);
        self.now = self.now.max(now);
        self.stamp = self.stamp.max(order);
    }

    /// The entry at `at`, if there is one.
    #[inline]
    pub(crate) fn get(&self, at: u32) -> Option<&Entry> {
        self.slots.get(at as usize).and_then(Option::as_ref)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, at: u32) -> Option<&mut Entry> {
        self.slots.get_mut(at as usize).and_then(Option::as_mut)
    }

    /// Entries, draining ones included, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        self.slots.iter().enumerate().filter_map(|(at, slot)| Some((u32::try_from(at).ok()?, slot.as_ref()?)))
    }

    pub(crate) fn len(&self) -> usize {
        self.live
    }

    /// Entries that could go, least recently used first, with their bytes.
    pub(crate) fn lru(&self) -> impl Iterator<Item = (u32, u64)> {
        let mut at = self.head;
        std::iter::from_fn(move || {
            let entry = self.get(at)?;
            let item = (at, entry.bytes);
            at = entry.next;
            Some(item)
        })
    }

    pub(crate) fn insert(&mut self, new: NewEntry) -> u32 {
        self.stamp += 1;
        let bytes = new.measured.unwrap_or(new.estimated);
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(NONE)
        });
        let shared = EntryShared {
            loan: Loan::default(),
            detached: AtomicBool::new(false),
            at,
            token: new.token,
            key: new.key,
            load_time: new.load_time,
            inner: new.inner,
        };
        let entry = Entry {
            shared: Arc::new(shared),
            estimated: new.estimated,
            measured: new.measured,
            bytes,
            pinned: new.pinned,
            uses: new.uses,
            ever_used: new.uses > 0,
            last_use: self.now,
            stamp: self.stamp,
            idle: new.idle,
            use_idle: new.use_idle,
            accelerated: None,
            release: Some(new.release),
            quiesce: new.quiesce,
            phase: Phase::Ready,
            lent: false,
            previous: NONE,
            next: NONE,
        };
        self.account.resident += u128::from(bytes);
        self.live += 1;
        self.slots[at as usize] = Some(entry);
        self.enter(at);
        at
    }

    /// Begins a use: count and clock in one step.
    #[inline]
    pub(crate) fn begin(&mut self, at: u32, use_idle: Option<IdlePolicy>) {
        let now = self.now;
        let Some(entry) = self.slots.get_mut(at as usize).and_then(Option::as_mut) else { return };
        self.stamp += 1;
        if entry.uses == 0 && !entry.pinned {
            let (previous, next, bytes) = (entry.previous, entry.next, entry.bytes);
            (entry.previous, entry.next) = (NONE, NONE);
            entry.uses = 1;
            self.unlink(previous, next);
            self.account.evictable -= u128::from(bytes);
            self.busy += 1;
        } else {
            entry.uses += 1;
        }
        let stamp = self.stamp;
        if let Some(entry) = self.get_mut(at) {
            entry.ever_used = true;
            entry.last_use = now;
            entry.stamp = stamp;
            entry.use_idle = use_idle;
            entry.accelerated = None;
        }
    }

    /// Ends a use of a resident or detached entry. Answers false, changing nothing, when no use is open.
    #[inline]
    pub(crate) fn end(&mut self, at: u32) -> bool {
        let (now, stamp) = (self.now, self.stamp + 1);
        let Some(entry) = self.get_mut(at) else { return false };
        if entry.uses == 0 {
            return false;
        }
        entry.last_use = now;
        entry.stamp = stamp;
        entry.ever_used = true;
        let last = entry.uses == 1;
        if last && entry.is_busy() {
            entry.uses = 0;
            self.busy -= 1;
            self.stamp = stamp;
            self.link(self.tail, at);
        } else {
            entry.uses -= 1;
            self.stamp = stamp;
            if last {
                self.recount_returning(at);
            }
        }
        true
    }

    /// Lends an entry in use: uses now begin and end without the mutex.
    pub(crate) fn lend(&mut self, at: u32) {
        if self.loans.len() >= MAX_LOANS {
            self.recall();
        }
        let Some(entry) = self.slots.get_mut(at as usize).and_then(Option::as_mut) else { return };
        if !entry.lent && entry.is_ready() && entry.uses > 0 && entry.shared.loan.lend(entry.uses) {
            entry.lent = true;
            self.loans.push(at);
        }
    }

    /// Recalls every loan. From here nothing begins or ends without the mutex.
    #[inline]
    pub(crate) fn recall(&mut self) {
        if self.loans.is_empty() {
            return;
        }
        let mut idle = std::mem::take(&mut self.loans);
        idle.retain(|at| self.settle(*at));
        // From the newest to the oldest, each looking for its place from the last one's: the walks add up to one.
        idle.sort_unstable_by_key(|at| std::cmp::Reverse(self.get(*at).map_or(0, |entry| entry.stamp)));
        let mut from = self.tail;
        for at in idle.drain(..) {
            self.link(from, at);
            from = at;
        }
        self.loans = idle;
    }

    /// Recalls one loan.
    pub(crate) fn recall_one(&mut self, at: u32) {
        if self.get(at).is_some_and(|entry| entry.lent) {
            self.loans.retain(|other| *other != at);
            if self.settle(at) {
                self.link(self.tail, at);
            }
        }
    }

    /// How many entries are lent.
    pub(crate) fn lent(&self) -> usize {
        self.loans.len()
    }

    // Takes a lent entry's count and clock back. Answers whether it became idle and has to be linked.
    fn settle(&mut self, at: u32) -> bool {
        let Some(entry) = self.slots.get_mut(at as usize).and_then(Option::as_mut) else { return false };
        let returned = entry.shared.loan.recall();
        entry.lent = false;
        self.hits += returned.begun;
        // Not if the clock of a later end, under the mutex, is in the entry already.
        if returned.order > entry.stamp {
            entry.stamp = returned.order;
            entry.last_use = self.epoch.checked_add(Duration::from_nanos(returned.nanos)).unwrap_or(self.now).max(entry.last_use);
            self.now = self.now.max(entry.last_use);
            self.stamp = self.stamp.max(returned.order);
        }
        let busy = entry.is_busy();
        entry.uses = returned.uses;
        if busy && !entry.is_busy() {
            self.busy -= 1;
            return true;
        }
        false
    }

    /// A use of the clock without a count.
    pub(crate) fn touch(&mut self, at: u32) {
        self.leave(at);
        self.stamp += 1;
        let (now, stamp) = (self.now, self.stamp);
        if let Some(entry) = self.get_mut(at) {
            entry.last_use = now;
            entry.stamp = stamp;
            entry.accelerated = None;
        }
        self.enter(at);
    }

    pub(crate) fn set_pinned(&mut self, at: u32, pinned: bool) {
        self.leave(at);
        if let Some(entry) = self.get_mut(at) {
            entry.pinned = pinned;
        }
        self.enter(at);
    }

    pub(crate) fn set_measured(&mut self, at: u32, bytes: u64) {
        self.leave(at);
        if let Some(entry) = self.slots.get_mut(at as usize).and_then(Option::as_mut) {
            self.account.resident = self.account.resident - u128::from(entry.bytes) + u128::from(bytes);
            entry.measured = Some(bytes);
            entry.bytes = bytes;
        }
        self.enter(at);
    }

    /// Takes an entry out of reach: from here nothing can hit it, and its bytes count as being released.
    pub(crate) fn detach(&mut self, at: u32, draining: Draining) {
        self.leave(at);
        if let Some(entry) = self.slots.get_mut(at as usize).and_then(Option::as_mut) {
            entry.shared.detached.store(true, crate::sync::Ordering::Release);
            entry.phase = Phase::Draining(draining);
            self.account.resident -= u128::from(entry.bytes);
            self.account.releasing += u128::from(entry.bytes);
            if entry.uses == 0 {
                self.account.returning += u128::from(entry.bytes);
            }
            self.draining.push(at);
        }
    }

    fn recount_returning(&mut self, at: u32) {
        if let Some(entry) = self.slots.get(at as usize).and_then(Option::as_ref)
            && !entry.is_ready()
        {
            self.account.returning += u128::from(entry.bytes);
        }
    }

    /// Removes a detached entry for good; its bytes are back. The caller drops the entry outside the lock.
    pub(crate) fn remove(&mut self, at: u32) -> Option<Entry> {
        let entry = self.slots.get_mut(at as usize).and_then(Option::take)?;
        self.account.releasing -= u128::from(entry.bytes);
        if entry.uses == 0 {
            self.account.returning -= u128::from(entry.bytes);
        }
        self.draining.retain(|other| *other != at);
        self.free.push(at);
        self.live -= 1;
        Some(entry)
    }

    // Adds a ready entry to the sums and, when it could go, to the list.
    fn enter(&mut self, at: u32) {
        let Some(entry) = self.get(at) else { return };
        if entry.is_idle() {
            self.link(self.tail, at);
        } else if entry.is_busy() {
            self.busy += 1;
        }
    }

    fn leave(&mut self, at: u32) {
        let Some(entry) = self.slots.get_mut(at as usize).and_then(Option::as_mut) else { return };
        if entry.is_idle() {
            let (previous, next, bytes) = (entry.previous, entry.next, entry.bytes);
            (entry.previous, entry.next) = (NONE, NONE);
            self.unlink(previous, next);
            self.account.evictable -= u128::from(bytes);
        } else if entry.is_busy() {
            self.busy -= 1;
        }
    }

    #[inline]
    fn unlink(&mut self, previous: u32, next: u32) {
        match self.get_mut(previous) {
            Some(entry) => entry.next = next,
            None => self.head = next,
        }
        match self.get_mut(next) {
            Some(entry) => entry.previous = previous,
            None => self.tail = previous,
        }
    }

    // Links an idle entry at the place of its stamp, looked for backwards from `previous`: nearly always the back itself.
    #[inline]
    fn link(&mut self, mut previous: u32, at: u32) {
        let Some((stamp, bytes)) = self.get(at).map(|entry| (entry.stamp, entry.bytes)) else { return };
        while let Some(entry) = self.get(previous)
            && entry.stamp > stamp
        {
            previous = entry.previous;
        }
        let next = match self.get_mut(previous) {
            Some(entry) => std::mem::replace(&mut entry.next, at),
            None => std::mem::replace(&mut self.head, at),
        };
        match self.get_mut(next) {
            Some(entry) => entry.previous = at,
            None => self.tail = at,
        }
        if let Some(entry) = self.get_mut(at) {
            entry.previous = previous;
            entry.next = next;
        }
        self.account.evictable += u128::from(bytes);
    }

    /// Recomputes every sum and the list from the entries themselves; an error names the first difference.
    pub(crate) fn check(&self) -> Result<(), String> {
        let sum = |chosen: &dyn Fn(&Entry) -> bool| -> u128 {
            self.iter().filter(|(_, entry)| chosen(entry)).map(|(_, entry)| u128::from(entry.bytes)).sum()
        };
        let differs = |name: &str, kept: u128, found: u128| {
            if kept == found { Ok(()) } else { Err(format!("{name}: the account says {kept}, the entries hold {found}")) }
        };
        differs("resident", self.account.resident, sum(&Entry::is_ready))?;
        differs("releasing", self.account.releasing, sum(&|entry| !entry.is_ready()))?;
        differs("returning", self.account.returning, sum(&|entry| !entry.is_ready() && entry.uses == 0))?;
        differs("evictable", self.account.evictable, sum(&Entry::is_idle))?;
        differs("busy", self.busy as u128, self.iter().filter(|(_, entry)| entry.is_busy()).count() as u128)?;
        differs("entries", self.live as u128, self.iter().count() as u128)?;
        differs("lent", self.loans.len() as u128, self.iter().filter(|(_, entry)| entry.lent).count() as u128)?;
        differs("draining", self.draining.len() as u128, self.iter().filter(|(_, entry)| !entry.is_ready()).count() as u128)?;
        let mut listed: Vec<(Instant, u64)> = Vec::new();
        let mut at = self.head;
        while let Some(entry) = self.get(at) {
            if !entry.is_idle() {
                return Err(format!("{} is in the LRU list and must not be", entry.shared.key));
            }
            listed.push((entry.last_use, entry.stamp));
            at = entry.next;
        }
        differs("listed", listed.len() as u128, self.iter().filter(|(_, entry)| entry.is_idle()).count() as u128)?;
        if listed.is_sorted() { Ok(()) } else { Err("the LRU list is out of order".to_owned()) }
    }
}
