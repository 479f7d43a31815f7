//! The content of an entry of an image, once unpacked.

use std::borrow::Cow;

use super::elf::Elf;
use super::items::{Global, Kernel};
use super::ptx::Ptx;
use super::{CodeError, cubin, reach, taken};

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

    /// Whether its code, or the initial value of a variable, may have the address of a function, which it may keep in memory.
    /// Where the image leaves this open, it may.
    ///
    /// # Errors
    ///
    /// As for [`Program::globals`].
    pub fn takes_function_addresses(&self) -> Result<bool, CodeError> {
        match self.form {
            Form::Elf => taken::takes_addresses(&Elf::parse(&self.bytes)?),
            Form::Ptx => Ptx::new(&self.bytes).takes_function_addresses(),
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
