//! The filters, tests, functions and methods that a template can call, each with what a call may need at its peak.
//!
//! The environment is empty but for these tables, so that whatever minijinja has, or comes to have, is refused until somebody has
//! thought about its cost. It has more than these: `batch`, `slice`, `chain` and `zip` make as many lists as an argument says, or
//! views of lists; `pprint` and `debug` print values of any size. No template needs them, and Jinja has neither `chain` nor `zip`.

use minijinja::functions::{self, Function};
use minijinja::value::{FunctionArgs, FunctionResult, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, filters, tests};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::bounds::{self, MEMBER_BYTES};
use super::{guard, list, python, slice};

/// Filters of [`super::program`], with names that no template can contain.
pub(super) const HELD: &str = "@held";
pub(super) const STORED: &str = "@stored";
pub(super) const SLICED: &str = "@sliced";
pub(super) const SETTLED: &str = "@settled";
pub(super) const KEPT: &str = "@kept";
pub(super) const RETAINED: &str = "@retained";
pub(super) const TIMELY: &str = "@timely";
pub(super) const ADDENDS: &str = "@addends";
pub(super) const DICTIONARY: &str = "@dictionary";
pub(super) const UNPACKED: &str = "@unpacked";
pub(super) const COMPARABLE: &str = "@comparable";
pub(super) const KEY: &str = "@key";
pub(super) const CONCATENATED: &str = "@concatenated";
pub(super) const MULTIPLIED: &str = "@multiplied";
pub(super) const CONTAINED: &str = "@contained";
pub(super) const EQUAL: &str = "@equal";
pub(super) const UNEQUAL: &str = "@unequal";
pub(super) const LESS: &str = "@less";
pub(super) const NOT_MORE: &str = "@not_more";
pub(super) const MORE: &str = "@more";
pub(super) const NOT_LESS: &str = "@not_less";
pub(super) const CHANGED: &str = "@changed";
pub(super) const CYCLE: &str = "@cycle";

/// All of them.
pub(super) const OPERATORS: [&str; 23] = [
    HELD,
    STORED,
    SLICED,
    SETTLED,
    KEPT,
    RETAINED,
    TIMELY,
    ADDENDS,
    DICTIONARY,
    UNPACKED,
    COMPARABLE,
    KEY,
    CONCATENATED,
    MULTIPLIED,
    CONTAINED,
    EQUAL,
    UNEQUAL,
    LESS,
    NOT_MORE,
    MORE,
    NOT_LESS,
    CHANGED,
    CYCLE,
];

/// What a call may need at its peak, in bytes that it makes or compares, besides its result.
#[derive(Clone, Copy)]
enum Cost {
    /// As much as its result, or it checks what it needs itself.
    Own,
    /// This many times the bytes of its arguments as texts, into which they are converted.
    Texts(usize),
    /// This many times the size of its first argument, and the others for each element of it.
    Elements(usize),
    /// A list of what it picks from its first argument, and the others for each element of it. What a test of an element needs, the
    /// test checks.
    Picked,
    /// What a check of its own finds.
    Checked(fn(&[Value]) -> Result<(), Error>),
    /// Likewise, of arguments that are converted into texts.
    CheckedTexts(fn(&[Value]) -> Result<(), Error>),
}

use Cost::{Checked, CheckedTexts, Elements, Own, Picked, Texts};

impl Cost {
    /// Checks the arguments of a call, and returns what it is called with.
    fn check(self, args: Vec<Value>) -> Result<Vec<Value>, Error> {
        match self {
            Own => bounds::check(0).map(drop)?,
            Texts(times) => {
                let args = texts(args)?;
                let bytes: usize = args.iter().filter_map(Value::as_str).map(str::len).sum();
                bounds::check(bytes.saturating_mul(times))?;
                return Ok(args);
            }
            Elements(times) => {
                bounds::check(compared(&args)?.saturating_mul(times))?;
            }
            Picked => {
                let elements = args.first().and_then(Value::len).unwrap_or(0);
                let each = others(&args)?.saturating_add(2 * bounds::ELEMENT_BYTES);
                bounds::check(elements.saturating_mul(each))?;
            }
            Checked(check) => {
                bounds::check(0)?;
                check(&args)?;
            }
            CheckedTexts(check) => {
                let args = texts(args)?;
                check(&args)?;
                return Ok(args);
            }
        }
        Ok(args)
    }
}

