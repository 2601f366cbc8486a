//! Attention against the same sums in 64 bits, and against itself with other things beside it.

use std::ptr;

use llama_cpp_sys_2 as sys;

use super::{is_taken, run_graph, work_bytes};
use crate::embedded::llama::cpu_hooks::install_with;
use crate::embedded::work_buffer::attention_bytes;

const HIDDEN: u16 = 0xfc00;

/// The sizes of one operation.
#[derive(Clone, Copy, Debug)]
struct Shape {
    key_width: usize,
    value_width: usize,
    cells: usize,
    queries: usize,
    key_heads: usize,
    group: usize,
    streams: usize,
}

const SMALL: Shape = Shape {
    key_width: 16,
    value_width: 16,
    cells: 5,
    queries: 1,
    key_heads: 1,
    group: 1,
    streams: 1,
};
/// Few and many queries, heads and cells; widths of real models, and such as leave a rest; one query over many cells, which ggml
/// divides among threads; several streams.
const SHAPES: &[Shape] = &[
    SMALL,
    Shape {
        key_width: 64,
        value_width: 64,
        cells: 700,
        queries: 1,
        key_heads: 3,
        group: 3,
        streams: 1,
    },
    Shape {
        key_width: 80,
        value_width: 48,
        cells: 100,
        queries: 70,
        key_heads: 2,
        group: 1,
        streams: 1,
    },
    Shape {
        key_width: 128,
        value_width: 128,
        cells: 257,
        queries: 13,
        key_heads: 2,
        group: 4,
        streams: 3,
    },
    Shape {
        key_width: 256,
        value_width: 256,
        cells: 65,
        queries: 33,
        key_heads: 1,
        group: 40,
        streams: 1,
    },
];

/// Random numbers that are the same in each run.
struct Random(u32);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(i16::try_from(self.0 >> 17).expect("15 bits")) / 16_384.0 - 1.0
    }
}

/// The operands, in the order of ggml's dimensions.
#[derive(Clone)]
struct Operands {
    shape: Shape,
    /// By stream, head, query.
    queries: Vec<f32>,
    /// By stream, head, cell.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// By stream, query.
    mask: Vec<u16>,
    sinks: Option<Vec<f32>>,
}

/// Rounds to a number of 16 bits.
fn half(value: f32) -> u16 {
    // SAFETY: it takes a number.
    unsafe { sys::ggml_fp32_to_fp16(value) }
}

fn wide(half: u16) -> f32 {
    // SAFETY: it takes a number.
    unsafe { sys::ggml_fp16_to_fp32(half) }
}

/// Its work buffer is as large as the estimate of the model's memory says.
fn assert_work_is_estimated(operation: *const sys::ggml_tensor, cells: u64) {
    for threads in [1, 2, 64] {
        let estimated = attention_bytes(cells, threads.into());
        let asked = work_bytes(operation, threads).expect("it is taken over");
        let is_near = asked <= estimated && asked >= estimated / 20 * 19;
        assert!(is_near, "{asked} for {estimated}: {threads} threads");
    }
}

impl Operands {
    /// Each query sees the cells up to its own, which are the last.
    fn causal(shape: Shape) -> Self {
        let mut random = Random(3);
        let mut many = |count: usize, scale: f32| -> Vec<f32> {
            (0..count)
                .map(|_| wide(half(random.next() * scale)))
                .collect()
        };
        let heads = shape.key_heads * shape.group;
        let rows = shape.streams * shape.key_heads * shape.cells;
        let queries = many(shape.streams * heads * shape.queries * shape.key_width, 4.0);
        let keys = many(rows * shape.key_width, 2.0);
        let values = many(rows * shape.value_width, 1.0);
        let first = shape.cells.saturating_sub(shape.queries);
        let row = |query: usize| {
            (0..shape.cells).map(move |cell| if cell <= first + query { 0 } else { HIDDEN })
        };
        let mask = (0..shape.streams)
            .flat_map(|_| (0..shape.queries).flat_map(row))
            .collect();
        Self {
            shape,
            queries,
            keys,
            values,
            mask,
            sinks: None,
        }
    }

    fn heads(&self) -> usize {
        self.shape.key_heads * self.shape.group
    }

