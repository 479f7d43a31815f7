//! The options of `rekindle migrate`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::anyhow;
use clap::Args;

use crate::engine::Engine;
use crate::failure::Failure;
use crate::{criu, daemon, tls};

/// The directory of a migration's files, on both hosts: in memory.
pub(super) const DIRECTORY: &str = "/dev/shm/rekindle-migrations";

/// The options of `rekindle migrate`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The process, whose descendants move with it, and the host that they move to, which ssh reaches without a question, a name for
    /// what --via reaches, or with --tls a name or address that its certificate has. With --container: the host alone
    #[arg(num_args = 1..=2, value_names = ["PID", "HOST"])]
    what: Vec<String>,
    /// Move this container of podman's instead of a process
    #[arg(long, value_name = "NAME", requires = "what", conflicts_with_all = ["allow_other_driver", "allow_other_gpu", "criu", "lazy"])]
    container: Option<String>,
    /// The podman program here [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    podman: Option<PathBuf>,
    /// The podman program on the other host
    #[arg(long, value_name = "PATH", default_value = "podman", conflicts_with = "tls")]
    podman_there: String,
    /// Finish a migration whose connection was lost: tell HOST whether the processes go on there
    #[arg(long, num_args = 2, value_names = ["MIGRATION", "HOST"], conflicts_with = "what")]
    pub(super) settle: Option<Vec<String>>,
    /// With --settle: the host that the processes come from is gone for good, and they go on at HOST
    #[arg(long, requires = "settle")]
    pub(super) take: bool,
    /// With --settle: the processes were let run at HOST, and ended in that very moment, before they had done anything: restore them there
    /// once more
    #[arg(long, requires = "settle")]
    pub(super) again: bool,
    /// With --settle: HOST is lost for good, and the container has not run there and never will: it goes on here, where it stands still
    #[arg(long, requires = "settle", conflicts_with_all = ["take", "again"])]
    pub(super) keep: bool,
    /// The shell command that runs a program on the other host [default: ssh HOST]
    #[arg(long, value_name = "COMMAND")]
    pub(super) via: Option<String>,
    /// The rekindle program on the other host
    #[arg(long, value_name = "PATH", default_value = "rekindle")]
    pub(super) rekindle: String,
    #[command(flatten)]
    pub(super) tls: tls::Way,
    /// The connections over which content is sent at a time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(super) streams: u32,
    /// Copy GPU memory while the processes run until a copy takes so many milliseconds, or no less than the one before
    #[arg(long, value_name = "MS", default_value_t = 100)]
    pub(super) pause_ms: u64,
    /// The directory for files on this host, best in memory
    #[arg(long, value_name = "DIR", default_value = DIRECTORY)]
    pub(super) dir: PathBuf,
    /// The directory for files on the other host, best in memory
    #[arg(long, value_name = "DIR", default_value = DIRECTORY, conflicts_with = "tls")]
    pub(super) dir_there: String,
    /// Move this address of the host with the process, whose connections to it go on, to the device of the same name or of that one there:
    /// with --tcp-established, which this implies. May be given several times
    #[arg(long, value_name = "ADDRESS[,DEVICE-THERE]", requires = "what", conflicts_with = "settle")]
    with_address: Vec<WithAddress>,
    #[command(flatten)]
    kept: criu::Keep,
    /// Let the processes run there before they have all pages of their own memory, which are there, and which CRIU brings when they are
    /// touched and meanwhile; see `rekindle restore`
    #[arg(long, conflicts_with = "settle")]
    pub(super) lazy: bool,
    /// Allow another version of the GPU driver there; see `rekindle restore`
    #[arg(long)]
    pub(super) allow_other_driver: bool,
    /// Allow GPUs of another kind there; see `rekindle restore`
    #[arg(long)]
    pub(super) allow_other_gpu: bool,
    /// The criu program [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    pub(super) criu: Option<PathBuf>,
    #[command(flatten)]
    pub(super) daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Be the other host: what `rekindle migrate` runs there
    #[arg(long, hide = true, conflicts_with_all = ["what", "settle"])]
    pub(super) receive: bool,
}

