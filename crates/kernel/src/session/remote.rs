//! Actions of the peer as functions of a kernel (KE-706, KE-801, EV-971, EV-811).
//!
//! ```text
//!   call ─► writers for inputs, action ─► poll: inputs are pumped, outputs read ─► chunks, meta at the end
//!              └─ nodes that the peer holds already go by id (KE-802)
//! ```

mod input;
mod output;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::stream::FuturesUnordered;
use futures::{Stream, StreamExt};
use prost::Message;
use sapwood_proto::code::Code;
use sapwood_proto::error_reason::ErrorReason;
use sapwood_proto::evergreen::Status;
use sapwood_proto::generated::sapwood::v1::ActionOptions;
use sapwood_proto::steer::ControllerChoice;
use sapwood_session::peer::{CallRequest, PeerCall as Asked, PeerHandle};
use serde_json::Value;

use self::input::InputPump;
use self::output::RemoteOutput;
use super::GENERATE;
use super::failure;
use super::wire::META;
use crate::call::{Call, Instant};
use crate::chunk::Chunk;
use crate::error::Error;
use crate::function::Fun;
use crate::handler::{raw, streamed};
use crate::model::{self, SamplingDefaults};
use crate::name::Name;
use crate::node::Node;
use crate::spec::{self, Spec};
use crate::steering::SteerRights;
use crate::{Chunks, Result};

pub(crate) use self::input::SentInputs;

/// The function of this spec, called at `peer`; a model that generates is called through GENERATE. Data that one function has sent or
/// received is not sent again as an input of another one with the same `pending`.
pub(crate) fn function(peer: PeerHandle, spec: Spec, pending: &Arc<SentInputs>) -> Fun {
    let (action, target) = if spec.generates() {
        (GENERATE.to_owned(), spec.name.to_string())
    } else {
        (spec.name.to_string(), String::new())
    };
    let remote = Arc::new(RemoteFunction {
        peer,
        action,
        target,
        outputs: spec.outputs.clone(),
        retained: Arc::clone(pending),
    });
    raw(spec, move |call| {
        let remote = Arc::clone(&remote);
        streamed(async move { remote.begin(call).await })
    })
}

/// One remote function.
struct RemoteFunction {
    peer: PeerHandle,
    action: String,
    target: String,
    outputs: Vec<spec::OutputSpec>,
    retained: Arc<SentInputs>,
}

impl RemoteFunction {
    async fn begin(&self, call: Call) -> Result<RemoteRun> {
        let config = config(&call).await?;
        let written = match &config {
            Some(node) => node.whole().await?,
            None => Bytes::new(),
        };
        if self.action == GENERATE {
            check_controller(call.extensions.get(), &written)?;
        }
        // Needed before the outputs are read: their children are choices or parts, and the wire does not say which.
        let tree = is_tree(&written);
        let mut request = CallRequest {
            name: self.action.clone(),
            target: self.target.clone(),
            ..CallRequest::default()
        };
        self.bound(&call, &mut request);
        let mut pumps = Vec::new();
        for (name, node) in call.inputs.iter() {
            // The typed config was encoded above, and replaces an input that has no bytes.
            let node = config.as_ref().filter(|_| *name == *CONFIG).unwrap_or(node);
            let (id, pump) = input::hand_over(&self.peer, &self.retained, node, role(name))
                .map_err(to_kernel_error)?;
            request.inputs.push((name.to_string(), id));
            pumps.extend(pump);
        }
        // A peer without trailing metadata sends it as output `meta`, so that is always requested (KE-305).
        let wanted = self
            .outputs
            .iter()
            .filter(|output| output.port == *META || call.want.ports.has(&output.port));
        let wanted: Vec<_> = wanted.collect();
        request.outputs = wanted
            .iter()
            .map(|output| output.wire.to_string())
            .collect();
        let asked = self.peer.call(request).map_err(to_kernel_error)?;
        let outputs = wanted.into_iter().filter_map(|output| {
            let node = asked.output(&output.wire)?;
            Some(RemoteOutput::new(
                output.port.clone(),
                node,
                tree,
                call.want.inner,
            ))
        });
        let outputs = outputs.collect();
        Ok(RemoteRun {
            outputs,
            next: 0,
            pumps: pumps.into_iter().collect(),
            meta_wanted: call.want.ports.has(META),
            _asked: asked,
        })
    }

    /// Sends the deadline along if the peer enforces deadlines (EV-950).
    fn bound(&self, call: &Call, request: &mut CallRequest) {
        let Some(deadline) = call.deadline.filter(|_| self.peer.deadlines) else {
            return;
        };
        // A span and not an instant, because the clocks of the two sides are not related.
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(timeout) = prost_types::Duration::try_from(left) else {
            return;
        };
        let value = ActionOptions {
            timeout: Some(timeout),
        }
        .encode_to_vec();
        let type_url = "type.googleapis.com/sapwood.v1.ActionOptions".to_owned();
        request.configs.push(prost_types::Any { type_url, value });
    }
}

/// A remote call in progress. Dropping it requests the peer to stop (EV-974).
struct RemoteRun {
    /// Dropped first: the action must be cancelled before its inputs end, or it would fail.
    _asked: Asked,
    outputs: Vec<RemoteOutput>,
    /// The output that is polled first, round robin.
    next: usize,
    pumps: FuturesUnordered<InputPump>,
    meta_wanted: bool,
}

