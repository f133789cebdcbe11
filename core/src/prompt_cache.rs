//! Which computed prompts are kept in memory, so that a conversation's next turn does not compute its former ones again.
//!
//! Pure bookkeeping over token ids: what is kept for them is the caller's (`T`; on MLX a copy of the row's keys and values).
//! Entries belong to a namespace, one per loaded model, since keys and values of one say nothing to another. Namespaces belong to
//! groups, one per engine, and each group has a limit of its own.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

struct Entry<N, T> {
    namespace: N,
    tokens: Vec<u32>,
    bytes: u64,
    value: T,
}

/// A namespace's group, and the bytes that all of the group may keep.
#[derive(Clone, Copy)]
struct Share {
    group: u64,
    limit: u64,
}

/// Kept prompts, least recently used first, each group within a number of bytes.
pub(crate) struct PromptCache<N, T> {
    entries: VecDeque<Entry<N, T>>,
    shares: HashMap<N, Share>,
}

impl<N: Copy + Eq + Hash, T> PromptCache<N, T> {
    pub(crate) fn new() -> Self {
        Self { entries: VecDeque::new(), shares: HashMap::new() }
    }

    /// A namespace is there, in a group that keeps at most `limit` bytes; 0 keeps nothing.
    pub(crate) fn add(&mut self, namespace: N, group: u64, limit: u64) {
        self.shares.insert(namespace, Share { group, limit });
    }

    /// Whether so many bytes of a namespace may be kept at all.
    pub(crate) fn takes(&self, namespace: N, bytes: u64) -> bool {
        bytes > 0 && self.shares.get(&namespace).is_some_and(|share| bytes <= share.limit)
    }

    /// The entry that shares the most leading tokens with `tokens`, and how many; at most all but the last of `tokens`, for the
    /// last one's logits are what a request wants. The entry counts as used.
    pub(crate) fn find(&mut self, namespace: N, tokens: &[u32]) -> Option<(&T, usize)> {
        let cap = tokens.len().saturating_sub(1);
        let shared = |entry: &Entry<N, T>| entry.tokens.iter().zip(&tokens[..cap]).take_while(|(a, b)| a == b).count();
        let candidates = self.entries.iter().enumerate().filter(|(_, entry)| entry.namespace == namespace);
        // Of equal ones the last: the most recently used.
        let (index, len) = candidates.map(|(index, entry)| (index, shared(entry))).max_by_key(|(_, len)| *len)?;
        if len == 0 {
            return None;
        }
        let entry = self.entries.remove(index)?;
        self.entries.push_back(entry);
        self.entries.back().map(|entry| (&entry.value, len))
    }

    /// Keeps `value` for `tokens` and lets go of what it makes needless (entries that are a prefix of it) and of the least
    /// recently used ones of its group until the limit is met. What is larger than the limit is not kept.
    pub(crate) fn insert(&mut self, namespace: N, tokens: Vec<u32>, value: T, bytes: u64) {
        let share = self.shares.get(&namespace).copied().filter(|share| (1..=share.limit).contains(&bytes));
        let Some(share) = share.filter(|_| !tokens.is_empty()) else { return };
        self.entries.retain(|entry| entry.namespace != namespace || !tokens.starts_with(&entry.tokens));
        let shares = &self.shares;
        let of_group = |entry: &Entry<N, T>| shares.get(&entry.namespace).is_some_and(|other| other.group == share.group);
        let mut held: u64 = self.entries.iter().filter(|entry| of_group(entry)).map(|entry| entry.bytes).sum();
        while held + bytes > share.limit {
            let Some(oldest) = self.entries.iter().position(&of_group) else { break };
            held -= self.entries.remove(oldest).map_or(0, |entry| entry.bytes);
        }
        self.entries.push_back(Entry { namespace, tokens, bytes, value });
    }

    /// Bytes kept for a namespace.
    pub(crate) fn bytes(&self, namespace: N) -> u64 {
        self.entries.iter().filter(|entry| entry.namespace == namespace).map(|entry| entry.bytes).sum()
    }

    /// Lets go of the least recently used entry of a namespace; false when it has none.
    pub(crate) fn pop(&mut self, namespace: N) -> bool {
        let oldest = self.entries.iter().position(|entry| entry.namespace == namespace);
        oldest.and_then(|index| self.entries.remove(index)).is_some()
    }

