//! Finds reasoning and tool calls in the text of a model, by the syntax of its family (D-10).
//!
//! ```text
//!   text ── <think> ──► reasoning ── </think> ──► text ── <tool_call> ──► calls ── </tool_call> ──► text
//!                       reasoning ── <tool_call> ──► calls ──► reasoning
//!                       (harmony)  <|channel|> ──► header ── <|message|> ──► text | reasoning | call
//! ```
//!
//! Invariants: however the text is cut into pieces, the events are the same but for the cuts within one text or one
//! call's arguments; everything that is no marker comes out once; each character is looked at a bounded number of
//! times. Text without the first character of a marker passes through uncopied; only what may begin a marker is held
//! back.

mod call;
mod draft;
mod envelope;
mod expression;
mod families;
mod format;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod harmony;
mod json;
mod literal;
mod markers;
mod mistral;
mod nested;
mod open_calls;
mod reasoning;
mod section;
mod settings;
mod tagged;
#[cfg(test)]
mod tests;
mod tools;
#[cfg(test)]
mod work;

use self::call::{CallContext, CallMachine, CallOutput, Verdict};
use self::draft::DraftCalls;
pub use self::families::{OutputParsers, ReasoningParser, ToolParser};
use self::format::MarkerRole;
pub(crate) use self::format::OutputFormat;
use self::harmony::{HarmonyCall, HarmonyHeader, HarmonyMessage};
use self::markers::{Find, Marker, begun_marker, find};
use self::open_calls::OpenCalls;
use self::reasoning::ReasoningText;
pub(crate) use self::settings::OutputSettings;
use self::settings::OutputStart;
pub(crate) use self::tools::DeclaredTools;
use crate::chunk::Text;
use crate::limits;
use crate::tool_arguments::ToolArguments;

/// The events that the parser emits, in order.
#[derive(Debug, PartialEq)]
pub(super) enum OutputPart {
    Text(Text),
    Reasoning(Text),
    /// A call begins. Its arguments follow, and then its end; no part of anything else comes between.
    CallBegin {
        name: String,
        /// The id that the model gave it.
        id: Option<String>,
    },
    /// JSON text to append to the arguments of the call.
    CallArguments(String),
    /// The call is complete; its whole arguments.
    CallEnd {
        arguments: ToolArguments,
    },
    /// What began as a call is none. `source` is all of it, for readers who have not seen its beginning.
    CallBroken {
        source: String,
    },
}

#[derive(Debug)]
enum ParserState {
    /// Line feeds directly after a marker belong to it.
    Text {
        after_marker: bool,
    },
    Reasoning(ReasoningText),
    /// Before reasoning, whose label may come first.
    Label,
    Header(HarmonyHeader),
    Calls(Box<OpenCalls>),
    /// In reasoning, what may be calls.
    Draft(Box<DraftCalls>),
}

impl ParserState {
    const TEXT: Self = Self::Text {
        after_marker: false,
    };

    /// Behind calls, in what they stand in.
    fn behind_calls(reasoning: Option<ReasoningText>) -> Self {
        match reasoning {
            Some(reasoning) => Self::Reasoning(reasoning.behind_call()),
            None => Self::Text { after_marker: true },
        }
    }
}

/// The parser of one choice's text.
#[derive(Debug)]
pub(super) struct OutputParser {
    settings: OutputSettings,
    state: ParserState,
    /// Text that is not parsed yet: all from `at`.
    input: String,
    at: usize,
    /// Bytes at the end of the input that were not taken for a draft yet. No draft begins before them: each byte is in one
    /// at most.
    fresh: usize,
    /// Nothing was emitted but reasoning.
    at_start: bool,
    /// There was reasoning.
    has_reasoned: bool,
    /// Complete calls.
    calls: usize,
    response: ResponseTags,
}

/// The tags that Granite puts around what follows its reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseTags {
    /// There are none here.
    None,
    /// The first may come next: the reasoning has just ended.
    MayOpen,
    /// The second may end the output.
    Open,
}

/// White space that is held back: before a call without a marker, behind the tag that ends a response, and before the
/// text of an argument.
const BLANK_BYTES_MAX: usize = 64;

/// Who ended the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutputEnd {
    /// The model: it has written all that it was going to.
    Model,
    /// A limit, a stop string, a controller or the caller: the model might have gone on.
    Cut,
}

type Out<'a> = &'a mut dyn FnMut(OutputPart);

