//! `rekindle config`, with programs that stand for the daemon's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

fn ran(command: &mut Command) -> (i32, String, String) {
    // A program that was just written is busy as long as a process that another test forks meanwhile has it open.
    let output = loop {
        match command.output() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            output => break output.unwrap(),
        }
    };
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// A copy of the program in a directory of its own, with a daemon's program beside it or not.
fn installed(dir: &Path, daemon: Option<&str>) -> Command {
    let program = dir.join("rekindle");
    // By another process: one that another test starts meanwhile would inherit the file while it is open for writing.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_rekindle")).arg(&program).status().unwrap();
    assert!(copied.success());
    if let Some(script) = daemon {
        executable(&dir.join("rekindled"), script);
    }
    let mut command = Command::new(program);
    command.args(["config", "check"]);
    command
}

/// Writes a program, by another process, too.
fn executable(path: &Path, script: &str) {
    let writes = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", writes]).arg(path).arg(script).status().unwrap().success());
}

#[test]
fn the_daemon_beside_checks_its_configuration_or_the_one_on_path() {
    let (dir, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let says = "for it in \"$@\"; do echo \"<$it>\"; done; exit 3";
    let mut beside = installed(dir.path(), Some(&format!("echo beside; {says}")));
    executable(&other.path().join("rekindled"), &format!("echo path; {says}"));
    let path = format!("{}:{}", other.path().display(), std::env::var("PATH").unwrap());
    beside.env("PATH", &path);
    let (code, out, _) = ran(&mut beside);
    assert_eq!((code, out.as_str()), (3, "beside\n<check-config>\n"));
    let (code, out, _) = ran(beside.args(["--json", "--", "-a b"]));
    assert_eq!((code, out.as_str()), (3, "beside\n<check-config>\n<--json>\n<-->\n<-a b>\n"));

    std::fs::remove_file(dir.path().join("rekindled")).unwrap();
    let (code, out, _) = ran(installed(dir.path(), None).env("PATH", &path));
    assert_eq!((code, out.as_str()), (3, "path\n<check-config>\n"));

    let (code, out, err) = ran(installed(dir.path(), None).env("PATH", dir.path().join("none")));
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("cannot run rekindled") && err.contains("install all of Rekindle"), "{err}");
}
