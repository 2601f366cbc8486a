//! Splits a batch into rows, and joins their responses (TR-1307).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::answer::ResponsePayload;
use super::refused::InvalidRequest;
use super::request::Mapped;
use super::signature::Signature;
use super::tensor::{Tensor, TensorData};

impl Mapped {
    /// Returns the rows of a batch, each as a request of its own; `None` if there is one row. An input with one row is
    /// part of every row.
    ///
    /// # Errors
    /// More rows than the model accepts, none, or inputs with different numbers of rows.
    pub fn rows(
        &self,
        signature: &Signature,
        model: &str,
    ) -> Result<Option<Vec<Self>>, InvalidRequest> {
        if signature.max_batch_size == 0 {
            return Ok(None);
        }
        let sizes = self.tensors.iter().map(|(_, tensor)| tensor.rows());
        // An input with one row applies to all rows, so any other number determines the size of the batch.
        let rows = sizes.clone().find(|rows| *rows != 1).unwrap_or(1);
        let refused = |what: String| {
            let id = self.shown_id();
            Err(InvalidRequest::Infer(format!("[request id: {id}] {what}")))
        };
        if sizes.clone().any(|size| size != 1 && size != rows) {
            return refused(format!(
                "inputs of model '{model}' differ in their batch-size"
            ));
        }
        let most = signature.max_batch_size;
        match usize::try_from(rows) {
            // One row is an ordinary request: there is nothing to split or to join.
            Ok(1) => Ok(None),
            Ok(count) if count > 1 && rows <= i64::from(most) => {
                let each = (0..count).map(|row| self.row(row, count));
                Ok(Some(each.collect()))
            }
            _ => refused(format!(
                "inference request batch-size must be from 1 to {most} for '{model}'"
            )),
        }
    }

    fn row(&self, row: usize, count: usize) -> Self {
        let tensors = self.tensors.iter().map(|(location, tensor)| {
            let mine = if usize::try_from(tensor.rows()) == Ok(count) {
                Arc::new(tensor.row(row, count))
            } else {
                Arc::clone(tensor)
            };
            (*location, mine)
        });
        Self {
            id: self.id.clone(),
            tensors: tensors.collect(),
            parameters: Arc::clone(&self.parameters),
            unknown: self.unknown,
            outputs: self.outputs.clone(),
        }
    }
}

impl ResponsePayload {
    /// TR-1307: combines the responses of the rows of a batch, in their order.
    #[must_use]
    pub fn of_rows(rows: Vec<Self>) -> Self {
        let count = rows.len().max(1);
        let mut whole = Self::default();
        let texts = text_outputs(&rows);
        for mut row in rows {
            row.fill(&texts);
            whole.join(row.outputs);
            for (name, value) in row.parameters {
                // Of equal names the first row's value stays: the joined response has one place for it.
                if !whole.parameters.iter().any(|(mine, _)| *mine == name) {
                    whole.parameters.push((name, value));
                }
            }
        }
        for (_, tensor) in &mut whole.outputs {
            // The leading dimension is the batch, as clients sent it (TR-1307).
            let each = tensor.data.len() / count;
            let sizes = [count, each].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
            tensor.shape = sizes.to_vec();
        }
        whole
    }

    /// Adds the texts that other rows have and this one has not, as empty ones: elements are told apart by their position.
    fn fill(&mut self, texts: &BTreeMap<usize, usize>) {
        for (location, count) in texts {
            if !self.outputs.iter().any(|(mine, _)| mine == location) {
                let empty = std::iter::repeat_n(&b""[..], *count).collect();
                self.outputs
                    .push((*location, Tensor::flat(TensorData::Bytes(empty))));
            }
        }
    }

    /// Appends the elements of later outputs to those of the same name.
    fn join(&mut self, later: Vec<(usize, Tensor)>) {
        for (location, tensor) in later {
            let mine = self.outputs.iter_mut().find(|(mine, _)| *mine == location);
            match mine {
                Some((_, mine)) => {
                    mine.data.append(tensor.data);
                    mine.shape = vec![i64::try_from(mine.data.len()).unwrap_or(i64::MAX)];
                }
                None => self.outputs.push((location, tensor)),
            }
        }
        // Rows may have sent different outputs; responses list them in the order of the signature (TR-502).
        self.outputs.sort_by_key(|(location, _)| *location);
    }
}

