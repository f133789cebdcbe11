//! `swift`: the generated part of the Swift package, its library, its tests, its release.

mod exports;
mod framework;
mod release;

use std::{fs, path::PathBuf, process::Command};

use crate::{
    dist,
    error::{At, Error, Result},
    paths,
    proc::{self, capture, open},
    ui,
    workspace::Workspace,
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Verb {
    /// Build the library for a local use of the package, and print the folder for HOB_LIBRARY_DIR
    Build,
    /// Run the package's tests (as the suite `swift` of `test` does)
    Test {
        /// Handed to `swift test`
        #[arg(last = true)]
        extra: Vec<String>,
    },
    /// Run a program of the package on the local library, in the folder `swift`
    Run {
        /// Its name and arguments
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Lay out a release: the XCFramework and the package that points to it (macOS only)
    Dist {
        /// Where the XCFramework's archive will be found
        #[arg(long)]
        url: String,
        /// The identity to sign with, as `codesign` names it; `-` signs for this machine only
        #[arg(long, default_value = "-")]
        identity: String,
    },
}

pub(crate) fn run(verb: Option<Verb>) -> Result<()> {
    match verb {
        None => generate(),
        Some(Verb::Build) => build().map(|folder| println!("{}", folder.display())),
        Some(Verb::Test { extra }) => package(&with("test", &extra)),
        Some(Verb::Run { arguments }) => package(&with("run", &arguments)),
        Some(Verb::Dist { url, identity }) => release::run(&url, &identity),
    }
}

fn with(verb: &str, extra: &[String]) -> Vec<String> {
    [verb.to_owned()].into_iter().chain(extra.iter().cloned()).collect()
}

/// A dynamic library's file name here.
fn file() -> String {
    format!("{}hob_uniffi{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
}

/// Builds the library as it is, and reads the package's generated sources off it.
fn generate() -> Result<()> {
    let debug = Workspace::read()?.target_directory()?.join("debug");
    ui::step("the library and its generator", |step| {
        let mut cargo = proc::cargo();
        cargo.args(["build", "--package", "hob-uniffi", "--features", "bindgen"]);
        capture(&mut cargo, |line| line.map_or((), |line| step.note(line))).map(|_| ())
    })?;
    let sources = paths::root().join("swift/Sources");
    let mut generator = Command::new(debug.join("hob-uniffi-bindgen"));
    generator.arg(debug.join(file())).arg(paths::root().join("bindings/uniffi/uniffi.toml"));
    generator.arg(sources.join("HobUniFFI")).arg(sources.join("CHobUniFFI/include"));
    open(&mut generator)
}

/// Builds the library and lays it out with all that it needs.
fn build() -> Result<PathBuf> {
    let target = Workspace::read()?.target_directory()?;
    ui::step("libhob_uniffi", |step| {
        let mut cargo = proc::cargo();
        cargo.args(["build", "--package", "hob-uniffi"]);
        capture(&mut cargo, |line| line.map_or((), |line| step.note(line))).map(|_| ())
    })?;
    let (built, folder) = (target.join("debug"), target.join("swift/lib"));
    fs::create_dir_all(&folder).at("make", &folder)?;
    let library = folder.join(file());
    if cfg!(target_os = "linux") {
        ui::step("its exports", |_| exports::link(&built.join("libhob_uniffi.a"), &library))?;
        dist::libraries(&folder)?;
    } else {
        dist::copy(&built.join(file()), &library)?;
    }
    exports::check(&library)?;
    Ok(folder)
}

/// For `check`: exactly what the headers declare leaves the library.
pub(crate) fn check_exports(_: &Workspace) -> Result<()> {
    build().map(|_| ())
}

/// Runs `swift ARGUMENTS` on the package with the local library.
fn package(arguments: &[String]) -> Result<()> {
    available().map_err(Error::new)?;
    let library = build()?;
    let target = Workspace::read()?.target_directory()?;
    let scratch = target.join("swift/build");
    fs::create_dir_all(&scratch).at("make", &scratch)?;
    let root = paths::root();
    let mut command = match toolchain()? {
        None => Command::new("swift"),
        Some(inside) => {
            let mut command = Command::new(script());
            command.arg("run").arg(inside).args([root, &target]).args([paths::models()]);
            if let Some(reranker) = std::env::var_os("HOB_RERANKER").map(PathBuf::from).filter(|path| path.is_dir()) {
                command.arg(reranker);
            }
            command.args(["--", "swift"]);
            command
        }
    };
    let (verb, rest) = arguments.split_first().ok_or_else(|| Error::new("no verb for swift"))?;
    command.arg(verb).arg("--scratch-path").arg(scratch);
    if verb == "test" {
        // All tests are Swift Testing's. The package must be free of warnings, generated code and tests included.
        command.args(["--disable-xctest", "-Xswiftc", "-warnings-as-errors"]);
    }
    command.args(rest).current_dir(root.join("swift")).env("HOB_LIBRARY_DIR", library);
    if std::env::var_os("HOB_MODELS").is_none() && paths::models().join("all-minilm-l6-v2").exists() {
        command.env("HOB_MODELS", paths::models());
    }
    if verb == "run" {
        return proc::talk(&mut command);
    }
    open(&mut command)
}

fn script() -> PathBuf {
    paths::root().join(".ci/swift-toolchain")
}

/// Whether a Swift toolchain is here or can be had.
pub(crate) fn available() -> std::result::Result<(), &'static str> {
    if proc::on_path("swift").is_some() {
        return Ok(());
    }
    if !cfg!(target_os = "linux") {
        return Err("needs `swift` on PATH (Xcode, or its command-line tools)");
    }
    let is_root = || capture(Command::new("id").arg("-u"), |_| ()).is_ok_and(|id| id.trim() == "0");
    if proc::on_path("debootstrap").is_none() || !is_root() {
        return Err("needs `swift` on PATH, or root and debootstrap to fetch Debian's (.ci/run installs debootstrap)");
    }
    Ok(())
}

/// The root folder of a toolchain of our own, fetched when needed; `None` where `swift` is on PATH.
fn toolchain() -> Result<Option<PathBuf>> {
    if proc::on_path("swift").is_some() {
        return Ok(None);
    }
    // A checkout's own, unless several share one.
    let root = std::env::var_os("HOB_SWIFT_ROOT").map_or_else(|| paths::root().join("target/swift-toolchain"), PathBuf::from);
    ui::step("Debian's Swift toolchain (3.3 GB, fetched once)", |step| {
        let mut install = Command::new(script());
        capture(install.arg("install").arg(&root), |line| line.map_or((), |line| step.note(line))).map(|_| ())
    })?;
    Ok(Some(root))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generated() -> String {
        fs::read_to_string(paths::root().join("swift/Sources/HobUniFFI/HobUniFFI.swift")).expect("the generated module")
    }

    /// Generated Swift of a function that cannot fail ends the process when it fails all the same: none may be exported.
    #[test]
    fn every_exported_function_throws() {
        let text = generated();
        // Converters have static functions as well; theirs are four.
        let is_converter = |name: &str| ["lift", "lower", "read", "write"].iter().any(|own| name.starts_with(own));
        let exported = |line: &str| match line.strip_prefix("public static func ") {
            Some(name) => !is_converter(name),
            None => line.starts_with("open func ") || line.starts_with("public func raw"),
        };
        let functions: Vec<&str> = text.lines().map(str::trim).filter(|line| exported(line)).collect();
        assert!(functions.len() > 50, "{}", functions.len());
        for function in functions {
            assert!(function.contains("throws"), "{function}");
        }
    }

    /// What is left that traps: the clone and the release of a handle, and buffers of memory.
    #[test]
    fn nothing_else_traps() {
        let text = generated();
        let traps: Vec<&str> = text.lines().filter(|line| line.contains("try!")).collect();
        let known = |line: &str| ["_fn_clone_", "_fn_free_", "_rustbuffer_"].iter().any(|part| line.contains(part));
        assert!(!traps.is_empty());
        for line in traps {
            assert!(known(line), "{line}");
        }
    }
}
