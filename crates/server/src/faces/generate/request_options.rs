//! Options in request headers beyond the protocol (section 13). Without them a response is what the protocol says.

use std::time::Duration;

use http::{HeaderMap, HeaderName};
use regex::Regex;
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Mapped, RequestParameter};
use tonic::metadata::{KeyAndValueRef, MetadataMap};

use super::request_error::RequestError;

/// Asks for a stream that can be resumed (TR-1303).
const RESUME: &str = "sapwood-resume";
/// Asks for a comment after this many seconds without an event (TR-1304).
const KEEPALIVE: &str = "sapwood-keepalive";
/// The maximum number of seconds between pings.
const IDLE_TIMEOUT_MAX: u64 = 3_600;

/// The options of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestOptions {
    pub(super) resume: bool,
    /// The interval of pings.
    pub(super) ping: Option<Duration>,
}

impl RequestOptions {
    /// Reads the options from the headers.
    ///
    /// # Errors
    /// `invalid-request` for a value that is no number of seconds.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, RequestError> {
        // Any other value is off and no error: the option is a switch, and a stream without it works as well.
        let on = |name: &str| headers.get(name).is_some_and(|value| value == "1");
        let ping = headers.get(KEEPALIVE).map(|value| {
            let seconds = value
                .to_str()
                .ok()
                .and_then(|text| text.trim().parse().ok());
            let seconds = seconds.filter(|seconds| (1..=IDLE_TIMEOUT_MAX).contains(seconds));
            seconds.map(Duration::from_secs).ok_or_else(|| {
                let message =
                    format!("header '{KEEPALIVE}' must be seconds, from 1 to {IDLE_TIMEOUT_MAX}");
                RequestError::new(Code::InvalidRequest, message)
            })
        });
        Ok(Self {
            resume: on(RESUME),
            ping: ping.transpose()?,
        })
    }
}

/// The headers of requests that become parameters (TR-1309): those whose names match a regular expression.
#[derive(Clone, Debug)]
pub struct ForwardedHeaders(Regex);

impl ForwardedHeaders {
    /// Those whose names, in lower case, have a match of this regular expression.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(pattern: &str) -> Result<Self, String> {
        let regex = Regex::new(pattern).map_err(|error| error.to_string())?;
        Ok(Self(regex))
    }

    /// Adds them to the parameters of a request, whose own take precedence.
    pub(super) fn join(&self, headers: &HeaderMap, mapped: &mut Mapped) {
        // Names of headers are lower-case here.
        let matching = |name: &&HeaderName| self.0.is_match(name.as_str());
        for name in headers.keys().filter(matching) {
            // A value that is no ASCII text cannot be a parameter, and the header was not meant as one.
            if let Some(Ok(value)) = headers.get(name).map(|value| value.to_str()) {
                mapped.add_parameter(name.as_str(), RequestParameter::Text(value.into()));
            }
        }
    }

    /// Adds the metadata of a gRPC call in the same way. Binary entries (`-bin`) are left out.
    pub(super) fn join_metadata(&self, metadata: &MetadataMap, mapped: &mut Mapped) {
        for entry in metadata.iter() {
            if let KeyAndValueRef::Ascii(name, value) = entry
                && self.0.is_match(name.as_str())
                && let Ok(value) = value.to_str()
            {
                mapped.add_parameter(name.as_str(), RequestParameter::Text(value.into()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = list.iter().map(|(name, value)| {
            (
                HeaderName::from_static(name),
                http::HeaderValue::from_static(value),
            )
        });
        pairs.collect()
    }

    /// TR-1303
    #[test]
    fn tr_1304_options_are_read_and_intervals_are_checked() {
        assert_eq!(
            RequestOptions::of(&HeaderMap::new()).unwrap(),
            RequestOptions::default()
        );
        let all = headers(&[("sapwood-resume", "1"), ("sapwood-keepalive", "15")]);
        let expect = RequestOptions {
            resume: true,
            ping: Some(Duration::from_secs(15)),
        };
        assert_eq!(RequestOptions::of(&all).unwrap(), expect);
        for wrong in ["0", "-1", "3601", "soon", "1.5"] {
            let wrong = headers(&[("sapwood-keepalive", wrong)]);
            assert_eq!(
                RequestOptions::of(&wrong).unwrap_err().code,
                Code::InvalidRequest
            );
        }
    }

    #[test]
    fn tr_1309_matching_headers_become_parameters_and_those_of_the_body_win() {
        let mut mapped = Mapped::default();
        mapped.add_parameter("x-tenant", RequestParameter::Text("body".into()));
        let headers = headers(&[
            ("x-tenant", "header"),
            ("x-user", "anna"),
            ("authorization", "Bearer x"),
        ]);
        ForwardedHeaders::new("^x-")
            .unwrap()
            .join(&headers, &mut mapped);
        assert!(ForwardedHeaders::new("(").is_err());
        let text = |name| match mapped.parameter(name) {
            Some(RequestParameter::Text(text)) => Some(text.as_str()),
            _ => None,
        };
        assert_eq!(
            (text("x-tenant"), text("x-user"), text("authorization")),
            (Some("body"), Some("anna"), None)
        );
    }

    #[test]
    fn tr_1309_matching_metadata_becomes_parameters_except_binary_entries() {
        let mut metadata = MetadataMap::new();
        for (name, value) in [
            ("x-tenant", "metadata"),
            ("x-user", "anna"),
            ("y", "no match"),
        ] {
            metadata.append(name, value.parse().unwrap());
        }
        metadata.append("x-user", "ben".parse().unwrap());
        metadata.insert_bin(
            "x-token-bin",
            tonic::metadata::BinaryMetadataValue::from_bytes(b"t"),
        );
        let mut mapped = Mapped::default();
        let body = RequestParameter::Text("body".into());
        mapped.add_parameter("x-tenant", body);
        let forwarded = ForwardedHeaders::new("^x-").unwrap();
        forwarded.join_metadata(&metadata, &mut mapped);
        let text = |value: &str| RequestParameter::Text(value.into());
        let expect = [("x-tenant", text("body")), ("x-user", text("anna"))];
        let reported = mapped
            .parameters
            .iter()
            .map(|(name, value)| (&**name, value.clone()));
        assert_eq!(reported.collect::<Vec<_>>(), expect);
    }
}
