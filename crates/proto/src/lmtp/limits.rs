//! The limits of one connection.

use std::time::Duration;

/// Limits of a connection. A value equal to a limit is accepted (LM-1201).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Bytes of one frame or line; over it `message_too_large`.
    pub max_message_in: usize,
    /// Bytes of one TOKEN message; further items go into the next message.
    pub max_frame_out: usize,
    /// Live streams of one connection; over it `server_overloaded`.
    pub max_streams: usize,
    /// Bytes of a `stream_id`; over it `invalid_value` with a null id.
    pub max_id_bytes: usize,
    /// Bytes of a model's name; over it `model_not_found`.
    pub max_model_bytes: usize,
    /// Consecutive malformed messages after which the connection is closed.
    pub max_malformed: u32,
    /// `top_logprobs`; over it `invalid_value`.
    pub max_top_logprobs: u32,
    /// Entries of a `logit_bias`; over it `invalid_value`.
    pub max_biases: usize,
    /// Strings in `stop`; over it `invalid_value` (D-20).
    pub max_stops: usize,
    /// Bytes of one stop string (D-20).
    pub max_stop_bytes: usize,
    /// Lists in `stop_tokens`; over it `invalid_value`.
    pub max_stop_lists: usize,
    /// Ids in one of those lists.
    pub max_stop_ids: usize,
    /// Samples of one GENERATE; over it `invalid_value` (version 2).
    pub max_samples: u32,
    /// Lists of one SCORE; over it `invalid_value` (version 2).
    pub max_scored_many: usize,
    /// Tokens of all prompts of one request with several samples, each of which has a copy; over it `invalid_value`
    /// (version 2).
    pub max_sample_tokens: usize,
    /// Bytes of a text to be tokenized, `messages` included; over it `invalid_value` (version 2).
    pub max_text_bytes: usize,
    /// Entries of `messages`; over it `invalid_value` (D-47).
    pub max_messages: usize,
    /// JSON values in `messages`; over it `invalid_value` (D-47).
    pub max_message_values: usize,
    /// Buffers of a connection; over it the least recently used one is removed (version 2).
    pub max_buffers: usize,
    /// Tokens of all buffers, in contexts of their model; over it the least recently used one is removed.
    pub max_buffer_contexts: usize,
    /// How long a buffer lives after its last use, unless its client sets that.
    pub buffer_ttl: Duration,
    /// Maximum of the time that a client may set; longer times are shortened.
    pub max_buffer_ttl: Duration,
    /// Masks of a connection; over it the least recently used one is removed (version 2).
    pub max_masks: usize,
    /// Bytes of all masks; over it the least recently used one is removed.
    pub max_mask_bytes: usize,
    /// Bytes of the name of a buffer or mask; over it `invalid_value`.
    pub max_name_bytes: usize,
    /// Bytes of the id or tag of a controller; over it `invalid_value` (version 2).
    pub max_controller_bytes: usize,
    /// Bytes of a controller's argument; over it `invalid_value` (version 2).
    pub max_controller_arg_bytes: usize,
    /// Bytes of what a controller has printed that wait for the next STATUS; over it the oldest are dropped.
    pub max_log_bytes: usize,
    /// How long a stream waits for a model to load; then `model_loading`.
    pub load_wait: Duration,
    /// Items in the replay buffer of one stream (version 2); a stream that may not drop items is parked when it has
    /// this many.
    pub resume_items: usize,
    /// Bytes in the replay buffer of one stream, with the same effect.
    pub resume_bytes: usize,
    /// Bytes in all replay buffers of a session, ended streams included; those are removed first.
    pub resume_session_bytes: usize,
    /// How long a detached session waits for its client, and how long an ended stream is retained.
    pub resume_grace: Duration,
    /// Unacknowledged items of one stream; over it `invalid_value` (version 2).
    pub max_window: u32,
    /// Minimum time between two STATUS messages of a stream (version 2).
    pub status_interval: Duration,
    /// How long a stream waits before its client is sent a status.
    pub status_after: Duration,
    /// Bytes of an error message; longer ones are truncated.
    pub max_error_bytes: usize,
    /// Unsent bytes above which streams are parked and no input is read (LM-607).
    pub outbox_bytes: usize,
    /// Unsent bytes below which streams continue.
    pub outbox_low_bytes: usize,
    /// Write stall timeout: time parked, without a message taken, after which the connection is reset.
    pub stall_timeout: Duration,
    /// How long the transport may take for the last messages before the connection is closed regardless (LM-505).
    pub last_words: Duration,
    /// Retry delay that `server_overloaded` reports when the connection itself is full (LM-510).
    pub retry_after: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            // Four times the limit of the reference server: large bias objects and long prompts come close to that one
            // (LM-1201).
            max_message_in: 16 << 20,
            // PyPI `websockets` refuses messages above 1 MiB by default (LM-1202).
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
            // As many as the largest message has room for in a single prompt, at two bytes for a token.
            max_sample_tokens: 8 << 20,
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
            max_controller_bytes: 256,
            max_controller_arg_bytes: 1 << 20,
            max_log_bytes: 64 << 10,
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
