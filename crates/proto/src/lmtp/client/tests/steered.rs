//! Streams with controllers.

use std::sync::Arc;

use super::*;
use crate::steer::ControllerChoice;

fn steered() -> GenerateRequest {
    let choice = ControllerChoice {
        id: "yes-latest".into(),
        arg: r#"{"n":1}"#.into(),
    };
    GenerateRequest {
        controller: Some(Arc::new(choice)),
        ..wanted()
    }
}

/// A client that has agreed on controllers, with a steered stream 2.
fn client() -> ClientMachine {
    let mut client = ClientMachine::new(ClientTimeouts::default());
    client.negotiate("m", Features::ALL, Time::ZERO).unwrap();
    let answer =
        r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":2,"features":["controllers"]}}]"#;
    client.handle(answer, Time::ZERO);
    client.poll().unwrap();
    let (_, message) = client.generate("m", &steered(), Time::ZERO).unwrap();
    let end = br#""controller":"yes-latest","controller_arg":"{\"n\":1}"}"#;
    assert!(message.ends_with(end), "{message:?}");
    client
}

fn received(client: &mut ClientMachine, items: &str) -> Vec<ReceivedItem> {
    client.handle(&format!("TOKEN [{items}]"), Time::ZERO);
    let events = std::iter::from_fn(|| client.poll());
    let items = events.map(|event| match event {
        ClientEvent::Item(_, item) => item,
        other => panic!("{other:?}"),
    });
    items.collect()
}

/// LM-704: never dropped, because the output would be unconstrained.
#[test]
fn lm_712_a_controller_is_sent_only_to_a_peer_that_agreed_on_it() {
    let refused = ClientMachine::new(ClientTimeouts::default())
        .generate("m", &steered(), Time::ZERO)
        .unwrap_err();
    assert_eq!(refused.reason, LmtpReason::UnsupportedOperation);
    assert!(refused.message.contains("'controller'"));
    client();
}

#[test]
fn lm_972_forced_tokens_backtracks_and_forks_are_read() {
    let mut client = client();
    let items = received(
        &mut client,
        concat!(
            r#"{"token":5,"stream_id":2,"logprob":0.0,"finish_reason":null,"forced":true},"#,
            r#"{"stream_id":2,"backtrack":1},"#,
            r#"{"stream_id":2,"sample":1,"fork_of":0,"inherited":4},"#,
            r#"{"token":6,"stream_id":2,"logprob":-0.5,"finish_reason":null,"sample":1},"#,
            r#"{"stream_id":2,"finish_reason":null,"sample":1,"sample_end":"stop","stop_by":"controller"}"#,
        ),
    );
    let branch = |item: &ReceivedItem| item.branch.clone().map(|branch| *branch);
    assert!(items[0].forced && items[0].branch.is_none());
    let backtrack = ReceivedBranch {
        backtrack: Some(1),
        ..ReceivedBranch::default()
    };
    assert_eq!((branch(&items[1]), items[1].sample), (Some(backtrack), 0));
    let fork = ReceivedBranch {
        fork_of: Some(0),
        inherited: Some(4),
        ..ReceivedBranch::default()
    };
    assert_eq!((branch(&items[2]), items[2].sample), (Some(fork), 1));
    assert_eq!((items[3].token, items[3].sample), (Some(6), 1));
    let end = branch(&items[4]).unwrap().end;
    assert_eq!(
        (end, items[4].finish.clone()),
        (Some(StreamFinish::Controller), None)
    );
    assert_eq!(client.outstanding(), 1);
}

#[test]
fn lm_973_a_failed_sample_does_not_end_its_stream_and_the_last_end_does() {
    let mut client = client();
    let failed = r#"{"stream_id":2,"finish_reason":null,"sample":1,"sample_end":"error","sample_error":"it trapped","code":"controller_failed"}"#;
    let items = received(&mut client, failed);
    let error = items[0].branch.as_ref().unwrap().error.clone().unwrap();
    assert_eq!(
        (error.reason, &*error.message),
        (LmtpReason::ControllerFailed, "it trapped")
    );
    assert_eq!(client.outstanding(), 1);
    let end = r#"{"stream_id":2,"finish_reason":"stop","sample":0,"sample_end":"stop","stop_by":"controller","usage":{"completion_tokens":3,"forced_tokens":2}}"#;
    let items = received(&mut client, end);
    assert_eq!(items[0].finish, Some(StreamFinish::Controller));
    assert_eq!(items[0].usage.map(|usage| usage.forced_tokens), Some(2));
    assert_eq!(client.outstanding(), 0);
}

/// LM-707: each sample has `max_tokens` of its own, and a peer that forks for ever is cut off.
#[test]
fn lm_707_the_tokens_of_all_samples_are_bounded() {
    let mut client = client();
    let item = r#"{"token":5,"stream_id":2,"logprob":0.0,"finish_reason":null,"sample":1}"#;
    for _ in 1..3 * SAMPLES_MAX {
        assert_eq!(received(&mut client, item)[0].finish, None);
    }
    assert_eq!(
        received(&mut client, item)[0].finish,
        Some(StreamFinish::Length)
    );
    assert_eq!(received(&mut client, item), []);
}
