//! `rekindle protect`: a job that is checkpointed again and again ends with the right result, whoever is killed.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, bail, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::disk::SmallDisk;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Node, Result, process, stage, until};
use serde_json::Value;

/// How a job works: it compares all that it has computed in each step, and writes its result at its end.
const STEADY: [&str; 4] = ["--sleep-us", "2000", "--ballast-kib", "1024"];

/// What `rekindle` says; it must succeed.
pub(crate) fn rekindle(node: &Node, arguments: &[&str]) -> Result<String> {
    let arguments: Vec<_> = arguments.iter().map(OsStr::new).collect();
    let output = node.rekindle(&arguments)?;
    let err = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments:?} ended with {}: {err}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// A protection, as `rekindle protect --list` shows it; null if there is none. The job is looked at as well: the test is the parent of what has lost its own,
/// and waits for it as init does elsewhere.
pub(crate) fn shown(node: &Node, name: &str) -> Result<Value> {
    let listed: Vec<Value> = serde_json::from_str(&rekindle(node, &["protect", "--list", "--json"])?)?;
    let found = listed.into_iter().find(|it| it["name"] == name).unwrap_or_default();
    for pid in ["pid", "supervisor", "guard"].map(|it| &found[it]).into_iter().filter_map(Value::as_i64) {
        process::reap(i32::try_from(pid)?);
    }
    Ok(found)
}

/// Waits until a protection is as it is to be.
pub(crate) fn wait_for(node: &Node, name: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    let mut last = Value::Null;
    let found = until(what, || {
        last = shown(node, name)?;
        Ok(is_so(&last).then(|| last.clone()))
    });
    found.with_context(|| format!("{last:#}"))
}

/// Starts what `rekindle-protect@job.service` runs. A shell is its parent: [`shown`] reaps those that a protection names, and a test
/// wants the exit status.
pub(crate) fn supervise(node: &Node) -> Result<Child> {
    let mut service = Command::new("sh");
    service.args(["-c", "\"$0\" \"$@\"; exit $?"]).arg(stage::program("rekindle")?);
    stage::clean_environment(&mut service);
    service.args(["protect", "--supervise", "job"]).env("REKINDLE_SOCKET", node.socket()).stderr(Stdio::null());
    Ok(service.spawn()?)
}

pub(crate) fn pid(shown: &Value, of: &str) -> Result<i32> {
    Ok(i32::try_from(shown[of].as_i64().with_context(|| format!("no {of}: {shown:#}"))?)?)
}

/// The numbers of the good images, oldest first.
pub(crate) fn good(shown: &Value) -> Vec<u64> {
    let images = shown["images"].as_array().into_iter().flatten();
    images.filter(|it| it["good"] == true).filter_map(|it| it["number"].as_u64()).collect()
}

/// How many images are kept.
pub(crate) fn kept(shown: &Value) -> usize {
    shown["images"].as_array().into_iter().flatten().filter(|it| it["kept"] == true).count()
}

pub(crate) fn newest(shown: &Value) -> u64 {
    good(shown).last().copied().unwrap_or(0)
}

/// Starts `steady` without a progress file, which an image might find open.
fn steady(node: &Node) -> Result<(App, PathBuf)> {
    let end = node.path("end");
    let mut command = node.command(&stage::app("steady")?)?;
    command.args(STEADY).arg("--until").arg(&end);
    let app = App::start(&mut command, &node.path("steady"), None)?;
    node.client(app.pid())?;
    Ok((app, end))
}

/// Protects a process.
fn protect(node: &Node, app: &App, name: &str, more: &[&str]) -> Result<String> {
    rekindle(node, &[&["protect", &app.pid().to_string(), "--name", name], more].concat())
}

/// `rekindle protect --command`, and what it prints.
struct Waiter {
    child: Child,
    out: PathBuf,
}

