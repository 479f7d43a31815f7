//! The kinds of workers.

use std::fmt;

use rekindle_wire::attach::SETTINGS;
use rekindle_wire::gpus;

use super::super::grants::Uuid;
use super::super::spawn::{Settings, VISIBLE_DEVICES};

/// What must be set before a worker's contexts are made: the variables that the driver reads, and the GPUs that the worker
/// sees. A worker serves clients of its kind only. The usual kind sets nothing and sees all GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kind(Settings);

impl Kind {
    /// The kind for a client with these settings that sees these GPUs, or all.
    pub(crate) fn new(settings: &Settings, gpus: Option<&[Uuid]>) -> Self {
        let of_driver = |(name, _): &&(String, String)| SETTINGS.contains(&name.as_str());
        let mut settings: Settings = settings.iter().filter(of_driver).cloned().collect();
        let names = gpus.map(|uuids| uuids.iter().map(gpus::name).collect::<Vec<_>>().join(","));
        settings.extend(names.map(|names| (VISIBLE_DEVICES.to_owned(), names)));
        settings.sort_unstable();
        Self(settings)
    }

    /// The environment variables of such a worker.
    pub(crate) fn settings(&self) -> &Settings {
        &self.0
    }

    pub(crate) fn is_usual(&self) -> bool {
        self.0.is_empty()
    }

    /// What makes the kind unusual, for metrics: programs choose the variables' values, and there may be many.
    pub(crate) fn class(&self) -> &'static str {
        match self.0.as_slice() {
            [] => "usual",
            [(name, _)] if name == VISIBLE_DEVICES => "gpus",
            _ => "settings",
        }
    }
}

/// `usual`, or the variables as in a shell.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_usual() {
            return f.write_str("usual");
        }
        let settings: Vec<_> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        f.write_str(&settings.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_settings_does_not_matter_and_that_of_gpus_does() {
        let setting = |name: &str| (name.to_owned(), "1".to_owned());
        let [first, second] = [SETTINGS[0], SETTINGS[1]].map(setting);
        let kind = |settings: &[(String, String)]| Kind::new(&settings.to_vec(), None);
        assert_eq!(kind(&[first.clone(), second.clone()]), kind(&[second, first.clone(), setting("PATH")]));
        assert!(kind(&[setting("PATH")]).is_usual() && !kind(std::slice::from_ref(&first)).is_usual());
        assert_eq!((kind(&[]).class(), kind(std::slice::from_ref(&first)).class()), ("usual", "settings"));
        assert_eq!(Kind::new(&Vec::new(), Some(&[[1; 16]])).class(), "gpus");
        assert_eq!(kind(&[first]).to_string(), format!("{}=1", SETTINGS[0]));
        let of = |gpus: [Uuid; 2]| Kind::new(&Vec::new(), Some(&gpus));
        assert_ne!(of([[1; 16], [2; 16]]), of([[2; 16], [1; 16]]));
        assert!(!of([[1; 16]; 2]).is_usual());
    }
}
