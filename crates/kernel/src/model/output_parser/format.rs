//! [`OutputFormat`]: how a model writes reasoning and calls. It is chosen by the model's chat template, or configured.

use std::sync::Arc;

use sapwood_engine::api::Vocabulary;
use sapwood_proto::steer::Token;
use serde::Deserialize;

use super::call::CallMachine;
use super::envelope::{EnvelopeCalls, EnvelopeSyntax};
use super::harmony;
use super::markers::{Marker, MarkerTexts};
use super::mistral::{self, MistralCalls};
use super::section::{DEEPSEEK, KIMI, SectionCalls};
use super::tagged::{GLM, QWEN_CODER, TaggedCalls};

/// How calls of tools are found in the output of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolParser {
    /// By the markers in the model's chat template; [`ToolParser::Hermes`] if it has none that are known.
    #[default]
    Auto,
    /// Not at all: they are text.
    None,
    /// `<tool_call>{"name": .., "arguments": ..}</tool_call>`: ChatML, Hermes, Qwen 2.5 and Qwen 3.
    Hermes,
    /// `<|python_tag|>{"name": .., "parameters": ..}`, also without the marker at the start of the output: Llama 3 and 4.
    #[serde(alias = "llama3_json", alias = "llama4_json")]
    Llama3,
    /// `[TOOL_CALLS][{..}]` and `[TOOL_CALLS]NAME[ARGS]{..}`: Mistral.
    Mistral,
    /// Messages on the channel `commentary` to `functions.NAME`: gpt-oss.
    #[serde(alias = "openai", alias = "gpt_oss")]
    Harmony,
    /// `<｜tool▁calls▁begin｜>`: DeepSeek R1, V3 and V3.1.
    #[serde(alias = "deepseek_v3", alias = "deepseek_v31")]
    Deepseek,
    /// `<|tool_calls_section_begin|>`: Kimi K2.
    #[serde(alias = "kimi_k2")]
    Kimi,
    /// `<tool_call>NAME` with `<arg_key>` and `<arg_value>`: GLM 4.5.
    #[serde(alias = "glm4", alias = "glm45")]
    Glm,
    /// `<function=NAME>` with `<parameter=NAME>`: Qwen3-Coder.
    #[serde(alias = "qwen3_coder_xml", alias = "qwen3_xml")]
    Qwen3Coder,
    /// `<|tool_call|>[{..}]`: Granite 3.
    Granite,
    /// `<|tool_call|>[{..}]<|/tool_call|>` and `functools[{..}]`: Phi-4.
    #[serde(alias = "phi4_mini_json")]
    Phi4,
}

/// How reasoning is found in the output of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningParser {
    /// By the markers in the model's chat template; [`ReasoningParser::Think`] if it has none that are known.
    #[default]
    Auto,
    /// Not at all: it is text.
    None,
    /// `<think>..</think>`.
    #[serde(
        alias = "deepseek",
        alias = "deepseek_r1",
        alias = "qwen3",
        alias = "glm45",
        alias = "granite"
    )]
    Think,
    /// `[THINK]..[/THINK]`: Magistral.
    Mistral,
    /// Messages on the channel `analysis`: gpt-oss.
    #[serde(alias = "openai_gptoss", alias = "gpt_oss")]
    Harmony,
    /// `<|START_THINKING|>..<|END_THINKING|>`: Command A and R7B.
    #[serde(alias = "command_a")]
    Cohere,
    /// `<seed:think>..</seed:think>`: Seed-OSS.
    #[serde(alias = "seed_oss")]
    Seed,
    /// `<mm:think>..</mm:think>`: MiniMax M3.
    #[serde(alias = "minimax_m3")]
    Minimax,
}

impl ToolParser {
    /// The name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::None => "none",
            Self::Hermes => "hermes",
            Self::Llama3 => "llama3",
            Self::Mistral => "mistral",
            Self::Harmony => "harmony",
            Self::Deepseek => "deepseek",
            Self::Kimi => "kimi",
            Self::Glm => "glm",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Granite => "granite",
            Self::Phi4 => "phi4",
        }
    }
}

