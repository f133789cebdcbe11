//! Pointers of C to values of Rust and back: the only place that does it.
//!
//! Each opaque C type names, through [`Castable`], what is behind its pointer and how it is owned. The functions for boxes do
//! not take counted types and the other way round, so a shared handle cannot be freed as a box. Each value behind a handle
//! begins with the number of its kind, so a live handle of another kind is refused instead of read as what it is not.
//!
//! Free of MLX, so that Miri can run it: see tests/miri.
//!
//! What every `unsafe` function here asks of its caller is what `hob.h` asks of the host: a pointer is NULL or came from Hob and
//! was not given back, arrays have the stated length, and nothing passed in is changed by another thread during the call.

use std::ffi::{CStr, c_char};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};

use hob::{Error, ErrorKind, Result};

/// Behind the pointer is a `Box`: one owner, given back with `_free`.
pub(crate) enum Boxed {}
/// Behind the pointer is an `Arc`: each pointer handed out is one count.
pub(crate) enum Counted {}

/// An opaque C type.
pub(crate) trait Castable {
    /// What its pointers lead to.
    type Inner: Kinded;
    /// [`Boxed`] or [`Counted`].
    type Ownership;
    /// Its number among the kinds of handles, from 1.
    const KIND: i32;
}

/// A value that begins with a mark of its kind.
///
/// # Safety
/// `repr(C)`, and the first field is the mark that [`mark`] gives for its kind, while it lives.
pub(crate) unsafe trait Kinded {}

/// Declares an opaque C type's inside, ownership and kind.
macro_rules! castable {
    ($c:ty => $inner:ty, $ownership:ty, $kind:expr) => {
        impl crate::raw::Castable for $c {
            type Inner = crate::raw::Held<$inner, { $kind }>;
            type Ownership = $ownership;
            const KIND: i32 = $kind;
        }
    };
}
pub(crate) use castable;

/// One more than the highest kind of handle.
pub(crate) const KINDS: usize = 16;

/// Handles out with C, by kind.
static LIVE: [AtomicI64; KINDS] = [const { AtomicI64::new(0) }; KINDS];

/// How many handles of a kind are out; `None` for a number that is no kind's.
pub(crate) fn live(kind: i32) -> Option<i64> {
    let at = usize::try_from(kind).ok().filter(|&at| at > 0)?;
    LIVE.get(at).map(|count| count.load(Ordering::Relaxed))
}

fn count<C: Castable>(change: i64) {
    // The kinds are constants below KINDS.
    if let Some(count) = usize::try_from(C::KIND).ok().and_then(|at| LIVE.get(at)) {
        count.fetch_add(change, Ordering::Relaxed);
    }
}

/// What a live value of a kind begins with.
const fn mark(kind: i32) -> u32 {
    0x686F_6200 | kind.cast_unsigned()
}

/// A handle's value, its kind, and whether a call on it panicked.
#[repr(C)]
pub(crate) struct Held<T, const KIND: i32> {
    mark: AtomicU32,
    poisoned: AtomicBool,
    value: T,
}

// SAFETY: repr(C), begins with the mark of its kind until it is dropped.
unsafe impl<T, const KIND: i32> Kinded for Held<T, KIND> {}

impl<T, const KIND: i32> Held<T, KIND> {
    pub(crate) fn new(value: T) -> Self {
        Self { mark: AtomicU32::new(mark(KIND)), poisoned: AtomicBool::new(false), value }
    }

    pub(crate) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Internal, "an earlier call on this handle panicked; release it and make a new one"));
        }
        Ok(())
    }
}

impl<T, const KIND: i32> Deref for Held<T, KIND> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T, const KIND: i32> Drop for Held<T, KIND> {
    fn drop(&mut self) {
        self.mark.store(0, Ordering::Relaxed);
    }
}

/// Whether a pointer is a handle of C's kind: not NULL, and not one of another kind.
unsafe fn is<C: Castable>(pointer: *const C) -> bool {
    let mark_of: *const AtomicU32 = pointer.cast();
    // SAFETY: whatever live handle it is, it begins with a mark.
    !pointer.is_null() && mark_of.is_aligned() && unsafe { (*mark_of).load(Ordering::Relaxed) } == mark(C::KIND)
}

