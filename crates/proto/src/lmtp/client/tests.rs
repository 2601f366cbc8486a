mod detached;
mod steered;

use super::*;
use crate::params::{GenerationParams, LoraUse, SamplerOrder};

fn wanted() -> GenerateRequest {
    GenerateRequest {
        prompt: vec![1, 2],
        params: GenerationParams {
            max_tokens: Some(3),
            ..GenerateRequest::default().params
        },
        ..GenerateRequest::default()
    }
}

/// A client with MODEL_INFO 1, GENERATE 2 and SCORE 3 under way.
fn busy() -> ClientMachine {
    let mut client = ClientMachine::new(ClientTimeouts::default());
    client.model_info("tiny", Time::ZERO).unwrap();
    client.generate("tiny", &wanted(), Time::ZERO).unwrap();
    let score = Score {
        prompt: vec![1],
        scored: vec![7, 8],
        ..Score::default()
    };
    client.score("tiny", &score, Time::ZERO).unwrap();
    client
}

/// The events, in short.
fn events(client: &mut ClientMachine) -> Vec<String> {
    let events = std::iter::from_fn(|| client.poll());
    let short = events.map(|event| match event {
        ClientEvent::Item(call, item) => {
            let token = item
                .token
                .map_or_else(|| "-".to_owned(), |token| token.to_string());
            let finish = item
                .finish
                .map_or_else(String::new, |finish| format!(" {}", finish.name()));
            format!("{}: {token}{finish}", call.0)
        }
        ClientEvent::ModelInfo(call, facts) => format!("{}: {facts}", call.0),
        ClientEvent::Failed(call, error) => {
            format!("{}: {} {}", call.0, error.reason.name(), error.message)
        }
    });
    short.collect()
}

fn receive(texts: &[&str]) -> Vec<String> {
    let mut client = busy();
    for text in texts {
        client.handle(text, Time::ZERO);
    }
    events(&mut client)
}

