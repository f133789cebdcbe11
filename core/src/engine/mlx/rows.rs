//! Rows on MLX: prompts going in one by one, decoding in one batch per model, and what is kept of them for later prompts.

use std::collections::HashMap;

use mlx_rs::ops::indexing::{TryIndexOp, argmax_axis, take_along_axis, take_axis};
use mlx_rs::{Array, Dtype, ops, transforms};

use super::{check_ids, id_array, to_host, values};
use crate::engine::backend::{CacheBytes, Chooser, Prefill, Row, SCORE_CHUNK, Slot, Stepping, Tenant};
use crate::error::{Error, ErrorKind, Result};
use crate::kv_cache::KvCache;
use crate::models::Decoder;
use crate::prompt_cache::PromptCache;

struct RowState {
    slot: Slot,
    /// The prompt, and the tokens given out since.
    tokens: Vec<u32>,
    prompt: usize,
    /// Tokens of the prompt that are in the cache.
    done: usize,
    /// The row's own cache; `None` while it is part of its model's batch.
    cache: Option<KvCache>,
    /// A token that was computed ahead and is not given out yet.
    ready: Option<Result<u32>>,
}

/// The rows of one model that decode together.
struct Batch {
    /// In the order of the cache's rows.
    rows: Vec<Row>,
    cache: KvCache,
    /// The next tokens, chosen by the device and not read yet.
    ahead: Option<Chosen>,
}

impl Batch {
    /// Takes the row at `index` out; the last one moves into its place.
    fn leave(&mut self, index: usize) -> Result<()> {
        if let Some(ahead) = self.ahead.take() {
            let mut order: Vec<i32> = (0..).take(self.rows.len()).collect();
            order.swap_remove(index);
            let order = Array::from_slice(&order, &[i32::try_from(order.len()).unwrap_or(0)]);
            self.ahead = Some(Chosen { tokens: take_axis(&ahead.tokens, &order, 0)?, check: take_axis(&ahead.check, &order, 0)? });
        }
        self.cache.swap_remove(index)?;
        self.rows.swap_remove(index);
        Ok(transforms::eval(self.cache.arrays())?)
    }
}

/// Tokens `[B]` that the device chose, and for each a number that is finite iff all its logits are.
struct Chosen {
    tokens: Array,
    check: Array,
}

impl Chosen {
    /// Starts the choice of the likeliest tokens of `[B, vocabulary]` logits.
    fn of(logits: &Array) -> Result<Self> {
        let check = logits.as_dtype(Dtype::Float32)?.sum_axis(1, false)?;
        let tokens = argmax_axis(logits, 1, false)?;
        transforms::async_eval([&tokens, &check])?;
        Ok(Self { tokens, check })
    }

    /// Waits for the tokens.
    fn read(self) -> Result<Vec<Result<u32>>> {
        let (tokens, checks) = (values::<u32>(&self.tokens)?, values::<f32>(&self.check)?);
        let checked = |(token, check): (u32, f32)| if check.is_finite() { Ok(token) } else { Err(not_finite()) };
        Ok(tokens.into_iter().zip(checks).map(checked).collect())
    }
}

fn not_finite() -> Error {
    Error::new(ErrorKind::Backend, "the model produced logits that are not finite")
}

/// `[B, 1]` ids -> `[B, vocabulary]` logits after them.
pub(super) fn step(decoder: &dyn Decoder, ids: &Array, cache: &mut KvCache) -> Result<Array> {
    let last = decoder.last_hidden(ids, cache)?;
    decoder.logits(&ops::squeeze_axes(last, &[1])?)
}

/// All rows of all models.
pub(super) struct Rows {
    rows: HashMap<Row, RowState>,
    batches: HashMap<Slot, Batch>,
    kept: PromptCache<Slot, KvCache>,
}

impl Rows {
    pub(super) fn new() -> Self {
        Self { rows: HashMap::new(), batches: HashMap::new(), kept: PromptCache::new() }
    }

    pub(super) fn slot(&self, row: Row) -> Result<Slot> {
        self.rows.get(&row).map(|state| state.slot).ok_or_else(gone)
    }

