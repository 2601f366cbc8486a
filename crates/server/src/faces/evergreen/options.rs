//! Session options in request metadata, headers and query parameters (section 2 of the Evergreen page).
//!
//! Unknown options are ignored, so that newer clients work.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;
use sapwood_proto::evergreen::MetadataMode;
use sapwood_proto::session::RetentionPolicy;

/// The header of a session's token, both ways (EV-940).
pub(crate) const TOKEN: &str = "evergreen-session-token";

/// The options that a client asked for; `None` where the dialect's default applies.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(test, derive(Debug))]
pub(crate) struct RequestedOptions {
    /// `evergreen-metadata` (EV-405).
    pub(crate) metadata: Option<MetadataMode>,
    /// `evergreen-partial-failure` (EV-930).
    pub(crate) partial_failure: bool,
    /// `evergreen-retain` (EV-955).
    pub(crate) retain: Option<RetentionPolicy>,
    /// `evergreen-resume` (EV-940).
    pub(crate) resume: bool,
    /// `evergreen-session-token`: the session to resume (EV-941). As good as a key, so it is never shown.
    pub(crate) token: Option<Arc<str>>,
    /// The earlier of `evergreen-timeout-ms` and `grpc-timeout` (EV-950).
    pub(crate) timeout: Option<Duration>,
}

/// An option whose value cannot be read: its name and what would be accepted. Never the value itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} is malformed: send {accepts}")]
pub(crate) struct BadOption {
    option: &'static str,
    accepts: &'static str,
}

impl BadOption {
    /// The option's name.
    pub(crate) const fn name(&self) -> &'static str {
        self.option
    }
}

impl RequestedOptions {
    /// Reads every option out of the headers of an upgrade, and out of the query, where browsers have to put them.
    /// A header wins.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) fn of_upgrade(headers: &HeaderMap, query: &str) -> Result<Self, BadOption> {
        let mut all = headers.clone();
        let named = query.split('&').filter_map(|pair| pair.split_once('='));
        for (name, value) in named.filter(|(name, _)| name.starts_with("evergreen-")) {
            // What cannot be a header is no option that anybody knows.
            let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else {
                continue;
            };
            // Bytes and not text: what is malformed is refused below, in the same words as in a header.
            let value = percent_decode_str(value).collect::<Vec<u8>>();
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                all.entry(name).or_insert(value);
            }
        }
        Self::read(&all)
    }

    /// Reads every option out of `headers`.
    ///
    /// # Errors
    /// The first malformed value, also of options that this server does not enable.
    pub(crate) fn read(headers: &HeaderMap) -> Result<Self, BadOption> {
        let modes = [
            ("strict", MetadataMode::Strict),
            ("lenient", MetadataMode::Lenient),
            ("per-chunk", MetadataMode::PerChunk),
        ];
        let accepts = "strict, lenient or per-chunk";
        let metadata = choice(headers, "evergreen-metadata", accepts, of(&modes))?;
        let flags = [("0", false), ("1", true)];
        let partial_failure = choice(headers, "evergreen-partial-failure", "0 or 1", of(&flags))?;
        let resume = choice(headers, "evergreen-resume", "0 or 1", of(&flags))?;
        let policies = [
            ("session", RetentionPolicy::Session),
            ("unread", RetentionPolicy::Unread),
        ];
        let accepts = "session or unread";
        let retain = choice(headers, "evergreen-retain", accepts, of(&policies))?;
        let ours = choice(headers, "evergreen-timeout-ms", "1 to 86400000", |value| {
            digits(value, 8)
                .filter(|ms| (1..=DAY_MS).contains(ms))
                .map(Duration::from_millis)
        })?;
        let grpc = choice(
            headers,
            "grpc-timeout",
            "up to 8 digits and one of H M S m u n",
            grpc_timeout,
        )?;
        Ok(Self {
            metadata,
            partial_failure: partial_failure.unwrap_or(false),
            retain,
            resume: resume.unwrap_or(false),
            // A token that is not text is not one of ours. It is kept as an empty one, which is answered as any that is
            // unknown; without it the client would get a new session that it takes for its old one.
            token: headers
                .get(TOKEN)
                .map(|token| token.to_str().unwrap_or_default().into()),
            // Both bound the session (EV-950), so the earlier one holds.
            timeout: ours.into_iter().chain(grpc).min(),
        })
    }
}

fn choice<T>(
    headers: &HeaderMap,
    option: &'static str,
    accepts: &'static str,
    read: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, BadOption> {
    let Some(value) = headers.get(option) else {
        return Ok(None);
    };
    let read = value.to_str().ok().and_then(read);
    read.map(Some).ok_or(BadOption { option, accepts })
}

/// Reads the values of an option that has a few.
fn of<T: Copy>(known: &[(&str, T)]) -> impl Fn(&str) -> Option<T> {
    move |value| {
        let found = known.iter().find(|(name, _)| *name == value);
        found.map(|(_, value)| *value)
    }
}

/// A number of at most `most` digits and nothing else; `parse` alone would accept a sign.
fn digits(value: &str, most: usize) -> Option<u64> {
    let plain =
        !value.is_empty() && value.len() <= most && value.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| value.parse().ok()).flatten()
}

