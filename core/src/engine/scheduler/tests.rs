//! The promises of the policy, on random workloads: nobody starves, nothing waits longer than stated, limits hold.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// Everything is allowed, except what is listed.
#[derive(Default)]
struct Mock {
    stalled: BTreeSet<Id>,
    room: Option<usize>,
    asked: Vec<usize>,
}

impl Conditions for Mock {
    fn can_step(&mut self, id: Id) -> bool {
        !self.stalled.contains(&id)
    }

    fn may_hold(&mut self, _: Id, tokens: usize) -> bool {
        self.asked.push(tokens);
        self.room.is_none_or(|room| tokens <= room)
    }
}

fn scheduler() -> Scheduler {
    Scheduler::new(Sizes { capacity: 2, chunk: 512, chunk_beside: 128, batch_rows: 4, batch_slots: 100 })
}

fn decoding(scheduler: &mut Scheduler, id: u64, slot: u64) {
    scheduler.add_row(Id(id), Slot(slot), 10);
    let unit = scheduler.next(&mut Mock::default());
    assert!(matches!(unit, Some(Unit::Prefill { id: found, .. }) if found == Id(id)), "{unit:?}");
    scheduler.prefilled(Id(id));
}

#[test]
fn a_long_prompt_delays_streams_by_one_chunk_at_a_time() {
    let mut scheduler = scheduler();
    decoding(&mut scheduler, 1, 0);
    scheduler.add_row(Id(2), Slot(0), 100_000);
    let mut chunks = 0;
    for _ in 0..20 {
        match scheduler.next(&mut Mock::default()) {
            Some(Unit::Decode { .. }) => chunks = 0,
            Some(Unit::Prefill { chunk, .. }) => {
                chunks += 1;
                // A smaller chunk, because a stream waits for it.
                assert_eq!((chunks, chunk), (1, 128));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn several_models_take_turns_and_share_the_bulk() {
    let mut scheduler = scheduler();
    decoding(&mut scheduler, 1, 0);
    scheduler.add_row(Id(2), Slot(1), 10);
    while !matches!(scheduler.next(&mut Mock::default()), Some(Unit::Prefill { .. })) {}
    scheduler.prefilled(Id(2));
    scheduler.add_texts(Id(3), Slot(2), &[5; 100]);
    scheduler.add_scoring(Id(4), Slot(0));
    scheduler.add_row(Id(5), Slot(3), 4096);
    // The rest of a round that began without the second model.
    while !matches!(scheduler.next(&mut Mock::default()), Some(Unit::Decode { slot: Slot(1), .. })) {}
    let mut seen = Vec::new();
    for _ in 0..12 {
        seen.push(match scheduler.next(&mut Mock::default()) {
            Some(Unit::Decode { slot, .. }) => format!("decode {}", slot.0),
            Some(Unit::Prefill { .. }) => "prefill".to_owned(),
            Some(Unit::Score { .. }) => "score".to_owned(),
            Some(Unit::Encode { .. }) => "encode".to_owned(),
            other => panic!("{other:?}"),
        });
    }
    let decodes = |slot: u32| seen.iter().filter(|unit| **unit == format!("decode {slot}")).count();
    assert_eq!((decodes(0), decodes(1)), (4, 4), "{seen:?}");
    for bulk in ["prefill", "score", "encode"] {
        assert!(seen.iter().any(|unit| unit == bulk), "{bulk} starved: {seen:?}");
    }
}

#[test]
fn rows_start_in_the_order_of_the_calls_up_to_the_capacity() {
    let mut scheduler = scheduler();
    for id in [3, 1, 2] {
        scheduler.add_row(Id(id), Slot(0), 10);
    }
    for id in [1, 2] {
        while !matches!(scheduler.next(&mut Mock::default()), Some(Unit::Prefill { id: found, .. }) if found == Id(id)) {}
        scheduler.prefilled(Id(id));
    }
    for _ in 0..5 {
        assert_eq!(scheduler.next(&mut Mock::default()), Some(Unit::Decode { slot: Slot(0), rows: vec![Id(1), Id(2)] }));
    }
    scheduler.remove(Id(1));
    assert!((0..2).any(|_| matches!(scheduler.next(&mut Mock::default()), Some(Unit::Prefill { id: Id(3), .. }))));
}

#[test]
fn a_model_has_the_capacity_of_its_engine() {
    let mut scheduler = scheduler();
    scheduler.set_capacity(Slot(1), 1);
    for id in 1..=4 {
        scheduler.add_row(Id(id), Slot(id % 2), 10);
    }
    let mut began = Vec::new();
    for _ in 0..20 {
        if let Some(Unit::Prefill { id, .. }) = scheduler.next(&mut Mock::default()) {
            scheduler.prefilled(id);
            began.push(id.0);
        }
    }
    began.sort_unstable();
    assert_eq!(began, [1, 2, 4], "one row of the first model, two of the other");
    scheduler.forget(Slot(1));
    assert!((0..4).any(|_| matches!(scheduler.next(&mut Mock::default()), Some(Unit::Prefill { id: Id(3), .. }))));
}

#[test]
fn a_stalled_reader_holds_up_its_own_row_only() {
    let mut scheduler = scheduler();
    decoding(&mut scheduler, 1, 0);
    scheduler.add_row(Id(2), Slot(0), 10);
    while !matches!(scheduler.next(&mut Mock::default()), Some(Unit::Prefill { .. })) {}
    scheduler.prefilled(Id(2));
    let mut mock = Mock { stalled: [Id(1)].into(), ..Mock::default() };
    assert_eq!(scheduler.next(&mut mock), Some(Unit::Decode { slot: Slot(0), rows: vec![Id(2)] }));
    mock.stalled.insert(Id(2));
    assert_eq!(scheduler.next(&mut mock), None);
    mock.stalled.clear();
    assert_eq!(scheduler.next(&mut mock), Some(Unit::Decode { slot: Slot(0), rows: vec![Id(1), Id(2)] }));
}

#[test]
fn rows_with_readers_behind_take_no_place_and_share_the_capacity_when_they_are_back() {
    let mut scheduler = scheduler();
    let mut mock = Mock { stalled: [Id(1), Id(2)].into(), ..Mock::default() };
    for id in 1..=4 {
        scheduler.add_row(Id(id), Slot(0), 10);
        while !matches!(scheduler.next(&mut mock), Some(Unit::Prefill { id: found, .. }) if found == Id(id)) {}
        scheduler.prefilled(Id(id));
    }
    mock.stalled.clear();
    let mut steps = BTreeMap::new();
    for _ in 0..8 {
        let Some(Unit::Decode { rows, .. }) = scheduler.next(&mut mock) else { panic!("there are rows") };
        assert_eq!(rows.len(), 2);
        for id in rows {
            *steps.entry(id).or_insert(0) += 1;
        }
    }
    assert!(steps.len() == 4 && steps.values().all(|&steps| steps == 4), "{steps:?}");
}

#[test]
fn a_row_joins_when_its_padded_batch_fits_and_always_when_it_is_alone() {
    let mut scheduler = scheduler();
    let mut tight = Mock { room: Some(600), ..Mock::default() };
    scheduler.add_row(Id(1), Slot(0), 5000);
    assert!(matches!(scheduler.next(&mut tight), Some(Unit::Prefill { id: Id(1), .. })));
    scheduler.prefilled(Id(1));
    scheduler.add_row(Id(2), Slot(0), 10);
    assert_eq!(scheduler.next(&mut tight), Some(Unit::Decode { slot: Slot(0), rows: vec![Id(1)] }));
    // Two slots as long as the longer row.
    assert!(tight.asked.iter().all(|&tokens| tokens == 2 * 5120), "{:?}", tight.asked);
    tight.room = None;
    assert!((0..2).any(|_| matches!(scheduler.next(&mut tight), Some(Unit::Prefill { id: Id(2), .. }))));
}

#[test]
fn the_youngest_is_set_back_when_rows_outgrow_the_memory_and_comes_back_when_there_is_some() {
    let mut scheduler = scheduler();
    for id in [1, 2] {
        scheduler.add_row(Id(id), Slot(0), 250);
        while !matches!(scheduler.next(&mut Mock::default()), Some(Unit::Prefill { id: found, .. }) if found == Id(id)) {}
        scheduler.prefilled(Id(id));
    }
    // Two slots of 256 tokens fit, two of 512 do not.
    let mut tight = Mock { room: Some(600), ..Mock::default() };
    let mut steps = 0;
    let back = loop {
        match scheduler.next(&mut tight) {
            Some(Unit::Decode { rows, .. }) => {
                steps += 1;
                rows.into_iter().for_each(|id| scheduler.stepped(id));
            }
            unit => break unit,
        }
    };
    assert_eq!(back, Some(Unit::SetBack { id: Id(2) }));
    assert!((4..6).contains(&steps), "as long as a slot holds the next token and one computed ahead: {steps}");
    for _ in 0..300 {
        assert_eq!(scheduler.next(&mut tight), Some(Unit::Decode { slot: Slot(0), rows: vec![Id(1)] }), "the oldest goes on alone");
        scheduler.stepped(Id(1));
    }
    scheduler.remove(Id(1));
    assert!((0..2).any(|_| matches!(scheduler.next(&mut tight), Some(Unit::Prefill { id: Id(2), .. }))));
}

#[test]
fn a_text_over_the_slot_limit_goes_alone() {
    // Hazard I15: an input over the cap must not loop or be lost.
    let mut scheduler = scheduler();
    scheduler.add_texts(Id(1), Slot(0), &[10, 9000, 10]);
    let mut indices = || match scheduler.next(&mut Mock::default()) {
        Some(Unit::Encode { items, .. }) => items.iter().map(|item| item.index).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!((indices(), indices()), (vec![1], vec![0, 2]));
    scheduler.remove(Id(1));
    assert!(scheduler.is_empty() && scheduler.lanes.is_empty());
}

#[test]
fn callers_share_batches_and_the_oldest_always_moves() {
    let mut scheduler = scheduler();
    scheduler.add_texts(Id(1), Slot(0), &[3]);
    scheduler.add_texts(Id(2), Slot(0), &[20, 3, 2]);
    let Some(Unit::Encode { items, .. }) = scheduler.next(&mut Mock::default()) else { panic!("there is work") };
    let items: Vec<_> = items.iter().map(|item| (item.id.0, item.index)).collect();
    assert_eq!(items, [(1, 0), (2, 1), (2, 2)]);
}

#[derive(Debug, Clone)]
enum Step {
    Row { slot: u64, prompt: usize, tokens: usize },
    Texts { slot: u64, lengths: Vec<usize> },
    Score { slot: u64, steps: usize },
    Cancel(usize),
    Stall(usize),
    Work(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0u64..3, 1usize..2000, prop_oneof![1usize..6, 200usize..400]).prop_map(|(slot, prompt, tokens)| Step::Row {
            slot,
            prompt,
            tokens
        }),
        (0u64..3, prop::collection::vec(1usize..200, 1..12)).prop_map(|(slot, lengths)| Step::Texts { slot, lengths }),
        (0u64..3, 1usize..5).prop_map(|(slot, steps)| Step::Score { slot, steps }),
        any::<prop::sample::Index>().prop_map(|index| Step::Cancel(index.index(64))),
        any::<prop::sample::Index>().prop_map(|index| Step::Stall(index.index(64))),
        (1usize..12).prop_map(Step::Work),
    ];
    prop::collection::vec(step, 1..60)
}

/// A generation: prompt tokens and answer tokens to come, and all tokens so far.
struct WorldRow {
    slot: Slot,
    prompt: usize,
    answer: usize,
    tokens: usize,
    begun: bool,
}

/// What is left of each request, as an executor would know it.
#[derive(Default)]
struct World {
    rows: BTreeMap<Id, WorldRow>,
    texts: BTreeMap<Id, (Slot, BTreeMap<usize, usize>)>,
    scores: BTreeMap<Id, usize>,
    decoding: BTreeMap<Id, Slot>,
    mock: Mock,
    /// Decode steps of others and bulk units since a model's own last step.
    others: BTreeMap<Slot, usize>,
    bulk: BTreeMap<Slot, usize>,
}

impl World {
    fn run(&mut self, scheduler: &mut Scheduler, sizes: &Sizes) -> bool {
        let unit = scheduler.next(&mut self.mock);
        let Some(unit) = unit else { return false };
        let steppable: BTreeSet<Slot> =
            self.decoding.iter().filter(|(id, _)| !self.mock.stalled.contains(id)).map(|(_, slot)| *slot).collect();
        match &unit {
            Unit::Decode { slot, .. } => {
                for other in &steppable {
                    *self.others.entry(*other).or_default() += 1;
                }
                self.others.insert(*slot, 0);
                self.bulk.insert(*slot, 0);
            }
            Unit::SetBack { .. } => {}
            _ => {
                for slot in &steppable {
                    let bulk = self.bulk.entry(*slot).or_default();
                    *bulk += 1;
                    assert!(*bulk <= 1, "two bulk units between two steps of {slot:?}");
                }
            }
        }
        self.others.retain(|slot, _| steppable.contains(slot));
        self.bulk.retain(|slot, _| steppable.contains(slot));
        assert!(self.others.values().all(|&others| others <= 2 * 3), "a model waits for too many others: {:?}", self.others);
        match unit {
            Unit::Prefill { id, chunk } => {
                let row = self.rows.get_mut(&id).expect("a known row");
                assert!(row.prompt > 0 && chunk <= sizes.chunk);
                row.begun = true;
                row.prompt = row.prompt.saturating_sub(chunk);
                if row.prompt == 0 {
                    row.tokens += 1;
                    row.answer -= 1;
                    self.decoding.insert(id, row.slot);
                    scheduler.prefilled(id);
                    if row.answer == 0 {
                        self.end(scheduler, id);
                    }
                }
            }
            Unit::SetBack { id } => {
                let slot = self.rows[&id].slot;
                let begun: Vec<Id> = self.rows.iter().filter(|(_, row)| row.begun && row.slot == slot).map(|(id, _)| *id).collect();
                assert!(begun.len() > 1 && begun.last() == Some(&id), "not the youngest of several: {id:?} of {begun:?}");
                self.decoding.remove(&id);
                self.mock.stalled.remove(&id);
                let row = self.rows.get_mut(&id).expect("a known row");
                (row.prompt, row.begun) = (row.tokens, false);
            }
            Unit::Decode { slot, rows } => {
                assert!(!rows.is_empty() && rows.len() <= sizes.capacity);
                let begun = || self.rows.iter().filter(|(_, row)| row.begun && row.slot == slot);
                // Only the rows of this step get longer.
                let longest = begun().map(|(id, row)| row.tokens + usize::from(rows.contains(id))).max().expect("a row");
                let padded = begun().count() * longest.next_multiple_of(256);
                assert!(begun().count() == 1 || self.mock.room.is_none_or(|room| padded <= room), "{padded} tokens are held");
                for id in rows {
                    assert!(self.decoding.get(&id) == Some(&slot) && !self.mock.stalled.contains(&id));
                    let row = self.rows.get_mut(&id).expect("a known row");
                    row.answer -= 1;
                    row.tokens += 1;
                    scheduler.stepped(id);
                    if row.answer == 0 {
                        self.end(scheduler, id);
                    }
                }
            }
            Unit::Score { id } => {
                let left = self.scores.get_mut(&id).expect("a known scoring");
                *left -= 1;
                if *left == 0 {
                    self.end(scheduler, id);
                }
            }
            Unit::Encode { slot, items } => {
                let longest = items.iter().map(|item| self.texts[&item.id].1[&item.index]).max().expect("not empty");
                assert!(items.len() <= sizes.batch_rows && (items.len() == 1 || items.len() * longest <= sizes.batch_slots));
                let oldest = *self.texts.iter().find(|(_, (of, _))| *of == slot).expect("a request").0;
                assert!(items.iter().any(|item| item.id == oldest), "the oldest request did not move");
                for item in items {
                    let (of, texts) = self.texts.get_mut(&item.id).expect("a known request");
                    assert!(*of == slot && texts.remove(&item.index).is_some(), "a text twice, or of another model");
                    if texts.is_empty() {
                        self.end(scheduler, item.id);
                    }
                }
            }
        }
        true
    }

    fn end(&mut self, scheduler: &mut Scheduler, id: Id) {
        self.rows.remove(&id);
        self.texts.remove(&id);
        self.scores.remove(&id);
        self.decoding.remove(&id);
        self.mock.stalled.remove(&id);
        scheduler.remove(id);
    }

    fn ids(&self) -> Vec<Id> {
        self.rows.keys().chain(self.texts.keys()).chain(self.scores.keys()).copied().collect()
    }
}

proptest! {
    #[test]
    fn whatever_comes_everything_ends_and_no_promise_is_broken(
        steps in steps(), capacity in 1usize..4, room in prop::option::of(300usize..6000)
    ) {
        let sizes = Sizes { capacity, chunk: 512, chunk_beside: 128, batch_rows: 4, batch_slots: 300 };
        let mut scheduler = Scheduler::new(sizes);
        let mut world = World::default();
        world.mock.room = room;
        let mut next = 0;
        let mut id = || { next += 1; Id(next) };
        for step in steps {
            match step {
                Step::Row { slot, prompt, tokens } => {
                    let id = id();
                    world.rows.insert(id, WorldRow { slot: Slot(slot), prompt, answer: tokens, tokens: prompt, begun: false });
                    scheduler.add_row(id, Slot(slot), prompt);
                }
                Step::Texts { slot, lengths } => {
                    let id = id();
                    scheduler.add_texts(id, Slot(slot), &lengths);
                    world.texts.insert(id, (Slot(slot), lengths.into_iter().enumerate().collect()));
                }
                Step::Score { slot, steps } => {
                    let id = id();
                    world.scores.insert(id, steps);
                    scheduler.add_scoring(id, Slot(slot));
                }
                Step::Cancel(index) => {
                    let ids = world.ids();
                    if !ids.is_empty() {
                        world.end(&mut scheduler, ids[index % ids.len()]);
                    }
                }
                Step::Stall(index) => {
                    let ids: Vec<Id> = world.decoding.keys().copied().collect();
                    if !ids.is_empty() {
                        let id = ids[index % ids.len()];
                        if !world.mock.stalled.remove(&id) {
                            world.mock.stalled.insert(id);
                        }
                    }
                }
                Step::Work(units) => for _ in 0..units { world.run(&mut scheduler, &sizes); }
            }
        }
        world.mock.stalled.clear();
        for _ in 0..100_000 {
            if !world.run(&mut scheduler, &sizes) {
                break;
            }
        }
        prop_assert!(world.ids().is_empty(), "left behind: {:?}", world.ids());
        prop_assert!(scheduler.is_empty() && scheduler.lanes.is_empty());
    }
}
