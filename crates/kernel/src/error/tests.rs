//! Tests of error codes, reasons and retries.

use sapwood_proto::error_reason::ErrorReason;
use std::fmt::Write;

use super::*;

fn all() -> Vec<Error> {
    let mimes = || -> Box<[Mime]> { Box::new([Mime::TEXT]) };
    vec![
        Error::not_found("function", "f", [Name::new("g"), Name::new("h")]),
        Error::not_found("model", "m", []),
        Error::not_found("input", "i", []),
        Error::Exists { name: "f".into() },
        Error::Unsupported {
            function: "f".into(),
            produced: mimes(),
            wanted: Box::new([]),
        },
        Error::argument("a", "must be 1"),
        Error::argument("temperature", "must be a number").because(ErrorReason::BAD_CONFIG),
        Error::Decode {
            wanted: "text".into(),
            why: "byte 3 is not UTF-8".into(),
        },
        Error::Truncated { what: "f".into() },
        Error::Protocol {
            peer: "f".into(),
            why: "part 2 follows part 0".into(),
        },
        Error::Cancelled,
        Error::Deadline,
        Error::Limit {
            name: "node_bytes_max",
            max: 1,
        },
        Error::Limit {
            name: "call_depth",
            max: 16,
        },
        Error::Released,
        Error::Cycle {
            path: "a, b, a".into(),
        },
        Error::Denied {
            why: "not today".into(),
        },
        Error::Remote {
            code: Code::RateLimited,
            reason: "SLOW_DOWN".into(),
            message: "too fast".into(),
            retryable: true,
            retry_after: Some(Duration::from_secs(2)),
        },
        Error::Unavailable {
            why: "draining".into(),
            retry_after: Some(Duration::from_secs(1)),
        },
        Error::RateLimited {
            why: "four requests at once are enough".into(),
            retry_after: Some(Duration::from_millis(20)),
        },
        Error::Unimplemented {
            what: "a controller".into(),
        },
        api::EngineError::new(
            Code::Overloaded,
            ErrorReason::ENGINE_BUSY,
            "the queue is full",
        )
        .into(),
        Error::Panicked {
            function: "f".into(),
        },
        Error::function("the disk is full"),
    ]
}

#[test]
fn ke_312_the_table_of_errors() {
    let mut table = String::new();
    for error in all() {
        let debug = format!("{error:?}");
        let variant: String = debug
            .chars()
            .take_while(char::is_ascii_alphabetic)
            .collect();
        let _ = writeln!(
            table,
            "{variant:13} {:20} {:18} {:10} retry={:5} after={:9} grpc={:2} http={} | {error}",
            error.code().name(),
            error.reason(),
            format!("{:?}", error.blame()),
            error.retryable(),
            format!("{:?}", error.retry_after()),
            error.code().grpc(),
            error.http(),
        );
    }
    insta::assert_snapshot!(table);
}

#[test]
fn ke_312_a_list_of_names_is_cut_at_twenty() {
    let names = (0..50).map(|index| Name::from(format!("f{index}")));
    let Error::NotFound { known, .. } = Error::not_found("function", "x", names) else {
        panic!("not found");
    };
    assert_eq!(known.len(), 20);
}

#[test]
fn an_error_is_no_larger_than_a_chunk() {
    assert!(size_of::<Error>() <= size_of::<crate::chunk::Chunk>());
}

#[test]
fn oa_910_retry_after_is_the_estimate_of_the_engine_or_one_second() {
    let busy = || {
        api::EngineError::new(
            Code::Overloaded,
            ErrorReason::ENGINE_BUSY,
            "the queue is full",
        )
    };
    let twelve = Duration::from_secs(12);
    for (error, expect) in [
        (busy(), Some(Duration::from_secs(1))),
        (busy().after(twelve), Some(twelve)),
        // An error that a retry cannot fix is never retryable.
        (
            api::EngineError::new(Code::InvalidRequest, ErrorReason::NONE, "").after(twelve),
            None,
        ),
    ] {
        assert_eq!(Error::from(error).retry_after(), expect);
    }
}
