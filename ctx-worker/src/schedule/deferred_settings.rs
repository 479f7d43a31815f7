//! Attributes of functions that are set while launches of these functions are deferred.
//!
//! The driver sets an attribute at once, for launches from then on, whatever its streams wait for; so the call is executed when
//! it arrives, and its caller continues. An earlier launch that is deferred keeps the old value, which is restored for the moment
//! in which the launch goes to the driver.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, Kind, Launch};
use rekindle_wire::ring::CommandHeader;

use crate::resources::Code;
use crate::resources::initial::Loading;
use crate::schedule::Scheduler;
use crate::schedule::deferred::{Entry, Setting};
use crate::schedule::dependencies::word;
use crate::session::Session;
use crate::session::call::Call;
use crate::session::outcome::{Refused, check};

/// A call that is about to set an attribute, and the deferred launches to which the new value does not apply.
#[derive(Debug)]
pub(crate) struct Change {
    of_kernel: bool,
    attribute: u32,
    /// The launches' numbers, contexts and functions, and the attribute's value there.
    launches: Vec<(u64, u64, u64, i32)>,
}

/// The function of a deferred launch.
fn launched(entry: &Entry) -> Option<u64> {
    let launch = || Launch::read(&mut Reader::new(&entry.parameters)).ok();
    if entry.header.call == command::LAUNCH { Some(launch()?.function) } else { None }
}

impl Scheduler {
    /// Notes the values that deferred launches have of an attribute that this call is about to set.
    pub(crate) fn about_to_set(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        code: &mut Code,
        header: &CommandHeader,
        parameters: &[u8],
    ) -> Option<Change> {
        let of_kernel = match self.attribute_setters.iter().position(|call| *call == header.call)? {
            _ if self.deferred.list.is_empty() => return None,
            at => at == 1,
        };
        // cuFuncSetAttribute(function, attribute, value), cuKernelSetAttribute(attribute, value, kernel, device).
        let (function, attribute) = if of_kernel { (2, 0) } else { (0, 1) };
        let function = word(parameters, function)?;
        let attribute = u32::try_from(word(parameters, attribute)?).ok()?;
        let kept = |entry: &Entry| entry.settings.iter().any(|s| s.of_kernel == of_kernel && s.attribute == attribute);
        let launches = self.deferred.list.iter().filter(|entry| !kept(entry));
        let launches = launches.filter_map(|entry| Some((entry.id, entry.header.context, launched(entry)?)));
        let of_it: Vec<_> = launches.filter(|(_, _, other)| is_same_code(&call.session, function, *other)).collect();
        let launches = with_values(call, loading, code, of_it, attribute);
        Some(Change { of_kernel, attribute, launches })
    }

    /// Called when the call has set the attribute: deferred launches for which the value has changed keep the old one.
    pub(crate) fn has_set(&mut self, call: &mut Call, loading: &mut Loading<'_>, code: &mut Code, change: Change) {
        let Change { of_kernel, attribute, launches } = change;
        let now = launches.iter().map(|(id, context, function, _)| (*id, *context, *function)).collect();
        let now = with_values(call, loading, code, now, attribute);
        for (id, _, _, before) in launches {
            let is_now = now.iter().find(|launch| launch.0 == id).map(|launch| launch.3);
            if is_now != Some(before)
                && let Some(entry) = self.deferred.list.iter_mut().find(|entry| entry.id == id)
            {
                entry.settings.push(Setting { of_kernel, attribute, value: before });
            }
        }
    }
}

/// Gives a deferred launch's function the attributes with which the launch was made. The replaced values are added to
/// `changed`, for [`set_back`], also if an error occurs on the way.
pub(crate) fn set_as_made(
    call: &mut Call,
    loading: &mut Loading<'_>,
    code: &mut Code,
    entry: &Entry,
    changed: &mut Vec<Setting>,
) -> Result<(), Refused> {
    let Some(function) = launched(entry) else { return Ok(()) };
    for setting in &entry.settings {
        let now = function_attribute(call, loading, code, entry.header.context, function, setting.attribute)?;
        set_attribute(call, loading, code, entry.header.context, function, *setting)?;
        changed.push(Setting { value: now, ..*setting });
    }
    Ok(())
}

