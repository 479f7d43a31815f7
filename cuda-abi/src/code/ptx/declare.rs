//! The part that declarations of variables and of parameters have in common.

use super::lexer::{Lexer, Token};
use crate::code::CodeError;

/// The part of a declaration before the names: `.attribute(.managed) .align 8 .v2 .f32`.
#[derive(Debug, Default)]
pub(super) struct Type {
    /// Bytes of one element, vectors multiplied out. 0 for textures, samplers and surfaces, which
    /// have no memory.
    pub(super) size: u64,
    /// The alignment that was asked for, in bytes.
    pub(super) align: Option<u64>,
    /// `.attribute(.managed)`.
    pub(super) managed: bool,
}

impl Type {
    /// Reads up to the first name.
    pub(super) fn parse(lexer: &mut Lexer<'_>) -> Result<Self, CodeError> {
        let mut parsed = Self::default();
        let (mut element, mut vector, mut pointer) = (None, 1, false);
        while let Some(Token::Dot(word)) = lexer.peek() {
            lexer.next();
            match word {
                b".attribute" => {
                    let list = lexer
                        .take_sign(b'(')
                        .then(|| lexer.take_until_closed(b'(', b')'))
                        .flatten()
                        .ok_or(CodeError::Malformed("an attribute without a list"))?;
                    parsed.managed |= Lexer::new(list).any(|t| t == Token::Dot(b".managed"));
                }
                b".align" => {
                    let align = take_number(lexer)
                        .filter(|align| align.is_power_of_two() && *align <= 1 << 20)
                        .ok_or(CodeError::Malformed("a malformed alignment"))?;
                    // After .ptr it is the alignment of what the parameter points to.
                    if !pointer {
                        parsed.align = Some(align);
                    }
                }
                b".ptr" => pointer = true,
                b".v2" => vector = 2,
                b".v4" => vector = 4,
                b".v8" => vector = 8,
                // The space that a parameter points to.
                b".global" | b".const" | b".shared" | b".local" | b".param" if pointer => {}
                _ => element = Some(element_size(word)?),
            }
        }
        let element = element.ok_or(CodeError::Malformed("a declaration without a type"))?;
        parsed.size = element * vector;
        Ok(parsed)
    }
}

/// Bytes of a fundamental type.
fn element_size(word: &[u8]) -> Result<u64, CodeError> {
    match word {
        b".texref" | b".samplerref" | b".surfref" => Ok(0),
        b".b8" | b".u8" | b".s8" => Ok(1),
        b".b16" | b".u16" | b".s16" | b".f16" | b".bf16" => Ok(2),
        b".b32" | b".u32" | b".s32" | b".f32" | b".f16x2" | b".bf16x2" | b".tf32" => Ok(4),
        b".b64" | b".u64" | b".s64" | b".f64" => Ok(8),
        b".b128" => Ok(16),
        _ => Err(CodeError::Malformed("a declaration of an unknown type")),
    }
}

/// A name and how many elements it has.
#[derive(Debug)]
pub(super) struct Declarator<'a> {
    pub(super) name: &'a [u8],
    /// The dimensions multiplied, without the first if it is left open (`[]`).
    elements: u64,
    open: bool,
}

impl<'a> Declarator<'a> {
    /// Reads `name[3][4]`.
    pub(super) fn parse(lexer: &mut Lexer<'a>) -> Result<Self, CodeError> {
        let Some(Token::Word(name)) = lexer.next() else {
            return Err(CodeError::Malformed("a declaration without a name"));
        };
        let mut declarator = Self { name, elements: 1, open: false };
        while lexer.take_sign(b'[') {
            if !declarator.open && declarator.elements == 1 && lexer.take_sign(b']') {
                declarator.open = true;
                continue;
            }
            let count = take_number(lexer)
                .filter(|_| lexer.take_sign(b']'))
                .ok_or(CodeError::Malformed("a dimension that is no number"))?;
            declarator.elements =
                declarator.elements.checked_mul(count).ok_or(CodeError::Malformed("dimensions that are too large"))?;
        }
        Ok(declarator)
    }

    /// How many elements there are, where `initial` says how many the initial value has.
    pub(super) fn elements(&self, initial: Option<u64>) -> Result<u64, CodeError> {
        let first = match (self.open, initial) {
            (false, _) => 1,
            (true, Some(first)) => first,
            (true, None) => return Err(CodeError::Malformed("an array without a size")),
        };
        (self.elements.checked_mul(first)).ok_or(CodeError::Malformed("dimensions that are too large"))
    }
}

/// Takes an integer: decimal, or as in C hexadecimal, octal or binary, perhaps with a `U` after it.
pub(super) fn take_number(lexer: &mut Lexer<'_>) -> Option<u64> {
    let Some(Token::Word(word)) = lexer.peek() else {
        return None;
    };
    lexer.next();
    let word = std::str::from_utf8(word).ok()?;
    let digits = word.strip_suffix(['U', 'u']).unwrap_or(word);
    let (digits, radix) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (digits.get(2..)?, 16),
        [b'0', b'b' | b'B', ..] => (digits.get(2..)?, 2),
        [b'0', _, ..] => (digits.get(1..)?, 8),
        _ => (digits, 10),
    };
    u64::from_str_radix(digits, radix).ok()
}
