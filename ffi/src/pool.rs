//! Pools: looking, marks, letting go, events.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use hob::engine::Engine;
use hob::pool::{ExternalCharge, MemoryProbe, MemoryReading, Paused, Plan, Reclaimed, Token, unblock};
use hob::{Error, ErrorKind, IdlePolicy, Key, Kind, NoRoom, Pool, PoolOptions, Result};
use parking_lot::Mutex;
use serde::Serialize;

use crate::boundary::{calm, done, enter, enter_shared, guard, out, quiet};
use crate::buffer::{self, hob_buffer};
use crate::cancel::hob_cancel_token;
use crate::error::{ErrorJson, HOB_ABSENT, HOB_OK, hob_error, hob_status, nothing};
use crate::raw::{self, Boxed, Counted, Held, Sized32, castable};
use crate::request::{flag, idle, no_room, size};
use crate::wait::{self, UserData, block, hob_drop_fn};

/// One memory budget for models and a host's own residents. Any thread, also several at once. Shared: `hob_pool_retain` and
/// `hob_pool_release`. An engine's pool keeps its engine alive. Keys are texts of the form `kind:id`: `chat:`, `embedder:` and
/// `reranker:` are Hob's own models, any other kind is the host's.
pub struct hob_pool {
    _opaque: [u8; 0],
}

pub(crate) struct PoolInner {
    pub(crate) pool: Pool,
    pub(crate) engine: Option<Engine>,
}

castable!(hob_pool => PoolInner, Counted, crate::handle::HOB_HANDLE_POOL);

/// How a pool without an engine is made. Borrowed for the call. Start from HOB_POOL_OPTIONS_INIT.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_pool_options {
    /// Set by the INIT macro.
    pub struct_size: u32,
    /// How long entries stay after their last use: HOB_IDLE_...
    pub idle: i32,
    /// The seconds of HOB_IDLE_AFTER_SECONDS.
    pub idle_seconds: u32,
    /// What an admission does while there is no room: HOB_NO_ROOM_...
    pub no_room: i32,
    /// The budget in bytes; over 0.
    pub budget_bytes: u64,
    /// Bytes never exceeded, whatever the policy; 0 for no such limit.
    pub physical_limit_bytes: u64,
    /// Admissions that may wait for room; one more is HOB_BUSY. Default 65,536.
    pub max_waiting: u64,
    /// 1: do not call `drain` by itself after each release and failed load; what is cached then takes nobody's room.
    pub no_drain_after_release: u32,
    /// 0.
    pub reserved: u32,
    /// How many milliseconds `hob_pool_evict` at most watches `memory` for bytes that come back late; 0 (the default) takes 250.
    pub settle_ms: u64,
    /// Gives freed memory back to the system; NULL when there is nothing to do.
    pub drain: hob_drain_fn,
    /// Hears of every new budget; NULL when nobody follows it.
    pub budget_changed: hob_budget_fn,
    /// Tells the memory that is really held; NULL when nobody measures.
    pub memory: hob_memory_fn,
    /// The first argument of the three.
    pub user_data: *mut c_void,
    /// Gives `user_data` back when the pool is gone (which may be a little after its last release), also when there never was one; NULL
    /// for nothing to do.
    pub drop_user_data: hob_drop_fn,
}

/// What a process holds, as `hob_memory_fn` tells it. Bytes. All is 0 when the function is called; it fills what it knows.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_memory {
    /// Bytes that this version of the library looks at; do not write beyond.
    pub struct_size: u32,
    /// 1: `available` is filled.
    pub has_available: u32,
    /// In use by live data.
    pub active: u64,
    /// Freed, and not yet given back to the system.
    pub cache: u64,
    /// The highest `active` so far.
    pub peak: u64,
    /// What the system could still give.
    pub available: u64,
}

/// Gives freed memory back to the system. Called on a thread of Hob's made for it, with no lock held; it may block, but must not wait
/// for an admission.
pub type hob_drain_fn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// Hears a pool's new budget: one call at a time, the newest last. Called inside `hob_pool_set_budget`; must not block or call the pool.
pub type hob_budget_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, budget_bytes: u64)>;

