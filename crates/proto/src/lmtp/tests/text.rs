//! Text instead of token ids.

use super::*;

fn prompt(server: &Server, at: usize) -> Vec<u32> {
    match &server.started[at].work {
        StreamDemand::Generate(wanted) => wanted.prompt.clone(),
        StreamDemand::Score(wanted) => [&*wanted.prompt, &[999], &*wanted.scored].concat(),
    }
}

#[test]
fn lm_911_a_prompt_comes_in_one_of_three_forms() {
    for (members, expected) in [
        (r#""prompt":[5]"#, vec![5]),
        (r#""prompt_text":"Hi""#, vec![256, 72, 105]),
        (r#""prompt_text":"Hi","add_bos":false"#, vec![72, 105]),
        (r#""prompt_text":"","add_bos":false"#, vec![256]),
        (
            r#""messages":[{"role":"user","content":"a"}]"#,
            vec![97, 62],
        ),
        (
            r#""messages":[{"role":"user","content":"a"}],"add_generation_prompt":false"#,
            vec![97],
        ),
    ] {
        let mut server = Server::agreed(r#"["text"]"#);
        server.open(&format!(
            r#"GENERATE {{"stream_id":3,"model":"tiny",{members}}}"#
        ));
        assert_eq!(prompt(&server, 0), expected, "{members}");
    }
    for (members, code) in [
        (r#""x":1"#, "missing_required_parameter"),
        (r#""prompt":"Hi""#, "invalid_type"),
        (r#""prompt_text":[1]"#, "invalid_type"),
        (r#""prompt_text":"a","add_bos":1"#, "invalid_type"),
        (r#""prompt_text":"a","prompt":[1]"#, "invalid_value"),
        (r#""prompt_text":"a","messages":[]"#, "invalid_value"),
        (r#""messages":[]"#, "invalid_value"),
        (r#""messages":[NaN]"#, "invalid_type"),
        (r#""prompt":[1],"text":"some""#, "invalid_type"),
        (r#""prompt":[1],"skip_special":0"#, "invalid_type"),
    ] {
        let mut server = Server::agreed(r#"["text"]"#);
        let answer = server.ask(&format!(
            r#"GENERATE {{"stream_id":3,"model":"tiny",{members}}}"#
        ));
        assert!(
            answer.starts_with("TOKEN [") && answer.contains(code),
            "{members}: {answer}"
        );
    }
    let mut server = Server::agreed(r#"["text"]"#);
    let bare = r#"GENERATE {"stream_id":3,"model":"bare","prompt_text":"a"}"#;
    assert!(server.ask(bare).contains("unsupported_operation"));
}

/// The codec of the test has the place to fill in behind a prefix and a suffix, each with its mark: `<prefix|suffix>`.
#[test]
fn lm_911_a_suffix_makes_a_prompt_to_fill_in() {
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    for (members, expected) in [
        (
            r#""prompt_text":"a","suffix":"b""#,
            [&[256][..], &bytes("<a|b>")].concat(),
        ),
        (
            r#""prompt_text":"","suffix":"\u00e9""#,
            [&[256][..], &bytes("<|\u{e9}>")].concat(),
        ),
        (
            r#""prompt_text":"a","suffix":"b","add_bos":false"#,
            bytes("<a|b>"),
        ),
        // Clients of Ollama and of OpenAI send an empty one for none.
        (r#""prompt_text":"a","suffix":"""#, vec![256, 97]),
        (r#""prompt_text":"a","suffix":null"#, vec![256, 97]),
        (r#""prompt":[7],"suffix":"""#, vec![7]),
    ] {
        let mut server = Server::agreed(r#"["text","infill"]"#);
        server.open(&format!(
            r#"GENERATE {{"stream_id":3,"model":"tiny",{members}}}"#
        ));
        server.open(&format!(
            r#"SCORE {{"stream_id":4,"model":"tiny","scored":[5],{members}}}"#
        ));
        assert_eq!(prompt(&server, 0), expected, "{members}");
        assert_eq!(
            prompt(&server, 1),
            [&expected[..], &[999, 5]].concat(),
            "{members}"
        );
    }
}

#[test]
fn lm_911_a_suffix_without_a_text_before_it_or_its_feature_is_refused() {
    for (features, members, code) in [
        (
            r#""text","infill""#,
            r#""prompt_text":"a","suffix":1"#,
            "invalid_type",
        ),
        (
            r#""text","infill""#,
            r#""prompt":[1],"suffix":"b""#,
            "invalid_value",
        ),
        (
            r#""text","infill""#,
            r#""messages":[],"suffix":"b""#,
            "invalid_value",
        ),
        (r#""text","infill""#, r#""suffix":"b""#, "invalid_value"),
        // As if it were not there would be another text.
        (
            r#""text""#,
            r#""prompt_text":"a","suffix":"b""#,
            "unsupported_operation",
        ),
    ] {
        for word in ["GENERATE", "SCORE"] {
            let mut server = Server::agreed(&format!("[{features}]"));
            let answer = server.ask(&format!(
                r#"{word} {{"stream_id":3,"model":"tiny","scored":[5],{members}}}"#
            ));
            assert!(
                answer.starts_with("TOKEN [") && answer.contains(code),
                "{members}: {answer}"
            );
        }
    }
    let mut server = Server::new();
    let answer = server.ask(r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"suffix":"b"}"#);
    assert!(answer.contains("needs the feature 'infill'"), "{answer}");
    // An empty one asks for nothing, so it is ignored as any unknown member (LM-207).
    server.open(r#"GENERATE {"stream_id":4,"model":"tiny","prompt":[1],"suffix":""}"#);
    let mut server = Server::agreed(r#"["text","infill"]"#);
    for (suffix, refused) in [("b", true), ("", false)] {
        let answer = server.ask(&format!(
            r#"TOKENIZE {{"stream_id":3,"model":"tiny","text":"a","suffix":"{suffix}"}}"#
        ));
        assert_eq!(answer.contains("invalid_value"), refused, "{answer}");
    }
    let mut server = Server::agreed(r#"["text","buffers","infill"]"#);
    let buffer = r#"BUFFER {"stream_id":2,"model":"tiny","buffer":"b","append":[9]}"#;
    assert!(server.ask(buffer).contains("\"id\":\"b\""));
    let answer = server.ask(
        r#"GENERATE {"stream_id":3,"model":"tiny","prefix":{"buffer":"b"},"prompt_text":"a","suffix":"b"}"#,
    );
    assert!(answer.contains("invalid_value"), "{answer}");
}

fn text_item(token: u32, text: &str) -> TokenItem {
    let mut item = item(token, -0.5, None);
    item.text = text.into();
    item
}

#[test]
fn lm_912_items_have_the_text_that_they_complete() {
    let mut server = Server::agreed(r#"["text"]"#);
    let stream = server.open(r#"GENERATE {"stream_id":2,"model":"tiny","prompt_text":"Hi"}"#);
    let items = [text_item(195, ""), text_item(169, "\u{e9}")]
        .map(|item| (stream, StreamPiece::Item(item)));
    let received = server.step(items.into());
    let expected = concat!(
        r#"TOKEN [{"token":195,"stream_id":2,"logprob":-0.5,"finish_reason":null,"top_logprobs":{"195":-0.5},"text":"","prompt_len":3},"#,
        r#"{"token":169,"stream_id":2,"logprob":-0.5,"finish_reason":null,"top_logprobs":{"169":-0.5},"text":"é"}]"#,
    );
    assert_eq!(received, [expected]);
    let ids = r#"GENERATE {"stream_id":3,"model":"tiny","prompt":[1],"text":"bytes"}"#;
    let stream = server.open(ids);
    let received = server.step(vec![(stream, StreamPiece::Item(text_item(195, "")))]);
    assert!(
        received[0].contains(r#""text":"","bytes":"ww==","prompt_len":1}"#),
        "{}",
        received[0]
    );
    let ids = r#"GENERATE {"stream_id":4,"model":"tiny","prompt":[1]}"#;
    let stream = server.open(ids);
    let received = server.step(vec![(stream, StreamPiece::Item(text_item(97, "a")))]);
    assert!(!received[0].contains(r#""text""#));
}

#[test]
fn lm_913_the_matched_stop_and_the_prompt_are_sent_on_request() {
    let mut server = Server::agreed(r#"["text"]"#);
    let text = r#"GENERATE {"stream_id":2,"model":"tiny","prompt_text":"a","echo_prompt_tokens":true,"top_text":true}"#;
    let stream = server.open(text);
    let mut last = item(98, -0.5, Some(StreamFinish::Stop));
    last.stop = Some("b".to_owned());
    let received = server.step(vec![(stream, StreamPiece::Item(last))]);
    let end = r#""text":"","stop_match":"b","top_text":{"98":"b"},"prompt_len":2,"prompt_tokens":[256,97]}]"#;
    assert!(received[0].ends_with(end), "{}", received[0]);
}

#[test]
fn lm_914_scored_text_is_tokenised_separately() {
    let mut server = Server::agreed(r#"["text"]"#);
    let stream =
        server.open(r#"SCORE {"stream_id":2,"model":"tiny","prompt_text":"a","scored_text":"bc"}"#);
    assert_eq!(prompt(&server, 0), [256, 97, 999, 98, 99]);
    let received = server.step(vec![(stream, StreamPiece::Item(text_item(98, "b")))]);
    assert!(received[0].contains(r#""text":"b""#));
    let both =
        r#"SCORE {"stream_id":3,"model":"tiny","prompt":[1],"scored_text":"a","scored":[1]}"#;
    assert!(server.ask(both).contains("invalid_value"));
}

#[test]
fn lm_915_tokenize_and_detokenize_are_answered_at_once() {
    let mut server = Server::agreed(r#"["text"]"#);
    for (message, answer) in [
        (
            r#"TOKENIZE {"stream_id":1,"model":"tiny","text":"ab"}"#,
            r#""tokens":[256,97,98]"#,
        ),
        (
            r#"TOKENIZE {"stream_id":1,"model":"tiny","text":"ab","add_bos":false}"#,
            r#""tokens":[97,98]"#,
        ),
        (
            r#"TOKENIZE {"stream_id":1,"model":"tiny","messages":[{"content":"a"}]}"#,
            r#""tokens":[97,62]"#,
        ),
        (
            r#"DETOKENIZE {"stream_id":1,"model":"tiny","tokens":[256,104,195,169,200]}"#,
            "\"text\":\"hé\u{fffd}\"",
        ),
    ] {
        assert_eq!(
            server.ask(message),
            format!(r#"MSG [{{"stream_id":1,{answer}}}]"#)
        );
    }
    for (message, code) in [
        (
            r#"TOKENIZE {"stream_id":1,"model":"tiny"}"#,
            "missing_required_parameter",
        ),
        (
            r#"TOKENIZE {"stream_id":1,"model":"bare","text":"a"}"#,
            "unsupported_operation",
        ),
        (
            r#"DETOKENIZE {"stream_id":1,"model":"bare","tokens":[1]}"#,
            "unsupported_operation",
        ),
        (
            r#"DETOKENIZE {"stream_id":1,"model":"tiny","tokens":[258]}"#,
            "invalid_value",
        ),
        (
            r#"DETOKENIZE {"stream_id":1,"model":"nope","tokens":[1]}"#,
            "model_not_found",
        ),
    ] {
        let answer = server.ask(message);
        assert!(answer.starts_with(r#"MSG [{"stream_id":1,"error""#) && answer.contains(code));
    }
}

#[test]
fn lm_1201_a_text_has_a_limit() {
    for (bytes, refused) in [(8, false), (9, true)] {
        let mut server = Server::limited(ConnectionLimits {
            // The limit counts the quotes of the string.
            max_text_bytes: 10,
            ..ConnectionLimits::default()
        });
        server.ask(r#"MODEL_INFO {"stream_id":0,"model":"tiny","data":{"lmtp":{"version":2,"features":"all"}}}"#);
        let text = "a".repeat(bytes);
        let message = format!(r#"TOKENIZE {{"stream_id":1,"model":"tiny","text":"{text}"}}"#);
        assert_eq!(server.ask(&message).contains("invalid_value"), refused);
        if bytes < 9 {
            // A prompt and its suffix are one text.
            let message = format!(
                r#"GENERATE {{"stream_id":2,"model":"tiny","prompt_text":"{text}","suffix":"a"}}"#
            );
            let answer = server.ask(&message);
            assert!(answer.contains("with 'suffix' must have"), "{answer}");
        }
    }
}

/// The server that runs such a model checks ids and lengths; requests that need the metadata here are refused.
#[test]
fn lm_712_a_model_without_metadata_is_served_in_token_ids() {
    let mut server = Server::agreed(r#"["text","masks","buffers"]"#);
    let long: Vec<u32> = (0..5_000).collect();
    let ids = serde_json::to_string(&long).unwrap();
    server.open(&format!(
        r#"GENERATE {{"stream_id":3,"model":"far","prompt":{ids},"logit_bias":{{"900000":-1}}}}"#
    ));
    assert!(prompt(&server, 0) == long);
    server.open(r#"SCORE {"stream_id":4,"model":"far","prompt":[4000000000],"scored":[1]}"#);
    for message in [
        r#"GENERATE {"stream_id":5,"model":"far","prompt_text":"a"}"#,
        r#"GENERATE {"stream_id":6,"model":"far","prompt":[1],"stop":"x"}"#,
        r#"MASK {"stream_id":7,"model":"far","mask":"k","allow":[[1,2]]}"#,
        r#"TOKENIZE {"stream_id":8,"model":"far","text":"a"}"#,
    ] {
        let answer = server.ask(message);
        assert!(answer.contains("unsupported_operation"), "{answer}");
    }
    let wrong = r#"GENERATE {"stream_id":9,"model":"far","prompt":[4294967296]}"#;
    assert!(server.ask(wrong).contains("invalid_value"));
    let buffer = r#"BUFFER {"stream_id":10,"model":"far","buffer":"b","append":[1,2]}"#;
    assert!(server.ask(buffer).contains(r#""len":2"#));
}
