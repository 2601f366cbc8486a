//! Embeddings and reranking: texts go in, one row of numbers comes out for each.
//!
//! An [`Embedder`] is to a model that embeds what [`crate::Engine`] is to one that generates: a handle that tokenises on
//! the caller's thread and queues, and an owner thread that computes batches. Nothing is kept between two batches, so there
//! are no slots, no prefix cache and no sampling here.
//!
//! ```text
//!   Embedder::embed ── tokenise (caller's thread) ── inbox (bounded) ──► owner thread ── one row per text ──► EmbeddingHandle
//!   Embedder::rerank ─┘                                │  TextQueue: which texts are in the next batch (pure)
//!                                                      └─► EmbeddingModel::encode
//! ```
//!
//! | term | meaning |
//! |---|---|
//! | pooling | how the rows of a text's tokens become one: their mean, the first, the last, or a classification head |
//! | rerank | give a score to each pair of a query and a document |
//! | dimensions | the numbers of a row; with Matryoshka models the first ones are an embedding too |

mod embedder;
mod model;
mod owner;
mod queue;
mod request;
mod scripted;
#[cfg(test)]
mod tests;
mod vectors;

pub use embedder::{Embedder, EmbeddingHandle};
pub use model::{EmbeddingInfo, EmbeddingModel, EncodeStop, Pooling, TextLayout};
pub use owner::EmbeddingOwner;
pub use request::{
    EmbeddingInput, EmbeddingRequest, NUMBERS_MAX, RerankRequest, TEXT_BYTES_MAX, TEXTS_MAX,
};
pub use scripted::{ScriptedEmbedding, ScriptedEmbeddingConfig};
pub use vectors::Vectors;
