//! Linking: several modules of PTX become one text.
//!
//! A symbol that a module only declares is defined by another module. Private names of a module are changed where another one
//! has the same. Functions are declared before everything else, so that their order does not matter.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Functions that the device runtime provides, so no module defines them.
const PROVIDED: [&str; 5] = ["vprintf", "__assertfail", "malloc", "free", "cudaGraphSetConditional"];
/// The beginning of the names of its functions for launches by kernels. Those that the interpreter lacks are refused by their
/// names when a kernel that calls them is launched.
const PROVIDED_FOR_LAUNCHES: &str = "__cudaCDP2";

fn is_provided(name: &str) -> bool {
    PROVIDED.contains(&name) || name.starts_with(PROVIDED_FOR_LAUNCHES)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linkage {
    Extern,
    Visible,
    Weak,
    Local,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Function,
    Kernel,
    Variable,
    Header,
    Other,
}

/// A statement at the outermost level of a module.
#[derive(Debug)]
struct Statement {
    text: String,
    linkage: Linkage,
    kind: Kind,
    name: String,
}

impl Statement {
    /// Whether the statement defines its name.
    fn defines(&self) -> bool {
        match self.kind {
            Kind::Function | Kind::Kernel => self.text.contains('{'),
            Kind::Variable => self.linkage != Linkage::Extern,
            Kind::Header | Kind::Other => false,
        }
    }

    /// A function's declaration, up to its body.
    fn head(&self) -> &str {
        self.text.split('{').next().unwrap_or_default().trim_end().trim_end_matches(';')
    }
}

/// One text made of several, or the error.
pub(crate) fn merge(texts: &[String]) -> Result<String, String> {
    let mut modules: Vec<Vec<Statement>> = texts.iter().map(|text| statements(&without_comments(text))).collect();
    rename_locals(&mut modules);
    let all: Vec<&Statement> = modules.iter().flatten().collect();
    let mut defined: HashMap<&str, &Statement> = HashMap::new();
    for statement in all.iter().filter(|s| s.defines()) {
        match defined.get(statement.name.as_str()) {
            Some(first) if first.linkage == Linkage::Weak => drop(defined.insert(&statement.name, statement)),
            Some(_) if statement.linkage != Linkage::Weak => {
                return Err(format!("error   : Multiple definition of '{}'", statement.name));
            }
            Some(_) => {}
            None => drop(defined.insert(&statement.name, statement)),
        }
    }
    let mut out = header(&all)?;
    let mut declared = HashSet::new();
    for statement in all.iter().filter(|s| s.kind == Kind::Function) {
        if declared.insert(&statement.name) {
            let declaration = match defined.get(statement.name.as_str()) {
                Some(definition) => definition,
                None if is_provided(&statement.name) => statement,
                None => return Err(format!("error   : Undefined reference to '{}'", statement.name)),
            };
            let _ = writeln!(out, "{};", declaration.head());
        }
    }
    for kind in [Kind::Variable, Kind::Function, Kind::Kernel, Kind::Other] {
        for statement in all.iter().filter(|s| s.kind == kind) {
            let emitted = match defined.get(statement.name.as_str()) {
                _ if kind == Kind::Other => true,
                Some(definition) => std::ptr::eq(*definition, *statement),
                // Modules declare dynamic shared memory, but none defines it.
                None if statement.text.contains(".shared") => declared.insert(&statement.name),
                None if kind == Kind::Variable => {
                    return Err(format!("error   : Undefined reference to '{}'", statement.name));
                }
                None => false,
            };
            if emitted {
                let _ = writeln!(out, "{}", statement.text);
            }
        }
    }
    Ok(out)
}

/// The newest version and target of all.
fn header(all: &[&Statement]) -> Result<String, String> {
    let newest = |directive: &str| {
        let number = |text: &str| {
            let digits: String = text.chars().filter(|c| c.is_ascii_digit()).collect();
            digits.parse::<u32>().unwrap_or(0)
        };
        let lines = all.iter().filter(|s| s.kind == Kind::Header && s.text.starts_with(directive));
        lines.max_by_key(|s| number(&s.text)).map(|s| s.text.clone())
    };
    let (version, target) = (newest(".version"), newest(".target"));
    let (Some(version), Some(target)) = (version, target) else { return Err("no .version or .target".into()) };
    Ok(format!("{version}\n{target}\n.address_size 64\n"))
}

fn rename_locals(modules: &mut [Vec<Statement>]) {
    let names: Vec<HashSet<String>> = modules.iter().map(|m| m.iter().map(|s| s.name.clone()).collect()).collect();
    for (index, module) in modules.iter_mut().enumerate() {
        let taken =
            |name: &String| names.iter().enumerate().any(|(other, names)| other < index && names.contains(name));
        let own = |s: &&Statement| s.linkage == Linkage::Local && !s.name.is_empty() && s.kind != Kind::Kernel;
        let renamed: HashSet<String> = module.iter().filter(own).map(|s| s.name.clone()).filter(taken).collect();
        if renamed.is_empty() {
            continue;
        }
        for statement in module.iter_mut() {
            statement.text =
                with_names(&statement.text, |name| renamed.contains(name).then(|| format!("{name}__module{index}")));
            if renamed.contains(&statement.name) {
                statement.name = format!("{}__module{index}", statement.name);
            }
        }
    }
}

fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

/// A text with some of its names changed; texts in quotes stay.
fn with_names(text: &str, change: impl Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '"' => rest[1..].find('"').map_or(rest.len(), |end| end + 2),
            c if in_name(c) => rest.find(|c| !in_name(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        let (piece, after) = rest.split_at(length);
        match change(piece) {
            Some(changed) => out.push_str(&changed),
            None => out.push_str(piece),
        }
        rest = after;
    }
    out
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let (kept, length) = match c {
            '"' => {
                let end = rest[1..].find('"').map_or(rest.len(), |end| end + 2);
                (&rest[..end], end)
            }
            '/' if rest.starts_with("//") => ("", rest.find('\n').unwrap_or(rest.len())),
            '/' if rest.starts_with("/*") => (" ", rest.find("*/").map_or(rest.len(), |end| end + 2)),
            c => (&rest[..c.len_utf8()], c.len_utf8()),
        };
        out.push_str(kept);
        rest = &rest[length..];
    }
    out
}

/// The statements of a module's outermost level.
fn statements(text: &str) -> Vec<Statement> {
    let mut list = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let length = length_of_first(rest);
        list.push(classify(rest[..length].trim()));
        rest = rest[length..].trim_start();
    }
    list.retain(|s| !s.text.is_empty());
    list
}

