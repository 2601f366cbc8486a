//! LMTP over WebSockets (LM-102 to LM-109).
//!
//! Owns: who is let in, which first message is LMTP's, and the wire of frames. Refuses to know: the upgrade (`reception`),
//! frames (`websocket`), messages.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use bytestring::ByteString;
use http::{HeaderMap, Request};
use sapwood_proto::lmtp::{Carrier, Unreadable};

use super::conversation::{Conversation, End, Gone, Heard, Wire};
use super::house::{Guest, House};
use crate::caller::Caller;
use crate::metrics;
use crate::places::Place;
use crate::reception::{Invited, Protocol};
use crate::refusal::Refusal;
use crate::websocket::{self, Lost, Socket};

/// LMTP, as the reception knows it.
pub(super) struct Sockets(pub(super) Arc<House>);

impl Protocol for Sockets {
    fn face(&self) -> metrics::Face {
        metrics::Face::Lmtp
    }

    /// LM-104
    fn subprotocol(&self, offered: &[&str]) -> Option<&'static str> {
        let mut names = [VERSION_2, "lmtp"].into_iter();
        names.find(|name| offered.contains(name))
    }

    /// LM-103: a word and one space.
    fn is_begun_by(&self, first: &websocket::Heard) -> bool {
        let websocket::Heard::Text(text) = first else {
            return false;
        };
        let word = text.iter().take_while(|byte| is_word(**byte)).count();
        word > 0 && text.get(word) == Some(&b' ')
    }

    fn message_bytes_max(&self) -> usize {
        self.0.config.limits.max_message_in
    }

    fn invite(
        &self,
        request: &Request<Body>,
        chosen: Option<&'static str>,
    ) -> Result<Invited, Refusal> {
        let negotiated = chosen == Some(VERSION_2);
        let house = Arc::clone(&self.0);
        let caller = Caller::of(request.extensions())?.clone();
        let place = house.admit(&caller.identity)?;
        let guest = Guest {
            carrier: Carrier::Frames,
            negotiated,
            bare: false,
            visitor: Some(caller.identity.clone()),
            caller: Some(caller),
        };
        Ok(Invited {
            headers: HeaderMap::new(),
            decided: false,
            serve: Box::new(move |socket, first| {
                let wire = Frames {
                    socket,
                    first,
                    max: house.config.limits.max_message_in,
                };
                let conversation = Conversation::new(&house, guest);
                Box::pin(serve(conversation, wire, place))
            }),
        })
    }
}

const fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Talks to the end, and closes.
async fn serve(mut conversation: Conversation, mut wire: Frames, place: Place) {
    let end = conversation.run(&mut wire).await;
    if end == End::Lost {
        return conversation.wait();
    }
    drop(conversation);
    if let End::Close(close) = end {
        let reason = close.message.to_owned();
        Box::pin(wire.socket.close(close.code, reason, GOODBYE)).await;
    }
    drop(place);
}

/// The wire of frames.
struct Frames {
    socket: Box<Socket>,
    /// Heard before anybody knew whose it was.
    first: Option<websocket::Heard>,
    max: usize,
}

impl Wire for Frames {
    fn poll_heard(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        let heard = match self.first.take() {
            Some(heard) => Ok(heard),
            None => ready!(self.socket.poll_heard(cx)),
        };
        Poll::Ready(match heard {
            // Where another protocol takes more, a message of ours is still limited.
            Ok(websocket::Heard::Text(text)) if text.len() > self.max => {
                Heard::Unreadable(Unreadable::TooLarge)
            }
            Ok(websocket::Heard::Text(text)) => match ByteString::try_from(text) {
                Ok(text) => Heard::Text(text),
                Err(_) => Heard::Unreadable(Unreadable::BadText),
            },
            Ok(websocket::Heard::Binary(_)) => Heard::Ignored,
            Err(Lost::Left) => Heard::Left,
            Err(Lost::Gone) => Heard::Gone,
            Err(Lost::TooLarge) => Heard::Unreadable(Unreadable::TooLarge),
            Err(Lost::NotText) => Heard::Unreadable(Unreadable::BadText),
            Err(Lost::Broken) => Heard::Broken,
            Err(Lost::Overloaded) => Heard::Overloaded,
        })
    }

    fn poll_gone(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()> {
        self.socket.poll_alive(deaf, cx)
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.socket.poll_room(cx).map_err(|_| Gone)
    }

    fn send(&mut self, message: Bytes) -> Result<(), Gone> {
        self.socket.send(message, true).map_err(|_| Gone)
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Gone>> {
        self.socket.poll_sent(cx).map_err(|_| Gone)
    }
}

/// The subprotocol of all that version 2 has (LM-905).
const VERSION_2: &str = "lmtp.v2";
/// How long the closing handshake may take (LM-505).
const GOODBYE: Duration = Duration::from_secs(2);
