//! `rekindle pool`.

use clap::Args;
use rekindle_wire::control::{Reply, Request, WorkerKindInfo};

use crate::failure::Failure;
use crate::{daemon, output};

/// The options of `rekindle pool`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists the kinds of workers that the daemon keeps ready, or was asked for lately.
pub(crate) fn pool(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let Reply::Status(status) = daemon::ask(&socket, &Request::Status)? else {
        return Err(daemon::unexpected_answer().into());
    };
    if status.kinds.is_empty() {
        let reason = "the daemon does not list its workers: ask as root or as the daemon's user; a daemon of an \
                      older release cannot list them";
        return Err(Failure::refused(anyhow::anyhow!(reason)));
    }
    if options.json {
        output::print_json(&status.kinds)?;
    } else {
        output::print(&table(&status.kinds))?;
    }
    Ok(())
}

fn table(kinds: &[WorkerKindInfo]) -> String {
    let mut rows = vec![["READY", "STARTING", "KEPT", "TAKEN", "KIND"].map(str::to_owned).to_vec()];
    rows.extend(kinds.iter().map(|it| {
        let mut row = [it.ready, it.starting, it.kept, it.taken].map(|count| count.to_string()).to_vec();
        let kind = output::plain(&it.kind);
        row.push(match &it.problem {
            Some(problem) => format!("{kind} (does not start: {})", output::plain(problem)),
            None => kind,
        });
        row
    }));
    output::table(&rows, &[0, 1, 2, 3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_to_a_kind() {
        let kind = |kind: &str, counts: [u32; 4], problem: Option<&str>| WorkerKindInfo {
            kind: kind.to_owned(),
            ready: counts[0],
            starting: counts[1],
            kept: counts[2],
            taken: counts[3],
            problem: problem.map(str::to_owned),
        };
        let kinds =
            [kind("usual", [1, 0, 1, 12], None), kind("CUDA_DEVICE_ORDER=\x1bX", [0, 1, 1, 2], Some("no\nmemory"))];
        let expected = "\
READY  STARTING  KEPT  TAKEN  KIND
    1         0     1     12  usual
    0         1     1      2  CUDA_DEVICE_ORDER=\u{fffd}X (does not start: no\u{fffd}memory)
";
        assert_eq!(table(&kinds), expected);
    }
}
