//! The declarations of a module: its kernels with their parameters, and its variables.

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its (mangled) name.
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<Param>,
    /// How many bytes the parameters take together.
    pub param_bytes: u32,
    /// `.maxntid`: the largest block it was compiled for, if it says so.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid`: the only block it may be launched with, if it says so.
    pub required_threads: Option<[u32; 3]>,
    /// `.reqnctapercluster`: the only cluster it may be launched in, if it says so.
    pub required_cluster: Option<[u32; 3]>,
    /// Static shared memory in bytes, its own and that of the functions it can call.
    pub shared_bytes: u32,
    /// Local memory in bytes of one thread, without the functions it calls.
    pub local_bytes: u32,
    /// Whether it, or a function it can call, calls `malloc`.
    pub reaches_malloc: bool,
}

/// A kernel's parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Where it begins in the parameter buffer.
    pub offset: u32,
    /// How many bytes it has.
    pub size: u32,
    /// The alignment of its offset.
    pub align: u32,
}

/// Where a variable of a module lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// `.global`: device memory.
    Global,
    /// `.const`: constant memory; here, device memory that kernels do not write.
    Const,
}

/// A variable of a module, for which the loader chooses an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// Its (mangled) name.
    pub name: String,
    /// Where it lives.
    pub space: Space,
    /// How many bytes it has.
    pub size: u64,
    /// The alignment of its address.
    pub align: u64,
    /// Its first bytes; the rest, often all of them, is zero.
    pub init: Vec<u8>,
    /// Addresses to be added into those bytes.
    pub relocations: Vec<Relocation>,
    /// Whether it is only declared here (`.extern`), so something else must define it.
    pub external: bool,
    /// Whether the host may ask for it by name (`.visible`, `.weak`, or `.extern`).
    pub visible: bool,
}

/// A place in a variable's first content that holds the address of a symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocation {
    /// Where in the variable.
    pub offset: u64,
    /// How many bytes are written there.
    pub width: u8,
    /// By how many bits the address is shifted right first (bytes of an address one by one).
    pub shift: u8,
    /// The variable or function.
    pub symbol: String,
    /// What is added to its address.
    pub addend: i64,
}