    /// Computes it as a graph. A number for each stream, query, head and place.
    fn compute(&self, threads: i32) -> Vec<f32> {
        let Shape {
            key_width,
            value_width,
            cells,
            queries,
            key_heads,
            streams,
            ..
        } = self.shape;
        let heads = self.heads();
        let memory = sys::ggml_init_params {
            mem_size: 64 << 20,
            mem_buffer: ptr::null_mut(),
            no_alloc: false,
        };
        let size = |it: usize| i64::try_from(it).expect("it is small");
        // SAFETY: the context has room for the tensors, which have the lengths of what is copied into them, and is freed last.
        unsafe {
            let context = sys::ggml_init(memory);
            let tensor = |kind, width, rows, heads| {
                sys::ggml_new_tensor_4d(
                    context,
                    kind,
                    size(width),
                    size(rows),
                    size(heads),
                    size(streams),
                )
            };
            let of_queries = tensor(sys::GGML_TYPE_F32, key_width, queries, heads);
            ptr::copy_nonoverlapping(
                self.queries.as_ptr(),
                (*of_queries).data.cast(),
                self.queries.len(),
            );
            let of_halves = |width, values: &[f32]| {
                let tensor = tensor(sys::GGML_TYPE_F16, width, cells, key_heads);
                let halves: Vec<u16> = values.iter().map(|&value| half(value)).collect();
                ptr::copy_nonoverlapping(halves.as_ptr(), (*tensor).data.cast(), halves.len());
                tensor
            };
            let of_keys = of_halves(key_width, &self.keys);
            let of_values = of_halves(value_width, &self.values);
            let mask = tensor(sys::GGML_TYPE_F16, cells, queries, 1);
            ptr::copy_nonoverlapping(self.mask.as_ptr(), (*mask).data.cast(), self.mask.len());
            let result = sys::ggml_flash_attn_ext(
                context,
                of_queries,
                of_keys,
                of_values,
                mask,
                self.scale(),
                0.0,
                0.0,
            );
            if let Some(sinks) = &self.sinks {
                let of_sinks = sys::ggml_new_tensor_1d(context, sys::GGML_TYPE_F32, size(heads));
                ptr::copy_nonoverlapping(sinks.as_ptr(), (*of_sinks).data.cast(), sinks.len());
                sys::ggml_flash_attn_ext_add_sinks(result, of_sinks);
            }
            assert!(is_taken(result));
            assert_work_is_estimated(result, cells as u64);
            let computed = run_graph(context, result, threads);
            sys::ggml_free(context);
            computed
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "it is small")]
    fn scale(&self) -> f32 {
        1.0 / (self.shape.key_width as f32).sqrt()
    }

    /// The same in 64 bits, one number after the other.
    fn expected(&self) -> Vec<f64> {
        let Shape {
            key_width,
            value_width,
            cells,
            queries,
            key_heads,
            group,
            streams,
        } = self.shape;
        let heads = self.heads();
        let mut numbers = Vec::new();
        for stream in 0..streams {
            for (query, head) in
                (0..queries).flat_map(|query| (0..heads).map(move |head| (query, head)))
            {
                let at = ((stream * heads + head) * queries + query) * key_width;
                let row = &self.queries[at..at + key_width];
                let first = (stream * key_heads + head / group) * cells;
                let mask = &self.mask[(stream * queries + query) * cells..][..cells];
                let scores: Vec<f64> = (0..cells)
                    .map(|cell| {
                        let key = &self.keys[(first + cell) * key_width..][..key_width];
                        let product: f64 = row
                            .iter()
                            .zip(key)
                            .map(|(a, b)| f64::from(*a) * f64::from(*b))
                            .sum();
                        product * f64::from(self.scale()) + f64::from(wide(mask[cell]))
                    })
                    .collect();
                let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
                let weights: Vec<f64> = scores.iter().map(|score| score.exp()).collect();
                let total = weights.iter().sum::<f64>() + sink.map_or(0.0, f64::exp);
                numbers.extend((0..value_width).map(|place| {
                    let value =
                        |cell: usize| f64::from(self.values[(first + cell) * value_width + place]);
                    let sum: f64 = (0..cells)
                        .filter(|&cell| weights[cell] > 0.0)
                        .map(|cell| weights[cell] * value(cell))
                        .sum();
                    if total > 0.0 { sum / total } else { 0.0 }
                }));
            }
        }
        numbers
    }

