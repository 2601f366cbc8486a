//! Replies as they should be, as they should not be, and as nobody would write them.

use proptest::prelude::*;
use sapwood_proto::steer::SharedMask;
use serde_json::json;

use super::super::request::{MidOp, PreOp, ProcessOp};
use super::super::rows::RowSource;
use super::values::TOKENS_MAX;
use super::*;
use crate::host::{MidReturned, WAIT_NAMES_MAX};

const LIMITS: ResultLimits = ResultLimits {
    vocabulary: 40,
    forks: 4,
};

/// A region as bytes.
struct Region(Vec<u8>);

impl RowSource for Region {
    fn bytes(&self, offset: usize, bytes: usize) -> Option<Vec<u8>> {
        Some(self.0.get(offset..offset.checked_add(bytes)?)?.to_vec())
    }

    fn size(&self) -> usize {
        self.0.len()
    }
}

/// A P1 row that allows these tokens.
fn p1_row(allowed: &[usize]) -> Vec<u8> {
    let element = |token| {
        if allowed.contains(&token) {
            0.0_f32
        } else {
            -100.0
        }
    };
    (0..LIMITS.vocabulary)
        .flat_map(|token| element(token).to_le_bytes())
        .collect()
}

fn process(ids: &[u64]) -> MainRequest {
    let op = |&id: &u64| ProcessOp {
        id,
        req_id: None,
        clone_id: None,
        clone_idx: None,
        sampled: None,
        tokens: Vec::new(),
        backtrack: 0,
    };
    MainRequest::Process {
        ops: ids.iter().map(op).collect(),
        freed: Vec::new(),
    }
}

fn mid(ids: &[u64]) -> MainRequest {
    let op = |&id: &u64| MidOp { id, clone_id: None };
    MainRequest::Mid {
        ops: ids.iter().map(op).collect(),
    }
}

fn post_pre() -> MainRequest {
    let op = PreOp {
        id: 4,
        req_id: "r".to_owned(),
    };
    MainRequest::PostPre {
        post_ops: Vec::new(),
        pre_ops: vec![op],
        freed: Vec::new(),
    }
}

fn sequence(result: Value) -> Value {
    json!({"error": "", "result": result, "storage": [], "logs": "", "micros": 10})
}

fn read(request: &MainRequest, live: &[u64], data: Value) -> Result<StepResults, Broken> {
    read_in(request, live, &data, &Region(vec![0xff; 64]))
}

fn read_in(
    request: &MainRequest,
    live: &[u64],
    data: &Value,
    region: &Region,
) -> Result<StepResults, Broken> {
    let data = serde_json::value::to_raw_value(data).unwrap();
    read_step(request, live, ReplyData(&data), region, LIMITS)
}

fn read_start(data: &Value) -> (CallResult, StepReport) {
    let data = serde_json::value::to_raw_value(data).unwrap();
    read_begun(ReplyData(&data), LIMITS)
}

fn mask_of(result: &CallResult) -> SharedMask {
    match result {
        Ok(Returned::Mid(MidReturned::Sample(Some(mask)))) => SharedMask::clone(mask),
        Ok(Returned::Branches(branches)) => SharedMask::clone(branches[0].mask.as_ref().unwrap()),
        other => panic!("{other:?}"),
    }
}

/// The answer of the page's transcript.
#[test]
fn ai_411_row_i_belongs_to_op_i() {
    let rows = [p1_row(&[3]), p1_row(&[]), p1_row(&[0, 39])].concat();
    let data = json!({"seqs": {"9": sequence(json!(null)), "4": sequence(json!(null)), "5": sequence(json!(null))}, "num_seqs": 3});
    let results = read_in(&mid(&[4, 5, 9]), &[], &data, &Region(rows)).unwrap();
    let first = mask_of(&results.mid[0].1);
    assert_eq!((first.count(), first.allows(3)), (1, true));
    // All disallowed is no mask (AI-231).
    assert!(matches!(
        results.mid[1].1,
        Ok(Returned::Mid(MidReturned::Sample(None)))
    ));
    let third = mask_of(&results.mid[2].1);
    assert_eq!((third.count(), third.allows(39)), (2, true));
}

