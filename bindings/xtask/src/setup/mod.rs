//! `setup`: what cargo needs before it can build Hob on this machine.

mod blas;
mod linux;
mod macos;

use crate::error::{Error, Result};

/// Brings what is missing; in well under a second when nothing is.
pub(crate) fn ensure() -> Result<()> {
    match (std::env::consts::OS, std::env::consts::ARCH) {
        ("linux", "x86_64") => linux::ensure(&linux::X86_64),
        ("linux", "aarch64") => linux::ensure(&linux::AARCH64),
        ("macos", "aarch64") => macos::ensure(),
        ("macos", _) => Err(Error::new("Hob on macOS needs Apple silicon: MLX does not run on Intel Macs")),
        (system, arch) => Err(Error::new(format!("Hob does not run on {system} {arch}"))
            .mend("use Linux on x86-64 or arm64 (with glibc 2.35 or newer), or macOS on Apple silicon")),
    }
}
