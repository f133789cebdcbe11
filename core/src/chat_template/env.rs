//! The template language as transformers sets it up: Jinja with `trim_blocks` and `lstrip_blocks`, loop controls, Python's
//! string and list methods, `tojson`, `raise_exception` and `strftime_now`, and values printed as Python prints them.

use std::fmt::Write;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State};

/// Where the time for `strftime_now` comes from.
pub(super) type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// Marks an error that a template raised by itself.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

/// The environment every template of a model is added to.
pub(super) fn environment(clock: Clock) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_formatter(format_value);
    env.set_debug(false);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_filter("tojson", to_json);
    env.add_filter("string", |value: Value| python_text(&value));
    env.add_test("iterable", |value: Value| {
        use ValueKind::{Iterable, Map, Seq, String, Undefined};
        matches!(value.kind(), String | Seq | Map | Iterable | Undefined)
    });
    env.add_test("sequence", |value: Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
    });
    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let text = message.as_str().map_or_else(|| message.to_string(), str::to_owned);
        Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Raised(text)))
    });
    env.add_function("strftime_now", move |format: &str| strftime(format, clock()));
    Ok(env)
}

/// A JSON value for a template.
pub(super) fn value(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(truth) => Value::from(*truth),
        serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => items.iter().map(value).collect(),
        serde_json::Value::Object(map) => Value::from_pairs(map.iter().map(|(key, item)| (key.as_str(), value(item)))),
    }
}

/// Prints a value as Python's `str` does.
fn format_value(out: &mut Output<'_>, _state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text)?,
        None => out.write_str(&python_text(value))?,
    }
    Ok(())
}

fn python_text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut text = String::new();
            python_repr(value, &mut text, 0);
            text
        }
    }
}

/// Deepest nesting of lists and maps that is printed.
const MAX_DEPTH: usize = 64;

fn python_repr(value: &Value, out: &mut String, depth: usize) {
    match value.kind() {
        _ if depth > MAX_DEPTH => out.push_str("..."),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => python_string(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                python_repr(&item, out, depth + 1);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                python_repr(&key, out, depth + 1);
                out.push_str(": ");
                python_repr(&value.get_item(&key).unwrap_or_default(), out, depth + 1);
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// Python's `repr` of a string: single quotes unless it holds one and no double quote.
fn python_string(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            letter if letter == quote => {
                out.push('\\');
                out.push(letter);
            }
            letter if letter.is_ascii_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(letter));
            }
            letter => out.push(letter),
        }
    }
    out.push(quote);
}

/// A number as Python prints it.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if float.is_nan() {
        return "NaN".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    // Rust's shortest digits are Python's; only the layout of the exponent differs.
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..16 => {
            let plain = format!("{float}");
            if plain.contains('.') { plain } else { plain + ".0" }
        }
        power if power < 0 => format!("{digits}e-{:02}", -power),
        power => format!("{digits}e+{power:02}"),
    }
}

/// How `tojson` lays its text out.
struct Json {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

/// Python's `json.dumps` with transformers' defaults: not escaped to ASCII, keys in their order.
#[allow(clippy::needless_pass_by_value)]
fn to_json(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")?.or(indent) {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => match value.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = value.as_usize().filter(|width| *width <= 64);
                Some(" ".repeat(width.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "tojson: indent is over 64"))?))
            }
        },
    };
    let separators = kwargs.get::<Option<Value>>("separators")?.filter(|value| !value.is_none());
    let (item, key) = match &separators {
        Some(pair) => {
            let part = |index: usize| -> Result<String, Error> {
                let part = pair.get_item(&Value::from(index))?;
                part.as_str().map(str::to_owned).ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "tojson: separators"))
            };
            (part(0)?, part(1)?)
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Json {
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        item,
        key,
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    json_value(value, &style, &mut out, 0)?;
    Ok(Value::from_safe_string(out))
}

fn json_value(value: &Value, style: &Json, out: &mut String, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => json_string(value.as_str().unwrap_or_default(), style.ascii, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            json_items(items.len(), '[', ']', style, out, depth, |index, out| json_value(&items[index], style, out, depth + 1))?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort {
                keys.sort();
            }
            json_items(keys.len(), '{', '}', style, out, depth, |index, out| {
                match keys[index].as_str() {
                    Some(text) => json_string(text, style.ascii, out),
                    None => {
                        out.push('"');
                        json_value(&keys[index], style, out, depth + 1)?;
                        out.push('"');
                    }
                }
                out.push_str(&style.key);
                json_value(&value.get_item(&keys[index])?, style, out, depth + 1)
            })?;
        }
        _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: an undefined or unprintable value")),
    }
    Ok(())
}

fn json_items(
    count: usize,
    open: char,
    close: char,
    style: &Json,
    out: &mut String,
    depth: usize,
    mut write: impl FnMut(usize, &mut String) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    };
    out.push(open);
    for index in 0..count {
        if index > 0 {
            out.push_str(&style.item);
        }
        line(out, depth + 1);
        write(index, out)?;
    }
    if count > 0 {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn json_string(text: &str, ascii: bool, out: &mut String) {
    out.push('"');
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            letter if u32::from(letter) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", u32::from(letter));
            }
            // Marks stand for ASCII characters (see `marks`), so they stay.
            letter if ascii && !letter.is_ascii() && !super::marks::is_mark(letter) => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            letter => out.push(letter),
        }
    }
    out.push('"');
}

const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// C's `strftime` in English and UTC, as far as templates use it.
pub(super) fn strftime(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, clock) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (clock / 3600, clock / 60 % 60, clock % 60);
    let (year, month, day, of_year) = date(days);
    let weekday = usize::try_from((days + 4) % 7).unwrap_or(0);
    let half = |hour: u64| if hour.is_multiple_of(12) { 12 } else { hour % 12 };
    let name = MONTHS[month - 1];
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let Some(mut code) = letters.next() else { break };
        let plain = code == '-';
        if plain {
            let Some(next) = letters.next() else { break };
            code = next;
        }
        let two = |value: u64| if plain { value.to_string() } else { format!("{value:02}") };
        let text = match code {
            'Y' => year.to_string(),
            'y' => two(year % 100),
            'm' => two(month as u64),
            'd' => two(day),
            'e' => format!("{day:2}"),
            'j' if plain => of_year.to_string(),
            'j' => format!("{of_year:03}"),
            'H' => two(hour),
            'I' => two(half(hour)),
            'M' => two(minute),
            'S' => two(second),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => name.to_owned(),
            'b' | 'h' => name[..3].to_owned(),
            'A' => DAYS[weekday].to_owned(),
            'a' => DAYS[weekday][..3].to_owned(),
            'w' => weekday.to_string(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'R' => format!("{hour:02}:{minute:02}"),
            'D' => format!("{month:02}/{day:02}/{:02}", year % 100),
            's' => seconds.to_string(),
            'z' => "+0000".to_owned(),
            'Z' => "UTC".to_owned(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            other => format!("%{other}"),
        };
        out.push_str(&text);
    }
    out
}

/// Year, month, day and day of the year of a number of days since 1970.
fn date(mut days: u64) -> (u64, usize, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    // Whole cycles of 400 years first, so that absurd clocks cost nothing.
    year += days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let of_year = days + 1;
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, of_year)
}