    pub(super) fn begin(
        &mut self,
        row: Row,
        slot: Slot,
        decoder: &dyn Decoder,
        vocabulary: u32,
        prompt: Vec<u32>,
        reuse: bool,
    ) -> Result<usize> {
        check_ids(&prompt, vocabulary)?;
        let mut cache = decoder.new_cache(1);
        let mut done = 0;
        if reuse && let Some((kept, shared)) = self.kept.find(slot, &prompt) {
            // A copy: what this row writes must not reach the kept one (spec C10).
            cache = kept.copy(0, i32::try_from(shared).unwrap_or(0))?;
            transforms::eval(cache.arrays())?;
            done = shared;
        }
        let state = RowState { slot, prompt: prompt.len(), tokens: prompt, done, cache: Some(cache), ready: None };
        self.rows.insert(row, state);
        Ok(done)
    }

    pub(super) fn prefill(&mut self, row: Row, decoder: &dyn Decoder, chunk: usize, chooser: &mut dyn Chooser) -> Result<Prefill> {
        let state = self.rows.get_mut(&row).ok_or_else(gone)?;
        let cache = state.cache.as_mut().ok_or_else(|| Error::internal("a prompt step of a row that decodes"))?;
        let rest = &state.tokens[state.done..state.prompt];
        let chunk = rest.len().min(chunk.max(1));
        let ids = id_array(&rest[..chunk], &[1, i32::try_from(chunk).unwrap_or(0)])?;
        if chunk < rest.len() {
            decoder.hidden(&ids, cache)?;
            transforms::eval(cache.arrays())?;
            state.done += chunk;
            return Ok(Prefill::Chunk(state.done));
        }
        let logits = step(decoder, &ids, cache)?;
        state.done += chunk;
        let token = if chooser.is_greedy() {
            Chosen::of(&logits)?.read()?.pop().ok_or_else(|| Error::internal("a step without a token"))??
        } else {
            chooser.choose(&to_host(&logits)?)?
        };
        state.tokens.push(token);
        Ok(Prefill::Token(token))
    }

