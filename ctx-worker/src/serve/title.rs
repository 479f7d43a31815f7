//! The title of a worker's process: `ps`, `nvidia-smi` and others show whose GPU memory it has.

use std::ffi::{CStr, c_char};

unsafe extern "C" {
    /// The first argument, where the kernel has put it (program_invocation_name(3)).
    static program_invocation_name: *mut c_char;
}

/// Shows the command of the client as the arguments of this process. What does not fit into their place is cut off. Nothing reads
/// the arguments any more when a client comes.
pub(super) fn show(command: &str) {
    // The kernel puts the arguments one behind the other, each with its final zero.
    let room = arguments_length();
    // SAFETY: the C library sets it before `main`, and nobody changes it.
    let first = unsafe { program_invocation_name };
    if first.is_null() || room < 2 {
        return;
    }
    // SAFETY: a string, as just checked.
    let length = unsafe { CStr::from_ptr(first) }.to_bytes_with_nul().len();
    // With a script as the program, or where somebody has set it, it is not what the arguments begin with.
    if length > room {
        return;
    }
    let title = format!("rekindled: worker of {command}");
    let title = &title.as_bytes()[..title.len().min(room - 1)];
    // SAFETY: the arguments' memory, which is the process's own and writable, has that many bytes from the first one on; only this
    // function writes there, in the thread that serves requests.
    unsafe {
        first.write_bytes(0, room);
        first.cast::<u8>().copy_from_nonoverlapping(title.as_ptr(), title.len());
    }
}

/// The bytes of all arguments at the start of this process.
fn arguments_length() -> usize {
    static LENGTH: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *LENGTH.get_or_init(|| std::env::args_os().map(|it| it.len() + 1).sum())
}
