//! Tokens of a model that has a port for them, as one behind an Evergreen server does.
//!
//! [`PortTokens`] reads the port `logprobs`, where each line is a token, and yields chunks whose `inner` are tokens, as
//! models of this process do. The finish comes with the run's metadata, before the last tokens or after them, and
//! clients need it on the last token (LM-405): so a token waits here until the next one has come, or the end.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use sapwood_engine::api::{Sampled, Tokens};
use sapwood_kernel::{Args, Chunk, Error, Kernel, Name, Port, RequestedPorts, Run, Want};
use serde_json::Value;

/// The tokens of one run, in chunks.
pub(super) struct PortTokens {
    run: Run<Chunk>,
    name: Name,
    /// The start of a line that is not complete.
    line: Vec<u8>,
    /// The last token so far.
    pending: Option<Sampled>,
    /// The run has ended.
    read: bool,
    /// The metadata was yielded, and nothing more follows.
    reported: bool,
}

impl PortTokens {
    pub(super) fn new(kernel: &Kernel, name: &str, args: Args) -> Self {
        // The lines of this port have the ids as well; the text is not asked for, because base clients get tokens alone.
        let ports = [Port::LOGPROBS].into_iter().collect();
        let run = kernel.run::<Chunk>(name, args);
        Self {
            run: run.wanting(Want::from(RequestedPorts::Only(ports))),
            name: Name::shared(name),
            line: Vec::new(),
            pending: None,
            read: false,
            reported: false,
        }
    }

    /// The tokens of the lines that are whole now.
    fn tokens(&mut self, data: &[u8]) -> Result<Tokens, Error> {
        let mut tokens = Tokens::default();
        let mut pieces = data.split(|byte| *byte == b'\n');
        // Chunks need not end with a line: what follows the last line feed waits for the next chunk.
        let rest = pieces.next_back().unwrap_or_default();
        for piece in pieces {
            self.line.extend_from_slice(piece);
            let line = std::mem::take(&mut self.line);
            let token = sampled(&line).ok_or_else(|| Error::Protocol {
                peer: self.name.clone(),
                why: "a line of its log-probabilities cannot be read".into(),
            })?;
            tokens.tokens.extend(self.pending.replace(token));
        }
        self.line.extend_from_slice(rest);
        // The peer need not send a line feed at all.
        if self.line.len() > LINE_BYTES_MAX {
            return Err(Error::Limit {
                name: "logprobs_line_bytes",
                max: LINE_BYTES_MAX as u64,
            });
        }
        Ok(tokens)
    }
}

impl Stream for PortTokens {
    type Item = Result<Chunk, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        while !this.read {
            let Some(chunk) = ready!(Pin::new(&mut this.run).poll_next(cx)) else {
                this.read = true;
                break;
            };
            let tokens = match chunk.and_then(|chunk| this.tokens(&chunk.data)) {
                Ok(tokens) => tokens,
                Err(error) => return Poll::Ready(Some(Err(error))),
            };
            if !tokens.tokens.is_empty() {
                return Poll::Ready(Some(Ok(Chunk::empty().with_inner(tokens))));
            }
        }
        if let Some(last) = this.pending.take() {
            let mut tokens = Tokens::default();
            tokens.tokens.push(last);
            return Poll::Ready(Some(Ok(Chunk::empty().with_inner(tokens))));
        }
        // Last, in a chunk of its own: only after the end of the run is the metadata final, with usage and finish.
        let reported = std::mem::replace(&mut this.reported, true);
        Poll::Ready((!reported).then(|| Ok(Chunk::empty().with_meta(this.run.meta().clone()))))
    }
}

/// Parses a line: a token, and its alternatives. A number that JSON cannot express is null there.
fn sampled(line: &[u8]) -> Option<Sampled> {
    let line: Value = serde_json::from_slice(line).ok()?;
    let id = |value: &Value| u32::try_from(value.get("token_id")?.as_u64()?).ok();
    #[allow(
        clippy::cast_possible_truncation,
        reason = "written from a float of 32 bits"
    )]
    let logprob = |value: &Value, none: f32| {
        let number = value.get("logprob").and_then(Value::as_f64);
        number.map_or(none, |number| number as f32)
    };
    let top = line.get("top").and_then(Value::as_array);
    let top = top.into_iter().flatten();
    Some(Sampled {
        id: id(&line)?,
        logprob: logprob(&line, f32::NAN),
        rank: None,
        top: top
            .filter_map(|best| Some((id(best)?, logprob(best, f32::NEG_INFINITY))))
            .collect(),
        special: false,
        forced: false,
    })
}

/// Bytes of a line: enough for a token with its bytes, and 1,000 alternatives with theirs.
const LINE_BYTES_MAX: usize = 1 << 20;
