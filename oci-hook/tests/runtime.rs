//! The program as containerd runs it, in the place of a runtime.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

fn run(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// A host with an interposer, a daemon and a runc that prints its arguments, and on it a bundle.
struct Host {
    dir: TempDir,
    _daemon: UnixListener,
}

impl Host {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["bin", "lib/rekindle", "bundle/rootfs", "path"] {
            fs::create_dir_all(path(name)).unwrap();
        }
        // Other processes write them: a process that another test starts meanwhile would inherit a file that this one has open for
        // writing, and nobody could execute it as long.
        run(Command::new("cp").arg(env!("CARGO_BIN_EXE_rekindle-oci-hook")).arg(path("bin/rekindle-runc")));
        let script = "printf '#!/bin/sh\necho \"$@\"\n' >\"$0\" && chmod 755 \"$0\"";
        run(Command::new("sh").args(["-c", script]).arg(path("path/runc")));
        fs::write(path("lib/rekindle/libcuda.so.1"), "").unwrap();
        let daemon = UnixListener::bind(path("rekindled.sock")).unwrap();
        Self { dir, _daemon: daemon }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the bundle's config.json.
    fn configure(&self, annotations: Value) -> String {
        let config = json!({ "root": { "path": "rootfs" }, "process": {}, "annotations": annotations }).to_string();
        fs::write(self.path("bundle/config.json"), &config).unwrap();
        config
    }

    fn configured(&self) -> String {
        fs::read_to_string(self.path("bundle/config.json")).unwrap()
    }

    /// `rekindle-runc --log LOG --log-format json COMMAND --bundle BUNDLE job`.
    fn runtime(&self, command: &str) -> Output {
        let mut runtime = Command::new(self.path("bin/rekindle-runc"));
        runtime.env("PATH", format!("{}:/usr/bin:/bin", self.path("path").display()));
        runtime.env("REKINDLE_SOCKET", self.path("rekindled.sock")).arg("--log").arg(self.path("log.json"));
        runtime.args(["--log-format", "json", command, "--bundle"]).arg(self.path("bundle")).arg("job");
        runtime.output().unwrap()
    }
}

#[test]
fn the_runtime_gets_its_arguments_and_what_annotations_ask_for() {
    let host = Host::new();
    for command in ["create", "restore"] {
        host.configure(json!({ "dev.rekindle/enable": "true" }));
        let output = host.runtime(command);
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.ends_with(&format!("{command} --bundle {} job\n", host.path("bundle").display())), "{said}");
        let config: Value = serde_json::from_str(&host.configured()).unwrap();
        assert_eq!(config["mounts"][0]["destination"], "/usr/lib/rekindle");
        assert!(config["hooks"]["createRuntime"][0]["args"][1] == "create-runtime", "{config}");
    }
}

#[test]
fn other_containers_and_commands_go_to_the_runtime_as_they_are() {
    let host = Host::new();
    let plain = host.configure(json!({}));
    assert!(host.runtime("create").status.success());
    assert_eq!(host.configured(), plain);
    let asking = host.configure(json!({ "dev.rekindle/enable": "true" }));
    for command in ["state", "checkpoint", "delete"] {
        assert!(host.runtime(command).status.success());
        assert_eq!(host.configured(), asking);
    }
}

#[test]
fn what_is_refused_is_in_the_runtimes_log_and_leaves_the_bundle_as_it_is() {
    let host = Host::new();
    let config = host.configure(json!({ "dev.rekindle/enable": "perhaps" }));
    let output = host.runtime("create");
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("rekindle-runc: ") && said.contains("dev.rekindle/enable"), "{said}");
    let log: Value = serde_json::from_str(&fs::read_to_string(host.path("log.json")).unwrap()).unwrap();
    assert_eq!((&log["level"], log["msg"].as_str()), (&"error".into(), Some(said.trim_end())));
    assert_eq!(host.configured(), config);
    assert_eq!(fs::read_dir(host.path("bundle")).unwrap().count(), 2);
}

#[test]
fn a_runtime_that_is_not_installed_is_named() {
    let host = Host::new();
    host.configure(json!({}));
    fs::remove_file(host.path("path/runc")).unwrap();
    let output = Command::new(host.path("bin/rekindle-runc"))
        .env("PATH", host.path("path"))
        .args(["state", "job"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("cannot run runc") && said.contains("install runc"), "{said}");
}
