//! `test`: every suite of the repository, one after the other, and their sum.

use std::{
    env,
    process::Command,
    time::{Duration, Instant},
};

use crate::{
    error::{Error, Result},
    models, paths,
    proc::{self, watch},
    setup,
    tally::{self, Tally},
    ui,
    workspace::{SHUTTLE, Workspace},
};

/// A suite is one line of `SUITES`.
struct Suite {
    name: &'static str,
    about: &'static str,
    /// How to read the counts off a line that the suite prints.
    read: fn(&str) -> Option<Tally>,
    /// The command, or why the suite cannot run here.
    command: fn(&Workspace) -> std::result::Result<Command, &'static str>,
}

const SUITES: &[Suite] = &[
    Suite { name: "rust", about: "unit, golden, real-model and documentation tests", read: tally::cargo, command: rust },
    Suite { name: "shuttle", about: "schedules of the pool, explored", read: tally::cargo, command: shuttle },
    Suite { name: "c", about: "the C ABI: programs, header, layouts, exports, an installed copy", read: tally::cargo, command: c },
    Suite { name: "c-asan", about: "the C ABI under AddressSanitizer, Rust and C", read: tally::cargo, command: c_asan },
    Suite { name: "fuzz", about: "the C ABI fed with structs and messages of any content", read: tally::cargo, command: fuzz },
    Suite { name: "c-tsan", about: "the C ABI under ThreadSanitizer, Rust and C", read: tally::cargo, command: c_tsan },
    Suite { name: "swift", about: "the Swift package: scripted device, real models, examples", read: tally::swift, command: swift },
    Suite { name: "node", about: "the npm package under Node, and packed", read: tally::node, command: node },
    Suite { name: "bun", about: "the npm package under Bun", read: tally::bun, command: bun },
];

fn rust(workspace: &Workspace) -> std::result::Result<Command, &'static str> {
    let mut cargo = proc::cargo();
    cargo.args(["test", "--no-fail-fast"]).args(workspace.everything());
    Ok(cargo)
}

fn shuttle(workspace: &Workspace) -> std::result::Result<Command, &'static str> {
    if !workspace.has_feature("hob", SHUTTLE) {
        return Err("core has no feature `shuttle`");
    }
    let mut cargo = proc::cargo();
    cargo.args(["test", "--no-fail-fast", "--package", "hob", "--features", SHUTTLE, "--test", "*shuttle*"]);
    // Exploring takes optimised code. Only these two are optimised: `--release` would build every dependency once more.
    for package in ["hob", "shuttle"] {
        cargo.args(["--config", &format!("profile.dev.package.{package}.opt-level=2")]);
    }
    Ok(cargo)
}

fn c(_: &Workspace) -> std::result::Result<Command, &'static str> {
    if cfg!(target_os = "linux") { Ok(c_programs(&[])) } else { Err("the C suite runs on Linux only so far") }
}

fn c_asan(_: &Workspace) -> std::result::Result<Command, &'static str> {
    sanitized("address")
}

fn c_tsan(_: &Workspace) -> std::result::Result<Command, &'static str> {
    if !crate::c::has_rust_src() {
        return Err("needs the standard library's source (rustup component add rust-src)");
    }
    sanitized("thread")
}

fn fuzz(_: &Workspace) -> std::result::Result<Command, &'static str> {
    sanitized("address")?;
    if crate::c::fuzz_runtime().is_none() {
        return Err("needs clang's libFuzzer (Debian, Ubuntu: apt-get install libclang-rt-16-dev; .ci/run does)");
    }
    Ok(xtask("fuzz"))
}

fn swift(_: &Workspace) -> std::result::Result<Command, &'static str> {
    crate::swift::available()?;
    let mut command = xtask("swift");
    command.args(["test", "--"]);
    Ok(command)
}

fn sanitized(sanitizer: &'static str) -> std::result::Result<Command, &'static str> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err("the sanitized builds are for x86-64 Linux");
    }
    if proc::on_path(crate::c::CLANG).is_none() {
        return Err("needs clang-16 (Debian, Ubuntu: apt-get install clang-16; .ci/run does)");
    }
    Ok(c_programs(&["--sanitize", sanitizer]))
}

fn node(_: &Workspace) -> std::result::Result<Command, &'static str> {
    npm("node")
}

fn bun(_: &Workspace) -> std::result::Result<Command, &'static str> {
    npm("bun")
}

fn npm(runtime: &str) -> std::result::Result<Command, &'static str> {
    if !crate::npm::available() {
        return Err("needs Node 20 or newer with npm (https://nodejs.org)");
    }
    let mut command = this();
    // The rest is for the runtime's own test runner.
    command.args(["npm", "test", runtime, "--"]);
    Ok(command)
}

