//! Which model is meant, what kind it is, and what its files say: everything that can be known without loading weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::chat_template::ChatTemplate;
use crate::engine::Sizes;
use crate::error::{Error, ErrorKind, Result};
use crate::fake::FakeModel;
use crate::gguf::GgufHeader;
use crate::models::{llama, qwen2, qwen3};
use crate::pool::{Key, Kind};
use crate::tokenizer::Tokenizer;
pub use crate::weights::FloatType;
use crate::weights::{Layout, Survey};

pub(crate) mod config;
mod manifest;
mod pooling;

use config::{BertConfig, DecoderConfig, DecoderDefaults, Fields, labels_of};
pub use manifest::Manifest;
pub(crate) use pooling::Pooling;
pub use pooling::PoolingMode;

/// What a model is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// Generates text.
    Chat,
    /// Turns texts into vectors.
    Embedder,
    /// Scores documents against a query.
    Reranker,
}

impl ModelKind {
    /// `chat`, `embedder` or `reranker`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Embedder => "embedder",
            Self::Reranker => "reranker",
        }
    }
}

/// How a model is to be loaded. Two loads of one model with different options are one entry of the pool: the first one decides.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LoadOptions {
    /// What the model is used as; `None` asks its files.
    pub kind: Option<ModelKind>,
    /// The number type to compute in; `None` takes the files' own, and float32 on a CPU (whose 16-bit arithmetic is slow in MLX).
    pub float: Option<FloatType>,
    /// Expand quantised weights at load; `None` does so on a CPU only, where MLX's quantised products are slower than dense ones.
    pub dequantize: Option<bool>,
    /// How token states become one vector; `None` asks the files.
    pub pooling: Option<PoolingMode>,
    /// What the files must be; checked before they are loaded, and reported with results. A model that is resident already is
    /// served only if it was checked against the same list.
    pub manifest: Option<Arc<Manifest>>,
}

/// Where a result comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// The model's canonical path.
    pub model: String,
    /// `model_type`.
    pub family: String,
    /// The stored quantisation, if any.
    pub quantization: Option<String>,
    /// [`Manifest::digest`] of the list the files were checked against, if they were.
    pub manifest: Option<String>,
    /// Hob's version, the device's kind and its runtime's version.
    pub runtime: String,
}

/// What a model will take, in bytes, before it is loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Estimate {
    /// The weights as they will lie in memory (after expansion, if any).
    pub weights: u64,
    /// Keys and values of one conversation of min(8192, context) tokens.
    pub kv_cache: u64,
    /// Temporaries of the largest step: one prefill chunk, or one batch of an encoder.
    pub working: u64,
}

impl Estimate {
    /// The sum: what the pool charges.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.weights + self.kv_cache + self.working
    }
}

/// The longest conversation an estimate provides for (spec M1).
const ESTIMATE_CONTEXT: u64 = 8192;

/// Where a model's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Location {
    Directory(PathBuf),
    Gguf(PathBuf),
}

impl Location {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Gguf(path) => path,
        }
    }

    /// A directory, a `.gguf` file, or a hub id (`owner/name`, optionally `@revision`) in the local Hugging Face cache.
    pub(crate) fn resolve(reference: &str) -> Result<Self> {
        if reference.is_empty() {
            return Err(Error::invalid("the model reference is empty; give a directory, a .gguf file or a hub id (owner/name)"));
        }
        let path = Path::new(reference);
        if let Ok(path) = path.canonicalize() {
            return if path.is_dir() {
                Ok(Self::Directory(path))
            } else if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
                Ok(Self::Gguf(path))
            } else {
                Err(Error::invalid(format!("{} is neither a directory nor a .gguf file", path.display())))
            };
        }
        let (id, revision) = reference.split_once('@').unwrap_or((reference, "main"));
        let Some((owner, name)) =
            id.split_once('/').filter(|(owner, name)| is_hub_word(owner) && is_hub_word(name) && is_hub_word(revision))
        else {
            return Err(Error::new(ErrorKind::NotFound, format!("{reference}: no such directory or .gguf file")));
        };
        let Some(cache) = hub_cache() else {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("{reference}: no such path, and no Hugging Face cache (HOME is not set)"),
            ));
        };
        let repository = cache.join(format!("models--{owner}--{name}"));
        let commit = std::fs::read_to_string(repository.join("refs").join(revision))
            .map_or_else(|_| revision.to_owned(), |text| text.trim().to_owned());
        let snapshot = repository.join("snapshots").join(&commit);
        if is_hub_word(&commit) && snapshot.is_dir() {
            return Ok(Self::Directory(snapshot));
        }
        Err(Error::new(
            ErrorKind::NotFound,
            format!("{reference}: no such path, and no snapshot in {}; Hob downloads nothing unasked", repository.display()),
        ))
    }
}

