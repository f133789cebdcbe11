//! `check`: what a reviewer need not look for. All steps run, then the failed ones are named.

use std::{fs, path::Path, process::Command, time::Instant};

use crate::{
    error::{At, Error, Result},
    paths,
    proc::{self, capture, open},
    setup, ui,
    workspace::{SHUTTLE, Workspace},
};

type Step = (&'static str, fn(&Workspace) -> Result<()>);

const STEPS: &[Step] = &[
    ("format", format),
    ("lints", lints),
    ("lints of the shuttle build", shuttle_lints),
    ("documentation", documentation),
    ("documentation tests", documentation_tests),
    ("file lengths", |_| lengths()),
    ("generated files", |_| generated(GENERATED)),
    ("exports of libhob", crate::c::check_exports),
    ("exports of libhob_uniffi", crate::swift::check_exports),
];

/// Files that are generated and committed: the command that makes them, and the paths it writes.
struct Generated {
    name: &'static str,
    command: fn() -> Command,
    paths: &'static [&'static str],
}

const GENERATED: &[Generated] = &[
    Generated { name: "the C header", command: || this("header"), paths: &["include/hob.h", "tests/c/exports.txt"] },
    Generated { name: "Swift", command: || this("swift"), paths: &["swift/Sources/HobUniFFI", "swift/Sources/CHobUniFFI"] },
    Generated { name: "the addon's types", command: npm_types, paths: &[crate::npm::TYPES] },
];

fn npm_types() -> Command {
    let mut command = this("npm");
    command.arg("types");
    command
}

/// This program again, with the verb that writes something.
fn this(verb: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()));
    command.arg(verb).current_dir(paths::root());
    command
}

/// A file longer than this is split, so that it can be read in one sitting.
const MAX_LINES: usize = 800;

/// Files that may be longer, and why.
const LONG_FILES: &[(&str, &str)] = &[
    ("core/tests/pool_shuttle.rs", "scenarios of one harness and one shuttle build"),
    ("include/hob.h", "generated, and the manual of the C ABI"),
    ("swift/Sources/CHobUniFFI/include/hob_uniffi.h", "generated"),
    ("swift/Sources/HobUniFFI/HobUniFFI.swift", "generated"),
];

const SOURCES: &[&str] = &["rs", "c", "h", "cpp", "hpp", "cu", "cuh", "swift", "ts", "js", "mjs", "cjs", "py", "sh"];

pub(crate) fn run() -> Result<()> {
    setup::ensure()?;
    let workspace = Workspace::read()?;
    let mut failed = Vec::new();
    for (name, check) in STEPS {
        println!("\n== {name} ==");
        let start = Instant::now();
        match check(&workspace) {
            Ok(()) => println!("{name}: ok ({})", ui::seconds(start.elapsed())),
            Err(error) => {
                println!("{error}");
                failed.push(*name);
            }
        }
    }
    println!();
    if failed.is_empty() {
        println!("check: all {} steps are clean", STEPS.len());
        return Ok(());
    }
    Err(Error::new(format!("check failed in: {}", failed.join(", "))))
}

fn format(_: &Workspace) -> Result<()> {
    let bindgen = paths::native_sources().join("bindgen/Cargo.toml");
    let mend = "cargo fmt --all (and with --manifest-path for bindings/xtask/native/bindgen)";
    open(proc::cargo().args(["fmt", "--all", "--check"])).map_err(|error| error.mend(mend))?;
    open(proc::cargo().args(["fmt", "--check", "--manifest-path"]).arg(bindgen)).map_err(|error| error.mend(mend))
}

fn lints(workspace: &Workspace) -> Result<()> {
    open(proc::cargo().args(["clippy", "--all-targets"]).args(workspace.everything()).args(["--", "-D", "warnings"]))
}

fn shuttle_lints(workspace: &Workspace) -> Result<()> {
    if !workspace.has_feature("hob", SHUTTLE) {
        println!("core has no feature `shuttle`");
        return Ok(());
    }
    open(proc::cargo().args(["clippy", "--package", "hob", "--features", SHUTTLE, "--lib", "--tests", "--", "-D", "warnings"]))
}

fn documentation(workspace: &Workspace) -> Result<()> {
    // Of libraries only: the tool `hob` would write over the pages of the library `hob`.
    open(proc::cargo().args(["doc", "--no-deps", "--lib"]).args(workspace.everything()).env("RUSTDOCFLAGS", "-D warnings"))
}

