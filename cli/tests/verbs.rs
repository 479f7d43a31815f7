//! The verbs as a user calls them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

use rekindle_images::{
    Allocation, Base, Blob, Client, CreateOptions, DataWriter, Image, ImageDir, ImageWriter, LastRestore, Manifest,
    Protocol, RestorePhase,
};
use rekindle_wire::control::{
    CallInfo, CheckInfo, ClientInfo, DumpInfo, DumpOutcome, Failure, FailureKind, Opening, Owner, ProtectInfo,
    ProtocolChange, Reply, Request, RestoreInfo, StatusInfo,
};
use rekindle_wire::frame;
use tempfile::TempDir;

fn rekindle() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    command.env_remove("REKINDLE_SOCKET");
    command
}

/// Writes a program, by another process: one that another test starts meanwhile would inherit the file while it is open for writing.
fn write_program(path: &Path, script: &str) {
    let writes = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", writes]).arg(path).arg(script).status().unwrap().success());
}

fn ran(command: &mut Command) -> (i32, String, String) {
    // A program that was just written is busy as long as a process that another test forks meanwhile has it open.
    let output = loop {
        match command.output() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            output => break output.unwrap(),
        }
    };
    let Output { status, stdout, stderr } = output;
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// A daemon that answers one question.
fn answers(dir: &Path, reply: Reply) -> std::thread::JoinHandle<Request> {
    let listener = UnixListener::bind(dir.join("s")).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let opening = frame::receive::<Opening>(&stream).unwrap().body;
        frame::send(&stream, &reply, &[], &[]).unwrap();
        serde_json::from_value(opening.request).unwrap()
    })
}

/// Who has started it may be gone, as `rekindle tls listen` behind a receiver.
#[test]
fn errors_that_nobody_can_read_change_nothing_else() {
    let dir = TempDir::new().unwrap();
    for words in [&["ps"][..], &["migrate", "--receive"]] {
        let mut command = rekindle();
        command.args(words).arg("--socket").arg(dir.path().join("s"));
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        let said = command.stderr(std::process::Stdio::null()).status().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let unsaid = command.stderr(writer).status().unwrap();
        assert_eq!((unsaid.code(), said.success()), (said.code(), false), "{words:?}");
    }
}

fn ps(dir: &Path) -> Command {
    let mut command = rekindle();
    command.arg("ps").arg("--socket").arg(dir.join("s"));
    command
}

#[test]
fn ps_lists_for_people_and_for_programs() {
    let client = ClientInfo {
        pid: 12,
        worker: 13,
        command: "train".to_owned(),
        state: "running".to_owned(),
        device_memory: vec![1 << 30],
        gpu_time_ns: vec![2_500_000_000],
        pinned_memory: 4096,
        commands: 99,
        protocol: "cow".to_owned(),
        protocol_reason: "default".to_owned(),
        dump: None,
        suspended: None,
        idle_ms: 0,
        suspended_for: None,
        not_moved: None,
        owner: Owner { user: Some(0), container: None, cgroup: Some("/user.slice".to_owned()) },
    };
    let dir = TempDir::new().unwrap();
    let daemon = answers(dir.path(), Reply::Clients(vec![client.clone()]));
    let (code, out, _) = ran(&mut ps(dir.path()));
    assert!(matches!(daemon.join().unwrap(), Request::List));
    assert_eq!(code, 0);
    let expected = "PID  WORKER  STATE    GPU MEMORY  GPU TIME   PINNED  COMMANDS  PROTOCOL  USER  CONTAINER  NAME\n \
                    12      13  running     1.0 GiB   0:02.50  4.0 KiB        99  cow       root  -          train\n";
    assert_eq!(out, expected);

    let dir = TempDir::new().unwrap();
    answers(dir.path(), Reply::Clients(vec![client.clone()]));
    let (code, out, _) = ran(ps(dir.path()).arg("--json"));
    assert_eq!(code, 0);
    let parsed: Vec<ClientInfo> = serde_json::from_str(&out).unwrap();
    assert_eq!(parsed, [client]);
}

#[test]
fn a_protocol_is_chosen_by_name_and_another_name_is_wrong_usage() {
    let choose = |arguments: &[&str]| {
        let dir = TempDir::new().unwrap();
        let daemon = answers(dir.path(), Reply::Protocol { protocol: "cow".into(), reason: "default".into() });
        let answer = ran(rekindle().args(["protocol", "12", "--socket"]).arg(dir.path().join("s")).args(arguments));
        (answer, daemon)
    };
    for (arguments, expected) in [
        (&[][..], ProtocolChange::Keep),
        (&["cow"], ProtocolChange::Choose("cow".to_owned())),
        (&["--forget"], ProtocolChange::Forget),
    ] {
        let ((code, out, _), daemon) = choose(arguments);
        assert_eq!((code, out.as_str()), (0, "process 12: cow, by default\n"));
        let Request::Protocol { pid: 12, change } = daemon.join().unwrap() else { panic!("{arguments:?}") };
        assert_eq!(change, expected);
    }
    for (verb, rest) in [("protocol", &["12", "cov"][..]), ("run", &["--protocol", "cov", "true"])] {
        let (code, _, err) = ran(rekindle().arg(verb).args(rest));
        assert_eq!(code, 2);
        assert!(err.contains("\"cov\" is no protocol: say auto, stop, clone, cow or recopy"), "{err}");
    }
}

