//! The limits of MLX's allocator, set from the budgets of the engines that share it (spec I18, M7).
//!
//! Both limits belong to the process. Neither makes an allocation fail: over the memory limit MLX gives cached buffers back
//! first and lets work in flight end before it starts more; over the cache limit it gives freed buffers back instead of
//! keeping them. Hob only ever lowers what MLX (or the host) had set, and sets that again when the last engine closes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::backend::{Backend, Slot};
use super::thread::DeviceThread;
use crate::error::Result;
use crate::model::Estimate;

/// The limits of a device's allocator, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocatorLimits {
    /// Live and cached bytes beyond which the allocator makes room before it takes more.
    pub memory: u64,
    /// Freed bytes it keeps for its next allocations.
    pub cache: u64,
}

const GIB: u64 = 1 << 30;

/// The limits for engines whose budgets sum to `budget`, while models of `weights` bytes, charged with `charged`, are resident
/// on a machine of `physical` bytes. `own` is what was set before Hob came.
fn wanted(budget: u64, weights: u64, charged: u64, physical: u64, own: AllocatorLimits) -> AllocatorLimits {
    let cache = if weights == 0 { 0 } else { (weights / 4).max(GIB).min((physical / 8).min(8 * GIB)) };
    // A model served alone over the budget is not to be throttled all its life: what the pool let in is within the limit.
    AllocatorLimits { memory: budget.max(charged).min(own.memory), cache: cache.min(own.cache) }
}

/// What decides the limits of one device. Lives beside the device's thread and is used on it only.
#[derive(Debug)]
pub(crate) struct Limits {
    physical: u64,
    /// Budgets of the open engines.
    budgets: HashMap<u64, u64>,
    /// What each resident model holds: weights, and all it is charged for.
    models: HashMap<Slot, (u64, u64)>,
    /// The same of the model being loaded: its load needs the cache already.
    loading: Option<(u64, u64)>,
    /// What was set before the first engine came, and what is set now.
    set: Option<(AllocatorLimits, AllocatorLimits)>,
}

impl Limits {
    /// Nothing is set until the first budget comes. `physical` is the machine's memory.
    pub(crate) fn new(physical: u64) -> Self {
        Self { physical, budgets: HashMap::new(), models: HashMap::new(), loading: None, set: None }
    }

    /// A load begins.
    pub(crate) fn loading(&mut self, estimate: &Estimate, backend: &mut dyn Backend) {
        self.loading = Some((estimate.weights, estimate.total()));
        self.apply(backend);
    }

    /// The load ended; with a model, of so many bytes, or without.
    pub(crate) fn loaded(&mut self, model: Option<(Slot, u64)>, backend: &mut dyn Backend) {
        let estimated = self.loading.take();
        if let (Some((slot, weights)), Some((estimate, charged))) = (model, estimated) {
            self.models.insert(slot, (weights, weights + (charged - estimate)));
        }
        self.apply(backend);
    }

    /// The model is gone.
    pub(crate) fn unloaded(&mut self, slot: Slot, backend: &mut dyn Backend) {
        self.models.remove(&slot);
        self.apply(backend);
    }

    fn apply(&mut self, backend: &mut dyn Backend) {
        if let Err(error) = self.try_apply(backend) {
            tracing::warn!(kind = %error.kind(), "the allocator's limits could not be set");
        }
    }

    fn try_apply(&mut self, backend: &mut dyn Backend) -> Result<()> {
        if self.budgets.is_empty() {
            if let Some((own, _)) = self.set {
                backend.set_limits(own)?;
                self.set = None;
            }
            return Ok(());
        }
        let (own, now) = match self.set {
            Some(set) => set,
            None => {
                let own = backend.limits()?;
                (own, own)
            }
        };
        // Kept before anything is changed, so that a failure half-way is undone at the end too.
        self.set = Some((own, now));
        let budget = self.budgets.values().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let held = self.models.values().chain(&self.loading);
        let (weights, charged) = held.fold((0u64, 0u64), |sum, one| (sum.0.saturating_add(one.0), sum.1.saturating_add(one.1)));
        let wanted = wanted(budget, weights, charged, self.physical, own);
        if wanted != now {
            backend.set_limits(wanted)?;
            self.set = Some((own, wanted));
        }
        Ok(())
    }
}

