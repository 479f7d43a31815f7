//! `rekindle tls`: the way to another host over mutual TLS, for `migrate` and `cut`.
//!
//! ```text
//!   here                                                      the other host
//!   rekindle migrate ── pipes ── rekindle tls connect         rekindle tls listen ── pipes ── rekindle migrate --receive
//!                                (connect.rs)  └── TLS 1.3 ──┘ (listen.rs, serve.rs)
//! ```
//!
//! Each of a migration's connections is one of TCP. Both ends show a certificate (`keys.rs`); the host that listens lets in whom the
//! administrator has let in (`peers.rs`), runs one of two things for them (`words.rs`), and is not kept from that by those who connect and
//! do not say who they are (`waiting.rs`). Frames (`frames.rs`) bring the program's errors and its status back besides its output, as ssh
//! does.

#[cfg(test)]
mod authority;
mod carry;
mod connect;
mod frames;
mod keys;
mod listen;
#[cfg(test)]
mod loss;
mod orphan;
mod peers;
mod pipes;
mod secured;
mod serve;
mod socket;
#[cfg(test)]
mod tests;
mod waiting;
mod words;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use self::keys::DIRECTORY;
pub(crate) use self::words::{BY_SSH, CONNECTION, Service};
use crate::failure::Failure;

/// The options of `rekindle tls`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Let other hosts migrate processes to here and make cuts, if they show a certificate
    Listen(listen::Options),
    /// Carry input and output to a host that listens: what `migrate --tls` and `cut --tls` run
    Connect(connect::Options),
}

/// Listens, or connects.
pub(crate) fn tls(options: &Options) -> Result<(), Failure> {
    match &options.verb {
        Verb::Listen(options) => listen::listen(options),
        Verb::Connect(options) => connect::connect(options),
    }
}

/// The options of the verbs that reach other hosts.
#[derive(Clone, Debug, Args)]
pub(crate) struct Way {
    /// Reach other hosts by TLS, where `rekindle tls listen` runs. A host is a name or an address that its certificate has, with a port if
    /// it is not 7353
    #[arg(long, conflicts_with_all = ["via", "rekindle"])]
    tls: bool,
    /// With --tls: the directory of ca.pem, cert.pem and key.pem
    #[arg(long, value_name = "DIR", default_value = DIRECTORY, requires = "tls")]
    tls_dir: PathBuf,
}

impl Way {
    /// The words by which this program reaches a host, if that is how; without those that come first.
    pub(crate) fn words(&self, host: &str, service: Service) -> Option<Vec<String>> {
        let dir = self.tls_dir.to_string_lossy().into_owned();
        let words = || ["tls", "connect", "--tls-dir", &dir, "--", host, service.word()].map(str::to_owned).to_vec();
        self.tls.then(words)
    }

    /// The options that say so.
    pub(crate) fn options(&self) -> Vec<String> {
        let dir = self.tls_dir.to_string_lossy().into_owned();
        let tls = self.tls.then(|| "--tls".to_owned());
        let other = (dir != DIRECTORY).then(|| ["--tls-dir".to_owned(), dir]);
        tls.into_iter().chain(other.into_iter().flatten()).collect()
    }
}
