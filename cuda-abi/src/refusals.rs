//! Why a driver function is refused: one line for each, for whoever meets the refusal.

/// Beginnings of symbols, and why those that begin so are refused. The first that fits counts.
const REASONS: &[(&str, &str)] = &[
    ("cuCheckpointProcess", "Rekindle checkpoints the process itself"),
    ("cudbg", "a debugger attaches to the process that has the context, and that is the worker"),
    ("cuImportExternal", EXTERNAL),
    ("cuExternalMemory", EXTERNAL),
    ("cuDestroyExternal", EXTERNAL),
    ("cuSignalExternal", EXTERNAL),
    ("cuWaitExternal", EXTERNAL),
    ("cuGraphAddExternal", EXTERNAL),
    ("cuGraphExternal", EXTERNAL),
    ("cuGraphExecExternal", EXTERNAL),
    ("cuDeviceGetNvSciSyncAttributes", EXTERNAL),
    ("cuGraphics", GRAPHICS),
    ("cuGL", GRAPHICS),
    ("cuEGL", GRAPHICS),
    ("cuVDPAU", GRAPHICS),
    ("cuMulticast", "memory of several GPUs at one address is not supported yet"),
    ("cuMemMapArrayAsync", "no device has sparse arrays here, as its attribute says"),
    ("cuMemGetHandleForAddressRange", "other devices would have to follow memory through a restore"),
    ("cuFlushGPUDirectRDMAWrites", "other devices cannot register the memory of a program"),
    ("cuMemGetAttribute", "no public header declares it"),
    ("cuDeviceGetLuid", "only Windows has it"),
    ("cuDeviceRegisterAsyncNotification", "the driver has no such notifications on Linux"),
    ("cuDeviceUnregisterAsyncNotification", "the driver has no such notifications on Linux"),
    ("cuTexRef", REFERENCES),
    ("cuSurfRef", REFERENCES),
    ("cuModuleGetTexRef", REFERENCES),
    ("cuModuleGetSurfRef", REFERENCES),
    ("cuParamSetTexRef", REFERENCES),
    ("cuDeviceTotalMem", OLD),
    ("cuMem", OLD),
    ("cuModuleGetGlobal", OLD),
];

const EXTERNAL: &str = "memory and semaphores of other interfaces could not be made again in a restore";
const GRAPHICS: &str = "resources of graphics interfaces could not be made again in a restore";
const REFERENCES: &str = "only code that a compiler before CUDA 12 made has texture and surface references";
const OLD: &str = "the form before CUDA 3.2 or 4.0, for addresses of 32 bits";

/// Why a function is refused; none for one that is not listed.
#[must_use]
pub fn why(symbol: &str) -> Option<&'static str> {
    REASONS.iter().find(|(beginning, _)| symbol.starts_with(beginning)).map(|(_, reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{self, Route};

    #[test]
    fn every_refused_function_has_a_reason_and_every_reason_a_function() {
        let table = table::parse(table::TEXT).unwrap();
        let refused: Vec<&str> =
            table.iter().filter(|it| it.route == Route::Refused).map(|it| it.symbol.as_str()).collect();
        let without: Vec<_> = refused.iter().filter(|it| why(it).is_none()).collect();
        assert!(without.is_empty(), "{without:?}");
        for (place, (beginning, _)) in REASONS.iter().enumerate() {
            let first = |it: &&&str| REASONS.iter().position(|(other, _)| it.starts_with(other)) == Some(place);
            assert!(refused.iter().any(|it| first(&it)), "no refused function begins with {beginning}");
        }
    }
}
