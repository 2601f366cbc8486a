//! Converts the members of a body into tensors and parameters (TR-304 to TR-315).

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::datatype::Datatype;
use super::json::{self, NamedMember, Scalars};
use super::limits::RequestLimits;
use super::refused::InvalidRequest;
use super::settings;
use super::signature::{InputRole, InputTensor, Signature};
use super::tensor::{Tensor, TensorData, fit};
use crate::bounded_json::{self, JsonBounds};
use crate::clip::{SHOWN_BYTES_MAX, shown};
use crate::params::Domain;

/// A named value that is not a declared input.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestParameter {
    /// A boolean.
    Bool(bool),
    /// A 64-bit integer.
    Int(i64),
    /// Any other number.
    Double(f64),
    /// Text.
    Text(String),
    /// A list in JSON: of the texts of `stop` alone, before they are checked.
    List(Vec<Value>),
}

/// A parsed request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mapped {
    /// Its id, if it is not empty.
    pub id: Option<String>,
    /// The tensors, each with the index of its input in the signature. The rows of a batch share what applies to all of
    /// them (D-47).
    pub tensors: Vec<(usize, Arc<Tensor>)>,
    /// The parameters. A map, because a client may send tens of thousands of names, long and alike (D-47).
    pub parameters: Arc<BTreeMap<String, RequestParameter>>,
    /// Number of parameters that the model does not know.
    pub unknown: u32,
    /// The outputs requested by name, in protocols that support it.
    pub outputs: Option<Vec<usize>>,
}

/// Maps a body to the inputs of a model.
#[derive(Clone, Copy, Debug)]
pub struct Mapper<'a> {
    /// The model's name, for messages.
    pub model: &'a str,
    /// The signature of the model.
    pub signature: &'a Signature,
    /// Names of known parameters in addition to the sampling fields.
    pub known: &'a [String],
    /// Whether unknown parameters are refused (TR-307).
    pub strict: bool,
    /// The limits of a request.
    pub limits: &'a RequestLimits,
}

impl Mapped {
    /// The id as error messages show it.
    #[must_use]
    pub fn shown_id(&self) -> &str {
        let id = self.id.as_deref().unwrap_or("<id_unknown>");
        &id[..id.floor_char_boundary(SHOWN_BYTES_MAX)]
    }

    /// The tensor given for an input.
    #[must_use]
    pub fn tensor(&self, input: usize) -> Option<&Tensor> {
        let found = self.tensors.iter().find(|(location, _)| *location == input);
        found.map(|(_, tensor)| &**tensor)
    }

    /// The parameter of this name.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&RequestParameter> {
        self.parameters.get(name)
    }

    /// Adds a parameter, unless there is one of this name (TR-307).
    pub fn add_parameter(&mut self, name: &str, value: RequestParameter) {
        let parameters = Arc::make_mut(&mut self.parameters);
        parameters.entry(name.into()).or_insert(value);
    }

    /// The tensor of the input with this role, together with that input.
    pub(super) fn role<'a>(
        &'a self,
        signature: &'a Signature,
        role: &InputRole,
    ) -> Option<(&'a InputTensor, &'a Tensor)> {
        self.tensors.iter().find_map(|(location, tensor)| {
            let input = signature.inputs.get(*location)?;
            (input.role == *role).then_some((input, &**tensor))
        })
    }
}

