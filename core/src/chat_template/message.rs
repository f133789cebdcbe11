//! What a conversation is made of: messages, the calls in them, and the tools a request offers.

use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// What a message says: a text, or a list of parts that are all text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// One text.
    Text(String),
    /// Parts in the style of other APIs: `[{"type": "text", "text": "…"}]`. They render as one text.
    Parts(Vec<ContentPart>),
    /// Nothing said (null or missing). It renders as an empty text, except in an assistant's message with calls, where the
    /// template gets a null as long as it can do with one.
    #[default]
    Null,
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContentPart {
    /// What the part is; only `text` is supported.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its text.
    #[serde(default)]
    pub text: String,
}

/// A call of a tool, as a model made it ([`ChatEvent::ToolCall`](crate::chat_output::ChatEvent)) and as an assistant's
/// message repeats it.
///
/// Its JSON is OpenAI's: `{"id": …, "type": "function", "function": {"name": …, "arguments": "{…}"}}`. Also read: arguments
/// given as an object, and the bare `{"name": …, "arguments": …}`. Other fields are an error, but for `index`, which streams
/// put into calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Which call this is; the tool's message names it in `tool_call_id`. Empty: the template does not see an id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// The arguments: the text of a JSON object. Empty counts as `{}`.
    pub arguments: String,
}

impl ToolCall {
    /// The arguments as a JSON object, numbers as serde_json reads them.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) when they are none.
    pub fn parsed_arguments(&self) -> Result<Map<String, Value>> {
        if self.arguments.trim().is_empty() {
            return Ok(Map::new());
        }
        serde_json::from_str(&self.arguments).map_err(|_| Error::invalid("the arguments of a tool call are not a JSON object"))
    }
}

impl Serialize for ToolCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Function<'a> {
            name: &'a str,
            arguments: &'a str,
        }
        let mut call = serializer.serialize_struct("ToolCall", 3)?;
        if self.id.is_empty() {
            call.skip_field("id")?;
        } else {
            call.serialize_field("id", &self.id)?;
        }
        call.serialize_field("type", "function")?;
        call.serialize_field("function", &Function { name: &self.name, arguments: &self.arguments })?;
        call.end()
    }
}

impl<'de> Deserialize<'de> for ToolCall {
    fn deserialize<D: Deserializer<'de>>(source: D) -> std::result::Result<Self, D::Error> {
        use serde::de::Error;
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Function {
            name: String,
            #[serde(default)]
            arguments: Value,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Call {
            #[serde(default)]
            id: Option<String>,
            #[serde(default, rename = "type")]
            kind: Option<String>,
            #[serde(default)]
            function: Option<Function>,
            #[serde(default)]
            name: Option<String>,
            #[serde(default)]
            arguments: Value,
            #[serde(default, rename = "index")]
            _index: Option<u64>,
        }
        let call = Call::deserialize(source)?;
        if call.kind.is_some_and(|kind| kind != "function") {
            return Err(D::Error::custom("a call whose type is not function"));
        }
        let (name, arguments) = match (call.function, call.name) {
            (Some(function), None) if call.arguments.is_null() => (function.name, function.arguments),
            (None, Some(name)) => (name, call.arguments),
            _ => return Err(D::Error::custom("a call without a function")),
        };
        let arguments = match arguments {
            Value::Null => String::new(),
            Value::String(text) => text,
            object @ Value::Object(_) => object.to_string(),
            _ => return Err(D::Error::custom("a call's arguments are neither an object nor a text")),
        };
        Ok(Self { id: call.id.unwrap_or_default(), name, arguments })
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or another role the template knows. Letters, digits, `_` and `-`.
    pub role: String,
    /// What is said.
    #[serde(default)]
    pub content: Content,
    /// The speaker's or the tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What an assistant thought before it spoke, for templates that show it; they find it as `thinking` too. Without it,
    /// `thinking` or `reasoning` in the further fields counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls an assistant made.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool's message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Further fields, handed to the template as they are; nulls are left out.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

fn null_is_empty<'de, T: Default + Deserialize<'de>, D: Deserializer<'de>>(source: D) -> std::result::Result<T, D::Error> {
    Ok(Option::<T>::deserialize(source)?.unwrap_or_default())
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<Content>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }

    /// A message of the user.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new("user", content)
    }

    /// A message of the system.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new("system", content)
    }

    /// A message of the assistant.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new("assistant", content)
    }

    /// Calls the assistant made, without a word.
    #[must_use]
    pub fn assistant_calls(calls: Vec<ToolCall>) -> Self {
        Self { role: "assistant".to_owned(), tool_calls: calls, ..Self::default() }
    }

    /// A tool's answer to the call `id`.
    pub fn tool(id: impl Into<String>, content: impl Into<Content>) -> Self {
        Self { tool_call_id: Some(id.into()), ..Self::new("tool", content) }
    }

    /// Reads a JSON list of messages. Errors name the place, never the text.
    pub fn list_from_json(text: &str) -> Result<Vec<Self>> {
        serde_json::from_str(text).map_err(|error| {
            Error::invalid(format!(
                "messages: not a JSON list of {{role, content, …}} at line {} column {}",
                error.line(),
                error.column()
            ))
        })
    }
}

/// What a request's tool is called and takes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolSpec {
    pub(crate) name: String,
    /// Parameters and the `type` their schema gives; `string` when that is one of several, `None` when it says nothing.
    pub(crate) parameters: Vec<(String, Option<String>)>,
}

/// The tools of a request, a JSON list in OpenAI's shape `{"type": "function", "function": {"name", "description",
/// "parameters"}}` or of the bare functions. Null is an empty list.
///
/// # Errors
/// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) naming the tool's index.
pub(crate) fn tool_specs(tools: Option<&Value>) -> Result<Vec<ToolSpec>> {
    let list = match tools {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(Error::invalid("tools: not a JSON list")),
    };
    let spec = |(index, tool): (usize, &Value)| {
        let bad = |what: &str| Error::invalid(format!("tools: tool {index}: {what}"));
        if tool.get("type").is_some_and(|kind| kind != "function") {
            return Err(bad("its type is not function"));
        }
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| bad("it has no name; give {\"type\": \"function\", \"function\": {\"name\", …}}"))?;
        let schema = function.get("parameters").filter(|schema| !schema.is_null());
        if schema.is_some_and(|schema| !schema.is_object()) {
            return Err(bad("its parameters are not a JSON schema"));
        }
        let properties = schema.and_then(|schema| schema.get("properties")).and_then(Value::as_object);
        let parameters = properties.into_iter().flatten().map(|(name, property)| {
            let kind = match property.get("type") {
                Some(Value::String(kind)) => Some(kind.clone()),
                Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string").then(|| "string".to_owned()),
                _ => None,
            };
            (name.clone(), kind)
        });
        Ok(ToolSpec { name: name.to_owned(), parameters: parameters.collect() })
    };
    list.iter().enumerate().map(spec).collect()
}
