//! Tells cargo how an addon is linked.

fn main() {
    napi_build::setup();
}
