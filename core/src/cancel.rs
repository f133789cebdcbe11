//! Cancellation as a tree of tokens. Any thread may cancel; synchronous code polls [`CancelToken::is_cancelled`] or
//! [`CancelToken::check`], asynchronous code awaits [`CancelToken::cancelled`].
//!
//! Invariants:
//! 1. A token's state only moves from live to cancelled, once; the first reason wins.
//! 2. When a token is cancelled, so is every descendant, with the same reason. Ancestors and siblings are not.
//!    So a token keeps its ancestors in memory, also those that nobody else holds any more; they know of it only while it lives.
//! 3. A node's lock is held alone: never two nodes at once, never while a waker runs.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crate::clock::{BoxFuture, Clock, SystemClock};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicU8, Mutex, Ordering};

/// Why a token is cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelReason {
    /// Somebody called [`CancelToken::cancel`].
    Cancelled,
    /// A deadline of the token or of one of its ancestors passed.
    Timeout,
}

impl CancelReason {
    /// The error kind a request cancelled for this reason ends with.
    #[must_use]
    pub fn kind(self) -> ErrorKind {
        match self {
            Self::Cancelled => ErrorKind::Cancelled,
            Self::Timeout => ErrorKind::Timeout,
        }
    }
}

const LIVE: u8 = 0;
const CANCELLED: u8 = 1;
const TIMEOUT: u8 = 2;

fn reason_of(flag: u8) -> Option<CancelReason> {
    match flag {
        LIVE => None,
        TIMEOUT => Some(CancelReason::Timeout),
        _ => Some(CancelReason::Cancelled),
    }
}

/// A cheap, cloneable handle that asks work to stop. Clones are the same token; [`child`](Self::child) makes a narrower one.
#[derive(Clone)]
pub struct CancelToken {
    node: Arc<Node>,
}

struct Node {
    flag: AtomicU8,
    // Own deadlines and inherited ones; nearly always none or one.
    deadlines: Vec<Deadline>,
    parents: Parents,
    links: Mutex<Links>,
}

/// At most two: a caller's token, and that of what works for the caller.
type Parents = [Option<Arc<Node>>; 2];

impl Node {
    fn is_late(&self) -> bool {
        self.deadlines.iter().any(|deadline| deadline.clock.now() >= deadline.at)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // One after the other: a line of tokens may be long, and dropping it by recursion would be as deep.
        let mut rest = vec![std::mem::take(&mut self.parents)];
        while let Some(parents) = rest.pop() {
            let last = parents.into_iter().flatten().filter_map(Arc::into_inner);
            rest.extend(last.map(|mut node| std::mem::take(&mut node.parents)));
        }
    }
}

#[derive(Clone)]
struct Deadline {
    at: Instant,
    clock: Arc<dyn Clock>,
}

#[derive(Default)]
struct Links {
    children: Vec<Weak<Node>>,
    // Children are pruned when their number reaches this, so that a long-lived parent of many short-lived children stays small.
    prune_at: usize,
    wakers: Vec<(u64, Waker)>,
    next_id: u64,
}

impl Links {
    fn adopt(&mut self, child: &Arc<Node>) {
        if self.children.len() >= self.prune_at.max(16) {
            self.children.retain(|weak| weak.strong_count() > 0);
            self.prune_at = self.children.len() * 2;
        }
        self.children.push(Arc::downgrade(child));
    }
}

impl CancelToken {
    /// A live token without a parent.
    #[must_use]
    pub fn new() -> Self {
        Self::descend([None, None], None)
    }

    /// A token that is cancelled when this one is, and can be cancelled alone.
    #[must_use]
    pub fn child(&self) -> Self {
        Self::descend([Some(self), None], None)
    }

    /// A child that is also cancelled, with reason [`CancelReason::Timeout`], once the system's monotone clock reaches `deadline`.
    #[must_use]
    pub fn with_deadline(&self, deadline: Instant) -> Self {
        self.with_deadline_on(SystemClock::shared(), deadline)
    }

    /// As [`with_deadline`](Self::with_deadline), on a clock of the caller's choice.
    #[must_use]
    pub fn with_deadline_on(&self, clock: Arc<dyn Clock>, deadline: Instant) -> Self {
        Self::descend([Some(self), None], Some(Deadline { at: deadline, clock }))
    }

    /// A child of both: it is cancelled when either is, or at a deadline of its own.
    pub(crate) fn child_of(first: Option<&Self>, second: &Self, deadline: Option<(Arc<dyn Clock>, Instant)>) -> Self {
        Self::descend([first, Some(second)], deadline.map(|(clock, at)| Deadline { at, clock }))
    }

