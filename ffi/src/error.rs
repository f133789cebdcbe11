//! Status codes and the error object.

use std::ffi::{CString, c_char};
use std::ptr;

use hob::Error;
use serde::Serialize;

use crate::boundary::quiet;
use crate::raw::{self, Boxed, Held, castable};

/// What every fallible function returns: `HOB_OK` (0), a positive value that is no error, or a negative error code. The codes are
/// frozen; a later version may add some, so treat an unknown negative one as a failure. (Since 0.1)
pub type hob_status = i32;

/// Success.
pub const HOB_OK: hob_status = 0;
/// No error: the stream has ended and its last event was delivered before.
pub const HOB_END: hob_status = 1;
/// No error: nothing was ready within the timeout. Call again, or wait for the waker.
pub const HOB_WOULD_BLOCK: hob_status = 2;
/// No error: the pool does not hold the key (any more), and nothing was done.
pub const HOB_ABSENT: hob_status = 3;
/// An argument or option has a value that is never valid. Change the call.
pub const HOB_INVALID_ARGUMENT: hob_status = -1;
/// The model, entry or file named does not exist.
pub const HOB_NOT_FOUND: hob_status = -2;
/// Reading or writing failed in the operating system.
pub const HOB_IO: hob_status = -3;
/// A model's files are damaged, inconsistent or hostile.
pub const HOB_BAD_MODEL: hob_status = -4;
/// The request is valid but this model, device or version cannot do it.
pub const HOB_UNSUPPORTED: hob_status = -5;
/// The device could not provide memory that the budget allowed.
pub const HOB_OUT_OF_MEMORY: hob_status = -6;
/// The pool's budget has no room. Raise the budget, evict, or wait.
pub const HOB_BUDGET_EXCEEDED: hob_status = -7;
/// A bounded queue is full, the device does not accept work now, or another thread is in a one-at-a-time call. Try again later.
pub const HOB_BUSY: hob_status = -8;
/// A deadline passed.
pub const HOB_TIMEOUT: hob_status = -9;
/// The caller cancelled.
pub const HOB_CANCELLED: hob_status = -10;
/// A callback of the host failed or asked to stop.
pub const HOB_CALLBACK: hob_status = -11;
/// A caller's buffer is too small; the message says how much is needed.
pub const HOB_BUFFER_TOO_SMALL: hob_status = -12;
/// The engine, pool or stream was closed.
pub const HOB_CLOSED: hob_status = -13;
/// MLX reported a failure.
pub const HOB_BACKEND: hob_status = -14;
/// A fault in Hob itself (a caught panic, a broken invariant). The handle of that call is unusable afterwards and says so.
pub const HOB_INTERNAL: hob_status = -15;
/// The entry is in use and the call did not force.
pub const HOB_IN_USE: hob_status = -16;

/// What went wrong. Owned by who received it: one owner, `hob_error_free`. Immutable, so any thread may read it.
pub struct hob_error {
    _opaque: [u8; 0],
}

pub(crate) struct ErrorText {
    status: hob_status,
    name: CString,
    message: CString,
}

castable!(hob_error => ErrorText, Boxed, crate::handle::HOB_HANDLE_ERROR);

impl hob_error {
    pub(crate) fn give(error: &Error) -> *mut Self {
        let text = ErrorText {
            status: error.kind().code(),
            name: c_string(error.kind().name()),
            message: c_string(&error.full_message()),
        };
        raw::give_boxed(Held::new(text))
    }
}

/// A text for C; a NUL inside, which no message has, would end it.
pub(crate) fn c_string(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

/// The error's code: what the call returned. 0 for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_error_status(error: *const hob_error) -> hob_status {
    // SAFETY: as the header asks.
    quiet(0, || unsafe { raw::borrow(error) }.map_or(0, |error| error.status))
}

/// One line of UTF-8: the value, the limit and what would change the outcome, then the causes. Never holds a user's text.
/// Borrowed from the error. An empty text for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_error_message(error: *const hob_error) -> *const c_char {
    // SAFETY: as the header asks.
    quiet(c"".as_ptr(), || unsafe { raw::borrow(error) }.map_or(c"".as_ptr(), |error| error.message.as_ptr()))
}

/// The code's name, such as `NotFound`, the same in every language. Borrowed from the error. An empty text for NULL. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_error_name(error: *const hob_error) -> *const c_char {
    // SAFETY: as the header asks.
    quiet(c"".as_ptr(), || unsafe { raw::borrow(error) }.map_or(c"".as_ptr(), |error| error.name.as_ptr()))
}

/// Gives an error back. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_error_free(error: *mut hob_error) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_boxed(error) }));
}

/// An error inside a JSON answer.
#[derive(Serialize)]
pub(crate) struct ErrorJson {
    kind: &'static str,
    code: i32,
    message: String,
}

impl From<&Error> for ErrorJson {
    fn from(error: &Error) -> Self {
        Self { kind: error.kind().name(), code: error.kind().code(), message: error.full_message() }
    }
}

/// The error that a host's callback returned.
pub(crate) fn of_callback(what: &str, status: hob_status) -> Error {
    Error::new(hob::ErrorKind::Callback, format!("{what} returned {status}"))
}

/// NULL for a pointer that is to be filled only on success.
pub(crate) const fn nothing<T>() -> *mut T {
    ptr::null_mut()
}

#[cfg(test)]
mod tests {
    use hob::ErrorKind;

    use super::*;

    #[test]
    fn the_codes_are_the_cores() {
        let pairs = [
            (HOB_INVALID_ARGUMENT, ErrorKind::InvalidArgument),
            (HOB_NOT_FOUND, ErrorKind::NotFound),
            (HOB_IO, ErrorKind::Io),
            (HOB_BAD_MODEL, ErrorKind::BadModel),
            (HOB_UNSUPPORTED, ErrorKind::Unsupported),
            (HOB_OUT_OF_MEMORY, ErrorKind::OutOfMemory),
            (HOB_BUDGET_EXCEEDED, ErrorKind::BudgetExceeded),
            (HOB_BUSY, ErrorKind::Busy),
            (HOB_TIMEOUT, ErrorKind::Timeout),
            (HOB_CANCELLED, ErrorKind::Cancelled),
            (HOB_CALLBACK, ErrorKind::Callback),
            (HOB_BUFFER_TOO_SMALL, ErrorKind::BufferTooSmall),
            (HOB_CLOSED, ErrorKind::Closed),
            (HOB_BACKEND, ErrorKind::Backend),
            (HOB_INTERNAL, ErrorKind::Internal),
            (HOB_IN_USE, ErrorKind::InUse),
        ];
        for (code, kind) in pairs {
            assert_eq!(code, kind.code(), "{kind}");
        }
    }
}
