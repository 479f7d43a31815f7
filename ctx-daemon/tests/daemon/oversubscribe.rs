//! Idle programs that are suspended for one that finds no GPU memory (`gpu.oversubscribe`). A worker whose client is called
//! `needs-room...` asks for room when it gets its client.

use std::fs;

use rekindle_wire::control::{Reply, Request};

use crate::metrics::Scrape;
use crate::support::{Client, Daemon, ask, eventually};
use crate::worker::MEMORY;

/// A daemon on whose GPU nothing is free.
fn daemon(more: &str) -> Daemon {
    let config = format!("quiesce_timeout_ms = 5000\n[gpu]\noversubscribe = true\n{more}[checkpoint]\nstaging = 0\n");
    Daemon::start_with(&[("config.toml", &config), ("free", "0")])
}

/// Says for how long the client of this name has been idle.
fn idle(daemon: &Daemon, command: &str, seconds: u32) {
    // A reader sees the old number or the new one.
    let new = daemon.dir.path().join(format!("new-{command}"));
    fs::write(&new, format!("{}", seconds * 1000)).unwrap();
    fs::rename(new, daemon.dir.path().join(format!("idle-{command}"))).unwrap();
}

/// A client that has been idle for so long.
fn idle_client(daemon: &Daemon, command: &str, seconds: u32) -> Client {
    let client = Client::attached(daemon, command);
    idle(daemon, command, seconds);
    client
}

fn has(daemon: &Daemon, event: &str) -> bool {
    daemon.events().iter().any(|it| it == event)
}

fn runs(daemon: &Daemon, client: &Client) -> bool {
    daemon.state_of(client.pid).as_deref() == Some("running")
}

#[test]
fn the_least_recently_used_idle_program_is_suspended_for_one_that_needs_memory() {
    let daemon = daemon("");
    let old = idle_client(&daemon, "old", 90);
    let recent = idle_client(&daemon, "recent", 50);
    let working = idle_client(&daemon, "working", 0);
    let asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("needs-room Room again");
    let clients = daemon.clients();
    let suspended: Vec<_> = clients.iter().filter(|it| it.state == "suspended").collect();
    assert!(suspended.len() == 1 && suspended[0].pid == old.pid, "{clients:?}");
    assert_eq!(suspended[0].suspended_for, Some(format!("process {} (needs-room)", asker.pid)));
    assert!(!suspended[0].suspended.unwrap().hold);
    assert!(runs(&daemon, &recent) && runs(&daemon, &working));
    assert!(!has(&daemon, "recent Quiesce") && !has(&daemon, "working Quiesce") && !has(&daemon, "old Open"));
    let log = fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let said = format!("suspended process {} (old), which is idle, for process {} (needs-room)", old.pid, asker.pid);
    assert!(log.contains(&said), "{log}");
    let scrape = Scrape::of(&daemon);
    let suspends = |cause| {
        let labels = format!("outcome=\"done\",kind=\"none\",depth=\"shallow\",cause=\"{cause}\"");
        scrape.get(&format!("rekindle_suspend_operations_total{{{labels}}}"))
    };
    assert_eq!((suspends("oversubscription"), suspends("request")), (1.0, 0.0));
    // The next one needs more than one of the others has.
    idle(&daemon, "working", 40);
    fs::write(daemon.dir.path().join("needs-needs-room-more"), (2 * MEMORY).to_string()).unwrap();
    let _asker = Client::attached(&daemon, "needs-room-more");
    daemon.wait_for_event("needs-room-more Room again");
    assert_eq!(daemon.state_of(recent.pid).as_deref(), Some("suspended"));
    assert_eq!(daemon.state_of(working.pid).as_deref(), Some("suspended"));
}

#[test]
fn nobody_is_suspended_unless_that_is_configured() {
    let daemon = Daemon::start_with(&[("free", "0")]);
    let old = idle_client(&daemon, "old", 90);
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("needs-room Room false");
    assert!(runs(&daemon, &old) && !has(&daemon, "old Quiesce"));
}

