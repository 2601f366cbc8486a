//! The work of one stream: a call of the model's function, and the items that it yields.

mod ported;
mod steered;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use futures::Stream;
use sapwood_engine::api;
use sapwood_engine::request_phase::{Follower, RequestPhase};
use sapwood_kernel::{
    Args, ChoiceFinish, Chunk, Error, GenerateConfig, InnerType, Kernel, Mime, PromptMode,
    RequestedPorts, Run, Want,
};
use sapwood_proto::lmtp::{
    self, GenerateRequest, Score, StreamFinish, StreamPiece, StreamStart, StreamUpdate, TokenItem,
};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::steer::Token;

use serde_json::Value;

use self::ported::PortTokens;
use self::steered::SteeredWork;
use super::refusals::to_lmtp_error;

/// The result of polling the work of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkUpdate {
    /// Nothing is ready; the waker is registered.
    Waiting,
    /// The items of one step were taken, and more is ready.
    More,
    /// It has ended.
    Over,
}

/// The source of the tokens.
#[expect(
    clippy::large_enum_variant,
    reason = "models of this process are the usual case: their run stays in place, without an allocation per stream"
)]
enum WorkSource {
    /// The model's function attaches them to its chunks of text.
    Inner(Run<Chunk>),
    /// The model's function has a port for them.
    Ported(Box<PortTokens>),
}

impl WorkSource {
    fn of(kernel: &Kernel, name: &str, args: Args) -> Self {
        // A model that was unloaded since the request was checked fails in its run, with the kernel's error.
        let inner = kernel
            .get(name)
            .ok()
            .and_then(|function| function.spec().inner);
        if inner != Some(InnerType::of::<api::Tokens>()) {
            return Self::Ported(Box::new(PortTokens::new(kernel, name, args)));
        }
        let mut want = Want::from(RequestedPorts::main());
        want.inner = true;
        Self::Inner(kernel.run::<Chunk>(name, args).wanting(want))
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Chunk, Error>>> {
        match self {
            Self::Inner(run) => Pin::new(run).poll_next(cx),
            Self::Ported(run) => Pin::new(&mut **run).poll_next(cx),
        }
    }
}

/// The work of one stream.
pub(super) struct StreamWork {
    /// `None` where there was nothing to compute.
    run: Option<WorkSource>,
    /// The run of a stream with a controller, in place of `run`.
    steered: Option<Box<SteeredWork>>,
    /// Items that were not taken yet: those that need no engine, or the first of the next step. The last one waits for
    /// the finish reason that may follow it.
    ahead: VecDeque<TokenItem>,
    /// The engine's progress with the request, if the client wants status updates (LM-921).
    follower: Option<Follower>,
}

impl StreamWork {
    /// Prepares the work; nothing happens before the first look.
    pub(super) fn new(kernel: &Kernel, start: StreamStart) -> Self {
        let name = &*start.name;
        let base = GenerateConfig {
            follower: start.statuses.then(Follower::new),
            prompt_mode: PromptMode::Raw,
            prompt_logprobs: start.prompt_logprobs,
            ..GenerateConfig::default()
        };
        match start.work {
            lmtp::StreamDemand::Generate(wanted) => {
                let prompt = tokens(&wanted.prompt);
                let controller = wanted.controller.map(Arc::unwrap_or_clone);
                // Ranges were checked, and are within the core's (D-20).
                let config = GenerateConfig {
                    params: wanted.params,
                    default_temperature: Some(GenerateRequest::TEMPERATURE),
                    watched: controller.is_some(),
                    controller,
                    ..base
                };
                Self::calling(kernel, name, prompt, config, VecDeque::new())
            }
            lmtp::StreamDemand::Score(wanted) => Self::scoring(kernel, name, wanted, base),
        }
    }

    /// LM-312: nothing precedes the first token of an empty prompt, so its log-probability is 0. It becomes the prompt
    /// of the others.
    fn scoring(kernel: &Kernel, name: &str, wanted: Score, mut base: GenerateConfig) -> Self {
        let Score {
            mut prompt,
            mut scored,
            top_logprobs,
            lora,
        } = wanted;
        let mut ahead = VecDeque::new();
        if prompt.is_empty() && !scored.is_empty() {
            prompt.push(scored.remove(0));
            // The prompt is empty, so its log-probabilities are an empty list, and the engine must not be asked for
            // those of the token that stands in for it.
            let known = std::mem::take(&mut base.prompt_logprobs);
            ahead.push_back(TokenItem {
                token: prompt[0],
                prompt: known.then(Vec::new),
                ..TokenItem::default()
            });
        }
        if scored.is_empty() {
            return Self {
                run: None,
                steered: None,
                ahead,
                follower: None,
            };
        }
        let config = GenerateConfig {
            params: GenerationParams {
                top_logprobs: Some(top_logprobs),
                lora,
                ..GenerationParams::default()
            },
            scored: Some(scored),
            ..base
        };
        Self::calling(kernel, name, tokens(&prompt), config, ahead)
    }

