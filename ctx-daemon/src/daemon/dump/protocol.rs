//! Which protocol a dump follows, and why (PhoenixOS, SOSP'25, section 4; the table in `docs/operating.md`).
//!
//! | protocol | the image is the state at | the application waits for |
//! |---|---|---|
//! | `stop` | the quiesce | the whole copy |
//! | `clone` | the quiesce | a copy on the device; what does not fit is protected |
//! | `cow` | the quiesce | hashing; later, before commands that write what is not copied yet |
//! | `recopy` | the end | hashing, and copying what changed since it was copied before |

use rekindle_images::Protocol;
use rekindle_wire::control::Copying;

/// Less than this is copied while CRIU writes the memory that every process has.
const LITTLE: u64 = 256 << 20;
/// With more than this it is worth copying before the processes are stopped, where they do not go on.
const MUCH: u64 = 1 << 30;

/// The protocol of one client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    /// The protocol; never `auto`.
    pub(super) protocol: Protocol,
    pub(super) reason: String,
}

impl Chosen {
    /// Chooses for a client with so much GPU memory; `who` asked for the protocol `asked`.
    pub(super) fn new(asked: Protocol, who: &str, bytes: u64, leave_running: bool) -> Self {
        let mib = bytes >> 20;
        let (protocol, why) = match (asked, leave_running) {
            (Protocol::Stop, _) => (Protocol::Stop, String::new()),
            (Protocol::Recopy, _) => (Protocol::Recopy, String::new()),
            (Protocol::Clone | Protocol::Cow, false) if bytes > MUCH => {
                (Protocol::Recopy, "; the processes do not go on, so it is copied before".to_owned())
            }
            (Protocol::Clone | Protocol::Cow, false) => {
                (Protocol::Stop, "; the processes do not go on, so nothing is gained by it".to_owned())
            }
            (Protocol::Clone, true) => (Protocol::Clone, String::new()),
            (Protocol::Cow, true) => (Protocol::Cow, String::new()),
            (_, true) if bytes <= LITTLE => (Protocol::Stop, format!(": {mib} MiB are copied within the freeze")),
            (_, true) => (Protocol::Clone, format!(": the processes go on, with {mib} MiB of GPU memory")),
            (_, false) if bytes <= MUCH => (Protocol::Stop, format!(": {mib} MiB are copied soon")),
            (_, false) => (Protocol::Recopy, format!(": {mib} MiB are copied before the processes are stopped")),
        };
        Self { protocol, reason: format!("{} asked for by {who}{why}", asked.as_str()) }
    }

    /// The worker's part of the protocol.
    pub(super) fn copying(&self) -> Copying {
        match self.protocol {
            Protocol::Clone => Copying::Clone,
            Protocol::Cow => Copying::Cow,
            _ => Copying::Stop,
        }
    }

    /// The device memory to set aside before the quiesce: none, so many bytes, or enough for all (`None` in it).
    pub(super) fn reserves(&self, cow_pool: u64) -> Option<Option<u64>> {
        match self.protocol {
            Protocol::Clone => Some(None),
            Protocol::Cow => Some(Some(cow_pool)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_done_where_it_makes_sense() {
        let chosen = |asked, bytes, running| Chosen::new(asked, "the configuration", bytes, running).protocol;
        for asked in [Protocol::Stop, Protocol::Recopy] {
            assert_eq!((chosen(asked, 1, true), chosen(asked, u64::MAX, false)), (asked, asked));
        }
        for asked in [Protocol::Clone, Protocol::Cow] {
            assert_eq!(chosen(asked, 1, true), asked);
            assert_eq!(chosen(asked, LITTLE, false), Protocol::Stop);
            assert_eq!(chosen(asked, MUCH + 1, false), Protocol::Recopy);
        }
        assert_eq!(chosen(Protocol::Auto, LITTLE, true), Protocol::Stop);
        assert_eq!(chosen(Protocol::Auto, LITTLE + 1, true), Protocol::Clone);
        assert_eq!(chosen(Protocol::Auto, MUCH, false), Protocol::Stop);
        assert_eq!(chosen(Protocol::Auto, MUCH + 1, false), Protocol::Recopy);
        let reason = Chosen::new(Protocol::Auto, "the configuration", 300 << 20, true).reason;
        assert_eq!(reason, "auto asked for by the configuration: the processes go on, with 300 MiB of GPU memory");
    }
}
