//! Conversations to prompts: a model's own chat template, run by minijinja with a limit on work and memory.
//!
//! [`ChatTemplate::encode`] is the safe way from messages to tokens: the tokens of ordinary text are exactly those of the whole
//! rendered prompt, and no text of a message ever becomes a special token (see `marks`). Which BOS there is, is the
//! template's business, as with transformers' `apply_chat_template`; should it write two, one is dropped.
//!
//! A template can refuse messages with `raise_exception`. Its text is reported as far as it stands in the template itself;
//! a part put in from the messages is left out, so that no user text gets into errors and logs.

mod env;
mod marks;
mod message;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use minijinja::{Environment, ErrorKind as JinjaKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::chat_output::ChatFormat;
use crate::error::{Error, ErrorKind, Result};
use crate::gguf::GgufHeader;
use crate::tokenizer::{Encoding, Tokenizer, Untrusted, guard, read_json, read_text};

use env::{Clock, Raised};
use marks::Marks;

pub use message::{Content, ContentPart, Message, ToolCall};
pub(crate) use message::{ToolSpec, tool_specs};

/// Longest template, in bytes.
const MAX_TEMPLATE: u64 = 4 << 20;
/// Fuel of a render: about one per instruction and per 64 bytes made, so this bounds memory to some 128 MB.
const FUEL: u64 = 2_000_000;
/// More fuel for each message and each byte of input.
const FUEL_PER_MESSAGE: u64 = 2_000;

/// How messages are rendered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RenderOptions {
    /// End with the opening of the assistant's turn. Default true.
    pub add_generation_prompt: bool,
    /// Tools the model may call: a JSON list of `{"type": "function", "function": {"name", "description", "parameters"}}`,
    /// or of the bare functions. The template gets it as it is.
    pub tools: Option<Value>,
    /// Documents for templates with retrieval: a JSON list.
    pub documents: Option<Value>,
    /// Switches a model's reasoning on or off, where its template knows `enable_thinking`.
    pub enable_thinking: Option<bool>,
    /// Further variables of the template.
    pub extra: Map<String, Value>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, tools: None, documents: None, enable_thinking: None, extra: Map::new() }
    }
}

/// A rendered conversation and its tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatPrompt {
    /// The prompt as text.
    pub text: String,
    /// Its tokens; special ones only where the template wrote them.
    pub encoding: Encoding,
}

struct Inner {
    source: PathBuf,
    templates: Named,
    env: Environment<'static>,
    tokenizer: Tokenizer,
    /// How the template wants contents.
    shape: Shape,
}

/// A model's chat template, together with its tokenizer. Cloning is cheap.
#[derive(Clone)]
pub struct ChatTemplate(Arc<Inner>);

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("source", &self.0.source).finish_non_exhaustive()
    }
}

/// Templates and their names.
type Named = Vec<(String, String)>;

