//! decide: which of some given answers a chat model holds most likely, without sampling.
//!
//! Each answer, followed by what ends the assistant's turn, is scored against the same prompt. With `n` tokens of log-probabilities
//! `l`, its mean is `sum(l) / n`, and the answers' probabilities are the softmax of their means (spec M60). They are relative to the
//! answers given and not calibrated.

use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::generate::{Prompt, prompt_tokens};
use super::request::{Link, Place};
use super::residency::Purpose;
use super::{RequestOptions, Shared, Timings, scoring};
use crate::chat_template::{Content, Message, RenderOptions};
use crate::error::{Error, Result};
use crate::model::{Provenance, Text};
use crate::options::Limits;
use crate::tokenizer::EncodeOptions;

/// How answers relate to each other, which is what a confidence depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// One of several things; the confidence says how far the best one stands out.
    #[default]
    Choice,
    /// Levels of one thing, in the order given; the confidence says how close together the likely ones lie, and there is a value.
    Score,
    /// Yes or no: two answers, whose probabilities say all; no confidence.
    Predicate,
}

/// A request to decide.
#[derive(Debug, Clone)]
pub struct DecideRequest {
    /// The model: a directory, a `.gguf` file or a hub id.
    pub model: String,
    /// The question.
    pub prompt: Prompt,
    /// How a conversation is rendered.
    pub render: RenderOptions,
    /// The answers, as the model would write them; at least one, none empty, at most 256.
    pub answers: Vec<String>,
    /// How they relate.
    pub decision: Decision,
    /// Cancel, timeout, loading.
    pub options: RequestOptions,
}

const MAX_ANSWERS: usize = 256;

impl DecideRequest {
    /// One of several answers.
    pub fn choice(
        model: impl Into<String>,
        question: impl Into<Content>,
        answers: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        Self {
            model: model.into(),
            prompt: Prompt::Chat(vec![Message::user(question)]),
            render: RenderOptions::default(),
            answers: answers.into_iter().map(Into::into).collect(),
            decision: Decision::Choice,
            options: RequestOptions::default(),
        }
    }

    /// Levels of one thing, the lowest first.
    pub fn score(
        model: impl Into<String>,
        question: impl Into<Content>,
        levels: impl IntoIterator<Item = impl Into<String>>,
    ) -> Self {
        Self { decision: Decision::Score, ..Self::choice(model, question, levels) }
    }

    /// `true` or `false`, in this order.
    pub fn predicate(model: impl Into<String>, question: impl Into<Content>) -> Self {
        Self { decision: Decision::Predicate, ..Self::choice(model, question, ["true", "false"]) }
    }

    fn check(&self, limits: &Limits) -> Result<()> {
        if self.answers.is_empty() || self.answers.len() > MAX_ANSWERS {
            return Err(Error::invalid(format!("{} answers; give 1 to {MAX_ANSWERS}", self.answers.len())));
        }
        if let Some(index) = self.answers.iter().position(String::is_empty) {
            return Err(Error::invalid(format!("answer {index} is empty; give some text")));
        }
        if self.decision == Decision::Predicate && self.answers.len() != 2 {
            return Err(Error::invalid(format!("{} answers for a predicate; give two", self.answers.len())));
        }
        self.prompt.check(&self.render, limits)?;
        limits.check_texts("answer", &self.answers)
    }
}

/// One answer's likelihood.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Answer {
    /// Which answer.
    pub index: usize,
    /// The mean of its tokens' log-probabilities, what ends the turn included.
    pub mean_logprob: f64,
    /// Its probability among the answers given.
    pub p: f64,
}

/// What a model decided.
#[derive(Debug, Clone, PartialEq)]
pub struct Decided {
    /// The answers in the order given.
    pub answers: Vec<Answer>,
    /// 0 to 1; `None` for a predicate.
    pub confidence: Option<f64>,
    /// The mean level, counted from 0, of a score.
    pub value: Option<f64>,
    /// Tokens computed: the prompt once, and every answer.
    pub prompt_tokens: usize,
    /// Time by phase; `prefill_s` is the computation.
    pub timings: Timings,
    /// Which model computed it.
    pub provenance: Arc<Provenance>,
}

impl Decided {
    /// The index of the likeliest answer, of equal ones the first.
    #[must_use]
    pub fn best(&self) -> usize {
        best(&self.answers)
    }
}

fn best(answers: &[Answer]) -> usize {
    let mut best = 0;
    for answer in answers {
        if answer.p > answers[best].p {
            best = answer.index;
        }
    }
    best
}

pub(super) async fn run(shared: &Arc<Shared>, request: DecideRequest) -> Result<Decided> {
    let began = Instant::now();
    request.check(shared.residency.limits())?;
    let (link, place) = Link::open(shared, &request.options)?;
    link.carry(compute(link.clone(), place, request, began)).await
}

async fn compute(link: Link, place: Place, request: DecideRequest, began: Instant) -> Result<Decided> {
    let (residency, token) = (&link.residency, &link.token);
    let decision = request.decision;
    let (used, prompt, answers) = residency
        .unless_stuck(async {
            let used = residency.acquire(&request.model, Purpose::Score, &request.options, token).await?;
            let text = used.model.text.clone();
            let (prompt, answers) = residency.blocking(token, move || tokens(&text, &request)).await?;
            Ok((used, prompt, answers))
        })
        .await?;
    let (load, provenance) = (used.load, Arc::clone(&used.model.provenance));
    let prompt_tokens = prompt.len() + answers.iter().map(Vec::len).sum::<usize>();
    let scores = scoring::compute(&link, (used, place), prompt, answers).await?;
    let (answers, confidence, value) = weigh(&scores.iter().map(|scores| scoring::mean(scores)).collect::<Vec<_>>(), decision);
    let timings = Timings::of_answer(began, load, &link);
    Ok(Decided { answers, confidence, value, prompt_tokens, timings, provenance })
}

