//! A model of a cut and of its restore: every order of steps, deaths and lost messages is tried, for two and for three hosts.
//!
//! Parts of a cut (`make.rs`): the coordinator, and on each host the tree, CRIU, the process that takes part, and its guard. Parts of a
//! restore (`restore.rs`): the coordinator, the process that takes part with CRIU on each host, and somebody who settles. Each step of the
//! model is one step of one part; any may die, and any connection break, between any two.
//!
//! Checked are, of a cut:
//!
//! - one that is reported good has all parts, and no tree has run on before all had been dumped
//! - no tree is killed unless the cut is good
//! - from every state, if nothing else fails, all trees run and are heard; or, if they are to be killed, the cut is good and all are
//!
//! of a connection between two trees that open it, write to it, read and close it while a cut is made (`connection.rs`):
//!
//! - what one tree has written by a cut that is good, the other one has read by then, or has it in its image, or will be sent it again
//!
//! and of a restore:
//!
//! - no tree runs before all have been complete, and none runs whose connections were reset
//! - from every state, if nothing else fails, all trees run or none does
//!
//! Each rule of the protocol has a flaw here that breaks it, and a test that the model finds what follows from it.
//!
//! Not modelled are starts of a machine, which end the tree there as anything else does that kills it, and two commands that restore one cut
//! at a time, which `lock` of the part's directory forbids.

mod connection;
mod make;
mod restore;

use crate::explore::explore;

#[test]
fn what_a_tree_has_written_by_a_cut_is_never_lost() {
    for writer in 0..2 {
        let seen = explore(connection::World::new(writer, connection::Flaw::None)).unwrap();
        assert!(seen.iter().any(|it| it.is_good_with_half()), "none among {}", seen.len());
        assert!(seen.iter().any(|it| it.is_good() && !it.is_good_with_half()));
    }
}

#[test]
fn what_breaks_a_rule_of_connections_is_found() {
    use connection::{Flaw, World};
    let flaws = [
        Flaw::NoComparison,
        Flaw::OneLook,
        Flaw::OrphansAreNothing,
        Flaw::NoOrphans,
        Flaw::NoQueues,
        Flaw::QueuesTooEarly,
    ];
    for flaw in flaws {
        let found = [0, 1].map(|writer| explore(World::new(writer, flaw)).err());
        let is_lost = |it: &String| it.starts_with("good, and what was written is lost");
        assert!(found.iter().flatten().any(is_lost), "{flaw:?}: {found:?}");
    }
}

#[test]
fn a_cut_that_is_good_is_whole_and_all_trees_run_on_whatever_ends_in_between() {
    let seen = explore(make::World::<2>::new(false, make::Flaw::None, 3)).unwrap();
    assert!(seen.iter().any(|it| it.good && it.all_run()), "no good one among {}", seen.len());
    assert!(seen.len() > 1000, "{} states", seen.len());
    explore(make::World::<3>::new(false, make::Flaw::None, 2)).unwrap();
}

#[test]
fn trees_that_are_to_end_with_their_cut_do_so_only_when_it_is_good() {
    let seen = explore(make::World::<2>::new(true, make::Flaw::None, 3)).unwrap();
    assert!(seen.iter().any(|it| it.good && it.all_killed()), "no good one among {}", seen.len());
    explore(make::World::<3>::new(true, make::Flaw::None, 2)).unwrap();
}

#[test]
fn all_trees_of_a_cut_are_restored_or_none() {
    let seen = explore(restore::World::<2>::new(restore::Flaw::None, 3)).unwrap();
    for runs in [true, false] {
        assert!(seen.iter().any(|it| it.all(runs)), "{runs}: none among {}", seen.len());
    }
    explore(restore::World::<3>::new(restore::Flaw::None, 2)).unwrap();
}

#[test]
fn what_breaks_a_rule_of_cuts_is_found() {
    use make::{Flaw, World};
    let torn = "good, and a tree ran on before all had been dumped";
    let missing = "good, and a part is missing";
    let killed = "killed, and the cut is not good";
    let stuck = "leads nowhere";
    let cases = [
        (Flaw::GoesOnAlone, false, torn),
        (Flaw::GoodTooEarly, false, missing),
        (Flaw::GoodWithoutLost, false, missing),
        (Flaw::GateWaits, false, stuck),
        (Flaw::NobodyMends, false, stuck),
        (Flaw::KilledTooEarly, true, killed),
        (Flaw::NoGuard, true, stuck),
        (Flaw::StandsUntilTold, true, stuck),
    ];
    for (flaw, stop, expected) in cases {
        let found = explore(World::<2>::new(stop, flaw, 2)).unwrap_err();
        assert!(found.starts_with(expected), "{flaw:?}: {found}");
    }
}

#[test]
fn what_breaks_a_rule_of_restores_is_found() {
    use restore::{Flaw, World};
    let cases = [
        (Flaw::ConnectsAlone, "runs with connections that were reset"),
        (Flaw::RunsAlone, "runs before all have been complete"),
        (Flaw::WaitsForEver, "leads nowhere"),
        (Flaw::RunsUnheld, "runs before all have been complete"),
    ];
    for (flaw, expected) in cases {
        let found = explore(World::<2>::new(flaw, 2)).unwrap_err();
        assert!(found.starts_with(expected), "{flaw:?}: {found}");
    }
}
