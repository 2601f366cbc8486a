//! Write controllers in Rust that steer decoding token by token.
