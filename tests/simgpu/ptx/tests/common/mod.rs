//! A small device for tests: one flat memory, and kernels loaded from fixtures.
#![allow(dead_code, reason = "each test uses a part of this")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "only tests use this")]

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use rekindle_ptx::{
    CODE_WINDOW, Env, Fault, FaultKind, LaunchConfig, LaunchFault, Memory, Module, Program, Span, launch,
};

/// The first address of the device's memory.
pub(crate) const BASE: u64 = 0x2000_0000_0000;

/// A device with a module loaded.
pub(crate) struct Device {
    cells: Vec<u128>,
    used: u64,
    pub(crate) program: Program,
    pub(crate) printed: Mutex<String>,
}

// SAFETY: nothing is unmapped while the device exists, and kernels only use atomic accesses.
unsafe impl Memory for Device {
    fn resolve(&self, addr: u64, _write: bool) -> Result<Span, Fault> {
        let len = self.used;
        if addr.wrapping_sub(BASE) >= len {
            return Err(Fault { kind: FaultKind::Unmapped, addr });
        }
        let host = self.cells.as_ptr().cast::<u8>().cast_mut();
        Ok(Span { base: BASE, len, host, writable: true })
    }
}

/// A value that can be copied to and from the device.
pub(crate) trait Plain: Copy + Default {}
impl Plain for u8 {}
impl Plain for i8 {}
impl Plain for u16 {}
impl Plain for i16 {}
impl Plain for u32 {}
impl Plain for i32 {}
impl Plain for u64 {}
impl Plain for i64 {}
impl Plain for f32 {}
impl Plain for f64 {}

/// A kernel's parameters, in C's layout.
#[derive(Default)]
pub(crate) struct Params(Vec<u8>);

impl Params {
    pub(crate) fn new() -> Self {
        Params(Vec::new())
    }

    pub(crate) fn with<T: Plain>(mut self, value: T) -> Self {
        let size = size_of::<T>();
        self.0.resize(self.0.len().next_multiple_of(size), 0);
        // SAFETY: a plain value has no padding.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size) };
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl Device {
    /// A device with 64 MiB, and the fixture's module.
    pub(crate) fn with_fixture(name: &str) -> Device {
        let path = format!("{}/tests/fixtures/{name}.ptx", env!("CARGO_MANIFEST_DIR"));
        Device::with_text(&std::fs::read_to_string(&path).unwrap())
    }

    pub(crate) fn with_text(text: &str) -> Device {
        let module = Module::parse(text).unwrap();
        let mut places = Vec::new();
        let mut used = 0u64;
        for global in module.globals() {
            used = used.next_multiple_of(global.align.max(256));
            places.push((global.name.clone(), BASE + used));
            used += global.size.max(1);
        }
        let find = |name: &str| places.iter().find(|(n, _)| n == name).map(|&(_, at)| at);
        let program = module.link(CODE_WINDOW, &find).unwrap();
        let cells = vec![0u128; (64 << 20) / 16];
        let mut device = Device { cells, used, program, printed: Mutex::default() };
        for global in module.globals() {
            let image = device.program.image(global);
            device.write(device.program.address(&global.name).unwrap(), &image);
        }
        device
    }

    pub(crate) fn alloc(&mut self, bytes: usize) -> u64 {
        let at = self.used.next_multiple_of(256);
        self.used = at + bytes as u64;
        assert!(self.used <= self.cells.len() as u64 * 16);
        BASE + at
    }

    pub(crate) fn write<T: Plain>(&mut self, addr: u64, values: &[T]) {
        let offset = (addr - BASE) as usize;
        assert!(offset + size_of_val(values) <= self.cells.len() * 16);
        // SAFETY: the range was checked.
        unsafe {
            let to = self.cells.as_mut_ptr().cast::<u8>().add(offset).cast::<T>();
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
        }
    }

    pub(crate) fn read<T: Plain>(&self, addr: u64, count: usize) -> Vec<T> {
        let offset = (addr - BASE) as usize;
        assert!(offset + count * size_of::<T>() <= self.cells.len() * 16);
        let mut values = vec![T::default(); count];
        // SAFETY: the range was checked.
        unsafe {
            let from = self.cells.as_ptr().cast::<u8>().add(offset).cast::<T>();
            std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count);
        }
        values
    }

    pub(crate) fn upload<T: Plain>(&mut self, values: &[T]) -> u64 {
        let addr = self.alloc(size_of_val(values));
        self.write(addr, values);
        addr
    }

    /// The kernel whose mangled name contains the text.
    pub(crate) fn kernel(&self, part: &str) -> String {
        let mangled = format!("{}{part}", part.len());
        let found = self.program.kernels().iter().find(|k| k.name == part || k.name.contains(&mangled));
        found.unwrap_or_else(|| panic!("no kernel {part}")).name.clone()
    }

    pub(crate) fn try_run(&self, kernel: &str, config: &LaunchConfig<'_>) -> Result<(), LaunchFault> {
        let cancel = AtomicBool::new(false);
        let print = |text: &[u8]| self.printed.lock().unwrap().push_str(&String::from_utf8_lossy(text));
        let mut env = Env::new(&cancel);
        env.print = &print;
        env.complain = &print;
        launch(&self.program, &self.kernel(kernel), config, self, &env)
    }

    pub(crate) fn run(&self, kernel: &str, blocks: u32, threads: u32, params: &Params) {
        let config = LaunchConfig::new([blocks, 1, 1], [threads, 1, 1], params.bytes());
        self.try_run(kernel, &config).unwrap();
    }
}
