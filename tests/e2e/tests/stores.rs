//! `rekindle checkpoint --to` and `rekindle restore --into`: from a program into a store, and from there into a program.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Node, Result, process};
use serde_json::Value;

use crate::container_protect::{self, Container, STEADY};
use crate::protect::flip;

const ARGUMENTS: [&str; 4] = ["--iterations", "600", "--sleep-us", "2000"];

/// The exit status, stdout and stderr of `rekindle`.
fn rekindle(node: &Node, arguments: &[&OsStr]) -> Result<(Option<i32>, String, String)> {
    let output = node.rekindle(arguments)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

/// The objects of a store that have content of images.
fn content(store: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut left = ["pieces", "packs"].map(|it| store.join(it)).to_vec();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            for entry in fs::read_dir(&path)? {
                left.push(entry?.path());
            }
        } else if path.exists() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn a_program_is_checkpointed_into_a_store_and_restored_from_there() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let node = Node::start()?;
    let store = node.path("store");
    let url = format!("file://{}", store.display());
    let app = node.run("globals", &ARGUMENTS)?;
    app.reaches(300)?;
    let (pid, image) = (app.pid().to_string(), node.path("image"));
    let checkpoint = ["checkpoint".as_ref(), pid.as_ref(), image.as_os_str(), "--to".as_ref(), url.as_ref()];

    // Without a store nothing is made.
    let (code, _, err) = rekindle(&node, &checkpoint)?;
    ensure!(code == Some(3) && err.contains("store"), "{code:?}: {err}");
    ensure!(!image.exists() && !process::is_gone(app.pid()));

    let (code, _, err) = rekindle(&node, &["images", "init", &url].map(OsStr::new))?;
    ensure!(code == Some(0), "{err}");
    let tree = process::tree(app.pid());
    let (code, out, err) = rekindle(&node, &[&checkpoint[..], &["--kill".as_ref(), "--json".as_ref()]].concat())?;
    ensure!(code == Some(0), "{err}");
    let said: Value = serde_json::from_str(&out)?;
    assert_eq!((&said["outcome"], &said["stored"]["name"]), (&"done".into(), &"image".into()), "{said}");
    let identity = app.was_killed(&tree)?;
    // The name is taken from now on, which is said before a program is dumped.
    let (code, _, err) = rekindle(&node, &checkpoint)?;
    ensure!(code == Some(3), "{code:?}: {err}");
    fs::remove_dir_all(&image)?;

    // A byte of the store's content is another one: nothing is started, and no directory appears.
    let named = format!("{url}/image");
    let restore = |into: &Path| {
        let arguments = ["restore".as_ref(), named.as_ref(), "--into".as_ref(), into.as_os_str(), "-d".as_ref()];
        rekindle(&node, &arguments)
    };
    let objects = content(&store)?;
    ensure!(objects.len() > 1, "{objects:?}");
    for object in [objects.first(), objects.last()].into_iter().flatten() {
        let middle = object.metadata()?.len() / 2;
        flip(object, middle)?;
        let into = node.fresh("bad");
        let (code, _, err) = restore(&into)?;
        ensure!(code == Some(4), "{}: {code:?}: {err}", object.display());
        ensure!(!into.exists() && process::is_gone(identity.pid), "{err}");
        let (code, out, _) = rekindle(&node, &["images".as_ref(), "verify".as_ref(), url.as_ref()])?;
        let name = object.file_name().and_then(OsStr::to_str).context("no name")?;
        ensure!(code == Some(4) && out.contains(name), "{code:?}: {out}");
        flip(object, middle)?;
    }
    let (code, out, err) = rekindle(&node, &["images".as_ref(), "verify".as_ref(), url.as_ref()])?;
    ensure!(code == Some(0), "{out} {err}");

    let into = node.path("back");
    let (code, out, err) = restore(&into)?;
    ensure!(code == Some(0) && out.contains("restored"), "{out} {err}");
    assert_eq!(App::adopt(identity).finish()?, expected);
    node.finish()
}

