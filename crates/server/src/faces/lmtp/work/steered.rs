//! The work of a stream with a controller: the engine's events, step by step, as pieces of the stream (LM-972, LM-973).
//!
//! The model's function is watched: it emits the events as they are, so that tokens which a controller takes back need
//! not be held until it has ended.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use sapwood_engine::api::{
    ChoiceEnd, EngineEvent, EventKind, FinishReason, Sampled, StopCause, Tokens,
};
use sapwood_kernel::{Args, Chunk, Kernel, RequestedPorts, Run, Want};
use sapwood_proto::lmtp::{BranchEvent, StreamFinish, StreamPiece, StreamUpdate, TokenItem};
use sapwood_proto::steer::StepReport;

use super::{WorkUpdate, prompt_logprobs};
use crate::faces::lmtp::refusals::to_lmtp_error;

/// A watched run of a model.
pub(super) struct SteeredWork {
    run: Run<Chunk>,
    /// The pieces of the present step. It is complete when an event of a later step has come, or nothing more is ready.
    pieces: Vec<StreamPiece>,
    step: u64,
    /// The first event of the step after that.
    ahead: Option<EngineEvent>,
    texts: BTreeMap<u32, EmittedText>,
}

/// How much text of a branch was sent.
#[derive(Clone, Debug, Default)]
struct EmittedText {
    /// In bytes.
    length: usize,
    /// The length after each token.
    after: Vec<usize>,
}

impl SteeredWork {
    pub(super) fn new(kernel: &Kernel, name: &str, args: Args) -> Self {
        let mut want = Want::from(RequestedPorts::main());
        want.inner = true;
        Self {
            run: kernel.run::<Chunk>(name, args).wanting(want),
            pieces: Vec::new(),
            step: 0,
            ahead: None,
            texts: BTreeMap::new(),
        }
    }

    /// Takes the pieces of one step; see [`super::StreamWork::look`].
    pub(super) fn look(
        &mut self,
        cx: &mut Context<'_>,
        mut take: impl FnMut(StreamPiece),
    ) -> WorkUpdate {
        if let Some(event) = self.ahead.take() {
            self.add(event);
        }
        loop {
            let update = match Pin::new(&mut self.run).poll_next(cx) {
                // Engines publish whole steps (D-6): what belongs to this one would be ready as well.
                Poll::Pending => WorkUpdate::Waiting,
                Poll::Ready(None) => WorkUpdate::Over,
                Poll::Ready(Some(Err(error))) => {
                    self.pieces.drain(..).for_each(&mut take);
                    take(StreamPiece::Failed(to_lmtp_error(&error)));
                    return WorkUpdate::Over;
                }
                Poll::Ready(Some(Ok(chunk))) => {
                    // The last chunk has metadata only, which the events had before.
                    let event = chunk.inner.and_then(|inner| inner.downcast().ok());
                    let Some(event) = event.map(Arc::unwrap_or_clone) else {
                        continue;
                    };
                    if self.begins_later(&event) {
                        self.ahead = Some(event);
                        WorkUpdate::More
                    } else {
                        self.add(event);
                        continue;
                    }
                }
            };
            self.pieces.drain(..).for_each(&mut take);
            return update;
        }
    }

    /// Whether the event belongs to a later step than the pieces that are there.
    fn begins_later(&self, event: &EngineEvent) -> bool {
        // The usage is of the whole request; its cached tokens go with the last piece.
        !self.pieces.is_empty()
            && event.step != self.step
            && !matches!(event.kind, EventKind::Usage(_))
    }

    fn add(&mut self, event: EngineEvent) {
        let branch = event.choice;
        if !matches!(event.kind, EventKind::Usage(_)) {
            self.step = event.step;
        }
        match event.kind {
            EventKind::Tokens(tokens) => self.add_tokens(branch, tokens),
            EventKind::Report(report) => self.add_report(branch, report),
            EventKind::Finish(end) => self.finish(branch, end),
            EventKind::Usage(usage) => match self.pieces.last_mut() {
                Some(StreamPiece::Item(item)) => item.cached_tokens = usage.cached_tokens,
                Some(StreamPiece::Branch(_, BranchEvent::Ended { cached_tokens, .. })) => {
                    *cached_tokens = usage.cached_tokens;
                }
                _ => {}
            },
            // The run's error has it.
            EventKind::Error(_) => {}
        }
    }

