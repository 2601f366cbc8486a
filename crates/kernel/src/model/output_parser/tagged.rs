//! Calls with a tag around each argument: GLM 4.5, Qwen3-Coder, DeepSeek V3.2,
//! MiniMax M2, Kimi K3, Hy3 and MiniCPM 5.

use serde_json::Value;

use super::BLANK_BYTES_MAX;
use super::call::{CallContext, CallMachine, CallOutput, NameText, Verdict};
use super::json::JsonMachine;
use super::markers::{Alternatives, Marker, Matched, is_foreign_mark};

/// The tags of one family.
#[derive(Debug)]
pub(super) struct TaggedSyntax {
    /// Opens a call.
    pub(super) call: Marker,
    /// Before the name, if it does not follow `call` itself.
    pub(super) function: Option<Marker>,
    /// After the name. `None`: it ends with its line, or where the next tag begins.
    name_end: Option<Marker>,
    /// What ends the attributes after the name, if there are any.
    name_rest: Option<Marker>,
    key: Marker,
    key_end: Marker,
    /// Between a key and the type of its value, which is `true` or `string` for a text. `None`: the schema tells the type.
    key_type: Option<&'static str>,
    /// Before the value, if it does not follow the key itself.
    value: Option<Marker>,
    value_end: Marker,
    /// After the last argument.
    call_end: Marker,
    /// After the call. It may be missing.
    outer_end: Option<Marker>,
    /// Line feeds around a value do not belong to it.
    own_lines: bool,
    /// `"` and `&` are escaped in keys.
    escapes_keys: bool,
    /// A value may stand between [`CDATA`] and [`CDATA_END`].
    has_sections: bool,
    /// What stands around arguments that are written as one JSON object instead.
    object: Option<[Marker; 2]>,
}

/// `<tool_call>NAME\n<arg_key>K</arg_key>\n<arg_value>V</arg_value>\n</tool_call>`
pub(super) const GLM: TaggedSyntax = TaggedSyntax {
    call: "<tool_call>",
    function: None,
    name_end: None,
    name_rest: None,
    key: "<arg_key>",
    key_end: "</arg_key>",
    key_type: None,
    value: Some("<arg_value>"),
    value_end: "</arg_value>",
    call_end: "</tool_call>",
    outer_end: None,
    own_lines: false,
    escapes_keys: false,
    has_sections: false,
    object: None,
};

/// `<tool_call>\n<function=NAME>\n<parameter=K>\nV\n</parameter>\n</function>\n</tool_call>`
pub(super) const QWEN_CODER: TaggedSyntax = TaggedSyntax {
    call: "<tool_call>",
    function: Some("<function="),
    name_end: Some(">"),
    name_rest: None,
    key: "<parameter=",
    key_end: ">",
    key_type: None,
    value: None,
    value_end: "</parameter>",
    call_end: "</function>",
    outer_end: Some("</tool_call>"),
    own_lines: true,
    escapes_keys: false,
    has_sections: false,
    object: None,
};

/// `<minimax:tool_call>\n<invoke name="NAME">\n<parameter name="K">V</parameter>\n</invoke>\n</minimax:tool_call>`
pub(super) const MINIMAX_M2: TaggedSyntax = TaggedSyntax {
    call: "<minimax:tool_call>",
    function: Some("<invoke name=\""),
    name_end: Some("\">"),
    name_rest: None,
    key: "<parameter name=\"",
    key_end: "\">",
    key_type: None,
    value: None,
    value_end: "</parameter>",
    call_end: "</invoke>",
    outer_end: Some("</minimax:tool_call>"),
    own_lines: false,
    escapes_keys: false,
    has_sections: false,
    object: None,
};

