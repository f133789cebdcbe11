//! What pools give back.

use hob::pool::{
    Counters, EntryState, EntryStatus, ErrorKindName, Evicted, IdlePolicy, MemoryReading, Origin, Plan, PoolEvent, Received,
    Reclaimed, Status, UnloadReason, Verdict,
};
use napi::bindgen_prelude::Either;
use napi_derive::napi;

use crate::error::{NativeFailure, count, number};
use crate::pool::NativeLease;

/// A successful admission.
#[napi(object, object_from_js = false)]
pub struct NativeAdmitted {
    /// The entry's number, never used twice by a pool.
    pub token: f64,
    /// The entry was resident, another's load was under way, or this admission loaded it.
    #[napi(ts_type = "'hit' | 'joined' | 'loaded'")]
    pub origin: &'static str,
    /// How long the load took, whoever ran it.
    pub load_ms: f64,
    /// The use, for an admission in use.
    pub lease: Option<NativeLease>,
}

impl From<hob::pool::Admitted> for NativeAdmitted {
    fn from(admitted: hob::pool::Admitted) -> Self {
        Self {
            token: number(admitted.token.as_u64()),
            origin: origin(admitted.origin),
            load_ms: admitted.load_time.as_secs_f64() * 1000.0,
            lease: admitted.lease.map(NativeLease::from),
        }
    }
}

fn origin(origin: Origin) -> &'static str {
    match origin {
        Origin::Hit => "hit",
        Origin::Joined => "joined",
        Origin::Loaded => "loaded",
    }
}

/// What an explicit evict did.
#[napi(object, object_from_js = false)]
pub struct NativeEvicted {
    /// The token of the entry that went; absent when another call was already unloading it, or a load was stopped.
    pub token: Option<f64>,
    /// Bytes given back; 0 while leases still hold the model.
    pub freed_bytes: f64,
}

impl From<Evicted> for NativeEvicted {
    fn from(evicted: Evicted) -> Self {
        Self { token: evicted.token.map(|token| number(token.as_u64())), freed_bytes: number(evicted.freed_bytes) }
    }
}

/// What `trim`, `makeRoom` and `sweep` did.
#[napi(object, object_from_js = false)]
pub struct NativeReclaimed {
    /// The keys that went, in order.
    pub evicted: Vec<String>,
    /// Bytes given back.
    pub freed_bytes: f64,
    /// Whether the goal was reached (for `sweep`: always).
    pub fits: bool,
    /// Releases that failed. Their entries are gone all the same.
    pub errors: Vec<NativeFailure>,
}

impl From<Reclaimed> for NativeReclaimed {
    fn from(reclaimed: Reclaimed) -> Self {
        Self {
            evicted: reclaimed.evicted.iter().map(ToString::to_string).collect(),
            freed_bytes: number(reclaimed.freed_bytes),
            fits: reclaimed.fits,
            errors: reclaimed.errors.iter().map(NativeFailure::from).collect(),
        }
    }
}

/// What an admission would do.
#[napi(object, object_from_js = false)]
pub struct NativePlan {
    /// What would happen.
    #[napi(ts_type = "'resident' | 'loading' | 'fits' | 'evicts' | 'alone' | 'waits' | 'refused'")]
    pub verdict: &'static str,
    /// Whether it could load now within the budget.
    pub fits: bool,
    /// Bytes that would be charged; 0 for a resident or loading key.
    pub required_bytes: f64,
    /// Bytes free now.
    pub free_bytes: f64,
    /// Who would go, least recently used first.
    pub evict: Vec<String>,
}

impl From<Plan> for NativePlan {
    fn from(plan: Plan) -> Self {
        Self {
            verdict: match plan.verdict {
                Verdict::Resident => "resident",
                Verdict::Loading => "loading",
                Verdict::Fits => "fits",
                Verdict::Evicts => "evicts",
                Verdict::Alone => "alone",
                Verdict::Waits => "waits",
                // And what a later core may add: not to be counted on.
                _ => "refused",
            },
            fits: plan.fits,
            required_bytes: number(plan.required_bytes),
            free_bytes: number(plan.free_bytes),
            evict: plan.evict.iter().map(ToString::to_string).collect(),
        }
    }
}

/// One entry of a pool.
#[napi(object, object_from_js = false)]
pub struct NativeEntryStatus {
    /// `kind:id`.
    pub key: String,
    /// The kind's name.
    pub kind: String,
    /// The name within the kind.
    pub id: String,
    /// The admission's number.
    pub token: f64,
    /// Where it is in its life.
    #[napi(ts_type = "'waiting' | 'loading' | 'ready' | 'draining'")]
    pub state: &'static str,
    /// Bytes on the account for it now.
    pub bytes: f64,
    /// Bytes estimated before the load; absent while that is still being found out.
    pub estimated_bytes: Option<f64>,
    /// Bytes measured after it.
    pub measured_bytes: Option<f64>,
    /// Never evicted nor swept.
    pub pinned: bool,
    /// Leases now (for a load: callers waiting for it).
    pub uses: f64,
    /// Milliseconds since its last use ended (or since its load); 0 while it is in use.
    pub idle_ms: f64,
    /// The idle policy that rules now: seconds, or a word.
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub idle: Either<f64, &'static str>,
    /// Milliseconds until it is unloaded for idleness; absent while no countdown runs.
    pub unload_in_ms: Option<f64>,
    /// How far the load is, 0 to 1.
    pub progress: Option<f64>,
    /// Loads of this key so far.
    pub loads: f64,
    /// Unloads of this key so far.
    pub unloads: f64,
    /// How long the last load took.
    pub last_load_ms: Option<f64>,
}

