//! As much of HTTP/1.1 as a scrape needs: the head of one request, and one answer, after which the connection closes.
//!
//! `httparse` parses the head, and the rest is here. A server crate would be out of proportion or would not hold: hyper needs an
//! asynchronous runtime, which the daemon has not; tiny_http and rouille have no time limits and no limit of threads, so that
//! peers which say nothing could take all of the daemon's.

use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;

/// The longest head of a request. Prometheus's has some hundred bytes.
pub(super) const HEAD_MAX: usize = 8 << 10;
/// The most header lines.
const HEADERS_MAX: usize = 64;
const PATH: &str = "/metrics";
const PLAIN: &str = "text/plain; charset=utf-8";

/// What has arrived of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// Nothing is wrong so far, and the head has not ended.
    Partial,
    /// The metrics are asked for; with `HEAD` without the body.
    Metrics { body: bool },
    /// Anything else; the answer says what is wrong.
    Other(Status),
}

/// The status of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    BadRequest,
    NotFound,
    MethodNotAllowed,
    HeadTooLarge,
    Internal,
}

impl Status {
    /// Its code.
    pub(super) fn code(self) -> &'static str {
        match self {
            Self::Ok => "200",
            Self::BadRequest => "400",
            Self::NotFound => "404",
            Self::MethodNotAllowed => "405",
            Self::HeadTooLarge => "431",
            Self::Internal => "500",
        }
    }

    /// Its reason, which is also the text of an answer without metrics.
    fn reason(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::BadRequest => "Bad Request",
            Self::NotFound => "Not Found",
            Self::MethodNotAllowed => "Method Not Allowed",
            Self::HeadTooLarge => "Request Header Fields Too Large",
            Self::Internal => "Internal Server Error",
        }
    }
}

/// Parses the bytes that have arrived, which are [`HEAD_MAX`] at most.
pub(super) fn parse(bytes: &[u8]) -> Head {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < HEAD_MAX => return Head::Partial,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Head::Other(Status::HeadTooLarge);
        }
        Err(_) => return Head::Other(Status::BadRequest),
    }
    let (Some(method), Some(target)) = (request.method, request.path) else { return Head::Other(Status::BadRequest) };
    let path = target.split(['?', '#']).next().unwrap_or_default();
    match (method, path) {
        (_, path) if path != PATH => Head::Other(Status::NotFound),
        ("GET", _) => Head::Metrics { body: true },
        ("HEAD", _) => Head::Metrics { body: false },
        _ => Head::Other(Status::MethodNotAllowed),
    }
}

/// The answer with the metrics; for `HEAD` without them.
pub(super) fn metrics(text: &str, body: bool) -> Vec<u8> {
    answer(Status::Ok, CONTENT_TYPE, text, body)
}

/// An answer that says what is wrong.
pub(super) fn refusal(status: Status) -> Vec<u8> {
    let hint = if status == Status::NotFound { "; the metrics are at /metrics" } else { "" };
    answer(status, PLAIN, &format!("{}{hint}\n", status.reason()), true)
}

fn answer(status: Status, content_type: &str, text: &str, body: bool) -> Vec<u8> {
    let allow = if status == Status::MethodNotAllowed { "Allow: GET, HEAD\r\n" } else { "" };
    let mut answer = format!(
        "HTTP/1.1 {} {}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n{allow}Connection: close\r\n\r\n",
        status.code(),
        status.reason(),
        text.len(),
    );
    if body {
        answer.push_str(text);
    }
    answer.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost:9464\r\nAccept: text/plain;version=0.0.4\r\n\r\n";

    #[test]
    fn metrics_are_at_one_path_for_those_who_read() {
        assert_eq!(parse(GET), Head::Metrics { body: true });
        assert_eq!(parse(b"HEAD /metrics?x=y HTTP/1.0\r\n\r\n"), Head::Metrics { body: false });
        for (head, status) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], Status::NotFound),
            (b"GET /metrics/ HTTP/1.1\r\n\r\n", Status::NotFound),
            (b"POST /metrics HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", Status::MethodNotAllowed),
            (b"\x16\x03\x01\x02\x00", Status::BadRequest),
            (b"GET /metrics\r\n\r\n", Status::BadRequest),
        ] {
            assert_eq!(parse(head), Head::Other(status), "{}", head.escape_ascii());
        }
        let refused = String::from_utf8(refusal(Status::MethodNotAllowed)).unwrap();
        assert!(refused.starts_with("HTTP/1.1 405 ") && refused.contains("\r\nAllow: GET, HEAD\r\n"), "{refused}");
    }

    #[test]
    fn a_head_that_does_not_end_is_refused_and_not_before() {
        for length in 0..GET.len() {
            assert_eq!(parse(&GET[..length]), Head::Partial);
        }
        let mut long = b"GET /metrics HTTP/1.1\r\nX: ".to_vec();
        long.resize(HEAD_MAX - 1, b'x');
        assert_eq!(parse(&long), Head::Partial);
        long.push(b'x');
        assert_eq!(parse(&long), Head::Other(Status::HeadTooLarge));
        let many = [b"GET /metrics HTTP/1.1\r\n".as_slice(), &b"A: b\r\n".repeat(HEADERS_MAX + 1), b"\r\n"].concat();
        assert_eq!(parse(&many), Head::Other(Status::HeadTooLarge));
    }

    proptest! {
        #[test]
        fn nothing_that_arrives_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse(&bytes);
            parse(&[b"GET /metrics HTTP/1.1\r\n".as_slice(), &bytes].concat());
        }
    }

    #[test]
    fn an_answer_has_its_length_also_without_its_body() {
        let (whole, head) = (metrics("a 1\n", true), metrics("a 1\n", false));
        assert_eq!(whole, [&head[..], b"a 1\n"].concat());
        let text = String::from_utf8(head).unwrap();
        assert!(text.contains("\r\nContent-Length: 4\r\n") && text.contains("version=0.0.4"), "{text}");
    }
}
