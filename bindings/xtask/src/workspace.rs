//! What the workspace declares: read from cargo, so that no list of features or targets is kept twice.

use std::path::PathBuf;

use serde_json::Value;

use crate::{
    error::{Error, Result},
    proc::{self, capture},
};

/// A feature that replaces the synchronisation primitives for model checking: never on together with the rest.
pub(crate) const SHUTTLE: &str = "shuttle";

pub(crate) struct Workspace(Value);

impl Workspace {
    pub(crate) fn read() -> Result<Self> {
        let output = capture(proc::cargo().args(["metadata", "--format-version", "1", "--no-deps"]), |_| ())?;
        Self::parse(output.lines().find(|line| line.starts_with('{')).unwrap_or_default())
    }

    fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json).map(Self).map_err(|error| Error::new(format!("cannot read cargo's metadata: {error}")))
    }

    fn packages(&self) -> impl Iterator<Item = &Value> {
        self.0["packages"].as_array().into_iter().flatten()
    }

    fn package(&self, name: &str) -> Option<&Value> {
        self.packages().find(|package| package["name"] == name)
    }

    pub(crate) fn has_feature(&self, package: &str, feature: &str) -> bool {
        self.package(package).is_some_and(|package| package["features"].get(feature).is_some())
    }

    /// Whether the package has a target of that kind (`bench`, `example`, `test`, `lib`), and of that name if one is given.
    pub(crate) fn has_target(&self, package: &str, kind: &str, name: Option<&str>) -> bool {
        let targets = self.package(package).and_then(|package| package["targets"].as_array());
        targets.into_iter().flatten().any(|target| {
            let kinds = target["kind"].as_array();
            kinds.is_some_and(|kinds| kinds.iter().any(|it| it == kind)) && name.is_none_or(|name| target["name"] == name)
        })
    }

    pub(crate) fn target_directory(&self) -> Result<PathBuf> {
        let folder = self.0["target_directory"].as_str().ok_or_else(|| Error::new("cargo names no target folder"))?;
        Ok(PathBuf::from(folder))
    }

    /// `--workspace`, with all features that may be on together.
    pub(crate) fn everything(&self) -> Vec<String> {
        let mut arguments = vec!["--workspace".to_owned()];
        let mut features = Vec::new();
        for package in self.packages() {
            let name = package["name"].as_str().unwrap_or_default();
            for feature in package["features"].as_object().into_iter().flat_map(|features| features.keys()) {
                if feature != SHUTTLE {
                    features.push(format!("{name}/{feature}"));
                }
            }
        }
        if !features.is_empty() {
            arguments.extend(["--features".to_owned(), features.join(",")]);
        }
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace() -> Workspace {
        Workspace::parse(
            r#"{"packages": [
                {"name": "hob", "features": {"cli": [], "shuttle": []}, "targets": [
                    {"kind": ["lib"], "name": "hob"}, {"kind": ["example"], "name": "demo"}]},
                {"name": "xtask", "features": {}, "targets": [{"kind": ["bin"], "name": "xtask"}]}]}"#,
        )
        .expect("JSON")
    }

    #[test]
    fn everything_leaves_out_shuttle() {
        assert_eq!(workspace().everything(), ["--workspace", "--features", "hob/cli"]);
    }

    #[test]
    fn features_and_targets_are_found() {
        let workspace = workspace();
        assert!(workspace.has_feature("hob", "shuttle") && !workspace.has_feature("xtask", "shuttle"));
        assert!(workspace.has_target("hob", "example", Some("demo")) && workspace.has_target("hob", "lib", None));
        assert!(!workspace.has_target("hob", "bench", None) && !workspace.has_target("none", "lib", None));
    }
}
