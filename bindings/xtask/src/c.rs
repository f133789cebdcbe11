//! The C programs of tests/c: built against a laid-out folder and run, plainly or with a sanitizer in both C and Rust.

mod fuzz;
mod generate;
mod install;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

pub(crate) use fuzz::{run as fuzz, runtime as fuzz_runtime};

use crate::{
    dist,
    error::{At, Error, Result},
    header, paths,
    proc::{self, capture, open},
    workspace::Workspace,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Sanitizer {
    Address,
    Thread,
}

impl Sanitizer {
    fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Thread => "thread",
        }
    }

    /// As in the names of its runtime and symbols.
    fn short(self) -> &'static str {
        match self {
            Self::Address => "asan",
            Self::Thread => "tsan",
        }
    }
}

/// clang's major version of the sanitized builds: what Debian 12 has.
pub(crate) const CLANG: &str = "clang-16";

const STRICT: &[&str] = &["-g", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"];
const C: &[&str] = &["-std=c99", "-x", "c"];
const CPP: &[&str] = &["-std=c++17", "-x", "c++"];

/// How the programs are compiled and linked.
struct Build {
    sanitizer: Option<Sanitizer>,
    /// Where programs go.
    folder: PathBuf,
    /// For the compiler.
    compile: Vec<String>,
    /// For the linker: a step of its own, because clang would add a runtime beside rustc's.
    link: Vec<String>,
}

/// Runs all programs; prints each test and the sum as cargo does.
pub(crate) fn run(sanitizer: Option<Sanitizer>) -> Result<()> {
    // `test` has run `setup`; a folder with links to another checkout's native parts must not.
    let target = Workspace::read()?.target_directory()?;
    let build = match sanitizer {
        None => plain(&target)?,
        Some(sanitizer) => sanitized(sanitizer, &target, sanitizer.short())?,
    };
    let mut score = Score::default();
    let header = header::header_path();
    let header = fs::read_to_string(&header).at("read", &header)?;
    let generated =
        [("layout", generate::layout(&header)?), ("nulls", generate::nulls(&header)?), ("panics", generate::panics(&header)?)];
    for (name, text) in generated {
        let source = build.folder.join(format!("{name}.c"));
        fs::write(&source, text).at("write", &source)?;
    }
    let source = |name: &str| paths::root().join("tests/c").join(format!("{name}.c"));
    let models = paths::root().join("tests/golden/models");
    let model = |name: &str| models.join(name).to_string_lossy().into_owned();
    let (embedder, reranker, chat) = (model("bert-mean"), model("bert-rerank-1"), model("llama-q4"));

    for name in ["options", "handles", "pool", "faults", "text", "extremes"] {
        let program = build.program(name, &source(name), C)?;
        score.tests(name, &build.command(&program, &[]));
    }
    for name in ["nulls", "panics"] {
        let program = build.program(name, &build.folder.join(format!("{name}.c")), C)?;
        score.tests(name, &build.command(&program, &[]));
    }
    let interrupt = build.program("interrupt", &source("interrupt"), C)?;
    score.one("ctrl_c_ends_a_chat_with_what_there_is", || interrupted(&build.command(&interrupt, &["chat", "Hi"])));
    let encode = build.program("embed_rerank", &source("embed_rerank"), C)?;
    let exit = build.program("exit", &source("exit"), C)?;
    if sanitizer.is_some() {
        // MLX is not instrumented: the scripted device serves.
        score.tests("embed_rerank", &build.command(&encode, &[]));
        score.one("exits_with_live_handles", || exits(&build, &exit, &[None], 12));
        let (name, places): (_, &[_]) = match sanitizer {
            Some(Sanitizer::Thread) => ("race", &["c", "rust"]),
            _ => ("misuse", &["c", "rust", "twice"]),
        };
        let misuse = build.program(name, &source(name), C)?;
        score.one("misuse_is_seen_in_c_and_in_rust", || misused(&build, &misuse, places));
    } else {
        score.tests("embed_rerank", &build.command(&encode, &[&embedder, &reranker]));
        score.one("exits_with_live_handles", || exits(&build, &exit, &[None, Some(&chat)], 100));
        let smoke = build.program("smoke", &source("smoke"), C)?;
        score.one("smoke", || output(&build.command(&smoke, &[&embedder, &chat]), &["2 vectors of 32 numbers", "16 tokens"]));
        let program = build.program("chat", &source("chat"), C)?;
        score.one("chat", || output(&build.command(&program, &[&chat, "Is \"this\" it?"]), &["tokens/s"]));
        for (name, language, compiler) in [("c99", C, "cc"), ("cpp17", CPP, "c++")] {
            score.one(&format!("header_is_clean_{name}"), || {
                build.compile("headers", &source("headers"), language, compiler).map(|_| ())
            });
        }
        let layout = build.program("layout", &build.folder.join("layout.c"), C)?;
        score.one("layouts_and_initial_values", || layouts(&build.command(&layout, &[])));
        score.one("a_client_of_the_first_header_runs", || old_client(&build.folder.join("dist/lib")));
        score.one("exports", || exports(&build.folder.join("dist/lib/libhob.so")));
        score.one("readme_shows_the_first_program", || readme(&source("smoke")));
        score.one("installed_elsewhere", || install::check(&build.folder, &[&embedder, &chat]));
    }
    score.close()
}

fn plain(target: &Path) -> Result<Build> {
    open(proc::cargo().args(["build", "--quiet", "--package", "hob-ffi"]))?;
    let folder = empty(&target.join("c/plain"))?;
    dist::lay_out(&target.join("debug"), &folder.join("dist"))?;
    Ok(against(&folder))
}

/// chat.c, interrupted in the middle: what there was is shown, the end is told, and the exit code says so.
fn interrupted(command: &Command) -> Result<()> {
    let output = ended(command)?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let whole = "Hello there";
    if output.status.code() == Some(130)
        && whole.starts_with(&*out)
        && (1..whole.len()).contains(&out.len())
        && err.contains("\nstopped, ")
    {
        return Ok(());
    }
    let lines = out.lines().chain(err.lines()).map(str::to_owned).collect::<Vec<_>>();
    Err(Error::new(format!("an interrupted chat ended with {}", output.status)).output(lines))
}

/// The committed binary of tests/c/old, which was compiled against the first header of this ABI, on the library of today.
fn old_client(lib: &Path) -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        println!("the old client is a program for x86-64");
        return Ok(());
    }
    let old = paths::root().join("tests/c/old");
    let told = old.join("client-abi1.txt");
    let wanted = fs::read_to_string(&told).at("read", &told)?;
    let mut command = Command::new(old.join("client-abi1-x86_64-linux-gnu"));
    let output = capture(command.env("LD_LIBRARY_PATH", lib), |_| ())?;
    if output != wanted {
        return Err(Error::new("the old client does not say what it said at its time").output(output.lines().map(str::to_owned)));
    }
    // Its structs are those of then: each has grown since, or is the same.
    let layout = paths::root().join("tests/c/layout.txt");
    let layout = fs::read_to_string(&layout).at("read", &layout)?;
    let sizes = |text: &str| -> std::collections::HashMap<String, u64> {
        text.lines()
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(name, size)| Some((name.to_owned(), size.parse().ok()?)))
            .collect()
    };
    let (then, now) = (sizes(&wanted), sizes(&layout));
    let shrunk = then.iter().filter(|(name, size)| now.get(*name).is_none_or(|now| now < *size)).map(|(name, _)| name.clone());
    let shrunk: Vec<String> = shrunk.collect();
    if shrunk.is_empty() && then.len() > 10 { Ok(()) } else { Err(Error::new("structs became smaller").output(shrunk)) }
}

