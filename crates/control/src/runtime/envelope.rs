//! Requests as they come from the wire, and answers as they go there (AI-222, AI-301 to AI-304).

use sapwood_proto::bounded_json::{self, JsonBounds};
use sapwood_proto::steer::SteerRefusal;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// A request, with everything that is common to all ops.
#[derive(Debug)]
pub(crate) struct Envelope {
    /// Echoed in the answer.
    pub(crate) rid: Option<String>,
    /// Empty if there is none, which is no op either.
    pub(crate) op: String,
    members: Map<String, Value>,
}

/// Who asks (AI-302).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WireUser {
    pub(crate) name: String,
    pub(crate) is_admin: bool,
}

/// Why a request as a whole is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct RequestError {
    pub(crate) text: String,
    /// The request or a controller is at fault, not the runtime.
    pub(crate) is_user: bool,
}

impl RequestError {
    pub(crate) fn user(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            is_user: true,
        }
    }

    pub(crate) fn bad_op() -> Self {
        Self::user("bad op")
    }
}

impl From<SteerRefusal> for RequestError {
    fn from(refusal: SteerRefusal) -> Self {
        use sapwood_proto::code::Code;
        // A full store or a dead compiler is nobody's request's fault.
        let is_user = !matches!(
            refusal.code,
            Code::Internal | Code::Unavailable | Code::Overloaded
        );
        Self {
            text: refusal.message,
            is_user,
        }
    }
}

/// A request that cannot be read at all: its answer has no `$rid` (AI-222).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable(pub(crate) String);

impl Envelope {
    /// Parses a message.
    pub(crate) fn parse(message: &[u8]) -> Result<Self, Unreadable> {
        // Before the parser, which allows twice as much: the limit is part of the protocol.
        if depth(message) > DEPTH_MAX {
            return Err(Unreadable(format!(
                "more than {DEPTH_MAX} levels of nesting"
            )));
        }
        let bounds = JsonBounds {
            values: VALUES_MAX,
            entries: MEMBERS_MAX,
        };
        let read = bounded_json::read(message, bounds);
        let Value::Object(mut members) = read.map_err(|error| Unreadable(error.to_string()))?
        else {
            return Err(Unreadable("not a JSON object".into()));
        };
        let rid = match members.get("$rid") {
            Some(Value::String(rid)) => Some(rid.clone()),
            _ => None,
        };
        let op = match members.get_mut("op") {
            Some(Value::String(op)) => std::mem::take(op),
            _ => String::new(),
        };
        Ok(Self { rid, op, members })
    }

    /// Returns who asks; a missing member is the local user.
    ///
    /// # Errors
    /// It is an object of another shape.
    pub(crate) fn user(&self) -> Result<WireUser, RequestError> {
        let Some(auth @ Value::Object(members)) = self.members.get("$auth") else {
            return Ok(WireUser {
                name: "local".into(),
                is_admin: false,
            });
        };
        let name = members.get("user").and_then(Value::as_str);
        let is_admin = auth.get("is_admin").and_then(Value::as_bool);
        match (name, is_admin) {
            (Some(name), Some(is_admin)) => Ok(WireUser {
                name: name.to_owned(),
                is_admin,
            }),
            _ => Err(RequestError::user(
                "$auth must be {\"user\": string, \"is_admin\": bool}",
            )),
        }
    }

    /// Returns a member.
    pub(crate) fn member(&self, name: &str) -> Option<&Value> {
        self.members.get(name)
    }

    /// Decodes the members of the op; others are ignored.
    ///
    /// # Errors
    /// A member is missing or of another type.
    pub(crate) fn decode<T: DeserializeOwned>(self) -> Result<T, RequestError> {
        serde_json::from_value(Value::Object(self.members))
            .map_err(|error| RequestError::user(format!("bad request: {error}")))
    }
}

/// Returns the deepest nesting of arrays and objects, without parsing.
fn depth(message: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut bytes = message.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                // To the end of the string; an escaped quote does not end it.
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'\\' => {
                            bytes.next();
                        }
                        b'"' => break,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    deepest
}

/// Encodes the answer to a request: data, or an error.
pub(crate) fn encode<T: Serialize>(rid: Option<&str>, answer: &Result<T, RequestError>) -> Vec<u8> {
    match answer {
        Ok(data) => encode_data(rid, data),
        Err(error) => to_bytes(&Answer::<()> {
            rid,
            r#type: "error",
            data: None,
            error: Some(&error.text),
            is_user_error: Some(error.is_user),
        }),
    }
}

/// Encodes an error that is not the request's fault.
pub(crate) fn encode_failure(rid: Option<&str>, text: &str) -> Vec<u8> {
    let error = RequestError {
        text: text.to_owned(),
        is_user: false,
    };
    encode::<()>(rid, &Err(error))
}

