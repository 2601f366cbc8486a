//! A compiled chat template (minijinja), whose operators pass the checks of [`super::bounds`].
//!
//! minijinja bounds how many instructions run and how deep they nest, but not what one of them makes: `x ~ x`, thirty times, is
//! gigabytes. So an operator that makes, compares or prints more than a number becomes a filter of ours, or has one before or after it:
//!
//! ```text
//!   raw text                          EmitRaw        ►  LoadConst, Emit
//!   a ~ b, a * b, a == b, a in b ..   StringConcat … ►  concatenated, multiplied, equal, contained ..
//!   a < b < c                         CompareAnd…    ►  comparable, Swap, comparable, Swap, CompareAnd…
//!   a + b                             Add            ►  addends, UnpackList, Add, held
//!   calls, lists                      CallFunction … ►  CallFunction …, held
//!   whether a                         JumpIfFalse …  ►  timely, JumpIfFalse …
//!   a dictionary                      BuildMap       ►  dictionary, held
//!   a[b]                              GetItem        ►  key, GetItem
//!   a[b:c:d]                          Slice          ►  sliced
//!   a namespace's member              SetAttr        ►  Swap, stored, Swap, SetAttr
//!   each iteration of a loop          Iterate        ►  Iterate, LoadConst "", Emit
//!   f(*a, **b)                        UnpackLists …  ►  BuildTuple, unpacked, UnpackList, UnpackLists …
//!   a macro, what it sees outside     BuildMacro …   ►  BuildMacro …, kept
//!   a list that may be appended to    BuildList …    ►  BuildList …, held, settled
//! ```
//!
//! Filters and tests check and charge themselves ([`super::allowed`]). Before that, [`super::scopes`] adds what minijinja leaves out.

use std::collections::BTreeSet;

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::allowed::{
    ADDENDS, CHANGED, COMPARABLE, CONCATENATED, CONTAINED, CYCLE, DICTIONARY, EQUAL, HELD, KEPT,
    KEY, LESS, MORE, MULTIPLIED, NOT_LESS, NOT_MORE, OPERATORS, SETTLED, SLICED, STORED, TIMELY,
    UNEQUAL, UNPACKED,
};
use super::{bounds, constants, jumps, list, scopes};

/// The maximum of operators of a tag, and of `elif` in a template, which may be within as many blocks as minijinja allows. Published
/// templates have 75 and 22 at most.
pub(super) const NESTED_MAX: usize = 200;
/// The index that minijinja uses for a filter that is not in its lookup cache, which has places for 50.
const UNCACHED: u8 = u8::MAX;
/// The first place in it that is for [`OPERATORS`]. No published template has as many filters.
const FIRST_PLACE: u8 = 50 - OPERATORS.len() as u8;

/// Compiles a template under a name that error messages contain.
///
/// # Errors
/// The syntax errors of minijinja; what chat templates do not have, such as blocks; constants that would be huge.
pub(super) fn compile<'a>(
    name: &'a str,
    source: &'a str,
    syntax: &SyntaxConfig,
) -> Result<Instructions<'a>, Error> {
    // Before parsing, which recurses.
    let mut nesting = Nesting::default();
    for token in tokenize(source, false, syntax.clone()) {
        nesting.add(&token?.0)?;
    }
    let tree = parse(source, name, syntax.clone())?;
    // Before compiling, which multiplies constants itself, outside of any budget.
    constants::check(&tree)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    // Their instructions are compiled apart and would not pass `bounded`.
    if !blocks.is_empty() {
        return Err(refused("blocks"));
    }
    bounded(instructions, list::changes(source))
}

fn refused(what: &str) -> Error {
    let message = format!("chat templates cannot contain {what}");
    Error::new(ErrorKind::SyntaxError, message)
}

/// Macros in macros: minijinja looks for the variables of each again in those around it.
const MACROS_NESTED_MAX: usize = 4;
/// Bytes of a name, which are copied where a namespace's member is set.
const NAME_BYTES_MAX: usize = 256;
/// Names that are set: each loop that is open may have all of them.
const NAMES_MAX: usize = 6000;

/// What nests the tree of a template, and so everything that walks it: minijinja's parser bounds brackets and blocks, but no chains of
/// operators, and a template of some thousand minus signs ended the process.
#[derive(Default)]
struct Nesting {
    /// Operators of this tag.
    operators: usize,
    /// Branches of all conditions.
    branches: usize,
    /// Macros and call blocks that are open.
    macros: usize,
    /// Arguments of the macro that this tag begins, or makes.
    arguments: Option<usize>,
    /// Whether the next word says what kind of block it is.
    block_begins: bool,
}

