//! The requests the owner thread has in hand: carries out what the scheduler decides, unit by unit, and ends what is over.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::backend::{Backend, CacheBytes, Chooser, Prefill, Row, Slot, Stepping, TokenBatch};
use super::scheduler::{Conditions, Id, Item, Scheduler, Sizes, Unit};
use super::thread::panic_error;
use crate::error::{Error, Result};

/// Why a request ended without an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Everything asked for is done; for a generation: an end-of-turn token or a stop string.
    Stop,
    /// `max_tokens` reached.
    Length,
    /// The model's context is full.
    Context,
    /// Cancelled, out of time, or abandoned.
    Interrupted,
}

/// A request on the owner thread. Called there only, and must not block.
pub(crate) trait Request: Send {
    fn slot(&self) -> Slot;
    /// Why the request must end now (cancelled, timed out, nobody listens), looked at between all units.
    fn interrupted(&self) -> Option<Ending>;
    /// The first unit is about to run.
    fn begun(&mut self);
    /// Who keeps the account of its model's keys and values; `None` when it holds none on the device.
    fn account(&self) -> Option<Tell>;
    /// The terminal event. What the request held on the device is already back.
    fn finish(self: Box<Self>, ending: Result<Ending>);
}

/// A generation.
pub(crate) trait Generating: Request + Chooser {
    /// Tokens of the prompt.
    fn prompt_tokens(&self) -> usize;
    /// The prompt's token ids, given once.
    fn take_prompt(&mut self) -> Vec<u32>;
    /// Whether kept prompts may serve it, and its own may be kept.
    fn keeps_prompt(&self) -> bool;
    /// So many tokens of the prompt need not be computed.
    fn on_cached(&mut self, tokens: usize);
    /// Whether the reader has room; a row without it is passed over and keeps its place.
    fn has_room(&self) -> bool;
    /// Whether there is memory for so many tokens of keys and values of its model, which holds so much now.
    fn may_hold(&self, tokens: usize, held: CacheBytes) -> bool;
    /// Takes a token; `Some` ends the row.
    fn on_token(&mut self, token: u32) -> Result<Option<Ending>>;
}

/// Told when the bytes of a model's keys and values have changed.
pub(crate) type Tell = Arc<dyn Fn(u64) + Send + Sync>;

/// What a batch of texts is computed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Embed,
    Classify,
}

/// Texts to embed or to rank.
pub(crate) trait Encoder: Request {
    fn kind(&self) -> Encoding;
    /// Tokens of each text.
    fn lengths(&self) -> Vec<usize>;
    /// The ids and segment ids of one text, taken once.
    fn take(&mut self, index: usize) -> (Vec<u32>, Vec<u32>);
    /// Takes the numbers of one text; true when all are there.
    fn on_row(&mut self, index: usize, row: Vec<f32>) -> Result<bool>;
}

/// A scoring: it knows its own steps.
pub(crate) trait Scoring: Request {
    /// One step; `Some` ends it.
    fn step(&mut self, backend: &mut dyn Backend) -> Result<Option<Ending>>;
    /// Gives back what the steps hold on the device.
    fn release(&mut self, backend: &mut dyn Backend);
}

/// Work as it arrives.
pub(crate) enum Task {
    Generate(Box<dyn Generating>),
    Encode(Box<dyn Encoder>),
    Score(Box<dyn Scoring>),
}

impl Task {
    fn request(&self) -> &dyn Request {
        match self {
            Self::Generate(task) => task.as_ref(),
            Self::Encode(task) => task.as_ref(),
            Self::Score(task) => task.as_ref(),
        }
    }

    fn request_mut(&mut self) -> &mut dyn Request {
        match self {
            Self::Generate(task) => task.as_mut(),
            Self::Encode(task) => task.as_mut(),
            Self::Score(task) => task.as_mut(),
        }
    }

    /// Delivers the terminal event. A panic in it must not take the thread along.
    pub(crate) fn finish(self, ending: Result<Ending>) {
        let request: Box<dyn Request> = match self {
            Self::Generate(task) => task,
            Self::Encode(task) => task,
            Self::Score(task) => task,
        };
        let _ = catch_unwind(AssertUnwindSafe(|| request.finish(ending)));
    }
}

