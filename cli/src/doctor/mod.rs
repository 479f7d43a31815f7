//! `rekindle doctor`: checks that this machine has everything that Rekindle needs, and advises where it has not.
//!
//! - [`kernel`]: Linux, permissions; [`daemon`]: the daemon at the socket; [`driver`]: the GPU's driver;
//!   [`replaced`]: processes that go on with an older one
//! - [`criu`]: CRIU and its plugin; [`install`]: the interposer and the hook
//! - [`api`]: `--api`, every driver function and the treatment of its calls; [`elf`]: the exports of a library

mod api;
mod criu;
mod daemon;
mod driver;
mod elf;
mod finding;
mod install;
mod kernel;
mod replaced;

use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;

use self::finding::{Finding, Verdict};
use crate::failure::Failure;
use crate::output;

/// The options of `rekindle doctor`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// List every driver function: declared (supported), refused, or absent (unknown to Rekindle)
    #[arg(long)]
    api: bool,
    /// With --api: the driver library to compare with [default: the daemon's]
    #[arg(long, value_name = "PATH", requires = "api")]
    driver: Option<PathBuf>,
    #[command(flatten)]
    daemon: crate::daemon::At,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Checks the machine, and prints the findings.
pub(crate) fn doctor(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let (about_daemon, status) = daemon::look(&socket);
    if options.api {
        let named = status.as_ref().map(|it| PathBuf::from(&it.cuda_driver));
        return api::list(options.driver.clone(), named, options.json);
    }
    let mut findings = kernel::look();
    findings.extend(driver::look(status.as_ref()));
    findings.extend(replaced::look());
    findings.push(about_daemon);
    findings.extend(status.as_ref().and_then(|it| it.sandbox.as_ref()).map(daemon::sandbox));
    findings.extend(criu::look());
    findings.extend(install::look());
    if options.json {
        output::print_json(&findings)?;
    } else {
        output::print(&describe(&findings))?;
    }
    match findings.iter().filter(|it| it.verdict == Verdict::Bad).count() {
        0 => Ok(()),
        1 => Err(Failure::refused(anyhow!("one problem prevents checkpoints"))),
        count => Err(Failure::refused(anyhow!("{count} problems prevent checkpoints"))),
    }
}

fn describe(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let verdict = match finding.verdict {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Bad => "BAD",
        };
        text.push_str(&format!("{verdict:<5} {:<12} {}\n", finding.subject, output::plain(&finding.found)));
        if let Some(advice) = &finding.advice {
            text.push_str(&format!("{:<18} -> {}\n", "", output::plain(advice)));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_stands_under_what_it_is_about() {
        let findings = [Finding::ok("kernel", "Linux 6.1"), Finding::bad("daemon", "none\x1b", "start one")];
        let expected =
            "ok    kernel       Linux 6.1\nBAD   daemon       none\u{fffd}\n                   -> start one\n";
        assert_eq!(describe(&findings), expected);
    }
}
