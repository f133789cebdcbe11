//! Uses counted without the mutex, so that hits scale with the cores.
//!
//! A slow begin, under the mutex, *lends* its entry: from then on the count is in the entry's own word, where uses begin and
//! end by one compare-and-swap, and the table sees an entry in use. Every transition *recalls* all loans before it looks at
//! anything ([`Inner::with`](super::state::Inner::with)): the word becomes 0, what happened meanwhile goes into the entry,
//! and whoever is refused by a word of 0 takes the mutex. So decisions see exact counts, and between a decision and its
//! effect no use can begin. Nothing is lent while somebody waits for room, and nothing whose last end has work to do: those
//! ends all take the mutex, and no wake-up can be lost.

use crate::sync::{AtomicU64, Ordering};

const LENT: u64 = 1 << 63;
// One use begun since the entry was lent, above the 32 bits of uses open now.
const BEGUN: u64 = 1 << 32;
const MAX_BEGUN: u64 = (1 << 31) - 1;
const OPEN: u64 = BEGUN - 1;

fn open(word: u64) -> u64 {
    word & OPEN
}

fn begun(word: u64) -> u64 {
    (word & !LENT) / BEGUN
}

/// The word of one entry, and when its last use ended.
#[derive(Default)]
pub(crate) struct Loan {
    word: AtomicU64,
    nanos: AtomicU64,
    order: AtomicU64,
}

/// What a loan came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Returned {
    /// Uses open now.
    pub(crate) uses: u64,
    /// Uses begun meanwhile.
    pub(crate) begun: u64,
    /// The latest end so far, of this loan or an earlier one.
    pub(crate) nanos: u64,
    pub(crate) order: u64,
}

impl Loan {
    /// Begins a use if the entry is lent.
    #[inline]
    pub(crate) fn begin(&self) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        while word & LENT != 0 && begun(word) < MAX_BEGUN && open(word) < OPEN {
            match self.word.compare_exchange_weak(word, word + BEGUN + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(found) => word = found,
            }
        }
        false
    }

    /// Ends a use if the entry is lent; `stamp` is read only then.
    #[inline]
    pub(crate) fn end(&self, stamp: impl FnOnce() -> (u64, u64)) -> bool {
        let mut word = self.word.load(Ordering::Relaxed);
        // A word that is not lent is 0.
        if open(word) == 0 {
            return false;
        }
        // Before the count goes down, so that whoever recalls a count of 0 sees the time of its end too.
        let (nanos, order) = stamp();
        self.nanos.fetch_max(nanos, Ordering::Relaxed);
        self.order.fetch_max(order, Ordering::Relaxed);
        while open(word) > 0 {
            match self.word.compare_exchange_weak(word, word - 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(found) => word = found,
            }
        }
        false
    }

    /// Hands `uses` open uses to the word. False, changing nothing, when they are too many for it. Under the mutex.
    pub(crate) fn lend(&self, uses: u64) -> bool {
        let fits = uses < OPEN;
        if fits {
            self.word.store(LENT | uses, Ordering::Release);
        }
        fits
    }

    /// Takes the count back. Under the mutex.
    pub(crate) fn recall(&self) -> Returned {
        let word = self.word.swap(0, Ordering::AcqRel);
        let (nanos, order) = (self.nanos.load(Ordering::Relaxed), self.order.load(Ordering::Relaxed));
        Returned { uses: open(word), begun: begun(word), nanos, order }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn returned(uses: u64, begun: u64, nanos: u64, order: u64) -> Returned {
        Returned { uses, begun, nanos, order }
    }

    #[test]
    fn uses_are_counted_only_while_lent() {
        let loan = Loan::default();
        assert!(!loan.begin() && !loan.end(|| panic!("the clock was read for nothing")));
        assert!(loan.lend(1));
        assert!(loan.begin() && loan.begin());
        assert!(loan.end(|| (5, 7)) && loan.end(|| (4, 6)));
        assert_eq!(loan.recall(), returned(1, 2, 5, 7));
        assert!(!loan.begin() && !loan.end(|| (9, 9)));
    }

    #[test]
    fn an_end_without_a_use_is_refused() {
        let loan = Loan::default();
        assert!(loan.lend(1) && loan.end(|| (1, 1)));
        assert!(!loan.end(|| (2, 2)));
        assert_eq!(loan.recall(), returned(0, 0, 1, 1));
    }

    #[test]
    fn full_counts_are_left_to_the_mutex() {
        let loan = Loan::default();
        assert!(!loan.lend(OPEN) && !loan.begin());
        assert!(loan.lend(OPEN - 1) && loan.begin());
        assert!(!loan.begin(), "one more would run into the other count");
        assert_eq!(loan.recall(), returned(OPEN, 1, 0, 0));
        loan.word.store(LENT | (MAX_BEGUN * BEGUN), Ordering::Relaxed);
        assert!(!loan.begin());
        assert_eq!(loan.recall(), returned(0, MAX_BEGUN, 0, 0));
    }
}
