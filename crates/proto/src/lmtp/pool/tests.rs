//! Pools on a simulated clock.

mod journeys;

use std::sync::Arc;

use super::*;
use crate::lmtp::{
    GenerateRequest, ReceivedBranch, ReceivedItem, Score, StreamDemand, StreamFinish, StreamUsage,
};
use crate::params::{GenerationParams, LoraName, LoraUse};

const fn at(seconds: u64) -> Time {
    Time::from_millis(1_000 * seconds)
}

/// A pool whose upstreams all serve.
fn pool(weights: &[u32]) -> PoolMachine {
    let mut pool = PoolMachine::new(weights.iter().copied(), PoolOptions::default());
    for member in pool.members() {
        pool.probed(member, ProbeOutcome::Answered(None), Time::ZERO);
    }
    pool
}

/// This number of blocks of the prompt with this name.
fn prompt(name: u32, blocks: u32) -> Vec<Token> {
    (0..16 * blocks).map(|at| 1_000 * name + at).collect()
}

fn route(pool: &mut PoolMachine, prompt: &[Token]) -> usize {
    pool.route(prompt, None, Time::ZERO).unwrap().index()
}

/// The upstreams of this number of streams whose prompts are unknown.
fn spread(pool: &mut PoolMachine, streams: usize) -> Vec<usize> {
    (0..streams).map(|_| route(pool, &[])).collect()
}

fn conditions(pool: &PoolMachine) -> Vec<Condition> {
    pool.members().map(|one| pool.condition(one)).collect()
}

#[test]
fn lm_801_each_stream_is_routed_on_its_own() {
    let mut pool = pool(&[1, 1, 1]);
    assert_eq!(spread(&mut pool, 6), [0, 1, 2, 0, 1, 2]);
}

#[test]
fn lm_802_the_upstream_of_the_longest_known_prefix_is_taken() {
    let mut pool = pool(&[1, 1, 1]);
    let long = prompt(1, 4);
    pool.remember(PoolMember(1), &long[..32]);
    pool.remember(PoolMember(2), &long);
    assert_eq!(route(&mut pool, &long), 2);
    // Behind a block that differs, equal blocks do not count.
    let mut other = long.clone();
    other[20] += 1;
    pool.remember(PoolMember(1), &long[..16]);
    assert_eq!(route(&mut pool, &other), 1);
    // An incomplete block does not count.
    assert_eq!(route(&mut pool, &long[..15]), 0);
    // An upstream that cannot be used gives way to one that knows a shorter prefix.
    pool.remember(PoolMember(1), &long[..32]);
    pool.lost(PoolMember(2), at(1));
    assert_eq!(route(&mut pool, &long), 1);
}

#[test]
fn lm_802_the_least_recently_used_blocks_are_evicted() {
    let options = PoolOptions {
        blocks: 8,
        ..PoolOptions::default()
    };
    let mut pool = PoolMachine::new([1, 1], options);
    for member in pool.members() {
        pool.probed(member, ProbeOutcome::Answered(None), Time::ZERO);
    }
    let prompts = [prompt(1, 4), prompt(2, 4)];
    for prompt in &prompts {
        pool.remember(PoolMember(1), prompt);
    }
    // At the limit both are known. One more block evicts the last block of the one that was not used again.
    assert_eq!(
        pool.affinity.longest(&prompts[0], |_| true),
        Some(PoolMember(1))
    );
    pool.remember(PoolMember(1), &prompts[0]);
    pool.remember(PoolMember(0), &prompt(3, 1));
    pool.remember(PoolMember(0), &prompts[1][..48]);
    assert_eq!(
        pool.affinity.longest(&prompts[1], |_| true),
        Some(PoolMember(0))
    );
    pool.remember(PoolMember(0), &prompt(4, 8));
    for removed in [&prompts[0], &prompts[1], &prompt(3, 1)] {
        assert_eq!(pool.affinity.longest(removed, |_| true), None);
    }
}

