//! Section 8.2 of the Evergreen page: each limit at N and at N + 1.

use prost_types::Any;

use super::harness::*;
use crate::evergreen::{Action, Fragment, Param, Reason, SessionLimits, WireMessage};
use crate::session::SessionMachine;

/// The outcome of a session with small limits, `at` the limit or past it.
type Case = (
    &'static str,
    Reason,
    fn(&mut SessionLimits),
    fn(&mut SessionMachine, usize) -> Result<(), Reason>,
);

fn params(count: usize, of: &str) -> Vec<Param> {
    (0..count)
        .map(|at| Param::new(format!("{of}{at}"), format!("{of}{at}")))
        .collect()
}

fn name(bytes: usize) -> String {
    "n".repeat(bytes)
}

const CASES: &[Case] = &[
    (
        "max_message_bytes",
        Reason::MessageTooLarge,
        |limits| limits.max_message_bytes = 5,
        |session, n| {
            let message = WireMessage {
                wire_bytes: n,
                ..WireMessage::default()
            };
            session
                .handle(message, T0)
                .map_err(|status| reason(&status))
        },
    ),
    (
        "max_fragment_bytes",
        Reason::FragmentLimit,
        |limits| limits.max_fragment_bytes = 5,
        |session, n| feed(session, [leaf("p", 0, &name(n))]),
    ),
    (
        "max_id_bytes",
        Reason::BadId,
        |limits| limits.max_id_bytes = 5,
        |session, n| feed(session, [leaf(&name(n), 0, "x")]),
    ),
    (
        "max_name_bytes, action",
        Reason::BadName,
        |limits| limits.max_name_bytes = 5,
        |session, n| act(session, action(&name(n), "", "")),
    ),
    (
        "max_name_bytes, parameter",
        Reason::BadName,
        |limits| limits.max_name_bytes = 5,
        |session, n| act(session, action("f", "", &format!("{}=o", name(n)))),
    ),
    (
        "max_role_bytes",
        Reason::BadName,
        |limits| limits.max_role_bytes = 5,
        |session, n| feed(session, [chunk("p", 0, of("", &name(n)), None)]),
    ),
    (
        "max_children_per_fragment",
        Reason::ChildLimit,
        |limits| limits.max_children_per_fragment = 5,
        |session, n| {
            let children = params(n, "c").into_iter().map(|param| param.id).collect();
            feed(
                session,
                [Fragment {
                    children,
                    ..empty("t", 0, true)
                }],
            )
        },
    ),
    (
        "max_nodes",
        Reason::NodeLimit,
        |limits| limits.max_nodes = 5,
        |session, n| {
            let ids: Vec<String> = (1..n).map(|at| format!("c{at}")).collect();
            feed(
                session,
                [tree(
                    "t",
                    0,
                    &ids.iter().map(String::as_str).collect::<Vec<_>>(),
                )],
            )
        },
    ),
    (
        "max_early_fragments",
        Reason::ReorderLimit,
        |limits| limits.max_early_fragments = 5,
        |session, n| {
            feed(
                session,
                (1..=i32::try_from(n).unwrap()).map(|seq| empty("p", seq, false)),
            )
        },
    ),
    (
        "retained_bytes",
        Reason::RetainedLimit,
        |limits| limits.retained_bytes = 64 + 1 + 10 + 5,
        |session, n| feed(session, [leaf("p", 0, &name(n))]),
    ),
    (
        "max_actions",
        Reason::ActionLimit,
        |limits| limits.max_actions = 5,
        |session, n| (0..n).try_for_each(|at| act(session, action("f", "", &format!("out=o{at}")))),
    ),
    (
        "max_params, in",
        Reason::ParamLimit,
        |limits| limits.max_params = 5,
        |session, n| {
            act(
                session,
                Action {
                    inputs: params(n, "i"),
                    ..action("f", "", "")
                },
            )
        },
    ),
    (
        "max_params, out",
        Reason::ParamLimit,
        |limits| limits.max_params = 5,
        |session, n| {
            act(
                session,
                Action {
                    outputs: params(n, "o"),
                    ..action("f", "", "")
                },
            )
        },
    ),
    (
        "max_configs",
        Reason::ParamLimit,
        |limits| limits.max_configs = 5,
        |session, n| {
            let config = |at| Any {
                type_url: format!("t/T{at}"),
                value: Vec::new(),
            };
            act(
                session,
                Action {
                    configs: (0..n).map(config).collect(),
                    ..action("f", "", "")
                },
            )
        },
    ),
];

