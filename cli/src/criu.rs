//! CRIU: the program, its options and its log.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::Args;

use crate::failure::Failure;
use crate::process::Process;
use crate::run;

/// Directories of CRIU besides `PATH`.
const ALSO: [&str; 3] = ["/usr/sbin", "/usr/local/sbin", "/sbin"];
/// CRIU's configuration file.
pub(crate) const CONFIGURATION: &str = "/etc/criu/default.conf";
/// The default directory of CRIU's plugins.
pub(crate) const OWN_PLUGINS: &str = "/usr/lib/criu";
/// Rekindle's plugin.
pub(crate) const PLUGIN: &str = "rekindle.so";
/// Advice where there is no CRIU.
pub(crate) const ADVICE: &str = "install CRIU 4.0 or later (Debian: apt-get install criu)";
/// Lines that CRIU logs as errors although it goes on.
const HARMLESS: [&str; 1] = ["Can't setup RLIMIT_NOFILE"];
/// The most lines of a log that are shown.
const LINES: usize = 8;

/// What CRIU keeps of processes only if it is told to. A dump and its restore have the same options, and podman passes them on.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(crate) struct Keep {
    /// Keep established TCP connections
    #[arg(long)]
    tcp_established: bool,
    /// Keep file locks
    #[arg(long)]
    file_locks: bool,
}

impl Keep {
    /// The same, with established TCP connections.
    pub(crate) fn with_connections(self) -> Self {
        Self { tcp_established: true, ..self }
    }

    /// The options that are set.
    pub(crate) fn options(self) -> impl Iterator<Item = &'static str> {
        let flags = [("--tcp-established", self.tcp_established), ("--file-locks", self.file_locks)];
        flags.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name)
    }
}

/// Whether these options are those by which CRIU keeps more of processes, as another host says them: it chooses nothing else here.
pub(crate) fn are_kept(options: &[String]) -> Result<(), Failure> {
    let is_kept = |it: &str| {
        let limit = it.strip_prefix("--ghost-limit=").and_then(|it| it.strip_suffix('M'));
        ["--tcp-established", "--file-locks"].contains(&it) || limit.is_some_and(|it| it.parse::<u32>().is_ok())
    };
    match options.iter().find(|it| !is_kept(it)) {
        Some(other) => Err(Failure::refused(anyhow!("{other:?} is no option that another host may choose for CRIU"))),
        None => Ok(()),
    }
}

/// The first criu in `PATH` or in the directories above.
pub(crate) fn find() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(ALSO.map(PathBuf::from));
    folders.map(|folder| folder.join("criu")).find(|it| it.is_file())
}

/// The criu that the user has named, or the one that is installed.
pub(crate) fn program(named: Option<&Path>) -> Result<PathBuf, Failure> {
    match named {
        Some(path) if path.is_file() => Ok(path.to_owned()),
        Some(path) => Err(Failure::refused(anyhow!("there is no {}", path.display()))),
        None => find().ok_or_else(|| {
            Failure::refused(anyhow!("there is no criu in PATH: {ADVICE}, or give its path with --criu"))
        }),
    }
}

/// The directory in which CRIU looks for plugins.
pub(crate) fn plugin_folder() -> PathBuf {
    let home = env::var_os("HOME").map(PathBuf::from);
    let own = home.map(|it| it.join(".criu/default.conf"));
    let files = [Some(PathBuf::from(CONFIGURATION)), own];
    let told = files.into_iter().flatten().filter_map(|file| libdir(&fs::read_to_string(file).ok()?)).next_back();
    told.or_else(|| env::var_os("CRIU_LIBS_DIR").map(PathBuf::from)).unwrap_or_else(|| OWN_PLUGINS.into())
}

/// The options with which CRIU finds Rekindle's plugin: none where CRIU finds it by itself, as after an installation.
pub(crate) fn libdir_option() -> Result<Option<PathBuf>, Failure> {
    if plugin_folder().join(PLUGIN).exists() {
        return Ok(None);
    }
    let beside = run::beside_program()?.join("criu");
    if beside.join(PLUGIN).exists() {
        return Ok(Some(beside));
    }
    let folder = plugin_folder();
    let said = format!(
        "there is no {PLUGIN} in {}, where CRIU looks for plugins: run `rekindle-oci-hook install`, and `rekindle doctor`",
        folder.display()
    );
    Err(Failure::refused(anyhow!(said)))
}

