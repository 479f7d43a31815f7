//! ChaCha20 (RFC 8439) as a source of key words: its key stream under a nonce of zeros.

/// The words of the key stream, one after the other.
pub(super) struct Words {
    state: [u32; 16],
    block: [u32; 16],
    used: usize,
}

impl Words {
    /// Begins with a key of 128 bits, which is used twice, as ChaCha does with short keys ("expand 16-byte k").
    pub(super) fn new(key: &[u8; 16]) -> Self {
        let mut state = [0; 16];
        let halves = [b"expand 16-byte k", key, key];
        for (word, bytes) in state.iter_mut().zip(halves.iter().flat_map(|half| half.as_chunks::<4>().0)) {
            *word = u32::from_le_bytes(*bytes);
        }
        Self { state, block: [0; 16], used: 16 }
    }

    pub(super) fn next(&mut self) -> u32 {
        if self.used == 16 {
            self.block = block(&self.state);
            self.state[12] = self.state[12].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }
}

fn block(state: &[u32; 16]) -> [u32; 16] {
    let mut x = *state;
    let mut quarter = |a: usize, b: usize, c: usize, d: usize| {
        for (left, right) in [(16, 12), (8, 7)] {
            x[a] = x[a].wrapping_add(x[b]);
            x[d] = (x[d] ^ x[a]).rotate_left(left);
            x[c] = x[c].wrapping_add(x[d]);
            x[b] = (x[b] ^ x[c]).rotate_left(right);
        }
    };
    for _ in 0..10 {
        (0..4).for_each(|i| quarter(i, 4 + i, 8 + i, 12 + i));
        (0..4).for_each(|i| quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4));
    }
    std::array::from_fn(|i| x[i].wrapping_add(state[i]))
}

#[cfg(test)]
mod tests {
    /// RFC 8439, 2.3.2.
    #[test]
    fn a_block_is_the_standards() {
        let mut state = [0; 16];
        let key: Vec<u8> = (0..32).collect();
        let nonce = [0, 0, 0, 9, 0, 0, 0, 0x4a, 0, 0, 0, 0];
        let bytes = [b"expand 32-byte k".to_vec(), key, vec![1, 0, 0, 0], nonce.to_vec()].concat();
        for (word, bytes) in state.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let block = super::block(&state);
        assert_eq!(block[..4], [0xe4e7_f110, 0x1559_3bd1, 0x1fdd_0f50, 0xc471_20a3]);
        assert_eq!(block[12..], [0xd19c_12b5, 0xb94e_16de, 0xe883_d0cb, 0x4e3c_50a2]);
    }
}
