//! A scripted device: models that take any number of bytes, answer what they are told to, and fail or block on demand.
//!
//! Everything above the owner thread runs on it unchanged and without MLX, so a host can test its own handling of errors, of
//! cancelled streams and of a full pool. Blocking is by gates, never by time: a test needs no sleep.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::chat_template::ChatTemplate;
use crate::engine::backend::{
    Backend, CacheBytes, Chooser, LoadProgress, Loaded, Prefill, Row, Slot, Stepping, Tenant, TokenBatch,
};
use crate::engine::{AllocatorLimits, DeviceInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{Estimate, ModelKind, ModelSpec, ScoreHead, SpecSource, Text};
use crate::pool::MemoryReading;
use crate::prompt_cache::PromptCache;
use crate::tokenizer::Tokenizer;

/// Tokens are bytes; this one ends a turn.
pub(crate) const END: u32 = 256;
/// Bytes and the end token.
pub(crate) const VOCABULARY: usize = 257;

/// A place where a fake device can be told to fail or to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Point {
    /// Before a load does anything.
    Load,
    /// After a load's last progress report.
    LoadEnd,
    /// Between two parts of a load.
    LoadStep,
    /// Before a chunk of a prompt.
    Prefill,
    /// Before the next token of a batch of rows.
    Step,
    /// Before a step of a scoring.
    Score,
    /// Before a batch of embeddings.
    Embed,
    /// Before a batch of pairs.
    Rerank,
    /// When a model is dropped.
    Unload,
    /// Before freed memory is returned.
    Drain,
}

/// What happens at a [`Point`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An error of this kind.
    Error(ErrorKind),
    /// A panic.
    Panic,
    /// The numbers of this row of the batch are not finite. Only [`Point::Step`], [`Point::Score`], [`Point::Embed`] and
    /// [`Point::Rerank`] have numbers; elsewhere nothing happens.
    NotFinite(usize),
}

/// A model of the fake device. Tokens are bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct FakeModel {
    /// The reference by which requests name it.
    pub name: String,
    /// What it is for.
    pub kind: ModelKind,
    /// Bytes it takes, estimated and real.
    pub bytes: u64,
    /// What a chat model answers, whatever it is asked.
    pub reply: String,
    /// Tokens it can attend to.
    pub context: usize,
    /// Width of an embedder's vectors.
    pub dimensions: usize,
    /// A chat model answers with its own rendered prompt, instead of `reply`.
    pub echo: bool,
    /// Bytes of keys and values of one token.
    pub kv_bytes_per_token: u64,
    /// Parts of its load: after each the running requests get their turn.
    pub load_parts: u16,
    /// The chat template; `None` is one line per message. Answers are read by the marks it holds.
    pub template: Option<String>,
}

impl FakeModel {
    /// A model that answers `Hello!`, with 4,096 tokens of context and vectors of 8 numbers.
    #[must_use]
    pub fn new(name: &str, kind: ModelKind, bytes: u64) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            bytes,
            reply: "Hello!".to_owned(),
            context: 4096,
            dimensions: 8,
            echo: false,
            kv_bytes_per_token: 0,
            load_parts: 4,
            template: None,
        }
    }

    pub(crate) fn spec(&self) -> ModelSpec {
        ModelSpec {
            id: self.name.clone(),
            kind: self.kind,
            family: "fake".to_owned(),
            vocabulary: VOCABULARY,
            context: self.context,
            max_input: self.context,
            estimate: Estimate { weights: self.bytes, kv_cache: 0, working: 0 },
            quantization: None,
            prompts: [("query".to_owned(), "query: ".to_owned())].into(),
            default_prompt: None,
            score_head: ScoreHead::Sigmoid,
            manifest: None,
            source: SpecSource::Fake(self.clone()),
        }
    }
}

const TEMPLATE: &str =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";

/// The text side of a fake model: each byte is a token.
pub(crate) fn text(model: &FakeModel) -> Result<Text> {
    let tokenizer = Tokenizer::bytes(END)?;
    let template = ChatTemplate::from_text(model.template.as_deref().unwrap_or(TEMPLATE), &tokenizer)?;
    Ok(Text { tokenizer, template: Some(template) })
}

