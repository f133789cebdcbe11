//! What a sentence-transformers directory says beside config.json: modules, pooling, prompts, input length.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::config::Fields;
use crate::engine::mlx::Activation;
use crate::error::{Error, Result};
use crate::weights::FloatType;

/// How token states become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolingMode {
    /// The first token's state.
    Cls,
    /// The largest value per dimension over real tokens.
    Max,
    /// The mean over real tokens.
    Mean,
    /// The last real token's state.
    LastToken,
}

impl PoolingMode {
    /// `cls`, `max`, `mean` or `lasttoken`, as sentence-transformers spells them.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cls => "cls",
            Self::Max => "max",
            Self::Mean => "mean",
            Self::LastToken => "lasttoken",
        }
    }
}

/// A Dense module after pooling.
#[derive(Debug, Clone)]
pub(crate) struct DenseModule {
    pub(crate) dir: PathBuf,
    pub(crate) config: Fields,
    pub(crate) input: i32,
    pub(crate) output: i32,
    pub(crate) bias: bool,
    pub(crate) activation: Activation,
}

/// What happens to token states: pooling (several modes are concatenated), Dense modules, normalisation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pooling {
    pub(crate) modes: Vec<PoolingMode>,
    pub(crate) dense: Vec<DenseModule>,
    pub(crate) normalize: bool,
}

impl Pooling {
    /// Reads modules.json, or a lone 1_Pooling/config.json; `None` when the directory has neither.
    pub(crate) fn read(dir: &Path) -> Result<Option<Self>> {
        let list = dir.join("modules.json");
        if !list.exists() {
            let file = dir.join("1_Pooling/config.json");
            return match Fields::read_optional(&file)? {
                Some(config) => Ok(Some(Self { modes: pooling_modes(&config)?, ..Self::default() })),
                None => Ok(None),
            };
        }
        let bytes = super::config::read_capped(&list, 1 << 20)?;
        let modules: Vec<Module> = serde_json::from_slice(&bytes).map_err(|error| Error::bad_model(&list, "JSON", error))?;
        let mut pooling = Self::default();
        for (index, module) in modules.iter().enumerate() {
            let kind = module.kind.rsplit('.').next().unwrap_or_default();
            if !module.path.is_empty() && !is_plain_folder(&module.path) {
                return Err(Error::bad_model(
                    &list,
                    &format!("[{index}].path"),
                    "must be the name of a folder in the same directory",
                ));
            }
            let sub = dir.join(&module.path);
            match kind {
                "Transformer" if index == 0 => {}
                "Pooling" if pooling.modes.is_empty() => pooling.modes = pooling_modes(&Fields::read(&sub.join("config.json"))?)?,
                "Dense" if !pooling.modes.is_empty() && !pooling.normalize => pooling.dense.push(dense_module(sub)?),
                "Normalize" if !pooling.modes.is_empty() => pooling.normalize = true,
                other => {
                    return Err(Error::unsupported(format!(
                        "{}: module {index} is {other:?}; supported: Transformer, Pooling, Dense, Normalize in this order",
                        list.display()
                    )));
                }
            }
        }
        if pooling.modes.is_empty() {
            return Err(Error::bad_model(&list, "modules", "name no Pooling module"));
        }
        Ok(Some(pooling))
    }

    /// Refuses Dense modules whose widths do not follow from the model's and from one another.
    pub(crate) fn check_widths(&self, hidden: i32) -> Result<()> {
        let modes = i32::try_from(self.modes.len()).unwrap_or(0);
        let mut width = hidden.saturating_mul(modes);
        for dense in &self.dense {
            if dense.input != width {
                let what = format!("is {}; the module before it gives {width} numbers", dense.input);
                return Err(dense.config.bad("in_features", what));
            }
            width = dense.output;
        }
        Ok(())
    }

    pub(crate) fn with_mode(mut self, mode: PoolingMode) -> Self {
        self.modes = vec![mode];
        self
    }

    pub(crate) fn dense_bytes(&self, float: FloatType) -> u64 {
        self.dense
            .iter()
            .map(|dense| u64::from(dense.input.unsigned_abs() + 1) * u64::from(dense.output.unsigned_abs()) * float.bytes())
            .sum()
    }
}

#[derive(Deserialize)]
struct Module {
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

fn is_plain_folder(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name)
}

