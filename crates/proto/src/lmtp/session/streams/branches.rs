//! Handles what a controller does to a stream, beyond its tokens: forks, backtracks, ends without a token, console
//! output and writes of variables (LM-972, LM-973).

use bytes::BytesMut;

use super::{ExtendedStream, SampleKey, Streams};
use crate::lmtp::port::{StreamKey, StreamUpdate};
use crate::lmtp::session::extended::number;
use crate::lmtp::session::outbox::Outbox;
use crate::lmtp::write::{self, member};
use crate::lmtp::{BranchEvent, Feature, LmtpError, StreamFinish};
use crate::time::Time;

impl Streams {
    /// Handles an event of a branch of a sample's work. Ignored for branches that do not run, and for streams without a
    /// controller.
    pub(in super::super) fn branch_event(
        &mut self,
        key: StreamKey,
        branch: u32,
        event: BranchEvent,
        out: &mut Outbox,
        now: Time,
    ) {
        let Some(part) = self.steered_part(key) else {
            return;
        };
        self.send_running(Some(part), out);
        if let BranchEvent::Forked { of, inherited } = event {
            return self.fork(key, part, (branch, of, inherited), out, now);
        }
        if !self
            .live
            .get(&key)
            .is_some_and(|stream| stream.branches.runs(branch))
        {
            return;
        }
        match event {
            BranchEvent::Backtrack(count) => {
                let Some((extended, sample)) = self.sample_of(key, part, branch) else {
                    return;
                };
                if sample == 0 {
                    let rest = extended.output.len().saturating_sub(count as usize);
                    extended.output.truncate(rest);
                }
                let sample = extended.numbered.then_some(sample);
                self.emit(part, out, now, |item, extended, seq| {
                    write::answer(item, &extended.id, |item| {
                        member(item, "backtrack", &count);
                        numbers(item, sample, seq);
                    });
                });
            }
            BranchEvent::Ended {
                finish,
                cached_tokens,
            } => {
                if let Some(extended) = self.extended.get_mut(&part.first) {
                    extended.cached = extended.cached.max(cached_tokens);
                }
                self.end_branch(key, branch, Ok(finish), out, now);
            }
            BranchEvent::Failed(error) => self.end_branch(key, branch, Err(error), out, now),
            BranchEvent::Forked { .. } => {}
        }
    }

    /// A branch is a new sample; its first item announces it.
    fn fork(
        &mut self,
        key: StreamKey,
        part: SampleKey,
        (branch, of, inherited): (u32, u32, u32),
        out: &mut Outbox,
        now: Time,
    ) {
        let (Some(stream), Some(extended)) =
            (self.live.get_mut(&key), self.extended.get_mut(&part.first))
        else {
            return;
        };
        let Some(steered) = &mut extended.steered else {
            return;
        };
        if stream.branches.has(branch) {
            return;
        }
        let parent = stream.branches.sample(of, part.index);
        let sample = steered.next_sample();
        stream.branches.fork(branch, sample, inherited);
        extended.open = extended.open.saturating_add(1);
        // From here on the client has to distinguish samples, also where it has not asked for several.
        extended.numbered = true;
        self.emit(part, out, now, |item, extended, seq| {
            write::answer(item, &extended.id, |item| {
                member(item, "sample", &sample);
                member(item, "fork_of", &parent);
                // The parent may have gone on since, so the tokens in common are counted.
                member(item, "inherited", &inherited);
                number(item, seq);
            });
        });
    }

    /// A branch has ended without a token. The end of the last one is the end of the stream.
    fn end_branch(
        &mut self,
        key: StreamKey,
        branch: u32,
        end: Result<StreamFinish, LmtpError>,
        out: &mut Outbox,
        now: Time,
    ) {
        let Some(part) = self.steered_part(key) else {
            return;
        };
        let Some((extended, sample)) = self.sample_of(key, part, branch) else {
            return;
        };
        let is_last = extended.open <= 1;
        let sample = extended.numbered.then_some(sample);
        match end {
            // As that of any other stream.
            Err(error) if is_last => return self.fail(key, &error, out, now),
            Ok(_) if is_last => self.send_log(part.first, out, now, true),
            _ => {}
        }
        let max = out.limits.max_error_bytes;
        self.emit(part, out, now, |item, extended, seq| {
            write::answer(item, &extended.id, |item| {
                let finish = end.as_ref().ok();
                let whole = finish.filter(|_| is_last).map(StreamFinish::name);
                member(item, "finish_reason", &whole);
                if let Some(sample) = sample {
                    member(item, "sample", &sample);
                    let name = finish.map_or("error", StreamFinish::name);
                    member(item, "sample_end", name);
                }
                if finish == Some(&StreamFinish::Controller) {
                    member(item, "stop_by", "controller");
                }
                if let Err(error) = &end {
                    // Not `error`, which would end the stream at its client (LM-502).
                    member(item, "sample_error", write::cut(&error.message, max));
                    member(item, "code", error.reason.name());
                }
                number(item, seq);
                if is_last {
                    extended.closing(item);
                }
            });
        });
        self.close_branch(key, branch, true, out, now);
    }

