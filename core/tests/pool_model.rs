//! Random sequences of every operation against a reference model that is written for plainness: it sorts, scans and sums
//! afresh at each step. After every step the account equals what is held, the budget is kept (but for the exceptions the
//! model names), the victims are the least recently used of the eligible, and every caller has the answer the model gives.
#![cfg(not(feature = "shuttle"))]
#![allow(clippy::unwrap_used, clippy::panic)]

mod pool_support;
use hob::pool::{Admission, Admitted, ExternalCharge, IdlePolicy, Key, Lease, NoRoom};
use hob::{ErrorKind, Result};
use pool_support::*;
use proptest::prelude::*;

const KEYS: usize = 6;

#[derive(Debug, Clone)]
enum Op {
    Admit {
        key: usize,
        cost: u64,
        in_use: bool,
        pinned: bool,
        replace: bool,
        no_room: NoRoom,
        idle: IdlePolicy,
        fails: bool,
    },
    Begin(usize),
    End(usize),
    /// Begins (of a key) and ends (of a lease), with nobody looking at the pool in between.
    Burst(Vec<(bool, usize)>),
    Leave(usize),
    Forget(usize),
    Evict {
        key: usize,
        force: bool,
    },
    Pin(usize),
    Unpin(usize),
    Touch(usize),
    SetBudget(u64),
    Trim,
    MakeRoom(u64),
    External(u64),
    Measured {
        key: usize,
        bytes: u64,
    },
    Advance(u64),
    Sweep,
}

fn no_room() -> impl Strategy<Value = NoRoom> {
    prop_oneof![4 => Just(NoRoom::Wait), 2 => Just(NoRoom::Refuse), 1 => Just(NoRoom::LoadAnyway)]
}

fn idle() -> impl Strategy<Value = IdlePolicy> {
    prop_oneof![3 => Just(IdlePolicy::Never), 1 => Just(IdlePolicy::Immediately), 3 => (30u32..200).prop_map(IdlePolicy::AfterSeconds)]
}

fn op() -> impl Strategy<Value = Op> {
    let admit = (
        0..KEYS,
        0u64..130,
        any::<bool>(),
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.15),
        no_room(),
        idle(),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(key, cost, in_use, pinned, replace, no_room, idle, fails)| Op::Admit {
            key,
            cost,
            in_use,
            pinned,
            replace,
            no_room,
            idle,
            fails,
        });
    prop_oneof![
        10 => admit,
        3 => (0..KEYS).prop_map(Op::Begin),
        6 => any::<prop::sample::Index>().prop_map(|index| Op::End(index.index(1 << 20))),
        4 => prop::collection::vec((any::<bool>(), 0..60usize), 2..12).prop_map(Op::Burst),
        1 => any::<prop::sample::Index>().prop_map(|index| Op::Leave(index.index(1 << 20))),
        1 => (0..KEYS).prop_map(Op::Forget),
        2 => (0..KEYS, any::<bool>()).prop_map(|(key, force)| Op::Evict { key, force }),
        1 => (0..KEYS).prop_map(Op::Pin),
        2 => (0..KEYS).prop_map(Op::Unpin),
        1 => (0..KEYS).prop_map(Op::Touch),
        1 => (40u64..160).prop_map(Op::SetBudget),
        1 => Just(Op::Trim),
        1 => (0u64..120).prop_map(Op::MakeRoom),
        1 => (0u64..60).prop_map(Op::External),
        1 => (0..KEYS, 0u64..130).prop_map(|(key, bytes)| Op::Measured { key, bytes }),
        2 => (1u64..120).prop_map(Op::Advance),
        1 => Just(Op::Sweep),
    ]
}

const PHYSICAL: u64 = 200;

#[derive(Debug, Clone)]
struct Entry {
    id: usize,
    key: usize,
    bytes: u64,
    uses: usize,
    pinned: bool,
    stamp: u64,
    since: u64,
    used: bool,
    idle: IdlePolicy,
}

impl Entry {
    fn eligible(&self) -> bool {
        self.uses == 0 && !self.pinned
    }

    fn due(&self, now: u64) -> bool {
        self.eligible()
            && match self.idle {
                IdlePolicy::Never => false,
                IdlePolicy::Immediately => self.used,
                IdlePolicy::AfterSeconds(seconds) => now > self.since + u64::from(seconds),
            }
    }
}

