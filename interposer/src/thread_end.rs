//! The end of a thread that has used its own default stream: the stream's attributes are forgotten, and the worker lets
//! the stream go.

use std::cell::Cell;

use rekindle_wire::command::{THREAD_END, ThreadEnd};

use crate::client::{self, Call};

/// Says that the thread ends when it is dropped.
struct Ending;

thread_local! {
    static ENDING: Ending = const { Ending };
    /// Whether this thread does a part of another's work, whose streams it uses.
    static HELPS: Cell<bool> = const { Cell::new(false) };
}

/// From now on, the end of the calling thread is told.
pub(crate) fn expect() {
    if !HELPS.get() {
        // A thread that is ending already has told it.
        let _ = ENDING.try_with(|_| ());
    }
}

/// The calling thread's end does not matter: it helps another.
pub(crate) fn ignore() {
    HELPS.set(true);
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Ok(client) = client::get() {
            client.streams.attributes.forget_thread(client::thread_number());
            let mut call = Call::unchecked(client, THREAD_END, 0);
            call.put(&ThreadEnd {});
            call.send();
        }
    }
}
