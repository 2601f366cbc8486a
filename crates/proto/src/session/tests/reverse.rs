//! Section 8.3: actions that a server sends to its client, with the roles swapped.

use std::collections::VecDeque;
use std::time::Duration;

use super::harness::*;
use crate::evergreen::{Reason, SessionLimits, WireMessage};
use crate::session::{
    ActionKey, ActionRequest, ActionStart, Config, CursorId, CursorRead, NodeKey, SessionMachine,
    SessionOutput, Side,
};
use crate::time::Time;

const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A server and its client, connected directly.
struct Pair {
    server: SessionMachine,
    client: SessionMachine,
}

/// An action that the server has sent: its key, its input, its output.
#[derive(Clone, Copy)]
struct Asked {
    action: ActionKey,
    input: NodeKey,
    output: NodeKey,
}

fn pair(change: impl FnOnce(&mut Config, &mut SessionLimits)) -> Pair {
    let config = Config {
        entropy: u64::MAX,
        partial_failure: true,
        ..Config::default()
    };
    Pair {
        server: server_with(change),
        client: SessionMachine::new(Side::Client, config, T0),
    }
}

impl Pair {
    fn ask(&mut self) -> Asked {
        self.try_ask().expect("the client can be asked")
    }

    fn try_ask(&mut self) -> Result<Asked, Reason> {
        let input = self.server.nodes().make(None).unwrap();
        let output = self.server.calls().expect().unwrap();
        let call = ActionRequest {
            name: "look".into(),
            inputs: vec![("q".into(), input)],
            outputs: vec![("a".into(), output)],
            ..ActionRequest::default()
        };
        let action = self
            .server
            .calls()
            .call(call)
            .map_err(|status| reason(&status))?;
        Ok(Asked {
            action,
            input,
            output,
        })
    }

    /// Delivers all pending messages to the other side.
    fn down(&mut self) {
        while let Some(message) = self.server.next_message(T0) {
            self.client.handle(message, T0).unwrap();
        }
    }

    fn up(&mut self) -> Result<(), Reason> {
        while let Some(message) = self.client.next_message(T0) {
            let taken = self.server.handle(message, T0);
            taken.map_err(|status| reason(&status))?;
        }
        Ok(())
    }

    fn question(&mut self, asked: Asked) {
        let text = of("text/plain", "").unwrap();
        self.server
            .nodes()
            .write(asked.input, &text, "where?".into())
            .unwrap();
        self.server.nodes().end(asked.input, &text).unwrap();
    }

    fn answer(&mut self, start: &ActionStart, text: &str) {
        let plain = of("text/plain", "").unwrap();
        let output = start.outputs[0].1;
        self.client
            .nodes()
            .write(output, &plain, text.to_owned().into())
            .unwrap();
        self.client.calls().finish(start.action);
    }

    fn time(&mut self, at: Duration) {
        let _ = self.server.wake_at(Time::new(at));
        self.server.tick(Time::new(at));
    }
}

fn stop(session: &mut SessionMachine, cursor: CursorId) -> Stop {
    drain(session, cursor, &mut Vec::new())
}

/// EV-103, EV-216
#[test]
fn ev_811_ids_are_the_servers_and_all_node_rules_hold_with_roles_swapped() {
    let mut pair = pair(|_, _| {});
    let asked = pair.ask();
    pair.question(asked);
    pair.down();
    let begun = start(&mut pair.client);
    for key in [begun.inputs[0].1, begun.outputs[0].1] {
        let id = pair.client.id(key).unwrap();
        assert!(id.starts_with('~'), "{id}");
    }
    let (items, end) = read_node(&mut pair.client, begun.inputs[0].1, Some(begun.action));
    assert_eq!(
        (items, end),
        (vec![item("text/plain", "", "where?")], Stop::End)
    );
    let cursor = pair.server.nodes().open(asked.output, None);
    assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
    pair.answer(&begun, "here");
    pair.up().unwrap();
    let received = outputs(&mut pair.server);
    let done =
        |output: &SessionOutput| matches!(output, SessionOutput::Done(key) if *key == asked.action);
    assert!(received.iter().any(done), "{received:?}");
    let mut items = Vec::new();
    assert_eq!(drain(&mut pair.server, cursor, &mut items), Stop::End);
    assert_eq!(items, [item("text/plain", "", "here")]);
    // Only the server writes the nodes that it produces.
    let id = pair.server.id(asked.input).unwrap().to_string();
    assert_eq!(
        feed(&mut pair.server, [leaf(&id, 1, "mine")]),
        Err(Reason::NodeOwner)
    );
}

