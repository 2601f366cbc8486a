//! Writes models with random weights, for tests and benches.

mod tensors;

use std::io::{self, Write};

use self::tensors::{ROUTER, tensors};
use crate::tokenizer_json::alphabet;

/// The shape of a model.
#[derive(Clone, Debug)]
pub struct RandomModelShape {
    /// The architecture in the header.
    pub architecture: &'static str,
    /// Layers.
    pub layers: u32,
    /// Width of the residual stream; a multiple of 32.
    pub width: u32,
    /// Heads; divide the width.
    pub heads: u32,
    /// Heads of keys and values; divide the heads, and times the head's width a multiple of 32.
    pub key_value_heads: u32,
    /// Width between the feed-forward projections; a multiple of 32.
    pub inner: u32,
    /// Number of tokens: 256 for bytes, 3 control tokens, the results of merges, and fillers.
    pub vocabulary: u32,
    /// The kind of tokenizer, by GGUF's name.
    pub kind: &'static str,
    /// The type of its control tokens, by GGUF's number.
    pub control_type: i32,
    /// Further tokens of this type, after the results of merges.
    pub controls: Vec<&'static str>,
    /// The first tokens are bytes to which what has no token falls back (`<0x41>`), as in SentencePiece vocabularies; otherwise
    /// the characters of a byte-level vocabulary.
    pub falls_back: bool,
    /// A byte without a token.
    pub lacking: Option<u8>,
    /// The pre-tokenizer, by llama.cpp's name.
    pub pre: String,
    /// Merges of the tokenizer, in the byte-level encoding of such files.
    pub merges: Vec<[String; 2]>,
    /// The context length that it claims to be trained for.
    pub context_tokens: u32,
    /// The sliding window of every other layer of Gemma 3 and of ModernBERT.
    pub sliding_window: u32,
    /// Experts of a layer, of which a token uses two; 0: none.
    pub experts: u32,
    /// Number of tokens with a type; fewer than `vocabulary` is a damaged file.
    pub token_types: u32,
    /// Numbers of the header that replace those of the shape, or are added.
    pub numbers: Vec<(String, u32)>,
    /// Booleans that are added to the header.
    pub flags: Vec<(String, bool)>,
    /// Floats of the header that replace its own, or are added.
    pub fractions: Vec<(String, f32)>,
    /// The chat template.
    pub template: String,
}

impl RandomModelShape {
    /// Small enough to load in milliseconds: about 100 KB.
    #[must_use]
    pub fn tiny() -> Self {
        Self {
            architecture: "llama",
            layers: 2,
            width: 64,
            heads: 4,
            key_value_heads: 2,
            inner: 128,
            vocabulary: 288,
            kind: "gpt2",
            control_type: 3,
            controls: Vec::new(),
            falls_back: false,
            lacking: None,
            pre: "gpt-2".to_owned(),
            merges: vec![["t".to_owned(), "h".to_owned()]],
            context_tokens: 512,
            sliding_window: 8,
            experts: 0,
            token_types: 288,
            numbers: Vec::new(),
            flags: Vec::new(),
            fractions: Vec::new(),
            template: TEMPLATE.to_owned(),
        }
    }

    /// As small, and recurrent: its state cannot be truncated.
    #[must_use]
    pub fn tiny_recurrent() -> Self {
        Self {
            architecture: "mamba",
            ..Self::tiny()
        }
    }

    /// As small, with a sliding window in every other layer.
    #[must_use]
    pub fn tiny_windowed() -> Self {
        Self {
            architecture: "gemma3",
            ..Self::tiny()
        }
    }

    /// As small, with a recurrent layer and an attention layer.
    #[must_use]
    pub fn tiny_hybrid() -> Self {
        Self {
            architecture: "lfm2",
            ..Self::tiny()
        }
    }

    /// As small, with four experts in each layer.
    #[must_use]
    pub fn tiny_experts() -> Self {
        Self {
            architecture: "qwen3moe",
            inner: 64,
            experts: 4,
            ..Self::tiny()
        }
    }

