//! Declarations of variables and parameters, and the first content of variables.

use super::directive::Linkage;
use super::{Parse, Parser};
use crate::ast::{Type, Var, VarSpace};
use crate::declaration::{Global, Relocation, Space};
use crate::lex::Token;

/// The largest variable; no device has more memory.
const SIZE_LIMIT: u64 = 1 << 40;
/// The most bytes of first content that a variable may list.
const INIT_LIMIT: usize = 1 << 30;

/// A declaration up to its name.
struct Declared {
    element: u64,
    align: u64,
    managed: bool,
}

impl<'t> Parser<'_, 't> {
    /// `.align 4 .v2 .f32`: the part between a space and a name.
    fn declared_type(&mut self) -> Parse<Declared> {
        let mut align = None;
        let mut lanes = 1;
        let mut managed = false;
        loop {
            managed |= self.attributes()?;
            let Token::Dot(name) = self.peek() else { return self.unexpected("a type") };
            self.at += 1;
            match name {
                "align" => {
                    let value = self.expect_int()?;
                    if !value.is_power_of_two() || value > 1 << 20 {
                        return self.error("alignment that is not a power of two");
                    }
                    align = Some(value);
                }
                "v2" => lanes = 2,
                "v4" => lanes = 4,
                "v8" => lanes = 8,
                // The space that a pointer parameter points to; not needed.
                "ptr" | "global" | "const" | "shared" | "local" => {}
                "texref" | "samplerref" | "surfref" => {
                    return Ok(Declared { element: 8, align: 8, managed });
                }
                _ => {
                    let Some(ty) = Type::named(name) else {
                        self.at -= 1;
                        return self.unexpected("a type");
                    };
                    // `.param .u64 .ptr .global .align 8 name`
                    if self.take_dot("ptr") {
                        while let Token::Dot(space) = self.peek() {
                            self.at += 1;
                            if space == "align" {
                                self.expect_int()?;
                            }
                        }
                    }
                    let element = u64::from(ty.bytes()) * lanes;
                    return Ok(Declared { element, align: align.unwrap_or(element), managed });
                }
            }
        }
    }

    /// The dimensions behind a name: the number of elements, or none for empty brackets.
    fn element_count(&mut self) -> Parse<Option<u64>> {
        let mut count = Some(1u64);
        while self.take_mark(b'[') {
            if self.take_mark(b']') {
                count = None;
                continue;
            }
            let size = self.expect_int()?;
            self.expect_mark(b']')?;
            count = count.and_then(|c| c.checked_mul(size)).filter(|&c| c <= SIZE_LIMIT);
            if count.is_none() {
                return self.error("variable too large");
            }
        }
        Ok(count)
    }

    fn sized(&self, declared: &Declared, count: u64) -> Parse<u64> {
        match count.checked_mul(declared.element) {
            Some(size) if size <= SIZE_LIMIT => Ok(size),
            _ => self.error("variable too large"),
        }
    }

    /// One parameter of a function, in its list.
    pub(super) fn parameter(&mut self) -> Parse<Var> {
        let Token::Dot("param" | "reg") = self.peek() else {
            return self.unexpected(".param");
        };
        self.at += 1;
        let declared = self.declared_type()?;
        let name = self.expect_name()?.to_owned();
        let count = self.element_count()?;
        let size = self.sized(&declared, count.unwrap_or(0))?;
        let unsized_ = count.is_none();
        Ok(Var { name, space: VarSpace::Param, size, align: declared.align, unsized_ })
    }

    /// Variables of a function: `.shared .align 4 .b8 name[16];`, the space being the next token.
    pub(super) fn local_variables(&mut self, space: VarSpace) -> Parse<Vec<Var>> {
        self.at += 1;
        let declared = self.declared_type()?;
        let mut vars = Vec::new();
        loop {
            let name = self.expect_name()?.to_owned();
            let count = self.element_count()?;
            let size = self.sized(&declared, count.unwrap_or(0))?;
            let unsized_ = count.is_none();
            vars.push(Var { name, space, size, align: declared.align, unsized_ });
            if !self.take_mark(b',') {
                break;
            }
        }
        self.expect_mark(b';')?;
        Ok(vars)
    }

    /// A variable of the module's scope.
    pub(super) fn module_variable(&mut self, linkage: Linkage) -> Parse<()> {
        let space = self.next();
        // A constant bank's number, in old PTX.
        if self.take_mark(b'[') {
            self.expect_int()?;
            self.expect_mark(b']')?;
        }
        let declared = self.declared_type()?;
        loop {
            let name = self.expect_name()?.to_owned();
            let mut count = self.element_count()?;
            let (mut init, mut relocations) = (Vec::new(), Vec::new());
            if self.take_mark(b'=') {
                self.initialiser(&declared, &mut init, &mut relocations)?;
                count = count.or(Some((init.len() as u64).div_ceil(declared.element.max(1))));
            }
            let size = self.sized(&declared, count.unwrap_or(0))?;
            if init.len() as u64 > size {
                return self.error("more initial values than the variable holds");
            }
            if space == Token::Dot("shared") {
                let unsized_ = count.is_none() || linkage.external;
                let (space, align) = (VarSpace::Shared, declared.align);
                self.parsed.ast.shared.push(Var { name, space, size, align, unsized_ });
            } else {
                self.add_global(Global {
                    name,
                    space: if space == Token::Dot("const") { Space::Const } else { Space::Global },
                    size,
                    align: declared.align,
                    init,
                    relocations,
                    managed: declared.managed,
                    external: linkage.external,
                    visible: linkage.visible,
                });
            }
            if !self.take_mark(b',') {
                break;
            }
        }
        self.expect_mark(b';')
    }

    fn add_global(&mut self, global: Global) {
        let globals = &mut self.parsed.globals;
        // A declaration may come before its definition.
        match globals.iter_mut().rev().find(|known| known.name == global.name) {
            Some(known) if known.external => *known = global,
            Some(_) => {}
            None => globals.push(global),
        }
    }

    fn initialiser(&mut self, declared: &Declared, init: &mut Vec<u8>, relocations: &mut Vec<Relocation>) -> Parse<()> {
        if init.len() > INIT_LIMIT {
            return self.error("initial values too long");
        }
        if self.take_mark(b'{') {
            return self.nested(|this| {
                while !this.take_mark(b'}') {
                    this.initialiser(declared, init, relocations)?;
                    if !this.take_mark(b',') && !this.is_mark(b'}') {
                        return this.unexpected(", or }");
                    }
                }
                Ok(())
            });
        }
        let width = usize::try_from(declared.element.clamp(1, 8)).unwrap_or(8);
        let offset = init.len() as u64;
        let mut relocation = |symbol: &str, addend, shift, width: usize| {
            let (symbol, width) = (symbol.to_owned(), width as u8);
            relocations.push(Relocation { offset, width, shift, symbol, addend });
        };
        let negative = self.take_mark(b'-');
        let bits = match self.next() {
            Token::Int(mask) if self.take_mark(b'(') => {
                // `0xff00(symbol)`: one byte of an address.
                let (symbol, addend) = self.symbol_value()?;
                self.expect_mark(b')')?;
                relocation(symbol, addend, mask.trailing_zeros() as u8, width);
                0
            }
            Token::Int(value) if negative => value.wrapping_neg(),
            Token::Int(value) => value,
            Token::F32(bits) => u64::from(bits ^ (u32::from(negative) << 31)),
            Token::F64(bits) if width == 4 => {
                let value = f64::from_bits(bits ^ (u64::from(negative) << 63));
                u64::from((value as f32).to_bits())
            }
            Token::F64(bits) => bits ^ (u64::from(negative) << 63),
            Token::Name(_) => {
                self.at -= 1;
                let (symbol, addend) = self.symbol_value()?;
                relocation(symbol, addend, 0, width);
                0
            }
            _ => {
                self.at = self.at.saturating_sub(1);
                return self.unexpected("an initial value");
            }
        };
        init.extend_from_slice(&bits.to_le_bytes()[..width]);
        Ok(())
    }

    /// `symbol`, `generic(symbol)`, either with `+ 4`.
    fn symbol_value(&mut self) -> Parse<(&'t str, i64)> {
        let mut addend = 0i64;
        let mut name = self.expect_name()?;
        if name == "generic" && self.take_mark(b'(') {
            (name, addend) = self.nested(Self::symbol_value)?;
            self.expect_mark(b')')?;
        }
        while matches!(self.peek(), Token::Mark(b'+' | b'-')) {
            addend = addend.wrapping_add(self.expect_signed()?);
        }
        Ok((name, addend))
    }
}
