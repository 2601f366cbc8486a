//! Programs that outlive the source of their template, so that a template is compiled once and not for each rendering.
//!
//! minijinja's instructions borrow the names of variables, members and filters from the source. Here they borrow from a set of names that
//! stays until the process ends. Templates have most of their names in common, and what the set takes has a maximum: a template whose names
//! do not fit is compiled for each rendering.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use minijinja::machinery::{Instruction, Instructions};

/// The maximum of bytes of the names that one template adds. The longest templates in use have some 30,000, text and repeated names included.
const ADDED_BYTES_MAX: usize = 16 << 10;
/// The maximum of bytes of all names.
const BYTES_MAX: usize = 1 << 20;

static NAMES: Mutex<Names> = Mutex::new(Names {
    all: BTreeSet::new(),
    bytes: 0,
});

struct Names {
    all: BTreeSet<&'static str>,
    bytes: usize,
}

/// Returns the program with names that stay, if there is room for them.
pub(super) fn kept(program: &Instructions<'_>) -> Option<Instructions<'static>> {
    // No panic leaves a name half added.
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let all = || (0..).map_while(|at| program.get(at)).cloned();
    // Before any is added: none would be removed again.
    let mut added = BTreeSet::new();
    for instruction in all() {
        owned(instruction, |name| {
            added.insert(name);
            Some("")
        })?;
    }
    added.retain(|name| !names.all.contains(name));
    let bytes: usize = added.iter().map(|name| name.len()).sum();
    if bytes > ADDED_BYTES_MAX || bytes > BYTES_MAX - names.bytes {
        return None;
    }
    names.bytes += bytes;
    for name in added {
        names.all.insert(Box::leak(Box::<str>::from(name)));
    }
    let mut kept = Instructions::new(super::NAME, "");
    for instruction in all() {
        kept.add(owned(instruction, |name| names.all.get(name).copied())?);
    }
    Some(kept)
}

/// `None`: a name is not kept, or [`super::program`] leaves no such instruction in a program.
fn owned<'a>(
    instruction: Instruction<'a>,
    mut kept: impl FnMut(&'a str) -> Option<&'static str>,
) -> Option<Instruction<'static>> {
    use Instruction as I;
    Some(match instruction {
        I::StoreLocal(name) => I::StoreLocal(kept(name)?),
        I::Lookup(name) => I::Lookup(kept(name)?),
        I::GetAttr(name) => I::GetAttr(kept(name)?),
        I::SetAttr(name) => I::SetAttr(kept(name)?),
        I::Enclose(name) => I::Enclose(kept(name)?),
        I::ApplyFilter(name, args, at) => I::ApplyFilter(kept(name)?, args, at),
        I::PerformTest(name, args, at) => I::PerformTest(kept(name)?, args, at),
        I::CallFunction(name, args) => I::CallFunction(kept(name)?, args),
        I::CallMethod(name, args) => I::CallMethod(kept(name)?, args),
        I::BuildMacro(name, start, flags) => I::BuildMacro(kept(name)?, start, flags),
        I::LoadConst(value) => I::LoadConst(value),
        I::BuildKwargs(count) => I::BuildKwargs(count),
        I::MergeKwargs(count) => I::MergeKwargs(count),
        I::BuildList(count) => I::BuildList(count),
        I::BuildTuple(count) => I::BuildTuple(count),
        I::UnpackList(count) => I::UnpackList(count),
        I::UnpackLists(count) => I::UnpackLists(count),
        I::CallObject(args) => I::CallObject(args),
        I::CompareAndPreserve(operator) => I::CompareAndPreserve(operator),
        I::PushLoop(flags) => I::PushLoop(flags),
        I::Iterate(target) => I::Iterate(target),
        I::Jump(target) => I::Jump(target),
        I::JumpIfFalse(target) => I::JumpIfFalse(target),
        I::JumpIfFalseOrPop(target) => I::JumpIfFalseOrPop(target),
        I::JumpIfTrueOrPop(target) => I::JumpIfTrueOrPop(target),
        I::BeginCapture(mode) => I::BeginCapture(mode),
        I::GetItem => I::GetItem,
        I::Add => I::Add,
        I::Sub => I::Sub,
        I::Div => I::Div,
        I::IntDiv => I::IntDiv,
        I::Rem => I::Rem,
        I::Pow => I::Pow,
        I::Neg => I::Neg,
        I::Not => I::Not,
        I::Emit => I::Emit,
        I::PushWith => I::PushWith,
        I::PushDidNotIterate => I::PushDidNotIterate,
        I::PopFrame => I::PopFrame,
        I::PopLoopFrame => I::PopLoopFrame,
        I::EndCapture => I::EndCapture,
        I::DupTop => I::DupTop,
        I::DiscardTop => I::DiscardTop,
        I::FastRecurse => I::FastRecurse,
        I::Swap => I::Swap,
        I::Return => I::Return,
        I::IsUndefined => I::IsUndefined,
        I::GetClosure => I::GetClosure,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use minijinja::syntax::SyntaxConfig;
    use serde_json::json;

    use super::super::{SpecialTexts, Template, TemplatePiece, program};
    use super::*;
    use crate::api::ChatRequest;

    #[test]
    fn a_program_is_kept_if_its_names_are_not_too_many() {
        let kept = |source: &str| {
            let program = program::compile(super::super::NAME, source, &SyntaxConfig::default());
            kept(&program.unwrap()).is_some()
        };
        let statements = "{% macro m(x, y=1) %}{{ x }}{{ caller() }}{% endmacro %}{% call m(*[2], **{'y': 3}) %}{% endcall %}\
             {% for i in l if i is not none recursive %}{% with a = -i %}{% if a in l and not i or i < 2 < 3 %}{% continue %}{% endif %}\
             {{ loop(i) }}{% endwith %}{% else %}x{% endfor %}{% set ns.b = d.e[0][1:] ~ 'a' * 2 %}{% set c %}x{% endset %}";
        assert!(kept(statements));
        let operators = "{{ [1 + a, a - 1, a / 2, a // 2, a % 2, a ** 2, (a,), {a: a}, a == 1, a | upper, f(a), a.f(), a()(), 1 if a else 2] }}";
        assert!(kept(operators));
        let many: String = (0..3000).map(|at| format!("{{{{ name{at} }}}}")).collect();
        assert!(!kept(&many), "they have 22,890 bytes");
        assert!(kept("{{ name0 }}"));
        let template = Template::new(&many, &SpecialTexts::default(), || UNIX_EPOCH).unwrap();
        assert!(template.program.is_none());
        let template_args = json!({"name2999": "x"});
        let chat = ChatRequest {
            template_args,
            ..ChatRequest::default()
        };
        let pieces = template.render(&chat);
        assert_eq!(pieces, Ok(vec![TemplatePiece::Template("x".to_owned())]));
    }
}
