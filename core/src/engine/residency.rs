//! The owner side of the pool: the engine's table of loaded models by token, and the way a request gets hold of one.
//!
//! The pool decides who is resident and keeps tokens; the models live here (spec P20 to P30). A request holds a lease for the
//! pool's account and its own reference for the memory, so nothing it uses can go under it; whoever drops the last reference
//! has the device free it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::backend::Slot;
use super::request::{Place, Places, unavailable};
use super::thread::DeviceThread;
use super::{EngineOptions, RequestOptions, closed};
use crate::cancel::CancelToken;
use crate::clock::{BoxFuture, Clock, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::fake::FakeDevice;
use crate::model::{LoadOptions, ModelKind, ModelSpec, Text};
use crate::pool::{Admission, Key, Lease, LoadContext, Loaded, Origin, Pool, PoolOptions, Runtime, Token, unblock};

/// A loaded model. The last holder's drop posts the unload and the drain to the device (P36).
pub(crate) struct Model {
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) text: Text,
    pub(crate) slot: Slot,
    /// Bytes of the weights, measured.
    weights: u64,
    token: Token,
    owner: Weak<Residency>,
    device: DeviceThread,
}

impl Model {
    /// Whether there is memory for `tokens` tokens of keys and values, all rows of the model together.
    pub(crate) fn has_room(&self, tokens: usize) -> bool {
        let beyond = self.spec.kv_bytes(tokens).saturating_sub(self.spec.estimate.kv_cache);
        if beyond == 0 {
            return true;
        }
        let Some(owner) = self.owner.upgrade() else { return false };
        owner.pool.has_room(beyond)
    }

    /// What the pool is to be told when the bytes of the model's keys and values change. What the entry was charged for them at
    /// its admission stays charged; more comes on top.
    pub(crate) fn account(&self) -> Arc<dyn Fn(u64) + Send + Sync> {
        let (owner, token, estimate, weights) = (self.owner.clone(), self.token, self.spec.estimate, self.weights);
        Arc::new(move |bytes| {
            if let Some(owner) = owner.upgrade() {
                owner.pool.set_measured(token, weights + estimate.working + bytes.max(estimate.kv_cache));
            }
        })
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let slot = self.slot;
        self.device.post_job(move |bench| {
            bench.unload(slot);
            if let Err(error) = bench.drain() {
                tracing::warn!(kind = %error.kind(), "drain after an unload failed");
            }
        });
    }
}

/// A model in use. Dropping it ends the use.
pub(crate) struct Used {
    pub(crate) model: Arc<Model>,
    /// The pool's side of the use; it ends with this value.
    _lease: Lease,
    /// How long the load took, when this request caused or joined one.
    pub(crate) load: Option<Duration>,
}

/// What a request wants of a model, checked before anything is loaded for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Residency alone.
    Any,
    Generate,
    Score,
    Embed,
    Rerank,
}

impl Purpose {
    fn check(self, spec: &ModelSpec) -> Result<()> {
        let (verb, kinds): (&str, &[ModelKind]) = match self {
            Self::Any => return Ok(()),
            Self::Generate => ("generate", &[ModelKind::Chat]),
            Self::Score => ("score", &[ModelKind::Chat]),
            Self::Embed => ("embed", &[ModelKind::Embedder]),
            Self::Rerank => ("rerank", &[ModelKind::Reranker, ModelKind::Embedder]),
        };
        if kinds.contains(&spec.kind) {
            return Ok(());
        }
        let kinds: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        Err(Error::unsupported(format!("{} is of kind {}; {verb} needs: {}", spec.id, spec.kind.name(), kinds.join(" or "))))
    }
}

type Table = Arc<Mutex<HashMap<Token, Arc<Model>>>>;

pub(crate) struct Residency {
    device: DeviceThread,
    fake: Option<FakeDevice>,
    runtime: Arc<Runtime>,
    pool: Pool,
    table: Table,
    /// Which key a reference meant when it was last read, so that a hit reads no files.
    names: Mutex<HashMap<(String, Option<ModelKind>), Key>>,
    /// How much of [`blocking`](Self::blocking) may run at once.
    blocking: Arc<Semaphore>,
    closed: AtomicBool,
    places: Places,
    clock: Arc<dyn Clock>,
    stuck_after: Duration,
    /// Somebody is already looking whether the device is stuck.
    suspected: AtomicBool,
}

/// References remembered; hosts use a handful, and a forgotten one only costs reading headers again.
const MAX_NAMES: usize = 1024;

