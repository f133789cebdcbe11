//! What is published on npm, laid out and packed: the main package, the same everywhere, and one with the addon per platform.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

use super::{addon, build, folder as package_folder, library, platform};
use crate::{
    dist::{copy, libraries},
    elf,
    error::{At, Error, Result},
    paths,
    proc::capture,
    ui,
    workspace::Workspace,
};

/// Builds (with optimisation unless `dev`), lays out and packs into `folder` (target/npm-dist if none is named).
pub(super) fn run(folder: Option<&Path>, dev: bool) -> Result<()> {
    if !cfg!(target_os = "linux") {
        return Err(Error::new("npm dist lays out Linux only so far"));
    }
    let target = Workspace::read()?.target_directory()?;
    let folder = folder.map_or_else(|| target.join("npm-dist"), Path::to_owned);
    let built = addon(!dev)?;
    build()?;
    if folder.exists() {
        if !folder.join("hob/package.json").is_file() {
            return Err(
                Error::new(format!("{} is there and is not what npm dist lays out", folder.display())).mend("name another folder")
            );
        }
        fs::remove_dir_all(&folder).at("empty", &folder)?;
    }
    let name = format!("hob-{}", platform()?);
    let (main, native) = (folder.join("hob"), folder.join(&name));
    for new in [&main, &native] {
        fs::create_dir_all(new).at("make", new)?;
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            copy(&paths::root().join(licence), &new.join(licence))?;
        }
    }
    let manifest = manifest()?;
    capture(Command::new("cp").arg("-R").arg(package_folder().join("dist")).arg(&main), |_| ())?;
    copy(&package_folder().join("README.md"), &main.join("README.md"))?;
    write(&main.join("package.json"), &published(manifest.clone())?)?;
    let hob = native.join("hob.node");
    copy(&built.join(library()), &hob)?;
    elf::set_run_path(&hob, "$ORIGIN")?;
    libraries(&native)?;
    write(&native.join("package.json"), &of_platform(&name, &manifest))?;
    write(
        &native.join("README.md"),
        &format!("# {name}\n\nThe addon of [hob](https://www.npmjs.com/package/hob) for this platform, with MLX. Install `hob`.\n"),
    )?;
    ui::step("npm pack", |_| {
        for package in [&main, &native] {
            capture(Command::new("npm").args(["pack", "--pack-destination"]).arg(&folder).arg(package), |_| ())?;
        }
        Ok(())
    })?;
    println!("{}: hob and {name}, as folders and as the archives that `npm publish` takes", folder.display());
    Ok(())
}

/// The package's own package.json.
fn manifest() -> Result<Value> {
    let path = package_folder().join("package.json");
    let text = fs::read_to_string(&path).at("read", &path)?;
    let manifest: Value =
        serde_json::from_str(&text).map_err(|error| Error::new(format!("npm/package.json is no JSON: {error}")))?;
    let wanted = env!("CARGO_PKG_VERSION");
    if manifest["version"] == wanted {
        Ok(manifest)
    } else {
        Err(Error::new(format!("npm/package.json has another version than the workspace's {wanted}")).mend("make them one"))
    }
}

/// The platforms of the packages that the main one asks for; npm takes the one that fits.
const PLATFORMS: &[&str] = &["darwin-arm64", "linux-x64-gnu"];

/// Without what only a checkout needs, and with the platforms' packages.
fn published(mut manifest: Value) -> Result<Value> {
    let version = manifest["version"].clone();
    let fields = manifest.as_object_mut().ok_or_else(|| Error::new("npm/package.json is no object"))?;
    for field in ["devDependencies", "scripts", "allowScripts"] {
        fields.remove(field);
    }
    let packages = PLATFORMS.iter().map(|platform| (format!("hob-{platform}"), version.clone())).collect();
    fields.insert("optionalDependencies".to_owned(), Value::Object(packages));
    Ok(manifest)
}

fn of_platform(name: &str, manifest: &Value) -> Value {
    json!({
        "name": name,
        "version": manifest["version"],
        "description": format!("The addon of hob for {}", name.trim_start_matches("hob-")),
        "license": manifest["license"],
        "main": "hob.node",
        "os": ["linux"],
        "cpu": ["x64"],
        "libc": ["glibc"],
        "engines": manifest["engines"],
    })
}

fn write(path: &Path, value: &(impl std::fmt::Display + ?Sized)) -> Result<()> {
    fs::write(path, format!("{value:#}")).at("write", path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_package_asks_for_every_platform_and_for_no_tools() {
        let published = published(manifest().expect("readable, and of this version")).expect("an object");
        assert_eq!(published["optionalDependencies"]["hob-linux-x64-gnu"], published["version"]);
        assert!(published.get("devDependencies").is_none() && published.get("dependencies").is_none());
    }
}