/// The maximum of arguments of a call that converts them into texts.
const TEXTS_MAX: usize = 8;

/// Converts lists and dictionaries among the arguments, as the call would, but no more of all of them than the budget allows.
fn texts(args: Vec<Value>) -> Result<Vec<Value>, Error> {
    if args.len() > TEXTS_MAX {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut converted = 0_usize;
    let text = |arg: Value| {
        bounds::check(converted)?;
        if bounds::is_composite(&arg) && !arg.is_kwargs() {
            let text = bounds::printed(&arg)?.into_owned();
            converted = converted.saturating_add(text.len());
            bounds::check(converted)?;
            return Ok(Value::from(text));
        }
        Ok(arg)
    };
    args.into_iter().map(text).collect()
}

/// The size of the first argument, and of the others for each of its elements: with paths and tests as arguments.
fn compared(args: &[Value]) -> Result<usize, Error> {
    let Some(first) = args.first() else {
        return Ok(0);
    };
    let elements = first.len().unwrap_or(1).max(1);
    Ok(bounds::measure(first)?.saturating_add(others(args)?.saturating_mul(elements)))
}

/// The size of all arguments but the first.
fn others(args: &[Value]) -> Result<usize, Error> {
    let mut bytes = 0_usize;
    for arg in args.iter().skip(1) {
        bytes = bytes.saturating_add(bounds::measure(arg)?);
    }
    Ok(bytes)
}

/// Fills an empty environment.
pub(super) fn install(environment: &mut Environment<'_>) {
    operators(environment);
    text_filters(environment);
    list_filters(environment);
    number_filters(environment);
    all_tests(environment);
    function(environment, "dict", Checked(measured), functions::dict);
    function(
        environment,
        "namespace",
        Checked(measured),
        functions::namespace,
    );
    function(environment, "range", Own, functions::range);
    environment.set_unknown_method_callback(method);
}

/// Adds a filter whose operands are checked before, and whose result is charged.
fn charged<F, R, A>(
    environment: &mut Environment<'_>,
    name: &'static str,
    cost: Cost,
    call: F,
    charge: impl Fn(&[Value], Value) -> Result<Value, Error> + Send + Sync + 'static,
) where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    let call = Value::from_function(call);
    let checked = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = cost.check(args.into_values())?;
        // Here, and not by an instruction after it: `map` calls a filter for each element.
        charge(&args, call.call(state, &args)?)
    };
    environment.add_filter(name, checked);
}

fn filter<F, R, A>(environment: &mut Environment<'_>, name: &'static str, cost: Cost, call: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    charged(environment, name, cost, call, |_, made| bounds::held(made));
}

/// A filter whose result has elements of its first argument, or is one.
fn picking<F, R, A>(environment: &mut Environment<'_>, name: &'static str, cost: Cost, call: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    charged(environment, name, cost, call, |_, made| {
        bounds::picked(made)
    });
}

/// A filter that makes the elements of its result, and not only a list of what there is.
fn parts<F, R, A>(environment: &mut Environment<'_>, name: &'static str, cost: Cost, call: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    charged(environment, name, cost, call, |_, made| {
        bounds::charge(bounds::measure(&made)?)?;
        bounds::held(made)
    });
}

/// A filter that changes the letters of its first argument.
fn changing<F, R, A>(environment: &mut Environment<'_>, name: &'static str, cost: Cost, call: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    charged(environment, name, cost, call, |args, made| {
        bounds::held(guard::changed(args, made)?)
    });
}

fn test<F, R, A>(environment: &mut Environment<'_>, name: &'static str, cost: Cost, call: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    let call = Value::from_function(call);
    let checked = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = cost.check(args.into_values())?;
        call.call(state, &args)
    };
    environment.add_test(name, checked);
}