/// `<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="K" type="string"<|sep|>V<|close|>argument<|sep|>`
/// `<|close|>call<|sep|>`, all calls in `<|open|>tools<|sep|>`.
pub(super) const KIMI_K3: TaggedSyntax = TaggedSyntax {
    call: "<|open|>tools<|sep|>",
    function: Some("<|open|>call tool=\""),
    name_end: Some("\""),
    name_rest: Some("<|sep|>"),
    key: "<|open|>argument key=\"",
    key_end: "\"<|sep|>",
    key_type: Some("\" type=\""),
    value: None,
    value_end: "<|close|>argument<|sep|>",
    call_end: "<|close|>call<|sep|>",
    outer_end: Some("<|close|>tools<|sep|>"),
    own_lines: false,
    escapes_keys: true,
    has_sections: false,
    object: Some([
        "<|open|>json type=\"object\"<|sep|>",
        "<|close|>json<|sep|>",
    ]),
};

/// `<tool_call:opensource>NAME<tool_sep:opensource>` with the tags of [`GLM`], whose names end as these do, all calls in
/// `<tool_calls:opensource>`.
pub(super) const HY_V3: TaggedSyntax = TaggedSyntax {
    call: "<tool_calls:opensource>",
    function: Some("<tool_call:opensource>"),
    name_end: Some("<tool_sep:opensource>"),
    name_rest: None,
    key: "<arg_key:opensource>",
    key_end: "</arg_key:opensource>",
    key_type: None,
    value: Some("<arg_value:opensource>"),
    value_end: "</arg_value:opensource>",
    call_end: "</tool_call:opensource>",
    outer_end: Some("</tool_calls:opensource>"),
    own_lines: false,
    escapes_keys: false,
    has_sections: false,
    object: None,
};

/// `<function name="NAME"><param name="K">V</param></function>`, where `<![CDATA[V]]>` may stand for V.
pub(super) const MINICPM5: TaggedSyntax = TaggedSyntax {
    call: "<function name=\"",
    function: None,
    name_end: Some("\">"),
    name_rest: None,
    key: "<param name=\"",
    key_end: "\">",
    key_type: None,
    value: None,
    value_end: "</param>",
    call_end: "</function>",
    outer_end: None,
    own_lines: false,
    escapes_keys: false,
    has_sections: true,
    object: None,
};

/// `<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="K" string="true">V</｜DSML｜parameter>\n</｜DSML｜invoke>`, all calls in
/// `<｜DSML｜function_calls>`.
pub(super) const DEEPSEEK_V32: TaggedSyntax = TaggedSyntax {
    call: "<｜DSML｜function_calls>",
    function: Some("<｜DSML｜invoke name=\""),
    name_end: Some("\">"),
    name_rest: None,
    key: "<｜DSML｜parameter name=\"",
    key_end: "\">",
    key_type: Some("\" string=\""),
    value: None,
    value_end: "</｜DSML｜parameter>",
    call_end: "</｜DSML｜invoke>",
    outer_end: Some("</｜DSML｜function_calls>"),
    own_lines: false,
    escapes_keys: false,
    has_sections: false,
    object: None,
};

/// The same, in `<｜DSML｜tool_calls>`.
pub(super) const DEEPSEEK_V4: TaggedSyntax = TaggedSyntax {
    call: "<｜DSML｜tool_calls>",
    outer_end: Some("</｜DSML｜tool_calls>"),
    ..DEEPSEEK_V32
};

impl TaggedSyntax {
    /// The markers that may be control tokens.
    pub(super) fn markers(&self) -> impl Iterator<Item = Marker> {
        let outer = [
            self.outer_end,
            self.function,
            self.name_end,
            self.name_rest,
            self.value,
        ];
        [
            self.call,
            self.key,
            self.key_end,
            self.value_end,
            self.call_end,
        ]
        .into_iter()
        .chain(outer.into_iter().flatten())
        .chain(self.object.into_iter().flatten())
        // Those of punctuation alone are no tokens of their own.
        .filter(|marker| marker.contains('<'))
    }
}

/// What stands around a text that may contain tags.
const CDATA: &str = "<![CDATA[";
const CDATA_END: &str = "]]>";

