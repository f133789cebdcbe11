//! Logits to the next token.
//!
//! The order is that of Hugging Face's `generate`: repetition penalty, temperature, `top_k`, `top_p`, `min_p`, each on what the
//! one before left, then a draw from the softmax of the rest. With a temperature below 1e-5 the likeliest token is taken
//! instead (of equal ones the lowest id) and the random numbers are not touched.
//!
//! Random numbers are ChaCha with 12 rounds, so a seed gives the same tokens on every platform; a draw takes one number
//! whatever the logits are. Every sampler has its own state.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::error::{Error, ErrorKind, Result};
use crate::options::SamplingOptions;

/// The log-probability of a chosen token and of the likeliest ones, by the model itself: from logits before any penalty,
/// temperature or cut.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Natural logarithm of the chosen token's probability.
    pub logprob: f32,
    /// The likeliest tokens, the likeliest first; of equal ones the lower id first. Impossible tokens are left out.
    pub top: Vec<(u32, f32)>,
}

/// Chooses tokens for one request.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplingOptions,
    seed: u64,
    rng: ChaCha12Rng,
    vocab: usize,
    /// For each token the draw in which it was last penalised, so that none is penalised twice.
    seen: Vec<u32>,
    round: u32,
    penalized: Vec<f32>,
    candidates: Vec<(u32, f32)>,
    weighted: Vec<(u32, f64)>,
}

impl Sampler {
    /// A sampler for logits of `vocab` tokens.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for options out of range or an empty vocabulary.
    pub fn new(options: &SamplingOptions, vocab: usize) -> Result<Self> {
        options.check()?;
        if vocab == 0 || u32::try_from(vocab).is_err() {
            return Err(Error::invalid(format!("a vocabulary of {vocab} tokens")));
        }
        let seed = match options.seed {
            Some(seed) => seed,
            None => getrandom::u64()
                .map_err(|error| Error::new(ErrorKind::Io, format!("the system has no random numbers ({error}); set a seed")))?,
        };
        Ok(Self {
            options: options.clone(),
            seed,
            rng: ChaCha12Rng::seed_from_u64(seed),
            vocab,
            seen: Vec::new(),
            round: 0,
            penalized: Vec::new(),
            candidates: Vec::new(),
            weighted: Vec::new(),
        })
    }

    /// The seed in use, given or drawn.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The options in use.
    #[must_use]
    pub fn options(&self) -> &SamplingOptions {
        &self.options
    }

