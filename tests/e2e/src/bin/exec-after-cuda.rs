//! Initialises CUDA, waits for a file, and executes the given command, like a launcher that has looked at the GPUs
//! first.

use std::ffi::{CStr, c_int, c_void};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Result, bail, ensure};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("exec-after-cuda: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Returns only if the command could not be executed.
fn run() -> Result<()> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [signal, program, arguments @ ..] = &arguments[..] else {
        bail!("usage: exec-after-cuda FILE PROGRAM [ARGUMENT...]");
    };
    initialise_cuda()?;
    // The test creates the file when it has seen the process.
    while !Path::new(signal).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(Command::new(program).args(arguments).exec().into())
}

fn initialise_cuda() -> Result<()> {
    let library: &CStr = c"libcuda.so.1";
    // SAFETY: both names end in NUL; cuInit has this signature in every version of the driver.
    unsafe {
        let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
        ensure!(!library.is_null(), "no libcuda.so.1");
        let init = libc::dlsym(library, c"cuInit".as_ptr());
        ensure!(!init.is_null(), "libcuda.so.1 has no cuInit");
        let init = std::mem::transmute::<*mut c_void, extern "C" fn(u32) -> c_int>(init);
        let result = init(0);
        ensure!(result == 0, "cuInit returned {result}");
    }
    Ok(())
}
