//! A process that is restored without CRIU. It maps the memory that the original process shared with its worker, from a
//! folder that is kept (`src/kept.rs`), and does nothing else. It reads commands line by line, and answers each when it
//! is done.
//!
//! ```text
//!   (start)                 -> mapped
//!   reattach RESTORE ID     -> reattached      as CRIU's plugin does in a process that it restores
//!   ring                    -> HEAD TAIL       the ring's indices
//!   reply SLOT              -> STATE RESULT
//! ```

use std::ffi::CString;
use std::fs;
use std::io::{self, BufRead, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Acquire;

use anyhow::{Context, Result, bail, ensure};
use rekindle_e2e::kept::kept;
use rekindle_wire::control::{Opening, Request};
use rekindle_wire::frame;
use rekindle_wire::layout::{REPLIES, SEALS, SHARED_NAME, STAGING_NAME, Shared};

fn main() -> ExitCode {
    match live() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("revenant: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn live() -> Result<()> {
    let folder = std::env::args_os().nth(1).context("no folder")?;
    let folder = Path::new(&folder);
    let ring = map(&CString::from(SHARED_NAME), &kept(&folder.join("ring.pages"))?, 0)?;
    map(&CString::from(STAGING_NAME), &kept(&folder.join("staging.pages"))?, 0)?;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().into_string().unwrap_or_default();
        let Some((serial, address)) = name.strip_prefix("pinned-").and_then(|it| it.split_once('-')) else { continue };
        let address = usize::from_str_radix(address.trim_end_matches(".pages"), 16)?;
        map(&CString::new(format!("rekindle-pinned-{serial}"))?, &kept(&entry.path())?, address)?;
    }
    // SAFETY: the mapping just made, of that size, which stays as long as the process.
    let shared = unsafe { Shared::new(ring) };
    let mut connection = None;
    say("mapped")?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        match line.split(' ').collect::<Vec<_>>().as_slice() {
            ["reattach", restore, socket] => {
                let socket = Request::Reattach { restore: restore.parse()?, socket: socket.parse()?, cookie: 0 };
                connection = Some(reattach(socket)?);
                say("reattached")?;
            }
            ["ring"] => {
                let header = shared.header();
                say(&format!("{} {}", header.head.load(Acquire), header.tail.load(Acquire)))?;
            }
            ["reply", slot] => {
                let slot: usize = slot.parse()?;
                ensure!(slot < REPLIES, "no slot {slot}");
                let reply = shared.reply(slot);
                say(&format!("{} {}", reply.state.load(Acquire), reply.result.load(Acquire)))?;
            }
            _ => bail!("{line}?"),
        }
    }
    drop(connection);
    Ok(())
}

fn say(what: &str) -> Result<()> {
    println!("{what}");
    Ok(io::stdout().flush()?)
}

fn reattach(request: Request) -> Result<UnixStream> {
    let path = std::env::var_os("REKINDLE_SOCKET").context("REKINDLE_SOCKET is not set")?;
    let stream = UnixStream::connect(path)?;
    let (mut cookie, mut length) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the kernel writes at most `length` bytes into the local.
    let result = unsafe {
        let at = (&raw mut cookie).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_COOKIE, at, &raw mut length)
    };
    ensure!(result == 0, "{}", io::Error::last_os_error());
    let Request::Reattach { restore, socket, .. } = request else { bail!("{request:?}") };
    frame::send(&stream, &Opening::new(&Request::Reattach { restore, socket, cookie })?, &[], &[])?;
    Ok(stream)
}

/// Maps a memfd of this name and content, sealed and shared like Rekindle's own, at `address` unless that is 0.
fn map(name: &CString, content: &[u8], address: usize) -> Result<*mut u8> {
    // SAFETY: the name is a C string; a descriptor that comes back is new and owned here.
    let file = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        ensure!(fd >= 0, "{}", io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    };
    fs::File::from(file.try_clone()?).write_all(content)?;
    // SAFETY: plain system calls on the descriptor just made; without MAP_FIXED a mapping replaces nothing.
    let at = unsafe {
        ensure!(libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) == 0, "{}", io::Error::last_os_error());
        let (protection, fixed) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED_NOREPLACE);
        let flags = libc::MAP_SHARED | if address == 0 { 0 } else { fixed };
        libc::mmap(address as *mut _, content.len(), protection, flags, file.as_raw_fd(), 0)
    };
    ensure!(at != libc::MAP_FAILED, "{} at {address:#x}: {}", name.to_string_lossy(), io::Error::last_os_error());
    Ok(at.cast())
}
