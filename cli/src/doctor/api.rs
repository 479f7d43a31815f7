//! `rekindle doctor --api`: every function of the driver, and the treatment of its calls.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow};
use rekindle_cuda_abi::refusals;
use rekindle_cuda_abi::table::{self, Function, Route};
use serde::Serialize;

use super::elf;
use crate::failure::Failure;
use crate::output;

/// The treatment of calls of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Carried out.
    Declared,
    /// Answered with `CUDA_ERROR_NOT_SUPPORTED`.
    Refused,
    /// Only the driver has the function: programs do not find it in Rekindle's library.
    Absent,
}

#[derive(Debug, Serialize)]
struct Call {
    call: String,
    state: State,
    /// As the table of functions says.
    how: &'static str,
    /// Why it is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Report {
    /// The library that the table was compared with.
    driver: Option<PathBuf>,
    declared: usize,
    refused: usize,
    absent: usize,
    calls: Vec<Call>,
}

/// Lists the functions. `named` is the driver's library as the daemon calls it.
pub(super) fn list(told: Option<PathBuf>, named: Option<PathBuf>, json: bool) -> Result<(), Failure> {
    let table = table::parse(table::TEXT).map_err(|e| anyhow!("the built-in table of functions: {e}"))?;
    let driver = match told {
        Some(path) => Some(path),
        None => named.or_else(|| Some("libcuda.so.1".into())).and_then(|it| locate(&it)),
    };
    let exported = driver.as_deref().map(exported).transpose()?;
    let report = compare(&table, driver, exported.unwrap_or_default());
    if json {
        output::print_json(&report)?;
    } else {
        output::print(&describe(&report))?;
    }
    Ok(())
}

/// A library that is named as the loader finds it.
fn locate(library: &Path) -> Option<PathBuf> {
    if library.components().count() > 1 {
        return Some(library.to_owned());
    }
    let name = library.to_str()?;
    let output =
        Command::new("ldconfig").arg("-p").output().or_else(|_| Command::new("/sbin/ldconfig").arg("-p").output());
    let text = String::from_utf8_lossy(&output.ok()?.stdout).into_owned();
    let line = text.lines().map(str::trim).find(|line| line.starts_with(name) && line.contains("x86-64"))?;
    line.rsplit_once("=> ").map(|(_, path)| PathBuf::from(path))
}

fn exported(library: &Path) -> anyhow::Result<BTreeSet<String>> {
    let content = std::fs::read(library).with_context(|| format!("cannot read {}", library.display()))?;
    let names = elf::exports(&content).with_context(|| format!("{} is not a library for x86_64", library.display()))?;
    let is_call =
        |name: &String| name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
    Ok(names.into_iter().filter(is_call).collect())
}

fn compare(table: &[Function], driver: Option<PathBuf>, exported: BTreeSet<String>) -> Report {
    let known: BTreeSet<&str> = table.iter().map(|it| it.symbol.as_str()).collect();
    let mut calls: Vec<_> = table
        .iter()
        .map(|it| Call {
            call: it.symbol.clone(),
            state: if it.route == Route::Refused { State::Refused } else { State::Declared },
            how: it.route.name(),
            why: Some(&it.symbol).filter(|_| it.route == Route::Refused).and_then(|symbol| refusals::why(symbol)),
        })
        .collect();
    let unknown = exported.into_iter().filter(|it| !known.contains(it.as_str()));
    calls.extend(unknown.map(|call| Call { call, state: State::Absent, how: "", why: None }));
    calls.sort_by(|a, b| (a.state, &a.call).cmp(&(b.state, &b.call)));
    let count = |state| calls.iter().filter(|it| it.state == state).count();
    let (declared, refused, absent) = (count(State::Declared), count(State::Refused), count(State::Absent));
    Report { driver, declared, refused, absent, calls }
}

fn describe(report: &Report) -> String {
    let mut rows = vec![["STATE", "HOW", "CALL", "WHY"].map(str::to_owned).to_vec()];
    rows.extend(report.calls.iter().map(|it| {
        let state = match it.state {
            State::Declared => "declared",
            State::Refused => "refused",
            State::Absent => "absent",
        };
        vec![state.to_owned(), it.how.to_owned(), output::plain(&it.call), it.why.unwrap_or_default().to_owned()]
    }));
    let with = match &report.driver {
        Some(driver) => format!("{} absent, of those that {} has", report.absent, driver.display()),
        None => "no driver's library to compare with: see --driver".to_owned(),
    };
    format!("{}{} declared, {} refused, {with}\n", output::table(&rows, &[]), report.declared, report.refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_the_driver_has_is_absent() {
        let table = table::parse("local | cuInit(unsigned int Flags) | cuInit@2000\nrefused | cuOdd(?) | \n").unwrap();
        let exported = BTreeSet::from(["cuInit".to_owned(), "cuNewest".to_owned()]);
        let report = compare(&table, Some("/lib/libcuda.so.1".into()), exported);
        assert_eq!((report.declared, report.refused, report.absent), (1, 1, 1));
        assert!(describe(&report).ends_with("1 declared, 1 refused, 1 absent, of those that /lib/libcuda.so.1 has\n"));
    }
}
