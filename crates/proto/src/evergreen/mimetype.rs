//! Mimetypes, as far as the protocol depends on them.

/// The meaning of an empty mimetype (EV-406).
pub const OCTET_STREAM: &str = "application/octet-stream";
/// The mimetype of an encoded `google.rpc.Status` (EV-931).
pub const STATUS: &str = "application/x-protobuf; type=google.rpc.Status";

/// The mimetype of a `google.rpc.Status` in JSON (EV-931).
pub const JSON_STATUS: &str = "application/json; type=google.rpc.Status";

/// Whether two mimetypes are equivalent: type, subtype and parameter names are case-insensitive, parameters are
/// unordered, values are compared exactly and without quotes (EV-405). A mimetype that is too long for a session is only
/// equivalent to the same bytes.
#[must_use]
pub fn same(a: &str, b: &str) -> bool {
    // Nearly always the same bytes, sent again by the same client; only others are worth parsing.
    if a == b {
        return true;
    }
    if a.len().max(b.len()) > PARSED_MAX {
        return false;
    }
    let (a, b) = (ParsedMimetype::new(a), ParsedMimetype::new(b));
    a.essence.eq_ignore_ascii_case(b.essence) && a.parameters() == b.parameters()
}

/// Whether this is the mimetype of a status chunk (EV-931).
#[must_use]
pub fn is_status(mimetype: &str) -> bool {
    message_type(mimetype).is_some_and(|name| name == "google.rpc.Status")
}

/// The same for its JSON form.
#[must_use]
pub fn is_json_status(mimetype: &str) -> bool {
    same(mimetype, JSON_STATUS)
}

/// Whether the content is one JSON value, or one JSON value per line: it must not be split at an arbitrary byte
/// (EV-722).
#[must_use]
pub fn is_json(mimetype: &str) -> bool {
    let essence = ParsedMimetype::new(mimetype).essence;
    JSON.iter().any(|json| essence.eq_ignore_ascii_case(json))
}

/// Whether the content is line-delimited JSON.
#[must_use]
pub fn is_lines(mimetype: &str) -> bool {
    let essence = ParsedMimetype::new(mimetype).essence;
    is_json(mimetype) && !essence.eq_ignore_ascii_case(JSON[0])
}

/// Returns the mimetype, or the default if a client's parser would fail on it: there must be exactly one slash before
/// the parameters (EV-721).
#[must_use]
pub fn parsable(mimetype: &str) -> &str {
    let slashes = ParsedMimetype::new(mimetype)
        .essence
        .bytes()
        .filter(|byte| *byte == b'/');
    if slashes.count() == 1 {
        mimetype
    } else {
        OCTET_STREAM
    }
}

/// Whether this is the marker for the end of a turn in a conversation (EV-606).
#[must_use]
pub fn is_end_of_turn(mimetype: &str) -> bool {
    message_type(mimetype).is_some_and(|name| name == "EndOfTurn" || name.ends_with(".EndOfTurn"))
}

/// The parameter `type` of an `application/x-protobuf` mimetype.
fn message_type(mimetype: &str) -> Option<String> {
    // Fast path: nearly all chunks are text, which needs no parsing.
    let head = mimetype.trim_start().as_bytes().first()?;
    if !head.eq_ignore_ascii_case(&b'a') || mimetype.len() > PARSED_MAX {
        return None;
    }
    let parsed = ParsedMimetype::new(mimetype);
    if !parsed
        .essence
        .eq_ignore_ascii_case("application/x-protobuf")
    {
        return None;
    }
    parsed
        .parameters()
        .into_iter()
        .find(|(name, _)| name == "type")
        .map(|(_, value)| value)
}

/// Bytes of a mimetype whose parameters are parsed. Each one becomes two texts, and codecs ask before the session
/// refuses a mimetype that is longer than `max_name_bytes`.
const PARSED_MAX: usize = 256;

/// The mimetype of one value, then the usual names for line-delimited JSON.
const JSON: [&str; 4] = [
    "application/json",
    "application/x-ndjson",
    "application/ndjson",
    "application/jsonl",
];

