//! Attributes of functions that are set while launches of these functions are held.
//!
//! The driver sets an attribute at once, for launches from then on, whatever its streams wait for; so the call is
//! executed when it comes, and who made it goes on. A launch that came before it and is held keeps the value that there
//! was. It gets that back for the moment in which it goes to the driver.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, Kind, Launch};
use rekindle_wire::ring::CommandHeader;

use crate::schedule::deferred::Entry;
use crate::schedule::dependencies::word;
use crate::serve::executor::Executor;
use crate::session::outcome::{Refused, check};
use crate::session::state::FormerAttribute;

/// A value that an attribute had when a launch was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// Whether it was set of the kernel, for its device, and not of the function in one context.
    of_kernel: bool,
    attribute: u32,
    value: i32,
}

impl Setting {
    /// As an image keeps it.
    pub(crate) fn saved(&self) -> FormerAttribute {
        let Self { of_kernel, attribute, value } = *self;
        FormerAttribute { of_kernel, attribute, value, ..FormerAttribute::default() }
    }

    /// What [`Setting::saved`] gave.
    pub(crate) fn restored(saved: &FormerAttribute) -> Self {
        Self { of_kernel: saved.of_kernel, attribute: saved.attribute, value: saved.value }
    }
}

/// A call that is about to set an attribute, and the held launches that it is not for.
#[derive(Debug)]
pub(crate) struct Change {
    of_kernel: bool,
    attribute: u32,
    /// Their numbers, contexts and functions, and the value that the attribute has there.
    launches: Vec<(u64, u64, u64, i32)>,
}

/// The function of a held launch.
fn launched(entry: &Entry) -> Option<u64> {
    let launch = || Launch::read(&mut Reader::new(&entry.parameters)).ok();
    if entry.header.call == command::LAUNCH { Some(launch()?.function) } else { None }
}

impl Executor {
    /// Takes note of what held launches have of an attribute that this call is about to set.
    pub(crate) fn about_to_set(&mut self, header: &CommandHeader, parameters: &[u8]) -> Option<Change> {
        let of_kernel = match self.scheduler.attribute_setters.iter().position(|call| *call == header.call)? {
            _ if self.scheduler.deferred.list.is_empty() => return None,
            at => at == 1,
        };
        // cuFuncSetAttribute(function, attribute, value), cuKernelSetAttribute(attribute, value, kernel, device).
        let (function, attribute) = if of_kernel { (2, 0) } else { (0, 1) };
        let function = word(parameters, function)?;
        let attribute = u32::try_from(word(parameters, attribute)?).ok()?;
        let kept = |entry: &Entry| entry.settings.iter().any(|s| s.of_kernel == of_kernel && s.attribute == attribute);
        let launches = self.scheduler.deferred.list.iter().filter(|entry| !kept(entry));
        let launches = launches.filter_map(|entry| Some((entry.id, entry.header.context, launched(entry)?)));
        let of_it: Vec<_> = launches.filter(|(_, _, other)| self.is_same_code(function, *other)).collect();
        let launches = self.with_values(of_it, attribute);
        Some(Change { of_kernel, attribute, launches })
    }

    /// Adds the value that an attribute has in the context of each launch. Where it has none, there is nothing to keep.
    fn with_values(&mut self, launches: Vec<(u64, u64, u64)>, attribute: u32) -> Vec<(u64, u64, u64, i32)> {
        let mut known: Vec<((u64, u64), Option<i32>)> = Vec::new();
        let mut valued = Vec::new();
        for (id, context, function) in launches {
            let value = match known.iter().find(|(place, _)| *place == (context, function)) {
                Some((_, value)) => *value,
                None => {
                    let value = self.function_attribute(context, function, attribute).ok();
                    known.push(((context, function), value));
                    value
                }
            };
            valued.extend(value.map(|value| (id, context, function, value)));
        }
        valued
    }

