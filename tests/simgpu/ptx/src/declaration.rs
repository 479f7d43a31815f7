//! The declarations of a module: its kernels with their parameters, and its variables.

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its (mangled) name.
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<Param>,
    /// The bytes of all parameters together.
    pub param_bytes: u32,
    /// `.maxntid`: the largest block that the kernel was compiled for, if given.
    pub max_threads: Option<[u32; 3]>,
    /// `.reqntid`: the only block size that it may be launched with, if given.
    pub required_threads: Option<[u32; 3]>,
    /// `.reqnctapercluster`: the only cluster size that it may be launched in, if given.
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
    /// The parameter's offset in the parameter buffer.
    pub offset: u32,
    /// The parameter's size in bytes.
    pub size: u32,
    /// The alignment of its offset.
    pub align: u32,
}

/// The memory of a module's variable.
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
    /// The variable's memory.
    pub space: Space,
    /// The variable's size in bytes.
    pub size: u64,
    /// The alignment of its address.
    pub align: u64,
    /// The variable's first bytes; the rest, often all of them, is zero.
    pub init: Vec<u8>,
    /// Addresses to be added into those bytes.
    pub relocations: Vec<Relocation>,
    /// Whether it is in managed memory (`.attribute(.managed)`).
    pub managed: bool,
    /// Whether this module only declares it (`.extern`), so another must define it.
    pub external: bool,
    /// Whether the host may ask for it by name (`.visible`, `.weak`, or `.extern`).
    pub visible: bool,
}

/// A place in a variable's first content that holds the address of a symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocation {
    /// The offset in the variable.
    pub offset: u64,
    /// The number of bytes that are written there.
    pub width: u8,
    /// By how many bits the address is shifted right first (bytes of an address one by one).
    pub shift: u8,
    /// The variable or function.
    pub symbol: String,
    /// The number that is added to the symbol's address.
    pub addend: i64,
}
