//! One command on its way into the ring, and the reply to it.

use std::cell::Cell;
use std::ffi::CStr;
use std::thread::LocalKey;
use std::time::Duration;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::Parameters;
use rekindle_wire::ring::CommandHeader;
use rekindle_wire::{layout, reply, ring};

use super::{Connection, WORKER_DIED};
use crate::process::calling_thread;

thread_local! {
    /// The buffer of this thread's commands.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    /// The buffer of this thread's replies.
    static REPLY: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A thread that is ending has lost its buffers, but may still call: it gets new ones.
fn taken(buffer: &'static LocalKey<Cell<Vec<u8>>>) -> Vec<u8> {
    buffer.try_with(Cell::take).unwrap_or_default()
}

fn give_back(buffer: &'static LocalKey<Cell<Vec<u8>>>, bytes: Vec<u8>) {
    let _ = buffer.try_with(|b| b.set(bytes));
}

/// One command on its way to the worker.
pub(crate) struct Command {
    connection: &'static Connection,
    header: CommandHeader,
    writer: Writer,
}

impl Command {
    /// Begins a command of the calling thread in a context, which may be none.
    pub(crate) fn new(connection: &'static Connection, number: u16, context: CUcontext) -> Self {
        let header = CommandHeader { call: number, context, thread: calling_thread::number(), ..Default::default() };
        Self { connection, header, writer: Writer::reusing(taken(&BUFFER)) }
    }

    /// The context that the command is for, 0 for none.
    pub(crate) fn context(&self) -> CUcontext {
        self.header.context
    }

    /// Puts the parameters of a command, which are those of its number.
    pub(crate) fn put(&mut self, parameters: &impl Parameters) {
        debug_assert!(declares(parameters, self.header.call));
        parameters.append(&mut self.writer);
    }

    pub(crate) fn word(&mut self, word: u64) {
        self.writer.word(word);
    }

    pub(crate) fn text(&mut self, text: &CStr) {
        self.writer.text(text);
    }

    /// Sends without waiting for the worker to do it; returns where the ring's end is behind the command.
    pub(crate) fn send(mut self) -> Result<u64, CUresult> {
        let result = self.enqueue();
        self.give_buffer_back();
        result
    }

    /// Sends and waits for the reply.
    pub(crate) fn wait(mut self) -> (CUresult, Reply) {
        let connection = self.connection;
        let hint = self.header.thread as usize % layout::REPLIES;
        let slot = loop {
            match reply::claim(&connection.shared, hint) {
                Some(slot) => break slot,
                // More threads wait than there are slots: rare, and none of them waits for this one.
                None if connection.is_alive() => std::thread::sleep(Duration::from_micros(100)),
                None => return (WORKER_DIED, Reply::default()),
            }
        };
        self.header.reply = slot as u16 + 1;
        let mut result = self.enqueue().err().unwrap_or(CUDA_SUCCESS);
        let mut answer = Reply { bytes: taken(&REPLY), at: 0 };
        if result == CUDA_SUCCESS {
            if reply::wait(&connection.shared.reply(slot).state, connection.spin(), || connection.is_alive()) {
                result = reply::take(&connection.shared, slot, &mut answer.bytes);
            } else {
                result = WORKER_DIED;
            }
        }
        reply::release(&connection.shared, slot);
        self.give_buffer_back();
        (result, answer)
    }

    fn enqueue(&mut self) -> Result<u64, CUresult> {
        let connection = self.connection;
        // A program that has seen the worker's death and ends must not wait for it again.
        if connection.is_known_dead() {
            return Err(WORKER_DIED);
        }
        ring::enqueue(&connection.shared, self.header, self.writer.bytes(), || connection.is_alive()).map_err(|e| {
            match e {
                ring::EnqueueError::TooLarge(_) => CUDA_ERROR_INVALID_VALUE,
                ring::EnqueueError::WorkerGone => WORKER_DIED,
            }
        })
    }

    fn give_buffer_back(&mut self) {
        give_back(&BUFFER, std::mem::take(&mut self.writer).into_bytes());
    }
}

fn declares<P: Parameters>(_: &P, call: u16) -> bool {
    P::COMMANDS.contains(&call)
}

/// Out parameters of a call.
#[derive(Default)]
pub(crate) struct Reply {
    bytes: Vec<u8>,
    at: usize,
}

impl Reply {
    /// The next word, `None` where the worker sent too little.
    pub(crate) fn word(&mut self) -> Option<u64> {
        let word = Reader::new(self.bytes.get(self.at..)?).word().ok()?;
        self.at += 8;
        Some(word)
    }

    /// A reader of the rest.
    pub(crate) fn rest(&self) -> Reader<'_> {
        Reader::new(self.bytes.get(self.at..).unwrap_or_default())
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        give_back(&REPLY, std::mem::take(&mut self.bytes));
    }
}
