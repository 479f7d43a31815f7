//! A container that is protected: which one can be, and what has become of it, by what podman says.
//!
//! | podman says, when the first process has ended | then |
//! |---|---|
//! | there is no such container, it was stopped, or checkpointed, or started again | a user has ended it, and it is left alone |
//! | it runs, with that process | podman has not noticed yet; or never will, if conmon is gone, which tells it |
//! | it has ended | as the process has, by the kernel's word or by podman's exit code; want of memory is a failure |
//!
//! When the machine was started again, podman has forgotten who has ended a container:
//!
//! | podman says, after that | then |
//! |---|---|
//! | there is no such container | its storage may not be there yet: nobody knows |
//! | it has ended with an exit code that neither success nor a signal gives | it has ended by itself |
//! | it has ended otherwise | nobody saw it: with the machine, whose shutdown sends signals too, and whose crash leaves a 0 |
//!
//! podman's times of the last start and end say nothing: a checkpoint is an end to it, also of a container that runs on.
//!
//! A container has one id for as long as it lives, and a restore from an archive keeps it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::phase::Ending;
use crate::process::Process;

/// The label of a container that a service of systemd starts and ends.
const UNIT: &str = "PODMAN_SYSTEMD_UNIT";
/// A shell, and podman, add a signal's number to this for the exit code of what the signal has ended.
const SIGNALLED: i32 = 128;
/// The signal by which the kernel frees memory.
const KILL: i32 = 9;
/// No signal has a higher number.
const LAST_SIGNAL: i32 = 64;

/// The container of a protection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// Its id, which a restore keeps.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The podman program; the one in PATH if nothing is said.
    #[serde(default)]
    pub podman: Option<PathBuf>,
}

/// What podman says of a container: what decides something here, of `podman container inspect`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Said {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The pod that it is in.
    pub pod: String,
    /// The root directory of a container that was made of no image.
    pub rootfs: String,
    /// The containers that it needs.
    pub dependencies: Option<Vec<String>>,
    /// What becomes of it.
    pub state: State,
    /// How its image and its user want it.
    pub config: Config,
    /// How the host runs it.
    pub host_config: HostConfig,
}

/// The state of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct State {
    /// One word.
    pub status: String,
    /// Its first process, if it runs.
    pub pid: i32,
    /// The process that tells podman of its end.
    pub conmon_pid: i32,
    /// How its first process has ended.
    pub exit_code: i32,
    /// Whether `podman stop` or `podman kill` was told to end it.
    pub stopped_by_user: bool,
    /// Whether a checkpoint has stopped it.
    pub checkpointed: bool,
    /// Whether it was restored, and not started.
    pub restored: bool,
    /// Whether the kernel has killed a process of it for want of memory.
    #[serde(rename = "OOMKilled")]
    pub oom_killed: bool,
}

/// How a container's image and its user want it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Config {
    /// Its labels.
    pub labels: Option<BTreeMap<String, String>>,
    /// What podman does if it is not healthy.
    pub healthcheck_on_failure_action: String,
}

/// How the host runs a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct HostConfig {
    /// When podman starts it again.
    pub restart_policy: RestartPolicy,
    /// Whether podman removes it when it has ended.
    pub auto_remove: bool,
}

/// When podman starts a container again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct RestartPolicy {
    /// One word.
    pub name: String,
}

/// What a supervisor finds that is about to restore a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A restore has gone on to its end after its supervisor was killed.
    Restored,
    /// A user has stopped it, removed it, or started it again.
    Users,
    /// What has failed, or nothing.
    Remains,
    /// podman has none, since the machine was started again: its storage may not be there yet.
    Away,
}

impl Said {
    /// Whether it has processes.
    #[must_use]
    pub fn runs(&self) -> bool {
        matches!(self.state.status.as_str(), "running" | "paused")
    }

    /// Whether podman, as far as it knows, would have to end it before it removes it.
    #[must_use]
    pub fn is_to_be_ended(&self) -> bool {
        self.runs() || self.state.status == "stopping"
    }

