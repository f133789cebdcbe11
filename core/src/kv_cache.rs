//! Keys and values of the tokens that rows have already seen, per layer.
//!
//! A cache holds one row or a batch of rows of different lengths. Rows lie in slots of one array, each from its slot's start, so
//! that joining and leaving move one row and nothing else; a mask hides what lies beyond a row's end, and a joining row brings
//! zeros for the rest of its slot, so that nothing of a former row can reach it (a masked NaN is still a NaN).

use mlx_rs::ops::indexing::TryIndexOp;
use mlx_rs::{Array, Dtype, ops};

use crate::error::{Error, Result};
use crate::nn::{Heads, Offset, Step, Turn, attend_in_place, write_at, write_each};

/// Room is added in steps of this many tokens, so that a decode step writes in place and does not copy what came before.
pub(crate) const STEP: i32 = 256;

/// Tokens rounded up to whole steps.
pub(crate) fn rounded(tokens: i32) -> i32 {
    (tokens + STEP - 1) / STEP * STEP
}

/// One layer's keys and values, each `[slots, kv heads, room, D]`.
#[derive(Debug, Default)]
pub(crate) struct LayerCache {
    held: Option<(Array, Array)>,
}

/// Where the new tokens of one pass go: made once, used by every layer.
#[derive(Debug)]
pub(crate) struct Pass {
    rows: i32,
    tokens: i32,
    /// Tokens of the longest row, the new ones included.
    end: i32,
    /// Tokens of each row before the new ones, `[B]` in int32.
    lens: Array,
    place: Place,
    /// By how much the rows' one new token turns, for a step in place; `None` where there are more.
    pub(crate) turn: Option<Turn>,
}

#[derive(Debug)]
enum Place {
    /// All rows are as long.
    Same(i32),
    /// Rows differ: their indices, `[B]` in int32, and what each may look at, `[B, 1, 1, end]`.
    Each { rows: Array, mask: Array },
}

impl Pass {
    /// The position of the new tokens, leaving out the first `skipped` of them.
    pub(crate) fn offset(&self, skipped: i32) -> Offset<'_> {
        match &self.place {
            Place::Same(len) => Offset::Same(len + skipped),
            Place::Each { .. } => Offset::Each(&self.lens),
        }
    }

    /// Tokens of each row before the new ones, `[B]` in int32.
    pub(crate) fn lens(&self) -> &Array {
        &self.lens
    }

    /// True where the new tokens may look, `[B, 1, 1, end]`, where rows differ in length.
    pub(crate) fn mask(&self) -> Option<&Array> {
        match &self.place {
            Place::Same(_) => None,
            Place::Each { mask, .. } => Some(mask),
        }
    }
}

impl LayerCache {
    /// Appends `[B, kv heads, L, D]` keys and values and returns `[B, kv heads, end, D]`, all so far.
    pub(crate) fn append(&mut self, keys: &Array, values: &Array, pass: &Pass) -> Result<(Array, Array)> {
        let (all_keys, all_values) = self.take_with_room([keys.dim(1), keys.dim(3)], keys.dtype(), pass)?;
        let written = |all: &Array, new: &Array| match &pass.place {
            Place::Same(len) => write_at(all, new, [0, 0, *len, 0]),
            Place::Each { rows, .. } => write_each(all, new, rows, &pass.lens),
        };
        let (all_keys_now, all_values_now) = (written(&all_keys, keys)?, written(&all_values, values)?);
        drop((all_keys, all_values));
        let result = (part(&all_keys_now, 0..pass.rows, pass.end)?, part(&all_values_now, 0..pass.rows, pass.end)?);
        self.held = Some((all_keys_now, all_values_now));
        Ok(result)
    }

    /// A step of one token: appends what is projected, `[B, 1, heads * D]`, and attends to all so far, in one go; `None` where the
    /// device cannot, and then nothing has happened.
    pub(crate) fn step(
        &mut self,
        projected: &[Array; 3],
        [kv_heads, head_dim]: [i32; 2],
        heads: &Heads<'_>,
        pass: &Pass,
    ) -> Result<Option<Array>> {
        let Some(turn) = &pass.turn else { return Ok(None) };
        let (keys, values) = self.take_with_room([kv_heads, head_dim], projected[1].dtype(), pass)?;
        let step = Step { projected, keys: &keys, values: &values, lens: &pass.lens, end: pass.end, turn, heads };
        let Some((y, [keys, values])) = attend_in_place(&step)? else {
            self.held = Some((keys, values));
            return Ok(None);
        };
        self.held = Some((keys, values));
        Ok(Some(y))
    }

