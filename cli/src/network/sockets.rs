//! The TCP sockets of processes.
//!
//! CRIU dumps and restores a connection in the kernel's repair mode (`TCP_REPAIR`, tcp(7)). In this mode a socket sends nothing, also when
//! it is closed. The mode takes the place of SO_REUSEADDR: the kernel turns that option off when a socket leaves it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::connection::Connection;
use super::tools;
use crate::failure::Failure;

/// The states of a listening socket and of a connection that begins, in `/proc/net/tcp`.
const LISTENS: &str = "0A";
const BEGINS: &str = "03";

/// Options of sockets, by level and name.
const REPAIR: (i32, i32) = (libc::IPPROTO_TCP, libc::TCP_REPAIR);
const REUSE: (i32, i32) = (libc::SOL_SOCKET, libc::SO_REUSEADDR);
/// Their values.
const ON: i32 = 1;
const OFF: i32 = 0;
/// The inode of a socket that no process has.
pub(crate) const NOBODY: u64 = 0;
/// How long to wait for a connection of before to end.
const ROOM: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A socket of a process: its inode, and where the process has it.
pub(crate) type Sockets = HashMap<u64, (i32, i32)>;

/// The connections of these processes, which are in one network namespace.
pub(crate) fn connections(pids: &[i32]) -> Result<Vec<Connection>, Failure> {
    let own = sockets(pids);
    let found = rows(pids)?.into_iter().filter(|(inode, _)| own.contains_key(inode)).map(|(_, it)| it);
    Ok(found.collect::<BTreeSet<_>>().into_iter().collect())
}

/// The ports at which these processes listen.
pub(crate) fn listening(pids: &[i32]) -> Vec<u16> {
    let Some(pid) = pids.first() else { return Vec::new() };
    ports(&lines(*pid).unwrap_or_default(), &sockets(pids))
}

/// The ports at which these sockets listen.
pub(crate) fn ports(lines: &[String], own: &Sockets) -> Vec<u16> {
    let port = |line: &String| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let inode = words.get(9)?.parse().ok()?;
        let listens = *words.get(3)? == LISTENS && own.contains_key(&inode);
        listens.then(|| address(words.get(1)?).map(|it| it.port())).flatten()
    };
    lines.iter().filter_map(port).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Whether connections to these addresses begin, or have begun and wait until one of these processes, which listen, takes them.
pub(crate) fn is_one_beginning(pids: &[i32], addresses: &[IpAddr]) -> bool {
    pids.first().is_some_and(|pid| is_one_beginning_of(&sockets(pids), &listening(pids), *pid, addresses))
}

fn is_one_beginning_of(own: &Sockets, ports: &[u16], pid: i32, addresses: &[IpAddr]) -> bool {
    lines(pid).unwrap_or_default().iter().any(|line| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let [_, local, _, state, queues, ..] = words[..] else { return false };
        let Some(local) = address(local) else { return false };
        let is_meant = local.ip().is_unspecified() || addresses.contains(&local.ip());
        let inode = words.get(9).and_then(|it| it.parse().ok()).unwrap_or(NOBODY);
        // A listening socket's queue is that of the connections that wait.
        let waits = || queues.split_once(':').is_some_and(|(_, waiting)| waiting.bytes().any(|it| it != b'0'));
        match state {
            LISTENS => is_meant && own.contains_key(&inode) && waits(),
            BEGINS => is_meant && ports.contains(&local.port()),
            _ => false,
        }
    })
}

/// From now on the connections of any process from these addresses say nothing, also when the processes end.
pub(crate) fn mute_those_of(addresses: &[IpAddr]) {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let all: Vec<i32> = entries.filter_map(|it| it.file_name().to_str()?.parse().ok()).collect();
    let rows = rows(&[std::process::id() as i32]).unwrap_or_default();
    let ours = rows.into_iter().filter(|(_, it)| addresses.contains(&it.own.ip()));
    let ours: HashSet<u64> = ours.map(|(inode, _)| inode).collect();
    for (_, (pid, fd)) in sockets(&all).into_iter().filter(|(inode, _)| ours.contains(inode)) {
        // It may have ended meanwhile.
        let _ = socket(pid, fd).map(|it| set_option(&it, REPAIR, ON));
    }
}

/// Ends what the kernel has of connections from an address, also such whose processes have ended.
pub(crate) fn end_those_of(address: IpAddr) {
    let from = match address {
        IpAddr::V4(address) => address.to_string(),
        // Its last part would be a port.
        IpAddr::V6(address) => format!("[{address}]"),
    };
    kill(&["src", &from]);
}

/// Whether these processes are in the network namespace of this one.
pub(crate) fn is_own_network(pids: &[i32]) -> bool {
    let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let own = of("self");
    pids.iter().filter_map(|pid| of(&pid.to_string())).all(|it| Some(it) == own)
}

