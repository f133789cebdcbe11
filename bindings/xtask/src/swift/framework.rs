//! Apple's rules for what `release.rs` builds, as far as they are plain values: tested here, whatever the system.
//!
//! A framework of macOS is a *versioned* bundle: the files lie in `Versions/A`, `Versions/Current` leads there, and beside `Versions` there
//! are links only. Its binary is named by the run path, so that the app which embeds it finds it. MLX looks for its kernels in
//! `mlx.metallib` beside the binary that it is part of, then in `Resources` beside that binary, which is a bundle's proper place for them,
//! and at last where the build left them: so a machine that built it cannot show that they are found.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    dist,
    error::{At, Error, Result},
};

pub(super) const NAME: &str = "HobCore";
pub(super) const IDENTIFIER: &str = "dev.hob.HobCore";
pub(super) const TRIPLE: &str = "aarch64-apple-darwin";
/// The oldest macOS, as in swift/Package.swift.
pub(super) const MACOS: &str = "14.0";
/// Where the binary lies in the framework.
pub(super) const BINARY: &str = "Versions/A/HobCore";

/// What stands at a place of the framework.
#[derive(Debug, PartialEq)]
pub(super) enum Part {
    /// A copy of this file.
    File(PathBuf),
    Text(String),
    /// A link, relative to where it stands.
    Link(&'static str),
}

/// All of the framework but its binary.
pub(super) fn layout(root: &Path, metallib: &Path) -> Vec<(String, Part)> {
    let file = |path: &str| Part::File(root.join(path));
    vec![
        ("Versions/A/Headers/hob.h".to_owned(), file("include/hob.h")),
        ("Versions/A/Modules/module.modulemap".to_owned(), Part::Text(module_map())),
        ("Versions/A/Resources/Info.plist".to_owned(), Part::Text(info_plist(env!("CARGO_PKG_VERSION")))),
        ("Versions/A/Resources/mlx.metallib".to_owned(), Part::File(metallib.to_owned())),
        ("Versions/A/Resources/LICENSE-MIT".to_owned(), file("LICENSE-MIT")),
        ("Versions/A/Resources/LICENSE-APACHE".to_owned(), file("LICENSE-APACHE")),
        ("Versions/Current".to_owned(), Part::Link("A")),
        (NAME.to_owned(), Part::Link("Versions/Current/HobCore")),
        ("Headers".to_owned(), Part::Link("Versions/Current/Headers")),
        ("Modules".to_owned(), Part::Link("Versions/Current/Modules")),
        ("Resources".to_owned(), Part::Link("Versions/Current/Resources")),
    ]
}

/// Writes it.
pub(super) fn write(layout: &[(String, Part)], framework: &Path) -> Result<()> {
    for (place, part) in layout {
        let path = framework.join(place);
        let folder = path.parent().unwrap_or(framework);
        fs::create_dir_all(folder).at("make", folder)?;
        match part {
            Part::File(from) => dist::copy(from, &path)?,
            Part::Text(text) => fs::write(&path, text).at("write", &path)?,
            Part::Link(to) => dist::link(to, &path)?,
        }
    }
    Ok(())
}

/// What the compiler's driver is told to link the binary.
pub(super) fn link_arguments(archive: &Path, exports: &Path, system: &[String], binary: &Path) -> Vec<String> {
    let mut arguments: Vec<String> = ["-dynamiclib", "-arch", "arm64"].map(str::to_owned).into();
    arguments.push(format!("-mmacosx-version-min={MACOS}"));
    arguments.push(format!("-Wl,-force_load,{}", archive.display()));
    arguments.push(format!("-Wl,-exported_symbols_list,{}", exports.display()));
    arguments.push(format!("-Wl,-install_name,@rpath/{NAME}.framework/{BINARY}"));
    arguments.extend(["-Wl,-dead_strip", "-Wl,-headerpad_max_install_names"].map(str::to_owned));
    arguments.extend(system.iter().cloned());
    // MLX asks for it where the SDK has it, and its build script does not say so.
    arguments.extend(["-framework", "QuartzCore", "-o"].map(str::to_owned));
    arguments.push(binary.display().to_string());
    arguments
}

/// What rustc says that its static library needs (`--print native-static-libs`), one argument each.
pub(super) fn system_libraries(printed: &str) -> Result<Vec<String>> {
    let words: Vec<String> = printed.split_whitespace().map(str::to_owned).collect();
    // Metal and Foundation are MLX's: without them it was built for something else.
    for needed in ["Metal", "Foundation", "Accelerate"] {
        if !words.windows(2).any(|pair| pair[0] == "-framework" && pair[1] == needed) {
            return Err(Error::new(format!("the library does not ask for the framework {needed}: is it MLX with Metal?")));
        }
    }
    Ok(words)
}

fn module_map() -> String {
    format!("framework module {NAME} {{\n    umbrella header \"hob.h\"\n    export *\n    module * {{ export * }}\n}}\n")
}

fn info_plist(version: &str) -> String {
    let string = |key: &str, value: &str| format!("\t<key>{key}</key>\n\t<string>{value}</string>\n");
    let fields = [
        string("CFBundleDevelopmentRegion", "en"),
        string("CFBundleExecutable", NAME),
        string("CFBundleIdentifier", IDENTIFIER),
        string("CFBundleInfoDictionaryVersion", "6.0"),
        string("CFBundleName", NAME),
        string("CFBundlePackageType", "FMWK"),
        string("CFBundleShortVersionString", version),
        "\t<key>CFBundleSupportedPlatforms</key>\n\t<array>\n\t\t<string>MacOSX</string>\n\t</array>\n".to_owned(),
        string("CFBundleVersion", version),
        string("LSMinimumSystemVersion", MACOS),
    ];
    let dtd = "<!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">";
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{dtd}\n<plist version=\"1.0\">\n<dict>\n{}</dict>\n</plist>\n",
        fields.concat()
    )
}

