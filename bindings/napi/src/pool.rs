//! Pools: the account, leases, a host's own residents, what happens.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use hob::engine::Engine;
use hob::pool::{Admission, EventStream, ExternalCharge, LoadContext, Loaded, Paused, PoolOptions, Token};
use hob::{BoxFuture, CancelToken, Key, Kind, Lease, Pool, Result};
use napi_derive::napi;
use parking_lot::Mutex;

use crate::Live;
use crate::engine::NativeCancelToken;
use crate::error::{Refusal, duration, enter, invalid, number, size, whole};
use crate::mailbox::{Letter, Mailbox, NativeMailbox, What};
use crate::requests::{Idle, read_idle, read_no_room};
use crate::results::{NativePlan, NativePoolEvent, NativePoolStatus, Value};
use crate::stream::Readiness;

fn read_key(key: &str) -> Result<Key> {
    match key.split_once(':') {
        Some((kind, id)) if !kind.is_empty() && !id.is_empty() => Ok(Key::new(Kind::from_name(kind), id)),
        _ => Err(invalid("a key is 'kind:id', neither of them empty")),
    }
}

/// How a pool of one's own is made.
#[napi(object, object_to_js = false)]
pub struct NativePoolOptions {
    pub budget_bytes: f64,
    pub physical_limit_bytes: Option<f64>,
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub idle: Option<Idle>,
    #[napi(ts_type = "'wait' | 'refuse' | 'loadAnyway'")]
    pub no_room: Option<String>,
    pub max_waiting: Option<f64>,
}

/// A request for residency.
#[napi(object, object_to_js = false)]
pub struct NativeAdmission {
    pub key: String,
    /// Bytes it will take; without it the `estimate` function is asked.
    pub cost: Option<f64>,
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub idle: Option<Idle>,
    #[napi(ts_type = "number | 'immediately' | 'never'")]
    pub use_idle: Option<Idle>,
    pub pinned: Option<bool>,
    pub in_use: Option<bool>,
    pub replace: Option<bool>,
    #[napi(ts_type = "'wait' | 'refuse' | 'loadAnyway'")]
    pub no_room: Option<String>,
    pub timeout_ms: Option<f64>,
    /// There is a `release` function.
    pub releases: bool,
}

/// A host's functions of one admission. The last of them to go says so.
struct Functions {
    mailbox: Arc<Mailbox>,
    id: u64,
}

impl Drop for Functions {
    fn drop(&mut self) {
        self.mailbox.send(Letter::Forget(self.id));
    }
}

impl Functions {
    fn estimate(self: Arc<Self>) -> BoxFuture<'static, Result<u64>> {
        Box::pin(async move {
            let bytes = self.mailbox.call(self.id, What::Estimate, Token::from_u64(0), None, None).await?;
            bytes.ok_or_else(|| invalid("the estimate function gave no number of bytes"))
        })
    }

    fn load(self: Arc<Self>, context: LoadContext) -> BoxFuture<'static, Result<Loaded>> {
        Box::pin(async move {
            let LoadContext { token, cancel, progress, .. } = context;
            let bytes = self.mailbox.call(self.id, What::Load, token, Some(cancel), Some(progress)).await?;
            Ok(bytes.map_or_else(Loaded::unmeasured, Loaded::measured))
        })
    }

    fn release(self: Arc<Self>, token: Token) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move { self.mailbox.call(self.id, What::Release, token, None, None).await.map(|_| ()) })
    }
}

/// A pool. Its end by the garbage collector lets go of one handle.
#[napi]
pub struct NativePool {
    pool: Pool,
    mailbox: Arc<Mailbox>,
    // The last handle of an engine closes it, and so its pool.
    _engine: Option<Engine>,
    _live: Live,
}

impl NativePool {
    pub(crate) fn new(pool: Pool, engine: Option<Engine>, mailbox: Arc<Mailbox>) -> Self {
        Self { pool, mailbox, _engine: engine, _live: Live::new() }
    }

