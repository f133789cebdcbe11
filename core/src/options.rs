//! Options of requests, with their defaults and their checks. Every check happens before any work is queued.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::chat_template::{Content, Message, RenderOptions};
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

/// How much one request may bring. Checked before anything is queued or any model is loaded; a request over a limit is an
/// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) error that names value, limit and field, and never the text.
///
/// The defaults are far above what today's models can read, and keep one hostile request from taking the process's memory.
/// `usize::MAX` lifts a limit. Bytes are of UTF-8. Unknown fields are an error when this is read from JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Bytes of one prompt, and of one conversation with its tools, documents and template variables. Default 16 MiB.
    pub prompt_bytes: usize,
    /// Messages of one conversation. Default 10,000.
    pub messages: usize,
    /// Tools of one request. Default 1,000.
    pub tools: usize,
    /// Bytes of each text to embed, of a query, and of each document to rank. Default 1 MiB.
    pub text_bytes: usize,
    /// Texts of one embed request, documents of one rerank request or conversation, answers of one decision. Default 10,000.
    pub texts: usize,
    /// Bytes of all of them together. Default 64 MiB.
    pub total_bytes: usize,
    /// Stop strings of one request. Default 64, which is also the most there can be.
    pub stops: usize,
    /// Bytes of each stop string. Default 4,096, which is also the most there can be.
    pub stop_bytes: usize,
    /// Bytes of one pending call of a tool in an answer; see
    /// [`ParserOptions::max_call_bytes`](crate::chat_output::ParserOptions). Default 1 MiB.
    pub call_bytes: usize,
    /// The longest timeout a request may ask for; one without a timeout is not affected. Default 24 hours.
    pub timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            prompt_bytes: 16 << 20,
            messages: 10_000,
            tools: 1_000,
            text_bytes: 1 << 20,
            texts: 10_000,
            total_bytes: 64 << 20,
            stops: crate::text_stream::MAX_STOPS,
            stop_bytes: crate::text_stream::MAX_STOP_BYTES,
            call_bytes: crate::chat_output::MAX_CALL_BYTES,
            timeout: Duration::from_secs(24 * 60 * 60),
        }
    }
}

impl Limits {
    /// Checks a prompt given as text.
    pub fn check_prompt(&self, text: &str) -> Result<()> {
        within("the prompt", text.len(), "bytes", self.prompt_bytes, "prompt_bytes")
    }

    /// Checks a conversation and all that goes into its template.
    pub fn check_chat(&self, messages: &[Message], render: &RenderOptions) -> Result<()> {
        let items = |list: &Option<Value>| list.as_ref().and_then(Value::as_array).map_or(0, Vec::len);
        within("the conversation", messages.len(), "messages", self.messages, "messages")?;
        within("the request", items(&render.tools), "tools", self.tools, "tools")?;
        within("the request", items(&render.documents), "documents", self.texts, "texts")?;
        let values = [&render.tools, &render.documents].into_iter().flatten().chain(render.extra.values());
        let bytes = messages.iter().map(message_bytes).chain(values.map(value_bytes)).fold(0, usize::saturating_add);
        within("the conversation", bytes, "bytes", self.prompt_bytes, "prompt_bytes")
    }

    /// Checks texts to embed, a query with its documents, or answers; `what` names one of them, such as `text`.
    pub fn check_texts<S: AsRef<str>>(&self, what: &str, texts: &[S]) -> Result<()> {
        within("the request", texts.len(), &format!("{what}s"), self.texts, "texts")?;
        let mut total = 0_usize;
        for (index, text) in texts.iter().enumerate() {
            let bytes = text.as_ref().len();
            within(&format!("{what} {index}"), bytes, "bytes", self.text_bytes, "text_bytes")?;
            total = total.saturating_add(bytes);
        }
        within(&format!("all {what}s together"), total, "bytes", self.total_bytes, "total_bytes")
    }

    /// Checks stop strings.
    pub fn check_stops<S: AsRef<str>>(&self, stops: &[S]) -> Result<()> {
        within("the request", stops.len(), "stop strings", self.stops, "stops")?;
        let lengths = stops.iter().map(|stop| stop.as_ref().len());
        let mut numbered = lengths.enumerate();
        numbered
            .try_for_each(|(index, bytes)| within(&format!("stop string {index}"), bytes, "bytes", self.stop_bytes, "stop_bytes"))
    }

    /// Checks a request's timeout, which must be above zero.
    pub fn check_timeout(&self, timeout: Option<Duration>) -> Result<()> {
        match timeout {
            Some(Duration::ZERO) => Err(Error::invalid("the timeout is 0 s; give more, or none")),
            Some(timeout) if timeout > self.timeout => Err(Error::invalid(format!(
                "the timeout is {} s; the limit is {} s (Limits::timeout)",
                timeout.as_secs_f64(),
                self.timeout.as_secs_f64()
            ))),
            _ => Ok(()),
        }
    }
}

fn within(what: &str, value: usize, unit: &str, limit: usize, knob: &str) -> Result<()> {
    if value <= limit {
        return Ok(());
    }
    Err(Error::invalid(format!("{what} has {value} {unit}; the limit is {limit} (Limits::{knob})")))
}

