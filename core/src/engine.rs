//! The engine: loads models into the pool and generates, embeds and reranks with them.
//!
//! ```no_run
//! use hob::engine::{Engine, EngineOptions, GenerateRequest};
//! use hob::chat_template::Message;
//!
//! # fn main() -> hob::Result<()> {
//! let engine = Engine::open(EngineOptions::default())?;
//! let request = GenerateRequest::chat("models/smollm2.gguf", vec![Message::user("What is the capital of France?")]);
//! let answer = hob::block_on(engine.generate(request)?.collect())?;
//! println!("{}", answer.text);
//! # Ok(()) }
//! ```
//!
//! - **Threads.** Everything may be called from any thread. Futures work on any executor; the work behind them runs on the
//!   engine's own threads: one that owns the device (shared by all engines of the process, because MLX must be used from one
//!   thread only), and one for admissions and timers.
//! - **Models** are named by a directory, a `.gguf` file, or a hub id in the local Hugging Face cache. A model is loaded at its
//!   first use and stays in the pool until it is evicted, idle for too long, or the engine closes.

pub(crate) mod backend;
pub(crate) mod decide;
pub(crate) mod embed;
mod exit;
pub(crate) mod generate;
pub(crate) mod limits;
pub(crate) mod mlx;
mod request;
pub(crate) mod rerank;
pub(crate) mod residency;
mod scheduler;
pub(crate) mod score;
mod scoring;
mod texts;
pub(crate) mod thread;
mod work;

#[cfg(test)]
mod golden_tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

pub use self::backend::DeviceInfo;
pub use self::decide::{Answer, DecideRequest, Decided, Decision};
pub use self::embed::{EmbedRequest, Embeddings, Normalize};
pub use self::generate::{
    Chunk, Coalesce, Event, Finish, GenerateRequest, Generation, Prompt, RejectedCall, Stream, StreamControl, Summary,
};
pub use self::limits::AllocatorLimits;
use self::request::Link;
pub use self::rerank::{Ranked, Ranking, RerankRequest, ScoreKind};
use self::residency::Residency;
pub(crate) use self::scheduler::Sizes;
pub use self::score::{Score, ScoreRequest};
use self::thread::DeviceThread;
use crate::cancel::CancelToken;
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::fake::FakeDevice;
use crate::model::{Estimate, LoadOptions, ModelKind, ModelSpec};
use crate::options::Limits;
use crate::pool::{IdlePolicy, NoRoom, Pool, PoolOptions, Runtime, default_budget, default_physical_limit};
use crate::weights::FloatType;

/// How an engine is made.
#[derive(Clone)]
#[non_exhaustive]
pub struct EngineOptions {
    /// The pool's budget in bytes; `None` is 70 % of what the device recommends, else of three quarters of the memory.
    pub budget_bytes: Option<u64>,
    /// How long models stay after their last use; the default is 900 s.
    pub idle: IdlePolicy,
    /// What a request does while there is no room for its model; the default waits.
    pub no_room: NoRoom,
    /// Generations of one model that run at once, in one batch; at least 1, the default is 8.
    pub capacity: usize,
    /// Requests of all kinds that may wait beyond `capacity`; one more is refused with `Busy`. The default is 64.
    pub queue: usize,
    /// Bytes of computed prompts kept for later ones, over all models and within the budget; 0 keeps none. The default is 512 MiB.
    pub prompt_cache_bytes: u64,
    /// How long the device may stay at one piece of work after a request that waits for it was given up, before it counts as stuck
    /// and new requests are refused until it comes back. The default is 30 s: a GPU may compile kernels at their first use.
    pub stuck_after: Duration,
    /// How long [`Engine::close`] waits for running work; the default is 120 s.
    pub close_timeout: Duration,
    /// How much one request may bring.
    pub limits: Limits,
    /// The clock of timers and deadlines; `None` is the system's. A fake one makes a test need no real time.
    pub clock: Option<Arc<dyn Clock>>,
    /// Give freed memory back to the system each time a model goes (the default). Without it the allocator keeps it for the next
    /// model, up to its cache limit, and the account counts live bytes only; when no model is left everything goes back still.
    pub drain_after_release: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            budget_bytes: None,
            idle: IdlePolicy::default(),
            no_room: NoRoom::default(),
            capacity: 8,
            queue: 64,
            prompt_cache_bytes: 512 << 20,
            stuck_after: Duration::from_secs(30),
            close_timeout: Duration::from_secs(120),
            limits: Limits::default(),
            clock: None,
            drain_after_release: true,
        }
    }
}

