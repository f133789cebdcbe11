//! macOS: mlx-sys builds MLX with Metal by itself; it needs Xcode's tools and cmake to be there.

use std::process::Command;

use crate::{
    error::{Error, Result},
    proc::{self, capture},
    ui,
};

pub(crate) fn ensure() -> Result<()> {
    for (tool, mend) in [
        ("clang++", "install Xcode's command line tools: xcode-select --install"),
        ("metal", "install Xcode, then its Metal compiler: xcodebuild -downloadComponent MetalToolchain"),
    ] {
        capture(Command::new("xcrun").args(["--find", tool]), |_| ())
            .map_err(|_| Error::new(format!("Xcode's `{tool}` is not here")).mend(mend))?;
    }
    if proc::on_path("cmake").is_none() {
        return Err(Error::new("`cmake` is not on PATH; MLX is built with it").mend("brew install cmake"));
    }
    ui::line("setup: up to date (Xcode's tools and cmake are here; cargo builds MLX itself)");
    Ok(())
}
