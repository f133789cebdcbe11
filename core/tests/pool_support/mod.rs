//! What the pool's tests share: an executor that runs only when told to, an owner with an engine table and real byte counts,
//! and gates that hold a load or a release until the test lets it go. Nothing here sleeps.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use hob::pool::{
    Admission, Admitted, IdlePolicy, Key, Lease, LoadContext, Loaded, MemoryProbe, MemoryReading, Paused, Pool, PoolOptions, Spawn,
    Status, Token,
};
use hob::{BoxFuture, Clock, Error, ErrorKind, FakeClock, Result};
use tokio::sync::oneshot;

/// A single-threaded executor driven by the test.
#[derive(Clone, Default)]
pub struct Exec {
    ready: Arc<Mutex<VecDeque<Arc<Task>>>>,
    dead: Arc<std::sync::atomic::AtomicBool>,
    all: Arc<Mutex<Vec<std::sync::Weak<Task>>>>,
}

struct Task {
    future: Mutex<Option<BoxFuture<'static, ()>>>,
    ready: Arc<Mutex<VecDeque<Arc<Task>>>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let queue = self.ready.clone();
        queue.lock().unwrap().push_back(self);
    }
}

impl Spawn for Exec {
    fn spawn(&self, task: BoxFuture<'static, ()>) {
        if self.dead.load(std::sync::atomic::Ordering::SeqCst) {
            return;
        }
        let task = Arc::new(Task { future: Mutex::new(Some(task)), ready: self.ready.clone() });
        self.all.lock().unwrap().push(Arc::downgrade(&task));
        task.wake();
    }
}

impl Exec {
    /// Polls everything that can go on, until nothing can.
    pub fn run(&self) {
        while self.step() {}
    }

