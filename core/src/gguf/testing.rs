//! Writes small GGUF files for tests.
#![allow(clippy::unwrap_used)]

use super::{GgufArray, GgufValue};

/// Builds a GGUF file in memory.
#[derive(Clone)]
pub(crate) struct GgufBuilder {
    version: u32,
    keys: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>, u32, u64)>,
    data: Vec<u8>,
}

pub(crate) fn text(value: &str) -> Vec<u8> {
    let mut bytes = (value.len() as u64).to_le_bytes().to_vec();
    bytes.extend(value.as_bytes());
    bytes
}

impl GgufBuilder {
    pub(crate) fn new() -> Self {
        Self { version: 3, keys: Vec::new(), tensors: Vec::new(), data: Vec::new() }
    }

    pub(crate) fn version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// A key with a type code and raw bytes.
    pub(crate) fn raw(mut self, key: &str, code: u32, bytes: Vec<u8>) -> Self {
        self.keys.push((key.to_owned(), code, bytes));
        self
    }

    pub(crate) fn set(self, key: &str, value: GgufValue) -> Self {
        match value {
            GgufValue::Unsigned(value) => self.raw(key, 10, value.to_le_bytes().to_vec()),
            GgufValue::Signed(value) => self.raw(key, 11, value.to_le_bytes().to_vec()),
            GgufValue::F32(value) => self.raw(key, 6, value.to_le_bytes().to_vec()),
            GgufValue::F64(value) => self.raw(key, 12, value.to_le_bytes().to_vec()),
            GgufValue::Bool(value) => self.raw(key, 7, vec![u8::from(value)]),
            GgufValue::String(value) => self.raw(key, 8, text(&value)),
            GgufValue::Array(array) => {
                let (code, items): (u32, Vec<u8>) = match &array {
                    GgufArray::Unsigned(values) => (10, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
                    GgufArray::Signed(values) => (11, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
                    GgufArray::F32(values) => (6, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
                    GgufArray::F64(values) => (12, values.iter().flat_map(|value| value.to_le_bytes()).collect()),
                    GgufArray::Bool(values) => (7, values.iter().map(|value| u8::from(*value)).collect()),
                    GgufArray::String(values) => (8, values.iter().flat_map(|value| text(value)).collect()),
                };
                let mut bytes = code.to_le_bytes().to_vec();
                bytes.extend((array.len() as u64).to_le_bytes());
                bytes.extend(items);
                self.raw(key, 9, bytes)
            }
        }
    }

    pub(crate) fn string(self, key: &str, value: &str) -> Self {
        self.set(key, GgufValue::String(value.to_owned()))
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, value.to_le_bytes().to_vec())
    }

    pub(crate) fn strings(self, key: &str, values: &[&str]) -> Self {
        self.set(key, GgufValue::Array(GgufArray::String(values.iter().map(|value| (*value).to_owned()).collect())))
    }

    /// A tensor with a type code and an offset into the data, which is not checked.
    pub(crate) fn tensor(mut self, name: &str, dims: &[u64], code: u32, offset: u64) -> Self {
        self.tensors.push((name.to_owned(), dims.to_vec(), code, offset));
        self
    }

    pub(crate) fn data(mut self, bytes: usize) -> Self {
        self.data = vec![7; bytes];
        self
    }

    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, code, bytes) in &self.keys {
            out.extend(text(key));
            out.extend(code.to_le_bytes());
            out.extend(bytes);
        }
        for (name, dims, code, offset) in &self.tensors {
            out.extend(text(name));
            out.extend(u32::try_from(dims.len()).unwrap().to_le_bytes());
            for dim in dims {
                out.extend(dim.to_le_bytes());
            }
            out.extend(code.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        if !self.tensors.is_empty() {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&self.data);
        }
        out
    }
}