/// A word of a hub id: no separators, no `..`, so that joined paths stay inside the cache.
fn is_hub_word(word: &str) -> bool {
    !word.is_empty()
        && !word.starts_with('.')
        && word.len() <= 128
        && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn hub_cache() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_HUB_CACHE")
        .or_else(|| variable("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/huggingface/hub")))
}

/// The graph an architecture builds.
#[derive(Debug)]
pub(crate) enum Graph {
    Decoder { config: DecoderConfig, interleaved: bool, with_head: bool },
    Bert { config: BertConfig, labels: Option<i32> },
}

impl Graph {
    fn vocabulary(&self) -> usize {
        let size = match self {
            Self::Decoder { config, .. } => config.vocabulary,
            Self::Bert { config, .. } => config.vocabulary,
        };
        usize::try_from(size).unwrap_or(0)
    }
}

/// A model on disk, ready to be loaded.
#[derive(Debug)]
pub(crate) struct FilesSource {
    pub(crate) location: Location,
    pub(crate) survey: Survey,
    pub(crate) layout: Layout,
    pub(crate) graph: Graph,
    pub(crate) pooling: Pooling,
}

#[derive(Debug)]
pub(crate) enum SpecSource {
    Files(Box<FilesSource>),
    Fake(FakeModel),
}

/// The text side of a model: tokenizer and chat template. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Text {
    /// Turns text into tokens and back.
    pub tokenizer: Tokenizer,
    /// Renders conversations; `None` when the model has no template.
    pub template: Option<ChatTemplate>,
}

impl Text {
    pub(crate) fn read(spec: &ModelSpec) -> Result<Self> {
        let files = match &spec.source {
            SpecSource::Fake(model) => return crate::fake::text(model),
            SpecSource::Files(files) => files,
        };
        let (tokenizer, template) = match &files.location {
            Location::Directory(dir) => {
                let tokenizer = Tokenizer::from_dir(dir)?;
                let template = ChatTemplate::from_dir(dir, &tokenizer);
                (tokenizer, template)
            }
            Location::Gguf(path) => {
                let header = GgufHeader::open(path)?;
                let tokenizer = Tokenizer::from_gguf(&header)?;
                let template = ChatTemplate::from_gguf(&header, &tokenizer);
                (tokenizer, template)
            }
        };
        match template {
            Ok(template) => Ok(Self { tokenizer, template: Some(template) }),
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(Self { tokenizer, template: None }),
            // A broken template of a model that does not chat is of no interest.
            Err(_) if spec.kind != ModelKind::Chat => Ok(Self { tokenizer, template: None }),
            Err(error) => Err(error),
        }
    }

    /// The template, or an error that says what to do without one.
    pub(crate) fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().ok_or_else(|| {
            let source = self.tokenizer.source().display();
            Error::unsupported(format!(
                "{source}: the model has no chat template; give a raw prompt, or put a chat_template.jinja beside the weights"
            ))
        })
    }
}

/// How a reranker's logits become one score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScoreHead {
    /// One label: `sigmoid(logit)`.
    Sigmoid,
    /// Several labels: the softmax of the positive one.
    Softmax { positive: usize },
}

/// Everything known of a model before its weights are loaded.
#[derive(Debug)]
pub(crate) struct ModelSpec {
    /// The canonical path (or the fake's name): the id of its pool entry.
    pub(crate) id: String,
    pub(crate) kind: ModelKind,
    /// `model_type`.
    pub(crate) family: String,
    /// Logits per token.
    pub(crate) vocabulary: usize,
    /// Tokens the model can attend to.
    pub(crate) context: usize,
    /// Tokens an embedder or reranker accepts per input.
    pub(crate) max_input: usize,
    pub(crate) estimate: Estimate,
    pub(crate) quantization: Option<String>,
    /// Named prefixes for texts, from config_sentence_transformers.json.
    pub(crate) prompts: BTreeMap<String, String>,
    pub(crate) default_prompt: Option<String>,
    pub(crate) score_head: ScoreHead,
    /// What the files must be.
    pub(crate) manifest: Option<Arc<Manifest>>,
    pub(crate) source: SpecSource,
}

