//! The pool's speed.
fn main() {}
