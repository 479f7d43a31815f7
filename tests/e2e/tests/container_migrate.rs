//! `rekindle migrate --container`: containers that move to another host while they run.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};

use anyhow::{Context, ensure};
use rekindle_e2e::contained::{Contained, SHARED};
use rekindle_e2e::elsewhere::Server;
use rekindle_e2e::podman::Podman;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::wait::{until, until_true};
use rekindle_e2e::{Elsewhere, Node, Result, pairs, process, stage};
use serde_json::Value;

use super::migrate::tells_the_pause;

/// The container that moves.
const NAME: &str = "moves";
/// Where a host has what `cli/src/migrate/place.rs` says.
const PLACES: &str = "/run/rekindle-migrations";

/// Two hosts with a podman each, and a container that moves between them.
struct Hosts {
    podman: Podman,
    podman_there: Podman,
    /// A program that calls the podman of the host on which it is called.
    program: PathBuf,
    server: Server,
    there: Elsewhere,
    here: Node,
}

/// Where the container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Here,
    There,
}

impl Hosts {
    fn start() -> Result<Self> {
        let here = Node::at_default_socket()?;
        fs::create_dir(here.path("shared"))?;
        let podman = Podman::new(&here)?;
        let there = Elsewhere::with_podman(&here)?;
        let podman_there = podman.elsewhere(&there)?;
        podman_there.will_restore(NAME);
        let program = here.path("podman.sh");
        podman.program(&program)?;
        let server = Server::of(&here)?;
        Ok(Self { podman, podman_there, program, server, there, here })
    }

    /// Starts the container with a program that checks its results for as long as the test wants, and these options of `podman run`.
    fn run(&self, options: &[&str]) -> Result {
        let volume = format!("{}:{SHARED}", self.shared("").display());
        let given = ["--annotation", "dev.rekindle/gpus=0", "--volume", &volume];
        let (until, progress) = (format!("{SHARED}/end"), format!("{SHARED}/progress"));
        let program =
            ["steady", "--until", &until, "--progress", &progress, "--ballast-kib", "3000", "--sleep-us", "2000"];
        self.podman.run(NAME, &[&given, options].concat(), &program)?;
        self.goes_on()
    }

    fn shared(&self, name: &str) -> PathBuf {
        self.here.path("shared").join(name)
    }

    /// Waits until the program is further than now.
    fn goes_on(&self) -> Result {
        let progress = || fs::read_to_string(self.shared("progress")).ok().and_then(|it| it.trim().parse::<u64>().ok());
        let before = progress().unwrap_or(0);
        until_true(&format!("progress beyond {before}"), || Ok(progress().is_some_and(|it| it > before)))
    }

    fn migrate(&self, more: &[&str]) -> Result<Output> {
        let words = self.arguments(&self.there.via()?, more)?;
        self.here.rekindle(&words.iter().map(OsStr::new).collect::<Vec<_>>())
    }

    fn migrate_back(&self) -> Result<Output> {
        let words = self.arguments(&self.server.via()?, &[])?;
        self.there.rekindle(&words.iter().map(OsStr::new).collect::<Vec<_>>())
    }

    fn arguments(&self, via: &str, more: &[&str]) -> Result<Vec<String>> {
        let words = ["migrate", "--container", NAME, "there", "--json"];
        let words = words.iter().chain(more).map(|it| (*it).to_owned());
        Ok(words.chain(self.options(via)?).collect())
    }