impl OutputParser {
    /// A parser at the start of an output.
    pub(super) fn new(settings: OutputSettings) -> Self {
        let start = settings.start.clone();
        let mut parser = Self {
            settings,
            state: ParserState::TEXT,
            input: String::new(),
            at: 0,
            fresh: 0,
            at_start: true,
            has_reasoned: matches!(start, OutputStart::Reasoning | OutputStart::Labelled),
            calls: 0,
            response: ResponseTags::None,
        };
        match start {
            OutputStart::Text => {}
            OutputStart::Reasoning => parser.state = ParserState::Label,
            OutputStart::Labelled => {
                parser.state = ParserState::Reasoning(ReasoningText::begun());
            }
            OutputStart::Header(prompt) => {
                parser.state = ParserState::Header(HarmonyHeader::default());
                // Its text is that of the prompt, and not the model's.
                parser.push(Text::from(&*prompt), &mut |_| {});
                if let ParserState::Header(header) = &mut parser.state {
                    header.forget_source();
                }
            }
        }
        parser
    }

    /// A parser that lets everything pass as text.
    pub(super) fn plain() -> Self {
        Self::new(OutputSettings::plain())
    }

    /// Parses the next piece of text.
    pub(super) fn push(&mut self, text: Text, out: Out<'_>) {
        let Some(format) = self.settings.format.clone() else {
            return emit_text(text, out);
        };
        let is_plain = self.input.is_empty()
            && !self.may_be_unmarked(&format)
            && matches!(
                self.state,
                ParserState::Text {
                    after_marker: false
                }
            );
        // The usual step: no marker can begin here, so the text is passed on without a copy.
        if is_plain && !self.may_hold_marker(&format, &text) {
            self.at_start &= text.trim_ascii().is_empty();
            return emit_text(text, out);
        }
        self.feed(&text, &format, out);
    }

    /// Parses text that may hold a marker.
    fn feed(&mut self, text: &str, format: &OutputFormat, out: Out<'_>) {
        self.fresh = self.fresh.saturating_add(text.len());
        self.input.push_str(text);
        while self.step(format, out) {}
        // Once for each piece and not for each marker, of which a piece may have many.
        self.input.drain(..self.at);
        self.at = 0;
    }

    /// The end of the output: what is still held back is text after all, unless it is a complete call.
    pub(super) fn end(&mut self, end: OutputEnd, out: Out<'_>) {
        let Some(format) = self.settings.format.clone() else {
            return;
        };
        self.end_draft(&format, end, out);
        let rest = std::mem::take(&mut self.input);
        match std::mem::replace(&mut self.state, ParserState::TEXT) {
            ParserState::Text { .. } => {
                let is_tag = self.response == ResponseTags::Open
                    && rest.trim_ascii_end() == format::RESPONSE[1];
                if !is_tag {
                    emit_text(Text::from(format.texts.visible(rest)), out);
                }
            }
            ParserState::Reasoning(mut reasoning) => {
                reasoning.emit(&format.texts.visible(rest), out);
            }
            // Where it is held back, it is a label that was cut off. Drafts have ended.
            ParserState::Label | ParserState::Draft(_) => {}
            ParserState::Header(mut header) => {
                header.source.push_str(&rest);
                // The words of a header that was cut off are no answer.
                if !header.is_blank() && !header.has_marker() {
                    emit_text(Text::from(format.texts.visible(header.source)), out);
                }
            }
            ParserState::Calls(calls) => {
                let mut calls = *calls;
                calls.source.push_str(&rest);
                // White space behind the last call is not worth a text.
                if calls.output.ended() == 0 || !calls.source.trim().is_empty() {
                    calls.give_back(&format, out);
                }
            }
        }
        self.at = 0;
    }

    /// Whether the output may begin with a call without a marker.
    fn may_be_unmarked(&self, format: &OutputFormat) -> bool {
        self.at_start && format.has_unmarked_calls() && self.settings.finds_calls(format)
    }

    fn may_hold_marker(&self, format: &OutputFormat, text: &str) -> bool {
        let markers = self.in_text(format);
        let has_tag = self.response != ResponseTags::None && text.contains('<');
        has_tag
            || markers.iter().any(|(marker, _)| {
                let first = format.texts.text(marker).as_bytes()[0];
                text.as_bytes().contains(&first)
            })
    }

