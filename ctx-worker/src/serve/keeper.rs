//! The keeper of a deeply suspended client: a worker that has nothing on GPUs any more, keeps its client's connection, memory and
//! saved state, and executes nothing ever again. Another worker takes the client over when it resumes.
//!
//! ```text
//!   Quiesced ──Suspend{deep}──> Keeper: the client's commands wait in the ring; when there is one, NeedsRoom again and again
//!                                 │ Kept, SaveCode: the daemon has another worker load the client
//!                                 │ HandOver: the connection is read no more; that worker gets it, and a socket that leads here
//!   the other worker ──ASKS──────►│ on that socket, at its `Open`
//!                    ◄──YOURS─────┘ and this process ends
//! ```
//!
//! Exactly one worker executes the client's commands: a keeper executes none, and a worker that takes a client over executes none
//! before it has read `YOURS`, which the keeper writes once and to one worker only. A worker or daemon that dies before that
//! changes nothing: the keeper goes on, with the client suspended, and joins the next daemon as all workers do.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rekindle_wire::control::{self, Suspension, WorkerReply, WorkerRequest};
use rekindle_wire::frame::Message;
use rekindle_wire::ring::Consumer;
use tracing::info;

use crate::checkpoint::engine::small_thread;
use crate::checkpoint::suspend::Kept;
use crate::serve::channel::{Asker, Event};
use crate::serve::refusal::Refusal;
use crate::serve::request_loop::{News, Server};
use crate::serve::state::{Closed, Heir, Keeper, State};
use crate::session::share::Withdrawn;

/// How often a keeper whose client has a command asks for another worker.
const ASK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a keeper sleeps at a time.
const SLEEP: Duration = Duration::from_secs(5);

/// What the worker that takes over writes, and what the keeper answers.
const ASKS: u8 = b'?';
const YOURS: u8 = b'!';

/// The worker that is to take the client over: the latest that the daemon has named.
type Named = Arc<Mutex<Option<Heir>>>;

impl Keeper {
    pub(super) fn new(consumer: Consumer, kept: Kept, bytes: u64, hold: bool) -> Box<Self> {
        Box::new(Self { consumer, kept, bytes, hold, asked: None, heir: Named::default() })
    }

    /// For listings.
    pub(super) fn describe(&self) -> Suspension {
        Suspension { bytes: self.bytes, hold: self.hold, waits_for_room: self.asked.is_some(), deep: true }
    }