/// What a fake allocator's limits are when no engine has set any.
const OWN_LIMITS: AllocatorLimits = AllocatorLimits { memory: 60 << 30, cache: 60 << 30 };

#[derive(Debug, Default)]
struct Controls {
    models: Vec<FakeModel>,
    faults: HashMap<Point, Vec<Fault>>,
    held: HashSet<Point>,
    /// Arrivals that a held point still lets through.
    passes: HashMap<Point, u64>,
    waiting: HashSet<Point>,
    reached: HashMap<Point, u64>,
    widest_batch: u64,
    active: u64,
    /// Bytes of keys and values.
    kv: u64,
    cache: u64,
    peak: u64,
    limits: Option<AllocatorLimits>,
}

#[derive(Debug, Default)]
struct Shared {
    controls: Mutex<Controls>,
    changed: Condvar,
}

/// The test's hand on a fake device; clones share it.
#[derive(Debug, Clone, Default)]
pub struct FakeDevice {
    shared: Arc<Shared>,
}

impl FakeDevice {
    /// A device that knows these models.
    #[must_use]
    pub fn new(models: Vec<FakeModel>) -> Self {
        let device = Self::default();
        device.shared.controls.lock().models = models;
        device
    }

    /// The next arrivals at `point` get `fault`, one each time this is called.
    pub fn fail_next(&self, point: Point, fault: Fault) {
        self.shared.controls.lock().faults.entry(point).or_default().push(fault);
    }

    /// Makes the device thread wait at `point` until [`release`](Self::release).
    pub fn hold(&self, point: Point) {
        self.shared.controls.lock().held.insert(point);
    }

    /// Lets the device thread go on from `point`.
    pub fn release(&self, point: Point) {
        let mut controls = self.shared.controls.lock();
        controls.held.remove(&point);
        controls.passes.remove(&point);
        controls.waiting.remove(&point);
        drop(controls);
        self.shared.changed.notify_all();
    }

    /// Lets the device thread go on from a held `point` once: it waits again at the next arrival.
    pub fn pass(&self, point: Point) {
        let mut controls = self.shared.controls.lock();
        *controls.passes.entry(point).or_default() += 1;
        controls.waiting.remove(&point);
        drop(controls);
        self.shared.changed.notify_all();
    }

    /// Blocks until the device thread waits at a held `point`.
    pub fn wait_until_held(&self, point: Point) {
        let mut controls = self.shared.controls.lock();
        while !controls.waiting.contains(&point) {
            self.shared.changed.wait(&mut controls);
        }
    }

    /// Whether the device thread waits at a held `point` now.
    #[must_use]
    pub fn is_held(&self, point: Point) -> bool {
        self.shared.controls.lock().waiting.contains(&point)
    }

    /// How often the device came to `point`.
    #[must_use]
    pub fn count(&self, point: Point) -> u64 {
        self.shared.controls.lock().reached.get(&point).copied().unwrap_or(0)
    }

    /// The most rows that one step has served.
    #[must_use]
    pub fn widest_batch(&self) -> u64 {
        self.shared.controls.lock().widest_batch
    }

    /// The fake allocator's bytes, read directly.
    #[must_use]
    pub fn memory(&self) -> MemoryReading {
        let controls = self.shared.controls.lock();
        MemoryReading { active: controls.active + controls.kv, cache: controls.cache, peak: controls.peak, available: None }
    }

    /// The fake allocator's limits as engines set them (its own are 60 GiB, in a machine of 64). It enforces neither.
    #[must_use]
    pub fn limits(&self) -> AllocatorLimits {
        self.shared.controls.lock().limits.unwrap_or(OWN_LIMITS)
    }

    pub(crate) fn find(&self, reference: &str) -> Result<ModelSpec> {
        let controls = self.shared.controls.lock();
        match controls.models.iter().find(|model| model.name == reference) {
            Some(model) => Ok(model.spec()),
            None => Err(Error::new(ErrorKind::NotFound, format!("{reference}: the fake device has no such model"))),
        }
    }

