//! Tensor elements as raw bytes, and as typed contents of the gRPC schema (TR-803, TR-901).

use half::{bf16, f16};

use super::datatype::Datatype;
use super::tensor::{Strings, TensorData};
use crate::generated::inference::InferTensorContents;

impl TensorData {
    /// Decodes elements. `None` if the bytes are not whole elements, or a `BOOL` is neither 0 nor 1.
    #[must_use]
    pub fn from_raw(datatype: Datatype, bytes: &[u8]) -> Option<Self> {
        Some(match datatype {
            Datatype::Bool => Self::Bool(bytes.iter().map(flag).collect::<Option<_>>()?),
            Datatype::Bytes => Self::Bytes(strings(bytes)?),
            Datatype::Int8 => Self::Int(each(bytes, |b| i8::from_le_bytes(b).into())?),
            Datatype::Int16 => Self::Int(each(bytes, |b| i16::from_le_bytes(b).into())?),
            Datatype::Int32 => Self::Int(each(bytes, |b| i32::from_le_bytes(b).into())?),
            Datatype::Int64 => Self::Int(each(bytes, i64::from_le_bytes)?),
            Datatype::Uint8 => Self::Uint(each(bytes, |b| u8::from_le_bytes(b).into())?),
            Datatype::Uint16 => Self::Uint(each(bytes, |b| u16::from_le_bytes(b).into())?),
            Datatype::Uint32 => Self::Uint(each(bytes, |b| u32::from_le_bytes(b).into())?),
            Datatype::Uint64 => Self::Uint(each(bytes, u64::from_le_bytes)?),
            Datatype::Fp16 => Self::Float(each(bytes, |b| f16::from_le_bytes(b).into())?),
            Datatype::Bf16 => Self::Float(each(bytes, |b| bf16::from_le_bytes(b).into())?),
            Datatype::Fp32 => Self::Float(each(bytes, |b| f32::from_le_bytes(b).into())?),
            Datatype::Fp64 => Self::Float(each(bytes, f64::from_le_bytes)?),
        })
    }

    /// Encodes the elements for this datatype, which must be of their kind; integers beyond its range keep their low
    /// bits, floats are rounded to the nearest.
    #[must_use]
    pub fn to_raw(&self, datatype: Datatype) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes(datatype));
        let width = datatype.width().unwrap_or(0);
        match self {
            Self::Bool(list) => out.extend(list.iter().map(|flag| u8::from(*flag))),
            // Little endian: the first bytes of a wide integer are the narrow one.
            Self::Int(list) => list
                .iter()
                .for_each(|number| out.extend_from_slice(&number.to_le_bytes()[..width.min(8)])),
            Self::Uint(list) => list
                .iter()
                .for_each(|number| out.extend_from_slice(&number.to_le_bytes()[..width.min(8)])),
            Self::Float(list) => list.iter().for_each(|x| put_float(&mut out, datatype, *x)),
            Self::Bytes(list) => list.iter().for_each(|text| {
                let bytes = u32::try_from(text.len()).unwrap_or(u32::MAX);
                out.extend_from_slice(&bytes.to_le_bytes());
                out.extend_from_slice(text);
            }),
        }
        out
    }

    /// Converts typed contents. `None` if they are out of the datatype's range, or it has no typed contents: 16-bit
    /// floats are only sent as bytes.
    #[must_use]
    pub fn from_contents(datatype: Datatype, contents: &InferTensorContents) -> Option<Self> {
        let fits = |number: i128| {
            datatype
                .range()
                .is_some_and(|(min, max)| (min..=max).contains(&number))
        };
        Some(match datatype {
            Datatype::Bool => Self::Bool(contents.bool_contents.clone()),
            // The schema has one list for all integers of up to 32 bits, so the range of the narrower ones is checked
            // here.
            Datatype::Int8 | Datatype::Int16 | Datatype::Int32 => {
                let list = contents.int_contents.iter();
                let list = list.map(|x| fits((*x).into()).then_some(i64::from(*x)));
                Self::Int(list.collect::<Option<_>>()?)
            }
            Datatype::Int64 => Self::Int(contents.int64_contents.clone()),
            Datatype::Uint8 | Datatype::Uint16 | Datatype::Uint32 => {
                let list = contents.uint_contents.iter();
                let list = list.map(|x| fits((*x).into()).then_some(u64::from(*x)));
                Self::Uint(list.collect::<Option<_>>()?)
            }
            Datatype::Uint64 => Self::Uint(contents.uint64_contents.clone()),
            Datatype::Fp32 => Self::Float(
                contents
                    .fp32_contents
                    .iter()
                    .map(|x| f64::from(*x))
                    .collect(),
            ),
            Datatype::Fp64 => Self::Float(contents.fp64_contents.clone()),
            Datatype::Bytes => {
                Self::Bytes(contents.bytes_contents.iter().map(Vec::as_slice).collect())
            }
            Datatype::Fp16 | Datatype::Bf16 => return None,
        })
    }
}