struct Active {
    task: Task,
    /// A generation that has begun.
    row: Option<Row>,
    begun: bool,
}

/// A chooser whose panics end its own row, not the batch.
struct Guarded<'a>(&'a mut dyn Generating);

impl Chooser for Guarded<'_> {
    fn is_greedy(&self) -> bool {
        self.0.is_greedy()
    }

    fn is_last(&self) -> bool {
        self.0.is_last()
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        guarded("choosing a token", || self.0.choose(logits))
    }
}

fn guarded<T>(what: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panic_error(what, &*panic)))
}

struct RowConditions<'a> {
    active: &'a HashMap<Id, Active>,
    accounts: &'a mut HashMap<Slot, Account>,
    backend: &'a mut dyn Backend,
}

impl<'a> RowConditions<'a> {
    fn row(&self, id: Id) -> Option<&'a dyn Generating> {
        match self.active.get(&id).map(|active| &active.task) {
            Some(Task::Generate(task)) => Some(task.as_ref()),
            _ => None,
        }
    }
}

impl Conditions for RowConditions<'_> {
    fn can_step(&mut self, id: Id) -> bool {
        self.row(id).is_some_and(Generating::has_room)
    }

    fn may_hold(&mut self, id: Id, tokens: usize) -> bool {
        let Some(row) = self.row(id) else { return true };
        let slot = row.slot();
        let held = self.backend.cache_bytes(slot);
        if row.may_hold(tokens, held) {
            return true;
        }
        // What might serve a later prompt gives way to what runs now, if that helps. Until the account is told, it still counts as held.
        let beside = |kept: u64| CacheBytes { rows: held.total().saturating_sub(kept), kept };
        if held.kept == 0 || !row.may_hold(tokens, beside(0)) {
            return false;
        }
        while !row.may_hold(tokens, beside(self.backend.cache_bytes(slot).kept)) && self.backend.forget_prompt(slot) {}
        settle(self.accounts, self.backend, slot);
        true
    }
}

/// Who is told of a model's keys and values, and what was told last.
struct Account {
    tell: Tell,
    bytes: u64,
}

/// The scheduler and the requests it decides about.
pub(super) struct Work {
    scheduler: Scheduler,
    active: HashMap<Id, Active>,
    accounts: HashMap<Slot, Account>,
}

impl Work {
    pub(super) fn new() -> Self {
        Self { scheduler: Scheduler::new(Sizes::default()), active: HashMap::new(), accounts: HashMap::new() }
    }

    pub(super) fn set_capacity(&mut self, slot: Slot, rows: usize) {
        self.scheduler.set_capacity(slot, rows);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    pub(super) fn add(&mut self, id: Id, task: Task) {
        let slot = task.request().slot();
        if !self.accounts.contains_key(&slot)
            && let Some(tell) = task.request().account()
        {
            self.accounts.insert(slot, Account { tell, bytes: 0 });
        }
        match &task {
            Task::Generate(row) => self.scheduler.add_row(id, slot, row.prompt_tokens()),
            Task::Encode(texts) => self.scheduler.add_texts(id, slot, &texts.lengths()),
            Task::Score(_) => self.scheduler.add_scoring(id, slot),
        }
        self.active.insert(id, Active { task, row: None, begun: false });
    }

    /// Ends what is over, then runs one unit; false when nothing can move.
    pub(super) fn turn(&mut self, backend: &mut dyn Backend) -> bool {
        let over = |(id, active): (&Id, &Active)| active.task.request().interrupted().map(|ending| (*id, ending));
        let mut over: Vec<_> = self.active.iter().filter_map(over).collect();
        let ended = !over.is_empty();
        over.sort_by_key(|(id, _)| *id);
        for (id, ending) in over {
            self.finish(backend, id, Ok(ending));
        }
        let mut conditions = RowConditions { active: &self.active, accounts: &mut self.accounts, backend };
        let Some(unit) = self.scheduler.next(&mut conditions) else { return ended };
        match unit {
            Unit::Decode { slot, rows } => self.decode(backend, slot, &rows),
            Unit::SetBack { id } => self.set_back(backend, id),
            Unit::Prefill { id, chunk } => self.prefill(backend, id, chunk),
            Unit::Score { id } => self.score(backend, id),
            Unit::Encode { slot, items } => self.encode(backend, slot, &items),
        }
        true
    }

    /// Ends everything.
    pub(super) fn shut_down(&mut self, backend: &mut dyn Backend, error: &Error) {
        let mut ids: Vec<Id> = self.active.keys().copied().collect();
        ids.sort();
        for id in ids {
            self.finish(backend, id, Err(error.clone()));
        }
    }

    /// A model is gone: nothing is known of it any more.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.accounts.remove(&slot);
        self.scheduler.forget(slot);
    }

