//! Texels of packed formats: block-compressed ones, of 4 by 4 texels a block, and four channels in a word.
//!
//! ```text
//!   BC1   colors                      8 bytes: two colors of 16 bits, two bits for each texel
//!   BC2   alpha, colors               8 bytes: four bits for each texel
//!   BC3   numbers for alpha, colors   8 bytes: two numbers, three bits for each texel
//!   BC4   numbers    BC5   numbers, numbers
//! ```
//!
//! What lies between two colors a real GPU computes with its own precision. BC6H, BC7 and the formats with sRGB encoding are not
//! read here: arrays of these are only copied.

/// Whether texels of a block-compressed format can be read.
pub(crate) fn reads(format: u32) -> bool {
    matches!(format, 0x91 | 0x93 | 0x95 | 0x97..=0x9a)
}

/// A texel of a block, counted by rows; or the four channels of a word.
pub(crate) fn texel(format: u32, block: &[u8; 16], texel: usize) -> [f32; 4] {
    let ([first, ..], [second, ..]) = (block.as_chunks::<8>().0, &block.as_chunks::<8>().0[1..]) else {
        return [0.0; 4];
    };
    match format {
        0x91 => color(first, texel, true),
        0x93 => {
            let [red, green, blue, _] = color(second, texel, false);
            let alpha = u64::from_le_bytes(*first) >> (4 * texel) & 15;
            [red, green, blue, alpha as f32 / 15.0]
        }
        0x95 => {
            let [red, green, blue, _] = color(second, texel, false);
            [red, green, blue, number(first, texel, false)]
        }
        0x97 | 0x98 => [number(first, texel, format == 0x98), 0.0, 0.0, 1.0],
        0x99 | 0x9a => [number(first, texel, format == 0x9a), number(second, texel, format == 0x9a), 0.0, 1.0],
        0x50 => {
            let word = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            let ten = |at: u32| (word >> at & 1023) as f32 / 1023.0;
            [ten(0), ten(10), ten(20), (word >> 30) as f32 / 3.0]
        }
        _ => [0.0; 4],
    }
}

/// A texel of a block of colors. Where the first color is not the greater number, the fourth one is black, and transparent in
/// BC1.
fn color(block: &[u8; 8], texel: usize, of_bc1: bool) -> [f32; 4] {
    let [a, b, c, d, ..] = *block;
    let (one, two) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
    let rgb = |color: u16| {
        let part = |at: u32, most: u16| f32::from(color >> at & most) / f32::from(most);
        [part(11, 31), part(5, 63), part(0, 31)]
    };
    let index = u64::from_le_bytes(*block) >> (32 + 2 * texel) & 3;
    let between =
        |weight: f32| std::array::from_fn::<f32, 3, _>(|i| (1.0 - weight) * rgb(one)[i] + weight * rgb(two)[i]);
    let three = of_bc1 && one <= two;
    let [red, green, blue] = match index {
        0 => rgb(one),
        1 => rgb(two),
        2 => between(if three { 0.5 } else { 1.0 / 3.0 }),
        _ if three => return [0.0; 4],
        _ => between(2.0 / 3.0),
    };
    [red, green, blue, 1.0]
}

/// A texel of a block of numbers.
fn number(block: &[u8; 8], texel: usize, signed: bool) -> f32 {
    let value = |byte: u8| if signed { (f32::from(byte as i8) / 127.0).max(-1.0) } else { f32::from(byte) / 255.0 };
    let (one, two) = (value(block[0]), value(block[1]));
    let index = (u64::from_le_bytes(*block) >> (16 + 3 * texel) & 7) as u8;
    let between = |steps: u8| {
        let weight = f32::from(index - 1) / f32::from(steps);
        (1.0 - weight) * one + weight * two
    };
    match index {
        0 => one,
        1 => two,
        _ if one > two => between(7),
        6 => {
            if signed {
                -1.0
            } else {
                0.0
            }
        }
        7 => 1.0,
        _ => between(5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(first: u64, second: u64) -> [u8; 16] {
        let mut block = [0; 16];
        block[..8].copy_from_slice(&first.to_le_bytes());
        block[8..].copy_from_slice(&second.to_le_bytes());
        block
    }

    #[test]
    fn colors_are_those_of_the_block_or_between_them() {
        // Red and blue; texels 0 to 3 have the four colors.
        let colors = 0xf800 | 0x001f << 16 | 0b11_10_01_00 << 32;
        let of = |format, block: [u8; 16]| [0, 1, 2, 3].map(|at| texel(format, &block, at));
        let third = 1.0 / 3.0;
        let four = [
            [1.0, 0.0, 0.0, 1.0],
            [0.0, 0.0, 1.0, 1.0],
            [1.0 - third, 0.0, third, 1.0],
            [1.0 - 2.0 / 3.0, 0.0, 2.0 / 3.0, 1.0],
        ];
        assert_eq!(of(0x91, block(colors, 0)), four);
        // With the smaller first there is one color between them, and none.
        let turned = 0x001f | 0xf800 << 16 | 0b11_10_01_00 << 32;
        assert_eq!(of(0x91, block(turned, 0))[2..], [[0.5, 0.0, 0.5, 1.0], [0.0; 4]]);
        assert_eq!(of(0x93, block(0xf0, colors))[..2], [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]);
    }

    #[test]
    fn numbers_are_those_of_the_block_or_between_them_or_the_ends() {
        let indices = |all: [u64; 8]| (0..8).fold(0, |word, at| word | all[at] << (16 + 3 * at));
        let all = indices([0, 1, 2, 3, 4, 5, 6, 7]);
        let of = |format, word: u64| [0, 1, 6, 7].map(|at| texel(format, &block(word, 0), at)[0]);
        assert_eq!(of(0x97, all | 255), [1.0, 0.0, 1.0 - 5.0 / 7.0, 1.0 - 6.0 / 7.0]);
        assert_eq!(of(0x97, all | 255 << 8), [0.0, 1.0, 0.0, 1.0]);
        assert_eq!(of(0x98, all | 0x81 | 0x7f << 8), [-1.0, 1.0, -1.0, 1.0]);
        let both = block(all | 255, all | 255 << 8);
        assert_eq!([0, 1].map(|at| texel(0x99, &both, at)), [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]]);
        let alpha = block(all | 255, 0xffff | 0xffff << 16);
        assert_eq!(texel(0x95, &alpha, 1), [1.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn a_word_has_three_channels_of_ten_bits_and_one_of_two() {
        let word = block(1023 | 1023 << 20 | 1 << 30, 0);
        assert_eq!(texel(0x50, &word, 0), [1.0, 0.0, 1.0, 1.0 / 3.0]);
    }
}
