//! Images that nvcc made (`fixtures/make.sh`), read in every form.

// Helpers of tests fail by panicking, as the tests do.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use rekindle_cuda_abi::code::{
    Binding, CodeError, CodeImage, Compression, EntryKind, FATBIN_MAGIC, ImageKind, Kernel, Program, Space, Variant,
    WRAPPER_MAGIC, image_extent, parse, unmanaged,
};

macro_rules! fixture {
    ($name:literal) => {
        include_bytes!(concat!("fixtures/code/", $name)).as_slice()
    };
}

const FORMS: [&[u8]; 3] =
    [fixture!("forms.none.fatbin"), fixture!("forms.speed.fatbin"), fixture!("forms.size.fatbin")];

/// Compares what matters of the variables with what `forms.cu` declares.
fn check_variables(program: &Program<'_>, variant: Variant, case: &str) {
    let globals = program.globals().unwrap();
    // Of linkable objects, static variables have a prefix.
    let find = |end: &str| {
        let mut found = globals.iter().filter(|global| global.name.ends_with(end));
        let global = found.next().unwrap_or_else(|| panic!("{case}: no {end}"));
        assert!(found.next().is_none(), "{case}: more than one {end}");
        global
    };
    let letter = match variant {
        Variant::Generic => 1,
        Variant::Family => 2,
        Variant::Specific => 3,
    };
    let expected = [
        ("plain", 4, Space::Global, false),
        ("initialised", 20, Space::Global, false),
        ("matrix", 48, Space::Global, false),
        ("vector", 16, Space::Global, false),
        ("aligned", 1000, Space::Global, false),
        ("pointer", 8, Space::Global, false),
        ("hidden", 8, Space::Global, false),
        ("table", 64, Space::Constant, false),
        ("record", 40, Space::Constant, false),
        ("managed", 4, Space::Global, true),
        ("managed_array", 80, Space::Global, true),
        ("5innerE", 40, Space::Global, false),
        ("8constantE", 4, Space::Constant, false),
        ("anonymousE", 2, Space::Global, false),
        ("_Z9templatedIiE", 4, Space::Global, false),
        ("_Z9templatedIdE", 8, Space::Global, false),
        ("calls", 4, Space::Global, false),
        ("local", 28, Space::Constant, false),
        ("variant", letter, Space::Global, false),
    ];
    for (end, size, space, managed) in expected {
        let global = find(end);
        let told = (global.size, global.space, global.managed);
        assert_eq!(told, (size, space, managed), "{case}: {end}");
        assert!(!global.in_function);
    }
    assert_eq!(globals.len(), expected.len(), "{case}: {globals:?}");
}

/// Offsets and sizes of all parameters.
fn layout(kernel: &Kernel) -> Vec<(u32, u32)> {
    let params = kernel.params.as_ref().unwrap();
    params.iter().map(|p| (p.offset, p.size)).collect()
}

/// Compares the kernels with those of `forms.cu`.
fn check_kernels(program: &Program<'_>, case: &str) {
    let kernels: BTreeMap<_, _> = program
        .kernels()
        .unwrap()
        .into_iter()
        .inspect(|kernel| assert!(!kernel.allocates, "{case}: {}", kernel.name))
        .map(|kernel| (kernel.name.clone(), layout(&kernel)))
        .collect();
    let expected: BTreeMap<_, _> = [
        ("uses_all", vec![(0, 8), (8, 4), (16, 40), (56, 8)]),
        ("mixed", vec![(0, 2), (2, 1), (8, 8), (16, 16), (32, 8)]),
        ("large", vec![(0, 17000), (17000, 8), (17008, 4)]),
        ("bytes", vec![(0, 1), (1, 1), (2, 1)]),
        ("nothing", vec![]),
        ("_Z4fillIfEvPT_S0_", vec![(0, 8), (8, 4)]),
    ]
    .map(|(name, params)| (name.to_owned(), params))
    .into();
    assert_eq!(kernels, expected, "{case}");
    assert!(!program.uses_device_malloc().unwrap(), "{case}");
}

#[test]
fn every_entry_of_every_form_tells_the_same() {
    let others = [fixture!("forms.debug.fatbin"), fixture!("forms.object.fatbin"), fixture!("forms.ptx")];
    let mut seen = 0;
    for image in FORMS.into_iter().chain(others) {
        for entry in parse(image).unwrap().entries {
            let case = format!("{entry:?}").chars().take(200).collect::<String>();
            let program = entry.unpack().unwrap();
            assert_eq!(program.is_ptx(), entry.kind == EntryKind::Ptx);
            check_variables(&program, entry.arch.variant, &case);
            check_kernels(&program, &case);
            // A cubin by itself is an image too, and names the same architecture.
            let alone = parse(program.bytes()).unwrap();
            assert_eq!(alone.entries[0].arch.number, entry.arch.number);
            seen += 1;
        }
    }
    assert_eq!(seen, 2 + 7 + 7 + 1 + 2 + 1);
}

