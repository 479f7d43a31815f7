//! `rekindled check-config`: says whether the daemon would start with a configuration file, and what in it cannot work on
//! this machine.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Serialize;
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;
use super::here::{Host, Note};
use super::{Config, DEFAULT_FILE, ServeOptions, parse, read, read_default};

/// What is to be said about a configuration file.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    file: PathBuf,
    /// Whether there is such a file. Without the default file every setting has its default.
    exists: bool,
    /// The mistakes, with which the daemon would not start.
    mistakes: Vec<Remark>,
    /// What the daemon reads without complaint, but cannot work on this machine.
    notes: Vec<Remark>,
}

/// One thing to be said, and the place in the file.
#[derive(Debug, Serialize)]
struct Remark {
    /// Where it is in the file, from 1; none where the file does not have the setting, or no one place is wrong.
    #[serde(flatten)]
    position: Option<Position>,
    text: String,
}

/// A line and a column, in characters, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Position {
    line: usize,
    column: usize,
}

impl Report {
    /// Checks a file, or the default file. Fails if it cannot be read.
    pub(crate) fn of(file: Option<&Path>, host: &Host) -> Result<Self, ConfigError> {
        let text = file.map_or_else(read_default, |it| read(it).map(Some))?;
        let (exists, text) = (text.is_some(), text.unwrap_or_default());
        let file = file.unwrap_or(Path::new(DEFAULT_FILE));
        let (mistakes, notes) = match checked(&text, file) {
            Ok(config) => (Vec::new(), host.notes(&config)),
            Err(mistakes) => (mistakes, Vec::new()),
        };
        let remark = |Note { setting, problem }: Note| Remark {
            position: value_of(&text, setting).map(|it| position_at(&text, it)),
            text: format!("{setting}: {problem}"),
        };
        Ok(Self { file: file.to_owned(), exists, mistakes, notes: notes.into_iter().map(remark).collect() })
    }

    /// Whether the daemon would start with the file.
    pub(crate) fn is_ok(&self) -> bool {
        self.mistakes.is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, remark: &Remark, kind: &str| {
            write!(f, "{}:", self.file.display())?;
            if let Some(Position { line, column }) = remark.position {
                write!(f, "{line}:{column}:")?;
            }
            writeln!(f, " {kind}{}", remark.text)
        };
        if self.is_ok() {
            let answer = if self.exists { "ok" } else { "does not exist; every setting has its default" };
            writeln!(f, "{}: {answer}", self.file.display())?;
        }
        self.mistakes.iter().try_for_each(|mistake| line(f, mistake, ""))?;
        self.notes.iter().try_for_each(|note| line(f, note, "note: "))
    }
}

/// The configuration that the daemon would have, or all mistakes. The parser stops at the first one, so that setting is left
/// out, and the rest is read again.
fn checked(text: &str, file: &Path) -> Result<Config, Vec<Remark>> {
    let mut rest = text.to_owned();
    let mut mistakes = Vec::new();
    loop {
        let error = match parse(&rest, file).and_then(|it| Config::merge(ServeOptions::default(), it)) {
            Ok(config) if mistakes.is_empty() => return Ok(config),
            Ok(_) => break,
            Err(error) => error,
        };
        let (byte, said) = match &error {
            ConfigError::Parse { source, .. } => (source.span().map(|it| it.start), plain(source.message())),
            other => (other.setting().and_then(|it| value_of(&rest, it)), other.to_string()),
        };
        mistakes.push(Remark { position: byte.map(|it| position_at(text, it)), text: said });
        let Some(setting) = byte.and_then(|it| setting_at(&rest, it)) else { break };
        rest = without(&rest, setting);
        // What is left out may have been part of something larger. What follows from that is no mistake of the file.
        if DeTable::parse(&rest).is_err() {
            break;
        }
    }
    mistakes.sort_by_key(|it| it.position);
    Err(mistakes)
}

/// A message of the parser on one line, for people who do not write Rust.
fn plain(message: &str) -> String {
    let numbers = ["usize", "u64", "u32"].map(|it| format!("expected {it}"));
    let named = numbers.iter().find_map(|it| message.strip_suffix(it.as_str()));
    let message = named.map_or(message.to_owned(), |it| format!("{it}expected a whole number, 0 or more"));
    message.trim().replace('\n', "; ")
}

/// The text with blanks in place of a part, so that everything else stays where it is.
fn without(text: &str, part: Range<usize>) -> String {
    let blank = |(at, c): (usize, char)| {
        let kept = !part.contains(&at) || c == '\n';
        if kept { String::from(c) } else { " ".repeat(c.len_utf8()) }
    };
    text.char_indices().map(blank).collect()
}

