//! Rust source generated from the table, for build scripts.
//!
//! - [`exports`]: every symbol of `libcuda.so.1`, their addresses, and the look-up table (interposer, software GPU)
//! - [`encoders`]: the application's side of each generated call (interposer)
//! - [`entry_points`] and [`dispatch`]: the real driver's functions, and the worker's side of each generated call

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::lookup::rows;
use crate::table::{Effect, Function, Param};

/// Handle types: what travels is the client's number, and the worker knows the driver's.
const HANDLES: &[&str] = &["CUcontext", "CUmodule", "CUlibrary", "CUfunction", "CUkernel", "CUstream", "CUevent"];

/// Structures that [`crate::types`] declares; others are opaque pointers.
const STRUCTURES: &[(&str, &str)] = &[
    ("CUgreenCtx", "u64"),
    ("CUdevResource", "CUdevResource"),
    ("CUdevResourceDesc", "u64"),
    ("CUlaunchConfig", "CUlaunchConfig"),
    ("CUlogIterator", "u32"),
    ("CUlogsCallbackHandle", "u64"),
    ("CUDA_MEMCPY2D", "CudaMemcpy2d"),
    ("CUDA_MEMCPY3D", "CudaMemcpy3d"),
    ("CUDA_MEMCPY3D_PEER", "CudaMemcpy3d"),
    ("CUDA_MEMCPY3D_BATCH_OP", "CudaMemcpy3dBatchOp"),
    ("CUmemcpyAttributes", "CUmemcpyAttributes"),
    ("CUarray", "u64"),
    ("CUmipmappedArray", "u64"),
    ("CUtexObject", "u64"),
    ("CUsurfObject", "u64"),
    ("CUDA_ARRAY_DESCRIPTOR", "CudaArrayDescriptor"),
    ("CUDA_ARRAY_DESCRIPTOR_v1", "CudaArrayDescriptorV1"),
    ("CUDA_ARRAY3D_DESCRIPTOR_v1", "CudaArray3dDescriptorV1"),
    ("CUDA_ARRAY3D_DESCRIPTOR", "CudaArray3dDescriptor"),
    ("CUDA_ARRAY_MEMORY_REQUIREMENTS", "CudaArrayMemoryRequirements"),
    ("CUDA_RESOURCE_DESC", "CudaResourceDesc"),
    ("CUDA_TEXTURE_DESC", "CudaTextureDesc"),
    ("CUDA_RESOURCE_VIEW_DESC", "CudaResourceViewDesc"),
    ("CUmemAllocationProp", "CUmemAllocationProp"),
    ("CUmemAccessDesc", "CUmemAccessDesc"),
    ("CUmemLocation", "CUmemLocation"),
    ("CUipcMemHandle", "CUipcMemHandle"),
    ("CUipcEventHandle", "CUipcEventHandle"),
    ("CUgraph", "u64"),
    ("CUgraphNode", "u64"),
    ("CUgraphExec", "u64"),
    ("CUgraphConditionalHandle", "u64"),
    ("CUuserObject", "u64"),
    ("CUgraphEdgeData", "CUgraphEdgeData"),
    ("CUgraphNodeParams", "CUgraphNodeParams"),
    ("CUgraphExecUpdateResultInfo", "CUgraphExecUpdateResultInfo"),
    ("CUlaunchAttributeValue", "CUlaunchAttributeValue"),
    ("CUkernelNodeAttrValue", "CUlaunchAttributeValue"),
    ("CUDA_KERNEL_NODE_PARAMS", "CudaKernelNodeParams"),
    ("CUDA_KERNEL_NODE_PARAMS_v1", "CudaKernelNodeParamsV1"),
    ("CUDA_MEMSET_NODE_PARAMS", "CudaMemsetNodeParams"),
    ("CUDA_HOST_NODE_PARAMS", "CudaHostNodeParams"),
    ("CUDA_MEM_ALLOC_NODE_PARAMS", "CudaMemAllocNodeParams"),
    ("CUDA_BATCH_MEM_OP_NODE_PARAMS", "CudaBatchMemOpNodeParams"),
    ("CUDA_GRAPH_INSTANTIATE_PARAMS", "CudaGraphInstantiateParams"),
];