/// A daemon whose dumps fail, each for the next of these reasons, and then succeed. Returns the protocols that were ordered.
fn dumps(dir: &Path, failures: &[(FailureKind, &str)]) -> std::thread::JoinHandle<Vec<Option<String>>> {
    let listener = UnixListener::bind(dir.join("s")).unwrap();
    let failures = failures.iter().map(|(kind, reason)| Failure::new(*kind, *reason));
    let mut failures: std::collections::VecDeque<_> = failures.collect();
    std::thread::spawn(move || {
        let mut ordered = Vec::new();
        loop {
            let (stream, _) = listener.accept().unwrap();
            let opening = frame::receive::<Opening>(&stream).unwrap().body;
            let request = serde_json::from_value(opening.request).unwrap();
            let Request::Checkpoint { root: 1, protocol, moment_ms: None, .. } = request else {
                assert!(matches!(request, Request::Check { pid: 1 }));
                frame::send(&stream, &Reply::Checked(Vec::new()), &[], &[]).unwrap();
                continue;
            };
            ordered.push(protocol);
            let failure = failures.pop_front();
            let mispredicted = failure.as_ref().map(|it| it.kind == FailureKind::Mispredicted);
            let last = mispredicted.is_none_or(|it| failures.is_empty() && !it);
            let outcome = match failure {
                Some(failure) => DumpOutcome::Failed(failure),
                None => DumpOutcome::Durable {
                    id: "x".into(),
                    protocol: "stop".into(),
                    protocol_reason: "r".into(),
                    bytes: 5,
                    phases: Vec::new(),
                },
            };
            let info = DumpInfo { phase: "copy".into(), done: 1, bytes: 1, elapsed_ms: 1, outcome: Some(outcome) };
            frame::send(&stream, &Reply::Awaited, &[], &[]).unwrap();
            while frame::receive::<Request>(&stream).is_ok() {
                frame::send(&stream, &Reply::Progress(Some(info.clone())), &[], &[]).unwrap();
            }
            if last {
                return ordered;
            }
        }
    })
}

#[test]
fn a_dump_that_fails_by_a_mispredicted_write_is_made_once_more_by_stop() {
    let wrong = (FailureKind::Mispredicted, "k wrote to 0x2000");
    let full = (FailureKind::NoSpace, "the disk is full");
    // The failure's kind decides, and not the text of the reason.
    let refused = (FailureKind::Refused, "mispredicted write: given up");
    let stop = Some("stop".to_owned());
    for (failures, arguments, code, protocols) in [
        (vec![wrong], &[][..], 0, vec![None, stop.clone()]),
        (vec![wrong, full], &[], 1, vec![None, stop.clone()]),
        (vec![full], &[], 1, vec![None]),
        (vec![refused], &[], 3, vec![None]),
        (vec![(FailureKind::BadImage, "its base is damaged")], &[], 4, vec![None]),
        (vec![(FailureKind::GivenUp, "CRIU ended")], &[], 1, vec![None]),
        (vec![], &[], 0, vec![None]),
        (vec![], &["--protocol", "cow"], 0, vec![Some("cow".to_owned())]),
    ] {
        let dir = installed();
        std::fs::create_dir(dir.path().join("lib/rekindle/criu")).unwrap();
        std::fs::write(dir.path().join("lib/rekindle/criu/rekindle.so"), "").unwrap();
        // This CRIU fails as often, and keeps its arguments.
        let criu = dir.path().join("criu");
        let script = format!(
            "#!/bin/sh\ncd '{}'\necho \"$@\" >>told\necho '(00.1) Error (criu/x.c:1): criu knows' >image/dump.log\n[ \"$(wc -l <told)\" -gt {} ]\n",
            dir.path().display(),
            failures.len()
        );
        write_program(&criu, &script);
        let daemon = dumps(dir.path(), &failures);
        let mut command = Command::new(dir.path().join("bin/rekindle"));
        command.args(["checkpoint", "1", "--json", "--socket"]).arg(dir.path().join("s"));
        command.arg("--criu").arg(&criu).args(arguments).arg(dir.path().join("image"));
        let (ended, out, err) = ran(command.args(["--", "--tcp-established"]));
        assert_eq!(ended, code, "{failures:?}: {out} {err}");
        assert_eq!(daemon.join().unwrap(), protocols);
        let told = std::fs::read_to_string(dir.path().join("told")).unwrap();
        assert_eq!(told.lines().count(), protocols.len());
        assert!(told.lines().all(|it| it.starts_with("dump --tree 1 ") && it.contains("--leave-running")), "{told}");
        assert!(told.lines().all(|it| it.ends_with(" --tcp-established")), "{told}");
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(json["attempts"], protocols.len());
        assert_eq!(json["outcome"], if code == 0 { "done" } else { "failed" });
        let Some((kind, reason)) = failures.last().filter(|_| code != 0) else { continue };
        // CRIU knows why it has given up.
        let reason = if *kind == FailureKind::GivenUp { "Error (criu/x.c:1): criu knows" } else { reason };
        assert_eq!((json["kind"].as_str(), json["reason"].as_str()), (Some(kind.as_str()), Some(reason)));
        assert!(err.contains(reason), "{out} {err}");
    }
}

#[test]
fn options_of_checkpoints_and_restores_fit_together() {
    for arguments in [
        &[][..],
        &["1"],
        &["--container", "c", "1"],
        &["1", "d", "--export", "f"],
        &["1", "d", "--kill", "--leave-running"],
        &["1", "d", "--keep"],
        &["--container", "c", "--all"],
        &["--all", "--export", "f"],
        &["--pod", "p", "--at-moment"],
        &["--container", "c", "--container", "d", "--export", "f"],
        &["--container", "c", "--container", "c"],
    ] {
        assert_eq!(ran(rekindle().arg("checkpoint").args(arguments)).0, 2, "{arguments:?}");
    }
    for (verb, arguments, word) in [
        ("checkpoint", &["--container", "c", "--pre-checkpoint"][..], "--pre-checkpoint"),
        ("restore", &["--container", "c", "--import-previous", "f"], "--import-previous"),
    ] {
        let (code, _, err) = ran(rekindle().arg(verb).args(arguments));
        assert_eq!((code, err.contains(&format!("leave out {word}"))), (3, true), "{err}");
    }
    for arguments in [
        &[][..],
        &["--name", "n"],
        &["--container", "c", "--name", "n"],
        &["--import", "a", "--import", "b", "--name", "n"],
        &["--import", "a", "--lazy"],
        &["--container", "c", "/nonexistent"],
        &["/one", "/two"],
    ] {
        assert_eq!(ran(rekindle().arg("restore").args(arguments)).0, 2, "{arguments:?}");
    }
    let (code, _, err) = ran(rekindle().args(["checkpoint", "1", "d", "--criu", "/nonexistent/criu"]));
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("there is no /nonexistent/criu"), "{err}");
}

