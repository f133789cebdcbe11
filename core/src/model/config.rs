//! What config.json, or a GGUF's metadata, says about an architecture: read once, every number checked against a range.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::gguf::GgufHeader;

/// Sizes above these are taken for damage or hostility: the largest published models stay far below.
const MAX_WIDTH: u64 = 1 << 20;
const MAX_LAYERS: u64 = 4096;
const MAX_CONTEXT: u64 = 1 << 28;
const MAX_VOCABULARY: u64 = 1 << 24;

/// A JSON object of a model's directory, whose getters name the file and the field in their errors.
#[derive(Debug, Clone)]
pub(crate) struct Fields {
    pub(crate) file: PathBuf,
    pub(crate) map: Map<String, Value>,
}

impl Fields {
    /// Reads a JSON object of at most 64 MiB.
    pub(crate) fn read(file: &Path) -> Result<Self> {
        let bytes = read_capped(file, 64 << 20)?;
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Self { file: file.to_owned(), map }),
            Ok(_) => Err(Error::bad_model(file, "top level", "must be a JSON object")),
            Err(error) => Err(Error::bad_model(file, "JSON", error)),
        }
    }

    /// The same, or `None` when the file does not exist.
    pub(crate) fn read_optional(file: &Path) -> Result<Option<Self>> {
        if file.exists() { Self::read(file).map(Some) } else { Ok(None) }
    }

    pub(crate) fn bad(&self, field: &str, what: impl std::fmt::Display) -> Error {
        Error::bad_model(&self.file, field, what)
    }

    /// A nested object under `key`, if there is one.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { file: self.file.clone(), map: map.clone() })),
            Some(_) => Err(self.bad(key, "must be an object")),
        }
    }

    /// A whole number in `1..=max`, if present and not null.
    pub(crate) fn size(&self, key: &str, max: u64) -> Result<Option<i32>> {
        let Some(value) = self.map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        match value.as_u64().filter(|n| (1..=max).contains(n)).and_then(|n| i32::try_from(n).ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(self.bad(key, format_args!("is {}; it must be a whole number from 1 to {max}", short(value)))),
        }
    }

    pub(crate) fn required_size(&self, key: &str, max: u64) -> Result<i32> {
        self.size(key, max)?.ok_or_else(|| self.bad(key, "is missing"))
    }

    /// A finite number, if present and not null.
    #[allow(clippy::cast_possible_truncation)] // configuration numbers are used in f32 arithmetic
    pub(crate) fn number(&self, key: &str) -> Result<Option<f32>> {
        let Some(value) = self.map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        match value.as_f64().map(|n| n as f32).filter(|n| n.is_finite()) {
            Some(n) => Ok(Some(n)),
            None => Err(self.bad(key, format_args!("is {}; it must be a finite number", short(value)))),
        }
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(value) => Err(self.bad(key, format_args!("is {}; it must be true or false", short(value)))),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.bad(key, format_args!("is {}; it must be a string", short(value)))),
        }
    }
}

/// A value fit for an error message.
fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 40 { text.chars().take(40).chain("…".chars()).collect() } else { text }
}

/// The whole of a file that must not be larger than `limit` bytes.
pub(crate) fn read_capped(file: &Path, limit: u64) -> Result<Vec<u8>> {
    let meta = std::fs::metadata(file).map_err(|error| Error::io(file, error))?;
    // Opening a pipe would wait for a writer, and a device has no end.
    if !meta.is_file() {
        return Err(Error::bad_model(file, "file", "is not a regular file"));
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::open(file).and_then(|open| open.take(limit + 1).read_to_end(&mut bytes));
    match read.map_err(|error| Error::io(file, error))? {
        read if read as u64 > limit => {
            Err(Error::bad_model(file, "size", format_args!("is over {limit} bytes, the most that is read")))
        }
        _ => Ok(bytes),
    }
}

/// How positions beyond the trained range are reached.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RopeScaling {
    None,
    Linear {
        factor: f32,
    },
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original: f32,
    },
    Yarn {
        factor: f32,
        beta_fast: f32,
        beta_slow: f32,
        original: f32,
        attention_factor: f32,
        truncate: bool,
    },
    /// Wavelength divisors read from the file itself (GGUF's `rope_freqs.weight`).
    Divisors(Vec<f32>),
}