/// Package.swift of the release: the archive's address and checksum in their place, without the tests, which stay in Hob's repository.
pub(super) fn manifest(manifest: &str, url: &str, checksum: &str) -> Result<String> {
    const PLACE: &str = "let release: (url: String, checksum: String)? = nil";
    // SwiftPM takes archives of these two only by https, and knows them by their ending.
    if !url.starts_with("https://") || !url.ends_with(".zip") || url.contains(['"', '\\', ' ']) {
        return Err(Error::new("a release is at an address of the form https://….zip"));
    }
    if checksum.len() != 64 || !checksum.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Error::new("the checksum is no SHA-256"));
    }
    let place = manifest.matches(PLACE).count();
    let kept: Vec<&str> = manifest.lines().filter(|line| !line.contains(".testTarget(")).collect();
    if place != 1 || kept.len() + 1 != manifest.lines().count() {
        return Err(Error::new("swift/Package.swift has no one place for the release, or no one line with its tests"));
    }
    let written = format!("let release: (url: String, checksum: String)? = (\n    \"{url}\",\n    \"{checksum}\"\n)");
    Ok(kept.join("\n").replace(PLACE, &written) + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths;

    const SUM: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    /// Every place of the layout is there and leads to a file, seen from the top as an app's loader and Xcode see it.
    #[cfg(unix)]
    #[test]
    fn the_framework_is_a_versioned_bundle_and_holds_together() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let (metallib, framework) = (home.path().join("built.metallib"), home.path().join("HobCore.framework"));
        fs::write(&metallib, "kernels").expect("write");
        write(&layout(paths::root(), &metallib), &framework).expect("it is laid out");
        fs::write(framework.join(BINARY), "binary").expect("write");
        for entry in fs::read_dir(&framework).expect("the framework").flatten() {
            let is_versions = entry.file_name() == "Versions";
            assert!(entry.path().is_symlink() != is_versions, "{:?}: beside Versions there are links only", entry.file_name());
        }
        let read = |place: &str| fs::read_to_string(framework.join(place)).expect(place);
        assert_eq!((read("HobCore").as_str(), read("Resources/mlx.metallib").as_str()), ("binary", "kernels"));
        assert!(read("Headers/hob.h").contains("hob_engine_open"));
        // Where MLX looks: in Resources beside the binary it is part of.
        let binary = fs::canonicalize(framework.join("HobCore")).expect("the binary");
        assert!(binary.with_file_name("Resources").join("mlx.metallib").is_file());
        assert_eq!(fs::read_link(framework.join("Versions/Current")).expect("a link"), Path::new("A"));
        // Each link stays inside: a framework is copied and zipped as a whole.
        for (place, part) in layout(paths::root(), &metallib) {
            if let Part::Link(to) = part {
                assert!(!to.starts_with('/') && !to.contains(".."), "{place}");
            }
        }
    }

    #[test]
    fn the_property_list_is_one_and_says_what_a_framework_must() {
        let text = info_plist("1.2.3");
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), &text).expect("write");
        let python = "import plistlib, sys; p = plistlib.load(open(sys.argv[1], 'rb')); print(p['CFBundleExecutable'], p['CFBundlePackageType'], p['CFBundleVersion'], p['CFBundleSupportedPlatforms'], p['LSMinimumSystemVersion'])";
        let mut reader = std::process::Command::new("python3");
        let read = crate::proc::capture(reader.args(["-c", python]).arg(file.path()), |_| ()).expect("a property list");
        assert_eq!(read.trim(), "HobCore FMWK 1.2.3 ['MacOSX'] 14.0");
    }

    #[test]
    fn the_binary_is_named_by_the_run_path_and_exports_the_list() {
        let system =
            system_libraries("-lc++ -lobjc -framework Foundation -framework Metal -framework Accelerate -lSystem\n").expect("all");
        let arguments = link_arguments(Path::new("/b/lib.a"), Path::new("/o/list"), &system, Path::new("/o/HobCore"));
        for wanted in [
            "-Wl,-install_name,@rpath/HobCore.framework/Versions/A/HobCore",
            "-Wl,-exported_symbols_list,/o/list",
            "-Wl,-force_load,/b/lib.a",
            "-mmacosx-version-min=14.0",
            "-lobjc",
        ] {
            assert!(arguments.iter().any(|argument| argument == wanted), "{wanted}: {arguments:?}");
        }
        assert_eq!(arguments.last().map(String::as_str), Some("/o/HobCore"));
        system_libraries("-lc++ -framework Foundation -framework Accelerate").expect_err("no Metal");
    }

    #[test]
    fn a_released_manifest_names_its_archive_and_no_tests() {
        let text = fs::read_to_string(paths::root().join("swift/Package.swift")).expect("Package.swift");
        let url = "https://example.org/HobCore.xcframework.zip";
        let released = manifest(&text, url, SUM).expect("it has a place");
        assert!(released.contains(&format!("\"{url}\",\n    \"{SUM}\"")) && !released.contains("testTarget"));
        assert!(released.contains(".binaryTarget(name: \"HobCore\", url: release.url, checksum: release.checksum)"));
        for (url, sum) in [
            ("http://example.org/a.zip", SUM),
            ("https://a\".zip", SUM),
            ("https://example.org/a", SUM),
            (url, "abc"),
            (url, &SUM.replace('0', "g")),
        ] {
            manifest(&text, url, sum).expect_err("not an address, or no checksum");
        }
        manifest("", url, SUM).expect_err("no place");
    }

    /// The versions of macOS that are named in several places are one.
    #[test]
    fn the_oldest_system_is_the_packages() {
        let text = fs::read_to_string(paths::root().join("swift/Package.swift")).expect("Package.swift");
        assert!(text.contains(&format!(".macOS(.v{})", MACOS.trim_end_matches(".0"))));
    }
}