#[test]
fn options_that_an_engine_does_not_have_are_named() {
    for (verb, engine, arguments, word) in [
        ("checkpoint", "docker", &["--container", "c"][..], "give --checkpoint NAME"),
        ("checkpoint", "docker", &["--container", "c", "--checkpoint", "../x"], "is no name of a checkpoint"),
        ("checkpoint", "docker", &["--container", "c", "--checkpoint", "x", "--export", "f"], "--export"),
        ("checkpoint", "nerdctl", &["--pod", "p", "--checkpoint", "x"], "--pod"),
        ("checkpoint", "nerdctl", &["--all", "--checkpoint", "x", "--print-stats"], "--print-stats"),
        ("checkpoint", "docker", &["--all", "--checkpoint", "x", "--tcp-established"], "`tcp-established`"),
        ("checkpoint", "podman", &["--container", "c", "--checkpoint", "x"], "leave out --checkpoint"),
        ("checkpoint", "docker", &["1", "dir"], "--container"),
        ("checkpoint", "lxc", &["--container", "c"], "lxc"),
        ("restore", "docker", &["--container", "c"], "--checkpoint"),
        ("restore", "docker", &["--container", "c", "--checkpoint", "x", "--name", "n"], "--name"),
        ("restore", "nerdctl", &["--container", "c", "--checkpoint", "-x"], "-x"),
        ("restore", "nerdctl", &["--container", "c", "--checkpoint", "x", "--file-locks"], "`file-locks`"),
        ("restore", "nerdctl", &["--container", "c", "--checkpoint", "x", "--lazy"], "nerdctl does not pass it on"),
        (
            "restore",
            "docker",
            &["--container", "c", "--checkpoint", "x", env!("CARGO_BIN_EXE_rekindle")],
            "no archives",
        ),
        ("restore", "podman", &["--container", "c", "--checkpoint", "x"], "leave out --checkpoint"),
    ] {
        let (code, _, err) = ran(rekindle().args([verb, "--engine", engine]).args(arguments));
        assert!(code == 2 && err.contains(word), "{verb} {engine} {arguments:?}: {code} {err}");
    }
    let dir = TempDir::new().unwrap();
    let one = ["--engine", "docker", "--container", "c", "--checkpoint", "x"];
    let (code, _, err) = ran(rekindle().arg("checkpoint").args(one).env("PATH", dir.path()));
    assert!(code == 3 && err.contains("cannot run docker") && err.contains("docker.io"), "{code} {err}");
}

/// A program that stands for nerdctl or Docker. It keeps its arguments, and whether its container runs.
fn fake_engine(dir: &Path, name: &str) -> Command {
    let script = format!(
        r#"#!/bin/sh
cd '{}'
echo "$@" >>told
case $1 in
    container) if [ "$4" = "{{{{.Id}}}}" ]; then echo 0a1b; elif [ -e stopped ]; then echo exited 0; else echo running 1; fi ;;
    info) pwd ;;
    checkpoint) case " $* " in *" --leave-running "*) ;; *) echo >stopped ;; esac; echo "${{*##* }}" ;;
    start) rm stopped ;;
    *) exit 7 ;;
esac
"#,
        dir.display()
    );
    write_program(&dir.join(name), &script);
    let mut command = rekindle();
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
    command.env("PATH", path).env("REKINDLE_SOCKET", dir.join("s"));
    command
}

#[test]
fn docker_and_nerdctl_get_the_arguments_that_they_take() {
    for engine in ["docker", "nerdctl"] {
        let dir = TempDir::new().unwrap();
        let run = |verb, arguments: &[&str]| {
            let of = ["--engine", engine, "--container", "job", "--checkpoint", "one"];
            let ended = ran(fake_engine(dir.path(), engine).arg(verb).args(of).args(arguments));
            std::fs::remove_file(dir.path().join("s")).unwrap();
            ended
        };
        let told = || {
            let told = std::fs::read_to_string(dir.path().join("told")).unwrap();
            std::fs::remove_file(dir.path().join("told")).unwrap();
            let is_question = |line: &str| line.starts_with("container inspect") || line.starts_with("info ");
            told.lines().filter(|line| !is_question(line)).map(str::to_owned).collect::<Vec<_>>()
        };
        let daemon = dumps(dir.path(), &[]);
        let (code, out, err) = run("checkpoint", &["--", "--checkpoint-dir", "/d"]);
        assert!(code == 0 && out.starts_with("checkpointed container job (process 1) as one: "), "{code} {out} {err}");
        assert_eq!(told(), ["checkpoint create --leave-running --checkpoint-dir /d job one"]);
        daemon.join().unwrap();

        let daemon = answers(dir.path(), Reply::Status(status()));
        let (code, _, err) = run("restore", &[]);
        assert!(code == 3 && err.contains(&format!("`{engine} stop job` first")), "{code} {err}");
        assert!(told().is_empty(), "a container that runs is not started");
        daemon.join().unwrap();

        let daemon = dumps(dir.path(), &[]);
        let (code, _, err) = run("checkpoint", &["--kill"]);
        assert_eq!((code, told()), (0, vec!["checkpoint create job one".to_owned()]), "{err}");
        daemon.join().unwrap();

        // Docker restores no checkpoint whose bytes containerd has: a file gets another time.
        let kept = dir.path().join("containers/0a1b/checkpoints/one/inventory.img");
        std::fs::create_dir_all(kept.parent().unwrap()).unwrap();
        let file = std::fs::File::create(&kept).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        let daemon = answers(dir.path(), Reply::Status(status()));
        let (code, out, err) = run("restore", &["--json", "--", "--checkpoint-dir", "/d"]);
        assert_eq!(file.metadata().unwrap().modified().unwrap() == std::time::UNIX_EPOCH, engine == "nerdctl");
        assert_eq!((code, told()), (0, vec!["start --checkpoint one --checkpoint-dir /d job".to_owned()]), "{err}");
        let said: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(said, serde_json::json!({"container": "job", "checkpoint": "one", "outcome": "done"}));
        daemon.join().unwrap();
    }
}

