//! Random modules: whatever code a controller consists of, the host survives it, frees it, and forks it exactly.

use sapwood_proto::steer::StepReport;
use wasm_smith::{Config, Module};

use super::*;

/// Modules of each test; their seeds are the first numbers.
const MODULES: u64 = 40;
/// Calls of each sequence.
const CALLS: usize = 6;

/// Random bytes of a seed (`SplitMix64`).
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let words = std::iter::repeat_with(|| next().to_le_bytes()).flatten();
    words.take(count).collect()
}

/// Functions of random code.
const FUNCTIONS: usize = 4;

/// The text of a module with random functions, tables, globals and segments. `None`: these bytes are none.
fn random_code(seed: u64) -> Option<String> {
    let exports: String = (0..FUNCTIONS)
        .map(|index| format!("(func (export \"r{index}\"))"))
        .collect();
    let shape = format!(
        "(module {IMPORTS} (import \"env\" \"aici_host_return_logit_bias\" (func (param i32)))
         (memory (export \"memory\") 2 8) {exports})"
    );
    let config = Config {
        module_shape: Some(wat::parse_str(shape).unwrap()),
        max_instructions: 200,
        max_memory32_bytes: 1 << 19,
        max_table_elements: 100,
        // The bits of a NaN differ from one processor to another.
        canonicalize_nans: true,
        // Nearly all random code traps; most of it is made so that it does not, and goes further.
        disallow_traps: !seed.is_multiple_of(4),
        allow_start_export: false,
        threads_enabled: false,
        gc_enabled: false,
        exceptions_enabled: false,
        tail_call_enabled: false,
        memory64_enabled: false,
        relaxed_simd_enabled: false,
        ..Config::default()
    };
    let bytes = bytes(seed, 8 << 10);
    let module = Module::new(config, &mut arbitrary::Unstructured::new(&bytes)).ok()?;
    Some(wasmprinter::print_bytes(module.to_bytes()).unwrap())
}

/// Adds the callbacks of a P1 controller to the text: each runs a random function and returns a valid result.
fn controller(code: &str) -> String {
    let callback = |name: &str, function: usize, result: &str| {
        // Where the export is: `(export "r0" (func 17))`.
        let (_, after) = code
            .split_once(&format!("(export \"r{function}\" (func "))
            .unwrap();
        let index = after.split_once(')').unwrap().0;
        // Stored just before it is returned, because the code writes anywhere.
        let stores: String = result
            .as_bytes()
            .iter()
            .enumerate()
            .map(|(at, byte)| format!("(i32.store8 (i32.const {}) (i32.const {byte}))", 512 + at))
            .collect();
        let length = result.len();
        format!(
            "(func (export \"{name}\") (param i32)
             (call {index}) {stores} (call 0 (i32.const 512) (i32.const {length})))"
        )
    };
    let callbacks = [
        callback("aici_init_prompt", 0, "{}"),
        callback(
            "aici_pre_process",
            1,
            r#"{"num_forks":1,"suspend":false,"ff_tokens":[]}"#,
        ),
        callback("aici_mid_process", 2, r#"{"SampleWithBias":{}}"#),
        callback("aici_post_process", 3, r#"{"stop":false}"#),
    ];
    let code = code.trim_end().strip_suffix(')').unwrap();
    format!(
        "{code} {} (func (export \"aici_create\") (result i32) (i32.const 7)))",
        callbacks.concat()
    )
}

/// What a sequence did, as far as it is the same each time.
type SeenOutcome = (Result<Returned, CallFailure>, String, usize);

fn seen(outcome: Outcome) -> SeenOutcome {
    let StepReport { logs, storage, .. } = outcome.report;
    (outcome.result, logs, storage.len())
}

/// Makes one call of each kind in turn, until the controller fails.
fn calls(sequence: &mut Sequence, from: usize, count: usize) -> Vec<SeenOutcome> {
    let mut all = Vec::new();
    for index in from..from + count {
        let outcome = match index % 3 {
            0 => sequence.pre(),
            1 => sequence.mid(),
            _ => sequence.post(&[40 + index as u32]),
        };
        all.push(seen(outcome));
        if all.last().is_some_and(|(result, ..)| result.is_err()) {
            break;
        }
    }
    all
}

/// AI-733: with fuel, an endless loop ends at the same instruction each time.
fn counted() -> Host {
    new_host(HostConfig {
        fuel: Some(200_000),
        ..small()
    })
}

/// Fuzzing by seeds: nothing that a module does may break the host, and every fork behaves as its parent would have.
#[test]
fn ai_713_ai_742_random_modules_are_survived_freed_and_forked_exactly() {
    let host = counted();
    let (mut forked, mut failures) = (0, Vec::new());
    for seed in 0..MODULES {
        let Some(code) = random_code(seed) else {
            continue;
        };
        let program = load(&host, &controller(&code));
        let mut parent = Sequence::start(&host, &program);
        if let Err(failure) = parent.outcome().result {
            failures.push(failure.to_string());
            continue;
        }
        let first = calls(&mut parent, 0, CALLS);
        if let Some((Err(failure), ..)) = first.last() {
            failures.push(failure.to_string());
            continue;
        }
        let mut child = parent.fork();
        let after_fork = calls(&mut child, CALLS, CALLS);
        let of_parent = calls(&mut parent, CALLS, CALLS);
        assert_eq!(after_fork, of_parent, "the fork of module {seed} differs");
        // A sequence that did the same from the start, without a fork, is the measure of both.
        let mut again = Sequence::start(&host, &program).begun();
        assert_eq!(calls(&mut again, 0, CALLS), first, "module {seed}");
        assert_eq!(calls(&mut again, CALLS, CALLS), of_parent, "module {seed}");
        forked += 1;
    }
    assert!(
        forked >= 5 && failures.len() >= 5,
        "the code is neither trivial nor hopeless: {forked} forked, {failures:#?}"
    );
    wait_until_free(&host);
}
