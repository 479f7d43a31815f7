//! State machines whose states own their data.
//!
//! A machine is an enum, and each of its states has a type with the data that only this state needs. A transition is a
//! function that takes one state by value and returns the next, so nothing of a state is left when the machine has left it.
//! States change in two functions only: [`step`], where one thread owns the machine, and [`replace`], where a lock guards
//! the machine. Both functions compare each change with the machine's list of transitions, and log the change.
//!
//! The documentation of a machine repeats its list as a table, and a unit test compares the two ([`list`], [`table`]).

use std::collections::BTreeSet;
use std::fmt::{Debug, Display};

use tracing::{debug, error};

/// The names of a machine's states.
pub trait StateName: Copy + Debug + Eq + 'static {
    /// Every transition of the machine: from one state to another.
    const TRANSITIONS: &'static [(Self, Self)];
}

/// A state machine: an enum of states with their data.
pub trait Machine {
    /// The names of the states.
    type Name: StateName;

    /// The name of the state that the machine is in.
    fn state(&self) -> Self::Name;
}

/// Names the states of a [`Machine`], and lists the transitions between them.
#[macro_export]
macro_rules! machine {
    (
        $visibility:vis enum $name:ident names $machine:ident { $($state:ident),+ $(,)? }
        $($from:ident -> $to:ident),+ $(,)?
    ) => {
        #[doc = concat!("The states of [`", stringify!($machine), "`].")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visibility enum $name {
            $(#[doc = concat!("See [`", stringify!($machine), "::", stringify!($state), "`].")] $state),+
        }

        impl $crate::transition::StateName for $name {
            const TRANSITIONS: &'static [(Self, Self)] = &[$((Self::$from, Self::$to)),+];
        }

        impl $crate::transition::Machine for $machine {
            type Name = $name;

            fn state(&self) -> $name {
                match self {
                    $(Self::$state { .. } => $name::$state),+
                }
            }
        }
    };
}

pub use machine;

/// Has a machine take a step, which consumes its state and returns the next one. `machine` names the machine in the log.
pub fn step<M: Machine, R>(machine: &dyn Display, state: M, step: impl FnOnce(M) -> (M, R)) -> (M, R) {
    let from = state.state();
    let (next, result) = step(state);
    changed(machine, from, next.state());
    (next, result)
}

/// Puts the next state in the place of a machine's state, and returns the former one.
pub fn replace<M: Machine>(machine: &dyn Display, state: &mut M, next: M) -> M {
    changed(machine, state.state(), next.state());
    std::mem::replace(state, next)
}

fn changed<N: StateName>(machine: &dyn Display, from: N, to: N) {
    if from == to {
        return;
    }
    let listed = N::TRANSITIONS.contains(&(from, to));
    debug_assert!(listed, "{machine}: no transition leads from {from:?} to {to:?}");
    if !listed {
        error!("{machine}: no transition leads from {from:?} to {to:?}");
    }
    debug!("{machine}: {from:?} -> {to:?}");
}

/// A machine's list of transitions, as text. For the unit test that compares the list with a table.
pub fn list<N: StateName>() -> BTreeSet<(String, String)> {
    N::TRANSITIONS.iter().map(|(from, to)| (format!("{from:?}"), format!("{to:?}"))).collect()
}

/// The transitions in a table of a module's documentation: those of the rows ``| `From` | `To` | when |`` below the heading
/// `| from | to |`. `machine` is the heading of the third column; a module may have a table for each of several machines.
pub fn table(source: &str, machine: &str) -> BTreeSet<(String, String)> {
    let cells = |line: &str| -> Option<Vec<String>> {
        let row = line.trim_start().strip_prefix("//!").or_else(|| line.trim_start().strip_prefix("///"))?;
        let row = row.trim().strip_prefix('|')?.strip_suffix('|')?;
        Some(row.split('|').map(|cell| cell.trim().to_owned()).collect())
    };
    let heading = ["from", "to", machine].map(str::to_owned);
    let rows = source.lines().map(cells).skip_while(|row| row.as_deref() != Some(&heading[..])).skip(2);
    let name = |cell: &String| Some(cell.strip_prefix('`')?.strip_suffix('`')?.to_owned());
    rows.map_while(|row| match row.as_deref() {
        Some([from, to, _]) => Some((name(from)?, name(to)?)),
        _ => None,
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Eq)]
    enum Door {
        Closed { key: u32 },
        Open(u32),
        Gone,
    }

    machine! {
        enum DoorName names Door { Closed, Open, Gone }
        Closed -> Open,
        Open -> Gone,
    }

    #[test]
    fn a_listed_transition_changes_the_state() {
        let unlock = |door| match door {
            Door::Closed { key } => (Door::Open(key), true),
            door => (door, false),
        };
        assert_eq!(step(&"door", Door::Closed { key: 7 }, unlock), (Door::Open(7), true));
        assert_eq!(step(&"door", Door::Gone, unlock), (Door::Gone, false));
        let mut door = Door::Open(8);
        assert_eq!(replace(&"door", &mut door, Door::Gone), Door::Open(8));
        assert_eq!(door, Door::Gone);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "door: no transition leads from Gone to Open")]
    fn a_transition_that_is_not_listed_panics_in_debug_builds() {
        step(&"door", Door::Gone, |_| (Door::Open(9), ()));
    }

    #[test]
    fn a_table_is_read_up_to_its_end() {
        let source = "
            //! | from | to | another |
            //! |---|---|---|
            //! | `Gone` | `Closed` | a row of another machine |
            //!
            //! | from | to | the door |
            //! |---|---|---|
            //! | `Closed` | `Open` | a key |
            //! | `Open` | `Gone` | fire |
            //!
            //! | `Gone` | `Gone` | after the end |
        ";
        assert_eq!(table(source, "the door"), list::<DoorName>());
    }
}
