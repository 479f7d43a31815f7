//! `rekindle protect --container`: a container that is checkpointed again and again ends with the right result, whoever is killed, and
//! is left alone when a user has podman end it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

use anyhow::{Context, bail, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::podman::Podman;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, process, stage, until};
use serde_json::Value;

use crate::protect::{
    flip, good, has, hold_supervisor, kept, newest, pid, rekindle, shown, spoil, supervise, wait_for,
};

const ANNOTATION: [&str; 2] = ["--annotation", "dev.rekindle/enable=true"];
/// How the program works: it compares all that it has computed in each step, and writes its result at its end.
pub(crate) const STEADY: [&str; 7] =
    ["steady", "--sleep-us", "2000", "--ballast-kib", "1024", "--until", "/shared/end"];

/// Where the records and images of these tests are: the default is the host's own folder. It is used by one test at a time.
const PROTECTIONS: &str = "/tmp/rekindle-e2e-protections";

pub(crate) fn node() -> Result<Node> {
    let node = Node::at_default_socket_with(&format!("[protect]\ndir = \"{PROTECTIONS}\"\n"))?;
    // Of a test that has failed.
    match fs::remove_dir_all(PROTECTIONS) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(node),
    }
}

/// A podman program with the options that this machine needs.
pub(crate) fn program(node: &Node, runtime: &str) -> Result<String> {
    let program = node.path("podman");
    let lib = stage::repository()?.join("scripts/lib/podman.sh");
    let script = format!("#!/bin/bash\nREKINDLE_RUNTIME={runtime}\n. '{}'\npodman_ \"$@\"\n", lib.display());
    stage::write_script(&program, &script)?;
    Ok(program.display().to_string())
}

/// A container with a program that works until it may end.
pub(crate) struct Container<'a> {
    node: &'a Node,
    pub(crate) podman: Podman,
    /// The podman program with the options that this machine needs.
    pub(crate) program: String,
    shared: PathBuf,
}

impl<'a> Container<'a> {
    pub(crate) fn prepare(node: &'a Node) -> Result<Self> {
        Self::with_runtime(node, "runc")
    }

    fn with_runtime(node: &'a Node, runtime: &'static str) -> Result<Self> {
        let program = program(node, runtime)?;
        let shared = node.path("shared");
        fs::create_dir(&shared)?;
        Ok(Self { node, podman: Podman::with_runtime(node, runtime)?, program, shared })
    }

    /// Runs a program in the container `job`, and waits until it uses its GPU.
    pub(crate) fn run(&self, options: &[&str], program: &[&str]) -> Result {
        let volume = format!("{}:/shared", self.shared.display());
        self.podman.run("job", &[&ANNOTATION, &["--volume", &volume][..], options].concat(), program)?;
        let root = self.pid()?;
        until_true("a process of the container uses the GPU", || {
            let clients = self.node.clients()?;
            Ok(process::tree(root).iter().any(|it| clients.iter().any(|client| client.pid == *it)))
        })
    }

    /// Has the supervisor use a podman program that runs this script first, in which `$1` and `$2` are the subcommand.
    fn interfere(&mut self, script: &str) -> Result {
        let program = self.node.path("interfering-podman");
        stage::write_script(&program, &format!("#!/bin/bash\n{script}\n'{}' \"$@\"\n", self.program))?;
        self.program = program.display().to_string();
        Ok(())
    }

    fn pid(&self) -> Result<i32> {
        self.podman.pid("job")
    }

    pub(crate) fn inspect(&self, what: &str) -> Result<String> {
        Ok(self.podman.call(&["container", "inspect", "--format", what, "job"])?.trim().to_owned())
    }

    fn protect(&self, more: &[&str]) -> Result<String> {
        rekindle(self.node, &[&["protect", "--container", "job", "--podman", &self.program], more].concat())
    }

    /// Why `rekindle protect` refuses the container.
    fn refused(&self, name: &str, more: &[&str]) -> Result<(Option<i32>, String)> {
        let arguments = [&["protect", "--container", name, "--podman", &self.program], more].concat();
        let output = self.node.rekindle(&arguments.iter().map(std::ffi::OsStr::new).collect::<Vec<_>>())?;
        Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
    }

