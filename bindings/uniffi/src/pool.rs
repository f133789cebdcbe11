//! The pool: who is resident.

use std::sync::Arc;
use std::time::Duration;

use hob::engine::Engine;
use hob::pool::{EventStream, Evicted, ExternalCharge, Paused, Plan, Reclaimed, Token};
use hob::{CancelToken, Clock, Key, Kind, Lease, Pool, PoolOptions};
use parking_lot::Mutex;
use serde::Serialize;

use crate::error::{Result, invalid, json};
use crate::hooks::{RawHooked, RawHooks, check_outside, install};
use crate::live::{Live, Type};
use crate::resident::{RawAdmission, RawAdmitted, RawResident};
use crate::testing::RawFakeClock;
use crate::types::{RawCancelToken, RawIdle, RawKey, RawNoRoom, seconds_of, size};
use crate::wait::{Single, token, until};

/// How a pool without an engine is made.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawPoolOptions {
    /// The budget.
    pub budget_bytes: u64,
    /// Bytes never exceeded.
    pub physical_limit_bytes: Option<u64>,
    /// How long entries stay.
    pub idle: Option<RawIdle>,
    /// Without room.
    pub no_room: RawNoRoom,
    /// Admissions that may wait.
    pub max_waiting: u64,
    /// Drain after each release and each failed load.
    pub drain_after_release: bool,
    /// How long an evict watches for bytes that come back late.
    pub settle_s: f64,
    /// Which hooks there are.
    pub hooked: RawHooked,
    /// A test's clock.
    pub clock: Option<Arc<RawFakeClock>>,
}

/// A pool.
#[derive(uniffi::Object)]
pub struct RawPool {
    pool: Pool,
    // A pool keeps its engine open.
    engine: Option<Engine>,
    _live: Live,
}

impl RawPool {
    /// The pool, except to who is inside it.
    fn pool(&self) -> hob::Result<&Pool> {
        check_outside()?;
        Ok(&self.pool)
    }

    pub(crate) fn give(pool: Pool, engine: Option<Engine>) -> Arc<Self> {
        Arc::new(Self { pool, engine, _live: Live::new(Type::Pool) })
    }
}

#[derive(Serialize)]
struct ReclaimedJson {
    evicted: Vec<Key>,
    freed_bytes: u64,
    fits: bool,
    /// The errors of releases.
    failures: Vec<FailureJson>,
}

#[derive(Serialize)]
struct FailureJson {
    code: i32,
    message: String,
}

fn reclaimed(reclaimed: Reclaimed) -> Result<String> {
    let failures = reclaimed.errors.iter();
    let failures = failures.map(|error| FailureJson { code: error.kind().code(), message: error.full_message() }).collect();
    json(&ReclaimedJson { evicted: reclaimed.evicted, freed_bytes: reclaimed.freed_bytes, fits: reclaimed.fits, failures })
}

#[uniffi::export]
impl RawPool {
    /// A pool of the host's own.
    ///
    /// # Errors
    /// `InvalidArgument` for a budget of 0, `Io`.
    #[uniffi::constructor]
    pub fn create(options: RawPoolOptions, hooks: Option<Box<dyn RawHooks>>) -> Result<Arc<Self>> {
        let mut core = PoolOptions::new(options.budget_bytes);
        core.physical_limit_bytes = options.physical_limit_bytes;
        core.idle = options.idle.map_or(core.idle, Into::into);
        core.no_room = options.no_room.into();
        core.max_waiting = size("max_waiting", options.max_waiting)?;
        core.drain_after_release = options.drain_after_release;
        core.settle = seconds_of("the time to settle", options.settle_s)?;
        if let Some(hooks) = hooks {
            install(hooks, options.hooked, &mut core);
        }
        core.clock = options.clock.map(|clock| Arc::clone(&clock.clock) as Arc<dyn Clock>);
        Ok(Self::give(Pool::new(core)?, None))
    }

    /// Makes a key resident.
    ///
    /// # Errors
    /// `InvalidArgument`, `BudgetExceeded`, `Busy`, `Cancelled`, `Timeout`, `Closed`, `Callback`.
    pub async fn admit(&self, admission: RawAdmission, resident: Box<dyn RawResident>) -> Result<RawAdmitted> {
        if self.engine.is_some() && !matches!(Kind::from_name(&admission.key.kind), Kind::Other(_)) {
            let text =
                format!("{} is a kind of the engine's own models; give a resident of the host's another", admission.key.kind);
            return Err(invalid(text).into());
        }
        crate::resident::admit(self.pool()?, admission, resident.into()).await
    }

