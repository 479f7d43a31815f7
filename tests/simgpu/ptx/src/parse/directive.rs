//! The statements at a module's top level.

use super::{Parse, Parser};
use crate::ast::{Function, Var};
use crate::lex::Token;

/// The part of a symbol in linking.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Linkage {
    pub(super) external: bool,
    pub(super) visible: bool,
}

impl<'t> Parser<'_, 't> {
    pub(super) fn module(&mut self) -> Parse<()> {
        loop {
            let line = self.line();
            let Token::Dot(name) = self.peek() else {
                return match self.peek() {
                    Token::End => self.finish(),
                    Token::Mark(b';') => {
                        self.at += 1;
                        continue;
                    }
                    _ => self.unexpected("a directive"),
                };
            };
            match name {
                "version" => {
                    self.at += 1;
                    self.parsed.version = match self.next() {
                        Token::F64(bits) => format!("{:.1}", f64::from_bits(bits)),
                        Token::Int(value) => value.to_string(),
                        _ => return self.unexpected("a version"),
                    };
                }
                "target" => {
                    self.at += 1;
                    self.parsed.target = self.expect_name()?.to_owned();
                    while self.take_mark(b',') {
                        self.expect_name()?;
                    }
                }
                "address_size" => {
                    self.at += 1;
                    if self.expect_int()? != 64 {
                        return self.error("only 64-bit addresses are supported");
                    }
                }
                "file" | "loc" => self.skip_line(line),
                "pragma" | "alias" => self.skip_statement()?,
                "section" => self.section()?,
                _ => self.symbol()?,
            }
        }
    }

    fn finish(&mut self) -> Parse<()> {
        if self.parsed.version.is_empty() {
            return self.error("no .version: not PTX");
        }
        Ok(())
    }

    /// Debug information: `.section name { ... }`.
    fn section(&mut self) -> Parse<()> {
        while !self.take_mark(b'{') {
            if self.next() == Token::End {
                return self.unexpected("{");
            }
        }
        let mut depth = 1u32;
        while depth > 0 {
            match self.next() {
                Token::Mark(b'{') => depth += 1,
                Token::Mark(b'}') => depth -= 1,
                Token::End => return self.unexpected("}"),
                _ => {}
            }
        }
        Ok(())
    }

    /// A function or a variable, with its linking directives.
    fn symbol(&mut self) -> Parse<()> {
        let mut linkage = Linkage::default();
        loop {
            match self.peek() {
                Token::Dot("extern") => (linkage.external, linkage.visible) = (true, true),
                Token::Dot("visible" | "weak" | "common") => linkage.visible = true,
                _ => break,
            }
            self.at += 1;
        }
        match self.peek() {
            Token::Dot("entry") => {
                self.at += 1;
                self.function(true)
            }
            Token::Dot("func") => {
                self.at += 1;
                self.function(false)
            }
            Token::Dot("global" | "const" | "shared") => self.module_variable(linkage),
            Token::Dot("tex") => self.skip_statement(),
            _ => self.unexpected("a function or variable"),
        }
    }

    fn function(&mut self, entry: bool) -> Parse<()> {
        let mut returns = Vec::new();
        self.attributes()?;
        if self.is_mark(b'(') {
            returns = self.parameters()?;
        }
        let name = self.expect_name()?.to_owned();
        let params = if self.is_mark(b'(') { self.parameters()? } else { Vec::new() };
        let mut function = Function {
            name,
            entry,
            params,
            returns,
            max_threads: None,
            required_threads: None,
            required_cluster: None,
            body: None,
        };
        self.performance_directives(&mut function)?;
        if !self.take_mark(b';') {
            self.expect_mark(b'{')?;
            function.body = Some(self.body(&function)?);
        }
        self.add_function(function);
        Ok(())
    }

    fn add_function(&mut self, function: Function) {
        let ast = &mut self.parsed.ast;
        if let Some(&known) = ast.function_index.get(&function.name) {
            if function.body.is_some() {
                ast.functions[known as usize] = function;
            }
        } else {
            ast.function_index.insert(function.name.clone(), ast.functions.len() as u32);
            ast.functions.push(function);
        }
    }

    /// `.attribute(...)`, with any content. Returns whether `.managed` is part of it.
    pub(super) fn attributes(&mut self) -> Parse<bool> {
        let mut managed = false;
        while self.take_dot("attribute") {
            self.expect_mark(b'(')?;
            while !self.take_mark(b')') {
                match self.next() {
                    Token::End => return self.unexpected(")"),
                    Token::Dot("managed") => managed = true,
                    _ => {}
                }
            }
        }
        Ok(managed)
    }

    fn performance_directives(&mut self, function: &mut Function) -> Parse<()> {
        while let Token::Dot(name) = self.peek() {
            self.at += 1;
            match name {
                "maxntid" => function.max_threads = Some(self.dimensions()?),
                "reqntid" => function.required_threads = Some(self.dimensions()?),
                "reqnctapercluster" => function.required_cluster = Some(self.dimensions()?),
                "pragma" => {
                    while matches!(self.peek(), Token::Text(_) | Token::Mark(b',')) {
                        self.at += 1;
                    }
                    self.take_mark(b';');
                }
                "attribute" => {
                    self.at -= 1;
                    self.attributes()?;
                }
                // `.noreturn`, `.minnctapersm 2` and similar directives do not affect results.
                _ => {
                    while matches!(self.peek(), Token::Int(_) | Token::Mark(b',')) {
                        self.at += 1;
                    }
                }
            }
        }
        Ok(())
    }

    /// One to three numbers.
    fn dimensions(&mut self) -> Parse<[u32; 3]> {
        let mut sizes = [1; 3];
        sizes[0] = self.expect_u32()?;
        for size in &mut sizes[1..] {
            if !self.take_mark(b',') {
                break;
            }
            *size = self.expect_u32()?;
        }
        Ok(sizes)
    }

    /// A list of parameters in parentheses.
    pub(super) fn parameters(&mut self) -> Parse<Vec<Var>> {
        self.expect_mark(b'(')?;
        let mut params = Vec::new();
        if self.take_mark(b')') {
            return Ok(params);
        }
        loop {
            params.push(self.parameter()?);
            if self.take_mark(b')') {
                return Ok(params);
            }
            self.expect_mark(b',')?;
        }
    }
}