/// AI-405, AI-414
#[test]
fn ai_403_results_of_p1_are_those_of_the_page() {
    let pre = |suspend, num_forks, ff_tokens: &[Token]| {
        let result = json!({"suspend": suspend, "num_forks": num_forks, "ff_tokens": ff_tokens});
        let data = json!({"post_seqs": {"4": sequence(json!({"stop": true}))}, "pre_seqs": {"4": sequence(result)}});
        let mut results = read(&post_pre(), &[4], data).unwrap();
        assert_eq!(
            results.post.pop().unwrap().1,
            Ok(Returned::Post { stop: true })
        );
        results.pre.pop().unwrap().1.unwrap()
    };
    assert!(pre(false, 1, &[3, 39]).is_ok());
    assert!(pre(false, 4, &[]).is_ok());
    let reason = |result: CallResult| result.unwrap_err().reason;
    assert_eq!(reason(pre(false, 5, &[])), ErrorReason::LIMIT);
    assert_eq!(reason(pre(false, 1, &[40])), ErrorReason::BAD_RESULT);
    assert_eq!(reason(pre(true, 1, &[1])), ErrorReason::BAD_RESULT);
    assert_eq!(reason(pre(false, 2, &[1])), ErrorReason::BAD_RESULT);
    let splice = |splice: Value| {
        let data = json!({"seqs": {"4": sequence(splice)}});
        read(&mid(&[4]), &[], data).unwrap().mid.pop().unwrap().1
    };
    // The wire counts the token that an engine would have sampled first.
    assert_eq!(
        splice(json!({"ff_tokens": [7], "backtrack": 3})),
        Ok(Returned::Mid(MidReturned::Splice {
            backtrack: 2,
            ff_tokens: vec![7]
        }))
    );
    assert!(splice(json!({"ff_tokens": [40]})).is_err());
    assert!(splice(json!({"ff_tokens": vec![1; TOKENS_MAX]})).is_ok());
    assert!(splice(json!({"ff_tokens": vec![1; TOKENS_MAX + 1]})).is_err());
}

#[test]
fn ai_1005_a_sequence_waits_for_so_many_variables_only() {
    let names = |count| vec!["v"; count];
    let pre = |count| {
        let result =
            json!({"suspend": true, "num_forks": 1, "ff_tokens": [], "wait": names(count)});
        let data = json!({"post_seqs": {}, "pre_seqs": {"4": sequence(result)}});
        let mut results = read(&post_pre(), &[4], data).unwrap();
        results.pre.pop().unwrap().1.unwrap()
    };
    assert!(pre(WAIT_NAMES_MAX).is_ok());
    assert_eq!(
        pre(WAIT_NAMES_MAX + 1).unwrap_err().reason,
        ErrorReason::BAD_RESULT
    );
    let branch = |count| {
        let branch = json!({"splices": [{"ff_tokens": []}], "wait": names(count)});
        let mut data = layout("f32", 0, 0, 0, 0);
        data["seqs"] = json!({"4": sequence(json!({"branches": [branch]}))});
        let mut results = read(&process(&[4]), &[], data).unwrap();
        results.mid.pop().unwrap().1
    };
    assert!(branch(WAIT_NAMES_MAX).is_ok());
    assert_eq!(
        branch(WAIT_NAMES_MAX + 1).unwrap_err().reason,
        ErrorReason::BAD_RESULT
    );
}

#[test]
fn ai_441_what_a_controller_prints_does_not_make_it_late() {
    let line = |logs: &str| StepReport {
        logs: logs.to_owned(),
        ..StepReport::default()
    };
    assert!(is_late(&line("hi\n⏲ timeout [deadline: 4ms; step 1/10]\n")));
    assert!(!is_late(&line(
        "⏲ timeout [deadline: 4ms; step 1/10]\nwaits\n"
    )));
    assert!(!is_late(&line(
        "not ⏲ timeout [deadline: 4ms; step 1/10]\n"
    )));
}

#[test]
fn ai_441_a_late_pre_is_no_result_yet() {
    let mut late = sequence(json!({"suspend": true, "num_forks": 1, "ff_tokens": []}));
    late["logs"] = json!("⏲ timeout [deadline: 4ms; step 1/10]\n");
    let data = json!({"post_seqs": {}, "pre_seqs": {"4": late}});
    let results = read(&post_pre(), &[4], data).unwrap();
    assert!(results.post.is_empty());
    assert_eq!(results.pre, [(4, None)]);
    assert!(results.reports[0].1.logs.contains("step 1/10"));
}

