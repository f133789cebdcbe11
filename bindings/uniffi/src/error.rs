//! Errors as they cross to Swift.

use std::fmt;

/// What went wrong.
#[derive(Debug, uniffi::Error)]
pub enum RawError {
    /// The core's error.
    Failed {
        /// The kind's frozen integer code.
        code: i32,
        /// One line, with the chain of causes.
        message: String,
    },
}

impl fmt::Display for RawError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Failed { message, .. } = self;
        f.write_str(message)
    }
}

impl std::error::Error for RawError {}

impl From<hob::Error> for RawError {
    fn from(error: hob::Error) -> Self {
        Self::Failed { code: error.kind().code(), message: error.full_message() }
    }
}

/// The result of every export.
pub type Result<T> = std::result::Result<T, RawError>;

pub(crate) fn invalid(message: impl Into<String>) -> hob::Error {
    hob::Error::new(hob::ErrorKind::InvalidArgument, message)
}

/// JSON of the core's own values, which always can be written.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| hob::Error::new(hob::ErrorKind::Internal, format!("cannot write JSON: {error}")).into())
}

/// JSON that Swift wrote. The error names the place, never the text.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(what: &str, text: Option<&str>) -> std::result::Result<Option<T>, hob::Error> {
    let Some(text) = text else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|error| {
        invalid(format!("{what}: not the JSON that is expected, at line {} column {}", error.line(), error.column()))
    })
}
