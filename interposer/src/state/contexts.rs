//! Contexts, and each thread's stack of them. A context here is a handle and what is said about it; the worker has the
//! real one.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::RwLock;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

/// The deepest stack of contexts that a thread may have.
const DEPTH: usize = 64;

/// A thread's contexts; the last is current. Nothing here has a destructor, so that CUDA still works in the
/// destructors of a thread's own variables, and at exit.
struct Stack {
    depth: Cell<usize>,
    contexts: [Cell<CUcontext>; DEPTH],
}

thread_local! {
    static STACK: Stack = const { Stack { depth: Cell::new(0), contexts: [const { Cell::new(0) }; DEPTH] } };
}

/// The thread's current context, 0 for none.
pub(crate) fn current() -> CUcontext {
    STACK.with(|s| s.depth.get().checked_sub(1).map_or(0, |top| s.contexts[top].get()))
}

/// Replaces the thread's current context; 0 leaves none.
pub(crate) fn set_current(context: CUcontext) {
    pop();
    if context != 0 {
        push(context);
    }
}

/// Makes a context current on top of the others; `false` where the stack is full.
pub(crate) fn push(context: CUcontext) -> bool {
    STACK.with(|s| {
        let depth = s.depth.get();
        if depth == DEPTH {
            return false;
        }
        s.contexts[depth].set(context);
        s.depth.set(depth + 1);
        true
    })
}

/// Takes the current context off.
pub(crate) fn pop() -> Option<CUcontext> {
    STACK.with(|s| {
        let top = s.depth.get().checked_sub(1)?;
        s.depth.set(top);
        Some(s.contexts[top].get())
    })
}

/// Runs `work` in a context.
pub(crate) fn within<T>(context: CUcontext, work: impl FnOnce() -> Result<T, CUresult>) -> Result<T, CUresult> {
    if context == current() {
        return work();
    }
    if !push(context) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let done = work();
    pop();
    done
}

/// What makes a context a green one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Green {
    /// The primary context of its device, which all that is made in it belongs to, except for streams.
    pub(crate) primary: CUcontext,
    /// What it is made of.
    pub(crate) descriptor: u64,
}

/// A context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    /// The worker's number of its device.
    pub(crate) device: usize,
    pub(crate) flags: u32,
    pub(crate) api_version: u32,
    /// `cuCtxGetId`: unique in the process.
    pub(crate) id: u64,
    /// Of a context that a green context was converted into.
    pub(crate) green: Option<Green>,
    /// How many `cuCtxAttach` were not followed by a `cuCtxDetach`.
    pub(crate) attached: u32,
}

/// A device's primary context: one handle for ever, which is alive while it is retained.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Primary {
    pub(crate) retained: u32,
    pub(crate) flags: u32,
}

pub(crate) struct Contexts {
    alive: RwLock<HashMap<CUcontext, Context>>,
    primaries: RwLock<Vec<Primary>>,
}

impl Contexts {
    pub(crate) fn new(devices: usize) -> Self {
        Self { alive: RwLock::default(), primaries: RwLock::new(vec![Primary::default(); devices]) }
    }

    /// The handle of a device's primary context, alive or not.
    pub(crate) fn primary_handle(device: usize) -> CUcontext {
        Kind::Context.handle(0x1_0000_0000 + device as u64)
    }

    /// Whether a handle is a device's primary context, alive or not.
    pub(crate) fn is_primary(context: CUcontext) -> bool {
        (0..rekindle_wire::window::MAX_DEVICES).any(|d| context == Self::primary_handle(d))
    }

    pub(crate) fn get(&self, context: CUcontext) -> Option<Context> {
        self.alive.read().ok()?.get(&context).copied()
    }

    /// What is known of the current context, and the context that what is made in it belongs to: itself, or the primary one of
    /// a green context.
    pub(crate) fn current(&self) -> Result<(CUcontext, Context), CUresult> {
        let (handle, context) = self.current_itself()?;
        Ok((context.green.map_or(handle, |green| green.primary), context))
    }

    /// The current context and what is known of it.
    pub(crate) fn current_itself(&self) -> Result<(CUcontext, Context), CUresult> {
        match current() {
            0 => Err(CUDA_ERROR_INVALID_CONTEXT),
            handle => Ok((handle, self.get(handle).ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)?)),
        }
    }

    /// The context that what is made in a context belongs to.
    pub(crate) fn owner(&self, context: CUcontext) -> CUcontext {
        self.get(context).and_then(|it| it.green).map_or(context, |green| green.primary)
    }

    /// The green context that a context was converted from; 0 for a context of another kind.
    pub(crate) fn green(&self, context: CUcontext) -> CUgreenCtx {
        let is_green = self.get(context).is_some_and(|it| it.green.is_some());
        if is_green { Kind::GreenContext.handle(context) } else { 0 }
    }

    /// The green contexts of a primary context.
    pub(crate) fn green_contexts(&self, primary: CUcontext) -> Vec<CUcontext> {
        let Ok(alive) = self.alive.read() else { return Vec::new() };
        let is_its = |it: &Context| it.green.is_some_and(|green| green.primary == primary);
        alive.iter().filter(|(_, it)| is_its(it)).map(|(handle, _)| *handle).collect()
    }

    /// Every context, and its flags.
    pub(crate) fn flags(&self) -> Vec<(CUcontext, u32)> {
        let Ok(alive) = self.alive.read() else { return Vec::new() };
        alive.iter().map(|(handle, context)| (*handle, context.flags)).collect()
    }

    pub(crate) fn insert(&self, handle: CUcontext, context: Context) {
        if let Ok(mut alive) = self.alive.write() {
            alive.insert(handle, context);
        }
    }

    pub(crate) fn remove(&self, handle: CUcontext) -> bool {
        self.alive.write().is_ok_and(|mut a| a.remove(&handle).is_some())
    }

    pub(crate) fn primary(&self, device: usize) -> Primary {
        self.primaries.read().ok().and_then(|p| p.get(device).copied()).unwrap_or_default()
    }

    /// Changes a primary context's count or flags under the lock, so that two threads do not both activate it.
    pub(crate) fn with_primary<T>(&self, device: usize, change: impl FnOnce(&mut Primary) -> T) -> Option<T> {
        let mut primaries = self.primaries.write().ok()?;
        primaries.get_mut(device).map(change)
    }
}
