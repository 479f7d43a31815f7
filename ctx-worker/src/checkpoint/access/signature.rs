//! Reads a kernel's parameter types from its mangled name.

use std::fmt::{self, Write};

use cpp_demangle::{BorrowedSymbol, DemangleOptions, ParseOptions};

/// Names come from the client's code. Longer names are treated as names without a signature.
const MOST_NAME: usize = 4096;
/// The maximum length of the demangled text: a name may stand for a text of any length.
const MOST_TEXT: usize = 64 << 10;
/// Limits the demangler's frames on the stack of the worker's main thread.
const DEPTH: u32 = 128;

/// For each parameter, whether it is a pointer to constant memory. `None` if the name has no signature (`extern "C"`) or the
/// signature is not understood.
pub(crate) fn constant_pointers(name: &str) -> Option<Vec<bool>> {
    let parameters = parameters(name)?;
    Some(split(&parameters)?.into_iter().map(is_constant_pointer).collect())
}

/// The text between the parentheses of the parameter list.
fn parameters(name: &str) -> Option<String> {
    if !name.starts_with("_Z") || name.len() > MOST_NAME {
        return None;
    }
    let options = ParseOptions::default().recursion_limit(DEPTH);
    let (symbol, rest) = BorrowedSymbol::with_tail_and_options(name.as_bytes(), &options).ok()?;
    if !rest.is_empty() {
        return None;
    }
    let text = |options: DemangleOptions| {
        let mut text = Bounded(String::new());
        symbol.structured_demangle(&mut text, &options.recursion_limit(DEPTH)).ok().map(|()| text.0)
    };
    let options = DemangleOptions::new().no_return_type();
    let (whole, bare) = (text(options)?, text(options.no_params())?);
    let list = whole.strip_prefix(&bare)?.strip_prefix('(')?.strip_suffix(')')?;
    Some(list.to_owned())
}

struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > MOST_TEXT {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// The types of a list; those that have commas of their own have them in brackets.
fn split(list: &str) -> Option<Vec<&str>> {
    let (mut types, mut start, mut open) = (Vec::new(), 0, Vec::new());
    for (at, byte) in list.bytes().enumerate() {
        match byte {
            b'<' => open.push(b'>'),
            b'(' => open.push(b')'),
            b'{' => open.push(b'}'),
            b'[' => open.push(b']'),
            b'>' | b')' | b'}' | b']' if open.pop() != Some(byte) => return None,
            b',' if open.is_empty() => {
                types.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = list[start..].trim();
    if !(types.is_empty() && (last.is_empty() || last == "void")) {
        types.push(last);
    }
    open.is_empty().then_some(types)
}

/// Qualifiers follow what they qualify: `float const*`.
fn is_constant_pointer(text: &str) -> bool {
    let qualified = |text: &str| -> (bool, usize) {
        let (mut rest, mut constant) = (text.trim_end(), false);
        while let Some((word, before)) = ["const", "volatile", "restrict", "__restrict", "__restrict__"]
            .iter()
            .find_map(|word| Some((word, rest.strip_suffix(word)?)))
            .filter(|(_, before)| before.ends_with([' ', '*', '&', '>']))
        {
            constant |= *word == "const";
            rest = before.trim_end();
        }
        (constant, rest.len())
    };
    // A qualifier behind the star applies to the pointer itself.
    let (_, end) = qualified(text);
    text[..end].strip_suffix('*').is_some_and(|pointee| qualified(pointee).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_say_what_is_constant() {
        let of = |name| constant_pointers(name);
        // add(float const*, float const*, float*, int)
        assert_eq!(of("_Z3addPKfS0_Pfi"), Some(vec![true, true, false, false]));
        // none()
        assert_eq!(of("_Z4nonev"), Some(vec![]));
        // void axpy<float>(float, float const*, float*, unsigned long)
        assert_eq!(of("_Z4axpyIfEvT_PKS0_PS0_m"), Some(vec![false, true, false, false]));
        // void f<float const>(float const*)
        assert_eq!(of("_Z1fIKfEvPT_"), Some(vec![true]));
        // g(float const* const*, float* const*, float const**): the pointers are constant, or what they lead to
        assert_eq!(of("_Z1gPKPKfPKPfPS0_"), Some(vec![true, true, false]));
        // h(Pair<float const*, int>, std::pair<int, int>*)
        assert_eq!(of("_Z1h4PairIPKfiEPSt4pairIiiE"), Some(vec![false, false]));
        // k(void (*)(int const*, int), volatile int const*)
        assert_eq!(of("_Z1kPFvPKiiEPVS_"), Some(vec![false, true]));
    }

    #[test]
    fn kernels_of_pytorch_have_signatures() {
        let name =
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_";
        assert_eq!(constant_pointers(name), Some(vec![false, false, false]));
        let name = "_ZN2at6native12_GLOBAL__N_120softmax_warp_forwardIfffLi5ELb0ELb0EEEvPT0_PKT_iiiPKbib";
        let expected = [false, true, false, false, false, true, false, false];
        assert_eq!(constant_pointers(name), Some(expected.to_vec()));
    }

    #[test]
    fn other_names_have_none() {
        for name in ["", "main", "_Z", "_Z3ad", "ampere_sgemm_128x64_nn", "triton_poi_fused_add_0", "_Z1fi.part.0"] {
            assert_eq!(constant_pointers(name), None, "{name}");
        }
        assert_eq!(constant_pointers(&format!("_Z5000{}v", "f".repeat(5000))), None);
        // A name that stands for an endless text.
        let mut bomb = String::from("_Z1f1aIiE");
        (0..200).for_each(|i| bomb.push_str(&format!("1aIS{}_S{}_E", to36(i), to36(i))));
        let _ = constant_pointers(&bomb);
        let deep = format!("_Z1f{}i", "P".repeat(4000));
        let _ = constant_pointers(&deep);
    }

    fn to36(mut i: u32) -> String {
        let mut digits = Vec::new();
        loop {
            digits.push(char::from_digit(i % 36, 36).unwrap().to_ascii_uppercase());
            i /= 36;
            if i == 0 {
                return digits.into_iter().rev().collect();
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_survived(tail in "[a-zA-Z0-9_]{0,60}", list in "[ -~]{0,60}") {
            let _ = constant_pointers(&format!("_Z{tail}"));
            let _ = split(&list).map(|types| types.into_iter().map(is_constant_pointer).count());
        }
    }
}