impl Residency {
    pub(crate) fn new(
        device: DeviceThread,
        fake: Option<FakeDevice>,
        runtime: Arc<Runtime>,
        mut options: PoolOptions,
        requests: &EngineOptions,
    ) -> Result<Arc<Self>> {
        let draining = device.clone();
        options.drain = Some(Arc::new(move || {
            let device = draining.clone();
            Box::pin(async move {
                if let Err(error) = device.call("a drain", |bench| bench.drain()).await {
                    tracing::warn!(kind = %error.kind(), "drain failed");
                }
            })
        }));
        options.probe = Some(device.gauge());
        let clock = requests.clock.clone().unwrap_or_else(|| Arc::new(SystemClock::on(Arc::clone(&runtime))));
        options.clock = Some(Arc::clone(&clock));
        options.spawner = Some(runtime.clone());
        let pool = Pool::new(options)?;
        let (table, names) = (Table::default(), Mutex::default());
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let blocking = Arc::new(Semaphore::new(cores.max(2)));
        Ok(Arc::new(Self {
            device,
            fake,
            runtime,
            pool,
            table,
            names,
            blocking,
            closed: AtomicBool::new(false),
            places: Places::new(requests.capacity.saturating_add(requests.queue)),
            clock,
            stuck_after: requests.stuck_after,
            suspected: AtomicBool::new(false),
        }))
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn device(&self) -> &DeviceThread {
        &self.device
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    pub(crate) fn stuck_after(&self) -> Duration {
        self.stuck_after
    }

    /// Requests taken on and not over.
    pub(crate) fn requests(&self) -> usize {
        self.places.taken()
    }

    /// Takes a request on, or says at once why not.
    pub(crate) fn enter(&self) -> Result<Place> {
        if self.is_closed() {
            return Err(closed());
        }
        if self.device.is_stuck() {
            return Err(unavailable());
        }
        self.places.take(self.device.next_id())
    }

    /// Has the device watched while nobody waits for it: should it not move for the bound, it counts as stuck.
    pub(crate) fn suspect(self: &Arc<Self>) {
        if self.suspected.swap(true, Ordering::AcqRel) {
            return;
        }
        let this = Arc::clone(self);
        self.spawn(async move {
            this.device.observe(&*this.clock, this.stuck_after).await;
            this.suspected.store(false, Ordering::Release);
        });
    }

    /// Runs a request's way to the device; should the device be found stuck meanwhile, it ends at once.
    pub(crate) async fn unless_stuck<T>(&self, way: impl Future<Output = Result<T>>) -> Result<T> {
        let stuck = self.device.stuck();
        tokio::select! {
            biased;
            result = way => result,
            () = stuck => Err(unavailable()),
        }
    }

    /// Runs a task on the engine's own thread.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        use crate::pool::Spawn;
        self.runtime.spawn(Box::pin(task));
    }

    pub(crate) fn mark_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The error of a request whose token fired: the engine's end comes before the caller's reasons.
    pub(crate) fn interrupted(&self, token: &CancelToken) -> Error {
        if self.is_closed() {
            return closed();
        }
        token.check().err().unwrap_or_else(|| Error::new(ErrorKind::Cancelled, "cancelled by the caller"))
    }

    pub(crate) fn read_spec(&self, model: &str, options: &LoadOptions) -> Result<ModelSpec> {
        match &self.fake {
            Some(fake) => fake.find(model),
            None => ModelSpec::read(model, options, self.device.device().kind == "cpu"),
        }
    }

    /// Runs file or processor work on a thread of its own, few at a time; the token leaves at once, the work ends by itself.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        token: &CancelToken,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let waiting = async {
            let permit = Arc::clone(&self.blocking).acquire_owned().await;
            unblock(move || {
                let _permit = permit;
                work()
            })
            .await
        };
        tokio::select! {
            result = waiting => result,
            _ = token.cancelled() => Err(self.interrupted(token)),
        }
    }

    /// Finds or loads the model and marks it in use. Cancelling the token leaves at any point.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        model: &str,
        purpose: Purpose,
        options: &RequestOptions,
        token: &CancelToken,
    ) -> Result<Used> {
        token.check().map_err(|_| self.interrupted(token))?;
        let name = (model.to_owned(), options.load.kind);
        let known = self.names.lock().get(&name).cloned();
        if let Some(used) = known.and_then(|key| self.hit(&key, options)) {
            purpose.check(&used.model.spec)?;
            return Ok(used);
        }
        // Reading headers is file work, which must not hold up the thread that keeps timers.
        let reader = Arc::clone(self);
        let (reference, load_options) = (model.to_owned(), options.load.clone());
        let spec = Arc::new(self.blocking(token, move || reader.read_spec(&reference, &load_options)).await?);
        purpose.check(&spec)?;
        let key = spec.key();
        {
            let mut names = self.names.lock();
            if names.len() >= MAX_NAMES {
                names.clear();
            }
            names.insert(name, key.clone());
        }
        // A lease whose entry was let go before we could take the model from the table is no hit (P21): ask again. Each round
        // needs a forced evict between two steps of ours, so a few rounds are plenty.
        for _ in 0..8 {
            if let Some(used) = self.hit(&key, options) {
                return Ok(used);
            }
            if let Some(used) = self.admit(&spec, options, token).await? {
                return Ok(used);
            }
        }
        Err(Error::new(ErrorKind::Busy, format!("{key} was evicted by force each time it had loaded; try again later")))
    }

    fn hit(&self, key: &Key, options: &RequestOptions) -> Option<Used> {
        let lease = match options.idle {
            Some(idle) => self.pool.begin_use_with(key, idle),
            None => self.pool.begin_use(key),
        }?;
        let model = self.table.lock().get(&lease.token()).cloned()?;
        Some(Used { model, _lease: lease, load: None })
    }

    /// One admission. `None`: the pool let the entry go before this request got hold of the model.
    async fn admit(self: &Arc<Self>, spec: &Arc<ModelSpec>, options: &RequestOptions, token: &CancelToken) -> Result<Option<Used>> {
        let mut admission = Admission::new(spec.key(), spec.estimate.total()).in_use().cancel(token.clone());
        if let Some(idle) = options.idle {
            admission = admission.use_idle(idle);
        }
        // What this request's own load made, in case the pool lets it go at once: the request then runs on it (P26).
        let own: Arc<Mutex<Option<Arc<Model>>>> = Arc::default();
        let load = {
            let (owner, table, spec, own) = (Arc::downgrade(self), Arc::clone(&self.table), Arc::clone(spec), Arc::clone(&own));
            let device = self.device.clone();
            move |context: LoadContext| -> BoxFuture<'static, Result<Loaded>> {
                Box::pin(load(device, owner, table, spec, own, context))
            }
        };
        let release = {
            let table = Arc::clone(&self.table);
            move |token: Token| -> BoxFuture<'static, Result<()>> {
                // Empties the place under this token and no other (P24, P25). The drop posts to the device and returns.
                let model = table.lock().remove(&token);
                drop(model);
                Box::pin(std::future::ready(Ok(())))
            }
        };
        let asked = Instant::now();
        let lease = match self.pool.acquire(admission, load, release).await {
            Ok(lease) => lease,
            Err(error)
                if matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Timeout | ErrorKind::Closed)
                    && (token.is_cancelled() || self.is_closed()) =>
            {
                // What the device is at may be this request's load.
                self.suspect();
                return Err(self.interrupted(token));
            }
            Err(error) => return Err(error),
        };
        let load = (lease.origin() != Origin::Hit).then(|| lease.load_time().min(asked.elapsed()));
        let model = self.table.lock().get(&lease.token()).cloned().or_else(|| own.lock().take());
        Ok(model.map(|model| Used { model, _lease: lease, load }))
    }
}

