//! What podman is asked and told about a protected container. `rekindle checkpoint` and `rekindle restore` do the rest (`verbs`).

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rekindle_protect::Container;
use rekindle_protect::container::{Said, dependents};

use crate::engine::Engine;
use crate::failure::Failure;

/// What `podman container exists` ends with if there is none.
const NONE: i32 = 1;
/// How often to look for containers that need a protected one, at most.
const DEPENDENTS: Duration = Duration::from_secs(60);

/// The container with this name or id, if it can be protected.
pub(super) fn to_protect(engine: &Engine, name: &str) -> Result<Said, Failure> {
    let said = engine
        .ask(&["container", "inspect", name])
        .map_err(|said| said.refused(&format!("podman knows no container {name}")))?;
    let said = one(&said)?;
    let refused = |why: String| Err(Failure::refused(anyhow!("container {name} cannot be protected: {why}")));
    if let Some(why) = said.obstacle() {
        return refused(why);
    }
    // An older podman leaves the word out, which looks like a container that nobody has stopped.
    let tells = engine.ask(&["container", "inspect", "--format", "{{.State.StoppedByUser}}", &said.id]);
    if let Err(error) = tells {
        let why =
            error.failed("this podman does not tell whether a user has stopped a container; a newer one is needed");
        return refused(why.to_string());
    }
    match needed_by(engine, &said.id)?.as_slice() {
        [] => Ok(said),
        names => {
            refused(format!("{} need it, and podman does not let it be removed for a restore", names.join(" and ")))
        }
    }
}

/// The names of the containers that need the one with this id.
fn needed_by(engine: &Engine, id: &str) -> Result<Vec<String>, Failure> {
    let all = engine.ask(&["ps", "--all", "--no-trunc", "--format", "{{.ID}}"]);
    let all = all.map_err(|said| said.failed("podman does not list containers"))?;
    let mut inspect = vec!["container", "inspect"];
    inspect.extend(all.split_whitespace());
    let others = engine.ask(&inspect).map_err(|said| said.failed("podman does not tell about all containers"))?;
    Ok(dependents(&read(&others)?, id).into_iter().map(str::to_owned).collect())
}

/// A protected container, about which podman is asked again and again.
#[derive(Debug)]
pub(super) struct Asked {
    container: Container,
    /// Why podman has not answered the last time, which is in the log.
    silent: Option<String>,
    /// The containers that need it, which were there when podman was asked last, and when that was.
    needed_by: Vec<String>,
    looked: Option<Instant>,
}

impl Asked {
    pub(super) fn new(container: &Container) -> Self {
        Self { container: container.clone(), silent: None, needed_by: Vec::new(), looked: None }
    }

    /// The containers that need it since the last look, if others do than before; not more often than each minute. As long as there
    /// are any, podman does not remove it.
    pub(super) fn newly_needed_by(&mut self) -> Option<String> {
        if self.looked.is_some_and(|it| it.elapsed() < DEPENDENTS) {
            return None;
        }
        self.looked = Some(Instant::now());
        // One may be removed between the two questions. Then the next look tells.
        let names = needed_by(&engine(&self.container), &self.container.id).ok()?;
        let is_news = names != self.needed_by && !names.is_empty();
        self.needed_by = names;
        is_news.then(|| self.needed_by.join(" and "))
    }

    /// What podman says, in the inner option nothing if it has no such container. None if it does not answer: the log says why, once.
    pub(super) fn said(&mut self) -> Option<Option<Said>> {
        match said(&self.container) {
            Ok(said) => {
                self.silent = None;
                Some(said)
            }
            Err(error) => {
                let why = format!("{error:#}");
                if self.silent.as_ref() != Some(&why) {
                    eprintln!("rekindle: {why}");
                }
                self.silent = Some(why);
                None
            }
        }
    }
}

/// What podman says of a protected container; none if it has none with this id.
fn said(container: &Container) -> anyhow::Result<Option<Said>> {
    let engine = engine(container);
    match engine.ask(&["container", "inspect", &container.id]) {
        Ok(said) => one(&said).map(Some),
        Err(why) => {
            let mut exists = Command::new(&engine.program);
            exists.args(["container", "exists", &container.id]).stdin(Stdio::null());
            let status = exists.stdout(Stdio::null()).stderr(Stdio::null()).status();
            if status.is_ok_and(|it| it.code() == Some(NONE)) {
                return Ok(None);
            }
            Err(anyhow!("{}", why.failed("podman does not tell about the container")))
        }
    }
}

