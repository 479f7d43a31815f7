//! HMAC over MD2 (RFC 2104, RFC 1319), which the runtime's handshake is made of.
//!
//! Not for anything that needs to be secure: MD2 is broken, and the key is in every copy of the CUDA runtime.

const BLOCK: usize = 16;

/// MD2's substitution table, a permutation of the bytes made from the digits of pi.
#[rustfmt::skip]
const PI: [u8; 256] = [
    0x29, 0x2e, 0x43, 0xc9, 0xa2, 0xd8, 0x7c, 0x01, 0x3d, 0x36, 0x54, 0xa1, 0xec, 0xf0, 0x06, 0x13,
    0x62, 0xa7, 0x05, 0xf3, 0xc0, 0xc7, 0x73, 0x8c, 0x98, 0x93, 0x2b, 0xd9, 0xbc, 0x4c, 0x82, 0xca,
    0x1e, 0x9b, 0x57, 0x3c, 0xfd, 0xd4, 0xe0, 0x16, 0x67, 0x42, 0x6f, 0x18, 0x8a, 0x17, 0xe5, 0x12,
    0xbe, 0x4e, 0xc4, 0xd6, 0xda, 0x9e, 0xde, 0x49, 0xa0, 0xfb, 0xf5, 0x8e, 0xbb, 0x2f, 0xee, 0x7a,
    0xa9, 0x68, 0x79, 0x91, 0x15, 0xb2, 0x07, 0x3f, 0x94, 0xc2, 0x10, 0x89, 0x0b, 0x22, 0x5f, 0x21,
    0x80, 0x7f, 0x5d, 0x9a, 0x5a, 0x90, 0x32, 0x27, 0x35, 0x3e, 0xcc, 0xe7, 0xbf, 0xf7, 0x97, 0x03,
    0xff, 0x19, 0x30, 0xb3, 0x48, 0xa5, 0xb5, 0xd1, 0xd7, 0x5e, 0x92, 0x2a, 0xac, 0x56, 0xaa, 0xc6,
    0x4f, 0xb8, 0x38, 0xd2, 0x96, 0xa4, 0x7d, 0xb6, 0x76, 0xfc, 0x6b, 0xe2, 0x9c, 0x74, 0x04, 0xf1,
    0x45, 0x9d, 0x70, 0x59, 0x64, 0x71, 0x87, 0x20, 0x86, 0x5b, 0xcf, 0x65, 0xe6, 0x2d, 0xa8, 0x02,
    0x1b, 0x60, 0x25, 0xad, 0xae, 0xb0, 0xb9, 0xf6, 0x1c, 0x46, 0x61, 0x69, 0x34, 0x40, 0x7e, 0x0f,
    0x55, 0x47, 0xa3, 0x23, 0xdd, 0x51, 0xaf, 0x3a, 0xc3, 0x5c, 0xf9, 0xce, 0xba, 0xc5, 0xea, 0x26,
    0x2c, 0x53, 0x0d, 0x6e, 0x85, 0x28, 0x84, 0x09, 0xd3, 0xdf, 0xcd, 0xf4, 0x41, 0x81, 0x4d, 0x52,
    0x6a, 0xdc, 0x37, 0xc8, 0x6c, 0xc1, 0xab, 0xfa, 0x24, 0xe1, 0x7b, 0x08, 0x0c, 0xbd, 0xb1, 0x4a,
    0x78, 0x88, 0x95, 0x8b, 0xe3, 0x63, 0xe8, 0x6d, 0xe9, 0xcb, 0xd5, 0xfe, 0x3b, 0x00, 0x1d, 0x39,
    0xf2, 0xef, 0xb7, 0x0e, 0x66, 0x58, 0xd0, 0xe4, 0xa6, 0x77, 0x72, 0xf8, 0xeb, 0x75, 0x4b, 0x0a,
    0x31, 0x44, 0x50, 0xb4, 0x8f, 0xed, 0x1f, 0x1a, 0xdb, 0x99, 0x8d, 0x33, 0x9f, 0x11, 0x83, 0x14,
];

/// A running MD2 digest.
struct Md2 {
    state: [u8; 3 * BLOCK],
    checksum: [u8; BLOCK],
    pending: [u8; BLOCK],
    filled: usize,
}