#[test]
fn ev_811_an_answer_may_be_complete_before_it_is_read() {
    let mut pair = pair(|_, _| {});
    let asked = pair.ask();
    pair.down();
    let begun = start(&mut pair.client);
    pair.answer(&begun, "before the question");
    pair.up().unwrap();
    assert_eq!(pair.server.calls().unfinished(), 0);
    let (items, end) = read_node(&mut pair.server, asked.output, None);
    assert_eq!(
        (items, end),
        (
            vec![item("text/plain", "", "before the question")],
            Stop::End
        )
    );
}

#[test]
fn ev_811_a_late_answer_fails_that_call_alone() {
    let mut pair = pair(|_, limits| limits.reverse_timeout = WAIT_LIMIT);
    let (late, other) = (pair.ask(), pair.ask());
    let cursor = pair.server.nodes().open(late.output, None);
    assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
    assert!(
        outputs(&mut pair.server)
            .iter()
            .any(|received| matches!(received, SessionOutput::Timed))
    );
    assert_eq!(pair.server.wake_at(T0), Some(Time::new(WAIT_LIMIT)));
    pair.down();
    let begun = starts(&mut pair.client);
    pair.answer(&begun[1], "in time");
    pair.up().unwrap();
    pair.time(WAIT_LIMIT.checked_sub(Duration::from_millis(1)).unwrap());
    assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
    pair.time(WAIT_LIMIT);
    assert_eq!(
        stop(&mut pair.server, cursor),
        Stop::Failed(Reason::Deadline)
    );
    assert!(pair.server.aborted().is_none());
    // The input ends with the status for the client, and the client's late answer is ignored.
    pair.down();
    let (_, end) = read_node(&mut pair.client, begun[0].inputs[0].1, None);
    assert_eq!(end, Stop::Failed(Reason::Deadline));
    pair.answer(&begun[0], "too late");
    let before = pair.server.retained_bytes();
    pair.up().unwrap();
    assert_eq!(pair.server.retained_bytes(), before);
    assert!(pair.server.stats().discarded > 0);
    let (items, _) = read_node(&mut pair.server, other.output, None);
    assert_eq!(items, [item("text/plain", "", "in time")]);
    assert_eq!(pair.server.calls().unfinished(), 0);
}

