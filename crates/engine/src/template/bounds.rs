//! Limits of one rendering: bytes, elements, depth, time.
//!
//! A rendering runs on one thread from start to end, so its budget is a thread-local. If the caller no longer waits for
//! the result ([`stop`]), every check fails. Every growing value passes [`hold_value`], [`stored`], [`show`] or one of
//! the wrapped filters; see [`super::program`].

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::{self, Write};
use std::time::{Duration, Instant};

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python;
use crate::stop;

/// Bytes that one rendering may allocate, intermediate values included, in addition to a multiple of its input.
pub(super) const MADE_BYTES_MAX: usize = 64 << 20;
const MADE_TIMES_MAX: usize = 16;
/// The time limit of one rendering.
pub(super) const RENDER_TIME_MAX: Duration = Duration::from_secs(2);
/// The maximum of elements of a value, nested ones included.
const ELEMENTS_MAX: usize = 1 << 20;
/// The maximum nesting depth of a value.
const DEPTH_MAX: u32 = 64;
/// Bytes of an element of a list, without its contents.
pub(super) const ELEMENT_BYTES: usize = 32;

/// Filter names that no template can contain.
pub(super) const BYTES_HELD: &str = "@held";
pub(super) const STORED: &str = "@stored";
pub(super) const SLICED: &str = "@sliced";
pub(super) const GROWING: &str = "@growing";
pub(super) const SETTLED: &str = "@settled";

#[derive(Clone, Copy)]
pub(super) struct TemplateBudget {
    bytes: usize,
    until: Instant,
}

thread_local! {
    static BUDGET: Cell<Option<TemplateBudget>> = const { Cell::new(None) };
}

/// Runs a rendering under a budget for `input_bytes` of input.
pub(super) fn within<T>(input_bytes: usize, render: impl FnOnce() -> T) -> T {
    // In proportion to the input, because a template may copy each message several times.
    let bytes = MADE_BYTES_MAX.saturating_add(input_bytes.saturating_mul(MADE_TIMES_MAX));
    let until = Instant::now() + RENDER_TIME_MAX;
    BUDGET.set(Some(TemplateBudget { bytes, until }));
    let rendered = render();
    // A budget that a panic left behind is replaced by the next rendering of this thread.
    BUDGET.set(None);
    rendered
}

/// The kind of error that [`super::failure`] reports as a rendering that takes too long.
fn too_much() -> Error {
    Error::from(ErrorKind::OutOfFuel)
}

/// Checks that this many bytes are left, and that the time is not over.
pub(super) fn check(bytes: usize) -> Result<TemplateBudget, Error> {
    // Outside of `within` there is no budget, so nothing may be charged to it.
    let budget = BUDGET.get().ok_or_else(too_much)?;
    // The time is checked with each charge, because fuel counts instructions and a single one may be slow.
    if bytes > budget.bytes || Instant::now() > budget.until || stop::stopped() {
        return Err(too_much());
    }
    Ok(budget)
}

pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    let mut budget = check(bytes)?;
    budget.bytes -= bytes;
    BUDGET.set(Some(budget));
    Ok(())
}

/// Installs the bounded filters and the formatter in an environment.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter(BYTES_HELD, hold_value);
    environment.add_filter(STORED, stored);
    environment.add_filter(SLICED, super::slice::sliced);
    environment.add_filter(GROWING, super::list::growing);
    environment.add_filter(SETTLED, |value: &Value| super::list::settled(value, true));
    let mut wrap = |name: &'static str, filter: Value, check: fn(&[Value]) -> Result<(), Error>| {
        let wrapped = move |state: &mut State<'_, '_>, args: Rest<Value>, named: Kwargs| {
            let mut args = args.0;
            // The last argument of a call is those by name.
            if named.args().next().is_some() {
                args.push(named.into());
            }
            // Before the call: afterwards the memory is already used.
            check(&args)?;
            filter.call(state, &args)
        };
        environment.add_filter(name, wrapped);
    };
    let replace = |text: Cow<'_, str>, from: Cow<'_, str>, to: Cow<'_, str>, count| {
        python::replace(&text, &from, &to, count)
    };
    wrap("replace", Value::from_function(replace), replaced);
    wrap("join", Value::from_function(filters::join), joined);
    wrap("indent", Value::from_function(python::indent), indented);
    wrap("format", Value::from_function(filters::format), formatted);
    wrap("string", Value::from_function(filters::string), printed);
    wrap("list", Value::from_function(filters::list), listed);
    wrap("split", Value::from_function(filters::split), listed);
    wrap("lines", Value::from_function(filters::lines), listed);
    // Both print values of any size without passing the formatter.
    environment.remove_filter("pprint");
    // They make as many lists as their argument says, or views of lists, in one instruction. No template needs them, and Jinja has no
    // `chain`.
    for name in ["slice", "batch", "chain"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    // Python's methods do the same as the filters, so they have the same bounds.
    environment.set_unknown_method_callback(|state, value, method, args| {
        let of = |rest: &[Value]| [std::slice::from_ref(value), rest].concat();
        match (method, args) {
            ("replace", _) => replaced(&of(args))?,
            ("join", [items, ..]) => joined(&[items.clone(), value.clone()])?,
            ("format", _) => formatted(&of(args))?,
            ("split" | "splitlines" | "rsplit", _) => {
                listed(&of(args))?;
                // Its parts are copies.
                charge(text(&of(args), 0).len())?;
            }
            ("partition" | "rpartition", _) => charge(text(&of(args), 0).len())?,
            _ => {}
        }
        match python::method(value, method, args) {
            Some(result) => result,
            None => unknown_method_callback(state, value, method, args),
        }
    });
    python::install(environment);
    environment.set_formatter(show);
}

