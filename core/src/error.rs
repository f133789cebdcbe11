//! The one error type of Hob.
//!
//! An [`Error`] has a kind a host can act on, a one-line message that names the value, the limit and the knob that would
//! change the outcome, and the chain of causes. Messages never contain a user's text.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Shorthand for a result with Hob's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, as far as a host would act differently. The integer values are frozen: they are the status codes of the C ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument or option has a value that is never valid. Change the call.
    InvalidArgument = -1,
    /// The model, entry or file named does not exist.
    NotFound = -2,
    /// Reading or writing failed in the operating system.
    Io = -3,
    /// A model's files are damaged, inconsistent or hostile.
    BadModel = -4,
    /// The request is valid but this model, device or build cannot do it.
    Unsupported = -5,
    /// The device could not provide memory that the budget allowed.
    OutOfMemory = -6,
    /// The pool's budget has no room. Raise the budget, evict, or wait.
    BudgetExceeded = -7,
    /// A bounded queue is full, or the device is not accepting work now. Try again later.
    Busy = -8,
    /// A deadline passed.
    Timeout = -9,
    /// The caller cancelled.
    Cancelled = -10,
    /// A host's callback failed, panicked or asked to stop.
    Callback = -11,
    /// A caller's buffer is too small; the message says how much is needed.
    BufferTooSmall = -12,
    /// The engine, pool or stream was closed.
    Closed = -13,
    /// MLX reported a failure.
    Backend = -14,
    /// A fault in Hob itself (a caught panic, a broken invariant).
    Internal = -15,
    /// The entry is in use and the call did not force.
    InUse = -16,
}

impl ErrorKind {
    /// The frozen integer code (negative; 0 is success in the C ABI).
    #[must_use]
    pub fn code(self) -> i32 {
        self as i32
    }

    /// The kind's stable name, as used in JSON and in other languages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "InvalidArgument",
            Self::NotFound => "NotFound",
            Self::Io => "Io",
            Self::BadModel => "BadModel",
            Self::Unsupported => "Unsupported",
            Self::OutOfMemory => "OutOfMemory",
            Self::BudgetExceeded => "BudgetExceeded",
            Self::Busy => "Busy",
            Self::Timeout => "Timeout",
            Self::Cancelled => "Cancelled",
            Self::Callback => "Callback",
            Self::BufferTooSmall => "BufferTooSmall",
            Self::Closed => "Closed",
            Self::Backend => "Backend",
            Self::Internal => "Internal",
            Self::InUse => "InUse",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Hob's error: cheap to clone, so that every caller who waited for one failed load gets the same one.
#[derive(Debug, Clone)]
pub struct Error {
    kind: ErrorKind,
    message: Arc<str>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` with a one-line `message` (line breaks become spaces).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.contains(['\n', '\r']) {
            message = message.split(['\n', '\r']).map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        }
        Self { kind, message: message.into(), source: None }
    }

    /// The same error with its cause attached.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// One line, without the causes.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The message and every cause, joined by `: ` on one line.
    #[must_use]
    pub fn full_message(&self) -> String {
        let mut text = self.message.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(next) = cause {
            text.push_str(": ");
            text.push_str(&next.to_string().replace(['\n', '\r'], " "));
            cause = next.source();
        }
        text
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// A model file that cannot be trusted: which file, which field, what is wrong with it.
    pub(crate) fn bad_model(file: impl AsRef<Path>, field: &str, what: impl fmt::Display) -> Self {
        Self::new(ErrorKind::BadModel, format!("{}: {field}: {what}", file.as_ref().display()))
    }

    pub(crate) fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        let kind = if source.kind() == std::io::ErrorKind::NotFound { ErrorKind::NotFound } else { ErrorKind::Io };
        Self::new(kind, format!("cannot read {}", path.as_ref().display())).with_source(source)
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_one_line_and_join_their_causes() {
        let error = Error::new(ErrorKind::Io, "first\nsecond").with_source(std::io::Error::other("the disk\nis gone"));
        assert_eq!(error.message(), "first second");
        assert_eq!(error.full_message(), "first second: the disk is gone");
        assert_eq!(error.kind().code(), -3);
    }

    #[test]
    fn an_error_can_cross_threads_and_be_cloned() {
        fn check<T: Send + Sync + Clone + 'static>() {}
        check::<Error>();
    }
}
