//! The steps that most tests of a dump share.

use anyhow::ensure;

use crate::app::undisturbed;
use crate::{Node, Result};

/// Dumps a program when it reaches `middle`, kills it, and restores it. The program must print the same as it does
/// undisturbed.
pub fn goes_on_after_a_kill(name: &str, arguments: &[&str], middle: u64) -> Result {
    let expected = undisturbed(name, arguments)?;
    let node = Node::start()?;
    let app = node.run(name, arguments)?;
    app.reaches(middle)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    let printed = node.restore(&image)?.finish()?;
    ensure!(printed == expected, "{name} prints {printed:?} in the end, and alone {expected:?}");
    node.finish()
}
