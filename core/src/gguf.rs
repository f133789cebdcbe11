//! A strict reader of GGUF headers (versions 2 and 3), safe on hostile files.
//!
//! MLX's own GGUF parser trusts every length and offset in the file, so Hob reads files with this one instead, and each tensor's
//! bytes at the place it gives (`weights.rs`). Checked are: magic, version, counts, string
//! lengths, array types, alignment, dimensions, tensor types, byte sizes, offsets against the end of the file, overlaps and
//! duplicate names. No allocation is proportional to a number that was not checked against the bytes that are really there.
//!
//! The header is read with ordinary buffered reads, not through a memory map: a file that shrinks while it is read is then an
//! error, not a `SIGBUS`.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use crate::error::{Error, Result};

pub use tensor_type::TensorType;

mod tensor_type;

/// `GGUF` in the byte order of the file.
const MAGIC: [u8; 4] = *b"GGUF";
/// Most metadata keys a file may have.
const MAX_KEYS: u64 = 1 << 16;
/// Most tensors a file may have.
const MAX_TENSORS: u64 = 1 << 20;
/// Longest name of a key or a tensor, in bytes.
const MAX_NAME: u64 = 1 << 10;
/// Longest string value, in bytes (the largest real ones are chat templates of some 100 KB).
const MAX_STRING: u64 = 16 << 20;
/// Most elements of one array (the largest real ones are the merges of 256k-token vocabularies).
const MAX_ARRAY: u64 = 1 << 24;
/// Most bytes of header (metadata and tensor list) that are read at all.
const MAX_HEADER: u64 = 512 << 20;
/// Most memory that metadata may take once read: small numbers of the file become wide ones here.
const MAX_MEMORY: u64 = 512 << 20;
/// Most dimensions of a tensor in ggml.
const MAX_DIMS: u32 = 4;
/// Largest alignment accepted.
const MAX_ALIGNMENT: u64 = 1 << 20;
/// Alignment when `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;

/// One tensor of the file, checked: it lies inside the file, aligned, and overlaps no other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, unique in the file.
    pub name: String,
    /// Dimensions in the file's order: the first one is the fastest varying (the reverse of MLX's and PyTorch's shape).
    pub dims: Vec<u64>,
    /// How its numbers are stored.
    pub tensor_type: TensorType,
    /// Offset of its first byte from the start of the file.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

impl TensorInfo {
    /// The number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.dims.iter().product()
    }

    /// The shape with the slowest varying dimension first, as MLX and PyTorch spell it.
    #[must_use]
    pub fn shape(&self) -> Vec<u64> {
        self.dims.iter().rev().copied().collect()
    }
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// Any unsigned integer type of the file.
    Unsigned(u64),
    /// Any signed integer type of the file.
    Signed(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    String(String),
    /// A flat array; arrays of arrays are refused.
    Array(GgufArray),
}

/// A flat array of metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufArray {
    /// Any unsigned integer type of the file.
    Unsigned(Vec<u64>),
    /// Any signed integer type of the file.
    Signed(Vec<i64>),
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// Truth values.
    Bool(Vec<bool>),
    /// Texts.
    String(Vec<String>),
}

impl GgufArray {
    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Unsigned(values) => values.len(),
            Self::Signed(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::String(values) => values.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an array of unsigned integers",
            Self::Signed(_) => "an array of signed integers",
            Self::F32(_) | Self::F64(_) => "an array of floats",
            Self::Bool(_) => "an array of booleans",
            Self::String(_) => "an array of strings",
        }
    }
}

impl GgufValue {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) => "an unsigned integer",
            Self::Signed(_) => "a signed integer",
            Self::F32(_) | Self::F64(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Array(array) => array.kind(),
        }
    }
}

