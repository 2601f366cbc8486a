//! References: payloads that name external content by a URI.

use base64::Engine as _;
use bytes::Bytes;

use super::json::field::USUAL;
use super::{Reason, Status};

/// Where the content of a reference is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReferenceTarget {
    /// In the URI itself.
    Inline(Bytes),
    /// At a location that a reference of this scheme names.
    External(&'static str),
}

/// Determines where the content of `uri` is.
///
/// # Errors
/// `REF_SCHEME` if the scheme is unknown, or the `data:` URI is malformed.
pub fn target_of(uri: &str) -> Result<ReferenceTarget, Status> {
    let (scheme, rest) = uri.split_once(':').unwrap_or(("", uri));
    if scheme.eq_ignore_ascii_case("data") {
        return data(rest).map(ReferenceTarget::Inline).ok_or_else(|| {
            Status::new(
                Reason::RefScheme,
                "a data: reference is malformed; send data:[mimetype][;base64],content",
            )
        });
    }
    let known = EXTERNAL_SCHEMES
        .iter()
        .find(|known| scheme.eq_ignore_ascii_case(known));
    known
        .map(|scheme| ReferenceTarget::External(scheme))
        .ok_or_else(|| {
            // The URI is not quoted: its path or query may be confidential (EV-902).
            let known = EXTERNAL_SCHEMES.join(", ");
            let message =
                format!("the scheme of a reference is not supported; supported are: data, {known}");
            Status::new(Reason::RefScheme, message)
        })
}

/// The error for a scheme that is not enabled.
#[must_use]
pub fn switched_off(scheme: &str) -> Status {
    let message = format!(
        "references of scheme {scheme} are disabled on this server; send the content inline"
    );
    Status::new(Reason::RefDenied, message)
}

/// Decodes the part of a URI after `data:`.
fn data(rest: &str) -> Option<Bytes> {
    let (header, body) = rest.split_once(',')?;
    // A fragment identifier is not part of the content; a literal # is written %23.
    let body = body.split_once('#').map_or(body, |(body, _)| body);
    // Before base64, whose `+`, `/` and `=` may be percent-encoded.
    let raw: Vec<u8> = percent_encoding::percent_decode_str(body).collect();
    // `base64` is a flag only behind a semicolon: in `data:base64,` it is the mimetype.
    let base64 = header.rsplit(';').next().filter(|_| header.contains(';'));
    if !base64.is_some_and(|word| word.trim().eq_ignore_ascii_case("base64")) {
        return Some(raw.into());
    }
    // Long content is often wrapped into lines.
    let packed: Vec<u8> = raw
        .into_iter()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    USUAL.decode(packed).ok().map(Bytes::from)
}

const EXTERNAL_SCHEMES: &[&str] = &["file", "http", "https", "s3", "gs", "az"];

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
            let bytes = Bytes::from_static(bytes);
            assert_eq!(
                target_of(uri).unwrap(),
                ReferenceTarget::Inline(bytes),
                "{uri}"
            );
        }
    }

    #[test]
    fn ev_410_references_are_distinguished_by_scheme() {
        for (uri, expect) in [
            ("data:no-comma", Err(Reason::RefScheme)),
            ("data:;base64,!!", Err(Reason::RefScheme)),
            ("", Err(Reason::RefScheme)),
            ("file", Err(Reason::RefScheme)),
            ("ftp://host/secret", Err(Reason::RefScheme)),
            ("file:///etc/passwd", Ok("file")),
            ("HTTPS://host/x?key=secret", Ok("https")),
            ("s3://bucket/x", Ok("s3")),
        ] {
            let refused = match (target_of(uri), expect) {
                (Ok(ReferenceTarget::External(scheme)), Ok(expect)) => {
                    assert_eq!(scheme, expect);
                    switched_off(scheme)
                }
                (Err(status), Err(reason)) => {
                    assert_eq!(status.known(), Some(reason), "{uri}");
                    status
                }
                (other, _) => panic!("{uri}: {other:?}"),
            };
            assert!(!refused.message.contains("secret") && !refused.message.contains("passwd"));
        }
    }
}
