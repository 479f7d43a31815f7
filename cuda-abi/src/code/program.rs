//! What is in one entry of an image, once unpacked.

use std::borrow::Cow;

use super::elf::Elf;
use super::ptx::Ptx;
use super::{CodeError, cubin, reach};

/// Which memory a variable lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Global memory: `__device__` and `__managed__`.
    Global,
    /// Constant memory: `__constant__`.
    Constant,
}

/// Who can see a symbol, as far as the image tells.
///
/// That says little about who can ask the driver for it: nvcc 13.0 makes every variable of a
/// program that is not linked from several objects local, `static` or not, and its runtime library
/// asks for them by name all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Binding {
    /// Seen in this image only. In PTX: without `.visible`, `.weak` or `.common`.
    Local,
    /// Seen by what is linked with it.
    Global,
    /// The same, and gives way to another of its name.
    Weak,
}

/// A module's variable that lives as long as the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// The (mangled) name, for `cuModuleGetGlobal` and `cuLibraryGetGlobal`.
    ///
    /// Names are unique in a cubin's global bindings, but several local ones may share a name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// The memory it lies in.
    pub space: Space,
    /// `__managed__`: the name's memory holds the variable's initial value, and the variable itself
    /// is in managed memory.
    pub managed: bool,
    /// Who can see it.
    pub binding: Binding,
    /// PTX only: declared inside a function. `ptxas`, and so the driver, makes up another name for
    /// it (`$__NAME__7`), by which nobody can ask for it. nvcc does not write such PTX.
    pub in_function: bool,
    /// The symbols whose addresses its initial value holds, as far as the image leaves these to the driver: a few of them,
    /// in the order of the value. Empty if there are none.
    ///
    /// In a cubin that was not linked from several objects, pointers to functions are no addresses: they are places in a
    /// table of each kernel's, and such a variable names no function here.
    pub points_to: Vec<String>,
}

/// One parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Bytes from the start of the parameters.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The (mangled) name, for `cuModuleGetFunction` and `cuLibraryGetKernel`.
    pub name: String,
    /// The parameters in order, `None` where the image does not say.
    pub params: Option<Vec<Param>>,
    /// Whether it may take memory from the device's heap (`malloc`, `new`, `cudaMalloc` called on
    /// the device).
    ///
    /// The image's own call graph decides, with calls through pointers reaching every function
    /// whose address is taken, so a kernel may be marked that never gets there. One that is not
    /// marked does not allocate, as far as the image tells: functions that are linked in later
    /// (`cuLinkAddData`) and kernels that it launches from the device are not followed.
    pub allocates: bool,
}

/// An unpacked entry: a cubin or PTX.
#[derive(Debug, Clone)]
pub struct Program<'a> {
    form: Form,
    bytes: Cow<'a, [u8]>,
}

#[derive(Debug, Clone, Copy)]
enum Form {
    Elf,
    Ptx,
}

impl<'a> Program<'a> {
    pub(super) fn from_elf(bytes: Cow<'a, [u8]>) -> Result<Self, CodeError> {
        Elf::parse(&bytes)?;
        Ok(Self { form: Form::Elf, bytes })
    }

    pub(super) fn from_ptx(bytes: Cow<'a, [u8]>) -> Self {
        Self { form: Form::Ptx, bytes }
    }

    /// The cubin's bytes, or PTX text up to its NUL.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match self.form {
            Form::Elf => &self.bytes,
            Form::Ptx => Ptx::new(&self.bytes).text(),
        }
    }

    /// Whether it is PTX rather than machine code.
    #[must_use]
    pub fn is_ptx(&self) -> bool {
        matches!(self.form, Form::Ptx)
    }

    /// The variables of the module that have a name: `__device__`, `__constant__` and `__managed__`
    /// ones, at file scope or `static` in functions, with the strings and tables that the compiler
    /// made (`$str`, `_ZTV...`). Those that are only declared (`extern`) are not among them.
    ///
    /// # Errors
    ///
    /// [`CodeError::Malformed`], [`CodeError::Truncated`] or [`CodeError::TooLarge`] where a
    /// variable or its size cannot be told: none is left out silently.
    pub fn globals(&self) -> Result<Vec<Global>, CodeError> {
        match self.form {
            Form::Elf => cubin::globals(&Elf::parse(&self.bytes)?),
            Form::Ptx => Ptx::new(&self.bytes).globals(),
        }
    }

    /// The kernels.
    ///
    /// # Errors
    ///
    /// As for [`Program::globals`]. A kernel whose parameters cannot be told is no error, see
    /// [`Kernel::params`].
    pub fn kernels(&self) -> Result<Vec<Kernel>, CodeError> {
        match self.form {
            Form::Elf => cubin::kernels(&Elf::parse(&self.bytes)?),
            Form::Ptx => Ptx::new(&self.bytes).kernels(),
        }
    }

    /// Whether anything in it refers to the device's heap: quicker than the kernels' own marks
    /// ([`Kernel::allocates`]), and true if any of these is.
    ///
    /// # Errors
    ///
    /// As for [`Program::globals`].
    pub fn uses_device_malloc(&self) -> Result<bool, CodeError> {
        match self.form {
            Form::Elf => reach::refers_to_allocator(&Elf::parse(&self.bytes)?),
            Form::Ptx => Ok(Ptx::new(&self.bytes).refers_to_allocator()),
        }
    }
}
