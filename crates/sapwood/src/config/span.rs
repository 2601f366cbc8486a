//! Durations as text: `500ms`, `30s`, `5m`, `2h`.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// A length of time in whole milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Millis(Duration);

impl Millis {
    pub(crate) const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    pub(crate) const fn get(self) -> Duration {
        self.0
    }

    fn parse(text: &str) -> Option<Self> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let factor = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        let milliseconds = number.parse::<u64>().ok()?.checked_mul(factor)?;
        Some(Self(Duration::from_millis(milliseconds)))
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let milliseconds = self.0.as_millis();
        for (factor, unit) in [(3_600_000, "h"), (60_000, "m"), (1_000, "s")] {
            if milliseconds > 0 && milliseconds.is_multiple_of(factor) {
                return write!(f, "{}{unit}", milliseconds / factor);
            }
        }
        write!(f, "{milliseconds}ms")
    }
}

impl Serialize for Millis {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Millis {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        Self::parse(&text).ok_or_else(|| {
            D::Error::custom(format!(
                "`{text}` is no length of time: write 500ms, 30s, 5m or 2h"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_as_people_write_them() {
        for (text, milliseconds, shown) in [
            ("500ms", 500, "500ms"),
            ("30s", 30_000, "30s"),
            ("90s", 90_000, "90s"),
            ("5m", 300_000, "5m"),
            ("2h", 7_200_000, "2h"),
            ("0s", 0, "0ms"),
        ] {
            let span = Millis::parse(text).unwrap();
            assert_eq!(
                (span.get(), span.to_string()),
                (Duration::from_millis(milliseconds), shown.into())
            );
        }
        for text in [
            "",
            "5",
            "s",
            "-5s",
            "1.5s",
            "5 s",
            "5d",
            "99999999999999999999h",
        ] {
            assert_eq!(Millis::parse(text), None, "{text}");
        }
    }
}
