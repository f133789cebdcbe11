//! `swift dist`: a dynamic framework that carries both surfaces, inside an XCFramework, and the package that points to its archive.
//! What Apple's rules ask is in `framework.rs`; this runs Apple's tools. It has not been run yet (see swift/README.md).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{
    exports,
    framework::{self, MACOS, NAME, TRIPLE},
};
use crate::{
    error::{At, Error, Result},
    paths,
    proc::{self, capture, open},
    stamp, ui,
    workspace::Workspace,
};

pub(crate) fn run(url: &str, identity: &str) -> Result<()> {
    if !cfg!(target_os = "macos") {
        return Err(Error::new("an XCFramework can only be made on macOS").mend("run `cargo xtask swift dist` on a Mac with Xcode"));
    }
    let target = Workspace::read()?.target_directory()?;
    let out = target.join("swift/dist");
    if out.exists() {
        fs::remove_dir_all(&out).at("empty", &out)?;
    }
    fs::create_dir_all(&out).at("make", &out)?;
    // Kept between runs: MLX's build leaves its kernels there, and is not repeated.
    let (metal, libraries) = (target.join("swift/metal"), target.join("swift/native-libraries.txt"));
    // The static library, linked here: only so is the list of exports the whole truth.
    ui::step("libhob_uniffi.a, optimised", |step| {
        let mut cargo = proc::cargo();
        cargo.args(["rustc", "--release", "--package", "hob-uniffi", "--lib", "--crate-type", "staticlib", "--target", TRIPLE]);
        cargo.arg("--").arg(format!("--print=native-static-libs={}", libraries.display()));
        cargo.env("MACOSX_DEPLOYMENT_TARGET", MACOS).env("MLX_RS_METAL_PATH", &metal);
        capture(&mut cargo, |line| line.map_or((), |line| step.note(line))).map(|_| ())
    })?;
    let metallib = metal.join("mlx.metallib");
    if !metallib.is_file() {
        return Err(Error::new(format!("MLX's build left no {}", metallib.display()))
            .mend("build with Xcode's Metal toolchain: xcodebuild -downloadComponent MetalToolchain"));
    }
    let bundle = out.join(format!("{NAME}.framework"));
    framework::write(&framework::layout(paths::root(), &metallib), &bundle)?;
    link(&target.join(TRIPLE).join("release/libhob_uniffi.a"), &libraries, &out, &bundle.join(framework::BINARY))?;
    exports::check(&bundle.join(framework::BINARY))?;
    // Seals the resources too. An app signs what it embeds once more, with its own identity.
    let stamped = if identity == "-" { "--timestamp=none" } else { "--timestamp" };
    open(Command::new("codesign").args(["--force", stamped, "--sign", identity]).arg(&bundle))?;
    open(Command::new("codesign").args(["--verify", "--strict"]).arg(&bundle))?;
    let xcframework = out.join(format!("{NAME}.xcframework"));
    open(Command::new("xcodebuild").args(["-create-xcframework", "-framework"]).arg(&bundle).arg("-output").arg(&xcframework))?;
    if identity != "-" {
        open(Command::new("codesign").args(["--force", stamped, "--sign", identity]).arg(&xcframework))?;
    }
    // ditto keeps the links, which zip would follow.
    let archive = out.join(format!("{NAME}.xcframework.zip"));
    open(Command::new("ditto").args(["-c", "-k", "--sequesterRsrc", "--keepParent"]).arg(&xcframework).arg(&archive))?;
    // As `swift package compute-checksum` says it.
    let checksum = stamp::file_sha256(&archive, |_| ()).at("read", &archive)?;
    let package = mirror(&out, url, &checksum)?;
    println!("{}: upload it to {url}", archive.display());
    println!("{}: the package; commit it, with a version as tag, to the repository that hosts name", package.display());
    Ok(())
}

fn link(archive: &Path, libraries: &Path, out: &Path, binary: &Path) -> Result<()> {
    let list = out.join("exports.txt");
    fs::write(&list, exports::apple_list(&exports::names()?)).at("write", &list)?;
    let system = framework::system_libraries(&fs::read_to_string(libraries).at("read", libraries)?)?;
    open(Command::new("clang++").args(framework::link_arguments(archive, &list, &system, binary)))
}

/// swift/ as a package of its own, for SwiftPM reads a package at the top of a repository only: links followed, address and checksum of
/// the archive written in, tests left behind.
fn mirror(out: &Path, url: &str, checksum: &str) -> Result<PathBuf> {
    let (swift, to) = (paths::root().join("swift"), out.join("package"));
    let text = fs::read_to_string(swift.join("Package.swift")).at("read", &swift)?;
    let manifest = framework::manifest(&text, url, checksum)?;
    fs::create_dir_all(&to).at("make", &to)?;
    for part in ["Sources", "Examples", "README.md", ".gitignore"].map(|part| swift.join(part)) {
        copy(&part, &to)?;
    }
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        copy(&paths::root().join(licence), &to)?;
    }
    fs::write(to.join("Package.swift"), manifest).at("write", &to)?;
    Ok(to)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    open(Command::new("cp").arg("-RL").arg(from).arg(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mirrored package is whole: no link leads out of it, and SwiftPM finds every folder that the manifest names.
    #[cfg(unix)]
    #[test]
    fn the_mirrored_package_stands_alone() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let sum = "0".repeat(64);
        let package = mirror(home.path(), "https://example.org/HobCore.xcframework.zip", &sum).expect("it is mirrored");
        for place in [
            "Package.swift",
            "README.md",
            "LICENSE-MIT",
            "Sources/CHob/include/hob.h",
            "Sources/CHob/include/module.modulemap",
            "Examples/Chat",
        ] {
            let path = package.join(place);
            assert!(path.exists() && !path.is_symlink(), "{place}");
        }
        let header = fs::read_to_string(package.join("Sources/CHob/include/hob.h")).expect("the header");
        assert_eq!(header, fs::read_to_string(crate::header::header_path()).expect("include/hob.h"));
        let manifest = fs::read_to_string(package.join("Package.swift")).expect("the manifest");
        assert!(manifest.contains(&sum));
        for target in ["CHob", "CHobUniFFI", "HobUniFFI", "Hob", "HobTesting"] {
            assert!(manifest.contains(&format!("name: \"{target}\"")) && package.join("Sources").join(target).is_dir(), "{target}");
        }
    }

    #[test]
    fn elsewhere_it_refuses_with_the_reason() {
        if !cfg!(target_os = "macos") {
            let error = run("https://example.org/a.zip", "-").expect_err("no Xcode here").to_string();
            assert!(error.contains("macOS"), "{error}");
        }
    }
}
