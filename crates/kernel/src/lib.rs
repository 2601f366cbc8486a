//! Sapwood's kernel: named functions whose inputs and outputs are streams of chunks.
//!
//! Owns: Chunk, Node, Function, Layer, Kernel, Run, the model function, sessions executed against functions.
//! Refuses to know: faces, sockets, wire formats, how a model computes.
