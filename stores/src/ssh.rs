//! A store in a directory of another host, by the system's `ssh`, which runs `rekindle images serve` there.

use std::io::{BufReader, BufWriter};
use std::ops::Range;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Condvar, Mutex};

use crate::StoreError;
use crate::frame::{self, Answer, Greeting, Request, VERSION};
use crate::parallel::lock;
use crate::transport::{Found, ObjectName, Transport};

/// So many connections are used at a time: a server without `MaxStartups` of its own takes ten.
const CONNECTIONS: usize = 4;
/// A request is tried so often, each time over a new connection if the last one broke.
const ATTEMPTS: usize = 3;

/// The way to a directory of another host.
#[derive(Debug)]
pub(crate) struct Ssh {
    /// `ssh` and its arguments.
    arguments: Vec<String>,
    shown: String,
    pool: Mutex<Pool>,
    free: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<Connection>,
    in_use: usize,
}

/// A running `ssh`.
#[derive(Debug)]
struct Connection {
    child: Child,
    to: BufWriter<ChildStdin>,
    from: BufReader<ChildStdout>,
}

/// Why a connection did not do what it should.
enum Broken {
    /// It may work with another one.
    Connection(String),
    /// It will not.
    For(StoreError),
}

impl Ssh {
    pub(crate) fn new(shown: String, user: Option<&str>, host: &str, port: Option<u16>, directory: &str) -> Self {
        let mut arguments: Vec<String> = Vec::new();
        if let Some(port) = port {
            arguments.extend(["-p".to_owned(), port.to_string()]);
        }
        if let Some(user) = user {
            arguments.extend(["-l".to_owned(), user.to_owned()]);
        }
        // Nothing after `--` is an option. The shell at the other end takes what is between quotes as it is.
        let quoted = format!("'{}'", directory.replace('\'', r"'\''"));
        arguments.extend(["--".to_owned(), host.to_owned(), format!("exec rekindle images serve -- {quoted}")]);
        Self { arguments, shown, pool: Mutex::default(), free: Condvar::new() }
    }

    fn connect(&self) -> Result<Connection, Broken> {
        let mut command = Command::new("ssh");
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        // What it asks and says is for the user.
        let mut child = command.stderr(Stdio::inherit()).spawn().map_err(|error| {
            Broken::For(StoreError::remote("reach", &self.shown, format!("ssh does not start: {error}; install it")))
        })?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Broken::Connection("ssh has no pipes".to_owned()));
        };
        let mut connection =
            Connection { child, to: BufWriter::new(to), from: BufReader::with_capacity(1 << 20, from) };
        match frame::greeted(&mut connection.from) {
            Ok(None) => Ok(connection),
            Ok(Some(other)) => {
                connection.end();
                Err(Broken::For(StoreError::remote("use", &self.shown, unlike(&other))))
            }
            Err(_) => Err(Broken::Connection(connection.end())),
        }
    }

    fn take(&self) -> Result<Connection, Broken> {
        let mut pool = lock(&self.pool);
        loop {
            if let Some(connection) = pool.idle.pop() {
                pool.in_use += 1;
                return Ok(connection);
            }
            if pool.in_use < CONNECTIONS {
                pool.in_use += 1;
                drop(pool);
                let made = self.connect();
                if made.is_err() {
                    self.give(None);
                }
                return made;
            }
            pool = self.free.wait(pool).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    fn give(&self, connection: Option<Connection>) {
        let mut pool = lock(&self.pool);
        pool.in_use -= 1;
        pool.idle.extend(connection);
        self.free.notify_one();
    }

    fn ask_once(&self, request: &Request, body: &[u8]) -> Result<(Answer, Vec<u8>), Broken> {
        let mut connection = self.take()?;
        let sent = frame::send(&mut connection.to, request, body);
        match sent.and_then(|()| frame::receive::<Answer>(&mut connection.from)) {
            Ok(Some(answer)) => {
                self.give(Some(connection));
                Ok(answer)
            }
            Ok(None) | Err(_) => {
                let said = connection.end();
                self.give(None);
                Err(Broken::Connection(said))
            }
        }
    }

    fn ask(
        &self,
        action: &'static str,
        name: &ObjectName,
        request: &Request,
        body: &[u8],
    ) -> Result<(Answer, Vec<u8>), StoreError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.ask_once(request, body) {
                Ok((Answer::Failed(what), _)) => return Err(StoreError::remote(action, name.as_str(), what)),
                Ok(answer) => return Ok(answer),
                Err(Broken::For(error)) => return Err(error),
                Err(Broken::Connection(_)) if attempt < ATTEMPTS => {}
                Err(Broken::Connection(what)) => {
                    let what = format!("the connection to {} broke: {what}", self.shown);
                    return Err(StoreError::remote(action, name.as_str(), what));
                }
            }
        }
    }
}