    fn in_text<'f>(&self, format: &'f OutputFormat) -> &'f [(Marker, MarkerRole)] {
        let is_first = self.at_start && !(self.has_reasoned && format.reasons_once());
        format.in_text(
            format.finds_reasoning() && (is_first || format.reasons_anywhere()),
            self.may_call(format),
        )
    }

    /// Whether a call may begin.
    fn may_call(&self, format: &OutputFormat) -> bool {
        self.settings.finds_calls(format) && self.calls < limits::TOOL_CALLS_MAX
    }

    /// Whether what comes next is text.
    fn is_in_text(&self) -> bool {
        matches!(self.state, ParserState::Text { .. })
    }

    /// Whether it is text or a call, and no reasoning.
    fn is_in_answer(&self) -> bool {
        self.is_in_text() || matches!(self.state, ParserState::Calls(_))
    }

    /// Parses what comes next. `true` if there may be more to parse.
    fn step(&mut self, format: &OutputFormat, out: Out<'_>) -> bool {
        match &self.state {
            ParserState::Text { after_marker } => {
                let after_marker = *after_marker;
                self.step_text(format, after_marker, out)
            }
            ParserState::Reasoning(reasoning) => {
                let reasoning = *reasoning;
                self.step_reasoning(format, reasoning, out)
            }
            ParserState::Label => self.step_label(format),
            ParserState::Header(_) => self.step_header(format, out),
            ParserState::Calls(_) => self.step_calls(format, out),
            ParserState::Draft(_) => self.step_draft(format),
        }
    }

    fn step_text(&mut self, format: &OutputFormat, after_marker: bool, out: Out<'_>) -> bool {
        if after_marker && !self.skip_line_feeds() {
            return false;
        }
        self.state = ParserState::TEXT;
        if self.may_be_unmarked(format) {
            match self.first_character() {
                Some(None) => return false,
                Some(Some(first)) => {
                    if let Some(machine) = format.unmarked_machine(first) {
                        self.enter_calls(machine, String::new(), None);
                        return true;
                    }
                }
                None => self.at_start = false,
            }
        }
        if self.response == ResponseTags::MayOpen && !self.skip_response_tag() {
            return false;
        }
        let roles = self.in_text(format);
        let mut markers: Vec<Marker> = roles.iter().map(|(marker, _)| *marker).collect();
        if self.response == ResponseTags::Open {
            markers.push(format::RESPONSE[1]);
        }
        let rest = &self.input[self.at..];
        let (text, next) = match find(rest, &markers, &format.texts) {
            Find::None { safe } => (&rest[..safe], None),
            Find::Marker { at, end, marker } => (&rest[..at], Some((&rest[at..end], marker))),
        };
        let holds_tag = next.is_some_and(|(_, marker)| marker == format::RESPONSE[1]);
        let is_text = |tag: &str, marker| {
            let is_reasoning = format.think().is_some_and(|(open, _)| open == marker);
            let is_late = !format.reasons_anywhere() && !text.trim_ascii().is_empty();
            holds_tag && !ends_output(&rest[text.len() + tag.len()..]) || is_reasoning && is_late
        };
        let (text, next) = match next {
            Some((tag, marker)) if is_text(tag, marker) => {
                // It is text after all; what follows it is looked at next.
                self.at += text.len() + tag.len();
                self.at_start = false;
                out(OutputPart::Text(Text::from(
                    &rest[..text.len() + tag.len()],
                )));
                return true;
            }
            Some(_) if holds_tag => (text, None),
            next => (text, next),
        };
        self.at_start &= text.trim_ascii().is_empty();
        if !text.is_empty() {
            out(OutputPart::Text(Text::from(text)));
        }
        let Some((written, marker)) = next else {
            self.at += text.len();
            return false;
        };
        let written = written.to_owned();
        self.at += text.len() + written.len();
        let role = roles.iter().find(|(known, _)| *known == marker);
        let role = role.map_or(MarkerRole::Nothing, |(_, role)| *role);
        self.enter(format, role, marker, written);
        true
    }

    /// Begins what a marker in text begins.
    fn enter(&mut self, format: &OutputFormat, role: MarkerRole, marker: Marker, written: String) {
        match role {
            MarkerRole::Reasoning => {
                self.has_reasoned = true;
                self.state = ParserState::Label;
            }
            MarkerRole::Calls => {
                self.enter_calls(format.machine(marker), written, None);
            }
            MarkerRole::Header => self.enter_header(marker, &written),
            MarkerRole::Nothing => {}
        }
    }

    fn step_label(&mut self, format: &OutputFormat) -> bool {
        if let Some(label) = format.label() {
            let rest = &self.input[self.at..];
            if rest.starts_with(label) {
                self.at += label.len();
            } else if label.starts_with(rest) {
                return false;
            }
        }
        self.state = ParserState::Reasoning(ReasoningText::begun());
        true
    }

    fn step_reasoning(
        &mut self,
        format: &OutputFormat,
        mut reasoning: ReasoningText,
        out: Out<'_>,
    ) -> bool {
        if reasoning.after_marker && !self.skip_line_feeds() {
            return false;
        }
        reasoning.after_marker = false;
        let may_call = self.may_call(format);
        let rest = &self.input[self.at..];
        let found = find(rest, format.in_reasoning(may_call), &format.texts);
        let (Find::Marker { at: text, .. } | Find::None { safe: text }) = found;
        reasoning.emit(&rest[..text], out);
        let Find::Marker { at, end, marker } = found else {
            self.at += text;
            self.state = ParserState::Reasoning(reasoning);
            return false;
        };
        let written = rest[at..end].to_owned();
        let is_fresh = rest.len() - at <= self.fresh;
        self.at += end;
        if format.ends_reasoning(marker) {
            self.state = ParserState::Text { after_marker: true };
            if format.tags_response {
                self.response = ResponseTags::MayOpen;
            }
        } else if harmony::BORDERS.contains(&marker) {
            self.enter_header(marker, &written);
        } else if !may_call || !format.opens_calls(marker) {
            // A control token out of place.
            self.state = ParserState::Reasoning(reasoning);
        } else if format.is_unmistakable(marker) {
            self.enter_calls(format.machine(marker), written, Some(reasoning));
        } else if is_fresh && reasoning.is_line_blank() {
            let draft = DraftCalls::new(&self.settings, self.calls, reasoning);
            self.state = ParserState::Draft(Box::new(draft));
            self.read_again(&written);
        } else {
            reasoning.emit(&written, out);
            self.state = ParserState::Reasoning(reasoning);
        }
        true
    }

    fn step_draft(&mut self, format: &OutputFormat) -> bool {
        let ParserState::Draft(draft) = &mut self.state else {
            return false;
        };
        let mut rest = self.input[self.at..].char_indices();
        let Some((at, c)) = rest.find(|(_, c)| !draft.push(*c, format)) else {
            self.at = self.input.len();
            return false;
        };
        self.at += at + c.len_utf8();
        self.reject_draft(format);
        true
    }

    /// What was taken for calls is reasoning, and is read again as that. A call that broke off may end with the beginning of a marker, which
    /// was in no draft yet.
    fn reject_draft(&mut self, format: &OutputFormat) {
        if let ParserState::Draft(draft) = std::mem::replace(&mut self.state, ParserState::TEXT) {
            let is_broken = !draft.has_call();
            let (source, reasoning) = draft.into_source();
            let markers = format.in_reasoning(self.may_call(format));
            let begun = match is_broken {
                true => source.len() - begun_marker(&source, markers, &format.texts),
                false => 0,
            };
            self.fresh = self.input.len() - self.at + begun;
            self.read_again(&source);
            self.state = ParserState::Reasoning(reasoning);
        }
    }

    /// The end of the output: what may be calls are calls, if they are complete and the model stopped after them.
    fn end_draft(&mut self, format: &OutputFormat, end: OutputEnd, out: Out<'_>) {
        let ParserState::Draft(draft) = &mut self.state else {
            return;
        };
        if end == OutputEnd::Cut || !draft.end() {
            self.reject_draft(format);
            return self.feed("", format, out);
        }
        if let ParserState::Draft(draft) = std::mem::replace(&mut self.state, ParserState::TEXT) {
            draft.emit(out);
        }
    }

    /// A message of harmony ended, or begins.
    fn enter_header(&mut self, marker: Marker, written: &str) {
        let mut header = HarmonyHeader::default();
        if marker == harmony::CHANNEL || marker == harmony::START {
            header.marker(marker, written);
        }
        self.state = ParserState::Header(header);
    }

    fn step_header(&mut self, format: &OutputFormat, out: Out<'_>) -> bool {
        let ParserState::Header(header) = &mut self.state else {
            return false;
        };
        let rest = &self.input[self.at..];
        let found = find(rest, &harmony::HEADER, &format.texts);
        let (Find::Marker { at: text, .. } | Find::None { safe: text }) = found;
        let is_header = header.text(&rest[..text]);
        self.at += text;
        if !is_header {
            let source = std::mem::take(&mut header.source);
            self.state = ParserState::TEXT;
            emit_text(Text::from(format.texts.visible(source)), out);
            return true;
        }
        let Find::Marker { at, end, marker } = found else {
            return false;
        };
        let written = &rest[at..end];
        self.at += written.len();
        if marker != harmony::MESSAGE {
            // The end of a message without a header is no text either.
            header.marker(marker, written);
            return true;
        }
        let source = std::mem::take(&mut header.source) + written;
        let message = header.message(self.settings.tools.as_deref());
        self.state = ParserState::TEXT;
        match message {
            HarmonyMessage::Reasoning if format.finds_reasoning() => {
                self.state = ParserState::Reasoning(ReasoningText::in_message());
            }
            HarmonyMessage::Call(name) if call::is_tool_name(&name) && self.may_call(format) => {
                self.enter_calls(Box::new(HarmonyCall::new(name)), source, None);
            }
            HarmonyMessage::Call(_) => emit_text(Text::from(format.texts.visible(source)), out),
            HarmonyMessage::Reasoning | HarmonyMessage::Text => {}
        }
        true
    }

    /// Begins calls, in an answer or in reasoning.
    fn enter_calls(
        &mut self,
        machine: Box<dyn CallMachine>,
        source: String,
        reasoning: Option<ReasoningText>,
    ) {
        self.at_start = false;
        self.state = ParserState::Calls(Box::new(OpenCalls {
            machine,
            output: CallOutput::new(limits::TOOL_CALLS_MAX.saturating_sub(self.calls)),
            source,
            reasoning,
        }));
    }

    fn step_calls(&mut self, format: &OutputFormat, out: Out<'_>) -> bool {
        let ParserState::Calls(mut calls) = std::mem::replace(&mut self.state, ParserState::TEXT)
        else {
            return false;
        };
        let tools = self.settings.tools.clone().unwrap_or_default();
        let context = CallContext {
            texts: &format.texts,
            tools: &tools,
        };
        let before = calls.output.ended();
        let (taken, verdict) = calls.read(&self.input[self.at..], context);
        self.at += taken;
        self.calls += calls.output.ended() - before;
        calls.emit(out);
        match verdict {
            Verdict::Taken | Verdict::Settled => {
                self.state = ParserState::Calls(calls);
                return false;
            }
            Verdict::Last => self.state = ParserState::behind_calls(calls.reasoning),
            Verdict::Refused => {
                let markers = self.in_place(format, &calls);
                let begun = calls.take_open_marker(&markers, &format.texts);
                calls.give_back(format, out);
                // What was refused ended with no marker, whatever stood before it.
                self.state = calls
                    .reasoning
                    .map_or(ParserState::TEXT, ParserState::Reasoning);
                self.read_again(&begun);
            }
            Verdict::Over => {
                // White space, and what may have begun a marker: it is short.
                #[cfg(test)]
                work::add(calls.source.len());
                self.state = ParserState::behind_calls(calls.reasoning);
                self.read_again(&calls.source);
            }
        }
        true
    }

    /// The markers to look for where calls stand.
    fn in_place(&self, format: &OutputFormat, calls: &OpenCalls) -> Vec<Marker> {
        if calls.reasoning.is_some() {
            return format.in_reasoning(self.may_call(format)).to_vec();
        }
        let roles = self.in_text(format).iter();
        roles.map(|(marker, _)| *marker).collect()
    }

    /// Reads again, as text, what was taken last.
    fn read_again(&mut self, taken: &str) {
        match self.at.checked_sub(taken.len()) {
            Some(at) => self.at = at,
            None => {
                self.input.replace_range(..self.at, taken);
                self.at = 0;
            }
        }
    }

    /// The first character of what is to be parsed that is no white space; `None` if there is more of that than any call
    /// has before it.
    fn first_character(&self) -> Option<Option<char>> {
        let rest = &self.input[self.at..];
        let text = rest.trim_ascii_start();
        (rest.len() - text.len() <= BLANK_BYTES_MAX).then(|| text.chars().next())
    }

    /// Skips the tag that opens a response. `false` if it may still come.
    fn skip_response_tag(&mut self) -> bool {
        let rest = &self.input[self.at..];
        let tag = format::RESPONSE[0];
        if rest.starts_with(tag) {
            self.at += tag.len();
            self.response = ResponseTags::Open;
        } else if tag.starts_with(rest) {
            return false;
        } else {
            self.response = ResponseTags::None;
        }
        true
    }

    /// Skips line feeds. `false` if there is nothing else yet.
    fn skip_line_feeds(&mut self) -> bool {
        let rest = &self.input[self.at..];
        self.at += rest.len() - rest.trim_start_matches('\n').len();
        self.at < self.input.len()
    }
}

/// Whether nothing but some white space follows, so far.
fn ends_output(rest: &str) -> bool {
    rest.len() <= BLANK_BYTES_MAX && rest.trim_ascii().is_empty()
}

fn emit_text(text: Text, out: Out<'_>) {
    if !text.is_empty() {
        out(OutputPart::Text(text));
    }
}