#[test]
fn calls_are_listed_with_what_was_refused_first() {
    let call = |call: &str, how: &str, asked, refused| CallInfo { call: call.into(), how: how.into(), asked, refused };
    let calls = vec![
        call("cuGraphCreate", "refused", 2, 2),
        call("cuInit", "local", 1, 0),
        call("cuLaunchKernel", "hand", 1000, 0),
    ];
    let dir = TempDir::new().unwrap();
    let daemon = answers(dir.path(), Reply::Calls(calls));
    let (code, out, _) = ran(ps(dir.path()).args(["--calls", "12"]));
    assert!(matches!(daemon.join().unwrap(), Request::Calls { pid: 12 }));
    assert_eq!(code, 0);
    let expected = "ASKED  REFUSED  HOW      CALL\n    2        2  refused  cuGraphCreate\n \
                    1000        0  hand     cuLaunchKernel\n    1        0  local    cuInit\n";
    assert_eq!(out, expected);
}

#[test]
fn what_cannot_be_checkpointed_is_3_and_every_reason_is_said() {
    let good =
        CheckInfo { pid: 12, command: "train".into(), device_memory: 1 << 30, reasons: Vec::new(), way: String::new() };
    let bad = CheckInfo { pid: 13, reasons: vec!["it calls malloc".into(), "so it is".into()], ..good.clone() };
    let check = |processes: &[CheckInfo], json: bool| {
        let dir = TempDir::new().unwrap();
        let daemon = answers(dir.path(), Reply::Checked(processes.to_vec()));
        let mut command = rekindle();
        command.args(["check", "12", "--socket"]).arg(dir.path().join("s"));
        let answer = ran(if json { command.arg("--json") } else { &mut command });
        assert!(matches!(daemon.join().unwrap(), Request::Check { pid: 12 }));
        answer
    };
    let (code, out, _) = check(std::slice::from_ref(&good), false);
    assert_eq!((code, out.as_str()), (0, "process 12 (train), 1.0 GiB of GPU memory: can be checkpointed now\n"));
    let (code, out, err) = check(&[good.clone(), bad.clone()], false);
    assert_eq!(code, 3);
    assert!(out.ends_with("cannot be checkpointed now:\n  it calls malloc\n  so it is\n"), "{out}");
    assert!(err.contains("process 12 cannot be checkpointed now"), "{err}");
    let (code, out, _) = check(&[good, bad], true);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &json["checkpointable"], &json["processes"][1]["pid"]), (3, &false.into(), &13.into()));
    assert_eq!(check(&[], false).0, 0);
}

#[test]
fn without_a_daemon_ps_says_what_to_start() {
    let dir = TempDir::new().unwrap();
    let (code, out, err) = ran(&mut ps(dir.path()));
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("is rekindled running"), "{err}");
    assert!(err.contains(&dir.path().display().to_string()), "{err}");
    let dir = TempDir::new().unwrap();
    let reason = "wire version 1 was spoken, and this speaks 2";
    answers(dir.path(), Reply::Failed(Failure::new(FailureKind::Version, reason)));
    let (code, _, err) = ran(&mut ps(dir.path()));
    assert_eq!(code, 3);
    assert!(err.contains("this speaks 2"), "{err}");
}

#[test]
fn the_kind_of_what_the_daemon_answers_is_the_exit_code() {
    for (kind, expected) in [
        (FailureKind::Refused, 3),
        (FailureKind::Version, 3),
        (FailureKind::BadImage, 4),
        (FailureKind::Timeout, 1),
        (FailureKind::LostPeer, 1),
        (FailureKind::Other, 1),
    ] {
        let dir = TempDir::new().unwrap();
        answers(dir.path(), Reply::Failed(Failure::new(kind, "so it is")));
        let (code, _, err) = ran(&mut ps(dir.path()));
        assert_eq!(code, expected, "{kind:?}");
        assert!(err.contains("so it is"), "{err}");
    }
}

/// A tree as it is installed, with this program in it.
fn installed() -> TempDir {
    let dir = TempDir::new().unwrap();
    for sub in ["bin", "lib/rekindle"] {
        std::fs::create_dir_all(dir.path().join(sub)).unwrap();
    }
    let program = dir.path().join("bin/rekindle");
    // By another process: one that another test starts meanwhile would inherit the file while it is open for writing.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_rekindle")).arg(&program).status().unwrap();
    assert!(copied.success());
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(dir.path().join("lib/rekindle/libcuda.so.1"), "").unwrap();
    dir
}