#[test]
fn ev_811_the_time_limit_is_paused_without_a_connection() {
    let mut pair = pair(|config, limits| {
        config.resume = true;
        limits.reverse_timeout = WAIT_LIMIT;
        limits.resume_grace = WAIT_LIMIT * 3;
    });
    let asked = pair.ask();
    let cursor = pair.server.nodes().open(asked.output, None);
    assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
    let at = |times: u32| WAIT_LIMIT / 4 * times;
    pair.time(at(0));
    pair.server.lost(Time::new(at(1)));
    pair.time(at(9));
    assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
    // The time limit of an action sent without a connection has not begun either.
    let away = pair.ask();
    let away = pair.server.nodes().open(away.output, None);
    assert_eq!(stop(&mut pair.server, away), Stop::Pending);
    pair.server.returned(Time::new(at(10)));
    let have = leaf("h", 0, r#"{"nodes":{},"actions":0}"#);
    pair.server
        .handle(fragments([have]), Time::new(at(10)))
        .unwrap();
    let resume = action("RESUME", "have=h", "have=mine");
    pair.server
        .handle(actions([resume]), Time::new(at(10)))
        .unwrap();
    assert_eq!(
        pair.server.next_message(T0).unwrap().actions.len(),
        2,
        "sent again"
    );
    pair.time(at(10));
    pair.time(at(13) - Duration::from_millis(1));
    assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
    pair.time(at(13));
    assert_eq!(
        stop(&mut pair.server, cursor),
        Stop::Failed(Reason::Deadline)
    );
    assert_eq!(stop(&mut pair.server, away), Stop::Pending);
    pair.time(at(14));
    assert_eq!(stop(&mut pair.server, away), Stop::Failed(Reason::Deadline));
}

/// EV-810
#[test]
fn ev_974_an_abandoned_call_is_removed_and_sends_cancel_on_request_only() {
    for notify in [false, true] {
        let mut pair = pair(|_, _| {});
        let asked = pair.ask();
        let cursor = pair.server.nodes().open(asked.output, None);
        assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
        pair.down();
        let begun = start(&mut pair.client);
        pair.server.calls().abandon(asked.action, notify);
        pair.server.calls().abandon(asked.action, notify);
        assert_eq!(
            stop(&mut pair.server, cursor),
            Stop::Failed(Reason::Cancelled)
        );
        assert_eq!(pair.server.calls().unfinished(), 0);
        pair.down();
        let cancels = outputs(&mut pair.client).iter().any(
            |received| matches!(received, SessionOutput::Cancel { action, .. } if *action == begun.action),
        );
        assert_eq!(cancels, notify);
        pair.answer(&begun, "ignored");
        pair.up().unwrap();
        // A node that the client has bound as an input is not dropped.
        let again = pair.ask();
        let id = pair.server.id(again.output).unwrap().to_string();
        act(&mut pair.server, action("f", &format!("text={id}"), "o=o")).unwrap();
        pair.server.calls().abandon(again.action, false);
        feed(&mut pair.server, [leaf(&id, 0, "kept")]).unwrap();
        assert_eq!(texts(&mut pair.server, &id), ["kept"]);
    }
}

/// EV-109
#[test]
fn ev_812_calls_in_flight_are_cancelled_when_the_client_half_closes() {
    let mut pair = pair(|_, _| {});
    let asked = pair.ask();
    let cursor = pair.server.nodes().open(asked.output, None);
    assert_eq!(stop(&mut pair.server, cursor), Stop::Pending);
    act(&mut pair.server, action("f", "", "out=o")).unwrap();
    let served = start(&mut pair.server);
    pair.server.end_of_input(T0);
    assert_eq!(
        stop(&mut pair.server, cursor),
        Stop::Failed(Reason::Cancelled)
    );
    assert_eq!(
        pair.try_ask().err(),
        Some(Reason::Cancelled),
        "no client can answer"
    );
    let late = pair.server.nodes().open(asked.output, None);
    assert_eq!(
        stop(&mut pair.server, late),
        Stop::Failed(Reason::Cancelled)
    );
    // Actions of the client finish, and the session does not wait for its answers.
    pair.server.calls().finish(served.action);
    while pair.server.next_message(T0).is_some() {}
    let received = outputs(&mut pair.server);
    assert!(
        matches!(received.last(), Some(SessionOutput::Close(None))),
        "{received:?}"
    );
}

/// EV-510
#[test]
fn ev_811_unfinished_actions_are_limited_separately_in_each_direction() {
    let mut pair = pair(|config, limits| {
        config.partial_failure = true;
        limits.max_actions = 2;
    });
    let first = pair.ask();
    pair.ask();
    assert_eq!(pair.try_ask().err(), Some(Reason::ActionLimit));
    for name in ["a", "b", "c"] {
        let outputs = format!("out={name} __status__={name}s");
        act(&mut pair.server, action("f", "", &outputs)).unwrap();
    }
    assert_eq!(starts(&mut pair.server).len(), 2, "the third is refused");
    pair.server.calls().abandon(first.action, false);
    assert!(pair.try_ask().is_ok());
}

/// A connection that is cut before message `cut` of either direction and comes back.
struct Line {
    pair: Pair,
    up: VecDeque<WireMessage>,
    down: VecDeque<WireMessage>,
    started: usize,
    /// Delivers messages until the connection is cut.
    left: Option<usize>,
}

impl Line {
    fn carry(&mut self) {
        let all = std::iter::from_fn(|| self.pair.server.next_message(T0));
        self.down.extend(all);
        let all = std::iter::from_fn(|| self.pair.client.next_message(T0));
        self.up.extend(all);
    }

    /// One message arrives; `false` if nothing is on its way.
    fn step(&mut self) -> bool {
        self.serve();
        self.carry();
        if self.up.is_empty() && self.down.is_empty() {
            return false;
        }
        if self.left == Some(0) {
            self.left = None;
            self.up.clear();
            self.down.clear();
            self.pair.client.lost(T0);
            self.pair.server.lost(T0);
            self.pair.client.returned(T0);
            self.pair.server.returned(T0);
            return true;
        }
        self.left = self.left.map(|left| left - 1);
        if let Some(message) = self.down.pop_front() {
            self.pair.client.handle(message, T0).unwrap();
        } else if let Some(message) = self.up.pop_front() {
            self.pair.server.handle(message, T0).unwrap();
        }
        true
    }

    /// The client answers each action at once.
    fn serve(&mut self) {
        for begun in starts(&mut self.pair.client) {
            self.started += 1;
            self.pair.answer(&begun, "the one answer");
        }
    }
}

/// EV-811
#[test]
fn ev_943_a_server_action_is_neither_lost_nor_run_twice_wherever_the_cut() {
    let mut borders = 0;
    for cut in 0.. {
        let mut pair = pair(|config, _| {
            config.resume = true;
            config.coalesce = false;
        });
        let config = Config {
            resume: true,
            coalesce: false,
            partial_failure: true,
            entropy: u64::MAX,
            ..Config::default()
        };
        pair.client = SessionMachine::new(Side::Client, config, T0);
        let mut line = Line {
            pair,
            up: VecDeque::new(),
            down: VecDeque::new(),
            started: 0,
            left: Some(cut),
        };
        let asked = [line.pair.ask(), line.pair.ask()];
        let cursors = asked.map(|asked| {
            line.pair.question(asked);
            line.pair.server.nodes().open(asked.output, None)
        });
        while line.step() {}
        for cursor in cursors {
            let mut items = Vec::new();
            assert_eq!(
                drain(&mut line.pair.server, cursor, &mut items),
                Stop::End,
                "cut {cut}"
            );
            assert_eq!(
                items,
                [item("text/plain", "", "the one answer")],
                "cut {cut}"
            );
        }
        assert_eq!(line.started, 2, "cut {cut}");
        if line.left.is_some() {
            break;
        }
        borders = cut;
    }
    assert!(borders >= 4, "{borders} places to cut");
}

#[test]
fn ev_811_a_late_answer_also_fails_a_reader_that_is_not_parked() {
    let mut pair = pair(|_, _| {});
    let asked = pair.ask();
    let id = pair.server.id(asked.output).unwrap().to_string();
    feed(
        &mut pair.server,
        [more(&id, 0, "some"), more(&id, 1, "more")],
    )
    .unwrap();
    let cursor = pair.server.nodes().open(asked.output, None);
    assert!(matches!(
        pair.server.nodes().read(cursor),
        CursorRead::Piece(_)
    ));
    pair.server.calls().abandon(asked.action, false);
    assert_eq!(
        stop(&mut pair.server, cursor),
        Stop::Failed(Reason::Cancelled)
    );
}