impl ModelSpec {
    /// Reads a model's configuration and headers. `on_cpu` decides what [`LoadOptions`] leave open.
    pub(crate) fn read(reference: &str, options: &LoadOptions, on_cpu: bool) -> Result<Self> {
        let location = Location::resolve(reference)?;
        let spec = match &location {
            Location::Directory(dir) => Self::read_directory(dir, location.clone(), options, on_cpu),
            Location::Gguf(path) => Self::read_gguf(&GgufHeader::open(path)?, location.clone(), options, on_cpu),
        };
        spec.map(|spec| Self { manifest: options.manifest.clone(), ..spec })
    }

    /// Checks the files against the manifest, if there is one; `check` may stop it. Reads whole files.
    pub(crate) fn check_files(&self, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        match (&self.manifest, &self.source) {
            (Some(manifest), SpecSource::Files(files)) => {
                let (Location::Directory(path) | Location::Gguf(path)) = &files.location;
                manifest.check(path, check)
            }
            _ => Ok(()),
        }
    }

    fn read_directory(dir: &Path, location: Location, options: &LoadOptions, on_cpu: bool) -> Result<Self> {
        let outer = match Fields::read(&dir.join("config.json")) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Error::new(
                    ErrorKind::BadModel,
                    format!("{}: holds no config.json, so it is not a model directory", dir.display()),
                ));
            }
            other => other?,
        };
        // Multimodal checkpoints nest the language model's configuration.
        let config = match outer.object("text_config")? {
            Some(inner) if inner.map.contains_key("model_type") => inner,
            _ => outer.clone(),
        };
        let Some(family) = config.text("model_type")?.map(str::to_owned) else {
            return Err(config.bad("model_type", "is missing"));
        };
        let survey = Survey::directory(dir, &outer)?;
        let declared = Pooling::read(dir)?;
        let architecture = outer
            .map
            .get("architectures")
            .and_then(|list| list.as_array())
            .and_then(|list| list.last())
            .and_then(|name| name.as_str());
        let classifier = architecture.is_some_and(|name| name.ends_with("ForSequenceClassification"));
        let decoder = decoder_defaults(&family);
        let detected = match (&decoder, family.as_str()) {
            (Some(_), _) if classifier => {
                return Err(Error::unsupported(format!("{family} as a sequence classifier; supported: bert")));
            }
            (Some(_), _) if declared.is_some() => ModelKind::Embedder,
            (Some(_), _) => ModelKind::Chat,
            (None, "bert") if classifier => ModelKind::Reranker,
            (None, "bert") => ModelKind::Embedder,
            (None, other) => {
                return Err(Error::unsupported(format!(
                    "{}: model_type {other:?}; supported: llama, qwen2, qwen3, bert",
                    config.file.display()
                )));
            }
        };
        let kind = stated_kind(options.kind, detected, decoder.is_some(), &family)?;
        let layout = layout(&survey, &config, options, on_cpu)?;
        let mut score_head = ScoreHead::Sigmoid;
        let graph = match &decoder {
            Some(defaults) => {
                let config = DecoderConfig::from_json(&config, defaults)?;
                Graph::Decoder { config, interleaved: false, with_head: kind == ModelKind::Chat }
            }
            None => {
                let bert = BertConfig::from_json(&config)?;
                let labels = if kind == ModelKind::Reranker {
                    let (labels, head) = score_head_of(&config)?;
                    score_head = head;
                    Some(labels)
                } else {
                    None
                };
                Graph::Bert { config: bert, labels }
            }
        };
        let pooling = match (kind, options.pooling, declared) {
            (ModelKind::Embedder, Some(mode), declared) => declared.unwrap_or_default().with_mode(mode),
            (ModelKind::Embedder, None, Some(declared)) => declared,
            (ModelKind::Embedder, None, None) if decoder.is_some() => Pooling::default().with_mode(PoolingMode::LastToken),
            (ModelKind::Embedder, None, None) => {
                return Err(Error::unsupported(format!(
                    "{}: no 1_Pooling/config.json says how to pool, and BERT models differ; state pooling (mean or cls) in the load options",
                    dir.display()
                )));
            }
            _ => Pooling::default(),
        };
        let (context, width) = match &graph {
            Graph::Decoder { config, .. } => (config.context, config.hidden),
            Graph::Bert { config, .. } => (config.context, config.hidden),
        };
        pooling.check_widths(width)?;
        let context = usize::try_from(context).unwrap_or(0);
        let prompts = pooling::Prompts::read(dir)?;
        Ok(Self {
            id: dir.display().to_string(),
            kind,
            family,
            vocabulary: graph.vocabulary(),
            context,
            max_input: pooling::max_input(dir, context)?,
            estimate: estimate(&survey, layout, &graph, kind, pooling.dense_bytes(layout.float)),
            quantization: survey.quantization_name(),
            prompts: prompts.named,
            default_prompt: prompts.default,
            score_head,
            manifest: None,
            source: SpecSource::Files(Box::new(FilesSource { location, survey, layout, graph, pooling })),
        })
    }

    fn read_gguf(header: &GgufHeader, location: Location, options: &LoadOptions, on_cpu: bool) -> Result<Self> {
        let family = header.arch()?.to_owned();
        let Some(defaults) = decoder_defaults(&family) else {
            return Err(Error::unsupported(format!(
                "{}: general.architecture {family:?}; supported in GGUF files: llama, qwen2, qwen3",
                header.path().display()
            )));
        };
        let kind = stated_kind(options.kind, ModelKind::Chat, false, &family)?;
        let config = DecoderConfig::from_gguf(header, &family, &defaults)?;
        let survey = Survey::gguf(header)?;
        let float = options.float.unwrap_or(if on_cpu { FloatType::Float32 } else { FloatType::Float16 });
        let layout = Layout { float, dequantize: options.dequantize.unwrap_or(on_cpu) && survey.is_quantized() };
        let context = usize::try_from(config.context).unwrap_or(0);
        // llama.cpp's converter pairs neighbouring rotary dimensions for llama only.
        let interleaved = family == "llama";
        let graph = Graph::Decoder { config, interleaved, with_head: true };
        Ok(Self {
            id: location.path().display().to_string(),
            kind,
            family,
            vocabulary: graph.vocabulary(),
            context,
            max_input: context,
            estimate: estimate(&survey, layout, &graph, kind, 0),
            quantization: survey.quantization_name(),
            prompts: BTreeMap::new(),
            default_prompt: None,
            score_head: ScoreHead::Sigmoid,
            manifest: None,
            source: SpecSource::Files(Box::new(FilesSource { location, survey, layout, graph, pooling: Pooling::default() })),
        })
    }

    /// Bytes of keys and values of so many tokens; 0 for encoders.
    pub(crate) fn kv_bytes(&self, tokens: usize) -> u64 {
        match &self.source {
            SpecSource::Files(files) => match &files.graph {
                Graph::Decoder { config, .. } => {
                    config.kv_bytes_per_token(files.layout.float.bytes()).saturating_mul(tokens as u64)
                }
                Graph::Bert { .. } => 0,
            },
            SpecSource::Fake(model) => model.kv_bytes_per_token.saturating_mul(tokens as u64),
        }
    }

    /// Whether the model's own modules end in a normalisation.
    pub(crate) fn normalizes(&self) -> bool {
        matches!(&self.source, SpecSource::Files(files) if files.pooling.normalize)
    }

    /// How an embedder pools, as `cls`, `mean`, or several joined by `+`.
    pub(crate) fn pooling_name(&self) -> String {
        match &self.source {
            SpecSource::Files(files) => files.pooling.modes.iter().map(|mode| mode.name()).collect::<Vec<_>>().join("+"),
            SpecSource::Fake(_) => "mean".to_owned(),
        }
    }

    /// The entry's name in the pool: the same files under two kinds are two entries (P2).
    pub(crate) fn key(&self) -> Key {
        let kind = match self.kind {
            ModelKind::Chat => Kind::Chat,
            ModelKind::Embedder => Kind::Embedder,
            ModelKind::Reranker => Kind::Reranker,
        };
        Key::new(kind, self.id.as_str())
    }

    /// The number type and whether quantised weights are expanded; `None` for a fake.
    pub(crate) fn layout(&self) -> Option<Layout> {
        match &self.source {
            SpecSource::Files(files) => Some(files.layout),
            SpecSource::Fake(_) => None,
        }
    }
}

