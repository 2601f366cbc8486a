//! Decompresses a request body piece by piece, so that each piece can be charged to the byte budget before it is
//! allocated, and the work stops when the client disconnects (TR-209, D-47).

use std::io::{self, Read};

use axum::body::Bytes;
use bytes::Buf;
use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};
use sapwood_proto::code::Code;
use sapwood_proto::generate::Encoding;

use super::compression::Coding;
use super::request_error::RequestError;
use crate::http::compressed_limit::{CompressedLimit, UnpackedCount};
use crate::http::unpacking::Unpacking;

/// Maximum window of a zstd frame, in bytes; RFC 9659 allows no more over HTTP.
pub(super) const WINDOW_MAX: u64 = 8 << 20;

/// A body that is being decompressed.
pub(super) struct DecompressedBody {
    coding: Coding,
    packed: Bytes,
    source: Box<dyn Read + Send>,
    /// The length of `unpacked`, which `source` compares with what it has read.
    counted: UnpackedCount,
    unpacked: Vec<u8>,
    max: usize,
    /// The raw format is tried, which some clients send as `deflate`.
    is_raw: bool,
}

impl DecompressedBody {
    /// Decompresses `packed`, to at most one byte more than `max`.
    pub(super) fn new(coding: Coding, packed: Bytes, max: usize) -> Self {
        let reported = UnpackedCount::default();
        let bytes = CompressedLimit::new(packed.clone(), reported.clone());
        let source: Box<dyn Read + Send> = match coding {
            Coding::Identity => Box::new(packed.clone().reader()),
            Coding::Gzip => Box::new(MultiGzDecoder::new(bytes)),
            // HTTP means the zlib format; the raw one is sent too.
            Coding::Deflate => Box::new(ZlibDecoder::new(bytes)),
            Coding::Zstd => Box::new(ZstdFrames::new(bytes)),
        };
        Self {
            coding,
            packed,
            source,
            counted: reported,
            unpacked: Vec::new(),
            max,
            is_raw: false,
        }
    }

    /// The decompressed body.
    pub(super) fn into_bytes(self) -> Bytes {
        self.unpacked.into()
    }
}

impl Unpacking for DecompressedBody {
    type Error = RequestError;

    /// Decompresses at most `bytes` more; returns whether that was the end, or one byte more than the maximum. Blocks
    /// for as long as that takes.
    ///
    /// # Errors
    /// Data that is not in this coding.
    fn step(&mut self, bytes: usize) -> Result<bool, RequestError> {
        // One byte more than the maximum is enough to know that there are more.
        let left = (self.max + 1).saturating_sub(self.unpacked.len());
        let part = bytes.clamp(1, left.max(1));
        if self.unpacked.len() >= bytes {
            // From the second step on the rest is reserved at once: growing would copy the body and hold both copies,
            // and memory that was not written to costs nothing.
            self.unpacked.reserve_exact(left);
        }
        let mut source = (&mut self.source).take(part as u64);
        let read = match source.read_to_end(&mut self.unpacked) {
            Ok(read) => read,
            // HTTP's `deflate` has a zlib header, and some clients leave it out (TR-209). Only the failure shows it, so
            // the body is read again from its start; a body that is corrupt fails a second time.
            Err(_) if self.coding == Coding::Deflate && !self.is_raw => {
                self.is_raw = true;
                self.unpacked.clear();
                self.counted.set(0);
                let packed = CompressedLimit::new(self.packed.clone(), self.counted.clone());
                self.source = Box::new(DeflateDecoder::new(packed));
                return Ok(false);
            }
            Err(_) => {
                let corrupt = Encoding::Corrupt(self.coding.name()).to_string();
                return Err(RequestError::new(Code::InvalidRequest, corrupt));
            }
        };
        self.counted.set(self.unpacked.len());
        // `take` ends early only where the source has ended.
        Ok(read < part || self.unpacked.len() > self.max)
    }

