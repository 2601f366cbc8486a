//! The controller's argument.

use alloc::string::String;
use core::fmt;

use crate::json::Json;

/// A value that can be read from a controller's argument.
pub trait Argument: Sized {
    /// Reads it from the argument's text.
    ///
    /// # Errors
    /// The text is no such value.
    fn from_text(text: String) -> Result<Self, ArgumentError>;
}

/// The controller's argument is not what the controller expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArgumentError(String);

impl ArgumentError {
    /// An error with a message for whoever sent the request.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for ArgumentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid controller argument: {}", self.0)
    }
}

impl core::error::Error for ArgumentError {}

/// The controller's argument: a `String` as it was sent, a number, a truth value, or [`Json`].
///
/// # Panics
/// The argument is no such value. Called from `Default::default()` or [`Controller::init`](crate::Controller::init), that
/// fails the request before its first token, with the reason.
#[must_use]
pub fn arg<T: Argument>() -> T {
    match try_arg() {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// The same as [`arg`], for controllers that go on without it.
///
/// # Errors
/// The argument is no such value.
pub fn try_arg<T: Argument>() -> Result<T, ArgumentError> {
    let bytes = crate::host::argument();
    let text = String::from_utf8(bytes).map_err(|_| ArgumentError::new("it is not UTF-8"))?;
    T::from_text(text)
}

impl Argument for String {
    fn from_text(text: String) -> Result<Self, ArgumentError> {
        Ok(text)
    }
}

impl Argument for Json {
    fn from_text(text: String) -> Result<Self, ArgumentError> {
        Self::parse(&text).map_err(|error| ArgumentError::new(alloc::format!("{error}")))
    }
}

macro_rules! parsed {
    ($($kind:ty: $what:literal),*) => {$(
        impl Argument for $kind {
            fn from_text(text: String) -> Result<Self, ArgumentError> {
                text.trim().parse().map_err(|_| ArgumentError::new(concat!("expected ", $what)))
            }
        }
    )*};
}

parsed!(
    u32: "a natural number", u64: "a natural number", usize: "a natural number", i32: "a whole number",
    i64: "a whole number", f32: "a number", f64: "a number", bool: "true or false"
);
