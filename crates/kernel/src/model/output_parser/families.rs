//! The families of models: the names of their parsers, what in a chat template tells a family, and how it writes calls
//! and reasoning.
//!
//! A family whose calls resemble those of another one is a row of [`calls`].

use serde::Deserialize;

use super::call::CallMachine;
use super::envelope::{EnvelopeCalls, EnvelopeSyntax};
use super::expression::{
    ExpressionCalls, ExpressionSyntax, FUNCTION_GEMMA, GEMMA, LFM2, LLAMA_PYTHON,
};
use super::harmony;
use super::markers::{DSML, MINIMAX, Marker};
use super::mistral::{self, MistralCalls};
use super::nested::{self, NestedCalls};
use super::section::{DEEPSEEK, KIMI, SOLAR_OPEN, SectionCalls, SectionSyntax};
use super::tagged::{
    DEEPSEEK_V4, DEEPSEEK_V32, GLM, HY_V3, KIMI_K3, MINICPM5, MINIMAX_M2, QWEN_CODER, TaggedCalls,
    TaggedSyntax,
};

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
    /// `<|python_tag|>{"name": .., "parameters": ..}`, also without the marker at the start of the output, or `[NAME(key='value')]` there if the
    /// template asks for it: Llama 3 and 4.
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
    /// `<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>`: Gemma 4, and FunctionGemma with markers of its own.
    #[serde(alias = "gemma4", alias = "functiongemma")]
    Gemma,
    /// `<|tool_call_start|>[NAME(key='value')]<|tool_call_end|>`: LFM2.
    Lfm2,
    /// `<｜DSML｜invoke name="NAME">` with `<｜DSML｜parameter name="KEY" string="true">`: DeepSeek V3.2 and V4.
    #[serde(alias = "deepseek_v4")]
    DeepseekV32,
    /// `<TOOLCALL>[{..}]</TOOLCALL>`: Nemotron Nano 2.
    #[serde(alias = "nemotron_nano_v2")]
    Nemotron,
    /// `<|START_ACTION|>[{"tool_name": .., "parameters": ..}]<|END_ACTION|>`: Command A and R7B; `Action: ```json` before such a list: Command R.
    #[serde(alias = "command_a", alias = "command_r7b")]
    Cohere,
    /// `<minimax:tool_call>` with `<invoke name="NAME">` and `<parameter name="KEY">`: MiniMax M2.
    MinimaxM2,
    /// `<|open|>call tool="NAME"<|sep|>` with `<|open|>argument key="KEY" type="TYPE"<|sep|>`: Kimi K3.
    KimiK3,
    /// `<tool_calls>[{..}]</tool_calls>`: Jamba, Apriel, MiniMax M1.
    #[serde(alias = "apriel", alias = "minimax_m1")]
    Jamba,
    /// `<tool_call:opensource>NAME<tool_sep:opensource>` with `<arg_key:opensource>` and `<arg_value:opensource>`: Hy3.
    HyV3,
    /// `<|tools_prefix|>[{"NAME": {..}}]<|tools_suffix|>`: Apertus.
    Apertus,
    /// `<function name="NAME"><param name="KEY">`: MiniCPM 5.
    Minicpm5,
    /// `function call<|role_sep|>{..}<|message_sep|>`: GigaChat 3; `<|function_call|>{..}<|message_sep|>`: GigaChat 3.1.
    Gigachat3,
    /// `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{..}<|tool_call:end|>`: Solar Open.
    SolarOpen,
    /// `]<]minimax[>[<invoke name="NAME">` with nested tags, each behind `]<]minimax[>[`: MiniMax M3.
    MinimaxM3,
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
    /// `<|channel>thought..<channel|>`: Gemma 4.
    #[serde(alias = "gemma4")]
    Gemma,
    /// `<|open|>think<|sep|>..<|close|>think<|sep|>`: Kimi K3.
    KimiK3,
    /// `<|think|>..<|end|>`: Solar Open.
    SolarOpen,
    /// `<think:opensource>..</think:opensource>`: Hy3.
    HyV3,
    /// `Here are my reasoning steps:..[BEGIN FINAL RESPONSE]`: Apriel 1.6, whose template writes the beginning.
    Apriel,
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
            Self::Gemma => "gemma",
            Self::Lfm2 => "lfm2",
            Self::DeepseekV32 => "deepseek_v32",
            Self::Nemotron => "nemotron",
            Self::Cohere => "cohere",
            Self::MinimaxM2 => "minimax_m2",
            Self::KimiK3 => "kimi_k3",
            Self::Jamba => "jamba",
            Self::HyV3 => "hy_v3",
            Self::Apertus => "apertus",
            Self::Minicpm5 => "minicpm5",
            Self::Gigachat3 => "gigachat3",
            Self::SolarOpen => "solar_open",
            Self::MinimaxM3 => "minimax_m3",
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
            Self::Gemma => "gemma",
            Self::KimiK3 => "kimi_k3",
            Self::SolarOpen => "solar_open",
            Self::HyV3 => "hy_v3",
            Self::Apriel => "apriel",
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
const FAMILY_MARKERS: [(&str, ToolParser); 30] = [
    (harmony::CHANNEL, ToolParser::Harmony),
    (DSML, ToolParser::DeepseekV32),
    (DEEPSEEK.section, ToolParser::Deepseek),
    ("<|open|>", ToolParser::KimiK3),
    (KIMI.section, ToolParser::Kimi),
    (mistral::CALLS, ToolParser::Mistral),
    (GEMMA.open, ToolParser::Gemma),
    (FUNCTION_GEMMA.open, ToolParser::Gemma),
    (LFM2.open, ToolParser::Lfm2),
    ("<|tool_list_start|>", ToolParser::Lfm2),
    // LFM2.5 prints neither the marker nor calls.
    ("List of tools: [", ToolParser::Lfm2),
    (TOOLCALL, ToolParser::Nemotron),
    (ACTION, ToolParser::Cohere),
    ("Action:\\n```json", ToolParser::Cohere),
    (MINIMAX_M2.call, ToolParser::MinimaxM2),
    (TOOL_CALLS, ToolParser::Jamba),
    (":opensource", ToolParser::HyV3),
    (TOOLS_PREFIX, ToolParser::Apertus),
    (MINICPM5.call, ToolParser::Minicpm5),
    ("<|role_sep|>", ToolParser::Gigachat3),
    (SOLAR_OPEN.call, ToolParser::SolarOpen),
    (MINIMAX, ToolParser::MinimaxM3),
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
        .find(|(_, sign, _)| template.contains(sign));
    known.map_or(ReasoningParser::Think, |(parser, ..)| *parser)
}

