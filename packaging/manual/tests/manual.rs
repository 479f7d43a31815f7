//! The pages and completions as they are installed, read by the programs that will read them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use clap::Command as Program;
use tempfile::TempDir;

fn made() -> TempDir {
    let dir = TempDir::with_prefix("the manual").unwrap();
    make(dir.path());
    dir
}

fn make(dir: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle-manual"));
    let output = command.arg(dir).env("SOURCE_DATE_EPOCH", "951782400").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// The files below a directory, relative to it.
fn files(dir: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut left = vec![dir.to_owned()];
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                found.insert(path.strip_prefix(dir).unwrap().to_owned());
            }
        }
    }
    found
}

fn visible(program: &Program) -> impl Iterator<Item = &Program> {
    program.get_subcommands().filter(|it| !it.is_hide_set())
}

fn programs() -> [Program; 3] {
    [rekindle::command(), rekindled::command(), rekindle_oci_hook::command()]
}

#[test]
fn every_command_that_users_see_has_a_page() {
    let dir = made();
    let mut expected: BTreeSet<_> =
        ["man1/rekindle.1", "man5/rekindled.toml.5", "man8/rekindled.8", "man8/rekindle-oci-hook.8"]
            .map(PathBuf::from)
            .into();
    expected.extend(visible(&rekindle::command()).map(|it| format!("man1/rekindle-{}.1", it.get_name()).into()));
    assert!(expected.contains(Path::new("man1/rekindle-checkpoint.1")));
    assert_eq!(files(&dir.path().join("man")), expected);

    for program in [rekindled::command(), rekindle_oci_hook::command()] {
        let page = fs::read_to_string(dir.path().join(format!("man/man8/{}.8", program.get_name()))).unwrap();
        for command in visible(&program) {
            let name = command.get_name().replace('-', "\\-");
            assert!(page.contains(&name), "{}: {}", program.get_name(), command.get_name());
        }
    }
}

#[test]
fn every_setting_is_on_the_page_of_the_configuration() {
    let dir = made();
    let page = fs::read_to_string(dir.path().join("man/man5/rekindled.toml.5")).unwrap();
    for setting in
        ["\\fBsocket_mode\\fR = \"0660\"\n", "\\fBmemory_mib\\fR\n", ".SS [checkpoint]\n", "Example: max = 64"]
    {
        assert!(page.contains(setting), "{setting:?}: {page}");
    }
}

#[test]
fn a_page_that_another_names_exists() {
    let dir = made();
    let pages = files(&dir.path().join("man"));
    for page in &pages {
        let text = fs::read_to_string(dir.path().join("man").join(page)).unwrap();
        let references = text.lines().filter_map(|line| line.strip_prefix(".BR rekindle"));
        for reference in references.filter(|it| it.contains('(')) {
            let (name, rest) = reference.split_once(" (").unwrap();
            let (name, section) = (name.replace("\\-", "-"), &rest[..1]);
            let file = PathBuf::from(format!("man{section}/rekindle{name}.{section}"));
            assert!(pages.contains(&file), "{}: {}", page.display(), file.display());
        }
    }
}

#[test]
fn every_option_has_help() {
    fn look(program: &Program, path: &str) {
        let path = format!("{path} {}", program.get_name());
        assert!(program.get_about().is_some(), "{path} has no help");
        for argument in program.get_arguments().filter(|it| !it.is_hide_set()) {
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            assert!(!help.trim().is_empty(), "{path}: {} has no help", argument.get_id());
        }
        visible(program).for_each(|it| look(it, &path));
    }
    for mut program in programs() {
        program.build();
        look(&program, "");
    }
}

#[test]
fn pages_are_the_same_when_they_are_made_again() {
    let (one, other) = (made(), made());
    assert_eq!(files(one.path()), files(other.path()));
    for file in files(one.path()) {
        let [text, again] = [&one, &other].map(|it| fs::read_to_string(it.path().join(&file)).unwrap());
        assert_eq!(text, again, "{}", file.display());
        assert!(!file.starts_with("man") || text.contains(" 2000-02-29 "), "{text}");
    }
}

/// Runs a program on every page, if this machine has it. It must say nothing.
fn every_page_passes(program: &str, arguments: &[&str]) {
    let dir = made();
    for page in files(&dir.path().join("man")) {
        let mut command = Command::new(program);
        let output = match command.args(arguments).arg(dir.path().join("man").join(&page)).output() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("skipped: this machine has no {program}");
                return;
            }
            output => output.unwrap(),
        };
        assert!(output.status.success() && said(&output).trim().is_empty(), "{}:\n{}", page.display(), said(&output));
    }
}

#[test]
fn mandoc_finds_nothing_wrong() {
    every_page_passes("mandoc", &["-T", "lint", "-W", "warning"]);
}

#[test]
fn groff_finds_nothing_wrong() {
    every_page_passes("groff", &["-man", "-ww", "-Tutf8", "-z"]);
}

/// What bash offers for the words of a command line, the last of which is incomplete.
fn offered(script: &Path, words: &[&str]) -> String {
    let program = words[0];
    let function = format!("_{program}");
    let code = r#"
        source "$1" || exit
        function=$2
        shift 2
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
        "$function" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        echo "${COMPREPLY[*]}""#;
    let output =
        Command::new("bash").args(["-c", code, "bash"]).arg(script).arg(function).args(words).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn bash_completes_commands_and_options() {
    let dir = made();
    let folder = dir.path().join("bash-completion/completions");
    for program in programs() {
        let script = folder.join(program.get_name());
        let output = Command::new("bash").arg("-n").arg(&script).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{}", said(&output));
    }
    let rekindle = folder.join("rekindle");
    assert_eq!(offered(&rekindle, &["rekindle", "che"]), "check checkpoint");
    assert_eq!(offered(&rekindle, &["rekindle", "restore", "--wait"]), "--wait-loaded");
    assert_eq!(offered(&rekindle, &["rekindle", "config", "c"]), "check");
    assert_eq!(offered(&rekindle, &["rekindle", "lazy"]), "", "it is for Rekindle itself");
    assert_eq!(offered(&folder.join("rekindled"), &["rekindled", "check"]), "check-config");
}