    /// The options by which the other host is reached.
    fn options(&self, via: &str) -> Result<Vec<String>> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let options = [
            ("--via", via.to_owned()),
            ("--rekindle", text(&stage::program("rekindle")?)),
            ("--dir", text(&self.here.path("moves/out"))),
            ("--dir-there", text(&self.here.path("moves/in"))),
            ("--podman", text(&self.program)),
            ("--podman-there", text(&self.program)),
        ];
        Ok(options.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect())
    }

    /// What a podman says of the container: its state, or nothing.
    fn state(podman: &Podman) -> Result<String> {
        let filter = format!("name=^{NAME}$");
        let said = podman.call(&["ps", "--all", "--filter", &filter, "--format", "{{.State}}"])?;
        Ok(said.trim().to_owned())
    }

    /// Where the container is: it runs on exactly one host, goes on there, and the other host's podman does not know it.
    fn is_on_one(&self) -> Result<Place> {
        let states = [Self::state(&self.podman)?, Self::state(&self.podman_there)?];
        let place = match [states[0].as_str(), states[1].as_str()] {
            ["running", ""] => Place::Here,
            ["", "running"] => Place::There,
            _ => anyhow::bail!("here and there it is {states:?}"),
        };
        self.goes_on()?;
        Ok(place)
    }

    /// Ends the program, whose results were right all the time, and checks that nothing is left on either host.
    fn finish(self) -> Result {
        self.podman.call(&["update", "--restart", "no", NAME])?;
        fs::write(self.shared("end"), "")?;
        ensure!(self.podman.output(NAME)?.ends_with("steady ok\n"));
        self.leave()
    }

    fn leave(self) -> Result {
        let left = |path: PathBuf| fs::read_dir(path).map_or(0, Iterator::count);
        ensure!(left(PLACES.into()) == 0, "places are left");
        ensure!(left(self.here.path("moves/out")) == 0, "files are left here");
        drop((self.podman, self.podman_there, self.server));
        self.there.finish()?;
        self.here.finish()
    }
}

/// The report of a migration that has succeeded.
fn report(output: &Output) -> Result<Value> {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.code() == Some(0), "{} {out} {err}", output.status);
    Ok(serde_json::from_str(&out)?)
}

#[test]
fn a_container_moves_to_and_fro() -> Result {
    let hosts = Hosts::start()?;
    // podman would start a container anew that is killed.
    hosts.run(&["--restart", "always"])?;
    for _ in 0..2 * repetitions() {
        let said = report(&hosts.migrate(&[])?)?;
        assert_eq!((&said["moved"], &said["container"]), (&true.into(), &NAME.into()), "{said}");
        tells_the_pause(&said)?;
        // The image has a parent with the processes' numbers in the container.
        ensure!(said["unchanged"].as_u64().is_some_and(|it| it > 0), "{said}");
        assert_eq!(hosts.is_on_one()?, Place::There);
        report(&hosts.migrate_back()?)?;
        assert_eq!(hosts.is_on_one()?, Place::Here);
    }
    hosts.finish()
}

#[test]
fn a_container_that_has_moved_ends_as_it_would_have_here() -> Result {
    let hosts = Hosts::start()?;
    let contained = Contained::new(&hosts.here, "contained")?;
    let (volume, variable) = (format!("{}:{SHARED}", contained.shared().display()), contained.variable());
    let options = ["--annotation", "dev.rekindle/gpus=0", "--volume", &volume, "--env", &variable];
    hosts.podman.run(NAME, &options, &["/bin/sh", "-c", &Contained::command()])?;
    contained.goes_on()?;
    report(&hosts.migrate(&[])?)?;
    contained.finish()?;
    assert_eq!(hosts.podman_there.exit_code(NAME)?, 0);
    hosts.leave()
}

#[test]
fn a_container_stays_where_it_is_if_the_other_host_lacks_something() -> Result {
    let hosts = Hosts::start()?;
    // Each host has a folder of that name for itself.
    let data = "/dev/shm/data";
    fs::create_dir(data)?;
    let bind = format!("{data}:/data");
    hosts.podman.call(&["volume", "create", "kept"])?;
    hosts.run(&["--volume", "kept:/kept", "--volume", &bind])?;
    let refuses = |reason: &str| -> Result {
        let output = hosts.migrate(&[])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(3) && said.contains(reason), "{}: {said}", output.status);
        ensure!(Hosts::state(&hosts.podman)? == "running");
        hosts.goes_on()
    };
    refuses("its volume kept is not there")?;
    hosts.podman_there.call(&["volume", "create", "kept"])?;
    refuses("/dev/shm/data, which it has from the host, is not there")?;
    ensure!(hosts.there.inside("mkdir").arg(data).status()?.success());
    hosts.podman_there.call(&["tag", "rekindle-e2e", "other"])?;
    hosts.podman_there.call(&["untag", "other", "rekindle-e2e"])?;
    refuses("its image localhost/rekindle-e2e:latest is not there")?;
    hosts.podman_there.call(&["tag", "other", "rekindle-e2e"])?;
    hosts.podman_there.call(&["create", "--name", NAME, "rekindle-e2e", "/bin/sh"])?;
    refuses("there is a container of the name moves")?;
    hosts.podman_there.call(&["rm", NAME])?;
    report(&hosts.migrate(&[])?)?;
    assert_eq!(hosts.is_on_one()?, Place::There);
    report(&hosts.migrate_back()?)?;
    for podman in [&hosts.podman, &hosts.podman_there] {
        podman.call(&["rm", "--force", "--ignore", "--time", "0", NAME])?;
        podman.call(&["volume", "rm", "kept"])?;
    }
    fs::remove_dir(data)?;
    hosts.leave()
}

