//! Where pointers of C become references, what every export goes through, and the handles that need no engine. See Cargo.toml.
#![allow(dead_code, non_camel_case_types, clippy::missing_safety_doc)]

// The helpers know the core as `hob`; of it they need its error.
extern crate self as hob;

#[path = "../../core/src/error.rs"]
pub mod core_error;
pub use core_error::{Error, ErrorKind, Result};

#[path = "../../ffi/src/boundary.rs"]
mod boundary;
#[path = "../../ffi/src/buffer.rs"]
pub mod buffer;
#[path = "../../ffi/src/error.rs"]
pub mod error;
#[path = "../../ffi/src/handle.rs"]
pub mod handle;
#[path = "../../ffi/src/raw.rs"]
mod raw;

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use crate::buffer::*;
    use crate::error::*;
    use crate::handle::*;

    /// The counts of live handles are the process's: one test at a time.
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    /// What a C program does with a buffer: two counts, each view, and nothing left.
    #[test]
    fn buffers_live_as_long_as_their_last_count() {
        let _alone = ALONE.lock();
        let vectors = rows(vec![1.0, 2.0, 3.0, 4.0], 2, c"{}".to_owned());
        let (ids, text) = (ids(vec![7, 8]), text("a\0b".to_owned()));
        // SAFETY: live handles, and views that begin with their size.
        unsafe {
            let again = hob_buffer_retain(vectors);
            hob_buffer_release(vectors);
            let (mut count, mut dimensions) = (0, 0);
            let data = hob_buffer_floats(again, &raw mut count, &raw mut dimensions);
            assert_eq!((count, dimensions, *data.add(3)), (2, 2, 4.0));
            assert!(hob_buffer_ids(again, &raw mut count).is_null() && count == 0);
            assert_eq!(*hob_buffer_ids(ids, &raw mut count).add(1), 8);
            for (buffer, len) in [(again, 16), (ids, 8), (text, 3)] {
                let mut view = std::mem::zeroed::<hob_buffer_view>();
                assert_eq!(hob_buffer_get_view(buffer, &raw mut view, null_mut()), HOB_INVALID_ARGUMENT, "a size of 0");
                view.struct_size = 48;
                assert_eq!(hob_buffer_get_view(buffer, &raw mut view, null_mut()), HOB_OK);
                let items: u64 = (0..view.rank).map(|at| *view.shape.add(at)).product();
                assert_eq!((view.len, items * *view.strides.add(view.rank - 1)), (len, len as u64));
            }
            let mut error = null_mut();
            assert_eq!(hob_buffer_get_view(null_mut(), null_mut(), &raw mut error), HOB_INVALID_ARGUMENT);
            assert_eq!(hob_error_status(error), HOB_INVALID_ARGUMENT);
            // As another kind: refused, and still there.
            hob_buffer_release(error.cast());
            hob_error_free(again.cast());
            hob_error_free(error);
            for buffer in [again, ids, text] {
                hob_buffer_release(buffer);
            }
        }
        assert_eq!(hob_live_handles_of(HOB_HANDLE_BUFFER), 0);
    }

    /// Counts of one handle are given back by several threads.
    #[test]
    fn counts_go_on_any_thread() {
        struct Sent(*mut hob_buffer);
        // SAFETY: the header says any thread.
        unsafe impl Send for Sent {}
        let _alone = ALONE.lock();
        let buffer = ids(vec![1; 100]);
        let threads = (0..3).map(|_| {
            // SAFETY: a live handle; each thread has a count of its own.
            let own = Sent(unsafe { hob_buffer_retain(buffer) });
            std::thread::spawn(move || {
                let own = own;
                // SAFETY: as above.
                unsafe {
                    assert_eq!(*hob_buffer_ids(own.0, null_mut()).add(99), 1);
                    hob_buffer_release(own.0);
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        // SAFETY: the first count.
        unsafe { hob_buffer_release(buffer) };
        for thread in threads {
            thread.join().expect("no panic");
        }
    }
}