/// The prompt, and each answer with what ends the turn.
fn tokens(text: &Text, request: &DecideRequest) -> Result<(Vec<u32>, Vec<Vec<u32>>)> {
    let prompt = prompt_tokens(text, &request.prompt, &request.render)?;
    let answers = request.answers.iter().map(|answer| {
        if let Prompt::Chat(messages) = &request.prompt
            && let Some(ids) = as_turn(text, messages, &request.render, &prompt, answer)?
        {
            return Ok(ids);
        }
        let mut ids = text.tokenizer.encode(answer, EncodeOptions { add_special: false, parse_special: false })?.ids;
        ids.extend(text.tokenizer.eos_id().or(text.tokenizer.eos_ids().first().copied()));
        Ok(ids)
    });
    let answers = answers.collect::<Result<_>>()?;
    Ok((prompt, answers))
}

/// The answer as the template writes an assistant's turn, through its first stop token; `None` when the template does not write it
/// right after the prompt, as some that reformat a finished turn.
fn as_turn(text: &Text, messages: &[Message], render: &RenderOptions, prompt: &[u32], answer: &str) -> Result<Option<Vec<u32>>> {
    let mut messages = messages.to_vec();
    messages.push(Message::assistant(answer));
    let render = RenderOptions { add_generation_prompt: false, ..render.clone() };
    let Ok(whole) = text.template()?.encode(&messages, &render) else { return Ok(None) };
    let Some(turn) = whole.encoding.ids.strip_prefix(prompt) else { return Ok(None) };
    let Some(end) = turn.iter().position(|id| text.tokenizer.eos_ids().contains(id)) else { return Ok(None) };
    // A turn that is only an end, or that says something else, is not the answer.
    let spoken = text.tokenizer.decode(&turn[..end], true)?;
    Ok((end > 0 && spoken.trim() == answer.trim()).then(|| turn[..=end].to_vec()))
}

/// Probabilities, confidence and value from the means (spec M60 and M61).
#[allow(clippy::cast_precision_loss)] // at most 256 answers
fn weigh(means: &[f64], decision: Decision) -> (Vec<Answer>, Option<f64>, Option<f64>) {
    let highest = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = means.iter().map(|mean| (mean - highest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let answers: Vec<Answer> = means
        .iter()
        .zip(weights)
        .enumerate()
        .map(|(index, (&mean_logprob, weight))| Answer { index, mean_logprob, p: weight / sum })
        .collect();
    let k = answers.len() as f64;
    let likeliest = best(&answers);
    match decision {
        Decision::Predicate => (answers, None, None),
        Decision::Choice => {
            let even = 1.0 / k;
            let confidence = if answers.len() == 1 { 1.0 } else { ((answers[likeliest].p - even) / (1.0 - even)).clamp(0.0, 1.0) };
            (answers, Some(confidence), None)
        }
        Decision::Score => {
            let value = answers.iter().map(|answer| answer.index as f64 * answer.p).sum();
            let spread: f64 = answers.iter().map(|answer| answer.p * (answer.index as f64 - likeliest as f64).abs()).sum();
            // The mean distance from the middle, were all levels as likely.
            let even = (0..answers.len()).map(|index| (index as f64 - (k - 1.0) / 2.0).abs()).sum::<f64>() / k;
            let confidence = if answers.len() == 1 { 1.0 } else { (1.0 - spread / even).max(0.0) };
            (answers, Some(confidence), Some(value))
        }
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp)] // exact by construction
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_the_softmax_of_the_means() {
        let (answers, confidence, value) = weigh(&[-1.0, -1.0 + 3f64.ln()], Decision::Choice);
        assert!((answers[0].p - 0.25).abs() < 1e-12 && (answers[1].p - 0.75).abs() < 1e-12);
        // (0.75 - 1/2) / (1 - 1/2)
        assert!((confidence.unwrap() - 0.5).abs() < 1e-12);
        assert_eq!(value, None);
        assert_eq!(best(&answers), 1);
    }

    #[test]
    fn one_answer_is_certain_and_equal_answers_are_not() {
        for decision in [Decision::Choice, Decision::Score] {
            assert_eq!(weigh(&[-3.0], decision).1, Some(1.0));
        }
        let (answers, confidence, _) = weigh(&[-2.0; 4], Decision::Choice);
        assert_eq!((confidence, best(&answers)), (Some(0.0), 0));
    }

    #[test]
    fn a_score_has_a_mean_level_and_is_sure_when_the_likely_levels_are_near() {
        let sure = [-20.0, -0.1, -20.0];
        let (_, confidence, value) = weigh(&sure, Decision::Score);
        assert!((value.unwrap() - 1.0).abs() < 1e-6 && confidence.unwrap() > 0.999);
        // Both ends alike: value in the middle, and no confidence left.
        let (_, confidence, value) = weigh(&[-1.0, -40.0, -1.0], Decision::Score);
        assert!((value.unwrap() - 1.0).abs() < 1e-6);
        assert_eq!(confidence, Some(0.0));
    }

    #[test]
    fn a_predicate_has_no_confidence() {
        assert_eq!(weigh(&[-1.0, -2.0], Decision::Predicate).1, None);
    }
}