impl From<EntryStatus> for NativeEntryStatus {
    fn from(entry: EntryStatus) -> Self {
        Self {
            key: entry.key.to_string(),
            kind: entry.kind,
            id: entry.id,
            token: number(entry.token.as_u64()),
            state: match entry.state {
                EntryState::Waiting => "waiting",
                EntryState::Loading => "loading",
                EntryState::Ready => "ready",
                _ => "draining",
            },
            bytes: number(entry.bytes),
            estimated_bytes: entry.estimated_bytes.map(number),
            measured_bytes: entry.measured_bytes.map(number),
            pinned: entry.pinned,
            uses: number(entry.uses),
            idle_ms: number(entry.idle_ms),
            idle: match entry.idle {
                IdlePolicy::Immediately => Either::B("immediately"),
                IdlePolicy::AfterSeconds(seconds) => Either::A(f64::from(seconds)),
                IdlePolicy::Never => Either::B("never"),
            },
            unload_in_ms: entry.unload_in_ms.map(number),
            progress: entry.progress.map(f64::from),
            loads: number(entry.loads),
            unloads: number(entry.unloads),
            last_load_ms: entry.last_load_ms.map(number),
        }
    }
}

/// Counters since the pool was made.
#[napi(object, object_from_js = false)]
pub struct NativeCounters {
    /// Uses and admissions answered by a resident entry.
    pub hits: f64,
    /// Admissions that joined another's load.
    pub joins: f64,
    /// Loads that succeeded.
    pub loads: f64,
    /// Loads that failed or were cancelled.
    pub failed_loads: f64,
    /// Entries unloaded for room.
    pub evictions: f64,
    /// Entries unloaded for idleness.
    pub idle_unloads: f64,
    /// Releases that failed.
    pub failed_releases: f64,
    /// Admissions that had to stand in line.
    pub waits: f64,
    /// Admissions refused.
    pub refusals: f64,
    /// Callers who left before their answer.
    pub left: f64,
    /// Ends of a use that was not open.
    pub unbalanced_ends: f64,
}

impl From<Counters> for NativeCounters {
    fn from(counters: Counters) -> Self {
        Self {
            hits: number(counters.hits),
            joins: number(counters.joins),
            loads: number(counters.loads),
            failed_loads: number(counters.failed_loads),
            evictions: number(counters.evictions),
            idle_unloads: number(counters.idle_unloads),
            failed_releases: number(counters.failed_releases),
            waits: number(counters.waits),
            refusals: number(counters.refusals),
            left: number(counters.left),
            unbalanced_ends: number(counters.unbalanced_ends),
        }
    }
}

/// Real bytes of the process on the device.
#[napi(object, object_from_js = false)]
pub struct NativeMemory {
    /// Bytes that live arrays hold.
    pub active: f64,
    /// Bytes freed by arrays but not yet given back to the system.
    pub cache: f64,
    /// The highest `active` so far.
    pub peak: f64,
    /// Bytes that the system could still give, when it says.
    pub available: Option<f64>,
}

impl From<MemoryReading> for NativeMemory {
    fn from(memory: MemoryReading) -> Self {
        Self {
            active: number(memory.active),
            cache: number(memory.cache),
            peak: number(memory.peak),
            available: memory.available.map(number),
        }
    }
}

/// A snapshot of a pool.
#[napi(object, object_from_js = false)]
pub struct NativePoolStatus {
    /// The budget.
    pub budget_bytes: f64,
    /// Bytes that are never exceeded.
    pub physical_limit_bytes: Option<f64>,
    /// Bytes of resident entries.
    pub resident_bytes: f64,
    /// Bytes reserved by loads under way.
    pub pending_bytes: f64,
    /// Bytes of detached entries that are not back yet.
    pub releasing_bytes: f64,
    /// Bytes charged by the host.
    pub external_bytes: f64,
    /// The sum of the four.
    pub used_bytes: f64,
    /// The highest sum so far.
    pub peak_used_bytes: f64,
    /// What an admission could take without evicting anything.
    pub free_bytes: f64,
    /// Admissions standing in line.
    pub waiting: f64,
    /// Whether new loads are held back.
    pub paused: bool,
    /// Whether the pool is closed or closing.
    pub closed: bool,
    /// Every entry, sorted by key.
    pub entries: Vec<NativeEntryStatus>,
    /// Counters.
    pub counters: NativeCounters,
    /// Real memory, when the pool can measure it.
    pub memory: Option<NativeMemory>,
}