    fn begun(&mut self, id: Id) {
        let Some(active) = self.active.get_mut(&id) else { return };
        if !std::mem::replace(&mut active.begun, true) {
            active.task.request_mut().begun();
        }
    }

    fn prefill(&mut self, backend: &mut dyn Backend, id: Id, chunk: usize) {
        self.begun(id);
        let Some(Active { task: Task::Generate(task), row, .. }) = self.active.get_mut(&id) else { return };
        let slot = task.slot();
        let step = guarded("a prompt step", || {
            let row = match *row {
                Some(row) => row,
                None => {
                    let (begun, cached) = backend.begin(slot, task.take_prompt(), task.keeps_prompt())?;
                    *row = Some(begun);
                    task.on_cached(cached);
                    begun
                }
            };
            backend.prefill(row, chunk, &mut Guarded(task.as_mut()))
        });
        match step {
            Ok(Prefill::Chunk(_)) => self.settle(backend, slot),
            Ok(Prefill::Token(token)) => {
                self.scheduler.prefilled(id);
                self.settle(backend, slot);
                self.take_token(backend, id, Ok(token));
            }
            Err(error) => self.finish(backend, id, Err(error)),
        }
    }

    fn set_back(&mut self, backend: &mut dyn Backend, id: Id) {
        let Some(Active { task, row: Some(row), .. }) = self.active.get(&id) else { return };
        let (slot, row) = (task.request().slot(), *row);
        match guarded("setting a row back", || backend.set_back(row)) {
            Ok(()) => self.settle(backend, slot),
            Err(error) => self.finish(backend, id, Err(error)),
        }
    }

    fn decode(&mut self, backend: &mut dyn Backend, slot: Slot, ids: &[Id]) {
        let mut choosers = Vec::with_capacity(ids.len());
        for (id, active) in &mut self.active {
            if let (true, Active { task: Task::Generate(task), row: Some(row), .. }) = (ids.contains(id), active) {
                choosers.push((*id, *row, Guarded(task.as_mut())));
            }
        }
        choosers.sort_by_key(|(id, ..)| *id);
        let mut stepping: Vec<Stepping<'_>> =
            choosers.iter_mut().map(|(_, row, chooser)| Stepping { row: *row, chooser, token: None }).collect();
        let step = guarded("a generation step", || backend.decode(slot, &mut stepping));
        let tokens: Vec<Option<Result<u32>>> = stepping.into_iter().map(|step| step.token).collect();
        let ids: Vec<Id> = choosers.into_iter().map(|(id, ..)| id).collect();
        self.settle(backend, slot);
        for (id, token) in ids.into_iter().zip(tokens) {
            match (&step, token) {
                (Err(error), _) => self.finish(backend, id, Err(error.clone())),
                (Ok(()), Some(token)) => {
                    self.scheduler.stepped(id);
                    self.take_token(backend, id, token);
                }
                (Ok(()), None) => {}
            }
        }
    }

    fn take_token(&mut self, backend: &mut dyn Backend, id: Id, token: Result<u32>) {
        let Some(Active { task: Task::Generate(task), .. }) = self.active.get_mut(&id) else { return };
        match token.and_then(|token| guarded("taking a token", || task.on_token(token))) {
            Ok(None) => {}
            Ok(Some(ending)) => self.finish(backend, id, Ok(ending)),
            Err(error) => self.finish(backend, id, Err(error)),
        }
    }

    fn score(&mut self, backend: &mut dyn Backend, id: Id) {
        self.begun(id);
        let Some(Active { task: Task::Score(task), .. }) = self.active.get_mut(&id) else { return };
        let slot = task.slot();
        match guarded("scoring", || task.step(backend)) {
            Ok(None) => self.settle(backend, slot),
            Ok(Some(ending)) => self.finish(backend, id, Ok(ending)),
            Err(error) => self.finish(backend, id, Err(error)),
        }
    }

