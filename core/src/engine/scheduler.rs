//! What the device does next: a policy over numbers, without tensors and without time.
//!
//! Work comes in two kinds. A *decode step* gives every running row of one model its next token. *Bulk* is everything else, cut
//! into units of bounded size: a chunk of a prompt, a batch of texts to embed or rank, a step of a scoring. Rounds alternate: one
//! decode step of each model that has one to make, then at most one bulk unit. So between two tokens of a stream lie at most one
//! bulk unit and one step of each other model, however much is queued; and bulk is never starved by streams.
//!
//! Bulk goes around the models and kinds in turn. Within one model, rows start in the order of their requests, as many at once as
//! the capacity and the memory allow; scorings go one after the other; and texts of different requests share batches, which are
//! built around the oldest request so that every request gets its share.
//!
//! Rows grow. When a step would make those of a model outgrow the memory, the youngest is set back: it gives up its keys and values,
//! waits for memory as a new row would, and computes its tokens again. The oldest always goes on.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use super::backend::Slot;
use crate::kv_cache::rounded;

/// A request's number, in the order of the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id(pub(crate) u64);

/// The sizes the policy works with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Rows of one model that generate at once.
    pub(crate) capacity: usize,
    /// Prompt tokens that go in at once.
    pub(crate) chunk: usize,
    /// The same beside running streams, which wait for it.
    pub(crate) chunk_beside: usize,
    /// Texts of one batch at most.
    pub(crate) batch_rows: usize,
    /// Padded tokens (texts times the longest) of one batch at most; a single longer text goes alone (spec 5.2).
    pub(crate) batch_slots: usize,
}

impl Sizes {
    /// The defaults; a model's working memory is estimated from them.
    pub(crate) const DEFAULT: Self = Self { capacity: 8, chunk: 512, chunk_beside: 128, batch_rows: 16, batch_slots: 8192 };
}

impl Default for Sizes {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// One text of a request to embed or to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) id: Id,
    pub(crate) index: usize,
}

/// The next piece of work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unit {
    /// The next token of these rows.
    Decode { slot: Slot, rows: Vec<Id> },
    /// This row gives up its keys and values and waits; what it has said so far is part of its prompt from now on.
    SetBack { id: Id },
    /// At most so many further tokens of a prompt.
    Prefill { id: Id, chunk: usize },
    /// A step of a scoring.
    Score { id: Id },
    /// A batch of texts, longest first.
    Encode { slot: Slot, items: Vec<Item> },
}

/// What the policy asks about rows at the moment it decides.
pub(crate) trait Conditions {
    /// Whether a row's reader has room for another token.
    fn can_step(&mut self, id: Id) -> bool;
    /// Whether there is memory for `tokens` tokens of keys and values of this row's model, all rows together.
    fn may_hold(&mut self, id: Id, tokens: usize) -> bool;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Bulk {
    Prefill,
    Score,
    Encode,
}

/// Texts waiting, by request and by length.
#[derive(Debug, Default)]
struct Texts {
    /// Length and index, the lowest index last among equals, for each request.
    by_request: BTreeMap<Id, BTreeSet<(usize, Reverse<usize>)>>,
    by_length: BTreeSet<(usize, Reverse<Id>, Reverse<usize>)>,
}

impl Texts {
    fn add(&mut self, id: Id, lengths: &[usize]) {
        for (index, &len) in lengths.iter().enumerate() {
            self.by_length.insert((len, Reverse(id), Reverse(index)));
            self.by_request.entry(id).or_default().insert((len, Reverse(index)));
        }
    }

    fn remove(&mut self, id: Id) {
        for (len, index) in self.by_request.remove(&id).unwrap_or_default() {
            self.by_length.remove(&(len, Reverse(id), index));
        }
    }

