//! Any bytes at all give a GGUF header that can be trusted, or a typed error.
#![no_main]
#![allow(dead_code, unused_imports)]

use libfuzzer_sys::fuzz_target;

#[path = "../../../core/src"]
mod source {
    pub mod error;
    pub mod gguf;
}
pub use source::{error, gguf};

use error::ErrorKind;

fuzz_target!(|bytes: &[u8]| {
    match gguf::GgufHeader::from_bytes(bytes) {
        Ok(header) => {
            assert!(header.alignment().is_power_of_two());
            for tensor in header.tensors().values() {
                assert!(tensor.offset >= header.data_offset());
                assert!(tensor.offset.checked_add(tensor.bytes).is_some_and(|end| end <= bytes.len() as u64));
                assert!(tensor.elements() % tensor.tensor_type.block_size() == 0);
            }
            let _ = header.check_loadable();
            for key in header.metadata().keys() {
                let _ = (header.opt_u64(key), header.opt_u32(key), header.opt_f32(key), header.opt_bool(key));
                let _ = (header.opt_string(key), header.opt_strings(key), header.opt_f32s(key), header.opt_u64s(key));
            }
        }
        Err(error) => assert!(matches!(error.kind(), ErrorKind::BadModel | ErrorKind::Unsupported), "{error}"),
    }
});
