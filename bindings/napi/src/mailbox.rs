//! How the core's answers reach an environment's JavaScript.
//!
//! Each environment (the main thread, a worker) has one mailbox: a queue here, and one threadsafe function that rings a bell in
//! its event loop and brings the letters. Two consequences:
//!
//! - Many answers cost one ring, and no ring brings more than a page: the rest waits for the loop's next turn.
//! - When the environment goes, the threadsafe function's own state is dropped, whatever else is under way. That closes the
//!   queue: letters are dropped here, where they are values of Rust, callers of JavaScript's functions are told, and everything
//!   the environment had asked for is cancelled (hazard L8).
//!
//! Futures run without a thread of their own where they can ([`task`](crate::task)), else on [`runtime`], and not on napi's tokio:
//! the core's need no particular executor, and one small thread that is never stopped has no order of ending to get wrong at a
//! process's exit.

use std::collections::{HashMap, VecDeque};
use std::future::{Future, poll_fn};
use std::mem::ManuallyDrop;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use hob::pool::{Progress, Runtime, Spawn, Token};
use hob::{BoxFuture, CancelToken, Error, ErrorKind};
use napi::bindgen_prelude::{Float64Array, Float64ArraySlice, FnArgs, Function};
use napi::threadsafe_function::{ThreadsafeFunction, ThreadsafeFunctionCallMode};
use napi::{Env, Status, sys};
use napi_derive::napi;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::engine::NativeCancelToken;
use crate::error::{NativeFailure, Refusal, enter, number, whole};
use crate::results::{NativeLetter, Page, Value, scratch};
use crate::task;

/// What the bell brings.
type Letters = FnArgs<(Option<Vec<NativeLetter>>,)>;

type Bell = ThreadsafeFunction<(), (), Letters, Status, false, true, 0>;

/// A letter to JavaScript, before it is made of its values.
pub(crate) enum Letter {
    /// A call's end.
    Settled(u64, Box<hob::Result<Value>>),
    /// How far a load is.
    Progress(u64, f64),
    /// A stream or a subscription has something to look at.
    Ready(u64),
    /// A function of the host's is to be run.
    Call { id: u64, call: u64, what: What, token: Token },
    /// Nobody waits for that run any more.
    Abort(u64),
    /// The functions of an admission are no longer needed.
    Forget(u64),
}

/// The host's functions of an admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Estimate,
    Load,
    Release,
}

impl What {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Estimate => "estimate",
            Self::Load => "load",
            Self::Release => "release",
        }
    }
}

#[derive(Default)]
struct Inbox {
    letters: VecDeque<Letter>,
    /// The bell has rung and nobody has looked yet.
    rung: bool,
    closed: bool,
}

/// A run of a host's function that has not ended.
struct Run {
    answer: oneshot::Sender<Result<Option<u64>, String>>,
    progress: Option<Progress>,
}

/// What is left when the threadsafe function is gone.
pub(crate) struct Post {
    inbox: Mutex<Inbox>,
    runs: Mutex<HashMap<u64, Run>>,
    last_run: AtomicU64,
    /// Ancestor of every token of the environment, and the token of what was given none.
    alive: CancelToken,
}

impl Post {
    fn close(&self) {
        let letters = {
            let mut inbox = self.inbox.lock();
            inbox.closed = true;
            std::mem::take(&mut inbox.letters)
        };
        // Whoever waits for one of these functions is told by its sender's end.
        let runs = std::mem::take(&mut *self.runs.lock());
        self.alive.cancel();
        drop((letters, runs));
    }
}

impl Post {
    fn take(&self, page: &mut [f64]) -> hob::Result<Option<Vec<NativeLetter>>> {
        let mut page = Page::new(page)?;
        let mut letters = std::mem::take(&mut self.inbox.lock().letters);
        let mut others = Vec::new();
        while !page.is_full()
            && let Some(letter) = letters.pop_front()
        {
            if let Some(other) = letter.write(&mut page) {
                page.write(&[Page::OTHER]);
                others.push(other);
            }
        }
        let mut inbox = self.inbox.lock();
        letters.append(&mut inbox.letters);
        inbox.rung = !letters.is_empty();
        inbox.letters = letters;
        page.end(inbox.rung);
        Ok((!others.is_empty()).then_some(others))
    }
}

/// Lives in the threadsafe function, and goes with it.
struct Tenant(Arc<Post>);

impl Drop for Tenant {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// One environment's mailbox. Any thread may post.
pub(crate) struct Mailbox {
    post: Arc<Post>,
    bell: Bell,
}

impl Mailbox {
    /// Puts a letter into the queue. False when the environment is gone; the letter is dropped then.
    pub(crate) fn send(&self, letter: Letter) -> bool {
        let ring = {
            let mut inbox = self.post.inbox.lock();
            if inbox.closed {
                return false;
            }
            inbox.letters.push_back(letter);
            !std::mem::replace(&mut inbox.rung, true)
        };
        if ring {
            // A throw of the dispatcher's is caught here and not taken to be the host's uncaught exception.
            self.bell.call_with_return_value((), ThreadsafeFunctionCallMode::NonBlocking, |_, _| Ok(()));
        }
        true
    }