/// An address that moves, and the device that gets it there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WithAddress {
    pub(super) ip: IpAddr,
    /// None for one of the same name.
    pub(super) device_there: Option<String>,
}

impl FromStr for WithAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (ip, device) = text.split_once(',').map_or((text, None), |(ip, device)| (ip, Some(device)));
        let ip: IpAddr =
            ip.parse().map_err(|_| format!("{ip:?} is no address: give one as 10.0.0.9, without its network"))?;
        if device.is_some_and(|it| it.is_empty() || it.contains(['/', ' '])) {
            return Err("there is no device of that name".to_owned());
        }
        Ok(Self { ip: ip.to_canonical(), device_there: device.map(str::to_owned) })
    }
}

/// What moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject<'a> {
    /// A process and its descendants.
    Process(i32),
    /// The container of this name.
    Container(&'a str),
}

impl Options {
    /// What moves, and the host that it moves to.
    pub(super) fn subject(&self) -> Result<(Subject<'_>, &str), Failure> {
        if self.container.is_some() && !self.with_address.is_empty() {
            return Err(Failure::usage(anyhow!(
                "--with-address is not for containers: podman gives a container its address anew on the other host"
            )));
        }
        match (self.container.as_deref(), self.what.as_slice()) {
            (Some(name), [host]) => Ok((Subject::Container(name), host)),
            (None, [pid, host]) => match pid.parse() {
                Ok(pid) => Ok((Subject::Process(pid), host)),
                Err(_) => Err(Failure::usage(anyhow!("{pid} is no number of a process"))),
            },
            (Some(_), _) => Err(Failure::usage(anyhow!("give the container and a host, and nothing else"))),
            (None, _) => Err(Failure::usage(anyhow!("give a process and a host"))),
        }
    }

    /// The addresses that move with the process.
    pub(super) fn addresses(&self) -> &[WithAddress] {
        &self.with_address
    }

    /// What CRIU keeps.
    pub(super) fn kept(&self) -> criu::Keep {
        if self.with_address.is_empty() { self.kept } else { self.kept.with_connections() }
    }

    /// podman on this host.
    pub(super) fn podman(&self) -> Engine {
        Engine::podman(self.podman.as_deref())
    }

    /// The command by which a user finishes a migration, as a shell takes it: with what these options say of the other host.
    pub(super) fn settle_command(&self, migration: &str, host: &str, more: &[&str]) -> String {
        let mut words = ["rekindle", "migrate", "--settle", migration, host].map(str::to_owned).to_vec();
        words.extend(more.iter().map(|it| (*it).to_owned()));
        words.extend(self.tls.options());
        let mut option = |name: &str, value: &str, default: &str| {
            if value != default {
                words.extend([name.to_owned(), value.to_owned()]);
            }
        };
        option("--via", self.via.as_deref().unwrap_or_default(), "");
        option("--rekindle", &self.rekindle, "rekindle");
        option("--dir-there", &self.dir_there, DIRECTORY);
        option("--podman-there", &self.podman_there, "podman");
        option("--socket", &self.daemon.given().unwrap_or_default(), "");
        words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
    }

    /// The words that run `rekindle` on the other host.
    pub(super) fn words_there(&self) -> Vec<String> {
        let (rekindle, dir, podman) = (&self.rekindle, &self.dir_there, &self.podman_there);
        [rekindle, "migrate", "--receive", "--dir", dir, "--podman", podman].map(ToString::to_string).to_vec()
    }
}

