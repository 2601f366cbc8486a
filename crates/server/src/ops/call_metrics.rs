//! Counts the end of each call of a model once, whichever face it came through (`requests_total` of OA-801), and notes
//! its cost in the trace of the request that made it (OA-804).

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use prometheus::{HistogramVec, IntCounterVec};
use sapwood_kernel::{Call, Chunk, Chunks, Error, Layer, Name, Next, Result, RunUsage};
use sapwood_proto::code::Code;
use tokio::time::Instant;

use crate::http::request_trace::RequestTrace;
use crate::ops::metrics::{FaceLabel, ServerMetrics};

/// A layer for the kernel of one face. It has to be the outermost one, so that it sees what the others refuse.
#[derive(Clone, Debug)]
pub struct CallMetricsLayer {
    requests: IntCounterVec,
    rejected: IntCounterVec,
    first_response_ms: HistogramVec,
    face: FaceLabel,
}

impl CallMetricsLayer {
    /// Counts into `metrics`, as work that came through `face`.
    #[must_use]
    pub fn new(metrics: &ServerMetrics, face: FaceLabel) -> Self {
        Self {
            requests: metrics.requests.clone(),
            rejected: metrics.rejected.clone(),
            first_response_ms: metrics.first_response_ms.clone(),
            face,
        }
    }
}

impl Layer for CallMetricsLayer {
    fn call(&self, mut call: Call, next: Next) -> Chunks {
        // For every function and not only for models: a function may call models, and they find the trace in its extensions.
        let trace = RequestTrace::of(&mut call);
        if !next.spec().model {
            return next.call(call);
        }
        let model = next.spec().name.clone();
        let end = CallCountGuard {
            layer: self.clone(),
            model,
            code: None,
            request_trace: trace,
            began: None,
            answered: false,
            usage: None,
        };
        Box::pin(CountedCall {
            chunks: next.call(call),
            end,
        })
    }
}

/// A running call of a model.
struct CountedCall {
    chunks: Chunks,
    end: CallCountGuard,
}

impl Stream for CountedCall {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // At the first poll and not when the call is made: one that is never polled has done no work and is not counted.
        self.end.begin();
        let item = ready!(self.chunks.as_mut().poll_next(cx));
        match &item {
            Some(Ok(chunk)) => self.end.see(chunk),
            Some(Err(error)) => {
                // The first error is the end, whatever the stream yields after it.
                self.end.code.get_or_insert_with(|| error.code().name());
                // Always a limit of our own key: a limit of an upstream is reported as another error.
                if matches!(error, Error::RateLimited { .. }) {
                    let rejected = &self.end.layer.rejected;
                    rejected.with_label_values(&["key"]).inc();
                }
            }
            None => {
                self.end.code.get_or_insert("ok");
            }
        }
        Poll::Ready(item)
    }
}

/// Counts the call on drop, so that a call that is dropped early is counted too.
struct CallCountGuard {
    layer: CallMetricsLayer,
    model: Name,
    /// How it ended; `None` while it runs.
    code: Option<&'static str>,
    request_trace: Option<RequestTrace>,
    /// When it was first polled.
    began: Option<Instant>,
    /// Some output was yielded.
    answered: bool,
    /// Its token usage, as its model reported last.
    usage: Option<RunUsage>,
}

impl CallCountGuard {
    fn begin(&mut self) {
        if self.began.is_some() {
            return;
        }
        self.began = Some(Instant::now());
        if let Some(trace) = &self.request_trace {
            trace.note(|entry| entry.sums.called(&self.model));
        }
    }

    fn see(&mut self, chunk: &Chunk) {
        // The last report counts; chunks may have metadata without usage, which must not replace it.
        if let Some(meta) = &chunk.meta
            && meta.usage != RunUsage::default()
        {
            self.usage = Some(meta.usage);
        }
        if self.answered || chunk.data.is_empty() {
            return;
        }
        self.answered = true;
        let Some(waited) = self.began.map(|began| began.elapsed()) else {
            return;
        };
        let first = &self.layer.first_response_ms;
        first
            .with_label_values(&[self.model.as_str()])
            .observe(waited.as_secs_f64() * 1e3);
        if let Some(trace) = &self.request_trace {
            trace.note(|entry| entry.sums.first_output = entry.sums.first_output.or(Some(waited)));
        }
    }
}

impl Drop for CallCountGuard {
    fn drop(&mut self) {
        if let (Some(trace), Some(usage)) = (&self.request_trace, self.usage) {
            trace.note(|entry| entry.sums.cost(usage));
        }
        if self.began.is_some() {
            // No end was seen, so the call was dropped.
            let code = self.code.unwrap_or(Code::Cancelled.name());
            let labels = [self.layer.face.name(), self.model.as_str(), code];
            self.layer.requests.with_label_values(&labels).inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use sapwood_kernel::{Kernel, Mime, OutputSpec, Port, Spec, raw};

    use super::*;

    #[tokio::test]
    async fn oa_801_calls_of_models_are_counted_once_by_how_they_end() {
        let metrics = ServerMetrics::new().unwrap();
        let kernel = Kernel::new();
        let model = |name: &'static str, items: fn() -> Vec<Result<Chunk>>| {
            let mut spec = Spec::new(name, "").outputs([OutputSpec::new(Port::MAIN, Mime::TEXT)]);
            spec.model = true;
            raw(spec, move |_| {
                stream::iter(items())
                    .chain(stream::pending().take(usize::from(name == "hangs")))
                    .boxed()
            })
        };
        kernel
            .add(model("good", || vec![Ok(Chunk::text("a"))]))
            .unwrap();
        kernel
            .add(model("bad", || {
                vec![Ok(Chunk::text("a")), Err(Error::Deadline)]
            }))
            .unwrap();
        kernel
            .add(model("stopped", || vec![Err(Error::Cancelled)]))
            .unwrap();
        kernel
            .add(model("hangs", || vec![Ok(Chunk::text("a"))]))
            .unwrap();
        let refused = || {
            let why = "this key has used what it may".into();
            let retry_after = None;
            vec![Err(Error::RateLimited { why, retry_after })]
        };
        kernel.add(model("refused", refused)).unwrap();
        kernel.layer(CallMetricsLayer::new(&metrics, FaceLabel::Evergreen));
        assert!(kernel.run::<String>("refused", ()).await.is_err());
        assert_eq!(metrics.rejected.with_label_values(&["key"]).get(), 1);
        assert_eq!(kernel.run::<String>("good", ()).await.unwrap(), "a");
        assert!(kernel.run::<String>("bad", ()).await.is_err());
        drop(kernel.run::<String>("good", ()));
        // Nobody has dropped it, and nothing after its error makes it well.
        let call = |name| {
            let chunks = kernel.run::<Chunk>(name, ());
            chunks.map(|chunk| chunk.is_ok()).collect::<Vec<_>>()
        };
        assert_eq!(call("stopped").await, [false]);
        let mut cut = kernel.run::<String>("hangs", ());
        cut.next().await.unwrap().unwrap();
        drop(cut);
        let count = |model, code| {
            metrics
                .requests
                .with_label_values(&["evergreen", model, code])
                .get()
        };
        assert_eq!(
            [
                count("good", "ok"),
                count("bad", "deadline-exceeded"),
                count("hangs", "cancelled"),
                count("stopped", "cancelled"),
            ],
            [1; 4]
        );
        assert_eq!((count("good", "cancelled"), count("stopped", "ok")), (0, 0));
    }
}
