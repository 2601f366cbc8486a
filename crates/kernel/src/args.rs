//! The arguments of a call: names and nodes.

use serde_json::{Map, Value};

use crate::Result;
use crate::error::Error;
use crate::name::Name;
use crate::node::Node;

/// Argument names with their nodes.
#[derive(Clone, Debug, Default)]
pub struct Args(Vec<(Name, Node)>);

impl Args {
    /// No arguments.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds an argument. A name given twice is reported when the arguments are used.
    #[must_use]
    pub fn with(mut self, name: impl Into<Name>, node: impl Into<Node>) -> Self {
        self.0.push((name.into(), node.into()));
        self
    }
}

/// Types that can be passed to a function as arguments.
pub trait IntoArgs {
    /// The names and nodes.
    ///
    /// # Errors
    /// `Argument` if it is not a list of names and values.
    fn into_args(self) -> Result<Vec<(Name, Node)>>;
}

impl IntoArgs for Args {
    fn into_args(self) -> Result<Vec<(Name, Node)>> {
        Ok(self.0)
    }
}

impl IntoArgs for () {
    fn into_args(self) -> Result<Vec<(Name, Node)>> {
        Ok(Vec::new())
    }
}

impl<N: Into<Name>, V: Into<Node>, const K: usize> IntoArgs for [(N, V); K] {
    fn into_args(self) -> Result<Vec<(Name, Node)>> {
        Ok(pairs(self))
    }
}

impl<N: Into<Name>, V: Into<Node>> IntoArgs for Vec<(N, V)> {
    fn into_args(self) -> Result<Vec<(Name, Node)>> {
        Ok(pairs(self))
    }
}

impl IntoArgs for Map<String, Value> {
    fn into_args(self) -> Result<Vec<(Name, Node)>> {
        Ok(pairs(self))
    }
}

/// A JSON object.
impl IntoArgs for Value {
    fn into_args(self) -> Result<Vec<(Name, Node)>> {
        match self {
            Self::Object(object) => object.into_args(),
            _ => Err(Error::argument(
                "arguments",
                "must be a JSON object of inputs",
            )),
        }
    }
}

fn pairs<N: Into<Name>, V: Into<Node>>(
    list: impl IntoIterator<Item = (N, V)>,
) -> Vec<(Name, Node)> {
    list.into_iter()
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

/// Arguments by name: `args! { city: "Kyoto", days: 3 }`. Each value becomes a node.
#[macro_export]
macro_rules! args {
    ($($name:ident : $value:expr),* $(,)?) => {
        $crate::Args::new()$(.with(stringify!($name), $value))*
    };
}