/// A podman that does something else when it has done this, and that is called `$podman`.
fn podman_that(hosts: &Hosts, name: &str, done: &str, does: &str) -> Result<String> {
    let path = hosts.here.path(name);
    let podman = hosts.program.display();
    let script =
        format!("#!/bin/bash\npodman='{podman}'\n$podman \"$@\" || exit\n[[ \"$*\" != {done}* ]] || {{ {does}; }}\n");
    stage::write_script(&path, &script)?;
    Ok(path.to_string_lossy().into_owned())
}

/// The last command of Rekindle's that a message names.
fn printed(said: &str) -> Result<&str> {
    let commands = said.split('`').skip(1).step_by(2).filter(|it| it.starts_with("rekindle migrate "));
    commands.last().with_context(|| format!("no command: {said}"))
}

impl Hosts {
    /// Moves the container with another podman, here or there as this option says.
    fn migrate_with(&self, option: &str, podman: &str) -> Result<(ExitStatus, String)> {
        let mut words = self.arguments(&self.there.via()?, &[])?;
        let at = words.iter().position(|it| it == option).context("no such option")?;
        words[at + 1] = podman.to_owned();
        self.say(&words)
    }

    /// Runs a command as a user does who has read it.
    fn run_printed(&self, command: &str) -> Result<(ExitStatus, String)> {
        let programs = stage::program("rekindle")?.parent().context("no folder")?.display().to_string();
        let path = format!("PATH={programs}:{}", std::env::var("PATH")?);
        self.say_by("/usr/bin/env", &[path, "/bin/sh".into(), "-c".into(), command.to_owned()])
    }

    /// The restart policy of the container, where it is.
    fn restart_policy(&self, place: Place) -> Result<String> {
        let podman = if place == Place::Here { &self.podman } else { &self.podman_there };
        let said = podman.call(&["inspect", "--format", "{{.HostConfig.RestartPolicy.Name}}", NAME])?;
        Ok(said.trim().to_owned())
    }

    /// Checks that the container stands still here, whatever signal it gets, and that nobody can work in it.
    fn stands_still_here(&self) -> Result {
        let pid = self.podman.pid(NAME)?;
        ensure!(Command::new("kill").args(["-CONT", &pid.to_string()]).status()?.success());
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let cgroup = cgroup.lines().find_map(|line| line.strip_prefix("0::/")).context("no cgroup")?.to_owned();
        let events = fs::read_to_string(Path::new("/sys/fs/cgroup").join(cgroup).join("cgroup.events"))?;
        ensure!(events.contains("frozen 1"), "{events}");
        ensure!(self.podman.call(&["exec", NAME, "/bin/true"]).is_err(), "podman works in it");
        Ok(())
    }
}

#[test]
fn a_container_that_stands_still_goes_on_when_podman_fails_or_the_command_is_killed() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&[])?;
    for (name, does, code) in [("fails.sh", "exit 1", Some(1)), ("kills.sh", "kill -KILL $PPID", None)] {
        let podman = podman_that(&hosts, name, "container\\ checkpoint", does)?;
        let (status, said) = hosts.migrate_with("--podman", &podman)?;
        ensure!(status.code() == code, "{status}: {said}");
        assert_eq!(hosts.is_on_one()?, Place::Here, "{name}");
    }
    // podman's own checkpoints are what they were.
    hosts.settle()?;
    hosts.podman.call(&["container", "checkpoint", NAME])?;
    hosts.podman.call(&["container", "restore", NAME])?;
    report(&hosts.migrate(&[])?)?;
    report(&hosts.migrate_back()?)?;
    hosts.finish()
}

