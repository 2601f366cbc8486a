//! The signature of a model: named, typed, shaped tensors and their roles (TR-101 to TR-105).

use super::datatype::Datatype;
use super::request::Mapped;
use super::tensor::Tensor;

/// The inputs and outputs of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The inputs, in order.
    pub inputs: Vec<InputTensor>,
    /// The outputs, in the order of responses.
    pub outputs: Vec<OutputTensor>,
    /// Above 0, shapes have a leading batch dimension.
    pub max_batch_size: u32,
    /// Whether it may send any number of responses.
    pub decoupled: bool,
    /// Whether numbers and booleans are accepted as strings too (TR-312): in the union signature only.
    pub lenient: bool,
    /// Whether it behaves as a TensorRT-LLM ensemble (D-55): each response is of one sequence and carries its index,
    /// and the prompt may be requested in a stream, but is never sent there.
    pub tensorrt_llm: bool,
}

/// One input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: Datatype,
    /// Its dimensions, -1 where any size fits.
    pub shape: Vec<i64>,
    /// Whether a request may omit it.
    pub optional: bool,
    /// Its role.
    pub role: InputRole,
    /// Whether it accepts any JSON value, as its text (TR-1306).
    pub accepts_json: bool,
}

/// One output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: Datatype,
    /// Its dimensions, -1 where any size fits.
    pub shape: Vec<i64>,
    /// Its role.
    pub role: OutputRole,
}

/// The role of an input (TR-104).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputRole {
    /// The prompt.
    Prompt,
    /// A conversation, as JSON.
    Messages,
    /// The tools that the model may call in a conversation, as JSON.
    Tools,
    /// Variables of the chat template, as JSON.
    TemplateArgs,
    /// One response per flush.
    Stream,
    /// Whether the prompt is excluded from the output.
    ExcludePrompt,
    /// An object of sampling fields.
    SamplingJson,
    /// One sampling field.
    Sampling(String),
    /// Requests the output of this name, or several names separated by `+`.
    Want(String),
    /// Images.
    Image,
    /// Texts to embed.
    Texts,
    /// The query of documents that are scored.
    Query,
    /// Documents to score.
    Documents,
    /// The input of a function.
    Port(String),
    /// A control of a scripted model.
    Control(String),
    /// Accepted, validated and ignored; also an input without a role.
    Ignore,
    /// Known, and refused if it would have an effect.
    Unsupported,
}

/// The role of an output (TR-104).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputRole {
    /// The generated text.
    Text,
    /// What the model thought before it answered; not sent where there is none.
    Reasoning,
    /// The tools that the model calls, as JSON strings; not sent where there is none.
    ToolCalls,
    /// The finish reason of a choice.
    FinishReason,
    /// The sum of the log-probabilities so far.
    CumulativeLogprob,
    /// Log-probabilities of the tokens of a response, as JSON strings.
    Logprobs,
    /// The same as numbers.
    TokenLogprobs,
    /// Number of prompt tokens.
    NumInputTokens,
    /// Number of tokens of a response.
    NumOutputTokens,
    /// The row of a batch that a response belongs to.
    BatchIndex,
    /// The choice that a response belongs to.
    SequenceIndex,
    /// An embedding.
    Embedding,
    /// The score of a document.
    Score,
    /// The output of a function.
    Port(String),
    /// Never sent: an output without a role.
    Nothing,
}

/// Why a signature is invalid (TR-105).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSignature {
    /// Two inputs, or two outputs, have the same name.
    #[error("tensor `{0}` is declared twice")]
    Twice(String),
    /// A name that requests or responses reserve.
    #[error("tensor `{0}` has a name that is reserved")]
    Reserved(String),
    /// There is no input to generate from.
    #[error("no input has the role prompt, messages or port.NAME")]
    NoPrompt,
    /// A dimension below -1, or an empty name.
    #[error("tensor `{0}` needs a name, and dimensions of -1, 0 or more")]
    Malformed(String),
}

impl InputRole {
    /// The role with this name; `None` if there is none.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "prompt" => Self::Prompt,
            "messages" => Self::Messages,
            "tools" => Self::Tools,
            "template_args" => Self::TemplateArgs,
            "stream" => Self::Stream,
            "exclude_prompt" => Self::ExcludePrompt,
            "sampling_json" => Self::SamplingJson,
            "image" => Self::Image,
            "texts" => Self::Texts,
            "query" => Self::Query,
            "documents" => Self::Documents,
            "ignore" => Self::Ignore,
            _ => match name.split_once('.')? {
                ("sampling", field) => Self::Sampling(field.into()),
                ("want", output) => Self::Want(output.into()),
                ("port", port) => Self::Port(port.into()),
                ("control", control) => Self::Control(control.into()),
                _ => return None,
            },
        })
    }
}

impl OutputRole {
    /// Whether it carries the index of a sequence.
    pub(super) const fn is_index(&self) -> bool {
        matches!(self, Self::BatchIndex | Self::SequenceIndex)
    }

    /// The role with this name; `None` if there is none.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "text" => Self::Text,
            "reasoning" => Self::Reasoning,
            "tool_calls" => Self::ToolCalls,
            "finish_reason" => Self::FinishReason,
            "cumulative_logprob" => Self::CumulativeLogprob,
            "logprobs" => Self::Logprobs,
            "num_input_tokens" => Self::NumInputTokens,
            "num_output_tokens" => Self::NumOutputTokens,
            "batch_index" => Self::BatchIndex,
            "sequence_index" => Self::SequenceIndex,
            "embedding" => Self::Embedding,
            "score" => Self::Score,
            _ => Self::Port(name.strip_prefix("port.")?.into()),
        })
    }
}