    /// Chooses the next token. `recent` are the tokens so far, prompt included; the repetition penalty looks at the last
    /// `repetition_window` of them. `logits` are not changed. Logits of minus infinity are never chosen.
    ///
    /// # Errors
    /// [`Backend`](crate::ErrorKind::Backend) when a logit is NaN or plus infinity or none is finite,
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) when their number is not the vocabulary's.
    pub fn sample(&mut self, logits: &[f32], recent: &[u32]) -> Result<u32> {
        if logits.len() != self.vocab {
            return Err(Error::invalid(format!("{} logits for a vocabulary of {}", logits.len(), self.vocab)));
        }
        let penalty = self.options.repetition_penalty;
        #[allow(clippy::float_cmp)]
        if penalty == 1.0 {
            return self.choose(logits);
        }
        let window = match self.options.repetition_window as usize {
            0 => recent,
            window => &recent[recent.len().saturating_sub(window)..],
        };
        let mut penalized = std::mem::take(&mut self.penalized);
        penalized.clear();
        penalized.extend_from_slice(logits);
        self.seen.resize(self.vocab, 0);
        self.round = self.round.wrapping_add(1);
        if self.round == 0 {
            self.seen.fill(0);
            self.round = 1;
        }
        for token in window {
            let token = *token as usize;
            if let Some(seen) = self.seen.get_mut(token)
                && *seen != self.round
            {
                *seen = self.round;
                let logit = &mut penalized[token];
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        let chosen = self.choose(&penalized);
        self.penalized = penalized;
        chosen
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let (best, max) = likeliest(logits)?;
        if self.options.is_greedy() {
            return Ok(best);
        }
        let draw = self.uniform();
        let scale = 1.0 / f64::from(self.options.temperature);
        let SamplingOptions { top_k, top_p, min_p, .. } = self.options;
        let top_k = if top_k == 0 { logits.len() } else { top_k as usize };
        if top_k == 1 {
            return Ok(best);
        }
        // Relative to the likeliest token, which no cut drops.
        let weight = |logit: f32| (f64::from(logit - max) * scale).exp();
        self.weighted.clear();
        if top_k < logits.len() {
            keep_top_k(logits, top_k, &mut self.candidates);
            self.weighted.extend(self.candidates.iter().map(|(id, logit)| (*id, weight(*logit))));
        } else {
            self.weighted.extend((0_u32..).zip(logits).map(|(id, logit)| (id, weight(*logit))));
        }
        if top_p < 1.0 {
            keep_top_p(&mut self.weighted, f64::from(top_p));
        }
        if min_p > 0.0 {
            let least = f64::from(min_p);
            self.weighted.retain(|(_, weight)| *weight >= least);
        }
        // A draw runs in the order of ids, so that it does not depend on how the cuts left them.
        if top_k < logits.len() || top_p < 1.0 {
            self.weighted.sort_unstable_by_key(|(id, _)| *id);
        }
        Ok(draw_from(&self.weighted, draw).unwrap_or(best))
    }

    /// A number in [0, 1) of 53 random bits.
    fn uniform(&mut self) -> f64 {
        #[allow(clippy::cast_precision_loss)]
        let number = (self.rng.next_u64() >> 11) as f64;
        number / (1_u64 << 53) as f64
    }
}

/// The likeliest token and its logit, of equal ones the first.
fn likeliest(logits: &[f32]) -> Result<(u32, f32)> {
    let mut best = (0_u32, f32::NEG_INFINITY);
    let mut bad = false;
    for (id, logit) in (0_u32..).zip(logits) {
        bad |= logit.is_nan();
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    if bad || !best.1.is_finite() {
        let what = if bad { "a logit is not a number" } else { "no logit is finite, or one is infinite" };
        return Err(Error::new(ErrorKind::Backend, format!("{what}; the model's computation went wrong")));
    }
    Ok(best)
}

/// Puts the `count` likeliest tokens into `kept`, in no order; of equal ones the lower ids.
fn keep_top_k(logits: &[f32], count: usize, kept: &mut Vec<(u32, f32)>) {
    kept.clear();
    let likelier = |a: &(u32, f32), b: &(u32, f32)| descending(a.1, b.1).then(a.0.cmp(&b.0));
    let all = (0_u32..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > f32::NEG_INFINITY);
    if count > 128 {
        kept.extend(all);
        if count < kept.len() {
            kept.select_nth_unstable_by(count - 1, likelier);
            kept.truncate(count);
        }
        return;
    }
    // Few are kept in order; most tokens are turned away by one comparison.
    for token in all {
        if kept.len() == count {
            match kept.last() {
                Some(last) if token.1 > last.1 => drop(kept.pop()),
                _ => continue,
            }
        }
        let at = kept.partition_point(|other| other.1 >= token.1);
        kept.insert(at, token);
    }
}

/// Keeps the fewest of the likeliest tokens whose weights sum to at least `top_p` of all.
fn keep_top_p(weighted: &mut Vec<(u32, f64)>, top_p: f64) {
    let heavier = |a: &(u32, f64), b: &(u32, f64)| b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal).then(a.0.cmp(&b.0));
    let wanted = top_p * weighted.iter().map(|(_, weight)| weight).sum::<f64>();
    // All before `start` are kept and weigh `sum`; the last one to keep lies between `start` and `end`, in halving steps.
    let (mut start, mut end, mut sum) = (0, weighted.len(), 0.0);
    while end - start > 1 {
        let half = (end - start) / 2;
        weighted[start..end].select_nth_unstable_by(half, heavier);
        let upper: f64 = weighted[start..start + half].iter().map(|(_, weight)| weight).sum();
        if sum + upper >= wanted {
            end = start + half;
        } else {
            sum += upper;
            start += half;
        }
    }
    weighted.truncate(start + 1);
}

/// Descending order of numbers that are not NaN.
fn descending(a: f32, b: f32) -> std::cmp::Ordering {
    b.partial_cmp(&a).unwrap_or(std::cmp::Ordering::Equal)
}

/// The token that `draw` (in [0, 1)) falls on; `None` when the weights sum to nothing.
fn draw_from(weighted: &[(u32, f64)], draw: f64) -> Option<u32> {
    let target = draw * weighted.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut sum = 0.0;
    let mut last = None;
    for (id, weight) in weighted {
        if *weight > 0.0 {
            sum += weight;
            last = Some(*id);
            if sum > target {
                break;
            }
        }
    }
    last
}

/// The log-probabilities of `chosen` and of the `count` likeliest tokens, from a model's own logits.
///
/// # Errors
/// [`Backend`](crate::ErrorKind::Backend) as for [`Sampler::sample`], [`InvalidArgument`](crate::ErrorKind::InvalidArgument)
/// when `chosen` is not a token.
pub fn logprobs(logits: &[f32], chosen: u32, count: usize) -> Result<TokenLogprobs> {
    let (_, max) = likeliest(logits)?;
    let Some(logit) = logits.get(chosen as usize) else {
        return Err(Error::invalid(format!("token {chosen} of a vocabulary of {}", logits.len())));
    };
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let log_sum = sum.ln();
    #[allow(clippy::cast_possible_truncation)]
    let logprob = |logit: f32| (f64::from(logit - max) - log_sum) as f32;
    let mut top = Vec::new();
    keep_top_k(logits, count.min(logits.len()), &mut top);
    top.sort_unstable_by(|a, b| descending(a.1, b.1).then(a.0.cmp(&b.0)));
    let top = top.into_iter().map(|(id, logit)| (id, logprob(logit))).collect();
    Ok(TokenLogprobs { logprob: logprob(*logit), top })
}

#[cfg(test)]
mod tests;
