//! Limits of one rendering: bytes, elements, depth, time.
//!
//! A rendering runs on one thread from start to end, so its budget is a thread-local. If the caller no longer waits for
//! the result ([`stop`]), every check fails. Three rules make the limits hold whatever a template does:
//!
//! - What it can name is in the tables of [`super::allowed`]; what is not there does not exist.
//! - Before an operation, what it may need at its peak is checked against what is left ([`check`]). It follows from the size of its
//!   operands ([`measure`]): a thousand references to one long text are as large as a thousand texts, because an operation makes those.
//! - After it, what it made is charged ([`held`]).
//!
//! [`super::program`] puts the operators of the language behind the same rules.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::{self, Write};
use std::time::{Duration, Instant};

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};

use super::{guard, python};
use crate::stop;

/// Bytes that one rendering may allocate, intermediate values included, in addition to a multiple of its input.
pub(super) const MADE_BYTES_MAX: usize = 64 << 20;
const MADE_TIMES_MAX: usize = 16;
/// The maximum of both together: a text that becomes a value is there twice for a moment.
const BUDGET_BYTES_MAX: usize = 128 << 20;
/// The time limit of one rendering.
pub(super) const RENDER_TIME_MAX: Duration = Duration::from_secs(2);
/// The maximum of elements of a value, nested ones included.
const ELEMENTS_MAX: usize = 1 << 20;
/// The maximum nesting depth of a value.
const DEPTH_MAX: u32 = 64;
/// Bytes of an element of a list, of a member of a dictionary, and of a list or dictionary, without contents.
pub(super) const ELEMENT_BYTES: usize = 32;
pub(super) const MEMBER_BYTES: usize = 128;
pub(super) const OBJECT_BYTES: usize = 64;

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
    let bytes = bytes.min(BUDGET_BYTES_MAX);
    let until = Instant::now() + RENDER_TIME_MAX;
    BUDGET.set(Some(TemplateBudget { bytes, until }));
    let rendered = render();
    // A budget that a panic left behind is replaced by the next rendering of this thread.
    BUDGET.set(None);
    rendered
}

/// The kind of error that [`super::failure`] reports as a rendering that takes too long.
pub(super) fn too_much() -> Error {
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

/// Checks that the budget allows a text that is made, which is copied where it becomes a value.
pub(super) fn check_text(bytes: usize) -> Result<(), Error> {
    check(bytes.saturating_mul(2)).map(drop)
}

pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    let mut budget = check(bytes)?;
    budget.bytes -= bytes;
    BUDGET.set(Some(budget));
    Ok(())
}

/// Sets the formatter, which charges what is printed.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_formatter(show);
}

/// Charges a new value, and checks its number of elements and its depth.
pub(super) fn held(value: Value) -> Result<Value, Error> {
    let value = picked(value)?;
    if is_composite(&value) {
        measure(&value)?;
    }
    Ok(value)
}

/// Charges a new value that consists of elements of another, so that it is no deeper. Lists that are computed when they are read become
/// lists, so that nobody has to compute them twice, or while it counts.
pub(super) fn picked(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        charge(text.len().saturating_add(ELEMENT_BYTES))?;
        return Ok(value);
    }
    if !is_composite(&value) {
        check(0)?;
        return Ok(value);
    }
    let value = if value.kind() == ValueKind::Iterable {
        let items = collected(&value)?;
        // The pairs of a dictionary are made when they are read.
        let pairs = items.iter().filter(|item| item.is_tuple()).count();
        charge(pairs.saturating_mul(MEMBER_BYTES))?;
        Value::from(items)
    } else {
        value
    };
    // Without the contents of its elements: those were charged when they were created.
    let element = match value.kind() {
        ValueKind::Map => MEMBER_BYTES,
        _ => ELEMENT_BYTES,
    };
    let elements = value.len().unwrap_or(0).saturating_mul(element);
    charge(elements.saturating_add(OBJECT_BYTES))?;
    Ok(value)
}

/// Returns the elements of a list, however long it says that it is.
pub(super) fn collected(list: &Value) -> Result<Vec<Value>, Error> {
    let mut items = Vec::new();
    for item in list.try_iter()?.checked() {
        if items.len().is_multiple_of(256) {
            check(items.len().saturating_mul(ELEMENT_BYTES))?;
        }
        items.push(item?);
    }
    Ok(items)
}