    /// Keys and values so far, in arrays with room for the pass's new tokens.
    fn take_with_room(&mut self, [heads, head_dim]: [i32; 2], dtype: Dtype, pass: &Pass) -> Result<(Array, Array)> {
        match self.held.take() {
            Some((keys, values)) if pass.end <= keys.dim(2) => Ok((keys, values)),
            Some((keys, values)) => {
                let room = rounded(pass.end);
                Ok((resized(&keys, pass.rows, room)?, resized(&values, pass.rows, room)?))
            }
            None => {
                let empty = || ops::zeros_dtype(&[pass.rows, heads, rounded(pass.end), head_dim], dtype);
                Ok((empty()?, empty()?))
            }
        }
    }

    fn map(&self, mut change: impl FnMut(&Array) -> Result<Array>) -> Result<Self> {
        let held = self.held.as_ref().map(|(keys, values)| Ok::<_, Error>((change(keys)?, change(values)?))).transpose()?;
        Ok(Self { held })
    }
}

/// Rows `rows` up to `len` tokens.
fn part(all: &Array, rows: std::ops::Range<i32>, len: i32) -> Result<Array> {
    if rows == (0..all.dim(0)) && all.dim(2) == len {
        return Ok(all.clone());
    }
    Ok(all.try_index((rows, .., ..len, ..))?)
}

/// `old` in an array of so many slots and so much room: what does not fit is left out, the rest is zero.
fn resized(old: &Array, slots: i32, room: i32) -> Result<Array> {
    let kept = part(old, 0..old.dim(0).min(slots), old.dim(2).min(room))?;
    if kept.dim(0) == slots && kept.dim(2) == room {
        return Ok(kept.contiguous()?);
    }
    let target = ops::zeros_dtype(&[slots, old.dim(1), room, old.dim(3)], old.dtype())?;
    write_at(&target, &kept, [0; 4])
}

/// The cache of one row or of a batch: one [`LayerCache`] per layer, and each row's length in tokens.
#[derive(Debug)]
pub(crate) struct KvCache {
    layers: Vec<LayerCache>,
    lens: Vec<i32>,
    /// Another cache may hold the same arrays.
    shared: bool,
}

impl KvCache {
    /// An empty cache of `rows` rows.
    pub(crate) fn new(layers: usize, rows: usize) -> Self {
        Self { layers: (0..layers).map(|_| LayerCache::default()).collect(), lens: vec![0; rows], shared: false }
    }

    /// Tokens of each row.
    pub(crate) fn lens(&self) -> &[i32] {
        &self.lens
    }

    /// Plans a pass of `tokens` new tokens for every row.
    pub(crate) fn pass(&mut self, tokens: i32) -> Result<Pass> {
        // A step may write in place (`LayerCache::step`); several tokens at once are written into a copy where that is needed.
        if self.shared && tokens == 1 {
            self.own()?;
        }
        let longest = self.lens.iter().copied().max().unwrap_or(0);
        let rows = i32::try_from(self.lens.len()).unwrap_or(0);
        let end = longest + tokens;
        let lens = Array::from_slice(&self.lens, &[rows]);
        if self.lens.iter().all(|&len| len == longest) {
            return Ok(Pass { rows, tokens, end, lens, place: Place::Same(longest), turn: None });
        }
        if tokens != 1 {
            return Err(Error::internal("several tokens at once for rows of different lengths"));
        }
        let keys = Array::from_iter(0..end, &[1, 1, 1, end]);
        let mask = ops::le(keys, ops::reshape(&lens, &[rows, 1, 1, 1])?)?;
        Ok(Pass { rows, tokens, end, lens, place: Place::Each { rows: Array::from_iter(0..rows, &[rows]), mask }, turn: None })
    }

    pub(crate) fn layer(&mut self, index: usize) -> &mut LayerCache {
        &mut self.layers[index]
    }

