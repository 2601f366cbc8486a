//! The gate of the whole program: every route of the router, with every method, by everybody (D-45).

mod client;
mod matrix;
mod table;
