//! Linux: the published mlx-sys builds on Apple only, so its build script is replaced.
//!
//! MLX comes as its official wheel; the mlx-c inside the mlx-sys crate is compiled against it; bindgen makes the bindings;
//! and a cargo configuration puts all that in the build script's place, through mlx-sys's `links` key. The crates stay
//! unpatched. `.cargo/config.toml` includes that configuration, so it is written last: when it is there, all is there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
    sync::mpsc,
    thread,
};

use serde_json::Value;

use super::blas;
use crate::{
    error::{At, Error, Result},
    paths,
    proc::{self, capture},
    stamp::{Stamps, State, file_sha256, key},
    store::{self, Lock, Scratch},
    ui::{self, Step},
    wheel::Wheel,
};

const MLX: &str = "0.32.2";

/// What differs between the two Linux platforms.
pub(crate) struct Platform {
    triple: &'static str,
    arch: &'static str,
    mlx: Wheel,
    libclang: Wheel,
}

pub(crate) const X86_64: Platform = Platform {
    triple: "x86_64-unknown-linux-gnu",
    arch: "x86_64",
    mlx: Wheel {
        package: "mlx-cpu",
        version: MLX,
        size: 10_388_414,
        sha256: "fc5d31b90fc4f457b2f9614ed45651a567d22a6a11a03d114a90a4e10bdd8878",
    },
    libclang: Wheel {
        package: "libclang",
        version: "18.1.1",
        size: 24_515_943,
        sha256: "c533091d8a3bbf7460a00cb6c1a71da93bffe148f172c7d03b1c31fbf8aa2a0b",
    },
};

/// The wheels exist and are pinned; nobody has run Hob there yet.
pub(crate) const AARCH64: Platform = Platform {
    triple: "aarch64-unknown-linux-gnu",
    arch: "aarch64",
    mlx: Wheel {
        package: "mlx-cpu",
        version: MLX,
        size: 8_822_016,
        sha256: "d0f94625588b51a878786dd51cec5617894ce586cf3c94645ce1b64e24c27c0b",
    },
    libclang: Wheel {
        package: "libclang",
        version: "18.1.1",
        size: 23_784_972,
        sha256: "54dda940a4a0491a9d1532bf071ea3ef26e6dbaf03b5000ed94dd7174e8f9592",
    },
};

/// The steps that leave files, in their order; each one's stamp bears its name.
const STEPS: [&str; 3] = ["mlx", "mlx-c", "bindings"];

pub(crate) fn ensure(platform: &Platform) -> Result<()> {
    let plan = Plan::new(platform)?;
    if plan.is_done() {
        ui::line(&format!("setup: up to date (MLX {MLX}, {})", plan.blas_name()));
        plan.warn();
        return Ok(());
    }
    let _lock = Lock::take(&plan.home, "setup")?;
    let scratch = Scratch::new(&plan.home)?;
    ui::line(&format!("setup: MLX {MLX} for {} into target/native", platform.triple));
    plan.run(&scratch)?;
    ui::line(&format!("setup: done (MLX {MLX}, {})", plan.blas_name()));
    plan.warn();
    Ok(())
}

/// A finished file or folder, and its place.
struct Made {
    from: PathBuf,
    to: PathBuf,
}

struct Plan<'a> {
    platform: &'a Platform,
    home: PathBuf,
    stamps: Stamps,
    keys: [String; STEPS.len()],
    openblas: Option<PathBuf>,
    config: String,
}

