//! Clients whose log was cut (`session/lives.rs`): whether they can be saved, and how an image describes the cut.
//! `serve/replay.rs` executes the log again.
//!
//! ```text
//!   log        ──── exactly as it was ────┬──── where the image says that variables lie ────►
//!                                         └ from here on the log lacks what was unloaded
//! ```
//!
//! Behind the cut, place holders make the driver place each variable at its old address (`checkpoint/holders.rs`). Functions
//! are placed elsewhere. So code that may keep addresses of functions in memory must have been placed before the cut.

use std::collections::BTreeSet;

use crate::resources::Code;
use crate::session::Session;
use crate::session::state::{Cut, State};

/// Why an earlier daemon cannot save a client whose log was cut.
const NOT_REHEARSED: &str = "it has unloaded more code than is kept, and the daemon, which is of an earlier release, does \
    not prove that the code it has now can be placed where it is: restart the daemon";

/// Why a client whose log was cut cannot be saved, if so. `rehearses`: the daemon has another worker prove that the log can be
/// replayed.
pub(crate) fn cannot_be_placed_again(session: &Session, code: &Code, rehearses: bool) -> Option<String> {
    let from = session.objects.cut_from()?;
    if !rehearses {
        return Some(NOT_REHEARSED.to_owned());
    }
    let placed = session.objects.placed_behind(from).into_iter();
    let images: BTreeSet<u64> = placed.map(|owner| image_of(session, code, owner)).collect();
    images.into_iter().find_map(|image| is_not_followed(code, image)).map(|why| {
        format!(
            "it has unloaded more code than is kept, and has placed code since {why}, which may lie elsewhere after a \
            restore; it can be checkpointed when it has unloaded that code, or has been started anew"
        )
    })
}

/// The module or library that contains a function's code.
fn image_of(session: &Session, code: &Code, mut owner: u64) -> u64 {
    while let Some(object) = session.objects.get(owner).filter(|_| !code.loaded.contains_key(&owner)) {
        match object.parent {
            0 => break,
            parent => owner = parent,
        }
    }
    owner
}

/// Why the addresses of a module's or library's code cannot be followed, if so.
fn is_not_followed(code: &Code, module: u64) -> Option<String> {
    let image = code.loaded.get(&module)?;
    if image.takes_function_addresses {
        return Some("that keeps addresses of functions".to_owned());
    }
    let globals = image.globals.as_ref().ok()?;
    let of_code = code.globals.iter().filter(|((parent, _), _)| *parent == module);
    let mut all = of_code.flat_map(|(_, placed)| globals.iter().map(move |global| (placed, global)));
    let missing = all.find(|(placed, global)| !placed.iter().any(|it| it.name == global.name))?;
    Some(format!(
        "with the variable `{}`, of which the driver does not say where it lies",
        missing.1.name.to_string_lossy()
    ))
}

/// Records in the state where the log was cut, and in which contexts the image's variables lie.
pub(crate) fn write_cut(session: &Session, code: &Code, state: &mut State) {
    let Some(from) = session.objects.cut_from() else { return };
    let mut places: Vec<_> = code.globals.iter().collect();
    places.sort_by_key(|(key, _)| **key);
    let contexts = places
        .into_iter()
        .flat_map(|((_, context), placed)| placed.iter().filter(|global| global.size > 0).map(|_| *context));
    state.cut = Some(Cut { from, contexts: contexts.collect(), ..Cut::default() }).into();
}
