//! CRIU, and whether it finds the plugin.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Finding, kernel};
use crate::criu::{self, CONFIGURATION, OWN_PLUGINS, PLUGIN};

/// CRIU's plugin for processes that use NVIDIA's own driver library.
const CUDA_PLUGIN: &str = "cuda_plugin.so";
/// The first version that calls its plugins before it freezes anything.
const OLDEST: (u32, u32) = (4, 0);
/// The first version of Linux that needs a later CRIU, see below.
const INET: (u32, u32) = (4, 2);
const STRICT_SOCKETS: (u32, u32) = (6, 16);

pub(super) fn look() -> Vec<Finding> {
    let Some(criu) = criu::find() else {
        let advice =
            "install CRIU 4.0 or later, and then tell it `libdir /usr/lib/rekindle/criu` in /etc/criu/default.conf";
        return vec![Finding::bad("CRIU", "there is none in PATH", advice)];
    };
    let mut findings = vec![version(&criu)];
    findings.extend(self_check(&criu));
    findings.push(plugin());
    findings
}

fn said(criu: &Path, argument: &str) -> Option<(bool, String)> {
    let output = Command::new(criu).arg(argument).stdin(Stdio::null()).output().ok()?;
    let text = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned()).concat();
    Some((output.status.success(), text))
}

fn version(criu: &Path) -> Finding {
    let Some((true, text)) = said(criu, "--version") else {
        return Finding::bad("CRIU", format!("{} does not run", criu.display()), "install it anew");
    };
    judge(criu, &text, kernel::own_version())
}

fn judge(criu: &Path, text: &str, kernel: Option<(u32, u32)>) -> Finding {
    let version = text.lines().find_map(|line| line.strip_prefix("Version:")).map(str::trim).unwrap_or("of no version");
    let found = format!("{} {version}", criu.display());
    match kernel::version(version) {
        Some(it) if it < OLDEST => {
            Finding::bad("CRIU", found, "use CRIU 4.0 or later: older ones have no hook before they freeze a process")
        }
        Some(it) if it < INET && kernel.is_some_and(|it| it >= STRICT_SOCKETS) => {
            Finding::note("CRIU", found, "on this kernel it cannot dump UDP and TCP sockets; CRIU 4.2 can")
        }
        Some(_) => Finding::ok("CRIU", found),
        None => Finding::note("CRIU", found, "Rekindle is tested with CRIU 4.1 and 4.2"),
    }
}

/// The result of CRIU's own check of this machine, which works only as root.
fn self_check(criu: &Path) -> Option<Finding> {
    let root = fs::read_to_string("/proc/self/status").is_ok_and(|it| it.contains("\nUid:\t0\t0\t"));
    let (good, text) = said(criu, "check").filter(|_| root)?;
    if good {
        return None;
    }
    let reason = text.lines().find(|line| line.contains("Error")).unwrap_or("it does not say why");
    Some(Finding::bad(
        "CRIU",
        format!("`criu check` fails: {reason}"),
        "see `criu check`: the kernel lacks what it needs",
    ))
}

fn plugin() -> Finding {
    let folder = criu::plugin_folder();
    in_folder(&folder, Path::new(OWN_PLUGINS))
}

fn in_folder(folder: &Path, own: &Path) -> Finding {
    let plugin = folder.join(PLUGIN);
    let found = plugin.display().to_string();
    let advice = format!("write `libdir FOLDER` into {CONFIGURATION}, where FOLDER holds Rekindle's {PLUGIN}");
    let Ok(content) = fs::read(&plugin) else {
        return Finding::bad("plugin", format!("there is no {found}, where CRIU looks"), advice);
    };
    if !content.windows(14).any(|it| it == b"CR_PLUGIN_DESC") {
        return Finding::bad("plugin", format!("{found} is not a CRIU plugin"), advice);
    }
    let installed = crate::run::beside_program().map(|it| it.join("criu").join(PLUGIN));
    if installed.is_ok_and(|it| fs::read(it).is_ok_and(|beside| beside != content)) {
        let advice = "it is of another build than this program: install one version of Rekindle";
        return Finding::note("plugin", found, advice);
    }
    if folder.join(CUDA_PLUGIN).exists() {
        let advice = format!(
            "remove {CUDA_PLUGIN} there, or set `libdir` to a folder without it in {CONFIGURATION}: CRIU asks whichever it loads first, and \
             {CUDA_PLUGIN} takes every process, while Rekindle has the driver checkpoint what it would"
        );
        return Finding::note("plugin", format!("{found}, beside CRIU's {CUDA_PLUGIN}"), advice);
    }
    let hidden = hidden(folder, own);
    if hidden.is_empty() {
        return Finding::ok("plugin", found);
    }
    let advice = format!("`libdir` hides CRIU's own plugins {}: link those that you use into it", hidden.join(", "));
    Finding::note("plugin", found, advice)
}

/// CRIU's own plugins that CRIU no longer finds.
fn hidden(folder: &Path, own: &Path) -> Vec<String> {
    if folder == own {
        return Vec::new();
    }
    let names = fs::read_dir(own).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let names = names.filter(|name| name.to_string_lossy().ends_with(".so") && !folder.join(name).exists());
    // Rekindle does what this one does.
    let names = names.filter(|name| name != CUDA_PLUGIN);
    names.map(|it| it.to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn versions_are_judged_with_the_kernel() {
        let verdict = |text: &str, kernel| judge(Path::new("/usr/sbin/criu"), text, Some(kernel)).verdict;
        assert_eq!(verdict("Version: 4.2\nGitID: v4.2\n", (6, 18)), Verdict::Ok);
        assert_eq!(verdict("Version: 4.1.1\n", (6, 18)), Verdict::Note);
        assert_eq!(verdict("Version: 4.1.1\n", (6, 8)), Verdict::Ok);
        assert_eq!(verdict("Version: 3.17.1\n", (6, 8)), Verdict::Bad);
    }

    #[test]
    fn a_plugin_that_is_missing_none_or_hides_others_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let own = tempfile::tempdir().unwrap();
        let look = || in_folder(dir.path(), own.path()).verdict;
        assert_eq!(look(), Verdict::Bad);
        fs::write(dir.path().join(PLUGIN), "nothing").unwrap();
        assert_eq!(look(), Verdict::Bad);
        fs::write(dir.path().join(PLUGIN), "\x7fELF CR_PLUGIN_DESC").unwrap();
        assert_eq!(look(), Verdict::Ok);
        fs::write(own.path().join("amdgpu_plugin.so"), "").unwrap();
        assert_eq!(look(), Verdict::Note);
        assert!(in_folder(dir.path(), own.path()).advice.unwrap().contains("amdgpu_plugin.so"));
    }
}
