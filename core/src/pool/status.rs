//! What the pool tells about itself: a snapshot, and a bounded stream of events. Neither ever waits, loads or touches a
//! device, and neither holds a user's text.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::idle::IdlePolicy;
use super::types::{Key, MemoryReading, Token};
use crate::error::ErrorKind;
use crate::sync::Mutex;

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Token {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.as_u64())
    }
}

/// Where an entry is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EntryState {
    /// An admission stands in line (or its cost is being estimated). Nothing is charged.
    Waiting,
    /// Its bytes are reserved: victims are being released, then the load runs.
    Loading,
    /// Resident.
    Ready,
    /// Detached: its release runs, or its last holders have not ended yet.
    Draining,
}

/// One entry of a [`Status`].
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct EntryStatus {
    /// `kind:id`.
    pub key: Key,
    /// The kind's name.
    pub kind: String,
    /// The name within the kind.
    pub id: String,
    /// The admission's number.
    pub token: Token,
    /// Where it is in its life.
    pub state: EntryState,
    /// Bytes on the account for it now.
    pub bytes: u64,
    /// Bytes estimated before the load; `None` while that is still being found out.
    pub estimated_bytes: Option<u64>,
    /// Bytes measured after it.
    pub measured_bytes: Option<u64>,
    /// Never evicted nor swept.
    pub pinned: bool,
    /// Leases now (for a load: callers waiting for it).
    pub uses: u64,
    /// Milliseconds since its last use ended (or since its load); 0 while it is in use.
    pub idle_ms: u64,
    /// The idle policy that rules now.
    pub idle: IdlePolicy,
    /// Milliseconds until it is unloaded for idleness; `None` while no countdown runs.
    pub unload_in_ms: Option<u64>,
    /// How far the load is, 0 to 1.
    pub progress: Option<f32>,
    /// Loads of this key so far.
    pub loads: u64,
    /// Unloads of this key so far.
    pub unloads: u64,
    /// How long the last load took.
    pub last_load_ms: Option<u64>,
}

/// Counters since the pool was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Counters {
    /// Uses and admissions answered by a resident entry.
    pub hits: u64,
    /// Admissions that joined another's load.
    pub joins: u64,
    /// Loads that succeeded.
    pub loads: u64,
    /// Loads that failed, panicked or were cancelled.
    pub failed_loads: u64,
    /// Entries unloaded for room.
    pub evictions: u64,
    /// Entries unloaded for idleness.
    pub idle_unloads: u64,
    /// Releases that failed or panicked.
    pub failed_releases: u64,
    /// Admissions that had to stand in line.
    pub waits: u64,
    /// Admissions refused.
    pub refusals: u64,
    /// Callers who left (cancelled, deadline, dropped) before their answer.
    pub left: u64,
    /// Ends of a use that was not open. A host that sees this grow has a bug in its pairing.
    pub unbalanced_ends: u64,
}

/// A snapshot of the pool.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// The budget.
    pub budget_bytes: u64,
    /// The physical limit.
    pub physical_limit_bytes: Option<u64>,
    /// Bytes of resident entries.
    pub resident_bytes: u64,
    /// Bytes reserved by loads under way, beyond those their own victims still hold.
    pub pending_bytes: u64,
    /// Bytes of detached entries that are not back yet.
    pub releasing_bytes: u64,
    /// Bytes charged by the host.
    pub external_bytes: u64,
    /// The sum of the four.
    pub used_bytes: u64,
    /// The highest sum so far.
    pub peak_used_bytes: u64,
    /// What an admission could take without evicting anything, measured floors included.
    pub free_bytes: u64,
    /// Admissions standing in line.
    pub waiting: usize,
    /// Whether new loads are held back.
    pub paused: bool,
    /// Whether the pool is closed or closing.
    pub closed: bool,
    /// Every entry, sorted by key, then token.
    pub entries: Vec<EntryStatus>,
    /// Counters.
    pub counters: Counters,
    /// Real memory, when the pool has a probe.
    pub memory: Option<MemoryReading>,
}

impl Status {
    /// The entry of `key` that can be hit or is on its way in; else the one on its way out.
    #[must_use]
    pub fn entry(&self, key: &Key) -> Option<&EntryStatus> {
        let mut found = self.entries.iter().filter(|entry| entry.key == *key);
        let first = found.next()?;
        if first.state == EntryState::Draining {
            Some(found.find(|entry| entry.state != EntryState::Draining).unwrap_or(first))
        } else {
            Some(first)
        }
    }
}

