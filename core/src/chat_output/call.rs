//! Calls: where one ends in a stream of characters, and what it says.
//!
//! [`Pending::step`] looks at each character once, in constant time, so a hostile answer costs no more than its length.

use std::collections::HashMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::RejectReason;
use super::format::{ARGS, CALL_ID, CALLS, PYTHON, TAG, TAG_END};
use crate::chat_template::ToolSpec;

/// Finds the end of a JSON value: brackets are counted, strings skipped; whether it is valid is not asked.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

enum Seen {
    More,
    End,
    /// A line break or its like in a string: no JSON.
    Broken,
}

impl Scan {
    fn step(&mut self, letter: char) -> Seen {
        if self.in_string {
            match letter {
                _ if letter < ' ' => return Seen::Broken,
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return Seen::More;
        }
        match letter {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    return Seen::End;
                }
            }
            _ => {}
        }
        Seen::More
    }

    /// After the opening bracket.
    fn begun() -> Self {
        Self { depth: 1, ..Self::default() }
    }
}

/// What a character did to a pending call. Offsets are into its text; what is behind them is looked at again.
#[derive(Debug, PartialEq)]
pub(super) enum Progress {
    More,
    /// All of the text is one call or a list of them.
    Done,
    /// The text so far is a call gone wrong.
    Reject(RejectReason, usize),
    /// The text so far is no call at all.
    Text(usize),
}

/// A call that has begun.
#[derive(Debug)]
pub(super) enum Pending {
    Hermes(Hermes),
    Llama(Llama),
    Mistral(Mistral),
}

/// Behind `<tool_call>`.
#[derive(Debug)]
pub(super) enum Hermes {
    /// Before the call itself; blanks up to this offset are skipped.
    Start(usize),
    /// `closed`: the end tag has been seen inside a string. It may belong there, or the string may lack its end.
    Json {
        scan: Scan,
        closed: bool,
    },
    /// Behind the JSON; blanks up to this offset are skipped.
    AfterJson(usize),
    Xml {
        in_parameter: bool,
        closed: bool,
    },
    /// Not to be understood; the end tag ends it.
    Spoilt,
}

/// Behind `<|python_tag|>`, or at a `{` that begins an answer.
#[derive(Debug)]
pub(super) struct Llama {
    pub(super) intent: Intent,
    stage: LlamaStage,
}

#[derive(Debug)]
enum LlamaStage {
    Start,
    Json(Scan),
    /// Code for an interpreter, or broken JSON: to the end of the answer.
    Spoilt,
}

/// Whether an object without marks is a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Intent {
    /// Its beginning has not been read.
    Open,
    /// It begins with a key that calls have.
    Perhaps,
    /// It is marked as one, or begins with the name of a tool.
    Call,
}

/// Behind `[TOOL_CALLS]`.
#[derive(Debug)]
pub(super) enum Mistral {
    Start,
    Name,
    /// A mark that began at this offset.
    Mark(usize),
    Id,
    Args,
    Json(Scan),
    /// Not to be understood; the next call or the end of the answer ends it.
    Spoilt,
}

impl Pending {
    pub(super) fn hermes() -> Self {
        Self::Hermes(Hermes::Start(TAG.len()))
    }

    pub(super) fn python() -> Self {
        Self::Llama(Llama { intent: Intent::Call, stage: LlamaStage::Start })
    }

    /// At a `{`.
    pub(super) fn object(intent: Intent) -> Self {
        Self::Llama(Llama { intent, stage: LlamaStage::Json(Scan::begun()) })
    }

    /// Takes `letter`, which `raw` ends with.
    pub(super) fn step(&mut self, raw: &str, letter: char, tools: &Tools) -> Progress {
        match self {
            Self::Hermes(stage) => stage.step(raw, letter),
            Self::Llama(call) => call.step(raw, letter, tools),
            Self::Mistral(stage) => stage.step(raw, letter),
        }
    }

