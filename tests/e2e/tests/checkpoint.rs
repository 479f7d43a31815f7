//! `rekindle checkpoint` and `rekindle restore`, as a user calls them.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, ensure};
use rekindle_e2e::app::{Identity, undisturbed};
use rekindle_e2e::disk::SmallDisk;
use rekindle_e2e::image::{COMMIT, MANIFEST};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::{App, Gate, Moment, Node, Result, process, stage, until};
use serde_json::Value;

const ARGUMENTS: [&str; 4] = ["--iterations", "600", "--sleep-us", "2000"];

/// Runs `rekindle checkpoint PID DIR` with more arguments.
fn checkpoint(node: &Node, pid: i32, dir: &Path, more: &[&str]) -> Result<Output> {
    let pid = pid.to_string();
    let mut arguments = ["checkpoint", &pid].map(OsStr::new).to_vec();
    arguments.push(dir.as_os_str());
    arguments.extend(more.iter().map(OsStr::new));
    node.rekindle(&arguments)
}

fn restore(node: &Node, dir: &Path) -> Result<Output> {
    node.rekindle(&[OsStr::new("restore"), OsStr::new("--restore-detached"), dir.as_os_str()])
}

fn ended(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Starts `idle`, which waits for a file and then ends.
fn idle(node: &Node, name: &str, more: &[&str]) -> Result<(App, std::path::PathBuf)> {
    let end = node.path(name);
    let until = end.display().to_string();
    let app = node.run("idle", &[more, &["--until", &until]].concat())?;
    app.reaches(1)?;
    Ok((app, end))
}

#[test]
fn a_process_is_checkpointed_killed_and_restored_by_two_commands() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let node = Node::start()?;
    let app = node.run("globals", &ARGUMENTS)?;
    app.reaches(300)?;
    let tree = process::tree(app.pid());
    // The directory does not exist yet.
    let dir = node.path("a/b/image");
    let (code, out, err) = ended(&checkpoint(&node, app.pid(), &dir, &["--kill"])?);
    ensure!(code == Some(0), "{out} {err}");
    assert!(out.contains("protocol stop") && out.contains("quiesce") && out.lines().count() == 1, "{out}");
    assert_eq!(err, "", "on a pipe nothing is drawn");
    let identity = app.was_killed(&tree)?;
    let (code, out, err) = ended(&restore(&node, &dir)?);
    ensure!(code == Some(0), "{out} {err}");
    assert_eq!(App::adopt(identity).finish()?, expected);
    node.finish()
}

#[test]
fn a_process_goes_on_unless_it_is_said_otherwise() -> Result {
    let node = Node::start()?;
    let (app, end) = idle(&node, "end", &[])?;
    let dir = node.path("image");
    let output = checkpoint(&node, app.pid(), &dir, &["--json", "--protocol", "stop"])?;
    let (code, out, err) = ended(&output);
    ensure!(code == Some(0), "{out} {err}");
    let said: Value = serde_json::from_str(&out)?;
    assert_eq!((&said["outcome"], &said["dump"]["protocol"]), (&"done".into(), &"stop".into()), "{said}");
    assert_eq!(said["dump"]["protocol_reason"], "stop asked for by `rekindle checkpoint`");
    assert!(said["dump"]["stall_ns"].is_u64() && said["dump"]["gpu_bytes"].as_u64() > Some(0), "{said}");
    assert!(dir.join(COMMIT).exists());
    let inspected = node.rekindle(&["inspect".as_ref(), "--json".as_ref(), dir.as_os_str()])?;
    let inspected: Value = serde_json::from_slice(&inspected.stdout)?;
    assert_eq!(inspected["id"], said["dump"]["id"]);
    fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}

