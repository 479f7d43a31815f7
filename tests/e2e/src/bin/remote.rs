//! What ssh does between two hosts, for hosts that are namespaces of one machine: runs a command for whoever connects.
//!
//! ```text
//!   remote serve SOCKET               each connection begins with a line: a command as a JSON array; it becomes the command's
//!                                     input and output
//!   remote SOCKET COMMAND [WORD...]   runs a command there, with this process's input and output
//! ```

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let done = match arguments.as_slice() {
        [serve, socket] if serve == "serve" => listen(Path::new(socket)),
        [socket, words @ ..] => connect(Path::new(socket), words),
        [] => Err(anyhow::anyhow!("no socket")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("remote: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn listen(socket: &Path) -> Result<()> {
    let listener = UnixListener::bind(socket)?;
    for stream in listener.incoming() {
        let stream = stream?;
        std::thread::spawn(move || {
            if let Err(error) = run(stream) {
                eprintln!("remote: {error:#}");
            }
        });
    }
    Ok(())
}

fn run(mut stream: UnixStream) -> Result<()> {
    // Byte by byte: what follows the line is the command's.
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    let words: Vec<String> = serde_json::from_slice(&line)?;
    let (program, arguments) = words.split_first().context("no command")?;
    let (input, output) = (OwnedFd::from(stream.try_clone()?), OwnedFd::from(stream));
    let mut child =
        Command::new(program).args(arguments).stdin(Stdio::from(input)).stdout(Stdio::from(output)).spawn()?;
    child.wait()?;
    Ok(())
}

fn connect(socket: &Path, words: &[OsString]) -> Result<()> {
    let mut stream = UnixStream::connect(socket).with_context(|| format!("cannot reach {}", socket.display()))?;
    let words: Vec<_> = words.iter().map(|it| it.to_string_lossy()).collect();
    stream.write_all(format!("{}\n", serde_json::to_string(&words)?).as_bytes())?;
    let mut to = stream.try_clone()?;
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let (mut from, mut output) = (BufReader::with_capacity(1 << 20, stream), io::stdout().lock());
    loop {
        let bytes = from.fill_buf()?;
        if bytes.is_empty() {
            return Ok(());
        }
        output.write_all(bytes)?;
        output.flush()?;
        let length = bytes.len();
        from.consume(length);
    }
}