#[test]
fn run_puts_the_library_first_and_passes_everything_on() {
    let dir = installed();
    let library = dir.path().canonicalize().unwrap().join("lib/rekindle");
    let script = "echo \"$LD_LIBRARY_PATH|$REKINDLE_SOCKET|$1|$2\"; exit 42";
    let run = |before: Option<&str>, socket: Option<&str>| {
        let mut command = Command::new(dir.path().join("bin/rekindle"));
        command.env_remove("REKINDLE_SOCKET").arg("run");
        match before {
            Some(path) => command.env("LD_LIBRARY_PATH", path),
            None => command.env_remove("LD_LIBRARY_PATH"),
        };
        if let Some(socket) = socket {
            command.args(["--socket", socket]);
        }
        command.args(["--", "sh", "-c", script, "sh", "--json", "a b"]);
        let (code, out, err) = ran(&mut command);
        assert_eq!(code, 42, "{err}");
        out
    };
    let library = library.display();
    let usual = "/run/rekindle/rekindled.sock";
    assert_eq!(run(None, None), format!("{library}|{usual}|--json|a b\n"));
    let out = run(Some("/x:/y"), Some("/run/s"));
    assert_eq!(out, format!("{library}:/x:/y|/run/s|--json|a b\n"));
    let mut command = Command::new(dir.path().join("bin/rekindle"));
    let protocol = command.args(["run", "--protocol", "cow", "--", "sh", "-c", "echo $REKINDLE_PROTOCOL"]);
    assert_eq!(ran(protocol).1, "cow\n");
}

#[test]
fn run_says_what_is_missing() {
    let dir = TempDir::new().unwrap();
    let with = |lib: &Path, program: &str| {
        let mut command = rekindle();
        ran(command.args(["run", "--lib"]).arg(lib).arg(program))
    };
    let (code, _, err) = with(dir.path(), "true");
    assert_eq!(code, 1);
    assert!(err.contains("there is no") && err.contains("--lib"), "{err}");
    let other = dir.path().join("librekindle.so");
    std::fs::write(&other, "").unwrap();
    let (code, _, err) = with(&other, "true");
    assert_eq!(code, 1);
    assert!(err.contains("is not named libcuda.so.1"), "{err}");
    std::fs::write(dir.path().join("libcuda.so.1"), "").unwrap();
    assert_eq!(with(dir.path(), "true").0, 0);
    let (code, _, err) = with(dir.path(), "/nonexistent/program");
    assert_eq!(code, 1);
    assert!(err.contains("cannot run /nonexistent/program"), "{err}");
    assert_eq!(ran(rekindle().arg("run")).0, 2);
    assert_eq!(ran(rekindle().arg("fly")).0, 2);
}

/// An image with one client of one allocation.
fn image() -> TempDir {
    let dir = TempDir::new().unwrap();
    let options = CreateOptions::new().unwrap();
    let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), options).unwrap();
    let (_, file) = writer.data_file(0).unwrap();
    let data = DataWriter::new(file, 0, writer.key()).unwrap();
    let content = [5; 10_000];
    let pieces = data.append_all(&content).unwrap();
    data.finish().unwrap();
    let mut manifest = Manifest::new(1_700_000_000, Protocol::Stop);
    manifest.clients = vec![Client {
        command: "train".to_owned(),
        allocations: vec![Allocation {
            address: 0x2000_0000_0000,
            size: content.len() as u64,
            pieces,
            ..Allocation::default()
        }],
        ..Client::default()
    }];
    writer.commit(manifest).unwrap();
    dir
}

fn on(verb: &str, dir: &Path, json: bool) -> (i32, String, String) {
    let mut command = rekindle();
    command.arg(verb).arg(dir);
    if json {
        command.arg("--json");
    }
    ran(&mut command)
}

#[test]
fn an_image_that_builds_on_another_is_flattened() {
    let (first, second, out) = (image(), TempDir::new().unwrap(), TempDir::new().unwrap());
    std::os::unix::fs::symlink(first.path(), second.path().join("rekindle-parent")).unwrap();
    std::fs::write(second.path().join("inventory.img"), "of CRIU").unwrap();
    let dir = ImageDir::open(second.path()).unwrap();
    let base = Base::find(&dir).unwrap();
    let manifest = base.as_ref().unwrap().image().manifest().clone();
    let known = base.as_ref().unwrap().known(0);
    let writer = ImageWriter::create_on(dir, CreateOptions::new().unwrap(), base).unwrap();
    let mut manifest = Manifest { parent: None, ..manifest };
    let piece = &mut manifest.clients[0].allocations[0].pieces[0];
    piece.storage = known.get(piece.hash, piece.length).unwrap();
    writer.commit(manifest).unwrap();

    let flatten = |out: Option<&Path>| ran(rekindle().arg("flatten").arg(second.path()).args(out));
    let copy = out.path().join("copy");
    let (code, said, err) = flatten(Some(&copy));
    assert_eq!(code, 0, "{err}");
    assert!(said.contains("in 3 files"), "{said}");
    assert_eq!(std::fs::read_to_string(copy.join("inventory.img")).unwrap(), "of CRIU");
    // There is an image now.
    let (code, _, err) = flatten(Some(&copy));
    assert_eq!(code, 1);
    assert!(err.contains("already holds a committed image"), "{err}");
    assert_eq!(flatten(None), (0, "flattened\n".to_owned(), String::new()));
    assert_eq!(flatten(None), (0, "it builds on no other image\n".to_owned(), String::new()));
    drop(first);
    for dir in [&*copy, second.path()] {
        assert_eq!(on("verify", dir, false).1, "good: 1 pieces and 0 code images, 9.8 KiB read\n");
    }
}

