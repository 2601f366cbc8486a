//! Fuzz entry point: any text as the output of a model, for each family. Built for tests and fuzzing only.

use std::sync::{Arc, LazyLock};

use sapwood_engine::api::{
    ChatRequest, EngineError, MARK_CLOSE, MARK_OPEN, SharedVocabulary, Vocabulary,
};
use sapwood_proto::steer::Token;
use serde_json::{Value, json};

use super::markers::PARTS;
use super::{
    DeclaredTools, OutputEnd, OutputFormat, OutputParser, OutputParsers, OutputPart,
    OutputSettings, OutputStart, ReasoningParser, ToolParser,
};
use crate::chunk::Text;

/// All parsers but `auto`.
pub(super) const TOOL_PARSERS: [ToolParser; 25] = [
    ToolParser::None,
    ToolParser::Hermes,
    ToolParser::Llama3,
    ToolParser::Mistral,
    ToolParser::Harmony,
    ToolParser::Deepseek,
    ToolParser::Kimi,
    ToolParser::Glm,
    ToolParser::Qwen3Coder,
    ToolParser::Granite,
    ToolParser::Phi4,
    ToolParser::Gemma,
    ToolParser::Lfm2,
    ToolParser::DeepseekV32,
    ToolParser::Nemotron,
    ToolParser::Cohere,
    ToolParser::MinimaxM2,
    ToolParser::KimiK3,
    ToolParser::Jamba,
    ToolParser::HyV3,
    ToolParser::Apertus,
    ToolParser::Minicpm5,
    ToolParser::Gigachat3,
    ToolParser::SolarOpen,
    ToolParser::MinimaxM3,
];

/// A vocabulary of nothing but control tokens with these names.
#[derive(Debug, Default)]
pub(in crate::model) struct ControlNames {
    pub(in crate::model) names: Vec<&'static str>,
    pub(in crate::model) template: Option<String>,
}

impl Vocabulary for ControlNames {
    fn size(&self) -> usize {
        self.names.len()
    }

    fn tokenize(&self, text: &str, special: bool) -> Vec<Token> {
        let named = self.names.iter().position(|name| special && *name == text);
        // A hundred names at most.
        named.map(|at| at as Token).into_iter().collect()
    }

    fn bytes(&self, _: Token) -> &[u8] {
        &[]
    }

    fn is_special(&self, _: Token) -> bool {
        true
    }

    fn name(&self, token: Token) -> Option<String> {
        self.names
            .get(token as usize)
            .map(|name| (*name).to_owned())
    }

    fn is_end(&self, token: Token) -> bool {
        self.name(token).as_deref() == Some("<|call|>")
    }

    fn bos(&self) -> Option<Token> {
        None
    }

    fn end_of_turn(&self) -> Option<Token> {
        None
    }

    fn chat_template(&self) -> Option<&str> {
        self.template.as_deref()
    }

    fn chat(&self, _: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        Ok(Vec::new())
    }
}

/// The tools of the tests.
pub(super) fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "add", "parameters": {"properties": {
            "a": {"type": "integer"}, "b": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "note", "parameters": {"properties": {
            "text": {"type": "string"}, "tags": {"type": "array"}}}}},
    ])
}

/// The parser of the reasoning that models with this parser of calls write.
pub(super) const fn reasoning_beside(tools: ToolParser) -> ReasoningParser {
    match tools {
        ToolParser::None => ReasoningParser::None,
        ToolParser::Mistral => ReasoningParser::Mistral,
        ToolParser::Harmony => ReasoningParser::Harmony,
        ToolParser::Gemma => ReasoningParser::Gemma,
        ToolParser::MinimaxM3 => ReasoningParser::Minimax,
        ToolParser::SolarOpen => ReasoningParser::SolarOpen,
        ToolParser::HyV3 => ReasoningParser::HyV3,
        ToolParser::KimiK3 => ReasoningParser::KimiK3,
        ToolParser::Cohere => ReasoningParser::Cohere,
        _ => ReasoningParser::Think,
    }
}

/// Settings of a model with a vocabulary.
pub(super) fn settings(parsers: OutputParsers, vocabulary: &dyn Vocabulary) -> OutputSettings {
    OutputSettings {
        format: Some(Arc::new(OutputFormat::new(parsers, vocabulary))),
        tools: Some(Arc::new(DeclaredTools::of(&tools()))),
        start: OutputStart::Text,
        ..OutputSettings::default()
    }
}

