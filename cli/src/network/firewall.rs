//! Rules that keep packets of connections from processes that are not there yet, and the removal of those that a killed CRIU has left.
//!
//! CRIU unlocks the connections of a tree that it leaves running. So they are locked anew before a restore: the kernel would answer a
//! packet of a connection whose socket is not there yet by a reset, which ends it. CRIU's own packets have its mark.

use super::connection::Connection;
use super::tools::{has, nft, run, said};
use crate::failure::Failure;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

/// The mark of packets that CRIU sends itself (`SOCCR_MARK`).
pub(super) const MARK: &str = "0xc114";
/// The beginning of the names of CRIU's tables.
const OF_CRIU: &str = "CRIU-";

/// Which program knows the kernel's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tool {
    Nft,
    Iptables,
}

/// Connections that are locked until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    tool: Tool,
    name: String,
    connections: Vec<Connection>,
}

impl Locked {
    /// Locks connections. Rules of this name that were left are replaced.
    pub(crate) fn new(name: &str, connections: &[Connection]) -> Result<Self, Failure> {
        let tool = if has("nft") { Tool::Nft } else { Tool::Iptables };
        let locked = Self { tool, name: name.to_owned(), connections: connections.to_vec() };
        match tool {
            Tool::Nft => nft(&table(name, connections))?,
            Tool::Iptables => {
                // What was left of an earlier one.
                while locked.rules("-D").is_ok() {}
                locked.rules("-I")?;
            }
        }
        Ok(locked)
    }

    /// Adds or removes a rule for each direction of each connection.
    fn rules(&self, action: &str) -> Result<(), Failure> {
        for it in &self.connections {
            for (chain, from, to) in [("INPUT", it.other, it.own), ("OUTPUT", it.own, it.other)] {
                let program = if from.is_ipv4() { "iptables" } else { "ip6tables" };
                let mut words = vec!["-w", action, chain].into_iter().map(str::to_owned).collect::<Vec<_>>();
                words.extend(["-s".into(), from.ip().to_string(), "-d".into(), to.ip().to_string()]);
                words.extend(["-p".into(), "tcp".into(), "--sport".into(), from.port().to_string()]);
                words.extend(["--dport".into(), to.port().to_string()]);
                words.extend(["-m", "mark", "!", "--mark", MARK, "-j", "DROP"].map(str::to_owned));
                run(program, &words, None)?;
            }
        }
        Ok(())
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let unlocked = match self.tool {
            Tool::Nft => nft(&format!("delete table inet {}\n", self.name)),
            Tool::Iptables => self.rules("-D"),
        };
        if let Err(failure) = unlocked {
            eprintln!("rekindle: connections stay locked: {failure}");
        }
    }
}

/// The option by which CRIU locks in a way that can be undone if it is killed.
pub(crate) fn option() -> Option<&'static str> {
    has("nft").then_some("--network-lock=nftables")
}

/// Removes the rules of a CRIU that was killed, as far as they lock one of these connections.
pub(crate) fn remove_those_of_criu(connections: &[Connection]) {
    if has("nft") {
        for name in tables(&said("nft", &["list", "tables"])) {
            if locks(&said("nft", &["list", "table", "inet", &name]), connections) {
                // Another may have removed it.
                let _ = nft(&format!("delete table inet {name}\n"));
            }
        }
    }
    for program in ["iptables", "ip6tables"] {
        for rule in said(&format!("{program}-save"), &["-t", "filter"]).lines().filter_map(|it| rule(it, connections)) {
            let _ = run(program, &rule, None);
        }
    }
}

/// Removes the tables of a CRIU that has ended and that lock connections of an address which this host does not have.
pub(crate) fn remove_those_of_criu_at(address: IpAddr) {
    for name in tables(&said("nft", &["list", "tables"])) {
        if names(&said("nft", &["list", "table", "inet", &name]), &format!("{address} . ")) {
            // Another may have removed it.
            let _ = nft(&format!("delete table inet {name}\n"));
        }
    }
}

