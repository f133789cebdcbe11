//! The one thread that owns a device: everything of MLX is created, used and dropped here, because MLX's streams and encoders
//! belong to threads. Work reaches it as messages: jobs, which run once, and requests, which move unit by unit as the scheduler decides.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use super::backend::{Backend, DeviceInfo, Loaded, Slot, Tenant};
use super::exit;
use super::limits::Limits;
use super::mlx::Mlx;
use super::scheduler::Id;
use super::work::{Task, Work};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind, Result};
use crate::model::ModelSpec;
use crate::pool::{MemoryProbe, MemoryReading};

/// What a job may do on the thread: the device itself, and loading, which lets the running requests go on in between.
pub(crate) struct Bench<'a> {
    backend: &'a mut dyn Backend,
    work: &'a mut Work,
    progress: &'a Progress,
    inbox: &'a mut Inbox,
    gauge: &'a Gauge,
}

impl Bench<'_> {
    /// A fresh reading of memory, before whoever waits for a job hears that it is done.
    fn read_gauge(&self) {
        self.gauge.set(self.backend.memory());
    }

    /// Loads a model of an engine. Between its tensors the running requests get as much of the time as the load itself.
    pub(crate) fn load(&mut self, spec: &ModelSpec, tenant: &Tenant, step: &mut dyn FnMut(f32) -> Result<()>) -> Result<Loaded> {
        let (work, progress, inbox) = (&mut *self.work, self.progress, &mut *self.inbox);
        let (mut since, mut owed) = (Instant::now(), Duration::ZERO);
        let loaded = self.backend.load(spec, &mut |backend, fraction| {
            progress.moved();
            step(fraction)?;
            owed += since.elapsed();
            // Who comes meanwhile is served as well, and a cancel of it is seen.
            inbox.take_requests(work);
            let mut now = Instant::now();
            while owed > Duration::ZERO && work.turn(backend) {
                progress.moved();
                owed = owed.saturating_sub(now.elapsed());
                now = Instant::now();
            }
            // Time nobody wanted is not saved up.
            owed = owed.min(Duration::from_millis(100));
            since = Instant::now();
            Ok(())
        })?;
        self.work.set_capacity(loaded.slot, tenant.capacity);
        self.backend.keep_prompts(loaded.slot, tenant);
        Ok(loaded)
    }

    /// Drops a model and returns its memory to the operating system.
    pub(crate) fn unload(&mut self, slot: Slot) {
        self.backend.unload(slot);
        self.work.forget(slot);
    }
}

impl<'a> Deref for Bench<'a> {
    type Target = dyn Backend + 'a;

    fn deref(&self) -> &Self::Target {
        self.backend
    }
}

impl DerefMut for Bench<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.backend
    }
}

type Job = Box<dyn FnOnce(&mut Bench<'_>) + Send>;

enum Message {
    Job(Job),
    Task(Id, Task),
    /// A reader made room, or a request was cancelled: look at the requests again.
    Wake,
}

/// What reaches the thread, in order; jobs that came while another ran wait here.
struct Inbox {
    receiver: Receiver<Message>,
    waiting: VecDeque<Job>,
}

impl Inbox {
    /// Takes the requests in that have come. Jobs wait until the present one has ended.
    fn take_requests(&mut self, work: &mut Work) {
        while let Ok(message) = self.receiver.try_recv() {
            match message {
                Message::Job(job) => self.waiting.push_back(job),
                Message::Task(id, task) => work.add(id, task),
                Message::Wake => {}
            }
        }
    }

    fn try_next(&mut self) -> std::result::Result<Message, TryRecvError> {
        match self.waiting.pop_front() {
            Some(job) => Ok(Message::Job(job)),
            None => self.receiver.try_recv(),
        }
    }

    /// Sleeps until there is a message; `None` when there will be none.
    fn next(&mut self) -> Option<Message> {
        match self.waiting.pop_front() {
            Some(job) => Some(Message::Job(job)),
            None => self.receiver.recv().ok(),
        }
    }
}

/// How far the thread has come, so that others can see that it is stuck. Even while it rests, odd while it works, and another
/// number for each piece of work.
#[derive(Debug, Default)]
struct Progress {
    now: AtomicU64,
    /// The piece of work that somebody has waited for in vain.
    stuck: AtomicU64,
}

impl Progress {
    /// The piece of work under way.
    fn working(&self) -> Option<u64> {
        Some(self.now.load(Ordering::Acquire)).filter(|now| now % 2 == 1)
    }

    /// The next piece of the same work.
    fn moved(&self) {
        self.now.fetch_add(2, Ordering::AcqRel);
    }

    fn toggle(&self) {
        self.now.fetch_add(1, Ordering::AcqRel);
    }
}

/// Readings that never wait for the thread.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    active: AtomicU64,
    cache: AtomicU64,
    peak: AtomicU64,
}