    /// As small, with a SentencePiece vocabulary: words begin with `\u{2581}`, and all else falls back to bytes.
    #[must_use]
    pub fn tiny_sentence_piece() -> Self {
        let pieces = [
            "\u{2581}",
            "\u{2581}t",
            "\u{2581}th",
            "e",
            "t",
            "h",
            "\u{65e5}",
        ];
        Self {
            kind: "llama",
            falls_back: true,
            merges: pieces.map(|it| [it.to_owned(), String::new()]).into(),
            ..Self::tiny()
        }
    }

    /// A few MB: narrow, with as many tokens as the vocabularies of Qwen have.
    #[must_use]
    pub fn many_tokens() -> Self {
        Self {
            width: 32,
            heads: 2,
            inner: 32,
            vocabulary: 151_936,
            token_types: 151_936,
            ..Self::tiny()
        }
    }

    /// As small, with a vocabulary of this kind that has tokens for fill in the middle and [`FIM_PAD`], from [`FIM_PREFIX`] on.
    /// One of the kind `llama` has tokens for printable ASCII alone.
    #[must_use]
    pub fn tiny_infill(kind: &'static str) -> Self {
        Self {
            kind,
            // SentencePiece has this in place of a space. It has no merges, and byte-level vocabularies no use for it.
            merges: vec![["\u{2581}".to_owned(), String::new()]],
            controls: vec![
                "<|fim_prefix|>",
                "<|fim_suffix|>",
                "<|fim_middle|>",
                "<|fim_pad|>",
            ],
            ..Self::tiny()
        }
    }

    /// As small, an encoder with this number of a pooling: 1 for the mean, 2 for the first token, 4 for a classification head.
    /// A text is put between `<|begin|>` and `<|im_end|>`, and two texts are separated by `<|im_end|><|im_start|>`.
    #[must_use]
    pub fn tiny_encoder(pooling: u32) -> Self {
        Self::tiny_encoder_of("bert", pooling)
    }

    /// The same of another architecture.
    #[must_use]
    pub fn tiny_encoder_of(architecture: &'static str, pooling: u32) -> Self {
        let key = |key: &str| format!("{architecture}.{key}");
        let token = |key: &str| format!("tokenizer.ggml.{key}");
        let mut numbers = vec![
            (key("pooling_type"), pooling),
            (token("token_type_count"), 2),
            (token("seperator_token_id"), IM_START),
        ];
        let has_experts = architecture == "nomic-bert-moe";
        if has_experts {
            numbers.push((key("moe_every_n_layers"), 2));
        }
        Self {
            architecture,
            key_value_heads: 4,
            numbers,
            experts: if has_experts { 4 } else { 0 },
            flags: vec![
                (key("attention.causal"), false),
                (token("add_bos_token"), true),
                (token("add_eos_token"), true),
                (token("add_sep_token"), true),
            ],
            fractions: vec![(key("attention.layer_norm_epsilon"), 1e-5)],
            ..Self::tiny()
        }
    }

    /// About 100 million parameters.
    #[must_use]
    pub fn hundred_million() -> Self {
        Self {
            architecture: "llama",
            layers: 12,
            width: 768,
            heads: 12,
            key_value_heads: 4,
            inner: 2048,
            vocabulary: 32_000,
            token_types: 32_000,
            context_tokens: 8192,
            ..Self::tiny()
        }
    }
}

impl RandomModelShape {
    /// Returns whether it has a classification head.
    fn ranks(&self) -> bool {
        let rank = (format!("{}.pooling_type", self.architecture), 4);
        self.numbers.contains(&rank)
    }

    /// Returns whether a layer of a hybrid model is recurrent: every other one is.
    fn is_recurrent(&self, layer: u32) -> bool {
        self.architecture == "lfm2" && layer.is_multiple_of(2)
    }
}

