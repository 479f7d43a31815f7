//! One request of HTTP/1.1 to a collector, on a connection of its own.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::config::Collector;

/// The largest head of an answer.
const HEAD_MAX: usize = 16 << 10;
/// The most headers of an answer.
const HEADERS_MAX: usize = 64;

/// Why a collector has not taken a batch.
#[derive(Debug, Error)]
pub(super) enum PostError {
    #[error("cannot reach it: {0}")]
    Unreachable(#[from] io::Error),
    /// It may take the batch later.
    #[error("it answers {0}: it is busy")]
    Busy(u16),
    /// It takes no such batch.
    #[error("it answers {0}")]
    Refused(u16),
    #[error("it does not answer as an HTTP server does")]
    NoHttp,
}

impl PostError {
    /// Whether it is worth trying again.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Busy(_))
    }
}

/// Sends a body in JSON, and waits for the answer, no longer than the limit for all.
pub(super) fn post(collector: &Collector, body: &[u8], limit: Duration) -> Result<(), PostError> {
    let deadline = Instant::now() + limit;
    let mut stream = connect(collector, deadline)?;
    let mut head = format!("POST {} HTTP/1.1\r\nHost: {}\r\n", collector.path, authority(collector));
    for (name, value) in &collector.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!(
        "User-Agent: rekindled/{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        env!("CARGO_PKG_VERSION"),
        body.len()
    ));
    for mut rest in [head.as_bytes(), body] {
        while !rest.is_empty() {
            stream.set_write_timeout(Some(left(deadline)?))?;
            match stream.write(rest) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    match status(&mut stream, deadline)? {
        200..300 => Ok(()),
        code @ (429 | 502..=504) => Err(PostError::Busy(code)),
        code => Err(PostError::Refused(code)),
    }
}

/// The host and port as a URL has them.
fn authority(collector: &Collector) -> String {
    let Collector { host, port, .. } = collector;
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn connect(collector: &Collector, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
    for address in (&*collector.host, collector.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Reads the answer's head, and returns its code. A body says nothing that could be acted on.
fn status(stream: &mut TcpStream, deadline: Instant) -> Result<u16, PostError> {
    let (mut buffer, mut filled) = (vec![0; HEAD_MAX], 0);
    loop {
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(PostError::NoHttp),
            Ok(more) => filled += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error.into()),
        }
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut answer = httparse::Response::new(&mut headers);
        match answer.parse(&buffer[..filled]) {
            Ok(parsed) if parsed.is_complete() => return answer.code.ok_or(PostError::NoHttp),
            Ok(_) => {}
            Err(_) => return Err(PostError::NoHttp),
        }
    }
}

/// The time until a deadline, which must not be over.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    const LONG: Duration = Duration::from_secs(60);

    fn answered(answer: &'static [u8]) -> (Result<(), PostError>, String) {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let headers = vec![("x-scope".to_owned(), "a".to_owned())];
        let collector = Collector { host: "127.0.0.1".to_owned(), port, path: "/v1/traces".to_owned(), headers };
        let serving = thread::spawn(move || {
            let mut peer = server.accept().unwrap().0;
            let mut got = Vec::new();
            let mut buffer = [0; 4096];
            while !got.ends_with(b"{1}") {
                let read = peer.read(&mut buffer).unwrap();
                got.extend(&buffer[..read]);
            }
            peer.write_all(answer).unwrap();
            String::from_utf8(got).unwrap()
        });
        let result = post(&collector, b"{1}", LONG);
        (result, serving.join().unwrap())
    }

    #[test]
    fn a_collector_takes_a_batch_or_says_why_not() {
        let (taken, request) = answered(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
        taken.unwrap();
        assert!(request.starts_with("POST /v1/traces HTTP/1.1\r\nHost: 127.0.0.1:"), "{request}");
        assert!(request.contains("\r\nx-scope: a\r\n") && request.contains("\r\nContent-Length: 3\r\n"), "{request}");
        assert!(answered(b"HTTP/1.1 503 Busy\r\n\r\n").0.unwrap_err().is_passing());
        let refused = answered(b"HTTP/1.1 400 Bad Request\r\n\r\n").0.unwrap_err();
        assert!(matches!(refused, PostError::Refused(400)) && !refused.is_passing());
        assert!(matches!(answered(b"SSH-2.0\r\n").0, Err(PostError::NoHttp)));
    }

    #[test]
    fn a_collector_that_says_nothing_is_given_up() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let (host, path) = ("127.0.0.1".to_owned(), "/".to_owned());
        let collector = Collector { host, port, path, headers: Vec::new() };
        let error = post(&collector, b"{}", Duration::from_millis(50)).unwrap_err();
        assert!(error.is_passing(), "{error}");
    }
}
