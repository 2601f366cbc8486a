//! [`OutputFormat`]: how one model writes reasoning and calls: the syntax of its family, in the tokens of its vocabulary.

use std::sync::Arc;

use sapwood_engine::api::{MARK_OPEN, Vocabulary};
use sapwood_proto::steer::Token;

use super::call::CallMachine;
use super::envelope::EnvelopeCalls;
use super::expression::{ExpressionCalls, LLAMA_PYTHON};
use super::families::{self, CallSyntax, OutputParsers, ReasoningParser, ToolParser};
use super::harmony;
use super::markers::{Marker, MarkerTexts};

/// Granite puts these around what follows its reasoning.
pub(super) const RESPONSE: [Marker; 2] = ["<response>", "</response>"];

/// What a marker in text begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MarkerRole {
    Reasoning,
    Calls,
    /// A header of harmony.
    Header,
    /// Nothing that anybody needs to see.
    Nothing,
}

/// The format of one model: its parsers, and how its vocabulary writes their markers.
#[derive(Debug)]
pub(crate) struct OutputFormat {
    tools: ToolParser,
    reasoning: ReasoningParser,
    pub(super) texts: MarkerTexts,
    tokens: Arc<[Token]>,
    /// Markers to look for in text, for each value of "finds reasoning" and "finds calls".
    in_text: [[Vec<(Marker, MarkerRole)>; 2]; 2],
    /// Markers to look for in reasoning, for each value of "finds calls".
    in_reasoning: [Vec<Marker>; 2],
    /// What follows reasoning may stand between [`RESPONSE`].
    pub(super) tags_response: bool,
    /// A call without a marker may be an expression.
    python: bool,
}

impl OutputFormat {
    /// The format of a model with this vocabulary.
    pub(crate) fn new(parsers: OutputParsers, vocabulary: &dyn Vocabulary) -> Self {
        let template = vocabulary.chat_template().unwrap_or_default();
        let OutputParsers { tools, reasoning } = parsers.for_template(template);
        let mut format = Self {
            tools,
            reasoning,
            texts: MarkerTexts::default(),
            tokens: Arc::new([]),
            in_text: <[[Vec<(Marker, MarkerRole)>; 2]; 2]>::default(),
            in_reasoning: <[Vec<Marker>; 2]>::default(),
            tags_response: false,
            python: tools == ToolParser::Llama3 && families::asks_for_python(template),
        };
        let mut markers = format.call_markers();
        markers.extend(
            format
                .think()
                .into_iter()
                .flat_map(|(open, end)| [open, end]),
        );
        if format.is_harmony() {
            markers.extend(harmony::HEADER);
        }
        for marker in format.hidden() {
            if !markers.contains(marker) {
                markers.push(marker);
            }
        }
        let (texts, tokens) = MarkerTexts::find(markers, vocabulary);
        format.texts = texts;
        format.tokens = tokens.into();
        format.tags_response = tools == ToolParser::Granite
            && format.think().is_some()
            && template.contains(RESPONSE[0]);
        for (finds_reasoning, row) in [false, true].into_iter().zip(0..) {
            for (finds_calls, column) in [false, true].into_iter().zip(0..) {
                format.in_text[row][column] = format.roles(finds_reasoning, finds_calls);
            }
        }
        format.in_reasoning =
            [false, true].map(|finds_calls| format.ends_of_reasoning(finds_calls));
        format
    }

    /// The control tokens whose names the engine has to write into the text.
    pub(crate) fn tokens(&self) -> Arc<[Token]> {
        Arc::clone(&self.tokens)
    }

    /// Whether reasoning is found.
    pub(super) fn finds_reasoning(&self) -> bool {
        self.reasoning != ReasoningParser::None
    }

    /// Whether reasoning may begin behind an answer too. A marker that is no control token may be a word of the answer there,
    /// unless it is hidden from all readers.
    pub(super) fn reasons_anywhere(&self) -> bool {
        self.think()
            .is_some_and(|(open, _)| self.has_control(open) || self.hidden().contains(&open))
    }

    /// Whether an output has reasoning once or not at all: these markers are words that an answer may begin with.
    pub(super) fn reasons_once(&self) -> bool {
        self.reasoning == ReasoningParser::Apriel
    }

    /// Whether calls are found.
    pub(super) fn finds_calls(&self) -> bool {
        self.tools != ToolParser::None
    }

    /// Whether every text is a message with a header.
    pub(super) fn is_harmony(&self) -> bool {
        self.tools == ToolParser::Harmony || self.reasoning == ReasoningParser::Harmony
    }

    /// Whether a call may begin the output without a marker.
    pub(super) fn has_unmarked_calls(&self) -> bool {
        self.tools == ToolParser::Llama3
    }

    /// Whether calls have ids that the template prints again when they come back.
    pub(super) fn has_given_ids(&self) -> bool {
        matches!(self.tools, ToolParser::Mistral | ToolParser::Kimi)
    }

    /// Whether the ids of calls have nine letters: templates of Mistral refuse all others when they come back.
    pub(crate) fn has_short_ids(&self) -> bool {
        self.tools == ToolParser::Mistral
    }

