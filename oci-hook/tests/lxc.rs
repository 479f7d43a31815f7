//! The program as LXC and its administrator run it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

fn lxc(dir: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_rekindle-oci-hook"));
    program.env_remove("LXC_NAME").env_remove("LXC_PID").envs(variables.iter().copied());
    program.arg("lxc").args(arguments).arg("--lib-dir").arg(dir).arg("--socket").arg(dir.join("rekindled.sock"));
    program.output().unwrap()
}

fn refused(output: &Output, words: &str) {
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.starts_with("rekindle-oci-hook: ") && message.contains(words), "{message}");
}

#[test]
fn the_configuration_needs_an_interposer_and_a_daemon() {
    let dir = TempDir::new().unwrap();
    refused(&lxc(dir.path(), &["config"], &[]), "no interposer at");
    fs::write(dir.path().join("libcuda.so.1"), "").unwrap();
    refused(&lxc(dir.path(), &["config"], &[]), "no daemon at");
    let _daemon = UnixListener::bind(dir.path().join("rekindled.sock")).unwrap();
    let output = lxc(dir.path(), &["config", "--gpu", "0", "--gpu", "1"], &[]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().all(|line| line.starts_with("lxc.")), "{text}");
    assert!(text.contains(" lxc start-host --gpu 0 --gpu 1 --lib-dir "), "{text}");
}

#[test]
fn the_hook_says_what_lxc_has_not_told_it() {
    let dir = TempDir::new().unwrap();
    // The words that LXC adds by itself mean nothing.
    let hook = |variables| lxc(dir.path(), &["start-host", "--gpu", "0", "job", "lxc", "start-host"], variables);
    refused(&hook(&[]), "LXC_NAME is not set");
    refused(&hook(&[("LXC_NAME", "job")]), "LXC_PID is not set");
    refused(&hook(&[("LXC_NAME", "job"), ("LXC_PID", "0")]), "LXC_PID is not set");
    refused(&hook(&[("LXC_NAME", "job"), ("LXC_PID", "1")]), "no daemon at");
}
