//! The library's numbers.

use std::ffi::c_char;

use hob::{Error, ErrorKind};

use crate::boundary::guard;
use crate::error::{HOB_OK, hob_error, hob_status};

/// The version of this header, by Semantic Versioning.
pub const HOB_VERSION_MAJOR: i32 = 0;
/// The version of this header.
pub const HOB_VERSION_MINOR: i32 = 1;
/// The version of this header.
pub const HOB_VERSION_PATCH: i32 = 0;
/// The number of the binary interface. While it stays the same no function disappears or changes its parameters, no constant
/// changes its value, and structs that begin with `struct_size` only grow at their end; other structs do not change.
pub const HOB_ABI_VERSION: u32 = 1;

/// The library's version as text, such as `0.1.0`. Static. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub extern "C" fn hob_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The library's `HOB_ABI_VERSION`. Any thread. (Since 0.1)
#[unsafe(no_mangle)]
pub extern "C" fn hob_abi_version() -> u32 {
    HOB_ABI_VERSION
}

/// Checks that the library serves programs compiled with a header of that `HOB_ABI_VERSION`. What a host that loads the library
/// itself calls first. Any thread. HOB_UNSUPPORTED when it does not. (Since 0.1)
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hob_abi_check(header_abi_version: u32, out_error: *mut *mut hob_error) -> hob_status {
    // SAFETY: as the header asks.
    unsafe {
        guard(out_error, || {
            if header_abi_version == HOB_ABI_VERSION {
                return Ok(HOB_OK);
            }
            let text = format!(
                "the program was compiled for ABI {header_abi_version} and this libhob has ABI {HOB_ABI_VERSION}; use a libhob.so.{header_abi_version}"
            );
            Err(Error::new(ErrorKind::Unsupported, text))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_version_is_the_crates() {
        let parts = [HOB_VERSION_MAJOR, HOB_VERSION_MINOR, HOB_VERSION_PATCH].map(|part| part.to_string()).join(".");
        assert_eq!(parts, env!("CARGO_PKG_VERSION"));
    }
}
