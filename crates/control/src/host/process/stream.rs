//! [`MessageInbox`] and [`MessageOutbox`]: messages, some with descriptors, over a stream socket.
//!
//! A message is `length 4 (little-endian, of what follows) | kind 1 | bytes`. The descriptors of a message travel with
//! its first byte, so they are there when the message is.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};

/// Two connected sockets: of the runtime, whose calls never wait, and of the other process.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

/// Messages that have arrived, and a part of the next one.
#[derive(Debug, Default)]
pub(super) struct MessageInbox {
    bytes: Vec<u8>,
    /// Where the first message begins that was not taken.
    start: usize,
    /// At most [`DESCRIPTORS`] are kept: no message has more.
    descriptors: VecDeque<OwnedFd>,
}

/// A message says that it is longer than any message can be.
#[derive(Debug)]
pub(super) struct TooLong;

impl MessageInbox {
    /// Receives what is there, at most `buffer` bytes. Returns how many; none: the other process has closed its end.
    ///
    /// # Errors
    /// Nothing is there, or the socket is broken.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut parts = [IoSliceMut::new(buffer)];
            match recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                received => break received?.bytes,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                for descriptor in descriptors {
                    if self.descriptors.len() < DESCRIPTORS {
                        self.descriptors.push_back(descriptor);
                    }
                }
            }
        }
        self.bytes.extend_from_slice(&buffer[..received]);
        Ok(received)
    }

    /// The next message, without its length, if it is complete.
    ///
    /// # Errors
    /// It has more than `limit` bytes.
    pub(super) fn next(&mut self, limit: usize) -> Result<Option<Vec<u8>>, TooLong> {
        let rest = &self.bytes[self.start..];
        let Some((length, rest)) = rest.split_first_chunk() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > limit {
            return Err(TooLong);
        }
        let Some(message) = rest.get(..length) else {
            return Ok(None);
        };
        let message = message.to_vec();
        self.start += 4 + length;
        if self.start == self.bytes.len() {
            // A large message must not be kept as room for small ones.
            self.bytes.clear();
            self.bytes.shrink_to(ROOM_BYTES);
            self.start = 0;
        } else if self.start >= ROOM_BYTES {
            // A part of a message may follow for ever.
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        Ok(Some(message))
    }

    /// The next descriptor of the messages taken so far.
    pub(super) fn descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptors.pop_front()
    }
}

/// Messages that are to be sent.
#[derive(Debug, Default)]
pub(super) struct MessageOutbox {
    pieces: VecDeque<OutboxPiece>,
    /// Bytes of the first piece that are sent.
    sent: usize,
}

/// One or more messages, or the end of one.
#[derive(Debug)]
struct OutboxPiece {
    bytes: PieceBytes,
    /// They travel with its first byte.
    descriptors: Vec<OwnedFd>,
}

#[derive(Debug)]
enum PieceBytes {
    Own(Vec<u8>),
    /// A value that others have too.
    Shared(Arc<Vec<u8>>),
}

impl PieceBytes {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(bytes) => bytes,
        }
    }
}

impl MessageOutbox {
    pub(super) fn push(&mut self, message: Vec<u8>) {
        // Small messages are sent together.
        if let Some(OutboxPiece {
            bytes: PieceBytes::Own(bytes),
            ..
        }) = self.pieces.back_mut()
            && bytes.len() + message.len() <= ROOM_BYTES
        {
            return bytes.extend_from_slice(&message);
        }
        self.push_with(message, Vec::new());
    }

    pub(super) fn push_with(&mut self, message: Vec<u8>, descriptors: Vec<OwnedFd>) {
        let bytes = PieceBytes::Own(message);
        self.pieces.push_back(OutboxPiece { bytes, descriptors });
    }

    /// Sends the end of a message without a copy of it.
    pub(super) fn push_shared(&mut self, end: Arc<Vec<u8>>) {
        let (bytes, descriptors) = (PieceBytes::Shared(end), Vec::new());
        self.pieces.push_back(OutboxPiece { bytes, descriptors });
    }

    /// Bytes that are not sent yet.
    pub(super) fn waiting(&self) -> usize {
        let bytes = self.pieces.iter().map(|it| it.bytes.as_slice().len());
        bytes.sum::<usize>() - self.sent
    }

