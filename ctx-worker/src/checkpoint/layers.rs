//! The layers below: a checkpoint saves their state and a restore fills them.

use crate::resources::vmm::aliases::{Alias, AliasError};
use crate::resources::{Code, Memory};
use crate::schedule::Scheduler;
use crate::session::call::Call;

/// The client's state in the layers below.
pub(crate) struct Layers<'a> {
    /// The last command, with the driver and the session.
    pub(crate) call: &'a mut Call,
    pub(crate) memory: &'a mut Memory,
    pub(crate) code: &'a mut Code,
    pub(crate) scheduler: &'a mut Scheduler,
}

impl Layers<'_> {
    /// Maps the client's own mappings at addresses where they can be read and written.
    pub(crate) fn map_aliases(&mut self) -> Result<Vec<Alias>, AliasError> {
        self.memory.vmm.map_aliases(self.call.driver(), &self.memory.devices)
    }
}
