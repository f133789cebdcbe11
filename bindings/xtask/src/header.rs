//! `header`: include/hob.h and the list of exported functions, from the sources of ffi.

use std::{fs, path::PathBuf};

use crate::{
    error::{At, Error, Result},
    paths, store,
};

/// Writes both files.
pub(crate) fn run() -> Result<()> {
    let header = header()?;
    store::write_whole(&header_path(), header.as_bytes())?;
    let mut exports = functions(&header).join("\n");
    exports.push('\n');
    store::write_whole(&exports_path(), exports.as_bytes())
}

pub(crate) fn header_path() -> PathBuf {
    paths::root().join("include/hob.h")
}

/// One name a line, sorted: what libhob exports, and nothing else.
pub(crate) fn exports_path() -> PathBuf {
    paths::root().join("tests/c/exports.txt")
}

fn header() -> Result<String> {
    let ffi = paths::root().join("ffi");
    let read = |path: PathBuf| fs::read_to_string(&path).at("read", &path);
    let program = read(paths::root().join("tests/c/smoke.c"))?;
    let prologue = read(ffi.join("header/prologue.h"))?.replace("@PROGRAM@", &commented(&program));
    let epilogue = read(ffi.join("header/epilogue.h"))?;
    let config = cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(prologue.trim_end().to_owned()),
        include_guard: Some("HOB_H".to_owned()),
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        cpp_compat: true,
        usize_is_size_t: true,
        style: cbindgen::Style::Both,
        documentation_style: cbindgen::DocumentationStyle::Doxy,
        line_length: 120,
        ..cbindgen::Config::default()
    };
    let bindings = cbindgen::Builder::new()
        .with_crate(&ffi)
        .with_config(config)
        .generate()
        .map_err(|error| Error::new(format!("cbindgen cannot read ffi: {error}")))?;
    let mut bytes = Vec::new();
    bindings.write(&mut bytes);
    let text = String::from_utf8(bytes).map_err(|error| Error::new(format!("cbindgen wrote no text: {error}")))?;
    // The macros go inside the guard, after the types.
    let (body, end) = text.rsplit_once("#endif").ok_or_else(|| Error::new("cbindgen wrote no include guard"))?;
    Ok(format!("{body}{epilogue}\n#endif{end}"))
}

/// A program as part of a comment.
fn commented(program: &str) -> String {
    let line = |line: &str| if line.is_empty() { " *".to_owned() } else { format!(" *     {line}") };
    program.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The functions that the header declares, sorted.
pub(crate) fn functions(header: &str) -> Vec<String> {
    let mut names: Vec<String> = header.lines().filter_map(declared).collect();
    names.sort();
    names
}

/// The function that a line begins to declare. cbindgen starts each at a line's beginning.
fn declared(line: &str) -> Option<String> {
    let (before, _) = line.split_once('(')?;
    if before.starts_with([' ', '#', '/', '*']) || before.starts_with("typedef") {
        return None;
    }
    let name = before.rsplit([' ', '*']).next()?;
    (name.starts_with("hob_") && name.len() < before.len()).then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_told_from_other_lines() {
        let header = "/* hob_a(x) */\ntypedef int (*hob_fn)(void);\nconst char *hob_version(void);\nint32_t hob_open(int a,\n                 int b);\n#define HOB_X hob_y(1)\n";
        assert_eq!(functions(header), ["hob_open", "hob_version"]);
    }

    #[test]
    fn the_committed_files_are_what_the_generator_writes() {
        let committed = fs::read_to_string(header_path()).expect("include/hob.h");
        assert!(committed == header().expect("cbindgen"), "stale: run `cargo xtask header`");
        let exports = fs::read_to_string(exports_path()).expect("exports.txt");
        assert_eq!(exports.lines().map(str::to_owned).collect::<Vec<_>>(), functions(&committed));
    }
}