/// A new handle with one owner.
pub(crate) fn give_boxed<C: Castable<Ownership = Boxed>>(inner: C::Inner) -> *mut C {
    count::<C>(1);
    Box::into_raw(Box::new(inner)).cast()
}

/// A boxed handle comes back; `None` for NULL and for a handle of another kind, which is left alone.
pub(crate) unsafe fn take_boxed<C: Castable<Ownership = Boxed>>(pointer: *mut C) -> Option<Box<C::Inner>> {
    // SAFETY: NULL, or a live handle.
    if !unsafe { is(pointer) } {
        return None;
    }
    count::<C>(-1);
    // SAFETY: the pointer came from give_boxed of the same C type and is not used again.
    Some(unsafe { Box::from_raw(pointer.cast()) })
}

/// A new handle that is one count of a shared value.
pub(crate) fn give_counted<C: Castable<Ownership = Counted>>(inner: Arc<C::Inner>) -> *mut C {
    count::<C>(1);
    Arc::into_raw(inner).cast_mut().cast()
}

/// A count comes back; `None` for NULL and for a handle of another kind, which is left alone.
pub(crate) unsafe fn take_counted<C: Castable<Ownership = Counted>>(pointer: *mut C) -> Option<Arc<C::Inner>> {
    // SAFETY: NULL, or a live handle.
    if !unsafe { is(pointer) } {
        return None;
    }
    count::<C>(-1);
    // SAFETY: the pointer came from give_counted of the same C type, and this count is not used again.
    Some(unsafe { Arc::from_raw(pointer.cast()) })
}

/// One more count of a shared value, so that the value outlives a handle released during the call; `None` for NULL and another kind.
pub(crate) unsafe fn share<C: Castable<Ownership = Counted>>(pointer: *const C) -> Option<Arc<C::Inner>> {
    // SAFETY: NULL, or a live handle.
    if !unsafe { is(pointer) } {
        return None;
    }
    let inner: *const C::Inner = pointer.cast();
    // SAFETY: the pointer came from give_counted and its count is live.
    unsafe {
        Arc::increment_strong_count(inner);
        Some(Arc::from_raw(inner))
    }
}

/// A handle's value; `None` for NULL and for a handle of another kind.
pub(crate) unsafe fn borrow<'a, C: Castable>(pointer: *const C) -> Option<&'a C::Inner> {
    // SAFETY: boxes and counts both lead to the value itself, which is live for the call.
    unsafe { if is(pointer) { pointer.cast::<C::Inner>().as_ref() } else { None } }
}

/// Why [`borrow`] gave nothing.
pub(crate) fn no_handle<C>(pointer: *const C, what: &str) -> Error {
    if pointer.is_null() {
        return null(what);
    }
    Error::new(ErrorKind::InvalidArgument, format!("{what} is a handle of another kind, or was given back"))
}

/// An array of C. NULL is an empty one, if the count says so too.
pub(crate) unsafe fn slice<'a, T>(pointer: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(null(what));
    }
    if count.checked_mul(size_of::<T>()).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(Error::new(ErrorKind::InvalidArgument, format!("{what}: {count} items are more than memory can hold")));
    }
    // SAFETY: not NULL, and the host states that so many items are there.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// A length that says: up to the terminating NUL.
pub(crate) const NUL: usize = usize::MAX;

/// A text of C; `None` for NULL.
pub(crate) unsafe fn optional_text<'a>(pointer: *const c_char, len: usize, what: &str) -> Result<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    let bytes = if len == NUL {
        // SAFETY: the host states that the text ends with a NUL.
        unsafe { CStr::from_ptr(pointer) }.to_bytes()
    } else {
        // SAFETY: the host states that so many bytes are there.
        unsafe { slice(pointer.cast::<u8>(), len, what)? }
    };
    std::str::from_utf8(bytes).map(Some).map_err(|error| {
        let at = error.valid_up_to();
        Error::new(ErrorKind::InvalidArgument, format!("{what} is not UTF-8 (byte {at}); pass UTF-8"))
    })
}

/// A text of C that must be there.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, len: usize, what: &str) -> Result<&'a str> {
    // SAFETY: as the caller promises.
    unsafe { optional_text(pointer, len, what)? }.ok_or_else(|| null(what))
}

