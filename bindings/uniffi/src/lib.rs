//! The Rust side of the Swift package `Hob`: objects and values for uniffi over the crate `hob`. A skin: nothing is decided here.
//!
//! Rules of this border, which `swift/` relies on and tests check:
//! - **Every exported function can fail** in Rust's signature, also where the core cannot: the generated Swift of one that cannot fail
//!   ends the process when anything goes wrong, of one that can it throws.
//! - Names begin with `Raw`: the public names are those of the hand-written module `Hob`.
//! - Futures come from the core, which needs no runtime; whatever blocks (files, opening MLX) runs on a thread made for it, so that Swift's
//!   cooperative threads never wait.
//! - Hot values (the events of a stream) are records; what is asked for now and then (status, descriptions) is JSON, as in the C ABI.
//! - Children hold a clone of the engine or pool they came from, so the order in which Swift lets go of things is free.
//!
//! The library also carries the whole C ABI (`hob-ffi`), so that a process which uses both has one MLX.

#![allow(clippy::needless_pass_by_value, reason = "uniffi hands arguments over by value")]

use std::collections::HashMap;

// For its symbols: they leave the library beside uniffi's own; `cargo xtask swift build` checks it.
use hob_ffi as _;

pub mod engine;
pub mod error;
pub mod hooks;
pub mod live;
pub mod pool;
pub mod resident;
pub mod stream;
pub mod testing;
pub mod tokenizer;
pub mod types;
mod wait;

pub use error::RawError;

uniffi::setup_scaffolding!();

/// Handles that Swift holds now, by type, over the whole process; `c` counts those of the C ABI. For tests that look for leaks.
///
/// # Errors
/// None, as things are.
#[uniffi::export]
pub fn raw_live_handles() -> Result<HashMap<String, i64>, RawError> {
    let mut counts = live::counts();
    counts.insert("c".to_owned(), hob_ffi::handle::hob_live_handles());
    Ok(counts)
}

/// Hob's version.
///
/// # Errors
/// None, as things are.
#[uniffi::export]
pub fn raw_version() -> Result<String, RawError> {
    Ok(env!("CARGO_PKG_VERSION").to_owned())
}
