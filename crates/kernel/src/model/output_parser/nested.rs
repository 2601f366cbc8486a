//! Calls whose arguments are nested tags, each behind one token: MiniMax M3.
//!
//! ```text
//!   ]<]minimax[>[<tool_call>
//!   ]<]minimax[>[<invoke name="NAME">]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>]<]minimax[>[</invoke>
//!   ]<]minimax[>[</tool_call>
//! ```
//!
//! A value is a text, members (`<KEY>..</KEY>`) or the items of a list (`<item>..</item>`), unless its schema says that it
//! is an object with such a member.

use sapwood_engine::api::{MARK_CLOSE, MARK_OPEN};
use serde_json::Value;

use super::call::{CallContext, CallMachine, CallOutput, NameText, Verdict, is_tool_name};
use super::markers::{Alternatives, MINIMAX, Marker, Matched, is_foreign_mark};
use super::tools::Schema;
use crate::limits;

/// Opens calls.
pub(super) const OPEN: Marker = "]<]minimax[>[<tool_call>";
const CLOSE: Marker = "]<]minimax[>[</tool_call>";
const INVOKE: Marker = "]<]minimax[>[<invoke name=\"";
const NAME_END: Marker = "\">";
/// What begins and ends a call, and ends all, behind the token and a bracket.
const INVOKE_TAG: &str = "invoke name=\"";
const INVOKE_END: &str = "/invoke";
const CLOSE_TAG: &str = "/tool_call";
/// The key of what stands in a list.
const ITEM: &str = "item";
/// Levels of nesting; `serde_json` reads a few more.
const DEPTH_MAX: usize = 120;

/// The markers behind the opening one.
pub(super) const MARKERS: [Marker; 2] = [INVOKE, CLOSE];

#[derive(Debug)]
enum NestedPlace {
    /// Before a call, or the end of all.
    Between(Alternatives),
    Name(NameText, Alternatives),
    /// In the text before a tag, and the token of that.
    Text(String),
    /// In a tag, behind its bracket.
    Tag(Option<String>),
    After(Alternatives),
}

/// A value whose end was not read.
#[derive(Debug)]
struct OpenValue {
    key: String,
    text: String,
    members: Vec<(String, Value)>,
}

/// The calls after the opening marker.
#[derive(Debug)]
pub(super) struct NestedCalls {
    place: NestedPlace,
    name: String,
    arguments: usize,
    open: Vec<OpenValue>,
}

impl NestedCalls {
    pub(super) fn new() -> Self {
        Self {
            place: NestedPlace::Between(Alternatives::default()),
            name: String::new(),
            arguments: 0,
            open: Vec::new(),
        }
    }

    fn between(
        &mut self,
        c: char,
        mut next: Alternatives,
        is_first: bool,
        context: CallContext<'_>,
    ) -> Verdict {
        let options = if is_first { &MARKERS[..1] } else { &MARKERS };
        self.place = match next.push(c, options, context.texts) {
            Matched::Open if is_first => NestedPlace::Between(next),
            Matched::Open => NestedPlace::After(next),
            Matched::Whole(CLOSE) => return Verdict::Last,
            Matched::Whole(_) => NestedPlace::Name(NameText::default(), Alternatives::default()),
            Matched::Nothing if is_first => return Verdict::Refused,
            Matched::Nothing => return Verdict::Over,
        };
        Verdict::Taken
    }

    fn name(
        &mut self,
        c: char,
        mut name: NameText,
        mut next: Alternatives,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        if !next.is_begun() && !NAME_END.starts_with(c) {
            if !name.push(c) {
                return Verdict::Refused;
            }
            self.place = NestedPlace::Name(name, next);
            return Verdict::Taken;
        }
        match next.push(c, &[NAME_END], context.texts) {
            Matched::Open => self.place = NestedPlace::Name(name, next),
            Matched::Whole(_) => {
                let Some(name) = name.take() else {
                    return Verdict::Refused;
                };
                self.call_begins(name, out);
            }
            Matched::Nothing => return Verdict::Refused,
        }
        Verdict::Taken
    }

    fn text(&mut self, c: char, mut text: String, context: CallContext<'_>) -> Verdict {
        let token = context.texts.text(MINIMAX);
        text.push(c);
        if is_foreign_mark(c, &text, token) {
            return Verdict::Refused;
        }
        let Some(before) = text.strip_suffix(token) else {
            self.place = NestedPlace::Text(text);
            return Verdict::Taken;
        };
        match self.open.last_mut() {
            Some(open) if open.members.is_empty() => open.text.push_str(before),
            // Between tags there is nothing.
            _ if before.trim_ascii().is_empty() => {}
            _ => return Verdict::Refused,
        }
        self.place = NestedPlace::Tag(None);
        Verdict::Taken
    }

