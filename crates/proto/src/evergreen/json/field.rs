//! Fields of proto3-JSON whose JSON type differs from their own type, in all forms that the mapping permits.

use std::fmt;
use std::marker::PhantomData;

use base64::Engine as _;
use base64::alphabet::{Alphabet, STANDARD, URL_SAFE};
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::Bytes;
use bytestring::ByteString;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

/// Deserializes a field where `null` means absent.
pub(super) fn absent<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// An object only: a derived struct would also accept a list of its fields.
#[derive(Debug, Default)]
pub(super) struct Object<T>(pub(super) T);

/// A string with shared ownership.
#[derive(Debug, Default)]
pub(super) struct SharedString(pub(super) ByteString);

/// An int32: a number, or a string that holds one.
#[derive(Debug, Default)]
pub(super) struct Int32(pub(super) i32);

/// Bytes as base64, standard or URL-safe, padded or not.
#[derive(Debug, Default)]
pub(super) struct Base64(pub(super) Bytes);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct StringVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for StringVisitor<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        from.deserialize_map(StringVisitor(PhantomData))
    }
}

impl<'de> Deserialize<'de> for SharedString {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ListVisitor;
        impl Visitor<'_> for ListVisitor {
            type Value = SharedString;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<SharedString, E> {
                Ok(SharedString(text.into()))
            }

            fn visit_string<E: Error>(self, text: String) -> Result<SharedString, E> {
                Ok(SharedString(text.into()))
            }
        }
        from.deserialize_string(ListVisitor)
    }
}

impl<'de> Deserialize<'de> for Int32 {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Seen;
        impl Visitor<'_> for Seen {
            type Value = Int32;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an int32")
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Int32, E> {
                i32::try_from(number).map(Int32).map_err(E::custom)
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Int32, E> {
                i32::try_from(number).map(Int32).map_err(E::custom)
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Int32, E> {
                // proto3-JSON accepts `7.0` and `7e0` for an integer.
                let whole = number.fract() == 0.0
                    && (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&number);
                #[allow(
                    clippy::cast_possible_truncation,
                    reason = "whole and in range, so exact"
                )]
                whole
                    .then_some(Int32(number as i32))
                    .ok_or_else(|| E::custom("not an int32"))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Int32, E> {
                match text.parse() {
                    Ok(number) => Ok(Int32(number)),
                    // Exponents are accepted in strings as well. `inf` and `nan` parse here, and have no fraction of 0.
                    Err(_) => text
                        .parse::<f64>()
                        .map_err(E::custom)
                        .and_then(|number| self.visit_f64(number)),
                }
            }
        }
        from.deserialize_any(Seen)
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Seen;
        impl Visitor<'_> for Seen {
            type Value = Base64;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("base64")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Base64, E> {
                // The alphabets differ in two characters, so one of them shows which is meant; a text with both kinds
                // is refused.
                let url_safe = text.bytes().any(|byte| matches!(byte, b'-' | b'_'));
                let engine = if url_safe { &FOR_URLS } else { &USUAL };
                engine
                    .decode(text)
                    .map(|bytes| Base64(bytes.into()))
                    .map_err(|_| E::custom("bad base64"))
            }
        }
        from.deserialize_str(Seen)
    }
}

const fn lenient(alphabet: &Alphabet) -> GeneralPurpose {
    GeneralPurpose::new(
        alphabet,
        GeneralPurposeConfig::new()
            .with_decode_padding_mode(DecodePaddingMode::Indifferent)
            .with_decode_allow_trailing_bits(true),
    )
}

/// The standard alphabet. Padding is optional, because it is often omitted.
pub(in crate::evergreen) const USUAL: GeneralPurpose = lenient(&STANDARD);
const FOR_URLS: GeneralPurpose = lenient(&URL_SAFE);
