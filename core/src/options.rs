//! Options of requests, with their defaults and their checks. Every check happens before any work is queued.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How the next token is chosen. The default is greedy. Unknown fields are an error when this is read from JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingOptions {
    /// Softmax temperature, 0 to 100. 0 (the default), and anything below 1e-5, is greedy: the seed has no effect then.
    pub temperature: f32,
    /// Keep only the `top_k` most likely tokens; 0 (the default) keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities sum to at least `top_p`, in (0, 1]; 1 (the default) keeps all.
    pub top_p: f32,
    /// Keep tokens at least `min_p` times as likely as the likeliest, in [0, 1]; 0 (the default) keeps all.
    pub min_p: f32,
    /// Divide positive (multiply negative) logits of tokens already seen by this factor, in (0, 10]; 1 (the default) is off.
    pub repetition_penalty: f32,
    /// How many of the latest tokens (prompt included) the penalty looks at; 0 means all. Default 64.
    pub repetition_window: u32,
    /// Seed of the random numbers; `None` (the default) draws one. The seed used is reported with the result.
    pub seed: Option<u64>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, repetition_window: 64, seed: None }
    }
}

impl SamplingOptions {
    /// Reads options from JSON; an unknown field is an [`InvalidArgument`](crate::ErrorKind::InvalidArgument) error that names it.
    pub fn from_json(text: &str) -> Result<Self> {
        let options: Self = serde_json::from_str(text).map_err(|error| Error::invalid(format!("sampling options: {error}")))?;
        options.check()?;
        Ok(options)
    }

    /// Whether the likeliest token is always taken.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < 1e-5
    }

    /// Refuses values out of range, naming the value and the range.
    pub fn check(&self) -> Result<()> {
        fn within(name: &str, value: f32, range: &str, ok: bool) -> Result<()> {
            if ok { Ok(()) } else { Err(Error::invalid(format!("{name} is {value}; it must be in {range}"))) }
        }
        within("temperature", self.temperature, "[0, 100]", (0.0..=100.0).contains(&self.temperature))?;
        within("top_p", self.top_p, "(0, 1]", self.top_p > 0.0 && self.top_p <= 1.0)?;
        within("min_p", self.min_p, "[0, 1]", (0.0..=1.0).contains(&self.min_p))?;
        within(
            "repetition_penalty",
            self.repetition_penalty,
            "(0, 10]",
            self.repetition_penalty > 0.0 && self.repetition_penalty <= 10.0,
        )
    }
}

/// What to do with a text that is longer than the model (or the request) allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncate {
    /// Refuse with both numbers (the default).
    #[default]
    Error,
    /// Cut at the end and report how many tokens were dropped.
    End,
    /// Cut at the start and report how many tokens were dropped. For prompts only.
    Start,
}
