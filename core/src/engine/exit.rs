//! Keeps the owner thread out of MLX while the process exits.
//!
//! `exit` runs MLX's destructors on the exiting thread. A device thread that is inside MLX then, or has left work in flight on
//! MLX's own threads, would touch what is destroyed and crash a process that had done its work. So a handler that runs before
//! those destructors has the thread end its step, wait for what is in flight, and sleep until the process is gone (hazard B6).

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The longest that an exit waits for a step: one prefill chunk of a large model on a CPU.
const PATIENCE: Duration = Duration::from_secs(10);

static EXITING: AtomicBool = AtomicBool::new(false);
/// The MLX threads that have not come to rest: one, or none.
static THREADS: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());
static RESTED: Condvar = Condvar::new();

/// Held by the MLX thread for as long as it may touch MLX.
pub(super) struct Running;

impl Running {
    pub(super) fn enter() -> Self {
        THREADS.lock().push(std::thread::current().id());
        Self
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let current = std::thread::current().id();
        THREADS.lock().retain(|thread| *thread != current);
        RESTED.notify_all();
    }
}

/// Whether the process is exiting: the thread then finishes what is in flight, drops its [`Running`] and calls [`rest`].
pub(super) fn requested() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Sleeps until the process is gone.
pub(super) fn rest() -> ! {
    loop {
        std::thread::park();
    }
}

/// Has the handler run before the destructors of everything MLX has made so far: handlers run in reverse order, and MLX makes
/// some of its statics at first use. Cheap to call again after such a first use.
pub(super) fn register() {
    // SAFETY: the handler is a plain function that stays loaded as long as this library; a failure only loses the protection.
    unsafe {
        libc::atexit(wait_for_device);
    }
}

extern "C" fn wait_for_device() {
    let deadline = Instant::now() + PATIENCE;
    EXITING.store(true, Ordering::Release);
    super::thread::wake_mlx();
    let current = std::thread::current().id();
    let mut threads = THREADS.lock();
    // The thread may itself be the one that called `exit`.
    while threads.iter().any(|thread| *thread != current) {
        if RESTED.wait_until(&mut threads, deadline).timed_out() {
            return;
        }
    }
}
