//! Cached prefixes, shared prompts, and a KV cache that is too small.

use super::harness::{Answer, Bench, read, request_for};
use crate::api::{FinishReason, GenerationRequest};
use crate::scripted::{Config as Script, Script as Name, Scripted};
use crate::{Config, Engine, PrefixDiskConfig, PrefixSharing};

fn computed(reports: &[crate::StepReport]) -> u32 {
    reports
        .iter()
        .map(|report| {
            report.decoded.len() as u32
                + report
                    .prefilled
                    .iter()
                    .map(|prefill| prefill.1)
                    .sum::<u32>()
        })
        .sum()
}

#[test]
fn the_second_turn_of_a_conversation_computes_only_its_new_tokens() {
    for truncates in [true, false] {
        let mut bench = Bench::new(Script {
            truncates,
            ..Script::default()
        });
        let first = bench.answer(request_for("a question"));
        assert_eq!(first.usage.unwrap().cached_tokens, 0);
        // The earlier output without its EOG token, and a new question.
        let mut handle = bench.submit(request_for("a questiona question and more"));
        let reports = bench.settle();
        let usage = read(&mut handle).usage.unwrap();
        assert_eq!(
            (usage.prompt_tokens, usage.cached_tokens),
            (30, 21),
            "{truncates}"
        );
        assert_eq!(computed(&reports[..1]), 9);
        assert_eq!(bench.engine.stats().prefix_hits.get(), 21);
    }
}

/// A request of this prefix scope.
fn of_scope(scope: u64, prompt: &str) -> GenerationRequest {
    let mut request = request_for(prompt);
    request.prefix_scope = scope;
    request
}

#[test]
fn lm_609_prefixes_are_shared_within_a_scope_or_by_all() {
    for (prefix_sharing, expect) in [
        (PrefixSharing::Scope, [0, 0, 21, 21]),
        (PrefixSharing::All, [0, 21, 21, 21]),
    ] {
        let config = Config {
            prefix_sharing,
            ..Config::default()
        };
        let mut bench = Bench::with(Script::default(), config);
        let prompt = "a question that costs";
        let cached = [1, 2, 1, 2].map(|scope| {
            let answer = bench.answer(of_scope(scope, prompt));
            answer.usage.unwrap().cached_tokens
        });
        assert_eq!(cached, expect, "{prefix_sharing:?}");
    }
}

/// A request does not wait for a prefix of another scope, which it could not use.
#[test]
fn lm_609_requests_of_two_scopes_compute_one_prefix_each() {
    for (prefix_sharing, prefills) in [(PrefixSharing::Scope, 2), (PrefixSharing::All, 1)] {
        let config = Config {
            prefix_sharing,
            ..Config::default()
        };
        let mut bench = Bench::with(Script::default(), config);
        let prompt = "p".repeat(200);
        let _handles = [1, 1, 1, 2, 2, 2].map(|scope| {
            let mut request = of_scope(scope, &prompt);
            request.params.max_tokens = Some(1);
            bench.submit(request)
        });
        let reports = bench.settle();
        let tokens = computed(&reports);
        // Each request that shares a prompt computes its last token itself.
        assert_eq!(
            tokens,
            prefills * 201 + (6 - prefills),
            "{prefix_sharing:?}"
        );
    }
}

/// A sequence that was preempted while its reader does not read computes nothing, perhaps for a long time.
#[test]
fn lm_609_a_request_does_not_wait_for_the_prefix_of_a_parked_and_preempted_sequence() {
    let script = Script {
        script: Name::Tokens,
        count: 40,
        parallel: 1,
        kept_prefixes: 0,
        ..Script::default()
    };
    let config = Config {
        outbox_events: 4,
        ..Config::default()
    };
    let mut bench = Bench::with(script, config);
    let prompt = "the word ".repeat(40);
    let mut unread = bench.submit(request_for(&prompt));
    bench.settle();
    let mut other = request_for("another prompt");
    other.params.max_tokens = Some(1);
    let _other = bench.submit(other);
    let preempted: usize = bench.settle().iter().map(|it| it.preempted.len()).sum();
    assert_eq!(preempted, 1);
    let mut request = request_for(&prompt);
    request.params.max_tokens = Some(1);
    let mut second = bench.submit(request);
    bench.settle();
    assert_eq!(read(&mut second).usage.unwrap().completion_tokens, 1);
    // The first one continues once it is read.
    let mut answer = read(&mut unread);
    while answer.usage.is_none() {
        bench.settle();
        while let Some(event) = unread.try_next() {
            answer.take(event);
        }
    }
    assert_eq!(answer.usage.unwrap().completion_tokens, 41);
}