    /// Counts the arrival, waits while held, then fails if told to; `Some` is a row whose numbers are to be spoilt.
    fn at(&self, point: Point) -> Result<Option<usize>> {
        let mut controls = self.shared.controls.lock();
        *controls.reached.entry(point).or_default() += 1;
        while controls.held.contains(&point) {
            if let Some(left) = controls.passes.get_mut(&point).filter(|left| **left > 0) {
                *left -= 1;
                break;
            }
            controls.waiting.insert(point);
            self.shared.changed.notify_all();
            self.shared.changed.wait(&mut controls);
        }
        controls.waiting.remove(&point);
        let faults = controls.faults.entry(point).or_default();
        let fault = if faults.is_empty() { None } else { Some(faults.remove(0)) };
        drop(controls);
        match fault {
            None => Ok(None),
            Some(Fault::NotFinite(row)) => Ok(Some(row)),
            Some(Fault::Error(kind)) => Err(Error::new(kind, format!("scripted failure at {point:?}"))),
            #[allow(clippy::panic)] // the script asks for it
            Some(Fault::Panic) => panic!("scripted panic at {point:?}"),
        }
    }
}

#[derive(Debug, Clone)]
struct RowState {
    slot: Slot,
    /// The prompt and what was said since.
    tokens: Vec<u32>,
    prompt: usize,
    /// Tokens that go in by `prefill`: the prompt, and what was said before the row was set back.
    due: usize,
    done: usize,
}

/// The fake's side on the owner thread.
pub(crate) struct FakeBackend {
    device: FakeDevice,
    models: HashMap<Slot, FakeModel>,
    rows: HashMap<Row, RowState>,
    kept: PromptCache<Slot, ()>,
    last_id: u64,
}

impl FakeBackend {
    pub(crate) fn new(device: FakeDevice) -> Self {
        Self { device, models: HashMap::new(), rows: HashMap::new(), kept: PromptCache::new(), last_id: 0 }
    }

    fn id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Has the allocator hold what rows and kept prompts hold now.
    fn count_kv(&mut self) {
        let kv: u64 = self.models.keys().map(|&slot| self.cache_bytes(slot).total()).sum();
        let mut controls = self.device.shared.controls.lock();
        // What goes stays with the allocator, and what comes is taken from there first.
        controls.cache = (controls.cache + controls.kv).saturating_sub(kv);
        controls.kv = kv;
        controls.peak = controls.peak.max(controls.active + kv);
    }

    fn model(&self, slot: Slot) -> Result<&FakeModel> {
        self.models
            .get(&slot)
            .ok_or_else(|| Error::new(ErrorKind::Closed, "the model was unloaded while the request was on its way"))
    }

    /// The next byte of the model's reply, or what the chooser makes of logits that favour it.
    fn next_token(&mut self, row: Row, chooser: &mut dyn Chooser) -> Result<u32> {
        let state = self.rows.get(&row).ok_or_else(|| Error::internal("a step of a row that has ended"))?;
        let said = state.tokens.len() - state.prompt;
        let model = self.model(state.slot)?;
        // An echo says the prompt again: what a row says then depends on its own prompt alone.
        let wanted = if model.echo {
            state.tokens[..state.prompt].get(said).copied().unwrap_or(END)
        } else {
            model.reply.as_bytes().get(said).map_or(END, |&byte| u32::from(byte))
        };
        let token = if chooser.is_greedy() {
            wanted
        } else {
            let logits: Vec<f32> = (0..).take(VOCABULARY).map(|id| if id == wanted { 20.0 } else { 0.0 }).collect();
            chooser.choose(&logits)?
        };
        if let Some(state) = self.rows.get_mut(&row) {
            state.tokens.push(token);
        }
        Ok(token)
    }
}