impl Gauge {
    fn set(&self, reading: MemoryReading) {
        self.active.store(reading.active, Ordering::Relaxed);
        self.cache.store(reading.cache, Ordering::Relaxed);
        self.peak.store(reading.peak, Ordering::Relaxed);
    }
}

impl MemoryProbe for Gauge {
    fn read(&self) -> MemoryReading {
        MemoryReading {
            active: self.active.load(Ordering::Relaxed),
            cache: self.cache.load(Ordering::Relaxed),
            peak: self.peak.load(Ordering::Relaxed),
            available: None,
        }
    }
}

/// A handle to the thread; cheap to clone, usable from any thread. The thread ends when the last handle is gone.
#[derive(Clone)]
pub(crate) struct DeviceThread {
    inner: Arc<Inner>,
}

struct Inner {
    sender: Sender<Message>,
    gauge: Arc<Gauge>,
    progress: Arc<Progress>,
    /// Counts the times the thread was found stuck.
    stuck: watch::Sender<u64>,
    last_id: AtomicU64,
    limits: Arc<Mutex<Limits>>,
    device: DeviceInfo,
}

/// The process's MLX thread, while somebody holds it: MLX must not be used from two threads, so two engines share one.
static MLX: Mutex<(Weak<Inner>, Option<JoinHandle<()>>)> = Mutex::new((Weak::new(), None));

/// The memory of the machine a fake device is in.
const FAKE_MEMORY: u64 = 64 << 30;

impl DeviceThread {
    /// The process's MLX thread, started when nobody holds it yet. Waits for a former one to end first.
    pub(crate) fn mlx() -> Result<Self> {
        let mut current = MLX.lock();
        if let Some(inner) = current.0.upgrade() {
            return Ok(Self { inner });
        }
        if let Some(former) = current.1.take() {
            let _ = former.join();
        }
        let (thread, handle) = Self::start(super::physical_memory(), true, Mlx::new)?;
        *current = (Arc::downgrade(&thread.inner), Some(handle));
        Ok(thread)
    }

