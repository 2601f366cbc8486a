//! The limits of one session.

use std::time::Duration;

/// Limits of a session. A value equal to a limit is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Bytes of one message; over it `MESSAGE_TOO_LARGE`. The transport enforces it.
    pub max_message_bytes: usize,
    /// Payload bytes of one fragment; over it `FRAGMENT_LIMIT`.
    pub max_fragment_bytes: usize,
    /// Bytes of a node id; over it `BAD_ID`.
    pub max_id_bytes: usize,
    /// Bytes of the name of an action or a parameter, and of a mimetype; over it `BAD_NAME`.
    pub max_name_bytes: usize,
    /// Bytes of a role; over it `BAD_NAME`.
    pub max_role_bytes: usize,
    /// Bytes of `experimental` in one chunk's metadata; over it `FRAGMENT_LIMIT`.
    pub max_experimental_bytes: usize,
    /// Children in one fragment; over it `CHILD_LIMIT`.
    pub max_children_per_fragment: usize,
    /// Ids mentioned in the session; over it `NODE_LIMIT`.
    pub max_nodes: usize,
    /// Nodes on the path from a reader's root to a leaf; over it `DEPTH_LIMIT`.
    pub max_depth: usize,
    /// Node visits of one read; over it `FLATTEN_LIMIT`.
    pub max_visits: u32,
    /// Burst of node visits of all reads and searches of a session together; over it readers wait, and cycle detection
    /// is left to readers (D-27).
    pub session_visits: u32,
    /// Node visits that are refilled per second.
    pub session_visits_per_second: u32,
    /// Bytes of one read; over it `FLATTEN_LIMIT`.
    pub max_read_bytes: u64,
    /// Fragments of one node buffered beyond its contiguous prefix; over it `REORDER_LIMIT`.
    pub max_early_fragments: usize,
    /// Payload bytes, 64 bytes per fragment, and ids that the session retains; over it `RETAINED_LIMIT`.
    pub retained_bytes: u64,
    /// Unfinished actions; the next one fails with `ACTION_LIMIT`.
    pub max_actions: usize,
    /// Inputs, and outputs, of one action; over it `PARAM_LIMIT`.
    pub max_params: usize,
    /// Configs of one action; over it `PARAM_LIMIT`.
    pub max_configs: usize,
    /// The highest seq that our own nodes use; past it the producer fails instead of wrapping (EV-203).
    pub max_seq: u32,
    /// Time without an inbound message and without a running action, after which the session ends with `IDLE_TIMEOUT`.
    pub idle_timeout: Duration,
    /// Unsent bytes, including 64 per fragment, at which producers wait; one fragment may exceed it.
    pub outbound_queue_bytes: usize,
    /// Time without a message taken from a non-empty queue, after which the session ends with `SLOW_READER`.
    pub outbound_stall: Duration,
    /// Payload bytes that are combined into one outgoing message; a larger fragment is sent alone (EV-706).
    pub coalesce_bytes: usize,
    /// Bytes unread by running actions above which reading from the connection pauses (EV-802).
    pub inbound_high_bytes: u64,
    /// Bytes below which reading resumes.
    pub inbound_low_bytes: u64,
    /// The longest TTL that SET_TTL can set; longer ones are clipped (EV-912).
    pub max_ttl: Duration,
    /// Time without a connection after which a resumable session ends (EV-940).
    pub resume_grace: Duration,
    /// How long a client may take to answer an action of the server; then that call fails with `DEADLINE` (EV-811).
    /// Time without a connection does not count.
    pub reverse_timeout: Duration,
    /// Number of functions that a client may offer at a time (EV-810).
    pub max_offers: usize,
    /// Bytes of one OFFER_ACTIONS, schemas included.
    pub max_offer_bytes: usize,
    /// Bytes of the content of one reference; over it `REF_LIMIT`, before it is fetched if its length is declared
    /// (EV-416).
    pub max_ref_bytes: u64,
    /// Bytes of fetched content that the session retains; over it `REF_LIMIT`.
    pub ref_bytes: u64,
    /// References that are fetched concurrently; others wait.
    pub max_ref_fetches: usize,
    /// Timeout for the first byte of a reference; then `REF_FETCH`.
    pub ref_first_byte: Duration,
    /// Timeout for its last byte; then `REF_FETCH`.
    pub ref_total: Duration,
    /// Nodes that one eager search for a cycle visits (EV-217).
    pub cycle_visits: u32,
    /// Edges that the eager searches of one message follow together (D-27).
    pub cycle_edges_per_message: u32,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_message_bytes: 16 * MIB,
            max_fragment_bytes: 8 * MIB,
            max_id_bytes: 256,
            max_name_bytes: 256,
            max_role_bytes: 64,
            max_experimental_bytes: 64 * KIB,
            max_children_per_fragment: 4_096,
            max_nodes: 65_536,
            max_depth: 1_024,
            max_visits: 1_048_576,
            session_visits: 1_048_576,
            session_visits_per_second: 131_072,
            max_read_bytes: 1 << 30,
            max_early_fragments: 4_096,
            retained_bytes: 256 << 20,
            max_actions: 256,
            max_params: 64,
            max_configs: 16,
            // The whole range of the wire's int32 (EV-203).
            max_seq: i32::MAX.unsigned_abs(),
            idle_timeout: Duration::from_secs(30 * 60),
            outbound_queue_bytes: MIB,
            outbound_stall: Duration::from_secs(60),
            coalesce_bytes: 64 * KIB,
            // Far enough apart that reading does not stop and start with each message.
            inbound_high_bytes: 4 << 20,
            inbound_low_bytes: 1 << 20,
            // The end of the session removes all nodes without a TTL.
            max_ttl: Duration::MAX,
            resume_grace: Duration::from_secs(60),
            reverse_timeout: Duration::from_secs(60),
            max_offers: 64,
            max_offer_bytes: 256 * KIB,
            max_ref_bytes: 64 << 20,
            ref_bytes: 256 << 20,
            max_ref_fetches: 8,
            ref_first_byte: Duration::from_secs(10),
            ref_total: Duration::from_secs(60),
            cycle_visits: 10_000,
            cycle_edges_per_message: 65_536,
        }
    }
}

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