fn layout(dtype: &str, offset: usize, stride: usize, elements: usize, masks: usize) -> Value {
    json!({"dtype": dtype, "first_mask_byte_offset": offset, "mask_num_bytes": stride, "mask_num_elts": elements,
           "num_masks": masks})
}

fn branches(rows: &[usize], layout: &Value) -> Value {
    let branch = |row: &usize| json!({"sample_mask": row, "temperature": null, "splices": []});
    let list: Vec<_> = rows.iter().map(branch).collect();
    let mut data = layout.clone();
    data["seqs"] = json!({"4": sequence(json!({"branches": list}))});
    data
}

/// AI-233, AI-234
#[test]
fn ai_235_masks_of_each_type_are_read_as_bits() {
    let allowed = |token: usize| token == 2 || token == 39;
    let rows: [(&str, usize, Vec<u8>); 4] = [
        (
            "f32",
            4,
            (0..64)
                .flat_map(|it| {
                    if allowed(it) {
                        [0; 4]
                    } else {
                        [0, 0, 0x80, 0xff]
                    }
                })
                .collect(),
        ),
        (
            "f16",
            2,
            (0..64)
                .flat_map(|it| if allowed(it) { [0; 2] } else { [0, 0xfc] })
                .collect(),
        ),
        (
            "bf16",
            2,
            (0..64)
                .flat_map(|it| if allowed(it) { [0; 2] } else { [0x80, 0xff] })
                .collect(),
        ),
        ("bool", 0, vec![4, 0, 0, 0, 0x80, 0xff, 0xff, 0xff]),
    ];
    for (dtype, size, row) in rows {
        let stride = row.len();
        assert!(size == 0 || stride == 64 * size);
        let region = Region([vec![0x55; 128], row.clone(), row].concat());
        let data = branches(&[1], &layout(dtype, 128, stride, 64, 2));
        let results = read_in(&process(&[4]), &[], &data, &region).unwrap();
        let mask = mask_of(&results.mid[0].1);
        assert_eq!(
            (mask.count(), mask.allows(2), mask.allows(39)),
            (2, true, true),
            "{dtype}"
        );
    }
}

#[test]
fn ai_852_a_mask_outside_of_the_region_costs_the_runtime() {
    let region = || Region(vec![0; 1_000]);
    let check = |row: usize, layout: Value| {
        let data = branches(&[row], &layout);
        read_in(&process(&[4]), &[], &data, &region()).map(drop)
    };
    // Two rows of 64 floats end at 1,000.
    assert_eq!(check(1, layout("f32", 488, 256, 64, 2)), Ok(()));
    for (row, wrong) in [
        (2, layout("f32", 488, 256, 64, 2)),
        (1, layout("f32", 489, 256, 64, 2)),
        (0, layout("f32", 0, 156, 64, 1)),
        (0, layout("f32", 0, 256, 39, 1)),
        (1, layout("f32", 0, usize::MAX, 64, 2)),
        (usize::MAX, layout("bool", 0, 8, 64, usize::MAX)),
        (0, layout("f32", usize::MAX, 256, 64, 1)),
        (0, layout("f64", 0, 256, 64, 1)),
        (0, json!({})),
    ] {
        assert!(check(row, wrong.clone()).is_err(), "{row} {wrong}");
    }
}

#[test]
fn ai_853_what_is_wrong_with_one_sequence_costs_that_one() {
    let good = sequence(json!({"branches": []}));
    for wrong in [
        json!(null),
        json!(7),
        json!({"error": 7}),
        sequence(json!(null)),
        sequence(json!({"branches": 7})),
        sequence(json!({"branches": [{}]})),
        sequence(json!({"branches": [{"splices": [{"ff_tokens": [40]}]}]})),
        sequence(json!({"branches": [{"splices": [{"when_sampled": [1]}]}]})),
        sequence(json!({"branches": [{"sample_mask": -1}]})),
        sequence(json!({"branches": [{"splices": [{"backtrack": -1}]}]})),
        sequence(json!({"branches": [{"temperature": -1, "splices": [{}]}]})),
        sequence(json!({"branches": vec![json!({"splices": [{}]}); 5]})),
        sequence(json!({"branches": [{"splices": vec![json!({}); 65]}]})),
    ] {
        let mut data = layout("f32", 0, 160, 40, 1);
        data["seqs"] = json!({"4": wrong, "5": good, "99": good, "x": good});
        let results = read(&process(&[4, 5, 6]), &[], data).unwrap();
        let reasons: Vec<_> = results
            .mid
            .iter()
            .map(|(id, result)| (*id, result.is_ok()))
            .collect();
        assert_eq!(reasons, [(4, false), (5, true), (6, false)], "{wrong}");
    }
}

