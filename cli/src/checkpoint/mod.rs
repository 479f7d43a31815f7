//! `rekindle checkpoint`: has CRIU or podman make a checkpoint, and reports the outcome.
//!
//! ```text
//!   check ──refused──► exit status 3 and the reasons
//!     │ allowed
//!   order ─► criu dump ──┬── done ──► the report
//!      ▲                 └── failed ─┬── for a mispredicted write: again with protocol `stop`
//!      └─────────────────────────────┘
//!
//!   --to: the image is copied into a store afterwards
//! ```

mod attempt;
pub(crate) mod base;
mod maker;
mod of_containers;
mod options;
mod pod;
mod report;
mod several;

use self::maker::Maker;
pub(crate) use self::options::Options;
use crate::failure::Failure;
use crate::{images, output, protect};

/// Makes a checkpoint, or several.
pub(crate) fn checkpoint(options: &Options) -> Result<(), Failure> {
    options.containers.check(options.kept.options().map(Into::into), options.to.is_some())?;
    let socket = options.daemon.socket()?;
    let maker = match (&options.containers.pod, options.containers.single()) {
        (Some(pod), _) => return pod::checkpoint(options, pod, &socket),
        (None, Some(name)) => Maker::of_container(options, name, &socket)?,
        (None, None) if options.containers.are_meant() => return several::checkpoint(options, &socket),
        (None, None) => {
            if let Some(pid) = options.pid.filter(|_| options.kill) {
                protect::must_not_be_protected(&socket, pid)?;
            }
            Maker::of_process(options, &socket)?
        }
    };
    // What stands in its way is said before the checkpoint, not after it.
    let archive = options.containers.single().and_then(|it| options.containers.file(it));
    let target = match (&options.to, &archive, &options.dir) {
        (Some(url), Some(file), _) => Some(images::Target::find(url, &options.key, file, true)?),
        (Some(url), None, Some(dir)) => Some(images::Target::find(url, &options.key, dir, false)?),
        _ => None,
    };
    let (mut report, mut result) = attempt::one(options, &maker, &socket)?;
    if let Some(target) = target.filter(|_| result.is_ok()) {
        match target.put(options.json) {
            Ok(sent) => report.stored(sent),
            Err(failure) => result = Err(failure),
        }
    }
    if options.json {
        output::print_json(&report)?
    } else {
        report.print()?
    }
    result
}
