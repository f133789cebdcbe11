//! A model's tensors: which files hold them, whether the files can be trusted, and how each becomes an MLX array.
//!
//! The upper half ([`Survey`]) reads headers only and needs no MLX: it serves estimates and refuses bad files before anything is
//! allocated. The lower half ([`Weights`]) runs on the MLX owner thread and hands each tensor to the model that asks for it, once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mlx_rs::{Array, Dtype, ops, transforms};
use safetensors::tensor::{Dtype as StoredType, Metadata};

use crate::error::{Error, ErrorKind, Result};
use crate::gguf::{GgufHeader, TensorType};
use crate::model::config::{Fields, Quantization, QuantizationTable};
use crate::nn::{Embedding, LayerNorm, Linear, Matrix, RmsNorm};

mod blocks;

/// The number type a model computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FloatType {
    /// 32-bit IEEE floating point. On CUDA MLX rounds the factors of matrix products to 19 bits (TF32), unless the process was started
    /// with `MLX_ENABLE_TF32=0`.
    Float32,
    /// 16-bit IEEE floating point.
    Float16,
    /// 16-bit brain floating point.
    BFloat16,
}

impl FloatType {
    pub(crate) fn bytes(self) -> u64 {
        if self == Self::Float32 { 4 } else { 2 }
    }

    fn mlx(self) -> Dtype {
        match self {
            Self::Float32 => Dtype::Float32,
            Self::Float16 => Dtype::Float16,
            Self::BFloat16 => Dtype::Bfloat16,
        }
    }
}

/// How tensors are brought into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) float: FloatType,
    /// Quantised matrices are expanded to `float`.
    pub(crate) dequantize: bool,
}

/// One tensor as its file describes it.
#[derive(Debug, Clone)]
struct Stored {
    file: usize,
    shape: Vec<i32>,
    /// Where the data begins in a GGUF file; MLX finds safetensors' data itself.
    at: u64,
    bytes: u64,
    kind: StoredKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoredKind {
    Float(FloatType),
    /// Integers of an MLX quantisation (`packed` in u32).
    Packed,
    Other,
    Gguf(TensorType),
}

/// What a file looked like when its header was read; loading checks that it still does.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fingerprint {
    path: PathBuf,
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Fingerprint {
    fn of(path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).map_err(|error| Error::io(path, error))?;
        if !meta.is_file() {
            return Err(Error::bad_model(path, "file", "is not a regular file"));
        }
        Ok(Self { path: path.to_owned(), bytes: meta.len(), modified: meta.modified().ok() })
    }

    fn check(&self) -> Result<()> {
        if Self::of(&self.path)? == *self {
            Ok(())
        } else {
            Err(Error::bad_model(&self.path, "file", "changed while it was being loaded"))
        }
    }
}

/// The tensors of a model by name, from headers alone.
#[derive(Debug)]
pub(crate) struct Survey {
    files: Vec<Fingerprint>,
    tensors: BTreeMap<String, Stored>,
    quantization: QuantizationTable,
    is_gguf: bool,
}

impl Survey {
    /// Reads the headers of a directory's safetensors files.
    pub(crate) fn directory(dir: &Path, config: &Fields) -> Result<Self> {
        let quantization = QuantizationTable::from_json(config)?;
        let mut survey = Self { files: Vec::new(), tensors: BTreeMap::new(), quantization, is_gguf: false };
        for (path, wanted) in weight_files(dir)? {
            survey.add_safetensors(&path, wanted.as_ref())?;
        }
        Ok(survey)
    }

    /// Takes over the tensors of a checked GGUF header; their names become those of Hugging Face.
    pub(crate) fn gguf(header: &GgufHeader) -> Result<Self> {
        header.check_loadable()?;
        let files = vec![Fingerprint::of(header.path())?];
        let mut tensors = BTreeMap::new();
        for info in header.tensors().values() {
            let shape = info.shape().into_iter().map(i32::try_from).collect::<Result<Vec<_>, _>>();
            let shape = shape.map_err(|_| Error::bad_model(header.path(), &info.name, "a dimension exceeds 2^31 - 1"))?;
            let at = info.offset;
            let stored = Stored { file: 0, shape, at, bytes: info.bytes, kind: StoredKind::Gguf(info.tensor_type) };
            tensors.insert(hugging_face_name(&info.name), stored);
        }
        Ok(Self { files, tensors, quantization: QuantizationTable::default(), is_gguf: true })
    }

