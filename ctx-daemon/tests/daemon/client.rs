//! A fake application: on commands from its standard input, it acts as an interposer, or as CRIU's plugin in a restored
//! process.

use std::io::{BufRead, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rekindle_wire::attach::{Answer, Attach};
use rekindle_wire::control::{Opening, Reply, Request};
use rekindle_wire::frame;
use rekindle_wire::layout::{SHARED_NAME, SHARED_SIZE, STAGING_NAME, STAGING_SIZE};

use crate::support::{cookie_of, memfd};

fn say(what: &str) {
    println!("client: {what}");
}

pub(crate) fn main() {
    let socket = std::env::var("REKINDLE_SOCKET").unwrap();
    let mut connection = None;
    let mut mapped = Vec::new();
    let mut directory = None;
    let mut listener = None;
    if std::env::var_os("FAKE_CLIENT").is_some_and(|it| it == "waits") {
        // The test kills this process, unless it fails.
        std::thread::sleep(std::time::Duration::from_secs(120));
        return;
    }
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split(' ').collect();
        match words.as_slice() {
            ["connect"] => {
                connection = Some(UnixStream::connect(&socket).unwrap());
                say("connected");
            }
            ["attach", command, rest @ ..] => {
                let stream = connection.take().unwrap_or_else(|| UnixStream::connect(&socket).unwrap());
                let ring = memfd(SHARED_NAME, SHARED_SIZE);
                let staging = memfd(STAGING_NAME, STAGING_SIZE);
                let request = Request::Attach(Attach {
                    dialect: rekindle_wire::Dialect::own(),
                    pid: std::process::id() as i32,
                    command: (*command).to_owned(),
                    socket: socket.clone(),
                    cookie: cookie_of(&stream),
                    settings: rest
                        .iter()
                        .map(|it| it.split_once('=').unwrap_or(("REKINDLE_PROTOCOL", it)))
                        .map(|(name, value)| (name.to_owned(), value.to_owned()))
                        .collect(),
                });
                let opening = Opening::new(&request).unwrap();
                let fds = [ring.as_raw_fd(), staging.as_raw_fd()];
                frame::send(&stream, &opening, &[], &fds).unwrap();
                match frame::receive::<Answer>(&stream) {
                    Ok(message) => match message.body {
                        Answer::Attached(_) => say("attached"),
                        Answer::Refused { reason } => say(&format!("refused {reason}")),
                    },
                    Err(error) => say(&format!("error {error}")),
                }
                connection = Some(stream);
            }
            // The parts that CRIU restores: mappings, and a connection by the plugin.
            ["map", size, address] => {
                let fixed = usize::from_str_radix(address, 16).unwrap();
                let size: usize = size.parse().unwrap();
                mapped.push(map(memfd(c"rekindle-pinned-1", size), size, fixed));
                say("mapped");
            }
            ["map"] => {
                mapped.push(map(memfd(SHARED_NAME, SHARED_SIZE), SHARED_SIZE, 0));
                mapped.push(map(memfd(STAGING_NAME, STAGING_SIZE), STAGING_SIZE, 0));
                say("mapped");
            }
            ["reattach", restore, id] => {
                let stream = UnixStream::connect(&socket).unwrap();
                let request = Request::Reattach {
                    restore: restore.parse().unwrap(),
                    socket: id.parse().unwrap(),
                    cookie: cookie_of(&stream),
                };
                frame::send(&stream, &Opening::new(&request).unwrap(), &[], &[]).unwrap();
                connection = Some(stream);
                say("reattached");
            }
            // The steps of CRIU: it opens the image directory, begins to make processes, and its plugin asks for a restore.
            ["open", path] => {
                directory = Some(std::fs::File::open(path).unwrap());
                say("opened");
            }
            ["begin"] => {
                let inherited = directory.as_ref().unwrap().try_clone().unwrap();
                let mut child = std::process::Command::new(std::env::current_exe().unwrap());
                child
                    .args(["--exact", "fake_client", "--test-threads=1"])
                    .env("FAKE_CLIENT", "waits")
                    .stderr(inherited);
                say(&child.spawn().unwrap().id().to_string());
            }
            ["restore"] => {
                let stream = UnixStream::connect(&socket).unwrap();
                let fds = [directory.as_ref().unwrap().as_raw_fd()];
                frame::send(&stream, &Opening::new(&Request::Restore).unwrap(), &[], &fds).unwrap();
                match frame::receive::<Reply>(&stream).unwrap().body {
                    Reply::Prepared { .. } => say("prepared"),
                    other => panic!("{other:?}"),
                }
                connection = Some(stream);
            }
            ["listen", path] => {
                listener = Some(std::os::unix::net::UnixListener::bind(path).unwrap());
                say("listening");
            }
            ["moment"] => {
                let stream = UnixStream::connect(&socket).unwrap();
                frame::send(&stream, &Opening::new(&Request::Moment).unwrap(), &[], &[]).unwrap();
                match frame::receive::<Reply>(&stream).unwrap().body {
                    Reply::Moment { awaited } => say(&format!("moment {awaited}")),
                    other => panic!("{other:?}"),
                }
            }
            ["cookie"] => say(&cookie_of(connection.as_ref().unwrap()).to_string()),
            ["disconnect"] => {
                connection = None;
                say("disconnected");
            }
            // Reports whether the other end closes.
            ["wait"] => {
                let mut byte = [0];
                let read = connection.as_ref().unwrap().read(&mut byte);
                say(if matches!(read, Ok(1)) { "data" } else { "closed" });
            }
            other => panic!("{other:?}"),
        }
    }
    drop(listener);
}

/// Maps a file and closes it, as it is closed in a restored process. Returns the address.
fn map(file: OwnedFd, size: usize, address: usize) -> usize {
    let fixed = if address == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
    // SAFETY: without MAP_FIXED a mapping replaces nothing.
    let at = unsafe {
        libc::mmap(
            address as *mut _,
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | fixed,
            file.as_raw_fd(),
            0,
        )
    };
    assert!(at != libc::MAP_FAILED);
    at as usize
}