    /// The answer ends here, or the call is too large.
    pub(super) fn cut(&self, raw: &str, reason: RejectReason) -> Progress {
        let whole = raw.len();
        let large = reason == RejectReason::TooLarge;
        match self {
            // The end tag may be missing: some models end their turn instead.
            Self::Hermes(Hermes::AfterJson(_) | Hermes::Xml { closed: true, in_parameter: false }) if !large => Progress::Done,
            Self::Hermes(Hermes::Json { closed: true, .. } | Hermes::Spoilt)
            | Self::Llama(Llama { stage: LlamaStage::Spoilt, .. })
            | Self::Mistral(Mistral::Spoilt)
                if !large =>
            {
                Progress::Reject(RejectReason::Malformed, whole)
            }
            Self::Llama(Llama { intent: Intent::Open | Intent::Perhaps, .. }) => Progress::Text(whole),
            _ => Progress::Reject(reason, whole),
        }
    }
}

impl Hermes {
    fn step(&mut self, raw: &str, letter: char) -> Progress {
        let before = raw.len() - letter.len_utf8();
        let at_end_tag = letter == '>' && raw.ends_with(TAG_END);
        let malformed = Progress::Reject(RejectReason::Malformed, raw.len());
        match self {
            Self::Start(at) => {
                let body = &raw[*at..];
                if letter.is_whitespace() && body.len() == letter.len_utf8() {
                    *at = raw.len();
                } else if body == "{" {
                    *self = Self::Json { scan: Scan::begun(), closed: false };
                } else if body == XML {
                    *self = Self::Xml { in_parameter: false, closed: false };
                } else if !XML.starts_with(body) {
                    *self = Self::Spoilt;
                }
            }
            Self::Json { scan, closed } => match scan.step(letter) {
                Seen::End => *self = Self::AfterJson(raw.len()),
                // The string lacked its end, and the call ended in it.
                Seen::Broken if *closed => return Progress::Reject(RejectReason::Malformed, before),
                Seen::Broken => *self = Self::Spoilt,
                Seen::More if at_end_tag && scan.in_string => *closed = true,
                Seen::More if at_end_tag => return malformed,
                Seen::More => {}
            },
            Self::AfterJson(end) => {
                let tail = &raw[*end..];
                if tail == TAG_END {
                    return Progress::Done;
                }
                if letter.is_whitespace() && tail.len() == letter.len_utf8() {
                    *end = raw.len();
                } else if !TAG_END.starts_with(tail) {
                    *self = Self::Spoilt;
                }
            }
            Self::Xml { in_parameter, closed } => match letter {
                '=' if raw.ends_with(PARAMETER) => *in_parameter = true,
                '>' if raw.ends_with(PARAMETER_END) => *in_parameter = false,
                '>' if raw.ends_with(XML_END) && !*in_parameter => *closed = true,
                _ if at_end_tag && *closed && !*in_parameter => return Progress::Done,
                _ if at_end_tag && !*in_parameter => return malformed,
                _ => {}
            },
            Self::Spoilt if at_end_tag => return malformed,
            Self::Spoilt => {}
        }
        Progress::More
    }
}

impl Llama {
    fn step(&mut self, raw: &str, letter: char, tools: &Tools) -> Progress {
        match &mut self.stage {
            LlamaStage::Start if letter == '{' => self.stage = LlamaStage::Json(Scan::begun()),
            LlamaStage::Start if letter.is_whitespace() => {}
            LlamaStage::Start => self.stage = LlamaStage::Spoilt,
            LlamaStage::Json(scan) => {
                let seen = scan.step(letter);
                if self.intent == Intent::Open {
                    match tools.intent(raw) {
                        Some(intent) => self.intent = intent,
                        None => return Progress::Text(raw.len() - letter.len_utf8()),
                    }
                }
                match (seen, self.intent) {
                    (Seen::More, _) => {}
                    (Seen::End, Intent::Open) => return Progress::Text(raw.len()),
                    (Seen::End, _) => return Progress::Done,
                    (Seen::Broken, Intent::Call) => self.stage = LlamaStage::Spoilt,
                    (Seen::Broken, _) => return Progress::Text(raw.len() - letter.len_utf8()),
                }
            }
            LlamaStage::Spoilt => {}
        }
        Progress::More
    }
}

