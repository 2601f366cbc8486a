//! Options of llama.cpp: that they change what is loaded, and how wrong ones are refused.

use super::super::memory::{CacheTypes, cell_bytes};
use super::*;
use crate::gguf::GgufHeader;
use crate::llama_options::{CacheType, FlashAttention, GpuLayers, LoraAdapter, RopeScaling};

/// With heads of 32 numbers, a whole block of every quantised type.
fn wide_heads() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        written(&RandomModelShape {
            heads: 2,
            key_value_heads: 1,
            ..RandomModelShape::tiny()
        })
    })
}

fn with(llama: LlamaOptions) -> LoadOptions {
    LoadOptions { llama, ..options() }
}

pub(super) fn load_with(
    bytes: &'static [u8],
    options: &LoadOptions,
) -> Result<Embedded, LoadError> {
    load("m", &ModelSource::Bytes(bytes), options, &mut |_| true)
}

fn refusal(bytes: &'static [u8], llama: LlamaOptions) -> String {
    load_with(bytes, &with(llama)).unwrap_err().to_string()
}

fn first_row(model: &mut Embedded, slot: SlotId) -> Vec<f32> {
    model.open(slot, &opening());
    row(model, &entries(slot, 0, TEXT))
}

/// Also what is saved of a slot has the size of these types, and restores to the same logits.
#[test]
fn the_kv_cache_has_any_type_and_is_saved_and_restored() {
    let mut expected = None;
    let mut sizes = Vec::new();
    for kind in CacheType::ALL {
        let llama = LlamaOptions {
            cache_type_k: Some(kind),
            cache_type_v: Some(kind),
            ..LlamaOptions::default()
        };
        let mut model = load_with(wide_heads(), &with(llama)).unwrap();
        let computed = first_row(&mut model, 0);
        let exact = expected.get_or_insert_with(|| computed.clone());
        let far = exact.iter().zip(&computed).map(|(a, b)| (a - b).abs());
        let far = far.fold(0.0, f32::max);
        assert!(far < 0.1, "{kind:?} differs by {far}");
        let state = model.save(0).unwrap();
        sizes.push((kind, state.len()));
        model.open(1, &opening());
        assert!(model.restore(1, &state, TEXT.len() as u32), "{kind:?}");
        let next = |model: &mut Embedded, slot| row(model, &entries(slot, TEXT.len() as u32, &[7]));
        let original = next(&mut model, 0);
        alike(&original, &next(&mut model, 1));
    }
    let tokens = TEXT.len();
    for (kind, size) in sizes {
        let (numbers, bytes) = kind.block();
        // Two layers, of keys and of values 32 numbers each.
        let cells = tokens * 2 * 2 * (32 / numbers * bytes) as usize;
        assert!(
            (cells..cells + 1024).contains(&size),
            "{kind:?}: {size}, and {cells} of cells"
        );
    }
}

#[test]
fn heads_that_are_no_whole_blocks_are_refused() {
    let llama = LlamaOptions {
        cache_type_k: Some(CacheType::Q8_0),
        ..LlamaOptions::default()
    };
    let why = refusal(tiny(), llama);
    assert!(
        why.contains("cache_type_k: q8_0 has blocks of 32") && why.contains("has 16"),
        "{why}"
    );
}

#[test]
fn a_batch_in_parts_gives_the_same_logits() {
    let mut whole = loaded(&options());
    let expected = first_row(&mut whole, 0);
    for cache_tokens in [None, Some(1024)] {
        let parts = LoadOptions {
            cache_tokens,
            llama: LlamaOptions {
                ubatch_tokens: Some(8),
                ..batches(64)
            },
            ..options()
        };
        let mut model = loaded(&parts);
        assert_eq!(model.capacity().batch_tokens, 64);
        alike(&expected, &first_row(&mut model, 0));
    }
}

/// With a unified KV cache too, where a whole batch is otherwise one part.
#[test]
fn an_interrupted_batch_in_parts_leaves_its_slot_as_it_was() {
    let parts = LoadOptions {
        cache_tokens: Some(1024),
        llama: LlamaOptions {
            ubatch_tokens: Some(8),
            ..batches(64)
        },
        ..options()
    };
    let mut model = loaded(&parts);
    let expected = first_row(&mut model, 0);
    let flag = Interrupt::default();
    model.interrupt(flag.clone());
    flag.raise();
    model.open(1, &opening());
    let long: Vec<Token> = TEXT.iter().copied().cycle().take(40).collect();
    assert!(matches!(
        model.decode(&entries(1, 0, &long), Time::ZERO),
        Err(DecodeStop::Aborted)
    ));
    flag.lower();
    alike(&expected, &first_row(&mut model, 1));
}

