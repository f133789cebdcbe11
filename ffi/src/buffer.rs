//! Bulk results: vectors and texts, looked at without a copy.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use hob::{Error, ErrorKind, Result};
use serde::Serialize;

use crate::boundary::{enter, quiet};
use crate::error::{HOB_OK, c_string, hob_error, hob_status, nothing};
use crate::raw::{self, Counted, Held, Sized32, castable};

/// A borrowed text: `len` bytes of UTF-8 at `data`, or HOB_NUL_TERMINATED for `len`. This struct does not change.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_str {
    /// The bytes.
    pub data: *const c_char,
    /// How many, or HOB_NUL_TERMINATED.
    pub len: usize,
}

/// A result that was computed: vectors (a tensor), token ids, or a text (mostly JSON). Immutable, so any thread may read it. Shared:
/// `hob_buffer_retain` and `hob_buffer_release`. It depends on nothing: the engine may be gone.
pub struct hob_buffer {
    _opaque: [u8; 0],
}

pub(crate) enum Content {
    /// The bytes, a NUL after them, and their number.
    Text(Vec<u8>, [u64; 1]),
    Rows {
        data: Vec<f32>,
        shape: [u64; 2],
        strides: [u64; 2],
        provenance: CString,
    },
    Ids {
        data: Vec<u32>,
        shape: [u64; 1],
    },
}

castable!(hob_buffer => Content, Counted, crate::handle::HOB_HANDLE_BUFFER);

/// The bytes of a text, without its NUL.
pub const HOB_DTYPE_UTF8: i32 = 0;
/// 32-bit IEEE floating point in the machine's byte order.
pub const HOB_DTYPE_FLOAT32: i32 = 1;
/// 32-bit unsigned integers in the machine's byte order.
pub const HOB_DTYPE_UINT32: i32 = 2;

/// What a buffer holds. Borrowed from the buffer, and valid until its last count is released.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hob_buffer_view {
    /// Set by HOB_BUFFER_VIEW_INIT.
    pub struct_size: u32,
    /// HOB_DTYPE_...
    pub dtype: i32,
    /// The first byte. A text is followed by a NUL.
    pub data: *const c_void,
    /// Bytes.
    pub len: usize,
    /// Dimensions: 1 for a text and for token ids, 2 for vectors.
    pub rank: usize,
    /// Items per dimension: for vectors {texts, dimensions}.
    pub shape: *const u64,
    /// Bytes from one item to the next, per dimension.
    pub strides: *const u64,
}

// SAFETY: repr(C), begins with its size, 8-byte fields after two of 4.
unsafe impl Sized32 for hob_buffer_view {
    const NAME: &'static str = "hob_buffer_view";
    fn init() -> Self {
        Self {
            struct_size: size_of::<Self>() as u32,
            dtype: 0,
            data: std::ptr::null(),
            len: 0,
            rank: 0,
            shape: std::ptr::null(),
            strides: std::ptr::null(),
        }
    }
}

pub(crate) fn rows(data: Vec<f32>, dimensions: usize, provenance: CString) -> *mut hob_buffer {
    let count = data.len().checked_div(dimensions).unwrap_or(0);
    let shape = [count as u64, dimensions as u64];
    give(Content::Rows { data, shape, strides: [dimensions as u64 * 4, 4], provenance })
}

pub(crate) fn ids(data: Vec<u32>) -> *mut hob_buffer {
    let shape = [data.len() as u64];
    give(Content::Ids { data, shape })
}

/// A value as JSON for C.
pub(crate) fn json_text(value: &impl Serialize) -> Result<CString> {
    serde_text(value).map(|text| c_string(&text))
}

fn serde_text(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::new(ErrorKind::Internal, "an answer is not JSON").with_source(error))
}

pub(crate) fn json(value: &impl Serialize) -> Result<*mut hob_buffer> {
    serde_text(value).map(text)
}

/// A text as it is, NULs included: the view tells its length.
pub(crate) fn text(text: String) -> *mut hob_buffer {
    let mut bytes = text.into_bytes();
    let shape = [bytes.len() as u64];
    bytes.push(0);
    give(Content::Text(bytes, shape))
}

fn give(content: Content) -> *mut hob_buffer {
    raw::give_counted(Arc::new(Held::new(content)))
}

/// The stride of texts.
static ONE: [u64; 1] = [1];
/// The stride of token ids.
static FOUR: [u64; 1] = [4];