/// The named templates of a directory: `chat_template.jinja`, else `chat_template.json`, else `tokenizer_config.json`.
fn templates_of_dir(dir: &Path, tokenizer_config: &Map<String, Value>) -> Result<Option<(PathBuf, Named)>> {
    let path = dir.join("chat_template.jinja");
    match read_text(&path, MAX_TEMPLATE) {
        Ok(text) => {
            let mut templates = vec![("default".to_owned(), text)];
            // transformers keeps further templates (such as `tool_use`) in a folder beside it.
            if let Ok(entries) = std::fs::read_dir(dir.join("additional_chat_templates")) {
                let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
                files.sort();
                for file in files.iter().filter(|file| file.extension().is_some_and(|ending| ending == "jinja")) {
                    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                    templates.push((name, read_text(file, MAX_TEMPLATE)?));
                }
            }
            return Ok(Some((path, templates)));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let path = dir.join("chat_template.json");
    if let Some(map) = read_json(&path)?
        && let Some(value) = map.get("chat_template")
    {
        return Ok(Some((path.clone(), named_templates(value, &path)?)));
    }
    let path = dir.join("tokenizer_config.json");
    match tokenizer_config.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(value) => Ok(Some((path.clone(), named_templates(value, &path)?))),
    }
}

/// A template given as a string or as a list of `{name, template}`.
fn named_templates(value: &Value, path: &Path) -> Result<Named> {
    let bad = || Error::bad_model(path, "chat_template", "neither a string nor a list of {name, template}");
    match value {
        Value::String(text) => Ok(vec![("default".to_owned(), text.clone())]),
        Value::Array(entries) => entries
            .iter()
            .map(|entry| {
                let field = |name: &str| entry.get(name).and_then(Value::as_str).map(str::to_owned).ok_or_else(bad);
                Ok((field("name")?, field("template")?))
            })
            .collect(),
        _ => Err(bad()),
    }
}

/// The text of a directory's default template, for those who only look at what it mentions.
pub(crate) fn source_of_dir(dir: &Path, tokenizer_config: &Map<String, Value>) -> Result<Option<String>> {
    let found = templates_of_dir(dir, tokenizer_config)?;
    Ok(found.map(|(_, templates)| templates.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join("\n")))
}

impl ChatTemplate {
    /// The template of a Hugging Face or MLX directory.
    ///
    /// # Errors
    /// [`Unsupported`](crate::ErrorKind::Unsupported) when the model has none, [`BadModel`](crate::ErrorKind::BadModel) when
    /// it is not a valid template.
    pub fn from_dir(dir: impl AsRef<Path>, tokenizer: &Tokenizer) -> Result<Self> {
        let dir = dir.as_ref();
        let config = read_json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        match templates_of_dir(dir, &config)? {
            Some((path, templates)) => Self::build(&path, templates, tokenizer, Arc::new(SystemTime::now)),
            None => Err(missing(dir)),
        }
    }

    /// The template in a GGUF file's metadata.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir).
    pub fn from_gguf(header: &GgufHeader, tokenizer: &Tokenizer) -> Result<Self> {
        let mut templates = Vec::new();
        if let Some(text) = header.opt_string("tokenizer.chat_template")? {
            templates.push(("default".to_owned(), text.to_owned()));
        }
        for name in header.opt_strings("tokenizer.chat_templates")?.unwrap_or_default() {
            if let Some(text) = header.opt_string(&format!("tokenizer.chat_template.{name}"))? {
                templates.push((name.clone(), text.to_owned()));
            }
        }
        if templates.is_empty() {
            return Err(missing(header.path()));
        }
        Self::build(header.path(), templates, tokenizer, Arc::new(SystemTime::now))
    }

    /// A template given as text, for a model without one or to replace it.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir).
    pub fn from_text(template: &str, tokenizer: &Tokenizer) -> Result<Self> {
        let templates = vec![("default".to_owned(), template.to_owned())];
        Self::build(Path::new("(given)"), templates, tokenizer, Arc::new(SystemTime::now))
    }

    /// The same template with another clock for `strftime_now`, which is in UTC.
    pub fn with_clock(&self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Result<Self> {
        Self::build(&self.0.source, self.0.templates.clone(), &self.0.tokenizer, Arc::new(clock))
    }

    fn build(source: &Path, templates: Named, tokenizer: &Tokenizer, clock: Clock) -> Result<Self> {
        guard(source, || {
            let mut env = env::environment(clock).map_err(|error| Error::internal("the template engine").with_source(error))?;
            for (name, text) in &templates {
                if text.len() as u64 > MAX_TEMPLATE {
                    return Err(Error::bad_model(source, "chat_template", format!("larger than {MAX_TEMPLATE} bytes")));
                }
                env.add_template_owned(name.clone(), without_generation_tags(text)).map_err(|error| {
                    let detail = error.detail().unwrap_or("invalid").to_owned();
                    let line = error.line().unwrap_or(0);
                    Error::bad_model(source, "chat_template", format!("not a valid template at line {line}: {detail}"))
                })?;
            }
            if templates.is_empty() {
                return Err(missing(source));
            }
            let source = source.to_path_buf();
            let shape = Shape { list: false, null: false };
            let mut inner = Inner { source, templates, env, tokenizer: tokenizer.clone(), shape };
            inner.shape = inner.try_shapes();
            Ok(Self(Arc::new(inner)))
        })
    }

    /// Where the template came from.
    #[must_use]
    pub fn source(&self) -> &Path {
        &self.0.source
    }

    /// The text of the default template.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0.templates[self.0.pick(false)].1
    }

    /// How the model marks thoughts and calls, as far as its templates tell.
    #[must_use]
    pub fn format(&self) -> ChatFormat {
        ChatFormat::detect(&self.0.templates.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n"))
    }

    /// Renders `messages` to text, exactly as the template says. For generation use [`encode`](Self::encode) instead:
    /// nothing in this text tells the template's special tokens from a user's look-alikes.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for no messages, a malformed role, or messages the template
    /// refuses; [`Unsupported`](crate::ErrorKind::Unsupported) for parts that are not text;
    /// [`BadModel`](crate::ErrorKind::BadModel) for a template that never ends.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        guard(&self.0.source, || self.0.render(messages, options, None))
    }

    /// Renders `messages` and turns them into tokens. The tokens equal those of the rendered text, but no text of a message,
    /// tool or document becomes a special token, whatever the template does with it.
    ///
    /// Where a template looks for markup *inside* texts of users (say, drops all before `</think>`), it does not find any:
    /// such markup stays in the prompt as ordinary text. In texts of the assistant it finds tags like `</think>` that are not
    /// marked special in the vocabulary.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn encode(&self, messages: &[Message], options: &RenderOptions) -> Result<ChatPrompt> {
        let inner = &*self.0;
        guard(&inner.source, || {
            let values = inner.inputs(messages, options)?;
            let template = &inner.templates[inner.pick(options.tools.is_some())].1;
            let marks = Marks::new(inner.tokenizer.protected_tokens(), template, &values.iter().collect::<Vec<_>>())?;
            let (text, places) = marks.undo(&inner.render(messages, options, Some(&marks))?);
            let mut encoding = inner.tokenizer.encode_marked(&text, Untrusted::At(&places), false)?;
            // A token that the template spells out is not there as BOS, even if the model uses it as one.
            let bos = inner
                .tokenizer
                .bos_id()
                .filter(|id| inner.tokenizer.id_to_token(*id).is_some_and(|text| !template.contains(&text)));
            if encoding.ids.len() > 1 && encoding.ids[0] == encoding.ids[1] && Some(encoding.ids[0]) == bos {
                encoding.ids.remove(0);
                encoding.type_ids.remove(0);
            }
            Ok(ChatPrompt { text, encoding })
        })
    }
}

