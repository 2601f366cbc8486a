//! Parses the header of a GGUF file before the file is passed to llama.cpp.
//!
//! Any bytes give a [`GgufHeader`] or an [`Error`]: no panic, no allocation beyond the limits below, no loop that is
//! not bounded by the number of bytes. Arrays are skipped, not stored, except for the merges of a tokenizer, which
//! llama.cpp reads but does not expose, and, if they are asked for, its tokens. [`checks`] is for what llama.cpp asserts of a header
//! and would end the process for.
//!
//! ```text
//!   "GGUF" version tensors:u64 pairs:u64 (key type value)* (name dims:u32 dim:u64* type:u32 offset:u64)* padding data
//! ```

#[cfg(any(feature = "embedded", test, fuzzing))]
pub(crate) mod checks;
mod reader;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, Read};

use reader::GgufReader;

use crate::llama_options::OverrideValue;

/// The maximum of bytes of a key or a tensor's name.
const NAME_BYTES_MAX: u64 = 65_535;
/// The maximum of bytes of a string that is stored (chat templates are the longest).
const TEXT_BYTES_MAX: u64 = 4 << 20;
/// The maximum of key-value pairs.
const PAIRS_MAX: u64 = 65_536;
/// The maximum of tensors.
const TENSORS_MAX: u64 = 65_536;
/// The maximum of elements of an array.
const ARRAY_MAX: u64 = 16 << 20;
/// The maximum of bytes of everything before the tensors' data.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// The maximum of tokens of a vocabulary; the largest known have a quarter of a million.
const TOKENS_MAX: u64 = 1 << 21;
/// The maximum of bytes of a token that an error message shows.
const SHOWN_BYTES_MAX: usize = 64;
/// The maximum of merges that are stored; the largest known vocabularies have half a million.
const MERGES_MAX: u64 = 1 << 21;
/// The maximum of dimensions of a tensor.
const DIMENSIONS_MAX: usize = 4;

/// Why bytes are not a usable header.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The first four bytes are not `GGUF`.
    #[error("it does not begin with the letters GGUF")]
    Magic,
    /// An unsupported version.
    #[error("its GGUF version is {0}, and only versions 2 and 3 are supported")]
    Version(u32),
    /// Written for machines of the other byte order.
    #[error("it is written for big-endian machines")]
    BigEndian,
    /// The bytes end within the header.
    #[error("it ends within its header")]
    Short,
    /// A number is larger than any model needs.
    #[error("its header exceeds a limit: {0}")]
    Excessive(String),
    /// The layout is broken.
    #[error("its header is damaged: {0}")]
    Damaged(&'static str),
    /// Two tokens of the vocabulary are the same text.
    #[error("its tokens {first} and {second} have the same text {text:?}")]
    EqualTokens {
        /// The id of the first token.
        first: u64,
        /// The id of the second token.
        second: u64,
        /// The text, shortened.
        text: String,
    },
    /// Reading failed.
    #[error("reading it failed: {0}")]
    Read(io::ErrorKind),
}

/// A parsed header.
#[derive(Debug, Default)]
pub(super) struct GgufHeader {
    numbers: BTreeMap<String, u64>,
    texts: BTreeMap<String, String>,
    arrays: BTreeMap<String, Array>,
    fractions: BTreeMap<String, f32>,
    /// Those of `numbers` that are booleans.
    flags: BTreeSet<String>,
    /// The tensors by their names.
    pub(super) tensors: BTreeMap<String, TensorShape>,
    merges: Vec<String>,
    tokens: Option<TokenList>,
    /// Bytes of all tensors of known types.
    pub(super) tensor_bytes: u64,
    /// The minimum of bytes that the complete file has.
    pub(super) file_bytes: u64,
}

/// The tokens of a vocabulary, in the order of their ids.
#[derive(Debug, Default)]
pub(super) struct TokenList {
    /// As llama.cpp reads them: up to the first NUL, and an empty one has a generated name.
    pub(super) texts: Vec<Vec<u8>>,
    /// Their types by GGUF's numbers, 0 for unknown ones; empty if the file has none.
    pub(super) types: Vec<u8>,
}

/// The shape and type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorShape {
    /// Its dimensions, and 1 for those that it lacks.
    pub(super) dimensions: [u64; 4],
    /// ggml's number of its type.
    kind: u32,
}