    fn descend(parents: [Option<&Self>; 2], deadline: Option<Deadline>) -> Self {
        let inherited = parents.iter().flatten().flat_map(|parent| parent.node.deadlines.iter().cloned());
        let child = Self {
            node: Arc::new(Node {
                flag: AtomicU8::new(LIVE),
                deadlines: inherited.chain(deadline).collect(),
                parents: parents.map(|parent| parent.map(|parent| Arc::clone(&parent.node))),
                links: Mutex::default(),
            }),
        };
        for parent in parents.into_iter().flatten() {
            let mut links = parent.node.links.lock();
            // Read under the lock: `cancel` sets the flag before it takes the children, so a child is either seen by it or born cancelled.
            let flag = parent.node.flag.load(Ordering::Acquire);
            links.adopt(&child.node);
            drop(links);
            // Nobody waits for it yet. It may have been cancelled by its first parent meanwhile.
            if flag != LIVE {
                let _ = child.node.flag.compare_exchange(LIVE, flag, Ordering::AcqRel, Ordering::Acquire);
            }
        }
        child
    }

    /// Cancels this token and all its descendants. Returns whether this call was the one that did. Callable from any thread,
    /// any number of times; wakers run on this thread, with no lock held.
    pub fn cancel(&self) -> bool {
        self.cancel_as(CANCELLED)
    }

    fn cancel_as(&self, flag: u8) -> bool {
        let mut first = false;
        let mut wakers = Vec::new();
        let mut rest = vec![self.node.clone()];
        while let Some(node) = rest.pop() {
            // A deadline that has passed already came first, also where nobody has looked at it yet.
            let flag = if node.is_late() { TIMEOUT } else { flag };
            let mut links = node.links.lock();
            if node.flag.compare_exchange(LIVE, flag, Ordering::AcqRel, Ordering::Acquire).is_err() {
                continue;
            }
            first |= Arc::ptr_eq(&node, &self.node);
            wakers.extend(links.wakers.drain(..).map(|(_, waker)| waker));
            let children = std::mem::take(&mut links.children);
            drop(links);
            rest.extend(children.iter().filter_map(Weak::upgrade));
        }
        for waker in wakers {
            waker.wake();
        }
        first
    }

    /// Whether the token is cancelled or its deadline has passed.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.reason().is_some()
    }

    /// Why the token is cancelled, or `None` while it is live.
    #[must_use]
    pub fn reason(&self) -> Option<CancelReason> {
        let flag = self.node.flag.load(Ordering::Acquire);
        if flag == LIVE && self.node.is_late() {
            self.cancel_as(TIMEOUT);
        }
        reason_of(self.node.flag.load(Ordering::Acquire))
    }

    /// An error of kind `Cancelled` or `Timeout` once the token is cancelled; for loops of synchronous work.
    pub fn check(&self) -> Result<()> {
        match self.reason() {
            None => Ok(()),
            Some(CancelReason::Cancelled) => Err(Error::new(ErrorKind::Cancelled, "cancelled by the caller")),
            Some(CancelReason::Timeout) => {
                Err(Error::new(ErrorKind::Timeout, "the caller's deadline passed; allow a later deadline to wait longer"))
            }
        }
    }

    /// Completes, with the reason, when the token is cancelled. Owns what it needs; works on any executor.
    #[must_use]
    pub fn cancelled(&self) -> Cancelled {
        Cancelled { token: self.clone(), id: None, sleeps: None }
    }
}

impl Default for CancelToken {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = reason_of(self.node.flag.load(Ordering::Acquire));
        f.debug_struct("CancelToken").field("reason", &reason).finish_non_exhaustive()
    }
}

/// The future of [`CancelToken::cancelled`]. Dropping it leaves nothing behind.
pub struct Cancelled {
    token: CancelToken,
    id: Option<u64>,
    sleeps: Option<Vec<BoxFuture<'static, ()>>>,
}

impl Future for Cancelled {
    type Output = CancelReason;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<CancelReason> {
        let this = &mut *self;
        if let Some(reason) = this.token.reason() {
            return Poll::Ready(reason);
        }
        let node = this.token.node.clone();
        let sleeps = this
            .sleeps
            .get_or_insert_with(|| node.deadlines.iter().map(|deadline| deadline.clock.sleep_until(deadline.at)).collect());
        if sleeps.iter_mut().any(|sleep| sleep.as_mut().poll(context).is_ready()) {
            this.token.cancel_as(TIMEOUT);
        }
        let mut links = node.links.lock();
        if let Some(reason) = reason_of(node.flag.load(Ordering::Acquire)) {
            return Poll::Ready(reason);
        }
        let id = *this.id.get_or_insert_with(|| {
            links.next_id += 1;
            links.next_id
        });
        match links.wakers.iter_mut().find(|(other, _)| *other == id) {
            Some((_, waker)) => waker.clone_from(context.waker()),
            None => links.wakers.push((id, context.waker().clone())),
        }
        Poll::Pending
    }
}

