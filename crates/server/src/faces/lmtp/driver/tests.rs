//! Connections whose transport the test plays, so that everything happens in a chosen order.

use std::collections::VecDeque;
use std::task::Waker;

use sapwood_engine::api::{ChatRequest, EngineError, SharedVocabulary, Vocabulary};
use sapwood_engine::scripted::{Config, Scripted};
use sapwood_engine::{Engine, EngineOwner};
use sapwood_kernel::{Call, Fun, Function, Kernel, ModelFacts, Spec, model};
use sapwood_proto::steer::Token;

use super::*;
use crate::server::{self, Server};

const AGREE: &str = r#"MODEL_INFO {"stream_id":0,"model":"m","data":{"lmtp":{"version":2,"features":["resume","text"]}}}"#;
const GENERATE: &str = r#"GENERATE {"model":"m","prompt":[7],"stream_id":1}"#;

/// Yields these messages and nothing more.
#[derive(Default)]
struct PlayedTransport {
    inputs: VecDeque<ByteString>,
    sent: String,
    /// Called when the transport is asked whether the connection is lost, which it is afterwards.
    before_loss: Option<Box<dyn FnMut() + Send>>,
}

impl PlayedTransport {
    fn of(inputs: &[&str]) -> Self {
        Self {
            inputs: inputs.iter().copied().map(ByteString::from).collect(),
            ..Self::default()
        }
    }
}

impl LmtpTransport for PlayedTransport {
    fn poll_receive(&mut self, _: &mut Context<'_>) -> Poll<LmtpInput> {
        let next = self.inputs.pop_front().map(LmtpInput::Text);
        next.map_or(Poll::Pending, Poll::Ready)
    }

    fn poll_closed(&mut self, _: bool, _: &mut Context<'_>) -> Poll<()> {
        let Some(mut before_loss) = self.before_loss.take() else {
            return Poll::Pending;
        };
        before_loss();
        Poll::Ready(())
    }

    fn poll_room(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        Poll::Ready(Ok(()))
    }

    fn send(&mut self, message: Bytes) -> Result<(), ClientClosed> {
        self.sent.push_str(&String::from_utf8_lossy(&message));
        Ok(())
    }

