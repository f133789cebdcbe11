//! `bench`: core's own benchmarks, then Hob beside other stacks in one run (tests/bench).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{At, Error, Result},
    models, paths,
    proc::{self, capture, open},
    setup,
    stamp::{Stamps, State, key},
    store::{self, Lock},
    ui, wheel,
    workspace::Workspace,
};

pub(crate) struct Options {
    pub(crate) only: Option<String>,
    pub(crate) rounds: u32,
    pub(crate) extra: Vec<String>,
}

struct Bench {
    name: &'static str,
    about: &'static str,
    run: fn(&Workspace, &models::Places, &Options) -> Result<()>,
}

const BENCHES: &[Bench] = &[
    Bench { name: "criterion", about: "core's own benchmarks", run: criterion },
    Bench { name: "c", about: "what a call from C costs", run: |workspace, _, _| crate::c::bench(&workspace.target_directory()?) },
    Bench { name: "peers", about: "Hob beside mlx-lm, node-llama-cpp, sentence-transformers and transformers.js", run: peers },
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let chosen = choose(BENCHES, options.only.as_deref())?;
    setup::ensure()?;
    let places = models::ensure(None)?;
    let workspace = Workspace::read()?;
    for bench in chosen {
        println!("\n== {}: {} ==", bench.name, bench.about);
        (bench.run)(&workspace, &places, options).map_err(|error| error.step(bench.name))?;
    }
    Ok(())
}

fn choose(benches: &'static [Bench], name: Option<&str>) -> Result<Vec<&'static Bench>> {
    let chosen: Vec<&Bench> = benches.iter().filter(|bench| name.is_none_or(|name| bench.name == name)).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = benches.iter().map(|bench| bench.name).collect();
        return Err(Error::new(format!("no benchmark is called `{}`", name.unwrap_or_default()))
            .mend(format!("name one of: {}", names.join(", "))));
    }
    Ok(chosen)
}

fn criterion(workspace: &Workspace, places: &models::Places, options: &Options) -> Result<()> {
    if !workspace.has_target("hob", "bench", None) {
        println!("core has no benchmarks");
        return Ok(());
    }
    let mut cargo = proc::cargo();
    cargo.args(["bench", "--package", "hob", "--benches"]).env("HOB_MODELS", paths::models());
    if let Some(reranker) = &places.reranker {
        cargo.env("HOB_RERANKER", reranker);
    }
    if options.only.is_some() {
        cargo.args(&options.extra);
    }
    open(&mut cargo)
}

fn peers(workspace: &Workspace, places: &models::Places, options: &Options) -> Result<()> {
    let sources = paths::root().join("tests/bench/peers");
    let target = paths::root().join("target");
    let python = ensure_python(&target.join("bench-venv"), &sources.join("requirements.txt"))?;
    let node = target.join("bench-node");
    ensure_node(&node, &sources.join("package.json"))?;
    open(proc::cargo().args(["build", "--release", "--package", "hob", "--features", "cli", "--bin", "hob"]))?;
    let npm = crate::npm::optimised()?;
    let mut run = Command::new(python);
    run.arg(sources.join("run.py")).arg("--hob").arg(workspace.target_directory()?.join("release/hob"));
    run.arg("--chat").arg(&places.chat).arg("--embedder").arg(&places.embedder);
    run.arg("--native").arg(paths::native().join("mlx_cpu.libs")).arg("--node").arg(&node);
    run.arg("--npm").arg(npm).arg("--work").arg(target.join("bench")).args(["--rounds", &options.rounds.to_string()]);
    if options.only.is_some() {
        run.args(&options.extra);
    }
    open(&mut run)
}

/// A virtual environment holds absolute paths, so it is made in place; its stamp, written last, tells whether it is whole.
fn ensure_python(folder: &Path, requirements: &Path) -> Result<PathBuf> {
    let wanted = fs::read_to_string(requirements).at("read", requirements)?;
    let version = capture(wheel::python().arg("--version"), |_| ())?;
    let key = key(&[&wanted, &version, &folder.to_string_lossy()]);
    let python = folder.join("bin/python");
    installed(folder, "python", &key, |step| {
        capture(wheel::python().args(["-m", "venv"]).arg(folder), |_| step.note("making a virtual environment"))?;
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]);
        pip.arg("--requirement").arg(requirements);
        capture(&mut pip, |line| line.map_or_else(|| step.note("installing"), |line| step.note(line.trim())))?;
        Ok(())
    })?;
    Ok(python)
}

fn ensure_node(folder: &Path, package: &Path) -> Result<()> {
    let wanted = fs::read_to_string(package).at("read", package)?;
    let version = capture(Command::new("node").arg("--version"), |_| ())
        .map_err(|error| error.mend("install Node.js 20 or newer (nodejs and npm)"))?;
    installed(folder, "node", &key(&[&wanted, &version]), |step| {
        store::write_whole(&folder.join("package.json"), wanted.as_bytes())?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--ignore-scripts"]).current_dir(folder);
        capture(&mut npm, |line| line.map_or_else(|| step.note("installing"), |line| step.note(line.trim())))?;
        Ok(())
    })
}

fn installed(folder: &Path, what: &str, key: &str, install: impl FnOnce(&ui::Step) -> Result<()>) -> Result<()> {
    let stamps = Stamps::new(folder);
    if stamps.state(what, key) == State::Current {
        return Ok(());
    }
    // Beside the folder, which is cleared.
    let lock_folder = folder.with_extension("lock");
    let _lock = Lock::take(&lock_folder, "bench")?;
    if stamps.state(what, key) == State::Current {
        return Ok(());
    }
    ui::step(&format!("peers for {what} (gigabytes the first time)"), |step| {
        if folder.exists() {
            fs::remove_dir_all(folder).at("clear", folder)?;
        }
        install(step)?;
        stamps.write(what, key, &[])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_chosen_by_name() {
        assert_eq!(choose(BENCHES, None).map(|all| all.len()).ok(), Some(BENCHES.len()));
        assert_eq!(choose(BENCHES, Some("peers")).map(|all| all.len()).ok(), Some(1));
        assert!(choose(BENCHES, Some("x")).err().is_some_and(|error| error.to_string().contains("criterion, c, peers")));
    }
}
