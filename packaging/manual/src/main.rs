//! Makes the man pages and the completions of shells, as packages install them.
//!
//! ```text
//!   rekindle-manual DIR      DIR is a `share` directory, such as /usr/share:
//!
//!   DIR/man/man1/rekindle.1, rekindle-VERB.1        a page for each verb that users see
//!   DIR/man/man5/rekindled.toml.5                   the configuration
//!   DIR/man/man8/rekindled.8, rekindle-oci-hook.8
//!   DIR/bash-completion/completions/PROGRAM, DIR/zsh/site-functions/_PROGRAM, DIR/fish/vendor_completions.d/PROGRAM.fish
//! ```
//!
//! A page comes from the program's command line, and from the text of the same name in `text/`: what stands before the first
//! section there belongs to DESCRIPTION, all else follows the options. The page of the configuration comes from the comments of
//! `packaging/rekindled.toml`. The date on the pages is that of `SOURCE_DATE_EPOCH`, so that a build can be repeated; without
//! it, today's.

mod date;
mod pages;
mod settings;
mod texts;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Command, Parser};
use clap_complete::{Shell, generate};

use crate::pages::Heading;

/// Write the man pages and the completions of shells.
#[derive(Debug, Parser)]
#[command(name = "rekindle-manual")]
struct Options {
    /// The directory, such as /usr/share: pages go to man/ in it, completions to the directories of the shells
    dir: PathBuf,
}

fn main() -> Result<()> {
    let Options { dir } = Options::parse();
    let date = date::of_build()?;
    let programs = [(rekindle::command(), "1"), (rekindled::command(), "8"), (rekindle_oci_hook::command(), "8")];
    for (program, section) in programs {
        let name = program.get_name().to_owned();
        for page in pages::of_program(program.clone(), &Heading { section, date: &date })? {
            write(&dir.join(format!("man/man{section}/{}.{section}", page.name)), page.text.as_bytes())?;
        }
        completions(&dir, program, &name)?;
    }
    let page = pages::of_configuration(&Heading { section: "5", date: &date })?;
    write(&dir.join(format!("man/man5/{}.5", page.name)), page.text.as_bytes())
}

fn completions(dir: &Path, program: Command, name: &str) -> Result<()> {
    let files = [
        (Shell::Bash, format!("bash-completion/completions/{name}")),
        (Shell::Zsh, format!("zsh/site-functions/_{name}")),
        (Shell::Fish, format!("fish/vendor_completions.d/{name}.fish")),
    ];
    let mut program = without_hidden(&program).version(program.get_version().unwrap_or_default().to_owned());
    for (shell, file) in files {
        let mut script = Vec::new();
        generate(shell, &mut program, name, &mut script);
        write(&dir.join(file), &script)?;
    }
    Ok(())
}

/// What users see of a command: clap_complete would also complete what is hidden from them.
fn without_hidden(command: &Command) -> Command {
    let shown = Command::new(command.get_name().to_owned())
        .about(command.get_about().cloned().unwrap_or_default())
        .args(command.get_arguments().filter(|it| !it.is_hide_set()))
        .subcommands(command.get_subcommands().filter(|it| !it.is_hide_set()).map(without_hidden));
    shown.disable_help_subcommand(true)
}

fn write(file: &Path, content: &[u8]) -> Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))
}