    fn encode(&mut self, backend: &mut dyn Backend, slot: Slot, items: &[Item]) {
        let mut batch = TokenBatch::default();
        let mut kind = Encoding::Embed;
        for item in items {
            self.begun(item.id);
            let Some(Active { task: Task::Encode(task), .. }) = self.active.get_mut(&item.id) else { return };
            let (ids, types) = task.take(item.index);
            batch.ids.push(ids);
            batch.types.push(types);
            kind = task.kind();
        }
        self.compute(backend, slot, kind, items, &batch);
    }

    /// Computes a batch and hands its rows out. One that fails and holds texts of several requests is computed again request by
    /// request, so that each is answered for its own texts.
    fn compute(&mut self, backend: &mut dyn Backend, slot: Slot, kind: Encoding, items: &[Item], batch: &TokenBatch) {
        let rows = guarded("a batch", || match kind {
            Encoding::Embed => backend.embed(slot, batch),
            Encoding::Classify => backend.classify(slot, batch),
        });
        let rows = rows.and_then(|rows| {
            let whole = rows.len() == items.len();
            if whole { Ok(rows) } else { Err(Error::internal("a batch came back with other rows than it went")) }
        });
        let ids: BTreeSet<Id> = items.iter().map(|item| item.id).collect();
        let rows = match rows {
            Ok(rows) => rows,
            Err(error) if ids.len() == 1 => return items.iter().for_each(|item| self.finish(backend, item.id, Err(error.clone()))),
            Err(_) => {
                for id in ids {
                    let own = || items.iter().enumerate().filter(|(_, item)| item.id == id);
                    let part = |all: &[Vec<u32>]| own().filter_map(|(at, _)| all.get(at).cloned()).collect();
                    let batch = TokenBatch { ids: part(&batch.ids), types: part(&batch.types) };
                    let items: Vec<Item> = own().map(|(_, item)| *item).collect();
                    self.compute(backend, slot, kind, &items, &batch);
                }
                return;
            }
        };
        for (item, row) in items.iter().zip(rows) {
            let Some(Active { task: Task::Encode(task), .. }) = self.active.get_mut(&item.id) else { continue };
            match guarded("taking a row", || task.on_row(item.index, row)) {
                Ok(false) => {}
                Ok(true) => self.finish(backend, item.id, Ok(Ending::Stop)),
                Err(error) => self.finish(backend, item.id, Err(error)),
            }
        }
    }

    /// Gives back what the request held on the device, then delivers the terminal event.
    fn finish(&mut self, backend: &mut dyn Backend, id: Id, ending: Result<Ending>) {
        self.scheduler.remove(id);
        let Some(mut active) = self.active.remove(&id) else { return };
        let slot = active.task.request().slot();
        if let Some(row) = active.row {
            // What a failed row computed is not to be trusted.
            let keep = ending.is_ok() && matches!(&active.task, Task::Generate(task) if task.keeps_prompt());
            let _ = catch_unwind(AssertUnwindSafe(|| backend.end(row, keep)));
            // What is kept of it may have made other models' kept prompts go.
            let slots: Vec<Slot> = self.accounts.keys().copied().collect();
            slots.into_iter().for_each(|slot| self.settle(backend, slot));
        }
        if let Task::Score(task) = &mut active.task {
            let _ = catch_unwind(AssertUnwindSafe(|| task.release(backend)));
            self.settle(backend, slot);
        }
        active.task.finish(ending);
    }

    fn settle(&mut self, backend: &dyn Backend, slot: Slot) {
        settle(&mut self.accounts, backend, slot);
    }
}

/// Tells the account what the model's keys and values take now.
fn settle(accounts: &mut HashMap<Slot, Account>, backend: &dyn Backend, slot: Slot) {
    let Some(account) = accounts.get_mut(&slot) else { return };
    let bytes = backend.cache_bytes(slot).total();
    if bytes != account.bytes {
        account.bytes = bytes;
        let tell = Arc::clone(&account.tell);
        let _ = catch_unwind(AssertUnwindSafe(|| tell(bytes)));
    }
}