impl<'a> Plan<'a> {
    fn new(platform: &'a Platform) -> Result<Self> {
        let home = paths::native();
        let sources = paths::native_sources();
        let lock_path = paths::root().join("Cargo.lock");
        let lock = fs::read_to_string(&lock_path).at("read", &lock_path)?;
        let mlx_sys = locked(&lock, "mlx-sys")
            .ok_or_else(|| Error::new("Cargo.lock does not pin mlx-sys").mend("restore Cargo.lock: git checkout Cargo.lock"))?;
        let hash = |name: &str| {
            let path = sources.join(name);
            file_sha256(&path, |_| ()).at("read", &path)
        };
        let compat = hash("mlx_linux_compat.h")?;
        let compiler = compiler_id();
        let mlx = key(&[platform.mlx.package, platform.mlx.version, platform.mlx.sha256, "layout 1"]);
        let mlx_c =
            key(&[&mlx, &mlx_sys, &compat, &hash("mach_compat.c")?, &hash("cuda_kernel.cpp")?, &compiler, &CXX_FLAGS.join(" ")]);
        let bindings = key(&[
            &mlx_sys,
            &compat,
            platform.libclang.version,
            platform.libclang.sha256,
            &compiler,
            &hash("bindgen/src/main.rs")?,
            &hash("bindgen/Cargo.lock")?,
        ]);
        let config = cargo_config(platform.triple, &home)?;
        let openblas = blas::find_openblas(platform.arch);
        Ok(Self { platform, stamps: Stamps::new(&home), home, keys: [mlx, mlx_c, bindings], openblas, config })
    }

    fn state(&self, step: usize) -> State {
        self.stamps.state(STEPS[step], &self.keys[step])
    }

    fn is_done(&self) -> bool {
        (0..STEPS.len()).all(|step| self.state(step) == State::Current)
            && blas::is_linked(&self.libs(), self.openblas.as_deref())
            && fs::read_to_string(self.config_path()).is_ok_and(|config| config == self.config)
    }

    fn run(&self, scratch: &Scratch) -> Result<()> {
        // Asked again under the lock: another run may have done it meanwhile.
        let stale: Vec<usize> = (0..STEPS.len())
            .filter(|&step| match self.state(step) {
                State::Current => false,
                State::Damaged(path) => {
                    ui::line(&format!("  {} is missing or changed; making it again", path.display()));
                    true
                }
                State::Never | State::Inputs => true,
            })
            .collect();
        for step in stale {
            match step {
                0 => ui::step(&format!("MLX {MLX} (wheel)"), |at| self.make(step, scratch, |this| this.mlx(scratch, at)))?,
                1 => ui::step("mlx-c (compiling)", |at| self.make(step, scratch, |this| this.mlx_c(scratch, at)))?,
                _ => ui::step("bindings of mlx-c (libclang, bindgen)", |at| {
                    self.make(step, scratch, |this| this.bindings(scratch, at))
                })?,
            }
        }
        if !blas::is_linked(&self.libs(), self.openblas.as_deref()) {
            blas::link(&self.libs(), self.openblas.as_deref())?;
        }
        ui::step("loading MLX", |_| self.smoke(scratch))?;
        store::write_whole(&self.config_path(), self.config.as_bytes())
    }

    /// `work` makes everything in the scratch folder: a step that fails leaves what was there before. Then configuration
    /// and stamp go first and come back last, so that no build uses a part that is just being replaced.
    fn make(&self, step: usize, scratch: &Scratch, work: impl FnOnce(&Self) -> Result<Vec<Made>>) -> Result<()> {
        let made = work(self)?;
        store::remove_if_there(&self.config_path())?;
        self.stamps.remove(STEPS[step])?;
        for Made { from, to } in &made {
            scratch.place(from, to)?;
        }
        let outputs: Vec<PathBuf> = made.into_iter().map(|made| made.to).collect();
        self.stamps.write(STEPS[step], &self.keys[step], &outputs)
    }

    fn mlx(&self, scratch: &Scratch, step: &Step) -> Result<Vec<Made>> {
        let unpacked = self.platform.mlx.unpacked(scratch, step)?;
        blas::keep_references(&unpacked.join("mlx_cpu.libs"))?;
        Ok(vec![
            Made { from: unpacked.join("mlx"), to: self.home.join("mlx") },
            Made { from: unpacked.join("mlx_cpu.libs"), to: self.libs() },
        ])
    }

