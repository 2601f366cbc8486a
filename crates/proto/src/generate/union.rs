//! The signature of text models: the union of the tensors that clients of two well-known backends send (TR-401).

use super::datatype::Datatype::{self, Bool, Bytes, Fp16, Fp32, Int32, Uint32, Uint64};
use super::request::Mapped;
use super::signature::{InputRole, InputTensor, OutputRole, OutputTensor, Signature};

/// Inputs with the name of their sampling field.
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

/// Inputs that are not supported; refused if they would have an effect.
const UNSUPPORTED: [(&str, Datatype); 7] = [
    ("return_context_logits", Bool),
    ("return_generation_logits", Bool),
    ("return_perf_metrics", Bool),
    ("guided_decoding_guide_type", Bytes),
    ("guided_decoding_guide", Bytes),
    ("lora_task_id", Uint64),
    ("decoder_text_input", Bytes),
];

/// The same, with more than one element.
const UNSUPPORTED_LISTS: [(&str, Datatype, &[i64]); 4] = [
    ("embedding_bias_words", Bytes, &[-1]),
    ("prompt_embedding_table", Fp16, &[-1, -1]),
    ("lora_weights", Fp16, &[-1, -1]),
    ("lora_config", Int32, &[-1, 3]),
];

/// Inputs without an effect here: they only matter with an unsupported one or with beam search, or only change how fast
/// the response arrives.
const IGNORED: [(&str, Datatype, &[i64]); 7] = [
    ("pad_id", Int32, &[1]),
    ("length_penalty", Fp32, &[1]),
    ("embedding_bias_weights", Fp32, &[-1]),
    ("prompt_vocab_size", Int32, &[1]),
    ("prompt_table_extra_id", Uint64, &[1]),
    ("num_draft_tokens", Int32, &[1]),
    ("use_draft_logits", Bool, &[1]),
];

/// Inputs of the TensorRT-LLM ensemble that vLLM's backend does not have: they identify a client of the ensemble.
const OF_TENSORRT_LLM: [&str; 14] = [
    "beam_width",
    "num_return_sequences",
    "stop_words",
    "end_id",
    "pad_id",
    "random_seed",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
    "prompt_vocab_size",
    "embedding_bias_words",
    "num_draft_tokens",
    "use_draft_logits",
];

/// Outputs of the TensorRT-LLM ensemble that are not supported.
const UNSUPPORTED_OUTPUTS: [&str; 12] = [
    "context_logits",
    "generation_logits",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
];

/// Maximum number of prompts in one request of a TensorRT-LLM ensemble, unless configured otherwise.
const BATCH_SIZE_MAX: u32 = 16;

const WANTED: [(&str, &str); 6] = [
    ("return_finish_reason", "finish_reason"),
    ("return_cumulative_logprob", "cumulative_logprob"),
    ("return_logprobs", "logprobs"),
    ("return_num_input_tokens", "num_input_tokens"),
    ("return_num_output_tokens", "num_output_tokens"),
    ("return_log_probs", "cum_log_probs+output_log_probs"),
];

