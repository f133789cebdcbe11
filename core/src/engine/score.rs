//! score: how likely a given completion is.

use std::sync::Arc;

use serde::Serialize;

use super::generate::Prompt;
use super::request::{Link, Place};
use super::residency::Purpose;
use super::{RequestOptions, Shared, scoring};
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
    let limits = shared.residency.limits();
    request.prompt.check(&RenderOptions::default(), limits)?;
    limits.check_prompt(&request.completion)?;
    let (link, place) = Link::open(shared, &request.options)?;
    link.carry(compute(link.clone(), place, request)).await
}

async fn compute(link: Link, place: Place, request: ScoreRequest) -> Result<Score> {
    let (residency, token) = (&link.residency, &link.token);
    let (used, prompt, completion) = residency
        .unless_stuck(async {
            let used = residency.acquire(&request.model, Purpose::Score, &request.options, token).await?;
            let text = used.model.text.clone();
            let tokens = move || {
                let prompt = super::generate::prompt_tokens(&text, &request.prompt, &RenderOptions::default())?;
                let plain = EncodeOptions { add_special: false, parse_special: false };
                Ok((prompt, text.tokenizer.encode(&request.completion, plain)?.ids))
            };
            let (prompt, completion) = residency.blocking(token, tokens).await?;
            Ok((used, prompt, completion))
        })
        .await?;
    let mut logprobs = scoring::compute(&link, (used, place), prompt, vec![completion.clone()]).await?;
    let logprobs = logprobs.pop().unwrap_or_default();
    Ok(Score { mean_nll: -scoring::mean(&logprobs), tokens: completion, logprobs })
}