    /// The call has set the attribute: held launches that it has changed it for keep what they had.
    pub(crate) fn has_set(&mut self, change: Change) {
        let Change { of_kernel, attribute, launches } = change;
        let now = launches.iter().map(|(id, context, function, _)| (*id, *context, *function)).collect();
        let now = self.with_values(now, attribute);
        for (id, _, _, before) in launches {
            let is_now = now.iter().find(|launch| launch.0 == id).map(|launch| launch.3);
            if is_now != Some(before)
                && let Some(entry) = self.scheduler.deferred.list.iter_mut().find(|entry| entry.id == id)
            {
                entry.settings.push(Setting { of_kernel, attribute, value: before });
            }
        }
    }

    /// Executes a held launch with the attributes that it was made with.
    pub(crate) fn perform_as_set(&mut self, entry: &Entry) -> Result<(), Refused> {
        let Some(function) = launched(entry) else { return self.perform(entry.header, &entry.parameters) };
        let context = entry.header.context;
        let mut changed = Vec::new();
        let mut result = Ok(());
        for setting in &entry.settings {
            result = self.function_attribute(context, function, setting.attribute).and_then(|now| {
                self.set_attribute(context, function, *setting)?;
                changed.push(Setting { value: now, ..*setting });
                Ok(())
            });
            if result.is_err() {
                break;
            }
        }
        let performed = match result {
            Ok(()) => self.perform(entry.header, &entry.parameters),
            Err(Refused::Code(code)) => {
                self.header = entry.header;
                self.answer(entry.header.reply, code, &[]);
                Ok(())
            }
            Err(refused) => Err(refused),
        };
        for setting in changed.into_iter().rev() {
            if let Err(refused) = self.set_attribute(context, function, setting) {
                tracing::warn!("an attribute of a function was not set to what it was: {refused}");
            }
        }
        performed
    }

    /// Whether two handles name one function, or a kernel and its function in a context.
    fn is_same_code(&self, one: u64, other: u64) -> bool {
        let of = |handle: u64| {
            let object = self.session.objects.get(handle)?;
            let is_of_kernel = Kind::Kernel.owns(object.parent);
            Some((if is_of_kernel { object.parent } else { handle }, object.real))
        };
        let (Some(one), Some(other)) = (of(one), of(other)) else { return false };
        one.0 == other.0 || one.1 == other.1
    }

    /// The driver's function that a function or kernel is in a context, which is current then.
    fn function_in(&mut self, context: u64, handle: u64) -> Result<u64, Refused> {
        self.enter_context(context)?;
        let real = self.handle_function(handle)?;
        if !Kind::Kernel.owns(handle) {
            return Ok(real);
        }
        let mut function = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own.
        check(unsafe { (self.driver().cuKernelGetFunction)(&raw mut function, real) })?;
        Ok(function)
    }

    fn function_attribute(&mut self, context: u64, handle: u64, attribute: u32) -> Result<i32, Refused> {
        let function = self.function_in(context, handle)?;
        let mut value = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own.
        check(unsafe { (self.driver().cuFuncGetAttribute)(&raw mut value, attribute, function) })?;
        Ok(value)
    }

    fn set_attribute(&mut self, context: u64, handle: u64, setting: Setting) -> Result<(), Refused> {
        let Setting { of_kernel, attribute, value } = setting;
        let kernel =
            if Kind::Kernel.owns(handle) { handle } else { self.session.objects.get(handle).map_or(0, |o| o.parent) };
        if of_kernel && Kind::Kernel.owns(kernel) {
            let device = self.memory.devices[self.device_of_context(context)?].device;
            let kernel = self.handle_kernel(kernel)?;
            // SAFETY: the handles are the driver's own.
            return check(unsafe { (self.driver().cuKernelSetAttribute)(attribute, value, kernel, device) });
        }
        let function = self.function_in(context, handle)?;
        // SAFETY: the handle is the driver's own.
        check(unsafe { (self.driver().cuFuncSetAttribute)(function, attribute, value) })
    }
}
