//! `tex`, `tld4`, `suld`, `sust`, `sured`: rows of coordinates and values for the textures of the launch.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::exec::machine::{Access, Core, Exec, Flow, Inst, Lanes, NO_ROW, Row};
use crate::fault::FaultKind;
use crate::texture::{Boundary, Coordinates, Detail, Fetch, Geometry, Spot};

/// The shape of an instruction: the bits of [`Inst::imm`]. The rows are in the program's list at [`Inst::d`]: results or values
/// first, then layer, coordinates, and the level or gradients.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) geometry: Geometry,
    /// The number of a load's results or a store's values.
    pub(crate) values: u32,
    /// Whether coordinates are floating point numbers.
    pub(crate) float: bool,
    /// 0: none; 1: a level; 2: gradients.
    pub(crate) detail: u32,
    /// The component that is gathered, plus one.
    pub(crate) gather: u32,
    /// Bytes of one value of a surface.
    pub(crate) bytes: u32,
    pub(crate) boundary: Boundary,
}

const GEOMETRIES: [Geometry; 7] =
    [Geometry::D1, Geometry::D2, Geometry::D3, Geometry::A1, Geometry::A2, Geometry::Cube, Geometry::ACube];
const BOUNDARIES: [Boundary; 3] = [Boundary::Trap, Boundary::Clamp, Boundary::Zero];

impl Shape {
    pub(crate) fn pack(self) -> u64 {
        let geometry = GEOMETRIES.iter().position(|g| *g == self.geometry).unwrap_or(0) as u64;
        let boundary = BOUNDARIES.iter().position(|b| *b == self.boundary).unwrap_or(0) as u64;
        geometry
            | u64::from(self.values) << 4
            | u64::from(self.float) << 8
            | u64::from(self.detail) << 9
            | u64::from(self.gather) << 12
            | u64::from(self.bytes) << 16
            | boundary << 24
    }

    fn unpack(bits: u64) -> Self {
        let field = |at: u32, width: u32| (bits >> at) as u32 & ((1 << width) - 1);
        Shape {
            geometry: GEOMETRIES.get(field(0, 4) as usize).copied().unwrap_or(Geometry::D1),
            values: field(4, 4),
            float: field(8, 1) != 0,
            detail: field(9, 2),
            gather: field(12, 4),
            bytes: field(16, 8),
            boundary: BOUNDARIES.get(field(24, 2) as usize).copied().unwrap_or(Boundary::Trap),
        }
    }
}

/// The rows of an instruction after its values: layer, coordinates, level.
struct Rows<'r> {
    rows: &'r [Row],
}

impl<'r> Rows<'r> {
    fn next(&mut self) -> Row {
        let Some((first, rest)) = self.rows.split_first() else { return NO_ROW };
        self.rows = rest;
        *first
    }

    fn floats(&mut self, w: &Core<'_>, lane: usize, count: usize) -> [f32; 3] {
        let mut all = [0.0; 3];
        all.iter_mut().take(count).for_each(|value| *value = w.get(self.next(), lane));
        all
    }

    fn integers(&mut self, w: &Core<'_>, lane: usize, count: usize) -> [i32; 3] {
        let mut all = [0; 3];
        all.iter_mut().take(count).for_each(|value| *value = w.get(self.next(), lane));
        all
    }

    fn layer(&mut self, w: &Core<'_>, lane: usize, geometry: Geometry) -> u32 {
        if geometry.layered() { w.get(self.next(), lane) } else { 0 }
    }
}

/// The number of rows that [`Shape`] has.
pub(crate) fn row_count(shape: &Shape) -> usize {
    let n = shape.geometry.coordinates();
    let detail = match shape.detail {
        0 => 0,
        1 => 1,
        _ => 2 * n,
    };
    shape.values as usize + usize::from(shape.geometry.layered()) + n + detail
}

fn list<'l>(w: &Core<'l>, i: &Inst, shape: &Shape) -> (&'l [Row], Rows<'l>) {
    let rows = w.launch.lists.get(i.d as usize..).and_then(|l| l.get(..row_count(shape))).unwrap_or(&[]);
    let (values, rest) = rows.split_at((shape.values as usize).min(rows.len()));
    (values, Rows { rows: rest })
}

/// `tex` and `tld4`.
pub(crate) fn fetch() -> Exec {
    |w, i| {
        let shape = Shape::unpack(i.imm);
        let Some(textures) = w.launch.env.textures else { return w.fail(FaultKind::Unmapped, 0, 0) };
        for lane in Lanes(w.active) {
            let (results, mut rows) = list(w, i, &shape);
            let n = shape.geometry.coordinates();
            let layer = rows.layer(w, lane, shape.geometry);
            let at = if shape.float {
                Coordinates::Float(rows.floats(w, lane, n))
            } else {
                Coordinates::Exact(rows.integers(w, lane, n))
            };
            let detail = match shape.detail {
                0 => Detail::Base,
                1 if shape.float => Detail::Level(w.get(rows.next(), lane)),
                1 => Detail::Level(w.get::<i32>(rows.next(), lane) as f32),
                _ => Detail::Gradient(rows.floats(w, lane, n), rows.floats(w, lane, n)),
            };
            let gather = (shape.gather as usize).checked_sub(1);
            let asked = Fetch { geometry: shape.geometry, layer, at, detail, gather };
            let handle: u64 = w.get(i.a, lane);
            match textures.fetch(w.launch.memory, handle, &asked) {
                Ok(texel) => {
                    for (&row, value) in results.iter().zip(texel) {
                        if row != NO_ROW {
                            w.put(row, lane, value);
                        }
                    }
                }
                Err(kind) => return w.fail(kind, handle, lane),
            }
        }
        Flow::Next
    }
}

