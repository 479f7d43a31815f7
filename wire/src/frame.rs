//! Messages on a Unix stream socket: a length, JSON, a blob, and file descriptors.
//!
//! ```text
//!   u32 bytes of JSON | u32 bytes of blob | JSON | blob        descriptors ride on the first byte (SCM_RIGHTS)
//! ```

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// The largest JSON part.
pub const MAX_JSON: usize = 16 << 20;
/// The largest blob.
pub const MAX_BLOB: usize = 1 << 30;
/// The most descriptors in a message (the kernel's own limit is 253).
pub const MAX_FDS: usize = 250;

/// Why a message could not be sent or received.
#[derive(Debug, Error)]
pub enum FrameError {
    /// The other side closed the connection between two messages.
    #[error("the other side has closed the connection")]
    Closed,
    /// The connection failed or ended in the middle.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The message is not what this version understands.
    #[error("a message that this version does not understand: {0}")]
    Json(#[from] serde_json::Error),
    /// A length that no message has.
    #[error("a message of {0} bytes, more than any may have")]
    TooLarge(usize),
    /// More descriptors than a message has, or fewer than were sent.
    #[error("a message with more descriptors than could be received")]
    Descriptors,
}

/// A received message.
#[derive(Debug)]
pub struct Message<T> {
    /// The JSON part.
    pub body: T,
    /// The blob; usually empty.
    pub blob: Vec<u8>,
    /// Descriptors, close-on-exec.
    pub fds: Vec<OwnedFd>,
}

/// Sends a message with descriptors (which stay open here).
pub fn send<T: Serialize>(socket: &UnixStream, body: &T, blob: &[u8], fds: &[RawFd]) -> Result<(), FrameError> {
    let json = serde_json::to_vec(body)?;
    #[cfg(debug_assertions)]
    let json = match crate::version::ahead() {
        0 => json,
        _ => serde_json::to_vec(&crate::version::grown(serde_json::from_slice(&json)?))?,
    };
    if json.len() > MAX_JSON || blob.len() > MAX_BLOB || fds.len() > MAX_FDS {
        return Err(FrameError::TooLarge(json.len() + blob.len()));
    }
    let mut bytes = Vec::with_capacity(8 + json.len());
    bytes.extend_from_slice(&(json.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(blob.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&json);
    let sent = send_with_fds(socket.as_raw_fd(), &bytes, fds)?;
    write_all(socket.as_raw_fd(), &bytes[sent..])?;
    write_all(socket.as_raw_fd(), blob)?;
    Ok(())
}

/// Receives one message.
pub fn receive<T: DeserializeOwned>(socket: &UnixStream) -> Result<Message<T>, FrameError> {
    receive_at_most(socket, MAX_JSON, MAX_BLOB)
}

/// Receives one message from someone who may be of a later release: the body is an error where it is a message, but none that
/// this release knows. The connection is in order then.
pub fn receive_known<T: DeserializeOwned>(
    socket: &UnixStream,
    max_blob: usize,
) -> Result<Message<Result<T, serde_json::Error>>, FrameError> {
    let Message { body, blob, fds } = receive_at_most::<serde_json::Value>(socket, MAX_JSON, max_blob)?;
    Ok(Message { body: serde_json::from_value(body), blob, fds })
}

/// Receives one message from someone who has no business sending a large one.
pub fn receive_at_most<T: DeserializeOwned>(
    socket: &UnixStream,
    max_json: usize,
    max_blob: usize,
) -> Result<Message<T>, FrameError> {
    let mut fds = Vec::new();
    let mut lengths = [0; 8];
    read_exact(socket.as_raw_fd(), &mut lengths, &mut fds, true)?;
    let json_length = u32::from_le_bytes([lengths[0], lengths[1], lengths[2], lengths[3]]) as usize;
    let blob_length = u32::from_le_bytes([lengths[4], lengths[5], lengths[6], lengths[7]]) as usize;
    if json_length > max_json || blob_length > max_blob {
        return Err(FrameError::TooLarge(json_length + blob_length));
    }
    let mut json = vec![0; json_length];
    read_exact(socket.as_raw_fd(), &mut json, &mut fds, false)?;
    // Grown as bytes arrive: a length alone makes nobody allocate a gigabyte.
    let mut blob = Vec::new();
    while blob.len() < blob_length {
        let start = blob.len();
        blob.resize(blob_length.min(start + (1 << 20)), 0);
        read_exact(socket.as_raw_fd(), &mut blob[start..], &mut fds, false)?;
    }
    Ok(Message { body: serde_json::from_slice(&json)?, blob, fds })
}

fn send_with_fds(socket: RawFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<usize> {
    let mut control = [0_u64; 16 + MAX_FDS / 2];
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: msghdr is plain data for which zeros are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let payload = size_of_val(fds) as u32;
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE and CMSG_FIRSTHDR compute inside `control`, which is aligned and large enough for
        // MAX_FDS descriptors; the pointers written through lie in it.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(payload) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(payload) as _;
            std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast(), fds.len());
        }
    }
    loop {
        // SAFETY: the message's pointers are live locals.
        let sent = unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) };
        if sent >= 0 {
            return Ok(sent as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn write_all(socket: RawFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let sent = send_with_fds(socket, bytes, &[])?;
        bytes = &bytes[sent..];
    }
    Ok(())
}

fn read_exact(socket: RawFd, mut into: &mut [u8], fds: &mut Vec<OwnedFd>, first: bool) -> Result<(), FrameError> {
    let mut at_start = first;
    while !into.is_empty() {
        let mut control = [0_u64; 16 + MAX_FDS / 2];
        let mut iov = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: msghdr is plain data for which zeros are valid.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control) as _;
        // SAFETY: the message's pointers are live locals.
        let received = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if received < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(error.into());
        }
        // SAFETY: the kernel filled `control`; the CMSG macros walk inside msg_controllen, and descriptors in
        // SCM_RIGHTS are new and ours.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&raw const message);
            while !header.is_null() {
                if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                    let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                    let data = libc::CMSG_DATA(header).cast::<RawFd>();
                    for i in 0..bytes / size_of::<RawFd>() {
                        fds.push(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                    }
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
        }
        // A sender may put descriptors on every byte; and what did not fit was closed by the kernel.
        if fds.len() > MAX_FDS || message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(FrameError::Descriptors);
        }
        if received == 0 {
            return Err(if at_start {
                FrameError::Closed
            } else {
                io::Error::from(io::ErrorKind::UnexpectedEof).into()
            });
        }
        at_start = false;
        into = &mut into[received as usize..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn a_message_arrives_with_its_blob_and_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        // SAFETY: a fresh memfd, owned here.
        let mut file = unsafe { std::fs::File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), 0)) };
        file.write_all(b"inside").unwrap();
        send(&a, &("hello", 7), &vec![3; 3 << 20][..100_000], &[file.as_raw_fd()]).unwrap();
        let message = receive::<(String, u32)>(&b).unwrap();
        assert_eq!(message.body, ("hello".into(), 7));
        assert_eq!(message.blob, vec![3; 100_000]);
        let mut got = std::fs::File::from(message.fds.into_iter().next().unwrap());
        got.rewind().unwrap();
        let mut text = String::new();
        got.read_to_string(&mut text).unwrap();
        assert_eq!(text, "inside");
        drop(a);
        assert!(matches!(receive::<u32>(&b), Err(FrameError::Closed)));
    }

    #[test]
    fn descriptors_without_end_and_large_messages_are_refused() {
        let (a, b) = UnixStream::pair().unwrap();
        let fds = [a.as_raw_fd(); 200];
        send_with_fds(a.as_raw_fd(), &[9, 0], &fds).unwrap();
        send_with_fds(a.as_raw_fd(), &[0, 0], &fds).unwrap();
        assert!(matches!(receive::<u32>(&b), Err(FrameError::Descriptors)));
        let (a, b) = UnixStream::pair().unwrap();
        send(&a, &"four letters", &[], &[]).unwrap();
        assert!(matches!(receive_at_most::<String>(&b, 8, 0), Err(FrameError::TooLarge(14))));
    }

    #[test]
    fn absurd_lengths_and_broken_ends_are_errors() {
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[0xff; 8]).unwrap();
        assert!(matches!(receive::<u32>(&b), Err(FrameError::TooLarge(_))));
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[9, 0, 0, 0, 0, 0, 0, 0, b'1']).unwrap();
        drop(a);
        assert!(matches!(receive::<u32>(&b), Err(FrameError::Io(_))));
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&[1, 0, 0, 0, 0, 0, 0, 0, b'x']).unwrap();
        assert!(matches!(receive::<u32>(&b), Err(FrameError::Json(_))));
    }
}
