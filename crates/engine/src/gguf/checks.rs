//! Checks a GGUF header for what llama.cpp asserts or assumes when it loads a model, because a failed assertion there
//! ends the process.
//!
//! Most checks apply to every architecture. What a single architecture asserts beyond them is found by
//! `embedded::trial`, at a greater cost.

use super::{Element, GgufHeader};

/// The maximum of layers of a model (`LLAMA_MAX_LAYERS`).
const LAYERS_MAX: u64 = 512;
/// The maximum of experts of a layer (`LLAMA_MAX_EXPERTS`).
const EXPERTS_MAX: u64 = 1024;
/// llama.cpp counts positions in signed 32-bit integers.
pub(crate) const CONTEXT_TOKENS_MAX: u32 = 1 << 26;
/// The minimum alignment of tensors in ggml (`TENSOR_ALIGNMENT`).
const TENSOR_ALIGNMENT: u64 = 32;
/// The maximum of numbers that are sizes: no model comes near, and llama.cpp multiplies them in 32 bits.
const SIZE_MAX: u64 = 1 << 24;

/// Architectures with multi-part positions (`LLAMA_ROPE_TYPE_MROPE` and `IMROPE` by themselves).
const SECTIONED: [&str; 9] = [
    "clef",
    "paddleocr",
    "qwen2vl",
    "qwen35",
    "qwen35moe",
    "qwen3tts",
    "qwen3vl",
    "qwen3vlmoe",
    "qwen4exp",
];

/// The type of a token that represents one byte (`LLAMA_TOKEN_TYPE_BYTE`).
const BYTE_TYPE: u64 = 6;

/// Checks a header.
///
/// # Errors
/// What is wrong, in words that follow "is not usable".
pub(crate) fn check(header: &GgufHeader) -> Result<(), String> {
    vocabulary(header)?;
    // ggml asserts that the alignment is a power of two and not too small, but any file may set it.
    let alignment = header.number("general.alignment");
    if let Some(alignment) = alignment.filter(|it| !it.is_power_of_two() || *it < TENSOR_ALIGNMENT)
    {
        return Err(format!(
            "general.alignment is {alignment}, and must be a power of two from {TENSOR_ALIGNMENT} on"
        ));
    }
    let architecture = header.text("general.architecture").unwrap_or_default();
    let keys = Keys {
        header,
        architecture,
    };
    keys.layers()?;
    keys.heads()?;
    keys.experts()?;
    keys.architecture()?;
    keys.fractions()?;
    let scaling = format!("{architecture}.rope.scaling.type");
    match header.text(&scaling) {
        None | Some("none" | "linear" | "yarn" | "longrope") => Ok(()),
        Some(_) => Err(format!("{scaling} is not a known type")),
    }
}

/// Checks that the arrays that belong to the tokens have the same length, and the right type.
fn vocabulary(header: &GgufHeader) -> Result<(), String> {
    let kind = header.text("tokenizer.ggml.model").unwrap_or_default();
    if matches!(kind, "no_vocab" | "none") {
        return Err("it has no vocabulary".to_owned());
    }
    let tokens = match header.array("tokenizer.ggml.tokens") {
        Some(tokens) if tokens.length > 0 => tokens.length,
        _ => return Err("it has no tokens".to_owned()),
    };
    for (key, kinds) in [
        (
            "tokenizer.ggml.scores",
            &[Element::Float32, Element::Int32][..],
        ),
        ("tokenizer.ggml.token_type", &[Element::Int32]),
    ] {
        match header.array(key) {
            Some(list) if !kinds.contains(&list.of) => {
                return Err(format!("{key} has elements of a wrong type"));
            }
            Some(list) if list.length < tokens => {
                let length = list.length;
                return Err(format!("{key} has {length} elements for {tokens} tokens"));
            }
            _ => {}
        }
    }
    // WordPiece vocabularies have no byte tokens, and llama.cpp ends the process for a token with that type.
    let types = header.array("tokenizer.ggml.token_type");
    let largest = types.and_then(|types| types.range).map(|(_, most)| most);
    if kind == "bert" && largest >= Some(BYTE_TYPE) {
        return Err("its tokens are word pieces, but one is marked as a byte".to_owned());
    }
    // For ids out of range llama.cpp uses its defaults, and then BOS and EOG are wrong.
    for name in ["bos", "eos", "eot", "eom"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        // All bits set means that there is no such token.
        let outside = |&token: &u64| token >= tokens && token != u64::from(u32::MAX);
        if let Some(token) = header.number(&key).filter(outside) {
            return Err(format!("{key} is {token}, and there are {tokens} tokens"));
        }
    }
    Ok(())
}

