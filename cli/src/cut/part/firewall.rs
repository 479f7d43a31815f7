//! Rules that keep packets of connections from processes that are not there yet.
//!
//! CRIU unlocks the connections of a tree that it leaves running. So they are locked anew before a restore: the kernel would answer a
//! packet of a connection whose socket is not there yet by a reset, which ends it. CRIU's own packets have its mark.

use std::fmt::Write as _;
use std::net::SocketAddr;

use super::place;
use crate::failure::Failure;
use crate::network::connection::Connection;
use crate::network::firewall::{MARK, deleted, tables};
use crate::network::tools::{has, nft, run, said};
use crate::output;

/// The beginning of the names of the tables of restores. The name of the part follows.
const OWN: &str = "rekindle-cut-";

/// Which program knows the kernel's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    Nft,
    Iptables,
}

/// Connections that are locked until this is unlocked or dropped.
#[derive(Debug)]
pub(super) struct Locked {
    tool: Tool,
    name: String,
    connections: Vec<Connection>,
    is_locked: bool,
}

impl Locked {
    /// Locks the connections of a part of a cut. What restores have left that were killed is removed.
    pub(super) fn new(cut: &str, index: usize, connections: &[Connection]) -> Result<Self, Failure> {
        let name = name(cut, index);
        if connections.is_empty() {
            return Ok(Self { tool: tool(), name, connections: Vec::new(), is_locked: false });
        }
        remove_those_left(connections)?;
        let locked = Self { tool: tool(), name, connections: connections.to_vec(), is_locked: true };
        match locked.tool {
            Tool::Nft => nft(&table(&locked.name, connections))?,
            Tool::Iptables => rules(connections).iter().try_for_each(|it| it.run("-I"))?,
        }
        Ok(locked)
    }

    /// Unlocks them. An error means that nobody may hear anybody.
    pub(super) fn unlock(mut self) -> Result<(), Failure> {
        self.unlocks()
    }

    fn unlocks(&mut self) -> Result<(), Failure> {
        if !std::mem::take(&mut self.is_locked) {
            return Ok(());
        }
        match self.tool {
            Tool::Nft => nft(&deleted(&self.name)),
            // All of them, whatever becomes of one.
            Tool::Iptables => {
                let removed: Vec<_> = rules(&self.connections).iter().map(|it| it.run("-D")).collect();
                removed.into_iter().collect()
            }
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if let Err(failure) = self.unlocks() {
            output::warn(format_args!("connections stay locked: {failure}"));
        }
    }
}

/// Removes what restores have left that were killed. Tables have the names of their parts, and rules the addresses of connections.
pub(super) fn remove_those_left(connections: &[Connection]) -> Result<(), Failure> {
    if tool() == Tool::Nft {
        for table in tables(&said("nft", &["list", "tables"])?, OWN) {
            if !is_in_use(&table) {
                nft(&deleted(&table))?;
            }
        }
        return Ok(());
    }
    // Each as often as it is there.
    rules(connections).iter().for_each(|it| while it.run("-D").is_ok() {});
    Ok(())
}

/// The name of a part's table.
fn name(cut: &str, index: usize) -> String {
    format!("{OWN}{cut}-{index}")
}

/// Whether a process takes part in the cut whose part has this table.
fn is_in_use(table: &str) -> bool {
    let part = table.strip_prefix(OWN).and_then(|it| it.rsplit_once('-'));
    part.is_some_and(|(cut, index)| index.parse().is_ok_and(|index| place::is_in_use(cut, index)))
}

/// A rule of iptables.
struct Rule {
    program: &'static str,
    chain: &'static str,
    words: Vec<String>,
}

impl Rule {
    /// Adds or removes it.
    fn run(&self, action: &str) -> Result<(), Failure> {
        let mut words = ["-w", action, self.chain].map(str::to_owned).to_vec();
        words.extend(self.words.iter().cloned());
        run(self.program, &words, None)
    }
}

/// A rule for each direction of each connection.
fn rules(connections: &[Connection]) -> Vec<Rule> {
    let directions = |it: &Connection| [("INPUT", it.other, it.own), ("OUTPUT", it.own, it.other)];
    let rule = |(chain, from, to): (&'static str, SocketAddr, SocketAddr)| {
        let program = if from.is_ipv4() { "iptables" } else { "ip6tables" };
        let mut words = vec!["-s".to_owned(), from.ip().to_string(), "-d".into(), to.ip().to_string()];
        words.extend(["-p".into(), "tcp".into(), "--sport".into(), from.port().to_string()]);
        words.extend(["--dport".into(), to.port().to_string()]);
        words.extend(["-m", "mark", "!", "--mark", MARK, "-j", "DROP"].map(str::to_owned));
        Rule { program, chain, words }
    };
    connections.iter().flat_map(directions).map(rule).collect()
}

fn tool() -> Tool {
    if has("nft") { Tool::Nft } else { Tool::Iptables }
}

/// A table that drops all packets of connections but CRIU's.
fn table(name: &str, connections: &[Connection]) -> String {
    let mut text = format!("{}add table inet {name}\n", deleted(name));
    for hook in ["input", "output"] {
        let _ = writeln!(text, "add chain inet {name} {hook} {{ type filter hook {hook} priority 0; }}");
    }
    for it in connections {
        for (hook, from, to) in [("input", it.other, it.own), ("output", it.own, it.other)] {
            let ip = if from.is_ipv4() { "ip" } else { "ip6" };
            let _ = writeln!(
                text,
                "add rule inet {name} {hook} meta mark != {MARK} {ip} saddr {} tcp sport {} {ip} daddr {} tcp dport {} drop",
                from.ip(),
                from.port(),
                to.ip(),
                to.port()
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection() -> Connection {
        Connection { own: "10.0.0.1:5000".parse().unwrap(), other: "10.0.0.2:6000".parse().unwrap() }
    }

    #[test]
    fn packets_of_both_directions_are_dropped() {
        let text = table("x", &[connection()]);
        let rule = "add rule inet x input meta mark != 0xc114 ip saddr 10.0.0.2 tcp sport 6000 ip daddr 10.0.0.1 tcp dport 5000 drop";
        assert!(text.contains(rule), "{text}");
        assert_eq!(text.lines().filter(|it| it.starts_with("add rule")).count(), 2);
    }

    #[test]
    fn nothing_is_locked_of_a_tree_without_connections() {
        // Without any program.
        let locked = Locked::new("00", 0, &[]).unwrap();
        assert!(!locked.is_locked && rules(&[]).is_empty());
        locked.unlock().unwrap();
        assert_eq!(rules(&[connection()]).len(), 2);
        assert!(!is_in_use("rekindle-cut-00-1") && !is_in_use("rekindle-cut-"));
    }
}
