//! Removes nodes whose time to live (TTL) has expired (EV-912).
//!
//! A TTL applies to a node and all nodes below it at the time of expiry; a node covered by several TTLs lives until the
//! latest. Expiry times are rounded up to the next second, so that a session is swept once a second at most.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use ahash::RandomState;
use prost::Message as _;

use super::SessionMachine;
use super::closure::Closure;
use super::dropping::NodeFate;
use super::leaves::ReadPurpose;
use super::port::{ActionKey, NodeKey};
use super::reserved::TTL_INPUT;
use super::serve::{OPTIONS, type_name};
use super::store::Store;
use crate::evergreen::{Action, Param, Reason, Status};
use crate::time::Time;

/// Expiry times of the nodes with a TTL of their own.
#[derive(Debug, Default)]
pub(super) struct Ttls {
    order: BTreeSet<(Time, NodeKey)>,
    until: HashMap<NodeKey, Time, RandomState>,
}

impl Ttls {
    /// When the next node expires.
    pub(super) fn next(&self) -> Option<Time> {
        self.order.first().map(|(at, _)| *at)
    }

    fn set(&mut self, node: NodeKey, at: Time) {
        let before = self.until.get(&node).copied();
        if before.is_some_and(|before| before >= at) {
            return;
        }
        if let Some(before) = before {
            self.order.remove(&(before, node));
        }
        self.order.insert((at, node));
        self.until.insert(node, at);
    }

    fn due(&mut self, now: Time) -> Vec<NodeKey> {
        let mut due = Vec::new();
        while let Some(&(at, node)) = self.order.first()
            && at <= now
        {
            self.order.pop_first();
            self.until.remove(&node);
            due.push(node);
        }
        due
    }

    fn purge_removed(&mut self, store: &Store) {
        let retained = |node: &NodeKey| store.get(*node).fate == NodeFate::Retained;
        self.until.retain(|node, _| retained(node));
        self.order.retain(|(_, node)| retained(node));
    }

    fn others<'a>(&'a self, store: &'a Store) -> impl Iterator<Item = NodeKey> + 'a {
        let nodes = self.until.keys().copied();
        nodes.filter(|node| store.get(*node).fate == NodeFate::Retained)
    }
}

impl SessionMachine {
    /// Handles SET_TTL: an input `node`, and the duration as a config or as an input `ttl`. `None`: the input is not
    /// read yet.
    pub(super) fn set_ttl(
        &mut self,
        key: ActionKey,
        action: &Action,
        now: Time,
    ) -> Option<Result<String, Status>> {
        let given = |name: &str| action.inputs.iter().find(|param| &*param.name == name);
        let Some(node) = given("node") else {
            let message = "SET_TTL needs the input node: the id of what is to go";
            let status = Status::new(Reason::MissingInput, message);
            return Some(Err(status.with("param", "node")));
        };
        let own = action.configs.iter().map(|any| (type_name(any), any));
        let mut own = own.filter(|(name, _)| *name != OPTIONS);
        if let Some((name, _)) = own.clone().find(|(name, _)| *name != DURATION) {
            let message = format!("SET_TTL takes no config {name:?}");
            return Some(Err(Status::new(Reason::UnknownConfig, message)));
        }
        let node = self.store.find(&node.id);
        match (given(TTL_INPUT), own.next()) {
            (Some(Param { id, .. }), _) => {
                self.read_leaf(Some(key), id, ReadPurpose::Ttl(node), now)
            }
            (None, Some((_, any))) => {
                let sent = prost_types::Duration::decode(&*any.value).ok();
                let ttl = sent.and_then(|sent| Duration::try_from(sent).ok());
                Some(
                    ttl.ok_or_else(bad_ttl)
                        .map(|ttl| self.live_for(node, ttl, now)),
                )
            }
            (None, None) => {
                let message = format!("SET_TTL needs the input ttl, or a config {DURATION}");
                let status = Status::new(Reason::MissingInput, message);
                Some(Err(status.with("param", TTL_INPUT)))
            }
        }
    }

    /// Handles the input `ttl` of SET_TTL once it is read.
    pub(super) fn ttl_was_read(
        &mut self,
        node: Option<NodeKey>,
        text: &[u8],
        since: Time,
    ) -> Result<String, Status> {
        let ttl = parse(text).ok_or_else(bad_ttl)?;
        Ok(self.live_for(node, ttl, since))
    }

    /// Sets a TTL. An unknown or removed node is not an error.
    fn live_for(&mut self, node: Option<NodeKey>, ttl: Duration, since: Time) -> String {
        let node = node.filter(|node| self.store.get(*node).fate == NodeFate::Retained);
        if let Some(node) = node {
            let limits = &self.config.limits;
            let ttl = ttl.min(limits.max_ttl);
            // Removed nodes keep their entries until they expire, and may be followed by any number of others.
            if self.ttls.until.len() > 2 * limits.max_nodes {
                self.ttls.purge_removed(&self.store);
            }
            self.ttls.set(
                node,
                if ttl.is_zero() {
                    since
                } else {
                    next_second(since + ttl)
                },
            );
        }
        format!("{{\"set\":{}}}", node.is_some())
    }

    /// Drops the nodes that have expired.
    pub(super) fn expire(&mut self, now: Time) {
        if self.ttls.next().is_none_or(|at| at > now) || self.is_closed() {
            return;
        }
        let due = self.ttls.due(now);
        let others = Closure::new(&self.store, self.ttls.others(&self.store));
        // If the closure of the other nodes is too large to be searched, expired nodes are retained and checked again
        // later.
        let Some(covered) = others.into_all() else {
            for node in due {
                self.ttls.set(node, next_second(now + AGAIN));
            }
            return;
        };
        // Each edge of a removed node is followed only once, so this needs no budget.
        let marked: Vec<(NodeKey, bool)> = Closure::beside(&self.store, due, covered)
            .map(|node| (node, false))
            .collect();
        self.drop_nodes(&marked);
    }
}

fn next_second(at: Time) -> Time {
    let at = at.since_origin();
    let more = u64::from(at.subsec_nanos() > 0);
    Time::new(Duration::from_secs(at.as_secs().saturating_add(more)))
}

/// Parses a duration in the JSON mapping of protobuf: `"30s"`, `"1.5s"`.
fn parse(text: &[u8]) -> Option<Duration> {
    let text: String = serde_json::from_slice(text).ok()?;
    let (whole, part) = match text.strip_suffix('s')?.split_once('.') {
        Some((whole, part)) => (whole, part),
        None => (text.strip_suffix('s')?, "0"),
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || whole.len() > 12 || part.len() > 9 {
        return None;
    }
    let nanos = format!("{part:0<9}").parse().ok()?;
    Some(Duration::new(whole.parse().ok()?, nanos))
}

fn bad_ttl() -> Status {
    let message = "ttl is negative or no duration; send for example \"30s\"";
    Status::new(Reason::BadConfig, message).with_field("ttl", "a duration of 0 or more")
}

/// How long to wait before an undecided expiry is checked again.
const AGAIN: Duration = Duration::from_secs(60);
const DURATION: &str = "google.protobuf.Duration";