/// One engine's budget among the limits of its device. It goes with the value, or earlier with [`end`](Self::end).
pub(crate) struct Share {
    device: DeviceThread,
    limits: Arc<Mutex<Limits>>,
    id: u64,
}

impl Share {
    /// Sets the limits for one more engine.
    pub(crate) fn new(device: &DeviceThread, budget: u64) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let id = LAST.fetch_add(1, Ordering::Relaxed);
        let share = Self { device: device.clone(), limits: device.limits(), id };
        let limits = device.limits();
        device.post_job(move |bench| {
            let mut limits = limits.lock();
            limits.budgets.insert(id, budget);
            limits.apply(&mut **bench);
        });
        share
    }

    /// The engine's number among those of the process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// What tells the device of a changed budget: posts and returns.
    pub(crate) fn on_budget(&self) -> impl Fn(u64) + Send + Sync + use<> {
        let (device, id) = (self.device.clone(), self.id);
        move |budget| {
            let limits = device.limits();
            device.post_job(move |bench| {
                let mut limits = limits.lock();
                // An engine that has closed does not come back.
                if let Some(known) = limits.budgets.get_mut(&id) {
                    *known = budget;
                    limits.apply(&mut **bench);
                }
            });
        }
    }

    /// Takes the engine out, and sets the limits for those that are left. Idempotent.
    pub(crate) async fn end(&self) {
        let (limits, id) = (Arc::clone(&self.limits), self.id);
        let ended = self.device.call("restoring the allocator's limits", move |backend| {
            leave(&mut limits.lock(), id, &mut **backend);
            Ok(())
        });
        // The thread lives as long as this handle of it does.
        let _ = ended.await;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let (limits, id) = (Arc::clone(&self.limits), self.id);
        self.device.post_job(move |backend| leave(&mut limits.lock(), id, &mut **backend));
    }
}

fn leave(limits: &mut Limits, id: u64, backend: &mut dyn Backend) {
    if limits.budgets.remove(&id).is_some() {
        limits.apply(backend);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: AllocatorLimits = AllocatorLimits { memory: 100 * GIB, cache: 100 * GIB };

    fn cache(weights: u64, physical: u64) -> u64 {
        wanted(GIB, weights, weights, physical, OWN).cache
    }

    #[test]
    fn i18_the_cache_limit_is_a_quarter_of_the_weights_between_1_gib_and_an_eighth_of_the_memory() {
        assert_eq!(cache(0, 64 * GIB), 0, "nothing resident, nothing kept");
        assert_eq!(cache(1, 64 * GIB), GIB);
        assert_eq!(cache(4 * GIB, 64 * GIB), GIB);
        assert_eq!(cache(10 * GIB, 64 * GIB), 10 * GIB / 4);
        assert_eq!(cache(40 * GIB, 64 * GIB), 8 * GIB);
        assert_eq!(cache(80 * GIB, 512 * GIB), 8 * GIB);
        assert_eq!(cache(GIB, 4 * GIB), GIB / 2, "an eighth of a small machine rules over the least");
    }

    #[test]
    fn the_memory_limit_is_the_budget_unless_the_pool_let_more_in() {
        let memory = |budget, charged| wanted(budget, charged, charged, 64 * GIB, OWN).memory;
        assert_eq!(memory(8 * GIB, 0), 8 * GIB);
        assert_eq!(memory(8 * GIB, 7 * GIB), 8 * GIB);
        assert_eq!(memory(8 * GIB, 9 * GIB), 9 * GIB, "served alone");
    }

    #[test]
    fn nothing_is_set_higher_than_it_was() {
        let own = AllocatorLimits { memory: 2 * GIB, cache: 32 << 20 };
        assert_eq!(wanted(8 * GIB, GIB, GIB, 64 * GIB, own), own);
    }
}
