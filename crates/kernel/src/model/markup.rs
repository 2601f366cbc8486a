//! Finds reasoning and tool calls in a model's text (D-10).
//!
//! Text without a `<` passes through uncopied; only bytes that may begin a marker are held back.
//!
//! ```text
//!   text ── <think> ──► reasoning ── </think> ──► text ── <tool_call> ──► call ── </tool_call> ──► text
//! ```

use serde_json::Value;

use crate::chunk::Text;

const THINK: &str = "<think>";
const THINK_END: &str = "</think>";
const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";

/// The events that the parser emits, in order.
#[derive(Debug, PartialEq)]
pub(super) enum MarkupPiece {
    Text(Text),
    Reasoning(Text),
    Call { name: String, arguments: Value },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MarkupState {
    /// Line feeds directly after a marker belong to it.
    Text {
        after_marker: bool,
    },
    Reasoning {
        after_marker: bool,
    },
    Call,
}

/// The parser of one choice's text.
#[derive(Debug)]
pub(super) struct Markup {
    reasoning: bool,
    tools: bool,
    state: MarkupState,
    buffered: String,
    /// Bytes of `held` that are known to contain no whole marker.
    searched: usize,
}

impl Markup {
    /// A parser that looks for reasoning, for tool calls, for both or for neither.
    pub(super) const fn new(reasoning: bool, tools: bool) -> Self {
        Self {
            reasoning,
            tools,
            state: MarkupState::Text {
                after_marker: false,
            },
            buffered: String::new(),
            searched: 0,
        }
    }

    /// Parses the next piece of text.
    pub(super) fn push(&mut self, text: Text, out: &mut dyn FnMut(MarkupPiece)) {
        let plain = self.buffered.is_empty()
            && self.state
                == MarkupState::Text {
                    after_marker: false,
                };
        // The usual step: no marker can begin here, so the text is passed on without a copy.
        if plain && !((self.reasoning || self.tools) && text.contains('<')) {
            if !text.is_empty() {
                out(MarkupPiece::Text(text));
            }
            return;
        }
        self.buffered.push_str(&text);
        while self.step(out) {}
    }

    /// The end of the output: bytes that are still held back are text after all.
    pub(super) fn end(&mut self, out: &mut dyn FnMut(MarkupPiece)) {
        let retained = std::mem::take(&mut self.buffered);
        match self.state {
            MarkupState::Reasoning { .. } => emit(retained.trim_end_matches('\n'), true, out),
            MarkupState::Text { .. } => emit(&retained, false, out),
            // The model was cut within a call. Nothing that it wrote is lost.
            MarkupState::Call => emit(&format!("{CALL}{retained}"), false, out),
        }
        self.state = MarkupState::Text {
            after_marker: false,
        };
        self.searched = 0;
    }

    /// Parses the start of `held`. `true` if there may be more to parse.
    fn step(&mut self, out: &mut dyn FnMut(MarkupPiece)) -> bool {
        match self.state {
            MarkupState::Text { after_marker } => self.step_text(after_marker, out),
            MarkupState::Reasoning { after_marker } => self.step_reasoning(after_marker, out),
            MarkupState::Call => self.step_call(out),
        }
    }

    fn step_text(&mut self, after_marker: bool, out: &mut dyn FnMut(MarkupPiece)) -> bool {
        if after_marker && !self.skip_line_feeds() {
            return false;
        }
        self.state = MarkupState::Text {
            after_marker: false,
        };
        let markers: &[&str] = match (self.reasoning, self.tools) {
            (true, true) => &[THINK, CALL],
            (true, false) => &[THINK],
            (false, true) => &[CALL],
            (false, false) => &[],
        };
        let found = markers
            .iter()
            .filter_map(|marker| Some((self.buffered.find(marker)?, *marker)))
            // The earlier marker wins: the other one may lie within what it begins.
            .min_by_key(|(at, _)| *at);
        let Some((at, marker)) = found else {
            let safe = self.buffered.len() - held_back(&self.buffered, markers);
            emit(&self.buffered[..safe], false, out);
            self.buffered.drain(..safe);
            return false;
        };
        emit(&self.buffered[..at], false, out);
        self.buffered.drain(..at + marker.len());
        self.searched = 0;
        self.state = if marker == THINK {
            MarkupState::Reasoning { after_marker: true }
        } else {
            MarkupState::Call
        };
        true
    }

    fn step_reasoning(&mut self, after_marker: bool, out: &mut dyn FnMut(MarkupPiece)) -> bool {
        if after_marker && !self.skip_line_feeds() {
            return false;
        }
        self.state = MarkupState::Reasoning {
            after_marker: false,
        };
        if let Some(at) = self.buffered.find(THINK_END) {
            emit(self.buffered[..at].trim_end_matches('\n'), true, out);
            self.buffered.drain(..at + THINK_END.len());
            self.state = MarkupState::Text { after_marker: true };
            return true;
        }
        let safe = self.buffered.len() - held_back(&self.buffered, &[THINK_END]);
        // Line feeds directly before the marker belong to it.
        let safe = self.buffered[..safe].trim_end_matches('\n').len();
        emit(&self.buffered[..safe], true, out);
        self.buffered.drain(..safe);
        false
    }

    fn step_call(&mut self, out: &mut dyn FnMut(MarkupPiece)) -> bool {
        let from = self.buffered.floor_char_boundary(self.searched);
        let Some(at) = self.buffered[from..].find(CALL_END).map(|at| at + from) else {
            // A call's arguments may be long and come in small pieces; searching from the start each time would be
            // quadratic.
            self.searched = self.buffered.len().saturating_sub(CALL_END.len());
            return false;
        };
        match parse_call(&self.buffered[..at]) {
            Some(call) => out(call),
            // A call that does not parse is not lost: it is emitted as text.
            None => emit(
                &format!("{CALL}{}{CALL_END}", &self.buffered[..at]),
                false,
                out,
            ),
        }
        self.buffered.drain(..at + CALL_END.len());
        self.state = MarkupState::Text { after_marker: true };
        true
    }

    /// Drops line feeds at the start. `false` if there is nothing else yet.
    fn skip_line_feeds(&mut self) -> bool {
        let retained = self.buffered.trim_start_matches('\n').len();
        self.buffered.drain(..self.buffered.len() - retained);
        retained > 0
    }
}

fn emit(text: &str, reasoning: bool, out: &mut dyn FnMut(MarkupPiece)) {
    if !text.is_empty() {
        let text = Text::from(text);
        out(if reasoning {
            MarkupPiece::Reasoning(text)
        } else {
            MarkupPiece::Text(text)
        });
    }
}

/// The number of bytes at the end of `text` that may begin one of the markers. Markers are ASCII, so this splits no
/// character.
fn held_back(text: &str, markers: &[&str]) -> usize {
    let begins = |marker: &&str| {
        let longest = (marker.len() - 1).min(text.len());
        (1..=longest)
            .rev()
            .find(|len| text.ends_with(&marker[..*len]))
    };
    markers.iter().filter_map(begins).max().unwrap_or(0)
}

fn parse_call(json: &str) -> Option<MarkupPiece> {
    let Value::Object(mut call) = serde_json::from_str(json.trim()).ok()? else {
        return None;
    };
    let Some(Value::String(name)) = call.remove("name") else {
        return None;
    };
    let arguments = call
        .remove("arguments")
        // Models of the Llama family write `parameters`.
        .or_else(|| call.remove("parameters"))
        .unwrap_or_else(|| Value::Object(serde_json::Map::new()));
    Some(MarkupPiece::Call { name, arguments })
}

#[cfg(test)]
mod tests;