    /// Sends what the socket takes, and hardly more than `most` bytes. Returns whether that was all.
    ///
    /// # Errors
    /// The other process is gone, or the system takes no more descriptors.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>, most: usize) -> io::Result<bool> {
        let mut left = most;
        while let Some(piece) = self.pieces.front_mut() {
            let bytes = piece.bytes.as_slice().get(self.sent..).unwrap_or_default();
            if bytes.is_empty() {
                self.pieces.pop_front();
                self.sent = 0;
                continue;
            }
            if left == 0 {
                return Ok(false);
            }
            let bytes = &bytes[..bytes.len().min(left)];
            match send_some(socket, bytes, &piece.descriptors) {
                Ok(sent) => {
                    piece.descriptors.clear();
                    self.sent += sent;
                    left -= sent;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

fn send_some(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[OwnedFd],
) -> rustix::io::Result<usize> {
    if descriptors.is_empty() {
        return send(socket, bytes, SendFlags::NOSIGNAL);
    }
    let borrowed: Vec<_> = descriptors.iter().map(|it| it.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&borrowed));
    sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
}

/// Descriptors of one message.
const DESCRIPTORS: usize = 2;
/// Room that is kept for later messages.
const ROOM_BYTES: usize = 64 << 10;
/// What is received at once, or sent to one process before others have their turn.
pub(super) const RECEIVED_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, bytes: usize) -> Vec<u8> {
        let mut message = super::super::bytes::ByteWriter::of_kind(kind);
        message.bytes(&vec![kind; bytes]);
        message.finish()
    }

    #[test]
    fn messages_and_their_descriptors_arrive_in_order_whatever_the_pieces() {
        let (ours, theirs) = pair().unwrap();
        let mut outbox = MessageOutbox::default();
        outbox.push(message(1, 3));
        let (one, other) = pair().unwrap();
        outbox.push_with(message(2, 1 << 20), vec![one]);
        outbox.push_with(message(3, 0), vec![other]);
        outbox.push(message(4, 9));
        let mut inbox = MessageInbox::default();
        let mut kinds = Vec::new();
        for piece in (1..).map(|step| step * 7_919 % 5_000 + 1) {
            let sent = outbox.send(ours.as_fd(), 3 * piece).unwrap();
            let mut buffer = vec![0; piece];
            inbox.receive(theirs.as_fd(), &mut buffer).unwrap();
            while let Some(message) = inbox.next(2 << 20).unwrap() {
                if matches!(message[0], 2 | 3) {
                    assert!(inbox.descriptor().is_some());
                }
                kinds.push(message[0]);
            }
            if sent && kinds.len() == 4 {
                break;
            }
        }
        assert_eq!(kinds, [1, 2, 3, 4]);
        assert!(inbox.descriptor().is_none());
        assert_eq!(outbox.waiting(), 0);
    }

    #[test]
    fn one_process_is_sent_so_much_before_others_have_their_turn() {
        let (ours, theirs) = pair().unwrap();
        let mut outbox = MessageOutbox::default();
        outbox.push(vec![1; 10]);
        let value = Arc::new(vec![2; 1 << 20]);
        outbox.push_shared(Arc::clone(&value));
        assert_eq!(Arc::strong_count(&value), 2, "not copied");
        let mut inbox = MessageInbox::default();
        for turn in 1..=3 {
            assert!(!outbox.send(ours.as_fd(), RECEIVED_BYTES).unwrap());
            let sent = (1 << 20) + 10 - outbox.waiting();
            assert_eq!(sent, turn * RECEIVED_BYTES);
            inbox
                .receive(theirs.as_fd(), &mut vec![0; RECEIVED_BYTES])
                .unwrap();
        }
        assert_eq!(inbox.bytes[..10], [1; 10]);
        assert_eq!(inbox.bytes[10..], value[..3 * RECEIVED_BYTES - 10]);
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_before_it_arrives() {
        let (ours, theirs) = pair().unwrap();
        let mut outbox = MessageOutbox::default();
        outbox.push(101_u32.to_le_bytes().to_vec());
        outbox.send(ours.as_fd(), usize::MAX).unwrap();
        let mut inbox = MessageInbox::default();
        inbox.receive(theirs.as_fd(), &mut [0; 16]).unwrap();
        assert!(inbox.next(100).is_err());
        assert!(inbox.next(101).unwrap().is_none());
    }
}
