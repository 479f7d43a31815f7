//! Where the workers of a container belong: beside the container's cgroup of version 2, in that cgroup's parent.

use thiserror::Error;

use super::super::grants::{CRUN_INNER, SCOPE, bears};

/// What the names of the daemon's cgroups begin with. The rest names the container.
const PREFIX: &str = "rekindle-";
/// The longest container's name; the kernel's limit for a cgroup's is 255 bytes.
const LONGEST_NAME: usize = 200;

/// Why workers of a container have no cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum NoPlace {
    #[error("its engine gives it no cgroup of version 2 that bears its name")]
    Nameless,
    #[error("its cgroup lies outside of rekindled's cgroup namespace")]
    Outside,
    #[error("its name is too long for a cgroup, or has characters that a cgroup's should not have")]
    OddName,
}

/// The path of the cgroup for the workers of a container: `paths` are those of its own cgroups and of cgroups below, `id` is its
/// name. The first path that bears the name counts.
pub(super) fn beside<'a>(paths: impl Iterator<Item = &'a str>, id: &str) -> Result<String, NoPlace> {
    if !is_plain(id) {
        return Err(NoPlace::OddName);
    }
    let mut why = NoPlace::Nameless;
    for path in paths {
        if path.split('/').any(|part| part == "..") {
            why = NoPlace::Outside;
        } else if let Some(parent) = parent(path, id) {
            return Ok(format!("{parent}/{PREFIX}{id}"));
        }
    }
    Err(why)
}

/// Whether a name can be part of a cgroup's. Users of rootless engines choose names, and none may pass for a slice or a service:
/// the workers would be charged to what lies above it.
fn is_plain(id: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let ending = id.rsplit('.').next();
    !id.is_empty()
        && id.len() <= LONGEST_NAME
        && id.chars().all(plain)
        && !matches!(ending, Some("slice" | "service"))
        && id.chars().any(|c| c != '.')
}

/// The parent of the container's own cgroup; none if no part of the path bears the container's name. The root is "".
fn parent<'a>(path: &'a str, id: &str) -> Option<&'a str> {
    let mut rest = path.trim_end_matches('/');
    while let Some((above, part)) = rest.rsplit_once('/') {
        if bears(part, id) {
            let inside_scope = part == CRUN_INNER && above.ends_with(SCOPE);
            return if inside_scope { above.rsplit_once('/').map(|it| it.0) } else { Some(above) };
        }
        rest = above;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beside_one(path: &str, id: &str) -> Result<String, NoPlace> {
        beside([path].into_iter(), id)
    }

    #[test]
    fn workers_are_beside_the_container_in_its_pod_or_slice() {
        let id = "0123abcd";
        for (path, expected) in [
            ("/libpod_parent/libpod-0123abcd", "/libpod_parent/rekindle-0123abcd"),
            ("/libpod_parent/pod1/libpod-0123abcd", "/libpod_parent/pod1/rekindle-0123abcd"),
            ("/machine.slice/libpod-0123abcd.scope", "/machine.slice/rekindle-0123abcd"),
            // crun's processes are below the scope, and a container's may be in cgroups that it has made.
            ("/machine.slice/libpod-0123abcd.scope/container", "/machine.slice/rekindle-0123abcd"),
            ("/machine.slice/libpod-0123abcd.scope/container/inner/more", "/machine.slice/rekindle-0123abcd"),
            (
                "/kubepods.slice/kubepods-pod7.slice/crio-0123abcd.scope",
                "/kubepods.slice/kubepods-pod7.slice/rekindle-0123abcd",
            ),
            ("/docker/0123abcd", "/docker/rekindle-0123abcd"),
            ("/libpod-0123abcd", "/rekindle-0123abcd"),
        ] {
            assert_eq!(beside_one(path, id).unwrap(), expected);
        }
    }

    #[test]
    fn a_restored_container_may_be_named_after_its_cgroup() {
        assert_eq!(
            beside_one("/a.slice/libpod-1.scope/container", "container").unwrap(),
            "/a.slice/rekindle-container"
        );
        assert_eq!(beside_one("/a/libpod-1", "libpod-1").unwrap(), "/a/rekindle-libpod-1");
        assert_eq!(
            beside_one("/a.slice/libpod-1.scope", "libpod-1.scope").unwrap(),
            "/a.slice/rekindle-libpod-1.scope"
        );
        // The process is in the cgroup of another name; the engine's own counts.
        assert_eq!(beside(["/p/libpod-old", "/p/libpod-new"].into_iter(), "new").unwrap(), "/p/rekindle-new");
    }

    #[test]
    fn a_cgroup_that_is_not_the_containers_alone_is_no_place() {
        for path in ["/", "/system.slice/containerd.service", "/libpod_parent/libpod-12", "/libpod_parent/x1"] {
            assert_eq!(beside_one(path, "1").unwrap_err(), NoPlace::Nameless, "{path}");
        }
        assert_eq!(beside_one("/../../libpod-1", "1").unwrap_err(), NoPlace::Outside);
    }

    #[test]
    fn no_name_leads_above_the_slice_of_a_user() {
        let path = "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-1.scope";
        assert_eq!(
            beside_one(path, "1").unwrap(),
            "/user.slice/user-1000.slice/user@1000.service/user.slice/rekindle-1"
        );
        for id in
            ["1000.slice", "user@1000.service", "slice", "1000.service", "", "..", "a/b", "a\nb", &"x".repeat(201)]
        {
            beside_one(path, id).unwrap_err();
        }
    }
}
