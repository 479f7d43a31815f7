//! The settings for core dumps of GPUs, which programs set and ask. No core dump is written: the driver would write it in the
//! worker, which may open none of the program's files, and abort the worker with it. So the settings stay here.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::coredump::Settings;
use rekindle_cuda_abi::types::*;

use super::contexts::Contexts;
use crate::process::log;

/// The settings of all contexts.
pub(crate) struct Coredumps(Mutex<Known>);

/// What new contexts begin with, and the settings of those that have others.
pub(crate) struct Known {
    pub(crate) global: Settings,
    own: HashMap<CUcontext, Settings>,
}

impl Coredumps {
    /// The settings with which this process begins.
    pub(crate) fn of_process() -> Self {
        let global = Settings::of_process();
        warn_of(&global);
        Self(Mutex::new(Known { global, own: HashMap::new() }))
    }

    /// The settings. Each change leaves them whole, so a panic elsewhere does not matter.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A context has ended.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        self.lock().own.remove(&context);
    }
}

impl Known {
    /// The settings of a context with these flags.
    pub(crate) fn of_context(&mut self, context: CUcontext, flags: u32) -> &mut Settings {
        self.own.entry(context).or_insert_with(|| self.global.of_context(flags))
    }

    /// Gives each context settings of its own, so that it keeps them when those for new contexts change.
    pub(crate) fn keep_in(&mut self, contexts: &Contexts) {
        for (context, flags) in contexts.flags() {
            self.of_context(context, flags);
        }
    }
}

/// Says that there will be no core dump, if one is asked for.
pub(crate) fn warn_of(settings: &Settings) {
    if settings.wants_dumps() {
        log::refused("core dumps of GPUs; the settings are kept, and no dump is written");
    }
}
