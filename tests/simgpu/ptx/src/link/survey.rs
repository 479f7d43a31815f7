//! The functions, the shared variables and the heap that each function of a module reaches.

use std::collections::{HashMap, HashSet};

use crate::ast::{Ast, Body, NameRef, Operand, Var, VarSpace};
use crate::declaration::{Global, Kernel, Param};

/// Facts about each function, in the module's order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Survey {
    /// The functions it calls by name.
    pub(crate) direct: Vec<Vec<u32>>,
    pub(crate) shared: Vec<SharedLayout>,
    /// The kernels, in the order of the text.
    pub(crate) kernels: Vec<Kernel>,
}

/// The places of shared variables for a function.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedLayout {
    /// The variables of the module's scope.
    pub(crate) symbols: HashMap<String, u32>,
    /// The function's own variables, by their numbers.
    pub(crate) own: HashMap<u32, u32>,
    /// The shared memory that the function needs in all.
    pub(crate) bytes: u32,
}

fn symbols_of(body: &Body) -> impl Iterator<Item = &str> {
    body.names.iter().flat_map(|name| {
        match name {
            NameRef::Symbol(symbol) => std::slice::from_ref(symbol),
            NameRef::Functions(functions) => functions.as_slice(),
            _ => &[],
        }
        .iter()
        .map(String::as_str)
    })
}

/// The name in a call, if the operands have a callee; an inner none for calls by address.
fn called(body: &Body, operands: &[Operand]) -> Option<Option<u32>> {
    operands
        .iter()
        .find_map(|operand| match operand {
            Operand::Name(name, _) => Some(Some(*name)),
            Operand::Reg(_) => Some(None),
            _ => None,
        })
        .map(|found| found.filter(|&n| matches!(body.names.get(n as usize), Some(NameRef::Symbol(_)))))
}

/// Surveys a module.
pub(crate) fn survey(ast: &Ast, globals: &[Global]) -> Survey {
    let function = |name: &str| ast.function_index.get(name).copied();
    let mut taken: HashSet<u32> =
        globals.iter().flat_map(|g| &g.relocations).filter_map(|r| function(&r.symbol)).collect();
    let mut direct = Vec::with_capacity(ast.functions.len());
    let mut indirect = Vec::with_capacity(ast.functions.len());
    for f in &ast.functions {
        let mut calls: Vec<u32> = Vec::new();
        let mut by_address = false;
        if let Some(body) = &f.body {
            let mut named = HashSet::new();
            for i in &body.instructions {
                let opcode = &ast.opcodes[i.opcode as usize].name;
                if opcode == "call" {
                    match called(body, &i.operands) {
                        Some(Some(name)) => {
                            named.insert(name);
                        }
                        _ => by_address = true,
                    }
                } else {
                    for operand in &i.operands {
                        if let Operand::Name(name, _) = operand
                            && let Some(NameRef::Symbol(symbol)) = body.names.get(*name as usize)
                        {
                            taken.extend(function(symbol));
                        }
                    }
                }
            }
            for name in named {
                if let Some(NameRef::Symbol(symbol)) = body.names.get(name as usize) {
                    calls.extend(function(symbol));
                }
            }
        }
        calls.sort_unstable();
        direct.push(calls);
        indirect.push(by_address);
    }
    let mut possible = direct.clone();
    let mut taken: Vec<u32> = taken.into_iter().collect();
    taken.sort_unstable();
    for (calls, by_address) in possible.iter_mut().zip(indirect) {
        if by_address {
            calls.extend(&taken);
        }
    }
    let shared = shared_layouts(ast, &possible);
    let kernels = kernels(ast, &possible, &shared);
    Survey { direct, shared, kernels }
}

/// All functions reached from one, itself included.
pub(crate) fn reached(from: u32, calls: &[Vec<u32>]) -> Vec<u32> {
    let mut seen = vec![false; calls.len()];
    let mut found = vec![from];
    let mut at = 0;
    if let Some(seen) = seen.get_mut(from as usize) {
        *seen = true;
    }
    while let Some(&function) = found.get(at) {
        at += 1;
        for &next in calls.get(function as usize).map_or(&[][..], Vec::as_slice) {
            if !std::mem::replace(&mut seen[next as usize], true) {
                found.push(next);
            }
        }
    }
    found
}

/// Places a variable behind those before it; none if shared memory is never large enough.
fn place(bytes: &mut u32, var: &Var) -> Option<u32> {
    let at = u64::from(*bytes).checked_next_multiple_of(var.align.max(1))?;
    let end = at.checked_add(var.size).filter(|&end| end <= 1 << 24)?;
    *bytes = end as u32;
    u32::try_from(at).ok()
}