impl std::fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineOptions")
            .field("budget_bytes", &self.budget_bytes)
            .field("idle", &self.idle)
            .field("no_room", &self.no_room)
            .field("capacity", &self.capacity)
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

impl EngineOptions {
    /// The defaults with this budget.
    #[must_use]
    pub fn with_budget(bytes: u64) -> Self {
        Self { budget_bytes: Some(bytes), ..Self::default() }
    }
}

/// What a cancel or a timeout means to a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnCancel {
    /// The request fails with `Cancelled` or `Timeout` (the default).
    #[default]
    Abort,
    /// The answer so far is the result, and its finish says why it ended. Embedding, ranking and deciding have no partial results:
    /// they fail all the same.
    Stop,
}

/// What every request has: when to give up, and how its model is loaded and kept.
#[derive(Debug, Clone, Default)]
pub struct RequestOptions {
    /// Gives up when cancelled, in any phase: waiting for room, loading, computing.
    pub cancel: Option<CancelToken>,
    /// Gives up after this long, with `Timeout`.
    pub timeout: Option<Duration>,
    /// What a cancel or a timeout means.
    pub on_cancel: OnCancel,
    /// How the model is loaded if it is not resident.
    pub load: LoadOptions,
    /// How long the model stays after this use, instead of its own policy or the pool's.
    pub idle: Option<IdlePolicy>,
    /// The model's own policy from now on, instead of the pool's; the last one given wins. It goes with the model.
    pub model_idle: Option<IdlePolicy>,
    /// Keep the model whatever happens, until [`Pool::unpin`], an explicit evict or the close.
    pub pinned: bool,
}

impl RequestOptions {
    /// The token that ends the request: the caller's, the timeout's and the engine's, in one.
    fn token(&self, shared: &Shared) -> CancelToken {
        let clock = shared.residency.clock();
        // A deadline beyond what the clock can say is none.
        let deadline = self.timeout.and_then(|timeout| clock.now().checked_add(timeout));
        CancelToken::child_of(self.cancel.as_ref(), &shared.alive, deadline.map(|at| (Arc::clone(clock), at)))
    }
}

/// Seconds spent in each phase; `None` is "did not happen", never 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Timings {
    /// From the call until work on the device began, without the load.
    pub queue_s: f64,
    /// The model's load, when this request caused or joined one.
    pub load_s: Option<f64>,
    /// From the first prompt token to the first new token; for what is answered once, the whole computation.
    pub prefill_s: Option<f64>,
    /// From the first new token to the last.
    pub decode_s: Option<f64>,
    /// From the call to the end.
    pub total_s: f64,
}

impl Timings {
    /// Those of a request answered once, whose computation is all prefill; taken at its end. The call came at `began`.
    fn of_answer(began: Instant, load: Option<Duration>, link: &Link) -> Self {
        let begun = link.begun();
        let before = begun.unwrap_or_else(Instant::now).saturating_duration_since(began);
        Self {
            queue_s: before.saturating_sub(load.unwrap_or_default()).as_secs_f64(),
            load_s: load.map(|load| load.as_secs_f64()),
            prefill_s: begun.map(|begun| begun.elapsed().as_secs_f64()),
            decode_s: None,
            total_s: began.elapsed().as_secs_f64(),
        }
    }
}

/// What `inspect` tells of a model without loading it.
#[derive(Debug, Clone, Serialize)]
pub struct ModelInfo {
    /// The canonical path.
    pub id: String,
    /// What it is for.
    pub kind: ModelKind,
    /// `model_type`.
    pub family: String,
    /// The stored quantisation, if any.
    pub quantization: Option<String>,
    /// Whether quantised weights will be expanded when loaded here.
    pub dequantized: bool,
    /// The number type it will compute in here; `None` for a fake.
    pub float: Option<FloatType>,
    /// Tokens it can attend to.
    pub context: usize,
    /// Tokens one input of an embedder or reranker may have.
    pub max_input: usize,
    /// The verbs it serves.
    pub capabilities: Vec<&'static str>,
    /// How an embedder pools.
    pub pooling: Option<String>,
    /// Names of an embedder's prompts.
    pub prompts: Vec<String>,
    /// Bytes by part.
    pub estimate: Estimate,
    /// The parts' sum: what the pool charges.
    pub estimate_total: u64,
}