/// A mimetype split at its first semicolon.
struct ParsedMimetype<'a> {
    essence: &'a str,
    rest: &'a str,
}

impl<'a> ParsedMimetype<'a> {
    fn new(mimetype: &'a str) -> Self {
        let (essence, rest) = mimetype.split_once(';').unwrap_or((mimetype, ""));
        Self {
            essence: essence.trim(),
            rest,
        }
    }

    /// Names in lower case with their values, sorted.
    fn parameters(&self) -> Vec<(String, String)> {
        let mut found = Vec::new();
        let mut rest = self.rest;
        while !rest.is_empty() {
            // The value cannot be found by splitting at semicolons: in quotes it may contain them.
            let cut = rest.find(['=', ';']).unwrap_or(rest.len());
            let (name, after) = rest.split_at(cut);
            let (value, after) = match after.strip_prefix('=') {
                Some(value) => take_value(value),
                None => (String::new(), after),
            };
            let name = name.trim().to_ascii_lowercase();
            if !name.is_empty() {
                found.push((name, value));
            }
            rest = after.split_once(';').map_or("", |(_, next)| next);
        }
        // Parameters are unordered (EV-405).
        found.sort_unstable();
        found
    }
}

/// A token or quoted string at the start of `text`, and what follows it.
fn take_value(text: &str) -> (String, &str) {
    let text = text.trim_start();
    let Some(quoted) = text.strip_prefix('"') else {
        let cut = text.find(';').unwrap_or(text.len());
        let (value, after) = text.split_at(cut);
        return (value.trim_end().to_owned(), after);
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(chars.next().map(|(_, escaped)| escaped)),
            _ => value.push(c),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_values_and_odd_input() {
        assert!(same("a/b; x=\"1;2\"; y=3", "A/B;Y=3;X=\"1;2\""));
        assert!(same("a/b; x=\"\\\"q\"", "a/b;x=\"\\\"q\""));
        assert!(same("a/b;;", "a/b"));
        assert!(!same("a/b; x=\"1", "a/b; x=2"));
        assert!(!same("a/b; x", "a/b"));
        for odd in [";", "=", "a/b;=;\"", "a/b; x=\"\\", "é;é=é"] {
            assert!(same(odd, odd));
            assert!(!is_status(odd) && !is_end_of_turn(odd));
        }
    }

    #[test]
    fn d_47_the_parameters_of_a_mimetype_that_no_session_accepts_are_not_parsed() {
        let odd = |most: usize, upper: bool| {
            let type_of = if upper { "A/B" } else { "a/b" };
            format!("{type_of};x={}", "1".repeat(most - 6))
        };
        assert!(same(&odd(PARSED_MAX, false), &odd(PARSED_MAX, true)));
        assert!(!same(
            &odd(PARSED_MAX + 1, false),
            &odd(PARSED_MAX + 1, true)
        ));
        let status = |bytes: usize| format!("{STATUS};{}", "a".repeat(bytes - STATUS.len() - 1));
        assert!(is_status(&status(PARSED_MAX)));
        assert!(!is_status(&status(PARSED_MAX + 1)));
        assert!(!is_json_status(&format!(
            "{JSON_STATUS};{}",
            ";".repeat(PARSED_MAX)
        )));
    }

    #[test]
    fn ev_606_end_of_turn_and_ev_931_status_are_detected_by_the_type_parameter() {
        for (mimetype, end_of_turn, status) in [
            ("application/x-protobuf; type=EndOfTurn", true, false),
            (
                "Application/X-Protobuf;type=\"evergreen.EndOfTurn\"",
                true,
                false,
            ),
            ("application/x-protobuf; type=NotEndOfTurn", false, false),
            (
                "application/x-protobuf; type=google.rpc.Status",
                false,
                true,
            ),
            ("application/x-protobuf", false, false),
            ("text/plain; type=EndOfTurn", false, false),
        ] {
            assert_eq!(
                (is_end_of_turn(mimetype), is_status(mimetype)),
                (end_of_turn, status),
                "{mimetype}"
            );
        }
    }
}
