//! The rules by which CRIU locks connections, and the removal of those that it has left.
//!
//! CRIU drops all packets of the connections that it dumps, but its own, which have its mark. It removes the rules when it lets go of a tree
//! that it leaves running; not if it is killed, or kills the tree.

use std::net::{IpAddr, SocketAddr};

use super::connection::Connection;
use super::tools::{has, nft, run, said};
use crate::failure::Failure;

/// The mark of packets that CRIU sends itself (`SOCCR_MARK`).
pub(crate) const MARK: &str = "0xc114";
/// The beginning of the names of CRIU's tables.
const OF_CRIU: &str = "CRIU-";

/// The option by which CRIU locks in a way that can be undone if it is killed.
pub(crate) fn option() -> Option<&'static str> {
    has("nft").then_some("--network-lock=nftables")
}

/// Removes the rules of a CRIU that was killed, as far as they lock one of these connections.
pub(crate) fn remove_those_of_criu(connections: &[Connection]) -> Result<(), Failure> {
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

/// Removes the tables of a CRIU that has ended and that lock connections of an address which this host does not have.
pub(crate) fn remove_those_of_criu_at(address: IpAddr) {
    // Without nft CRIU has no tables.
    for name in tables(&said("nft", &["list", "tables"]).unwrap_or_default(), OF_CRIU) {
        let table = said("nft", &["list", "table", "inet", &name]).unwrap_or_default();
        if names(&table, &format!("{address} . ")) {
            // Another may have removed it.
            let _ = nft(&deleted(&name));
        }
    }
}

/// What removes a table, also if it is not there.
pub(crate) fn deleted(name: &str) -> String {
    // It is made first, so that it may be missing.
    format!("add table inet {name}\ndelete table inet {name}\n")
}

/// The names of tables that begin with this, among all.
pub(crate) fn tables(said: &str, beginning: &str) -> Vec<String> {
    let names = said.lines().filter_map(|it| it.trim().strip_prefix("table inet "));
    names.filter(|it| it.starts_with(beginning)).map(str::to_owned).collect()
}

/// Whether a table of CRIU's locks one of these connections: it has sets of both ends' addresses and ports, for each direction.
fn locks(table: &str, connections: &[Connection]) -> bool {
    let has = |Connection { own, other }: Connection| {
        names(table, &format!("{} . {} . {} . {}", own.ip(), own.port(), other.ip(), other.port()))
    };
    connections.iter().any(|it| has(*it) || has(it.turned()))
}

/// Whether a set of a table has an element that begins with this: an address, or both ends of a connection.
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
    fn tables_of_a_killed_criu_are_told_from_others() {
        let all = "table inet filter\ntable inet CRIU-12\ntable ip CRIU-13\ntable inet rekindle-cut-00-1\n";
        assert_eq!(tables(all, OF_CRIU), ["CRIU-12"]);
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
