//! Rules that keep packets of connections from processes that are not there yet, and the removal of those that a killed CRIU has left.
//!
//! CRIU unlocks the connections of a tree that it leaves running. So they are locked anew before a restore: the kernel would answer a
//! packet of a connection whose socket is not there yet by a reset, which ends it. CRIU's own packets have its mark.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};

use super::super::manifest::Connection;
use super::place;
use crate::failure::Failure;

/// The mark of packets that CRIU sends itself (`SOCCR_MARK`).
const MARK: &str = "0xc114";
/// The beginning of the names of CRIU's tables.
const OF_CRIU: &str = "CRIU-";
/// The beginning of the names of those of restores. The name of the part follows.
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
            eprintln!("rekindle: connections stay locked: {failure}");
        }
    }
}

/// The option by which CRIU locks in a way that can be undone if it is killed.
pub(super) fn option() -> Option<&'static str> {
    has("nft").then_some("--network-lock=nftables")
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

/// Removes the rules of a CRIU that was killed, as far as they lock one of these connections.
pub(super) fn remove_those_of_criu(connections: &[Connection]) -> Result<(), Failure> {
    let lock_some = |tables: Vec<String>| -> Result<Vec<String>, Failure> {
        let mut found = Vec::new();
        for name in tables {
            // Another may have removed it.
            let table = said("nft", &["list", "table", "inet", &name]).unwrap_or_default();
            if locks(&table, connections) {
                found.push(name);
            }
        }
        Ok(found)
    };
    if has("nft") {
        let all = || lock_some(tables(&said("nft", &["list", "tables"])?, OF_CRIU));
        let removed: Result<Vec<()>, Failure> = all()?.iter().map(|it| nft(&deleted(it))).collect();
        removed?;
    }
    for program in ["iptables", "ip6tables"] {
        let save = format!("{program}-save");
        // A kernel that has only nft's rules lists none.
        let listed = if has(&save) { said(&save, &["-t", "filter"]).unwrap_or_default() } else { String::new() };
        let removed: Vec<_> =
            listed.lines().filter_map(|it| rule(it, connections)).map(|it| run(program, &it, None)).collect();
        removed.into_iter().collect::<Result<(), Failure>>()?;
    }
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

/// What removes a table, also if it is not there.
fn deleted(name: &str) -> String {
    // It is made first, so that it may be missing.
    format!("add table inet {name}\ndelete table inet {name}\n")
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

/// The names of tables that begin with this, among all.
fn tables(said: &str, beginning: &str) -> Vec<String> {
    let names = said.lines().filter_map(|it| it.trim().strip_prefix("table inet "));
    names.filter(|it| it.starts_with(beginning)).map(str::to_owned).collect()
}

/// Whether a table of CRIU's locks one of these connections: it has sets of both ends' addresses and ports, for each direction.
fn locks(table: &str, connections: &[Connection]) -> bool {
    let flat: String = table.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    let has = |it: Connection| {
        let Connection { own, other } = it;
        let element = format!("{} . {} . {} . {}", own.ip(), own.port(), other.ip(), other.port());
        flat.match_indices(&element).any(|(at, _)| {
            let next = flat[at + element.len()..].chars().next();
            let before = flat[..at].chars().next_back();
            next.is_none_or(|it| !it.is_ascii_digit())
                && before.is_none_or(|it| !it.is_ascii_hexdigit() && it != '.' && it != ':')
        })
    };
    connections.iter().any(|it| has(*it) || has(it.turned()))
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

fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let also = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(Into::into);
    std::env::split_paths(&path).chain(also).any(|it| it.join(program).is_file())
}

fn nft(commands: &str) -> Result<(), Failure> {
    run("nft", &["-f".to_owned(), "-".to_owned()], Some(commands))
}

/// Runs a program of the network's administration.
fn run(program: &str, words: &[String], input: Option<&str>) -> Result<(), Failure> {
    let done = || -> anyhow::Result<std::process::Output> {
        let mut child = command(program).args(words).spawn()?;
        if let (Some(mut to), Some(input)) = (child.stdin.take(), input) {
            to.write_all(input.as_bytes())?;
        }
        Ok(child.wait_with_output()?)
    };
    let output = done().with_context(|| format!("cannot run {program}, which keeps packets from sockets"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(anyhow!("{program}: {}", said.lines().next().unwrap_or("it has failed")).into())
}

/// What a program prints.
fn said(program: &str, words: &[&str]) -> Result<String, Failure> {
    let output = command(program).args(words).output().with_context(|| format!("cannot run {program}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(anyhow!("{program} {}: {}", words.join(" "), said.lines().next().unwrap_or("it has failed")).into())
}

fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin:/usr/local/sbin"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
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
        let all = "table inet filter\ntable inet CRIU-12\ntable ip CRIU-13\ntable inet rekindle-cut-00-1\n";
        assert_eq!(
            (tables(all, OF_CRIU), tables(all, OWN)),
            (vec!["CRIU-12".to_owned()], vec!["rekindle-cut-00-1".to_owned()])
        );
        // As nft 1.1 shows one of CRIU 4.2.
        let table = "table inet CRIU-12 {\n\tset conns4 {\n\t\ttype ipv4_addr . inet_service . ipv4_addr . inet_service\n\
             \t\telements = { 10.0.0.2 . 6000 . 10.0.0.1 . 5000,\n\t\t\t     10.0.0.1 . 5000 . 10.0.0.2 . 6000 }\n\t}\n\n\
             \tset conns6 {\n\t\ttype ipv6_addr . inet_service . ipv6_addr . inet_service\n\
             \t\telements = { fe80::1 . 22 . fe80::2 . 6000 }\n\t}\n}\n";
        let of = |(own, other): (&str, &str)| Connection { own: own.parse().unwrap(), other: other.parse().unwrap() };
        let six = of(("[fe80::2]:6000", "[fe80::1]:22"));
        assert!(locks(table, &[connection()]) && locks(table, &[connection().turned()]) && locks(table, &[six]));
        let others = [
            ("10.0.0.1:500", "10.0.0.2:600"),
            ("0.0.0.1:5000", "0.0.0.2:6000"),
            ("10.0.0.1:5000", "10.0.0.2:600"),
            // One end of it, with another one.
            ("10.0.0.1:5000", "10.0.0.2:6001"),
            ("10.0.0.3:5000", "10.0.0.2:6000"),
            ("[80::1]:22", "[fe80::2]:6000"),
        ];
        for other in others.map(of) {
            assert!(!locks(table, &[other]), "{other:?}");
        }
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
