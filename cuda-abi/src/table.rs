//! The table of driver functions, `driver.table`: parsing it, and what a line says.
//!
//! The text is the single declaration of each driver function. Build scripts parse it to generate exported symbols,
//! encoders and the worker's dispatch (see [`crate::generate`]); programs parse it to list what is declared.

use std::fmt;

/// The table's text, as built into this crate.
pub const TEXT: &str = include_str!("../driver.table");

/// How a call travels from the application to its worker. The head of `driver.table` explains each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Answered in the application's process.
    Local,
    /// Sent without waiting; generated.
    Send,
    /// Sent, then waits for the reply; generated.
    Wait,
    /// Hand-written in the interposer.
    Hand,
    /// Hand-written in the interposer around a generated encoder that does not wait.
    HandSend,
    /// Hand-written in the interposer around a generated encoder that waits.
    HandWait,
    /// The per-thread default stream's form of another function.
    Thread,
    /// Not implemented: `CUDA_ERROR_NOT_SUPPORTED`.
    Refused,
}

impl Route {
    /// As the table spells it.
    pub fn name(self) -> &'static str {
        match self {
            Route::Local => "local",
            Route::Send => "send",
            Route::Wait => "wait",
            Route::Hand => "hand",
            Route::HandSend => "hand+send",
            Route::HandWait => "hand+wait",
            Route::Thread => "thread",
            Route::Refused => "refused",
        }
    }

    /// Whether the interposer has a function of the symbol's name in `api`.
    pub fn by_hand(self) -> bool {
        matches!(self, Route::Local | Route::Hand | Route::HandSend | Route::HandWait)
    }

    /// Whether the line generates an encoder and a place in the worker's dispatch.
    pub fn travels(self) -> bool {
        matches!(self, Route::Send | Route::Wait | Route::HandSend | Route::HandWait)
    }

    /// Whether the generated encoder waits for the worker's reply.
    pub fn waits(self) -> bool {
        matches!(self, Route::Wait | Route::HandWait)
    }
}

/// The effect of a call on objects, for the object log that a restore replays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing that a restore must repeat.
    None,
    /// Creates an object of this kind; the client chooses its handle.
    Creates(String),
    /// Destroys the object that its first handle parameter names.
    Destroys(String),
    /// Changes the object of this kind that its first parameter of that kind names.
    Sets(String),
}

/// A parameter of a driver function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// The C type as `cuda.h` spells it, pointers included (`const char *`).
    pub c_type: String,
    /// The parameter's name.
    pub name: String,
}

/// A name and version under which `cuGetProcAddress` finds a symbol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// The name asked for, without suffixes.
    pub name: String,
    /// The CUDA version since which this symbol answers.
    pub version: u32,
    /// Whether it answers for the legacy default stream (flags 0 and 1).
    pub legacy: bool,
    /// Whether it answers for the per-thread default stream (flag 2).
    pub thread: bool,
}

/// A line of the table: a symbol that `libcuda.so.1` exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// The exported symbol.
    pub symbol: String,
    /// How its calls travel.
    pub route: Route,
    /// The effect of its calls on objects.
    pub effect: Effect,
    /// Its parameters; `None` where no public header declares it.
    pub params: Option<Vec<Param>>,
    /// Where `cuGetProcAddress` finds it.
    pub lookups: Vec<Lookup>,
}

impl Function {
    /// The symbol without `_ptsz` or `_ptds`.
    pub fn base(&self) -> &str {
        let s = &self.symbol;
        s.strip_suffix("_ptsz").or_else(|| s.strip_suffix("_ptds")).unwrap_or(s)
    }
}

/// A line of the table that could not be understood.
#[derive(Debug, PartialEq, Eq)]
pub struct TableError {
    /// The line's number, from 1.
    pub line: usize,
    /// A description of the error in the line.
    pub what: String,
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "driver.table, line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for TableError {}

/// Parses a table in the form that the head of `driver.table` describes. A function's place in the result is its
/// call number on the ring.
pub fn parse(text: &str) -> Result<Vec<Function>, TableError> {
    let mut functions = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let function = parse_line(line).map_err(|what| TableError { line: index + 1, what })?;
        functions.push(function);
    }
    Ok(functions)
}

