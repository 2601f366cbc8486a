//! Request parameters for scripted models: several responses, pauses, failures (TR-1103).

use std::time::Duration;

use futures::{StreamExt, stream};
use sapwood_kernel::Kernel;
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    InputRole, OutputRole, RequestParameter, ResponsePayload, Settings, Strings, Tensor, TensorData,
};

use super::call::{CallResponses, CheckedRequest, failed, given, texts};
use super::options::ScriptControl;
use super::request_error::RequestError;
use super::text;

/// The control values of one request.
struct Controls {
    repeat: u64,
    delay: Duration,
    fail_first: bool,
    fail_last: bool,
    empty: bool,
    code: Code,
}

/// Runs the model once for each response.
pub(super) fn begin(
    call: CheckedRequest,
    settings: Settings,
    kernel: &Kernel,
) -> Result<CallResponses, RequestError> {
    let controls = controls(&call, settings.stream)?;
    let prompts = prompts(&call)?;
    let failure = RequestError::new(controls.code, call.found.model.fail_message.clone()).late();
    // As a response and not as an error of the call: a failure of the model has the form of one in a stream (TR-604).
    if controls.fail_first {
        return Ok(failed(failure));
    }
    let playing = PlaybackSettings {
        call,
        settings,
        kernel: kernel.clone(),
        prompts,
        left: controls.repeat,
        controls,
        failure,
    };
    let reported = stream::unfold(Some(playing), |playing| async move {
        let mut playing = playing?;
        let response = playing.next().await?;
        // Nothing follows an error.
        let rest = response.is_ok().then_some(playing);
        Some((response, rest))
    });
    Ok(reported.boxed())
}

fn prompts(call: &CheckedRequest) -> Result<Vec<String>, RequestError> {
    match given(&call.found.signature, &call.mapped, |role| {
        *role == InputRole::Prompt
    }) {
        Some((name, tensor)) => texts(name, tensor),
        None => Ok(Vec::new()),
    }
}

struct PlaybackSettings {
    call: CheckedRequest,
    settings: Settings,
    kernel: Kernel,
    prompts: Vec<String>,
    left: u64,
    controls: Controls,
    failure: RequestError,
}

impl PlaybackSettings {
    async fn next(&mut self) -> Option<Result<ResponsePayload, RequestError>> {
        if self.left == 0 {
            // In place of the end: all responses were sent before.
            return self.controls.fail_last.then(|| Err(self.failure.clone()));
        }
        self.left -= 1;
        // Dropped with the responses: a client that disconnects ends the delay.
        tokio::time::sleep(self.controls.delay).await;
        Some(self.response().await)
    }

    async fn response(&self) -> Result<ResponsePayload, RequestError> {
        // The output has the elements of the prompt tensor (TR-1104), and so each element is a run of its own.
        let mut sent = Strings::default();
        if !self.controls.empty {
            for prompt in &self.prompts {
                let prompt = prompt.clone();
                let text = text::whole(&self.call, &self.settings, prompt, &self.kernel).await?;
                sent.push(text.as_bytes());
            }
        }
        let outputs = self.call.found.signature.outputs.iter().enumerate();
        let outputs = outputs.filter(|(_, output)| output.role == OutputRole::Text);
        Ok(ResponsePayload {
            outputs: outputs
                .map(|(registration, _)| {
                    (registration, Tensor::flat(TensorData::Bytes(sent.clone())))
                })
                .collect(),
            parameters: Vec::new(),
        })
    }
}

fn controls(call: &CheckedRequest, stream: bool) -> Result<Controls, RequestError> {
    let read = |control| ControlValue { call, control };
    let code = read(ScriptControl::Code).code()?.unwrap_or(Code::Internal);
    let delay = read(ScriptControl::DelayS).seconds()?.unwrap_or_default();
    let repeat = read(ScriptControl::Repeat).count()?.unwrap_or(1);
    let fail_last = read(ScriptControl::FailLast).flag()?;
    // Without a stream a request has exactly one response, at once. The values were checked all the same.
    Ok(Controls {
        repeat: if stream { repeat } else { 1 },
        delay: if stream { delay } else { Duration::ZERO },
        fail_first: read(ScriptControl::FailFirst).flag()?,
        fail_last: stream && fail_last,
        empty: read(ScriptControl::EmptyOutput).flag()?,
        code,
    })
}

