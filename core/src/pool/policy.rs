//! The pool's decisions as pure functions over numbers: no locks, no clocks, no async.

use super::types::NoRoom;

/// The four disjoint states of bytes (P4) and what bounds them. All sums are `u128`, so no admission can overflow them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Account {
    /// The budget.
    pub(crate) budget: u64,
    /// Never exceeded by an admission.
    pub(crate) physical: Option<u64>,
    /// Entries.
    pub(crate) resident: u128,
    /// Reservations of loads under way.
    pub(crate) pending: u128,
    /// Detached entries whose memory is not back yet.
    pub(crate) releasing: u128,
    /// The part of `pending` that will live in bytes still counted in `releasing`: an admission's own victims. It allocates
    /// only after they are gone, so the two are never held at once; counting both would show a peak that cannot happen.
    pub(crate) overlap: u128,
    /// Charged by the host.
    pub(crate) external: u128,
    /// Entries that could go now: not pinned, not in use. Part of `resident`.
    pub(crate) evictable: u128,
    /// Part of `releasing` that comes back without anybody ending a use.
    pub(crate) returning: u128,
    /// How many things will make room by themselves: leased entries that are not pinned, loads, releases.
    pub(crate) movable: usize,
    /// Bytes the process was measured to hold; a floor of the account (P31, P40).
    pub(crate) measured: u128,
    /// Bytes the system could still give, if it says (A40).
    pub(crate) available: Option<u64>,
}

impl Account {
    /// What the account holds: entries, reservations, releases and external charges.
    pub(crate) fn charged(&self) -> u128 {
        self.resident + self.pending + self.releasing + self.external - self.overlap
    }

    /// The account floored by what was measured.
    pub(crate) fn used(&self) -> u128 {
        self.charged().max(self.measured)
    }

    /// The budget, or less when the machine has less or the system has less left.
    pub(crate) fn limit(&self) -> u128 {
        let budget = u128::from(self.budget);
        self.hard_limit().map_or(budget, |hard| budget.min(hard))
    }

    // All that the process could hold if it took everything the system has left.
    fn reach(&self) -> Option<u128> {
        self.available.map(|available| self.measured.max(self.charged()) + u128::from(available))
    }

    /// Bytes that leave the account without anybody ending a use: releases under way, less what is promised to the
    /// admissions whose victims they are.
    pub(crate) fn coming_back(&self) -> u128 {
        self.returning.saturating_sub(self.overlap)
    }

    /// Bytes free under the limit.
    pub(crate) fn free(&self) -> u128 {
        self.limit().saturating_sub(self.used())
    }

    /// The limit that no policy may exceed.
    pub(crate) fn hard_limit(&self) -> Option<u128> {
        match (self.physical.map(u128::from), self.reach()) {
            (Some(physical), Some(reach)) => Some(physical.min(reach)),
            (one, other) => one.or(other),
        }
    }
}

/// What to do with an admission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Reserve, release these, load. `over_budget`: served alone.
    Admit { victims: Vec<u32>, over_budget: bool },
    /// Stand in line; evict nothing.
    Wait,
    /// Fail with `BudgetExceeded`.
    Refuse(Refusal),
}

/// Why an admission is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The policy is `Refuse` and there is no room.
    NoRoom,
    /// Over the physical limit (given here), whatever leaves.
    Physical(u128),
}