impl TensorShape {
    #[cfg(test)]
    pub(super) fn new(dimensions: [u64; 4], kind: u32) -> Self {
        Self { dimensions, kind }
    }

    /// Returns whether it is more than one row of numbers, as weights that are multiplied with tokens are.
    pub(super) fn is_matrix(self) -> bool {
        self.dimensions[1..].iter().any(|&size| size > 1)
    }

    /// Returns its bytes; none for an unknown type.
    #[cfg(feature = "embedded")]
    pub(super) fn bytes(self) -> u64 {
        let (block, bytes) = layout(self.kind).unwrap_or((1, 0));
        let elements = self.dimensions.iter().copied().fold(1, u64::saturating_mul);
        (elements / block).saturating_mul(bytes)
    }

    /// Returns ggml's number of its type.
    pub(super) fn kind(self) -> u32 {
        self.kind
    }

    /// Returns whether it has numbers of a type that ggml multiplies: floats of at most 32 bits, and quantised ones.
    pub(super) fn is_multiplied(self) -> bool {
        // I8 to F64
        layout(self.kind).is_some() && !(24..=28).contains(&self.kind)
    }
}

/// A summary of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Array {
    pub(super) length: u64,
    pub(super) of: Element,
    /// Its minimum and maximum, if all elements are non-negative integers.
    pub(super) range: Option<(u64, u64)>,
}

/// The element type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Text,
    /// 32-bit signed integer.
    Int32,
    /// 32-bit float.
    Float32,
    Other,
}

