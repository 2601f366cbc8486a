//! Where Jinja and Python differ from minijinja in ways that published templates depend on.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, filters};

/// Installs tests and filters in place of minijinja's own.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
}

/// minijinja iterates over `none`, so it counts it as iterable: templates ask before they take the length of `tools`.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// What has a length and an index, in Python: texts, dictionaries and undefined values too.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined
    )
}

/// An undefined value is empty.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

/// With its second argument by name, too.
fn default(
    state: &State<'_, '_>,
    value: &Value,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let mut args = args.0;
    if let Some(default_value) = named.get::<Option<Value>>("default_value")? {
        args.insert(0, default_value);
    }
    if let Some(boolean) = named.get::<Option<Value>>("boolean")? {
        if args.is_empty() {
            args.push("".into());
        }
        args.push(boolean);
    }
    named.assert_all_used()?;
    filters::default(state, value, Rest(args))
}

/// minijinja's removes a last line feed, takes no text as the indent, and nothing by name behind a width.
pub(super) fn indent(
    text: Cow<'_, str>,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let argument = |index: usize, name| match args.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => named.get::<Option<Value>>(name),
    };
    let width = argument(0, "width")?;
    let first = argument(1, "first")?.is_some_and(|first| first.is_true());
    let blank = argument(2, "blank")?.is_some_and(|blank| blank.is_true());
    named.assert_all_used()?;
    let indent = match &width {
        None => " ".repeat(4),
        Some(width) => match (width.as_str(), width.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(width)) => " ".repeat(width),
            (None, None) => {
                let message = "the width of an indent is a number or a text";
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        },
    };
    let mut out = String::new();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let indents = if index == 0 {
            first
        } else {
            blank || !line.is_empty()
        };
        if indents {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Replaces the first `count` occurrences, or all.
pub(super) fn replace(text: &str, from: &str, to: &str, count: Option<i64>) -> String {
    match count.map(usize::try_from) {
        Some(Ok(count)) => text.replacen(from, to, count),
        // None or negative: all.
        _ => text.replace(from, to),
    }
}

/// Methods of Python's texts, lists and dictionaries that `pycompat` has not. `None`: neither is it here.
pub(super) fn method(value: &Value, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let text = value.as_str();
    let argument = args.first().and_then(Value::as_str);
    Some(match (name, text, argument, value.kind()) {
        ("removeprefix", Some(text), Some(prefix), _) => {
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        ("removesuffix", Some(text), Some(suffix), _) => {
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        ("partition", Some(text), Some(by), _) => Ok(match text.split_once(by) {
            Some((before, after)) => parts([before, by, after]),
            None => parts([text, "", ""]),
        }),
        ("rpartition", Some(text), Some(by), _) => Ok(match text.rsplit_once(by) {
            Some((before, after)) => parts([before, by, after]),
            None => parts(["", "", text]),
        }),
        ("rsplit", Some(text), Some(by), _) if !by.is_empty() => Ok(rsplit(text, by, args.get(1))),
        // Lists that change have one of their own.
        ("copy", None, None, ValueKind::Seq | ValueKind::Map) => Ok(value.clone()),
        ("index", None, _, ValueKind::Seq) => index(value, args.first()),
        ("index", Some(text), Some(part), _) => text
            .find(part)
            .map(|at| Value::from(text[..at].chars().count()))
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found")),
        _ => return None,
    })
}

fn parts(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from).to_vec()))
}

fn rsplit(text: &str, by: &str, most: Option<&Value>) -> Value {
    let most = most.and_then(Value::as_usize);
    let mut found: Vec<Value> = match most {
        Some(most) => text
            .rsplitn(most.saturating_add(1), by)
            .map(Value::from)
            .collect(),
        None => text.rsplit(by).map(Value::from).collect(),
    };
    found.reverse();
    found.into()
}

fn index(list: &Value, wanted: Option<&Value>) -> Result<Value, Error> {
    let found = list.try_iter()?.position(|item| Some(&item) == wanted);
    found
        .map(Value::from)
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the value is not in the list"))
}

