//! The names of our metrics. Each is documented in `docs/operating.md`, which tidy checks.

pub(crate) const MODEL_LOAD: &str = "sapwood_model_load_seconds";
pub(crate) const CONNECTIONS_OPEN: &str = "sapwood_connections_open";
pub(crate) const BODY_BYTES: &str = "sapwood_body_bytes";
pub(crate) const DRAINING: &str = "sapwood_draining";
pub(crate) const BUILD_INFO: &str = "sapwood_build_info";
pub(crate) const AUTH_FAILURES: &str = "sapwood_auth_failures_total";
pub(crate) const REJECTED: &str = "sapwood_rejected_total";
pub(crate) const CANCELLED: &str = "sapwood_cancelled_total";
pub(crate) const PANICS: &str = "sapwood_panics_total";
pub(crate) const CONTROLLERS_LIVE: &str = "sapwood_controllers_live";
pub(crate) const CONTROLLER_FAILURES: &str = "sapwood_controller_failures_total";
pub(crate) const CONTROLLER_MEMORY: &str = "sapwood_controller_memory_bytes";
pub(crate) const CONTROLLER_STEP: &str = "sapwood_controller_step_seconds";
pub(crate) const CONSTRAINT_COMPILE: &str = "sapwood_constraint_compile_seconds";
pub(crate) const CONSTRAINT_MASK: &str = "sapwood_constraint_mask_seconds";
pub(crate) const RUNTIME_RESTARTS: &str = "sapwood_runtime_restarts_total";
pub(crate) const LOG_LINES_DROPPED: &str = "sapwood_log_lines_dropped_total";
pub(crate) const SLOW_WORK_WAITING: &str = "sapwood_slow_work_waiting";
pub(crate) const SLOW_WORK_RUNNING: &str = "sapwood_slow_work_running";
pub(crate) const SLOW_WORK: &str = "sapwood_slow_work_total";
pub(crate) const SLOW_WORK_WAIT: &str = "sapwood_slow_work_wait_seconds_total";
pub(crate) const SLOW_WORK_REFUSED: &str = "sapwood_slow_work_refused_total";
pub(crate) const POLL_SECONDS: &str = "sapwood_poll_seconds";
pub(crate) const STREAMS_OPEN: &str = "sapwood_streams_open";
pub(crate) const UNKNOWN_PARAMETERS: &str = "sapwood_unknown_parameters_total";
pub(crate) const REQUESTS: &str = "sapwood_requests_total";
pub(crate) const REQUESTS_RUNNING: &str = "sapwood_requests_running";
pub(crate) const REQUESTS_WAITING: &str = "sapwood_requests_waiting";
pub(crate) const REQUESTS_FAILED: &str = "sapwood_requests_failed_total";
pub(crate) const STREAMS_PARKED: &str = "sapwood_streams_parked";
pub(crate) const KV_RATIO: &str = "sapwood_kv_cache_usage_ratio";
pub(crate) const KV_USED: &str = "sapwood_kv_blocks_used";
pub(crate) const KV_TOTAL: &str = "sapwood_kv_blocks_total";
pub(crate) const PREFIX_QUERIES: &str = "sapwood_prefix_cache_queries_total";
pub(crate) const PREFIX_HITS: &str = "sapwood_prefix_cache_hits_total";
pub(crate) const PREFIX_RESTORED: &str = "sapwood_prefix_cache_restored_tokens_total";
pub(crate) const PREFIX_SAVED_BYTES: &str = "sapwood_prefix_cache_saved_bytes";
pub(crate) const PREFIX_DISK_BYTES: &str = "sapwood_prefix_cache_disk_bytes";
pub(crate) const PREFIX_DISK_READ_BYTES: &str = "sapwood_prefix_cache_disk_read_bytes_total";
pub(crate) const PREFIX_DISK_WRITTEN_BYTES: &str = "sapwood_prefix_cache_disk_written_bytes_total";
pub(crate) const PREFIX_DISK_FAILURES: &str = "sapwood_prefix_cache_disk_failures_total";
pub(crate) const ENGINE_THREADS: &str = "sapwood_engine_threads";
pub(crate) const PREEMPTIONS: &str = "sapwood_preemptions_total";
pub(crate) const DRAFT_TOKENS: &str = "sapwood_draft_tokens_total";
pub(crate) const ACCEPTED_TOKENS: &str = "sapwood_accepted_tokens_total";
pub(crate) const PROMPT_TOKENS: &str = "sapwood_prompt_tokens_total";
pub(crate) const GENERATION_TOKENS: &str = "sapwood_generation_tokens_total";
pub(crate) const ENGINE_STEPS: &str = "sapwood_engine_steps_total";
pub(crate) const QUEUE_SECONDS: &str = "sapwood_queue_seconds";
pub(crate) const PREFILL_SECONDS: &str = "sapwood_prefill_seconds";
pub(crate) const DECODE_SECONDS: &str = "sapwood_decode_seconds";
pub(crate) const REQUEST_PROMPT_TOKENS: &str = "sapwood_request_prompt_tokens";
pub(crate) const REQUEST_GENERATION_TOKENS: &str = "sapwood_request_generation_tokens";
pub(crate) const REQUEST_N: &str = "sapwood_request_n";
pub(crate) const REQUEST_MAX_TOKENS: &str = "sapwood_request_max_tokens";
pub(crate) const STEP_SECONDS: &str = "sapwood_step_seconds";
pub(crate) const STEP_TOKENS: &str = "sapwood_step_tokens";
pub(crate) const BATCH_SIZE: &str = "sapwood_batch_size";
pub(crate) const REQUEST_SECONDS: &str = "sapwood_request_seconds";
pub(crate) const TIME_TO_FIRST_TOKEN: &str = "sapwood_time_to_first_token_seconds";
pub(crate) const INTER_TOKEN: &str = "sapwood_inter_token_seconds";
pub(crate) const OUTPUT_TOKEN: &str = "sapwood_time_per_output_token_seconds";
pub(crate) const INFERENCE_SECONDS: &str = "sapwood_inference_seconds";