    /// What cancels a request: the token it was given, else the environment's end.
    pub(crate) fn token(&self, given: Option<&NativeCancelToken>) -> CancelToken {
        given.map_or(&self.post.alive, |given| &given.token).clone()
    }

    /// Runs a future of the core; its end is the call's.
    pub(crate) fn run<F>(self: &Arc<Self>, id: u64, future: F) -> hob::Result<()>
    where
        F: Future<Output = hob::Result<Value>> + Send + 'static,
    {
        runtime()?.spawn(self.settling(id, future));
        Ok(())
    }

    /// As [`run`](Self::run), for a future that keeps what [`task`](crate::task) asks for: no thread is between it and the device.
    pub(crate) fn run_here<F>(self: &Arc<Self>, id: u64, future: F)
    where
        F: Future<Output = hob::Result<Value>> + Send + 'static,
    {
        task::start(self.settling(id, future));
    }

    fn settling<F>(self: &Arc<Self>, id: u64, future: F) -> BoxFuture<'static, ()>
    where
        F: Future<Output = hob::Result<Value>> + Send + 'static,
    {
        let mut reply = Reply { mailbox: Arc::clone(self), id, sent: false };
        Box::pin(async move {
            let result = future.await;
            reply.settle(result);
        })
    }

    /// Runs a host's function in its event loop and waits for what it says. While nobody needs the result any more (`cancel`) its
    /// signal is aborted; it is waited for all the same.
    pub(crate) async fn call(
        &self,
        id: u64,
        what: What,
        token: Token,
        cancel: Option<CancelToken>,
        progress: Option<Progress>,
    ) -> hob::Result<Option<u64>> {
        let gone = || {
            let text = format!("the {} function cannot run: the JavaScript environment that gave it has ended", what.name());
            Error::new(ErrorKind::Callback, text)
        };
        let call = self.post.last_run.fetch_add(1, Ordering::Relaxed) + 1;
        let (answer, answered) = oneshot::channel();
        self.post.runs.lock().insert(call, Run { answer, progress });
        if !self.send(Letter::Call { id, call, what, token }) {
            self.post.runs.lock().remove(&call);
            return Err(gone());
        }
        let mut answered = pin!(answered);
        let mut cancelled = cancel.as_ref().map(|cancel| Box::pin(cancel.cancelled()));
        let answer = poll_fn(|context| {
            if let Poll::Ready(answer) = answered.as_mut().poll(context) {
                return Poll::Ready(answer);
            }
            if cancelled.as_mut().is_some_and(|cancelled| cancelled.as_mut().poll(context).is_ready()) {
                cancelled = None;
                self.send(Letter::Abort(call));
            }
            Poll::Pending
        });
        match answer.await {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(message)) => {
                // A load that ends because it was asked to did not fail.
                if let Some(cancel) = &cancel {
                    cancel.check()?;
                }
                Err(Error::new(ErrorKind::Callback, format!("the {} function failed", what.name())).with_source(message))
            }
            Err(_) => Err(gone()),
        }
    }
}

/// Settles a call exactly once: also when its future panicked, or was dropped with its executor.
struct Reply {
    mailbox: Arc<Mailbox>,
    id: u64,
    sent: bool,
}

impl Reply {
    fn settle(&mut self, result: hob::Result<Value>) {
        self.sent = true;
        self.mailbox.send(Letter::Settled(self.id, Box::new(result)));
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.sent {
            self.settle(Err(Error::new(ErrorKind::Internal, "a call ended without an answer; this is a fault in Hob")));
        }
    }
}

/// The executor of the process's futures. It is never stopped: a process ends under it.
pub(crate) fn runtime() -> hob::Result<&'static Arc<Runtime>> {
    static RUNTIME: OnceLock<hob::Result<Arc<Runtime>>> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::start("hob-napi").map(Arc::new)).as_ref().map_err(Clone::clone)
}

/// The mailbox of this environment. The package makes one.
#[napi]
pub struct NativeMailbox {
    pub(crate) mailbox: Arc<Mailbox>,
}

