//! Hob: an inference stack that lives inside a host's process.

pub mod cancel;
pub mod chat_output;
pub mod chat_template;
pub mod clock;
pub mod engine;
pub mod error;
pub mod fake;
pub mod gguf;
mod kv_cache;
pub mod model;
mod models;
mod nn;
pub mod options;
pub mod pool;
mod prompt_cache;
pub mod sampler;
mod sync;
pub mod text_stream;
pub mod tokenizer;
mod weights;

pub use cancel::{CancelReason, CancelToken, Cancelled};
pub use clock::{BoxFuture, Clock, FakeClock, SystemClock};
pub use error::{Error, ErrorKind, Result};
pub use pool::{IdlePolicy, Key, Kind, Lease, NoRoom, Pool, PoolOptions};

/// Runs a future to its end on this thread. For hosts without an executor; any other executor does as well.
pub use pollster::block_on;

/// The README's examples are compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
