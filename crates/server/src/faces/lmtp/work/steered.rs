//! The work of a stream with a controller: the engine's events, step by step, as pieces of the stream (LM-972, LM-973).
//!
//! The model's function is watched: it emits the events as they are, so that tokens which a controller takes back need
//! not be held until it has ended.

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
use crate::branch_text::BranchTexts;
use crate::faces::lmtp::refusals::to_lmtp_error;

/// A watched run of a model.
pub(super) struct SteeredWork {
    run: Run<Chunk>,
    /// The pieces of the present step. It is complete when an event of a later step has come, or nothing more is ready.
    pieces: Vec<StreamPiece>,
    step: u64,
    /// The first event of the step after that.
    ahead: Option<EngineEvent>,
    texts: BranchTexts,
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
            texts: BranchTexts::default(),
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
            EventKind::Tokens(tokens) => self.add_tokens(branch, &tokens),
            EventKind::Report(report) => self.add_report(branch, report),
            EventKind::Finish(end) => self.finish(branch, end),
            EventKind::Failed(error) => {
                let event = BranchEvent::Failed(to_lmtp_error(&error.into()));
                self.pieces.push(StreamPiece::Branch(branch, event));
            }
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

    fn add_tokens(&mut self, branch: u32, step: &Tokens) {
        let new = self.texts.take(branch, step);
        if let Some(of) = step.fork_of {
            let inherited = step.inherited;
            let event = BranchEvent::Forked { of, inherited };
            self.pieces.push(StreamPiece::Branch(branch, event));
        }
        if step.backtrack > 0 {
            let event = BranchEvent::Backtrack(step.backtrack);
            self.pieces.push(StreamPiece::Branch(branch, event));
        }
        let first = self.pieces.len();
        let items = new.tokens.iter().map(|sampled| item(branch, sampled));
        self.pieces.extend(items.map(StreamPiece::Item));
        // Text that is released without a token goes with the last one of its step.
        let last = self.pieces.iter_mut().rev().find_map(|piece| match piece {
            StreamPiece::Item(item) if item.branch == branch => Some(item),
            _ => None,
        });
        if let Some(last) = last {
            last.text.push_str(new.text);
        }
        if let (Some(StreamPiece::Item(item)), Some(prompt)) =
            (self.pieces.get_mut(first), &step.prompt)
        {
            item.prompt = Some(prompt_logprobs(prompt));
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
            FinishReason::Length | FinishReason::Fuel => StreamFinish::Length,
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

fn item(branch: u32, sampled: &Sampled) -> TokenItem {
    // A forced token was not chosen among others (LM-972).
    let (logprob, top) = if sampled.forced {
        (0.0, Vec::new())
    } else {
        (sampled.logprob, sampled.top.clone())
    };
    TokenItem {
        token: sampled.id,
        logprob,
        top,
        forced: sampled.forced,
        branch,
        ..TokenItem::default()
    }
}
