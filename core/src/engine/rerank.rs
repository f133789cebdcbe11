//! rerank: documents ordered by how well they answer a query, by a cross-encoder or, as an approximation, by an embedder's cosine.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::embed::{encode_texts, normalize};
use super::request::{Link, Place};
use super::residency::{Purpose, Residency, Used};
use super::work::Encoding;
use super::{RequestOptions, Shared, Timings, texts};
use crate::cancel::CancelToken;
use crate::error::{Error, Result};
use crate::model::{ModelKind, Provenance, ScoreHead};
use crate::options::Truncate;
use crate::tokenizer::{self, PairTruncation};

/// A request to rerank.
#[derive(Debug, Clone)]
pub struct RerankRequest {
    /// The model: a reranker, or an embedder (whose score is a cosine).
    pub model: String,
    /// What the documents should answer; not blank.
    pub query: String,
    /// The documents; at least one, none blank.
    pub documents: Vec<String>,
    /// An instruction for rerankers that take one; refused by the others.
    pub instruct: Option<String>,
    /// Keep only the best so many, at least 1; `None` keeps all.
    pub top_n: Option<usize>,
    /// Leave the results in the order of the documents (`top_n` still keeps the best).
    pub unsorted: bool,
    /// What happens to a pair longer than the model takes: refused, or the longer text is cut at its end.
    pub truncate: Truncate,
    /// Cancel, timeout, loading.
    pub options: RequestOptions,
}

impl RerankRequest {
    /// This query and these documents, with the defaults.
    pub fn new(model: impl Into<String>, query: impl Into<String>, documents: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            model: model.into(),
            query: query.into(),
            documents: documents.into_iter().map(Into::into).collect(),
            instruct: None,
            top_n: None,
            unsorted: false,
            truncate: Truncate::default(),
            options: RequestOptions::default(),
        }
    }

    fn check(&self) -> Result<()> {
        if self.query.trim().is_empty() {
            return Err(Error::invalid("the query is blank; give some text"));
        }
        if self.documents.is_empty() {
            return Err(Error::invalid("documents is empty; give at least one"));
        }
        if let Some(index) = self.documents.iter().position(|document| document.trim().is_empty()) {
            return Err(Error::invalid(format!("document {index} is blank; give some text")));
        }
        if self.top_n == Some(0) {
            return Err(Error::invalid("top_n is 0; it must be at least 1"));
        }
        if self.truncate == Truncate::Start {
            return Err(Error::invalid("truncate is start; pairs are cut at the end only"));
        }
        if self.instruct.is_some() {
            return Err(Error::unsupported("this model takes no instruction; leave instruct out"));
        }
        Ok(())
    }
}

/// What a score means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreKind {
    /// A probability, 0 to 1.
    Normalized,
    /// A cosine, -1 to 1: an approximation by an embedder.
    Cosine,
}

/// One document's place.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Ranked {
    /// Which document.
    pub index: usize,
    /// The classifier's raw output (of its positive label); `None` for a cosine.
    pub logit: Option<f32>,
    /// Higher is better; see [`Ranking::score_kind`].
    pub score: f32,
}

/// Documents by score.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranking {
    /// Best first, ties by index, unless the request asked for the input's order.
    pub results: Vec<Ranked>,
    /// What the scores mean.
    pub score_kind: ScoreKind,
    /// Tokens computed.
    pub prompt_tokens: usize,
    /// Tokens cut off, with truncation.
    pub dropped_tokens: usize,
    /// Time by phase; `prefill_s` is the computation.
    pub timings: Timings,
    /// Which model computed it.
    pub provenance: Arc<Provenance>,
}

pub(super) async fn run(shared: &Arc<Shared>, request: RerankRequest) -> Result<Ranking> {
    let began = Instant::now();
    request.check()?;
    let limits = shared.residency.limits();
    limits.check_texts("query", std::slice::from_ref(&request.query))?;
    limits.check_texts("document", &request.documents)?;
    let (link, place) = Link::open(shared, &request.options)?;
    link.carry(compute(link.clone(), place, request, began)).await
}

async fn compute(link: Link, place: Place, request: RerankRequest, began: Instant) -> Result<Ranking> {
    let (residency, token) = (&link.residency, &link.token);
    let (used, encodings) = residency
        .unless_stuck(async {
            let used = residency.acquire(&request.model, Purpose::Rerank, &request.options, token).await?;
            let encodings = encode(residency, &used, request.query, request.documents, request.truncate, token).await?;
            Ok((used, encodings))
        })
        .await?;
    let (spec, provenance, load) = (Arc::clone(&used.model.spec), Arc::clone(&used.model.provenance), used.load);
    let prompt_tokens = encodings.iter().map(tokenizer::Encoding::len).sum();
    let dropped_tokens = encodings.iter().map(|encoding| encoding.dropped).sum();
    let (mut results, score_kind) = if spec.kind == ModelKind::Embedder {
        let mut vectors = texts::compute(&link, (used, place), Encoding::Embed, encodings, |index| match index.checked_sub(1) {
            None => "the query".to_owned(),
            Some(document) => format!("document {document}"),
        })
        .await?;
        vectors.iter_mut().for_each(|vector| normalize(vector));
        let query = vectors.remove(0);
        let cosine = |vector: &Vec<f32>| query.iter().zip(vector).map(|(a, b)| a * b).sum::<f32>().clamp(-1.0, 1.0);
        let results: Vec<_> =
            vectors.iter().enumerate().map(|(index, vector)| Ranked { index, logit: None, score: cosine(vector) }).collect();
        (results, ScoreKind::Cosine)
    } else {
        let logits =
            texts::compute(&link, (used, place), Encoding::Classify, encodings, |index| format!("document {index}")).await?;
        let ranked = logits.iter().enumerate().map(|(index, logits)| ranked(index, logits, spec.score_head));
        (ranked.collect::<Result<Vec<_>>>()?, ScoreKind::Normalized)
    };
    order(&mut results, request.top_n, request.unsorted);
    let timings = Timings::of_answer(began, load, &link);
    Ok(Ranking { results, score_kind, prompt_tokens, dropped_tokens, timings, provenance })
}

