//! The syntax tree that the parser makes of the text: functions as lists of instructions, with the names of each function
//! resolved.

use std::collections::HashMap;

/// A fundamental type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    Pred,
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    F64,
}

impl Type {
    /// The type of that name, without its dot.
    pub(crate) fn named(name: &str) -> Option<Type> {
        Some(match name {
            "pred" => Type::Pred,
            "b8" => Type::B8,
            "b16" => Type::B16,
            "b32" => Type::B32,
            "b64" => Type::B64,
            "b128" => Type::B128,
            "u8" => Type::U8,
            "u16" => Type::U16,
            "u32" => Type::U32,
            "u64" => Type::U64,
            "s8" => Type::S8,
            "s16" => Type::S16,
            "s32" => Type::S32,
            "s64" => Type::S64,
            "f16" => Type::F16,
            "f16x2" => Type::F16x2,
            "bf16" => Type::Bf16,
            "bf16x2" => Type::Bf16x2,
            "f32" => Type::F32,
            "f64" => Type::F64,
            _ => return None,
        })
    }

    /// Its size in bytes; a predicate counts as one.
    pub(crate) fn bytes(self) -> u32 {
        match self {
            Type::Pred | Type::B8 | Type::U8 | Type::S8 => 1,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16 => 2,
            Type::B32 | Type::U32 | Type::S32 | Type::F32 | Type::F16x2 | Type::Bf16x2 => 4,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 => 8,
            Type::B128 => 16,
        }
    }

    /// Whether it is an integer with a sign.
    pub(crate) fn signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    /// Whether it is a floating point type, packed ones included.
    pub(crate) fn float(self) -> bool {
        use Type::{Bf16, Bf16x2, F16, F16x2, F32, F64};
        matches!(self, F16 | F16x2 | Bf16 | Bf16x2 | F32 | F64)
    }
}

/// A state space in which a variable of a function can be declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VarSpace {
    Shared,
    Local,
    Param,
}

/// A variable of a function, a parameter, or a module's shared variable.
#[derive(Debug, Clone)]
pub(crate) struct Var {
    pub(crate) name: String,
    pub(crate) space: VarSpace,
    pub(crate) size: u64,
    pub(crate) align: u64,
    /// Declared with empty brackets or `.extern`: dynamic shared memory, or variadic arguments.
    pub(crate) unsized_: bool,
}

/// A kernel or a device function.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) entry: bool,
    pub(crate) params: Vec<Var>,
    pub(crate) returns: Vec<Var>,
    pub(crate) max_threads: Option<[u32; 3]>,
    pub(crate) required_threads: Option<[u32; 3]>,
    pub(crate) required_cluster: Option<[u32; 3]>,
    /// None for a declaration.
    pub(crate) body: Option<Body>,
}

/// The content of a function's braces.
#[derive(Debug, Clone, Default)]
pub(crate) struct Body {
    /// The type of each register.
    pub(crate) registers: Vec<Type>,
    /// Parameters, then return values, then variables of all scopes.
    pub(crate) vars: Vec<Var>,
    pub(crate) instructions: Vec<Instruction>,
    /// The meanings of [`Operand::Name`].
    pub(crate) names: Vec<NameRef>,
    /// The reason why the function cannot be executed, if there is one: the line and the construct.
    pub(crate) refused: Option<(u32, String)>,
}

/// A name that is neither a register nor a variable of the function.
#[derive(Debug, Clone)]
pub(crate) enum NameRef {
    /// A label: the index of the instruction it stands before.
    Label(u32),
    /// The targets of `brx.idx`, as indices of instructions.
    Targets(Vec<u32>),
    /// `.callprototype`.
    Prototype(Prototype),
    /// `.calltargets`: all functions that an indirect call may reach.
    Functions(Vec<String>),
    /// A symbol of the module.
    Symbol(String),
}

/// The shape of a function that is called indirectly.
#[derive(Debug, Clone, Default)]
pub(crate) struct Prototype {
    pub(crate) returns: Vec<Var>,
    pub(crate) params: Vec<Var>,
}

/// An instruction.
#[derive(Debug, Clone)]
pub(crate) struct Instruction {
    pub(crate) line: u32,
    /// The predicate register, and whether it is negated.
    pub(crate) guard: Option<(u32, bool)>,
    /// Index into [`Ast::opcodes`].
    pub(crate) opcode: u32,
    pub(crate) operands: Vec<Operand>,
}

/// A mnemonic with its modifiers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Opcode {
    pub(crate) name: String,
    pub(crate) modifiers: Vec<String>,
}

impl std::fmt::Display for Opcode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        self.modifiers.iter().try_for_each(|m| write!(f, ".{m}"))
    }
}

/// An operand of an instruction.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand {
    Reg(u32),
    /// A variable of the function, as its address.
    Var(u32, i64),
    /// Index into [`Body::names`], and an addend.
    Name(u32, i64),
    /// A special register, with its component (`%tid.x`).
    Special(&'static str),
    Int(i64),
    F32(u32),
    F64(u64),
    /// `[base + offset]`.
    Memory(Box<Operand>, i64),
    /// `[texture, {x, y}]`.
    Texture(Box<Operand>, Vec<Operand>),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `(a, b)`.
    List(Vec<Operand>),
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `!p`.
    Not(Box<Operand>),
    /// `_`.
    Sink,
    /// An operand that no supported instruction takes.
    Other,
}

/// The declarations of a module, except variables with addresses of their own.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ast {
    pub(crate) functions: Vec<Function>,
    /// The index of each function by its name. A definition replaces its declaration.
    pub(crate) function_index: HashMap<String, u32>,
    /// Shared variables of the module's scope.
    pub(crate) shared: Vec<Var>,
    pub(crate) opcodes: Vec<Opcode>,
}
