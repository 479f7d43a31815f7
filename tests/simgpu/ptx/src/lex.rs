//! Text into tokens.

use crate::fault::ParseError;

/// A token of PTX.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Token<'t> {
    /// A name: of an instruction, a register (`%r1`), a label (`$L__BB0_1`), a symbol.
    Name(&'t str),
    /// `.name`, without its dot: a directive, or a modifier of an instruction.
    Dot(&'t str),
    /// An integer. Its sign is a token of its own.
    Int(u64),
    /// The bits of a single precision number (`0f3F800000`).
    F32(u32),
    /// The bits of a double precision number (`0d...`, or a decimal one).
    F64(u64),
    /// The text between quotation marks.
    Text(&'t str),
    /// Any other character.
    Mark(u8),
    /// The end of the text.
    End,
}

/// A token and the line it is on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placed<'t> {
    pub(crate) token: Token<'t>,
    pub(crate) line: u32,
}

/// All tokens of a text; the last is [`Token::End`].
pub(crate) fn lex(text: &str) -> Result<Vec<Placed<'_>>, ParseError> {
    let mut lexer = Lexer { text, bytes: text.as_bytes(), at: 0, line: 1 };
    // A token has about four characters; one allocation is cheaper than many.
    let mut tokens = Vec::with_capacity(text.len() / 4 + 1);
    loop {
        lexer.skip_blank()?;
        let line = lexer.line;
        let token = lexer.token()?;
        tokens.push(Placed { token, line });
        if token == Token::End {
            return Ok(tokens);
        }
    }
}

struct Lexer<'t> {
    text: &'t str,
    bytes: &'t [u8],
    at: usize,
    line: u32,
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$'
}

impl<'t> Lexer<'t> {
    fn error<T>(&self, what: impl Into<String>) -> Result<T, ParseError> {
        Err(ParseError { line: self.line, what: what.into() })
    }

    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn skip_blank(&mut self) -> Result<(), ParseError> {
        while self.at < self.bytes.len() {
            match (self.peek(0), self.peek(1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                // A zero byte ends the text in a driver's image, and is blank anywhere else.
                (b' ' | b'\t' | b'\r' | 0, _) => self.at += 1,
                (b'/', b'/') => {
                    while self.at < self.bytes.len() && self.bytes[self.at] != b'\n' {
                        self.at += 1;
                    }
                }
                (b'/', b'*') => {
                    let Some(length) = self.text.get(self.at..).and_then(|t| t.find("*/")) else {
                        return self.error("comment without end");
                    };
                    let comment = &self.bytes[self.at..self.at + length];
                    self.line += comment.iter().map(|&b| u32::from(b == b'\n')).sum::<u32>();
                    self.at += length + 2;
                }
                // A preprocessor's line mark.
                (b'#', _) => {
                    while self.at < self.bytes.len() && self.bytes[self.at] != b'\n' {
                        self.at += 1;
                    }
                }
                _ => break,
            }
        }
        Ok(())
    }

    fn take_while(&mut self, keep: impl Fn(u8) -> bool) -> &'t str {
        let start = self.at;
        while self.at < self.bytes.len() && keep(self.bytes[self.at]) {
            self.at += 1;
        }
        // Only ASCII characters are ever kept, so this is a character boundary.
        self.text.get(start..self.at).unwrap_or("")
    }

    fn token(&mut self) -> Result<Token<'t>, ParseError> {
        if self.at >= self.bytes.len() {
            return Ok(Token::End);
        }
        match self.peek(0) {
            b'0'..=b'9' => self.number(),
            b'%' if is_name(self.peek(1)) => {
                let start = self.at;
                self.at += 1;
                self.take_while(is_name);
                Ok(Token::Name(self.text.get(start..self.at).unwrap_or("")))
            }
            byte if is_name(byte) => Ok(Token::Name(self.take_while(is_name))),
            b'.' if is_name(self.peek(1)) => {
                self.at += 1;
                let start = self.at;
                self.take_while(is_name);
                // `.shared::cta` is one modifier.
                while self.peek(0) == b':' && self.peek(1) == b':' && is_name(self.peek(2)) {
                    self.at += 2;
                    self.take_while(is_name);
                }
                Ok(Token::Dot(self.text.get(start..self.at).unwrap_or("")))
            }
            b'"' => {
                let start = self.at + 1;
                let Some(length) = self.text.get(start..).and_then(|t| t.find('"')) else {
                    return self.error("string without end");
                };
                let inside = &self.bytes[start..start + length];
                self.line += inside.iter().map(|&b| u32::from(b == b'\n')).sum::<u32>();
                self.at = start + length + 1;
                Ok(Token::Text(self.text.get(start..start + length).unwrap_or("")))
            }
            byte if byte.is_ascii() => {
                self.at += 1;
                Ok(Token::Mark(byte))
            }
            _ => self.error("character that is not ASCII"),
        }
    }

    fn number(&mut self) -> Result<Token<'t>, ParseError> {
        let second = self.peek(1);
        if self.peek(0) == b'0' && matches!(second, b'f' | b'F' | b'd' | b'D') {
            self.at += 2;
            let digits = self.take_while(|b| b.is_ascii_hexdigit());
            let single = matches!(second, b'f' | b'F');
            if digits.len() != if single { 8 } else { 16 } {
                return self.error("floating point number with a wrong count of digits");
            }
            let Ok(bits) = u64::from_str_radix(digits, 16) else {
                return self.error("bad floating point number");
            };
            return Ok(if single { Token::F32(bits as u32) } else { Token::F64(bits) });
        }
        let (radix, skip) = match (self.peek(0), second) {
            (b'0', b'x' | b'X') => (16, 2),
            (b'0', b'b' | b'B') => (2, 2),
            (b'0', b'0'..=b'7') => (8, 1),
            _ => (10, 0),
        };
        let start = self.at;
        self.at += skip;
        let digits = self.take_while(|b| if radix == 16 { b.is_ascii_hexdigit() } else { b.is_ascii_digit() });
        if radix == 10 || radix == 8 {
            let fraction = self.peek(0) == b'.' && self.peek(1).is_ascii_digit();
            if fraction || matches!(self.peek(0), b'e' | b'E') {
                return self.decimal(start);
            }
        }
        let Ok(value) = u64::from_str_radix(digits, radix) else {
            return self.error("bad number");
        };
        if self.peek(0) == b'U' {
            self.at += 1;
        }
        Ok(Token::Int(value))
    }

    fn decimal(&mut self, start: usize) -> Result<Token<'t>, ParseError> {
        if self.peek(0) == b'.' {
            self.at += 1;
            self.take_while(|b| b.is_ascii_digit());
        }
        if matches!(self.peek(0), b'e' | b'E') {
            self.at += 1;
            if matches!(self.peek(0), b'+' | b'-') {
                self.at += 1;
            }
            self.take_while(|b| b.is_ascii_digit());
        }
        match self.text.get(start..self.at).and_then(|t| t.parse::<f64>().ok()) {
            Some(value) => Ok(Token::F64(value.to_bits())),
            None => self.error("bad number"),
        }
    }
}
