//! Compressed bodies in both directions (TR-209, TR-807, TR-1301).

use std::io::Write;

use axum::body::{Body, Bytes};
use axum::response::IntoResponse;
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use sapwood_proto::code::Code;
use sapwood_proto::generate::Encoding;

use super::body::EncodingErrorStyle;
use super::offload::offload;
use super::options::Config;
use super::request_error::RequestError;
use crate::http::request_trace;

/// Answers of fewer bytes are not worth compressing.
const COMPRESSED_FROM: usize = 1_024;

/// The coding of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Identity,
    Gzip,
    Deflate,
    Zstd,
}

impl Coding {
    /// Reads the coding from the headers.
    ///
    /// # Errors
    /// Unknown codings, and on generate all but identity with `compat` (TR-209).
    pub(super) fn of(
        headers: &HeaderMap,
        style: EncodingErrorStyle,
        config: &Config,
    ) -> Result<Self, RequestError> {
        let Some(given) = headers.get(header::CONTENT_ENCODING) else {
            return Ok(Self::Identity);
        };
        // A value that is no text is no coding either: it is refused below like any that is unknown.
        let given = given.to_str().unwrap_or("?").trim();
        let coding = match given.to_ascii_lowercase().as_str() {
            "" | "identity" => return Ok(Self::Identity),
            "gzip" | "x-gzip" => Some(Self::Gzip),
            "deflate" => Some(Self::Deflate),
            "zstd" => Some(Self::Zstd),
            _ => None,
        };
        let refuse =
            |encoding: Encoding| RequestError::new(Code::InvalidRequest, encoding.to_string());
        match (coding, style) {
            (_, EncodingErrorStyle::Generate) if config.compat => {
                Err(refuse(Encoding::IdentityOnly))
            }
            (Some(coding), _) => Ok(coding),
            (None, EncodingErrorStyle::Generate) => {
                // Clipped: the value is the client's, of any length (D-47).
                let shown: String = given.chars().take(64).collect();
                Err(refuse(Encoding::Unknown(shown)))
            }
            (None, EncodingErrorStyle::Infer | EncodingErrorStyle::Raw) => {
                let failure = refuse(Encoding::UnknownCompression);
                let read = HeaderValue::from_static("gzip, deflate, zstd");
                Err(failure
                    .with_status(StatusCode::NOT_IMPLEMENTED)
                    .with_header(header::ACCEPT_ENCODING, read))
            }
        }
    }

    /// Its name in errors and headers.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
            Self::Zstd => "zstd",
        }
    }
}

/// The coding of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcceptedEncoding {
    Gzip,
    Deflate,
}

impl AcceptedEncoding {
    /// The first supported coding that the client lists.
    pub(super) fn of(asked: &HeaderMap) -> Option<Self> {
        // By position: a server may choose among the codings that are accepted, and only a weight of 0 forbids one.
        let lists = asked.get_all(header::ACCEPT_ENCODING).iter();
        let texts = lists.filter_map(|list| list.to_str().ok());
        texts.flat_map(|list| list.split(',')).find_map(|item| {
            let mut parts = item.split(';').map(str::trim);
            let packing = match parts.next()? {
                "gzip" | "x-gzip" => Self::Gzip,
                "deflate" => Self::Deflate,
                _ => return None,
            };
            let weight = parts.find_map(|part| part.strip_prefix("q="));
            let refused = weight.is_some_and(|weight| weight.trim().parse() == Ok(0.0));
            (!refused).then_some(packing)
        })
    }

    /// Its name in headers.
    const fn name(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        })
    }

    /// Compresses a body. Writing to memory cannot fail, so there is always a result.
    fn compress(self, body: &[u8]) -> Option<Bytes> {
        // The fastest level, because most bodies are compressed on the async thread.
        let level = Compression::fast();
        let packed = match self {
            Self::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), level);
                encoder.write_all(body).and_then(|()| encoder.finish())
            }
            // The zlib format, which is what HTTP means by `deflate`.
            Self::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), level);
                encoder.write_all(body).and_then(|()| encoder.finish())
            }
        };
        packed.ok().map(Bytes::from)
    }
}

/// A whole answer, compressed if it is large enough and the client lists a supported coding (TR-1301).
pub(super) async fn compressed(
    asked: &HeaderMap,
    kind: HeaderValue,
    body: Bytes,
) -> Response<Body> {
    let packing = AcceptedEncoding::of(asked).filter(|_| body.len() > COMPRESSED_FROM);
    let head = [(header::CONTENT_TYPE, kind)];
    let Some(packing) = packing else {
        return (head, body).into_response();
    };
    let turn = request_trace::present_turn().caller;
    let whole = body.clone();
    let packed = offload(body.len(), turn, move || packing.compress(&whole)).await;
    match packed.ok().flatten() {
        Some(packed) => {
            (head, [(header::CONTENT_ENCODING, packing.name())], packed).into_response()
        }
        None => (head, body).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::super::decompression::DecompressedBody;
    use super::super::offload::IN_PLACE_BYTES;
    use super::super::request_error::JSON;
    use super::*;
    use crate::http::unpacking::Unpacking;

    #[test]
    fn tr_807_an_answer_has_the_first_supported_coding_that_the_client_lists() {
        for (asked, expect) in [
            ("gzip", Some(AcceptedEncoding::Gzip)),
            ("br, deflate;q=0.5, gzip", Some(AcceptedEncoding::Deflate)),
            ("gzip;q=0, deflate", Some(AcceptedEncoding::Deflate)),
            ("gzip; q=0.0", None),
            ("zstd, br", None),
            ("", None),
        ] {
            let value = asked.parse().unwrap();
            let headers: HeaderMap = [(header::ACCEPT_ENCODING, value)].into_iter().collect();
            assert_eq!(AcceptedEncoding::of(&headers), expect, "{asked}");
        }
        assert_eq!(AcceptedEncoding::of(&HeaderMap::new()), None);
    }

    #[tokio::test]
    async fn tr_1301_an_answer_of_more_than_a_kibibyte_is_compressed() {
        for (name, coding) in [("gzip", Coding::Gzip), ("deflate", Coding::Deflate)] {
            let asked = [(header::ACCEPT_ENCODING, HeaderValue::from_static(name))];
            let asked = HeaderMap::from_iter(asked);
            for (bytes, is_compressed) in [
                (COMPRESSED_FROM, false),
                (COMPRESSED_FROM + 1, true),
                (IN_PLACE_BYTES + 1, true),
            ] {
                let text = Bytes::from(vec![b'a'; bytes]);
                let (head, body) = compressed(&asked, JSON, text.clone()).await.into_parts();
                let packing = head.headers.get(header::CONTENT_ENCODING);
                assert_eq!(
                    packing.is_some_and(|packing| packing == name),
                    is_compressed
                );
                let body = body.collect().await.unwrap().to_bytes();
                let coding = if is_compressed {
                    coding
                } else {
                    Coding::Identity
                };
                assert_eq!(unpacked(coding, body), text);
            }
        }
    }

    fn unpacked(coding: Coding, bytes: Bytes) -> Bytes {
        let mut unpacking = DecompressedBody::new(coding, bytes, 100_000);
        while !unpacking.step(100).unwrap() {}
        unpacking.into_bytes()
    }
}
