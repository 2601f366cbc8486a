//! Translates the GBNF of llama.cpp into Lark.
//!
//! The two differ in more than spelling. Lark has a lexer in front of its parser, and the lexer takes the longest match:
//! with the terminals `/[a-z]+/` and `"z"`, the first one always takes the `z`. GBNF has no lexer. So a translation is
//! right only if no terminal can continue where another one ends, and there are two such translations:
//!
//! - A grammar without recursion is a regular language. It becomes one terminal, which is also the fastest form.
//! - In any other grammar each terminal is a single character. Characters are prefix-free in UTF-8.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::grammar::{GrammarError, quote};

mod parse;

use self::parse::{Expression, Rule, parse};

/// Translates a grammar.
pub(super) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let rules = parse(text)?;
    let root = rules.iter().position(|rule| rule.name == "root");
    let root = root.ok_or_else(|| GrammarError::new("there is no rule `root`".to_owned()))?;
    let style = if is_recursive(&rules, root) {
        Style::Characters
    } else {
        Style::OneTerminal
    };
    let mut lark = String::with_capacity(text.len() * 2);
    lark.push_str("start: ");
    style.reference(root, &mut lark);
    for (index, rule) in rules.iter().enumerate() {
        lark.push('\n');
        style.reference(index, &mut lark);
        lark.push_str(": ");
        style.write(&rule.body, &mut lark);
    }
    Ok(lark)
}

/// Whether a rule that `root` uses can contain itself.
fn is_recursive(rules: &[Rule], root: usize) -> bool {
    // Depth first, with its own stack because a chain of rules may be as long as the text.
    let mut done: HashMap<usize, bool> = HashMap::new();
    let mut stack = vec![(root, false)];
    while let Some((rule, leaves)) = stack.pop() {
        if leaves {
            done.insert(rule, true);
            continue;
        }
        match done.get(&rule) {
            Some(true) => continue,
            // It was entered and not left: this reference is within itself.
            Some(false) => return true,
            None => {}
        }
        done.insert(rule, false);
        stack.push((rule, true));
        let mut uses = Vec::new();
        rules[rule].body.references(&mut uses);
        uses.sort_unstable();
        uses.dedup();
        for used in uses {
            match done.get(&used) {
                Some(true) => {}
                Some(false) => return true,
                None => stack.push((used, false)),
            }
        }
    }
    false
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    OneTerminal,
    Characters,
}

impl Style {
    fn reference(self, rule: usize, lark: &mut String) {
        // Upper case makes it a terminal.
        let letter = match self {
            Self::OneTerminal => 'R',
            Self::Characters => 'r',
        };
        let _written = write!(lark, "{letter}{rule}");
    }

    fn write(self, expression: &Expression, lark: &mut String) {
        match expression {
            Expression::Literal(text) => self.write_literal(text, lark),
            Expression::Any => lark.push_str("/(?s:.)/"),
            Expression::Class { negated, ranges } => write_class(*negated, ranges, lark),
            Expression::Reference(rule) => self.reference(*rule, lark),
            Expression::Sequence(parts) if parts.is_empty() => lark.push_str("\"\""),
            Expression::Sequence(parts) => self.write_joined(parts, " ", lark),
            Expression::Choice(options) => {
                lark.push('(');
                self.write_joined(options, " | ", lark);
                lark.push(')');
            }
            Expression::Repeat { part, min, max } => {
                // Lark has no such range.
                if *max == Some(0) {
                    return lark.push_str("\"\"");
                }
                lark.push('(');
                self.write(part, lark);
                lark.push(')');
                let _written = match (min, max) {
                    (0, None) => write!(lark, "*"),
                    (1, None) => write!(lark, "+"),
                    (0, Some(1)) => write!(lark, "?"),
                    (min, None) => write!(lark, "{{{min},}}"),
                    (min, Some(max)) => write!(lark, "{{{min},{max}}}"),
                };
            }
        }
    }

    fn write_joined(self, parts: &[Expression], between: &str, lark: &mut String) {
        for (index, part) in parts.iter().enumerate() {
            if index > 0 {
                lark.push_str(between);
            }
            self.write(part, lark);
        }
    }

    fn write_literal(self, text: &str, lark: &mut String) {
        if self == Self::OneTerminal || text.chars().nth(1).is_none() {
            return quote(text, lark);
        }
        // The parentheses keep it one operand of a `*` that may follow.
        lark.push('(');
        for (index, character) in text.char_indices() {
            if index > 0 {
                lark.push(' ');
            }
            quote(character.encode_utf8(&mut [0; 4]), lark);
        }
        lark.push(')');
    }
}

fn write_class(negated: bool, ranges: &[(char, char)], lark: &mut String) {
    if ranges.is_empty() {
        // A regex has no empty class: `[]` matches nothing and `[^]` everything.
        return lark.push_str(if negated {
            "/(?s:.)/"
        } else {
            "/[^\\u{0}-\\u{10ffff}]/"
        });
    }
    lark.push_str(if negated { "/[^" } else { "/[" });
    for (first, last) in ranges {
        // By number, because both the regex and Lark give a meaning to many characters.
        let _written = write!(
            lark,
            "\\u{{{:x}}}-\\u{{{:x}}}",
            u32::from(*first),
            u32::from(*last)
        );
    }
    lark.push_str("]/");
}
