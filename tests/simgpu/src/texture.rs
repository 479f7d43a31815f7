//! Texture and surface objects: the resource behind a handle, and a kernel's reads of it.
//!
//! ```text
//!   sample   coordinates ──normalise, address mode──> elements ──filter──> four components
//!   element  array level or linear memory ──format──> four components
//! ```
//!
//! Handles are small numbers, the lowest that is free in the context, as a real GPU's are indices of a table.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_HANDLE, CudaResourceDesc, CudaResourceViewDesc, CudaTextureDesc, LinearResource,
};
use rekindle_ptx::{Boundary, Coordinates, Detail, FaultKind, Fetch, Geometry, Memory, Spot, Textures};

use crate::array::Array;
use crate::element::{Element, Format};
use crate::status::Result;

/// The resource of a texture or surface.
#[derive(Clone, Debug)]
pub(crate) enum Resource {
    /// An array, or the levels of a mipmapped one.
    Levels(Vec<Arc<Array>>),
    /// Linear memory of the program.
    Linear(LinearResource),
}

/// A texture or a surface.
#[derive(Clone, Debug)]
pub(crate) struct Bound {
    /// How the program described its resource.
    pub(crate) described: CudaResourceDesc,
    /// The way of reading; none for a surface.
    pub(crate) texture: Option<CudaTextureDesc>,
    /// The view that the program gave.
    pub(crate) view: Option<CudaResourceViewDesc>,
    /// The resource.
    pub(crate) resource: Resource,
}

/// The textures and surfaces of a context.
#[derive(Debug, Default)]
pub(crate) struct Bindings(Mutex<BTreeMap<u64, Arc<Bound>>>);

impl Bindings {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Bound>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a texture or surface the lowest free handle.
    pub(crate) fn bind(&self, bound: Bound) -> u64 {
        let mut all = self.all();
        let mut handle = 1;
        while all.contains_key(&handle) {
            handle += 1;
        }
        all.insert(handle, Arc::new(bound));
        handle
    }

    /// The object of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<Bound>> {
        self.all().get(&handle).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Ends a handle, which must be a texture's or a surface's as `texture` says.
    pub(crate) fn unbind(&self, handle: u64, texture: bool) -> Result<()> {
        let mut all = self.all();
        let known = all.get(&handle).is_some_and(|bound| bound.texture.is_some() == texture);
        if !known {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        all.remove(&handle);
        Ok(())
    }
}

/// A level of a resource, and the place of its elements.
struct Level {
    base: u64,
    /// Elements along each axis; layers count along none.
    size: [usize; 3],
    layers: usize,
    pitch: usize,
    slice: usize,
}

const NORMALIZED: u32 = 2;
const READ_AS_INTEGER: u32 = 1;
const WRAP: u32 = 0;
const MIRROR: u32 = 2;
const BORDER: u32 = 3;
const LINEAR: u32 = 1;

impl Bound {
    fn format(&self) -> (u32, u32) {
        match &self.resource {
            Resource::Levels(levels) => levels.first().map_or((0, 0), |a| (a.desc.format, a.desc.channels)),
            Resource::Linear(linear) => (linear.format, linear.channels),
        }
    }

    fn levels(&self) -> usize {
        match &self.resource {
            Resource::Levels(levels) => levels.len(),
            Resource::Linear(_) => 1,
        }
    }

    fn level(&self, number: usize) -> Option<Level> {
        Some(match &self.resource {
            Resource::Levels(levels) => {
                let array = levels.get(number)?;
                let [pitch, rows, depth] = array.extent();
                // LAYERED and CUBEMAP.
                let layered = array.desc.flags & 5 != 0;
                let (third, layers) = if layered { (1, depth) } else { (depth, 1) };
                let size = [array.desc.width, array.desc.height.max(1), third];
                Level { base: array.base, size, layers, pitch, slice: pitch * rows }
            }
            Resource::Linear(l) => {
                let size = [l.width, l.height.max(1), 1];
                Level { base: l.address, size, layers: 1, pitch: l.pitch, slice: 0 }
            }
        })
    }
}

/// A fetch.
struct Sampler<'s> {
    bound: &'s Bound,
    desc: CudaTextureDesc,
    format: Format,
    memory: &'s dyn Memory,
}

/// The distance of a place between two elements from the first: hardware has eight bits for it.
fn fraction(x: f32) -> f32 {
    ((x - x.floor()) * 256.0).round() / 256.0
}

