//! Controls of a scripted model (section 12): requests choose repeats, pauses and failures.

use sapwood_proto::code::Code;
use serde_json::json;

use super::{ask, error, parrot};

const ONE: &str = "/v2/models/parrot/generate";
const STREAM: &str = "/v2/models/parrot/generate_stream";

const KINDS: (&str, &str) = ("application/json", "text/event-stream; charset=utf-8");
const SEVERAL: &str = r#"{"error":"generate expects model to produce exactly 1 response, use generate stream for model that generates various number of responses"}"#;

fn body(members: &str) -> String {
    let more = if members.is_empty() {
        String::new()
    } else {
        format!(",{members}")
    };
    format!(r#"{{"QUESTION":"x","LIVE":true{more}}}"#)
}

/// TR-504, TR-603, TR-604, TR-607, TR-1102
#[tokio::test]
async fn tr_1103_controls_produce_repeats_and_each_kind_of_failure() {
    let server = parrot(|_| {}).await;
    let head = r#"{"model_name":"parrot","model_version":"1","ANSWER":"#;
    let answer = format!(r#"{head}"x"}}"#);
    let event = format!("data: {answer}\n\n");
    let tired = r#"{"error":"the parrot is tired"}"#;
    let (json, sse) = KINDS;
    for (path, members, status, kind, text) in [
        (ONE, "", 200, json, answer.clone()),
        (ONE, r#""REFUSE":true"#, 500, json, tired.to_owned()),
        (ONE, r#""BREAK":true"#, 500, json, tired.to_owned()),
        (ONE, r#""TIMES":0"#, 500, json, SEVERAL.to_owned()),
        (ONE, r#""TIMES":2"#, 500, json, SEVERAL.to_owned()),
        (ONE, r#""HOLLOW":true"#, 200, json, format!("{head}[]}}")),
        (STREAM, "", 200, sse, event.clone()),
        (STREAM, r#""TIMES":0"#, 200, sse, String::new()),
        (STREAM, r#""TIMES":3"#, 200, sse, event.repeat(3)),
        (
            STREAM,
            r#""REFUSE":true"#,
            500,
            sse,
            format!("data: {tired}\n\n"),
        ),
        (
            STREAM,
            r#""REFUSE":true,"KIND":"unavailable""#,
            503,
            sse,
            format!("data: {tired}\n\n"),
        ),
        (
            STREAM,
            r#""BREAK":true"#,
            200,
            sse,
            format!("{event}data: {tired}\n\n"),
        ),
        (
            STREAM,
            r#""TIMES":0,"BREAK":true"#,
            500,
            sse,
            format!("data: {tired}\n\n"),
        ),
        (
            STREAM,
            r#""PAUSE":0.001,"TIMES":2"#,
            200,
            sse,
            event.repeat(2),
        ),
    ] {
        let received = ask(&server, path, &body(members)).await;
        assert_eq!(
            received.summary(),
            (status, kind.to_owned(), text.as_str()),
            "{path} {members}"
        );
    }
    let wrong = ask(&server, STREAM, r#"{"QUESTION":"x","LIVE":1}"#).await;
    let text =
        r#"{"error":"Unable to parse 'data': attempt to access JSON non-boolean as boolean"}"#;
    assert_eq!(wrong.summary(), (400, json.to_owned(), text));
}

/// Without streaming there is one response, whatever the controls ask for.
#[tokio::test]
async fn tr_1103_without_streaming_most_controls_do_nothing_and_wrong_ones_are_refused() {
    let server = parrot(|_| {}).await;
    let body = r#"{"QUESTION":"x","LIVE":false,"TIMES":5,"PAUSE":9000,"BREAK":true,"other":1}"#;
    let expect = json!({"model_name": "parrot", "model_version": "1", "ANSWER": "x"});
    assert_eq!(ask(&server, ONE, body).await.json(), expect);
    assert_eq!(ask(&server, STREAM, body).await.events(), [expect]);
    for (members, text) in [
        (
            r#""TIMES":"many""#,
            "parameter 'TIMES' must be an integer, 0 or more",
        ),
        (
            r#""TIMES":-1"#,
            "parameter 'TIMES' must be an integer, 0 or more",
        ),
        (
            r#""PAUSE":true"#,
            "parameter 'PAUSE' must be a number of seconds, 0 or more",
        ),
        (
            r#""PAUSE":-1.0"#,
            "parameter 'PAUSE' must be a number of seconds, 0 or more",
        ),
        (r#""BREAK":1"#, "parameter 'BREAK' must be true or false"),
        (
            r#""KIND":"strange""#,
            "parameter 'KIND' must be the name of an error code",
        ),
    ] {
        let answer = ask(&server, STREAM, &self::body(members)).await;
        assert_eq!(
            (answer.summary().0, answer.summary().1.as_str()),
            (400, "application/json")
        );
        assert_eq!(error(&answer), text);
    }
}

/// The whole table of statuses.
#[tokio::test]
async fn tr_1501_every_code_has_its_status() {
    let server = parrot(|_| {}).await;
    let mut table = Vec::new();
    for code in Code::ALL {
        let members = format!(r#""REFUSE":true,"KIND":"{code}""#);
        let one = ask(&server, ONE, &body(&members)).await;
        let stream = ask(&server, STREAM, &body(&members)).await;
        assert_eq!(one.summary().0, stream.summary().0);
        assert_eq!(
            one.head.header("sapwood-error").as_deref(),
            Some(code.name())
        );
        table.push(format!("{code} {}", one.summary().0));
    }
    let expect = "invalid-request 400, not-found 404, already-exists 400, unauthenticated 401, permission-denied 403, \
                  limit-exceeded 400, rate-limited 429, overloaded 503, failed-precondition 400, cancelled 400, \
                  deadline-exceeded 503, truncated 500, upstream-failed 500, controller-failed 500, unavailable 503, \
                  unimplemented 501, aborted 400, internal 500";
    assert_eq!(table.join(", "), expect);
}
