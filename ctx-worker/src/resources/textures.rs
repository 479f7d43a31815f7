//! Texture and surface objects.
//!
//! A kernel gets a texture by its value, which may be stored anywhere in the client's memory. So the client has the
//! driver's own value, and a restore must produce the same value. The driver's values are free numbers of its table. So a
//! restore makes the objects in the order of their values, and fills gaps with objects that nobody keeps, until all are
//! made.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind, TextureCreate, TextureDestroy};

use crate::gpu::driver::Driver;
use crate::session::Session;
use crate::session::call::Call;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused, check};

/// The most filler objects that a restore makes to reach a value.
const MOST_FILLERS: usize = 4096;

/// The texture or surface that a client asks for, as the driver takes it.
pub(crate) struct Descriptors {
    resource: CudaResourceDesc,
    texture: Option<CudaTextureDesc>,
    view: Option<CudaResourceViewDesc>,
    /// The client's array behind the object, or 0.
    parent: u64,
    /// The address and length of the memory behind the object, unless an array is. The caller that makes the object has
    /// checked them.
    pub(crate) memory: Option<(u64, u64)>,
}

/// An object that only fills a gap.
#[derive(Clone, Copy)]
struct Filler {
    context: u64,
    value: u64,
    texture: bool,
}

/// The value in a record of the log.
pub(crate) fn recorded_value(args: &[u8]) -> u64 {
    TextureCreate::read(&mut Reader::new(args)).map_or(0, |wanted| wanted.value)
}

/// Whether the client's memory must exist when a record of the log is executed.
pub(crate) fn needs_memory(call: u16) -> bool {
    matches!(call, command::TEXTURE_CREATE | command::SURFACE_CREATE)
}

/// The textures and surfaces of the client.
#[derive(Default)]
pub(crate) struct Textures {
    /// Objects that a restore has made only to reach the values of others.
    fillers: Vec<Filler>,
}