/// The first control token; `<|im_end|>` (EOG) and `<|begin|>` follow it.
pub const IM_START: u32 = 256;
/// The token before a prefix of [`RandomModelShape::tiny_infill`]; those before a suffix and at the end follow it.
pub const FIM_PREFIX: u32 = 260;
/// The padding of [`RandomModelShape::tiny_infill`], which is an EOG token.
pub const FIM_PAD: u32 = 263;

const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + \
                        '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' \
                        }}{% endif %}";

/// Writes a model. Equal shapes and seeds give equal bytes.
///
/// # Errors
/// Those of the writer.
pub fn write(out: impl Write, shape: &RandomModelShape, seed: u64) -> io::Result<()> {
    let mut header = GgufWriterHeader::default();
    metadata(&mut header, shape);
    write_file(out, header, &tensors(shape), seed)
}

fn write_file(
    mut out: impl Write,
    mut header: GgufWriterHeader,
    tensors: &[(String, Vec<u32>)],
    seed: u64,
) -> io::Result<()> {
    let mut offset = 0;
    for (name, dimensions) in tensors {
        header.tensor(name, dimensions, offset);
        // Offsets are relative to the end of the header, so they are known before its length is.
        offset += bytes_of(name, dimensions).next_multiple_of(ALIGNMENT);
    }
    let head = header.finish(tensors.len());
    out.write_all(&head)?;
    pad(&mut out, head.len() as u64)?;
    // xorshift stays at 0 for ever if it starts there.
    let mut random = Random(seed | 1);
    for (name, dimensions) in tensors {
        weights(&mut out, name, dimensions, &mut random)?;
        pad(&mut out, bytes_of(name, dimensions))?;
    }
    Ok(())
}

/// Writes a LoRA adapter for the queries and the outputs of attention of every layer of a model of this shape.
///
/// # Errors
/// Those of the writer.
pub fn write_adapter(
    out: impl Write,
    shape: &RandomModelShape,
    rank: u32,
    seed: u64,
) -> io::Result<()> {
    let mut header = GgufWriterHeader::default();
    header.text("general.type", "adapter");
    header.text("general.architecture", shape.architecture);
    header.text("adapter.type", "lora");
    // Strong, so that few layers show which adapters have computed.
    header.fraction("adapter.lora.alpha", 16.0);
    let layers = (0..shape.layers).flat_map(|layer| {
        ["attn_q", "attn_output"]
            .into_iter()
            .flat_map(move |tensor| {
                let name = |part: &str| format!("blk.{layer}.{tensor}.weight.lora_{part}");
                [
                    (name("a"), vec![shape.width, rank]),
                    (name("b"), vec![rank, shape.width]),
                ]
            })
    });
    write_file(out, header, &layers.collect::<Vec<_>>(), seed)
}

const ALIGNMENT: u64 = 32;

/// Of recurrent models: the width of a convolution, the rank of a time step, the size of a state.
const CONVOLUTION: u32 = 4;
const TIME_STEPS: u32 = 4;
const STATE: u32 = 16;

/// Returns whether a tensor is quantised. Matrices are Q8_0, 34 bytes for 32 numbers, if their rows are whole blocks;
/// everything else is 32-bit floats.
fn is_quantised(name: &str, dimensions: &[u32]) -> bool {
    dimensions.len() >= 2 && dimensions[0].is_multiple_of(32) && !name.ends_with(ROUTER)
}

fn bytes_of(name: &str, dimensions: &[u32]) -> u64 {
    let numbers: u64 = dimensions
        .iter()
        .map(|&dimension| u64::from(dimension))
        .product();
    if is_quantised(name, dimensions) {
        numbers / 32 * 34
    } else {
        numbers * 4
    }
}