/// The image and those that it builds on have many data files in all.
#[test]
fn an_image_of_more_data_files_than_are_open_by_default_is_verified_and_flattened() {
    let dir = TempDir::new().unwrap();
    let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), CreateOptions::new().unwrap()).unwrap();
    let blob = |n: u8| {
        let (index, file) = writer.another_data_file().unwrap();
        let data = DataWriter::new(file, index, writer.key()).unwrap();
        let pieces = data.append_all(&[n; 100]).unwrap();
        data.finish().unwrap();
        Blob { kind: 1, handle: n.into(), size: 100, pieces, ..Blob::default() }
    };
    let blobs = (1..=40).map(blob).collect();
    let mut manifest = Manifest::new(1_700_000_000, Protocol::Stop);
    manifest.clients = vec![Client { blobs, ..Client::default() }];
    writer.commit(manifest).unwrap();
    for verb in ["verify", "flatten"] {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -Sn 24; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_rekindle"), verb]).arg(dir.path());
        if verb == "flatten" {
            command.arg(dir.path().join("flat"));
        }
        let (code, out, err) = ran(&mut command);
        assert_eq!(code, 0, "{verb}: {out} {err}");
    }
}

#[test]
fn a_good_image_is_shown_and_verified() {
    let dir = image();
    let (code, out, _) = on("inspect", dir.path(), false);
    assert_eq!(code, 0);
    assert!(out.contains("train"), "{out}");
    let (_, out, _) = on("inspect", dir.path(), true);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["protocol"], "stop");
    assert_eq!(json["clients"][0]["bytes"]["device"], 10_000);
    let (code, out, _) = on("verify", dir.path(), false);
    assert_eq!(code, 0);
    assert_eq!(out, "good: 1 pieces and 0 code images, 9.8 KiB read\n");
    let (_, out, _) = on("verify", dir.path(), true);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["problem_count"], 0);
}

#[test]
fn a_bad_image_is_4() {
    let dir = image();
    let data = dir.path().join("rekindle-data-0.raw");
    let mut content = std::fs::read(&data).unwrap();
    content[7] = 6;
    std::fs::write(&data, &content).unwrap();
    let (code, out, err) = on("verify", dir.path(), false);
    assert_eq!(code, 4);
    assert!(out.contains("rekindle-data-0.raw"), "{out}");
    assert!(err.contains("is bad in 1 places"), "{err}");
    // Inspection does not read the image's content.
    assert_eq!(on("inspect", dir.path(), false).0, 0);

    std::fs::remove_file(dir.path().join("rekindle.commit")).unwrap();
    let (code, out, err) = on("inspect", dir.path(), false);
    assert_eq!(code, 4);
    assert!(out.contains("train"), "{out}");
    assert!(err.contains("is not committed"), "{err}");
    assert_eq!(on("verify", dir.path(), false).0, 4);

    let empty = TempDir::new().unwrap();
    for verb in ["inspect", "verify"] {
        assert_eq!(on(verb, empty.path(), false).0, 4);
        let (code, _, err) = on(verb, Path::new("/nonexistent"), false);
        assert_eq!(code, 1);
        assert!(err.contains("/nonexistent"), "{err}");
    }
}

#[test]
fn what_went_wrong_is_said_once_with_its_cause() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("missing");
    for verb in ["inspect", "verify", "flatten"] {
        let (code, _, err) = on(verb, &missing, false);
        assert_eq!((code, err.matches("No such file").count()), (1, 1), "{verb}: {err}");
    }
}

/// Runs `rekindle restore` as it is installed, with a CRIU that reports its start, and a daemon.
fn restore(image: &Path, arguments: &[&str]) -> (i32, String, bool) {
    let dir = with_criu(">\"${0%/*}/started\"");
    let started = dir.path().join("started");
    // Not every restore asks the daemon.
    answers(dir.path(), Reply::Status(status()));
    let (code, _, err) = ran(restore_command(&dir, image).args(arguments));
    (code, err, started.exists())
}

/// An installation with a CRIU that is this script.
fn with_criu(script: &str) -> TempDir {
    let dir = installed();
    std::fs::create_dir(dir.path().join("lib/rekindle/criu")).unwrap();
    std::fs::write(dir.path().join("lib/rekindle/criu/rekindle.so"), "").unwrap();
    // No process that another test forks meanwhile has the file open for writing, so that it could not be executed.
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$2\" && chmod 755 \"$2\"";
    let written = Command::new("/bin/sh").args(["-c", write, "sh", script]).arg(dir.path().join("criu")).status();
    assert!(written.unwrap().success());
    dir
}

/// `rekindle restore` of such an installation.
fn restore_command(dir: &TempDir, image: &Path) -> Command {
    let mut command = Command::new(dir.path().join("bin/rekindle"));
    command.arg("restore").arg(image).arg("--criu").arg(dir.path().join("criu"));
    command.arg("--socket").arg(dir.path().join("s"));
    command
}

fn status() -> StatusInfo {
    StatusInfo {
        version: "test".into(),
        wire: rekindle_wire::CONTROL_VERSION,
        cuda_driver: String::new(),
        spare: 0,
        used: 0,
        max: None,
        problem: None,
        driver_version: None,
        gpus: Vec::new(),
        sandbox: None,
        kinds: Vec::new(),
        protect: None,
    }
}