impl GgufHeader {
    /// Parses a header; `bytes` may continue after it.
    pub(super) fn read(bytes: impl Read) -> Result<Self, Error> {
        let mut reader = GgufReader::new(bytes);
        let (mut header, tensors) = Self::pairs(&mut reader, None)?;
        // Checked before it is used to round up below; `checks` is stricter, as ggml is.
        let alignment = header.number("general.alignment").unwrap_or(32);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(Error::Damaged("its alignment is not a small power of two"));
        }
        let mut data_bytes = 0;
        for _ in 0..tensors {
            let (name, shape, offset, bytes) = tensor(&mut reader)?;
            header.tensors.insert(name, shape);
            let end = offset
                .checked_add(bytes)
                .ok_or(Error::Damaged("a tensor ends beyond any file"))?;
            // Tensors may be in any order, so the one that ends last decides.
            data_bytes = end.max(data_bytes);
            header.tensor_bytes = header.tensor_bytes.saturating_add(bytes);
        }
        header.file_bytes = match data_bytes {
            0 => reader.position(),
            // A position is at most HEADER_BYTES_MAX, so that rounding it up cannot overflow.
            _ => reader
                .position()
                .next_multiple_of(alignment)
                .saturating_add(data_bytes),
        };
        Ok(header)
    }

    /// Parses what a header has before its tensors, and keeps the tokens of the vocabulary.
    #[cfg(any(test, fuzzing, feature = "tokenizer"))]
    pub(super) fn read_vocabulary(bytes: impl Read) -> Result<(Self, TokenList), Error> {
        let mut reader = GgufReader::new(bytes);
        let (mut header, _) = Self::pairs(&mut reader, Some(TokenList::default()))?;
        let tokens = header.tokens.take().unwrap_or_default();
        Ok((header, tokens))
    }

    /// Parses up to the tensors, whose number it returns too.
    fn pairs(
        reader: &mut GgufReader<impl Read>,
        tokens: Option<TokenList>,
    ) -> Result<(Self, u64), Error> {
        let mut magic = [0_u8; 4];
        match reader.exact(&mut magic) {
            Ok(()) if &magic == MAGIC => {}
            // A file shorter than the magic is no GGUF file either, rather than a damaged one.
            Ok(()) | Err(Error::Short) => return Err(Error::Magic),
            Err(error) => return Err(error),
        }
        match reader.u32()? {
            2 | 3 => {}
            // A version read in the wrong byte order is a huge number; the advice for such a file is another one.
            version if (1..=3).contains(&version.swap_bytes()) => return Err(Error::BigEndian),
            version => return Err(Error::Version(version)),
        }
        // Limits on counts bound the loops; what they read is bounded by `HEADER_BYTES_MAX`.
        let tensors = reader.count(TENSORS_MAX, "tensors")?;
        let pairs = reader.count(PAIRS_MAX, "key-value pairs")?;
        let mut header = Self {
            tokens,
            ..Self::default()
        };
        for _ in 0..pairs {
            header.pair(reader)?;
        }
        Ok((header, tensors))
    }

    /// Returns a non-negative integer, or a boolean as 0 or 1.
    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.numbers.get(key).copied()
    }

    /// Returns the floats whose keys begin with this prefix.
    pub(super) fn fractions(&self, prefix: &str) -> impl Iterator<Item = (&str, f32)> {
        let fractions = self.fractions.iter();
        fractions
            .map(|(key, value)| (key.as_str(), *value))
            .filter(move |(key, _)| key.starts_with(prefix))
    }

    /// Returns a float, or an integer as one.
    #[expect(clippy::cast_precision_loss, reason = "sampling parameters are small")]
    pub(super) fn fraction(&self, key: &str) -> Option<f32> {
        let whole = || self.number(key).map(|number| number as f32);
        self.fractions.get(key).copied().or_else(whole)
    }

    /// Returns a string.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.texts.get(key).map(String::as_str)
    }

    /// Returns the type of a scalar, array or string by the name that `override_kv` has for it.
    fn kind_of(&self, key: &str) -> Option<&'static str> {
        let kinds = [
            ("array", self.arrays.contains_key(key)),
            ("bool", self.flags.contains(key)),
            ("int", self.numbers.contains_key(key)),
            ("float", self.fractions.contains_key(key)),
            ("str", self.texts.contains_key(key)),
        ];
        kinds
            .iter()
            .find_map(|&(kind, is_it)| is_it.then_some(kind))
    }

    /// Replaces a value as llama.cpp does.
    ///
    /// # Errors
    /// The file has a value of another type: what llama.cpp then takes depends on the key.
    pub(super) fn replace(&mut self, key: &str, value: OverrideValue) -> Result<(), String> {
        let kind = value.kind();
        match self.kind_of(key) {
            None => {
                let is_flag = FLAGS.iter().any(|flag| key.ends_with(flag));
                let needed = match is_flag {
                    true => Some("bool"),
                    false => key.ends_with("_token_id").then_some("int"),
                };
                // llama.cpp would ignore it, with a line in its log.
                if let Some(needed) = needed.filter(|needed| *needed != kind) {
                    return Err(format!(
                        "override_kv: {key} is of type {needed}, and cannot be of type {kind}"
                    ));
                }
                // Of the other keys that are read here none is a flag.
                if !is_flag && kind == "bool" {
                    return Ok(());
                }
            }
            Some(of_file) if of_file == kind => {}
            Some(of_file) => {
                return Err(format!(
                    "override_kv: {key} is of type {of_file} in the file, and cannot be of type {kind}"
                ));
            }
        }
        let key = key.to_owned();
        match value {
            OverrideValue::Int(value) => match u64::try_from(value) {
                Ok(value) => drop(self.numbers.insert(key, value)),
                // As where a file has a negative number.
                Err(_) => drop(self.numbers.remove(&key)),
            },
            OverrideValue::Bool(value) => drop(self.numbers.insert(key, value.into())),
            #[expect(clippy::cast_possible_truncation, reason = "llama.cpp keeps 32 bits")]
            OverrideValue::Float(value) => drop(self.fractions.insert(key, value as f32)),
            OverrideValue::Text(value) => drop(self.texts.insert(key, value)),
        }
        Ok(())
    }

    /// Returns the merges of the tokenizer as `a b`, highest priority first; empty if there are more than are stored.
    pub(super) fn merges(&self) -> &[String] {
        &self.merges
    }

    /// Returns the length of an array.
    pub(super) fn length(&self, key: &str) -> Option<u64> {
        self.array(key).map(|array| array.length)
    }

    /// Returns the summary of an array.
    pub(super) fn array(&self, key: &str) -> Option<Array> {
        self.arrays.get(key).copied()
    }

    fn pair(&mut self, reader: &mut GgufReader<impl Read>) -> Result<(), Error> {
        let key = reader.text(NAME_BYTES_MAX)?;
        let kind = reader.u32()?;
        match kind {
            STRING => {
                let value = reader.text(TEXT_BYTES_MAX)?;
                self.texts.insert(key, value);
            }
            ARRAY => {
                // Few arrays need more than a summary; all others are skipped element by element.
                let array = match (key.as_str(), &mut self.tokens) {
                    ("tokenizer.ggml.merges", _) => texts(reader, &mut self.merges)?,
                    ("tokenizer.ggml.tokens", kept) => {
                        tokens(reader, kept.as_mut().map(|kept| &mut kept.texts))?
                    }
                    ("tokenizer.ggml.token_type", Some(kept)) => types(reader, &mut kept.types)?,
                    _ => array(reader)?,
                };
                self.arrays.insert(key.clone(), array);
                // Per-layer numbers (the number of heads, for one): estimates use the largest.
                if let Some((_, largest)) = array.range {
                    self.numbers.insert(key, largest);
                }
            }
            FLOAT32 => {
                let value = f32::from_bits(reader.u32()?);
                self.fractions.insert(key, value);
            }
            kind => {
                if let Some(value) = scalar(reader, kind)? {
                    if kind == BOOL {
                        self.flags.insert(key.clone());
                    }
                    self.numbers.insert(key, value);
                }
            }
        }
        Ok(())
    }
}