#[derive(Debug)]
enum TaggedPlace {
    /// Before the tag of the name.
    Function(Alternatives),
    /// In the name; the tag after it as far as it was read.
    Name(NameText, Alternatives),
    /// In the attributes after the name.
    NameRest(String),
    /// Before an argument, or the end of the call.
    Between(Alternatives),
    Key(String),
    /// Between a key and the tag of its value.
    BeforeValue(String, Alternatives),
    Value(String, String),
    /// In arguments that are one object, from its bracket on.
    Object(Option<JsonMachine>),
    /// Behind them.
    ObjectEnd(Alternatives),
    After(Alternatives),
}

impl TaggedPlace {
    /// Behind a tag that opens a call.
    fn behind(opened_by: Marker, syntax: &TaggedSyntax) -> Self {
        if opened_by == syntax.call && syntax.function.is_some() {
            Self::Function(Alternatives::default())
        } else {
            Self::Name(NameText::default(), Alternatives::default())
        }
    }
}

/// The calls after an opening tag.
#[derive(Debug)]
pub(super) struct TaggedCalls {
    syntax: &'static TaggedSyntax,
    place: TaggedPlace,
    name: String,
    arguments: usize,
    /// The arguments were one object.
    has_object: bool,
}

impl TaggedCalls {
    /// What follows this tag: the one of a call, or of a function without a call around it.
    pub(super) fn new(syntax: &'static TaggedSyntax, opened_by: Marker) -> Self {
        Self {
            syntax,
            place: TaggedPlace::behind(opened_by, syntax),
            name: String::new(),
            arguments: 0,
            has_object: false,
        }
    }

    fn name(
        &mut self,
        c: char,
        mut name: NameText,
        mut next: Alternatives,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        let syntax = self.syntax;
        let options = match syntax.name_end {
            Some(end) => vec![end],
            None => vec![syntax.key, syntax.call_end],
        };
        let begins = |marker: &Marker| context.texts.text(marker).starts_with(c);
        if next.is_begun() || options.iter().any(begins) {
            let matched = next.push(c, &options, context.texts);
            if matched == Matched::Open {
                self.place = TaggedPlace::Name(name, next);
                return Verdict::Taken;
            }
            let (Matched::Whole(marker), Some(name)) = (matched, name.take()) else {
                return Verdict::Refused;
            };
            self.named(name, out);
            return if Some(marker) == syntax.name_end {
                Verdict::Taken
            } else {
                self.tag(marker, context, out)
            };
        }
        if c == '\n' && syntax.name_end.is_none() {
            match name.take() {
                Some(name) => self.named(name, out),
                None => self.place = TaggedPlace::Name(name, next),
            }
            return Verdict::Taken;
        }
        if !name.push(c) {
            return Verdict::Refused;
        }
        self.place = TaggedPlace::Name(name, next);
        Verdict::Taken
    }

    fn named(&mut self, name: String, out: &mut CallOutput) {
        self.name.clone_from(&name);
        self.arguments = 0;
        self.has_object = false;
        out.begin(name, None);
        self.place = match self.syntax.name_rest {
            Some(_) => TaggedPlace::NameRest(String::new()),
            None => TaggedPlace::Between(Alternatives::default()),
        };
    }

    /// A tag between arguments, or behind the last one.
    fn tag(&mut self, marker: Marker, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let syntax = self.syntax;
        if marker == syntax.key {
            self.place = TaggedPlace::Key(String::new());
            return Verdict::Taken;
        }
        if syntax.object.is_some_and(|[begin, _]| begin == marker) {
            self.has_object = true;
            self.place = TaggedPlace::Object(None);
            return Verdict::Taken;
        }
        if !self.has_object {
            out.push_str(if self.arguments == 0 { "{}" } else { "}" });
        }
        if marker == syntax.call || Some(marker) == syntax.function {
            self.place = TaggedPlace::behind(marker, syntax);
            let mut read = context.texts.text(marker).to_owned();
            read.pop();
            return out.end_before(read);
        }
        self.place = TaggedPlace::After(Alternatives::default());
        match out.end() {
            Verdict::Taken if syntax.outer_end.is_none_or(|end| end == marker) => Verdict::Last,
            verdict => verdict,
        }
    }

