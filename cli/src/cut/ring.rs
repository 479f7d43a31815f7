//! The coordinator's connections to all hosts of a cut.
//!
//! A phase is one message to each host and one answer from each. It fails with the first host that fails, closes its connection, or is
//! silent for too long.

use std::io::BufReader;
use std::process::{Child, ChildStdin};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::options::Ways;
use super::talk::{FromPart, PING, SILENCE, ToPart};
use crate::failure::Failure;
use crate::migrate::link::Via;
use crate::migrate::talk;

/// How long a host that is told to give up may take for it.
const LAST: Duration = Duration::from_secs(30);
/// The pause between two looks whether a connection's process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// One connection.
struct Member {
    host: String,
    /// None once it is closed.
    to: Option<ChildStdin>,
    child: Child,
    /// When it was told that the coordinator lives, if nothing has been heard of it since.
    asked: Option<Instant>,
    /// Whether it can be heard still.
    is_open: bool,
}

impl Member {
    fn is_silent(&self) -> bool {
        self.asked.is_some_and(|it| it.elapsed() > SILENCE)
    }
}

/// What has reached the coordinator.
enum Event {
    Said(FromPart),
    Lost(String),
}

/// The connections to all hosts.
pub(super) struct Ring {
    members: Vec<Member>,
    events: Receiver<(usize, Event)>,
    /// When the hosts were told last that the coordinator lives.
    pinged: Instant,
}

impl Ring {
    /// Connects to each of these hosts.
    pub(super) fn open<'a>(ways: &Ways, hosts: impl Iterator<Item = &'a str>) -> Result<Self, Failure> {
        let (sender, events) = mpsc::channel();
        let mut ring = Self { members: Vec::new(), events, pinged: Instant::now() };
        for (at, host) in hosts.enumerate() {
            ring.members.push(connect(&ways.to(host)?, at, sender.clone())?);
        }
        Ok(ring)
    }

    /// The number of hosts.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Says something to one host. Whether that was lost shows in the answer.
    pub(super) fn say(&mut self, at: usize, message: &ToPart) {
        if let Some(to) = self.members.get_mut(at).and_then(|it| it.to.as_mut()) {
            let _ = talk::send(to, message);
        }
    }

    /// Says the same to all.
    pub(super) fn say_all(&mut self, message: &ToPart) {
        (0..self.len()).for_each(|at| self.say(at, message));
    }

    /// Says the same to all, and waits for the answer that each of them is to give.
    pub(super) fn ask_all<T>(
        &mut self,
        message: &ToPart,
        accept: impl Fn(FromPart) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        self.say_all(message);
        self.hear_all(accept)
    }

    /// Waits until each host has answered.
    pub(super) fn hear_all<T>(&mut self, accept: impl Fn(FromPart) -> Option<T>) -> Result<Vec<T>, Failure> {
        let mut answers: Vec<Option<T>> = (0..self.len()).map(|_| None).collect();
        while answers.iter().any(Option::is_none) {
            let (at, event) = self.next()?;
            let host = self.members.get(at).map(|it| it.host.clone()).unwrap_or_default();
            match event {
                Event::Lost(why) => return Err(anyhow!("{host}: {why}").into()),
                Event::Said(FromPart::Failed { kind, reason }) => {
                    return Err(Failure::of_kind(kind, anyhow!("{host}: {reason}")));
                }
                Event::Said(said) => {
                    let shown = format!("{said:?}");
                    let answer = accept(said).ok_or_else(|| {
                        Failure::from(anyhow!("{host} answers {shown}: install one version of Rekindle on all hosts"))
                    })?;
                    if let Some(place) = answers.get_mut(at) {
                        *place = Some(answer);
                    }
                }
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// The next thing that happens, other than a sign of life.
    fn next(&mut self) -> Result<(usize, Event), Failure> {
        loop {
            // Whatever else is heard meanwhile.
            if self.pinged.elapsed() >= PING {
                self.ping();
            }
            match self.events.recv_timeout(PING.saturating_sub(self.pinged.elapsed())) {
                Ok((at, event)) => {
                    let Some(member) = self.members.get_mut(at) else { continue };
                    member.asked = None;
                    member.is_open &= !matches!(event, Event::Lost(_));
                    if !matches!(event, Event::Said(FromPart::Pong)) {
                        return Ok((at, event));
                    }
                }
                // All that they have said has been heard.
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(at) = self.members.iter().position(|it| it.is_open && it.is_silent()) {
                        return Ok((at, Event::Lost(format!("it has been silent for {} seconds", SILENCE.as_secs()))));
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(anyhow!("all connections have ended").into()),
            }
        }
    }

    /// Tells all that the coordinator lives.
    fn ping(&mut self) {
        self.pinged = Instant::now();
        self.say_all(&ToPart::Ping);
        self.members.iter_mut().for_each(|it| it.asked = it.asked.or(Some(self.pinged)));
    }

    /// Gives up: closes all connections, and waits until each host has ended its part, or does not answer any more. Returns the hosts
    /// of which that is not known.
    pub(super) fn give_up(mut self) -> Vec<String> {
        self.members.iter_mut().for_each(|it| it.to = None);
        let began = Instant::now();
        let open = |it: &Member| it.is_open && !it.is_silent();
        let (mut left, mut doubtful): (Vec<_>, Vec<_>) =
            (0..self.len()).partition(|at| self.members.get(*at).is_some_and(open));
        while !left.is_empty() && began.elapsed() < LAST {
            match self.events.recv_timeout(PING) {
                Ok((at, Event::Lost(_))) => left.retain(|it| *it != at),
                Ok((_, Event::Said(_))) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        doubtful.extend(left);
        doubtful.iter().filter_map(|at| self.members.get(*at)).map(|it| it.host.clone()).collect()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for member in &mut self.members {
            member.to = None;
        }
        let began = Instant::now();
        let is_over = |it: &mut Member| !matches!(it.child.try_wait(), Ok(None));
        // A host may have something to wait for; the connection's process need not be waited for then.
        while !self.members.iter_mut().all(is_over) && began.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

fn connect(way: &Via, at: usize, events: Sender<(usize, Event)>) -> Result<Member, Failure> {
    let mut child = way.start()?;
    let (to, from) = (child.stdin.take(), child.stdout.take().context("a process without its pipe")?);
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        loop {
            let event = match talk::receive(&mut from) {
                Ok(said) => Event::Said(said),
                Err(error) => Event::Lost(error.to_string()),
            };
            let is_over = matches!(event, Event::Lost(_));
            if events.send((at, event)).is_err() || is_over {
                return;
            }
        }
    });
    Ok(Member { host: way.name().to_owned(), to, child, asked: None, is_open: true })
}

/// Asks one host one question, by a connection of its own.
pub(super) fn ask(ways: &Ways, host: &str, message: &ToPart) -> Result<FromPart, Failure> {
    let mut ring = Ring::open(ways, [host].into_iter())?;
    let mut answers = ring.ask_all(message, Some)?;
    answers.pop().ok_or_else(|| anyhow!("{host} does not answer").into())
}