/// Access to the keys of one architecture.
struct Keys<'a> {
    header: &'a GgufHeader,
    architecture: &'a str,
}

impl Keys<'_> {
    fn number(&self, key: &str) -> Option<u64> {
        self.header.number(&format!("{}.{key}", self.architecture))
    }

    /// Returns the minimum and maximum of a key that is one number or one for each layer.
    fn range(&self, key: &str) -> Option<(u64, u64)> {
        let name = format!("{}.{key}", self.architecture);
        let list = self.header.array(&name).and_then(|list| list.range);
        list.or_else(|| self.header.number(&name).map(|value| (value, value)))
    }

    /// Checks that a number is in a range, if it is present.
    fn within(&self, key: &str, least: u64, most: u64) -> Result<(), String> {
        match self.range(key) {
            Some((small, large)) if small < least || large > most => {
                let value = if small < least { small } else { large };
                let architecture = self.architecture;
                Err(format!(
                    "{architecture}.{key} is {value}, and must be from {least} to {most}"
                ))
            }
            _ => Ok(()),
        }
    }

    fn layers(&self) -> Result<(), String> {
        self.within("block_count", 1, LAYERS_MAX)?;
        self.within("embedding_length", 1, SIZE_MAX)?;
        self.within("context_length", 1, u64::from(u32::MAX))?;
        self.within("feed_forward_length", 0, SIZE_MAX)?;
        let layers = self.number("block_count").unwrap_or(LAYERS_MAX);
        self.within("nextn_predict_layers", 0, layers)
    }

    /// Checks what single architectures assert although their keys are optional.
    fn architecture(&self) -> Result<(), String> {
        match self.architecture {
            "smallthinker" if self.number("expert_count").unwrap_or(0) == 0 => {
                return Err("smallthinker.expert_count must not be 0".to_owned());
            }
            name @ ("jamba" | "granitehybrid") => {
                let width = self.number("embedding_length").unwrap_or(0);
                if self.number("ssm.inner_size") != width.checked_mul(2) {
                    return Err(format!(
                        "{name}.ssm.inner_size must be twice its embedding_length"
                    ));
                }
            }
            name if SECTIONED.contains(&name) => {
                let sections = self.range("rope.dimension_sections");
                if sections.is_none_or(|(_, largest)| largest == 0) {
                    return Err(format!("{name}.rope.dimension_sections has no section"));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks floats. A NaN or an infinity makes every logit a NaN. The epsilons prevent norms from dividing by zero:
    /// ggml asserts at the first token that they are not negative.
    fn fractions(&self) -> Result<(), String> {
        for (key, value) in self.header.fractions(&format!("{}.", self.architecture)) {
            if !value.is_finite() {
                return Err(format!("{key} is {value}"));
            }
            if key.ends_with("epsilon") && !(0.0..=1.0).contains(&value) {
                return Err(format!("{key} is {value}, and must be from 0 to 1"));
            }
        }
        Ok(())
    }

    fn heads(&self) -> Result<(), String> {
        // A layer without attention has no heads.
        self.within("attention.head_count", 0, SIZE_MAX)?;
        self.within("attention.head_count_kv", 0, SIZE_MAX)?;
        for key in ["attention.key_length", "attention.value_length"] {
            self.within(key, 1, SIZE_MAX)?;
        }
        self.within("rope.dimension_count", 0, SIZE_MAX)?;
        let heads = self.range("attention.head_count");
        let shared = self.range("attention.head_count_kv");
        // If both numbers are the same for all layers, they must fit: each key-value head serves the same number of
        // heads.
        if let (Some((heads, most)), Some((shared, most_shared))) = (heads, shared)
            && heads == most
            && shared == most_shared
            && (heads < shared || shared > 0 && !heads.is_multiple_of(shared))
        {
            return Err(format!(
                "its {heads} heads cannot share {shared} heads of keys and values"
            ));
        }
        if let (Some((_, heads)), Some(width)) = (heads, self.number("embedding_length"))
            && heads > width
            && self.number("attention.key_length").is_none()
        {
            return Err(format!(
                "its {heads} heads are more than its width of {width}"
            ));
        }
        Ok(())
    }

    fn experts(&self) -> Result<(), String> {
        self.within("expert_count", 0, EXPERTS_MAX)?;
        let experts = self.number("expert_count").unwrap_or(0);
        let (_, used) = self.range("expert_used_count").unwrap_or((0, 0));
        let groups = self.number("expert_group_count").unwrap_or(0);
        let used_groups = self.number("expert_group_used_count").unwrap_or(0);
        // Two architectures count a layer without experts as one expert.
        let alone = experts <= 1 && self.architecture.starts_with("hunyuan");
        let fits = if experts == 0 || alone {
            alone || used == 0 && groups == 0
        } else {
            let grouped = groups > 1
                && (!experts.is_multiple_of(groups) || used_groups == 0 || used_groups >= groups);
            used > 0 && used <= experts && groups < experts && !grouped
        };
        if fits {
            return Ok(());
        }
        Err(format!(
            "its numbers of experts do not fit: it uses {used} of {experts} experts in {used_groups} of {groups} groups"
        ))
    }
}

// Of headers that are written there.
#[cfg(test)]
#[cfg(feature = "embedded")]
mod tests {
    use super::*;
    use crate::embedded::random::{RandomModelShape, write};

    fn checked(change: impl FnOnce(&mut RandomModelShape)) -> Result<(), String> {
        let mut shape = RandomModelShape::tiny();
        change(&mut shape);
        let mut bytes = Vec::new();
        write(&mut bytes, &shape, 1).unwrap();
        check(&GgufHeader::read(&bytes[..]).unwrap())
    }

    #[test]
    fn headers_that_fail_assertions_of_llama_cpp_are_refused_with_the_key() {
        assert_eq!(checked(|_| {}), Ok(()));
        let cases: [(&str, u32, &str); 16] = [
            ("block_count", 0, "block_count is 0"),
            ("block_count", 513, "block_count is 513"),
            ("embedding_length", 0, "embedding_length is 0"),
            ("context_length", 0, "context_length is 0"),
            ("nextn_predict_layers", 3, "from 0 to 2"),
            ("attention.head_count_kv", 3, "4 heads cannot share 3"),
            ("attention.head_count_kv", 8, "4 heads cannot share 8"),
            ("attention.key_length", 0, "key_length is 0"),
            ("attention.head_count", u32::MAX, "head_count is"),
            ("expert_count", 1025, "expert_count is 1025"),
            ("expert_count", 4, "0 of 4 experts"),
            ("expert_used_count", 1, "1 of 0 experts"),
            ("expert_group_count", 2, "0 of 2 groups"),
            ("bos_token_id", 288, "bos_token_id is 288"),
            ("eos_token_id", u32::MAX - 1, "there are 288 tokens"),
            ("eot_token_id", 4096, "eot_token_id is 4096"),
        ];
        for (key, value, expected) in cases {
            let name = match key.strip_suffix("_token_id") {
                Some(_) => format!("tokenizer.ggml.{key}"),
                None => format!("llama.{key}"),
            };
            let error = checked(|shape| shape.numbers.push((name, value))).unwrap_err();
            assert!(error.contains(expected), "{key} = {value}: {error}");
        }
        for (alignment, refused) in [(1, true), (16, true), (32, false), (64, false)] {
            let number = ("general.alignment".to_owned(), alignment);
            let reported = checked(|shape| shape.numbers.push(number));
            assert_eq!(reported.is_err(), refused, "{alignment}: {reported:?}");
        }
        for (key, value) in [
            ("block_count", 512),
            ("attention.head_count_kv", 4),
            ("rope.dimension_count", 0),
        ] {
            let name = format!("llama.{key}");
            assert_eq!(checked(|shape| shape.numbers.push((name, value))), Ok(()));
        }
    }

    #[test]
    fn floats_that_are_not_finite_or_out_of_range_are_refused() {
        for (key, value, expected) in [
            ("attention.layer_norm_rms_epsilon", f32::NAN, "is NaN"),
            ("attention.layer_norm_rms_epsilon", -1.0, "is -1, and"),
            ("attention.layer_norm_epsilon", 2.0, "from 0 to 1"),
            ("attention.group_norm_epsilon", -0.5, "from 0 to 1"),
            ("rope.freq_base", f32::NAN, "is NaN"),
            ("rope.scaling.factor", f32::INFINITY, "is inf"),
        ] {
            let name = format!("llama.{key}");
            let error = checked(|shape| shape.fractions.push((name, value))).unwrap_err();
            assert!(error.contains(expected), "{key} = {value}: {error}");
        }
        let usual = ("llama.rope.freq_base".to_owned(), 10_000.0);
        assert_eq!(checked(|shape| shape.fractions.push(usual)), Ok(()));
    }

    #[test]
    fn assertions_of_single_architectures_are_checked() {
        let reported = |name, numbers: &[(&str, u32)]| {
            checked(|shape| {
                shape.architecture = name;
                let numbers = numbers.iter();
                let numbers = numbers.map(|(key, value)| (format!("{name}.{key}"), *value));
                shape.numbers.extend(numbers);
            })
        };
        for (name, expected) in [
            ("smallthinker", "expert_count must not be 0"),
            ("jamba", "inner_size must be twice"),
            ("granitehybrid", "inner_size must be twice"),
            ("paddleocr", "has no section"),
            ("qwen2vl", "has no section"),
        ] {
            let error = reported(name, &[]).unwrap_err();
            assert!(error.contains(expected), "{name}: {error}");
        }
        let width = RandomModelShape::tiny().width;
        let fits = reported("jamba", &[("ssm.inner_size", 2 * width)]);
        assert_eq!(fits, Ok(()));
        let fits = reported("qwen3vl", &[("rope.dimension_sections", 8)]);
        assert_eq!(fits, Ok(()));
        let experts = [("expert_count", 4), ("expert_used_count", 2)];
        assert_eq!(reported("smallthinker", &experts), Ok(()));
    }

    #[test]
    fn byte_tokens_in_a_wordpiece_vocabulary_are_refused() {
        let of = |kind, token_type| {
            checked(|shape| {
                shape.kind = kind;
                shape.control_type = token_type;
            })
        };
        let error = of("bert", 6).unwrap_err();
        assert!(error.contains("marked as a byte"), "{error}");
        assert_eq!(of("bert", 3), Ok(()));
        assert_eq!(of("llama", 6), Ok(()));
    }

    #[test]
    fn token_lists_shorter_than_the_vocabulary_are_refused() {
        let error = checked(|shape| shape.token_types = 287).unwrap_err();
        assert!(error.contains("287 elements for 288 tokens"), "{error}");
    }
}
