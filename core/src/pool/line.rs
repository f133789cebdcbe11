//! The line: what happens to an admission between its first step and its task. It starts, stands in line, or is refused;
//! whoever stands in line goes on, first come, first served, when room is made.

use std::sync::Arc;

use super::flight::{self, Stage};
use super::policy::{Decision, Refusal, decide};
use super::release;
use super::state::{Inner, Outbox, State};
use super::status::{PoolEvent, UnloadReason};
use super::table::{Entry, Phase};
use super::types::{Key, NoRoom, Token};
use crate::error::{Error, ErrorKind};

impl State {
    /// A decision about `cost` bytes, changing nothing. `without` is an entry to think away.
    pub(crate) fn preview(&self, cost: u64, no_room: NoRoom, without: Option<u32>) -> Decision {
        let mut account = self.account();
        if let Some(entry) = without.and_then(|at| self.table.get(at)) {
            account.resident -= u128::from(entry.bytes);
            account.measured = account.measured.saturating_sub(entry.bytes.into());
            if entry.uses == 0 && !entry.pinned {
                account.evictable -= u128::from(entry.bytes);
            } else if !entry.pinned {
                account.movable -= 1;
            }
        }
        decide(&account, cost, no_room, &[], self.table.lru().filter(|(at, _)| Some(*at) != without))
    }

    /// Whether so many bytes more could be had now; `cache_serves`: the allocator's freed buffers count as room.
    pub(crate) fn has_room(&self, bytes: u64, cache_serves: bool) -> bool {
        let decision = decide(&self.account_of(cache_serves), bytes, NoRoom::Refuse, &[], self.table.lru());
        matches!(decision, Decision::Admit { over_budget: false, .. })
    }

    /// Puts a flight whose cost is known on its way: starts it, lines it up, or refuses it.
    pub(crate) fn place(&mut self, inner: &Arc<Inner>, token: Token, out: &mut Outbox) {
        let Some(flight) = self.flights.get(&token) else { return };
        let (cost, no_room, own) = (flight.cost, flight.no_room, flight.replaced.unwrap_or(0));
        if let Some(limit) = self.table.account.physical.filter(|limit| cost > *limit) {
            return self.refuse(inner, token, Refusal::Physical(limit.into()), out);
        }
        if self.pauses > 0 {
            if no_room == NoRoom::Refuse {
                let error = cannot_load_paused(&flight.key);
                return self.fail(inner, token, error, out);
            }
            return self.line_up(inner, token, out);
        }
        if self.comes_behind(no_room, cost, own) {
            // Whoever came first is served first; a caller who refuses to wait for leases may still stand behind admissions
            // that, like its own, only wait for releases under way.
            let account = self.account();
            let soon = account.used().saturating_sub(account.coming_back()) + self.queued_bytes + u128::from(cost);
            if no_room == NoRoom::Refuse && soon > account.limit() {
                return self.refuse(inner, token, Refusal::NoRoom, out);
            }
            return self.line_up(inner, token, out);
        }
        if !self.attempt(inner, token, out) {
            self.line_up(inner, token, out);
        }
    }

    /// Whether those in line come first. A replacement that needs no more than its `own` bytes takes nothing from them.
    pub(crate) fn comes_behind(&self, no_room: NoRoom, cost: u64, own: u64) -> bool {
        !self.queue.is_empty() && no_room != NoRoom::LoadAnyway && cost > own
    }

    fn line_up(&mut self, inner: &Arc<Inner>, token: Token, out: &mut Outbox) {
        if let Some(error) = self.line_is_full() {
            return self.fail(inner, token, error, out);
        }
        let ticket = self.number();
        let ahead = self.queue.len();
        let Some(flight) = self.flights.get_mut(&token) else { return };
        flight.stage = Stage::Waiting { ticket };
        let (key, bytes) = (flight.key.clone(), flight.cost);
        self.queue.insert(ticket, token);
        self.queued_bytes += u128::from(bytes);
        self.counters.waits += 1;
        self.emit(out, || PoolEvent::Waiting { key, bytes, ahead });
    }

    pub(crate) fn line_is_full(&self) -> Option<Error> {
        (self.queue.len() >= self.max_waiting).then(|| {
            let text = format!("{} admissions already wait for room; try again later or raise max_waiting", self.queue.len());
            Error::new(ErrorKind::Busy, text)
        })
    }

    /// Decides on a flight. Answers false when it has to wait.
    pub(crate) fn attempt(&mut self, inner: &Arc<Inner>, token: Token, out: &mut Outbox) -> bool {
        let Some(flight) = self.flights.get(&token) else { return true };
        let (cost, no_room) = (flight.cost, flight.no_room);
        let expired = self.expired();
        let (now, idle) = (self.now(), self.idle);
        let table = &self.table;
        let any_expired = !expired.is_empty();
        let lru = table.lru().filter(|(at, _)| !any_expired || table.get(*at).is_some_and(|entry| !entry.is_due(idle, now)));
        match decide(&self.account(), cost, no_room, &expired, lru) {
            Decision::Admit { victims, over_budget } => {
                self.launch(inner, token, &victims, expired.len(), over_budget, out);
                true
            }
            Decision::Wait => {
                self.sweep(inner, &expired, out);
                false
            }
            Decision::Refuse(refusal) => {
                self.sweep(inner, &expired, out);
                self.refuse(inner, token, refusal, out);
                true
            }
        }
    }