/// Reverts the changes of [`set_as_made`].
pub(crate) fn set_back(
    call: &mut Call,
    loading: &mut Loading<'_>,
    code: &mut Code,
    entry: &Entry,
    changed: Vec<Setting>,
) {
    let Some(function) = launched(entry) else { return };
    for setting in changed.into_iter().rev() {
        if let Err(refused) = set_attribute(call, loading, code, entry.header.context, function, setting) {
            tracing::warn!("an attribute of a function was not set to what it was: {refused}");
        }
    }
}

/// Adds the attribute's value in the context of each launch. If there is none, nothing needs to be kept.
fn with_values(
    call: &mut Call,
    loading: &mut Loading<'_>,
    code: &mut Code,
    launches: Vec<(u64, u64, u64)>,
    attribute: u32,
) -> Vec<(u64, u64, u64, i32)> {
    let mut known: Vec<((u64, u64), Option<i32>)> = Vec::new();
    let mut valued = Vec::new();
    for (id, context, function) in launches {
        let value = match known.iter().find(|(place, _)| *place == (context, function)) {
            Some((_, value)) => *value,
            None => {
                let value = function_attribute(call, loading, code, context, function, attribute).ok();
                known.push(((context, function), value));
                value
            }
        };
        valued.extend(value.map(|value| (id, context, function, value)));
    }
    valued
}

/// Whether two handles name the same function, or a kernel and its function in a context.
fn is_same_code(session: &Session, one: u64, other: u64) -> bool {
    let of = |handle: u64| {
        let object = session.objects.get(handle)?;
        let is_of_kernel = Kind::Kernel.owns(object.parent);
        Some((if is_of_kernel { object.parent } else { handle }, object.real))
    };
    let (Some(one), Some(other)) = (of(one), of(other)) else { return false };
    one.0 == other.0 || one.1 == other.1
}

/// The driver's function for a function or kernel in a context. The context is current afterwards.
fn function_in(
    call: &mut Call,
    loading: &mut Loading<'_>,
    code: &mut Code,
    context: u64,
    handle: u64,
) -> Result<u64, Refused> {
    call.enter(context)?;
    let real = code.function(call, loading, handle)?;
    if !Kind::Kernel.owns(handle) {
        return Ok(real);
    }
    let mut function = 0;
    // SAFETY: the out parameter is a local, the handle the driver's own.
    check(unsafe { (call.driver().cuKernelGetFunction)(&raw mut function, real) })?;
    Ok(function)
}

fn function_attribute(
    call: &mut Call,
    loading: &mut Loading<'_>,
    code: &mut Code,
    context: u64,
    handle: u64,
    attribute: u32,
) -> Result<i32, Refused> {
    let function = function_in(call, loading, code, context, handle)?;
    let mut value = 0;
    // SAFETY: the out parameter is a local, the handle the driver's own.
    check(unsafe { (call.driver().cuFuncGetAttribute)(&raw mut value, attribute, function) })?;
    Ok(value)
}

fn set_attribute(
    call: &mut Call,
    loading: &mut Loading<'_>,
    code: &mut Code,
    context: u64,
    handle: u64,
    setting: Setting,
) -> Result<(), Refused> {
    let Setting { of_kernel, attribute, value } = setting;
    let kernel =
        if Kind::Kernel.owns(handle) { handle } else { call.session.objects.get(handle).map_or(0, |o| o.parent) };
    if of_kernel && Kind::Kernel.owns(kernel) {
        let device = loading.memory.devices[call.session.device_of_context(context)?].device;
        let kernel = code.function(call, loading, kernel)?;
        // SAFETY: the handles are the driver's own.
        return check(unsafe { (call.driver().cuKernelSetAttribute)(attribute, value, kernel, device) });
    }
    let function = function_in(call, loading, code, context, handle)?;
    // SAFETY: the handle is the driver's own.
    check(unsafe { (call.driver().cuFuncSetAttribute)(function, attribute, value) })
}
