//! The engine.
pub(crate) mod backend;
pub(crate) mod batch;
pub(crate) mod mlx;
pub(crate) mod thread;
pub use backend::{DeviceInfo, DeviceMemory};
#[cfg(test)]
mod golden_tests;
