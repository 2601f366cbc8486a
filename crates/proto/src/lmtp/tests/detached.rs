//! Named state of a client on the server: buffers and masks.

use super::*;

fn detached(limits: ConnectionLimits) -> Server {
    let mut server = Server::limited(limits);
    server.ask(r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":"all"}}}"#);
    server
}

fn buffer(server: &mut Server, members: &str) -> String {
    let answer = server.ask(&format!(
        r#"BUFFER {{"stream_id":5,"model":"tiny",{members}}}"#
    ));
    let answer = answer.strip_prefix(r#"MSG [{"stream_id":5,"#).unwrap();
    answer.strip_suffix("}]").unwrap().to_owned()
}

fn last_prompt(server: &Server) -> Vec<u32> {
    match &server.started.last().unwrap().work {
        StreamDemand::Generate(wanted) => wanted.prompt.clone(),
        StreamDemand::Score(wanted) => wanted.prompt.clone(),
    }
}

#[test]
fn lm_941_a_buffer_extends_another_buffer() {
    let mut server = detached(ConnectionLimits::default());
    for (members, answer) in [
        (
            r#""buffer":"b0","append":[1,2,3]"#,
            r#""buffer":{"id":"b0","len":3,"cached":0,"expires_s":60}"#,
        ),
        (
            r#""buffer":"b1","from":{"buffer":"b0","len":2},"append":[9],"ttl_s":9999"#,
            r#""buffer":{"id":"b1","len":3,"cached":0,"expires_s":3600}"#,
        ),
        (
            r#""buffer":"b2","append_text":"a""#,
            r#""buffer":{"id":"b2","len":2,"cached":0,"expires_s":60}"#,
        ),
        (
            r#""buffer":"b2","drop":true"#,
            r#""buffer":{"id":"b2","dropped":true}"#,
        ),
        (
            r#""buffer":"b2","drop":true"#,
            r#""buffer":{"id":"b2","dropped":false}"#,
        ),
    ] {
        assert_eq!(buffer(&mut server, members), answer);
    }
    server.open(r#"GENERATE {"stream_id":1,"model":"tiny","prefix":{"buffer":"b1"}}"#);
    assert_eq!(last_prompt(&server), [1, 2, 9]);
    for (members, code) in [
        (r#""append":[1]"#, "missing_required_parameter"),
        (r#""buffer":7"#, "invalid_type"),
        (r#""buffer":"""#, "invalid_value"),
        (
            r#""buffer":"x","append":[1],"append_text":"a""#,
            "invalid_value",
        ),
        (
            r#""buffer":"x","from":{"buffer":"nope"}"#,
            "buffer_not_found",
        ),
        (
            r#""buffer":"x","from":{"buffer":"b0","len":4}"#,
            "invalid_value",
        ),
        (r#""buffer":"x","append":[258]"#, "invalid_value"),
        (r#""buffer":"x","ttl_s":0"#, "invalid_value"),
    ] {
        let answer = buffer(&mut server, members);
        assert!(answer.contains(code), "{members}: {answer}");
    }
}

/// LM-943: the work equals that of the full prompt, so the results do.
#[test]
fn lm_942_a_prefix_precedes_the_prompt_and_keep_stores_the_output() {
    let mut server = detached(ConnectionLimits::default());
    buffer(&mut server, r#""buffer":"b0","append":[1,2,3]"#);
    let text = r#"GENERATE {"stream_id":1,"model":"tiny","prefix":{"buffer":"b0","len":2},"prompt":[7],"keep":"b1"}"#;
    let stream = server.open(text);
    assert_eq!(last_prompt(&server), [1, 2, 7]);
    let last = StreamPiece::Item(item(257, -0.5, Some(StreamFinish::Stop)));
    let received = server.step(vec![(stream, piece(8)), (stream, last)]);
    assert!(
        received[0].contains(r#""buffer":{"id":"b1","len":5},"usage""#),
        "{}",
        received[0]
    );
    server.open(r#"SCORE {"stream_id":1,"model":"tiny","prefix":{"buffer":"b1"},"scored":[4]}"#);
    assert_eq!(last_prompt(&server), [1, 2, 7, 8, 257]);
    // Also if the stream is cancelled.
    let text = r#"GENERATE {"stream_id":2,"model":"tiny","prompt":[5],"keep":"b2"}"#;
    let stream = server.open(text);
    server.step(vec![(stream, piece(6))]);
    let received = server.ask(r#"CANCEL {"stream_id":9,"model":"tiny","streams":[2]}"#);
    assert!(received.contains(r#""buffer":{"id":"b2","len":2}"#));
    server.open(r#"GENERATE {"stream_id":2,"model":"tiny","prefix":{"buffer":"b2"}}"#);
    assert_eq!(last_prompt(&server), [5, 6]);
    let many = r#"GENERATE {"stream_id":7,"model":"tiny","prompt":[5],"keep":"b2","n":2}"#;
    assert!(server.ask(many).contains("invalid_value"));
}

#[test]
fn lm_943_buffers_expire_and_are_evicted_over_quota() {
    let mut server = detached(ConnectionLimits {
        max_buffers: 2,
        max_buffer_contexts: 1,
        ..ConnectionLimits::default()
    });
    let has = |server: &mut Server, name: &str| {
        let from = format!(r#""buffer":"probe","from":{{"buffer":"{name}","len":0}},"ttl_s":1"#);
        let has = buffer(server, &from).contains(r#""len":0"#);
        buffer(server, r#""buffer":"probe","drop":true"#);
        has
    };
    buffer(&mut server, r#""buffer":"a","append":[1],"ttl_s":10"#);
    server.now = Time::from_millis(9_999);
    assert!(has(&mut server, "a"), "and it was used now");
    server.now = Time::from_millis(19_998);
    assert!(has(&mut server, "a"));
    server.now = Time::from_millis(29_998);
    assert!(!has(&mut server, "a"));
    // Two are retained; the least recently used one is evicted.
    buffer(&mut server, r#""buffer":"a","append":[1]"#);
    buffer(&mut server, r#""buffer":"b","append":[1]"#);
    buffer(&mut server, r#""buffer":"a","from":{"buffer":"a"}"#);
    buffer(&mut server, r#""buffer":"c","append":[1]"#);
    server.open(r#"GENERATE {"stream_id":1,"model":"tiny","prefix":{"buffer":"a"}}"#);
    let removed = r#"GENERATE {"stream_id":2,"model":"tiny","prefix":{"buffer":"b"}}"#;
    let answer = server.ask(removed);
    assert!(
        answer.contains(r#""code":"buffer_not_found","retryable":true"#),
        "{answer}"
    );
    // As many tokens as the context, and one more.
    let tokens = |count: usize| vec!["1"; count].join(",");
    let full = buffer(
        &mut server,
        &format!(r#""buffer":"d","append":[{}]"#, tokens(4_096)),
    );
    assert!(full.contains(r#""len":4096"#));
    let more = buffer(
        &mut server,
        &format!(r#""buffer":"d","append":[{}]"#, tokens(4_097)),
    );
    assert!(more.contains("invalid_value"));
    let other = r#"GENERATE {"stream_id":3,"model":"bare","prefix":{"buffer":"d"}}"#;
    assert!(server.ask(other).contains("invalid_value"));
}

fn bias(server: &Server) -> Vec<(u32, f32)> {
    match &server.started.last().unwrap().work {
        StreamDemand::Generate(wanted) => wanted.params.logit_bias.to_vec(),
        StreamDemand::Score(_) => panic!("work"),
    }
}

#[test]
fn lm_945_a_stored_mask_forbids_all_other_tokens() {
    for (members, allowed) in [
        (r#""allow":[[5,9],[7,8],[300,400],[250,9999]]"#, 13),
        (r#""deny":[[0,255]]"#, 2),
        (r#""deny":[[9,5]]"#, 258),
        (r#""bitmap":"CQI=""#, 3),
        (
            r#""bitmap":"/////////////////////////////////////////////w==""#,
            258,
        ),
    ] {
        let mut server = detached(ConnectionLimits::default());
        let answer = server.ask(&format!(
            r#"MASK {{"stream_id":1,"model":"tiny","mask":"k",{members}}}"#
        ));
        let reply = format!(r#"MSG [{{"stream_id":1,"mask":{{"id":"k","allowed":{allowed}}}}}]"#);
        assert_eq!(answer, reply, "{members}");
        server.open(r#"GENERATE {"stream_id":1,"model":"tiny","prompt":[1],"mask":"k"}"#);
        let bias = bias(&server);
        assert_eq!(bias.len(), 258 - allowed);
        assert!(bias.is_sorted_by_key(|(token, _)| *token));
        assert!(bias.iter().all(|(_, value)| *value == f32::NEG_INFINITY));
    }
    let mut server = detached(ConnectionLimits::default());
    server.ask(r#"MASK {"stream_id":1,"model":"tiny","mask":"k","bitmap":"CQI="}"#);
    let text = r#"GENERATE {"stream_id":1,"model":"tiny","prompt":[1],"mask":"k","logit_bias":{"3":5,"4":5,"9":-Infinity}}"#;
    server.open(text);
    let open: Vec<_> = bias(&server)
        .into_iter()
        .filter(|(_, value)| *value > f32::NEG_INFINITY)
        .collect();
    assert_eq!(open, [(3, 5.0)]);
    assert_eq!(bias(&server).len(), 257);
}

#[test]
fn lm_945_bad_masks_are_refused_and_missing_ones_are_retryable() {
    let mut server = detached(ConnectionLimits {
        max_masks: 1,
        ..ConnectionLimits::default()
    });
    for (members, code) in [
        (r#""allow":[[1,2]]"#, "missing_required_parameter"),
        (r#""mask":"k""#, "invalid_value"),
        (r#""mask":"k","allow":[]"#, "invalid_value"),
        (r#""mask":"k","allow":[[258,300]]"#, "invalid_value"),
        (
            r#""mask":"k","allow":[[1,2]],"deny":[[1,2]]"#,
            "invalid_value",
        ),
        (r#""mask":"k","allow":[1]"#, "invalid_type"),
        (r#""mask":"k","bitmap":"*""#, "invalid_value"),
        (r#""mask":"k","bitmap":"""#, "invalid_value"),
    ] {
        let answer = server.ask(&format!(
            r#"MASK {{"stream_id":1,"model":"tiny",{members}}}"#
        ));
        assert!(answer.contains(code), "{members}: {answer}");
    }
    for name in ["a", "b"] {
        let text =
            format!(r#"MASK {{"stream_id":1,"model":"tiny","mask":"{name}","allow":[[1,2]]}}"#);
        server.ask(&text);
    }
    let lost = r#"GENERATE {"stream_id":1,"model":"tiny","prompt":[1],"mask":"a"}"#;
    assert!(
        server
            .ask(lost)
            .contains(r#""code":"mask_not_found","retryable":true"#)
    );
    let nothing = r#"GENERATE {"stream_id":1,"model":"tiny","prompt":[1],"mask":"b","logit_bias":{"1":-Infinity,"2":-Infinity}}"#;
    assert!(server.ask(nothing).contains("constraint_failed"));
    let other = r#"GENERATE {"stream_id":1,"model":"bare","prompt":[1],"mask":"b"}"#;
    assert!(server.ask(other).contains("invalid_value"));
}

#[test]
fn lm_1201_the_masks_of_a_client_have_a_limit_in_bytes() {
    // 258 tokens are nine words of four bytes.
    for (max_mask_bytes, retained) in [(72, true), (71, false)] {
        let mut server = detached(ConnectionLimits {
            max_mask_bytes,
            ..ConnectionLimits::default()
        });
        for name in ["a", "b"] {
            let mask = format!(r#""mask":"{name}","allow":[[1,2]]"#);
            let text = format!(r#"MASK {{"stream_id":1,"model":"tiny",{mask}}}"#);
            assert!(server.ask(&text).contains(r#""allowed":2"#));
        }
        let used = r#"GENERATE {"stream_id":1,"model":"tiny","prompt":[1],"mask":"a"}"#;
        let answer = server.ask(used);
        assert_eq!(answer.is_empty(), retained, "{answer}");
        assert_eq!(answer.contains("mask_not_found"), !retained, "{answer}");
    }
}

#[test]
fn lm_1201_names_and_models_have_a_limit_in_bytes() {
    let mut server = detached(ConnectionLimits::default());
    for (bytes, taken) in [(64, true), (65, false)] {
        let name = "n".repeat(bytes);
        let text = format!(r#"BUFFER {{"stream_id":1,"model":"tiny","buffer":"{name}"}}"#);
        assert_eq!(server.ask(&text).contains(r#""len":0"#), taken, "{bytes}");
    }
    // Neither name belongs to a model, and the longer one is not looked up.
    for bytes in [512, 513] {
        let model = "m".repeat(bytes);
        let text = format!(r#"GENERATE {{"stream_id":1,"model":"{model}","prompt":[1]}}"#);
        let answer = server.ask(&text);
        assert!(answer.contains("model_not_found"), "{answer}");
    }
}