    /// Handles what a controller has printed: sent at once, unless the client was sent a status a moment ago (LM-922).
    pub(super) fn print(
        &mut self,
        key: StreamKey,
        branch: u32,
        message: &str,
        out: &mut Outbox,
        now: Time,
    ) {
        let Some(part) = self.steered_part(key) else {
            return;
        };
        let max = out.limits.max_log_bytes;
        if let Some((extended, sample)) = self.sample_of(key, part, branch)
            && let Some(steered) = &mut extended.steered
        {
            steered.print(sample, message, max);
        }
        self.send_log(part.first, out, now, false);
    }

    /// Handles a write of a variable. Such a status is neither dropped nor delayed (LM-923).
    pub(super) fn store(
        &mut self,
        key: StreamKey,
        branch: u32,
        status: &StreamUpdate,
        out: &mut Outbox,
    ) {
        let Some(part) = self.steered_part(key) else {
            return;
        };
        if let Some((extended, sample)) = self.sample_of(key, part, branch)
            && extended.features.has(Feature::Status)
        {
            let sample = extended.numbered.then_some(sample);
            out.sample_status(Some(&extended.id), status, sample);
        }
    }

    /// Sends what was printed, if the client wants it and there is room. `ends`: the stream ends, so it is now or never.
    pub(super) fn send_log(&mut self, first: StreamKey, out: &mut Outbox, now: Time, ends: bool) {
        // Without a connection nobody can receive it.
        let is_detached = self.replays.is_detached();
        let Some(extended) = self.extended.get_mut(&first) else {
            return;
        };
        let interval = out.limits.status_interval;
        let often = extended.notified.is_some_and(|last| now < last + interval);
        let is_wanted = extended.features.has(Feature::Status) && !is_detached;
        let Some(steered) = extended.steered.as_mut() else {
            return;
        };
        if !is_wanted {
            drop(steered.take_log());
        }
        if (often && !ends) || !out.has_room() {
            return;
        }
        for (sample, message) in steered.take_log() {
            extended.notified = Some(now);
            let status = StreamUpdate::Log { branch: 0, message };
            let sample = extended.numbered.then_some(sample);
            out.sample_status(Some(&extended.id), &status, sample);
        }
    }

    /// The part of a live stream that has a controller.
    fn steered_part(&self, key: StreamKey) -> Option<SampleKey> {
        let part = self.live.get(&key)?.part?;
        let extended = self.extended.get(&part.first)?;
        extended.steered.is_some().then_some(part)
    }

    /// The state of a stream, and the number of the sample that a branch of its work is.
    fn sample_of(
        &mut self,
        key: StreamKey,
        part: SampleKey,
        branch: u32,
    ) -> Option<(&mut ExtendedStream, u32)> {
        let sample = self.live.get(&key)?.branches.sample(branch, part.index);
        Some((self.extended.get_mut(&part.first)?, sample))
    }

    /// Sends or retains an item without a token, and parks the stream if it has no room for more.
    fn emit(
        &mut self,
        part: SampleKey,
        out: &mut Outbox,
        now: Time,
        write: impl FnOnce(&mut BytesMut, &ExtendedStream, Option<u64>),
    ) {
        let Some(extended) = self.extended.get(&part.first) else {
            return;
        };
        let mut item = BytesMut::new();
        write(&mut item, extended, self.replays.seq(part.first));
        let parks = self.replays.put(part.first, out, now, item.freeze());
        out.end_item();
        if parks {
            self.park(part.first, out);
        }
    }
}

fn numbers(item: &mut BytesMut, sample: Option<u32>, seq: Option<u64>) {
    if let Some(sample) = sample {
        member(item, "sample", &sample);
    }
    number(item, seq);
}
