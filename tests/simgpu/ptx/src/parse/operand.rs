//! Operands of instructions.

use super::body::{BodyBuilder, Entity};
use super::{Parse, Parser};
use crate::ast::Operand;
use crate::lex::Token;

/// Special registers without components, and those with `.x`, `.y` and `.z` spelled out.
const SPECIAL: &[&str] = &[
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    "%gridid",
    "%lanemask_eq",
    "%lanemask_lt",
    "%lanemask_le",
    "%lanemask_gt",
    "%lanemask_ge",
    "%clock",
    "%clock_hi",
    "%clock64",
    "%globaltimer",
    "%globaltimer_lo",
    "%globaltimer_hi",
    "%total_smem_size",
    "%dynamic_smem_size",
    "%aggr_smem_size",
    "%envreg1",
    "%envreg2",
    "%envreg0",
    "%current_graph_exec",
    "%clusterid.x",
    "%clusterid.y",
    "%clusterid.z",
    "%nclusterid.x",
    "%nclusterid.y",
    "%nclusterid.z",
    "%cluster_ctaid.x",
    "%cluster_ctaid.y",
    "%cluster_ctaid.z",
    "%cluster_nctaid.x",
    "%cluster_nctaid.y",
    "%cluster_nctaid.z",
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%is_explicit_cluster",
    "%reserved_smem_offset_begin",
    "%reserved_smem_offset_end",
    "%reserved_smem_offset_cap",
];

fn special(name: &str, component: Option<&str>) -> Option<&'static str> {
    let matches = |known: &&&str| match component {
        Some(component) => known.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')) == Some(component),
        None => **known == name,
    };
    SPECIAL.iter().find(matches).copied()
}

impl<'t> Parser<'_, 't> {
    pub(super) fn operand(&mut self, builder: &mut BodyBuilder<'t>) -> Parse<Operand> {
        let operand = match self.peek() {
            Token::Mark(b'{') => Operand::Vector(self.operands(b'}', builder)?),
            Token::Mark(b'(') => Operand::List(self.operands(b')', builder)?),
            Token::Mark(b'[') => self.address(builder)?,
            Token::Mark(b'!') => {
                self.at += 1;
                Operand::Not(Box::new(self.nested(|this| this.operand(builder))?))
            }
            Token::Mark(b'-' | b'+') => self.negative()?,
            Token::Int(value) => {
                self.at += 1;
                Operand::Int(value.cast_signed())
            }
            Token::F32(bits) => {
                self.at += 1;
                Operand::F32(bits)
            }
            Token::F64(bits) => {
                self.at += 1;
                Operand::F64(bits)
            }
            Token::Name(_) => self.named(builder)?,
            _ => return self.unexpected("an operand"),
        };
        if self.take_mark(b'|') {
            let second = self.nested(|this| this.operand(builder))?;
            return Ok(Operand::Pair(Box::new(operand), Box::new(second)));
        }
        Ok(operand)
    }

    fn operands(&mut self, close: u8, builder: &mut BodyBuilder<'t>) -> Parse<Vec<Operand>> {
        self.at += 1;
        self.nested(|this| {
            let mut operands = Vec::new();
            while !this.take_mark(close) {
                operands.push(this.operand(builder)?);
                if !this.take_mark(b',') && !this.is_mark(close) {
                    return this.unexpected("a comma");
                }
            }
            Ok(operands)
        })
    }

    fn negative(&mut self) -> Parse<Operand> {
        let negative = self.next() == Token::Mark(b'-');
        match self.next() {
            Token::Int(value) => {
                let value = value.cast_signed();
                Ok(Operand::Int(if negative { value.wrapping_neg() } else { value }))
            }
            Token::F32(bits) => Ok(Operand::F32(bits ^ (u32::from(negative) << 31))),
            Token::F64(bits) => Ok(Operand::F64(bits ^ (u64::from(negative) << 63))),
            _ => {
                self.at = self.at.saturating_sub(1);
                self.unexpected("a number")
            }
        }
    }

    /// `[base]`, `[base + 4]`, `[base + -4]`, `[texture, {x, y}]`; anything else in brackets is no ordinary access.
    fn address(&mut self, builder: &mut BodyBuilder<'t>) -> Parse<Operand> {
        self.at += 1;
        let base = self.nested(|this| this.operand(builder))?;
        let mut offset = 0i64;
        let mut ordinary = true;
        while matches!(self.peek(), Token::Mark(b'+' | b'-')) {
            offset = offset.wrapping_add(self.expect_signed()?);
        }
        let mut more = Vec::new();
        while self.take_mark(b',') {
            more.push(self.nested(|this| this.operand(builder))?);
            ordinary = false;
        }
        self.expect_mark(b']')?;
        if let ([Operand::Vector(coordinates)], 0) = (more.as_slice(), offset) {
            return Ok(Operand::Texture(Box::new(base), coordinates.clone()));
        }
        // An addend that was already taken with a name belongs to the address.
        let (base, inner) = match base {
            Operand::Var(var, addend) => (Operand::Var(var, 0), addend),
            Operand::Name(name, addend) => (Operand::Name(name, 0), addend),
            base => (base, 0),
        };
        let offset = offset.wrapping_add(inner);
        Ok(if ordinary { Operand::Memory(Box::new(base), offset) } else { Operand::Other })
    }

    fn named(&mut self, builder: &mut BodyBuilder<'t>) -> Parse<Operand> {
        let name = self.expect_name()?;
        let component = match self.peek() {
            Token::Dot(component @ ("x" | "y" | "z" | "w" | "r" | "g" | "b" | "a")) => {
                self.at += 1;
                Some(component)
            }
            _ => None,
        };
        match builder.lookup(name) {
            Some(Entity::Register(_)) if component.is_some() => return Ok(Operand::Other),
            Some(Entity::Register(register)) => return Ok(Operand::Reg(register)),
            Some(Entity::Variable(var)) => return Ok(Operand::Var(var, self.addend()?)),
            None => {}
        }
        match name {
            "_" => return Ok(Operand::Sink),
            "WARP_SZ" => return Ok(Operand::Int(32)),
            _ => {}
        }
        if name.starts_with('%') {
            return Ok(special(name, component).map_or(Operand::Other, Operand::Special));
        }
        let index = builder.later(name);
        Ok(Operand::Name(index, self.addend()?))
    }

    /// `+ 4` behind a symbol.
    fn addend(&mut self) -> Parse<i64> {
        let mut addend = 0i64;
        while matches!(self.peek(), Token::Mark(b'+' | b'-')) {
            addend = addend.wrapping_add(self.expect_signed()?);
        }
        Ok(addend)
    }
}