fn pooling_modes(config: &Fields) -> Result<Vec<PoolingMode>> {
    if !config.flag("include_prompt", true)? {
        return Err(Error::unsupported(format!("{}: include_prompt false; supported: true", config.file.display())));
    }
    // The order of sentence-transformers' concatenation.
    let known = [
        ("pooling_mode_cls_token", "cls", PoolingMode::Cls),
        ("pooling_mode_max_tokens", "max", PoolingMode::Max),
        ("pooling_mode_mean_tokens", "mean", PoolingMode::Mean),
        ("pooling_mode_lasttoken", "lasttoken", PoolingMode::LastToken),
    ];
    // Newer releases write one name, or a list of names.
    let named: Option<Vec<&str>> = match config.map.get("pooling_mode") {
        Some(serde_json::Value::String(name)) => Some(name.split('+').collect()),
        Some(serde_json::Value::Array(names)) => Some(names.iter().filter_map(|name| name.as_str()).collect()),
        _ => None,
    };
    if let Some(names) = named {
        if let Some(name) = names.iter().find(|name| !known.iter().any(|(_, short, _)| short == *name)) {
            return Err(Error::unsupported(format!(
                "{}: pooling_mode {name:?}; supported: cls, max, mean, lasttoken",
                config.file.display()
            )));
        }
        let modes: Vec<_> = known.iter().filter(|(_, short, _)| names.contains(short)).map(|(.., mode)| *mode).collect();
        return Ok(if modes.is_empty() { vec![PoolingMode::Cls] } else { modes });
    }
    for other in ["pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens"] {
        if config.flag(other, false)? {
            return Err(Error::unsupported(format!("{}: {other}; supported: cls, max, mean, lasttoken", config.file.display())));
        }
    }
    let mut modes = Vec::new();
    for (key, _, mode) in known {
        if config.flag(key, false)? {
            modes.push(mode);
        }
    }
    // An explicit file without any flag means the first token (spec 5.3).
    Ok(if modes.is_empty() { vec![PoolingMode::Cls] } else { modes })
}

fn dense_module(dir: PathBuf) -> Result<DenseModule> {
    let config = Fields::read(&dir.join("config.json"))?;
    let activation = match config
        .text("activation_function")?
        .unwrap_or("torch.nn.modules.activation.Tanh")
        .rsplit('.')
        .next()
        .unwrap_or_default()
    {
        "Tanh" => Activation::Tanh,
        "Identity" => Activation::Identity,
        other => {
            return Err(Error::unsupported(format!(
                "{}: activation_function {other:?}; supported: Tanh, Identity",
                config.file.display()
            )));
        }
    };
    let (input, output) = (config.required_size("in_features", 1 << 20)?, config.required_size("out_features", 1 << 20)?);
    Ok(DenseModule { input, output, bias: config.flag("bias", true)?, activation, dir, config })
}

/// Named text prefixes.
#[derive(Debug, Default)]
pub(super) struct Prompts {
    pub(super) named: BTreeMap<String, String>,
    pub(super) default: Option<String>,
}

impl Prompts {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let Some(config) = Fields::read_optional(&dir.join("config_sentence_transformers.json"))? else {
            return Ok(Self::default());
        };
        let mut named = BTreeMap::new();
        if let Some(prompts) = config.object("prompts")? {
            for (name, text) in &prompts.map {
                let Some(text) = text.as_str() else { return Err(config.bad(&format!("prompts.{name}"), "must be a string")) };
                named.insert(name.clone(), text.to_owned());
            }
        }
        let default = config.text("default_prompt_name")?.map(str::to_owned);
        if let Some(name) = default.as_ref().filter(|name| !named.contains_key(*name)) {
            return Err(config.bad("default_prompt_name", format_args!("is {name:?}, which prompts does not define")));
        }
        Ok(Self { named, default })
    }
}

/// Tokens an encoder accepts: sentence_bert_config.json, else the tokenizer's own limit, never above the context.
pub(super) fn max_input(dir: &Path, context: usize) -> Result<usize> {
    if let Some(config) = Fields::read_optional(&dir.join("sentence_bert_config.json"))?
        && let Some(limit) = config.size("max_seq_length", 1 << 28)?
    {
        return Ok(context.min(usize::try_from(limit).unwrap_or(context)));
    }
    // transformers writes 10^30 for "no limit".
    let tokenizer = Fields::read_optional(&dir.join("tokenizer_config.json"))?;
    let limit = tokenizer.and_then(|config| config.map.get("model_max_length").and_then(serde_json::Value::as_u64));
    Ok(limit.and_then(|limit| usize::try_from(limit).ok()).filter(|&limit| limit > 0).map_or(context, |limit| context.min(limit)))
}