fn message_bytes(message: &Message) -> usize {
    let content = match &message.content {
        Content::Text(text) => text.len(),
        Content::Parts(parts) => parts.iter().map(|part| part.kind.len() + part.text.len()).fold(0, usize::saturating_add),
        Content::Null => 0,
    };
    let fields = [&message.name, &message.reasoning_content, &message.tool_call_id].into_iter().flatten().map(String::len);
    let calls = message.tool_calls.iter().map(|call| call.id.len() + call.name.len() + call.arguments.len());
    let extra = message.extra.iter().map(|(key, value)| key.len() + value_bytes(value));
    fields.chain(calls).chain(extra).fold(content.saturating_add(message.role.len()), usize::saturating_add)
}

/// The bytes of all texts and keys of a value; anything else counts as 8.
fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).fold(8, usize::saturating_add),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + value_bytes(value)).fold(8, usize::saturating_add),
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;
    use crate::chat_template::{ContentPart, ToolCall};
    use crate::error::ErrorKind;

    /// The error of `result`, which must name `parts`.
    fn refused(result: Result<()>, parts: &[&str]) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(parts.iter().all(|part| error.message().contains(part)), "{error}");
        assert!(!error.full_message().contains("kumquat"), "{error}");
    }

    #[test]
    fn a_request_at_its_limits_is_taken_and_one_over_them_names_value_limit_and_knob() {
        let limits = Limits {
            prompt_bytes: 7,
            messages: 2,
            tools: 1,
            text_bytes: 7,
            texts: 2,
            total_bytes: 10,
            stops: 2,
            stop_bytes: 7,
            ..Limits::default()
        };
        limits.check_prompt("kumquat").unwrap();
        refused(limits.check_prompt("kumquats"), &["8 bytes", "7", "Limits::prompt_bytes"]);
        limits.check_texts("text", &["kumquat", "kum"]).unwrap();
        limits.check_texts::<&str>("text", &[]).unwrap();
        refused(limits.check_texts("text", &["a", "kumquats"]), &["text 1", "8 bytes", "7", "Limits::text_bytes"]);
        refused(limits.check_texts("document", &["a", "b", "c"]), &["3 documents", "2", "Limits::texts"]);
        refused(limits.check_texts("text", &["kumquat", "kumq"]), &["11 bytes", "10", "Limits::total_bytes"]);
        limits.check_stops(&["kumquat", "b"]).unwrap();
        refused(limits.check_stops(&["a", "b", "c"]), &["3 stop strings", "2", "Limits::stops"]);
        refused(limits.check_stops(&["kumquats"]), &["stop string 0", "8 bytes", "Limits::stop_bytes"]);
        limits.check_timeout(None).unwrap();
        limits.check_timeout(Some(limits.timeout)).unwrap();
        refused(limits.check_timeout(Some(limits.timeout + Duration::from_secs(1))), &["86401 s", "86400 s", "Limits::timeout"]);
        refused(limits.check_timeout(Some(Duration::ZERO)), &["0 s"]);
    }

    /// Wherever a text is put in a conversation, it counts.
    #[test]
    fn every_text_of_a_conversation_counts() {
        let limits = Limits { prompt_bytes: 1000, messages: 2, tools: 1, texts: 1, ..Limits::default() };
        let big = "kumquat ".repeat(126);
        let text = || big.clone();
        let none = RenderOptions::default();
        limits.check_chat(&[Message::user(&big[..900])], &none).unwrap();
        let part = ContentPart { kind: "text".to_owned(), text: text() };
        let call = ToolCall { id: String::new(), name: "f".to_owned(), arguments: text() };
        for message in [
            Message::user(text()),
            Message { content: Content::Parts(vec![part]), ..Message::user("") },
            Message { name: Some(text()), ..Message::user("") },
            Message { reasoning_content: Some(text()), ..Message::user("") },
            Message::tool(text(), ""),
            Message::assistant_calls(vec![call]),
            Message { extra: json!({ "x": [{ "y": big }] }).as_object().unwrap().clone(), ..Message::user("") },
            Message::new(text(), ""),
        ] {
            refused(limits.check_chat(&[message], &none), &["Limits::prompt_bytes", "1000"]);
        }
        let hi = [Message::user("hi")];
        for render in [
            RenderOptions { tools: Some(json!([{ "name": big }])), ..RenderOptions::default() },
            RenderOptions { documents: Some(json!([{ "text": big }])), ..RenderOptions::default() },
            RenderOptions { extra: json!({ "x": big }).as_object().unwrap().clone(), ..RenderOptions::default() },
        ] {
            refused(limits.check_chat(&hi, &render), &["Limits::prompt_bytes", "1000"]);
        }
        refused(limits.check_chat(&vec![Message::user(""); 3], &none), &["3 messages", "2", "Limits::messages"]);
        let two = Some(json!([{}, {}]));
        refused(limits.check_chat(&hi, &RenderOptions { tools: two.clone(), ..none.clone() }), &["2 tools", "Limits::tools"]);
        refused(limits.check_chat(&hi, &RenderOptions { documents: two, ..none }), &["2 documents", "Limits::texts"]);
    }

    #[test]
    fn limits_are_read_from_json() {
        let limits: Limits = serde_json::from_str(r#"{"messages": 5}"#).unwrap();
        assert_eq!(limits, Limits { messages: 5, ..Limits::default() });
        assert!(serde_json::from_str::<Limits>(r#"{"message": 5}"#).is_err());
        assert_eq!(serde_json::from_str::<Limits>(&serde_json::to_string(&limits).unwrap()).unwrap(), limits);
    }
}