/// Removes a container that has failed; `by_force`: with what is left of it. Otherwise podman refuses one that somebody has started
/// meanwhile. Its volumes stay. The lock is held until podman has ended.
pub(super) fn remove(container: &Container, lock: File, by_force: bool) -> anyhow::Result<()> {
    let mut podman = Command::new(engine(container).program);
    podman.args(["rm", "--ignore"]);
    if by_force {
        podman.args(["--force", "--time", "0"]);
    }
    let output = podman.arg(&container.id).stdin(lock).output().context("cannot run podman")?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(anyhow!("podman does not remove what is left of the container: {}", said.trim()))
}

/// The program, so that it is found wherever the supervisor is started.
pub(super) fn program(named: &Path) -> anyhow::Result<std::path::PathBuf> {
    if named.components().count() == 1 {
        return Ok(named.to_owned());
    }
    std::path::absolute(named).context("cannot tell the current directory")
}

fn engine(container: &Container) -> Engine {
    Engine::podman(container.podman.as_deref())
}

fn one(said: &str) -> anyhow::Result<Said> {
    read(said)?.into_iter().next().context("podman says nothing of the container")
}

fn read(said: &str) -> anyhow::Result<Vec<Said>> {
    serde_json::from_str(said).context("cannot read what podman says of containers")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A container of a podman that is this script.
    fn of(script: &str) -> (tempfile::TempDir, Container) {
        let dir = tempfile::tempdir().unwrap();
        let podman = dir.path().join("podman");
        fs::write(&podman, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&podman, fs::Permissions::from_mode(0o700)).unwrap();
        (dir, Container { id: "f0".to_owned(), name: "job".to_owned(), podman: Some(podman) })
    }

    #[test]
    fn a_podman_that_fails_is_not_taken_for_a_container_that_is_gone() {
        let (_dir, gone) = of("[ \"$2\" = exists ] && exit 1; exit 125");
        assert_eq!(said(&gone).unwrap(), None);
        for script in ["exit 125", "exit 1; # also of inspect", "echo '[]'", "echo no JSON", "kill -9 $$"] {
            let (_dir, failing) = of(&format!("[ \"$2\" = exists ] && exit 125; {script}"));
            assert!(said(&failing).is_err(), "{script}");
            assert!(Asked::new(&failing).said().is_none(), "{script}");
        }
        let there = r#"echo '[{"Id": "f0", "State": {"Status": "exited", "ExitCode": 137}}]'"#;
        let (_dir, there) = of(there);
        let found = Asked::new(&there).said().unwrap().unwrap();
        assert_eq!((found.state.exit_code, found.runs()), (137, false));
    }

    #[test]
    fn a_container_is_removed_by_force_only_where_that_is_wanted() {
        let lock = || File::open("/dev/null").unwrap();
        let script = "echo \"$*\" >>\"${0%/*}/called\"; [ \"$3\" = --force ] || { echo 'Error: it runs' >&2; exit 2; }";
        let (dir, container) = of(script);
        let why = remove(&container, lock(), false).unwrap_err().to_string();
        assert!(why.contains("Error: it runs"), "{why}");
        remove(&container, lock(), true).unwrap();
        let called = fs::read_to_string(dir.path().join("called")).unwrap();
        assert_eq!(called, "rm --ignore f0\nrm --ignore --force --time 0 f0\n");
    }

    #[test]
    fn those_that_need_it_are_told_once() {
        let (dir, container) = of("[ $1 = ps ] && { echo f0 f1; exit; }; cat \"${0%/*}/said\"");
        let said = |names: &[&str]| {
            let one = |it: &&str| format!(r#"{{"Id": "{it}", "Name": "{it}", "Dependencies": ["f0"]}}"#);
            let all = names.iter().map(one).collect::<Vec<_>>().join(",");
            fs::write(dir.path().join("said"), format!("[{all}]")).unwrap();
        };
        let mut asked = Asked::new(&container);
        let mut look = || {
            asked.looked = None;
            asked.newly_needed_by()
        };
        said(&[]);
        assert_eq!(look(), None);
        said(&["web"]);
        assert_eq!((look().as_deref(), look()), (Some("web"), None));
        said(&["web", "log"]);
        assert_eq!(look().as_deref(), Some("web and log"));
        said(&[]);
        assert_eq!(look(), None);
        assert_eq!(asked.newly_needed_by(), None, "it was asked just now");
    }

    #[test]
    fn a_program_that_is_named_by_a_path_is_found_from_everywhere() {
        assert_eq!(program(Path::new("podman")).unwrap(), Path::new("podman"));
        assert!(program(Path::new("./podman")).unwrap().is_absolute());
    }
}
