//! The owner side of the pool: the engine's table of loaded models by token, and the way a request gets hold of one.
//!
//! The pool decides who is resident and keeps tokens; the models live here (spec P20 to P30). A request holds a lease for the
//! pool's account and its own reference for the memory, so nothing it uses can go under it; whoever drops the last reference
//! has the device free it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::backend::{CacheBytes, DeviceInfo, Slot, Tenant};
use super::limits::Share;
use super::request::{Place, Places, unavailable};
use super::thread::DeviceThread;
use super::work::Tell;
use super::{EngineOptions, RequestOptions, closed};
use crate::cancel::CancelToken;
use crate::clock::{BoxFuture, Clock, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::fake::FakeDevice;
use crate::model::{LoadOptions, ModelKind, ModelSpec, Provenance, Text};
use crate::options::Limits;
use crate::pool::{Admission, Key, Lease, Load, LoadContext, Loaded, Origin, Pool, PoolOptions, Release, Runtime, Token, unblock};

/// A loaded model. The last holder's drop posts the unload and the drain to the device (P36).
pub(crate) struct Model {
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) text: Text,
    pub(crate) provenance: Arc<Provenance>,
    pub(crate) slot: Slot,
    /// Bytes of the weights, measured.
    weights: u64,
    token: Token,
    owner: Weak<Residency>,
    device: DeviceThread,
    /// Whether freed memory goes back to the system.
    drain: bool,
}

impl Model {
    /// Whether there is memory for `tokens` tokens of keys and values, all rows of the model together, beside the prompts it keeps.
    pub(crate) fn has_room(&self, tokens: usize, held: CacheBytes) -> bool {
        let charged = held.total().max(self.spec.estimate.kv_cache);
        let beyond = self.spec.kv_bytes(tokens).saturating_add(held.kept).saturating_sub(charged);
        if beyond == 0 {
            return true;
        }
        let Some(owner) = self.owner.upgrade() else { return false };
        owner.pool.could_grow(beyond)
    }

