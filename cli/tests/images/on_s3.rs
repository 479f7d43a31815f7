//! A store on a server that speaks S3.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::*;
use crate::s3_server::{Fault, Request, Server};

const URL: &str = "s3://bucket/some/prefix";
const JOB: &str = "s3://bucket/some/prefix/job";

fn is_content(request: &Request) -> bool {
    request.method == "PUT" && (request.key.contains("/pieces/") || request.key.contains("/packs/"))
}

/// The bytes that requests have sent.
fn sent(requests: &[Request]) -> usize {
    requests.iter().filter(|it| it.method == "PUT").map(|it| it.body.len()).sum()
}

#[test]
fn a_store_on_s3_is_like_any_and_gets_only_what_is_new() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1, 2, 3, 4, 5]);
    write_image(&at("next"), &[5, 2, 6, 4, 1]);
    let server = Server::start();
    let (code, _, err) = ran(server.images().args(["ls", URL]));
    assert_eq!(code, 3);
    assert!(err.contains("there is no store at s3://bucket/some/prefix"), "{err}");
    said(server.images().args(["init", URL]));
    assert_eq!(ran(server.images().args(["init", URL])).0, 3);
    server.requests();

    said(server.images().arg("copy").arg(at("job")).arg(URL));
    let first = sent(&server.requests());
    assert!(first > 5 * (300 << 10), "{first}");
    let report = json(server.images().arg("copy").arg(at("next")).arg(URL));
    let second = sent(&server.requests());
    // One piece of five, a pack with what is short, a manifest and a lease.
    assert!((300 << 10..330 << 10).contains(&second), "{second}");
    // Four pieces of the GPU and CRIU's file were there.
    assert_eq!(report["sent_pieces"].as_u64().unwrap() + 5, report["pieces"].as_u64().unwrap());

    assert!(server.keys().iter().all(|it| it.starts_with("some/prefix/")), "{:?}", server.keys());
    // Leases are gone when uploads have ended.
    assert!(!server.keys().iter().any(|it| it.contains("/leases/")));
    let names: Vec<_> =
        json(server.images().args(["ls", URL])).as_array().unwrap().iter().map(|it| it["name"].clone()).collect();
    assert_eq!(names, ["job", "next"]);
    for name in ["job", "next"] {
        let copy = at(&format!("copy of {name}"));
        said(server.images().args(["copy", &format!("{URL}/{name}")]).arg(&copy));
        are_equal(&at(name), &copy);
    }
    said(server.images().args(["verify", URL]));
    said(server.images().args(["rm", JOB]));
    let collected = json(server.images().args(["gc", URL]));
    assert_eq!((&collected["images"], &collected["kept_objects"]), (&1.into(), &0.into()));
    said(server.images().args(["copy", &format!("{URL}/next")]).arg(at("again")));
    are_equal(&at("next"), &at("again"));
}

#[test]
fn a_server_that_fails_now_and_then_is_asked_again() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1, 2, 3]);
    for fault in [Fault::Status(500), Fault::Status(503), Fault::Close, Fault::CloseAfterwards, Fault::HalfBody] {
        let server = Server::start();
        // Every third request fails; half of nothing is no fault.
        let count = AtomicUsize::new(0);
        server.faults(move |request| match count.fetch_add(1, Ordering::SeqCst) % 3 {
            1 if fault != Fault::HalfBody || (request.method == "GET" && !request.key.ends_with('/')) => fault,
            _ => Fault::None,
        });
        said(server.images().args(["init", URL]));
        said(server.images().arg("copy").arg(at("job")).arg(URL));
        let copy = at(&format!("copy {fault:?}"));
        said(server.images().args(["copy", JOB]).arg(&copy));
        are_equal(&at("job"), &copy);
    }
}

#[test]
fn an_upload_that_was_cut_off_goes_on_where_it_was() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1, 2, 3, 4, 5, 6]);
    let server = Server::start();
    said(server.images().args(["init", URL]));
    // After three pieces the server takes no more: what is no fault of a moment is not tried again for long.
    let pieces = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&pieces);
    server.faults(move |request| match is_content(request) && counted.fetch_add(1, Ordering::SeqCst) >= 3 {
        true => Fault::Status(403),
        false => Fault::None,
    });
    let (code, _, err) = ran(server.images().arg("copy").arg(at("job")).arg(URL));
    assert_eq!(code, 1);
    assert!(err.contains("look at the AWS_ variables"), "{err}");
    assert_eq!(json(server.images().args(["ls", URL])).as_array().unwrap().len(), 0);
    assert!(!server.keys().iter().any(|it| it.contains("/leases/")));
    server.no_faults();
    server.requests();
    said(server.images().arg("copy").arg(at("job")).arg(URL));
    let sent: Vec<_> = server.requests().into_iter().filter(is_content).collect();
    // Three pieces of six, and the pack.
    assert_eq!(sent.len(), 4);
    said(server.images().args(["copy", JOB]).arg(at("copy")));
    are_equal(&at("job"), &at("copy"));
}

#[test]
fn a_killed_uploads_lease_keeps_its_pieces_until_it_expires() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1, 2, 3]);
    let server = Server::start();
    said(server.images().args(["init", URL]));
    // The upload is killed when it sends its manifest.
    let mut upload = server.images().arg("copy").arg(at("job")).arg(URL).spawn().unwrap();
    let pid = upload.id() as i32;
    server.faults(move |request| {
        if request.method == "PUT" && request.key.contains("/images/") {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            return Fault::Close;
        }
        Fault::None
    });
    assert_eq!(upload.wait().unwrap().code(), None);
    server.no_faults();
    assert_eq!(server.keys().iter().filter(|it| it.contains("/leases/")).count(), 3);
    let collected = json(server.images().args(["gc", URL]));
    assert_eq!(
        (&collected["uploads"], &collected["removed_objects"], &collected["kept_objects"]),
        (&1.into(), &0.into(), &4.into())
    );
    server.age("some/prefix/leases/", Duration::from_secs(3600));
    let collected = json(server.images().args(["gc", URL]));
    assert_eq!((&collected["uploads"], &collected["removed_objects"]), (&0.into(), &4.into()));
    assert_eq!(server.keys(), ["some/prefix/rekindle-store"]);
}

#[test]
fn a_changed_byte_in_any_object_is_found() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    write_image(&at("job"), &[1, 2]);
    let server = Server::start();
    said(server.images().args(["init", URL]));
    said(server.images().arg("copy").arg(at("job")).arg(URL));
    let keys = server.keys();
    assert_eq!(keys.len(), 5, "{keys:?}");
    for key in keys {
        let mut original = Vec::new();
        server.change(&key, |content| original.clone_from(content));
        let changes: [fn(&mut Vec<u8>); 3] = [
            |content| {
                let middle = content.len() / 2;
                content[middle] ^= 1;
            },
            |content| content.truncate(content.len() - 1),
            Vec::clear,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            server.change(&key, change);
            let (code, _, err) = ran(server.images().args(["verify", URL]));
            assert_eq!(code, 4, "{key}, {number}: {err}");
            let copied = ran(server.images().args(["copy", JOB]).arg(at("copy"))).0;
            // The last byte of a pack is in its list, which no image needs.
            if number == 1 && key.contains("/packs/") {
                assert_eq!(copied, 0);
                are_equal(&at("job"), &at("copy"));
                std::fs::remove_dir_all(at("copy")).unwrap();
            } else {
                assert_eq!(copied, 4, "{key}, {number}");
                assert!(!at("copy").exists());
            }
            server.change(&key, |content| content.clone_from(&original));
        }
    }
    said(server.images().args(["verify", URL]));
}
