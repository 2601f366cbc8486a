//! Every way to end, with text held back as the possible start of a stop string.

use std::time::Duration;

use sapwood_proto::steer::Post;

use super::harness::{Bench, read, request_for};
use super::probe::Probe;
use crate::api::{FinishReason, GenerationRequest, StopCause};
use crate::scripted::Config as Script;

/// A request whose `I type O` is held back from the last letter on, with whatever follows it in the script.
fn request_that_holds_back(
    text: &str,
    change: impl FnOnce(&mut GenerationRequest),
) -> GenerationRequest {
    let mut request = request_for(text);
    request.params.stop = vec!["Observation:".to_owned()];
    change(&mut request);
    request
}

fn steered(
    request: &mut GenerationRequest,
    post: fn(u32, &[u32]) -> sapwood_proto::steer::Steered<Post>,
) {
    let mut probe = Probe::new();
    probe.post = post;
    request.steer = Some(Box::new(probe));
}

#[test]
fn held_back_text_is_sent_at_every_end_except_its_stop_string() {
    let tokens = |text: &str| Some(StopCause::Tokens(text.bytes().map(u32::from).collect()));
    let end = Some(StopCause::Tokens(vec![257]));
    let cases = [
        (
            "end of text",
            request_that_holds_back("I type O", |_| {}),
            "I type O",
            FinishReason::Stop,
            end,
        ),
        (
            "a stop token",
            request_that_holds_back("I type O!", |request| {
                request.params.stop_sequences = vec![vec![33]]
            }),
            "I type O",
            FinishReason::Stop,
            tokens("!"),
        ),
        (
            "two stop tokens",
            request_that_holds_back("I type O!?", |request| {
                request.params.stop_sequences = vec![vec![33, 63]]
            }),
            "I type O!",
            FinishReason::Stop,
            tokens("!?"),
        ),
        (
            "length",
            request_that_holds_back("I type O and more", |request| {
                request.params.max_tokens = Some(8)
            }),
            "I type O",
            FinishReason::Length,
            None,
        ),
        (
            "the stop text",
            request_that_holds_back("I type Observation: x", |_| {}),
            "I type ",
            FinishReason::Stop,
            Some(StopCause::Text("Observation:".to_owned())),
        ),
        (
            "an unfinished character",
            request_that_holds_back("I type O\u{e9}", |request| {
                request.params.max_tokens = Some(9)
            }),
            "I type O\u{fffd}",
            FinishReason::Length,
            None,
        ),
    ];
    for (what, request, text, reason, stop) in cases {
        let answer = Bench::new(Script::default()).answer(request);
        let (reply, _, finish) = &answer.choices[0];
        let finish = finish.as_ref().unwrap();
        assert_eq!((reply.as_str(), finish.reason), (text, reason), "{what}");
        assert_eq!(finish.stop, stop, "{what}");
    }
}

#[test]
fn held_back_text_is_sent_when_a_steerer_stops() {
    let request = request_that_holds_back("I type O", |request| {
        steered(request, |_, tokens| {
            Ok(if tokens == [u32::from(b'O')] {
                Post::Stop
            } else {
                Post::Continue
            })
        });
    });
    let answer = Bench::new(Script::default()).answer(request);
    let (reply, _, finish) = &answer.choices[0];
    let reason = finish.as_ref().unwrap().reason;
    assert_eq!(
        (reply.as_str(), reason),
        ("I type O", FinishReason::Controller)
    );
}

#[test]
fn held_back_text_is_sent_when_the_model_ends_or_fails() {
    for (step, reason) in [
        (r#"{"finish": "stop"}"#, Some(FinishReason::Stop)),
        (r#"{"finish": "length"}"#, Some(FinishReason::Length)),
        (r#"{"error": {"code": "internal"}}"#, None),
        (r#"{"panic": true}"#, None),
    ] {
        let rules = format!(
            r#"{{"script": "steps", "rules": [{{"steps": [{{"text": "I type O"}}, {step}]}}]}}"#
        );
        let mut bench = Bench::new(serde_json::from_str(&rules).unwrap());
        let answer = bench.answer(request_that_holds_back("x", |_| {}));
        let (reply, _, finish) = &answer.choices[0];
        assert_eq!(reply, "I type O", "{step}");
        assert_eq!(
            finish.as_ref().map(|finish| finish.reason),
            reason,
            "{step}"
        );
        assert_eq!(answer.error.is_some(), reason.is_none(), "{step}");
    }
}

#[test]
fn held_back_text_is_sent_on_stop_and_timeout() {
    for stopped in [true, false] {
        let rules =
            r#"{"script": "steps", "rules": [{"steps": [{"text": "I type O"}, {"hang": true}]}]}"#;
        let mut bench = Bench::new(serde_json::from_str(rules).unwrap());
        let request = request_that_holds_back("x", |request| {
            request.timeout = Some(Duration::from_secs(1))
        });
        let mut handle = bench.submit(request);
        for _ in 0..20 {
            bench.step();
        }
        if stopped {
            handle.stop();
        } else {
            bench.now = bench.now + Duration::from_secs(1);
        }
        bench.step();
        let answer = read(&mut handle);
        assert_eq!(answer.text(), "I type O", "{stopped}");
        assert_eq!(answer.error.is_none(), stopped);
    }
}
