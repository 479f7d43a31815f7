//! The announcement of an address: from now on it is at this host, whose neighbours and switches learn that at once.
//!
//! An IPv4 address is announced by ARP (RFC 5227), an IPv6 address by a neighbour advertisement that nobody has asked for (RFC 4861).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::thread::JoinHandle;
use std::time::Duration;

use super::address::Device;
use crate::output;

/// How often it is said, and the pause in between: a packet may be lost.
const TIMES: usize = 3;
const PAUSE: Duration = Duration::from_millis(100);

/// The shortest frame.
const SHORTEST: usize = 60;
/// The numbers of protocols in a frame.
const ARP: [u8; 2] = [0x08, 0x06];
const IPV6: [u8; 2] = [0x86, 0xdd];
/// The number of ICMP in a packet of IPv6.
const ICMPV6: u8 = 58;

/// An address of a device on its link.
type Hardware = [u8; 6];

/// Announcements that go on until this is dropped, which waits for the last one.
#[derive(Debug)]
pub(crate) struct Announced(Option<JoinHandle<()>>);

impl Drop for Announced {
    fn drop(&mut self) {
        let _ = self.0.take().map(JoinHandle::join);
    }
}

/// Announces addresses, each of which a device has. The first time is over when this returns. A failure costs time alone, until the
/// neighbours look by themselves: it is said.
pub(crate) fn announce(addresses: &[(IpAddr, &Device)]) -> Announced {
    let mut frames = Vec::new();
    for (ip, device) in addresses {
        // Only a link with such addresses has neighbours who must learn it.
        let Some(from) = device.hardware.as_deref().filter(|_| device.link_type == "ether").and_then(hardware) else {
            continue;
        };
        frames.push((device.ifindex, frame(*ip, from)));
    }
    let say = move || frames.iter().try_for_each(|(device, frame)| send(*device, frame));
    if let Err(error) = say() {
        output::warn(format_args!("neighbours may learn late where an address has moved: {error}"));
        return Announced(None);
    }
    Announced(Some(std::thread::spawn(move || {
        for _ in 1..TIMES {
            std::thread::sleep(PAUSE);
            let _ = say();
        }
    })))
}

/// An address on a link.
fn hardware(text: &str) -> Option<Hardware> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|it| u8::from_str_radix(it, 16).ok()).collect();
    bytes?.try_into().ok()
}

/// The frame that announces an address.
fn frame(ip: IpAddr, from: Hardware) -> Vec<u8> {
    let mut frame = match ip {
        IpAddr::V4(ip) => arp(ip, from),
        IpAddr::V6(ip) => advertisement(ip, from),
    };
    frame.resize(frame.len().max(SHORTEST), 0);
    frame
}

/// A question of ARP for an address, from that address: nobody answers, and all take it to heart.
fn arp(ip: Ipv4Addr, from: Hardware) -> Vec<u8> {
    const ETHERNET_AND_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
    const QUESTION: [u8; 2] = [0, 1];
    let head = [&[0xff; 6][..], &from, &ARP, &ETHERNET_AND_IPV4, &QUESTION].concat();
    [&head[..], &from, &ip.octets(), &[0; 6], &ip.octets()].concat()
}

/// A neighbour advertisement to all nodes of the link, which replaces what they knew.
fn advertisement(ip: Ipv6Addr, from: Hardware) -> Vec<u8> {
    const ALL: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    const ALL_HARDWARE: Hardware = [0x33, 0x33, 0, 0, 0, 1];
    const ADVERTISEMENT: u8 = 136;
    /// The flag by which it replaces what they knew.
    const OVERRIDE: u8 = 0x20;
    /// The option with the sender's address on the link, of eight bytes.
    const TARGET: [u8; 2] = [2, 1];
    const VERSION: [u8; 4] = [0x60, 0, 0, 0];
    /// No router has passed it on.
    const HOPS: u8 = 255;
    let mut said = [&[ADVERTISEMENT, 0, 0, 0, OVERRIDE, 0, 0, 0][..], &ip.octets(), &TARGET, &from].concat();
    let length = said.len() as u16;
    let sum = checksum(&[&ip.octets(), &ALL.octets(), &u32::from(length).to_be_bytes(), &[0, 0, 0, ICMPV6], &said]);
    said[2..4].copy_from_slice(&sum.to_be_bytes());
    let head = [&ALL_HARDWARE[..], &from, &IPV6, &VERSION, &length.to_be_bytes(), &[ICMPV6, HOPS]].concat();
    [&head[..], &ip.octets(), &ALL.octets(), &said].concat()
}

/// The checksum of the internet (RFC 1071). Each part has an even number of bytes.
fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|it| it.chunks_exact(2)).map(|it| u32::from(u16::from_be_bytes([it[0], it[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Sends a frame from a device.
fn send(device: i32, frame: &[u8]) -> io::Result<()> {
    // SAFETY: no pointers.
    let made = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(made) };
    let to = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: u16::from_ne_bytes([frame[12], frame[13]]),
        sll_ifindex: device,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 6,
        sll_addr: [frame[0], frame[1], frame[2], frame[3], frame[4], frame[5], 0, 0],
    };
    // SAFETY: the pointers are to live values, and the lengths are theirs.
    let sent = unsafe {
        let (to, length) = ((&raw const to).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t);
        libc::sendto(socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, to, length)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: Hardware = [2, 0, 0, 0, 0, 1];

    #[test]
    fn an_address_of_ipv4_is_announced_by_a_question_for_itself() {
        let frame = frame("10.0.0.9".parse().unwrap(), FROM);
        let expected =
            "ffffffffffff 020000000001 0806 0001 0800 06 04 0001 020000000001 0a000009 000000000000 0a000009";
        let hex: String = frame[..42].iter().map(|it| format!("{it:02x}")).collect();
        assert_eq!(hex, expected.replace(' ', ""));
        assert!(frame.len() == SHORTEST && frame[42..].iter().all(|it| *it == 0));
    }

    #[test]
    fn an_address_of_ipv6_is_announced_to_all_with_a_good_checksum() {
        let frame = frame("fd00::9".parse().unwrap(), FROM);
        assert_eq!(frame.len(), 14 + 40 + 32);
        assert_eq!(frame[..14], [0x33, 0x33, 0, 0, 0, 1, 2, 0, 0, 0, 0, 1, 0x86, 0xdd]);
        let (packet, said) = (&frame[14..], &frame[54..]);
        assert_eq!(packet[..8], [0x60, 0, 0, 0, 0, 32, 58, 255]);
        assert_eq!((said[0], said[4]), (136, 0x20));
        assert_eq!(said[24..], [2, 1, 2, 0, 0, 0, 0, 1]);
        // With its checksum, all adds up to nothing.
        assert_eq!(checksum(&[&packet[8..40], &[0, 0, 0, 32, 0, 0, 0, 58], said]), 0);
    }

    #[test]
    fn addresses_on_a_link_are_read() {
        assert_eq!(hardware("02:00:00:00:00:01"), Some(FROM));
        assert_eq!(hardware("00:00"), None);
        assert_eq!(hardware("0.0.0.0"), None);
    }
}
