//! `rekindle ps --access`.

use std::path::Path;

use rekindle_wire::access::{AccessReport, MOST_NAMED};
use rekindle_wire::control::{Reply, Request};

use crate::failure::Failure;
use crate::{daemon, output};

/// Prints how well the launches of one process were predicted, and the mispredicted writes.
pub(crate) fn access(socket: &Path, pid: i32, json: bool) -> Result<(), Failure> {
    let Reply::Access(report) = daemon::ask(socket, &Request::Access { pid })? else {
        return Err(daemon::unexpected_answer().into());
    };
    if json {
        output::print_json(&report)?;
    } else {
        output::print(&text(&report))?;
    }
    Ok(())
}

fn text(report: &AccessReport) -> String {
    let all = report.launches.all();
    let share = |count: u64| format!("{:.1} %", if all == 0 { 0.0 } else { 100.0 * count as f64 / all as f64 });
    let row = |what: &str, count: u64, remark: String| vec![what.to_owned(), count.to_string(), remark];
    let launches = report.launches;
    let rows = [
        row("launches", all, format!("in {} launches of graphs and alone", report.graphs)),
        row("  (a) by values", launches.values, share(launches.values)),
        row("  (b) by signature", launches.signature, share(launches.signature)),
        row("  (c) everything", launches.everything, share(launches.everything)),
        row("copies and memsets", report.exact, String::new()),
        row("watched", report.watched, String::new()),
        row("not watched", report.unwatched, String::new()),
    ];
    let mut text = output::table(&rows, &[1]);
    text += &format!("allocations named by a launch: {:.2} on average\n", report.mean_named());
    for (units, launches) in report.named.iter().enumerate().filter(|(_, launches)| **launches > 0) {
        let more = if units == MOST_NAMED { " or more" } else { "" };
        text += &format!("  {units}{more}: {launches}\n");
    }
    if let Some(why) = &report.stopped {
        text += &format!("not watched any more: {}\n", output::plain(why));
    }
    if let Some(uses) = &report.first_uses {
        let (used, content) = (output::size(uses.used), output::size(uses.content));
        text += &format!("used so far: {used} of {content}, by {} commands\n", uses.commands);
        return text
            + &match &uses.fault {
                Some(by) => format!("used what it had not named: {}\n", output::plain(by)),
                None => "uses of what was not named: none\n".to_owned(),
            };
    }
    if report.outside.is_empty() {
        return text + "writes outside of what was named: none\n";
    }
    text += "writes outside of what was named:\n";
    for it in &report.outside {
        let (size, by) = (output::size(it.size), output::plain(&it.by));
        text += &format!("  {:#x}, {size}, {} times, by {by}\n", it.address, it.times);
    }
    text
}

#[cfg(test)]
mod tests {
    use rekindle_wire::access::FirstUses;

    use super::*;

    #[test]
    fn shares_and_what_was_wrong_are_told() {
        let mut report = AccessReport { watched: 5, ..AccessReport::default() };
        (report.launches.values, report.launches.signature) = (1, 3);
        [2, 2, 20].into_iter().for_each(|units| report.count_named(units));
        assert!(text(&report).ends_with("  2: 2\n  16 or more: 1\nwrites outside of what was named: none\n"));
        assert!(text(&report).contains("75.0 %"));
        report.count_outside("bad\x1b[2Jname", 0x2000_0000_0000, 512);
        assert!(
            text(&report).ends_with("\n  0x200000000000, 512 B, 1 times, by bad\u{fffd}[2Jname\n"),
            "{}",
            text(&report)
        );
    }

    #[test]
    fn first_uses_are_told() {
        let mut uses = FirstUses { content: 2048, ..FirstUses::default() };
        [1024, 0].into_iter().for_each(|bytes| uses.used(bytes));
        let mut report = AccessReport { first_uses: Some(uses), ..AccessReport::default() };
        let said = "used so far: 1.0 KiB of 2.0 KiB, by 2 commands\nuses of what was not named: none\n";
        assert!(text(&report).ends_with(said), "{}", text(&report));
        report.first_uses.as_mut().unwrap().fault = Some("bad\x1b[2Jname".to_owned());
        assert!(text(&report).ends_with("used what it had not named: bad\u{fffd}[2Jname\n"), "{}", text(&report));
    }
}