/// The validated header of a GGUF file: metadata and tensor list.
#[derive(Debug, Clone)]
pub struct GgufHeader {
    path: PathBuf,
    version: u32,
    alignment: u64,
    data_offset: u64,
    file_bytes: u64,
    metadata: IndexMap<String, GgufValue>,
    tensors: IndexMap<String, TensorInfo>,
}

impl GgufHeader {
    /// Reads and checks the header of the file at `path`.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) or [`Io`](crate::ErrorKind::Io) when the file cannot be read,
    /// [`BadModel`](crate::ErrorKind::BadModel) naming file and field when its content cannot be trusted, and
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a version, byte order, nested array or tensor type unknown to Hob.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|error| Error::io(path, error))?;
        let about = file.metadata().map_err(|error| Error::io(path, error))?;
        if !about.is_file() {
            return Err(Error::bad_model(path, "file", "not a regular file"));
        }
        Self::parse(BufReader::with_capacity(1 << 16, file), about.len(), path)
    }

    /// Checks a whole file held in memory, for tests and fuzzing.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::parse(bytes, bytes.len() as u64, Path::new("(memory)"))
    }

    fn parse(source: impl Read, file_bytes: u64, path: &Path) -> Result<Self> {
        let mut reader = Reader { source, path, at: 0, end: file_bytes.min(MAX_HEADER), file_bytes, memory: 0 };
        let magic: [u8; 4] = reader.take("magic")?;
        if magic != MAGIC {
            return Err(Error::bad_model(path, "magic", "not a GGUF file"));
        }
        let version = reader.u32("version")?;
        if version.swap_bytes() == 2 || version.swap_bytes() == 3 {
            return Err(Error::unsupported(format!("{}: a big-endian GGUF file; convert it to little-endian", path.display())));
        }
        if version != 2 && version != 3 {
            return Err(Error::unsupported(format!("{}: GGUF version {version}; Hob reads versions 2 and 3", path.display())));
        }
        let tensor_count = reader.count("tensor count", MAX_TENSORS)?;
        let key_count = reader.count("metadata count", MAX_KEYS)?;
        let metadata = reader.metadata(key_count)?;
        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(GgufValue::Unsigned(value)) if value.is_power_of_two() && *value <= MAX_ALIGNMENT => *value,
            Some(GgufValue::Unsigned(value)) => {
                return Err(Error::bad_model(
                    path,
                    "general.alignment",
                    format!("{value}; it must be a power of two up to {MAX_ALIGNMENT}"),
                ));
            }
            Some(other) => {
                return Err(Error::bad_model(path, "general.alignment", format!("{}; it must be a uint32", other.kind())));
            }
        };
        let mut tensors = reader.tensors(tensor_count)?;
        let data_offset = reader.at.next_multiple_of(alignment);
        place_tensors(&mut tensors, data_offset, alignment, file_bytes, path)?;
        Ok(Self { path: path.to_path_buf(), version, alignment, data_offset, file_bytes, metadata, tensors })
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version of the format, 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// What tensor offsets are multiples of, in bytes.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Where the tensors' bytes begin in the file.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// The size of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// All metadata, in the order of the file.
    #[must_use]
    pub fn metadata(&self) -> &IndexMap<String, GgufValue> {
        &self.metadata
    }

    /// All tensors by name, in the order of the file.
    #[must_use]
    pub fn tensors(&self) -> &IndexMap<String, TensorInfo> {
        &self.tensors
    }

    /// The tensor called `name`; a missing one is a [`BadModel`](crate::ErrorKind::BadModel) error.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).ok_or_else(|| Error::bad_model(&self.path, name, "the tensor is missing"))
    }

    /// Bytes of all tensors together.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.bytes).sum()
    }

    /// Refuses a file with a tensor of a type Hob cannot run, naming the first such tensor and its type.
    pub fn check_loadable(&self) -> Result<()> {
        match self.tensors.values().find(|tensor| !tensor.tensor_type.is_loadable()) {
            None => Ok(()),
            Some(tensor) => Err(Error::unsupported(format!(
                "{}: tensor {} has type {}; Hob runs F32, F16, BF16, Q4_0, Q4_1 and Q8_0: convert the model to one of these",
                self.path.display(),
                tensor.name,
                tensor.tensor_type
            ))),
        }
    }

    /// `general.architecture`, for example `llama`.
    pub fn arch(&self) -> Result<&str> {
        self.string("general.architecture")
    }

    /// Whether `key` is present, of whatever type.
    #[must_use]
    pub fn has(&self, key: &str) -> bool {
        self.metadata.contains_key(key)
    }

    /// The raw value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.get(key)
    }

    fn wrong(&self, key: &str, found: &'static str, want: &str) -> Error {
        Error::bad_model(&self.path, key, format!("{found} where {want} is wanted"))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| Error::bad_model(&self.path, key, "missing"))
    }

    /// A non-negative integer of any width; `None` when absent.
    pub fn opt_u64(&self, key: &str) -> Result<Option<u64>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Unsigned(value)) => Ok(Some(*value)),
            Some(GgufValue::Signed(value)) => u64::try_from(*value)
                .map(Some)
                .map_err(|_| Error::bad_model(&self.path, key, format!("{value} where a non-negative integer is wanted"))),
            Some(other) => Err(self.wrong(key, other.kind(), "an integer")),
        }
    }

    /// A non-negative integer of any width that must be there.
    pub fn u64(&self, key: &str) -> Result<u64> {
        self.required(key, self.opt_u64(key)?)
    }

    /// A non-negative integer that fits 32 bits; `None` when absent.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        self.opt_u64(key)?
            .map(|value| {
                u32::try_from(value).map_err(|_| Error::bad_model(&self.path, key, format!("{value} does not fit 32 bits")))
            })
            .transpose()
    }

    /// A non-negative integer that fits 32 bits and must be there.
    pub fn u32(&self, key: &str) -> Result<u32> {
        self.required(key, self.opt_u32(key)?)
    }

    /// A finite float (or an integer, converted); `None` when absent.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
        let value = match self.metadata.get(key) {
            None => return Ok(None),
            Some(GgufValue::F32(value)) => *value,
            Some(GgufValue::F64(value)) => *value as f32,
            Some(GgufValue::Unsigned(value)) => *value as f32,
            Some(GgufValue::Signed(value)) => *value as f32,
            Some(other) => return Err(self.wrong(key, other.kind(), "a number")),
        };
        if value.is_finite() { Ok(Some(value)) } else { Err(Error::bad_model(&self.path, key, "not a finite number")) }
    }

    /// A finite float (or an integer, converted) that must be there.
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.required(key, self.opt_f32(key)?)
    }

    /// A truth value; `None` when absent.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.wrong(key, other.kind(), "a boolean")),
        }
    }

    /// A truth value that must be there.
    pub fn bool(&self, key: &str) -> Result<bool> {
        self.required(key, self.opt_bool(key)?)
    }

    /// A text; `None` when absent.
    pub fn opt_string(&self, key: &str) -> Result<Option<&str>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::String(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(key, other.kind(), "a string")),
        }
    }

    /// A text that must be there.
    pub fn string(&self, key: &str) -> Result<&str> {
        self.required(key, self.opt_string(key)?)
    }

    /// An array of any type; `None` when absent.
    pub fn opt_array(&self, key: &str) -> Result<Option<&GgufArray>> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(GgufValue::Array(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(key, other.kind(), "an array")),
        }
    }

    /// An array of any type that must be there.
    pub fn array(&self, key: &str) -> Result<&GgufArray> {
        self.required(key, self.opt_array(key)?)
    }

    /// An array of texts; `None` when absent.
    pub fn opt_strings(&self, key: &str) -> Result<Option<&[String]>> {
        match self.opt_array(key)? {
            None => Ok(None),
            Some(GgufArray::String(values)) => Ok(Some(values)),
            Some(other) => Err(self.wrong(key, other.kind(), "an array of strings")),
        }
    }

    /// An array of texts that must be there.
    pub fn strings(&self, key: &str) -> Result<&[String]> {
        self.required(key, self.opt_strings(key)?)
    }

    /// An array of finite 32-bit floats; `None` when absent.
    pub fn opt_f32s(&self, key: &str) -> Result<Option<&[f32]>> {
        match self.opt_array(key)? {
            None => Ok(None),
            Some(GgufArray::F32(values)) if values.iter().all(|value| value.is_finite()) => Ok(Some(values)),
            Some(GgufArray::F32(_)) => Err(Error::bad_model(&self.path, key, "an element is not a finite number")),
            Some(other) => Err(self.wrong(key, other.kind(), "an array of 32-bit floats")),
        }
    }

    /// An array of non-negative integers of any width; `None` when absent.
    pub fn opt_u64s(&self, key: &str) -> Result<Option<Vec<u64>>> {
        match self.opt_array(key)? {
            None => Ok(None),
            Some(GgufArray::Unsigned(values)) => Ok(Some(values.clone())),
            Some(GgufArray::Signed(values)) => values
                .iter()
                .map(|value| u64::try_from(*value))
                .collect::<std::result::Result<_, _>>()
                .map(Some)
                .map_err(|_| Error::bad_model(&self.path, key, "an element is negative")),
            Some(other) => Err(self.wrong(key, other.kind(), "an array of integers")),
        }
    }
}

