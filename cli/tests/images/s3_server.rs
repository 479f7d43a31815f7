//! A server that speaks as much of S3 as stores need, over real HTTP, and fails on demand.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::common::rekindle;

/// The only bucket.
pub(crate) const BUCKET: &str = "bucket";
/// Lists have so many objects at most, so that there is more than one page.
const PAGE: usize = 3;

/// What the server does with a request instead of what it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// It answers with this status.
    Status(u16),
    /// It closes the connection without an answer, having done nothing.
    Close,
    /// It does what it was asked for, and closes the connection without an answer.
    CloseAfterwards,
    /// It sends half of the answer's body.
    HalfBody,
}

/// A request.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// The key, without the bucket; of a list, the prefix.
    pub(crate) key: String,
    pub(crate) body: Vec<u8>,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
}

#[derive(Debug, Clone)]
struct Object {
    content: Vec<u8>,
    modified: u64,
    tag: u64,
}

type Faults = Box<dyn FnMut(&Request) -> Fault + Send>;

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Object>,
    requests: Vec<Request>,
    faults: Option<Faults>,
    tags: u64,
}

/// A server on a port of its own.
pub(crate) struct Server {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                std::thread::spawn(move || drop(serve(&stream, &state)));
            }
        });
        Self { address, state }
    }

    /// `rekindle images` with this server.
    pub(crate) fn images(&self) -> Command {
        let mut command = rekindle();
        command.env("AWS_ENDPOINT_URL", format!("http://{}", self.address));
        command
            .env("AWS_ACCESS_KEY_ID", "a key")
            .env("AWS_SECRET_ACCESS_KEY", "a secret")
            .env("AWS_REGION", "eu-central-1");
        command
    }

    /// From now on, this says what is done with each request.
    pub(crate) fn faults(&self, faults: impl FnMut(&Request) -> Fault + Send + 'static) {
        self.state.lock().unwrap().faults = Some(Box::new(faults));
    }

    pub(crate) fn no_faults(&self) {
        self.state.lock().unwrap().faults = None;
    }

    /// The requests since this was last asked for.
    pub(crate) fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    pub(crate) fn keys(&self) -> Vec<String> {
        self.state.lock().unwrap().objects.keys().cloned().collect()
    }

    /// Changes the content of an object.
    pub(crate) fn change(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        change(&mut self.state.lock().unwrap().objects.get_mut(key).unwrap().content);
    }

    /// Makes objects older.
    pub(crate) fn age(&self, prefix: &str, by: Duration) {
        let mut state = self.state.lock().unwrap();
        for (_, object) in state.objects.iter_mut().filter(|(key, _)| key.starts_with(prefix)) {
            object.modified -= by.as_secs();
        }
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let mut from = BufReader::new(stream);
    while let Some(request) = read(&mut from)? {
        let fault = {
            let mut state = state.lock().unwrap();
            state.requests.push(request.clone());
            state.faults.as_mut().map_or(Fault::None, |faults| faults(&request))
        };
        let (status, headers, mut body) = match fault {
            Fault::Status(status) => (status, Vec::new(), b"<Error><Code>SlowDown</Code></Error>".to_vec()),
            Fault::Close => return Ok(()),
            _ => answer(&mut state.lock().unwrap(), &request),
        };
        if fault == Fault::CloseAfterwards {
            return Ok(());
        }
        if request.method == "HEAD" {
            body.clear();
        }
        let mut head = format!("HTTP/1.1 {status} Any\r\n");
        let length = match headers.iter().find(|(name, _)| *name == "content-length") {
            Some((_, length)) => length.clone(),
            None => body.len().to_string(),
        };
        head += &format!("content-length: {length}\r\n");
        for (name, value) in headers.iter().filter(|(name, _)| *name != "content-length") {
            head += &format!("{name}: {value}\r\n");
        }
        let mut to = stream;
        to.write_all((head + "\r\n").as_bytes())?;
        if fault == Fault::HalfBody {
            return to.write_all(&body[..body.len() / 2]);
        }
        to.write_all(&body)?;
    }
    Ok(())
}