/// A dense decoder with rotary positions and gated MLP: llama, qwen2, qwen3.
#[derive(Debug, Clone)]
pub(crate) struct DecoderConfig {
    pub(crate) hidden: i32,
    pub(crate) layers: usize,
    pub(crate) intermediate: i32,
    pub(crate) heads: i32,
    pub(crate) kv_heads: i32,
    pub(crate) head_dim: i32,
    pub(crate) vocabulary: i32,
    pub(crate) rms_eps: f32,
    pub(crate) context: i32,
    pub(crate) rope_theta: f32,
    pub(crate) rope_scaling: RopeScaling,
    /// The output projection is the embedding table.
    pub(crate) tied: bool,
    pub(crate) qkv_bias: bool,
    pub(crate) output_bias: bool,
    pub(crate) mlp_bias: bool,
    /// Queries and keys pass an RMS norm per head (qwen3).
    pub(crate) qk_norm: bool,
}

/// What differs between the architectures that share [`DecoderConfig`] when config.json is silent.
pub(crate) struct DecoderDefaults {
    pub(crate) qkv_bias: Option<bool>,
    pub(crate) qk_norm: bool,
    pub(crate) rms_eps: f32,
    pub(crate) head_dim: Option<i32>,
}

impl DecoderConfig {
    pub(crate) fn from_json(config: &Fields, defaults: &DecoderDefaults) -> Result<Self> {
        let hidden = config.required_size("hidden_size", MAX_WIDTH)?;
        let heads = config.required_size("num_attention_heads", MAX_LAYERS)?;
        let kv_heads = config.size("num_key_value_heads", MAX_LAYERS)?.unwrap_or(heads);
        let head_dim = match config.size("head_dim", MAX_WIDTH)?.or(defaults.head_dim) {
            Some(dim) => dim,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(
                    config.bad("num_attention_heads", format_args!("is {heads}, which does not divide hidden_size {hidden}"))
                );
            }
        };
        match config.text("hidden_act")?.or(config.text("hidden_activation")?) {
            None | Some("silu" | "swish") => {}
            Some(other) => {
                return Err(Error::unsupported(format!("{}: hidden_act {other:?}; supported: silu", config.file.display())));
            }
        }
        if config.flag("use_sliding_window", false)? {
            return Err(Error::unsupported(format!("{}: use_sliding_window true; supported: false", config.file.display())));
        }
        let context = config.size("max_position_embeddings", MAX_CONTEXT)?.unwrap_or(2048);
        let (rope_theta, rope_scaling) = rope_from_json(config, context)?;
        let attention_bias = config.flag("attention_bias", false)?;
        let result = Self {
            hidden,
            layers: usize::try_from(config.required_size("num_hidden_layers", MAX_LAYERS)?).unwrap_or(0),
            intermediate: config.required_size("intermediate_size", MAX_WIDTH * 8)?,
            heads,
            kv_heads,
            head_dim,
            vocabulary: config.required_size("vocab_size", MAX_VOCABULARY)?,
            rms_eps: config.number("rms_norm_eps")?.unwrap_or(defaults.rms_eps),
            context,
            rope_theta,
            rope_scaling,
            tied: config.flag("tie_word_embeddings", false)?,
            qkv_bias: defaults.qkv_bias.unwrap_or(attention_bias),
            output_bias: defaults.qkv_bias.is_none() && attention_bias,
            mlp_bias: config.flag("mlp_bias", false)?,
            qk_norm: defaults.qk_norm,
        };
        result.check(&config.file)?;
        Ok(result)
    }

    pub(crate) fn from_gguf(header: &GgufHeader, arch: &str, defaults: &DecoderDefaults) -> Result<Self> {
        let file = header.path();
        let key = |name: &str| format!("{arch}.{name}");
        let size = |name: &str, max: u64| -> Result<Option<i32>> {
            let Some(value) = header.opt_u64(&key(name))? else { return Ok(None) };
            match Some(value).filter(|n| (1..=max).contains(n)).and_then(|n| i32::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => Err(Error::bad_model(file, &key(name), format_args!("is {value}; it must be from 1 to {max}"))),
            }
        };
        let required = |name: &str, max: u64| -> Result<i32> {
            size(name, max)?.ok_or_else(|| Error::bad_model(file, &key(name), "is missing"))
        };
        let hidden = required("embedding_length", MAX_WIDTH)?;
        let heads = required("attention.head_count", MAX_LAYERS)?;
        let head_dim = size("attention.key_length", MAX_WIDTH)?.unwrap_or(hidden / heads);
        if let Some(rotated) = size("rope.dimension_count", MAX_WIDTH)?.filter(|&rotated| rotated != head_dim) {
            return Err(Error::unsupported(format!(
                "{}: {}: {rotated} of {head_dim} dimensions rotate; supported: all of them",
                file.display(),
                key("rope.dimension_count")
            )));
        }
        let context = required("context_length", MAX_CONTEXT)?;
        let vocabulary = match size("vocab_size", MAX_VOCABULARY)? {
            Some(n) => n,
            None => header
                .tensors()
                .get("token_embd.weight")
                .and_then(|tensor| tensor.dims.get(1).copied())
                .and_then(|n| i32::try_from(n).ok())
                .ok_or_else(|| Error::bad_model(file, "token_embd.weight", "is missing"))?,
        };
        let rope_scaling = match header.opt_string(&key("rope.scaling.type"))? {
            None | Some("none") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear {
                factor: header
                    .opt_f32(&key("rope.scaling.factor"))?
                    .ok_or_else(|| Error::bad_model(file, &key("rope.scaling.factor"), "is missing"))?,
            },
            Some(other) => {
                return Err(Error::unsupported(format!(
                    "{}: {} {other:?}; supported: none, linear",
                    file.display(),
                    key("rope.scaling.type")
                )));
            }
        };
        let has = |suffix: &str| header.tensors().contains_key(&format!("blk.0.{suffix}"));
        let result = Self {
            hidden,
            layers: usize::try_from(required("block_count", MAX_LAYERS)?).unwrap_or(0),
            intermediate: required("feed_forward_length", MAX_WIDTH * 8)?,
            heads,
            kv_heads: size("attention.head_count_kv", MAX_LAYERS)?.unwrap_or(heads),
            head_dim,
            vocabulary,
            rms_eps: header.opt_f32(&key("attention.layer_norm_rms_epsilon"))?.unwrap_or(defaults.rms_eps),
            context,
            rope_theta: header.opt_f32(&key("rope.freq_base"))?.unwrap_or(10_000.0),
            rope_scaling,
            tied: !header.tensors().contains_key("output.weight"),
            qkv_bias: has("attn_q.bias"),
            output_bias: has("attn_output.bias"),
            mlp_bias: has("ffn_gate.bias"),
            qk_norm: has("attn_q_norm.weight"),
        };
        result.check(file)?;
        Ok(result)
    }

    fn check(&self, file: &Path) -> Result<()> {
        if self.heads % self.kv_heads != 0 {
            let what = format_args!("is {}, which does not divide num_attention_heads {}", self.kv_heads, self.heads).to_string();
            return Err(Error::bad_model(file, "num_key_value_heads", what));
        }
        if self.head_dim % 2 != 0 {
            return Err(Error::bad_model(
                file,
                "head_dim",
                format_args!("is {}; rotary positions need an even number", self.head_dim),
            ));
        }
        if i64::from(self.heads) * i64::from(self.head_dim) > i64::from(i32::MAX) {
            return Err(Error::bad_model(file, "head_dim", format_args!("{} heads of {} overflow", self.heads, self.head_dim)));
        }
        let sane = |name: &str, value: f32| {
            if value > 0.0 && value.is_finite() {
                Ok(())
            } else {
                Err(Error::bad_model(file, name, format_args!("is {value}; it must be positive")))
            }
        };
        sane("rms_norm_eps", self.rms_eps)?;
        sane("rope_theta", self.rope_theta)
    }

    /// Bytes of keys and values per token, with `element` bytes per number (spec M3).
    pub(crate) fn kv_bytes_per_token(&self, element: u64) -> u64 {
        2 * self.layers as u64 * u64::from(self.kv_heads.unsigned_abs()) * u64::from(self.head_dim.unsigned_abs()) * element
    }
}

