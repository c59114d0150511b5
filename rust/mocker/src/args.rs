//! From the command line of the mocker to its workers: one engine and one worker configuration each.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use dynamo_backend_common::{CommonArgs, DisaggregationMode, DynamoError, WorkerConfig};
use serde_json::{Value, json};

use crate::options::{AIS, MockOptions, invalid, read_configuration};
use crate::scheduler::Role;

const PREFILL_COMPONENT: &str = "prefill";

/// The flags of the mocker: those of `python -m dynamo.mocker`.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "mocker",
    about = "Workers without a model that behave like real ones: they schedule, cache, take time, \
                                   publish KV events and load, and answer with random tokens"
)]
pub(crate) struct Args {
    /// Directory of a model (tokenizer, chat template, sizes), or only a name
    model: Option<String>,

    /// The same as a flag
    #[arg(long, conflicts_with = "model")]
    model_path: Option<String>,

    /// Name that clients use [default: that of the path]
    #[arg(long, visible_alias = "served-model-name")]
    model_name: Option<String>,

    /// Workers in this process
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    num_workers: u16,

    /// Seconds between the starts of two workers; -1: 0.1 for 33 to 128 workers, 0.2 above
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    stagger_delay: f64,

    /// Seconds that a worker takes to start
    #[arg(long)]
    startup_time: Option<f64>,

    /// Data-parallel ranks of each worker
    #[arg(long, default_value_t = 1)]
    data_parallel_size: u32,

    /// File with the configuration as JSON, in place of the flags of the engine
    #[arg(long)]
    extra_engine_args: Option<PathBuf>,

    /// The old form of --disaggregation-mode prefill
    #[arg(long)]
    is_prefill_worker: bool,

    /// The old form of --disaggregation-mode decode
    #[arg(long)]
    is_decode_worker: bool,

    /// Whose scheduler is simulated
    #[arg(long, default_value = "vllm", value_parser = ["vllm", "sglang", "trtllm"])]
    engine_type: String,

    /// Blocks in the cache of each rank
    #[arg(long = "num-gpu-blocks-override", visible_alias = "num-gpu-blocks", default_value_t = 16_384)]
    num_gpu_blocks: u64,

    /// Tokens per block [default: vllm 64, sglang 1, trtllm 32]
    #[arg(long, alias = "sglang-page-size")]
    block_size: Option<u64>,

    /// Longest prompt and answer together [default: what the cache holds]
    #[arg(long)]
    max_model_len: Option<u64>,

    /// Requests that run at once
    #[arg(long, default_value_t = 256)]
    max_num_seqs: u64,

    /// Tokens that one pass computes (vllm, trtllm)
    #[arg(long, default_value_t = 8192)]
    max_num_batched_tokens: u64,

    /// Keep nothing of ended requests; no KV events either
    #[arg(long)]
    no_enable_prefix_caching: bool,

    /// Keep the blocks of ended requests and reuse them; this is so unless switched off
    #[arg(long, hide = true, conflicts_with = "no_enable_prefix_caching")]
    enable_prefix_caching: bool,

    /// Compute long prompts at once; not for sglang
    #[arg(long)]
    no_enable_chunked_prefill: bool,

    /// Compute long prompts in chunks; this is so unless switched off
    #[arg(long, hide = true, conflicts_with = "no_enable_chunked_prefill")]
    enable_chunked_prefill: bool,

    /// Which running request gives way when blocks run out: the newest or the oldest
    #[arg(long, default_value = "lifo", value_parser = ["lifo", "fifo"])]
    preemption_mode: String,

    /// Policy of trtllm; there is one
    #[arg(long, default_value = "guaranteed_no_evict", value_parser = ["guaranteed_no_evict"])]
    trtllm_capacity_scheduler_policy: String,

    /// Divides every time; 0: nothing takes time
    #[arg(long, default_value_t = 1.0)]
    speedup_ratio: f64,

    /// Divides the times of decode steps once more
    #[arg(long, default_value_t = 1.0)]
    decode_speedup_ratio: f64,

