//! The live streams of a session: items, ends, deadlines, windows and the tables that find them.

mod branches;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use bytestring::ByteString;

use super::buffers::BufferRequest;
use super::extended::{ExtendedStream, SampleKey, number};
use super::outbox::Outbox;
use super::replays::{ReplayBuffers, StreamReplay};
use super::steered::Branches;
use crate::lmtp::outbound::ITEM_BYTES_MAX;
use crate::lmtp::port::{LmtpOutput, StreamDemand, StreamKey, StreamStart, StreamUpdate};
use crate::lmtp::{
    Feature, LmtpError, LmtpModelInfo, LmtpReason, StreamFinish, StreamId, TokenItem, write,
};
use crate::steer::Token;
use crate::time::Time;

/// A request that has passed all checks.
pub(super) struct AdmittedRequest {
    pub(super) name: ByteString,
    pub(super) model: Arc<LmtpModelInfo>,
    /// The work of each sample; at least one.
    pub(super) works: Vec<StreamDemand>,
    pub(super) extended: Option<ExtendedStream>,
}

/// A live stream, or one sample of it.
#[derive(Debug)]
struct LmtpStream {
    id: StreamId,
    /// Its work: one branch, and the forks of a controller. At least one runs.
    branches: Branches,
    /// Number of most likely tokens that an item shows; `None` omits the member, as for SCORE.
    top: Option<u32>,
    /// Whether it is a SCORE.
    scores: bool,
    /// Key of its version 2 state in `extended`; `None` for the base protocol.
    part: Option<SampleKey>,
}

/// A stream that moves to another session.
pub(super) struct DepartingStream {
    replay: StreamReplay,
    first: StreamKey,
    /// `None` if the stream has ended.
    extended: Option<ExtendedStream>,
    samples: BTreeMap<StreamKey, LmtpStream>,
}

/// The streams of a session.
///
/// Invariants:
/// - `ids` has exactly the streams whose end was not produced yet: a base stream has its key in `live`, a version 2 stream
///   has its first sample's key in `extended`, whether or not that sample still runs.
/// - The samples of a version 2 stream have consecutive keys; `open` of its state counts those in `live`.
/// - `due` has each deadline that `extended` has, and no other.
/// - A stream that has ended may still be in `replays`, for its unsent items and for RESUME.
#[derive(Debug, Default)]
pub(super) struct Streams {
    live: BTreeMap<StreamKey, LmtpStream>,
    /// The first sample of each stream, by id.
    ids: BTreeMap<StreamId, StreamKey>,
    /// Version 2 state of streams, by their first samples.
    extended: BTreeMap<StreamKey, ExtendedStream>,
    /// Deadlines by which streams must have started or ended.
    due: BTreeSet<(Time, StreamKey)>,
    /// Items that may have to be sent again, and items that wait to be sent.
    pub(super) replays: ReplayBuffers,
    /// Number of keys given so far.
    admitted: u64,
    /// Outputs of ended streams, for the buffers that they asked for.
    pub(super) kept: Vec<(BufferRequest, Vec<Token>)>,
    /// Streams begun here, and their items without errors.
    pub(super) opened: u64,
    pub(super) items_out: u64,
}

impl Streams {
    /// Number of live streams, samples counted.
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    /// The id of a live stream.
    pub(super) fn id(&self, stream: StreamKey) -> Option<&StreamId> {
        self.live.get(&stream).map(|stream| &stream.id)
    }

    /// The live stream with this id.
    pub(super) fn named(&self, id: &StreamId) -> Option<StreamKey> {
        self.ids.get(id).copied()
    }

    /// Whether the end of a stream with this id was not sent yet.
    pub(super) fn is_in_use(&self, id: &StreamId) -> bool {
        self.ids.contains_key(id) || self.replays.has_unsent(id)
    }

    /// Whether nothing runs and nothing waits to be sent.
    pub(super) fn is_finished(&self) -> bool {
        self.live.is_empty() && self.replays.is_sent()
    }

