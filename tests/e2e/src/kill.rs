//! What most tests of a dump do.

use anyhow::ensure;

use crate::app::undisturbed;
use crate::{Node, Result};

/// A program is dumped when it has come to `middle`, killed, and restored: what it then prints is what it prints alone.
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