    /// Draft tokens of each decode step: speculative decoding
    #[arg(long = "ais-nextn", alias = "aic-nextn")]
    nextn: Option<u64>,

    /// Chance of each draft token to be accepted, a comma list [default: 0.85,0.3,0,0,0]
    #[arg(long = "ais-nextn-accept-rates", alias = "aic-nextn-accept-rates", value_delimiter = ',')]
    accept_rates: Option<Vec<f64>>,

    /// Seed of what is accepted, where worker i has seed + i, and of the token ids
    #[arg(long = "ais-mtp-seed", alias = "aic-mtp-seed", default_value_t = 42)]
    seed: u64,

    /// Begin answers with a thought: an object with start_thinking_token_id, end_thinking_token_id, thinking_ratio
    #[arg(long, value_name = "JSON")]
    reasoning: Option<String>,

    /// Answer requests that carry the annotation output_replay_id:KEY from this trace
    #[arg(long)]
    response_replay_trace_path: Option<String>,

    /// Speed in GB/s at which a prefill worker hands its prompt over [default: no time]
    #[arg(long)]
    kv_transfer_bandwidth: Option<f64>,

    /// What is handed over
    #[arg(long, default_value = "full_prompt", value_parser = ["full_prompt", "destination_missing"])]
    kv_transfer_timing_mode: String,

    /// Bytes of the cache for one token
    #[arg(long)]
    kv_bytes_per_token: Option<u64>,

    /// Order of the queue of sglang: fifo, or lpm (longest cached prefix first)
    #[arg(long, default_value = "fifo", value_parser = ["fifo", "fcfs", "lpm"])]
    sglang_schedule_policy: String,

    /// Prompt tokens of one pass of sglang
    #[arg(long, default_value_t = 16_384)]
    sglang_max_prefill_tokens: u64,

    /// Longest chunk of a prompt of sglang
    #[arg(long, default_value_t = 8192)]
    sglang_chunked_prefill_size: u64,

    /// Output of one request that admission of sglang reserves memory for, at most
    #[arg(long, default_value_t = 4096)]
    sglang_clip_max_new_tokens: u64,

    /// Scales the memory that admission of sglang reserves
    #[arg(long, default_value_t = 1.0)]
    sglang_schedule_conservativeness: f64,

    #[command(flatten)]
    refused: RefusedArgs,

    #[command(flatten)]
    common: CommonArgs,
}

/// Flags of the mocker in Python that are not built here: they end the start with a sentence that says so.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Not built in Rust")]
struct RefusedArgs {
    #[arg(long, hide = true)]
    zmq_kv_events_ports: Option<String>,
    #[arg(long, hide = true)]
    zmq_replay_ports: Option<String>,
    #[arg(long, hide = true)]
    bootstrap_ports: Option<String>,
    #[arg(long, hide = true)]
    planner_profile_data: Option<String>,
    #[arg(long, hide = true)]
    kv_cache_dtype: Option<String>,
    #[arg(long, hide = true)]
    num_host_blocks: Option<String>,
    #[arg(long, hide = true)]
    sglang_generate: bool,
    #[arg(long, hide = true, alias = "aic-perf-model")]
    ais_perf_model: Option<String>,
}

impl RefusedArgs {
    fn check(&self) -> Result<(), DynamoError> {
        let given = [
            ("--zmq-kv-events-ports", self.zmq_kv_events_ports.is_some(), "KV events go to the event plane"),
            ("--zmq-replay-ports", self.zmq_replay_ports.is_some(), "KV events go to the event plane"),
            ("--bootstrap-ports", self.bootstrap_ports.is_some(), "a prompt is handed over in the answer"),
            ("--planner-profile-data", self.planner_profile_data.is_some(), "use python -m dynamo.mocker"),
            ("--kv-cache-dtype", self.kv_cache_dtype.is_some(), "give --kv-bytes-per-token"),
            ("--num-host-blocks", self.num_host_blocks.is_some(), "there is no host tier"),
            ("--sglang-generate", self.sglang_generate, "there is no such route"),
            ("--ais-perf-model", self.ais_perf_model.is_some(), AIS),
        ];
        match given.iter().find(|(_, is_given, _)| *is_given) {
            Some((flag, _, instead)) => Err(invalid(format!("{flag} is not built in the mocker in Rust: {instead}"))),
            None => Ok(()),
        }
    }
}

