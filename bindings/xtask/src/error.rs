//! The one error of xtask: what failed, in which step, the tool's last lines, and what mends it.

use std::{fmt, io, path::Path};

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Boxed, so that a `Result` stays one word wide.
#[derive(Debug)]
pub(crate) struct Error(Box<Report>);

#[derive(Debug, Default)]
struct Report {
    step: Option<String>,
    what: String,
    output: Vec<String>,
    mend: Option<String>,
}

impl Error {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self(Box::new(Report { what: what.into(), ..Report::default() }))
    }

    /// Says how to mend it; the first (innermost) advice stays.
    pub(crate) fn mend(mut self, mend: impl Into<String>) -> Self {
        self.0.mend.get_or_insert_with(|| mend.into());
        self
    }

    /// The last lines that the failing tool printed.
    pub(crate) fn output(mut self, lines: impl IntoIterator<Item = String>) -> Self {
        self.0.output.extend(lines);
        self
    }

    /// Names the step; the innermost name stays.
    pub(crate) fn step(mut self, step: &str) -> Self {
        self.0.step.get_or_insert_with(|| step.to_owned());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.step {
            Some(step) => write!(f, "error in step \"{step}\": {}", self.0.what)?,
            None => write!(f, "error: {}", self.0.what)?,
        }
        for line in &self.0.output {
            write!(f, "\n  | {line}")?;
        }
        if let Some(mend) = &self.0.mend {
            write!(f, "\nto mend it: {mend}")?;
        }
        Ok(())
    }
}

/// Gives an I/O error the path it was about, and the usual remedy for its kind.
pub(crate) trait At<T> {
    fn at(self, doing: &str, path: &Path) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, doing: &str, path: &Path) -> Result<T> {
        self.map_err(|error| {
            let report = Error::new(format!("cannot {doing} {}: {error}", path.display()));
            match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => report.mend(DISK_FULL),
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    report.mend("make the repository's target folder writable for this user")
                }
                _ => report,
            }
        })
    }
}

const DISK_FULL: &str =
    "free some disk space (setup needs about 1 GB, the models 200 MB, all the tests 16 GB), then run the same command again";

/// The remedy that a failing tool's own words point to, if they point to one.
pub(crate) fn mend_for_output(output: &str) -> Option<&'static str> {
    const KNOWN: &[(&[&str], &str)] = &[
        (&["No space left on device", "Disk quota exceeded"], DISK_FULL),
        (
            &["No module named pip", "No module named 'pip'"],
            "install pip for this python3 (Debian, Ubuntu: apt-get install python3-pip)",
        ),
        (
            &[
                "Failed to establish a new connection",
                "Connection refused",
                "name resolution",
                "Could not resolve host",
                "Network is unreachable",
                "Connection timed out",
                "Read timed out",
                "failed to download",
                "download of config.json failed",
                "spurious network error",
            ],
            "check the network and the package index that this machine is set to use, then run the same command again; what is done already is kept",
        ),
        (
            &["BadZipFile", "Bad CRC", "Wheel '", "DO NOT MATCH THE HASHES"],
            "the file was damaged on its way: `python3 -m pip cache purge`, then run the same command again",
        ),
        (
            &["No matching distribution found"],
            "the package index has no such wheel for this machine: it needs x86-64 or arm64 Linux with glibc 2.35 or newer, and an index that mirrors all versions",
        ),
    ];
    KNOWN.iter().find(|(signs, _)| signs.iter().any(|sign| output.contains(sign))).map(|(_, mend)| *mend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_names_step_output_and_remedy() {
        let error = Error::new("c++ exited with 1")
            .output(["a.cpp:1: no".to_owned()])
            .mend("install a compiler")
            .mend("outer advice loses")
            .step("mlx-c")
            .step("outer step loses");
        assert_eq!(
            error.to_string(),
            "error in step \"mlx-c\": c++ exited with 1\n  | a.cpp:1: no\nto mend it: install a compiler"
        );
    }

    #[test]
    fn disk_full_is_recognised_before_network() {
        let mend = mend_for_output("OSError: [Errno 28] No space left on device; failed to download");
        assert!(mend.is_some_and(|mend| mend.contains("disk space")));
        assert_eq!(mend_for_output("all well"), None);
    }

    #[test]
    fn pip_without_network_is_blamed_on_the_network() {
        // pip's last line alone would blame the version.
        let output = "WARNING: Retrying ... NewConnectionError: Failed to establish a new connection\nERROR: No matching distribution found for mlx-cpu==0.32.2";
        assert!(mend_for_output(output).is_some_and(|mend| mend.contains("network")));
    }
}
