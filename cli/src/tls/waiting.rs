//! Connections that have not shown yet whose they are. There are few at a time, and no single address may keep others out.

use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most at a time.
const MOST: usize = 64;

/// All of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Waiting(Arc<Mutex<All>>);

#[derive(Debug, Default)]
struct All {
    list: Vec<One>,
    /// The number of the next ticket. None is used twice: one whose connection was ended lives on for a while.
    next: u64,
}

#[derive(Debug)]
struct One {
    network: IpAddr,
    /// None if it cannot be ended from here.
    socket: Option<TcpStream>,
    ticket: u64,
}

/// A connection is one of them until this is dropped.
#[derive(Debug)]
pub(super) struct Ticket {
    all: Waiting,
    number: u64,
}

impl Waiting {
    /// One more. If there are too many, one is ended: the oldest one of the network that has most.
    pub(super) fn add(&self, socket: &TcpStream, from: IpAddr) -> Ticket {
        let mut locked = self.lock();
        let number = locked.next;
        locked.next += 1;
        let all = &mut locked.list;
        all.push(One { network: network(from), socket: socket.try_clone().ok(), ticket: number });
        if all.len() > MOST {
            let count = |it: &One| all.iter().filter(|other| other.network == it.network).count();
            // Of several with as many, `min_by_key` takes the first, which is the oldest.
            if let Some((at, _)) = all.iter().enumerate().min_by_key(|(_, it)| usize::MAX - count(it)) {
                let oldest = all.remove(at);
                let _ = oldest.socket.map(|it| it.shutdown(Shutdown::Both));
            }
        }
        Ticket { all: self.clone(), number }
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.all.lock().list.retain(|it| it.ticket != self.number);
    }
}

/// What one machine may have many addresses of.
fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => {
            let [a, b, c, d, ..] = ip.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn who_has_many_connections_loses_them_and_nobody_else() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (waiting, mut tickets) = (Waiting::default(), Vec::new());
        let mut connect = |from: [u8; 4]| {
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            client.set_nonblocking(true).unwrap();
            let (socket, _) = listener.accept().unwrap();
            tickets.push((waiting.add(&socket, from.into()), socket));
            client
        };
        let mut other = connect([10, 0, 0, 2]);
        let mut many: Vec<_> = (0..2 * MOST).map(|_| connect([10, 0, 0, 1])).collect();
        let mut last = connect([10, 0, 0, 3]);
        let mut is_open = |it: &mut TcpStream| match it.read(&mut [0]) {
            Err(error) => error.kind() == ErrorKind::WouldBlock,
            Ok(length) => length > 0,
        };
        assert!(is_open(&mut other) && is_open(&mut last));
        let open: Vec<_> = many.iter_mut().map(&mut is_open).collect();
        assert_eq!(open.iter().filter(|it| **it).count(), MOST - 2);
        assert!(open[2 * MOST - 1] && !open[0], "the oldest go first");
        drop(tickets);
        assert!(waiting.lock().list.is_empty());
    }

    #[test]
    fn a_ticket_whose_connection_was_ended_takes_no_other_with_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let waiting = Waiting::default();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let add = || waiting.add(&client, [10, 0, 0, 1].into());
        let first = add();
        drop((0..MOST).map(|_| add()).collect::<Vec<_>>());
        assert!(waiting.lock().list.is_empty(), "the first was ended, and the others are over");
        let _next = add();
        drop(first);
        assert_eq!(waiting.lock().list.len(), 1);
    }

    #[test]
    fn the_addresses_of_one_network_of_ipv6_count_together() {
        let [a, b, c] = ["fd00::1", "fd00::ffff:1", "fd00:0:0:1::1"].map(|it| network(it.parse().unwrap()));
        assert!(a == b && a != c);
        assert_eq!(network("::ffff:10.0.0.1".parse().unwrap()), network("10.0.0.1".parse().unwrap()));
    }
}
