//! `demo`: Hob's main job on real models, from nothing.

use std::path::Path;

use crate::{
    error::{Error, Result},
    models,
    proc::{self, open},
    setup, ui,
    workspace::Workspace,
};

const EXAMPLE: &str = "demo";

/// `extra` is handed to the program.
pub(crate) fn run(reranker: Option<&Path>, extra: &[String]) -> Result<()> {
    setup::ensure()?;
    let places = models::ensure(reranker)?;
    if !Workspace::read()?.has_target("hob", "example", Some(EXAMPLE)) {
        return Err(Error::new(format!("core has no example `{EXAMPLE}`")));
    }
    let example = ["--release", "--package", "hob", "--example", EXAMPLE];
    ui::line("demo: building in release (minutes the first time)");
    open(proc::cargo().arg("build").args(example)).map_err(|error| error.step("building the demo"))?;
    let mut demo = proc::cargo();
    demo.args(["run", "--quiet"]).args(example).args(["--", "--chat"]).arg(&places.chat).arg("--embedder").arg(&places.embedder);
    if let Some(reranker) = &places.reranker {
        demo.arg("--reranker").arg(reranker);
    }
    open(demo.args(extra)).map_err(|error| error.step("running the demo"))
}
