//! The messages of harmony, the format of gpt-oss: a header of channel and recipient before each, and no other markers.
//!
//! ```text
//!   <|start|>assistant<|channel|>analysis<|message|>..<|end|>
//!   <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
//!   <|start|>assistant<|channel|>final<|message|>..<|return|>
//! ```

use super::call::{CallContext, CallMachine, CallOutput, Verdict};
use super::json::JsonMachine;
use super::markers::Marker;
use super::tools::DeclaredTools;

pub(super) const START: Marker = "<|start|>";
pub(super) const CHANNEL: Marker = "<|channel|>";
pub(super) const CONSTRAIN: Marker = "<|constrain|>";
pub(super) const MESSAGE: Marker = "<|message|>";
/// What ends a message, or begins the next one.
pub(super) const BORDERS: [Marker; 5] = ["<|end|>", "<|return|>", "<|call|>", START, CHANNEL];
/// The markers of a header.
pub(super) const HEADER: [Marker; 7] = [
    START,
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    "<|end|>",
    "<|return|>",
    "<|call|>",
];

/// Bytes of a header; a real one has less than a hundred.
const HEADER_BYTES_MAX: usize = 512;

/// A header as far as it was read.
#[derive(Debug, Default)]
pub(super) struct HarmonyHeader {
    /// All of it, as the model wrote it.
    pub(super) source: String,
    /// What follows the marker of the channel, and all other text.
    channel: String,
    other: String,
    in_channel: bool,
    has_marker: bool,
}

/// What a message is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HarmonyMessage {
    Reasoning,
    Text,
    /// A call of this function.
    Call(String),
}

impl HarmonyHeader {
    /// Adds text. `false` if this is no header.
    #[must_use]
    pub(super) fn text(&mut self, text: &str) -> bool {
        self.source.push_str(text);
        if self.in_channel {
            self.channel.push_str(text);
        } else {
            self.other.push_str(text);
        }
        self.source.len() <= HEADER_BYTES_MAX && (self.has_marker || self.may_begin())
    }

    /// Whether the text so far may begin a header. Its first marker is in the prompt, so what a model without the format
    /// writes comes here as well.
    fn may_begin(&self) -> bool {
        let text = self.other.trim_start();
        ["to=", "assistant"]
            .iter()
            .any(|known| known.starts_with(text) || text.starts_with(known))
    }

    /// Adds a marker, with its text.
    pub(super) fn marker(&mut self, marker: Marker, text: &str) {
        self.source.push_str(text);
        self.has_marker = true;
        self.in_channel = marker == CHANNEL;
        if self.in_channel {
            self.channel.clear();
        } else {
            // The words before and after a marker are different ones.
            self.other.push(' ');
        }
    }

    /// Drops the text that is not the model's.
    pub(super) fn forget_source(&mut self) {
        self.source.clear();
        self.other.clear();
    }

    /// Whether nothing but white space was read.
    pub(super) fn is_blank(&self) -> bool {
        self.source.trim().is_empty()
    }

    /// Whether a marker was read.
    pub(super) fn has_marker(&self) -> bool {
        self.has_marker
    }

    /// What message follows. Only a caller that declares tools has any.
    pub(super) fn message(&self, tools: Option<&DeclaredTools>) -> HarmonyMessage {
        let words = self
            .channel
            .split_whitespace()
            .chain(self.other.split_whitespace());
        let recipient = words.clone().find_map(|word| word.strip_prefix("to="));
        let channel = self.channel.split_whitespace().next();
        let is_declared = |name: &str| tools.is_some_and(|tools| tools.has(name));
        let function = recipient.and_then(|name| match name.strip_prefix("functions.") {
            // The built-in tools are called while it reasons, and an answer goes to the user.
            None if matches!(channel, Some("analysis" | "final")) && !is_declared(name) => None,
            None => Some(name),
            function => function,
        });
        match function {
            Some(name) if !name.is_empty() => HarmonyMessage::Call(name.to_owned()),
            _ if channel == Some("analysis") => HarmonyMessage::Reasoning,
            _ => HarmonyMessage::Text,
        }
    }
}

/// A message that calls a function.
#[derive(Debug)]
pub(super) struct HarmonyCall {
    name: String,
    json: JsonMachine,
    begun: bool,
}

impl HarmonyCall {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            json: JsonMachine::default(),
            begun: false,
        }
    }
}

impl CallMachine for HarmonyCall {
    fn push(&mut self, c: char, _: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        if !self.begun {
            match c {
                '{' => {
                    self.begun = true;
                    out.begin(std::mem::take(&mut self.name), None);
                }
                _ if c.is_ascii_whitespace() => return Verdict::Taken,
                _ => return Verdict::Refused,
            }
        }
        if self.json.push(c).is_err() {
            return Verdict::Refused;
        }
        out.push(c);
        if !self.json.is_complete() {
            return Verdict::Taken;
        }
        match out.end() {
            Verdict::Taken => Verdict::Last,
            refused => refused,
        }
    }
}