#[test]
fn a_command_waits_for_room_no_longer_than_is_configured_however_often_it_asks() {
    let daemon = daemon("room_timeout_ms = 60000\n");
    let old = idle_client(&daemon, "old", 90);
    fs::write(daemon.dir.path().join("waited-needs-room"), "60001").unwrap();
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("needs-room Room false");
    assert!(runs(&daemon, &old) && !has(&daemon, "old Quiesce"));
    fs::write(daemon.dir.path().join("waited-needs-room-less"), "20").unwrap();
    let _asker = Client::attached(&daemon, "needs-room-less");
    daemon.wait_for_event("needs-room-less Room again");
}

#[test]
fn nobody_is_suspended_in_vain() {
    let daemon = daemon("");
    let old = idle_client(&daemon, "old", 90);
    let working = idle_client(&daemon, "working", 0);
    fs::write(daemon.dir.path().join("needs-needs-room"), (MEMORY + 1).to_string()).unwrap();
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("needs-room Room false");
    // What this one lacks is free by now.
    fs::write(daemon.dir.path().join("free"), (MEMORY + 1).to_string()).unwrap();
    let _asker = Client::attached(&daemon, "needs-room-too");
    daemon.wait_for_event("needs-room-too Room again");
    // No memory of others would help this one.
    fs::write(daemon.dir.path().join("needs-needs-room-no-more"), "0").unwrap();
    let _asker = Client::attached(&daemon, "needs-room-no-more");
    daemon.wait_for_event("needs-room-no-more Room false");
    for client in [&old, &working] {
        assert!(runs(&daemon, client));
    }
    assert!(!has(&daemon, "old Quiesce") && !has(&daemon, "working Quiesce"));
}

#[test]
fn a_program_that_pauses_for_a_moment_is_busy_and_one_that_stays_idle_is_waited_for() {
    let daemon = daemon("idle_ms = 3000\n");
    let pausing = idle_client(&daemon, "pausing", 2);
    let _asker = Client::attached(&daemon, "needs-room");
    // It says that it has been idle for two seconds whenever it is asked.
    daemon.wait_for_event("needs-room Room false");
    assert!(runs(&daemon, &pausing) && !has(&daemon, "pausing Quiesce"));
    let _asker = Client::attached(&daemon, "needs-room-too");
    idle(&daemon, "pausing", 3);
    daemon.wait_for_event("needs-room-too Room again");
    assert_eq!(daemon.state_of(pausing.pid).as_deref(), Some("suspended"));
}

#[test]
fn programs_that_cannot_be_suspended_go_on_and_another_one_is() {
    let daemon = daemon("");
    // A kernel for which nobody waits, no host memory, an error of the device, and a process that ends.
    let names = ["busy", "huge", "fails-save", "ends-in-save", "shares"];
    fs::write(daemon.dir.path().join("shares-shares"), "own").unwrap();
    let clients: Vec<_> = names.iter().map(|name| idle_client(&daemon, name, 90)).collect();
    let last = idle_client(&daemon, "last", 50);
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("needs-room Room again");
    assert_eq!(daemon.state_of(last.pid).as_deref(), Some("suspended"));
    for (name, client) in names.iter().zip(&clients).filter(|(name, _)| **name != "ends-in-save") {
        daemon.wait_for_state(client, Some("running"));
        assert!(!has(&daemon, &format!("{name} Suspend false")));
    }
    assert!(!has(&daemon, "shares Quiesce") && !has(&daemon, "huge Quiesce"));
    let log = fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    for why in ["stream 0x1 is busy", "do not fit into host memory", "copy of 0x2000 failed", "shares GPU memory"] {
        assert!(log.contains(why), "{why}: {log}");
    }
}

