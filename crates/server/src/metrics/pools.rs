//! The numbers of upstreams that share a model's streams, read from their pools when `/metrics` is rendered (LM-801).
//!
//! Owns: which number has which name. Refuses to know: who counts, and where streams go.

use sapwood_net::lmtp::pool::{Pool, Seat};
use sapwood_proto::lmtp::pool::Condition;

use super::format::Text;
use super::names;

/// One number of one upstream.
struct Number {
    name: &'static str,
    help: &'static str,
    read: fn(&Seat) -> u64,
}

/// Writes the numbers of every pool, labelled with the model and, where they are its own, the upstream. Both stand in the configuration.
pub(super) fn write(pools: &[(String, Pool)], text: &mut Text) {
    if pools.is_empty() {
        return;
    }
    for number in NUMBERS {
        text.family(number.name, "gauge", number.help);
        for (model, pool) in pools {
            for seat in pool.seats() {
                let labels = [("model", model.as_str()), ("upstream", &seat.place)];
                text.sample(number.name, &labels, (number.read)(&seat));
            }
        }
    }
    let help = "Streams that went on at another upstream.";
    text.family(names::UPSTREAM_MOVED, "counter", help);
    for (model, pool) in pools {
        text.sample(names::UPSTREAM_MOVED, &[("model", model)], pool.moved());
    }
}

const NUMBERS: [Number; 2] = [
    Number {
        name: names::UPSTREAM_SERVING,
        help: "1 while streams go there.",
        read: |seat| u64::from(seat.condition == Condition::Serving),
    },
    Number {
        name: names::UPSTREAM_STREAMS,
        help: "Streams that run there.",
        read: |seat| seat.streams,
    },
];