fn missing(place: &Path) -> Error {
    Error::unsupported(format!(
        "{}: the model has no chat template; generate from a raw prompt, or put a chat_template.jinja beside the weights",
        place.display()
    ))
}

/// Training templates wrap assistant turns in `{% generation %}`; the tags mean nothing here.
fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start + 2..start + length];
        let word = tag.trim_matches(['-', '+']).trim();
        let replacement = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..start + 2]);
        match replacement {
            Some(replacement) => out.push_str(&tag.replace(word, replacement)),
            None => out.push_str(tag),
        }
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}

/// What a message's content is given to the template as.
#[derive(Clone, Copy)]
struct Shape {
    /// A list of parts, and not a text.
    list: bool,
    /// A null where an assistant only made calls, and not an empty text.
    null: bool,
}

impl Inner {
    /// The index of the template for a request with or without tools.
    fn pick(&self, tools: bool) -> usize {
        let find = |name: &str| self.templates.iter().position(|(known, _)| known == name);
        let tool_use = if tools { find("tool_use") } else { None };
        tool_use.or_else(|| find("default")).unwrap_or(0)
    }

    /// Tries out what the template makes of contents: some only take lists of parts, and some stumble over a null or print it.
    fn try_shapes(&self) -> Shape {
        const PROBE: &str = "hob probe";
        let run = |messages: &[Message], tools: Option<Value>, shape: Shape| -> Result<String> {
            let list = messages.iter().map(|message| message_value(0, message, shape)).collect::<Result<Value>>()?;
            self.run(json!({ "messages": list }), RenderOptions { tools, ..RenderOptions::default() }, messages, 0)
        };
        let shows = |list: bool| {
            let rendered = run(&[Message::user(PROBE)], None, Shape { list, null: false });
            rendered.is_ok_and(|text| text.contains(PROBE) && !text.contains("'type'") && !text.contains("\"type\""))
        };
        let list = !shows(false) && shows(true);
        // An id that pleases templates which count its letters.
        let call = ToolCall { id: "hobprobe1".to_owned(), name: "probe".to_owned(), arguments: String::new() };
        let calls = [Message::user(PROBE), Message::assistant_calls(vec![call]), Message::tool("hobprobe1", PROBE)];
        let printed = |null: bool| {
            let text = run(&calls, Some(json!([])), Shape { list, null });
            text.map(|text| text.matches("None").count() + text.matches("null").count())
        };
        let null = matches!((printed(true), printed(false)), (Ok(with), Ok(without)) if with == without);
        Shape { list, null }
    }

    /// All texts of a request as values, for finding characters that occur in none of them.
    fn inputs(&self, messages: &[Message], options: &RenderOptions) -> Result<Vec<Value>> {
        let mut values = check(messages)?;
        values.extend(options.tools.clone());
        values.extend(options.documents.clone());
        values.push(Value::Object(options.extra.clone()));
        values.push(self.tokenizer.role_texts().iter().map(|(_, text)| Value::from(text.as_str())).collect());
        Ok(values)
    }

