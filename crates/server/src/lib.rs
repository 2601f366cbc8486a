//! Sapwood's server: the faces, and what every face needs around it.
//!
//! Owns: listeners, faces, keys, admission, health, metrics, drain. Refuses to know: how a model computes, and no
//! face knows another.