/// One worker of a process.
#[derive(Clone, Debug)]
pub(crate) struct MockWorker {
    pub(crate) model: String,
    pub(crate) options: MockOptions,
    pub(crate) seed: u64,
    pub(crate) config: WorkerConfig,
}

/// The workers of one process, and the time between their starts.
#[derive(Clone, Debug)]
pub(crate) struct MockFleet {
    pub(crate) workers: Vec<MockWorker>,
    pub(crate) stagger: Duration,
}

impl Args {
    /// Returns what the flags ask for. Fails, naming the flag or the member, for what does not go together.
    pub(crate) fn fleet(&self) -> Result<MockFleet, DynamoError> {
        self.refused.check()?;
        let Some(path) = self.model.as_ref().or(self.model_path.as_ref()) else {
            return Err(invalid("MODEL is needed: a model directory, or any name"));
        };
        let mode = self.mode()?;
        let role = match mode {
            DisaggregationMode::Aggregated => Role::Aggregated,
            DisaggregationMode::Prefill => Role::Prefill,
            DisaggregationMode::Decode => Role::Decode,
            DisaggregationMode::Encode => {
                return Err(invalid("--disaggregation-mode encode: the mocker has no such role"));
            }
        };
        let options = read_configuration(&self.document(role)?)?;
        if options.scheduler.role != role {
            return Err(invalid("engine.worker_type and --disaggregation-mode differ: give both"));
        }
        let directory = Path::new(path);
        let base = directory.canonicalize().ok().filter(|_| directory.is_dir());
        let of_directory = base.and_then(|base| Some(base.file_name()?.to_string_lossy().into_owned()));
        let model = self.model_name.clone().or(of_directory).unwrap_or_else(|| path.clone());
        let mut config = self.common.worker_config();
        if mode == DisaggregationMode::Prefill && config.component == "backend" {
            config.component = PREFILL_COMPONENT.into();
        }
        config.disaggregation_mode = mode;
        config.model_name = path.clone();
        config.served_model_name = Some(model.clone());
        config.enable_local_indexer &= options.enable_local_indexer && options.has_kv_events();
        let worker = |number: u16| MockWorker {
            model: model.clone(),
            options: options.clone(),
            seed: options.seed + u64::from(number),
            config: config.clone(),
        };
        Ok(MockFleet { workers: (0..self.num_workers).map(worker).collect(), stagger: self.stagger() })
    }

    fn mode(&self) -> Result<DisaggregationMode, DynamoError> {
        let given = self.common.disaggregation_mode;
        match (self.is_prefill_worker, self.is_decode_worker) {
            (false, false) => Ok(given),
            (true, false) if given == DisaggregationMode::Aggregated => Ok(DisaggregationMode::Prefill),
            (false, true) if given == DisaggregationMode::Aggregated => Ok(DisaggregationMode::Decode),
            _ => Err(invalid(
                "--is-prefill-worker, --is-decode-worker and --disaggregation-mode say the same thing: give one of them",
            )),
        }
    }

    fn stagger(&self) -> Duration {
        let seconds = match self.num_workers {
            _ if self.stagger_delay >= 0.0 => self.stagger_delay,
            0..=32 => 0.0,
            33..=128 => 0.1,
            _ => 0.2,
        };
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
    }