    pub(crate) fn end(&self) -> Result {
        Ok(fs::write(self.shared.join("end"), "")?)
    }
}

fn images() -> PathBuf {
    Path::new(PROTECTIONS).join("job/images")
}

fn archive(number: u64) -> PathBuf {
    images().join(format!("image-{number:06}/container.tar"))
}

/// Changes a byte in the middle of an archive, whatever is there.
fn damage(number: u64) -> Result {
    let archive = archive(number);
    flip(&archive, archive.metadata()?.len() / 2)
}

/// A new store.
fn store(node: &Node, name: &str) -> Result<String> {
    let store = node.path(name).display().to_string();
    rekindle(node, &["images", "init", &store])?;
    Ok(store)
}

#[test]
fn whoever_is_killed_a_container_ends_with_the_right_result() -> Result {
    let expected = undisturbed("steady", &["--steps", "2"])?;
    let mut random = Random::new();
    let mut node = node()?;
    let container = Container::prepare(&node)?;
    container.run(&["--volume", "kept:/kept", "--env", "WORD=same"], &STEADY)?;
    let was = container.inspect("{{.Id}} {{.Config.Env}} {{(index .Mounts 0).Name}} {{.Config.Annotations}}")?;
    container.protect(&["--every", "200ms", "--keep", "2"])?;
    let Container { podman, shared, .. } = container;
    let victims = [
        "container",
        "worker",
        "daemon",
        "supervisor",
        "guard",
        "supervisor in a restore",
        "daemon and then the container",
        "conmon and the container",
    ];
    let mut restores = 0;
    for round in 0..victims.len() as u64 * 2 * repetitions() {
        let before = wait_for(&node, "job", "an image after the last kill", |it| {
            it["phase"] == "watching" && it["restores"] == restores && it["runs"] == true && newest(it) > 0
        })?;
        let before = wait_for(&node, "job", "another image", |it| newest(it) > newest(&before))?;
        // What is too much goes with the next image, also after a supervisor was killed before it came to that.
        ensure!(kept(&before) <= 2 && good(&before).len() <= 4, "{before:#}");
        // Each once, and then at random.
        let chosen =
            usize::try_from(if round < victims.len() as u64 { round } else { random.below(victims.len() as u64) })?;
        // At any moment from the last image to the next one, or later.
        let looks = random.below(40);
        (0..looks).try_for_each(|_| shown(&node, "job").map(drop))?;
        let root = pid(&before, "pid")?;
        eprintln!("kills the {}, after {looks} looks", victims[chosen]);
        match victims[chosen] {
            "daemon" => {
                node.kill_daemon()?;
                node.start_daemon(&[])?;
            }
            "daemon and then the container" => {
                node.kill_daemon()?;
                process::signal(root, libc::SIGKILL)?;
                until_true("the container is gone", || Ok(process::is_gone(root)))?;
                restores += 1;
                node.start_daemon(&[])?;
            }
            "container" => {
                process::signal(root, libc::SIGKILL)?;
                restores += 1;
            }
            // podman has nobody then who would tell it of the end.
            "conmon and the container" => {
                let conmon = podman.call(&["inspect", "--format", "{{.State.ConmonPid}}", "job"])?.trim().parse()?;
                [conmon, root].into_iter().try_for_each(|it| process::signal(it, libc::SIGKILL))?;
                until_true("conmon is gone", || Ok(process::is_gone(conmon)))?;
                restores += 1;
            }
            "worker" => {
                process::signal(node.client(root)?.worker, libc::SIGKILL)?;
                restores += 1;
            }
            "supervisor in a restore" => {
                process::signal(root, libc::SIGKILL)?;
                restores += 1;
                let restoring = wait_for(&node, "job", "the container is being restored", |it| {
                    it["phase"] == "restoring" || it["restores"] == restores
                })?;
                process::signal(pid(&restoring, "supervisor")?, libc::SIGKILL)?;
            }
            other => {
                let killed = pid(&before, other)?;
                process::signal(killed, libc::SIGKILL)?;
                wait_for(&node, "job", "another takes its place", |it| {
                    [&it["supervisor"], &it["guard"]].iter().all(|it| it.is_i64() && **it != killed)
                })?;
            }
        }
        wait_for(&node, "job", "the container runs", |it| it["restores"] == restores && it["runs"] == true)?;
    }
    ensure!(restores >= 2);
    let is = "{{.Id}} {{.Config.Env}} {{(index .Mounts 0).Name}} {{.Config.Annotations}}";
    assert_eq!(podman.call(&["container", "inspect", "--format", is, "job"])?.trim(), was);
    fs::write(shared.join("end"), "")?;
    let over = wait_for(&node, "job", "the container is over", |it| it["phase"] == "over" && it["guard"].is_null())?;
    assert_eq!(over["ending"]["exited"], 0, "{over:#}");
    assert_eq!(podman.output("job")?, expected);
    rekindle(&node, &["protect", "--forget", "job"])?;
    ensure!(!images().exists());
    podman.call(&["rm", "job"])?;
    podman.call(&["volume", "rm", "kept"])?;
    drop(podman);
    node.finish()
}