/// Decides on `cost` bytes. `expired` are idle entries past their time, which go first and in any case; `lru` yields all
/// entries that could go, least recently used first and without the expired ones, and is read only as far as needed.
pub(crate) fn decide(
    account: &Account,
    cost: u64,
    no_room: NoRoom,
    expired: &[(u32, u64)],
    lru: impl Iterator<Item = (u32, u64)>,
) -> Decision {
    let cost = u128::from(cost);
    let hard = account.hard_limit();
    if let Some(hard) = account.physical.map(u128::from).filter(|hard| cost > *hard) {
        return Decision::Refuse(Refusal::Physical(hard));
    }
    let expired_bytes: u128 = expired.iter().map(|(_, bytes)| u128::from(*bytes)).sum();
    let used = account.used().saturating_sub(expired_bytes);
    let limit = account.limit();
    let mut victims: Vec<u32> = expired.iter().map(|(entry, _)| *entry).collect();
    let idle = account.evictable.saturating_sub(expired_bytes);
    let need = (used + cost).saturating_sub(limit);
    // What is on its way back anyway is better waited for than a warm model evicted.
    let soon = need > 0 && need <= account.coming_back() && no_room != NoRoom::LoadAnyway;
    if soon {
        return Decision::Wait;
    }
    if need <= idle {
        victims.extend(fewest(need, lru));
        return Decision::Admit { victims, over_budget: false };
    }
    // Not even the absence of every idle entry makes room within the budget.
    let rest = used - idle.min(used) + cost;
    let over_physical = hard.filter(|hard| rest > *hard);
    match no_room {
        NoRoom::Refuse if need <= idle + account.coming_back() => Decision::Wait,
        NoRoom::Refuse => Decision::Refuse(over_physical.map_or(Refusal::NoRoom, Refusal::Physical)),
        NoRoom::Wait if account.movable > 0 => Decision::Wait,
        NoRoom::Wait | NoRoom::LoadAnyway => match over_physical {
            Some(hard) => Decision::Refuse(Refusal::Physical(hard)),
            None => {
                victims.extend(lru.filter(|(_, bytes)| *bytes > 0).map(|(entry, _)| entry));
                Decision::Admit { victims, over_budget: true }
            }
        },
    }
}

/// The fewest entries, in the order given, that together hold `need` bytes (all of them, when they hold less).
pub(crate) fn fewest(need: u128, lru: impl Iterator<Item = (u32, u64)>) -> Vec<u32> {
    let mut victims = Vec::new();
    let mut freed = 0u128;
    let mut lru = lru.filter(|(_, bytes)| *bytes > 0);
    while freed < need
        && let Some((entry, bytes)) = lru.next()
    {
        freed += u128::from(bytes);
        victims.push(entry);
    }
    victims
}

/// The budget to use when the host names none (P50): 70 % of the device's recommended working set, or of 0.75 of the
/// machine's memory when the device does not say. Never 0.
#[must_use]
pub fn default_budget(recommended_working_set_bytes: Option<u64>, memory_bytes: u64) -> u64 {
    let base = match recommended_working_set_bytes {
        Some(bytes) if bytes > 0 => u128::from(bytes),
        _ => u128::from(memory_bytes) * 3 / 4,
    };
    u64::try_from(base * 7 / 10).unwrap_or(u64::MAX).max(1)
}

/// The physical limit to use when the host names none (I19): 0.9 of the machine's memory.
#[must_use]
pub fn default_physical_limit(memory_bytes: u64) -> u64 {
    u64::try_from(u128::from(memory_bytes) * 9 / 10).unwrap_or(u64::MAX).max(1)
}

