//! What the TypeScript client sends and reads, and what proto3-JSON lets others send.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use prost_types::Any;

use super::*;
use crate::evergreen::Param;
use crate::evergreen::tests::leaf;
use crate::generated::sapwood::v1::{ActionOptions, GenerateConfig};

fn read(text: &str) -> WireMessage {
    let read =
        decode(text.as_bytes(), Side::Server).unwrap_or_else(|status| panic!("{status}: {text}"));
    WireMessage {
        wire_bytes: 0,
        ..read.message
    }
}

fn written(message: &WireMessage, side: Side) -> String {
    let mut out = BytesMut::new();
    encode(message, side, &mut out);
    String::from_utf8(out.to_vec()).unwrap()
}

fn chunk(mimetype: &'static str, role: &'static str, data: Option<&'static str>) -> Option<Chunk> {
    Some(Chunk {
        metadata: Some(Arc::new(Metadata::of(mimetype).with_role(role))),
        payload: data.map(|data| Payload::Data(Bytes::from_static(data.as_bytes()))),
    })
}

fn one(fragment: Fragment) -> WireMessage {
    WireMessage {
        fragments: [fragment].into_iter().collect(),
        ..WireMessage::default()
    }
}

#[test]
fn ev_723_the_messages_of_the_typescript_client_are_decoded() {
    let action = Action {
        name: "GENERATE".into(),
        target: "evergreen://demo".into(),
        inputs: vec![Param::new("prompt", "u1")],
        outputs: vec![Param::new("response", "u2")],
        ..Action::default()
    };
    let called = WireMessage {
        actions: vec![action],
        ..WireMessage::default()
    };
    for (text, message) in [
        (
            r#"{"actions":[{"targetSpec":{"id":"evergreen://demo"},"name":"GENERATE","inputs":[{"name":"prompt","id":"u1"}],"outputs":[{"name":"response","id":"u2"}]}]}"#,
            called,
        ),
        (
            r#"{"nodeFragments":[{"id":"u1","chunkFragment":{"metadata":{"mimetype":"text/plain","role":"USER"},"data":"SGkh"},"seq":0,"continued":true}]}"#,
            one(leaf(
                "u1",
                0,
                false,
                chunk("text/plain", "USER", Some("Hi!")),
            )),
        ),
        (
            r#"{"nodeFragments":[{"id":"u1","seq":1,"continued":false}]}"#,
            one(leaf("u1", 1, true, None)),
        ),
    ] {
        assert_eq!(read(text), message, "{text}");
    }
}

/// EV-723
#[test]
fn ev_721_messages_to_the_typescript_client_are_exactly_these() {
    for (message, text) in [
        (
            one(leaf(
                "u2",
                0,
                false,
                chunk("text/plain", "ASSISTANT", Some("Hello")),
            )),
            r#"{"nodeFragments":[{"id":"u2","seq":0,"continued":true,"chunkFragment":{"metadata":{"mimetype":"text/plain","role":"ASSISTANT"},"data":"SGVsbG8="}}]}"#,
        ),
        (
            one(leaf("u2", 1, true, chunk("text/plain", "ASSISTANT", None))),
            r#"{"nodeFragments":[{"id":"u2","seq":1,"continued":false,"chunkFragment":{"metadata":{"mimetype":"text/plain","role":"ASSISTANT"}}}]}"#,
        ),
        (
            one(Fragment {
                children: vec!["a".into(), "b\"".into()],
                ..leaf("t", 0, true, None)
            }),
            r#"{"nodeFragments":[{"id":"t","seq":0,"continued":false,"childIds":["a","b\""]}]}"#,
        ),
        // An empty list of children would make this a tree.
        (
            one(leaf("e", 0, true, None)),
            r#"{"nodeFragments":[{"id":"e","seq":0,"continued":false}]}"#,
        ),
        // Its parser throws on a mimetype without exactly one slash.
        (
            one(leaf("m", 0, true, chunk("text", "", Some("?>")))),
            r#"{"nodeFragments":[{"id":"m","seq":0,"continued":false,"chunkFragment":{"metadata":{"mimetype":"application/octet-stream"},"data":"Pz4="}}]}"#,
        ),
        (WireMessage::default(), "{}"),
    ] {
        assert_eq!(written(&message, Side::Server), text);
    }
    // Our client sends metadata once: for a server each repetition begins a new chunk (EV-405).
    let later = one(leaf("u", 1, false, chunk("text/plain", "USER", Some("x"))));
    assert_eq!(
        written(&later, Side::Client),
        r#"{"nodeFragments":[{"id":"u","seq":1,"continued":true,"chunkFragment":{"data":"eA=="}}]}"#
    );
}

