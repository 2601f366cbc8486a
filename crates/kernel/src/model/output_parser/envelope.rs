//! Calls as JSON objects with a name and arguments, one or a list of them: Hermes, Llama 3, Granite, Phi, Nemotron,
//! Cohere, Apertus, and Mistral's older form.

use serde_json::Value;

use super::call::{CallContext, CallMachine, CallOutput, Verdict, is_tool_name};
use super::json::{JsonMachine, JsonPlace};
use super::markers::{Alternatives, Marker, Matched};
use crate::limits;

/// One object: `{"name": "f", "arguments": {..}}`.
#[derive(Debug, Default)]
struct Envelope {
    /// It is `{"f": {..}}`.
    keyed: bool,
    json: JsonMachine,
    key: String,
    value: String,
    /// The last character belonged to the key, or to the value, of a member.
    in_key: bool,
    in_value: bool,
    name: Option<String>,
    id: Option<String>,
    /// Arguments that were not emitted as they came.
    arguments: Option<String>,
    has_arguments: bool,
    /// The value in progress is emitted as it comes.
    streams: bool,
}

impl Envelope {
    /// Takes the next character. `Last` if it ends the object, and the call with it.
    fn push(
        &mut self,
        c: char,
        unmarked: Option<CallContext<'_>>,
        out: &mut CallOutput,
    ) -> Verdict {
        let Ok(place) = self.json.push(c) else {
            return Verdict::Refused;
        };
        if self.in_value && place != JsonPlace::Value {
            self.in_value = false;
            if !self.member(unmarked) {
                return Verdict::Refused;
            }
        }
        match place {
            JsonPlace::Key => {
                if !self.in_key {
                    self.key.clear();
                }
                self.key.push(c);
            }
            JsonPlace::Value => {
                if !self.in_value && !self.value_begins(c, unmarked, out) {
                    return Verdict::Refused;
                }
                if self.streams {
                    out.push(c);
                } else {
                    self.value.push(c);
                }
                self.in_value = true;
            }
            JsonPlace::Frame => {}
        }
        self.in_key = place == JsonPlace::Key;
        if unmarked.is_some_and(|context| !self.may_be_call(place, context)) {
            return Verdict::Refused;
        }
        if self.json.is_complete() {
            self.ends(unmarked, out)
        } else {
            Verdict::Taken
        }
    }

    /// Whether an object that no marker opened may be a call so far. An answer in JSON is none: it is text as soon as it has
    /// a member that no call has before its name, or another name.
    fn may_be_call(&self, place: JsonPlace, context: CallContext<'_>) -> bool {
        match place {
            _ if self.name.is_some() => true,
            _ if !self.is_arguments() && self.value.len() > MEMBER_BYTES_MAX => false,
            JsonPlace::Key => CALL_KEYS.iter().any(|key| key.starts_with(&self.key)),
            JsonPlace::Value if self.is_name() => {
                let Some(name) = self.value.strip_prefix('"') else {
                    return false;
                };
                let is_whole = name.ends_with('"');
                // What is escaped is looked at as a whole.
                is_whole || name.contains('\\') || context.tools.has_prefix(name)
            }
            JsonPlace::Value | JsonPlace::Frame => true,
        }
    }

    fn is_name(&self) -> bool {
        // Cohere's models write `tool_name`.
        matches!(&*self.key, "\"name\"" | "\"tool_name\"")
    }

    fn is_arguments(&self) -> bool {
        // Models of the Llama family write `parameters`.
        self.keyed || matches!(&*self.key, "\"arguments\"" | "\"parameters\"")
    }

    /// The value of a member begins. `false` if the object is no call.
    fn value_begins(
        &mut self,
        c: char,
        unmarked: Option<CallContext<'_>>,
        out: &mut CallOutput,
    ) -> bool {
        self.value.clear();
        self.streams = false;
        if !self.is_arguments() {
            return true;
        }
        if std::mem::replace(&mut self.has_arguments, true) {
            return false;
        }
        if self.keyed {
            self.name = tool_name(&self.key);
            if self.name.is_none() {
                return false;
            }
        }
        // Arguments that are no object are looked at as a whole, and those before the name wait for it.
        if c == '{'
            && let Some(name) = &self.name
        {
            if unmarked.is_some_and(|context| !context.tools.has(name)) {
                return false;
            }
            self.streams = true;
            out.begin(name.clone(), self.id.take());
        }
        true
    }

    /// A member is complete. `false` if the object is no call.
    fn member(&mut self, unmarked: Option<CallContext<'_>>) -> bool {
        if self.is_arguments() {
            if !self.streams {
                self.arguments = Some(std::mem::take(&mut self.value));
            }
            return true;
        }
        if self.is_name() {
            let name = tool_name(&self.value);
            let is_known = |name: &str| unmarked.is_none_or(|context| context.tools.has(name));
            // A second name would leave open which of the two is called.
            if self.name.is_some() || !name.as_deref().is_some_and(is_known) {
                return false;
            }
            self.name = name;
        } else if self.key == "\"id\"" {
            self.id = serde_json::from_str(&self.value).ok();
        }
        true
    }

    fn ends(&mut self, unmarked: Option<CallContext<'_>>, out: &mut CallOutput) -> Verdict {
        if !out.is_open() {
            let Some(name) = self.name.take() else {
                return Verdict::Refused;
            };
            let is_call = |context: CallContext<'_>| context.tools.has(&name) && self.has_arguments;
            if !unmarked.is_none_or(is_call) {
                return Verdict::Refused;
            }
            out.begin(name, self.id.take());
            out.push_str(&as_object(self.arguments.take()));
        }
        match out.end() {
            Verdict::Taken => Verdict::Last,
            refused => refused,
        }
    }
}

