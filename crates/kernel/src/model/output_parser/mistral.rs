//! Mistral's calls: `[TOOL_CALLS][{..}, {..}]`, and `[TOOL_CALLS]NAME[ARGS]{..}` for each call in newer models.

use super::call::{CallContext, CallMachine, CallOutput, NameText, Verdict};
use super::envelope::{EnvelopeCalls, EnvelopeSyntax};
use super::json::JsonMachine;
use super::markers::{Alternatives, Marker, Matched};

pub(super) const CALLS: Marker = "[TOOL_CALLS]";
pub(super) const ARGUMENTS: Marker = "[ARGS]";
pub(super) const CALL_ID: Marker = "[CALL_ID]";

#[derive(Debug)]
enum MistralPlace {
    /// After the opening marker.
    Before,
    List(EnvelopeCalls),
    /// In the name; the marker after it as far as it was read.
    Name(NameText, Alternatives),
    /// In the id.
    Id(String, NameText, Alternatives),
    /// Between the marker of the arguments and their object.
    BeforeArguments,
    Arguments(JsonMachine),
    After(Alternatives),
}

/// The calls after one opening marker.
#[derive(Debug)]
pub(super) struct MistralCalls(MistralPlace);

impl MistralCalls {
    pub(super) const fn new() -> Self {
        Self(MistralPlace::Before)
    }

    fn name(
        &mut self,
        c: char,
        mut name: NameText,
        mut next: Alternatives,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        // Models between the two forms have no marker before the arguments.
        if c == '{' && !next.is_begun() {
            return match name.take() {
                Some(name) => {
                    out.begin(name, None);
                    self.arguments(c, JsonMachine::default(), out)
                }
                None => Verdict::Refused,
            };
        }
        let options = [ARGUMENTS, CALL_ID];
        let begins = |marker: &Marker| context.texts.text(marker).starts_with(c);
        if next.is_begun() || options.iter().any(begins) {
            let matched = next.push(c, &options, context.texts);
            if let Matched::Whole(marker) = matched {
                let Some(name) = name.take() else {
                    return Verdict::Refused;
                };
                if marker == CALL_ID {
                    self.0 = MistralPlace::Id(name, NameText::default(), Alternatives::default());
                } else {
                    out.begin(name, None);
                    self.0 = MistralPlace::BeforeArguments;
                }
                return Verdict::Taken;
            }
            if matched == Matched::Nothing {
                return Verdict::Refused;
            }
        } else if !name.push(c) {
            return Verdict::Refused;
        }
        self.0 = MistralPlace::Name(name, next);
        Verdict::Taken
    }

    fn id(
        &mut self,
        c: char,
        name: String,
        mut id: NameText,
        mut next: Alternatives,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        if next.is_begun() || context.texts.text(ARGUMENTS).starts_with(c) {
            match next.push(c, &[ARGUMENTS], context.texts) {
                Matched::Open => {}
                Matched::Whole(_) => {
                    out.begin(name, id.take());
                    self.0 = MistralPlace::BeforeArguments;
                    return Verdict::Taken;
                }
                Matched::Nothing => return Verdict::Refused,
            }
        } else if !id.push(c) {
            return Verdict::Refused;
        }
        self.0 = MistralPlace::Id(name, id, next);
        Verdict::Taken
    }

    fn arguments(&mut self, c: char, mut json: JsonMachine, out: &mut CallOutput) -> Verdict {
        if json.push(c).is_err() {
            return Verdict::Refused;
        }
        out.push(c);
        if !json.is_complete() {
            self.0 = MistralPlace::Arguments(json);
            return Verdict::Taken;
        }
        self.0 = MistralPlace::After(Alternatives::default());
        out.end()
    }
}

impl CallMachine for MistralCalls {
    fn push(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        match std::mem::replace(&mut self.0, MistralPlace::Before) {
            // Some write one object without a list.
            MistralPlace::Before if matches!(c, '[' | '{') => {
                let mut list = EnvelopeCalls::new(EnvelopeSyntax::default());
                let verdict = list.push(c, context, out);
                self.0 = MistralPlace::List(list);
                verdict
            }
            MistralPlace::Before if c.is_ascii_whitespace() => Verdict::Taken,
            MistralPlace::Before => self.name(
                c,
                NameText::default(),
                Alternatives::default(),
                context,
                out,
            ),
            MistralPlace::List(mut list) => {
                let verdict = list.push(c, context, out);
                self.0 = MistralPlace::List(list);
                verdict
            }
            MistralPlace::Name(name, next) => self.name(c, name, next, context, out),
            MistralPlace::Id(name, id, next) => self.id(c, name, id, next, context, out),
            MistralPlace::BeforeArguments if c.is_ascii_whitespace() => {
                self.0 = MistralPlace::BeforeArguments;
                Verdict::Taken
            }
            MistralPlace::BeforeArguments if c == '{' => {
                self.arguments(c, JsonMachine::default(), out)
            }
            MistralPlace::BeforeArguments => Verdict::Refused,
            MistralPlace::Arguments(json) => self.arguments(c, json, out),
            MistralPlace::After(mut next) => match next.push(c, &[CALLS], context.texts) {
                Matched::Open => {
                    self.0 = MistralPlace::After(next);
                    Verdict::Taken
                }
                Matched::Whole(_) => Verdict::Taken,
                Matched::Nothing => Verdict::Over,
            },
        }
    }
}
