//! Cancel tokens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hob::{CancelReason, CancelToken};

use crate::boundary::quiet;
use crate::error::{HOB_CANCELLED, HOB_OK, HOB_TIMEOUT, hob_status, nothing};
use crate::raw::{self, Counted, Held, castable};

/// Asks work to stop: one-shot, shared, any thread. One token may be given to any number of calls; cancelling it ends them all,
/// and those of its children. Shared: `hob_cancel_token_retain` and `hob_cancel_token_release`. Calls that got a token keep it
/// alive by themselves, so it may be released at once.
pub struct hob_cancel_token {
    _opaque: [u8; 0],
}

castable!(hob_cancel_token => CancelToken, Counted, crate::handle::HOB_HANDLE_CANCEL_TOKEN);

fn give(token: CancelToken) -> *mut hob_cancel_token {
    raw::give_counted(Arc::new(Held::new(token)))
}

/// A live token. The caller owns one count. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub extern "C" fn hob_cancel_token_new() -> *mut hob_cancel_token {
    quiet(nothing(), || give(CancelToken::new()))
}

/// A token that is cancelled when `parent` is and can be cancelled alone; the parent is not kept alive. The caller owns one count.
/// Any thread. NULL for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_cancel_token_child(parent: *const hob_cancel_token) -> *mut hob_cancel_token {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe { raw::borrow(parent) }.map_or(nothing(), |parent| give(parent.child())))
}

/// A child that is also cancelled, as a timeout, in `timeout_ms` milliseconds from now. `parent` may be NULL. The caller owns one
/// count. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_cancel_token_with_deadline(parent: *const hob_cancel_token, timeout_ms: u64) -> *mut hob_cancel_token {
    quiet(nothing(), || {
        // SAFETY: as the header asks.
        let parent = unsafe { raw::borrow(parent) }.map_or_else(CancelToken::new, |parent| (**parent).clone());
        let deadline = Instant::now().checked_add(Duration::from_millis(timeout_ms));
        give(deadline.map_or_else(|| parent.child(), |deadline| parent.with_deadline(deadline)))
    })
}

/// Cancels the token and its descendants. Returns 1 when this call did it, 0 when it was cancelled before (or is NULL). Work that
/// runs under the token ends with HOB_CANCELLED, also when that is near its end; work that is over, or begins later under
/// another token, is not affected. Any thread, but not from a signal handler: set a flag there, and cancel elsewhere. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_cancel_token_cancel(token: *const hob_cancel_token) -> i32 {
    // SAFETY: as the header asks.
    quiet(0, || unsafe { raw::borrow(token) }.map_or(0, |token| i32::from(token.cancel())))
}

/// HOB_OK while the token is live, HOB_CANCELLED or HOB_TIMEOUT once it is not. HOB_OK for NULL. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_cancel_token_reason(token: *const hob_cancel_token) -> hob_status {
    // SAFETY: as the header asks.
    quiet(HOB_OK, || match unsafe { raw::borrow(token) }.and_then(|token| token.reason()) {
        None => HOB_OK,
        Some(CancelReason::Timeout) => HOB_TIMEOUT,
        Some(_) => HOB_CANCELLED,
    })
}

/// One more count of the token; returns it. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_cancel_token_retain(token: *mut hob_cancel_token) -> *mut hob_cancel_token {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe { raw::share(token) }.map_or(nothing(), raw::give_counted))
}

/// Gives one count back; does not cancel. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_cancel_token_release(token: *mut hob_cancel_token) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_counted(token) }));
}