/// The outputs of texts that some row has, and their number of elements.
fn text_outputs(rows: &[ResponsePayload]) -> BTreeMap<usize, usize> {
    let outputs = rows.iter().flat_map(|row| &row.outputs);
    let texts = outputs.filter(|(_, tensor)| matches!(tensor.data, TensorData::Bytes(_)));
    texts
        .map(|(location, tensor)| (*location, tensor.data.len()))
        .collect()
}

impl Tensor {
    /// The number of rows; only for a model that accepts batches.
    fn rows(&self) -> i64 {
        self.shape.first().copied().unwrap_or(1)
    }

    fn row(&self, row: usize, count: usize) -> Self {
        let each = self.data.len() / count;
        let mut shape = self.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = 1;
        }
        Self {
            shape,
            data: self.data.part(row * each..(row + 1) * each),
        }
    }
}

impl TensorData {
    /// Appends elements of the same kind; other kinds are ignored, and cannot occur with one signature.
    fn append(&mut self, more: Self) {
        match (self, more) {
            (Self::Bool(list), Self::Bool(more)) => list.extend(more),
            (Self::Int(list), Self::Int(more)) => list.extend(more),
            (Self::Uint(list), Self::Uint(more)) => list.extend(more),
            (Self::Float(list), Self::Float(more)) => list.extend(more),
            (Self::Bytes(list), Self::Bytes(more)) => more.iter().for_each(|text| list.push(text)),
            _ => {}
        }
    }