/// Tells what memory is held now. Called often, on any thread, with the pool's lock held: it must not block and must not call Hob. A few
/// reads of atomic numbers are right.
pub type hob_memory_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, out_memory: *mut hob_memory)>;

/// A host's part in a pool.
struct Hooks {
    drain: hob_drain_fn,
    budget: hob_budget_fn,
    memory: hob_memory_fn,
    data: Arc<UserData>,
}

impl MemoryProbe for Hooks {
    fn read(&self) -> MemoryReading {
        let mut told = hob_memory {
            struct_size: size_of::<hob_memory>() as u32,
            has_available: 0,
            active: 0,
            cache: 0,
            peak: 0,
            available: 0,
        };
        if let Some(memory) = self.memory {
            // SAFETY: the host gave the pair, and the struct is lent for the call.
            unsafe { memory(self.data.pointer(), &raw mut told) };
        }
        let available = (told.has_available == 1).then_some(told.available);
        MemoryReading { active: told.active, cache: told.cache, peak: told.peak, available }
    }
}

impl Hooks {
    /// Puts what the host gave into the core's options.
    fn install(self, options: &mut PoolOptions) {
        let hooks = Arc::new(self);
        if let Some(drain) = hooks.drain {
            let hooks = Arc::clone(&hooks);
            options.drain = Some(Arc::new(move || {
                let data = Arc::clone(&hooks.data);
                let drained = unblock(move || {
                    // SAFETY: the host gave the pair.
                    unsafe { drain(data.pointer()) };
                    Ok(())
                });
                Box::pin(async move { drop(drained.await) })
            }));
        }
        if let Some(budget) = hooks.budget {
            let hooks = Arc::clone(&hooks);
            // SAFETY: the host gave the pair.
            options.on_budget = Some(Arc::new(move |bytes| unsafe { budget(hooks.data.pointer(), bytes) }));
        }
        if hooks.memory.is_some() {
            options.probe = Some(hooks);
        }
    }
}

// SAFETY: repr(C), begins with its size, no padding.
unsafe impl Sized32 for hob_pool_options {
    const NAME: &'static str = "hob_pool_options";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            idle: 0,
            idle_seconds: 0,
            no_room: 0,
            budget_bytes: 0,
            physical_limit_bytes: 0,
            max_waiting: 65_536,
            no_drain_after_release: 0,
            reserved: 0,
            settle_ms: 0,
            drain: None,
            budget_changed: None,
            memory: None,
            user_data: std::ptr::null_mut(),
            drop_user_data: None,
        }
    }
}

/// Writes what HOB_POOL_OPTIONS_INIT writes, for languages without macros. Does nothing for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_options_init(options: *mut hob_pool_options) {
    // SAFETY: as the header asks.
    quiet((), || unsafe { raw::write(options, hob_pool_options::init()) });
}

/// A pool of the host's own, without an engine. The options' callbacks live as long as the pool. The caller owns one count of `*out_pool`. Any thread. HOB_INVALID_ARGUMENT for a
/// budget of 0, HOB_IO when there is no thread to be had. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_new(
    options: *const hob_pool_options,
    out_pool: *mut *mut hob_pool,
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
        let status = guard(out_error, || {
            out(out_pool, "out_pool")?;
            let Some(data) = &data else { return Err(Error::new(ErrorKind::Internal, "the options could not be read")) };
            let given = raw::read_sized(options)?;
            let mut options = PoolOptions::new(given.budget_bytes);
            options.idle = idle("idle", given.idle, given.idle_seconds)?.unwrap_or_else(IdlePolicy::default);
            options.no_room = no_room(given.no_room)?.unwrap_or_else(NoRoom::default);
            options.physical_limit_bytes = (given.physical_limit_bytes > 0).then_some(given.physical_limit_bytes);
            options.max_waiting = size("max_waiting", given.max_waiting)?;
            options.drain_after_release = !flag("no_drain_after_release", given.no_drain_after_release)?;
            if given.settle_ms > 0 {
                options.settle = Duration::from_millis(given.settle_ms);
            }
            let hob_pool_options { drain, budget_changed: budget, memory, .. } = given;
            Hooks { drain, budget, memory, data: Arc::clone(data) }.install(&mut options);
            let inner = PoolInner { pool: Pool::new(options)?, engine: None };
            done(out_pool, raw::give_counted(Arc::new(Held::new(inner))))
        });
        calm((), || drop(data));
        status
    }
}

