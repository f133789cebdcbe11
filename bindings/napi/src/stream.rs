//! Streams: JavaScript looks for events, and is told by a letter when looking is worth it.
//!
//! Looking costs a lock of nobody else's and never waits. So a burst of tokens costs one letter and one look.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use hob::engine::{Engine, Event, Stream, StreamControl};
use napi_derive::napi;
use parking_lot::Mutex;

use crate::Live;
use crate::error::{Refusal, enter};
use crate::mailbox::{Letter, Mailbox};
use crate::results::NativeEvent;

/// Sends one `ready` letter each time it is armed and something comes.
pub(crate) struct Readiness {
    id: u64,
    armed: AtomicBool,
    mailbox: Arc<Mailbox>,
}

impl Readiness {
    pub(crate) fn new(id: u64, mailbox: Arc<Mailbox>) -> Arc<Self> {
        Arc::new(Self { id, armed: AtomicBool::new(false), mailbox })
    }

    /// Polls with this as the waker.
    pub(crate) fn poll<T>(self: &Arc<Self>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        // Before the poll: what comes during it must not be missed.
        self.armed.store(true, Ordering::SeqCst);
        let polled = poll(&mut Context::from_waker(&Waker::from(Arc::clone(self))));
        if polled.is_ready() {
            self.armed.store(false, Ordering::SeqCst);
        }
        polled
    }

    /// Nobody waits: what comes is found at the next look.
    pub(crate) fn disarm(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }
}

impl Wake for Readiness {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.armed.swap(false, Ordering::SeqCst) {
            self.mailbox.send(Letter::Ready(self.id));
        }
    }
}

/// Events given out at one look, so that a long look does not hold up the event loop.
const AT_ONCE: usize = 64;

/// A stream of events. Its end by the garbage collector cancels the generation.
#[napi]
pub struct NativeStream {
    // Taken out, and so dropped, at the end.
    stream: Mutex<Option<Stream>>,
    /// An error that came behind events of the same look.
    failed: Mutex<Option<hob::Error>>,
    control: StreamControl,
    readiness: Arc<Readiness>,
    // The last handle of an engine closes it, and so ends its streams.
    _engine: Engine,
    _live: Live,
}

impl NativeStream {
    pub(crate) fn new(stream: Stream, engine: Engine, id: u64, mailbox: Arc<Mailbox>) -> Self {
        let control = stream.control();
        Self {
            stream: Mutex::new(Some(stream)),
            failed: Mutex::new(None),
            control,
            readiness: Readiness::new(id, mailbox),
            _engine: engine,
            _live: Live::new(),
        }
    }
}

#[napi]
impl NativeStream {
    /// The events that have come, or null: then a `ready` letter says when to look again. After the last event an empty list.
    #[napi]
    pub fn look(&self) -> Result<Option<Vec<NativeEvent>>, Refusal> {
        enter(|| {
            if let Some(error) = self.failed.lock().take() {
                return Err(error);
            }
            let mut place = self.stream.lock();
            let mut events = Vec::new();
            while events.len() < AT_ONCE {
                let Some(stream) = place.as_mut() else { return Ok(Some(events)) };
                let polled = self.readiness.poll(|context| pin!(stream.next()).poll(context));
                match polled {
                    Poll::Ready(Some(Ok(event))) => {
                        let last = matches!(event, Event::Finished(_));
                        events.push(NativeEvent::from(event));
                        if last {
                            *place = None;
                        }
                    }
                    Poll::Ready(Some(Err(error))) => {
                        *place = None;
                        if events.is_empty() {
                            return Err(error);
                        }
                        *self.failed.lock() = Some(error);
                        return Ok(Some(events));
                    }
                    Poll::Ready(None) => *place = None,
                    Poll::Pending if events.is_empty() => return Ok(None),
                    Poll::Pending => {
                        self.readiness.disarm();
                        break;
                    }
                }
            }
            Ok(Some(events))
        })
    }

    /// Ends the generation with an error of kind `Cancelled`.
    #[napi]
    pub fn cancel(&self) -> Result<(), Refusal> {
        enter(|| {
            self.control.cancel();
            Ok(())
        })
    }

    /// Ends the generation with what there is.
    #[napi]
    pub fn stop(&self) -> Result<(), Refusal> {
        enter(|| {
            self.control.stop();
            Ok(())
        })
    }

    /// Cancels what still runs and lets go of it.
    #[napi]
    pub fn free(&self) -> Result<(), Refusal> {
        enter(|| {
            drop(self.stream.lock().take());
            Ok(())
        })
    }
}