/// One control of a request: the parameter, or the input with its role.
#[derive(Clone, Copy)]
struct ControlValue<'a> {
    call: &'a CheckedRequest,
    control: ScriptControl,
}

impl ControlValue<'_> {
    fn name(self) -> String {
        let named = self.call.found.model.controls.get(&self.control).cloned();
        named.unwrap_or_else(|| self.role().to_owned())
    }

    fn role(self) -> &'static str {
        let mine = ScriptControl::ALL
            .iter()
            .find(|(_, control)| *control == self.control);
        mine.map_or("", |(name, _)| name)
    }

    fn wrong(self, wanted: &str) -> RequestError {
        let message = format!("parameter '{}' must be {wanted}", self.name());
        RequestError::new(Code::InvalidRequest, message)
    }

    fn value(self) -> Option<RequestParameter> {
        let CheckedRequest { found, mapped, .. } = self.call;
        // The parameter before the input: a signature may declare both.
        let parameter = found.model.controls.get(&self.control);
        if let Some(value) = parameter.and_then(|name| mapped.parameter(name)) {
            return Some(value.clone());
        }
        let mine =
            |role: &InputRole| matches!(role, InputRole::Control(name) if name == self.role());
        let (_, tensor) = given(&found.signature, mapped, mine)?;
        match &tensor.data {
            TensorData::Bool(list) => list.first().map(|flag| RequestParameter::Bool(*flag)),
            TensorData::Int(list) => list.first().map(|number| RequestParameter::Int(*number)),
            TensorData::Uint(list) => {
                let number = list.first().and_then(|number| i64::try_from(*number).ok());
                number.map(RequestParameter::Int)
            }
            TensorData::Float(list) => list.first().map(|number| RequestParameter::Double(*number)),
            TensorData::Bytes(list) => {
                let text = list.iter().next().map(String::from_utf8_lossy);
                text.map(|text| RequestParameter::Text(text.into_owned()))
            }
        }
    }

    /// The value as `take` reads it; one that it does not take is refused.
    fn read<T>(
        self,
        wanted: &str,
        take: impl FnOnce(RequestParameter) -> Option<T>,
    ) -> Result<Option<T>, RequestError> {
        let read = |value| take(value).ok_or_else(|| self.wrong(wanted));
        self.value().map(read).transpose()
    }

    fn flag(self) -> Result<bool, RequestError> {
        let flag = self.read("true or false", |value| match value {
            RequestParameter::Bool(flag) => Some(flag),
            _ => None,
        });
        Ok(flag?.unwrap_or(false))
    }

    fn count(self) -> Result<Option<u64>, RequestError> {
        self.read("an integer, 0 or more", |value| match value {
            RequestParameter::Int(number) => u64::try_from(number).ok(),
            _ => None,
        })
    }

    fn seconds(self) -> Result<Option<Duration>, RequestError> {
        self.read("a number of seconds, 0 or more", |value| {
            let seconds = match value {
                #[allow(clippy::cast_precision_loss, reason = "seconds")]
                RequestParameter::Int(number) => number as f64,
                RequestParameter::Double(number) => number,
                _ => return None,
            };
            // Refuses negative numbers, NaN and what does not fit, at which the plain conversion panics.
            Duration::try_from_secs_f64(seconds).ok()
        })
    }

    fn code(self) -> Result<Option<Code>, RequestError> {
        self.read("the name of an error code", |value| match value {
            RequestParameter::Text(name) => Code::from_name(&name),
            _ => None,
        })
    }
}
