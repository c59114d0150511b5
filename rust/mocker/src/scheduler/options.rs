//! How a simulated engine schedules: its sizes, its policy, and how fast it is beside its timing model.

use dynamo_backend_common::DynamoError;

use crate::options::invalid;

const MAX_DRAFTS: usize = 5;

/// Whose scheduler is simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Backend {
    #[default]
    Vllm,
    Sglang,
    Trtllm,
}

/// The part of a request that a worker serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Role {
    #[default]
    Aggregated,
    Prefill,
    Decode,
}

/// Which running request gives way when blocks run out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PreemptionMode {
    /// The newest.
    #[default]
    Lifo,
    /// The oldest.
    Fifo,
}

/// The order of sglang's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SchedulePolicy {
    #[default]
    Fifo,
    /// Longest cached prefix first.
    Lpm,
}

/// What only the sglang scheduler has.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SglangOptions {
    pub(crate) schedule_policy: SchedulePolicy,
    pub(crate) max_prefill_tokens: usize,
    pub(crate) chunked_prefill_size: usize,
    pub(crate) clip_max_new_tokens: usize,
    pub(crate) schedule_conservativeness: f64,
}

impl Default for SglangOptions {
    fn default() -> Self {
        Self {
            schedule_policy: SchedulePolicy::Fifo,
            max_prefill_tokens: 16_384,
            chunked_prefill_size: 8192,
            clip_max_new_tokens: 4096,
            schedule_conservativeness: 1.0,
        }
    }
}

/// One rank of one simulated engine.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SchedulerOptions {
    pub(crate) backend: Backend,
    pub(crate) role: Role,
    pub(crate) num_gpu_blocks: usize,
    pub(crate) block_size: usize,
    /// Tokens of prompt and output together; `None`: no limit but the cache.
    pub(crate) max_model_len: Option<usize>,
    pub(crate) max_num_seqs: usize,
    pub(crate) max_num_batched_tokens: usize,
    pub(crate) enable_prefix_caching: bool,
    pub(crate) enable_chunked_prefill: bool,
    pub(crate) preemption_mode: PreemptionMode,
    /// Divides every time. 0: nothing takes time.
    pub(crate) speedup_ratio: f64,
    /// Divides the times of decode steps once more. 0: they take no time.
    pub(crate) decode_speedup_ratio: f64,
    /// Chance of each draft token to be accepted after the one before it; empty: no speculation.
    pub(crate) accept_rates: Vec<f64>,
    pub(crate) sglang: SglangOptions,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            backend: Backend::Vllm,
            role: Role::Aggregated,
            num_gpu_blocks: 16_384,
            block_size: 64,
            max_model_len: None,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            preemption_mode: PreemptionMode::Lifo,
            speedup_ratio: 1.0,
            decode_speedup_ratio: 1.0,
            accept_rates: Vec::new(),
            sglang: SglangOptions::default(),
        }
    }
}

impl SchedulerOptions {
    /// Fails, naming the field, where values do not go together.
    pub(crate) fn check(&self) -> Result<(), DynamoError> {
        if self.backend != Backend::Sglang && self.block_size < 2 {
            return Err(invalid(format!(
                "engine.block_size must be an integer of at least 2, got {}",
                self.block_size
            )));
        }
        if self.accept_rates.len() > MAX_DRAFTS {
            let count = self.accept_rates.len();
            return Err(invalid(format!("at most {MAX_DRAFTS} draft tokens, got {count} accept rates")));
        }
        if let Some(rate) = self.accept_rates.iter().find(|rate| !(0.0..=1.0).contains(*rate)) {
            return Err(invalid(format!("engine.aic_nextn_accept_rates must be in 0..1, got {rate}")));
        }
        if !self.accept_rates.is_empty() && self.decode_speedup_ratio != 1.0 {
            return Err(invalid(format!(
                "engine.decode_speedup_ratio must be 1 with speculation (aic_nextn), got {}",
                self.decode_speedup_ratio
            )));
        }
        if self.backend == Backend::Trtllm && self.role != Role::Aggregated {
            return Err(invalid("engine.worker_type: only aggregated is built for backend trtllm: use vllm or sglang"));
        }
        if self.backend == Backend::Sglang {
            if !self.enable_chunked_prefill {
                return Err(invalid("engine.enable_chunked_prefill cannot be false for backend sglang"));
            }
            if self.sglang.chunked_prefill_size % self.block_size != 0 {
                return Err(invalid(format!(
                    "engine.sglang.chunked_prefill_size must be a multiple of block_size {}, got {}",
                    self.block_size, self.sglang.chunked_prefill_size
                )));
            }
        }
        Ok(())
    }

    /// Returns how many tokens the whole cache holds.
    pub(crate) fn capacity_tokens(&self) -> usize {
        self.num_gpu_blocks.saturating_mul(self.block_size)
    }
}
