//! What leaves the library of the Swift package: every function of the C ABI and of the generated module, and nothing else.
//!
//! rustc lets the functions of all dependencies out of a dynamic library. So the library is linked here, from the static one, with the
//! list as the linker's input; on Apple systems (`release.rs`) in the same way.

use std::{collections::BTreeSet, fs, path::Path, process::Command, time::SystemTime};

use crate::{
    error::{At, Error, Result},
    header, paths,
    proc::{capture, open},
    store,
};

/// The list, sorted: what the two committed headers declare.
pub(crate) fn names() -> Result<BTreeSet<String>> {
    let read = |path: &Path| fs::read_to_string(path).at("read", path);
    let generated = read(&paths::root().join("swift/Sources/CHobUniFFI/include/hob_uniffi.h"))?;
    let mut names = scaffolding(&generated);
    if names.is_empty() {
        return Err(Error::new("the generated header declares no function").mend("cargo xtask swift"));
    }
    names.extend(read(&header::exports_path())?.lines().map(str::to_owned));
    Ok(names)
}

/// The functions that the generated header declares.
fn scaffolding(header: &str) -> BTreeSet<String> {
    let words = header.lines().filter_map(|line| line.split_once('(')?.0.split([' ', '*']).next_back());
    let own = ["uniffi_hob_uniffi_", "ffi_hob_uniffi_"];
    words.filter(|word| own.iter().any(|prefix| word.starts_with(prefix))).map(str::to_owned).collect()
}

/// As GNU's linker and LLVM's read it.
fn version_script(names: &BTreeSet<String>) -> String {
    let global: String = names.iter().map(|name| format!("  {name};\n")).collect();
    format!("{{\nglobal:\n{global}local: *;\n}};\n")
}

/// As Apple's linker reads it, for whom a function's symbol begins with an underscore more.
pub(crate) fn apple_list(names: &BTreeSet<String>) -> String {
    names.iter().map(|name| format!("_{name}\n")).collect()
}

/// Links the dynamic library from the static one, unless it is newer than both that and the list. Linux.
pub(crate) fn link(archive: &Path, library: &Path) -> Result<()> {
    let script = library.with_extension("map");
    let text = version_script(&names()?);
    let changed = |path: &Path| fs::metadata(path).and_then(|it| it.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    if fs::read_to_string(&script).is_ok_and(|old| old == text) && changed(library) > changed(archive) {
        return Ok(());
    }
    store::write_whole(&script, text.as_bytes())?;
    let native = paths::native();
    let mut link = Command::new("c++");
    link.args(["-shared", "-Wl,-soname,libhob_uniffi.so", "-Wl,-rpath,$ORIGIN", "-Wl,--gc-sections", "-Wl,-z,defs"]);
    link.arg(format!("-Wl,--version-script={}", script.display()));
    link.args([Path::new("-Wl,--whole-archive"), archive, Path::new("-Wl,--no-whole-archive")]);
    link.arg("-L").arg(native.join("mlx/lib")).arg(format!("-Wl,-rpath-link,{}", native.join("mlx_cpu.libs").display()));
    link.args(["-lmlx", "-lm", "-lpthread", "-ldl"]);
    // A link that fails must leave nothing that looks new.
    let unfinished = library.with_extension("new");
    open(link.arg("-o").arg(&unfinished))?;
    fs::rename(&unfinished, library).at("name", library)
}

/// The list leaves a library; on Linux nothing else does (elsewhere a local library is rustc's own work, which lets more out).
pub(crate) fn check(library: &Path) -> Result<()> {
    let dynamic: &[&str] = if cfg!(target_os = "linux") { &["-D"] } else { &[] };
    let output = capture(Command::new("nm").args(["-g", "--defined-only"]).args(dynamic).arg(library), |_| ())?;
    let (mut exported, list) = (exported(&output, cfg!(target_os = "macos")), names()?);
    if !cfg!(target_os = "linux") {
        exported.retain(|name| list.contains(name));
    }
    let complaints = differences(&exported, &list);
    if complaints.is_empty() {
        return Ok(());
    }
    Err(Error::new(format!("what leaves {} is not what the headers declare", library.display())).output(complaints))
}

/// The names that `nm` printed.
fn exported(output: &str, underscored: bool) -> BTreeSet<String> {
    let names = output.lines().filter_map(|line| line.split_whitespace().nth(2));
    let plain = |name: &str| name.split('@').next().unwrap_or(name).to_owned();
    names.filter_map(|name| if underscored { name.strip_prefix('_') } else { Some(name) }).map(plain).collect()
}

fn differences(exported: &BTreeSet<String>, list: &BTreeSet<String>) -> Vec<String> {
    let more = exported.difference(list).map(|name| format!("exported, not declared: {name}"));
    let less = list.difference(exported).map(|name| format!("declared, not exported: {name}"));
    more.chain(less).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn the_generated_header_is_read() {
        let header = "#define UNIFFI_FFIDEF_FFI_HOB_UNIFFI_X\ntypedef void (*UniffiCallback)(uint64_t);\nuint64_t uniffi_hob_uniffi_fn_a(uint64_t ptr\n);\nRustBuffer *ffi_hob_uniffi_b(void\n";
        assert_eq!(scaffolding(header), set(&["ffi_hob_uniffi_b", "uniffi_hob_uniffi_fn_a"]));
    }

    #[test]
    fn both_surfaces_are_on_the_list() {
        let names = names().expect("the committed headers");
        for name in ["hob_engine_open", "uniffi_hob_uniffi_fn_method_rawengine_generate", "ffi_hob_uniffi_uniffi_contract_version"]
        {
            assert!(names.contains(name), "{name}");
        }
        assert!(names.iter().any(|name| name.starts_with("uniffi_hob_uniffi_checksum_")), "Swift compares them when it starts");
        assert!(names.iter().all(|name| !name.contains('*')), "names, no patterns");
    }

    #[test]
    fn each_linker_gets_the_list_in_its_own_words() {
        let names = set(&["hob_b", "hob_a"]);
        assert_eq!(version_script(&names), "{\nglobal:\n  hob_a;\n  hob_b;\nlocal: *;\n};\n");
        assert_eq!(apple_list(&names), "_hob_a\n_hob_b\n");
    }

    #[test]
    fn one_name_more_or_less_is_a_complaint() {
        let output = "0000000000000010 T hob_a\n0000000000000020 T other@@V1\n                 U free\n";
        let exported = exported(output, false);
        assert_eq!(exported, set(&["hob_a", "other"]));
        assert_eq!(
            differences(&exported, &set(&["hob_a", "hob_b"])),
            ["exported, not declared: other", "declared, not exported: hob_b"]
        );
        assert!(differences(&exported, &exported).is_empty());
        assert_eq!(super::exported("10 T _hob_a\n", true), set(&["hob_a"]));
    }
}
