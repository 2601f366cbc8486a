//! Parses the frames of a server, as far as a load generator needs it.

/// One item of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The id of its stream.
    pub stream: usize,
    /// Whether it is the last of its stream.
    pub last: bool,
}

/// The items of a message, in order.
pub fn items(text: &str) -> impl Iterator<Item = Seen> {
    text.split("{\"token\"").skip(1).filter_map(|item| {
        let digits = item.split_once("\"stream_id\":")?.1;
        Some(Seen {
            stream: digits.split(',').next()?.parse().ok()?,
            last: !item.contains("\"finish_reason\":null"),
        })
    })
}

/// A GENERATE over two tokens.
#[must_use]
pub fn generate(stream: usize, max_tokens: u32) -> String {
    format!(
        "GENERATE {{\"model\":\"load\",\"prompt\":[256,97],\"max_tokens\":{max_tokens},\"stream_id\":{stream}}}"
    )
}