/// A device function is decoded once for all kernels, so its variables have one place for the whole module; variables that only
/// kernels use are placed anew for each.
fn shared_layouts(ast: &Ast, possible: &[Vec<u32>]) -> Vec<SharedLayout> {
    let module: HashMap<&str, &Var> = ast.shared.iter().map(|v| (v.name.as_str(), v)).collect();
    let mut layouts = vec![SharedLayout::default(); ast.functions.len()];
    let mut common = SharedLayout::default();
    let mut uses_common = vec![false; ast.functions.len()];
    let own = |body: &Body| {
        let vars = body.vars.iter().enumerate();
        vars.filter(|(_, v)| v.space == VarSpace::Shared && !v.unsized_)
            .map(|(index, var)| (index as u32, var.clone()))
            .collect::<Vec<_>>()
    };
    let sized = |body: &Body| {
        symbols_of(body)
            .filter_map(|name| module.get(name).copied())
            .filter(|var| !var.unsized_)
            .cloned()
            .collect::<Vec<Var>>()
    };
    for (index, function) in ast.functions.iter().enumerate().filter(|(_, f)| !f.entry) {
        let Some(body) = &function.body else { continue };
        for (var, declared) in own(body) {
            uses_common[index] = true;
            if let Some(at) = place(&mut common.bytes, &declared) {
                layouts[index].own.insert(var, at);
            }
        }
        for var in sized(body) {
            uses_common[index] = true;
            if !common.symbols.contains_key(&var.name)
                && let Some(at) = place(&mut common.bytes, &var)
            {
                common.symbols.insert(var.name, at);
            }
        }
    }
    for (index, function) in ast.functions.iter().enumerate() {
        layouts[index].symbols = common.symbols.clone();
        let (true, Some(body)) = (function.entry, &function.body) else { continue };
        let layout = &mut layouts[index];
        let reaches = reached(index as u32, possible).iter().any(|&f| uses_common[f as usize]);
        let vars = sized(body);
        if reaches || vars.iter().any(|v| common.symbols.contains_key(&v.name)) {
            layout.bytes = common.bytes;
        }
        for (var, declared) in own(body) {
            if let Some(at) = place(&mut layout.bytes, &declared) {
                layout.own.insert(var, at);
            }
        }
        for var in vars {
            if !layout.symbols.contains_key(&var.name)
                && let Some(at) = place(&mut layout.bytes, &var)
            {
                layout.symbols.insert(var.name, at);
            }
        }
    }
    layouts
}

/// The kernels of a module in the form for the loader.
fn kernels(ast: &Ast, possible: &[Vec<u32>], shared: &[SharedLayout]) -> Vec<Kernel> {
    let heap: HashSet<u32> =
        ["malloc", "free"].iter().filter_map(|name| ast.function_index.get(*name).copied()).collect();
    let entries = ast.functions.iter().enumerate().filter(|(_, f)| f.entry && f.body.is_some());
    entries
        .map(|(index, function)| {
            let (params, param_bytes) = layout(&function.params);
            let vars = function.body.iter().flat_map(|body| &body.vars);
            let local_bytes = vars.filter(|v| v.space == VarSpace::Local).map(|v| v.size as u32).sum();
            let reached = reached(index as u32, possible);
            Kernel {
                name: function.name.clone(),
                params,
                param_bytes,
                max_threads: function.max_threads,
                required_threads: function.required_threads,
                required_cluster: function.required_cluster,
                shared_bytes: shared[index].bytes,
                local_bytes,
                reaches_malloc: reached.iter().any(|f| heap.contains(f)),
            }
        })
        .collect()
}

/// Lays parameters out one behind the other.
pub(crate) fn layout(vars: &[Var]) -> (Vec<Param>, u32) {
    let mut end = 0u64;
    let mut params = Vec::with_capacity(vars.len());
    for var in vars {
        let at = end.next_multiple_of(var.align.max(1));
        // Parameters have 32 KiB at most; sizes beyond are cut, and such a kernel is refused.
        let size = var.size.min(PARAM_LIMIT);
        end = (at + size).min(PARAM_LIMIT);
        let narrow = |n: u64| n.min(PARAM_LIMIT) as u32;
        params.push(Param { offset: narrow(at), size: narrow(size), align: narrow(var.align) });
    }
    (params, end as u32)
}

/// The limit for all parameters together, with much room to spare.
pub(crate) const PARAM_LIMIT: u64 = 1 << 20;