impl From<Status> for NativePoolStatus {
    fn from(status: Status) -> Self {
        Self {
            budget_bytes: number(status.budget_bytes),
            physical_limit_bytes: status.physical_limit_bytes.map(number),
            resident_bytes: number(status.resident_bytes),
            pending_bytes: number(status.pending_bytes),
            releasing_bytes: number(status.releasing_bytes),
            external_bytes: number(status.external_bytes),
            used_bytes: number(status.used_bytes),
            peak_used_bytes: number(status.peak_used_bytes),
            free_bytes: number(status.free_bytes),
            waiting: count(status.waiting),
            paused: status.paused,
            closed: status.closed,
            entries: status.entries.into_iter().map(NativeEntryStatus::from).collect(),
            counters: status.counters.into(),
            memory: status.memory.map(NativeMemory::from),
        }
    }
}

/// Something that happened in a pool; which fields are there depends on `event`.
#[napi(object, object_from_js = false)]
#[derive(Default)]
pub struct NativePoolEvent {
    /// What happened.
    pub event: &'static str,
    /// Whose.
    pub key: Option<String>,
    /// Its admission.
    pub token: Option<f64>,
    /// Bytes needed, reserved, charged or given back; the new budget.
    pub bytes: Option<f64>,
    /// Admissions before it.
    pub ahead: Option<f64>,
    /// 0 to 100.
    pub percent: Option<f64>,
    /// Milliseconds.
    pub ms: Option<f64>,
    /// Why an entry goes.
    pub reason: Option<&'static str>,
    /// The kind of an error.
    pub code: Option<&'static str>,
    /// Events that were lost because nobody read them.
    pub missed: Option<f64>,
}

impl From<Received> for NativePoolEvent {
    fn from(received: Received) -> Self {
        match received {
            Received::Event(event) => event.into(),
            Received::Missed { missed } => Self { event: "missed", missed: Some(number(missed)), ..Self::default() },
            _ => Self { event: "unknown", ..Self::default() },
        }
    }
}

impl From<PoolEvent> for NativePoolEvent {
    fn from(event: PoolEvent) -> Self {
        let code = |kind: ErrorKindName| Some(kind.0.name());
        let of = |event, key: hob::Key, token: hob::pool::Token| Self {
            event,
            key: Some(key.to_string()),
            token: Some(number(token.as_u64())),
            ..Self::default()
        };
        match event {
            PoolEvent::Waiting { key, bytes, ahead } => Self {
                event: "waiting",
                key: Some(key.to_string()),
                bytes: Some(number(bytes)),
                ahead: Some(count(ahead)),
                ..Self::default()
            },
            PoolEvent::Refused { key, bytes, kind } => Self {
                event: "refused",
                key: Some(key.to_string()),
                bytes: Some(number(bytes)),
                code: code(kind),
                ..Self::default()
            },
            PoolEvent::LoadStarted { key, token, bytes } => Self { bytes: Some(number(bytes)), ..of("loadStarted", key, token) },
            PoolEvent::LoadProgress { key, token, percent } => {
                Self { percent: Some(f64::from(percent)), ..of("loadProgress", key, token) }
            }
            PoolEvent::Loaded { key, token, bytes, ms } => {
                Self { bytes: Some(number(bytes)), ms: Some(number(ms)), ..of("loaded", key, token) }
            }
            PoolEvent::LoadFailed { key, token, kind, ms } => {
                Self { code: code(kind), ms: Some(number(ms)), ..of("loadFailed", key, token) }
            }
            PoolEvent::UnloadStarted { key, token, reason } => {
                Self { reason: Some(why(reason)), ..of("unloadStarted", key, token) }
            }
            PoolEvent::Unloaded { key, token, reason, bytes, ms } => {
                Self { reason: Some(why(reason)), bytes: Some(number(bytes)), ms: Some(number(ms)), ..of("unloaded", key, token) }
            }
            PoolEvent::ReleaseFailed { key, token, kind } => Self { code: code(kind), ..of("releaseFailed", key, token) },
            PoolEvent::BudgetChanged { bytes } => Self { event: "budgetChanged", bytes: Some(number(bytes)), ..Self::default() },
            PoolEvent::Paused => Self { event: "paused", ..Self::default() },
            PoolEvent::Resumed => Self { event: "resumed", ..Self::default() },
            PoolEvent::Closed => Self { event: "closed", ..Self::default() },
            _ => Self { event: "unknown", ..Self::default() },
        }
    }
}

fn why(reason: UnloadReason) -> &'static str {
    match reason {
        UnloadReason::Evicted => "evicted",
        UnloadReason::Idle => "idle",
        UnloadReason::Forgotten => "forgotten",
        UnloadReason::Replaced => "replaced",
        UnloadReason::Closed => "closed",
        _ => "requested",
    }
}