const CALL: Marker = "<tool_call>";
/// Kimi K3's.
const RESPONSE_OPEN: Marker = "<|open|>response<|sep|>";
const CALL_END: Marker = "</tool_call>";
const PYTHON: Marker = "<|python_tag|>";
const BAR_CALL: Marker = "<|tool_call|>";
const PHI_END: Marker = "<|/tool_call|>";
const TOOLCALL: Marker = "<TOOLCALL>";
const ACTION: Marker = "<|START_ACTION|>";
/// The template writes the first; models write all.
const ACTION_LINES: [Marker; 3] = ["Action:\n```json", "Action: ```json", "Action:```json"];
const TOOL_CALLS: Marker = "<tool_calls>";
const TOOLS_PREFIX: Marker = "<|tools_prefix|>";
const FUNCTION_CALL: Marker = "<|function_call|>";
const CALL_ROLE: Marker = "function call<|role_sep|>";
const FUNCTOOLS: Marker = "functools[";
/// What tells the markers around reasoning in a template, and the markers. The first that occurs decides; `<think>` is last,
/// because templates of the others remove it from answers.
const REASONING_MARKERS: &[(ReasoningParser, &str, (Marker, Marker))] = &[
    (ReasoningParser::Mistral, "[THINK]", ("[THINK]", "[/THINK]")),
    (
        ReasoningParser::Cohere,
        "<|START_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    (
        ReasoningParser::Seed,
        "<seed:think>",
        ("<seed:think>", "</seed:think>"),
    ),
    (
        ReasoningParser::Minimax,
        "<mm:think>",
        ("<mm:think>", "</mm:think>"),
    ),
    (
        ReasoningParser::Gemma,
        "<|channel>",
        ("<|channel>", "<channel|>"),
    ),
    (
        ReasoningParser::Apriel,
        "Here are my reasoning steps:",
        ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ),
    (
        ReasoningParser::SolarOpen,
        SOLAR_OPEN.call,
        ("<|think|>", "<|end|>"),
    ),
    // The templates of these put the tags together.
    (
        ReasoningParser::HyV3,
        ":opensource",
        ("<think:opensource>", "</think:opensource>"),
    ),
    (
        ReasoningParser::KimiK3,
        "<|open|>",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    (ReasoningParser::Think, "<think>", ("<think>", "</think>")),
];

/// How what follows an opening marker is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum CallSyntax {
    /// JSON objects with name and arguments.
    Objects(EnvelopeSyntax),
    /// A list of them, whose bracket belongs to the opening marker.
    List(EnvelopeSyntax),
    Mistral,
    Section(&'static SectionSyntax),
    Tagged(&'static TaggedSyntax),
    Nested,
    Expressions(&'static ExpressionSyntax),
}

impl CallSyntax {
    const fn closed_by(close: Marker) -> Self {
        Self::Objects(EnvelopeSyntax {
            close: Some(close),
            ..NEITHER
        })
    }

    /// The markers behind the opening one that may be control tokens.
    pub(super) fn markers(self) -> Vec<Marker> {
        match self {
            Self::Objects(syntax) | Self::List(syntax) => syntax.close.into_iter().collect(),
            Self::Mistral => vec![mistral::ARGUMENTS, mistral::CALL_ID],
            Self::Section(syntax) => syntax.markers().collect(),
            Self::Tagged(syntax) => syntax.markers().collect(),
            Self::Nested => nested::MARKERS.to_vec(),
            Self::Expressions(syntax) => syntax.markers().collect(),
        }
    }

    /// The machine for what follows this opening marker.
    pub(super) fn machine(self, opened_by: Marker) -> Box<dyn CallMachine> {
        match self {
            Self::Objects(syntax) => Box::new(EnvelopeCalls::new(syntax)),
            Self::List(syntax) => Box::new(EnvelopeCalls::in_list(syntax)),
            Self::Mistral => Box::new(MistralCalls::new()),
            Self::Section(syntax) => Box::new(SectionCalls::new(syntax, opened_by)),
            Self::Tagged(syntax) => Box::new(TaggedCalls::new(syntax, opened_by)),
            Self::Nested => Box::new(NestedCalls::new()),
            Self::Expressions(syntax) => Box::new(ExpressionCalls::new(syntax)),
        }
    }
}

/// The markers that open calls of a family, each with the syntax of what follows it. `python`: [`asks_for_python`].
pub(super) const fn calls(parser: ToolParser, python: bool) -> &'static [(Marker, CallSyntax)] {
    match parser {
        ToolParser::Auto | ToolParser::None | ToolParser::Harmony => &[],
        ToolParser::Hermes => &[(CALL, HERMES)],
        // Llama 4's own template has both markers before a JSON call, with nothing between them.
        ToolParser::Llama3 if !python => &[(PYTHON, CallSyntax::Objects(LLAMA))],
        ToolParser::Llama3 => &[
            (PYTHON, CallSyntax::Objects(LLAMA)),
            (LLAMA_PYTHON.open, CallSyntax::Expressions(&LLAMA_PYTHON)),
        ],
        ToolParser::Mistral => &[(mistral::CALLS, CallSyntax::Mistral)],
        ToolParser::Deepseek => &[
            (DEEPSEEK.section, CallSyntax::Section(&DEEPSEEK)),
            (DEEPSEEK.call, CallSyntax::Section(&DEEPSEEK)),
        ],
        ToolParser::Kimi => &[
            (KIMI.section, CallSyntax::Section(&KIMI)),
            (KIMI.call, CallSyntax::Section(&KIMI)),
        ],
        ToolParser::Glm => &[(CALL, CallSyntax::Tagged(&GLM))],
        ToolParser::Qwen3Coder => &[
            (CALL, CallSyntax::Tagged(&QWEN_CODER)),
            ("<function=", CallSyntax::Tagged(&QWEN_CODER)),
        ],
        ToolParser::Granite => &[(BAR_CALL, HERMES), (CALL, HERMES)],
        ToolParser::Phi4 => &[(BAR_CALL, PHI), (FUNCTOOLS, CallSyntax::List(NEITHER))],
        ToolParser::Gemma => &[
            (GEMMA.open, CallSyntax::Expressions(&GEMMA)),
            (
                FUNCTION_GEMMA.open,
                CallSyntax::Expressions(&FUNCTION_GEMMA),
            ),
        ],
        ToolParser::Lfm2 => &[(LFM2.open, CallSyntax::Expressions(&LFM2))],
        ToolParser::DeepseekV32 => &[
            (DEEPSEEK_V32.call, CallSyntax::Tagged(&DEEPSEEK_V32)),
            (DEEPSEEK_V4.call, CallSyntax::Tagged(&DEEPSEEK_V4)),
        ],
        ToolParser::Nemotron => &[(TOOLCALL, NEMOTRON)],
        ToolParser::Cohere => &[
            (ACTION, COHERE),
            (ACTION_LINES[0], COHERE_LINE),
            (ACTION_LINES[1], COHERE_LINE),
            (ACTION_LINES[2], COHERE_LINE),
        ],
        ToolParser::MinimaxM2 => &[(MINIMAX_M2.call, CallSyntax::Tagged(&MINIMAX_M2))],
        ToolParser::KimiK3 => &[
            (KIMI_K3.call, CallSyntax::Tagged(&KIMI_K3)),
            ("<|open|>call tool=\"", CallSyntax::Tagged(&KIMI_K3)),
        ],
        ToolParser::Jamba => &[(TOOL_CALLS, JAMBA)],
        ToolParser::HyV3 => &[(HY_V3.call, CallSyntax::Tagged(&HY_V3))],
        ToolParser::Apertus => &[(TOOLS_PREFIX, APERTUS)],
        ToolParser::Minicpm5 => &[(MINICPM5.call, CallSyntax::Tagged(&MINICPM5))],
        ToolParser::Gigachat3 => &[(CALL_ROLE, GIGACHAT), (FUNCTION_CALL, GIGACHAT)],
        ToolParser::SolarOpen => &[
            (SOLAR_OPEN.section, CallSyntax::Section(&SOLAR_OPEN)),
            (SOLAR_OPEN.call, CallSyntax::Section(&SOLAR_OPEN)),
        ],
        ToolParser::MinimaxM3 => &[(nested::OPEN, CallSyntax::Nested)],
    }
}

/// The markers around the reasoning of a family.
pub(super) fn think(parser: ReasoningParser) -> Option<(Marker, Marker)> {
    let mut known = REASONING_MARKERS.iter();
    let found = known.find(|(known, ..)| *known == parser);
    found.map(|(.., markers)| *markers)
}

/// The markers around what is neither reasoning nor a call. No reader needs to see one, whichever of the two is looked for.
pub(super) const fn hidden(parsers: OutputParsers) -> &'static [Marker] {
    match (parsers.tools, parsers.reasoning) {
        (ToolParser::KimiK3, _) | (_, ReasoningParser::KimiK3) => &[
            RESPONSE_OPEN,
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            // Where reasoning is text, and where it ends out of place.
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
        ],
        (ToolParser::SolarOpen, _) | (_, ReasoningParser::SolarOpen) => {
            &["<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>"]
        }
        _ => &[],
    }
}

/// Whether a template tells Llama to write its calls as a list of Python. Published ones have these words, and go on in several ways.
pub(super) fn asks_for_python(template: &str) -> bool {
    template.contains("[func_name1(")
}

/// What opens the answer, and ends the reasoning whose own end is missing.
pub(super) fn answer(parser: ReasoningParser) -> Option<Marker> {
    (parser == ReasoningParser::KimiK3).then_some(RESPONSE_OPEN)
}

/// What may stand between the opening marker and the reasoning.
pub(super) fn label(parser: ReasoningParser) -> Option<&'static str> {
    (parser == ReasoningParser::Gemma).then_some("thought\n")
}

const HERMES: CallSyntax = CallSyntax::closed_by(CALL_END);
const NEMOTRON: CallSyntax = CallSyntax::closed_by("</TOOLCALL>");
const COHERE: CallSyntax = CallSyntax::closed_by("<|END_ACTION|>");
const COHERE_LINE: CallSyntax = CallSyntax::closed_by("```");
const JAMBA: CallSyntax = CallSyntax::closed_by("</tool_calls>");
const APERTUS: CallSyntax = CallSyntax::Objects(EnvelopeSyntax {
    close: Some("<|tools_suffix|>"),
    between: None,
    keyed: true,
});
const GIGACHAT: CallSyntax = CallSyntax::closed_by("<|message_sep|>");
const PHI: CallSyntax = CallSyntax::closed_by(PHI_END);
pub(super) const LLAMA: EnvelopeSyntax = EnvelopeSyntax {
    close: None,
    between: Some(";"),
    keyed: false,
};
const NEITHER: EnvelopeSyntax = EnvelopeSyntax {
    close: None,
    between: None,
    keyed: false,
};
