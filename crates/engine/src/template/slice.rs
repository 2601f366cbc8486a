//! `value[start:stop:step]` with Python's semantics.
//!
//! minijinja panics if an empty list is read backwards, as `messages[::-1]` does, and if a bound lies after the start
//! of such a reading. A chat template is an untrusted program, so slices are computed here.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::{bounds, guard};

/// The filter that replaces the slice instruction: returns the slice, charged to the budget.
///
/// # Errors
/// For values that cannot be sliced, bounds that are not integers, a step of zero, and slices that exceed the budget.
pub(super) fn sliced(
    value: &Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let step = step.unwrap_or(1);
    if step == 0 {
        let message = "a slice has a step of zero";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            // Python counts characters, so they are collected; four bytes each, charged before that happens.
            bounds::charge(text.len().saturating_mul(size_of::<char>()))?;
            bounds::check_text(text.len())?;
            let letters: Vec<char> = text.chars().collect();
            let taken = indices(letters.len(), start, stop, step).map(|index| letters[index]);
            let taken = Value::from(taken.collect::<String>());
            if step == 1 {
                return Ok(taken);
            }
            guard::changed(std::slice::from_ref(value), taken)
        }
        ValueKind::Undefined | ValueKind::None => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Seq | ValueKind::Iterable => {
            let items = bounds::collected(value)?;
            bounds::charge(items.len().saturating_mul(size_of::<Value>()))?;
            let taken = indices(items.len(), start, stop, step).map(|index| items[index].clone());
            let taken: Vec<Value> = taken.collect();
            Ok(if value.is_tuple() {
                Value::from(Tuple::from(taken))
            } else {
                Value::from(taken)
            })
        }
        kind => {
            let message = format!("a value of type {kind} cannot be sliced");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    }
}

/// Returns the indices that a slice of `len` elements selects, in their order. `step` is not zero.
fn indices(
    len: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    // No collection has more elements than i64 can count.
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    // Backwards the end may be -1, before the first element.
    let (first, last) = if step > 0 { (0, len) } else { (-1, len - 1) };
    // A negative bound counts from the end; a bound outside of the range is clamped.
    let bound = |given: i64| {
        let from_start = if given < 0 {
            given.saturating_add(len)
        } else {
            given
        };
        from_start.clamp(first, last)
    };
    let (begin, end) = if step > 0 {
        (first, last)
    } else {
        (last, first)
    };
    let begin = start.map_or(begin, bound);
    let end = stop.map_or(end, bound);
    let within = move |index: &i64| if step > 0 { *index < end } else { *index > end };
    // `checked_add`: a huge step ends the sequence instead of wrapping around.
    std::iter::successors(Some(begin), move |index| index.checked_add(step))
        .take_while(within)
        .filter_map(|index| usize::try_from(index).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition in Python's language reference: i, i + k, ... short of j.
    fn meant(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> Vec<usize> {
        let wide = i128::try_from(len).unwrap();
        let position = |bound: i64| i128::from(bound) + if bound < 0 { wide } else { 0 };
        let by = usize::try_from(step.unsigned_abs()).unwrap();
        let taken: Vec<i128> = if step > 0 {
            let i = start.map_or(0, position).max(0);
            let j = stop.map_or(wide, position).min(wide);
            (i..j).step_by(by).collect()
        } else {
            let last = wide - 1;
            let i = start.map_or(last, position).min(last);
            let j = stop.map_or(-1, position).max(-1);
            (j + 1..=i).rev().step_by(by).collect()
        };
        let taken = taken.into_iter();
        taken.map(|index| usize::try_from(index).unwrap()).collect()
    }

    #[test]
    fn slices_equal_those_of_python() {
        let bounds = [i64::MIN, -7, -3, -2, -1, 0, 1, 2, 3, 7, i64::MAX].map(Some);
        let bounds: Vec<Option<i64>> = bounds.into_iter().chain([None]).collect();
        for len in 0..4 {
            for &start in &bounds {
                for &stop in &bounds {
                    for step in [i64::MIN, -2, -1, 1, 2, i64::MAX] {
                        let ours: Vec<usize> = indices(len, start, stop, step).collect();
                        let meant = meant(len, start, stop, step);
                        assert_eq!(ours, meant, "{len}: {start:?}:{stop:?}:{step}");
                    }
                }
            }
        }
    }
}