    /// Begins a use of a resident entry; nothing when the pool does not hold it.
    ///
    /// # Errors
    /// None, as things are.
    pub fn begin_use(&self, key: RawKey, idle: Option<RawIdle>) -> Result<Option<Arc<RawLease>>> {
        let key = key.into();
        let lease = match idle {
            None => self.pool()?.begin_use(&key),
            Some(idle) => self.pool()?.begin_use_with(&key, idle.into()),
        };
        Ok(lease.map(RawLease::give))
    }

    /// The token of a resident entry.
    ///
    /// # Errors
    /// None, as things are.
    pub fn peek(&self, key: RawKey) -> Result<Option<u64>> {
        Ok(self.pool()?.peek(&key.into()).map(Token::as_u64))
    }

    /// Refreshes an entry's clock; whether it is resident.
    ///
    /// # Errors
    /// None, as things are.
    pub fn touch(&self, key: RawKey) -> Result<bool> {
        Ok(self.pool()?.touch(&key.into()))
    }

    /// Drops an entry without its release; the bytes taken off the account.
    ///
    /// # Errors
    /// None, as things are.
    pub fn forget(&self, key: RawKey) -> Result<Option<u64>> {
        Ok(self.pool()?.forget(&key.into()))
    }

    /// As `forget`, only if the entry is still the one of `token`.
    ///
    /// # Errors
    /// None, as things are.
    pub fn forget_token(&self, token: u64) -> Result<Option<u64>> {
        Ok(self.pool()?.forget_token(Token::from_u64(token)))
    }

    /// As `forget`, and drains; the bytes really given back.
    ///
    /// # Errors
    /// `NotFound`, `Cancelled`, `Timeout`.
    pub async fn forget_and_drain(&self, key: RawKey, cancel: Option<Arc<RawCancelToken>>) -> Result<u64> {
        let key = key.into();
        Ok(until(token(cancel.as_ref()), self.pool()?.forget_and_drain(&key)).await?)
    }

    /// Unloads an entry; the bytes given back.
    ///
    /// # Errors
    /// `InUse`, `NotFound`, `Closed`, `Cancelled`, `Timeout`, or the release's.
    pub async fn evict(&self, key: RawKey, force: bool, cancel: Option<Arc<RawCancelToken>>) -> Result<u64> {
        let key = key.into();
        let evicted: Evicted = until(token(cancel.as_ref()), self.pool()?.evict(&key, force)).await?;
        Ok(evicted.freed_bytes)
    }

    /// Unloads idle entries until the account is within the budget; JSON.
    ///
    /// # Errors
    /// `Closed`, `Cancelled`, `Timeout`.
    pub async fn trim(&self, cancel: Option<Arc<RawCancelToken>>) -> Result<String> {
        reclaimed(until(token(cancel.as_ref()), self.pool()?.trim()).await?)
    }

    /// Unloads idle entries until so many bytes are free; JSON.
    ///
    /// # Errors
    /// As `trim`.
    pub async fn make_room(&self, bytes: u64, cancel: Option<Arc<RawCancelToken>>) -> Result<String> {
        let cancel = token(cancel.as_ref());
        reclaimed(until(cancel.clone(), self.pool()?.make_room(bytes, cancel)).await?)
    }

    /// Unloads every entry past its idle time; JSON.
    ///
    /// # Errors
    /// As `trim`.
    pub async fn sweep(&self, cancel: Option<Arc<RawCancelToken>>) -> Result<String> {
        reclaimed(until(token(cancel.as_ref()), self.pool()?.sweep()).await?)
    }

    /// Pins an entry; whether the pool knows it.
    ///
    /// # Errors
    /// None, as things are.
    pub fn pin(&self, key: RawKey) -> Result<bool> {
        Ok(self.pool()?.pin(&key.into()))
    }

    /// Undoes a pin.
    ///
    /// # Errors
    /// None, as things are.
    pub fn unpin(&self, key: RawKey) -> Result<bool> {
        Ok(self.pool()?.unpin(&key.into()))
    }

    /// Whether an entry is pinned; nothing when the pool does not know it.
    ///
    /// # Errors
    /// None, as things are.
    pub fn is_pinned(&self, key: RawKey) -> Result<Option<bool>> {
        Ok(self.pool()?.is_pinned(&key.into()))
    }

    /// Changes an entry's own idle policy; nothing is the pool's.
    ///
    /// # Errors
    /// None, as things are.
    pub fn set_idle(&self, key: RawKey, idle: Option<RawIdle>) -> Result<bool> {
        Ok(self.pool()?.set_idle(&key.into(), idle.map(Into::into)))
    }