#[test]
fn a_container_that_others_would_start_anew_is_refused() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&[
        "--label",
        "PODMAN_SYSTEMD_UNIT=job.service",
        "--health-cmd",
        "true",
        "--health-on-failure",
        "kill",
    ])?;
    let refuses = |reason: &str| -> Result {
        let (status, said) = hosts.say(&hosts.arguments(&hosts.there.via()?, &[])?)?;
        ensure!(status.code() == Some(3) && said.contains(reason), "{status}: {said}");
        ensure!(fs::read_dir(hosts.here.path("moves")).is_err(), "there are files");
        hosts.goes_on()
    };
    refuses("the systemd unit job.service runs it")?;
    hosts.podman.call(&["rm", "--force", "--time", "0", NAME])?;
    hosts.run(&["--health-cmd", "true", "--health-on-failure", "kill"])?;
    refuses("its health check ends it when it fails (--health-on-failure=kill)")?;
    hosts.podman.call(&["rm", "--force", "--time", "0", NAME])?;
    hosts.run(&["--health-cmd", "true", "--health-startup-cmd", "true", "--health-startup-retries", "2"])?;
    refuses("podman update --health-startup-retries 0 moves")?;
    hosts.podman.call(&["rm", "--force", "--time", "0", NAME])?;
    hosts.leave()
}

#[test]
fn another_daemon_of_the_host_leaves_a_container_that_stands_still() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&[])?;
    let other = Node::start()?;
    let rekindle = stage::program("rekindle")?;
    // A migration by the other daemon begins with what commands have left that were killed, and ends at once: nobody answers.
    let (rekindle, socket) = (rekindle.display(), other.socket().display());
    let heard = other.path("heard");
    let does = format!(
        "sleep 1000 & {rekindle} migrate --socket '{socket}' --criu /bin/true --via /bin/false $! there &> '{}'; kill $!; true",
        heard.display()
    );
    let podman = podman_that(&hosts, "other.sh", "container\\ checkpoint", &does)?;
    let (status, said) = hosts.migrate_with("--podman", &podman)?;
    ensure!(status.success(), "{status}: {said}");
    let heard = fs::read_to_string(heard)?;
    ensure!(heard.contains("uses a GPU through Rekindle"), "{heard}");
    assert_eq!(hosts.is_on_one()?, Place::There);
    other.finish()?;
    report(&hosts.migrate_back()?)?;
    hosts.finish()
}

#[test]
fn a_container_that_somebody_lets_go_on_stays() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&["--restart", "always"])?;
    let does = format!("kill -CONT $($podman inspect --format '{{{{.State.Pid}}}}' {NAME})");
    let podman = podman_that(&hosts, "continues.sh", "container\\ checkpoint", &does)?;
    let (status, said) = hosts.migrate_with("--podman", &podman)?;
    ensure!(!status.success() && said.contains("has run or ended since its dump"), "{status}: {said}");
    assert_eq!(hosts.is_on_one()?, Place::Here);
    assert_eq!(hosts.restart_policy(Place::Here)?, "always");
    report(&hosts.migrate(&[])?)?;
    report(&hosts.migrate_back()?)?;
    hosts.finish()
}

#[test]
fn a_migration_that_is_settled_late_or_twice_removes_no_container_that_runs() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&["--restart", "always"])?;
    // podman fails to remove the container, which stands still then.
    let podman = podman_that(&hosts, "keeps.sh", "ps", "exit 1")?;
    let (status, said) = hosts.migrate_with("--podman", &podman)?;
    ensure!(!status.success(), "{status}: {said}");
    assert_eq!(Hosts::state(&hosts.podman_there)?, "running");
    hosts.stands_still_here()?;
    let migrations: Vec<_> = fs::read_dir(PLACES)?.flatten().collect();
    let [migration] = &migrations[..] else { anyhow::bail!("{migrations:?}") };
    let migration = migration.file_name().to_string_lossy().into_owned();
    // As somebody does who has read what podman says.
    hosts.podman.call(&["rm", "--force", "--time", "0", NAME])?;
    report(&hosts.migrate_back()?)?;
    assert_eq!(hosts.is_on_one()?, Place::Here);
    let pid = hosts.podman.pid(NAME)?;
    let words = ["migrate", "--settle", &migration, "there"].map(str::to_owned);
    let words: Vec<_> = words.into_iter().chain(hosts.options(&hosts.there.via()?)?).collect();
    let note = Path::new(PLACES).join(&migration).join("container");
    let noted = fs::read_to_string(&note)?.replace("keeps.sh", "podman.sh");
    fs::write(&note, noted)?;
    for _ in 0..2 {
        let (status, said) = hosts.say(&words)?;
        ensure!(status.success(), "{status}: {said}");
        assert_eq!((hosts.is_on_one()?, hosts.podman.pid(NAME)?), (Place::Here, pid));
    }
    hosts.finish()
}