    /// The ids of the live streams, in order of admission.
    pub(super) fn in_order(&self) -> impl Iterator<Item = StreamId> + use<> {
        let mut all: Vec<_> = self
            .ids
            .iter()
            .map(|(id, key)| (*key, id.clone()))
            .collect();
        all.sort_by_key(|(key, _)| *key);
        all.into_iter().map(|(_, id)| id)
    }

    /// The first deadline of a stream.
    pub(super) fn due(&self) -> Option<Time> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Records that the client was sent `loading` before this stream began, so `running` follows (LM-922).
    pub(super) fn has_waited(&mut self, id: &StreamId) {
        let first = self.ids.get(id);
        if let Some(extended) = first.and_then(|first| self.extended.get_mut(first)) {
            extended.waited = true;
        }
    }

    /// Fails all streams.
    pub(super) fn fail_all(&mut self, error: &LmtpError, out: &mut Outbox, now: Time) {
        while let Some((&stream, _)) = self.live.first_key_value() {
            // `fail` takes the work of this sample for over, so it would not cancel it.
            out.events.push_back(LmtpOutput::Cancel(stream));
            self.fail(stream, error, out, now);
        }
    }

    /// Cancels all work and empties all tables; nothing is sent.
    pub(super) fn cancel_all(&mut self, out: &mut Outbox) {
        let live = std::mem::take(&mut self.live);
        self.ids.clear();
        self.extended.clear();
        self.due.clear();
        self.replays = ReplayBuffers::default();
        out.events.extend(live.into_keys().map(LmtpOutput::Cancel));
    }

    /// The connection is lost: streams that cannot be resumed are cancelled, and the items of the others wait.
    pub(super) fn detach(&mut self, out: &mut Outbox, now: Time) {
        // A status describes the moment; a client that comes back has no use for it.
        for steered in self
            .extended
            .values_mut()
            .filter_map(|stream| stream.steered.as_mut())
        {
            drop(steered.take_log());
        }
        let lost: Vec<_> = self.ids.values().copied().collect();
        for first in lost {
            if !self.replays.is_numbered(first) {
                drop(self.dissolve(first, None, out, now));
            }
        }
        // Before the parking below: `Unpark` lets all streams continue, also those whose buffers are full.
        out.unpark();
        let limits = Arc::clone(&out.limits);
        for first in self.replays.hold(&limits) {
            self.park(first, out);
        }
    }

    /// Begins an admitted stream.
    pub(super) fn begin(&mut self, id: &StreamId, admitted: AdmittedRequest, out: &mut Outbox) {
        let first = StreamKey(self.admitted);
        let is_extended = admitted.extended.is_some();
        let extended = admitted.extended.as_ref();
        let prompt_logprobs = extended.is_some_and(|stream| stream.prompt_logprobs);
        let statuses = extended.is_some_and(|stream| stream.features.has(Feature::Status));
        self.ids.insert(id.clone(), first);
        // A stream without numbers has no replay buffer. One that is left under the same id belongs to another stream,
        // and a client that resumes this one must not be given its items.
        self.replays.remove(id);
        if let Some(extended) = admitted.extended {
            let due = extended.deadline.into_iter().chain(extended.first_due);
            self.due.extend(due.map(|due| (due, first)));
            let (resumable, window) = (extended.features.has(Feature::Resume), extended.window);
            if resumable || window.is_some() {
                self.replays.begin(first, id, resumable, window);
            }
            self.extended.insert(first, extended);
        }
        for (work, index) in admitted.works.into_iter().zip(0..) {
            let key = StreamKey(self.admitted);
            self.admitted += 1;
            self.opened += 1;
            let (most, top) = match &work {
                StreamDemand::Generate(wanted) => {
                    (u64::from(wanted.max_tokens()), Some(wanted.top_logprobs()))
                }
                StreamDemand::Score(wanted) => {
                    let top = Some(wanted.top_logprobs).filter(|top| *top > 0);
                    (wanted.scored.len() as u64, top)
                }
            };
            let stream = LmtpStream {
                id: id.clone(),
                branches: Branches::new(most),
                top,
                scores: matches!(work, StreamDemand::Score(_)),
                part: is_extended.then_some(SampleKey { first, index }),
            };
            self.live.insert(key, stream);
            out.events
                .push_back(LmtpOutput::Start(Box::new(StreamStart {
                    stream: key,
                    sample: index,
                    name: admitted.name.clone(),
                    model: Arc::clone(&admitted.model),
                    work,
                    // The status and the prompt's log-probabilities are the same for all samples, so only the first one
                    // reports them.
                    statuses: statuses && index == 0,
                    prompt_logprobs: prompt_logprobs && index == 0,
                })));
        }
    }