    /// Why it cannot be protected, and what to do, if it cannot.
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        let unit = self.config.labels.as_ref().and_then(|it| it.get(UNIT)).filter(|it| !it.is_empty());
        let is_none = |word: &str| matches!(word, "" | "no" | "none");
        let restart = &self.host_config.restart_policy.name;
        let health = &self.config.healthcheck_on_failure_action;
        let name = &self.name;
        if self.state.status == "paused" {
            Some(format!("it is paused, and podman checkpoints only what runs: `podman unpause {name}` first"))
        } else if !self.runs() {
            Some("it is not running".to_owned())
        } else if !is_none(restart) {
            Some(format!(
                "its restart policy is `{restart}`, so podman would start it anew where it is to be restored: \
                 `podman update --restart no {name}` first"
            ))
        } else if let Some(unit) = unit {
            Some(format!("the service {unit} of systemd starts and ends it, and would interfere with restores"))
        } else if !is_none(health) {
            Some(format!(
                "podman does `{health}` when a health check fails (--health-on-failure), which nobody could tell from a user's wish"
            ))
        } else if self.host_config.auto_remove {
            Some("podman removes it when it ends (--rm), and with it the word on how it ended".to_owned())
        } else if !self.pod.is_empty() {
            Some("it is in a pod, and a pod's containers cannot be restored one by one".to_owned())
        } else if !self.rootfs.is_empty() {
            Some(
                "it was made of a directory (--rootfs), and podman restores archives of containers of images only"
                    .to_owned(),
            )
        } else {
            None
        }
    }

    /// How a container has ended whose first process was this one. `now` is the process that has the number of which podman speaks, `seen`
    /// what the kernel says of the former one, where it does, and `is_told` whether podman is told of the end: whether conmon was there
    /// before podman was asked. None as long as podman has not noticed the end, or may not have its storage.
    #[must_use]
    pub fn ending(
        said: Option<&Self>,
        former: Process,
        now: Option<Process>,
        seen: Option<Ending>,
        is_told: bool,
    ) -> Option<Ending> {
        let Some(said) = said else { return (!former.is_of_former_boot()).then_some(Ending::ByUser) };
        if said.is_users() {
            return Some(Ending::ByUser);
        }
        if said.runs() {
            let is_another = now.is_some_and(|it| it != former);
            let is_former = said.state.pid == former.pid && !is_another && !former.is_of_former_boot();
            return match (is_former, is_told) {
                (false, _) => Some(Ending::ByUser),
                (true, true) => None,
                (true, false) => Some(seen.unwrap_or(Ending::Unseen)),
            };
        }
        let State { exit_code, oom_killed, .. } = said.state;
        if former.is_of_former_boot() {
            // A start makes it 0, and the end of the machine leaves it so.
            return Some(match by_exit_code(exit_code) {
                Ending::Exited(code) if code != 0 => Ending::Exited(code),
                _ => Ending::Unseen,
            });
        }
        Some(match seen.unwrap_or_else(|| by_exit_code(exit_code)) {
            // Its first process tells of the end of another one.
            Ending::Exited(code) if code != 0 && oom_killed => Ending::Signalled(KILL),
            ending => ending,
        })
    }

    /// What there is of a container that has failed, with this first process, and that is to be restored. `now` is the process that has the
    /// number of which podman speaks. `is_removed`: a supervisor has had podman remove it, which may mark it as stopped by a user, even if
    /// podman fails at that.
    #[must_use]
    pub fn found(said: Option<&Self>, former: Option<Process>, now: Option<Process>, is_removed: bool) -> Found {
        match said {
            None if is_removed => Found::Remains,
            None if former.is_some_and(|it| it.is_of_former_boot()) => Found::Away,
            None => Found::Users,
            Some(said) if said.runs() => match now {
                // Its worker has died, and it was not killed yet.
                Some(now) if Some(now) == former => Found::Remains,
                Some(_) if said.state.restored => Found::Restored,
                Some(_) => Found::Users,
                // It is about to end.
                None => Found::Remains,
            },
            Some(said) if said.is_users() && !is_removed => Found::Users,
            Some(_) => Found::Remains,
        }
    }

    /// Whether a user has had podman end it, as far as podman knows.
    #[must_use]
    pub fn is_users(&self) -> bool {
        let State { status, stopped_by_user, checkpointed, .. } = &self.state;
        let ends = matches!(status.as_str(), "stopping" | "removing");
        ends || (!self.runs() && (*stopped_by_user || *checkpointed))
    }
}

/// The names of those containers that need the one with this id.
#[must_use]
pub fn dependents<'a>(all: &'a [Said], id: &str) -> Vec<&'a str> {
    let needs = |it: &&Said| it.dependencies.iter().flatten().any(|needed| needed == id);
    all.iter().filter(needs).map(|it| it.name.as_str()).collect()
}

