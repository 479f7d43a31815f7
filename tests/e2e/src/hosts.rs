//! Two hosts with a network between them, and a daemon on each.
//!
//! ```text
//!   here (Node)  198.51.100.1 ───────── 198.51.100.2  there (Elsewhere)
//!         ▲                                  ▲
//!         └── remote ◄── VIA, by $REKINDLE_HOST ──► remote ──┘      over a relay that fails, if a test says so
//! ```

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, ensure};

use crate::elsewhere::Server;
use crate::network::Network;
use crate::wait::until;
use crate::{Elsewhere, Node, Result, process, stage};

/// The names of the two hosts.
pub const HERE: &str = "here";
/// The other one.
pub const THERE: &str = "there";

/// Two hosts.
#[derive(Debug)]
pub struct Hosts {
    server: Server,
    /// This host.
    pub here: Node,
    /// The other one.
    pub there: Elsewhere,
    network: Network,
}

impl Hosts {
    /// Starts both.
    pub fn start() -> Result<Self> {
        Self::on(Network::new()?)
    }

    /// The same, with a third machine, which has clients.
    pub fn with_clients() -> Result<Self> {
        Self::on(Network::with_clients()?)
    }

    fn on(network: Network) -> Result<Self> {
        let here = Node::start()?;
        let there = Elsewhere::across(&here, &network)?;
        let server = Server::of(&here)?;
        let hosts = Self { server, here, there, network };
        let ways = [(HERE, hosts.server.via()?), (THERE, hosts.there.via()?)];
        let (relay, plan) = (stage::helper("relay")?, hosts.plan_file());
        let case = |(host, via)| format!("{host}) exec {} {} {via} \"$@\" ;;\n", relay.display(), plan.display());
        let cases: String = ways.into_iter().map(case).collect();
        stage::write_script(&hosts.here.path("via"), &format!("#!/bin/sh\ncase $REKINDLE_HOST in\n{cases}esac\n"))?;
        hosts.happens("")?;
        Ok(hosts)
    }

    /// The option `--via` of commands on either host that reach the other one.
    pub fn via(&self) -> PathBuf {
        self.here.path("via")
    }

    /// The network between them.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The file that says what is to happen still.
    pub fn plan_file(&self) -> PathBuf {
        self.here.path("plan")
    }

    /// The process whose children are the commands on a host.
    pub fn server(&self, host: &str) -> i32 {
        if host == HERE { self.server.pid() } else { self.there.server() }
    }

    /// What is to happen still.
    pub fn plan(&self) -> Result<String> {
        Ok(fs::read_to_string(self.plan_file())?)
    }

    /// What happens to the connections of the next commands (`tests/e2e/src/bin/relay.rs`).
    pub fn happens(&self, plan: &str) -> Result {
        Ok(fs::write(self.plan_file(), plan)?)
    }

    /// Whether that has happened.
    pub fn has_happened(&self) -> Result<bool> {
        Ok(self.plan()?.starts_with("over"))
    }

    /// Whether that has happened, and what it was to kill lived.
    pub fn has_succeeded(&self) -> Result<bool> {
        Ok(self.plan()? == "over")
    }

    /// The processes on both hosts that take part in a cut.
    pub fn take_part(&self) -> Vec<i32> {
        let own = process::tree(std::process::id() as i32);
        let dir = self.here.socket().to_string_lossy().into_owned();
        let is_ours = |pid: &i32| {
            let line = process::command_line(*pid);
            ["cut-part", "cut-guard", "cut-gate"].iter().any(|name| line.contains(name))
                && fs::read(format!("/proc/{pid}/environ")).is_ok_and(|it| String::from_utf8_lossy(&it).contains(&dir))
        };
        own.into_iter().chain(self.there.processes()).filter(is_ours).collect()
    }

    /// The tables of the kernel's firewall on both hosts that lock connections.
    pub fn locks(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for mut command in [Command::new("nft"), self.there.inside("nft")] {
            let output = command.args(["list", "tables"]).output()?;
            ensure!(output.status.success(), "nft: {}", String::from_utf8_lossy(&output.stderr));
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let lock = |it: &&str| it.contains(" CRIU-") || it.contains(" rekindle-cut-");
            found.extend(said.lines().filter(lock).map(str::to_owned));
        }
        Ok(found)
    }

    /// What those do that take part, and what CRIU says, for a test that does not end.
    fn what_goes_on(&self) -> String {
        let mut said = String::new();
        for pid in self.take_part() {
            let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let _ = writeln!(said, "{}: {}\n{}", process::command_line(pid), read("wchan"), read("stack"));
        }
        let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|it| it.path());
        let logs = entries(&self.here.path("")).flat_map(|it| entries(&it).collect::<Vec<_>>());
        for log in logs.flat_map(|it| ["dump.log", "restore.log"].map(|name| it.join(name))) {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let last: Vec<_> = text.lines().rev().take(20).collect();
            if !last.is_empty() {
                let _ = writeln!(said, "{}:\n{}", log.display(), last.into_iter().rev().collect::<Vec<_>>().join("\n"));
            }
        }
        said
    }

    /// Runs `rekindle cut` here, with connections to both hosts. Returns what it says: a connection may outlive it, and a pipe's end with
    /// it.
    pub fn cut(&self, words: &[&str]) -> Result<(ExitStatus, String, String)> {
        let (via, rekindle) = (self.here.path("via"), stage::program("rekindle")?);
        let (out, err) = (self.here.path("said.out"), self.here.path("said.err"));
        let mut command = self.here.command(&rekindle)?;
        command.arg("cut").args(words).arg("--via").arg(via).arg("--rekindle").arg(&rekindle);
        command.stdin(Stdio::null()).stdout(fs::File::create(&out)?).stderr(fs::File::create(&err)?);
        let mut child = command.spawn()?;
        let ended = until(&format!("rekindle cut {words:?} ends"), || Ok(child.try_wait()?));
        let status = ended.with_context(|| {
            let said = self.what_goes_on();
            let _ = child.kill();
            said
        })?;
        Ok((status, fs::read_to_string(out)?, fs::read_to_string(err)?))
    }

    /// Restores a cut, whatever comes of it. Linux 6.15 and later keep the numbers of threads for a moment after the process was waited for.
    pub fn restores(&self, dir: &Path) -> Result<(ExitStatus, String, String)> {
        until("the numbers of processes are free that were killed", || {
            let said = self.cut(&["restore", &dir.to_string_lossy()])?;
            let is_early = said.2.contains("File exists") || said.2.contains("thread: -17");
            // A plan that has been carried out is over.
            Ok((!is_early || self.has_happened()?).then_some(said))
        })
    }

    /// Ends the test, and checks that nothing is left on either host.
    pub fn finish(self) -> Result {
        drop(self.server);
        self.there.finish()?;
        self.here.finish()
    }

    /// Runs `rekindle` here.
    pub fn rekindle(&self, words: &[&str]) -> Result<std::process::Output> {
        self.here.rekindle(&words.iter().map(OsStr::new).collect::<Vec<_>>())
    }
}