/// Reads the rotary base and scaling from both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`.
fn rope_from_json(config: &Fields, context: i32) -> Result<(f32, RopeScaling)> {
    let parameters = config.object("rope_parameters")?;
    let scaling = match &parameters {
        Some(parameters) => Some(parameters.clone()),
        None => config.object("rope_scaling")?,
    };
    let theta = match parameters.as_ref().map(|p| p.number("rope_theta")).transpose()?.flatten() {
        Some(theta) => theta,
        None => config.number("rope_theta")?.unwrap_or(10_000.0),
    };
    let partial = match parameters.as_ref().map(|p| p.number("partial_rotary_factor")).transpose()?.flatten() {
        Some(factor) => Some(factor),
        None => config.number("partial_rotary_factor")?,
    };
    if let Some(factor) = partial.filter(|&factor| (factor - 1.0).abs() > f32::EPSILON) {
        return Err(Error::unsupported(format!("{}: partial_rotary_factor {factor}; supported: 1", config.file.display())));
    }
    let Some(scaling) = scaling else { return Ok((theta, RopeScaling::None)) };
    let kind = scaling.text("rope_type")?.or(scaling.text("type")?).unwrap_or("default").to_owned();
    let positive = |name: &str, default: Option<f32>| -> Result<f32> {
        match scaling.number(name)?.or(default) {
            Some(value) if value > 0.0 => Ok(value),
            Some(value) => Err(scaling.bad(&format!("rope_scaling.{name}"), format_args!("is {value}; it must be positive"))),
            None => Err(scaling.bad(&format!("rope_scaling.{name}"), "is missing")),
        }
    };
    #[allow(clippy::cast_precision_loss)] // a context is far below 2^24
    let trained = context as f32;
    let scaling = match kind.as_str() {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: positive("factor", None)? },
        "llama3" => RopeScaling::Llama3 {
            factor: positive("factor", None)?,
            low_freq_factor: positive("low_freq_factor", None)?,
            high_freq_factor: positive("high_freq_factor", None)?,
            original: positive("original_max_position_embeddings", None)?,
        },
        "yarn" => {
            let original = positive("original_max_position_embeddings", Some(trained))?;
            let factor = positive("factor", Some(trained / original))?;
            // YaRN (Peng et al. 2023) section 3.4, with the two optional terms DeepSeek added.
            let mscale = |scale: f32, weight: f32| if scale <= 1.0 { 1.0 } else { 0.1 * weight * scale.ln() + 1.0 };
            let attention_factor =
                match (scaling.number("attention_factor")?, scaling.number("mscale")?, scaling.number("mscale_all_dim")?) {
                    (Some(_), ..) => positive("attention_factor", None)?,
                    (None, Some(one), Some(all)) if one != 0.0 && all != 0.0 => mscale(factor, one) / mscale(factor, all),
                    _ => mscale(factor, 1.0),
                };
            RopeScaling::Yarn {
                factor,
                beta_fast: positive("beta_fast", Some(32.0))?,
                beta_slow: positive("beta_slow", Some(1.0))?,
                original,
                attention_factor,
                truncate: scaling.flag("truncate", true)?,
            }
        }
        other => {
            return Err(Error::unsupported(format!(
                "{}: rope_scaling type {other:?}; supported: default, linear, llama3, yarn",
                config.file.display()
            )));
        }
    };
    Ok((theta, scaling))
}

