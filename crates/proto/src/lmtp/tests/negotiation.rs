//! Version 2 is negotiated feature by feature.

use super::*;

fn ask(server: &mut Server, lmtp: &str) -> String {
    let message = format!(
        r#"MODEL_INFO {{"stream_id":1,"model":"tiny","data":{{"model":"tiny","lmtp":{lmtp}}}}}"#
    );
    server.ask(&message)
}

/// LM-902
#[test]
fn lm_901_the_answer_lists_the_requested_and_available_features() {
    let mut server = Server::new();
    let lmtp = r#"{"version":2,"features":["resume","text","teleport","controllers"]}"#;
    let answer = ask(&mut server, lmtp);
    assert!(answer.starts_with(r#"MSG [{"stream_id":1,"model_info":{"model":"tiny","#));
    let lmtp = after(&answer, r#""version":"0.1.0"},"lmtp":"#);
    let agreed =
        r#"{"version":2,"features":["text","resume","controllers"],"session":"s_1","limits":{"#;
    assert!(lmtp.starts_with(agreed), "{lmtp}");
    assert!(lmtp.contains(r#""max_frame_out":1000000,"max_streams":1024,"#));
    assert!(lmtp.ends_with(r#""load":{"running":1,"queued":2,"parked":0}}}]"#));
}

#[test]
fn lm_902_all_grants_every_feature_and_a_bad_shape_changes_nothing() {
    let mut server = Server::new();
    let all = ask(&mut server, r#"{"version":3,"features":"all"}"#);
    let features = r#""version":2,"features":["text","buffers","masks","status","cancel","usage","resume","window","samples","controllers","lora","infill"]"#;
    assert!(all.contains(features), "{all}");
    for bad in [
        "[]",
        "{}",
        r#"{"version":2}"#,
        r#"{"version":0,"features":[]}"#,
        r#"{"version":"2","features":[]}"#,
        r#"{"version":2,"features":"some"}"#,
        r#"{"version":2,"features":[1]}"#,
    ] {
        let answer = ask(&mut server, bad);
        assert!(
            answer.contains(r#""code":"invalid_value","retryable":false"#),
            "{bad}"
        );
        assert!(!answer.contains("model_info"));
    }
    let nope =
        r#"MODEL_INFO {"stream_id":1,"model":"nope","data":{"lmtp":{"version":2,"features":[]}}}"#;
    assert!(server.ask(nope).contains("model_not_found"));
    let cancel = r#"CANCEL {"stream_id":2,"model":"tiny","streams":[]}"#;
    let answer = r#"MSG [{"stream_id":2,"cancelled":[],"unknown":[]}]"#;
    assert_eq!(server.ask(cancel), answer, "what was agreed stands");
}

#[test]
fn lm_902_below_version_2_nothing_is_negotiated() {
    let mut server = Server::new();
    let answer = ask(&mut server, r#"{"version":1,"features":"all"}"#);
    assert!(answer.contains(r#""lmtp":{"version":1,"features":[],"#));
    let cancel = r#"CANCEL {"stream_id":2,"model":"tiny","streams":[]}"#;
    assert!(server.ask(cancel).contains("not_negotiated"));
}

/// No round trip is needed, and a stream keeps the features with which it began.
#[test]
fn lm_903_features_apply_to_later_messages() {
    let mut server = Server::new();
    let agree = |features: &str| {
        format!(
            r#"MODEL_INFO {{"stream_id":1,"model":"tiny","data":{{"lmtp":{{"version":2,"features":{features}}}}}}}"#
        )
    };
    let generate = |id: u32| {
        format!(r#"GENERATE {{"stream_id":{id},"model":"tiny","prompt":[1],"max_tokens":1}}"#)
    };
    let text = [
        generate(2),
        agree(r#"["usage"]"#),
        generate(3),
        agree("[]"),
        generate(4),
    ];
    server.send(&text.join("\n"));
    server.received();
    let streams: Vec<_> = server.started.iter().map(|start| start.stream).collect();
    let incoming = streams
        .iter()
        .map(|stream| server.step(vec![(*stream, piece(7))]));
    let usage: Vec<_> = incoming
        .map(|incoming| incoming[0].contains("usage"))
        .collect();
    assert_eq!(usage, [false, true, false]);
}

#[test]
fn lm_904_a_message_needs_its_own_feature() {
    let mut server = Server::agreed(r#"["usage"]"#);
    for word in ["CANCEL", "TOKENIZE", "BUFFER", "MASK", "RESUME", "ACK"] {
        let answer = server.ask(&format!(r#"{word} {{"stream_id":3,"model":"tiny"}}"#));
        assert!(answer.contains("not_negotiated"), "{word}: {answer}");
    }
}

#[test]
fn lm_905_the_subprotocol_grants_every_feature_without_an_answer() {
    let mut server = Server::with(Config {
        negotiated: true,
        ..Config::default()
    });
    let answer = server.ask(r#"TOKENIZE {"stream_id":3,"model":"tiny","text":"a"}"#);
    assert_eq!(answer, r#"MSG [{"stream_id":3,"tokens":[256,97]}]"#);
    // MODEL_INFO reports the features in force and names the session.
    let facts = server.ask(r#"MODEL_INFO {"stream_id":4,"model":"tiny"}"#);
    let all = r#""features":["text","buffers","masks","status","cancel","usage","resume","window","samples","controllers","lora","infill"],"session":"s_1","#;
    assert!(facts.contains(all), "{facts}");
}

/// LM-207: members of version 2 are unknown before it is negotiated.
#[test]
fn lm_207_members_of_version_2_are_unknown_without_it() {
    let text = r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"n":2,"deadline_ms":"x"}"#;
    let mut base = Server::new();
    base.open(text);
    assert_eq!(base.session.stats().unknown_parameters, 2);
    let mut other = Server::agreed(r#"["samples"]"#);
    other.ask(text);
    assert_eq!(other.session.stats().unknown_parameters, 1);
    assert_eq!(other.started.len(), 2);
}

#[test]
fn lm_971_without_its_feature_a_controller_is_refused_and_not_ignored() {
    let mut server = Server::agreed(r#"["samples"]"#);
    let text = r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"controller":"x"}"#;
    assert!(server.ask(text).contains("unsupported_operation"));
    // The base protocol ignores unknown members, but this one changes what the output means.
    assert!(Server::new().ask(text).contains("unsupported_operation"));
}
