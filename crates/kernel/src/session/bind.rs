//! Binds a received action to a function: its inputs, outputs and options (EV-502 to EV-504, EV-509).

use std::sync::Arc;

use bytestring::ByteString;
use futures::{StreamExt, stream};
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::session::{ActionStart, NodeKey};
use serde_json::{Map, Value};

use super::config::Configs;
use super::input::FlattenedInput;
use super::link::SessionLink;
use super::output::{AnswerShape, Outputs};
use super::reference::SessionFetcher;
use super::signals::InputSignals;
use super::wire;
use super::{GENERATE, SessionOptions};
use crate::Result;
use crate::chunk::Chunk;
use crate::error::Error;
use crate::function::Fun;
use crate::kernel::Kernel;
use crate::limits::{CHOICES_MAX, JSON_VALUE_BYTES};
use crate::model;
use crate::name::Name;
use crate::node::{Demand, Node, gather};
use crate::run::Run;
use crate::run::begin::set_up_function;
use crate::spec::Spec;

/// An action that is ready to run.
pub(super) struct BoundAction {
    pub(super) run: Run,
    pub(super) outputs: Outputs,
    pub(super) signals: Arc<InputSignals>,
}

/// Binds an action to `function`: looks everything up and checks it. Nothing is read and nothing starts (KE-141).
///
/// # Errors
/// `UNKNOWN_PARAM`, `DUPLICATE_PARAM`, `MISSING_INPUT`, and those of the configs.
pub(super) fn bind(
    kernel: &Kernel,
    function: Fun,
    options: &SessionOptions,
    link: &SessionLink,
    references: Option<&SessionFetcher>,
    start: &ActionStart,
) -> Result<BoundAction> {
    let spec = function.spec();
    let configs = Configs::read(spec, &start.configs)?;
    let shape = Arc::new(AnswerShape::default());
    let signals = Arc::new(InputSignals::default());
    let mut outputs = Outputs::new(start.action, Arc::clone(&shape));
    for (name, node) in &start.outputs {
        bind_output(spec, &mut outputs, name, *node)?;
    }
    let mut args: Vec<(Name, Node)> = Vec::with_capacity(start.inputs.len() + 2);
    let target = target(spec, options, start);
    for (name, node) in &start.inputs {
        let declared = spec.input(name);
        // The input is not even read: the action's own target wins (EV-503).
        if target.is_some() && declared.is_some_and(|input| input.name == *TARGET) {
            continue;
        }
        let node = FlattenedInput::node(
            link.clone(),
            *node,
            start.action,
            Arc::clone(&signals),
            references.cloned(),
            // An input that is not declared is refused below; until then it counts as gathered, the costlier case.
            declared.is_none_or(|input| !input.streams),
        );
        args.push((Name::shared(name), node));
    }
    if let Some(target) = target {
        args.push((Name::new(TARGET), Node::from(target)));
    }
    if spec.input(CONFIG).is_some() {
        // Only with such an input; `Configs::read` has refused a config for any other function.
        merge_config(&mut args, configs.function, shape);
    }
    let mut setup = set_up_function(kernel, function, args)?;
    let wanted = Demand::default();
    outputs.ports().for_each(|port| wanted.add(Some(port)));
    setup.demand = Some(Arc::new(wanted));
    // The machine's deadline counts from the receipt of the action (EV-950), so what has passed since is subtracted.
    let left = start.deadline.map(|deadline| deadline - link.now());
    let mut run = Run::calling(Ok(setup));
    if let Some(timeout) = left.into_iter().chain(configs.timeout).min() {
        run = run.timeout(timeout);
    }
    // Fails here and not at the first poll, so that the error is the reply to the action and nothing is polled.
    run.check()?;
    Ok(BoundAction {
        run,
        outputs,
        signals,
    })
}

fn bind_output(spec: &Spec, outputs: &mut Outputs, name: &ByteString, node: NodeKey) -> Result<()> {
    let declared = spec.output_on_wire(name).filter(|_| !name.is_empty());
    // The output for trailing metadata can be requested of every function (KE-305).
    let trailing = (*name == *wire::META).then(wire::meta_output);
    let Some(output) = declared.or(trailing.as_ref()) else {
        let names: Vec<&str> = spec
            .outputs
            .iter()
            .map(|output| output.wire.as_str())
            .collect();
        let why = format!(
            "{} has no such output; it has: {}",
            spec.name,
            names.join(", ")
        );
        return Err(Error::argument(Name::shared(name), why).because(ErrorReason::UNKNOWN_PARAM));
    };
    if outputs.ports().any(|port| *port == output.port) {
        return Err(Error::argument(Name::shared(name), "given twice")
            .because(ErrorReason::DUPLICATE_PARAM));
    }
    outputs.bind(output, node);
    Ok(())
}

/// EV-503: the action's target, else the server's default; an input `target` counts only where the action has none.
fn target(spec: &Spec, options: &SessionOptions, start: &ActionStart) -> Option<String> {
    spec.input(TARGET)?;
    if !start.target.is_empty() {
        return Some(start.target.to_string());
    }
    let given = start.inputs.iter().any(|(name, _)| *name == *TARGET);
    options
        .default_target
        .clone()
        .filter(|_| !given && spec.name == *GENERATE)
}

/// Merges the entry of `configs` with the input `config`, which overrides it field by field (EV-601). What the shape of
/// the outputs depends on is read on the way.
fn merge_config(
    args: &mut Vec<(Name, Node)>,
    sent: Option<Map<String, Value>>,
    shape: Arc<AnswerShape>,
) {
    // Only the first: a second `config` stays in `args`, where it is refused as a duplicate.
    let given = args
        .iter()
        .position(|(name, _)| *name == *CONFIG)
        .map(|index| args.remove(index).1);
    let Some(given) = given else {
        if let Some(sent) = sent {
            note_shape(&sent, &shape);
            args.push((Name::new(CONFIG), Node::from(Value::Object(sent))));
        }
        return;
    };
    // Lazy: the input may arrive long after the action, and nothing is read before the first poll (KE-141).
    let merged = stream::once(async move {
        // Bounded before it is parsed, as every JSON input of a model: a tree of a few kilobytes may be read as hundreds
        // of megabytes, and their values take many times that.
        let (_, text) = gather(given.main().read(), "json_value_bytes", JSON_VALUE_BYTES).await?;
        let mut merged = sent.unwrap_or_default();
        let Some(Value::Object(over)) = model::parse(CONFIG, &text)? else {
            let rejection = Error::argument(CONFIG, "must be a JSON object");
            return Err(rejection.because(ErrorReason::BAD_CONFIG));
        };
        merged.extend(over);
        note_shape(&merged, &shape);
        Chunk::json(&Value::Object(merged))
    });
    args.push((Name::new(CONFIG), Node::new(merged.boxed())));
}

/// D-25: several answers are a tree, and so are those of a controller, which may fork.
fn note_shape(config: &Map<String, Value>, shape: &AnswerShape) {
    if model::is_tree(config) {
        let n = config.get("n").and_then(Value::as_u64).unwrap_or(1);
        // The function refuses a number that is too large; until then this bounds the nodes that are created for it.
        let n = n.clamp(1, CHOICES_MAX.into());
        shape.set_tree(u32::try_from(n).unwrap_or(1));
    }
}

const CONFIG: &str = "config";
const TARGET: &str = "target";
