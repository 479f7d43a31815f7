//! As much of PTX as tells what a module declares (PTX ISA, chapters "Syntax", "State Spaces,
//! Types, and Variables" and "Directives"). Instructions are only looked at for calls.
//!
//! PTX is a language without nesting but that of brackets, so nothing here recurses.

mod declare;
mod kernels;
mod lexer;

use declare::{Declarator, Type};
use lexer::{Lexer, Token};

use super::items::{Binding, Global, Space};
use super::{Arch, CodeError, MOST_NAMED};

/// PTX text, up to its NUL or the end of the bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ptx<'a> {
    text: &'a [u8],
}

/// Something that the text declares at the level of the module.
enum Item<'a> {
    /// `.global` or `.const`
    Variable {
        /// `None` if it is only declared (`.extern`), or has no memory.
        global: Option<Global>,
        /// The text of the initial value.
        initial: &'a [u8],
    },
    /// `.entry` or `.func`
    Function(Function<'a>),
    /// `.alias new, old;`
    Alias { name: &'a [u8], of: &'a [u8] },
}

struct Function<'a> {
    kernel: bool,
    name: &'a [u8],
    /// The text between the parentheses, if there are any.
    params: &'a [u8],
    /// The text between the braces, `None` if it is only declared.
    body: Option<&'a [u8]>,
}

impl<'a> Ptx<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        let end = bytes.iter().position(|&byte| byte == 0);
        Self { text: end.and_then(|end| bytes.get(..end)).unwrap_or(bytes) }
    }

    /// The text without the NUL.
    pub(super) fn text(self) -> &'a [u8] {
        self.text
    }

    /// The architecture it is written for. `None` also if the text is no PTX, whose first words are
    /// `.version` and `.target`.
    pub(super) fn target(self) -> Option<Arch> {
        let mut lexer = Lexer::new(self.text);
        if lexer.next() != Some(Token::Dot(b".version")) {
            return None;
        }
        let mut lexer = lexer.skip_while(|token| *token != Token::Dot(b".target"));
        lexer.next();
        target(lexer.next())
    }

    /// The variables: those of the module, then, function by function, those in functions.
    pub(super) fn globals(self) -> Result<Vec<Global>, CodeError> {
        let mut globals = Vec::new();
        let mut bodies = Vec::new();
        self.scan(|item| match item {
            Item::Variable { global, .. } => globals.extend(global),
            Item::Function(function) => bodies.extend(function.body),
            Item::Alias { .. } => {}
        })?;
        for body in bodies {
            variables_in_function(body, &mut globals)?;
        }
        Ok(globals)
    }

    /// Calls `visit` with every item, in the order of the text.
    fn scan(self, mut visit: impl FnMut(Item<'a>)) -> Result<(), CodeError> {
        const CUT: CodeError = CodeError::Truncated("PTX text");
        let mut lexer = Lexer::new(self.text);
        let mut linking = Linking::default();
        while let Some(token) = lexer.next() {
            match token {
                Token::Dot(b".extern") => linking.external = true,
                Token::Dot(b".visible" | b".common") => linking.binding = Binding::Global,
                Token::Dot(b".weak") => linking.binding = Binding::Weak,
                Token::Dot(b".global") => variables(&mut lexer, Space::Global, linking, &mut visit)?,
                Token::Dot(b".const") => variables(&mut lexer, Space::Constant, linking, &mut visit)?,
                Token::Dot(word @ (b".entry" | b".func")) => {
                    visit(Item::Function(function(&mut lexer, word == b".entry")?));
                }
                Token::Dot(b".alias") => visit(alias(&mut lexer)?),
                // Debug information.
                Token::Sign(b'{') => {
                    lexer.take_until_closed(b'{', b'}').ok_or(CUT)?;
                }
                // All other tokens neither declare anything that matters nor hide such a declaration.
                _ if token != Token::Sign(b';') => continue,
                _ => {}
            }
            if !matches!(token, Token::Dot(b".extern" | b".visible" | b".common" | b".weak")) {
                linking = Linking::default();
            }
        }
        Ok(())
    }
}

