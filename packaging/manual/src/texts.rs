//! The texts that are written by hand.

use anyhow::{Result, anyhow};

/// The annotated configuration file.
pub(crate) const CONFIGURATION: &str = include_str!("../../rekindled.toml");

macro_rules! texts {
    ($($name:literal)*) => {
        const TEXTS: &[(&str, &str)] = &[$(($name, include_str!(concat!("../text/", $name)))),*];
    };
}

texts! {
    "rekindle.1" "rekindle-builds.1" "rekindle-check.1" "rekindle-checkpoint.1" "rekindle-config.1" "rekindle-cut.1" "rekindle-doctor.1" "rekindle-flatten.1"
    "rekindle-images.1" "rekindle-inspect.1" "rekindle-migrate.1" "rekindle-pool.1" "rekindle-protect.1" "rekindle-protocol.1" "rekindle-ps.1" "rekindle-restore.1" "rekindle-resume.1"
    "rekindle-run.1" "rekindle-suspend.1" "rekindle-tls.1" "rekindle-verify.1" "rekindle-warm.1"
    "rekindled.toml.5" "rekindle-oci-hook.8" "rekindled.8"
}

/// The text of a page, in the macros of man(7).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text {
    /// What belongs to DESCRIPTION.
    pub(crate) description: &'static str,
    /// The sections after the options.
    pub(crate) sections: &'static str,
}

/// The text of a page, by the page's name with its section.
pub(crate) fn of(page: &str) -> Result<Text> {
    let found = TEXTS.iter().find(|(name, _)| *name == page);
    let (_, text) = found.ok_or_else(|| anyhow!("write packaging/manual/text/{page}, and name it in src/texts.rs"))?;
    let (description, sections) = text.split_at(text.find(".SH ").unwrap_or(text.len()));
    Ok(Text { description, sections })
}
