//! Shared by the benches of steering: baselines, controllers, steerers that are stepped as an engine steps them, and a
//! runtime in another process.

pub mod bare;
pub mod controllers;
pub mod documents;
pub mod gate;
pub mod player;
pub mod runtime;
pub mod table;
pub mod tokens;
pub mod vocabulary;
