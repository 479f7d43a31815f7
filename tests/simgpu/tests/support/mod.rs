//! Compiling CUDA programs and running them on the software GPU.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::collections::HashMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, OnceLock};
use std::{env, fs};

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A folder in which the software GPU is called `libcuda.so.1`.
pub(crate) fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let test = env::current_exe().unwrap();
        let built = test.ancestors().map(|folder| folder.join("libsimcuda.so")).find(|file| file.exists());
        let built = built.expect("libsimcuda.so is not built: cargo build -p rekindle-simgpu");
        let folder = scratch().join("lib");
        fs::create_dir_all(&folder).unwrap();
        // The second name is for programs that are linked against it.
        for link in ["libcuda.so.1", "libcuda.so"].map(|name| folder.join(name)) {
            if fs::read_link(&link).ok().as_ref() != Some(&built) {
                // Another test may do the same at the same time: rename, so that the link is always there.
                let new = folder.join(format!("new-{}", std::process::id()));
                let _ = fs::remove_file(&new);
                symlink(&built, &new).unwrap();
                fs::rename(&new, &link).unwrap();
            }
        }
        folder
    })
}

/// A folder for the tests' files, kept between runs.
fn scratch() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("simgpu")
}

fn compiler() -> PathBuf {
    let from_environment = env::var_os("REKINDLE_NVCC").map(PathBuf::from);
    let nvcc = from_environment.unwrap_or_else(|| root().join(".toolchain/bin/nvcc"));
    assert!(nvcc.exists(), "no CUDA compiler at {}: run scripts/setup --build, or set REKINDLE_NVCC", nvcc.display());
    nvcc
}

/// The program of that source, compiled for compute capability 7.5 with the runtime linked statically.
pub(crate) fn compile(source: &Path, options: &[&str]) -> PathBuf {
    compile_for(source, "arch=compute_75,code=compute_75", options)
}

fn compile_for(source: &Path, target: &str, options: &[&str]) -> PathBuf {
    static COMPILED: Mutex<Option<HashMap<PathBuf, Arc<OnceLock<()>>>>> = Mutex::new(None);
    let name = source.file_stem().unwrap().to_string_lossy();
    let suffix: String =
        format!("{target}{}", options.concat()).chars().filter(|c| c.is_ascii_alphanumeric()).collect();
    let folder = scratch().join("bin").join(source.parent().unwrap().file_name().unwrap());
    fs::create_dir_all(&folder).unwrap();
    let program = folder.join(format!("{name}{suffix}"));
    let mut compiled = COMPILED.lock().unwrap();
    let once = compiled.get_or_insert_default().entry(program.clone()).or_default().clone();
    drop(compiled);
    once.get_or_init(|| {
        let modified = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
        let inputs = [source.to_owned(), source.with_file_name("app.h"), source.with_file_name("check.h")];
        let newest = inputs.iter().filter_map(|input| modified(input)).max();
        if modified(&program) > newest {
            return;
        }
        let nvcc = compiler();
        let toolkit = nvcc.parent().unwrap().parent().unwrap();
        let new = folder.join(format!("{name}{suffix}-{}", std::process::id()));
        let made = Command::new(&nvcc)
            .args(["-std=c++17", "-gencode", target])
            .args(options)
            .arg(format!("-L{}", library().display()))
            .arg(format!("-L{}", toolkit.join("lib").display()))
            .arg(format!("-L{}", toolkit.join("cuda/lib").display()))
            .arg("-o")
            .arg(&new)
            .arg(source)
            .output()
            .expect("nvcc cannot be started");
        assert!(made.status.success(), "{name} does not compile:\n{}", String::from_utf8_lossy(&made.stderr));
        fs::rename(&new, &program).unwrap();
    });
    program
}

/// A command that runs a program on the software GPU.
pub(crate) fn on_simgpu(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "120"]).arg(program).env("LD_LIBRARY_PATH", library());
    for (name, _) in env::vars() {
        if name.starts_with("SIMGPU_") {
            command.env_remove(name);
        }
    }
    command
}

/// A program beside the tests, with environment variables.
pub(crate) fn program(name: &str) -> Command {
    program_with(name, &[])
}

/// A program that calls the driver itself, and so is linked against it.
pub(crate) fn driver_program(name: &str) -> Command {
    program_with(name, &["-lcuda"])
}

/// A program beside the tests, compiled with further options.
pub(crate) fn program_with(name: &str, options: &[&str]) -> Command {
    on_simgpu(&compile(&source(name), options))
}

/// A program beside the tests, compiled for another target (an argument of nvcc's `-gencode`).
pub(crate) fn program_for(name: &str, target: &str) -> Command {
    on_simgpu(&compile_for(&source(name), target, &[]))
}

fn source(name: &str) -> PathBuf {
    root().join("tests/simgpu/tests/programs").join(format!("{name}.cu"))
}

/// Runs a program that must succeed, and returns its output.
pub(crate) fn output(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("the program cannot be started");
    let text = String::from_utf8_lossy(&stdout).into_owned();
    assert!(
        status.success(),
        "{command:?}: {status}\n--- stdout\n{text}\n--- stderr\n{}",
        String::from_utf8_lossy(&stderr)
    );
    text
}
