//! The element types of tensors (TR-102).

use std::fmt;

macro_rules! datatypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $config:literal, $width:literal, $number:literal;)*) => {
        /// The type of a tensor's elements. Multi-byte values are little endian.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Datatype { $($(#[$doc])* $variant,)* }

        impl Datatype {
            /// Every datatype, in the order of the specification.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name in requests, responses and metadata.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The name in a model's configuration.
            #[must_use]
            pub const fn config_name(self) -> &'static str {
                match self { $(Self::$variant => $config,)* }
            }

            /// Bytes of an element; `None` for strings, which carry their length.
            #[must_use]
            pub const fn width(self) -> Option<usize> {
                let width: usize = match self { $(Self::$variant => $width,)* };
                if width == 0 { None } else { Some(width) }
            }

            /// The number in the gRPC schema's `DataType`.
            #[must_use]
            pub const fn number(self) -> i32 {
                match self { $(Self::$variant => $number,)* }
            }
        }
    };
}

datatypes! {
    /// True or false.
    Bool = "BOOL", "TYPE_BOOL", 1, 1;
    /// 8 bits, unsigned.
    Uint8 = "UINT8", "TYPE_UINT8", 1, 2;
    /// 16 bits, unsigned.
    Uint16 = "UINT16", "TYPE_UINT16", 2, 3;
    /// 32 bits, unsigned.
    Uint32 = "UINT32", "TYPE_UINT32", 4, 4;
    /// 64 bits, unsigned.
    Uint64 = "UINT64", "TYPE_UINT64", 8, 5;
    /// 8 bits, signed.
    Int8 = "INT8", "TYPE_INT8", 1, 6;
    /// 16 bits, signed.
    Int16 = "INT16", "TYPE_INT16", 2, 7;
    /// 32 bits, signed.
    Int32 = "INT32", "TYPE_INT32", 4, 8;
    /// 64 bits, signed.
    Int64 = "INT64", "TYPE_INT64", 8, 9;
    /// IEEE half precision.
    Fp16 = "FP16", "TYPE_FP16", 2, 10;
    /// The upper half of a single-precision number.
    Bf16 = "BF16", "TYPE_BF16", 2, 14;
    /// Single precision.
    Fp32 = "FP32", "TYPE_FP32", 4, 11;
    /// Double precision.
    Fp64 = "FP64", "TYPE_FP64", 8, 12;
    /// Byte strings, each with its length.
    Bytes = "BYTES", "TYPE_STRING", 0, 13;
}

impl Datatype {
    /// The datatype with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// The minimum and maximum of an integer type; `None` for other types.
    #[must_use]
    pub fn range(self) -> Option<(i128, i128)> {
        let bits = u32::try_from(8 * self.width()?).ok()?;
        match self {
            Self::Int8 | Self::Int16 | Self::Int32 | Self::Int64 => {
                Some((-(1 << (bits - 1)), (1 << (bits - 1)) - 1))
            }
            Self::Uint8 | Self::Uint16 | Self::Uint32 | Self::Uint64 => Some((0, (1 << bits) - 1)),
            _ => None,
        }
    }
}

impl fmt::Display for Datatype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
