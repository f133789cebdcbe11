//! Residents of the host's own: Swift closures as loads and releases of the core.
//!
//! Swift is told to begin and answers on an object, whenever it likes and from any thread: so its closures may be asynchronous, and the
//! pool's thread never waits for them.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;

use hob::pool::{Admission, LoadContext, Loaded, Origin, Progress, Quiesce, Token};
use hob::{BoxFuture, CancelToken, Error, ErrorKind, Pool};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::Result;
use crate::live::{Live, Type};
use crate::pool::{RawLease, deadline, or_live};
use crate::types::{RawCancelToken, RawIdle, RawKey, RawNoRoom, seconds_of};

/// A host's resident. Each method begins its work, returns at once and answers through the task; it must not block.
#[uniffi::export(callback_interface)]
pub trait RawResident: Send + Sync {
    /// Finds the cost out: `finish` with bytes.
    fn estimate(&self, task: Arc<RawTask>);
    /// Loads: `finish`, with the measured bytes if they are known.
    fn load(&self, task: Arc<RawTask>);
    /// Lets go of what was loaded under the task's token.
    fn release(&self, task: Arc<RawTask>);
    /// Stops its work while the pool is paused.
    fn quiesce(&self, task: Arc<RawTask>);
    /// Undoes that. Has no answer.
    fn resume(&self);
}

/// The answer of one call of a resident. One that is let go of unanswered counts as failed.
#[derive(uniffi::Object)]
pub struct RawTask {
    token: u64,
    cancel: CancelToken,
    progress: Option<Progress>,
    answer: Mutex<Option<oneshot::Sender<hob::Result<Option<u64>>>>>,
    _live: Live,
}

impl RawTask {
    fn answer(&self, answer: hob::Result<Option<u64>>) -> bool {
        let sender = self.answer.lock().take();
        sender.is_some_and(|sender| sender.send(answer).is_ok())
    }
}

#[uniffi::export]
impl RawTask {
    /// The admission's token; 0 where there is none.
    ///
    /// # Errors
    /// None, as things are.
    pub fn token(&self) -> Result<u64> {
        Ok(self.token)
    }

    /// Reports how far a load is.
    ///
    /// # Errors
    /// None, as things are.
    #[allow(clippy::cast_possible_truncation, reason = "a fraction")]
    pub fn report(&self, fraction: f64) -> Result<()> {
        if let Some(progress) = &self.progress {
            progress.report(fraction as f32);
        }
        Ok(())
    }

    /// Answers; whether somebody still waited.
    ///
    /// # Errors
    /// None, as things are.
    pub fn finish(&self, bytes: Option<u64>) -> Result<bool> {
        Ok(self.answer(Ok(bytes)))
    }

    /// Answers with a failure, in the host's words. One that was `cancelled` because the pool asked for it is no fault of the host's.
    ///
    /// # Errors
    /// None, as things are.
    pub fn fail(&self, message: String, cancelled: bool) -> Result<bool> {
        let error = match self.cancel.check() {
            Err(error) if cancelled => error,
            _ => Error::new(ErrorKind::Callback, message),
        };
        Ok(self.answer(Err(error)))
    }

    /// Completes when the work should end (true) or has been answered (false).
    ///
    /// # Errors
    /// None, as things are.
    pub async fn cancelled(&self) -> Result<bool> {
        let mut cancelled = self.cancel.cancelled();
        poll_fn(|context| Pin::new(&mut cancelled).poll(context).map(|_| ())).await;
        Ok(self.answer.lock().is_some())
    }
}

/// A request for residency.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawAdmission {
    /// Whose.
    pub key: RawKey,
    /// Bytes; nothing asks the resident.
    pub cost_bytes: Option<u64>,
    /// The entry's own idle policy.
    pub idle: Option<RawIdle>,
    /// That of the countdown after this use.
    pub use_idle: Option<RawIdle>,
    /// Never evict.
    pub pinned: bool,
    /// Return a lease.
    pub in_use: bool,
    /// Forget an existing entry.
    pub replace: bool,
    /// Whether a pause concerns it.
    pub quiesces: bool,
    /// Without room; nothing is the pool's default.
    pub no_room: Option<RawNoRoom>,
    /// Leave when cancelled.
    pub cancel: Option<Arc<RawCancelToken>>,
    /// Leave after so many seconds.
    pub timeout_s: Option<f64>,
}

/// How an admission was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum RawOrigin {
    /// Resident.
    Hit,
    /// Another's load.
    Joined,
    /// Its own load.
    Loaded,
}

