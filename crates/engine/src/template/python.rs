//! Where Jinja and Python differ from minijinja in ways that published templates depend on.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, filters};

use super::{bounds, guard};

/// minijinja iterates over `none`, so it counts it as iterable: templates ask before they take the length of `tools`.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// minijinja's divides by zero.
pub(super) fn is_divisible(value: &Value, by: &Value) -> bool {
    match (i128::try_from(value.clone()), i128::try_from(by.clone())) {
        (Ok(value), Ok(by)) => value.checked_rem(by) == Some(0),
        _ => matches!((float(value), float(by)), (Some(value), Some(by)) if value % by == 0.0),
    }
}

/// Nothing is in what has no elements.
pub(super) fn is_in(value: &Value, container: &Value) -> Result<bool, Error> {
    match bounds::contained(value, container) {
        Err(error) if error.kind() == ErrorKind::InvalidOperation => Ok(false),
        found => found,
    }
}

/// What has a length and an index, in Python: texts, dictionaries and undefined values too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined
    )
}

/// An undefined value is empty.
pub(super) fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

/// With its second argument by name, too.
pub(super) fn default(
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

/// As minijinja's, but what is no number is 0.
pub(super) fn int(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    or(filters::int(state, value, default, base, named), 0)
}

/// As minijinja's, but what is no number is 0.0.
pub(super) fn to_float(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    or(filters::float(state, value, default, named), 0.0)
}

/// It fails on what is no number if there is no other default.
fn or(converted: Result<Value, Error>, default: impl Into<Value>) -> Result<Value, Error> {
    match converted {
        Err(error) if error.kind() == ErrorKind::InvalidOperation => Ok(default.into()),
        converted => converted,
    }
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
pub(super) fn replace(
    text: Cow<'_, str>,
    from: Cow<'_, str>,
    to: Cow<'_, str>,
    count: Option<i64>,
) -> Result<String, Error> {
    // None or negative: all.
    let count = count.and_then(|count| usize::try_from(count).ok());
    let mut out = String::new();
    let mut copied = 0;
    let found = text.match_indices(&*from).take(count.unwrap_or(usize::MAX));
    for (index, (at, replaced)) in found.enumerate() {
        if index.is_multiple_of(1024) {
            bounds::check(0)?;
        }
        guard::push(&mut out, &text[copied..at])?;
        guard::push(&mut out, &to)?;
        copied = at + replaced.len();
    }
    guard::push(&mut out, &text[copied..])?;
    Ok(out)
}

/// `items | join(separator, attribute=..)`: minijinja's prints numbers in its own way, and whatever their length.
pub(super) fn join(items: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let argument = |index: usize, name| match args.get(index) {
        Some(value) => Ok(Some(value.clone())),
        None => named.get::<Option<Value>>(name),
    };
    let separator = argument(0, "d")?.unwrap_or_default();
    let attribute = argument(1, "attribute")?.filter(|attribute| !attribute.is_none());
    named.assert_all_used()?;
    let separator = bounds::printed(&separator)?;
    let mut out = String::new();
    for (index, item) in items.try_iter()?.checked().enumerate() {
        let item = match &attribute {
            Some(attribute) => member(item?, attribute)?,
            None => item?,
        };
        let item = bounds::printed(&item)?;
        // Twice: a text that grows is copied.
        bounds::check(2 * (out.len() + separator.len() + item.len()))?;
        if index > 0 {
            guard::push(&mut out, &separator)?;
        }
        guard::push(&mut out, &item)?;
    }
    Ok(out.into())
}

/// The member of a value at a path such as `function.name`.
fn member(value: Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else {
        return value.get_item(path);
    };
    path.split('.')
        .try_fold(value, |value, part| match part.parse::<usize>() {
            Ok(index) => value.get_item_by_index(index),
            Err(_) => value.get_attr(part),
        })
}

/// `values | sum(attribute=.., start=..)`. minijinja's copies what it has at each step, if that is a text or a tuple.
pub(super) fn sum(
    state: &State<'_, '_>,
    values: Value,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let start = match args.get(1) {
        Some(start) => Some(start.clone()),
        None => named.get("start")?,
    };
    let attribute = match args.first() {
        Some(attribute) => Some(attribute.clone()),
        None => named.get("attribute")?,
    };
    named.assert_all_used()?;
    let start = start.unwrap_or_else(|| Value::from(0));
    let attribute = attribute.filter(|attribute| !attribute.is_none());
    if start.as_str().is_some() {
        let message = "texts are joined, and not summed up";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    if !bounds::is_composite(&start) {
        let attribute = attribute.as_ref().and_then(Value::as_str);
        return filters::sum(state, values, attribute, Some(start), unnamed());
    }
    let mut items = bounds::collected(&start)?;
    for value in values.try_iter()?.checked() {
        let value = match &attribute {
            Some(attribute) => member(value?, attribute)?,
            None => value?,
        };
        if value.kind() != ValueKind::Seq || value.is_tuple() != start.is_tuple() {
            let message = format!("a value of type {} is summed with a list", value.kind());
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        items.extend(bounds::collected(&value)?);
        bounds::check(items.len().saturating_mul(bounds::ELEMENT_BYTES))?;
    }
    Ok(if start.is_tuple() {
        Value::from(Tuple::from(items))
    } else {
        Value::from(items)
    })
}

/// No arguments by name.
pub(super) fn unnamed() -> Kwargs {
    std::iter::empty::<(&str, Value)>().collect()
}

/// The product of two numbers.
pub(super) fn product(left: &Value, right: &Value) -> Result<Value, Error> {
    let failed = |why: &str| {
        let (left, right) = (left.kind(), right.kind());
        let message = format!("{why}: {left} * {right}");
        Error::new(ErrorKind::InvalidOperation, message)
    };
    let whole = |value: &Value| {
        let is_whole = value.is_integer() || value.kind() == ValueKind::Bool;
        is_whole
            .then(|| i128::try_from(value.clone()).ok())
            .flatten()
    };
    if let (Some(left), Some(right)) = (whole(left), whole(right)) {
        let product = left.checked_mul(right);
        let product = product.ok_or_else(|| failed("the product is too large"))?;
        return Ok(i64::try_from(product).map_or_else(|_| product.into(), Value::from));
    }
    match (float(left), float(right)) {
        (Some(left), Some(right)) => Ok((left * right).into()),
        _ => Err(failed("these cannot be multiplied")),
    }
}

fn float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()).ok(),
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
        ("replace", Some(text), _, _) => from_args(args)
            .and_then(|(from, to, count)| replace(text.into(), from, to, count).map(Value::from)),
        ("split", Some(text), _, _) => split(text, args),
        ("rsplit", Some(text), _, _) => rsplit(text, args),
        // Lists that change have one of their own.
        ("copy", None, None, ValueKind::Seq | ValueKind::Map) => Ok(value.clone()),
        ("index", None, _, ValueKind::Seq) => index(value, args),
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

/// The separator and the maximum of splits, of which both may be given by name. No separator: white space.
fn split_by(args: &[Value]) -> Result<(Option<Value>, Option<usize>), Error> {
    let (by, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let by = match by {
        Some(by) => Some(by),
        None => named.get::<Option<Value>>("sep")?,
    };
    let by = by.filter(|by| !by.is_none());
    let most = match most {
        Some(most) => Some(most),
        None => named.get("maxsplit")?,
    };
    named.assert_all_used()?;
    if by
        .as_ref()
        .is_some_and(|by| by.as_str().is_none_or(str::is_empty))
    {
        let message = "the separator of a split is a text, and not empty";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    // Negative: as often as it can be split.
    Ok((by, most.and_then(|most| usize::try_from(most).ok())))
}

fn split(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (by, most) = split_by(args)?;
    let most = most.map(|most| i64::try_from(most).unwrap_or(i64::MAX - 1));
    filters::split(&text.into(), by.and_then(|by| by.to_str()), most)
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (by, most) = split_by(args)?;
    let most = most.unwrap_or(usize::MAX);
    let mut found: Vec<Value> = match by.as_ref().and_then(Value::as_str) {
        Some(by) => text
            .rsplitn(most.saturating_add(1), by)
            .map(Value::from)
            .collect(),
        None => rsplit_white(text, most),
    };
    found.reverse();
    Ok(found.into())
}

/// The words of a text from its end, and what is left after `most` splits.
fn rsplit_white(text: &str, most: usize) -> Vec<Value> {
    let mut found = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        let space = rest.char_indices().rfind(|(_, c)| c.is_whitespace());
        let Some((at, space)) = space.filter(|_| found.len() < most) else {
            found.push(Value::from(rest));
            break;
        };
        found.push(Value::from(&rest[at + space.len_utf8()..]));
        rest = rest[..at].trim_end();
    }
    found
}

/// `list.index(value, start, stop)`.
fn index(list: &Value, args: &[Value]) -> Result<Value, Error> {
    let (wanted, start, stop): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let len = list.len().unwrap_or(0);
    // A negative bound counts from the end.
    let bound = |given: i64| match usize::try_from(given) {
        Ok(given) => given,
        Err(_) => len.saturating_sub(usize::try_from(given.unsigned_abs()).unwrap_or(usize::MAX)),
    };
    let (start, stop) = (start.map_or(0, bound), stop.map_or(len, bound));
    let items = list.try_iter()?.enumerate().take(stop).skip(start);
    let found = items
        .filter(|(_, item)| item == wanted)
        .map(|(at, _)| Value::from(at))
        .next();
    found.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the value is not in the list"))
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
        check("[whole, big, small]|join(',')", "4.0,1e+22,1e-07");
        check("big ~ '' ~ whole", "1e+224.0");
        check("big|string|length", "5");
        check("[big]|map('string')|join", "1e+22");
        check("(1, 'a')|string ~ (1,)", "(1, 'a')(1,)");
        check("true * 3 ~ 2 * 'ab' ~ [0] * 2 ~ 'a' * -1", "3abab[0, 0]");
        check(
            "[3 is divisibleby 0, 6 is divisibleby 3, 6.0 is divisibleby 4]",
            "[False, True, False]",
        );
    }

    #[test]
    fn methods_and_arguments_of_python() {
        check("'a,b,c'.rsplit(',', 1)", "['a,b', 'c']");
        check("'a,b,c'.rsplit(',')", "['a', 'b', 'c']");
        check("'a,b,c'.rsplit(',', maxsplit=1)", "['a,b', 'c']");
        check("'a,b,c'.split(',', maxsplit=1)", "['a', 'b,c']");
        check("'a,b,c'.split(sep=',')", "['a', 'b', 'c']");
        check(
            "'a,b,c'.split(',', 0) ~ ' a  b '.split()",
            "['a,b,c']['a', 'b']",
        );
        check(
            "['x'|int, [1]|int, 'x'|int(default=7), '3'|int]",
            "[0, 0, 7, 3]",
        );
        check("['x'|float, '1.5'|float, 'x'|float(2)]", "[0.0, 1.5, 2]");
        check("'a,b,c'.rsplit(',', -1)", "['a', 'b', 'c']");
        check("' a b  c '.rsplit()", "['a', 'b', 'c']");
        check("' a b  c '.rsplit(None, 1)", "[' a b', 'c']");
        check("''.rsplit()", "[]");
        check("[1, 2, 1].index(1, 1) ~ [1, 2, 1].index(1, -1)", "22");
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
        check_source(
            "{% macro m(x) %}<{{ x }}>{% endmacro %}{% set l = [m] %}{% set _ = l.append(m) %}{% set _ = l.append((1, 2)) %}{{ l[1](l[2]) }}",
            "<(1, 2)>",
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
