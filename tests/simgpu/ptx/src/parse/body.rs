//! Function bodies: scopes, declarations, labels, instructions.

use std::collections::HashMap;

use super::directive::Linkage;
use super::{Parse, Parser};
use crate::ast::{Body, Function, Instruction, NameRef, Opcode, Prototype, Type, VarSpace};
use crate::lex::Token;

/// The limit of registers in a function. Real functions have tens of thousands at most.
const REGISTER_LIMIT: usize = 1 << 20;

/// The meaning of a name in a function's scope.
#[derive(Debug, Clone, Copy)]
pub(super) enum Entity {
    Register(u32),
    Variable(u32),
}

/// The declarations in a pair of braces.
#[derive(Debug, Default)]
struct Scope<'t> {
    parent: Option<u32>,
    names: HashMap<String, Entity>,
    /// `.reg .b32 %r<10>`: the prefix, the count and the first register.
    families: HashMap<&'t str, (u32, u32)>,
    labels: HashMap<&'t str, Labelled<'t>>,
}

#[derive(Debug, Clone)]
enum Labelled<'t> {
    Code(u32),
    Branches(Vec<&'t str>),
    Calls(Vec<String>),
    Prototype(Prototype),
}

/// A function's body while it is being read.
#[derive(Debug, Default)]
pub(super) struct BodyBuilder<'t> {
    pub(super) body: Body,
    scopes: Vec<Scope<'t>>,
    scope: u32,
    /// Names to be resolved when all labels are known, with the scope they were used in.
    pending: Vec<(&'t str, u32)>,
    pending_index: HashMap<(&'t str, u32), u32>,
}

impl<'t> BodyBuilder<'t> {
    fn open(&mut self) {
        let parent = (!self.scopes.is_empty()).then_some(self.scope);
        self.scope = self.scopes.len() as u32;
        self.scopes.push(Scope { parent, ..Scope::default() });
    }

    /// Closes the innermost scope; false if it was the last.
    fn close(&mut self) -> bool {
        match self.scopes[self.scope as usize].parent {
            Some(parent) => {
                self.scope = parent;
                true
            }
            None => false,
        }
    }

    fn innermost(&mut self) -> &mut Scope<'t> {
        &mut self.scopes[self.scope as usize]
    }

    /// The meaning of a name that this function has declared before.
    pub(super) fn lookup(&self, name: &str) -> Option<Entity> {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (prefix, number) = name.split_at(name.len() - digits);
        let number = number.parse::<u32>().ok();
        let mut scope = Some(self.scope);
        while let Some(at) = scope {
            let s = &self.scopes[at as usize];
            if let Some(&entity) = s.names.get(name) {
                return Some(entity);
            }
            if let (Some(number), Some(&(count, first))) = (number, s.families.get(prefix))
                && number < count
            {
                return Some(Entity::Register(first + number));
            }
            scope = s.parent;
        }
        None
    }

    /// The index of a name that only the whole body, or the module, can resolve.
    pub(super) fn later(&mut self, name: &'t str) -> u32 {
        let next = self.pending.len() as u32;
        let index = *self.pending_index.entry((name, self.scope)).or_insert(next);
        if index == next {
            self.pending.push((name, self.scope));
        }
        index
    }

    fn labelled(&self, name: &str, scope: u32) -> Option<&Labelled<'t>> {
        let mut scope = Some(scope);
        while let Some(at) = scope {
            let s = &self.scopes[at as usize];
            if let Some(found) = s.labels.get(name) {
                return Some(found);
            }
            scope = s.parent;
        }
        None
    }

    fn resolve(&mut self) {
        let names = self.pending.iter().map(|&(name, scope)| match self.labelled(name, scope) {
            Some(Labelled::Code(index)) => NameRef::Label(*index),
            Some(Labelled::Branches(targets)) => {
                let index = |target: &&str| match self.labelled(target, scope) {
                    Some(Labelled::Code(index)) => Some(*index),
                    _ => None,
                };
                match targets.iter().map(index).collect() {
                    Some(targets) => NameRef::Targets(targets),
                    None => NameRef::Symbol(name.to_owned()),
                }
            }
            Some(Labelled::Calls(functions)) => NameRef::Functions(functions.clone()),
            Some(Labelled::Prototype(prototype)) => NameRef::Prototype(prototype.clone()),
            None => NameRef::Symbol(name.to_owned()),
        });
        self.body.names = names.collect();
    }

    fn refuse(&mut self, line: u32, what: &str) {
        self.body.refused.get_or_insert_with(|| (line, what.to_owned()));
    }
}

