//! Pre-copies: copies made while the client runs, before its quiesce.

use std::sync::Arc;

use rekindle_images::DataWriter;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::background::Begin;
use crate::checkpoint::copying::error::CopyError;
use crate::checkpoint::copying::{Cancel, Copying, Precopied, Preservation};
use crate::checkpoint::describe::{describe_allocations, state_bytes};
use crate::checkpoint::layers::Layers;
use crate::schedule::times::Ages;

impl Checkpoint {
    /// Begins a pre-copy while the client runs, or a further round that copies the changes since, into the same file.
    pub(crate) fn begin_precopy(
        &mut self,
        layers: &mut Layers<'_>,
        writer: DataWriter,
        cancel: Arc<Cancel>,
    ) -> Result<(), CopyError> {
        self.discard_finished(layers.memory);
        if self.copying.background.is_some() {
            return Err(CopyError::Already);
        }
        // Checked before memory is copied for an image that could not be made. The ages of events are not known yet.
        state_bytes(layers, &Ages::new())?;
        self.prepare_engine(&mut layers.call.gpu, &layers.memory.devices)?;
        // A pre-copy for another image cannot be used.
        let precopied = self.copying.precopied.take().filter(|precopied| precopied.writer.has_files_of(&writer));
        let precopied = precopied.unwrap_or_else(|| Precopied::new(Arc::new(writer)));
        let aliases = layers.map_aliases()?;
        let mut all = Vec::new();
        describe_allocations(layers.memory, &aliases, &mut all);
        let tasks = all.into_iter().map(|(_, place, job)| self.task(layers.memory, place, job));
        // Memory that other processes write too is copied when all are quiesced. Pieces that have not changed since an earlier
        // round are not written again.
        let mut tasks: Vec<_> = tasks.filter(|task| task.preservation != Preservation::Closed).collect();
        for task in &mut tasks {
            (task.preservation, task.expected) = (Preservation::None, None);
            task.before = precopied.before(task.place, task.job.offset, task.job.length);
        }
        let writer = Arc::clone(&precopied.writer);
        self.copying.precopied = Some(precopied);
        let copying = Copying::new(tasks, None, true);
        let begin = Begin { copying, writer, cancel, aliases, draft: None };
        self.copy_in_background(layers.call.driver(), layers.memory, begin)
    }
}
