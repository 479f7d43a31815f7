//! Two hosts with a network between them, and a daemon on each.
//!
//! ```text
//!   here (Node)  198.51.100.1 ───────── 198.51.100.2  there (Elsewhere)
//!         ▲                                  ▲
//!         └── remote ◄── VIA, by $REKINDLE_HOST ──► remote ──┘      over a relay that fails, if a test says so
//! ```

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};

use crate::elsewhere::Server;
use crate::network::Network;
use crate::{Elsewhere, Node, Result, stage};

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

    fn plan_file(&self) -> PathBuf {
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
        Ok(self.plan()? == "over")
    }

    /// Runs `rekindle cut` here, with connections to both hosts. Returns what it says: a connection may outlive it, and a pipe's end with
    /// it.
    pub fn cut(&self, words: &[&str]) -> Result<(ExitStatus, String, String)> {
        let (via, rekindle) = (self.here.path("via"), stage::program("rekindle")?);
        let (out, err) = (self.here.path("said.out"), self.here.path("said.err"));
        let mut command = self.here.command(&rekindle)?;
        command.arg("cut").args(words).arg("--via").arg(via).arg("--rekindle").arg(&rekindle);
        command.stdin(Stdio::null()).stdout(fs::File::create(&out)?).stderr(fs::File::create(&err)?);
        let status = command.status()?;
        Ok((status, fs::read_to_string(out)?, fs::read_to_string(err)?))
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