/// Why an entry goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum UnloadReason {
    /// Room for another, `trim` or `make_room`.
    Evicted,
    /// Its idle policy.
    Idle,
    /// `evict`.
    Requested,
    /// `forget`: the owner has already let go.
    Forgotten,
    /// Replaced by a new admission of its key.
    Replaced,
    /// The pool closes.
    Closed,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum PoolEvent {
    /// An admission stands in line.
    Waiting {
        /// Whose.
        key: Key,
        /// Bytes it needs.
        bytes: u64,
        /// Admissions before it.
        ahead: usize,
    },
    /// An admission was refused or failed before its load.
    Refused {
        /// Whose.
        key: Key,
        /// Bytes it needed.
        bytes: u64,
        /// The kind of the error.
        kind: ErrorKindName,
    },
    /// A load starts; its victims are gone.
    LoadStarted {
        /// Whose.
        key: Key,
        /// Its admission.
        token: Token,
        /// Bytes reserved.
        bytes: u64,
    },
    /// A load came this far.
    LoadProgress {
        /// Whose.
        key: Key,
        /// Its admission.
        token: Token,
        /// 0 to 100.
        percent: u8,
    },
    /// A load ended well.
    Loaded {
        /// Whose.
        key: Key,
        /// Its admission.
        token: Token,
        /// Bytes charged.
        bytes: u64,
        /// Milliseconds.
        ms: u64,
    },
    /// A load failed, panicked or was cancelled; nothing is left of it.
    LoadFailed {
        /// Whose.
        key: Key,
        /// Its admission.
        token: Token,
        /// The kind of the error.
        kind: ErrorKindName,
        /// Milliseconds.
        ms: u64,
    },
    /// An entry was detached; nobody can hit it any more.
    UnloadStarted {
        /// Whose.
        key: Key,
        /// Its admission.
        token: Token,
        /// Why.
        reason: UnloadReason,
    },
    /// An entry's memory is back.
    Unloaded {
        /// Whose.
        key: Key,
        /// Its admission.
        token: Token,
        /// Why.
        reason: UnloadReason,
        /// Bytes taken off the account.
        bytes: u64,
        /// Milliseconds since it was detached.
        ms: u64,
    },
    /// A release failed or panicked; its entry is gone all the same.
    ReleaseFailed {
        /// Whose.
        key: Key,
        /// Its admission.
        token: Token,
        /// The kind of the error.
        kind: ErrorKindName,
    },
    /// The budget was changed.
    BudgetChanged {
        /// The new one.
        bytes: u64,
    },
    /// New loads are held back.
    Paused,
    /// New loads go on.
    Resumed,
    /// The pool is closed; no event follows.
    Closed,
}

/// An [`ErrorKind`] that serialises as its stable name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorKindName(pub ErrorKind);

impl Serialize for ErrorKindName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name())
    }
}

/// What a subscriber receives.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum Received {
    /// The next event.
    Event(PoolEvent),
    /// The subscriber was too slow: this many of the oldest events were lost.
    Missed {
        /// How many.
        missed: u64,
    },
}

/// A subscription. Holds at most its capacity of events; a slow subscriber loses the oldest and is told how many.
/// Dropping it ends the subscription.
pub struct EventStream {
    shared: Arc<Subscriber>,
}

struct Subscriber {
    capacity: usize,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
struct Inbox {
    events: VecDeque<PoolEvent>,
    missed: u64,
    ended: bool,
    waker: Option<Waker>,
}

impl EventStream {
    /// The next event if there is one now.
    pub fn try_next(&mut self) -> Option<Received> {
        let mut inbox = self.shared.inbox.lock();
        if inbox.missed > 0 {
            return Some(Received::Missed { missed: std::mem::take(&mut inbox.missed) });
        }
        inbox.events.pop_front().map(Received::Event)
    }

    /// The next event; `None` after the last one of a closed pool. Works on any executor; dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Received> {
        poll_fn(|context| {
            if let Some(received) = self.try_next() {
                return Poll::Ready(Some(received));
            }
            let mut inbox = self.shared.inbox.lock();
            if !inbox.events.is_empty() {
                drop(inbox);
                return Poll::Ready(self.try_next());
            }
            if inbox.ended {
                return Poll::Ready(None);
            }
            inbox.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl fmt::Debug for EventStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventStream")
    }
}

/// The subscribers. Lives in the pool's state; `emit` only pushes, and hands back who is to be woken after the unlock.
#[derive(Default)]
pub(crate) struct Hub {
    subscribers: Vec<Weak<Subscriber>>,
    ended: bool,
}

impl Hub {
    pub(crate) fn subscribe(&mut self, capacity: usize) -> EventStream {
        let inbox = Inbox { ended: self.ended, ..Inbox::default() };
        let shared = Arc::new(Subscriber { capacity: capacity.max(1), inbox: Mutex::new(inbox) });
        self.subscribers.push(Arc::downgrade(&shared));
        EventStream { shared }
    }

    /// Whether anybody listens, so that an event need not be built for nobody.
    pub(crate) fn is_empty(&self) -> bool {
        self.subscribers.is_empty()
    }

    pub(crate) fn emit(&mut self, event: &PoolEvent, wakers: &mut Vec<Waker>) {
        // Leases and pauses may outlive the pool.
        if self.ended {
            return;
        }
        let last = *event == PoolEvent::Closed;
        self.ended = last;
        self.subscribers.retain(|weak| {
            let Some(subscriber) = weak.upgrade() else { return false };
            let mut inbox = subscriber.inbox.lock();
            if inbox.events.len() >= subscriber.capacity {
                inbox.events.pop_front();
                inbox.missed += 1;
            }
            inbox.events.push_back(event.clone());
            inbox.ended = last;
            wakers.extend(inbox.waker.take());
            true
        });
    }
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn saturated(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
