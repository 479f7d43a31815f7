//! A program whose caller is lost. It may hold processes, and lives until somebody settles that.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::frames::{Kind, LONGEST};
use super::pipes::{self, Sink, Source};

/// Such a program's pipes.
pub(super) struct Orphan {
    /// A pidfd. None: it has ended.
    pub(super) program: Option<OwnedFd>,
    /// Its input, with what its caller has said before the loss.
    pub(super) input: Sink,
    pub(super) sources: Vec<Source>,
}

impl Orphan {
    /// Tells it what its caller has said, then that nothing more comes, passes on its errors, and throws away what it answers, until it has
    /// ended. Processes that it has left may have its pipes, and nobody waits for them.
    pub(super) fn attend(mut self) {
        self.input.end();
        let (mut piece, mut has_ended) = (vec![0; LONGEST], self.program.is_none());
        while !has_ended || !self.sources.is_empty() {
            let Ok(ready) = self.wait(has_ended) else { return };
            let (on_program, on_input, on_sources) = ready;
            if on_input {
                self.input.write();
            }
            let mut ready = on_sources.into_iter();
            self.sources.retain(|it| match ready.next() {
                Some(true) => pass_on(it, &mut piece),
                // What a program has said that has ended is there already.
                _ => !has_ended,
            });
            if on_program {
                has_ended = true;
                self.input.close();
            }
        }
    }

    /// Waits until the program has ended, its input takes more, or it has said something.
    fn wait(&self, has_ended: bool) -> Result<(bool, bool, Vec<bool>), Errno> {
        let program = self.program.as_ref().filter(|_| !has_ended);
        let input = self.input.wanted();
        let mut polled = Vec::new();
        polled.extend(program.map(|it| PollFd::new(it, PollFlags::IN)));
        polled.extend(input.map(|it| PollFd::new(it, PollFlags::OUT)));
        polled.extend(self.sources.iter().map(|it| PollFd::new(&it.from, PollFlags::IN)));
        let mut ready = pipes::ready(polled, has_ended.then(Timespec::default).as_ref())?;
        let mut next = |is_there: bool| is_there && ready.next() == Some(true);
        let (on_program, on_input) = (next(program.is_some()), next(input.is_some()));
        Ok((on_program, on_input, ready.collect()))
    }
}

/// Passes on a piece. Returns whether more may come.
fn pass_on(source: &Source, piece: &mut [u8]) -> bool {
    match rustix::io::read(source.from.as_fd(), &mut *piece) {
        Ok(0) => false,
        Ok(length) => {
            if source.kind == Kind::Errors {
                let _ = io::stderr().write_all(piece.get(..length).unwrap_or_default());
            }
            true
        }
        Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
    }
}
