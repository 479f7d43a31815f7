//! The protocol by which a client is checkpointed, and the source of that choice.
//!
//! The first source that names a protocol decides: the order for the checkpoint, `rekindle protocol`, the program's
//! environment, its container's annotation, the configuration.

use std::time::Duration;

use rekindle_images::{Protocol, UnknownProtocol};
use rekindle_wire::attach::PROTOCOL;
use rekindle_wire::control::{Failure, ProtocolChange, Reply, WorkerRequest};
use tracing::{info, warn};

use super::clients::Client;
use super::sys::Credentials;
use super::{Daemon, list};
use crate::limit::Limit;

/// How long a worker may take to note the protocol.
const REMEMBER: Limit = Limit::fixed(Duration::from_secs(2));

impl Daemon {
    /// The protocol, and its source. A program's environment counts if it names a known protocol.
    pub(crate) fn protocol_of(&self, client: &Client) -> (Protocol, String) {
        let (said, unknown) = match of_environment(client) {
            None => (None, String::new()),
            Some(Ok(said)) => (Some(said), String::new()),
            Some(Err(error)) => (None, format!(" ({PROTOCOL} of the process: {error})")),
        };
        let container = client.allowed.container.as_ref().and_then(|it| it.protocol);
        let sources = [
            (self.checkpoints.protocol_of(client.process.pid), "`rekindle checkpoint`"),
            (client.chosen_protocol(), "`rekindle protocol`"),
            (said, "REKINDLE_PROTOCOL of the process"),
            (container, "annotation dev.rekindle/protocol of its container"),
            (self.config.checkpoint.protocol, "checkpoint.protocol of the configuration"),
        ];
        let found = sources.into_iter().find_map(|(protocol, who)| Some((protocol?, who)));
        let (protocol, who) = found.unwrap_or((Protocol::Auto, "default"));
        (protocol, format!("{who}{unknown}"))
    }
}

/// The protocol in the client's environment when it started.
pub(crate) fn of_environment(client: &Client) -> Option<Result<Protocol, UnknownProtocol>> {
    let (_, name) = client.attach.settings.iter().find(|(name, _)| name == PROTOCOL)?;
    Some(name.parse())
}

/// Replies which protocol applies, after changing it if the peer asks for that.
pub(crate) fn serve(daemon: &Daemon, peer: Credentials, pid: i32, change: ProtocolChange) -> Reply {
    match try_serve(daemon, peer, pid, change) {
        Ok(reply) => reply,
        Err(failure) => Reply::Failed(failure),
    }
}

fn try_serve(daemon: &Daemon, peer: Credentials, pid: i32, change: ProtocolChange) -> Result<Reply, Failure> {
    let client = list::client(daemon, peer, pid)?;
    let chosen = match change {
        ProtocolChange::Keep => client.chosen_protocol(),
        ProtocolChange::Choose(name) => {
            Some(name.parse().map_err(|error: UnknownProtocol| Failure::refused(error.to_string()))?)
        }
        ProtocolChange::Forget => None,
    };
    if chosen != client.chosen_protocol() {
        client.choose_protocol(chosen);
        let protocol = chosen.map(|it| it.as_str().to_owned());
        if let Err(error) = client.worker.ask(&WorkerRequest::Remember { protocol }, &[], REMEMBER) {
            warn!(%client, "what is chosen for it will be forgotten with this daemon: {error}");
        }
        info!(%client, protocol = chosen.map_or("none", Protocol::as_str), "a protocol is chosen for it");
    }
    let (protocol, reason) = daemon.protocol_of(&client);
    Ok(Reply::Protocol { protocol: protocol.as_str().to_owned(), reason })
}