/// The Rust type of a C type of `cuda.h`, with [`crate::types`] and `std::ffi` in scope. Enumerations are `u32`.
pub fn rust_type(c: &str) -> String {
    let c = c.trim();
    if let Some(pointee) = c.strip_suffix('*') {
        let pointee = pointee.trim();
        let (constant, inner) = match pointee.strip_prefix("const ") {
            Some(inner) if !inner.contains('*') => (true, inner),
            _ => (false, pointee),
        };
        let inner = match inner {
            "void" => "c_void".to_string(),
            "char" => "c_char".to_string(),
            "CUuuid" => "[u8; 16]".to_string(),
            inner => match STRUCTURES.iter().find(|s| s.0 == inner) {
                Some(s) => s.1.to_string(),
                None if inner.contains('*') || scalar(inner).is_some() || known_enum(inner) => rust_type(inner),
                None => "c_void".to_string(),
            },
        };
        return format!("*{} {inner}", if constant { "const" } else { "mut" });
    }
    match scalar(c) {
        Some(t) => t.to_string(),
        // A function pointer, or a handle type that nothing here gives a name to: opaque.
        None if c.ends_with("Callback") || c.ends_with("Fn") || c == "CUoccupancyB2DSize" => "*mut c_void".into(),
        None if known_enum(c) => "u32".into(),
        // Structures that are passed as they are.
        None if c.starts_with("CUipc") => c.into(),
        None => "u64".into(),
    }
}

fn scalar(c: &str) -> Option<&'static str> {
    Some(match c {
        "int" => "i32",
        "unsigned" | "unsigned int" | "cuuint32_t" => "u32",
        "unsigned char" => "u8",
        "unsigned short" => "u16",
        "unsigned long long" | "cuuint64_t" => "u64",
        "size_t" => "usize",
        "float" => "f32",
        "CUdeviceptr_v1" => "u32",
        "CUresult" | "CUdevice" | "CUdeviceptr" => {
            return HANDLES_AND_NUMBERS.iter().find(|n| **n == c).copied();
        }
        _ => return HANDLES.iter().find(|h| **h == c).copied(),
    })
}

const HANDLES_AND_NUMBERS: &[&str] = &["CUresult", "CUdevice", "CUdeviceptr"];

fn known_enum(c: &str) -> bool {
    const ENUMS: &[&str] = &[
        "CUdevice_attribute",
        "CUdevice_P2PAttribute",
        "CUdevResourceType",
        "CUatomicOperation",
        "CUcoredumpSettings",
        "CUfunction_attribute",
        "CUpointer_attribute",
        "CUfunc_cache",
        "CUsharedconfig",
        "CUlimit",
        "CUjit_option",
        "CUlibraryOption",
        "CUmoduleLoadingMode",
        "CUdriverProcAddressQueryResult",
        "CUstreamAttrID",
        "CUstreamCaptureStatus",
        "CUstreamCaptureMode",
        "CUfunctionLoadingState",
        "CUoutput_mode",
        "CUmemAllocationGranularity_flags",
        "CUmemAllocationHandleType",
        "CUmem_advise",
        "CUmem_range_attribute",
        "CUmemPool_attribute",
        "CUarray_format",
        "CUaddress_mode",
        "CUfilter_mode",
        "CUjitInputType",
        "CUexecAffinityType",
        "CUgraphNodeType",
        "CUgraphExecUpdateResult",
        "CUgraphMem_attribute",
        "CUkernelNodeAttrID",
    ];
    ENUMS.contains(&c)
}

/// A parameter's name as a Rust identifier.
fn ident(p: &Param) -> String {
    match p.name.as_str() {
        "type" | "fn" | "mod" | "ref" | "move" | "match" | "use" | "where" => {
            format!("r#{}", p.name)
        }
        name => name.to_string(),
    }
}

fn signature(params: &[Param]) -> String {
    params.iter().map(|p| format!("{}: {}", ident(p), rust_type(&p.c_type))).collect::<Vec<_>>().join(", ")
}

/// The arguments of a call of the function that implements a symbol.
fn taken(params: &[Param]) -> String {
    let take = |p| format!("rekindle_cuda_abi::arguments::FromC::from_c({})", ident(p));
    params.iter().map(take).collect::<Vec<_>>().join(", ")
}

