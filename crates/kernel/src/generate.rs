//! GENERATE: the function that passes a request to the model that its input `target` names.

use std::collections::BTreeMap;

use sapwood_proto::clip::shown;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;

use crate::Result;
use crate::call::{Call, KnownModels};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::function::Fun;
use crate::handler::{raw, streamed};
use crate::model;
use crate::name::{Mime, Name};
use crate::run::Run;
use crate::spec::{Effect, InnerType, InputSpec, Spec};

/// The models of GENERATE under their names and aliases. The models themselves are looked up in the kernel of the call.
#[derive(Clone, Debug, Default)]
pub struct Targets {
    /// The default for a request that names none. `None`: the only model there is.
    pub default: Option<Name>,
    /// Aliases, and the models that they stand for.
    pub aliases: BTreeMap<Name, Name>,
}

/// The function `GENERATE`.
pub fn generate(targets: Targets) -> Fun {
    let mut spec =
        Spec::new("GENERATE", "Generates text on the target model.").effect(Effect::Idempotent);
    spec.inputs = model::inputs();
    spec.inputs
        .push(InputSpec::new("target").taking([Mime::TEXT]).optional());
    spec.outputs = model::outputs();
    spec.finishes = true;
    spec.inner = Some(InnerType::of::<sapwood_engine::api::Tokens>());
    raw(spec, move |call| streamed(dispatch(call, targets.clone())))
}

async fn dispatch(call: Call, targets: Targets) -> Result<Run<Chunk>> {
    let asked: String = match call.inputs.get("target") {
        Some(_) => call.arg("target").await?,
        None => String::new(),
    };
    let name = targets.find(&call, asked.trim())?;
    // Models do not declare this input.
    let mut inputs = call.inputs.clone();
    inputs.remove("target");
    let args: Vec<_> = inputs
        .iter()
        .map(|(name, node)| (name.clone(), node.clone()))
        .collect();
    // Through the kernel of the call, so that the model's layers, deadline and cancel apply (KE-138).
    Ok(call.kernel().run::<Chunk>(&name, args).wanting(call.want))
}

impl Targets {
    /// The model that the name `asked` stands for (EV-503).
    fn find(&self, call: &Call, asked: &str) -> Result<Name> {
        let specs = call.kernel().specs();
        let known = call.own.get::<KnownModels>();
        let known = known.map(|known| &*known.0);
        let models = || {
            specs
                .iter()
                .filter(|spec| spec.generates())
                .map(|spec| &spec.name)
                .filter(|name| known.is_none_or(|known| known.contains(&**name)))
        };
        let is_model = |name: &str| models().any(|model| *model == *name);
        let embeds = |name: &str| {
            let mut specs = specs.iter().filter(|spec| spec.embeds);
            specs.any(|spec| spec.name == *name)
                && known.is_none_or(|known| known.contains(&Name::shared(name)))
        };
        // A key for some models learns nothing of others: a model that it may not use and one that does not exist give
        // the same error.
        let unknown = |name: &str| match known {
            None => Err(Error::not_found("model", name, models().cloned())),
            Some(_) => Err(Error::Engine {
                code: Code::PermissionDenied,
                reason: ErrorReason::INSUFFICIENT_SCOPE,
                message: format!("this key may not call a model named {:?}", shown(name)),
                retry_after: None,
            }),
        };
        if asked.is_empty() {
            let default = self.default.as_ref();
            // To a key that may not use the default model there is no default.
            let default = default.filter(|name| known.is_none() || is_model(name));
            let mut all = models();
            return match (default, all.next(), all.next()) {
                (Some(name), ..) if is_model(name) => Ok(name.clone()),
                (Some(name), ..) => unknown(name),
                (None, Some(only), None) => Ok(only.clone()),
                (None, None, _) => unknown(""),
                (None, Some(_), Some(_)) => {
                    let names: Vec<&str> = models().take(20).map(Name::as_str).collect();
                    let why = format!("must name one of the models: {}", names.join(", "));
                    Err(Error::argument("target", why).because(ErrorReason::TARGET_REQUIRED))
                }
            };
        }
        // The TypeScript client sends its URI as the target. The whole name is tried first (EV-503).
        let bare = asked.strip_prefix("evergreen://").unwrap_or(asked);
        if let Some(name) = [asked, bare].into_iter().find(|name| is_model(name)) {
            return Ok(Name::shared(name));
        }
        if let Some(name) = [asked, bare].into_iter().find(|name| embeds(name)) {
            return Err(Error::Engine {
                code: Code::FailedPrecondition,
                reason: ErrorReason::NONE,
                message: format!(
                    "the model {name} generates no text: call it as a function of its own"
                ),
                retry_after: None,
            });
        }
        let alias = [asked, bare]
            .into_iter()
            .find_map(|name| self.aliases.get(name));
        match alias {
            // An alias of a model that the key may not use is unknown like the model itself.
            Some(name) if is_model(name) => Ok(name.clone()),
            _ => unknown(asked),
        }
    }
}

#[cfg(test)]
mod tests;