/// A key as text: `kind:id`.
pub(crate) unsafe fn key(text: *const c_char, len: usize) -> Result<Key> {
    // SAFETY: as the header asks.
    let text = unsafe { raw::text(text, len, "key")? };
    let Some((kind, id)) = text.split_once(':').filter(|(kind, id)| !kind.is_empty() && !id.is_empty()) else {
        return Err(Error::new(ErrorKind::InvalidArgument, "a key has the form kind:id, as in embedder:minilm"));
    };
    Ok(Key::new(Kind::from_name(kind), id))
}

fn present(found: bool) -> Result<hob_status> {
    Ok(if found { HOB_OK } else { HOB_ABSENT })
}

/// Runs a short call about a key.
unsafe fn about(
    pool: *const hob_pool,
    text: (*const c_char, usize),
    out_error: *mut *mut hob_error,
    work: impl FnOnce(&Pool, Key) -> Result<hob_status>,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe { enter_shared(pool, "pool", out_error, |inner: &PoolInner| work(&inner.pool, key(text.0, text.1)?)) }
}

/// Begins a use of a resident entry: while it lasts the entry is neither evicted nor swept. HOB_ABSENT, without any effect, when the
/// pool does not hold the key. Each HOB_OK must be answered by exactly one `hob_pool_end_use` with `*out_token`. Never waits, never
/// loads. Any thread. HOB_INVALID_ARGUMENT. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_begin_use(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    out_token: *mut u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        about(pool, (key, key_len), out_error, |pool, key| {
            if out_token.is_null() {
                return Err(raw::null("out_token"));
            }
            raw::write(out_token, 0);
            match pool.begin_use_counted(&key) {
                Some(token) => done(out_token, token.as_u64()),
                None => Ok(HOB_ABSENT),
            }
        })
    }
}

/// As `hob_pool_begin_use`, with a policy for the countdown after this use only: HOB_IDLE_... (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_begin_use_with(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    policy: i32,
    seconds: u32,
    out_token: *mut u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        about(pool, (key, key_len), out_error, |pool, key| {
            if out_token.is_null() {
                return Err(raw::null("out_token"));
            }
            raw::write(out_token, 0);
            let lease = match idle("policy", policy, seconds)? {
                None => pool.begin_use(&key),
                Some(policy) => pool.begin_use_with(&key, policy),
            };
            lease.map_or(Ok(HOB_ABSENT), |lease| done(out_token, lease.into_token().as_u64()))
        })
    }
}

/// Ends a use, also of an entry that was taken away meanwhile. Never waits. HOB_ABSENT when no such use is open, which a host's pairing
/// should never see. Any thread, also within callbacks. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_end_use(pool: *const hob_pool, token: u64, out_error: *mut *mut hob_error) -> hob_status {
    // SAFETY: as the header asks.
    unsafe { enter_shared(pool, "pool", out_error, |inner: &PoolInner| present(inner.pool.end_use(Token::from_u64(token)))) }
}

/// The token of a resident entry, without a use. HOB_ABSENT when the pool does not hold the key. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_peek(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    out_token: *mut u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        about(pool, (key, key_len), out_error, |pool, key| {
            if out_token.is_null() {
                return Err(raw::null("out_token"));
            }
            raw::write(out_token, 0);
            pool.peek(&key).map_or(Ok(HOB_ABSENT), |token| done(out_token, token.as_u64()))
        })
    }
}

/// Refreshes an entry's idle clock without a use. HOB_ABSENT when it is not resident. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_touch(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe { about(pool, (key, key_len), out_error, |pool, key| present(pool.touch(&key))) }
}

/// Drops an entry without calling its release: the host has let go already. `*out_bytes`, which may be NULL, gets the bytes taken off
/// the account. HOB_ABSENT when it is not resident. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_forget(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    out_bytes: *mut u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        about(pool, (key, key_len), out_error, |pool, key| {
            raw::write(out_bytes, 0);
            pool.forget(&key).map_or(Ok(HOB_ABSENT), |bytes| done(out_bytes, bytes))
        })
    }
}