    fn argument(&mut self, key: &str, value: &str, context: CallContext<'_>, out: &mut CallOutput) {
        let section = section(value).filter(|_| self.syntax.has_sections);
        let value = section
            .and_then(|text| text.strip_suffix(CDATA_END))
            .unwrap_or(value);
        let value = if self.syntax.own_lines {
            let value = value.strip_prefix('\n').unwrap_or(value);
            value.strip_suffix('\n').unwrap_or(value)
        } else {
            value
        };
        let typed = self.syntax.key_type;
        let typed = typed.and_then(|between| key.rsplit_once(between));
        let (key, json) = match typed {
            Some((key, "true" | "string")) => (key, Value::from(value).to_string()),
            Some((key, _)) if serde_json::from_str::<Value>(value).is_ok() => {
                (key, value.trim().to_owned())
            }
            Some((key, _)) => (key, context.tools.json(&self.name, key, value)),
            None => (key, context.tools.json(&self.name, key, value)),
        };
        let begin = if self.arguments == 0 { "{" } else { ", " };
        self.arguments += 1;
        // As in the attributes of XML.
        let key = if self.syntax.escapes_keys {
            Value::from(key.replace("&quot;", "\"").replace("&amp;", "&"))
        } else {
            Value::from(key)
        };
        out.push_str(&format!("{begin}{key}: {json}"));
        self.place = TaggedPlace::Between(Alternatives::default());
    }
}

impl TaggedCalls {
    fn before_value(
        &mut self,
        c: char,
        key: String,
        mut next: Alternatives,
        context: CallContext<'_>,
    ) -> Verdict {
        let options: Vec<Marker> = self.syntax.value.into_iter().collect();
        self.place = match next.push(c, &options, context.texts) {
            Matched::Open => TaggedPlace::BeforeValue(key, next),
            Matched::Whole(_) => TaggedPlace::Value(key, String::new()),
            Matched::Nothing => return Verdict::Refused,
        };
        Verdict::Taken
    }

    fn between(
        &mut self,
        c: char,
        mut next: Alternatives,
        context: CallContext<'_>,
        out: &mut CallOutput,
    ) -> Verdict {
        let syntax = self.syntax;
        // The end of a call may be missing at the end of all, and before the next one.
        let mut options = vec![syntax.call_end, syntax.call];
        options.extend(syntax.outer_end.into_iter().chain(syntax.function));
        if !self.has_object {
            options.push(syntax.key);
            let object = syntax.object.filter(|_| self.arguments == 0);
            options.extend(object.map(|[begin, _]| begin));
        }
        match next.push(c, &options, context.texts) {
            Matched::Open => {
                self.place = TaggedPlace::Between(next);
                Verdict::Taken
            }
            Matched::Whole(marker) => self.tag(marker, context, out),
            Matched::Nothing => Verdict::Refused,
        }
    }

    fn object(&mut self, c: char, json: Option<JsonMachine>, out: &mut CallOutput) -> Verdict {
        if json.is_none() && c.is_ascii_whitespace() {
            self.place = TaggedPlace::Object(None);
            return Verdict::Taken;
        }
        if json.is_none() && c != '{' {
            return Verdict::Refused;
        }
        let mut json = json.unwrap_or_default();
        if json.push(c).is_err() {
            return Verdict::Refused;
        }
        out.push(c);
        self.place = if json.is_complete() {
            TaggedPlace::ObjectEnd(Alternatives::default())
        } else {
            TaggedPlace::Object(Some(json))
        };
        Verdict::Taken
    }

    fn object_end(&mut self, c: char, mut next: Alternatives, context: CallContext<'_>) -> Verdict {
        let end = self.syntax.object.map(|[_, end]| end);
        let options: Vec<Marker> = end.into_iter().collect();
        self.place = match next.push(c, &options, context.texts) {
            Matched::Open => TaggedPlace::ObjectEnd(next),
            Matched::Whole(_) => TaggedPlace::Between(Alternatives::default()),
            Matched::Nothing => return Verdict::Refused,
        };
        Verdict::Taken
    }

