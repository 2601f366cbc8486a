//! Products against ggml's function for one row and one token.

use std::ptr;

use llama_cpp_sys_2 as sys;

use super::{is_taken, run_graph, work_bytes};
use crate::embedded::llama::cpu_hooks::install_with;
use crate::embedded::work_buffer::product_bytes;

/// Values of a row, rows, tokens: few tokens, whole tiles, parts of tiles, several parts of threads.
const SHAPES: &[(usize, usize, usize)] = &[
    (32, 1, 4),
    (64, 7, 4),
    (160, 3, 5),
    (96, 33, 9),
    (576, 192, 8),
    (576, 70, 131),
    (1536, 36, 16),
];

/// A product of random weights with random tokens, in ggml's memory.
struct Product {
    context: *mut sys::ggml_context,
    weights: *mut sys::ggml_tensor,
    tokens: *mut sys::ggml_tensor,
    result: *mut sys::ggml_tensor,
}

impl Product {
    fn new(kind: sys::ggml_type, (values, rows, tokens): (usize, usize, usize)) -> Self {
        let mut seed = 7_u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(i16::try_from(seed >> 16 & 0x7fff).expect("15 bits")) / 16_384.0 - 1.0
        };
        let weights: Vec<f32> = (0..values * rows).map(|_| random()).collect();
        let inputs: Vec<f32> = (0..values * tokens).map(|_| random() * 3.0).collect();
        let [width, height, count] = [values, rows, tokens].map(|it| it as i64);
        let memory = sys::ggml_init_params {
            mem_size: 16 << 20,
            mem_buffer: ptr::null_mut(),
            no_alloc: false,
        };
        // SAFETY: the context has room for the tensors, which have the lengths of what is copied into them.
        unsafe {
            let context = sys::ggml_init(memory);
            let of_weights = sys::ggml_new_tensor_2d(context, kind, width, height);
            let data = (*of_weights).data;
            let no_importance = ptr::null();
            sys::ggml_quantize_chunk(
                kind,
                weights.as_ptr(),
                data,
                0,
                height,
                width,
                no_importance,
            );
            let of_tokens = sys::ggml_new_tensor_2d(context, sys::GGML_TYPE_F32, width, count);
            let data = (*of_tokens).data.cast::<f32>();
            ptr::copy_nonoverlapping(inputs.as_ptr(), data, inputs.len());
            Self {
                context,
                weights: of_weights,
                tokens: of_tokens,
                result: sys::ggml_mul_mat(context, of_weights, of_tokens),
            }
        }
    }

    fn is_ours(&self) -> bool {
        is_taken(self.result)
    }

    fn compute(&self, threads: i32) -> Vec<u32> {
        // SAFETY: the context is live, and has room for a graph.
        let numbers = unsafe { run_graph(self.context, self.result, threads) };
        numbers.iter().map(|number| number.to_bits()).collect()
    }

    /// Computes it by ggml's function for one row and one token.
    fn one_by_one(&self) -> Vec<u32> {
        // SAFETY: the tensors are live; each row and each token has the length that is passed.
        unsafe {
            let (weights, tokens) = (&*self.weights, &*self.tokens);
            let of_weights = &*sys::ggml_get_type_traits_cpu(weights.type_);
            let of_tokens = &*sys::ggml_get_type_traits_cpu(of_weights.vec_dot_type);
            let multiply = of_weights.vec_dot.expect("ggml multiplies this type");
            let quantize = of_tokens.from_float.expect("ggml quantizes this type");
            let mut quantized =
                vec![0_u64; sys::ggml_row_size(of_weights.vec_dot_type, tokens.ne[0]) / 8 + 1];
            let mut numbers = Vec::new();
            for token in 0..usize::try_from(tokens.ne[1]).expect("it is small") {
                let values = tokens.data.byte_add(token * tokens.nb[1]).cast::<f32>();
                quantize(values, quantized.as_mut_ptr().cast(), tokens.ne[0]);
                for row in 0..usize::try_from(weights.ne[1]).expect("it is small") {
                    let mut number = 0.0;
                    let row = weights.data.byte_add(row * weights.nb[1]);
                    let length = i32::try_from(weights.ne[0]).expect("it is small");
                    multiply(
                        length,
                        &raw mut number,
                        0,
                        row,
                        0,
                        quantized.as_ptr().cast(),
                        0,
                        1,
                    );
                    numbers.push(number.to_bits());
                }
            }
            numbers
        }
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: the only pointer that frees it.
        unsafe { sys::ggml_free(self.context) };
    }
}

