//! `dist`: what is published for C, laid out: headers, libraries, and the files by which pkg-config and CMake find them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    elf,
    error::{At, Error, Result},
    header, paths,
    proc::{self, capture},
    setup, ui,
    workspace::Workspace,
};

/// Builds with optimisation and lays out `folder` (target/dist if none is named).
pub(crate) fn run(folder: Option<&Path>) -> Result<()> {
    setup::ensure()?;
    let target = Workspace::read()?.target_directory()?;
    let folder = folder.map_or_else(|| target.join("dist"), Path::to_owned);
    ui::step("libhob, optimised", |step| {
        capture(proc::cargo().args(["build", "--release", "--package", "hob-ffi"]), |line| line.map_or((), |line| step.note(line)))
            .map(|_| ())
    })?;
    lay_out(&target.join("release"), &folder)?;
    println!(
        "{}: include, lib (libhob and all it needs, found by each other wherever the folder is), pkg-config, CMake",
        folder.display()
    );
    Ok(())
}

/// Copies what `built` holds into a new folder that can be moved.
pub(crate) fn lay_out(built: &Path, folder: &Path) -> Result<()> {
    if !cfg!(target_os = "linux") {
        return Err(Error::new("dist lays out Linux only so far"));
    }
    if folder.exists() {
        if !folder.join("include/hob.h").is_file() {
            return Err(
                Error::new(format!("{} is there and is not what dist lays out", folder.display())).mend("name another folder")
            );
        }
        fs::remove_dir_all(folder).at("empty", folder)?;
    }
    let (include, lib) = (folder.join("include"), folder.join("lib"));
    for new in [&include, &lib.join("pkgconfig"), &lib.join("cmake/Hob")] {
        fs::create_dir_all(new).at("make", new)?;
    }
    copy(&header::header_path(), &include.join("hob.h"))?;
    copy(&paths::root().join("include/module.modulemap"), &include.join("module.modulemap"))?;
    for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
        copy(&paths::root().join(licence), &folder.join(licence))?;
    }
    let soname = format!("libhob.so.{}", abi()?);
    library(&built.join("libhob_ffi.so"), &lib.join(&soname))?;
    link(&soname, &lib.join("libhob.so"))?;
    copy(&built.join("libhob_ffi.a"), &lib.join("libhob.a"))?;
    write(&lib.join("pkgconfig/hob.pc"), &pkg_config()?)?;
    write(&lib.join("cmake/Hob/HobConfig.cmake"), CMAKE)?;
    write(&lib.join("cmake/Hob/HobConfigVersion.cmake"), &cmake_version()?)
}

/// Copies a library of Hob's and beside it what it needs: together they can be moved anywhere.
pub(crate) fn library(built: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().ok_or_else(|| Error::new(format!("{} is in no folder", to.display())))?;
    copy(built, to)?;
    elf::set_run_path(to, "$ORIGIN")?;
    libraries(folder)
}

/// Copies MLX and its linear algebra, which find each other wherever the folder is: the portable references; a machine's OpenBLAS
/// may take their place (same names).
pub(crate) fn libraries(folder: &Path) -> Result<()> {
    let mlx = folder.join("libmlx.so");
    copy(&paths::native().join("mlx/lib/libmlx.so"), &mlx)?;
    elf::set_run_path(&mlx, "$ORIGIN")?;
    let libs = paths::native().join("mlx_cpu.libs");
    for place in [libs.clone(), libs.join("reference")] {
        for file in fs::read_dir(&place).at("read", &place)?.flatten() {
            let kind = file.file_type().at("read", &file.path())?;
            if kind.is_file() {
                let to = folder.join(file.file_name());
                copy(&file.path(), &to)?;
                elf::set_run_path(&to, "$ORIGIN")?;
            }
        }
    }
    Ok(())
}

/// HOB_ABI_VERSION of the committed header.
fn abi() -> Result<String> {
    macro_of("HOB_ABI_VERSION")
}

fn version() -> Result<String> {
    let parts = ["HOB_VERSION_MAJOR", "HOB_VERSION_MINOR", "HOB_VERSION_PATCH"].map(macro_of);
    Ok(parts.into_iter().collect::<Result<Vec<_>>>()?.join("."))
}

fn macro_of(name: &str) -> Result<String> {
    let path = header::header_path();
    let header = fs::read_to_string(&path).at("read", &path)?;
    let value = header.lines().find_map(|line| line.strip_prefix("#define ")?.strip_prefix(name)?.strip_prefix(' '));
    value.map(str::to_owned).ok_or_else(|| Error::new(format!("include/hob.h does not define {name}")).mend("cargo xtask header"))
}

fn pkg_config() -> Result<String> {
    Ok(format!(
        "prefix=${{pcfiledir}}/../..\nincludedir=${{prefix}}/include\nlibdir=${{prefix}}/lib\n\nName: hob\nDescription: In-process inference\nVersion: {}\nCflags: -I${{includedir}}\nLibs: -L${{libdir}} -lhob -Wl,-rpath-link,${{libdir}}\nLibs.private: -lmlx -lstdc++ -lm -lpthread -ldl\n",
        version()?
    ))
}

const CMAKE: &str = "# find_package(Hob) gives the target Hob::hob.
get_filename_component(_hob_prefix \"${CMAKE_CURRENT_LIST_DIR}/../../..\" ABSOLUTE)
if(NOT TARGET Hob::hob)
  add_library(Hob::hob SHARED IMPORTED)
  set_target_properties(Hob::hob PROPERTIES
    IMPORTED_LOCATION \"${_hob_prefix}/lib/libhob.so\"
    INTERFACE_INCLUDE_DIRECTORIES \"${_hob_prefix}/include\"
    INTERFACE_LINK_OPTIONS \"-Wl,-rpath-link,${_hob_prefix}/lib\")
endif()
unset(_hob_prefix)
";

fn cmake_version() -> Result<String> {
    // Until 1.0 a minor version may change the API.
    Ok(format!(
        "set(PACKAGE_VERSION \"{0}\")\nif(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)\n  set(PACKAGE_VERSION_COMPATIBLE FALSE)\nelse()\n  set(PACKAGE_VERSION_COMPATIBLE TRUE)\n  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)\n    set(PACKAGE_VERSION_EXACT TRUE)\n  endif()\nendif()\n",
        version()?
    ))
}

pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).at("copy", from).map(|_| ())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).at("write", path)
}

#[cfg(unix)]
pub(crate) fn link(target: &str, at: &PathBuf) -> Result<()> {
    std::os::unix::fs::symlink(target, at).at("link", at)
}

#[cfg(not(unix))]
pub(crate) fn link(_: &str, at: &PathBuf) -> Result<()> {
    Err(Error::new(format!("cannot link {} here", at.display())))
}