#[test]
fn what_is_printed_of_a_container_that_was_lost_as_it_was_let_run_restores_it() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&["--restart", "always"])?;
    let once = hosts.here.path("once");
    let does = format!(
        "mkdir '{}' 2>/dev/null && {{ $podman update --restart no {NAME}; $podman kill {NAME}; $podman wait {NAME}; exit 1; }} >&2",
        once.display()
    );
    let podman = podman_that(&hosts, "loses.sh", "container\\ restore", &format!("{does} || true"))?;
    let (status, said) = hosts.migrate_with("--podman-there", &podman)?;
    ensure!(!status.success(), "{status}: {said}");
    hosts.stands_still_here()?;
    // To settle it in the ordinary way does nothing, and prints the same.
    let again = printed(&said)?.to_owned();
    let ordinary = again.replace(" --again", "");
    ensure!(again != ordinary, "{said}");
    let (status, said) = hosts.run_printed(&ordinary)?;
    ensure!(!status.success() && printed(&said)? == again, "{status}: {said}");
    hosts.stands_still_here()?;
    let (status, said) = hosts.run_printed(&again)?;
    ensure!(status.success(), "{status}: {said}");
    assert_eq!(hosts.is_on_one()?, Place::There);
    // A second time it changes nothing.
    let (status, said) = hosts.run_printed(&again)?;
    ensure!(status.success(), "{status}: {said}");
    assert_eq!(hosts.is_on_one()?, Place::There);
    assert_eq!(hosts.restart_policy(Place::There)?, "always");
    report(&hosts.migrate_back()?)?;
    hosts.finish()
}

#[test]
fn a_container_in_which_others_work_is_refused_and_stays() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&[])?;
    let works = ["exec", "--detach", NAME, "/bin/sleep", "1000"];
    let refuses = |podman: &str| -> Result {
        let (status, said) = hosts.migrate_with("--podman", podman)?;
        ensure!(status.code() == Some(3) && said.contains("do not descend from its first one"), "{status}: {said}");
        assert_eq!(hosts.is_on_one()?, Place::Here);
        let strangers = said.split("that would be lost (").nth(1).and_then(|it| it.split(')').next());
        let strangers = strangers.with_context(|| format!("no processes: {said}"))?.replace(',', "");
        ensure!(Command::new("kill").arg("-KILL").args(strangers.split(' ')).status()?.success());
        Ok(())
    };
    hosts.podman.call(&works)?;
    refuses(&hosts.program.to_string_lossy())?;
    // Somebody comes in when the dump has ended.
    let does = format!("$podman {} >/dev/null", works.join(" "));
    refuses(&podman_that(&hosts, "enters.sh", "container\\ checkpoint", &does)?)?;
    until("the container is alone", || {
        let output = hosts.migrate(&[])?;
        if output.status.code() == Some(3) { Ok(None) } else { report(&output).map(Some) }
    })?;
    report(&hosts.migrate_back()?)?;
    hosts.finish()
}

#[test]
fn a_container_goes_on_here_if_the_other_host_is_lost_for_good() -> Result {
    let hosts = Hosts::start()?;
    hosts.run(&["--restart", "always"])?;
    // The other host answers as long as there is no such file.
    let lost = hosts.here.path("lost");
    let reach = hosts.here.path("reach.sh");
    let script = format!("#!/bin/sh\n[ ! -e '{}' ] || exit 1\nexec {} \"$@\"\n", lost.display(), hosts.there.via()?);
    stage::write_script(&reach, &script)?;
    let plan = hosts.here.path("plan");
    let receiver = hosts.kill(Victim::Receiver)?;
    fs::write(&plan, format!("before \"Own\" touch '{}'; {receiver}", lost.display()))?;
    let via = format!("{} {} {}", stage::helper("relay")?.display(), plan.display(), reach.display());
    let (status, said) = hosts.say(&hosts.arguments(&via, &["--pause-ms", "600000"])?)?;
    ensure!(!status.success() && fs::read_to_string(&plan)?.starts_with("over"), "{status}: {said}");
    hosts.stands_still_here()?;
    let command = said.split('`').find(|it| it.contains("--keep")).with_context(|| format!("no command: {said}"))?;
    let (status, answer) = hosts.run_printed(command)?;
    ensure!(status.success(), "{status}: {answer}");
    hosts.goes_on()?;
    // A second time nothing stands still.
    let (status, answer) = hosts.run_printed(command)?;
    ensure!(status.code() == Some(3) && answer.contains("nothing stands still here"), "{status}: {answer}");
    assert_eq!(hosts.restart_policy(Place::Here)?, "always");
    // It was not lost after all: what is there is removed, and never runs.
    fs::remove_file(&lost)?;
    hosts.settle()?;
    assert_eq!(hosts.is_on_one()?, Place::Here);
    report(&hosts.migrate(&[])?)?;
    report(&hosts.migrate_back()?)?;
    hosts.finish()
}