    fn render(&self, messages: &[Message], options: &RenderOptions, marks: Option<&Marks>) -> Result<String> {
        check(messages)?;
        tool_specs(options.tools.as_ref())?;
        let shape = self.shape;
        let mut list = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let mut value = message_value(index, message, shape)?;
            if let (Some(marks), Value::Object(fields)) = (marks, &mut value) {
                let own = message.role == "assistant";
                for (name, field) in fields.iter_mut() {
                    if name != "role" {
                        // What an assistant calls or is called is data, only what it says is its own.
                        let said = own && !matches!(name.as_str(), "tool_calls" | "name" | "tool_call_id");
                        *field = marks.value(field, said);
                    }
                }
                // The kind of a part is not a text.
                if shape.list {
                    for part in fields.get_mut("content").and_then(Value::as_array_mut).into_iter().flatten() {
                        part["type"] = Value::from("text");
                    }
                }
            }
            list.push(value);
        }
        let marked = |value: &Value| marks.map_or_else(|| value.clone(), |marks| marks.value(value, false));
        let options = RenderOptions {
            tools: options.tools.as_ref().map(&marked),
            documents: options.documents.as_ref().map(&marked),
            extra: options.extra.iter().map(|(name, value)| (name.clone(), marked(value))).collect(),
            ..*options
        };
        let bytes = list.iter().map(text_bytes).sum::<u64>() + options.tools.as_ref().map_or(0, text_bytes);
        self.run(json!({ "messages": list }), options, messages, bytes)
    }

    fn run(&self, mut context: Value, options: RenderOptions, messages: &[Message], bytes: u64) -> Result<String> {
        let template = &self.templates[self.pick(options.tools.is_some())];
        if let Value::Object(fields) = &mut context {
            for (name, text) in self.tokenizer.role_texts() {
                fields.insert(name.clone(), Value::String(text.clone()));
            }
            fields.insert("add_generation_prompt".to_owned(), Value::Bool(options.add_generation_prompt));
            fields.insert("tools".to_owned(), options.tools.unwrap_or_default());
            fields.insert("documents".to_owned(), options.documents.unwrap_or_default());
            if let Some(thinking) = options.enable_thinking {
                fields.insert("enable_thinking".to_owned(), Value::Bool(thinking));
            }
            for (name, value) in options.extra {
                if name != "messages" {
                    fields.insert(name, value);
                }
            }
        }
        let mut env = self.env.clone();
        env.set_fuel(Some(FUEL + FUEL_PER_MESSAGE * messages.len() as u64 + bytes));
        let rendered = env.get_template(&template.0).and_then(|compiled| compiled.render(env::value(&context)));
        rendered.map_err(|error| self.failed(&error, &template.1))
    }

    /// A template's failure, without any text of the messages.
    fn failed(&self, error: &minijinja::Error, template: &str) -> Error {
        let place = format!("{}: chat template, line {}", self.source.display(), error.line().unwrap_or(0));
        let mut cause = std::error::Error::source(error);
        while let Some(next) = cause {
            if let Some(Raised(text)) = next.downcast_ref::<Raised>() {
                let said = own_words(text, template);
                return Error::invalid(format!("the chat template refuses the messages: {said}"));
            }
            cause = next.source();
        }
        match error.kind() {
            JinjaKind::OutOfFuel => {
                Error::new(ErrorKind::BadModel, format!("{place}: it needs too much work or memory, or never ends"))
            }
            JinjaKind::SyntaxError | JinjaKind::UnknownBlock | JinjaKind::TemplateNotFound | JinjaKind::BadInclude => {
                Error::new(ErrorKind::BadModel, format!("{place}: {}", error.kind()))
            }
            // Their details name things of the template, not of the messages.
            JinjaKind::UnknownFilter | JinjaKind::UnknownFunction | JinjaKind::UnknownTest | JinjaKind::UnknownMethod => {
                let known = |word: &&str| KNOWN_WORDS.contains(word) || template.contains(word);
                let detail: Vec<&str> = error.detail().unwrap_or_default().split_whitespace().filter(known).collect();
                Error::unsupported(format!("{place}: {}: {}", error.kind(), detail.join(" ")))
            }
            kind => Error::invalid(format!("{place}: it fails on these messages: {kind}")),
        }
    }
}

/// Words of minijinja's own messages about unknown names.
const KNOWN_WORDS: [&str; 18] = [
    "is",
    "unknown",
    "has",
    "no",
    "method",
    "named",
    "filter",
    "test",
    "function",
    "string",
    "map",
    "sequence",
    "number",
    "none",
    "undefined",
    "bool",
    "object",
    "value",
];