/// A shell that prints and a child of it that uses the GPU. No line of the container's log is missing. podman exports the log, and the
/// container's own file system, just after the memory: what the container has written in between comes again.
fn log_and_files_of_a_container_that_is_restored(runtime: &'static str) -> Result {
    const SCRIPT: &str = "/apps/steady --sleep-us 2000 --until /shared/end & i=0; while [ ! -e /shared/end ]; do i=$((i + 1)); \
                          echo \"line $i\"; echo $i >/own; echo $i >/shared/count; usleep 10000; done; wait $!; echo \"status $?\"; \
                          echo \"own $(cat /own) of $i\"";
    let node = node()?;
    let container = Container::with_runtime(&node, runtime)?;
    container.run(&[], &["/bin/sh", "-c", SCRIPT])?;
    container.protect(&["--every", "200ms"])?;
    for restores in 1..=2 {
        let before = wait_for(&node, "job", "an image", |it| it["runs"] == true && newest(it) > restores)?;
        process::signal(pid(&before, "pid")?, libc::SIGKILL)?;
        let restored = |it: &Value| it["restores"] == restores && it["runs"] == true;
        let after = wait_for(&node, "job", "the container is restored", restored)?;
        wait_for(&node, "job", "another image", |it| newest(it) > newest(&after))?;
    }
    container.end()?;
    let over = wait_for(&node, "job", "the container is over", |it| it["phase"] == "over")?;
    assert_eq!((&over["container"], &over["ending"]["exited"]), (&Value::from("job"), &Value::from(0)), "{over:#}");
    let said = container.podman.output("job")?;
    let lines: Vec<_> = said.lines().collect();
    let [counted @ .., "steady ok", "status 0", own] = lines.as_slice() else { bail!("{said}") };
    ensure!(counted.len() > 10);
    let (mut last, mut steps_back) = (0, 0);
    for line in counted {
        let number: u64 = line.strip_prefix("line ").with_context(|| said.clone())?.parse()?;
        ensure!(number <= last + 1, "{number} follows {last}");
        steps_back += u64::from(number <= last);
        last = number;
    }
    ensure!(steps_back <= 2, "the log steps back {steps_back} times, and the container was restored twice");
    assert_eq!(*own, format!("own {last} of {last}"));
    assert_eq!(fs::read_to_string(container.shared.join("count"))?.trim(), last.to_string());
    drop(container);
    node.finish()
}

#[test]
fn the_log_and_the_files_of_a_container_that_is_restored_are_right() -> Result {
    log_and_files_of_a_container_that_is_restored("runc")
}

#[test]
fn the_log_and_the_files_of_a_container_that_crun_restores_are_right() -> Result {
    log_and_files_of_a_container_that_is_restored("crun")
}