impl Mapper<'_> {
    /// Reads a whole body.
    ///
    /// # Errors
    /// The first error in it, in the order of TR-203.
    pub fn map(&self, body: &[u8]) -> Result<Mapped, InvalidRequest> {
        if body.len() > self.limits.input_bytes {
            return Err(InvalidRequest::JsonBytes {
                bytes: body.len() as u64,
                max: self.limits.input_bytes,
            });
        }
        let members = json::read(body, self.limits)?;
        let mut mapped = Mapped {
            id: id(&members, self.limits)?,
            ..Mapped::default()
        };
        let mut filling = RequestBuilder {
            mapper: *self,
            into: &mut mapped,
            bytes: 0,
        };
        filling.members(&members, true)?;
        self.complete(&mut mapped)?;
        Ok(mapped)
    }

    /// Checks a request of which all inputs are read.
    ///
    /// # Errors
    /// `Missing`, with all missing inputs; `UnknownParameter` in strict mode.
    pub(super) fn complete(&self, mapped: &mut Mapped) -> Result<(), InvalidRequest> {
        self.check_required(mapped)?;
        self.count_unknown_fields(mapped)
    }

    /// TR-314: checks that all required inputs are present.
    fn check_required(&self, mapped: &Mapped) -> Result<(), InvalidRequest> {
        let inputs = &self.signature.inputs;
        let converses = mapped.role(self.signature, &InputRole::Messages).is_some();
        // In declared order, while the names below are sorted: the reference does both, and clients match the text
        // (TR-314).
        let missing: Vec<&str> = inputs
            .iter()
            .enumerate()
            .filter(|(location, input)| !input.optional && mapped.tensor(*location).is_none())
            // A conversation replaces the prompt.
            .filter(|(_, input)| !(converses && input.role == InputRole::Prompt))
            .map(|(_, input)| &*input.name)
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let required = inputs.iter().filter(|input| !input.optional).count();
        let expected = if required == inputs.len() {
            format!("{required} inputs")
        } else {
            format!("number of inputs between {required} and {}", inputs.len())
        };
        let mut got: Vec<&str> = mapped
            .tensors
            .iter()
            .filter_map(|(location, _)| Some(&*inputs.get(*location)?.name))
            .collect();
        got.sort_unstable();
        let count = got.len();
        Err(InvalidRequest::Missing(format!(
            "[request id: {}] expected {expected} but got {count} inputs for model '{}'. Got input(s) {}, but missing \
             required input(s) {}. Please provide all required input(s).",
            mapped.shown_id(),
            self.model,
            quoted(&got),
            quoted(&missing),
        )))
    }

    /// Adds one parameter; the first one of a name wins (TR-307).
    ///
    /// # Errors
    /// `UnknownParameter` in strict mode.
    pub fn parameter(
        &self,
        mapped: &mut Mapped,
        name: &str,
        value: RequestParameter,
    ) -> Result<(), InvalidRequest> {
        if !self.knows(name) {
            if self.strict {
                return Err(self.unknown(shown(name)));
            }
            // Counted, not refused: clients also send what only other servers know (TR-307).
            mapped.unknown = mapped.unknown.saturating_add(1);
        }
        mapped.add_parameter(name, value);
        Ok(())
    }

    /// Counts or refuses unknown fields of `sampling_parameters`, as unknown parameters (TR-307). What is no object is
    /// refused where its values are read.
    fn count_unknown_fields(&self, mapped: &mut Mapped) -> Result<(), InvalidRequest> {
        let given = mapped.role(self.signature, &InputRole::SamplingJson);
        let Some(TensorData::Bytes(objects)) = given.map(|(_, tensor)| &tensor.data) else {
            return Ok(());
        };
        let (mut count, mut first) = (0_u32, None);
        // One for each row of a batch.
        for object in objects.iter() {
            json::names(object, self.limits.json_members, &mut |name| {
                if !self.knows(name) {
                    count = count.saturating_add(1);
                    first.get_or_insert_with(|| shown(name));
                }
            });
        }
        match first {
            Some(name) if self.strict => Err(self.unknown(name)),
            _ => {
                mapped.unknown = mapped.unknown.saturating_add(count);
                Ok(())
            }
        }
    }

    /// Whether a parameter of this name has a meaning.
    fn knows(&self, name: &str) -> bool {
        settings::is_field(name) || self.known.iter().any(|known| known == name)
    }

    fn unknown(&self, name: String) -> InvalidRequest {
        InvalidRequest::UnknownParameter {
            name,
            model: self.model.into(),
        }
    }
}

fn quoted(names: &[&str]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("'{name}'")).collect();
    format!("[{}]", names.join(","))
}

/// TR-304: finds the id, wherever it is.
pub(super) fn id(
    members: &[NamedMember<'_>],
    limits: &RequestLimits,
) -> Result<Option<String>, InvalidRequest> {
    let Some((_, value)) = members.iter().find(|(name, _)| name == "id") else {
        return Ok(None);
    };
    if !value.starts_with('"') {
        return Err(InvalidRequest::Id);
    }
    let id = json::string(value)?;
    if id.len() > limits.id_bytes {
        return Err(InvalidRequest::IdBytes(limits.id_bytes));
    }
    Ok((!id.is_empty()).then(|| id.into()))
}

/// A request being built.
struct RequestBuilder<'a> {
    mapper: Mapper<'a>,
    into: &'a mut Mapped,
    /// Bytes of the tensors so far.
    bytes: usize,
}