#[test]
fn a_container_is_checkpointed_into_a_store_and_restored_from_there() -> Result {
    let node = container_protect::node()?;
    let container = Container::prepare(&node)?;
    let Container { podman, program, .. } = &container;
    let store = node.path("store");
    let url = format!("file://{}", store.display());
    container.run(&[], &STEADY)?;
    let id = container.inspect("{{.Id}}")?;
    let archive = node.path("job.tar.zst");
    let of_job = ["checkpoint", "--container", "job", "--podman", program, "--to"].map(OsStr::new);
    let exported = [&of_job[..], &[url.as_ref(), "--export".as_ref(), archive.as_os_str()]].concat();

    // What stands in the way is said before the checkpoint.
    let (code, _, err) = rekindle(&node, &[&of_job[..], &[url.as_ref()]].concat())?;
    ensure!(code == Some(2) && err.contains("--export"), "{code:?}: {err}");
    let (code, _, err) = rekindle(&node, &exported)?;
    ensure!(code == Some(3) && err.contains("store") && !archive.exists(), "{code:?}: {err}");
    let (code, _, err) = rekindle(&node, &["images", "init", &url].map(OsStr::new))?;
    ensure!(code == Some(0), "{err}");
    let (code, out, err) = rekindle(&node, &[&exported[..], &["--json".as_ref()]].concat())?;
    ensure!(code == Some(0), "{err}");
    let said: Value = serde_json::from_str(&out)?;
    assert_eq!((&said["outcome"], &said["stored"]["name"]), (&"done".into(), &"job".into()), "{said}");
    assert_eq!(said["stored"]["container"]["id"], id.as_str(), "{said}");
    let (code, _, err) = rekindle(&node, &exported)?;
    ensure!(code == Some(3) && err.contains("already"), "{code:?}: {err}");
    podman.call(&["rm", "--force", "--time", "0", "job"])?;

    // A second name by way of the archive itself, for which nothing is sent.
    let again = ["images".as_ref(), "copy".as_ref(), archive.as_os_str(), OsStr::new(&url)];
    let (code, _, err) = rekindle(&node, &again)?;
    ensure!(code == Some(3) && err.contains("\"job\" already"), "{code:?}: {err}");
    let second = format!("{url}/second");
    let again = ["images".as_ref(), "copy".as_ref(), archive.as_os_str(), second.as_ref(), "--json".as_ref()];
    let (code, out, err) = rekindle(&node, &again)?;
    ensure!(code == Some(0), "{err}");
    assert_eq!(serde_json::from_str::<Value>(&out)?["sent_bytes"], 0, "{out}");
    let (code, out, err) = rekindle(&node, &["images", "ls", &url].map(OsStr::new))?;
    ensure!(
        code == Some(0) && out.contains("CONTAINER") && out.lines().skip(1).all(|it| it.contains(" job ")),
        "{out}{err}"
    );
    fs::remove_file(&archive)?;

    let named = format!("{url}/job");
    let restore = |into: &Path| {
        let arguments = ["restore".as_ref(), named.as_ref(), "--into".as_ref(), into.as_os_str()];
        rekindle(&node, &[&arguments[..], &["--podman".as_ref(), program.as_ref()]].concat())
    };
    let objects = content(&store)?;
    for object in [objects.first(), objects.last()].into_iter().flatten() {
        let at = object.metadata()?.len() / 2;
        flip(object, at)?;
        let into = node.fresh("bad");
        let (code, _, err) = restore(&into)?;
        ensure!(code == Some(4) && !into.exists(), "{}: {code:?}: {err}", object.display());
        flip(object, at)?;
    }
    ensure!(podman.call(&["container", "exists", "job"]).is_err());
    let (code, out, err) = restore(&node.path("back"))?;
    ensure!(code == Some(0) && out.contains("restored container"), "{out} {err}");
    assert_eq!(container.inspect("{{.Id}}")?, id);
    container.end()?;
    assert_eq!(podman.output("job")?, "steady ok\n");
    podman.call(&["rm", "job"])?;
    drop(container);
    node.finish()
}