/// Programs in `folder`, linked to the library laid out in its `dist`.
fn against(folder: &Path) -> Build {
    let (include, lib) = (folder.join("dist/include"), folder.join("dist/lib"));
    let link = vec![format!("-L{}", lib.display()), "-lhob".to_owned(), format!("-Wl,-rpath,{0},-rpath-link,{0}", lib.display())];
    Build { sanitizer: None, folder: folder.to_owned(), compile: vec![format!("-I{}", include.display())], link }
}

/// The programs go into `c/<name>` of the target folder.
fn sanitized(sanitizer: Sanitizer, target: &Path, name: &str) -> Result<Build> {
    const TRIPLE: &str = "x86_64-unknown-linux-gnu";
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Err(Error::new("the sanitized builds are for x86-64 Linux"));
    }
    let (short, own) = (sanitizer.short(), target.join(sanitizer.short()));
    let mut flags = format!("-Zsanitizer={} -Cforce-frame-pointers=yes", sanitizer.name());
    if sanitizer == Sanitizer::Address {
        // One build serves the programs and the fuzzer.
        flags.push_str(fuzz::COVERAGE);
    }
    let mut cargo = proc::cargo();
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", flags).args(["rustc", "--quiet", "--package", "hob-ffi", "--lib"]);
    cargo.args(["--crate-type", "staticlib", "--target", TRIPLE, "--target-dir"]).arg(&own);
    if sanitizer == Sanitizer::Thread {
        // Whatever the precompiled standard library orders is unseen: with it nearly every hand-over is reported as a race.
        cargo.arg("-Zbuild-std");
    }
    open(&mut cargo)?;
    let library = own.join(TRIPLE).join("debug/libhob_ffi.a");
    let libs = sysroot()?.join("lib/rustlib").join(TRIPLE).join("lib");
    // One runtime for C and Rust: rustc's.
    let runtime =
        fs::read_dir(&libs).at("read", &libs)?.flatten().map(|entry| entry.path()).find(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(&format!("_rt.{short}.a")))
        });
    let runtime = runtime
        .ok_or_else(|| Error::new(format!("this toolchain has no {short} runtime")).mend("rustup toolchain install stable"))?;
    let mlx = paths::native().join("mlx/lib");
    let compile = vec![
        format!("-fsanitize={},undefined", sanitizer.name()),
        "-fsanitize-trap=undefined".to_owned(),
        "-fno-omit-frame-pointer".to_owned(),
        format!("-I{}", paths::root().join("include").display()),
    ];
    let link = [
        library.display().to_string(),
        "-Wl,--whole-archive".to_owned(),
        runtime.display().to_string(),
        "-Wl,--no-whole-archive,--export-dynamic".to_owned(),
        format!("-L{}", mlx.display()),
        "-lmlx".to_owned(),
        format!("-Wl,-rpath,{}", mlx.display()),
    ]
    .into_iter()
    .chain(["-lstdc++", "-lgcc_s", "-lpthread", "-ldl", "-lrt"].map(str::to_owned));
    Ok(Build { sanitizer: Some(sanitizer), folder: empty(&target.join("c").join(name))?, compile, link: link.collect() })
}

