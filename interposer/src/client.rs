//! The attached process: one [`Client`], and [`Call`], which takes a driver call to the worker.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64};
use std::sync::{Mutex, Once};
use std::thread::LocalKey;
use std::time::Duration;

use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::{Attached, Pinned};
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{HELD_ROOM, HeldRoom, Kind, Parameters, THREAD_END};
use rekindle_wire::layout::Shared;
use rekindle_wire::ring::CommandHeader;
use rekindle_wire::{frame, reply, ring};

use crate::copy::Staging;
use crate::process::calling_thread::{self, named_stream};
use crate::process::log;
use crate::state;
use crate::state::arrays::Arrays;
use crate::state::contexts::Contexts;
use crate::state::events::Events;
use crate::state::functions::Functions;
use crate::state::ipc::Opened;
use crate::state::memory::Memory;
use crate::state::streams::Streams;
use crate::state::vmm::Vmm;
use crate::{attach, counts, prints, thread_end};

/// An attached process.
pub(crate) struct Client {
    pub(crate) shared: Shared,
    pub(crate) attached: Attached,
    /// Which of the worker's devices the application sees, in its order (`CUDA_VISIBLE_DEVICES`).
    pub(crate) visible: Vec<usize>,
    pub(crate) contexts: Contexts,
    pub(crate) memory: Memory,
    pub(crate) vmm: Vmm,
    pub(crate) opened: Opened,
    pub(crate) functions: Functions,
    pub(crate) streams: Streams,
    pub(crate) arrays: Arrays,
    pub(crate) events: Events,
    pub(crate) staging: Staging,
    socket: UnixStream,
    /// One announcement and its descriptor at a time.
    sending: Mutex<()>,
    next_handle: AtomicU64,
    /// Set once the worker is found dead; every later call fails.
    gone: AtomicBool,
}

static CLIENT: AtomicPtr<Client> = AtomicPtr::new(std::ptr::null_mut());
static INITIALISED: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);
/// The connection's descriptor, for the handler in a forked child.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static ATTACHING: Mutex<()> = Mutex::new(());

/// What every call of an application gets once its worker has died.
const WORKER_DIED: CUresult = CUDA_ERROR_LAUNCH_FAILED;

/// The client, or the error of a call before `cuInit` or in a forked child.
pub(crate) fn get() -> Result<&'static Client, CUresult> {
    if !INITIALISED.load(Acquire) || FORKED.load(Acquire) {
        return Err(CUDA_ERROR_NOT_INITIALIZED);
    }
    attached().ok_or(CUDA_ERROR_NOT_INITIALIZED)
}

fn attached() -> Option<&'static Client> {
    // SAFETY: the pointer is null or a leaked Client.
    unsafe { CLIENT.load(Acquire).as_ref() }
}

/// Attaches if that has not happened yet, and says on stderr why it cannot.
pub(crate) fn ensure_attached() -> Result<&'static Client, CUresult> {
    try_attached(true)
}

/// Attaches if that has not happened yet; `say` is whether a failure is worth a line.
pub(crate) fn try_attached(say: bool) -> Result<&'static Client, CUresult> {
    if FORKED.load(Acquire) {
        return Err(CUDA_ERROR_NOT_INITIALIZED);
    }
    let _one = ATTACHING.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
    if let Some(client) = attached() {
        return Ok(client);
    }
    let connection = attach::attach().map_err(|line| {
        if say {
            log::error(&line);
        }
        CUDA_ERROR_SYSTEM_NOT_READY
    })?;
    static HANDLER: Once = Once::new();
    // SAFETY: the handler only stores to atomics and closes a descriptor, which is allowed in a forked child.
    HANDLER.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(forget_in_child));
    });
    SOCKET.store(connection.socket.as_raw_fd(), Release);
    let visible = state::visible_devices(&connection.attached.devices);
    let client = Box::leak(Box::new(Client {
        shared: connection.shared,
        contexts: Contexts::new(connection.attached.devices.len()),
        memory: Memory::new(),
        vmm: Vmm::default(),
        opened: Opened::default(),
        functions: Functions::default(),
        streams: Streams::default(),
        arrays: Arrays::default(),
        events: Events::default(),
        staging: Staging::new(connection.staging),
        attached: connection.attached,
        visible,
        socket: connection.socket,
        sending: Mutex::new(()),
        next_handle: AtomicU64::new(1),
        gone: AtomicBool::new(false),
    }));
    CLIENT.store(client, Release);
    crate::graphs::register();
    counts::begin(client.shared);
    calling_thread::at_end(thread_end::report);
    Ok(client)
}