impl ReasoningParser {
    /// The name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::None => "none",
            Self::Think => "think",
            Self::Mistral => "mistral",
            Self::Harmony => "harmony",
            Self::Cohere => "cohere",
            Self::Seed => "seed",
            Self::Minimax => "minimax",
        }
    }
}

/// The parsers of a model's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputParsers {
    /// For calls of tools.
    pub tools: ToolParser,
    /// For reasoning. The headers of harmony are read if either of the two is harmony.
    pub reasoning: ReasoningParser,
}

impl OutputParsers {
    /// Returns these with `Auto` replaced by what the markers in a template tell.
    #[must_use]
    pub fn for_template(self, template: &str) -> Self {
        Self {
            tools: match self.tools {
                ToolParser::Auto => tools_of(template),
                chosen => chosen,
            },
            reasoning: match self.reasoning {
                ReasoningParser::Auto => reasoning_of(template),
                chosen => chosen,
            },
        }
    }
}

/// Markers that only one family has; the first that occurs decides.
const FAMILY_MARKERS: [(&str, ToolParser); 12] = [
    (harmony::CHANNEL, ToolParser::Harmony),
    (DEEPSEEK.section, ToolParser::Deepseek),
    (KIMI.section, ToolParser::Kimi),
    (mistral::CALLS, ToolParser::Mistral),
    ("<arg_key>", ToolParser::Glm),
    ("<function=", ToolParser::Qwen3Coder),
    (FUNCTOOLS, ToolParser::Phi4),
    (PHI_END, ToolParser::Phi4),
    (BAR_CALL, ToolParser::Granite),
    (CALL, ToolParser::Hermes),
    // Last: the templates of other families are derived from these, and keep their headers.
    ("<|start_header_id|>", ToolParser::Llama3),
    ("<|header_start|>", ToolParser::Llama3),
];

fn tools_of(template: &str) -> ToolParser {
    let known = FAMILY_MARKERS
        .iter()
        .find(|(marker, _)| template.contains(marker));
    known.map_or(ToolParser::Hermes, |(_, parser)| *parser)
}

fn reasoning_of(template: &str) -> ReasoningParser {
    if template.contains(harmony::CHANNEL) {
        return ReasoningParser::Harmony;
    }
    let known = REASONING_MARKERS
        .iter()
        .find(|(_, (open, _))| template.contains(open));
    known.map_or(ReasoningParser::Think, |(parser, _)| *parser)
}