#[derive(Debug, Clone)]
struct Waiting {
    key: usize,
    cost: u64,
    pinned: bool,
    fails: bool,
    no_room: NoRoom,
    callers: Vec<Asking>,
}

#[derive(Debug, Clone)]
struct Asking {
    id: usize,
    in_use: bool,
    pinned: bool,
    idle: IdlePolicy,
}

#[derive(Debug, Clone, PartialEq)]
enum Answer {
    Granted { entry: usize },
    Failed(ErrorKind),
}

/// The reference.
#[derive(Debug, Default)]
struct Model {
    budget: u64,
    now: u64,
    stamp: u64,
    next: usize,
    external: u64,
    entries: Vec<Entry>,
    /// Detached, still leased: entry, bytes, leases.
    lingering: Vec<(usize, u64, usize)>,
    line: Vec<Waiting>,
    /// Decided on, bytes reserved; their loads run when everything else of the step is done.
    running: Vec<Waiting>,
    answers: Vec<(usize, Answer)>,
    released: Vec<usize>,
    over: bool,
    hits: u64,
}

impl Model {
    fn used(&self) -> u64 {
        self.external
            + self.entries.iter().map(|entry| entry.bytes).sum::<u64>()
            + self.running.iter().map(|waiting| waiting.cost).sum::<u64>()
            + self.lingering.iter().map(|(_, bytes, _)| bytes).sum::<u64>()
    }

    fn limit(&self) -> u64 {
        self.budget.min(PHYSICAL)
    }

    fn tick(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }

    fn at(&self, key: usize) -> Option<usize> {
        self.entries.iter().position(|entry| entry.key == key)
    }

    fn oldest(&self) -> Option<usize> {
        let eligible = self.entries.iter().enumerate().filter(|(_, entry)| entry.eligible() && entry.bytes > 0);
        eligible.min_by_key(|(_, entry)| entry.stamp).map(|(at, _)| at)
    }

    /// Removes an entry; `release` tells whether its release runs.
    fn remove(&mut self, at: usize, release: bool) {
        let entry = self.entries.remove(at);
        if release {
            self.released.push(entry.key);
        }
        if entry.uses > 0 {
            self.lingering.push((entry.id, entry.bytes, entry.uses));
        }
    }

    fn due(&mut self) {
        let mut due: Vec<(u64, usize)> =
            self.entries.iter().filter(|entry| entry.due(self.now)).map(|entry| (entry.stamp, entry.id)).collect();
        due.sort_unstable();
        for (_, id) in due {
            let at = self.entries.iter().position(|entry| entry.id == id).unwrap();
            self.remove(at, true);
        }
    }

    /// None: it has to wait.
    fn decide(&self, cost: u64, no_room: NoRoom) -> Option<Result<Vec<usize>, ()>> {
        if cost > PHYSICAL {
            return Some(Err(()));
        }
        let mut eligible: Vec<&Entry> = self.entries.iter().filter(|entry| entry.eligible() && entry.bytes > 0).collect();
        eligible.sort_by_key(|entry| entry.stamp);
        let mut victims = Vec::new();
        let mut used = self.used();
        for entry in &eligible {
            if used + cost <= self.limit() {
                break;
            }
            used -= entry.bytes;
            victims.push(entry.id);
        }
        if used + cost <= self.limit() {
            return Some(Ok(victims));
        }
        let busy = self.entries.iter().any(|entry| entry.uses > 0 && !entry.pinned)
            || !self.lingering.is_empty()
            || !self.running.is_empty();
        match no_room {
            NoRoom::Refuse => Some(Err(())),
            NoRoom::Wait if busy => None,
            _ if used + cost > PHYSICAL => Some(Err(())),
            _ => Some(Ok(victims)),
        }
    }

    fn start(&mut self, waiting: Waiting, victims: Vec<usize>) {
        for id in victims {
            let at = self.entries.iter().position(|entry| entry.id == id).unwrap();
            self.remove(at, true);
        }
        self.over |= self.used() + waiting.cost > self.limit();
        self.running.push(waiting);
    }

    /// Runs every load under way, in the order they started; the end of each lets those in line go on.
    fn run(&mut self) {
        while !self.running.is_empty() {
            let first = self.running.remove(0);
            self.finish(first);
            self.pump();
        }
    }