fn length_of_first(text: &str) -> usize {
    const LINES: [&str; 4] = [".version", ".target", ".address_size", ".file"];
    if LINES.iter().any(|directive| text.starts_with(directive)) {
        return text.find('\n').unwrap_or(text.len());
    }
    let (mut depth, mut quoted, mut body) = (0_u32, false, false);
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '{' => {
                // The braces of a variable's first content end in a semicolon.
                body |= depth == 0 && !text[..at].contains('=');
                depth += 1;
            }
            '}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 && body {
                    return at + 1;
                }
            }
            ';' if depth == 0 => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn classify(text: &str) -> Statement {
    let head = text.split(['{', '=', ';']).next().unwrap_or_default();
    let has = |directive: &str| head.split(|c: char| !in_name(c) && c != '.').any(|word| word == directive);
    let linkage = match () {
        () if has(".extern") => Linkage::Extern,
        () if has(".visible") => Linkage::Visible,
        () if has(".weak") || has(".common") => Linkage::Weak,
        () => Linkage::Local,
    };
    let kind = match () {
        () if has(".version") || has(".target") || has(".address_size") => Kind::Header,
        () if has(".file") || text.starts_with(".section") => {
            return Statement { text: String::new(), linkage, kind: Kind::Other, name: String::new() };
        }
        () if has(".entry") => Kind::Kernel,
        () if has(".func") => Kind::Function,
        () if has(".global") || has(".const") || has(".shared") => Kind::Variable,
        () => Kind::Other,
    };
    let name = match kind {
        Kind::Function => called(head, ".func"),
        Kind::Kernel => called(head, ".entry"),
        Kind::Variable => variable(head),
        Kind::Header | Kind::Other => "",
    };
    Statement { text: text.to_owned(), linkage, kind, name: name.to_owned() }
}

/// The name behind a directive, results in brackets left out.
fn called<'t>(head: &'t str, directive: &str) -> &'t str {
    let at = head.find(directive).map_or(head.len(), |at| at + directive.len());
    let mut rest = head[at..].trim_start();
    if rest.starts_with('(') {
        rest = rest.find(')').map_or("", |end| rest[end + 1..].trim_start());
    }
    &rest[..rest.find(|c| !in_name(c)).unwrap_or(rest.len())]
}

/// The first word that is neither a directive nor a number.
fn variable(head: &str) -> &str {
    let words = head.split(|c: char| !in_name(c) && c != '.');
    let mut names =
        words.filter(|w| !w.is_empty() && !w.starts_with('.') && !w.starts_with(|c: char| c.is_ascii_digit()));
    names.find(|w| *w != "managed").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 7.0\n.target sm_75\n.address_size 64\n";

    #[test]
    fn declarations_find_their_definitions_and_names_do_not_meet() {
        let first = format!(
            "{HEAD}// a comment; with {{\n.extern .func (.param .b32 r) f(.param .b32 p);\n.global .align 4 .u32 $str = 1;\n\
             .extern .global .align 4 .u32 shared_count;\n.visible .entry k() {{ call (r), f, (p); mov.u64 %rd1, $str; }}"
        );
        let second = format!(
            "{HEAD}.global .align 1 .b8 $str[4] = {{1, 2, 3, 4}};\n.visible .global .align 4 .u32 shared_count = 5;\n\
             .visible .func (.param .b32 r) f(.param .b32 p)\n{{\n{{ mov.u64 %rd1, $str; }}\nret;\n}}"
        );
        let merged = merge(&[first, second]).unwrap();
        assert!(!merged.contains(".extern"), "{merged}");
        assert_eq!(merged.matches(".version").count(), 1);
        assert!(merged.contains(".b8 $str__module1[4]") && merged.contains("mov.u64 %rd1, $str__module1;"));
        assert!(merged.contains("mov.u64 %rd1, $str; }"));
        let declared = merged.find(".visible .func (.param .b32 r) f(.param .b32 p);").unwrap();
        assert!(declared < merged.find(".entry").unwrap());
    }

    #[test]
    fn what_is_missing_or_there_twice_is_named() {
        let missing = format!("{HEAD}.extern .func g();\n.visible .entry k() {{ call g; ret; }}");
        assert!(merge(&[missing]).unwrap_err().contains("'g'"));
        let twice = format!("{HEAD}.visible .func h() {{ ret; }}");
        assert!(merge(&[twice.clone(), twice]).unwrap_err().contains("Multiple definition of 'h'"));
        let weak = format!("{HEAD}.weak .func h() {{ ret; }}");
        assert_eq!(merge(&[weak.clone(), weak]).unwrap().matches("{ ret; }").count(), 1);
    }
}
