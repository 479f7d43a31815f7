//! The privileges that workers have given up when they serve a client, as the kernel shows them, and the actions that
//! their users cannot take.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use anyhow::{Context, ensure};
use rekindle_e2e::{App, Node, Result, stage};

/// `/proc/PID/status`.
struct Status(HashMap<String, Vec<String>>);

impl Status {
    fn of(pid: i32) -> Result<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let words = |text: &str| text.split_ascii_whitespace().map(str::to_owned).collect();
        Ok(Self(text.lines().filter_map(|line| line.split_once(':')).map(|(k, v)| (k.to_owned(), words(v))).collect()))
    }

    fn words(&self, field: &str) -> Result<&[String]> {
        Ok(self.0.get(field).with_context(|| format!("no {field}"))?)
    }

    fn uid(&self) -> Result<u32> {
        Ok(self.words("Uid")?.first().context("no uid")?.parse()?)
    }
}

/// Starts an idle application, and returns it and its worker.
fn idle(node: &Node) -> Result<(App, i32)> {
    let until = node.path("never").display().to_string();
    let app = node.run("idle", &["--until", &until])?;
    app.reaches(1)?;
    let worker = node.client(app.pid())?.worker;
    Ok((app, worker))
}

/// Runs a command as this user, in the workers' group.
fn run_as(uid: u32, command: &mut Command) -> Result<Output> {
    Ok(command.uid(uid).gid(1_900_000_000).output()?)
}

#[test]
fn a_worker_is_a_user_of_its_own_without_privileges() -> Result {
    let node = Node::start()?;
    let (first, one) = idle(&node)?;
    let (second, other) = idle(&node)?;
    let mut users = Vec::new();
    for worker in [one, other] {
        let status = Status::of(worker)?;
        let uid = status.uid()?;
        ensure!((1_900_000_000..=1_900_065_535).contains(&uid), "worker {worker} is user {uid}");
        // The fields are the real, the effective, the saved and the file system's id.
        assert_eq!(status.words("Uid")?, vec![uid.to_string(); 4]);
        assert_eq!(status.words("Gid")?, vec!["1900000000"; 4]);
        assert_eq!(status.words("Groups")?, [""; 0]);
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status.words(set)?, ["0000000000000000"], "{set}");
        }
        assert_eq!(status.words("NoNewPrivs")?, ["1"]);
        // Mode 2 is filtering.
        assert_eq!(status.words("Seccomp")?, ["2"]);
        // The files in `/proc` of a process that is not dumpable belong to root.
        assert_eq!(fs::metadata(format!("/proc/{worker}/maps"))?.uid(), 0);
        let limits = fs::read_to_string(format!("/proc/{worker}/limits"))?;
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).context("no limit")?;
        ensure!(core.split_ascii_whitespace().nth(4) == Some("0"), "{core}");
        users.push(uid);
    }
    assert_ne!(users[0], users[1]);

    // Not even a process of the worker's own user can read the worker's state, and no worker's user may ask the daemon
    // anything.
    for user in users {
        for file in ["environ", "maps", "fd/0", "mem"] {
            let path = format!("/proc/{one}/{file}");
            let output = run_as(user, Command::new("cat").arg(&path))?;
            ensure!(!output.status.success(), "user {user} has read {path}");
        }
        let mut ps = Command::new(stage::program("rekindle")?);
        let output = run_as(user, ps.arg("ps").env("REKINDLE_SOCKET", node.socket()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && said.contains("ermission denied"), "{said}");
    }
    first.kill()?;
    second.kill()?;
    node.finish()
}

#[test]
fn a_switch_leaves_workers_as_they_are_started() -> Result {
    let node = Node::configured("[sandbox]\nenabled = false\n", &[])?;
    let (app, worker) = idle(&node)?;
    assert_eq!(Status::of(worker)?.uid()?, 0);
    let missing = node.status()?.sandbox.context("it says nothing of the sandbox")?.missing;
    ensure!(missing[0].contains("switched off"), "{missing:?}");
    app.kill()?;
    node.finish()
}
