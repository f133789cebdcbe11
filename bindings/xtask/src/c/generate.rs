//! Test programs made from the header, so that no function and no field is left out: every pointer argument NULL, a panic in every
//! function, and the layout of every struct.

use crate::error::{Error, Result};

/// A function of the header.
#[derive(Debug, PartialEq, Eq)]
struct Function {
    returns: String,
    name: String,
    /// Type and name.
    parameters: Vec<(String, String)>,
}

/// A struct whose fields are known: its name, and theirs.
#[derive(Debug, PartialEq, Eq)]
struct Struct {
    name: String,
    fields: Vec<String>,
}

/// The header without comments and preprocessor lines.
fn bare(header: &str) -> String {
    let mut text = String::new();
    let mut rest = header;
    while let Some((before, after)) = rest.split_once("/*") {
        text.push_str(before);
        rest = after.split_once("*/").map_or("", |(_, after)| after);
    }
    text.push_str(rest);
    let mut lines = Vec::new();
    let mut continued = false;
    for line in text.lines() {
        if !continued && !line.trim_start().starts_with('#') {
            lines.push(line);
        }
        continued = (continued || line.trim_start().starts_with('#')) && line.ends_with('\\');
    }
    lines.join("\n")
}

fn functions(bare: &str) -> Vec<Function> {
    bare.split(';').filter_map(function).collect()
}

fn function(declaration: &str) -> Option<Function> {
    let one_line = declaration.split_whitespace().collect::<Vec<_>>().join(" ");
    // What a block before it left over, such as the brace of `extern "C"`.
    let one_line = one_line.rsplit(['{', '}']).next()?.trim();
    if one_line.starts_with("typedef") {
        return None;
    }
    let (head, parameters) = one_line.strip_suffix(')')?.split_once('(')?;
    let (returns, name) = split_name(head)?;
    if !name.starts_with("hob_") {
        return None;
    }
    let parameters = parameters.split(',').map(str::trim).filter(|parameter| *parameter != "void");
    Some(Function { returns, name, parameters: parameters.map(split_name).collect::<Option<_>>()? })
}

/// `const char *text` to `const char *` and `text`.
fn split_name(declaration: &str) -> Option<(String, String)> {
    let at = declaration.rfind([' ', '*'])? + 1;
    let kind = declaration[..at].trim().replace("struct ", "");
    Some((kind, declaration[at..].to_owned()))
}

fn structs(bare: &str) -> Vec<Struct> {
    let mut found = Vec::new();
    for part in bare.split("typedef struct ").skip(1) {
        let Some((name, rest)) = part.split_once(" {") else { continue };
        let Some((fields, _)) = rest.split_once('}') else { continue };
        if name.contains([';', '\n']) {
            continue;
        }
        let fields = fields.split(';').filter_map(|field| split_name(field.trim())).map(|(_, name)| name).collect();
        found.push(Struct { name: name.to_owned(), fields });
    }
    found
}

/// A program that prints each struct's size and each field's place, and compares each INIT macro with its function.
pub(super) fn layout(header: &str) -> Result<String> {
    let bare = bare(header);
    let mut program =
        String::from("#include <hob.h>\n#include <stdio.h>\n#include <string.h>\n\nint main(void) {\n  int wrong = 0;\n");
    let structs = structs(&bare);
    if structs.len() < 10 {
        return Err(Error::new("the header's structs cannot be read: the parser in c/generate.rs needs mending"));
    }
    for item in &structs {
        program.push_str(&format!("  printf(\"{0} %zu\\n\", sizeof({0}));\n", item.name));
        for field in &item.fields {
            program.push_str(&format!("  printf(\"{0}.{field} %zu\\n\", offsetof({0}, {field}));\n", item.name));
        }
    }
    for function in functions(&bare).iter().filter(|function| function.name.ends_with("_init")) {
        let kind = function.name.trim_end_matches("_init");
        let name = &function.name;
        program.push_str(&format!(
            "  {{ {kind} by_macro = {}_INIT, by_function; memset(&by_function, 0xAA, sizeof by_function); {name}(&by_function);\n    if (memcmp(&by_macro, &by_function, sizeof by_macro) != 0) wrong = 1, fprintf(stderr, \"{kind}: macro and function differ\\n\"); }}\n",
            kind.to_uppercase()
        ));
    }
    program.push_str("  return wrong;\n}\n");
    Ok(program)
}

