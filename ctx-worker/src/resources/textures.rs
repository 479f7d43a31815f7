//! Texture and surface objects.
//!
//! A kernel gets a texture by its value, which may be stored anywhere in the client's memory: so the client has the
//! driver's own value, and a restore must come to the same. The driver gives numbers of its table that are free: so a
//! restore makes them in the order of their values, and where there are gaps, objects that nobody keeps fill them until
//! all are made.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind};

use crate::serve::executor::Executor;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused, check};

/// How many objects a restore makes, at most, to come to a value.
const MOST_FILLERS: usize = 4096;

/// What a client asks to be made, and a restore makes again.
struct Wanted<'a> {
    handle: u64,
    /// The value that it must get; 0 for any.
    value: u64,
    resource: &'a [u8],
    texture: &'a [u8],
    view: &'a [u8],
}

/// The same as the driver takes it.
struct Descriptors {
    resource: CudaResourceDesc,
    texture: Option<CudaTextureDesc>,
    view: Option<CudaResourceViewDesc>,
    /// The client's array that it is of, or 0.
    parent: u64,
}

impl<'a> Wanted<'a> {
    fn read(args: &mut Reader<'a>) -> Result<Self, Malformed> {
        let (handle, value) = (args.word()?, args.word()?);
        let (resource, texture, view) = (args.blob()?, args.blob()?, args.blob()?);
        args.end()?;
        Ok(Self { handle, value, resource, texture, view })
    }

    /// As a record of the log: with the value that it got.
    fn record(&self, value: u64) -> Vec<u8> {
        let mut record = Writer::new();
        record.word(self.handle);
        record.word(value);
        [self.resource, self.texture, self.view].into_iter().for_each(|blob| record.blob(blob));
        record.into_bytes()
    }
}

/// An object that only fills a gap.
#[derive(Clone, Copy)]
pub(crate) struct Filler {
    context: u64,
    value: u64,
    texture: bool,
}

/// The value that a record of the log has.
pub(crate) fn recorded_value(args: &[u8]) -> u64 {
    Wanted::read(&mut Reader::new(args)).map_or(0, |wanted| wanted.value)
}

/// Whether a record of the log needs the client's memory to be there.
pub(crate) fn needs_memory(call: u16) -> bool {
    matches!(call, command::TEXTURE_CREATE | command::SURFACE_CREATE)
}

