//! Admissions of a host's own residents: callbacks of C as loads and releases of the core.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use hob::pool::{Admission, Admitted, LoadContext, Loaded, Origin, Quiesce, Token, unblock};
use hob::{BoxFuture, CancelReason, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::boundary::{calm, enter_shared, quiet};
use crate::cancel::hob_cancel_token;
use crate::error::{HOB_CANCELLED, HOB_OK, HOB_TIMEOUT, hob_error, hob_status, of_callback};
use crate::pool::{PoolInner, hob_pool};
use crate::raw::{self, Sized32};
use crate::request::{HOB_NUL_TERMINATED, flag, idle, no_room};
use crate::wait::{self, UserData, block, hob_drop_fn};

/// What a load callback is given. Valid during the callback, on any thread.
pub struct hob_load_context {
    _opaque: [u8; 0],
}

struct Loading {
    context: LoadContext,
    measured: Mutex<Option<u64>>,
}

unsafe fn loading<'a>(context: *const hob_load_context) -> Option<&'a Loading> {
    // SAFETY: the only pointers of this type lead to the value that `load` below lends for the callback.
    unsafe { context.cast::<Loading>().as_ref() }
}

/// Loads a resident and keeps it where its host keeps such things, by `hob_load_context_token`. Called at most once per admission, on a
/// thread of Hob's made for it, once there is room; it may block, and may call Hob, but must not wait for its own key. Returns HOB_OK;
/// anything else fails the admission with HOB_CALLBACK, and must leave nothing behind. It should end early once
/// `hob_load_context_cancelled` says so: until it ends its bytes stay reserved.
pub type hob_load_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, context: *const hob_load_context) -> hob_status>;

/// Lets go of the resident that was loaded under `token`. Called at most once, on a thread of Hob's made for it; it may block, but must
/// not wait for an admission, for its own key's end, or for the close of the pool. Returns HOB_OK; anything else is told to who asked, and the entry is gone all the same.
pub type hob_release_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, token: u64) -> hob_status>;

/// Finds out the cost of a load in bytes. Called at most once, before the load and only when one is needed; otherwise as a load.
pub type hob_estimate_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, out_bytes: *mut u64) -> hob_status>;

/// Stops a resident's work while its pool is paused: starts nothing more, and returns when what runs has ended. Called on a thread of
/// Hob's made for it; it may block, but must not wait for an admission. Returns HOB_OK; anything else fails the pause with HOB_CALLBACK.
pub type hob_quiesce_fn = Option<unsafe extern "C" fn(user_data: *mut c_void) -> hob_status>;

/// Undoes a quiesce, also one that failed or was given up half-way. Called on the thread that ends the pause, possibly after the
/// resident was released; must not block.
pub type hob_resume_fn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// The admission's token: keep the resident under it. 0 for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_load_context_token(context: *const hob_load_context) -> u64 {
    // SAFETY: as the header asks.
    quiet(0, || unsafe { loading(context) }.map_or(0, |loading| loading.context.token.as_u64()))
}

/// HOB_OK while somebody waits for the load, HOB_CANCELLED or HOB_TIMEOUT once it should end. HOB_OK for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_load_context_cancelled(context: *const hob_load_context) -> hob_status {
    // SAFETY: as the header asks.
    quiet(HOB_OK, || match unsafe { loading(context) }.and_then(|loading| loading.context.cancel.reason()) {
        None => HOB_OK,
        Some(CancelReason::Timeout) => HOB_TIMEOUT,
        Some(_) => HOB_CANCELLED,
    })
}

/// Reports how far the load is, 0 to 1; whole percents become events of the pool. Nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_load_context_progress(context: *const hob_load_context, fraction: f32) {
    // SAFETY: as the header asks.
    quiet((), || {
        if let Some(loading) = unsafe { loading(context) } {
            loading.context.progress.report(fraction);
        }
    });
}