/// `cuInit`.
pub(crate) fn initialise() -> CUresult {
    match ensure_attached() {
        Ok(client) if client.visible.is_empty() => CUDA_ERROR_NO_DEVICE,
        Ok(_) => {
            INITIALISED.store(true, Release);
            CUDA_SUCCESS
        }
        Err(error) => error,
    }
}

/// In a forked child CUDA is not initialised and cannot be, as with the real driver; the ring is not even mapped.
extern "C" fn forget_in_child() {
    if !CLIENT.load(Acquire).is_null() {
        FORKED.store(true, Release);
        counts::end();
        // SAFETY: the child's own copy of the descriptor; the parent keeps its.
        unsafe { libc::close(SOCKET.load(Acquire)) };
    }
}

impl Client {
    /// Whether the worker is there. Costs a system call.
    pub(crate) fn is_alive(&self) -> bool {
        if self.gone.load(Acquire) {
            return false;
        }
        if attach::is_alive(&self.socket) {
            return true;
        }
        if !self.gone.swap(true, AcqRel) {
            log::error("the worker of this process has died; see the daemon's log. Every CUDA call fails from here on");
        }
        false
    }

    /// The error of a kernel that has broken this process, for good.
    pub(crate) fn sticky_error(&self) -> Result<(), CUresult> {
        match self.shared.header().sticky.load(Acquire) {
            0 => Ok(()),
            sticky => Err(sticky),
        }
    }

    /// The error that every call gets now, if any: the worker is gone, or the context is broken. Then, once, the error
    /// of an earlier call that did not wait.
    pub(crate) fn standing_error(&'static self) -> Result<(), CUresult> {
        let header = self.shared.header();
        if let Err(sticky) = self.sticky_error() {
            prints::deliver(self);
            // A thread whose context is gone hears that first.
            return Err(self
                .contexts
                .current()
                .err()
                .filter(|e| *e == CUDA_ERROR_CONTEXT_IS_DESTROYED)
                .unwrap_or(sticky));
        }
        if self.gone.load(Relaxed) {
            return Err(WORKER_DIED);
        }
        if header.deferred.load(Relaxed) != 0 {
            let deferred = header.deferred.swap(0, AcqRel);
            if deferred != 0 {
                return Err(deferred);
            }
        }
        Ok(())
    }

    /// A handle for a new object.
    pub(crate) fn fresh(&self, kind: Kind) -> u64 {
        kind.handle(self.next_handle.fetch_add(1, Relaxed))
    }

    /// The worker's number of an application's device ordinal.
    pub(crate) fn device(&self, ordinal: CUdevice) -> Result<usize, CUresult> {
        usize::try_from(ordinal).ok().and_then(|o| self.visible.get(o).copied()).ok_or(CUDA_ERROR_INVALID_DEVICE)
    }

    /// The application's ordinal of a worker's device.
    pub(crate) fn ordinal(&self, device: usize) -> CUdevice {
        self.visible.iter().position(|&d| d == device).map_or(-1, |o| o as CUdevice)
    }

    /// How long a waiting caller spins.
    pub(crate) fn spin(&self) -> Duration {
        Duration::from_micros(u64::from(self.shared.header().caller_spin_us.load(Relaxed)))
    }

    /// Sends the memfd of a pinned allocation ahead of its command.
    pub(crate) fn announce_pinned(&self, pinned: Pinned, file: &impl AsRawFd) -> Result<(), CUresult> {
        let _one = self.sending.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        frame::send(&self.socket, &pinned, &[], &[file.as_raw_fd()]).map_err(|_| {
            self.is_alive();
            WORKER_DIED
        })
    }
}

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

fn keep(buffer: &'static LocalKey<Cell<Vec<u8>>>, bytes: Vec<u8>) {
    let _ = buffer.try_with(|b| b.set(bytes));
}

/// One call on its way to the worker.
pub(crate) struct Call {
    client: &'static Client,
    header: CommandHeader,
    writer: Writer,
}

impl Call {
    /// Begins a call in the thread's current context (which may be none).
    pub(crate) fn new(number: u16) -> Result<Self, CUresult> {
        let client = get()?;
        if calling_thread::in_callback() {
            return Err(CUDA_ERROR_NOT_PERMITTED);
        }
        client.standing_error()?;
        Ok(Self::unchecked(client, number, state::contexts::current()))
    }

    /// Begins a call that goes out even when the context is broken.
    pub(crate) fn unchecked(client: &'static Client, number: u16, context: CUcontext) -> Self {
        let header = CommandHeader { call: number, context, thread: calling_thread::number(), ..Default::default() };
        Self { client, header, writer: Writer::reusing(taken(&BUFFER)) }
    }

    /// Begins a call that needs a current context.
    pub(crate) fn in_context(number: u16) -> Result<Self, CUresult> {
        let call = Self::new(number)?;
        if call.header.context == 0 { Err(CUDA_ERROR_INVALID_CONTEXT) } else { Ok(call) }
    }