    /// Changes the pool's idle policy.
    ///
    /// # Errors
    /// None, as things are.
    pub fn set_default_idle(&self, idle: RawIdle) -> Result<()> {
        self.pool()?.set_default_idle(idle.into());
        Ok(())
    }

    /// Brings countdowns forward; how many.
    ///
    /// # Errors
    /// `InvalidArgument` for a time that is none.
    pub fn accelerate_idle(&self, grace_s: f64) -> Result<u64> {
        Ok(self.pool()?.accelerate_idle(seconds_of("the grace", grace_s)?) as u64)
    }

    /// Changes the budget.
    ///
    /// # Errors
    /// `InvalidArgument` for 0, `Closed`.
    pub fn set_budget(&self, bytes: u64) -> Result<()> {
        Ok(self.pool()?.set_budget(bytes)?)
    }

    /// The budget.
    ///
    /// # Errors
    /// None, as things are.
    pub fn budget(&self) -> Result<u64> {
        Ok(self.pool()?.budget())
    }

    /// Corrects an entry's charge.
    ///
    /// # Errors
    /// None, as things are.
    pub fn set_measured(&self, token: u64, bytes: u64) -> Result<bool> {
        Ok(self.pool()?.set_measured(Token::from_u64(token), bytes))
    }

    /// Puts bytes of the host's own on the account.
    ///
    /// # Errors
    /// None, as things are.
    pub fn charge(&self, bytes: u64) -> Result<Arc<RawCharge>> {
        let charge = Mutex::new(Some(self.pool()?.charge_external(bytes)));
        Ok(Arc::new(RawCharge { charge, _live: Live::new(Type::Charge) }))
    }

    /// A dry run of an admission; JSON.
    ///
    /// # Errors
    /// None, as things are.
    pub fn plan(&self, key: RawKey, cost_bytes: u64, no_room: Option<RawNoRoom>) -> Result<String> {
        #[derive(Serialize)]
        struct PlanJson {
            verdict: hob::pool::Verdict,
            fits: bool,
            required_bytes: u64,
            free_bytes: u64,
            evict: Vec<Key>,
        }
        let plan = self.pool()?.plan(&key.into(), cost_bytes, no_room.map(Into::into));
        let Plan { verdict, fits, required_bytes, free_bytes, evict, .. } = plan;
        json(&PlanJson { verdict, fits, required_bytes, free_bytes, evict })
    }

    /// Whether so many bytes more could be had now.
    ///
    /// # Errors
    /// None, as things are.
    pub fn has_room(&self, bytes: u64) -> Result<bool> {
        Ok(self.pool()?.has_room(bytes))
    }

    /// A snapshot; JSON. Never waits.
    ///
    /// # Errors
    /// None, as things are.
    pub fn status(&self) -> Result<String> {
        json(&self.pool()?.status())
    }

    /// Subscribes to what happens from now on.
    ///
    /// # Errors
    /// None, as things are.
    pub fn events(&self, capacity: u32) -> Result<Arc<RawEvents>> {
        let events = Single::new(self.pool()?.events(size("capacity", capacity.into())?));
        Ok(Arc::new(RawEvents { events, _pool: (self.pool()?.clone(), self.engine.clone()), _live: Live::new(Type::Events) }))
    }

    /// Holds back new loads until the result goes.
    ///
    /// # Errors
    /// `Closed`, `Cancelled`, `Timeout`.
    pub async fn pause(&self, cancel: Option<Arc<RawCancelToken>>) -> Result<Arc<RawPause>> {
        let paused = until(token(cancel.as_ref()), self.pool()?.pause()).await?;
        Ok(RawPause::give(paused, self.engine.clone()))
    }

    /// Closes the pool. A cancel ends the waiting only.
    ///
    /// # Errors
    /// One that names every release that failed; `Cancelled`, `Timeout`.
    pub async fn close(&self, cancel: Option<Arc<RawCancelToken>>) -> Result<()> {
        Ok(until(token(cancel.as_ref()), self.pool()?.close()).await?)
    }

    /// Whether the pool is closed or closing.
    ///
    /// # Errors
    /// None, as things are.
    pub fn is_closed(&self) -> Result<bool> {
        Ok(self.pool()?.is_closed())
    }
}

/// A use of a resident. The last one to hold it ends the use.
#[derive(Debug, uniffi::Object)]
pub struct RawLease {
    lease: Mutex<Option<Lease>>,
    key: RawKey,
    token: u64,
    _live: Live,
}

