//! Which BLAS and LAPACK MLX uses on Linux.
//!
//! The wheel brings the reference ones: 30 to 60 times slower at a matrix product than OpenBLAS. Their two files live on
//! in `mlx_cpu.libs/reference`; in their place stand links, to OpenBLAS where the machine has it, else to the references.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{At, Error, Result},
    proc::capture,
    store,
};

pub(crate) const MEND: &str = "`apt-get install libopenblas0` (or your system's OpenBLAS) and `cargo xtask setup` mend it";

/// The machine's OpenBLAS, if it has one.
pub(crate) fn find_openblas(arch: &str) -> Option<PathBuf> {
    let listed = ["ldconfig", "/sbin/ldconfig"].iter().find_map(|tool| {
        let output = capture(Command::new(tool).arg("-p"), |_| ()).ok()?;
        from_ldconfig(&output, arch)
    });
    listed.or_else(|| {
        ["/usr/lib64", "/usr/lib", "/usr/local/lib"].iter().map(|folder| Path::new(folder).join(LIBRARY)).find(|path| path.exists())
    })
}

const LIBRARY: &str = "libopenblas.so.0";

/// `libopenblas.so.0 (libc6,x86-64) => /lib/x86_64-linux-gnu/libopenblas.so.0`
fn from_ldconfig(output: &str, arch: &str) -> Option<PathBuf> {
    let tag = if arch == "aarch64" { "AArch64" } else { "x86-64" };
    output.lines().find_map(|line| {
        let (name, path) = line.split_once("=>")?;
        let (name, kind) = name.trim().split_once(' ')?;
        let path = PathBuf::from(path.trim());
        (name == LIBRARY && kind.contains(tag) && path.exists()).then_some(path)
    })
}

/// In a freshly unpacked `mlx_cpu.libs`: moves the reference libraries aside, so that links can take their names.
pub(crate) fn keep_references(libs: &Path) -> Result<()> {
    let reference = libs.join("reference");
    fs::create_dir_all(&reference).at("create", &reference)?;
    let mut found = 0;
    for entry in fs::read_dir(libs).at("read", libs)?.flatten() {
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text.starts_with("libblas-") || text.starts_with("liblapack-") {
            fs::rename(entry.path(), reference.join(&name)).at("move", &entry.path())?;
            found += 1;
        }
    }
    if found == 2 {
        return Ok(());
    }
    Err(Error::new(format!("the wheel holds {found} BLAS and LAPACK libraries where two were expected")))
}

/// Whether every link stands as `openblas` asks.
pub(crate) fn is_linked(libs: &Path, openblas: Option<&Path>) -> bool {
    links(libs, openblas).is_ok_and(|links| {
        !links.is_empty() && links.iter().all(|(link, target)| fs::read_link(link).is_ok_and(|now| now == *target))
    })
}

/// Points the links to `openblas`, or to the references; each changes in one step.
pub(crate) fn link(libs: &Path, openblas: Option<&Path>) -> Result<()> {
    for (link, target) in links(libs, openblas)? {
        let mut temporary = link.as_os_str().to_owned();
        temporary.push(".tmp");
        let temporary = PathBuf::from(temporary);
        store::remove_if_there(&temporary)?;
        symlink(&target, &temporary).at("link", &temporary)?;
        fs::rename(&temporary, &link).at("move into place", &link)?;
    }
    Ok(())
}

fn links(libs: &Path, openblas: Option<&Path>) -> Result<Vec<(PathBuf, PathBuf)>> {
    let reference = libs.join("reference");
    let entries = fs::read_dir(&reference).at("read", &reference)?;
    Ok(entries
        .flatten()
        .map(|entry| {
            let name = entry.file_name();
            let target = openblas.map_or_else(|| Path::new("reference").join(&name), Path::to_owned);
            (libs.join(name), target)
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldconfig_is_read_by_architecture() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let library = home.path().join("libopenblas.so.0");
        fs::write(&library, "").expect("write");
        let path = library.display();
        let output = format!(
            "2 libs found\n\tlibopenblas.so.0 (libc6) => /no/such/i386\n\tlibopenblas.so.0 (libc6,x86-64) => {path}\n\tlibopenblas.so (libc6,x86-64) => /dev/null\n"
        );
        assert_eq!(from_ldconfig(&output, "x86_64"), Some(library.clone()));
        assert_eq!(from_ldconfig(&output, "aarch64"), None);
        fs::remove_file(&library).expect("remove");
        assert_eq!(from_ldconfig(&output, "x86_64"), None, "listed, yet gone");
    }

    #[test]
    fn links_follow_the_machine() {
        let home = tempfile::tempdir().expect("a temporary folder");
        let libs = home.path();
        for name in ["libblas-1.so", "liblapack-2.so", "libgfortran-3.so"] {
            fs::write(libs.join(name), name).expect("write");
        }
        keep_references(libs).expect("two of them");
        assert!(!is_linked(libs, None));
        link(libs, None).expect("link");
        assert!(is_linked(libs, None));
        assert_eq!(fs::read_to_string(libs.join("libblas-1.so")).expect("through the link"), "libblas-1.so");
        let openblas = Path::new("/usr/lib/libopenblas.so.0");
        link(libs, Some(openblas)).expect("OpenBLAS was installed later");
        assert!(is_linked(libs, Some(openblas)) && !is_linked(libs, None));
        link(libs, None).expect("OpenBLAS was removed later");
        assert!(is_linked(libs, None));
        assert!(libs.join("libgfortran-3.so").is_file());
    }
}
