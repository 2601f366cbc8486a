//! What the machines of all call syntaxes have in common: their verdicts and what they emit.

use super::markers::MarkerTexts;
use super::tools::DeclaredTools;
use crate::limits;
use crate::tool_arguments::ToolArguments;

/// What a machine needs to know.
#[derive(Clone, Copy)]
pub(super) struct CallContext<'a> {
    pub(super) texts: &'a MarkerTexts,
    pub(super) tools: &'a DeclaredTools,
}

/// What a machine does with a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It belongs to the calls, and more may follow.
    Taken,
    /// It and what came since the last complete call are no part of the next one.
    Settled,
    /// It is the last one.
    Last,
    /// What came since the last complete call is no call but text, and this character is read as text.
    Refused,
    /// The calls ended with the last complete one: what came since is read again as text, and this character too.
    Over,
}

/// One part of a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CallPart {
    /// A call begins, with the id that the model gave it, if any.
    Begin { name: String, id: Option<String> },
    /// JSON text to append to its arguments.
    Arguments(String),
    /// It is complete; its whole arguments.
    End { arguments: ToolArguments },
}

/// The parts that a machine emits.
#[derive(Debug, Default)]
pub(super) struct CallOutput {
    parts: Vec<CallPart>,
    /// The arguments of the open call so far.
    arguments: String,
    open: bool,
    /// Calls that are complete.
    ended: usize,
    /// How many there may be, and whether one more began.
    calls_max: usize,
    is_full: bool,
    /// What was read of the next call when the last one ended.
    next: Option<String>,
}

impl CallOutput {
    /// Accepts so many calls.
    pub(super) fn new(calls_max: usize) -> Self {
        Self {
            calls_max,
            ..Self::default()
        }
    }

    /// Begins a call.
    pub(super) fn begin(&mut self, name: String, id: Option<String>) {
        self.is_full = self.ended >= self.calls_max;
        if self.is_full {
            return;
        }
        self.open = true;
        self.arguments.clear();
        self.parts.push(CallPart::Begin { name, id });
    }

    /// Appends to the arguments of the open call.
    pub(super) fn push(&mut self, c: char) {
        self.push_str(c.encode_utf8(&mut [0; 4]));
    }

    pub(super) fn push_str(&mut self, text: &str) {
        if self.is_full {
            return;
        }
        self.arguments.push_str(text);
        match self.parts.last_mut() {
            Some(CallPart::Arguments(last)) => last.push_str(text),
            _ => self.parts.push(CallPart::Arguments(text.to_owned())),
        }
    }

    /// Ends the open call, or refuses it if its arguments are no JSON after all: [`JsonMachine`] knows nothing of half
    /// surrogate pairs and of numbers that are too large.
    ///
    /// [`JsonMachine`]: super::json::JsonMachine
    #[must_use]
    pub(super) fn end(&mut self) -> Verdict {
        let Some(arguments) = ToolArguments::of_text(&self.arguments) else {
            return Verdict::Refused;
        };
        self.open = false;
        self.ended += 1;
        self.arguments.clear();
        self.parts.push(CallPart::End { arguments });
        Verdict::Taken
    }

    /// Ends the open call, whose own end is missing, where the next one begins. `read` is what was read of that before
    /// this character.
    #[must_use]
    pub(super) fn end_before(&mut self, read: String) -> Verdict {
        let verdict = self.end();
        if verdict == Verdict::Taken {
            self.next = Some(read);
        }
        verdict
    }

    /// Removes what was read of the next call when the last one ended, if it did not end by itself.
    pub(super) fn take_next(&mut self) -> Option<String> {
        self.next.take()
    }

    /// Whether a call has begun and not ended.
    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Whether one more call began than there may be. Nothing was emitted of it.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// The number of complete calls.
    pub(super) fn ended(&self) -> usize {
        self.ended
    }

    /// Removes all parts.
    pub(super) fn take(&mut self) -> Vec<CallPart> {
        std::mem::take(&mut self.parts)
    }
}

/// The syntax of one family.
pub(super) trait CallMachine: std::fmt::Debug + Send + Sync {
    /// Takes the next character.
    fn push(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict;
}

/// A name, up to what follows it. There may be white space around it.
#[derive(Debug, Default)]
pub(super) struct NameText(String);

impl NameText {
    /// Takes a character of a name; `false` if it can be in none.
    #[must_use]
    pub(super) fn push(&mut self, c: char) -> bool {
        let is_blank = c.is_ascii_whitespace();
        if self.0.is_empty() && is_blank {
            return true;
        }
        let has_ended = self.0.ends_with(|last: char| last.is_ascii_whitespace());
        self.0.push(c);
        (is_blank || is_name(c) && !has_ended) && self.0.len() <= limits::TOOL_NAME_BYTES
    }

    /// The name so far, without white space around it.
    pub(super) fn text(&self) -> &str {
        self.0.trim()
    }

    /// Takes the name, without white space around it; `None` if there is none.
    pub(super) fn take(&mut self) -> Option<String> {
        let name = std::mem::take(&mut self.0);
        let name = name.trim();
        (!name.is_empty()).then(|| name.to_owned())
    }
}

/// Whether this may be the name of a function.
pub(super) fn is_tool_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= limits::TOOL_NAME_BYTES && name.chars().all(is_name)
}

/// What names of functions and ids of calls consist of.
pub(super) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-' | ':' | '/')
}