#[test]
fn lm_803_the_upstream_with_the_fewest_streams_for_its_weight_is_taken() {
    let mut even = pool(&[1, 3]);
    let went = spread(&mut even, 8);
    assert_eq!(went.iter().filter(|one| **one == 1).count(), 6, "{went:?}");
    // Among equals the longest idle one; ended streams do not count.
    let mut pool = pool(&[1, 1, 1]);
    assert_eq!(spread(&mut pool, 3), [0, 1, 2]);
    pool.ended(PoolMember(2), StreamOutcome::Well, at(1));
    pool.ended(PoolMember(1), StreamOutcome::Well, at(1));
    assert_eq!(spread(&mut pool, 3), [1, 2, 0]);
}

#[test]
fn lm_803_a_candidate_with_too_many_streams_is_not_taken() {
    let mut pool = pool(&[1, 1]);
    let prompt = prompt(1, 1);
    pool.remember(PoolMember(0), &prompt);
    // With n streams at one of two, n > 2 · n / 2 + 4 never holds, because the mean includes them.
    for _ in 0..20 {
        assert_eq!(route(&mut pool, &prompt), 0);
    }
    let mut pool = self::pool(&[1, 1, 1, 1]);
    pool.remember(PoolMember(0), &prompt);
    // Of four: n > n / 2 + 4 from 9 on.
    for _ in 0..9 {
        assert_eq!(route(&mut pool, &prompt), 0);
    }
    assert_eq!(route(&mut pool, &prompt), 1);
}

/// LM-702: abandoned work counts as load; LM-902: `load`.
#[test]
fn lm_803_streams_of_others_and_abandoned_ones_count_as_load() {
    let mut pool = pool(&[1, 1]);
    pool.counts(PoolMember(0), 2);
    assert_eq!(spread(&mut pool, 3), [1, 1, 0]);
    pool.counts(PoolMember(0), 0);
    pool.probed(PoolMember(1), ProbeOutcome::Answered(Some(9)), at(1));
    assert_eq!(spread(&mut pool, 3), [0, 0, 0]);
    // The nine include our own streams.
    pool.probed(PoolMember(1), ProbeOutcome::Answered(Some(2)), at(2));
    assert_eq!(spread(&mut pool, 2), [1, 1]);
}

#[test]
fn lm_803_no_load_that_an_upstream_reports_is_too_large() {
    let mut pool = pool(&[1, u32::MAX, u32::MAX]);
    let prompt = prompt(1, 1);
    pool.remember(PoolMember(0), &prompt);
    for member in [PoolMember(0), PoolMember(1)] {
        pool.probed(member, ProbeOutcome::Answered(Some(u64::MAX)), at(1));
        pool.counts(member, 7);
    }
    for _ in 0..3 {
        assert_eq!(route(&mut pool, &[]), 2);
    }
    // Two of three have that load, so it is less than twice the average, and the known prefix counts.
    assert_eq!(route(&mut pool, &prompt), 0);
}

#[test]
fn lm_804_two_missed_probes_take_an_upstream_out_and_a_good_one_brings_it_back() {
    let mut pool = pool(&[1, 1]);
    assert_eq!(pool.probe_at(PoolMember(0)), Some(at(10)));
    pool.probed(PoolMember(0), ProbeOutcome::Missed, at(10));
    assert_eq!(pool.condition(PoolMember(0)), Condition::Serving);
    // After a miss the next probe comes soon.
    assert_eq!(pool.probe_at(PoolMember(0)), Some(at(11)));
    assert!(pool.is_served(Some(PoolMember(1))));
    pool.probed(PoolMember(0), ProbeOutcome::Missed, at(100));
    assert!(pool.is_served(None) && !pool.is_served(Some(PoolMember(1))));
    assert_eq!(pool.condition(PoolMember(0)), Condition::Away);
    assert_eq!(spread(&mut pool, 3), [1, 1, 1]);
    // Delays double up to 30 s.
    let mut now = at(100);
    for wait in [1, 2, 4, 8, 16, 30, 30] {
        assert_eq!(
            pool.probe_at(PoolMember(0)),
            Some(now + Duration::from_secs(wait))
        );
        now = now + Duration::from_secs(wait);
        pool.probed(PoolMember(0), ProbeOutcome::Missed, now);
    }
    pool.probed(PoolMember(0), ProbeOutcome::Answered(None), now);
    assert_eq!(route(&mut pool, &[]), 0);
    // The delay is reset only by an upstream that has served for a while.
    for (retained, wait) in [(29, 30), (30, 1)] {
        now = now + Duration::from_secs(retained);
        pool.lost(PoolMember(0), now);
        assert_eq!(
            pool.probe_at(PoolMember(0)),
            Some(now + Duration::from_secs(wait))
        );
        pool.probed(PoolMember(0), ProbeOutcome::Answered(None), now);
    }
}

