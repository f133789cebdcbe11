//! What napi-derive says of the addon's exports, as TypeScript.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::Value;

use crate::error::{At, Error, Result};

/// The generator's lines, one JSON object each.
pub(super) fn read(file: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(file).at("read", file)?;
    let parse = |line: &str| {
        serde_json::from_str(line).map_err(|error| Error::new(format!("napi-derive wrote a line that is no JSON: {error}")))
    };
    text.lines().filter(|line| !line.is_empty()).map(parse).collect()
}

/// One file of declarations, sorted by name.
pub(super) fn file(lines: &[Value]) -> Result<String> {
    let mut items: BTreeMap<&str, String> = BTreeMap::new();
    let field = |line: &Value, name: &str| line[name].as_str().unwrap_or_default().to_owned();
    for line in lines {
        let (kind, name) = (line["kind"].as_str().unwrap_or_default(), line["name"].as_str().unwrap_or_default());
        let (doc, def) = (field(line, "js_doc"), field(line, "def"));
        let text = match kind {
            "fn" => format!("{doc}export {}\n", declared(&def)),
            "interface" => format!("{doc}export interface {name} {{\n{}\n}}\n", indented(&def)),
            "struct" => format!("{doc}export declare class {name} {{\n{}{}", indented(&def), methods(lines, name)),
            // Told with its class.
            "impl" => continue,
            other => return Err(Error::new(format!("napi-derive wrote `{other}` for {name}, which xtask cannot read"))),
        };
        items.insert(name, text);
    }
    let body: Vec<String> = items.into_values().collect();
    Ok(format!("{HEAD}\n{}", body.join("\n")))
}

const HEAD: &str = "// Written by `cargo xtask npm` from bindings/napi; do not edit.\n";

fn declared(def: &str) -> String {
    let def = def.trim();
    if def.starts_with("declare ") { def.to_owned() } else { format!("declare {def}") }
}

fn methods(lines: &[Value], name: &str) -> String {
    let of = |line: &&Value| line["kind"] == "impl" && line["name"] == name;
    let mut text = String::new();
    for line in lines.iter().filter(of) {
        let def = indented(line["def"].as_str().unwrap_or_default());
        if !text.is_empty() || !def.starts_with('\n') {
            text.push('\n');
        }
        text.push_str(def.trim_end());
    }
    let start = text.trim_start_matches('\n');
    format!("{start}\n}}\n")
}

/// One level in; what follows the first line of a comment one more column.
fn indented(def: &str) -> String {
    let line = |line: &str| match line.trim() {
        "" => String::new(),
        text if text.starts_with('*') => format!("   {text}"),
        text => format!("  {text}"),
    };
    def.trim_end().lines().map(line).collect::<Vec<_>>().join("\n")
}