#[test]
fn a_job_of_a_shell_is_checkpointed_too() -> Result {
    let node = Node::start()?;
    let end = node.path("end");
    let mut shell = node.command("/bin/sh".as_ref())?;
    shell.arg("-c").arg("\"$0\" --until \"$1\" & wait").arg(stage::app("idle")?).arg(&end);
    let shell = App::start(&mut shell, &node.path("shell"), None)?;
    shell.says("ready")?;
    let client = node.clients()?.first().context("no client")?.pid;
    assert_ne!(client, shell.pid(), "the shell leads the session, and stays");
    let dir = node.path("image");
    let (code, out, err) = ended(&checkpoint(&node, client, &dir, &[])?);
    ensure!(code == Some(0), "{out} {err}");
    let Identity { out, err, .. } = shell.identity().clone();
    shell.kill()?;
    process::wait_gone("the original", client)?;
    // The restore runs in a session of this pid namespace, as from a terminal.
    let mut setsid = Command::new("setsid");
    stage::clean_environment(&mut setsid);
    setsid.arg("--wait").arg(stage::program("rekindle")?).args(["restore", "-d"]).arg(&dir);
    let restored = setsid.env("REKINDLE_SOCKET", node.socket()).output()?;
    ensure!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    fs::write(&end, "")?;
    App::adopt(Identity { name: "idle".to_owned(), pid: client, out, err, progress: None, hold: None }).finish()?;
    node.finish()
}

#[test]
fn what_cannot_be_checkpointed_is_refused_with_the_reason_and_nothing_is_made() -> Result {
    let node = Node::start()?;
    let (app, _) = idle(&node, "end", &["--heap", "1", "--heap-mib", "1500"])?;
    let dir = node.path("image");
    let (code, _, err) = ended(&checkpoint(&node, app.pid(), &dir, &[])?);
    assert_eq!(code, Some(3), "{err}");
    assert!(err.contains("a heap of 1500 MiB for malloc"), "{err}");
    let (code, out, _) = ended(&checkpoint(&node, app.pid(), &dir, &["--json"])?);
    let said: Value = serde_json::from_str(&out)?;
    assert_eq!((code, &said["outcome"]), (Some(3), &"refused".into()), "{said}");
    let missing = ["--criu", "/nonexistent/criu"];
    let (code, _, err) = ended(&checkpoint(&node, app.pid(), &dir, &missing)?);
    assert_eq!((code, err.contains("there is no /nonexistent/criu")), (Some(3), true), "{err}");
    assert!(!dir.exists());
    assert!(!process::is_gone(app.pid()), "it was to go on");
    app.kill()?;
    let (code, _, err) = ended(&checkpoint(&node, i32::MAX, &dir, &[])?);
    assert_eq!((code, err.contains("there is no process")), (Some(3), true), "{err}");
    let (code, _, err) = ended(&restore(&node, Path::new("/"))?);
    assert_eq!(code, Some(4), "{err}");
    node.finish()
}

#[test]
fn without_a_daemon_nothing_is_dumped() -> Result {
    let mut node = Node::start()?;
    let (app, end) = idle(&node, "end", &[])?;
    node.kill_daemon()?;
    let dir = node.path("image");
    let (code, _, err) = ended(&checkpoint(&node, app.pid(), &dir, &[])?);
    assert_eq!((code, err.contains("is rekindled running")), (Some(1), true), "{err}");
    assert!(!dir.exists());
    node.start_daemon(&[])?;
    fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}

