//! Serves a function of its own at every face, with the facade crate alone.

use sapwood::kernel::{Kernel, function};

#[derive(sapwood::serde::Deserialize, sapwood::schemars::JsonSchema)]
#[serde(crate = "sapwood::serde")]
#[schemars(crate = "sapwood::schemars")]
struct Shout {
    text: String,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kernel = Kernel::new();
    kernel.add(function(
        "shout",
        "Says it louder.",
        |input: Shout| async move { input.text.to_uppercase() },
    ))?;
    Ok(sapwood::serve::Serve::new(kernel).run()?)
}
