//! Calls in sections of control tokens, name and arguments apart: DeepSeek R1, V3 and V3.1, Kimi K2, Solar Open.

use super::call::{CallContext, CallMachine, CallOutput, NameText, Verdict};
use super::json::JsonMachine;
use super::markers::{Alternatives, Marker, Matched};

/// The markers of one family.
#[derive(Debug)]
pub(super) struct SectionSyntax {
    pub(super) section: Marker,
    pub(super) call: Marker,
    /// Between the name and the arguments.
    pub(super) separator: Marker,
    /// The same, if `separator` stands between an id and the name.
    pub(super) name_end: Option<Marker>,
    pub(super) call_end: Marker,
    pub(super) section_end: Marker,
    /// The name is `functions.NAME:INDEX`, and that is the id of the call.
    pub(super) name_is_id: bool,
}

/// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n` with the arguments in a fence (R1, V3), or
/// `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{..}` (V3.1).
pub(super) const DEEPSEEK: SectionSyntax = SectionSyntax {
    section: "<｜tool▁calls▁begin｜>",
    call: "<｜tool▁call▁begin｜>",
    separator: "<｜tool▁sep｜>",
    name_end: None,
    call_end: "<｜tool▁call▁end｜>",
    section_end: "<｜tool▁calls▁end｜>",
    name_is_id: false,
};

/// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`
pub(super) const KIMI: SectionSyntax = SectionSyntax {
    section: "<|tool_calls_section_begin|>",
    call: "<|tool_call_begin|>",
    separator: "<|tool_call_argument_begin|>",
    name_end: None,
    call_end: "<|tool_call_end|>",
    section_end: "<|tool_calls_section_end|>",
    name_is_id: true,
};

/// `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{..}<|tool_call:end|>`
pub(super) const SOLAR_OPEN: SectionSyntax = SectionSyntax {
    section: "<|tool_calls|>",
    call: "<|tool_call:begin|>",
    separator: "<|tool_call:name|>",
    name_end: Some("<|tool_call:args|>"),
    call_end: "<|tool_call:end|>",
    section_end: "<|calls|>",
    name_is_id: false,
};

impl SectionSyntax {
    pub(super) fn markers(&self) -> impl Iterator<Item = Marker> {
        [
            self.section,
            self.call,
            self.separator,
            self.call_end,
            self.section_end,
        ]
        .into_iter()
        .chain(self.name_end)
    }
}

/// The fence around arguments.
const FENCE: Marker = "```json";
const FENCE_END: Marker = "```";

#[derive(Debug)]
enum SectionPlace {
    /// Before a call, or the end of the section.
    Between(Alternatives),
    /// In the name; the text of the separator as far as it was read.
    Name(NameText, Alternatives),
    /// After the separator.
    Separated(String),
    /// In the name after a separator.
    Line(NameText),
    /// The same; the marker after it as far as it was read.
    Named(NameText, Alternatives),
    Fence(Alternatives),
    Arguments(JsonMachine),
    After(Alternatives),
}

/// A section.
#[derive(Debug)]
pub(super) struct SectionCalls {
    syntax: &'static SectionSyntax,
    place: SectionPlace,
}

impl SectionCalls {
    /// What follows this marker, which opens a section or a call without one.
    pub(super) fn new(syntax: &'static SectionSyntax, opened_by: Marker) -> Self {
        let place = if opened_by == syntax.call {
            SectionPlace::Name(NameText::default(), Alternatives::default())
        } else {
            SectionPlace::Between(Alternatives::default())
        };
        Self { syntax, place }
    }

    fn begin(&self, name: String, out: &mut CallOutput) -> Verdict {
        if self.syntax.name_is_id {
            let bare = name.strip_prefix("functions.").unwrap_or(&name);
            let bare = match bare.rsplit_once(':') {
                Some((bare, index)) if index.bytes().all(|b| b.is_ascii_digit()) => bare,
                _ => bare,
            };
            if bare.is_empty() {
                return Verdict::Refused;
            }
            out.begin(bare.to_owned(), Some(name.clone()));
        } else {
            out.begin(name, None);
        }
        Verdict::Taken
    }

    fn arguments(&mut self, c: char, mut json: JsonMachine, out: &mut CallOutput) -> Verdict {
        if json.push(c).is_err() {
            return Verdict::Refused;
        }
        out.push(c);
        if !json.is_complete() {
            self.place = SectionPlace::Arguments(json);
            return Verdict::Taken;
        }
        self.place = SectionPlace::After(Alternatives::default());
        out.end()
    }

    fn separated(&mut self, c: char, first: String, out: &mut CallOutput) -> Verdict {
        if c.is_ascii_whitespace() {
            self.place = SectionPlace::Separated(first);
            return Verdict::Taken;
        }
        if c == '{' {
            return match self.begin(first, out) {
                Verdict::Taken => self.arguments(c, JsonMachine::default(), out),
                refused => refused,
            };
        }
        // What stood before the separator is the type of the call.
        self.line(c, NameText::default(), out)
    }