impl Drop for Cancelled {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let gone = {
                let mut links = self.token.node.links.lock();
                let at = links.wakers.iter().position(|(other, _)| *other == id);
                at.map(|at| links.wakers.swap_remove(at))
            };
            drop(gone);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::FakeClock;

    fn poll(future: &mut Cancelled) -> Poll<CancelReason> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn cancel_reaches_descendants_but_not_ancestors_or_siblings() {
        let root = CancelToken::new();
        let (left, right) = (root.child(), root.child());
        let leaf = left.child();
        assert!(left.cancel());
        assert!(!left.cancel(), "only the first call counts");
        assert!(leaf.is_cancelled() && !right.is_cancelled() && !root.is_cancelled());
        root.cancel();
        assert!(right.is_cancelled());
        assert!(root.child().is_cancelled(), "a late child is born cancelled");
    }

    #[test]
    fn a_deadline_is_a_timeout_and_the_first_reason_wins() {
        let clock = Arc::new(FakeClock::new());
        let root = CancelToken::new();
        let token = root.with_deadline_on(clock.clone(), clock.now() + Duration::from_secs(1));
        let leaf = token.child();
        let mut wait = leaf.cancelled();
        assert!(poll(&mut wait).is_pending());
        clock.advance(Duration::from_secs(1));
        assert_eq!(poll(&mut wait), Poll::Ready(CancelReason::Timeout));
        assert_eq!(leaf.check().unwrap_err().kind(), ErrorKind::Timeout);
        root.cancel();
        assert_eq!(token.reason(), Some(CancelReason::Timeout));
        assert_eq!(root.reason(), Some(CancelReason::Cancelled));
    }

    #[test]
    fn a_token_can_have_two_parents() {
        let (first, second) = (CancelToken::new(), CancelToken::new());
        let of_both = || CancelToken::child_of(Some(&first), &second, None);
        let token = of_both();
        assert!(!token.is_cancelled());
        second.cancel();
        assert!(token.is_cancelled() && !first.is_cancelled());
        assert!(of_both().is_cancelled(), "a parent that is cancelled already counts");
    }

    #[test]
    fn a_token_with_two_parents_has_the_deadlines_of_both_and_its_own() {
        let clock = Arc::new(FakeClock::new());
        let root = CancelToken::new();
        for at in 0..3 {
            let until = |at| clock.now() + Duration::from_secs(at);
            let at_last = |mine| until(if mine == at { 1 } else { 9 });
            let first = root.with_deadline_on(clock.clone(), at_last(0));
            let second = root.with_deadline_on(clock.clone(), at_last(1));
            let token = CancelToken::child_of(Some(&first), &second, Some((clock.clone(), at_last(2))));
            assert_eq!(token.reason(), None);
            clock.advance(Duration::from_secs(1));
            assert_eq!(token.reason(), Some(CancelReason::Timeout), "deadline {at}");
        }
    }

    #[test]
    fn a_cancel_reaches_below_a_token_that_nobody_holds_any_more() {
        let (root, other) = (CancelToken::new(), CancelToken::new());
        let leaf = root.child().child();
        let late = root.child().with_deadline(Instant::now() + Duration::from_secs(3600)).child();
        let of_both = CancelToken::child_of(Some(&CancelToken::new()), &other.child(), None);
        root.cancel();
        assert!(leaf.is_cancelled() && late.is_cancelled() && !of_both.is_cancelled());
        other.cancel();
        assert!(of_both.is_cancelled());
    }

    #[test]
    fn a_long_line_of_tokens_ends_without_deep_recursion() {
        let root = CancelToken::new();
        let mut leaf = root.child();
        for _ in 0..1_000_000 {
            leaf = leaf.child();
        }
        root.cancel();
        assert!(leaf.is_cancelled());
    }

    #[test]
    fn waiters_and_children_leave_nothing_behind() {
        let token = CancelToken::new();
        let mut wait = token.cancelled();
        assert!(poll(&mut wait).is_pending());
        drop(wait);
        assert!(token.node.links.lock().wakers.is_empty());
        for _ in 0..10_000 {
            let _ = token.child();
        }
        assert!(token.node.links.lock().children.len() < 64);
    }
}
