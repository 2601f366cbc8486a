//! Calls a function of its own.

use sapwood::kernel::{Kernel, args, function};

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Shout {
    text: String,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let kernel = Kernel::default();
    kernel.add(function(
        "shout",
        "Says it louder.",
        |input: Shout| async move { input.text.to_uppercase() },
    ))?;
    assert_eq!(
        kernel
            .run::<String>("shout", args! { text: "hello" })
            .await?,
        "HELLO"
    );
    Ok(())
}