/// The events of an output that the model ended.
pub(super) fn events(settings: &OutputSettings, pieces: &[&str]) -> Vec<(char, String)> {
    events_until(settings, pieces, OutputEnd::Model)
}

/// The events of pieces, with adjacent ones of one kind joined: where text is cut carries no meaning.
pub(super) fn events_until(
    settings: &OutputSettings,
    pieces: &[&str],
    end: OutputEnd,
) -> Vec<(char, String)> {
    let mut found: Vec<(char, String)> = Vec::new();
    let mut out = |part: OutputPart| {
        let (kind, text) = match part {
            OutputPart::Text(text) => ('t', text.to_string()),
            OutputPart::Reasoning(text) => ('r', text.to_string()),
            OutputPart::CallBegin { name, id } => (
                'c',
                [Some(name), id]
                    .into_iter()
                    .flatten()
                    .collect::<Vec<_>>()
                    .join("#"),
            ),
            OutputPart::CallArguments(json) => ('a', json),
            OutputPart::CallEnd { arguments } => ('e', arguments.to_string()),
            OutputPart::CallBroken { source } => ('b', source),
        };
        match found.last_mut() {
            Some((last, joined)) if *last == kind && matches!(kind, 't' | 'r' | 'a') => {
                joined.push_str(&text);
            }
            _ => found.push((kind, text)),
        }
    };
    let mut parser = OutputParser::new(settings.clone());
    for piece in pieces {
        parser.push(Text::from(*piece), &mut out);
    }
    parser.end(end, &mut out);
    found
}

/// Texts that inputs are made of: the markers of all families, and what stands between them.
const PIECES: [&str; 50] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<function=",
    "<parameter=",
    "</parameter>",
    "</function>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "functools[",
    "add",
    "functions.add:0",
    "{",
    "{\"name\": \"add\", \"arguments\": {\"a\": 1}}",
    "{\"a\": \"}\\\"\"}",
    "analysis",
    "commentary to=functions.add ",
    "```json\n",
    "\n",
    ">",
    "é; ",
    "<response>",
    "</response>",
];

/// What stands between the markers of the families that [`PIECES`] has not.
const FRAGMENTS: [&str; 16] = [
    "call:add",
    "add(",
    "{a:1",
    "a=1",
    "a='it",
    "'",
    "\"",
    "}",
    ")",
    "[",
    "]",
    ",",
    ": ",
    "\">",
    "\" string=\"true",
    "note",
];

/// The [`FRAGMENTS`], and the markers between which they stand.
static MORE_PIECES: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
    let mut pieces = FRAGMENTS.to_vec();
    for tools in TOOL_PARSERS {
        let parsers = OutputParsers {
            tools,
            reasoning: reasoning_beside(tools),
        };
        let format = OutputFormat::new(parsers, &ControlNames::default());
        for marker in format.texts.names() {
            if !PIECES.contains(&marker) && !pieces.contains(&marker) {
                pieces.push(marker);
            }
        }
    }
    assert!(pieces.len() <= 128, "a byte chooses one");
    pieces
});

/// Whether a marker may be a token: one with a token in it is none itself, nor is a fence.
pub(super) fn is_token(marker: &&'static str) -> bool {
    let mut parts = PARTS.iter();
    !marker.contains("```") && parts.all(|part| marker == part || !marker.contains(part))
}

/// One format with control tokens, and one without, of each family.
static FAMILIES: LazyLock<Vec<OutputSettings>> = LazyLock::new(|| {
    // The tags of Granite, which the other families ignore.
    let template = || Some("<response>".to_owned());
    let more = &MORE_PIECES[FRAGMENTS.len()..];
    let more: Vec<&str> = more.iter().copied().filter(is_token).collect();
    let controls = ControlNames {
        names: [&PIECES[..37], &more].concat(),
        template: template(),
    };
    let none = ControlNames {
        names: Vec::new(),
        template: template(),
    };
    let vocabularies: [SharedVocabulary; 2] = [Arc::new(controls), Arc::new(none)];
    let all = vocabularies.iter().flat_map(|vocabulary| {
        TOOL_PARSERS.map(|tools| {
            let reasoning = reasoning_beside(tools);
            settings(OutputParsers { tools, reasoning }, &**vocabulary)
        })
    });
    all.collect()
});

