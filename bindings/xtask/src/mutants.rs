//! `mutants`: breaks Hob on purpose, one change at a time, and sees that a test notices. Not part of CI: it takes long.
//!
//! Two kinds: *scripted* ones, named in tests/mutants/scripted.json (among them the seeds' thirty-eight), and *generated* ones
//! of cargo-mutants. Both run in copies under target/mutants, never in the working tree. The pool is copied into a crate of
//! its own, which builds in seconds because the pool knows no models; the owner protocol needs the whole workspace.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    error::{At, Error, Result},
    paths,
    proc::{self, capture, open},
    setup,
    store::Lock,
    ui,
};

const VERSION: &str = "27.1.0";
const SCRIPTED: &str = "tests/mutants/scripted.json";
/// What cargo-mutants leaves out, with reasons.
const CONFIG: &str = "tests/mutants/cargo-mutants.toml";
/// A change that makes the tests hang counts as noticed.
const PATIENCE: Duration = Duration::from_secs(240);

pub(crate) struct Options {
    pub(crate) scripted: bool,
    pub(crate) generated: bool,
    pub(crate) only: Option<String>,
    pub(crate) shard: Option<String>,
    pub(crate) extra: Vec<String>,
}

/// One scripted change.
struct Mutant {
    name: String,
    file: String,
    find: String,
    replace: String,
    /// Test targets that must notice; the place's own where none are named.
    tests: Vec<String>,
}

/// A copy that may be broken.
struct Place {
    root: PathBuf,
    build: PathBuf,
    package: &'static str,
    /// Turns a path of the repository into one of the copy.
    inside: fn(&str) -> Option<&str>,
    tests: Vec<String>,
    /// What cargo-mutants changes.
    generated: &'static [&'static str],
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let folder = paths::root().join("target/mutants");
    let _lock = Lock::take(&folder, "mutants")?;
    let both = options.scripted == options.generated;
    let mut missed = Vec::new();
    if options.scripted || both {
        missed.extend(scripted(&folder, options)?);
    }
    if options.generated || both {
        missed.extend(generated(&folder, options)?);
    }
    if missed.is_empty() {
        println!("every change was noticed");
        return Ok(());
    }
    Err(Error::new(format!("no test noticed: {}", missed.join("; ")))
        .mend(format!("write the test that does, or list the change with its reason ({SCRIPTED}, {CONFIG})")))
}

// ---- the copies ----

