//! The id of a request, taken from the client or made here (OA-105).
//!
//! Not `tower_http::request_id`: it keeps whatever id a client sends, and OA-105 replaces one that is too long or has other
//! characters, because ids stand in log lines and error reports.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::{HeaderMap, HeaderName, HeaderValue};

/// The header of request ids, in requests and responses.
pub const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// The id of a request; stands in its extensions, its log lines and its response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// The client's own id if it is valid, else a new one.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(HEADER).and_then(|value| value.to_str().ok());
        given
            .filter(|id| is_valid(id))
            .map_or_else(Self::fresh, |id| Self(id.into()))
    }

    /// `req_` and 32 hex digits, unique in this process and unlikely anywhere else.
    #[must_use]
    pub fn fresh() -> Self {
        // The standard library seeds this state from the operating system, once per thread: enough for an id that has to be
        // unique and not secret. The counter makes ids of one thread differ even if the seeds did not.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let high = RandomState::new().hash_one(count);
        let low = RandomState::new().hash_one((count, high));
        Self(format!("req_{high:016x}{low:016x}").into())
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id as a header; both kinds of id are plain ASCII.
    #[must_use]
    pub fn to_header(&self) -> Option<HeaderValue> {
        HeaderValue::from_str(&self.0).ok()
    }
}

fn is_valid(id: &str) -> bool {
    (1..=128).contains(&id.len())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_105_valid_ids_are_kept_and_others_replaced() {
        let long = "a".repeat(128);
        let too_long = "a".repeat(129);
        for (given, retained) in [
            ("job-7:step.2_x", true),
            (long.as_str(), true),
            (too_long.as_str(), false),
            ("", false),
            ("two words", false),
            ("a\"b", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, given.parse().unwrap());
            let id = RequestId::of(&headers);
            assert_eq!(id.as_str() == given, retained, "{given}");
            assert!(is_valid(id.as_str()));
        }
        let (one, two) = (RequestId::fresh(), RequestId::fresh());
        assert!(one != two && one.as_str().len() == 36 && one.as_str().starts_with("req_"));
    }
}