/// Otherwise a caller with a long queue would delay all that share its prompt.
#[test]
fn lm_608_d_54_a_request_whose_turn_comes_first_computes_the_common_prefix() {
    let mut bench = Bench::new(Script {
        parallel: 2,
        ..Script::default()
    });
    let of_connection = |connection, prompt: &str| {
        let mut request = request_for(prompt);
        request.connection = connection;
        request.params.max_tokens = Some(2);
        request
    };
    let common = "p".repeat(200);
    let mut handles: Vec<_> = (0..6)
        .map(|index: u8| of_connection(1, &char::from(b'a' + index).to_string().repeat(60)))
        .map(|request| bench.submit(request))
        .collect();
    // The last one of the first connection, and the only one of the second.
    handles.push(bench.submit(of_connection(1, &common)));
    handles.push(bench.submit(of_connection(2, &common)));
    let reports = bench.settle();
    let admitted: Vec<u64> = reports.iter().flat_map(|it| it.admitted.clone()).collect();
    assert_eq!(admitted, [0, 7, 1, 2, 3, 4, 5, 6]);
    // The common prefix is computed once nevertheless.
    assert_eq!(bench.engine.stats().prefix_hits.get(), 200);
}

/// A queue of many choices that share one prefix is not looked through once for each of them.
#[test]
fn lm_609_choices_wait_with_the_first_of_their_request() {
    let mut bench = Bench::new(Script {
        batch_tokens: 16,
        ..Script::default()
    });
    let prompt = "a".repeat(60);
    let _leader = bench.submit(request_for(&format!("{prompt}1")));
    let mut request = request_for(&format!("{prompt}2"));
    request.params.n = Some(3);
    let mut handle = bench.submit(request);
    bench.step();
    let awaited = |key: usize| bench.owner.requests.sequences[key].after.unwrap().key;
    // The first choice waits for the leader, and the others for the first one: none was passed over by itself.
    assert_eq!([1, 2, 3].map(awaited), [0, 1, 1]);
    bench.settle();
    let answer = read(&mut handle);
    assert_eq!(answer.choices.len(), 3);
    assert!(answer.choices.iter().all(|(text, ..)| text.ends_with('2')));
}

/// Requests that waited for a prefix which was not computed do not compute it once each.
#[test]
fn lm_609_when_a_leader_ends_the_next_request_computes_the_prefix_for_the_others() {
    let mut bench = Bench::new(Script::default());
    let prompt = "p".repeat(1000);
    let mut handles: Vec<_> = (0..4).map(|_| bench.submit(request_for(&prompt))).collect();
    assert_eq!(bench.step().admitted, [0]);
    drop(handles.remove(0));
    assert_eq!(bench.step().admitted, [1]);
}