fn decoder_defaults(family: &str) -> Option<DecoderDefaults> {
    match family {
        "llama" => Some(llama::DEFAULTS),
        "qwen2" => Some(qwen2::DEFAULTS),
        "qwen3" => Some(qwen3::DEFAULTS),
        _ => None,
    }
}

fn stated_kind(stated: Option<ModelKind>, detected: ModelKind, decoder: bool, family: &str) -> Result<ModelKind> {
    match stated {
        None => Ok(detected),
        Some(kind) if kind == detected => Ok(kind),
        // A decoder's states can be pooled when the caller says so.
        Some(ModelKind::Embedder) if decoder => Ok(ModelKind::Embedder),
        Some(kind) => Err(Error::unsupported(format!(
            "this {family} model is a {} model and cannot serve as {}",
            detected.name(),
            kind.name()
        ))),
    }
}

fn layout(survey: &Survey, config: &Fields, options: &LoadOptions, on_cpu: bool) -> Result<Layout> {
    let stored = match config.text("torch_dtype")?.or(config.text("dtype")?) {
        Some("float32") => FloatType::Float32,
        Some("float16") => FloatType::Float16,
        _ => survey.stored_float().unwrap_or(FloatType::BFloat16),
    };
    let float = options.float.unwrap_or(if on_cpu { FloatType::Float32 } else { stored });
    Ok(Layout { float, dequantize: options.dequantize.unwrap_or(on_cpu) && survey.is_quantized() })
}

