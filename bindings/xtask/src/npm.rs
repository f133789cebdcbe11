//! `npm`: the addon of the package `hob` and its generated types; the package built, tested, and packed.

mod dist;
mod types;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{self, Command},
};

use crate::{
    error::{At, Error, Result},
    paths,
    proc::{self, capture, open},
    setup,
    store::Lock,
    ui,
    workspace::Workspace,
};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Step {
    /// Lay out and pack what is published: the main package, and this platform's with the addon and MLX
    Dist {
        /// Where to [default: npm-dist in the target folder]
        folder: Option<PathBuf>,
        /// Without optimisation: for tests
        #[arg(long)]
        dev: bool,
    },
    /// One suite of `test`: the package under Node or Bun
    #[command(hide = true)]
    Test {
        #[arg(value_enum)]
        runtime: Runtime,
        /// Handed to the test runner
        #[arg(last = true)]
        extra: Vec<String>,
    },
    /// Write the addon's types anew, without Node
    #[command(hide = true)]
    Types,
    /// Measure the binding: what a call costs over the same call from Rust
    Bench {
        /// Under Bun
        #[arg(long)]
        bun: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Runtime {
    Node,
    Bun,
}

/// The package's folder.
fn folder() -> PathBuf {
    paths::root().join("npm")
}

/// The addon's generated types, committed.
pub(crate) const TYPES: &str = "npm/src/native.ts";

pub(crate) fn run(step: Option<&Step>) -> Result<()> {
    setup::ensure()?;
    match step {
        None => {
            addon(false)?;
            build()?;
            println!("npm: the addon is npm/native, its types {TYPES}, the package's code npm/dist");
            Ok(())
        }
        Some(Step::Dist { folder, dev }) => dist::run(folder.as_deref(), *dev),
        Some(Step::Types) => addon(false).map(|_| ()),
        Some(Step::Test { runtime, extra }) => test(*runtime, extra),
        Some(Step::Bench { bun }) => {
            let built = addon(true)?;
            build()?;
            let examples = ["build", "--package", "hob-napi", "--release", "--examples"];
            ui::step("the Rust side", |_| capture(proc::cargo().args(examples), |_| ()))?;
            let examples = built.join("examples");
            let floor = examples.join(library().replace("hob_napi", "floor"));
            let node = if *bun { "node_modules/.bin/bun" } else { "node" };
            open(Command::new(node).arg("bench/run.mjs").arg(examples.join("without_js")).arg(floor).current_dir(folder()))
        }
    }
}

/// The package with the addon as it is published, for benchmarks; returns its folder.
pub(crate) fn optimised() -> Result<PathBuf> {
    addon(true)?;
    build()?;
    Ok(folder())
}

/// Builds the addon, puts it where the package's loader looks first, and writes its types. Returns the folder of the build.
fn addon(release: bool) -> Result<PathBuf> {
    let target = Workspace::read()?.target_directory()?;
    let _lock = Lock::take(&target, "npm")?;
    // The generator only speaks when the crate is compiled, and cargo compiles it anew for a folder it has not seen.
    let spoken = target.join(format!("napi-types-{}", process::id()));
    fs::create_dir_all(&spoken).at("make", &spoken)?;
    let built = ui::step(if release { "the addon, optimised" } else { "the addon" }, |step| {
        let mut cargo = proc::cargo();
        cargo.env("NAPI_TYPE_DEF_TMP_FOLDER", &spoken);
        if release {
            // Debug information is three quarters of the file (59 MB with it, 13 without). Only this crate is told: a profile of its own would build all anew.
            cargo.args(["rustc", "--package", "hob-napi", "--lib", "--release", "--", "-C", "strip=debuginfo"]);
        } else {
            cargo.args(["build", "--package", "hob-napi"]);
        }
        capture(&mut cargo, |line| line.map_or((), |line| step.note(line)))
    });
    let lines = built.and_then(|_| types::read(&spoken.join("hob-napi")));
    fs::remove_dir_all(&spoken).at("remove", &spoken)?;
    let types = paths::root().join(TYPES);
    write_if_new(&types, &types::file(&lines?)?)?;
    let built = target.join(if release { "release" } else { "debug" });
    let native = folder().join("native");
    fs::create_dir_all(&native).at("make", &native)?;
    let (from, to) = (built.join(library()), native.join(format!("hob.{}.node", platform()?)));
    // Replaced, never written into: a running test may have it mapped.
    let fresh = to.with_extension("new");
    fs::copy(&from, &fresh).at("copy", &from)?;
    fs::rename(&fresh, &to).at("rename", &fresh)?;
    Ok(built)
}

fn library() -> &'static str {
    if cfg!(target_os = "macos") { "libhob_napi.dylib" } else { "libhob_napi.so" }
}

/// As the loader spells it.
fn platform() -> Result<&'static str> {
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        Ok("linux-x64-gnu")
    } else if cfg!(all(target_os = "macos", target_arch = "aarch64")) {
        Ok("darwin-arm64")
    } else {
        Err(Error::new("the addon is built on x86-64 Linux and arm64 macOS only"))
    }
}

