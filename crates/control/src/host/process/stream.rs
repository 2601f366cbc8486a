//! [`MessageInbox`] and [`MessageOutbox`]: messages, some with descriptors, over a stream socket.
//!
//! A message is `length 4 (little-endian, of what follows) | kind 1 | bytes`. The descriptors of a message travel with
//! its first byte, so they are there when the message is.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
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
    bytes: Vec<u8>,
    sent: usize,
    /// The places of the messages that have descriptors.
    descriptors: VecDeque<(usize, Vec<OwnedFd>)>,
}

impl MessageOutbox {
    pub(super) fn push(&mut self, message: &[u8]) {
        self.bytes.extend_from_slice(message);
    }

    pub(super) fn push_with(&mut self, message: &[u8], descriptors: Vec<OwnedFd>) {
        self.descriptors.push_back((self.bytes.len(), descriptors));
        self.push(message);
    }

    /// Bytes that are not sent yet.
    pub(super) fn waiting(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Sends what the socket takes. Returns whether that was all.
    ///
    /// # Errors
    /// The other process is gone, or the system takes no more descriptors.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while self.sent < self.bytes.len() {
            match self.send_some(socket) {
                Ok(()) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    self.forget_sent();
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.forget_sent();
        Ok(true)
    }

    fn forget_sent(&mut self) {
        self.bytes.drain(..self.sent);
        self.bytes.shrink_to(ROOM_BYTES);
        for (place, _) in &mut self.descriptors {
            *place -= self.sent;
        }
        self.sent = 0;
    }

    fn send_some(&mut self, socket: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let here = match self.descriptors.front() {
            Some((place, descriptors)) if *place == self.sent => &descriptors[..],
            _ => &[],
        };
        let next = self.descriptors.get(usize::from(!here.is_empty()));
        let end = next.map_or(self.bytes.len(), |(place, _)| *place);
        let borrowed: Vec<_> = here.iter().map(|descriptor| descriptor.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        let parts = [IoSlice::new(&self.bytes[self.sent..end])];
        self.sent += sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
        if !borrowed.is_empty() {
            self.descriptors.pop_front();
        }
        Ok(())
    }
}

/// Descriptors of one message.
const DESCRIPTORS: usize = 2;
/// Room that is kept for later messages.
const ROOM_BYTES: usize = 64 << 10;
/// What is received at once.
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
        outbox.push(&message(1, 3));
        let (one, other) = pair().unwrap();
        outbox.push_with(&message(2, 1 << 20), vec![one]);
        outbox.push_with(&message(3, 0), vec![other]);
        outbox.push(&message(4, 9));
        let mut inbox = MessageInbox::default();
        let mut kinds = Vec::new();
        for piece in (1..).map(|step| step * 7_919 % 5_000 + 1) {
            let sent = outbox.send(ours.as_fd()).unwrap();
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
    fn a_message_that_is_too_long_is_refused_before_it_arrives() {
        let (ours, theirs) = pair().unwrap();
        let mut outbox = MessageOutbox::default();
        outbox.push(&101_u32.to_le_bytes());
        outbox.send(ours.as_fd()).unwrap();
        let mut inbox = MessageInbox::default();
        inbox.receive(theirs.as_fd(), &mut [0; 16]).unwrap();
        assert!(inbox.next(100).is_err());
        assert!(inbox.next(101).unwrap().is_none());
    }
}