    /// Returns the configuration that the flags, or the file, describe.
    fn document(&self, role: Role) -> Result<Value, DynamoError> {
        if let Some(path) = &self.extra_engine_args {
            let wrong = |error: String| invalid(format!("{} cannot be read as JSON: {error}", path.display()));
            let text = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
            return serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()));
        }
        let reasoning = self.reasoning.as_deref().map(serde_json::from_str::<Value>).transpose();
        let reasoning = reasoning.map_err(|error| invalid(format!("--reasoning is not JSON: {error}")))?;
        let policy = if self.sglang_schedule_policy == "fcfs" { "fifo" } else { &self.sglang_schedule_policy };
        let role = match role {
            Role::Aggregated => "aggregated",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        Ok(json!({
            "engine": {
                "backend": self.engine_type,
                "num_gpu_blocks": self.num_gpu_blocks,
                "block_size": self.block_size,
                "max_model_len": self.max_model_len,
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "enable_prefix_caching": !self.no_enable_prefix_caching,
                "enable_chunked_prefill": !self.no_enable_chunked_prefill,
                "speedup_ratio": self.speedup_ratio,
                "decode_speedup_ratio": self.decode_speedup_ratio,
                "aic_nextn": self.nextn,
                "aic_nextn_accept_rates": self.accept_rates,
                "aic_mtp_seed": self.seed,
                "worker_type": role,
                "preemption_mode": self.preemption_mode,
                "kv_transfer_bytes_per_token": self.kv_bytes_per_token,
                "kv_transfer_bandwidth": self.kv_transfer_bandwidth,
                "kv_transfer_timing_mode": self.kv_transfer_timing_mode,
                "sglang": {
                    "schedule_policy": policy,
                    "max_prefill_tokens": self.sglang_max_prefill_tokens,
                    "chunked_prefill_size": self.sglang_chunked_prefill_size,
                    "clip_max_new_tokens": self.sglang_clip_max_new_tokens,
                    "schedule_conservativeness": self.sglang_schedule_conservativeness,
                },
            },
            "dp_size": self.data_parallel_size,
            "startup_time": self.startup_time,
            "dynamo": {"reasoning": reasoning, "response_replay_trace_path": self.response_replay_trace_path},
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::SchedulerOptions;

    fn fleet(flags: &[&str]) -> Result<MockFleet, DynamoError> {
        Args::try_parse_from([&["mocker"], flags].concat()).expect("flags").fleet()
    }

    #[test]
    fn the_defaults_of_the_flags_are_those_of_the_configuration() {
        let made = fleet(&["m"]).expect("a fleet");
        assert_eq!(made.workers[0].options.scheduler, SchedulerOptions::default());
        assert_eq!(made.workers[0].config.served_model_name.as_deref(), Some("m"));
        assert_eq!(made.workers[0].config.component, "backend");
    }

    #[test]
    fn roles_have_components_and_workers_have_seeds() {
        let made = fleet(&["--model-path", "m", "--is-prefill-worker", "--num-workers", "3"]).expect("a fleet");
        assert_eq!(made.workers[0].config.component, "prefill");
        assert_eq!(made.workers.iter().map(|worker| worker.seed).collect::<Vec<_>>(), [42, 43, 44]);
        let decode = fleet(&["m", "--disaggregation-mode", "decode"]).expect("a fleet");
        assert!(!decode.workers[0].config.enable_local_indexer);
    }

    #[test]
    fn what_is_not_built_says_so() {
        for (flags, words) in [
            (&["m", "--zmq-kv-events-ports", "1"][..], "--zmq-kv-events-ports is not built"),
            (&["m", "--bootstrap-ports", "1"], "--bootstrap-ports is not built"),
            (&["m", "--planner-profile-data", "x"], "--planner-profile-data is not built"),
            (&[], "MODEL is needed"),
            (&["m", "--is-prefill-worker", "--is-decode-worker"], "give one of them"),
            (&["m", "--block-size", "1"], "engine.block_size"),
            (&["m", "--extra-engine-args", "/nowhere.json"], "/nowhere.json cannot be read"),
        ] {
            let error = fleet(flags).err().map(|error| error.message().to_owned()).unwrap_or_default();
            assert!(error.contains(words), "{flags:?}: {error:?}");
        }
    }
}
