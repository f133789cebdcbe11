//! Keeps the owner thread out of MLX while the process exits.
//!
//! `exit` runs MLX's destructors on the exiting thread; a device thread that is inside MLX then (dropping a model whose engine
//! has just gone, say) would touch what is destroyed and crash a process that had done its work. So a handler that runs before
//! those destructors lets the current step end and keeps the thread from starting another (hazard B6).

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The longest that an exit waits for a step: one prefill chunk of a large model on a CPU.
const PATIENCE: Duration = Duration::from_secs(10);

struct Gate {
    exiting: bool,
    working: usize,
}

static GATE: Mutex<Gate> = Mutex::new(Gate { exiting: false, working: 0 });
static IDLE: Condvar = Condvar::new();

/// Work on the device. Once the process exits none begins: the thread sleeps until its end instead.
pub(super) struct Work;

impl Work {
    pub(super) fn begin() -> Self {
        let mut gate = GATE.lock();
        if gate.exiting {
            drop(gate);
            loop {
                std::thread::park();
            }
        }
        gate.working += 1;
        Self
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut gate = GATE.lock();
        gate.working -= 1;
        if gate.exiting {
            IDLE.notify_all();
        }
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
    let mut gate = GATE.lock();
    gate.exiting = true;
    while gate.working > 0 {
        if IDLE.wait_until(&mut gate, deadline).timed_out() {
            return;
        }
    }
}
