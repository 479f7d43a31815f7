//! Words of PTX text (PTX ISA, chapter "Syntax").

/// A token of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// An identifier, the first part of an opcode, a register or a number.
    Word(&'a [u8]),
    /// A dot and what follows it: a directive, a type, a later part of an opcode.
    Dot(&'a [u8]),
    /// A string, without its quotes.
    Text,
    /// Any other byte.
    Sign(u8),
}

/// Splits text into words, leaving out white space and comments.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
}

fn is_follow(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$'
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { text, at: 0 }
    }

    /// The bytes from the start of the text to where the lexer is.
    pub(super) fn offset(&self) -> usize {
        self.at
    }

    /// The text between two offsets.
    pub(super) fn between(&self, start: usize, end: usize) -> &'a [u8] {
        self.text.get(start..end).unwrap_or_default()
    }

    /// The next word, without taking it.
    pub(super) fn peek(&self) -> Option<Token<'a>> {
        let mut ahead = *self;
        ahead.next()
    }

    /// Takes the next word if it is `sign`.
    pub(super) fn take_sign(&mut self, sign: u8) -> bool {
        let mut ahead = *self;
        let found = ahead.next() == Some(Token::Sign(sign));
        if found {
            *self = ahead;
        }
        found
    }

    /// After an opening bracket: goes past the closing one, and returns what is between them.
    /// `None` if the text ends before.
    pub(super) fn take_until_closed(&mut self, open: u8, close: u8) -> Option<&'a [u8]> {
        let start = self.at;
        let mut depth = 1_usize;
        loop {
            let end = self.at;
            match self.next()? {
                Token::Sign(sign) if sign == open => depth += 1,
                Token::Sign(sign) if sign == close => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Some(self.between(start, end));
            }
        }
    }

    /// Goes past bytes while they are as asked, and returns them.
    fn take_while(&mut self, accept: impl Fn(u8) -> bool) -> &'a [u8] {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let len = rest.iter().position(|&byte| !accept(byte)).unwrap_or(rest.len());
        self.at += len;
        rest.get(..len).unwrap_or_default()
    }

    fn byte(&self, ahead: usize) -> Option<u8> {
        self.text.get(self.at + ahead).copied()
    }

    fn skip_blanks(&mut self) {
        loop {
            self.take_while(|byte| byte.is_ascii_whitespace());
            match (self.byte(0), self.byte(1)) {
                (Some(b'/'), Some(b'/')) => {
                    self.take_while(|byte| byte != b'\n');
                }
                (Some(b'/'), Some(b'*')) => {
                    self.at += 2;
                    while let Some(byte) = self.byte(0) {
                        self.at += 1;
                        if byte == b'*' && self.byte(0) == Some(b'/') {
                            self.at += 1;
                            break;
                        }
                    }
                }
                _ => return,
            }
        }
    }

    /// After the opening quote: goes past the closing one.
    fn skip_text(&mut self) {
        while let Some(byte) = self.byte(0) {
            self.at += 1;
            match byte {
                b'"' => return,
                b'\\' => self.at += 1,
                _ => {}
            }
        }
        self.at = self.at.min(self.text.len());
    }
}

impl<'a> Iterator for Lexer<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        self.skip_blanks();
        let first = self.byte(0)?;
        if is_follow(first) {
            return Some(Token::Word(self.take_while(is_follow)));
        }
        let start = self.at;
        self.at += 1;
        match first {
            // Registers; a lone % is a sign that means nothing.
            b'%' => {
                self.take_while(is_follow);
                Some(Token::Word(self.between(start, self.at)))
            }
            b'.' => {
                self.take_while(is_follow);
                Some(Token::Dot(self.between(start, self.at)))
            }
            b'"' => {
                self.skip_text();
                Some(Token::Text)
            }
            sign => Some(Token::Sign(sign)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        let text = br#"// c
            .visible .entry a$b(/* ( */ .param .u64 p_0) { ld.global.u32 %r1, [x+4]; "a\";b" }"#;
        let words: Vec<_> = Lexer::new(text).collect();
        assert_eq!(words.first(), Some(&Token::Dot(b".visible")));
        assert_eq!(words.get(2), Some(&Token::Word(b"a$b")));
        assert_eq!(words.get(3), Some(&Token::Sign(b'(')));
        assert!(words.contains(&Token::Word(b"%r1")));
        assert_eq!(words.get(words.len() - 2), Some(&Token::Text));
        let mut lexer = Lexer::new(b"a { b { c } } d");
        assert_eq!(lexer.next(), Some(Token::Word(b"a")));
        assert!(lexer.take_sign(b'{'));
        assert_eq!(lexer.take_until_closed(b'{', b'}'), Some(&b" b { c }"[..]));
        assert_eq!(lexer.next(), Some(Token::Word(b"d")));
    }

    #[test]
    fn ends_anywhere() {
        for text in ["/*", "/", "//", "\"", "\"\\", ".", "%", "{", "a"] {
            let mut lexer = Lexer::new(text.as_bytes());
            assert!(lexer.by_ref().count() <= 1, "{text}");
            assert_eq!(lexer.offset(), text.len());
        }
    }
}
