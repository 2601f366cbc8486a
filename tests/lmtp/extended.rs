//! Version 2 over a real socket and a real engine: what the machine's own tests cannot show.

use sapwood_proto::time::Time;
use sapwood_tests::socket::Socket;
use sapwood_tests::{Running, until};
use serde_json::{Value, json};

use super::{client, message, of_parrot, stepped, stream, told};

const NEGOTIATE: &str = r#"MODEL_INFO {"stream_id":1,"model":"parrot","data":{"lmtp":{"version":2,"features":["text","cancel","usage","samples","teleport"]}}}"#;

fn text(items: &[Value]) -> String {
    items
        .iter()
        .filter_map(|item| item["text"].as_str())
        .collect()
}

async fn negotiated(server: &Running) -> Socket {
    let headers = [("sec-websocket-protocol", "lmtp.v2")];
    let socket = Socket::open(server, "/lmtp", &headers).await.unwrap();
    assert_eq!(socket.headers["sec-websocket-protocol"], "lmtp.v2");
    socket
}

/// LM-902, LM-903, LM-911, LM-950
#[tokio::test]
async fn lm_901_text_is_negotiated_and_generated_without_a_round_trip() {
    let server = of_parrot().await;
    let mut socket = client(&server).await;
    socket.say(NEGOTIATE).await;
    let ask = r#"GENERATE {"model":"parrot","prompt_text":"Größe","stream_id":2}"#;
    socket.say(ask).await;
    let (word, items) = message(&mut socket).await;
    assert_eq!(word, "MSG");
    let said = &items[0]["lmtp"];
    assert_eq!(said["version"], json!(2));
    assert_eq!(
        said["features"],
        json!(["text", "cancel", "usage", "samples"])
    );
    let items = stream(&mut socket, 2).await;
    assert_eq!(text(&items), "Größe");
    assert_eq!(items[0]["prompt_len"], json!(8), "the beginning counts");
    let usage = &items.last().unwrap()["usage"];
    assert_eq!(
        (&usage["prompt_tokens"], &usage["completion_tokens"]),
        (&json!(8), &json!(8))
    );
}

/// LM-905, LM-913, LM-915
#[tokio::test]
async fn lm_905_the_subprotocol_opens_everything() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    socket
        .say(r#"TOKENIZE {"stream_id":1,"model":"parrot","text":"Hi"}"#)
        .await;
    let tokens = message(&mut socket).await.1[0]["tokens"].clone();
    assert!(
        [json!([256, 72, 105]), json!([72, 105])].contains(&tokens),
        "{tokens}"
    );
    socket
        .say(r#"DETOKENIZE {"stream_id":1,"model":"parrot","tokens":[72,105]}"#)
        .await;
    assert_eq!(message(&mut socket).await.1[0]["text"], json!("Hi"));
    let ask = r#"GENERATE {"model":"parrot","prompt_text":"Hello","stop":"lo","stream_id":2}"#;
    socket.say(ask).await;
    let items = stream(&mut socket, 2).await;
    assert_eq!(text(&items), "Hel");
    assert_eq!(
        items.last().unwrap()["stop_match"],
        json!("lo"),
        "{items:?}"
    );
    let ask =
        r#"GENERATE {"model":"parrot","messages":[{"role":"user","content":"Yes"}],"stream_id":3}"#;
    socket.say(ask).await;
    assert_eq!(text(&stream(&mut socket, 3).await), "Yes");
    let ask = r#"GENERATE {"model":"parrot","messages":[{"content":7}],"stream_id":4}"#;
    socket.say(ask).await;
    assert_eq!(told(&stream(&mut socket, 4).await).1, "invalid_value");
}

#[tokio::test]
async fn lm_961_a_cancelled_stream_frees_its_row() {
    let (mut owner, server) = stepped(super::chatter()).await;
    let mut socket = negotiated(&server).await;
    let open = server
        .shared
        .metrics
        .streams_open
        .with_label_values(&["lmtp"]);
    let ask = r#"GENERATE {"model":"parrot","prompt":[1],"max_tokens":500,"stream_id":1}"#;
    socket.say(ask).await;
    until("it is open", || open.get() == 1).await;
    owner.step(Time::ZERO);
    assert_eq!(message(&mut socket).await.0, "TOKEN");
    socket
        .say(r#"CANCEL {"stream_id":2,"model":"parrot","streams":[1,77]}"#)
        .await;
    let items = stream(&mut socket, 1).await;
    assert_eq!(items.last().unwrap()["finish_reason"], json!("cancelled"));
    let answer = message(&mut socket).await.1;
    assert_eq!(
        (&answer[0]["cancelled"], &answer[0]["unknown"]),
        (&json!([1]), &json!([77]))
    );
    owner.step(Time::from_millis(1));
    assert!(owner.is_empty());
}

/// Samples are streams of the engine's of their own.
#[tokio::test]
async fn lm_973_samples_end_each_and_the_stream_with_the_last() {
    let server = of_parrot().await;
    let mut socket = negotiated(&server).await;
    let ask = r#"GENERATE {"model":"parrot","prompt":[72],"n":3,"stream_id":1}"#;
    socket.say(ask).await;
    let items = stream(&mut socket, 1).await;
    for sample in 0..3 {
        let tokens: Vec<_> = items
            .iter()
            .filter(|item| item["sample"] == json!(sample))
            .filter_map(|item| item["token"].as_u64())
            .collect();
        assert_eq!(tokens, [72, 257]);
    }
}
