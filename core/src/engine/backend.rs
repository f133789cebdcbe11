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

/// Bytes of keys and values held for a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CacheBytes {
    /// Of rows.
    pub(crate) rows: u64,
    /// Of prompts kept for later ones.
    pub(crate) kept: u64,
}

impl CacheBytes {
    pub(crate) fn total(self) -> u64 {
        self.rows + self.kept
    }
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

/// One engine among those that share the device, and what its models get of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tenant {
    pub(crate) id: u64,
    /// Rows of one model that generate at once.
    pub(crate) capacity: usize,
    /// Bytes of kept prompts, over all its models.
    pub(crate) prompt_cache: u64,
    /// Whether freed memory goes back to the system.
    pub(crate) drain: bool,
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

/// What one step of a prompt did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prefill {
    /// A chunk went in; so many tokens of the prompt are done.
    Chunk(usize),
    /// The prompt is through, and this is the first new token.
    Token(u32),
}

/// A row of a batched step: the row, who chooses its token, and the token once the step has one. A row that joins while others
/// have been computed ahead gets none in that step.
pub(crate) struct Stepping<'a> {
    pub(crate) row: Row,
    pub(crate) chooser: &'a mut dyn Chooser,
    pub(crate) token: Option<Result<u32>>,
}

/// Told the share of a load that is done, 0 to 1, and lent the device for work in between. An error stops the load.
pub(crate) type LoadProgress<'a> = &'a mut dyn FnMut(&mut dyn Backend, f32) -> Result<()>;

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
    /// Loads a model; `progress` may stop it by an error, at any value including the last.
    fn load(&mut self, spec: &ModelSpec, progress: LoadProgress<'_>) -> Result<Loaded>;
    /// Drops a model and what is kept for it; unknown slots are ignored. Its rows must be gone.
    fn unload(&mut self, slot: Slot);
    /// Begins a row on `prompt` (not empty), on kept keys and values of its beginning when `reuse` is set; says how many of its
    /// tokens need not be computed. Nothing is computed yet.
    fn begin(&mut self, slot: Slot, prompt: Vec<u32>, reuse: bool) -> Result<(Row, usize)>;
    /// Feeds at most `chunk` further tokens of the prompt; the last one gives the first new token.
    fn prefill(&mut self, row: Row, chunk: usize, chooser: &mut dyn Chooser) -> Result<Prefill>;
    /// Gives each row, all of one model, its next token. Rows join and leave between calls as the lists differ.
    fn decode(&mut self, slot: Slot, rows: &mut [Stepping<'_>]) -> Result<()>;
    /// Drops a row's keys and values. Its prompt, with the tokens it was given since, goes in again by `prefill`.
    fn set_back(&mut self, row: Row) -> Result<()>;
    /// A second row with the same past, which goes its own way from here. For rows that do not generate.
    fn fork(&mut self, row: Row) -> Result<Row>;
    /// Feeds `ids` (at most [`SCORE_CHUNK`], at least two) except the last and returns the log-probability of each id after the
    /// first, given all before it.
    fn score(&mut self, row: Row, ids: &[u32]) -> Result<Vec<f32>>;
    /// Feeds `ids` and wants nothing of it. For rows that do not generate.
    fn extend(&mut self, row: Row, ids: &[u32]) -> Result<()>;
    /// Ends a row and frees its cache; with `keep` its keys and values may stay for later prompts. Unknown rows are ignored.
    fn end(&mut self, row: Row, keep: bool);
    /// Bytes of keys and values held for a model.
    fn cache_bytes(&self, slot: Slot) -> CacheBytes;
    /// Lets go of the prompt kept for a model that was used the longest ago; false when there is none.
    fn forget_prompt(&mut self, slot: Slot) -> bool;
    /// Lets a model's prompts be kept, all models of the engine together within so many bytes.
    fn keep_prompts(&mut self, slot: Slot, tenant: &Tenant);
    /// Raw logits after each of `ids[from..]`, in float32: what golden tests compare.
    #[cfg(test)]
    fn logits(&mut self, slot: Slot, ids: &[u32], from: usize) -> Result<Vec<Vec<f32>>>;
    /// One vector per row, pooled as the model declares, before normalisation asked for by options.
    fn embed(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>>;
    /// The classifier's logits, per row.
    fn classify(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>>;
}

/// Ids of one scoring step at most: what a cancel or a stream may have to wait for.
pub(crate) const SCORE_CHUNK: usize = 256;
