//! Requests on one stream, and the flag of the last response.

use futures::channel::mpsc;
use futures::stream;
use sapwood_engine::EngineOwner;
use sapwood_engine::scripted::ScriptedFailure;
use sapwood_proto::time::Time;
use sapwood_tests::{by_hand, until};

use super::*;

const EMPTY_FINAL: &str = "triton_enable_empty_final_response";

/// The example of the page, byte by byte in both directions.
#[tokio::test]
async fn tr_906_the_last_response_has_the_final_flag() {
    let request = b"\x0a\x01m\x1a\x017\x22\x28\x0a\x22triton_enable_empty_final_response\x12\x02\x08\x01\x2a\x16\x0a\
        \x0atext_input\x12\x05BYTES\x1a\x01\x01:\x06\x02\0\0\0hi";
    let end =
        b"\x12\x26\x0a\x01m\x12\x011\x1a\x017\x22\x1b\x0a\x15triton_final_response\x12\x02\x08\x01";
    let asked = ModelInferRequest::decode(&request[..]).unwrap();
    assert_eq!(asked.encode_to_vec(), request);

    // The end is known with the only response.
    let server = playing(vec![
        ScriptStep::Text("a ".into()),
        ScriptStep::Text("b".into()),
    ])
    .await;
    let mut grpc = Grpc::connect(&server).await;
    let received = grpc.all(vec![asked.clone()]).await;
    assert_eq!(received.len(), 1, "{received:?}");
    let only = received[0].infer_response.as_ref().unwrap();
    assert_eq!((&*text(only), last(only)), ("a b", true));

    // It is not known while the script pauses before its end; the test ends the pause.
    let pieces = vec![ScriptStep::Text("a".into()), ScriptStep::SleepMs(20)];
    let (mut owner, engine) = by_hand(steps(pieces));
    let kernel = Kernel::new();
    kernel.add(sapwood_kernel::model("m", engine)).unwrap();
    let server = Running::generating(kernel, Config::default()).await;
    let mut grpc = Grpc::connect(&server).await;
    let mut streamed = prompt("m", "7", "hi", true);
    for (began, (empty, expect)) in [(0, (true, None)), (1_000, (false, Some("")))] {
        streamed.parameters.insert(EMPTY_FINAL.into(), flag(empty));
        let (before, after) = (Time::from_millis(began), Time::from_millis(began + 500));
        let messages = stream::iter([streamed.clone()]);
        let asking = grpc.stream(messages, false);
        let mut answers = stepped(&mut owner, before, asking).await;
        let first = stepped(&mut owner, before, answers.message()).await;
        let first = first.unwrap().unwrap().infer_response.unwrap();
        assert_eq!((&*text(&first), last(&first)), ("a", false));
        let received = stepped(&mut owner, after, answers.message()).await;
        let received = received.unwrap().unwrap();
        let second = received.infer_response.as_ref().unwrap();
        assert!(last(second));
        assert!(answers.message().await.unwrap().is_none());
        match expect {
            None => assert_eq!(received.encode_to_vec(), end),
            Some(expect) => {
                assert_eq!(second.outputs[0].name, "text_output");
                assert_eq!(text(second), expect);
            }
        }
    }
}

/// The result of `waited` while the engine is stepped at this time.
async fn stepped<T>(owner: &mut EngineOwner, at: Time, waited: impl Future<Output = T>) -> T {
    tokio::pin!(waited);
    loop {
        owner.step(at);
        // Both may be cancelled: the future continues in the next turn.
        tokio::select! {
            biased;
            came = &mut waited => return came,
            () = tokio::task::yield_now() => {}
        }
    }
}

/// TR-906: a model with a custom signature sends nothing after its last payload, unless the request asks for it.
#[tokio::test]
async fn tr_1103_a_scripted_model_sends_the_requested_number_of_responses() {
    let server = parrot(|_| {}).await;
    let mut grpc = Grpc::connect(&server).await;
    let mut message = ModelInferRequest {
        model_name: "parrot".into(),
        id: "p".into(),
        inputs: vec![
            tensor("QUESTION", "BYTES", &[1, 1]),
            tensor("LIVE", "BOOL", &[1, 1]),
        ],
        raw_input_contents: vec![bytes("hello").into(), vec![1].into()],
        ..ModelInferRequest::default()
    };
    for (times, broken) in [(0, false), (1, false), (3, false), (2, true)] {
        message.parameters.insert("TIMES".into(), number(times));
        message.parameters.insert("BREAK".into(), flag(broken));
        message.parameters.insert(EMPTY_FINAL.into(), flag(true));
        let mut received = grpc.all(vec![message.clone()]).await;
        let end = received.pop().unwrap();
        let response = end.infer_response.unwrap();
        assert!(last(&response));
        assert_eq!(response.id, "p");
        let reply = received
            .iter()
            .map(|it| text(it.infer_response.as_ref().unwrap()));
        let reply: Vec<_> = reply
            .chain((!response.outputs.is_empty()).then(|| text(&response)))
            .collect();
        assert_eq!(
            reply,
            vec!["hello"; usize::try_from(times).unwrap()],
            "{times}"
        );
        let why = if broken { "the parrot is tired" } else { "" };
        assert_eq!(end.error_message, why);
    }
}