/// Reports the bytes that the resident really takes; the charge is corrected to that. Nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_load_context_set_measured(context: *const hob_load_context, bytes: u64) {
    // SAFETY: as the header asks.
    quiet((), || {
        if let Some(loading) = unsafe { loading(context) } {
            *loading.measured.lock() = Some(bytes);
        }
    });
}

/// A request for residency. Borrowed for the call; `user_data` is shared by the callbacks, and `drop_user_data` is called once, when none
/// of them can be called any more: after the release (and after the end of a pause that quiesced the resident), or before the call
/// returns when there was nothing to load, also when the call fails (unless `struct_size` is wrong: nothing is read then). Start from
/// HOB_ADMIT_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_admit_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// What to do when there is no room: HOB_NO_ROOM_...
    pub no_room: i32,
    /// The key: `kind:id`, of a kind of the host's own.
    pub key: *const c_char,
    /// Its length, or HOB_NUL_TERMINATED.
    pub key_len: usize,
    /// Bytes it will take, without `estimate`.
    pub cost_bytes: u64,
    /// Leaves when cancelled. May be NULL. The load itself is cancelled when the last one who waits for it has left.
    pub cancel: *const hob_cancel_token,
    /// Leaves after so many milliseconds, with HOB_TIMEOUT; 0 for no bound.
    pub timeout_ms: u64,
    /// The entry's own idle policy: HOB_IDLE_...
    pub idle: i32,
    /// The seconds of HOB_IDLE_AFTER_SECONDS.
    pub idle_seconds: u32,
    /// The policy of the countdown after this use, with `in_use`: HOB_IDLE_...
    pub use_idle: i32,
    /// The seconds of HOB_IDLE_AFTER_SECONDS.
    pub use_idle_seconds: u32,
    /// 1: never evict or sweep the entry.
    pub pinned: u32,
    /// 1: the entry is born in use; one `hob_pool_end_use` with the token ends it.
    pub in_use: u32,
    /// 1: forget an existing entry of the key, without its release, and load anew.
    pub replace: u32,
    /// 0.
    pub reserved: u32,
    /// Loads; required.
    pub load: hob_load_fn,
    /// Releases; NULL for nothing to do.
    pub release: hob_release_fn,
    /// Finds the cost; NULL takes `cost_bytes`.
    pub estimate: hob_estimate_fn,
    /// The callbacks' first argument.
    pub user_data: *mut c_void,
    /// Gives `user_data` back; NULL for nothing to do.
    pub drop_user_data: hob_drop_fn,
    /// Quiesces while the pool is paused; NULL when a pause does not concern the resident.
    pub quiesce: hob_quiesce_fn,
    /// Undoes that; NULL for nothing to do.
    pub resume: hob_resume_fn,
}

// SAFETY: repr(C), begins with its size, no padding; a callback's pattern of bits is a pointer of the host's.
unsafe impl Sized32 for hob_admit_options {
    const NAME: &'static str = "hob_admit_options";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            no_room: 0,
            key: std::ptr::null(),
            key_len: HOB_NUL_TERMINATED,
            cost_bytes: 0,
            cancel: std::ptr::null(),
            timeout_ms: 0,
            idle: 0,
            idle_seconds: 0,
            use_idle: 0,
            use_idle_seconds: 0,
            pinned: 0,
            in_use: 0,
            replace: 0,
            reserved: 0,
            load: None,
            release: None,
            estimate: None,
            user_data: std::ptr::null_mut(),
            drop_user_data: None,
            quiesce: None,
            resume: None,
        }
    }
}

/// Writes what HOB_ADMIT_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_admit_options_init(options: *mut hob_admit_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_admit_options::init()) });
}

/// How an admission was answered: the entry was resident.
pub const HOB_ORIGIN_HIT: i32 = 0;
/// How an admission was answered: another caller's load of the key was under way.
pub const HOB_ORIGIN_JOINED: i32 = 1;
/// How an admission was answered: this one loaded it.
pub const HOB_ORIGIN_LOADED: i32 = 2;

