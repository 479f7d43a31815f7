//! `rekindle tls connect`: carries its input and output over a connection to a host that listens.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow};
use clap::Args;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConnection};

use super::carry::Carrier;
use super::frames::{FrameError, Kind};
use super::keys::{DIRECTORY, Keys};
use super::secured::{Lost, Secured};
use super::serve::PATIENCE;
use super::socket::Place;
use crate::failure::Failure;

/// The options of `rekindle tls connect`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The host, by a name or an address that its certificate has, and its port [default: 7353]
    #[arg(value_name = "HOST[:PORT]")]
    host: String,
    /// What the host is to run: migrate or cut
    #[arg(required = true, value_name = "WORD")]
    words: Vec<String>,
    /// The directory of ca.pem, cert.pem and key.pem
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    tls_dir: PathBuf,
}

/// Carries until the other host's program has ended, and ends as it did.
pub(crate) fn connect(options: &Options) -> Result<(), Failure> {
    let Options { host, words, tls_dir } = options;
    let connection = open(&Keys::of(tls_dir), host, words.join("\0").as_bytes())?;
    let input = rustix::io::dup(rustix::stdio::stdin()).context("there is no input")?;
    let output = take_output().context("there is no output")?;
    let errors = rustix::io::dup(rustix::stdio::stderr()).context("there is no output for errors")?;
    let carried = Carrier::of_caller(connection, input, output, errors).until_status();
    let status = carried.map_err(|lost| anyhow!("the connection to {host} is lost: {lost}"))?;
    std::process::exit(status.into())
}

/// Opens a connection to a host that runs what these words say.
pub(super) fn open(keys: &Keys, host: &str, words: &[u8]) -> Result<Secured, Failure> {
    let place = Place::parse(host).ok_or_else(|| {
        Failure::usage(anyhow!(
            "{host} is no host: give a name or an address, and a port if it is another than the usual one"
        ))
    })?;
    let config = keys.client().map_err(Failure::refused)?;
    let name = ServerName::try_from(place.host.clone()).context("no name of a host")?;
    let socket = place.connect().map_err(|error| {
        anyhow!(
            "cannot connect to {host} ({error}): start `rekindle tls listen` there (rekindle-tls.service) and have firewalls let its port \
             through, or name the port on which it listens"
        )
    })?;
    let tls = ClientConnection::new(config, name).context("TLS cannot begin")?;
    let mut connection = Secured::new(socket, tls).context("TLS cannot begin")?;
    let deadline = Instant::now() + PATIENCE;
    connection.shake_hands(deadline).map_err(|lost| not_in(host, &lost))?;
    let asked = connection.say(Kind::Ask, words).and_then(|()| connection.hear(deadline));
    match asked.map_err(|lost| not_in(host, &lost))? {
        (Kind::Started, _) => Ok(connection),
        (Kind::Refused, why) => Err(Failure::refused(anyhow!("{host} refuses: {}", String::from_utf8_lossy(&why)))),
        (kind, _) => Err(not_in(host, &FrameError::OutOfTurn(kind).into())),
    }
}

/// Why a host is not reached.
fn not_in(host: &str, lost: &Lost) -> Failure {
    let advice = match lost {
        Lost::Tls(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)) => {
            ": install one version of Rekindle on both hosts"
        }
        Lost::Tls(rustls::Error::AlertReceived(alert)) if is_of_certificate(*alert) => {
            ": it does not accept this host's certificate. Its `rekindle tls listen` says why"
        }
        Lost::Tls(rustls::Error::InvalidCertificate(_)) => {
            ": its certificate must be good for the name by which it is called here, and be signed by who is in ca.pem"
        }
        Lost::Tls(_) | Lost::Slow => ": does `rekindle tls listen` listen there?",
        Lost::Closed | Lost::Io(_) => ": its `rekindle tls listen` says why, if it does listen there",
        Lost::Frame(_) => "",
    };
    Failure::refused(anyhow!("{host} is not reached by TLS: {lost}{advice}"))
}

/// Whether an alert is about the certificate that was shown.
fn is_of_certificate(alert: AlertDescription) -> bool {
    use AlertDescription as Of;

    matches!(
        alert,
        Of::NoCertificate
            | Of::BadCertificate
            | Of::UnsupportedCertificate
            | Of::CertificateRevoked
            | Of::CertificateExpired
            | Of::CertificateUnknown
            | Of::UnknownCA
            | Of::AccessDenied
            | Of::DecryptError
            | Of::CertificateRequired
    )
}

/// This process's output, which ends when this is closed.
fn take_output() -> std::io::Result<OwnedFd> {
    let output = rustix::io::dup(rustix::stdio::stdout())?;
    let nowhere = std::fs::File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&nowhere)?;
    Ok(output)
}