/// Bytes that came back between two readings, never negative.
pub(crate) fn freed_between(before: u64, after: u64) -> u64 {
    before.saturating_sub(after)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn account(budget: u64, resident: u128, evictable: u128, movable: usize) -> Account {
        Account { budget, resident, evictable, movable, ..Account::default() }
    }

    fn admit(victims: &[u32], over_budget: bool) -> Decision {
        Decision::Admit { victims: victims.to_vec(), over_budget }
    }

    #[test]
    fn p41_the_fewest_least_recently_used_that_make_it_fit() {
        let idle = [(7, 30), (2, 30), (5, 30)];
        let decide = |cost| decide(&account(100, 90, 90, 0), cost, NoRoom::Wait, &[], idle.into_iter());
        assert_eq!(decide(10), admit(&[], false));
        assert_eq!(decide(11), admit(&[7], false));
        assert_eq!(decide(40), admit(&[7], false));
        assert_eq!(decide(41), admit(&[7, 2], false));
        assert_eq!(decide(100), admit(&[7, 2, 5], false));
        assert_eq!(decide(101), admit(&[7, 2, 5], true));
    }

    #[test]
    fn p41_busy_waits_evicting_nothing_pinned_does_not() {
        let idle = [(1, 30)];
        assert_eq!(decide(&account(100, 90, 30, 1), 60, NoRoom::Wait, &[], idle.into_iter()), Decision::Wait);
        assert_eq!(decide(&account(100, 90, 30, 0), 60, NoRoom::Wait, &[], idle.into_iter()), admit(&[1], true));
        let refused = decide(&account(100, 90, 30, 1), 60, NoRoom::Refuse, &[], idle.into_iter());
        assert_eq!(refused, Decision::Refuse(Refusal::NoRoom));
        assert_eq!(decide(&account(100, 90, 30, 1), 60, NoRoom::LoadAnyway, &[], idle.into_iter()), admit(&[1], true));
    }

    #[test]
    fn the_walk_stops_at_the_last_victim() {
        // Ten thousand residents must not be walked to find one victim.
        let mut seen = 0;
        let lru = (0..10_000).map(|entry| (entry, 10)).inspect(|_| seen += 1);
        assert_eq!(decide(&account(100_000, 100_000, 100_000, 0), 15, NoRoom::Wait, &[], lru), admit(&[0, 1], false));
        assert_eq!(seen, 2);
    }

    #[test]
    fn sums_near_the_end_of_u64_do_not_wrap() {
        let full = Account { external: u128::from(u64::MAX), ..account(u64::MAX, u128::from(u64::MAX), 0, 0) };
        assert_eq!(full.free(), 0);
        assert_eq!(decide(&full, u64::MAX, NoRoom::Refuse, &[], std::iter::empty()), Decision::Refuse(Refusal::NoRoom));
        assert_eq!(decide(&full, u64::MAX, NoRoom::LoadAnyway, &[], std::iter::empty()), admit(&[], true));
    }

    #[test]
    fn freed_bytes_are_never_negative() {
        assert_eq!(freed_between(10, 3), 7);
        assert_eq!(freed_between(3, 10), 0);
    }

    proptest! {
        #[test]
        fn an_admission_within_the_budget_is_within_the_budget(
            idle in prop::collection::vec(0u64..50, 0..20), busy in 0u128..100, external in 0u128..50,
            cost in 0u64..150, budget in 1u64..300, movable in 0usize..2, expired in 0usize..4,
        ) {
            let evictable: u128 = idle.iter().map(|bytes| u128::from(*bytes)).sum();
            let account = Account { external, ..account(budget, busy + evictable, evictable, movable) };
            let all: Vec<(u32, u64)> = idle.iter().enumerate().map(|(at, bytes)| (u32::try_from(at).unwrap(), *bytes)).collect();
            let (expired, lru) = all.split_at(expired.min(all.len()));
            for no_room in [NoRoom::Wait, NoRoom::Refuse, NoRoom::LoadAnyway] {
                let decision = decide(&account, cost, no_room, expired, lru.iter().copied());
                let fits_empty = busy + external + u128::from(cost) <= u128::from(budget);
                match decision {
                    Decision::Admit { victims, over_budget } => {
                        let freed: u128 = victims.iter().map(|at| u128::from(idle[*at as usize])).sum();
                        let after = account.used() - freed + u128::from(cost);
                        prop_assert_eq!(over_budget, after > u128::from(budget));
                        prop_assert_eq!(over_budget, !fits_empty);
                        prop_assert!(expired.iter().all(|(at, _)| victims.contains(at)), "what is expired goes in any case");
                        if !over_budget && let Some(last) = victims[expired.len()..].last() {
                            prop_assert!(after + u128::from(idle[*last as usize]) > u128::from(budget), "one victim too many");
                        }
                        prop_assert!(!over_budget || no_room != NoRoom::Refuse);
                        prop_assert!(!over_budget || no_room == NoRoom::LoadAnyway || movable == 0);
                    }
                    Decision::Wait => prop_assert!(!fits_empty && movable > 0 && no_room == NoRoom::Wait),
                    Decision::Refuse(_) => prop_assert!(!fits_empty && no_room == NoRoom::Refuse),
                }
            }
        }
    }
}