impl Md2 {
    fn new() -> Self {
        Self { state: [0; 3 * BLOCK], checksum: [0; BLOCK], pending: [0; BLOCK], filled: 0 }
    }

    fn update(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.pending[self.filled] = byte;
            self.filled += 1;
            if self.filled == BLOCK {
                let block = self.pending;
                self.sum(&block);
                self.compress(&block);
                self.filled = 0;
            }
        }
    }

    fn sum(&mut self, block: &[u8; BLOCK]) {
        let mut last = self.checksum[BLOCK - 1];
        for (sum, byte) in self.checksum.iter_mut().zip(block) {
            *sum ^= PI[usize::from(byte ^ last)];
            last = *sum;
        }
    }

    fn compress(&mut self, block: &[u8; BLOCK]) {
        for (j, &byte) in block.iter().enumerate() {
            self.state[BLOCK + j] = byte;
            self.state[2 * BLOCK + j] = byte ^ self.state[j];
        }
        let mut t = 0_u8;
        for round in 0..18_u8 {
            for byte in &mut self.state {
                *byte ^= PI[usize::from(t)];
                t = *byte;
            }
            t = t.wrapping_add(round);
        }
    }

    fn finish(mut self) -> [u8; BLOCK] {
        let missing = BLOCK - self.filled;
        // At most 16, so the length is also the padding byte.
        self.update(&[missing as u8; BLOCK][..missing]);
        let checksum = self.checksum;
        self.compress(&checksum);
        let mut digest = [0; BLOCK];
        digest.copy_from_slice(&self.state[..BLOCK]);
        digest
    }
}

/// HMAC-MD2 of a message made of parts, under a key of one block.
pub(super) fn hmac_md2(key: &[u8; BLOCK], parts: &[&[u8]]) -> [u8; BLOCK] {
    let mut inner = Md2::new();
    inner.update(&key.map(|k| k ^ 0x36));
    for part in parts {
        inner.update(part);
    }
    let mut outer = Md2::new();
    outer.update(&key.map(|k| k ^ 0x5c));
    outer.update(&inner.finish());
    outer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn md2(text: &[u8]) -> [u8; BLOCK] {
        let mut digest = Md2::new();
        digest.update(text);
        digest.finish()
    }

    /// The test suite in RFC 1319, appendix A.5.
    #[test]
    fn md2_is_that_of_rfc_1319() {
        let suite: [(&[u8], u128); 7] = [
            (b"", 0x8350e5a3e24c153df2275c9f80692773),
            (b"a", 0x32ec01ec4a6dac72c0ab96fb34c0b5d1),
            (b"abc", 0xda853b0d3f88d99b30283a69e6ded6bb),
            (b"message digest", 0xab4f496bfb2a530b219ff33031fe06b0),
            (b"abcdefghijklmnopqrstuvwxyz", 0x4e8ddff3650292ab5a4108c3aa47940b),
            (b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", 0xda33def2a42df13975352846c30338cd),
            (
                b"12345678901234567890123456789012345678901234567890123456789012345678901234567890",
                0xd5976f79d83d3a0dc9806c3c66f3efd8,
            ),
        ];
        for (text, expected) in suite {
            assert_eq!(u128::from_be_bytes(md2(text)), expected, "{}", String::from_utf8_lossy(text));
        }
    }

    /// Computed independently, in Python, from RFC 2104's definition.
    #[test]
    fn hmac_is_that_of_rfc_2104() {
        let key = 0x146a_ddae_53a9_a752_aa08_4136_0bf5_5a9f_u128.to_be_bytes();
        let bytes: Vec<u8> = (0..100).collect();
        let cases: [(&[u8], u128); 3] = [
            (b"", 0xf66b07aba4a875ea140c2cc013a41c6a),
            (b"abc", 0x815f118c9ab33645d4222c484070ab79),
            (&bytes, 0xdefbb22a4e46ee01c4239113149b1a16),
        ];
        for (text, expected) in cases {
            assert_eq!(u128::from_be_bytes(hmac_md2(&key, &[text])), expected);
            let (head, tail) = text.split_at(text.len() / 3);
            assert_eq!(u128::from_be_bytes(hmac_md2(&key, &[head, tail])), expected);
        }
    }
}
