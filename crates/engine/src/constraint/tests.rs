//! Tests of native constraints, on a small vocabulary and with samplers that choose at random.

mod arguments;
mod combinations;
mod driver;
mod endings;
mod followed;
mod freeing;
mod kinds;
mod limits;
mod properties;
mod splits;
mod vocabulary;
mod watched;