pub(crate) const EVERGREEN_SESSIONS_OPEN: &str = "sapwood_evergreen_sessions_open";
pub(crate) const EVERGREEN_ACTIONS_OPEN: &str = "sapwood_evergreen_actions_open";
pub(crate) const EVERGREEN_FRAGMENTS: &str = "sapwood_evergreen_fragments_total";
pub(crate) const EVERGREEN_BYTES: &str = "sapwood_evergreen_bytes_total";
pub(crate) const EVERGREEN_ABORTS: &str = "sapwood_evergreen_aborts_total";
pub(crate) const EVERGREEN_FAILURES: &str = "sapwood_evergreen_failures_total";
pub(crate) const EVERGREEN_RETAINED_BYTES: &str = "sapwood_evergreen_retained_bytes";
pub(crate) const EVERGREEN_IGNORED: &str = "sapwood_evergreen_ignored_total";

pub(crate) const LMTP_CONNECTIONS_OPEN: &str = "sapwood_lmtp_connections_open";
pub(crate) const LMTP_REFUSED: &str = "sapwood_lmtp_refused_total";
pub(crate) const LMTP_MESSAGES: &str = "sapwood_lmtp_messages_total";
pub(crate) const LMTP_ITEMS: &str = "sapwood_lmtp_items_total";
pub(crate) const LMTP_IGNORED: &str = "sapwood_lmtp_ignored_total";

pub(crate) const UPSTREAM_SERVING: &str = "sapwood_upstream_serving";
pub(crate) const UPSTREAM_STREAMS: &str = "sapwood_upstream_streams_open";
pub(crate) const UPSTREAM_MOVED: &str = "sapwood_upstream_moved_total";