const fn flag(byte: &u8) -> Option<bool> {
    match *byte {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

fn each<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Option<Vec<T>> {
    let (elements, rest) = bytes.as_chunks::<N>();
    rest.is_empty()
        .then(|| elements.iter().map(|bytes| read(*bytes)).collect())
}

fn strings(mut bytes: &[u8]) -> Option<Strings> {
    let mut strings = Strings::default();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        // The length is the client's: up to four gigabytes in a body of four bytes.
        let (text, rest) = rest.split_at_checked(length)?;
        strings.push(text);
        bytes = rest;
    }
    Some(strings)
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "a narrower datatype is what was asked for"
)]
fn put_float(out: &mut Vec<u8>, datatype: Datatype, x: f64) {
    match datatype {
        Datatype::Fp64 => out.extend_from_slice(&x.to_le_bytes()),
        Datatype::Fp16 => out.extend_from_slice(&f16::from_f64(x).to_le_bytes()),
        // By way of single precision, as clients in Python do it.
        Datatype::Bf16 => out.extend_from_slice(&bf16::from_f32(x as f32).to_le_bytes()),
        _ => out.extend_from_slice(&(x as f32).to_le_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tr_803_elements_are_little_endian_and_strings_have_a_length_prefix() {
        let strings: Strings = [&b"hi"[..], b"", b"\xff"].into_iter().collect();
        for (datatype, data, bytes) in [
            (
                Datatype::Bytes,
                TensorData::Bytes(strings),
                &b"\x02\0\0\0hi\0\0\0\0\x01\0\0\0\xff"[..],
            ),
            (
                Datatype::Bool,
                TensorData::Bool(vec![true, false]),
                b"\x01\0",
            ),
            (
                Datatype::Int32,
                TensorData::Int(vec![8, -2]),
                b"\x08\0\0\0\xfe\xff\xff\xff",
            ),
            (Datatype::Int8, TensorData::Int(vec![-1]), b"\xff"),
            (Datatype::Int16, TensorData::Int(vec![-2]), b"\xfe\xff"),
            (
                Datatype::Int64,
                TensorData::Int(vec![1]),
                b"\x01\0\0\0\0\0\0\0",
            ),
            (Datatype::Uint8, TensorData::Uint(vec![255, 0]), b"\xff\0"),
            (Datatype::Uint16, TensorData::Uint(vec![258]), b"\x02\x01"),
            (Datatype::Uint32, TensorData::Uint(vec![1]), b"\x01\0\0\0"),
            (
                Datatype::Uint64,
                TensorData::Uint(vec![u64::MAX]),
                b"\xff\xff\xff\xff\xff\xff\xff\xff",
            ),
            (Datatype::Fp32, TensorData::Float(vec![0.5]), b"\0\0\0\x3f"),
            (
                Datatype::Fp64,
                TensorData::Float(vec![-2.0]),
                b"\0\0\0\0\0\0\0\xc0",
            ),
            (
                Datatype::Bf16,
                TensorData::Float(vec![1.0, f64::INFINITY]),
                b"\x80\x3f\x80\x7f",
            ),
            (
                Datatype::Fp16,
                TensorData::Float(vec![
                    1.0,
                    -2.0,
                    65_504.0,
                    f64::NEG_INFINITY,
                    2_f64.powi(-24),
                ]),
                b"\0\x3c\0\xc0\xff\x7b\0\xfc\x01\0",
            ),
        ] {
            assert_eq!(data.to_raw(datatype), bytes, "{datatype}");
            assert_eq!(
                TensorData::from_raw(datatype, bytes),
                Some(data),
                "{datatype}"
            );
        }
    }

    #[test]
    fn tr_803_truncated_or_invalid_elements_are_refused() {
        for (datatype, bytes) in [
            (Datatype::Bool, &b"\x02"[..]),
            (Datatype::Int32, b"\0\0\0"),
            (Datatype::Fp16, b"\0"),
            (Datatype::Bytes, b"\x01\0\0"),
            (Datatype::Bytes, b"\x02\0\0\0h"),
            (Datatype::Bytes, b"\xff\xff\xff\xff"),
        ] {
            assert_eq!(
                TensorData::from_raw(datatype, bytes),
                None,
                "{datatype} {bytes:?}"
            );
        }
    }

    /// Every half-precision value, and rounding to the nearest for values between two.
    #[test]
    fn tr_803_16_bit_floats_round_trip_and_others_are_rounded_to_the_nearest() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits).to_f64();
            if value.is_nan() {
                assert!(f16::from_f64(value).is_nan());
            } else {
                assert_eq!(f16::from_f64(value).to_bits(), bits, "{value}");
            }
        }
        for (value, expect) in [
            (1.0 + 2_f64.powi(-11), 0x3c00),
            (1.0 + 3.0 * 2_f64.powi(-11), 0x3c02),
            (2.0 - 2_f64.powi(-12), 0x4000),
            (65_519.0, 0x7bff),
            (65_520.0, 0x7c00),
            (2_f64.powi(-25), 0),
            (-0.0, 0x8000),
        ] {
            assert_eq!(f16::from_f64(value).to_bits(), expect, "{value}");
        }
        let near = TensorData::Float(vec![1.0 + 2_f64.powi(-9), f64::NAN]).to_raw(Datatype::Bf16);
        assert_eq!(near[..2], [0x80, 0x3f]);
        assert!(matches!(
            TensorData::from_raw(Datatype::Bf16, &near),
            Some(TensorData::Float(list)) if list[1].is_nan()
        ));
    }

    #[test]
    fn tr_901_contents_are_decoded_by_datatype_and_checked_for_range() {
        let contents = InferTensorContents {
            bool_contents: vec![true],
            int_contents: vec![200],
            uint_contents: vec![200, 300],
            fp32_contents: vec![0.5],
            bytes_contents: vec![b"a".to_vec()],
            ..InferTensorContents::default()
        };
        for (datatype, expect) in [
            (Datatype::Bool, Some(TensorData::Bool(vec![true]))),
            (Datatype::Int32, Some(TensorData::Int(vec![200]))),
            (Datatype::Int8, None),
            (Datatype::Uint16, Some(TensorData::Uint(vec![200, 300]))),
            (Datatype::Uint8, None),
            (Datatype::Fp32, Some(TensorData::Float(vec![0.5]))),
            (Datatype::Fp64, Some(TensorData::Float(vec![]))),
            (
                Datatype::Bytes,
                Some(TensorData::Bytes([&b"a"[..]].into_iter().collect())),
            ),
            (Datatype::Fp16, None),
        ] {
            assert_eq!(
                TensorData::from_contents(datatype, &contents),
                expect,
                "{datatype}"
            );
        }
    }
}