/// As `hob_pool_forget`, of the entry with that token: for an owner that may already have loaded anew under the same key. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_forget_token(
    pool: *const hob_pool,
    token: u64,
    out_bytes: *mut u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            raw::write(out_bytes, 0);
            inner.pool.forget_token(Token::from_u64(token)).map_or(Ok(HOB_ABSENT), |bytes| done(out_bytes, bytes))
        })
    }
}

/// As `hob_pool_forget`, then drains, and blocks this thread until that is done or `cancel` (which may be NULL) is cancelled. `*out_freed_bytes`,
/// which may be NULL, gets the bytes given back. Any thread but Hob's own. HOB_NOT_FOUND, HOB_CANCELLED, HOB_TIMEOUT. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_forget_and_drain(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    cancel: *const hob_cancel_token,
    out_freed_bytes: *mut u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        about(pool, (key, key_len), out_error, |pool, key| {
            raw::write(out_freed_bytes, 0);
            let freed = block(wait::token(cancel)?.as_ref(), pool.forget_and_drain(&key))?;
            done(out_freed_bytes, freed)
        })
    }
}

/// Unloads an entry: nobody can hit it from now on, then its release runs. Blocks this thread until that is done, or `cancel` (which
/// may be NULL) is cancelled: the release then goes on by itself. `force` 1 also takes an entry in use, whose memory then comes back
/// when its last use ends, and stops a load. `*out_freed_bytes`, which may be NULL, gets the bytes given back. Any thread but Hob's
/// own. HOB_IN_USE, HOB_NOT_FOUND, HOB_CLOSED, HOB_CANCELLED, HOB_TIMEOUT, or what the release returned. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_evict(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    force: i32,
    cancel: *const hob_cancel_token,
    out_freed_bytes: *mut u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        about(pool, (key, key_len), out_error, |pool, key| {
            raw::write(out_freed_bytes, 0);
            let evicted = block(wait::token(cancel)?.as_ref(), pool.evict(&key, force != 0))?;
            done(out_freed_bytes, evicted.freed_bytes)
        })
    }
}

/// Pins an entry: never evicted, never swept; evict by name, forget and close still work. HOB_ABSENT when the pool does not know the
/// key. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_pin(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe { about(pool, (key, key_len), out_error, |pool, key| present(pool.pin(&key))) }
}

/// Undoes a pin. HOB_ABSENT when the pool does not know the key. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_unpin(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe { about(pool, (key, key_len), out_error, |pool, key| present(pool.unpin(&key))) }
}

/// Changes a resident entry's own idle policy: HOB_IDLE_... (HOB_IDLE_DEFAULT: the pool's). HOB_ABSENT when it is not resident. Any
/// thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_set_idle(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    policy: i32,
    seconds: u32,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe { about(pool, (key, key_len), out_error, |pool, key| present(pool.set_idle(&key, idle("policy", policy, seconds)?))) }
}

/// Changes the pool's idle policy: HOB_IDLE_... Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_set_default_idle(
    pool: *const hob_pool,
    policy: i32,
    seconds: u32,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            inner.pool.set_default_idle(idle("policy", policy, seconds)?.unwrap_or_else(IdlePolicy::default));
            Ok(HOB_OK)
        })
    }
}

/// Brings running idle countdowns forward so that they end within `grace_ms`: for memory pressure. `*out_count`, which may be NULL, gets
/// how many. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_accelerate_idle(
    pool: *const hob_pool,
    grace_ms: u64,
    out_count: *mut usize,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            done(out_count, inner.pool.accelerate_idle(Duration::from_millis(grace_ms)))
        })
    }
}

/// Changes the budget. Nothing is evicted by that: see `hob_pool_trim`. Any thread. HOB_INVALID_ARGUMENT for 0, HOB_CLOSED. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_set_budget(pool: *const hob_pool, bytes: u64, out_error: *mut *mut hob_error) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            inner.pool.set_budget(bytes)?;
            Ok(HOB_OK)
        })
    }
}

/// The budget in bytes; 0 for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_budget(pool: *const hob_pool) -> u64 {
    // SAFETY: as the header asks.
    quiet(0, || unsafe { raw::borrow(pool) }.map_or(0, |inner| inner.pool.budget()))
}