    fn mlx_c(&self, scratch: &Scratch, step: &Step) -> Result<Vec<Made>> {
        let root = mlx_c_source(self.platform.triple, step)?;
        let folder = scratch.folder("mlx-c")?;
        let mut sources = sources_of(&root.join("mlx/c"))?;
        sources.push(paths::native_sources().join("cuda_kernel.cpp"));
        // MLX's headers are most of each file's work: they are read once, as a precompiled header. A compiler that cannot
        // use it reads the plain one in its place.
        let header = folder.join("mlx.hpp");
        let text = format!("#include {}\n#include \"mlx/mlx.h\"\n", quoted(&compat())?);
        fs::write(&header, text).at("write", &header)?;
        let compiler = || {
            let mut command = proc::tool("CXX", "c++");
            command.args(CXX_FLAGS).arg("-I").arg(&root).arg("-I").arg(self.home.join("mlx/include"));
            command
        };
        step.note("precompiling MLX's headers");
        let mut precompile = compiler();
        precompile.args(["-x", "c++-header"]).arg(&header).arg("-o").arg(folder.join("mlx.hpp.gch"));
        capture(&mut precompile, |_| step.note("precompiling MLX's headers")).map_err(needs_compiler)?;
        let objects = compile(&sources, step, |source| {
            let object = folder.join(source.file_name().unwrap_or_default()).with_extension("o");
            let mut command = compiler();
            command.arg("-include").arg(&header).arg("-c").arg(source).arg("-o").arg(&object);
            (command, object)
        })?;
        let archive = |name: &str, objects: &[PathBuf]| {
            let archive = folder.join(name);
            capture(proc::tool("AR", "ar").arg("rcs").arg(&archive).args(objects), |_| ()).map(|_| archive)
        };
        let (hob_cuda, mlx_c): (Vec<_>, Vec<_>) = objects.into_iter().partition(|object| object.ends_with("cuda_kernel.o"));
        let (hobcuda, mlxc) = (archive("libhobcuda.a", &hob_cuda)?, archive("libmlxc.a", &mlx_c)?);

        let object = folder.join("mach_compat.o");
        let source = paths::native_sources().join("mach_compat.c");
        capture(proc::tool("CC", "cc").args(["-O2", "-fPIC", "-c"]).arg(source).arg("-o").arg(&object), |_| ())?;
        let machcompat = archive("libmachcompat.a", &[object])?;

        Ok(vec![
            Made { from: mlxc, to: self.home.join("lib/libmlxc.a") },
            Made { from: hobcuda, to: self.home.join("lib/libhobcuda.a") },
            Made { from: machcompat, to: self.home.join("lib/libmachcompat.a") },
        ])
    }

    fn bindings(&self, scratch: &Scratch, step: &Step) -> Result<Vec<Made>> {
        let root = mlx_c_source(self.platform.triple, step)?;
        let unpacked = self.platform.libclang.unpacked(scratch, step)?;
        let libclang = find_file(&unpacked, "libclang.so").ok_or_else(|| Error::new("the wheel holds no libclang.so"))?;
        // Kept until it was used, so that a stopped build goes on where it was.
        let build = self.home.join("bindgen");
        let mut cargo = proc::cargo();
        cargo.args(["build", "--locked", "--manifest-path"]).arg(paths::native_sources().join("bindgen/Cargo.toml"));
        cargo.arg("--target-dir").arg(&build);
        capture(&mut cargo, |line| match line {
            Some(line) => step.note(line.trim()),
            None => step.note("building bindgen"),
        })?;
        step.note("reading the headers");
        let made = scratch.folder("bindings")?.join("bindings.rs");
        // The libclang wheel has no built-in headers: the C compiler's serve.
        let builtin = capture(proc::tool("CC", "cc").arg("-print-file-name=include"), |_| ())?;
        let mut bindgen = Command::new(build.join("debug/mlx-bindings"));
        bindgen.arg(&made).arg(&root).args(["-isystem", builtin.trim(), "-include"]).arg(compat());
        bindgen.env("LIBCLANG_PATH", libclang);
        capture(&mut bindgen, |_| step.note("reading the headers"))?;
        fs::remove_dir_all(&build).at("remove", &build)?;
        Ok(vec![Made { from: made, to: self.home.join("out/bindings.rs") }])
    }

    /// Links and runs a small program, every symbol bound: better here than in the user's first test.
    fn smoke(&self, scratch: &Scratch) -> Result<()> {
        let program = scratch.folder("smoke")?.join("smoke");
        let mut link = proc::tool("CC", "cc");
        link.arg(paths::native_sources().join("smoke.c")).arg("-o").arg(&program);
        for library in ["lib/libmlxc.a", "mlx/lib/libmlx.so"] {
            link.arg(self.home.join(library));
        }
        link.args(["-lstdc++", "-lm", "-Xlinker", "-rpath", "-Xlinker"]).arg(self.home.join("mlx/lib"));
        capture(&mut link, |_| ())?;
        capture(Command::new(&program).arg(MLX).env("LD_BIND_NOW", "1"), |_| ()).map_err(|error| {
            error.mend("the lines above name the library that does not load; with an old glibc (before 2.35) use a newer system")
        })?;
        Ok(())
    }