/// The place of a lane in a surface; none where the lane does nothing, an error after a fault.
fn place(w: &mut Core<'_>, i: &Inst, shape: &Shape, lane: usize) -> Result<Option<u64>, Flow> {
    let (_, mut rows) = list(w, i, shape);
    let layer = rows.layer(w, lane, shape.geometry);
    let at = rows.integers(w, lane, shape.geometry.coordinates());
    let bytes = shape.bytes * shape.values.max(1);
    let spot = Spot { geometry: shape.geometry, layer, at, bytes, boundary: shape.boundary };
    let handle: u64 = w.get(i.a, lane);
    let found = w.launch.env.textures.ok_or(FaultKind::Unmapped).and_then(|t| t.spot(handle, &spot));
    found.map_err(|kind| w.fail(kind, handle, lane))
}

/// `suld` (`STORE` false) and `sust`.
pub(crate) fn surface<const STORE: bool>() -> Exec {
    |w, i| {
        let shape = Shape::unpack(i.imm);
        for lane in Lanes(w.active) {
            let address = match place(w, i, &shape, lane) {
                Ok(address) => address,
                Err(flow) => return flow,
            };
            let (values, _) = list(w, i, &shape);
            for (k, &row) in values.iter().enumerate() {
                let Some(base) = address else {
                    if !STORE && row != NO_ROW {
                        put(w, row, lane, shape.bytes, 0);
                    }
                    continue;
                };
                let at = base + k as u64 * u64::from(shape.bytes);
                let len = u64::from(shape.bytes);
                let Some(pointer) = w.pointer(Access::Generic, at, len, STORE, lane) else { return Flow::Fault };
                if STORE {
                    let value = get(w, row, lane, shape.bytes).to_le_bytes();
                    // SAFETY: `pointer` vouches for as many bytes.
                    unsafe { pointer.copy_from(value.as_ptr(), len as usize) };
                } else if row != NO_ROW {
                    let mut value = [0; 8];
                    // SAFETY: as above.
                    unsafe { pointer.copy_to(value.as_mut_ptr(), len as usize) };
                    put(w, row, lane, shape.bytes, u64::from_le_bytes(value));
                }
            }
        }
        Flow::Next
    }
}

fn put(w: &mut Core<'_>, row: Row, lane: usize, bytes: u32, value: u64) {
    if bytes == 8 { w.put(row, lane, value) } else { w.put(row, lane, value as u32) }
}

fn get(w: &Core<'_>, row: Row, lane: usize, bytes: u32) -> u64 {
    if bytes == 8 { w.get(row, lane) } else { u64::from(w.get::<u32>(row, lane)) }
}

/// `sured` of 32 bits.
pub(crate) fn reduce(operation: &str, signed: bool) -> Option<Exec> {
    fn change(w: &mut Core<'_>, i: &Inst, f: impl Fn(u32, u32) -> u32) -> Flow {
        let shape = Shape::unpack(i.imm);
        for lane in Lanes(w.active) {
            let address = match place(w, i, &shape, lane) {
                Ok(Some(address)) => address,
                Ok(None) => continue,
                Err(flow) => return flow,
            };
            let Some(pointer) = w.pointer(Access::Generic, address, 4, true, lane) else { return Flow::Fault };
            let value: u32 = w.get(i.b, lane);
            // SAFETY: `pointer` vouches for four aligned bytes.
            let word = unsafe { AtomicU32::from_ptr(pointer.cast()) };
            let mut old = word.load(Ordering::SeqCst);
            while let Err(now) = word.compare_exchange(old, f(old, value), Ordering::SeqCst, Ordering::SeqCst) {
                old = now;
            }
        }
        Flow::Next
    }
    Some(match (operation, signed) {
        ("add", _) => |w, i| change(w, i, u32::wrapping_add),
        ("min", false) => |w, i| change(w, i, u32::min),
        ("max", false) => |w, i| change(w, i, u32::max),
        ("min", true) => |w, i| change(w, i, |a, b| a.cast_signed().min(b.cast_signed()).cast_unsigned()),
        ("max", true) => |w, i| change(w, i, |a, b| a.cast_signed().max(b.cast_signed()).cast_unsigned()),
        ("and", _) => |w, i| change(w, i, |a, b| a & b),
        ("or", _) => |w, i| change(w, i, |a, b| a | b),
        _ => return None,
    })
}

/// `txq` and `suq` of the property that [`QUERIES`] has at `imm`.
pub(crate) fn query() -> Exec {
    |w, i| {
        let what = QUERIES.get(i.imm as usize).copied().unwrap_or("");
        for lane in Lanes(w.active) {
            let handle: u64 = w.get(i.a, lane);
            let answer = w.launch.env.textures.and_then(|t| t.query(handle, what));
            let Some(answer) = answer else { return w.fail(FaultKind::Unmapped, handle, lane) };
            w.put(i.d, lane, answer);
        }
        Flow::Next
    }
}

/// The properties that can be queried.
pub(crate) const QUERIES: &[&str] = &["width", "height", "depth", "array_size", "num_mipmap_levels", "num_samples"];
