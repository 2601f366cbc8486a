//! The signature of text models: the union of what clients of two well-known backends send (TR-401).
//!
//! Owns: its tables. Refuses to know: what a field does (`settings`).

use super::datatype::Datatype::{self, Bool, Bytes, Fp32, Int32, Uint32, Uint64};
use super::signature::{Input, InputRole, Output, OutputRole, Signature};

/// Inputs whose name is their sampling field.
const FIELDS: [(&str, Datatype); 9] = [
    ("max_tokens", Int32),
    ("min_tokens", Int32),
    ("temperature", Fp32),
    ("top_p", Fp32),
    ("min_p", Fp32),
    ("top_k", Int32),
    ("repetition_penalty", Fp32),
    ("presence_penalty", Fp32),
    ("frequency_penalty", Fp32),
];

/// What there is no way to do here; refused where it is asked for.
const UNSUPPORTED: [(&str, Datatype); 7] = [
    ("return_context_logits", Bool),
    ("return_generation_logits", Bool),
    ("return_perf_metrics", Bool),
    ("guided_decoding_guide_type", Bytes),
    ("guided_decoding_guide", Bytes),
    ("lora_name", Bytes),
    ("lora_task_id", Uint64),
];

const WANTED: [(&str, &str); 6] = [
    ("return_finish_reason", "finish_reason"),
    ("return_cumulative_logprob", "cumulative_logprob"),
    ("return_logprobs", "logprobs"),
    ("return_num_input_tokens", "num_input_tokens"),
    ("return_num_output_tokens", "num_output_tokens"),
    ("return_log_probs", "cum_log_probs+output_log_probs"),
];

impl Signature {
    /// The signature of a text model that has none of its own.
    #[must_use]
    pub fn union() -> Self {
        let field = |name: &str| InputRole::Sampling(name.into());
        let mut inputs = vec![
            Input {
                optional: false,
                ..optional("text_input", Bytes, InputRole::Prompt)
            },
            optional("stream", Bool, InputRole::Stream),
            optional("exclude_input_in_output", Bool, InputRole::ExcludePrompt),
            optional("sampling_parameters", Bytes, InputRole::SamplingJson),
        ];
        inputs.extend(FIELDS.map(|(name, datatype)| optional(name, datatype, field(name))));
        inputs.extend([
            optional("min_length", Int32, field("min_length")),
            optional("random_seed", Uint64, field("random_seed")),
            optional("seed", Uint64, field("seed")),
            many(optional("stop_words", Bytes, field("stop"))),
            many(optional("bad_words", Bytes, field("bad_words"))),
            optional("end_id", Int32, field("end_id")),
            optional("pad_id", Int32, InputRole::Ignore),
            optional("beam_width", Int32, field("beam_width")),
            many(optional("image", Bytes, InputRole::Image)),
        ]);
        let unsupported = |(name, datatype)| optional(name, datatype, InputRole::Unsupported);
        inputs.extend(UNSUPPORTED.map(unsupported));
        inputs.extend(
            WANTED.map(|(name, output)| optional(name, Bool, InputRole::Want(output.into()))),
        );
        let json = |name, role| Input {
            accepts_json: true,
            ..optional(name, Bytes, role)
        };
        inputs.extend([
            json("messages", InputRole::Messages),
            json("json_schema", InputRole::Unsupported),
            json("tools", InputRole::Unsupported),
        ]);
        Self {
            inputs,
            outputs: outputs(),
            max_batch_size: 0,
            decoupled: true,
            lenient: true,
        }
    }
}

fn optional(name: &str, datatype: Datatype, role: InputRole) -> Input {
    Input {
        name: name.into(),
        datatype,
        shape: vec![1],
        optional: true,
        role,
        accepts_json: false,
    }
}

fn many(input: Input) -> Input {
    Input {
        shape: vec![-1],
        ..input
    }
}

fn outputs() -> Vec<Output> {
    [
        ("text_output", Bytes, &[-1][..], OutputRole::Text),
        ("finish_reason", Bytes, &[-1], OutputRole::FinishReason),
        (
            "cumulative_logprob",
            Fp32,
            &[-1],
            OutputRole::CumulativeLogprob,
        ),
        ("logprobs", Bytes, &[-1], OutputRole::Logprobs),
        ("num_input_tokens", Uint32, &[1], OutputRole::NumInputTokens),
        (
            "num_output_tokens",
            Uint32,
            &[-1],
            OutputRole::NumOutputTokens,
        ),
        ("cum_log_probs", Fp32, &[-1], OutputRole::CumulativeLogprob),
        (
            "output_log_probs",
            Fp32,
            &[-1, -1],
            OutputRole::TokenLogprobs,
        ),
    ]
    .into_iter()
    .map(|(name, datatype, shape, role)| Output {
        name: name.into(),
        datatype,
        shape: shape.to_vec(),
        role,
    })
    .collect()
}