    fn libs(&self) -> PathBuf {
        self.home.join("mlx_cpu.libs")
    }

    fn config_path(&self) -> PathBuf {
        self.home.join("cargo-config.toml")
    }

    fn blas_name(&self) -> &'static str {
        if self.openblas.is_some() { "OpenBLAS" } else { "the wheel's reference BLAS" }
    }

    fn warn(&self) {
        if self.openblas.is_none() {
            ui::line(&format!("warning: without OpenBLAS matrix products on the CPU run 30 to 60 times slower; {}", blas::MEND));
        }
    }
}

const CXX_FLAGS: [&str; 4] = ["-O2", "-DNDEBUG", "-std=gnu++20", "-fPIC"];

fn compat() -> PathBuf {
    paths::native_sources().join("mlx_linux_compat.h")
}

/// Compiler and linker are inputs of what they made; one that is missing is reported by the step that needs it.
fn compiler_id() -> String {
    let id = |command: &mut Command| capture(command.arg("--version"), |_| ()).unwrap_or_default();
    id(&mut proc::tool("CXX", "c++")) + &id(&mut proc::tool("CC", "cc"))
}

/// Version and checksum of a package in Cargo.lock.
fn locked(lock: &str, package: &str) -> Option<String> {
    let block = lock.split("[[package]]").find(|block| block.lines().any(|line| line == format!("name = \"{package}\"")))?;
    let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "));
    Some(format!("{} {}", field("version")?, field("checksum").unwrap_or_default()))
}

/// The mlx-c source inside the mlx-sys crate: cargo fetches it, and tells where it lies.
fn mlx_c_source(triple: &str, step: &Step) -> Result<PathBuf> {
    step.note("asking cargo for the mlx-sys crate");
    let mut cargo = proc::cargo();
    cargo.args(["metadata", "--format-version", "1", "--filter-platform", triple]);
    let output = capture(&mut cargo, |line| {
        // Its last line is the answer, of a megabyte.
        if let Some(line) = line.filter(|line| line.len() < 200) {
            step.note(line.trim());
        }
    })?;
    let metadata = output.lines().find(|line| line.starts_with('{')).unwrap_or_default();
    let metadata: Value =
        serde_json::from_str(metadata).map_err(|error| Error::new(format!("cannot read cargo's metadata: {error}")))?;
    let manifest = metadata["packages"]
        .as_array()
        .and_then(|packages| packages.iter().find(|package| package["name"] == "mlx-sys"))
        .and_then(|package| package["manifest_path"].as_str())
        .ok_or_else(|| Error::new("the workspace does not depend on mlx-sys"))?;
    let folder = Path::new(manifest).with_file_name("src").join("mlx-c");
    if folder.join("mlx/c").is_dir() {
        return Ok(folder);
    }
    Err(Error::new(format!("{} does not hold mlx-c", folder.display())))
}

/// Sources, the largest first, so that the last one to finish is a small one.
fn sources_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut sources: Vec<(u64, PathBuf)> = fs::read_dir(folder)
        .at("read", folder)?
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "cpp"))
        .map(|entry| (entry.metadata().map_or(0, |meta| meta.len()), entry.path()))
        .collect();
    sources.sort_by(|a, b| b.cmp(a));
    Ok(sources.into_iter().map(|(_, path)| path).collect())
}

