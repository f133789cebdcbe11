//! Kinds of handles, and how many are out: for a host's own tests, and for its view of itself.

use crate::boundary::quiet;
use crate::raw;

/// A kind of handle: `hob_error`.
pub const HOB_HANDLE_ERROR: i32 = 1;
/// A kind of handle: `hob_cancel_token`.
pub const HOB_HANDLE_CANCEL_TOKEN: i32 = 2;
/// A kind of handle: `hob_buffer`.
pub const HOB_HANDLE_BUFFER: i32 = 3;
/// A kind of handle: `hob_engine`.
pub const HOB_HANDLE_ENGINE: i32 = 4;
/// A kind of handle: `hob_stream`.
pub const HOB_HANDLE_STREAM: i32 = 5;
/// A kind of handle: `hob_ranking`.
pub const HOB_HANDLE_RANKING: i32 = 6;
/// A kind of handle: `hob_pool`.
pub const HOB_HANDLE_POOL: i32 = 7;
/// A kind of handle: `hob_pause`.
pub const HOB_HANDLE_PAUSE: i32 = 8;
/// A kind of handle: `hob_charge`.
pub const HOB_HANDLE_CHARGE: i32 = 9;
/// A kind of handle: `hob_pool_events`.
pub const HOB_HANDLE_POOL_EVENTS: i32 = 10;
/// A kind of handle: `hob_tokenizer`.
pub const HOB_HANDLE_TOKENIZER: i32 = 11;

/// The highest of them.
const LAST: i32 = HOB_HANDLE_TOKENIZER;

// Unit tests have kinds of their own above these.
const _: () = assert!(LAST.unsigned_abs() as usize <= raw::KINDS - 4);

/// Handles that are with the host now and not given back, counts of shared ones each, over the whole process. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub extern "C" fn hob_live_handles() -> i64 {
    quiet(0, || (1..=LAST).filter_map(raw::live).sum())
}

/// As `hob_live_handles`, of one kind: HOB_HANDLE_..., which begin with 1 and leave none out. Below 0 for a number that is no kind's. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub extern "C" fn hob_live_handles_of(kind: i32) -> i64 {
    quiet(-1, || if kind > LAST { -1 } else { raw::live(kind).unwrap_or(-1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_counted_by_kind() {
        assert_eq!((hob_live_handles_of(0), hob_live_handles_of(LAST + 1)), (-1, -1));
        assert!(hob_live_handles_of(HOB_HANDLE_ERROR) >= 0 && hob_live_handles() >= 0);
    }
}
