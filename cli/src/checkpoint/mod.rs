//! `rekindle checkpoint`: has CRIU or podman make a checkpoint, and reports the outcome.
//!
//! ```text
//!   check ──refused──► exit status 3 and the reasons
//!     │ allowed
//!   order ─► criu dump ──┬── done ──► the report
//!      ▲                 └── failed ─┬── for a mispredicted write: again with protocol `stop`
//!      └─────────────────────────────┘
//! ```

mod attempt;
mod base;
mod maker;
mod of_containers;
mod options;
mod pod;
mod report;
mod several;

use self::maker::Maker;
pub(crate) use self::options::Options;
use crate::failure::Failure;
use crate::output;

/// Makes a checkpoint, or several.
pub(crate) fn checkpoint(options: &Options) -> Result<(), Failure> {
    options.containers.check(options.common())?;
    let socket = options.daemon.socket()?;
    let maker = match (&options.containers.pod, options.containers.single()) {
        (Some(pod), _) => return pod::checkpoint(options, pod, &socket),
        (None, Some(name)) => Maker::of_container(options, name, &socket)?,
        (None, None) if options.containers.are_meant() => return several::checkpoint(options, &socket),
        (None, None) => Maker::of_process(options, &socket)?,
    };
    let (report, result) = attempt::one(options, &maker, &socket)?;
    if options.json {
        output::print_json(&report)?
    } else {
        report.print()?
    }
    result
}