    /// Handles an item of a sample's work; ignored once the sample has ended.
    pub(super) fn item(
        &mut self,
        key: StreamKey,
        mut item: TokenItem,
        out: &mut Outbox,
        now: Time,
    ) {
        let branch = item.branch;
        let Some(stream) = self.live.get_mut(&key) else {
            return;
        };
        let Some(is_last) = stream.branches.count(branch) else {
            return;
        };
        // JSON has no NaN, and a clamped value would be a wrong probability (LM-412).
        if item.logprob.is_nan() || item.top.iter().any(|(_, value)| value.is_nan()) {
            let message = "the engine returned a probability that is not a number";
            return self.fail_running(key, message, out, now);
        }
        // By the work's own report: if the count below ends the stream, the work must still be cancelled.
        let work_goes_on = item.finish.is_none();
        if stream.scores {
            // SCORE has one item for each token, and the last one has the finish reason (LM-311).
            item.finish = is_last.then_some(StreamFinish::Stop);
        } else if is_last {
            // `max_tokens` is exact, whatever the engine does (LM-602).
            item.finish.get_or_insert(StreamFinish::Length);
        }
        let ends = item.finish.is_some();
        let (top, part) = (stream.top, stream.part);
        // Before the item: no status of a stream may follow its end, which this item may be (LM-922).
        self.send_running(part, out);
        if let Some(part) = part.filter(|_| ends) {
            self.send_log(part.first, out, now, true);
        }
        let Some(stream) = self.live.get(&key) else {
            return;
        };
        let extended = part.and_then(|part| Some((part, self.extended.get_mut(&part.first)?)));
        let mut parks = None;
        match extended {
            None => out.messages.item(out.limits.max_frame_out, |out| {
                write::item(out, &stream.id, &item, top, |_| {});
            }),
            Some((part, extended)) => {
                // Counted before it is written, since `usage` on the last item includes it (LM-950).
                let sample = stream.branches.sample(branch, part.index);
                extended.take(&item, sample);
                let seq = self.replays.seq(part.first);
                let mut text = BytesMut::new();
                extended.item(&mut text, item, top, sample, seq);
                // Only facts about a very long prompt are that large. Clients would lose all streams, because they
                // close a connection with such a message (LM-1202).
                if text.len() > ITEM_BYTES_MAX {
                    let message = "an item is larger than a message may be; ask for less in it";
                    return self.fail_running(key, message, out, now);
                }
                let full = self.replays.put(part.first, out, now, text.freeze());
                parks = full.then_some(part.first);
                extended.fresh = false;
                if let Some(due) = extended.first_due.take() {
                    self.due.remove(&(due, part.first));
                }
            }
        }
        out.end_item();
        self.items_out += 1;
        if ends {
            self.close_branch(key, branch, !work_goes_on, out, now);
        }
        // After the removal: a stream that has ended has no samples left to park.
        if let Some(first) = parks {
            self.park(first, out);
        }
    }

    /// Ends a stream whose item cannot be sent, and stops its work.
    fn fail_running(&mut self, key: StreamKey, message: &'static str, out: &mut Outbox, now: Time) {
        out.events.push_back(LmtpOutput::Cancel(key));
        let error = LmtpError::new(LmtpReason::EngineError, message);
        self.fail(key, &error, out, now);
    }