impl<'t> Parser<'_, 't> {
    /// Reads a body, the cursor being behind its opening brace.
    pub(super) fn body(&mut self, function: &Function) -> Parse<Body> {
        let mut builder = BodyBuilder::default();
        builder.open();
        builder.body.vars.extend(function.params.iter().chain(&function.returns).cloned());
        for (index, var) in builder.body.vars.iter().enumerate() {
            let entity = Entity::Variable(index as u32);
            builder.scopes[0].names.insert(var.name.clone(), entity);
        }
        loop {
            match self.peek() {
                Token::Mark(b'}') => {
                    self.at += 1;
                    if !builder.close() {
                        break;
                    }
                }
                Token::Mark(b'{') => {
                    self.at += 1;
                    builder.open();
                }
                Token::Mark(b';') => self.at += 1,
                Token::Mark(b'@') | Token::Name(_) => self.statement(&mut builder)?,
                Token::Dot(name) => self.declaration(name, &mut builder)?,
                _ => return self.unexpected("an instruction"),
            }
        }
        builder.resolve();
        Ok(builder.body)
    }

    fn declaration(&mut self, name: &'t str, builder: &mut BodyBuilder<'t>) -> Parse<()> {
        let line = self.line();
        match name {
            "reg" => {
                self.at += 1;
                self.registers(builder)
            }
            "loc" | "file" => {
                self.skip_line(line);
                Ok(())
            }
            "pragma" | "alias" => self.skip_statement(),
            "local" | "shared" | "param" | "global" | "const" => {
                let space = match name {
                    "local" => VarSpace::Local,
                    "shared" => VarSpace::Shared,
                    "param" => VarSpace::Param,
                    // Even inside a function, these are variables of the module.
                    _ => return self.module_variable(Linkage::default()),
                };
                for var in self.local_variables(space)? {
                    let entity = Entity::Variable(builder.body.vars.len() as u32);
                    builder.innermost().names.insert(var.name.clone(), entity);
                    builder.body.vars.push(var);
                }
                Ok(())
            }
            _ => self.error(format!("unknown directive .{name}")),
        }
    }

    fn registers(&mut self, builder: &mut BodyBuilder<'t>) -> Parse<()> {
        let line = self.line();
        let mut vector = false;
        let ty = loop {
            let Token::Dot(name) = self.peek() else { return self.unexpected("a type") };
            self.at += 1;
            if matches!(name, "v2" | "v4") {
                vector = true;
                continue;
            }
            match Type::named(name) {
                Some(ty) => break ty,
                None => {
                    builder.refuse(line, &format!("register of type .{name}"));
                    break Type::B32;
                }
            }
        };
        if vector {
            builder.refuse(line, "vector register");
        }
        loop {
            let name = self.expect_name()?;
            let first = builder.body.registers.len() as u32;
            let mut count = 1;
            if self.take_mark(b'<') {
                count = self.expect_u32()?;
                self.expect_mark(b'>')?;
                builder.innermost().families.insert(name, (count, first));
            } else {
                builder.innermost().names.insert(name.to_owned(), Entity::Register(first));
            }
            if builder.body.registers.len() + count as usize > REGISTER_LIMIT {
                return self.error("too many registers");
            }
            builder.body.registers.extend(std::iter::repeat_n(ty, count as usize));
            if !self.take_mark(b',') {
                break;
            }
        }
        self.expect_mark(b';')
    }

    /// A label or an instruction.
    fn statement(&mut self, builder: &mut BodyBuilder<'t>) -> Parse<()> {
        let line = self.line();
        if let (Token::Name(name), Token::Mark(b':')) = (self.peek(), self.placed(1).token) {
            self.at += 2;
            return self.label(name, builder);
        }
        let mut guard = None;
        if self.take_mark(b'@') {
            let negated = self.take_mark(b'!');
            let name = self.expect_name()?;
            let Some(Entity::Register(register)) = builder.lookup(name) else {
                return self.error(format!("{name} is no register"));
            };
            guard = Some((register, negated));
        }
        let name = self.expect_name()?;
        let mut opcode = Opcode { name: name.to_owned(), modifiers: Vec::new() };
        while let Token::Dot(modifier) = self.peek() {
            opcode.modifiers.push(modifier.to_owned());
            self.at += 1;
        }
        let opcode = self.intern_opcode(opcode);
        let mut operands = Vec::new();
        if !self.take_mark(b';') {
            loop {
                operands.push(self.operand(builder)?);
                if self.take_mark(b';') {
                    break;
                }
                self.expect_mark(b',')?;
            }
        }
        builder.body.instructions.push(Instruction { line, guard, opcode, operands });
        Ok(())
    }

    fn label(&mut self, name: &'t str, builder: &mut BodyBuilder<'t>) -> Parse<()> {
        let meaning = match self.peek() {
            Token::Dot("callprototype") => {
                self.at += 1;
                Labelled::Prototype(self.prototype()?)
            }
            Token::Dot("branchtargets") => {
                self.at += 1;
                Labelled::Branches(self.names()?)
            }
            Token::Dot("calltargets") => {
                self.at += 1;
                Labelled::Calls(self.names()?.into_iter().map(str::to_owned).collect())
            }
            _ => Labelled::Code(builder.body.instructions.len() as u32),
        };
        if builder.innermost().labels.insert(name, meaning).is_some() {
            return self.error(format!("label {name} twice"));
        }
        Ok(())
    }

    fn names(&mut self) -> Parse<Vec<&'t str>> {
        let mut names = vec![self.expect_name()?];
        while self.take_mark(b',') {
            names.push(self.expect_name()?);
        }
        self.expect_mark(b';')?;
        Ok(names)
    }

    /// `(.param .b32 _) _ (.param .b64 _, .param .b32 _) .noreturn;`
    fn prototype(&mut self) -> Parse<Prototype> {
        let mut prototype = Prototype::default();
        if self.is_mark(b'(') {
            prototype.returns = self.parameters()?;
        }
        self.expect_name()?;
        if self.is_mark(b'(') {
            prototype.params = self.parameters()?;
        }
        self.skip_statement()?;
        Ok(prototype)
    }
}