/// Writes a result through a pointer that was checked.
pub(crate) unsafe fn write<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not NULL, and the host states that there is room for one.
        unsafe { out.write(value) };
    }
}

/// A struct that begins with its own size, so that it can grow at its end.
///
/// # Safety
/// `repr(C)`, begins with `struct_size: u32`, its length is a multiple of 8, and every pattern of bits is a value of it.
pub(crate) unsafe trait Sized32: Copy {
    /// Its C name.
    const NAME: &'static str;
    /// Every field as the INIT macro has it.
    fn init() -> Self;
}

/// Reads options: NULL gives the defaults, a shorter struct the defaults of what it lacks, a longer one is taken while its
/// further bytes are zero.
pub(crate) unsafe fn read_sized<T: Sized32>(pointer: *const T) -> Result<T> {
    let mut value = T::init();
    if pointer.is_null() {
        return Ok(value);
    }
    // SAFETY: every such struct has at least its size, and bytes of a struct may be read one by one.
    let given = unsafe { pointer.cast::<u32>().read() } as usize;
    check_size::<T>(given)?;
    let known = given.min(size_of::<T>());
    let bytes = pointer.cast::<u8>();
    // SAFETY: the host states that `given` bytes are there; every pattern of bits is a value of T.
    let tail = unsafe {
        std::ptr::copy_nonoverlapping(bytes, (&raw mut value).cast(), known);
        std::slice::from_raw_parts(bytes.add(known), given - known)
    };
    if tail.iter().any(|&byte| byte != 0) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} has fields that this version of libhob does not know, and they are set; update libhob or leave them 0",
                T::NAME
            ),
        ));
    }
    Ok(value)
}

/// What of the options can be read whatever is wrong with them: for what must be given back also when the call is refused.
pub(crate) unsafe fn peek_sized<T: Sized32>(pointer: *const T) -> T {
    let mut value = T::init();
    if pointer.is_null() {
        return value;
    }
    // SAFETY: as in read_sized.
    unsafe {
        let given = pointer.cast::<u32>().read() as usize;
        if check_size::<T>(given).is_ok() {
            std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut value).cast(), given.min(size_of::<T>()));
        }
    }
    value
}

/// Writes a result struct up to the size that the host's header knows; what a newer header has beyond becomes zero.
pub(crate) unsafe fn write_sized<T: Sized32>(out: *mut T, mut value: T) -> Result<()> {
    if out.is_null() {
        return Err(null(T::NAME));
    }
    // SAFETY: as in read_sized.
    let given = unsafe { out.cast::<u32>().read() };
    check_size::<T>(given as usize)?;
    // SAFETY: the host states that `given` bytes are there.
    unsafe {
        (&raw mut value).cast::<u32>().write(given);
        let known = (given as usize).min(size_of::<T>());
        std::ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), out.cast::<u8>(), known);
        out.cast::<u8>().add(known).write_bytes(0, given as usize - known);
    }
    Ok(())
}

fn check_size<T: Sized32>(given: usize) -> Result<()> {
    if given < 8 || !given.is_multiple_of(8) || given > 1 << 16 {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{}.struct_size is {given}; start from its INIT macro, which sets it to {}", T::NAME, size_of::<T>()),
        ));
    }
    Ok(())
}

