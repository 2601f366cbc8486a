//! What minijinja's code generator leaves out where scopes begin and end:
//!
//! - `break` and `continue` jump out of `with` blocks and captures that stay open. The loop's frame was then looked for in the block's, and
//!   what was printed afterwards went into the capture.
//! - A macro sees those variables outside of it that the generator finds in the macro's tree. It overlooks what is only sliced, a namespace
//!   whose member is set, arguments of filters of blocks, and the value in `set x = x + 1`. So a macro gets each name that its
//!   instructions look up.
//! - A frame in which macros are built keeps what is set in it until the rendering ends, for those macros to see. What is not set in it is
//!   looked up for the first of them only, so in a loop its values were those of an earlier iteration.
//!
//! ```text
//!   continue, break        Jump              ►  PopFrame (a `with`), EndCapture, DiscardTop (a capture) .., Jump
//!   a macro                Enclose .., GetClosure  ►  Enclose .., GetClosure
//!   .. in a loop's frame   Enclose .., GetClosure  ►  Enclose, Lookup, StoreLocal .., GetClosure
//!   set, beside a macro    StoreLocal        ►  retained, StoreLocal
//! ```

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::Instruction;
use minijinja::{Error, ErrorKind};

use super::allowed::RETAINED;
use super::jumps;

/// The maximum of instructions. A template of many bytes has no more, but each `break` ends as many blocks as may be nested.
const INSTRUCTIONS_MAX: usize = 1 << 18;