/// The package's JavaScript and declarations, in npm/dist.
fn build() -> Result<()> {
    dependencies(&folder())?;
    ui::step("npm: compile", |_| compile(&folder(), "tsconfig.json", "dist"))
}

/// Runs the TypeScript compiler, into a folder that holds nothing older.
fn compile(folder: &Path, project: &str, to: &str) -> Result<()> {
    let to = folder.join(to);
    if to.exists() {
        fs::remove_dir_all(&to).at("empty", &to)?;
    }
    let mut tsc = Command::new("node");
    tsc.args(["node_modules/typescript-7/bin/tsc", "--project", project]).current_dir(folder);
    capture(&mut tsc, |_| ()).map(|_| ())
}

/// What is exported is reachable and every link goes somewhere: typedoc without a warning. It needs the TypeScript before 7, which
/// is written in JavaScript; so there are two.
fn documented(folder: &Path) -> Result<()> {
    let mut typedoc = Command::new("node");
    // Links to sources want a git remote, which a checkout need not have.
    let quiet = ["--emit", "none", "--logLevel", "Warn", "--disableSources"];
    typedoc.arg("node_modules/typedoc/bin/typedoc").args(quiet).current_dir(folder);
    capture(&mut typedoc, |_| ()).map(|_| ())
}

/// What package-lock.json names, when it is not there yet.
fn dependencies(folder: &Path) -> Result<()> {
    node()?;
    let (lock, installed) = (folder.join("package-lock.json"), folder.join("node_modules/.package-lock.json"));
    let time = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
    if time(&installed).is_some_and(|installed| time(&lock).is_some_and(|lock| installed >= lock)) {
        return Ok(());
    }
    ui::step("npm: packages", |step| {
        let mut npm = Command::new("npm");
        npm.args(["ci", "--no-audit", "--no-fund"]).current_dir(folder);
        capture(&mut npm, |line| line.map_or((), |line| step.note(line))).map(|_| ())
    })
}

/// The oldest Node that the package is for.
const NODE: u32 = 20;

fn node() -> Result<()> {
    let mend = format!("install Node {NODE} or newer, with npm (https://nodejs.org; Debian: apt-get install nodejs npm)");
    let version = capture(Command::new("node").arg("--version"), |_| ()).map_err(|error| error.mend(mend.clone()))?;
    let major: Option<u32> = version.trim().strip_prefix('v').and_then(|rest| rest.split('.').next()?.parse().ok());
    if major.is_some_and(|major| major >= NODE) {
        return Ok(());
    }
    Err(Error::new(format!("Node {} is too old", version.trim())).mend(mend))
}

/// Whether Node and npm are here at all; a suite without them is skipped.
pub(crate) fn available() -> bool {
    proc::on_path("npm").is_some() && node().is_ok()
}

fn test(runtime: Runtime, extra: &[String]) -> Result<()> {
    let packed = Workspace::read()?.target_directory()?.join("npm-test");
    match runtime {
        // The archives are installed by npm, which is Node's.
        Runtime::Node => dist::run(Some(&packed), true)?,
        Runtime::Bun => {
            addon(false)?;
            build()?;
        }
    }
    let home = folder();
    if runtime == Runtime::Node {
        ui::step("npm: documentation", |_| documented(&home))?;
    }
    ui::step("npm: compile the tests", |_| compile(&home, "test/tsconfig.json", "build"))?;
    let tests = home.join("build/test");
    let mut files: Vec<String> = fs::read_dir(&tests)
        .at("read", &tests)?
        .flatten()
        .map(|entry| format!("./build/test/{}", entry.file_name().to_string_lossy()))
        .filter(|name| name.ends_with(".test.mjs"))
        .collect();
    files.sort();
    let mut command = match runtime {
        Runtime::Node => {
            let mut node = Command::new("node");
            node.args(["--expose-gc", "--test", "--test-reporter=spec", "--test-concurrency=1", "--test-timeout=300000"]);
            node
        }
        Runtime::Bun => {
            // Bun tells its counts on standard error; they are read off standard output.
            let mut bun = Command::new("sh");
            bun.args(["-c", "exec \"$@\" 2>&1", "sh", "node_modules/.bin/bun", "test", "--timeout", "300000"]);
            bun
        }
    };
    command.args(extra).args(files).current_dir(&home).env("HOB_NPM_DIST", packed);
    open(&mut command)
}

fn write_if_new(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::write(path, text).at("write", path)
}