    /// Puts the parameters of a command, which are those of its number.
    pub(crate) fn put(&mut self, parameters: &impl Parameters) {
        debug_assert!(declares(parameters, self.header.call));
        parameters.append(&mut self.writer);
    }

    pub(crate) fn word(&mut self, word: u64) {
        self.writer.word(word);
    }

    pub(crate) fn device(&mut self, ordinal: CUdevice) -> Result<(), CUresult> {
        let device = self.client.device(ordinal)?;
        self.writer.word(device as u64);
        Ok(())
    }

    pub(crate) fn stream(&mut self, stream: CUstream) -> Result<(), CUresult> {
        self.writer.word(stream_of(stream)?);
        Ok(())
    }

    /// # Safety
    /// `text` is null or ends in a NUL.
    #[allow(dead_code, reason = "for lines of the driver table that have a text and travel as they are")]
    pub(crate) unsafe fn text(&mut self, text: *const c_char) -> Result<(), CUresult> {
        if text.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        self.writer.text(unsafe { CStr::from_ptr(text) });
        Ok(())
    }

    /// Puts a new handle of the kind that the C type names.
    pub(crate) fn fresh(&mut self, c_type: &str) -> u64 {
        let kind = match c_type {
            "CUstream" => Kind::Stream,
            "CUevent" => Kind::Event,
            "CUmodule" => Kind::Module,
            "CUlibrary" => Kind::Library,
            "CUfunction" => Kind::Function,
            "CUkernel" => Kind::Kernel,
            _ => Kind::Context,
        };
        let handle = self.client.fresh(kind);
        self.writer.word(handle);
        handle
    }

    /// Sends without waiting; a thread that is far ahead of the device waits until it is less so, as with the driver.
    pub(crate) fn send(self) -> CUresult {
        self.send_to_end().err().unwrap_or(CUDA_SUCCESS)
    }

    /// As [`Call::send`]; says where the ring's end is behind the command.
    pub(crate) fn send_to_end(mut self) -> Result<u64, CUresult> {
        if self.client.shared.header().pressure.load(Relaxed) != 0 && self.header.call != THREAD_END {
            let mut call = Call::unchecked(self.client, HELD_ROOM, 0);
            call.put(&HeldRoom {});
            call.wait();
        }
        let result = self.enqueue();
        self.keep_buffer();
        result
    }

    /// Sends and waits for the reply.
    pub(crate) fn wait(mut self) -> (CUresult, Reply) {
        let client = self.client;
        let hint = self.header.thread as usize % rekindle_wire::layout::REPLIES;
        let slot = loop {
            match reply::claim(&client.shared, hint) {
                Some(slot) => break slot,
                // More threads wait than there are slots: rare, and none of them waits for this one.
                None if client.is_alive() => std::thread::sleep(Duration::from_micros(100)),
                None => return (WORKER_DIED, Reply::default()),
            }
        };
        self.header.reply = slot as u16 + 1;
        let mut result = self.enqueue().err().unwrap_or(CUDA_SUCCESS);
        let mut answer = Reply { bytes: taken(&REPLY), at: 0 };
        if result == CUDA_SUCCESS {
            if reply::wait(&client.shared.reply(slot).state, client.spin(), || client.is_alive()) {
                result = reply::take(&client.shared, slot, &mut answer.bytes);
            } else {
                result = WORKER_DIED;
            }
        }
        reply::release(&client.shared, slot);
        self.keep_buffer();
        prints::deliver(client);
        (result, answer)
    }

    fn enqueue(&mut self) -> Result<u64, CUresult> {
        let client = self.client;
        // Known to be dead: a program that is told so and ends must not wait for it again.
        if client.gone.load(Acquire) {
            return Err(WORKER_DIED);
        }
        ring::enqueue(&client.shared, self.header, self.writer.bytes(), || client.is_alive()).map_err(|e| match e {
            ring::EnqueueError::TooLarge(_) => CUDA_ERROR_INVALID_VALUE,
            ring::EnqueueError::WorkerGone => WORKER_DIED,
        })
    }

    fn keep_buffer(&mut self) {
        keep(&BUFFER, std::mem::take(&mut self.writer).into_bytes());
    }
}

/// What a command says of a stream that a caller names.
pub(crate) fn stream_of(named: CUstream) -> Result<u64, CUresult> {
    let stream = named_stream(named);
    if stream > CU_STREAM_PER_THREAD && !Kind::Stream.owns(stream) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(stream)
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

    /// What is left, as a reader.
    pub(crate) fn rest(&self) -> Reader<'_> {
        Reader::new(self.bytes.get(self.at..).unwrap_or_default())
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        keep(&REPLY, std::mem::take(&mut self.bytes));
    }
}
