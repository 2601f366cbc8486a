//! Triton's generate extension as pure values: bodies are parsed into tensors and parameters, responses are encoded as
//! JSON and events.
//!
//! ```text
//!   body ──read──► members ──map──► tensors, parameters ──settle──► Settings ──► (work) ──► Response ──► JSON | event
//! ```

mod answer;
mod batch;
mod datatype;
mod decoded_size;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod infer;
mod json;
mod limits;
mod message;
mod raw;
mod refused;
mod request;
mod settings;
mod signature;
mod tensor;
mod union;

pub use answer::{AnswerHead, ResponsePayload, error_body, error_event};
pub use datatype::Datatype;
pub use decoded_size::{decoded_answer_bytes, decoded_bytes, decoded_part_bytes};
pub use infer::Infer;
pub use limits::RequestLimits;
pub use refused::{Encoding, InvalidRequest};
pub use request::{Mapped, Mapper, RequestParameter};
pub use settings::Settings;
pub use signature::{
    InputRole, InputTensor, InvalidSignature, OutputRole, OutputTensor, Signature,
};
pub use tensor::{Strings, Tensor, TensorData, fit};

#[cfg(test)]
mod tests;
