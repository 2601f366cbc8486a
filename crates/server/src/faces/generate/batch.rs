//! Requests with a batch: each row runs as a sequence of its own, and the request ends when all rows have ended
//! (TR-1307).

use std::sync::Arc;

use futures::future::try_join_all;
use futures::stream::{self, select_all};
use futures::{FutureExt, StreamExt};
use sapwood_proto::code::Code;
use sapwood_proto::generate::{Mapped, OutputRole, RequestParameter, ResponsePayload, TensorData};

use super::call::{CallResponses, CheckedRequest, streams};
use super::catalog::ModelCatalog;
use super::request_error::RequestError;

/// The response parameter with the row of an event.
const INDEX: &str = "batch_index";

/// The responses of every row: as they come, or joined into one.
///
/// # Errors
/// Those of the first row that is refused; then no row has started.
pub(super) fn begin(
    call: CheckedRequest,
    rows: Vec<Mapped>,
    catalog: &ModelCatalog,
    pieces: bool,
) -> Result<CallResponses, RequestError> {
    let signature = &call.found.signature;
    let is_separate = pieces && signature.is_separate(&call.mapped);
    let streams = streams(&call.found, &call.mapped);
    let each = rows.into_iter().map(|mapped| {
        let row = CheckedRequest {
            found: call.found.clone(),
            mapped,
            deadline: call.deadline,
            held: Arc::clone(&call.held),
            charge: call.charge.clone(),
        };
        row.begin(catalog, pieces)
    });
    // All rows are checked before one runs: a call does nothing until it is polled.
    let each: Vec<CallResponses> = each.collect::<Result<_, _>>()?;
    let is_whole = !streams && !is_separate;
    let index = signature.output_of(&OutputRole::BatchIndex);
    let each = (0..).zip(each).map(|(row, responses)| {
        let named = responses.map(move |response| {
            let mut response = response?;
            // TensorRT-LLM has an output for the index, and all others get a parameter. A whole response needs neither,
            // because its rows are in order.
            if !set_row(&mut response, index, row) && !is_whole {
                let mark = (INDEX.into(), RequestParameter::Int(row));
                response.parameters.push(mark);
            }
            Ok(response)
        });
        named.boxed()
    });
    if is_whole {
        // The first error ends all: the rows are one request, with one cancellation scope.
        let whole = try_join_all(each.map(only));
        let whole = whole.map(|rows| rows.map(ResponsePayload::of_rows));
        return Ok(stream::once(whole).boxed());
    }
    Ok(select_all(each).boxed())
}

/// Sets the row of a response in the output at `index`; false where the response has no such output.
fn set_row(response: &mut ResponsePayload, index: Option<usize>, row: i64) -> bool {
    let mut outputs = response.outputs.iter_mut();
    let Some((_, tensor)) = outputs.find(|(registration, _)| Some(*registration) == index) else {
        return false;
    };
    if let TensorData::Int(rows) = &mut tensor.data {
        rows.fill(row);
    }
    true
}

/// Without a stream a row has one response.
async fn only(mut responses: CallResponses) -> Result<ResponsePayload, RequestError> {
    let none = || RequestError::new(Code::Internal, "a row of the batch has no response").late();
    responses.next().await.ok_or_else(none)?
}
