//! Textures and surfaces.

use super::compiler::Compiler;
use super::linker::Refusable;
use super::modifiers::{has, last_type};
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::{Action, Exec, NO_ROW, Row};
use crate::exec::operations::texture::{self, QUERIES, Shape, row_count};
use crate::texture::{Boundary, Geometry};

fn geometry(opcode: &Opcode) -> Refusable<Geometry> {
    opcode.modifiers.iter().find_map(|m| Geometry::named(m)).ok_or_else(|| "geometry".to_owned())
}

/// `{a, b}`, or `a` alone.
fn parts(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(parts) => parts,
        single => std::slice::from_ref(single),
    }
}

impl Compiler<'_, '_> {
    /// The row of the handle, and the coordinates' operands.
    fn textured<'o>(&mut self, operand: &'o Operand) -> Refusable<(Row, &'o [Operand])> {
        let Operand::Texture(handle, at) = operand else { return Err("texture address".to_owned()) };
        Ok((self.source(handle, Type::B64)?, at))
    }

    /// Rows of layer and coordinates. The padding that nvcc adds for a power of two does not count.
    fn coordinates(&mut self, rows: &mut Vec<Row>, geometry: Geometry, at: &[Operand], ty: Type) -> Refusable<()> {
        let mut at = at.iter();
        if geometry.layered() {
            rows.push(self.source(at.next().ok_or("layer")?, Type::U32)?);
        }
        for _ in 0..geometry.coordinates() {
            rows.push(self.source(at.next().ok_or("coordinates")?, ty)?);
        }
        Ok(())
    }

    fn push_shape(&mut self, exec: Exec, handle: Row, shape: Shape, rows: &[Row]) -> Refusable<()> {
        if rows.len() != row_count(&shape) {
            return Err("operands".to_owned());
        }
        let mut inst = self.inst(Action::Run(exec));
        (inst.a, inst.d, inst.imm) = (handle, self.list(rows), shape.pack());
        self.push(inst);
        Ok(())
    }

    /// `tex.2d.v4.f32.f32 {r, g, b, a}, [texture, {x, y}]`, `tex.level`, `tex.grad`, `tld4`.
    pub(super) fn tex(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, from, rest @ ..] = operands else { return Err("operands".to_owned()) };
        let geometry = geometry(opcode)?;
        let types: Vec<Type> = opcode.modifiers.iter().filter_map(|m| Type::named(m)).collect();
        let [result, coordinate] = types[..] else { return Err("types".to_owned()) };
        let float = coordinate == Type::F32;
        if !matches!(result, Type::F32 | Type::S32 | Type::U32) || !(float || coordinate == Type::S32) {
            return Err("types".to_owned());
        }
        let gather = match opcode.name.as_str() {
            "tld4" => {
                let found = ["r", "g", "b", "a"].iter().position(|c| has(opcode, c)).ok_or("component")?;
                found as u32 + 1
            }
            _ => 0,
        };
        let (handle, at) = self.textured(from)?;
        let mut rows = Vec::new();
        for part in parts(to) {
            rows.push(self.destination(part, result)?);
        }
        let values = rows.len() as u32;
        if values != 4 {
            return Err("vector of another length".to_owned());
        }
        self.coordinates(&mut rows, geometry, at, coordinate)?;
        let detail = match rest {
            [] => 0,
            [level] if has(opcode, "level") => {
                rows.push(self.source(level, coordinate)?);
                1
            }
            [dx, dy] if has(opcode, "grad") => {
                for part in [dx, dy] {
                    for n in parts(part).iter().take(geometry.coordinates()) {
                        rows.push(self.source(n, Type::F32)?);
                    }
                }
                2
            }
            _ => return Err("operands".to_owned()),
        };
        let shape = Shape { geometry, values, float, detail, gather, bytes: 0, boundary: Boundary::Trap };
        self.push_shape(texture::fetch(), handle, shape, &rows)
    }

    fn surface_shape(opcode: &Opcode, values: u32) -> Refusable<(Shape, Type)> {
        let ty = last_surface_type(opcode)?;
        let boundary = match () {
            () if has(opcode, "clamp") => Boundary::Clamp,
            () if has(opcode, "zero") => Boundary::Zero,
            () => Boundary::Trap,
        };
        let geometry = geometry(opcode)?;
        Ok((Shape { geometry, values, float: false, detail: 0, gather: 0, bytes: ty.bytes(), boundary }, ty))
    }

    /// `suld.b.2d.v4.b32.trap {a, b, c, d}, [surface, {x, y}]`.
    pub(super) fn surface_load(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, from] = operands else { return Err("operands".to_owned()) };
        let (shape, ty) = Self::surface_shape(opcode, parts(to).len() as u32)?;
        let (handle, at) = self.textured(from)?;
        let mut rows = Vec::new();
        for part in parts(to) {
            rows.push(self.destination(part, ty)?);
        }
        self.coordinates(&mut rows, shape.geometry, at, Type::U32)?;
        self.push_shape(texture::surface::<false>(), handle, shape, &rows)
    }

    /// `sust.b.2d.v4.b32.trap [surface, {x, y}], {a, b, c, d}`.
    pub(super) fn surface_store(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, from] = operands else { return Err("operands".to_owned()) };
        if has(opcode, "p") {
            return Err("formatted".to_owned());
        }
        let (shape, ty) = Self::surface_shape(opcode, parts(from).len() as u32)?;
        let (handle, at) = self.textured(to)?;
        let mut rows = Vec::new();
        for part in parts(from) {
            rows.push(self.source(part, ty)?);
        }
        self.coordinates(&mut rows, shape.geometry, at, Type::U32)?;
        self.push_shape(texture::surface::<true>(), handle, shape, &rows)
    }

    /// `sured.b.add.2d.u32.trap [surface, {x, y}], a`.
    pub(super) fn surface_reduce(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, from] = operands else { return Err("operands".to_owned()) };
        let (mut shape, ty) = Self::surface_shape(opcode, 0)?;
        if has(opcode, "p") || ty.bytes() != 4 {
            return Err("not for this type".to_owned());
        }
        shape.bytes = 4;
        let operation = opcode.modifiers.iter().find_map(|m| texture::reduce(m, ty.signed()));
        let exec = operation.ok_or("operation")?;
        let (handle, at) = self.textured(to)?;
        let value = self.source(from, Type::U32)?;
        let mut rows = Vec::new();
        self.coordinates(&mut rows, shape.geometry, at, Type::U32)?;
        let mut inst = self.inst(Action::Run(exec));
        (inst.a, inst.b, inst.d, inst.imm) = (handle, value, self.list(&rows), shape.pack());
        self.push(inst);
        Ok(())
    }

    /// `txq.width.b32 d, [texture]`, `suq`.
    pub(super) fn texture_query(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, Operand::Memory(handle, 0)] = operands else { return Err("operands".to_owned()) };
        let what = QUERIES.iter().position(|q| has(opcode, q)).ok_or("query")?;
        last_type(opcode)?;
        let handle = self.source(handle, Type::B64)?;
        let d = self.result(to, Type::B32)?;
        debug_assert!(d != NO_ROW);
        self.run(texture::query(), d, &[handle], what as u64);
        Ok(())
    }
}

/// The type of a surface's values, before the modifier for places outside.
fn last_surface_type(opcode: &Opcode) -> Refusable<Type> {
    let ty = opcode.modifiers.iter().rev().find_map(|m| Type::named(m));
    ty.filter(|ty| matches!(ty.bytes(), 1 | 2 | 4 | 8)).ok_or_else(|| "type".to_owned())
}
