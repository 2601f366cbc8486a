//! Models of a Triton server, or of any KServe v2 server, as functions of this kernel.

mod elements;
mod failure;
mod fields;
mod tensors;
mod text;

use std::sync::Arc;

use futures::{StreamExt, stream};
use sapwood_net::triton::{ModelSignature, TritonClient};

use crate::Result;
use crate::function::Fun;
use crate::name::Name;

/// Functions for every model that the server has ready, or for the one that its address names, to be added to a kernel.
/// A model that cannot be described is left out and logged.
///
/// # Errors
/// The server does not answer, or the one named model cannot be read.
pub async fn import(client: &TritonClient) -> Result<Vec<Fun>> {
    let server = Name::new("the server");
    let listed = client.models().await;
    let listed = listed.map_err(|error| failure::error(error, &server))?;
    let described = stream::iter(listed)
        .map(|listed| async move { (client.model(&listed.name).await, listed.name) })
        // In order and a few at a time: a server with hundreds of models is not flooded.
        .buffered(AT_ONCE);
    let described: Vec<_> = described.collect().await;
    let mut functions = Vec::with_capacity(described.len());
    for (model, name) in described {
        match model {
            Ok(model) => functions.push(function(client, model)),
            // A model that was asked for by name must not be missing silently.
            Err(error) if client.only().is_some() => {
                return Err(failure::error(error, &Name::from(name)));
            }
            Err(error) => tracing::warn!(model = name, %error, "left out an unreadable model"),
        }
    }
    Ok(functions)
}

/// The function of this model.
fn function(client: &TritonClient, model: ModelSignature) -> Fun {
    let (client, model) = (client.clone(), Arc::new(model));
    if text::is_text(&model) {
        text::function(client, model)
    } else {
        tensors::function(client, model)
    }
}

/// Models that are described concurrently.
const AT_ONCE: usize = 8;

#[cfg(test)]
mod tests;
