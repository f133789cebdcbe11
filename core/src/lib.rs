//! Hob: an inference stack that lives inside a host's process.

pub mod chat_template;
pub mod error;
pub mod gguf;
pub mod options;
pub mod sampler;
pub mod text_stream;
pub mod tokenizer;

pub use error::{Error, ErrorKind, Result};