impl Signature {
    /// The signature of a text model without one of its own.
    #[must_use]
    pub fn union() -> Self {
        let field = |name: &str| InputRole::Sampling(name.into());
        let mut inputs = vec![
            InputTensor {
                optional: false,
                ..optional("text_input", Bytes, InputRole::Prompt)
            },
            optional("stream", Bool, InputRole::Stream),
            optional("exclude_input_in_output", Bool, InputRole::ExcludePrompt),
            InputTensor {
                accepts_json: true,
                ..optional("sampling_parameters", Bytes, InputRole::SamplingJson)
            },
        ];
        inputs.extend(FIELDS.map(|(name, datatype)| optional(name, datatype, field(name))));
        inputs.extend([
            optional("min_length", Int32, field("min_length")),
            optional("random_seed", Uint64, field("random_seed")),
            optional("seed", Uint64, field("seed")),
            // Named by the ensemble; the role is the sampling field that all clients' names lead to.
            many(optional("stop_words", Bytes, field("stop"))),
            many(optional("bad_words", Bytes, field("bad_words"))),
            // Declared because a parameter cannot be a list.
            many(optional(
                "dry_sequence_breakers",
                Bytes,
                field("dry_sequence_breakers"),
            )),
            many(optional("samplers", Bytes, field("samplers"))),
            optional("end_id", Int32, field("end_id")),
            optional("beam_width", Int32, field("beam_width")),
            optional("num_return_sequences", Int32, field("num_return_sequences")),
            // The name of an adapter, as vLLM's backend takes it.
            optional("lora_name", Bytes, field("lora_name")),
            // The field of OpenAI's completions, which is long for a parameter.
            optional("suffix", Bytes, field("suffix")),
            many(optional("image", Bytes, InputRole::Image)),
        ]);
        let unsupported = |(name, datatype)| optional(name, datatype, InputRole::Unsupported);
        inputs.extend(UNSUPPORTED.map(unsupported));
        let shaped = |(name, datatype, shape): (&str, Datatype, &[i64]), role| InputTensor {
            shape: shape.to_vec(),
            ..optional(name, datatype, role)
        };
        inputs.extend(UNSUPPORTED_LISTS.map(|it| shaped(it, InputRole::Unsupported)));
        inputs.extend(IGNORED.map(|it| shaped(it, InputRole::Ignore)));
        inputs.extend(
            WANTED.map(|(name, output)| optional(name, Bool, InputRole::Want(output.into()))),
        );
        let json = |name, role| InputTensor {
            accepts_json: true,
            ..optional(name, Bytes, role)
        };
        inputs.extend([
            json("messages", InputRole::Messages),
            // Declared and not only parameters, which cannot be objects (TR-1305).
            json("json_schema", field("json_schema")),
            json("controller_arg", field("controller_arg")),
            // A name, or a list of objects.
            json("lora", field("lora")),
            json("tools", InputRole::Tools),
            json("template_args", InputRole::TemplateArgs),
        ]);
        Self {
            inputs,
            outputs: outputs(),
            max_batch_size: 0,
            decoupled: true,
            lenient: true,
            tensorrt_llm: false,
        }
    }

    /// The signature of a text model for clients of a TensorRT-LLM ensemble (D-55).
    #[must_use]
    pub fn tensorrt_llm() -> Self {
        let mut signature = Self {
            max_batch_size: BATCH_SIZE_MAX,
            tensorrt_llm: true,
            ..Self::union()
        };
        // The leading dimension is the batch here.
        let indices = signature.outputs.iter_mut();
        for index in indices.filter(|output| output.role.is_index()) {
            index.shape = vec![1];
        }
        signature
    }

    /// Whether a request is from a client of a TensorRT-LLM ensemble: the model is configured for those, or the request
    /// has inputs that only they send.
    #[must_use]
    pub(super) fn is_for_tensorrt_llm(&self, mapped: &Mapped) -> bool {
        let mut given = mapped.tensors.iter();
        let shows = |location: usize| {
            let input = self.inputs.get(location);
            input.is_some_and(|input| OF_TENSORRT_LLM.contains(&&*input.name))
        };
        self.tensorrt_llm || self.lenient && given.any(|(location, _)| shows(*location))
    }

    /// Whether this is a known output that no text model here supports.
    pub(super) fn lacks_output(&self, name: &str) -> bool {
        self.lenient && UNSUPPORTED_OUTPUTS.contains(&name)
    }
}

fn optional(name: &str, datatype: Datatype, role: InputRole) -> InputTensor {
    InputTensor {
        name: name.into(),
        datatype,
        shape: vec![1],
        optional: true,
        role,
        accepts_json: false,
    }
}

fn many(input: InputTensor) -> InputTensor {
    InputTensor {
        shape: vec![-1],
        ..input
    }
}

fn outputs() -> Vec<OutputTensor> {
    [
        // The first output has to be the text: litellm joins the data of `outputs[0]` of `infer`.
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
        // The ensemble's names for values that vLLM's backend sends under others.
        ("cum_log_probs", Fp32, &[-1], OutputRole::CumulativeLogprob),
        (
            "output_log_probs",
            Fp32,
            &[-1, -1],
            OutputRole::TokenLogprobs,
        ),
        // The ensemble's client reads them as a matrix.
        ("batch_index", Int32, &[1, 1], OutputRole::BatchIndex),
        ("sequence_index", Int32, &[1, 1], OutputRole::SequenceIndex),
        // Of neither, and only in the answers that have some.
        ("reasoning", Bytes, &[-1], OutputRole::Reasoning),
        ("tool_calls", Bytes, &[-1], OutputRole::ToolCalls),
    ]
    .into_iter()
    .map(|(name, datatype, shape, role)| OutputTensor {
        name: name.into(),
        datatype,
        shape: shape.to_vec(),
        role,
    })
    .collect()
}
