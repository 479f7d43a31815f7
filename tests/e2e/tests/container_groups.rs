//! `rekindle checkpoint` and `rekindle restore` of several containers of podman, of all that use GPUs, and of a pod at one moment.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, stage, until};
use serde_json::Value;

/// Commands of `rekindle` that find podman with the options that this machine needs.
struct Commands<'a> {
    node: &'a Node,
    podman: PathBuf,
}

impl<'a> Commands<'a> {
    fn new(node: &'a Node) -> Result<Self> {
        let podman = node.path("podman");
        let lib = stage::repository()?.join("scripts/lib/podman.sh");
        stage::write_script(&podman, &format!("#!/bin/bash\n. '{}'\npodman_ \"$@\"\n", lib.display()))?;
        Ok(Self { node, podman })
    }

    /// The exit code, stdout and stderr.
    fn run(&self, verb: &str, arguments: &[&str]) -> Result<(i32, String, String)> {
        let mut all = vec![OsStr::new(verb), "--podman".as_ref(), self.podman.as_os_str()];
        all.extend(arguments.iter().map(OsStr::new));
        let output = self.node.rekindle(&all)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((output.status.code().context("a signal")?, text(&output.stdout), text(&output.stderr)))
    }

    fn succeeds(&self, verb: &str, arguments: &[&str]) -> Result<String> {
        let (code, out, err) = self.run(verb, arguments)?;
        ensure!(code == 0, "rekindle {verb} {arguments:?} ended with {code}: {out} {err}");
        Ok(out)
    }
}

fn shared(node: &Node) -> Result<(PathBuf, String)> {
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    Ok((shared, volume))
}

#[test]
fn several_containers_are_checkpointed_and_one_that_fails_stops_no_other() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let rekindle = Commands::new(&node)?;
    let (shared, volume) = shared(&node)?;
    let options = ["--annotation", "dev.rekindle/enable=true", "--volume", &volume];
    for name in ["one", "two"] {
        podman.run(name, &options, &["idle", "--until", "/shared/end"])?;
        podman.says(name, "ready")?;
    }
    podman.run("plain", &["--volume", &volume], &["/bin/sh", "-c", "until [ -e /shared/end ]; do sleep 1; done"])?;

    let dir = node.path("archives");
    let to = dir.to_string_lossy();
    let archives = ["--export-dir", &to, "--compress", "none"];
    let named = ["--container", "one", "--container", "gone", "--container", "two", "--json"];
    let (code, out, err) = rekindle.run("checkpoint", &[&named[..], &archives].concat())?;
    assert_eq!(code, 3, "{out} {err}");
    assert!(err.contains("1 of 3 containers are not checkpointed: gone"), "{err}");
    let said: Value = serde_json::from_str(&out)?;
    let outcome = |at: usize| (said[at]["container"].as_str(), said[at]["outcome"].as_str());
    assert_eq!(
        [0, 1, 2].map(outcome),
        [(Some("one"), Some("done")), (Some("gone"), Some("refused")), (Some("two"), Some("done"))]
    );
    let files = || -> Result<Vec<String>> {
        let names = fs::read_dir(&dir)?.map(|it| Ok(it?.file_name().to_string_lossy().into_owned()));
        let mut names = names.collect::<Result<Vec<_>>>()?;
        names.sort_unstable();
        Ok(names)
    };
    assert_eq!(files()?, ["one.tar", "two.tar"]);
    fs::remove_dir_all(&dir)?;

    // podman cannot checkpoint what is paused: that is said, and the container stays as it is.
    podman.call(&["pause", "one"])?;
    let (code, _, err) = rekindle.run("checkpoint", &["--container", "one"])?;
    assert_eq!((code, err.contains("container one is paused")), (3, true), "{err}");
    assert_eq!(podman.call(&["inspect", "--format", "{{.State.Status}}", "one"])?.trim(), "paused");
    podman.call(&["unpause", "one"])?;

    let out = rekindle.succeeds("checkpoint", &[&["--all", "--kill"][..], &archives].concat())?;
    assert!(out.contains("container one") && out.contains("container two") && !out.contains("plain"), "{out}");
    assert_eq!(files()?, ["one.tar", "two.tar"], "the container without a GPU process is not among all");
    assert_eq!(podman.call(&["inspect", "--format", "{{.State.Status}}", "plain"])?.trim(), "running");

    let [one, two] = ["one.tar", "two.tar"].map(|it| dir.join(it).to_string_lossy().into_owned());
    podman.will_restore("three");
    rekindle.succeeds("restore", &["--import", &one, "--name", "three"])?;
    podman.call(&["rm", "one"])?;
    podman.call(&["rm", "two"])?;
    let bad = node.path("bad.tar");
    fs::write(&bad, "no archive")?;
    let (code, out, err) = rekindle.run("restore", &["--json", &one, &bad.to_string_lossy(), &two])?;
    assert_eq!(code, 1, "{out} {err}");
    assert!(err.contains("1 of 3 images are not restored") && err.contains("bad.tar"), "{err}");
    let said: Value = serde_json::from_str(&out)?;
    let outcomes: Vec<_> = (0..3).map(|at| said[at]["outcome"].as_str()).collect();
    assert_eq!(outcomes, [Some("done"), Some("failed"), Some("done")]);
    fs::write(shared.join("end"), "")?;
    for name in ["one", "two", "three"] {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
    }
    drop(podman);
    node.finish()
}

