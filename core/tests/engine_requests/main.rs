//! The request contract on a scripted device (spec sections 3 and 4.3): bounded queue, cancels and deadlines in every phase,
//! a device that hangs, fair turns, shared batches, and the account of it all. No MLX, no sleeps, no real time.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod batches;
mod cancel;
mod memory;
mod queue;
mod random;
mod stuck;
mod support;
mod turns;
