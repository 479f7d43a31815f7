//! The way to another host: a command that runs `rekindle` there, and whose input and output are a connection to it. That may be ssh, what a
//! user names, or this program's own (`crate::tls`).
//!
//! What is said and sent on it (`talk.rs`, `stream.rs`) does not depend on how it gets there.

use std::ffi::OsString;
use std::io::{BufReader, BufWriter};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};

use super::talk::{self, TalkError, ToSource, ToTarget};
use crate::failure::Failure;

/// The bytes that are written at once.
const BUFFER: usize = 1 << 20;
/// How often, and in which intervals, to look whether a connection's process has ended.
const POLLS: u32 = 200;
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Options of ssh: it asks nothing, and a host that is silent is lost after a while. The processes stand still meanwhile, and the kernel
/// would wait for hours.
const SSH: [&str; 8] =
    ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"];

/// The direction of a connection that leads to the other host.
pub(super) type Output = BufWriter<ChildStdin>;

/// The variable by which a command learns which host it is to reach.
const HOST: &str = "REKINDLE_HOST";

/// A way to open connections to another host.
pub(super) trait Way: Sync {
    /// Opens one more connection.
    fn open(&self) -> Result<Link, Failure>;
    /// The other host's name, for messages.
    fn host(&self) -> &str;
}

/// A program that runs `rekindle` on the other host, such as ssh.
#[derive(Clone, Debug)]
pub(crate) struct Via {
    host: String,
    program: OsString,
    arguments: Vec<OsString>,
}

impl Via {
    /// By ssh, which must ask nothing. A shell there reads the words.
    pub(crate) fn ssh(host: &str, words: &[String]) -> Result<Self, Failure> {
        if host.starts_with('-') {
            return Err(Failure::usage(anyhow!("{host} is no host")));
        }
        let mut arguments: Vec<OsString> = SSH.into_iter().chain(["--", host]).map(Into::into).collect();
        arguments.extend(words.iter().map(|it| quoted(it).into()));
        Ok(Self { host: host.to_owned(), program: "ssh".into(), arguments })
    }

    /// By this program itself, with these words.
    pub(crate) fn own(host: &str, words: &[String]) -> Result<Self, Failure> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let arguments = words.iter().map(Into::into).collect();
        Ok(Self { host: host.to_owned(), program: own.into(), arguments })
    }

    /// By a shell's command, which gets a program and its arguments.
    pub(crate) fn command(host: &str, command: &str, words: &[String]) -> Self {
        let mut arguments: Vec<OsString> = vec!["-c".into(), format!("exec {command} \"$@\"").into(), "sh".into()];
        arguments.extend(words.iter().map(Into::into));
        Self { host: host.to_owned(), program: "sh".into(), arguments }
    }

    /// Starts the program, whose input and output are pipes.
    pub(crate) fn start(&self) -> Result<Child, Failure> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).env(HOST, &self.host).stdin(Stdio::piped()).stdout(Stdio::piped());
        Ok(command.spawn().with_context(|| format!("cannot run {}", self.program.display()))?)
    }

    /// The other host's name.
    pub(crate) fn name(&self) -> &str {
        &self.host
    }
}

/// A word that a shell reads as it is.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl Way for Via {
    fn open(&self) -> Result<Link, Failure> {
        let mut child = self.start()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(anyhow!("a process without the pipes that it was given").into());
        };
        let to = BufWriter::with_capacity(BUFFER, input);
        Ok(Link { to: Some(to), from: BufReader::new(output), child })
    }

    fn host(&self) -> &str {
        &self.host
    }
}

/// A connection to `rekindle` on another host. It ends when this is dropped.
pub(super) struct Link {
    /// None once it is closed.
    to: Option<BufWriter<ChildStdin>>,
    from: BufReader<ChildStdout>,
    child: Child,
}

impl Link {
    /// Says something.
    pub(super) fn say(&mut self, message: &ToTarget) -> Result<(), TalkError> {
        talk::send(self.to.as_mut().ok_or(TalkError::Closed)?, message)
    }

    /// Waits for the answer.
    pub(super) fn hear(&mut self) -> Result<ToSource, TalkError> {
        talk::receive(&mut self.from)
    }

    /// Says something, and waits for the answer.
    pub(super) fn ask(&mut self, message: &ToTarget) -> Result<ToSource, TalkError> {
        self.say(message)?;
        self.hear()
    }

    /// Both directions, for content.
    pub(super) fn ends(&mut self) -> Option<(&mut Output, &mut BufReader<ChildStdout>)> {
        Some((self.to.as_mut()?, &mut self.from))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            // What was not written yet is not said any more: the other host hears that the connection has ended.
            drop(to.into_parts());
        }
        // The other host may have something to wait for; the connection's process need not be waited for then.
        for _ in 0..POLLS {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(program: &OsString, arguments: &[OsString]) -> String {
        let output = Command::new(program).args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn words_arrive_as_they_are() {
        let words = ["a b", "it's", "$HOME", "-x"].map(str::to_owned);
        let via = Via::command("there", "printf '%s|'", &words);
        assert_eq!(said(&via.program, &via.arguments), "a b|it's|$HOME|-x|");
        let ssh = Via::ssh("there", &words).unwrap();
        let (options, rest) = ssh.arguments.split_at(SSH.len());
        assert_eq!((options, &rest[..2]), (&SSH.map(OsString::from)[..], &["--", "there"].map(OsString::from)[..]));
        // ssh joins its arguments by spaces, and a shell reads them.
        let joined = rest[2..].join(&OsString::from(" "));
        let mut script = OsString::from("printf '%s|' ");
        script.push(joined);
        assert_eq!(said(&"sh".into(), &["-c".into(), script]), "a b|it's|$HOME|-x|");
        assert!(Via::ssh("-oProxyCommand=x", &words).is_err());
    }

    #[test]
    fn what_is_said_gets_there_and_a_command_that_fails_closes_the_connection() {
        let via = Via::command("there", "cat; true", &[]);
        let mut link = via.open().unwrap();
        link.say(&ToTarget::Own).unwrap();
        let (_, from) = link.ends().unwrap();
        assert!(matches!(talk::receive::<ToTarget>(from), Ok(ToTarget::Own)));
        drop(link);
        let mut link = Via::command("there", "false", &[]).open().unwrap();
        assert!(link.ask(&ToTarget::Own).is_err());
    }
}
