//! A host's view: the laid-out folder is moved, and the first program is built against it by pkg-config and by CMake.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{At, Error, Result},
    paths,
    proc::{capture, on_path},
    store::Scratch,
    ui,
    wheel::Wheel,
};

const CMAKE_LISTS: &str = "cmake_minimum_required(VERSION 3.16)
project(smoke C)
find_package(Hob 0.1 REQUIRED)
add_executable(smoke smoke.c)
set_property(TARGET smoke PROPERTY C_STANDARD 99)
target_link_libraries(smoke PRIVATE Hob::hob)
";

/// Builds in a clean folder below `folder` and runs there, the library's folder moved once more in between.
pub(super) fn check(folder: &Path, arguments: &[&str]) -> Result<()> {
    let home = folder.join("host");
    fs::create_dir_all(&home).at("make", &home)?;
    let installed = home.join("hob");
    copy_folder(&folder.join("dist"), &installed)?;
    let source = home.join("smoke.c");
    fs::copy(paths::root().join("tests/c/smoke.c"), &source).at("copy", &source)?;

    let mut pkg_config = Command::new("pkg-config");
    pkg_config.args(["--cflags", "--libs", "hob"]).env("PKG_CONFIG_PATH", installed.join("lib/pkgconfig"));
    let flags = capture(&mut pkg_config, |_| ()).map_err(|error| error.mend("apt-get install pkg-config"))?;
    let mut cc = Command::new("cc");
    cc.arg("-std=c99").arg(&source).args(flags.split_whitespace()).arg("-o").arg(home.join("by-pkg-config"));
    capture(&mut cc, |_| ())?;

    let cmake = cmake(folder.parent().unwrap_or(folder))?;
    let lists = home.join("CMakeLists.txt");
    fs::write(&lists, CMAKE_LISTS).at("write", &lists)?;
    let build = home.join("build");
    let mut configure = Command::new(&cmake);
    configure.arg("-S").arg(&home).arg("-B").arg(&build).arg(format!("-DHob_DIR={}", installed.join("lib/cmake/Hob").display()));
    capture(&mut configure, |_| ())?;
    capture(Command::new(&cmake).arg("--build").arg(&build), |_| ())?;

    let moved = home.join("elsewhere");
    fs::rename(&installed, &moved).at("move", &installed)?;
    for program in [home.join("by-pkg-config"), build.join("smoke")] {
        let mut run = Command::new(&program);
        // Only libhob is searched for by path; what it needs it finds by itself.
        run.args(arguments).env("LD_LIBRARY_PATH", moved.join("lib"));
        let output = capture(&mut run, |_| ())?;
        if !output.contains("16 tokens") {
            return Err(Error::new(format!("{} did not chat", program.display())).output(output.lines().map(str::to_owned)));
        }
    }
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    capture(Command::new("cp").arg("-a").arg(from).arg(to), |_| ()).map(|_| ())
}

/// Brought where the machine has no cmake.
const CMAKE: Wheel = Wheel {
    package: "cmake",
    version: "3.31.6",
    size: 27_800_904,
    sha256: "1c8b05df0602365da91ee6a3336fe57525b137706c4ab5675498f662ae1dbcec",
};

/// The machine's cmake, else the one of the pinned wheel, kept in `folder`.
fn cmake(folder: &Path) -> Result<PathBuf> {
    if let Some(cmake) = on_path("cmake") {
        return Ok(cmake);
    }
    let kept = folder.join("cmake");
    let cmake = kept.join("cmake/data/bin/cmake");
    if !cmake.is_file() {
        ui::step("cmake, from its wheel", |step| {
            let scratch = Scratch::new(folder)?;
            scratch.place(&CMAKE.unpacked(&scratch, step)?, &kept)
        })?;
        // A wheel's files are unpacked without their modes.
        capture(Command::new("chmod").arg("+x").arg(&cmake), |_| ())?;
    }
    Ok(cmake)
}