impl ModelInfo {
    fn new(spec: &ModelSpec) -> Self {
        let capabilities = match spec.kind {
            ModelKind::Chat => vec!["generate", "score", "decide"],
            ModelKind::Embedder => vec!["embed", "rerank"],
            ModelKind::Reranker => vec!["rerank"],
        };
        Self {
            id: spec.id.clone(),
            kind: spec.kind,
            family: spec.family.clone(),
            quantization: spec.quantization.clone(),
            dequantized: spec.layout().is_some_and(|layout| layout.dequantize),
            float: spec.layout().map(|layout| layout.float),
            context: spec.context,
            max_input: spec.max_input,
            capabilities,
            pooling: (spec.kind == ModelKind::Embedder).then(|| spec.pooling_name()),
            prompts: spec.prompts.keys().cloned().collect(),
            estimate: spec.estimate,
            estimate_total: spec.estimate.total(),
        }
    }
}

/// A device, a pool of models on it, and the verbs. Cheap to clone; the last clone closes it in the background.
///
/// The futures of its verbs run on any executor. A request begins when its future is first polled and goes on by itself from then on;
/// dropping the future before its answer cancels the request.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) residency: Arc<Residency>,
    /// Parent of every request's token; cancelled when the engine closes.
    pub(crate) alive: CancelToken,
    close_timeout: Duration,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.residency.mark_closed();
        self.alive.cancel();
    }
}

impl Engine {
    /// Opens an engine on MLX's default device.
    ///
    /// # Errors
    /// `InvalidArgument` for a budget of 0, `Backend` when MLX cannot start.
    pub fn open(options: EngineOptions) -> Result<Self> {
        Self::on(DeviceThread::mlx()?, None, &options)
    }

