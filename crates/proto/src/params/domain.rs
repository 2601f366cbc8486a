//! The types and ranges of parameters: [`Domain`] and [`Interval`].

use std::fmt;

use super::{
    BIAS_TEXT_BYTES_MAX, BIAS_TEXTS_MAX, LORA_NAME_BYTES_MAX, LORA_SCALES, LORA_USES_MAX,
    ParamField, STOP_SEQUENCE_TOKENS_MAX, STOP_SEQUENCES_MAX, SamplerStep, lora,
};
use crate::steer::Token;

/// An interval of numbers. NaN is in none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    least: f32,
    most: f32,
    with_least: bool,
    with_most: bool,
}

impl Interval {
    /// From `least` to `most`, both included.
    #[must_use]
    pub const fn closed(least: f32, most: f32) -> Self {
        Self {
            least,
            most,
            with_least: true,
            with_most: true,
        }
    }

    /// Above `least`, up to and including `most`.
    #[must_use]
    pub const fn above(least: f32, most: f32) -> Self {
        Self {
            with_least: false,
            ..Self::closed(least, most)
        }
    }

    /// From `least`, below `most`.
    #[must_use]
    pub const fn below(least: f32, most: f32) -> Self {
        Self {
            with_most: false,
            ..Self::closed(least, most)
        }
    }

    /// Returns the least and the largest number, which an open interval does not contain.
    #[must_use]
    pub const fn ends(&self) -> [f32; 2] {
        [self.least, self.most]
    }

    /// Whether the interval contains `value`.
    #[must_use]
    pub fn contains(&self, value: f32) -> bool {
        // Every comparison with NaN is false, so no check for it is needed.
        let above = value > self.least || self.with_least && value == self.least;
        above && (value < self.most || self.with_most && value == self.most)
    }
}

/// In the notation of intervals; in words as `{:#}`.
impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return match (self.with_least, self.with_most) {
                (true, true) => write!(f, "{} to {}", self.least, self.most),
                (true, false) => write!(f, "at least {} and below {}", self.least, self.most),
                (false, true) => write!(f, "above {} and at most {}", self.least, self.most),
                (false, false) => write!(f, "above {} and below {}", self.least, self.most),
            };
        }
        let open = if self.with_least { '[' } else { '(' };
        let close = if self.with_most { ']' } else { ')' };
        write!(f, "{open}{}, {}{close}", self.least, self.most)
    }
}

/// The type and range of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Domain {
    /// An integer from `least` to `most`. The largest `u32` is written for "no limit", and a negative one is 0.
    Count {
        /// The least value that is written.
        least: i64,
        /// The largest value.
        most: u32,
    },
    /// One of these integers.
    OneOf(&'static [u32]),
    /// A number of tokens, or -1 for all.
    Window,
    /// A number of 32 bits.
    Number(Interval),
    /// An integer of 64 bits, not negative.
    Seed,
    /// True or false.
    Flag,
    /// Texts, none of them empty.
    Texts {
        /// The maximum number of texts.
        count: usize,
        /// The maximum of bytes of each.
        bytes: usize,
    },
    /// Sequences of token ids; on most wires a list of single ids.
    Tokens,
    /// Names of [`SamplerStep`]s, each at most once.
    Samplers,
    /// LoRA adapters by name or number, each at most once, with their scales.
    Lora,
    /// Token ids, and texts, with a bias each.
    Biases {
        /// The maximum number of entries.
        count: usize,
        /// The range of each bias.
        each: Interval,
    },
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count { least, most } if *most == u32::MAX => write!(f, "at least {least}"),
            Self::Count { least, most } => write!(f, "in [{least}, {most}]"),
            Self::OneOf(values) => {
                let values: Vec<_> = values.iter().map(u32::to_string).collect();
                f.write_str(&values.join(" or "))
            }
            Self::Window => write!(f, "a number of tokens in [-1, {}]", i32::MAX),
            Self::Number(interval) => write!(f, "in {interval}"),
            Self::Seed => f.write_str("an integer of 64 bits, not negative"),
            Self::Flag => f.write_str("true or false"),
            Self::Texts { count, bytes } => {
                write!(f, "at most {count} strings of at most {bytes} bytes")
            }
            Self::Tokens => f.write_str("a list of token ids"),
            Self::Samplers => {
                let names = SamplerStep::ALL.map(SamplerStep::name).join(", ");
                write!(f, "a list of these names, each at most once: {names}")
            }
            Self::Lora => write!(
                f,
                "a name of 1 to {LORA_NAME_BYTES_MAX} bytes, or a list of at most {LORA_USES_MAX} names and objects \
                 with `name` or `id` and a `scale` in {LORA_SCALES}, each adapter at most once"
            ),
            Self::Biases { count, each } => {
                f.write_str("an object, or a list of pairs, of ")?;
                if *count != usize::MAX {
                    write!(f, "at most {count} ")?;
                }
                write!(
                    f,
                    "token ids or texts of at most {BIAS_TEXT_BYTES_MAX} bytes, with false or numbers in {each}"
                )
            }
        }
    }
}

/// Whether a value that was set in this process, of whichever origin, is in its range.
pub(super) fn holds(domain: &Domain, field: ParamField<'_>, vocabulary: u32) -> bool {
    match (domain, field) {
        (Domain::Count { least, most }, ParamField::Count(Some(value))) => {
            i64::from(*value) >= *least && *value <= *most
        }
        (Domain::OneOf(values), ParamField::Count(Some(value))) => values.contains(value),
        (Domain::Window, ParamField::Window(Some(value))) => *value >= -1,
        (Domain::Number(range), ParamField::Number(Some(value))) => range.contains(*value),
        (
            Domain::Texts { count, bytes },
            ParamField::Texts(texts) | ParamField::OptionalTexts(Some(texts)),
        ) => {
            let fits = |text: &String| (1..=*bytes).contains(&text.len());
            texts.len() <= *count && texts.iter().all(fits)
        }
        (Domain::Lora, ParamField::Lora(Some(uses))) => lora::are_sound(uses),
        (Domain::Tokens, ParamField::Tokens(sequences)) => {
            let sound = |stop: &Vec<Token>| {
                (1..=STOP_SEQUENCE_TOKENS_MAX).contains(&stop.len())
                    && stop.iter().all(|&token| token < vocabulary)
            };
            sequences.len() <= STOP_SEQUENCES_MAX && sequences.iter().all(sound)
        }
        // No early exit, so that the compiler can vectorise the loop: a mask has an entry for nearly every token.
        (Domain::Biases { count, each }, ParamField::Biases { tokens, texts }) => {
            // The lower bound does not apply: `bias` has turned what forbids a token into minus infinity. NaN fails
            // `<=`.
            let most = each.most;
            let sound = tokens.iter().fold(true, |sound, &(token, bias)| {
                sound & (token < vocabulary) & (bias <= most)
            });
            let fits = |(text, bias): &(String, f32)| {
                (1..=BIAS_TEXT_BYTES_MAX).contains(&text.len()) && *bias <= most
            };
            let few = tokens.len().saturating_add(texts.len()) <= *count;
            sound && few && texts.len() <= BIAS_TEXTS_MAX && texts.iter().all(fits)
        }
        // A value that is not set, a seed, a flag or an order: no range.
        _ => true,
    }
}
