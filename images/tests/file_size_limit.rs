//! A limit on the size of files (`ulimit -f`) is a full disk. Alone in its program, since the
//! limit is the whole process's.

#![allow(clippy::unwrap_used)]

mod common;

use rekindle_images::*;

#[test]
fn a_file_size_limit_fails_the_image_and_leaves_nothing() {
    // SAFETY: plain numbers; without its signal the limit is an error of the write.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let set_limit = |rlim_cur| {
        let limit = libc::rlimit { rlim_cur, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
    };
    set_limit(6000);
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let data = DataWriter::of([writer.data_file(0).unwrap()], writer.key()).unwrap();
    // The kernel takes a part of it first: a short write.
    let error = data.append(0, &[1; 8192]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert_eq!(data.finish().unwrap_err().kind(), ErrorKind::NoSpace);
    let error = writer.put_code(&[1; 8192]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    drop(writer);
    // The test's own output may go to a file that is longer than the limit.
    set_limit(libc::RLIM_INFINITY);
    assert!(common::names(dir.path()).is_empty());
}