    fn add_safetensors(&mut self, path: &Path, wanted: Option<&BTreeSet<String>>) -> Result<()> {
        let fingerprint = Fingerprint::of(path)?;
        let metadata = read_safetensors_header(path, fingerprint.bytes)?;
        let index = self.files.len();
        self.files.push(fingerprint);
        let mut missing = wanted.cloned().unwrap_or_default();
        for (name, info) in metadata.tensors() {
            // MLX hands names over as C strings: one with a NUL would stand for another tensor.
            if name.chars().any(char::is_control) {
                return Err(Error::bad_model(path, "header", "a tensor's name has control characters"));
            }
            missing.remove(&name);
            if wanted.is_some_and(|wanted| !wanted.contains(&name)) {
                continue;
            }
            let shape = info.shape.iter().map(|&dim| i32::try_from(dim)).collect::<Result<Vec<_>, _>>();
            let shape = shape.map_err(|_| Error::bad_model(path, &name, "a dimension exceeds 2^31 - 1"))?;
            let kind = match info.dtype {
                StoredType::F32 => StoredKind::Float(FloatType::Float32),
                StoredType::F16 => StoredKind::Float(FloatType::Float16),
                StoredType::BF16 => StoredKind::Float(FloatType::BFloat16),
                StoredType::U32 => StoredKind::Packed,
                _ => StoredKind::Other,
            };
            let bytes = (info.data_offsets.1 - info.data_offsets.0) as u64;
            self.tensors.insert(name, Stored { file: index, shape, at: 0, bytes, kind });
        }
        match missing.into_iter().next() {
            Some(name) => Err(Error::bad_model(path, &name, "is not in the file, though the index says so")),
            None => Ok(()),
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Whether any matrix is quantised as stored.
    pub(crate) fn is_quantized(&self) -> bool {
        self.quantization_name().is_some()
    }

    /// The number type most weight bytes are stored in, if any is a plain float.
    pub(crate) fn stored_float(&self) -> Option<FloatType> {
        let mut bytes: BTreeMap<FloatType, u64> = BTreeMap::new();
        for tensor in self.tensors.values() {
            if let StoredKind::Float(float) = tensor.kind {
                *bytes.entry(float).or_default() += tensor.bytes;
            }
        }
        bytes.into_iter().max_by_key(|&(_, bytes)| bytes).map(|(float, _)| float)
    }

    /// A name for the scheme, as `inspect` shows it: `affine 4-bit group 64`, `Q4_1`, or nothing.
    pub(crate) fn quantization_name(&self) -> Option<String> {
        let gguf = self.tensors.values().filter_map(|tensor| match tensor.kind {
            StoredKind::Gguf(kind) if kind.is_quantized() => Some(kind.name()),
            _ => None,
        });
        let names: BTreeSet<&str> = gguf.collect();
        if !names.is_empty() {
            return Some(names.into_iter().collect::<Vec<_>>().join(" + "));
        }
        let q = self.quantization.default.filter(|_| self.tensors.keys().any(|name| name.ends_with(".scales")))?;
        let mixed = if self.quantization.overrides.is_empty() { "" } else { ", mixed" };
        Some(format!("affine {}-bit group {}{mixed}", q.bits, q.group_size))
    }

    /// Bytes of weight data in the files.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.bytes).sum()
    }

    /// Bytes the tensors take once loaded with `layout`.
    pub(crate) fn resident_bytes(&self, layout: Layout) -> u64 {
        let elements = |shape: &[i32]| shape.iter().map(|&dim| u64::from(dim.unsigned_abs())).product::<u64>();
        self.tensors
            .iter()
            .map(|(name, tensor)| match tensor.kind {
                StoredKind::Float(_) if layout.dequantize && (name.ends_with(".scales") || name.ends_with(".biases")) => 0,
                StoredKind::Packed if layout.dequantize => {
                    let path = name.trim_end_matches(".weight");
                    let bits = self.quantization.of(path).ok().flatten().map_or(4, |q| q.bits.unsigned_abs());
                    elements(&tensor.shape) * 32 / u64::from(bits) * layout.float.bytes()
                }
                StoredKind::Packed | StoredKind::Other => tensor.bytes,
                StoredKind::Gguf(kind) if kind.is_quantized() && !layout.dequantize => {
                    blocks::packed_bytes(kind, elements(&tensor.shape), layout.float)
                }
                StoredKind::Float(_) | StoredKind::Gguf(_) => elements(&tensor.shape) * layout.float.bytes(),
            })
            .sum()
    }
}

/// The header of a safetensors file of `size` bytes, checked. Read, not mapped: a file cut short meanwhile is an error here and
/// would be a fault of the process there.
fn read_safetensors_header(path: &Path, size: u64) -> Result<Metadata> {
    let bad = |what: &dyn std::fmt::Display| Error::bad_model(path, "header", what);
    let mut file = std::fs::File::open(path).map_err(|error| Error::io(path, error))?;
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|error| bad(&error))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size - 8 {
        return Err(bad(&format_args!(
            "its length is given as {length} bytes; the file has {size} and at most {MAX_HEADER} are read"
        )));
    }
    let mut header = vec![0; usize::try_from(length).unwrap_or(0)];
    file.read_exact(&mut header).map_err(|error| bad(&error))?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| bad(&error))?;
    if metadata.data_len() as u64 != size - 8 - length {
        return Err(bad(&format_args!("describes {} bytes of tensors; the file holds {}", metadata.data_len(), size - 8 - length)));
    }
    Ok(metadata)
}