#[test]
fn a_program_that_has_work_while_it_is_saved_goes_on_at_once() {
    let daemon = daemon("");
    let victim = idle_client(&daemon, "keeps-saving", 90);
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("keeps-saving Save Stop");
    assert!(!has(&daemon, "needs-room Room false"));
    idle(&daemon, "keeps-saving", 0);
    daemon.wait_for_event("keeps-saving Open");
    daemon.wait_for_state(&victim, Some("running"));
    daemon.wait_for_event("needs-room Room false");
    assert!(has(&daemon, "keeps-saving Cancel") && !has(&daemon, "keeps-saving Suspend false"));
}

#[test]
fn nothing_is_suspended_any_more_when_the_one_that_needed_memory_has_ended() {
    let daemon = daemon("");
    let victim = idle_client(&daemon, "keeps-saving", 90);
    let mut asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("keeps-saving Save Stop");
    asker.kill();
    daemon.wait_for_event("keeps-saving Open");
    daemon.wait_for_state(&victim, Some("running"));
    assert!(!has(&daemon, "keeps-saving Suspend false"));
}

#[test]
fn an_operator_comes_first() {
    let daemon = daemon("");
    let victim = idle_client(&daemon, "keeps-saving", 90);
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("keeps-saving Save Stop");
    // It cannot be suspended for another by the daemon and by an operator at the same time.
    let socket = daemon.socket();
    let pid = victim.pid;
    let operator = std::thread::spawn(move || ask(&socket, &Request::Suspend { pid, hold: true, deep: false }, &[]));
    daemon.wait_for_event("needs-room Room false");
    assert!(has(&daemon, "keeps-saving Cancel") && !has(&daemon, "keeps-saving Suspend false"));
    // This save goes on until its client ends.
    drop(victim);
    assert!(matches!(operator.join().unwrap(), Reply::Failed(_)));
}

#[test]
fn a_program_that_waits_for_memory_is_not_suspended_for_another_that_does() {
    let daemon = daemon("");
    let victim = idle_client(&daemon, "keeps-saving", 90);
    let _first = idle_client(&daemon, "needs-room-first", 80);
    daemon.wait_for_event("keeps-saving Save Stop");
    // Its turn comes after the first one's.
    let second = idle_client(&daemon, "needs-room-second", 80);
    eventually("both wait for memory", || {
        let log = fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        (log.matches("its client needs GPU memory").count() == 2).then_some(())
    });
    idle(&daemon, "keeps-saving", 0);
    daemon.wait_for_event("needs-room-first Room false");
    assert!(runs(&daemon, &second) && !has(&daemon, "needs-room-second Quiesce"));
    daemon.wait_for_state(&victim, Some("running"));
}

#[test]
fn an_allocation_does_not_wait_longer_than_is_configured() {
    let daemon = daemon("room_timeout_ms = 200\n");
    let victim = idle_client(&daemon, "keeps-saving", 90);
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("needs-room Room false");
    daemon.wait_for_event("keeps-saving Open");
    daemon.wait_for_state(&victim, Some("running"));
    assert!(!has(&daemon, "keeps-saving Suspend false"));
    let log = fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(log.contains("there was none after 200 ms (gpu.room_timeout_ms)"), "{log}");
}

#[test]
fn an_operator_holds_a_program_that_was_suspended_for_another() {
    let daemon = daemon("");
    let old = idle_client(&daemon, "old", 90);
    let _asker = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("needs-room Room again");
    let held = ask(&daemon.socket(), &Request::Suspend { pid: old.pid, hold: true, deep: false }, &[]);
    assert_eq!(held, Reply::Suspended(Vec::new()));
    let suspended = daemon.clients().into_iter().find_map(|it| it.suspended).unwrap();
    assert!(suspended.hold);
    // Nobody looks at a program that has given everything back.
    let _asker = Client::attached(&daemon, "needs-room-too");
    daemon.wait_for_event("needs-room-too Room false");
    let Reply::WereResumed(all) = ask(&daemon.socket(), &Request::ResumeSuspended { pid: old.pid }, &[]) else {
        panic!()
    };
    assert!(all.len() == 1 && all[0].bytes > 0);
    assert!(runs(&daemon, &old));
}
