//! Reads GBNF: rules of literals, character classes, references, groups, choices and repetitions.

use std::collections::HashMap;

use super::super::grammar::{GrammarError, RULES_MAX};

/// Parentheses within each other. The compiler of Lark has a limit of its own, and the recursion here needs one.
const NESTING_MAX: usize = 12;

/// Repetitions of one part, as in `"a"{2}*`.
const REPEATED_MAX: usize = 4;

/// Repetitions that can be asked for; llama.cpp has the same limit.
const REPETITIONS_MAX: u32 = 2000;

/// A rule.
#[derive(Debug, PartialEq)]
pub(super) struct Rule {
    pub(super) name: String,
    pub(super) body: Expression,
}

/// What stands on the right of a rule.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expression {
    Literal(String),
    /// Any character.
    Any,
    Class {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// The rule with this index.
    Reference(usize),
    Sequence(Vec<Self>),
    Choice(Vec<Self>),
    Repeat {
        part: Box<Self>,
        min: u32,
        max: Option<u32>,
    },
}

impl Expression {
    /// Appends the rules that it refers to.
    pub(super) fn references(&self, found: &mut Vec<usize>) {
        match self {
            Self::Reference(rule) => found.push(*rule),
            Self::Sequence(parts) | Self::Choice(parts) => {
                parts.iter().for_each(|part| part.references(found));
            }
            Self::Repeat { part, .. } => part.references(found),
            Self::Literal(_) | Self::Any | Self::Class { .. } => {}
        }
    }
}

/// Reads a grammar. Every rule that is used is defined.
pub(super) fn parse(text: &str) -> Result<Vec<Rule>, GrammarError> {
    let mut parser = Parser {
        text,
        at: 0,
        names: HashMap::new(),
        uses: Vec::new(),
    };
    let mut bodies: Vec<Option<Expression>> = Vec::new();
    parser.skip_space(true);
    while parser.peek().is_some() {
        let rule = parser.name()?;
        parser.skip_space(false);
        if !parser.take_text("::=") {
            return Err(parser.error("`::=` is missing"));
        }
        parser.skip_space(true);
        let body = parser.choice(0)?;
        if parser
            .peek()
            .is_some_and(|next| !matches!(next, '\n' | '\r'))
        {
            return Err(parser.error("the end of the rule is expected here"));
        }
        bodies.resize_with(parser.uses.len(), || None);
        // The last definition is the one that counts, as in llama.cpp.
        bodies[rule] = Some(body);
        parser.skip_space(true);
    }
    let names = std::mem::take(&mut parser.names);
    let mut rules = Vec::with_capacity(bodies.len());
    let mut sorted: Vec<(usize, String)> = names.into_iter().map(|(name, at)| (at, name)).collect();
    sorted.sort_unstable();
    for ((index, name), body) in sorted.into_iter().zip(bodies) {
        let Some(body) = body else {
            parser.at = parser.uses[index];
            return Err(parser.error(&format!("the rule `{name}` is not defined")));
        };
        rules.push(Rule { name, body });
    }
    Ok(rules)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// The index of each name.
    names: HashMap<String, usize>,
    /// Where each index occurs first.
    uses: Vec<usize>,
}

