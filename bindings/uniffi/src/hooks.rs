//! A host's part in a pool of its own: what it hears and tells.

use std::cell::Cell;
use std::sync::Arc;

use hob::pool::{MemoryProbe, MemoryReading};
use hob::{CancelToken, Error, ErrorKind, PoolOptions, Result};

use crate::resident::{RawTask, ask};

/// What a process holds, in bytes.
#[derive(Debug, Clone, Copy, uniffi::Record)]
pub struct RawMemory {
    /// In use by live data.
    pub active: u64,
    /// Freed, not yet given back to the system.
    pub cache: u64,
    /// The highest `active` so far.
    pub peak: u64,
    /// What the system could still give.
    pub available: Option<u64>,
}

/// A host's functions. All but `drain` run with a lock of the pool held: they must not block, and calls of the pool are refused there.
#[uniffi::export(callback_interface)]
pub trait RawHooks: Send + Sync {
    /// Begins to give freed memory back, and answers through the task.
    fn drain(&self, task: Arc<RawTask>);
    /// Hears of a new budget.
    fn budget_changed(&self, bytes: u64);
    /// Tells what is held now.
    fn memory(&self) -> RawMemory;
}

/// Which of them a host has.
#[derive(Debug, Clone, Copy, Default, uniffi::Record)]
pub struct RawHooked {
    /// `drain`.
    pub drain: bool,
    /// `budget_changed`.
    pub budget: bool,
    /// `memory`.
    pub memory: bool,
}

struct Host(Arc<dyn RawHooks>);

impl MemoryProbe for Host {
    fn read(&self) -> MemoryReading {
        let RawMemory { active, cache, peak, available } = inside(|| self.0.memory());
        MemoryReading { active, cache, peak, available }
    }
}

/// Puts what the host gave into the core's options.
pub(crate) fn install(hooks: Box<dyn RawHooks>, has: RawHooked, options: &mut PoolOptions) {
    let hooks: Arc<dyn RawHooks> = hooks.into();
    if has.drain {
        let hooks = Arc::clone(&hooks);
        options.drain = Some(Arc::new(move || {
            let hooks = Arc::clone(&hooks);
            Box::pin(async move {
                // A drain that fails has given nothing back: the account goes by what is measured.
                drop(ask("the drain", 0, CancelToken::new(), None, |task| hooks.drain(task)).await);
            })
        }));
    }
    if has.budget {
        let hooks = Arc::clone(&hooks);
        options.on_budget = Some(Arc::new(move |bytes| inside(|| hooks.budget_changed(bytes))));
    }
    if has.memory {
        options.probe = Some(Arc::new(Host(hooks)));
    }
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs a host's function that a lock of the pool is held around.
fn inside<T>(function: impl FnOnce() -> T) -> T {
    struct Leave(bool);
    impl Drop for Leave {
        fn drop(&mut self) {
            INSIDE.set(self.0);
        }
    }
    let _leave = Leave(INSIDE.replace(true));
    function()
}

/// Refuses what would wait for the lock that this very thread holds.
pub(crate) fn check_outside() -> Result<()> {
    if INSIDE.get() {
        return Err(Error::new(
            ErrorKind::Busy,
            "the closures that measure memory and hear of budgets run inside the pool and must not call it; start a task",
        ));
    }
    Ok(())
}