/// Adds what is left out.
///
/// # Errors
/// A `break` that is in no loop; too many instructions.
pub(super) fn mended(instructions: Vec<Instruction<'_>>) -> Result<Vec<Instruction<'_>>, Error> {
    let scopes = Scopes::of(&instructions)?;
    let mut before = scopes.before();
    jumps::replaced(instructions, |at, instruction, to| {
        to.extend(before.remove(&at).into_iter().flatten());
        // `GetClosure` has all of them before it.
        if !matches!(instruction, Instruction::Enclose(_)) {
            to.push(instruction);
        }
        Ok(())
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Loop,
    With,
    Capture,
    Macro,
}

/// The frame of the template itself, of which there is one in a rendering.
const OUTERMOST: usize = 0;

/// The scopes of a program. The generator writes them one in another, so that those around an instruction are the ones that begin before it
/// and end after it.
#[derive(Default)]
struct Scopes<'a> {
    /// Those around the present instruction, from the outermost one, each with the frame that variables are set in.
    open: Vec<(Scope, usize)>,
    frames: usize,
    frames_with_macros: BTreeSet<usize>,
    /// Where variables are set, and in which frame.
    stores: Vec<(usize, usize)>,
    /// What goes before an instruction.
    before: BTreeMap<usize, Vec<Instruction<'a>>>,
    /// The number of all instructions.
    count: usize,
}

impl<'a> Scopes<'a> {
    fn of(instructions: &[Instruction<'a>]) -> Result<Self, Error> {
        use Instruction as I;
        let starts = instructions.iter().filter_map(|it| match it {
            I::BuildMacro(_, start, _) => Some(*start as usize),
            _ => None,
        });
        let starts: BTreeSet<usize> = starts.collect();
        let mut it = Self {
            count: instructions.len(),
            ..Self::default()
        };
        for (at, instruction) in instructions.iter().enumerate() {
            if starts.contains(&at) {
                it.begin(Scope::Macro);
            }
            match instruction {
                I::PushLoop(_) => it.begin(Scope::Loop),
                I::PushWith => it.begin(Scope::With),
                I::BeginCapture(_) => it.begin(Scope::Capture),
                I::PopLoopFrame | I::PopFrame | I::EndCapture | I::Return => {
                    it.open.pop();
                }
                I::StoreLocal(_) => it.stores.push((at, it.frame())),
                I::GetClosure => {
                    it.frames_with_macros.insert(it.frame());
                    let names = outside(instructions, at).into_iter();
                    let enclosed = if it.is_in_loop() {
                        names
                            .flat_map(|name| {
                                [I::Enclose(name), I::Lookup(name), I::StoreLocal(name)]
                            })
                            .collect()
                    } else {
                        names.map(I::Enclose).collect()
                    };
                    it.insert(at, enclosed)?;
                }
                I::Jump(target) => match instructions.get(*target as usize) {
                    // All other jumps stay in their scope.
                    Some(I::Iterate(_) | I::PushDidNotIterate | I::PopLoopFrame) => it.leave(at)?,
                    // The generator has no loop to give as the target.
                    _ if *target as usize <= at => return Err(in_no_loop()),
                    _ => {}
                },
                _ => {}
            }
        }
        Ok(it)
    }

    fn begin(&mut self, scope: Scope) {
        let frame = if scope == Scope::Capture {
            self.frame()
        } else {
            self.frames += 1;
            self.frames
        };
        self.open.push((scope, frame));
    }

    fn frame(&self) -> usize {
        self.open.last().map_or(OUTERMOST, |(_, frame)| *frame)
    }

    /// Whether the innermost scope is a loop, whose frame each iteration empties.
    fn is_in_loop(&self) -> bool {
        self.open
            .last()
            .is_some_and(|(scope, _)| *scope == Scope::Loop)
    }

    /// Ends the scopes within the innermost loop, before a jump to its next element or its end.
    fn leave(&mut self, at: usize) -> Result<(), Error> {
        use Instruction as I;
        let mut ends = Vec::new();
        for (scope, _) in self.open.iter().rev() {
            match scope {
                Scope::With => ends.push(I::PopFrame),
                Scope::Capture => ends.extend([I::EndCapture, I::DiscardTop]),
                Scope::Loop => return self.insert(at, ends),
                // The loop around a macro is not the macro's.
                Scope::Macro => break,
            }
        }
        Err(in_no_loop())
    }

    fn insert(&mut self, at: usize, added: Vec<Instruction<'a>>) -> Result<(), Error> {
        self.count = self.count.saturating_add(added.len());
        if self.count > INSTRUCTIONS_MAX {
            let message = "the chat template has too many instructions";
            return Err(Error::new(ErrorKind::SyntaxError, message));
        }
        self.before.insert(at, added);
        Ok(())
    }

    /// What goes before each instruction.
    fn before(self) -> BTreeMap<usize, Vec<Instruction<'a>>> {
        let mut before = self.before;
        for (at, frame) in self.stores {
            // The outermost frame has no more names than the template. Each call, and each loop, has its own ones.
            if frame != OUTERMOST && self.frames_with_macros.contains(&frame) {
                let retained = Instruction::ApplyFilter(RETAINED, Some(1), u8::MAX);
                before.insert(at, vec![retained]);
            }
        }
        before
    }
}

fn in_no_loop() -> Error {
    let message = "`break` is in no loop";
    Error::new(ErrorKind::SyntaxError, message)
}

/// The names that a macro looks up, but for its arguments. `at`: the `GetClosure` that follows its body.
fn outside<'a>(instructions: &[Instruction<'a>], at: usize) -> BTreeSet<&'a str> {
    use Instruction as I;
    let Some([_, I::LoadConst(arguments), I::BuildMacro(_, start, _)]) =
        instructions.get(at..at + 3)
    else {
        return BTreeSet::new();
    };
    let arguments: Vec<_> = arguments.try_iter().into_iter().flatten().collect();
    let is_own = |name: &str| {
        // Each call says what `caller` is.
        name == "caller" || arguments.iter().any(|it| it.as_str() == Some(name))
    };
    let names = instructions[*start as usize..at]
        .iter()
        .filter_map(|it| match it {
            I::Lookup(name) | I::CallFunction(name, _) => Some(*name),
            _ => None,
        });
    names.filter(|name| !is_own(name)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::super::{SpecialTexts, Template, TemplateError, TemplatePiece};
    use crate::api::ChatRequest;

    fn render(source: &str) -> Result<String, TemplateError> {
        let template = Template::new(source, &SpecialTexts::default(), || UNIX_EPOCH)?;
        let pieces = template.render(&ChatRequest::default())?;
        let texts = pieces.iter().map(|piece| match piece {
            TemplatePiece::Template(text) | TemplatePiece::Plain(text) => text.as_str(),
        });
        Ok(texts.collect())
    }

    /// What Jinja 3.1 prints.
    fn check(source: &str, expect: &str) {
        assert_eq!(render(source).as_deref(), Ok(expect), "{source}");
    }

    #[test]
    fn a_macro_sees_every_variable_that_it_names() {
        for (body, expect) in [
            ("{{ x[1:] }}{{ x[::-1] }}", "[2][2, 1]"),
            ("{{ [8, 9][x[0]:] }}", "[9]"),
            ("{% macro k() %}{{ x[1:] }}{% endmacro %}{{ k() }}", "[2]"),
            ("{% set ns.a = 2 %}{{ ns.a }}", "2"),
            ("{% set x = x + [3] %}{{ x }}", "[1, 2, 3]"),
            ("{% set x, y = x[0], 2 %}{{ x }}{{ y }}", "12"),
            ("{% with x = x[0] %}{{ x }}{% endwith %}{{ x }}", "1[1, 2]"),
            ("{% for x in x %}{{ x }}{% endfor %}", "12"),
            ("{% filter replace('a', b) %}aa{% endfilter %}", "bb"),
            ("{% set y | replace('a', b) %}aa{% endset %}{{ y }}", "bb"),
            ("{% if false %}{% set x = 6 %}{% endif %}{{ x }}", "[1, 2]"),
            (
                "{% for i in x %}{% set x = i %}{% endfor %}{{ x }}",
                "[1, 2]",
            ),
            (
                "{% for i in x %}{{ loop.index }}{% endfor %}{{ later }}",
                "125",
            ),
        ] {
            let source = format!(
                "{{% set x = [1, 2] %}}{{% set b = 'b' %}}{{% set ns = namespace(a=1) %}}\
                 {{% macro m() %}}{body}{{% endmacro %}}{{% set later = 5 %}}{{{{ m() }}}}"
            );
            check(&source, expect);
        }
        check(
            "{% macro m() %}{{ caller(2) }}{% endmacro %}{% set l = [1, 2, 3] %}{% call(n) m() %}{{ l[n:] }}{% endcall %}",
            "[3]",
        );
    }

    /// Nothing outside takes the place of an argument that a call leaves out.
    #[test]
    fn arguments_hide_variables_outside() {
        let macros = [
            ("m(x)", "{{ x }}", ""),
            ("m(x=x)", "{{ x }}", ""),
            ("m(y=x)", "{{ y }}", "5"),
            ("m(x=1)", "{{ x }}", "1"),
            (
                "m(x)",
                "{% macro k(y) %}{{ x }}{{ y }}{% endmacro %}{{ k(2) }}",
                "2",
            ),
            (
                "m()",
                "{% macro k(x) %}{{ x }}{% endmacro %}{{ k() }}{{ x }}",
                "5",
            ),
        ];
        for (signature, body, expect) in macros {
            let source = format!(
                "{{% set x = 5 %}}{{% macro {signature} %}}{body}{{% endmacro %}}{{{{ m() }}}}"
            );
            check(&source, expect);
        }
    }

    #[test]
    fn loop_controls_end_the_blocks_that_they_leave() {
        for (source, expect) in [
            (
                "{% for i in [1, 2, 3] %}{% with x = i * 2 %}{% if i == 2 %}{% continue %}{% endif %}{{ x }}{% endwith %}{{ i }},{% endfor %}.",
                "21,63,.",
            ),
            (
                "{% for i in [1, 2, 3] %}{% with x = i * 2 %}{% if i == 2 %}{% break %}{% endif %}{{ x }}{% endwith %}{{ i }},{% endfor %}.",
                "21,.",
            ),
            (
                "{% for i in [1, 2, 3] %}{% set x %}a{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endset %}{{ x }},{% endfor %}.",
                "a1,a3,.",
            ),
            (
                "{% for i in [1, 2, 3] %}{% set x %}a{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endset %}{{ x }},{% else %}e{% endfor %}.",
                "a1,.",
            ),
            (
                "{% for i in [1, 2, 3] %}{% filter upper %}a{% if i == 2 %}{% continue %}{% endif %}{{ i }}b{% endfilter %},{% endfor %}.",
                "A1B,A3B,.",
            ),
            (
                "{% for i in [1, 2] %}{% with a = i %}{% set x %}{% with b = a %}{% if b == 1 %}{% continue %}{% endif %}{{ b }}{% endwith %}{% endset %}{{ x }}{% endwith %}{% endfor %}.",
                "2.",
            ),
            (
                "{% set x %}a{% for i in [1] %}{% set y %}b{% break %}{% endset %}{% endfor %}{% endset %}{{ x }}.",
                "a.",
            ),
            (
                "{% with a = 1 %}{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i + a }}{% endfor %}{% endwith %}.",
                "2.",
            ),
            (
                "{% for i in [1, 2] %}{% with a = i %}{% for j in [1, 2, 3] %}{% with b = j %}{% if b == 2 %}{% continue %}{% endif %}{{ a }}{{ b }} {% endwith %}{% endfor %}{% if a == 1 %}{% continue %}{% endif %}{{ a }}{% endwith %}{% endfor %}.",
                "11 13 21 23 2.",
            ),
            (
                "{% for i in [1, 2] %}{% with a = i %}{% for j in [] %}{% else %}{% if a == 1 %}{% continue %}{% endif %}{% endfor %}{{ a }}{% endwith %}{% endfor %}.",
                "2.",
            ),
            (
                "{% for i in [1, 2, 3, 4] if i != 3 %}{% with x = i %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{{ loop.index }}{% endwith %}{% endfor %}.",
                "1143.",
            ),
            (
                "{% macro m(l) %}{% for i in l %}{% with x = i %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endwith %}{% endfor %}{% endmacro %}{% for k in [1, 2] %}{% with z = k %}{{ m([1, 2, 3]) }}{{ z }} {% endwith %}{% endfor %}.",
                "131 132 .",
            ),
            (
                "{% for n in [[1, [[2, []], [3, []]]]] recursive %}{% with v = n[0] %}{% if v == 2 %}{% continue %}{% endif %}({{ v }}{{ loop(n[1]) }}){% endwith %}{% endfor %}.",
                "(1(3)).",
            ),
        ] {
            check(source, expect);
        }
        // More of them than frames may be open.
        check(
            "{% for i in range(1000) %}{% with x = i %}{% continue %}{% endwith %}{% endfor %}.",
            ".",
        );
    }

    #[test]
    fn a_break_outside_of_loops_is_refused() {
        for source in [
            "{% for i in [] %}{% else %}{% break %}{% endfor %}",
            "{% for i in [1] %}{% macro m() %}{% for j in [] %}{% else %}{% break %}{% endfor %}{% endmacro %}{{ m() }}{% endfor %}",
            "{% for i in [1] %}{% macro m() %}{% for j in [] %}{% else %}{% continue %}{% endfor %}{% endmacro %}{{ m() }}{% endfor %}",
            "{% for i in [1] %}{% call m() %}{% for j in [] %}{% else %}{% set x %}{% break %}{% endset %}{% endfor %}{% endcall %}{% endfor %}",
        ] {
            let refused = render(source).unwrap_err();
            assert!(refused.to_string().contains("in no loop"), "{refused}");
        }
    }

    #[test]
    fn a_macro_in_a_loop_sees_the_present_iteration() {
        for (source, expect) in [
            (
                "{% for m in [1,2] %}{% if m==1 %}{% set extra='S' %}{% endif %}{% macro p() %}[{{extra}}]{% endmacro %}{{ p() }}{% endfor %}",
                "[S][]",
            ),
            (
                "{% set o = 0 %}{% for m in [1,2] %}{% macro p() %}[{{ m }}{{ x }}{{ o }}{{ loop.index }}]{% endmacro %}{% set x = m * 3 %}{{ p() }}{% endfor %}",
                "[1301][2602]",
            ),
            (
                "{% macro w() %}<{{ caller() }}>{% endmacro %}{% for m in [1,2] %}{% if m==1 %}{% set x='S' %}{% endif %}{% call w() %}{{ x }}{{ m }}{% endcall %}{% endfor %}",
                "<S1><2>",
            ),
            (
                "{% set x = 'o' %}{% for m in [1,2] %}{% macro p() %}{{ x }}{% endmacro %}{{ p() }}{% if m==1 %}{% set x='S' %}{% endif %}{{ p() }}{{ x }} {% endfor %}{{ x }}",
                "oSS ooo o",
            ),
            (
                "{% for m in [1,2] %}{% for n in [1,2] %}{% macro p() %}{{ m }}{{ n }}{% if n == 1 %}{{ q is defined }}{% endif %}{% endmacro %}{{ p() }} {% endfor %}{% endfor %}",
                "11False 12 21False 22 ",
            ),
        ] {
            check(source, expect);
        }
    }
}