/// Makes the managed variables of a text ordinary ones: blanks take the place of the attribute, so that all else stays where it
/// is. Returns whether there were any.
pub(super) fn make_unmanaged(text: &mut [u8]) -> Result<bool, CodeError> {
    let mut attributes = Vec::new();
    let mut lexer = Lexer::new(Ptx::new(text).text());
    while let Some(token) = lexer.next() {
        if token != Token::Dot(b".attribute") {
            continue;
        }
        let start = lexer.offset() - b".attribute".len();
        let list = lexer.take_sign(b'(').then(|| lexer.take_until_closed(b'(', b')')).flatten();
        let is_managed = |word: &Token<'_>| *word == Token::Dot(b".managed");
        let mut words = Lexer::new(list.unwrap_or_default());
        let first = words.next().is_some_and(|it| is_managed(&it));
        let mut words = words.peekable();
        match (first, words.peek().is_some()) {
            (true, false) => attributes.push(start..lexer.offset()),
            (true, true) => return Err(CodeError::Malformed("a managed variable with further attributes")),
            (false, _) if words.any(|it| is_managed(&it)) => {
                return Err(CodeError::Malformed("a managed variable with further attributes"));
            }
            (false, _) => {}
        }
    }
    for attribute in &attributes {
        if let Some(attribute) = text.get_mut(attribute.clone()) {
            attribute.fill(b' ');
        }
    }
    Ok(!attributes.is_empty())
}

/// The words before a declaration.
#[derive(Clone, Copy)]
struct Linking {
    external: bool,
    binding: Binding,
}

impl Default for Linking {
    fn default() -> Self {
        Self { external: false, binding: Binding::Local }
    }
}

fn target(token: Option<Token<'_>>) -> Option<Arch> {
    match token {
        Some(Token::Word(name)) => Arch::from_name(name),
        _ => None,
    }
}

/// After `.global` or `.const`: reads the declaration to its semicolon.
fn variables<'a>(
    lexer: &mut Lexer<'a>,
    space: Space,
    linking: Linking,
    visit: &mut impl FnMut(Item<'a>),
) -> Result<(), CodeError> {
    const CUT: CodeError = CodeError::Truncated("PTX declaration");
    // .const[2]: a bank, from before PTX 2.2.
    if lexer.take_sign(b'[') {
        lexer.take_until_closed(b'[', b']').ok_or(CUT)?;
    }
    let kind = Type::parse(lexer)?;
    loop {
        let declarator = Declarator::parse(lexer)?;
        let value = match lexer.take_sign(b'=') {
            true => Some(initial(lexer)?),
            false => None,
        };
        let global = if linking.external || kind.size == 0 {
            None
        } else {
            let elements = declarator.elements(value.map(|(_, count)| count))?;
            let size = kind.size.checked_mul(elements);
            Some(Global {
                name: String::from_utf8_lossy(declarator.name).into_owned(),
                size: size.ok_or(CodeError::Malformed("dimensions that are too large"))?,
                space,
                managed: kind.managed,
                binding: linking.binding,
                in_function: false,
                points_to: value.map_or_else(Vec::new, |(text, _)| symbols(text)),
            })
        };
        visit(Item::Variable { global, initial: value.map_or(&[], |(text, _)| text) });
        match lexer.next() {
            Some(Token::Sign(b',')) => {}
            Some(Token::Sign(b';')) => return Ok(()),
            Some(_) => return Err(CodeError::Malformed("a declaration that does not end")),
            None => return Err(CUT),
        }
    }
}

/// The symbols that an initial value names, a few of them. Numbers begin with a digit; `generic` and `mask` are operators.
fn symbols(initial: &[u8]) -> Vec<String> {
    let names = Lexer::new(initial).filter_map(|token| match token {
        Token::Word(b"generic" | b"mask") => None,
        Token::Word(word) if !word.first()?.is_ascii_digit() => Some(String::from_utf8_lossy(word).into_owned()),
        _ => None,
    });
    names.take(MOST_NAMED).collect()
}

/// Reads an initial value up to the comma or semicolon after it. Returns its text and how many
/// elements the outermost braces have.
fn initial<'a>(lexer: &mut Lexer<'a>) -> Result<(&'a [u8], u64), CodeError> {
    let start = lexer.offset();
    let (mut depth, mut commas, mut any) = (0_usize, 0, false);
    loop {
        let ahead = *lexer;
        match lexer.next() {
            Some(Token::Sign(b',' | b';')) if depth == 0 => {
                *lexer = ahead;
                let count = if any { commas + 1 } else { 0 };
                return Ok((lexer.between(start, lexer.offset()), count));
            }
            Some(Token::Sign(b'{' | b'(')) => depth += 1,
            Some(Token::Sign(b'}' | b')')) => depth = depth.saturating_sub(1),
            Some(Token::Sign(b',')) if depth == 1 => {
                commas += 1;
                continue;
            }
            Some(_) => {}
            None => return Err(CodeError::Truncated("PTX initial value")),
        }
        any |= depth > 0 && lexer.peek() != Some(Token::Sign(b'}'));
    }
}