    /// Has the worker at the other end of this socket become the client's, once it asks. It counts the memory from here on,
    /// which `withdraw` withdraws.
    fn name_heir(&self, socket: UnixStream, withdraw: impl FnOnce() -> Vec<Withdrawn>) -> io::Result<()> {
        let (socket, heir) = (Arc::new(socket), Arc::clone(&self.heir));
        let mut current = heir.lock().unwrap_or_else(PoisonError::into_inner);
        // An earlier one, whose end its thread has not seen yet.
        forget(&mut current);
        *current = Some(Heir { socket: Arc::clone(&socket), memory: withdraw() });
        drop(current);
        let waiting = Arc::clone(&heir);
        let begun = small_thread("heir").spawn(move || give_to(&socket, &waiting));
        begun.map(drop).inspect_err(|_| forget(&mut heir.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// A worker that does not come for the client: its keeper counts the memory again.
fn forget(heir: &mut Option<Heir>) {
    if let Some(heir) = heir.take() {
        heir.memory.iter().for_each(Withdrawn::put_back);
    }
}

/// Waits until the worker asks for the client. If it is still to have the client, gives the client away, and ends this process.
fn give_to(socket: &Arc<UnixStream>, heir: &Named) {
    let asks = matches!((&**socket).read(&mut [0]), Ok(1));
    // Held until the process has ended: nobody else becomes the heir meanwhile.
    let mut current = heir.lock().unwrap_or_else(PoisonError::into_inner);
    if !current.as_ref().is_some_and(|it| Arc::ptr_eq(&it.socket, socket)) {
        return;
    }
    if asks && (&**socket).write_all(&[YOURS]).is_ok() {
        info!("another worker has taken the client over");
        // SAFETY: ends the process without the driver's exit handlers; the kernel frees everything.
        unsafe { libc::_exit(0) }
    }
    forget(&mut current);
}

/// Takes a client over from its keeper, and waits until that has ended: none of its threads touches the ring any more.
pub(super) fn take_over(mut keeper: &UnixStream) -> io::Result<()> {
    let mut answer = [0];
    keeper.write_all(&[ASKS])?;
    keeper.read_exact(&mut answer)?;
    if answer != [YOURS] {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // The end shows as the end of the connection, or as an error.
    while matches!(keeper.read(&mut answer), Ok(1..)) {}
    Ok(())
}

impl Server {
    /// Gives everything back that is on GPUs, and becomes the client's keeper.
    pub(super) fn keep(&mut self, closed: Closed, kept: Kept, hold: bool) -> (Box<Keeper>, u64) {
        let began = Instant::now();
        let bytes = self.executor.leave_gpus();
        info!(bytes, ms = began.elapsed().as_millis() as u64, hold, "suspended deeply");
        (Keeper::new(closed.consumer, kept, bytes, hold), bytes)
    }

    /// Waits until there is news. Meanwhile asks for another worker if the client has a command.
    pub(super) fn wait_kept(&self, keeper: &mut Keeper, events: &Receiver<Event>) -> News {
        loop {
            match events.try_recv() {
                Ok(event) => return News::Event(event),
                Err(TryRecvError::Disconnected) => return News::End,
                Err(TryRecvError::Empty) => {}
            }
            if keeper.hold {
                return events.recv().map_or(News::End, News::Event);
            }
            // Commands that the quiesce has deferred are not in the ring any more.
            if keeper.consumer.ready() || self.executor.has_commands_held_back() {
                keeper.asked = Some(Instant::now());
                self.channel.needs_room();
                if let Ok(event) = events.recv_timeout(ASK_INTERVAL) {
                    return News::Event(event);
                }
            } else if !self.channel.news.swap(false, Ordering::AcqRel) {
                // An event that arrives after the check above sets `news`.
                self.sleep(&keeper.consumer, SLEEP);
            }
        }
    }

    /// Serves the requests to a keeper. None of them touches the driver.
    pub(super) fn ask_keeper(
        &mut self,
        mut keeper: Box<Keeper>,
        message: Message<WorkerRequest>,
        asker: &Asker,
    ) -> State {
        let Message { body, blob, fds } = message;
        let answered = match body {
            WorkerRequest::Kept => kept(&keeper.kept),
            WorkerRequest::HandOver => self.hand_over(&keeper, fds),
            // Its client's commands wait for a request to resume from now on, or do not.
            WorkerRequest::Suspend { hold, .. } => {
                keeper.hold = hold;
                keeper.asked = keeper.asked.filter(|_| !hold);
                Ok((WorkerReply::Suspended { bytes: 0 }, Vec::new(), Vec::new()))
            }
            WorkerRequest::SaveCode { hash } => {
                self.save_code(&hash, fds, Arc::clone(asker));
                return State::Keeper(keeper);
            }
            WorkerRequest::GiveWay => return State::Keeper(keeper),
            // A new daemon has taken this worker over.
            WorkerRequest::Open => Ok((WorkerReply::Done, Vec::new(), Vec::new())),
            body @ (WorkerRequest::Describe
            | WorkerRequest::Calls
            | WorkerRequest::Access
            | WorkerRequest::Check
            | WorkerRequest::Moment { .. }
            | WorkerRequest::Remember { .. }
            | WorkerRequest::Shares) => {
                let state = State::Keeper(keeper);
                let answered = self.ask(&state, Message { body, blob, fds });
                let (reply, blob) = answered.unwrap_or_else(|it| (WorkerReply::Failed(it.into()), Vec::new()));
                self.channel.answer(asker, reply, blob);
                return state;
            }
            _ => Err(Refusal::Kept),
        };
        let failed = |refusal: Refusal| (WorkerReply::Failed(refusal.into()), Vec::new(), Vec::new());
        let (reply, blob, files) = answered.unwrap_or_else(failed);
        self.channel.answer_with(asker, reply, blob, files);
        State::Keeper(keeper)
    }

    fn hand_over(&mut self, keeper: &Keeper, fds: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let socket =
            fds.into_iter().next().ok_or(Refusal::Lacks("no socket of another worker came with the request"))?;
        let connection = self.channel.hand_over().map_err(Refusal::Io)?;
        let withdraw = || self.executor.memory.count_no_more();
        keeper.name_heir(socket.into(), withdraw).map_err(Refusal::Io)?;
        Ok((WorkerReply::HandedOver, Vec::new(), vec![connection]))
    }
}

type Answer = (WorkerReply, Vec<u8>, Vec<OwnedFd>);

fn kept(kept: &Kept) -> Result<Answer, Refusal> {
    let reader = kept.reader.as_ref().ok_or(Refusal::Lacks("the content is being loaded"))?;
    let data = reader.files().map(|(it, _)| control::DataFile { depth: it.depth, index: it.index }).collect();
    let files = reader.files().map(|(_, file)| file.try_clone().map(OwnedFd::from));
    let files = files.collect::<io::Result<_>>().map_err(Refusal::Io)?;
    let (hash_algorithm, hash_key) = reader.key().to_parts();
    Ok((WorkerReply::Kept { data, hash_algorithm, hash_key }, kept.client.to_bytes()?, files))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    fn heir(socket: &Arc<UnixStream>) -> Heir {
        Heir { socket: Arc::clone(socket), memory: Vec::new() }
    }

    #[test]
    fn a_worker_that_is_not_the_heir_any_more_gets_no_client() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_other, later) = UnixStream::pair().unwrap();
        let named = Named::default();
        *named.lock().unwrap() = Some(heir(&Arc::new(later)));
        let asking = std::thread::spawn(move || take_over(&theirs));
        // It returns: this process has not ended.
        give_to(&Arc::new(ours), &named);
        assert!(named.lock().unwrap().is_some());
        assert_eq!(asking.join().unwrap().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_worker_that_takes_over_waits_for_the_end_of_the_keeper() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&ended);
        let keeper = std::thread::spawn(move || {
            let mut asked = [0];
            theirs.read_exact(&mut asked).unwrap();
            theirs.write_all(&[YOURS]).unwrap();
            // Whoever does not wait for the end comes before this.
            std::thread::sleep(Duration::from_millis(50));
            ends.store(true, Ordering::Release);
            asked
        });
        take_over(&ours).unwrap();
        assert!(ended.load(Ordering::Acquire));
        assert_eq!(keeper.join().unwrap(), [ASKS]);
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(b"x").unwrap();
        assert_eq!(take_over(&ours).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_worker_that_dies_before_it_asks_changes_nothing() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ours = Arc::new(ours);
        let named = Named::default();
        *named.lock().unwrap() = Some(heir(&ours));
        drop(theirs);
        give_to(&ours, &named);
        assert!(named.lock().unwrap().is_none());
    }
}