impl Sampler<'_> {
    fn normalized(&self) -> bool {
        self.desc.flags & NORMALIZED != 0
    }

    /// The element that an index means along an axis; none for the border.
    fn address(&self, axis: usize, index: i64, size: usize) -> Option<usize> {
        let n = size.max(1) as i64;
        let inside = (0..n).contains(&index);
        let mode = self.desc.address_mode[axis];
        let place = match mode {
            _ if inside => index,
            BORDER => return None,
            WRAP if self.normalized() => index.rem_euclid(n),
            MIRROR if self.normalized() => {
                let i = index.rem_euclid(2 * n);
                if i < n { i } else { 2 * n - 1 - i }
            }
            _ => index.clamp(0, n - 1),
        };
        Some(place as usize)
    }

    fn element(&self, level: &Level, layer: usize, at: [i64; 3]) -> std::result::Result<Element, FaultKind> {
        let mut place = [0; 3];
        for axis in 0..3 {
            match self.address(axis, at[axis], level.size[axis]) {
                Some(i) => place[axis] = i,
                None => return Ok(self.format.border(self.desc.border_color)),
            }
        }
        self.read(level, layer, place)
    }

    fn read(&self, level: &Level, layer: usize, [x, y, z]: [usize; 3]) -> std::result::Result<Element, FaultKind> {
        let (bytes, edge) = (self.format.bytes(), self.format.edge());
        let offset = (z + layer) * level.slice + y / edge * level.pitch + x / edge * bytes;
        let address = level.base + offset as u64;
        let span = self.memory.resolve(address, false).map_err(|fault| fault.kind)?;
        let at = address - span.base;
        if span.len - at < bytes as u64 {
            return Err(FaultKind::Unmapped);
        }
        let mut raw = [0; 16];
        // SAFETY: the span is there until the launch's next safe point, and holds as many bytes.
        unsafe { span.host.add(at as usize).copy_to(raw.as_mut_ptr(), bytes.min(16)) };
        Ok(self.format.decode(&raw, [x % edge, y % edge]))
    }

    /// One level at coordinates that count elements of it.
    fn sample(
        &self,
        number: usize,
        layer: usize,
        at: [f32; 3],
        axes: usize,
    ) -> std::result::Result<Element, FaultKind> {
        let level = self.bound.level(number).ok_or(FaultKind::Unmapped)?;
        let mut at = at;
        if self.normalized() {
            for (place, size) in at.iter_mut().zip(level.size).take(axes) {
                *place *= size as f32;
            }
        }
        if self.desc.filter_mode != LINEAR {
            let index = std::array::from_fn(|axis| if axis < axes { at[axis].floor() as i64 } else { 0 });
            return self.element(&level, layer, index);
        }
        let corner: [i64; 3] = std::array::from_fn(|a| if a < axes { (at[a] - 0.5).floor() as i64 } else { 0 });
        let part: [f32; 3] = std::array::from_fn(|a| if a < axes { fraction(at[a] - 0.5) } else { 0.0 });
        let mut sum = [0.0_f32; 4];
        for neighbour in 0..1_usize << axes {
            let step = |axis: usize| neighbour >> axis & 1;
            let weight: f32 = (0..axes).map(|a| if step(a) == 1 { part[a] } else { 1.0 - part[a] }).product();
            if weight == 0.0 {
                continue;
            }
            let index = std::array::from_fn(|a| corner[a] + step(a) as i64);
            let texel = self.element(&level, layer, index)?.floats();
            for (total, value) in sum.iter_mut().zip(texel) {
                *total += weight * value;
            }
        }
        Ok(Element::Floats(sum))
    }

    /// The four elements around a place, one component of each, counter-clockwise from below.
    fn gather(&self, layer: usize, at: [f32; 3], component: usize) -> std::result::Result<[u32; 4], FaultKind> {
        let level = self.bound.level(0).ok_or(FaultKind::Unmapped)?;
        let scale = |axis: usize| if self.normalized() { level.size[axis] as f32 } else { 1.0 };
        let [x, y] = [0, 1].map(|a| (at[a] * scale(a) - 0.5).floor() as i64);
        let mut found = [0; 4];
        for (value, [dx, dy]) in found.iter_mut().zip([[0, 1], [1, 1], [1, 0], [0, 0]]) {
            *value = self.element(&level, layer, [x + dx, y + dy, 0])?.bits()[component.min(3)];
        }
        Ok(found)
    }

    /// The level of detail, counted from the largest; it may lie between two levels.
    fn detail(&self, detail: Detail, axes: usize) -> f32 {
        let lod = match detail {
            Detail::Base => 0.0,
            Detail::Level(level) => level,
            Detail::Gradient(dx, dy) => {
                let Some(level) = self.bound.level(0) else { return 0.0 };
                let scale = |a: usize| if self.normalized() { level.size[a] as f32 } else { 1.0 };
                let length = |d: [f32; 3]| (0..axes).map(|a| (d[a] * scale(a)).powi(2)).sum::<f32>().sqrt();
                length(dx).max(length(dy)).log2()
            }
        };
        let last = self.bound.levels() as f32 - 1.0;
        if last == 0.0 {
            return 0.0;
        }
        let biased = lod + self.desc.mipmap_level_bias;
        let (least, most) = (self.desc.min_mipmap_level_clamp, self.desc.max_mipmap_level_clamp);
        biased.max(least).min(most).clamp(0.0, last)
    }

    fn fetch(&self, fetch: &Fetch) -> std::result::Result<[u32; 4], FaultKind> {
        let axes = fetch.geometry.coordinates();
        let base = self.bound.level(0).ok_or(FaultKind::Unmapped)?;
        let mut layer = (fetch.layer as usize).min(base.layers.saturating_sub(1));
        let mut at = match fetch.at {
            Coordinates::Exact(at) => {
                let inside = (0..axes).all(|a| at[a] >= 0 && (at[a] as usize) < base.size[a]);
                // A read outside linear memory gives nothing, whatever the mode.
                if !inside && matches!(self.bound.resource, Resource::Linear(_)) {
                    return Ok([0; 4]);
                }
                return Ok(self.element(&base, layer, at.map(i64::from))?.bits());
            }
            Coordinates::Float(at) => at,
        };
        let mut axes = axes;
        if matches!(fetch.geometry, Geometry::Cube | Geometry::ACube) {
            let (face, place) = cube_face(at);
            layer = ((fetch.layer as usize) * 6 + face).min(base.layers.saturating_sub(1));
            // A face's coordinates run from 0 to 1 whatever the flags say.
            let scale = if self.normalized() { 1.0 } else { base.size[0] as f32 };
            (at, axes) = ([place[0] * scale, place[1] * scale, 0.0], 2);
        }
        if let Some(component) = fetch.gather {
            return self.gather(layer, at, component);
        }
        let lod = self.detail(fetch.detail, axes);
        let blend = self.desc.mipmap_filter_mode == LINEAR && fraction(lod) > 0.0;
        if !blend {
            let number = if self.desc.mipmap_filter_mode == LINEAR { lod } else { (lod + 0.5).floor() };
            return Ok(self.sample(number as usize, layer, at, axes)?.bits());
        }
        let (near, far) = (lod.floor() as usize, lod.floor() as usize + 1);
        let [a, b] = [self.sample(near, layer, at, axes)?.floats(), self.sample(far, layer, at, axes)?.floats()];
        let part = fraction(lod);
        Ok(std::array::from_fn(|i| ((1.0 - part) * a[i] + part * b[i]).to_bits()))
    }
}