fn sysroot() -> Result<PathBuf> {
    let root = capture(Command::new("rustc").args(["--print", "sysroot"]).current_dir(paths::root()), |_| ())?;
    Ok(PathBuf::from(root.trim()))
}

/// Whether the standard library can be built, as ThreadSanitizer needs it.
pub(crate) fn has_rust_src() -> bool {
    sysroot().is_ok_and(|root| root.join("lib/rustlib/src/rust/library/std/Cargo.toml").is_file())
}

fn empty(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder).at("empty", folder)?;
    }
    fs::create_dir_all(folder).at("make", folder)?;
    Ok(folder.to_owned())
}

impl Build {
    fn program(&self, name: &str, source: &Path, language: &[&str]) -> Result<PathBuf> {
        let program = self.compile(name, source, language, if self.sanitizer.is_some() { CLANG } else { "cc" })?;
        if let Some(sanitizer) = self.sanitizer {
            instrumented(&program, sanitizer)?;
        }
        Ok(program)
    }

    fn compile(&self, name: &str, source: &Path, language: &[&str], compiler: &str) -> Result<PathBuf> {
        let (program, object) = (self.folder.join(name), self.folder.join(format!("{name}.o")));
        let mut first = Command::new(compiler);
        first.args(STRICT).args(language).args(&self.compile).arg("-I").arg(paths::root().join("tests/c"));
        first.arg("-c").arg(source).arg("-o").arg(&object);
        let mut second = Command::new(compiler);
        second.arg(&object).args(&self.link).args(["-lpthread", "-lm", "-o"]).arg(&program);
        for mut step in [first, second] {
            let mend = format!("is {compiler} there? (Debian, Ubuntu: apt-get install {compiler})");
            capture(&mut step, |_| ()).map_err(|error| error.mend(mend))?;
        }
        Ok(program)
    }

    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        // A scripted panic's trace is noise here.
        command.args(arguments).env("RUST_BACKTRACE", "0");
        command.env("ASAN_OPTIONS", "detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1:abort_on_error=0");
        // MLX's thread lives as long as the process; exits that leave threads behind are tested on purpose.
        command.env("TSAN_OPTIONS", "halt_on_error=1:report_thread_leaks=0");
        command
    }
}