    /// Counts the tokens of a pass once every layer has them.
    pub(crate) fn advance(&mut self, pass: &Pass) {
        self.lens.iter_mut().for_each(|len| *len += pass.tokens);
    }

    /// Every array held, for one evaluation that keeps graphs from growing across steps.
    pub(crate) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().filter_map(|layer| layer.held.as_ref()).flat_map(|(keys, values)| [keys, values])
    }

    /// Bytes held, the room that is not in use yet included.
    pub(crate) fn bytes(&self) -> u64 {
        self.arrays().map(|array| array.nbytes() as u64).sum()
    }

    /// The first `len` tokens of row `index`, as a cache of its own that shares no memory with this one.
    pub(crate) fn copy(&self, index: usize, len: i32) -> Result<Self> {
        let row = i32::try_from(index).unwrap_or(i32::MAX);
        let layers =
            self.layers.iter().map(|layer| layer.map(|all| copied(&part(all, row..row + 1, len)?))).collect::<Result<_>>()?;
        Ok(Self { layers, lens: vec![len], shared: false })
    }

    /// A cache of the same contents, which shares its arrays with this one until one of the two goes on.
    pub(crate) fn fork(&mut self) -> Result<Self> {
        self.shared = true;
        let layers = self.layers.iter().map(|layer| layer.map(|all| Ok(all.clone()))).collect::<Result<_>>()?;
        Ok(Self { layers, lens: self.lens.clone(), shared: true })
    }

    /// Makes the arrays this cache's own.
    fn own(&mut self) -> Result<()> {
        for layer in &mut self.layers {
            *layer = layer.map(copied)?;
        }
        self.shared = false;
        Ok(())
    }

    /// Adds the only row of `other` as the last one.
    pub(crate) fn push(&mut self, other: Self) -> Result<()> {
        let [len] = *other.lens.as_slice() else { return Err(Error::internal("only single rows join a batch")) };
        if self.lens.is_empty() {
            *self = other;
            return Ok(());
        }
        let row = i32::try_from(self.lens.len()).unwrap_or(i32::MAX);
        for (layer, new) in self.layers.iter_mut().zip(&other.layers) {
            let (Some((keys, values)), Some((new_keys, new_values))) = (layer.held.take(), &new.held) else {
                return Err(Error::internal("an empty row cannot join a batch"));
            };
            let join = |all: Array, new: &Array| -> Result<Array> {
                let room = all.dim(2).max(rounded(len + 1));
                let slots = all.dim(0).max(row + 1);
                let all = if slots > all.dim(0) || room > all.dim(2) { resized(&all, slots, room)? } else { all };
                write_at(&all, &resized(&part(new, 0..1, len)?, 1, room)?, [row, 0, 0, 0])
            };
            layer.held = Some((join(keys, new_keys)?, join(values, new_values)?));
        }
        self.lens.push(len);
        Ok(())
    }

    /// Takes row `index` out; the last row moves into its place. Room far beyond what is left is given back.
    pub(crate) fn swap_remove(&mut self, index: usize) -> Result<()> {
        self.lens.swap_remove(index);
        let rows = i32::try_from(self.lens.len()).unwrap_or(0);
        if rows == 0 {
            self.layers.iter_mut().for_each(|layer| *layer = LayerCache::default());
            return Ok(());
        }
        let at = i32::try_from(index).unwrap_or(i32::MAX);
        let room = rounded(self.lens.iter().copied().max().unwrap_or(0) + 1);
        for layer in &mut self.layers {
            let Some((keys, values)) = layer.held.take() else { continue };
            let leave = |all: Array| -> Result<Array> {
                let all = if at < rows {
                    let last = part(&all, rows..rows + 1, all.dim(2))?.contiguous()?;
                    write_at(&all, &last, [at, 0, 0, 0])?
                } else {
                    all
                };
                if all.dim(0) * all.dim(2) > 2 * rows * room { resized(&all, rows, room) } else { Ok(all) }
            };
            layer.held = Some((leave(keys)?, leave(values)?));
        }
        Ok(())
    }
}

/// Adding zero makes a copy where `contiguous` might hand out a view of the same memory.
fn copied(all: &Array) -> Result<Array> {
    Ok(ops::add(all, crate::nn::scalar(0.0, all.dtype())?)?)
}