    /// The cells at other places of a larger cache, whose other cells hold what must not be read.
    fn moved(&self, cells: usize, place: impl Fn(usize) -> usize) -> Self {
        let shape = Shape {
            cells,
            ..self.shape
        };
        let spread = |from: &[f32], width: usize| {
            let mut to = vec![f32::NAN; from.len() / self.shape.cells * cells];
            for (row, values) in from.chunks(width).enumerate() {
                let (head, cell) = (row / self.shape.cells, row % self.shape.cells);
                let at = (head * cells + place(cell)) * width;
                to[at..at + width].copy_from_slice(values);
            }
            to
        };
        let mut mask = Vec::new();
        for row in self.mask.chunks(self.shape.cells) {
            let mut to = vec![HIDDEN; cells];
            for (cell, &seen) in row.iter().enumerate() {
                to[place(cell)] = seen;
            }
            mask.extend(to);
        }
        Self {
            shape,
            queries: self.queries.clone(),
            keys: spread(&self.keys, shape.key_width),
            values: spread(&self.values, shape.value_width),
            mask,
            sinks: self.sinks.clone(),
        }
    }

    /// Some of the queries of one stream alone.
    fn alone(&self, stream: usize, queries: std::ops::Range<usize>) -> Self {
        let Shape {
            key_width,
            value_width,
            cells,
            key_heads,
            ..
        } = self.shape;
        let shape = Shape {
            queries: queries.len(),
            streams: 1,
            ..self.shape
        };
        let heads = self.heads();
        let of_stream = |from: &[f32], width: usize| {
            from[stream * key_heads * cells * width..][..key_heads * cells * width].to_vec()
        };
        let head = |head: usize| {
            let at = (stream * heads + head) * self.shape.queries;
            self.queries[(at + queries.start) * key_width..(at + queries.end) * key_width]
                .iter()
                .copied()
        };
        let row = stream * self.shape.queries;
        Self {
            shape,
            queries: (0..heads).flat_map(head).collect(),
            keys: of_stream(&self.keys, key_width),
            values: of_stream(&self.values, value_width),
            mask: self.mask[(row + queries.start) * cells..(row + queries.end) * cells].to_vec(),
            sinks: self.sinks.clone(),
        }
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Runs a test with the instructions of each kind that this machine has.
fn with_each(test: impl Fn()) {
    for may_use_avx512 in [false, true] {
        if install_with(may_use_avx512).is_some() {
            test();
        }
    }
}

fn assert_is_exact(operands: &Operands, what: &str) {
    let computed = operands.compute(2);
    let expected = operands.expected();
    assert_eq!(computed.len(), expected.len());
    for (at, (computed, expected)) in computed.iter().zip(&expected).enumerate() {
        let error = (f64::from(*computed) - expected).abs();
        assert!(
            error < 4e-6,
            "{what} {:?} at {at}: {computed} for {expected}",
            operands.shape
        );
    }
}

#[test]
fn attention_is_as_exact_as_32_bits_are() {
    with_each(|| {
        for &shape in SHAPES {
            assert_is_exact(&Operands::causal(shape), "causal");
        }
    });
}

#[test]
fn a_mask_may_hide_any_cells_and_add_to_others() {
    with_each(|| {
        for &shape in SHAPES {
            let mut random = Random(9);
            let mut operands = Operands::causal(shape);
            for number in &mut operands.mask {
                *number = match random.next() {
                    ..0.0 => HIDDEN,
                    0.0..0.5 => 0,
                    other => half(other),
                };
            }
            // One query that sees nothing.
            operands.mask[..shape.cells].fill(HIDDEN);
            assert_is_exact(&operands, "any mask");
        }
    });
}

#[test]
fn a_sink_takes_its_share_of_the_weights() {
    with_each(|| {
        for &shape in SHAPES {
            let mut random = Random(5);
            let mut operands = Operands::causal(shape);
            operands.sinks = Some((0..operands.heads()).map(|_| random.next() * 9.0).collect());
            assert_is_exact(&operands, "sinks");
        }
    });
}

#[test]
fn no_bit_depends_on_queries_streams_or_threads_beside_it() {
    with_each(|| {
        for &shape in SHAPES {
            let operands = Operands::causal(shape);
            let together = bits(&operands.compute(1));
            for threads in [2, 5] {
                assert!(
                    bits(&operands.compute(threads)) == together,
                    "{threads} threads, {shape:?}"
                );
            }
            let of_query = operands.heads() * shape.value_width;
            for stream in 0..shape.streams {
                for queries in [
                    0..1,
                    0..shape.queries,
                    shape.queries / 2..shape.queries,
                    shape.queries - 1..shape.queries,
                ] {
                    let alone = bits(&operands.alone(stream, queries.clone()).compute(2));
                    let at = (stream * shape.queries + queries.start) * of_query;
                    assert!(
                        alone == together[at..at + alone.len()],
                        "{queries:?} of {stream}, {shape:?}"
                    );
                }
            }
        }
    });
}

#[test]
fn no_bit_depends_on_where_the_cells_of_a_sequence_are() {
    with_each(|| {
        for &shape in SHAPES {
            let operands = Operands::causal(shape);
            let together = bits(&operands.compute(2));
            let later = operands.moved(shape.cells + 77, |cell| cell + 19);
            assert!(bits(&later.compute(2)) == together, "later, {shape:?}");
            let apart = operands.moved(3 * shape.cells, |cell| 3 * cell + cell % 2);
            assert!(bits(&apart.compute(2)) == together, "apart, {shape:?}");
        }
    });
}

/// As with a cache that all sequences share: neighbouring queries see cells of different sequences.
#[test]
fn no_bit_depends_on_other_sequences_in_the_same_cells() {
    let shape = Shape {
        key_width: 64,
        value_width: 64,
        cells: 90,
        queries: 8,
        key_heads: 2,
        group: 2,
        streams: 1,
    };
    with_each(|| {
        let mut operands = Operands::causal(shape);
        for (at, number) in operands.mask.iter_mut().enumerate() {
            let (query, cell) = (at / shape.cells, at % shape.cells);
            if cell % 2 != query % 2 {
                *number = HIDDEN;
            }
        }
        let together = bits(&operands.compute(2));
        let of_query = operands.heads() * shape.value_width;
        for query in 0..shape.queries {
            let alone = bits(&operands.alone(0, query..query + 1).compute(1));
            assert!(alone == together[query * of_query..][..of_query], "{query}");
        }
    });
}

#[test]
fn what_is_not_known_here_stays_with_ggml() {
    install_with(true);
    let taken = |kind: sys::ggml_type, width: i64, cap: f32, of_position: f32| {
        let memory = sys::ggml_init_params {
            mem_size: 1 << 20,
            mem_buffer: ptr::null_mut(),
            no_alloc: false,
        };
        // SAFETY: the context has room for the tensors, and is freed last.
        unsafe {
            let context = sys::ggml_init(memory);
            let queries = sys::ggml_new_tensor_3d(context, sys::GGML_TYPE_F32, width, 2, 4);
            let [keys, values] =
                [0, 1].map(|_| sys::ggml_new_tensor_3d(context, kind, width, 9, 2));
            let mask = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_F16, 9, 2);
            let result = sys::ggml_flash_attn_ext(
                context,
                queries,
                keys,
                values,
                mask,
                1.0,
                of_position,
                cap,
            );
            let taken = is_taken(result);
            sys::ggml_free(context);
            taken
        }
    };
    let is_there = install_with(true).is_some();
    assert_eq!(taken(sys::GGML_TYPE_F16, 64, 0.0, 0.0), is_there);
    assert!(!taken(sys::GGML_TYPE_Q8_0, 64, 0.0, 0.0));
    assert!(!taken(sys::GGML_TYPE_F16, 40, 0.0, 0.0));
    assert!(!taken(sys::GGML_TYPE_F16, 576, 0.0, 0.0));
    assert!(!taken(sys::GGML_TYPE_F16, 64, 30.0, 0.0));
    assert!(!taken(sys::GGML_TYPE_F16, 64, 0.0, 8.0));
}

/// In one cache, the cells of another sequence are as foreign as cells that nobody sees.
#[test]
fn what_others_see_does_not_reach_a_query_even_if_it_is_infinite() {
    let shape = Shape {
        key_width: 64,
        value_width: 64,
        cells: 50,
        queries: 9,
        key_heads: 1,
        group: 2,
        streams: 1,
    };
    with_each(|| {
        let operands = Operands::causal(shape);
        let expected = bits(&operands.compute(1));
        let mut infinite = operands;
        // Seen by the last two queries.
        infinite.values[48 * 64..].fill(f32::INFINITY);
        infinite.keys[48 * 64..].fill(f32::NAN);
        let computed = infinite.compute(1);
        let seen = 7 * 2 * 64;
        assert!(bits(&computed[..seen]) == expected[..seen]);
        assert!(computed[seen..].iter().all(|number| number.is_nan()));
    });
}

#[test]
fn scores_that_are_no_numbers_give_none() {
    with_each(|| {
        for (place, key) in [(0, f32::NAN), (39, f32::NAN), (7, f32::INFINITY)] {
            let mut operands = Operands::causal(Shape { cells: 40, ..SMALL });
            operands.queries.fill(1.0);
            operands.keys[place * 16..][..16].fill(key);
            let computed = operands.compute(1);
            assert!(
                computed.iter().all(|number| number.is_nan()),
                "{key} at {place}: {computed:?}"
            );
        }
    });
}
