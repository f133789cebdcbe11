//! Hob: an inference stack that lives inside a host's process.

pub mod error;
pub mod options;

pub use error::{Error, ErrorKind, Result};
