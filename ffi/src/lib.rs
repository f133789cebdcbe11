//! Hob's C ABI: libhob and include/hob.h, a thin skin over the crate `hob`.
//!
//! `raw` is where pointers become references, `boundary` what every export goes through; the other modules are one per noun. The
//! header is generated from this crate (`cargo xtask header`), its chapters from `header/`.

#![allow(non_camel_case_types, reason = "the names are C's")]
#![allow(clippy::missing_safety_doc, reason = "what callers promise is the header's conventions, stated once in header/prologue.h")]
#![allow(clippy::cast_possible_truncation, reason = "sizes of structs and codes of kinds are small")]

pub mod admit;
mod boundary;
pub mod buffer;
pub mod cancel;
pub mod encode;
pub mod engine;
pub mod error;
pub mod events;
pub mod fake;
pub mod handle;
pub mod pool;
mod raw;
pub mod request;
pub mod stream;
pub mod tokenizer;
pub mod version;
pub mod wait;
