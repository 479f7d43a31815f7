//! One conversion of a `printf` format, formatted as C formats it.

/// A conversion: flags, width, precision, length and letter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Spec {
    left: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    zero: bool,
    width: usize,
    precision: Option<usize>,
    pub(crate) width_from_argument: bool,
    pub(crate) precision_from_argument: bool,
    /// The argument has 64 bits.
    pub(crate) long: bool,
    pub(crate) conversion: u8,
}

/// Widths and precisions beyond this are cut: no program needs that much padding.
const WIDTH_LIMIT: usize = 4096;

impl Spec {
    /// Reads a conversion, behind its percent sign, and returns it with the rest of the text. None if the conversion is
    /// invalid.
    pub(crate) fn parse(mut text: &[u8]) -> Option<(Spec, &[u8])> {
        let mut spec = Spec::default();
        loop {
            match text.first()? {
                b'-' => spec.left = true,
                b'+' => spec.plus = true,
                b' ' => spec.space = true,
                b'#' => spec.alternate = true,
                b'0' => spec.zero = true,
                _ => break,
            }
            text = &text[1..];
        }
        if text.first() == Some(&b'*') {
            spec.width_from_argument = true;
            text = &text[1..];
        } else {
            (spec.width, text) = number(text);
        }
        if text.first() == Some(&b'.') {
            text = &text[1..];
            if text.first() == Some(&b'*') {
                spec.precision_from_argument = true;
                text = &text[1..];
            } else {
                let (precision, rest) = number(text);
                (spec.precision, text) = (Some(precision), rest);
            }
        }
        while let Some(length @ (b'l' | b'h' | b'z' | b'j' | b't')) = text.first() {
            spec.long |= *length != b'h';
            text = &text[1..];
        }
        spec.conversion = *text.first()?;
        let known = b"diuxXocspfFeEgGaA%".contains(&spec.conversion);
        known.then_some((spec, &text[1..]))
    }

    /// Sets the width for `*`: a negative one means to the left.
    pub(crate) fn set_width(&mut self, width: i32) {
        self.left |= width < 0;
        self.width = (width.unsigned_abs() as usize).min(WIDTH_LIMIT);
    }

    /// Sets the precision for `.*`: a negative one counts as none.
    pub(crate) fn set_precision(&mut self, precision: i32) {
        self.precision = usize::try_from(precision).ok().map(|p| p.min(WIDTH_LIMIT));
    }

    fn pad(&self, out: &mut Vec<u8>, prefix: &[u8], body: &[u8], zeros: bool) {
        let fill = self.width.saturating_sub(prefix.len() + body.len());
        if !self.left && !zeros {
            out.extend(std::iter::repeat_n(b' ', fill));
        }
        out.extend_from_slice(prefix);
        if !self.left && zeros {
            out.extend(std::iter::repeat_n(b'0', fill));
        }
        out.extend_from_slice(body);
        if self.left {
            out.extend(std::iter::repeat_n(b' ', fill));
        }
    }

    fn sign(&self, negative: bool) -> &'static [u8] {
        match (negative, self.plus, self.space) {
            (true, ..) => b"-",
            (_, true, _) => b"+",
            (_, _, true) => b" ",
            _ => b"",
        }
    }

    fn integer(&self, out: &mut Vec<u8>, prefix: &[u8], mut digits: String) {
        if let Some(precision) = self.precision {
            if precision == 0 && digits == "0" {
                digits.clear();
            }
            digits.insert_str(0, &"0".repeat(precision.saturating_sub(digits.len())));
        }
        self.pad(out, prefix, digits.as_bytes(), self.zero && self.precision.is_none());
    }

    /// `%s` and `%c`.
    pub(crate) fn string(&self, out: &mut Vec<u8>, text: &[u8]) {
        let length = self.precision.unwrap_or(text.len()).min(text.len());
        self.pad(out, b"", &text[..length], false);
    }

    /// `%p`.
    pub(crate) fn pointer(&self, out: &mut Vec<u8>, value: u64) {
        if value == 0 {
            self.pad(out, b"", b"(nil)", false);
        } else {
            self.pad(out, b"0x", format!("{value:x}").as_bytes(), false);
        }
    }

    /// `%d` and `%i`.
    pub(crate) fn signed(&self, out: &mut Vec<u8>, value: i64) {
        self.integer(out, self.sign(value < 0), value.unsigned_abs().to_string());
    }

    /// `%u`, `%x`, `%X` and `%o`.
    pub(crate) fn unsigned(&self, out: &mut Vec<u8>, value: u64) {
        let (prefix, digits) = match self.conversion {
            b'x' => ("0x", format!("{value:x}")),
            b'X' => ("0X", format!("{value:X}")),
            b'o' => ("0", format!("{value:o}")),
            _ => ("", value.to_string()),
        };
        let prefix = if self.alternate && value != 0 { prefix } else { "" };
        self.integer(out, prefix.as_bytes(), digits);
    }

    /// `%f`, `%e`, `%g`, `%a` and their capitals.
    pub(crate) fn float(&self, out: &mut Vec<u8>, value: f64) {
        let sign = self.sign(value.is_sign_negative());
        let magnitude = value.abs();
        let precision = self.precision.unwrap_or(6);
        let mut body = if value.is_nan() {
            "nan".to_owned()
        } else if value.is_infinite() {
            "inf".to_owned()
        } else {
            match self.conversion.to_ascii_lowercase() {
                b'f' => self.fixed(magnitude, precision),
                b'e' => self.scientific(magnitude, precision),
                b'a' => hexadecimal(magnitude, self.precision),
                _ => self.general(magnitude, precision.max(1)),
            }
        };
        if self.conversion.is_ascii_uppercase() {
            body.make_ascii_uppercase();
        }
        self.pad(out, sign, body.as_bytes(), self.zero && value.is_finite());
    }

    fn fixed(&self, magnitude: f64, precision: usize) -> String {
        let dot = if self.alternate && precision == 0 { "." } else { "" };
        format!("{magnitude:.precision$}{dot}")
    }

    fn scientific(&self, magnitude: f64, precision: usize) -> String {
        let text = format!("{magnitude:.precision$e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let dot = if self.alternate && precision == 0 { "." } else { "" };
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}{dot}e{sign}{:02}", exponent.unsigned_abs())
    }

    fn general(&self, magnitude: f64, precision: usize) -> String {
        let text = format!("{magnitude:.*e}", precision - 1);
        let exponent: i32 = text.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
        let plain = exponent >= -4 && exponent < precision as i32;
        let text = if plain {
            let decimals = (precision as i32 - 1 - exponent).max(0) as usize;
            self.fixed(magnitude, decimals)
        } else {
            self.scientific(magnitude, precision - 1)
        };
        if self.alternate || !text.contains('.') {
            return text;
        }
        let (mantissa, exponent) = match text.find('e') {
            Some(at) => text.split_at(at),
            None => (text.as_str(), ""),
        };
        format!("{}{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.'))
    }
}

