//! The code reserve: room that the driver has for code before there is any.
//!
//! The driver places code in blocks of 2 MiB. When no block has room, it takes a new one, at the lowest free place among addresses
//! that it also uses for much else: the buffer of kernels that print, threads' local memory, streams, graphs, pinned memory. It
//! allocates these when it needs them, for the buffer at the first launch of a kernel that could print. A replay of the client's
//! log launches nothing, so behind such an allocation it would get other blocks, and all code in them would lie elsewhere
//! (`tests/facts/displaced.cu` shows which allocations do that).
//!
//! ```text
//!   no reserve     code A │ printing's buffer │ code B           a replay:   code A │ code B
//!   a reserve      [ code A   code B          ... ] │ printing's buffer      [ code A   code B          ... ]
//! ```
//!
//! So before there is a client the worker has the driver take blocks, and keeps them: variables without use fill them, and one in
//! each block stays. As long as the client's code has room there, nothing but code decides where it lies. A client with code
//! elsewhere needs a rehearsal before its image is committed ([`CodeReserve::holds`]).

use std::collections::BTreeSet;
use std::ffi::CString;

use rekindle_cuda_abi::types::*;

use crate::gpu::driver::{CallFailed, Driver, checked};

/// The bytes that a worker reserves on each device.
pub(crate) const BYTES: u64 = 64 << 20;
/// The most bytes that an image may want reserved.
pub(crate) const MOST: u64 = 1 << 30;
/// The size of the driver's blocks for code.
const BLOCK: u64 = 2 << 20;
/// The size of the variables that fill the blocks: small beside a block, since one in each stays, and large enough for few loads.
const FILLER: u64 = 256 << 10;
/// `CU_JIT_INPUT_PTX`
const INPUT_PTX: u32 = 1;

/// The blocks that the driver keeps for code of one primary context.
#[derive(Default)]
pub(crate) struct CodeReserve {
    bytes: u64,
    /// The blocks, by address in units of [`BLOCK`].
    blocks: BTreeSet<u64>,
    /// The modules that keep them.
    keepers: Vec<CUmodule>,
}

impl CodeReserve {
    /// Has the driver reserve so many bytes in a primary context, which is current afterwards.
    ///
    /// # Errors
    /// A driver call failed, most likely because the device's memory is full.
    pub(crate) fn make(driver: &Driver, primary: CUcontext, bytes: u64) -> Result<Self, CallFailed> {
        let mut made = Self { bytes, ..Self::default() };
        // SAFETY: the context is the caller's.
        checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(primary) })?;
        if bytes == 0 {
            return Ok(made);
        }
        let filler = compiled(driver, &variable_text(FILLER))?;
        let mut gone = Vec::new();
        for _ in 0..bytes / FILLER {
            let (module, address) = load_variable(driver, &filler)?;
            if made.blocks.insert(address / BLOCK) {
                made.keepers.push(module);
            } else {
                gone.push(module);
            }
        }
        gone.into_iter().try_for_each(|module| unload(driver, module))?;
        Ok(made)
    }

    /// The bytes that were asked for.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether a variable of the context lies in the reserve.
    pub(crate) fn holds(&self, address: u64, size: u64) -> bool {
        let last = address.saturating_add(size.max(1) - 1);
        (address / BLOCK..=last / BLOCK).all(|block| self.blocks.contains(&block))
    }

    /// Gives the blocks back that hold no code. The primary context is current afterwards.
    pub(crate) fn release(self, driver: &Driver, primary: CUcontext) -> Result<(), CallFailed> {
        // SAFETY: the context is the caller's.
        checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(primary) })?;
        self.keepers.into_iter().try_for_each(|module| unload(driver, module))
    }
}

/// Code that consists of one variable of so many bytes.
pub(crate) fn variable_text(bytes: u64) -> CString {
    let text =
        format!(".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .align 16 .b8 hold[{bytes}];\n");
    CString::new(text).unwrap_or_default()
}

/// Loads code of [`variable_text`], as text that ends with a NUL or compiled, in the current context. Returns the module, and where
/// the variable lies.
pub(crate) fn load_variable(driver: &Driver, image: &[u8]) -> Result<(CUmodule, u64), CallFailed> {
    let (mut module, mut address, mut bytes) = (0, 0, 0);
    // SAFETY: the driver copies the image; out parameters are locals.
    unsafe {
        checked("cuModuleLoadData", (driver.cuModuleLoadData)(&raw mut module, image.as_ptr().cast()))?;
        let found = (driver.cuModuleGetGlobal_v2)(&raw mut address, &raw mut bytes, module, c"hold".as_ptr());
        checked("cuModuleGetGlobal", found)?;
    }
    Ok((module, address))
}

/// Compiles code for the current context's device, so that loading it again and again compiles nothing.
fn compiled(driver: &Driver, text: &CString) -> Result<Vec<u8>, CallFailed> {
    let (mut link, mut image, mut size) = (0_u64, std::ptr::null_mut(), 0);
    let (no_options, no_values) = (std::ptr::null_mut(), std::ptr::null_mut());
    let bytes = text.as_bytes_with_nul();
    // SAFETY: there are no options; the text and the name live through the calls; the image lives as long as the link, and is copied
    // before the link's end.
    unsafe {
        checked("cuLinkCreate", (driver.cuLinkCreate_v2)(0, no_options, no_values, (&raw mut link).cast()))?;
        let (data, name) = (bytes.as_ptr().cast_mut().cast(), c"hold".as_ptr());
        let added = (driver.cuLinkAddData_v2)(link, INPUT_PTX, data, bytes.len(), name, 0, no_options, no_values);
        let completed =
            if added == CUDA_SUCCESS { (driver.cuLinkComplete)(link, &raw mut image, &raw mut size) } else { added };
        let code = if completed == CUDA_SUCCESS {
            std::slice::from_raw_parts(image.cast::<u8>(), size).to_vec()
        } else {
            Vec::new()
        };
        (driver.cuLinkDestroy)(link);
        checked("cuLinkComplete", completed)?;
        Ok(code)
    }
}

fn unload(driver: &Driver, module: CUmodule) -> Result<(), CallFailed> {
    // SAFETY: the module was loaded here, and nothing uses it.
    checked("cuModuleUnload", unsafe { (driver.cuModuleUnload)(module) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_lies_in_the_reserve_if_all_of_it_does() {
        let reserve = CodeReserve { blocks: [3, 4, 6].into(), ..CodeReserve::default() };
        assert!(reserve.holds(3 * BLOCK, BLOCK) && reserve.holds(5 * BLOCK - 1, 1) && reserve.holds(6 * BLOCK, 0));
        assert!(reserve.holds(3 * BLOCK, 2 * BLOCK), "over two blocks of it");
        assert!(!reserve.holds(5 * BLOCK - 1, 2) && !reserve.holds(2 * BLOCK, 4) && !reserve.holds(5 * BLOCK, 4));
        assert!(!reserve.holds(u64::MAX - 4, 8), "an address that no variable has");
    }
}
