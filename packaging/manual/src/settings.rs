//! The settings of the annotated configuration file.
//!
//! A comment and what follows it without an empty line belong together: a table `[NAME]`, a setting `#NAME = DEFAULT`, or an
//! example `#   NAME = VALUE` of a setting without a default. A comment by itself is about the file.

/// What the file describes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Table { name: String, about: String },
    Setting { name: String, value: String, about: String, is_default: bool },
}

impl Entry {
    /// Its line in a configuration file.
    pub(crate) fn line(&self) -> String {
        match self {
            Self::Table { name, .. } => format!("[{name}]"),
            Self::Setting { name, value, .. } => format!("{name} = {value}"),
        }
    }
}

/// Everything that the file describes, in its order.
pub(crate) fn entries(file: &str) -> Vec<Entry> {
    file.split("\n\n").filter_map(entry).collect()
}

fn entry(block: &str) -> Option<Entry> {
    let (last, comment) =
        block.trim_end().lines().collect::<Vec<_>>().split_last().map(|(it, rest)| (*it, rest.to_vec()))?;
    let about = comment.iter().map(|line| line.trim_start_matches('#').trim()).collect::<Vec<_>>().join(" ");
    if let Some(name) = last.strip_prefix('[') {
        return Some(Entry::Table { name: name.trim_end_matches(']').to_owned(), about });
    }
    let line = last.strip_prefix('#')?;
    let (name, value) = line.trim_start().split_once(" = ")?;
    let is_default = !line.starts_with(' ');
    // A line of prose begins with one space.
    (is_default || line.starts_with("   ")).then(|| Entry::Setting {
        name: name.to_owned(),
        value: value.to_owned(),
        about,
        is_default,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_belong_to_what_follows_them() {
        let file =
            "# About a = b\n# the file.\n\n# One\n# two.\n#a = \"x = y\"\n\n# Many.\n[t]\n\n# Three.\n#   b = 1\n";
        let setting = |name: &str, value: &str, about: &str, is_default| {
            let [name, value, about] = [name, value, about].map(str::to_owned);
            Entry::Setting { name, value, about, is_default }
        };
        let table = Entry::Table { name: "t".to_owned(), about: "Many.".to_owned() };
        let expected = [setting("a", "\"x = y\"", "One two.", true), table, setting("b", "1", "Three.", false)];
        assert_eq!(entries(file), expected);
    }

    #[test]
    fn every_setting_of_the_file_is_described() {
        let file = crate::texts::CONFIGURATION;
        let settings = file.lines().filter(|line| {
            let name = line.trim_start_matches("#   ").trim_start_matches('#');
            !name.starts_with(' ') && name.contains(" = ")
        });
        let found = entries(file);
        let described = found.iter().filter(|it| matches!(it, Entry::Setting { .. }));
        assert!(found.iter().all(|(Entry::Table { about, .. } | Entry::Setting { about, .. })| !about.is_empty()));
        assert_eq!(described.count(), settings.count());
    }
}
