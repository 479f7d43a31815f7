//! Text that is not PTX, or no longer is, must be refused or linked, never crash.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;
use rekindle_ptx::{CODE_WINDOW, Env, Fault, FaultKind, LaunchConfig, Memory, Module, Span, launch};

const FIXTURES: &[&str] = &[
    include_str!("fixtures/basic.ptx"),
    include_str!("fixtures/language.ptx"),
    include_str!("fixtures/integers.ptx"),
    include_str!("fixtures/grid.ptx"),
    include_str!("fixtures/half.ptx"),
];

/// Memory in which nothing is mapped, and which ends kernels that run for long.
#[derive(Default)]
struct Nothing {
    cancel: AtomicBool,
    turns: AtomicU64,
}

// SAFETY: it never gives a span.
unsafe impl Memory for Nothing {
    fn resolve(&self, addr: u64, _write: bool) -> Result<Span, Fault> {
        Err(Fault { kind: FaultKind::Unmapped, addr })
    }

    fn safe_point(&self) -> u64 {
        let turns = self.turns.fetch_add(1, Ordering::Relaxed);
        self.cancel.store(turns > 3, Ordering::Relaxed);
        0
    }
}

/// Parses a text, links the result and runs it for a moment.
fn swallow(text: &str) {
    let Ok(module) = Module::parse(text) else { return };
    let Ok(program) = module.link(CODE_WINDOW, &|_| Some(0x1000)) else { return };
    for global in module.globals().iter().filter(|g| g.size < 1 << 20) {
        assert_eq!(program.image(global).len() as u64, global.size);
    }
    for kernel in program.kernels().iter().filter(|k| k.param_bytes < 1 << 16) {
        let params = vec![0x11; kernel.param_bytes as usize];
        let config = LaunchConfig::new([1; 3], [33, 1, 1], &params);
        let memory = Nothing::default();
        let _ = launch(&program, &kernel.name, &config, &memory, &Env::new(&memory.cancel));
    }
}

/// The beginnings of a text's tokens.
fn boundaries(text: &str) -> Vec<usize> {
    let bytes = text.as_bytes();
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'$' || b == b'%';
    (1..bytes.len()).filter(|&i| !(word(bytes[i - 1]) && word(bytes[i]))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn mutated_modules(
        which in 0..FIXTURES.len(),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..5u8), 1..6),
    ) {
        let mut text = FIXTURES[which].to_owned();
        for (first, second, how) in cuts {
            let places = boundaries(&text);
            let (a, b) = (first.index(places.len() - 1), second.index(places.len() - 1));
            let token = |i: usize| text[places[i]..places[i + 1]].to_owned();
            let (left, right) = (token(a), token(b));
            let range = places[a]..places[a + 1];
            match how {
                // A token becomes another one of the text, disappears, doubles, or the text ends.
                0 | 1 => text.replace_range(range, &right),
                2 => text.replace_range(range, ""),
                3 => text.insert_str(places[a], &left),
                _ => text.replace_range(range, "99999999999"),
            }
        }
        swallow(&text);
    }

    #[test]
    fn truncated_modules(which in 0..FIXTURES.len(), at in any::<prop::sample::Index>()) {
        let text = FIXTURES[which];
        let end = at.index(text.len());
        prop_assume!(text.is_char_boundary(end));
        swallow(&text[..end]);
    }

    #[test]
    fn anything(text in "\\PC*") {
        swallow(&text);
    }

    #[test]
    fn nearly_ptx(parts in prop::collection::vec(prop::sample::select(vec![
        ".version 9.0", ".target sm_75", ".visible", ".entry k", ".func f", "(", ")", "{", "}", ";",
        ".reg .b32 %r<4>;", ".reg .b64 %rd<4>;", ".reg .pred %p<2>;", ".param .u64 a", ".local .b8 l[8];",
        ".shared .b8 s[99999999999];", ".global .u32 g[2] = {1, 2, 3};", "L:", "@%p1", "bra L;",
        "mov.u32 %r1, 5;", "ld.u64 %rd1, [%rd2+8];", "st.v2.u32 [l], {%r1, %r2};", "call f, ();", "call (a), %rd1, (a), P;",
        "P: .callprototype (.param .b32 _) _ (.param .b32 _);", "shfl.sync.idx.b32 %r1|%p1, %r2, 1, 2, 3;",
        "mov.b64 {%r1, %r2}, %rd1;", "cvt.s8.f32 %r1, %r2;", "bar.sync %r1, %r2;", "exit;", "ret;", "-", "[", "]",
        "setp.lt.and.f32 %p1|%p1, %r1, 0f00000000, !%p0;", "atom.add.f64 %rd1, [%rd1], %rd1;", "brx.idx %r1, T;",
        "T: .branchtargets L, L;",
    ]), 0..40)) {
        swallow(&format!(".version 9.0\n{}", parts.join(" ")));
        swallow(&format!(".version 9.0 .entry k (.param .u64 a) {{ .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<2>; {} }}", parts.join(" ")));
    }
}