fn documentation_tests(workspace: &Workspace) -> Result<()> {
    open(proc::cargo().args(["test", "--quiet", "--doc"]).args(workspace.everything()))
}

/// Tracked files, and new ones that git does not ignore.
fn files() -> Result<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard"]).current_dir(paths::root());
    let output = capture(&mut git, |_| ()).map_err(|error| error.mend("run it in a git checkout of the repository"))?;
    Ok(output.lines().map(str::to_owned).collect())
}

fn lengths() -> Result<()> {
    let mut lengths = Vec::new();
    for file in files()? {
        let path = paths::root().join(&file);
        let is_source = path.extension().and_then(|extension| extension.to_str()).is_some_and(|it| SOURCES.contains(&it));
        // What a link leads to is counted where it is.
        if is_source && path.is_file() && !path.is_symlink() {
            let bytes = fs::read(&path).at("read", &path)?;
            lengths.push((file, bytes.split(|&byte| byte == b'\n').count().saturating_sub(1)));
        }
    }
    let complaints = too_long(&lengths, LONG_FILES);
    if complaints.is_empty() {
        return Ok(());
    }
    Err(Error::new(format!("a source file may have {MAX_LINES} lines")).output(complaints).mend(
        "split it by what it does; a file that must be longer goes into LONG_FILES in bindings/xtask/src/check.rs with the reason",
    ))
}

fn too_long(lengths: &[(String, usize)], allowed: &[(&str, &str)]) -> Vec<String> {
    let is_allowed = |file: &str| allowed.iter().any(|(name, _)| *name == file);
    let mut complaints: Vec<String> = lengths
        .iter()
        .filter(|(file, lines)| *lines > MAX_LINES && !is_allowed(file))
        .map(|(file, lines)| format!("{file}: {lines} lines"))
        .collect();
    for (name, _) in allowed {
        if !lengths.iter().any(|(file, lines)| file == name && *lines > MAX_LINES) {
            complaints.push(format!("{name}: allowed to be long, yet is not (or is gone): take it off the list"));
        }
    }
    complaints
}

fn generated(items: &[Generated]) -> Result<()> {
    for item in items {
        println!("{}", item.name);
        open(&mut (item.command)())?;
        let changed = changed(paths::root(), item.paths)?;
        if !changed.is_empty() {
            return Err(Error::new(format!("the committed {} is not what its generator writes", item.name))
                .output(changed)
                .mend("look at `git diff`, then commit the files as they are now"));
        }
    }
    Ok(())
}

/// What differs from the commit below these paths, new files included.
fn changed(root: &Path, below: &[&str]) -> Result<Vec<String>> {
    let mut git = Command::new("git");
    git.args(["status", "--porcelain", "--untracked-files=all", "--"]).args(below).current_dir(root);
    Ok(capture(&mut git, |_| ())?.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_need_a_reason() {
        let lengths = [("a.rs".to_owned(), 801), ("b.rs".to_owned(), 800), ("c.rs".to_owned(), 900)];
        assert_eq!(too_long(&lengths, &[("c.rs", "generated")]), ["a.rs: 801 lines"]);
    }

    #[test]
    fn a_stale_permission_is_a_complaint() {
        let lengths = [("b.rs".to_owned(), 10)];
        assert_eq!(too_long(&lengths, &[("b.rs", "was long"), ("gone.rs", "was there")]).len(), 2);
    }

    #[test]
    fn new_and_changed_files_are_seen() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let git = |arguments: &[&str]| {
            capture(
                Command::new("git").args(["-c", "user.name=t", "-c", "user.email=t@t"]).args(arguments).current_dir(home.path()),
                |_| (),
            )
            .expect("git runs")
        };
        git(&["init", "--quiet"]);
        fs::write(home.path().join("a"), "1").expect("write");
        git(&["add", "a"]);
        git(&["commit", "--quiet", "--message", "a"]);
        assert!(changed(home.path(), &["."]).expect("git runs").is_empty());
        fs::write(home.path().join("a"), "2").expect("write");
        fs::write(home.path().join("b"), "new").expect("write");
        assert_eq!(changed(home.path(), &["."]).expect("git runs"), [" M a", "?? b"]);
        assert_eq!(changed(home.path(), &["b"]).expect("git runs").len(), 1);
    }
}
