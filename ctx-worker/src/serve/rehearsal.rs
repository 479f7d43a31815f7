//! A rehearsal: a spare worker loads another client's code as a restore would, to prove that a restore is possible.
//!
//! Place holders restore the code of a client whose log was cut (`checkpoint/cut.rs`), and only the driver knows whether this
//! leads to the same addresses. So the daemon has a spare worker rehearse before it commits the image. The worker allocates
//! none of the client's memory but the heap of its kernels' `malloc`, and cannot be used afterwards.

use std::fs::File;

use rekindle_images::{Client, Object};
use rekindle_wire::command::Kind;

use crate::checkpoint::load::compare_globals;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::textures::needs_memory;
use crate::serve::executor::Executor;

impl Executor {
    /// Loads a client's code, and compares its addresses as a restore does.
    pub(crate) fn rehearse(&mut self, client: &Client, code: Vec<(String, File)>) -> Result<(), NotLoaded> {
        let (kinds, state) = self.begin_loading(client, code)?;
        for (number, _) in state.devices.iter().enumerate().filter(|(_, saved)| saved.reset) {
            self.reset_primary(number).map_err(|why| NotLoaded::Reset { device: number, why })?;
        }
        let call = |object: &Object| kinds.get(&object.kind).copied().unwrap_or_default();
        let is_of_code = |object: &&Object| !is_memory(object.handle) && !needs_memory(call(object));
        let objects = client.objects.iter().filter(is_of_code).collect();
        let mut holders = self.replay_log(client, &state, objects, &kinds)?;
        compare_globals(&self.layers().0, client)?;
        holders.end(self)
    }
}

/// Whether an object is memory, or made of memory. The driver finds addresses for these elsewhere than for code.
fn is_memory(handle: u64) -> bool {
    let kinds = [Kind::Array, Kind::MipmappedArray, Kind::TexObject, Kind::SurfObject, Kind::MemPool, Kind::Piece];
    kinds.iter().any(|kind| kind.owns(handle))
}
