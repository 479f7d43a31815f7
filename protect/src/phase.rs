//! What becomes of a protection when something happens to its job.
//!
//! | from | to | a protection |
//! |---|---|---|
//! | `Watching` | `Restoring` | the job has failed |
//! | `Watching` | `Over` | the job has ended by itself, or has failed and is not to be restored |
//! | `Watching` | `GivenUp` | the job has failed, again and again without an image in between |
//! | `Watching` | `Stopped` | the user stops the protection |
//! | `Restoring` | `Watching` | the job runs again |
//! | `Restoring` | `GivenUp` | no image is left, or restores have failed too often |
//! | `Restoring` | `Stopped` | the user stops the protection |
//!
//! [`Phase::next`] is the only way from one to another.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// By itself, with this status.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
    /// It runs, but its worker has died, and its GPU memory with that.
    WorkerLost,
    /// It is gone, and nobody saw how: with the machine, for example.
    Unseen,
    /// A user has had its engine stop or remove it, or start it again; of containers only.
    ByUser,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "it ended by itself with status {status}"),
            Self::Signalled(signal) => write!(f, "signal {signal} ended it"),
            Self::WorkerLost => write!(f, "its worker died"),
            Self::Unseen => write!(f, "it is gone, and nobody saw how it ended"),
            Self::ByUser => write!(f, "podman was told to end it"),
        }
    }
}

impl Ending {
    /// The exit status that a shell would have for it.
    #[must_use]
    pub fn status(&self) -> Option<i32> {
        match self {
            Self::Exited(status) => Some(*status),
            Self::Signalled(signal) => Some(128 + signal),
            Self::WorkerLost | Self::Unseen | Self::ByUser => None,
        }
    }
}

/// What is to be done when a job ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Whether a job that has failed is restored.
    pub restore: bool,
    /// Whether a job that ends by itself with another status than 0 has failed.
    pub nonzero_fails: bool,
    /// How many restores there may be without an image in between, and how many may fail one after the other.
    pub limit: u32,
}

impl Rules {
    /// Whether a job that has ended so has failed.
    #[must_use]
    pub fn is_failure(&self, ending: Ending) -> bool {
        match ending {
            Ending::Exited(0) | Ending::ByUser => false,
            Ending::Exited(_) => self.nonzero_fails,
            Ending::Signalled(_) | Ending::WorkerLost | Ending::Unseen => true,
        }
    }
}

/// Where a protection is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "phase")]
pub enum Phase {
    /// The job runs, and is checkpointed.
    Watching {
        /// Restores since the last image.
        fruitless: u32,
    },
    /// The job has failed, and is to be restored.
    Restoring {
        /// Restores since the last image.
        fruitless: u32,
        /// Attempts that have failed.
        failed: u32,
    },
    /// The job is over.
    Over {
        /// How it ended.
        ending: Ending,
    },
    /// The job is not restored any more. Its images are kept.
    GivenUp {
        /// The reason.
        why: String,
    },
    /// The user has stopped the protection. The job was left alone, and the images are kept.
    Stopped,
}

/// What happens to a protection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// There is a new good image.
    Imaged,
    /// The job has ended.
    Ended(Ending),
    /// The job was restored.
    Restored,
    /// It could not be restored, for this reason.
    NotRestored(String),
    /// There is no good image to restore.
    NoImage,
    /// The user stops the protection.
    Stop,
}

impl Default for Phase {
    fn default() -> Self {
        Self::Watching { fruitless: 0 }
    }
}

impl Phase {
    /// The phase after an event. An event that does not fit changes nothing.
    #[must_use]
    pub fn next(self, event: Event, rules: Rules) -> Self {
        match (self, event) {
            (Self::Watching { .. }, Event::Imaged) => Self::Watching { fruitless: 0 },
            (Self::Watching { fruitless }, Event::Ended(ending)) => after(fruitless, ending, rules),
            (Self::Restoring { fruitless, .. }, Event::Restored) => Self::Watching { fruitless: fruitless + 1 },
            (Self::Restoring { failed, .. }, Event::NotRestored(why)) if failed + 1 >= rules.limit => {
                Self::GivenUp { why: format!("{} restores have failed, the last one because {why}", failed + 1) }
            }
            (Self::Restoring { fruitless, failed }, Event::NotRestored(_)) => {
                Self::Restoring { fruitless, failed: failed + 1 }
            }
            (Self::Restoring { .. }, Event::NoImage) => {
                Self::GivenUp { why: "the job has failed, and there is no good image of it".to_owned() }
            }
            (Self::Watching { .. } | Self::Restoring { .. }, Event::Stop) => Self::Stopped,
            (phase, _) => phase,
        }
    }

    /// Whether there is nothing left to do.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Over { .. } | Self::GivenUp { .. } | Self::Stopped)
    }

    /// How long to wait before the next restore: not at all before the first one, and longer before each further one that
    /// has not led to an image.
    #[must_use]
    pub fn pause(&self) -> Duration {
        match self {
            Self::Restoring { fruitless, failed } => pause(fruitless.saturating_add(*failed)),
            _ => Duration::ZERO,
        }
    }

    /// One word for people.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Watching { .. } => "watching",
            Self::Restoring { .. } => "restoring",
            Self::Over { .. } => "over",
            Self::GivenUp { .. } => "given up",
            Self::Stopped => "stopped",
        }
    }
}

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(300);

