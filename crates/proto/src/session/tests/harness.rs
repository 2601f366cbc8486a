//! Helpers of the session's tests: short constructors of messages, and a peer that reads everything.

use std::sync::Arc;

use bytes::Bytes;

use crate::evergreen::{
    Action, Chunk, Fragment, Metadata, MetadataMode, NodeId, Param, Payload, Reason, SessionLimits,
    Status, WireMessage,
};
use crate::session::{
    ActionKey, ActionStart, Config, CursorId, CursorRead, NodeKey, SessionMachine, SessionOutput,
    Side,
};
use crate::time::Time;

pub(crate) const T0: Time = Time::ZERO;

/// The last fragment of a leaf with `text/plain` metadata at seq 0: `leaf("p", 0, "hi")`.
pub(crate) fn leaf(id: &str, seq: i32, data: &str) -> Fragment {
    let metadata = (seq == 0).then(|| Arc::new(Metadata::of("text/plain")));
    Fragment {
        last: true,
        ..chunk(id, seq, metadata, Some(data))
    }
}

/// A leaf fragment that is not the last.
pub(crate) fn more(id: &str, seq: i32, data: &str) -> Fragment {
    Fragment {
        last: false,
        ..leaf(id, seq, data)
    }
}

/// A leaf fragment, not the last, with exactly this metadata and data.
pub(crate) fn chunk(
    id: &str,
    seq: i32,
    metadata: Option<Arc<Metadata>>,
    data: Option<&str>,
) -> Fragment {
    let payload = data.map(|data| Payload::Data(Bytes::copy_from_slice(data.as_bytes())));
    Fragment {
        id: NodeId::from(id),
        seq,
        chunk: Some(Chunk { metadata, payload }),
        ..Fragment::default()
    }
}

/// The last fragment of a tree.
pub(crate) fn tree(id: &str, seq: i32, children: &[&str]) -> Fragment {
    let children = children.iter().map(|&child| NodeId::from(child)).collect();
    Fragment {
        id: NodeId::from(id),
        seq,
        last: true,
        children,
        ..Fragment::default()
    }
}

/// A tree fragment that is not the last.
pub(crate) fn branch(id: &str, seq: i32, children: &[&str]) -> Fragment {
    Fragment {
        last: false,
        ..tree(id, seq, children)
    }
}

/// A fragment without content (EV-210).
pub(crate) fn empty(id: &str, seq: i32, last: bool) -> Fragment {
    Fragment {
        id: NodeId::from(id),
        seq,
        last,
        ..Fragment::default()
    }
}

pub(crate) fn of(mimetype: &str, role: &str) -> Option<Arc<Metadata>> {
    Some(Arc::new(Metadata::of(mimetype).with_role(role)))
}

/// An action with inputs and outputs given as `name=id`, blank separated.
pub(crate) fn action(name: &str, inputs: &str, outputs: &str) -> Action {
    let params = |text: &str| -> Vec<Param> {
        let pairs = text
            .split_whitespace()
            .filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, id)| Param::new(name, id)).collect()
    };
    Action {
        name: name.into(),
        inputs: params(inputs),
        outputs: params(outputs),
        ..Action::default()
    }
}

pub(crate) fn fragments(list: impl IntoIterator<Item = Fragment>) -> WireMessage {
    WireMessage {
        fragments: list.into_iter().collect(),
        ..WireMessage::default()
    }
}

pub(crate) fn actions(list: impl IntoIterator<Item = Action>) -> WireMessage {
    WireMessage {
        actions: list.into_iter().collect(),
        ..WireMessage::default()
    }
}

/// A server session with everything at its default.
pub(crate) fn server() -> SessionMachine {
    server_with(|_, _| {})
}

/// A server session with changed limits or configuration.
pub(crate) fn server_with(change: impl FnOnce(&mut Config, &mut SessionLimits)) -> SessionMachine {
    let (mut config, mut limits) = (
        Config {
            entropy: 7,
            ..Config::default()
        },
        SessionLimits::default(),
    );
    change(&mut config, &mut limits);
    config.limits = Arc::new(limits);
    SessionMachine::new(Side::Server, config, T0)
}

pub(crate) fn mode(mode: MetadataMode) -> SessionMachine {
    server_with(|config, _| config.metadata = mode)
}