/// Sequences that append as much as they may are an honest answer; one with more is its own failure.
#[test]
fn ai_853_what_one_sequence_answers_too_much_costs_no_other() {
    let ids: Vec<u64> = (1..=34).collect();
    let answer = |tokens: usize, seventh: &Value| {
        // As text: a tree of it would take longer than what is tested.
        let list = vec!["1"; tokens].join(",");
        let all =
            format!(r#"{{"result":{{"branches":[{{"splices":[{{"ff_tokens":[{list}]}}]}}]}}}}"#);
        let seventh = seventh.to_string();
        let seqs = ids.iter().map(|id| match id {
            7 => format!(r#""7":{seventh}"#),
            id => format!(r#""{id}":{all}"#),
        });
        let seqs = seqs.collect::<Vec<_>>().join(",");
        let layout = layout("f32", 0, 160, 40, 1).to_string();
        let layout = layout.strip_prefix('{').unwrap();
        let message = format!(r#"{{"type":"ok","data":{{"seqs":{{{seqs}}},{layout}}}"#);
        let data = Reply::parse(message.as_bytes()).unwrap().data.unwrap();
        let region = Region(vec![0xff; 64]);
        read_step(&process(&ids), &[], data, &region, LIMITS).unwrap()
    };
    let writes = |count: usize| {
        let write =
            json!({"WriteVar": {"name": "n", "value": "00", "op": "Set", "when_version_is": null}});
        let mut result = sequence(json!({"branches": []}));
        result["storage"] = json!(vec![write; count]);
        result
    };
    let lists = |count: usize| {
        let branch = |count: usize| json!({"splices": [{"ff_tokens": vec![1; count]}]});
        sequence(json!({"branches": [branch(count), branch(1)]}))
    };
    for (tokens, seventh, expect) in [
        // More than two million values.
        (TOKENS_MAX, lists(TOKENS_MAX - 1), None),
        (1, lists(TOKENS_MAX), Some(ErrorReason::BAD_RESULT)),
        (
            1,
            sequence(json!(vec![0; RESULT_VALUES_MAX])),
            Some(ErrorReason::LIMIT),
        ),
        (1, writes(1_024), None),
        (
            1,
            writes(STORAGE_VALUES_MAX / 20 + 1),
            Some(ErrorReason::LIMIT),
        ),
    ] {
        for (id, result) in answer(tokens, &seventh).mid {
            let reason = result.err().map(|failure| failure.reason);
            let expect = expect.filter(|_| id == 7);
            assert_eq!(reason, expect, "{id}");
        }
    }
}

#[test]
fn ai_315_a_prompt_has_a_longest() {
    let begun = |tokens: usize| read_start(&sequence(json!({"prompt": vec![1; tokens]}))).0;
    assert!(begun(PROMPT_TOKENS_MAX).is_ok());
    let reason = |result: CallResult| result.unwrap_err().reason;
    assert_eq!(
        reason(begun(PROMPT_TOKENS_MAX + 1)),
        ErrorReason::BAD_RESULT
    );
    assert_eq!(reason(begun(PROMPT_TOKENS_MAX + 64)), ErrorReason::LIMIT);
}

#[test]
fn ai_932_errors_have_the_reasons_of_the_page() {
    for (error, reason) in [
        ("Worker: timeout", ErrorReason::TIMEOUT),
        ("Worker: too many forks (max=16)", ErrorReason::LIMIT),
        ("Worker: no free slots", ErrorReason::LIMIT),
        ("Worker: died", ErrorReason::TRAP),
        ("Error (setup): bad argument", ErrorReason::INIT),
        ("Error (mid): wasm trap: unreachable", ErrorReason::TRAP),
        ("Error (mid): fuel exhausted", ErrorReason::FUEL),
    ] {
        assert_eq!(failure_of(error).reason, reason, "{error}");
    }
    let begun = |error: &str, result: Value| {
        let mut data = sequence(result);
        data["error"] = json!(error);
        read_start(&data).0
    };
    let prompt = Ok(Returned::Begun {
        prompt: Some(vec![1]),
    });
    assert_eq!(begun("", json!({"prompt": [1]})), prompt);
    assert!(begun("", json!({"prompt": [40]})).is_err());
    let failure = begun("Error (init): no", json!(null)).unwrap_err();
    assert_eq!(failure.reason, ErrorReason::INIT);
}

/// AI-222
#[test]
fn ai_301_an_answer_has_a_type() {
    let reply = Reply::parse(br#"{"$rid":"a","type":"ok","data":{"pong":1}}"#).unwrap();
    assert_eq!(reply.rid.as_deref(), Some("a"));
    let data: Value = reply.data.unwrap().read().unwrap();
    assert_eq!(data, json!({"pong": 1}));
    let reply = Reply::parse(br#"{"type":"error","error":"bad op","is_user_error":true}"#);
    let error = reply.unwrap().data.unwrap_err();
    assert_eq!((error.text.as_str(), error.is_user), ("bad op", true));
    let deep = [&b"["[..]; 200].concat();
    for broken in [
        &b""[..],
        b"{",
        b"7",
        b"[]",
        b"{}",
        b"{\"type\":\"x\"}",
        b"\xff",
        &deep,
    ] {
        assert!(Reply::parse(broken).is_err(), "{broken:?}");
    }
}

#[test]
fn ai_951_writes_are_read_from_hex() {
    let command = |op: &str, value: &str| json!({"WriteVar": {"name": "n", "value": value, "op": op, "when_version_is": 3}});
    let read = write(command("Append", "0aFF")).unwrap();
    assert_eq!(
        (
            read.name.as_str(),
            &read.value[..],
            read.append,
            read.when_version_is
        ),
        ("n", &[0x0a, 0xff][..], true, Some(3))
    );
    for (op, value) in [("Set", "0"), ("Set", "0g"), ("Clear", "00"), ("Set", "é")] {
        assert_eq!(write(command(op, value)), None, "{op} {value}");
    }
    assert_eq!(write(json!({"ReadVar": {"name": "n"}})), None);
}

/// JSON that looks as if it belonged there.
fn garbage() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|it| json!(it)),
        any::<i64>().prop_map(|it| json!(it)),
        (0..50_u64).prop_map(|it| json!(it)),
        any::<f64>().prop_map(|it| json!(it)),
        ".{0,4}".prop_map(|it| json!(it)),
        Just(json!("f32")),
        Just(json!("Worker: timeout")),
    ];
    let keys = prop::sample::select(vec![
        "error",
        "result",
        "storage",
        "logs",
        "micros",
        "branches",
        "sample_mask",
        "splices",
        "ff_tokens",
        "backtrack",
        "when_sampled",
        "temperature",
        "stop",
        "suspend",
        "num_forks",
        "seqs",
        "post_seqs",
        "pre_seqs",
        "4",
        "5",
        "dtype",
        "first_mask_byte_offset",
        "mask_num_bytes",
        "mask_num_elts",
        "num_masks",
        "WriteVar",
        "prompt",
    ]);
    leaf.prop_recursive(6, 64, 6, move |inner| {
        let members = prop::collection::vec((keys.clone(), inner.clone()), 0..6);
        prop_oneof![
            prop::collection::vec(inner, 0..4).prop_map(Value::Array),
            members.prop_map(|members| {
                let members = members
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value));
                Value::Object(members.collect())
            }),
        ]
    })
}

proptest! {
    /// AI-853: whatever comes, each sequence that was asked for has one result, or the runtime is broken.
    #[test]
    fn ai_853_garbage_is_an_error_and_never_a_panic(data in garbage(), bytes in any::<Vec<u8>>()) {
        let _ = Reply::parse(&bytes);
        let _ = Reply::parse(&serde_json::to_vec(&data).unwrap());
        let _ = read_start(&data);
        for request in [process(&[4, 5]), mid(&[4, 5]), post_pre()] {
            if let Ok(results) = read(&request, &[4, 5], data.clone()) {
                let ids: Vec<u64> = results.mid.iter().map(|(id, _)| *id).collect();
                let wanted: &[u64] = match request {
                    MainRequest::PostPre { .. } => &[],
                    _ => &[4, 5],
                };
                prop_assert_eq!(ids, wanted);
                prop_assert!(results.pre.len() <= 2 && results.post.len() <= 2);
            }
        }
    }
}
