//! Streams: queues of commands. Each has a thread that executes them.
//!
//! A command waits for its predecessor in the stream and for its marks, runs, and is done; the stream's [`Timeline`] counts
//! finished commands. `order.rs` says for which marks of other streams a command waits.
//!
//! Commands of a failed context do not run, but count as done, so that a thread that waits goes on and sees the error.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rekindle_cuda_abi::types::{CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_OUT_OF_MEMORY};

use crate::context::Context;
use crate::device::release_pools;
use crate::green::Green;
use crate::handles::Object;
use crate::order::{Mark, Role, Timeline};
use crate::status::Result;

/// How long a stream's thread waits for work before it ends. The next command starts another.
const IDLE: Duration = Duration::from_secs(2);

thread_local! {
    /// Whether this thread is adding the steps of a graph to a queue: together they take the place of one command.
    static IN_GRAPH: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Puts the steps of a graph into streams, which take them all if they take the first.
pub(crate) fn as_one<T>(work: impl FnOnce() -> T) -> T {
    let before = IN_GRAPH.replace(true);
    let result = work();
    IN_GRAPH.set(before);
    result
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// Its handle; the default streams' is their name's number.
    pub(crate) handle: u64,
    /// The result of `cuStreamGetId`.
    pub(crate) id: u64,
    /// Its priority.
    pub(crate) priority: i32,
    /// The attributes that `cuStreamSetAttribute` has set: hints, without an effect.
    pub(crate) attributes: Mutex<HashMap<u32, [u64; 8]>>,
    context: Weak<Context>,
    /// The green context that it belongs to.
    green: Option<Arc<Green>>,
    queue: Mutex<Queue>,
    changed: Condvar,
    timeline: Arc<Timeline>,
}

#[derive(Debug, Default)]
struct Queue {
    commands: VecDeque<Command>,
    has_thread: bool,
    /// Whether the stream was destroyed: no command follows the queued ones.
    ends: bool,
}

/// The work of a command. It gets the state of its context, and its failure makes the context fail.
type Work = Box<dyn FnOnce(&Context, Result<()>) -> Result<()> + Send>;

struct Command {
    after: Vec<Mark>,
    work: Work,
    /// Whether the command takes room of its own in a hardware queue.
    counts: bool,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Command").field("after", &self.after).finish_non_exhaustive()
    }
}

