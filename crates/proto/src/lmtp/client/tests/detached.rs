//! Streams that outlive their connection.

use super::*;

const AGREED: &str = r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":2,"features":["cancel","resume"],"session":"s_1"}}]"#;
const WITHOUT: &str =
    r#"MSG [{"stream_id":1,"model_info":{},"lmtp":{"version":2,"features":["cancel"]}}]"#;

fn asks() -> Features {
    Features::NONE.with(Feature::Cancel).with(Feature::Resume)
}

/// A client with GENERATE 2, of which items 0 and 1 have come, SCORE 3, and MODEL_INFO 4.
fn numbered() -> ClientMachine {
    let mut client = ClientMachine::new(ClientTimeouts::default());
    client.negotiate("tiny", asks(), Time::ZERO).unwrap();
    client.handle(AGREED, Time::ZERO);
    let mut wanted = wanted();
    wanted.params.max_tokens = Some(9);
    client.generate("tiny", &wanted, Time::ZERO).unwrap();
    let score = Score {
        prompt: vec![1],
        scored: vec![7, 8],
        ..Score::default()
    };
    client.score("tiny", &score, Time::ZERO).unwrap();
    client.model_info("tiny", Time::ZERO).unwrap();
    let items = r#"TOKEN [{"token":7,"stream_id":2,"seq":0},{"token":8,"stream_id":2,"seq":1}]"#;
    client.handle(items, Time::ZERO);
    let mut received = events(&mut client);
    received.remove(0);
    assert_eq!(received, ["2: 7", "2: 8"]);
    client
}

/// The same on a new connection that has negotiated these features, with the RESUME sent there.
fn again(agreed: &str) -> (ClientMachine, Option<String>) {
    let mut client = numbered();
    assert!(client.part());
    assert_eq!(
        events(&mut client),
        ["4: connection_lost the connection to the upstream was lost"]
    );
    assert!(client.features().is_empty());
    assert_eq!(client.detached_session(), Some("tiny"));
    client.negotiate("tiny", asks(), Time::ZERO).unwrap();
    let agreed = agreed.replace("\"stream_id\":1", "\"stream_id\":5");
    client.handle(&agreed.replace("s_1", "s_2"), Time::ZERO);
    events(&mut client);
    let asked = client.come_back(Time::ZERO);
    let asked = asked.map(|asked| String::from_utf8(asked.to_vec()).unwrap());
    (client, asked)
}

#[test]
fn lm_965_a_resumed_stream_delivers_each_item_once() {
    let (mut client, asked) = again(AGREED);
    assert_eq!(
        asked.unwrap(),
        r#"RESUME {"model":"tiny","stream_id":6,"session":"s_1","streams":[{"stream_id":2,"after_seq":1},{"stream_id":3,"after_seq":-1}]}"#
    );
    assert_eq!(client.come_back(Time::ZERO), None, "asked once");
    let answer = r#"MSG [{"stream_id":6,"resumed":[2],"gone":[3],"conflict":[]}]"#;
    client.handle(answer, Time::ZERO);
    let items = r#"TOKEN [{"token":8,"stream_id":2,"seq":1},{"token":9,"stream_id":2,"seq":2,"finish_reason":"stop"}]"#;
    client.handle(items, Time::ZERO);
    assert_eq!(
        events(&mut client),
        [
            "3: connection_lost the connection to the upstream was lost",
            "2: 9 stop"
        ]
    );
    assert_eq!((client.outstanding(), client.dropped()), (0, 1));
}

#[test]
fn lm_965_streams_that_cannot_be_resumed_fail() {
    let lost = |id: u64| format!("{id}: connection_lost the connection to the upstream was lost");
    // The new connection has not negotiated resume.
    let (mut client, asked) = again(WITHOUT);
    assert_eq!(asked, None);
    assert_eq!(events(&mut client), [lost(2), lost(3)]);
    for answers in [true, false] {
        let (mut client, _) = again(AGREED);
        if answers {
            let removed = r#"MSG [{"stream_id":6,"error":"gone","code":"stream_gone"}]"#;
            client.handle(removed, Time::ZERO);
        } else {
            client.tick(Time::from_millis(4_999));
            assert_eq!(events(&mut client), [""; 0]);
            client.tick(Time::from_millis(5_000));
        }
        assert_eq!(events(&mut client), [lost(2), lost(3)]);
        assert_eq!(client.outstanding(), 0);
    }
    // A message that is not its answer does not complete RESUME.
    for odd in [r#""model_info":{}"#, r#""cancelled":[]"#] {
        let (mut client, _) = again(AGREED);
        client.handle(&format!("MSG [{{\"stream_id\":6,{odd}}}]"), Time::ZERO);
        assert_eq!((events(&mut client), client.outstanding()), (vec![], 3));
        client.tick(Time::from_millis(5_000));
        assert_eq!(events(&mut client), [lost(2), lost(3)]);
    }
    // Lost again before RESUME was answered.
    let (mut client, _) = again(AGREED);
    assert!(!client.part());
    assert_eq!(events(&mut client), [lost(2), lost(3)]);
    // No other connection can be made.
    let mut client = numbered();
    client.part();
    client.lost();
    assert_eq!(events(&mut client)[1..], [lost(2), lost(3)]);
    assert_eq!(client.detached_session(), None);
    assert_eq!(client.come_back(Time::ZERO), None);
}

#[test]
fn lm_965_a_missing_item_fails_its_stream() {
    let mut client = numbered();
    client.handle(r#"TOKEN {"token":7,"stream_id":2,"seq":3}"#, Time::ZERO);
    assert_eq!(
        events(&mut client),
        ["2: connection_lost the upstream has left out items of the stream"]
    );
}

/// LM-702: an abandoned stream is not named in RESUME, so the peer cancels it.
#[test]
fn lm_965_an_abandoned_stream_is_not_named_in_resume() {
    let mut client = numbered();
    let calls: Vec<_> = [2, 3].map(ClientCallId).into();
    assert!(client.part());
    for call in calls {
        assert_eq!(client.abandon(call), None);
    }
    client.negotiate("tiny", asks(), Time::ZERO).unwrap();
    client.handle(
        &AGREED.replace("\"stream_id\":1", "\"stream_id\":5"),
        Time::ZERO,
    );
    let asked = client.come_back(Time::ZERO).unwrap();
    assert!(asked.ends_with(br#""session":"s_1","streams":[]}"#));
    // Streams that a peer does not number cannot be resumed.
    let mut client = busy();
    assert!(!client.part());
    assert_eq!(
        (events(&mut client).len(), client.detached_session()),
        (3, None)
    );
}
