//! Names the library for the dynamic linker, and keeps everything but Hob's own functions inside it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_LIBHOB").is_none() {
        return;
    }
    match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("linux") => {
            println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhob.so.1");
            // Dependencies have exported functions of their own (mlx-rs); those come from archives.
            println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
            // libmlx lies beside libhob wherever the folder is moved to.
            println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,$ORIGIN");
        }
        Ok("macos") => println!("cargo:rustc-cdylib-link-arg=-Wl,-install_name,@rpath/libhob.1.dylib"),
        _ => {}
    }
}