    fn tag(
        &mut self,
        c: char,
        tag: Option<String>,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        let Some(mut tag) = tag else {
            if c != '<' {
                return Verdict::Refused;
            }
            self.place = NestedPlace::Tag(Some(String::new()));
            return Verdict::Taken;
        };
        if c != '>' {
            tag.push(c);
            if tag.len() > limits::TOOL_NAME_BYTES || matches!(c, MARK_OPEN | MARK_CLOSE) {
                return Verdict::Refused;
            }
            self.place = NestedPlace::Tag(Some(tag));
            return Verdict::Taken;
        }
        self.place = NestedPlace::Text(String::new());
        if self.open.is_empty()
            && let Some(verdict) = self.call_ends(&tag, context, out)
        {
            return verdict;
        }
        let Some(closed) = tag.strip_prefix('/') else {
            return self.value_begins(tag);
        };
        match self.open.pop() {
            Some(value) if value.key == closed => self.value_ends(value, context, out),
            _ => return Verdict::Refused,
        }
        Verdict::Taken
    }

    /// Ends the call if a tag between its arguments ends it. Its own end may be missing before the next one, and at the end
    /// of all.
    fn call_ends(
        &mut self,
        tag: &str,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Option<Verdict> {
        let next = tag.strip_prefix(INVOKE_TAG);
        let next = next.and_then(|name| name.strip_suffix('"'));
        let next = next.filter(|name| is_tool_name(name));
        if next.is_none() && !matches!(tag, INVOKE_END | CLOSE_TAG) {
            return None;
        }
        out.push_str(if self.arguments == 0 { "{}" } else { "}" });
        let Some(name) = next else {
            self.place = NestedPlace::After(Alternatives::default());
            return Some(match out.end() {
                Verdict::Taken if tag == CLOSE_TAG => Verdict::Last,
                verdict => verdict,
            });
        };
        let token = context.texts.text(MINIMAX);
        let verdict = out.end_before(format!("{token}<{tag}"));
        if verdict == Verdict::Taken {
            self.call_begins(name.to_owned(), out);
        }
        Some(verdict)
    }

    fn call_begins(&mut self, name: String, out: &mut CallOutput) {
        self.name.clone_from(&name);
        self.arguments = 0;
        out.begin(name, None);
        self.place = NestedPlace::Text(String::new());
    }

    fn value_begins(&mut self, key: String) -> Verdict {
        // A value is a text or has members, and not both.
        let has_text = |open: &OpenValue| !open.text.trim_ascii().is_empty();
        if self.open.len() >= DEPTH_MAX || self.open.last().is_some_and(has_text) {
            return Verdict::Refused;
        }
        self.open.push(OpenValue {
            key,
            text: String::new(),
            members: Vec::new(),
        });
        Verdict::Taken
    }

    fn value_ends(&mut self, value: OpenValue, context: CallContext<'_>, out: &mut CallOutput) {
        let OpenValue { key, text, members } = value;
        let schema = self.schema(&key, context);
        let is_list = members.iter().all(|(key, _)| key == ITEM)
            && !schema.as_ref().is_some_and(Schema::is_object);
        let members = match members.len() {
            0 => None,
            _ if is_list => Some(members.into_iter().map(|(_, item)| item).collect()),
            _ => Some(Value::Object(members.into_iter().collect())),
        };
        let text = || Schema::json_of(schema.as_ref(), &text);
        if let Some(parent) = self.open.last_mut() {
            let value =
                members.unwrap_or_else(|| serde_json::from_str(&text()).unwrap_or_default());
            parent.members.push((key, value));
            return;
        }
        let json = members.map_or_else(text, |members: Value| members.to_string());
        let begin = if self.arguments == 0 { "{" } else { ", " };
        self.arguments += 1;
        out.push_str(&format!("{begin}{}: {json}", Value::from(key)));
    }

    /// The schema of a value in those that are open.
    fn schema<'a>(&self, key: &str, context: CallContext<'a>) -> Option<Schema<'a>> {
        let arguments = context.tools.arguments(&self.name)?;
        let mut path = self.open.iter().map(|open| &*open.key).chain([key]);
        path.try_fold(arguments, |schema, key| match schema.member(key) {
            None if key == ITEM => schema.item(),
            member => member,
        })
    }
}

impl CallMachine for NestedCalls {
    fn push(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let empty = NestedPlace::Between(Alternatives::default());
        match std::mem::replace(&mut self.place, empty) {
            NestedPlace::Between(next) => self.between(c, next, true, context),
            NestedPlace::After(next) => self.between(c, next, false, context),
            NestedPlace::Name(name, next) => self.name(c, name, next, context, out),
            NestedPlace::Text(text) => self.text(c, text, context),
            NestedPlace::Tag(tag) => self.tag(c, tag, context, out),
        }
    }
}
