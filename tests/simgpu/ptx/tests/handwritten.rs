//! Instructions that compilers seldom emit, written by hand.

#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use common::{Device, Params};
use rekindle_ptx::{FaultKind, LaunchConfig, Module};

/// Runs instructions that leave results in `%r0`..`%r7` in each of 64 threads, and returns these. `%rd0` holds the address of
/// the output, `%r8` the thread.
fn run(body: &str) -> Vec<[u32; 8]> {
    let mut text = String::from(
        ".version 9.0\n.target sm_90\n.address_size 64\n.entry k(.param .u64 out) {\n\
         .reg .b16 %h<10>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .pred %p<10>;\n\
         .reg .f32 %f<10>; .reg .f64 %d<10>; .shared .align 8 .b8 space[256];\n\
         ld.param.u64 %rd0, [out]; mov.u32 %r8, %tid.x;\n",
    );
    text.push_str(body);
    text.push_str("\nmad.wide.u32 %rd19, %r8, 32, %rd0;\n");
    for i in 0..8 {
        text.push_str(&format!("st.global.u32 [%rd19+{}], %r{i};\n", i * 4));
    }
    text.push_str("ret;\n}\n");
    let mut d = Device::with_text(&text);
    d.program.supported("k").unwrap();
    let out = d.alloc(64 * 32);
    d.run("k", 1, 64, &Params::new().with(out));
    d.read::<u32>(out, 512).chunks(8).map(|row| row.try_into().unwrap()).collect()
}

#[test]
fn managed_variables_are_told_from_others() {
    let text = ".version 9.0\n.target sm_90\n.address_size 64\n.global .attribute(.managed) .align 4 .u32 a = 5;\n.global .u32 b;\n";
    let module = Module::parse(text).unwrap();
    let told: Vec<_> = module.globals().iter().map(|it| (it.name.as_str(), it.managed)).collect();
    assert_eq!(told, [("a", true), ("b", false)]);
}

