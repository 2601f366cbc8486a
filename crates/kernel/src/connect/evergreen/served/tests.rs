//! Serves functions of a client without a connection: the machine of its side, and messages of a server.

use std::task::Waker;

use bytes::Bytes;
use sapwood_proto::code::Code;
use sapwood_proto::evergreen::{
    Action, Chunk as WireChunk, Fragment, Param, Payload, Status, WireMessage,
};
use sapwood_proto::session::{Config, SessionMachine as Machine, Side};
use sapwood_proto::time::Time;
use sapwood_session::{SessionClock, SharedSession};

use super::*;
use crate::name::{Mime, Port};
use crate::probe::{FRAGILE_POLLS, Panics, fragile};
use crate::session::test_functions;
use crate::spec::{OutputSpec as SpecOutput, Spec};

fn served(kernel: &Kernel) -> (SharedSession, ServedSession) {
    let config = Config {
        partial_failure: true,
        ..Config::default()
    };
    let (shared, clock) = SessionClock::start(|now| Machine::new(Side::Client, config, now));
    let link = SessionLink::to(shared.clone(), clock);
    assert!(link.with(Live::acquire_worker));
    let options = SessionOptions {
        partial_failure: true,
        extensions: &[],
        ..SessionOptions::default()
    };
    let runs = Runs::new(link.clone(), kernel.clone(), Arc::new(options));
    (shared, ServedSession { link, runs })
}

fn ask(
    shared: &SharedSession,
    name: &'static str,
    input: Option<&'static str>,
    output: &'static str,
) {
    let metadata = Arc::new(Metadata::of("text/plain"));
    let fragment = |id: &'static str| Fragment {
        id: id.into(),
        last: true,
        chunk: Some(WireChunk {
            metadata: Some(Arc::clone(&metadata)),
            payload: Some(Payload::Data(Bytes::from_static(b"in"))),
        }),
        ..Fragment::default()
    };
    let wire = if input.is_some() {
        "response"
    } else {
        "output"
    };
    let message = WireMessage {
        fragments: input.map(fragment).into_iter().collect(),
        actions: vec![Action {
            name: name.into(),
            inputs: input.map(|id| Param::new("text", id)).into_iter().collect(),
            outputs: vec![Param::new(wire, output)],
            ..Action::default()
        }],
        ..WireMessage::default()
    };
    shared
        .with(|live| live.machine().handle(message, Time::ZERO))
        .unwrap();
}

/// Polls until the output is final; returns its bytes, and how it ended.
fn answer(
    shared: &SharedSession,
    served: &mut ServedSession,
    output: &str,
) -> (Vec<u8>, Option<Arc<Status>>) {
    let mut cx = Context::from_waker(Waker::noop());
    let mut data = Vec::new();
    loop {
        assert!(Pin::new(&mut *served).poll(&mut cx).is_pending());
        while let Some(message) = shared.with(|live| live.machine().next_message(Time::ZERO)) {
            for fragment in message.fragments {
                assert_eq!(&*fragment.id, output);
                match fragment.chunk.and_then(|chunk| chunk.payload) {
                    Some(Payload::Data(more)) => data.extend_from_slice(&more),
                    Some(Payload::Status(status)) => return (data, status),
                    _ => {}
                }
                if fragment.last {
                    return (data, None);
                }
            }
        }
    }
}

/// KE-139, EV-811
#[tokio::test]
async fn oa_913_a_clients_function_that_panics_anywhere_ends_its_own_action_and_is_counted_once() {
    let polls = 0..FRAGILE_POLLS;
    let both = polls.clone().map(Panics::PollAndDrop);
    let positions = [Panics::Call, Panics::Drop].into_iter();
    for target in positions.chain(polls.map(Panics::Poll)).chain(both) {
        let (kernel, alive) = (Kernel::new(), Arc::new(()));
        kernel.add_all(test_functions()).unwrap();
        let spec = Spec::new("fragile", "").outputs([SpecOutput::new(Port::MAIN, Mime::TEXT)]);
        kernel
            .add(fragile(spec, target, false, Arc::clone(&alive)))
            .unwrap();
        let (shared, mut served) = served(&kernel);
        ask(&shared, "fragile", None, "~f");
        let (_, status) = answer(&shared, &mut served, "~f");
        let status = status.unwrap();
        assert_eq!(
            (status.code, &*status.reason),
            (Code::Internal, "FUNCTION"),
            "{target:?}"
        );
        ask(&shared, "echo", Some("~i"), "~o");
        let echoed = answer(&shared, &mut served, "~o");
        assert_eq!(echoed, (b"in".to_vec(), None), "{target:?}");
        assert_eq!(kernel.panics(), 1, "{target:?}");
        assert_eq!(shared.with(|live| live.machine().calls().unfinished()), 0);
        drop((served, kernel));
        assert_eq!(Arc::strong_count(&alive), 1, "{target:?}: nothing is left");
    }
}

#[tokio::test]
async fn oa_913_dropping_a_served_session_survives_a_function_that_panics_on_drop() {
    let (kernel, alive) = (Kernel::new(), Arc::new(()));
    let spec = Spec::new("fragile", "").outputs([SpecOutput::new(Port::MAIN, Mime::TEXT)]);
    kernel
        .add(fragile(spec, Panics::Drop, true, Arc::clone(&alive)))
        .unwrap();
    let (shared, mut served) = served(&kernel);
    ask(&shared, "fragile", None, "~f");
    let mut cx = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut served).poll(&mut cx).is_pending());
    drop(served);
    assert_eq!((kernel.panics(), Arc::strong_count(&alive)), (1, 2));
    assert!(!shared.with(|live| live.machine().is_closed()));
}
