//! Content that is loaded before there is an image to restore.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rekindle_wire::control::{FailureKind, PreloadInfo, Reply, Request};
use rekindle_wire::frame;
use tempfile::TempDir;

use crate::dump::dump_and;
use crate::support::{Client, Daemon, Session, as_user, eventually, reason};

/// Images of a client, each of which builds on the one before.
struct Chain {
    daemon: Daemon,
    dir: TempDir,
    client: Client,
}

impl Chain {
    fn of(images: usize) -> Self {
        let daemon = Daemon::start();
        let (dir, client) = (TempDir::new().unwrap(), Client::attached(&daemon, "app"));
        let mut chain = Self { daemon, dir, client };
        for number in 0..images {
            let image = chain.image(number);
            std::fs::create_dir(&image).unwrap();
            if let Some(before) = number.checked_sub(1) {
                std::os::unix::fs::symlink(format!("../{before}"), image.join("rekindle-parent")).unwrap();
            }
            dump_and(&chain.daemon, &image, &mut chain.client, true);
            chain.daemon.wait_for_state(&chain.client, Some("running"));
        }
        chain
    }

    fn image(&self, number: usize) -> PathBuf {
        self.dir.path().join(number.to_string())
    }

    /// Loads an image, by a connection of its own.
    fn preload(&self, number: usize) -> (Session, Reply) {
        Session::open(&self.daemon, &Request::Preload, &self.image(number))
    }

    /// The events of a restore that is given up when all is loaded.
    fn restored(&self, number: usize) -> Vec<String> {
        self.events_of(|| {
            let (session, reply) = Session::open(&self.daemon, &Request::Restore, &self.image(number));
            assert!(matches!(reply, Reply::Prepared { .. }), "{reply:?}");
            session
        })
    }

    /// The events of what begins so, until a client is loaded.
    fn events_of<T>(&self, begin: impl FnOnce() -> T) -> Vec<String> {
        let before = self.daemon.events().len();
        let begun = begin();
        let events = eventually("a client is loaded", || {
            let events = self.daemon.events().split_off(before);
            events.iter().any(|it| it == "app Load 1").then_some(events)
        });
        drop(begun);
        events
    }
}

/// Loads another image in the place of the one before.
fn next(session: &Session, dir: &Path) -> Reply {
    let dir = File::open(dir).unwrap();
    frame::send(&session.0, &Request::Preload, &[], &[dir.as_raw_fd()]).unwrap();
    session.hear()
}

fn is_loaded(reply: &Reply) -> bool {
    matches!(reply, Reply::Preloaded(PreloadInfo { .. }))
}

/// The events that are about copies, without the names of workers.
fn copies(events: &[String]) -> Vec<&str> {
    let all = events.iter().filter_map(|it| it.split_once(' ')).map(|(_, event)| event);
    all.filter(|it| it.starts_with("CopyTemplate") || it.starts_with("TakeTemplate")).collect()
}

#[test]
fn a_restore_copies_what_an_image_that_it_builds_on_has_left_on_the_gpu_and_the_next_one_loads_all() {
    let chain = Chain::of(3);
    let (session, loaded) = chain.preload(0);
    assert!(is_loaded(&loaded), "{loaded:?}");
    assert_eq!(copies(&chain.restored(2)), ["CopyTemplate", "TakeTemplate 2"]);
    // It was that restore's.
    assert!(copies(&chain.restored(2)).is_empty());
    assert!(is_loaded(&next(&session, &chain.image(1))));
    assert_eq!(copies(&chain.restored(2)), ["CopyTemplate", "TakeTemplate 2"]);
}

#[test]
fn a_later_round_copies_from_the_one_before_and_takes_its_place() {
    let chain = Chain::of(3);
    let (session, _) = chain.preload(0);
    let events = chain.events_of(|| assert!(is_loaded(&next(&session, &chain.image(1)))));
    assert_eq!(copies(&events), ["CopyTemplate", "TakeTemplate 2"]);
    // One that cannot be loaded leaves it.
    std::fs::write(chain.daemon.dir.path().join("free"), "1000").unwrap();
    let Reply::Failed(failure) = next(&session, &chain.image(2)) else { panic!("it was loaded") };
    assert_eq!(failure.kind, FailureKind::Refused);
    assert!(failure.reason.contains("a GPU has 1000 bytes free"), "{failure}");
    std::fs::remove_file(chain.daemon.dir.path().join("free")).unwrap();
    assert_eq!(copies(&chain.restored(2)), ["CopyTemplate", "TakeTemplate 2"]);
}

