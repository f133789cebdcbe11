//! The C ABI under a fuzzer: tests/fuzz/c_abi.c, clang's libFuzzer, and the library of the AddressSanitizer suite.

use std::{path::PathBuf, process::Command};

use super::{Build, C, CLANG, Sanitizer, Score, sanitized};
use crate::{error::Result, paths, proc::capture, workspace::Workspace};

/// What makes rustc tell a fuzzer where the code has been.
pub(super) const COVERAGE: &str = " -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// clang's libFuzzer, if it is installed.
pub(crate) fn runtime() -> Option<PathBuf> {
    let folder = capture(Command::new(CLANG).arg("-print-runtime-dir"), |_| ()).ok()?;
    Some(PathBuf::from(folder.trim()).join("libclang_rt.fuzzer-x86_64.a")).filter(|path| path.is_file())
}

/// So many inputs, from the committed seeds on. The same ones each time, as far as threads allow.
pub(crate) fn run(runs: u32) -> Result<()> {
    let mut build = sanitized(Sanitizer::Address, &Workspace::read()?.target_directory()?, "fuzz")?;
    build.compile.push("-fsanitize=fuzzer-no-link".to_owned());
    build.link.splice(0..0, runtime().map(|path| path.display().to_string()));
    let home = paths::root().join("tests/fuzz");
    let mut score = Score::default();
    let program = build.program("c_abi", &home.join("c_abi.c"), C)?;
    score.one("option_structs_and_messages_of_any_content", || fuzz(&build, &program, runs));
    score.close()
}

fn fuzz(build: &Build, program: &std::path::Path, runs: u32) -> Result<()> {
    let home = paths::root().join("tests/fuzz");
    let found = super::empty(&build.folder.join("found"))?;
    let mut command = build.command(program, &[]);
    command.arg(&found).arg(home.join("c_abi")).arg(format!("-dict={}", home.join("c_abi.dict").display()));
    command.arg(format!("-runs={runs}")).arg(format!("-artifact_prefix={}/", build.folder.display()));
    command.args(["-seed=1", "-max_len=4096", "-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1"]);
    let output = capture(&mut command, |_| ())?;
    let stats = output.lines().filter(|line| line.starts_with("stat::number_of_executed_units") || line.contains(" DONE "));
    stats.for_each(|line| println!("{line}"));
    Ok(())
}