impl Nesting {
    fn add(&mut self, token: &Token<'_>) -> Result<(), Error> {
        let block_begins =
            std::mem::replace(&mut self.block_begins, matches!(token, Token::BlockStart));
        self.add_macro(token, block_begins)?;
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

    /// Macros and names. `block_begins`: this is the first token of a block.
    fn add_macro(&mut self, token: &Token<'_>, block_begins: bool) -> Result<(), Error> {
        match token {
            Token::BlockStart | Token::BlockEnd => self.arguments = None,
            Token::Ident("macro" | "call") if block_begins => {
                self.macros += 1;
                self.arguments = Some(0);
            }
            Token::Ident("endmacro" | "endcall") if block_begins => {
                self.macros = self.macros.saturating_sub(1);
            }
            Token::Comma => self.arguments = self.arguments.map(|arguments| arguments + 1),
            _ => {}
        }
        let refused = match token {
            Token::Ident(name) if name.len() > NAME_BYTES_MAX => "a name is too long",
            _ if self.macros > MACROS_NESTED_MAX => "macros are nested too deeply",
            _ if self.arguments > Some(bounds::MACRO_ARGUMENTS_MAX) => {
                "a macro has too many arguments"
            }
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::SyntaxError, refused))
    }
}

/// Puts the instructions behind the bounds. `growing`: lists can be changed.
fn bounded(mut from: Instructions<'_>, growing: bool) -> Result<Instructions<'_>, Error> {
    let mut generated = Vec::new();
    while let Some(instruction) = from.get_mut(generated.len() as u32) {
        generated.push(std::mem::replace(instruction, Instruction::Return));
    }
    let mut names = BTreeSet::new();
    let rewritten = jumps::replaced(scopes::mended(generated)?, |_, instruction, to| {
        if let Instruction::StoreLocal(name) = instruction {
            names.insert(name);
        }
        if names.len() > NAMES_MAX {
            return Err(refused("so many names that are set"));
        }
        rewrite(instruction, growing, to)
    })?;
    let mut to = Instructions::new(from.name(), from.source());
    for instruction in rewritten {
        to.add(instruction);
    }
    Ok(to)
}

/// Appends what takes the place of an instruction. Every one is named, so that those which minijinja comes to have are thought about.
fn rewrite<'a>(
    instruction: Instruction<'a>,
    growing: bool,
    to: &mut Vec<Instruction<'a>>,
) -> Result<(), Error> {
    use Instruction as I;
    to.extend(checks(&instruction));
    // What follows an instruction that makes a value, and one whose result is charged already but may be a list.
    let (made, list): (&[_], &[_]) = if growing {
        (&[HELD, SETTLED], &[SETTLED])
    } else {
        (&[HELD], &[])
    };
    let (replaced, after) = match instruction {
        I::EmitRaw(text) => {
            to.push(I::LoadConst(Value::from(text)));
            (I::Emit, NOTHING)
        }
        I::LoadConst(value) => {
            // A product of constants may be a view of a list.
            let is_view = value.kind() == ValueKind::Iterable;
            let value = if is_view { collected(&value)? } else { value };
            let is_list = value.kind() == ValueKind::Seq && !value.is_tuple();
            let after = if is_list { list } else { NOTHING };
            (I::LoadConst(value), after)
        }
        I::StringConcat => (filter(CONCATENATED, 2), NOTHING),
        I::In | I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte => {
            (filter(comparison(&instruction), 2), NOTHING)
        }
        I::Mul => (filter(MULTIPLIED, 2), list),
        I::Slice => (filter(SLICED, 4), list),
        I::Iterate(_) => {
            // Prints nothing, but passes the formatter, which checks budget and time.
            to.extend([instruction, I::LoadConst(Value::from(""))]);
            (I::Emit, NOTHING)
        }
        I::Enclose(_) => {
            to.extend([instruction, I::LoadConst(Value::from("")), filter(KEPT, 1)]);
            (I::DiscardTop, NOTHING)
        }
        I::BuildMacro(..) => (instruction, &[KEPT][..]),
        I::BuildMap(members) => {
            let values = u16::try_from(members.saturating_mul(2));
            let values = values.map_err(|_| refused("dictionaries of so many members"))?;
            (filter(DICTIONARY, values), made)
        }
        I::CallMethod("changed", args) => (I::ApplyFilter(CHANGED, args, place(CHANGED)), made),
        I::CallMethod("cycle", args) => (I::ApplyFilter(CYCLE, args, place(CYCLE)), made),
        I::Add | I::BuildList(_) | I::BuildTuple(_) => (instruction, made),
        I::CallFunction(..) | I::CallMethod(..) | I::CallObject(_) => (instruction, made),
        I::ApplyFilter(name, args, at) => {
            let at = if at < FIRST_PLACE { at } else { UNCACHED };
            (I::ApplyFilter(name, args, at), list)
        }
        other => (allowed(other)?, NOTHING),
    };
    to.push(replaced);
    to.extend(after.iter().map(|name| filter(name, 1)));
    Ok(())
}