/// The connections of these processes that do not have SO_REUSEADDR, by the socket's inode.
pub(crate) fn exclusive(pids: &[i32]) -> BTreeSet<u64> {
    let is_exclusive = |socket: &OwnedFd| option(socket, REUSE).is_ok_and(|it| it == OFF);
    connected(pids).filter(|(_, socket)| is_exclusive(socket)).map(|(inode, _)| inode).collect()
}

/// From now on the connections of these processes say nothing, also when the processes end.
pub(crate) fn mute(pids: &[i32]) {
    for (_, socket) in connected(pids) {
        // It may have been reset meanwhile.
        let _ = set_option(&socket, REPAIR, ON);
    }
}

/// Takes out of repair mode what a CRIU has left in it that was killed. `exclusive` is what had no SO_REUSEADDR before.
pub(crate) fn unmute(pids: &[i32], exclusive: &BTreeSet<u64>) {
    for (inode, socket) in connected(pids) {
        if option(&socket, REPAIR).is_ok_and(|it| it == ON) {
            let _ = set_option(&socket, REPAIR, OFF);
            // Without it nobody could listen at the port for a minute after the connection's end. A connection that was made when it
            // had been noted which ones are exclusive gets it, too.
            if !exclusive.contains(&inode) {
                let _ = set_option(&socket, REUSE, ON);
            }
        }
    }
}

/// The sockets of these processes that are connections, by inode.
fn connected(pids: &[i32]) -> impl Iterator<Item = (u64, OwnedFd)> {
    let connected: HashSet<u64> = rows(pids).unwrap_or_default().into_iter().map(|(inode, _)| inode).collect();
    let own = sockets(pids).into_iter().filter(move |(inode, _)| connected.contains(inode));
    // A process or a socket may have gone meanwhile.
    own.filter_map(|(inode, (pid, fd))| Some((inode, socket(pid, fd)?)))
}

/// The sockets of processes.
pub(crate) fn sockets(pids: &[i32]) -> Sockets {
    let mut found = Sockets::new();
    for pid in pids {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let link = fs::read_link(entry.path()).unwrap_or_default();
            let inode = link.to_str().and_then(|it| it.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            let fd = entry.file_name().to_str().and_then(|it| it.parse().ok());
            if let (Some(inode), Some(fd)) = (inode, fd) {
                found.insert(inode, (*pid, fd));
            }
        }
    }
    found
}

/// All connections in the network namespace of these processes, by the socket's inode.
fn rows(pids: &[i32]) -> Result<Vec<(u64, Connection)>, Failure> {
    let Some(pid) = pids.first() else { return Ok(Vec::new()) };
    Ok(lines(*pid)?.iter().filter_map(|it| row(it)).collect())
}

/// The kernel's lines about all TCP sockets in the network namespace of this process.
pub(crate) fn lines(pid: i32) -> Result<Vec<String>, Failure> {
    let mut lines = Vec::new();
    for name in ["tcp", "tcp6"] {
        let path = format!("/proc/{pid}/net/{name}");
        match fs::read_to_string(&path) {
            Ok(text) => lines.extend(text.lines().skip(1).map(str::to_owned)),
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && name == "tcp6" => {}
            Err(error) => return Err(error).with_context(|| format!("cannot read {path}"))?,
        }
    }
    Ok(lines)
}

/// Ends what the kernel has left of connections whose processes have ended: it may be there for a minute, and CRIU cannot restore the
/// connection as long as it is. Nobody else hears that if packets of these connections are locked.
pub(crate) fn end_what_is_left_of(connections: &[Connection], ports: &[u16]) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        let own = [std::process::id() as i32];
        // What came in at a port keeps it from being listened at.
        let is_in_the_way = |it: &Connection| connections.contains(it) || ports.contains(&it.own.port());
        let is_left = |(inode, it): &(u64, Connection)| *inode == NOBODY && is_in_the_way(it);
        let left: Vec<_> = rows(&own)?.into_iter().filter(is_left).map(|(_, it)| it).collect();
        let Some(Connection { own, other }) = left.first() else { return Ok(()) };
        if began.elapsed() > ROOM {
            return Err(Failure::refused(anyhow!(
                "the connection {own} to {other} of before has not ended yet: try again in a minute"
            )));
        }
        for Connection { own, other } in &left {
            kill(&["src", &own.to_string(), "dst", &other.to_string()]);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Ends connections. Without the program, or in a kernel without this, they end by themselves in time.
fn kill(which: &[&str]) {
    let mut command = tools::command("ss");
    command.args(["--tcp", "--all", "--kill"]).args(which);
    let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// A line of `/proc/net/tcp` or `tcp6`, if it is a connection's.
pub(crate) fn row(line: &str) -> Option<(u64, Connection)> {
    let words: Vec<_> = line.split_ascii_whitespace().collect();
    let (own, other, state, inode) = (words.get(1)?, words.get(2)?, words.get(3)?, words.get(9)?);
    let connection = Connection { own: address(own)?, other: address(other)? };
    let inode = inode.parse().ok()?;
    (*state != LISTENS && connection.other.port() != 0).then_some((inode, connection))
}

/// An address there: words of 32 bits in the byte order of the machine, in hexadecimal digits.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words = (0..address.len() / 8).map(|at| u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok());
    let bytes: Vec<u8> = words.collect::<Option<Vec<_>>>()?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let ip: IpAddr = match <[u8; 16]>::try_from(bytes.as_slice()) {
        Ok(bytes) => Ipv6Addr::from(bytes).to_canonical(),
        Err(_) => Ipv4Addr::from(<[u8; 4]>::try_from(bytes.as_slice()).ok()?).into(),
    };
    Some(SocketAddr::new(ip, port))
}

/// Another process's socket.
fn socket(pid: i32, fd: i32) -> Option<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    pidfd_getfd(process, fd, PidfdGetfdFlags::empty()).ok()
}

