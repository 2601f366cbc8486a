//! The status with which a session, action or node fails, as its peer may see it.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use prost_types::Any;

use super::Reason;
use crate::code::{Code, RetryAdvice};
use crate::generated::google::rpc;

/// An error of a session, an action or a node, as peers see it. Texts passed to [`Status::new`] and the like are
/// truncated if they would not fit into the trailers of a call (EV-902): the name of an action may be a megabyte long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The error code, for programs.
    pub code: Code,
    /// The finer name; one of [`Reason`] if we created the status, any string if a peer did.
    pub reason: Cow<'static, str>,
    /// For humans: names the offending id, seq or parameter, never payloads, paths or credentials.
    pub message: String,
    /// For programs: among `node`, `seq`, `action`, `output`, `param`, `limit`, `value`, `max`, `upstream`.
    pub details: Vec<(Cow<'static, str>, String)>,
    /// When to retry.
    pub retry_after: Option<Duration>,
    /// Invalid fields of a config: name and error.
    pub fields: Vec<(String, String)>,
}

impl Status {
    /// Creates a status for `reason`, with its code.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self::other(reason.code(), reason.name(), message)
    }

    /// Creates a status with a reason that is not among [`Reason`].
    #[must_use]
    pub fn other(
        code: Code,
        reason: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        Self {
            code,
            reason: reason.into(),
            message: cut(message.into(), MESSAGE_BYTES_MAX),
            details: Vec::new(),
            // Whatever may be retried later gets a delay, as EV-902 requires for UNAVAILABLE.
            retry_after: (code.retry() == RetryAdvice::Later).then_some(RETRY_AFTER),
            fields: Vec::new(),
        }
    }

    /// Creates a status for a limit of ours: its name, the value and the maximum.
    #[must_use]
    pub fn limit(reason: Reason, limit: &'static str, value: u64, max: u64) -> Self {
        Self::new(
            reason,
            format!("{limit} is {max}, and this would be {value}"),
        )
        .with("limit", limit)
        .with("value", value)
        .with("max", max)
    }

    /// Fails with [`Status::limit`] if `value` is above the maximum.
    ///
    /// # Errors
    /// The limit, the value and the maximum.
    #[inline]
    pub fn within<N: PartialOrd + TryInto<u64>>(
        reason: Reason,
        limit: &'static str,
        value: N,
        max: N,
    ) -> Result<(), Self> {
        if value <= max {
            return Ok(());
        }
        let [value, max] = [value, max].map(|number| number.try_into().unwrap_or(u64::MAX));
        Err(Self::limit(reason, limit, value, max))
    }

    /// Adds a detail.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl fmt::Display) -> Self {
        let value = cut(value.to_string(), DETAIL_BYTES_MAX);
        self.details.push((key.into(), value));
        self
    }

    /// Adds an invalid field of a config.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>, what: impl Into<String>) -> Self {
        let (field, what) = (field.into(), what.into());
        // A config may have any number of invalid fields, and the trailers that carry them are small (EV-902).
        if self.fields.len() < DETAILS_MAX {
            let (field, what) = (cut(field, DETAIL_BYTES_MAX), cut(what, DETAIL_BYTES_MAX));
            self.fields.push((field, what));
        }
        self
    }

    /// The detail under `key`.
    #[must_use]
    pub fn detail(&self, key: &str) -> Option<&str> {
        self.details
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// The reason, if it is one of ours.
    #[must_use]
    pub fn known(&self) -> Option<Reason> {
        Reason::from_name(&self.reason)
    }

    /// Bytes of its texts.
    #[must_use]
    pub fn text_bytes(&self) -> usize {
        let details = self
            .details
            .iter()
            .map(|(key, value)| key.len() + value.len());
        let fields = self
            .fields
            .iter()
            .map(|(field, what)| field.len() + what.len());
        self.reason.len() + self.message.len() + details.chain(fields).sum::<usize>()
    }

    /// The encoded `google.rpc.Status`: the trailer `grpc-status-details-bin`, or the bytes of a status chunk.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let info = rpc::ErrorInfo {
            reason: self.reason.to_string(),
            domain: DOMAIN.to_owned(),
            metadata: self
                .details
                .iter()
                .map(|(key, value)| (key.to_string(), value.clone()))
                .collect(),
        };
        let mut details = vec![pack("google.rpc.ErrorInfo", &info)];
        if let Some(delay) = self.retry_after {
            let retry_delay = prost_types::Duration::try_from(delay).ok();
            details.push(pack(
                "google.rpc.RetryInfo",
                &rpc::RetryInfo { retry_delay },
            ));
        }
        if !self.fields.is_empty() {
            let violation = |(field, what): &(String, String)| rpc::bad_request::FieldViolation {
                field: field.clone(),
                description: what.clone(),
            };
            let field_violations = self.fields.iter().map(violation).collect();
            details.push(pack(
                "google.rpc.BadRequest",
                &rpc::BadRequest { field_violations },
            ));
        }
        let code = i32::from(self.code.grpc());
        rpc::Status {
            code,
            message: self.message.clone(),
            details,
        }
        .encode_to_vec()
        .into()
    }

    /// Decodes a `google.rpc.Status`, possibly a peer's: `Some(None)` is OK; `None` is not a status, or one of more
    /// than 64 KiB, which no peer needs and which would take far more once it is decoded.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Option<Self>> {
        // Before decoding: details are lists of maps, which take far more memory than their bytes.
        if bytes.len() > ENCODED_MAX {
            return None;
        }
        let status = rpc::Status::decode(bytes).ok()?;
        if status.code == 0 {
            return Some(None);
        }
        let mut read = Self::other(Code::from_grpc(status.code), "", status.message);
        // Only a RetryInfo of the peer counts, not the default for the code.
        read.retry_after = None;
        for any in &status.details {
            read.take_detail(any);
        }
        Some(Some(read))
    }

    fn take_detail(&mut self, any: &Any) {
        let name = any.type_url.rsplit('/').next().unwrap_or_default();
        match name {
            "google.rpc.ErrorInfo" => {
                let Ok(info) = rpc::ErrorInfo::decode(&*any.value) else {
                    return;
                };
                // Our own reasons are finer than a gRPC number, which several codes share.
                let ours = Reason::from_name(&info.reason).filter(|_| info.domain == DOMAIN);
                if let Some(reason) = ours.filter(|reason| reason.code().grpc() == self.code.grpc())
                {
                    self.code = reason.code();
                }
                // All texts are truncated: this status may be passed on to another peer, in trailers of ours.
                self.reason = cut(info.reason, DETAIL_BYTES_MAX).into();
                self.details = info
                    .metadata
                    .into_iter()
                    // A map has no order, so it is arbitrary which of too many stay; our own statuses have fewer.
                    .take(DETAILS_MAX)
                    .map(|(key, value)| (key, cut(value, DETAIL_BYTES_MAX)))
                    .map(|(key, value)| (cut(key, DETAIL_BYTES_MAX).into(), value))
                    .collect();
            }
            "google.rpc.RetryInfo" => {
                let delay = rpc::RetryInfo::decode(&*any.value)
                    .ok()
                    .and_then(|info| info.retry_delay);
                self.retry_after = delay.and_then(|delay| delay.try_into().ok());
            }
            "google.rpc.BadRequest" => {
                let Ok(bad) = rpc::BadRequest::decode(&*any.value) else {
                    return;
                };
                let fields = bad.field_violations.into_iter();
                self.fields = fields
                    .take(DETAILS_MAX)
                    .map(|found| (found.field, found.description))
                    .map(|(field, what)| {
                        (cut(field, DETAIL_BYTES_MAX), cut(what, DETAIL_BYTES_MAX))
                    })
                    .collect();
            }
            _ => {}
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.code, self.reason, self.message)
    }
}

