//! How a model marks thoughts and calls in its text.

use serde::{Deserialize, Serialize};

use crate::tokenizer::Tokenizer;

/// How a model writes a call of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` as Hermes and Qwen do, or with Qwen3-Coder's
    /// `<function=name><parameter=key>value</parameter></function>` inside; each call has its own tags.
    Hermes,
    /// `{"name": …, "parameters": {…}}` as the whole answer or behind `<|python_tag|>`, several parted by `;`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call: Mistral.
    Mistral,
}

/// What a model puts around its reasoning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReasoningMarks {
    /// Begins it, such as `<think>`.
    pub open: String,
    /// Ends it, such as `</think>`.
    pub close: String,
}

impl ReasoningMarks {
    /// Marks of one's own.
    pub fn new(open: impl Into<String>, close: impl Into<String>) -> Self {
        Self { open: open.into(), close: close.into() }
    }
}

/// Which marks a model's answers hold. [`ChatTemplate::format`](crate::chat_template::ChatTemplate::format) finds them; a
/// caller who knows better sets the fields. The default marks nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChatFormat {
    /// How calls are written; `None`: calls are not looked for.
    pub tools: Option<ToolFormat>,
    /// What is around reasoning; `None`: it is not told from the answer.
    pub reasoning: Option<ReasoningMarks>,
}

pub(super) const TAG: &str = "<tool_call>";
pub(super) const TAG_END: &str = "</tool_call>";
pub(super) const PYTHON: &str = "<|python_tag|>";
pub(super) const CALLS: &str = "[TOOL_CALLS]";
pub(super) const CALL_ID: &str = "[CALL_ID]";
pub(super) const ARGS: &str = "[ARGS]";

const REASONING: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
];

impl ChatFormat {
    /// What the source of a chat template tells: the marks that it writes for earlier turns, or explains to the model.
    #[must_use]
    pub fn detect(template: &str) -> Self {
        let has = |text: &str| template.contains(text);
        // Inside a string of the template quotes may be escaped.
        let key = |name: &str| has(&format!("\"{name}\"")) || has(&format!("\\\"{name}\\\""));
        let tools = if has(CALLS) {
            Some(ToolFormat::Mistral)
        } else if has(TAG) && has(TAG_END) && !has("<arg_key>") && (key("arguments") || has("<function=")) {
            Some(ToolFormat::Hermes)
        } else if has("<|start_header_id|>") && key("name") && key("parameters") {
            Some(ToolFormat::Llama3)
        } else {
            None
        };
        let reasoning = REASONING.iter().find(|(_, close)| has(close)).map(|(open, close)| ReasoningMarks::new(*open, *close));
        Self { tools, reasoning }
    }

    /// Whether the model begins inside its reasoning, because the prompt ends with the opening mark.
    #[must_use]
    pub fn opens_reasoning(&self, prompt: &str) -> bool {
        self.reasoning.as_ref().is_some_and(|marks| !marks.open.is_empty() && prompt.trim_end().ends_with(&marks.open))
    }

    /// The tokens that are marks: their text must be kept although they are special
    /// ([`Tokenizer::stream_keeping`]). Without `tools` those of calls are not among them.
    #[must_use]
    pub fn kept_tokens(&self, tokenizer: &Tokenizer, tools: bool) -> Vec<u32> {
        let calls: &[&str] = match self.tools.filter(|_| tools) {
            None => &[],
            Some(ToolFormat::Hermes) => &[TAG, TAG_END],
            Some(ToolFormat::Llama3) => &[PYTHON],
            Some(ToolFormat::Mistral) => &[CALLS, CALL_ID, ARGS],
        };
        let reasoning = self.reasoning.iter().flat_map(|marks| [marks.open.as_str(), marks.close.as_str()]);
        calls.iter().copied().chain(reasoning).filter_map(|mark| tokenizer.token_to_id(mark)).collect()
    }
}