#[test]
fn protections_are_where_the_daemon_says_and_an_earlier_daemon_is_named() {
    let dir = TempDir::new().unwrap();
    let list = || {
        let mut command = rekindle();
        ran(command.args(["protect", "--list", "--socket"]).arg(dir.path().join("s")))
    };
    let daemon = answers(dir.path(), Reply::Status(status()));
    let (code, _, err) = list();
    assert!(matches!(daemon.join().unwrap(), Request::Status));
    assert!(code == 3 && err.contains("the daemon is of an earlier release"), "{err}");

    std::fs::remove_file(dir.path().join("s")).unwrap();
    let protections = dir.path().join("protect");
    std::fs::create_dir_all(protections.join("odd")).unwrap();
    std::fs::write(protections.join("odd/record.json"), "{").unwrap();
    let protect = Some(ProtectInfo { dir: protections, mtbf_ms: 1 });
    let daemon = answers(dir.path(), Reply::Status(StatusInfo { protect, ..status() }));
    let (code, out, err) = list();
    daemon.join().unwrap();
    assert_eq!((code, out.lines().count()), (0, 1), "{out} {err}");
    assert!(err.contains("odd/record.json is no record of a protection"), "{err}");
}

#[test]
fn a_restore_that_verifies_first_starts_nothing_from_a_damaged_image() {
    let good = image();
    assert_eq!(restore(good.path(), &["--verify"]), (0, String::new(), true));
    let bad = image();
    let data = bad.path().join("rekindle-data-0.raw");
    let mut bytes = std::fs::read(&data).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&data, bytes).unwrap();
    let (code, err, started) = restore(bad.path(), &["--verify"]);
    assert_eq!((code, started), (4, false), "{err}");
    assert!(err.contains("rekindle-data-0.raw") && err.contains("is bad in 1 places"), "{err}");
    // Without --verify, CRIU is started: workers compare the hashes while they load the image.
    assert_eq!(restore(bad.path(), &[]), (0, String::new(), true));
}

/// A daemon that has this to say of a restore, one after the other, and the last again and again.
fn watched(dir: &Path, infos: Vec<RestoreInfo>) -> std::thread::JoinHandle<()> {
    let listener = UnixListener::bind(dir.join("s")).unwrap();
    std::thread::spawn(move || {
        loop {
            let (stream, _) = listener.accept().unwrap();
            let opening = frame::receive::<Opening>(&stream).unwrap().body;
            match serde_json::from_value(opening.request).unwrap() {
                Request::Status => frame::send(&stream, &Reply::Status(status()), &[], &[]).unwrap(),
                Request::WatchRestore { hears_first: false, .. } => {
                    frame::send(&stream, &Reply::Awaited, &[], &[]).unwrap();
                    let mut next = 0;
                    while frame::receive::<Request>(&stream).is_ok() {
                        let info = infos.get(next).or(infos.last()).cloned().map(Box::new);
                        next += 1;
                        frame::send(&stream, &Reply::RestoreProgress(info), &[], &[]).unwrap();
                    }
                    return;
                }
                other => panic!("{other:?}"),
            }
        }
    })
}

#[test]
fn a_restore_reports_its_outcome_and_waits_for_all_content_if_it_is_asked_to() {
    let runs = RestoreInfo { running_ns: Some(5_000_000), bytes: 7, ..RestoreInfo::default() };
    let loaded = RestoreInfo { loaded_ns: Some(9_000_000), ..runs.clone() };
    let failed = |kind| RestoreInfo { failure: Some(Failure::new(kind, "the reason")), ..RestoreInfo::default() };
    let corrupt = RestoreInfo { running_ns: runs.running_ns, ..failed(FailureKind::BadImage) };
    let json = |value: &serde_json::Value| (value["outcome"].clone(), value["kind"].clone(), value["reason"].clone());
    let said = |outcome: &str, kind: &str, reason: &str| (outcome.into(), kind.into(), reason.into());
    let null = serde_json::Value::Null;
    let done = ("done".into(), null.clone(), null.clone());
    for (infos, criu, arguments, code, expected) in [
        (vec![runs.clone()], 0, &["-d", "--json"][..], 0, done.clone()),
        (vec![runs.clone(), runs.clone(), loaded.clone()], 0, &["-d", "--json", "--wait-loaded"], 0, done.clone()),
        // CRIU was told to, and the daemon knows nothing of it.
        (vec![], 0, &["-d", "--json", "--wait-loaded"], 0, done),
        (vec![corrupt.clone()], 0, &["-d", "--json"], 4, said("failed", "bad_image", "the reason")),
        (vec![runs, corrupt], 0, &["-d", "--json", "--wait-loaded"], 4, said("failed", "bad_image", "the reason")),
        (vec![failed(FailureKind::Refused)], 1, &["-d", "--json"], 3, said("refused", "refused", "the reason")),
        (vec![failed(FailureKind::Timeout)], 1, &["-d", "--json"], 1, said("failed", "timeout", "the reason")),
        (
            vec![failed(FailureKind::GivenUp)],
            1,
            &["-d", "--json"],
            1,
            said("failed", "other", "Error (criu/x.c:1): why"),
        ),
        (vec![], 1, &["-d", "--json"], 1, said("failed", "other", "Error (criu/x.c:1): why")),
    ] {
        let image = image();
        let dir = with_criu(&format!(
            "echo '(00.1) Error (criu/x.c:1): why' >'{}/restore.log'\nexit {criu}",
            image.path().display()
        ));
        let daemon = watched(dir.path(), infos.clone());
        let (found, out, err) = ran(restore_command(&dir, image.path()).args(arguments));
        let value: serde_json::Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out} {err}"));
        assert_eq!((found, json(&value)), (code, expected), "{infos:?} {arguments:?} {err}");
        assert_eq!(err.is_empty(), code == 0, "{err}");
        let last = infos.last().and_then(|it| it.loaded_ns).map(|_| 9.0);
        assert_eq!(value["restore"]["loaded_ms"].as_f64(), last);
        assert_eq!(value.get("errors").is_some(), code != 0);
        daemon.join().unwrap();
    }
}