impl Parser<'_> {
    fn error(&self, reason: &str) -> GrammarError {
        let before = &self.text[..self.at.min(self.text.len())];
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
        GrammarError::new(format!("at line {line}, column {column}: {reason}"))
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn take_text(&mut self, text: &str) -> bool {
        let found = self.text[self.at..].starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    /// Skips spaces and comments, and line ends where a rule does not end with its line.
    fn skip_space(&mut self, lines: bool) {
        while let Some(next) = self.peek() {
            match next {
                ' ' | '\t' => {}
                '\n' | '\r' if lines => {}
                '#' => {
                    let rest = &self.text[self.at..];
                    self.at += rest.find(['\n', '\r']).unwrap_or(rest.len());
                    continue;
                }
                _ => return,
            }
            self.at += next.len_utf8();
        }
    }

    /// Reads the name of a rule and returns its index.
    fn name(&mut self) -> Result<usize, GrammarError> {
        let rest = &self.text[self.at..];
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        let len = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        if len == 0 {
            return Err(self.error("the name of a rule is expected here"));
        }
        let name = &rest[..len];
        let index = match self.names.get(name) {
            Some(&index) => index,
            None if self.uses.len() == RULES_MAX => {
                return Err(self.error(&format!("a grammar may have {RULES_MAX} rules")));
            }
            None => {
                self.names.insert(name.to_owned(), self.uses.len());
                self.uses.push(self.at);
                self.uses.len() - 1
            }
        };
        self.at += len;
        Ok(index)
    }

    fn choice(&mut self, depth: usize) -> Result<Expression, GrammarError> {
        let mut options = vec![self.sequence(depth)?];
        while self.take_text("|") {
            self.skip_space(true);
            options.push(self.sequence(depth)?);
        }
        Ok(match options.len() {
            1 => options.swap_remove(0),
            _ => Expression::Choice(options),
        })
    }

    fn sequence(&mut self, depth: usize) -> Result<Expression, GrammarError> {
        let mut parts = Vec::new();
        while let Some(part) = self.part(depth)? {
            // Within parentheses a line end means nothing.
            self.skip_space(depth > 0);
            let part = self.repeated(part, depth)?;
            parts.push(part);
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0),
            _ => Expression::Sequence(parts),
        })
    }

    fn part(&mut self, depth: usize) -> Result<Option<Expression>, GrammarError> {
        let part = match self.peek() {
            Some('"') => self.literal()?,
            Some('[') => self.class()?,
            Some('.') => {
                self.at += 1;
                Expression::Any
            }
            Some('(') => {
                if depth == NESTING_MAX {
                    return Err(self.error("too many parentheses within each other"));
                }
                self.at += 1;
                self.skip_space(true);
                let inner = self.choice(depth + 1)?;
                if !self.take_text(")") {
                    return Err(self.error("`)` is missing"));
                }
                inner
            }
            Some(c) if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') => {
                Expression::Reference(self.name()?)
            }
            _ => return Ok(None),
        };
        Ok(Some(part))
    }

    /// Reads the repetitions after a part: `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}`.
    fn repeated(&mut self, part: Expression, depth: usize) -> Result<Expression, GrammarError> {
        let mut part = part;
        for _level in 0..REPEATED_MAX {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.range()?,
                _ => return Ok(part),
            };
            // `range` stops before its closing brace.
            self.at += 1;
            self.skip_space(depth > 0);
            part = Expression::Repeat {
                part: Box::new(part),
                min,
                max,
            };
        }
        Err(self.error("too many repetitions of repetitions"))
    }

    fn range(&mut self) -> Result<(u32, Option<u32>), GrammarError> {
        self.at += 1;
        self.skip_space(false);
        let min = self.number()?;
        self.skip_space(false);
        let max = if self.take_text(",") {
            self.skip_space(false);
            if self.peek() == Some('}') {
                None
            } else {
                Some(self.number()?)
            }
        } else {
            Some(min)
        };
        self.skip_space(false);
        if self.peek() != Some('}') {
            return Err(self.error("`}` is missing"));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.error("the range ends before it begins"));
        }
        Ok((min, max))
    }

    fn number(&mut self) -> Result<u32, GrammarError> {
        let rest = &self.text[self.at..];
        let len = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        match rest[..len].parse() {
            Ok(number) if number <= REPETITIONS_MAX => {
                self.at += len;
                Ok(number)
            }
            _ => Err(self.error(&format!(
                "a number up to {REPETITIONS_MAX} is expected here"
            ))),
        }
    }

    fn literal(&mut self) -> Result<Expression, GrammarError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.error("the closing `\"` is missing")),
                Some('"') => break,
                Some(_) => text.push(self.character()?),
            }
        }
        self.at += 1;
        Ok(Expression::Literal(text))
    }

    fn class(&mut self) -> Result<Expression, GrammarError> {
        self.at += 1;
        let negated = self.take_text("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.error("the closing `]` is missing")),
                Some(']') => break,
                Some(_) => {
                    let first = self.character()?;
                    let rest = &self.text[self.at..];
                    // A hyphen before the end of the class is itself.
                    let last = if rest.starts_with('-') && !rest.starts_with("-]") {
                        self.at += 1;
                        self.character()?
                    } else {
                        first
                    };
                    if last < first {
                        return Err(self.error("the range ends before it begins"));
                    }
                    ranges.push((first, last));
                }
            }
        }
        self.at += 1;
        Ok(Expression::Class { negated, ranges })
    }

    /// Reads a character of a literal or a class, which may be escaped.
    fn character(&mut self) -> Result<char, GrammarError> {
        let Some(first) = self.next() else {
            return Err(self.error("a character is expected here"));
        };
        if first != '\\' {
            return Ok(first);
        }
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(same @ ('\\' | '"' | '[' | ']' | '-' | '^')) => return Ok(same),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.error("unknown escape")),
        };
        let number = self.text.get(self.at..self.at + digits);
        let number = number.and_then(|hex| u32::from_str_radix(hex, 16).ok());
        let character = number.and_then(char::from_u32);
        let character = character.ok_or_else(|| {
            self.error(&format!(
                "{digits} hexadecimal digits of a character are expected here"
            ))
        })?;
        self.at += digits;
        Ok(character)
    }
}
