//! The verbs, on stores in directories.

use std::fs;
use std::process::Command;

use crate::common::*;

#[test]
fn an_image_goes_into_a_store_and_out_and_between() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1, 2]);
    let images = || {
        let mut command = rekindle();
        command.current_dir(place.path());
        command
    };
    assert_eq!(said(images().args(["init", "store"])), "store: a store without a key, 0 images\n");
    let (code, _, err) = ran(images().args(["init", "store"]));
    assert_eq!((code, err.as_str()), (3, "rekindle: there is a store at store already\n"));

    let out = said(images().args(["copy", "job", "store"]));
    assert!(out.starts_with("store: job, 60") && out.contains("pieces"), "{out}");
    let sent = json(images().args(["copy", "job", "store/again"]));
    assert_eq!((&sent["name"], &sent["sent_bytes"]), (&"again".into(), &0.into()));
    let (code, _, err) = ran(images().args(["copy", "job", "store"]));
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("has an image \"job\" already"), "{err}");

    let list = said(images().args(["ls", "store"]));
    let names: Vec<_> = list.lines().map(|it| it.split_whitespace().next().unwrap()).collect();
    assert_eq!(names, ["NAME", "again", "job"]);
    let heads = json(images().arg("ls").env("REKINDLE_STORE", at("store")));
    assert_eq!((&heads[1]["name"], &heads[1]["host"]), (&"job".into(), &"node7".into()));
    let shown = said(images().args(["show", "store/job"]));
    assert!(shown.contains("inventory.img") && shown.contains("0640"), "{shown}");
    assert_eq!(json(images().args(["show", "store"]))["images"], 2);

    let out = said(images().args(["copy", "store/job", "copy"]));
    assert!(out.starts_with("copy: "), "{out}");
    are_equal(&at("job"), &at("copy"));
    let verified = Command::new(env!("CARGO_BIN_EXE_rekindle")).arg("verify").arg(at("copy")).status().unwrap();
    assert!(verified.success());
    let (code, _, err) = ran(images().args(["copy", "store/job", "copy"]));
    assert_eq!(code, 3);
    assert!(err.contains("copy is not empty"), "{err}");

    said(images().args(["init", "other"]));
    said(images().args(["copy", "store/job", "other/renamed"]));
    said(images().args(["copy", "other/renamed", "third"]));
    are_equal(&at("job"), &at("third"));

    assert!(said(images().args(["verify", "store"])).starts_with("good: 2 images and "));
    assert!(said(images().args(["verify", "store/job"])).starts_with("good: 1 images and "));
    said(images().args(["rm", "store/job", "store/again"]));
    let would = json(images().args(["gc", "store", "--dry-run"]));
    let out = said(images().args(["gc", "store"]));
    assert!(out.starts_with(&format!("{} objects with ", would["removed_objects"])), "{out}");
    assert_eq!(json(images().args(["gc", "store"]))["objects"], 0);
    assert!(fs::read_dir(at("store/pieces")).unwrap().all(|it| fs::read_dir(it.unwrap().path()).unwrap().count() == 0));
}

#[test]
fn what_is_wrong_is_said_and_has_its_exit_code() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1]);
    let fails = |arguments: &[&str], expected: i32, message: &str| {
        let (code, _, err) = ran(rekindle().current_dir(place.path()).args(arguments));
        assert_eq!(code, expected, "{arguments:?}: {err}");
        assert!(err.contains(message), "{arguments:?}: {err}");
    };
    said(rekindle().current_dir(place.path()).args(["init", "store"]));
    fails(&["ls"], 2, "name a store, or set REKINDLE_STORE");
    fails(&["ls", "job"], 3, "there is no store at job; `rekindle images init job` makes one");
    fails(&["ls", "ftp://x/y"], 2, "a store is a directory, s3://BUCKET/PREFIX or ssh://HOST/DIR");
    fails(&["copy", "job", "elsewhere"], 2, "neither job nor elsewhere is a store");
    fails(&["copy", "store", "elsewhere"], 2, "store is a store: say which image, store/NAME");
    fails(&["copy", "store/none", "elsewhere"], 3, "has no image \"none\"");
    fails(&["copy", "job", "store/-x"], 2, "is no name of an image");
    fails(&["rm", "store"], 2, "say which image");
    fails(&["rm", "store/none"], 3, "has no image \"none\"");
    fails(&["copy", "nowhere", "store"], 1, "nowhere");
    fs::create_dir(at("empty")).unwrap();
    fails(&["copy", "empty", "store"], 4, "no checkpoint of GPU state");
    fails(&["ls", "s3://bucket/x", "--key", "none", "--json", "--bad"], 2, "--bad");

    said(rekindle().current_dir(place.path()).args(["copy", "job", "store"]));
    let piece = fs::read_dir(at("store/pieces")).unwrap().next().unwrap().unwrap().path();
    let piece = fs::read_dir(piece).unwrap().next().unwrap().unwrap().path();
    let mut content = fs::read(&piece).unwrap();
    content[1000] ^= 4;
    fs::write(&piece, content).unwrap();
    fails(&["verify", "store"], 4, "store is bad in 1 places");
    let (_, out, _) = ran(rekindle().current_dir(place.path()).args(["verify", "store/job"]));
    assert!(out.contains("it was changed, or made with another key (needed by job)"), "{out}");
    fails(&["copy", "store/job", "copy"], 4, "it was changed, or made with another key");
    assert!(!at("copy").exists());
}

#[test]
fn a_key_comes_from_an_option_a_variable_or_a_credential() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1]);
    let write_key = |name: &str, byte: u8| {
        fs::write(at(name), [byte; 32]).unwrap();
        fs::set_permissions(at(name), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    };
    write_key("key", 1);
    write_key("other", 2);
    let images = || {
        let mut command = rekindle();
        command.current_dir(place.path());
        command
    };
    let (code, _, err) = ran(images().args(["init", "store", "--encrypt"]));
    assert_eq!(code, 3);
    assert!(err.contains("an encrypted store needs a key"), "{err}");
    assert!(said(images().args(["init", "store", "--encrypt", "--key", "key"])).contains("a store encrypted"));
    said(images().args(["copy", "job", "store"]).env("REKINDLE_STORE_KEY", at("key")));
    fs::create_dir(at("credentials")).unwrap();
    write_key("credentials/rekindle-store-key", 1);
    said(images().args(["verify", "store"]).env("CREDENTIALS_DIRECTORY", at("credentials")));
    for (key, message) in [(None, "has a key: --key FILE names it"), (Some("other"), "has another key")] {
        let (code, _, err) =
            ran(images().args(["ls", "store"]).args(key.map(|it| ["--key", it]).into_iter().flatten()));
        assert_eq!(code, 3);
        assert!(err.contains(message), "{err}");
    }
    // To a store of another key, and to one of none.
    said(images().args(["init", "theirs", "--key", "other"]));
    said(images().args(["copy", "store/job", "theirs", "--key", "other", "--from-key", "key"]));
    said(images().args(["init", "open"]));
    said(images().args(["copy", "theirs/job", "open", "--key", "none", "--from-key", "other"]));
    said(images().args(["copy", "open/job", "copy"]));
    are_equal(&at("job"), &at("copy"));
}