pub(crate) fn null(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{what} is NULL"))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Thing;
    castable!(Thing => String, Boxed, 14);
    struct Common;
    castable!(Common => String, Counted, 15);

    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Options {
        struct_size: u32,
        first: u32,
        second: u64,
    }
    // SAFETY: as the trait asks.
    unsafe impl Sized32 for Options {
        const NAME: &'static str = "options";
        fn init() -> Self {
            Self { struct_size: 16, first: 7, second: 9 }
        }
    }

    #[repr(C)]
    struct Newer {
        known: Options,
        third: u64,
    }

    #[test]
    fn boxes_and_counts_come_back_once() {
        let boxed = give_boxed::<Thing>(Held::new("a".to_owned()));
        // SAFETY: it came from give_boxed.
        unsafe {
            assert_eq!(borrow(boxed).map(|held| held.as_str()), Some("a"));
            assert_eq!(take_boxed(boxed).map(|held| held.len()), Some(1));
            assert!(take_boxed::<Thing>(std::ptr::null_mut()).is_none());
        }
        let counted = give_counted::<Common>(Arc::new(Held::new("b".to_owned())));
        // SAFETY: it came from give_counted; the clone is a second count.
        unsafe {
            let more = give_counted::<Common>(share(counted).expect("not NULL"));
            assert_eq!(live(15), Some(2));
            drop(take_counted(counted));
            assert_eq!(borrow(more).map(|held| held.as_str()), Some("b"));
            drop(take_counted(more));
            assert_eq!((live(15), live(0), live(16), live(-1)), (Some(0), None, None, None));
        }
    }

    #[test]
    fn a_handle_of_another_kind_is_refused_and_left_alone() {
        let boxed = give_boxed::<Thing>(Held::new("a".to_owned()));
        let wrong: *mut Common = boxed.cast();
        // SAFETY: both are live handles, whatever they are taken for.
        unsafe {
            assert!(borrow(wrong).is_none() && share(wrong).is_none() && take_counted(wrong).is_none());
            assert!(no_handle(wrong, "thing").message().contains("another kind"));
            assert!(no_handle::<Thing>(std::ptr::null(), "thing").message().contains("NULL"));
            assert_eq!(take_boxed(boxed).map(|held| held.len()), Some(1), "it is still there");
        }
    }

    #[test]
    fn options_of_other_headers_are_read() {
        let options = Options { struct_size: 16, first: 1, second: 2 };
        let short = Options { struct_size: 8, ..options };
        let newer = |third| Newer { known: Options { struct_size: 24, ..options }, third };
        // SAFETY: each states its own size.
        unsafe {
            assert_eq!(read_sized(std::ptr::null::<Options>()).expect("defaults"), Options::init());
            assert_eq!(read_sized(&raw const options).expect("the same"), options);
            let read = read_sized(&raw const short).expect("an older header");
            assert_eq!((read.first, read.second), (1, 9), "what is missing has its default");
            let tail = newer(0);
            assert_eq!(read_sized((&raw const tail).cast::<Options>()).expect("a newer header").second, 2);
            let tail = newer(1);
            let error = read_sized((&raw const tail).cast::<Options>()).expect_err("an unknown field is set");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert_eq!(peek_sized((&raw const tail).cast::<Options>()).second, 2, "what is known of it can be seen");
            assert_eq!(peek_sized(&raw const short).second, 9);
            assert_eq!(peek_sized(std::ptr::null::<Options>()), Options::init());
            for size in [0, 4, 12, 1 << 20] {
                let wrong = Options { struct_size: size, ..options };
                assert_eq!(read_sized(&raw const wrong).expect_err("a wrong size").kind(), ErrorKind::InvalidArgument);
            }
        }
    }

    #[test]
    fn results_stay_within_the_hosts_struct() {
        let value = Options { struct_size: 16, first: 1, second: 2 };
        let mut short = Options { struct_size: 8, first: 0, second: 77 };
        let mut long = Newer { known: Options { struct_size: 24, first: 0, second: 0 }, third: 5 };
        // SAFETY: each states its own size.
        unsafe {
            write_sized(&raw mut short, value).expect("an older header");
            write_sized((&raw mut long).cast::<Options>(), value).expect("a newer header");
        }
        assert_eq!(short, Options { struct_size: 8, first: 1, second: 77 });
        assert_eq!((long.known.second, long.third, long.known.struct_size), (2, 0, 24));
    }

    #[test]
    fn texts_are_checked() {
        // SAFETY: the pointers are of literals with these lengths.
        unsafe {
            assert_eq!(text(c"abc".as_ptr(), NUL, "t").expect("text"), "abc");
            assert_eq!(text(c"abc".as_ptr(), 2, "t").expect("text"), "ab");
            assert_eq!(text(c"abc".as_ptr(), 0, "t").expect("text"), "");
            assert!(text(std::ptr::null(), 3, "t").is_err());
            assert!(text(c"\xff".as_ptr(), NUL, "t").expect_err("no UTF-8").message().contains("byte 0"));
            assert!(slice::<u64>(std::ptr::dangling(), usize::MAX / 2, "t").is_err());
        }
    }
}