#[napi]
impl NativeMailbox {
    /// `bell` is called in the event loop when letters have come, with what `take` gives. It does not keep the loop alive until `ref` is
    /// called.
    #[napi(constructor)]
    pub fn new(bell: Function<'_, FnArgs<(Option<Vec<NativeLetter>>,)>, ()>, page: Float64Array) -> napi::Result<Self> {
        let post = Arc::new(Post {
            inbox: Mutex::default(),
            runs: Mutex::default(),
            last_run: AtomicU64::new(0),
            alive: CancelToken::new(),
        });
        let tenant = Tenant(Arc::clone(&post));
        // It goes with the environment: when the tenant does, JavaScript may be past letting go of anything.
        let mut page = ManuallyDrop::new(page);
        let bell = bell.build_threadsafe_function::<()>().weak::<true>().build_callback(move |_| {
            // SAFETY: as for `scratch`.
            let page = unsafe { page.as_mut() };
            let letters = enter(|| tenant.0.take(page)).unwrap_or_default();
            Ok((letters,).into())
        })?;
        Ok(Self { mailbox: Arc::new(Mailbox { post, bell }) })
    }

    /// The letters that have come, oldest first: as numbers on the page where they consist of nothing else, the others as values. The
    /// page says whether there are more: then the bell does not ring, and JavaScript takes them when the event loop has had a turn.
    #[napi]
    pub fn take(&self, mut page: Float64ArraySlice<'_>) -> Result<Option<Vec<NativeLetter>>, Refusal> {
        enter(|| self.mailbox.post.take(scratch(&mut page)))
    }

    /// Keeps the event loop alive, until `unref`.
    #[napi(js_name = "ref")]
    pub fn refer(&self, env: Env) {
        // SAFETY: on the environment's thread, and not after its end.
        self.with_bell(|bell| unsafe { sys::napi_ref_threadsafe_function(env.raw(), bell) });
    }

    /// Lets the event loop end.
    #[napi]
    pub fn unref(&self, env: Env) {
        // SAFETY: as above.
        self.with_bell(|bell| unsafe { sys::napi_unref_threadsafe_function(env.raw(), bell) });
    }

    fn with_bell(&self, act: impl FnOnce(sys::napi_threadsafe_function) -> sys::napi_status) {
        let handle = &self.mailbox.bell.handle;
        handle.with_read_aborted(|aborted| {
            if !aborted {
                // A failure only means that the environment is ending.
                let _ = act(handle.get_raw());
            }
        });
    }

    /// A token: cancelled with the one given, and always at the environment's end.
    #[napi]
    pub fn token(&self, parent: Option<&NativeCancelToken>) -> NativeCancelToken {
        NativeCancelToken { token: self.mailbox.token(parent).child() }
    }

    /// What a host's function said: `error` when it failed, else the bytes it gave, if any.
    #[napi]
    pub fn answer(&self, call: f64, error: Option<String>, bytes: Option<f64>) -> Result<(), Refusal> {
        enter(|| {
            let run = self.mailbox.post.runs.lock().remove(&whole("call", call)?);
            let Some(run) = run else { return Ok(()) };
            let answer = match (error, bytes) {
                (Some(error), _) => Err(error),
                (None, Some(bytes)) => whole("bytes", bytes).map(Some).map_err(|error| error.message().to_owned()),
                (None, None) => Ok(None),
            };
            // Nobody waits for it when the pool is gone.
            let _ = run.answer.send(answer);
            Ok(())
        })
    }

    /// How far a host's load is, 0 to 1.
    #[napi]
    pub fn report(&self, call: f64, fraction: f64) -> Result<(), Refusal> {
        enter(|| {
            let call = whole("call", call)?;
            let progress = self.mailbox.post.runs.lock().get(&call).and_then(|run| run.progress.clone());
            if let Some(progress) = progress {
                #[allow(clippy::cast_possible_truncation)] // a fraction
                progress.report(fraction as f32);
            }
            Ok(())
        })
    }
}

impl Letter {
    /// Writes it as numbers, or gives it back as a value.
    fn write(self, page: &mut Page<'_>) -> Option<NativeLetter> {
        let empty = NativeLetter { kind: "", id: 0.0, value: None, error: None, call: None, token: None, fraction: None };
        Some(match self {
            Self::Ready(id) => {
                page.write(&[Page::READY, number(id)]);
                return None;
            }
            Self::Settled(id, result) => {
                let id = number(id);
                let (value, error) = match *result {
                    Ok(Value::Embeddings(vectors)) if vectors.write(page, id) => return None,
                    Ok(value) => (Some(value), None),
                    Err(error) => (None, Some(NativeFailure::from(&error))),
                };
                NativeLetter { kind: "settled", id, value, error, ..empty }
            }
            Self::Progress(id, fraction) => NativeLetter { kind: "progress", id: number(id), fraction: Some(fraction), ..empty },
            Self::Call { id, call, what, token } => {
                let (call, token) = (Some(number(call)), Some(number(token.as_u64())));
                NativeLetter { kind: what.name(), id: number(id), call, token, ..empty }
            }
            Self::Abort(call) => NativeLetter { kind: "abort", call: Some(number(call)), ..empty },
            Self::Forget(id) => NativeLetter { kind: "forget", id: number(id), ..empty },
        })
    }
}