/// The load the pool runs once there is room: text side here, weights on the device, then the table.
async fn load(
    device: DeviceThread,
    residency: Weak<Residency>,
    table: Table,
    spec: Arc<ModelSpec>,
    own: Arc<Mutex<Option<Arc<Model>>>>,
    context: LoadContext,
) -> Result<Loaded> {
    let reader = Arc::clone(&spec);
    let text = unblock(move || Text::read(&reader)).await?;
    let estimate = spec.estimate;
    let owner = device.clone();
    // The model is made where it is loaded: should nobody take the answer, its drop gives the memory back.
    let (model, weights) = device
        .call("a load", move |bench| {
            let mut step = |fraction: f32| {
                context.cancel.check()?;
                context.progress.report(fraction);
                Ok(())
            };
            step(0.0)?;
            let loaded = bench.load(&spec, &mut step)?;
            let (weights, token) = (loaded.weight_bytes, context.token);
            let model = Arc::new(Model { spec, text, slot: loaded.slot, weights, token, owner: residency, device: owner });
            // A cancel that came with the last report still counts (hazard D9).
            context.cancel.check()?;
            *own.lock() = Some(Arc::clone(&model));
            table.lock().insert(context.token, Arc::clone(&model));
            Ok((model, loaded.weight_bytes))
        })
        .await?;
    drop(model);
    // What was measured, and what a use of it may add.
    Ok(Loaded::measured(weights + estimate.kv_cache + estimate.working))
}