/// Corrects a resident entry's charge to what was measured. HOB_ABSENT when the token is not resident. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_set_measured(
    pool: *const hob_pool,
    token: u64,
    bytes: u64,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| present(inner.pool.set_measured(Token::from_u64(token), bytes)))
    }
}

#[derive(Serialize)]
struct ReclaimedJson {
    evicted: Vec<Key>,
    freed_bytes: u64,
    fits: bool,
    errors: Vec<ErrorJson>,
}

unsafe fn reclaimed(out_result: *mut *mut hob_buffer, reclaimed: Reclaimed) -> Result<hob_status> {
    if out_result.is_null() {
        return Ok(HOB_OK);
    }
    let errors = reclaimed.errors.iter().map(ErrorJson::from).collect();
    let answer = ReclaimedJson { evicted: reclaimed.evicted, freed_bytes: reclaimed.freed_bytes, fits: reclaimed.fits, errors };
    // SAFETY: not NULL.
    unsafe { done(out_result, buffer::json(&answer)?) }
}

/// Unloads idle entries, least recently used first, until the account is within the budget, and blocks this thread until they are gone
/// (`cancel`, which may be NULL, ends the waiting). `*out_result`, which may be NULL, gets JSON: `evicted` (keys), `freed_bytes`,
/// `fits`, `errors`. Any thread but Hob's own. HOB_CLOSED, HOB_CANCELLED, HOB_TIMEOUT. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_trim(
    pool: *const hob_pool,
    cancel: *const hob_cancel_token,
    out_result: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            raw::write(out_result, nothing());
            reclaimed(out_result, block(wait::token(cancel)?.as_ref(), inner.pool.trim())?)
        })
    }
}

/// As `hob_pool_trim`, until `bytes` are free. Reserves nothing, and ends quietly when nothing more can go: `fits` tells. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_make_room(
    pool: *const hob_pool,
    bytes: u64,
    cancel: *const hob_cancel_token,
    out_result: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            raw::write(out_result, nothing());
            let cancel = wait::token(cancel)?;
            reclaimed(out_result, block(cancel.as_ref(), inner.pool.make_room(bytes, cancel.clone()))?)
        })
    }
}

/// As `hob_pool_trim`, for every entry past its idle time. The pool does this by itself too. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_sweep(
    pool: *const hob_pool,
    cancel: *const hob_cancel_token,
    out_result: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            raw::write(out_result, nothing());
            reclaimed(out_result, block(wait::token(cancel)?.as_ref(), inner.pool.sweep())?)
        })
    }
}

#[derive(Serialize)]
struct PlanJson {
    verdict: hob::pool::Verdict,
    fits: bool,
    required_bytes: u64,
    free_bytes: u64,
    evict: Vec<Key>,
}

/// What an admission of `key` for `cost_bytes` would do now, changing nothing, as JSON: `verdict` (`resident`, `loading`, `fits`,
/// `evicts`, `alone`, `waits`, `refused`), `fits`, `required_bytes`, `free_bytes`, `evict` (keys). `no_room_policy`: HOB_NO_ROOM_... The
/// caller owns one count of `*out_plan`. Any thread. HOB_INVALID_ARGUMENT. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_plan(
    pool: *const hob_pool,
    key: *const c_char,
    key_len: usize,
    cost_bytes: u64,
    no_room_policy: i32,
    out_plan: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        about(pool, (key, key_len), out_error, |pool, key| {
            out(out_plan, "out_plan")?;
            let Plan { verdict, fits, required_bytes, free_bytes, evict, .. } =
                pool.plan(&key, cost_bytes, no_room(no_room_policy)?);
            done(out_plan, buffer::json(&PlanJson { verdict, fits, required_bytes, free_bytes, evict })?)
        })
    }
}

/// 1 once the pool is closed or closing (and for NULL). Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_is_closed(pool: *const hob_pool) -> i32 {
    // SAFETY: as the header asks.
    quiet(1, || unsafe { raw::borrow(pool) }.map_or(1, |inner| i32::from(inner.pool.is_closed())))
}

