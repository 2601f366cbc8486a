//! The limits of one connection.

use std::time::Duration;

/// What a connection allows. A value equal to a limit is accepted (LM-1201).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Bytes of one frame or line; over it `message_too_large`.
    pub max_message_in: usize,
    /// Bytes of one TOKEN message; what is more goes into the next, split between items.
    pub max_frame_out: usize,
    /// Live streams of one connection; over it `server_overloaded`.
    pub max_streams: usize,
    /// Bytes of a `stream_id`; over it `invalid_value` with a null id.
    pub max_id_bytes: usize,
    /// Bytes of a model's name; over it `model_not_found`.
    pub max_model_bytes: usize,
    /// Malformed messages without a good one between them at which the connection is closed.
    pub max_malformed: u32,
    /// `top_logprobs`; over it `invalid_value`.
    pub max_top_logprobs: u32,
    /// Entries of a `logit_bias`; over it `invalid_value`.
    pub max_biases: usize,
    /// Strings in `stop`; over it `invalid_value` (D-20).
    pub max_stops: usize,
    /// Bytes of one of them (D-20).
    pub max_stop_bytes: usize,
    /// Lists in `stop_tokens`; over it `invalid_value`.
    pub max_stop_lists: usize,
    /// Ids in one of them.
    pub max_stop_ids: usize,
    /// Samples of one GENERATE; over it `invalid_value` (version 2).
    pub max_samples: u32,
    /// Lists of one SCORE; over it `invalid_value` (version 2).
    pub max_scored_many: usize,
    /// Bytes of a text that becomes tokens, `messages` included; over it `invalid_value` (version 2).
    pub max_text_bytes: usize,
    /// Entries of `messages`; over it `invalid_value` (D-47).
    pub max_messages: usize,
    /// JSON values of which they are made; over it `invalid_value` (D-47).
    pub max_message_values: usize,
    /// Buffers of a connection; over it the least recently used goes (version 2).
    pub max_buffers: usize,
    /// Their tokens together, in contexts of their model; over it the same.
    pub max_buffer_contexts: usize,
    /// How long a buffer is kept from its last use, if its client does not say.
    pub buffer_ttl: Duration,
    /// The same, at most; more is cut.
    pub max_buffer_ttl: Duration,
    /// Masks of a connection; over it the least recently used goes (version 2).
    pub max_masks: usize,
    /// Their bytes together; over it the same.
    pub max_mask_bytes: usize,
    /// Bytes of the name of a buffer or mask; over it `invalid_value`.
    pub max_name_bytes: usize,
    /// How long a stream waits for a model that is being loaded; then `model_loading`.
    pub load_wait: Duration,
    /// Items of one stream that are kept for a client that comes back (version 2); where it has to have them all, a stream
    /// with so many stands still.
    pub resume_items: usize,
    /// Their bytes, the same.
    pub resume_bytes: usize,
    /// The same for all streams of a session together, ended ones included; those go first.
    pub resume_session_bytes: usize,
    /// How long a session waits for its client, and how long an ended stream is kept.
    pub resume_grace: Duration,
    /// Items of one stream under way; over it `invalid_value` (version 2).
    pub max_window: u32,
    /// From one STATUS of a stream to the next (version 2).
    pub status_interval: Duration,
    /// How long a stream waits before its client gets a status.
    pub status_after: Duration,
    /// Bytes of an error's text; what is longer is cut.
    pub max_error_bytes: usize,
    /// Unsent bytes above which streams are parked and nothing is read (LM-607).
    pub outbox_bytes: usize,
    /// Unsent bytes below which they go on.
    pub outbox_low_bytes: usize,
    /// Time parked without a message taken after which the connection is reset.
    pub stall_timeout: Duration,
    /// How long last words may take to be taken before the connection is closed over them (LM-505).
    pub last_words: Duration,
    /// What `server_overloaded` tells a client to wait where the connection itself is full (LM-510).
    pub retry_after: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            max_message_in: 16 << 20,
            max_frame_out: 1_000_000,
            max_streams: 1_024,
            max_id_bytes: 256,
            max_model_bytes: 512,
            max_malformed: 16,
            max_top_logprobs: 1_000,
            max_biases: 1_048_576,
            max_stops: 64,
            max_stop_bytes: 1_024,
            max_stop_lists: 64,
            max_stop_ids: 64,
            max_samples: 64,
            max_scored_many: 256,
            max_text_bytes: 1 << 20,
            max_messages: 4_096,
            max_message_values: 262_144,
            max_buffers: 64,
            max_buffer_contexts: 8,
            buffer_ttl: Duration::from_secs(60),
            max_buffer_ttl: Duration::from_secs(3_600),
            max_masks: 256,
            max_mask_bytes: 4 << 20,
            max_name_bytes: 64,
            load_wait: Duration::from_secs(60),
            resume_items: 4_096,
            resume_bytes: 1 << 20,
            resume_session_bytes: 4 << 20,
            resume_grace: Duration::from_secs(30),
            max_window: 65_536,
            status_interval: Duration::from_millis(250),
            status_after: Duration::from_millis(100),
            max_error_bytes: 4_096,
            outbox_bytes: 1 << 20,
            outbox_low_bytes: 256 << 10,
            stall_timeout: Duration::from_secs(60),
            last_words: Duration::from_secs(2),
            retry_after: Duration::from_secs(1),
        }
    }
}