impl RequestBuilder<'_> {
    fn members(&mut self, members: &[NamedMember<'_>], outer: bool) -> Result<(), InvalidRequest> {
        let signature = self.mapper.signature;
        for (name, value) in members {
            match (name.as_str(), signature.input(name)) {
                // `id` was read before all others (TR-304). Inside `parameters` this name, and `parameters` itself,
                // mean nothing special (TR-306).
                ("id", _) if outer => {}
                ("parameters", Some(_)) if outer => return Err(InvalidRequest::ParametersIsInput),
                ("parameters", None) if outer => self.nested(value)?,
                (_, Some(location)) => self.tensor(location, value)?,
                (name, None) => {
                    let Mapper {
                        signature, limits, ..
                    } = self.mapper;
                    // Only with the union signature, as all leniency (TR-312). The reference would refuse a list, so no
                    // client of it sends one, and a declared input would change what a lone text means beside others.
                    let value = match name {
                        "stop" if signature.lenient && value.starts_with('[') => {
                            stop_list(value, limits)?
                        }
                        _ => parameter(name, value)?,
                    };
                    self.mapper.parameter(self.into, name, value)?;
                }
            }
        }
        Ok(())
    }

    /// TR-306: reads the members of `parameters`.
    fn nested(&mut self, value: &str) -> Result<(), InvalidRequest> {
        if !value.starts_with('{') {
            return Err(InvalidRequest::Parameters);
        }
        let members = json::members(value, self.mapper.limits)?;
        self.members(&members, false)
            .map_err(|inner| InvalidRequest::Nested(Box::new(inner)))
    }

    fn tensor(&mut self, location: usize, value: &str) -> Result<(), InvalidRequest> {
        let Mapper {
            signature, limits, ..
        } = self.mapper;
        let input = &signature.inputs[location];
        if self.into.tensor(location).is_some() {
            return Err(InvalidRequest::Twice {
                id: self.into.shown_id().into(),
                name: input.name.clone(),
            });
        }
        let reading = TextMember {
            input,
            lenient: signature.lenient,
            limits,
        };
        let batches = signature.max_batch_size > 0;
        let (rows, tensor) = reading.tensor(value, batches)?;
        let bytes = tensor.data.bytes(input.datatype);
        // A short JSON text can make large tensors: `0,` is two bytes, an INT64 eight.
        if self.bytes + bytes > limits.input_bytes {
            return Err(InvalidRequest::TensorBytes {
                before: self.bytes,
                name: input.name.clone(),
                bytes,
                max: limits.input_bytes,
            });
        }
        self.bytes += bytes;
        let shape = batches
            .then_some(rows)
            .into_iter()
            .chain(tensor.shape)
            .collect();
        let tensor = Arc::new(Tensor { shape, ..tensor });
        self.into.tensors.push((location, tensor));
        Ok(())
    }
}

/// TR-307: reads a parameter.
pub(super) fn parameter(name: &str, value: &str) -> Result<RequestParameter, InvalidRequest> {
    // The value is valid JSON, so its first byte determines its type.
    Ok(match value.as_bytes().first() {
        Some(b'"') => RequestParameter::Text(json::string(value)?.into()),
        Some(b't') => RequestParameter::Bool(true),
        Some(b'f') => RequestParameter::Bool(false),
        Some(b'-' | b'0'..=b'9') => match value.parse() {
            Ok(number) => RequestParameter::Int(number),
            Err(_) => RequestParameter::Double(double(value)?),
        },
        _ => return Err(InvalidRequest::ParameterType(shown(name))),
    })
}

/// Reads the list of a parameter `stop`, bounded while it is read (D-47).
fn stop_list(value: &str, limits: &RequestLimits) -> Result<RequestParameter, InvalidRequest> {
    let domain = Domain::Texts {
        count: limits.stop_words,
        bytes: limits.stop_bytes,
    };
    let bounds = JsonBounds {
        // The list, its elements, and one too many of these.
        values: limits.stop_words.saturating_add(2),
        entries: limits.stop_words,
    };
    match bounded_json::read(value.as_bytes(), bounds) {
        Ok(Value::Array(list)) => Ok(RequestParameter::List(list)),
        _ => Err(InvalidRequest::Field {
            field: "stop".into(),
            range: domain.to_string(),
            got: shown(value),
        }),
    }
}

/// Reads a JSON number; numbers beyond the range of a double are refused, as RapidJSON does.
fn double(text: &str) -> Result<f64, InvalidRequest> {
    let number: Option<f64> = text.parse().ok();
    number
        .filter(|number| number.is_finite())
        .ok_or(InvalidRequest::Syntax {
            reason: "Number too big to be stored in double.",
            offset: 0,
        })
}

/// Converts the JSON text of a member to a tensor.
pub(super) struct TextMember<'a> {
    pub(super) input: &'a InputTensor,
    pub(super) lenient: bool,
    pub(super) limits: &'a RequestLimits,
}

