//! Futures that a token can end, and values that one caller at a time may use.

use std::future::{Future, poll_fn};
use std::ops::{Deref, DerefMut};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use hob::{CancelToken, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::types::RawCancelToken;

/// The core's token of an optional argument.
pub(crate) fn token(token: Option<&Arc<RawCancelToken>>) -> Option<CancelToken> {
    token.map(|token| token.token.clone())
}

/// Runs `work` until its end or until the token is cancelled, whichever comes first. What `work` has begun goes on by itself.
pub(crate) async fn until<T>(cancel: Option<CancelToken>, work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut work = pin!(work);
    let Some(token) = cancel else { return work.await };
    let mut cancelled = token.cancelled();
    poll_fn(|context| {
        if let Poll::Ready(result) = work.as_mut().poll(context) {
            return Poll::Ready(result);
        }
        match Pin::new(&mut cancelled).poll(context) {
            Poll::Ready(reason) => Poll::Ready(Err(Error::new(reason.kind(), "the caller stopped waiting"))),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// A value that one caller at a time may take; a second one is refused, not queued.
#[derive(Debug)]
pub(crate) struct Single<T> {
    slot: Mutex<Option<T>>,
}

impl<T> Single<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { slot: Mutex::new(Some(value)) }
    }

    /// The value, until the guard goes.
    pub(crate) fn take(&self, what: &str) -> Result<Taken<'_, T>> {
        match self.slot.lock().take() {
            Some(value) => Ok(Taken { slot: &self.slot, value: Some(value) }),
            None => Err(Error::new(ErrorKind::Busy, format!("another task is reading {what}; read it from one task"))),
        }
    }
}

pub(crate) struct Taken<'a, T> {
    slot: &'a Mutex<Option<T>>,
    value: Option<T>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is there until the drop")
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("it is there until the drop")
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        *self.slot.lock() = self.value.take();
    }
}