#[test]
fn lm_804_a_good_probe_resets_the_count_of_misses() {
    let mut pool = pool(&[1]);
    for probe in [
        ProbeOutcome::Missed,
        ProbeOutcome::Answered(None),
        ProbeOutcome::Missed,
    ] {
        pool.probed(PoolMember(0), probe, at(10));
    }
    assert_eq!(pool.condition(PoolMember(0)), Condition::Serving);
}

#[test]
fn lm_804_three_engine_errors_in_a_row_take_an_upstream_out() {
    let mut pool = pool(&[1, 1]);
    let engine = StreamOutcome::Failed(LmtpReason::EngineError);
    for how in [
        engine,
        engine,
        StreamOutcome::Well,
        engine,
        StreamOutcome::Left,
        engine,
    ] {
        pool.ended(PoolMember(0), how, at(1));
        assert_eq!(pool.condition(PoolMember(0)), Condition::Serving);
    }
    // An error of the caller shows that the engine works.
    pool.ended(
        PoolMember(0),
        StreamOutcome::Failed(LmtpReason::InvalidValue),
        at(1),
    );
    for how in [engine, engine] {
        pool.ended(PoolMember(0), how, at(1));
    }
    assert_eq!(pool.condition(PoolMember(0)), Condition::Serving);
    pool.ended(PoolMember(0), engine, at(1));
    assert_eq!(pool.condition(PoolMember(0)), Condition::Away);
}

#[test]
fn lm_804_without_an_upstream_the_error_has_a_retry_delay() {
    let mut pool = pool(&[1, 1]);
    pool.lost(PoolMember(0), at(50));
    let failed = StreamOutcome::Failed(LmtpReason::ConnectionLost);
    pool.ended(PoolMember(1), failed, at(50));
    let error = pool.route(&[], None, at(50)).unwrap_err();
    assert_eq!(error.reason, LmtpReason::UpstreamError);
    assert!(error.reason.is_retryable());
    assert_eq!(error.retry_after, Some(Duration::from_secs(1)));
    pool.met(PoolMember(1), at(51));
    assert_eq!(pool.route(&[], None, at(51)), Ok(PoolMember(1)));
    // The upstream that has just lost the stream is not chosen again for it.
    assert!(pool.route(&[], Some(PoolMember(1)), at(51)).is_err());
}

#[test]
fn lm_805_a_draining_upstream_gets_no_streams_until_it_has_reconnected() {
    let mut pool = pool(&[1, 1]);
    assert_eq!(spread(&mut pool, 2), [0, 1]);
    pool.ended(
        PoolMember(0),
        StreamOutcome::Failed(LmtpReason::Draining),
        at(1),
    );
    assert_eq!(conditions(&pool), [Condition::Draining, Condition::Serving]);
    assert_eq!(spread(&mut pool, 2), [1, 1]);
    // A draining server still answers.
    pool.probed(PoolMember(0), ProbeOutcome::Answered(None), at(10));
    assert_eq!(spread(&mut pool, 1), [1]);
    pool.lost(PoolMember(0), at(12));
    pool.probed(PoolMember(0), ProbeOutcome::Answered(None), at(13));
    assert_eq!(spread(&mut pool, 1), [0]);
}

#[test]
fn lm_805_a_removed_upstream_is_used_again_once_restored() {
    let mut pool = pool(&[1, 1]);
    pool.remove(PoolMember(0));
    assert_eq!(pool.condition(PoolMember(0)), Condition::Draining);
    assert_eq!(spread(&mut pool, 2), [1, 1]);
    pool.lost(PoolMember(0), at(1));
    pool.probed(PoolMember(0), ProbeOutcome::Answered(None), at(2));
    assert_eq!(pool.probe_at(PoolMember(0)), None);
    assert_eq!(spread(&mut pool, 2), [1, 1]);
    pool.restore(PoolMember(0), at(3));
    assert_eq!(pool.probe_at(PoolMember(0)), Some(at(3)));
    assert_eq!(spread(&mut pool, 1), [1]);
    pool.probed(PoolMember(0), ProbeOutcome::Answered(None), at(3));
    assert_eq!(spread(&mut pool, 1), [0]);
    // Restoring an upstream that was not removed changes nothing.
    pool.restore(PoolMember(1), at(4));
    assert_eq!(pool.condition(PoolMember(1)), Condition::Serving);
}