#[test]
fn a_context_beyond_the_trained_one_needs_scaled_positions() {
    let long = |llama| LoadOptions {
        context_tokens: Some(2048),
        parallel: 1,
        ..with(llama)
    };
    let plain = load_with(tiny(), &long(LlamaOptions::default())).unwrap();
    assert_eq!(plain.info().context_tokens, 512);
    let expected = first_row(&mut loaded(&options()), 0);
    for scaling in [RopeScaling::Linear, RopeScaling::Yarn] {
        let llama = LlamaOptions {
            rope_scaling: Some(scaling),
            rope_scale: Some(4.0),
            yarn_orig_ctx: Some(512),
            ..LlamaOptions::default()
        };
        let mut model = load_with(tiny(), &long(llama)).unwrap();
        assert_eq!(model.info().context_tokens, 2048);
        assert!(model.capacity().cells >= 2048);
        assert_ne!(
            first_row(&mut model, 0),
            expected,
            "{scaling:?} changes nothing"
        );
    }
    let unscaled = LlamaOptions {
        rope_scaling: Some(RopeScaling::None),
        ..LlamaOptions::default()
    };
    let model = load_with(tiny(), &long(unscaled)).unwrap();
    assert_eq!(model.info().context_tokens, 512);
}

#[test]
fn metadata_is_replaced_before_it_is_checked() {
    let replaced = |entry: &str| LlamaOptions {
        override_kv: Some(vec![entry.to_owned()]),
        ..LlamaOptions::default()
    };
    let options = with(replaced("llama.context_length=int:256"));
    let model = load_with(tiny(), &options).unwrap();
    assert_eq!(model.info().context_tokens, 256);
    let (outline, _) = outline("m", &ModelSource::Bytes(tiny()), &options).unwrap();
    assert_eq!(outline.context_tokens, 256);
    let adds = |entry: &str| {
        load_with(tiny(), &with(replaced(entry)))
            .unwrap()
            .vocabulary()
            .bos()
    };
    assert_eq!(
        adds("tokenizer.ggml.add_bos_token=bool:true"),
        Some(IM_START + 2)
    );
    assert_eq!(adds("tokenizer.ggml.add_bos_token=bool:false"), None);
    // llama.cpp would divide by it.
    let why = refusal(tiny(), replaced("llama.attention.head_count=int:0"));
    assert!(
        why.contains("0 heads") && why.contains("with override_kv"),
        "{why}"
    );
    let why = refusal(tiny(), replaced("x=double:1"));
    assert!(
        why.contains("override_kv") && why.contains("float"),
        "{why}"
    );
}

/// llama.cpp would ignore it, with a line in its log.
#[test]
fn metadata_of_another_type_is_refused_before_the_load() {
    for (entry, parts) in [
        (
            "llama.block_count=str:2",
            [
                "llama.block_count",
                "of type int in the file",
                "of type str",
            ],
        ),
        (
            "llama.context_length=float:256",
            ["llama.context_length", "of type int", "of type float"],
        ),
        (
            "general.name=int:1",
            ["general.name", "of type str", "of type int"],
        ),
        (
            "tokenizer.ggml.tokens=str:a",
            ["tokens", "of type array", "of type str"],
        ),
        // The file has none of these.
        (
            "tokenizer.ggml.add_bos_token=int:1",
            ["add_bos_token", "of type bool", "of type int"],
        ),
        (
            "llama.attention.causal=str:true",
            ["causal", "of type bool", "of type str"],
        ),
        (
            "tokenizer.ggml.fim_pre_token_id=str:5",
            ["fim_pre_token_id", "of type int", "of type str"],
        ),
        (
            "tokenizer.ggml.fim_pre_token_id=bool:true",
            ["fim_pre_token_id", "of type int", "of type bool"],
        ),
    ] {
        let options = LlamaOptions {
            override_kv: Some(vec![entry.to_owned()]),
            ..LlamaOptions::default()
        };
        let why = refusal(tiny(), options);
        assert!(why.starts_with("override_kv: "), "{why}");
        assert!(
            parts.iter().all(|part| why.contains(part)),
            "{entry}: {why}"
        );
    }
    // What llama.cpp alone reads, and does not need, is its own matter.
    let unknown = LlamaOptions {
        override_kv: Some(vec!["llama.expert_gating_func=str:x".to_owned()]),
        ..LlamaOptions::default()
    };
    assert!(load_with(tiny(), &with(unknown)).is_ok());
}

/// The estimate has the cells of one slot for it.
#[test]
fn a_fork_copies_the_cells_that_are_estimated() {
    let tokens = 200;
    let mut model = loaded(&options());
    assert!(model.context.cells_per_slot().is_some());
    let prompt: Vec<Token> = (0..tokens).collect();
    model.open(0, &opening());
    for part in prompt.chunks(32) {
        let from = part[0];
        model.decode(&entries(0, from, part), Time::ZERO).unwrap();
    }
    let header = GgufHeader::read(tiny()).unwrap();
    let types = CacheTypes::new(&LlamaOptions::default());
    let cells = cell_bytes(&header, types) * u64::from(tokens);
    // And what llama.cpp notes of each cell.
    let notes = 64 * u64::from(tokens);
    let copied = model.fork_bytes(0) as u64;
    assert!(
        (cells..cells + notes).contains(&copied),
        "{copied}, {cells}"
    );
}