/// Its result is charged by the instruction after the call, as that of a macro is.
fn function<F, R, A>(environment: &mut Environment<'_>, name: &'static str, cost: Cost, call: F)
where
    F: Function<R, A>,
    R: FunctionResult,
    A: for<'a> FunctionArgs<'a>,
{
    let call = Value::from_function(call);
    let checked = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = cost.check(args.into_values())?;
        call.call(state, &args)
    };
    environment.add_function(name, checked);
}

/// The filters that take the place of operators.
fn operators(to: &mut Environment<'_>) {
    to.add_filter(HELD, bounds::held);
    to.add_filter(STORED, bounds::stored);
    to.add_filter(SLICED, slice::sliced);
    to.add_filter(SETTLED, list::settled);
    to.add_filter(KEPT, |value: Value| {
        // A member of a closure, or a macro; its arguments are part of its size.
        let bytes = bounds::measure(&value)?.saturating_add(MEMBER_BYTES * 4);
        bounds::charge(bytes).map(|()| value)
    });
    to.add_filter(RETAINED, |value: Value| {
        // A reference to it is kept until the rendering ends.
        bounds::charge(MEMBER_BYTES).map(|()| value)
    });
    to.add_filter(TIMELY, |value: Value| bounds::check(0).map(|_| value));
    to.add_filter(ADDENDS, |left: Value, right: Value| {
        let bytes = |value: &Value| value.as_str().map_or(0, str::len);
        bounds::check_text(bytes(&left).saturating_add(bytes(&right)))?;
        let right = match (left.as_str(), right.as_str()) {
            (Some(left), Some(next)) => guard::joined(left, next)?.map_or(right, Value::from),
            _ => right,
        };
        // Backwards, as `unpacked`.
        Ok::<_, Error>(Value::from(vec![right, left]))
    });
    to.add_filter(DICTIONARY, dictionary);
    to.add_filter(UNPACKED, unpacked);
    to.add_filter(COMPARABLE, |value: Value| {
        // It may be printed, to be looked for in a text; a character is escaped with four at most.
        bounds::check(bounds::measure(&value)?.saturating_mul(4)).map(|_| value)
    });
    to.add_filter(KEY, bounds::key);
    to.add_filter(CONCATENATED, bounds::concatenated);
    to.add_filter(MULTIPLIED, bounds::multiplied);
    to.add_filter(CONTAINED, bounds::contained);
    let mut compare = |name: &'static str, holds: fn(&Value, &Value) -> bool| {
        let compare = move |left: &Value, right: &Value| {
            bounds::comparable(left, right)?;
            Ok::<_, Error>(holds(left, right))
        };
        to.add_filter(name, compare);
    };
    compare(EQUAL, |left, right| left == right);
    compare(UNEQUAL, |left, right| left != right);
    compare(LESS, |left, right| left < right);
    compare(NOT_MORE, |left, right| left <= right);
    compare(MORE, |left, right| left > right);
    compare(NOT_LESS, |left, right| left >= right);
    for (name, method) in [(CHANGED, "changed"), (CYCLE, "cycle")] {
        let call = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            loop_method(state, method, &args.into_values())
        };
        to.add_filter(name, call);
    }
}

/// A dictionary of keys and values in turn. minijinja's takes the time for its keys without a check between them.
fn dictionary(members: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let members = members.into_values();
    let mut keys = 0_usize;
    for key in members.iter().step_by(2) {
        keys = keys.saturating_add(bounds::measure(key)?);
    }
    bounds::check(keys.max(bounds::alike(members.iter().step_by(2))))?;
    let pairs = members.chunks_exact(2);
    let pairs = pairs.map(|pair| (pair[0].clone(), pair[1].clone()));
    Ok(Value::from_pairs(pairs))
}

/// The lists or dictionaries that are unpacked into arguments, backwards.
fn unpacked(values: &Value) -> Result<Value, Error> {
    let mut values = bounds::collected(values)?;
    let lens = values.iter().map(|value| value.len().unwrap_or(0));
    bounds::check(lens.sum::<usize>().saturating_mul(MEMBER_BYTES))?;
    let dictionaries = values.iter().filter(|value| value.kind() == ValueKind::Map);
    let keys: Vec<Value> = dictionaries
        .filter_map(|it| it.try_iter().ok())
        .flatten()
        .collect();
    bounds::check(bounds::alike(keys.iter()))?;
    values.reverse();
    Ok(values.into())
}