fn generate(change: impl FnOnce(&mut GenerationParams)) -> RelayedStream {
    let mut wanted = GenerateRequest {
        prompt: vec![1, 2, 3],
        params: GenerationParams {
            max_tokens: Some(9),
            temperature: Some(0.5),
            ..GenerateRequest::default().params
        },
        ..GenerateRequest::default()
    };
    change(&mut wanted.params);
    RelayedStream::new(StreamDemand::Generate(wanted), false)
}

fn give(passage: &mut RelayedStream, tokens: &[Token]) {
    for token in tokens {
        let passed = passage.item(&mut ReceivedItem {
            token: Some(*token),
            ..ReceivedItem::default()
        });
        assert_eq!(passed, RelayedItem::On);
    }
}

fn lost() -> LmtpError {
    LmtpError::new(LmtpReason::ConnectionLost, "gone")
}

#[test]
fn lm_806_a_stream_without_items_is_sent_again_once_and_unchanged() {
    // With any parameters, because nothing was generated yet.
    let mut passage = generate(|wanted| {
        wanted.repetition_penalty = Some(1.1);
        wanted.seed = Some(7);
    });
    let whole = passage.work();
    assert_eq!(passage.failed(lost()), Ok(()));
    assert_eq!(passage.work(), whole);
    let error = passage.failed(lost()).unwrap_err();
    assert_eq!(error.reason, LmtpReason::UpstreamError);
    assert!(error.reason.is_retryable());
}

#[test]
fn lm_806_after_items_only_the_rest_is_requested() {
    let mut passage = generate(|wanted| wanted.min_tokens = Some(3));
    give(&mut passage, &[4, 5]);
    for reason in [LmtpReason::Draining, LmtpReason::EngineDead] {
        assert_eq!(passage.failed(LmtpError::new(reason, "")), Ok(()));
        let StreamDemand::Generate(rest) = passage.work() else {
            panic!("tokens");
        };
        let expected = GenerateRequest {
            prompt: passage.tokens().to_vec(),
            params: GenerationParams {
                max_tokens: Some(9 - (rest.prompt.len() as u32 - 3)),
                min_tokens: Some(3_u32.saturating_sub(rest.prompt.len() as u32 - 3)),
                temperature: Some(0.5),
                ..GenerateRequest::default().params
            },
            ..GenerateRequest::default()
        };
        assert_eq!(rest, expected);
        give(&mut passage, &[6]);
    }
    assert_eq!(passage.tokens(), [1, 2, 3, 4, 5, 6, 6]);
    // Each upstream may be lost before its first item once.
    assert_eq!(passage.failed(lost()), Ok(()));
    assert_eq!(passage.failed(lost()), Ok(()));
    assert!(passage.failed(lost()).is_err());
    let score = Score {
        prompt: vec![1],
        scored: vec![7, 8, 9],
        top_logprobs: 2,
        ..Score::default()
    };
    let mut passage = RelayedStream::new(StreamDemand::Score(score), false);
    give(&mut passage, &[7]);
    assert_eq!(passage.failed(lost()), Ok(()));
    let rest = Score {
        prompt: vec![1, 7],
        scored: vec![8, 9],
        top_logprobs: 2,
        ..Score::default()
    };
    assert_eq!(passage.work(), StreamDemand::Score(rest));
}

