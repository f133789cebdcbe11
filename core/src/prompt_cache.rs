//! Which computed prompts are kept in memory, so that a conversation's next turn does not compute its former ones again.
//!
//! Pure bookkeeping over token ids: what is kept for them is the caller's (`T`; on MLX a copy of the row's keys and values).
//! Entries belong to a namespace, one per loaded model, since keys and values of one say nothing to another.

use std::collections::VecDeque;

struct Entry<N, T> {
    namespace: N,
    tokens: Vec<u32>,
    bytes: u64,
    value: T,
}

/// Kept prompts, least recently used first, within a number of bytes.
pub(crate) struct PromptCache<N, T> {
    entries: VecDeque<Entry<N, T>>,
    limit: u64,
    bytes: u64,
}

impl<N: Copy + PartialEq, T> PromptCache<N, T> {
    /// Keeps at most `limit` bytes; 0 keeps nothing.
    pub(crate) fn new(limit: u64) -> Self {
        Self { entries: VecDeque::new(), limit, bytes: 0 }
    }

    /// Whether so many bytes may be kept at all.
    pub(crate) fn takes(&self, bytes: u64) -> bool {
        bytes > 0 && bytes <= self.limit
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
    /// recently used ones until the limit is met. What is larger than the limit is not kept.
    pub(crate) fn insert(&mut self, namespace: N, tokens: Vec<u32>, value: T, bytes: u64) {
        if tokens.is_empty() || !self.takes(bytes) {
            return;
        }
        self.retain(|entry| entry.namespace != namespace || !tokens.starts_with(&entry.tokens));
        while self.bytes + bytes > self.limit {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.bytes -= oldest.bytes;
        }
        self.bytes += bytes;
        self.entries.push_back(Entry { namespace, tokens, bytes, value });
    }

    /// Bytes kept for a namespace.
    pub(crate) fn bytes(&self, namespace: N) -> u64 {
        self.entries.iter().filter(|entry| entry.namespace == namespace).map(|entry| entry.bytes).sum()
    }

    /// Lets go of a namespace's entries.
    pub(crate) fn remove(&mut self, namespace: N) {
        self.retain(|entry| entry.namespace != namespace);
    }

    /// Lets go of everything.
    pub(crate) fn clear(&mut self) {
        self.retain(|_| false);
    }

    /// Changes the limit, for the next insert on.
    pub(crate) fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }

    fn retain(&mut self, keep: impl Fn(&Entry<N, T>) -> bool) {
        self.entries.retain(|entry| keep(entry));
        self.bytes = self.entries.iter().map(|entry| entry.bytes).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cache() -> PromptCache<u8, &'static str> {
        PromptCache::new(100)
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
        assert_eq!((cache.entries.len(), cache.bytes), (1, 10));
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
        assert_eq!((cache.entries.len(), cache.bytes), (2, 80));
        cache.clear();
        assert_eq!(cache.bytes, 0);
    }

    proptest! {
        #[test]
        fn bytes_stay_within_the_limit_and_are_the_sum(
            steps in proptest::collection::vec((0u8..3, proptest::collection::vec(0u32..3, 0..6), 0u64..60, any::<bool>()), 0..60)
        ) {
            let mut cache = PromptCache::new(100);
            for (namespace, tokens, bytes, look) in steps {
                if look {
                    if let Some((found, len)) = cache.find(namespace, &tokens) {
                        let found: &Vec<u32> = found;
                        prop_assert!(len < tokens.len() && found[..len] == tokens[..len]);
                    }
                } else {
                    cache.insert(namespace, tokens.clone(), tokens, bytes);
                }
                prop_assert!(cache.bytes <= 100);
                prop_assert_eq!(cache.bytes, (0..3).map(|namespace| cache.bytes(namespace)).sum::<u64>());
            }
        }
    }
}