pub(super) fn is_composite(value: &Value) -> bool {
    value.as_object().is_some()
}

/// Returns the bytes of a value written out in full, where each part counts as often as it occurs.
///
/// # Errors
/// More than is left of the budget, and more elements or more depth than a value may have.
pub(super) fn measure(value: &Value) -> Result<usize, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len()),
        None if is_composite(value) => size(value, check(0)?.bytes),
        None => Ok(ELEMENT_BYTES),
    }
}

/// As [`measure`], outside of a rendering.
pub(super) fn size(value: &Value, bytes_max: usize) -> Result<usize, Error> {
    let mut measure = Measure::new(bytes_max, true);
    measure.add(value, 0)?;
    Ok(measure.bytes)
}

/// Checks a value that outlives the scope that it was made in: what a namespace, a list that grows or a loop keeps. A namespace or a
/// loop in it could come to contain itself, and would never be freed.
pub(super) fn stored(value: Value) -> Result<Value, Error> {
    Measure::new(check(0)?.bytes, false).add(&value, 0)?;
    Ok(value)
}

struct Measure {
    bytes: usize,
    bytes_max: usize,
    elements: usize,
    /// Whether namespaces and loops may be in it.
    scoped: bool,
}

impl Measure {
    fn new(bytes_max: usize, scoped: bool) -> Self {
        Self {
            bytes: 0,
            bytes_max,
            elements: 0,
            scoped,
        }
    }

