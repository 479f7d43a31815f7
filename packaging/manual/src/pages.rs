//! The man pages, in the macros of man(7).

use anyhow::Result;
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

use crate::settings::{self, Entry};
use crate::texts::{self, Text};

/// A page and its name, without the section.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) name: String,
    pub(crate) text: String,
}

/// What stands at the head of every page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heading<'a> {
    pub(crate) section: &'a str,
    pub(crate) date: &'a str,
}

/// The definitions that each piece of generated text begins with. A page needs them once.
const PREAMBLE: [&str; 2] = [".ie \\n(.g .ds Aq \\(aq", ".el .ds Aq '"];

/// The pages of a program. In section 1 each command has a page of its own; otherwise the program's page has them all.
pub(crate) fn of_program(mut program: Command, heading: &Heading<'_>) -> Result<Vec<Page>> {
    // Commands and options named `help` would be on every page.
    program = program.disable_help_subcommand(true);
    program.build();
    let own_pages = heading.section == "1";
    let mut pages = vec![of_command(&program, heading, own_pages)?];
    if own_pages {
        for verb in visible(&program) {
            pages.push(of_command(verb, heading, false)?);
        }
    }
    Ok(pages)
}

/// A page of one command. Its commands have pages of their own, or are described in it.
fn of_command(command: &Command, heading: &Heading<'_>, own_pages: bool) -> Result<Page> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let Text { description, sections } = texts::of(&format!("{name}.{}", heading.section))?;
    let man = man(command).section(heading.section);
    let mut text = title(&name, heading);
    text += &generated(|out| man.render_name_section(out))?;
    text += &section("SYNOPSIS", |roff| synopsis(roff, command));
    text += &section("DESCRIPTION", |roff| about(roff, command));
    text += ".PP\n";
    text += description;
    text += &generated(|out| man.render_options_section(out))?;
    if own_pages {
        text += &generated(|out| man.render_subcommands_section(out))?;
    } else if command.has_subcommands() {
        text += ".SH COMMANDS\n";
        for inner in visible(command) {
            text += &described(inner)?;
        }
    }
    text += sections;
    Ok(Page { name, text })
}

/// A command within the page of another: its usage, what it does and its options.
fn described(command: &Command) -> Result<String> {
    let mut text = String::new();
    let inner: Vec<_> = visible(command).collect();
    if inner.is_empty() {
        // The program's own page has what all its commands take.
        let common = |it: clap::Arg| {
            let is_common = it.is_global_set() || it.get_id() == "help";
            if is_common { it.hide(true) } else { it }
        };
        let man = man(&command.clone().mut_args(common));
        text += &lines(|roff| {
            roff.control("SS", [command.get_bin_name().unwrap_or_else(|| command.get_name())]);
            synopsis(roff, command);
            roff.control("PP", []);
            about(roff, command);
        });
        text += &generated(|out| man.render_options_section(out))?.replace(".SH OPTIONS\n", "");
    }
    for command in inner {
        text += &described(command)?;
    }
    Ok(text)
}

/// The page of the configuration file.
pub(crate) fn of_configuration(heading: &Heading<'_>) -> Result<Page> {
    let name = "rekindled.toml";
    let Text { description, sections } = texts::of(&format!("{name}.{}", heading.section))?;
    let mut text = title(name, heading);
    text += &section("NAME", |roff| {
        roff.text([roman(format!("{name} - the configuration of the daemon of Rekindle"))]);
    });
    text += ".SH DESCRIPTION\n";
    text += description;
    text += ".SH SETTINGS\n";
    text += &lines(|roff| settings(roff, &settings::entries(texts::CONFIGURATION)));
    text += sections;
    Ok(Page { name: name.to_owned(), text })
}

fn settings(roff: &mut Roff, entries: &[Entry]) {
    roff.control("SS", ["Settings outside of the tables"]);
    for entry in entries {
        match entry {
            Entry::Table { name, about } => {
                roff.control("SS", [format!("[{name}]").as_str()]);
                roff.text([roman(about)]);
            }
            Entry::Setting { name, value, about, is_default } => {
                roff.control("TP", []);
                let value = if *is_default { format!(" = {value}") } else { String::new() };
                roff.text([bold(name), roman(value)]);
                let example = format!(" Example: {}", entry.line());
                let example = if *is_default { String::new() } else { example };
                roff.text([roman(format!("{about}{example}"))]);
            }
        }
    }
}

/// What clap_mangen makes of a command. The names and the help of options tell their possible values.
fn man(command: &Command) -> Man {
    Man::new(command.clone().mut_args(|it| it.hide_possible_values(true)))
}

/// What the command does, in sentences.
fn about(roff: &mut Roff, command: &Command) {
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string).unwrap_or_default();
    for (at, paragraph) in about.split("\n\n").enumerate() {
        if at > 0 {
            roff.control("PP", []);
        }
        let end = if paragraph.ends_with('.') { "" } else { "." };
        roff.text([roman(format!("{}{end}", paragraph.replace('\n', " ")))]);
    }
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|it| !it.is_hide_set())
}

/// The usage, as `--help` shows it.
fn synopsis(roff: &mut Roff, command: &Command) {
    let usage = command.clone().render_usage().to_string();
    for (at, form) in usage.trim_start_matches("Usage:").lines().enumerate() {
        if at > 0 {
            roff.control("br", []);
        }
        roff.text([Inline::Bold(form.trim().to_owned())]);
    }
}

fn title(name: &str, heading: &Heading<'_>) -> String {
    let source = format!("Rekindle {}", env!("CARGO_PKG_VERSION"));
    let Heading { section, date } = heading;
    let head = lines(|roff| {
        roff.control("TH", [name, section, date, &source, "Rekindle"]);
    });
    format!("{}\n{head}", PREAMBLE.join("\n"))
}

fn section(name: &str, write: impl FnOnce(&mut Roff)) -> String {
    lines(|roff| {
        roff.control("SH", [name]);
        write(roff);
    })
}

fn lines(write: impl FnOnce(&mut Roff)) -> String {
    let mut roff = Roff::new();
    write(&mut roff);
    without_preamble(&roff.render())
}

/// A section that clap_mangen makes.
fn generated(render: impl FnOnce(&mut dyn std::io::Write) -> std::io::Result<()>) -> Result<String> {
    let mut bytes = Vec::new();
    render(&mut bytes)?;
    Ok(without_preamble(&String::from_utf8(bytes)?))
}

fn without_preamble(text: &str) -> String {
    text.lines().filter(|line| !PREAMBLE.contains(line)).map(|line| format!("{line}\n")).collect()
}