    /// Ends a stream with an error, unless it has ended; the work of this sample is over.
    pub(super) fn fail(&mut self, key: StreamKey, error: &LmtpError, out: &mut Outbox, now: Time) {
        if let Some(stream) = self.live.get(&key) {
            let first = stream.part.map_or(key, |part| part.first);
            self.fail_all_of(first, Some(key), error, out, now);
        }
    }

    /// Ends a stream with an error, by its first sample.
    fn fail_all_of(
        &mut self,
        first: StreamKey,
        but: Option<StreamKey>,
        error: &LmtpError,
        out: &mut Outbox,
        now: Time,
    ) {
        // The replay buffer outlives `dissolve`: the error is its last item, and RESUME replays it (LM-963).
        let Some((id, extended)) = self.dissolve(first, but, out, now) else {
            return;
        };
        // An error does not wait for acknowledgements: its client may never send another one.
        self.replays.open_window(first);
        let seq = self.replays.seq(first);
        let mut item = BytesMut::new();
        write::failure(&mut item, &id, error, out.limits.max_error_bytes, |out| {
            number(out, seq);
            if let Some(extended) = &extended {
                extended.closing(out);
            }
        });
        self.replays.put(first, out, now, item.freeze());
        out.end_item();
    }

    /// A branch has ended; with the last one its work is over. `by_itself`: the work reported the end.
    fn close_branch(
        &mut self,
        key: StreamKey,
        branch: u32,
        by_itself: bool,
        out: &mut Outbox,
        now: Time,
    ) {
        let Some(stream) = self.live.get_mut(&key) else {
            return;
        };
        if stream.branches.end(branch) {
            self.remove_sample(key, out, now);
            if !by_itself {
                out.events.push_back(LmtpOutput::Cancel(key));
            }
        } else if let Some(part) = stream.part
            && let Some(extended) = self.extended.get_mut(&part.first)
        {
            extended.open -= 1;
        }
    }

    /// Removes a sample that has ended. With its last sample a stream has ended, and its id may be reused (LM-508).
    fn remove_sample(&mut self, key: StreamKey, out: &mut Outbox, now: Time) {
        let Some(stream) = self.live.remove(&key) else {
            return;
        };
        let first = stream.part.map_or(key, |part| part.first);
        if let Some(extended) = self.extended.get_mut(&first) {
            extended.open -= 1;
            if extended.open > 0 {
                return;
            }
        }
        let _ = self.dissolve(first, None, out, now);
        // For a base stream `dissolve` does nothing, because its only sample was removed above.
        self.ids.remove(&stream.id);
    }

    /// Removes a stream from all tables, by its first sample; its running work, except one sample's, is cancelled.
    fn dissolve(
        &mut self,
        first: StreamKey,
        but: Option<StreamKey>,
        out: &mut Outbox,
        now: Time,
    ) -> Option<(StreamId, Option<ExtendedStream>)> {
        // Before the end, which the caller sends: no status may follow it (LM-922).
        self.send_log(first, out, now, true);
        let Some(extended) = self.extended.remove(&first) else {
            let stream = self.live.remove(&first)?;
            if but != Some(first) {
                out.events.push_back(LmtpOutput::Cancel(first));
            }
            self.ids.remove(&stream.id);
            return Some((stream.id, None));
        };
        // Only the work that has just reported its own end is not cancelled; the shell treats any other as running.
        for key in extended.keys(first) {
            if self.live.remove(&key).is_some() && but != Some(key) {
                out.events.push_back(LmtpOutput::Cancel(key));
            }
        }
        self.ids.remove(&extended.id);
        for due in extended.deadline.into_iter().chain(extended.first_due) {
            self.due.remove(&(due, first));
        }
        // However the stream has ended (LM-942). Stored later, because the buffers belong to the session.
        if let Some(keep) = extended.keep.clone() {
            let tokens = [&*extended.prompt, &*extended.output].concat();
            self.kept.push((keep, tokens));
        }
        let limits = &out.limits;
        self.replays.end(first, now + limits.resume_grace, limits);
        Some((extended.id.clone(), Some(extended)))
    }