/// 1 when so many bytes more could be had now, idle entries given up for them. Changes nothing. 0 for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_has_room(pool: *const hob_pool, bytes: u64) -> i32 {
    // SAFETY: as the header asks.
    quiet(0, || unsafe { raw::borrow(pool) }.map_or(0, |inner| i32::from(inner.pool.has_room(bytes))))
}

/// A snapshot as JSON: the account, every entry (key, state, bytes, uses, pins, idle times, progress), counters, memory. Never loads,
/// never waits. The caller owns one count of `*out_status`. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_status(
    pool: *const hob_pool,
    out_status: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            out(out_status, "out_status")?;
            done(out_status, buffer::json(&inner.pool.status())?)
        })
    }
}

/// New loads are held back while it lives. One owner: `hob_pause_free`, which lets them go on. Any thread.
pub struct hob_pause {
    _opaque: [u8; 0],
}

castable!(hob_pause => Paused, Boxed, crate::handle::HOB_HANDLE_PAUSE);

/// As `hob_engine_pause`, for any pool. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_pause(
    pool: *const hob_pool,
    cancel: *const hob_cancel_token,
    out_pause: *mut *mut hob_pause,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            out(out_pause, "out_pause")?;
            let paused = block(wait::token(cancel)?.as_ref(), inner.pool.pause())?;
            done(out_pause, raw::give_boxed(Held::new(paused)))
        })
    }
}

/// The keys of the residents that were quiesced, in order, as a JSON list. The caller owns one count of `*out_keys`. Any thread.
/// (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pause_quiesced(
    pause: *const hob_pause,
    out_keys: *mut *mut hob_buffer,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter(pause, "pause", out_error, |paused: &Paused| {
            out(out_keys, "out_keys")?;
            done(out_keys, buffer::json(&paused.quiesced().collect::<Vec<_>>())?)
        })
    }
}

/// Resumes what was quiesced, the last one first, and lets the waiting admissions go on. Never waits. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pause_free(pause: *mut hob_pause) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_boxed(pause) }));
}

/// Bytes of the host's own on a pool's account. One owner: `hob_charge_free`, which takes them off. Any thread.
pub struct hob_charge {
    _opaque: [u8; 0],
}

castable!(hob_charge => Mutex<ExternalCharge>, Boxed, crate::handle::HOB_HANDLE_CHARGE);

/// Puts bytes of the host's own on the account for as long as the handle lives; evicts nothing by itself. The caller owns it. NULL for
/// NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_charge(pool: *const hob_pool, bytes: u64) -> *mut hob_charge {
    // SAFETY: as the header asks.
    quiet(nothing(), || {
        unsafe { raw::borrow(pool) }
            .map_or(nothing(), |inner| raw::give_boxed(Held::new(Mutex::new(inner.pool.charge_external(bytes)))))
    })
}

/// Changes a charge. Nothing for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_charge_set(charge: *mut hob_charge, bytes: u64) {
    // SAFETY: as the header asks.
    quiet((), || {
        if let Some(charge) = unsafe { raw::borrow(charge) } {
            charge.lock().set(bytes);
        }
    });
}

/// Takes a charge off the account. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_charge_free(charge: *mut hob_charge) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_boxed(charge) }));
}

/// Closes a pool: admissions in line end with HOB_CLOSED, every entry is taken away and released. Uses stay valid; their memory goes
/// with their end and is not waited for. Blocks this thread until the releases are done, or `cancel` (which may be NULL) is cancelled.
/// Closing again is allowed. For an engine's pool use `hob_engine_close`. Any thread but Hob's own. An error tells of releases that
/// failed; the pool is closed all the same. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_close(
    pool: *const hob_pool,
    cancel: *const hob_cancel_token,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter_shared(pool, "pool", out_error, |inner: &PoolInner| {
            block(wait::token(cancel)?.as_ref(), inner.pool.close())?;
            Ok(HOB_OK)
        })
    }
}

/// One more count of the pool; returns it. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_retain(pool: *mut hob_pool) -> *mut hob_pool {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe { raw::share(pool) }.map_or(nothing(), raw::give_counted))
}

/// Gives one count back; never waits. The last one of a pool without an engine closes it in the background. NULL is allowed. Any
/// thread, also within callbacks. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_pool_release(pool: *mut hob_pool) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_counted(pool) }));
}
