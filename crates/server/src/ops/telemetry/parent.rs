//! The parent span in a `traceparent` header (W3C Trace Context).

use http::HeaderMap;

/// The span of the caller, of which those of the request are children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    pub(crate) trace: [u8; 16],
    pub(crate) span: [u8; 8],
    /// The caller records its trace; otherwise ours is not recorded either.
    pub(crate) sampled: bool,
}

impl Parent {
    /// The parent that the header names. `None` if it is absent or malformed: the request then begins a trace of its own.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        // Exactly one, as the specification asks: of two nobody knows which is the parent.
        let mut given = headers.get_all("traceparent").iter();
        match (given.next(), given.next()) {
            (Some(value), None) => Self::read(value.to_str().ok()?),
            _ => None,
        }
    }

    fn read(text: &str) -> Option<Self> {
        let mut fields = text.trim().split('-');
        let [version] = hex(fields.next()?)?;
        let (trace, span) = (hex(fields.next()?)?, hex(fields.next()?)?);
        let [flags] = hex(fields.next()?)?;
        // Version 0 has exactly four fields; later versions may have more, and 255 is invalid.
        let more = fields.next().is_some();
        let legal = version != 0xff && !(version == 0 && more);
        (legal && trace != [0; 16] && span != [0; 8]).then_some(Self {
            trace,
            span,
            sampled: flags & 1 == 1,
        })
    }
}

/// Exactly `N` bytes of lower-case hex digits.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    // Not `char::to_digit`: the specification forbids capitals.
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let text = text.as_bytes();
    if text.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oa_803_a_traceparent_is_read_or_left_alone() {
        const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        const SPAN: &str = "00f067aa0ba902b7";
        let of = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", text.parse().unwrap());
            Parent::of(&headers)
        };
        for (text, sampled) in [
            (format!("00-{TRACE}-{SPAN}-01"), true),
            (format!("00-{TRACE}-{SPAN}-00"), false),
            (format!("00-{TRACE}-{SPAN}-fe"), false),
            (format!("01-{TRACE}-{SPAN}-03-more"), true),
        ] {
            let parent = of(&text).unwrap();
            assert_eq!((parent.trace[0], parent.span[7]), (0x4b, 0xb7));
            assert_eq!(parent.sampled, sampled, "{text}");
        }
        for text in [
            String::new(),
            "00".into(),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}0-{SPAN}-01"),
        ] {
            assert_eq!(of(&text), None, "{text}");
        }
    }
}
