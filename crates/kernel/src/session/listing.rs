//! The replies to LIST_ACTIONS and SESSION_INFO (EV-914), and the list that a client offers (EV-810).

use std::sync::Arc;

use sapwood_engine::recommended::RecommendedSampling;
use sapwood_proto::evergreen::{Dialect, MetadataMode};
use sapwood_proto::params::GenerationParams;
use sapwood_proto::session::RetentionPolicy;
use serde_json::{Map, Value, json};

use super::{SessionOptions, config, wire};
use crate::kernel::Kernel;
use crate::name::{Mime, Name};
use crate::spec::{InputSpec, OutputSpec, Spec};

/// Every function that a client may call, every target, and every enabled extension.
pub(super) fn actions(kernel: &Kernel, options: &SessionOptions) -> Value {
    let specs = kernel.specs();
    let (models, functions): (Vec<_>, Vec<_>) = specs.iter().partition(|spec| spec.generates());
    let known = options.models.now();
    let may = |name: &Name| known.as_ref().is_none_or(|known| known.contains(name));
    // Models that embed are called by their names, as functions are, and a key may not use all of them.
    let functions = functions
        .iter()
        .filter(|spec| !spec.model || may(&spec.name));
    let targets = models
        .iter()
        .map(|spec| &spec.name)
        .filter(|name| may(name));
    let targets: Vec<&str> = targets.map(Name::as_str).collect();
    let default = options.default_target.as_deref();
    // The default is a model too, and must not reveal one that the key may not use.
    let default = default.filter(|name| may(&Name::shared(name)));
    json!({
        "actions": functions.map(|spec| action(spec)).collect::<Vec<_>>(),
        "targets": targets,
        "default_target": default,
        "sampling": sampling(models.iter().filter(|spec| may(&spec.name))),
        "extensions": options.extensions,
    })
}

/// The sampling values that models recommend, by model name; models without are absent (D-53).
fn sampling<'a>(models: impl Iterator<Item = &'a &'a Arc<Spec>>) -> Value {
    let recommending = models.filter(|spec| !spec.sampling.is_empty());
    let all: Map<String, Value> = recommending
        .map(|spec| (spec.name.as_str().to_owned(), recommended(&spec.sampling)))
        .collect();
    Value::Object(all)
}

fn recommended(sampling: &RecommendedSampling) -> Value {
    let params = GenerationParams::from(*sampling).to_json();
    Value::Object(params.unwrap_or_default())
}

/// The offer of a client that serves the functions of `kernel` (EV-810); it supports CANCEL.
#[cfg(feature = "net")]
pub(crate) fn offer(kernel: &Kernel) -> Value {
    let specs = kernel.specs();
    let functions = specs.iter().filter(|spec| !spec.model);
    let mut actions: Vec<Value> = functions.map(|spec| action(spec)).collect();
    // Not a function of the kernel: with it the server knows that this side can be asked to cancel (EV-974).
    actions.push(json!({ "name": "CANCEL" }));
    json!({ "actions": actions })
}

/// The dialect, the options and the limits of this session.
pub(super) fn session(options: &SessionOptions, dialect: Dialect) -> Value {
    let limits = &options.limits;
    let mode = match options.metadata {
        MetadataMode::Strict => "strict",
        MetadataMode::Lenient => "lenient",
        MetadataMode::PerChunk | MetadataMode::PerItem => "per-chunk",
    };
    let retain = match options.retain {
        RetentionPolicy::Session => "session",
        RetentionPolicy::Unread => "unread",
    };
    json!({
        "dialect": dialect.name(),
        "options": {
            "evergreen-metadata": mode,
            "evergreen-partial-failure": i32::from(options.partial_failure),
            "evergreen-retain": retain,
            "evergreen-resume": i32::from(options.token.is_some()),
            "evergreen-timeout-ms": options.timeout.map(|timeout| timeout.as_millis().to_string()),
        },
        "limits": {
            "max_message_bytes": limits.max_message_bytes,
            "max_fragment_bytes": limits.max_fragment_bytes,
            "max_nodes": limits.max_nodes,
            "max_depth": limits.max_depth,
            "max_actions": limits.max_actions,
            "max_early_fragments": limits.max_early_fragments,
            "retained_bytes": limits.retained_bytes,
            "reverse_timeout_ms": limits.reverse_timeout.as_millis().to_string(),
            "max_offers": limits.max_offers,
            "max_offer_bytes": limits.max_offer_bytes,
            "idle_timeout_ms": limits.idle_timeout.as_millis().to_string(),
        },
        "extensions": options.extensions,
        "session_token": options.token.as_ref().map(|token| &*token.0),
    })
}

fn action(spec: &Spec) -> Value {
    // Every function can be asked for `meta`, so it is listed for those that do not declare it (KE-305).
    let trailing = spec.output_on_wire(wire::META).is_none();
    let trailing = trailing.then(wire::meta_output);
    let mut listed = json!({
        "name": spec.name.as_str(),
        "description": &*spec.description,
        "inputs": spec.inputs.iter().map(input).collect::<Vec<_>>(),
        "outputs": spec.outputs.iter().chain(&trailing).map(output).collect::<Vec<_>>(),
        "configs": config::types(spec),
    });
    if spec.model
        && let Some(fields) = listed.as_object_mut()
    {
        // Sapwood's extension: its name is a model's, which need not be an identifier.
        fields.insert("model".into(), true.into());
    }
    listed
}

fn input(input: &InputSpec) -> Value {
    json!({
        "name": input.name.as_str(),
        "aliases": names(&input.aliases),
        "mimetypes": mimes(&input.mimes),
        "required": input.required,
        "schema": input.schema,
    })
}

fn output(output: &OutputSpec) -> Value {
    json!({
        "name": output.wire.as_str(),
        "aliases": names(&output.aliases),
        "mimetypes": mimes(&output.mimes),
        "schema": output.schema,
        // Sapwood's extension, so that a remote function has the same spec (KE-706): the name of the port in a kernel,
        // and whether it has parts.
        "port": output.port.as_str(),
        "many": output.many,
    })
}

fn names(names: &[Name]) -> Vec<&str> {
    names.iter().map(|name| name.as_str()).collect()
}

fn mimes(mimes: &[Mime]) -> Vec<&str> {
    mimes.iter().map(Mime::as_str).collect()
}
