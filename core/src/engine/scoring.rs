//! How likely given completions of one prompt are, in steps on the device. The prompt is computed once; each completion goes on from
//! a copy of it.

use super::backend::{Backend, Row, SCORE_CHUNK, Slot};
use super::request::{Link, Place, Reply};
use super::residency::Used;
use super::work::{self, Ending, Request, Task, Tell};
use crate::error::{Error, ErrorKind, Result};
use crate::model::ModelSpec;

/// The log-probabilities of each completion's tokens.
type Scores = Vec<Vec<f32>>;

struct Scoring {
    prompt: Vec<u32>,
    completions: Vec<Vec<u32>>,
    scores: Scores,
    /// The row that holds the prompt without its last token, and how much of it is in.
    prefix: Option<Row>,
    fed: usize,
    /// The row of the completion under way.
    branch: Option<Row>,
    reply: Reply<Scores>,
}

/// Scores completions of `prompt`; none may be empty, and each must fit the context. The use and the place end before this returns,
/// unless the device is stuck.
pub(super) async fn compute(link: &Link, held: (Used, Place), prompt: Vec<u32>, completions: Vec<Vec<u32>>) -> Result<Scores> {
    check(&held.0.model.spec, link, &prompt, &completions)?;
    let (reply, answer) = Reply::new(link, held);
    let (id, scores) = (reply.id(), Scores::new());
    let task = Scoring { prompt, completions, scores, prefix: None, fed: 0, branch: None, reply };
    link.residency.device().add(id, Task::Score(Box::new(task)));
    let scores = link.answer(answer).await?;
    if scores.iter().flatten().any(|score| !score.is_finite()) {
        return Err(Error::new(ErrorKind::Backend, "the model produced log-probabilities that are not finite"));
    }
    Ok(scores)
}

fn check(spec: &ModelSpec, link: &Link, prompt: &[u32], completions: &[Vec<u32>]) -> Result<()> {
    if prompt.is_empty() {
        return Err(Error::invalid("the prompt has no tokens; give some text"));
    }
    if let Some(index) = completions.iter().position(Vec::is_empty) {
        return Err(Error::invalid(format!("completion {index} has no tokens; give some text")));
    }
    let total = prompt.len() + completions.iter().map(Vec::len).max().unwrap_or(0);
    if total > spec.context {
        return Err(Error::invalid(format!(
            "the prompt and the longest completion have {total} tokens and the model's context is {}; shorten them",
            spec.context
        )));
    }
    link.residency.check_cache(spec, total, "shorten the prompt")
}

/// The mean of log-probabilities.
#[allow(clippy::cast_precision_loss)] // a completion is far shorter than 2^52
pub(super) fn mean(logprobs: &[f32]) -> f64 {
    logprobs.iter().map(|&logprob| f64::from(logprob)).sum::<f64>() / logprobs.len() as f64
}

impl Request for Scoring {
    fn slot(&self) -> Slot {
        self.reply.model().slot
    }

    fn interrupted(&self) -> Option<Ending> {
        self.reply.interrupted()
    }

    fn begun(&mut self) {
        self.reply.begun();
    }

    fn account(&self) -> Option<Tell> {
        Some(self.reply.model().account())
    }

    fn finish(self: Box<Self>, ending: Result<Ending>) {
        self.reply.send(ending, self.scores);
    }
}

impl work::Scoring for Scoring {
    fn step(&mut self, backend: &mut dyn Backend) -> Result<Option<Ending>> {
        let (&last, before) = self.prompt.split_last().ok_or_else(|| Error::internal("a scoring without a prompt"))?;
        let prefix = match self.prefix {
            Some(prefix) => prefix,
            None => {
                let (prefix, _) = backend.begin(self.slot(), self.prompt.clone(), false)?;
                self.prefix = Some(prefix);
                prefix
            }
        };
        if self.fed < before.len() {
            let end = (self.fed + SCORE_CHUNK).min(before.len());
            backend.extend(prefix, &before[self.fed..end])?;
            self.fed = end;
            return Ok(None);
        }
        let branch = match self.branch {
            Some(branch) => branch,
            None => {
                let branch = backend.fork(prefix)?;
                self.branch = Some(branch);
                self.scores.push(Vec::new());
                branch
            }
        };
        let at = self.scores.len().saturating_sub(1);
        let (Some(scores), Some(completion)) = (self.scores.last_mut(), self.completions.get(at)) else {
            return Err(Error::internal("a scoring beyond its completions"));
        };
        // Each step is fed what precedes the tokens it scores, so it begins with the last token of the one before.
        let done = scores.len();
        let end = (done + SCORE_CHUNK).min(completion.len());
        let mut ids = vec![if done == 0 { last } else { completion[done - 1] }];
        ids.extend(&completion[done..end]);
        scores.extend(backend.score(branch, &ids)?);
        if end < completion.len() {
            return Ok(None);
        }
        backend.end(branch, false);
        self.branch = None;
        Ok((self.scores.len() == self.completions.len()).then_some(Ending::Stop))
    }

    fn release(&mut self, backend: &mut dyn Backend) {
        for row in [self.branch.take(), self.prefix.take()].into_iter().flatten() {
            backend.end(row, false);
        }
    }
}