/// Encodes the data of an answer.
pub(crate) fn encode_data<T: Serialize>(rid: Option<&str>, data: &T) -> Vec<u8> {
    to_bytes(&Answer {
        rid,
        r#type: "ok",
        data: Some(data),
        error: None,
        is_user_error: None,
    })
}

#[derive(Serialize)]
struct Answer<'a, T> {
    #[serde(rename = "$rid", skip_serializing_if = "Option::is_none")]
    rid: Option<&'a str>,
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    is_user_error: Option<bool>,
}

fn to_bytes<T: Serialize>(answer: &Answer<'_, T>) -> Vec<u8> {
    // Cannot fail: the data are structs of ours with keys that are strings or numbers. An empty message would wedge the
    // engine, so there is an error in its place all the same.
    serde_json::to_vec(answer).unwrap_or_else(|_| {
        br#"{"type":"error","error":"cannot encode the answer","is_user_error":false}"#.to_vec()
    })
}

/// Encodes the answer to a message that is no request (AI-221, AI-222).
pub(crate) fn encode_unreadable(error: &str) -> Vec<u8> {
    serde_json::json!({"type": "json-error", "error": error})
        .to_string()
        .into_bytes()
}

/// Levels of arrays and objects.
const DEPTH_MAX: usize = 64;
/// Values of a message: twice the longest prompt. A value takes 72 bytes.
const VALUES_MAX: usize = 2 << 20;
/// Members of a request.
const MEMBERS_MAX: usize = 1_024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_301_op_and_rid_are_strings_or_nothing() {
        let parse = |text: &str| Envelope::parse(text.as_bytes()).unwrap();
        let read = parse(r#"{"op":"ping","$rid":"a1","x":[1]}"#);
        assert_eq!(
            (read.op.as_str(), read.rid.as_deref()),
            ("ping", Some("a1"))
        );
        let read = parse(r#"{"op":7,"$rid":7}"#);
        assert_eq!((read.op.as_str(), read.rid), ("", None));
    }

    #[test]
    fn ai_222_what_is_no_object_is_unreadable() {
        for text in [
            &b""[..],
            b"{",
            b"[]",
            b"7",
            b"{} {}",
            b"{\"op\":\"\xff\"}",
            b"\0\0",
        ] {
            assert!(Envelope::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn ai_222_of_a_doubled_member_the_last_wins() {
        let read = Envelope::parse(br#"{"op":"ping","op":"tokens"}"#).unwrap();
        assert_eq!(read.op, "tokens");
    }

    #[test]
    fn ai_222_sixty_four_levels_are_read_and_sixty_five_are_not() {
        let nested = |levels: usize| {
            let (open, close) = ("[".repeat(levels - 1), "]".repeat(levels - 1));
            Envelope::parse(format!(r#"{{"x":{open}{close}}}"#).as_bytes()).map(drop)
        };
        assert_eq!(nested(64), Ok(()));
        assert_eq!(
            nested(65),
            Err(Unreadable("more than 64 levels of nesting".into()))
        );
        // Brackets in strings are text.
        let text = format!(r#"{{"x":"\"{}"}}"#, "[".repeat(100));
        assert!(Envelope::parse(text.as_bytes()).is_ok());
    }

    #[test]
    fn ai_302_the_user_is_local_named_or_an_error() {
        let user = |text: &str| Envelope::parse(text.as_bytes()).unwrap().user();
        let local = WireUser {
            name: "local".into(),
            is_admin: false,
        };
        assert_eq!(user("{}"), Ok(local.clone()));
        assert_eq!(user(r#"{"$auth":"admin"}"#), Ok(local));
        let named = user(r#"{"$auth":{"user":"a","is_admin":true}}"#).unwrap();
        assert_eq!((named.name.as_str(), named.is_admin), ("a", true));
        for wrong in [r#"{"user":"a"}"#, r#"{"user":1,"is_admin":true}"#, "{}"] {
            assert!(user(&format!(r#"{{"$auth":{wrong}}}"#)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ai_301_answers_echo_the_rid() {
        let ok = encode(Some("a"), &Ok(serde_json::json!({"pong": 1})));
        assert_eq!(ok, br#"{"$rid":"a","type":"ok","data":{"pong":1}}"#);
        let error: Result<(), _> = Err(RequestError::user("invalid id 99"));
        assert_eq!(
            encode(None, &error),
            br#"{"type":"error","error":"invalid id 99","is_user_error":true}"#
        );
        assert_eq!(
            encode_unreadable("x"),
            br#"{"type":"json-error","error":"x"}"#
        );
    }
}
