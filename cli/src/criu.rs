//! Where CRIU is, what it is told, and what it says.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::anyhow;

use crate::failure::Failure;
use crate::run;

/// Where it lies, besides in `PATH`.
const ALSO: [&str; 3] = ["/usr/sbin", "/usr/local/sbin", "/sbin"];
/// Where it reads options.
pub(crate) const CONFIGURATION: &str = "/etc/criu/default.conf";
/// Where it looks for plugins unless it is told otherwise.
pub(crate) const OWN_PLUGINS: &str = "/usr/lib/criu";
/// Ours.
pub(crate) const PLUGIN: &str = "rekindle.so";
/// What one does where there is none.
pub(crate) const ADVICE: &str = "install CRIU 4.0 or later (Debian: apt-get install criu)";
/// What it calls an error, and goes on.
const HARMLESS: [&str; 1] = ["Can't setup RLIMIT_NOFILE"];
/// So many lines of a log are shown.
const LINES: usize = 8;

/// The first in `PATH` or where administrators' programs are.
pub(crate) fn find() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(ALSO.map(PathBuf::from));
    folders.map(|folder| folder.join("criu")).find(|it| it.is_file())
}

/// The one that is named, or the one that there is.
pub(crate) fn program(named: Option<&Path>) -> Result<PathBuf, Failure> {
    match named {
        Some(path) if path.is_file() => Ok(path.to_owned()),
        Some(path) => Err(Failure::refused(anyhow!("there is no {}", path.display()))),
        None => find().ok_or_else(|| {
            Failure::refused(anyhow!("there is no criu in PATH: {ADVICE}, or give its path with --criu"))
        }),
    }
}

/// The folder in which it looks for plugins.
pub(crate) fn plugin_folder() -> PathBuf {
    let home = env::var_os("HOME").map(PathBuf::from);
    let own = home.map(|it| it.join(".criu/default.conf"));
    let files = [Some(PathBuf::from(CONFIGURATION)), own];
    let told = files.into_iter().flatten().filter_map(|file| libdir(&fs::read_to_string(file).ok()?)).next_back();
    told.or_else(|| env::var_os("CRIU_LIBS_DIR").map(PathBuf::from)).unwrap_or_else(|| OWN_PLUGINS.into())
}

/// What it has to be told so that it finds our plugin: nothing where it does by itself, as it does once installed.
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

/// What the last line of the kind in a configuration says.
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

/// The lines of its log that say what went wrong: the plugin's first, then CRIU's own.
pub(crate) fn errors(log: &str) -> Vec<String> {
    let said = log.lines().filter_map(|line| {
        // Behind the time.
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
    fn what_our_plugin_says_comes_first() {
        let log = "(00.0) Error (criu/util.c:9): rlimit: Can't setup RLIMIT_NOFILE for self: no\n(00.1) Warn  (x): y\n(00.2) Error (criu/tty.c:1): a\n(00.3) Error (rekindle): b\nnothing\n";
        assert_eq!(errors(log), ["Error (rekindle): b", "Error (criu/tty.c:1): a"]);
    }
}