#[test]
fn a_full_disk_fails_a_checkpoint_and_the_process_goes_on() -> Result {
    let node = Node::start()?;
    let (app, end) = idle(&node, "end", &[])?;
    let disk = SmallDisk::mount(node.path("disk"), 256 << 10)?;
    disk.fill()?;
    let (code, out, err) = ended(&checkpoint(&node, app.pid(), &disk.dir, &["--json"])?);
    let said: Value = serde_json::from_str(&out).with_context(|| format!("{out} {err}"))?;
    assert_eq!((code, &said["outcome"]), (Some(1), &"failed".into()), "{said}");
    let reason = said["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("do not fit") || reason.contains("No space left"), "{said}");
    assert!(!disk.dir.join(MANIFEST).exists() && !disk.dir.join(COMMIT).exists());
    disk.make_room()?;
    let (code, out, err) = ended(&checkpoint(&node, app.pid(), &disk.dir, &[])?);
    ensure!(code == Some(0), "{out} {err}");
    drop(disk);
    fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}

#[test]
fn how_far_a_dump_is_shows_on_a_terminal_and_in_ps() -> Result {
    let node = Node::start()?;
    let (app, end) = idle(&node, "end", &[])?;
    let folder = node.path("gate");
    fs::create_dir(&folder)?;
    let gate = Gate::start(&folder, node.socket())?;
    gate.hold(Moment::Before("Frozen"))?;
    // Only CRIU's plugin connects through the gate.
    let criu = node.path("criu");
    let path = gate.setting(node.criu()).socket;
    stage::write_script(&criu, &format!("#!/bin/sh\nREKINDLE_SOCKET='{}' exec criu \"$@\"\n", path.display()))?;
    let (program, shown, dir) = (stage::program("rekindle")?, node.path("shown"), node.path("image"));
    let line = format!("{} checkpoint {} {} --criu {}", program.display(), app.pid(), dir.display(), criu.display());
    let mut terminal = Command::new("script");
    stage::clean_environment(&mut terminal);
    terminal.args(["--quiet", "--return", "--flush", "--command", &line]).arg(&shown);
    terminal.env("REKINDLE_SOCKET", node.socket()).stdin(Stdio::null()).stdout(Stdio::null());
    let mut terminal = terminal.spawn()?;
    let at = |shown: &str| {
        let bar = format!("freeze   [{}] 0 B of 4 B", ".".repeat(30));
        shown.contains(&bar)
    };
    until("the terminal shows where it is", || {
        ensure!(terminal.try_wait()?.is_none(), "it has ended: {}", fs::read_to_string(&shown)?);
        Ok(at(&String::from_utf8_lossy(&fs::read(&shown).unwrap_or_default())).then_some(()))
    })?;
    let (_, listed, _) = ended(&node.rekindle(&[OsStr::new("ps")])?);
    assert!(listed.contains("quiesced: freeze, 0 B of 4 B, 0 MB/s"), "{listed}");
    gate.open()?;
    let status = until("it ends", || Ok(terminal.try_wait()?))?;
    let shown = String::from_utf8_lossy(&fs::read(&shown)?).into_owned();
    ensure!(status.success(), "{shown}");
    assert!(shown.contains("protocol stop (quiesce "), "{shown}");
    let (_, listed, _) = ended(&node.rekindle(&[OsStr::new("ps")])?);
    assert!(listed.contains("running") && !listed.contains("freeze"), "{listed}");
    drop(gate);
    fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}

#[test]
fn a_mispredicted_write_is_found_and_the_dump_made_again_by_stop() -> Result {
    // The copy starts with ballast, which takes longer to copy than CRIU's own work. The ballast is two pieces, one for
    // each lane of a small machine.
    let node = Node::with_gpu(&[("SIMGPU_COPY_GBPS", "0.008")])?;
    let end = node.path("end");
    let until = end.display().to_string();
    let app = node.run("hidden", &["--kib", "64", "--ballast-kib", "8192", "--sleep-us", "1000", "--until", &until])?;
    app.reaches(2)?;
    let mut tries = 0;
    let (dir, code, said, err) = loop {
        let dir = node.fresh("image");
        let (code, out, err) = ended(&checkpoint(&node, app.pid(), &dir, &["--json", "--protocol", "cow"])?);
        let said: Value = serde_json::from_str(&out).with_context(|| format!("{out} {err}"))?;
        tries += 1;
        // On a machine with many lanes the memory may be copied before the kernel writes it.
        if said["attempts"] != 1 || tries == 20 {
            break (dir, code, said, err);
        }
    };
    let found = (code, &said["attempts"], &said["dump"]["protocol"]);
    assert_eq!(found, (Some(0), &2.into(), &"stop".into()), "{said} {err}");
    assert!(err.contains("mispredicted write") && err.contains("trying again with protocol stop"), "{err}");
    assert!(node.rekindle(&["verify".as_ref(), dir.as_os_str()])?.status.success());
    fs::write(&end, "")?;
    assert_eq!(app.finish()?, "hidden ok\n");
    node.finish()
}

/// The value that `moment` has counted to in the GPU memory of an image.
fn counted(dir: &Path) -> Result<u64> {
    let mark = [0x6d6f_6d65_6e74_206f_u64, 0x6620_7468_6520_676f, 0x6f64_206b_696e_6421, 0x5265_6b69_6e64_6c65];
    let mark: Vec<u8> = mark.iter().flat_map(|it| it.to_le_bytes()).collect();
    let data = fs::read(dir.join("rekindle-data-0.raw"))?;
    let at = data.windows(mark.len()).position(|it| it == mark).context("there is no such buffer in the image")?;
    let count = data.get(at + mark.len()..at + mark.len() + 8).context("the data ends")?;
    Ok(u64::from_le_bytes(count.try_into()?))
}

#[test]
fn an_application_chooses_its_moment() -> Result {
    const STEPS: u64 = 16;
    let node = Node::start()?;
    let end = node.path("end");
    let steps = STEPS.to_string();
    let app = node.run("moment", &["--steps", &steps, "--sleep-us", "3000", "--until", &end.display().to_string()])?;
    app.says("ready")?;
    for name in ["first", "recopy", "third"] {
        let dir = node.path(name);
        if name == "recopy" {
            let chosen = node.rekindle(&["protocol", &app.pid().to_string(), "recopy"].map(OsStr::new))?;
            ensure!(chosen.status.success(), "{}", String::from_utf8_lossy(&chosen.stderr));
        }
        let (code, out, err) = ended(&checkpoint(&node, app.pid(), &dir, &["--at-moment"])?);
        ensure!(code == Some(0), "{out} {err}");
        let count = counted(&dir)?;
        ensure!(count > 0 && count % STEPS == 0, "{count} steps are not the start of an iteration");
    }
    let dir = node.path("last");
    let tree = process::tree(app.pid());
    let (code, out, err) = ended(&checkpoint(&node, app.pid(), &dir, &["--at-moment", "--kill"])?);
    ensure!(code == Some(0), "{out} {err}");
    ensure!(counted(&dir)? % STEPS == 0, "{} steps are not the start of an iteration", counted(&dir)?);
    let identity = app.was_killed(&tree)?;
    let (code, out, err) = ended(&restore(&node, &dir)?);
    ensure!(code == Some(0), "{out} {err}");
    let app = App::adopt(identity);
    fs::write(&end, "")?;
    assert!(app.finish()?.ends_with("counted all\n"));
    node.finish()
}

#[test]
fn a_moment_that_never_comes_is_waited_for_no_longer_than_it_is_said() -> Result {
    let node = Node::start()?;
    let (app, end) = idle(&node, "end", &[])?;
    let dir = node.path("image");
    let (code, _, err) = ended(&checkpoint(&node, app.pid(), &dir, &["--at-moment", "--timeout", "1"])?);
    assert_eq!((code, err.contains("has called rekindle_checkpoint within 1 s")), (Some(1), true), "{err}");
    assert!(!dir.join(MANIFEST).exists());
    fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}

/// With `recopy`, Rekindle waits for a moment before the first copy, and again for the image. If the second moment does
/// not come, nothing of the first copy obstructs the next checkpoint.
#[test]
fn a_second_moment_that_never_comes_leaves_nothing_of_the_copy_before_it() -> Result {
    let node = Node::start()?;
    let end = node.path("end");
    let app = node.run("moment", &["--moments", "1", "--sleep-us", "3000", "--until", &end.display().to_string()])?;
    app.says("ready")?;
    let worker = node.client(app.pid())?.worker;
    let dir = node.path("image");
    let recopy = ["--protocol", "recopy", "--json"];
    let moment = [&recopy[..], &["--at-moment", "--timeout", "1"]].concat();
    let (code, _, err) = ended(&checkpoint(&node, app.pid(), &dir, &moment)?);
    assert_eq!((code, err.contains("has called rekindle_checkpoint within 1 s")), (Some(1), true), "{err}");
    until("the worker has none of the image's files", || {
        Ok((!process::descriptors(worker)?.iter().any(|it| it.contains("rekindle-data"))).then_some(()))
    })?;
    let (code, out, err) = ended(&checkpoint(&node, app.pid(), &dir, &recopy)?);
    let said: Value = serde_json::from_str(&out).with_context(|| format!("{out} {err}"))?;
    let found = (code, &said["attempts"], &said["dump"]["protocol"]);
    assert_eq!(found, (Some(0), &1.into(), &"recopy".into()), "{said} {err}");
    assert!(node.rekindle(&["verify".as_ref(), dir.as_os_str()])?.status.success());
    fs::write(&end, "")?;
    assert!(app.finish()?.ends_with("counted all\n"));
    node.finish()
}

#[test]
fn a_container_is_checkpointed_by_its_name() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let annotations = ["--annotation", "dev.rekindle/enable=true", "--annotation", "dev.rekindle/protocol=stop"];
    let program = ["idle", "--until", "/shared/end", "--progress", "/shared/progress"];
    podman.run("original", &[&annotations[..], &["--volume", &volume]].concat(), &program)?;
    podman.says("original", "ready")?;
    // The wrapper calls podman with the options that this machine needs.
    let wrapper = node.path("podman");
    let lib = stage::repository()?.join("scripts/lib/podman.sh");
    stage::write_script(&wrapper, &format!("#!/bin/bash\n. '{}'\npodman_ \"$@\"\n", lib.display()))?;
    let export = node.path("export.tar");
    let options = ["checkpoint", "--container", "original", "--json", "--podman"].map(OsStr::new);
    let mut arguments = options.to_vec();
    arguments.extend([wrapper.as_os_str(), "--export".as_ref(), export.as_os_str()]);
    arguments.extend(["--", "--compress", "none"].map(OsStr::new));
    let (code, out, err) = ended(&node.rekindle(&arguments)?);
    ensure!(code == Some(0), "{out} {err}");
    let said: Value = serde_json::from_str(&out)?;
    let reason = "stop asked for by annotation dev.rekindle/protocol of its container";
    assert_eq!(said["dump"]["protocol_reason"], reason, "{said}");
    let listed = Command::new("tar").arg("-tf").arg(&export).output()?;
    assert!(String::from_utf8_lossy(&listed.stdout).contains(COMMIT));
    fs::write(shared.join("end"), "")?;
    assert_eq!(podman.exit_code("original")?, 0, "it goes on");
    let gone = [
        OsStr::new("checkpoint"),
        "--container".as_ref(),
        "original".as_ref(),
        "--podman".as_ref(),
        wrapper.as_os_str(),
    ];
    let (code, _, err) = ended(&node.rekindle(&gone)?);
    assert_eq!((code, err.contains("is not running")), (Some(3), true), "{err}");
    let odd = ["--annotation", "dev.rekindle/enable=true", "--annotation", "dev.rekindle/protocol=cov"];
    let refused = podman.refuses_to_run_in("rekindle-e2e", "odd", &odd, &program)?;
    assert!(refused.contains("\"cov\" is no protocol"), "{refused}");
    drop(podman);
    node.finish()
}