fn option(socket: &OwnedFd, (level, name): (i32, i32)) -> io::Result<i32> {
    let (mut value, mut length) = (0_i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the pointers are to live locals, and the length is that of the value.
    let got = unsafe {
        let (value, length) = ((&raw mut value).cast(), &raw mut length);
        libc::getsockopt(socket.as_fd().as_raw_fd(), level, name, value, length)
    };
    if got == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

fn set_option(socket: &OwnedFd, (level, name): (i32, i32), to: i32) -> io::Result<()> {
    // SAFETY: the pointer is to a live local, and the length is its own.
    let set = unsafe {
        let (value, length) = ((&raw const to).cast(), size_of::<i32>() as libc::socklen_t);
        libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, value, length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn lines_of_connections_are_read() {
        let line =
            "   0: 0100007F:1389 0200000A:1770 01 00000000:00000000 00:00000000 00000000     0        0 4242 1 0";
        let expected = Connection { own: "127.0.0.1:5001".parse().unwrap(), other: "10.0.0.2:6000".parse().unwrap() };
        assert_eq!(row(line), Some((4242, expected)));
        assert_eq!(row(&line.replace(" 01 ", " 0A ")), None);
        assert_eq!(row("  sl  local_address rem_address   st tx_queue"), None);
        let mapped = address("0000000000000000FFFF00000100007F:1389");
        assert_eq!(mapped, Some("127.0.0.1:5001".parse().unwrap()));
        assert_eq!(address("00000000000000000000000001000000:1389"), Some("[::1]:5001".parse().unwrap()));
        assert_eq!(address("0100007:1"), None);
    }

    #[test]
    fn a_connection_that_waits_until_it_is_taken_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pids = [std::process::id() as i32];
        let addresses = ["127.0.0.1".parse().unwrap()];
        let inode = rustix::fs::fstat(&listener).unwrap().st_ino;
        let is_one_of = |addresses: &[IpAddr]| {
            // Other tests of this process listen, too.
            let own = Sockets::from([(inode, (pids[0], listener.as_raw_fd()))]);
            is_one_beginning_of(&own, &[listener.local_addr().unwrap().port()], pids[0], addresses)
        };
        assert!(!is_one_of(&addresses));
        let _stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(is_one_of(&addresses) && !is_one_of(&["127.0.0.2".parse().unwrap()]));
        let _accepted = listener.accept().unwrap();
        assert!(!is_one_of(&addresses));
    }

    #[test]
    fn both_ends_of_a_connection_are_found_but_no_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _accepted = listener.accept().unwrap();
        let found = connections(&[std::process::id() as i32]).unwrap();
        let one = Connection { own: stream.local_addr().unwrap(), other: stream.peer_addr().unwrap() };
        assert!(found.contains(&one) && found.contains(&one.turned()), "{found:?}");
        assert!(is_own_network(&[std::process::id() as i32]));
    }

    #[test]
    fn a_connection_that_leaves_repair_mode_has_the_option_that_it_had() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || OwnedFd::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (reusing, not) = (connect(), connect());
        set_option(&reusing, REUSE, ON).unwrap();
        let inode = |it: &OwnedFd| rustix::fs::fstat(it).unwrap().st_ino;
        let own = [std::process::id() as i32];
        let exclusive = exclusive(&own);
        assert!(exclusive.contains(&inode(&not)) && !exclusive.contains(&inode(&reusing)), "{exclusive:?}");
        for socket in [&reusing, &not] {
            match set_option(socket, REPAIR, ON) {
                // Only root may.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return,
                set => set.unwrap(),
            }
        }
        unmute(&own, &exclusive);
        for (socket, expected) in [(&reusing, ON), (&not, OFF)] {
            assert_eq!((option(socket, REPAIR).unwrap(), option(socket, REUSE).unwrap()), (OFF, expected));
        }
    }
}