#[test]
fn an_addition_reads_what_a_subtraction_left_as_no_borrow() {
    let rows = run("sub.cc.u32 %r0, %r8, 32; addc.u32 %r1, 0, 0;
         sub.cc.u32 %r2, %r8, 32; subc.u32 %r3, 0, 0;
         cvt.u64.u32 %rd1, %r8; sub.cc.u64 %rd2, %rd1, 32; addc.u32 %r4, 0, 0;
         add.cc.u32 %r5, %r8, 0xffffffe0; subc.u32 %r6, 7, 7; mov.u32 %r7, 0;");
    for (thread, row) in (0_u32..).zip(rows) {
        let fits = u32::from(thread >= 32);
        let rest = thread.wrapping_sub(32);
        assert_eq!(
            row,
            [rest, fits, rest, fits.wrapping_sub(1), fits, rest, fits.wrapping_sub(1), 0],
            "thread {thread}"
        );
    }
}

#[test]
fn tables_of_branches() {
    let rows = run("and.b32 %r9, %r8, 3;
         brx.idx %r9, targets;
         targets: .branchtargets A, B, A, C;
         A: mov.u32 %r0, 10; bra.uni END;
         B: mov.u32 %r0, 20; bra END;
         C: mov.u32 %r0, 30;
         END: add.u32 %r0, %r0, %r8;
         activemask.b32 %r1;");
    for (t, row) in rows.iter().enumerate() {
        assert_eq!(row[0], [10, 20, 10, 30][t % 4] + t as u32);
        assert_eq!(row[1], u32::MAX, "they meet again");
    }
}

#[test]
fn differences_of_bytes() {
    let rows = run("mul.lo.u32 %r9, %r8, 0x04020180; mov.u32 %r10, 0x80ff0110;
         vabsdiff4.u32.u32.u32 %r0, %r9, %r10, 0; vabsdiff4.u32.s32.s32 %r1, %r9, %r10, 0;
         vabsdiff4.u32.u32.u32.add %r2, %r9, %r10, %r8;");
    for (t, row) in rows.iter().enumerate() {
        let (a, b) = ((t as u32).wrapping_mul(0x0402_0180).to_le_bytes(), 0x80ff_0110_u32.to_le_bytes());
        let unsigned: [u8; 4] = std::array::from_fn(|k| a[k].abs_diff(b[k]));
        let signed = std::array::from_fn(|k| (a[k] as i8).abs_diff(b[k] as i8));
        assert_eq!(row[..2], [u32::from_le_bytes(unsigned), u32::from_le_bytes(signed)]);
        assert_eq!(row[2], t as u32 + unsigned.iter().map(|byte| u32::from(*byte)).sum::<u32>());
    }
}

#[test]
fn carries() {
    let rows = run("mov.u32 %r9, 0xffffffff;
         add.cc.u32 %r0, %r9, %r8; addc.cc.u32 %r1, %r9, 0; addc.u32 %r2, 0, 0;
         sub.cc.u32 %r3, %r8, 5; subc.u32 %r4, 0, 0;
         mad.lo.cc.u32 %r5, %r9, %r8, %r9; madc.hi.u32 %r6, %r9, %r8, 0;");
    for (t, row) in rows.iter().enumerate() {
        let t = t as u32;
        let sum = 0xffff_ffff_ffff_ffff + u128::from(t);
        assert_eq!(row[..3], [sum as u32, (sum >> 32) as u32, (sum >> 64) as u32]);
        let difference = u64::from(t).wrapping_sub(5);
        assert_eq!(row[3..5], [difference as u32, (difference >> 32) as u32]);
        let product = 0xffff_ffff * u64::from(t) + 0xffff_ffff;
        assert_eq!(row[5..7], [product as u32, (product >> 32) as u32]);
    }
}

#[test]
fn fields_of_bits() {
    let rows = run("mov.u32 %r9, 0x8765f321;
         bfe.u32 %r0, %r9, %r8, 8; bfe.s32 %r1, %r9, %r8, 8; bfi.b32 %r2, %r9, 0, %r8, 8;
         mov.b64 %rd1, {%r9, %r9}; bfe.s64 %rd2, %rd1, %r8, 40; mov.b64 {%r3, %r4}, %rd2;
         szext.wrap.s32 %r5, %r9, 8; bmsk.clamp.b32 %r6, %r8, 4; bfind.u32 %r7, %r8;");
    let value = 0x8765_f321u32;
    let long = u64::from(value) << 32 | u64::from(value);
    for (t, row) in rows.iter().enumerate() {
        let n = t as u32;
        let field = if t < 32 { value >> t & 0xff } else { 0 };
        assert_eq!(row[0], field, "{t}");
        let shifted = (i64::from(value as i32)) >> t.min(63);
        let signed = if t <= 24 { i64::from(shifted as i8) } else { shifted };
        assert_eq!(row[1] as i32, if t < 32 { signed as i32 } else { -1 }, "{t}");
        assert_eq!(row[2], if t < 32 { (value & 0xff) << t } else { 0 });
        let wide = if t <= 24 { ((long >> t) as i64) << 24 >> 24 } else { (long as i64) >> t };
        assert_eq!(u64::from(row[4]) << 32 | u64::from(row[3]), wide as u64, "{t}");
        assert_eq!(row[5], 0x21);
        assert_eq!(row[6], if t < 32 { 15 << t } else { 0 });
        assert_eq!(row[7], n.checked_ilog2().unwrap_or(u32::MAX));
    }
}

#[test]
fn permutations_and_logic() {
    let rows = run("mov.u32 %r9, 0x83020100; mov.u32 %r10, 0x07060504;
         prmt.b32 %r0, %r9, %r10, 0xb7c4; prmt.b32.f4e %r1, %r9, %r10, %r8; prmt.b32.b4e %r2, %r9, %r10, %r8;
         prmt.b32.rc16 %r3, %r9, %r10, %r8; lop3.b32 %r4, %r9, %r10, %r8, 0x1b;
         fns.b32 %r5, 0x0000f0f0, 4, 3; shf.l.clamp.b32 %r6, %r9, %r10, 40; shf.r.wrap.b32 %r7, %r9, %r10, 36;");
    let (a, b) = (0x8302_0100u32, 0x0706_0504u32);
    let bytes: Vec<u8> = a.to_le_bytes().into_iter().chain(b.to_le_bytes()).collect();
    for (t, row) in rows.iter().enumerate() {
        assert_eq!(row[0], u32::from_le_bytes([bytes[4], 0, bytes[7], 0xff]));
        let of = |f: &dyn Fn(usize) -> usize| u32::from_le_bytes(std::array::from_fn(|k| bytes[f(k) % 8]));
        assert_eq!(row[1], of(&|k| k + t % 4));
        assert_eq!(row[2], of(&|k| 8 + t % 4 - k));
        assert_eq!(row[3], of(&|k| t % 2 * 2 + k % 2));
        let c = t as u32;
        let logic = (0..32).fold(0, |out, bit| {
            let index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1);
            out | (0x1b >> index & 1) << bit
        });
        assert_eq!(row[4], logic);
        assert_eq!(row[5..8], [6, a, ((u64::from(b) << 32 | u64::from(a)) >> 4) as u32]);
    }
}

#[test]
fn warps_reduce_and_elect() {
    let rows = run("redux.sync.add.s32 %r0, %r8, 0xffffffff; redux.sync.min.u32 %r1, %r8, 0xffffffff;
         redux.sync.xor.b32 %r2, %r8, 0xffffffff;
         elect.sync %r3|%p1, 0xffffff00; selp.u32 %r4, 1, 0, %p1;
         vote.sync.uni.pred %p2, %p1, 0xffffffff; selp.u32 %r5, 1, 0, %p2;
         and.b32 %r9, %r8, 1; setp.eq.u32 %p3, %r9, 0;
         @%p3 bra EVEN;
         bar.warp.sync 0xffffffff; mov.u32 %r6, 1; bra DONE;
         EVEN: bar.warp.sync 0xffffffff; mov.u32 %r6, 2;
         DONE: match.any.sync.b64 %r7, %rd0, 0xffffffff;");
    for (t, row) in rows.iter().enumerate() {
        let (warp, lane) = (t as u32 / 32 * 32, t % 32);
        let xor = (warp..warp + 32).fold(0, |a, b| a ^ b);
        assert_eq!(row[..3], [(warp..warp + 32).sum(), warp, xor]);
        if lane >= 8 {
            assert_eq!(row[3..5], [8, u32::from(lane == 8)]);
        }
        assert_eq!(row[5..], [0, 2 - lane as u32 % 2, u32::MAX]);
    }
}

#[test]
fn address_spaces() {
    let rows = run(
        "mov.u64 %rd1, space; cvta.shared.u64 %rd2, %rd1; isspacep.shared %p1, %rd2; selp.u32 %r0, 1, 0, %p1;
         isspacep.global %p1, %rd2; selp.u32 %r1, 1, 0, %p1; isspacep.global %p1, %rd0; selp.u32 %r2, 1, 0, %p1;
         cvta.to.shared.u64 %rd3, %rd2; st.shared.u32 [%rd3+8], 77; ld.u32 %r3, [%rd2+8];
         mov.u64 %rd4, out; cvta.param.u64 %rd5, %rd4; ld.u64 %rd6, [%rd5]; sub.u64 %rd6, %rd6, %rd0; cvt.u32.u64 %r4, %rd6;
         isspacep.local %p1, %rd2; selp.u32 %r5, 1, 0, %p1; mov.u32 %r6, %total_smem_size; mov.u32 %r7, %ntid.x;",
    );
    assert!(rows.iter().all(|row| *row == [1, 0, 1, 77, 0, 0, 256, 64]));
}

#[test]
fn numbers_of_many_types() {
    let rows = run("cvt.rn.f32.u32 %f1, %r8; cvt.rn.f16.f32 %h1, %f1; mov.b32 %r9, {%h1, %h1};
         mov.b32 %r10, 0x42004000; set.ge.f16x2.f16x2 %r0, %r9, %r10;
         setp.lt.f16x2 %p1|%p2, %r9, %r10; selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 1, 0, %p2;
         cvt.sat.u8.s32 %r3, -5; cvt.s32.s8 %r4, 0x80; add.u16x2 %r5, %r10, 0x0001ffff;
         slct.b32.f32 %r6, 1, 2, 0fBF800000; copysign.f32 %f2, 0fBF800000, %f1; mov.b32 %r7, %f2;");
    for (t, row) in rows.iter().enumerate() {
        let ones = |low: bool, high: bool| u32::from(low) * 0x3c00 + u32::from(high) * 0x3c00_0000;
        assert_eq!(row[0], ones(t >= 2, t >= 3));
        assert_eq!(row[1..3], [u32::from(t < 2), u32::from(t < 3)]);
        assert_eq!(row[3..7], [0, 0xffff_ff80, 0x4201_3fff, 2]);
        assert_eq!(row[7], (-(t as f32)).to_bits());
    }
}

#[test]
fn a_block_whose_threads_wait_for_each_other_forever() {
    let text = ".version 9.0\n.target sm_75\n.address_size 64\n.entry k() {\n.reg .pred %p; .reg .u32 %r;\n\
                mov.u32 %r, %tid.x;\nsetp.eq.u32 %p, %r, 0;\n@%p bar.sync 1, 64;\n@!%p bar.sync 2, 96;\nret;\n}";
    let d = Device::with_text(text);
    let fault = d.try_run("k", &LaunchConfig::new([1; 3], [64, 1, 1], &[])).unwrap_err();
    assert!(matches!(fault.fault.kind, FaultKind::Deadlock(_)));
}

#[test]
fn errors_name_their_line() {
    let error = Module::parse(".version 9.0\n.target sm_75\n.entry k(\n.param .u64 x\n{\n").unwrap_err();
    assert_eq!((error.line, error.to_string().contains("expected")), (5, true));
    assert!(Module::parse("hello").is_err());
    let d = Device::with_text(".version 9.0\n.target sm_75\n.entry k() {\nfrobnicate.u32 1;\n}\n.entry l() { ret; }");
    let refusal = d.program.supported("k").unwrap_err();
    assert_eq!((refusal.line, refusal.what.starts_with("frobnicate.u32")), (4, true));
    d.program.supported("l").unwrap();
}

#[test]
fn variables_hold_addresses() {
    let text = ".version 9.0\n.target sm_75\n.address_size 64\n\
                .global .align 8 .b8 a[16];\n.func f() { ret; }\n\
                .visible .global .align 8 .u64 p[3] = {a+8, generic(a), f};\n\
                .global .align 8 .b8 bytes[9] = {1, 0xff(a), 0xff00(a), 2};\n\
                .const .align 4 .f32 c[2] = {0f3F800000, -0f40000000};\n";
    let d = Device::with_text(text);
    let at = |name: &str| d.program.address(name).unwrap();
    assert_eq!(d.read::<u64>(at("p"), 3), [at("a") + 8, at("a"), at("f")]);
    let bytes = at("a").to_le_bytes();
    assert_eq!(d.read::<u8>(at("bytes"), 4), [1, bytes[0], bytes[1], 2]);
    assert_eq!(d.read::<f32>(at("c"), 2), [1.0, -2.0]);
}
