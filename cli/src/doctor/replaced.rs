//! Processes that go on with libraries of a driver that has been replaced on disk: workers, and programs that use the driver
//! themselves.

use std::fs;

use super::Finding;

/// How the names of the driver's libraries begin. Rekindle's interposer is named like one of them.
const LIBRARIES: [&str; 2] = ["libcuda.so", "libnvidia-"];
/// What the kernel appends to the path of a mapped file that has no name any more.
const DELETED: &str = " (deleted)";

/// Notes the processes, if there are any. Without root, others' processes are not seen.
pub(super) fn look() -> Option<Finding> {
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok());
    let mut found: Vec<(u32, String)> = pids.filter_map(|pid| Some((pid, replaced(&maps(pid)?)?))).collect();
    found.sort_unstable();
    judge(&found)
}

fn maps(pid: u32) -> Option<String> {
    fs::read(format!("/proc/{pid}/maps")).ok().map(|it| String::from_utf8_lossy(&it).into_owned())
}

/// A library of a driver that is mapped and has been replaced.
fn replaced(maps: &str) -> Option<String> {
    maps.lines().find_map(|line| {
        let path = line.get(line.find('/')?..)?.strip_suffix(DELETED)?;
        let name = path.rsplit('/').next()?;
        LIBRARIES.iter().any(|it| name.starts_with(it)).then(|| path.to_owned())
    })
}

fn judge(found: &[(u32, String)]) -> Option<Finding> {
    let (_, library) = found.first()?;
    let pids: Vec<_> = found.iter().map(|(pid, _)| pid.to_string()).collect();
    let advice = "they go on with the old one. Start programs anew; or checkpoint them and restore them, with \
                  --allow-other-driver if the driver is another. CRIU cannot dump a program that has mapped a replaced \
                  library itself";
    let text = format!("processes {} have mapped {library}, which has been replaced since", pids.join(", "));
    Some(Finding::note("old driver", text, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_libraries_of_a_driver_that_are_gone_count() {
        let maps = |path: &str| {
            format!("7f00-7f01 r--p 00000000 08:01 7    /usr/bin/python3\n7f10-7f20 r-xp 0 08:01 9    {path}\n")
        };
        let gone = maps("/usr/lib/x86_64-linux-gnu/libcuda.so.580.65 (deleted)");
        assert_eq!(replaced(&gone).as_deref(), Some("/usr/lib/x86_64-linux-gnu/libcuda.so.580.65"));
        assert!(replaced(&maps("/usr/lib/libnvidia-ptxjitcompiler.so.1 (deleted)")).is_some());
        for other in ["/usr/lib/libcuda.so.580.65", "/memfd:rekindle-ring (deleted)", "/usr/lib/libc.so.6 (deleted)"] {
            assert_eq!(replaced(&maps(other)), None, "{other}");
        }
        assert_eq!(judge(&[]), None);
        let finding = judge(&[(3, "/a".to_owned()), (12, "/b".to_owned())]).unwrap();
        assert_eq!(finding.found, "processes 3, 12 have mapped /a, which has been replaced since");
    }
}
