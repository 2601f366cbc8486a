//! Authentication of the whole program: every route of the router, with every method, by every kind of caller (D-45).

mod client;
mod matrix;
mod table;
