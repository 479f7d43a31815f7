//! A store on another host: `ssh` is a script here that runs the command on this one.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::*;

/// A program `ssh` that takes the arguments that the real one does. `before` is done first.
fn fake_ssh(place: &Path, before: &str) {
    let bin = place.join("bin");
    fs::create_dir_all(&bin).unwrap();
    let rekindle = Path::new(env!("CARGO_BIN_EXE_rekindle")).parent().unwrap().display();
    let script = format!(
        "#!/bin/sh\necho \"$@\" >>'{}'\nwhile [ \"$1\" != -- ]; do shift; done\n[ \"$2\" = host ] || exit 255\n{before}\n\
         PATH={rekindle}:$PATH exec sh -c \"$3\"\n",
        place.join("calls").display()
    );
    let path = bin.join("ssh");
    // By another process: one that another test starts meanwhile would inherit the file while it is open for writing.
    let writes = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", writes]).arg(&path).arg(script).status().unwrap().success());
}

fn images(place: &Path) -> Command {
    let mut command = rekindle();
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", place.join("bin").display()));
    command
}

#[test]
fn a_store_on_another_host_is_like_any() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    fake_ssh(place.path(), "");
    write_image(&at("job"), &[1, 2, 3]);
    // A name that a shell would take apart.
    let url = format!("ssh://me@host:2222{}/the store's", place.path().display());
    said(images(place.path()).args(["init", &url]));
    said(images(place.path()).arg("copy").arg(at("job")).arg(&url));
    assert!(at("the store's/rekindle-store").exists());
    let sent = json(images(place.path()).arg("copy").arg(at("job")).arg(format!("{url}/twin")));
    assert_eq!(sent["sent_bytes"], 0);
    assert_eq!(json(images(place.path()).args(["ls", &url])).as_array().unwrap().len(), 2);
    said(images(place.path()).args(["copy", &format!("{url}/job")]).arg(at("copy")));
    are_equal(&at("job"), &at("copy"));
    said(images(place.path()).args(["verify", &url]));
    said(images(place.path()).args(["rm", &format!("{url}/job"), &format!("{url}/twin")]));
    assert_eq!(json(images(place.path()).args(["gc", &url]))["objects"], 0);
    let calls = fs::read_to_string(at("calls")).unwrap();
    assert!(calls.starts_with("-p 2222 -l me -- host exec rekindle images serve -- '"), "{calls}");
}

#[test]
fn a_connection_that_breaks_is_made_again_and_one_that_never_works_is_told() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1, 2, 3]);
    let url = format!("ssh://host{}/store", place.path().display());
    fake_ssh(place.path(), "");
    said(images(place.path()).args(["init", &url]));
    // The first connection ends after a few hundred kilobytes, in the middle of a piece.
    let cut = format!(
        "if mkdir '{0}/first' 2>/dev/null; then dd bs=64k iflag=count_bytes count=500000 2>/dev/null | PATH={1}:$PATH sh -c \"$3\"; exit 255; fi",
        place.path().display(),
        Path::new(env!("CARGO_BIN_EXE_rekindle")).parent().unwrap().display()
    );
    fake_ssh(place.path(), &cut);
    said(images(place.path()).arg("copy").arg(at("job")).arg(&url));
    assert!(at("first").exists());
    said(images(place.path()).args(["copy", &format!("{url}/job")]).arg(at("copy")));
    are_equal(&at("job"), &at("copy"));
    // No half object has its name.
    said(images(place.path()).args(["verify", &url]));

    for (before, message) in [
        ("exit 127", "the other host has no rekindle on its PATH"),
        ("exit 255", "ssh ended with exit status: 255"),
        ("echo 'Welcome to this machine, and have a nice day'", "does a shell print that at its start?"),
        ("printf 'rekindle-store\\r\\n\\007\\000\\000\\000'; exec cat >/dev/null", "speaks version 7 and this one 1"),
    ] {
        fake_ssh(place.path(), before);
        let (code, _, err) = ran(images(place.path()).args(["ls", &url]));
        assert_eq!(code, 1, "{before}: {err}");
        assert!(err.contains(message), "{before}: {err}");
    }
    fs::remove_file(at("bin/ssh")).unwrap();
    let (code, _, err) = ran(rekindle().args(["ls", &url]).env("PATH", at("bin")));
    assert_eq!(code, 1);
    assert!(err.contains("ssh does not start"), "{err}");
}