/// Pointers that may be NULL, as function and parameter; `*` stands for every function.
const NULLABLE: &[(&str, &str)] = &[
    ("*", "out_error"),
    ("*", "user_data"),
    ("*", "drop_user_data"),
    ("*", "cancel"),
    ("*", "waker"),
    ("*", "progress"),
    ("*", "out_usage"),
    ("*", "out_result"),
    ("*", "out_admitted"),
    ("*", "out_bytes"),
    ("*", "out_freed_bytes"),
    ("*", "out_stopped"),
    ("*", "out_count"),
    ("hob_engine_load", "out_info"),
    ("hob_engine_load", "options"),
    ("hob_engine_inspect", "options"),
    ("hob_engine_estimate", "options"),
    ("hob_engine_open", "options"),
    ("hob_engine_open_fake", "options"),
    ("hob_tokenizer_decode", "ids"),
    ("hob_tokenizer_render", "render_json"),
    ("hob_tokenizer_render", "out_text"),
    ("hob_tokenizer_render", "out_ids"),
];

/// What a good argument of a type is, in the program of `nulls`.
fn good(function: &str, kind: &str, name: &str) -> Option<String> {
    let text = |text: &str| Some(text.to_owned());
    let plain = kind.trim_start_matches("const ").trim();
    match (plain, name) {
        ("char *", "key") => text("\"chat:chat\""),
        ("char *", "models_json") => text("FAKE_MODELS"),
        ("char *", "point") => text("\"step\""),
        ("char *", "messages_json") => text("\"[{\\\"role\\\": \\\"user\\\", \\\"content\\\": \\\"a\\\"}]\""),
        ("char *", "render_json") => text("\"{}\""),
        ("char *", "model_ref") => text("\"chat\""),
        ("char *", _) => text("\"text\""),
        ("size_t", name) if name.ends_with("_len") => text("HOB_NUL_TERMINATED"),
        ("int32_t", "action") => text("HOB_FAKE_RELEASE"),
        ("uint32_t", "header_abi_version") => text("HOB_ABI_VERSION"),
        ("uint64_t", "bytes") => text("4000"),
        ("int64_t" | "int32_t" | "uint32_t" | "uint64_t" | "size_t" | "float", _) => text("0"),
        ("hob_drop_fn" | "hob_waker_fn" | "hob_progress_fn" | "void *" | "hob_load_context *", _) => text("NULL"),
        // A second result of the same type.
        (_, "out_ids") if function == "hob_tokenizer_render" => text("&second_hob_buffer"),
        // Init functions write into one of their own.
        (kind, "options") if function.ends_with("_init") => Some(format!("&spare_{}", kind.trim_end_matches(" *"))),
        (kind, _) if kind.starts_with("hob_") && kind.ends_with(" **") => Some(format!("&new_{}", kind.trim_end_matches(" **"))),
        (kind, _) if kind.starts_with("hob_") && kind.ends_with(" *") => Some(format!("good_{}()", kind.trim_end_matches(" *"))),
        ("uint64_t *" | "size_t *" | "int32_t *" | "uint32_t *", _) => Some(format!("&number_{}", plain.trim_end_matches(" *"))),
        _ => None,
    }
}

fn is_pointer(kind: &str) -> bool {
    kind.ends_with('*') || kind.ends_with("_fn")
}

/// A program that calls every function with each pointer argument NULL in turn, and with all of them NULL.
pub(super) fn nulls(header: &str) -> Result<String> {
    let functions = all_functions(header)?;
    let mut program = String::from("#include \"nulls.h\"\n\nint main(void) {\n  begin();\n");
    for function in &functions {
        let gives_back = function.name.ends_with("_free") || function.name.ends_with("_release");
        let pointers: Vec<usize> = (0..function.parameters.len()).filter(|&at| is_pointer(&function.parameters[at].0)).collect();
        let can_fail = function.parameters.iter().any(|(_, name)| name == "out_error");
        let required = |at: usize| {
            let parameter = &function.parameters[at].1;
            !NULLABLE.iter().any(|(of, name)| name == parameter && (*of == "*" || *of == function.name))
        };
        let mut calls: Vec<Vec<usize>> = pointers.iter().map(|&at| vec![at]).collect();
        calls.push(pointers.clone());
        if gives_back {
            calls.truncate(1);
        }
        for null in calls {
            let call = call(function, &null)?;
            program.push_str(&match function.returns.as_str() {
                // Without an error to give, a status is an answer.
                "hob_status" if !can_fail => format!("  (void){call};\n"),
                "hob_status" if null.iter().any(|&at| required(at)) => format!("  refused({call});\n"),
                "hob_status" => format!("  allowed({call});\n"),
                "void" => format!("  {call};\n"),
                kind if kind.ends_with(" *") && kind.starts_with("hob_") => {
                    format!("  new_{} = {call};\n", kind.trim_end_matches(" *"))
                }
                _ => format!("  (void){call};\n"),
            });
            program.push_str("  clean();\n");
        }
    }
    program.push_str("  end();\n  told(\"every_pointer_argument_may_be_null\");\n  return 0;\n}\n");
    Ok(program)
}

