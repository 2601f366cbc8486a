//! Fuzz entry points: arbitrary bytes as the output of a model. Built for tests and fuzzing only.

/// Parses an output for each family of models, in one piece and in many.
///
/// # Panics
/// If an invariant does not hold.
pub fn model_output(bytes: &[u8]) {
    crate::model::output_parser::fuzz::output(bytes);
}