/// The pool and what it stands on, as a crate of its own.
fn pool(folder: &Path) -> Result<Place> {
    const SOURCES: [&str; 6] = ["cancel.rs", "clock.rs", "error.rs", "sync.rs", "pool.rs", "pool"];
    const LIB: &str = "//! The pool alone.\npub mod cancel;\npub mod clock;\npub mod error;\npub mod pool;\nmod sync;\n\
        pub use cancel::{CancelReason, CancelToken, Cancelled};\npub use clock::{BoxFuture, Clock, FakeClock, SystemClock};\n\
        pub use error::{Error, ErrorKind, Result};\npub use pool::{IdlePolicy, Key, Kind, Lease, NoRoom, Pool, PoolOptions};\n";
    const NEEDS: [&str; 9] =
        ["dashmap", "futures-core", "parking_lot", "proptest", "serde", "serde_json", "tempfile", "tokio", "tracing"];
    let (core, root) = (paths::root().join("core"), folder.join("pool"));
    for part in ["src", "tests"] {
        clear(&root.join(part))?;
    }
    for source in SOURCES {
        copy(&core.join("src").join(source), &root.join("src").join(source))?;
    }
    write(&root.join("src/lib.rs"), LIB)?;
    let tests = core.join("tests");
    let mut all = String::from("#![allow(clippy::duplicate_mod)]\n");
    for entry in fs::read_dir(&tests).at("read", &tests)? {
        let name = entry.at("read", &tests)?.file_name().to_string_lossy().into_owned();
        if !name.starts_with("pool_") {
            continue;
        }
        copy(&tests.join(&name), &root.join("tests").join(&name))?;
        if let Some(stem) = name.strip_suffix(".rs").filter(|stem| *stem != "pool_shuttle") {
            all.push_str(&format!("#[path = \"{name}\"]\nmod {stem};\n"));
        }
    }
    write(&root.join("tests/all.rs"), &all)?;
    let manifest = core.join("Cargo.toml");
    let manifest = fs::read_to_string(&manifest).at("read", &manifest)?;
    let (_, dependencies) = manifest.split_once("[dependencies]").unwrap_or_default();
    let mut text = String::from(
        "[package]\nname = \"hob\"\nversion = \"0.0.0\"\nedition = \"2024\"\npublish = false\nautotests = false\n\n[workspace]\n\n\
         [features]\nshuttle = [\"dep:shuttle\"]\n\n[[test]]\nname = \"all\"\n\n[[test]]\nname = \"pool_shuttle\"\n\
         required-features = [\"shuttle\"]\n\n[profile.dev.package.\"*\"]\nopt-level = 2\ndebug = false\n\n[dependencies]\n",
    );
    for need in NEEDS.into_iter().chain(["shuttle"]) {
        let line = dependencies.lines().find(|line| line.split(['=', ' ', '.']).next() == Some(need));
        let line = line.ok_or_else(|| Error::new(format!("core/Cargo.toml does not name {need} any more")))?;
        text.push_str(line);
        text.push('\n');
    }
    write(&root.join("Cargo.toml"), &text)?;
    copy(&paths::root().join("Cargo.lock"), &root.join("Cargo.lock"))?;
    Ok(Place {
        root,
        build: folder.join("build-pool"),
        package: "hob",
        inside: |path| path.strip_prefix("core/").filter(|path| path.starts_with("src/pool") || path.starts_with("src/clock")),
        tests: vec!["all".to_owned()],
        generated: &["src/pool.rs", "src/pool/*.rs"],
    })
}

/// The whole workspace, as git knows it.
fn workspace(folder: &Path) -> Result<Place> {
    setup::ensure()?;
    let root = folder.join("workspace");
    let listed = capture(
        Command::new("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]).current_dir(paths::root()),
        |_| (),
    )?;
    for part in ["core", "bindings", "ffi"] {
        clear(&root.join(part))?;
    }
    for file in listed.lines().filter(|file| paths::root().join(file).is_file()) {
        copy(&paths::root().join(file), &root.join(file))?;
    }
    // .cargo/config.toml includes the native parts by their place beside it.
    for part in [paths::native(), paths::models()] {
        let link = root.join("target").join(part.file_name().unwrap_or_default());
        fs::create_dir_all(root.join("target")).at("create", &root)?;
        #[cfg(unix)]
        if part.exists() && !link.exists() {
            std::os::unix::fs::symlink(&part, &link).at("link", &link)?;
        }
    }
    let tests =
        ["engine_owner", "engine_fake"].into_iter().filter(|test| root.join("core/tests").join(test).with_extension("rs").exists());
    let tests = tests.map(str::to_owned).collect();
    Ok(Place {
        root,
        build: folder.join("build-workspace"),
        package: "hob",
        inside: |path| Some(path),
        tests,
        generated: &["core/src/engine/residency.rs"],
    })
}

impl Place {
    fn cargo(&self) -> Command {
        let mut cargo = proc::cargo();
        self.settle(&mut cargo);
        cargo
    }

    fn settle(&self, command: &mut Command) {
        command.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.build).env("RUST_BACKTRACE", "0");
        // Enough to notice, many times over.
        command.env("HOB_PROPTEST_CASES", "150").env("HOB_SHUTTLE_SCHEDULES", "1000");
    }

    fn arguments<'a>(&self, test: &'a str) -> Vec<&'a str> {
        let mut arguments = vec!["test", "--quiet", "--package", self.package, "--test", test];
        match test {
            "pool_shuttle" => arguments.extend(["--features", "shuttle"]),
            "all" => arguments.push("--lib"),
            _ => {}
        }
        arguments
    }

    /// Whether the named tests pass; None where they do not build.
    fn passes(&self, tests: &[String]) -> Result<Option<bool>> {
        for test in tests {
            let arguments = self.arguments(test);
            let build = self.cargo().args(&arguments).arg("--no-run").stdout(Stdio::null()).stderr(Stdio::null()).status();
            if !build.at("run cargo in", &self.root)?.success() {
                return Ok(None);
            }
            if !patiently(self.cargo().args(&arguments))? {
                return Ok(Some(false));
            }
        }
        Ok(Some(true))
    }
}