    /// Sends items that wait in replay buffers, as far as there is room.
    pub(super) fn flow(&mut self, out: &mut Outbox, now: Time) {
        for first in self.replays.flow(out, now) {
            let going = self.samples(first).map(LmtpOutput::UnparkStream);
            out.events.extend(going);
        }
    }

    /// Parks the work of one stream.
    pub(super) fn park(&self, first: StreamKey, out: &mut Outbox) {
        let standing = self.samples(first).map(LmtpOutput::ParkStream);
        out.events.extend(standing);
    }

    /// The samples of a stream that are still running.
    fn samples(&self, first: StreamKey) -> impl Iterator<Item = StreamKey> + use<'_> {
        let extended = self.extended.get(&first).into_iter();
        let keys = extended.flat_map(move |extended| extended.keys(first));
        keys.filter(move |key| self.live.contains_key(key))
    }

    /// Ends a stream early, with the output sent so far.
    pub(super) fn end_early(
        &mut self,
        first: StreamKey,
        finish: &StreamFinish,
        out: &mut Outbox,
        now: Time,
    ) {
        let Some((id, extended)) = self.dissolve(first, None, out, now) else {
            return;
        };
        self.replays.open_window(first);
        let seq = self.replays.seq(first);
        let mut item = BytesMut::new();
        match &extended {
            Some(extended) => extended.end(&mut item, finish, seq),
            None => write::end(&mut item, &id, finish, |_| {}),
        }
        self.replays.put(first, out, now, item.freeze());
        out.end_item();
    }

    /// Ends the streams whose deadline has passed.
    pub(super) fn expire(&mut self, out: &mut Outbox, now: Time) {
        while let Some((due, first)) = self.due.first().copied() {
            if due > now {
                return;
            }
            self.due.pop_first();
            let Some(extended) = self.extended.get_mut(&first) else {
                continue;
            };
            // If both deadlines are equal they are one entry of `due`, and the one of the whole stream is reported.
            if extended.deadline == Some(due) {
                self.end_early(first, &StreamFinish::Deadline, out, now);
            } else if extended.first_due.take() == Some(due) {
                let message = "no token came within 'ttft_ms'";
                let error = LmtpError::new(LmtpReason::Timeout, message);
                self.fail_all_of(first, None, &error, out, now);
            }
        }
    }

    /// Ends the streams whose clients have acknowledged nothing for too long.
    pub(super) fn expire_windows(&mut self, out: &mut Outbox, now: Time) {
        let timeout = out.limits.stall_timeout;
        while let Some((at, first)) = self.replays.stalled(timeout)
            && at <= now
        {
            let message = "no item was acknowledged for too long";
            let error = LmtpError::new(LmtpReason::Stalled, message);
            // Unsent items are dropped: the error must not wait behind items that the client does not acknowledge.
            let Some(id) = self.replays.discard_unsent(first) else {
                return;
            };
            if self.extended.contains_key(&first) {
                self.fail_all_of(first, None, &error, out, now);
                continue;
            }
            // Its work has ended, but its client was not sent the end yet.
            let seq = self.replays.seq(first);
            let mut item = BytesMut::new();
            write::failure(&mut item, &id, &error, out.limits.max_error_bytes, |out| {
                number(out, seq);
            });
            self.replays.put(first, out, now, item.freeze());
        }
    }

    /// Handles a new status of a stream. It is sent if the client wants it, not too often, and never when items wait to
    /// be sent.
    pub(super) fn status(
        &mut self,
        stream: StreamKey,
        status: &StreamUpdate,
        out: &mut Outbox,
        now: Time,
    ) {
        match status {
            StreamUpdate::Log { branch, message } => {
                return self.print(stream, *branch, message, out, now);
            }
            StreamUpdate::Storage { branch, .. } => {
                return self.store(stream, *branch, status, out);
            }
            _ => {}
        }
        let limits = &out.limits;
        if !out.has_room() {
            return;
        }
        let part = self.live.get(&stream).and_then(|stream| stream.part);
        let Some(extended) = part.and_then(|part| self.extended.get_mut(&part.first)) else {
            return;
        };
        let wanted = extended.features.has(Feature::Status);
        // Statuses are dropped, not delayed: a later one replaces what an earlier one reports (LM-922).
        let often = extended
            .notified
            .is_some_and(|reported| now < reported + limits.status_interval);
        let due = match status {
            StreamUpdate::Loading { .. } | StreamUpdate::Queued { .. } => {
                now >= extended.began + limits.status_after
            }
            StreamUpdate::Running => extended.waited,
            _ => true,
        };
        if !wanted || often || !due {
            return;
        }
        extended.notified = Some(now);
        extended.waited |= matches!(
            status,
            StreamUpdate::Loading { .. } | StreamUpdate::Queued { .. }
        );
        let id = extended.id.clone();
        out.status(Some(&id), status);
    }

    /// Sends `running` before the first item of a stream whose client was sent `queued` or `loading` (LM-922).
    fn send_running(&self, part: Option<SampleKey>, out: &mut Outbox) {
        let extended = part.and_then(|part| self.extended.get(&part.first));
        let waited = extended.filter(|extended| extended.fresh && extended.waited);
        if let Some(id) = waited.map(|extended| extended.id.clone())
            && out.has_room()
        {
            out.status(Some(&id), &StreamUpdate::Running);
        }
    }

    /// Removes a stream with all its items from `seq` on, if they are still retained and there is room for it.
    pub(super) fn leave(
        &mut self,
        id: &StreamId,
        seq: u64,
        room: usize,
    ) -> Option<DepartingStream> {
        let first = self.replays.named(id)?;
        if !self.replays.is_numbered(first) || !self.replays.reaches(first, seq) {
            return None;
        }
        // Moved only as a whole: the new session must have room for every sample that still runs.
        let open = self
            .extended
            .get(&first)
            .map_or(0, |extended| extended.open);
        if usize::try_from(open).is_ok_and(|open| open > room) {
            return None;
        }
        let buffer = self.replays.take(first)?;
        let extended = self.extended.remove(&first);
        // Its deadlines stay in `due`: this session is dropped once all wanted streams have left it.
        let keys = extended.iter().flat_map(|extended| extended.keys(first));
        let samples = keys.filter_map(|key| Some((key, self.live.remove(&key)?)));
        let samples = samples.collect();
        self.ids.remove(id);
        Some(DepartingStream {
            replay: buffer,
            first,
            extended,
            samples,
        })
    }

    /// Adds a stream that has left another session, whose client has received everything before `seq`. `moved` receives
    /// the old and new keys of its work.
    pub(super) fn take_over(
        &mut self,
        departing: DepartingStream,
        seq: u64,
        (now, grace): (Time, Duration),
        moved: &mut Vec<(StreamKey, StreamKey)>,
    ) {
        let first = StreamKey(self.admitted);
        // An ended stream has no samples, but its replay buffer needs a key.
        let samples = departing
            .extended
            .as_ref()
            .map_or(1, |extended| extended.samples);
        // Room for the samples that have ended as well, so that `first + index` stays the key of each. `opened` does
        // not change: the session that it left has counted the stream.
        self.admitted += u64::from(samples);
        if let Some(extended) = departing.extended {
            self.ids.insert(extended.id.clone(), first);
            let due = extended.deadline.into_iter().chain(extended.first_due);
            self.due.extend(due.map(|due| (due, first)));
            self.extended.insert(first, extended);
        }
        for (old, mut stream) in departing.samples {
            let key = StreamKey(first.0 + (old.0 - departing.first.0));
            stream.part = stream.part.map(|part| SampleKey { first, ..part });
            self.live.insert(key, stream);
            moved.push((old, key));
        }
        self.replays
            .resume(first, departing.replay, seq, (now, grace));
    }
}