/// What ends, at a moment of the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Connection,
    Command,
    DaemonHere,
    Receiver,
    PodmanThere,
    CriuThere,
    DaemonThere,
}

const VICTIMS: [Victim; 7] = [
    Victim::Connection,
    Victim::Command,
    Victim::DaemonHere,
    Victim::Receiver,
    Victim::PodmanThere,
    Victim::CriuThere,
    Victim::DaemonThere,
];

/// The messages (`cli/src/migrate/talk.rs`) before and after which that happens.
const MESSAGES: [&str; 6] = ["\"0\"", "\"archive\"", "{\"Restore\"", "\"Held\"", "\"Own\"", "\"Running\""];

impl Hosts {
    /// The shell command that ends a part.
    fn kill(&self, victim: Victim) -> Result<String> {
        let rekindle = stage::program("rekindle")?;
        let (rekindle, into) = (rekindle.display(), self.here.path("moves/in"));
        Ok(match victim {
            Victim::Connection => "cut".to_owned(),
            Victim::Command => format!("pkill -KILL -f '^{rekindle} migrate --container {NAME}'"),
            Victim::DaemonHere => format!("kill -KILL {}", self.here.daemon_pid()?),
            Victim::Receiver => format!("pkill -KILL -f '^{rekindle} migrate --receive --dir {}'", into.display()),
            Victim::PodmanThere => format!("pkill -KILL -f '^podman .*container restore .*{}'", into.display()),
            Victim::CriuThere => "pkill -KILL -f '^criu swrk'".to_owned(),
            Victim::DaemonThere => format!("kill -KILL {}", self.there.node().daemon_pid()?),
        })
    }

    /// Starts daemons again that were killed.
    fn heal(&mut self) -> Result {
        for node in [&mut self.here, self.there.node_mut()] {
            if !process_runs(node.daemon_pid()?) {
                node.kill_daemon()?;
                node.start_daemon(&[])?;
            }
        }
        Ok(())
    }

    /// Settles what migrations have left on either host, until nobody waits for anything.
    fn settle(&self) -> Result {
        until_true("nobody waits for a migration to be settled", || {
            let names = |dir: &Path| {
                let entries = fs::read_dir(dir).into_iter().flatten().flatten();
                entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
            };
            let into = self.here.path("moves/in");
            let mut left = names(&into);
            // What runs has a file of that name, and what has not all images is of no use to anybody.
            left.retain(|it| into.join(it).join("restore").exists());
            left.extend(names(Path::new(PLACES)));
            left.sort_unstable();
            left.dedup();
            for name in &left {
                let words = ["migrate", "--settle", name, "there"].map(str::to_owned);
                let mut words: Vec<_> = words.into_iter().chain(self.options(&self.there.via()?)?).collect();
                let (status, said) = self.say(&words)?;
                eprintln!("settled: {status} {said}");
                // Its podman was killed when CRIU was through: somebody does what the message says.
                if let Some(end) = said.split('`').find(|it| it.ends_with(" KILL")) {
                    let ended = self.there.inside("sh").args(["-c", end]).status()?;
                    words.push("--again".to_owned());
                    until_true("the container is restored again", || Ok(self.say(&words)?.0.success()))?;
                    eprintln!("`{end}`: {ended}");
                }
            }
            let there = self.there.processes().into_iter();
            let receivers = there.filter(|it| process::command_line(*it).contains("--receive"));
            Ok(left.is_empty() && receivers.count() == 0)
        })
    }