/// The item that a text makes.
fn item(text: &str) -> ReceivedItem {
    let mut client = busy();
    client.handle(text, Time::ZERO);
    match client.poll() {
        Some(ClientEvent::Item(_, item)) => item,
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn lm_703_messages_are_those_of_lmqls_own_client() {
    let mut client = ClientMachine::new(ClientTimeouts::default());
    let mut wanted = wanted();
    let sent = |client: &mut ClientMachine, wanted: &GenerateRequest| {
        String::from_utf8(
            client
                .generate("ti\"ny", wanted, Time::ZERO)
                .unwrap()
                .1
                .to_vec(),
        )
        .unwrap()
    };
    assert_eq!(
        sent(&mut client, &wanted),
        r#"GENERATE {"max_tokens":3,"temperature":0.0,"top_logprobs":1,"model":"ti\"ny","prompt":[1,2],"stream_id":1}"#
    );
    wanted.params = GenerationParams {
        temperature: Some(0.7),
        top_logprobs: Some(0),
        logit_bias: [(5, 100.0), (6, f32::NEG_INFINITY)].into(),
        top_p: Some(0.5),
        top_k: Some(4),
        repetition_penalty: Some(1.5),
        presence_penalty: Some(0.25),
        frequency_penalty: Some(-1.0),
        ..wanted.params
    };
    assert_eq!(
        sent(&mut client, &wanted),
        concat!(
            r#"GENERATE {"max_tokens":3,"temperature":0.7,"top_logprobs":1,"model":"ti\"ny","prompt":[1,2],"stream_id":2,"#,
            r#""logit_bias":{"5":100.0,"6":-100.0},"top_p":0.5,"top_k":4,"repetition_penalty":1.5,"#,
            r#""presence_penalty":0.25,"frequency_penalty":-1.0}"#
        )
    );
    let score = Score {
        prompt: vec![],
        scored: vec![1],
        ..Score::default()
    };
    let (_, message) = client.score("m", &score, Time::ZERO).unwrap();
    assert_eq!(
        &message[..],
        br#"SCORE {"model":"m","prompt":[],"scored":[1],"stream_id":3}"#
    );
    let (_, message) = client.model_info("m", Time::ZERO).unwrap();
    assert_eq!(
        &message[..],
        br#"MODEL_INFO {"model":"m","stream_id":4,"data":{"model":"m"}}"#
    );
}

#[test]
fn lm_703_a_message_above_the_peers_limit_is_not_sent() {
    let message =
        ClientMachine::new(ClientTimeouts::default()).generate("m", &wanted(), Time::ZERO);
    let length = message.unwrap().1.len();
    for (max, fits) in [(length, true), (length - 1, false)] {
        let mut client = ClientMachine::new(ClientTimeouts {
            max_message_out: max,
            ..ClientTimeouts::default()
        });
        let outcome = client.generate("m", &wanted(), Time::ZERO);
        assert_eq!(outcome.is_ok(), fits);
        assert_eq!(client.outstanding(), usize::from(fits));
        if let Err(error) = outcome {
            assert_eq!(error.reason, LmtpReason::MessageTooLarge);
        }
    }
}

#[test]
fn lm_704_parameters_that_the_peer_lacks_are_refused_locally() {
    let with = |change: fn(&mut GenerationParams)| {
        let mut wanted = wanted();
        change(&mut wanted.params);
        let mut client = ClientMachine::new(ClientTimeouts::default());
        let error = client.generate("m", &wanted, Time::ZERO).unwrap_err();
        assert_eq!(
            (error.reason, client.outstanding()),
            (LmtpReason::UnsupportedOperation, 0)
        );
    };
    with(|params| params.seed = Some(1));
    with(|params| params.min_p = Some(0.5));
    with(|params| params.stop = vec!["x".to_owned()]);
    with(|params| params.min_tokens = Some(1));
    with(|params| params.stop_sequences = vec![vec![7]]);
    with(|params| params.ignore_eos = Some(true));
    with(|params| params.dry_multiplier = Some(0.5));
    with(|params| params.samplers = SamplerOrder::of_names(["top_k"]));
    with(|params| params.lora = Some(Vec::new()));
    with(|params| params.logit_bias_texts = vec![("x".to_owned(), 1.0)]);
    with(|params| params.skip_special_tokens = Some(false));
    with(|params| params.bad_words = vec!["x".to_owned()]);
    with(|params| params.n = Some(2));
}

#[test]
fn lm_704_scores_with_adapters_need_a_peer_that_knows_them() {
    let score = Score {
        prompt: vec![1],
        scored: vec![2],
        lora: Some(vec![LoraUse::named("style")]),
        ..Score::default()
    };
    let mut wanted = wanted();
    wanted.params.lora = score.lora.clone();
    // A server that has negotiated other features may not know them either.
    let base = ClientMachine::new(ClientTimeouts::default());
    for mut other in [base, agreed_with(Features::NONE, "")] {
        let error = other.score("m", &score, Time::ZERO).unwrap_err();
        let expected = (LmtpReason::UnsupportedOperation, 0);
        assert_eq!((error.reason, other.outstanding()), expected);
        let error = other.generate("m", &wanted, Time::ZERO).unwrap_err();
        assert_eq!((error.reason, other.outstanding()), expected);
    }
    let (_, message) = agreed().score("m", &score, Time::ZERO).unwrap();
    let message = String::from_utf8_lossy(&message);
    assert!(
        message.contains(r#""lora":[{"name":"style"}]"#),
        "{message}"
    );
}

#[test]
fn lm_705_lists_and_bare_objects_are_items_alike() {
    let item = r#"{"token":7,"stream_id":2,"logprob":-1.5,"finish_reason":null,"top_logprobs":{"7":-1.5}}"#;
    for text in [
        format!("TOKEN [{item}]"),
        format!("TOKEN {item}"),
        format!("TOKEN {item}\n"),
        format!("hello\n\nSTATUS [{{}}]\nTOKEN  {item}"),
        format!("TOKEN []\nTOKEN [{item},7,null,{{\"token\":1}},{{\"token\":1,\"stream_id\":9}}]"),
    ] {
        assert_eq!(receive(&[&text]), ["2: 7"], "{text}");
    }
}

#[test]
fn lm_705_unusual_items_are_accepted() {
    let read = item(
        r#"TOKEN {"token":7,"stream_id":2,"logprob":-Infinity,"finish_reason":null,"top_logprobs":{"7":-Infinity,"8":NaN,"x":1}}"#,
    );
    assert_eq!(read.logprob, Some(f32::NEG_INFINITY));
    assert_eq!(read.top, [(7, f32::NEG_INFINITY)]);
    let read = item(r#"TOKEN {"token":7,"stream_id":2,"logprob":NaN,"note":"NaN"}"#);
    assert_eq!((read.logprob, read.top, read.finish), (None, vec![], None));
    let read = item(r#"TOKEN {"token":7,"stream_id":2,"logprob":-0.5,"error":null}"#);
    assert_eq!(read.top, [(7, -0.5)], "made of what there is");
    let read = item(r#"TOKEN {"stream_id":2,"finish_reason":"cancelled"}"#);
    assert_eq!(
        (read.token, read.finish),
        (None, Some(StreamFinish::Cancelled))
    );
    let read = item(r#"TOKEN {"token":1,"stream_id":2,"finish_reason":"tired"}"#);
    assert_eq!(read.finish, Some(StreamFinish::Other("tired".to_owned())));
    // The reference shows the batch's maximum.
    let read = item(
        r#"TOKEN {"token":7,"stream_id":2,"logprob":-2,"top_logprobs":{"7":-2,"1":-1,"2":-1.5}}"#,
    );
    assert_eq!(read.top, [(7, -2.0), (1, -1.0)]);
}

/// LM-501
#[test]
fn lm_705_errors_of_any_type_end_their_stream() {
    for (error, expected) in [
        (r#""error":"x","code":"engine_error""#, "2: engine_error x"),
        (r#""error":"x","code":"odd""#, "2: upstream_error x"),
        (
            r#""error":{"a" : [1, 2]}"#,
            r#"2: upstream_error {"a":[1,2]}"#,
        ),
        (r#""error":NaN"#, "2: upstream_error NaN"),
        (r#""error":"""#, "2: upstream_error "),
    ] {
        let text = format!(r#"TOKEN [{{"stream_id":2,{error}}}]"#);
        assert_eq!(receive(&[&text, &text]), [expected]);
    }
    let mut client = busy();
    client.handle(
        r#"TOKEN [{"stream_id":2,"error":"x","retry_after_ms":20}]"#,
        Time::ZERO,
    );
    let Some(ClientEvent::Failed(_, cause)) = client.poll() else {
        panic!("a failure");
    };
    assert_eq!(cause.retry_after, Some(Duration::from_millis(20)));
}

#[test]
fn lm_706_items_that_cannot_be_read_fail_every_stream() {
    let message = "upstream_error the upstream sent items that cannot be read";
    let failed = [format!("2: {message}"), format!("3: {message}")];
    assert_eq!(receive(&["TOKEN [{\"stream_id\":2"]), failed);
    assert!(receive(&["MSG [{\"stream_id\":2"]).is_empty());
    // Bare words inside a string are text.
    let text = r#"TOKEN {"stream_id":2,"error":"NaN, -Infinity"}"#;
    assert_eq!(receive(&[text]), ["2: upstream_error NaN, -Infinity"]);
}

#[test]
fn lm_707_items_after_the_end_are_dropped() {
    let next = r#"TOKEN {"token":1,"stream_id":2,"logprob":-1,"finish_reason":null}"#;
    assert_eq!(
        receive(&[next, next, next, next]),
        ["2: 1", "2: 1", "2: 1 length"]
    );
    let last = r#"TOKEN {"token":1,"stream_id":2,"logprob":-1,"finish_reason":"stop"}"#;
    assert_eq!(receive(&[last, last, next]), ["2: 1 stop"]);
    let scored = r#"TOKEN {"token":1,"stream_id":3,"logprob":-1,"finish_reason":null}"#;
    assert_eq!(receive(&[scored, scored, scored]), ["3: 1", "3: 1 stop"]);
}

/// D-39: a request is answered first, and an id in use ends nothing.
#[test]
fn lm_708_an_error_in_a_msg_ends_the_call_with_its_id() {
    assert_eq!(
        receive(&[r#"MSG [{"stream_id":2,"error":"'scored'"}]"#]),
        ["2: upstream_error 'scored'"]
    );
    assert_eq!(
        receive(&[r#"MSG {"stream_id":1,"error":"no"}"#]),
        ["1: upstream_error no"]
    );
    let duplicate =
        r#"MSG [{"stream_id":2,"error":"stream_id is in use","code":"duplicate_stream"}]"#;
    assert!(receive(&[duplicate]).is_empty());
    for ignored in [
        r#"MSG [{"stream_id":null,"error":"malformed","code":"malformed"}]"#,
        r#"MSG [{"stream_id":9,"error":"x"}]"#,
        r#"MSG [{"stream_id":2,"model_info":{}}]"#,
        r#"MSG [{"stream_id":2,"error":null}]"#,
    ] {
        assert!(receive(&[ignored]).is_empty(), "{ignored}");
    }
}

#[test]
fn lm_331_model_info_is_passed_on() {
    for text in [
        r#"MSG [{"stream_id":1,"model_info":{"model":"tiny", "eos":[2]}}]"#,
        r#"MSG {"stream_id":1,"model_info":{"model":"tiny", "eos":[2]}}"#,
    ] {
        assert_eq!(
            receive(&[text, text]),
            [r#"1: {"model":"tiny", "eos":[2]}"#]
        );
    }
    assert_eq!(
        receive(&[r#"MSG [{"stream_id":1,"model_info":"<unavailable>"}]"#]),
        [r#"1: "<unavailable>""#]
    );
}

#[test]
fn lm_702_an_abandoned_stream_counts_until_its_end() {
    let mut client = busy();
    client.abandon(ClientCallId(2));
    client.handle(r#"TOKEN {"token":1,"stream_id":2}"#, Time::ZERO);
    assert_eq!(client.outstanding(), 3);
    client.handle(
        r#"TOKEN {"token":1,"stream_id":2,"finish_reason":"stop"}"#,
        Time::ZERO,
    );
    assert_eq!((client.outstanding(), events(&mut client)), (2, vec![]));
    assert_eq!(client.dropped(), 0);
}

/// LM-710: the message names the model.
#[test]
fn lm_709_every_call_has_its_timeout() {
    let mut client = busy();
    assert_eq!(client.wake_at(), Some(Time::from_millis(5_000)));
    client.tick(Time::from_millis(4_999));
    assert!(events(&mut client).is_empty());
    client.tick(Time::from_millis(5_000));
    let late =
        |call: u32| format!("{call}: timeout the upstream's model 'tiny' did not answer in time");
    assert_eq!(events(&mut client), [late(1)]);
    // The timeout of the first item is longer than that of the next.
    client.handle(
        r#"TOKEN {"token":1,"stream_id":2}"#,
        Time::from_millis(10_000),
    );
    assert_eq!(client.wake_at(), Some(Time::from_millis(70_000)));
    client.tick(Time::from_millis(70_000));
    assert_eq!(events(&mut client), ["2: 1".to_owned(), late(2)]);
    client.tick(Time::from_millis(300_000));
    assert_eq!(events(&mut client), [late(3)]);
    assert_eq!(client.wake_at(), None);
}

#[test]
fn lm_709_a_lost_connection_fails_every_call() {
    let mut client = busy();
    client.lost();
    let message = "connection_lost the connection to the upstream was lost";
    assert_eq!(
        events(&mut client),
        [1, 2, 3].map(|call| format!("{call}: {message}"))
    );
    assert!(LmtpReason::ConnectionLost.is_retryable());
}

#[test]
fn lm_711_logprobs_above_the_tolerance_mark_the_peer_as_raw() {
    for (logprob, raw) in [
        ("0.01", false),
        ("0.05", false),
        ("0.06", true),
        ("7.5", true),
    ] {
        let mut client = busy();
        let text = format!(r#"TOKEN {{"token":1,"stream_id":2,"logprob":{logprob}}}"#);
        client.handle(&text, Time::ZERO);
        assert_eq!(client.raw_logprobs(), raw, "{logprob}");
    }
}

/// LM-101: our server and our client, without a transport.
#[test]
fn lm_702_the_client_and_server_machines_interoperate() {
    use crate::lmtp::fuzz::FuzzModels;
    use crate::lmtp::{Config, LmtpOutput, LmtpSession, StreamDemand, StreamPiece, TokenItem};
    let mut client = ClientMachine::new(ClientTimeouts::default());
    let mut server = LmtpSession::new(Config::default());
    let mut wanted = wanted();
    wanted.params.top_logprobs = Some(2);
    wanted.params.logit_bias = [(4, -1.5)].into();
    let (_, info) = client.model_info("tiny", Time::ZERO).unwrap();
    let (call, generate) = client.generate("tiny", &wanted, Time::ZERO).unwrap();
    for message in [info, generate] {
        let text = String::from_utf8(message.to_vec()).unwrap();
        assert_eq!(server.handle(text.into(), &FuzzModels, Time::ZERO), None);
    }
    let Some(LmtpOutput::Start(start)) = server.poll() else {
        panic!("work");
    };
    // What has its default is not sent (LM-703), and left to the model.
    let received = GenerateRequest {
        params: GenerationParams {
            max_tokens: wanted.params.max_tokens,
            temperature: wanted.params.temperature,
            top_logprobs: wanted.params.top_logprobs,
            logit_bias: wanted.params.logit_bias.clone(),
            ..GenerationParams::default()
        },
        ..wanted
    };
    assert_eq!(start.work, StreamDemand::Generate(received));
    let top = vec![(9, -0.125), (5, -0.25)];
    let token = |finish| {
        StreamPiece::Item(TokenItem {
            token: 5,
            logprob: -0.25,
            top: top.clone(),
            finish,
            ..TokenItem::default()
        })
    };
    let pieces = vec![
        (start.stream, token(None)),
        (start.stream, token(Some(StreamFinish::Stop))),
    ];
    server.step(pieces, Time::ZERO);
    while let Some(message) = server.next_message(Time::ZERO) {
        client.handle(std::str::from_utf8(&message).unwrap(), Time::ZERO);
    }
    assert!(matches!(client.poll(), Some(ClientEvent::ModelInfo(..))));
    let received = |finish| ReceivedItem {
        token: Some(5),
        logprob: Some(-0.25),
        top: vec![(5, -0.25), (9, -0.125)],
        finish,
        ..ReceivedItem::default()
    };
    assert_eq!(client.poll(), Some(ClientEvent::Item(call, received(None))));
    assert_eq!(
        client.poll(),
        Some(ClientEvent::Item(call, received(Some(StreamFinish::Stop))))
    );
    assert_eq!((client.poll(), client.outstanding()), (None, 0));
}

fn agreed() -> ClientMachine {
    agreed_with(Features::NONE.with(Feature::Lora), r#","lora""#)
}

/// The same with these further features.
fn agreed_with(more: Features, names: &str) -> ClientMachine {
    let mut client = ClientMachine::new(ClientTimeouts {
        text: true,
        ..ClientTimeouts::default()
    });
    let asked = more.with(Feature::Cancel).with(Feature::Text);
    let (_, message) = client.negotiate("m", asked, Time::ZERO).unwrap();
    let text = format!(
        r#"MODEL_INFO {{"model":"m","stream_id":1,"data":{{"model":"m","lmtp":{{"version":2,"features":["text","cancel"{names}]}}}}}}"#
    );
    assert_eq!(message, text);
    assert!(client.features().is_empty());
    let answer = format!(
        r#"MSG [{{"stream_id":1,"model_info":{{}},"lmtp":{{"version":2,"features":["text","cancel"{names}]}}}}]"#
    );
    client.handle(&answer, Time::ZERO);
    assert!(matches!(client.poll(), Some(ClientEvent::ModelInfo(..))));
    assert_eq!(client.features(), asked);
    client
}

/// LM-703, LM-704: a peer that has negotiated version 2 is not a reference server.
#[test]
fn lm_901_a_version_2_peer_is_sent_all_members() {
    let wanted = GenerateRequest {
        prompt: vec![1],
        params: GenerationParams {
            seed: Some(7),
            stop: vec!["x".into()],
            stop_sequences: vec![vec![1, 2]],
            min_p: Some(0.5),
            penalty_last_n: Some(64),
            dry_multiplier: Some(0.5),
            dry_sequence_breakers: Some(vec!["#".into()]),
            mirostat: Some(2),
            samplers: SamplerOrder::of_names(["dry", "temperature"]),
            lora: Some(vec![LoraUse::named("style").scaled(0.5)]),
            include_stop_str_in_output: Some(true),
            min_tokens: Some(1),
            ignore_eos: Some(true),
            skip_special_tokens: Some(false),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    };
    let mut client = agreed();
    let (_, message) = client.generate("m", &wanted, Time::ZERO).unwrap();
    let message = String::from_utf8(message.to_vec()).unwrap();
    let end = concat!(
        r##""seed":7,"min_p":0.5,"penalty_last_n":64,"dry_multiplier":0.5,"dry_sequence_breakers":["#"],"mirostat":2,"##,
        r#""samplers":["dry","temperature"],"lora":[{"name":"style","scale":0.5}],"include_stop_str_in_output":true,"stop":["x"],"stop_tokens":[[1,2]],"#,
        r#""min_tokens":1,"ignore_eos":true,"skip_special":false,"text":true}"#
    );
    assert!(message.ends_with(end), "{message}");
    let unknown = GenerateRequest {
        params: GenerationParams {
            bad_words: vec!["x".into()],
            ..GenerationParams::default()
        },
        ..wanted.clone()
    };
    let by_text = GenerateRequest {
        params: GenerationParams {
            logit_bias_texts: vec![("x".into(), 1.0)],
            ..GenerationParams::default()
        },
        ..wanted
    };
    for unknown in [unknown, by_text] {
        let refused = client.generate("m", &unknown, Time::ZERO).unwrap_err();
        assert_eq!(refused.reason, LmtpReason::UnsupportedOperation);
    }
    // A plain MODEL_INFO, answered without `lmtp`, does not withdraw features.
    client.model_info("m", Time::ZERO).unwrap();
    client.handle(r#"MSG [{"stream_id":3,"model_info":{}}]"#, Time::ZERO);
    assert!(client.features().has(Feature::Text));
}

#[test]
fn lm_901_a_base_server_grants_no_features() {
    for answer in [
        r#"MSG [{"stream_id":1,"model_info":{"model":"m"}}]"#,
        r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":1,"features":["text"]}}]"#,
        r#"MSG [{"stream_id":1,"model_info":{},"lmtp":7}]"#,
    ] {
        let mut client = ClientMachine::new(ClientTimeouts::default());
        client.negotiate("m", Features::ALL, Time::ZERO).unwrap();
        client.handle(answer, Time::ZERO);
        assert!(client.features().is_empty(), "{answer}");
    }
}

/// LM-205: the last of repeated members wins.
#[test]
fn lm_902_the_load_of_a_peer_is_read_whatever_its_size() {
    for (load, expect) in [
        (r#"{"running":1,"queued":2,"parked":4}"#, 7),
        (r#"{"running":18446744073709551615,"queued":1}"#, u64::MAX),
        (r#"{"running":9,"running":1}"#, 1),
    ] {
        let mut client = ClientMachine::new(ClientTimeouts::default());
        client.negotiate("m", Features::ALL, Time::ZERO).unwrap();
        let answer = format!(
            r#"MSG [{{"stream_id":1,"model_info":{{}},"lmtp":{{"version":2,"features":[],"load":{load}}}}}]"#
        );
        client.handle(&answer, Time::ZERO);
        assert_eq!(client.load(), Some(expect), "{load}");
    }
}

#[test]
fn lm_702_an_abandoned_stream_is_cancelled_if_negotiated() {
    let wanted = GenerateRequest {
        prompt: vec![1],
        ..GenerateRequest::default()
    };
    let mut client = agreed();
    let (call, _) = client.generate("m", &wanted, Time::ZERO).unwrap();
    let cancel = client.abandon(call).unwrap();
    assert_eq!(
        cancel,
        r#"CANCEL {"model":"m","stream_id":3,"streams":[2]}"#
    );
    assert_eq!(client.abandon(call), None);
    // The answer to CANCEL is not waited for: a peer that sends none must not appear to be busy.
    assert_eq!(client.outstanding(), 1);
    let end = r#"TOKEN [{"stream_id":2,"finish_reason":"cancelled"}]"#;
    client.handle(end, Time::ZERO);
    assert_eq!(client.outstanding(), 0);
    let answer = r#"MSG [{"stream_id":3,"cancelled":[2],"unknown":[]}]"#;
    client.handle(answer, Time::ZERO);
    assert_eq!((client.outstanding(), client.dropped()), (0, 0));
    assert_eq!(client.poll(), None);
    let mut base = ClientMachine::new(ClientTimeouts::default());
    let (call, _) = base.generate("m", &wanted, Time::ZERO).unwrap();
    assert_eq!(base.abandon(call), None);
}

/// LM-912, LM-950
#[test]
fn lm_702_version_2_members_of_items_are_read() {
    let mut client = agreed();
    let wanted = GenerateRequest {
        prompt: vec![1],
        ..GenerateRequest::default()
    };
    client.generate("m", &wanted, Time::ZERO).unwrap();
    let item = r#"TOKEN [{"token":5,"stream_id":2,"logprob":-0.5,"finish_reason":"stop","text":"\u00e9","stop_match":"x","usage":{"prompt_tokens":3,"cached_tokens":2,"completion_tokens":1}}]"#;
    client.handle(item, Time::ZERO);
    let Some(ClientEvent::Item(_, item)) = client.poll() else {
        panic!("an item");
    };
    assert_eq!(
        (item.text.as_deref(), item.stop.as_deref()),
        (Some("\u{e9}"), Some("x"))
    );
    let usage = StreamUsage {
        prompt_tokens: 3,
        cached_tokens: 2,
        completion_tokens: 1,
        ..StreamUsage::default()
    };
    assert_eq!(item.usage, Some(usage));
}

#[test]
fn lm_962_a_deadline_is_sent_if_negotiated() {
    let wanted = GenerateRequest {
        prompt: vec![1],
        ..GenerateRequest::default()
    };
    let sent = |mut client: ClientMachine, within| {
        let sent = client.generate_within("m", &wanted, within, Time::ZERO);
        String::from_utf8(sent.unwrap().1.to_vec()).unwrap()
    };
    for (within, member) in [
        (Some(Duration::from_millis(70)), Some("\"deadline_ms\":70}")),
        (Some(Duration::ZERO), Some("\"deadline_ms\":1}")),
        (
            Some(Duration::from_secs(1 << 20)),
            Some("\"deadline_ms\":86400000}"),
        ),
        (None, None),
    ] {
        let message = sent(agreed(), within);
        assert_eq!(message.contains("deadline_ms"), member.is_some());
        assert!(message.ends_with(member.unwrap_or("}")), "{message}");
        let base = sent(ClientMachine::new(ClientTimeouts::default()), within);
        assert!(!base.contains("deadline_ms"), "{base}");
    }
}

#[test]
fn lm_902_the_load_and_the_drain_of_a_peer_are_recorded() {
    let mut client = ClientMachine::new(ClientTimeouts::default());
    client.negotiate("m", Features::ALL, Time::ZERO).unwrap();
    assert_eq!((client.load(), client.is_draining()), (None, false));
    client.handle(r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":2,"features":["status"],"load":{"running":3,"queued":2,"parked":1,"x":9}}}]"#, Time::ZERO);
    assert_eq!(client.load(), Some(6));
    for update in [
        r#"STATUS [{"stream_id":null,"event":"odd"}]"#,
        r#"STATUS [{"stream_id":7,"event":"draining"}]"#,
        r#"STATUS [{"stream_id":null}]"#,
    ] {
        client.handle(update, Time::ZERO);
        assert!(!client.is_draining(), "{update}");
    }
    let update = r#"STATUS [{"stream_id":null,"event":"draining","deadline_ms":5000}]"#;
    client.handle(update, Time::ZERO);
    assert!(client.is_draining());
    // A base peer sends no STATUS, so it is dropped.
    let mut base = ClientMachine::new(ClientTimeouts::default());
    base.handle(update, Time::ZERO);
    assert!(!base.is_draining() && base.dropped() == 1);
}

#[test]
fn lm_922_a_status_restarts_the_timeout_of_the_first_item() {
    let mut client = ClientMachine::new(ClientTimeouts::default());
    let status = Features::NONE.with(Feature::Status);
    client.negotiate("m", status, Time::ZERO).unwrap();
    client.handle(
        r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":2,"features":["status"]}}]"#,
        Time::ZERO,
    );
    client
        .generate("m", &GenerateRequest::default(), Time::ZERO)
        .unwrap();
    let update = r#"STATUS [{"stream_id":2,"event":"queued","queue_pos":3}]"#;
    client.handle(update, Time::from_millis(200_000));
    assert_eq!(client.wake_at(), Some(Time::from_millis(500_000)));
    let item = r#"TOKEN [{"stream_id":2,"token":1}]"#;
    client.handle(item, Time::from_millis(300_000));
    client.handle(update, Time::from_millis(310_000));
    assert_eq!(client.wake_at(), Some(Time::from_millis(360_000)));
}