#[test]
fn an_image_without_managed_variables_is_the_same_but_for_those() {
    let others = [fixture!("forms.debug.fatbin"), fixture!("forms.object.fatbin"), fixture!("forms.ptx")];
    for image in FORMS.into_iter().chain(others) {
        let changed = unmanaged(image).unwrap().unwrap();
        assert_eq!(unmanaged(&changed).unwrap(), None);
        let (before, after) = (parse(image).unwrap().entries, parse(&changed).unwrap().entries);
        assert_eq!(before.len(), after.len());
        for (before, after) in before.iter().zip(&after) {
            assert_eq!((before.kind, before.arch, after.compression), (after.kind, after.arch, None));
            let (before, after) = (before.unpack().unwrap(), after.unpack().unwrap());
            let mut expected = before.globals().unwrap();
            expected.iter_mut().for_each(|global| global.managed = false);
            assert_eq!(after.globals().unwrap(), expected);
            assert_eq!(after.kernels().unwrap(), before.kernels().unwrap());
            let differing = before.bytes().iter().zip(after.bytes()).filter(|(a, b)| a != b).count();
            assert_eq!(before.bytes().len(), after.bytes().len());
            // The two variables' symbols, or the letters of their attributes.
            assert_eq!(differing, if before.is_ptx() { 2 * ".attribute(.managed)".len() } else { 2 });
        }
    }
    // What is plain already keeps its size.
    assert_eq!(unmanaged(FORMS[0]).unwrap().unwrap().len(), FORMS[0].len());
    assert_eq!(unmanaged(fixture!("heap.linked.cubin")).unwrap(), None);
}

#[test]
fn names_are_as_the_runtime_asks_for_them() {
    let program = parse(FORMS[0]).unwrap().entries[0].unpack().unwrap();
    let globals = program.globals().unwrap();
    for name in ["plain", "record", "_ZN5outer5innerE", "hidden"] {
        let global = globals.iter().find(|global| global.name == name).unwrap();
        // As `Binding` says: of a program of one object even these are local.
        assert_eq!(global.binding, Binding::Local);
    }
    let linked = parse(fixture!("heap.linked.cubin")).unwrap();
    let globals = linked.entries[0].unpack().unwrap().globals().unwrap();
    let functions = globals.iter().find(|g| g.name == "functions").unwrap();
    assert_eq!((functions.binding, functions.size), (Binding::Global, 16));
}

/// The names that each variable of an image points to, for variables that point to any.
fn points_to(image: &[u8]) -> BTreeMap<String, Vec<String>> {
    let globals = parse(image).unwrap().entries[0].unpack().unwrap().globals().unwrap();
    globals.into_iter().filter(|g| !g.points_to.is_empty()).map(|g| (g.name, g.points_to)).collect()
}

#[test]
fn variables_with_addresses_name_what_they_point_to() {
    let expected = [
        ("_ZTV10Allocating", vec!["_ZN10Allocating4makeEi"]),
        ("_ZTV5Other", vec!["_ZN5Other4makeEi"]),
        ("functions", vec!["_Z6helperi", "_Z8harmlessi"]),
    ];
    let expected: BTreeMap<_, _> =
        expected.map(|(name, to)| (name.to_owned(), to.into_iter().map(str::to_owned).collect())).into();
    assert_eq!(points_to(fixture!("heap.linked.cubin")), expected);
    assert_eq!(points_to(fixture!("heap.object.cubin")), expected);
    assert_eq!(points_to(fixture!("heap.ptx")), expected);
    // Not linked from several objects: what it holds are places in tables of each kernel's, which do not move.
    assert_eq!(points_to(fixture!("heap.cubin")), BTreeMap::new());
}

#[test]
fn code_that_takes_addresses_of_functions_is_told_from_code_that_calls_them() {
    let takes =
        |image: &[u8], place: usize| parse(image).unwrap().entries[place].unpack().unwrap().takes_function_addresses();
    for (name, image, expected) in [
        ("linked", fixture!("heap.linked.cubin"), true),
        ("object", fixture!("heap.object.cubin"), true),
        ("ptx", fixture!("heap.ptx"), true),
        // Its references to functions are places in the tables of each kernel, which do not move.
        ("alone", fixture!("heap.cubin"), false),
    ] {
        assert_eq!(takes(image, 0), Ok(expected), "{name}");
    }
    for image in FORMS {
        for place in 0..parse(image).unwrap().entries.len() {
            assert_eq!(takes(image, place), Ok(false), "entry {place}");
        }
    }
    let text = |body: &str| {
        format!(".version 7.0\n.target sm_75\n.address_size 64\n.func f() {{ ret; }}\n.func g() {{ ret; }}\n{body}")
    };
    let calls = ".entry k() { .reg .b64 %r<2>; call f, (); call.uni (%r1), g, (); mov.u64 %r0, %r1; ret; }";
    for (body, expected) in [
        (calls.to_owned(), false),
        (format!("{calls}\n.global .u64 a = b; .alias h, f;"), false),
        (".entry k() { .reg .b64 %r<2>; mov.u64 %r1, g; ret; }".to_owned(), true),
        (".global .u64 table[2] = {0, generic(f)};".to_owned(), true),
        (".alias h, f; .entry k() { .reg .b64 %r<2>; mov.u64 %r1, h; ret; }".to_owned(), true),
    ] {
        assert_eq!(takes(text(&body).as_bytes(), 0), Ok(expected), "{body}");
    }
}