impl std::error::Error for Status {}

/// Encodes a message as `Any`, under the customary prefix.
fn pack(name: &str, message: &impl Message) -> Any {
    Any {
        type_url: format!("type.googleapis.com/{name}"),
        value: message.encode_to_vec(),
    }
}

/// Truncates a text to at most `bytes_max` bytes, in whole characters.
fn cut(mut text: String, bytes_max: usize) -> String {
    if text.len() > bytes_max {
        text.truncate(text.floor_char_boundary(bytes_max));
        text.shrink_to_fit();
    }
    text
}

/// Bytes of a message. The trailers contain it twice, once with each byte as three in the worst case, and once as
/// base64; many clients accept 16 KiB of trailers.
const MESSAGE_BYTES_MAX: usize = 3 * 1024;
/// Bytes of a detail or a field: the maximum length of an id.
const DETAIL_BYTES_MAX: usize = 256;
/// Number of details, and of fields, that are read from a peer's status.
const DETAILS_MAX: usize = 16;
/// Maximum size of an encoded status that is decoded.
const ENCODED_MAX: usize = 64 * 1024;
/// The domain of our reasons.
pub const DOMAIN: &str = "evergreen.sapwood";
/// The retry delay for errors that are retryable later.
const RETRY_AFTER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    /// EV-902
    #[test]
    fn ev_902_a_status_round_trips_with_reason_details_retry_and_fields() {
        let limit =
            Status::limit(Reason::RetainedLimit, "retained_bytes", 11, 10).with("node", "p");
        let field = Status::new(Reason::BadConfig, "temperature is out of range")
            .with("action", "GENERATE")
            .with_field("temperature", "0 to 2");
        for status in [limit, field, Status::new(Reason::EngineBusy, "later")] {
            let mut sorted = status.clone();
            sorted.details.sort();
            assert_eq!(Status::decode(&status.encode()), Some(Some(sorted)));
        }
        let busy = rpc::Status::decode(Status::new(Reason::EngineBusy, "later").encode()).unwrap();
        assert_eq!(busy.code, 14);
        assert!(
            busy.details
                .iter()
                .any(|any| any.type_url == "type.googleapis.com/google.rpc.RetryInfo")
        );
    }

    #[test]
    fn ev_902_texts_are_truncated_to_fit_into_trailers() {
        let long = "ä".repeat(1 << 20);
        let full = Status::new(Reason::BadName, long.clone()).with("action", &long);
        let status = full.with_field("f", long.clone());
        assert_eq!(status.message.len(), MESSAGE_BYTES_MAX);
        assert_eq!(status.detail("action").unwrap().len(), DETAIL_BYTES_MAX);
        assert_eq!(status.fields[0].1.len(), DETAIL_BYTES_MAX);
        let odd = Status::new(Reason::BadName, format!("x{long}"));
        assert_eq!(odd.message.len(), MESSAGE_BYTES_MAX - 1);
        let fits = "x".repeat(MESSAGE_BYTES_MAX);
        assert_eq!(Status::new(Reason::BadName, fits.clone()).message, fits);
        // A status from a peer, which may be passed on to another one.
        let metadata = (0..40).map(|at| (format!("{at}"), "x".repeat(1_000)));
        let info = rpc::ErrorInfo {
            reason: "R".repeat(1_000),
            domain: String::new(),
            metadata: metadata.collect(),
        };
        let theirs = rpc::Status {
            code: 13,
            message: "x".repeat(10_000),
            details: vec![pack("google.rpc.ErrorInfo", &info)],
        };
        let read = Status::decode(&theirs.encode_to_vec()).unwrap().unwrap();
        assert_eq!(read.details.len(), DETAILS_MAX);
        assert!(read.encode().len() < 9_000, "{}", read.encode().len());
    }

    #[test]
    fn statuses_of_other_servers_are_decoded_within_limits() {
        let plain = rpc::Status {
            code: 5,
            message: "gone".into(),
            details: vec![Any::default()],
        };
        let read = Status::decode(&plain.encode_to_vec()).unwrap().unwrap();
        assert_eq!(
            (read.code, &*read.reason, &*read.message),
            (Code::NotFound, "", "gone")
        );
        assert_eq!(Status::decode(b""), Some(None));
        assert_eq!(Status::decode(b"\xff"), None);
        let huge = rpc::Status {
            code: 5,
            message: "x".repeat(70_000),
            details: Vec::new(),
        };
        assert_eq!(Status::decode(&huge.encode_to_vec()), None);
    }
}