/// A word as a shell takes it.
pub(crate) fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// What moves and where to, as the words say.
    fn meant(words: &str) -> Option<(String, String)> {
        let line = Line::try_parse_from(["migrate"].into_iter().chain(words.split_whitespace())).ok()?;
        line.options.subject().ok().map(|(subject, host)| (format!("{subject:?}"), host.to_owned()))
    }

    #[test]
    fn a_process_or_a_container_moves_to_a_host() {
        let is = |subject: &str| Some((subject.to_owned(), "gpu2".to_owned()));
        assert_eq!(meant("812 gpu2"), is("Process(812)"));
        assert_eq!(meant("--container job gpu2"), is("Container(\"job\")"));
        assert_eq!(meant("gpu2 --container job"), is("Container(\"job\")"));
        for words in ["", "812", "job gpu2", "--container job", "--container job 812 gpu2", "1 a b", "--settle m"] {
            assert_eq!(meant(words), None, "{words}");
        }
        assert_eq!(meant("--container job gpu2 --allow-other-gpu"), None);
    }

    #[test]
    fn an_address_moves_to_a_device_and_keeps_its_connections() {
        let line = |words: &str| Line::try_parse_from(["migrate"].into_iter().chain(words.split_whitespace()));
        let options = line("1 gpu2 --with-address 10.0.0.9,eth1 --with-address fd00::9").unwrap().options;
        let address = |ip: &str, device: Option<&str>| WithAddress {
            ip: ip.parse().unwrap(),
            device_there: device.map(str::to_owned),
        };
        assert_eq!(options.addresses(), [address("10.0.0.9", Some("eth1")), address("fd00::9", None)]);
        assert_eq!(options.kept().options().collect::<Vec<_>>(), ["--tcp-established"]);
        assert_eq!(line("1 gpu2").unwrap().options.kept().options().count(), 0);
        for bad in ["10.0.0.9/24", "10.0.0.9,", "eth0", ""] {
            assert!(line(&format!("1 gpu2 --with-address {bad}")).is_err(), "{bad}");
        }
        assert!(line("--settle m gpu2 --with-address 10.0.0.9").is_err());
        let failure = line("--container job gpu2 --with-address 10.0.0.9").unwrap().options.subject().unwrap_err();
        assert!(failure.to_string().contains("podman"), "{failure}");
    }

    /// The host that listens has its own.
    #[test]
    fn by_tls_nothing_is_said_of_programs_and_paths_there() {
        let line = |words: &str| Line::try_parse_from(["migrate"].into_iter().chain(words.split_whitespace()));
        assert!(line("1 gpu2 --tls --tls-dir /d --socket /s --dir /x --podman /p").is_ok());
        for words in ["--via ssh", "--rekindle /r", "--dir-there /d", "--podman-there /p"] {
            assert!(line(&format!("1 gpu2 {words}")).is_ok(), "{words}");
            assert!(line(&format!("1 gpu2 --tls {words}")).is_err(), "{words}");
        }
        assert!(line("1 gpu2 --tls-dir /d").is_err());
        let words = line("1 gpu2:9 --tls").unwrap().options.tls.words("gpu2:9", tls::Service::Migrate).unwrap();
        assert_eq!(words.join(" "), "tls connect --tls-dir /etc/rekindle/tls -- gpu2:9 migrate");
        assert_eq!(line("1 gpu2").unwrap().options.tls.words("gpu2", tls::Service::Migrate), None);
    }

    #[test]
    fn the_command_that_settles_a_migration_reaches_the_host_in_the_same_way() {
        let command = |words: &[&str], more: &[&str]| {
            let line = Line::try_parse_from(["migrate", "1", "gpu2"].iter().chain(words)).unwrap();
            line.options.settle_command("ab", "gpu2", more)
        };
        assert_eq!(command(&[], &[]), "rekindle migrate --settle ab gpu2");
        assert_eq!(command(&["--streams", "2"], &["--again"]), "rekindle migrate --settle ab gpu2 --again");
        let words =
            ["--via", "ssh -p 22 'gpu2'", "--dir-there", "/mnt/a b", "--podman-there", "/opt/podman", "--socket", "/s"];
        let expected = r"rekindle migrate --settle ab gpu2 --via 'ssh -p 22 '\''gpu2'\''' --dir-there '/mnt/a b'";
        assert_eq!(command(&words, &[]), format!("{expected} --podman-there /opt/podman --socket /s"));
        assert_eq!(command(&["--tls"], &[]), "rekindle migrate --settle ab gpu2 --tls");
        let words = ["--tls", "--tls-dir", "/a b", "--socket", "/s"];
        assert_eq!(command(&words, &[]), "rekindle migrate --settle ab gpu2 --tls --tls-dir '/a b' --socket /s");
    }
}
