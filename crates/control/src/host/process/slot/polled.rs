//! A process as its poller sees it: what it sends, and what happens when it is late.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Instant;

use sapwood_proto::error_reason::ErrorReason;

use super::{ProcessSlot, SlotEffect, SlotInner, died, no_process};
use crate::host::failure::CallFailure;
use crate::host::process::asked::Asked;
use crate::host::process::poller::PolledProcess;

impl PolledProcess for ProcessSlot {
    /// The socket has room again.
    fn send_more(&self) {
        self.send_queued(&mut self.lock());
    }

    /// Reads what the process has sent, once. Returns whether it has ended.
    fn receive(&self, buffer: &mut [u8]) -> bool {
        let mut effects = Vec::new();
        let mut inner = self.lock();
        let inner_ref = &mut *inner;
        let received = inner_ref.inbox.receive(inner_ref.socket.as_fd(), buffer);
        let ended = match received {
            Ok(0) => true,
            Ok(_) => {
                self.take_messages(inner_ref, &mut effects);
                false
            }
            Err(error) => error.kind() != io::ErrorKind::WouldBlock,
        };
        if ended && !inner_ref.is_awaited {
            self.fail_inner(inner_ref, died(), &mut effects);
        }
        drop(inner);
        self.carry_out(effects);
        ended
    }

    /// Does what the time asks for; returns when it asks for more.
    fn end_if_late(&self, now: Instant, buffer: &mut [u8]) -> Option<Instant> {
        let mut effects = Vec::new();
        let mut inner = self.lock();
        self.end_if_late_inner(&mut inner, (now, buffer), &mut effects);
        let next = inner.look_at();
        drop(inner);
        self.carry_out(effects);
        next
    }

    /// The process has ended: its memory is free.
    fn forget(&self) {
        let mut inner = self.lock();
        let poller = self.around.processes.poller();
        poller.remove(inner.socket.as_fd());
        self.around
            .host
            .budget()
            .refund(std::mem::take(&mut inner.charged));
        inner.live = None;
        inner.member.leave();
        inner.process = None;
    }
}

impl ProcessSlot {
    /// Kills the process if its time is over, and slows it down if it is late.
    fn end_if_late_inner(
        &self,
        inner: &mut SlotInner,
        (now, buffer): (Instant, &mut [u8]),
        effects: &mut Vec<SlotEffect>,
    ) {
        let is_over = |inner: &SlotInner| inner.deadline.is_some_and(|deadline| now >= deadline);
        if is_over(inner) {
            // Its outcome may be there: it counts when it was sent, and not when somebody came to read it.
            self.take_arrived(inner, buffer, effects);
        }
        if is_over(inner) {
            let failure = match (&inner.process, inner.asked.front()) {
                (Some(_), Some(Asked::Start | Asked::Call { .. })) => {
                    CallFailure::new(ErrorReason::TIMEOUT, "timeout")
                }
                _ => no_process(&"it takes too long"),
            };
            return self.fail_inner(inner, failure, effects);
        }
        if inner.slows_at.take_if(|at| now >= *at).is_some()
            && let Some(process) = &inner.process
        {
            self.around.processes.priority().lower(process.as_fd());
            inner.is_slowed = true;
        }
    }

    /// Takes what is in the socket, but does not wait for more: one that sends for ever is late all the same.
    fn take_arrived(
        &self,
        inner: &mut SlotInner,
        buffer: &mut [u8],
        effects: &mut Vec<SlotEffect>,
    ) {
        for _ in 0..ARRIVED_READS {
            match inner.inbox.receive(inner.socket.as_fd(), buffer) {
                // Its end is received by the poller.
                Ok(0) | Err(_) => return,
                Ok(received) => {
                    self.take_messages(inner, effects);
                    if received < buffer.len() {
                        return;
                    }
                }
            }
        }
    }

    /// A process whose late callback has ended is as good as any other.
    pub(super) fn restore_priority(&self, inner: &mut SlotInner) {
        if std::mem::take(&mut inner.is_slowed)
            && let Some(process) = &inner.process
        {
            self.around.processes.priority().restore(process.as_fd());
        }
    }
}

/// More than a socket holds.
const ARRIVED_READS: usize = 16;

#[cfg(test)]
mod tests;