/// Largest safetensors header that is read; those of the largest published models are a few hundred kilobytes.
const MAX_HEADER: u64 = 32 << 20;

/// The safetensors files to read, each with the tensors wanted from it (`None`: all).
fn weight_files(dir: &Path) -> Result<Vec<(PathBuf, Option<BTreeSet<String>>)>> {
    let single = dir.join("model.safetensors");
    let index = dir.join("model.safetensors.index.json");
    if index.exists() {
        let fields = Fields::read(&index)?;
        let Some(table) = fields.object("weight_map")? else { return Err(fields.bad("weight_map", "is missing")) };
        let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (tensor, shard) in &table.map {
            let Some(shard) = shard.as_str().filter(|name| is_plain_file_name(name)) else {
                return Err(fields.bad(&format!("weight_map.{tensor}"), "must be the name of a file in the same directory"));
            };
            shards.entry(shard.to_owned()).or_default().insert(tensor.clone());
        }
        let missing = shards.keys().find(|shard| !dir.join(shard).exists());
        match missing {
            // An index left behind by a conversion to one file is stale: the file wins.
            Some(_) if single.exists() => return Ok(vec![(single, None)]),
            Some(shard) => return Err(Error::new(ErrorKind::BadModel, format!("{}: shard {shard} is missing", index.display()))),
            None => return Ok(shards.into_iter().map(|(shard, tensors)| (dir.join(shard), Some(tensors))).collect()),
        }
    }
    if single.exists() {
        return Ok(vec![(single, None)]);
    }
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|error| Error::io(dir, error))? {
        let path = entry.map_err(|error| Error::io(dir, error))?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            shards.push(path);
        }
    }
    shards.sort();
    let Some(first) = shards.first() else {
        return Err(Error::new(
            ErrorKind::BadModel,
            format!("{}: holds no model.safetensors, no index and no shards", dir.display()),
        ));
    };
    let total = first
        .file_stem()
        .and_then(|stem| stem.to_str())
        .and_then(|stem| stem.rsplit_once("-of-"))
        .and_then(|(_, n)| n.parse::<usize>().ok());
    match total {
        Some(total) if total == shards.len() => Ok(shards.into_iter().map(|shard| (shard, None)).collect()),
        Some(total) => {
            Err(Error::new(ErrorKind::BadModel, format!("{}: {} of {total} shards are here", dir.display(), shards.len())))
        }
        None if shards.len() == 1 => Ok(vec![(shards.remove(0), None)]),
        None => Err(Error::new(
            ErrorKind::BadModel,
            format!("{}: several safetensors files and no model.safetensors.index.json", dir.display()),
        )),
    }
}

fn is_plain_file_name(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name) && name.ends_with(".safetensors")
}

/// llama.cpp's tensor names in Hugging Face's spelling; an unknown name stays as it is and is refused as unused later.
fn hugging_face_name(name: &str) -> String {
    match name {
        "token_embd.weight" => return "model.embed_tokens.weight".into(),
        "output_norm.weight" => return "model.norm.weight".into(),
        "output.weight" => return "lm_head.weight".into(),
        _ => {}
    }
    let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else { return name.to_owned() };
    let (part, suffix) = rest.rsplit_once('.').unwrap_or((rest, ""));
    let part = match part {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        other => other,
    };
    format!("model.layers.{layer}.{part}.{suffix}")
}

/// Tells how far a load has come (0 to 1) and may stop it by an error.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(f32) -> Result<()>;

