//! A compiled chat template (minijinja), instrumented so that everything that grows is charged to the budget.
//!
//! minijinja bounds how many instructions run and how deep they nest, but not the size of what one of them creates:
//! `x ~ x`, thirty times, is gigabytes. Therefore every instruction that creates or prints a value passes a filter or
//! the formatter of [`super::bounds`]:
//!
//! ```text
//!   raw text                          EmitRaw      ►  LoadConst, Emit
//!   a ~ b, a + b, calls, lists        Add …        ►  Add …, held
//!   a namespace's member              SetAttr      ►  Swap, stored, Swap, SetAttr
//!   a[b:c:d]                          Slice        ►  sliced
//!   each iteration of a loop          Iterate      ►  Iterate, LoadConst "", Emit
//!   a list that may be appended to    BuildList …  ►  BuildList …, held, growing
//! ```

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::bounds::{BYTES_HELD, GROWING, SETTLED, SLICED, STORED};
use super::list;

/// The maximum product of all constant factors in a template: constants are multiplied when it is compiled.
const FACTORS_MAX: u64 = 1_000_000;
/// The maximum of operators of a tag, and of `elif` in a template. Published templates have 75 and 22 at most.
const NESTED_MAX: usize = 500;
/// The index that minijinja uses for a filter that is not in its lookup cache.
const UNCACHED: u8 = u8::MAX;

/// Compiles a template under a name that error messages contain.
///
/// # Errors
/// The syntax errors of minijinja; blocks, which chat templates do not have; constants that would be huge.
pub(super) fn compile<'a>(
    name: &'a str,
    source: &'a str,
    syntax: &SyntaxConfig,
) -> Result<Instructions<'a>, Error> {
    // Before compiling, which multiplies constants itself, outside of any budget.
    check_constants(source, syntax)?;
    let tree = parse(source, name, syntax.clone())?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    // Their instructions are compiled apart and would not pass `bounded`.
    if !blocks.is_empty() {
        let message = "chat templates cannot contain blocks";
        return Err(Error::new(ErrorKind::SyntaxError, message));
    }
    Ok(bounded(instructions, list::changes(source)))
}

fn check_constants(source: &str, syntax: &SyntaxConfig) -> Result<(), Error> {
    let mut product = 1_u64;
    let mut before: Option<u64> = None;
    let mut multiplied = false;
    let mut nesting = Nesting::default();
    for token in tokenize(source, false, syntax.clone()) {
        let (token, _) = token?;
        nesting.add(&token)?;
        let number = match &token {
            Token::Int(number) => Some(*number),
            // No template needs such a factor, so it counts as the largest allowed.
            Token::Int128(_) => Some(FACTORS_MAX),
            // minijinja repeats a text that is multiplied by a whole float, too. `as` saturates.
            Token::Float(number) => Some(number.abs().ceil() as u64),
            _ => None,
        };
        if matches!(token, Token::Mul) {
            // Both neighbours of each `*`, over the whole source: an overestimate that no real template reaches.
            product = product.saturating_mul(before.unwrap_or(1).max(1));
        } else if multiplied {
            product = product.saturating_mul(number.unwrap_or(1).max(1));
        }
        multiplied = matches!(token, Token::Mul);
        before = number;
    }
    if product > FACTORS_MAX {
        let message = "it multiplies by constants that are too large";
        return Err(Error::new(ErrorKind::SyntaxError, message));
    }
    Ok(())
}

/// What nests the tree of a template, and so everything that walks it: minijinja's parser bounds brackets and blocks, but no chains of
/// operators, and a template of some thousand minus signs ended the process.
#[derive(Default)]
struct Nesting {
    /// Operators of this tag.
    operators: usize,
    /// Branches of all conditions.
    branches: usize,
}

impl Nesting {
    fn add(&mut self, token: &Token<'_>) -> Result<(), Error> {
        match token {
            Token::VariableStart | Token::BlockStart => self.operators = 0,
            Token::Ident("elif") => self.branches += 1,
            Token::Ident("and" | "or" | "not" | "is" | "in" | "if")
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::Plus
            | Token::Minus
            | Token::Mul
            | Token::Div
            | Token::FloorDiv
            | Token::Mod
            | Token::Pow
            | Token::Tilde
            | Token::Dot
            | Token::Pipe
            | Token::BracketOpen
            | Token::ParenOpen => self.operators += 1,
            _ => {}
        }
        if self.operators > NESTED_MAX || self.branches > NESTED_MAX {
            let message = "an expression, or a chain of elif, is too long";
            return Err(Error::new(ErrorKind::SyntaxError, message));
        }
        Ok(())
    }
}

