//! Where runs begin: at a kernel by name, at a function, at a node.

use std::future::{Future, IntoFuture};
use std::sync::Arc;

use bytes::Bytes;

use super::Run;
use super::flow::Setup;
use crate::Result;
use crate::args::IntoArgs;
use crate::call::Inputs;
use crate::error::Error;
use crate::from_chunks::FromChunks;
use crate::function::{Fun, Function};
use crate::kernel::{Kernel, Registration};
use crate::limits;
use crate::node::{Demand, Node};

impl Kernel {
    /// Runs a function and reads it as `T`. Nothing happens before the first poll (KE-141).
    pub fn run<T: FromChunks>(&self, name: &str, args: impl IntoArgs) -> Run<T> {
        Run::calling(set_up(self, name, args))
    }

    /// The run of a function as a node: with the ports that its views request before the first poll (KE-149).
    #[must_use]
    pub fn node(&self, name: &str, args: impl IntoArgs) -> Node {
        let demand = Arc::new(Demand::default());
        let mut setup = set_up(self, name, args);
        if let Ok(setup) = &mut setup {
            // Shared with the node: its views add ports to it until the run starts.
            setup.demand = Some(demand.clone());
        }
        let run: Run = Run::calling(setup);
        Node::on_demand(demand, run)
    }
}

impl dyn Function {
    /// Runs this function, registered or not, through the kernel's layers (KE-149).
    pub fn run<T: FromChunks>(self: &Arc<Self>, kernel: &Kernel, args: impl IntoArgs) -> Run<T> {
        Run::calling(set_up_function(kernel, self.clone(), args))
    }
}

impl Node {
    /// Reads the node as a type, as [`Kernel::run`] does with a function.
    pub fn run<T: FromChunks>(&self) -> Run<T> {
        Run::reading(self)
    }

    /// All bytes of the main port's choice 0.
    pub fn whole(&self) -> impl Future<Output = Result<Bytes>> + Send + use<> {
        IntoFuture::into_future(self.run::<Bytes>())
    }
}

/// Checks the arguments of a function, registered or not.
pub(crate) fn set_up_function(
    kernel: &Kernel,
    function: Fun,
    args: impl IntoArgs,
) -> Result<Setup> {
    prepare(kernel, Registration::new(function), args)
}

/// Looks a function up and checks its arguments.
pub(crate) fn set_up(kernel: &Kernel, name: &str, args: impl IntoArgs) -> Result<Setup> {
    prepare(kernel, kernel.find(name)?, args)
}

fn prepare(kernel: &Kernel, entry: Registration, args: impl IntoArgs) -> Result<Setup> {
    let inputs = Inputs::of(&entry.spec, args.into_args()?)?;
    // A function that calls itself ends here, and not when the stack or the memory does.
    let depth = kernel.inherited().map_or(0, |inherited| inherited.depth) + 1;
    if depth > limits::CALL_DEPTH {
        return Err(Error::Limit {
            name: "call_depth",
            max: u64::from(limits::CALL_DEPTH),
        });
    }
    Ok(Setup {
        caller: kernel.caller(),
        panics: kernel.panic_count(),
        depth,
        inputs,
        // The layers of now: changes to the registry do not affect a call that was made before (KE-146).
        next: kernel.layered(&entry),
        spec: entry.spec,
        demand: None,
    })
}