/// Exported symbols, `SYMBOLS` (name and address, in table order) and `LOOKUPS` (for [`crate::lookup::find`]).
///
/// `module` names the module of the crate that has a function of the symbol's name, whose parameters are made of C's by
/// [`crate::arguments::FromC`]. Symbols without one call `crate::refuse(index)`. The crate also has
/// `crate::entry(index, closure) -> CUresult`, which keeps a panic from unwinding into C, and
/// `crate::with_thread_stream(closure) -> CUresult`, in which stream 0 is the thread's own.
pub fn exports(table: &[Function], module: impl Fn(&Function) -> Option<&'static str>) -> String {
    let mut out = String::from("// Generated from driver.table.\n");
    let by_symbol = |s: &str| table.iter().find(|f| f.symbol == s);
    for (i, f) in table.iter().enumerate() {
        let base = by_symbol(f.base()).unwrap_or(f);
        let thread = base.symbol != f.symbol && module(f).is_none();
        let target = if thread { base } else { f };
        match (&target.params, module(target)) {
            (Some(params), Some(module)) => {
                let call = format!("unsafe {{ crate::{module}::{}({}) }}", target.symbol, taken(params));
                let call = if thread { format!("crate::with_thread_stream(|| {call})") } else { call };
                let _ = writeln!(
                    out,
                    "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn {}({}) -> CUresult {{ crate::entry({i}, || {call}) }}",
                    f.symbol,
                    signature(params)
                );
            }
            _ => {
                let _ = writeln!(
                    out,
                    "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn {}() -> CUresult {{ crate::refuse({i}) }}",
                    f.symbol
                );
            }
        }
    }
    let _ = writeln!(out, "pub static SYMBOLS: [(&str, unsafe extern \"C\" fn()); {}] = [", table.len());
    for f in table {
        let _ = writeln!(
            out,
            "    (\"{0}\", unsafe {{ std::mem::transmute::<*const (), unsafe extern \"C\" fn()>({0} as *const ()) }}),",
            f.symbol
        );
    }
    out.push_str("];\n");
    let rows = rows(table);
    let _ = writeln!(out, "pub static LOOKUPS: [rekindle_cuda_abi::lookup::Row; {}] = [", rows.len());
    for (name, version, legacy, thread, function) in rows {
        let _ = writeln!(
            out,
            "    rekindle_cuda_abi::lookup::Row {{ name: \"{name}\", version: {version}, legacy: {legacy}, thread: {thread}, function: {function} }},"
        );
    }
    out.push_str("];\n");
    out
}

