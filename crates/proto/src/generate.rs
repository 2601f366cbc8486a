//! Triton's generate extension, as pure values: bodies become tensors and parameters, responses become JSON and events.
//!
//! Owns: signatures, the mapping from JSON members to tensors with every text of a refusal, what tensors and parameters
//! set, and how answers are spelled. Refuses to know: HTTP, models, kernels, clocks.
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
mod schema;
mod settings;
mod signature;
mod tensor;
mod union;
mod wire;

pub use answer::{Head, Response, error_body, error_event};
pub use datatype::Datatype;
pub use decoded_size::{decoded_answer_bytes, decoded_bytes, decoded_part_bytes};
pub use infer::Infer;
pub use limits::Limits;
pub use refused::{Encoding, Refused};
pub use request::{Mapped, Mapper, Parameter};
pub use settings::Settings;
pub use signature::{Input, InputRole, Invalid, Output, OutputRole, Signature};
pub use tensor::{Data, Strings, Tensor, fit};
pub use wire::request_bytes;

#[cfg(test)]
mod tests;