/// The setting, name and value, that a byte belongs to. None if it belongs to a table.
fn setting_at(text: &str, byte: usize) -> Option<Range<usize>> {
    fn within(table: &DeTable<'_>, byte: usize) -> Option<Range<usize>> {
        table.iter().find_map(|(name, value)| match value.get_ref() {
            DeValue::Table(inner) => within(inner, byte),
            _ => Some(name.span().start..value.span().end).filter(|it| it.contains(&byte)),
        })
    }
    within(DeTable::parse(text).ok()?.get_ref(), byte)
}

/// Where the text has the value of a setting, `TABLE.NAME` or `NAME`.
fn value_of(text: &str, setting: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let mut path = setting.split('.');
    let last = path.next_back()?;
    let mut table = root.get_ref();
    for name in path {
        table = match table.get(name)?.get_ref() {
            DeValue::Table(inner) => inner,
            _ => return None,
        };
    }
    Some(table.get(last)?.span().start)
}

/// The place of a byte. One beyond the end is at the end.
fn position_at(text: &str, byte: usize) -> Position {
    let before = text.get(..byte).unwrap_or(text);
    let line = before.rsplit('\n').next().unwrap_or_default();
    Position { line: before.matches('\n').count() + 1, column: line.chars().count() + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a file.toml");
        std::fs::write(&file, text).unwrap();
        let report = Report::of(Some(&file), &Host::default()).unwrap();
        assert_eq!(report.is_ok(), report.to_string().contains("a file.toml: ok\n"));
        report.to_string().replace(&format!("{}/", dir.path().display()), "")
    }

    #[test]
    fn a_mistake_has_its_line_and_column() {
        for (text, expected) in [
            ("", "a file.toml: ok\n"),
            (
                "# ä\n[pool]\nspare = \"1\"",
                "a file.toml:3:9: invalid type: string \"1\", expected a whole number, 0 or more\n",
            ),
            ("socket = 'ä' x", "a file.toml:1:14: "),
            ("[pool]\nspair = 1", "a file.toml:2:1: unknown field `spair`, expected one of `spare`, `learned`"),
            (
                "socket_mode = \"rw\"",
                "a file.toml:1:15: socket_mode: \"rw\" is no mode; write it in octal, as \"0660\"\n",
            ),
            ("\n[gpu]\n idle_ms = 0", "a file.toml:3:12: gpu.idle_ms: \"0\" would be every program"),
            ("checkpoint.protocol = \"x\"", "a file.toml:1:23: checkpoint.protocol: "),
            ("image = { compression = \"x\" }", "a file.toml:1:25: image.compression: "),
        ] {
            let said = said(text);
            assert!(said.starts_with(expected), "{text:?}: {said}");
            assert_eq!(said.lines().count(), 1, "{text:?}: {said}");
        }
    }

    #[test]
    fn all_mistakes_are_named() {
        let text = "sokcet = 1\nsocket_mode = \"ä\" # octal\n[pool]\nspare = -1\nmax = 'x'\n[gpu]\nidle_ms = 0\n";
        let said = said(text);
        let lines: Vec<_> = said.lines().map(|it| it.split(' ').nth(1).unwrap()).collect();
        let places: Vec<_> = lines.iter().map(|it| it.trim_start_matches("file.toml:")).collect();
        assert_eq!(places, ["1:1:", "2:15:", "4:9:", "5:7:", "7:11:"], "{said}");
        assert!(said.contains("socket_mode: \"ä\" is no mode"), "{said}");
    }

    #[test]
    fn what_follows_from_a_mistake_is_none() {
        for text in ["[spool]\nspare = 1\n", "image = { compression = \"x\", file_mib = 1 }", "a = 1\na = 2"] {
            assert_eq!(said(text).lines().count(), 1, "{text:?}: {}", said(text));
        }
    }

    #[test]
    fn notes_have_the_place_of_their_setting_and_do_not_change_the_answer() {
        let said = said("socket = \"/s\"\nsocket_group = \"no such group\"\ncuda_driver = \"/no/such.so\"\n");
        let lines: Vec<_> = said.lines().collect();
        assert_eq!(lines.len(), 3, "{said}");
        assert_eq!(lines[0], "a file.toml: ok");
        assert!(lines[1].starts_with("a file.toml:2:16: note: socket_group: there is no group"), "{said}");
        assert!(lines[2].starts_with("a file.toml:3:15: note: cuda_driver: there is no file /no/such.so"), "{said}");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_no_answer() {
        let error = Report::of(Some(Path::new("/no/such/file")), &Host::default()).unwrap_err();
        assert!(matches!(error, ConfigError::Read { .. }), "{error}");
    }

    #[test]
    fn json_has_the_same() {
        let report = Report {
            file: "f".into(),
            exists: true,
            mistakes: vec![Remark { position: Some(Position { line: 2, column: 3 }), text: "t".to_owned() }],
            notes: vec![Remark { position: None, text: "n".to_owned() }],
        };
        let expected =
            r#"{"file":"f","exists":true,"mistakes":[{"line":2,"column":3,"text":"t"}],"notes":[{"text":"n"}]}"#;
        assert_eq!(serde_json::to_string(&report).unwrap(), expected);
    }
}
