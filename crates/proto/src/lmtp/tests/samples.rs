//! Several samples of one request, and statuses of streams.

use super::*;

const TWO: &str =
    r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"n":2,"seed":10,"max_tokens":2}"#;

#[test]
fn lm_973_each_sample_is_work_with_its_own_seed_and_ends_by_itself() {
    let mut server = Server::agreed(r#"["samples","usage"]"#);
    server.ask(TWO);
    let keys: Vec<_> = server.started.iter().map(|start| start.stream).collect();
    let seeds = server.started.iter().map(|start| match &start.work {
        StreamDemand::Generate(wanted) => (start.sample, wanted.params.seed),
        StreamDemand::Score(_) => panic!("work"),
    });
    assert_eq!(seeds.collect::<Vec<_>>(), [(0, Some(10)), (1, Some(11))]);
    let first = server.step(vec![(keys[1], piece(5)), (keys[0], piece(6))]);
    let items: Vec<_> = first[0].split("},{").collect();
    assert!(items[0].contains(r#""token":6"#) && items[0].ends_with(r#","sample":0"#));
    assert!(items[1].contains(r#""token":5"#) && items[1].contains(r#","sample":1}"#));
    // `max_tokens` counts for each.
    let second = server.step(vec![(keys[1], piece(5))]);
    assert!(second[0].contains(r#""finish_reason":null"#));
    assert!(second[0].ends_with(r#""sample":1,"sample_end":"length"}]"#));
    assert!(server.ask(TWO).contains("duplicate_stream"));
    let stop = item(257, -0.5, Some(StreamFinish::Stop));
    let last = server.step(vec![(keys[0], StreamPiece::Item(stop))]);
    assert!(last[0].contains(r#""finish_reason":"stop""#));
    let usage = r#""usage":{"prompt_tokens":1,"cached_tokens":0,"completion_tokens":4}"#;
    assert!(last[0].ends_with(&format!(r#""sample":0,"sample_end":"stop",{usage}}}]"#)));
    assert_eq!(server.session.live(), 0);
    server.ask(TWO);
    assert_eq!(server.session.live(), 2);
}

/// LM-501
#[test]
fn lm_973_a_failure_or_a_cancel_ends_all_samples_once() {
    let mut server = Server::agreed(r#"["samples","cancel"]"#);
    server.ask(TWO);
    let error = LmtpError::new(LmtpReason::EngineError, "no");
    let received = server.step(vec![(server.started[1].stream, StreamPiece::Failed(error))]);
    assert_eq!(
        (received.len(), received[0].matches("stream_id").count()),
        (1, 1)
    );
    assert_eq!(server.outputs(), ["cancel 0"]);
    server.ask(TWO);
    server.ask(r#"CANCEL {"stream_id":9,"model":"tiny","streams":[3]}"#);
    assert_eq!(server.outputs(), ["cancel 2", "cancel 3"]);
    assert_eq!(server.session.live(), 0);
}

#[test]
fn lm_973_scores_of_many_are_numbered_and_bounded() {
    let mut server = Server::agreed(r#"["samples"]"#);
    server.ask(r#"SCORE {"stream_id":3,"model":"tiny","prompt":[1],"scored_many":[[5],[6,7]]}"#);
    let works: Vec<_> = server
        .started
        .iter()
        .map(|start| start.work.clone())
        .collect();
    let work = |scored: &[u32]| {
        StreamDemand::Score(Score {
            prompt: vec![1],
            scored: scored.to_vec(),
            ..Score::default()
        })
    };
    assert_eq!(works, [work(&[5]), work(&[6, 7])]);
    let key = server.started[0].stream;
    let received = server.step(vec![(key, piece(5))]);
    assert!(received[0].ends_with(r#""finish_reason":null,"sample":0,"sample_end":"stop"}]"#));
    let lists = |count: usize| {
        let lists = vec!["[1]"; count].join(",");
        format!(r#"SCORE {{"stream_id":4,"model":"tiny","prompt":[1],"scored_many":[{lists}]}}"#)
    };
    for bad in [lists(257), lists(0)] {
        assert!(server.ask(&bad).contains("invalid_value"));
    }
    server.ask(&lists(256));
    assert_eq!(server.session.live(), 257);
}

#[test]
fn lm_973_the_number_of_samples_has_a_range_and_counts_as_streams() {
    let generate =
        |n: u32| format!(r#"GENERATE {{"stream_id":3,"model":"tiny","prompt":[1],"n":{n}}}"#);
    for (n, refused) in [(0, true), (1, false), (64, false), (65, true)] {
        let mut server = Server::agreed(r#"["samples"]"#);
        assert_eq!(server.ask(&generate(n)).contains("invalid_value"), refused);
    }
    let mut server = Server::limited(ConnectionLimits {
        max_streams: 3,
        ..ConnectionLimits::default()
    });
    let agree = r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":"all"}}}"#;
    server.ask(agree);
    assert!(server.ask(&generate(4)).contains("server_overloaded"));
    assert_eq!(server.ask(&generate(3)), "");
}

/// LM-1201: each sample has a copy of the prompt, so a short message could cost many times its size.
#[test]
fn lm_973_the_prompts_of_all_samples_have_a_limit() {
    let limits = ConnectionLimits {
        max_sample_tokens: 6,
        ..ConnectionLimits::default()
    };
    for (word, members, refused) in [
        ("GENERATE", r#""prompt":[1,2],"n":3"#, false),
        ("GENERATE", r#""prompt":[1,2],"n":4"#, true),
        ("GENERATE", r#""prompt":[1,2,3,4,5,6,7]"#, false),
        (
            "GENERATE",
            r#""prefix":{"buffer":"b"},"prompt":[2],"n":3"#,
            false,
        ),
        (
            "GENERATE",
            r#""prefix":{"buffer":"b"},"prompt":[2],"n":4"#,
            true,
        ),
        (
            "SCORE",
            r#""prompt":[1,2],"scored_many":[[5],[6],[7]]"#,
            false,
        ),
        (
            "SCORE",
            r#""prompt":[1,2],"scored_many":[[5],[6],[7],[8]]"#,
            true,
        ),
        ("SCORE", r#""prompt":[1,2,3,4,5,6,7],"scored":[5]"#, false),
    ] {
        for model in ["tiny", "far"] {
            let mut server = Server::limited(limits.clone());
            server.ask(
                r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":["samples","buffers"]}}}"#,
            );
            server.ask(&format!(
                r#"BUFFER {{"stream_id":0,"model":"{model}","buffer":"b","append":[1]}}"#
            ));
            let reply = server.ask(&format!(
                r#"{word} {{"stream_id":3,"model":"{model}",{members}}}"#
            ));
            assert_eq!(
                reply.contains("invalid_value"),
                refused,
                "{members}: {reply}"
            );
            assert_eq!(server.started.is_empty(), refused, "{members}");
        }
    }
}

#[test]
fn lm_974_scores_have_top_logprobs_if_negotiated() {
    let text = r#"SCORE {"stream_id":3,"model":"tiny","prompt":[1],"scored":[5],"top_logprobs":2}"#;
    for (features, shown) in [(r#"["samples"]"#, true), (r#"["usage"]"#, false)] {
        let mut server = Server::agreed(features);
        let stream = server.open(text);
        let received = server.step(vec![(stream, piece(5))]);
        assert_eq!(received[0].contains(r#""top_logprobs":{"5":-0.5}"#), shown);
    }
}

#[test]
fn lm_974_the_first_item_has_prompt_logprobs_on_request() {
    let member = r#""prompt_logprobs":true"#;
    for (text, works) in [
        (
            r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1,2],"n":2"#,
            2,
        ),
        (
            r#"SCORE {"stream_id":3,"model":"tiny","prompt":[1,2],"scored":[5]"#,
            1,
        ),
        (
            r#"SCORE {"stream_id":3,"model":"tiny","prompt":[1,2],"scored_many":[[5],[6]]"#,
            2,
        ),
    ] {
        for (member, features, asks) in [
            (member, r#"["samples"]"#, true),
            (member, r#"["usage"]"#, false),
            (r#""prompt_logprobs":false"#, r#"["samples"]"#, false),
        ] {
            let mut server = Server::agreed(features);
            server.ask(&format!("{text},{member}}}"));
            let asked = server.started.iter().map(|start| start.prompt_logprobs);
            // One sample is enough: all have the same prompt.
            let expect = (0..works).map(|index| asks && index == 0);
            if asks {
                assert_eq!(
                    asked.collect::<Vec<_>>(),
                    expect.collect::<Vec<_>>(),
                    "{text}"
                );
            } else {
                assert!(!asked.into_iter().any(|asked| asked));
            }
        }
        let mut server = Server::agreed(r#"["samples"]"#);
        let refused = server.ask(&format!(r#"{text},"prompt_logprobs":2}}"#));
        assert!(refused.contains("invalid_type"), "{refused}");
    }
    let mut server = Server::agreed(r#"["samples"]"#);
    let text = r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1,2,3]"#;
    let stream = server.open(&format!("{text},{member}}}"));
    let first = TokenItem {
        prompt: Some(vec![None, Some(-0.5), Some(f32::NEG_INFINITY)]),
        token: 5,
        logprob: -0.5,
        ..TokenItem::default()
    };
    let received = server.step(vec![(stream, StreamPiece::Item(first))]);
    let reply = r#""top_logprobs":{"5":-0.5},"prompt_logprobs":[null,-0.5,-3.4028235e38]}]"#;
    assert!(received[0].ends_with(reply), "{}", received[0]);
    let received = server.step(vec![(stream, piece(6))]);
    assert!(!received[0].contains("prompt_logprobs"));
}

#[test]
fn lm_922_statuses_are_rate_limited_and_waiting_is_reported_after_100_ms() {
    let mut server = Server::agreed(r#"["status"]"#);
    let stream = server.open(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1]}"#);
    let notify = |server: &mut Server, ms: u64, status: StreamUpdate| {
        server.now = Time::from_millis(ms);
        server.session.status(stream, &status, server.now);
        server.received().join("")
    };
    let queued = || StreamUpdate::Queued {
        position: 4,
        eta: Some(std::time::Duration::from_millis(70)),
    };
    assert_eq!(
        notify(&mut server, 1, StreamUpdate::Running),
        "",
        "it did not wait"
    );
    assert_eq!(notify(&mut server, 99, queued()), "");
    let reply = r#"STATUS [{"stream_id":3,"event":"queued","queue_pos":4,"eta_ms":70}]"#;
    assert_eq!(notify(&mut server, 100, queued()), reply);
    assert_eq!(notify(&mut server, 349, StreamUpdate::Running), "");
    let reply = r#"STATUS [{"stream_id":3,"event":"running"}]"#;
    assert_eq!(notify(&mut server, 350, StreamUpdate::Running), reply);
    let last = item(1, -0.5, Some(StreamFinish::Stop));
    server.step(vec![(stream, StreamPiece::Item(last))]);
    let after = notify(&mut server, 9_000, StreamUpdate::Running);
    assert_eq!(after, "", "never after the end");
}

/// LM-402, LM-903. Samples share their prompt and their place in the queue, so one of them reports the status.
#[test]
fn lm_921_only_streams_with_the_feature_have_statuses() {
    for (features, expect) in [
        (r#"["status","samples"]"#, [true, false]),
        (r#"["samples"]"#, [false, false]),
    ] {
        let mut server = Server::agreed(features);
        server.ask(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"n":2}"#);
        let asked: Vec<bool> = server.started.iter().map(|start| start.statuses).collect();
        assert_eq!(asked, expect, "{features}");
    }
    let mut base = Server::new();
    base.ask(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1]}"#);
    assert!(!base.started[0].statuses);
}

/// LM-402: without the feature no status is sent.
#[test]
fn lm_921_draining_shutdown_and_ignored_members_are_announced() {
    let mut base = Server::new();
    base.session.drain();
    assert!(base.received().is_empty());
    let mut server = Server::agreed(r#"["status"]"#);
    let warned = server.ask(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"zzz":1}"#);
    let reply = r#"STATUS [{"stream_id":3,"event":"warning","message":"ignored: 'zzz'"}]"#;
    assert_eq!(warned, reply);
    server.session.drain();
    server.session.drain();
    assert_eq!(
        server.received(),
        [r#"STATUS [{"stream_id":null,"event":"draining"}]"#]
    );
    server.session.close(LmtpClose::SHUTDOWN, server.now);
    let incoming = server.received();
    assert_eq!(
        incoming[0],
        r#"STATUS [{"stream_id":null,"event":"shutdown"}]"#
    );
    assert!(incoming[1].contains(r#""code":"draining""#));
}

#[test]
fn lm_923_statuses_are_dropped_while_items_wait() {
    let mut server = Server::limited(ConnectionLimits {
        outbox_low_bytes: 10,
        ..ConnectionLimits::default()
    });
    server.ask(r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":["status"]}}}"#);
    let stream = server.open(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1]}"#);
    server.session.step(vec![(stream, piece(1))], server.now);
    server
        .session
        .status(stream, &StreamUpdate::Prefill { progress: 0.5 }, server.now);
    server.session.drain();
    let incoming = server.received();
    assert_eq!(incoming.len(), 2, "{incoming:?}");
    assert!(incoming[1].contains("draining"));
}