impl Waiter {
    fn start(node: &Node, name: &str, options: &[&str], program: &Path, arguments: &[&OsStr]) -> Result<Self> {
        let out = node.path(name).with_extension("out");
        let err = File::create(node.path(name).with_extension("err"))?;
        let mut command = Command::new(stage::program("rekindle")?);
        stage::clean_environment(&mut command);
        command.args(["protect", "--command", "--name", name]).args(options).arg("--").arg(program).args(arguments);
        command.env("REKINDLE_SOCKET", node.socket()).stdin(Stdio::null()).stdout(File::create(&out)?).stderr(err);
        Ok(Self { child: command.spawn()?, out })
    }

    /// Waits for its end, and returns its status and the output.
    fn end(mut self) -> Result<(ExitStatus, String)> {
        let status = until("the command that waits ends", || Ok(self.child.try_wait()?))?;
        Ok((status, fs::read_to_string(&self.out)?))
    }
}

#[test]
fn whoever_is_killed_the_job_ends_with_the_right_result() -> Result {
    let expected = undisturbed("steady", &["--steps", "2"])?;
    let mut random = Random::new();
    let mut node = Node::start()?;
    let end = node.path("end");
    let program = stage::app("steady")?;
    let mut arguments: Vec<&OsStr> = STEADY.iter().map(OsStr::new).collect();
    arguments.extend(["--until".as_ref(), end.as_os_str()]);
    let waiter =
        Waiter::start(&node, "job", &["--every", "200ms", "--keep", "2", "--chain", "2"], &program, &arguments)?;
    let victims =
        ["job", "worker", "daemon", "supervisor", "guard", "supervisor in a restore", "daemon and then the job"];
    let mut restores = 0;
    for round in 0..victims.len() as u64 * 2 * repetitions() {
        let before = wait_for(&node, "job", "an image after the last kill", |it| {
            it["phase"] == "watching" && it["restores"] == restores && it["runs"] == true && newest(it) > 0
        })?;
        let before = wait_for(&node, "job", "another image", |it| newest(it) > newest(&before))?;
        ensure!(kept(&before) <= 2 && good(&before).len() <= 5, "{before:#}");
        // Each once, and then at random.
        let chosen =
            usize::try_from(if round < victims.len() as u64 { round } else { random.below(victims.len() as u64) })?;
        // At any moment from the last image to the next one, or later.
        let looks = random.below(20);
        (0..looks).try_for_each(|_| shown(&node, "job").map(drop))?;
        let job = pid(&before, "pid")?;
        eprintln!("kills the {}, after {looks} looks", victims[chosen]);
        match victims[chosen] {
            "daemon" => {
                node.kill_daemon()?;
                node.start_daemon(&[])?;
            }
            "daemon and then the job" => {
                node.kill_daemon()?;
                process::signal(job, libc::SIGKILL)?;
                until_true("the job is gone", || Ok(process::is_gone(job)))?;
                restores += 1;
                node.start_daemon(&[])?;
            }
            "job" => {
                process::signal(job, libc::SIGKILL)?;
                restores += 1;
            }
            "worker" => {
                process::signal(node.client(job)?.worker, libc::SIGKILL)?;
                restores += 1;
            }
            "supervisor in a restore" => {
                process::signal(job, libc::SIGKILL)?;
                restores += 1;
                let restoring = wait_for(&node, "job", "the job is being restored", |it| {
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
        wait_for(&node, "job", "the job runs", |it| it["restores"] == restores && it["runs"] == true)?;
    }
    ensure!(restores >= 2);
    fs::write(&end, "")?;
    let over = wait_for(&node, "job", "the job is over", |it| it["phase"] == "over")?;
    assert_eq!(over["ending"]["exited"], 0, "{over:#}");
    let (status, printed) = waiter.end()?;
    ensure!(status.success(), "{status}");
    assert_eq!(printed, expected);
    rekindle(&node, &["protect", "--forget", "job"])?;
    node.finish()
}

#[test]
fn the_exit_status_and_the_output_are_those_of_the_command() -> Result {
    let node = Node::start()?;
    let script = ["-c", "echo one; echo two >&2; exit 7"].map(OsStr::new);
    let (status, printed) = Waiter::start(&node, "job", &[], Path::new("/bin/sh"), &script)?.end()?;
    assert_eq!((status.code(), printed.as_str()), (Some(7), "one\n"));
    assert_eq!(fs::read_to_string(node.path("job.err"))?, "two\n");
    let run = ["run", "--protect", "--", "/bin/sh", "-c", "echo three; kill -TERM $$"].map(OsStr::new);
    let output = node.rekindle(&run)?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(
        output.status.code() == Some(1) && out == "three\n" && err.contains("there is no good image"),
        "{out} {err}"
    );
    // It has failed, says the user, and there is no image of it.
    let (status, _) = Waiter::start(&node, "again", &["--nonzero-fails"], Path::new("/bin/sh"), &script)?.end()?;
    assert_eq!(status.code(), Some(1));
    let said = fs::read_to_string(node.path("again.err"))?;
    ensure!(said.contains("there is no good image"), "{said}");
    node.finish()
}

/// A shell that prints and a child of it that uses the GPU. The shell is killed; its child is left.
#[test]
fn the_output_of_a_tree_that_is_restored_is_there_once() -> Result {
    const SCRIPT: &str = "\"$0\" --sleep-us 2000 --until \"$1\" & i=0; while [ ! -e \"$1\" ]; do i=$((i + 1)); echo \"line $i\"; \
                          sleep 0.01; done; wait $!; echo \"status $?\"";
    let node = Node::start()?;
    let (end, program) = (node.path("end"), stage::app("steady")?);
    let arguments = ["-c".as_ref(), SCRIPT.as_ref(), program.as_os_str(), end.as_os_str()];
    let waiter = Waiter::start(&node, "job", &["--every", "200ms"], Path::new("/bin/sh"), &arguments)?;
    for restores in 1..=2 {
        let before = wait_for(&node, "job", "an image", |it| it["runs"] == true && newest(it) > restores)?;
        process::signal(pid(&before, "pid")?, libc::SIGKILL)?;
        let restored = |it: &Value| it["restores"] == restores && it["runs"] == true;
        let after = wait_for(&node, "job", "the job is restored", restored)?;
        wait_for(&node, "job", "another image", |it| newest(it) > newest(&after))?;
    }
    fs::write(&end, "")?;
    let (status, printed) = waiter.end()?;
    ensure!(status.success(), "{status}");
    // The last run may have come less far than one before it, which was shown.
    for text in [printed, fs::read_to_string(node.path("state/protect/job/out"))?] {
        let lines: Vec<_> = text.lines().collect();
        let [counted @ .., "steady ok", "status 0"] = lines.as_slice() else { bail!("{text}") };
        ensure!(counted.len() > 10);
        for (number, line) in (1..).zip(counted) {
            assert_eq!(*line, format!("line {number}"), "{text}");
        }
    }
    node.finish()
}

/// A process that nobody has looked at holds the number of its session's leader, which CRIU needs.
#[test]
fn what_a_job_has_started_since_the_last_look_does_not_stand_in_the_way_of_its_restore() -> Result {
    const SCRIPT: &str = "\"$0\" --sleep-us 2000 --until \"$1\" & while [ ! -e \"$1\" ]; do \
                          if [ -e \"$2\" ]; then sleep 1000 & rm \"$2\"; fi; sleep 0.01; done; wait $!";
    let node = Node::start()?;
    let (end, more, program) = (node.path("end"), node.path("more"), stage::app("steady")?);
    let arguments = ["-c".as_ref(), SCRIPT.as_ref(), program.as_os_str(), end.as_os_str(), more.as_os_str()];
    let waiter = Waiter::start(&node, "job", &["--every", "6s"], Path::new("/bin/sh"), &arguments)?;
    let (supervisor, before) = hold_supervisor(&node, "job")?;
    fs::write(&more, "")?;
    until("the job has started another process", || Ok((!more.exists()).then_some(())))?;
    process::signal(pid(&before, "pid")?, libc::SIGKILL)?;
    process::signal(supervisor, libc::SIGCONT)?;
    let after = wait_for(&node, "job", "the job is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    // A number that is free in a moment is none that somebody has: Linux 6.15 and later free those of threads a moment after their
    // process has been waited for.
    let in_use = |it: &&Value| it.to_string().contains("not restored") && !it.to_string().contains("thread: -17");
    ensure!(after["events"].as_array().is_some_and(|it| !it.iter().any(|it| in_use(&it))), "{after:#}");
    fs::write(&end, "")?;
    let (status, printed) = waiter.end()?;
    ensure!(status.success() && printed == "steady ok\n", "{status}: {printed}");
    node.finish()
}

#[test]
fn as_many_images_are_kept_as_are_wanted_and_a_stop_leaves_the_job_alone() -> Result {
    let node = Node::start()?;
    let (app, end) = steady(&node)?;
    let said = protect(&node, &app, "job", &["--every", "100ms", "--keep", "2", "--chain", "2"])?;
    ensure!(said.contains("protecting process"), "{said}");
    let again = node.rekindle(&["protect", &app.pid().to_string()].map(OsStr::new))?;
    assert_eq!(again.status.code(), Some(3), "{}", String::from_utf8_lossy(&again.stderr));
    let (pid, image) = (app.pid().to_string(), node.path("image"));
    let kill = ["checkpoint".as_ref(), pid.as_ref(), image.as_os_str(), "--kill".as_ref()];
    let refused = node.rekindle(&kill)?;
    let why = String::from_utf8_lossy(&refused.stderr);
    ensure!(refused.status.code() == Some(3) && why.contains("is protected as job"), "{why}");
    // A kept image may build on one that is not, and one may be in the making.
    let images = node.path("state/protect/job/images");
    for number in 1..=7 {
        let now = wait_for(&node, "job", "the next image", |it| newest(it) >= number)?;
        let dirs = fs::read_dir(&images)?.count();
        ensure!(kept(&now) <= 2 && good(&now).len() <= 5 && dirs <= 6, "{dirs} directories: {now:#}");
    }
    let said = rekindle(&node, &["protect", "--stop", &app.pid().to_string()])?;
    ensure!(said.contains("job is stopped"), "{said}");
    let stopped = shown(&node, "job")?;
    ensure!(stopped["runs"] == true && stopped["failed_checkpoints"] == 0, "{stopped:#}");
    assert_eq!(stopped["cost"]["stall"].as_f64().map(|it| it > 0.0), Some(true), "{stopped:#}");
    for number in good(&stopped) {
        let dir = images.join(format!("image-{number:06}"));
        ensure!(node.rekindle(&["verify".as_ref(), dir.as_os_str()])?.status.success(), "{}", dir.display());
    }
    fs::write(&end, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    assert_eq!(shown(&node, "job")?["phase"], "stopped", "nobody has watched");
    rekindle(&node, &["protect", "--forget", "job"])?;
    ensure!(!images.exists());
    node.finish()
}

/// Has a supervisor stand still between two checkpoints.
pub(crate) fn hold_supervisor(node: &Node, name: &str) -> Result<(i32, Value)> {
    until("the supervisor is between two checkpoints", || {
        let now = shown(node, name)?;
        let Ok(supervisor) = pid(&now, "supervisor") else { return Ok(None) };
        process::signal(supervisor, libc::SIGSTOP)?;
        // It may have made an image since then, and may be at the next one: it runs others for that, or hashes an archive itself.
        let at_rest = process::tree(supervisor).len() == 1
            && good(&shown(node, name)?) == good(&now)
            && good(&now).len() >= 2
            && !is_at_next(&now)?;
        if !at_rest {
            process::signal(supervisor, libc::SIGCONT)?;
        }
        Ok(at_rest.then_some((supervisor, now)))
    })
}

/// Whether there is a directory of an image that nobody has noted yet.
fn is_at_next(shown: &Value) -> Result<bool> {
    let last = shown["images"].as_array().and_then(|it| it.last()).context("no image")?;
    let (number, dir) = (last["number"].as_u64().context("no number")?, last["dir"].as_str().context("no directory")?);
    Ok(Path::new(dir).with_file_name(format!("image-{:06}", number + 1)).exists())
}

#[test]
fn a_job_is_restored_from_the_image_before_one_that_is_bad() -> Result {
    let node = Node::start()?;
    let (app, end) = steady(&node)?;
    let out = app.identity().out.clone();
    protect(&node, &app, "job", &["--every", "6s", "--keep", "3", "--chain", "0"])?;
    let (supervisor, before) = hold_supervisor(&node, "job")?;
    let bad = newest(&before);
    let data = node.path("state/protect/job/images").join(format!("image-{bad:06}/rekindle-data-0.raw"));
    flip(&data, 100)?;
    process::signal(app.pid(), libc::SIGKILL)?;
    process::signal(supervisor, libc::SIGCONT)?;
    let after = wait_for(&node, "job", "the job is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    let said = after["events"].to_string();
    ensure!(said.contains(&format!("image {bad} is set aside")), "{said}");
    ensure!(said.contains(&format!("restored from image {}", good(&before)[good(&before).len() - 2])), "{said}");
    ensure!(!good(&after).contains(&bad), "{after:#}");
    fs::write(&end, "")?;
    let over = wait_for(&node, "job", "the job is over", |it| it["phase"] == "over")?;
    assert_eq!(over["ending"]["exited"], 0, "{over:#}");
    assert_eq!(fs::read_to_string(out)?, "steady ok\n");
    drop(app);
    node.finish()
}

#[test]
fn a_full_disk_harms_neither_the_images_nor_the_job() -> Result {
    let node = Node::start()?;
    let (app, end) = steady(&node)?;
    let disk = SmallDisk::mount(node.path("disk"), 256 << 10)?;
    let dir = disk.dir.display().to_string();
    protect(&node, &app, "job", &["--every", "200ms", "--keep", "2", "--dir", &dir])?;
    wait_for(&node, "job", "two images", |it| good(it).len() >= 2)?;
    disk.fill()?;
    let full = wait_for(&node, "job", "checkpoints fail", |it| it["failed_checkpoints"].as_u64() >= Some(2))?;
    ensure!(full["runs"] == true && full["phase"] == "watching" && good(&full).len() >= 2, "{full:#}");
    for number in good(&full) {
        let image = disk.dir.join(format!("job/image-{number:06}"));
        ensure!(node.rekindle(&["verify".as_ref(), image.as_os_str()])?.status.success(), "{}", image.display());
    }
    disk.make_room()?;
    wait_for(&node, "job", "an image again", |it| newest(it) > newest(&full) && it["failed_checkpoints"] == 0)?;
    rekindle(&node, &["protect", "--stop", "job"])?;
    drop(disk);
    fs::write(&end, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn a_protection_is_found_again_by_another_daemon_and_another_supervisor() -> Result {
    let mut node = Node::start()?;
    let (app, end) = steady(&node)?;
    protect(&node, &app, "job", &["--mtbf", "1s", "--keep", "2"])?;
    let first = wait_for(&node, "job", "an image", |it| newest(it) > 0)?;
    // The least interval is the time that a checkpoint takes.
    let (interval, durable) = (first["interval"]["interval"].as_f64(), first["cost"]["durable"].as_f64());
    ensure!(first["auto"] == true && first["interval"]["formula"] != "fixed" && interval >= durable, "{first:#}");
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    let before = shown(&node, "job")?;
    let before = wait_for(&node, "job", "an image by the next daemon", |it| newest(it) > newest(&before))?;
    // Both at once: nobody is left to go on, as after a reboot.
    let (guard, supervisor) = (pid(&before, "guard")?, pid(&before, "supervisor")?);
    for killed in [guard, supervisor] {
        process::signal(killed, libc::SIGSTOP)?;
    }
    for killed in [guard, supervisor] {
        process::signal(killed, libc::SIGKILL)?;
    }
    wait_for(&node, "job", "nobody supervises it", |it| it["guard"].is_null() && it["supervisor"].is_null())?;
    let listed = rekindle(&node, &["protect", "--list"])?;
    ensure!(listed.contains("watching, unsupervised"), "{listed}");
    let mut service = supervise(&node)?;
    wait_for(&node, "job", "an image by the next supervisor", |it| newest(it) > newest(&before))?;
    fs::write(&end, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    let over = wait_for(&node, "job", "the job is over", |it| it["phase"] == "over")?;
    assert_eq!(over["ending"]["exited"], 0, "{over:#}");
    let status = until("the service ends", || Ok(service.try_wait()?))?;
    ensure!(status.success(), "{status}");
    node.finish()
}

#[test]
fn a_job_that_fails_again_and_again_is_given_up_and_its_images_stay() -> Result {
    let node = Node::start()?;
    let (app, _) = steady(&node)?;
    protect(&node, &app, "job", &["--every", "1h", "--limit", "1"])?;
    wait_for(&node, "job", "an image", |it| newest(it) == 1)?;
    process::signal(app.pid(), libc::SIGKILL)?;
    wait_for(&node, "job", "it is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    process::signal(app.pid(), libc::SIGKILL)?;
    let given_up = wait_for(&node, "job", "it is given up", |it| it["phase"] == "given_up")?;
    let why = given_up["why"].as_str().unwrap_or_default();
    ensure!(why.contains("restored 1 times") && why.contains("signal 9"), "{why}");
    assert_eq!(good(&given_up), [1]);
    let image = node.path("state/protect/job/images/image-000001");
    ensure!(node.rekindle(&["verify".as_ref(), image.as_os_str()])?.status.success());
    drop(app);
    node.finish()
}

#[test]
fn a_store_gets_the_images_and_keeps_as_many() -> Result {
    let node = Node::start()?;
    let (app, end) = steady(&node)?;
    let store = node.path("store").display().to_string();
    let refused = node.rekindle(&["protect", &app.pid().to_string(), "--to", &store].map(OsStr::new))?;
    assert_eq!(refused.status.code(), Some(3), "{}", String::from_utf8_lossy(&refused.stderr));
    rekindle(&node, &["images", "init", &store])?;
    protect(&node, &app, "job", &["--every", "200ms", "--keep", "2", "--to", &format!("file://{store}")])?;
    let stored = |it: &Value| it["events"].to_string().matches("has image").count();
    wait_for(&node, "job", "four images are stored", |it| stored(it) >= 4)?;
    rekindle(&node, &["protect", "--stop", "job"])?;
    wait_for(&node, "job", "the last upload is over", |it| it["supervisor"].is_null() && it["guard"].is_null())?;
    let listed: Vec<Value> = serde_json::from_str(&rekindle(&node, &["images", "ls", &store, "--json"])?)?;
    assert_eq!(listed.len(), 2, "{listed:#?}");
    rekindle(&node, &["images", "verify", &store])?;
    fs::write(&end, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

/// The directory has lost its images, the nearer store some bytes of its own: the job comes back from the other one.
#[test]
fn a_job_comes_back_from_the_nearest_level_that_is_whole() -> Result {
    let node = Node::start()?;
    let (app, end) = steady(&node)?;
    let out = app.identity().out.clone();
    let [near, far] = ["near", "far"].map(|it| node.path(it));
    for store in [&near, &far] {
        rekindle(&node, &["images", "init", &store.display().to_string()])?;
    }
    let (to_near, to_far) = (format!("{},keep=1", near.display()), format!("{},every=10ms", far.display()));
    protect(&node, &app, "job", &["--every", "6s", "--to", &to_near, "--to", &to_far])?;
    let (supervisor, number) = until("both stores have an image, and the supervisor rests", || {
        let (supervisor, now) = hold_supervisor(&node, "job")?;
        let all_have = now["levels"].as_array().is_some_and(|all| all.iter().all(|it| has(it, newest(&now))));
        if !all_have {
            process::signal(supervisor, libc::SIGCONT)?;
        }
        Ok(all_have.then(|| (supervisor, newest(&now))))
    })?;
    fs::remove_dir_all(node.path("state/protect/job/images"))?;
    spoil(&near)?;
    process::signal(app.pid(), libc::SIGKILL)?;
    process::signal(supervisor, libc::SIGCONT)?;
    let after = wait_for(&node, "job", "the job is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    let (near, far) = (near.display(), far.display());
    let said = after["events"].to_string();
    for expected in [
        format!("image {number} does not come back from {near}: "),
        format!("image {number} has come back from {far}"),
        format!("restored from image {number}"),
    ] {
        ensure!(said.contains(&expected), "{expected}: {said}");
    }
    // The next image builds on the one that came.
    wait_for(&node, "job", "another image", |it| newest(it) > number)?;
    fs::write(&end, "")?;
    wait_for(&node, "job", "the job is over", |it| it["phase"] == "over" && it["supervisor"].is_null())?;
    assert_eq!(fs::read_to_string(out)?, "steady ok\n");
    let last = shown(&node, "job")?;
    ensure!(last["levels"][0]["images"].as_array().is_some_and(|it| it.len() <= 1), "{last:#}");
    rekindle(&node, &["protect", "--forget", "job"])?;
    drop(app);
    fs::remove_file(&end)?;
    let (app, end) = steady(&node)?;
    let pid = app.pid().to_string();
    let refused = until("it uses the GPU", || {
        let refused = node.rekindle(&["protect", &pid, "--name", "job", "--to", &to_far].map(OsStr::new))?;
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        Ok((!why.contains("uses a GPU through Rekindle")).then_some((refused.status.code(), why)))
    })?;
    ensure!(refused.0 == Some(3) && refused.1.contains("of a protection of this name"), "{refused:?}");
    fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}

pub(crate) fn has(level: &Value, number: u64) -> bool {
    level["images"].as_array().is_some_and(|it| it.contains(&Value::from(number)))
}

/// Writes over the middle of each file of a store that has content of images.
pub(crate) fn spoil(store: &Path) -> Result {
    for file in files_below(store)?.iter().filter(|it| it.metadata().is_ok_and(|it| it.len() > 4096)) {
        let file = File::options().write(true).open(file)?;
        file.write_all_at(&[0x55; 64], file.metadata()?.len() / 2)?;
    }
    Ok(())
}

/// Changes a byte of a file.
pub(crate) fn flip(file: &Path, at: u64) -> Result {
    let file = File::options().read(true).write(true).open(file)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[!byte[0]], at)?)
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() { files.extend(files_below(&path)?) } else { files.push(path) }
    }
    Ok(files)
}

/// Nobody needs the images while a byte of one changes: it is found all the same, and the image comes back from a store, or another is
/// made.
#[test]
fn a_bit_that_rots_is_found_while_the_job_runs() -> Result {
    let node = Node::start()?;
    let (app, end) = steady(&node)?;
    let out = app.identity().out.clone();
    let store = node.path("store");
    rekindle(&node, &["images", "init", &store.display().to_string()])?;
    let to = store.display().to_string();
    protect(&node, &app, "job", &["--every", "1h", "--verify-every", "20ms", "--to", &to])?;
    let is_verified = |it: &Value, number: u64, after: u64| {
        let mut images = it["images"].as_array().into_iter().flatten();
        images.any(|it| it["number"] == number && it["good"] == true && it["verified_ms"].as_u64() > Some(after))
    };
    wait_for(&node, "job", "the image is stored, and was verified again", |it| {
        it["events"].to_string().contains("has image 1") && is_verified(it, 1, 0)
    })?;
    let data =
        |number: u64| node.path("state/protect/job/images").join(format!("image-{number:06}/rekindle-data-0.raw"));
    flip(&data(1), 100)?;
    let came = format!("image 1 has come back from {to}");
    let now = wait_for(&node, "job", "it has come back", |it| it["events"].to_string().contains(&came))?;
    ensure!(now["events"].to_string().contains("image 1 is set aside, for it is damaged"), "{now:#}");
    let last = now["images"][0]["verified_ms"].as_u64().unwrap_or(0);
    wait_for(&node, "job", "it is verified again and again", |it| is_verified(it, 1, last))?;
    // As long as no image was good, one was due.
    let made = wait_for(&node, "job", "another image is stored", |it| {
        it["events"].to_string().contains("has image 2") && is_verified(it, 2, 0)
    })?;
    assert_eq!((&made["restores"], &made["runs"]), (&Value::from(0), &Value::from(true)), "{made:#}");

    // The store has none that is whole.
    spoil(&store)?;
    // With the image that it builds on.
    flip(&data(1), 100)?;
    let lost = wait_for(&node, "job", "neither comes back", |it| {
        let said = it["events"].to_string();
        [1, 2].iter().all(|it| said.contains(&format!("image {it} does not come back from {to}")))
            || (said.contains("image 1 does not come back from") && newest(it) > 1)
    })?;
    ensure!(!good(&lost).contains(&1), "{lost:#}");
    process::signal(app.pid(), libc::SIGKILL)?;
    let after = wait_for(&node, "job", "the job is restored", |it| it["restores"] == 1 && it["runs"] == true)?;
    ensure!(!after["events"].to_string().contains("restored from image 1\""), "{after:#}");
    fs::write(&end, "")?;
    wait_for(&node, "job", "the job is over", |it| it["phase"] == "over" && it["supervisor"].is_null())?;
    assert_eq!(fs::read_to_string(out)?, "steady ok\n");
    drop(app);
    node.finish()
}

#[test]
fn what_cannot_be_protected_is_refused_with_the_reason() -> Result {
    let node = Node::start()?;
    let mut sleeper = Command::new("sleep").arg("600").spawn()?;
    let own = sleeper.id().to_string();
    for (arguments, code, reason) in [
        (&["protect", &own][..], 3, "uses a GPU through Rekindle"),
        (&["protect", "2147483647"], 3, "there is no process"),
        (&["protect"], 2, "give a process"),
        (&["protect", "1", "--every", "5"], 2, "is no time"),
        (&["protect", "1", "--name", "a/b"], 3, ""),
        (&["protect", "--stop", "job"], 3, "there is no protection job"),
        (&["protect", "--forget", "../state"], 2, "is no name"),
    ] {
        let output = node.rekindle(&arguments.iter().map(OsStr::new).collect::<Vec<_>>())?;
        let err = String::from_utf8_lossy(&output.stderr);
        if output.status.code() != Some(code) || !err.contains(reason) {
            bail!("{arguments:?} ended with {}: {err}", output.status);
        }
    }
    sleeper.kill()?;
    sleeper.wait()?;
    assert_eq!(rekindle(&node, &["protect", "--list", "--json"])?.trim(), "[]");
    until_true("nothing is left", || Ok(node.processes().len() == 1))?;
    node.finish()
}