/// The arguments of a `criu dump` of a process and its descendants into a directory.
pub(crate) fn dump(pid: i32, dir: &Path, log: &Path) -> Result<Vec<OsString>, Failure> {
    let process = Process::find(pid).ok_or_else(|| Failure::refused(anyhow!("there is no process {pid}")))?;
    let mut arguments: Vec<OsString> = vec!["dump".into(), "--tree".into(), pid.to_string().into()];
    arguments.extend(["--images-dir".into(), dir.into(), "--log-file".into(), log.into()]);
    if process.is_of_a_shell() {
        arguments.push("--shell-job".into());
    }
    arguments.extend(libdir_option()?.into_iter().flat_map(|it| ["--libdir".into(), it.into()]));
    Ok(arguments)
}

/// The arguments of a `criu restore` of the image in a directory.
pub(crate) fn restore(dir: &Path, log: &Path) -> Result<Vec<OsString>, Failure> {
    // A tree that is a session of its own is restored as one, whether this is said or not.
    let mut arguments: Vec<OsString> = vec!["restore".into(), "--shell-job".into()];
    arguments.extend(["--images-dir".into(), dir.into(), "--log-file".into(), log.into()]);
    arguments.extend(libdir_option()?.into_iter().flat_map(|it| ["--libdir".into(), it.into()]));
    Ok(arguments)
}

/// The value of the last such line in a configuration.
fn libdir(text: &str) -> Option<PathBuf> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let mut values = lines.filter_map(|line| {
        let line = line.trim_start_matches('-');
        let separator = |c: char| c.is_whitespace() || c == '=';
        let value = line.strip_prefix("libdir").filter(|rest| rest.starts_with(separator))?;
        Some(PathBuf::from(value.trim_start_matches(separator).trim_matches('"')))
    });
    values.next_back().filter(|it| !it.as_os_str().is_empty())
}

/// The lines of CRIU's log that report errors: the plugin's first, then CRIU's own.
pub(crate) fn errors(log: &str) -> Vec<String> {
    let said = log.lines().filter_map(|line| {
        // After the time.
        let error = &line[line.find("Error (")?..];
        (!HARMLESS.iter().any(|it| error.contains(it))).then(|| error.to_owned())
    });
    let (mut ours, others): (Vec<_>, Vec<_>) = said.partition(|line| line.starts_with("Error (rekindle)"));
    ours.extend(others);
    ours.truncate(LINES);
    ours
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_libdir_counts_and_comments_do_not() {
        let text = "tcp-established\n# libdir /no\nlibdir /a # old\nlibdir = \"/b\"\nlibdirs /c\n";
        assert_eq!(libdir("log-file x\n"), None);
        assert_eq!(libdir(text), Some("/b".into()));
    }

    #[test]
    fn another_host_chooses_what_is_kept_and_nothing_else() {
        let are_kept =
            |options: &[&str]| are_kept(&options.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>()).is_ok();
        assert!(are_kept(&["--tcp-established", "--file-locks", "--ghost-limit=20M"]) && are_kept(&[]));
        for other in
            ["--ghost-limit=20", "--ghost-limit=-M", "--ghost-limit", "--action-script=/x", "/x", "--libdir=/x"]
        {
            assert!(!are_kept(&["--file-locks", other]), "{other}");
        }
    }

    #[test]
    fn what_our_plugin_says_comes_first() {
        let log = "(00.0) Error (criu/util.c:9): rlimit: Can't setup RLIMIT_NOFILE for self: no\n(00.1) Warn  (x): y\n(00.2) Error (criu/tty.c:1): a\n(00.3) Error (rekindle): b\nnothing\n";
        assert_eq!(errors(log), ["Error (rekindle): b", "Error (criu/tty.c:1): a"]);
    }
}
