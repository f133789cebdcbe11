//! What the owner thread can be asked to do, without tensors: MLX implements it (`mlx.rs`), and so does the scripted fake.

use super::limits::AllocatorLimits;
use crate::error::Result;
use crate::model::ModelSpec;
use crate::pool::MemoryReading;

/// A resident model on the owner thread. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot(pub(crate) u64);

/// A generation in progress on the owner thread. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Row(pub(crate) u64);

/// What a load produced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Loaded {
    pub(crate) slot: Slot,
    /// Bytes the weights really take.
    pub(crate) weight_bytes: u64,
}

/// The device that computes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DeviceInfo {
    /// `cpu`, `gpu` (Metal or CUDA), or `fake`.
    pub kind: &'static str,
    /// The device's own name, where it says one.
    pub name: String,
    /// MLX's version, or the fake's.
    pub version: String,
    /// Bytes the device recommends to stay within, when it says.
    pub recommended_bytes: Option<u64>,
}

/// Token rows of one batch; shorter rows are padded on the right by the backend.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenBatch {
    pub(crate) ids: Vec<Vec<u32>>,
    /// Segment ids of each token (cross-encoders); empty means all zero.
    pub(crate) types: Vec<Vec<u32>>,
}

/// Chooses the next token of a row.
pub(crate) trait Chooser {
    /// The likeliest token is wanted and the logits are not: the device may choose, and work ahead.
    fn is_greedy(&self) -> bool;
    /// No token will be asked for after the next one, so working ahead is waste.
    fn is_last(&self) -> bool;
    /// The next token, from raw logits (one per vocabulary entry).
    fn choose(&mut self, logits: &[f32]) -> Result<u32>;
}

/// What one step of a row did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advance {
    /// A chunk of the prompt went in; so many of its tokens are done.
    Prefilled(usize),
    /// The next token.
    Token(u32),
}

/// The owner thread's work. Every call may take as long as the device needs.
pub(crate) trait Backend {
    fn device(&self) -> DeviceInfo;
    /// The allocator's bytes now.
    fn memory(&self) -> MemoryReading;
    /// The allocator's limits now.
    fn limits(&mut self) -> Result<AllocatorLimits>;
    /// Sets the allocator's limits.
    fn set_limits(&mut self, limits: AllocatorLimits) -> Result<()>;
    /// Returns freed buffers to the operating system.
    fn drain(&mut self) -> Result<()>;
    /// Loads a model; `progress` (0 to 1) may stop it by an error, at any value including the last.
    fn load(&mut self, spec: &ModelSpec, progress: &mut dyn FnMut(f32) -> Result<()>) -> Result<Loaded>;
    /// Drops a model; unknown slots are ignored. Its rows must be gone.
    fn unload(&mut self, slot: Slot);
    /// Begins a row on `prompt` (not empty); nothing is computed yet.
    fn begin(&mut self, slot: Slot, prompt: Vec<u32>) -> Result<Row>;
    /// One chunk of prefill, or one token.
    fn advance(&mut self, row: Row, chooser: &mut dyn Chooser) -> Result<Advance>;
    /// Ends a row and frees its cache; unknown rows are ignored.
    fn end(&mut self, row: Row);
    /// Log-probabilities of `ids[from..]`, each given all ids before it (`from` >= 1). `check` may stop
    /// it by an error, between chunks.
    fn score(&mut self, slot: Slot, ids: &[u32], from: usize, check: &mut dyn FnMut() -> Result<()>) -> Result<Vec<f32>>;
    /// Raw logits after each of `ids[from..]`, in float32: what golden tests compare.
    #[cfg(test)]
    fn logits(&mut self, slot: Slot, ids: &[u32], from: usize) -> Result<Vec<Vec<f32>>>;
    /// One vector per row, pooled as the model declares, before normalisation asked for by options.
    fn embed(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>>;
    /// The classifier's logits, per row.
    fn classify(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>>;
}
