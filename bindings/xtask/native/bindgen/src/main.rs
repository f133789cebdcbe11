//! `mlx-bindings OUT MLX_C_ROOT [CLANG_ARG]...`: the options are those of mlx-sys 0.7's own build script.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let out = args.next().ok_or("usage: mlx-bindings OUT MLX_C_ROOT [CLANG_ARG]...")?;
    let root = PathBuf::from(args.next().ok_or("MLX_C_ROOT is missing")?);
    let mut headers =
        fs::read_dir(root.join("mlx/c"))?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>()?;
    headers.retain(|path| path.extension().is_some_and(|extension| extension == "h"));
    headers.sort();
    let mut builder = bindgen::Builder::default()
        .rust_target("1.73.0".parse().map_err(|error| format!("{error:?}"))?)
        .clang_arg(format!("-I{}", root.display()))
        // Their bindgen signatures differ from libc's and trip a rustc lint.
        .blocklist_function("malloc")
        .blocklist_function("realloc")
        .clang_args(args);
    for header in &headers {
        builder = builder.header(header.to_string_lossy());
    }
    builder.generate()?.write_to_file(out)?;
    Ok(())
}
