//! Processes without the interposer: the driver checkpoints them, here the software GPU in its place.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::ensure;
use rekindle_e2e::app::{Hold, undisturbed};
use rekindle_e2e::native::{self, Stranger};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Fate, Gate, Image, Moment, Node, Result, process, stage, until};
use rekindle_wire::native::Call;

const PROGRAM: &str = "streams4";
const ARGUMENTS: [&str; 4] = ["--iterations", "150", "--sleep-us", "5000"];

fn started() -> Result<(String, Node)> {
    Ok((undisturbed(PROGRAM, &ARGUMENTS)?, native::start("", &[])?))
}

/// The dump of a program that is to fail with this reason; the program goes on to its end.
fn fails_and_goes_on(node: Node, app: App, reason: &str, expected: &str) -> Result {
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    criu.wait()?.fails_with(reason)?;
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_native_program_left_running_goes_on_and_so_does_what_is_restored_later() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(150)?;
    assert!(native::has_its_device(&node, app.pid())?);
    let image = node.dump(&app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(native::in_image(&node, &image.dir)?, [PROGRAM]);
    assert!(native::has_its_device(&node, app.pid())?, "it has its GPU back");
    assert_eq!(app.finish()?, expected, "the original");
    // CRIU would miss the file if it were in the image.
    fs::remove_file(node.path("devices").join("nvidia0"))?;
    let app = node.restore(&image)?;
    assert!(native::has_its_device(&node, app.pid())?);
    assert_eq!(app.finish()?, expected, "the restored one");
    node.finish()
}

#[test]
fn a_native_program_that_its_dump_kills_goes_on_and_is_dumped_again() -> Result {
    let (expected, node) = started()?;
    let mut app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    for generation in 1..=2 {
        app.reaches(generation * 150)?;
        let image = node.dump_and_kill(app)?;
        image.must_be_of_the_middle(&expected)?;
        app = node.restore(&image)?;
        app.advances()?;
    }
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_native_tree_of_two_and_one_without_a_gpu_goes_on() -> Result {
    let arguments = ["--rounds", "200", "--sleep-us", "5000"];
    let expected = undisturbed("tree", &arguments)?;
    for fate in [Fate::Killed, Fate::Running] {
        let node = native::start("", &[])?;
        let app = native::run(&node, "tree", &arguments, &[])?;
        app.reaches(50)?;
        let image = match fate {
            Fate::Killed => node.dump_and_kill(app)?,
            Fate::Running => {
                let image = node.dump(&app)?;
                assert_eq!(app.finish()?, expected, "the original");
                image
            }
        };
        image.must_be_of_the_middle(&expected)?;
        assert_eq!(native::in_image(&node, &image.dir)?.len(), 2);
        assert_eq!(node.restore(&image)?.finish()?, expected);
        node.finish()?;
    }
    Ok(())
}

/// A shell that has started one program under Rekindle and one without it.
struct Mixed {
    node: Node,
    app: App,
    expected: [String; 2],
}

impl Mixed {
    const PROGRAMS: [&str; 2] = ["globals", PROGRAM];

    fn start() -> Result<Self> {
        let expected = Self::PROGRAMS.map(|name| undisturbed(name, &ARGUMENTS));
        let [one, other] = expected;
        let expected = [one?, other?];
        let node = native::start("", &[])?;
        let script = r#"
            "$1" --iterations 150 --sleep-us 5000 --progress "$0.0.progress" >>"$0.0" 2>>"$0.errors" &
            export LD_LIBRARY_PATH=$3 SIMGPU_DEVICE_FILE=$4
            "$2" --iterations 150 --sleep-us 5000 --progress "$0.1.progress" >>"$0.1" 2>>"$0.errors" &
            wait"#;
        let mut command = node.command(Path::new("bash"))?;
        command.args(["-c", script]).arg(node.path("mixed"));
        command.args(Self::PROGRAMS.map(stage::app).into_iter().collect::<Result<Vec<_>>>()?);
        command.arg(stage::software_gpu()?).arg(node.path("devices").join("nvidia0"));
        // Both are dumped in their middle, however long that takes.
        let hold = Hold::new(node.fresh("hold"), 140)?;
        command.envs([hold.variable()]);
        let app = App::start(&mut command, &node.fresh("shell"), None)?.held(Some(hold));
        let mixed = Self { node, app, expected };
        mixed.reach(100)?;
        Ok(mixed)
    }

    fn reach(&self, progress: u64) -> Result {
        for place in 0..2 {
            let file = self.node.path(&format!("mixed.{place}.progress"));
            until(&format!("program {place} reaches {progress}"), || {
                ensure!(!process::is_gone(self.app.pid()), "{}", self.errors());
                let said = fs::read_to_string(&file).ok().and_then(|it| it.trim().parse::<u64>().ok());
                Ok(said.filter(|it| *it >= progress))
            })?;
        }
        Ok(())
    }

    fn errors(&self) -> String {
        fs::read_to_string(self.node.path("mixed.errors")).unwrap_or_default()
    }

    fn outputs(&self) -> Result<[String; 2]> {
        let [one, other] = [0, 1].map(|place| fs::read_to_string(self.node.path(&format!("mixed.{place}"))));
        Ok([one?, other?])
    }
}

#[test]
fn a_tree_of_a_native_program_and_one_under_rekindle_is_one_cut() -> Result {
    let Mixed { node, app, expected } = Mixed::start()?;
    let image = node.dump_and_kill(app)?;
    assert_eq!(native::in_image(&node, &image.dir)?, [PROGRAM]);
    let app = node.restore(&image)?;
    assert_eq!(node.clients()?.len(), 1);
    app.end()?;
    let mixed = Mixed { node, app, expected };
    assert_eq!(mixed.outputs()?, mixed.expected);
    mixed.node.finish()
}

#[test]
fn a_tree_of_a_native_program_and_one_under_rekindle_is_left_running_whole() -> Result {
    let mixed = Mixed::start()?;
    let (criu, image) = mixed.node.start_dump(&mixed.app, Fate::Running)?;
    criu.wait()?.succeeds()?;
    assert_eq!(native::in_image(&mixed.node, &image.dir)?, [PROGRAM]);
    mixed.app.end()?;
    assert_eq!(mixed.outputs()?, mixed.expected);
    mixed.node.finish()
}

#[test]
fn if_the_second_process_cannot_be_checkpointed_the_first_gets_its_gpu_back() -> Result {
    let arguments = ["--rounds", "200", "--sleep-us", "5000"];
    let expected = undisturbed("tree", &arguments)?;
    let node = native::start("", &[("SIMGPU_FAULT", "cuCheckpointProcessCheckpoint:2:801")])?;
    let app = native::run(&node, "tree", &arguments, &[])?;
    app.reaches(50)?;
    let (criu, image) = node.start_dump(&app, Fate::Killed)?;
    criu.wait()?
        .fails_with("the driver was to move its GPU memory to the host and answers CUDA_ERROR_NOT_SUPPORTED")?;
    assert!(!image.path("rekindle.img").exists(), "it is no image");
    // The helper's next checkpoints succeed.
    app.advances()?;
    let image = node.dump_and_kill(app)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_helper_that_is_killed_in_its_call_costs_the_dump_and_nothing_else() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[("SIMGPU_FAULT", "checkpoint:1:delay=2000")])?;
    app.reaches(100)?;
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    until_true("the driver is in its checkpoint", || Ok(app.errors()?.contains("injected at checkpoint")))?;
    process::signal(native::wait_for_helper(&node)?, libc::SIGKILL)?;
    criu.wait()?.fails_with("the helper that calls the driver has ended while the driver was to move")?;
    app.advances()?;
    let image = node.dump_and_kill(app)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

/// The moments of a dump at which its end is tried.
const MOMENTS: [Moment; 5] = [
    Moment::After("Pause"),
    Moment::Before("NativeCheckpoint"),
    Moment::After("NativeCheckpoint"),
    Moment::Script("post-dump"),
    Moment::Before("Finish"),
];

/// Starts a program and its dump, and holds that at a moment.
fn held_at(node: &Node, moment: Moment) -> Result<(App, Gate, rekindle_e2e::criu::Running, Image)> {
    let app = native::run(node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(100)?;
    let dir = node.fresh("gate");
    fs::create_dir(&dir)?;
    let gate = Gate::start(&dir, node.socket())?;
    gate.hold(moment.held_at())?;
    let image = node.fresh("image");
    fs::create_dir(&image)?;
    let (mut criu, image) = node.start_dump_by(&gate.setting(node.criu()), image, &app, Fate::Killed)?;
    gate.reached(&mut criu)?;
    Ok((app, gate, criu, image))
}

#[test]
fn a_criu_killed_in_any_phase_leaves_a_native_program_that_goes_on() -> Result {
    let (expected, node) = started()?;
    for moment in MOMENTS {
        let (app, gate, criu, image) = held_at(&node, moment)?;
        if moment == Moment::After("NativeCheckpoint") {
            assert!(!native::has_its_device(&node, app.pid())?);
        }
        process::signal(criu.pid(), libc::SIGKILL)?;
        ensure!(!criu.wait()?.status.success(), "{moment:?}");
        // Only now: what it has asked for last is not passed on any more.
        gate.open()?;
        drop(gate);
        assert_eq!(app.finish()?, expected, "killed at {moment:?}");
        until_true("the incomplete image is removed", || Ok(!image.path("rekindle.commit").exists()))?;
    }
    node.finish()
}

#[test]
fn a_criu_killed_while_the_driver_works_leaves_a_native_program_that_goes_on() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[("SIMGPU_FAULT", "checkpoint:1:delay=2000")])?;
    app.reaches(100)?;
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    until_true("the driver is in its checkpoint", || Ok(app.errors()?.contains("injected at checkpoint")))?;
    process::signal(criu.pid(), libc::SIGKILL)?;
    ensure!(!criu.wait()?.status.success());
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn what_a_killed_daemon_has_locked_goes_on_with_the_next_one() -> Result {
    let (expected, mut node) = started()?;
    for moment in MOMENTS {
        let (app, gate, criu, _) = held_at(&node, moment)?;
        node.kill_daemon()?;
        gate.open()?;
        let ended = criu.wait()?;
        ensure!(!ended.status.success(), "{moment:?}");
        drop(gate);
        ensure!(!process::is_gone(app.pid()), "{moment:?}");
        node.start_daemon(&[])?;
        node.keeps_helper();
        assert_eq!(app.finish()?, expected, "killed at {moment:?}");
    }
    node.finish()
}

#[test]
fn a_daemon_killed_while_the_driver_works_is_waited_for_by_the_next_one() -> Result {
    let (expected, mut node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[("SIMGPU_FAULT", "checkpoint:1:delay=2000")])?;
    app.reaches(100)?;
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    until_true("the driver is in its checkpoint", || Ok(app.errors()?.contains("injected at checkpoint")))?;
    node.kill_daemon()?;
    ensure!(!criu.wait()?.status.success());
    node.start_daemon(&[])?;
    node.keeps_helper();
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_criu_killed_in_a_restore_leaves_no_native_program_that_waits_for_ever() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(100)?;
    let image = node.dump_and_kill(app)?;
    for moment in [Moment::Script("post-restore"), Moment::After("Resume"), Moment::Before("NativeResume")] {
        let dir = node.fresh("gate");
        fs::create_dir(&dir)?;
        let gate = Gate::start(&dir, node.socket())?;
        gate.hold(moment)?;
        let mut setting = gate.setting(node.criu());
        if matches!(moment, Moment::Script(_)) {
            // The daemon must see CRIU itself: it knows the processes as CRIU's until CRIU tells of them.
            setting.socket = node.socket().to_owned();
        }
        let mut criu = node.start_restore(&setting, &image)?;
        gate.reached(&mut criu)?;
        process::signal(criu.pid(), libc::SIGKILL)?;
        ensure!(!criu.wait()?.status.success(), "{moment:?}");
        // Only now: what it has asked for last is not passed on any more.
        gate.open()?;
        drop(gate);
        let gone = || Ok(image.tree.iter().all(|pid| process::is_gone(*pid)));
        until_true(&format!("after a kill at {moment:?} nothing is left"), gone)?;
    }
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_daemon_killed_in_a_restore_leaves_no_native_program_that_waits_for_ever() -> Result {
    let (expected, mut node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(100)?;
    let image = node.dump_and_kill(app)?;
    for moment in [Moment::Before("Resume"), Moment::After("Resume"), Moment::Before("NativeResume")] {
        let dir = node.fresh("gate");
        fs::create_dir(&dir)?;
        let gate = Gate::start(&dir, node.socket())?;
        gate.hold(moment)?;
        let mut criu = node.start_restore(&gate.setting(node.criu()), &image)?;
        gate.reached(&mut criu)?;
        node.kill_daemon()?;
        gate.open()?;
        ensure!(!criu.wait()?.status.success(), "{moment:?}");
        drop(gate);
        let gone = || Ok(image.tree.iter().all(|pid| process::is_gone(*pid)));
        until_true(&format!("after a kill at {moment:?} nothing is left"), gone)?;
        node.start_daemon(&[])?;
        node.keeps_helper();
    }
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_native_program_whose_work_does_not_end_is_not_dumped_and_the_limit_is_named() -> Result {
    let node = native::start("quiesce_timeout_ms = 1000\n", &[])?;
    let until = node.path("until");
    let app = native::run(&node, "never", &["--until", &until.display().to_string()], &[])?;
    app.says("launched")?;
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    let outcome = criu.wait()?;
    assert_eq!(outcome.failure_kind().map(|it| it.as_str()), Some("timeout"));
    outcome.fails_with("cannot be locked: its GPU work has not ended after 1000 ms (quiesce_timeout_ms)")?;
    fs::write(until, "")?;
    assert_eq!(app.finish()?, "launched\nended\n");
    node.finish()
}

#[test]
fn one_of_two_whose_kernels_wait_for_each_other_is_not_locked_for_ever() -> Result {
    // A kernel of the one process waits for one of the other, which it may not launch once it is locked.
    let arguments = ["--rounds", "100", "--sleep-us", "3000"];
    let expected = undisturbed("meet2", &arguments)?;
    let node = native::start("quiesce_timeout_ms = 1000\n", &[])?;
    let app = native::run(&node, "meet2", &arguments, &[])?;
    app.reaches(20)?;
    let (criu, _) = node.start_dump(&app, Fate::Running)?;
    let outcome = criu.wait()?;
    // The processes may have happened to be idle together.
    if !outcome.status.success() {
        outcome.fails_with("and may wait for another process; it goes on")?;
    }
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_process_that_the_driver_does_not_let_go_is_killed_and_the_reason_said() -> Result {
    let node = native::start("quiesce_timeout_ms = 500\nstall_timeout_ms = 1000\n", &[])?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[("SIMGPU_FAULT", "checkpoint:1:delay=600000")])?;
    app.reaches(100)?;
    let (criu, image) = node.start_dump(&app, Fate::Running)?;
    criu.wait()?.fails_with("had not done so after 1000 ms (stall_timeout_ms)")?;
    app.was_killed(&image.tree)?;
    let log = fs::read_to_string(node.path("daemon.log"))?;
    assert!(log.contains("the driver leaves no other way than to end the process"), "{log}");
    node.finish()
}

#[test]
fn a_native_program_that_the_driver_cannot_give_its_memory_back_is_not_restored() -> Result {
    let (_, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[("SIMGPU_FAULT", "restore:1:2")])?;
    app.reaches(100)?;
    let image = node.dump_and_kill(app)?;
    let outcome = node.try_restore(&image)?;
    outcome.fails_with("has lost its GPU memory: the driver's checkpoint has failed")?;
    until_true("nothing is left of the restore", || Ok(image.tree.iter().all(|pid| process::is_gone(*pid))))?;
    node.finish()
}

#[test]
fn a_process_that_somebody_else_has_locked_is_left_to_them() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(100)?;
    let stranger = Stranger::start()?;
    assert_eq!(stranger.call(app.pid(), Call::Lock { timeout_ms: 60_000 })?.result, 0);
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    criu.wait()?.fails_with("is locked already, and was not by Rekindle")?;
    let checked = node.rekindle(&["check".as_ref(), app.pid().to_string().as_ref()])?;
    assert!(String::from_utf8_lossy(&checked.stdout).contains("is locked already"), "{checked:?}");
    assert_eq!(stranger.call(app.pid(), Call::State)?.value, 1, "it is still locked");
    assert_eq!(stranger.call(app.pid(), Call::Unlock)?.result, 0);
    drop(stranger);
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn the_stand_in_for_the_driver_has_its_states_and_its_conditions() -> Result {
    const ILLEGAL_STATE: i32 = 401;
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(50)?;
    let (pid, driver, observer) = (app.pid(), Stranger::start()?, Stranger::start()?);
    let result = |call: Call| driver.call(pid, call).map(|it| it.result);
    let restore = || Call::Restore { gpus: Vec::new() };
    let state = || observer.call(pid, Call::State).map(|it| it.value);
    for call in [Call::Checkpoint, restore(), Call::Unlock] {
        assert_eq!(result(call)?, ILLEGAL_STATE, "while it runs");
    }
    assert_eq!(result(Call::Lock { timeout_ms: 60_000 })?, 0);
    assert_eq!(result(restore())?, ILLEGAL_STATE, "while it is locked");
    let before = app.progress()?;

    // Stopped, it does nothing for the driver.
    process::signal(pid, libc::SIGSTOP)?;
    driver.ask(pid, Call::Checkpoint)?;
    assert_eq!(state()?, 1);
    assert!(native::has_its_device(&node, pid)?);
    process::signal(pid, libc::SIGCONT)?;
    assert_eq!(driver.answer()?.result, 0);
    assert_eq!(state()?, 2);
    assert!(!native::has_its_device(&node, pid)?, "it has given its GPU up");
    for call in [Call::Lock { timeout_ms: 0 }, Call::Checkpoint, Call::Unlock] {
        assert_eq!(result(call)?, ILLEGAL_STATE, "while it is checkpointed");
    }
    assert_eq!((result(restore())?, result(Call::Unlock)?), (0, 0));
    app.reaches(before + 10)?;
    assert_eq!(app.finish()?, expected);

    // As with the real driver: a thread is no process.
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(50)?;
    let thread = driver.call(app.pid(), Call::RestoreThread)?.value;
    assert!(thread > 0 && thread != app.pid());
    assert_ne!(driver.call(thread, Call::State)?.result, 0);
    assert!(!app.end()?.success(), "it survives that");
    drop((driver, observer));
    node.finish()
}

#[test]
fn check_says_what_saves_a_process_and_what_that_costs() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(50)?;
    let checked = node.rekindle(&["check".as_ref(), app.pid().to_string().as_ref()])?;
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.success() && text.contains("can be checkpointed now"), "{text}");
    assert!(text.contains("saved by the driver's own checkpoint: the process stands still"), "{text}");
    assert_eq!(app.finish()?, expected);

    let app = node.run(PROGRAM, &ARGUMENTS)?;
    app.reaches(50)?;
    let checked = node.rekindle(&["check".as_ref(), app.pid().to_string().as_ref()])?;
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(text.contains("saved by Rekindle's worker"), "{text}");
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn the_commands_checkpoint_and_restore_take_native_programs_too() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(100)?;
    let identity = app.identity().clone();
    let (image, pid) = (node.path("an image"), app.pid().to_string());
    let made = node.rekindle(&["checkpoint".as_ref(), "--kill".as_ref(), pid.as_ref(), image.as_os_str()])?;
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success() && said.starts_with(&format!("checkpointed process {pid} to")), "{made:?}");
    app.was_killed(&[identity.pid])?;
    let shown = node.rekindle(&["inspect".as_ref(), image.as_os_str()])?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("by the driver's own checkpoint: its GPU memory is in CRIU's files"), "{shown}");
    let verified = node.rekindle(&["verify".as_ref(), image.as_os_str()])?;
    assert!(verified.status.success(), "{verified:?}");
    let restored = node.rekindle(&["restore".as_ref(), "-d".as_ref(), image.as_os_str()])?;
    assert!(restored.status.success(), "{restored:?}");
    assert_eq!(App::adopt(identity).finish()?, expected);
    node.finish()
}

#[test]
fn a_driver_without_the_checkpoint_is_said_to_be_too_old() -> Result {
    let (expected, node) = (undisturbed(PROGRAM, &ARGUMENTS)?, native::start("", &[("SIMGPU_VERSION", "12040")])?);
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(100)?;
    fails_and_goes_on(node, app, "that needs CUDA 12.8, which is driver 570", &expected)
}

#[test]
fn a_daemon_without_the_rights_of_a_debugger_says_what_the_driver_answers() -> Result {
    let expected = undisturbed(PROGRAM, &ARGUMENTS)?;
    // So the real driver answers without CAP_SYS_PTRACE.
    let node = native::start("", &[("SIMGPU_FAULT", "cuCheckpointProcessGetRestoreThreadId:1:304")])?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(100)?;
    fails_and_goes_on(node, app, "tell its restore thread and answers CUDA_ERROR_OPERATING_SYSTEM (304)", &expected)
}

#[test]
fn a_process_that_only_has_the_devices_open_is_no_native_process() -> Result {
    let (expected, node) = started()?;
    // The shell has the file open, as a process has that was forked by one that uses the driver.
    let script = r#"exec 9<>"$SIMGPU_DEVICE_FILE"; "$0" "$@" 9>&-; exit"#;
    let mut command = Command::new("bash");
    stage::clean_environment(&mut command);
    command.envs(native::variables(&node)?).args(["-c", script]).arg(stage::app(PROGRAM)?);
    let app = node.run_command(PROGRAM, command, &ARGUMENTS)?;
    app.reaches(100)?;
    let image = node.dump(&app)?;
    assert_eq!(native::in_image(&node, &image.dir)?, [PROGRAM]);
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_program_under_rekindle_that_has_the_driver_s_device_mapped_too_is_refused_with_the_reason() -> Result {
    let node = native::start("", &[])?;
    // The file in which it notes when steps end, and which it maps.
    let device = node.path("devices").join("nvidia-uvm");
    fs::write(&device, vec![0; 4096])?;
    let app =
        node.run("steps", &["--touch", "0", "--mib", "1", "--piece-mib", "1", "--times", &device.to_string_lossy()])?;
    let worker = node.client(app.pid())?.worker;
    until_true("it has the file mapped", || native::has_its_device(&node, app.pid()))?;
    let (criu, image) = node.start_dump(&app, Fate::Killed)?;
    criu.wait()?.fails_with(&format!("(steps) runs under Rekindle, and has {} mapped itself", device.display()))?;
    assert!(!image.path("rekindle.commit").exists());
    assert_eq!(node.client(app.pid())?.worker, worker);
    app.kill()?;
    node.finish()
}

#[test]
fn a_daemon_that_leaves_native_programs_alone_locks_none() -> Result {
    let expected = undisturbed(PROGRAM, &ARGUMENTS)?;
    let mut node = Node::without_daemon()?;
    fs::create_dir(node.path("devices"))?;
    node.configure(&format!("[native]\nenabled = false\ndevices = {:?}\n", node.path("devices").join("nvidia")));
    node.start_daemon(&[])?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(50)?;
    // CRIU takes the software GPU's device for a file, and the program for one without a GPU.
    let (criu, image) = node.start_dump(&app, Fate::Running)?;
    criu.wait()?.succeeds()?;
    assert!(!image.path("rekindle.img").exists());
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn crius_own_plugin_that_comes_first_is_named() -> Result {
    let (expected, node) = started()?;
    let app = native::run(&node, PROGRAM, &ARGUMENTS, &[])?;
    app.reaches(50)?;
    let plugins = node.path("plugins");
    fs::create_dir(&plugins)?;
    // A library without hooks in its place. CRIU's order is that of the folder, which is one of the two.
    let ours = stage::program("rekindled")?.with_file_name("../lib/rekindle/criu/rekindle.so");
    let other = Path::new("/lib/x86_64-linux-gnu/libm.so.6");
    for (from, name) in [(other, "cuda_plugin.so"), (&ours, "rekindle.so")] {
        ensure!(Command::new("cp").arg(from).arg(plugins.join(name)).status()?.success());
    }
    let dir = node.fresh("image");
    fs::create_dir(&dir)?;
    let mut setting = node.criu();
    setting.plugins = Some(plugins.clone());
    let (criu, _) = node.start_dump_by(&setting, dir, &app, Fate::Running)?;
    let outcome = criu.wait()?.succeeds()?;
    let order: Vec<_> = fs::read_dir(&plugins)?.flatten().map(|it| it.file_name()).collect();
    let said = outcome.log.contains("cuda_plugin.so before rekindle.so and asks it first");
    assert_eq!(said, order.first().is_some_and(|it| it == "cuda_plugin.so"), "{order:?}");
    assert_eq!(app.finish()?, expected);
    node.finish()
}
