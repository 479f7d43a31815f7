//! The items of a program: variables and kernels.

/// Which memory a variable lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// Global memory: `__device__` and `__managed__`.
    Global,
    /// Constant memory: `__constant__`.
    Constant,
}

/// The visibility of a symbol, as far as the image tells.
///
/// The visibility says little about which code can ask the driver for the symbol: nvcc 13.0 makes every
/// variable of a program that is not linked from several objects local, `static` or not, and its runtime
/// library asks for the variables by name all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Binding {
    /// Seen in this image only. In PTX: without `.visible`, `.weak` or `.common`.
    Local,
    /// Seen by what is linked with it.
    Global,
    /// The same, and gives way to another of its name.
    Weak,
}

/// A module's variable that lives as long as the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Global {
    /// The (mangled) name, for `cuModuleGetGlobal` and `cuLibraryGetGlobal`.
    ///
    /// Names are unique in a cubin's global bindings, but several local ones may share a name.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// The memory it lies in.
    pub space: Space,
    /// `__managed__`: the name's memory holds the variable's initial value, and the variable itself
    /// is in managed memory.
    pub managed: bool,
    /// The visibility of the symbol.
    pub binding: Binding,
    /// PTX only: declared inside a function. `ptxas`, and so the driver, makes up another name for
    /// it (`$__NAME__7`), by which nobody can ask for it. nvcc does not write such PTX.
    pub in_function: bool,
    /// The symbols whose addresses its initial value holds, as far as the image leaves these to the driver: a few of them,
    /// in the order of the value. Empty if there are none.
    ///
    /// In a cubin that was not linked from several objects, pointers to functions are no addresses: they are places in a
    /// table of each kernel's, and such a variable names no function here.
    pub points_to: Vec<String>,
}

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Bytes from the start of the parameters.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The (mangled) name, for `cuModuleGetFunction` and `cuLibraryGetKernel`.
    pub name: String,
    /// The parameters in order, `None` where the image does not say.
    pub params: Option<Vec<Param>>,
    /// Whether it may take memory from the device's heap (`malloc`, `new`, `cudaMalloc` called on
    /// the device).
    ///
    /// The image's own call graph decides, with calls through pointers reaching every function
    /// whose address is taken, so a kernel may be marked that never gets there. One that is not
    /// marked does not allocate, as far as the image tells: functions that are linked in later
    /// (`cuLinkAddData`) and kernels that it launches from the device are not followed.
    pub allocates: bool,
}