/// Turns offsets relative to the data section into checked offsets from the start of the file.
fn place_tensors(
    tensors: &mut IndexMap<String, TensorInfo>,
    data_offset: u64,
    alignment: u64,
    file_bytes: u64,
    path: &Path,
) -> Result<()> {
    for tensor in tensors.values_mut() {
        if !tensor.offset.is_multiple_of(alignment) {
            let what = format!("offset {} is not a multiple of the alignment {alignment}", tensor.offset);
            return Err(Error::bad_model(path, &tensor.name, what));
        }
        let start = data_offset.checked_add(tensor.offset);
        let end = start.and_then(|start| start.checked_add(tensor.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => tensor.offset = start,
            _ => {
                let what = format!(
                    "{} bytes at offset {} of the data do not fit the file of {file_bytes} bytes: it is truncated or damaged",
                    tensor.bytes, tensor.offset
                );
                return Err(Error::bad_model(path, &tensor.name, what));
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.values().collect();
    order.sort_unstable_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            return Err(Error::bad_model(path, &pair[1].name, format!("its bytes overlap those of tensor {}", pair[0].name)));
        }
    }
    Ok(())
}

/// Reads little-endian fields and knows how many bytes are left.
struct Reader<'a, R> {
    source: R,
    path: &'a Path,
    at: u64,
    end: u64,
    file_bytes: u64,
    memory: u64,
}

impl<R: Read> Reader<'_, R> {
    fn bad(&self, field: &str, what: impl fmt::Display) -> Error {
        Error::bad_model(self.path, field, what)
    }

    fn left(&self) -> u64 {
        self.end - self.at
    }

    /// Makes sure that `bytes` more bytes of header exist before anything is allocated for them.
    fn need(&self, bytes: u64, field: &str) -> Result<()> {
        if bytes <= self.left() {
            return Ok(());
        }
        if self.end < self.file_bytes && bytes <= self.file_bytes - self.at {
            return Err(self.bad(field, format!("the header is longer than {MAX_HEADER} bytes")));
        }
        Err(self.bad(field, format!("the file ends at byte {} while {bytes} bytes are wanted at {}", self.file_bytes, self.at)))
    }

    fn fill(&mut self, buffer: &mut [u8], field: &str) -> Result<()> {
        self.need(buffer.len() as u64, field)?;
        self.source.read_exact(buffer).map_err(|error| {
            Error::bad_model(self.path, field, format!("the file ended at or after byte {}", self.at)).with_source(error)
        })?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn take<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, field)?;
        Ok(bytes)
    }

    fn u32(&mut self, field: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take(field)?))
    }

    fn u64(&mut self, field: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take(field)?))
    }

    fn count(&mut self, field: &str, limit: u64) -> Result<u64> {
        let count = self.u64(field)?;
        if count > limit { Err(self.bad(field, format!("{count}; the limit is {limit}"))) } else { Ok(count) }
    }

    /// Counts memory about to be taken.
    fn charge(&mut self, count: u64, size: usize, field: &str) -> Result<()> {
        self.memory = self.memory.saturating_add(count.saturating_mul(size as u64));
        if self.memory > MAX_MEMORY {
            return Err(self.bad(field, format!("the metadata takes more than {MAX_MEMORY} bytes of memory")));
        }
        Ok(())
    }

    fn text(&mut self, field: &str, limit: u64) -> Result<String> {
        let length = self.u64(field)?;
        if length > limit {
            return Err(self.bad(field, format!("a text of {length} bytes; the limit is {limit}")));
        }
        self.need(length, field)?;
        self.charge(length, 1, field)?;
        let mut bytes = vec![0; usize::try_from(length).map_err(|_| self.bad(field, "too long"))?];
        self.fill(&mut bytes, field)?;
        String::from_utf8(bytes).map_err(|_| self.bad(field, "not valid UTF-8"))
    }

    fn name(&mut self, field: &str) -> Result<String> {
        let name = self.text(field, MAX_NAME)?;
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err(self.bad(field, "empty or with control characters"));
        }
        Ok(name)
    }

    fn metadata(&mut self, count: u64) -> Result<IndexMap<String, GgufValue>> {
        let mut metadata = IndexMap::new();
        for index in 0..count {
            let key = self.name(&format!("metadata key {index}"))?;
            let code = self.u32(&key)?;
            let value = self.value(code, &key)?;
            if key == "general.alignment" && code != 4 {
                return Err(self.bad(&key, format!("{}; it must be a uint32", value.kind())));
            }
            if metadata.contains_key(&key) {
                return Err(self.bad(&key, "the key appears twice"));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn value(&mut self, code: u32, key: &str) -> Result<GgufValue> {
        Ok(match code {
            0 | 2 | 4 | 10 => GgufValue::Unsigned(self.unsigned(code, key)?),
            1 | 3 | 5 | 11 => GgufValue::Signed(self.signed(code, key)?),
            6 => GgufValue::F32(f32::from_le_bytes(self.take(key)?)),
            7 => GgufValue::Bool(self.boolean(key)?),
            8 => GgufValue::String(self.text(key, MAX_STRING)?),
            9 => GgufValue::Array(self.array(key)?),
            12 => GgufValue::F64(f64::from_le_bytes(self.take(key)?)),
            other => return Err(self.bad(key, format!("unknown value type {other}"))),
        })
    }

    fn unsigned(&mut self, code: u32, key: &str) -> Result<u64> {
        Ok(match code {
            0 => u64::from(u8::from_le_bytes(self.take(key)?)),
            2 => u64::from(u16::from_le_bytes(self.take(key)?)),
            4 => u64::from(u32::from_le_bytes(self.take(key)?)),
            _ => u64::from_le_bytes(self.take(key)?),
        })
    }

    fn signed(&mut self, code: u32, key: &str) -> Result<i64> {
        Ok(match code {
            1 => i64::from(i8::from_le_bytes(self.take(key)?)),
            3 => i64::from(i16::from_le_bytes(self.take(key)?)),
            5 => i64::from(i32::from_le_bytes(self.take(key)?)),
            _ => i64::from_le_bytes(self.take(key)?),
        })
    }

    fn boolean(&mut self, key: &str) -> Result<bool> {
        match self.take::<1>(key)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.bad(key, format!("{other} where a boolean (0 or 1) is wanted"))),
        }
    }

    fn array(&mut self, key: &str) -> Result<GgufArray> {
        let code = self.u32(key)?;
        let count = self.count(key, MAX_ARRAY)?;
        let smallest: u64 = match code {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => {
                return Err(Error::unsupported(format!(
                    "{}: {key}: an array of arrays; no known model has one",
                    self.path.display()
                )));
            }
            other => return Err(self.bad(key, format!("unknown element type {other}"))),
        };
        // The count is at most 2^24, so this cannot overflow; afterwards it is bounded by bytes that exist.
        self.need(count * smallest, key)?;
        Ok(match code {
            0 | 2 | 4 | 10 => GgufArray::Unsigned(self.repeat(key, count, |reader| reader.unsigned(code, key))?),
            1 | 3 | 5 | 11 => GgufArray::Signed(self.repeat(key, count, |reader| reader.signed(code, key))?),
            6 => GgufArray::F32(self.repeat(key, count, |reader| Ok(f32::from_le_bytes(reader.take(key)?)))?),
            7 => GgufArray::Bool(self.repeat(key, count, |reader| reader.boolean(key))?),
            8 => GgufArray::String(self.repeat(key, count, |reader| reader.text(key, MAX_STRING))?),
            _ => GgufArray::F64(self.repeat(key, count, |reader| Ok(f64::from_le_bytes(reader.take(key)?)))?),
        })
    }

    fn repeat<T>(&mut self, key: &str, count: u64, mut read: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        self.charge(count, size_of::<T>(), key)?;
        let mut values = Vec::with_capacity(usize::try_from(count).unwrap_or(0).min(1 << 18));
        for _ in 0..count {
            values.push(read(self)?);
        }
        Ok(values)
    }

    fn tensors(&mut self, count: u64) -> Result<IndexMap<String, TensorInfo>> {
        let mut tensors = IndexMap::new();
        for index in 0..count {
            let name = self.name(&format!("name of tensor {index}"))?;
            let tensor = self.tensor(name)?;
            if tensors.contains_key(&tensor.name) {
                return Err(self.bad(&tensor.name, "the tensor's name appears twice"));
            }
            tensors.insert(tensor.name.clone(), tensor);
        }
        Ok(tensors)
    }

    fn tensor(&mut self, name: String) -> Result<TensorInfo> {
        let rank = self.u32(&name)?;
        if rank == 0 || rank > MAX_DIMS {
            return Err(self.bad(&name, format!("{rank} dimensions; 1 to {MAX_DIMS} are allowed")));
        }
        let mut dims = Vec::with_capacity(MAX_DIMS as usize);
        let mut elements = 1_u64;
        for _ in 0..rank {
            let dim = self.u64(&name)?;
            // MLX's shapes are 32-bit signed.
            if dim == 0 || dim > i32::MAX as u64 {
                return Err(self.bad(&name, format!("dimension {dim}; 1 to {} are allowed", i32::MAX)));
            }
            elements = elements.checked_mul(dim).ok_or_else(|| self.bad(&name, "the product of its dimensions overflows"))?;
            dims.push(dim);
        }
        let code = self.u32(&name)?;
        let tensor_type = TensorType::from_code(code).ok_or_else(|| {
            Error::unsupported(format!("{}: tensor {name} has the unknown type number {code}", self.path.display()))
        })?;
        let offset = self.u64(&name)?;
        if !dims[0].is_multiple_of(tensor_type.block_size()) {
            let what = format!("rows of {} are not whole {tensor_type} blocks of {}", dims[0], tensor_type.block_size());
            return Err(self.bad(&name, what));
        }
        let bytes = (elements / tensor_type.block_size())
            .checked_mul(tensor_type.block_bytes())
            .ok_or_else(|| self.bad(&name, "its size in bytes overflows"))?;
        Ok(TensorInfo { name, dims, tensor_type, offset, bytes })
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
