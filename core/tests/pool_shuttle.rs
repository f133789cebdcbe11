//! Interleavings of the pool, model-checked with shuttle. Run with `cargo test --features shuttle --test pool_shuttle`.