/// Handles one fragment per message; the reason of the first abort, if any.
pub(crate) fn feed(
    session: &mut SessionMachine,
    list: impl IntoIterator<Item = Fragment>,
) -> Result<(), Reason> {
    for fragment in list {
        session
            .handle(fragments([fragment]), T0)
            .map_err(|status| reason(&status))?;
    }
    Ok(())
}

/// Handles one action; the reason of the abort, if any.
pub(crate) fn act(session: &mut SessionMachine, one: Action) -> Result<(), Reason> {
    session
        .handle(actions([one]), T0)
        .map_err(|status| reason(&status))
}

pub(crate) fn reason(status: &Status) -> Reason {
    status.known().expect("a reason of ours")
}

/// All outputs of the machine that are pending now.
pub(crate) fn outputs(session: &mut SessionMachine) -> Vec<SessionOutput> {
    std::iter::from_fn(|| session.poll()).collect()
}

/// The actions that are to be started now.
pub(crate) fn starts(session: &mut SessionMachine) -> Vec<ActionStart> {
    let started = outputs(session)
        .into_iter()
        .filter_map(|output| match output {
            SessionOutput::Start(start) => Some(*start),
            _ => None,
        });
    started.collect()
}

/// The one action that is to be started now.
pub(crate) fn start(session: &mut SessionMachine) -> ActionStart {
    let mut all = starts(session);
    assert_eq!(all.len(), 1, "one action starts");
    all.remove(0)
}

/// Everything that would be sent now, in order.
pub(crate) fn sent(session: &mut SessionMachine) -> Vec<Fragment> {
    std::iter::from_fn(|| session.next_message(T0))
        .flat_map(|message| message.fragments)
        .collect()
}

/// An item as tests compare it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Item {
    pub(crate) mimetype: String,
    pub(crate) role: String,
    pub(crate) data: Vec<u8>,
}

pub(crate) fn item(mimetype: &str, role: &str, data: &str) -> Item {
    Item {
        mimetype: mimetype.into(),
        role: role.into(),
        data: data.into(),
    }
}

/// How a read stopped.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stop {
    End,
    Pending,
    /// At a reference to this URI.
    At(String),
    Failed(Reason),
}

/// Reads on until the cursor stops, adding to `items`.
pub(crate) fn drain(session: &mut SessionMachine, cursor: CursorId, items: &mut Vec<Item>) -> Stop {
    loop {
        match session.nodes().read(cursor) {
            CursorRead::Piece(piece) => {
                if piece.first {
                    assert_eq!(piece.item as usize, items.len(), "items are counted");
                    items.push(item(&piece.metadata.mimetype, &piece.metadata.role, ""));
                }
                let last = items.last_mut().expect("an item has begun");
                last.data.extend_from_slice(&piece.data);
            }
            CursorRead::Reference(reference) => {
                return Stop::At(reference.content.uri().to_owned());
            }
            CursorRead::Pending => return Stop::Pending,
            CursorRead::Busy => session.nodes().begin_turn(),
            CursorRead::End => return Stop::End,
            CursorRead::Failed(status) => return Stop::Failed(reason(&status)),
        }
    }
}

/// The content of a node as far as it can be read now.
pub(crate) fn content(session: &mut SessionMachine, id: &str) -> (Vec<Item>, Stop) {
    let node = session.nodes().node(id).expect("a legal id");
    read_node(session, node, None)
}

pub(crate) fn read_node(
    session: &mut SessionMachine,
    node: NodeKey,
    reader: Option<ActionKey>,
) -> (Vec<Item>, Stop) {
    let cursor = session.nodes().open(node, reader);
    let mut items = Vec::new();
    let stop = drain(session, cursor, &mut items);
    session.nodes().close(cursor);
    (items, stop)
}

/// The texts of a complete node's items.
pub(crate) fn texts(session: &mut SessionMachine, id: &str) -> Vec<String> {
    let (items, stop) = content(session, id);
    assert_eq!(stop, Stop::End, "{id} is complete");
    items
        .into_iter()
        .map(|item| String::from_utf8(item.data).expect("text"))
        .collect()
}

/// Every order of `list`.
pub(crate) fn orders<T: Clone>(list: &[T]) -> Vec<Vec<T>> {
    if list.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (at, first) in list.iter().enumerate() {
        let mut rest = list.to_vec();
        rest.remove(at);
        for mut order in orders(&rest) {
            order.insert(0, first.clone());
            all.push(order);
        }
    }
    all
}
