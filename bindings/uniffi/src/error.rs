//! Errors as they cross to Swift.

use std::fmt;

use serde_json::Value;

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

/// JSON of the core's own values, which always can be written. Whole numbers beyond Swift's `Int` become its largest.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<String> {
    let mut value = serde_json::to_value(value)
        .map_err(|error| hob::Error::new(hob::ErrorKind::Internal, format!("cannot write JSON: {error}")))?;
    clamp(&mut value);
    Ok(value.to_string())
}

fn clamp(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_u64() && !number.is_i64() => *value = i64::MAX.into(),
        Value::Array(items) => items.iter_mut().for_each(clamp),
        Value::Object(fields) => fields.values_mut().for_each(clamp),
        _ => {}
    }
}

/// JSON that Swift wrote. The error names the place, never the text.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(what: &str, text: Option<&str>) -> std::result::Result<Option<T>, hob::Error> {
    let Some(text) = text else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|error| {
        invalid(format!("{what}: not the JSON that is expected, at line {} column {}", error.line(), error.column()))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn numbers_that_swift_does_not_have_become_its_largest() {
        let value = serde_json::json!({ "a": [u64::MAX, 5, -1, 0.5], "b": { "c": i64::MAX as u64 + 1 } });
        assert_eq!(json(&value).unwrap(), format!(r#"{{"a":[{0},5,-1,0.5],"b":{{"c":{0}}}}}"#, i64::MAX));
    }
}