/// A successful admission. Filled by the call; start from HOB_ADMITTED_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_admitted {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// HOB_ORIGIN_...
    pub origin: i32,
    /// The entry's token, never used twice by a pool.
    pub token: u64,
    /// Seconds that the load took, whoever ran it.
    pub load_s: f64,
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_admitted {
    const NAME: &'static str = "hob_admitted";
    fn init() -> Self {
        Self { struct_size: size_of::<Self>() as u32, origin: 0, token: 0, load_s: 0.0 }
    }
}

/// Makes a key resident, and blocks this thread until it is: a hit if it is already, a join if somebody is loading it, else a load once
/// there is room. `out_admitted` may be NULL unless `in_use`. Any thread but Hob's own (of callbacks: only within load and
/// release). HOB_INVALID_ARGUMENT, HOB_BUDGET_EXCEEDED, HOB_BUSY, HOB_CANCELLED, HOB_TIMEOUT, HOB_CLOSED, HOB_CALLBACK when
/// a callback failed. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_admit(
    pool: *const hob_pool,
    options: *const hob_admit_options,
    out_admitted: *mut hob_admitted,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // What the host lent is given back, whatever happens: so it is taken before anything can fail.
    // SAFETY: as the header asks.
    let data = calm(None, || {
        let given = unsafe { raw::peek_sized(options) };
        Some(Arc::new(UserData::new(given.user_data, given.drop_user_data)))
    });
    // SAFETY: as the header asks.
    unsafe {
        let status = enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            let Some(data) = &data else { return Err(Error::new(ErrorKind::Internal, "the options could not be read")) };
            if options.is_null() {
                return Err(raw::null("options"));
            }
            let given = raw::read_sized(options)?;
            let in_use = flag("in_use", given.in_use)?;
            if !out_admitted.is_null() {
                raw::write_sized(out_admitted, hob_admitted::init())?;
            } else if in_use {
                return Err(raw::null("out_admitted of an admission in use"));
            }
            let admission = admission(inner, &given, data, in_use)?;
            let Some(load) = given.load else { return Err(raw::null("load")) };
            let (loads, releases, release) = (Arc::clone(data), Arc::clone(data), given.release);
            let admitted = inner.pool.admit_boxed(
                admission,
                Box::new(move |context: LoadContext| run_load(load, loads, context)),
                Box::new(move |token: Token| run_release(release, releases, token)),
            );
            let admitted = block(None, admitted)?;
            let answer = answer_of(admitted);
            if !out_admitted.is_null() {
                raw::write_sized(out_admitted, answer)?;
            }
            Ok(HOB_OK)
        });
        calm((), || drop(data));
        status
    }
}

unsafe fn admission(inner: &PoolInner, given: &hob_admit_options, data: &Arc<UserData>, in_use: bool) -> Result<Admission> {
    // SAFETY: as the header asks.
    let (key, cancel) = unsafe { (crate::pool::key(given.key, given.key_len)?, wait::token(given.cancel)?) };
    let mut admission = match given.estimate {
        None => Admission::new(key, given.cost_bytes),
        Some(estimate) => {
            let data = Arc::clone(data);
            Admission::estimated(key, move || run_estimate(estimate, data))
        }
    };
    if let Some(policy) = idle("idle", given.idle, given.idle_seconds)? {
        admission = admission.idle(policy);
    }
    if let Some(policy) = idle("use_idle", given.use_idle, given.use_idle_seconds)? {
        admission = admission.use_idle(policy);
    }
    if flag("pinned", given.pinned)? {
        admission = admission.pinned();
    }
    if in_use {
        admission = admission.in_use();
    }
    if flag("replace", given.replace)? {
        admission = admission.replace();
    }
    if given.quiesce.is_some() || given.resume.is_some() {
        admission = admission.quiesce(Arc::new(HostQuiesce { stop: given.quiesce, go_on: given.resume, data: Arc::clone(data) }));
    }
    if let Some(policy) = no_room(given.no_room)? {
        admission = admission.no_room(policy);
    }
    if let Some(token) = cancel {
        admission = admission.cancel(token);
    }
    if given.timeout_ms > 0
        && let Some(deadline) = inner.pool.clock().now().checked_add(Duration::from_millis(given.timeout_ms))
    {
        admission = admission.deadline(deadline);
    }
    Ok(admission)
}

