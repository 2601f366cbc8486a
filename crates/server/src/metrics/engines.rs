//! The numbers of the engines, read from their own counters without a lock when `/metrics` is rendered (OA-801).
//!
//! Owns: which counter has which name. Refuses to know: who counts, and when.

use sapwood_engine::Engine;
use sapwood_engine::stats::{Histogram, Stats};

use super::names;
use super::text::Text;

/// Name, kind, help, and how to read it.
type Number = (&'static str, &'static str, &'static str, fn(&Stats) -> f64);

/// Writes every number of every engine, labelled with its model.
pub(super) fn write(engines: &[Engine], text: &mut Text) {
    if engines.is_empty() {
        return;
    }
    for (name, kind, help, read) in NUMBERS {
        text.family(name, kind, help);
        for engine in engines {
            text.sample(
                name,
                &[("model", &engine.info().name)],
                read(engine.stats()),
            );
        }
    }
    for (name, help, pick) in HISTOGRAMS {
        text.family(name, "histogram", help);
        for engine in engines {
            text.histogram(
                name,
                &[("model", &engine.info().name)],
                pick(engine.stats()),
            );
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
fn used_ratio(stats: &Stats) -> f64 {
    stats.cells_used.get() as f64 / stats.cells_total.get().max(1) as f64
}

macro_rules! number {
    ($field:ident) => {{
        #[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
        fn read(stats: &Stats) -> f64 {
            stats.$field.get() as f64
        }
        read
    }};
}

const NUMBERS: &[Number] = &[
    (
        names::REQUESTS_RUNNING,
        "gauge",
        "Requests computed now.",
        number!(requests_running),
    ),
    (
        names::REQUESTS_WAITING,
        "gauge",
        "Requests waiting for a place.",
        number!(requests_waiting),
    ),
    (
        names::STREAMS_PARKED,
        "gauge",
        "Sequences waiting for their reader.",
        number!(streams_parked),
    ),
    (
        names::KV_USED,
        "gauge",
        "Cache cells in use, kept prefixes included.",
        number!(cells_used),
    ),
    (
        names::KV_TOTAL,
        "gauge",
        "Cache cells there are.",
        number!(cells_total),
    ),
    (
        names::KV_RATIO,
        "gauge",
        "Share of the cache in use, 0 to 1.",
        used_ratio,
    ),
    (
        names::PREFIX_QUERIES,
        "counter",
        "Prompt tokens looked up in the cache.",
        number!(prefix_queries),
    ),
    (
        names::PREFIX_HITS,
        "counter",
        "Prompt tokens found in the cache.",
        number!(prefix_hits),
    ),
    (
        names::PREEMPTIONS,
        "counter",
        "Sequences put back because the cache was full.",
        number!(preemptions),
    ),
    (
        names::PROMPT_TOKENS,
        "counter",
        "Tokens of prompts.",
        number!(prompt_tokens),
    ),
    (
        names::GENERATION_TOKENS,
        "counter",
        "Tokens generated.",
        number!(generation_tokens),
    ),
    (
        names::ENGINE_STEPS,
        "counter",
        "Steps of the engine.",
        number!(steps),
    ),
    (
        names::REQUESTS_FAILED,
        "counter",
        "Requests that ended with a fault.",
        number!(failed),
    ),
];

type Shape = (&'static str, &'static str, fn(&Stats) -> &Histogram);

const HISTOGRAMS: &[Shape] = &[
    (
        names::TIME_TO_FIRST_TOKEN,
        "Seconds from submission to the first token.",
        |s| &s.first_token_seconds,
    ),
    (names::INTER_TOKEN, "Seconds between two tokens.", |s| {
        &s.inter_token_seconds
    }),
    (
        names::REQUEST_SECONDS,
        "Seconds from submission to the end.",
        |s| &s.request_seconds,
    ),
    (names::QUEUE_SECONDS, "Seconds a request waited.", |s| {
        &s.queue_seconds
    }),
    (names::PREFILL_SECONDS, "Seconds spent on a prompt.", |s| {
        &s.prefill_seconds
    }),
    (names::DECODE_SECONDS, "Seconds spent on an output.", |s| {
        &s.decode_seconds
    }),
    (names::REQUEST_PROMPT_TOKENS, "Tokens per prompt.", |s| {
        &s.request_prompt_tokens
    }),
    (
        names::REQUEST_GENERATION_TOKENS,
        "Tokens per output.",
        |s| &s.request_generation_tokens,
    ),
    (names::REQUEST_N, "Choices asked for.", |s| &s.request_n),
    (
        names::REQUEST_MAX_TOKENS,
        "Tokens allowed per choice.",
        |s| &s.request_max_tokens,
    ),
    (names::STEP_SECONDS, "Seconds per step.", |s| {
        &s.step_seconds
    }),
    (names::STEP_TOKENS, "Tokens computed per step.", |s| {
        &s.step_tokens
    }),
    (names::BATCH_SIZE, "Sequences per step.", |s| &s.batch_size),
];
