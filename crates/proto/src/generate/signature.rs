//! The signature of a model: named, typed, shaped tensors and their roles (TR-101 to TR-105).

use super::datatype::Datatype;
use super::request::Mapped;
use super::tensor::Tensor;

/// The tensors of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// What it takes, in order.
    pub inputs: Vec<InputTensor>,
    /// What it gives, in the order of answers.
    pub outputs: Vec<OutputTensor>,
    /// Above 0, shapes have a leading dimension for a batch.
    pub max_batch_size: u32,
    /// It may give any number of responses.
    pub decoupled: bool,
    /// Numbers and flags are taken as strings too (TR-312): the union signature alone.
    pub lenient: bool,
    /// It behaves as a TensorRT-LLM ensemble (D-55): each response is of one sequence and says of which, and the prompt
    /// may be asked for in a stream, which never has it.
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
    /// A request may leave it out.
    pub optional: bool,
    /// What it is for.
    pub role: InputRole,
    /// It takes any JSON value, as its text (TR-1306).
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
    /// What it is.
    pub role: OutputRole,
}

/// What an input is for (TR-104).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputRole {
    /// The prompt.
    Prompt,
    /// A conversation, as JSON.
    Messages,
    /// One response per flush.
    Stream,
    /// Whether the prompt stands before the output.
    ExcludePrompt,
    /// An object of sampling fields.
    SamplingJson,
    /// One sampling field.
    Sampling(String),
    /// Asks for the output of this name, or of these names with `+` between them.
    Want(String),
    /// Images.
    Image,
    /// The input of a function.
    Port(String),
    /// A control of a scripted model.
    Control(String),
    /// Accepted, checked, ignored; also what has no role.
    Ignore,
    /// Known, and refused where it would do something.
    Unsupported,
}

/// What an output is (TR-104).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutputRole {
    /// The generated text.
    Text,
    /// Why a choice ended.
    FinishReason,
    /// The sum of the log-probabilities so far.
    CumulativeLogprob,
    /// Log-probabilities of the tokens of a response, as JSON texts.
    Logprobs,
    /// The same as numbers.
    TokenLogprobs,
    /// Tokens of the prompt.
    NumInputTokens,
    /// Tokens of a response.
    NumOutputTokens,
    /// Which row of a batch a response is of.
    BatchIndex,
    /// Which of several choices a response is of.
    SequenceIndex,
    /// An embedding.
    Embedding,
    /// The output of a function.
    Port(String),
    /// Never given: an output without a role.
    Nothing,
}

/// Why a signature is not legal (TR-105).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSignature {
    /// Two tensors of one side bear the same name.
    #[error("tensor `{0}` is declared twice")]
    Twice(String),
    /// A name that answers or requests need for themselves.
    #[error("tensor `{0}` has a name that is reserved")]
    Reserved(String),
    /// Nothing to work from.
    #[error("no input has the role prompt, messages or port.NAME")]
    NoPrompt,
    /// A dimension below -1, or a name that is empty.
    #[error("tensor `{0}` needs a name, and dimensions of -1, 0 or more")]
    Malformed(String),
}

impl InputRole {
    /// The role of this name; `None` if there is none.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "prompt" => Self::Prompt,
            "messages" => Self::Messages,
            "stream" => Self::Stream,
            "exclude_prompt" => Self::ExcludePrompt,
            "sampling_json" => Self::SamplingJson,
            "image" => Self::Image,
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
    /// Whether it says of which sequence a response is.
    pub(super) const fn is_index(&self) -> bool {
        matches!(self, Self::BatchIndex | Self::SequenceIndex)
    }

    /// The role of this name; `None` if there is none.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "text" => Self::Text,
            "finish_reason" => Self::FinishReason,
            "cumulative_logprob" => Self::CumulativeLogprob,
            "logprobs" => Self::Logprobs,
            "num_input_tokens" => Self::NumInputTokens,
            "num_output_tokens" => Self::NumOutputTokens,
            "batch_index" => Self::BatchIndex,
            "sequence_index" => Self::SequenceIndex,
            "embedding" => Self::Embedding,
            _ => Self::Port(name.strip_prefix("port.")?.into()),
        })
    }
}

impl Signature {
    /// Checks TR-105.
    ///
    /// # Errors
    /// [`InvalidSignature`], naming the tensor.
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
        side(&outputs, &["id", "model_name", "model_version"])?;
        let works = |input: &InputTensor| {
            matches!(
                input.role,
                InputRole::Prompt | InputRole::Messages | InputRole::Port(_)
            )
        };
        if self.inputs.iter().any(works) {
            Ok(())
        } else {
            Err(InvalidSignature::NoPrompt)
        }
    }

    /// The place of an input.
    #[must_use]
    pub fn input(&self, name: &str) -> Option<usize> {
        self.inputs.iter().position(|input| input.name == name)
    }

    /// The place of an output.
    #[must_use]
    pub fn output(&self, name: &str) -> Option<usize> {
        self.outputs.iter().position(|output| output.name == name)
    }

    /// Which outputs a request gets: those that no input asks for, and those that it asks for.
    #[must_use]
    pub fn wanted(&self, mapped: &Mapped) -> Vec<bool> {
        if let Some(asked) = &mapped.outputs {
            return (0..self.outputs.len())
                .map(|location| asked.contains(&location))
                .collect();
        }
        let asks = |output: &OutputTensor| {
            // What vLLM's clients never see.
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
            flags.is_empty() || flags.contains(&true)
        };
        self.outputs.iter().map(asks).collect()
    }

    /// The place of the output with this role.
    #[must_use]
    pub fn output_of(&self, role: &OutputRole) -> Option<usize> {
        self.outputs.iter().position(|output| output.role == *role)
    }

    /// Whether each response is of one sequence: the request gets an output that says of which (D-55).
    #[must_use]
    pub fn is_separate(&self, mapped: &Mapped) -> bool {
        let outputs = self.outputs.iter().zip(self.wanted(mapped));
        outputs
            .into_iter()
            .any(|(output, wanted)| wanted && output.role.is_index())
    }

    /// The shape that metadata shows: with a leading -1 where there are batches (TR-102).
    #[must_use]
    pub fn shown(&self, shape: &[i64]) -> Vec<i64> {
        let batch = (self.max_batch_size > 0).then_some(-1);
        batch.into_iter().chain(shape.iter().copied()).collect()
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
        if tensors[..index].iter().any(|(earlier, _)| earlier == name) {
            return Err(InvalidSignature::Twice((*name).into()));
        }
    }
    Ok(())
}
