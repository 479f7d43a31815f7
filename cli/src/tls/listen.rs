//! `rekindle tls listen`: lets hosts in that have a certificate.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;

use super::keys::{DIRECTORY, Keys};
use super::serve::serve;
use super::socket;
use super::waiting::Waiting;
use super::words::Programs;
use crate::daemon;
use crate::failure::Failure;
use crate::output;

/// The most connections at a time, with those that wait.
const MOST: usize = 1024;
/// The pause after a connection that could not be accepted, as when there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// The options of `rekindle tls listen`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The address of this host on which to listen, with a port or without: 10.0.0.2, 10.0.0.2:7353 or `[::]:7353`
    #[arg(long, value_name = "ADDRESS", value_parser = socket::address)]
    listen: SocketAddr,
    /// The directory of ca.pem, cert.pem, key.pem and peers
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    tls_dir: PathBuf,
    /// Without the file peers: let every host in whose certificate is good
    #[arg(long)]
    any_host: bool,
    /// The directory for files of migrations, best in memory [default: /dev/shm/rekindle-migrations]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The podman program
    #[arg(long, value_name = "PATH", default_value = "podman")]
    podman: PathBuf,
    #[command(flatten)]
    daemon: daemon::At,
}

/// Counts a connection until it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Listens until this process ends. Programs that were started go on then, without a connection.
pub(crate) fn listen(options: &Options) -> Result<(), Failure> {
    let keys = Keys::of(&std::path::absolute(&options.tls_dir).context("cannot tell the current directory")?);
    let keys = keys.that_let_in(options.any_host);
    // What is wrong is said now, and not to the first who connects.
    keys.server().map_err(Failure::refused)?;
    keys.peers().map_err(Failure::refused)?;
    let dir = options.dir.as_ref().map(std::path::absolute).transpose();
    let programs = Programs {
        rekindle: std::env::current_exe().context("cannot find this program")?,
        dir: dir.context("cannot tell the current directory")?,
        podman: options.podman.clone(),
        socket: options.daemon.socket()?,
    };
    let listener = TcpListener::bind(options.listen).map_err(|error| cannot_listen(options.listen, &error))?;
    let address = listener.local_addr().context("cannot tell the address")?;
    output::warn(format_args!("listens on {address}"));
    accept(&listener, &keys, &programs)
}

/// The failure to listen on an address.
fn cannot_listen(address: SocketAddr, error: &io::Error) -> Failure {
    let why = match error.kind() {
        io::ErrorKind::AddrInUse => "another program listens there".to_owned(),
        io::ErrorKind::PermissionDenied => "run this as root".to_owned(),
        io::ErrorKind::AddrNotAvailable => "name an address that this host has".to_owned(),
        _ if address.is_ipv6() => format!("on a host without IPv6 it is 0.0.0.0:{}", address.port()),
        _ => "name an address that this host has".to_owned(),
    };
    anyhow!(
        "cannot listen on {address} ({error}): {why}. --listen names the address, which rekindle-tls.service takes from \
         REKINDLE_TLS_LISTEN: `systemctl edit rekindle-tls` sets it"
    )
    .into()
}

pub(super) fn accept(listener: &TcpListener, keys: &Keys, programs: &Programs) -> ! {
    let (waiting, count) = (Waiting::default(), Arc::new(AtomicUsize::new(0)));
    loop {
        let (socket, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                output::warn(format_args!("a connection cannot be accepted: {error}"));
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let counted = Counted(Arc::clone(&count));
        if count.fetch_add(1, Ordering::Relaxed) >= MOST {
            output::warn(format_args!("{from}: there are {MOST} connections: no more are accepted"));
            continue;
        }
        let ticket = waiting.add(&socket, from.ip());
        let (keys, programs) = (keys.clone(), programs.clone());
        let serving = std::thread::Builder::new().spawn(move || {
            let _counted = counted;
            if let Err(error) = serve(socket, from, &keys, &programs, ticket) {
                output::warn(format_args!("{from}: {error}"));
            }
        });
        if let Err(error) = serving {
            output::warn(format_args!("{from}: there is no thread for the connection: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_cannot_listen_hears_what_to_set() {
        let said = |address: &str, error| {
            cannot_listen(address.parse().unwrap(), &io::Error::from_raw_os_error(error)).to_string()
        };
        let without_ipv6 = said("[::]:7353", libc::EAFNOSUPPORT);
        assert!(
            without_ipv6.contains("0.0.0.0:7353") && without_ipv6.contains("REKINDLE_TLS_LISTEN"),
            "{without_ipv6}"
        );
        // A mistyped address is no reason to listen on all of another kind.
        let not_here = said("[fd00::9]:7353", libc::EADDRNOTAVAIL);
        assert!(not_here.contains("this host has") && !not_here.contains("0.0.0.0"), "{not_here}");
        let used = said("10.0.0.2:7400", libc::EADDRINUSE);
        assert!(used.contains("another program") && used.contains("10.0.0.2:7400"), "{used}");
    }
}
