//! The names by which processes know shared memory and events.

use rekindle_wire::codec::Writer;
use rekindle_wire::ipc;

/// Writes a name as the words of a reply.
pub(crate) fn write_name(out: &mut Writer, name: &[u8; 16]) {
    ipc::words(name).into_iter().for_each(|word| out.word(word));
}

/// A name that cannot be guessed.
pub(crate) fn new_name() -> Option<[u8; 16]> {
    let mut name = [0_u8; 16];
    // SAFETY: writes at most sixteen bytes into the local.
    let got = unsafe { libc::getrandom(name.as_mut_ptr().cast(), name.len(), 0) };
    (got == 16).then_some(name)
}