/// The tensors on their way into a model. Each is taken once; what is left over at the end is an error.
pub(crate) struct Weights<'a> {
    survey: &'a Survey,
    layout: Layout,
    /// Lazily loaded arrays of the safetensors files.
    arrays: HashMap<String, Array>,
    taken: BTreeSet<String>,
    prefix: String,
    /// Which quantised products (packed columns, group size, bits) this device computes rightly.
    kernels: HashMap<(i32, i32, i32), bool>,
    progress: Progress<'a>,
    done: u64,
    total: u64,
}

impl<'a> Weights<'a> {
    pub(crate) fn open(survey: &'a Survey, layout: Layout, progress: Progress<'a>) -> Result<Self> {
        let mut arrays = HashMap::new();
        if !survey.is_gguf {
            for (index, file) in survey.files.iter().enumerate() {
                file.check()?;
                // Reading is the CPU's work on every device: Metal has no load of its own.
                let loaded = mlx_rs::with_stream(&mlx_rs::Stream::cpu(), || Array::load_safetensors(&file.path))
                    .map_err(|error| Error::bad_model(&file.path, "tensors", error))?;
                arrays.extend(loaded.into_iter().filter(|(name, _)| survey.tensors.get(name).is_some_and(|t| t.file == index)));
            }
        }
        let weights = Self {
            survey,
            layout,
            arrays,
            taken: BTreeSet::new(),
            prefix: String::new(),
            kernels: HashMap::new(),
            progress,
            done: 0,
            total: survey.stored_bytes().max(1),
        };
        (weights.progress)(0.0)?;
        Ok(weights)
    }

    /// Chooses the first of `prefixes` under which `probe` exists; later names are relative to it.
    pub(crate) fn set_prefix(&mut self, prefixes: &[&str], probe: &str) -> Result<()> {
        match prefixes.iter().find(|prefix| self.survey.has(&format!("{prefix}{probe}"))) {
            Some(prefix) => {
                self.prefix = (*prefix).to_owned();
                Ok(())
            }
            None => Err(Error::bad_model(self.file(), probe, "is missing")),
        }
    }

    /// Leaves the prefix chosen before, for tensors beside the body (`lm_head`, a classifier).
    pub(crate) fn clear_prefix(&mut self) -> String {
        std::mem::take(&mut self.prefix)
    }

    pub(crate) fn restore_prefix(&mut self, prefix: String) {
        self.prefix = prefix;
    }

    fn file(&self) -> &Path {
        self.survey.files.first().map_or(Path::new("model"), |file| &file.path)
    }

    fn file_of(&self, stored: &Stored) -> &Path {
        self.survey.files.get(stored.file).map_or(Path::new("model"), |file| &file.path)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.survey.has(&format!("{}{name}", self.prefix))
    }

