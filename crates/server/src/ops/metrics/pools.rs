//! Metrics of upstream pools, read from the pools when `/metrics` is rendered (LM-801).

use sapwood_net::lmtp::pool::{LmtpPool, PeerStatus};
use sapwood_proto::lmtp::pool::Condition;

use super::format::MetricsText;
use super::names;

/// One metric of an upstream.
struct UpstreamNumber {
    name: &'static str,
    help: &'static str,
    read: fn(&PeerStatus) -> u64,
}

/// Writes the metrics of every pool, labelled with the model and, for those of a single upstream, with its target. Both come
/// from the configuration, so the labels are a closed set.
pub(super) fn write(pools: &[(String, LmtpPool)], text: &mut MetricsText) {
    if pools.is_empty() {
        return;
    }
    for number in NUMBERS {
        text.family(number.name, "gauge", number.help);
        for (model, pool) in pools {
            for slot in pool.peers() {
                let labels = [("model", model.as_str()), ("upstream", &slot.target)];
                text.sample(number.name, &labels, (number.read)(&slot));
            }
        }
    }
    // Of the pool and not of an upstream: a stream that moves belongs to two.
    let help = "Streams that went on at another upstream.";
    text.family(names::UPSTREAM_MOVED, "counter", help);
    for (model, pool) in pools {
        text.sample(names::UPSTREAM_MOVED, &[("model", model)], pool.moved());
    }
}

const NUMBERS: [UpstreamNumber; 2] = [
    UpstreamNumber {
        name: names::UPSTREAM_SERVING,
        help: "1 while streams go there.",
        read: |slot| u64::from(slot.condition == Condition::Serving),
    },
    UpstreamNumber {
        name: names::UPSTREAM_STREAMS,
        help: "Streams that run there.",
        read: |slot| slot.streams,
    },
];
