//! What is published on npm, laid out and packed.

use std::path::Path;

use crate::error::Result;

pub(super) fn run(_folder: Option<&Path>, _dev: bool) -> Result<()> {
    Ok(())
}
