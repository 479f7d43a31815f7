//! User objects: counted references, a destructor that is called when the last goes.

use std::collections::HashMap;

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::handles::{Handles, USER};

/// A user object.
#[derive(Clone, Copy, Debug)]
struct UserObject {
    data: u64,
    destructor: u64,
    references: u64,
}

/// All user objects.
#[derive(Debug, Default)]
pub(crate) struct UserObjects {
    handles: Handles<USER>,
    objects: HashMap<CUuserObject, UserObject>,
    /// Destructors that are to be called, and what they take.
    destructors: Vec<(u64, u64)>,
}

impl UserObjects {
    /// A new object with so many references.
    pub(crate) fn create(&mut self, data: u64, destructor: u64, references: u32) -> CUuserObject {
        let handle = self.handles.fresh();
        self.objects.insert(handle, UserObject { data, destructor, references: references.into() });
        handle
    }

    /// Adds references to a user object.
    pub(crate) fn retain(&mut self, user: CUuserObject, count: u32) -> Result<()> {
        let object = self.objects.get_mut(&user).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        object.references += u64::from(count);
        Ok(())
    }

    /// Takes references away; with the last, the destructor is called.
    pub(crate) fn release(&mut self, user: CUuserObject, count: u32) -> Result<()> {
        let object = self.objects.get_mut(&user).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        object.references = object.references.checked_sub(u64::from(count)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if object.references == 0 {
            let gone = *object;
            self.objects.remove(&user);
            self.destructors.push((gone.destructor, gone.data));
        }
        Ok(())
    }

    /// Takes out the destructors that are to be called, and what they take.
    pub(crate) fn take_destructors(&mut self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.destructors)
    }
}