/// The ends of the keys of booleans that are read here.
const FLAGS: [&str; 2] = ["tokenizer.ggml.add_bos_token", ".attention.causal"];
/// The first bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
const INT32: u32 = 5;
const FLOAT32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Reads a scalar of a type; `None` for floats and negative numbers, which no caller needs.
fn scalar(reader: &mut GgufReader<impl Read>, kind: u32) -> Result<Option<u64>, Error> {
    let width = scalar_bytes(kind)?;
    let mut bytes = [0_u8; 8];
    reader.exact(&mut bytes[..width])?;
    let value = u64::from_le_bytes(bytes);
    Ok(match kind {
        // u8, u16, u32, bool, u64
        0 | 2 | 4 | 7 | 10 => Some(value),
        // i8, i16, i32, i64: negative values have the highest bit set.
        1 | 3 | 5 | 11 if value >> (width * 8 - 1) == 0 => Some(value),
        _ => None,
    })
}

fn scalar_bytes(kind: u32) -> Result<usize, Error> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        _ => Err(Error::Damaged("a value has an unknown type")),
    }
}

/// Reads an array of strings.
fn texts(reader: &mut GgufReader<impl Read>, into: &mut Vec<String>) -> Result<Array, Error> {
    if reader.u32()? != STRING {
        return Err(Error::Damaged("merges are not texts"));
    }
    let length = reader.count(ARRAY_MAX, "elements in an array")?;
    for _ in 0..length {
        // Too many to store is no error: such a vocabulary only cannot be written as a `tokenizer.json`.
        if length > MERGES_MAX {
            reader.skip_text()?;
        } else {
            into.push(reader.text(TEXT_BYTES_MAX)?);
        }
    }
    Ok(Array {
        length,
        of: Element::Text,
        range: None,
    })
}

/// Reads the tokens of a vocabulary and refuses equal ones: llama.cpp asserts that there are none.
fn tokens(
    reader: &mut GgufReader<impl Read>,
    mut kept: Option<&mut Vec<Vec<u8>>>,
) -> Result<Array, Error> {
    if reader.u32()? != STRING {
        return Err(Error::Damaged("its tokens are not texts"));
    }
    // A smaller limit than for other arrays, because every text is kept until the end, to find equal ones.
    let length = reader.count(TOKENS_MAX, "tokens")?;
    let mut numbers: HashMap<Vec<u8>, u64> = HashMap::new();
    // Of a key that is there twice, the last value counts, as with others.
    if let Some(kept) = &mut kept {
        kept.clear();
    }
    for second in 0..length {
        let mut token = reader.bytes(TEXT_BYTES_MAX)?;
        // As llama.cpp reads it: up to the first NUL, and an empty token gets a generated name.
        let end = token.iter().position(|&byte| byte == 0);
        token.truncate(end.unwrap_or(token.len()));
        if token.is_empty() {
            token = format!("[EMPTY_{second}]").into_bytes();
        }
        let shown = token[..token.len().min(SHOWN_BYTES_MAX)].to_vec();
        if let Some(kept) = &mut kept {
            kept.push(token.clone());
        }
        if let Some(first) = numbers.insert(token, second) {
            let text = String::from_utf8_lossy(&shown).into_owned();
            return Err(Error::EqualTokens {
                first,
                second,
                text,
            });
        }
    }
    Ok(Array {
        length,
        of: Element::Text,
        range: None,
    })
}

