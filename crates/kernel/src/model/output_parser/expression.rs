//! Calls as expressions: `[NAME(key='value')]` of LFM2 and Llama, and `call:NAME{key:..}` of Gemma.

use super::call::{CallContext, CallMachine, CallOutput, NameText, Verdict};
use super::envelope::{EnvelopeCalls, EnvelopeSyntax};
use super::literal::{LiteralMachine, LiteralSyntax};
use super::markers::{Alternatives, Marker, Matched};

/// How a family writes such calls.
#[derive(Debug)]
pub(super) struct ExpressionSyntax {
    /// What opens the calls.
    pub(super) open: Marker,
    /// What stands before each name.
    prefix: Option<Marker>,
    arguments: LiteralSyntax,
    /// What follows the last call. It may be missing.
    close: Marker,
}

/// `<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>`
pub(super) const GEMMA: ExpressionSyntax = ExpressionSyntax {
    open: "<|tool_call>",
    prefix: Some("call:"),
    arguments: LiteralSyntax {
        quote: Some("<|\"|>"),
        brackets: ['{', '}'],
        assign: ':',
    },
    close: "<tool_call|>",
};

/// `<start_function_call>call:NAME{key:<escape>value<escape>}<end_function_call>`
pub(super) const FUNCTION_GEMMA: ExpressionSyntax = ExpressionSyntax {
    open: "<start_function_call>",
    prefix: Some("call:"),
    arguments: LiteralSyntax {
        quote: Some("<escape>"),
        brackets: ['{', '}'],
        assign: ':',
    },
    close: "<end_function_call>",
};

/// `<|tool_call_start|>[NAME(key='value'), NAME()]<|tool_call_end|>`
pub(super) const LFM2: ExpressionSyntax = ExpressionSyntax {
    open: "<|tool_call_start|>",
    prefix: None,
    arguments: LiteralSyntax {
        quote: None,
        brackets: ['(', ')'],
        assign: '=',
    },
    close: "<|tool_call_end|>",
};

/// `[NAME(key='value'), NAME()]`, which Llama 3.2 and 4 write if their template asks for it; Llama 4 also between these markers.
pub(super) const LLAMA_PYTHON: ExpressionSyntax = ExpressionSyntax {
    open: "<|python_start|>",
    close: "<|python_end|>",
    ..LFM2
};

impl ExpressionSyntax {
    /// The markers behind the opening one that may be control tokens.
    pub(super) fn markers(&self) -> impl Iterator<Item = Marker> {
        [self.close].into_iter().chain(self.arguments.quote)
    }
}

#[derive(Debug)]
enum ExpressionPlace {
    /// Before a call; its prefix as far as it was read.
    Before(Alternatives),
    Name(NameText),
    Arguments(LiteralMachine),
    After(Alternatives),
    /// The model writes objects instead, as it may be asked to.
    Objects(EnvelopeCalls),
}

/// The calls after one opening marker.
#[derive(Debug)]
pub(super) struct ExpressionCalls {
    syntax: &'static ExpressionSyntax,
    /// No marker opened them, so only those of declared tools are calls.
    unmarked: bool,
    in_list: bool,
    place: ExpressionPlace,
}

impl ExpressionCalls {
    pub(super) fn new(syntax: &'static ExpressionSyntax) -> Self {
        Self {
            syntax,
            unmarked: false,
            in_list: false,
            place: ExpressionPlace::Before(Alternatives::default()),
        }
    }

    /// Calls that no marker opened, from the bracket of their list on.
    pub(super) fn unmarked(syntax: &'static ExpressionSyntax) -> Self {
        Self {
            unmarked: true,
            ..Self::new(syntax)
        }
    }

    fn before(
        &mut self,
        c: char,
        mut next: Alternatives,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        if let Some(prefix) = self.syntax.prefix {
            self.place = match next.push(c, &[prefix], context.texts) {
                Matched::Open => ExpressionPlace::Before(next),
                Matched::Whole(_) => ExpressionPlace::Name(NameText::default()),
                Matched::Nothing => return Verdict::Refused,
            };
            return Verdict::Taken;
        }
        match c {
            '[' if !self.in_list => self.in_list = true,
            // A list of objects that no marker opened is an answer.
            '{' if !self.unmarked => return self.objects(c, context, out),
            _ if c.is_ascii_whitespace() => {}
            _ => return self.name(c, NameText::default(), context, out),
        }
        self.place = ExpressionPlace::Before(next);
        Verdict::Taken
    }

    fn objects(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let syntax = EnvelopeSyntax {
            close: Some(self.syntax.close),
            ..EnvelopeSyntax::default()
        };
        let mut objects = if self.in_list {
            EnvelopeCalls::in_list(syntax)
        } else {
            EnvelopeCalls::new(syntax)
        };
        let verdict = objects.push(c, context, out);
        self.place = ExpressionPlace::Objects(objects);
        verdict
    }

    fn name(
        &mut self,
        c: char,
        mut name: NameText,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        let is_known = |name: &str| !self.unmarked || context.tools.has(name);
        if c == self.syntax.arguments.brackets[0] {
            let Some(name) = name.take().filter(|name| is_known(name)) else {
                return Verdict::Refused;
            };
            out.begin(name, None);
            let arguments = LiteralMachine::new(&self.syntax.arguments, out);
            self.place = ExpressionPlace::Arguments(arguments);
            return Verdict::Taken;
        }
        // At once, so that an answer which is a list comes as it is written.
        if !name.push(c) || self.unmarked && !context.tools.has_prefix(name.text()) {
            return Verdict::Refused;
        }
        self.place = ExpressionPlace::Name(name);
        Verdict::Taken
    }

    fn arguments(
        &mut self,
        c: char,
        mut arguments: LiteralMachine,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        if arguments.push(c, context.texts, out).is_err() {
            return Verdict::Refused;
        }
        if !arguments.is_complete() {
            self.place = ExpressionPlace::Arguments(arguments);
            return Verdict::Taken;
        }
        self.place = ExpressionPlace::After(Alternatives::default());
        out.end()
    }

    fn after(&mut self, c: char, mut next: Alternatives, context: CallContext<'_>) -> Verdict {
        if !next.is_begun() {
            match c {
                _ if c.is_ascii_whitespace() => {
                    self.place = ExpressionPlace::After(next);
                    return Verdict::Taken;
                }
                ',' if self.in_list => {
                    self.place = ExpressionPlace::Before(next);
                    return Verdict::Taken;
                }
                ']' if self.in_list => {
                    self.in_list = false;
                    self.place = ExpressionPlace::After(next);
                    return Verdict::Settled;
                }
                _ if self.in_list => return Verdict::Over,
                _ => {}
            }
        }
        self.place = match next.push(c, &[self.syntax.close], context.texts) {
            Matched::Open => ExpressionPlace::After(next),
            Matched::Whole(_) => return Verdict::Last,
            Matched::Nothing => return Verdict::Over,
        };
        Verdict::Taken
    }
}

impl CallMachine for ExpressionCalls {
    fn push(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let empty = ExpressionPlace::Before(Alternatives::default());
        match std::mem::replace(&mut self.place, empty) {
            ExpressionPlace::Before(next) => self.before(c, next, context, out),
            ExpressionPlace::Name(name) => self.name(c, name, context, out),
            ExpressionPlace::Arguments(arguments) => self.arguments(c, arguments, context, out),
            ExpressionPlace::After(next) => self.after(c, next, context),
            ExpressionPlace::Objects(mut objects) => {
                let verdict = objects.push(c, context, out);
                self.place = ExpressionPlace::Objects(objects);
                verdict
            }
        }
    }
}
