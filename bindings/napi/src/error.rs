//! Errors on their way to JavaScript, and the guard that every export goes through.

use std::panic::{AssertUnwindSafe, catch_unwind};

use hob::{Error, ErrorKind};
use napi_derive::napi;

/// An error as the TypeScript half makes a `HobError` of it.
#[napi(object, object_from_js = false)]
#[derive(Clone)]
pub struct NativeFailure {
    /// The kind's stable name, such as `NotFound`.
    pub code: &'static str,
    /// One line, with the causes.
    pub message: String,
}

impl From<&Error> for NativeFailure {
    fn from(error: &Error) -> Self {
        Self { code: error.kind().name(), message: error.full_message() }
    }
}

/// The `code` of an error that a call throws: the kind's name.
pub struct Code(&'static str);

impl AsRef<str> for Code {
    fn as_ref(&self) -> &str {
        self.0
    }
}

/// An error that a call throws. Exports spell `Result<T, Refusal>` out: napi-derive goes by the word.
pub type Refusal = napi::Error<Code>;

/// Runs an export's body: the core's errors become JavaScript's, with their kind as `code`, and so does a panic.
pub(crate) fn enter<T>(body: impl FnOnce() -> hob::Result<T>) -> Result<T, Refusal> {
    let result = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a call into Hob panicked; this is a fault in Hob")));
    result.map_err(|error| napi::Error::new(Code(error.kind().name()), error.full_message()))
}

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

/// A number of JavaScript that must be whole, not negative, and exact.
pub(crate) fn whole(name: &str, value: f64) -> hob::Result<u64> {
    const LIMIT: f64 = 9_007_199_254_740_991.0;
    if value.fract() == 0.0 && (0.0..=LIMIT).contains(&value) {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // just checked
        return Ok(value as u64);
    }
    Err(invalid(format!("{name} is {value}; it must be a whole number from 0 to {LIMIT}")))
}

pub(crate) fn size(name: &str, value: f64) -> hob::Result<usize> {
    whole(name, value)
        .and_then(|value| usize::try_from(value).map_err(|_| invalid(format!("{name} is {value}; that is too much here"))))
}

pub(crate) fn small(name: &str, value: f64) -> hob::Result<u32> {
    whole(name, value)
        .and_then(|value| u32::try_from(value).map_err(|_| invalid(format!("{name} is {value}; it must be at most {}", u32::MAX))))
}

/// A number of the core, for JavaScript: exact up to 2^53.
#[allow(clippy::cast_precision_loss)] // bytes and counts beyond that do not occur
pub(crate) fn number(value: u64) -> f64 {
    value as f64
}

pub(crate) fn count(value: usize) -> f64 {
    number(value as u64)
}

/// Milliseconds of JavaScript; fractions count.
pub(crate) fn duration(name: &str, ms: f64) -> hob::Result<std::time::Duration> {
    std::time::Duration::try_from_secs_f64(ms / 1000.0)
        .map_err(|_| invalid(format!("{name} is {ms}; it must be milliseconds, 0 or more")))
}
