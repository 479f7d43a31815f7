//! What reaches the process that takes part in a cut.

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::super::talk::{FromPart, SILENCE, ToPart};
use super::gate::Waiting;
use super::place::Place;
use super::spoken;
use crate::failure::Failure;
use crate::migrate::talk;

/// What happens.
pub(super) enum Event {
    /// The coordinator says something.
    Said(ToPart),
    /// Its connection has closed, or is silent.
    Lost,
    /// CRIU waits in its script.
    Gate(Waiting),
    /// CRIU has ended.
    Ended(ExitStatus),
    /// Somebody asks, by another connection.
    Asked(ToPart, UnixStream),
}

/// All that happens.
pub(super) struct Events {
    events: Receiver<Event>,
    sender: Sender<Event>,
}

impl Events {
    /// Hears the coordinator. From now on its signs of life are answered.
    pub(super) fn of_coordinator() -> Self {
        let (sender, events) = mpsc::channel();
        let said = sender.clone();
        std::thread::spawn(move || hear_coordinator(&said));
        Self { events, sender }
    }

    /// Hears the gate and those who settle as well.
    pub(super) fn hear(&self, place: &Place) -> Result<(), Failure> {
        let (gates, settlers) = (place.listen_for_gates()?, place.listen_for_settlers()?);
        let waiting = self.sender.clone();
        std::thread::spawn(move || hear_gates(&gates, &waiting));
        let asked = self.sender.clone();
        std::thread::spawn(move || hear_settlers(&settlers, &asked));
        Ok(())
    }

    /// Starts CRIU. Its end is an event. Returns its process.
    pub(super) fn start(&self, mut command: Command) -> Result<i32, Failure> {
        // Its output is the tree's, and this process's is the connection.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut criu: Child = command.spawn().context("cannot run criu")?;
        let (pid, sender) = (criu.id() as i32, self.sender.clone());
        std::thread::spawn(move || {
            if let Ok(status) = criu.wait() {
                let _ = sender.send(Event::Ended(status));
            }
        });
        Ok(pid)
    }

    /// The next event.
    pub(super) fn next(&self) -> Event {
        // This has a sender itself.
        self.events.recv().unwrap_or(Event::Lost)
    }

    /// The next event, if there is one in time.
    pub(super) fn within(&self, time: Duration) -> Option<Event> {
        match self.events.recv_timeout(time) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Event::Lost),
        }
    }
}

/// Hears what the coordinator says, and answers its signs of life.
fn hear_coordinator(events: &Sender<Event>) {
    let Ok(mut input) = spoken::input() else {
        let _ = events.send(Event::Lost);
        return;
    };
    let mut heard = Instant::now();
    loop {
        let event = match is_readable(&input) {
            true => match talk::receive(&mut input) {
                Ok(ToPart::Ping) => {
                    heard = Instant::now();
                    let _ = spoken::answer(&FromPart::Pong);
                    continue;
                }
                Ok(said) => {
                    heard = Instant::now();
                    Event::Said(said)
                }
                Err(_) => Event::Lost,
            },
            false if heard.elapsed() < SILENCE => continue,
            false => Event::Lost,
        };
        let is_over = matches!(event, Event::Lost);
        if events.send(event).is_err() || is_over {
            return;
        }
    }
}

/// Whether something is there to read within a second.
fn is_readable(input: &File) -> bool {
    let second = Timespec { tv_sec: 1, tv_nsec: 0 };
    let mut polled = [PollFd::new(input, PollFlags::IN)];
    // An interrupted call counts as nothing yet.
    poll(&mut polled, Some(&second)).is_ok_and(|ready| ready > 0)
}

fn hear_gates(listener: &UnixListener, events: &Sender<Event>) {
    for waiting in listener.incoming().flatten().filter_map(Waiting::hear) {
        if events.send(Event::Gate(waiting)).is_err() {
            return;
        }
    }
}

fn hear_settlers(listener: &UnixListener, events: &Sender<Event>) {
    for mut asker in listener.incoming().flatten() {
        if let Ok(said) = talk::receive(&mut asker)
            && events.send(Event::Asked(said, asker)).is_err()
        {
            return;
        }
    }
}