#[test]
fn ev_720_equivalent_json_forms_decode_to_the_same_message() {
    let plain = one(leaf("p", 7, false, chunk("a/b", "USER", Some("?>hi"))));
    for text in [
        r#"{"nodeFragments":[{"id":"p","seq":7,"continued":true,"chunkFragment":{"metadata":{"mimetype":"a/b","role":"USER"},"data":"Pz5oaQ=="}}]}"#,
        r#"{"node_fragments":[{"id":"p","seq":"7","continued":true,"chunk_fragment":{"metadata":{"mimetype":"a/b","role":"USER"},"data":"Pz5oaQ"}}]}"#,
        r#" {"nodeFragments":[{"id":"p","seq":7.0,"continued":true,"childIds":[],"chunkFragment":{"metadata":{"mimetype":"a/b","role":"USER","experimental":null},"data":"Pz5oaQ","ref":null}}],"actions":null}"#,
        r#"{"from":{"the":["future"]},"nodeFragments":[{"x":1,"id":"p","seq":"7e0","continued":true,"childIds":null,"chunkFragment":{"metadata":{"mimetype":"a\/b","role":"USER"},"data":"Pz5oaQ=="}}]}"#,
    ] {
        assert_eq!(read(text), plain, "{text}");
    }
    let url_safe = read(r#"{"nodeFragments":[{"chunkFragment":{"data":"_-8"}}]}"#);
    let Some(Payload::Data(data)) = &url_safe.fragments[0].chunk.as_ref().unwrap().payload else {
        panic!("data was sent");
    };
    assert_eq!(*data, [0xff, 0xef][..]);
    for nothing in ["{}", r#"{"nodeFragments":null}"#, r#"{"error":{"code":3}}"#] {
        assert_eq!(read(nothing), WireMessage::default());
    }
}

#[test]
fn ev_720_times_file_names_and_references_round_trip() {
    let text = r#"{"nodeFragments":[{"id":"i","seq":0,"continued":false,"chunkFragment":{"metadata":{"mimetype":"image/png","originalFileName":"cat.png","captureTime":"2024-05-06T07:08:09.500Z"},"ref":"data:,x"}}]}"#;
    let message = read(text);
    let chunk = message.fragments[0].chunk.as_ref().unwrap();
    assert_eq!(chunk.payload, Some(Payload::Ref("data:,x".into())));
    let time = chunk.metadata.as_ref().unwrap().capture_time.unwrap();
    assert_eq!((time.seconds, time.nanos), (1_714_979_289, 500_000_000));
    let again = written(&message, Side::Server);
    assert_eq!(read(&again), message, "{again}");
    let shifted = text.replace("07:08:09.500Z", "09:08:09.5+02:00");
    assert_eq!(read(&shifted), message);
}

#[test]
fn ev_720_configs_are_mapped_by_type_and_invalid_ones_become_undecodable() {
    let config = |json: &str| {
        let text = format!(r#"{{"actions":[{{"name":"F","configs":[{json}]}}]}}"#);
        read(&text).actions[0].configs[0].clone()
    };
    let generate = config(
        r#"{"@type":"type.googleapis.com/sapwood.v1.GenerateConfig","maxTokens":"5","top_p":0.5,"logitBias":{"7":-1}}"#,
    );
    let decoded = GenerateConfig::decode(&*generate.value).unwrap();
    assert_eq!(
        (decoded.max_tokens, decoded.top_p, decoded.logit_bias[&7]),
        (Some(5), Some(0.5), -1.0)
    );
    let options =
        config(r#"{"@type":"type.googleapis.com/sapwood.v1.ActionOptions","timeout":"1.5s"}"#);
    let timeout = ActionOptions::decode(&*options.value)
        .unwrap()
        .timeout
        .unwrap();
    assert_eq!((timeout.seconds, timeout.nanos), (1, 500_000_000));
    let object =
        config(r#"{"@type":"type.googleapis.com/google.protobuf.Struct","value":{"seed":1}}"#);
    let object = prost_types::Struct::decode(&*object.value).unwrap();
    assert!(object.fields.contains_key("seed"));
    for (json, value) in [
        (
            r#"{"@type":"type.googleapis.com/sapwood.v1.GenerateConfig","maxTokens":"many"}"#,
            &[0xff][..],
        ),
        (r#"{"@type":"x/y.Z","value":"_w=="}"#, &[0xff]),
        (r#"{"@type":"x/y.Z","a":1}"#, &[]),
        ("5", &[0xff]),
        ("{}", &[0xff]),
    ] {
        assert_eq!(config(json).value, value, "{json}");
    }
}

#[test]
fn ev_720_invalid_messages_are_refused_without_quoting_them() {
    let deep = |levels: usize| {
        let (open, close) = ("[".repeat(levels - 1), "]".repeat(levels - 1));
        format!("{{\"x\":{open}{close}}}")
    };
    assert!(decode(deep(DEPTH_MAX).as_bytes(), Side::Server).is_ok());
    let too_deep = deep(DEPTH_MAX + 1);
    for text in [
        "",
        "[]",
        "{",
        r#"{"nodeFragments":5}"#,
        r#"{"nodeFragments":[null]}"#,
        r#"{"nodeFragments":[["p",0]]}"#,
        r#"{"actions":[{"targetSpec":["demo"]}]}"#,
        r#"{"nodeFragments":[{"seq":2147483648}]}"#,
        r#"{"nodeFragments":[{"seq":"-2147483649"}]}"#,
        r#"{"nodeFragments":[{"seq":1.5}]}"#,
        r#"{"nodeFragments":[{"seq":" 1"}]}"#,
        r#"{"nodeFragments":[{"continued":"true"}]}"#,
        r#"{"nodeFragments":[{"chunkFragment":{"data":"secret!"}}]}"#,
        r#"{"nodeFragments":[{"chunkFragment":{"data":"","ref":""}}]}"#,
        r#"{"nodeFragments":[{"chunkFragment":{"metadata":{"captureTime":"noon"}}}]}"#,
        r#"{"nodeFragments":[{"id":"a","id":"b"}]}"#,
        r#"{"nodeFragments":[{"id":"\ud800"}]}"#,
        "{\"nodeFragments\":[{\"id\":\"\u{7}\"}]}",
        too_deep.as_str(),
    ] {
        let refused = decode(text.as_bytes(), Side::Server).unwrap_err();
        assert_eq!(refused.known(), Some(Reason::BadMessage), "{text}");
        assert!(!refused.message.contains("secret"));
    }
    assert!(decode(b"{\"nodeFragments\":[{\"id\":\"\xff\"}]}", Side::Server).is_err());
}

#[test]
fn ev_720_the_number_of_parts_is_limited() {
    // Two brackets and a brace count four each, a comma one, an empty fragment four.
    let many = |fragments: usize| {
        let list = vec!["{}"; fragments].join(",");
        decode(
            format!("{{\"nodeFragments\":[{list}]}}").as_bytes(),
            Side::Server,
        )
        .map(|_| ())
    };
    let most = (ENTRIES_MAX - 8 + 1) / 5;
    assert_eq!(many(most), Ok(()));
    assert_eq!(
        many(most + 1).unwrap_err().known(),
        Some(Reason::FragmentLimit)
    );
}

/// D-47: `Any` values are built from descriptors, and limited in all fragments and actions together.
#[test]
fn d_47_parts_within_any_are_limited_per_message() {
    // An Any counts eight and its two braces and its bracket four each; it has a comma, and one between its values.
    let config = |values: usize| {
        let list = vec!["0"; values].join(",");
        format!(
            r#"{{"@type":"type.googleapis.com/google.protobuf.Struct","value":{{"a":[{list}]}}}}"#
        )
    };
    let values = |counted: usize| counted - 8 - 3 * 4 - 1 + 1;
    let sent = |configs: &[String]| {
        let configs = configs.join(",");
        let text = format!(r#"{{"actions":[{{"name":"GENERATE","configs":[{configs}]}}]}}"#);
        decode(text.as_bytes(), Side::Server).map(|read| read.message.actions[0].configs.len())
    };
    let (half, most) = (ANY_ENTRIES_MAX / 2, ANY_ENTRIES_MAX);
    assert_eq!(sent(&[config(values(most))]), Ok(1));
    assert_eq!(sent(&[config(values(half)), config(values(half))]), Ok(2));
    let past = [
        vec![config(values(most + 1))],
        vec![config(values(half)), config(values(half + 1))],
    ];
    for configs in past {
        let refused = sent(&configs).unwrap_err();
        assert_eq!(refused.known(), Some(Reason::FragmentLimit));
        assert!(
            refused.message.contains("any_entries_max"),
            "{}",
            refused.message
        );
    }
    let experimental = config(values(most + 1));
    let text = format!(
        r#"{{"nodeFragments":[{{"chunkFragment":{{"metadata":{{"experimental":[{experimental}]}}}}}}]}}"#
    );
    let refused = decode(text.as_bytes(), Side::Server).unwrap_err();
    assert_eq!(refused.known(), Some(Reason::FragmentLimit));
}

/// Statuses are built from descriptors too, each from text that is base64 in the message.
#[test]
fn d_47_parts_within_statuses_are_limited_per_message() {
    // A status counts eight for itself and its brace and its bracket four each; it has a comma, and one between values.
    let status = |counted: usize| {
        let list = vec!["0"; counted - 8 - 2 * 4 - 1 + 1].join(",");
        format!(r#"{{"code":5,"unknown":[{list}]}}"#)
    };
    let sent = |counted: &[usize]| {
        let fragments = counted.iter().map(|counted| {
            let data = STANDARD.encode(status(*counted));
            let mimetype = mimetype::JSON_STATUS;
            format!(
                r#"{{"chunkFragment":{{"metadata":{{"mimetype":"{mimetype}"}},"data":"{data}"}}}}"#
            )
        });
        let fragments = fragments.collect::<Vec<_>>().join(",");
        let text = format!(r#"{{"nodeFragments":[{fragments}]}}"#);
        decode(text.as_bytes(), Side::Server).map(|read| read.message.fragments.len())
    };
    let half = ANY_ENTRIES_MAX / 2;
    assert_eq!(sent(&[half, half]), Ok(2));
    let refused = sent(&[half, half + 1]).unwrap_err();
    assert_eq!(refused.known(), Some(Reason::FragmentLimit));
    // Only a client reads the error that ends a session.
    let error = |side, counted| {
        let text = format!(r#"{{"error":{}}}"#, status(counted));
        decode(text.as_bytes(), side).map(|read| read.error.is_some())
    };
    assert_eq!(error(Side::Client, ANY_ENTRIES_MAX), Ok(true));
    assert_eq!(error(Side::Server, ANY_ENTRIES_MAX + 1), Ok(false));
    let refused = error(Side::Client, ANY_ENTRIES_MAX + 1).unwrap_err();
    assert_eq!(refused.known(), Some(Reason::FragmentLimit));
}

/// EV-931
#[test]
fn ev_903_errors_and_statuses_are_written_in_json() {
    let status = Status::new(Reason::SeqPastFinal, "past \"it\"")
        .with("node", "p")
        .with("seq", 7);
    let mut out = BytesMut::new();
    encode_error(&status, &mut out);
    let text = std::str::from_utf8(&out).unwrap();
    // The order of metadata is not significant.
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let expect = value(
        r#"{"error":{"code":3,"status":"INVALID_ARGUMENT","message":"past \"it\"","details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"SEQ_PAST_FINAL","domain":"evergreen.sapwood","metadata":{"node":"p","seq":"7"}}]}}"#,
    );
    assert_eq!(value(text), expect);
    assert_eq!(
        decode(text.as_bytes(), Side::Client).unwrap().error,
        Some(status.clone())
    );
    let strange = r#"{"error":{"code":5,"message":"gone","details":[{"@type":"x/y.Z","a":1}]}}"#;
    let strange = decode(strange.as_bytes(), Side::Client)
        .unwrap()
        .error
        .unwrap();
    assert_eq!((strange.code, &*strange.message), (Code::NotFound, "gone"));
    // A failed node: its mimetype marks the status, which decodes to the same value.
    for status in [Some(Arc::new(status)), None] {
        let failed = one(leaf(
            "r",
            3,
            true,
            Some(Chunk {
                metadata: None,
                payload: Some(Payload::Status(status.clone())),
            }),
        ));
        let text = written(&failed, Side::Server);
        assert!(
            text.contains("application/json; type=google.rpc.Status"),
            "{text}"
        );
        let back = read(&text).fragments.remove(0).chunk.unwrap();
        match status {
            Some(_) => assert_eq!(back.payload, Some(Payload::Status(status))),
            None => assert_eq!(back.payload, Some(Payload::Data(Bytes::from_static(b"{}")))),
        }
    }
}

#[test]
fn an_any_of_unknown_type_round_trips_as_base64() {
    let any = Any {
        type_url: "example.com/a.B".into(),
        value: vec![1, 2, 255],
    };
    let text = any::write(&any);
    assert_eq!(text, r#"{"@type":"example.com/a.B","value":"AQL/"}"#);
    assert!(matches!(any::read(&text), AnyRead::Fits(back) if back == any));
}
