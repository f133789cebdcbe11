//! Hob for Node, Bun and Electron: the native half of the npm package `hob`, a skin over the core.
//!
//! Nothing is decided here: each method reads its arguments, calls the core, and the answer goes back by the environment's
//! mailbox (`mailbox.rs`). The classes are named `Native…` because nobody but the package's own TypeScript meets them.
//!
//! - **Threads.** JavaScript's thread reads arguments, hands requests over, looks at streams and makes results. What comes back is
//!   fetched where it is woken (`task.rs`), or on one thread of the process (`hob-napi`); file work on threads made for it.
//!   No call here waits for any of them.
//! - **Promises** are made by the TypeScript half, which knows each of its calls by a number. So one threadsafe function serves a
//!   whole environment, and one that is gone (a terminated worker) has nothing left that could be called.
//! - **Finalizers** drop values of Rust and make none of JavaScript: a garbage collector, a worker's end and the sweep at a
//!   process's exit may run them at any time.

// Everything public is public for JavaScript, and napi's generated code needs it so.
#![allow(unreachable_pub)]
// napi-derive registers nothing in a test build, which clippy's --all-targets makes.
#![cfg_attr(test, allow(dead_code))]

mod engine;
mod error;
mod fake;
mod mailbox;
mod pool;
mod requests;
mod results;
mod stream;
mod task;

use std::sync::atomic::{AtomicI32, Ordering};

use napi_derive::napi;

/// This addon's version; the package refuses another one's.
#[napi]
pub fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// For tests: native handles that are alive in this process, over all its threads.
#[napi]
pub fn live_handles() -> i32 {
    LIVE.load(Ordering::Relaxed)
}

static LIVE: AtomicI32 = AtomicI32::new(0);

/// A place in the count of live handles, held by each of them.
pub(crate) struct Live;

impl Live {
    pub(crate) fn new() -> Self {
        LIVE.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        LIVE.fetch_sub(1, Ordering::Relaxed);
    }
}
