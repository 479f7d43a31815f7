//! Elements of textures: their bytes as the components that a kernel gets.

use rekindle_cuda_abi::types::{channel_bytes, packing};

use crate::blocks;

/// How elements are stored and read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    /// `CUarray_format`.
    pub(crate) format: u32,
    /// Components of an element.
    pub(crate) channels: u32,
    /// Whether integers are read as integers, instead of as numbers from 0 or -1 to 1.
    pub(crate) integers: bool,
}

/// Four components.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Element {
    /// Numbers.
    Floats([f32; 4]),
    /// Integers, by their bits.
    Integers([u32; 4]),
}

impl Element {
    /// The components as numbers, for filters.
    pub(crate) fn floats(self) -> [f32; 4] {
        match self {
            Element::Floats(values) => values,
            Element::Integers(bits) => bits.map(|b| b.cast_signed() as f32),
        }
    }

    /// The components as the bits of registers.
    pub(crate) fn bits(self) -> [u32; 4] {
        match self {
            Element::Floats(values) => values.map(f32::to_bits),
            Element::Integers(bits) => bits,
        }
    }
}

impl Format {
    /// A format. The normalised ones are integers that are not read as integers.
    pub(crate) fn new(format: u32, channels: u32, integers: bool) -> Self {
        let plain = match format {
            0xc0..=0xc2 => 0x01,
            0xc3..=0xc5 => 0x02,
            0xc6..=0xc8 => 0x08,
            0xc9..=0xcb => 0x09,
            format => return Self { format, channels, integers },
        };
        Self { format: plain, channels, integers: false }
    }

    fn channel(&self) -> usize {
        channel_bytes(self.format).unwrap_or(1)
    }

    /// Bytes of an element or a block, at most 16.
    pub(crate) fn bytes(&self) -> usize {
        packing(self.format).map_or_else(|| self.channel() * self.channels.min(4) as usize, |it| it.bytes)
    }

    /// Texels along each edge of what [`Format::bytes`] are.
    pub(crate) fn edge(&self) -> usize {
        packing(self.format).map_or(1, |it| it.edge)
    }

    fn signed(&self) -> bool {
        matches!(self.format, 0x08..=0x0a)
    }

    /// Whether a component is a floating point number.
    fn float(&self) -> bool {
        matches!(self.format, 0x10 | 0x20)
    }

    /// Whether elements are read as integers. Integers of 32 bits always are.
    fn as_integers(&self) -> bool {
        packing(self.format).is_none() && !self.float() && (self.integers || self.channel() == 4)
    }

    /// The color outside the texture.
    pub(crate) fn border(&self, color: [f32; 4]) -> Element {
        if self.as_integers() { Element::Integers(color.map(f32::to_bits)) } else { Element::Floats(color) }
    }

    /// The components of an element's bytes, or of the texel at that place of a block. Missing components are 0, the last 1.
    pub(crate) fn decode(&self, raw: &[u8; 16], [x, y]: [usize; 2]) -> Element {
        if packing(self.format).is_some() {
            return Element::Floats(blocks::texel(self.format, raw, 4 * y + x));
        }
        let size = self.channel();
        let bits = |i: usize| {
            let mut word = [0; 4];
            word[..size].copy_from_slice(&raw[i * size..(i + 1) * size]);
            let value = u32::from_le_bytes(word);
            match (self.signed(), size) {
                (true, 1) => i32::from(value as i8).cast_unsigned(),
                (true, 2) => i32::from(value as i16).cast_unsigned(),
                _ => value,
            }
        };
        let count = self.channels.min(4) as usize;
        if self.as_integers() {
            return Element::Integers(std::array::from_fn(|i| if i < count { bits(i) } else { u32::from(i == 3) }));
        }
        let most = ((1_u64 << (8 * size as u32 - u32::from(self.signed()))) - 1) as f32;
        let value = |i: usize| match self.format {
            0x20 => f32::from_bits(bits(i)),
            0x10 => half(bits(i) as u16),
            _ if self.signed() => (bits(i).cast_signed() as f32 / most).max(-1.0),
            _ => bits(i) as f32 / most,
        };
        Element::Floats(std::array::from_fn(|i| if i < count { value(i) } else { f32::from(u8::from(i == 3)) }))
    }
}

/// A half as a float.
fn half(bits: u16) -> f32 {
    let (sign, exponent, mantissa) = (u32::from(bits >> 15) << 31, u32::from(bits >> 10 & 31), u32::from(bits & 1023));
    match exponent {
        0 => f32::from_bits(sign | (mantissa as f32 * 2.0_f32.powi(-24)).to_bits()),
        31 => f32::from_bits(sign | 0x7f80_0000 | mantissa << 13),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | mantissa << 13),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_read_as_their_format_says() {
        let raw: [u8; 16] = std::array::from_fn(|i| [255, 128, 0, 51][i % 4]);
        let format = |format, channels, integers| Format::new(format, channels, integers).decode(&raw, [0, 0]);
        assert_eq!(format(0x01, 2, false), Element::Floats([1.0, 128.0 / 255.0, 0.0, 1.0]));
        assert_eq!(format(0x08, 4, true), Element::Integers([u32::MAX, 128_u32.wrapping_neg(), 0, 51]));
        assert_eq!(format(0x08, 2, false), Element::Floats([-1.0 / 127.0, -1.0, 0.0, 1.0]));
        assert_eq!(format(0x03, 1, false), Element::Integers([0x3300_80ff, 0, 0, 1]));
        // Normalised formats are read as numbers, whatever the texture says.
        assert_eq!(format(0xc1, 2, true), format(0x01, 2, false));
        assert_eq!(format(0xc7, 2, true), format(0x08, 2, false));
        assert_eq!(half(0x3c00), 1.0);
        assert_eq!(half(0xc000), -2.0);
        assert_eq!(half(1), 2.0_f32.powi(-24));
    }
}
