//! Things whose end matters: a use, an external charge, a pause.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::state::Inner;
use super::table::EntryShared;
use super::types::{Key, Origin, Quiesce, Token};
use crate::sync::Ordering;

/// A use of a resident: while it lives, the entry is neither evicted nor swept. Dropping it ends the use; that never blocks,
/// never waits for a device and may happen on any thread, also after the pool was closed.
///
/// An explicit forced evict, a forget, a replace or the close of the pool can take the entry away from under a lease
/// (P10): the lease is then [detached](Self::is_detached). Its holder's own reference keeps the model usable (P26), the
/// bytes stay on the account until the last lease ends, and then the pool drains.
#[must_use = "the use ends when the lease is dropped"]
pub struct Lease {
    pub(crate) shared: Arc<EntryShared>,
    pub(crate) origin: Origin,
    // Whether the drop ends the use.
    pub(crate) armed: bool,
}

impl Lease {
    /// What is used.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.shared.key
    }

    /// The token under which the owner keeps the engine.
    #[must_use]
    pub fn token(&self) -> Token {
        self.shared.token
    }

    /// Whether this use found the entry resident, joined a load or ran it.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// How long the load took, whoever ran it.
    #[must_use]
    pub fn load_time(&self) -> Duration {
        self.shared.load_time
    }

    /// Whether the pool has let the entry go. Work already begun may finish on it; nothing new may begin, and the owner
    /// must not install the engine (P21, P26).
    #[must_use]
    pub fn is_detached(&self) -> bool {
        self.shared.detached.load(Ordering::Acquire)
    }

    /// Gives up the guard without ending the use: somebody must call [`Pool::end_use`](super::Pool::end_use) with the token,
    /// exactly once. For bindings, whose handles cannot borrow.
    #[must_use]
    pub fn into_token(mut self) -> Token {
        let token = self.token();
        self.armed = false;
        token
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.armed {
            self.shared.end_use();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.shared.key)
            .field("token", &self.shared.token)
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

/// Bytes of the host's own on the pool's account, for as long as the value lives. Charging never evicts by itself: the next
/// admission or `trim` reckons with it.
#[must_use = "the charge ends when the value is dropped"]
pub struct ExternalCharge {
    pub(crate) inner: Arc<Inner>,
    pub(crate) bytes: u64,
}

impl ExternalCharge {
    /// Bytes charged now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the charge. Less of it may let a waiting admission go on.
    pub fn set(&mut self, bytes: u64) {
        Inner::change_external(&self.inner, self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for ExternalCharge {
    fn drop(&mut self) {
        Inner::change_external(&self.inner, self.bytes, 0);
    }
}

impl fmt::Debug for ExternalCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalCharge").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// While it lives, no load starts. Residents stay usable unless their quiesce hook says otherwise. Dropping it resumes them,
/// in the reverse order, and then lets the waiting admissions go on; it does not block.
#[must_use = "the pool resumes when the value is dropped"]
pub struct Paused {
    pub(crate) inner: Arc<Inner>,
    pub(crate) quiesced: Vec<(Key, Arc<dyn Quiesce>)>,
}

impl Paused {
    /// The residents that were quiesced, in order.
    pub fn quiesced(&self) -> impl Iterator<Item = &Key> {
        self.quiesced.iter().map(|(key, _)| key)
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        for (key, hook) in std::mem::take(&mut self.quiesced).into_iter().rev() {
            if let Err(error) = super::spawn::guarded_call("the resume of a resident", || hook.resume()) {
                tracing::warn!(%key, %error, "resume failed");
            }
        }
        Inner::resume(&self.inner);
    }
}

impl fmt::Debug for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Paused").field("quiesced", &self.quiesced.len()).finish_non_exhaustive()
    }
}
