//! The driver's log of errors (`cuLogs*`): messages that explain why calls have failed, for programs that ask.
//!
//! ```text
//!   message ──> every callback
//!          └──> the last 25,600 bytes of messages ── from an iterator on ──> a buffer or a file
//! ```

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::types::*;

/// As many bytes of messages are kept (`cuda.h` at `cuLogsDumpToMemory`).
const KEPT: usize = 25_600;
/// Stands for messages that a buffer has no room for, or that are no longer there.
const TRUNCATED: &str = "(earlier messages are left out)\n";
/// `CU_LOG_LEVEL_ERROR`.
const ERROR: u32 = 0;

/// `CUlogsCallback`.
pub type Callback = unsafe extern "C" fn(data: *mut c_void, level: u32, message: *mut c_char, length: usize);

#[derive(Clone, Copy, Debug)]
struct Listener {
    handle: u64,
    function: Callback,
    /// The address of the program's data.
    data: usize,
}

#[derive(Debug)]
struct State {
    /// Messages, each with its newline. The last has the number before `next`.
    messages: VecDeque<String>,
    next: u32,
    bytes: usize,
    listeners: Vec<Listener>,
    next_handle: u64,
    /// How many threads call callbacks now.
    calling: usize,
}

thread_local! {
    /// Whether this thread is in a callback.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

impl State {
    /// The number of the first message that is kept.
    fn first(&self) -> u32 {
        self.next.wrapping_sub(self.messages.len() as u32)
    }
}

/// A process's log.
#[derive(Debug)]
pub struct Logs(Mutex<State>);

impl Default for Logs {
    fn default() -> Self {
        Self::new()
    }
}

impl Logs {
    /// A log without messages.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(State {
            messages: VecDeque::new(),
            next: 0,
            bytes: 0,
            listeners: Vec::new(),
            next_handle: 1,
            calling: 0,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change leaves the state valid.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message of one line, and tells it to all callbacks. What these do with the driver adds messages, but is not told.
    pub fn write(&self, message: &str) {
        let nested = IN_CALLBACK.get();
        let listeners = {
            let mut state = self.state();
            let line = format!("{message}\n");
            state.bytes += line.len();
            state.messages.push_back(line);
            state.next = state.next.wrapping_add(1);
            while state.bytes > KEPT
                && let Some(oldest) = state.messages.pop_front()
            {
                state.bytes -= oldest.len();
            }
            if nested || state.listeners.is_empty() {
                return;
            }
            state.calling += 1;
            state.listeners.clone()
        };
        IN_CALLBACK.set(true);
        for listener in listeners {
            let mut text = message.as_bytes().to_vec();
            text.push(0);
            // SAFETY: who registered the function promised that it may be called with this data until it is unregistered, and
            // `unregister` waits for this call; the text ends in a NUL.
            unsafe {
                (listener.function)(listener.data as *mut c_void, ERROR, text.as_mut_ptr().cast(), message.len())
            };
        }
        IN_CALLBACK.set(false);
        self.state().calling -= 1;
    }

    /// `cuLogsRegisterCallback`: returns a handle.
    ///
    /// # Safety
    /// Until [`Logs::unregister`] the function may be called with this data, by any thread.
    pub unsafe fn register(&self, function: Callback, data: *mut c_void) -> u64 {
        let mut state = self.state();
        let handle = state.next_handle;
        state.next_handle += 1;
        state.listeners.push(Listener { handle, function, data: data as usize });
        handle
    }

    /// `cuLogsUnregisterCallback`. Calls of the function in other threads have ended when it returns, unless a callback unregisters.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a handle of no callback.
    pub fn unregister(&self, handle: u64) -> Result<(), CUresult> {
        let mut state = self.state();
        let before = state.listeners.len();
        state.listeners.retain(|it| it.handle != handle);
        if state.listeners.len() == before {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        while state.calling > 0 && !IN_CALLBACK.get() {
            drop(state);
            std::thread::yield_now();
            state = self.state();
        }
        Ok(())
    }

    /// `cuLogsCurrent`: where the next message will be.
    #[must_use]
    pub fn current(&self) -> u32 {
        self.state().next
    }

    /// The messages from an iterator on (all without one), in at most `room` bytes, and the iterator behind them. The last
    /// message is always the latest.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where not even the latest message has room.
    pub fn read(&self, iterator: Option<u32>, room: usize) -> Result<(String, u32), CUresult> {
        let state = self.state();
        let first = state.first();
        let from = iterator.unwrap_or(first);
        // Numbers wrap around: what lies behind the next message was there long ago.
        let wanted = state.next.wrapping_sub(from) as usize;
        let skipped = state.messages.len().saturating_sub(wanted);
        let lost = wanted > state.messages.len();
        let lines: Vec<&str> = state.messages.iter().skip(skipped).map(String::as_str).collect();
        if lines.is_empty() {
            return Ok((String::new(), state.next));
        }
        let all: usize = lines.iter().map(|line| line.len()).sum();
        let is_cut = lost || all > room;
        let mut left = if is_cut { room.saturating_sub(TRUNCATED.len()) } else { room };
        let fits = |line: &&&str| {
            let fits = line.len() <= left;
            left = left.saturating_sub(line.len());
            fits
        };
        let count = lines.iter().rev().take_while(fits).count();
        if count == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let head = if is_cut { TRUNCATED } else { "" };
        Ok((head.to_owned() + &lines[lines.len() - count..].concat(), state.next))
    }

    /// `cuLogsDumpToFile`: the messages from an iterator on, and the iterator behind them.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where the file cannot be written.
    pub fn write_file(&self, iterator: Option<u32>, path: &std::path::Path) -> Result<u32, CUresult> {
        let (text, next) = self.read(iterator, usize::MAX)?;
        std::fs::write(path, text).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn an_iterator_gets_the_messages_behind_it() {
        let logs = Logs::new();
        assert_eq!(logs.read(None, 0), Ok((String::new(), 0)));
        // A number that no iterator had.
        assert_eq!(logs.read(Some(77), 0), Ok((String::new(), 0)));
        logs.write("one");
        let iterator = logs.current();
        logs.write("two");
        logs.write("three");
        assert_eq!(logs.read(Some(iterator), 100), Ok(("two\nthree\n".to_owned(), 3)));
        assert_eq!(logs.read(None, 100), Ok(("one\ntwo\nthree\n".to_owned(), 3)));
        assert_eq!(logs.read(Some(3), 0), Ok((String::new(), 3)));
        for room in 0..60 {
            let text = logs.read(Some(77), room).map_or(String::new(), |(text, _)| text);
            assert!(text.len() <= room, "{text} in {room}");
        }
    }

    #[test]
    fn what_has_no_room_is_left_out_and_that_is_said() {
        let logs = Logs::new();
        logs.write("one");
        logs.write("two");
        assert_eq!(
            (logs.read(None, 8).unwrap().0, logs.read(None, 7)),
            ("one\ntwo\n".into(), Err(CUDA_ERROR_INVALID_VALUE))
        );
        logs.write(&"y".repeat(100));
        logs.write("last");
        assert_eq!(logs.read(None, TRUNCATED.len() + 50).unwrap().0, format!("{TRUNCATED}last\n"));
        let long = "x".repeat(1000);
        (0..40).for_each(|_| logs.write(&long));
        let (text, next) = logs.read(Some(0), usize::MAX).unwrap();
        assert!(text.starts_with(TRUNCATED) && text.len() <= KEPT + TRUNCATED.len() && next == 44);
        assert_eq!(text.matches('\n').count(), 1 + KEPT / 1001);
        let (text, _) = logs.read(Some(43), 2000).unwrap();
        assert_eq!(text, long + "\n");
    }

    unsafe extern "C" fn note(data: *mut c_void, level: u32, message: *mut c_char, length: usize) {
        // SAFETY: the test's own list, and a text of that length that ends in a NUL.
        let (heard, text) = unsafe {
            (&*data.cast::<Mutex<Vec<String>>>(), std::ffi::CStr::from_ptr(message).to_string_lossy().into_owned())
        };
        assert_eq!((text.len(), level), (length, ERROR));
        heard.lock().unwrap().push(text);
    }

    static NESTED: Logs = Logs::new();

    unsafe extern "C" fn call_the_driver(data: *mut c_void, _: u32, _: *mut c_char, _: usize) {
        NESTED.write("of the callback");
        // SAFETY: the test's own handle.
        let handle = unsafe { &*data.cast::<AtomicU64>() };
        NESTED.unregister(handle.load(Relaxed)).unwrap();
    }

    #[test]
    fn a_callback_may_call_the_driver_and_unregister_itself() {
        let handle = AtomicU64::new(0);
        // SAFETY: the handle outlives the registration.
        handle.store(unsafe { NESTED.register(call_the_driver, (&raw const handle) as *mut c_void) }, Relaxed);
        NESTED.write("first");
        assert_eq!(NESTED.unregister(handle.load(Relaxed)), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(NESTED.read(None, 100).unwrap().0, "first\nof the callback\n");
    }

    #[test]
    fn a_callback_hears_each_message_until_it_is_unregistered() {
        let (logs, heard) = (Logs::new(), Mutex::new(Vec::<String>::new()));
        logs.write("before");
        // SAFETY: the list outlives the registration.
        let handle = unsafe { logs.register(note, (&raw const heard) as *mut c_void) };
        logs.write("now");
        assert_eq!((logs.unregister(handle), logs.unregister(handle)), (Ok(()), Err(CUDA_ERROR_INVALID_VALUE)));
        logs.write("after");
        assert_eq!(*heard.lock().unwrap(), ["now"]);
    }
}
