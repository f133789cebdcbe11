//! score: how likely a given completion is.

use std::sync::Arc;

use serde::Serialize;

use super::generate::Prompt;
use super::residency::Purpose;
use super::{RequestOptions, Shared};
use crate::chat_template::RenderOptions;
use crate::error::{Error, Result};
use crate::tokenizer::EncodeOptions;

/// A request to score a completion.
#[derive(Debug, Clone)]
pub struct ScoreRequest {
    /// The model: a directory, a `.gguf` file or a hub id.
    pub model: String,
    /// What comes before the completion.
    pub prompt: Prompt,
    /// The text whose likelihood is asked for; not empty. It is taken as ordinary text, without special tokens.
    pub completion: String,
    /// Cancel, timeout, loading.
    pub options: RequestOptions,
}

impl ScoreRequest {
    /// A prompt and a completion, with the defaults.
    pub fn new(model: impl Into<String>, prompt: Prompt, completion: impl Into<String>) -> Self {
        Self { model: model.into(), prompt, completion: completion.into(), options: RequestOptions::default() }
    }
}

/// Log-probabilities of a completion's tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// The completion's token ids.
    pub tokens: Vec<u32>,
    /// The natural logarithm of each token's probability, given all before it.
    pub logprobs: Vec<f32>,
    /// Minus the mean of `logprobs`.
    pub mean_nll: f64,
}

pub(super) async fn run(shared: &Arc<Shared>, request: ScoreRequest) -> Result<Score> {
    if request.completion.is_empty() {
        return Err(Error::invalid("the completion is empty; give some text"));
    }
    let residency = &shared.residency;
    let token = request.options.token(&shared.alive);
    let used = residency.acquire(&request.model, Purpose::Score, &request.options, &token).await?;
    let spec = Arc::clone(&used.model.spec);
    let text = used.model.text.clone();
    let tokens = move || {
        let prompt = super::generate::prompt_tokens(&text, &request.prompt, &RenderOptions::default())?;
        let plain = EncodeOptions { add_special: false, parse_special: false };
        Ok((prompt, text.tokenizer.encode(&request.completion, plain)?.ids))
    };
    let (prompt, completion) = residency.blocking(&token, tokens).await?;
    if prompt.is_empty() || completion.is_empty() {
        return Err(Error::invalid("the prompt and the completion must each have at least one token"));
    }
    let total = prompt.len() + completion.len();
    if total > spec.context {
        return Err(Error::invalid(format!(
            "the prompt and the completion have {total} tokens and the model's context is {}; shorten them",
            spec.context
        )));
    }
    let ids: Vec<u32> = prompt.iter().chain(&completion).copied().collect();
    let (slot, from, model, cancel) = (used.model.slot, prompt.len(), Arc::clone(&used.model), token.clone());
    let work = residency.device().call("scoring", move |backend| {
        let scores = backend.score(slot, &ids, from, &mut || cancel.check());
        drop(model);
        scores
    });
    let logprobs = tokio::select! {
        scores = work => scores?,
        _ = token.cancelled() => return Err(residency.interrupted(&token)),
    };
    #[allow(clippy::cast_precision_loss)] // a completion is far shorter than 2^52
    let mean_nll = -logprobs.iter().map(|&logprob| f64::from(logprob)).sum::<f64>() / logprobs.len() as f64;
    if !mean_nll.is_finite() {
        return Err(Error::new(crate::ErrorKind::Backend, "the model produced log-probabilities that are not finite"));
    }
    Ok(Score { tokens: completion, logprobs, mean_nll })
}
