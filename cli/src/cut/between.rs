//! Connections between the trees that are opened or closed while a cut is made.
//!
//! CRIU locks the connections that a tree has at its dump. A tree that is not dumped yet may connect to one that is: the kernel there takes
//! the connection and its data for a listener, and no image has them. It may also write to a connection, close it and go on: what it has
//! written belongs to a socket of no process, which no image has either. So all trees are looked at four times:
//!
//! ```text
//!   Ready, Seen │ all hosts, twice: what leads to no tree anyway        │ then all are dumped
//!   Dumped      │ each, when it is: what it has, and closed before      │ then all are looked at again
//!   Seen        │ all, when all are: what no process has accepted       │ then they go on
//! ```
//!
//! `model/` tries all orders.

use std::collections::HashSet;
use std::net::IpAddr;

use super::talk::Seen;
use crate::network::connection::Connection;

/// All looks at all trees, each list in the order of the hosts.
pub(super) struct Looks {
    /// Two before any is dumped, the second one after all hosts have had the first one.
    pub(super) before: [Vec<Seen>; 2],
    /// When each was dumped.
    pub(super) dumped: Vec<Seen>,
    /// When all were.
    pub(super) after: Vec<Seen>,
}

impl Looks {
    /// A connection between two trees of which the images do not have all, with the number of the host that has it.
    pub(super) fn torn(&self) -> Option<(usize, Connection)> {
        let [first, second] = &self.before;
        let others = |at: usize, it: &Connection| {
            let ip = it.other.ip();
            (0..self.dumped.len()).filter(move |to| *to != at && self.leads(at, *to, ip)).collect::<Vec<_>>()
        };
        let has = |looks: &[Seen], at: usize, it: Connection| {
            let has =
                |seen: &Seen| [&seen.connections, &seen.unaccepted, &seen.orphans].iter().any(|all| all.contains(&it));
            looks.get(at).is_some_and(has)
        };
        let dumped: HashSet<_> = self.dumped.iter().flat_map(|it| &it.connections).collect();
        for (at, seen) in self.dumped.iter().enumerate() {
            if let Some(it) = seen.orphans.iter().find(|it| !others(at, it).is_empty()) {
                return Some((at, *it));
            }
            for it in seen.connections.iter().filter(|it| !dumped.contains(&it.turned())) {
                let others = others(at, it);
                // It was there when the other tree did not have its end, and has not got it since.
                let led_nowhere = has(first, at, *it) && !others.iter().any(|to| has(second, *to, it.turned()));
                if !others.is_empty() && !led_nowhere {
                    return Some((at, *it));
                }
            }
        }
        let unaccepted = |(at, seen): (usize, &Seen)| {
            let mut found = seen.unaccepted.iter().filter(|it| !others(at, it).is_empty());
            found.next().map(|it| (at, *it))
        };
        self.after.iter().enumerate().find_map(unaccepted)
    }

    /// The connections whose other end no tree has.
    pub(super) fn outside(&self) -> Vec<Connection> {
        let all: HashSet<_> = self.dumped.iter().flat_map(|it| &it.connections).copied().collect();
        let mut outside: Vec<_> = all.iter().copied().filter(|it| !all.contains(&it.turned())).collect();
        outside.sort();
        outside
    }

    /// Whether this address leads from one host to another.
    fn leads(&self, from: usize, to: usize, ip: IpAddr) -> bool {
        let (Some(from), Some(to)) = (self.dumped.get(from), self.dumped.get(to)) else { return false };
        // Each host has such addresses of its own, loopback's and those of bridges.
        if ip.is_loopback() || from.addresses.contains(&ip) {
            return from.network == to.network;
        }
        to.addresses.contains(&ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(own: &str, other: &str) -> Connection {
        Connection { own: own.parse().unwrap(), other: other.parse().unwrap() }
    }

    /// Two hosts that have seen this at each look.
    fn looks(a: &[Connection], b: &[Connection]) -> Looks {
        let seen = |host: u8, connections: &[Connection]| Seen {
            connections: connections.to_vec(),
            addresses: vec![[10, 0, 0, host].into(), [127, 0, 0, 1].into(), [172, 17, 0, 1].into()],
            network: host.to_string(),
            ..Seen::default()
        };
        let all = || vec![seen(1, a), seen(2, b)];
        Looks { before: [all(), all()], dumped: all(), after: all() }
    }

    const A: &str = "10.0.0.1:5";
    const B: &str = "10.0.0.2:6";

    #[test]
    fn a_connection_leads_out_of_a_cut_if_nobody_has_its_other_end() {
        let (one, away) = (connection(A, B), connection(A, "10.0.0.9:22"));
        let looks = looks(&[one, away], &[one.turned()]);
        assert_eq!(looks.outside(), [away]);
        assert_eq!(looks.torn(), None);
    }

    #[test]
    fn a_connection_that_is_opened_or_closed_between_two_dumps_tears_a_cut() {
        let one = connection(A, B);
        let nowhere = looks(&[one], &[]);
        assert_eq!((nowhere.torn(), nowhere.outside()), (None, vec![one]), "the other tree has never had its end");
        let mut opened = looks(&[one], &[]);
        opened.before.iter_mut().for_each(|it| it[0].connections.clear());
        assert_eq!(opened.torn(), Some((0, one)));
        // The first look at the other host may have come too early.
        let mut closed = looks(&[one], &[]);
        closed.before[1][1].connections.push(one.turned());
        assert_eq!(closed.torn(), Some((0, one)));
        let ends = vec![one.turned()];
        closed.before[1][1] = Seen { unaccepted: ends.clone(), ..Seen::default() };
        assert_eq!(closed.torn(), Some((0, one)));
        closed.before[1][1] = Seen { orphans: ends, ..Seen::default() };
        assert_eq!(closed.torn(), Some((0, one)));
    }

    #[test]
    fn what_no_process_has_between_the_hosts_tears_a_cut() {
        let (one, away) = (connection(A, B), connection(A, "10.0.0.9:22"));
        for (it, expected) in [(one, Some((0, one))), (away, None)] {
            let mut orphan = looks(&[], &[]);
            orphan.dumped[0].orphans.push(it);
            assert_eq!(orphan.torn(), expected);
            let mut unaccepted = looks(&[], &[]);
            unaccepted.after[0].unaccepted.push(it);
            assert_eq!(unaccepted.torn(), expected);
        }
    }

    #[test]
    fn an_address_of_the_own_host_leads_to_no_other() {
        for own in ["127.0.0.1:6", "172.17.0.1:6"] {
            let one = connection("127.0.0.1:5", own);
            let mut opened = looks(&[one], &[]);
            opened.before.iter_mut().for_each(|it| it[0].connections.clear());
            assert_eq!(opened.torn(), None, "{own}");
            opened.dumped[1].network = opened.dumped[0].network.clone();
            assert_eq!(opened.torn(), Some((0, one)), "two trees of one host: {own}");
        }
    }
}
