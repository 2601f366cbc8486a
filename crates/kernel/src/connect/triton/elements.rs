//! Tensor elements as JSON values.

use sapwood_net::triton::{Datatype, Strings, TensorData};
use serde_json::{Number, Value};

/// A value, or a nested array of values, as elements; `None` if one is not of this datatype or out of its range.
pub(super) fn from_json(datatype: Datatype, value: &Value) -> Option<TensorData> {
    let mut flat = Vec::new();
    flatten(value, &mut flat);
    let range = datatype.range();
    // Compared in 128 bits, which hold every integer of JSON and of Triton.
    let fits = |number: i128| range.is_some_and(|(min, max)| (min..=max).contains(&number));
    Some(match TensorData::empty(datatype) {
        TensorData::Bool(_) => {
            TensorData::Bool(flat.iter().map(|it| it.as_bool()).collect::<Option<_>>()?)
        }
        TensorData::Int(_) => {
            let one = |it: &&Value| whole(it).filter(|it| fits(*it))?.try_into().ok();
            TensorData::Int(flat.iter().map(one).collect::<Option<_>>()?)
        }
        TensorData::Uint(_) => {
            let one = |it: &&Value| whole(it).filter(|it| fits(*it))?.try_into().ok();
            TensorData::Uint(flat.iter().map(one).collect::<Option<_>>()?)
        }
        TensorData::Float(_) => {
            TensorData::Float(flat.iter().map(|it| it.as_f64()).collect::<Option<_>>()?)
        }
        TensorData::Bytes(_) => {
            let mut strings = Strings::default();
            for value in flat {
                strings.push(value.as_str()?.as_bytes());
            }
            TensorData::Bytes(strings)
        }
    })
}

/// One element as a scalar, any other number of elements as an array. Bytes that are not UTF-8 are replaced; a number
/// that JSON cannot represent becomes null.
pub(super) fn to_json(data: &TensorData) -> Value {
    let float = |x: &f64| Number::from_f64(*x).map_or(Value::Null, Value::Number);
    let mut list: Vec<Value> = match data {
        TensorData::Bool(list) => list.iter().map(|it| Value::from(*it)).collect(),
        TensorData::Int(list) => list.iter().map(|it| Value::from(*it)).collect(),
        TensorData::Uint(list) => list.iter().map(|it| Value::from(*it)).collect(),
        TensorData::Float(list) => list.iter().map(float).collect(),
        TensorData::Bytes(list) => list
            .iter()
            .map(|it| Value::from(String::from_utf8_lossy(it)))
            .collect(),
    };
    match list.len() {
        1 => list.remove(0),
        _ => Value::Array(list),
    }
}

fn flatten<'a>(value: &'a Value, into: &mut Vec<&'a Value>) {
    // Recursion is bounded: the value was parsed from JSON, whose depth is limited.
    match value {
        Value::Array(list) => list.iter().for_each(|item| flatten(item, into)),
        scalar => into.push(scalar),
    }
}

/// A whole double is accepted as an integer, because some JSON writers have doubles only.
fn whole(value: &Value) -> Option<i128> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let exact = |x: &f64| x.fract() == 0.0 && x.abs() <= EXACT;
    let integer = value.as_i64().map(i128::from);
    let natural = || value.as_u64().map(i128::from);
    let double = || value.as_f64().filter(exact).map(|x| x as i128);
    integer.or_else(natural).or_else(double)
}
