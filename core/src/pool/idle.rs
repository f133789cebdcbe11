//! Idle residency: how long a model stays after its last use. A value with its JSON, and the timer's decision as a pure function.

use std::fmt;
use std::time::{Duration, Instant};

use serde::de::{Deserialize, Deserializer};
use serde::ser::{Serialize, SerializeStruct, Serializer};

/// The shortest time a model can be kept by `after_seconds`.
pub const MIN_IDLE_SECONDS: u32 = 30;
/// The longest time a model can be kept by `after_seconds`: one day.
pub const MAX_IDLE_SECONDS: u32 = 86_400;
/// The default policy's time.
pub const DEFAULT_IDLE_SECONDS: u32 = 900;

/// When an idle model is unloaded.
///
/// The countdown starts when the last lease ends (or at the load, for a model nobody has used yet), never at admission or at
/// the first token. In JSON: `{"mode":"immediately"}`, `{"mode":"after_seconds","seconds":900}`, `{"mode":"never"}`. Reading
/// never fails: seconds are clamped to 30..=86400, 0 seconds means `immediately`, anything malformed means the default, 900 s.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdlePolicy {
    /// As soon as the last lease ends. A model that was loaded ahead of its first use waits for that use.
    Immediately,
    /// After this many seconds, clamped to 30..=86400 wherever it is used or written; 0 behaves as `Immediately`.
    AfterSeconds(u32),
    /// Only by eviction, explicit or for room.
    Never,
}

impl Default for IdlePolicy {
    fn default() -> Self {
        Self::AfterSeconds(DEFAULT_IDLE_SECONDS)
    }
}

impl IdlePolicy {
    /// The policy in its canonical form: seconds clamped, 0 seconds turned into `Immediately`.
    #[must_use]
    pub fn normalized(self) -> Self {
        match self {
            Self::AfterSeconds(0) => Self::Immediately,
            Self::AfterSeconds(seconds) => Self::AfterSeconds(seconds.clamp(MIN_IDLE_SECONDS, MAX_IDLE_SECONDS)),
            other => other,
        }
    }

    /// The policy for a number of seconds, canonical. What a host's slider produces.
    #[must_use]
    pub fn after_seconds(seconds: u32) -> Self {
        Self::AfterSeconds(seconds).normalized()
    }

    /// How long an idle model stays; `None` for `Never`, zero for `Immediately`.
    #[must_use]
    pub fn ttl(self) -> Option<Duration> {
        match self.normalized() {
            Self::Immediately => Some(Duration::ZERO),
            Self::AfterSeconds(seconds) => Some(Duration::from_secs(seconds.into())),
            Self::Never => None,
        }
    }

    /// Reads the JSON form; whatever is not a policy is the default.
    #[must_use]
    pub fn from_json(text: &str) -> Self {
        serde_json::from_str(text).unwrap_or_default()
    }

    /// The JSON form, canonical.
    #[must_use]
    pub fn to_json(self) -> String {
        match self.normalized() {
            Self::Immediately => r#"{"mode":"immediately"}"#.to_owned(),
            Self::AfterSeconds(seconds) => format!(r#"{{"mode":"after_seconds","seconds":{seconds}}}"#),
            Self::Never => r#"{"mode":"never"}"#.to_owned(),
        }
    }
}

impl fmt::Display for IdlePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.normalized() {
            Self::Immediately => f.write_str("immediately"),
            Self::AfterSeconds(seconds) => write!(f, "after {seconds} s"),
            Self::Never => f.write_str("never"),
        }
    }
}

impl Serialize for IdlePolicy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (mode, seconds) = match self.normalized() {
            Self::Immediately => ("immediately", None),
            Self::AfterSeconds(seconds) => ("after_seconds", Some(seconds)),
            Self::Never => ("never", None),
        };
        let mut fields = serializer.serialize_struct("IdlePolicy", 1 + usize::from(seconds.is_some()))?;
        fields.serialize_field("mode", mode)?;
        if let Some(seconds) = seconds {
            fields.serialize_field("seconds", &seconds)?;
        }
        fields.end()
    }
}

impl<'de> Deserialize<'de> for IdlePolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Through a JSON value, because a field of the wrong type must fall back and not fail.
        let value = serde_json::Value::deserialize(deserializer)?;
        Ok(from_value(&value).unwrap_or_default())
    }
}

fn from_value(value: &serde_json::Value) -> Option<IdlePolicy> {
    match value.get("mode")?.as_str()? {
        "immediately" => Some(IdlePolicy::Immediately),
        "never" => Some(IdlePolicy::Never),
        "after_seconds" => {
            let seconds = value.get("seconds")?;
            let seconds = match seconds.as_u64() {
                Some(whole) => whole,
                // JavaScript and Swift write 900.0; a fraction of a second has no meaning here and is cut.
                None => {
                    let number = seconds.as_f64().filter(|number| number.is_finite() && *number >= 0.0)?;
                    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // within 0..=86400 by then
                    {
                        number.min(f64::from(MAX_IDLE_SECONDS)).trunc() as u64
                    }
                }
            };
            Some(IdlePolicy::after_seconds(u32::try_from(seconds).unwrap_or(u32::MAX)))
        }
        _ => None,
    }
}

/// What the timer needs to know of an entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IdleView {
    /// The policy that rules the present countdown.
    pub(crate) policy: IdlePolicy,
    /// The last end of a use, or the load.
    pub(crate) since: Instant,
    /// Whether anybody has used the model since it was loaded.
    pub(crate) ever_used: bool,
    /// A deadline brought forward by `accelerate_idle`, valid for this countdown only.
    pub(crate) accelerated: Option<Instant>,
    /// Leases now.
    pub(crate) uses: u64,
    /// Pinned entries are never unloaded for idleness.
    pub(crate) pinned: bool,
}

/// The moment after which the entry is unloaded for idleness (strictly after: P19), or `None` while no countdown runs.
pub(crate) fn unload_at(view: &IdleView) -> Option<Instant> {
    if view.uses > 0 || view.pinned {
        return None;
    }
    let policy = view.policy.normalized();
    if policy == IdlePolicy::Immediately && !view.ever_used {
        return None;
    }
    let own = view.since.checked_add(policy.ttl()?)?;
    Some(view.accelerated.map_or(own, |sooner| own.min(sooner)))
}

/// Whether the entry must go now. `immediately` goes at once; a countdown must have passed, strictly.
pub(crate) fn is_due(view: &IdleView, now: Instant) -> bool {
    match unload_at(view) {
        Some(_) if view.policy.normalized() == IdlePolicy::Immediately => true,
        Some(at) => now > at,
        None => false,
    }
}