/// How many labels the classifier has, and how they make a score (spec 5.2).
fn score_head_of(config: &Fields) -> Result<(i32, ScoreHead)> {
    const POSITIVE: [&str; 7] = ["entailment", "label1", "positive", "relevant", "relevance", "true", "yes"];
    let labels = match config.size("num_labels", 4096)? {
        Some(n) => labels_of(config)?.filter(|labels| labels.len() == usize::try_from(n).unwrap_or(0)),
        None => labels_of(config)?,
    };
    match labels {
        None => Ok((config.size("num_labels", 4096)?.unwrap_or(1), ScoreHead::Sigmoid)),
        Some(labels) if labels.len() == 1 => Ok((1, ScoreHead::Sigmoid)),
        Some(labels) => match labels.iter().position(|label| POSITIVE.contains(&label.to_ascii_lowercase().as_str())) {
            Some(positive) => Ok((i32::try_from(labels.len()).unwrap_or(0), ScoreHead::Softmax { positive })),
            None => Err(Error::unsupported(format!(
                "{}: id2label names no relevance class among its {} labels; a reranker has one label, or one called {}",
                config.file.display(),
                labels.len(),
                POSITIVE.join(", ")
            ))),
        },
    }
}

fn estimate(survey: &Survey, layout: Layout, graph: &Graph, kind: ModelKind, extra_weights: u64) -> Estimate {
    let width = |n: i32| u64::from(n.unsigned_abs());
    let weights = survey.resident_bytes(layout) + extra_weights;
    let float = layout.float.bytes();
    match graph {
        Graph::Decoder { config, .. } => {
            let context = width(config.context).min(ESTIMATE_CONTEXT);
            // An embedder's batch has up to so many token slots; a conversation goes in by chunks.
            let slots = if kind == ModelKind::Embedder { Sizes::DEFAULT.batch_slots } else { Sizes::DEFAULT.chunk };
            let chunk = if kind == ModelKind::Embedder { slots as u64 } else { context.min(slots as u64) };
            // The widest moment of a layer: residual, normed input, the MLP's two inner products, and one head-by-key score matrix
            // with its softmax where attention is not fused; then the logits of one position.
            let activations = chunk * (3 * width(config.hidden) + 3 * width(config.intermediate)) * float;
            let scores = 2 * width(config.heads) * chunk * context * float;
            let working = activations + scores + 2 * width(config.vocabulary) * 4;
            Estimate { weights, kv_cache: config.kv_bytes_per_token(float) * context, working }
        }
        Graph::Bert { config, .. } => {
            let slots = Sizes::DEFAULT.batch_slots as u64;
            let activations = slots * (4 * width(config.hidden) + 2 * width(config.intermediate)) * float;
            let scores = 2 * width(config.heads) * slots * width(config.context) * float;
            Estimate { weights, kv_cache: 0, working: activations + scores }
        }
    }
}
