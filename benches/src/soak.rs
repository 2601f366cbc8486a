//! The soak of an engine with a real model: seeded clients, and the answers of a second server that each request has for
//! itself, with which theirs are compared.

pub mod answer;
pub mod client;
pub mod question;
pub mod reference;
pub mod verdict;