    fn start<F>(&self, id: f64, future: F) -> Result<()>
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        self.mailbox.run(whole("id", id)?, future)
    }

    fn admission(&self, given: &NativeAdmission, functions: &Arc<Functions>, token: CancelToken) -> Result<Admission> {
        let key = read_key(&given.key)?;
        let mut admission = if let Some(cost) = given.cost {
            Admission::new(key, whole("cost", cost)?)
        } else {
            let functions = Arc::clone(functions);
            Admission::estimated(key, move || functions.estimate())
        };
        if let Some(idle) = &given.idle {
            admission = admission.idle(read_idle("idle", idle)?);
        }
        if let Some(idle) = &given.use_idle {
            admission = admission.use_idle(read_idle("useIdle", idle)?);
        }
        if given.pinned == Some(true) {
            admission = admission.pinned();
        }
        if given.in_use == Some(true) {
            admission = admission.in_use();
        }
        if given.replace == Some(true) {
            admission = admission.replace();
        }
        if let Some(policy) = &given.no_room {
            admission = admission.no_room(read_no_room(policy)?);
        }
        if let Some(ms) = given.timeout_ms
            && let Some(deadline) = self.pool.clock().now().checked_add(duration("timeoutMs", ms)?)
        {
            admission = admission.deadline(deadline);
        }
        Ok(admission.cancel(token))
    }
}

#[napi]
impl NativePool {
    /// A pool without an engine.
    #[napi(factory)]
    pub fn create(mailbox: &NativeMailbox, options: NativePoolOptions) -> Result<Self, Refusal> {
        enter(|| {
            let mut wanted = PoolOptions::new(whole("budgetBytes", options.budget_bytes)?);
            wanted.physical_limit_bytes =
                options.physical_limit_bytes.map(|bytes| whole("physicalLimitBytes", bytes)).transpose()?;
            if let Some(idle) = &options.idle {
                wanted.idle = read_idle("idle", idle)?;
            }
            if let Some(policy) = &options.no_room {
                wanted.no_room = read_no_room(policy)?;
            }
            if let Some(most) = options.max_waiting {
                wanted.max_waiting = size("maxWaiting", most)?;
            }
            Ok(Self::new(Pool::new(wanted)?, None, Arc::clone(&mailbox.mailbox)))
        })
    }