fn weights(
    out: &mut impl Write,
    name: &str,
    dimensions: &[u32],
    random: &mut Random,
) -> io::Result<()> {
    if name.ends_with(ROUTER) {
        for _ in 0..bytes_of(name, dimensions) / 4 {
            // From -0.5 to 0.5.
            let value = (random.next() >> 40) as f32 / (1 << 24) as f32 - 0.5;
            out.write_all(&value.to_le_bytes())?;
        }
        return Ok(());
    }
    if !is_quantised(name, dimensions) {
        // Norms are 1; the few small matrices of recurrent layers are -1, so that their states decay.
        let value: f32 = match dimensions.len() {
            _ if name.ends_with("norm.bias") => 0.0,
            1 => 1.0,
            _ => -1.0,
        };
        return out.write_all(
            &value
                .to_le_bytes()
                .repeat(bytes_of(name, dimensions) as usize / 4),
        );
    }
    let mut block = [0_u8; 34];
    // The scale 2^-12 in half precision: numbers of about 0.02, as trained weights have.
    block[..2].copy_from_slice(&0x0c00_u16.to_le_bytes());
    for _ in 0..bytes_of(name, dimensions) / 34 {
        for eight in block[2..].chunks_exact_mut(8) {
            eight.copy_from_slice(&random.next().to_le_bytes());
        }
        out.write_all(&block)?;
    }
    Ok(())
}

fn pad(out: &mut impl Write, written: u64) -> io::Result<()> {
    let missing = written.next_multiple_of(ALIGNMENT) - written;
    out.write_all(&[0; ALIGNMENT as usize][..missing as usize])
}

fn metadata(header: &mut GgufWriterHeader, shape: &RandomModelShape) {
    let name = shape.architecture;
    header.text("general.architecture", name);
    header.text("general.name", "random");
    // A key that is written twice is an error in llama.cpp, so the shape's own value replaces the usual one.
    let given = |key: &str| shape.numbers.iter().any(|(given, _)| given == key);
    for (key, value) in [
        ("context_length", shape.context_tokens),
        ("embedding_length", shape.width),
        ("block_count", shape.layers),
        ("feed_forward_length", shape.inner),
        ("attention.head_count", shape.heads),
        ("rope.dimension_count", shape.width / shape.heads),
    ] {
        let key = format!("{name}.{key}");
        if !given(&key) {
            header.number(&key, value);
        }
    }
    let shared = format!("{name}.attention.head_count_kv");
    // A hybrid model has a number of heads for each layer, and none where it is recurrent.
    if name == "lfm2" {
        let heads = (0..shape.layers).map(|layer| match shape.is_recurrent(layer) {
            true => 0,
            false => shape.key_value_heads.cast_signed(),
        });
        header.numbers(&shared, &heads.collect::<Vec<i32>>());
        header.number("lfm2.shortconv.l_cache", CONVOLUTION);
    } else if !given(&shared) {
        header.number(&shared, shape.key_value_heads);
    }
    if matches!(name, "gemma3" | "gemma-embedding" | "modern-bert") {
        let key = format!("{name}.attention.sliding_window");
        header.number(&key, shape.sliding_window);
        header.number(&format!("{key}_pattern"), 2);
    }
    if shape.experts > 0 {
        header.number(&format!("{name}.expert_count"), shape.experts);
        header.number(&format!("{name}.expert_used_count"), 2);
        header.number(&format!("{name}.expert_feed_forward_length"), shape.inner);
    }
    for (key, value) in &shape.numbers {
        header.number(key, *value);
    }
    if name == "mamba" {
        header.number("mamba.ssm.conv_kernel", CONVOLUTION);
        header.number("mamba.ssm.inner_size", 2 * shape.width);
        header.number("mamba.ssm.state_size", STATE);
        header.number("mamba.ssm.time_step_rank", TIME_STEPS);
    }
    let epsilon = format!("{name}.attention.layer_norm_rms_epsilon");
    if !shape.fractions.iter().any(|(given, _)| *given == epsilon) {
        header.fraction(&epsilon, 1e-5);
    }
    for (key, value) in &shape.fractions {
        header.fraction(key, *value);
    }
    for (key, value) in &shape.flags {
        header.flag(key, *value);
    }
    vocabulary(header, shape);
    for (key, token) in [("bos", IM_START + 2), ("eos", IM_START + 1)] {
        let key = format!("tokenizer.ggml.{key}_token_id");
        if !given(&key) {
            header.number(&key, token);
        }
    }
    header.text("tokenizer.chat_template", &shape.template);
}