/// How a parameter of a generated call travels.
enum Travel {
    /// A word, as it is.
    Word,
    /// A device ordinal, which the client and the worker number differently.
    Device,
    /// A handle of the client's.
    Handle(&'static str),
    /// Text that ends in a NUL.
    Text,
    /// An out parameter: one word of the reply.
    Out(String),
    /// An out parameter that receives a handle the client chooses.
    New(&'static str),
    /// A pointer to one element of an array, which travels as a word.
    Element(String),
    /// The length of such an array, which does not travel: it is 1.
    One,
}

fn is_array(p: &Param) -> bool {
    p.c_type == "const CUatomicOperation *"
}

fn travel(f: &Function, p: &Param) -> Travel {
    let c = p.c_type.as_str();
    if is_array(p) {
        return Travel::Element("u32".to_owned());
    }
    if p.name == "count" && params(f).iter().any(is_array) {
        return Travel::One;
    }
    if c == "CUdevice" {
        return Travel::Device;
    }
    if let Some(h) = HANDLES.iter().find(|h| **h == c) {
        return Travel::Handle(h);
    }
    if c == "const char *" {
        return Travel::Text;
    }
    if let Some(inner) = c.strip_suffix('*').map(str::trim) {
        if let Some(h) = HANDLES.iter().find(|h| **h == inner) {
            return Travel::New(h);
        }
        assert!(!c.starts_with("const") && !inner.contains('*'), "{c} {} cannot travel by itself", p.name);
        return Travel::Out(rust_type(inner));
    }
    Travel::Word
}

fn params(f: &Function) -> &[Param] {
    match &f.params {
        Some(p) => p,
        None => panic!("{} travels but has no declaration", f.symbol),
    }
}

/// The client's side of each generated call: `pub unsafe fn SYMBOL(parameters) -> CUresult`, in terms of
/// `crate::call::Call` (`new(number)`, `word`, `device`, `handle`, `text`, `fresh`, `send()`, `wait()`).
pub fn encoders(table: &[Function]) -> String {
    let mut out = String::from("// Generated from driver.table.\n");
    for (i, f) in table.iter().enumerate().filter(|(_, f)| f.route.travels()) {
        let params = params(f);
        let _ = writeln!(out, "pub unsafe fn {}({}) -> CUresult {{", f.symbol, signature(params));
        let _ =
            writeln!(out, "    let mut call = match crate::call::Call::new({i}) {{ Ok(c) => c, Err(e) => return e }};");
        let mut after = String::new();
        for p in params {
            let name = ident(p);
            match travel(f, p) {
                Travel::Word if rust_type(&p.c_type) == "f32" => {
                    let _ = writeln!(out, "    call.word(u64::from({name}.to_bits()));");
                }
                Travel::Word => {
                    let _ = writeln!(out, "    call.word({name} as u64);");
                }
                Travel::Device => {
                    let _ = writeln!(out, "    if let Err(e) = call.device({name}) {{ return e; }}");
                }
                Travel::Handle("CUstream") => {
                    let _ = writeln!(out, "    if let Err(e) = call.stream({name}) {{ return e; }}");
                }
                Travel::Handle(_) => {
                    let _ = writeln!(out, "    call.word({name});");
                }
                Travel::Text => {
                    let _ = writeln!(out, "    if let Err(e) = unsafe {{ call.text({name}) }} {{ return e; }}");
                }
                Travel::New(kind) => {
                    let _ = writeln!(out, "    if {name}.is_null() {{ return CUDA_ERROR_INVALID_VALUE; }}");
                    let _ = writeln!(out, "    let fresh_{} = call.fresh(\"{kind}\");", p.name);
                    let _ = writeln!(after, "    unsafe {{ *{name} = fresh_{} }};", p.name);
                }
                Travel::Out(t) => {
                    let _ = writeln!(out, "    if {name}.is_null() {{ return CUDA_ERROR_INVALID_VALUE; }}");
                    let value = if t == "f32" { "f32::from_bits(word as u32)".into() } else { format!("word as {t}") };
                    let _ = writeln!(
                        after,
                        "    let Some(word) = reply.word() else {{ return CUDA_ERROR_UNKNOWN }}; unsafe {{ *{name} = {value} }};"
                    );
                }
                Travel::Element(_) => {
                    let _ = writeln!(out, "    if {name}.is_null() {{ return CUDA_ERROR_INVALID_VALUE; }}");
                    let _ = writeln!(out, "    call.word(unsafe {{ *{name} }} as u64);");
                }
                Travel::One => {
                    let _ = writeln!(out, "    if {name} != 1 {{ return CUDA_ERROR_INVALID_VALUE; }}");
                }
            }
        }
        if f.route.waits() {
            let _ = writeln!(out, "    let (result, mut reply) = call.wait();");
            let _ = writeln!(out, "    if result != CUDA_SUCCESS {{ return result; }} let _ = &mut reply;");
        } else {
            let _ = writeln!(out, "    let result = call.send();");
            let _ = writeln!(out, "    if result != CUDA_SUCCESS {{ return result; }}");
        }
        let _ = writeln!(out, "{after}    CUDA_SUCCESS\n}}");
    }
    out
}

/// The oldest driver that workers run with: that of CUDA 12.4.
const OLDEST_DRIVER: u32 = 12_040;

/// Whether drivers that workers run with may lack a function.
fn may_be_missing(f: &Function) -> bool {
    f.lookups.iter().map(|it| it.version).min().is_some_and(|since| since > OLDEST_DRIVER)
}

/// A struct `Driver` with a typed pointer for each symbol that the worker calls: those that travel by the table, and
/// `also`. `Driver::load(&Library)` takes them from a loaded `libcuda.so.1`; a missing one is an error that names it, or, if the
/// oldest driver lacks it, a function that returns `CUDA_ERROR_NOT_SUPPORTED`. `CALLED` lists these symbols, for tests.
pub fn entry_points(table: &[Function], also: &[&str]) -> String {
    let wanted: BTreeSet<&str> =
        table.iter().filter(|f| f.route.travels()).map(|f| f.symbol.as_str()).chain(also.iter().copied()).collect();
    let mut fields = String::new();
    let mut loads = String::new();
    for f in table.iter().filter(|f| wanted.contains(f.symbol.as_str())) {
        let types = params(f).iter().map(|p| rust_type(&p.c_type)).collect::<Vec<_>>().join(", ");
        let _ = writeln!(fields, "    pub {}: unsafe extern \"C\" fn({types}) -> CUresult,", f.symbol);
        let found = format!("std::mem::transmute::<*const c_void, unsafe extern \"C\" fn({types}) -> CUresult>");
        let symbol = &f.symbol;
        if may_be_missing(f) {
            let unused =
                params(f).iter().map(|p| format!("_: {}", rust_type(&p.c_type))).collect::<Vec<_>>().join(", ");
            let _ = writeln!(
                loads,
                "            {symbol}: match find(\"{symbol}\\0\") {{\n                Ok(it) => unsafe {{ {found}(it) }},\n                \
                 Err(_) => {{ unsafe extern \"C\" fn missing({unused}) -> CUresult {{ CUDA_ERROR_NOT_SUPPORTED }} missing }}\n            }},"
            );
        } else {
            let _ = writeln!(loads, "            {symbol}: unsafe {{ {found}(find(\"{symbol}\\0\")?) }},");
        }
    }
    for name in &wanted {
        assert!(table.iter().any(|f| f.symbol == *name), "driver.table has no {name}");
    }
    let called: Vec<_> = wanted.iter().map(|name| format!("{name:?}")).collect();
    let called = format!("#[cfg(test)]\npub const CALLED: &[&str] = &[{}];\n", called.join(", "));
    format!(
        "// Generated from driver.table.\n{called}#[derive(Clone, Copy)]\npub struct Driver {{\n{fields}}}\n\nimpl Driver {{\n    \
         pub unsafe fn load(find: impl Fn(&'static str) -> Result<*const c_void, super::LoadError>) -> Result<Driver, super::LoadError> {{\n        \
         Ok(Driver {{\n{loads}        }})\n    }}\n}}\n"
    )
}

/// The worker's side of each generated call, `pub fn dispatch(w, call, args, reply) -> Option<Result<..>>`, in terms
/// of `Executor` methods: `handle_KIND`, `handle_unused_function`, `device`, `created`, `destroyed`, `changed`.
pub fn dispatch(table: &[Function]) -> String {
    let mut out = String::from(
        "// Generated from driver.table.\npub(crate) fn dispatch(w: &mut Executor, call: u16, args: &mut Reader<'_>, reply: &mut Writer) -> Result<CUresult, Refused> {\n    match call {\n",
    );
    for (i, f) in table.iter().enumerate().filter(|(_, f)| f.route.travels()) {
        let mut before = String::new();
        let mut list = Vec::new();
        let mut after = String::new();
        let mut first_handle = None;
        let mut set_handle = None;
        for (n, p) in params(f).iter().enumerate() {
            let v = format!("a{n}");
            match travel(f, p) {
                Travel::Word if rust_type(&p.c_type) == "f32" => {
                    let _ = writeln!(before, "            let {v} = f32::from_bits(args.word()? as u32);");
                    list.push(v);
                }
                Travel::Word => {
                    let _ = writeln!(before, "            let {v} = args.word()? as {};", rust_type(&p.c_type));
                    list.push(v);
                }
                Travel::Device => {
                    let _ = writeln!(before, "            let {v} = w.device(args.word()?)?;");
                    list.push(v);
                }
                Travel::Handle(kind) => {
                    let kind = kind.trim_start_matches("CU");
                    // Every other call may have the driver load the function.
                    let unused = if f.symbol == "cuFuncIsLoaded" { "unused_" } else { "" };
                    let _ = writeln!(
                        before,
                        "            let h{n} = args.word()?; let {v} = w.handle_{unused}{kind}(h{n})?;"
                    );
                    first_handle.get_or_insert(n);
                    if matches!(&f.effect, Effect::Sets(k) if k.eq_ignore_ascii_case(kind)) {
                        set_handle.get_or_insert(n);
                    }
                    list.push(v);
                }
                Travel::Text => {
                    let _ = writeln!(before, "            let {v} = args.text()?;");
                    list.push(format!("{v}.as_ptr()"));
                }
                Travel::New(kind) => {
                    let _ = writeln!(before, "            let n{n} = args.word()?; let mut {v}: {kind} = 0;");
                    list.push(format!("&mut {v}"));
                    let _ = writeln!(
                        after,
                        "                w.created(\"{}\", n{n}, {v}, call, args)?;",
                        kind.trim_start_matches("CU")
                    );
                }
                Travel::Out(t) => {
                    let zero = if t == "f32" { "0.0" } else { "0" };
                    let _ = writeln!(before, "            let mut {v}: {t} = {zero};");
                    list.push(format!("&mut {v}"));
                    let word = if t == "f32" { format!("u64::from({v}.to_bits())") } else { format!("{v} as u64") };
                    let _ = writeln!(after, "                reply.word({word});");
                }
                Travel::Element(t) => {
                    let _ = writeln!(before, "            let {v} = args.word()? as {t};");
                    list.push(format!("&{v}"));
                }
                Travel::One => list.push("1".to_owned()),
            }
        }
        match &f.effect {
            Effect::Destroys(_) => {
                if let Some(n) = first_handle {
                    let _ = writeln!(after, "                w.destroyed(h{n});");
                }
            }
            Effect::Sets(_) => {
                let handle = set_handle.map_or("0".to_string(), |n| format!("h{n}"));
                // The parameters that are no values say which setting is set; all of them are words.
                let is_value = |p: &Param| matches!(p.name.as_str(), "value" | "val" | "config");
                let value = params(f).iter().position(is_value).map_or("None".into(), |n| format!("Some({n})"));
                let _ = writeln!(after, "                w.changed({handle}, call, args, {value});");
            }
            _ => {}
        }
        let _ = writeln!(
            out,
            "        {i} => {{ // {0}\n{before}            args.end()?;\n            let result = unsafe {{ (w.driver().{0})({1}) }};\n            if result == CUDA_SUCCESS {{\n{after}            }}\n            Ok(result)\n        }}",
            f.symbol,
            list.join(", ")
        );
    }
    out.push_str("        _ => Err(Refused::UnknownCall(call)),\n    }\n}\n");
    out
}

/// The encoding of a line's call on the ring: a number that changes with the symbol and with how its parameters travel,
/// and with nothing else. 0 for a line that does not travel.
///
/// FNV-1a in 32 bits. Images and clients of other releases carry these numbers: this function must not change.
pub fn encoding(f: &Function) -> u32 {
    if !f.route.travels() {
        return 0;
    }
    let mut text = f.symbol.clone();
    for p in params(f) {
        let how = match travel(f, p) {
            Travel::Word => format!("word {}", rust_type(&p.c_type)),
            Travel::Device => "device".to_owned(),
            Travel::Handle(kind) => format!("handle {kind}"),
            Travel::Text => "text".to_owned(),
            Travel::Out(of) => format!("out {of}"),
            Travel::New(kind) => format!("new {kind}"),
            Travel::Element(of) => format!("element {of}"),
            Travel::One => "one".to_owned(),
        };
        text = text + "," + &how;
    }
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    hash.max(1)
}

/// `ENCODINGS`: the [`encoding`] of each line.
pub fn encodings(table: &[Function]) -> String {
    let list: Vec<_> = table.iter().map(|f| encoding(f).to_string()).collect();
    format!(
        "// Generated from driver.table.\n/// See `rekindle_cuda_abi::generate::encoding`.\npub(crate) static ENCODINGS: [u32; {}] = [{}];\n",
        list.len(),
        list.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::parse;

    fn of(line: &str) -> u32 {
        encoding(&parse(line).unwrap()[0])
    }

    #[test]
    fn an_encoding_depends_on_symbol_and_parameters_and_on_nothing_else() {
        let line = of("wait | cuA(CUstream hStream, int n) | cuA@2000");
        assert_ne!(line, 0);
        assert_eq!(line, of("# a comment\nhand+send destroys stream | cuA(CUstream s, int count) |"));
        assert_ne!(line, of("wait | cuB(CUstream hStream, int n) | cuA@2000"));
        assert_ne!(line, of("wait | cuA(CUstream hStream, int *n) | cuA@2000"));
        assert_ne!(line, of("wait | cuA(int n, CUstream hStream) | cuA@2000"));
        assert_eq!(of("refused | cuA(CUstream hStream, int n) | cuA@2000"), 0);
    }

    #[test]
    fn an_array_travels_one_element_at_a_time_and_its_length_never_does() {
        let table =
            parse("wait | cuA(unsigned int *of, const CUatomicOperation *what, unsigned int count) | cuA@13000");
        let table = table.unwrap();
        let (client, worker) = (encoders(&table), dispatch(&table));
        assert!(client.contains("call.word(unsafe { *what } as u64);") && !client.contains("call.word(count"));
        assert!(client.contains("if count != 1 { return CUDA_ERROR_INVALID_VALUE; }"), "{client}");
        assert!(worker.contains("let a1 = args.word()? as u32;") && worker.contains("(&mut a0, &a1, 1)"), "{worker}");
    }

    #[test]
    fn a_function_that_the_oldest_driver_lacks_is_not_needed() {
        let table = parse("wait | cuA(int n) | cuA@12040\nwait | cuB(int n) | cuB@12050").unwrap();
        let text = entry_points(&table, &[]);
        assert!(text.contains("(find(\"cuA\\0\")?)"), "{text}");
        assert!(text.contains("match find(\"cuB\\0\")"), "{text}");
    }
}
