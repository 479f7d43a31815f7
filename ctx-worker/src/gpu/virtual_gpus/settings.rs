//! How a worker shows GPUs, as its daemon says it.

use std::fmt;
use std::str::FromStr;

use rekindle_wire::gpus;
use thiserror::Error;

/// The UUID of a GPU.
pub(crate) type Uuid = [u8; 16];

/// How a worker shows GPUs, as its daemon passes it on the command line: `4`, or `4:GPU-...,GPU-...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualGpus {
    /// How many virtual GPUs each GPU is.
    pub per_gpu: u32,
    /// The UUIDs of the virtual GPUs that the worker sees, in its order; `None`: all.
    pub visible: Option<Vec<Uuid>>,
}

impl VirtualGpus {
    /// The most virtual GPUs of one GPU: their PCI domains differ in four bits, and 0 there is the GPU itself.
    pub const MOST: u32 = 15;
}

/// The text says nothing of virtual GPUs.
#[derive(Debug, Error)]
#[error("neither a number from 2 to 15, nor such a number, a colon and a list of UUIDs")]
pub struct NoVirtualGpus;

impl fmt::Display for VirtualGpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.per_gpu.fmt(f)?;
        match &self.visible {
            Some(uuids) => write!(f, ":{}", uuids.iter().map(gpus::name).collect::<Vec<_>>().join(",")),
            None => Ok(()),
        }
    }
}

impl FromStr for VirtualGpus {
    type Err = NoVirtualGpus;

    fn from_str(text: &str) -> Result<Self, NoVirtualGpus> {
        let (number, list) = text.split_once(':').map_or((text, None), |(number, list)| (number, Some(list)));
        let per_gpu = number.parse().ok().filter(|it| (2..=Self::MOST).contains(it)).ok_or(NoVirtualGpus)?;
        let visible = list.map(|list| list.split(',').map(gpus::uuid).collect::<Option<Vec<_>>>().ok_or(NoVirtualGpus));
        Ok(Self { per_gpu, visible: visible.transpose()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_shows_is_passed_on() {
        let some = Some(vec![[1; 16], [2; 16]]);
        for it in [VirtualGpus { per_gpu: 2, visible: None }, VirtualGpus { per_gpu: 15, visible: some }] {
            assert_eq!(it.to_string().parse::<VirtualGpus>().unwrap(), it);
        }
        for odd in ["", "1", "16", "2:", "2:GPU-1", "-2", "2:all"] {
            assert!(odd.parse::<VirtualGpus>().is_err(), "{odd}");
        }
    }
}