fn read(from: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let (Some(method), Some(target)) = (words.next(), words.next()) else { return Ok(None) };
    let (method, target) = (method.to_owned(), target.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    // Every request is signed, with the key of the test.
    assert!(headers["authorization"].starts_with("AWS4-HMAC-SHA256 Credential=a key/"), "{headers:?}");
    let length = headers.get("content-length").map_or(0, |it| it.parse().unwrap());
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').filter(|it| !it.is_empty());
    let query: BTreeMap<_, _> = pairs
        .map(|it| it.split_once('=').unwrap_or((it, "")))
        .map(|(name, value)| (decoded(name), decoded(value)))
        .collect();
    let path = decoded(path);
    let key = path.strip_prefix(&format!("/{BUCKET}")).unwrap_or_else(|| panic!("{path}")).trim_start_matches('/');
    let key = query.get("prefix").map_or_else(|| key.to_owned(), Clone::clone);
    Ok(Some(Request { method, key, body, query, headers }))
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        rest = more;
        match first {
            b'%' => {
                bytes.push(u8::from_str_radix(std::str::from_utf8(&rest[..2]).unwrap(), 16).unwrap());
                rest = &rest[2..];
            }
            b'+' => bytes.push(b' '),
            other => bytes.push(*other),
        }
    }
    String::from_utf8(bytes).unwrap()
}

type Answer = (u16, Vec<(&'static str, String)>, Vec<u8>);

fn answer(state: &mut State, request: &Request) -> Answer {
    let not_found = || (404, Vec::new(), b"<Error><Code>NoSuchKey</Code></Error>".to_vec());
    match request.method.as_str() {
        "PUT" => {
            if request.headers.get("if-none-match").is_some_and(|it| it == "*")
                && state.objects.contains_key(&request.key)
            {
                return (412, Vec::new(), b"<Error><Code>PreconditionFailed</Code></Error>".to_vec());
            }
            state.tags += 1;
            let modified = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
            let object = Object { content: request.body.clone(), modified, tag: state.tags };
            state.objects.insert(request.key.clone(), object);
            (200, vec![("etag", format!("\"{}\"", state.tags))], Vec::new())
        }
        "DELETE" => {
            state.objects.remove(&request.key);
            (204, Vec::new(), Vec::new())
        }
        "HEAD" | "GET" if !request.query.contains_key("list-type") => {
            let Some(object) = state.objects.get(&request.key) else { return not_found() };
            let size = object.content.len();
            let mut headers =
                vec![("etag", format!("\"{}\"", object.tag)), ("last-modified", http_date(object.modified))];
            if request.method == "HEAD" {
                headers.push(("content-length", size.to_string()));
                return (200, headers, Vec::new());
            }
            let Some(range) = request.headers.get("range") else { return (200, headers, object.content.clone()) };
            let (begin, end) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let begin: usize = begin.parse().unwrap();
            let end = end.parse().map_or(size, |end: usize| (end + 1).min(size));
            if begin >= size {
                return (416, vec![("content-range", format!("bytes */{size}"))], Vec::new());
            }
            headers.push(("content-range", format!("bytes {begin}-{}/{size}", end - 1)));
            (206, headers, object.content[begin..end].to_vec())
        }
        "GET" => {
            let after = request.query.get("continuation-token").or(request.query.get("start-after"));
            let mut found = state.objects.iter().filter(|(key, _)| {
                key.starts_with(&request.key) && after.is_none_or(|after| key.as_str() > after.as_str())
            });
            let mut text = "<?xml version=\"1.0\"?><ListBucketResult>".to_owned();
            let mut last = String::new();
            for (key, object) in found.by_ref().take(PAGE) {
                let (time, size, tag) = (xml_date(object.modified), object.content.len(), object.tag);
                text += &format!(
                    "<Contents><Key>{key}</Key><LastModified>{time}</LastModified><ETag>\"{tag}\"</ETag><Size>{size}</Size></Contents>"
                );
                last.clone_from(key);
            }
            let more = found.next().is_some();
            text += &format!("<IsTruncated>{more}</IsTruncated>");
            if more {
                text += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
            }
            (200, Vec::new(), (text + "</ListBucketResult>").into_bytes())
        }
        // Nothing else is asked for.
        other => panic!("{other} {}", request.key),
    }
}

/// Year, month, day, hour, minute, second and day of the week of a time since 1970.
fn parts(time: u64) -> (u64, u64, u64, u64, u64, u64, usize) {
    let (days, rest) = (time / 86_400, time % 86_400);
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day, rest / 3600, rest % 3600 / 60, rest % 60, ((days + 4) % 7) as usize)
}

fn http_date(time: u64) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (year, month, day, hour, minute, second, weekday) = parts(time);
    let month = MONTHS[month as usize - 1];
    format!("{}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT", DAYS[weekday])
}

fn xml_date(time: u64) -> String {
    let (year, month, day, hour, minute, second, _) = parts(time);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.000Z")
}