impl RawLease {
    pub(crate) fn give(lease: Lease) -> Arc<Self> {
        let (key, token) = (lease.key().into(), lease.token().as_u64());
        Arc::new(Self { lease: Mutex::new(Some(lease)), key, token, _live: Live::new(Type::Lease) })
    }
}

#[uniffi::export]
impl RawLease {
    /// The token under which the owner keeps the resident.
    ///
    /// # Errors
    /// None, as things are.
    pub fn token(&self) -> Result<u64> {
        Ok(self.token)
    }

    /// Whose use it is.
    ///
    /// # Errors
    /// None, as things are.
    pub fn key(&self) -> Result<RawKey> {
        Ok(self.key.clone())
    }

    /// Whether the pool has let the entry go, or the use has ended.
    ///
    /// # Errors
    /// None, as things are.
    pub fn is_detached(&self) -> Result<bool> {
        Ok(self.lease.lock().as_ref().is_none_or(Lease::is_detached))
    }

    /// Ends the use; whether this call was the one that did. Never waits.
    ///
    /// # Errors
    /// None, as things are.
    pub fn end(&self) -> Result<bool> {
        check_outside()?;
        // Dropped without the lock: the pool may wake others.
        let lease = self.lease.lock().take();
        Ok(lease.is_some())
    }
}

/// New loads are held back while it lives.
#[derive(Debug, uniffi::Object)]
pub struct RawPause {
    paused: Mutex<Option<Paused>>,
    _engine: Option<Engine>,
    _live: Live,
}

impl RawPause {
    pub(crate) fn give(paused: Paused, engine: Option<Engine>) -> Arc<Self> {
        Arc::new(Self { paused: Mutex::new(Some(paused)), _engine: engine, _live: Live::new(Type::Pause) })
    }
}

#[uniffi::export]
impl RawPause {
    /// The residents that were quiesced, in order; none after the end.
    ///
    /// # Errors
    /// None, as things are.
    pub fn quiesced(&self) -> Result<Vec<RawKey>> {
        Ok(self.paused.lock().iter().flat_map(Paused::quiesced).map(Into::into).collect())
    }

    /// Lets the waiting admissions go on; whether this call was the one that did.
    ///
    /// # Errors
    /// None, as things are.
    pub fn resume(&self) -> Result<bool> {
        check_outside()?;
        let paused = self.paused.lock().take();
        Ok(paused.is_some())
    }
}

/// Bytes of the host's own on the account while it lives.
#[derive(Debug, uniffi::Object)]
pub struct RawCharge {
    charge: Mutex<Option<ExternalCharge>>,
    _live: Live,
}

#[uniffi::export]
impl RawCharge {
    /// Bytes on the account for it.
    ///
    /// # Errors
    /// None, as things are.
    pub fn bytes(&self) -> Result<u64> {
        Ok(self.charge.lock().as_ref().map_or(0, ExternalCharge::bytes))
    }

    /// Changes the charge; whether it still counts.
    ///
    /// # Errors
    /// `Busy` inside a closure of the pool's.
    pub fn set(&self, bytes: u64) -> Result<bool> {
        check_outside()?;
        Ok(self.charge.lock().as_mut().map(|charge| charge.set(bytes)).is_some())
    }

    /// Takes the charge off.
    ///
    /// # Errors
    /// None, as things are.
    pub fn end(&self) -> Result<bool> {
        check_outside()?;
        let charge = self.charge.lock().take();
        Ok(charge.is_some())
    }
}

/// What happens in a pool.
#[derive(uniffi::Object)]
pub struct RawEvents {
    events: Single<EventStream>,
    // A subscription keeps its pool, and its engine, open.
    _pool: (Pool, Option<Engine>),
    _live: Live,
}

#[uniffi::export]
impl RawEvents {
    /// The next event as JSON; nothing after the last one of a closed pool.
    ///
    /// # Errors
    /// `Busy` while another task reads, `Cancelled`.
    pub async fn next(&self, cancel: Option<Arc<RawCancelToken>>) -> Result<Option<String>> {
        let mut events = self.events.take("the events")?;
        let next = until(token(cancel.as_ref()), async { Ok(events.next().await) }).await?;
        next.as_ref().map(json).transpose()
    }
}

/// A moment from now on the pool's clock.
pub(crate) fn deadline(pool: &Pool, timeout: Duration) -> Option<std::time::Instant> {
    pool.clock().now().checked_add(timeout)
}

/// A request's token, or one that nobody cancels.
pub(crate) fn or_live(token: Option<CancelToken>) -> CancelToken {
    token.unwrap_or_default()
}
