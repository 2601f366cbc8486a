//! What the parts of steering cost without it, on the same machine in the same run (AI-1109).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Result;
use rustix::thread::futex;

use crate::measure::{Spread, micros};
use crate::steering::table::{Table, pair};

/// A table of all baselines, in microseconds.
///
/// # Errors
/// Those of the Wasm engine.
pub fn table(vocabulary: usize) -> Result<Table> {
    let empty = empty_call(&wat::parse_str(EMPTY)?);
    let mut table = Table::new("Baselines", &["What", "Minimum / median, µs"]);
    let mut row = |what: &str, spread| table.row(&[what.to_owned(), pair(spread)]);
    row(
        "Futex round trip between two threads that spin",
        round_trip(true),
    );
    row(
        "Futex round trip between two threads that sleep",
        round_trip(false),
    );
    row(
        &format!("Copy of a row of {vocabulary} floats"),
        row_copy(vocabulary, 1),
    );
    row(
        &format!("Copy of 40 rows of {vocabulary} floats"),
        row_copy(vocabulary, 40),
    );
    row(
        "Call of an empty function in Wasm",
        empty.map_err(|error| anyhow::anyhow!("{error:#}"))?,
    );
    Ok(table)
}

const EMPTY: &str = r#"(module (func (export "f") (param i32)))"#;
const TRIPS: u32 = 2_000;
/// Trips that are not counted.
const WARM: u32 = 200;

/// A message there and back. `spins`: neither side sleeps, as long as the system lets both run.
#[must_use]
pub fn round_trip(spins: bool) -> Spread {
    let words = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
    let theirs = Arc::clone(&words);
    let peer = thread::spawn(move || {
        for trip in 1..=WARM + TRIPS {
            wait_for(&theirs[0], trip, spins);
            send(&theirs[1], trip);
        }
    });
    let mut times = Vec::new();
    for trip in 1..=WARM + TRIPS {
        let begin = Instant::now();
        send(&words[0], trip);
        wait_for(&words[1], trip, spins);
        if trip > WARM {
            times.push(micros(begin.elapsed()));
        }
    }
    // It has sent its last answer.
    let _ended = peer.join();
    Spread::of(times)
}

fn send(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Release);
    let _ = futex::wake(word, futex::Flags::PRIVATE, 1);
}

fn wait_for(word: &AtomicU32, value: u32, spins: bool) {
    loop {
        let seen = word.load(Ordering::Acquire);
        if seen == value {
            return;
        }
        if spins {
            std::hint::spin_loop();
        } else {
            // Whatever ends the wait, the word decides.
            let _ = futex::wait(word, futex::Flags::PRIVATE, seen, None);
        }
    }
}

/// Copies of one row, one behind the other.
#[must_use]
pub fn row_copy(vocabulary: usize, rows: usize) -> Spread {
    let from = vec![-100.0_f32; vocabulary];
    let mut to = vec![0.0_f32; vocabulary * rows];
    let copy = || {
        let begin = Instant::now();
        for row in to.chunks_exact_mut(vocabulary) {
            row.copy_from_slice(&from);
        }
        std::hint::black_box(&to);
        micros(begin.elapsed())
    };
    Spread::of(std::iter::repeat_with(copy).take(500).collect())
}

/// Calls of an empty function; a thousand at a time, because one is shorter than the clock's reading.
fn empty_call(bytes: &[u8]) -> wasmtime::Result<Spread> {
    const CALLS: u32 = 1_000;
    let engine = wasmtime::Engine::default();
    let module = wasmtime::Module::new(&engine, bytes)?;
    let mut store = wasmtime::Store::new(&engine, ());
    let instance = wasmtime::Instance::new(&mut store, &module, &[])?;
    let function = instance.get_typed_func::<i32, ()>(&mut store, "f")?;
    let mut times = Vec::new();
    for _ in 0..200 {
        let begin = Instant::now();
        for _ in 0..CALLS {
            function.call(&mut store, 1)?;
        }
        times.push(micros(begin.elapsed()) / f64::from(CALLS));
    }
    Ok(Spread::of(times))
}