impl Signature {
    /// The signature of a model that embeds (TR-103): rows of `dimensions` numbers.
    #[must_use]
    pub fn embedding(dimensions: u32) -> Self {
        let texts = |name: &str| list(name, InputRole::Texts, true);
        Self::of_rows(
            // Clients of either name find it. The mapper knows no aliases, and so both are inputs of their own.
            vec![texts("text_input"), texts("input_text")],
            OutputTensor {
                name: "embedding".into(),
                datatype: Datatype::Fp32,
                shape: vec![-1, dimensions.into()],
                role: OutputRole::Embedding,
            },
        )
    }

    /// The signature of a model that scores documents.
    #[must_use]
    pub fn rerank() -> Self {
        let mut query = list("query", InputRole::Query, false);
        query.shape = vec![1];
        Self::of_rows(
            vec![query, list("documents", InputRole::Documents, false)],
            OutputTensor {
                name: "score".into(),
                datatype: Datatype::Fp32,
                shape: vec![-1],
                role: OutputRole::Score,
            },
        )
    }

    fn of_rows(inputs: Vec<InputTensor>, output: OutputTensor) -> Self {
        Self {
            inputs,
            outputs: vec![output],
            max_batch_size: 0,
            decoupled: false,
            lenient: false,
            tensorrt_llm: false,
        }
    }

    /// Checks TR-105.
    ///
    /// # Errors
    /// [`InvalidSignature`], with the name of the tensor.
    pub fn check(&self) -> Result<(), InvalidSignature> {
        let inputs: Vec<_> = self
            .inputs
            .iter()
            .map(|input| (&*input.name, &input.shape))
            .collect();
        let outputs: Vec<_> = self
            .outputs
            .iter()
            .map(|output| (&*output.name, &output.shape))
            .collect();
        side(&inputs, &["id"])?;
        // Outputs become members of the response in addition to these (TR-502).
        side(&outputs, &["id", "model_name", "model_version"])?;
        let works = |input: &InputTensor| {
            matches!(
                input.role,
                InputRole::Prompt
                    | InputRole::Messages
                    | InputRole::Texts
                    | InputRole::Documents
                    | InputRole::Port(_)
            )
        };
        if self.inputs.iter().any(works) {
            Ok(())
        } else {
            Err(InvalidSignature::NoPrompt)
        }
    }

    /// The index of an input.
    #[must_use]
    pub fn input(&self, name: &str) -> Option<usize> {
        self.inputs.iter().position(|input| input.name == name)
    }

    /// The index of an output.
    #[must_use]
    pub fn output(&self, name: &str) -> Option<usize> {
        self.outputs.iter().position(|output| output.name == name)
    }

    /// The outputs that a request gets: those that need no request by an input, and those that it requests.
    #[must_use]
    pub fn wanted(&self, mapped: &Mapped) -> Vec<bool> {
        // A list of names is complete: `return_*` inputs only matter without one.
        if let Some(asked) = &mapped.outputs {
            return (0..self.outputs.len())
                .map(|location| asked.contains(&location))
                .collect();
        }
        let asks = |output: &OutputTensor| {
            // Clients of vLLM's backend never receive the index outputs.
            if output.role.is_index() {
                return self.tensorrt_llm;
            }
            let asking = self
                .inputs
                .iter()
                .enumerate()
                .filter(|(_, input)| match &input.role {
                    InputRole::Want(names) => names.split('+').any(|name| name == output.name),
                    _ => false,
                });
            let flags: Vec<_> = asking
                .map(|(location, _)| mapped.tensor(location).and_then(Tensor::flag) == Some(true))
                .collect();
            // An output that no input can request is always sent.
            flags.is_empty() || flags.contains(&true)
        };
        self.outputs.iter().map(asks).collect()
    }

    /// The index of the output with this role.
    #[must_use]
    pub fn output_of(&self, role: &OutputRole) -> Option<usize> {
        self.outputs.iter().position(|output| output.role == *role)
    }

    /// Whether each response belongs to one sequence: the request gets an output with its index (D-55).
    #[must_use]
    pub fn is_separate(&self, mapped: &Mapped) -> bool {
        let outputs = self.outputs.iter().zip(self.wanted(mapped));
        outputs
            .into_iter()
            .any(|(output, wanted)| wanted && output.role.is_index())
    }

    /// The shape shown in metadata: with a leading -1 if the model accepts batches (TR-102).
    #[must_use]
    pub fn shown(&self, shape: &[i64]) -> Vec<i64> {
        let batch = (self.max_batch_size > 0).then_some(-1);
        batch.into_iter().chain(shape.iter().copied()).collect()
    }
}

fn list(name: &str, role: InputRole, optional: bool) -> InputTensor {
    InputTensor {
        name: name.into(),
        datatype: Datatype::Bytes,
        shape: vec![-1],
        optional,
        role,
        accepts_json: false,
    }
}

fn side(tensors: &[(&str, &Vec<i64>)], reserved: &[&str]) -> Result<(), InvalidSignature> {
    for (index, (name, shape)) in tensors.iter().enumerate() {
        if name.is_empty() || shape.iter().any(|size| *size < -1) {
            return Err(InvalidSignature::Malformed((*name).into()));
        }
        if reserved.contains(name) {
            return Err(InvalidSignature::Reserved((*name).into()));
        }
        // Quadratic, but over the few dozen tensors of a configured model.
        if tensors[..index].iter().any(|(earlier, _)| earlier == name) {
            return Err(InvalidSignature::Twice((*name).into()));
        }
    }
    Ok(())
}