/// The `grpc-timeout` grammar: digits and a unit.
fn grpc_timeout(value: &str) -> Option<Duration> {
    let (number, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    // The grammar of gRPC has at most 8 digits, which also keeps the products below from overflowing.
    let number = digits(number, 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

const DAY_MS: u64 = 86_400_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &'static str, value: &'static [u8]) -> Result<RequestedOptions, &'static str> {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_bytes(value).unwrap());
        RequestedOptions::read(&headers).map_err(|malformed| malformed.option)
    }

    #[test]
    fn ev_950_timeouts_are_read_from_both_headers_and_the_earlier_one_holds() {
        for (name, value, expect) in [
            ("evergreen-timeout-ms", "1", Some(Duration::from_millis(1))),
            (
                "evergreen-timeout-ms",
                "86400000",
                Some(Duration::from_secs(86_400)),
            ),
            ("evergreen-timeout-ms", "0", None),
            ("evergreen-timeout-ms", "86400001", None),
            ("evergreen-timeout-ms", "+5", None),
            ("evergreen-timeout-ms", "", None),
            ("grpc-timeout", "2H", Some(Duration::from_secs(7200))),
            ("grpc-timeout", "3M", Some(Duration::from_secs(180))),
            (
                "grpc-timeout",
                "99999999S",
                Some(Duration::from_secs(99_999_999)),
            ),
            ("grpc-timeout", "100m", Some(Duration::from_millis(100))),
            ("grpc-timeout", "100u", Some(Duration::from_micros(100))),
            ("grpc-timeout", "100n", Some(Duration::from_nanos(100))),
            ("grpc-timeout", "100000000m", None),
            ("grpc-timeout", "m", None),
            ("grpc-timeout", "5", None),
            ("grpc-timeout", "", None),
        ] {
            let got = read(name, value.as_bytes()).map(|options| options.timeout);
            assert_eq!(got, expect.map(Some).ok_or(name), "{name}: {value}");
        }
        let mut both = HeaderMap::new();
        both.insert("grpc-timeout", HeaderValue::from_static("1S"));
        both.insert("evergreen-timeout-ms", HeaderValue::from_static("10"));
        assert_eq!(
            RequestedOptions::read(&both).unwrap().timeout,
            Some(Duration::from_millis(10))
        );
    }

    #[test]
    fn options_are_read_from_the_query_too_and_a_header_wins() {
        let mut headers = HeaderMap::new();
        let read = |headers: &HeaderMap, query| {
            let options = RequestedOptions::of_upgrade(headers, query);
            options
                .map(|options| (options.metadata, options.timeout))
                .map_err(|malformed| malformed.name())
        };
        let query = "key=s&evergreen-metadata=per%2dchunk&evergreen-timeout-ms=5&x";
        let five = Some(Duration::from_millis(5));
        assert_eq!(
            read(&headers, query),
            Ok((Some(MetadataMode::PerChunk), five))
        );
        headers.insert("evergreen-metadata", HeaderValue::from_static("strict"));
        assert_eq!(
            read(&headers, query),
            Ok((Some(MetadataMode::Strict), five))
        );
        assert_eq!(
            read(&headers, "evergreen-timeout-ms=0"),
            Err("evergreen-timeout-ms")
        );
    }

    #[test]
    fn unknown_options_are_ignored_and_malformed_ones_are_named() {
        let lenient = RequestedOptions {
            metadata: Some(MetadataMode::Lenient),
            ..RequestedOptions::default()
        };
        assert_eq!(read("evergreen-metadata", b"lenient"), Ok(lenient));
        assert!(
            read("evergreen-partial-failure", b"1")
                .unwrap()
                .partial_failure
        );
        for (value, expect) in [
            (&b"session"[..], RetentionPolicy::Session),
            (b"unread", RetentionPolicy::Unread),
        ] {
            let read = read("evergreen-retain", value).unwrap();
            assert_eq!(read.retain, Some(expect));
        }
        assert_eq!(
            read("evergreen-from-the-future", b"\xff"),
            Ok(RequestedOptions::default())
        );
        for (name, value) in [
            ("evergreen-metadata", &b"Strict"[..]),
            ("evergreen-partial-failure", b"yes"),
            ("evergreen-resume", b"2"),
            ("evergreen-retain", b"always"),
            ("evergreen-metadata", b"\xff"),
        ] {
            assert_eq!(read(name, value), Err(name));
        }
    }
}
