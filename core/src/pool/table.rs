//! The entries and their account: a slab, an LRU list through it, and sums kept exact by every change. No locks, no async.
//!
//! Entries that could go now (ready, not pinned, not in use) are linked in the order of their last use. Time does not go
//! backwards here, so a new stamp always belongs at the back and every list operation is constant; only unpinning looks for
//! a place.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::idle::{IdlePolicy, IdleView, is_due, unload_at};
use super::policy::Account;
use super::status::UnloadReason;
use super::types::{Key, Quiesce, Release, Token};
use crate::sync::AtomicBool;

const NONE: u32 = u32::MAX;

/// The part of an entry that leases look at without the lock.
pub(crate) struct EntryShared {
    pub(crate) key: Key,
    pub(crate) token: Token,
    pub(crate) detached: AtomicBool,
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
    pub(crate) load_time: Duration,
    pub(crate) phase: Phase,
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
    /// Sums over entries; `pending`, `overlap`, `external` and `movable` are completed by the state.
    pub(crate) account: Account,
    /// Leased entries that are not pinned.
    pub(crate) busy: usize,
    /// Detached entries.
    pub(crate) draining: Vec<u32>,
}

impl Table {
    pub(crate) fn new(account: Account) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            live: 0,
            head: NONE,
            tail: NONE,
            stamp: 0,
            account,
            busy: 0,
            draining: Vec::new(),
        }
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

    pub(crate) fn insert(&mut self, new: NewEntry, now: Instant) -> u32 {
        self.stamp += 1;
        let bytes = new.measured.unwrap_or(new.estimated);
        let entry = Entry {
            shared: Arc::new(EntryShared { key: new.key, token: new.token, detached: AtomicBool::new(false) }),
            estimated: new.estimated,
            measured: new.measured,
            bytes,
            pinned: new.pinned,
            uses: new.uses,
            ever_used: new.uses > 0,
            last_use: now,
            stamp: self.stamp,
            idle: new.idle,
            use_idle: new.use_idle,
            accelerated: None,
            release: Some(new.release),
            quiesce: new.quiesce,
            load_time: new.load_time,
            phase: Phase::Ready,
            previous: NONE,
            next: NONE,
        };
        self.account.resident += u128::from(bytes);
        self.live += 1;
        let at = match self.free.pop() {
            Some(at) => {
                self.slots[at as usize] = Some(entry);
                at
            }
            None => {
                self.slots.push(Some(entry));
                u32::try_from(self.slots.len() - 1).unwrap_or(NONE)
            }
        };
        self.enter(at);
        at
    }

    /// Begins a use: count and clock in one step.
    #[inline]
    pub(crate) fn begin(&mut self, at: u32, now: Instant, use_idle: Option<IdlePolicy>) {
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
    pub(crate) fn end(&mut self, at: u32, now: Instant) -> bool {
        let stamp = self.stamp + 1;
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
            self.link(at);
        } else {
            entry.uses -= 1;
            self.stamp = stamp;
            if last {
                self.recount_returning(at);
            }
        }
        true
    }

    /// A use of the clock without a count.
    pub(crate) fn touch(&mut self, at: u32, now: Instant) {
        self.leave(at);
        self.stamp += 1;
        let stamp = self.stamp;
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
            self.link(at);
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

    // Links an idle entry at the place of its stamp: nearly always the back.
    #[inline]
    fn link(&mut self, at: u32) {
        let Some((stamp, bytes)) = self.get(at).map(|entry| (entry.stamp, entry.bytes)) else { return };
        let mut previous = self.tail;
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