fn parse_line(line: &str) -> Result<Function, String> {
    let mut columns = line.split('|').map(str::trim);
    let (Some(how), Some(signature)) = (columns.next(), columns.next()) else {
        return Err("expected ROUTE | SYMBOL(PARAMETERS) | FOUND AS".into());
    };
    let mut words = how.split_whitespace();
    let route = match words.next().unwrap_or_default() {
        "local" => Route::Local,
        "send" => Route::Send,
        "wait" => Route::Wait,
        "hand" => Route::Hand,
        "hand+send" => Route::HandSend,
        "hand+wait" => Route::HandWait,
        "thread" => Route::Thread,
        "refused" => Route::Refused,
        other => return Err(format!("unknown route {other:?}")),
    };
    let effect = match (words.next(), words.next()) {
        (None, _) => Effect::None,
        (Some("creates"), Some(kind)) => Effect::Creates(kind.into()),
        (Some("destroys"), Some(kind)) => Effect::Destroys(kind.into()),
        (Some("sets"), Some(kind)) => Effect::Sets(kind.into()),
        (Some(other), _) => return Err(format!("unknown effect {other:?}")),
    };
    let (symbol, rest) = signature.split_once('(').ok_or("no parameter list")?;
    let inside = rest.strip_suffix(')').ok_or("parameter list does not end")?;
    let params = match inside {
        "?" => None,
        "void" | "" => Some(Vec::new()),
        list => Some(list.split(',').map(|p| parse_param(p.trim())).collect::<Result<_, _>>()?),
    };
    let lookups = columns.next().unwrap_or_default().split_whitespace().map(parse_lookup).collect::<Result<_, _>>()?;
    Ok(Function { symbol: symbol.trim().into(), route, effect, params, lookups })
}

pub(crate) fn parse_param(text: &str) -> Result<Param, String> {
    let at = text
        .rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .ok_or_else(|| format!("parameter {text:?} has no type"))?;
    let (c_type, name) = text.split_at(at + 1);
    Ok(Param { c_type: c_type.trim().into(), name: name.into() })
}

fn parse_lookup(word: &str) -> Result<Lookup, String> {
    let (name, rest) = word.split_once('@').ok_or_else(|| format!("look-up {word:?} has no version"))?;
    let (version, flag) = rest.split_once(':').map_or((rest, ""), |(v, f)| (v, f));
    let (legacy, thread) = match flag {
        "" => (true, true),
        "legacy" => (true, false),
        "thread" => (false, true),
        other => return Err(format!("unknown flag {other:?} in look-up {word:?}")),
    };
    let version = version.parse().map_err(|_| format!("version of look-up {word:?} is no number"))?;
    Ok(Lookup { name: name.into(), version, legacy, thread })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_parses_and_lists_every_export_once() {
        let table = parse(TEXT).unwrap();
        assert_eq!(table.len(), 682);
        let mut symbols: Vec<_> = table.iter().map(|f| f.symbol.as_str()).collect();
        symbols.sort();
        symbols.dedup();
        assert_eq!(symbols.len(), 682);
    }

    #[test]
    fn a_thread_form_has_a_base_that_travels_or_is_answered() {
        let table = parse(TEXT).unwrap();
        for f in table.iter().filter(|f| f.route == Route::Thread) {
            let base = table.iter().find(|b| b.symbol == f.base()).unwrap();
            assert!(base.route != Route::Refused && base.route != Route::Thread, "{}", f.symbol);
        }
    }

    #[test]
    fn a_name_version_and_flag_find_at_most_one_symbol() {
        let table = parse(TEXT).unwrap();
        let mut seen = std::collections::HashSet::new();
        for f in &table {
            for l in &f.lookups {
                assert!(!l.legacy || seen.insert((l.name.clone(), l.version, false)), "{} {}", l.name, l.version);
                assert!(!l.thread || seen.insert((l.name.clone(), l.version, true)), "{} {}", l.name, l.version);
            }
        }
    }

    #[test]
    fn bad_lines_are_named() {
        assert_eq!(parse("\nnowhere | cuInit(unsigned int Flags)").unwrap_err().line, 2);
        assert!(parse("local | cuInit").is_err());
        assert!(parse("local | cuInit(void) | cuInit@x").is_err());
    }
}
