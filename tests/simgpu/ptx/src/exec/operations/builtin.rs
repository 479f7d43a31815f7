//! Functions that the device runtime provides: printing, assertions, the heap, launches, values of conditions.

use super::special;
use crate::exec::machine::{Access, Builtin, Core, Flow, Inst, Lanes};
use crate::fault::{FaultKind, Unsupported};
use crate::launch::Children;

/// The longest string of a kernel; a string without an end would be read until a fault.
const TEXT_LIMIT: usize = 64 << 10;

/// Runs a builtin for the active lanes. `arguments` and `result` are where the caller's parameter
/// variables lie in its frame.
pub(crate) fn run(w: &mut Core<'_>, i: &Inst, builtin: Builtin, arguments: &[u32], result: Option<u32>) -> Flow {
    for lane in Lanes(w.active) {
        let argument = |w: &mut Core<'_>, index: usize, bytes: u64| {
            let offset = arguments.get(index).copied().map(u64::from)?;
            read(w, Access::Local, w.local.frame + offset, bytes, lane)
        };
        let done = match builtin {
            Builtin::Print => (|| {
                let format = argument(w, 0, 8)?;
                let values = argument(w, 1, 8)?;
                let text = print(w, format, values, lane)?;
                (w.launch.env.print)(&text);
                Some(text.len() as u64)
            })(),
            Builtin::AssertFail => (|| {
                let message = argument(w, 0, 8).and_then(|at| text(w, at, lane))?;
                let file = argument(w, 1, 8).and_then(|at| text(w, at, lane))?;
                let line = argument(w, 2, 4)?;
                let function = argument(w, 3, 8).and_then(|at| text(w, at, lane))?;
                let [message, file, function] =
                    [message, file, function].map(|t| String::from_utf8_lossy(&t).into_owned());
                let [block, thread] =
                    [["%ctaid.x", "%ctaid.y", "%ctaid.z"], ["%tid.x", "%tid.y", "%tid.z"]].map(|names| {
                        let numbers = names.map(|name| special::row(name).map_or(0, |row| w.get::<u32>(row, lane)));
                        numbers.map(|n| n.to_string()).join(",")
                    });
                let said = format!(
                    "{file}:{line}: {function}: block: [{block}], thread: [{thread}] Assertion `{message}` failed.\n"
                );
                (w.launch.env.complain)(said.as_bytes());
                w.fail(FaultKind::Assert, 0, lane);
                None
            })(),
            Builtin::Malloc => (|| {
                let bytes = argument(w, 0, 8)?;
                let Some(heap) = w.launch.env.heap else {
                    no_heap(w, i, lane);
                    return None;
                };
                Some(heap.malloc(bytes).unwrap_or(0))
            })(),
            Builtin::Free => (|| {
                let addr = argument(w, 0, 8)?;
                match w.launch.env.heap {
                    _ if addr == 0 => {}
                    Some(heap) => heap.free(addr),
                    None => {
                        no_heap(w, i, lane);
                        return None;
                    }
                }
                Some(0)
            })(),
            Builtin::ParameterBuffer => (|| {
                let kernel = argument(w, 0, 8)?;
                let grid = triple(w, arguments, 1, lane)?;
                let block = triple(w, arguments, 2, lane)?;
                let shared = argument(w, 3, 4)? as u32;
                let children = children(w, i, lane)?;
                Some(children.parameters(kernel, grid, block, shared).unwrap_or(0))
            })(),
            Builtin::LaunchDevice => (|| {
                let (parameters, stream) = (argument(w, 0, 8)?, argument(w, 1, 8)?);
                Some(u64::from(children(w, i, lane)?.launch(parameters, stream)))
            })(),
            Builtin::LastError | Builtin::PeekError => {
                children(w, i, lane).map(|it| u64::from(it.last_error(builtin == Builtin::LastError)))
            }
            Builtin::StreamCreate => (|| {
                let place = argument(w, 0, 8)?;
                let stream = children(w, i, lane)?.create_stream();
                let at = w.pointer(Access::Generic, place, 8, true, lane)?;
                // SAFETY: `pointer` vouches for that many bytes, aligned.
                unsafe { at.cast::<u64>().write(stream) };
                Some(0)
            })(),
            Builtin::StreamDestroy => children(w, i, lane).map(|_| 0),
            Builtin::SetConditional => (|| {
                let (handle, value) = (argument(w, 0, 8)?, argument(w, 1, 4)? as u32);
                if w.launch.env.conditions.is_some_and(|it| it.set(handle, value)) {
                    return Some(0);
                }
                w.fail(FaultKind::Unmapped, handle, lane);
                None
            })(),
        };
        let Some(value) = done else { return Flow::Fault };
        if let Some(offset) = result {
            let bytes = builtin.signature().result.unwrap_or(4);
            let at = w.local.frame + u64::from(offset);
            let Some(at) = w.pointer(Access::Local, at, bytes, true, lane) else {
                return Flow::Fault;
            };
            // SAFETY: `pointer` vouches for that many bytes.
            unsafe {
                if bytes == 8 {
                    at.cast::<u64>().write(value);
                } else {
                    at.cast::<u32>().write(value as u32);
                }
            }
        }
    }
    Flow::Next
}

