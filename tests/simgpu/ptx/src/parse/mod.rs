//! The parser, from tokens to a module.

mod body;
mod directive;
mod operand;
mod variable;

use std::collections::HashMap;

use crate::ast::{Ast, Opcode};
use crate::declaration::Global;
use crate::fault::ParseError;
use crate::lex::{Placed, Token, lex};

/// The results of parsing a text.
#[derive(Debug, Default)]
pub(crate) struct Parsed {
    pub(crate) version: String,
    pub(crate) target: String,
    pub(crate) globals: Vec<Global>,
    pub(crate) ast: Ast,
}

/// Parses a text.
pub(crate) fn parse(text: &str) -> Result<Parsed, ParseError> {
    let tokens = lex(text)?;
    let mut parser = Parser { tokens: &tokens, at: 0, parsed: Parsed::default(), opcodes: HashMap::new(), nesting: 0 };
    parser.module()?;
    Ok(parser.parsed)
}

/// The limit of nested brackets. Real PTX needs three or four; without a limit a hostile text could use up the stack.
const NESTING_LIMIT: u32 = 64;

/// A cursor over the tokens, and the results so far.
pub(super) struct Parser<'p, 't> {
    tokens: &'p [Placed<'t>],
    at: usize,
    parsed: Parsed,
    opcodes: HashMap<Opcode, u32>,
    nesting: u32,
}

type Parse<T> = Result<T, ParseError>;

impl<'t> Parser<'_, 't> {
    fn placed(&self, ahead: usize) -> Placed<'t> {
        let end = Placed { token: Token::End, line: 0 };
        self.tokens.get(self.at + ahead).or(self.tokens.last()).copied().unwrap_or(end)
    }

    fn peek(&self) -> Token<'t> {
        self.placed(0).token
    }

    fn line(&self) -> u32 {
        self.placed(0).line
    }

    fn next(&mut self) -> Token<'t> {
        let token = self.peek();
        if self.at < self.tokens.len() {
            self.at += 1;
        }
        token
    }

    fn error<T>(&self, what: impl Into<String>) -> Parse<T> {
        Err(ParseError { line: self.line(), what: what.into() })
    }

    fn unexpected<T>(&self, wanted: &str) -> Parse<T> {
        let found = match self.peek() {
            Token::Name(name) => name.to_owned(),
            Token::Dot(name) => format!(".{name}"),
            Token::Int(value) => value.to_string(),
            Token::F32(_) | Token::F64(_) => "a floating point number".to_owned(),
            Token::Text(_) => "a string".to_owned(),
            Token::Mark(byte) => char::from(byte).to_string(),
            Token::End => "the end".to_owned(),
        };
        self.error(format!("expected {wanted}, found {found}"))
    }

    fn is_mark(&self, mark: u8) -> bool {
        self.peek() == Token::Mark(mark)
    }

    fn take_mark(&mut self, mark: u8) -> bool {
        let found = self.is_mark(mark);
        if found {
            self.at += 1;
        }
        found
    }

    fn expect_mark(&mut self, mark: u8) -> Parse<()> {
        if self.take_mark(mark) { Ok(()) } else { self.unexpected(&char::from(mark).to_string()) }
    }

    fn take_dot(&mut self, name: &str) -> bool {
        let found = self.peek() == Token::Dot(name);
        if found {
            self.at += 1;
        }
        found
    }

    fn expect_name(&mut self) -> Parse<&'t str> {
        match self.peek() {
            Token::Name(name) => {
                self.at += 1;
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn expect_int(&mut self) -> Parse<u64> {
        match self.peek() {
            Token::Int(value) => {
                self.at += 1;
                Ok(value)
            }
            _ => self.unexpected("an integer"),
        }
    }

    fn expect_u32(&mut self) -> Parse<u32> {
        let value = self.expect_int()?;
        u32::try_from(value).or_else(|_| self.error("number too large"))
    }

    /// An integer with an optional sign; `+-4` is one too.
    fn expect_signed(&mut self) -> Parse<i64> {
        self.take_mark(b'+');
        let negative = self.take_mark(b'-');
        let value = self.expect_int()?.cast_signed();
        Ok(if negative { value.wrapping_neg() } else { value })
    }

    /// Runs `inner` one level of brackets deeper.
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parse<T>) -> Parse<T> {
        if self.nesting >= NESTING_LIMIT {
            return self.error("nested too deeply");
        }
        self.nesting += 1;
        let result = inner(self);
        self.nesting -= 1;
        result
    }

    /// Skips the rest of the line that the cursor is on (`.loc`, `.file`).
    fn skip_line(&mut self, line: u32) {
        while self.peek() != Token::End && self.line() == line {
            self.at += 1;
        }
    }

    /// Skips to just behind the next `;`.
    fn skip_statement(&mut self) -> Parse<()> {
        loop {
            match self.next() {
                Token::Mark(b';') => return Ok(()),
                Token::End => return self.unexpected(";"),
                _ => {}
            }
        }
    }

    /// The number of an opcode; equal opcodes have the same.
    fn intern_opcode(&mut self, opcode: Opcode) -> u32 {
        if let Some(&number) = self.opcodes.get(&opcode) {
            return number;
        }
        let number = self.parsed.ast.opcodes.len() as u32;
        self.parsed.ast.opcodes.push(opcode.clone());
        self.opcodes.insert(opcode, number);
        number
    }
}