    fn poll_sent(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ClientClosed>> {
        Poll::Ready(Ok(()))
    }
}

/// A model that is never stepped: its streams stay open.
fn standing() -> (EngineOwner, Fun) {
    let scripted = Box::new(Scripted::new(Config::default()).unwrap());
    let (owner, engine) = Engine::by_hand(scripted, sapwood_engine::Config::default());
    (owner, model("m", engine))
}

fn context(function: Fun) -> Arc<LmtpContext> {
    let kernel = Kernel::new();
    kernel.add(function).unwrap();
    let server = Server::builder(server::Config::default(), Vec::new()).unwrap();
    let shared = server.shared().clone();
    Arc::new(LmtpContext::new(
        shared,
        kernel,
        crate::faces::lmtp::Config::default(),
    ))
}

fn driver(context: &Arc<LmtpContext>) -> ConnectionDriver {
    let connection = LmtpClientInfo {
        identity: Some(CallerIdentity::Anonymous(None)),
        ..LmtpClientInfo::of_lines()
    };
    ConnectionDriver::new(context, connection)
}

#[tokio::test]
async fn lm_964_a_session_is_kept_where_the_connection_that_takes_it_over_is_lost_meanwhile() {
    let (_owner, function) = standing();
    let context = context(function);
    let mut cx = Context::from_waker(Waker::noop());
    let (mut old, _wire, name) = opened(&context, &[AGREE, GENERATE]);
    let mut new = driver(&context);
    let mut wire = PlayedTransport::of(&[AGREE, &resume(&name, "")]);
    wire.before_loss = Some(Box::new(move || {
        let mut cx = Context::from_waker(Waker::noop());
        let end = old.poll_end(&mut PlayedTransport::default(), &mut cx);
        assert_eq!(end, Poll::Ready(ConversationEnd::Taken));
    }));
    let end = new.poll_end(&mut wire, &mut cx);
    assert_eq!(end, Poll::Ready(ConversationEnd::Lost));
    assert_eq!((new.session.live(), new.works.len()), (1, 1));
    let cancelled = &context.shared.metrics.cancelled;
    assert_eq!(cancelled.with_label_values(&["client"]).get(), 0);
}

/// A connection that has read these messages, and the name under which its session can be resumed.
fn opened(
    context: &Arc<LmtpContext>,
    inputs: &[&str],
) -> (ConnectionDriver, PlayedTransport, String) {
    let (mut driver, mut wire) = (driver(context), PlayedTransport::of(inputs));
    let end = driver.poll_end(&mut wire, &mut Context::from_waker(Waker::noop()));
    assert!(end.is_pending());
    let name = driver.registration.as_ref().unwrap().name().to_owned();
    (driver, wire, name)
}

/// A RESUME of the first stream of this session, with `blank` in it.
fn resume(name: &str, blank: &str) -> String {
    format!(
        r#"RESUME {{"stream_id":9,"model":"m","session":"{name}","streams":[{{"stream_id":1,"after_seq":-1}}]{blank}}}"#
    )
}

/// Nothing wakes the new connection but the old one's answer.
#[tokio::test]
async fn lm_964_a_session_is_taken_over_after_a_long_resume_was_read_on_another_thread() {
    let (_owner, function) = standing();
    let context = context(function);
    let mut noop = Context::from_waker(Waker::noop());
    let (mut old, _wire, name) = opened(&context, &[AGREE, GENERATE]);
    let long = resume(&name, &" ".repeat(OFFLOAD_BYTES));
    let mut new = driver(&context);
    let task = tokio::spawn(async move {
        let mut wire = PlayedTransport::of(&[AGREE, &long]);
        let comes = std::future::poll_fn(|cx| {
            assert!(new.poll_end(&mut wire, cx).is_pending());
            if new.session.live() == 1 {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        });
        comes.await;
        new.works.len()
    });
    while old
        .poll_end(&mut PlayedTransport::default(), &mut noop)
        .is_pending()
    {
        tokio::task::yield_now().await;
    }
    assert_eq!(task.await.unwrap(), 1);
}

#[tokio::test]
async fn lm_964_a_stream_that_was_read_on_another_thread_is_handed_over_with_its_work() {
    let (_owner, function) = standing();
    let context = context(function);
    let mut noop = Context::from_waker(Waker::noop());
    let (mut old, mut wire, name) = opened(&context, &[AGREE]);
    let blank = " ".repeat(OFFLOAD_BYTES);
    let long = format!(r#"GENERATE {{"model":"m","prompt":[7],"stream_id":1{blank}}}"#);
    wire.inputs.push_back(long.into());
    assert!(old.poll_end(&mut wire, &mut noop).is_pending());
    // The session is asked for while the message is read.
    let (mut new, mut other) = (
        driver(&context),
        PlayedTransport::of(&[AGREE, &resume(&name, "")]),
    );
    assert!(new.poll_end(&mut other, &mut noop).is_pending());
    let end = std::future::poll_fn(|cx| old.poll_end(&mut wire, cx)).await;
    assert_eq!(end, ConversationEnd::Taken);
    assert!(new.poll_end(&mut other, &mut noop).is_pending());
    assert_eq!((new.session.live(), new.works.len()), (1, 1));
}

/// A vocabulary whose tokenizer panics.
struct BrokenVocabulary(SharedVocabulary);

impl Vocabulary for BrokenVocabulary {
    fn size(&self) -> usize {
        self.0.size()
    }

    fn tokenize(&self, _: &str, _: bool) -> Vec<Token> {
        panic!("on purpose")
    }

    fn bytes(&self, token: Token) -> &[u8] {
        self.0.bytes(token)
    }

    fn is_special(&self, token: Token) -> bool {
        self.0.is_special(token)
    }

    fn is_end(&self, token: Token) -> bool {
        self.0.is_end(token)
    }

    fn bos(&self) -> Option<Token> {
        self.0.bos()
    }

    fn end_of_turn(&self) -> Option<Token> {
        self.0.end_of_turn()
    }

    fn chat(&self, chat: &ChatRequest) -> Result<Vec<Token>, EngineError> {
        self.0.chat(chat)
    }
}

/// A model with that vocabulary.
struct BrokenModel(Spec, Fun);

impl BrokenModel {
    fn of(function: Fun) -> Fun {
        let mut spec = function.spec().clone();
        let ModelFacts {
            info,
            vocabulary,
            defaults,
        } = ModelFacts::clone(spec.facts.as_ref().unwrap());
        let vocabulary = Arc::new(BrokenVocabulary(vocabulary));
        spec.facts = Some(Arc::new(ModelFacts {
            info,
            vocabulary,
            defaults,
        }));
        Arc::new(Self(spec, function))
    }
}

impl Function for BrokenModel {
    fn spec(&self) -> &Spec {
        &self.0
    }

    fn call(&self, call: Call) -> sapwood_kernel::Chunks {
        self.1.call(call)
    }
}

/// Nothing else wakes the connection of a client that waits for its answer.
#[tokio::test]
async fn lm_604_a_stream_starts_at_once_after_its_message_was_read_on_another_thread() {
    let (mut owner, function) = standing();
    let context = context(function);
    let blank = " ".repeat(OFFLOAD_BYTES);
    let long = format!(r#"GENERATE {{"model":"m","prompt":[7],"stream_id":1{blank}}}"#);
    let mut driver = driver(&context);
    let mut wire = PlayedTransport::of(&[AGREE, &long]);
    let read = std::future::poll_fn(|cx| {
        assert!(driver.poll_end(&mut wire, cx).is_pending());
        let has_read = driver.reading.is_none() && driver.session.live() == 1;
        if has_read {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    });
    read.await;
    assert_eq!(owner.step(Time::ZERO).admitted.len(), 1);
}

/// A short message is read in place, and a long one on a thread of the pool.
#[tokio::test]
async fn lm_505_open_streams_get_an_error_item_where_reading_a_message_panics() {
    for bytes in [1, OFFLOAD_BYTES] {
        let (_owner, function) = standing();
        let context = context(BrokenModel::of(function));
        let text = "a".repeat(bytes);
        let broken = format!(r#"TOKENIZE {{"stream_id":2,"model":"m","text":"{text}"}}"#);
        let mut driver = driver(&context);
        let mut wire = PlayedTransport::of(&[AGREE, GENERATE, &broken]);
        let end = driver.run(&mut wire).await;
        assert_eq!(end, ConversationEnd::Close(LmtpClose::INTERNAL));
        let reported = wire.sent.lines().find(|line| line.starts_with("TOKEN"));
        let reported = reported.unwrap_or_default();
        assert!(
            reported.contains(r#""stream_id":1"#) && reported.contains("engine_error"),
            "{bytes}: {}",
            wire.sent
        );
        assert_eq!(driver.works.len(), 0);
        let cancelled = &context.shared.metrics.cancelled;
        assert_eq!(cancelled.with_label_values(&["panic"]).get(), 1);
    }
}