/// Whether the command ends well, and in time.
fn patiently(command: &mut Command) -> Result<bool> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    let mut child = command.spawn().map_err(|error| Error::new(format!("cannot start cargo: {error}")))?;
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(|error| Error::new(format!("cannot wait for cargo: {error}")))? {
            return Ok(status.success());
        }
        if started.elapsed() > PATIENCE {
            // The whole group: what hangs is the test that cargo started.
            let _ = Command::new("kill").args(["-9", "--", &format!("-{}", child.id())]).status();
            let _ = child.kill();
            let _ = child.wait();
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

// ---- scripted ----

fn scripted(folder: &Path, options: &Options) -> Result<Vec<String>> {
    let path = paths::root().join(SCRIPTED);
    let mut mutants = parse(&fs::read_to_string(&path).at("read", &path)?)?;
    // Before anything is built: a script that went stale tests nothing.
    let stale: Vec<String> = mutants.iter().filter_map(|mutant| stale(paths::root(), mutant)).collect();
    if !stale.is_empty() {
        return Err(Error::new("some scripted changes do not apply any more")
            .output(stale)
            .mend(format!("bring {SCRIPTED} up to date")));
    }
    mutants.retain(|mutant| options.only.as_deref().is_none_or(|only| mutant.name.contains(only) || mutant.file.contains(only)));
    let mut missed = Vec::new();
    for make in [pool, workspace] {
        if mutants.is_empty() {
            break;
        }
        let place = make(folder)?;
        let (here, rest): (Vec<_>, Vec<_>) = mutants.into_iter().partition(|mutant| (place.inside)(&mutant.file).is_some());
        mutants = rest;
        if here.is_empty() {
            continue;
        }
        for test in &place.tests {
            println!("{test}, unchanged:");
            // In the open: what fails here is not a mutant.
            open(place.cargo().args(place.arguments(test)))?;
        }
        for mutant in here {
            let tests = if mutant.tests.is_empty() { &place.tests } else { &mutant.tests };
            let target = place.root.join((place.inside)(&mutant.file).unwrap_or(&mutant.file));
            let whole = fs::read_to_string(&target).at("read", &target)?;
            fs::write(&target, whole.replacen(&mutant.find, &mutant.replace, 1)).at("write", &target)?;
            let started = Instant::now();
            let result = place.passes(tests);
            fs::write(&target, whole).at("write", &target)?;
            let verdict = match result? {
                Some(false) => "noticed",
                Some(true) => "MISSED",
                None => return Err(Error::new(format!("`{}` does not compile", mutant.name)).mend(format!("mend {SCRIPTED}"))),
            };
            println!("{verdict:8} {} ({})", mutant.name, ui::seconds(started.elapsed()));
            if verdict == "MISSED" {
                missed.push(mutant.name);
            }
        }
    }
    Ok(missed)
}

fn parse(text: &str) -> Result<Vec<Mutant>> {
    let wrong = |what: String| Error::new(format!("{SCRIPTED}: {what}"));
    let value: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let mut mutants: Vec<Mutant> = Vec::new();
    for entry in value["mutants"].as_array().into_iter().flatten() {
        let field =
            |name: &str| entry[name].as_str().map(str::to_owned).ok_or_else(|| wrong(format!("`{name}` is missing in {entry}")));
        let tests = entry["tests"].as_array().into_iter().flatten().filter_map(|test| test.as_str().map(str::to_owned)).collect();
        let mutant = Mutant { name: field("name")?, file: field("file")?, find: field("find")?, replace: field("replace")?, tests };
        if mutants.iter().any(|other| other.name == mutant.name) {
            return Err(wrong(format!("two are called `{}`", mutant.name)));
        }
        mutants.push(mutant);
    }
    Ok(mutants)
}

fn stale(root: &Path, mutant: &Mutant) -> Option<String> {
    let text = fs::read_to_string(root.join(&mutant.file)).unwrap_or_default();
    let count = text.matches(&mutant.find).count();
    (count != 1).then(|| format!("`{}`: its text is {count} times in {}, not once", mutant.name, mutant.file))
}

// ---- generated ----

fn generated(folder: &Path, options: &Options) -> Result<Vec<String>> {
    let tool = install()?;
    let mut missed = Vec::new();
    for make in [pool, workspace] {
        let place = make(folder)?;
        let mut command = Command::new(&tool);
        place.settle(&mut command);
        command.args(["mutants", "--in-place", "--no-shuffle", "--package", place.package, "--config"]);
        command.arg(paths::root().join(CONFIG)).arg("--dir").arg(&place.root).arg("--output").arg(&place.build);
        for file in place.generated {
            command.args(["--file", file]);
        }
        if let Some(shard) = &options.shard {
            command.args(["--shard", shard]);
        }
        command.args(&options.extra).arg("--").args(["--lib"]);
        for test in &place.tests {
            command.args(["--test", test]);
        }
        if let Err(error) = open(&mut command) {
            eprintln!("{error}");
            missed.push(format!("see {}", place.build.join("mutants.out/missed.txt").display()));
        }
    }
    Ok(missed)
}

fn install() -> Result<PathBuf> {
    let tools = paths::root().join("target/tools");
    let tool = tools.join("bin/cargo-mutants");
    let found = Command::new(&tool).args(["mutants", "--version"]).output();
    if !found.is_ok_and(|found| String::from_utf8_lossy(&found.stdout).contains(VERSION)) {
        ui::step(&format!("cargo-mutants {VERSION}"), |step| {
            let mut cargo = proc::cargo();
            cargo.args(["install", "cargo-mutants", "--locked", "--force", "--version", VERSION, "--root"]).arg(&tools);
            capture(&mut cargo, |line| line.into_iter().for_each(|line| step.note(line))).map(|_| ())
        })?;
    }
    Ok(tool)
}

// ---- files ----

fn clear(folder: &Path) -> Result<()> {
    if folder.exists() { fs::remove_dir_all(folder).at("clear", folder) } else { Ok(()) }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if from.is_dir() {
        for entry in fs::read_dir(from).at("read", from)? {
            let name = entry.at("read", from)?.file_name();
            copy(&from.join(&name), &to.join(&name))?;
        }
        return Ok(());
    }
    let text = fs::read(from).at("read", from)?;
    // Untouched where nothing changed, so that cargo builds nothing for it.
    if fs::read(to).is_ok_and(|there| there == text) {
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).at("create", parent)?;
    }
    fs::write(to, text).at("write", to)
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).at("create", parent)?;
    }
    fs::write(path, text).at("write", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scripted_change_applies_exactly_once() {
        let path = paths::root().join(SCRIPTED);
        let mutants = parse(&fs::read_to_string(path).unwrap()).unwrap();
        let stale: Vec<String> = mutants.iter().filter_map(|mutant| stale(paths::root(), mutant)).collect();
        assert_eq!(stale, Vec::<String>::new());
        assert!(mutants.iter().all(|mutant| mutant.find != mutant.replace));
    }

    #[test]
    fn all_thirty_eight_of_the_seeds_are_there_or_have_their_reason() {
        let text = fs::read_to_string(paths::root().join(SCRIPTED)).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        let mut seeds: Vec<u64> = Vec::new();
        for entry in value["mutants"].as_array().unwrap().iter().chain(value["not_applicable"].as_array().unwrap()) {
            seeds.extend(entry["seeds"].as_array().into_iter().flatten().filter_map(Value::as_u64));
        }
        assert!(value["not_applicable"].as_array().unwrap().iter().all(|entry| entry["reason"].is_string()));
        let missing: Vec<u64> = (1..=38).filter(|seed| !seeds.contains(seed)).collect();
        assert_eq!(missing, Vec::<u64>::new());
    }

    #[test]
    fn a_script_that_is_not_complete_is_refused() {
        assert!(parse(r#"{"mutants": [{"name": "x", "file": "y", "find": "z"}]}"#).is_err());
        assert!(parse("not json").is_err());
    }
}