    /// Polls one task.
    pub fn step(&self) -> bool {
        let next = self.ready.lock().unwrap().pop_front();
        let Some(task) = next else { return false };
        let taken = task.future.lock().unwrap().take();
        if let Some(mut future) = taken {
            let waker = Waker::from(task.clone());
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
                *task.future.lock().unwrap() = Some(future);
            }
        }
        true
    }

    /// Drops every task unfinished, and every task to come.
    pub fn die(&self) {
        self.dead.store(true, std::sync::atomic::Ordering::SeqCst);
        self.ready.lock().unwrap().clear();
        let tasks: Vec<_> = std::mem::take(&mut *self.all.lock().unwrap());
        for task in tasks.iter().filter_map(std::sync::Weak::upgrade) {
            let future = task.future.lock().unwrap().take();
            drop(future);
        }
    }

    /// Starts a future and returns a handle on its result; dropping the handle drops the future.
    pub fn start<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> Pending<T> {
        let slot = Arc::new(Mutex::new((Some(Box::pin(future) as BoxFuture<'static, T>), None)));
        let inner = slot.clone();
        self.spawn(Box::pin(std::future::poll_fn(move |context| {
            let taken = inner.lock().unwrap().0.take();
            let Some(mut future) = taken else { return Poll::Ready(()) };
            match future.as_mut().poll(context) {
                Poll::Ready(value) => {
                    drop(future);
                    inner.lock().unwrap().1 = Some(value);
                    Poll::Ready(())
                }
                Poll::Pending => {
                    inner.lock().unwrap().0 = Some(future);
                    Poll::Pending
                }
            }
        })));
        Pending { slot, exec: self.clone() }
    }
}

type Slot<T> = Arc<Mutex<(Option<BoxFuture<'static, T>>, Option<T>)>>;

/// A caller's future under the test's control.
pub struct Pending<T> {
    slot: Slot<T>,
    exec: Exec,
}

impl<T> Pending<T> {
    pub fn is_done(&self) -> bool {
        self.exec.run();
        self.slot.lock().unwrap().1.is_some()
    }

    /// The result, after running everything that can run.
    pub fn done(self) -> T {
        self.exec.run();
        let value = self.slot.lock().unwrap().1.take();
        value.expect("the future must have completed by now")
    }

    /// Drops the caller's future.
    pub fn leave(self) {}
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        let future = self.slot.lock().unwrap().0.take();
        drop(future);
    }
}

/// What an owner keeps in its table. Counts the bytes that are really held.
pub struct Engine {
    pub bytes: u64,
    memory: Arc<Mutex<Memory>>,
}

#[derive(Default)]
pub struct Memory {
    pub active: u64,
    pub cache: u64,
    pub peak: u64,
}

impl Engine {
    pub fn new(memory: &Arc<Mutex<Memory>>, bytes: u64) -> Arc<Self> {
        let mut held = memory.lock().unwrap();
        held.active += bytes;
        held.peak = held.peak.max(held.active + held.cache);
        Arc::new(Self { bytes, memory: memory.clone() })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // As MLX: dropping moves bytes to the cache, only a drain returns them.
        let mut held = self.memory.lock().unwrap();
        held.active -= self.bytes;
        held.cache += self.bytes;
    }
}

pub struct Probe(pub Arc<Mutex<Memory>>);

impl MemoryProbe for Probe {
    fn read(&self) -> MemoryReading {
        let held = self.0.lock().unwrap();
        MemoryReading { active: held.active, cache: held.cache, peak: held.peak, ..MemoryReading::default() }
    }
}

/// Holds a load or a release until the test says how it ends.
pub struct Gate(oneshot::Sender<Outcome>);

pub enum Outcome {
    Ok,
    Fail,
    Panic,
}

impl Gate {
    pub fn open(self) {
        let _ = self.0.send(Outcome::Ok);
    }

    pub fn fail(self) {
        let _ = self.0.send(Outcome::Fail);
    }

    pub fn panic(self) {
        let _ = self.0.send(Outcome::Panic);
    }
}

fn judge(outcome: Result<Outcome, oneshot::error::RecvError>) -> Result<()> {
    match outcome {
        Ok(Outcome::Ok) | Err(_) => Ok(()),
        Ok(Outcome::Fail) => Err(Error::new(ErrorKind::Io, "the disk is gone")),
        Ok(Outcome::Panic) => panic!("scripted"),
    }
}

/// A pool, its clock, its executor and an owner.
pub struct Rig {
    pub pool: Pool,
    pub clock: FakeClock,
    pub exec: Exec,
    pub memory: Arc<Mutex<Memory>>,
    pub table: Arc<Mutex<BTreeMap<Token, Arc<Engine>>>>,
    pub log: Arc<Mutex<Vec<String>>>,
    /// Gates that the next releases of a key wait for.
    release_gates: Arc<Mutex<BTreeMap<String, oneshot::Receiver<Outcome>>>>,
}

impl Rig {
    pub fn new(budget: u64) -> Self {
        Self::with(budget, |_| {})
    }

    pub fn with(budget: u64, change: impl FnOnce(&mut PoolOptions)) -> Self {
        Self::with_memory(budget, |options, _| change(options))
    }

    pub fn with_memory(budget: u64, change: impl FnOnce(&mut PoolOptions, &Arc<Mutex<Memory>>)) -> Self {
        let (clock, exec) = (FakeClock::new(), Exec::default());
        let (memory, log) = (Arc::new(Mutex::new(Memory::default())), Arc::new(Mutex::new(Vec::new())));
        let mut options = PoolOptions::new(budget);
        options.clock = Some(Arc::new(clock.clone()));
        options.spawner = Some(Arc::new(exec.clone()));
        options.drain = Some({
            let (memory, log) = (memory.clone(), log.clone());
            Arc::new(move || {
                memory.lock().unwrap().cache = 0;
                log.lock().unwrap().push("drain".to_owned());
                Box::pin(std::future::ready(()))
            })
        });
        change(&mut options, &memory);
        let pool = Pool::new(options).unwrap();
        Self { pool, clock, exec, memory, table: Arc::default(), log, release_gates: Arc::default() }
    }

    /// A load that takes no time.
    pub fn load(&self) -> impl FnOnce(LoadContext) -> BoxFuture<'static, Result<Loaded>> + Send + 'static + use<> {
        self.load_when(None, None)
    }

    /// A load that waits for its gate; it ends by itself when it is cancelled, if `obedient`.
    pub fn gated(
        &self,
        obedient: bool,
    ) -> (Gate, impl FnOnce(LoadContext) -> BoxFuture<'static, Result<Loaded>> + Send + 'static + use<>) {
        let (gate, wait) = oneshot::channel();
        (Gate(gate), self.load_when(Some(wait), Some(obedient)))
    }

    fn load_when(
        &self,
        gate: Option<oneshot::Receiver<Outcome>>,
        obedient: Option<bool>,
    ) -> impl FnOnce(LoadContext) -> BoxFuture<'static, Result<Loaded>> + Send + 'static + use<> {
        let (memory, table, log, pool) = (self.memory.clone(), self.table.clone(), self.log.clone(), self.pool.clone());
        move |context| {
            // Not kept: a load that held the pool would keep it open.
            let bytes = pool.status().entry(&context.key).and_then(|entry| entry.estimated_bytes).unwrap_or(0);
            drop(pool);
            log.lock().unwrap().push(format!("load {}", context.key));
            Box::pin(async move {
                // Bytes are taken from the start, as a real load does.
                let engine = Engine::new(&memory, bytes);
                if let Some(mut gate) = gate {
                    let mut cancelled = context.cancel.cancelled();
                    let outcome = std::future::poll_fn(|cx| {
                        if obedient == Some(true) && std::pin::Pin::new(&mut cancelled).poll(cx).is_ready() {
                            return Poll::Ready(None);
                        }
                        std::pin::Pin::new(&mut gate).poll(cx).map(Some)
                    })
                    .await;
                    match outcome {
                        None => return Err(Error::new(ErrorKind::Cancelled, "stopped as asked")),
                        Some(outcome) => judge(outcome)?,
                    }
                }
                table.lock().unwrap().insert(context.token, engine);
                log.lock().unwrap().push(format!("loaded {}", context.key));
                Ok(Loaded::unmeasured())
            })
        }
    }

    /// The owner's release: token only.
    pub fn release(&self, key: &Key) -> impl FnOnce(Token) -> BoxFuture<'static, Result<()>> + Send + 'static + use<> {
        let (table, log, gates, name) = (self.table.clone(), self.log.clone(), self.release_gates.clone(), key.to_string());
        move |token| {
            log.lock().unwrap().push(format!("release {name}"));
            Box::pin(async move {
                let gate = gates.lock().unwrap().remove(&name);
                let verdict = match gate {
                    Some(gate) => gate.await,
                    None => Ok(Outcome::Ok),
                };
                let engine = table.lock().unwrap().remove(&token);
                drop(engine);
                judge(verdict)?;
                log.lock().unwrap().push(format!("released {name}"));
                Ok(())
            })
        }
    }

    /// The next release of `key` waits for the gate.
    pub fn gate_release(&self, key: &Key) -> Gate {
        let (gate, wait) = oneshot::channel();
        self.release_gates.lock().unwrap().insert(key.to_string(), wait);
        Gate(gate)
    }

    pub fn admit(&self, admission: Admission) -> Pending<Result<Admitted>> {
        let release = self.release(admission.key());
        self.exec.start(self.pool.admit(admission, self.load(), release))
    }

    /// As `admit`, taking its first step now, before any task that is ready to run.
    pub fn admit_first(&self, admission: Admission) -> Pending<Result<Admitted>> {
        let release = self.release(admission.key());
        let mut future = Box::pin(self.pool.admit(admission, self.load(), release));
        let _ = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        self.exec.start(future)
    }

    pub fn admit_gated(&self, admission: Admission, obedient: bool) -> (Gate, Pending<Result<Admitted>>) {
        let release = self.release(admission.key());
        let (gate, load) = self.gated(obedient);
        (gate, self.exec.start(self.pool.admit(admission, load, release)))
    }

    /// Makes a model resident and idle.
    pub fn resident(&self, key: &Key, bytes: u64) -> Token {
        let admitted = self.admit(Admission::new(key.clone(), bytes)).done().unwrap();
        self.check();
        admitted.token
    }

    /// Makes a model resident and in use.
    pub fn leased(&self, key: &Key, bytes: u64) -> Lease {
        let admitted = self.admit(Admission::new(key.clone(), bytes).in_use()).done().unwrap();
        self.check();
        admitted.lease.unwrap()
    }

    /// Pauses the pool, with nothing under way.
    pub fn paused(&self) -> Paused {
        let pool = self.pool.clone();
        self.exec.start(async move { pool.pause().await }).done().unwrap()
    }

    pub fn run(&self) {
        self.exec.run();
        self.check();
    }

    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.run();
    }

    pub fn status(&self) -> Status {
        self.pool.status()
    }

    pub fn log(&self) -> Vec<String> {
        std::mem::take(&mut self.log.lock().unwrap())
    }

    pub fn keys(&self) -> Vec<String> {
        self.status().entries.iter().map(|entry| entry.key.to_string()).collect()
    }

    /// Bytes really held, cache included.
    pub fn held(&self) -> u64 {
        let memory = self.memory.lock().unwrap();
        memory.active + memory.cache
    }

    /// The account is exact, and says no less than what is really held.
    pub fn check(&self) {
        self.pool.check_account().unwrap();
    }

    pub fn now(&self) -> std::time::Instant {
        self.clock.now()
    }
}

pub fn chat(id: &str) -> Key {
    Key::chat(id)
}

pub fn embedder(id: &str) -> Key {
    Key::embedder(id)
}

pub fn reranker(id: &str) -> Key {
    Key::reranker(id)
}

pub fn never(options: &mut PoolOptions) {
    options.idle = IdlePolicy::Never;
}

pub fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Runs `test` with the noise of scripted panics off.
pub fn quietly(test: impl FnOnce()) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
    std::panic::set_hook(before);
    if let Err(payload) = result {
        std::panic::resume_unwind(payload);
    }
}