/// A table that drops all packets of connections but CRIU's.
fn table(name: &str, connections: &[Connection]) -> String {
    // A table is made before it is deleted, so that it may be missing.
    let mut text = format!("add table inet {name}\ndelete table inet {name}\nadd table inet {name}\n");
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

/// The names of CRIU's tables, among all.
fn tables(said: &str) -> Vec<String> {
    let names = said.lines().filter_map(|it| it.trim().strip_prefix("table inet "));
    names.filter(|it| it.starts_with(OF_CRIU)).map(str::to_owned).collect()
}

/// Whether a table of CRIU's locks one of these connections: it has sets of addresses with ports.
fn locks(table: &str, connections: &[Connection]) -> bool {
    let has = |it: &SocketAddr| names(table, &format!("{} . {}", it.ip(), it.port()));
    connections.iter().any(|it| has(&it.own) || has(&it.other))
}

/// Whether a set of a table has an element that begins with this: an address and perhaps a port.
fn names(table: &str, beginning: &str) -> bool {
    let flat: String = table.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    flat.match_indices(beginning).any(|(at, _)| {
        let next = flat[at + beginning.len()..].chars().next();
        let before = flat[..at].chars().next_back();
        let is_whole = beginning.ends_with(' ') || next.is_none_or(|it| !it.is_ascii_digit());
        is_whole && before.is_none_or(|it| !it.is_ascii_hexdigit() && it != '.' && it != ':')
    })
}

/// The words that remove a rule of CRIU's for one of these connections.
fn rule(line: &str, connections: &[Connection]) -> Option<Vec<String>> {
    let words: Vec<_> = line.split_ascii_whitespace().collect();
    let value = |name: &str| words.iter().position(|it| *it == name).and_then(|at| words.get(at + 1)).copied();
    let end = |ip: &str, port: &str| -> Option<SocketAddr> {
        let ip = value(ip)?.split('/').next()?.parse().ok()?;
        Some(SocketAddr::new(ip, value(port)?.parse().ok()?))
    };
    let found = Connection { own: end("-s", "--sport")?, other: end("-d", "--dport")? };
    let is_ours = connections.iter().any(|it| [*it, it.turned()].contains(&found));
    if words.first() != Some(&"-A") || value("--mark")? != MARK || !is_ours {
        return None;
    }
    Some(["-w", "-D"].into_iter().chain(words.into_iter().skip(1)).map(str::to_owned).collect())
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
    fn tables_of_a_killed_criu_are_told_from_others() {
        assert_eq!(tables("table inet filter\ntable inet CRIU-12\ntable ip CRIU-13\n"), ["CRIU-12"]);
        let table = "table inet CRIU-12 {\n set conn {\n type ipv4_addr . inet_service\n elements = { 10.0.0.1 . 5000,\n 10.0.0.2 . 6000 }\n";
        assert!(locks(table, &[connection()]));
        let others = [("10.0.0.1:500", "10.0.0.2:600"), ("0.0.0.1:5000", "0.0.0.2:6000")];
        for (own, other) in others {
            let other = Connection { own: own.parse().unwrap(), other: other.parse().unwrap() };
            assert!(!locks(table, &[other]), "{other:?}");
        }
        assert!(names(table, "10.0.0.1 . ") && !names(table, "0.0.0.1 . ") && !names(table, "10.0.0.11 . "));
        let six = "elements = { fd00::3 . 35936 . fd00::9 . 7500 }";
        assert!(names(six, "fd00::9 . ") && !names(six, "::9 . ") && !names(six, "fd00::93 . "));
    }

    #[test]
    fn rules_of_a_killed_criu_are_told_from_others() {
        let line = "-A INPUT -s 10.0.0.2/32 -d 10.0.0.1/32 -p tcp -m mark ! --mark 0xc114 -m tcp --sport 6000 --dport 5000 -j DROP";
        let found = rule(line, &[connection()]).unwrap();
        assert_eq!(found[..4], ["-w", "-D", "INPUT", "-s"]);
        assert_eq!(rule(line, &[]), None);
        assert_eq!(rule(&line.replace("0xc114", "0x1"), &[connection()]), None);
        assert_eq!(rule(&line.replace("6000", "6001"), &[connection()]), None);
        assert_eq!(rule("-A INPUT -j CRIU", &[connection()]), None);
    }
}