    fn after(&mut self, c: char, mut next: Alternatives, context: CallContext<'_>) -> Verdict {
        let TaggedSyntax {
            outer_end,
            function,
            ..
        } = self.syntax;
        let options: Vec<Marker> = outer_end.iter().chain(function).copied().collect();
        self.place = match next.push(c, &options, context.texts) {
            Matched::Open => TaggedPlace::After(next),
            Matched::Whole(marker) if Some(marker) == *outer_end => return Verdict::Last,
            Matched::Whole(_) => TaggedPlace::Name(NameText::default(), Alternatives::default()),
            Matched::Nothing => return Verdict::Over,
        };
        Verdict::Taken
    }
}

/// What follows [`CDATA`] in a value, but for white space; `None` if it does not begin so.
fn section(value: &str) -> Option<&str> {
    // It is looked for at every end of a value, so white space before it has a bound.
    let blank = value.bytes().take(BLANK_BYTES_MAX);
    let blank = blank.take_while(u8::is_ascii_whitespace).count();
    let text = value[blank..].strip_prefix(CDATA)?;
    Some(text.trim_ascii_end())
}

/// Whether a value is the beginning of a text that may contain tags.
fn is_open_section(value: &str) -> bool {
    section(value).is_some_and(|text| !text.ends_with(CDATA_END))
}

impl CallMachine for TaggedCalls {
    fn push(&mut self, c: char, context: CallContext<'_>, out: &mut CallOutput) -> Verdict {
        let syntax = self.syntax;
        let empty = TaggedPlace::Between(Alternatives::default());
        match std::mem::replace(&mut self.place, empty) {
            TaggedPlace::Function(mut next) => {
                let options: Vec<Marker> = syntax.function.into_iter().collect();
                self.place = match next.push(c, &options, context.texts) {
                    Matched::Open => TaggedPlace::Function(next),
                    Matched::Whole(_) => {
                        TaggedPlace::Name(NameText::default(), Alternatives::default())
                    }
                    Matched::Nothing => return Verdict::Refused,
                };
                Verdict::Taken
            }
            TaggedPlace::Name(name, next) => self.name(c, name, next, context, out),
            TaggedPlace::NameRest(mut rest) => {
                rest.push(c);
                let end = syntax.name_rest.map_or("", |end| context.texts.text(end));
                if is_foreign_mark(c, &rest, end) {
                    return Verdict::Refused;
                }
                if !rest.ends_with(end) {
                    self.place = TaggedPlace::NameRest(rest);
                }
                Verdict::Taken
            }
            TaggedPlace::Between(next) => self.between(c, next, context, out),
            TaggedPlace::Object(json) => self.object(c, json, out),
            TaggedPlace::ObjectEnd(next) => self.object_end(c, next, context),
            TaggedPlace::Key(mut key) => {
                key.push(c);
                if is_foreign_mark(c, &key, context.texts.text(syntax.key_end)) {
                    return Verdict::Refused;
                }
                self.place = match (
                    key.strip_suffix(context.texts.text(syntax.key_end)),
                    syntax.value,
                ) {
                    (None, _) => TaggedPlace::Key(key),
                    (Some(key), None) => TaggedPlace::Value(key.to_owned(), String::new()),
                    (Some(key), Some(_)) => {
                        TaggedPlace::BeforeValue(key.to_owned(), Alternatives::default())
                    }
                };
                Verdict::Taken
            }
            TaggedPlace::BeforeValue(key, next) => self.before_value(c, key, next, context),
            TaggedPlace::Value(key, mut value) => {
                value.push(c);
                if is_foreign_mark(c, &value, context.texts.text(syntax.value_end)) {
                    return Verdict::Refused;
                }
                match value.strip_suffix(context.texts.text(syntax.value_end)) {
                    Some(text) if !syntax.has_sections || !is_open_section(text) => {
                        self.argument(key.trim(), text, context, out);
                    }
                    _ => self.place = TaggedPlace::Value(key, value),
                }
                Verdict::Taken
            }
            TaggedPlace::After(next) => self.after(c, next, context),
        }
    }
}
