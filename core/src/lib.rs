//! Hob: an inference stack that lives inside a host's process.

pub mod cancel;
pub mod clock;
pub mod error;
pub mod options;
pub mod pool;
mod sync;

pub use cancel::{CancelReason, CancelToken, Cancelled};
pub use clock::{BoxFuture, Clock, FakeClock, SystemClock};
pub use error::{Error, ErrorKind, Result};
pub use pool::{IdlePolicy, Key, Kind, Lease, NoRoom, Pool, PoolOptions};