impl Mistral {
    fn step(&mut self, raw: &str, letter: char) -> Progress {
        let before = raw.len() - letter.len_utf8();
        let in_name = letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-' | '.');
        let next = match self {
            Self::Start | Self::Args if letter.is_whitespace() => return Progress::More,
            Self::Start | Self::Name | Self::Args if letter == '{' => Self::Json(Scan::begun()),
            Self::Start if letter == '[' => Self::Json(Scan::begun()),
            Self::Start | Self::Name if in_name => Self::Name,
            Self::Id if in_name => return Progress::More,
            Self::Name | Self::Id if letter == '[' => Self::Mark(before),
            Self::Mark(at) => match &raw[*at..] {
                ARGS => Self::Args,
                CALL_ID => Self::Id,
                part if ARGS.starts_with(part) || CALL_ID.starts_with(part) => return Progress::More,
                _ => Self::Spoilt,
            },
            Self::Json(scan) => match scan.step(letter) {
                Seen::More => return Progress::More,
                Seen::End => return Progress::Done,
                Seen::Broken => Self::Spoilt,
            },
            _ => Self::Spoilt,
        };
        *self = next;
        if matches!(self, Self::Spoilt) && raw.len() > CALLS.len() && raw.ends_with(CALLS) {
            return Progress::Reject(RejectReason::Malformed, raw.len() - CALLS.len());
        }
        Progress::More
    }
}

/// Bytes of an object in which its first key and the tool's name must have come.
const MAX_HEAD: usize = 1024;

const XML: &str = "<function=";
const XML_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

/// A call as the model wrote it.
#[derive(Debug, PartialEq)]
pub(super) struct Call {
    pub(super) id: Option<String>,
    pub(super) name: String,
    /// A valid JSON object.
    pub(super) arguments: String,
}

/// A call, or the text of one gone wrong and what is wrong with it.
pub(super) type Parsed = Result<Call, (String, RejectReason)>;

/// The tools of a request.
#[derive(Debug)]
pub(super) struct Tools(pub(super) Vec<ToolSpec>);

impl Tools {
    fn find(&self, name: &str) -> Option<&ToolSpec> {
        self.0.iter().find(|tool| tool.name == name)
    }

    /// What the beginning of an object tells; `None` when it cannot be a call.
    fn intent(&self, raw: &str) -> Option<Intent> {
        if raw.len() > MAX_HEAD {
            return None;
        }
        let Some(rest) = raw[1..].trim_start().strip_prefix('"') else {
            return raw[1..].trim_start().is_empty().then_some(Intent::Open);
        };
        let Some((key, rest)) = rest.split_once('"') else {
            return ["name", "type", "function", "id", "parameters", "arguments"]
                .iter()
                .any(|known| known.starts_with(rest))
                .then_some(Intent::Open);
        };
        match key {
            "type" | "function" | "id" | "parameters" | "arguments" => return Some(Intent::Perhaps),
            "name" => {}
            _ => return None,
        }
        let Some(rest) = rest.trim_start().strip_prefix(':') else {
            return rest.trim_start().is_empty().then_some(Intent::Open);
        };
        let Some(rest) = rest.trim_start().strip_prefix('"') else {
            return rest.trim_start().is_empty().then_some(Intent::Open);
        };
        match rest.split_once('"') {
            Some((name, _)) => self.find(name).map(|_| Intent::Call),
            None => self.0.iter().any(|tool| tool.name.starts_with(rest)).then_some(Intent::Open),
        }
    }

    /// Reads the whole text of a pending call.
    pub(super) fn parse(&self, raw: &str) -> Vec<Parsed> {
        let whole = |reason| vec![Err((raw.to_owned(), reason))];
        if let Some(body) = raw.strip_prefix(CALLS) {
            let body = body.trim();
            return match body.chars().next() {
                Some('[') => match serde_json::from_str::<Vec<&RawValue>>(body) {
                    Ok(items) if items.is_empty() => whole(RejectReason::NoName),
                    Ok(items) => {
                        items.iter().map(|item| self.json(item.get()).map_err(|reason| (item.get().to_owned(), reason))).collect()
                    }
                    Err(_) => whole(RejectReason::Malformed),
                },
                Some('{') => vec![self.json(body).map_err(|reason| (raw.to_owned(), reason))],
                _ => vec![self.named(body).map_err(|reason| (raw.to_owned(), reason))],
            };
        }
        let body = raw.strip_prefix(TAG).or_else(|| raw.strip_prefix(PYTHON)).unwrap_or(raw).trim();
        let body = body.strip_suffix(TAG_END).unwrap_or(body).trim();
        let call = if body.starts_with(XML) { self.xml(body) } else { self.json(body) };
        vec![call.map_err(|reason| (raw.to_owned(), reason))]
    }

