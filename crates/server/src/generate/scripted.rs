//! What requests may ask of a scripted model beside its text: several responses, pauses, failures (TR-1103).
//!
//! Owns: the controls, their types and what they do. Refuses to know: scripts; each response is a call of the model.

use std::time::Duration;

use futures::{StreamExt, stream};
use sapwood_kernel::Kernel;
use sapwood_proto::code::Code;
use sapwood_proto::generate::{
    Data, InputRole, OutputRole, Parameter, Response, Settings, Strings, Tensor,
};

use super::call::{Call, Responses, failed, given, texts};
use super::failure::Failure;
use super::options::Control;
use super::text;

/// What one request asks for.
struct Controls {
    repeat: u64,
    delay: Duration,
    fail_first: bool,
    fail_last: bool,
    empty: bool,
    code: Code,
}

/// Calls the model once for each response.
pub(super) fn begin(call: Call, settings: Settings, kernel: &Kernel) -> Result<Responses, Failure> {
    let controls = controls(&call, settings.stream)?;
    let prompts = prompts(&call)?;
    let failure = Failure::new(controls.code, call.found.model.fail_message.clone()).late();
    if controls.fail_first {
        return Ok(failed(failure));
    }
    let playing = Playing {
        call,
        settings,
        kernel: kernel.clone(),
        prompts,
        left: controls.repeat,
        controls,
        failure,
        over: false,
    };
    let told = stream::unfold(playing, |mut playing| async move {
        let response = playing.next().await?;
        Some((response, playing))
    });
    Ok(told.boxed())
}

fn prompts(call: &Call) -> Result<Vec<String>, Failure> {
    match given(&call.found.signature, &call.mapped, |role| {
        *role == InputRole::Prompt
    }) {
        Some((name, tensor)) => texts(name, tensor),
        None => Ok(Vec::new()),
    }
}

struct Playing {
    call: Call,
    settings: Settings,
    kernel: Kernel,
    prompts: Vec<String>,
    left: u64,
    controls: Controls,
    failure: Failure,
    over: bool,
}

impl Playing {
    async fn next(&mut self) -> Option<Result<Response, Failure>> {
        if self.over {
            return None;
        }
        if self.left == 0 {
            self.over = true;
            return self.controls.fail_last.then(|| Err(self.failure.clone()));
        }
        self.left -= 1;
        tokio::time::sleep(self.controls.delay).await;
        let response = self.response().await;
        self.over = response.is_err();
        Some(response)
    }

    async fn response(&self) -> Result<Response, Failure> {
        let mut said = Strings::default();
        if !self.controls.empty {
            for prompt in &self.prompts {
                let prompt = prompt.clone();
                let text = text::whole(&self.call, &self.settings, prompt, &self.kernel).await?;
                said.push(text.as_bytes());
            }
        }
        let outputs = self.call.found.signature.outputs.iter().enumerate();
        let outputs = outputs.filter(|(_, output)| output.role == OutputRole::Text);
        Ok(Response {
            outputs: outputs
                .map(|(place, _)| (place, Tensor::flat(Data::Bytes(said.clone()))))
                .collect(),
            parameters: Vec::new(),
        })
    }
}

fn controls(call: &Call, stream: bool) -> Result<Controls, Failure> {
    let read = |control| Reading { call, control };
    let code = match read(Control::Code).text()? {
        Some(name) => {
            let known = Code::from_name(&name);
            known.ok_or_else(|| read(Control::Code).wrong("the name of an error code"))?
        }
        None => Code::Internal,
    };
    let seconds = read(Control::DelayS).number()?.unwrap_or(0.0);
    let delay = Duration::try_from_secs_f64(seconds);
    let delay = delay.map_err(|_| read(Control::DelayS).wrong("a number of seconds, 0 or more"))?;
    let repeat = read(Control::Repeat).count()?.unwrap_or(1);
    let fail_last = read(Control::FailLast).flag()?;
    Ok(Controls {
        repeat: if stream { repeat } else { 1 },
        delay: if stream { delay } else { Duration::ZERO },
        fail_first: read(Control::FailFirst).flag()?,
        fail_last: stream && fail_last,
        empty: read(Control::EmptyOutput).flag()?,
        code,
    })
}

/// One control of a request: the parameter, or the input with its role.
#[derive(Clone, Copy)]
struct Reading<'a> {
    call: &'a Call,
    control: Control,
}

impl Reading<'_> {
    fn name(self) -> String {
        let named = self.call.found.model.controls.get(&self.control).cloned();
        named.unwrap_or_else(|| self.role().to_owned())
    }

    fn role(self) -> &'static str {
        let mine = Control::ALL
            .iter()
            .find(|(_, control)| *control == self.control);
        mine.map_or("", |(name, _)| name)
    }

    fn wrong(self, wanted: &str) -> Failure {
        let message = format!("parameter '{}' must be {wanted}", self.name());
        Failure::new(Code::InvalidRequest, message)
    }

    fn value(self) -> Option<Parameter> {
        let Call { found, mapped, .. } = self.call;
        let parameter = found.model.controls.get(&self.control);
        if let Some(value) = parameter.and_then(|name| mapped.parameter(name)) {
            return Some(value.clone());
        }
        let mine =
            |role: &InputRole| matches!(role, InputRole::Control(name) if name == self.role());
        let (_, tensor) = given(&found.signature, mapped, mine)?;
        match &tensor.data {
            Data::Bool(list) => list.first().map(|flag| Parameter::Bool(*flag)),
            Data::Int(list) => list.first().map(|number| Parameter::Int(*number)),
            Data::Uint(list) => {
                let number = list.first().and_then(|number| i64::try_from(*number).ok());
                number.map(Parameter::Int)
            }
            Data::Float(list) => list.first().map(|number| Parameter::Double(*number)),
            Data::Bytes(list) => {
                let text = list.iter().next().map(String::from_utf8_lossy);
                text.map(|text| Parameter::Text(text.into_owned()))
            }
        }
    }

    fn flag(self) -> Result<bool, Failure> {
        match self.value() {
            None => Ok(false),
            Some(Parameter::Bool(flag)) => Ok(flag),
            Some(_) => Err(self.wrong("true or false")),
        }
    }

    fn count(self) -> Result<Option<u64>, Failure> {
        let wrong = || self.wrong("an integer, 0 or more");
        match self.value() {
            None => Ok(None),
            Some(Parameter::Int(number)) => u64::try_from(number).map(Some).map_err(|_| wrong()),
            Some(_) => Err(wrong()),
        }
    }

    fn number(self) -> Result<Option<f64>, Failure> {
        match self.value() {
            None => Ok(None),
            #[allow(clippy::cast_precision_loss, reason = "seconds")]
            Some(Parameter::Int(number)) => Ok(Some(number as f64)),
            Some(Parameter::Double(number)) => Ok(Some(number)),
            Some(_) => Err(self.wrong("a number of seconds, 0 or more")),
        }
    }

    fn text(self) -> Result<Option<String>, Failure> {
        match self.value() {
            None => Ok(None),
            Some(Parameter::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong("the name of an error code")),
        }
    }
}