    /// Makes a key resident. `id` is also the number of the letters that call the host's functions.
    #[napi]
    pub fn admit(&self, id: f64, admission: NativeAdmission, cancel: Option<&NativeCancelToken>) -> Result<(), Refusal> {
        enter(|| {
            let functions = Arc::new(Functions { mailbox: Arc::clone(&self.mailbox), id: whole("id", id)? });
            let wanted = self.admission(&admission, &functions, self.mailbox.token(cancel))?;
            let (loads, releases) = (Arc::clone(&functions), functions);
            let release = move |token| -> BoxFuture<'static, Result<()>> {
                if admission.releases { releases.release(token) } else { Box::pin(async { Ok(()) }) }
            };
            let admitted = self.pool.admit(wanted, move |context| loads.load(context), release);
            self.start(id, async move { admitted.await.map(|admitted| Value::Admitted(admitted.into())) })
        })
    }

    /// Begins a use of a resident entry; null when the pool does not hold it.
    #[napi]
    pub fn begin_use(
        &self,
        key: String,
        #[napi(ts_arg_type = "number | 'immediately' | 'never'")] idle: Option<Idle>,
    ) -> Result<Option<NativeLease>, Refusal> {
        enter(|| {
            let key = read_key(&key)?;
            let lease = match idle {
                None => self.pool.begin_use(&key),
                Some(idle) => self.pool.begin_use_with(&key, read_idle("idle", &idle)?),
            };
            Ok(lease.map(NativeLease::from))
        })
    }

    /// The token of a resident entry.
    #[napi]
    pub fn peek(&self, key: String) -> Result<Option<f64>, Refusal> {
        enter(|| Ok(self.pool.peek(&read_key(&key)?).map(|token| number(token.as_u64()))))
    }

    /// Refreshes a resident entry's clock.
    #[napi]
    pub fn touch(&self, key: String) -> Result<bool, Refusal> {
        enter(|| Ok(self.pool.touch(&read_key(&key)?)))
    }

    /// Drops an entry without its release; the bytes taken off the account, or null.
    #[napi]
    pub fn forget(&self, key: String) -> Result<Option<f64>, Refusal> {
        enter(|| Ok(self.pool.forget(&read_key(&key)?).map(number)))
    }

    /// Unloads an entry.
    #[napi]
    pub fn evict(&self, id: f64, key: String, force: bool) -> Result<(), Refusal> {
        enter(|| {
            let (pool, key) = (self.pool.clone(), read_key(&key)?);
            self.start(id, async move { pool.evict(&key, force).await.map(|evicted| Value::Evicted(evicted.into())) })
        })
    }

    /// Unloads idle entries until the account is within the budget.
    #[napi]
    pub fn trim(&self, id: f64) -> Result<(), Refusal> {
        enter(|| {
            let pool = self.pool.clone();
            self.start(id, async move { pool.trim().await.map(|reclaimed| Value::Reclaimed(reclaimed.into())) })
        })
    }

    /// Unloads idle entries until so many bytes are free.
    #[napi]
    pub fn make_room(&self, id: f64, bytes: f64, cancel: Option<&NativeCancelToken>) -> Result<(), Refusal> {
        enter(|| {
            let (pool, bytes, token) = (self.pool.clone(), whole("bytes", bytes)?, self.mailbox.token(cancel));
            self.start(
                id,
                async move { pool.make_room(bytes, Some(token)).await.map(|reclaimed| Value::Reclaimed(reclaimed.into())) },
            )
        })
    }

    /// Unloads every entry that is past its idle time.
    #[napi]
    pub fn sweep(&self, id: f64) -> Result<(), Refusal> {
        enter(|| {
            let pool = self.pool.clone();
            self.start(id, async move { pool.sweep().await.map(|reclaimed| Value::Reclaimed(reclaimed.into())) })
        })
    }

    /// Pins an entry.
    #[napi]
    pub fn pin(&self, key: String) -> Result<bool, Refusal> {
        enter(|| Ok(self.pool.pin(&read_key(&key)?)))
    }

    /// Undoes a pin.
    #[napi]
    pub fn unpin(&self, key: String) -> Result<bool, Refusal> {
        enter(|| Ok(self.pool.unpin(&read_key(&key)?)))
    }

    /// Changes an entry's own idle policy; none is the pool's.
    #[napi]
    pub fn set_idle(
        &self,
        key: String,
        #[napi(ts_arg_type = "number | 'immediately' | 'never'")] idle: Option<Idle>,
    ) -> Result<bool, Refusal> {
        enter(|| {
            let idle = idle.map(|idle| read_idle("idle", &idle)).transpose()?;
            Ok(self.pool.set_idle(&read_key(&key)?, idle))
        })
    }

    /// Changes the pool's idle policy.
    #[napi]
    pub fn set_default_idle(&self, #[napi(ts_arg_type = "number | 'immediately' | 'never'")] idle: Idle) -> Result<(), Refusal> {
        enter(|| {
            self.pool.set_default_idle(read_idle("idle", &idle)?);
            Ok(())
        })
    }

    /// Brings running idle countdowns forward; how many.
    #[napi]
    pub fn accelerate_idle(&self, grace_ms: f64) -> Result<f64, Refusal> {
        enter(|| Ok(crate::error::count(self.pool.accelerate_idle(duration("graceMs", grace_ms)?))))
    }

    /// Changes the budget.
    #[napi]
    pub fn set_budget(&self, bytes: f64) -> Result<(), Refusal> {
        enter(|| self.pool.set_budget(whole("bytes", bytes)?))
    }

    /// Corrects a resident entry's charge.
    #[napi]
    pub fn set_measured(&self, token: f64, bytes: f64) -> Result<bool, Refusal> {
        enter(|| Ok(self.pool.set_measured(Token::from_u64(whole("token", token)?), whole("bytes", bytes)?)))
    }

    /// Puts bytes of the host's own on the account.
    #[napi]
    pub fn charge(&self, bytes: f64) -> Result<NativeCharge, Refusal> {
        enter(|| {
            let charge = self.pool.charge_external(whole("bytes", bytes)?);
            Ok(NativeCharge { charge: Mutex::new(Some(charge)), _live: Live::new() })
        })
    }

    /// What an admission would do now.
    #[napi]
    pub fn plan(
        &self,
        key: String,
        cost: f64,
        #[napi(ts_arg_type = "'wait' | 'refuse' | 'loadAnyway'")] no_room: Option<String>,
    ) -> Result<NativePlan, Refusal> {
        enter(|| {
            let policy = no_room.as_deref().map(read_no_room).transpose()?;
            Ok(self.pool.plan(&read_key(&key)?, whole("cost", cost)?, policy).into())
        })
    }

    /// A snapshot.
    #[napi]
    pub fn status(&self) -> Result<NativePoolStatus, Refusal> {
        enter(|| Ok(self.pool.status().into()))
    }

    /// Whether the pool is closed or closing.
    #[napi(getter)]
    pub fn closed(&self) -> bool {
        self.pool.is_closed()
    }

    /// Subscribes to what happens from now on. `id` is the number of its `ready` letters.
    #[napi]
    pub fn events(&self, id: f64, capacity: f64) -> Result<NativeEvents, Refusal> {
        enter(|| {
            let events = self.pool.events(size("capacity", capacity)?);
            Ok(NativeEvents {
                events: Mutex::new(Some(events)),
                readiness: Readiness::new(whole("id", id)?, Arc::clone(&self.mailbox)),
                _live: Live::new(),
            })
        })
    }

    /// Holds back new loads.
    #[napi]
    pub fn pause(&self, id: f64) -> Result<(), Refusal> {
        enter(|| {
            let pool = self.pool.clone();
            self.start(id, async move { pool.pause().await.map(|paused| Value::Pause(NativePause::new(paused))) })
        })
    }

    /// Closes the pool.
    #[napi]
    pub fn close(&self, id: f64) -> Result<(), Refusal> {
        enter(|| {
            let pool = self.pool.clone();
            self.start(id, async move { pool.close().await.map(|()| Value::Nothing) })
        })
    }
}