#[test]
fn what_a_user_has_podman_do_to_a_container_ends_its_protection() -> Result {
    let node = node()?;
    let container = Container::prepare(&node)?;
    for (what, runs) in [
        (&["stop", "--time", "20", "job"][..], false),
        (&["kill", "job"], false),
        (&["rm", "--force", "--time", "0", "job"], false),
        (&["restart", "--time", "0", "job"], true),
        (&["container", "checkpoint", "job"], false),
    ] {
        // Its shell ends by itself, with success, when it is to be stopped.
        let script = format!("trap 'exit 0' TERM; /apps/{} & wait", STEADY.join(" "));
        container.run(&[], &["/bin/sh", "-c", &script])?;
        container.protect(&["--every", "200ms"])?;
        let before = wait_for(&node, "job", "an image", |it| newest(it) > 0)?;
        // podman and the supervisor exclude each other only for the time of a checkpoint.
        until_true("podman does it", || Ok(container.podman.call(what).is_ok()))?;
        let over =
            wait_for(&node, "job", "the protection is over", |it| it["phase"] == "over" && it["guard"].is_null())?;
        assert_eq!(
            (&over["ending"], &over["restores"]),
            (&Value::from("by_user"), &Value::from(0)),
            "{what:?}: {over:#}"
        );
        ensure!(good(&over).contains(&newest(&before)) || newest(&over) > newest(&before), "{over:#}");
        let listed = rekindle(&node, &["protect", "--list"])?;
        ensure!(listed.contains("over") && listed.contains("podman was told to end it"), "{listed}");
        if runs {
            assert_eq!(container.inspect("{{.State.Status}}")?, "running");
        } else if what[0] != "rm" {
            assert_eq!(container.inspect("{{.State.Running}}")?, "false", "{what:?}");
        }
        rekindle(&node, &["protect", "--forget", "job"])?;
        container.podman.call(&["rm", "--force", "--ignore", "--time", "0", "job"])?;
    }
    // It gives up by itself.
    container.run(&[], &["/bin/sh", "-c", "/apps/steady --sleep-us 2000 --until /shared/end && exit 7"])?;
    container.protect(&["--every", "200ms"])?;
    wait_for(&node, "job", "an image", |it| newest(it) > 0)?;
    container.end()?;
    let over = wait_for(&node, "job", "the container is over", |it| it["phase"] == "over")?;
    assert_eq!((&over["ending"]["exited"], &over["restores"]), (&Value::from(7), &Value::from(0)), "{over:#}");
    drop(container);
    node.finish()
}

