//! `mapa` and `getctarank`: addresses of the shared memory of another block of the cluster.

use crate::exec::machine::{Exec, RANK_SHIFT};

/// A block's rank and one, in an address.
const RANK_MASK: u64 = 0xff;

/// `mapa`: the same place in the shared memory of the block of this rank.
fn mapped(addr: u64, rank: u32) -> u64 {
    (addr & !(RANK_MASK << RANK_SHIFT)) | ((u64::from(rank) + 1) & RANK_MASK) << RANK_SHIFT
}

/// The exec of `mapa`, of addresses of 64 or of 32 bits.
pub(crate) fn mapa(wide: bool) -> Exec {
    if wide {
        |w, i| w.map2(i, |addr: u64, rank: u32| mapped(addr, rank))
    } else {
        |w, i| w.map2(i, |addr: u32, rank: u32| mapped(u64::from(addr), rank) as u32)
    }
}

/// The rank that an address names; `own` where it names none.
fn rank(addr: u64, own: u32) -> u32 {
    match (addr >> RANK_SHIFT) & RANK_MASK {
        0 => own,
        named => named as u32 - 1,
    }
}

/// The exec of `getctarank`, whose second source is the own rank.
pub(crate) fn rank_of(wide: bool) -> Exec {
    if wide {
        |w, i| w.map2(i, |addr: u64, own: u32| rank(addr, own))
    } else {
        |w, i| w.map2(i, |addr: u32, own: u32| rank(addr.into(), own))
    }
}