    /// Reserves and detaches in one step, and starts the task that releases the victims and then loads.
    fn launch(&mut self, inner: &Arc<Inner>, token: Token, victims: &[u32], expired: usize, over_budget: bool, out: &mut Outbox) {
        let mut held = 0;
        let mut releases = Vec::with_capacity(victims.len());
        for (index, at) in victims.iter().enumerate() {
            let reason = if index < expired { UnloadReason::Idle } else { UnloadReason::Evicted };
            held += self.table.get(*at).map_or(0, |entry| u128::from(entry.bytes));
            if let Some(victim) = self.detach(*at, reason, Some(token), out) {
                releases.push(release::unload(inner, *at, victim, false));
            }
        }
        self.unqueue(token);
        let Some(flight) = self.flights.get_mut(&token) else { return };
        flight.stage = Stage::Releasing;
        flight.over_budget = over_budget;
        flight.victims_held = held;
        self.table.account.pending += u128::from(flight.cost);
        self.table.account.overlap += flight.overlap();
        self.running += 1;
        if let Some(job) = flight.job.take() {
            out.spawn(flight::drive(inner, token, releases, job));
        }
        self.note_peak();
    }

    pub(crate) fn unqueue(&mut self, token: Token) {
        if let Some(flight) = self.flights.get_mut(&token)
            && let Stage::Waiting { ticket } = flight.stage
        {
            self.queue.remove(&ticket);
            self.queued_bytes -= u128::from(flight.cost);
            flight.stage = Stage::Estimating;
        }
    }

    /// Lets those in line go on, first come, first served, until one has to wait.
    pub(crate) fn pump(&mut self, inner: &Arc<Inner>, out: &mut Outbox) {
        // `attempt` can end a flight, whose end pumps again: the outer loop goes on anyway.
        if self.pauses > 0 || self.closing || self.pumping {
            return;
        }
        self.pumping = true;
        while let Some((_, token)) = self.queue.first_key_value().map(|(ticket, token)| (*ticket, *token)) {
            if !self.attempt(inner, token, out) {
                break;
            }
        }
        self.pumping = false;
    }

    /// After a pause: those who never wait do not stand behind those who do.
    pub(crate) fn pump_impatient(&mut self, inner: &Arc<Inner>, out: &mut Outbox) {
        let impatient: Vec<Token> = self
            .queue
            .values()
            .filter(|token| self.flights.get(*token).is_some_and(|flight| flight.no_room == NoRoom::LoadAnyway))
            .copied()
            .collect();
        // One that is refused would pump, and start those that this loop has yet to come to.
        self.pumping = true;
        for token in impatient {
            self.attempt(inner, token, out);
        }
        self.pumping = false;
    }

    fn refuse(&mut self, inner: &Arc<Inner>, token: Token, refusal: Refusal, out: &mut Outbox) {
        let Some(flight) = self.flights.get(&token) else { return };
        let error = self.refusal(&flight.key, flight.cost, refusal);
        self.fail(inner, token, error, out);
    }

    /// The error of a refusal: required, free, who holds the rest, and the knob.
    pub(crate) fn refusal(&self, key: &Key, cost: u64, refusal: Refusal) -> Error {
        let account = self.account();
        let mut holders: Vec<&Entry> = self.table.iter().map(|(_, entry)| entry).filter(|entry| entry.bytes > 0).collect();
        holders.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.shared.key.cmp(&b.shared.key)));
        let mut named: Vec<String> = holders.iter().take(4).map(|entry| describe(entry)).collect();
        if holders.len() > named.len() {
            named.push(format!("{} more", holders.len() - named.len()));
        }
        if account.pending > account.overlap {
            named.push(format!("loads under way ({} bytes)", account.pending - account.overlap));
        }
        if account.external > 0 {
            named.push(format!("external charges ({} bytes)", account.external));
        }
        let rest = if named.is_empty() { String::new() } else { format!("; the rest is held by {}", named.join(", ")) };
        let text = match refusal {
            Refusal::NoRoom => format!(
                "{key} needs {cost} bytes, {} of the budget of {} bytes are free{rest}; raise the budget, evict something, or admit with no_room = wait",
                account.free(),
                account.budget,
            ),
            Refusal::Physical(limit) => format!(
                "{key} needs {cost} bytes, over the physical limit of {limit} bytes with what cannot leave{rest}; choose a smaller model or unpin, or raise physical_limit_bytes"
            ),
        };
        Error::new(ErrorKind::BudgetExceeded, text)
    }
}

pub(crate) fn cannot_load_paused(key: &Key) -> Error {
    let text = format!("{key} cannot load while the pool is paused; resume it or admit with no_room = wait");
    Error::new(ErrorKind::Busy, text)
}

fn describe(entry: &Entry) -> String {
    let why = match (&entry.phase, entry.pinned, entry.uses) {
        (Phase::Draining(_), _, _) => "being released",
        (_, true, _) => "pinned",
        (_, _, 0) => "idle",
        _ => "in use",
    };
    format!("{} ({} bytes, {why})", entry.shared.key, entry.bytes)
}