    /// Starts a thread for a backend that is not MLX.
    pub(crate) fn fake<B: Backend + Send + 'static>(backend: B) -> Result<Self> {
        Ok(Self::start(FAKE_MEMORY, false, move || Ok(backend))?.0)
    }

    /// Starts a thread and makes its backend there.
    fn start<B: Backend + 'static>(
        physical: u64,
        on_mlx: bool,
        make: impl FnOnce() -> Result<B> + Send + 'static,
    ) -> Result<(Self, JoinHandle<()>)> {
        let (sender, receiver) = channel();
        let (ready, made) = channel();
        let gauge = Arc::new(Gauge::default());
        let progress = Arc::new(Progress::default());
        let (shared, moving) = (Arc::clone(&gauge), Arc::clone(&progress));
        let body = move || {
            if on_mlx {
                exit::enter();
            }
            let backend =
                catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|panic| Err(panic_error("starting the device", &*panic)));
            match backend {
                Ok(backend) => {
                    let _ = ready.send(Ok(backend.device()));
                    let inbox = Inbox { receiver, waiting: VecDeque::new() };
                    Owner { backend, on_mlx, inbox, work: Work::new(), gauge: shared, progress: moving }.run();
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        };
        let handle = std::thread::Builder::new()
            .name("hob-device".into())
            .spawn(body)
            .map_err(|error| Error::new(ErrorKind::OutOfMemory, "cannot start the device thread").with_source(error))?;
        let device = made.recv().map_err(|_| Error::internal("the device thread ended before it was ready"))??;
        let (limits, stuck) = (Arc::new(Mutex::new(Limits::new(physical))), watch::Sender::new(0));
        let inner = Inner { sender, gauge, progress, stuck, last_id: AtomicU64::new(0), limits, device };
        Ok((Self { inner: Arc::new(inner) }, handle))
    }

    pub(crate) fn device(&self) -> &DeviceInfo {
        &self.inner.device
    }

    /// The last reading of the allocator; reading it never waits.
    pub(crate) fn gauge(&self) -> Arc<Gauge> {
        Arc::clone(&self.inner.gauge)
    }

    /// What decides the allocator's limits; for jobs on the thread.
    pub(crate) fn limits(&self) -> Arc<Mutex<Limits>> {
        Arc::clone(&self.inner.limits)
    }

    /// Runs `job` on the thread. A panic in it is that job's `Internal` error. Dropping the future does not stop a running job.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        what: &'static str,
        job: impl FnOnce(&mut Bench<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.post(Message::Job(Box::new(move |bench: &mut Bench<'_>| {
            let result = catch_unwind(AssertUnwindSafe(|| job(bench))).unwrap_or_else(|panic| Err(panic_error(what, &*panic)));
            bench.read_gauge();
            let _ = reply.send(result);
        })))?;
        answer.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Runs `job` on the thread without waiting for it; nothing happens when the thread is gone, since its state is too.
    pub(crate) fn post_job(&self, job: impl FnOnce(&mut Bench<'_>) + Send + 'static) {
        let _ = self.inner.sender.send(Message::Job(Box::new(job)));
    }

    /// The number of a new request; later ones are higher.
    pub(crate) fn next_id(&self) -> Id {
        Id(self.inner.last_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds a request. When the thread is gone it is finished here with `Closed`.
    pub(crate) fn add(&self, id: Id, task: Task) {
        if let Err(unsent) = self.inner.sender.send(Message::Task(id, task))
            && let Message::Task(_, task) = unsent.0
        {
            task.finish(Err(closed()));
        }
    }

    /// Whether the thread is in the middle of something.
    pub(crate) fn is_working(&self) -> bool {
        self.inner.progress.working().is_some()
    }

    /// Whether the thread was found stuck and has not moved since.
    pub(crate) fn is_stuck(&self) -> bool {
        self.inner.progress.working().is_some_and(|now| now == self.inner.progress.stuck.load(Ordering::Acquire))
    }

    /// Completes when the thread is stuck: at once when it is, else when it is found so.
    pub(crate) fn stuck(&self) -> impl Future<Output = ()> + Send + use<> {
        // Subscribed before looking, so that nothing falls between the two.
        let mut changes = self.inner.stuck.subscribe();
        let already = self.is_stuck();
        async move {
            if !already {
                let _ = changes.changed().await;
            }
        }
    }

    /// Waits for `bound` and says whether the thread was at one and the same piece of work all the time; then it counts as stuck
    /// until it comes back.
    pub(crate) async fn observe(&self, clock: &dyn Clock, bound: Duration) -> bool {
        let before = self.inner.progress.working();
        match clock.now().checked_add(bound) {
            Some(until) => clock.sleep_until(until).await,
            None => std::future::pending().await,
        }
        let Some(before) = before.filter(|_| self.inner.progress.working() == before) else { return false };
        if self.inner.progress.stuck.swap(before, Ordering::AcqRel) != before {
            self.inner.stuck.send_modify(|times| *times += 1);
        }
        true
    }

    /// Makes the thread look at its requests again.
    pub(crate) fn wake(&self) {
        let _ = self.inner.sender.send(Message::Wake);
    }

    fn post(&self, message: Message) -> Result<()> {
        self.inner.sender.send(message).map_err(|_| closed())
    }
}

/// Makes the MLX thread, if there is one, look at its messages and at the process's exit.
pub(super) fn wake_mlx() {
    // Nobody holds the lock for long; should it be held by a thread that the exit has stopped, there is nothing to wake.
    if let Some(current) = MLX.try_lock_for(std::time::Duration::from_secs(1))
        && let Some(inner) = current.0.upgrade()
    {
        let _ = inner.sender.send(Message::Wake);
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the engine is closed")
}

/// The typed error of a caught panic. Only a panic's fixed text is kept: a formatted one may quote a user's.
pub(crate) fn panic_error(what: &str, panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<&'static str>().copied();
    Error::internal(format!("{what} panicked: {}", text.unwrap_or("its message is withheld, for it may quote a user's text")))
}

struct Owner<B> {
    backend: B,
    /// Whether an exit waits for this thread.
    on_mlx: bool,
    inbox: Inbox,
    work: Work,
    gauge: Arc<Gauge>,
    progress: Arc<Progress>,
}

impl<B: Backend> Owner<B> {
    fn run(mut self) {
        self.scoped(|_| ());
        // When no request can move the thread sleeps until a message comes.
        let mut idle = true;
        loop {
            if self.on_mlx && exit::requested() {
                let _ = self.scoped(|owner| catch_unwind(AssertUnwindSafe(|| owner.backend.drain())));
                exit::rest();
            }
            if idle {
                match self.inbox.next() {
                    Some(message) => drop(self.take(message)),
                    None => return self.shut_down(),
                }
            }
            // One job at most before the next turn: a queue that never empties must not hold streams up.
            loop {
                match self.inbox.try_next() {
                    Ok(message) => {
                        if self.take(message) {
                            break;
                        }
                    }
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.shut_down(),
                }
            }
            idle = self.work.is_empty() || !self.scoped(|owner| owner.work.turn(&mut owner.backend));
        }
    }

    /// True when the message was a job.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Job(job) => {
                self.run_job(job);
                return true;
            }
            Message::Task(id, task) => self.work.add(id, task),
            Message::Wake => {}
        }
        false
    }

    fn shut_down(mut self) {
        self.scoped(|owner| owner.work.shut_down(&mut owner.backend, &closed()));
        // Jobs posted before the last handle went still run: releases among them are awaited by their senders.
        while let Ok(message) = self.inbox.try_next() {
            match message {
                Message::Job(job) => self.run_job(job),
                Message::Task(_, task) => task.finish(Err(closed())),
                Message::Wake => {}
            }
        }
        drop(self.backend);
    }

    fn run_job(&mut self, job: Job) {
        // The job catches its own panics to report them; this guard is for the ones without a reply.
        self.scoped(|owner| {
            let mut bench = Bench {
                backend: &mut owner.backend,
                work: &mut owner.work,
                progress: &owner.progress,
                inbox: &mut owner.inbox,
                gauge: &owner.gauge,
            };
            let _ = catch_unwind(AssertUnwindSafe(|| job(&mut bench)));
        });
    }

    fn read_gauge(&self) {
        self.gauge.set(self.backend.memory());
    }

    /// Device work, followed by a fresh reading of memory. On Apple's systems it gets its own autorelease pool: this thread has
    /// none, and Metal's objects would pile up.
    fn scoped<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        #[cfg(target_vendor = "apple")]
        let _pool = autorelease::Pool::new();
        self.progress.toggle();
        let result = work(self);
        self.read_gauge();
        self.progress.toggle();
        result
    }
}

#[cfg(target_vendor = "apple")]
mod autorelease {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn objc_autoreleasePoolPush() -> *mut c_void;
        fn objc_autoreleasePoolPop(pool: *mut c_void);
    }

    pub(super) struct Pool(*mut c_void);

    impl Pool {
        pub(super) fn new() -> Self {
            // SAFETY: pools nest per thread and are popped in reverse order, because this is a stack value.
            Self(unsafe { objc_autoreleasePoolPush() })
        }
    }

    impl Drop for Pool {
        fn drop(&mut self) {
            // SAFETY: the pool came from push on this thread.
            unsafe { objc_autoreleasePoolPop(self.0) }
        }
    }
}
