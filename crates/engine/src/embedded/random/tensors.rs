//! The tensors of each architecture: the names and shapes that llama.cpp expects. A missing tensor is an error when it loads.

use super::{CONVOLUTION, RandomModelShape, STATE, TIME_STEPS};

/// Returns the names and dimensions of its tensors.
pub(super) fn tensors(shape: &RandomModelShape) -> Vec<(String, Vec<u32>)> {
    match shape.architecture {
        "bert" | "jina-bert-v3" | "nomic-bert" | "nomic-bert-moe" => return bert_tensors(shape),
        "modern-bert" | "neo-bert" => return modern_bert_tensors(shape),
        _ => {}
    }
    let (width, inner) = (shape.width, shape.inner);
    let shared = width / shape.heads * shape.key_value_heads;
    let last_norm = match shape.architecture {
        "lfm2" => "token_embd_norm.weight",
        _ => "output_norm.weight",
    };
    let mut tensors = vec![
        (
            "token_embd.weight".to_owned(),
            vec![width, shape.vocabulary],
        ),
        (last_norm.to_owned(), vec![width]),
    ];
    for layer in 0..shape.layers {
        let mut add = |name: &str, dimensions: &[u32]| {
            tensors.push((format!("blk.{layer}.{name}"), dimensions.to_vec()));
        };
        add("attn_norm.weight", &[width]);
        if shape.architecture == "mamba" {
            let inner = 2 * width;
            add("ssm_in.weight", &[width, 2 * inner]);
            add("ssm_conv1d.weight", &[CONVOLUTION, inner]);
            add("ssm_conv1d.bias", &[inner]);
            add("ssm_x.weight", &[inner, TIME_STEPS + 2 * STATE]);
            add("ssm_dt.weight", &[TIME_STEPS, inner]);
            add("ssm_dt.bias", &[inner]);
            add("ssm_a", &[STATE, inner]);
            add("ssm_d", &[inner]);
            add("ssm_out.weight", &[inner, width]);
            continue;
        }
        if shape.is_recurrent(layer) {
            add("shortconv.conv.weight", &[CONVOLUTION, width]);
            add("shortconv.in_proj.weight", &[width, 3 * width]);
            add("shortconv.out_proj.weight", &[width, width]);
        } else {
            add("attn_q.weight", &[width, width]);
            add("attn_k.weight", &[width, shared]);
            add("attn_v.weight", &[width, shared]);
            add("attn_output.weight", &[width, width]);
        }
        if !matches!(shape.architecture, "llama" | "llama-embed" | "eurobert")
            && !shape.is_recurrent(layer)
        {
            add("attn_q_norm.weight", &[width / shape.heads]);
            add("attn_k_norm.weight", &[width / shape.heads]);
        }
        if matches!(shape.architecture, "gemma3" | "gemma-embedding") {
            add("post_attention_norm.weight", &[width]);
            add("post_ffw_norm.weight", &[width]);
        }
        add("ffn_norm.weight", &[width]);
        if shape.experts > 0 {
            let experts = shape.experts;
            add(ROUTER, &[width, experts]);
            add("ffn_gate_exps.weight", &[width, inner, experts]);
            add("ffn_up_exps.weight", &[width, inner, experts]);
            add("ffn_down_exps.weight", &[inner, width, experts]);
        } else {
            add("ffn_gate.weight", &[width, inner]);
            add("ffn_up.weight", &[width, inner]);
            add("ffn_down.weight", &[inner, width]);
        }
    }
    tensors
}

/// What chooses the experts of a token. It is not quantised, as in files of trained models.
pub(super) const ROUTER: &str = "ffn_gate_inp.weight";

/// The tensors of BERT, and of those with its norms that rotate positions.
fn bert_tensors(shape: &RandomModelShape) -> Vec<(String, Vec<u32>)> {
    let (width, inner) = (shape.width, shape.inner);
    let mut tensors = Vec::new();
    let mut add = |name: String, dimensions: &[u32]| tensors.push((name, dimensions.to_vec()));
    add("token_embd.weight".into(), &[width, shape.vocabulary]);
    if shape.architecture == "bert" {
        add(
            "position_embd.weight".into(),
            &[width, shape.context_tokens],
        );
    }
    let norms = (0..shape.layers).flat_map(|layer| {
        ["attn_output_norm", "layer_output_norm"].map(|name| format!("blk.{layer}.{name}"))
    });
    for norm in norms.chain(["token_embd_norm".to_owned()]) {
        add(format!("{norm}.weight"), &[width]);
        add(format!("{norm}.bias"), &[width]);
    }
    for layer in 0..shape.layers {
        let mut add = |name: &str, dimensions: &[u32]| {
            add(format!("blk.{layer}.{name}"), dimensions);
        };
        for name in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            add(&format!("{name}.weight"), &[width, width]);
        }
        if shape.architecture == "jina-bert-v3" {
            add("attn_output.bias", &[width]);
        }
        // Every other layer.
        if shape.experts > 0 && layer % 2 == 1 {
            add(ROUTER, &[width, shape.experts]);
            add("ffn_up_exps.weight", &[width, inner, shape.experts]);
            add("ffn_down_exps.weight", &[inner, width, shape.experts]);
            continue;
        }
        if shape.architecture == "nomic-bert" {
            add("ffn_gate.weight", &[width, inner]);
        }
        add("ffn_up.weight", &[width, inner]);
        add("ffn_down.weight", &[inner, width]);
    }
    if shape.ranks() {
        add("cls.weight".into(), &[width, width]);
        add("cls.output.weight".into(), &[width, 1]);
    }
    tensors
}

/// The tensors of ModernBERT and NeoBERT, whose norms stand before what they are for and whose gate is half of `ffn_up`.
fn modern_bert_tensors(shape: &RandomModelShape) -> Vec<(String, Vec<u32>)> {
    let (width, inner) = (shape.width, shape.inner);
    let mut tensors = vec![(
        "token_embd.weight".to_owned(),
        vec![width, shape.vocabulary],
    )];
    let norms: &[&str] = match shape.architecture {
        "modern-bert" => &["token_embd_norm", "output_norm"],
        _ => &["enc.output_norm"],
    };
    tensors.extend(norms.iter().map(|it| (format!("{it}.weight"), vec![width])));
    for layer in 0..shape.layers {
        let mut add = |name: &str, dimensions: &[u32]| {
            tensors.push((format!("blk.{layer}.{name}.weight"), dimensions.to_vec()));
        };
        add("attn_norm", &[width]);
        add("attn_qkv", &[width, 3 * width]);
        add("attn_output", &[width, width]);
        add("ffn_norm", &[width]);
        add("ffn_up", &[width, 2 * inner]);
        add("ffn_down", &[inner, width]);
    }
    tensors
}
