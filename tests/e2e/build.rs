//! Names the programs of `tests/apps` that have an expected output: each becomes a test of `tests/programs.rs`. And no file of
//! tests is forgotten: each is a module of `tests/main.rs`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Kernels of one process wait for the other's, which must not stand still: tests of their own dump these.
const DUMPED_ELSEWHERE: [&str; 1] = ["meet2"];

fn main() -> io::Result<()> {
    every_file_is_a_module(Path::new("tests"))?;
    name_programs()
}

/// Fails the build if there is a file whose tests would never run.
fn every_file_is_a_module(tests: &Path) -> io::Result<()> {
    println!("cargo::rerun-if-changed=tests");
    let main = fs::read_to_string(tests.join("main.rs"))?;
    for entry in fs::read_dir(tests)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if name != "main" && !main.lines().any(|line| line == format!("mod {name};")) {
            println!(
                "cargo::error=tests/main.rs has no line \"mod {name};\": the tests of {} would not run",
                path.display()
            );
        }
    }
    Ok(())
}

fn name_programs() -> io::Result<()> {
    let apps = Path::new("../apps");
    println!("cargo::rerun-if-changed=../apps");
    let mut names = Vec::new();
    for entry in fs::read_dir(apps.join("expected"))? {
        let path = entry?.path();
        names.extend(path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned));
    }
    names.sort();
    let mut tests = String::new();
    for name in names {
        let source = fs::read_to_string(apps.join(&name).with_extension("cu")).unwrap_or_default();
        // One that cannot say how far it is cannot be dumped in its middle.
        let dumped = source.contains("--progress") && !DUMPED_ELSEWHERE.contains(&name.as_str());
        let check = if dumped { "all_ways" } else { "alike" };
        let _ = writeln!(tests, "#[test]\nfn {name}() -> Result {{\n    {check}(\"{name}\")\n}}");
    }
    let out = env::var_os("OUT_DIR").map(PathBuf::from).ok_or_else(|| io::Error::other("no OUT_DIR"))?;
    fs::write(out.join("programs.rs"), tests)
}