#[test]
fn a_restore_that_fails_before_criu_is_started_is_reported_too() {
    let dir = with_criu("exit 9");
    let (code, out, err) = ran(restore_command(&dir, Path::new("/nonexistent")).args(["-d", "--json"]));
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &value["outcome"], &value["kind"]), (1, &"failed".into(), &"other".into()), "{err}");
    let empty = TempDir::new().unwrap();
    let (code, out, _) = ran(restore_command(&dir, empty.path()).args(["-d", "--json"]));
    let value: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &value["outcome"], &value["kind"]), (4, &"failed".into(), &"bad_image".into()));
    // The application has the same standard output.
    for option in ["--json", "--wait-loaded"] {
        let (code, out, err) = ran(restore_command(&dir, empty.path()).arg(option));
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.contains("--restore-detached"), "{err}");
    }
}

#[test]
fn a_daemon_that_cannot_tell_when_all_is_loaded_is_not_waited_for() {
    let image = image();
    let dir = with_criu("exit 0");
    let listener = UnixListener::bind(dir.path().join("s")).unwrap();
    let daemon = std::thread::spawn(move || {
        for _ in 0..2 {
            let (stream, _) = listener.accept().unwrap();
            let opening = frame::receive::<Opening>(&stream).unwrap().body;
            let request = serde_json::from_value(opening.request).unwrap();
            let reply = match request {
                Request::Status => Reply::Status(status()),
                _ => Reply::Failed(Failure::internal("malformed request")),
            };
            frame::send(&stream, &reply, &[], &[]).unwrap();
        }
    });
    let (code, _, err) = ran(restore_command(&dir, image.path()).args(["-d", "--wait-loaded"]));
    assert_eq!(code, 3);
    assert!(err.contains("--wait-loaded needs a newer daemon, or other rights"), "{err}");
    daemon.join().unwrap();
}

#[test]
fn an_image_shows_what_its_last_restore_took() {
    let dir = image();
    let image = Image::open(dir.path()).unwrap();
    let phases = vec![RestorePhase { name: "check".to_owned(), duration_ns: 3_000_000, bytes: 0 }];
    let last = LastRestore { running_ns: 5_000_000, loaded_ns: 7_000_000, phases, ..LastRestore::default() };
    assert!(!on("inspect", dir.path(), false).1.contains("last restore"));
    LastRestore::begin(image.dir()).unwrap().write(&last, image.manifest_hash()).unwrap();
    let (code, out, _) = on("inspect", dir.path(), false);
    assert_eq!(code, 0);
    assert!(out.contains("last restore  1970-01-01") && out.contains("  check           3.0 ms\n"), "{out}");
    let (_, out, _) = on("inspect", dir.path(), true);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["last_restore"]["loaded_ns"], &json["protocol"]), (&7_000_000.into(), &"stop".into()), "{json}");
    assert_eq!(on("verify", dir.path(), false).0, 0);
}

/// `rekindle images`, on a store in this directory.
fn images(arguments: &[&str], place: &Path) -> (i32, String, String) {
    ran(rekindle().arg("images").args(arguments).current_dir(place))
}

#[test]
fn a_checkpoint_is_copied_into_a_store_and_restored_from_it() {
    let image = image();
    // This CRIU dumps that image, and says that it was started.
    let script =
        format!("cd \"${{0%/*}}\"; echo \"$@\" >>told; [ \"$1\" != dump ] || cp -a {}/. image", image.path().display());
    let dir = with_criu(&script);
    let checkpoint = |to: &str| {
        let mut command = Command::new(dir.path().join("bin/rekindle"));
        command.args(["checkpoint", "1", "image", "--json", "--to", to, "--socket", "s", "--criu"]);
        ran(command.arg(dir.path().join("criu")).current_dir(dir.path()))
    };
    // What stands in the way is said before anything is dumped.
    let (code, _, err) = checkpoint("store");
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("there is no store at store"), "{err}");
    assert_eq!(images(&["init", "store"], dir.path()).0, 0);
    let told = dir.path().join("told");
    assert!(!told.exists());

    let daemon = dumps(dir.path(), &[]);
    let (code, out, err) = checkpoint("store");
    assert_eq!(code, 0, "{out}{err}");
    daemon.join().unwrap();
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["outcome"], &json["stored"]["name"]), (&"done".into(), &"image".into()), "{out}");
    assert_eq!(std::fs::read_to_string(&told).unwrap().lines().count(), 1);
    let (code, _, err) = checkpoint("store/image");
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("has an image \"image\" already"), "{err}");
    assert_eq!(std::fs::read_to_string(&told).unwrap().lines().count(), 1);

    let socket = dir.path().join("s");
    std::fs::remove_file(&socket).unwrap();
    let restore = |arguments: &[&str]| {
        let mut command = restore_command(&dir, Path::new("store/image"));
        ran(command.args(arguments).current_dir(dir.path()))
    };
    // Without a daemon nothing is copied.
    assert_eq!(restore(&["--into", "copy"]).0, 1);
    assert!(!dir.path().join("copy").exists());
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            frame::receive::<Opening>(&stream).unwrap();
            frame::send(&stream, &Reply::Status(status()), &[], &[]).unwrap();
        }
    });
    let (code, out, err) = restore(&["--into", "copy"]);
    assert_eq!(code, 0, "{out}{err}");
    let told = std::fs::read_to_string(&told).unwrap();
    let copy = dir.path().canonicalize().unwrap().join("copy");
    assert!(told.lines().last().unwrap().contains(&format!("--images-dir {}", copy.display())), "{told}");
    assert_eq!(on("verify", &copy, false).0, 0);
    let (code, _, err) = ran(&mut restore_command(&dir, Path::new("s3://bucket/job")));
    assert_eq!(code, 2);
    assert!(err.contains("say --into DIR, the directory that s3://bucket/job is copied to"), "{err}");
}
