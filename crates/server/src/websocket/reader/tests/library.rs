//! Whatever frames come, the reader hears what the library would have heard.

use std::io::{self, Read, Write};

use proptest::collection::vec;
use proptest::prelude::*;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message, WebSocket};

use super::*;

const BYTES_MAX: usize = 300;

/// A stream that has these bytes and then ends; what is written to it is lost.
struct Recorded<'a>(&'a [u8]);

impl Read for Recorded<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        self.0.read(room)
    }
}

impl Write for Recorded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the library hears, and how that ended; `None` where the bytes did.
fn library(bytes: &[u8]) -> (Vec<Said>, Option<Lost>) {
    let config = WebSocketConfig::default()
        .max_message_size(Some(BYTES_MAX))
        .max_frame_size(Some(BYTES_MAX));
    let mut socket = WebSocket::from_raw_socket(Recorded(bytes), Role::Server, Some(config));
    let mut said = Vec::new();
    loop {
        let lost = match socket.read() {
            Ok(Message::Text(text)) => {
                said.push(Said::Text(text.into()));
                continue;
            }
            Ok(Message::Binary(bytes)) => {
                said.push(Said::Binary(bytes));
                continue;
            }
            Ok(Message::Ping(data)) => {
                said.push(Said::Ping(data));
                continue;
            }
            Ok(Message::Pong(_)) => {
                said.push(Said::Pong);
                continue;
            }
            Ok(Message::Close(frame)) => {
                said.push(Said::Close(frame.map(|frame| frame.code)));
                return (said, None);
            }
            Ok(Message::Frame(_)) => unreachable!("only writers see frames"),
            Err(Error::Capacity(_)) => Lost::TooLarge,
            Err(Error::Utf8(_)) => Lost::NotText,
            Err(Error::Protocol(
                tokio_tungstenite::tungstenite::error::ProtocolError::ResetWithoutClosingHandshake,
            )) => return (said, None),
            Err(_) => Lost::Broken,
        };
        return (said, Some(lost));
    }
}

/// Mostly what clients send: a first byte with its opcode, and a payload.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let head = prop_oneof![
        20 => prop::sample::select(vec![0x81, 0x82, 0x01, 0x02, 0x00, 0x80, 0x89, 0x8a]),
        2 => Just(0x88),
        1 => any::<u8>(),
    ];
    let text = prop::sample::select(vec!["", "a", "grüße", "漢字かな", "\u{1f333}"]);
    let payload = prop_oneof![
        10 => text.prop_map(|text| text.as_bytes().to_vec()),
        3 => vec(any::<u8>(), 0..8),
        1 => vec(Just(b'x'), 120..140),
        1 => Just(vec![3, 0xe8]),
    ];
    let one = (head, payload, any::<[u8; 4]>(), 0..100_u8);
    vec(one, 1..12).prop_map(|frames| {
        let mut bytes = Vec::new();
        for (head, payload, mask, chance) in frames {
            let at = bytes.len();
            bytes.extend(masked(head, &payload, mask));
            // Now and then a length that nothing follows, or no mask.
            if chance == 0 {
                bytes[at + 1] ^= 0x80;
            } else if chance == 1 {
                bytes.truncate(at + 3);
            }
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn ev_705_a_reader_hears_what_the_library_hears(bytes in frames(), most in 1..40_usize) {
        let (heard, lost, _) = hear(&bytes, most, BYTES_MAX);
        let until = heard.iter().position(|said| matches!(said, Said::Close(_)));
        let heard = &heard[..until.map_or(heard.len(), |at| at + 1)];
        let lost = if until.is_some() { None } else { lost };
        let mut bytes = bytes;
        if lost == Some(Lost::Broken) {
            // The library looks at a frame when all of it is there, the reader at its head.
            bytes.extend([0; BYTES_MAX]);
        }
        let (mut expected, mut expected_lost) = library(&bytes);
        // For a code that no client may send the library makes one up, which is the one that we close with.
        if lost == Some(Lost::Broken) && expected.last() == Some(&Said::Close(Some(CloseCode::Protocol))) {
            expected.pop();
            expected_lost = lost;
        }
        // What is wrong in two ways is called by either.
        if (lost, expected_lost) == (Some(Lost::Broken), Some(Lost::TooLarge)) {
            expected_lost = lost;
        }
        if expected_lost == Some(Lost::NotText) {
            // The library looks at every piece of a text, the reader at the whole: it says so later, or never if the rest
            // is missing.
            prop_assert_eq!(heard.get(..expected.len()), Some(&expected[..]));
            let only_controls = heard[expected.len()..]
                .iter()
                .all(|said| matches!(said, Said::Ping(_) | Said::Pong | Said::Close(_)));
            prop_assert!(only_controls, "{heard:?}");
        } else {
            prop_assert_eq!((heard, lost), (&expected[..], expected_lost));
        }
    }
}