impl TextMember<'_> {
    /// Reads the elements of a value, however they are nested.
    pub(super) fn data(&self, value: &str) -> Result<TensorData, InvalidRequest> {
        let mut data = TensorData::empty(self.input.datatype);
        Scalars::new(value).try_for_each(|scalar| self.element(&mut data, scalar))?;
        Ok(data)
    }

    /// Reads the tensor and its number of rows, which exceeds one only with `batches` (TR-1307).
    fn tensor(&self, value: &str, batches: bool) -> Result<(i64, Tensor), InvalidRequest> {
        let input = self.input;
        if matches!(input.datatype, Datatype::Fp16 | Datatype::Bf16) {
            return Err(InvalidRequest::Half {
                datatype: input.datatype,
                name: input.name.clone(),
            });
        }
        let mut data = TensorData::empty(input.datatype);
        // A string is a text already and stored without its quotes; any other JSON is stored as it is (TR-1306). Of the
        // object of sampling a list is one of texts, as of other inputs (TR-308).
        let is_json = match input.role {
            InputRole::SamplingJson => value.starts_with('{'),
            _ => !value.starts_with('"'),
        };
        let count = if input.accepts_json && is_json {
            self.put(&mut data, &json::compact(value))?;
            1
        } else {
            let mut scalars = Scalars::new(value);
            scalars.try_for_each(|scalar| self.element(&mut data, scalar))?;
            scalars.outer
        };
        // TR-308: shapes are computed for the outer level; nested values must have one element each.
        let one = fit(&input.shape, count).map(|shape| (1, shape));
        let fitted = one.or_else(|| rows(&input.shape, count).filter(|_| batches));
        let fitted = fitted.filter(|_| count == data.len());
        let (rows, shape) = fitted.ok_or_else(|| InvalidRequest::Shape(input.name.clone()))?;
        Ok((rows, Tensor { shape, data }))
    }

    fn element(&self, data: &mut TensorData, value: &str) -> Result<(), InvalidRequest> {
        // Before the element is stored, so that a list beyond its limit is not built first (D-47).
        self.limits.admit(self.input, data.len() + 1)?;
        let wrong = || InvalidRequest::Type(self.input.datatype);
        if !value.starts_with('"') {
            return match data {
                TensorData::Bytes(_) => Err(wrong()),
                other => self.plain(other, value),
            };
        }
        let text = json::string(value)?;
        match data {
            TensorData::Bytes(list) => {
                list.push(text.as_bytes());
                Ok(())
            }
            // TR-312: a string is accepted if all of it parses as the type.
            other if self.lenient => self.plain(other, text.trim()),
            _ => Err(wrong()),
        }
    }

    fn put(&self, data: &mut TensorData, text: &str) -> Result<(), InvalidRequest> {
        match data {
            TensorData::Bytes(list) => {
                list.push(text.as_bytes());
                Ok(())
            }
            _ => Err(InvalidRequest::Type(self.input.datatype)),
        }
    }

    /// Reads a number or a boolean.
    fn plain(&self, data: &mut TensorData, text: &str) -> Result<(), InvalidRequest> {
        let wrong = || InvalidRequest::Type(self.input.datatype);
        match data {
            TensorData::Bool(list) => list.push(match text {
                "true" => true,
                "false" => false,
                _ => return Err(wrong()),
            }),
            TensorData::Int(list) => {
                list.push(i64::try_from(self.integer(text)?).map_err(|_| wrong())?);
            }
            TensorData::Uint(list) => {
                list.push(u64::try_from(self.integer(text)?).map_err(|_| wrong())?);
            }
            TensorData::Float(list) => {
                // `f64` also parses `inf` and `nan`, which a string may contain and JSON has not.
                if !text.starts_with(|first: char| first == '-' || first.is_ascii_digit()) {
                    return Err(wrong());
                }
                let number: f64 = text.parse().map_err(|_| wrong())?;
                list.push(if number.is_finite() {
                    number
                } else {
                    double(text)?
                });
            }
            TensorData::Bytes(_) => return Err(wrong()),
        }
        Ok(())
    }

    fn integer(&self, text: &str) -> Result<i128, InvalidRequest> {
        let datatype = self.input.datatype;
        // `i128` also parses a leading `+`, which a string may contain and JSON has not.
        let digits = text.strip_prefix('-').unwrap_or(text);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(InvalidRequest::Type(datatype));
        }
        let (least, most) = datatype.range().unwrap_or((0, 0));
        // Digits beyond an i128 are still an integer: out of range, not of the wrong type.
        let number = text
            .parse()
            .ok()
            .filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| InvalidRequest::Range {
            value: shown(text),
            name: self.input.name.clone(),
            datatype,
        })
    }
}

/// The number of rows of a fixed shape that this many elements make.
fn rows(declared: &[i64], count: usize) -> Option<(i64, Vec<i64>)> {
    let fixed = declared.iter().all(|size| *size > 0);
    let each: i64 = declared.iter().product();
    let count = i64::try_from(count).ok().filter(|_| fixed)?;
    (count > 0 && count % each == 0).then(|| (count / each, declared.to_vec()))
}