#[test]
fn the_newest_archives_are_kept_and_one_that_is_bad_is_left_out() -> Result {
    let node = node()?;
    let container = Container::prepare(&node)?;
    container.run(&[], &STEADY)?;
    let said = container.protect(&["--every", "1500ms", "--keep", "2", "--name", "other"])?;
    ensure!(said.contains("protecting container job as other: images in"), "{said}");
    let (code, why) = container.refused("job", &[])?;
    ensure!(code == Some(3) && why.contains("is protected already, as other"), "{why}");
    rekindle(&node, &["protect", "--stop", "job"])?;
    wait_for(&node, "other", "nobody guards it", |it| it["guard"].is_null() && it["phase"] == "stopped")?;
    rekindle(&node, &["protect", "--forget", "other"])?;

    container.protect(&["--every", "6s", "--keep", "2"])?;
    let images = images();
    for number in 1..=4 {
        // The oldest one goes when the newest is complete.
        let is_kept = |it: &Value| newest(it) >= number && kept(it) <= 2 && good(it).len() <= 2;
        let now = wait_for(&node, "job", "the next image, and two in all", is_kept)?;
        // One may be in the making, and be unpacked.
        let dirs = fs::read_dir(&images)?.count();
        ensure!(dirs <= 5, "{dirs} directories: {now:#}");
    }
    let (supervisor, before) = hold_supervisor(&node, "job")?;
    let bad = newest(&before);
    damage(bad)?;
    process::signal(container.pid()?, libc::SIGKILL)?;
    process::signal(supervisor, libc::SIGCONT)?;
    let after = wait_for(&node, "job", "the container is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    let said = after["events"].to_string();
    ensure!(said.contains(&format!("image {bad} is set aside, for it is damaged")), "{said}");
    ensure!(said.contains(&format!("restored from image {}", good(&before)[good(&before).len() - 2])), "{said}");
    wait_for(&node, "job", "another image", |it| newest(it) > bad)?;
    let said = rekindle(&node, &["protect", "--stop", "job"])?;
    ensure!(said.contains("job is stopped"), "{said}");
    let stopped = shown(&node, "job")?;
    ensure!(stopped["runs"] == true && stopped["failed_checkpoints"] == 0, "{stopped:#}");
    container.end()?;
    assert_eq!(container.podman.output("job")?, "steady ok\n");
    // Nobody needs the protection to restore its archives.
    container.podman.call(&["rm", "job"])?;
    let by_hand = archive(newest(&stopped)).display().to_string();
    rekindle(&node, &["restore", "--podman", &container.program, "--ignore-volumes", "--import", &by_hand])?;
    assert_eq!(container.podman.output("job")?, "steady ok\n");
    drop(container);
    node.finish()
}

/// The archive here has another byte, and so has the nearer store: the container comes back from the other one. If no store has a whole
/// one, the one before is taken.
#[test]
fn a_container_comes_back_from_the_nearest_level_that_is_whole() -> Result {
    let node = node()?;
    let container = Container::prepare(&node)?;
    let [near, far] = [store(&node, "near")?, store(&node, "far")?];
    container.run(&[], &STEADY)?;
    let was = container.inspect("{{.Id}} {{.Config.Env}}")?;
    let (to_near, to_far) = (format!("file://{near},keep=1"), format!("{far},every=10ms"));
    // Long enough that both stores have an image before the next one is made, also on a busy machine.
    container.protect(&["--every", "6s", "--keep", "2", "--to", &to_near, "--to", &to_far])?;
    // Collections take nothing that uploads need.
    wait_for(&node, "job", "three images are stored", |it| {
        let gone = [&near, &far].iter().try_for_each(|it| rekindle(&node, &["images", "gc", it]).map(drop));
        gone.is_ok() && it["events"].to_string().matches("has image").count() >= 6
    })?;
    let held = || {
        until("both stores have an image, and the supervisor rests", || {
            let (supervisor, now) = hold_supervisor(&node, "job")?;
            let all_have = now["levels"].as_array().is_some_and(|all| all.iter().all(|it| has(it, newest(&now))));
            if !all_have {
                process::signal(supervisor, libc::SIGCONT)?;
            }
            Ok(all_have.then_some((supervisor, now)))
        })
    };
    let (supervisor, before) = held()?;
    let number = newest(&before);
    for store in [&near, &far] {
        rekindle(&node, &["images", "gc", store])?;
        rekindle(&node, &["images", "verify", store])?;
        let listed: Vec<Value> = serde_json::from_str(&rekindle(&node, &["images", "ls", store, "--json"])?)?;
        ensure!(!listed.is_empty() && listed.iter().all(|it| it["container"]["name"] == "job"), "{listed:#?}");
        let shown = rekindle(&node, &["images", "show", &format!("{store}/job-{number:06}")])?;
        ensure!(shown.contains("an archive of podman's container job"), "{shown}");
    }
    damage(number)?;
    spoil(Path::new(&near))?;
    process::signal(container.pid()?, libc::SIGKILL)?;
    process::signal(supervisor, libc::SIGCONT)?;
    let after = wait_for(&node, "job", "the container is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    let said = after["events"].to_string();
    for expected in [
        format!("image {number} is set aside, for it is damaged"),
        format!("image {number} does not come back from {near}: "),
        format!("image {number} has come back from {far}"),
        format!("restored from image {number}\""),
    ] {
        ensure!(said.contains(&expected), "{expected}: {said}");
    }
    assert_eq!(container.inspect("{{.Id}} {{.Config.Env}}")?, was);
    let back = node.path("back").display().to_string();
    let said = rekindle(&node, &["images", "copy", &format!("{far}/job-{number:06}"), &back])?;
    ensure!(said.contains("in an archive of container job"), "{said}");

    wait_for(&node, "job", "another image", |it| newest(it) > number)?;
    let (supervisor, before) = held()?;
    let number = newest(&before);
    damage(number)?;
    [&near, &far].iter().try_for_each(|it| spoil(Path::new(it)))?;
    process::signal(container.pid()?, libc::SIGKILL)?;
    process::signal(supervisor, libc::SIGCONT)?;
    let after = wait_for(&node, "job", "the container is restored", |it| it["restores"] == 2 && it["runs"] == true)?;
    let said = after["events"].to_string();
    let older = good(&before)[good(&before).len() - 2];
    for expected in [
        format!("image {number} does not come back from {near}: "),
        format!("image {number} does not come back from {far}: "),
        format!("restored from image {older}\""),
    ] {
        ensure!(said.contains(&expected), "{expected}: {said}");
    }
    rekindle(&node, &["protect", "--stop", "job"])?;
    wait_for(&node, "job", "the last upload is over", |it| it["supervisor"].is_null() && it["guard"].is_null())?;

    // Nobody needs the protection, nor its directory, to restore what came from the store.
    rekindle(&node, &["protect", "--forget", "job"])?;
    container.podman.call(&["rm", "--force", "--time", "0", "job"])?;
    container.end()?;
    rekindle(
        &node,
        &["restore", "--podman", &container.program, "--ignore-volumes", &format!("{back}/container.tar")],
    )?;
    assert_eq!(container.podman.output("job")?, "steady ok\n");
    assert_eq!(container.inspect("{{.Id}} {{.Config.Env}}")?, was);
    drop(container);
    node.finish()
}

#[test]
fn a_bit_of_an_archive_that_rots_is_found_while_the_container_runs() -> Result {
    let node = node()?;
    let container = Container::prepare(&node)?;
    let store = store(&node, "store")?;
    container.run(&[], &STEADY)?;
    container.protect(&["--every", "1h", "--verify-every", "20ms", "--to", &store])?;
    let verified = |it: &Value| it["images"][0]["verified_ms"].as_u64().unwrap_or(0);
    wait_for(&node, "job", "the image is stored, and was verified again", |it| {
        it["events"].to_string().contains("has image 1") && verified(it) > 0
    })?;
    let whole = fs::read(archive(1))?;
    damage(1)?;
    let came = format!("image 1 has come back from {store}");
    let now = wait_for(&node, "job", "it has come back", |it| it["events"].to_string().contains(&came))?;
    ensure!(now["events"].to_string().contains("image 1 is set aside, for it is damaged"), "{now:#}");
    ensure!(fs::read(archive(1))? == whole && good(&now).contains(&1), "{now:#}");
    wait_for(&node, "job", "it is verified again and again", |it| verified(it) > verified(&now))?;
    // As long as no archive was good, one was due.
    let now = wait_for(&node, "job", "another image", |it| newest(it) == 2)?;
    assert_eq!((&now["restores"], &now["runs"]), (&Value::from(0), &Value::from(true)), "{now:#}");
    process::signal(container.pid()?, libc::SIGKILL)?;
    let after = wait_for(&node, "job", "the container is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    ensure!(after["events"].to_string().contains("restored from image 2\""), "{after:#}");
    container.end()?;
    wait_for(&node, "job", "the container is over", |it| it["phase"] == "over" && it["supervisor"].is_null())?;
    assert_eq!(container.podman.output("job")?, "steady ok\n");
    drop(container);
    node.finish()
}

#[test]
fn what_a_user_has_podman_do_while_the_supervisor_waits_for_its_next_attempt_counts() -> Result {
    let node = node()?;
    let mut container = Container::prepare(&node)?;
    let obstacle = node.path("obstacle");
    container
        .interfere(&format!("[ -e '{}' ] && [ \"$1\" = rm ] && {{ echo no >&2; exit 125; }}", obstacle.display()))?;
    for (what, runs) in [(&["start", "job"][..], true), (&["rm", "job"], false)] {
        container.run(&[], &STEADY)?;
        container.protect(&["--every", "200ms"])?;
        wait_for(&node, "job", "an image", |it| newest(it) > 0)?;
        fs::write(&obstacle, "")?;
        process::signal(container.pid()?, libc::SIGKILL)?;
        wait_for(&node, "job", "a restore has failed", |it| it["events"].to_string().contains("was not restored"))?;
        container.podman.call(what)?;
        let started = if runs { container.inspect("{{.State.Pid}}")? } else { String::new() };
        fs::remove_file(&obstacle)?;
        let stopped =
            wait_for(&node, "job", "the protection ends", |it| it["phase"] == "stopped" && it["guard"].is_null())?;
        ensure!(stopped["events"].to_string().contains("it is left alone"), "{stopped:#}");
        assert_eq!((&stopped["restores"], newest(&stopped) > 0), (&Value::from(0), true), "{what:?}: {stopped:#}");
        if runs {
            assert_eq!(container.inspect("{{.State.Status}} {{.State.Pid}}")?, format!("running {started}"));
        } else {
            ensure!(container.inspect("{{.Id}}").is_err());
        }
        rekindle(&node, &["protect", "--forget", "job"])?;
        container.podman.call(&["rm", "--force", "--ignore", "--time", "0", "job"])?;
    }
    drop(container);
    node.finish()
}

#[test]
fn a_podman_that_says_nothing_just_after_a_restore_ends_no_protection() -> Result {
    let node = node()?;
    let mut container = Container::prepare(&node)?;
    let restored = node.path("restored").display().to_string();
    let program = container.program.clone();
    container.interfere(&format!(
        "[ \"$1 $2\" = 'container restore' ] && {{ '{program}' \"$@\" && touch '{restored}'; exit $?; }}\n\
         [ \"$1 $2\" = 'container inspect' ] && [ -e '{restored}' ] && {{ rm '{restored}'; exit 125; }}"
    ))?;
    container.run(&[], &STEADY)?;
    container.protect(&["--every", "200ms"])?;
    for restores in 1..=2 {
        let before = wait_for(&node, "job", "an image", |it| it["runs"] == true && newest(it) >= restores)?;
        process::signal(container.pid()?, libc::SIGKILL)?;
        let after = wait_for(&node, "job", "the container is restored", |it| it["restores"] == restores)?;
        ensure!(after["events"].to_string().contains("which is found out only now"), "{after:#}");
        ensure!(!Path::new(&restored).exists());
        wait_for(&node, "job", "another image", |it| newest(it) > newest(&before))?;
    }
    container.end()?;
    let over = wait_for(&node, "job", "the container is over", |it| it["phase"] == "over")?;
    assert_eq!(over["ending"]["exited"], 0, "{over:#}");
    assert_eq!(container.podman.output("job")?, "steady ok\n");
    drop(container);
    node.finish()
}

/// What podman does first after a boot, when its file for this boot is missing: it forgets what ran, and who has ended what.
fn have_podman_begin_anew() -> Result {
    Ok(fs::remove_file("/run/libpod/alive")?)
}

fn supervise_in_another_boot(node: &Node) -> Result<Child> {
    // What the supervisor of another boot has left.
    let file = Path::new(PROTECTIONS).join("job/record.json");
    let mut record: Value = serde_json::from_slice(&fs::read(&file)?)?;
    ensure!(record["version"] == 2, "{record:#}");
    record["boot"] = "another".into();
    fs::write(&file, serde_json::to_vec(&record)?)?;
    supervise(node)
}

/// The machine was started again: nobody has seen the end of the container, and podman has no word on it.
#[test]
fn a_container_is_restored_after_the_machine_was_started_again() -> Result {
    let node = node()?;
    let container = Container::prepare(&node)?;
    container.run(&[], &STEADY)?;
    container.protect(&["--every", "300ms", "--keep", "2"])?;
    let before = wait_for(&node, "job", "two images", |it| good(it).len() >= 2)?;
    let (guard, supervisor) = (pid(&before, "guard")?, pid(&before, "supervisor")?);
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        [guard, supervisor].into_iter().try_for_each(|it| process::signal(it, signal))?;
    }
    wait_for(&node, "job", "nobody supervises it", |it| it["guard"].is_null() && it["supervisor"].is_null())?;
    let (root, conmon) = (container.pid()?, container.inspect("{{.State.ConmonPid}}")?.parse()?);
    // Nobody is left who would tell podman.
    [conmon, root].into_iter().try_for_each(|it| process::signal(it, libc::SIGKILL))?;
    until_true("the container is gone", || Ok(process::is_gone(root) && process::is_gone(conmon)))?;
    have_podman_begin_anew()?;
    let said = container.inspect("{{.State.Status}} {{.State.ExitCode}} {{.State.StoppedByUser}}")?;
    assert_eq!(said, "exited 0 false");
    let mut service = supervise_in_another_boot(&node)?;
    let after = wait_for(&node, "job", "the container is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    let said = after["events"].to_string();
    ensure!(said.contains("the machine was started again") && said.contains("nobody saw how it ended"), "{said}");
    wait_for(&node, "job", "another image", |it| newest(it) > newest(&after))?;
    container.end()?;
    wait_for(&node, "job", "the container is over", |it| it["phase"] == "over")?;
    let status = until("the service ends", || Ok(service.try_wait()?))?;
    ensure!(status.success(), "{status}");
    assert_eq!(container.podman.output("job")?, "steady ok\n");
    drop(container);
    node.finish()
}

#[test]
fn a_container_that_had_given_up_when_the_machine_was_started_again_is_over() -> Result {
    let node = node()?;
    let container = Container::prepare(&node)?;
    container.run(&[], &["/bin/sh", "-c", "/apps/steady --sleep-us 2000 --until /shared/end && exit 7"])?;
    container.protect(&["--every", "300ms"])?;
    let before = wait_for(&node, "job", "an image", |it| newest(it) > 0)?;
    let (guard, supervisor) = (pid(&before, "guard")?, pid(&before, "supervisor")?);
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        [guard, supervisor].into_iter().try_for_each(|it| process::signal(it, signal))?;
    }
    wait_for(&node, "job", "nobody supervises it", |it| it["guard"].is_null() && it["supervisor"].is_null())?;
    container.end()?;
    assert_eq!(container.podman.exit_code("job")?, 7);
    have_podman_begin_anew()?;
    let mut service = supervise_in_another_boot(&node)?;
    let over = wait_for(&node, "job", "the container is over", |it| it["phase"] == "over")?;
    assert_eq!((&over["ending"]["exited"], &over["restores"]), (&Value::from(7), &Value::from(0)), "{over:#}");
    until("the service ends", || Ok(service.try_wait()?))?;
    assert_eq!(container.inspect("{{.State.Running}}")?, "false");
    drop(container);
    node.finish()
}