/// A successful admission.
#[derive(Debug, Clone, uniffi::Record)]
pub struct RawAdmitted {
    /// The entry's.
    pub token: u64,
    /// Hit, join or load.
    pub origin: RawOrigin,
    /// How long the load took.
    pub load_s: f64,
    /// The use, if asked for.
    pub lease: Option<Arc<RawLease>>,
}

pub(crate) async fn admit(pool: &Pool, raw: RawAdmission, resident: Arc<dyn RawResident>) -> Result<RawAdmitted> {
    let key = raw.key.into();
    let mut admission = match raw.cost_bytes {
        Some(bytes) => Admission::new(key, bytes),
        None => {
            let resident = Arc::clone(&resident);
            Admission::estimated(key, move || estimate(resident))
        }
    };
    if let Some(idle) = raw.idle {
        admission = admission.idle(idle.into());
    }
    if let Some(idle) = raw.use_idle {
        admission = admission.use_idle(idle.into());
    }
    if raw.pinned {
        admission = admission.pinned();
    }
    if raw.in_use {
        admission = admission.in_use();
    }
    if raw.replace {
        admission = admission.replace();
    }
    if raw.quiesces {
        admission = admission.quiesce(Arc::new(Quiesced(Arc::clone(&resident))));
    }
    if let Some(no_room) = raw.no_room {
        admission = admission.no_room(no_room.into());
    }
    admission = admission.cancel(or_live(raw.cancel.map(|cancel| cancel.token.clone())));
    if let Some(timeout) = raw.timeout_s
        && let Some(deadline) = deadline(pool, seconds_of("the timeout", timeout)?)
    {
        admission = admission.deadline(deadline);
    }
    let loads = Arc::clone(&resident);
    let admitted = pool
        .admit_boxed(
            admission,
            Box::new(move |context: LoadContext| load(loads, context)),
            Box::new(move |token: Token| release(resident, token)),
        )
        .await?;
    Ok(RawAdmitted {
        token: admitted.token.as_u64(),
        origin: match admitted.origin {
            Origin::Hit => RawOrigin::Hit,
            Origin::Joined => RawOrigin::Joined,
            Origin::Loaded => RawOrigin::Loaded,
        },
        load_s: admitted.load_time.as_secs_f64(),
        lease: admitted.lease.map(RawLease::give),
    })
}

fn estimate(resident: Arc<dyn RawResident>) -> BoxFuture<'static, hob::Result<u64>> {
    Box::pin(async move {
        let bytes = ask("the estimate", 0, CancelToken::new(), None, |task| resident.estimate(task)).await?;
        bytes.ok_or_else(|| Error::new(ErrorKind::Callback, "the estimate callback gave no number of bytes"))
    })
}

fn load(resident: Arc<dyn RawResident>, context: LoadContext) -> BoxFuture<'static, hob::Result<Loaded>> {
    Box::pin(async move {
        let LoadContext { token, cancel, progress, .. } = context;
        let bytes = ask("the load", token.as_u64(), cancel, Some(progress), |task| resident.load(task)).await?;
        Ok(bytes.map_or_else(Loaded::unmeasured, Loaded::measured))
    })
}

fn release(resident: Arc<dyn RawResident>, token: Token) -> BoxFuture<'static, hob::Result<()>> {
    Box::pin(async move {
        ask("the release", token.as_u64(), CancelToken::new(), None, |task| resident.release(task)).await.map(|_| ())
    })
}

struct Quiesced(Arc<dyn RawResident>);

impl Quiesce for Quiesced {
    fn quiesce(&self) -> BoxFuture<'static, hob::Result<()>> {
        let resident = Arc::clone(&self.0);
        Box::pin(async move { ask("the quiesce", 0, CancelToken::new(), None, |task| resident.quiesce(task)).await.map(|_| ()) })
    }

    fn resume(&self) {
        self.0.resume();
    }
}

/// Ends whoever waits in [`RawTask::cancelled`], once the work is answered or nobody waits for it any more.
struct End(CancelToken);

impl Drop for End {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Has Swift begin, and waits for its answer.
pub(crate) async fn ask(
    what: &str,
    token: u64,
    cancel: CancelToken,
    progress: Option<Progress>,
    begin: impl FnOnce(Arc<RawTask>),
) -> hob::Result<Option<u64>> {
    let (sender, receiver) = oneshot::channel();
    let end = End(cancel.child());
    let task = RawTask { token, cancel: end.0.clone(), progress, answer: Mutex::new(Some(sender)), _live: Live::new(Type::Task) };
    begin(Arc::new(task));
    let answer = receiver.await;
    answer.unwrap_or_else(|_| Err(Error::new(ErrorKind::Callback, format!("{what} callback ended without an answer"))))
}