    fn add(&mut self, value: &Value, depth: u32) -> Result<(), Error> {
        let kind = value.kind();
        self.bytes += match (value.as_str(), kind) {
            (Some(text), _) => text.len(),
            // A function is printed as the name of its type.
            (None, ValueKind::Plain) => 1024,
            _ => ELEMENT_BYTES,
        };
        let walked = matches!(kind, ValueKind::Seq | ValueKind::Iterable | ValueKind::Map);
        // minijinja and `Drop` recurse into values; a deep one would overflow the stack.
        if self.bytes > self.bytes_max || walked && depth > DEPTH_MAX {
            return Err(too_much());
        }
        if !self.scoped && (is_of(value, "Namespace") || is_of(value, "Loop")) {
            let message = "neither a namespace nor a loop can be kept in another";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        if !walked {
            return Ok(());
        }
        if kind == ValueKind::Map {
            let members = value.as_object().and_then(|map| map.try_iter_pairs());
            for (key, member) in members.into_iter().flatten() {
                self.bytes += MEMBER_BYTES;
                self.element(&key, depth)?;
                self.add(&member, depth + 1)?;
            }
            return Ok(());
        }
        for item in value.try_iter()?.checked() {
            self.element(&item?, depth)?;
        }
        Ok(())
    }

    fn element(&mut self, element: &Value, depth: u32) -> Result<(), Error> {
        self.elements += 1;
        if self.elements > ELEMENTS_MAX {
            return Err(too_much());
        }
        self.add(element, depth + 1)
    }
}

/// Whether it is an object of this type of minijinja's. Those are private, so only the name tells.
pub(super) fn is_of(value: &Value, type_name: &str) -> bool {
    value.as_object().is_some_and(|object| {
        let name = object.type_name().rsplit("::").next();
        name == Some(type_name)
    })
}

/// Prints a value as Python does.
fn show(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = guard::emitted(printed(value)?)?;
    // Twice: what a block or a macro prints is copied at its end.
    charge(text.len().saturating_mul(2))?;
    Ok(out.write_str(&text)?)
}

/// Returns what Python's `str` makes of a value, if the budget allows it.
pub(super) fn printed(value: &Value) -> Result<Cow<'_, str>, Error> {
    Ok(match value.kind() {
        ValueKind::String => Cow::Borrowed(value.as_str().unwrap_or_default()),
        ValueKind::Bool if value.is_true() => Cow::Borrowed("True"),
        ValueKind::Bool => Cow::Borrowed("False"),
        ValueKind::None => Cow::Borrowed("None"),
        ValueKind::Number => Cow::Owned(python::number(value)),
        _ => {
            // Bounds the depth, because printing recurses.
            check_text(measure(value)?)?;
            let mut out = Limited {
                text: String::new(),
                left: check(0)?.bytes / 2,
            };
            // Into a bounded writer: the length of a printed value is not known before.
            write!(out, "{value}").map_err(|_full| too_much())?;
            Cow::Owned(out.text)
        }
    })
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

/// `left ~ right`.
pub(super) fn concatenated(left: &Value, right: &Value) -> Result<Value, Error> {
    let (left, mut right) = (printed(left)?, printed(right)?);
    if let Some(other) = guard::joined(&left, &right)? {
        right = other.into();
    }
    check_text(left.len().saturating_add(right.len()))?;
    charge(left.len().saturating_add(right.len()) + ELEMENT_BYTES)?;
    Ok(Value::from([left, right].concat()))
}

/// `left * right`.
pub(super) fn multiplied(left: &Value, right: &Value) -> Result<Value, Error> {
    let repeats = |value: &Value| value.as_str().is_some() || value.kind() == ValueKind::Seq;
    let (repeated, times) = match (repeats(left), repeats(right)) {
        (true, _) => (left, right),
        (false, true) => (right, left),
        (false, false) => return python::product(left, right),
    };
    let Some(times) = times.as_i64() else {
        let message = "texts and lists can only be multiplied with integers";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    };
    // As in Python, a negative number of times is none.
    let times = usize::try_from(times).unwrap_or(0);
    if let Some(text) = repeated.as_str() {
        let bytes = text.len().saturating_mul(times);
        check_text(bytes)?;
        charge(bytes)?;
        return Ok(Value::from(match guard::joined(text, text)? {
            Some(next) if times > 1 => [text, &next.repeat(times - 1)].concat(),
            _ => text.repeat(times),
        }));
    }
    let items: Vec<Value> = collected(repeated)?;
    let len = items.len().saturating_mul(times);
    charge(len.saturating_mul(ELEMENT_BYTES))?;
    let items: Vec<Value> = items.iter().cycle().take(len).cloned().collect();
    let made = if repeated.is_tuple() {
        Value::from(Tuple::from(items))
    } else {
        Value::from(items)
    };
    measure(&made)?;
    Ok(made)
}

/// Checks that two values can be compared, which takes time in proportion to their size.
pub(super) fn comparable(left: &Value, right: &Value) -> Result<(), Error> {
    if is_composite(left) && is_composite(right) {
        check(measure(left)?.saturating_add(measure(right)?))?;
    } else {
        check(0)?;
    }
    Ok(())
}

/// `value in container`.
pub(super) fn contained(value: &Value, container: &Value) -> Result<bool, Error> {
    if let Some(text) = container.as_str() {
        check(0)?;
        return Ok(text.contains(&*printed(value)?));
    }
    match (container.kind(), container.as_object()) {
        (ValueKind::Undefined, _) => Ok(false),
        (ValueKind::Map, Some(members)) => Ok(members.get_value(&key(value.clone())?).is_some()),
        (ValueKind::Plain, _) => Ok(false),
        (_, Some(_)) => {
            check(measure(value)?.saturating_add(measure(container)?))?;
            for item in container.try_iter()?.checked() {
                if item? == *value {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (_, None) => {
            let message = "cannot perform a containment check on this value";
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    }
}

/// The member of a macro that is made whenever it is looked up, a list of its arguments, and what that takes.
pub(super) const ARGUMENTS: &str = "arguments";
const ARGUMENTS_BYTES: usize = MACRO_ARGUMENTS_MAX * ELEMENT_BYTES;
/// The maximum of arguments of a macro.
pub(super) const MACRO_ARGUMENTS_MAX: usize = 64;

/// Checks a value that is looked up in another, which takes time in proportion to its size.
pub(super) fn key(key: Value) -> Result<Value, Error> {
    if key.as_str() == Some(ARGUMENTS) {
        charge(ARGUMENTS_BYTES)?;
    }
    check(if is_composite(&key) {
        measure(&key)?
    } else {
        0
    })?;
    Ok(key)
}

/// The work of comparing keys of a dictionary that may have the same hash, each with all before it. minijinja hashes whole numbers
/// beyond 64 bits as floats, of which one stands for thousands of them; and what is in a list may be such numbers.
pub(super) fn alike<'a>(keys: impl Iterator<Item = &'a Value>) -> usize {
    let is_wide = |key: &&Value| key.is_integer() && key.as_i64().is_none();
    let alike = keys.filter(|key| is_wide(key) || is_composite(key)).count();
    alike.saturating_mul(alike).saturating_mul(8)
}
