//! Keeps the owner thread out of MLX while the process exits.
//!
//! `exit` runs MLX's destructors on the exiting thread. A device thread that is inside MLX then, or has left work in flight on
//! MLX's own threads, would touch what is destroyed and crash a process that had done its work. So a handler that runs before
//! those destructors has the thread end its step, wait for what is in flight, and sleep until the process is gone (hazard B6). A thread
//! that is ending by itself is waited for to its very end: what MLX keeps for a thread goes with it, and needs MLX.

use std::cell::Cell;
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

thread_local! {
    /// The place of an MLX thread in [`THREADS`]. Destructors of thread locals run last in, first out, those of C++ among them: made
    /// before the thread touches MLX, it goes after all that MLX keeps for the thread.
    static RUNNING: Cell<Option<Running>> = const { Cell::new(None) };
}

struct Running(ThreadId);

impl Drop for Running {
    fn drop(&mut self) {
        THREADS.lock().retain(|thread| *thread != self.0);
        RESTED.notify_all();
    }
}

/// Has an exit wait for this thread, until it comes to rest or has ended. Call it before the thread touches MLX.
pub(super) fn enter() {
    let current = std::thread::current().id();
    THREADS.lock().push(current);
    RUNNING.set(Some(Running(current)));
}

/// Whether the process is exiting: the thread then finishes what is in flight and calls [`rest`].
pub(super) fn requested() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Sleeps until the process is gone.
pub(super) fn rest() -> ! {
    drop(RUNNING.take());
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    unsafe extern "C" {
        /// How C++ registers the destructor of a thread local.
        fn __cxa_thread_atexit_impl(run: extern "C" fn(*mut u8), object: *mut u8, library: *mut u8) -> i32;
    }

    static SEEN: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn look(_: *mut u8) {
        let current = std::thread::current().id();
        SEEN.store(1 + usize::from(THREADS.lock().contains(&current)), Ordering::SeqCst);
    }

    #[test]
    fn an_exit_waits_until_what_mlx_keeps_for_the_thread_is_gone() {
        let thread = std::thread::spawn(|| {
            enter();
            // SAFETY: the function takes any object, also none.
            unsafe { __cxa_thread_atexit_impl(look, std::ptr::null_mut(), std::ptr::null_mut()) };
            std::thread::current().id()
        });
        let id = thread.join().unwrap();
        assert_eq!(SEEN.load(Ordering::SeqCst), 2, "the thread had left before its C++ thread locals were destroyed");
        assert!(!THREADS.lock().contains(&id));
    }
}