/// That C and Rust are both instrumented is seen in the program itself.
fn instrumented(program: &Path, sanitizer: Sanitizer) -> Result<()> {
    let names = capture(Command::new("nm").arg(program), |_| ())?;
    let constructors = names.matches(&format!("{}.module_ctor", sanitizer.short())).count();
    let runtime = names.contains(&format!("__{}_init", sanitizer.short()));
    // One is the C file's; Rust's units bring many.
    if runtime && constructors > 10 {
        return Ok(());
    }
    Err(Error::new(format!("{} has {constructors} instrumented units: the sanitizer is not really in it", program.display())))
}

/// The sanitizer works: broken contracts are reported, where C breaks them and where Rust meets them.
fn misused(build: &Build, program: &Path, places: &[&str]) -> Result<()> {
    for place in places {
        let output = ended(&build.command(program, &[place]))?;
        if output.status.success() || !String::from_utf8_lossy(&output.stderr).contains("Sanitizer: ") {
            return Err(Error::new(format!("the sanitizer did not see the misuse `{place}`")));
        }
    }
    Ok(())
}

/// Exits that leave handles and work behind: the code that was asked for, each time.
fn exits(build: &Build, program: &Path, models: &[Option<&String>], times: usize) -> Result<()> {
    for time in 0..times {
        let how = ["return", "exit", "quick"][time % 3];
        let mut command = build.command(program, &[how]);
        command.args(models[time / 3 % models.len()]);
        // What is live at the end is not lost: it is not given back on purpose.
        command.env("ASAN_OPTIONS", "detect_leaks=0");
        let output = ended(&command)?;
        if output.status.code() != Some(7) {
            let lines = String::from_utf8_lossy(&output.stderr).lines().map(str::to_owned).collect::<Vec<_>>();
            return Err(Error::new(format!("exit {time} ({how}) ended with {}, not 7", output.status)).output(lines));
        }
    }
    Ok(())
}

/// Runs a command to its end, whatever that is.
fn ended(command: &Command) -> Result<Output> {
    let program = command.get_program().to_string_lossy();
    again(command).output().map_err(|error| Error::new(format!("cannot run {program}: {error}")))
}

fn again(command: &Command) -> Command {
    let mut again = Command::new(command.get_program());
    again.args(command.get_args());
    again.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
    again
}

fn output(command: &Command, wanted: &[&str]) -> Result<()> {
    let mut again = again(command);
    let output = capture(&mut again, |_| ())?;
    match wanted.iter().find(|text| !output.contains(**text)) {
        None => Ok(()),
        Some(text) => Err(Error::new(format!("its output lacks {text:?}")).output(output.lines().map(str::to_owned))),
    }
}

/// Sizes and places of fields do not change: programs out there depend on them.
fn layouts(command: &Command) -> Result<()> {
    let golden = paths::root().join("tests/c/layout.txt");
    let now = capture(&mut Command::new(command.get_program()), |_| ())?;
    let before = fs::read_to_string(&golden).unwrap_or_default();
    if now == before {
        return Ok(());
    }
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (old, new) = (lines(&before), lines(&now));
    let changed = old.iter().filter(|line| !new.contains(line)).map(|line| format!("- {line}"));
    let added = new.iter().filter(|line| !old.contains(line)).map(|line| format!("+ {line}"));
    Err(Error::new("layouts differ from tests/c/layout.txt").output(changed.chain(added).collect::<Vec<_>>()).mend(format!(
        "appended fields are allowed: `{} > tests/c/layout.txt`; anything else needs a new HOB_ABI_VERSION",
        command.get_program().to_string_lossy()
    )))
}