const NOTHING: &[&str] = &[];

fn filter(name: &'static str, args: u16) -> Instruction<'static> {
    Instruction::ApplyFilter(name, Some(args), place(name))
}

/// The place of one of our filters in minijinja's lookup cache; the first ones are for those of the template.
fn place(name: &str) -> u8 {
    let at = OPERATORS.iter().position(|operator| *operator == name);
    at.map_or(UNCACHED, |at| FIRST_PLACE + at as u8)
}

/// Returns what goes before an instruction.
fn checks(instruction: &Instruction<'_>) -> Vec<Instruction<'static>> {
    use Instruction as I;
    match instruction {
        I::GetItem => vec![filter(KEY, 1)],
        I::GetAttr(bounds::ARGUMENTS) => {
            let name = I::LoadConst(Value::from(bounds::ARGUMENTS));
            vec![name, filter(KEY, 1), I::DiscardTop]
        }
        // Whether a namespace is empty takes a list of its members.
        I::Not | I::JumpIfFalse(_) | I::JumpIfFalseOrPop(_) | I::JumpIfTrueOrPop(_) => {
            vec![filter(TIMELY, 1)]
        }
        I::Add => vec![filter(ADDENDS, 2), I::UnpackList(2)],
        I::SetAttr(_) => vec![I::Swap, filter(STORED, 1), I::Swap],
        I::CompareAndPreserve(_) => {
            vec![
                filter(COMPARABLE, 1),
                I::Swap,
                filter(COMPARABLE, 1),
                I::Swap,
            ]
        }
        I::UnpackLists(count) | I::MergeKwargs(count) => {
            // The filter returns them backwards, because that is how they are put on the stack.
            let tuple = I::BuildTuple(Some(*count));
            vec![tuple, filter(UNPACKED, 1), I::UnpackList(*count)]
        }
        _ => Vec::new(),
    }
}

/// The filter that takes the place of a comparison.
fn comparison(instruction: &Instruction<'_>) -> &'static str {
    match instruction {
        Instruction::In => CONTAINED,
        Instruction::Ne => UNEQUAL,
        Instruction::Lt => LESS,
        Instruction::Lte => NOT_MORE,
        Instruction::Gt => MORE,
        Instruction::Gte => NOT_LESS,
        _ => EQUAL,
    }
}

fn collected(list: &Value) -> Result<Value, Error> {
    let items: Result<Vec<Value>, Error> = list.try_iter()?.checked().collect();
    items.map(Value::from)
}

/// Returns an instruction that costs no more than a number or a reference, or a test, which checks itself.
fn allowed(instruction: Instruction<'_>) -> Result<Instruction<'_>, Error> {
    use Instruction as I;
    Ok(match instruction {
        I::StoreLocal(_) | I::Lookup(_) | I::GetAttr(_) | I::UnpackList(_) => instruction,
        I::Sub | I::Div | I::IntDiv | I::Rem | I::Pow | I::Neg | I::Not => instruction,
        I::PerformTest(..) | I::IsUndefined | I::BuildKwargs(_) => instruction,
        I::Emit | I::BeginCapture(_) | I::EndCapture => instruction,
        I::PushLoop(_) | I::PushWith | I::PopFrame | I::PopLoopFrame => instruction,
        I::PushDidNotIterate | I::FastRecurse | I::Jump(_) | I::JumpIfFalse(_) => instruction,
        I::JumpIfFalseOrPop(_) | I::JumpIfTrueOrPop(_) => instruction,
        I::DupTop | I::DiscardTop | I::Swap => instruction,
        // Behind a check.
        I::GetItem | I::SetAttr(_) | I::CompareAndPreserve(_) => instruction,
        I::UnpackLists(_) | I::MergeKwargs(_) => instruction,
        I::GetClosure | I::Return => instruction,
        I::PushAutoEscape | I::PopAutoEscape => return Err(refused("`autoescape`")),
        I::FastSuper | I::CallBlock(_) => return Err(refused("blocks")),
        I::LoadBlocks | I::Include(_) | I::ExportLocals => {
            return Err(refused("other templates"));
        }
        // All others are rewritten.
        I::EmitRaw(_) | I::LoadConst(_) | I::StringConcat | I::In | I::Mul => instruction,
        I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte | I::Slice => instruction,
        I::Iterate(_) | I::Enclose(_) => instruction,
        I::Add | I::BuildList(_) | I::BuildTuple(_) | I::BuildMap(_) | I::BuildMacro(..) => {
            instruction
        }
        I::CallFunction(..) | I::CallMethod(..) | I::CallObject(_) => instruction,
        I::ApplyFilter(..) => instruction,
    })
}
