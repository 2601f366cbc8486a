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
        let packed = packing.and_then(|packing| {
            let mut packer = StreamCompressor::new(packing);
            let (head, tail) = (packer.write(&body)?, packer.end()?);
            Some((Bytes::from([head, tail].concat()), Some(packing)))
        });
        packed.unwrap_or((body, None))
    }
}

/// Packs what goes out piece by piece.
#[derive(Debug)]
pub(super) enum StreamCompressor {
    Gzip(GzEncoder<Vec<u8>>),
    Deflate(ZlibEncoder<Vec<u8>>),
}

impl StreamCompressor {
    pub(super) fn new(packing: AcceptedEncoding) -> Self {
        let level = Compression::fast();
        match packing {
            AcceptedEncoding::Gzip => Self::Gzip(GzEncoder::new(Vec::new(), level)),
            AcceptedEncoding::Deflate => Self::Deflate(ZlibEncoder::new(Vec::new(), level)),
        }
    }

    /// What goes out with certainty, once this is in. Nothing is written anywhere that could fail.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Option<Bytes> {
        self.encoder().write_all(bytes).ok()?;
        Some(self.take())
    }

    /// The same, and nothing of it stays behind: a client can read all of it.
    pub(super) fn event(&mut self, bytes: &[u8]) -> Option<Bytes> {
        self.encoder().write_all(bytes).ok()?;
        self.encoder().flush().ok()?;
        Some(self.take())
    }

    /// The last bytes.
    pub(super) fn end(&mut self) -> Option<Bytes> {
        match self {
            Self::Gzip(encoder) => encoder.try_finish(),
            Self::Deflate(encoder) => encoder.try_finish(),
        }
        .ok()?;
        Some(self.take())
    }

    fn encoder(&mut self) -> &mut dyn Write {
        match self {
            Self::Gzip(encoder) => encoder,
            Self::Deflate(encoder) => encoder,
        }
    }

    fn take(&mut self) -> Bytes {
        let out = match self {
            Self::Gzip(encoder) => encoder.get_mut(),
            Self::Deflate(encoder) => encoder.get_mut(),
        };
        std::mem::take(out).into()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use axum::body::Bytes;
    use flate2::read::{MultiGzDecoder, ZlibDecoder};

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

    fn unpacked(coding: Coding, bytes: Vec<u8>) -> Bytes {
        let mut unpacking = DecompressedBody::new(coding, bytes.into(), 1_000);
        while !unpacking.step(100).unwrap() {}
        unpacking.into_bytes()
    }

    /// Each event can be read as soon as it is there.
    #[test]
    fn tr_1301_events_are_packed_one_by_one() {
        for packing in [AcceptedEncoding::Gzip, AcceptedEncoding::Deflate] {
            let mut packer = StreamCompressor::new(packing);
            let mut sent = Vec::new();
            let mut reply = String::new();
            for event in ["data: 1\n\n", "data: 2\n\n", "data: 3\n\n"] {
                sent.extend(packer.event(event.as_bytes()).unwrap());
                reply.push_str(event);
                // There is no end yet: what is there is read, and then the bytes end too soon.
                let mut seen = Vec::new();
                let read = match packing {
                    AcceptedEncoding::Gzip => MultiGzDecoder::new(&sent[..]).read_to_end(&mut seen),
                    AcceptedEncoding::Deflate => ZlibDecoder::new(&sent[..]).read_to_end(&mut seen),
                };
                assert!(read.is_err() || packing == AcceptedEncoding::Deflate);
                assert_eq!(String::from_utf8(seen).unwrap(), reply);
            }
            sent.extend(packer.end().unwrap());
            let coding = match packing {
                AcceptedEncoding::Gzip => Coding::Gzip,
                AcceptedEncoding::Deflate => Coding::Deflate,
            };
            assert_eq!(unpacked(coding, sent), reply);
        }
    }
}
