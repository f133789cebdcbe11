//! Streams: JavaScript looks for events, and is told by a letter when looking is worth it.
//!
//! Looking costs a lock of nobody else's and never waits. So a burst of tokens costs one letter and one look.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use hob::engine::{Engine, Event, Stream, StreamControl};
use napi::bindgen_prelude::{Either, Float64ArraySlice};
use napi_derive::napi;
use parking_lot::Mutex;

use crate::Live;
use crate::error::{Refusal, count, enter};
use crate::mailbox::{Letter, Mailbox};
use crate::results::{NativeEvent, scratch};

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

    /// What has come, at most so much; `None` when a letter will say that there is something.
    fn events(&self) -> hob::Result<Option<Vec<Event>>> {
        if let Some(error) = self.failed.lock().take() {
            return Err(error);
        }
        let mut place = self.stream.lock();
        let mut events = Vec::new();
        while events.len() < AT_ONCE {
            let Some(stream) = place.as_mut() else { break };
            let polled = self.readiness.poll(|context| pin!(stream.next()).poll(context));
            match polled {
                Poll::Ready(Some(Ok(event))) => {
                    let last = matches!(event, Event::Finished(_));
                    events.push(event);
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
                    break;
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
    }
}

#[napi]
impl NativeStream {
    /// The events that have come, or null: then a `ready` letter says when to look again. After the last event an empty list. A text
    /// is one chunk of nothing else, and its tokens are in `ids`, behind their count.
    #[napi]
    pub fn look(&self, mut ids: Float64ArraySlice<'_>) -> Result<Option<Either<String, Vec<NativeEvent>>>, Refusal> {
        enter(|| {
            let ids = scratch(&mut ids);
            let Some(mut events) = self.events()? else { return Ok(None) };
            if let [Event::Chunk(chunk)] = &mut *events
                && chunk.reasoning.is_empty()
                && chunk.logprobs.is_empty()
                && chunk.token_ids.len() < ids.len()
            {
                ids[0] = count(chunk.token_ids.len());
                for (place, id) in ids[1..].iter_mut().zip(&chunk.token_ids) {
                    *place = f64::from(*id);
                }
                return Ok(Some(Either::A(std::mem::take(&mut chunk.text))));
            }
            Ok(Some(Either::B(events.into_iter().map(NativeEvent::from).collect())))
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
