//! What programs and containers need besides the daemon.

use std::path::Path;

use super::Finding;

const HOOKS: [&str; 2] =
    ["/etc/containers/oci/hooks.d/rekindle.json", "/usr/share/containers/oci/hooks.d/rekindle.json"];

pub(super) fn look() -> Vec<Finding> {
    vec![interposer(), hook()]
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

fn hook() -> Finding {
    match HOOKS.iter().find(|it| Path::new(it).is_file()) {
        Some(file) => Finding::ok("hook", *file),
        None => Finding::note(
            "hook",
            "no OCI hook is installed",
            "for containers: rekindle-oci-hook hooks-json >/etc/containers/oci/hooks.d/rekindle.json",
        ),
    }
}
