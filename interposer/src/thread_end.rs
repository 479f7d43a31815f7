//! The end of a thread that has used its own default stream: the stream's attributes are forgotten, and the worker lets
//! the stream go.

use rekindle_wire::command::{THREAD_END, ThreadEnd};

use crate::client::{self, Call};
use crate::process::calling_thread;

/// Tells the worker that the calling thread ends.
pub(crate) fn report() {
    if let Ok(client) = client::get() {
        client.streams.attributes.forget_thread(calling_thread::number());
        let mut call = Call::unchecked(client, THREAD_END, 0);
        call.put(&ThreadEnd {});
        call.send();
    }
}
