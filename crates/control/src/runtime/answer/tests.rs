//! What answers have, and what is left out of those that are too long.

use super::*;

fn write(name: &str, append: bool) -> VariableWrite {
    VariableWrite {
        name: name.into(),
        value: vec![0xab; 40],
        append,
        when_version_is: None,
    }
}

fn answer(logs: &str, storage: Vec<VariableWrite>) -> StepAnswer {
    let report = StepReport {
        logs: logs.into(),
        storage,
        micros: 10,
    };
    let mut seqs = SeqResults::default();
    seqs.push(2, SeqResult::new(None, report));
    StepAnswer::Mid {
        seqs,
        num_seqs: 1,
        rows: None,
    }
}

fn text(answer: StepAnswer, room: usize) -> String {
    let bytes_max = room;
    let room = AnswerRoom { bytes_max, room };
    let encoded = answer.encode(Some("r"), room, AnswerFormat::default());
    String::from_utf8(encoded.bytes).unwrap()
}

#[test]
fn ai_403_the_members_of_a_result() {
    let storage = vec![VariableWrite {
        when_version_is: Some(3),
        value: vec![0x0a, 0xff],
        ..write("a", true)
    }];
    assert_eq!(
        text(answer("l", storage), 4096),
        r#"{"$rid":"r","type":"ok","data":{"seqs":{"2":{"error":"","result":null,"storage":[{"WriteVar":{"name":"a","value":"0aff","op":"Append","when_version_is":3}}],"logs":"l","micros":10}},"num_seqs":1}}"#
    );
}

#[test]
fn ai_224_the_oldest_logs_go_first() {
    let logs = "\"".repeat(500) + "end";
    let shortened = text(answer(&logs, Vec::new()), 600);
    assert!(
        shortened.len() <= 600 && shortened.contains(r#"\"end"#),
        "{shortened}"
    );
    // Half of the region is guaranteed.
    assert!(shortened.len() > 300 + 80, "{shortened}");
}

#[test]
fn ai_224_then_replaced_writes_go_and_then_all_logs() {
    let storage = vec![
        write("a", false),
        write("b", true),
        write("a", true),
        write("a", false),
        write("a", true),
    ];
    let shortened = text(answer(&"x".repeat(150), storage), 800);
    assert_eq!(shortened.matches("WriteVar").count(), 3, "{shortened}");
    assert!(shortened.contains("xxx"), "{shortened}");
    let storage = (0..4).map(|_| write("a", true)).collect();
    let shortened = text(answer(&"x".repeat(600), storage), 800);
    assert!(
        !shortened.contains("xxx") && shortened.len() <= 800,
        "{shortened}"
    );
}

#[test]
fn ai_224_then_writes_go_of_the_sequences_with_the_most() {
    let mut seqs = SeqResults::default();
    for (id, writes) in [(1, 90), (2, 1)] {
        let storage = (0..writes).map(|_| write("a", true)).collect();
        let report = StepReport {
            storage,
            ..StepReport::default()
        };
        seqs.push(id, SeqResult::new(None, report));
    }
    let (num_seqs, rows) = (2, None);
    let shortened = text(
        StepAnswer::Mid {
            seqs,
            num_seqs,
            rows,
        },
        800,
    );
    assert_eq!(shortened.matches("WriteVar").count(), 1, "{shortened}");
    let storage = (0..6).map(|_| write("a", true)).collect();
    let shortened = text(answer("", storage), 700);
    assert_eq!(shortened.matches("WriteVar").count(), 0, "{shortened}");
    assert!(shortened.contains("\"type\":\"ok\""), "{shortened}");
}

/// AI-742
#[test]
fn ai_441_one_result_that_is_too_large_costs_the_others_nothing() {
    let pre = |tokens: usize| {
        let value = SeqValue::Pre {
            suspend: false,
            num_forks: 1,
            ff_tokens: vec![7; tokens],
            wait: None,
        };
        SeqResult::new(Some(value), StepReport::default())
    };
    let mut pre_seqs = SeqResults::default();
    pre_seqs.push(2, pre(400));
    pre_seqs.push(3, pre(100));
    pre_seqs.push(4, SeqResult::worker_error(&"x".repeat(900)));
    let answer = StepAnswer::PostPre {
        post_seqs: SeqResults::default(),
        pre_seqs,
    };
    let (bytes_max, room) = (1_500, 1_500);
    let room = AnswerRoom { bytes_max, room };
    let encoded = answer.encode(None, room, AnswerFormat::default());
    assert_eq!((&encoded.failed[..], encoded.lost), (&[2][..], false));
    let answer: serde_json::Value = serde_json::from_slice(&encoded.bytes).unwrap();
    let seqs = &answer["data"]["pre_seqs"];
    assert_eq!(seqs["2"]["error"], "Worker: result too large", "{answer}");
    assert_eq!(seqs["2"]["result"], serde_json::Value::Null);
    let tokens = seqs["3"]["result"]["ff_tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), 100);
    // Of a long error the beginning stays, by which it is known.
    assert_eq!(seqs["4"]["error"], format!("Worker: {}", "x".repeat(242)));
}

/// AI-742
#[test]
fn ai_441_of_large_results_only_the_largest_are_dropped() {
    let pre = |tokens: usize| {
        let value = SeqValue::Pre {
            suspend: false,
            num_forks: 1,
            ff_tokens: vec![7; tokens],
            wait: None,
        };
        SeqResult::new(Some(value), StepReport::default())
    };
    let failed = |bytes_max| {
        let mut pre_seqs = SeqResults::default();
        for (id, tokens) in [(2, 900), (3, 300), (4, 290), (5, 10)] {
            pre_seqs.push(id, pre(tokens));
        }
        let answer = StepAnswer::PostPre {
            post_seqs: SeqResults::default(),
            pre_seqs,
        };
        let room = AnswerRoom {
            bytes_max,
            room: bytes_max,
        };
        let encoded = answer.encode(None, room, AnswerFormat::default());
        assert!(encoded.bytes.len() <= bytes_max && !encoded.lost);
        encoded.failed
    };
    // An eighth of the answer is less than the second and the third have.
    assert_eq!(failed(2_000), [2]);
    assert_eq!(failed(1_500), [2, 3]);
    assert!(failed(4_000).is_empty());
}

#[test]
fn ai_224_what_is_still_too_large_is_an_error() {
    let mut seqs = SeqResults::default();
    for id in 0..20 {
        seqs.push(id, SeqResult::worker_error("x"));
    }
    let (num_seqs, rows) = (20, None);
    let error = text(
        StepAnswer::Mid {
            seqs,
            num_seqs,
            rows,
        },
        800,
    );
    assert!(
        error.starts_with(r#"{"$rid":"r","type":"error","error":"response too large; "#)
            && error.ends_with(r#" > 800","is_user_error":false}"#),
        "{error}"
    );
}

#[test]
fn ai_421_an_error_stands_in_the_logs_too() {
    let report = StepReport {
        logs: "printed\n".into(),
        ..StepReport::default()
    };
    let result = SeqResult::callback_error(Label::Post, "trap", report);
    let json = serde_json::to_string(&result).unwrap();
    assert_eq!(
        json,
        r#"{"error":"Error (post): trap","result":{"stop":true},"storage":[],"logs":"printed\nError (post): trap","micros":0}"#
    );
}

#[test]
fn ai_431_a_failure_of_the_runtime_has_no_result() {
    let json = serde_json::to_string(&SeqResult::worker_error("timeout")).unwrap();
    assert_eq!(
        json,
        r#"{"error":"Worker: timeout","result":null,"storage":[],"logs":"Worker: timeout","micros":0}"#
    );
}
