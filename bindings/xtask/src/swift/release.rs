//! `swift dist`: a dynamic framework that carries both surfaces, inside an XCFramework, and the package that points to its archive.
//! Written for Apple's tools; it has not been run yet (see swift/README.md).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    dist,
    error::{At, Error, Result},
    header, paths,
    proc::{self, capture, open},
    ui,
    workspace::Workspace,
};

const NAME: &str = "HobCore";
const TRIPLE: &str = "aarch64-apple-darwin";

pub(crate) fn run(url: &str) -> Result<()> {
    if !cfg!(target_os = "macos") {
        return Err(Error::new("an XCFramework can only be made on macOS").mend("run `cargo xtask swift dist` on a Mac with Xcode"));
    }
    let target = Workspace::read()?.target_directory()?;
    let out = target.join("swift/dist");
    if out.exists() {
        fs::remove_dir_all(&out).at("empty", &out)?;
    }
    fs::create_dir_all(&out).at("make", &out)?;
    // The static library, linked here: only so is the list of exports the whole truth (rustc exports every dependency's functions too).
    ui::step("libhob_uniffi.a, optimised", |step| {
        let mut cargo = proc::cargo();
        cargo.args(["rustc", "--release", "--package", "hob-uniffi", "--lib", "--crate-type", "staticlib", "--target", TRIPLE]);
        capture(&mut cargo, |line| line.map_or((), |line| step.note(line))).map(|_| ())
    })?;
    let built = target.join(TRIPLE).join("release");
    let framework = framework(&built.join("libhob_uniffi.a"), &out)?;
    place_metallib(&built, &framework)?;
    let xcframework = out.join(format!("{NAME}.xcframework"));
    open(Command::new("xcodebuild").args(["-create-xcframework", "-framework"]).arg(&framework).arg("-output").arg(&xcframework))?;
    let archive = out.join(format!("{NAME}.xcframework.zip"));
    open(Command::new("ditto").args(["-c", "-k", "--sequesterRsrc", "--keepParent"]).arg(&xcframework).arg(&archive))?;
    let checksum = capture(Command::new("swift").args(["package", "compute-checksum"]).arg(&archive), |_| ())?;
    mirror(&out.join("package"), url, checksum.trim())?;
    println!("{}: upload it to {url}", archive.display());
    println!("{}: the package to publish beside it", out.join("package").display());
    Ok(())
}

/// Links the framework in the versioned layout that macOS wants.
fn framework(library: &Path, out: &Path) -> Result<PathBuf> {
    let framework = out.join(format!("{NAME}.framework"));
    let version = framework.join("Versions/A");
    for folder in ["Headers", "Modules", "Resources"] {
        let folder = version.join(folder);
        fs::create_dir_all(&folder).at("make", &folder)?;
    }
    let list = out.join("exports.txt");
    fs::write(&list, exports(&fs::read_to_string(header::exports_path()).at("read", &header::exports_path())?))
        .at("write", &list)?;
    let mut link = Command::new("clang++");
    link.args(["-dynamiclib", "-arch", "arm64", "-mmacosx-version-min=14.0", "-Wl,-dead_strip"]);
    link.arg(format!("-Wl,-force_load,{}", library.display())).arg(format!("-Wl,-exported_symbols_list,{}", list.display()));
    link.arg(format!("-Wl,-install_name,@rpath/{NAME}.framework/Versions/A/{NAME}"));
    for system in ["Foundation", "Metal", "QuartzCore", "Accelerate"] {
        link.args(["-framework", system]);
    }
    open(link.arg("-o").arg(version.join(NAME)))?;
    dist::copy(&header::header_path(), &version.join("Headers/hob.h"))?;
    let modules = version.join("Modules/module.modulemap");
    fs::write(&modules, format!("framework module {NAME} {{\n    header \"hob.h\"\n    export *\n}}\n")).at("write", &modules)?;
    let plist = version.join("Resources/Info.plist");
    fs::write(&plist, info_plist()).at("write", &plist)?;
    for (link, to) in [
        ("Versions/Current", "A".to_owned()),
        (NAME, format!("Versions/Current/{NAME}")),
        ("Headers", "Versions/Current/Headers".to_owned()),
        ("Modules", "Versions/Current/Modules".to_owned()),
        ("Resources", "Versions/Current/Resources".to_owned()),
    ] {
        open(Command::new("ln").args(["-s", &to]).arg(framework.join(link)))?;
    }
    Ok(framework)
}