    fn stored(&self, name: &str) -> Result<&'a Stored> {
        self.survey.tensors.get(name).ok_or_else(|| Error::bad_model(self.file(), name, "is missing"))
    }

    fn check_shape(&self, name: &str, stored: &Stored, shape: &[i32]) -> Result<()> {
        if stored.shape == shape {
            return Ok(());
        }
        let what = format_args!("has shape {:?}; the configuration asks for {shape:?}", stored.shape).to_string();
        Err(Error::bad_model(self.file_of(stored), name, what))
    }

    /// A dense tensor of exactly `shape`, in the layout's number type.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[i32]) -> Result<Array> {
        let name = format!("{}{name}", self.prefix);
        let stored = self.stored(&name)?;
        self.check_shape(&name, stored, shape)?;
        let array = match stored.kind {
            StoredKind::Float(_) => self.lazy(&name)?.as_dtype(self.layout.float.mlx())?,
            StoredKind::Gguf(kind) => self.expand(&name, kind, stored)?,
            StoredKind::Packed | StoredKind::Other => {
                return Err(Error::bad_model(self.file_of(stored), &name, "must hold floating-point numbers"));
            }
        };
        self.finish(&name, stored, &[&array])?;
        Ok(array)
    }

    /// The matrix `path.weight`, `[out, in]`, quantised if it is stored so and the layout keeps it.
    pub(crate) fn matrix(&mut self, path: &str, out: i32, input: i32) -> Result<Matrix> {
        let name = format!("{}{path}.weight", self.prefix);
        let stored = self.stored(&name)?;
        match stored.kind {
            StoredKind::Packed => {
                let matrix = self.affine(path, out, input)?;
                self.on_this_device(matrix)
            }
            StoredKind::Gguf(kind) if kind.is_quantized() && !self.layout.dequantize => {
                self.check_shape(&name, stored, &[out, input])?;
                let matrix = blocks::affine(kind, &self.gguf_data(stored)?, out, input, self.layout.float.mlx())?;
                self.finish(&name, stored, &matrix.arrays())?;
                self.on_this_device(matrix)
            }
            _ => Ok(Matrix::Dense(self.tensor(&format!("{path}.weight"), &[out, input])?)),
        }
    }

    /// Expands a quantised matrix whose product this device computes wrongly. MLX's kernels have had silent faults at certain
    /// widths (hazard C11; on CUDA with MLX 0.32.2, rows of 64 in one group), so each combination met is tried once, at load.
    fn on_this_device(&mut self, matrix: Matrix) -> Result<Matrix> {
        let Matrix::Affine { packed, scales, biases, group_size, bits } = &matrix else { return Ok(matrix) };
        let kernel = (packed.dim(1), *group_size, *bits);
        let right = match self.kernels.get(&kernel) {
            Some(right) => *right,
            None => {
                let right = matrix.multiplies_as_expanded()?;
                self.kernels.insert(kernel, right);
                right
            }
        };
        if right {
            return Ok(matrix);
        }
        tracing::warn!(
            columns = kernel.0,
            group_size,
            bits,
            "this device multiplies such a quantised matrix wrongly: it is expanded"
        );
        let dense = ops::dequantize(packed, scales, biases, *group_size, *bits)?;
        transforms::eval([&dense])?;
        Ok(Matrix::Dense(dense))
    }

    fn affine(&mut self, path: &str, out: i32, input: i32) -> Result<Matrix> {
        let name = format!("{}{path}.weight", self.prefix);
        let stored = self.stored(&name)?;
        let Some(Quantization { group_size, bits }) = self.survey.quantization.of(&format!("{}{path}", self.prefix))? else {
            return Err(Error::bad_model(
                self.file_of(stored),
                &name,
                "holds packed integers, but config.json says nothing of its quantization",
            ));
        };
        let columns = i32::try_from(i64::from(input) * i64::from(bits) / 32).unwrap_or(0);
        if input % group_size != 0 || columns == 0 || (i64::from(input) * i64::from(bits)) % 32 != 0 {
            return Err(Error::bad_model(
                self.file_of(stored),
                &name,
                format_args!("{input} columns do not divide into groups of {group_size}"),
            ));
        }
        self.check_shape(&name, stored, &[out, columns])?;
        let packed = self.lazy(&name)?;
        let mut part = |suffix: &str| -> Result<Array> {
            let name = format!("{}{path}.{suffix}", self.prefix);
            let stored = self.stored(&name)?;
            self.check_shape(&name, stored, &[out, input / group_size])?;
            // Expanding needs the full precision of the scale; otherwise it takes the number type of the activations.
            let float = if self.layout.dequantize { Dtype::Float32 } else { self.layout.float.mlx() };
            let array = self.lazy(&name)?.as_dtype(float)?;
            self.finish(&name, stored, &[&array])?;
            Ok(array)
        };
        let (scales, biases) = (part("scales")?, part("biases")?);
        let matrix = if self.layout.dequantize {
            let dense = ops::dequantize(&packed, &scales, &biases, group_size, bits)?;
            Matrix::Dense(dense.as_dtype(self.layout.float.mlx())?)
        } else {
            Matrix::Affine { packed, scales, biases, group_size, bits }
        };
        self.finish(&name, stored, &matrix.arrays()[..1])?;
        Ok(matrix)
    }

    pub(crate) fn linear(&mut self, path: &str, out: i32, input: i32, bias: bool) -> Result<Linear> {
        let weight = self.matrix(path, out, input)?;
        let bias = if bias { Some(self.tensor(&format!("{path}.bias"), &[out])?) } else { None };
        Linear::new(weight, bias)
    }

    pub(crate) fn embedding(&mut self, path: &str, rows: i32, width: i32) -> Result<Embedding> {
        Embedding::new(self.matrix(path, rows, width)?)
    }

    pub(crate) fn rms_norm(&mut self, path: &str, width: i32, eps: f32) -> Result<RmsNorm> {
        Ok(RmsNorm { weight: self.tensor(&format!("{path}.weight"), &[width])?, eps })
    }

    pub(crate) fn layer_norm(&mut self, path: &str, width: i32, eps: f32) -> Result<LayerNorm> {
        // Checkpoints converted from TensorFlow call the two gamma and beta.
        let (weight, bias) = if self.has(&format!("{path}.gamma")) { ("gamma", "beta") } else { ("weight", "bias") };
        Ok(LayerNorm {
            weight: self.tensor(&format!("{path}.{weight}"), &[width])?,
            bias: self.tensor(&format!("{path}.{bias}"), &[width])?,
            eps,
        })
    }

    /// A small vector in host memory (GGUF's `rope_freqs.weight`), if the file has it.
    pub(crate) fn host_vector(&mut self, name: &str, len: i32) -> Result<Option<Vec<f32>>> {
        if !self.survey.has(name) {
            return Ok(None);
        }
        let prefix = self.clear_prefix();
        let array = self.tensor(name, &[len]);
        self.restore_prefix(prefix);
        let array = array?.as_dtype(Dtype::Float32)?;
        array.eval()?;
        array.to_vec_cast::<f32>().map(Some).map_err(|error| Error::internal(format!("{name}: {error}")))
    }

    /// Refuses tensors that no part of the model asked for: they would change its outputs elsewhere. `ignored` are prefixes of
    /// names known to be without effect here.
    pub(crate) fn finish_model(self, ignored: &[&str]) -> Result<()> {
        const HARMLESS: [&str; 3] = ["rotary_emb.inv_freq", "position_ids", "masked_bias"];
        let left = self.survey.tensors.iter().find(|(name, _)| {
            !self.taken.contains(*name)
                && !ignored.iter().any(|prefix| name.starts_with(prefix))
                && !HARMLESS.iter().any(|tail| name.ends_with(tail))
        });
        if let Some((name, stored)) = left {
            return Err(Error::bad_model(
                self.file_of(stored),
                name,
                "is not part of this architecture as config.json describes it",
            ));
        }
        for file in &self.survey.files {
            file.check()?;
        }
        (self.progress)(1.0)
    }

    fn lazy(&mut self, name: &str) -> Result<Array> {
        let stored = self.stored(name)?;
        let array = self.arrays.remove(name).ok_or_else(|| Error::bad_model(self.file(), name, "is missing, or is used twice"))?;
        // What MLX read must be what the header said: everything after this trusts the header.
        if array.shape() != stored.shape || array.nbytes() as u64 != stored.bytes {
            return Err(Error::bad_model(self.file_of(stored), name, "was read with another shape than its header gives"));
        }
        Ok(array)
    }

    /// A GGUF tensor's bytes. Read, not mapped: mapped pages would count as this process's memory beside the arrays made from
    /// them, and a file cut short would be a fault instead of an error.
    fn gguf_data(&self, stored: &Stored) -> Result<Vec<u8>> {
        let path = self.file_of(stored);
        let len =
            usize::try_from(stored.bytes).map_err(|_| Error::bad_model(path, "tensor", "exceeds this machine's address space"))?;
        let mut file = std::fs::File::open(path).map_err(|error| Error::io(path, error))?;
        let mut data = vec![0; len];
        file.seek(SeekFrom::Start(stored.at)).and_then(|_| file.read_exact(&mut data)).map_err(|error| Error::io(path, error))?;
        Ok(data)
    }

    fn expand(&self, name: &str, kind: TensorType, stored: &Stored) -> Result<Array> {
        let data = self.gguf_data(stored)?;
        let array = blocks::dense(kind, &data, &stored.shape).map_err(|what| Error::bad_model(self.file_of(stored), name, what))?;
        Ok(array.as_dtype(self.layout.float.mlx())?)
    }

    /// Evaluates what was taken, so that its bytes are read now and temporaries go at once; refuses numbers that are not finite.
    fn finish(&mut self, name: &str, stored: &Stored, arrays: &[&Array]) -> Result<()> {
        let mut finite = None;
        for array in arrays {
            if matches!(array.dtype(), Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16) {
                let all = array.is_finite()?.all(None)?;
                finite = Some(match finite {
                    Some(before) => ops::logical_and(before, all)?,
                    None => all,
                });
            }
        }
        transforms::eval(arrays.iter().copied().chain(&finite))?;
        if finite.is_some_and(|flag| !flag.item_exact::<bool>()) {
            return Err(Error::bad_model(self.file_of(stored), name, "holds numbers that are not finite"));
        }
        self.taken.insert(name.to_owned());
        self.done += stored.bytes;
        #[allow(clippy::cast_precision_loss)] // a fraction for a progress bar
        (self.progress)((self.done as f32 / self.total as f32).min(0.999))
    }
}
