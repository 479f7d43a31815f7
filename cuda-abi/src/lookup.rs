//! `cuGetProcAddress`: a symbol by (name, version, flag).

use crate::table::Function;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
pub const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// A version of CUDA beyond this is a wrong value to a driver of version 13: only of its own major version may a program
/// be newer than the driver.
pub const NEWEST: i32 = 13_999;

/// Why nothing was found, in the numbers of `CUdriverProcAddressQueryResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Miss {
    /// No function has this name.
    SymbolNotFound = 1,
    /// The function came with a later version of CUDA than the one asked for.
    VersionNotSufficient = 2,
}

/// A row of the generated look-up table, which is ordered by name and version.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The name asked for.
    pub name: &'static str,
    /// The CUDA version since which the symbol answers.
    pub version: u32,
    /// Whether it answers for the legacy default stream.
    pub legacy: bool,
    /// Whether it answers for the per-thread default stream.
    pub thread: bool,
    /// The symbol's place in the table.
    pub function: u16,
}

/// The newest symbol called `name` that `version` of CUDA already had, for the default stream that `flags` names.
pub fn find(rows: &[Row], name: &str, version: u32, flags: u64) -> Result<u16, Miss> {
    let thread = flags & PER_THREAD_DEFAULT_STREAM != 0;
    let start = rows.partition_point(|r| r.name < name);
    let named =
        rows[start..].iter().take_while(|r| r.name == name).filter(|r| if thread { r.thread } else { r.legacy });
    let mut miss = Miss::SymbolNotFound;
    let mut found = None;
    for row in named {
        miss = Miss::VersionNotSufficient;
        if row.version <= version {
            found = Some(row.function);
        }
    }
    found.ok_or(miss)
}

/// The rows of a table in the order that [`find`] needs, as (name, version, legacy, thread, place in the table).
pub(crate) fn rows(table: &[Function]) -> Vec<(&str, u32, bool, bool, usize)> {
    let mut rows: Vec<_> = table
        .iter()
        .enumerate()
        .flat_map(|(i, f)| f.lookups.iter().map(move |l| (l.name.as_str(), l.version, l.legacy, l.thread, i)))
        .collect();
    rows.sort();
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn real() -> (Vec<Function>, Vec<Row>) {
        let table = crate::table::parse(crate::table::TEXT).unwrap();
        let rows = rows(&table)
            .into_iter()
            .map(|(name, version, legacy, thread, i)| Row {
                name: Box::leak(name.to_string().into_boxed_str()),
                version,
                legacy,
                thread,
                function: i as u16,
            })
            .collect();
        (table, rows)
    }

    #[test]
    fn the_answer_depends_on_name_version_and_flag_as_on_driver_580() {
        let (table, rows) = real();
        let symbol =
            |name, version, flags| find(&rows, name, version, flags).map(|i| table[i as usize].symbol.as_str());
        assert_eq!(symbol("cuCtxGetDevice", 13000, 0), Ok("cuCtxGetDevice_v2"));
        assert_eq!(symbol("cuCtxGetDevice", 2000, 0), Ok("cuCtxGetDevice"));
        assert_eq!(symbol("cuCtxGetDevice", 1000, 0), Err(Miss::VersionNotSufficient));
        assert_eq!(symbol("cuMemcpyAsync", 13000, 1), Ok("cuMemcpyAsync"));
        assert_eq!(symbol("cuMemcpyAsync", 13000, 2), Ok("cuMemcpyAsync_ptsz"));
        assert_eq!(symbol("cuMemcpyAsync", 4000, 2), Err(Miss::VersionNotSufficient));
        assert_eq!(symbol("cuCtxCreate", 12000, 0), Ok("cuCtxCreate_v3"));
        assert_eq!(symbol("cuMemAlloc_v2", 13000, 0), Err(Miss::SymbolNotFound));
        assert_eq!(symbol("", 13000, 0), Err(Miss::SymbolNotFound));
    }
}