    /// Returns a range of elements, all of which exist.
    fn part(&self, range: Range<usize>) -> Self {
        match self {
            Self::Bool(list) => Self::Bool(list[range].to_vec()),
            Self::Int(list) => Self::Int(list[range].to_vec()),
            Self::Uint(list) => Self::Uint(list[range].to_vec()),
            Self::Float(list) => Self::Float(list[range].to_vec()),
            Self::Bytes(list) => {
                let texts = list.iter().skip(range.start);
                Self::Bytes(texts.take(range.len()).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mapper, RequestLimits, RequestParameter};
    use super::*;

    fn batching(max_batch_size: u32) -> Signature {
        Signature {
            max_batch_size,
            ..Signature::union()
        }
    }

    fn rows(signature: &Signature, body: &str) -> Result<Option<Vec<Mapped>>, InvalidRequest> {
        let mapper = Mapper {
            model: "m",
            signature,
            known: &[],
            strict: false,
            limits: &RequestLimits::default(),
        };
        mapper.map(body.as_bytes())?.rows(signature, "m")
    }

    #[test]
    fn tr_1307_a_batch_is_split_into_rows() {
        let signature = batching(3);
        let body = r#"{"id":"a","text_input":["x","y"],"max_tokens":4,"top_p":[0.1,0.2],"n":2}"#;
        let rows = rows(&signature, body).unwrap().unwrap();
        let location = |name| signature.input(name).unwrap();
        for (row, text, top_p) in [(0, "x", 0.1), (1, "y", 0.2)] {
            let row: &Mapped = &rows[row];
            let data = |name| &row.tensor(location(name)).unwrap().data;
            assert_eq!(data("text_input"), &Tensor::texts([text]).data);
            assert_eq!(data("max_tokens"), &TensorData::Int(vec![4]));
            assert_eq!(data("top_p"), &TensorData::Float(vec![top_p]));
            assert_eq!(row.tensor(location("text_input")).unwrap().shape, [1, 1]);
            assert_eq!(row.id.as_deref(), Some("a"));
            assert_eq!(row.parameter("n"), Some(&RequestParameter::Int(2)));
        }
    }

    #[test]
    fn d_47_rows_share_what_applies_to_all_of_them() {
        let signature = batching(2);
        let body = r#"{"text_input":["x","y"],"sampling_parameters":"{}","p":"z"}"#;
        let rows = rows(&signature, body).unwrap().unwrap();
        let [first, second] = &rows[..] else {
            panic!("there are two rows");
        };
        assert!(Arc::ptr_eq(&first.parameters, &second.parameters));
        let same = |at: usize| Arc::ptr_eq(&first.tensors[at].1, &second.tensors[at].1);
        assert_eq!([same(0), same(1)], [false, true]);
    }

    #[test]
    fn tr_1307_batch_size_and_number_of_rows_are_checked() {
        let one = r#"{"text_input":["x"]}"#;
        let three = r#"{"text_input":["x","y","z"]}"#;
        let four = r#"{"text_input":["x","y","z","a"]}"#;
        let uneven = r#"{"text_input":["x","y"],"max_tokens":[1,2,3]}"#;
        let size =
            "[request id: <id_unknown>] inference request batch-size must be from 1 to 3 for 'm'";
        let differ = "[request id: <id_unknown>] inputs of model 'm' differ in their batch-size";
        let shape = "The schema can not convert input 'text_input' to tensor with proper shape";
        for (most, body, expect) in [
            (3, one, Ok(1)),
            (3, three, Ok(3)),
            (3, four, Err(size)),
            (3, uneven, Err(differ)),
            (3, r#"{"text_input":[]}"#, Err(shape)),
            (0, one, Ok(1)),
            (0, three, Err(shape)),
        ] {
            let written = rows(&batching(most), body);
            let written = written.map(|rows| rows.map_or(1, |rows| rows.len()));
            let expect = expect.map_err(str::to_owned);
            assert_eq!(
                written.map_err(|refused| refused.to_string()),
                expect,
                "{body}"
            );
        }
    }

    fn response(texts: &[&str], tokens: &[u64], parameter: i64) -> ResponsePayload {
        let signature = Signature::union();
        let location = |name| signature.output(name).unwrap();
        ResponsePayload {
            outputs: vec![
                (
                    location("text_output"),
                    Tensor::texts(texts.iter().copied()),
                ),
                (
                    location("num_output_tokens"),
                    Tensor::flat(TensorData::Uint(tokens.to_vec())),
                ),
            ],
            parameters: vec![("p".into(), RequestParameter::Int(parameter))],
        }
    }

    #[test]
    fn tr_1307_responses_of_rows_are_joined_in_row_order() {
        let rows = vec![
            response(&["a", "b"], &[1, 2], 1),
            response(&["c", "d"], &[3, 4], 2),
        ];
        let whole = ResponsePayload::of_rows(rows);
        let expect = response(&["a", "b", "c", "d"], &[1, 2, 3, 4], 1);
        for ((location, tensor), (same, wanted)) in whole.outputs.iter().zip(&expect.outputs) {
            assert_eq!((location, &tensor.data), (same, &wanted.data));
            assert_eq!(tensor.shape, [2, 2]);
        }
        assert_eq!(whole.parameters, expect.parameters);
    }
    /// Only rows whose model has thought have reasoning.
    #[test]
    fn tr_1307_a_text_that_only_some_rows_have_is_empty_in_the_others() {
        let reasoning = Signature::union().output("reasoning").unwrap();
        let mut second = response(&["b"], &[2], 1);
        second.outputs.push((reasoning, Tensor::texts(["hm"])));
        let rows = vec![response(&["a"], &[1], 1), second, response(&["c"], &[3], 1)];
        let whole = ResponsePayload::of_rows(rows);
        let outputs: Vec<_> = whole
            .outputs
            .iter()
            .map(|(location, _)| *location)
            .collect();
        let location = |name| Signature::union().output(name).unwrap();
        let expect = [
            location("text_output"),
            location("num_output_tokens"),
            reasoning,
        ];
        assert_eq!(outputs, expect);
        let (_, tensor) = whole.outputs.last().unwrap();
        assert_eq!(tensor.data, Tensor::texts(["", "hm", ""]).data);
        assert_eq!(tensor.shape, [3, 1]);
    }
}