/// What the device is given: pairs for a cross-encoder; for an embedder the query, then the documents, each with its own prompt
/// where the model names one.
async fn encode(
    residency: &Arc<Residency>,
    used: &Used,
    query: String,
    documents: Vec<String>,
    truncate: Truncate,
    token: &CancelToken,
) -> Result<Vec<tokenizer::Encoding>> {
    let spec = &used.model.spec;
    if spec.kind != ModelKind::Embedder {
        return encode_pairs(residency, used, query, documents, truncate, token).await;
    }
    let prompt = |name: &str| spec.prompts.get(name).cloned().unwrap_or_default();
    let mut encodings = encode_texts(residency, used, prompt("query"), vec![query], truncate, token).await?;
    encodings.extend(encode_texts(residency, used, prompt("document"), documents, truncate, token).await?);
    Ok(encodings)
}

async fn encode_pairs(
    residency: &Arc<Residency>,
    used: &Used,
    query: String,
    documents: Vec<String>,
    truncate: Truncate,
    token: &CancelToken,
) -> Result<Vec<tokenizer::Encoding>> {
    let (text, limit, cancel) = (used.model.text.clone(), used.model.spec.max_input, token.clone());
    let work = move || {
        let mut encodings = Vec::with_capacity(documents.len());
        for (index, document) in documents.iter().enumerate() {
            cancel.check()?;
            let encoding = text.tokenizer.encode_pair(&query, document, limit, PairTruncation::LongestFirst)?;
            if encoding.dropped > 0 && truncate == Truncate::Error {
                return Err(Error::invalid(format!(
                    "the query and document {index} have {} tokens together and the model takes {limit}; shorten them, or ask for truncation",
                    encoding.len() + encoding.dropped
                )));
            }
            encodings.push(encoding);
        }
        Ok(encodings)
    };
    residency.blocking(token, work).await
}

/// One label: the logit and its sigmoid. Several: the positive label's logit and its softmax (spec 5.2).
fn ranked(index: usize, logits: &[f32], head: ScoreHead) -> Result<Ranked> {
    let (logit, score) = match head {
        ScoreHead::Sigmoid => {
            let logit = *logits.first().ok_or_else(|| Error::internal("a classifier without outputs"))?;
            (logit, 1.0 / (1.0 + (-logit).exp()))
        }
        ScoreHead::Softmax { positive } => {
            let logit = *logits.get(positive).ok_or_else(|| Error::internal("a classifier without its positive label"))?;
            let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = logits.iter().map(|other| (other - highest).exp()).sum();
            (logit, (logit - highest).exp() / sum)
        }
    };
    Ok(Ranked { index, logit: Some(logit), score })
}

/// Best first with ties by index; the best `top_n`; then, if asked, back in the input's order.
fn order(results: &mut Vec<Ranked>, top_n: Option<usize>, unsorted: bool) {
    // A score saturates where the logit does not: it decides first, so that 0.99999 and 0.999999 keep their order.
    let rank = |ranked: &Ranked| ranked.logit.unwrap_or(ranked.score);
    results.sort_by(|a, b| b.score.total_cmp(&a.score).then(rank(b).total_cmp(&rank(a))).then(a.index.cmp(&b.index)));
    if let Some(top) = top_n {
        results.truncate(top);
    }
    if unsorted {
        results.sort_by_key(|ranked| ranked.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(scores: &[f32]) -> Vec<Ranked> {
        scores.iter().enumerate().map(|(index, &score)| Ranked { index, logit: None, score }).collect()
    }

    fn indices(results: &[Ranked]) -> Vec<usize> {
        results.iter().map(|ranked| ranked.index).collect()
    }

    #[test]
    fn ties_keep_the_order_of_the_documents() {
        let mut results = scored(&[0.2, 0.9, 0.2, 0.9]);
        order(&mut results, None, false);
        assert_eq!(indices(&results), [1, 3, 0, 2]);
    }

    #[test]
    fn top_n_keeps_the_best_even_when_unsorted() {
        let mut results = scored(&[0.5, 0.1, 0.9]);
        order(&mut results, Some(2), true);
        assert_eq!(indices(&results), [0, 2]);
    }

    #[test]
    fn a_saturated_score_is_decided_by_its_logit() {
        let mut results: Vec<Ranked> =
            [30.0, 40.0].iter().enumerate().map(|(i, &logit)| ranked(i, &[logit], ScoreHead::Sigmoid).unwrap()).collect();
        assert_eq!(results[0].score, results[1].score);
        order(&mut results, None, false);
        assert_eq!(indices(&results), [1, 0]);
    }

    #[test]
    fn the_sigmoid_is_applied_once() {
        // Hazard J1: a second sigmoid would squeeze every score into 0.5 to 0.731.
        let relevant = ranked(0, &[5.0], ScoreHead::Sigmoid).unwrap();
        let other = ranked(1, &[-5.0], ScoreHead::Sigmoid).unwrap();
        assert!(relevant.score - other.score > 0.98);
    }
}