/// The longest beginning of `said` that the template itself holds, so that nothing put in from messages is repeated.
fn own_words(said: &str, template: &str) -> String {
    const LONGEST: usize = 300;
    let ends = said.char_indices().map(|(at, _)| at).chain([said.len()]);
    // Beginnings of beginnings are held too, so the search may stop at the first that is not.
    let held = ends.take_while(|end| *end <= LONGEST && template.contains(&said[..*end])).last().unwrap_or(0);
    let own = said[..held].trim();
    match (own.is_empty(), held == said.len()) {
        (true, _) => "(its reason holds text of the messages)".to_owned(),
        (false, true) => own.to_owned(),
        (false, false) => format!("{own} …"),
    }
}

/// Checks messages and gives them as values.
fn check(messages: &[Message]) -> Result<Vec<Value>> {
    if messages.is_empty() {
        return Err(Error::invalid("no messages; a conversation needs at least one"));
    }
    messages
        .iter()
        .enumerate()
        .map(|(index, message)| {
            let role = message.role.as_str();
            let allowed = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
            if role.is_empty() || role.len() > 64 || !role.chars().all(allowed) {
                return Err(Error::invalid(format!("message {index}: its role must be 1 to 64 letters, digits, '_' or '-'")));
            }
            message_value(index, message, Shape { list: false, null: false })
        })
        .collect()
}

/// A message as the template sees it.
fn message_value(index: usize, message: &Message, shape: Shape) -> Result<Value> {
    let text = match &message.content {
        Content::Text(text) => text.clone(),
        Content::Parts(parts) => {
            if let Some(at) = parts.iter().position(|part| part.kind != "text") {
                let what = format!("message {index}: part {at} of its content is not of type text; Hob takes text only");
                return Err(Error::unsupported(what));
            }
            parts.iter().map(|part| part.text.as_str()).collect()
        }
        Content::Null => String::new(),
    };
    let mut fields = Map::new();
    fields.insert("role".to_owned(), Value::from(message.role.as_str()));
    let content = match shape {
        Shape { null: true, .. } if message.content == Content::Null && !message.tool_calls.is_empty() => Value::Null,
        Shape { list: true, .. } => json!([{ "type": "text", "text": text }]),
        _ => Value::String(text),
    };
    fields.insert("content".to_owned(), content);
    if let Some(name) = &message.name {
        fields.insert("name".to_owned(), Value::from(name.as_str()));
    }
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().enumerate().map(|(at, call)| call_value(index, at, call));
        fields.insert("tool_calls".to_owned(), calls.collect::<Result<Value>>()?);
    }
    if let Some(id) = &message.tool_call_id {
        fields.insert("tool_call_id".to_owned(), Value::from(id.as_str()));
    }
    // A null counts as missing, as in transformers: templates ask whether a field is there.
    for (name, value) in message.extra.iter().filter(|(_, value)| !value.is_null()) {
        if !fields.contains_key(name) {
            fields.insert(name.clone(), value.clone());
        }
    }
    // Thoughts go by several names. As in transformers, templates find them under the first two.
    let thoughts = message.reasoning_content.as_deref().map(Value::from);
    if let Some(thoughts) = thoughts.or_else(|| ["thinking", "reasoning"].iter().find_map(|name| fields.get(*name).cloned())) {
        fields.entry("thinking").or_insert_with(|| thoughts.clone());
        fields.insert("reasoning_content".to_owned(), thoughts);
    }
    Ok(Value::Object(fields))
}

/// A call as templates want it: its arguments are an object, whatever other APIs make of them.
fn call_value(message: usize, index: usize, call: &ToolCall) -> Result<Value> {
    let arguments = call.parsed_arguments().map_err(|_| {
        Error::invalid(format!(
            "message {message}: call {index}: its arguments are not a JSON object; a call that is none belongs into the content"
        ))
    })?;
    let mut fields = Map::new();
    if !call.id.is_empty() {
        fields.insert("id".to_owned(), Value::from(call.id.as_str()));
    }
    fields.insert("type".to_owned(), Value::from("function"));
    fields.insert("function".to_owned(), json!({ "name": call.name, "arguments": arguments }));
    Ok(Value::Object(fields))
}

fn text_bytes(value: &Value) -> u64 {
    match value {
        Value::String(text) => text.len() as u64,
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() as u64 + text_bytes(value)).sum(),
        _ => 8,
    }
}
