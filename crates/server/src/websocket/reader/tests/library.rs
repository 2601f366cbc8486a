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
fn library(bytes: &[u8]) -> (Vec<ReadFrame>, Option<SocketLoss>) {
    let config = WebSocketConfig::default()
        .max_message_size(Some(BYTES_MAX))
        .max_frame_size(Some(BYTES_MAX));
    let mut socket = WebSocket::from_raw_socket(Recorded(bytes), Role::Server, Some(config));
    let mut reply = Vec::new();
    loop {
        let lost = match socket.read() {
            Ok(Message::Text(text)) => {
                reply.push(ReadFrame::Text(text.into()));
                continue;
            }
            Ok(Message::Binary(bytes)) => {
                reply.push(ReadFrame::Binary(bytes));
                continue;
            }
            Ok(Message::Ping(data)) => {
                reply.push(ReadFrame::Ping(data));
                continue;
            }
            Ok(Message::Pong(_)) => {
                reply.push(ReadFrame::Pong);
                continue;
            }
            Ok(Message::Close(frame)) => {
                reply.push(ReadFrame::Close(frame.map(|frame| frame.code)));
                return (reply, None);
            }
            Ok(Message::Frame(_)) => unreachable!("only writers see frames"),
            Err(Error::Capacity(_)) => SocketLoss::TooLarge,
            Err(Error::Utf8(_)) => SocketLoss::NotText,
            Err(Error::Protocol(
                tokio_tungstenite::tungstenite::error::ProtocolError::ResetWithoutClosingHandshake,
            )) => return (reply, None),
            Err(_) => SocketLoss::Broken,
        };
        return (reply, Some(lost));
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
    fn ev_705_the_reader_agrees_with_the_library(bytes in frames(), most in 1..40_usize) {
        let (received, lost, _) = receive(&bytes, most, BYTES_MAX);
        let until = received.iter().position(|reply| matches!(reply, ReadFrame::Close(_)));
        let received = &received[..until.map_or(received.len(), |at| at + 1)];
        let lost = if until.is_some() { None } else { lost };
        let mut bytes = bytes;
        if lost == Some(SocketLoss::Broken) {
            // The library looks at a frame when all of it is there, the reader at its head.
            bytes.extend([0; BYTES_MAX]);
        }
        let (mut expected, mut expected_lost) = library(&bytes);
        // For a code that no client may send the library makes one up, which is the one that we close with.
        if lost == Some(SocketLoss::Broken) && expected.last() == Some(&ReadFrame::Close(Some(CloseCode::Protocol))) {
            expected.pop();
            expected_lost = lost;
        }
        // What is wrong in two ways is called by either.
        if (lost, expected_lost) == (Some(SocketLoss::Broken), Some(SocketLoss::TooLarge)) {
            expected_lost = lost;
        }
        if expected_lost == Some(SocketLoss::NotText) {
            // The library looks at every piece of a text, the reader at the whole: it says so later, or never if the rest
            // is missing.
            prop_assert_eq!(received.get(..expected.len()), Some(&expected[..]));
            let only_controls = received[expected.len()..]
                .iter()
                .all(|reply| matches!(reply, ReadFrame::Ping(_) | ReadFrame::Pong | ReadFrame::Close(_)));
            prop_assert!(only_controls, "{received:?}");
        } else {
            prop_assert_eq!((received, lost), (&expected[..], expected_lost));
        }
    }
}