#[test]
fn each_limit_is_kept_at_n_and_at_n_plus_1() {
    for (limit, past, set, push) in CASES {
        let mut session = server_with(|_, limits| set(limits));
        assert_eq!(push(&mut session, 5), Ok(()), "{limit} at the limit");
        let mut session = server_with(|_, limits| set(limits));
        assert_eq!(push(&mut session, 6), Err(*past), "{limit} past it");
        let status = session.aborted().expect("it aborts");
        let named = status
            .detail("limit")
            .is_some_and(|name| limit.starts_with(name));
        assert!(
            named && status.detail("value").is_some() && status.detail("max").is_some(),
            "{limit}: {status:?}"
        );
    }
}

#[test]
fn the_defaults_are_those_of_the_specification() {
    let limits = SessionLimits::default();
    let numbers = [
        limits.max_message_bytes,
        limits.max_fragment_bytes,
        limits.max_id_bytes,
        limits.max_name_bytes,
        limits.max_role_bytes,
        limits.max_children_per_fragment,
        limits.max_nodes,
        limits.max_depth,
        limits.max_visits as usize,
        limits.max_early_fragments,
        limits.max_actions,
        limits.max_params,
        limits.max_configs,
        limits.outbound_queue_bytes,
    ];
    assert_eq!(
        numbers,
        [
            16 << 20,
            8 << 20,
            256,
            256,
            64,
            4_096,
            65_536,
            1_024,
            1_048_576,
            4_096,
            256,
            64,
            16,
            1 << 20,
        ]
    );
    assert_eq!(
        (limits.max_read_bytes, limits.retained_bytes),
        (1 << 30, 256 << 20)
    );
    assert_eq!(
        (
            limits.idle_timeout.as_secs(),
            limits.outbound_stall.as_secs()
        ),
        (1_800, 60)
    );
}

#[test]
fn a_message_of_very_many_small_parts_is_refused_by_the_decoder() {
    use crate::evergreen::protobuf::{ENTRIES_MAX, decode};
    let refused = |bytes: Vec<u8>| decode(&*bytes).err().map(|status| reason(&status));
    // An empty fragment takes two bytes on the wire and two hundred in memory.
    assert_eq!(refused([0x0a, 0x00].repeat(ENTRIES_MAX)), None);
    assert_eq!(
        refused([0x0a, 0x00].repeat(ENTRIES_MAX + 1)),
        Some(Reason::FragmentLimit)
    );
    // One fragment of very many children, one action of very many inputs.
    for head in [&[0x22, 0x00][..], &[0x1a, 0x00]] {
        let field = if head[0] == 0x22 { 0x0a } else { 0x12 };
        let body = head.repeat(ENTRIES_MAX);
        let mut bytes = vec![field];
        prost::encoding::encode_varint(body.len() as u64, &mut bytes);
        bytes.extend(body);
        assert_eq!(refused(bytes), Some(Reason::FragmentLimit));
    }
    assert_eq!(refused(vec![0x0a, 0xff]), Some(Reason::BadMessage));
    assert_eq!(
        refused(b"\x0a\x03\x0a\x01\xff".to_vec()),
        Some(Reason::BadMessage),
        "bad UTF-8 in an id"
    );
}

#[test]
fn ev_801_a_refused_node_is_not_charged() {
    let mut session = server_with(|_, limits| limits.retained_bytes = 10);
    let refused = session.nodes().node("eleven bytes").unwrap_err();
    assert_eq!(reason(&refused), Reason::RetainedLimit);
    assert_eq!(session.retained_bytes(), 0);
    session.nodes().node("ten bytes.").unwrap();
    assert_eq!(session.retained_bytes(), 10);
}

/// A function may hold its target as long as it runs, as it does its configs.
#[test]
fn ev_801_the_target_of_an_action_is_charged_until_it_ends() {
    let mut session = server();
    let asked = Action {
        target: "x".repeat(1_000).into(),
        ..action("f", "", "")
    };
    act(&mut session, asked).unwrap();
    assert_eq!(session.retained_bytes(), 1_000);
    let started = start(&mut session);
    session.calls().finish(started.action);
    assert_eq!(session.retained_bytes(), 0);
}