/// For `check`: builds the library and looks at what leaves it.
pub(crate) fn check_exports(workspace: &Workspace) -> Result<()> {
    if !cfg!(target_os = "linux") {
        println!("looked at on Linux");
        return Ok(());
    }
    open(proc::cargo().args(["build", "--quiet", "--package", "hob-ffi"]))?;
    exports(&workspace.target_directory()?.join("debug/libhob_ffi.so"))
}

/// For `bench`: what the border costs, optimised.
pub(crate) fn bench(target: &Path) -> Result<()> {
    open(proc::cargo().args(["build", "--quiet", "--release", "--package", "hob-ffi"]))?;
    let folder = empty(&target.join("c/bench"))?;
    dist::lay_out(&target.join("release"), &folder.join("dist"))?;
    let program = against(&folder).compile("bench", &paths::root().join("tests/c/bench.c"), C, "cc")?;
    open(&mut Command::new(program))
}

/// Exactly the functions of the list leave the library.
fn exports(library: &Path) -> Result<()> {
    let output = capture(Command::new("nm").args(["-D", "--defined-only"]).arg(library), |_| ())?;
    let mut names: Vec<&str> = output
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .map(|name| name.split('@').next().unwrap_or(name))
        .collect();
    names.sort_unstable();
    let path = header::exports_path();
    let list = fs::read_to_string(&path).at("read", &path)?;
    let list: Vec<&str> = list.lines().collect();
    if names == list {
        return Ok(());
    }
    let more = names.iter().filter(|name| !list.contains(name)).map(|name| format!("exported, not in the list: {name}"));
    let less = list.iter().filter(|name| !names.contains(name)).map(|name| format!("in the list, not exported: {name}"));
    Err(Error::new("libhob's exports differ from tests/c/exports.txt")
        .output(more.chain(less).collect::<Vec<_>>())
        .mend("cargo xtask header, then look at `git diff`"))
}

/// README's quick start is the program that is compiled here.
fn readme(source: &Path) -> Result<()> {
    let path = paths::root().join("README.md");
    let (readme, program) = (fs::read_to_string(&path).at("read", &path)?, fs::read_to_string(source).at("read", source)?);
    if readme.contains(&format!("```c\n{program}```\n")) {
        return Ok(());
    }
    Err(Error::new("README.md does not show tests/c/smoke.c as it is").mend("copy it there"))
}

/// Counts as cargo prints them.
#[derive(Default)]
struct Score {
    passed: usize,
    failed: Vec<String>,
}

impl Score {
    /// A program of several tests, which prints a line for each.
    fn tests(&mut self, name: &str, command: &Command) {
        match capture(&mut again(command), |_| ()) {
            Ok(output) => {
                let lines: Vec<&str> =
                    output.lines().filter(|line| line.starts_with("test ") && line.ends_with(" ... ok")).collect();
                self.passed += lines.len();
                println!("{}", lines.join("\n"));
                if lines.is_empty() {
                    self.fail(name, &Error::new("it ran no test"));
                }
            }
            Err(error) => self.fail(name, &error),
        }
    }

    fn one(&mut self, name: &str, check: impl FnOnce() -> Result<()>) {
        match check() {
            Ok(()) => {
                self.passed += 1;
                println!("test {name} ... ok");
            }
            Err(error) => self.fail(name, &error),
        }
    }

    fn fail(&mut self, name: &str, error: &Error) {
        println!("test {name} ... FAILED\n{error}");
        self.failed.push(name.to_owned());
    }

    fn close(self) -> Result<()> {
        let state = if self.failed.is_empty() { "ok" } else { "FAILED" };
        println!(
            "test result: {state}. {} passed; {} failed; 0 ignored; 0 measured; 0 filtered out",
            self.passed,
            self.failed.len()
        );
        if self.failed.is_empty() { Ok(()) } else { Err(Error::new(format!("failed: {}", self.failed.join(", ")))) }
    }
}