/// The face of a cube that a direction hits, and where: from 0 to 1.
fn cube_face([x, y, z]: [f32; 3]) -> (usize, [f32; 2]) {
    let (ax, ay, az) = (x.abs(), y.abs(), z.abs());
    let (face, s, t, m) = if ax >= ay && ax >= az {
        if x >= 0.0 { (0, -z, -y, ax) } else { (1, z, -y, ax) }
    } else if ay >= az {
        if y >= 0.0 { (2, x, z, ay) } else { (3, x, -z, ay) }
    } else if z >= 0.0 {
        (4, x, -y, az)
    } else {
        (5, -x, -y, az)
    };
    (face, [(s / m + 1.0) / 2.0, (t / m + 1.0) / 2.0])
}

impl Textures for Bindings {
    fn fetch(&self, memory: &dyn Memory, texture: u64, fetch: &Fetch) -> std::result::Result<[u32; 4], FaultKind> {
        let bound = self.get(texture).map_err(|_| FaultKind::Unmapped)?;
        let desc = bound.texture.ok_or(FaultKind::Unmapped)?;
        let (format, channels) = bound.format();
        let format = Format::new(format, channels, desc.flags & READ_AS_INTEGER != 0);
        Sampler { bound: &bound, desc, format, memory }.fetch(fetch)
    }

    fn spot(&self, surface: u64, spot: &Spot) -> std::result::Result<Option<u64>, FaultKind> {
        let bound = self.get(surface).map_err(|_| FaultKind::Unmapped)?;
        let level = bound.level(0).filter(|_| bound.texture.is_none()).ok_or(FaultKind::Unmapped)?;
        let layers = level.layers;
        let axes = spot.geometry.coordinates();
        let mut place = [0_usize; 3];
        let mut outside = spot.geometry.layered() && spot.layer as usize >= layers;
        let layer = (spot.layer as usize).min(layers.saturating_sub(1));
        for (axis, found) in place.iter_mut().enumerate().take(axes) {
            // The first axis counts bytes, of whole elements.
            let (size, last) = match axis {
                0 => (level.pitch, level.pitch.saturating_sub(spot.bytes as usize)),
                _ => (level.size[axis], level.size[axis].saturating_sub(1)),
            };
            let at = i64::from(spot.at[axis]);
            outside |= at < 0 || at as usize > last || size == 0;
            *found = at.clamp(0, last as i64) as usize;
        }
        if outside && spot.boundary != Boundary::Clamp {
            return if spot.boundary == Boundary::Zero { Ok(None) } else { Err(FaultKind::Trap) };
        }
        let [x, y, z] = place;
        Ok(Some(level.base + ((z + layer) * level.slice + y * level.pitch + x) as u64))
    }

    fn query(&self, handle: u64, what: &str) -> Option<u32> {
        let bound = self.get(handle).ok()?;
        let level = bound.level(0)?;
        let answer = match what {
            "width" => level.size[0],
            "height" => level.size[1],
            "depth" => level.size[2],
            "array_size" => level.layers,
            "num_mipmap_levels" => bound.levels(),
            "num_samples" => 1,
            _ => return None,
        };
        Some(answer as u32)
    }
}