impl Backend for FakeBackend {
    fn device(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "fake",
            name: "scripted".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            recommended_bytes: None,
        }
    }

    fn memory(&self) -> MemoryReading {
        self.device.memory()
    }

    fn limits(&mut self) -> Result<AllocatorLimits> {
        Ok(self.device.limits())
    }

    fn set_limits(&mut self, limits: AllocatorLimits) -> Result<()> {
        self.device.shared.controls.lock().limits = Some(limits);
        Ok(())
    }

    fn drain(&mut self) -> Result<()> {
        self.device.at(Point::Drain)?;
        self.device.shared.controls.lock().cache = 0;
        Ok(())
    }

    fn load(&mut self, spec: &ModelSpec, progress: LoadProgress<'_>) -> Result<Loaded> {
        let SpecSource::Fake(model) = &spec.source else { return Err(Error::internal("a real model on a fake device")) };
        self.device.at(Point::Load)?;
        let parts = model.load_parts.max(1);
        for part in 0..=parts {
            self.device.at(Point::LoadStep)?;
            progress(self, f32::from(part) / f32::from(parts))?;
        }
        self.device.at(Point::LoadEnd)?;
        let slot = Slot(self.id());
        self.models.insert(slot, model.clone());
        let mut controls = self.device.shared.controls.lock();
        controls.active += model.bytes;
        controls.peak = controls.peak.max(controls.active + controls.kv);
        Ok(Loaded { slot, weight_bytes: model.bytes })
    }

    fn unload(&mut self, slot: Slot) {
        // A release must get through whatever happens at the point: the script's fault shows as a panic of the job.
        let fault = self.device.at(Point::Unload);
        if let Some(model) = self.models.remove(&slot) {
            let mut controls = self.device.shared.controls.lock();
            controls.active -= model.bytes;
            controls.cache += model.bytes;
        }
        self.kept.remove(slot);
        self.count_kv();
        drop(fault);
    }

    fn begin(&mut self, slot: Slot, prompt: Vec<u32>, reuse: bool) -> Result<(Row, usize)> {
        if self.model(slot)?.kind != ModelKind::Chat {
            return Err(Error::unsupported("this model does not generate text"));
        }
        if prompt.is_empty() {
            return Err(Error::internal("a row without a prompt"));
        }
        let row = Row(self.id());
        let cached = if reuse { self.kept.find(slot, &prompt).map_or(0, |(_, shared)| shared) } else { 0 };
        self.rows.insert(row, RowState { slot, prompt: prompt.len(), due: prompt.len(), tokens: prompt, done: cached });
        self.count_kv();
        Ok((row, cached))
    }

    fn prefill(&mut self, row: Row, chunk: usize, chooser: &mut dyn Chooser) -> Result<Prefill> {
        self.device.at(Point::Prefill)?;
        let state = self.rows.get_mut(&row).ok_or_else(|| Error::internal("a step of a row that has ended"))?;
        state.done = (state.done + chunk.max(1)).min(state.due);
        if state.done < state.due {
            return Ok(Prefill::Chunk(state.done));
        }
        self.next_token(row, chooser).map(Prefill::Token)
    }

    fn decode(&mut self, slot: Slot, rows: &mut [Stepping<'_>]) -> Result<()> {
        let spoilt = self.device.at(Point::Step)?;
        let batch: u64 = rows.len() as u64;
        let mut controls = self.device.shared.controls.lock();
        controls.widest_batch = controls.widest_batch.max(batch);
        drop(controls);
        for (index, step) in rows.iter_mut().enumerate() {
            if self.rows.get(&step.row).is_none_or(|row| row.slot != slot) {
                return Err(Error::internal("a step of a row of another model"));
            }
            step.token = Some(match spoilt {
                Some(row) if row == index => Err(Error::new(ErrorKind::Backend, "the model produced logits that are not finite")),
                _ => self.next_token(step.row, step.chooser),
            });
        }
        self.count_kv();
        Ok(())
    }

    fn set_back(&mut self, row: Row) -> Result<()> {
        let state = self.rows.get_mut(&row).ok_or_else(|| Error::internal("setting back a row that has ended"))?;
        (state.due, state.done) = (state.tokens.len(), 0);
        self.count_kv();
        Ok(())
    }

    fn fork(&mut self, row: Row) -> Result<Row> {
        let state = self.rows.get(&row).ok_or_else(|| Error::internal("a fork of a row that has ended"))?.clone();
        let row = Row(self.id());
        self.rows.insert(row, state);
        self.count_kv();
        Ok(row)
    }

    fn score(&mut self, row: Row, ids: &[u32]) -> Result<Vec<f32>> {
        let spoilt = self.device.at(Point::Score)?;
        if !self.rows.contains_key(&row) {
            return Err(Error::internal("a step of a row that has ended"));
        }
        // The lower the byte, the likelier.
        let logprob = |&id: &u32| -f32::from(u16::try_from(id).unwrap_or(u16::MAX)) / 256.0;
        let mut scores: Vec<f32> = ids[1..].iter().map(logprob).collect();
        if spoilt.is_some() {
            scores.fill(f32::NAN);
        }
        Ok(scores)
    }

    fn extend(&mut self, row: Row, _: &[u32]) -> Result<()> {
        self.device.at(Point::Prefill)?;
        let state = self.rows.get_mut(&row).ok_or_else(|| Error::internal("a step of a row that has ended"))?;
        state.done = state.due;
        self.count_kv();
        Ok(())
    }

    fn end(&mut self, row: Row, keep: bool) {
        if let Some(state) = self.rows.remove(&row)
            && keep
        {
            let each = self.models.get(&state.slot).map_or(0, |model| model.kv_bytes_per_token);
            // A limit in bytes limits models without any too.
            let bytes = each.max(1) * state.tokens.len() as u64;
            self.kept.insert(state.slot, state.tokens, (), bytes);
        }
        self.count_kv();
    }

    fn cache_bytes(&self, slot: Slot) -> CacheBytes {
        let held = |row: &RowState| if row.done < row.due { row.done } else { row.tokens.len() };
        let rows = self.rows.values().filter(|row| row.slot == slot).map(|row| held(row) as u64);
        let each = self.models.get(&slot).map_or(0, |model| model.kv_bytes_per_token);
        CacheBytes { rows: each * rows.sum::<u64>(), kept: if each > 0 { self.kept.bytes(slot) } else { 0 } }
    }

    fn forget_prompt(&mut self, slot: Slot) -> bool {
        let gone = self.kept.pop(slot);
        self.count_kv();
        gone
    }

    fn keep_prompts(&mut self, slot: Slot, tenant: &Tenant) {
        self.kept.add(slot, tenant.id, tenant.prompt_cache);
    }

    #[cfg(test)]
    fn logits(&mut self, slot: Slot, ids: &[u32], from: usize) -> Result<Vec<Vec<f32>>> {
        self.model(slot)?;
        Ok(ids[from..].iter().map(|_| vec![0.0; VOCABULARY]).collect())
    }

    fn embed(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
        let spoilt = self.device.at(Point::Embed)?;
        let width = self.model(slot)?.dimensions;
        // A byte histogram folded to the width: equal texts get equal vectors, similar ones similar vectors.
        let vector = |ids: &Vec<u32>| {
            let mut vector = vec![0f32; width];
            for &id in ids {
                vector[id as usize % width] += 1.0;
            }
            vector
        };
        Ok(spoil(batch.ids.iter().map(vector).collect(), spoilt))
    }

    fn classify(&mut self, slot: Slot, batch: &TokenBatch) -> Result<Vec<Vec<f32>>> {
        let spoilt = self.device.at(Point::Rerank)?;
        self.model(slot)?;
        // The share of the document's bytes that occur in the query, from -4 to 4.
        let logit = |(ids, types): (&Vec<u32>, &Vec<u32>)| {
            let (query, document): (Vec<_>, Vec<_>) = ids.iter().zip(types).partition(|(_, segment)| **segment == 0);
            let query: HashSet<u32> = query.into_iter().map(|(id, _)| *id).collect();
            let (mut shared, mut all) = (0u16, 0u16);
            for (id, _) in document {
                all = all.saturating_add(1);
                shared = shared.saturating_add(u16::from(query.contains(id)));
            }
            vec![8.0 * f32::from(shared) / f32::from(all.max(1)) - 4.0]
        };
        Ok(spoil(batch.ids.iter().zip(&batch.types).map(logit).collect(), spoilt))
    }
}

fn spoil(mut rows: Vec<Vec<f32>>, spoilt: Option<usize>) -> Vec<Vec<f32>> {
    if let Some(row) = spoilt.and_then(|row| rows.get_mut(row)) {
        row.fill(f32::NAN);
    }
    rows
}