fn text_filters(to: &mut Environment<'_>) {
    // A letter becomes three at most, in a buffer that grows, which is copied.
    changing(to, "capitalize", Texts(9), filters::capitalize);
    changing(to, "lower", Texts(9), filters::lower);
    changing(to, "title", Texts(9), filters::title);
    changing(to, "upper", Texts(9), filters::upper);
    changing(to, "e", Texts(12), filters::escape);
    changing(to, "escape", Texts(12), filters::escape);
    filter(to, "safe", Texts(2), filters::safe);
    filter(to, "trim", CheckedTexts(trimmed), filters::trim);
    filter(to, "replace", CheckedTexts(replaced), python::replace);
    changing(to, "indent", CheckedTexts(indented), python::indent);
    let format = |args: &[Value], made| bounds::held(guard::formatted(args, made)?);
    charged(to, "format", Checked(formatted), filters::format, format);
    parts(to, "lines", Checked(split), filters::lines);
    parts(to, "split", Checked(split), filters::split);
    filter(to, "join", Elements(1), python::join);
    filter(to, "string", Own, |value: &Value| {
        // A text keeps whether it is safe.
        Ok::<_, Error>(match value.kind() {
            ValueKind::String => value.clone(),
            _ => Value::from(bounds::printed(value)?.into_owned()),
        })
    });
    filter(to, "tojson", Own, super::json::filter);
}

fn list_filters(to: &mut Environment<'_>) {
    filter(to, "attr", Elements(1), filters::attr);
    filter(to, "count", Own, python::length);
    filter(to, "d", Own, python::default);
    filter(to, "default", Own, python::default);
    parts(to, "dictsort", Checked(sorted), filters::dictsort);
    picking(to, "first", Own, filters::first);
    parts(to, "groupby", Checked(sorted), filters::groupby);
    filter(to, "items", Elements(1), filters::items);
    picking(to, "last", Own, filters::last);
    filter(to, "length", Own, python::length);
    picking(to, "list", Checked(listed), filters::list);
    filter(to, "map", Checked(mapped), filters::map);
    filter(to, "max", Elements(2), filters::max);
    filter(to, "min", Elements(2), filters::min);
    picking(to, "reject", Picked, filters::reject);
    picking(to, "rejectattr", Picked, filters::rejectattr);
    changing(to, "reverse", Elements(4), filters::reverse);
    picking(to, "select", Picked, filters::select);
    picking(to, "selectattr", Picked, filters::selectattr);
    filter(to, "sort", Checked(sorted), filters::sort);
    filter(to, "sum", Elements(1), python::sum);
    filter(to, "unique", Checked(sorted), filters::unique);
}

fn number_filters(to: &mut Environment<'_>) {
    filter(to, "abs", Own, filters::abs);
    filter(to, "bool", Own, filters::bool);
    filter(to, "float", Own, python::to_float);
    filter(to, "int", Own, python::int);
    filter(to, "round", Own, filters::round);
}

fn all_tests(to: &mut Environment<'_>) {
    test(to, "boolean", Own, tests::is_boolean);
    test(to, "defined", Own, tests::is_defined);
    test(to, "divisibleby", Own, python::is_divisible);
    test(to, "endingwith", Texts(1), tests::is_endingwith);
    test(to, "escaped", Own, tests::is_safe);
    test(to, "even", Own, tests::is_even);
    test(to, "false", Own, tests::is_false);
    test(to, "filter", Own, tests::is_filter);
    test(to, "float", Own, tests::is_float);
    test(to, "in", Own, python::is_in);
    test(to, "int", Own, tests::is_integer);
    test(to, "integer", Own, tests::is_integer);
    test(to, "iterable", Own, python::is_iterable);
    test(to, "lower", Own, tests::is_lower);
    test(to, "mapping", Own, tests::is_mapping);
    test(to, "none", Own, tests::is_none);
    test(to, "number", Own, tests::is_number);
    test(to, "odd", Own, tests::is_odd);
    test(to, "safe", Own, tests::is_safe);
    test(to, "sameas", Own, tests::is_sameas);
    test(to, "sequence", Own, python::is_sequence);
    test(to, "startingwith", Texts(1), tests::is_startingwith);
    test(to, "string", Own, tests::is_string);
    test(to, "test", Own, tests::is_test);
    test(to, "true", Own, tests::is_true);
    test(to, "undefined", Own, tests::is_undefined);
    test(to, "upper", Own, tests::is_upper);
    let mut compare = |names: &[&'static str], holds: fn(&Value, &Value) -> bool| {
        for &name in names {
            test(to, name, Own, move |left: &Value, right: &Value| {
                bounds::comparable(left, right)?;
                Ok::<_, Error>(holds(left, right))
            });
        }
    };
    compare(&["eq", "equalto", "=="], |left, right| left == right);
    compare(&["ne", "!="], |left, right| left != right);
    compare(&["lt", "lessthan", "<"], |left, right| left < right);
    compare(&["le", "<="], |left, right| left <= right);
    compare(&["gt", "greaterthan", ">"], |left, right| left > right);
    compare(&["ge", ">="], |left, right| left >= right);
}