/// `growing`: lists can be changed.
fn bounded(mut from: Instructions<'_>, growing: bool) -> Instructions<'_> {
    let mut to = Instructions::new(from.name(), from.source());
    // The new position of each instruction, for jump targets.
    let (mut positions, mut end) = (Vec::new(), 0);
    // A first pass, because jumps may go forwards to positions that are not known yet.
    while let Some(instruction) = from.get(positions.len() as u32) {
        positions.push(end);
        end += 1
            + added(instruction)
            + u32::from(growing && (is_list(instruction) || is_view(instruction)));
    }
    let position = |target: u32| positions.get(target as usize).copied().unwrap_or(end);
    for index in 0..positions.len() as u32 {
        let Some(instruction) = from.get_mut(index) else {
            break;
        };
        let filter = |name| Instruction::ApplyFilter(name, Some(1), UNCACHED);
        let after = added(instruction);
        let grows = growing && is_list(instruction);
        let settles = growing && is_view(instruction);
        match std::mem::replace(instruction, Instruction::Return) {
            Instruction::EmitRaw(text) => {
                to.add(Instruction::LoadConst(Value::from(text)));
                to.add(Instruction::Emit);
            }
            Instruction::Iterate(target) => {
                to.add(Instruction::Iterate(position(target)));
                // Prints nothing, but passes the formatter, which checks budget and time.
                to.add(Instruction::LoadConst(Value::from("")));
                to.add(Instruction::Emit);
            }
            Instruction::SetAttr(name) => {
                to.add(Instruction::Swap);
                to.add(filter(STORED));
                to.add(Instruction::Swap);
                to.add(Instruction::SetAttr(name));
            }
            Instruction::Slice => {
                to.add(Instruction::ApplyFilter(SLICED, Some(4), UNCACHED));
                if settles {
                    to.add(filter(SETTLED));
                }
            }
            Instruction::Jump(target) => {
                to.add(Instruction::Jump(position(target)));
            }
            Instruction::JumpIfFalse(target) => {
                to.add(Instruction::JumpIfFalse(position(target)));
            }
            Instruction::JumpIfFalseOrPop(target) => {
                to.add(Instruction::JumpIfFalseOrPop(position(target)));
            }
            Instruction::JumpIfTrueOrPop(target) => {
                to.add(Instruction::JumpIfTrueOrPop(position(target)));
            }
            Instruction::BuildMacro(name, target, flags) => {
                to.add(Instruction::BuildMacro(name, position(target), flags));
            }
            other => {
                to.add(other);
                if after > 0 {
                    to.add(filter(BYTES_HELD));
                }
                if grows {
                    to.add(filter(GROWING));
                }
                if settles {
                    to.add(filter(SETTLED));
                }
            }
        }
    }
    to
}

/// Whether it creates a list that is written in the template.
fn is_list(instruction: &Instruction<'_>) -> bool {
    match instruction {
        Instruction::LoadConst(value) => value.kind() == ValueKind::Seq && !value.is_tuple(),
        Instruction::BuildList(count) => count.is_some(),
        _ => false,
    }
}

/// Whether its result may be a view of other lists.
fn is_view(instruction: &Instruction<'_>) -> bool {
    matches!(
        instruction,
        Instruction::Add
            | Instruction::Mul
            | Instruction::Slice
            | Instruction::ApplyFilter(..)
            | Instruction::CallMethod(..)
            | Instruction::CallFunction(..)
    )
}

/// Returns how many instructions are added to this one.
fn added(instruction: &Instruction<'_>) -> u32 {
    match instruction {
        Instruction::SetAttr(_) => 3,
        Instruction::Iterate(_) => 2,
        Instruction::EmitRaw(_)
        | Instruction::Add
        | Instruction::Mul
        | Instruction::StringConcat
        | Instruction::ApplyFilter(..)
        | Instruction::CallFunction(..)
        | Instruction::CallMethod(..)
        | Instruction::CallObject(..)
        | Instruction::BuildList(_)
        | Instruction::BuildTuple(_)
        | Instruction::BuildMap(_) => 1,
        _ => 0,
    }
}