    fn known(&self, id: Option<String>, name: String, arguments: String) -> Result<Call, RejectReason> {
        match self.find(&name) {
            Some(_) => Ok(Call { id, name, arguments }),
            None => Err(RejectReason::UnknownTool),
        }
    }

    /// `{"name": …, "arguments": {…}}`, also with `parameters`, or inside `"function"`.
    fn json(&self, text: &str) -> Result<Call, RejectReason> {
        let mut fields: HashMap<String, &RawValue> = serde_json::from_str(text).map_err(|_| RejectReason::Malformed)?;
        let id = fields.get("id").and_then(|id| serde_json::from_str(id.get()).ok());
        if let (None, Some(function)) = (fields.get("name"), fields.get("function")) {
            fields = serde_json::from_str(function.get()).map_err(|_| RejectReason::NoName)?;
        }
        let name: Option<String> = fields.get("name").and_then(|name| serde_json::from_str(name.get()).ok());
        let name = name.filter(|name| !name.is_empty()).ok_or(RejectReason::NoName)?;
        let arguments = fields.get("arguments").or_else(|| fields.get("parameters"));
        let arguments = arguments.map_or(Ok("{}".to_owned()), |value| object_text(value.get()))?;
        self.known(id, name, arguments)
    }

    /// `name[ARGS]{…}`, `name[CALL_ID]id[ARGS]{…}` or `name{…}`.
    fn named(&self, body: &str) -> Result<Call, RejectReason> {
        let at = body.find('{').ok_or(RejectReason::Malformed)?;
        let (head, arguments) = body.split_at(at);
        let head = head.trim_end();
        let head = head.strip_suffix(ARGS).unwrap_or(head);
        let (name, id) = head.split_once(CALL_ID).map_or((head, None), |(name, id)| (name, Some(id.to_owned())));
        self.known(id, name.to_owned(), object_text(arguments)?)
    }

    /// `<function=name><parameter=key>value</parameter>…</function>`. A value is read as JSON where the tool's schema says that
    /// it is not a string, or says nothing.
    fn xml(&self, body: &str) -> Result<Call, RejectReason> {
        let bad = RejectReason::Malformed;
        let body = body.strip_prefix(XML).and_then(|body| body.strip_suffix(XML_END)).ok_or(bad)?;
        let (name, mut rest) = body.split_once('>').ok_or(bad)?;
        let tool = self.find(name).ok_or(RejectReason::UnknownTool)?;
        let mut arguments = Map::new();
        loop {
            rest = rest.trim_start();
            if rest.is_empty() {
                break;
            }
            let (key, after) = rest.strip_prefix(PARAMETER).and_then(|rest| rest.split_once('>')).ok_or(bad)?;
            let (value, after) = after.split_once(PARAMETER_END).ok_or(bad)?;
            rest = after;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let kind = tool.parameters.iter().find(|(name, _)| name == key).and_then(|(_, kind)| kind.as_deref());
            arguments.insert(key.to_owned(), typed(value, kind));
        }
        Ok(Call { id: None, name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
    }
}

/// The text of a JSON object, which may come as a text in JSON or as null.
fn object_text(json: &str) -> Result<String, RejectReason> {
    let text = match json.trim() {
        "null" => return Ok("{}".to_owned()),
        text if text.starts_with('"') => serde_json::from_str::<String>(text).map_err(|_| RejectReason::Malformed)?,
        text => text.to_owned(),
    };
    if text.trim().is_empty() {
        return Ok("{}".to_owned());
    }
    // Whoever gets it must be able to read it.
    match serde_json::from_str::<Map<String, Value>>(&text) {
        Ok(_) => Ok(text.trim().to_owned()),
        Err(error) if error.is_data() => Err(RejectReason::BadArguments),
        Err(_) => Err(RejectReason::Malformed),
    }
}

fn typed(text: &str, kind: Option<&str>) -> Value {
    let string = || Value::from(text);
    match kind {
        Some("string") => string(),
        // The templates print values as Python does.
        Some("boolean") if matches!(text.trim(), "True" | "False") => Value::from(text.trim() == "True"),
        Some(_) if text.trim() == "None" => Value::Null,
        _ => serde_json::from_str(text).unwrap_or_else(|_| string()),
    }
}
