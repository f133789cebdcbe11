//! The one place that chooses locks and atomics: the real ones, or shuttle's under the private feature `shuttle`, so that
//! the interleavings of the pool can be model-checked. Concurrency code in this crate imports from here only.

#[cfg(not(feature = "shuttle"))]
pub(crate) use parking_lot::Mutex;
#[cfg(not(feature = "shuttle"))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle_mutex::Mutex;

#[cfg(feature = "shuttle")]
mod shuttle_mutex {
    use std::sync::PoisonError;

    use shuttle::sync::MutexGuard;

    /// Shuttle's mutex with parking_lot's interface: no poisoning.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}
