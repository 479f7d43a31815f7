//! A full disk fails the image and leaves nothing, wherever it is noticed.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;

use rekindle_images::*;

/// Runs `test` in a tmpfs of `size` bytes that only its thread can see; needs root.
fn with_tmpfs(size: usize, test: impl FnOnce(&Path) + Send) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if mount(path, size) {
                test(path);
            } else {
                eprintln!("skipped: mounting a tmpfs is not permitted");
            }
        });
    });
}

fn mount(path: &Path, size: usize) -> bool {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::ptr::null;
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    let options = CString::new(format!("size={size}")).unwrap();
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: all strings end in NUL and outlive the calls; the namespace is this thread's own.
    unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(null(), c"/".as_ptr(), null(), private, null()) == 0
            && libc::mount(c"tmpfs".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast()) == 0
    }
}

/// Fills the file system up, but for `left` bytes.
fn fill_up(dir: &Path, left: u64) {
    let free = ImageDir::open(dir).unwrap().free_space().unwrap();
    fs::write(dir.join("others"), vec![1; (free - left) as usize]).unwrap();
}

#[test]
fn a_disk_full_at_any_point_fails_and_leaves_nothing() {
    let mut outcomes = Vec::new();
    // The sample takes six pages of content and code, and two of manifest and commit record.
    for pages in 0..16 {
        with_tmpfs(1 << 20, |dir| {
            fill_up(dir, pages * 4096);
            let result = common::create(dir).and_then(|writer| {
                let manifest = common::fill(&writer)?;
                writer.commit(manifest)
            });
            outcomes.push(result.is_ok());
            match result {
                Ok(_) => assert!(!common::is_refused(dir)),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
                    assert!(error.to_string().contains("rekindle"), "{error}");
                    assert_eq!(common::names(dir), ["others"]);
                }
            }
        });
    }
    // From some size on it fits.
    assert!(outcomes.is_sorted());
    assert!(outcomes.is_empty() || (!outcomes[7] && outcomes[15]));
}

#[test]
fn free_space_is_known_before_it_runs_out() {
    with_tmpfs(1 << 20, |dir| {
        fill_up(dir, 40_960);
        let space = ImageDir::open(dir).unwrap().free_space().unwrap();
        assert_eq!(space, 40_960);
    });
}