    fn held_bytes(&self) -> usize {
        let unpacked = self.unpacked.len();
        // A zstd decoder keeps a window of its output, in a buffer that doubles its size when it is full.
        let window = match self.coding {
            Coding::Zstd => unpacked.min(2 * WINDOW_MAX as usize),
            _ => 0,
        };
        unpacked + window
    }
}

/// Concatenated frames of zstd, which the decoder does not read by itself.
struct ZstdFrames {
    /// The input between two frames; within one the frame's decoder has it.
    rest: Option<CompressedLimit>,
    frame: Option<Box<StreamingDecoder<CompressedLimit, FrameDecoder>>>,
}

impl ZstdFrames {
    const fn new(packed: CompressedLimit) -> Self {
        Self {
            rest: Some(packed),
            frame: None,
        }
    }
}

impl Read for ZstdFrames {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(frame) = &mut self.frame {
                let read = frame.read(buf)?;
                // Nothing read into an empty buffer is not the end of the frame.
                if read > 0 || buf.is_empty() {
                    return Ok(read);
                }
            }
            if let Some(frame) = self.frame.take() {
                self.rest = Some(frame.into_inner());
            }
            let rest = self.rest.as_ref().map(CompressedLimit::rest);
            let Some(rest) = rest.filter(|rest| !rest.is_empty()) else {
                return Ok(0);
            };
            // Read from the header before the decoder is made, which would allocate whatever the frame asks for.
            let window = window(rest).filter(|window| *window <= WINDOW_MAX);
            window.ok_or(io::ErrorKind::InvalidData)?;
            let rest = self.rest.take().ok_or(io::ErrorKind::InvalidData)?;
            let frame = StreamingDecoder::new(rest).map_err(io::Error::other)?;
            self.frame = Some(Box::new(frame));
        }
    }
}