impl Connection {
    /// Ends it, and says how it ended.
    fn end(mut self) -> String {
        let _ = self.child.kill();
        match self.child.wait() {
            Ok(status) if status.code() == Some(127) => "the other host has no rekindle on its PATH".to_owned(),
            Ok(status) if status.code().is_some() => format!("ssh ended with {status}"),
            _ => "the other side closed it, or said what makes no sense".to_owned(),
        }
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        let pool = self.pool.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        for Connection { mut child, to, from } in pool.idle.drain(..) {
            // At the end of its input the server ends by itself.
            drop((to, from));
            let _ = child.wait();
        }
    }
}

impl Transport for Ssh {
    fn put(&self, name: &ObjectName, content: &[u8]) -> Result<(), StoreError> {
        let request = Request::Put { name: name.clone(), if_absent: false };
        match self.ask("write", name, &request, content)?.0 {
            Answer::Put(true) => Ok(()),
            _ => Err(self.unexpected(name)),
        }
    }

    fn put_if_absent(&self, name: &ObjectName, content: &[u8]) -> Result<bool, StoreError> {
        let request = Request::Put { name: name.clone(), if_absent: true };
        match self.ask("write", name, &request, content)?.0 {
            Answer::Put(written) => Ok(written),
            _ => Err(self.unexpected(name)),
        }
    }

    fn get(&self, name: &ObjectName, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, StoreError> {
        let request = Request::Get { name: name.clone(), range };
        match self.ask("read", name, &request, b"")? {
            (Answer::Get(there), content) => Ok(there.then_some(content)),
            _ => Err(self.unexpected(name)),
        }
    }

    fn head(&self, name: &ObjectName) -> Result<Option<Found>, StoreError> {
        match self.ask("ask about", name, &Request::Head { name: name.clone() }, b"")?.0 {
            Answer::Head(found) => Ok(found),
            _ => Err(self.unexpected(name)),
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<Found>, StoreError> {
        let folder = ObjectName::made(folder.to_owned())?;
        match self.ask("list", &folder, &Request::List { folder: folder.clone() }, b"")? {
            (Answer::List, list) => serde_json::from_slice(&list).map_err(|_| self.unexpected(&folder)),
            _ => Err(self.unexpected(&folder)),
        }
    }

    fn delete(&self, name: &ObjectName) -> Result<(), StoreError> {
        match self.ask("remove", name, &Request::Delete { name: name.clone() }, b"")?.0 {
            Answer::Deleted => Ok(()),
            _ => Err(self.unexpected(name)),
        }
    }
}

/// What a side that is not like this one has said.
fn unlike(greeting: &Greeting) -> String {
    match greeting {
        Greeting::Version(other) => {
            format!("rekindle there speaks version {other} and this one {VERSION}; use the same release on both")
        }
        Greeting::Other(said) => {
            let said = String::from_utf8_lossy(said);
            format!(
                "instead of rekindle something else answered there: {said:?}; does a shell print that at its start?"
            )
        }
    }
}

impl Ssh {
    fn unexpected(&self, name: &ObjectName) -> StoreError {
        StoreError::remote("use", name.as_str(), format!("{} gave an answer to another question", self.shown))
    }
}