impl Textures {
    /// Makes a texture or a surface. The caller has checked its memory.
    pub(crate) fn create(
        &mut self,
        call: &mut Call,
        wanted: &TextureCreate<'_>,
        descriptors: &Descriptors,
        reply: &mut Writer,
        kind: Kind,
    ) -> Result<Outcome, Refused> {
        let value = self.make_with_value(call, descriptors, wanted.value)?;
        let context = call.owner();
        let object = Object { kind, real: value, context, parent: descriptors.parent, allocates: false };
        if !call.session.objects.insert(wanted.handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let number = if kind == Kind::TexObject { command::TEXTURE_CREATE } else { command::SURFACE_CREATE };
        // A restore must produce the value that the object got.
        let mut record = Writer::new();
        TextureCreate { value, ..wanted.clone() }.write(&mut record);
        call.session.objects.record(number, wanted.handle, context, record.bytes(), None);
        reply.word(value);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Makes an object, with the value `wanted` if that is not 0.
    fn make_with_value(&mut self, call: &Call, d: &Descriptors, wanted: u64) -> Result<u64, Refused> {
        let (context, texture) = (call.owner(), d.texture.is_some());
        let is_it = |f: &Filler| f.value == wanted && f.context == context && f.texture == texture;
        if let Some(at) = self.fillers.iter().position(is_it) {
            self.fillers.swap_remove(at);
            unmake(call.driver(), wanted, texture);
        }
        for _ in 0..MOST_FILLERS {
            let value = make(call.driver(), d)?;
            if wanted == 0 || value == wanted {
                return Ok(value);
            }
            self.fillers.push(Filler { context, value, texture });
        }
        Err(Refused::Code(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION))
    }

    /// Destroys the objects that filled gaps, once a restore has made all objects.
    pub(crate) fn destroy_fillers(&mut self, call: &mut Call) {
        for filler in std::mem::take(&mut self.fillers) {
            if call.enter(filler.context).is_ok() {
                unmake(call.driver(), filler.value, filler.texture);
            }
        }
    }
}

/// Reads the memory or array behind a texture, and names it as the driver does.
pub(crate) fn descriptors(session: &Session, wanted: &TextureCreate<'_>) -> Result<Descriptors, Refused> {
    let broken = || Malformed("a descriptor of a broken length");
    let mut resource: CudaResourceDesc = from_bytes(wanted.resource).ok_or_else(broken)?;
    let read = |blob: &[u8]| !blob.is_empty();
    let texture = read(wanted.texture).then(|| from_bytes(wanted.texture).ok_or_else(broken)).transpose()?;
    let view = read(wanted.view).then(|| from_bytes(wanted.view).ok_or_else(broken)).transpose()?;
    let (mut parent, mut memory) = (0, None);
    match resource.kind {
        CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
            parent = resource.words[0];
            let kind = if resource.kind == CU_RESOURCE_TYPE_ARRAY { Kind::Array } else { Kind::MipmappedArray };
            resource.words[0] = match session.objects.get(parent) {
                Some(o) if o.kind == kind => o.real,
                _ => return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
            };
        }
        _ => {
            let linear = resource.linear().zip(resource.linear_bytes());
            memory = linear.map(|(linear, bytes)| (linear.address, bytes));
            memory.ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        }
    }
    Ok(Descriptors { resource, texture, view, parent, memory })
}

fn make(driver: &Driver, d: &Descriptors) -> Result<u64, Refused> {
    let mut value = 0;
    // SAFETY: the out parameter is a local, the descriptors live through the call and name what is the client's.
    check(unsafe {
        match &d.texture {
            Some(texture) => {
                let view = d.view.as_ref().map_or(std::ptr::null(), |view| view as *const _);
                (driver.cuTexObjectCreate)(&raw mut value, &raw const d.resource, texture, view)
            }
            None => (driver.cuSurfObjectCreate)(&raw mut value, &raw const d.resource),
        }
    })?;
    Ok(value)
}

/// Destroys a texture or surface of the driver's.
fn unmake(driver: &Driver, value: u64, texture: bool) -> CUresult {
    // SAFETY: made by `make`, and nobody has it any more.
    unsafe { if texture { (driver.cuTexObjectDestroy)(value) } else { (driver.cuSurfObjectDestroy)(value) } }
}

/// Destroys a texture or surface of the client's.
pub(crate) fn texture_destroy(call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
    let TextureDestroy { handle } = TextureDestroy::read(args)?;
    let Some(object) = call.session.objects.get(handle).copied() else {
        // The texture was destroyed with its array, or its memory was gone at the restore.
        return Ok(Outcome::Done(CUDA_SUCCESS));
    };
    if !matches!(object.kind, Kind::TexObject | Kind::SurfObject) {
        return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE));
    }
    call.enter(object.context)?;
    call.session.objects.remove(handle);
    let result = unmake(call.driver(), object.real, object.kind == Kind::TexObject);
    call.enter_own()?;
    Ok(Outcome::Done(result))
}

/// Destroys the textures and surfaces of an array that is being destroyed: they can no longer be read.
pub(crate) fn destroy_textures(driver: &Driver, gone: &[(u64, Object)]) {
    for (_, object) in gone {
        if matches!(object.kind, Kind::TexObject | Kind::SurfObject) {
            unmake(driver, object.real, object.kind == Kind::TexObject);
        }
    }
}

/// The memory behind a recorded texture, if memory is behind it. Where the client has since freed that memory, the texture
/// cannot be made again, and need not be.
pub(crate) fn recorded_memory(call: u16, args: &[u8]) -> Option<(u64, u64)> {
    let wanted = TextureCreate::read(&mut Reader::new(args)).ok().filter(|_| needs_memory(call))?;
    let resource: CudaResourceDesc = from_bytes(wanted.resource)?;
    resource.linear().zip(resource.linear_bytes()).map(|(linear, bytes)| (linear.address, bytes))
}