fn hexadecimal(magnitude: f64, precision: Option<usize>) -> String {
    let bits = magnitude.to_bits();
    let (mut exponent, mut fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
    let mut lead = u64::from(exponent != 0);
    exponent = match (exponent, fraction) {
        (0, 0) => 0,
        (0, _) => -1022,
        _ => exponent - 1023,
    };
    if let Some(precision) = precision.filter(|&p| p < 13) {
        let drop = 52 - 4 * precision as u32;
        let whole = lead << 52 | fraction;
        let half = 1 << (drop - 1);
        let odd = whole >> drop & 1;
        let rounded = (whole + half - 1 + odd) >> drop << drop;
        (lead, fraction) = (rounded >> 52, rounded & ((1 << 52) - 1));
    }
    let mut digits = format!("{fraction:013x}");
    match precision {
        Some(p) if p < 13 => digits.truncate(p),
        Some(p) => digits.extend(std::iter::repeat_n('0', p - 13)),
        None => digits.truncate(digits.trim_end_matches('0').len()),
    }
    let dot = if digits.is_empty() { "" } else { "." };
    format!("0x{lead}{dot}{digits}p{exponent:+}")
}

fn number(text: &[u8]) -> (usize, &[u8]) {
    let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
    let value = text[..digits].iter().fold(0usize, |n, &b| n.saturating_mul(10).saturating_add(usize::from(b - b'0')));
    (value.min(WIDTH_LIMIT), &text[digits..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> Spec {
        Spec::parse(&text.as_bytes()[1..]).unwrap().0
    }

    fn float(format: &str, value: f64) -> String {
        let mut out = Vec::new();
        spec(format).float(&mut out, value);
        String::from_utf8(out).unwrap()
    }

    fn int(format: &str, value: i64) -> String {
        let mut out = Vec::new();
        let spec = spec(format);
        if spec.conversion == b'd' {
            spec.signed(&mut out, value)
        } else {
            spec.unsigned(&mut out, value as u64)
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn integers() {
        assert_eq!(int("%d", -5), "-5");
        assert_eq!(int("%5d|", 42), "   42");
        assert_eq!(int("%-5d", 42), "42   ");
        assert_eq!(int("%05d", -42), "-0042");
        assert_eq!(int("%+d", 1), "+1");
        assert_eq!(int("%.3d", 7), "007");
        assert_eq!(int("%#x", 255), "0xff");
        assert_eq!(int("%08X", 0xbeef), "0000BEEF");
        assert!(spec("%llu").long && spec("%zu").long && !spec("%hhd").long);
    }

    #[test]
    fn floats() {
        assert_eq!(float("%f", 1.5), "1.500000");
        assert_eq!(float("%.2f", -0.005), "-0.01");
        assert_eq!(float("%e", 12345.678), "1.234568e+04");
        assert_eq!(float("%g", 100_000.0), "100000");
        assert_eq!(float("%g", 1_000_000.0), "1e+06");
        assert_eq!(float("%g", 0.0001), "0.0001");
        assert_eq!(float("%g", 0.00001), "1e-05");
        assert_eq!(float("%G", f64::INFINITY), "INF");
        assert_eq!(float("%8.3f", 2.71878), "   2.719");
        assert_eq!(float("%a", 1.0), "0x1p+0");
    }
}