/// A use of a resident. Its end by the garbage collector ends the use.
#[napi]
pub struct NativeLease {
    lease: Mutex<Option<Lease>>,
    token: Token,
    _live: Live,
}

impl From<Lease> for NativeLease {
    fn from(lease: Lease) -> Self {
        Self { token: lease.token(), lease: Mutex::new(Some(lease)), _live: Live::new() }
    }
}

#[napi]
impl NativeLease {
    /// The entry's token.
    #[napi(getter)]
    pub fn token(&self) -> f64 {
        number(self.token.as_u64())
    }

    /// Whether the pool has let the entry go. True also after the end.
    #[napi(getter)]
    pub fn detached(&self) -> bool {
        self.lease.lock().as_ref().is_none_or(Lease::is_detached)
    }

    /// Ends the use. Whether this call did.
    #[napi]
    pub fn end(&self) -> bool {
        self.lease.lock().take().is_some()
    }
}

/// While it lives, no load starts.
#[napi]
pub struct NativePause {
    paused: Mutex<Option<Paused>>,
    _live: Live,
}

impl NativePause {
    pub(crate) fn new(paused: Paused) -> Self {
        Self { paused: Mutex::new(Some(paused)), _live: Live::new() }
    }
}

#[napi]
impl NativePause {
    /// Lets loads go on. Whether this call did.
    #[napi]
    pub fn resume(&self) -> bool {
        self.paused.lock().take().is_some()
    }
}

/// Bytes of the host's own on the account.
#[napi]
pub struct NativeCharge {
    charge: Mutex<Option<ExternalCharge>>,
    _live: Live,
}

#[napi]
impl NativeCharge {
    /// Changes the charge; nothing after its end.
    #[napi]
    pub fn set(&self, bytes: f64) -> Result<(), Refusal> {
        enter(|| {
            let bytes = whole("bytes", bytes)?;
            if let Some(charge) = self.charge.lock().as_mut() {
                charge.set(bytes);
            }
            Ok(())
        })
    }

    /// Takes it off the account. Whether this call did.
    #[napi]
    pub fn end(&self) -> bool {
        self.charge.lock().take().is_some()
    }
}

/// A subscription.
#[napi]
pub struct NativeEvents {
    events: Mutex<Option<EventStream>>,
    readiness: Arc<Readiness>,
    _live: Live,
}

#[napi]
impl NativeEvents {
    /// The events that have come, or null: then a `ready` letter says when to look again. After the last one an empty list.
    #[napi]
    pub fn look(&self) -> Result<Option<Vec<NativePoolEvent>>, Refusal> {
        enter(|| {
            let mut place = self.events.lock();
            let mut found = Vec::new();
            loop {
                let Some(events) = place.as_mut() else { return Ok(Some(found)) };
                match self.readiness.poll(|context| pin!(events.next()).poll(context)) {
                    Poll::Ready(Some(event)) => found.push(NativePoolEvent::from(event)),
                    Poll::Ready(None) => *place = None,
                    Poll::Pending if found.is_empty() => return Ok(None),
                    Poll::Pending => {
                        self.readiness.disarm();
                        return Ok(Some(found));
                    }
                }
            }
        })
    }

    /// Ends the subscription.
    #[napi]
    pub fn free(&self) -> Result<(), Refusal> {
        enter(|| {
            drop(self.events.lock().take());
            Ok(())
        })
    }
}
