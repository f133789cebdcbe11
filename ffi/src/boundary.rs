//! The one way in: nothing unwinds into C, NULL handles are refused, an error is an object of its own.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hob::{Error, ErrorKind, Result};

use crate::error::{HOB_OK, hob_error, hob_status};
use crate::raw::{self, Castable, Counted, Held};

/// Threads whose next call is to panic, because a test asked for it. Nearly always 0, so that a call looks at one number.
static ARMED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static PANIC_NEXT: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread's next export panic, or takes that back; tells whether one was waiting.
pub(crate) fn panic_next(armed: bool) -> bool {
    let before = PANIC_NEXT.replace(armed);
    match (before, armed) {
        (false, true) => drop(ARMED.fetch_add(1, Ordering::Relaxed)),
        (true, false) => drop(ARMED.fetch_sub(1, Ordering::Relaxed)),
        _ => {}
    }
    before
}

/// Where the panic that a test asked for happens: first thing in the body of an export.
fn trip() {
    if ARMED.load(Ordering::Relaxed) > 0 && panic_next(false) {
        // Past the panic hook: a scripted panic prints nothing.
        resume_unwind(Box::new("a test asked for it"));
    }
}

/// Runs the body of an export that can fail. `out_error`, when given, is NULL after success and owns the error after a failure.
pub(crate) unsafe fn guard(out_error: *mut *mut hob_error, work: impl FnOnce() -> Result<hob_status>) -> hob_status {
    // SAFETY: as the caller promises.
    unsafe {
        caught(out_error, || {
            trip();
            work()
        })
    }
}

unsafe fn caught(out_error: *mut *mut hob_error, work: impl FnOnce() -> Result<hob_status>) -> hob_status {
    // SAFETY: NULL, or room for a pointer.
    unsafe { raw::write(out_error, std::ptr::null_mut()) };
    let error = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(status)) => return status,
        Ok(Err(error)) => error,
        Err(payload) => {
            forget(payload);
            Error::new(ErrorKind::Internal, "a call into Hob panicked; this is a fault in Hob")
        }
    };
    let status = error.kind().code();
    if !out_error.is_null() {
        // SAFETY: not NULL.
        unsafe { raw::write(out_error, hob_error::give(&error)) };
    }
    status
}

/// [`guard`] with the handle that the call is about. A panic poisons it.
pub(crate) unsafe fn enter<C, T, const KIND: i32>(
    handle: *const C,
    what: &str,
    out_error: *mut *mut hob_error,
    work: impl FnOnce(&T) -> Result<hob_status>,
) -> hob_status
where
    C: Castable<Inner = Held<T, KIND>>,
{
    // SAFETY: as the host promises.
    unsafe {
        caught(out_error, || {
            let held = raw::borrow(handle).ok_or_else(|| raw::no_handle(handle, what))?;
            held.check()?;
            let body = || {
                trip();
                work(held)
            };
            match catch_unwind(AssertUnwindSafe(body)) {
                Ok(result) => result,
                Err(payload) => {
                    held.poison();
                    forget(payload);
                    Err(Error::new(
                        ErrorKind::Internal,
                        "a call into Hob panicked, and its handle is unusable now; this is a fault in Hob",
                    ))
                }
            }
        })
    }
}

/// [`enter`] for calls during which the host may release the handle.
pub(crate) unsafe fn enter_shared<C, T, const KIND: i32>(
    handle: *const C,
    what: &str,
    out_error: *mut *mut hob_error,
    work: impl FnOnce(&T) -> Result<hob_status>,
) -> hob_status
where
    C: Castable<Inner = Held<T, KIND>, Ownership = Counted>,
{
    // SAFETY: as the host promises. The count is dropped after the body, and a panic of that is caught too.
    unsafe {
        let kept: Option<Arc<Held<T, KIND>>> = raw::share(handle);
        let status = enter(handle, what, out_error, work);
        calm((), || drop(kept));
        status
    }
}

/// Runs the body of an export that has no status: a panic gives `fallback`.
pub(crate) fn quiet<T>(fallback: T, work: impl FnOnce() -> T) -> T {
    calm(fallback, || {
        trip();
        work()
    })
}

/// [`quiet`] for what an export does beside its body.
pub(crate) fn calm<T>(fallback: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        forget(payload);
        fallback
    })
}

/// Refuses a NULL result pointer before any work is done, and clears it.
pub(crate) unsafe fn out<T>(pointer: *mut *mut T, what: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(raw::null(what));
    }
    // SAFETY: not NULL.
    unsafe { raw::write(pointer, std::ptr::null_mut()) };
    Ok(())
}

/// Hands a result out.
pub(crate) unsafe fn done<T>(pointer: *mut T, value: T) -> Result<hob_status> {
    // SAFETY: checked by `out` or by the caller.
    unsafe { raw::write(pointer, value) };
    Ok(HOB_OK)
}

/// A payload's destructor may panic again; it must not get out.
fn forget(payload: Box<dyn std::any::Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(again);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{HOB_INTERNAL, HOB_INVALID_ARGUMENT, hob_error_free, hob_error_status};
    use crate::raw::{Boxed, castable};

    struct Thing;
    castable!(Thing => u32, Boxed, 13);

    #[test]
    fn a_panic_is_an_error_and_poisons_its_handle() {
        let thing = raw::give_boxed::<Thing>(Held::new(5));
        let mut error = std::ptr::null_mut();
        // SAFETY: the handle is live.
        unsafe {
            assert_eq!(enter(thing, "thing", &raw mut error, |_| panic!("on purpose")), HOB_INTERNAL);
            assert_eq!(hob_error_status(error), HOB_INTERNAL);
            hob_error_free(error);
            assert_eq!(enter(thing, "thing", std::ptr::null_mut(), |_| Ok(HOB_OK)), HOB_INTERNAL, "it stays unusable");
            drop(raw::take_boxed(thing));
            assert_eq!(enter::<Thing, _, _>(std::ptr::null(), "thing", std::ptr::null_mut(), |_| Ok(HOB_OK)), HOB_INVALID_ARGUMENT);
        }
        assert_eq!(quiet(7, || panic!("on purpose")), 7);
        assert!(!panic_next(true) && panic_next(true), "asked for once");
        assert_eq!((quiet(7, || 8), quiet(7, || 8)), (7, 8), "the next call panics, no later one");
        assert!(!panic_next(false));
    }
}