/// Reads the types of tokens.
fn types(reader: &mut GgufReader<impl Read>, into: &mut Vec<u8>) -> Result<Array, Error> {
    if reader.u32()? != INT32 {
        return Err(Error::Damaged(
            "the types of its tokens are no 32-bit integers",
        ));
    }
    let length = reader.count(ARRAY_MAX, "elements in an array")?;
    into.clear();
    for _ in 0..length {
        into.push(u8::try_from(reader.u32()?).unwrap_or(0));
    }
    Ok(Array {
        length,
        of: Element::Int32,
        range: None,
    })
}

/// Skips an array and returns its summary.
fn array(reader: &mut GgufReader<impl Read>) -> Result<Array, Error> {
    let kind = reader.u32()?;
    let length = reader.count(ARRAY_MAX, "elements in an array")?;
    let mut range: Option<(u64, u64)> = None;
    let mut whole = true;
    for _ in 0..length {
        match kind {
            STRING => reader.skip_text()?,
            // The format allows it, but no model has it, and refusing it bounds the depth.
            ARRAY => return Err(Error::Damaged("an array contains arrays")),
            kind => match scalar(reader, kind)? {
                Some(value) => {
                    let (least, largest) = range.unwrap_or((value, value));
                    range = Some((least.min(value), largest.max(value)));
                }
                // A single negative or fractional element, and the summary has no range.
                None => whole = false,
            },
        }
    }
    let of = match kind {
        STRING => Element::Text,
        INT32 => Element::Int32,
        FLOAT32 => Element::Float32,
        _ => Element::Other,
    };
    Ok(Array {
        length,
        of,
        range: range.filter(|_| whole),
    })
}

/// Reads the description of one tensor: its name and shape, the offset of its data and the number of bytes.
fn tensor(reader: &mut GgufReader<impl Read>) -> Result<(String, TensorShape, u64, u64), Error> {
    let name = reader.text(NAME_BYTES_MAX)?;
    let count = reader.u32()?;
    let mut dimensions = [1; DIMENSIONS_MAX];
    let Some(given) = dimensions.get_mut(..count as usize) else {
        return Err(Error::Excessive(format!("a tensor has {count} dimensions")));
    };
    let mut elements = 1_u64;
    for dimension in given {
        *dimension = reader.u64()?;
        // Dimensions are untrusted 64-bit numbers: a product that wraps around would pass the checks of the size.
        elements = elements.checked_mul(*dimension).ok_or(Error::Damaged(
            "a tensor has more elements than can be counted",
        ))?;
    }
    let kind = reader.u32()?;
    let offset = reader.u64()?;
    // An unknown type counts as no bytes: llama.cpp decides about it.
    let (block, bytes) = layout(kind).unwrap_or((1, 0));
    let bytes = (elements / block).checked_mul(bytes).ok_or(Error::Damaged(
        "a tensor has more bytes than can be counted",
    ))?;
    Ok((name, TensorShape { dimensions, kind }, offset, bytes))
}

/// Returns the elements and bytes of a block of a tensor type.
fn layout(kind: u32) -> Option<(u64, u64)> {
    Some(match kind {
        0 | 26 => (1, 4),      // F32, I32
        1 | 25 | 30 => (1, 2), // F16, I16, BF16
        24 => (1, 1),          // I8
        27 | 28 => (1, 8),     // I64, F64
        2 => (32, 18),         // Q4_0
        3 => (32, 20),         // Q4_1
        6 => (32, 22),         // Q5_0
        7 => (32, 24),         // Q5_1
        8 => (32, 34),         // Q8_0
        10 => (256, 84),       // Q2_K
        11 => (256, 110),      // Q3_K
        12 => (256, 144),      // Q4_K
        13 => (256, 176),      // Q5_K
        14 => (256, 210),      // Q6_K
        16 => (256, 66),       // IQ2_XXS
        17 => (256, 74),       // IQ2_XS
        18 => (256, 98),       // IQ3_XXS
        19 => (256, 50),       // IQ1_S
        20 => (32, 18),        // IQ4_NL
        21 => (256, 110),      // IQ3_S
        22 => (256, 82),       // IQ2_S
        23 => (256, 136),      // IQ4_XS
        29 => (256, 56),       // IQ1_M
        34 => (256, 54),       // TQ1_0
        35 => (256, 66),       // TQ2_0
        39 => (32, 17),        // MXFP4
        40 => (64, 36),        // NVFP4
        41 => (128, 18),       // Q1_0
        42 => (64, 18),        // Q2_0
        _ => return None,
    })
}
