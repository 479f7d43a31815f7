//! Finds the addresses that the parameters of a kernel name.

use std::collections::HashMap;
use std::ops::Range;

use rekindle_wire::tensor_map::BYTES;

/// How addresses are found in the parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Class {
    /// (a) The name has no signature: every value may be an address, and its memory may be written.
    Values,
    /// (b) The signature is known: memory that pointers to constants name is only read.
    Signature,
    /// (c) The layout is unknown, or the kernel has made a mispredicted write: the kernel may access everything.
    Everything,
}

/// `CUtensorMap` is aligned to this many bytes.
const MAP_ALIGN: usize = 64;
/// The maximum number of remembered maps. A kernel that writes through a further map makes a mispredicted write.
const MOST_MAPS: usize = 1 << 16;

/// The tensor maps that were encoded, each with its tensor's address, which cannot be read from the map.
#[derive(Debug, Default)]
pub(crate) struct TensorMaps(HashMap<[u8; BYTES], u64>);

impl TensorMaps {
    /// Adds a map that was encoded for a tensor at this address.
    pub(crate) fn add(&mut self, map: [u8; BYTES], address: u64) {
        if self.0.len() < MOST_MAPS || self.0.contains_key(&map) {
            self.0.insert(map, address);
        }
    }

    fn find(&self, bytes: &[u8]) -> Option<u64> {
        self.0.get(bytes).copied()
    }
}

/// Calls `named` with every value in the parameters that may be an address, its offset, and whether the memory there may be
/// written: each word that is aligned to 8 bytes, and the tensor address of each tensor map. `constant` is where pointers to
/// constants lie.
pub(crate) fn scan(
    parameters: &[u8],
    constant: &[Range<usize>],
    maps: &TensorMaps,
    mut named: impl FnMut(u64, usize, bool),
) {
    let words = parameters.as_chunks::<8>().0;
    for (i, word) in words.iter().enumerate() {
        let at = i * 8;
        let read_only = constant.iter().any(|range| range.contains(&at));
        named(u64::from_le_bytes(*word), at, !read_only);
    }
    if maps.0.is_empty() {
        return;
    }
    for at in (0..parameters.len()).step_by(MAP_ALIGN) {
        if let Some(address) = parameters.get(at..at + BYTES).and_then(|bytes| maps.find(bytes)) {
            named(address, at, true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn found(parameters: &[u8], constant: &[Range<usize>], maps: &TensorMaps) -> Vec<(u64, bool)> {
        let mut found = Vec::new();
        scan(parameters, constant, maps, |value, _, written| found.push((value, written)));
        found
    }

    #[test]
    fn structures_are_looked_through_and_pointers_to_constants_are_read() {
        let words = [0x2000_0000_0000_u64, 7, 0x2000_0000_0200];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend([1, 2, 3]);
        let expected = [(words[0], false), (7, true), (words[2], true)];
        assert_eq!(found(&bytes, std::slice::from_ref(&(0..8)), &TensorMaps::default()), expected);
    }

    #[test]
    fn each_value_has_its_offset() {
        let mut maps = TensorMaps::default();
        maps.add([9; BYTES], 7);
        let mut bytes = vec![0; 64];
        bytes.extend([9; BYTES]);
        let mut offsets = Vec::new();
        scan(&bytes, &[], &maps, |value, at, _| offsets.push((value, at)));
        assert!(offsets.contains(&(0, 56)) && offsets.contains(&(7, 64)), "{offsets:?}");
    }

    #[test]
    fn a_tensor_map_names_what_it_was_encoded_for() {
        let mut maps = TensorMaps::default();
        maps.add([9; BYTES], 0x2000_0000_0000);
        let mut bytes = vec![0; 64];
        bytes.extend([9; BYTES]);
        assert!(found(&bytes, &[], &maps).contains(&(0x2000_0000_0000, true)));
        // A map is found only where one may lie, and only as a whole.
        bytes.insert(0, 0);
        assert!(!found(&bytes, &[], &maps).contains(&(0x2000_0000_0000, true)));
        assert!(!found(&[9; BYTES - 1], &[], &maps).contains(&(0x2000_0000_0000, true)));
    }

    proptest! {
        #[test]
        fn every_aligned_word_of_any_bytes_is_named_once(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            constant in proptest::collection::vec((0_usize..40).prop_map(|i| i * 8..i * 8 + 8), 0..4),
        ) {
            let expected: Vec<_> = (0..bytes.len() / 8).map(|i| {
                let word = u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap());
                (word, !constant.iter().any(|range| range.start == i * 8))
            }).collect();
            prop_assert_eq!(found(&bytes, &constant, &TensorMaps::default()), expected.clone());
            // Maps add further addresses, wherever they lie.
            let mut maps = TensorMaps::default();
            if let Some(map) = bytes.get(..BYTES) {
                maps.add(map.try_into().unwrap(), 5);
                prop_assert!(found(&bytes, &constant, &maps).len() > expected.len());
            }
        }
    }
}