#[test]
fn what_was_loaded_goes_with_its_connection_and_serves_no_other_image() {
    let chain = Chain::of(2);
    let (session, _) = chain.preload(1);
    assert!(copies(&chain.restored(1)).is_empty() && copies(&chain.restored(0)).is_empty());
    drop(session);
    drop(chain.preload(0));
    eventually("what was loaded is gone", || copies(&chain.restored(1)).is_empty().then_some(()));
}

#[test]
fn a_restore_without_room_beside_it_and_one_by_an_older_worker_load_all() {
    let chain = Chain::of(2);
    let (session, _) = chain.preload(0);
    std::fs::write(chain.daemon.dir.path().join("free"), "1000").unwrap();
    assert!(copies(&chain.restored(1)).is_empty());
    std::fs::remove_file(chain.daemon.dir.path().join("free")).unwrap();
    std::fs::write(chain.daemon.dir.path().join("knows-no-copies"), "").unwrap();
    assert!(is_loaded(&next(&session, &chain.image(0))));
    let events = chain.restored(1);
    assert!(copies(&events).is_empty() && events.iter().any(|it| it == "app Load 1"), "{events:?}");
}

#[test]
fn a_restore_takes_the_worker_that_has_loaded_its_code_and_another_ends() {
    let chain = Chain::of(3);
    std::fs::write(chain.daemon.dir.path().join("free"), (2_u64 << 30).to_string()).unwrap();
    let has_its_code = |events: &[String]| events.iter().any(|it| it.ends_with("has its code"));
    let loads = |count: usize| {
        let all = || chain.daemon.events().iter().filter(|it| it.ends_with("LoadCode")).count();
        eventually("code is loaded", || (all() >= count).then_some(()));
        assert_eq!(all(), count);
    };
    let (session, _) = chain.preload(0);
    loads(1);
    assert!(has_its_code(&chain.restored(2)));
    assert!(!has_its_code(&chain.restored(2)), "it was that restore's");
    drop(session);
    let (session, _) = chain.preload(0);
    loads(2);
    // Content of a later round, and the same worker.
    assert!(is_loaded(&next(&session, &chain.image(1))));
    loads(2);
    assert!(has_its_code(&chain.restored(2)));
    drop(session);
    let (session, _) = chain.preload(0);
    loads(3);
    drop(session);
    eventually("the worker has ended", || (!has_its_code(&chain.restored(2))).then_some(()));
}

#[test]
fn a_worker_that_cannot_load_code_in_advance_loads_it_in_the_restore() {
    let chain = Chain::of(1);
    std::fs::write(chain.daemon.dir.path().join("free"), (2_u64 << 30).to_string()).unwrap();
    std::fs::write(chain.daemon.dir.path().join("loads-no-code"), "").unwrap();
    let (_session, _) = chain.preload(0);
    eventually("it is tried", || chain.daemon.events().iter().any(|it| it.ends_with("LoadCode")).then_some(()));
    let events = chain.restored(0);
    assert!(events.iter().any(|it| it == "app Load 1"), "{events:?}");
}

#[test]
fn what_is_no_image_is_refused_and_only_an_operator_has_images_loaded() {
    let chain = Chain::of(1);
    std::fs::create_dir(chain.image(1)).unwrap();
    let (session, reply) = chain.preload(1);
    assert!(matches!(reply, Reply::Failed(_)), "{reply:?}");
    // The connection serves the next one.
    assert!(is_loaded(&next(&session, &chain.image(0))));
    let Some(refused) = as_user(1234, || reason(chain.preload(0).1)) else {
        return eprintln!("skipped: this process may not change its user");
    };
    assert!(refused.contains("only root"), "{refused}");
}