fn no_heap(w: &mut Core<'_>, i: &Inst, lane: usize) {
    refuse(w, i, lane, "malloc: this device has no heap");
}

fn refuse(w: &mut Core<'_>, i: &Inst, lane: usize, what: &str) {
    let refused = Unsupported { function: String::new(), line: i.line, what: what.to_owned() };
    w.fail(FaultKind::Unsupported(refused), 0, lane);
}

fn children<'l>(w: &mut Core<'l>, i: &Inst, lane: usize) -> Option<&'l dyn Children> {
    let children = w.launch.env.children;
    if children.is_none() {
        refuse(w, i, lane, "a launch by a kernel: this device executes none");
    }
    children
}

/// An argument of three 32-bit words.
fn triple(w: &mut Core<'_>, arguments: &[u32], index: usize, lane: usize) -> Option<[u32; 3]> {
    let at = w.local.frame + u64::from(*arguments.get(index)?);
    let mut words = [0; 3];
    for (word, offset) in words.iter_mut().zip([0, 4, 8]) {
        *word = read(w, Access::Local, at + offset, 4, lane)? as u32;
    }
    Some(words)
}

fn read(w: &mut Core<'_>, access: Access, addr: u64, bytes: u64, lane: usize) -> Option<u64> {
    let at = w.pointer(access, addr, bytes, false, lane)?;
    // SAFETY: `pointer` vouches for that many bytes, aligned.
    Some(unsafe {
        match bytes {
            1 => u64::from(at.read()),
            4 => u64::from(at.cast::<u32>().read()),
            _ => at.cast::<u64>().read(),
        }
    })
}

/// A string that ends with a zero.
fn text(w: &mut Core<'_>, addr: u64, lane: usize) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    while text.len() < TEXT_LIMIT {
        match read(w, Access::Generic, addr.wrapping_add(text.len() as u64), 1, lane)? {
            0 => break,
            byte => text.push(byte as u8),
        }
    }
    Some(text)
}

/// Formats as C does; arguments lie one after the other, each aligned to its size.
fn print(w: &mut Core<'_>, format: u64, values: u64, lane: usize) -> Option<Vec<u8>> {
    let format = text(w, format, lane)?;
    let mut out = Vec::new();
    let mut at = values;
    let mut next = |w: &mut Core<'_>, bytes: u64| {
        at = at.next_multiple_of(bytes);
        let value = read(w, Access::Generic, at, bytes, lane);
        at += bytes;
        value
    };
    let mut rest = format.as_slice();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let Some((mut spec, tail)) = crate::format::Spec::parse(rest) else {
            out.push(byte);
            continue;
        };
        rest = tail;
        if spec.width_from_argument {
            spec.set_width(next(w, 4)? as i32);
        }
        if spec.precision_from_argument {
            spec.set_precision(next(w, 4)? as i32);
        }
        match spec.conversion {
            b'%' => out.push(b'%'),
            b's' => {
                let string = next(w, 8)?;
                let string = text(w, string, lane)?;
                spec.string(&mut out, &string);
            }
            b'c' => {
                let value = next(w, 4)?;
                spec.string(&mut out, &[value as u8]);
            }
            b'p' => {
                let value = next(w, 8)?;
                spec.pointer(&mut out, value);
            }
            b'd' | b'i' => {
                let value = if spec.long { next(w, 8)? as i64 } else { i64::from(next(w, 4)? as i32) };
                spec.signed(&mut out, value);
            }
            b'u' | b'x' | b'X' | b'o' => {
                let value = next(w, if spec.long { 8 } else { 4 })?;
                spec.unsigned(&mut out, value);
            }
            _ => {
                let value = next(w, 8)?;
                spec.float(&mut out, f64::from_bits(value));
            }
        }
    }
    Some(out)
}