fn entries(image: &CodeImage<'_>) -> Vec<(String, EntryKind, Option<Compression>)> {
    let entries = image.entries.iter();
    entries.map(|e| (e.arch.to_string(), e.kind, e.compression)).collect()
}

#[test]
fn compression() {
    use Compression::{Lz4, Zstd};
    let all = |compression| {
        [
            ("sm_75", EntryKind::Elf),
            ("sm_90", EntryKind::Elf),
            ("sm_90a", EntryKind::Ptx),
            ("sm_90a", EntryKind::Elf),
            ("sm_100f", EntryKind::Elf),
            ("sm_120", EntryKind::Elf),
            ("sm_80", EntryKind::Ptx),
        ]
        .map(|(arch, kind)| (arch.to_owned(), kind, compression))
    };
    assert!(entries(&parse(FORMS[0]).unwrap()).iter().all(|entry| entry.2.is_none()));
    let mut speed = entries(&parse(FORMS[1]).unwrap());
    let mut size = entries(&parse(FORMS[2]).unwrap());
    let key = |e: &(String, EntryKind, _)| (e.0.clone(), format!("{:?}", e.1));
    speed.sort_by_key(key);
    size.sort_by_key(key);
    for (found, compression) in [(speed, Lz4), (size, Zstd)] {
        let mut expected = all(Some(compression));
        expected.sort_by_key(key);
        assert_eq!(found, expected);
    }
}

#[test]
fn a_limit_on_the_unpacked_size_holds() {
    for entry in parse(FORMS[1]).unwrap().entries {
        let error = entry.payload_within(1000).unwrap_err();
        assert!(matches!(error, CodeError::TooLarge { limit: 1000, .. }));
    }
}

#[test]
fn link_time_code_is_recognised_and_not_read() {
    let image = parse(fixture!("forms.lto.fatbin")).unwrap();
    assert_eq!(image.entries[0].kind, EntryKind::LtoIr);
    assert_eq!(image.entries[0].unpack().unwrap_err(), CodeError::Opaque(8));
    assert!(image.select((7, 5)).is_none());
}

#[test]
fn selection() {
    let image = parse(FORMS[1]).unwrap();
    let chosen = |sm: (u32, u32)| image.select(sm).map(|entry| (entry.arch.to_string(), entry.kind));
    let is = |arch: &str, kind| Some((arch.to_owned(), kind));
    assert_eq!(chosen((7, 5)), is("sm_75", EntryKind::Elf));
    assert_eq!(chosen((9, 0)), is("sm_90a", EntryKind::Elf));
    assert_eq!(chosen((10, 0)), is("sm_100f", EntryKind::Elf));
    assert_eq!(chosen((10, 3)), is("sm_100f", EntryKind::Elf));
    assert_eq!(chosen((12, 1)), is("sm_120", EntryKind::Elf));
    // No machine code: the highest PTX, of which that for exactly sm_90 is none of theirs.
    assert_eq!(chosen((8, 0)), is("sm_80", EntryKind::Ptx));
    assert_eq!(chosen((8, 9)), is("sm_80", EntryKind::Ptx));
    assert_eq!(chosen((11, 0)), is("sm_80", EntryKind::Ptx));
    assert_eq!(chosen((7, 0)), None);
    let ptx = |sm: (u32, u32)| image.select_ptx(sm).map(|entry| entry.arch.to_string());
    assert_eq!(ptx((9, 0)).as_deref(), Some("sm_90a"));
    assert_eq!(ptx((10, 0)).as_deref(), Some("sm_80"));
    assert_eq!(ptx((7, 5)), None);
}

