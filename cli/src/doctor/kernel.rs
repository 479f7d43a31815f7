//! Linux, and the rights of this user.

use std::fs;
use std::path::Path;

use super::Finding;

/// The first version whose `close_range` can set close-on-exec, which the start of workers needs.
const OLDEST: (u32, u32) = (5, 11);
/// The first version in which CRIU asks for the pages of a mapping at once, and not page by page.
const PAGEMAP_SCAN: (u32, u32) = (6, 7);

const CAP_SYS_ADMIN: u32 = 21;
const CAP_CHECKPOINT_RESTORE: u32 = 40;

pub(super) fn look() -> Vec<Finding> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let checkpoints = Path::new("/proc/sys/kernel/ns_last_pid").exists();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    vec![kernel(release.trim(), checkpoints), permissions(&status)]
}

/// The release's first two numbers.
pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|it| it.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// The kernel's version.
pub(super) fn own_version() -> Option<(u32, u32)> {
    version(&fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
}

fn kernel(release: &str, checkpoints: bool) -> Finding {
    let found = format!("Linux {release} on {}", std::env::consts::ARCH);
    if std::env::consts::ARCH != "x86_64" {
        return Finding::bad("kernel", found, "Rekindle runs on x86_64");
    }
    if !checkpoints {
        let advice = "use a kernel with CONFIG_CHECKPOINT_RESTORE: those of distributions have it";
        return Finding::bad("kernel", format!("{found}, which has no checkpoint support"), advice);
    }
    match version(release) {
        Some(it) if it < OLDEST => Finding::bad("kernel", found, "use Linux 5.11 or later"),
        Some(it) if it < PAGEMAP_SCAN => {
            Finding::note("kernel", found, "from Linux 6.7 on CRIU dumps large address spaces faster")
        }
        _ => Finding::ok("kernel", found),
    }
}

fn permissions(status: &str) -> Finding {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let user = field("Uid:").and_then(|it| it.split_ascii_whitespace().nth(1)).unwrap_or("?");
    let capabilities = field("CapEff:").and_then(|it| u64::from_str_radix(it, 16).ok()).unwrap_or(0);
    let has = |capability: u32| capabilities & (1 << capability) != 0;
    if user == "0" && has(CAP_SYS_ADMIN) {
        return Finding::ok("permissions", "root, who may dump and restore");
    }
    let found = match user {
        "0" => "root without CAP_SYS_ADMIN".to_owned(),
        _ if has(CAP_CHECKPOINT_RESTORE) => format!("user {user} with CAP_CHECKPOINT_RESTORE"),
        _ => format!("user {user}"),
    };
    Finding::note("permissions", found, "run programs as you are; run criu and podman's checkpoints as root")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn kernels_are_judged_by_their_version_and_configuration() {
        assert_eq!(kernel("6.18.44-fc", true).verdict, Verdict::Ok);
        assert_eq!(kernel("6.1.0-40-amd64", true).verdict, Verdict::Note);
        assert_eq!(kernel("5.4.0-generic", true).verdict, Verdict::Bad);
        assert!(kernel("6.18.44", false).advice.unwrap().contains("CONFIG_CHECKPOINT_RESTORE"));
        assert_eq!(version("nonsense"), None);
    }

    #[test]
    fn who_may_dump_is_told_from_who_may_not() {
        let status = |uid, caps| format!("Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{caps}\n");
        assert_eq!(permissions(&status("0", "000001ffffffffff")).verdict, Verdict::Ok);
        assert!(permissions(&status("0", "00000000a80425fb")).found.contains("without CAP_SYS_ADMIN"));
        assert_eq!(permissions(&status("1000", "0")).found, "user 1000");
    }
}