/// A BERT encoder.
#[derive(Debug, Clone)]
pub(crate) struct BertConfig {
    pub(crate) hidden: i32,
    pub(crate) layers: usize,
    pub(crate) intermediate: i32,
    pub(crate) heads: i32,
    pub(crate) vocabulary: i32,
    pub(crate) types: i32,
    pub(crate) context: i32,
    pub(crate) layer_norm_eps: f32,
}

impl BertConfig {
    pub(crate) fn from_json(config: &Fields) -> Result<Self> {
        let hidden = config.required_size("hidden_size", MAX_WIDTH)?;
        let heads = config.required_size("num_attention_heads", MAX_LAYERS)?;
        if hidden % heads != 0 {
            return Err(config.bad("num_attention_heads", format_args!("is {heads}, which does not divide hidden_size {hidden}")));
        }
        match config.text("hidden_act")? {
            None | Some("gelu") => {}
            Some(other) => {
                return Err(Error::unsupported(format!("{}: hidden_act {other:?}; supported: gelu", config.file.display())));
            }
        }
        match config.text("position_embedding_type")? {
            None | Some("absolute") => {}
            Some(other) => {
                return Err(Error::unsupported(format!(
                    "{}: position_embedding_type {other:?}; supported: absolute",
                    config.file.display()
                )));
            }
        }
        Ok(Self {
            hidden,
            layers: usize::try_from(config.required_size("num_hidden_layers", MAX_LAYERS)?).unwrap_or(0),
            intermediate: config.required_size("intermediate_size", MAX_WIDTH * 8)?,
            heads,
            vocabulary: config.required_size("vocab_size", MAX_VOCABULARY)?,
            types: config.size("type_vocab_size", MAX_LAYERS)?.unwrap_or(2),
            context: config.required_size("max_position_embeddings", MAX_CONTEXT)?,
            layer_norm_eps: match config.number("layer_norm_eps")?.unwrap_or(1e-12) {
                eps if eps > 0.0 => eps,
                eps => return Err(config.bad("layer_norm_eps", format_args!("is {eps}; it must be positive"))),
            },
        })
    }
}

