//! The kernel's limits: each a name, a default and a test at the limit and one past it.

use sapwood_proto::bounded_json::JsonBounds;

/// Bytes a node retains (KE-124).
pub const NODE_BYTES_MAX: usize = 64 << 20;
/// Bytes of one chunk's data.
pub const CHUNK_BYTES_MAX: usize = 8 << 20;
/// Bytes of a function's, input's or port's name.
pub const NAME_BYTES: usize = 64;
/// Bytes of a model's name (KE-132).
pub const MODEL_NAME_BYTES: usize = 256;
/// Ports of one function.
pub const PORTS: usize = 64;
/// Inputs of one function.
pub const INPUTS: usize = 64;
/// Choices that a caller may request.
pub const CHOICES_MAX: u32 = 16;
/// Choices a function may ever produce, controller forks included; bounds the state of a run.
pub const CHOICES_SEEN_MAX: u32 = 1024;
/// Calls within calls (KE-138).
pub const CALL_DEPTH: u32 = 16;
/// Bytes of one JSON value (KE-203).
pub const JSON_VALUE_BYTES: usize = 16 << 20;
/// Values within one JSON input of a model: messages, tools or configuration. Each takes some 70 bytes.
pub const JSON_VALUES: usize = 1 << 18;
/// Elements or members of one JSON input of a model: messages, tools or fields.
pub const JSON_ENTRIES: usize = 1 << 16;
/// Both, for what a client sends.
pub(crate) const JSON_BOUNDS: JsonBounds = JsonBounds {
    values: JSON_VALUES,
    entries: JSON_ENTRIES,
};
/// Nesting of one JSON value (KE-203).
pub const JSON_DEPTH: usize = 128;
/// Bytes of a prompt.
pub const PROMPT_BYTES: usize = 16 << 20;
/// Bytes of one tool call in the output of a model; a longer one is text.
pub const TOOL_CALL_BYTES: usize = 1 << 20;
/// Tool calls of one choice; what follows is text.
pub const TOOL_CALLS_MAX: usize = 128;
/// Bytes of the name of a tool in the output of a model.
pub const TOOL_NAME_BYTES: usize = 256;
/// Functions of one kernel.
pub const FUNCTIONS_MAX: usize = 10_000;