    /// A namespace is gone, and its entries with it.
    pub(crate) fn remove(&mut self, namespace: N) {
        self.shares.remove(&namespace);
        self.entries.retain(|entry| entry.namespace != namespace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cache() -> PromptCache<u8, &'static str> {
        let mut cache = PromptCache::new();
        (0..3).for_each(|namespace| cache.add(namespace, 0, 100));
        cache
    }

    #[test]
    fn the_longest_shared_beginning_is_found() {
        let mut cache = cache();
        cache.insert(0, vec![1, 2], "short", 10);
        cache.insert(0, vec![1, 3, 4], "other", 10);
        cache.insert(0, vec![9], "unrelated", 10);
        assert_eq!(cache.find(0, &[1, 3, 5, 6]), Some((&"other", 2)));
        assert_eq!(cache.find(0, &[7, 7]), None);
    }

    #[test]
    fn the_last_token_is_always_computed() {
        // Hazard H7: the same prompt again computes one token, never none.
        let mut cache = cache();
        cache.insert(0, vec![1, 2, 3], "whole", 10);
        assert_eq!(cache.find(0, &[1, 2, 3]), Some((&"whole", 2)));
        assert_eq!(cache.find(0, &[1]), None);
    }

    #[test]
    fn a_namespace_sees_its_own_entries_only() {
        let mut cache = cache();
        cache.insert(0, vec![1, 2], "zero", 10);
        assert_eq!(cache.find(1, &[1, 2, 3]), None);
        cache.insert(1, vec![1, 2], "one", 10);
        cache.remove(0);
        assert_eq!(cache.find(0, &[1, 2, 3]), None);
        assert_eq!(cache.find(1, &[1, 2, 3]), Some((&"one", 2)));
        assert_eq!((cache.bytes(0), cache.bytes(1)), (0, 10));
    }

    #[test]
    fn an_entry_replaces_its_own_beginnings() {
        let mut cache = cache();
        cache.insert(0, vec![1], "a", 10);
        cache.insert(0, vec![1, 2], "b", 10);
        cache.insert(0, vec![1, 2], "c", 10);
        assert_eq!((cache.entries.len(), cache.bytes(0)), (1, 10));
        assert_eq!(cache.find(0, &[1, 9]), Some((&"c", 1)));
    }

    #[test]
    fn the_least_recently_used_goes_first_and_an_oversize_one_is_not_kept() {
        let mut cache = cache();
        cache.insert(0, vec![1], "a", 40);
        cache.insert(0, vec![2], "b", 40);
        cache.find(0, &[1, 0]);
        cache.insert(0, vec![3], "c", 40);
        assert!(cache.find(0, &[2, 0]).is_none() && cache.find(0, &[1, 0]).is_some());
        cache.insert(0, vec![4], "d", 101);
        assert_eq!((cache.entries.len(), cache.bytes(0)), (2, 80));
        cache.remove(0);
        assert_eq!(cache.bytes(0), 0);
        cache.insert(0, vec![1], "of nobody", 10);
        assert_eq!(cache.bytes(0), 0);
    }

    #[test]
    fn entries_can_be_let_go_one_by_one() {
        let mut cache = cache();
        cache.insert(0, vec![1], "a", 10);
        cache.insert(1, vec![1], "of another", 10);
        cache.insert(0, vec![2], "b", 10);
        cache.find(0, &[1, 0]);
        assert!(cache.pop(0) && cache.find(0, &[2, 0]).is_none() && cache.find(0, &[1, 0]).is_some());
        assert!(cache.pop(0) && !cache.pop(0));
        assert_eq!(cache.bytes(1), 10);
    }

    #[test]
    fn groups_have_limits_of_their_own() {
        let mut cache = cache();
        cache.add(7, 1, 30);
        cache.add(8, 2, 0);
        cache.insert(0, vec![1], "a", 90);
        cache.insert(7, vec![1], "b", 20);
        cache.insert(7, vec![2], "c", 20);
        cache.insert(8, vec![1], "d", 1);
        assert_eq!((cache.bytes(0), cache.bytes(7), cache.bytes(8)), (90, 20, 0));
        assert_eq!(cache.find(7, &[2, 0]), Some((&"c", 1)));
        assert!(cache.takes(7, 30) && !cache.takes(7, 31) && !cache.takes(8, 1));
    }

    proptest! {
        #[test]
        fn bytes_stay_within_the_limit_and_are_the_sum(
            steps in proptest::collection::vec((0u8..3, proptest::collection::vec(0u32..3, 0..6), 0u64..60, any::<bool>()), 0..60)
        ) {
            let mut cache = PromptCache::new();
            (0..3).for_each(|namespace| cache.add(namespace, 0, 100));
            for (namespace, tokens, bytes, look) in steps {
                if look {
                    if let Some((found, len)) = cache.find(namespace, &tokens) {
                        let found: &Vec<u32> = found;
                        prop_assert!(len < tokens.len() && found[..len] == tokens[..len]);
                    }
                } else {
                    cache.insert(namespace, tokens.clone(), tokens, bytes);
                }
                prop_assert!((0..3).map(|namespace| cache.bytes(namespace)).sum::<u64>() <= 100);
            }
        }
    }
}