fn each_product_has_the_bits_of_ggmls_own(may_use_avx512: bool) {
    let installed = install_with(may_use_avx512);
    let compiled: Vec<_> = crate::embedded::llama::compiled_for().collect();
    let is_built_for_it = cfg!(all(target_arch = "x86_64", unix))
        && ["AVX2", "FMA", "F16C"]
            .iter()
            .all(|needed| compiled.contains(needed));
    assert_eq!(installed.is_some(), is_built_for_it);
    if installed.is_none() {
        return;
    }
    let by_avx2 = [sys::GGML_TYPE_Q4_1, sys::GGML_TYPE_Q5_1];
    let signed = [sys::GGML_TYPE_Q5_0, sys::GGML_TYPE_Q8_0];
    for kind in by_avx2.into_iter().chain(signed) {
        for &shape in SHAPES {
            let product = Product::new(kind, shape);
            let is_ours = by_avx2.contains(&kind) || installed == Some("AVX-512 VNNI");
            assert_eq!(product.is_ours(), is_ours, "{kind} {shape:?}");
            let expected = product.one_by_one();
            for threads in [1, 2, 5] {
                let computed = product.compute(threads);
                assert!(computed == expected, "{kind} {shape:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn products_by_avx2_have_the_bits_of_ggmls_own() {
    each_product_has_the_bits_of_ggmls_own(false);
}

#[test]
fn products_by_the_best_instructions_have_the_bits_of_ggmls_own() {
    each_product_has_the_bits_of_ggmls_own(true);
}

#[test]
fn few_tokens_are_computed_by_wide_instructions_only() {
    // Starts ggml's CPU backend, whose functions have tables.
    install_with(true);
    for kind in [
        sys::GGML_TYPE_Q4_1,
        sys::GGML_TYPE_Q5_1,
        sys::GGML_TYPE_Q5_0,
        sys::GGML_TYPE_Q8_0,
    ] {
        for tokens in 1..4 {
            let product = Product::new(kind, (576, 70, tokens));
            let expected = product.one_by_one();
            for may_use_avx512 in [false, true] {
                let installed = install_with(may_use_avx512);
                let is_wide = installed == Some("AVX-512 VNNI");
                assert_eq!(product.is_ours(), is_wide);
                assert!(
                    product.compute(2) == expected,
                    "{installed:?} {kind} {tokens}"
                );
            }
        }
    }
}

#[test]
fn other_types_stay_with_ggml() {
    install_with(true);
    assert!(!Product::new(sys::GGML_TYPE_Q4_0, (64, 4, 4)).is_ours());
}

#[test]
fn weights_whose_blocks_are_apart_stay_with_ggml() {
    install_with(true);
    for kind in [
        sys::GGML_TYPE_Q4_1,
        sys::GGML_TYPE_Q5_1,
        sys::GGML_TYPE_Q5_0,
        sys::GGML_TYPE_Q8_0,
    ] {
        let product = Product::new(kind, (64, 4, 4));
        // SAFETY: the tensor is live, and nothing is computed with it afterwards.
        unsafe { (*product.weights).nb[0] *= 2 };
        assert!(!product.is_ours(), "{kind}");
    }
}

/// Of the largest type no more than is estimated; of the others no less than two thirds of it.
#[test]
fn work_buffers_are_those_of_the_estimate() {
    install_with(true);
    for (kind, share) in [
        (sys::GGML_TYPE_Q4_1, 0.66),
        (sys::GGML_TYPE_Q5_1, 0.66),
        (sys::GGML_TYPE_Q5_0, 0.95),
        (sys::GGML_TYPE_Q8_0, 0.95),
    ] {
        for shape in [(576, 70, 131), (1536, 36, 16), (1536, 4, 512)] {
            let product = Product::new(kind, shape);
            for threads in [1, 2, 64] {
                let (values, _, tokens) = shape;
                let estimated = product_bytes(values as u64, tokens as u64, threads.into());
                let asked = work_bytes(product.result, threads);
                assert_eq!(asked.is_some(), product.is_ours());
                let is_near =
                    |asked: u64| asked <= estimated && asked as f64 >= estimated as f64 * share;
                assert!(
                    asked.is_none_or(is_near),
                    "{asked:?} {estimated}: {kind} {shape:?} {threads}"
                );
            }
        }
    }
}
