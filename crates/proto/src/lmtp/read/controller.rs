//! Reads the controller of a GENERATE (LM-971).

use super::super::json::RawValue;
use super::super::{ConnectionLimits, LmtpError, LmtpReason};
use super::{PayloadMembers, member, out_of_range, wrong_type};
use crate::steer::ControllerChoice;

/// Reads `controller` in both forms: a name with `controller_arg` beside it, or an object with `id` and `arg`.
pub(in super::super) fn controller(
    members: &PayloadMembers<'_>,
    limits: &ConnectionLimits,
) -> Result<Option<ControllerChoice>, LmtpError> {
    let beside = members.value("controller_arg");
    let Some(value) = members.value("controller") else {
        // Most likely a misspelt `controller`: the output would be unconstrained.
        return match beside {
            Some(_) => Err(out_of_range("controller_arg", "sent with 'controller'")),
            None => Ok(None),
        };
    };
    let (name, id, arg) = if value.members().is_some() {
        if beside.is_some() {
            let message = "'controller.arg' and 'controller_arg' exclude each other; send one";
            return Err(LmtpError::new(LmtpReason::InvalidValue, message));
        }
        let given = |name| member(value, name).filter(|value| !value.is_null());
        let id = given("id").ok_or_else(|| {
            let message = "'controller.id' is required: the name of a controller";
            LmtpError::new(LmtpReason::MissingRequiredParameter, message)
        })?;
        ("controller.id", id, given("arg"))
    } else {
        ("controller", value, beside)
    };
    let id = id
        .string()
        .ok_or_else(|| wrong_type(name, "the name of a controller"))?;
    if id.is_empty() || id.len() > limits.max_controller_bytes {
        let range = format!("a name of 1 to {} bytes", limits.max_controller_bytes);
        return Err(out_of_range(name, &range));
    }
    let arg = match arg {
        None => String::new(),
        Some(arg) => argument(arg, limits.max_controller_arg_bytes)?,
    };
    let id = id.into_owned();
    Ok(Some(ControllerChoice { id, arg }))
}

/// A string as it is, and other JSON without the space between its tokens. Members keep their order and numbers their
/// digits, which a tree of values would not keep.
fn argument(value: RawValue<'_>, max: usize) -> Result<String, LmtpError> {
    let arg = match value.string() {
        Some(text) => text.into_owned(),
        None => compact(value.as_str())
            .ok_or_else(|| out_of_range("controller_arg", "JSON, without NaN and Infinity"))?,
    };
    if arg.len() > max {
        let range = format!("at most {max} bytes");
        return Err(out_of_range("controller_arg", &range));
    }
    Ok(arg)
}

/// Removes the space between the tokens of a value; `None` if it is not strict JSON.
fn compact(json: &str) -> Option<String> {
    serde_json::from_str::<serde::de::IgnoredAny>(json).ok()?;
    let (mut in_string, mut escaped) = (false, false);
    let is_kept = |letter: &char| {
        let kept = in_string || !matches!(letter, ' ' | '\t' | '\r' | '\n');
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = in_string,
            '"' => in_string = !in_string,
            _ => {}
        }
        kept
    };
    Some(json.chars().filter(is_kept).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lm_971_an_argument_that_is_no_string_loses_only_the_space_between_its_tokens() {
        for (json, expected) in [
            (
                r#"{ "b" : [ 1.50 , 12345678901234567890 ] ,"a":"x \" y\\" }"#,
                r#"{"b":[1.50,12345678901234567890],"a":"x \" y\\"}"#,
            ),
            ("[ ]", "[]"),
            ("7", "7"),
        ] {
            assert_eq!(compact(json).as_deref(), Some(expected));
        }
        assert_eq!(compact("[NaN]"), None);
    }
}
