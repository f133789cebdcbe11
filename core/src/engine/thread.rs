//! The one thread that owns a device: everything of MLX is created, used and dropped here, because MLX's streams and encoders
//! belong to threads. Work reaches it as messages; generation rows take turns between messages, one step at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::backend::{Advance, Backend, Chooser, DeviceInfo, Row, Slot};
use super::exit::{self, Running};
use super::limits::Limits;
use super::mlx::Mlx;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{MemoryProbe, MemoryReading};

/// A generation as the thread sees it. Called on the owner thread only, and must not block.
pub(crate) trait RowTask: Chooser + Send {
    fn slot(&self) -> Slot;
    /// The prompt's token ids, given once.
    fn take_prompt(&mut self) -> Vec<u32>;
    /// Why the row must end now (cancelled, timed out, nobody listens), looked at before every step.
    fn interrupted(&self) -> Option<Ending>;
    /// Whether the reader has room; a row without it is passed over and keeps its place.
    fn has_room(&self) -> bool;
    fn on_prefill(&mut self, done: usize);
    /// Takes a token; `Some` ends the row.
    fn on_token(&mut self, token: u32) -> Result<Option<Ending>>;
    /// The terminal event. The row's device memory is already back.
    fn finish(self: Box<Self>, ending: Result<Ending>);
}

/// Why a row ended without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// An end-of-turn token or a stop string.
    Stop,
    /// `max_tokens` reached.
    Length,
    /// The model's context is full.
    Context,
    /// Cancelled, out of time, or abandoned.
    Interrupted,
}

type Job = Box<dyn FnOnce(&mut dyn Backend) + Send>;