    /// Opens an engine on a scripted device; see [`crate::fake`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_fake(device: FakeDevice, options: EngineOptions) -> Result<Self> {
        let backend = crate::fake::FakeBackend::new(device.clone());
        Self::on(DeviceThread::fake(backend)?, Some(device), &options)
    }

    fn on(device: DeviceThread, fake: Option<FakeDevice>, options: &EngineOptions) -> Result<Self> {
        let memory = physical_memory();
        let mut pool = PoolOptions::new(match options.budget_bytes {
            Some(bytes) => bytes,
            None => default_budget(device.device().recommended_bytes, memory),
        });
        pool.idle = options.idle;
        pool.no_room = options.no_room;
        pool.drain_after_release = options.drain_after_release;
        if fake.is_none() {
            pool.physical_limit_bytes = Some(default_physical_limit(memory));
        }
        let runtime = Arc::new(Runtime::start("hob-engine")?);
        if options.capacity == 0 {
            return Err(Error::invalid("capacity is 0; at least one generation must be able to run"));
        }
        let residency = Residency::new(device, fake, runtime, pool, options)?;
        let close_timeout = options.close_timeout;
        Ok(Self { shared: Arc::new(Shared { residency, alive: CancelToken::new(), close_timeout }) })
    }

    /// The pool: its status, its events, and room for a host's own residents.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        self.shared.residency.pool()
    }

    /// The device that computes.
    #[must_use]
    pub fn device(&self) -> &DeviceInfo {
        self.shared.residency.device().device()
    }

    /// Reads a model's configuration and headers; loads nothing.
    ///
    /// # Errors
    /// `NotFound`, `BadModel`, `Unsupported` or `Io`, naming file and field.
    pub fn inspect(&self, model: &str, options: &LoadOptions) -> Result<ModelInfo> {
        self.shared.residency.read_spec(model, options).map(|spec| ModelInfo::new(&spec))
    }

    /// What a model will take, by part, before it is loaded.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub fn estimate(&self, model: &str, options: &LoadOptions) -> Result<Estimate> {
        self.shared.residency.read_spec(model, options).map(|spec| spec.estimate)
    }

    /// Makes a model resident, without using it: with [`IdlePolicy::Immediately`] it stays until its first use ends.
    ///
    /// # Errors
    /// Those of [`inspect`](Self::inspect), of the pool's admission, and of the load itself.
    pub async fn load(&self, model: &str, options: RequestOptions) -> Result<ModelInfo> {
        let (link, place) = Link::open(&self.shared, &options)?;
        let (at, model) = (link.clone(), model.to_owned());
        link.carry(async move {
            let _place = place;
            at.residency.unless_stuck(at.residency.load(&model, &options, &at.token)).await.map(|spec| ModelInfo::new(&spec))
        })
        .await
    }

    /// Starts generating. The stream's events come as the model produces them; errors after this call come from the stream.
    ///
    /// # Errors
    /// `InvalidArgument` for options out of range or an empty conversation, `Closed` after [`close`](Self::close).
    pub fn generate(&self, request: GenerateRequest) -> Result<Stream> {
        generate::start(&self.shared, request)
    }

    /// Turns texts into vectors, in the order given.
    ///
    /// # Errors
    /// `InvalidArgument` for bad options or a text that is too long (naming its index and both numbers), `Unsupported` when
    /// the model does not embed, and those of loading.
    pub async fn embed(&self, request: EmbedRequest) -> Result<Embeddings> {
        embed::run(&self.shared, request).await
    }

    /// Orders documents by how well they answer a query.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    pub async fn rerank(&self, request: RerankRequest) -> Result<Ranking> {
        rerank::run(&self.shared, request).await
    }

    /// Log-probabilities of a given completion.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty completion or one that does not fit the context, and those of loading.
    pub async fn score(&self, request: ScoreRequest) -> Result<Score> {
        score::run(&self.shared, request).await
    }

    /// Which of some given answers the model holds most likely, without sampling.
    ///
    /// # Errors
    /// As [`score`](Self::score); `Unsupported` when the model does not generate.
    pub async fn decide(&self, request: DecideRequest) -> Result<Decided> {
        decide::run(&self.shared, request).await
    }

    /// The verbs a model serves; reads its configuration, loads nothing.
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub fn capabilities(&self, model: &str) -> Result<Vec<&'static str>> {
        self.inspect(model, &LoadOptions::default()).map(|info| info.capabilities)
    }

    /// Whether requests are served now: a snapshot, not a promise. Never waits.
    #[must_use]
    pub fn availability(&self) -> Availability {
        let residency = &self.shared.residency;
        if residency.is_closed() {
            Availability::Closed
        } else if residency.device().is_stuck() {
            Availability::Quarantined
        } else if residency.requests() > 0 || residency.device().is_working() {
            Availability::Working
        } else {
            Availability::Ready
        }
    }

    /// Requests taken on and not over. Never waits.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.shared.residency.requests()
    }

    /// Holds back new loads until the guard goes, once every resident model is at rest; running and resident work goes on.
    ///
    /// # Errors
    /// Those of [`Pool::pause`].
    pub async fn pause(&self) -> Result<crate::pool::Paused> {
        self.pool().pause().await
    }

    /// The tokenizer and the chat template of a model, without loading its weights.
    ///
    /// # Errors
    /// `NotFound`, `BadModel`, `Unsupported` or `Io`, naming file and field.
    pub fn text(&self, model: &str) -> Result<crate::model::Text> {
        let spec = self.shared.residency.read_spec(model, &LoadOptions::default())?;
        crate::model::Text::read(&spec)
    }

    /// Ends every request with `Closed`, unloads every model and gives the memory back. Returns after
    /// [`close_timeout`](EngineOptions::close_timeout) at the latest, and says whether everything had stopped by then; if not, it goes
    /// on in the background. Idempotent; other clones are closed too.
    ///
    /// # Errors
    /// One error that names every release that failed; the models are gone all the same.
    pub async fn close(&self) -> Result<Closed> {
        let clock = Arc::clone(self.shared.residency.clock());
        let mut waiting = std::pin::pin!(self.close_and_wait());
        let until = clock.now().checked_add(self.shared.close_timeout);
        let timeout = async {
            match until {
                Some(until) => clock.sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            closed = &mut waiting => closed.map(|()| Closed { stopped: true }),
            () = timeout => Ok(Closed { stopped: false }),
        }
    }

    /// As [`close`](Self::close), however long it takes. Dropping the future does not stop the closing.
    ///
    /// # Errors
    /// As [`close`](Self::close).
    pub async fn close_and_wait(&self) -> Result<()> {
        self.shared.residency.mark_closed();
        self.shared.alive.cancel();
        self.shared.residency.device().wake();
        let (done, closed) = tokio::sync::oneshot::channel();
        let residency = Arc::clone(&self.shared.residency);
        self.shared.residency.spawn(async move {
            let closed = residency.pool().close().await;
            residency.released().await;
            let _ = done.send(closed);
        });
        closed.await.unwrap_or_else(|_| Err(Error::internal("the engine's thread ended while it closed")))
    }
}

/// Whether an engine serves requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Availability {
    /// Nothing is under way.
    Ready,
    /// Requests are under way; more are taken.
    Working,
    /// The device has not come back from work that was given up: requests are refused with `Busy` until it does.
    Quarantined,
    /// The engine is closed.
    Closed,
}

/// How a close went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closed {
    /// Everything has stopped and its memory is back. If not, the device is still at earlier work.
    pub stopped: bool,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("device", self.device()).finish_non_exhaustive()
    }
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the engine is closed; open a new one")
}

/// Bytes of memory in this machine; 0 when the system does not say.
fn physical_memory() -> u64 {
    // SAFETY: sysconf reads a number.
    let (pages, size) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    u64::try_from(pages).unwrap_or(0) * u64::try_from(size).unwrap_or(0)
}
