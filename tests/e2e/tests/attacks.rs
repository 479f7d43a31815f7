//! Hostile clients (`src/bin/attacker.rs`): only their own work may suffer. During and after each attack the result of
//! a well-behaved program is right. When the attacker has ended, the daemon's memory, descriptors, workers and clients
//! are the same as before.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, process, stage, until};
use rekindle_wire::control::{Reply, Request};

/// A program that makes many calls and runs for a short time.
const GOOD: (&str, [&str; 2]) = ("warps", ["--iterations", "5"]);
/// The amount by which the daemon's memory may grow during attacks, in KiB: memory that its allocators keep.
const SLACK_KIB: u64 = 16 << 10;

struct Enemy<'a> {
    node: &'a Node,
    expected: String,
    program: PathBuf,
    memory: u64,
}

impl<'a> Enemy<'a> {
    fn of(node: &'a Node) -> Result<Self> {
        // Any user can execute the program there.
        let program = node.path("attacker");
        stage::install(&stage::helper("attacker")?, &program)?;
        let expected = undisturbed(GOOD.0, &GOOD.1)?;
        let enemy = Self { node, expected, program, memory: 0 };
        // The memory that the daemon allocates for its first clients is no leak.
        enemy.others_are_well("at first")?;
        node.is_idle()?;
        let memory = resident(node.daemon_pid()?)?;
        Ok(Self { memory, ..enemy })
    }

    fn others_are_well(&self, when: &str) -> Result {
        let app = self.node.run_held(GOOD.0, &GOOD.1, None)?;
        let printed = app.finish().with_context(|| format!("a program {when}"))?;
        ensure!(printed == self.expected, "{when} a program printed {printed}");
        Ok(())
    }

    fn command(&self, attack: &[&str]) -> Result<Command> {
        let mut command = self.node.command(&self.program)?;
        command.args(attack).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    /// Runs an attack that ends by itself.
    fn attacks(&self, attack: &[&str]) -> Result {
        self.attacks_as(attack, self.command(attack)?)
    }

    fn attacks_as(&self, attack: &[&str], mut command: Command) -> Result {
        let what = attack.join(" ");
        let mut child = command.spawn()?;
        self.others_are_well(&format!("during {what}"))?;
        let status = until(&format!("{what} ends"), || Ok(child.try_wait()?))?;
        ensure!(status.success(), "{what} ended with {status}: {}", said(&mut child)?);
        self.is_over(&what)
    }

    /// Starts an attack that holds a resource until it is killed.
    fn holds(&self, attack: &[&str]) -> Result<Child> {
        let mut child = self.command(attack)?.spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        ensure!(line == "ready\n", "{attack:?}: {}", said(&mut child)?);
        self.others_are_well(&format!("beside {}", attack.join(" ")))?;
        Ok(child)
    }

    fn is_over(&self, what: &str) -> Result {
        self.node.is_idle().with_context(|| format!("after {what}"))?;
        self.others_are_well(&format!("after {what}"))?;
        // A thread's stack exists for a moment longer than the connection that the thread has served.
        let daemon = self.node.daemon_pid()?;
        let waited = until_true("the daemon gives memory back", || Ok(resident(daemon)? <= self.memory + SLACK_KIB));
        waited.with_context(|| format!("{what}: it had {} KiB, and now {:?}", self.memory, resident(daemon)))
    }
}

fn said(child: &mut Child) -> Result<String> {
    let mut text = String::new();
    child.stderr.take().context("no errors")?.read_to_string(&mut text)?;
    Ok(text)
}

/// The anonymous memory of a process in KiB. This excludes the host memory for copies, which the daemon maps while it
/// writes to it.
fn resident(pid: i32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("no RssAnon")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

#[test]
fn a_broken_handshake_is_its_makers_loss() -> Result {
    let node = Node::start()?;
    let enemy = Enemy::of(&node)?;
    for attack in ["files", "deaths", "words"] {
        enemy.attacks(&[attack])?;
    }
    let log = fs::read_to_string(node.path("daemon.log"))?;
    let long = "x".repeat(60_000);
    let reply = node.ask(&Request::Revoke { container: long })?;
    ensure!(matches!(reply, Reply::Failed(_)), "{reply:?}");
    let log = log + &fs::read_to_string(node.path("daemon.log"))?;
    ensure!(!log.contains("xxxxxxxx"), "the log says a name of any length");
    let forged = log.lines().find(|line| line.starts_with("FORGED") || line.contains('\u{1b}'));
    ensure!(forged.is_none(), "the log says what a client wrote: {forged:?}");
    node.finish()
}

#[test]
fn a_broken_ring_is_its_makers_loss() -> Result {
    let node = Node::start()?;
    let enemy = Enemy::of(&node)?;
    for seed in ["1", "2"] {
        for attack in ["indices", "commands", "changes"] {
            enemy.attacks(&[attack, seed])?;
        }
    }
    enemy.attacks(&["memory"])?;
    enemy.attacks(&["places"])?;
    node.finish()
}

#[test]
fn who_takes_much_leaves_enough_for_others() -> Result {
    let node = Node::start()?;
    let enemy = Enemy::of(&node)?;
    let mut silent = enemy.holds(&["silent", "1500"])?;
    silent.kill()?;
    silent.wait()?;
    enemy.is_over("silent connections")?;

    let mut many = enemy.holds(&["many", "12"])?;
    until("a process has one worker", || {
        // The three processes are the attacker, its worker and a worker of the pool.
        Ok((node.status()?.used == 1 && node.processes().len() == 3).then_some(()))
    })?;
    drop(many.stdin.take());
    ensure!(many.wait()?.success(), "{}", said(&mut many)?);
    enemy.is_over("many attaches")?;

    let mut forks = enemy.holds(&["forks"])?;
    forks.wait()?;
    enemy.others_are_well("beside children of a client that is gone")?;
    let sleeping = |pid: &i32| process::command_line(*pid).contains(": sleep");
    let children: Vec<_> = node.processes().into_iter().filter(sleeping).collect();
    ensure!(children.len() == 20, "{} children", children.len());
    process::kill_all(&children)?;
    enemy.is_over("children of a client that is gone")?;
    node.finish()
}

#[test]
fn other_users_and_containers_reach_nothing_of_others() -> Result {
    let node = Node::configured("socket_mode = \"0666\"\n", &[])?;
    let enemy = Enemy::of(&node)?;
    let victim = node.run_held("idle", &["--until", &node.path("never").display().to_string()], None)?;
    victim.reaches(1)?;
    let pid = victim.pid().to_string();
    let asks = ["asks", pid.as_str()];

    let run = |mut command: Command| -> Result {
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    let mut nobody = enemy.command(&asks)?;
    nobody.uid(65534).gid(65534);
    run(nobody)?;

    // The attacker runs as root, as in a container: in a pid namespace of its own, in which the victim does not exist.
    let mut root = Command::new("unshare");
    root.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(&enemy.program).args(asks);
    root.env("REKINDLE_SOCKET", node.socket());
    run(root)?;

    ensure!(node.client(victim.pid())?.state == "running", "the victim is not left alone");
    victim.kill()?;
    enemy.is_over("requests")?;
    node.finish()
}