impl Stream {
    /// A stream of a context, and perhaps of a green one, without a thread yet.
    pub(crate) fn new(
        context: &Arc<Context>,
        handle: u64,
        role: Role,
        priority: i32,
        green: Option<Arc<Green>>,
    ) -> Arc<Self> {
        let group = green.as_ref().map_or(0, |it| it.id);
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Self {
            handle,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            priority,
            attributes: Mutex::default(),
            context: Arc::downgrade(context),
            queue: Mutex::default(),
            changed: Condvar::new(),
            timeline: context.order().add(role, group),
            green,
        })
    }

    /// Its kind.
    pub(crate) fn role(&self) -> Role {
        self.timeline.role
    }

    /// The green context that it belongs to.
    pub(crate) fn green(&self) -> Option<&Arc<Green>> {
        self.green.as_ref()
    }

    /// The handle of its context, or of the one that its green context is converted into.
    pub(crate) fn home(&self) -> Result<u64> {
        let context = self.context()?;
        Ok(self.green.as_ref().map_or(context.handle, |it| it.converted))
    }

    /// The context it belongs to.
    pub(crate) fn context(&self) -> Result<Arc<Context>> {
        if let Some(green) = &self.green {
            return green.context();
        }
        self.context.upgrade().ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The moment when all commands submitted so far are done.
    pub(crate) fn last(&self) -> Mark {
        self.timeline.last()
    }

    /// Adds a command at the end; it is skipped if the context has failed by then.
    pub(crate) fn submit(self: &Arc<Self>, work: impl FnOnce(&Context) -> Result<()> + Send + 'static) -> Result<Mark> {
        self.submit_always(|context, state| state.and_then(|()| work(context)))
    }

    /// Adds a command at the end; it also runs if the context has failed by then.
    pub(crate) fn submit_always(
        self: &Arc<Self>,
        work: impl FnOnce(&Context, Result<()>) -> Result<()> + Send + 'static,
    ) -> Result<Mark> {
        let context = self.context()?;
        context.check()?;
        // The steps of a graph take no room of their own.
        let counts = !IN_GRAPH.get();
        if counts {
            context.channels.enter(self.id, || context.check().is_err());
        }
        // From here on, no command can come between this one and those that it has to wait for.
        let order = context.order();
        let after = order.predecessors(&self.timeline);
        let mut queue = self.queue();
        if !queue.has_thread {
            self.start_thread(&context).inspect_err(|_| self.leave(&context, counts))?;
            queue.has_thread = true;
        }
        let mark = self.timeline.submit();
        queue.commands.push_back(Command { after, work: Box::new(work), counts });
        self.changed.notify_all();
        Ok(mark)
    }

    /// A command that had taken room is done.
    fn leave(&self, context: &Context, counts: bool) {
        if counts {
            context.channels.leave(self.id);
        }
    }

    fn start_thread(self: &Arc<Self>, context: &Arc<Context>) -> Result<()> {
        let (stream, context) = (self.clone(), context.clone());
        let thread = std::thread::Builder::new().name("simgpu-stream".into());
        // A thread inherits the mask of its creator: the program's signals are for the program's threads.
        let old = block_signals();
        let started = thread.spawn(move || stream.work_off(&context));
        restore_signals(&old);
        started.map(drop).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn work_off(&self, context: &Context) {
        loop {
            let mut queue = self.queue();
            while queue.commands.is_empty() {
                if queue.ends {
                    queue.has_thread = false;
                    return;
                }
                let (again, waited) = self.changed.wait_timeout(queue, IDLE).unwrap_or_else(PoisonError::into_inner);
                queue = again;
                if waited.timed_out() && queue.commands.is_empty() {
                    queue.has_thread = false;
                    return;
                }
            }
            let command = queue.commands.pop_front();
            drop(queue);
            self.changed.notify_all();
            if let Some(command) = command {
                let counts = command.counts;
                command.run(context);
                self.leave(context, counts);
            }
            self.timeline.advance();
        }
    }

    /// Counts in the order of its context only until its commands are done.
    pub(crate) fn leave_order(&self, context: &Context) {
        context.order().remove(&self.timeline);
    }

    /// Has its thread end after the queued commands, without waiting for more: a program that makes and destroys streams
    /// without a pause would have thousands of threads.
    pub(crate) fn end(&self) {
        self.queue().ends = true;
        self.changed.notify_all();
    }

    /// The marks that the legacy default stream waits for beside its own commands; none for other streams.
    fn awaited(&self, context: &Context) -> Vec<Mark> {
        if self.role() == Role::Legacy { context.order().predecessors(&self.timeline) } else { Vec::new() }
    }

    /// Whether all submitted commands are done; for the legacy default stream, also those that it would wait for.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        let context = self.context()?;
        let before = self.awaited(&context);
        Ok(self.last().reached() && before.iter().all(Mark::reached))
    }

    /// Makes later commands wait for a moment in another stream.
    pub(crate) fn hold(self: &Arc<Self>, mark: Mark) -> Result<()> {
        self.submit(move |context| {
            mark.wait_unless(|| context.check().is_err());
            Ok(())
        })?;
        Ok(())
    }

    /// Waits for all commands submitted so far; in the legacy default stream, also for those that it waits for.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let context = self.context()?;
        let before = self.awaited(&context);
        before.iter().for_each(Mark::wait);
        self.last().wait();
        release_pools();
        context.flush_prints();
        context.check()
    }
}

impl Object for Stream {
    fn belongs_to(&self, context: u64) -> bool {
        self.context.upgrade().is_some_and(|it| it.handle == context)
    }
}

impl Command {
    fn run(self, context: &Context) {
        for mark in &self.after {
            mark.wait_unless(|| context.check().is_err());
        }
        let work = self.work;
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(context, context.check())));
        match ran {
            Ok(Ok(())) => {}
            Ok(Err(code)) => context.fail(code),
            Err(_) => context.fail(rekindle_cuda_abi::types::CUDA_ERROR_UNKNOWN),
        }
    }
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: the sets are written before they are read; the mask is this thread's own.
    unsafe {
        let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        // These signals come from failures of this thread. If they were blocked, the process would end without a message.
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE] {
            libc::sigdelset(&mut all, signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    }
}

fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: sets this thread's mask to what it was.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
}
