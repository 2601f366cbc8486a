//! Requests of several rows: each runs as a sequence of its own, and all of them end together (TR-1307).
//!
//! Owns: how rows run beside each other, and the mark of each in a stream. Refuses to know: how a request falls into rows
//! (`proto::generate`).

use futures::future::try_join_all;
use futures::stream::{self, select_all};
use futures::{FutureExt, StreamExt};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Data, Mapped, OutputRole, Parameter, Response};

use super::call::{Call, Responses, streams};
use super::catalogue::Catalogue;
use super::failure::Failure;

/// Which row an event is of.
const INDEX: &str = "batch_index";

/// The responses of every row: as they come, or as one.
///
/// # Errors
/// Of the first row that is refused; then none has begun.
pub(super) fn begin(
    call: Call,
    rows: Vec<Mapped>,
    catalogue: &Catalogue,
    pieces: bool,
) -> Result<Responses, Failure> {
    let signature = &call.found.signature;
    let is_apart = pieces && signature.is_apart(&call.mapped);
    let streams = streams(&call.found, &call.mapped);
    let each = rows.into_iter().map(|mapped| {
        let row = Call {
            found: call.found.clone(),
            mapped,
            deadline: call.deadline,
        };
        row.begin(catalogue, pieces)
    });
    let each: Vec<Responses> = each.collect::<Result<_, _>>()?;
    let is_whole = !streams && !is_apart;
    let index = signature.output_of(&OutputRole::BatchIndex);
    let each = (0..).zip(each).map(|(row, responses)| {
        let named = responses.map(move |response| {
            let mut response = response?;
            if !set_row(&mut response, index, row) && !is_whole {
                let mark = (INDEX.into(), Parameter::Int(row));
                response.parameters.push(mark);
            }
            Ok(response)
        });
        named.boxed()
    });
    if is_whole {
        let whole = try_join_all(each.map(only));
        let whole = whole.map(|rows| rows.map(Response::of_rows));
        return Ok(stream::once(whole).boxed());
    }
    Ok(select_all(each).boxed())
}

/// Says in the output for it, at `index`, which row a response is of; false where the response has no such output.
fn set_row(response: &mut Response, index: Option<usize>, row: i64) -> bool {
    let mut outputs = response.outputs.iter_mut();
    let Some((_, tensor)) = outputs.find(|(place, _)| Some(*place) == index) else {
        return false;
    };
    if let Data::Int(rows) = &mut tensor.data {
        rows.fill(row);
    }
    true
}

/// Without a stream a row has one response.
async fn only(mut responses: Responses) -> Result<Response, Failure> {
    let none = || Failure::new(Code::Internal, "a row of the batch has no response").late();
    responses.next().await.ok_or_else(none)?
}
