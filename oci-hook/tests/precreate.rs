//! The program as podman runs it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// A host with an interposer and a daemon.
struct Host {
    dir: TempDir,
    _daemon: UnixListener,
}

impl Host {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let lib = dir.path().join("lib/rekindle");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(lib.join("libcuda.so.1"), "").unwrap();
        let daemon = UnixListener::bind(dir.path().join("rekindled.sock")).unwrap();
        Self { dir, _daemon: daemon }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().canonicalize().unwrap()
    }

    fn hook(&self, config: &str) -> Output {
        run(&self.path().join("lib/rekindle"), &self.path().join("rekindled.sock"), config)
    }
}

fn run(lib_dir: &Path, socket: &Path, config: &str) -> Output {
    let mut hook = Command::new(env!("CARGO_BIN_EXE_rekindle-oci-hook"))
        .arg("--lib-dir")
        .arg(lib_dir)
        .arg("--socket")
        .arg(socket)
        .env_remove("REKINDLE_SOCKET")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    hook.stdin.take().unwrap().write_all(config.as_bytes()).unwrap();
    hook.wait_with_output().unwrap()
}

fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    std::fs::read_to_string(path).unwrap()
}

/// Checks that the hook fails with one line on stderr, which has these words, and without output.
fn refused(output: &Output, words: &[&str]) {
    assert!(!output.status.success());
    assert_eq!(output.stdout, b"");
    let message = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(message.starts_with("rekindle-oci-hook: ") && message.lines().count() == 1, "{message}");
    for word in words {
        assert!(message.contains(word), "{message}");
    }
}

#[test]
fn an_annotated_container_gets_mounts_and_environment() {
    let host = Host::new();
    let config = golden("config.json").replace("@ENABLE@", "true");
    let output = host.hook(&config);
    assert!(output.status.success());
    assert_eq!(output.stderr, b"");
    let got: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = golden("changed.json").replace("@HOST@", host.path().to_str().unwrap());
    let expected = expected.replace("@HOOK@", env!("CARGO_BIN_EXE_rekindle-oci-hook"));
    assert_eq!(got, serde_json::from_str::<Value>(&expected).unwrap());

    let again = host.hook(std::str::from_utf8(&output.stdout).unwrap());
    assert_eq!(again.stdout, output.stdout);
}

#[test]
fn a_container_without_annotations_is_unchanged_byte_for_byte() {
    let host = Host::new();
    for config in [
        golden("config.json").replace("@ENABLE@", "false"),
        golden("config.json").replace("dev.rekindle/enable", "dev.rekindle/other"),
        "{ \"b\": 1e2 ,\t\"a\":18446744073709551615, \"b\": 2 }\n\n".into(),
    ] {
        let output = host.hook(&config);
        assert!(output.status.success());
        assert_eq!(output.stdout, config.as_bytes());
        // The host needs no interposer for them.
        let output = run(Path::new("/nowhere"), Path::new("/nowhere"), &config);
        assert_eq!(output.stdout, config.as_bytes());
    }
}

#[test]
fn errors_name_the_missing_part() {
    let host = Host::new();
    let config = golden("config.json").replace("@ENABLE@", "true");
    let (lib, socket) = (host.path().join("lib/rekindle"), host.path().join("rekindled.sock"));

    refused(&run(&host.path(), &socket, &config), &["no interposer at", "libcuda.so.1", "--lib-dir"]);
    refused(
        &run(&lib, &host.path().join("none.sock"), &config),
        &["no daemon at", "none.sock", "No such file", "start rekindled"],
    );
    // The socket of a dead daemon.
    drop(UnixListener::bind(host.path().join("dead.sock")).unwrap());
    refused(
        &run(&lib, &host.path().join("dead.sock"), &config),
        &["no daemon at", "dead.sock", "refused", "start rekindled"],
    );
    refused(&host.hook("{"), &["config.json is no JSON"]);
    refused(&host.hook(""), &["config.json is no JSON"]);
    refused(&host.hook("[]"), &["the whole is not an object"]);
    refused(
        &host.hook(&golden("config.json").replace("@ENABLE@", "yes")),
        &["dev.rekindle/enable", "yes", "true and false"],
    );
}

#[test]
fn the_interposer_is_found_beside_the_program() {
    let host = Host::new();
    let bin = host.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let program = bin.join("rekindle-oci-hook");
    // Another process copies it: a file that this process has just written may still be open in another test's new process, and
    // cannot be executed then.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_rekindle-oci-hook")).arg(&program).status().unwrap();
    assert!(copied.success());
    let config = host.path().join("config.json");
    std::fs::write(&config, golden("config.json").replace("@ENABLE@", "true")).unwrap();
    let output = Command::new(&program)
        .arg("precreate")
        .env("REKINDLE_SOCKET", host.path().join("rekindled.sock"))
        .stdin(std::fs::File::open(config).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let got: Value = serde_json::from_slice(&output.stdout).unwrap();
    let source = host.path().join("lib/rekindle");
    assert!(got["mounts"].as_array().unwrap().iter().any(|mount| mount["source"] == source.to_str().unwrap()));
}

#[test]
fn hooks_json_prints_the_file_for_podman() {
    let output = Command::new(env!("CARGO_BIN_EXE_rekindle-oci-hook"))
        .args(["hooks-json", "--path", "/usr/bin/rekindle-oci-hook"])
        .env_remove("REKINDLE_SOCKET")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), golden("hooks.json"));

    let output = Command::new(env!("CARGO_BIN_EXE_rekindle-oci-hook"))
        .args(["hooks-json", "--lib-dir", "/l", "--socket", "/s"])
        .output()
        .unwrap();
    let hook: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(hook["hook"]["path"], env!("CARGO_BIN_EXE_rekindle-oci-hook"));
    let arguments: Vec<_> = hook["hook"]["args"].as_array().unwrap().iter().skip(2).collect();
    assert_eq!(arguments, ["--lib-dir", "/l", "--socket", "/s"]);
}