impl Executor {
    pub(crate) fn texture_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match call {
            command::TEXTURE_CREATE => self.texture_create(args, reply, Kind::TexObject),
            command::SURFACE_CREATE => self.texture_create(args, reply, Kind::SurfObject),
            command::TEXTURE_DESTROY => self.texture_destroy(args),
            _ => Err(Refused::UnknownCall(call)),
        }
    }

    fn texture_create(&mut self, args: &mut Reader<'_>, reply: &mut Writer, kind: Kind) -> Result<Outcome, Refused> {
        let wanted = Wanted::read(args)?;
        let descriptors = self.descriptors(&wanted)?;
        let value = self.make_with_value(&descriptors, wanted.value)?;
        let context = self.header.context;
        let object = Object { kind, real: value, context, parent: descriptors.parent, allocates: false };
        if !self.session.objects.insert(wanted.handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let call = if kind == Kind::TexObject { command::TEXTURE_CREATE } else { command::SURFACE_CREATE };
        self.session.objects.record(call, wanted.handle, context, &wanted.record(value), None);
        reply.word(value);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Checks what a texture is of, and names it as the driver does.
    fn descriptors(&self, wanted: &Wanted<'_>) -> Result<Descriptors, Refused> {
        let broken = || Malformed("a descriptor of a broken length");
        let mut resource: CudaResourceDesc = from_bytes(wanted.resource).ok_or_else(broken)?;
        let read = |blob: &[u8]| !blob.is_empty();
        let texture = read(wanted.texture).then(|| from_bytes(wanted.texture).ok_or_else(broken)).transpose()?;
        let view = read(wanted.view).then(|| from_bytes(wanted.view).ok_or_else(broken)).transpose()?;
        let mut parent = 0;
        match resource.kind {
            CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
                parent = resource.words[0];
                let kind = if resource.kind == CU_RESOURCE_TYPE_ARRAY { Kind::Array } else { Kind::MipmappedArray };
                resource.words[0] = match self.session.objects.get(parent) {
                    Some(o) if o.kind == kind => o.real,
                    _ => return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
                };
            }
            _ => {
                let linear = resource.linear().zip(resource.linear_bytes());
                let (linear, bytes) = linear.ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
                self.reachable(linear.address, bytes)?;
            }
        }
        Ok(Descriptors { resource, texture, view, parent })
    }

    fn make(&self, d: &Descriptors) -> Result<u64, Refused> {
        let mut value = 0;
        let driver = self.driver();
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

    /// Makes an object, of this value if it is not 0.
    fn make_with_value(&mut self, d: &Descriptors, wanted: u64) -> Result<u64, Refused> {
        let (context, texture) = (self.header.context, d.texture.is_some());
        let is_it = |f: &Filler| f.value == wanted && f.context == context && f.texture == texture;
        if let Some(at) = self.memory.fillers.iter().position(is_it) {
            self.memory.fillers.swap_remove(at);
            self.unmake(wanted, texture);
        }
        for _ in 0..MOST_FILLERS {
            let value = self.make(d)?;
            if wanted == 0 || value == wanted {
                return Ok(value);
            }
            self.memory.fillers.push(Filler { context, value, texture });
        }
        Err(Refused::Code(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION))
    }

    /// Destroys what filled gaps: all that a restore makes is made.
    pub(crate) fn destroy_fillers(&mut self) {
        for filler in std::mem::take(&mut self.memory.fillers) {
            if self.enter_context(filler.context).is_ok() {
                self.unmake(filler.value, filler.texture);
            }
        }
    }

    /// Destroys a texture or surface of the driver's.
    fn unmake(&self, value: u64, texture: bool) -> CUresult {
        // SAFETY: made by `make`, and nobody has it any more.
        unsafe {
            if texture { (self.driver().cuTexObjectDestroy)(value) } else { (self.driver().cuSurfObjectDestroy)(value) }
        }
    }

    fn texture_destroy(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let handle = args.word()?;
        args.end()?;
        let Some(object) = self.session.objects.get(handle).copied() else {
            // It went with its array, or its memory was gone at the restore.
            return Ok(Outcome::Done(CUDA_SUCCESS));
        };
        if !matches!(object.kind, Kind::TexObject | Kind::SurfObject) {
            return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE));
        }
        self.enter_context(object.context)?;
        self.session.objects.remove(handle);
        let result = self.unmake(object.real, object.kind == Kind::TexObject);
        self.enter_context(self.header.context)?;
        Ok(Outcome::Done(result))
    }

    /// Destroys what was of an array that is being destroyed: nothing can be read of it any more.
    pub(crate) fn destroy_textures(&self, gone: &[(u64, Object)]) {
        for (_, object) in gone {
            if matches!(object.kind, Kind::TexObject | Kind::SurfObject) {
                self.unmake(object.real, object.kind == Kind::TexObject);
            }
        }
    }

    /// Whether a recorded texture is of memory that the client has freed since: then nothing can be made again, and
    /// nothing needs to be.
    pub(crate) fn is_of_freed_memory(&self, call: u16, args: &[u8]) -> bool {
        let Ok(wanted) = Wanted::read(&mut Reader::new(args)) else { return false };
        let Some(resource) = from_bytes::<CudaResourceDesc>(wanted.resource) else { return false };
        let memory = resource.linear().zip(resource.linear_bytes());
        needs_memory(call) && memory.is_some_and(|(linear, bytes)| self.reachable(linear.address, bytes).is_err())
    }
}