/// After `.entry` or `.func`: reads to the end of the body, or to the semicolon.
fn function<'a>(lexer: &mut Lexer<'a>, kernel: bool) -> Result<Function<'a>, CodeError> {
    const CUT: CodeError = CodeError::Truncated("PTX function");
    let name = loop {
        match lexer.next().ok_or(CUT)? {
            Token::Word(name) => break name,
            // The function's result, or an attribute's list.
            Token::Sign(b'(') => {
                lexer.take_until_closed(b'(', b')').ok_or(CUT)?;
            }
            Token::Dot(_) => {}
            _ => return Err(CodeError::Malformed("a function without a name")),
        }
    };
    let mut params = None;
    let body = loop {
        match lexer.next().ok_or(CUT)? {
            Token::Sign(b'(') => {
                let list = lexer.take_until_closed(b'(', b')').ok_or(CUT)?;
                params.get_or_insert(list);
            }
            Token::Sign(b'{') => break Some(lexer.take_until_closed(b'{', b'}').ok_or(CUT)?),
            Token::Sign(b';') => break None,
            // .maxntid 128, 1, 1 and the like.
            _ => {}
        }
    };
    Ok(Function { kernel, name, params: params.unwrap_or_default(), body })
}

/// After `.alias`.
fn alias<'a>(lexer: &mut Lexer<'a>) -> Result<Item<'a>, CodeError> {
    match (lexer.next(), lexer.next(), lexer.next()) {
        (Some(Token::Word(name)), Some(Token::Sign(b',')), Some(Token::Word(of))) => Ok(Item::Alias { name, of }),
        _ => Err(CodeError::Malformed("an alias without names")),
    }
}

/// Adds the module's variables that are declared inside a function (the compiler moves those that
/// only it uses there).
fn variables_in_function(body: &[u8], globals: &mut Vec<Global>) -> Result<(), CodeError> {
    let mut lexer = Lexer::new(body);
    // Elsewhere `.global` is a part of an opcode.
    let mut starts_statement = true;
    while let Some(token) = lexer.next() {
        let space = match token {
            Token::Dot(b".global") => Some(Space::Global),
            Token::Dot(b".const") => Some(Space::Constant),
            _ => None,
        };
        if let Some(space) = space.filter(|_| starts_statement) {
            variables(&mut lexer, space, Linking::default(), &mut |item| {
                if let Item::Variable { global, .. } = item {
                    globals.extend(global.map(|global| Global { in_function: true, ..global }));
                }
            })?;
        } else {
            starts_statement = matches!(token, Token::Sign(b';' | b'{' | b'}' | b':'));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names, sizes and bindings that ptxas 13.0 makes of this text were compared by hand.
    const TEXT: &[u8] = b"//
.version 9.0
.target sm_90a, debug
.address_size 64
.visible .global .v4 .f32 v4[2]; .weak .global .b16 w[] = {1,2,3};
.common .global .u32 cc; .global .u32 a, b[0x3];
.global .u32 m[][2]={{1,2},{3,4},{5,6}};
.extern .global .u32 elsewhere[]; .global .texref texture;
.visible .entry k(.param .u64 .ptr .global .align 16 p, .param .align 16 .b8 q[3], .param .v2 .f32 r)
.maxntid 1, 1, 1
{
    .reg .b64 %r<3>;
    .global .align 4 .u32 inside = 5;
    ld.global.u32 %q1, [inside];
    ret;
}
\0.global .u32 after;";

    #[test]
    fn declarations() {
        let ptx = Ptx::new(TEXT);
        assert_eq!(ptx.target().unwrap().to_string(), "sm_90a");
        let globals = ptx.globals().unwrap();
        let found: Vec<_> = globals.iter().map(|g| (g.name.as_str(), g.size, g.binding, g.in_function)).collect();
        assert_eq!(
            found,
            [
                ("v4", 32, Binding::Global, false),
                ("w", 6, Binding::Weak, false),
                ("cc", 4, Binding::Global, false),
                ("a", 4, Binding::Local, false),
                ("b", 12, Binding::Local, false),
                ("m", 24, Binding::Local, false),
                ("inside", 4, Binding::Local, true),
            ]
        );
        let kernels = ptx.kernels().unwrap();
        let params = kernels[0].params.as_ref().unwrap();
        let layout: Vec<_> = params.iter().map(|p| (p.offset, p.size)).collect();
        assert_eq!(layout, [(0, 8), (16, 3), (24, 8)]);
    }

    #[test]
    fn what_cannot_be_told_is_an_error() {
        for text in [
            ".global .u32 a[N];",
            ".global .u32 a[];",
            ".global .new a;",
            ".global .u32 a[4",
            ".global .u32 a = {1",
            ".global a;",
            ".global .b64 a[0xffffffffffffffff];",
            ".func f(",
        ] {
            assert!(Ptx::new(text.as_bytes()).globals().is_err(), "{text}");
        }
        assert_eq!(Ptx::new(b"hello").target(), None);
        assert_eq!(Ptx::new(b"").target(), None);
    }
}
