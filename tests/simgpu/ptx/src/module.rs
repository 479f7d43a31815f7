//! A parsed module, for a loader.

use crate::declaration::{Global, Kernel};
use crate::fault::{LinkError, ParseError};
use crate::link::{self, Survey};
use crate::parse::{Parsed, parse};
use crate::program::Program;

/// A parsed module.
#[derive(Debug)]
pub struct Module {
    parsed: Parsed,
    survey: Survey,
}

impl Module {
    /// Reads the text of a module.
    ///
    /// # Errors
    ///
    /// The text is not PTX, or declares something impossible. Instructions that are well formed
    /// but unknown are no errors: see [`Program::supported`].
    pub fn parse(text: &str) -> Result<Module, ParseError> {
        let parsed = parse(text)?;
        let survey = link::survey(&parsed.ast, &parsed.globals);
        Ok(Module { parsed, survey })
    }

    /// Decodes the module. `addresses` gives the address of each of [`Module::globals`]; function
    /// number `n` is at `code_base + 16 n` ([`CODE_WINDOW`](crate::CODE_WINDOW) will do, for every
    /// module alike).
    ///
    /// An instruction that this interpreter lacks is no error here, because other kernels may run: see
    /// [`Program::supported`].
    ///
    /// # Errors
    ///
    /// A variable has no address.
    pub fn link(&self, code_base: u64, addresses: &dyn Fn(&str) -> Option<u64>) -> Result<Program, LinkError> {
        link::link(&self.parsed, &self.survey, code_base, addresses)
    }

    /// The version of PTX that the module is written in (`9.0`).
    #[must_use]
    pub fn version(&self) -> &str {
        &self.parsed.version
    }

    /// The architecture that the module is made for (`sm_75`).
    #[must_use]
    pub fn target(&self) -> &str {
        &self.parsed.target
    }

    /// Its kernels, in the order of the text.
    #[must_use]
    pub fn kernels(&self) -> &[Kernel] {
        &self.survey.kernels
    }

    /// The kernel of that name.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels().iter().find(|kernel| kernel.name == name)
    }

    /// Its variables in global and constant memory, in the order of the text.
    #[must_use]
    pub fn globals(&self) -> &[Global] {
        &self.parsed.globals
    }
}
