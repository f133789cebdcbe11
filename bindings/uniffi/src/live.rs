//! How many handles of each type are with Swift.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering};

/// A type of handle.
#[derive(Debug, Clone, Copy)]
#[repr(usize)]
pub(crate) enum Type {
    Engine,
    Stream,
    Tokenizer,
    Vectors,
    Pool,
    Lease,
    Pause,
    Charge,
    Events,
    Task,
    CancelToken,
    FakeDevice,
    FakeClock,
}

const NAMES: [&str; 13] = [
    "engine",
    "stream",
    "tokenizer",
    "vectors",
    "pool",
    "lease",
    "pause",
    "charge",
    "events",
    "task",
    "cancel_token",
    "fake_device",
    "fake_clock",
];

static COUNTS: [AtomicI64; NAMES.len()] = [const { AtomicI64::new(0) }; NAMES.len()];

/// Counts while it lives. A part of every handle.
#[derive(Debug)]
pub(crate) struct Live(Type);

impl Live {
    pub(crate) fn new(of: Type) -> Self {
        COUNTS[of as usize].fetch_add(1, Ordering::Relaxed);
        Self(of)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        COUNTS[self.0 as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

pub(crate) fn counts() -> HashMap<String, i64> {
    NAMES.iter().zip(&COUNTS).map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed))).collect()
}