    /// Runs `rekindle` here. What it says goes to a file: a connection may outlive it, and a pipe's end with it.
    fn say(&self, words: &[String]) -> Result<(ExitStatus, String)> {
        self.say_by(stage::program("rekindle")?, words)
    }

    fn say_by(&self, program: impl AsRef<Path>, words: &[String]) -> Result<(ExitStatus, String)> {
        let said = self.here.path("said");
        let mut command = self.here.command(program.as_ref())?;
        let status = command.args(words).stdout(Stdio::null()).stderr(fs::File::create(&said)?).status()?;
        Ok((status, fs::read_to_string(said)?))
    }

    /// Moves the container, over connections to which this happens (`tests/e2e/src/bin/relay.rs`), finds it on exactly one host, and
    /// brings it back. Returns the bytes that have passed.
    fn migrate_while(&mut self, happens: &str) -> Result<u64> {
        let plan = self.here.path("plan");
        let passed = plan.with_extension("passed");
        fs::write(&plan, happens)?;
        fs::write(&passed, "0")?;
        let via = format!("{} {} {}", stage::helper("relay")?.display(), plan.display(), self.there.via()?);
        // One round: the conversation is always the same.
        let (status, said) = self.say(&self.arguments(&via, &["--pause-ms", "600000"])?)?;
        let case = format!("{happens}: {status}");
        until_true("it has happened", || Ok(fs::read_to_string(&plan)?.starts_with("over")))
            .with_context(|| case.clone())?;
        self.heal()?;
        if let Ok(command) = printed(&said) {
            let (status, answer) = self.run_printed(command)?;
            eprintln!("as printed, `{command}`: {status} {answer}");
        }
        self.settle()?;
        let place = self.is_on_one().with_context(|| format!("{case} {said}"))?;
        ensure!(self.restart_policy(place)? == "always", "{case}: it would not be started anew");
        eprintln!("{case}, and it is {place:?}: {said}");
        ensure!(!status.success() || place == Place::There, "{case}: it has moved, and is here");
        if place == Place::There {
            until("a daemon that has just started knows the container", || {
                let output = self.migrate_back()?;
                // Refused: 3.
                if output.status.code() == Some(3) { Ok(None) } else { report(&output).map(Some) }
            })?;
        } else {
            self.here.client(self.podman.pid(NAME)?)?;
        }
        self.here.wait_for_spare()?;
        Ok(fs::read_to_string(passed)?.trim().parse()?)
    }
}

/// Whether a process exists and has not ended.
fn process_runs(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|it| it.starts_with("State:") && !it.contains("zombie") && !it.contains("dead"))
}

#[test]
fn whatever_ends_at_whatever_moment_the_container_goes_on_on_exactly_one_host() -> Result {
    let moments: Vec<_> =
        ["before", "after"].iter().flat_map(|when| MESSAGES.map(|message| (*when, message))).collect();
    let all: Vec<_> = VICTIMS
        .into_iter()
        .flat_map(|victim| moments.iter().map(move |(when, message)| ((victim, *when), (*when, *message))))
        .collect();
    let mut hosts = Hosts::start()?;
    hosts.run(&["--restart", "always"])?;
    // A process has the other victims, too: `migrate.rs` tries each of those at every message.
    let (podmans, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|((victim, _), _)| *victim == Victim::PodmanThere);
    let mut cases = pairs::few(&others, |(ends, moment)| [ends, moment]);
    cases.extend(pairs::cases(&podmans, |(ends, moment)| [ends, moment]));
    for ((victim, when), (_, message)) in cases {
        let action = hosts.kill(victim)?;
        hosts.migrate_while(&format!("{when} {message} {action}"))?;
    }
    hosts.finish()
}

#[test]
fn a_connection_that_is_cut_at_any_moment_leaves_one_container() -> Result {
    let mut random = Random::new();
    let mut hosts = Hosts::start()?;
    hosts.run(&["--restart", "always"])?;
    let all = hosts.migrate_while("at 0 true")?;
    for _ in 0..2 * repetitions() {
        // Few bytes pass before the last ones, since content differs from time to time.
        hosts.migrate_while(&format!("at {} cut", random.below(all * 9 / 10)))?;
    }
    hosts.finish()
}