const CALL: Marker = "<tool_call>";
const CALL_END: Marker = "</tool_call>";
const PYTHON: Marker = "<|python_tag|>";
const BAR_CALL: Marker = "<|tool_call|>";
const PHI_END: Marker = "<|/tool_call|>";
const FUNCTOOLS: Marker = "functools[";
/// The markers around reasoning. The first that occurs in a template decides; `<think>` is last, because templates of the
/// others remove it from answers.
const REASONING_MARKERS: [(ReasoningParser, (Marker, Marker)); 5] = [
    (ReasoningParser::Mistral, ("[THINK]", "[/THINK]")),
    (
        ReasoningParser::Cohere,
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    (ReasoningParser::Seed, ("<seed:think>", "</seed:think>")),
    (ReasoningParser::Minimax, ("<mm:think>", "</mm:think>")),
    (ReasoningParser::Think, ("<think>", "</think>")),
];
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
    /// Markers to look for in reasoning.
    pub(super) in_reasoning: Vec<Marker>,
    /// What follows reasoning may stand between [`RESPONSE`].
    pub(super) tags_response: bool,
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
            in_reasoning: Vec::new(),
            tags_response: false,
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
        format.in_reasoning = if format.is_harmony() {
            harmony::BORDERS.to_vec()
        } else {
            format.think().into_iter().map(|(_, end)| end).collect()
        };
        let hidden: Vec<Marker> = format.texts.controls().collect();
        let missing = hidden
            .into_iter()
            .filter(|marker| !format.in_reasoning.contains(marker));
        let missing: Vec<Marker> = missing.collect();
        format.in_reasoning.extend(missing);
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
        let mut known = REASONING_MARKERS.iter();
        let found = known.find(|(parser, _)| *parser == self.reasoning);
        found.map(|(_, markers)| *markers)
    }

    /// What to look for in text.
    pub(super) fn in_text(&self, reasoning: bool, calls: bool) -> &[(Marker, MarkerRole)] {
        &self.in_text[usize::from(reasoning)][usize::from(calls)]
    }

    fn roles(&self, reasoning: bool, calls: bool) -> Vec<(Marker, MarkerRole)> {
        let mut roles: Vec<(Marker, MarkerRole)> = Vec::new();
        if self.is_harmony() {
            roles.extend(harmony::BORDERS.map(|marker| (marker, MarkerRole::Header)));
        }
        if calls {
            let opening = self.opening().iter();
            roles.extend(opening.map(|marker| (*marker, MarkerRole::Calls)));
        }
        let think = self.think().filter(|_| reasoning);
        roles.extend(think.map(|(open, _)| (open, MarkerRole::Reasoning)));
        // Control tokens out of place: they were never text.
        for marker in self.texts.controls() {
            if roles.iter().all(|(known, _)| *known != marker) {
                roles.push((marker, MarkerRole::Nothing));
            }
        }
        roles
    }

    /// The markers that open calls.
    fn opening(&self) -> &'static [Marker] {
        match self.tools {
            ToolParser::Hermes | ToolParser::Glm => &[CALL],
            ToolParser::Llama3 => &[PYTHON],
            ToolParser::Mistral => &[mistral::CALLS],
            ToolParser::Deepseek => &[DEEPSEEK.section, DEEPSEEK.call],
            ToolParser::Kimi => &[KIMI.section, KIMI.call],
            ToolParser::Qwen3Coder => &[CALL, "<function="],
            ToolParser::Granite => &[BAR_CALL, CALL],
            ToolParser::Phi4 => &[BAR_CALL, FUNCTOOLS],
            ToolParser::Auto | ToolParser::None | ToolParser::Harmony => &[],
        }
    }

    /// All markers of calls.
    fn call_markers(&self) -> Vec<Marker> {
        let more = match self.tools {
            ToolParser::Hermes | ToolParser::Granite => vec![CALL_END],
            ToolParser::Mistral => vec![mistral::ARGUMENTS, mistral::CALL_ID],
            ToolParser::Deepseek => DEEPSEEK.markers()[2..].to_vec(),
            ToolParser::Kimi => KIMI.markers()[2..].to_vec(),
            ToolParser::Glm => GLM.markers().collect(),
            ToolParser::Qwen3Coder => QWEN_CODER.markers().collect(),
            ToolParser::Phi4 => vec![PHI_END],
            _ => Vec::new(),
        };
        let mut all = self.opening().to_vec();
        for marker in more {
            if !all.contains(&marker) {
                all.push(marker);
            }
        }
        all
    }

    /// The machine for what follows this opening marker.
    pub(super) fn machine(&self, opened_by: Marker) -> Box<dyn CallMachine> {
        let closed_by = |close| EnvelopeSyntax {
            close: Some(close),
            between: None,
        };
        match self.tools {
            ToolParser::Llama3 => Box::new(EnvelopeCalls::new(LLAMA)),
            ToolParser::Mistral => Box::new(MistralCalls::new()),
            ToolParser::Deepseek => Box::new(SectionCalls::new(&DEEPSEEK, opened_by)),
            ToolParser::Kimi => Box::new(SectionCalls::new(&KIMI, opened_by)),
            ToolParser::Glm => Box::new(TaggedCalls::new(&GLM, opened_by)),
            ToolParser::Qwen3Coder => Box::new(TaggedCalls::new(&QWEN_CODER, opened_by)),
            ToolParser::Phi4 if opened_by == FUNCTOOLS => {
                Box::new(EnvelopeCalls::in_list(EnvelopeSyntax::default()))
            }
            ToolParser::Phi4 => Box::new(EnvelopeCalls::new(closed_by(PHI_END))),
            _ => Box::new(EnvelopeCalls::new(closed_by(CALL_END))),
        }
    }

    /// The machine for calls without a marker.
    pub(super) fn unmarked_machine(&self) -> Box<dyn CallMachine> {
        Box::new(EnvelopeCalls::unmarked(LLAMA))
    }
}

const LLAMA: EnvelopeSyntax = EnvelopeSyntax {
    close: None,
    between: Some(";"),
};