#[test]
fn a_container_that_would_fight_its_protection_is_refused_with_the_reason() -> Result {
    let node = node()?;
    let container = Container::prepare(&node)?;
    let podman = &container.podman;
    let sleeps = ["/bin/sh", "-c", "sleep 600"];
    let refused = |name: &str, more: &[&str], reason: &str| -> Result {
        let (code, why) = container.refused(name, more)?;
        ensure!(code == Some(3) && why.contains(reason), "{name} {more:?} ended with {code:?}: {why}");
        Ok(())
    };
    refused("job", &[], "podman knows no container job")?;
    podman.run("restarts", &["--restart", "always"], &sleeps)?;
    refused("restarts", &[], "its restart policy is `always`")?;
    podman.run("removed", &["--rm"], &sleeps)?;
    refused("removed", &[], "podman removes it when it ends")?;
    podman.run("unit", &["--label", "PODMAN_SYSTEMD_UNIT=unit.service"], &sleeps)?;
    refused("unit", &[], "unit.service")?;
    podman.run("plain", &[], &sleeps)?;
    refused("plain", &[], "no process of its tree uses a GPU through Rekindle")?;
    podman.call(&["pause", "plain"])?;
    refused("plain", &[], "`podman unpause plain` first")?;
    podman.call(&["unpause", "plain"])?;
    podman.run("needs", &["--requires", "plain"], &sleeps)?;
    refused("plain", &[], "needs need it")?;
    podman.call(&["kill", "needs"])?;
    refused("needs", &[], "it is not running")?;
    // As long as it is there, podman does not remove the one that it needs.
    podman.call(&["rm", "--force", "--time", "0", "needs"])?;
    container.run(&[], &STEADY)?;
    let store = node.path("store").display().to_string();
    refused("job", &["--to", &store], "there is no store")?;
    for option in [["--chain", "2"], ["--criu", "/bin/criu"]] {
        let (code, why) = container.refused("job", &option)?;
        ensure!(code == Some(2) && why.contains(option[0]), "{why}");
    }
    assert_eq!(rekindle(&node, &["protect", "--list", "--json"])?.trim(), "[]");
    container.end()?;
    podman.output("job").context("it runs on")?;
    drop(container);
    node.finish()
}
