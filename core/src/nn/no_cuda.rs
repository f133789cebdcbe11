//! What `cuda.rs` offers, where there is no CUDA: nothing.

use mlx_rs::Array;

use super::{Linear, RmsNorm, Step};
use crate::error::Result;

pub(super) fn available() -> bool {
    false
}

pub(super) fn product(_x: &Array, _weight: &Array, _onto: Option<&Array>) -> Result<Option<Array>> {
    Ok(None)
}

pub(super) fn projections(_norm: &RmsNorm, _x: &Array, _linears: [&Linear; 3]) -> Result<Option<[Array; 3]>> {
    Ok(None)
}

pub(super) fn gated(_norm: &RmsNorm, _x: &Array, _gate: &Linear, _up: &Linear) -> Result<Option<Array>> {
    Ok(None)
}

pub(super) fn attend(_step: &Step<'_>) -> Result<Option<Array>> {
    Ok(None)
}