    /// What the pool is to be told when the bytes of the model's keys and values change. What the entry was charged for them at
    /// its admission stays charged; more comes on top.
    pub(crate) fn account(&self) -> Tell {
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
        let (slot, drain, limits) = (self.slot, self.drain, self.device.limits());
        self.device.post_job(move |bench| {
            bench.unload(slot);
            limits.lock().unloaded(slot, &mut **bench);
            if drain && let Err(error) = bench.drain() {
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
    Generate,
    Score,
    Embed,
    Rerank,
}

impl Purpose {
    fn check(self, spec: &ModelSpec) -> Result<()> {
        let (verb, kinds): (&str, &[ModelKind]) = match self {
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

/// A model that somebody loaded unchecked, or checked against another list, is not the one this request asked for.
fn check_manifest(resident: &ModelSpec, options: &RequestOptions) -> Result<()> {
    match &options.load.manifest {
        Some(wanted) if resident.manifest.as_ref() != Some(wanted) => Err(Error::invalid(format!(
            "{} is resident and was not checked against this manifest; evict it first, or load it with the manifest from the start",
            resident.id
        ))),
        _ => Ok(()),
    }
}

type Table = Arc<Mutex<HashMap<Token, Arc<Model>>>>;
/// What one load made.
type Own = Arc<Mutex<Option<Arc<Model>>>>;

pub(crate) struct Residency {
    device: DeviceThread,
    fake: Option<FakeDevice>,
    runtime: Arc<Runtime>,
    pool: Pool,
    /// This engine's part of the allocator's limits.
    share: Share,
    tenant: Tenant,
    table: Table,
    places: Places,
    clock: Arc<dyn Clock>,
    stuck_after: Duration,
    limits: Limits,
    /// Suspicions that the device is stuck since somebody began to look; 0 while nobody looks.
    suspected: AtomicUsize,
    /// Which key a reference meant when it was last read, so that a hit reads no files.
    names: Mutex<HashMap<(String, Option<ModelKind>), Key>>,
    /// How much of [`blocking`](Self::blocking) may run at once.
    blocking: Arc<Semaphore>,
    closed: AtomicBool,
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
        let share = Share::new(&device, options.budget_bytes);
        let tenant = Tenant {
            id: share.id(),
            capacity: requests.capacity,
            prompt_cache: requests.prompt_cache_bytes.min(options.budget_bytes / 4),
            drain: options.drain_after_release,
        };
        options.on_budget = Some(Arc::new(share.on_budget()));
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
            share,
            tenant,
            table,
            places: Places::new(requests.capacity.saturating_add(requests.queue)),
            clock,
            stuck_after: requests.stuck_after,
            limits: requests.limits.clone(),
            suspected: AtomicUsize::new(0),
            names,
            blocking,
            closed: AtomicBool::new(false),
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

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
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
        if self.suspected.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let this = Arc::clone(self);
        self.spawn(async move {
            loop {
                let heard = this.suspected.load(Ordering::Acquire);
                this.device.observe(&*this.clock, this.stuck_after).await;
                // Who came in between may have meant a later piece of work than the one looked at: once more.
                if this.suspected.compare_exchange(heard, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    return;
                }
            }
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

    /// After the pool's close, which does not wait for uses: every request is over, every model gone and its memory back, and the
    /// allocator's limits are those of the engines that are left.
    pub(crate) async fn released(&self) {
        self.places.all_free().await;
        self.pool.quiet().await;
        // Behind the unloads that the last uses have posted.
        self.share.end().await;
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
            Some(fake) => fake.find(model).map(|spec| ModelSpec { manifest: options.manifest.clone(), ..spec }),
            None => ModelSpec::read(model, options, self.device.device().kind == "cpu"),
        }
    }

    /// Refuses a request whose keys and values alone exceed the whole budget, before anything is allocated (hazard A19); `knob` is
    /// what its caller can change.
    pub(crate) fn check_cache(&self, spec: &ModelSpec, tokens: usize, knob: &str) -> Result<()> {
        let (cache, budget) = (spec.kv_bytes(tokens), self.pool.budget());
        if cache <= budget {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::BudgetExceeded,
            format!(
                "{tokens} tokens need {cache} bytes of keys and values and the pool's budget is {budget}; {knob} or raise the budget"
            ),
        ))
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
        if let Some(key) = known {
            if let Some(resident) = self.resident(&key) {
                purpose.check(&resident)?;
                check_manifest(&resident, options)?;
            }
            if let Some(used) = self.hit(&key, options) {
                return Ok(used);
            }
        }
        let spec = self.spec_of(name, options, token).await?;
        purpose.check(&spec)?;
        let key = spec.key();
        // A lease whose entry was let go before we could take the model from the table is no hit (P21): ask again. Each round
        // needs a forced evict between two steps of ours, so a few rounds are plenty.
        for _ in 0..8 {
            let used = match self.hit(&key, options) {
                Some(used) => Some(used),
                None => self.admit(&spec, options, token).await?,
            };
            if let Some(used) = used {
                check_manifest(&used.model.spec, options)?;
                return Ok(used);
            }
        }
        Err(Error::new(ErrorKind::Busy, format!("{key} was evicted by force each time it had loaded; try again later")))
    }

    /// Makes the model resident without a use; what is resident in the end.
    pub(crate) async fn load(
        self: &Arc<Self>,
        model: &str,
        options: &RequestOptions,
        token: &CancelToken,
    ) -> Result<Arc<ModelSpec>> {
        token.check().map_err(|_| self.interrupted(token))?;
        let name = (model.to_owned(), options.load.kind);
        let known = self.names.lock().get(&name).cloned();
        if let Some(key) = known
            && let Some(resident) = self.resident(&key)
            && self.pool.touch(&key)
        {
            check_manifest(&resident, options)?;
            self.mark(&key, options);
            return Ok(resident);
        }
        let spec = self.spec_of(name, options, token).await?;
        let (load, release, _) = self.actions(&spec);
        let admission = self.admission(&spec, options, token);
        let admitted = self.pool.admit(admission, load, release).await.map_err(|error| self.refused(error, token))?;
        let resident = self.table.lock().get(&admitted.token).map_or(spec, |model| Arc::clone(&model.spec));
        check_manifest(&resident, options)?;
        Ok(resident)
    }

    /// Reads the headers. That is file work, which must not hold up the thread that keeps timers.
    async fn spec_of(
        self: &Arc<Self>,
        name: (String, Option<ModelKind>),
        options: &RequestOptions,
        token: &CancelToken,
    ) -> Result<Arc<ModelSpec>> {
        let reader = Arc::clone(self);
        let (reference, load_options) = (name.0.clone(), options.load.clone());
        let spec = self.blocking(token, move || reader.read_spec(&reference, &load_options)).await?;
        let mut names = self.names.lock();
        if names.len() >= MAX_NAMES {
            names.clear();
        }
        names.insert(name, spec.key());
        Ok(Arc::new(spec))
    }

    /// What is resident under a key.
    fn resident(&self, key: &Key) -> Option<Arc<ModelSpec>> {
        let token = self.pool.peek(key)?;
        self.table.lock().get(&token).map(|model| Arc::clone(&model.spec))
    }

    /// Sets what a request wants of a model that is there already.
    fn mark(&self, key: &Key, options: &RequestOptions) {
        if let Some(idle) = options.model_idle {
            self.pool.set_idle(key, Some(idle));
        }
        if options.pinned {
            self.pool.pin(key);
        }
    }

    fn hit(&self, key: &Key, options: &RequestOptions) -> Option<Used> {
        // Before the use begins, whose own idle policy it would undo.
        self.mark(key, options);
        let lease = match options.idle {
            Some(idle) => self.pool.begin_use_with(key, idle),
            None => self.pool.begin_use(key),
        }?;
        let model = self.table.lock().get(&lease.token()).cloned()?;
        Some(Used { model, _lease: lease, load: None })
    }

    fn admission(&self, spec: &ModelSpec, options: &RequestOptions, token: &CancelToken) -> Admission {
        let mut admission = Admission::new(spec.key(), spec.estimate.total()).cancel(token.clone());
        if let Some(idle) = options.model_idle {
            admission = admission.idle(idle);
        }
        if options.pinned {
            admission = admission.pinned();
        }
        admission
    }

    /// An admission's error, as its caller sees it.
    fn refused(self: &Arc<Self>, error: Error, token: &CancelToken) -> Error {
        let ended = matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Timeout | ErrorKind::Closed);
        if !(ended && (token.is_cancelled() || self.is_closed())) {
            return error;
        }
        // What the device is at may be this request's load.
        self.suspect();
        self.interrupted(token)
    }

    /// What the pool runs for a model: its load and its release. The third is where the load leaves what it made, in case
    /// the pool lets it go at once: the request then runs on it (P26).
    fn actions(self: &Arc<Self>, spec: &Arc<ModelSpec>) -> (impl Load + 'static, impl Release + 'static, Own) {
        let own = Own::default();
        let load = {
            let (owner, device, tenant) = (Arc::downgrade(self), self.device.clone(), self.tenant);
            let (table, spec, own) = (Arc::clone(&self.table), Arc::clone(spec), Arc::clone(&own));
            move |context: LoadContext| -> BoxFuture<'static, Result<Loaded>> {
                Box::pin(load(owner, device, tenant, table, spec, own, context))
            }
        };
        let table = Arc::clone(&self.table);
        let release = move |token: Token| -> BoxFuture<'static, Result<()>> {
            // Empties the place under this token and no other (P24, P25). The drop posts to the device and returns.
            let model = table.lock().remove(&token);
            drop(model);
            Box::pin(std::future::ready(Ok(())))
        };
        (load, release, own)
    }

    /// One admission. `None`: the pool let the entry go before this request got hold of the model.
    async fn admit(self: &Arc<Self>, spec: &Arc<ModelSpec>, options: &RequestOptions, token: &CancelToken) -> Result<Option<Used>> {
        let mut admission = self.admission(spec, options, token);
        if let Some(idle) = options.idle {
            admission = admission.use_idle(idle);
        }
        let (load, release, own) = self.actions(spec);
        let asked = Instant::now();
        let lease = self.pool.acquire(admission, load, release).await.map_err(|error| self.refused(error, token))?;
        let load = (lease.origin() != Origin::Hit).then(|| lease.load_time().min(asked.elapsed()));
        let model = self.table.lock().get(&lease.token()).cloned().or_else(|| own.lock().take());
        Ok(model.map(|model| Used { model, _lease: lease, load }))
    }
}

fn provenance(spec: &ModelSpec, device: &DeviceInfo) -> Arc<Provenance> {
    Arc::new(Provenance {
        model: spec.id.clone(),
        family: spec.family.clone(),
        quantization: spec.quantization.clone(),
        manifest: spec.manifest.as_ref().map(|manifest| manifest.digest().to_owned()),
        runtime: format!("hob {}, {} {}", env!("CARGO_PKG_VERSION"), device.kind, device.version),
    })
}

/// The load the pool runs once there is room: text side here, weights on the device, then the table.
async fn load(
    residency: Weak<Residency>,
    device: DeviceThread,
    tenant: Tenant,
    table: Table,
    spec: Arc<ModelSpec>,
    own: Own,
    context: LoadContext,
) -> Result<Loaded> {
    let reader = Arc::clone(&spec);
    let cancel = context.cancel.clone();
    let text = unblock(move || {
        reader.check_files(&mut || cancel.check())?;
        Text::read(&reader)
    })
    .await?;
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
            let limits = owner.limits();
            limits.lock().loading(&spec.estimate, &mut **bench);
            let loaded = catch_unwind(AssertUnwindSafe(|| bench.load(&spec, &tenant, &mut step)));
            let made = loaded.as_ref().ok().and_then(|loaded| loaded.as_ref().ok());
            limits.lock().loaded(made.map(|loaded| (loaded.slot, loaded.weight_bytes)), &mut **bench);
            let loaded = loaded.unwrap_or_else(|panic| resume_unwind(panic))?;
            let (slot, weights, token) = (loaded.slot, loaded.weight_bytes, context.token);
            let model = Arc::new(Model {
                provenance: provenance(&spec, owner.device()),
                spec,
                text,
                slot,
                weights,
                token,
                owner: residency,
                device: owner,
                drain: tenant.drain,
            });
            // A cancel that came with the last report still counts (hazard D9): the pool lets a load go that nobody wants.
            *own.lock() = Some(Arc::clone(&model));
            table.lock().insert(context.token, Arc::clone(&model));
            Ok((model, loaded.weight_bytes))
        })
        .await?;
    drop(model);
    // What was measured, and what a use of it may add.
    Ok(Loaded::measured(weights + estimate.kv_cache + estimate.working))
}