/// Sends a number on, and waits for the answer before it sends the next. It sends the last one again and again, so a lost message
/// matters not. A message is a directory: a restore finds no open file that has changed.
const SENDER: &str = "n=1; while [ ! -e /shared/end ]; do mkdir -p /shared/to-$n; [ -d /shared/from-$n ] && n=$((n+1)); usleep 2000; done";
/// Answers each number.
const ANSWERER: &str = "n=0; while [ ! -e /shared/end ]; do [ -d /shared/to-$((n+1)) ] && n=$((n+1)); mkdir -p /shared/from-$n; usleep 2000; done";

/// The numbers that were sent in one direction.
fn numbers(shared: &Path, direction: &str) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(shared)? {
        let name = entry?.file_name();
        found.extend(name.to_str().and_then(|it| it.strip_prefix(direction)?.parse::<u64>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

fn goes_on(shared: &Path) -> Result {
    let now = numbers(shared, "to-")?.last().copied().unwrap_or_default();
    until_true("the containers exchange messages", || {
        Ok(numbers(shared, "from-")?.last().is_some_and(|it| *it > now + 5))
    })
}

/// The first messages after a restore are what each side had in its memory. The answerer has answered all but the last number.
fn agree(shared: &Path) -> Result {
    let first = |direction| until("a message", || Ok(numbers(shared, direction)?.first().copied()));
    let (sent, answered) = (first("to-")?, first("from-")?);
    ensure!(answered == sent || answered + 1 == sent, "{sent} was sent last, and {answered} answered: two moments");
    Ok(())
}

/// Removes all messages, which are no part of any image.
fn forget(shared: &Path) -> Result {
    for entry in fs::read_dir(shared)? {
        let path = entry?.path();
        if path.is_dir() {
            fs::remove_dir(path)?;
        }
    }
    Ok(())
}

#[test]
fn a_pod_is_checkpointed_at_one_moment_and_restored() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let rekindle = Commands::new(&node)?;
    let (shared, volume) = shared(&node)?;
    podman.call(&["pod", "create", "--name", "pod", "--network", "none"])?;
    let apps = format!("{}:/apps:ro", stage::apps()?.display());
    let start = |name: &str, gpu: bool, script: &str| -> Result {
        podman.will_restore(name);
        let mut options =
            vec!["run", "--detach", "--pod", "pod", "--pids-limit", "0", "--name", name, "--volume", &apps];
        options.extend(["--volume", &volume]);
        let script = if gpu { format!("/apps/steady --until /shared/end & {script}") } else { script.to_owned() };
        if gpu {
            options.extend(["--device", "rekindle.dev/gpu=0"]);
        }
        options.extend(["rekindle-e2e", "/bin/sh", "-c", &script]);
        podman.call(&options).map(drop)
    };
    // The one uses a GPU while it sends; the other is a process like any other to Rekindle.
    start("sender", true, SENDER)?;
    start("answerer", false, ANSWERER)?;
    until_true("the GPU process is there", || Ok(node.clients()?.len() == 1))?;
    goes_on(&shared)?;

    // A third container holds a large file that has no name any more, which CRIU does not dump.
    let holds =
        "exec 3<>/tmp/big; head -c 4000000 /dev/zero >&3; rm /tmp/big; mkdir /shared/held; while :; do sleep 1; done";
    start("holder", true, holds)?;
    until_true("the file is held", || Ok(shared.join("held").exists() && node.clients()?.len() == 2))?;
    for more in [&["--kill"][..], &[]] {
        let (code, out, err) = rekindle.run("checkpoint", &[&["--pod", "pod"][..], more].concat())?;
        assert_eq!(code, 1, "{more:?}: {out} {err}");
        assert!(err.contains("there is no checkpoint of the pod pod: cannot checkpoint container holder"), "{err}");
        for name in ["sender", "answerer", "holder"] {
            let status = podman.call(&["inspect", "--format", "{{.State.Status}}", name])?;
            assert_eq!(status.trim(), "running", "{name} {more:?}");
        }
        goes_on(&shared)?;
    }
    podman.call(&["rm", "--force", "--time", "0", "holder"])?;
    podman.call(&["pause", "answerer"])?;
    let (code, _, err) = rekindle.run("checkpoint", &["--pod", "pod"])?;
    assert_eq!((code, err.contains("container answerer is paused")), (3, true), "{err}");
    podman.call(&["unpause", "answerer"])?;

    // In podman's storage.
    goes_on(&shared)?;
    let out = rekindle.succeeds("checkpoint", &["--pod", "pod", "--kill", "--keep"])?;
    assert!(out.contains("container sender") && out.contains("container answerer"), "{out}");
    forget(&shared)?;
    rekindle.succeeds("restore", &["--pod", "pod"])?;
    agree(&shared)?;
    goes_on(&shared)?;

    // In archives, several times, while it runs.
    let dir = node.path("archives");
    let to = dir.to_string_lossy();
    let [sender, answerer] = ["sender.tar", "answerer.tar"].map(|it| dir.join(it).to_string_lossy().into_owned());
    for _ in 0..3 {
        rekindle.succeeds("checkpoint", &["--pod", "pod", "--export-dir", &to, "--compress", "none"])?;
        goes_on(&shared)?;
        podman.call(&["rm", "--force", "--time", "0", "sender", "answerer"])?;
        forget(&shared)?;
        rekindle.succeeds("restore", &["--pod", "pod", &sender, &answerer])?;
        agree(&shared)?;
        goes_on(&shared)?;
    }
    fs::write(shared.join("end"), "")?;
    for name in ["sender", "answerer"] {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
    }
    podman.call(&["pod", "rm", "--force", "--time", "0", "pod"])?;
    drop(podman);
    node.finish()
}
