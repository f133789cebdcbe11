//! Hob: an inference stack that lives inside a host's process.

pub mod engine;
pub mod error;
pub mod fake;
pub mod gguf;
mod kv_cache;
pub mod model;
mod models;
mod nn;
pub mod options;
mod weights;

pub use error::{Error, ErrorKind, Result};