/// Calls one of Python's methods, which do the same as the filters, so they have the same bounds.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let all = [std::slice::from_ref(value), args].concat();
    match name {
        "capitalize" | "lower" | "title" | "upper" => {
            bounds::check(text(&all, 0).len().saturating_mul(9))?;
        }
        "strip" | "lstrip" | "rstrip" => trimmed(&all)?,
        "replace" => replaced(&all)?,
        "format" => formatted(&all)?,
        "join" if value.as_str().is_some() && args.len() == 1 => {
            return python::join(&args[0], Rest(vec![value.clone()]), python::unnamed());
        }
        "split" | "splitlines" | "rsplit" => {
            split(&all)?;
            // Its parts are copies.
            bounds::charge(text(&all, 0).len())?;
        }
        "partition" | "rpartition" => bounds::charge(text(&all, 0).len())?,
        "removeprefix" | "removesuffix" => bounds::check(text(&all, 0).len()).map(drop)?,
        "count" | "index" | "startswith" | "endswith" => measured(&all)?,
        "get" => {
            for arg in args.iter().take(1) {
                bounds::key(arg.clone())?;
            }
        }
        "copy" | "find" | "isalnum" | "isalpha" | "isascii" | "isdigit" | "islower"
        | "isnumeric" | "isspace" | "isupper" | "items" | "keys" | "rfind" | "values" => {
            bounds::check(0)?;
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    }
    let made = match python::method(value, name, args) {
        Some(result) => result,
        None => unknown_method_callback(state, value, name, args),
    };
    match name {
        "capitalize" | "lower" | "title" | "upper" => guard::changed(&all, made?),
        "format" => guard::formatted(&all, made?),
        _ => made,
    }
}