    /// The longest text of the oldest request, and the longest ones that are no longer than it, whoever's they are: nothing is
    /// padded more than it needs, and the oldest request always moves.
    fn take(&mut self, sizes: &Sizes) -> Vec<Item> {
        let Some((&id, texts)) = self.by_request.iter().next() else { return Vec::new() };
        let Some(&(longest, index)) = texts.last() else { return Vec::new() };
        let first = (longest, Reverse(id), index);
        let rows = (sizes.batch_slots / longest.max(1)).clamp(1, sizes.batch_rows.max(1));
        let shorter = (Bound::Unbounded, Bound::Included((longest, Reverse(Id(0)), Reverse(0))));
        let others = self.by_length.range(shorter).rev().filter(|text| **text != first).take(rows - 1);
        let taken: Vec<_> = std::iter::once(first).chain(others.copied()).collect();
        for &(len, id, index) in &taken {
            self.by_length.remove(&(len, id, index));
            if let Some(texts) = self.by_request.get_mut(&id.0) {
                texts.remove(&(len, index));
                if texts.is_empty() {
                    self.by_request.remove(&id.0);
                }
            }
        }
        taken.into_iter().map(|(_, id, index)| Item { id: id.0, index: index.0 }).collect()
    }
}

#[derive(Debug, Clone, Copy)]
struct Decoding {
    tokens: usize,
    /// When it last made a step.
    turn: u64,
}

/// One model's work. Numbers of rows are their tokens.
#[derive(Debug, Default)]
struct Lane {
    waiting: BTreeMap<Id, usize>,
    prefilling: BTreeMap<Id, usize>,
    decoding: BTreeMap<Id, Decoding>,
    scoring: BTreeSet<Id>,
    texts: Texts,
}

impl Lane {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty()
            && self.prefilling.is_empty()
            && self.decoding.is_empty()
            && self.scoring.is_empty()
            && self.texts.by_request.is_empty()
    }

    /// The row whose prompt goes on: the oldest that has begun, else the oldest that may begin.
    fn next_prefill(&mut self, capacity: usize, conditions: &mut dyn Conditions) -> Option<Id> {
        if let Some((&id, _)) = self.prefilling.first_key_value() {
            return Some(id);
        }
        let (&id, &tokens) = self.waiting.first_key_value()?;
        // A row whose reader is behind takes no place from one that could run; it has its memory still.
        let running = self.decoding.keys().filter(|&&id| conditions.can_step(id)).count();
        if running >= capacity {
            return None;
        }
        if !self.decoding.is_empty() && !conditions.may_hold(id, self.padded(Some(tokens))) {
            return None;
        }
        self.waiting.remove(&id);
        self.prefilling.insert(id, tokens);
        Some(id)
    }

    /// Tokens of keys and values after another token of every row, one row of so many tokens more among them. Rows of a batch lie in
    /// slots as long as the longest one needs.
    fn padded(&self, joining: Option<usize>) -> usize {
        let tokens = || self.decoding.values().map(|row| row.tokens).chain(self.prefilling.values().copied()).chain(joining);
        tokens().count() * room(tokens().max().unwrap_or(0) + 1)
    }

    /// Sets the youngest row back if a step of these rows makes the batch grow and there is no memory for it.
    fn set_back(&mut self, stepping: &[Id], conditions: &mut dyn Conditions) -> Option<Id> {
        let longest = stepping.iter().filter_map(|id| self.decoding.get(id)).map(|row| row.tokens).max()?;
        // A token may have been computed ahead.
        let grows = room(longest + 1) > room(longest.saturating_sub(1));
        let &id = self.decoding.keys().chain(self.prefilling.keys()).max()?;
        let alone = self.decoding.len() + self.prefilling.len() == 1;
        if !grows || alone || conditions.may_hold(id, self.padded(None)) {
            return None;
        }
        let tokens = self.decoding.remove(&id).map(|row| row.tokens).or_else(|| self.prefilling.remove(&id))?;
        self.waiting.insert(id, tokens);
        Some(id)
    }
}

/// The length of a slot that holds so many tokens.
fn room(tokens: usize) -> usize {
    usize::try_from(rounded(i32::try_from(tokens).unwrap_or(i32::MAX - 256))).unwrap_or(0)
}

/// The policy's state.
#[derive(Debug)]
pub(crate) struct Scheduler {
    sizes: Sizes,
    /// Where it is not the default.
    capacities: BTreeMap<Slot, usize>,
    lanes: BTreeMap<Slot, Lane>,
    models: BTreeMap<Id, Slot>,
    /// Models that have not made their decode step in this round.
    round: VecDeque<Slot>,
    last_bulk: Option<(Slot, Bulk)>,
    /// Decode steps decided.
    turn: u64,
}

impl Scheduler {
    pub(crate) fn new(sizes: Sizes) -> Self {
        let (capacities, lanes, models) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { sizes, capacities, lanes, models, round: VecDeque::new(), last_bulk: None, turn: 0 }
    }

    /// Rows of this model that generate at once, other than the default.
    pub(crate) fn set_capacity(&mut self, slot: Slot, rows: usize) {
        self.capacities.insert(slot, rows);
    }