/// Many different answers to one prompt do not evict another conversation.
#[test]
fn equal_requests_do_not_evict_a_conversation() {
    let script = Script {
        script: Name::Tokens,
        gap: 0.0,
        vocab: 2000,
        count: 12,
        kept_prefixes: 8,
        parallel: 4,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let words = "a word of a conversation ".repeat(10);
    let first = bench.answer(request_for(&words));
    assert_eq!(first.usage.unwrap().cached_tokens, 0);
    for seed in 0..40 {
        let mut request = request_for(&"the same request again ".repeat(4));
        (request.params.temperature, request.params.seed) = (Some(1.0), Some(seed));
        bench.answer(request);
    }
    let second = bench.answer(request_for(&(words + "and on")));
    let usage = second.usage.unwrap();
    assert!(usage.prompt_tokens - usage.cached_tokens < 8, "{usage:?}");
}

#[test]
fn a_match_shorter_than_its_minimum_is_computed() {
    // Every prompt begins with BOS.
    for (common, cached) in [(14, 0), (15, 16), (16, 17)] {
        let mut bench = Bench::new(Script::default());
        bench.answer(request_for(&("p".repeat(common) + &"x".repeat(20))));
        let answer = bench.answer(request_for(&("p".repeat(common) + &"y".repeat(20))));
        assert_eq!(answer.usage.unwrap().cached_tokens, cached, "{common}");
    }
}

#[test]
fn prefixes_are_shared_across_requests_that_run() {
    let script = Script {
        script: Name::Tokens,
        count: 500,
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let prompt = "the word ".repeat(40);
    let _first = bench.submit(request_for(&prompt));
    bench.step();
    let _second = bench.submit(request_for(&(prompt + "and")));
    let report = bench.step();
    assert_eq!(report.prefilled.len(), 1);
    assert!(report.prefilled[0].1 <= 2, "{report:?}");
}

#[test]
fn n_choices_share_one_prefill() {
    for truncates in [true, false] {
        let mut bench = Bench::new(Script {
            truncates,
            ..Script::default()
        });
        let mut request = request_for(&"p".repeat(200));
        (request.params.n, request.params.max_tokens) = (Some(8), Some(3));
        let mut handle = bench.submit(request);
        let reports = bench.settle();
        let answer = read(&mut handle);
        assert!(
            answer.choices.iter().all(|choice| choice.0 == "ppp"
                && choice.2.as_ref().unwrap().reason == FinishReason::Length)
        );
        assert_eq!(answer.choices.len(), 8);
        let usage = answer.usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (201, 24));
        // The prompt once, its last token for each further choice, two decodes for each.
        assert_eq!(computed(&reports), 201 + 7 + 8 * 2, "{truncates}");
    }
}

#[test]
fn choices_beyond_the_slots_take_turns() {
    let mut bench = Bench::new(Script {
        parallel: 2,
        kept_prefixes: 1,
        ..Script::default()
    });
    let mut request = request_for("turns");
    request.params.n = Some(7);
    let answer = bench.answer(request);
    assert_eq!(
        answer
            .choices
            .iter()
            .map(|choice| &*choice.0)
            .collect::<Vec<_>>(),
        ["turns"; 7]
    );
}

#[test]
fn choices_of_a_sampled_request_differ_and_repeat_with_their_seed() {
    let answer = |seed| {
        let script = Script {
            script: Name::Tokens,
            gap: 0.0,
            vocab: 2000,
            count: 12,
            ..Script::default()
        };
        let mut request = request_for("x");
        (
            request.params.n,
            request.params.seed,
            request.params.temperature,
        ) = (Some(3), Some(seed), Some(1.0));
        Bench::new(script).answer(request).choices
    };
    let choices = answer(5);
    assert!(choices[0].1 != choices[1].1 && choices[1].1 != choices[2].1);
    assert_eq!(answer(5), choices);
    assert_ne!(answer(6), choices);
}

/// Many sequences in a KV cache for few; each output is the same as if it ran alone.
#[test]
fn a_full_cache_preempts_and_outputs_stay_the_same() {
    let script = |cells| Script {
        script: Name::Tokens,
        gap: 0.0,
        vocab: 1500,
        count: 60,
        context_tokens: 120,
        parallel: 8,
        kept_prefixes: 4,
        cells: Some(cells),
        ..Script::default()
    };
    for truncates in [true, false] {
        let mut bench = Bench::new(Script {
            truncates,
            ..script(150)
        });
        let request = |index: u64| {
            let mut request = request_for(&"ab".repeat(index as usize + 1));
            (request.params.seed, request.params.temperature) = (Some(index), Some(1.0));
            request.params.top_logprobs = Some(2);
            request
        };
        let mut handles: Vec<_> = (0..8).map(|index| bench.submit(request(index))).collect();
        let preempted: usize = bench
            .settle()
            .iter()
            .map(|report| report.preempted.len())
            .sum();
        assert!(preempted > 0);
        assert_eq!(bench.engine.stats().preemptions.get(), preempted as u64);
        for (handle, index) in handles.iter_mut().zip(0..) {
            let alone = Bench::new(script(2000)).answer(request(index));
            assert_eq!(read(handle).choices, alone.choices, "{index}");
        }
    }
}

#[test]
fn the_lowest_priority_is_preempted() {
    let script = Script {
        script: Name::Tokens,
        count: 60,
        context_tokens: 100,
        parallel: 3,
        cells: Some(110),
        ..Script::default()
    };
    let mut bench = Bench::new(script);
    let handles: Vec<_> = [1, 0, 2]
        .into_iter()
        .map(|priority| {
            let mut request = request_for("0123456789");
            request.params.priority = Some(priority);
            bench.submit(request)
        })
        .collect();
    let reports = bench.settle();
    let preempted: Vec<u64> = reports
        .iter()
        .flat_map(|report| report.preempted.clone())
        .collect();
    assert_eq!(preempted.first(), Some(&1));
    assert!(
        !preempted.contains(&2),
        "the highest priority is never preempted: {preempted:?}"
    );
    assert_eq!(handles.len(), 3);
}

#[test]
fn a_full_context_ends_with_length() {
    let mut bench = Bench::new(Script {
        script: Name::Tokens,
        context_tokens: 20,
        ..Script::default()
    });
    let answer = bench.answer(request_for("12345"));
    assert_eq!(
        answer.choices[0].2.as_ref().unwrap().reason,
        FinishReason::Length
    );
    assert_eq!(answer.usage.unwrap().completion_tokens, 14);
}

/// Conversations in turn, of which the KV cache holds only a few: each finds what it said before.
#[test]
fn conversations_that_lost_their_cells_go_on_where_they_were() {
    for (truncates, window_tokens) in [(true, 0), (true, 8), (false, 0)] {
        let script = Script {
            truncates,
            window_tokens,
            saves: true,
            parallel: 2,
            kept_prefixes: 2,
            context_tokens: 600,
            cells: Some(600),
            ..Script::default()
        };
        let mut bench = Bench::new(script);
        let mut texts: Vec<String> = (0..20)
            .map(|number| format!("conversation {number:02} begins with a question"))
            .collect();
        for round in 0..3 {
            for text in &mut texts {
                let answer = bench.answer(request_for(text));
                let cached = answer.usage.unwrap().cached_tokens as usize;
                if round > 0 {
                    assert!(
                        cached >= text.len() - 10,
                        "{truncates} {window_tokens} {round}: {cached} of {}",
                        text.len()
                    );
                }
                text.push_str(answer.text());
                text.push_str(" and so on");
            }
        }
        assert!(bench.engine.stats().prefix_restored.get() > 3_000);
        assert!(bench.engine.stats().prefix_saved_bytes.get() > 20 * 8 * 40);
    }
}

/// Over the end of an engine: unloaded, or with its process.
#[test]
fn cached_prefixes_outlive_an_engine_that_ends_in_order() {
    // With a window, the prompt is asked again by a checkpoint.
    [0, 8].into_iter().for_each(prefixes_outlive_an_engine);
}

fn prefixes_outlive_an_engine(window_tokens: u32) {
    let folder = tempfile::tempdir().unwrap();
    let config = Config {
        prefix_disk: Some(PrefixDiskConfig {
            folder: folder.path().join("model.prefixes"),
            bytes: 1 << 20,
        }),
        ..Config::default()
    };
    let prompt =
        "a question that is long enough to be saved, and asked again after the engine has ended";
    let restored = |name: &str, scope: u64| {
        let script = Script {
            name: name.into(),
            window_tokens,
            saves: true,
            ..Script::default()
        };
        let model = Box::new(Scripted::new(script).unwrap());
        let engine = Engine::spawn(model, config.clone()).unwrap();
        let handle = engine.submit(of_scope(scope, prompt)).unwrap();
        let mut answer = Answer::default();
        for event in futures::executor::block_on_stream(handle) {
            answer.take(event);
        }
        engine.end();
        engine.wait_ended();
        assert!(engine.is_lost());
        answer.usage.unwrap().cached_tokens
    };
    assert_eq!(restored("a", 0), 0);
    assert_eq!(restored("a", 1), 0, "another scope");
    // All but its last token; it begins with a BOS token.
    assert_eq!(restored("a", 0) as usize, prompt.len());
    assert_eq!(restored("a", 1) as usize, prompt.len());
    // Files of another model are not used.
    assert_eq!(restored("b", 0), 0);
    assert_eq!(restored("b", 0) as usize, prompt.len());
    assert_eq!(restored("a", 0) as usize, prompt.len());
}

#[test]
fn saved_prefixes_are_dropped_for_another_model() {
    let mut bench = Bench::new(Script {
        saves: true,
        ..Script::default()
    });
    let prompt = "a question that is long enough to be saved ";
    for of in 0..8 {
        bench.answer(request_for(&format!("{of} {}", prompt.repeat(3))));
    }
    let stats = std::sync::Arc::clone(bench.engine.stats());
    assert!(stats.prefix_saved_bytes.get() > 0);
    bench.engine.drop_saved_prefixes();
    bench.step();
    assert_eq!(stats.prefix_saved_bytes.get(), 0);
    let answer = bench.answer(request_for(&format!("0 {}", prompt.repeat(3))));
    assert_eq!(answer.usage.unwrap().cached_tokens, 0);
}
