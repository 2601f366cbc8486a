//! Every way to end, with text held back as the possible beginning of a stop text.

use std::time::Duration;

use sapwood_proto::steer::Post;

use super::harness::{Bench, read, say};
use super::probe::Probe;
use crate::api::{Reason, Request, Stop};
use crate::scripted::Config as Script;

/// A request whose `I type O` is held back from the last letter on, with whatever follows it in the script.
fn held(text: &str, change: impl FnOnce(&mut Request)) -> Request {
    let mut request = say(text);
    request.stop = vec!["Observation:".to_owned()];
    change(&mut request);
    request
}

fn steered(request: &mut Request, post: fn(u32, &[u32]) -> sapwood_proto::steer::Steered<Post>) {
    let mut probe = Probe::new();
    probe.post = post;
    request.steer = Some(Box::new(probe));
}

#[test]
fn what_was_held_back_comes_with_every_end_but_that_stop_text() {
    let tokens = |text: &str| Some(Stop::Tokens(text.bytes().map(u32::from).collect()));
    let end = Some(Stop::Tokens(vec![257]));
    let cases = [
        (
            "end of text",
            held("I type O", |_| {}),
            "I type O",
            Reason::Stop,
            end,
        ),
        (
            "a stop token",
            held("I type O!", |request| {
                request.stop_sequences = vec![vec![33]]
            }),
            "I type O",
            Reason::Stop,
            tokens("!"),
        ),
        (
            "two stop tokens",
            held("I type O!?", |request| {
                request.stop_sequences = vec![vec![33, 63]]
            }),
            "I type O!",
            Reason::Stop,
            tokens("!?"),
        ),
        (
            "length",
            held("I type O and more", |request| request.max_tokens = Some(8)),
            "I type O",
            Reason::Length,
            None,
        ),
        (
            "the stop text",
            held("I type Observation: x", |_| {}),
            "I type ",
            Reason::Stop,
            Some(Stop::Text("Observation:".to_owned())),
        ),
        (
            "an unfinished character",
            held("I type O\u{e9}", |request| request.max_tokens = Some(9)),
            "I type O\u{fffd}",
            Reason::Length,
            None,
        ),
    ];
    for (what, request, text, reason, stop) in cases {
        let answer = Bench::new(Script::default()).answer(request);
        let (said, _, finish) = &answer.choices[0];
        let finish = finish.as_ref().unwrap();
        assert_eq!((said.as_str(), finish.reason), (text, reason), "{what}");
        assert_eq!(finish.stop, stop, "{what}");
    }
}

#[test]
fn what_was_held_back_comes_when_a_steerer_stops() {
    let request = held("I type O", |request| {
        steered(request, |_, tokens| {
            Ok(if tokens == [u32::from(b'O')] {
                Post::Stop
            } else {
                Post::Continue
            })
        });
    });
    let answer = Bench::new(Script::default()).answer(request);
    let (said, _, finish) = &answer.choices[0];
    let reason = finish.as_ref().unwrap().reason;
    assert_eq!((said.as_str(), reason), ("I type O", Reason::Controller));
}

#[test]
fn what_was_held_back_comes_when_the_model_itself_ends_or_fails() {
    for (step, reason) in [
        (r#"{"finish": "stop"}"#, Some(Reason::Stop)),
        (r#"{"finish": "length"}"#, Some(Reason::Length)),
        (r#"{"error": {"code": "internal"}}"#, None),
        (r#"{"panic": true}"#, None),
    ] {
        let rules = format!(
            r#"{{"script": "steps", "rules": [{{"steps": [{{"text": "I type O"}}, {step}]}}]}}"#
        );
        let mut bench = Bench::new(serde_json::from_str(&rules).unwrap());
        let answer = bench.answer(held("x", |_| {}));
        let (said, _, finish) = &answer.choices[0];
        assert_eq!(said, "I type O", "{step}");
        assert_eq!(
            finish.as_ref().map(|finish| finish.reason),
            reason,
            "{step}"
        );
        assert_eq!(answer.fault.is_some(), reason.is_none(), "{step}");
    }
}

#[test]
fn what_was_held_back_comes_when_the_reader_or_the_clock_ends_it() {
    for stopped in [true, false] {
        let rules =
            r#"{"script": "steps", "rules": [{"steps": [{"text": "I type O"}, {"hang": true}]}]}"#;
        let mut bench = Bench::new(serde_json::from_str(rules).unwrap());
        let request = held("x", |request| {
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
        assert_eq!(answer.fault.is_none(), stopped);
    }
}