    /// A model is gone.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.capacities.remove(&slot);
    }

    fn capacity(&self, slot: Slot) -> usize {
        self.capacities.get(&slot).copied().unwrap_or(self.sizes.capacity).max(1)
    }

    fn lane(&mut self, id: Id, slot: Slot) -> &mut Lane {
        self.models.insert(id, slot);
        self.lanes.entry(slot).or_default()
    }

    /// Adds a generation whose prompt has so many tokens.
    pub(crate) fn add_row(&mut self, id: Id, slot: Slot, prompt: usize) {
        self.lane(id, slot).waiting.insert(id, prompt);
    }

    /// Adds a scoring.
    pub(crate) fn add_scoring(&mut self, id: Id, slot: Slot) {
        self.lane(id, slot).scoring.insert(id);
    }

    /// Adds texts of these lengths in tokens.
    pub(crate) fn add_texts(&mut self, id: Id, slot: Slot, lengths: &[usize]) {
        self.lane(id, slot).texts.add(id, lengths);
    }

    /// A row's prompt is through: it decodes from now on.
    pub(crate) fn prefilled(&mut self, id: Id) {
        if let Some(lane) = self.models.get(&id).and_then(|slot| self.lanes.get_mut(slot))
            && let Some(tokens) = lane.prefilling.remove(&id)
        {
            lane.decoding.insert(id, Decoding { tokens: tokens + 1, turn: self.turn });
        }
    }

    /// A row has got another token.
    pub(crate) fn stepped(&mut self, id: Id) {
        if let Some(row) =
            self.models.get(&id).and_then(|slot| self.lanes.get_mut(slot)).and_then(|lane| lane.decoding.get_mut(&id))
        {
            row.tokens += 1;
        }
    }

    /// A request is over, in whatever state; unknown ones are ignored.
    pub(crate) fn remove(&mut self, id: Id) {
        let Some(slot) = self.models.remove(&id) else { return };
        let Some(lane) = self.lanes.get_mut(&slot) else { return };
        lane.waiting.remove(&id);
        lane.prefilling.remove(&id);
        lane.decoding.remove(&id);
        lane.scoring.remove(&id);
        lane.texts.remove(id);
        if lane.is_empty() {
            self.lanes.remove(&slot);
        }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    /// The next unit, `None` when nothing can move now.
    pub(crate) fn next(&mut self, conditions: &mut dyn Conditions) -> Option<Unit> {
        // Twice: what is left of this round and its bulk, then a whole round.
        for _ in 0..2 {
            while let Some(slot) = self.round.pop_front() {
                let capacity = self.capacity(slot);
                let Some(lane) = self.lanes.get_mut(&slot) else { continue };
                let mut rows: Vec<Id> = lane.decoding.keys().copied().filter(|&id| conditions.can_step(id)).collect();
                if rows.len() > capacity {
                    // Readers that were behind have come back: who waited longest goes first.
                    rows.sort_by_key(|id| (lane.decoding[id].turn, *id));
                    rows.truncate(capacity);
                    rows.sort();
                }
                if let Some(id) = lane.set_back(&rows, conditions) {
                    self.round.push_front(slot);
                    return Some(Unit::SetBack { id });
                }
                if !rows.is_empty() {
                    self.turn += 1;
                    for id in &rows {
                        if let Some(row) = lane.decoding.get_mut(id) {
                            row.turn = self.turn;
                        }
                    }
                    return Some(Unit::Decode { slot, rows });
                }
            }
            self.round.extend(self.lanes.iter().filter(|(_, lane)| !lane.decoding.is_empty()).map(|(slot, _)| *slot));
            if let Some(unit) = self.next_bulk(conditions) {
                return Some(unit);
            }
        }
        None
    }

    fn next_bulk(&mut self, conditions: &mut dyn Conditions) -> Option<Unit> {
        let kinds = [Bulk::Prefill, Bulk::Score, Bulk::Encode];
        let mut turns: Vec<(Slot, Bulk)> = self.lanes.keys().flat_map(|&slot| kinds.map(|kind| (slot, kind))).collect();
        // The one after the last served comes first.
        let begin = self.last_bulk.map_or(0, |last| turns.partition_point(|turn| *turn <= last));
        turns.rotate_left(begin);
        let streams = self.lanes.values().any(|lane| !lane.decoding.is_empty());
        for (slot, kind) in turns {
            let capacity = self.capacity(slot);
            let lane = self.lanes.get_mut(&slot)?;
            let unit = match kind {
                Bulk::Prefill => lane.next_prefill(capacity, conditions).map(|id| {
                    let chunk = if streams { self.sizes.chunk_beside } else { self.sizes.chunk };
                    Unit::Prefill { id, chunk }
                }),
                Bulk::Score => lane.scoring.first().map(|&id| Unit::Score { id }),
                Bulk::Encode => {
                    let items = lane.texts.take(&self.sizes);
                    if items.is_empty() { None } else { Some(Unit::Encode { slot, items }) }
                }
            };
            if unit.is_some() {
                self.last_bulk = Some((slot, kind));
                return unit;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