fn by_exit_code(code: i32) -> Ending {
    match code {
        // conmon was killed too.
        ..0 => Ending::Unseen,
        code if code > SIGNALLED && code <= SIGNALLED + LAST_SIGNAL => Ending::Signalled(code - SIGNALLED),
        code => Ending::Exited(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMER: Process = Process { pid: 7, started: 90 };

    fn said(status: &str, pid: i32, exit_code: i32) -> Said {
        let state = State { status: status.into(), pid, exit_code, ..State::default() };
        Said { id: "id".into(), name: "job".into(), state, ..Said::default() }
    }

    fn with(mut said: Said, change: impl FnOnce(&mut Said)) -> Said {
        change(&mut said);
        said
    }

    #[test]
    fn what_podman_prints_is_read() {
        let printed = r#"{"Id": "f0", "Name": "job", "Pod": "", "Rootfs": "", "Dependencies": [], "Driver": "overlay",
            "State": {"Status": "exited", "Pid": 0, "ExitCode": 137, "OOMKilled": true, "StoppedByUser": true},
            "Config": {"Labels": null, "HealthcheckOnFailureAction": "none"},
            "HostConfig": {"RestartPolicy": {"Name": "no", "MaximumRetryCount": 0}, "AutoRemove": false}}"#;
        let read: Said = serde_json::from_str(printed).unwrap();
        let expected = with(said("exited", 0, 137), |it| {
            it.id = "f0".into();
            it.state.stopped_by_user = true;
            it.state.oom_killed = true;
            it.dependencies = Some(Vec::new());
            it.config.healthcheck_on_failure_action = "none".into();
            it.host_config.restart_policy.name = "no".into();
        });
        assert_eq!(read, expected);
        assert!(serde_json::from_str::<Said>(r#"{"State": 3}"#).is_err());
    }

    #[test]
    fn what_would_fight_the_supervisor_is_refused_with_the_reason() {
        let running = || said("running", 7, 0);
        assert_eq!(running().obstacle(), None);
        let harmless = with(running(), |it| {
            it.host_config.restart_policy.name = "no".into();
            it.config.healthcheck_on_failure_action = "none".into();
            it.config.labels = Some(BTreeMap::from([("a".into(), "b".into())]));
        });
        assert_eq!(harmless.obstacle(), None);
        type Change = fn(&mut Said);
        let cases: [(Change, &str); 9] = [
            (|it| it.state.status = "exited".into(), "not running"),
            (|it| it.state.status = "paused".into(), "`podman unpause job`"),
            (|it| it.host_config.restart_policy.name = "always".into(), "`podman update --restart no job`"),
            (|it| it.host_config.restart_policy.name = "on-failure".into(), "restart policy is `on-failure`"),
            (|it| it.host_config.auto_remove = true, "--rm"),
            (|it| it.pod = "p".into(), "in a pod"),
            (|it| it.rootfs = "/r".into(), "--rootfs"),
            (|it| it.config.healthcheck_on_failure_action = "restart".into(), "--health-on-failure"),
            (|it| it.config.labels = Some(BTreeMap::from([(UNIT.into(), "job.service".into())])), "job.service"),
        ];
        for (change, reason) in cases {
            let why = with(running(), change).obstacle();
            assert!(why.as_ref().is_some_and(|it| it.contains(reason)), "{reason}: {why:?}");
        }
    }

    #[test]
    fn a_users_wish_is_told_from_a_failure() {
        let ending = |said: &Said, seen| Said::ending(Some(said), FORMER, None, seen, true);
        let killed = Some(Ending::Signalled(9));
        let by_user = Some(Ending::ByUser);
        assert_eq!(Said::ending(None, FORMER, None, killed, true), by_user, "it was removed");
        for change in [|it: &mut Said| it.state.stopped_by_user = true, |it: &mut Said| it.state.checkpointed = true] {
            assert_eq!(ending(&with(said("exited", 0, 137), change), killed), by_user);
        }
        assert_eq!(ending(&said("stopping", 7, 0), killed), by_user);
        assert_eq!(ending(&said("running", 8, 0), killed), by_user, "it was started again");
        assert_eq!(ending(&said("running", 7, 0), killed), None, "podman has not noticed");
        let now = |started| {
            Said::ending(Some(&said("running", 7, 0)), FORMER, Some(Process { pid: 7, started }), killed, true)
        };
        assert_eq!((now(90), now(95)), (None, by_user), "somebody has started it, and it has the same number");
        // A signal that podman had sent before, and that the container has outlived.
        assert_eq!(ending(&with(said("running", 7, 0), |it| it.state.stopped_by_user = true), None), None);
        for status in ["exited", "stopped"] {
            assert_eq!(ending(&said(status, 0, 137), killed), killed);
        }
    }

    #[test]
    fn the_kernel_knows_better_than_the_exit_code_how_a_process_has_ended() {
        let ending = |code, seen| Said::ending(Some(&said("exited", 0, code)), FORMER, None, seen, true);
        for (code, expected) in [
            (0, Ending::Exited(0)),
            (7, Ending::Exited(7)),
            (128, Ending::Exited(128)),
            (137, Ending::Signalled(9)),
            (192, Ending::Signalled(64)),
            (255, Ending::Exited(255)),
            (-1, Ending::Unseen),
        ] {
            assert_eq!(ending(code, None), Some(expected), "{code}");
            assert_eq!(ending(code, Some(Ending::Exited(137))), Some(Ending::Exited(137)));
        }
    }

    #[test]
    fn without_conmon_the_kernels_word_counts() {
        let ending = |said: &Said, seen| Said::ending(Some(said), FORMER, None, seen, false);
        let killed = Some(Ending::Signalled(9));
        assert_eq!(ending(&said("running", 7, 0), killed), killed);
        assert_eq!(ending(&said("running", 7, 0), None), Some(Ending::Unseen));
        assert_eq!(ending(&said("running", 8, 0), killed), Some(Ending::ByUser));
        assert_eq!(ending(&said("stopping", 7, 0), killed), Some(Ending::ByUser));
        assert_eq!(ending(&said("exited", 0, 3), None), Some(Ending::Exited(3)), "it had told it");
    }

    #[test]
    fn want_of_memory_is_a_failure_whichever_process_tells_of_it() {
        let ending = |code, seen| {
            let said = with(said("exited", 0, code), |it| it.state.oom_killed = true);
            Said::ending(Some(&said), FORMER, None, seen, true)
        };
        let killed = Some(Ending::Signalled(9));
        assert_eq!((ending(137, None), ending(137, Some(Ending::Exited(137)))), (killed, killed));
        assert_eq!(ending(1, Some(Ending::Exited(1))), killed, "its first process gives up");
        assert_eq!(ending(0, None), Some(Ending::Exited(0)), "it has done without");
    }

    #[test]
    fn the_exit_code_after_a_reboot_counts_if_podman_had_noted_the_end() {
        let former = Process::of_former_boot(7);
        let ending = |said: Option<&Said>| Said::ending(said, former, None, None, true);
        let unseen = Some(Ending::Unseen);
        assert_eq!(ending(Some(&said("exited", 0, 0))), unseen);
        assert_eq!(ending(Some(&said("created", 0, 0))), unseen);
        let by_user = Some(Ending::ByUser);
        assert_eq!(ending(Some(&said("running", 7, 0))), by_user, "somebody has started it, with any number");
        assert_eq!(ending(None), None, "podman may have no storage yet");
        let noted = |code| ending(Some(&said("exited", 0, code)));
        assert_eq!(noted(3), Some(Ending::Exited(3)));
        for code in [137, 143, -1] {
            assert_eq!(noted(code), unseen, "{code}: the shutdown has ended it");
        }
    }

    #[test]
    fn a_container_that_is_to_be_restored_is_removed_only_if_it_is_nobodys() {
        let found = |said: &Said, now| Said::found(Some(said), Some(FORMER), now, false);
        let later = Some(Process { pid: 7, started: 95 });
        let restored = with(said("running", 7, 0), |it| it.state.restored = true);
        assert_eq!(Said::found(None, Some(FORMER), None, false), Found::Users, "somebody has removed it");
        assert_eq!(Said::found(None, Some(FORMER), None, true), Found::Remains, "the supervisor has removed it");
        let surprised = Some(Process::of_former_boot(7));
        assert_eq!(Said::found(None, surprised, None, false), Found::Away);
        assert_eq!(Said::found(None, surprised, None, true), Found::Remains);
        assert_eq!(found(&said("exited", 0, 137), None), Found::Remains);
        assert_eq!(found(&said("running", 7, 0), Some(FORMER)), Found::Remains, "its worker has died");
        assert_eq!(found(&said("running", 7, 0), None), Found::Remains);
        assert_eq!(found(&restored, later), Found::Restored);
        assert_eq!(found(&restored, Some(FORMER)), Found::Remains, "that was the restore before");
        assert_eq!(found(&said("running", 7, 0), later), Found::Users, "somebody has started it");
        assert_eq!(found(&said("created", 0, 0), None), Found::Remains, "a restore has failed");
        let stopped = with(said("exited", 0, 0), |it| it.state.stopped_by_user = true);
        assert_eq!(found(&stopped, None), Found::Users);
        let removed = |said: &Said, now| Said::found(Some(said), Some(FORMER), now, true);
        assert_eq!(removed(&stopped, None), Found::Remains, "the supervisor has stopped it");
        assert_eq!(removed(&said("running", 7, 0), later), Found::Users, "somebody has started it all the same");
    }

    #[test]
    fn only_what_runs_is_ended_by_force() {
        for (status, expected) in
            [("running", true), ("paused", true), ("stopping", true), ("exited", false), ("created", false)]
        {
            assert_eq!(said(status, 7, 0).is_to_be_ended(), expected, "{status}");
        }
    }

    #[test]
    fn those_that_need_it_are_named() {
        let all = [
            said("running", 1, 0),
            with(said("running", 2, 0), |it| {
                it.name = "web".into();
                it.dependencies = Some(vec!["f0".into()]);
            }),
        ];
        assert_eq!((dependents(&all, "f0"), dependents(&all, "f1")), (vec!["web"], vec![]));
    }
}
