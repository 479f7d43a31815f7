//! A limit on the size of files (`ulimit -f`) is a full disk. Alone in its program, since the
//! limit is the whole process's.

#![allow(clippy::unwrap_used)]

mod common;

use rekindle_images::*;

#[test]
fn a_file_size_limit_fails_the_image_and_leaves_nothing() {
    let limit = libc::rlimit { rlim_cur: 6000, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: plain numbers; without its signal the limit is an error of the write.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let data = DataWriter::new(writer.data_file(0).unwrap(), 0, writer.key()).unwrap();
    // The kernel takes a part of it first: a short write.
    let error = data.append(0, &[1; 8192]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert_eq!(data.finish().unwrap_err().kind(), ErrorKind::NoSpace);
    let error = writer.put_code(&[1; 8192]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    drop(writer);
    assert!(common::names(dir.path()).is_empty());
}