/// The window that the frame at the start asks for, in bytes (RFC 8878, 3.1.1.1). `None`: there is no frame.
fn window(bytes: &[u8]) -> Option<u64> {
    let descriptor = *bytes.strip_prefix(&[0x28, 0xb5, 0x2f, 0xfd])?.first()?;
    let rest = bytes.get(5..)?;
    if descriptor & 0x20 == 0 {
        let (exponent, mantissa) = (rest.first()? >> 3, u64::from(rest.first()? & 7));
        let base = 1_u64 << (10 + u32::from(exponent));
        return Some(base + base / 8 * mantissa);
    }
    // A single segment: the window is the content's size, which follows the id of the dictionary.
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let width = [1, 2, 4, 8][usize::from(descriptor >> 6)];
    let field = rest.get(dictionary..dictionary + width)?;
    let number = field
        .iter()
        .rev()
        .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    // The field of two bytes has an offset, because sizes below 256 fit into one.
    Some(if width == 2 { number + 256 } else { number })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder};

    use super::*;
    use crate::http::compressed_limit::STEP;

    /// `None`: it is in another coding, or has more bytes than `max`.
    fn whole(coding: Coding, packed: &[u8], max: usize, step: usize) -> Option<Bytes> {
        let mut unpacking = DecompressedBody::new(coding, Bytes::copy_from_slice(packed), max);
        while !unpacking.step(step).ok()? {}
        Some(unpacking.into_bytes()).filter(|unpacked| unpacked.len() <= max)
    }

    /// Incompressible content is still decompressed whole.
    #[test]
    fn d_47_a_body_that_decompresses_to_nothing_is_refused_before_its_end() {
        let member = {
            let gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.finish().unwrap()
        };
        let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 1, 0, 0];
        // The header of a member, and blocks of which none is the last.
        let head = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
        let blocks = [&head[..], &[0, 0, 0, 0xff, 0xff].repeat(1 << 20)].concat();
        for (coding, packed) in [
            (Coding::Gzip, member.repeat(300_000)),
            (Coding::Gzip, blocks.clone()),
            (Coding::Deflate, [&[0x78, 0x9c], &blocks[10..]].concat()),
            (Coding::Zstd, frame.repeat(600_000)),
        ] {
            let mut unpacking = DecompressedBody::new(coding, packed.into(), 64 << 20);
            // Once more for the format without a frame.
            let steps = (0..3).map(|_| unpacking.step(STEP)).find(Result::is_err);
            assert!(steps.is_some(), "{coding:?}");
        }
        let mut noise = 1_u32;
        let noise = std::iter::repeat_with(|| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 24) as u8
        });
        let noise: Vec<u8> = noise.take(3 << 20).collect();
        let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
        gzip.write_all(&noise).unwrap();
        let fastest = ruzstd::encoding::CompressionLevel::Uncompressed;
        for (coding, packed) in [
            (Coding::Gzip, gzip.finish().unwrap()),
            (
                Coding::Zstd,
                ruzstd::encoding::compress_to_vec(&noise[..], fastest),
            ),
        ] {
            let unpacked = whole(coding, &packed, noise.len(), STEP).unwrap();
            assert!(unpacked == noise, "{coding:?}");
        }
    }

    #[test]
    fn tr_209_concatenated_zstd_frames_are_read_up_to_the_limit_and_the_window() {
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let pack = |text: &str| ruzstd::encoding::compress_to_vec(text.as_bytes(), level);
        let two = [pack("one "), pack("two")].concat();
        for step in [1, 4, 7, 8] {
            assert_eq!(whole(Coding::Zstd, &two, 7, step).unwrap(), "one two");
            assert!(whole(Coding::Zstd, &two, 6, step).is_none());
            assert!(whole(Coding::Zstd, &two[..two.len() - 1], 7, step).is_none());
            assert!(whole(Coding::Zstd, b"no frame", 7, step).is_none());
        }
        // (descriptor and what follows it, the memory that it asks for)
        for (bytes, asked) in [
            (&[0x00, 0x00][..], Some(1 << 10)),
            (&[0x00, 0x58], Some(2 << 20)),
            (&[0x00, 0x6b], Some((8 << 20) + 3 * (1 << 20))),
            (&[0x20, 7], Some(7)),
            (&[0x60, 1, 1], Some(256 + 257)),
            (&[0xa1, 9, 0, 0, 0, 1], Some(1 << 24)),
            (&[0x20], None),
            (&[], None),
        ] {
            let frame = [&[0x28, 0xb5, 0x2f, 0xfd], bytes].concat();
            assert_eq!(window(&frame), asked, "{bytes:?}");
        }
        let greedy = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xf8, 1, 0, 0];
        assert!(whole(Coding::Zstd, &greedy, 1 << 20, 9).is_none());
    }

    #[test]
    fn d_47_a_step_decompresses_at_most_the_bytes_asked_for() {
        let text = vec![b'a'; 1 << 20];
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&text).unwrap();
        let mut raw = DeflateEncoder::new(Vec::new(), Compression::fast());
        raw.write_all(&text).unwrap();
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        for (coding, packed) in [
            (Coding::Gzip, gzip.finish().unwrap()),
            (Coding::Deflate, raw.finish().unwrap()),
            (
                Coding::Zstd,
                ruzstd::encoding::compress_to_vec(&text[..], level),
            ),
        ] {
            let mut unpacking = DecompressedBody::new(coding, packed.clone().into(), text.len());
            let mut before = 0;
            while !unpacking.step(64 << 10).unwrap() {
                assert!(unpacking.unpacked.len() - before <= 64 << 10);
                before = unpacking.unpacked.len();
            }
            let window = if coding == Coding::Zstd { 1 << 20 } else { 0 };
            assert_eq!(unpacking.held_bytes(), text.len() + window, "{coding:?}");
            assert_eq!(unpacking.into_bytes(), text, "{coding:?}");
            let less = text.len() - 1;
            assert!(
                whole(coding, &packed, less, 64 << 10).is_none(),
                "{coding:?}"
            );
        }
    }
}