#[test]
fn tensors_are_placed_by_pattern_in_buffers_of_this_machine() {
    let placed = |entry: &str| LlamaOptions {
        override_tensor: Some(vec![entry.to_owned()]),
        ..LlamaOptions::default()
    };
    let mut model = load_with(tiny(), &with(placed(r"blk\..*ffn=CPU"))).unwrap();
    alike(
        &first_row(&mut loaded(&options()), 0),
        &first_row(&mut model, 0),
    );
    let why = refusal(tiny(), placed("ffn=CUDA7"));
    assert!(
        why.contains("\"CUDA7\"") && why.contains("there are: CPU"),
        "{why}"
    );
    let why = refusal(tiny(), placed("(ffn=CPU"));
    assert!(why.contains("a group is not closed"), "{why}");
}

#[test]
fn attention_and_loading_have_other_modes() {
    let expected = first_row(&mut loaded(&options()), 0);
    let modes = [
        LlamaOptions {
            flash_attn: Some(FlashAttention::On),
            ..LlamaOptions::default()
        },
        LlamaOptions {
            flash_attn: Some(FlashAttention::Off),
            ..LlamaOptions::default()
        },
        LlamaOptions {
            mmap: Some(false),
            mlock: Some(true),
            ..LlamaOptions::default()
        },
        // Without a GPU the CPU computes all of it, with a warning.
        LlamaOptions {
            gpu_layers: Some(GpuLayers::All),
            main_gpu: Some(3),
            tensor_split: Some(vec![1.0, 2.0]),
            ..LlamaOptions::default()
        },
    ];
    for llama in modes {
        let mut model = load_with(tiny(), &with(llama)).unwrap();
        alike(&expected, &first_row(&mut model, 0));
    }
}

pub(super) fn adapter(name: &str, shape: &RandomModelShape, seed: u64) -> Sample {
    let mut bytes = Vec::new();
    random::write_adapter(&mut bytes, shape, 4, seed).unwrap();
    Sample::new(name, &bytes)
}

pub(super) fn with_adapters(adapters: &[(&Sample, f64)]) -> LoadOptions {
    let lora = adapters.iter().map(|(sample, scale)| LoraAdapter {
        path: sample.0.clone(),
        scale: *scale,
        name: None,
        apply: true,
    });
    LoadOptions {
        lora: lora.collect(),
        ..options()
    }
}

#[test]
fn adapters_add_to_the_logits_by_their_scales() {
    let shape = RandomModelShape::tiny();
    let (one, two) = (
        adapter("lora-one", &shape, 1),
        adapter("lora-two", &shape, 9),
    );
    let mut rows = Vec::new();
    for adapters in [
        &[][..],
        &[(&one, 1.0)],
        &[(&one, 2.0)],
        &[(&one, 1.0), (&two, 1.0)],
    ] {
        let mut model = load_with(tiny(), &with_adapters(adapters)).unwrap();
        let row = first_row(&mut model, 0);
        // A saved prefix was computed with the same adapters.
        let state = model.save(0).unwrap();
        model.open(1, &opening());
        assert!(model.restore(1, &state, TEXT.len() as u32));
        assert!(
            !rows.contains(&row),
            "{} adapters change nothing",
            adapters.len()
        );
        rows.push(row);
    }
    let mut silent = load_with(tiny(), &with_adapters(&[(&one, 0.0)])).unwrap();
    alike(&rows[0], &first_row(&mut silent, 0));
}

#[test]
fn adapters_that_do_not_fit_are_refused_with_their_path() {
    let shape = RandomModelShape::tiny();
    let wide = RandomModelShape {
        width: 128,
        ..shape.clone()
    };
    let deep = RandomModelShape {
        layers: 3,
        ..shape.clone()
    };
    let mut short = Vec::new();
    random::write_adapter(&mut short, &shape, 4, 1).unwrap();
    short.truncate(short.len() - 100);
    for (sample, part) in [
        (adapter("lora-wide", &wide, 1), "incorrect shape"),
        (
            adapter("lora-deep", &deep, 1),
            "does not exist in base model",
        ),
        (
            adapter("lora-other", &RandomModelShape::tiny_windowed(), 1),
            "architecture \"gemma3\"",
        ),
        (Sample::new("lora-model", tiny()), "not a LoRA adapter"),
        (Sample::new("lora-short", &short), "is incomplete"),
        (Sample::new("lora-text", b"hello, world"), "is not a GGUF"),
    ] {
        let options = with_adapters(&[(&sample, 1.0)]);
        let why = load_with(tiny(), &options).unwrap_err().to_string();
        let path = sample.0.display().to_string();
        assert!(why.contains(part) && why.contains(&path), "{why}");
    }
}