impl Stream for RemoteRun {
    type Item = Result<Chunk>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // Inputs first: the peer may need them before it can answer.
        while let Poll::Ready(Some(sent)) = this.pumps.poll_next_unpin(cx) {
            if let Err(error) = sent {
                return Poll::Ready(Some(Err(error)));
            }
        }
        let count = this.outputs.len();
        let mut open = false;
        for turn in 0..count {
            let index = (this.next + turn) % count;
            match this.outputs[index].poll(cx) {
                Poll::Pending => open = true,
                Poll::Ready(None) => {}
                Poll::Ready(Some(item)) => {
                    // Round robin: an output that is always ready must not starve the others.
                    this.next = (index + 1) % count;
                    let hidden = !this.meta_wanted && this.outputs[index].port() == META;
                    return Poll::Ready(Some(
                        item.map(|chunk| if hidden { output::bare(chunk) } else { chunk }),
                    ));
                }
            }
        }
        if open {
            Poll::Pending
        } else {
            Poll::Ready(None)
        }
    }
}

/// EV-971: text for a model without a role has the role of the user.
fn role(input: &str) -> Option<&'static str> {
    matches!(input, "prompt" | "text").then_some("USER")
}

/// The input `config` in JSON, for the peer. The typed value of a face in this process has no bytes, so it is encoded
/// here.
async fn config(call: &Call) -> Result<Option<Node>> {
    match model::typed_config(call).await? {
        Some(config) => {
            let config = config.settled(&SamplingDefaults::default())?;
            let written = Value::Object(config.to_json()?);
            Ok(Some(Chunk::json(&written)?.into()))
        }
        None => Ok(call.inputs.get(CONFIG).cloned()),
    }
}

/// Refuses a controller of the peer to callers who may not run every controller: the peer decides by the rights of this
/// server, which may be more than the caller's (AI-902). Constraints are for everybody.
fn check_controller(rights: Option<&SteerRights>, config: &[u8]) -> Result<()> {
    // Without rights it is a call of this process itself.
    if rights.is_none_or(|rights| rights.is_admin || rights.may_control) {
        return Ok(());
    }
    // The whole value, and not only the members that are looked for: what cannot be read here might be read there.
    let fields = match model::parse(CONFIG, config)? {
        None => return Ok(()),
        Some(Value::Object(fields)) => fields,
        Some(_) => {
            let why = "must be a JSON object";
            return Err(Error::argument(CONFIG, why).because(ErrorReason::BAD_CONFIG));
        }
    };
    let mut controllers = fields
        .iter()
        .filter(|(name, value)| model::snake(name) == "controller" && !value.is_null());
    let is_constraint = |value: &Value| {
        let choice = ControllerChoice::from_json(value, None);
        choice.is_ok_and(|choice| choice.id.starts_with(CONSTRAINT_PREFIX))
    };
    if controllers.all(|(_, value)| is_constraint(value)) {
        return Ok(());
    }
    Err(Error::Engine {
        code: Code::PermissionDenied,
        reason: ErrorReason::INSUFFICIENT_SCOPE,
        message: "running a controller of another server needs scope control".to_owned(),
        retry_after: None,
    })
}

/// What the names of native constraints begin with (AI-840).
const CONSTRAINT_PREFIX: &str = "sapwood:";

/// Whether the answers of a model with this config are a tree (D-25).
fn is_tree(config: &[u8]) -> bool {
    // Without a tree of the rest, which may be long.
    #[derive(serde::Deserialize)]
    struct Asked {
        n: Option<u64>,
        controller: Option<serde::de::IgnoredAny>,
    }
    let asked = serde_json::from_slice::<Asked>(config);
    asked.is_ok_and(|asked| asked.n.is_some_and(|n| n > 1) || asked.controller.is_some())
}

pub(crate) fn to_kernel_error(status: Status) -> Error {
    failure::error(&status)
}

/// The chunks of a node that is read in this process.
fn read(node: &Node) -> Chunks {
    node.main().read()
}

/// The only input that is read in this process.
pub(super) const CONFIG: &str = "config";
/// Name of the peer in errors.
pub(super) const PEER: Name = Name::new("the peer");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_902_a_controller_of_another_server_needs_the_scope_control() {
        let [mut control, mut admin] = [SteerRights::nobody(), SteerRights::nobody()];
        (control.may_control, admin.is_admin) = (true, true);
        for (config, passes) in [
            ("", true),
            ("{}", true),
            (r#"{"n": 2, "controller": null}"#, true),
            (r#"{"controller": "sapwood:regex"}"#, true),
            (
                r#"{"controller": {"id": "sapwood:regex", "arg": "a+"}}"#,
                true,
            ),
            (r#"{"controller": "sapwood"}"#, false),
            (r#"{"controller": "ann.picker"}"#, false),
            (r#"{"controller": {"module": "ann.picker"}}"#, false),
            (
                r#"{"controller": {"id": "sapwood:regex", "module": "x"}}"#,
                false,
            ),
            (r#"{"controller": 1}"#, false),
            (
                r#"{"controller": "sapwood:regex", "controller": "x"}"#,
                false,
            ),
            (r#"["x"]"#, false),
            (r#"{"controller": "x""#, false),
        ] {
            let check = |rights: Option<&SteerRights>| check_controller(rights, config.as_bytes());
            assert_eq!(
                check(Some(&SteerRights::nobody())).is_ok(),
                passes,
                "{config}"
            );
            for rights in [None, Some(&control), Some(&admin)] {
                assert!(check(rights).is_ok(), "{config}");
            }
        }
        let refused = check_controller(Some(&SteerRights::nobody()), br#"{"controller": "x"}"#);
        let refused = refused.unwrap_err();
        assert_eq!(
            (refused.code(), refused.known_reason()),
            (Code::PermissionDenied, ErrorReason::INSUFFICIENT_SCOPE)
        );
    }
}