/// Parses an output of each family, in one piece and in many: each byte is one of the texts above, a letter or, from 64 on,
/// a control token, and those from 128 on cut the text. After one whose low six bits are all set, the next byte is one of
/// the further texts or, from 128 on, a control token.
///
/// # Panics
/// If an invariant does not hold.
pub(crate) fn output(bytes: &[u8]) {
    let mut pieces = vec![String::new()];
    let mut bytes = bytes.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte >= 128 {
            pieces.push(String::new());
        }
        let at = usize::from(byte % 64);
        let marked = |marker: &str| format!("{MARK_OPEN}{marker}{MARK_CLOSE}");
        let more = if at == 63 { bytes.next() } else { None };
        let piece = if let Some(more) = more {
            let at = usize::from(more % 128) % MORE_PIECES.len();
            match MORE_PIECES[at] {
                marker if more >= 128 && at >= FRAGMENTS.len() => marked(marker),
                piece => piece.to_owned(),
            }
        } else {
            match PIECES.get(at) {
                Some(marker) if (64..128).contains(&byte) && at < 37 => marked(marker),
                Some(piece) => (*piece).to_owned(),
                None => char::from(byte).to_string(),
            }
        };
        let last = pieces.len() - 1;
        pieces[last].push_str(&piece);
    }
    for settings in FAMILIES.iter() {
        check_cuts(settings, &pieces);
    }
}

/// An output is the same in one piece, in these and in letters; its calls are whole, and nothing is lost or doubled.
pub(super) fn check_cuts(settings: &OutputSettings, pieces: &[String]) {
    let whole = pieces.concat();
    let each: Vec<String> = whole.chars().map(String::from).collect();
    let expect = events(settings, &[&whole]);
    for cut in [pieces, &each] {
        let cut: Vec<&str> = cut.iter().map(String::as_str).collect();
        assert_eq!(events(settings, &cut), expect, "cut into {cut:?}");
    }
    check(&expect, &whole);
    check_loss(settings, &expect, &whole);
    // Where something else ended it, too.
    let cut = events_until(settings, &[&whole], OutputEnd::Cut);
    check(&cut, &whole);
    check_loss(settings, &cut, &whole);
}

/// Calls are whole, and nothing comes out that was not there.
fn check(events: &[(char, String)], whole: &str) {
    let mut open = None;
    for (kind, text) in events {
        match (kind, &mut open) {
            ('c', None) => open = Some(String::new()),
            ('a', Some(arguments)) => arguments.push_str(text),
            ('e', Some(arguments)) => {
                let read: Value = serde_json::from_str(arguments).expect("arguments are JSON");
                let end: Value = serde_json::from_str(text).expect("arguments are JSON");
                assert_eq!(read, end);
                assert!(!text.contains('\n'), "it is one line: {text}");
                open = None;
            }
            ('b', Some(_)) => open = None,
            ('t' | 'r', None) => {}
            _ => panic!("{kind} {text:?} is out of order"),
        }
    }
    assert!(open.is_none(), "a call has no end");
    let bytes: usize = events
        .iter()
        .filter(|(kind, _)| matches!(kind, 't' | 'r' | 'b'))
        .map(|(_, text)| text.len())
        .sum();
    assert!(bytes <= whole.len(), "text was doubled");
}

/// An output without reasoning and calls is text, all of it, and names of control tokens are no text.
fn check_loss(settings: &OutputSettings, events: &[(char, String)], whole: &str) {
    let Some(format) = &settings.format else {
        return;
    };
    let opens = format.think().map(|(open, _)| format.texts.text(open));
    // Harmony drops headers, and an empty section of calls is none of the text.
    let mut hidden = format.hidden().iter();
    let is_exempt = format.is_harmony()
        || hidden.any(|marker| whole.contains(format.texts.text(marker)))
        || opens.is_some_and(|open| whole.contains(open))
        || events.iter().any(|(kind, _)| *kind == 'c')
        || whole.contains("calls_section_end")
        || whole.contains("calls▁end")
        || whole.contains("<|calls|>");
    if is_exempt {
        return;
    }
    let text: String = events.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(
        text,
        format.texts.visible(whole.to_owned()),
        "text was lost"
    );
}