/// Functions that run nothing that could panic.
const CONSTANT: &[&str] = &["hob_version", "hob_abi_version", "hob_fake_panic_next"];

/// A program that makes every function panic inside, with good arguments: nothing unwinds, the answer says so, and a handle refuses to
/// be used again but can be given back.
pub(super) fn panics(header: &str) -> Result<String> {
    let mut program = String::from("#include \"nulls.h\"\n\nint main(void) {\n");
    for function in all_functions(header)?.iter().filter(|function| !CONSTANT.contains(&function.name.as_str())) {
        let call = call(function, &[])?;
        let can_fail = function.parameters.iter().any(|(_, name)| name == "out_error");
        let handle =
            function.parameters.first().and_then(|(kind, _)| kind.strip_prefix("const ").unwrap_or(kind).strip_suffix(" *"));
        let handle = handle.filter(|kind| kind.starts_with("hob_") && !kind.ends_with("_options"));
        program.push_str("  begin();\n");
        program.push_str(&match (function.returns.as_str(), can_fail) {
            ("hob_status", true) if handle.is_some() => format!("  panicked({call});\n  poisoned({call});\n"),
            ("hob_status", true) => format!("  panicked({call});\n  allowed({call});\n"),
            // Nothing tells but that the panic happened and went no further.
            ("void", _) => format!("  hob_fake_panic_next(1), {call};\n  CHECK(hob_fake_panic_next(0) == 0);\n"),
            _ => format!("  hob_fake_panic_next(1), (void){call};\n  CHECK(hob_fake_panic_next(0) == 0);\n"),
        });
        program.push_str("  clean();\n  end();\n");
    }
    program.push_str("  told(\"a_panic_inside_any_function_is_an_error\");\n  return 0;\n}\n");
    Ok(program)
}

fn all_functions(header: &str) -> Result<Vec<Function>> {
    let mut functions = functions(&bare(header));
    if functions.len() < 50 {
        return Err(Error::new("the header's functions cannot be read: the parser in c/generate.rs needs mending"));
    }
    // Closing comes last: everything after it would be refused for that.
    functions.sort_by_key(|function| function.name.contains("close"));
    Ok(functions)
}

/// A call with good arguments, those at `null` NULL.
fn call(function: &Function, null: &[usize]) -> Result<String> {
    let mut arguments = Vec::new();
    for (at, (kind, name)) in function.parameters.iter().enumerate() {
        let argument = if null.contains(&at) { Some("NULL".to_owned()) } else { good(&function.name, kind, name) };
        arguments.push(argument.ok_or_else(|| {
            Error::new(format!("{}: no good value for `{kind} {name}` is known", function.name)).mend("add one in c/generate.rs")
        })?);
    }
    Ok(format!("{}({})", function.name, arguments.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "#ifndef X\n#define HOB_A \\\n  { hob_no(1) }\n/* hob_no(2); */\ntypedef struct hob_opaque hob_opaque;\ntypedef struct hob_pair {\n  /** one */\n  uint32_t one;\n  const char *two;\n} hob_pair;\ntypedef int (*hob_fn)(int a);\nextern \"C\" {\nconst char *hob_name(const struct hob_opaque *thing,\n    size_t count);\nint32_t hob_number(void);\n}\n";

    #[test]
    fn functions_and_structs_are_read() {
        let bare = bare(HEADER);
        let functions = functions(&bare);
        assert_eq!(functions.iter().map(|function| function.name.as_str()).collect::<Vec<_>>(), ["hob_name", "hob_number"]);
        assert_eq!(functions[0].parameters[0], ("const hob_opaque *".to_owned(), "thing".to_owned()));
        assert_eq!(functions[0].returns, "const char *");
        assert!(functions[1].parameters.is_empty());
        assert_eq!(structs(&bare), [Struct { name: "hob_pair".to_owned(), fields: vec!["one".to_owned(), "two".to_owned()] }]);
    }
}