/// The names under which dashboards for vLLM look for the same numbers (OA-802).
pub(crate) mod vllm {
    pub(crate) const REQUESTS_RUNNING: &str = "vllm:num_requests_running";
    pub(crate) const REQUESTS_WAITING: &str = "vllm:num_requests_waiting";
    pub(crate) const KV_RATIO: &str = "vllm:kv_cache_usage_perc";
    pub(crate) const CACHE_CONFIG: &str = "vllm:cache_config_info";
    pub(crate) const PREFIX_QUERIES: &str = "vllm:prefix_cache_queries_total";
    pub(crate) const PREFIX_HITS: &str = "vllm:prefix_cache_hits_total";
    pub(crate) const PREEMPTIONS: &str = "vllm:num_preemptions_total";
    pub(crate) const DRAFT_TOKENS: &str = "vllm:spec_decode_num_draft_tokens_total";
    pub(crate) const ACCEPTED_TOKENS: &str = "vllm:spec_decode_num_accepted_tokens_total";
    pub(crate) const PROMPT_TOKENS: &str = "vllm:prompt_tokens_total";
    pub(crate) const GENERATION_TOKENS: &str = "vllm:generation_tokens_total";
    pub(crate) const REQUEST_SUCCESS: &str = "vllm:request_success_total";
    pub(crate) const TIME_TO_FIRST_TOKEN: &str = "vllm:time_to_first_token_seconds";
    pub(crate) const INTER_TOKEN: &str = "vllm:inter_token_latency_seconds";
    pub(crate) const OUTPUT_TOKEN: &str = "vllm:request_time_per_output_token_seconds";
    pub(crate) const REQUEST_SECONDS: &str = "vllm:e2e_request_latency_seconds";
    pub(crate) const QUEUE_SECONDS: &str = "vllm:request_queue_time_seconds";
    pub(crate) const PREFILL_SECONDS: &str = "vllm:request_prefill_time_seconds";
    pub(crate) const DECODE_SECONDS: &str = "vllm:request_decode_time_seconds";
    pub(crate) const INFERENCE_SECONDS: &str = "vllm:request_inference_time_seconds";
    pub(crate) const REQUEST_PROMPT_TOKENS: &str = "vllm:request_prompt_tokens";
    pub(crate) const REQUEST_GENERATION_TOKENS: &str = "vllm:request_generation_tokens";
    pub(crate) const REQUEST_N: &str = "vllm:request_params_n";
    pub(crate) const REQUEST_MAX_TOKENS: &str = "vllm:request_params_max_tokens";
    pub(crate) const STEP_TOKENS: &str = "vllm:iteration_tokens_total";
}

/// The names under which dashboards for Triton look for the same numbers (TR-1001).
pub(crate) mod triton {
    pub(crate) const SUCCESS: &str = "nv_inference_request_success";
    pub(crate) const FAILURE: &str = "nv_inference_request_failure";
    pub(crate) const COUNT: &str = "nv_inference_count";
    pub(crate) const EXECUTIONS: &str = "nv_inference_exec_count";
    pub(crate) const REQUEST_DURATION: &str = "nv_inference_request_duration_us";
    pub(crate) const QUEUE_DURATION: &str = "nv_inference_queue_duration_us";
    pub(crate) const INFER_DURATION: &str = "nv_inference_compute_infer_duration_us";
    pub(crate) const PENDING: &str = "nv_inference_pending_request_count";
    pub(crate) const LOAD: &str = "nv_model_load_duration_secs";
    pub(crate) const FIRST_RESPONSE: &str = "nv_inference_first_response_histogram_ms";
    pub(crate) const CACHE_BLOCKS: &str = "nv_trt_llm_kv_cache_block_metrics";
    pub(crate) const CPU_UTILIZATION: &str = "nv_cpu_utilization";
    pub(crate) const CPU_MEMORY_TOTAL: &str = "nv_cpu_memory_total_bytes";
    pub(crate) const CPU_MEMORY_USED: &str = "nv_cpu_memory_used_bytes";
}