/// This program again, with the verb that runs the C programs.
fn c_programs(arguments: &[&str]) -> Command {
    let mut command = xtask("c");
    command.args(arguments);
    command
}

fn xtask(verb: &str) -> Command {
    let mut command = this();
    command.arg(verb);
    command
}

fn this() -> Command {
    let mut command = Command::new(env::current_exe().unwrap_or_else(|_| "xtask".into()));
    command.current_dir(paths::root());
    command
}

enum End {
    Passed,
    Failed,
    Skipped(&'static str),
}

struct Outcome {
    name: &'static str,
    tally: Tally,
    time: Duration,
    end: End,
}

/// Runs all suites, or the one named; `extra` is handed to each command.
pub(crate) fn run(name: Option<&str>, extra: &[String]) -> Result<()> {
    let chosen = choose(SUITES, name)?;
    setup::ensure()?;
    let places = models::ensure(None)?;
    let workspace = Workspace::read()?;
    let mut outcomes = Vec::new();
    for suite in chosen {
        println!("\n== {}: {} ==", suite.name, suite.about);
        let start = Instant::now();
        let mut tally = Tally::default();
        let end = match (suite.command)(&workspace) {
            Err(reason) => {
                println!("skipped: {reason}");
                End::Skipped(reason)
            }
            Ok(mut command) => {
                command.args(extra).env("HOB_MODELS", paths::models());
                if let Some(reranker) = &places.reranker {
                    command.env("HOB_RERANKER", reranker);
                }
                let ok = watch(&mut command, |line| tally.add((suite.read)(line)))?;
                if ok && tally.failed == 0 { End::Passed } else { End::Failed }
            }
        };
        if matches!(end, End::Failed) && tally.failed == 0 {
            // It did not build or did not end: that is a failure too, though no test says so.
            tally.failed = 1;
        }
        outcomes.push(Outcome { name: suite.name, tally, time: start.elapsed(), end });
    }
    let total = report(&outcomes);
    if total.failed > 0 {
        return Err(Error::new("not all tests passed").mend(again(&outcomes)));
    }
    if total.passed == 0 {
        return Err(Error::new("no test ran"));
    }
    Ok(())
}

fn choose(suites: &'static [Suite], name: Option<&str>) -> Result<Vec<&'static Suite>> {
    let Some(name) = name else { return Ok(suites.iter().collect()) };
    match suites.iter().find(|suite| suite.name == name) {
        Some(suite) => Ok(vec![suite]),
        None => {
            let names: Vec<&str> = suites.iter().map(|suite| suite.name).collect();
            Err(Error::new(format!("no suite is called `{name}`")).mend(format!("name one of: {}", names.join(", "))))
        }
    }
}

fn report(outcomes: &[Outcome]) -> Tally {
    println!("\n{:<10} {:>7} {:>7} {:>8} {:>12}", "suite", "passed", "failed", "skipped", "time");
    let mut total = Tally::default();
    for Outcome { name, tally, time, end } in outcomes {
        let note = match end {
            End::Passed => String::new(),
            End::Failed => "  FAILED".to_owned(),
            End::Skipped(reason) => format!("  skipped: {reason}"),
        };
        println!("{name:<10} {:>7} {:>7} {:>8} {:>12}{note}", tally.passed, tally.failed, tally.skipped, ui::seconds(*time));
        total.add(Some(*tally));
    }
    // CI reads this line: its shape is fixed.
    println!("\n{} passed, {} failed, {} skipped", total.passed, total.failed, total.skipped);
    total
}

fn again(outcomes: &[Outcome]) -> String {
    let failed: Vec<String> = outcomes
        .iter()
        .filter(|outcome| matches!(outcome.end, End::Failed))
        .map(|outcome| format!("`cargo xtask test --suite {}`", outcome.name))
        .collect();
    let quiet = if env::var_os("RUST_BACKTRACE").is_some() { "" } else { "; RUST_BACKTRACE=1 shows where a test panicked" };
    format!("the lines above name what failed; {} runs it alone{quiet}", failed.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_suites_or_the_named_one() {
        assert_eq!(choose(SUITES, None).map(|all| all.len()).ok(), Some(SUITES.len()));
        let one = choose(SUITES, Some("shuttle")).expect("in the table");
        assert_eq!(one.iter().map(|suite| suite.name).collect::<Vec<_>>(), ["shuttle"]);
        let error = choose(SUITES, Some("nope")).err().expect("not in the table").to_string();
        assert!(error.contains("rust, shuttle"), "{error}");
    }

    #[test]
    fn names_are_unique() {
        for (index, suite) in SUITES.iter().enumerate() {
            assert!(SUITES[..index].iter().all(|other| other.name != suite.name), "{}", suite.name);
        }
    }
}
