//! One connection at the host that listens.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustls::ServerConnection;
use thiserror::Error;

use super::carry::Carrier;
use super::frames::{FrameError, Kind};
use super::keys::{Keys, KeysError};
use super::pipes::Source;
use super::secured::{Lost, Secured};
use super::socket;
use super::waiting::Ticket;
use super::words::{CONNECTION, Programs, Service};
use crate::output;

/// How long a host may take to say who it is and what it wants.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a host may take to hear the last.
const LAST: Duration = Duration::from_secs(5);

/// Why nothing was run, or not to its end.
#[derive(Debug, Error)]
pub(super) enum ServeError {
    #[error("{0}")]
    Keys(#[from] KeysError),
    #[error("not let in: {0}")]
    NotIn(Lost),
    #[error("refused: {0}")]
    Refused(String),
    #[error("cannot run {program}: {source}")]
    Run { program: String, source: io::Error },
    #[error("the other host is lost: {0}")]
    Lost(Lost),
}

/// A host that is let in, and what it wants.
struct Admitted {
    connection: Secured,
    name: String,
    service: Service,
}

/// Serves a connection to its end.
pub(super) fn serve(
    socket: TcpStream,
    from: SocketAddr,
    keys: &Keys,
    programs: &Programs,
    ticket: Ticket,
) -> Result<(), ServeError> {
    let own = socket.local_addr().map_err(|error| ServeError::NotIn(error.into()))?;
    let Admitted { mut connection, name, service } = admit(socket, keys)?;
    drop(ticket);
    output::warn(format_args!("{from}, {name}: {}", service.word()));
    let (child, input, sources) = match start(programs, service, from, own) {
        Ok(started) => started,
        Err(error) => return Err(refuse(connection, error.to_string(), error)),
    };
    // If nobody hears it, the program finds its input at its end.
    let _ = connection.say(Kind::Started, &[]);
    carry_for(child, connection, input, sources)
}

/// Finds out whose the connection is, and what for.
fn admit(socket: TcpStream, keys: &Keys) -> Result<Admitted, ServeError> {
    let (config, peers) = (keys.server()?, keys.peers()?);
    let deadline = Instant::now() + PATIENCE;
    let not_in = |lost: Lost| ServeError::NotIn(lost);
    socket::notices_loss(&socket).map_err(|error| not_in(error.into()))?;
    let tls = ServerConnection::new(config).map_err(|error| not_in(error.into()))?;
    let mut connection = Secured::new(socket, tls).map_err(|error| not_in(error.into()))?;
    let asked = connection.shake_hands(deadline).and_then(|()| connection.hear(deadline));
    let words = match asked {
        Ok((Kind::Ask, words)) => words,
        Ok((kind, _)) => return Err(not_in(FrameError::OutOfTurn(kind).into())),
        Err(lost) => {
            // It is to hear why, if it is still there.
            connection.close(deadline);
            return Err(not_in(lost));
        }
    };
    let certificate = connection.certificate().ok_or_else(|| "it has shown no certificate".to_owned());
    let name = match certificate.and_then(|it| peers.admits(it)) {
        Ok(name) => name,
        Err(why) => return Err(refuse(connection, why.clone(), ServeError::Refused(why))),
    };
    match Service::asked(&words) {
        Ok(service) => Ok(Admitted { connection, name, service }),
        Err(why) => Err(refuse(connection, why.clone(), ServeError::Refused(format!("{name}: {why}")))),
    }
}

/// Says why nothing is run.
fn refuse(mut connection: Secured, why: String, error: ServeError) -> ServeError {
    let _ = connection.say(Kind::Refused, why.as_bytes());
    connection.close(Instant::now() + LAST);
    error
}

/// Starts the program. Its input and output are pipes.
fn start(
    programs: &Programs,
    service: Service,
    from: SocketAddr,
    own: SocketAddr,
) -> Result<(Child, OwnedFd, Vec<Source>), ServeError> {
    let mut command = programs.command(service);
    // As sshd says it: the source's address may be one that moves.
    let end = |it: SocketAddr| format!("{} {}", it.ip().to_canonical(), it.port());
    command.env(CONNECTION, format!("{} {}", end(from), end(own)));
    // What ends this program by its terminal does not end that one: it may hold processes that nobody else has.
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let failed = |source| ServeError::Run { program: programs.rekindle.display().to_string(), source };
    let mut child = command.spawn().map_err(failed)?;
    let (Some(input), Some(output), Some(errors)) = (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(failed(io::ErrorKind::BrokenPipe.into()));
    };
    let sources =
        vec![Source { from: output.into(), kind: Kind::Data }, Source { from: errors.into(), kind: Kind::Errors }];
    Ok((child, input.into(), sources))
}

/// Carries what the program hears and says, until it has ended.
fn carry_for(mut child: Child, connection: Secured, input: OwnedFd, sources: Vec<Source>) -> Result<(), ServeError> {
    let carrier = watch(&child).and_then(|program| Carrier::of_program(connection, program, input, sources));
    let lost = match carrier.map_err(Lost::from).map(Carrier::until_ended) {
        Ok(Ok(mut connection)) => {
            let status = child.wait().map_err(|error| ServeError::Lost(error.into()))?;
            let code = status.code().or_else(|| status.signal().map(|it| 128 + it)).unwrap_or(1);
            let said = connection.say(Kind::Status, &[code as u8]);
            connection.close(Instant::now() + LAST);
            return said.map_err(ServeError::Lost);
        }
        Ok(Err((lost, orphan))) => {
            orphan.attend();
            lost
        }
        Err(lost) => lost,
    };
    let _ = child.wait();
    Err(ServeError::Lost(lost))
}

/// A descriptor that is ready when the program has ended.
fn watch(child: &Child) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(child.id() as i32).ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}