    pub(super) fn decode(&mut self, slot: Slot, decoder: &dyn Decoder, stepping: &mut [Stepping<'_>]) -> Result<()> {
        let batch =
            self.batches.entry(slot).or_insert_with(|| Batch { rows: Vec::new(), cache: decoder.new_cache(0), ahead: None });
        let unchanged = batch.rows.len() == stepping.len() && stepping.iter().all(|step| batch.rows.contains(&step.row));
        if !unchanged {
            // Tokens computed for the former composition are due before a new one computes.
            if let Some(ahead) = batch.ahead.take() {
                for (row, token) in batch.rows.iter().zip(ahead.read()?) {
                    self.rows.get_mut(row).ok_or_else(gone)?.ready = Some(token);
                }
            }
            let mut due = false;
            for step in stepping.iter_mut() {
                let state = self.rows.get_mut(&step.row).ok_or_else(gone)?;
                if let Some(token) = state.ready.take() {
                    state.tokens.extend(token.as_ref().ok());
                    step.token = Some(token);
                    due = true;
                }
            }
            if due {
                return Ok(());
            }
            self.compose(slot, stepping)?;
        }
        let batch = self.batches.get_mut(&slot).ok_or_else(gone)?;
        // The batch keeps its own order of rows.
        let mut place = vec![0; stepping.len()];
        for (index, row) in batch.rows.iter().enumerate() {
            place[index] = stepping.iter().position(|step| step.row == *row).ok_or_else(gone)?;
        }
        let chosen = match batch.ahead.take() {
            Some(chosen) => chosen,
            None => {
                let last = |row: &Row| self.rows.get(row).and_then(|state| state.tokens.last().copied()).ok_or_else(gone);
                let ids = batch.rows.iter().map(last).collect::<Result<Vec<_>>>()?;
                let logits = step(decoder, &id_array(&ids, &[i32::try_from(ids.len()).unwrap_or(0), 1])?, &mut batch.cache)?;
                if !stepping.iter().all(|step| step.chooser.is_greedy()) {
                    let logits_host = to_host(&logits)?;
                    let width = usize::try_from(logits.dim(1)).unwrap_or(1);
                    for (row_logits, &at) in logits_host.chunks_exact(width.max(1)).zip(&place) {
                        let step = &mut stepping[at];
                        let token = step.chooser.choose(row_logits);
                        self.rows.get_mut(&step.row).ok_or_else(gone)?.tokens.extend(token.as_ref().ok());
                        step.token = Some(token);
                    }
                    return Ok(());
                }
                Chosen::of(&logits)?
            }
        };
        // The next step is under way on the device before these tokens are read.
        if stepping.iter().any(|step| !step.chooser.is_last()) {
            let ids = ops::reshape(&chosen.tokens, &[chosen.tokens.dim(0), 1])?;
            batch.ahead = Some(Chosen::of(&step(decoder, &ids, &mut batch.cache)?)?);
        }
        for (token, &at) in chosen.read()?.into_iter().zip(&place) {
            let step = &mut stepping[at];
            self.rows.get_mut(&step.row).ok_or_else(gone)?.tokens.extend(token.as_ref().ok());
            step.token = Some(token);
        }
        Ok(())
    }

    /// Makes the batch hold the rows wanted and no others; nothing may be computed ahead.
    fn compose(&mut self, slot: Slot, wanted: &[Stepping<'_>]) -> Result<()> {
        let batch = self.batches.get_mut(&slot).ok_or_else(gone)?;
        for index in (0..batch.rows.len()).rev() {
            let row = batch.rows[index];
            if wanted.iter().all(|step| step.row != row) {
                let own = batch.cache.copy(index, batch.cache.lens()[index])?;
                transforms::eval(own.arrays())?;
                self.rows.get_mut(&row).ok_or_else(gone)?.cache = Some(own);
                batch.cache.swap_remove(index)?;
                batch.rows.swap_remove(index);
            }
        }
        for step in wanted {
            let state = self.rows.get_mut(&step.row).ok_or_else(gone)?;
            if let Some(own) = state.cache.take() {
                batch.cache.push(own)?;
                batch.rows.push(step.row);
            }
        }
        Ok(transforms::eval(batch.cache.arrays())?)
    }

    pub(super) fn set_back(&mut self, row: Row, decoder: &dyn Decoder) -> Result<()> {
        self.leave_batch(row)?;
        let state = self.rows.get_mut(&row).ok_or_else(gone)?;
        state.cache = Some(decoder.new_cache(1));
        (state.prompt, state.done, state.ready) = (state.tokens.len(), 0, None);
        Ok(())
    }

    /// Takes a row out of its model's batch, if it is in it, and drops what it held there.
    fn leave_batch(&mut self, row: Row) -> Result<()> {
        let slot = self.slot(row)?;
        let Some(mut batch) = self.batches.remove(&slot) else { return Ok(()) };
        if let Some(index) = batch.rows.iter().position(|&other| other == row) {
            if batch.rows.len() == 1 {
                return Ok(());
            }
            batch.leave(index)?;
        }
        self.batches.insert(slot, batch);
        Ok(())
    }

    pub(super) fn fork(&mut self, row: Row, new: Row) -> Result<()> {
        let state = self.rows.get_mut(&row).ok_or_else(gone)?;
        let cache = Some(state.cache.as_mut().ok_or_else(|| Error::internal("a fork of a row that decodes"))?.fork()?);
        let fork = RowState { slot: state.slot, tokens: Vec::new(), prompt: 0, done: 0, cache, ready: None };
        self.rows.insert(new, fork);
        Ok(())
    }

    pub(super) fn extend(&mut self, row: Row, decoder: &dyn Decoder, vocabulary: u32, ids: &[u32]) -> Result<()> {
        self.feed(row, decoder, vocabulary, ids)?;
        Ok(())
    }

    fn feed(&mut self, row: Row, decoder: &dyn Decoder, vocabulary: u32, ids: &[u32]) -> Result<Array> {
        check_ids(ids, vocabulary)?;
        let cache = self.rows.get_mut(&row).and_then(|state| state.cache.as_mut()).ok_or_else(gone)?;
        let hidden = decoder.hidden(&id_array(ids, &[1, i32::try_from(ids.len()).unwrap_or(0)])?, cache)?;
        transforms::eval(cache.arrays())?;
        Ok(hidden)
    }

    pub(super) fn score(&mut self, row: Row, decoder: &dyn Decoder, vocabulary: u32, ids: &[u32]) -> Result<Vec<f32>> {
        let fed = ids.len().checked_sub(1).filter(|fed| (1..=SCORE_CHUNK).contains(fed));
        let fed = fed.ok_or_else(|| Error::internal(format!("scoring {} ids at once", ids.len())))?;
        check_ids(ids, vocabulary)?;
        let hidden = self.feed(row, decoder, vocabulary, &ids[..fed])?;
        let mut scores = Vec::with_capacity(fed);
        // A part of the positions at a time: logits are as wide as the vocabulary.
        for start in (0..fed).step_by(LOGITS_AT_ONCE) {
            let end = (start + LOGITS_AT_ONCE).min(fed);
            let (from, to) = (i32::try_from(start).unwrap_or(0), i32::try_from(end).unwrap_or(0));
            let logits = decoder.logits(&hidden.try_index((0, from..to, ..))?)?.as_dtype(Dtype::Float32)?;
            let targets = id_array(&ids[start + 1..=end], &[to - from, 1])?;
            let chosen = take_along_axis(&logits, targets, 1)?;
            scores.extend(to_host(&ops::subtract(chosen, logits.logsumexp_axis(1, true)?)?)?);
        }
        Ok(scores)
    }

    pub(super) fn end(&mut self, row: Row, keep: bool) -> Result<()> {
        if !self.rows.contains_key(&row) {
            return Ok(());
        }
        let kept = if keep { self.keep(row) } else { Ok(()) };
        let left = self.leave_batch(row);
        self.rows.remove(&row);
        kept.and(left)
    }

    /// Keeps what a row holds for later prompts, when there is room for it.
    fn keep(&mut self, row: Row) -> Result<()> {
        let state = self.rows.get(&row).ok_or_else(gone)?;
        let batched = || {
            let batch = self.batches.get(&state.slot)?;
            Some((&batch.cache, batch.rows.iter().position(|&other| other == row)?))
        };
        let Some((cache, index)) = state.cache.as_ref().map(|own| (own, 0)).or_else(batched) else { return Ok(()) };
        let len = cache.lens().get(index).copied().unwrap_or(0);
        // The last token given out is not in the cache; one that was fed ahead and not given out is not among the tokens.
        let len = usize::try_from(len).unwrap_or(0).min(state.tokens.len());
        let slots = cache.arrays().next().map_or(1, |array| array.dim(0) * array.dim(2)).max(1);
        let bytes = cache.bytes() / u64::from(slots.unsigned_abs()) * len as u64;
        if !self.kept.takes(state.slot, bytes) {
            return Ok(());
        }
        let copy = cache.copy(index, i32::try_from(len).unwrap_or(0))?;
        transforms::eval(copy.arrays())?;
        self.kept.insert(state.slot, state.tokens[..len].to_vec(), copy, bytes);
        Ok(())
    }

    /// Forgets a model: its rows must be gone.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.batches.remove(&slot);
        self.kept.remove(slot);
    }

    pub(super) fn bytes(&self, slot: Slot) -> CacheBytes {
        let own = self.rows.values().filter(|row| row.slot == slot).filter_map(|row| row.cache.as_ref()).map(KvCache::bytes);
        let rows = own.sum::<u64>() + self.batches.get(&slot).map_or(0, |batch| batch.cache.bytes());
        CacheBytes { rows, kept: self.kept.bytes(slot) }
    }

    pub(super) fn forget_prompt(&mut self, slot: Slot) -> bool {
        self.kept.pop(slot)
    }

    pub(super) fn keep_prompts(&mut self, slot: Slot, tenant: &Tenant) {
        self.kept.add(slot, tenant.id, tenant.prompt_cache);
    }
}

/// Positions whose logits are held at once when scoring.
pub(super) const LOGITS_AT_ONCE: usize = 64;

fn gone() -> Error {
    Error::internal("a step of a row that has ended")
}
