//! embed: texts become vectors.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::request::{Link, Place};
use super::residency::{Purpose, Residency, Used};
use super::work::Encoding;
use super::{RequestOptions, Shared, Timings, texts};
use crate::cancel::CancelToken;
use crate::error::{Error, Result};
use crate::model::{ModelSpec, Provenance};
use crate::options::Truncate;
use crate::tokenizer;

/// Whether vectors are scaled to unit length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Normalize {
    /// As the model's own modules say (the default).
    #[default]
    Auto,
    /// Always.
    Yes,
    /// Never.
    No,
}

/// A request to embed.
#[derive(Debug, Clone)]
pub struct EmbedRequest {
    /// The model: a directory or a hub id.
    pub model: String,
    /// The texts; at least one. An empty text is embedded as the special tokens alone, or refused when there are none.
    pub texts: Vec<String>,
    /// Which of the model's prompts to put before each text (`query`, `document`, …); `None` takes the model's default prompt.
    pub prompt_name: Option<String>,
    /// Keep this many leading dimensions (Matryoshka); the rest is cut, then scaled again if vectors are scaled.
    pub dimensions: Option<usize>,
    /// Whether vectors are scaled to unit length.
    pub normalize: Normalize,
    /// What happens to a text longer than the model takes. `Start` is not offered here.
    pub truncate: Truncate,
    /// Cancel, timeout, loading.
    pub options: RequestOptions,
}

impl EmbedRequest {
    /// These texts, with the defaults.
    pub fn new(model: impl Into<String>, texts: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            model: model.into(),
            texts: texts.into_iter().map(Into::into).collect(),
            prompt_name: None,
            dimensions: None,
            normalize: Normalize::default(),
            truncate: Truncate::default(),
            options: RequestOptions::default(),
        }
    }
}

/// Vectors, one row per text in the order given.
#[derive(Debug, Clone, PartialEq)]
pub struct Embeddings {
    /// All rows after one another, `texts x dimensions`, row-major float32.
    pub data: Vec<f32>,
    /// Numbers per row.
    pub dimensions: usize,
    /// How token states were pooled.
    pub pooling: String,
    /// Tokens computed, special ones included.
    pub prompt_tokens: usize,
    /// Tokens cut off, with truncation.
    pub dropped_tokens: usize,
    /// Time by phase; `prefill_s` is the computation.
    pub timings: Timings,
    /// Which model computed it.
    pub provenance: Arc<Provenance>,
}

impl Embeddings {
    /// The rows in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.data.chunks_exact(self.dimensions)
    }
}

pub(super) async fn run(shared: &Arc<Shared>, request: EmbedRequest) -> Result<Embeddings> {
    let began = Instant::now();
    if request.texts.is_empty() {
        return Err(Error::invalid("texts is empty; give at least one text"));
    }
    if request.truncate == Truncate::Start {
        return Err(Error::invalid("truncate is start; embeddings are cut at the end only"));
    }
    if request.dimensions == Some(0) {
        return Err(Error::invalid("dimensions is 0; it must be at least 1"));
    }
    shared.residency.limits().check_texts("text", &request.texts)?;
    let (link, place) = Link::open(shared, &request.options)?;
    link.carry(compute(link.clone(), place, request, began)).await
}

async fn compute(link: Link, place: Place, request: EmbedRequest, began: Instant) -> Result<Embeddings> {
    let (residency, token) = (&link.residency, &link.token);
    let (used, encodings) = residency
        .unless_stuck(async {
            let used = residency.acquire(&request.model, Purpose::Embed, &request.options, token).await?;
            let prompt = prompt_of(&used.model.spec, request.prompt_name.as_deref())?;
            let encodings = encode_texts(residency, &used, prompt, request.texts, request.truncate, token).await?;
            Ok((used, encodings))
        })
        .await?;
    let (spec, provenance, load) = (Arc::clone(&used.model.spec), Arc::clone(&used.model.provenance), used.load);
    let prompt_tokens = encodings.iter().map(tokenizer::Encoding::len).sum();
    let dropped_tokens = encodings.iter().map(|encoding| encoding.dropped).sum();
    let mut vectors = texts::compute(&link, (used, place), Encoding::Embed, encodings, |index| format!("text {index}")).await?;
    let native = vectors.first().map_or(0, Vec::len);
    let dimensions = request.dimensions.unwrap_or(native);
    if dimensions > native {
        return Err(Error::invalid(format!("dimensions is {dimensions}; the model's vectors have {native}")));
    }
    let scale = match request.normalize {
        Normalize::Auto => spec.normalizes(),
        Normalize::Yes => true,
        Normalize::No => false,
    };
    for vector in &mut vectors {
        vector.truncate(dimensions);
        if scale {
            normalize(vector);
        }
    }
    let timings = Timings::of_answer(began, load, &link);
    Ok(Embeddings {
        data: vectors.concat(),
        dimensions,
        pooling: spec.pooling_name(),
        prompt_tokens,
        dropped_tokens,
        timings,
        provenance,
    })
}

fn prompt_of(spec: &ModelSpec, name: Option<&str>) -> Result<String> {
    let name = name.or(spec.default_prompt.as_deref());
    match name {
        None => Ok(String::new()),
        Some(name) => spec.prompts.get(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = spec.prompts.keys().map(String::as_str).collect();
            Error::invalid(format!(
                "the model has no prompt {name:?}; it has: {}",
                if known.is_empty() { "none".to_owned() } else { known.join(", ") }
            ))
        }),
    }
}

/// Tokens of each text with its prompt, cut or refused at the model's input limit.
pub(super) async fn encode_texts(
    residency: &Arc<Residency>,
    used: &Used,
    prompt: String,
    texts: Vec<String>,
    truncate: Truncate,
    token: &CancelToken,
) -> Result<Vec<tokenizer::Encoding>> {
    let (text, spec, cancel) = (used.model.text.clone(), Arc::clone(&used.model.spec), token.clone());
    let work = move || {
        let mut encodings = Vec::with_capacity(texts.len());
        for (index, one) in texts.iter().enumerate() {
            cancel.check()?;
            let encoding = if prompt.is_empty() {
                text.tokenizer.encode_cut(one, spec.max_input)?
            } else {
                text.tokenizer.encode_cut(&format!("{prompt}{one}"), spec.max_input)?
            };
            if encoding.is_empty() {
                return Err(Error::invalid(format!("text {index} has no tokens; give some text")));
            }
            if encoding.dropped > 0 && truncate == Truncate::Error {
                return Err(Error::invalid(format!(
                    "text {index} has {} tokens and the model takes {}; shorten it, or ask for truncation",
                    encoding.len() + encoding.dropped,
                    spec.max_input
                )));
            }
            encodings.push(encoding);
        }
        Ok(encodings)
    };
    residency.blocking(token, work).await
}

/// Scales a vector to unit length; the norm is clamped at 1e-12 (spec 5.3), so a zero vector stays zero.
#[allow(clippy::cast_possible_truncation)] // computed in f64, kept in f32
pub(crate) fn normalize(vector: &mut [f32]) {
    let norm = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt().max(1e-12);
    for x in vector {
        *x = (f64::from(*x) / norm) as f32;
    }
}