#[test]
fn ways_to_the_heap() {
    let always = ["direct", "with_new", "through_helper", "through_table", "through_virtual"];
    let never = ["calls_harmless", "prints", "frees", "computes"];
    for (case, image) in [
        ("ptx", fixture!("heap.ptx")),
        ("cubin", fixture!("heap.cubin")),
        ("object", fixture!("heap.object.cubin")),
        ("linked", fixture!("heap.linked.cubin")),
    ] {
        let program = parse(image).unwrap().entries[0].unpack().unwrap();
        assert!(program.uses_device_malloc().unwrap(), "{case}");
        let kernels = program.kernels().unwrap();
        assert_eq!(kernels.len(), 10, "{case}");
        for kernel in kernels {
            let name = kernel.name.as_str();
            if always.contains(&name) {
                assert!(kernel.allocates, "{case}: {name}");
            }
            // Where ptxas sees the whole program, it copies what may be called into each kernel
            // that handles pointers to functions; the others are exact.
            if never.contains(&name) || (name == "construct" && case == "ptx") {
                assert!(!kernel.allocates, "{case}: {name}");
            }
        }
    }
}

#[repr(C)]
struct Wrapper {
    magic: u32,
    version: u32,
    data: *const u8,
    prelinked: *const *const u8,
}

/// The bytes of each part, and the kind.
fn extent(ptr: *const u8) -> (ImageKind, Vec<Vec<u8>>) {
    // SAFETY: the tests pass complete images.
    let extent = unsafe { image_extent(ptr) }.unwrap();
    let parts = extent.parts.iter();
    // SAFETY: and they are still there.
    let copies = parts.map(|part| unsafe { part.as_slice() }.to_vec());
    (extent.kind, copies.collect())
}

#[test]
fn extents_of_bare_images() {
    for image in FORMS {
        assert_eq!(extent(image.as_ptr()), (ImageKind::Fatbin, vec![image.to_vec()]));
    }
    for cubin in [fixture!("heap.cubin"), fixture!("heap.object.cubin"), fixture!("heap.linked.cubin")] {
        assert_eq!(extent(cubin.as_ptr()), (ImageKind::Elf, vec![cubin.to_vec()]));
    }
    // Texts that end within what could be a magic number, too.
    for text in ["", "P", "P\u{d}", ".version 9.0\n.target sm_75\n", "\x7fEL"] {
        let bytes = [text.as_bytes(), b"\0"].concat();
        assert_eq!(extent(bytes.as_ptr()), (ImageKind::Ptx, vec![bytes.clone()]));
    }
}

#[test]
fn extents_of_wrappers() {
    let (linked, first, second) = (FORMS[0], FORMS[1], FORMS[2]);
    let array = [first.as_ptr(), second.as_ptr(), std::ptr::null()];
    let mut wrapper = Wrapper {
        magic: WRAPPER_MAGIC,
        version: 1,
        data: linked.as_ptr(),
        // Version 1 has no use for it.
        prelinked: std::ptr::without_provenance(1),
    };
    let ptr = |wrapper: &Wrapper| std::ptr::from_ref(wrapper).cast();
    assert_eq!(extent(ptr(&wrapper)), (ImageKind::Fatbin, vec![linked.to_vec()]));
    wrapper.version = 2;
    wrapper.prelinked = array.as_ptr();
    let parts = [linked, first, second].map(<[u8]>::to_vec).to_vec();
    assert_eq!(extent(ptr(&wrapper)), (ImageKind::Linked, parts));
    wrapper.prelinked = std::ptr::null();
    assert_eq!(extent(ptr(&wrapper)), (ImageKind::Linked, vec![linked.to_vec()]));

    let failure = |wrapper: &Wrapper| {
        // SAFETY: the wrapper is there, and what is wrong with it is found before it is followed.
        unsafe { image_extent(ptr(wrapper)) }.unwrap_err()
    };
    wrapper.version = 3;
    assert_eq!(failure(&wrapper), CodeError::WrapperVersion(3));
    wrapper.data = std::ptr::null();
    assert_eq!(failure(&wrapper), CodeError::Null("data"));
    // SAFETY: null is allowed.
    let null = unsafe { image_extent(std::ptr::null()) };
    assert_eq!(null.unwrap_err(), CodeError::Null("image"));
}

#[test]
fn a_fatbin_may_be_followed_by_anything_and_not_cut() {
    let mut image = FORMS[2].to_vec();
    assert!(image.starts_with(&FATBIN_MAGIC.to_le_bytes()));
    image.extend_from_slice(&[0xff; 100]);
    assert_eq!(parse(&image).unwrap().entries.len(), 7);
    image.truncate(FORMS[2].len() - 1);
    assert_eq!(parse(&image).unwrap_err(), CodeError::Truncated("fatbin"));
}

#[test]
fn other_bytes_are_refused() {
    for bytes in [&b""[..], b"\0", b"MZ", b"#!/bin/sh", b"\x7fELF", b".target sm_75"] {
        assert!(parse(bytes).is_err(), "{bytes:?}");
    }
    // An ELF file for the host.
    let own = std::fs::read("/proc/self/exe").unwrap();
    assert!(matches!(parse(&own), Err(CodeError::Malformed(_))));
}