/// Charges a new value, and checks its number of elements and its depth.
fn hold_value(value: Value) -> Result<Value, Error> {
    // Charged after the instruction: what a single one makes is bounded by minijinja, or by the checks before the
    // wrapped filters.
    charge(size(&value))?;
    charge_value(&value, false, 0, &mut 0)?;
    Ok(value)
}

/// Checks a value that is assigned to a namespace. It must not contain a namespace, because a namespace in itself would
/// be an endless value.
fn stored(value: Value) -> Result<Value, Error> {
    charge_value(&value, true, 0, &mut 0)?;
    Ok(value)
}

/// Returns the bytes of a value without the contents of its elements: those were charged when they were created.
fn size(value: &Value) -> usize {
    match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0).saturating_mul(ELEMENT_BYTES),
    }
}

pub(super) fn charge_value(
    value: &Value,
    sole: bool,
    depth: u32,
    elements: &mut usize,
) -> Result<(), Error> {
    if !matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map
    ) {
        return Ok(());
    }
    let is_namespace = |value: &Value| {
        let object = value.as_object();
        // The type is private to minijinja, so only its name tells.
        object.is_some_and(|object| object.type_name().ends_with("Namespace"))
    };
    // minijinja and `Drop` recurse into values; a deep one would overflow the stack.
    if depth > DEPTH_MAX || sole && is_namespace(value) {
        return Err(too_much());
    }
    for item in value.try_iter()? {
        *elements += 1;
        if *elements > ELEMENTS_MAX {
            return Err(too_much());
        }
        if value.kind() == ValueKind::Map {
            charge_value(&value.get_item(&item)?, sole, depth + 1, elements)?;
        } else {
            charge_value(&item, sole, depth + 1, elements)?;
        }
    }
    Ok(())
}

/// Prints a value as Python does.
fn show(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        ValueKind::None => "None",
        ValueKind::String => value.as_str().unwrap_or_default(),
        _ => {
            let text = shown(value)?;
            charge(text.len())?;
            return Ok(out.write_str(&text)?);
        }
    };
    charge(text.len())?;
    Ok(out.write_str(text)?)
}

/// Returns the text of a value, if the budget allows it.
fn shown(value: &Value) -> Result<String, Error> {
    let left = check(0)?.bytes;
    charge_value(value, false, 0, &mut 0)?;
    let mut out = Limited {
        text: String::new(),
        left,
    };
    // Into a bounded writer: the length of a printed value is not known before.
    match value.kind() {
        ValueKind::Number => out.write_str(&python::number(value)),
        _ => write!(out, "{value}"),
    }
    .map_err(|_full| too_much())?;
    Ok(out.text)
}

struct Limited {
    text: String,
    left: usize,
}

impl Write for Limited {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.left = self.left.checked_sub(text.len()).ok_or(fmt::Error)?;
        self.text.push_str(text);
        Ok(())
    }
}

fn text(args: &[Value], index: usize) -> &str {
    args.get(index).and_then(Value::as_str).unwrap_or_default()
}

fn replaced(args: &[Value]) -> Result<(), Error> {
    let (whole, from, to) = (text(args, 0), text(args, 1), text(args, 2));
    // An upper bound of the result: every match could become longer.
    let found = whole.matches(from).count();
    check(found.saturating_mul(to.len()).saturating_add(whole.len())).map(drop)
}

fn joined(args: &[Value]) -> Result<(), Error> {
    let Some(items) = args.first() else {
        return Ok(());
    };
    let mut bytes = 0_usize;
    for item in items.try_iter()? {
        let item = match item.as_str() {
            Some(text) => text.len(),
            None => shown(&item)?.len(),
        };
        bytes = bytes
            .saturating_add(item)
            .saturating_add(text(args, 1).len());
        check(bytes)?;
    }
    Ok(())
}

fn indented(args: &[Value]) -> Result<(), Error> {
    // The width is a positional or a named argument, a number or the indent itself.
    let bytes = |width: &Value| width.as_str().map(str::len).or_else(|| width.as_usize());
    let width = |arg: &Value| {
        let named = arg.get_attr("width").ok();
        bytes(arg).or_else(|| bytes(&named?))
    };
    let width = args.iter().skip(1).filter_map(width).max().unwrap_or(4);
    let lines = text(args, 0).split('\n').count();
    check(
        lines
            .saturating_mul(width)
            .saturating_add(text(args, 0).len()),
    )
    .map(drop)
}

/// The maximum of digits of a width in a format.
const DIGITS_MAX: usize = 3;

fn formatted(args: &[Value]) -> Result<(), Error> {
    let format = text(args, 0);
    let mut digits = format.split(|c: char| !c.is_ascii_digit());
    if digits.any(|digits| digits.len() > DIGITS_MAX) || format.contains('*') {
        return Err(too_much());
    }
    // The widest field that `DIGITS_MAX` allows.
    let mut most = 1000_usize;
    for arg in args.iter().skip(1) {
        most = most.saturating_add(shown(arg)?.len());
    }
    let directives = format.matches(['%', '{']).count();
    check(directives.saturating_mul(most).saturating_add(format.len())).map(drop)
}

fn printed(args: &[Value]) -> Result<(), Error> {
    match args.first() {
        Some(value) if value.as_str().is_none() => shown(value).map(drop),
        _ => Ok(()),
    }
}

/// Checks that the budget allows a list whose elements may be single characters.
fn listed(args: &[Value]) -> Result<(), Error> {
    check(text(args, 0).len().saturating_mul(ELEMENT_BYTES)).map(drop)
}