enum Message {
    Job(Job),
    Row(Box<dyn RowTask>),
    /// A reader made room, or a request was cancelled: look at the rows again.
    Wake,
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
        let (thread, handle) = Self::start(super::physical_memory(), || Mlx::new().map(|mlx| (mlx, Some(Running::enter()))))?;
        *current = (Arc::downgrade(&thread.inner), Some(handle));
        Ok(thread)
    }

    /// Starts a thread for a backend that is not MLX.
    pub(crate) fn fake<B: Backend + Send + 'static>(backend: B) -> Result<Self> {
        Ok(Self::start(FAKE_MEMORY, move || Ok((backend, None)))?.0)
    }

    /// Starts a thread and makes its backend there.
    fn start<B: Backend + 'static>(
        physical: u64,
        make: impl FnOnce() -> Result<(B, Option<Running>)> + Send + 'static,
    ) -> Result<(Self, JoinHandle<()>)> {
        let (sender, receiver) = channel();
        let (ready, made) = channel();
        let gauge = Arc::new(Gauge::default());
        let shared = Arc::clone(&gauge);
        let body = move || {
            let backend =
                catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|panic| Err(panic_error("starting the device", &*panic)));
            match backend {
                Ok((backend, running)) => {
                    let _ = ready.send(Ok(backend.device()));
                    Owner { backend, running, receiver, rows: VecDeque::new(), gauge: shared }.run();
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
        let limits = Arc::new(Mutex::new(Limits::new(physical)));
        Ok((Self { inner: Arc::new(Inner { sender, gauge, limits, device }) }, handle))
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
        job: impl FnOnce(&mut dyn Backend) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.post(Message::Job(Box::new(move |backend| {
            let result = catch_unwind(AssertUnwindSafe(|| job(backend))).unwrap_or_else(|panic| Err(panic_error(what, &*panic)));
            let _ = reply.send(result);
        })))?;
        answer.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Runs `job` on the thread without waiting for it; nothing happens when the thread is gone, since its state is too.
    pub(crate) fn post_job(&self, job: impl FnOnce(&mut dyn Backend) + Send + 'static) {
        let _ = self.inner.sender.send(Message::Job(Box::new(job)));
    }

    /// Adds a generation row. When the thread is gone the task is finished here with `Closed`.
    pub(crate) fn add_row(&self, task: Box<dyn RowTask>) {
        if let Err(unsent) = self.inner.sender.send(Message::Row(task))
            && let Message::Row(task) = unsent.0
        {
            task.finish(Err(closed()));
        }
    }

    /// Makes the thread look at its rows again.
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

struct ActiveRow {
    /// `None` until the backend has begun the row.
    row: Option<Row>,
    task: Box<dyn RowTask>,
}

struct Owner<B> {
    backend: B,
    /// Kept while this thread may touch MLX; a fake has none.
    running: Option<Running>,
    receiver: Receiver<Message>,
    rows: VecDeque<ActiveRow>,
    gauge: Arc<Gauge>,
}

impl<B: Backend> Owner<B> {
    fn run(mut self) {
        self.scoped(|_| ());
        // `idle` rounds found no row that could move: then the thread sleeps until a message comes.
        let mut idle = true;
        loop {
            if self.running.is_some() && exit::requested() {
                let _ = self.scoped(|owner| catch_unwind(AssertUnwindSafe(|| owner.backend.drain())));
                self.running = None;
                exit::rest();
            }
            let message = if idle {
                match self.receiver.recv() {
                    Ok(message) => Some(message),
                    Err(_) => return self.shut_down(),
                }
            } else {
                match self.receiver.try_recv() {
                    Ok(message) => Some(message),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => return self.shut_down(),
                }
            };
            match message {
                Some(Message::Job(job)) => {
                    self.run_job(job);
                    // One step of a row follows each job: a queue that never empties must not hold streams up.
                    idle = !self.round();
                }
                Some(Message::Row(task)) => {
                    self.rows.push_back(ActiveRow { row: None, task });
                    idle = false;
                }
                Some(Message::Wake) => idle = self.rows.is_empty(),
                None => idle = !self.round(),
            }
        }
    }

    /// Gives the next row that can move one step; false when none can.
    fn round(&mut self) -> bool {
        for _ in 0..self.rows.len() {
            let Some(mut active) = self.rows.pop_front() else { return false };
            if let Some(ending) = active.task.interrupted() {
                self.finish(active, Ok(ending));
                return true;
            }
            if !active.task.has_room() {
                self.rows.push_back(active);
                continue;
            }
            let step = self.scoped(|owner| catch_unwind(AssertUnwindSafe(|| owner.step(&mut active))));
            let step = step.unwrap_or_else(|panic| Err(panic_error("a generation step", &*panic)));
            match step {
                Ok(None) => self.rows.push_back(active),
                Ok(Some(ending)) => self.finish(active, Ok(ending)),
                Err(error) => self.finish(active, Err(error)),
            }
            return true;
        }
        false
    }

    fn step(&mut self, active: &mut ActiveRow) -> Result<Option<Ending>> {
        let row = match active.row {
            Some(row) => row,
            None => {
                let row = self.backend.begin(active.task.slot(), active.task.take_prompt())?;
                active.row = Some(row);
                row
            }
        };
        match self.backend.advance(row, &mut *active.task)? {
            Advance::Prefilled(done) => {
                active.task.on_prefill(done);
                Ok(None)
            }
            Advance::Token(token) => active.task.on_token(token),
        }
    }

    /// Frees the row's memory, then delivers the terminal event.
    fn finish(&mut self, active: ActiveRow, ending: Result<Ending>) {
        if let Some(row) = active.row {
            let _ = self.scoped(|owner| catch_unwind(AssertUnwindSafe(|| owner.backend.end(row))));
        }
        let _ = catch_unwind(AssertUnwindSafe(|| active.task.finish(ending)));
    }

    fn shut_down(mut self) {
        while let Some(active) = self.rows.pop_front() {
            self.finish(active, Err(closed()));
        }
        // Jobs posted before the last handle went still run: releases among them are awaited by their senders.
        while let Ok(message) = self.receiver.try_recv() {
            match message {
                Message::Job(job) => self.run_job(job),
                Message::Row(task) => task.finish(Err(closed())),
                Message::Wake => {}
            }
        }
        drop(self.backend);
    }

    fn run_job(&mut self, job: Job) {
        // The job catches its own panics to report them; this guard is for the ones without a reply.
        let _ = self.scoped(|owner| catch_unwind(AssertUnwindSafe(|| job(&mut owner.backend))));
    }

    fn read_gauge(&self) {
        self.gauge.set(self.backend.memory());
    }

    /// Device work, followed by a fresh reading of memory. On Apple's systems it gets its own autorelease pool: this thread has
    /// none, and Metal's objects would pile up.
    fn scoped<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        #[cfg(target_vendor = "apple")]
        let _pool = autorelease::Pool::new();
        let result = work(self);
        self.read_gauge();
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