/// Fills `view` with what the buffer holds; nothing is copied. Any thread. HOB_INVALID_ARGUMENT. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_buffer_get_view(
    buffer: *const hob_buffer,
    view: *mut hob_buffer_view,
    out_error: *mut *mut hob_error,
) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        enter(buffer, "buffer", out_error, |content| {
            let init = hob_buffer_view::init();
            let filled = match content {
                Content::Text(text, shape) => hob_buffer_view {
                    dtype: HOB_DTYPE_UTF8,
                    data: text.as_ptr().cast(),
                    len: text.len() - 1,
                    rank: 1,
                    shape: shape.as_ptr(),
                    strides: ONE.as_ptr(),
                    ..init
                },
                Content::Ids { data, shape } => hob_buffer_view {
                    dtype: HOB_DTYPE_UINT32,
                    data: data.as_ptr().cast(),
                    len: size_of_val(data.as_slice()),
                    rank: 1,
                    shape: shape.as_ptr(),
                    strides: FOUR.as_ptr(),
                    ..init
                },
                Content::Rows { data, shape, strides, .. } => hob_buffer_view {
                    dtype: HOB_DTYPE_FLOAT32,
                    data: data.as_ptr().cast(),
                    len: size_of_val(data.as_slice()),
                    rank: 2,
                    shape: shape.as_ptr(),
                    strides: strides.as_ptr(),
                    ..init
                },
            };
            raw::write_sized(view, filled)?;
            Ok(HOB_OK)
        })
    }
}

/// A text buffer's NUL-terminated UTF-8. Borrowed from the buffer. NULL for NULL and for numbers. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_buffer_text(buffer: *const hob_buffer) -> *const c_char {
    // SAFETY: as the header asks.
    quiet(nothing(), || match unsafe { raw::borrow(buffer) }.map(|held| &**held) {
        Some(Content::Text(text, _)) => text.as_ptr().cast::<c_char>().cast_mut(),
        _ => nothing(),
    })
}

/// A vector buffer's numbers, row after row: `*out_rows` vectors of `*out_dimensions` numbers (either pointer may be NULL).
/// Borrowed from the buffer. NULL for NULL and for texts. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_buffer_floats(
    buffer: *const hob_buffer,
    out_rows: *mut usize,
    out_dimensions: *mut usize,
) -> *const f32 {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe {
        let (data, shape) = match raw::borrow(buffer).map(|held| &**held) {
            Some(Content::Rows { data, shape, .. }) => (data.as_ptr().cast_mut(), *shape),
            _ => (nothing(), [0, 0]),
        };
        let count = |items: u64| usize::try_from(items).unwrap_or(0);
        raw::write(out_rows, count(shape[0]));
        raw::write(out_dimensions, count(shape[1]));
        data
    })
}

/// A buffer's token ids: `*out_count` of them (the pointer may be NULL). Borrowed from the buffer. NULL for NULL and for everything
/// else. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_buffer_ids(buffer: *const hob_buffer, out_count: *mut usize) -> *const u32 {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe {
        let (data, count) = match raw::borrow(buffer).map(|held| &**held) {
            Some(Content::Ids { data, .. }) => (data.as_ptr().cast_mut(), data.len()),
            _ => (nothing(), 0),
        };
        raw::write(out_count, count);
        data
    })
}

/// Which model vectors come from, as JSON: `model`, `family`, `quantization`, `manifest`, `runtime`, and how it pooled, `pooling`.
/// Borrowed from the buffer. NULL for NULL and for everything else. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_buffer_provenance(buffer: *const hob_buffer) -> *const c_char {
    // SAFETY: as the header asks.
    quiet(nothing(), || match unsafe { raw::borrow(buffer) }.map(|held| &**held) {
        Some(Content::Rows { provenance, .. }) => provenance.as_ptr().cast_mut(),
        _ => nothing(),
    })
}

/// One more count of the buffer; returns it. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_buffer_retain(buffer: *mut hob_buffer) -> *mut hob_buffer {
    // SAFETY: as the header asks.
    quiet(nothing(), || unsafe { raw::share(buffer) }.map_or(nothing(), raw::give_counted))
}

/// Gives one count back. NULL is allowed. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_buffer_release(buffer: *mut hob_buffer) {
    // SAFETY: as the header asks.
    quiet((), || drop(unsafe { raw::take_counted(buffer) }));
}
