//! `rekindle migrate --tls`: programs that move to another host over mutual TLS.

use std::ffi::OsStr;
use std::fs;
use std::process::Output;

use anyhow::ensure;
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::tls::{CALLER, Listener};
use rekindle_e2e::wait::until;
use rekindle_e2e::{Elsewhere, Node, Result, stage};

use super::migrate::{ARGUMENTS, Hosts, finish_elsewhere, handed_over, report};

/// The options by which a host is reached that listens.
fn options(here: &Node, listener: &Listener) -> Vec<String> {
    let text = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
    let words = ["--tls".to_owned(), "--tls-dir".to_owned(), text(listener.dir()), "--dir".to_owned()];
    words.into_iter().chain([text(here.path("moves/out"))]).collect()
}

fn rekindle(here: &Node, listener: &Listener, words: &[&str]) -> Result<Output> {
    let words = words.iter().map(|it| (*it).to_owned()).chain(options(here, listener));
    let words: Vec<_> = ["migrate".to_owned()].into_iter().chain(words).collect();
    here.rekindle(&words.iter().map(OsStr::new).collect::<Vec<_>>())
}

#[test]
fn a_program_moves_over_tls_and_ends_there_as_it_would_have_here() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let here = Node::start()?;
    let there = Elsewhere::beside(&here)?;
    let listener = Listener::start(&here, &there, &here.path("moves/in"))?;
    let app = here.run("globals", &ARGUMENTS)?;
    app.reaches(300)?;
    let pid = app.pid().to_string();
    // Who is not let in hears why, and the program goes on.
    fs::write(listener.peers(), "another\n")?;
    let output = rekindle(&here, &listener, &[&pid, listener.host()])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains("(`peers`)"), "{said}");
    app.advances_by(1)?;
    // The list is read anew.
    fs::write(listener.peers(), format!("another\n{CALLER}\n"))?;
    let said = report(&rekindle(&here, &listener, &[&pid, listener.host(), "--json"])?)?;
    assert_eq!((&said["moved"], &said["host"]), (&true.into(), &listener.host().into()), "{said}");
    let migration = said["migration"].as_str().unwrap_or_default().to_owned();
    let identity = handed_over(app)?;
    let app = there.app(&identity)?;
    assert!(app.progress()? >= 300);
    assert_eq!(finish_elsewhere(app)?, expected);
    // To settle it late changes nothing.
    let output = rekindle(&here, &listener, &["--settle", &migration, listener.host()])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success() && said == "the processes run there\n",
        "{said} {}",
        String::from_utf8_lossy(&output.stderr)
    );
    drop(listener);
    there.finish()?;
    here.finish()
}

/// The messages before and after which the listener is killed, and all connections with it.
const MOMENTS: [&str; 7] = [
    "before \"Ready\"",
    "after \"0\"",
    "before {\"Restore\"",
    "after {\"Restore\"",
    "after \"Held\"",
    "before \"Own\"",
    "before \"Running\"",
];

#[test]
fn a_listener_that_is_killed_at_whatever_moment_leaves_one_program() -> Result {
    let mut hosts = Hosts::start()?;
    let listener = Listener::start(&hosts.here, &hosts.there, &hosts.here.path("moves/in"))?;
    // A relay sees the messages on their way to the connection. What is to be run is chosen there.
    let (way, rekindle) = (hosts.here.path("way"), stage::program("rekindle")?);
    let (rekindle, dir) = (rekindle.display().to_string(), listener.dir().display().to_string());
    let words = format!("exec {rekindle} tls connect --tls-dir {dir} {} migrate", listener.host());
    stage::write_script(&way, &format!("#!/bin/sh\n{words}\n"))?;
    let (kill, said) = (listener.kill()?, listener.said());
    hosts.by_tls(&way, listener, options);
    for (kills, moment) in MOMENTS.into_iter().enumerate() {
        until("it listens again", || {
            Ok((fs::read_to_string(&said)?.matches("listens on").count() > kills).then_some(()))
        })?;
        hosts.migrate_while(&format!("{moment} {kill}"))?;
        ensure!(fs::read_to_string(hosts.here.path("plan"))? == "over", "{moment}: nothing was killed");
    }
    hosts.finish()
}