    fn calling(
        kernel: &Kernel,
        name: &str,
        prompt: Bytes,
        config: GenerateConfig,
        ahead: VecDeque<TokenItem>,
    ) -> Self {
        let follower = config.follower.clone();
        let is_steered = config.controller.is_some();
        let args = Args::new()
            .with("prompt", Chunk::bytes(prompt).with_mime(Mime::TOKENS))
            .with("config", config.into_chunk());
        if is_steered {
            return Self {
                run: None,
                steered: Some(Box::new(SteeredWork::new(kernel, name, args))),
                ahead,
                follower,
            };
        }
        Self {
            run: Some(WorkSource::of(kernel, name, args)),
            steered: None,
            ahead,
            follower,
        }
    }

    /// The engine's progress, if there is an update. Poll the work first, which registers the waker.
    pub(super) fn update(&self) -> Option<StreamUpdate> {
        let phase = self.follower.as_ref()?.latest()?;
        Some(match phase {
            RequestPhase::Waits { ahead, eta } => StreamUpdate::Queued {
                position: ahead.into(),
                eta,
            },
            RequestPhase::Prefill { computed, prompt } => StreamUpdate::Prefill {
                progress: progress(computed, prompt),
            },
            RequestPhase::Displaced { eta } => StreamUpdate::Throttled { retry_after: eta },
        })
    }

    /// Takes the items of one step. Never more, so that the connection can park its streams between steps (LM-607).
    pub(super) fn look(
        &mut self,
        cx: &mut Context<'_>,
        mut take: impl FnMut(StreamPiece),
    ) -> WorkUpdate {
        if let Some(steered) = &mut self.steered {
            return steered.look(cx, take);
        }
        let mut taken = !self.ahead.is_empty();
        loop {
            let polled = match &mut self.run {
                Some(run) => run.poll_next(cx),
                None => Poll::Ready(None),
            };
            let chunk = match polled {
                // Engines publish whole steps (D-6): had this been the last item, its finish would be ready as well.
                Poll::Pending => {
                    self.emit_all(&mut take);
                    return WorkUpdate::Waiting;
                }
                Poll::Ready(Some(Ok(chunk))) => chunk,
                Poll::Ready(Some(Err(error))) => {
                    self.emit_all(&mut take);
                    take(StreamPiece::Failed(to_lmtp_error(&error)));
                    return WorkUpdate::Over;
                }
                Poll::Ready(None) => {
                    self.emit_all(&mut take);
                    return WorkUpdate::Over;
                }
            };
            // Choice 0: each sample of a stream has work of its own.
            let end = chunk.meta.filter(|meta| meta.finish.contains_key(&0));
            if let Some(tokens) = chunk.inner.and_then(|inner| inner.downcast().ok()) {
                // These items belong to the step before. They were held back because the finish may come in a chunk of
                // its own after the tokens of the last step, and base clients need it on the last item (LM-405).
                if taken {
                    self.emit_all(&mut take);
                }
                add(tokens, &mut self.ahead);
                if std::mem::replace(&mut taken, true) {
                    return WorkUpdate::More;
                }
            }
            if let (Some(meta), Some(last)) = (end, self.ahead.back_mut()) {
                // Without an item nothing can carry the finish, because LM-405 has no trailing item. The session then
                // ends the stream with an error (LM-501).
                last.finish = meta.finish.get(&0).map(ending);
                let stop = meta.extra.get("stop").and_then(Value::as_str);
                last.stop = stop.map(str::to_owned);
                let cached = meta.usage.cached_tokens;
                last.cached_tokens = u32::try_from(cached).unwrap_or(u32::MAX);
                self.emit_all(&mut take);
                return WorkUpdate::Over;
            }
        }
    }

    fn emit_all(&mut self, take: &mut impl FnMut(StreamPiece)) {
        self.ahead.drain(..).map(StreamPiece::Item).for_each(take);
    }
}

/// Adds the items of a step's tokens, without a copy where this is the only reference. The last has the text of all.
fn add(tokens: Arc<api::Tokens>, items: &mut VecDeque<TokenItem>) {
    let api::Tokens {
        tokens,
        text,
        prompt,
        ..
    } = Arc::unwrap_or_clone(tokens);
    let first = items.len();
    items.extend(tokens.into_iter().map(|sampled| TokenItem {
        token: sampled.id,
        logprob: sampled.logprob,
        top: sampled.top,
        ..TokenItem::default()
    }));
    if let Some(last) = items.back_mut() {
        last.text = text;
    }
    if let Some((item, prompt)) = items.get_mut(first).zip(prompt) {
        item.prompt = Some(prompt_logprobs(&prompt));
    }
}

/// Nothing precedes the first token of a prompt, so it has no log-probability.
fn prompt_logprobs(known: &[f32]) -> Vec<Option<f32>> {
    let known = known.iter().copied().map(Some);
    std::iter::once(None).chain(known).collect()
}

/// From 0 to 1, in hundredths: it is meant for display.
fn progress(computed: u32, prompt: u32) -> f32 {
    let hundredths = u64::from(computed) * 100 / u64::from(prompt.max(1));
    let hundredths = u8::try_from(hundredths).unwrap_or(100).min(100);
    f32::from(hundredths) / 100.0
}

/// The finish reason as base clients know it (LM-405).
fn ending(reason: &ChoiceFinish) -> StreamFinish {
    match reason {
        ChoiceFinish::Length => StreamFinish::Length,
        _ => StreamFinish::Stop,
    }
}

fn tokens(ids: &[Token]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(4 * ids.len());
    ids.iter().for_each(|id| bytes.put_u32_le(*id));
    bytes.freeze()
}
