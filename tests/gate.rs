//! The gate of the whole program: every route of the router, with every method, by everybody (D-45).
//!
//! Owns: the matrix, walked over HTTP/1, HTTP/2 and WebSockets on each port, and what follows for whoever comes another way.
//! Refuses to know: what handlers answer.

mod client;
mod matrix;
mod table;
