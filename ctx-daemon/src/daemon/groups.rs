//! Dumps of several trees that are made at one moment, as those of a pod's containers: the images together are a state that
//! the trees have been in.
//!
//! ```text
//!   each dump:   Pause ─ prepare ─► [Prepared] ─ quiesce ─ CRIU freezes ─► [Frozen] ─ CRIU dumps ─► [Durable] ─ CRIU ends
//! ```
//!
//! At a stage in brackets each dump waits until all have come there. So all trees stand still at the moment at which the last
//! one has been frozen, and none goes on before it; that moment is the one of all images. Trees that CRIU kills wait once more
//! until all images are on disk, since none may be killed if one fails. Trees that are left running do not wait for that.
//!
//! A dump that ends before it has come to the last stage breaks the group, and so does the end of the connection that asked for
//! it: then every dump that waits fails, and its tree goes on.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;
use tracing::info;

use super::checkpoints::POLL_INTERVAL;
use super::pidns::PidError;
use super::{lock, sys};

/// The most trees of a group.
const MOST_TREES: usize = 256;

/// A point at which the dumps of a group wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// What can be done while the tree runs is done.
    Prepared,
    /// The tree is frozen.
    Frozen,
    /// The image is on disk.
    Durable,
}

/// Why a dump of a group fails.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(super) enum TogetherError {
    #[error("it was to be made at one moment with the dump of process {0}, which has failed")]
    Broken(i32),
    #[error("the command that wanted several dumps made at one moment has ended")]
    Gone,
    #[error("the connection closed while this dump waited for others")]
    Closed,
}

impl Failing for TogetherError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Broken(_) => FailureKind::Together,
            Self::Gone | Self::Closed => FailureKind::GivenUp,
        }
    }
}

/// Why there is no such group.
#[derive(Debug, Error)]
pub(super) enum RefusedGroup {
    #[error(
        "only root and the user that rekindled runs as, on the host itself, may have dumps wait for each other, since only they may dump"
    )]
    NotAllowed,
    #[error("a group has {MOST_TREES} trees at most, each of them once")]
    Trees,
    #[error("process {0} is in another group of dumps that are made at one moment: wait until that is over")]
    Taken(i32),
    #[error(transparent)]
    Pid(#[from] PidError),
}

impl Failing for RefusedGroup {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Pid(error) => error.kind(),
            _ => FailureKind::Refused,
        }
    }
}

/// All groups.
#[derive(Debug, Default)]
pub(crate) struct Groups(Mutex<Vec<Arc<Group>>>);

#[derive(Debug)]
struct Group {
    state: Mutex<GroupState>,
}

#[derive(Debug)]
struct GroupState {
    /// The trees, and how far their dumps have come.
    trees: Vec<(i32, Option<Stage>)>,
    broken: Option<TogetherError>,
}

impl Groups {
    /// Makes a group of these trees, until the result is dropped.
    pub(super) fn add(&self, roots: Vec<i32>) -> Result<GroupGuard<'_>, RefusedGroup> {
        let mut sorted = roots.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != roots.len() || roots.is_empty() || roots.len() > MOST_TREES {
            return Err(RefusedGroup::Trees);
        }
        let mut groups = lock(&self.0);
        if let Some(root) = roots.iter().find(|root| groups.iter().any(|it| it.has(**root))) {
            return Err(RefusedGroup::Taken(*root));
        }
        let trees = roots.into_iter().map(|root| (root, None)).collect();
        let group = Arc::new(Group { state: Mutex::new(GroupState { trees, broken: None }) });
        groups.push(Arc::clone(&group));
        Ok(GroupGuard { groups: self, group })
    }

    /// The part of a dump in the group that its tree is in, if it is in one.
    pub(super) fn member(&self, root: i32) -> Member {
        let group = lock(&self.0).iter().find(|it| it.has(root)).map(Arc::clone);
        Member { group, root }
    }
}

impl Group {
    fn has(&self, root: i32) -> bool {
        lock(&self.state).trees.iter().any(|(it, _)| *it == root)
    }

    fn have_all_reached(&self, stage: Stage) -> bool {
        lock(&self.state).trees.iter().all(|(_, at)| *at >= Some(stage))
    }

