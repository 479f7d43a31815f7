//! Kernels of PTX: their parameters, and which of them may get to the device's heap.

use std::collections::HashMap;

use super::declare::{Declarator, Type};
use super::lexer::{Lexer, Token};
use super::{Item, Ptx};
use crate::code::CodeError;
use crate::code::graph::Graph;
use crate::code::items::{Kernel, Param};
use crate::code::reach::ALLOCATORS;

impl Ptx<'_> {
    /// The kernels, in the order of the text.
    pub(in crate::code) fn kernels(self) -> Result<Vec<Kernel>, CodeError> {
        let mut kernels = Vec::new();
        let mut calls = Calls::default();
        let mut bodies = Vec::new();
        let mut initials = Vec::new();
        self.scan(|item| match item {
            Item::Function(function) => {
                let node = calls.declare(function.name, function.body.is_none());
                if let Some(body) = function.body {
                    bodies.push((node, body));
                    if function.kernel {
                        kernels.push((node, function.name, params(function.params)));
                    }
                }
            }
            Item::Alias { name, of } => {
                let (name, of) = (calls.declare(name, false), calls.declare(of, false));
                calls.graph.add(name, of);
            }
            Item::Variable { initial, .. } => initials.push(initial),
        })?;
        // Only now are all names known.
        for (node, body) in bodies {
            calls.add_body(node, body);
        }
        for initial in initials {
            calls.add_initial(initial);
        }
        let allocating = calls.allocating();
        Ok(kernels
            .into_iter()
            .map(|(node, name, params)| Kernel {
                name: String::from_utf8_lossy(name).into_owned(),
                params,
                allocates: allocating.get(node as usize).copied().unwrap_or(true),
            })
            .collect())
    }

    /// Whether a function is named where it is not called.
    pub(in crate::code) fn takes_function_addresses(self) -> Result<bool, CodeError> {
        let mut calls = Calls::default();
        let (mut bodies, mut initials) = (Vec::new(), Vec::new());
        self.scan(|item| match item {
            Item::Function(function) => {
                let node = calls.declare(function.name, false);
                bodies.extend(function.body.map(|body| (node, body)));
            }
            Item::Alias { name, of } => {
                calls.declare(name, false);
                calls.declare(of, false);
            }
            Item::Variable { initial, .. } => initials.push(initial),
        })?;
        bodies.into_iter().for_each(|(node, body)| calls.add_body(node, body));
        initials.into_iter().for_each(|initial| calls.add_initial(initial));
        Ok(calls.takes)
    }

    /// Whether an allocator is declared. The compiler declares only what is called.
    pub(in crate::code) fn refers_to_allocator(self) -> bool {
        let mut found = false;
        let scanned = self.scan(|item| {
            if let Item::Function(function) = item {
                found |= function.body.is_none() && ALLOCATORS.contains(&function.name);
            }
        });
        // Text that cannot be read to its end may contain anything.
        found || scanned.is_err()
    }
}

/// The references between functions, by name. A node is a function; node 0 is "any function whose
/// address is taken".
#[derive(Default)]
struct Calls<'a> {
    functions: HashMap<&'a [u8], u32>,
    allocators: Vec<u32>,
    graph: Graph,
    /// Whether any function's address is taken.
    takes: bool,
}

/// The node of "any function whose address is taken".
const ANY_TAKEN: u32 = 0;

impl<'a> Calls<'a> {
    fn declare(&mut self, name: &'a [u8], without_body: bool) -> u32 {
        let next = self.functions.len() as u32 + 1;
        let node = *self.functions.entry(name).or_insert(next);
        if without_body && ALLOCATORS.contains(&name) {
            self.allocators.push(node);
        }
        node
    }

    fn add_body(&mut self, from: u32, body: &'a [u8]) {
        let mut lexer = Lexer::new(body);
        while let Some(token) = lexer.next() {
            match token {
                Token::Word(b"call") => match callee(&mut lexer) {
                    Some(name) => match self.functions.get(name) {
                        Some(&to) => self.graph.add(from, to),
                        None => self.graph.add(from, ANY_TAKEN),
                    },
                    None => self.graph.add(from, ANY_TAKEN),
                },
                Token::Word(word) => {
                    if let Some(&taken) = self.functions.get(word) {
                        self.graph.add(from, taken);
                        self.graph.add(ANY_TAKEN, taken);
                        self.takes = true;
                    }
                }
                _ => {}
            }
        }
    }

    fn add_initial(&mut self, initial: &'a [u8]) {
        for token in Lexer::new(initial) {
            if let Token::Word(word) = token
                && let Some(&taken) = self.functions.get(word)
            {
                self.graph.add(ANY_TAKEN, taken);
                self.takes = true;
            }
        }
    }

    fn allocating(self) -> Vec<bool> {
        let count = self.functions.len() + 1;
        self.graph.reaching(count, self.allocators.into_iter())
    }
}

/// After `call`: the name or register that is called, as in `call.uni (r), f, (a, b);`.
fn callee<'a>(lexer: &mut Lexer<'a>) -> Option<&'a [u8]> {
    loop {
        match lexer.next()? {
            Token::Word(name) => return Some(name),
            Token::Sign(b'(') => {
                lexer.take_until_closed(b'(', b')')?;
            }
            Token::Dot(_) | Token::Sign(b',') => {}
            _ => return None,
        }
    }
}

/// The parameters in `list`, laid out as the driver does: in order, each at the next multiple of
/// its alignment.
fn params(list: &[u8]) -> Option<Vec<Param>> {
    let mut lexer = Lexer::new(list);
    let mut params = Vec::new();
    let mut end = 0_u64;
    while lexer.peek().is_some() {
        if lexer.next() != Some(Token::Dot(b".param")) {
            return None;
        }
        let kind = Type::parse(&mut lexer).ok()?;
        let elements = Declarator::parse(&mut lexer).ok()?.elements(None).ok()?;
        let size = kind.size.checked_mul(elements)?;
        let align = kind.align.unwrap_or(kind.size.max(1));
        let offset = end.checked_next_multiple_of(align)?;
        end = offset.checked_add(size)?;
        if kind.size == 0 || end > u64::from(u32::MAX) {
            return None;
        }
        params.push(Param { offset: u32::try_from(offset).ok()?, size: u32::try_from(size).ok()? });
        match lexer.next() {
            Some(Token::Sign(b',')) => {}
            None => break,
            Some(_) => return None,
        }
    }
    Some(params)
}