    /// The markers around reasoning.
    pub(super) fn think(&self) -> Option<(Marker, Marker)> {
        families::think(self.reasoning)
    }

    /// The markers around what is neither reasoning nor a call.
    pub(super) fn hidden(&self) -> &'static [Marker] {
        families::hidden(OutputParsers {
            tools: self.tools,
            reasoning: self.reasoning,
        })
    }

    /// What may stand between the opening marker and the reasoning.
    pub(super) fn label(&self) -> Option<&'static str> {
        families::label(self.reasoning)
    }

    /// What to look for in text.
    pub(super) fn in_text(&self, reasoning: bool, calls: bool) -> &[(Marker, MarkerRole)] {
        &self.in_text[usize::from(reasoning)][usize::from(calls)]
    }

    /// What to look for in reasoning.
    pub(super) fn in_reasoning(&self, calls: bool) -> &[Marker] {
        &self.in_reasoning[usize::from(calls)]
    }

    /// Whether a marker ends reasoning, and an answer follows.
    pub(super) fn ends_reasoning(&self, marker: Marker) -> bool {
        let end = self.think().map(|(_, end)| end);
        end == Some(marker) || families::answer(self.reasoning) == Some(marker)
    }

    /// Whether a marker opens calls.
    pub(super) fn opens_calls(&self, marker: Marker) -> bool {
        let mut opening = self.rows().iter();
        opening.any(|(known, _)| *known == marker)
    }

    /// Whether no model writes a marker unless it means it: it is a control token, has one in it, or looks like one.
    pub(super) fn is_unmistakable(&self, marker: Marker) -> bool {
        self.has_control(marker) || marker.contains(['|', '｜'])
    }

    /// Whether there is a control token in a marker.
    fn has_control(&self, marker: Marker) -> bool {
        self.texts.text(marker).contains(MARK_OPEN)
    }

    /// What ends reasoning, and what has no place in it.
    fn ends_of_reasoning(&self, calls: bool) -> Vec<Marker> {
        let mut markers = if self.is_harmony() {
            harmony::BORDERS.to_vec()
        } else {
            let end = self.think().map(|(_, end)| end);
            end.into_iter()
                .chain(families::answer(self.reasoning))
                .collect()
        };
        let opening = self.rows().iter().filter(|_| calls);
        let opening = opening.map(|(marker, _)| *marker);
        for marker in opening.chain(self.texts.controls()) {
            if !markers.contains(&marker) {
                markers.push(marker);
            }
        }
        markers
    }

    fn roles(&self, reasoning: bool, calls: bool) -> Vec<(Marker, MarkerRole)> {
        let mut roles: Vec<(Marker, MarkerRole)> = Vec::new();
        if self.is_harmony() {
            roles.extend(harmony::BORDERS.map(|marker| (marker, MarkerRole::Header)));
        }
        if calls {
            let opening = self.rows().iter();
            roles.extend(opening.map(|(marker, _)| (*marker, MarkerRole::Calls)));
        }
        let think = self.think().filter(|_| reasoning);
        roles.extend(think.map(|(open, _)| (open, MarkerRole::Reasoning)));
        // Control tokens out of place: they were never text. A marker that begins with one comes before it.
        let hidden = self.hidden().iter().copied();
        for marker in hidden.chain(self.texts.controls()) {
            if roles.iter().all(|(known, _)| *known != marker) {
                roles.push((marker, MarkerRole::Nothing));
            }
        }
        roles
    }

    /// The markers that open calls, each with the syntax of what follows it.
    fn rows(&self) -> &'static [(Marker, CallSyntax)] {
        families::calls(self.tools, self.python)
    }

    /// All markers of calls.
    fn call_markers(&self) -> Vec<Marker> {
        let rows = self.rows();
        let opening = rows.iter().map(|(marker, _)| *marker);
        let more = rows.iter().flat_map(|(_, syntax)| syntax.markers());
        let mut all: Vec<Marker> = Vec::new();
        for marker in opening.chain(more) {
            if !all.contains(&marker) {
                all.push(marker);
            }
        }
        all
    }

    /// The machine for what follows this opening marker.
    pub(super) fn machine(&self, opened_by: Marker) -> Box<dyn CallMachine> {
        let mut rows = self.rows().iter();
        let row = rows.find(|(marker, _)| *marker == opened_by);
        row.map_or_else(
            || Box::new(EnvelopeCalls::unmarked(families::LLAMA)) as Box<dyn CallMachine>,
            |(_, syntax)| syntax.machine(opened_by),
        )
    }

    /// The machine for calls without a marker that begin with this character; `None` if none do.
    pub(super) fn unmarked_machine(&self, first: char) -> Option<Box<dyn CallMachine>> {
        match first {
            '{' => Some(Box::new(EnvelopeCalls::unmarked(families::LLAMA))),
            '[' if self.python => Some(Box::new(ExpressionCalls::unmarked(&LLAMA_PYTHON))),
            _ => None,
        }
    }
}
