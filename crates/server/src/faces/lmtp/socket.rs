//! LMTP over WebSockets (LM-102 to LM-109).

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use bytestring::ByteString;
use http::{HeaderMap, Request};
use sapwood_proto::lmtp::{MessageFraming, Unreadable};

use super::context::{LmtpClientInfo, LmtpContext};
use super::driver::{ClientClosed, ConnectionDriver, ConversationEnd, LmtpInput, LmtpTransport};
use crate::auth::caller::Caller;
use crate::auth::quotas::Permit;
use crate::faces::socket_dispatch::{AllowedProtocols, SocketProtocol};
use crate::http::rejection::Rejection;
use crate::ops::metrics;
use crate::websocket::{self, SocketLoss, WebSocket};

/// LMTP, as the socket dispatch knows it.
pub(super) struct LmtpSockets(pub(super) Arc<LmtpContext>);

impl SocketProtocol for LmtpSockets {
    fn face(&self) -> metrics::FaceLabel {
        metrics::FaceLabel::Lmtp
    }

    /// The newest version that the client offers (LM-104).
    fn subprotocol(&self, offered: &[&str]) -> Option<&'static str> {
        let mut names = [VERSION_2, "lmtp"].into_iter();
        names.find(|name| offered.contains(name))
    }

    /// LM-103: a word and one space.
    fn is_begun_by(&self, first: &websocket::SocketMessage) -> bool {
        let websocket::SocketMessage::Text(text) = first else {
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
    ) -> Result<AllowedProtocols, Rejection> {
        // Without the subprotocol a client may still negotiate by a message (LM-905).
        let negotiated = chosen == Some(VERSION_2);
        let context = Arc::clone(&self.0);
        let caller = Caller::of(request.extensions())?.clone();
        let position = context.admit(&caller.identity)?;
        let connection = LmtpClientInfo {
            carrier: MessageFraming::Frames,
            negotiated,
            bare: false,
            identity: Some(caller.identity.clone()),
            caller: Some(caller),
        };
        Ok(AllowedProtocols {
            headers: HeaderMap::new(),
            // Nothing in an upgrade request without a subprotocol distinguishes an LMTP client.
            decided: false,
            serve: Box::new(move |socket, first| {
                let wire = FrameTransport {
                    socket,
                    first,
                    max: context.config.limits.max_message_in,
                };
                let conversation = ConnectionDriver::new(&context, connection);
                Box::pin(serve(conversation, wire, position))
            }),
        })
    }
}

const fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Serves the connection to its end, and closes it.
async fn serve(mut conversation: ConnectionDriver, mut wire: FrameTransport, position: Permit) {
    let end = conversation.run(&mut wire).await;
    if end == ConversationEnd::Lost {
        // The place is freed although the session goes on: it counts connections, and the registry counts sessions.
        return conversation.wait();
    }
    // Before the closing handshake: what still runs must not wait for a client that answers slowly.
    drop(conversation);
    if let ConversationEnd::Close(close) = end {
        let reason = close.message.to_owned();
        Box::pin(wire.socket.close(close.code, reason, GOODBYE)).await;
    }
    drop(position);
}

/// The transport of WebSocket messages.
struct FrameTransport {
    socket: Box<WebSocket>,
    /// Received before the protocol was known.
    first: Option<websocket::SocketMessage>,
    max: usize,
}

impl LmtpTransport for FrameTransport {
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<LmtpInput> {
        let received = match self.first.take() {
            Some(received) => Ok(received),
            None => ready!(self.socket.poll_receive(cx)),
        };
        Poll::Ready(match received {
            // On `/` the socket takes the largest message of any face, so the limit of this one is checked here.
            Ok(websocket::SocketMessage::Text(text)) if text.len() > self.max => {
                LmtpInput::Unreadable(Unreadable::TooLarge)
            }
            Ok(websocket::SocketMessage::Text(text)) => match ByteString::try_from(text) {
                Ok(text) => LmtpInput::Text(text),
                Err(_) => LmtpInput::Unreadable(Unreadable::BadText),
            },
            // LM-106; the reference server passes them over as well.
            Ok(websocket::SocketMessage::Binary(_)) => LmtpInput::Ignored,
            Err(SocketLoss::Left) => LmtpInput::Left,
            Err(SocketLoss::Closed) => LmtpInput::Closed,
            Err(SocketLoss::TooLarge) => LmtpInput::Unreadable(Unreadable::TooLarge),
            Err(SocketLoss::NotText) => LmtpInput::Unreadable(Unreadable::BadText),
            Err(SocketLoss::Broken) => LmtpInput::Broken,
            Err(SocketLoss::Overloaded) => LmtpInput::Overloaded,
        })
    }

    fn poll_closed(&mut self, deaf: bool, cx: &mut Context<'_>) -> Poll<()> {
        self.socket.poll_alive(deaf, cx)
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        self.socket.poll_room(cx).map_err(|_| ClientClosed)
    }

    fn send(&mut self, message: Bytes) -> Result<(), ClientClosed> {
        self.socket.send(message, true).map_err(|_| ClientClosed)
    }

    fn poll_sent(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        self.socket.poll_sent(cx).map_err(|_| ClientClosed)
    }
}

/// The subprotocol that turns on all features of version 2 (LM-905).
const VERSION_2: &str = "lmtp.v2";
/// How long the closing handshake may take (LM-505).
const GOODBYE: Duration = Duration::from_secs(2);
