//! The programs of the network's administration: `nft`, `iptables`, `ip`, `ss`.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};

use crate::failure::Failure;

/// Whether a program is there.
pub(crate) fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let also = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(Into::into);
    std::env::split_paths(&path).chain(also).any(|it| it.join(program).is_file())
}

/// Runs commands of nft.
pub(crate) fn nft(commands: &str) -> Result<(), Failure> {
    run("nft", &["-f".to_owned(), "-".to_owned()], Some(commands))
}

/// Runs a program of the network's administration.
pub(crate) fn run(program: &str, words: &[String], input: Option<&str>) -> Result<(), Failure> {
    let done = || -> anyhow::Result<std::process::Output> {
        let mut child = command(program).args(words).spawn()?;
        if let (Some(mut to), Some(input)) = (child.stdin.take(), input) {
            to.write_all(input.as_bytes())?;
        }
        Ok(child.wait_with_output()?)
    };
    let output = done().with_context(|| format!("cannot run {program}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(anyhow!("{program}: {}", said.lines().next().unwrap_or("it has failed")).into())
}

/// What a program prints.
pub(crate) fn said(program: &str, words: &[&str]) -> Result<String, Failure> {
    let output = command(program).args(words).output().with_context(|| format!("cannot run {program}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(anyhow!("{program} {}: {}", words.join(" "), said.lines().next().unwrap_or("it has failed")).into())
}

/// A command with the path of the network's administration, and pipes.
pub(super) fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin:/usr/local/sbin"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command of iproute2.
pub(super) fn ip(words: &[String]) -> Result<(), Failure> {
    run("ip", words, None)
}

/// What iproute2 prints of a question as JSON.
pub(super) fn json_of_ip(words: &[&str]) -> Result<String, Failure> {
    said("ip", &[&["-json"], words].concat())
}