/// What leaves the framework: the C ABI, and what uniffi's scaffolding calls its own. Apple's linker knows `*` in names.
fn exports(c: &str) -> String {
    let names = c.lines().map(|name| format!("_{name}\n"));
    names.chain(["_uniffi_hob_uniffi_*\n".to_owned(), "_ffi_hob_uniffi_*\n".to_owned()]).collect()
}

fn info_plist() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let string = |key: &str, value: &str| format!("  <key>{key}</key><string>{value}</string>\n");
    let fields = [
        string("CFBundleIdentifier", "dev.hob.HobCore"),
        string("CFBundleName", NAME),
        string("CFBundleExecutable", NAME),
        string("CFBundlePackageType", "FMWK"),
        string("CFBundleShortVersionString", version),
        string("CFBundleVersion", version),
        string("LSMinimumSystemVersion", "14.0"),
    ];
    format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<plist version=\"1.0\">\n<dict>\n{}</dict>\n</plist>\n", fields.concat())
}

/// MLX's kernels, which mlx-sys's build leaves in its own folder: MLX looks for them beside the library and in its Resources.
fn place_metallib(built: &Path, framework: &Path) -> Result<()> {
    let find = capture(Command::new("find").arg(built.join("build")).args(["-name", "mlx.metallib"]), |_| ())?;
    let Some(found) = find.lines().next() else {
        return Err(Error::new("mlx.metallib is not in the build")
            .mend("build with Xcode's Metal toolchain: xcodebuild -downloadComponent MetalToolchain"));
    };
    dist::copy(Path::new(found), &framework.join("Versions/A/Resources/mlx.metallib"))
}

/// swift/ as a package of its own: links followed, address and checksum of the archive written in, tests left behind.
fn mirror(to: &Path, url: &str, checksum: &str) -> Result<()> {
    fs::create_dir_all(to).at("make", to)?;
    let swift = paths::root().join("swift");
    for part in ["Sources", "Examples", "README.md", "Package.swift"] {
        open(Command::new("cp").args(["-RL"]).arg(swift.join(part)).arg(to))?;
    }
    let manifest = to.join("Package.swift");
    let text = fs::read_to_string(&manifest).at("read", &manifest)?;
    fs::write(&manifest, released(&text, url, checksum)?).at("write", &manifest)
}

fn released(manifest: &str, url: &str, checksum: &str) -> Result<String> {
    const PLACE: &str = "let release: (url: String, checksum: String)? = nil";
    if !manifest.contains(PLACE) || url.contains(['"', '\\']) {
        return Err(Error::new("Package.swift has no place for the release, or the address cannot be written there"));
    }
    let text = manifest.replace(PLACE, &format!("let release: (url: String, checksum: String)? = (\"{url}\", \"{checksum}\")"));
    // The tests stay in Hob's repository.
    let kept: Vec<&str> = text.lines().filter(|line| !line.contains(".testTarget(")).collect();
    Ok(kept.join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_manifest_names_its_archive_and_no_tests() {
        let path = paths::root().join("swift/Package.swift");
        let manifest = fs::read_to_string(path).expect("Package.swift");
        let text = released(&manifest, "https://example.org/HobCore.zip", "abc").expect("it has a place");
        assert!(text.contains("= (\"https://example.org/HobCore.zip\", \"abc\")") && !text.contains("testTarget"));
        assert!(released(&manifest, "a\"b", "").is_err() && released("", "a", "").is_err());
    }

    #[test]
    fn both_surfaces_are_exported() {
        assert_eq!(exports("hob_a\nhob_b\n"), "_hob_a\n_hob_b\n_uniffi_hob_uniffi_*\n_ffi_hob_uniffi_*\n");
    }

    #[test]
    fn elsewhere_it_refuses_with_the_reason() {
        if !cfg!(target_os = "macos") {
            let error = run("https://example.org").expect_err("no Xcode here").to_string();
            assert!(error.contains("macOS"), "{error}");
        }
    }
}