/// Returns the text of a number as Python's `repr` writes it.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) if float.is_finite() => {
            let scientific = format!("{float:e}");
            let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
            let exponent: i32 = exponent.parse().unwrap_or(0);
            if (-4..16).contains(&exponent) {
                format!("{float:?}")
            } else {
                let sign = if exponent < 0 { '-' } else { '+' };
                format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
            }
        }
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use serde_json::json;

    use super::super::{SpecialTexts, Template, TemplatePiece};
    use crate::api::{ChatMessage, ChatRequest};

    /// What an expression prints, as Jinja prints it.
    fn check(expression: &str, expect: &str) {
        let source = format!("{{{{ {expression} }}}}");
        check_source(&source, expect);
    }

    fn check_source(source: &str, expect: &str) {
        let template = Template::new(source, &SpecialTexts::default(), || UNIX_EPOCH).unwrap();
        let chat = ChatRequest {
            messages: vec![ChatMessage {
                role: "user".to_owned(),
                ..ChatMessage::default()
            }],
            template_args: json!({"big": 1e22, "small": 1e-7, "whole": 4.0, "edge": [1e16, 1e15, 0.0001]}),
            ..ChatRequest::default()
        };
        let pieces = template.render(&chat);
        let pieces = pieces.unwrap_or_else(|error| panic!("{source}: {error}"));
        let text = pieces.iter();
        let text: String = text
            .map(|(TemplatePiece::Template(text) | TemplatePiece::Plain(text))| text.as_str())
            .collect();
        assert_eq!(text, expect, "{source}");
    }

    /// The templates of Qwen3-Coder and Nemotron ask this about `tools`, before its length.
    #[test]
    fn none_is_not_iterable() {
        check("tools is iterable and tools | length > 0", "False");
        check(
            "[none is iterable, 3 is iterable, '' is iterable, [] is iterable, {} is iterable]",
            "[False, False, True, True, True]",
        );
        check(
            "[none is sequence, 3 is sequence, '' is sequence, [] is sequence, {} is sequence]",
            "[False, False, True, True, True]",
        );
        check("nothing | length", "0");
    }

    #[test]
    fn numbers_are_printed_as_in_python() {
        check("big", "1e+22");
        check("small", "1e-07");
        check("whole", "4.0");
        check("edge | tojson", "[1e+16, 1000000000000000.0, 0.0001]");
        check(
            "[1.5e300, -0.0, 3, 12345678901234567890] | tojson",
            "[1.5e+300, -0.0, 3, 12345678901234567890]",
        );
        check("3 * 0.5", "1.5");
    }

    #[test]
    fn methods_and_arguments_of_python() {
        check("'a,b,c'.rsplit(',', 1)", "['a,b', 'c']");
        check("'a,b,c'.rsplit(',')", "['a', 'b', 'c']");
        check("'a-b-c'.partition('-')", "('a', '-', 'b-c')");
        check("'a-b-c'.rpartition('-')", "('a-b', '-', 'c')");
        check("'abc'.partition('-')", "('abc', '', '')");
        check("'abc'.removeprefix('a').removesuffix('c')", "b");
        check("'éa'.index('a') ~ [3, 4].index(4)", "11");
        check("[1].copy() ~ {'a': 1}.copy()", "[1]{'a': 1}");
        check("'aaa' | replace('a', 'b', 2)", "bba");
        check("'' | default('x', boolean=true)", "x");
        check("none | default('x', true)", "x");
        check("nothing | default(default_value='x')", "x");
        check("'{\n' | indent(2, first=true)", "  {\n");
        check("'a\n\nb' | indent", "a\n\n    b");
        check("'a\n\nb' | indent(1, blank=true)", "a\n \n b");
        check("'a\nb' | indent(width='> ', first=true)", "> a\n> b");
    }

    #[test]
    fn lists_grow() {
        let queue = "{% set q = namespace(ids=[]) %}{% for i in range(3) %}{% set _ = q.ids.append('i' ~ i) %}{% endfor %}";
        check_source(
            &format!(
                "{queue}{{{{ q.ids.pop(0) }}}} {{{{ q.ids.pop() }}}} {{{{ q.ids }}}} {{{{ q.ids | length }}}} {{{{ 'i1' in q.ids }}}}"
            ),
            "i0 i2 ['i1'] 1 True",
        );
        check_source(
            "{% for i in [1, 2] %}{% set l = [] %}{% set _ = l.append(i) %}{{ l }}{% endfor %}",
            "[1][2]",
        );
        // It holds a copy of itself, and not itself.
        check_source(
            "{% set l = [1] %}{% set _ = l.append(l) %}{{ l }}",
            "[1, [1]]",
        );
    }

    #[test]
    fn other_ends_of_lines_are_line_feeds() {
        check_source("{% if true %}\r\na\r\nb\r{% endif %}\r\n", "a\nb\n");
    }
}