    fn line(&mut self, c: char, mut name: NameText, out: &mut CallOutput) -> Verdict {
        if c == '\n' {
            self.place = SectionPlace::Fence(Alternatives::default());
            return match name.take() {
                Some(name) => self.begin(name, out),
                None => Verdict::Refused,
            };
        }
        if !name.push(c) {
            return Verdict::Refused;
        }
        self.place = SectionPlace::Line(name);
        Verdict::Taken
    }

    fn fence(
        &mut self,
        c: char,
        mut next: Alternatives,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        if c == '{' && !next.is_begun() {
            return self.arguments(c, JsonMachine::default(), out);
        }
        let verdict = match next.push(c, &[FENCE], context.texts) {
            Matched::Open | Matched::Whole(_) => Verdict::Taken,
            Matched::Nothing => Verdict::Refused,
        };
        self.place = SectionPlace::Fence(next);
        verdict
    }

    fn name(
        &mut self,
        c: char,
        mut name: NameText,
        mut next: Alternatives,
        context: CallContext<'_>,
    ) -> Verdict {
        match name_up_to(self.syntax.separator, c, (&mut name, &mut next), context) {
            NameStep::Open => self.place = SectionPlace::Name(name, next),
            NameStep::Whole(name) => self.place = SectionPlace::Separated(name),
            NameStep::None => return Verdict::Refused,
        }
        Verdict::Taken
    }

    fn named(
        &mut self,
        c: char,
        end: Marker,
        (mut name, mut next): (NameText, Alternatives),
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        match name_up_to(end, c, (&mut name, &mut next), context) {
            NameStep::Open => self.place = SectionPlace::Named(name, next),
            NameStep::Whole(name) => {
                self.place = SectionPlace::Fence(Alternatives::default());
                return self.begin(name, out);
            }
            NameStep::None => return Verdict::Refused,
        }
        Verdict::Taken
    }

    fn matched(&mut self, matched: Matched, next: Alternatives, after: bool) -> Verdict {
        match matched {
            Matched::Open => {
                self.place = if after {
                    SectionPlace::After(next)
                } else {
                    SectionPlace::Between(next)
                };
                Verdict::Taken
            }
            Matched::Whole(marker) if marker == self.syntax.section_end => Verdict::Last,
            Matched::Whole(marker) => {
                if marker == self.syntax.call {
                    self.place = SectionPlace::Name(NameText::default(), Alternatives::default());
                    return Verdict::Taken;
                }
                // The end of the call or of its fence. The end of the section may be missing.
                self.place = SectionPlace::After(next);
                Verdict::Settled
            }
            Matched::Nothing if after => Verdict::Over,
            Matched::Nothing => Verdict::Refused,
        }
    }
}

/// What a character is to a name, and to the marker after it.
enum NameStep {
    Open,
    Whole(String),
    None,
}

/// Takes the next character of a name, or of the marker after it.
fn name_up_to(
    end: Marker,
    c: char,
    (name, next): (&mut NameText, &mut Alternatives),
    context: CallContext<'_>,
) -> NameStep {
    if !next.is_begun() && !context.texts.text(end).starts_with(c) {
        return if name.push(c) {
            NameStep::Open
        } else {
            NameStep::None
        };
    }
    match next.push(c, &[end], context.texts) {
        Matched::Open => NameStep::Open,
        Matched::Whole(_) => name.take().map_or(NameStep::None, NameStep::Whole),
        Matched::Nothing => NameStep::None,
    }
}

impl CallMachine for SectionCalls {
    fn push(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let empty = SectionPlace::Between(Alternatives::default());
        let syntax = self.syntax;
        match std::mem::replace(&mut self.place, empty) {
            SectionPlace::Between(mut next) => {
                let options = [syntax.call, syntax.section_end];
                let matched = next.push(c, &options, context.texts);
                self.matched(matched, next, false)
            }
            SectionPlace::After(mut next) => {
                // The end of a call may be missing before the next one.
                let options = [syntax.call_end, syntax.call, syntax.section_end, FENCE_END];
                let matched = next.push(c, &options, context.texts);
                self.matched(matched, next, true)
            }
            SectionPlace::Name(name, next) => self.name(c, name, next, context),
            SectionPlace::Separated(first) => match syntax.name_end {
                Some(end) => {
                    let begun = (NameText::default(), Alternatives::default());
                    self.named(c, end, begun, context, out)
                }
                None => self.separated(c, first, out),
            },
            SectionPlace::Named(name, next) => {
                let end = syntax.name_end.unwrap_or(syntax.separator);
                self.named(c, end, (name, next), context, out)
            }
            SectionPlace::Line(name) => self.line(c, name, out),
            SectionPlace::Fence(next) => self.fence(c, next, context, out),
            SectionPlace::Arguments(json) => self.arguments(c, json, out),
        }
    }
}
