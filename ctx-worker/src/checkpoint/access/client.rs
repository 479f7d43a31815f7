//! The client as the tracker sees it.

use crate::gpu::driver::Driver;
use crate::resources::{Code, Memory};
use crate::session::Session;

/// The client's state, from which the accesses of its commands are predicted.
#[derive(Clone, Copy)]
pub(crate) struct ClientView<'a> {
    pub(crate) driver: &'static Driver,
    pub(crate) session: &'a Session,
    pub(crate) memory: &'a Memory,
    pub(crate) code: &'a Code,
}