/// Bytes of a member of a call before its name that is not its arguments: of a name, all of whose characters are escaped.
const MEMBER_BYTES_MAX: usize = 6 * limits::TOOL_NAME_BYTES;
/// The members of calls, up to their names.
const CALL_KEYS: [&str; 6] = [
    "\"name\"",
    "\"tool_name\"",
    "\"type\"",
    "\"id\"",
    "\"parameters\"",
    "\"arguments\"",
];

/// The name of a function, as JSON; `None` if it can be none.
fn tool_name(json: &str) -> Option<String> {
    let name: Option<String> = serde_json::from_str(json).ok();
    name.filter(|name| is_tool_name(name))
}

/// Arguments as an object, where they are one: some models write none, and some write the text of one.
fn as_object(arguments: Option<String>) -> String {
    let Some(json) = arguments.filter(|json| json != "null") else {
        return "{}".to_owned();
    };
    if let Ok(Value::String(text)) = serde_json::from_str(&json)
        && let Ok(Value::Object(_)) = serde_json::from_str(&text)
    {
        return text;
    }
    json
}

/// How objects are put together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EnvelopeSyntax {
    /// What follows the last one. It may be missing.
    pub(super) close: Option<Marker>,
    /// What stands between two that are no list. It may be missing.
    pub(super) between: Option<Marker>,
    /// The name of a function is the key of its arguments, and there are no other members.
    pub(super) keyed: bool,
}

#[derive(Debug)]
enum EnvelopePlace {
    Before,
    Inside(Box<Envelope>),
    After(Alternatives),
}

/// The objects after one opening marker.
#[derive(Debug)]
pub(super) struct EnvelopeCalls {
    syntax: EnvelopeSyntax,
    /// No marker opened it, so only calls of declared tools are calls.
    unmarked: bool,
    in_list: bool,
    place: EnvelopePlace,
}

impl EnvelopeCalls {
    pub(super) fn new(syntax: EnvelopeSyntax) -> Self {
        Self {
            syntax,
            unmarked: false,
            in_list: false,
            place: EnvelopePlace::Before,
        }
    }

    /// A list whose bracket belongs to the opening marker.
    pub(super) fn in_list(syntax: EnvelopeSyntax) -> Self {
        Self {
            in_list: true,
            ..Self::new(syntax)
        }
    }

    /// Objects that no marker opened.
    pub(super) fn unmarked(syntax: EnvelopeSyntax) -> Self {
        Self {
            unmarked: true,
            ..Self::new(syntax)
        }
    }

    fn inside(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let mut envelope = match std::mem::replace(&mut self.place, EnvelopePlace::Before) {
            EnvelopePlace::Inside(envelope) => envelope,
            _ => Box::new(Envelope {
                keyed: self.syntax.keyed,
                ..Envelope::default()
            }),
        };
        match envelope.push(c, self.unmarked.then_some(context), out) {
            // Some models forget the last bracket.
            Verdict::Refused if envelope.json.may_end() && self.closes(c, context, out) => {
                let mut next = Alternatives::default();
                let close = self.syntax.close.unwrap_or_default();
                next.push(c, &[close], context.texts);
                self.place = EnvelopePlace::After(next);
                out.end_before(String::new())
            }
            Verdict::Last => {
                self.place = EnvelopePlace::After(Alternatives::default());
                Verdict::Taken
            }
            verdict => {
                self.place = EnvelopePlace::Inside(envelope);
                verdict
            }
        }
    }

    /// Whether the closing marker begins behind all arguments of a call.
    fn closes(&self, c: char, context: CallContext<'_>, out: &CallOutput) -> bool {
        let close = self.syntax.close.map(|close| context.texts.text(close));
        out.is_open() && !self.in_list && close.is_some_and(|close| close.starts_with(c))
    }

    fn after(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let EnvelopePlace::After(next) = &mut self.place else {
            return Verdict::Refused;
        };
        if !next.is_begun() {
            match c {
                // Also without anything between them: some models write one object on each line.
                '{' if !self.in_list => return self.inside(c, context, out),
                ',' if self.in_list => {
                    self.place = EnvelopePlace::Before;
                    return Verdict::Taken;
                }
                ']' if self.in_list => {
                    self.in_list = false;
                    return if self.syntax.close.is_some() {
                        Verdict::Settled
                    } else {
                        Verdict::Last
                    };
                }
                _ if c.is_ascii_whitespace() => return Verdict::Taken,
                _ if self.in_list => return Verdict::Over,
                _ => {}
            }
        }
        let markers = [self.syntax.close, self.syntax.between];
        let options: Vec<Marker> = markers.into_iter().flatten().collect();
        match next.push(c, &options, context.texts) {
            Matched::Open => Verdict::Taken,
            Matched::Whole(marker) if Some(marker) == self.syntax.close => Verdict::Last,
            Matched::Whole(_) => {
                self.place = EnvelopePlace::Before;
                Verdict::Taken
            }
            Matched::Nothing => Verdict::Over,
        }
    }
}

impl CallMachine for EnvelopeCalls {
    fn push(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        match &self.place {
            EnvelopePlace::Before => match c {
                '{' => self.inside(c, context, out),
                '[' if !self.in_list => {
                    self.in_list = true;
                    Verdict::Taken
                }
                _ if c.is_ascii_whitespace() => Verdict::Taken,
                _ => Verdict::Refused,
            },
            EnvelopePlace::Inside(_) => self.inside(c, context, out),
            EnvelopePlace::After(_) => self.after(c, context, out),
        }
    }
}
