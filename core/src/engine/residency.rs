//! The owner side of the pool: the engine's table of loaded models by token, and the way a request gets hold of one.
//!
//! The pool decides who is resident and keeps tokens; the models live here (spec P20 to P30). A request holds a lease for the
//! pool's account and its own reference for the memory, so nothing it uses can go under it; whoever drops the last reference
//! has the device free it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::backend::Slot;
use super::thread::DeviceThread;
use super::{RequestOptions, closed};
use crate::cancel::CancelToken;
use crate::clock::{BoxFuture, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::fake::FakeDevice;
use crate::model::{LoadOptions, ModelKind, ModelSpec, Text};
use crate::pool::{Admission, Key, Lease, LoadContext, Loaded, Origin, Pool, PoolOptions, Runtime, Token, unblock};

/// A loaded model. The last holder's drop posts the unload and the drain to the device (P36).
pub(crate) struct Model {
    pub(crate) spec: Arc<ModelSpec>,
    pub(crate) text: Text,
    pub(crate) slot: Slot,
    device: DeviceThread,
}

impl Drop for Model {
    fn drop(&mut self) {
        let slot = self.slot;
        self.device.post_job(move |backend| {
            backend.unload(slot);
            if let Err(error) = backend.drain() {
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
}

/// References remembered; hosts use a handful, and a forgotten one only costs reading headers again.
const MAX_NAMES: usize = 1024;

impl Residency {
    pub(crate) fn new(
        device: DeviceThread,
        fake: Option<FakeDevice>,
        runtime: Arc<Runtime>,
        mut options: PoolOptions,
    ) -> Result<Arc<Self>> {
        let draining = device.clone();
        options.drain = Some(Arc::new(move || {
            let device = draining.clone();
            Box::pin(async move {
                if let Err(error) = device.call("a drain", |backend| backend.drain()).await {
                    tracing::warn!(kind = %error.kind(), "drain failed");
                }
            })
        }));
        options.probe = Some(device.gauge());
        options.clock = Some(Arc::new(SystemClock::on(Arc::clone(&runtime))));
        options.spawner = Some(runtime.clone());
        let pool = Pool::new(options)?;
        let (table, names) = (Table::default(), Mutex::default());
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        let blocking = Arc::new(Semaphore::new(cores.max(2)));
        Ok(Arc::new(Self { device, fake, runtime, pool, table, names, blocking, closed: AtomicBool::new(false) }))
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn device(&self) -> &DeviceThread {
        &self.device
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
            let (device, table, spec, own) = (self.device.clone(), Arc::clone(&self.table), Arc::clone(spec), Arc::clone(&own));
            move |context: LoadContext| -> BoxFuture<'static, Result<Loaded>> { Box::pin(load(device, table, spec, own, context)) }
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
        .call("a load", move |backend| {
            let mut step = |fraction: f32| {
                context.cancel.check()?;
                context.progress.report(fraction);
                Ok(())
            };
            step(0.0)?;
            let loaded = backend.load(&spec, &mut step)?;
            let model = Arc::new(Model { spec, text, slot: loaded.slot, device: owner });
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