#[tokio::test]
async fn tr_904_requests_of_a_stream_run_concurrently_and_carry_their_ids() {
    let engine = spawned(steps(vec![
        ScriptStep::Text("a".into()),
        ScriptStep::Hang(true),
    ]));
    let kernel = kernel(&[("demo", script(Script::Words))]);
    kernel
        .add(sapwood_kernel::model("hangs", engine.clone()))
        .unwrap();
    let config = Config {
        grpc_requests_per_stream: 8,
        ..Config::default()
    };
    let server = Running::generating(kernel, config).await;
    let mut grpc = Grpc::connect(&server).await;
    let (mut send, messages) = mpsc::channel(16);
    let mut answers = grpc.stream(messages, false).await;
    for index in 0..8 {
        send.try_send(prompt("hangs", &format!("h{index}"), "x", true))
            .unwrap();
    }
    for _ in 0..8 {
        let received = answers
            .message()
            .await
            .unwrap()
            .unwrap()
            .infer_response
            .unwrap();
        assert_eq!((&*text(&received), last(&received)), ("a", false));
    }
    until("all of them run", || {
        engine.stats().requests_running.get() == 8
    })
    .await;

    // One more than may run at a time.
    send.try_send(prompt("demo", "more", "x", false)).unwrap();
    let received = answers.message().await.unwrap().unwrap();
    assert_eq!(received.error_message, "too many requests on this stream");
    assert_eq!(received.infer_response.unwrap().id, "more");

    // TR-907, TR-608: cancelling a call cancels all its requests.
    drop((answers, send));
    until("the sequences are gone", || {
        engine.stats().requests_running.get() == 0
    })
    .await;

    // Requests run concurrently, each with its responses in order; after a half-close the stream ends with OK.
    let all = (0..6).map(|index| {
        prompt(
            "demo",
            &index.to_string(),
            &format!("one two {index}"),
            true,
        )
    });
    let mut reply = vec![String::new(); 6];
    for answer in grpc.all(all.collect()).await {
        assert_eq!(answer.error_message, "");
        let received = answer.infer_response.unwrap();
        reply[received.id.parse::<usize>().unwrap()].push_str(&text(&received));
    }
    for (index, reply) in reply.iter().enumerate() {
        assert_eq!(*reply, format!("one two {index}"));
    }
}

/// TR-904: models that are not decoupled respond in the order of the requests.
#[tokio::test]
async fn tr_904_models_that_are_not_decoupled_keep_the_order() {
    let mut signature = Signature::union();
    signature.decoupled = false;
    let model = ModelOptions {
        signature: Some(signature),
        ..ModelOptions::default()
    };
    let rules = vec![
        ScriptRule {
            pattern: Some("slow".into()),
            steps: vec![ScriptStep::SleepMs(50), ScriptStep::Text("slow".into())],
        },
        ScriptRule {
            pattern: None,
            steps: vec![ScriptStep::Text("fast".into())],
        },
    ];
    let config = scripted::Config {
        rules,
        ..script(Script::Steps)
    };
    let face = Config {
        models: [("m".to_owned(), model)].into(),
        ..Config::default()
    };
    let server = Running::generating(kernel(&[("m", config)]), face).await;
    let mut grpc = Grpc::connect(&server).await;
    let all = grpc
        .all(vec![
            prompt("m", "1", "slow", false),
            prompt("m", "2", "x", false),
        ])
        .await;
    let received: Vec<_> = all
        .iter()
        .map(|it| it.infer_response.as_ref().unwrap())
        .collect();
    let received: Vec<_> = received
        .iter()
        .map(|it| (&*it.id, text(it), last(it)))
        .collect();
    assert_eq!(
        received,
        [
            ("1", "slow".to_owned(), true),
            ("2", "fast".to_owned(), true)
        ]
    );
}

#[tokio::test]
async fn tr_905_a_failed_request_does_not_end_the_stream() {
    let server = playing(vec![ScriptStep::Error(ScriptedFailure {
        code: "unavailable".into(),
        message: "the parrot is tired".into(),
    })])
    .await;
    let mut grpc = Grpc::connect(&server).await;
    let unknown = "Request for unknown model: 'nobody' is not found";
    let list = vec![
        prompt("nobody", "a", "x", true),
        prompt("m", "b", "x", true),
    ];
    let received = grpc.all(list.clone()).await;
    let received: Vec<_> = received
        .iter()
        .map(|it| {
            let response = it.infer_response.as_ref().unwrap();
            (&*response.id, &*it.error_message, last(response))
        })
        .collect();
    assert_eq!(received.len(), 2, "{received:?}");
    assert_eq!(received[0], ("a", unknown, true));
    assert!(
        received[1].0 == "b" && received[1].1.contains("the parrot is tired"),
        "{received:?}"
    );

    // On request, the first error is the status of the call.
    let mut answers = grpc.stream(stream::iter(list), true).await;
    let status = answers.message().await.unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::InvalidArgument, unknown)
    );
}

/// TR-907: response headers are sent before the first request; a message above 64 MiB ends the call.
#[tokio::test]
async fn tr_907_headers_do_not_wait_for_a_request() {
    let server = demo().await;
    let mut grpc = Grpc::connect(&server).await;
    let (mut send, messages) = mpsc::channel(1);
    let mut answers = grpc.stream(messages, false).await;
    send.try_send(prompt("demo", "", &"x".repeat(64 << 20), false))
        .unwrap();
    let status = answers.message().await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
}
