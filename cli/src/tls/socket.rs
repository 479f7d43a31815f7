//! TCP: where a host is reached, and how it is noticed that it is lost.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use rustix::net::sockopt;
use rustls::pki_types::ServerName;

/// The port, unless another is named.
pub(super) const PORT: u16 = 7353;
/// How long to wait for each address of a host.
const CONNECTS: Duration = Duration::from_secs(10);
/// A host that answers nothing for so long is lost, as by ssh (`migrate/link.rs`): processes stand still meanwhile.
const SILENCE: Duration = Duration::from_secs(15);
/// How often a connection on which nothing is said is tried.
const INTERVAL: Duration = Duration::from_secs(5);

/// A host and its port, as a user names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The name or address that the host's certificate must have.
    pub(super) host: String,
    port: u16,
}

impl Place {
    /// `HOST`, `HOST:PORT`, or an address of IPv6, in brackets with a port.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, port) = if text.parse::<IpAddr>().is_ok() {
            (text, None)
        } else if let Some((host, rest)) = text.strip_prefix('[').and_then(|it| it.split_once(']')) {
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        } else {
            text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)))
        };
        let port = port.map_or(Ok(PORT), str::parse).ok()?;
        ServerName::try_from(host).ok()?;
        Some(Self { host: host.to_owned(), port })
    }

    /// Connects to the first of its addresses that answers.
    pub(super) fn connect(&self) -> io::Result<TcpStream> {
        let mut failed = io::Error::new(io::ErrorKind::NotFound, "it has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECTS) {
                Ok(socket) => return notices_loss(&socket).map(|()| socket),
                Err(error) => failed = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
        Err(failed)
    }
}

/// The address on which to listen: one with a port, or without.
pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    let plain = text.parse().map(|ip: IpAddr| SocketAddr::new(ip, PORT));
    plain.or_else(|_| text.parse()).map_err(|_| {
        format!("{text:?} is no address of this host: give one as 10.0.0.2, 10.0.0.2:{PORT} or [::]:{PORT}")
    })
}

/// Has the kernel end a connection whose other host is lost, whether bytes are under way or not.
pub(super) fn notices_loss(socket: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, INTERVAL)?;
    sockopt::set_tcp_keepintvl(socket, INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, 2)?;
    sockopt::set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)?;
    socket.set_nodelay(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_host_with_or_without_a_port() {
        let is = |text: &str, host: &str, port: u16| {
            assert_eq!(Place::parse(text), Some(Place { host: host.to_owned(), port }), "{text}");
        };
        is("gpu2", "gpu2", PORT);
        is("gpu2.example:700", "gpu2.example", 700);
        is("10.0.0.2:700", "10.0.0.2", 700);
        is("fd00::2", "fd00::2", PORT);
        is("[fd00::2]", "fd00::2", PORT);
        is("[fd00::2]:700", "fd00::2", 700);
        for bad in ["", ":700", "gpu2:", "gpu2:x", "gpu2:70000", "root@gpu2", "[fd00::2", "[fd00::2]700", "-o", "a b"] {
            assert_eq!(Place::parse(bad), None, "{bad}");
        }
        assert_eq!(address("10.0.0.2"), Ok(SocketAddr::new([10, 0, 0, 2].into(), PORT)));
        assert_eq!(address("[::]:9").map(|it| it.port()), Ok(9));
        assert!(address("gpu2").is_err() && address("").is_err());
    }

    #[test]
    fn a_lost_host_is_noticed_after_as_long_as_by_ssh() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let place = Place::parse(&listener.local_addr().unwrap().to_string()).unwrap();
        let socket = place.connect().unwrap();
        assert!(sockopt::socket_keepalive(&socket).unwrap());
        let [idle, interval] = [sockopt::tcp_keepidle(&socket).unwrap(), sockopt::tcp_keepintvl(&socket).unwrap()];
        assert_eq!(idle + interval * sockopt::tcp_keepcnt(&socket).unwrap(), SILENCE);
        assert_eq!(u128::from(sockopt::tcp_user_timeout(&socket).unwrap()), SILENCE.as_millis());
    }
}
