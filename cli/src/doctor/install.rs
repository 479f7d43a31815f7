//! The parts that programs and containers need besides the daemon.

use std::path::Path;

use super::Finding;

const HOOKS: [&str; 2] =
    ["/etc/containers/oci/hooks.d/rekindle.json", "/usr/share/containers/oci/hooks.d/rekindle.json"];

pub(super) fn look() -> Vec<Finding> {
    vec![interposer(), hook(&HOOKS)]
}

fn interposer() -> Finding {
    let folder = match crate::run::beside_program() {
        Ok(folder) => folder,
        Err(error) => return Finding::note("interposer", error.to_string(), "say `rekindle run --lib PATH`"),
    };
    let library = folder.join(crate::run::LIBRARY);
    let shown = library.canonicalize().unwrap_or(library).display().to_string();
    if Path::new(&shown).is_file() {
        Finding::ok("interposer", shown)
    } else {
        let advice = "install Rekindle whole, or say with `rekindle run --lib PATH` where it is";
        Finding::bad("interposer", format!("there is no {shown}"), advice)
    }
}

fn hook(files: &[&str]) -> Finding {
    match files.iter().find(|it| Path::new(it).is_file()) {
        Some(file) => Finding::ok("hook", *file),
        None => Finding::note("hook", "no OCI hook is installed", "for containers: rekindle-oci-hook install"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_that_is_missing_is_installed_by_the_verb_that_installs_all() {
        let finding = hook(&["/nonexistent/rekindle.json"]);
        assert_eq!(finding.advice.as_deref(), Some("for containers: rekindle-oci-hook install"));
    }
}
