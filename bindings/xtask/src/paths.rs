//! Where things lie in the repository.

use std::{
    env,
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The repository's root, whatever folder the command was given in.
pub(crate) fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        // `cargo run` tells where the package lies now; the compiled-in place is for a binary started by hand.
        let package = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = package.join("../..");
        root.canonicalize().unwrap_or(root)
    })
}

/// The native parts. Fixed to the checkout, not to CARGO_TARGET_DIR: `.cargo/config.toml` includes a file from here.
pub(crate) fn native() -> PathBuf {
    real(root().join("target/native"))
}

/// The small real models.
pub(crate) fn models() -> PathBuf {
    real(root().join("target/models"))
}

/// Where a link leads: worktrees of one repository may share these folders, and name them alike then.
fn real(place: PathBuf) -> PathBuf {
    place.canonicalize().unwrap_or(place)
}

/// xtask's own C, C++ and bindgen sources.
pub(crate) fn native_sources() -> PathBuf {
    root().join("bindings/xtask/native")
}
