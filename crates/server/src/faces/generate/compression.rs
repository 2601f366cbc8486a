//! Compressed bodies in both directions (TR-209, TR-807, TR-1301).

use std::io::Write;

use axum::body::Bytes;
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use sapwood_proto::code::Code;
use sapwood_proto::generate::Encoding;

use super::body::EncodingErrorStyle;
use super::options::Config;
use super::request_error::RequestError;

/// Answers of fewer bytes are not worth compressing.
const COMPRESSED_FROM: usize = 1_024;

/// What the body of a request is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Identity,
    Gzip,
    Deflate,
    Zstd,
}

impl Coding {
    /// As the headers say.
    ///
    /// # Errors
    /// What nobody here reads, and everything but identity where the reference's behaviour is wanted.
    pub(super) fn of(
        headers: &HeaderMap,
        style: EncodingErrorStyle,
        config: &Config,
    ) -> Result<Self, RequestError> {
        let Some(given) = headers.get(header::CONTENT_ENCODING) else {
            return Ok(Self::Identity);
        };
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

    /// As errors and headers call it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
            Self::Zstd => "zstd",
        }
    }
}

/// What an answer may be written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcceptedEncoding {
    Gzip,
    Deflate,
}

impl AcceptedEncoding {
    /// The first of what we can do that the client lists.
    pub(super) fn of(asked: &HeaderMap) -> Option<Self> {
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

    /// As it stands in headers.
    pub(super) const fn name(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        })
    }

    /// A whole body in it, where the client lists something and that is worth it.
    pub(super) fn whole(asked: &HeaderMap, body: Bytes) -> (Bytes, Option<Self>) {
        let packing = Self::of(asked).filter(|_| body.len() > COMPRESSED_FROM);
        let packed = packing.and_then(|packing| Some((packing.compress(&body)?, Some(packing))));
        packed.unwrap_or((body, None))
    }

    /// Nothing is written anywhere that could fail, so there is always an answer.
    fn compress(self, body: &[u8]) -> Option<Bytes> {
        let level = Compression::fast();
        let packed = match self {
            Self::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), level);
                encoder.write_all(body).and_then(|()| encoder.finish())
            }
            Self::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), level);
                encoder.write_all(body).and_then(|()| encoder.finish())
            }
        };
        packed.ok().map(Bytes::from)
    }
}

#[cfg(test)]
mod tests {
    use super::super::decompression::DecompressedBody;
    use super::*;

    #[test]
    fn tr_807_the_client_chooses_what_an_answer_is_written_in() {
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

    #[test]
    fn tr_1301_an_answer_is_packed_from_a_kibibyte_on() {
        for (name, coding) in [("gzip", Coding::Gzip), ("deflate", Coding::Deflate)] {
            let asked = [(header::ACCEPT_ENCODING, HeaderValue::from_static(name))];
            let asked = HeaderMap::from_iter(asked);
            let long = Bytes::from("green tea ".repeat(200));
            let (body, packing) = AcceptedEncoding::whole(&asked, long.clone());
            assert_eq!(packing.unwrap().name(), name);
            assert_eq!(unpacked(coding, body), long);
            let short = long.slice(..COMPRESSED_FROM);
            assert_eq!(
                AcceptedEncoding::whole(&asked, short.clone()),
                (short, None)
            );
        }
    }

    fn unpacked(coding: Coding, bytes: Bytes) -> Bytes {
        let mut unpacking = DecompressedBody::new(coding, bytes, 10_000);
        while !unpacking.step(100).unwrap() {}
        unpacking.into_bytes()
    }
}
