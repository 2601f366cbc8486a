//! References: payloads that name their content by a URI.
//!
//! Owns: `data:` (RFC 2397), the one kind that is always on because it carries its content (EV-411). Refuses to know:
//! files, sockets and stores; a reference to those is refused when a reader reaches it.

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;

use super::{Reason, Status};

/// The bytes that `uri` stands for.
///
/// # Errors
/// `REF_SCHEME` if the scheme is unknown or the `data:` URI malformed, `REF_DENIED` if the scheme is known and off.
pub fn resolve(uri: &str) -> Result<Bytes, Status> {
    let (scheme, rest) = uri.split_once(':').unwrap_or(("", uri));
    if scheme.eq_ignore_ascii_case("data") {
        return data(rest).ok_or_else(|| {
            Status::new(
                Reason::RefScheme,
                "a data: reference is malformed; send data:[mimetype][;base64],content",
            )
        });
    }
    if SWITCHED_OFF
        .iter()
        .any(|known| scheme.eq_ignore_ascii_case(known))
    {
        let scheme = scheme.to_ascii_lowercase();
        return Err(Status::new(
            Reason::RefDenied,
            format!("references of scheme {scheme} are switched off here; send the content inline"),
        ));
    }
    Err(Status::new(
        Reason::RefScheme,
        "a reference has no supported scheme; data: is supported",
    ))
}

/// What stands after `data:`.
fn data(rest: &str) -> Option<Bytes> {
    let (header, body) = rest.split_once(',')?;
    // A fragment identifier is not part of the content; a literal # is written %23.
    let body = body.split_once('#').map_or(body, |(body, _)| body);
    let raw: Vec<u8> = percent_encoding::percent_decode_str(body).collect();
    let base64 = header.rsplit(';').next().filter(|_| header.contains(';'));
    if !base64.is_some_and(|word| word.trim().eq_ignore_ascii_case("base64")) {
        return Some(raw.into());
    }
    let packed: Vec<u8> = raw
        .into_iter()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    LENIENT.decode(packed).ok().map(Bytes::from)
}

const SWITCHED_OFF: &[&str] = &["file", "http", "https", "s3", "gs", "az"];
/// Padding is optional, because people leave it out.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ev_411_data_references_are_decoded() {
        for (uri, bytes) in [
            ("data:,hello%20world", &b"hello world"[..]),
            ("data:text/plain;charset=utf-8,a,b", b"a,b"),
            ("data:text/plain;base64,aGk=", b"hi"),
            ("DATA:;BASE64,aGk", b"hi"),
            ("data:;base64,aG%0Ak%3D", b"hi"),
            ("data:,a#fragment", b"a"),
            ("data:base64,aGk=", b"aGk="),
            ("data:,", b""),
            ("data:,%FF%zz", b"\xff%zz"),
        ] {
            assert_eq!(resolve(uri).unwrap(), bytes, "{uri}");
        }
    }

    /// EV-410
    #[test]
    fn ev_410_other_references_are_refused_by_reason() {
        for (uri, reason) in [
            ("data:no-comma", Reason::RefScheme),
            ("data:;base64,!!", Reason::RefScheme),
            ("", Reason::RefScheme),
            ("ftp://host/x", Reason::RefScheme),
            ("file:///etc/passwd", Reason::RefDenied),
            ("HTTPS://host/x?key=secret", Reason::RefDenied),
        ] {
            let status = resolve(uri).unwrap_err();
            assert_eq!(status.known(), Some(reason), "{uri}");
            assert!(!status.message.contains("secret") && !status.message.contains("passwd"));
        }
    }
}
