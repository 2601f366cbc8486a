//! The outputs of an answer that a chat shows, as one stream.
//!
//! ```text
//!   node ─┬─ reasoning ──┐
//!         ├─ tool_calls ─┼─► AnswerPiece …      in this order, where several are ready
//!         └─ response ───┘
//! ```

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::{Stream, StreamExt};
use sapwood_kernel::{Json, Meta, Node, Port, Result, Run};
use serde_json::Value;

/// A part of an answer.
#[derive(Debug, PartialEq)]
pub(super) enum AnswerPiece {
    Reasoning(String),
    Text(String),
    /// A line for people about a call that the model made.
    Call(String),
}

/// Reads an answer. Its end is that of all its outputs; an error ends it.
pub(super) struct AnswerReader {
    /// `None` at its end, and if it is not wanted.
    reasoning: Option<Run<String>>,
    calls: Option<Run<Json<Value>>>,
    text: Run<String>,
    is_over: bool,
}

impl AnswerReader {
    pub(super) fn new(answer: &Node, with_reasoning: bool) -> Self {
        // Views of one node and not runs of its chunks, so that each decodes characters that two chunks share.
        let output = |port: Port| answer.port(port);
        // The first poll starts the call with the ports that views have requested by then, and a run requests its own
        // when it is polled.
        output(Port::MAIN);
        Self {
            reasoning: with_reasoning.then(|| output(Port::REASONING).run()),
            calls: Some(output(Port::TOOL_CALLS).run()),
            text: answer.run(),
            is_over: false,
        }
    }

    /// The metadata so far.
    pub(super) const fn meta(&self) -> &Meta {
        self.text.meta()
    }
}

impl Stream for AnswerReader {
    type Item = Result<AnswerPiece>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // Reasoning first: over a session each output has a stream of its own, and what was written first need not be
        // read first.
        if let Poll::Ready(Some(text)) = poll(&mut this.reasoning, cx) {
            return Poll::Ready(Some(Ok(AnswerPiece::Reasoning(text))));
        }
        if let Poll::Ready(Some(Json(call))) = poll(&mut this.calls, cx) {
            return Poll::Ready(Some(Ok(AnswerPiece::Call(described(&call)))));
        }
        if !this.is_over {
            match this.text.poll_next_unpin(cx) {
                Poll::Ready(None) => this.is_over = true,
                next => return next.map(|next| next.map(|text| text.map(AnswerPiece::Text))),
            }
        }
        if this.reasoning.is_some() || this.calls.is_some() {
            // They read the same log to its end, and have registered their wakers above.
            return Poll::Pending;
        }
        Poll::Ready(None)
    }
}

/// The next item of an output beside the text. The error of an answer is that of its text, too, and reported there.
fn poll<T: sapwood_kernel::FromChunks>(
    output: &mut Option<Run<T>>,
    cx: &mut Context<'_>,
) -> Poll<Option<T>> {
    let Some(run) = output else {
        return Poll::Ready(None);
    };
    match run.poll_next_unpin(cx) {
        Poll::Ready(Some(Ok(item))) => Poll::Ready(Some(item)),
        Poll::Ready(_) => {
            *output = None;
            Poll::Ready(None)
        }
        Poll::Pending => Poll::Pending,
    }
}

/// A call as text for people.
fn described(call: &Value) -> String {
    let name = call.get("name").and_then(Value::as_str).unwrap_or("?");
    let arguments = call.get("arguments").map(Value::to_string);
    format!(
        "The model calls the tool {name} with {}; a chat runs no tools.",
        arguments.as_deref().unwrap_or("nothing")
    )
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use sapwood_kernel::{Chunk, Error, Mime};

    use super::*;

    fn answer(end: Option<Error>) -> Node {
        let call =
            "{\"index\":0,\"id\":\"a\",\"name\":\"weather\",\"arguments\":{\"city\":\"Bergen\"}}\n";
        let (first, second) = "Ich grüße".as_bytes().split_at(7);
        let chunks = vec![
            Chunk::text("I think").on(Port::REASONING),
            Chunk::bytes(first.to_vec()).with_mime(Mime::TEXT),
            Chunk::text(" again").on(Port::REASONING),
            Chunk::bytes(second.to_vec()).with_mime(Mime::TEXT),
            Chunk::bytes(call)
                .with_mime(Mime::NDJSON)
                .on(Port::TOOL_CALLS),
        ];
        let chunks = chunks.into_iter().map(Ok);
        Node::new(stream::iter(chunks.chain(end.map(Err))))
    }

    #[tokio::test]
    async fn an_answer_has_its_reasoning_its_calls_and_its_text() {
        let call =
            "The model calls the tool weather with {\"city\":\"Bergen\"}; a chat runs no tools.";
        for with_reasoning in [true, false] {
            let (mut thought, mut text, mut calls) = (String::new(), String::new(), Vec::new());
            let mut reader = AnswerReader::new(&answer(None), with_reasoning);
            while let Some(piece) = reader.next().await {
                match piece.unwrap() {
                    AnswerPiece::Reasoning(piece) => thought.push_str(&piece),
                    AnswerPiece::Text(piece) => text.push_str(&piece),
                    AnswerPiece::Call(call) => calls.push(call),
                }
            }
            let expect = if with_reasoning { "I think again" } else { "" };
            assert_eq!((&*thought, &*text), (expect, "Ich grüße"));
            assert_eq!(calls, [call]);
        }
    }

    #[tokio::test]
    async fn an_error_is_reported_once() {
        let reader = AnswerReader::new(&answer(Some(Error::Cancelled)), true);
        let errors = reader.filter(|piece| std::future::ready(piece.is_err()));
        assert_eq!(errors.count().await, 1);
    }
}