    fn finish(&mut self, waiting: Waiting) {
        if waiting.fails {
            for caller in waiting.callers {
                self.answers.push((caller.id, Answer::Failed(ErrorKind::Io)));
            }
            return;
        }
        self.next += 1;
        let (id, stamp) = (self.next, self.tick());
        let uses = waiting.callers.iter().filter(|caller| caller.in_use).count();
        for caller in &waiting.callers {
            self.answers.push((caller.id, Answer::Granted { entry: id }));
        }
        self.entries.push(Entry {
            id,
            key: waiting.key,
            bytes: waiting.cost,
            uses,
            pinned: waiting.pinned || waiting.callers.iter().any(|caller| caller.pinned),
            stamp,
            since: self.now,
            used: uses > 0,
            idle: waiting.callers.last().unwrap().idle,
        });
    }

    fn pump(&mut self) {
        while let Some(first) = self.line.first().cloned() {
            self.due();
            match self.decide(first.cost, first.no_room) {
                None => return,
                Some(decision) => {
                    self.line.remove(0);
                    match decision {
                        Ok(victims) => self.start(first, victims),
                        Err(()) => {
                            for caller in first.callers {
                                self.answers.push((caller.id, Answer::Failed(ErrorKind::BudgetExceeded)));
                            }
                        }
                    }
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn admit(
        &mut self,
        caller: usize,
        key: usize,
        cost: u64,
        in_use: bool,
        pinned: bool,
        replace: bool,
        no_room: NoRoom,
        idle: IdlePolicy,
        fails: bool,
    ) {
        if let Some(waiting) = self.line.iter_mut().find(|waiting| waiting.key == key) {
            // The test does not replace a key that stands in line: that caller would wait for the other's end.
            waiting.callers.push(Asking { id: caller, in_use, pinned, idle });
            return;
        }
        let old = self.at(key);
        if let Some(at) = old
            && !replace
        {
            let stamp = self.tick();
            let now = self.now;
            let entry = &mut self.entries[at];
            entry.stamp = stamp;
            entry.since = now;
            entry.pinned |= pinned;
            entry.idle = idle;
            if in_use {
                entry.uses += 1;
                entry.used = true;
            } else if idle == IdlePolicy::Immediately {
                entry.used = false;
            }
            let id = entry.id;
            self.hits += 1;
            self.answers.push((caller, Answer::Granted { entry: id }));
            self.pump_if_pinned(pinned);
            return;
        }
        let mut own = 0;
        if let Some(at) = old {
            let without = self.entries.remove(at);
            let mut refused = matches!(self.decide(cost, no_room), Some(Err(())));
            own = if without.uses == 0 { without.bytes } else { 0 };
            refused |= no_room == NoRoom::Refuse && cost > own && !self.line.is_empty();
            self.entries.insert(at, without);
            if refused {
                self.answers.push((caller, Answer::Failed(ErrorKind::BudgetExceeded)));
                return;
            }
            self.remove(at, false);
        }
        let waiting =
            Waiting { key, cost, pinned: false, fails, no_room, callers: vec![Asking { id: caller, in_use, pinned, idle }] };
        if cost > PHYSICAL {
            self.answers.push((caller, Answer::Failed(ErrorKind::BudgetExceeded)));
            return;
        }
        if !self.line.is_empty() && no_room == NoRoom::Wait && cost > own {
            self.line.push(waiting);
            self.pump();
            return;
        }
        if !self.line.is_empty() && no_room == NoRoom::Refuse && cost > own {
            let promised: u64 = self.line.iter().map(|waiting| waiting.cost).sum();
            if self.used() + promised + cost <= self.limit() {
                self.line.push(waiting);
            } else {
                self.answers.push((caller, Answer::Failed(ErrorKind::BudgetExceeded)));
            }
            return;
        }
        match self.decide(cost, no_room) {
            None => {
                self.line.push(waiting);
                self.pump();
            }
            Some(Ok(victims)) => {
                self.start(waiting, victims);
                self.pump();
            }
            Some(Err(())) => self.answers.push((caller, Answer::Failed(ErrorKind::BudgetExceeded))),
        }
    }

    // A hit that pins can leave nothing to wait for.
    fn pump_if_pinned(&mut self, pinned: bool) {
        if pinned {
            self.pump();
        }
    }

    fn end(&mut self, id: usize) {
        let (stamp, now) = (self.tick(), self.now);
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.id == id) {
            entry.uses -= 1;
            entry.used = true;
            entry.stamp = stamp;
            entry.since = now;
        } else {
            let at = self.lingering.iter().position(|(other, _, _)| *other == id).unwrap();
            self.lingering[at].2 -= 1;
            if self.lingering[at].2 == 0 {
                self.lingering.remove(at);
            }
        }
        self.due();
        self.pump();
    }
}

struct Caller {
    id: usize,
    pending: Pending<Result<Admitted>>,
}

struct World {
    rig: Rig,
    model: Model,
    keys: Vec<Key>,
    callers: Vec<Caller>,
    leases: Vec<(Lease, usize)>,
    external: ExternalCharge,
    next_caller: usize,
}

impl World {
    fn new() -> Self {
        let rig = Rig::with(100, |options| options.physical_limit_bytes = Some(PHYSICAL));
        let external = rig.pool.charge_external(0);
        let keys = (0..KEYS)
            .map(|index| if index % 2 == 0 { chat(&format!("m{index}")) } else { embedder(&format!("m{index}")) })
            .collect();
        let model = Model { budget: 100, ..Model::default() };
        Self { rig, model, keys, callers: Vec::new(), leases: Vec::new(), external, next_caller: 0 }
    }

    fn step(&mut self, op: &Op) {
        let (rig, model) = (&self.rig, &mut self.model);
        rig.log();
        model.released.clear();
        match op.clone() {
            Op::Admit { key, cost, in_use, pinned, mut replace, no_room, idle, fails } => {
                replace &= !model.line.iter().any(|waiting| waiting.key == key);
                let id = self.next_caller;
                self.next_caller += 1;
                let mut admission = Admission::new(self.keys[key].clone(), cost).no_room(no_room).idle(idle);
                admission = if in_use { admission.in_use() } else { admission };
                admission = if pinned { admission.pinned() } else { admission };
                admission = if replace { admission.replace() } else { admission };
                let pending = if fails {
                    let (gate, pending) = rig.admit_gated(admission, true);
                    gate.fail();
                    pending
                } else {
                    rig.admit(admission)
                };
                self.callers.push(Caller { id, pending });
                model.admit(id, key, cost, in_use, pinned, replace, no_room, idle, fails);
            }
            Op::Begin(key) => {
                self.begin(key);
            }
            Op::End(index) => self.end(index),
            Op::Burst(uses) => {
                for (begins, index) in uses {
                    let waited = !self.model.line.is_empty();
                    if begins {
                        self.begin(index % KEYS);
                    } else {
                        self.end(index);
                    }
                    // What an end sets going for those in line takes time; the model's takes none.
                    if waited {
                        self.rig.run();
                        self.model.run();
                    }
                }
            }
            Op::Leave(index) => {
                if !self.callers.is_empty() {
                    let caller = self.callers.swap_remove(index % self.callers.len());
                    caller.pending.leave();
                    for waiting in &mut model.line {
                        waiting.callers.retain(|asking| asking.id != caller.id);
                    }
                    let before = model.line.len();
                    model.line.retain(|waiting| !waiting.callers.is_empty());
                    if model.line.len() < before {
                        model.pump();
                    }
                }
            }
            Op::Forget(key) => {
                let forgotten = rig.pool.forget(&self.keys[key]);
                let at = model.at(key);
                assert_eq!(forgotten, at.map(|at| model.entries[at].bytes));
                if let Some(at) = at {
                    let leased = model.entries[at].uses > 0;
                    model.remove(at, false);
                    if !leased {
                        model.pump();
                    }
                }
            }
            Op::Evict { key, force } => {
                let (pool, name) = (rig.pool.clone(), self.keys[key].clone());
                let result = rig.exec.start(async move { pool.evict(&name, force).await }).done();
                let expected = match model.at(key) {
                    Some(at) if model.entries[at].uses > 0 && !force => Err(ErrorKind::InUse),
                    Some(at) => {
                        model.remove(at, true);
                        Ok(())
                    }
                    None => match model.line.iter().position(|waiting| waiting.key == key) {
                        Some(at) if force => {
                            for caller in model.line.remove(at).callers {
                                model.answers.push((caller.id, Answer::Failed(ErrorKind::Cancelled)));
                            }
                            Ok(())
                        }
                        _ => Err(ErrorKind::NotFound),
                    },
                };
                assert_eq!(result.map(|_| ()).map_err(|error| error.kind()), expected);
                if expected.is_ok() {
                    model.pump();
                }
            }
            Op::Pin(key) | Op::Unpin(key) => {
                let pin = matches!(op, Op::Pin(_));
                let known = if pin { rig.pool.pin(&self.keys[key]) } else { rig.pool.unpin(&self.keys[key]) };
                if let Some(at) = model.at(key) {
                    assert!(known);
                    model.entries[at].pinned = pin;
                    model.due();
                    model.pump();
                } else if let Some(waiting) = model.line.iter_mut().find(|waiting| waiting.key == key) {
                    assert!(known);
                    waiting.pinned = pin;
                    for asking in &mut waiting.callers {
                        asking.pinned &= pin;
                    }
                } else {
                    assert!(!known);
                }
            }
            Op::Touch(key) => {
                let touched = rig.pool.touch(&self.keys[key]);
                assert_eq!(touched, model.at(key).is_some());
                if let Some(at) = model.at(key) {
                    let (stamp, now) = (model.tick(), model.now);
                    model.entries[at].stamp = stamp;
                    model.entries[at].since = now;
                }
            }
            Op::SetBudget(bytes) => {
                rig.pool.set_budget(bytes).unwrap();
                model.budget = bytes;
                model.pump();
            }
            Op::Trim | Op::MakeRoom(_) => {
                let bytes = if let Op::MakeRoom(bytes) = op { *bytes } else { 0 };
                let pool = rig.pool.clone();
                let trim = matches!(op, Op::Trim);
                let work = async move { if trim { pool.trim().await } else { pool.make_room(bytes, None).await } };
                let reclaimed = rig.exec.start(work).done().unwrap();
                let mut evicted = Vec::new();
                while model.used() + bytes > model.limit()
                    && let Some(at) = model.oldest()
                {
                    evicted.push(self.keys[model.entries[at].key].clone());
                    model.remove(at, true);
                    model.pump();
                    model.run();
                }
                assert_eq!(reclaimed.evicted, evicted);
                assert_eq!(reclaimed.fits, model.used() + bytes <= model.limit());
            }
            Op::External(bytes) => {
                let less = bytes < self.external.bytes();
                self.external.set(bytes);
                model.external = bytes;
                if less {
                    model.pump();
                }
            }
            Op::Measured { key, bytes } => {
                if let Some(token) = rig.pool.peek(&self.keys[key]) {
                    assert!(rig.pool.set_measured(token, bytes));
                    let at = model.at(key).unwrap();
                    model.entries[at].bytes = bytes;
                    model.pump();
                }
            }
            Op::Advance(seconds) => {
                rig.clock.advance(secs(seconds));
                model.now += seconds;
                model.due();
                model.pump();
            }
            Op::Sweep => {
                let pool = rig.pool.clone();
                rig.exec.start(async move { pool.sweep().await }).done().unwrap();
                model.due();
                model.pump();
            }
        }
        self.compare(op);
    }

    fn begin(&mut self, key: usize) {
        let lease = self.rig.pool.begin_use(&self.keys[key]);
        let model = &mut self.model;
        let at = model.at(key);
        assert_eq!(lease.is_some(), at.is_some());
        if let (Some(lease), Some(at)) = (lease, at) {
            let (stamp, now) = (model.tick(), model.now);
            model.hits += 1;
            let entry = &mut model.entries[at];
            entry.uses += 1;
            entry.used = true;
            entry.stamp = stamp;
            entry.since = now;
            self.leases.push((lease, entry.id));
        }
    }

    fn end(&mut self, index: usize) {
        if !self.leases.is_empty() {
            let (lease, id) = self.leases.swap_remove(index % self.leases.len());
            drop(lease);
            self.model.end(id);
        }
    }

    fn compare(&mut self, op: &Op) {
        let rig = &self.rig;
        rig.run();
        self.model.run();
        // Every caller has the model's answer, and no other.
        for (id, answer) in std::mem::take(&mut self.model.answers) {
            let Some(at) = self.callers.iter().position(|caller| caller.id == id) else { panic!("an answer for nobody") };
            let result = self.callers.swap_remove(at).pending.done();
            match (answer, result) {
                (Answer::Granted { entry }, Ok(admitted)) => self.leases.extend(admitted.lease.map(|lease| (lease, entry))),
                (Answer::Failed(kind), Err(error)) => assert_eq!(error.kind(), kind, "{error}"),
                (answer, result) => panic!("the model says {answer:?}, the pool {result:?}"),
            }
        }
        for caller in &self.callers {
            assert!(!caller.pending.is_done(), "caller {} was answered, the model lets it wait", caller.id);
        }
        // The victims, in order.
        let released: Vec<String> = rig.log().iter().filter_map(|line| line.strip_prefix("release ").map(str::to_owned)).collect();
        let expected: Vec<String> = self.model.released.iter().map(|key| self.keys[*key].to_string()).collect();
        assert_eq!(released, expected, "releases of {op:?}");
        // The entries.
        let status = rig.status();
        let mut held: Vec<(String, u64, u64, bool)> = status
            .entries
            .iter()
            .filter(|entry| entry.state == hob::pool::EntryState::Ready)
            .map(|entry| (entry.key.to_string(), entry.bytes, entry.uses, entry.pinned))
            .collect();
        let mut expected: Vec<(String, u64, u64, bool)> = self
            .model
            .entries
            .iter()
            .map(|entry| (self.keys[entry.key].to_string(), entry.bytes, entry.uses as u64, entry.pinned))
            .collect();
        held.sort();
        expected.sort();
        assert_eq!(held, expected);
        assert_eq!(status.used_bytes, self.model.used());
        assert_eq!(status.waiting, self.model.line.len());
        assert_eq!(status.pending_bytes, 0);
        assert_eq!(status.counters.hits, self.model.hits);
    }
}

/// Sequences per property; `HOB_PROPTEST_CASES` raises the number.
fn cases() -> u32 {
    std::env::var("HOB_PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(500)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_does_what_the_reference_model_does(ops in prop::collection::vec(op(), 1..120)) {
        let mut world = World::new();
        for op in &ops {
            world.step(op);
        }
        // Whatever happened, letting everything go leaves an empty account.
        world.leases.clear();
        world.callers.clear();
        world.external.set(0);
        let pool = world.rig.pool.clone();
        world.rig.exec.start(async move { pool.close().await }).done().unwrap();
        world.rig.run();
        let status = world.rig.status();
        prop_assert_eq!(status.used_bytes, 0);
        prop_assert!(status.entries.is_empty());
        prop_assert!(world.rig.memory.lock().unwrap().cache == 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Only admissions that wait, no resizing, no charges: the sum never exceeds the budget, at any moment, unless one model
    /// larger than what the others leave is served alone.
    #[test]
    fn invariant1_the_budget_is_kept_at_every_moment(ops in prop::collection::vec((0..KEYS, 1u64..=100, any::<bool>(), 0usize..3), 1..100)) {
        let rig = Rig::new(100);
        let keys: Vec<Key> = (0..KEYS).map(|index| reranker(&format!("m{index}"))).collect();
        let mut leases: Vec<Lease> = Vec::new();
        let mut callers = Vec::new();
        for (key, cost, in_use, ends) in ops {
            let admission = Admission::new(keys[key].clone(), cost);
            callers.push(rig.admit(if in_use { admission.in_use() } else { admission }));
            for _ in 0..ends.min(leases.len()) {
                drop(leases.remove(0));
            }
            // Step by step, so that every state in between is seen.
            loop {
                rig.check();
                let status = rig.status();
                prop_assert!(status.used_bytes <= 100);
                prop_assert_eq!(status.used_bytes, status.resident_bytes + status.pending_bytes + status.releasing_bytes + status.external_bytes);
                prop_assert_eq!(status.used_bytes, status.entries.iter().map(|entry| entry.bytes).sum::<u64>());
                prop_assert!(rig.memory.lock().unwrap().active <= status.used_bytes, "more is held than the account says");
                if !rig.exec.step() {
                    break;
                }
            }
            let (done, rest): (Vec<_>, Vec<_>) = callers.into_iter().partition(pool_support::Pending::is_done);
            callers = rest;
            leases.extend(done.into_iter().filter_map(|caller| caller.done().unwrap().lease));
        }
        prop_assert!(rig.status().peak_used_bytes <= 100);
        prop_assert!(rig.memory.lock().unwrap().peak <= 100);
    }
}
