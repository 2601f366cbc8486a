//! Streams of LMTP with controllers.

use sapwood_tests::socket::Socket;

use super::*;
use crate::lmtp::{client, message, stream};

/// A client that has negotiated these features.
async fn agreed(server: &Running, features: &str) -> Socket {
    let mut socket = client(server).await;
    let data = format!(r#"{{"lmtp":{{"version":2,"features":{features}}}}}"#);
    socket
        .send_text(&format!(
            r#"MODEL_INFO {{"stream_id":0,"model":"demo","data":{data}}}"#
        ))
        .await;
    let (_, answer) = message(&mut socket).await;
    assert_eq!(answer[0]["lmtp"]["version"], 2, "{answer:?}");
    socket
}

async fn generate(socket: &mut Socket, id: u32, members: &str) -> Vec<Value> {
    let text =
        format!(r#"GENERATE {{"stream_id":{id},"model":"demo","prompt":[256,97],{members}}}"#);
    socket.send_text(&text).await;
    stream(socket, id).await
}

fn tokens(items: &[Value]) -> Vec<u64> {
    items
        .iter()
        .filter_map(|item| item["token"].as_u64())
        .collect()
}

#[tokio::test]
async fn lm_972_a_controller_chooses_the_tokens_and_stops() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let mut socket = agreed(&server, r#"["controllers","usage"]"#).await;
    let items = generate(
        &mut socket,
        1,
        r#""controller":"moves","controller_arg":"=yes""#,
    )
    .await;
    assert_eq!(tokens(&items), [121, 101, 115]);
    let last = items.last().unwrap();
    assert_eq!(
        (&last["finish_reason"], &last["stop_by"]),
        (&"stop".into(), &"controller".into())
    );
    // The mask leaves one token, whose probability is 1 (LM-411).
    assert_eq!(items[0]["logprob"], 0.0);
    let usage = r#"{"prompt_tokens":2,"cached_tokens":0,"completion_tokens":3,"forced_tokens":0}"#;
    assert_eq!(last["usage"].to_string(), usage);
}

/// LM-950
#[tokio::test]
async fn lm_972_forced_tokens_and_backtracks_are_items() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let mut socket = agreed(&server, r#"["controllers","usage","resume"]"#).await;
    let object = r#""controller":{"id":"moves","arg":"+xy;=ab;<1;=c"}"#;
    let items = generate(&mut socket, 1, object).await;
    assert_eq!(tokens(&items), [120, 121, 97, 98, 99]);
    let forced = items.iter().filter(|item| item["forced"] == true);
    let forced: Vec<_> = forced
        .map(|item| item["top_logprobs"].to_string())
        .collect();
    assert_eq!(forced, [r#"{"120":0.0}"#, r#"{"121":0.0}"#]);
    let back = items
        .iter()
        .position(|item| item["backtrack"] == 1)
        .unwrap();
    assert_eq!(
        (&items[back - 1]["token"], &items[back + 1]["token"]),
        (&98.into(), &99.into())
    );
    assert!(items[back].get("finish_reason").is_none());
    let seqs: Vec<_> = items
        .iter()
        .map(|item| item["seq"].as_u64().unwrap())
        .collect();
    assert_eq!(seqs, (0..items.len() as u64).collect::<Vec<_>>());
    let usage = &items.last().unwrap()["usage"];
    assert_eq!(
        (&usage["completion_tokens"], &usage["forced_tokens"]),
        (&5.into(), &2.into())
    );
}

#[tokio::test]
async fn lm_971_a_controller_that_fails_ends_its_stream_alone() {
    let (server, source) = server(&["demo"], keys()).await;
    let key = ("authorization", "Bearer app");
    let mut socket = Socket::open(&server, "/lmtp", &[key]).await.unwrap();
    let data = r#"{"lmtp":{"version":2,"features":["controllers"]}}"#;
    socket
        .send_text(&format!(
            r#"MODEL_INFO {{"stream_id":0,"model":"demo","data":{data}}}"#
        ))
        .await;
    message(&mut socket).await;
    for (id, controller, arg, code, text) in [
        (
            1,
            "nothing",
            "",
            "controller_failed",
            "tag nothing not found",
        ),
        (2, "private", "", "insufficient_scope", "private"),
        (3, "bad", "", "invalid_value", "invalid grammar: "),
        (4, "moves", "?no luck", "controller_failed", "no luck"),
        (
            5,
            "moves",
            "=a;!it trapped",
            "controller_failed",
            "it trapped",
        ),
    ] {
        let members = format!(r#""controller":"{controller}","controller_arg":"{arg}""#);
        let items = generate(&mut socket, id, &members).await;
        let last = items.last().unwrap();
        assert_eq!(last["code"], code, "{last}");
        assert!(last["error"].as_str().unwrap().contains(text), "{last}");
    }
    let good = generate(
        &mut socket,
        6,
        r#""controller":"moves","controller_arg":"=a""#,
    )
    .await;
    assert_eq!(tokens(&good), [97]);
    let users = source.users.lock().unwrap();
    assert!(
        users
            .iter()
            .all(|user| *user == ("app".to_owned(), false, false))
    );
}

#[tokio::test]
async fn lm_961_a_steered_stream_is_cancelled_as_any_other() {
    let kernel = Kernel::new();
    let (steering, _) = steering();
    let config = scripted::Config {
        script: scripted::Script::Tokens,
        count: 1 << 20,
        tokens_per_s: 200.0,
        ..scripted::Config::default()
    };
    kernel
        .add(steered_model("demo", spawned(config), steering))
        .unwrap();
    let server = Running::start(kernel, Default::default(), Vec::new()).await;
    let mut socket = agreed(&server, r#"["controllers","cancel"]"#).await;
    socket
        .send_text(r#"GENERATE {"stream_id":1,"model":"demo","prompt":[256],"max_tokens":100000,"controller":"moves","controller_arg":"*"}"#)
        .await;
    message(&mut socket).await;
    socket
        .send_text(r#"CANCEL {"stream_id":9,"model":"demo","streams":[1]}"#)
        .await;
    let items = stream(&mut socket, 1).await;
    assert_eq!(items.last().unwrap()["finish_reason"], "cancelled");
}

#[tokio::test]
async fn lm_973_forks_are_samples_of_the_stream() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let mut socket = agreed(&server, r#"["controllers","usage","text"]"#).await;
    let arg = r#""text":true,"controller":"moves","controller_arg":"=ab;k3;#;=z""#;
    let items = generate(&mut socket, 1, arg).await;
    let announced = items.iter().filter(|item| item.get("fork_of").is_some());
    let announced: Vec<_> = announced
        .map(|item| {
            (
                item["sample"].as_u64(),
                item["fork_of"].as_u64(),
                item["inherited"].as_u64(),
            )
        })
        .collect();
    assert_eq!(
        announced,
        [(Some(1), Some(0), Some(2)), (Some(2), Some(0), Some(2))]
    );
    for sample in 0..3 {
        // Before the fork the items have no number: there was one sample.
        let own = items
            .iter()
            .filter(|item| item["sample"].as_u64().unwrap_or(0) == sample);
        let text: String = own
            .clone()
            .filter_map(|item| item["text"].as_str())
            .collect();
        let before = if sample == 0 { "ab" } else { "" };
        assert_eq!(text, format!("{before}{sample}z"));
        let ends = own.filter(|item| item.get("sample_end").is_some());
        assert_eq!(ends.count(), 1, "{sample}");
    }
    let finished = items.iter().filter(|item| !item["finish_reason"].is_null());
    assert_eq!(finished.count(), 1);
    assert_eq!(items.last().unwrap()["usage"]["completion_tokens"], 8);
}

#[tokio::test]
async fn lm_972_logs_and_storage_are_statuses() {
    let (server, _) = server(&["demo"], Vec::new()).await;
    let mut socket = agreed(&server, r#"["controllers","status"]"#).await;
    socket
        .send_text(r#"GENERATE {"stream_id":1,"model":"demo","prompt":[256],"controller":"moves","controller_arg":"p:one;w:n;=a;p:two;=b"}"#)
        .await;
    let (mut statuses, mut over) = (Vec::new(), false);
    while !over {
        let (word, items) = message(&mut socket).await;
        over = items.iter().any(|item| item["finish_reason"] == "stop");
        if word == "STATUS" {
            statuses.extend(items);
        }
    }
    let of = |event: &'static str| {
        statuses
            .iter()
            .filter(move |status| status["event"] == event)
    };
    let printed: String = of("log")
        .map(|status| status["message"].as_str().unwrap())
        .collect();
    assert_eq!(printed, "onetwo");
    let written: Vec<_> = of("storage")
        .map(|status| (&status["name"], &status["value"]))
        .collect();
    assert_eq!(written, [(&"n".into(), &"01".into())]);
}

#[tokio::test]
async fn lm_902_controllers_are_offered_where_a_model_can_be_steered() {
    let features = async |server: &Running, model: &str| {
        let mut socket = client(server).await;
        let data = r#"{"lmtp":{"version":2,"features":["controllers"]}}"#;
        socket
            .send_text(&format!(
                r#"MODEL_INFO {{"stream_id":0,"model":"{model}","data":{data}}}"#
            ))
            .await;
        let (_, answer) = message(&mut socket).await;
        answer[0]["lmtp"]["features"].to_string()
    };
    let (steered, _) = server(&["demo"], Vec::new()).await;
    assert_eq!(features(&steered, "demo").await, r#"["controllers"]"#);
    let plain = crate::lmtp::of_parrot().await;
    assert_eq!(features(&plain, "parrot").await, "[]");
}
