//! `rekindle checkpoint --to` and `rekindle restore --into`: from a program into a store, and from there into a program.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Node, Result, process};
use serde_json::Value;

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
        let file = File::options().read(true).write(true).open(object)?;
        let middle = file.metadata()?.len() / 2;
        let mut byte = [0];
        file.read_exact_at(&mut byte, middle)?;
        file.write_all_at(&[byte[0] ^ 1], middle)?;
        let into = node.fresh("bad");
        let (code, _, err) = restore(&into)?;
        ensure!(code == Some(4), "{}: {code:?}: {err}", object.display());
        ensure!(!into.exists() && process::is_gone(identity.pid), "{err}");
        let (code, out, _) = rekindle(&node, &["images".as_ref(), "verify".as_ref(), url.as_ref()])?;
        let name = object.file_name().and_then(OsStr::to_str).context("no name")?;
        ensure!(code == Some(4) && out.contains(name), "{code:?}: {out}");
        file.write_all_at(&byte, middle)?;
    }
    let (code, out, err) = rekindle(&node, &["images".as_ref(), "verify".as_ref(), url.as_ref()])?;
    ensure!(code == Some(0), "{out} {err}");

    let into = node.path("back");
    let (code, out, err) = restore(&into)?;
    ensure!(code == Some(0) && out.contains("restored"), "{out} {err}");
    assert_eq!(App::adopt(identity).finish()?, expected);
    node.finish()
}
