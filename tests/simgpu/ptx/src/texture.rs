//! Textures and surfaces: what a kernel asks of them. What they are is the caller's business.

use crate::fault::FaultKind;
use crate::memory::Memory;

/// The dimensions that an instruction names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Geometry {
    /// `.1d`.
    D1,
    /// `.2d`.
    D2,
    /// `.3d`.
    D3,
    /// `.a1d`: layers of one dimension.
    A1,
    /// `.a2d`: layers of two dimensions.
    A2,
    /// `.cube`.
    Cube,
    /// `.acube`: layers of cubes.
    ACube,
}

impl Geometry {
    /// The geometry of that name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "1d" => Geometry::D1,
            "2d" => Geometry::D2,
            "3d" => Geometry::D3,
            "a1d" => Geometry::A1,
            "a2d" => Geometry::A2,
            "cube" => Geometry::Cube,
            "acube" => Geometry::ACube,
            _ => return None,
        })
    }

    /// Whether a layer comes before the coordinates.
    #[must_use]
    pub fn layered(self) -> bool {
        matches!(self, Geometry::A1 | Geometry::A2 | Geometry::ACube)
    }

    /// How many coordinates there are, the layer not counted.
    #[must_use]
    pub fn coordinates(self) -> usize {
        match self {
            Geometry::D1 | Geometry::A1 => 1,
            Geometry::D2 | Geometry::A2 => 2,
            Geometry::D3 | Geometry::Cube | Geometry::ACube => 3,
        }
    }
}

/// Which level of a mipmapped texture is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Detail {
    /// The largest.
    Base,
    /// This one.
    Level(f32),
    /// By how fast the coordinates change: along x, along y.
    Gradient([f32; 3], [f32; 3]),
}

/// What a `tex` or `tld4` instruction asks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fetch {
    /// The instruction's geometry.
    pub geometry: Geometry,
    /// The layer, where there is one.
    pub layer: u32,
    /// The coordinates.
    pub at: Coordinates,
    /// The level of detail.
    pub detail: Detail,
    /// Of `tld4`: the component that is gathered.
    pub gather: Option<usize>,
}

/// Coordinates, as the instruction has them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Coordinates {
    /// Elements, exactly.
    Exact([i32; 3]),
    /// Places between them.
    Float([f32; 3]),
}

/// What a surface instruction does where a coordinate lies outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// The kernel ends with an error.
    Trap,
    /// The nearest place inside is meant.
    Clamp,
    /// Loads give zero, stores do nothing.
    Zero,
}

/// Where a surface instruction goes: x counts bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spot {
    /// The instruction's geometry.
    pub geometry: Geometry,
    /// The layer, where there is one.
    pub layer: u32,
    /// The coordinates.
    pub at: [i32; 3],
    /// Bytes that are accessed.
    pub bytes: u32,
    /// What happens outside.
    pub boundary: Boundary,
}

/// The textures and surfaces of a launch.
pub trait Textures: Sync {
    /// What a texture has at a place: four components, as the bits of the registers they go to.
    ///
    /// # Errors
    ///
    /// There is no such texture, or its memory is gone.
    fn fetch(&self, memory: &dyn Memory, texture: u64, fetch: &Fetch) -> Result<[u32; 4], FaultKind>;

    /// The address of a place in a surface, none where it lies outside and that is allowed.
    ///
    /// # Errors
    ///
    /// There is no such surface, or the place is outside.
    fn spot(&self, surface: u64, spot: &Spot) -> Result<Option<u64>, FaultKind>;

    /// What `txq` and `suq` answer; `None` for what is not known.
    fn query(&self, handle: u64, what: &str) -> Option<u32>;
}