    fn add_tokens(&mut self, branch: u32, tokens: Tokens) {
        let Tokens {
            backtrack,
            withdrawn,
            tokens,
            text,
            prompt,
            inherited,
            fork_of,
        } = tokens;
        let inherited = inherited as usize;
        let mut new_text = &*text;
        if let Some(of) = fork_of {
            let common = self.texts.get(&of).map(|parent| parent.upto(inherited));
            let common = common.unwrap_or_default();
            // Its text begins with what both have in common, which the client has (LM-973).
            let begin = text.floor_char_boundary(common.length.min(text.len()));
            new_text = &text[begin..];
            self.texts.insert(branch, common);
            let inherited = u32::try_from(inherited).unwrap_or(u32::MAX);
            let event = BranchEvent::Forked { of, inherited };
            self.pieces.push(StreamPiece::Branch(branch, event));
        }
        let emitted = self.texts.entry(branch).or_default();
        if backtrack > 0 {
            emitted.withdraw(backtrack as usize, withdrawn as usize);
            let event = BranchEvent::Backtrack(backtrack);
            self.pieces.push(StreamPiece::Branch(branch, event));
        }
        let first = self.pieces.len();
        for sampled in tokens.into_iter().skip(inherited) {
            emitted.after.push(emitted.length);
            self.pieces.push(StreamPiece::Item(item(branch, sampled)));
        }
        emitted.length += new_text.len();
        if self.pieces.len() == first {
            return;
        }
        if let Some(after) = emitted.after.last_mut() {
            *after = emitted.length;
        }
        if let Some(StreamPiece::Item(last)) = self.pieces.last_mut() {
            last.text = new_text.into();
        }
        if let (Some(StreamPiece::Item(item)), Some(prompt)) = (self.pieces.get_mut(first), prompt)
        {
            item.prompt = Some(prompt_logprobs(&prompt));
        }
    }

    fn add_report(&mut self, branch: u32, report: StepReport) {
        let StepReport { logs, storage, .. } = report;
        if !logs.is_empty() {
            let message = logs;
            self.pieces
                .push(StreamPiece::Status(StreamUpdate::Log { branch, message }));
        }
        let writes = storage.into_iter();
        self.pieces.extend(
            writes.map(|write| StreamPiece::Status(StreamUpdate::Storage { branch, write })),
        );
    }

    /// Ends a branch: with its last token, if that is of this step.
    fn finish(&mut self, branch: u32, end: ChoiceEnd) {
        let ChoiceEnd { reason, stop } = end;
        let finish = match reason {
            FinishReason::Controller => StreamFinish::Controller,
            FinishReason::Length => StreamFinish::Length,
            FinishReason::Cancelled => StreamFinish::Cancelled,
            FinishReason::Stop => StreamFinish::Stop,
        };
        let own = self.pieces.iter_mut().rev().find_map(|piece| match piece {
            StreamPiece::Item(item) if item.branch == branch => Some(Some(item)),
            // A token before a backtrack is not the last of the output.
            StreamPiece::Branch(own, _) if *own == branch => Some(None),
            _ => None,
        });
        match own.flatten() {
            Some(item) => {
                item.finish = Some(finish);
                item.stop = match stop {
                    Some(StopCause::Text(text)) => Some(text),
                    Some(StopCause::Tokens(_)) | None => None,
                };
            }
            None => {
                let cached_tokens = 0;
                let event = BranchEvent::Ended {
                    finish,
                    cached_tokens,
                };
                self.pieces.push(StreamPiece::Branch(branch, event));
            }
        }
    }
}

impl EmittedText {
    /// What was sent up to this number of tokens.
    fn upto(&self, tokens: usize) -> Self {
        let after = &self.after[..tokens.min(self.after.len())];
        Self {
            length: after.last().copied().unwrap_or_default(),
            after: after.to_vec(),
        }
    }

    fn withdraw(&mut self, tokens: usize, bytes: usize) {
        self.after.truncate(self.after.len().saturating_sub(tokens));
        self.length = self.length.saturating_sub(bytes);
    }
}

fn item(branch: u32, sampled: Sampled) -> TokenItem {
    let Sampled {
        id,
        logprob,
        top,
        forced,
        ..
    } = sampled;
    // A forced token was not chosen among others (LM-972).
    let (logprob, top) = if forced {
        (0.0, Vec::new())
    } else {
        (logprob, top)
    };
    TokenItem {
        token: id,
        logprob,
        top,
        forced,
        branch,
        ..TokenItem::default()
    }
}
