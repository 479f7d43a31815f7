//! `rekindle ps --calls`.

use std::path::Path;

use rekindle_wire::control::{CallInfo, Reply, Request};

use crate::failure::Failure;
use crate::{daemon, output};

/// Lists the calls of one process: refused calls first, then the most frequent ones.
pub(crate) fn calls(socket: &Path, pid: i32, json: bool) -> Result<(), Failure> {
    let Reply::Calls(mut calls) = daemon::ask(socket, &Request::Calls { pid })? else {
        return Err(daemon::unexpected_answer().into());
    };
    calls.sort_by(|a, b| (b.refused, b.asked, &a.call).cmp(&(a.refused, a.asked, &b.call)));
    if json {
        output::print_json(&calls)?;
    } else {
        output::print(&table(&calls))?;
    }
    Ok(())
}

fn table(calls: &[CallInfo]) -> String {
    let mut rows = vec![["ASKED", "REFUSED", "HOW", "CALL"].map(str::to_owned).to_vec()];
    rows.extend(calls.iter().map(|call| {
        vec![call.asked.to_string(), call.refused.to_string(), output::plain(&call.how), output::plain(&call.call)]
    }));
    output::table(&rows, &[0, 1])
}