    /// The first reason counts.
    fn break_up(&self, why: TogetherError) {
        lock(&self.state).broken.get_or_insert(why);
    }
}

/// Keeps a group until it is dropped.
pub(super) struct GroupGuard<'a> {
    groups: &'a Groups,
    group: Arc<Group>,
}

impl GroupGuard<'_> {
    /// Whether all trees have been frozen at one moment.
    pub(super) fn all_were_frozen(&self) -> bool {
        self.group.have_all_reached(Stage::Frozen)
    }
}

impl Drop for GroupGuard<'_> {
    fn drop(&mut self) {
        lock(&self.groups.0).retain(|it| !Arc::ptr_eq(it, &self.group));
        self.group.break_up(TogetherError::Gone);
    }
}

/// A dump's part in its group. Where the tree is in none, there is nothing to wait for.
#[derive(Debug)]
pub(super) struct Member {
    group: Option<Arc<Group>>,
    root: i32,
}

impl Member {
    /// Waits until all dumps of the group have come to this stage, or one has failed, or CRIU has ended.
    pub(super) fn reach(&self, stage: Stage, stream: &UnixStream) -> Result<(), TogetherError> {
        let Some(group) = &self.group else { return Ok(()) };
        {
            let mut state = lock(&group.state);
            let own = state.trees.iter_mut().filter(|(root, _)| *root == self.root);
            own.for_each(|(_, at)| *at = (*at).max(Some(stage)));
        }
        loop {
            // What all have reached, no later failure takes back.
            if group.have_all_reached(stage) {
                info!(root = self.root, ?stage, "all dumps of the group are here");
                return Ok(());
            }
            if let Some(why) = lock(&group.state).broken.clone() {
                return Err(why);
            }
            if sys::is_hung_up(stream) {
                return Err(TogetherError::Closed);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Member {
    /// The dump has ended. What all have reached stays reached; whoever still waits for this dump fails.
    fn drop(&mut self) {
        if let Some(group) = &self.group {
            group.break_up(TogetherError::Broken(self.root));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn nobody_passes_a_stage_before_the_last_has_come() {
        let groups = Groups::default();
        let _group = groups.add(vec![1, 2]).unwrap();
        let ((ours, _theirs), (one, two)) = (streams(), (groups.member(1), groups.member(2)));
        std::thread::scope(|scope| {
            let first = scope.spawn(|| one.reach(Stage::Frozen, &ours));
            two.reach(Stage::Prepared, &ours).unwrap();
            assert!(!first.is_finished(), "the other tree runs");
            two.reach(Stage::Frozen, &ours).unwrap();
            first.join().unwrap().unwrap();
        });
        // Their moment has come, whatever happens to one of them now.
        drop(two);
        one.reach(Stage::Frozen, &ours).unwrap();
        assert_eq!(one.reach(Stage::Durable, &ours), Err(TogetherError::Broken(2)));
    }

    #[test]
    fn a_dump_that_waits_fails_when_another_ends_or_the_command_or_its_own_criu() {
        let groups = Groups::default();
        let (ours, theirs) = streams();
        let group = groups.add(vec![1, 2, 3]).unwrap();
        let one = groups.member(1);
        drop(groups.member(3));
        assert_eq!(one.reach(Stage::Prepared, &ours), Err(TogetherError::Broken(3)));
        drop((one, group));
        let group = groups.add(vec![1, 2]).unwrap();
        let one = groups.member(1);
        drop(group);
        assert_eq!(one.reach(Stage::Prepared, &ours), Err(TogetherError::Gone));
        let _group = groups.add(vec![1, 2]).unwrap();
        let one = groups.member(1);
        drop(theirs);
        assert_eq!(one.reach(Stage::Prepared, &ours), Err(TogetherError::Closed));
    }

    #[test]
    fn a_tree_is_in_one_group_once_and_others_wait_for_nobody() {
        let groups = Groups::default();
        let _group = groups.add(vec![1, 2]).unwrap();
        for roots in [vec![], vec![3, 3], vec![2, 3], (10..400).collect()] {
            assert!(groups.add(roots).is_err());
        }
        let (ours, _theirs) = streams();
        groups.member(9).reach(Stage::Durable, &ours).unwrap();
    }
}