fn answer_of(admitted: Admitted) -> hob_admitted {
    let origin = match admitted.origin {
        Origin::Hit => HOB_ORIGIN_HIT,
        Origin::Joined => HOB_ORIGIN_JOINED,
        Origin::Loaded => HOB_ORIGIN_LOADED,
    };
    // The host ends the use by its token.
    let token = admitted.lease.map_or(admitted.token, hob::Lease::into_token);
    hob_admitted { origin, token: token.as_u64(), load_s: admitted.load_time.as_secs_f64(), ..hob_admitted::init() }
}

fn checked(what: &str, status: hob_status) -> Result<()> {
    if status == HOB_OK { Ok(()) } else { Err(of_callback(what, status)) }
}

// The callbacks may block, so each gets a thread of its own; the pool's thread keeps its timers.

fn run_load(
    load: unsafe extern "C" fn(*mut c_void, *const hob_load_context) -> hob_status,
    data: Arc<UserData>,
    context: LoadContext,
) -> BoxFuture<'static, Result<Loaded>> {
    unblock(move || {
        let loading = Loading { context, measured: Mutex::new(None) };
        // SAFETY: the host gave the pair, and the context is lent for the call.
        let status = unsafe { load(data.pointer(), (&raw const loading).cast()) };
        if status == HOB_CANCELLED || status == HOB_TIMEOUT {
            // A load that ends because it was asked to did not fail.
            loading.context.cancel.check()?;
        }
        checked("the load callback", status)?;
        Ok(loading.measured.into_inner().map_or_else(Loaded::unmeasured, Loaded::measured))
    })
}

fn run_release(
    release: Option<unsafe extern "C" fn(*mut c_void, u64) -> hob_status>,
    data: Arc<UserData>,
    token: Token,
) -> BoxFuture<'static, Result<()>> {
    let Some(release) = release else { return Box::pin(async { Ok(()) }) };
    unblock(move || {
        // SAFETY: the host gave the pair.
        checked("the release callback", unsafe { release(data.pointer(), token.as_u64()) })
    })
}

fn run_estimate(
    estimate: unsafe extern "C" fn(*mut c_void, *mut u64) -> hob_status,
    data: Arc<UserData>,
) -> BoxFuture<'static, Result<u64>> {
    unblock(move || {
        let mut bytes = 0;
        // SAFETY: the host gave the pair, and the number is lent for the call.
        checked("the estimate callback", unsafe { estimate(data.pointer(), &raw mut bytes) })?;
        Ok(bytes)
    })
}

/// A host's pair of callbacks around a pause.
struct HostQuiesce {
    stop: hob_quiesce_fn,
    go_on: hob_resume_fn,
    data: Arc<UserData>,
}

impl Quiesce for HostQuiesce {
    fn quiesce(&self) -> BoxFuture<'static, Result<()>> {
        let Some(stop) = self.stop else { return Box::pin(async { Ok(()) }) };
        let data = Arc::clone(&self.data);
        unblock(move || {
            // SAFETY: the host gave the pair.
            checked("the quiesce callback", unsafe { stop(data.pointer()) })
        })
    }

    fn resume(&self) {
        if let Some(go_on) = self.go_on {
            // SAFETY: the host gave the pair.
            unsafe { go_on(self.data.pointer()) };
        }
    }
}

// What the callbacks return becomes this kind; kept beside them, so that a change is seen.
const _: () = assert!(ErrorKind::Callback as i32 == crate::error::HOB_CALLBACK);