/// How long to wait after so many failures in a row: nothing, then a second, and twice as long each time, up to five minutes.
#[must_use]
pub fn pause(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        count => Duration::from_secs(1).saturating_mul(1 << (count - 1).min(20)).min(LONGEST),
    }
}

/// How long to wait after so many restores of a container have failed: ten times as long, since podman fails also at what passes, such as
/// a port that is still in use.
#[must_use]
pub fn pause_for_podman(failures: u32) -> Duration {
    pause(failures).saturating_mul(10).min(LONGEST)
}

fn after(fruitless: u32, ending: Ending, rules: Rules) -> Phase {
    if !rules.is_failure(ending) || !rules.restore {
        return Phase::Over { ending };
    }
    if fruitless >= rules.limit {
        let why =
            format!("the job was restored {fruitless} times and has failed each time before its next image: {ending}");
        return Phase::GivenUp { why };
    }
    Phase::Restoring { fruitless, failed: 0 }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const RULES: Rules = Rules { restore: true, nonzero_fails: false, limit: 3 };

    /// The name of a phase in the table.
    fn name(phase: &Phase) -> String {
        let shown = format!("{phase:?}");
        shown.split([' ', '{']).next().unwrap_or_default().to_owned()
    }

    /// The transitions in the table at the head of this file.
    fn table() -> BTreeSet<(String, String)> {
        let rows = include_str!("phase.rs").lines().filter_map(|line| line.strip_prefix("//! | `"));
        let parts = rows.map(|row| row.split('`').map(str::to_owned).collect::<Vec<_>>());
        parts.map(|cells| (cells[0].clone(), cells[2].clone())).collect()
    }

    #[test]
    fn the_table_has_every_transition_that_any_event_leads_to_and_no_other() {
        let phases = [
            Phase::Watching { fruitless: 0 },
            Phase::Watching { fruitless: 3 },
            Phase::Restoring { fruitless: 0, failed: 0 },
            Phase::Restoring { fruitless: 0, failed: 2 },
            Phase::Over { ending: Ending::Exited(0) },
            Phase::GivenUp { why: String::new() },
            Phase::Stopped,
        ];
        let endings = [
            Ending::Exited(0),
            Ending::Exited(1),
            Ending::Signalled(9),
            Ending::WorkerLost,
            Ending::Unseen,
            Ending::ByUser,
        ];
        let mut events =
            vec![Event::Imaged, Event::Restored, Event::NotRestored("x".into()), Event::NoImage, Event::Stop];
        events.extend(endings.map(Event::Ended));
        let mut found = BTreeSet::new();
        for restore in [true, false] {
            for nonzero_fails in [true, false] {
                let rules = Rules { restore, nonzero_fails, ..RULES };
                for phase in &phases {
                    for event in &events {
                        let next = phase.clone().next(event.clone(), rules);
                        if name(phase) != name(&next) {
                            assert!(!phase.is_final(), "{phase:?} became {next:?}");
                            found.insert((name(phase), name(&next)));
                        }
                    }
                }
            }
        }
        assert_eq!(found, table());
    }

    #[test]
    fn a_job_that_makes_progress_is_restored_for_ever() {
        let mut phase = Phase::default();
        for _ in 0..100 {
            phase = phase.next(Event::Ended(Ending::Signalled(9)), RULES);
            assert_eq!((phase.name(), phase.pause()), ("restoring", Duration::ZERO));
            phase = phase.next(Event::Restored, RULES).next(Event::Imaged, RULES);
        }
        assert_eq!(phase, Phase::default());
    }

    #[test]
    fn a_job_that_fails_again_before_its_next_image_is_restored_later_and_later_and_then_no_more() {
        let mut phase = Phase::default();
        let mut pauses = Vec::new();
        while !phase.is_final() {
            phase = phase.next(Event::Ended(Ending::WorkerLost), RULES);
            if !phase.is_final() {
                pauses.push(phase.pause().as_secs());
            }
            phase = phase.next(Event::Restored, RULES);
        }
        assert_eq!(pauses, [0, 1, 2]);
        let Phase::GivenUp { why } = phase else { panic!("{phase:?}") };
        assert!(why.contains("3 times") && why.contains("its worker died"), "{why}");
    }

    #[test]
    fn restores_that_fail_are_tried_again_up_to_the_limit() {
        let mut phase = Phase::default().next(Event::Ended(Ending::Unseen), RULES);
        for failed in 1..=3 {
            assert!(!phase.is_final(), "{failed}");
            phase = phase.next(Event::NotRestored("no daemon".into()), RULES);
        }
        assert!(matches!(&phase, Phase::GivenUp { why } if why.contains("no daemon")), "{phase:?}");
        assert_eq!(pause(u32::MAX), Duration::from_secs(300));
        let of_podman = |failures| pause_for_podman(failures).as_secs();
        assert_eq!([0, 1, 2, 4, 6, u32::MAX].map(of_podman), [0, 10, 20, 80, 300, 300]);
    }

    #[test]
    fn how_a_job_ends_says_whether_it_has_failed() {
        let fails = |ending, nonzero_fails| Rules { nonzero_fails, ..RULES }.is_failure(ending);
        assert!(!fails(Ending::ByUser, true));
        assert!(!fails(Ending::Exited(0), true) && !fails(Ending::Exited(7), false) && fails(Ending::Exited(7), true));
        assert!(
            fails(Ending::Signalled(15), false) && fails(Ending::Unseen, false) && fails(Ending::WorkerLost, false)
        );
        assert_eq!((Ending::Exited(7).status(), Ending::Signalled(9).status()), (Some(7), Some(137)));
    }
}