/// `loop.changed(..)` and `loop.cycle(..)`. The loop keeps the values of the first, and the second divides by their number.
fn loop_method(state: &mut State<'_, '_>, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some((object, values)) = args.split_first() else {
        return Err(Error::from(ErrorKind::MissingArgument));
    };
    if bounds::is_of(object, "Loop") {
        if values.is_empty() {
            let message = format!("loop.{name} is called without values");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        for value in values {
            bounds::stored(value.clone())?;
        }
        // All of them are compared with those of the call before.
        measured(values)?;
    }
    object.call_method(state, name, values)
}

fn text(args: &[Value], index: usize) -> &str {
    args.get(index).and_then(Value::as_str).unwrap_or_default()
}

/// Each argument is copied or compared once.
fn measured(args: &[Value]) -> Result<(), Error> {
    let mut bytes = 0_usize;
    for arg in args {
        bytes = bytes.saturating_add(bounds::measure(arg)?);
    }
    bounds::check(bytes).map(drop)
}

/// Each character is compared with all that are trimmed.
fn trimmed(args: &[Value]) -> Result<(), Error> {
    let (whole, trimmed) = (text(args, 0).len(), text(args, 1).len());
    let compared = whole.saturating_mul(trimmed.max(1));
    bounds::check(compared.saturating_add(trimmed.saturating_mul(size_of::<char>()))).map(drop)
}

fn replaced(args: &[Value]) -> Result<(), Error> {
    let (whole, from, to) = (text(args, 0), text(args, 1), text(args, 2));
    // An upper bound of the result: every match could become longer.
    let found = whole.matches(from).count();
    let bytes = found.saturating_mul(to.len()).saturating_add(whole.len());
    bounds::check_text(bytes)
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
    // The indent itself is made as well.
    let bytes = lines.saturating_add(1).saturating_mul(width);
    bounds::check_text(bytes.saturating_add(text(args, 0).len()))
}

/// The maximum of digits of a width in a format, or of a year in its text.
const DIGITS_MAX: usize = 4;

fn formatted(args: &[Value]) -> Result<(), Error> {
    let format = text(args, 0);
    let mut digits = format.split(|c: char| !c.is_ascii_digit());
    let any_width = format.contains('%') && format.contains('*');
    if digits.any(|digits| digits.len() > DIGITS_MAX) || any_width {
        return Err(bounds::too_much());
    }
    // What a loop or a macro prints says nothing of its members, which a field may name.
    let is_opaque = |arg: &Value| bounds::is_of(arg, "Loop") || bounds::is_of(arg, "Macro");
    let mut fields = format.split('{').skip(1);
    let names_member = |field: &str| {
        let name = field.split(['}', ':', '!']).next().unwrap_or_default();
        name.contains(['.', '['])
    };
    if args.iter().any(is_opaque) || fields.any(names_member) {
        let message = "a format cannot name members of its arguments";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    // The widest field that `DIGITS_MAX` allows.
    let mut most = 10_000_usize;
    for arg in args.iter().skip(1) {
        most = most.saturating_add(bounds::printed(arg)?.len());
    }
    // What is put into a text that is safe is escaped.
    let escaped = if args.first().is_some_and(Value::is_safe) {
        6
    } else {
        1
    };
    let directives = format.matches(['%', '{']).count().saturating_mul(escaped);
    let bytes = directives.saturating_mul(most).saturating_add(format.len());
    bounds::check_text(bytes)
}

/// Checks that the budget allows the parts of a text, in a list that grows.
fn split(args: &[Value]) -> Result<(), Error> {
    let whole = text(args, 0);
    let named = args.last().and_then(|named| named.get_attr("sep").ok());
    let separator = args.get(1).or(named.as_ref()).and_then(Value::as_str);
    let parts = match separator {
        Some(separator) => whole.matches(separator).count() + 2,
        None => whole.split_whitespace().count(),
    };
    let lines = whole.matches(['\n', '\r']).count() + 1;
    let parts = parts.max(lines).saturating_mul(bounds::ELEMENT_BYTES);
    bounds::check(parts.saturating_mul(2).saturating_add(whole.len())).map(drop)
}

/// Checks that the budget allows a list of the characters of a text.
fn listed(args: &[Value]) -> Result<(), Error> {
    let characters = text(args, 0).len().saturating_mul(bounds::ELEMENT_BYTES);
    bounds::check(characters).map(drop)
}

/// Each element is compared with as many others as its place in a tree is deep, by each of the attributes that are named. All of them may
/// be equal up to their last byte.
fn sorted(args: &[Value]) -> Result<(), Error> {
    let attributes = args
        .last()
        .and_then(|named| named.get_attr("attribute").ok());
    let attributes = attributes.as_ref().and_then(Value::as_str);
    let attributes = attributes.map_or(1, |names| names.split(',').count());
    let elements = args.first().and_then(Value::len).unwrap_or(0);
    let depth = elements.checked_ilog2().unwrap_or(0) as usize;
    let times = attributes.saturating_add(3).max(depth);
    bounds::check(compared(args)?.saturating_mul(times)).map(drop)
}

/// The maximum of arguments of `map`, each of which may be another `map`, and recurse.
const MAP_ARGUMENTS_MAX: usize = 16;

/// The filters that take the place of operators are for [`super::program`] alone.
fn mapped(args: &[Value]) -> Result<(), Error> {
    if text(args, 1).starts_with('@') {
        return Err(Error::from(ErrorKind::UnknownFilter));
    }
    if args.len() > MAP_ARGUMENTS_MAX {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    bounds::check(compared(args)?).map(drop)
}