/// Compiles on all cores; the first failure ends it.
fn compile(sources: &[PathBuf], step: &Step, command: impl Fn(&Path) -> (Command, PathBuf) + Sync) -> Result<Vec<PathBuf>> {
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let workers = thread::available_parallelism().map_or(1, usize::from).min(sources.len());
    thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next, command) = (sender.clone(), &next, &command);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(source) = sources.get(index) else { break };
                    let (mut command, object) = command(source);
                    let result = capture(&mut command, |_| ()).map(|_| object);
                    // Nobody listens any more: another file failed.
                    if sender.send(result).is_err() {
                        break;
                    }
                }
            });
        }
        drop(sender);
        let mut objects = Vec::new();
        step.pieces(0, sources.len() as u64, "files");
        for result in receiver {
            let object = result.inspect_err(|_| next.store(sources.len(), Ordering::Relaxed));
            objects.push(object.map_err(needs_compiler)?);
            step.pieces(objects.len() as u64, sources.len() as u64, "files");
        }
        objects.sort();
        Ok(objects)
    })
}

fn needs_compiler(error: Error) -> Error {
    error.mend("install a C++20 compiler, GCC 11 or Clang 14 or newer (Debian, Ubuntu: apt-get install g++)")
}

/// A path as it stands in an #include or in TOML.
fn quoted(path: &Path) -> Result<String> {
    let text = path.to_str().filter(|text| !text.contains([':', '\n', '"', '\\'])).ok_or_else(|| {
        Error::new(format!("the path {} cannot stand in the tools' files", path.display()))
            .mend("move the repository to a path without ':', '\"' and '\\'")
    })?;
    Ok(format!("\"{text}\""))
}

fn find_file(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            folders.push(path);
        } else if entry.file_name() == name {
            return Some(path);
        }
    }
    folders.iter().find_map(|folder| find_file(folder, name))
}

/// mlx-sys declares `links = "mlx"`: cargo then takes this in place of its build script's output. OUT_DIR is where its
/// lib.rs looks for the bindings.
fn cargo_config(triple: &str, home: &Path) -> Result<String> {
    let prefixed = |prefix: &str, path: &Path| Ok::<_, Error>(quoted(path)?.replacen('"', &format!("\"{prefix}"), 1));
    let (lib, mlx) = (home.join("lib"), home.join("mlx/lib"));
    // Tests of documentation are linked by rustdoc, with flags of its own.
    let rpath = format!(r#""-Clink-arg=-Xlinker", "-Clink-arg=-rpath", "-Clink-arg=-Xlinker", {}"#, prefixed("-Clink-arg=", &mlx)?);
    Ok(format!(
        "# Written by `cargo xtask setup`; .cargo/config.toml includes it.\n\
         [target.{triple}.mlx]\n\
         rustc-link-search = [{}, {}]\n\
         rustc-link-lib = [\"static=mlxc\", \"static=machcompat\", \"dylib=mlx\", \"dylib=stdc++\"]\n\
         rustc-env = {{ OUT_DIR = {} }}\n\
         [target.{triple}]\n\
         rustdocflags = [{rpath}]\n\
         # The alias `cargo xtask` sets hob_xtask: xtask needs no MLX.\n\
         [target.'cfg(all(target_os = \"linux\", not(hob_xtask)))']\n\
         rustflags = [{rpath}]\n",
        prefixed("native=", &lib)?,
        prefixed("native=", &mlx)?,
        quoted(&home.join("out"))?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_file_is_read() {
        let lock = "version = 4\n\n[[package]]\nname = \"mlx-sys-other\"\nversion = \"9\"\n\n[[package]]\nname = \"mlx-sys\"\nversion = \"0.7.0\"\nsource = \"s\"\nchecksum = \"c\"\ndependencies = [\n \"cc\",\n]\n";
        assert_eq!(locked(lock, "mlx-sys").as_deref(), Some("\"0.7.0\" \"c\""));
        assert_eq!(locked(lock, "mlx"), None);
    }

    #[test]
    fn configuration_survives_spaces() {
        let config = cargo_config("t", Path::new("/a b/c")).expect("a plain enough path");
        assert!(config.contains(r#"OUT_DIR = "/a b/c/out""#), "{config}");
        assert!(config.contains(r#""native=/a b/c/mlx/lib""#), "{config}");
        assert!(config.contains(r#""-Clink-arg=/a b/c/mlx/lib""#), "{config}");
    }

    #[test]
    fn a_path_that_no_tool_could_hold_is_refused() {
        for path in ["/a:b", "/a\"b"] {
            let error = cargo_config("t", Path::new(path)).expect_err("refused").to_string();
            assert!(error.contains("to mend it"), "{error}");
        }
    }
}