/// Writes the tokens, their types and the merges.
fn vocabulary(header: &mut GgufWriterHeader, shape: &RandomModelShape) {
    header.text("tokenizer.ggml.model", shape.kind);
    header.text("tokenizer.ggml.pre", &shape.pre);
    let mut tokens: Vec<String> = match shape.falls_back {
        true => (0..256).map(|byte| format!("<0x{byte:02X}>")).collect(),
        false => alphabet().map(String::from).collect(),
    };
    // The id stays in use, so that the other tokens keep theirs.
    if let Some(byte) = shape.lacking {
        tokens[usize::from(byte)] = "<lacking>".to_owned();
    }
    tokens.extend(["<|im_start|>", "<|im_end|>", "<|begin|>"].map(str::to_owned));
    tokens.extend(shape.merges.iter().map(|pair| pair.concat()));
    let controls = tokens.len() as u32..(tokens.len() + shape.controls.len()) as u32;
    tokens.extend(shape.controls.iter().map(|text| (*text).to_owned()));
    tokens.extend((tokens.len() as u32..shape.vocabulary).map(|token| format!("filler{token}")));
    let control = IM_START..IM_START + 3;
    let kinds = (0..shape.token_types).map(|token| {
        if control.contains(&token) || controls.contains(&token) {
            shape.control_type
        } else if shape.falls_back && token < IM_START {
            // A byte.
            6
        } else {
            1
        }
    });
    header.texts("tokenizer.ggml.tokens", &tokens);
    header.numbers("tokenizer.ggml.token_type", &kinds.collect::<Vec<i32>>());
    header.texts(
        "tokenizer.ggml.merges",
        &shape
            .merges
            .iter()
            .map(|pair| pair.join(" "))
            .collect::<Vec<_>>(),
    );
}

#[derive(Default)]
struct GgufWriterHeader {
    pairs: Vec<u8>,
    count: u64,
    tensors: Vec<u8>,
}

impl GgufWriterHeader {
    fn pair(&mut self, key: &str, kind: u32, value: &[u8]) {
        put_text(&mut self.pairs, key);
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend(value);
        self.count += 1;
    }

    fn number(&mut self, key: &str, value: u32) {
        self.pair(key, 4, &value.to_le_bytes());
    }

    fn flag(&mut self, key: &str, value: bool) {
        self.pair(key, 7, &[value.into()]);
    }

    fn fraction(&mut self, key: &str, value: f32) {
        self.pair(key, 6, &value.to_le_bytes());
    }

    fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        put_text(&mut bytes, value);
        self.pair(key, 8, &bytes);
    }

    fn numbers(&mut self, key: &str, values: &[i32]) {
        let elements = values.iter().flat_map(|value| value.to_le_bytes());
        self.array(key, 5, values.len(), &elements.collect::<Vec<u8>>());
    }

    fn texts(&mut self, key: &str, values: &[String]) {
        let mut elements = Vec::new();
        values.iter().for_each(|it| put_text(&mut elements, it));
        self.array(key, 8, values.len(), &elements);
    }

    fn array(&mut self, key: &str, of: u32, length: usize, elements: &[u8]) {
        let (of, length) = (of.to_le_bytes(), (length as u64).to_le_bytes());
        self.pair(key, 9, &[&of[..], &length[..], elements].concat());
    }

    fn tensor(&mut self, name: &str, dimensions: &[u32], offset: u64) {
        put_text(&mut self.tensors, name);
        self.tensors.extend((dimensions.len() as u32).to_le_bytes());
        for &dimension in dimensions {
            self.tensors.extend(u64::from(dimension).to_le_bytes());
        }
        let kind: u32 = if is_quantised(name, dimensions) { 8 } else { 0 };
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
    }

    fn finish(self, tensors: usize) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((tensors as u64).to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(self.pairs);
        bytes.extend(self.tensors);
        bytes
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// xorshift64: sufficient for weights without meaning.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}
