//! Functions that benchmarks and foreign clients call (EV-511): `echo`, `echo_async`, `fail`, `slow`, `concat`.

use futures::StreamExt;
use futures::stream::{self, BoxStream};

use crate::call::Call;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::function::Fun;
use crate::handler::raw;
use crate::name::{Mime, Port};
use crate::spec::{Effect, InputSpec, OutputSpec, Spec};
use crate::{Chunks, Result};

/// All test functions.
#[must_use]
pub fn test_functions() -> Vec<Fun> {
    vec![
        echo("echo"),
        echo("echo_async"),
        raw(spec("fail", "Gives one chunk, then fails.", []), |_| {
            let items = [
                Ok(Chunk::text("before the failure")),
                Err(Error::function("failing is what this function is for")),
            ];
            stream::iter(items).boxed()
        }),
        raw(spec("slow", "Never ends by itself.", []), |_| {
            stream::pending().boxed()
        }),
        raw(
            spec(
                "concat",
                "Copies `a`, then `b`.",
                [
                    InputSpec::new("a").streaming(),
                    InputSpec::new("b").streaming(),
                ],
            ),
            |call| {
                let (a, b) = (input(&call, "a"), input(&call, "b"));
                as_one_leaf(a.chain(b).boxed())
            },
        ),
    ]
}

fn echo(name: &'static str) -> Fun {
    let spec = spec(
        name,
        "Copies every chunk at once.",
        [InputSpec::new("text").streaming()],
    );
    raw(spec, |call| as_one_leaf(input(&call, "text")))
}

fn spec<const N: usize>(
    name: &'static str,
    description: &'static str,
    inputs: [InputSpec; N],
) -> Spec {
    let output = OutputSpec::new(Port::MAIN, Mime::ANY).wire("response");
    Spec::new(name, description)
        .inputs(inputs)
        .outputs([output])
        .effect(Effect::Pure)
}

fn input(call: &Call, name: &str) -> Chunks {
    call.read(name)
        .unwrap_or_else(|error| stream::iter([Err(error)]).boxed())
}

/// Mimetypes are not enforced: the output is one leaf, of the mimetype of the first chunk.
fn as_one_leaf(chunks: BoxStream<'static, Result<Chunk>>) -> Chunks {
    let mut mime: Option<Mime> = None;
    let one = chunks.map(move |item| {
        let mut chunk = item?;
        chunk.part = 0;
        match &mime {
            Some(first) => chunk.mime = first.clone(),
            None => mime = Some(chunk.mime.clone()),
        }
        Ok(chunk)
    });
    one.boxed()
}
