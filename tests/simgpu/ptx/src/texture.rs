//! The interface of textures and surfaces. The caller of a launch implements them.

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

    /// The number of coordinates, without the layer.
    #[must_use]
    pub fn coordinates(self) -> usize {
        match self {
            Geometry::D1 | Geometry::A1 => 1,
            Geometry::D2 | Geometry::A2 => 2,
            Geometry::D3 | Geometry::Cube | Geometry::ACube => 3,
        }
    }
}

/// The level of a mipmapped texture that is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Detail {
    /// The largest.
    Base,
    /// This level.
    Level(f32),
    /// The level for this rate of change of the coordinates: along x, along y.
    Gradient([f32; 3], [f32; 3]),
}

/// The read of a `tex` or `tld4` instruction.
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

/// Coordinates in the instruction's form.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Coordinates {
    /// Elements, exactly.
    Exact([i32; 3]),
    /// Places between elements.
    Float([f32; 3]),
}

/// The effect of a surface instruction on a coordinate outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// The kernel ends with an error.
    Trap,
    /// The access goes to the nearest place inside.
    Clamp,
    /// Loads give zero, stores do nothing.
    Zero,
}

/// The target of a surface instruction: x counts bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spot {
    /// The instruction's geometry.
    pub geometry: Geometry,
    /// The layer, where there is one.
    pub layer: u32,
    /// The coordinates.
    pub at: [i32; 3],
    /// The number of accessed bytes.
    pub bytes: u32,
    /// The effect of a coordinate outside.
    pub boundary: Boundary,
}

/// The textures and surfaces of a launch.
pub trait Textures: Sync {
    /// A texture's value at a place: four components, as the bits of their registers.
    ///
    /// # Errors
    ///
    /// There is no such texture, or its memory is gone.
    fn fetch(&self, memory: &dyn Memory, texture: u64, fetch: &Fetch) -> Result<[u32; 4], FaultKind>;

    /// The address of a place in a surface, none where the place lies outside and that is allowed.
    ///
    /// # Errors
    ///
    /// There is no such surface, or the place is outside.
    fn spot(&self, surface: u64, spot: &Spot) -> Result<Option<u64>, FaultKind>;

    /// The result of `txq` and `suq`; `None` for an unknown property.
    fn query(&self, handle: u64, what: &str) -> Option<u32>;
}
