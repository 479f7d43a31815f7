//! The kinds of resources that images keep in separate parts. Each kind saves and loads its own parts ([`Saved`]). A new kind
//! gets a line here, and a test that loads its saved parts again.

use rekindle_images::BlobKind;

use crate::checkpoint::draft::Text;
use crate::checkpoint::layers::Layers;
use crate::resources::code_store::CodeStore;
use crate::resources::graphs::Graphs;
use crate::resources::jit::CodeLogs;
use crate::resources::kernel_heap::KernelHeaps;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::prints::Prints;
use crate::resources::saved::{Part, Saved};
use crate::resources::vmm::Vmm;
use crate::schedule::Scheduler;
use crate::session::state::StateError;

/// A kind of resource, and how its parts are saved and loaded.
struct Kind {
    kind: BlobKind,
    save: fn(&Layers<'_>) -> Result<Vec<Part>, StateError>,
    load: fn(&mut Layers<'_>, Part) -> Result<(), NotLoaded>,
}

/// All kinds, in the order in which they are saved.
const KINDS: [Kind; 7] = [
    Kind { kind: CodeStore::KIND, save: |it| it.code.store.save(), load: |it, part| it.code.store.load(part, ()) },
    Kind {
        kind: Scheduler::KIND,
        save: |it| it.scheduler.save(),
        load: |it, part| it.scheduler.load(part, (&it.call.session, it.memory)),
    },
    Kind { kind: Vmm::KIND, save: |it| it.memory.vmm.save(), load: |it, part| it.memory.vmm.load(part, ()) },
    Kind { kind: Graphs::KIND, save: |it| it.code.graphs.save(), load: |it, part| it.code.graphs.load(part, ()) },
    Kind { kind: Prints::KIND, save: |it| it.code.prints.save(), load: |it, part| it.code.prints.load(part, ()) },
    Kind {
        kind: KernelHeaps::KIND,
        save: |it| it.memory.kernel_heaps.save(),
        load: |it, part| it.memory.kernel_heaps.load(part, ()),
    },
    Kind { kind: CodeLogs::KIND, save: |it| it.code.logs.save(), load: |it, part| it.code.logs.load(part, ()) },
];

/// The client's resources that images keep in separate parts. Empty parts are omitted.
pub(crate) fn save_parts(layers: &Layers<'_>) -> Result<Vec<Text>, StateError> {
    let mut texts = Vec::new();
    for kind in &KINDS {
        let parts = (kind.save)(layers)?.into_iter().filter(|part| !part.bytes.is_empty());
        texts.extend(parts.map(|Part { handle, bytes }| Text { kind: kind.kind, handle, bytes }));
    }
    Ok(texts)
}

/// Loads one part of a saved client.
pub(crate) fn load_part(layers: &mut Layers<'_>, kind: BlobKind, part: Part) -> Result<(), NotLoaded> {
    let kind = KINDS.iter().find(|it| it.kind == kind).ok_or(NotLoaded::UnknownPart(kind.into()))?;
    (kind.load)(layers, part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::fixture;

    #[test]
    fn each_kind_of_blob_but_content_of_arrays_is_that_of_one_kind_of_resource() {
        let mut kinds: Vec<_> = KINDS.iter().map(|it| it.kind).chain([BlobKind::ArrayContent]).collect();
        kinds.sort_unstable();
        let mut all = BlobKind::ALL;
        all.sort_unstable();
        assert_eq!(kinds, all);
    }

    #[test]
    fn parts_that_are_saved_come_back_and_those_that_are_malformed_are_refused() {
        let mut worker = fixture::executor();
        let (mut layers, _) = worker.layers();
        assert!(save_parts(&layers).unwrap().is_empty());
        for (kind, handle) in [(CodeStore::KIND, 7), (Prints::KIND, 1), (CodeLogs::KIND, 5)] {
            load_part(&mut layers, kind, Part { handle, bytes: vec![1, 2, 3] }).unwrap();
        }
        let saved: Vec<_> = save_parts(&layers).unwrap().into_iter().map(|it| (it.kind, it.handle, it.bytes)).collect();
        let bytes = || vec![1, 2, 3];
        assert_eq!(saved, [(CodeStore::KIND, 7, bytes()), (Prints::KIND, 1, bytes()), (CodeLogs::KIND, 5, bytes())]);
        for (kind, handle) in [
            (Prints::KIND, 2),
            (Graphs::KIND, 0),
            (KernelHeaps::KIND, 0),
            (Scheduler::KIND, 0),
            (BlobKind::ArrayContent, 0),
        ] {
            assert!(load_part(&mut layers, kind, Part { handle, bytes: vec![0xff] }).is_err(), "{kind:?}");
        }
    }
}