/// The classifier's labels in order: `id2label`, else `num_labels` nameless ones.
pub(crate) fn labels_of(config: &Fields) -> Result<Option<Vec<String>>> {
    if let Some(table) = config.object("id2label")? {
        let mut labels = Vec::new();
        for (id, label) in &table.map {
            let (Ok(id), Some(label)) = (id.parse::<usize>(), label.as_str()) else {
                return Err(config.bad("id2label", "must map whole numbers to strings"));
            };
            labels.push((id, label.to_owned()));
        }
        labels.sort();
        if labels.iter().enumerate().any(|(index, (id, _))| index != *id) {
            return Err(config.bad("id2label", "must number its labels from 0 without gaps"));
        }
        return Ok(Some(labels.into_iter().map(|(_, label)| label).collect()));
    }
    Ok(config.size("num_labels", MAX_LAYERS)?.map(|n| (0..n).map(|i| format!("LABEL_{i}")).collect()))
}

/// How one tensor is quantised: MLX's affine scheme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quantization {
    pub(crate) group_size: i32,
    pub(crate) bits: i32,
}

/// The `quantization` entry of an MLX checkpoint: a default, and what single layers override (`None`: not quantised).
#[derive(Debug, Clone, Default)]
pub(crate) struct QuantizationTable {
    pub(crate) default: Option<Quantization>,
    pub(crate) overrides: Map<String, Value>,
    file: PathBuf,
}

impl QuantizationTable {
    pub(crate) fn from_json(config: &Fields) -> Result<Self> {
        let Some(table) = config.object("quantization")?.or(config.object("quantization_config")?) else {
            return Ok(Self { file: config.file.clone(), ..Self::default() });
        };
        if let Some(method) = table.text("quant_method")? {
            return Err(Error::unsupported(format!(
                "{}: quantization method {method:?}; supported: MLX's own affine quantization",
                config.file.display()
            )));
        }
        let default = Some(Self::one(&table)?);
        let overrides = table
            .map
            .iter()
            .filter(|(_, value)| value.is_object() || value.is_boolean())
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        Ok(Self { default, overrides, file: config.file.clone() })
    }

    fn one(table: &Fields) -> Result<Quantization> {
        match table.text("mode")? {
            None | Some("affine") => {}
            Some(mode) => {
                return Err(Error::unsupported(format!("{}: quantization mode {mode:?}; supported: affine", table.file.display())));
            }
        }
        let group_size = table.size("group_size", 128)?.unwrap_or(64);
        let bits = table.size("bits", 8)?.unwrap_or(4);
        if ![2, 3, 4, 5, 6, 8].contains(&bits) {
            return Err(Error::unsupported(format!(
                "{}: quantization bits {bits}; supported: 2, 3, 4, 5, 6, 8",
                table.file.display()
            )));
        }
        if ![32, 64, 128].contains(&group_size) {
            return Err(Error::unsupported(format!(
                "{}: quantization group_size {group_size}; supported: 32, 64, 128",
                table.file.display()
            )));
        }
        Ok(Quantization { group_size, bits })
    }

    /// How the layer named `path` (without `.weight`) is quantised when it has scales.
    pub(crate) fn of(&self, path: &str) -> Result<Option<Quantization>> {
        match self.overrides.get(path) {
            Some(Value::Bool(false)) => Ok(None),
            Some(Value::Object(map)) => Self::one(&Fields { file: self.file.clone(), map: map.clone() }).map(Some),
            _ => Ok(self.default),
        }
    }
}