#[test]
fn lm_806_streams_that_depend_on_their_output_do_not_move() {
    type Case = (&'static str, fn(&mut GenerationParams), bool);
    let cases: [Case; 10] = [
        ("plain", |_| {}, true),
        (
            "an adapter by name",
            |wanted| wanted.lora = Some(vec![LoraUse::named("style")]),
            true,
        ),
        (
            "an adapter by number",
            |wanted| {
                wanted.lora = Some(vec![LoraUse {
                    adapter: LoraName::Index(0),
                    scale: None,
                }]);
            },
            false,
        ),
        (
            "repetition",
            |wanted| wanted.repetition_penalty = Some(1.1),
            false,
        ),
        (
            "presence",
            |wanted| wanted.presence_penalty = Some(0.5),
            false,
        ),
        (
            "frequency",
            |wanted| wanted.frequency_penalty = Some(-0.5),
            false,
        ),
        (
            "a stop text",
            |wanted| wanted.stop = vec!["x".into()],
            false,
        ),
        (
            "stop tokens",
            |wanted| wanted.stop_sequences = vec![vec![7]],
            true,
        ),
        (
            "a seed that is promised",
            |wanted| wanted.seed = Some(1),
            false,
        ),
        (
            "a seed that decides nothing",
            |wanted| {
                wanted.seed = Some(1);
                wanted.temperature = Some(0.0);
            },
            true,
        ),
    ];
    for (what, change, goes_on) in cases {
        let mut passage = generate(change);
        give(&mut passage, &[4]);
        let outcome = passage.failed(lost());
        assert_eq!(outcome.is_ok(), goes_on, "{what}");
        if let Err(error) = outcome {
            assert_eq!(error.reason, LmtpReason::UpstreamError, "{what}");
        }
    }
}

/// A seeded stream that was lost after three tokens: it is computed again from its beginning, penalties and all.
fn repeated() -> (RelayedStream, StreamDemand) {
    let wanted = GenerateRequest {
        prompt: vec![1, 2],
        params: GenerationParams {
            max_tokens: Some(9),
            seed: Some(1),
            temperature: Some(1.0),
            presence_penalty: Some(0.5),
            ..GenerationParams::default()
        },
        ..GenerateRequest::default()
    };
    let mut passage = RelayedStream::new(StreamDemand::Generate(wanted), true);
    let whole = passage.work();
    give(&mut passage, &[4, 5, 6]);
    assert!(passage.can_move());
    assert_eq!(passage.failed(lost()), Ok(()));
    (passage, whole)
}

fn one(token: Token, finish: Option<StreamFinish>) -> ReceivedItem {
    ReceivedItem {
        token: Some(token),
        finish,
        ..ReceivedItem::default()
    }
}

#[test]
fn lm_806_a_seeded_stream_is_computed_again_from_its_beginning() {
    let (mut passage, whole) = repeated();
    assert_eq!(passage.work(), whole);
    for known in [4, 5] {
        assert_eq!(passage.item(&mut one(known, None)), RelayedItem::Known);
    }
    // Lost again before a new item: the next loss is the last.
    assert_eq!(passage.failed(lost()), Ok(()));
    assert!(!passage.can_move());
    for known in [4, 5, 6] {
        assert_eq!(passage.item(&mut one(known, None)), RelayedItem::Known);
    }
    let mut end = one(7, Some(StreamFinish::Length));
    let usage = StreamUsage {
        prompt_tokens: 2,
        cached_tokens: 0,
        completion_tokens: 4,
        ..StreamUsage::default()
    };
    end.usage = Some(usage);
    assert_eq!(passage.item(&mut end), RelayedItem::On);
    assert_eq!(end.usage, Some(usage), "all of it was computed there");
    assert_eq!(passage.tokens(), [1, 2, 4, 5, 6, 7]);
}

/// Other weights or another build: the reader gets an error instead of the rest of another text.
#[test]
fn lm_806_different_tokens_for_the_same_seed_are_an_error() {
    for item in [
        one(9, None),
        one(4, Some(StreamFinish::Stop)),
        ReceivedItem {
            finish: Some(StreamFinish::Length),
            ..ReceivedItem::default()
        },
    ] {
        let (mut passage, _) = repeated();
        let RelayedItem::Differs(error) = passage.item(&mut item.clone()) else {
            panic!("{item:?}");
        };
        assert_eq!(error.reason, LmtpReason::UpstreamError);
        assert!(error.message.contains("seed"), "{}", error.message);
    }
}

#[test]
fn lm_806_other_errors_end_the_stream_as_they_are() {
    for &reason in LmtpReason::ALL {
        let is_loss = matches!(
            reason,
            LmtpReason::ConnectionLost
                | LmtpReason::Draining
                | LmtpReason::EngineDead
                | LmtpReason::Timeout
        );
        let error = LmtpError::new(reason, "as it came");
        let outcome = generate(|_| {}).failed(error.clone());
        assert_eq!(outcome, if is_loss { Ok(()) } else { Err(error) });
    }
}

/// LM-950
#[test]
fn lm_806_stops_and_usage_span_both_upstreams() {
    let mut passage = generate(|wanted| wanted.stop_sequences = vec![vec![4, 5]]);
    give(&mut passage, &[4]);
    passage.failed(lost()).unwrap();
    let mut item = ReceivedItem {
        token: Some(5),
        usage: Some(StreamUsage {
            prompt_tokens: 4,
            cached_tokens: 4,
            completion_tokens: 1,
            ..StreamUsage::default()
        }),
        ..ReceivedItem::default()
    };
    assert_eq!(passage.item(&mut item), RelayedItem::On);
    assert_eq!(item.finish, Some(StreamFinish::Stop));
    let received = item.usage.take();
    item.finish = Some(StreamFinish::Length);
    give(&mut passage, &[4]);
    assert_eq!(passage.item(&mut item), RelayedItem::On);
    assert_eq!(
        item.finish,
        Some(StreamFinish::Stop),
        "also as the last that there may be"
    );
    let usage = StreamUsage {
        prompt_tokens: 3,
        cached_tokens: 3,
        completion_tokens: 2,
        ..StreamUsage::default()
    };
    assert_eq!(received, Some(usage));
}

#[test]
fn lm_806_no_usage_that_an_upstream_reports_is_too_large() {
    let mut passage = generate(|_| {});
    give(&mut passage, &[1]);
    passage.failed(lost()).unwrap();
    let mut last = ReceivedItem {
        usage: Some(StreamUsage {
            completion_tokens: u64::MAX,
            ..StreamUsage::default()
        }),
        ..one(2, Some(StreamFinish::Stop))
    };
    assert_eq!(passage.item(&mut last), RelayedItem::On);
    assert_eq!(last.usage.unwrap().completion_tokens, u64::MAX);
}

#[test]
fn lm_805_an_added_upstream_is_used_after_its_first_good_probe() {
    let mut pool = pool(&[1]);
    let added = pool.add(2, at(5));
    assert_eq!(pool.probe_at(added), Some(at(5)));
    assert_eq!(pool.condition(added), Condition::Away);
    assert_eq!(spread(&mut pool, 2), [0, 0]);
    pool.probed(added, ProbeOutcome::Answered(None), at(5));
    assert_eq!(spread(&mut pool, 3), [1, 1, 1]);
    pool.set_weight(PoolMember(0), 9);
    assert_eq!(spread(&mut pool, 3), [0, 0, 0]);
}

#[test]
fn lm_704_stop_sequences_that_a_base_upstream_does_not_know_are_matched_here() {
    let mut passage = generate(|wanted| wanted.stop_sequences = vec![vec![4, 5]]);
    let StreamDemand::Generate(asked) = passage.base_work() else {
        panic!("tokens");
    };
    assert!(asked.params.stop_sequences.is_empty());
    give(&mut passage, &[3, 4]);
    let mut item = ReceivedItem {
        token: Some(5),
        ..ReceivedItem::default()
    };
    assert_eq!(passage.item(&mut item), RelayedItem::On);
    assert_eq!(item.finish, Some(StreamFinish::Stop));
}

/// LM-806: a controller would see another split of prompt and output, and what it took back is not in the tokens.
#[test]
fn lm_806_a_steered_stream_does_not_move_once_it_has_begun() {
    let steered = || {
        let wanted = GenerateRequest {
            prompt: vec![1, 2, 3],
            controller: Some(Arc::default()),
            ..GenerateRequest::default()
        };
        RelayedStream::new(StreamDemand::Generate(wanted), true)
    };
    let mut fresh = steered();
    assert!(fresh.can_move());
    assert_eq!(fresh.failed(lost()), Ok(()));
    let mut begun = steered();
    give(&mut begun, &[4, 5]);
    assert!(!begun.can_move());
    // A backtrack takes the tokens away, but the client has seen them.
    let mut item = ReceivedItem {
        branch: Some(Box::new(ReceivedBranch {
            backtrack: Some(2),
            ..ReceivedBranch::default()
        })),
        ..ReceivedItem::default()
    };
    assert_eq!(begun.item(&mut item), RelayedItem::On);
    assert_eq!(begun.tokens(), [1, 2, 3]);
    assert!(!begun.can_move() && begun.failed(lost()).is_err());
}
