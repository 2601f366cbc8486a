//! Tensors: shapes and elements.

use serde_json::Value;
use smallvec::SmallVec;

use super::datatype::Datatype;

/// A shape, and the elements for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its dimensions, each 0 or more.
    pub shape: Vec<i64>,
    /// Its elements in row-major order.
    pub data: TensorData,
}

/// Elements, in the widest type of their kind; the datatype is in the signature.
#[derive(Clone, Debug, PartialEq)]
pub enum TensorData {
    /// `BOOL`.
    Bool(Vec<bool>),
    /// The signed integers.
    Int(Vec<i64>),
    /// The unsigned integers.
    Uint(Vec<u64>),
    /// The floats.
    Float(Vec<f64>),
    /// `BYTES`.
    Bytes(Strings),
}

/// Byte strings in one buffer: many short ones cost little more than their bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    data: Vec<u8>,
    /// Inline for one string, the usual case: responses are sent token by token.
    ends: SmallVec<[usize; 1]>,
}

impl Strings {
    /// Appends a string.
    pub fn push(&mut self, text: &[u8]) {
        self.data.extend_from_slice(text);
        self.ends.push(self.data.len());
    }

    /// Number of strings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no strings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Iterates over the strings, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let begins = std::iter::once(0).chain(self.ends.iter().copied());
        begins
            .zip(&self.ends)
            .map(|(begin, end)| &self.data[begin..*end])
    }

    /// Bytes of all strings, each counted with its length and 4.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len() + 4 * self.ends.len()
    }
}

impl<'a> FromIterator<&'a [u8]> for Strings {
    fn from_iter<I: IntoIterator<Item = &'a [u8]>>(list: I) -> Self {
        let mut strings = Self::default();
        list.into_iter().for_each(|text| strings.push(text));
        strings
    }
}

impl TensorData {
    /// Creates an empty list of the kind for this datatype.
    #[must_use]
    pub fn empty(datatype: Datatype) -> Self {
        match datatype {
            Datatype::Bool => Self::Bool(Vec::new()),
            Datatype::Bytes => Self::Bytes(Strings::default()),
            Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64 => {
                Self::Float(Vec::new())
            }
            Datatype::Uint8 | Datatype::Uint16 | Datatype::Uint32 | Datatype::Uint64 => {
                Self::Uint(Vec::new())
            }
            Datatype::Int8 | Datatype::Int16 | Datatype::Int32 | Datatype::Int64 => {
                Self::Int(Vec::new())
            }
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Bool(list) => list.len(),
            Self::Int(list) => list.len(),
            Self::Uint(list) => list.len(),
            Self::Float(list) => list.len(),
            Self::Bytes(list) => list.len(),
        }
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes on the wire, for this datatype (TR-315).
    #[must_use]
    pub fn bytes(&self, datatype: Datatype) -> usize {
        match self {
            // A string counts its length prefix as well, as the reference counts it (TR-315).
            Self::Bytes(list) => list.bytes(),
            other => other.len() * datatype.width().unwrap_or(0),
        }
    }

    /// The elements as JSON; `None` if a string is not UTF-8.
    pub(super) fn values(&self) -> Option<Vec<Value>> {
        Some(match self {
            Self::Bool(list) => list.iter().map(|flag| Value::from(*flag)).collect(),
            Self::Int(list) => list.iter().map(|number| Value::from(*number)).collect(),
            Self::Uint(list) => list.iter().map(|number| Value::from(*number)).collect(),
            Self::Float(list) => list.iter().map(|number| Value::from(*number)).collect(),
            Self::Bytes(list) => {
                let texts = list.iter().map(|text| std::str::from_utf8(text));
                let texts: Result<Vec<_>, _> = texts.collect();
                texts.ok()?.into_iter().map(Value::from).collect()
            }
        })
    }
}

impl TensorData {
    /// The elements as JSON; invalid UTF-8 is replaced.
    pub(super) fn shown(&self) -> Vec<Value> {
        match self {
            Self::Bytes(list) => list
                .iter()
                .map(|text| String::from_utf8_lossy(text).into())
                .collect(),
            // Only strings can fail to be JSON.
            other => other.values().unwrap_or_default(),
        }
    }
}

impl Tensor {
    /// Creates a one-dimensional tensor of strings.
    #[must_use]
    pub fn texts<'a>(list: impl IntoIterator<Item = &'a str>) -> Self {
        Self::flat(TensorData::Bytes(
            list.into_iter().map(str::as_bytes).collect(),
        ))
    }

    /// Creates a one-dimensional tensor.
    #[must_use]
    pub fn flat(data: TensorData) -> Self {
        Self {
            shape: vec![i64::try_from(data.len()).unwrap_or(i64::MAX)],
            data,
        }
    }

    /// The first element, if it is a boolean.
    pub(super) fn flag(&self) -> Option<bool> {
        match &self.data {
            TensorData::Bool(list) => list.first().copied(),
            _ => None,
        }
    }
}

/// The shape of `count` elements that matches `declared` (TR-309); `None` if there is none.
#[must_use]
pub fn fit(declared: &[i64], count: usize) -> Option<Vec<i64>> {
    let mut rest = i64::try_from(count).ok()?;
    for fixed in declared.iter().copied().filter(|size| *size >= 0) {
        match rest.checked_rem(fixed) {
            Some(0) => rest /= fixed,
            // A tensor with a dimension of 0 has no elements.
            None if rest == 0 => {}
            _ => return None,
        }
    }
    let innermost = declared.iter().rposition(|size| *size < 0);
    // Elements are left over and no dimension can take them. A dimension of 0 has no elements to divide, so there the
    // rest is 0.
    if innermost.is_none() && rest != 1 && !declared.contains(&0) {
        return None;
    }
    // The innermost open dimension takes the rest (TR-309).
    let shape = declared.iter().enumerate().map(|(index, size)| match size {
        _ if Some(index) == innermost => rest,
        -1 => 1,
        size => *size,
    });
    Some(shape.collect())
}
