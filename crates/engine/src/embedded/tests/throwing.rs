//! What llama.cpp throws while it decodes ends the requests of that batch, and nothing else.

use std::sync::atomic::{AtomicU32, Ordering};

use sapwood_proto::code::Code;

use super::reuse::{Bench, generated, kinds, text};
use super::*;
use crate::api::{EngineError, EventKind, GenerationRequest};
use crate::embedded::guard::throwing_graphs;
use crate::{Config, RequestHandle};

/// Has the next decode call throw at the end of this graph.
fn arm(graphs: &AtomicU32, at: u32) {
    graphs.store(at, Ordering::Relaxed);
}

fn has_thrown(graphs: &AtomicU32) -> bool {
    graphs.load(Ordering::Relaxed) == 0
}

#[test]
fn a_decode_call_that_throws_leaves_the_slots_as_they_were() {
    let graphs = throwing_graphs();
    // With a per-slot KV cache the batch has a graph for each slot.
    for (mut model, at) in layouts().into_iter().zip([2, 1]) {
        model.open(0, &opening());
        model.decode(&entries(0, 0, TEXT), Time::ZERO).unwrap();
        model.open(1, &opening());
        let next = TEXT.len() as u32;
        let batch = [entries(0, next, &[33]), entries(1, 0, TEXT)].concat();
        arm(graphs, at);
        let failed = model.decode(&batch, Time::ZERO);
        assert!(
            matches!(&failed, Err(DecodeStop::Failed(error)) if error.code == Code::Internal),
            "{failed:?}"
        );
        assert!(has_thrown(graphs));
        assert!(
            matches!(model.row(0, Time::ZERO), OutputRow::Failed(_)),
            "no row of a failed batch"
        );
        let after = row(&mut model, &batch);
        let first = row_at(&mut model, 0);
        for (slot, tokens, expected) in [(2, TEXT, after), (3, &[TEXT, &[33]].concat()[..], first)]
        {
            model.open(slot, &opening());
            alike(&expected, &row(&mut model, &entries(slot, 0, tokens)));
        }
    }
}

/// Its tokens, or the error that ended it.
fn read(handle: &mut RequestHandle) -> Result<Vec<Token>, EngineError> {
    let mut received = Vec::new();
    while let Some(event) = handle.try_next() {
        match event.kind {
            EventKind::Tokens(tokens) => {
                received.extend(tokens.tokens.iter().map(|token| token.id));
            }
            EventKind::Failed(error) | EventKind::Error(error) => return Err(error),
            EventKind::Finish(_) | EventKind::Report(_) | EventKind::Usage(_) => {}
        }
    }
    Ok(received)
}

#[test]
fn a_decode_call_that_throws_fails_its_requests_alone() {
    let graphs = throwing_graphs();
    for of in kinds() {
        for cache_tokens in [None, Some(1024)] {
            let what = format!("{}, cache {cache_tokens:?}", of.name);
            let options = LoadOptions {
                cache_tokens,
                ..of.options(&options())
            };
            let request = |seed: u32| -> GenerationRequest { generated(&text(seed, 50), 20, 1) };
            let new = || Bench::with(&of.shape, &options, Config::default());
            let mut bench = new();
            let submit = |seed| bench.engine.submit(request(seed)).unwrap();
            // Four run, and two wait.
            let mut handles: Vec<RequestHandle> = (1..7).map(submit).collect();
            for _ in 0..10 {
                bench.owner.step(Time::ZERO);
            }
            arm(graphs, 1);
            bench.owner.step(Time::ZERO);
            assert!(has_thrown(graphs), "{what}");
            while !bench.owner.is_empty() {
                bench.owner.step(Time::ZERO);
            }
            let ends: Vec<_> = handles.iter_mut().map(read).collect();
            for end in &ends[..4] {
                let error = end.as_ref().unwrap_err();
                assert_eq!(error.code, Code::Internal, "{what}");
                assert_eq!(error.message, "the model failed", "{what}");
            }
            for end in &ends[4..] {
                assert_eq!(end.as_ref().map(Vec::len), Ok(20), "{what}");
            }
            assert_eq!(bench.engine.stats().panics.get(), 0, "{what}");
            // Whatever is left of them in slots and caches.
            for seed in 1..7 {
                let answer = bench.answers(vec![request(seed)]).remove(0);
                let cold = new().answers(vec![request(seed)]).remove(0);
                answer.assert_as(&cold, bench.equality, &format!("{what}, {seed}"));
            }
        }
    }
}
