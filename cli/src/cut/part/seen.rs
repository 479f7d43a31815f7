//! What can be seen of the connections of a tree from its host: `between.rs` compares what the hosts have seen.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Context;

use super::super::talk::Seen;
use crate::failure::Failure;
use crate::network::sockets::{self, NOBODY};

/// The states, in `/proc/net/tcp`, in which a socket that was closed has to say something still: FIN_WAIT1, LAST_ACK and CLOSING.
const CLOSES: [&str; 3] = ["04", "09", "0B"];
/// Those of a connection that waits to be accepted: SYN_RECV, ESTABLISHED, and CLOSE_WAIT if the other end has closed it.
const WAITS: [&str; 3] = ["01", "03", "08"];

/// The connections of these processes, those that wait to be accepted by them, and those on this host that are being closed.
pub(super) fn seen(pids: &[i32]) -> Result<Seen, Failure> {
    let Some(pid) = pids.first() else { return Ok(Seen::default()) };
    let mut own = sockets::sockets(pids);
    let lines = sockets::lines(*pid)?;
    // What was accepted meanwhile.
    own.extend(sockets::sockets(pids));
    let (ports, mut seen) = (sockets::ports(&lines, &own), Seen::default());
    for line in &lines {
        let Some((inode, connection)) = sockets::row(line) else { continue };
        let is = |states: &[&str]| line.split_ascii_whitespace().nth(3).is_some_and(|it| states.contains(&it));
        if own.contains_key(&inode) {
            seen.connections.push(connection);
        } else if inode == NOBODY && is(&CLOSES) {
            seen.orphans.push(connection);
        } else if inode == NOBODY && is(&WAITS) && ports.contains(&connection.own.port()) {
            seen.unaccepted.push(connection);
        }
    }
    for list in [&mut seen.connections, &mut seen.unaccepted, &mut seen.orphans] {
        list.sort();
        list.dedup();
    }
    seen.addresses = addresses()?;
    Ok(seen)
}

/// What tells the network of this process from others of this start of the machine.
pub(super) fn network() -> Result<String, Failure> {
    Ok(fs::read_link("/proc/self/ns/net").context("cannot tell this host's network")?.to_string_lossy().into_owned())
}

/// The addresses of this host.
fn addresses() -> Result<Vec<IpAddr>, Failure> {
    let read = |name: &str| {
        let path = format!("/proc/self/net/{name}");
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}, which has the addresses of this host"))
    };
    let mut all = of_trie(&read("fib_trie")?);
    // A kernel without IPv6 has no such file.
    all.extend(read("if_inet6").unwrap_or_default().lines().filter_map(|line| {
        let digits = line.split_ascii_whitespace().next().filter(|it| it.len() == 32)?;
        Some(IpAddr::from(Ipv6Addr::from(u128::from_str_radix(digits, 16).ok()?)))
    }));
    Ok(all.into_iter().collect())
}

/// The local addresses of `/proc/net/fib_trie`, which has what an address is for in the lines behind it.
fn of_trie(text: &str) -> BTreeSet<IpAddr> {
    let (mut found, mut last) = (BTreeSet::new(), None);
    for line in text.lines().map(str::trim) {
        match line.strip_prefix("|-- ") {
            Some(address) => last = address.parse::<Ipv4Addr>().ok(),
            None if line.starts_with("/32 host LOCAL") => found.extend(last.map(IpAddr::from)),
            None => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::network::connection::Connection;

    #[test]
    fn a_connection_that_waits_to_be_accepted_is_seen_and_one_that_is_closed_with_something_to_say() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let own = [std::process::id() as i32];
        let one = Connection { own: stream.local_addr().unwrap(), other: stream.peer_addr().unwrap() };
        let found = seen(&own).unwrap();
        assert!(found.connections.contains(&one) && found.unaccepted.contains(&one.turned()), "{found:?}");
        assert!(found.addresses.contains(&IpAddr::from([127, 0, 0, 1])), "{found:?}");
        let accepted = listener.accept().unwrap();
        let found = seen(&own).unwrap();
        assert!(found.connections.contains(&one.turned()) && !found.unaccepted.contains(&one.turned()), "{found:?}");
        // More than the other end takes.
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        drop(stream);
        assert!(seen(&own).unwrap().orphans.contains(&one));
        drop(accepted);
    }

    #[test]
    fn local_addresses_are_told_from_others() {
        let text = "Main:\n  +-- 10.0.0.0/24 2 0 2\n     |-- 10.0.0.0\n        /24 link UNICAST\n     |-- 10.0.0.1\n        /32 host LOCAL\n     |-- 10.0.0.255\n        /32 link BROADCAST\n";
        assert_eq!(of_trie(text), BTreeSet::from([IpAddr::from([10, 0, 0, 1])]));
    }
}
